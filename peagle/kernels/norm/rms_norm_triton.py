"""Triton kernels of rms_norm.py, one launch each; they round where the torch reference rounds.

Sums of squares are taken in fp64, whose rounding errors vanish in fp32, so 1 / rms has the same bits in every kernel
here and in the GEMMs, in whatever order the squares are added.

Shapes: T rows, K width.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# (kernels annotate compile-time constants only; the functions that launch them are typed)

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from peagle.kernels.triton_utils import HAVE_TRITON, pdl_launch_options

if HAVE_TRITON:
    import triton
    import triton.language as tl

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
        x_ptr,
        residual_ptr,
        weight_ptr,
        y_ptr,
        total_ptr,
        K,
        x_stride,
        residual_stride,
        eps,
        BLOCK_K: tl.constexpr,
        PDL: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        k = tl.arange(0, BLOCK_K)
        # No kernel writes weights, so they may be read before the wait.
        weight = tl.load(weight_ptr + k, mask=k < K, other=0.0)
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()
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
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()
        for i in tl.static_range(len(parts)):
            if tl.program_id(1) == i:
                weight = tl.load(weights[i] + k, mask=k < K, other=0.0)
                x = tl.load(parts[i] + row * strides[i] + k, mask=k < K, other=0.0).to(tl.float32)
                tl.store(y_ptr + k, _normed(x, weight, K, eps, y_ptr.dtype.element_ty), mask=k < K)

    @triton.jit
    def _silu_mul_kernel(y_ptr, out_ptr, HALF, y_stride, BLOCK: tl.constexpr, PDL: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()
        gate = tl.load(y_ptr + row * y_stride + i, mask=i < HALF, other=0.0).to(tl.float32)
        up = tl.load(y_ptr + row * y_stride + HALF + i, mask=i < HALF, other=0.0).to(tl.float32)
        dtype = y_ptr.dtype.element_ty
        silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)  # rounded here, as in torch
        tl.store(out_ptr + row * HALF + i, (silu * up).to(dtype), mask=i < HALF)


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
        x,
        residual,
        weight,
        y,
        total,
        K,
        x.stride(0),
        residual.stride(0) if residual is not None else K,
        eps,
        BLOCK_K=block,
        num_warps=max(1, min(16, block // 256)),
        **pdl_launch_options(x.device, pdl),
    )
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
