"""Splits the fused QKV projection into q, k and v, and applies QK norm and rotary embedding.

Shapes: T rows, H query heads, G key/value heads, d head width, X = (H + 2 G) d.
"""

from torch import Tensor

from peagle.kernels.attention.types import QKNormRope
from peagle.kernels.triton_utils import supports_pdl, supports_triton_autograd, supports_triton_float


def split_qkv_rope(qkv_TX: Tensor, heads: int, kv_heads: int, rope: QKNormRope) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q [T, H, d], k [T, G, d] and v [T, G, d], with q and k normed (if weights are given) and rotated.

    May rotate in place and return views of `qkv_TX`, so that must not be used again.
    """
    if supports_triton_autograd(qkv_TX) and _is_triton_width(rope) and not rope.has_norm:
        from peagle.kernels.attention.rotary_triton import split_qkv_rope_autograd

        return split_qkv_rope_autograd(qkv_TX, heads, kv_heads, rope)
    q, k, v = qkv_TX.unflatten(1, (heads + 2 * kv_heads, -1)).split([heads, kv_heads, kv_heads], 1)
    return *apply_rope(q, k, rope), v


def apply_rope(q_THd: Tensor, k_TGd: Tensor, rope: QKNormRope) -> tuple[Tensor, Tensor]:
    """Returns q and k normed (if weights are given) and rotated; both are views of one fused QKV projection, in which
    they may be rotated in place."""
    if supports_triton_float(q_THd) and _is_triton_width(rope) and not q_THd.requires_grad:  # in place: no gradients
        from peagle.kernels.attention.rotary_triton import rotate_triton

        rotate_triton(q_THd, k_TGd, rope, supports_pdl(q_THd.device))
        return q_THd, k_TGd
    return rope.apply(q_THd, k_TGd)


def _is_triton_width(rope: QKNormRope) -> bool:
    width = rope.cos.shape[-1]
    return width >= 16 and not width & (width - 1)
