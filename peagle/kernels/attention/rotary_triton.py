# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, check-untyped-defs=False
"""The Triton version of rotary.py: in place, every rounding where the torch version has one."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def inverse_rms(squares, eps, AXIS: tl.constexpr, D: tl.constexpr):
    """Of heads of width D that lie along AXIS, from fp64 squares: there no order of summing shows in the result."""
    mean = tl.sum(squares, AXIS).to(tl.float32) / D
    return tl.expand_dims(1.0 / tl.sqrt(mean + eps), AXIS)


@triton.jit
def rotated(x, other, weight, other_weight, inverse, c, s, NORM: tl.constexpr):
    """x normed and turned, where `other` holds the entry that each of x turns together with.

    `s` is negative where x is the first of its pair. Needs a kernel compiled without fused multiply-adds: the compiler
    would make two rounded products and a rounded sum one operation, in bf16 too.
    """
    dtype = x.dtype
    x = x.to(tl.float32)
    other = other.to(tl.float32)
    if NORM:
        x = (weight * (x * inverse).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        other = (other_weight * (other * inverse).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    return ((x * c).to(dtype).to(tl.float32) + (other * s).to(dtype).to(tl.float32)).to(dtype)


@triton.jit
def _rotate_kernel(
    qkv,
    cos,
    sin,
    q_norm,
    k_norm,
    qkv_row,
    angle_row,
    eps,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    half: tl.constexpr = D // 2
    row = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    mask = (h < H + G)[:, None]
    cols = tl.arange(0, half)
    at = qkv + row * qkv_row + (h * D)[:, None] + cols[None, :]
    x = tl.load(at, mask=mask, other=0.0)
    y = tl.load(at + half, mask=mask, other=0.0)
    weight_x, weight_y, inverse = 1.0, 1.0, 1.0
    if NORM:
        wide_x, wide_y = x.to(tl.float32), y.to(tl.float32)
        squares = (wide_x * wide_x).to(tl.float64) + (wide_y * wide_y).to(tl.float64)
        inverse = inverse_rms(squares, eps, 1, D)
        is_q = (h < H)[:, None]
        weight_x = tl.where(is_q, tl.load(q_norm + cols)[None, :], tl.load(k_norm + cols)[None, :]).to(tl.float32)
        weight_y = tl.where(is_q, tl.load(q_norm + half + cols)[None, :], tl.load(k_norm + half + cols)[None, :])
        weight_y = weight_y.to(tl.float32)
    # The second halves of cos and sin repeat the first.
    c = tl.load(cos + row * angle_row + cols).to(tl.float32)[None, :]
    s = tl.load(sin + row * angle_row + cols).to(tl.float32)[None, :]
    first = rotated(x, y, weight_x, weight_y, inverse, c, -s, NORM)
    second = rotated(y, x, weight_y, weight_x, inverse, c, s, NORM)
    tl.store(at, first, mask=mask)
    tl.store(at + half, second, mask=mask)


def split_qkv_rope_triton(
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
    qkv = qkv_TX.unflatten(1, (heads + 2 * kv_heads, -1))
    width = qkv.shape[-1]
    if width & (width - 1) or width < 16:
        raise ValueError(f"head width {width}: the Triton rotation takes powers of two from 16")
    assert qkv.stride(2) == 1 and qkv.stride(1) == width
    assert cos.stride() == sin.stride() and cos.stride(-1) == 1
    pdl = pdl and qkv.is_cuda  # the interpreter knows nothing of it
    norm = q_norm is not None and k_norm is not None
    block = min(16, triton.next_power_of_2(heads + kv_heads))
    if len(qkv):
        _rotate_kernel[(len(qkv), triton.cdiv(heads + kv_heads, block))](
            qkv,
            cos,
            sin,
            q_norm if norm else qkv,
            k_norm if norm else qkv,
            qkv.stride(0),
            cos.stride(0),
            eps,
            H=heads,
            G=kv_heads,
            D=width,
            HEADS=block,
            NORM=norm,
            PDL=pdl,
            launch_pdl=pdl,
            num_warps=4 if width >= 128 else 2,
            enable_fp_fusion=False,
        )
    return qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
