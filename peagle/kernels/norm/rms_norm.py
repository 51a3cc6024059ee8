"""The residual stream; RMS norms, alone, after an addition or several side by side; and SwiGLU's gate.

`rms_norm`, `add_rms_norm`, `norm_cat` and `silu_mul` pick the torch reference or a Triton kernel, one launch each that
rounds where the reference rounds. For training on a GPU in 16 bits, hand-written backward kernels keep only the inputs,
in their own dtype, where plain torch keeps several fp32 copies.

Sums of squares are taken in fp64, whose rounding errors vanish in fp32, so 1 / rms has the same bits in every kernel
here and in the GEMMs, in whatever order the squares are added.

Shapes: T rows, K or D width, I half of a gated projection's width.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# (kernels annotate compile-time constants only; the functions that launch them are typed)

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from peagle.kernels.triton_utils import HAVE_TRITON, pdl_launch_options, supports_triton, supports_triton_autograd

_MAX_NORM_PROGRAMS = 1024  # of the norm's backward pass; each sums the weight's gradient over its rows

if HAVE_TRITON:
    import triton
    import triton.language as tl

    from peagle.kernels.triton_utils import wait_for_previous

    @triton.jit
    def order_independent_sum(x):
        """Sums over the first axis in fp64, so that the order of additions does not show once rounded to fp32."""
        return tl.sum(x.to(tl.float64), 0)

    @triton.jit
    def _normed(x, weight, K, eps, DTYPE: tl.constexpr):
        """Rounds before the multiplication by the weight, as the torch reference does."""
        y = x * tl.rsqrt(order_independent_sum(x * x).to(tl.float32) / K + eps)
        return (y.to(DTYPE).to(tl.float32) * weight.to(tl.float32)).to(DTYPE)

    @triton.jit
    def _rms_norm_kernel(
        x_ptr, residual_ptr, weight_ptr, y_ptr, total_ptr, K, x_stride, residual_stride, eps,
        BLOCK_K: tl.constexpr, PDL: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        k = tl.arange(0, BLOCK_K)
        # No kernel writes weights, so they may be read before the wait.
        weight = tl.load(weight_ptr + k, mask=k < K, other=0.0)
        wait_for_previous(PDL)
        dtype = x_ptr.dtype.element_ty
        x = tl.load(x_ptr + row * x_stride + k, mask=k < K, other=0.0).to(tl.float32)
        if residual_ptr is not None:
            residual = tl.load(residual_ptr + row * residual_stride + k, mask=k < K, other=0.0)
            total = (x + residual.to(tl.float32)).to(dtype)
            tl.store(total_ptr + row * K + k, total, mask=k < K)
            x = total.to(tl.float32)
        tl.store(y_ptr + row * K + k, _normed(x, weight, K, eps, dtype), mask=k < K)

    @triton.jit
    def _norm_cat_kernel(parts, weights, strides, y_ptr, K, eps, BLOCK_K: tl.constexpr, PDL: tl.constexpr):
        """Writes the norms of all parts side by side; one program per row and part."""
        row = tl.program_id(0).to(tl.int64)
        k = tl.arange(0, BLOCK_K)
        y_ptr += row * len(parts) * K + tl.program_id(1) * K
        wait_for_previous(PDL)
        for i in tl.static_range(len(parts)):
            if tl.program_id(1) == i:
                weight = tl.load(weights[i] + k, mask=k < K, other=0.0)
                x = tl.load(parts[i] + row * strides[i] + k, mask=k < K, other=0.0).to(tl.float32)
                tl.store(y_ptr + k, _normed(x, weight, K, eps, y_ptr.dtype.element_ty), mask=k < K)

    @triton.jit
    def _silu_mul_kernel(y_ptr, out_ptr, HALF, y_stride, BLOCK: tl.constexpr, PDL: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        wait_for_previous(PDL)
        gate = tl.load(y_ptr + row * y_stride + i, mask=i < HALF, other=0.0).to(tl.float32)
        up = tl.load(y_ptr + row * y_stride + HALF + i, mask=i < HALF, other=0.0).to(tl.float32)
        dtype = y_ptr.dtype.element_ty
        silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)  # rounded here, as in torch
        tl.store(out_ptr + row * HALF + i, (silu * up).to(dtype), mask=i < HALF)

    @triton.jit
    def _rms_norm_backward_kernel(
        x_ptr, weight_ptr, dy_ptr, dx_ptr, dweight_ptr,
        T, D, x_stride, dy_stride, eps,
        PROGRAM_ROWS: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """dx = (g - n mean(g n)) / rms with n = x / rms and g = weight dy. Sums its rows into the program's dweight."""
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


