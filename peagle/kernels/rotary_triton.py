# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, check-untyped-defs=False
"""The Triton version of rotary.py: in place, every rounding where the torch version has one."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


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
    half: tl.constexpr = D // 2
    dtype = qkv.dtype.element_ty
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    mask = (h < H + G)[:, None]
    cols = tl.arange(0, half)
    at = qkv + row * qkv_row + (h * D)[:, None] + cols[None, :]
    x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(at + half, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        mean = (tl.sum(x * x, 1) + tl.sum(y * y, 1)) / D
        inverse = 1.0 / tl.sqrt(mean + eps)
        is_q = (h < H)[:, None]
        weight_x = tl.where(is_q, tl.load(q_norm + cols)[None, :], tl.load(k_norm + cols)[None, :]).to(tl.float32)
        weight_y = tl.where(is_q, tl.load(q_norm + half + cols)[None, :], tl.load(k_norm + half + cols)[None, :])
        x = (weight_x * (x * inverse[:, None]).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        y = (weight_y.to(tl.float32) * (y * inverse[:, None]).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    # The second halves of cos and sin repeat the first.
    c = tl.load(cos + row * angle_row + cols).to(tl.float32)[None, :]
    s = tl.load(sin + row * angle_row + cols).to(tl.float32)[None, :]
    first = (x * c).to(dtype).to(tl.float32) - (y * s).to(dtype).to(tl.float32)
    second = (y * c).to(dtype).to(tl.float32) + (x * s).to(dtype).to(tl.float32)
    tl.store(at, first.to(dtype), mask=mask)
    tl.store(at + half, second.to(dtype), mask=mask)


def split_rotate_triton(
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
            # x * cos + y * sin as two rounded products and a sum, as torch has it
            enable_fp_fusion=qkv.dtype != torch.float32,
        )
    return qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
