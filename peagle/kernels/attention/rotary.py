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
    width = rope.cos.shape[-1]
    triton_width = width >= 16 and not width & (width - 1)
    if supports_triton_autograd(qkv_TX) and triton_width and not rope.has_norm:
        from peagle.kernels.attention.rotary_triton import split_qkv_rope_autograd

        return split_qkv_rope_autograd(qkv_TX, heads, kv_heads, rope)
    if supports_triton_float(qkv_TX) and triton_width and not qkv_TX.requires_grad:  # in place: no gradients
        from peagle.kernels.attention.rotary_triton import split_qkv_rope_triton

        return split_qkv_rope_triton(qkv_TX, heads, kv_heads, rope, supports_pdl(qkv_TX.device))
    q, k, v = qkv_TX.unflatten(1, (heads + 2 * kv_heads, -1)).split([heads, kv_heads, kv_heads], 1)
    return *rope.apply(q, k), v


def rotate_in_place(q_THd: Tensor, k_TGd: Tensor, rope: QKNormRope) -> None:
    """Norms and rotates q and k, which are views of the fused QKV projection on a GPU."""
    from peagle.kernels.attention.rotary_triton import rotate_triton

    rotate_triton(q_THd, k_TGd, rope, supports_pdl(q_THd.device))
