"""Splits the fused QKV projection into q, k and v, and applies QK norm and rotary embedding.

Shapes: T rows, H query heads, G key/value heads, d head width, X = (H + 2 G) d.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.kernels.triton_utils import supports_triton_autograd, supports_triton_float


@dataclass(frozen=True)
class QKNormRope:
    """Rotary angles [T, 1, d] of a step's rows, and the weights of the optional RMS norms of q and k."""

    cos: Tensor
    sin: Tensor
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 0.0

    @property
    def has_norm(self) -> bool:
        return self.q_norm is not None and self.k_norm is not None

    def apply(self, q_THd: Tensor, k_TGd: Tensor) -> tuple[Tensor, Tensor]:
        """Returns normed and rotated copies of q and k, computed in plain torch."""
        if self.q_norm is not None and self.k_norm is not None:
            q_THd, k_TGd = _rms_norm(q_THd, self.q_norm, self.eps), _rms_norm(k_TGd, self.k_norm, self.eps)
        return _rotate(q_THd, self.cos, self.sin), _rotate(k_TGd, self.cos, self.sin)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = x.float() if x.dtype != torch.float64 else x
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return weight * y.to(x.dtype)


def _rotate(x_THd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x_THd.chunk(2, -1)
    return x_THd * cos + torch.cat([-second, first], -1) * sin


def split_qkv_rope_torch(
    qkv_TX: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    kv_heads: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `split_qkv_rope`, in plain torch and never in place."""
    qkv = qkv_TX.unflatten(1, (heads + 2 * kv_heads, -1))
    qk, v = qkv.split([heads + kv_heads, kv_heads], dim=1)
    if q_norm is not None and k_norm is not None:
        q, k = qk.split([heads, kv_heads], dim=1)
        qk = torch.cat([_rms_norm(q, q_norm, eps), _rms_norm(k, k_norm, eps)], 1)
    q, k = _rotate(qk, cos, sin).split([heads, kv_heads], dim=1)
    return q, k, v


def split_qkv_rope(
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
    """Returns q [T, H, d], k [T, G, d] and v [T, G, d], with q and k normed (if weights are given) and rotated.

    `cos` and `sin` are [T, 1, d]. May rotate in place and return views of `qkv_TX`, so that must not be used again.
    `pdl` enables programmatic dependent launch: the kernel may start before its predecessor has ended and then waits
    for it.
    """
    width = cos.shape[-1]
    triton_width = width >= 16 and not width & (width - 1)
    has_norm = q_norm is not None or k_norm is not None
    if supports_triton_autograd(qkv_TX) and triton_width and not has_norm:
        from peagle.kernels.autograd import split_qkv_rope_autograd

        return split_qkv_rope_autograd(qkv_TX, cos, sin, heads, kv_heads)
    if not supports_triton_float(qkv_TX) or qkv_TX.requires_grad or not triton_width:  # in place: no gradients
        return split_qkv_rope_torch(qkv_TX, cos, sin, heads, kv_heads, q_norm, k_norm, eps)
    from peagle.kernels.attention.rotary_triton import split_qkv_rope_triton

    return split_qkv_rope_triton(qkv_TX, cos, sin, heads, kv_heads, q_norm, k_norm, eps, pdl)