@dataclass(frozen=True)
class ResidualStream:
    """The residual stream x [T, D], and work already done for the norm that follows.

    A GEMM that writes x can prepare the next norm. With `squares`, the next GEMM needs no norm launch: it reads
    `scaled` and multiplies its output rows by 1 / rms. With `normed`, the norm itself is already computed. Without
    either, the norm is computed from x.
    """

    x: Tensor
    norm_weight: Tensor | None = None  # weight of the norm that was prepared
    scaled: Tensor | None = None  # x * norm_weight
    squares: Tensor | None = None  # fp64 [programs, T]: sums of squares of x over the columns of each program
    normed: Tensor | None = None  # norm(x)


def rms_norm_torch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = x.float() if x.dtype != torch.float64 else x
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return weight * y.to(x.dtype)


def silu_mul_torch(y_T2I: Tensor) -> Tensor:
    gate, up = y_T2I.chunk(2, -1)
    return F.silu(gate) * up


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float, *, pdl: bool | None = None) -> Tensor:
    return add_rms_norm_triton(x, None, weight, eps, pdl=pdl)[0]


def add_rms_norm_triton(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, *, pdl: bool | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the norm of residual + x, and the sum; without a residual the second result is unspecified."""
    T, K = x.shape
    assert x.stride(1) == 1 and (residual is None or (residual.shape == x.shape and residual.stride(1) == 1))
    y = torch.empty(T, K, dtype=x.dtype, device=x.device)
    total = y if residual is None else torch.empty_like(y)
    if T == 0:
        return y, total
    block = triton.next_power_of_2(K)
    _rms_norm_kernel[(T,)](
        x, residual, weight, y, total, K, x.stride(0), residual.stride(0) if residual is not None else K, eps,
        BLOCK_K=block, num_warps=max(1, min(16, block // 256)), **pdl_launch_options(x.device, pdl),
    )  # fmt: skip
    return y, total


def norm_cat_triton(parts: Sequence[Tensor], weights: Sequence[Tensor], eps: float) -> Tensor:
    T, K = parts[0].shape
    assert all(x.shape == (T, K) and x.stride(1) == 1 for x in parts)
    y = torch.empty(T, len(parts) * K, dtype=parts[0].dtype, device=parts[0].device)
    if T:
        block = triton.next_power_of_2(K)
        strides = tuple(x.stride(0) for x in parts)
        options = {"num_warps": max(1, min(16, block // 256)), **pdl_launch_options(y.device)}
        _norm_cat_kernel[(T, len(parts))](tuple(parts), tuple(weights), strides, y, K, eps, BLOCK_K=block, **options)
    return y


def silu_mul_triton(y_T2I: Tensor, *, pdl: bool | None = None) -> Tensor:
    T, half = y_T2I.shape[0], y_T2I.shape[1] // 2
    assert y_T2I.stride(1) == 1 and y_T2I.shape[1] == 2 * half
    out = torch.empty(T, half, dtype=y_T2I.dtype, device=y_T2I.device)
    if T:
        grid, options = (T, triton.cdiv(half, 1024)), pdl_launch_options(y_T2I.device, pdl)
        _silu_mul_kernel[grid](y_T2I, out, half, y_T2I.stride(0), BLOCK=1024, num_warps=4, **options)
    return out


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
                x_TD, weight_D, dy_TD, dx_TD, dweight_PD, T, D, x_TD.stride(0), dy_TD.stride(0), ctx.eps,
                PROGRAM_ROWS=program_rows, BLOCK=block, num_warps=max(1, min(16, block // 256)),
            )  # fmt: skip
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


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Computes weight * x / rms(x) over the last dimension."""
    if x.dtype == torch.float32 and x.is_cpu and torch.is_inference_mode_enabled():
        return F.rms_norm(x, (x.shape[-1],), weight, eps)  # the reference's arithmetic in one call
    if x.dim() == 2 and supports_triton_autograd(x, weight):
        return RMSNormFunction.apply(x, weight, eps)
    if x.dim() == 2 and supports_triton(x, weight):
        return rms_norm_triton(x, weight, eps)
    return rms_norm_torch(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns the norm of residual + x, and the sum."""
    if x.dim() == 2 and supports_triton(x, residual, weight):
        return add_rms_norm_triton(x, residual, weight, eps)
    total = residual + x
    return rms_norm_torch(total, weight, eps), total


def norm_cat(parts: Sequence[Tensor], weights: Sequence[Tensor], eps: float) -> Tensor:
    """Norms each part with its own weight and concatenates the results."""
    if parts[0].dim() == 2 and supports_triton(*parts, *weights):
        return norm_cat_triton(parts, weights, eps)
    return torch.cat([rms_norm(x, weight, eps) for x, weight in zip(parts, weights, strict=True)], -1)


def silu_mul(y_T2I: Tensor) -> Tensor:
    """Computes silu(gate) * up; columns are all gates, then all ups."""
    if y_T2I.dim() == 2 and supports_triton_autograd(y_T2I):
        return SiluMulFunction.apply(y_T2I)
    return silu_mul_triton(y_T2I) if y_T2I.dim() == 2 and supports_triton(y_T2I) else silu_mul_torch(y_T2I)
