"""From the merged query/key/value product to rotated queries and keys, in one pass.

Knows nothing about models: norm weights and angles come as tensors.

Shapes: T rows, H heads, G key/value heads, d head width, X = (H + 2 G) d.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.kernels.triton_utils import supports_triton_autograd


@dataclass(frozen=True)
class Rotation:
    """What turns queries and keys: angles as `Rope` makes them, [T, 1, d], and the norms before it, if any."""

    cos: Tensor
    sin: Tensor
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 0.0

    @property
    def normed(self) -> bool:
        return self.q_norm is not None and self.k_norm is not None

    def turn(self, q_THd: Tensor, k_TGd: Tensor) -> tuple[Tensor, Tensor]:
        """By plain torch, into new tensors."""
        if self.q_norm is not None and self.k_norm is not None:
            q_THd, k_TGd = _norm(q_THd, self.q_norm, self.eps), _norm(k_TGd, self.k_norm, self.eps)
        return _rotate(q_THd, self.cos, self.sin), _rotate(k_TGd, self.cos, self.sin)


def split_rotate_torch(
    qkv_TX: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    kv_heads: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    qkv = qkv_TX.unflatten(1, (heads + 2 * kv_heads, -1))
    qk, v = qkv.split([heads + kv_heads, kv_heads], dim=1)
    if q_norm is not None and k_norm is not None:
        q, k = qk.split([heads, kv_heads], dim=1)
        qk = torch.cat([_norm(q, q_norm, eps), _norm(k, k_norm, eps)], 1)
    q, k = _rotate(qk, cos, sin).split([heads, kv_heads], dim=1)
    return q, k, v


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = x.float() if x.dtype != torch.float64 else x
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return weight * y.to(x.dtype)


def _rotate(x_THd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x_THd.chunk(2, -1)
    return x_THd * cos + torch.cat([-second, first], -1) * sin


def split_rotate(
    qkv_TX: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    kv_heads: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    pdl: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """q [T, H, d], k [T, G, d] and v [T, G, d] of the merged product, q and k normed (if given weights) and rotated.

    `cos` and `sin` are [T, 1, d] as `Rope` makes them, once per step for all layers. May rotate in place, so the
    product must not be read again; what comes back may be views of it, with rows X apart.
    `pdl`: the kernel may be launched before the one ahead of it has ended, and then waits for it itself.
    """
    width = cos.shape[-1]
    normed = q_norm is not None or k_norm is not None
    if supports_triton_autograd(qkv_TX) and width >= 16 and not width & (width - 1) and not normed:
        from peagle.kernels.autograd import split_rotate_trained

        return split_rotate_trained(qkv_TX, cos, sin, heads, kv_heads)
    kinds = (torch.bfloat16, torch.float16, torch.float32)
    plain = not qkv_TX.is_cuda or qkv_TX.requires_grad or qkv_TX.dtype not in kinds  # in place: no gradients
    if plain or width < 16 or width & (width - 1) or importlib.util.find_spec("triton") is None:
        return split_rotate_torch(qkv_TX, cos, sin, heads, kv_heads, q_norm, k_norm, eps)
    from peagle.kernels.attention.rotary_triton import split_rotate_triton

    return split_rotate_triton(qkv_TX, cos, sin, heads, kv_heads, q_norm, k_norm, eps, pdl)
