# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, check-untyped-defs=False
"""QK norm and rotary embedding in Triton, in place, and the backward pass without the norm. Rounds wherever the torch
version rounds.

Shapes: T rows, H query heads, G key/value heads, d head width, X = (H + 2 G) d.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from peagle.kernels.attention.types import QKNormRope
from peagle.kernels.triton_utils import wait_for_previous


@triton.jit
def inverse_rms(squares, eps, AXIS: tl.constexpr, D: tl.constexpr):
    """Returns 1 / RMS of heads of width D along AXIS. With fp64 squares the order of summation does not show."""
    mean = tl.sum(squares, AXIS).to(tl.float32) / D
    return tl.expand_dims(1.0 / tl.sqrt(mean + eps), AXIS)


@triton.jit
def rotate_pairs(x, other, weight, other_weight, inverse, c, s, QK_NORM: tl.constexpr):
    """Returns x normed and rotated; `other` holds the other entry of each pair.

    `s` is negative for the first entry of a pair. Needs a kernel compiled without fused multiply-adds, because torch
    rounds both products and their sum.
    """
    dtype = x.dtype
    x = x.to(tl.float32)
    other = other.to(tl.float32)
    if QK_NORM:
        x = (weight * (x * inverse).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        other = (other_weight * (other * inverse).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    return ((x * c).to(dtype).to(tl.float32) + (other * s).to(dtype).to(tl.float32)).to(dtype)


@triton.jit
def _rope_kernel(
    qkv, cos, sin, q_norm, k_norm,
    qkv_stride, angle_stride, eps,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, QK_NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Norms and rotates HEADS heads of one row in place."""
    wait_for_previous(PDL)
    half: tl.constexpr = D // 2
    row = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    mask = (h < H + G)[:, None]
    cols = tl.arange(0, half)
    at = qkv + row * qkv_stride + (h * D)[:, None] + cols[None, :]
    x = tl.load(at, mask=mask, other=0.0)
    y = tl.load(at + half, mask=mask, other=0.0)
    weight_x, weight_y, inverse = 1.0, 1.0, 1.0
    if QK_NORM:
        wide_x, wide_y = x.to(tl.float32), y.to(tl.float32)
        squares = (wide_x * wide_x).to(tl.float64) + (wide_y * wide_y).to(tl.float64)
        inverse = inverse_rms(squares, eps, 1, D)
        is_q = (h < H)[:, None]
        weight_x = tl.where(is_q, tl.load(q_norm + cols)[None, :], tl.load(k_norm + cols)[None, :]).to(tl.float32)
        weight_y = tl.where(is_q, tl.load(q_norm + half + cols)[None, :], tl.load(k_norm + half + cols)[None, :])
        weight_y = weight_y.to(tl.float32)
    # The second half of cos and sin equals the first.
    c = tl.load(cos + row * angle_stride + cols).to(tl.float32)[None, :]
    s = tl.load(sin + row * angle_stride + cols).to(tl.float32)[None, :]
    first = rotate_pairs(x, y, weight_x, weight_y, inverse, c, -s, QK_NORM)
    second = rotate_pairs(y, x, weight_y, weight_x, inverse, c, s, QK_NORM)
    tl.store(at, first, mask=mask)
    tl.store(at + half, second, mask=mask)


def split_qkv_rope_triton(
    qkv_TX: Tensor, heads: int, kv_heads: int, rope: QKNormRope, pdl: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """As `split_qkv_rope`, in place; returns views of `qkv_TX`."""
    q, k, v = qkv_TX.unflatten(1, (heads + 2 * kv_heads, -1)).split([heads, kv_heads, kv_heads], 1)
    rotate_triton(q, k, rope, pdl)
    return q, k, v


def rotate_triton(q_THd: Tensor, k_TGd: Tensor, rope: QKNormRope, pdl: bool = False) -> None:
    """Norms and rotates q and k in place; k must follow q in each row, as in the fused QKV projection."""
    (rows, heads, width), kv_heads, cos = q_THd.shape, k_TGd.shape[1], rope.cos
    assert q_THd.stride() == k_TGd.stride() and q_THd.stride()[1:] == (width, 1)
    assert k_TGd.data_ptr() - q_THd.data_ptr() == heads * width * q_THd.itemsize
    assert cos.stride() == rope.sin.stride() and cos.stride(-1) == 1
    block = min(16, triton.next_power_of_2(heads + kv_heads))
    if rows:
        _rope_kernel[(rows, triton.cdiv(heads + kv_heads, block))](
            q_THd, cos, rope.sin, rope.q_norm if rope.has_norm else q_THd, rope.k_norm if rope.has_norm else q_THd,
            q_THd.stride(0), cos.stride(0), rope.eps,
            H=heads, G=kv_heads, D=width, HEADS=block, QK_NORM=rope.has_norm, PDL=pdl,
            launch_pdl=pdl, num_warps=4 if width >= 128 else 2, enable_fp_fusion=False,
        )  # fmt: skip


class RopeFunction(torch.autograd.Function):
    """Rotates queries and keys of the fused QKV projection in place. The backward pass rotates the other way."""

    @staticmethod
    def forward(ctx: Any, qkv_TX: Tensor, heads: int, kv_heads: int, rope: QKNormRope) -> Tensor:
        ctx.save_for_backward(rope.cos, rope.sin)
        ctx.heads, ctx.kv_heads = heads, kv_heads
        ctx.mark_dirty(qkv_TX)
        split_qkv_rope_triton(qkv_TX, heads, kv_heads, rope)
        return qkv_TX

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dqkv_TX: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        dqkv_TX = dqkv_TX.clone(memory_format=torch.contiguous_format)  # autograd may share a gradient tensor
        split_qkv_rope_triton(dqkv_TX, ctx.heads, ctx.kv_heads, QKNormRope(cos, -sin))
        return dqkv_TX, None, None, None


def split_qkv_rope_autograd(
    qkv_TX: Tensor, heads: int, kv_heads: int, rope: QKNormRope
) -> tuple[Tensor, Tensor, Tensor]:
    """As `split_qkv_rope` without norms; returns views of `qkv_TX`, which must not be used again."""
    qkv = RopeFunction.apply(qkv_TX, heads, kv_heads, rope).unflatten(1, (heads + 2 * kv_heads, -1))
    return qkv.split([heads, kv_heads, kv_heads], 1)
