"""RMS norm, SwiGLU and rotary embedding with hand-written backward kernels, for training.

The forward pass uses the inference kernels. The backward pass keeps only the inputs, in their own dtype, where plain
torch keeps several fp32 copies. Used for 16-bit tensors on a GPU; everything else uses the `*_torch` versions with
autograd, which are the reference of these.

Shapes: T rows, D width, I half of a gated projection's width, X width of all heads.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from peagle.kernels.attention.rotary_triton import split_qkv_rope_triton
from peagle.kernels.attention.types import QKNormRope
from peagle.kernels.norm.rms_norm_triton import rms_norm_triton, silu_mul_triton

_MAX_NORM_PROGRAMS = 1024  # of the norm's backward pass; each sums the weight's gradient over its rows


@triton.jit
def _rms_norm_backward_kernel(
    x_ptr, weight_ptr, dy_ptr, dx_ptr, dweight_ptr,
    T, D, x_stride, dy_stride, eps,
    PROGRAM_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dx = (g - n mean(g n)) / rms with n = x / rms and g = weight dy. Sums the program's rows into its own dweight."""
    program = tl.program_id(0)
    d = tl.arange(0, BLOCK)
    inside = d < D
    weight = tl.load(weight_ptr + d, mask=inside, other=0.0).to(tl.float32)
    dweight = tl.zeros([BLOCK], dtype=tl.float32)
    for i in range(PROGRAM_ROWS):
        row = (program * PROGRAM_ROWS + i).to(tl.int64)
        valid = inside & (row < T)
        x = tl.load(x_ptr + row * x_stride + d, mask=valid, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * dy_stride + d, mask=valid, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(x * x, 0) / D + eps)
        n = x * inverse
        dweight += dy * n
        g = dy * weight
        dx = (g - n * (tl.sum(g * n, 0) / D)) * inverse
        tl.store(dx_ptr + row * D + d, dx.to(dx_ptr.dtype.element_ty), mask=valid)
    tl.store(dweight_ptr + program * D + d, dweight, mask=inside)


@triton.jit
def _silu_mul_backward_kernel(y_ptr, dout_ptr, dy_ptr, HALF, y_stride, dout_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < HALF
    gate = tl.load(y_ptr + row * y_stride + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(y_ptr + row * y_stride + HALF + i, mask=inside, other=0.0).to(tl.float32)
    dout = tl.load(dout_ptr + row * dout_stride + i, mask=inside, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    silu = gate * sigmoid
    dtype = dy_ptr.dtype.element_ty
    at = dy_ptr + row * 2 * HALF + i
    tl.store(at, (dout * up * (sigmoid + silu * (1.0 - sigmoid))).to(dtype), mask=inside)
    tl.store(at + HALF, (dout * silu).to(dtype), mask=inside)


class RMSNormFunction(torch.autograd.Function):
    """`rms_norm`, differentiable; saves its input and weight."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x_TD, weight_D)
        ctx.eps = eps
        return rms_norm_triton(x_TD, weight_D, eps, pdl=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, weight_D = ctx.saved_tensors
        T, D = x_TD.shape
        dx_TD = torch.empty_like(x_TD, memory_format=torch.contiguous_format)
        dy_TD = dy_TD if dy_TD.stride(1) == 1 else dy_TD.contiguous()
        program_rows = triton.next_power_of_2(max(1, triton.cdiv(T, _MAX_NORM_PROGRAMS)))
        programs = triton.cdiv(T, program_rows)
        dweight_PD = torch.empty(programs, D, dtype=torch.float32, device=x_TD.device)
        block = triton.next_power_of_2(D)
        if T:
            _rms_norm_backward_kernel[(programs,)](
                *(x_TD, weight_D, dy_TD, dx_TD, dweight_PD),
                *(T, D, x_TD.stride(0), dy_TD.stride(0), ctx.eps),
                PROGRAM_ROWS=program_rows,
                BLOCK=block,
                num_warps=max(1, min(16, block // 256)),
            )
        dweight = dweight_PD.sum(0).to(weight_D.dtype) if ctx.needs_input_grad[1] else None
        return dx_TD, dweight, None


class SiluMulFunction(torch.autograd.Function):
    """`silu_mul`, differentiable; saves its input."""

    @staticmethod
    def forward(ctx: Any, y_T2I: Tensor) -> Tensor:
        ctx.save_for_backward(y_T2I)
        return silu_mul_triton(y_T2I, pdl=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_TI: Tensor) -> Tensor:
        (y_T2I,) = ctx.saved_tensors
        T, half = dout_TI.shape
        dout_TI = dout_TI if dout_TI.stride(1) == 1 else dout_TI.contiguous()
        dy_T2I = torch.empty(T, 2 * half, dtype=y_T2I.dtype, device=y_T2I.device)
        block = 1024
        if T:
            _silu_mul_backward_kernel[(T, triton.cdiv(half, block))](
                y_T2I, dout_TI, dy_T2I, half, y_T2I.stride(0), dout_TI.stride(0), BLOCK=block, num_warps=4
            )
        return dy_T2I


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
