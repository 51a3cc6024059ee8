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
        weight = tl.load(
            weight_ptr + k, mask=k < K, other=0.0
        )  # no kernel writes weights, so they may be read before the wait
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
        y = x * tl.rsqrt(order_independent_sum(x * x).to(tl.float32) / K + eps)
        # Rounded before the multiplication by the weight, as in the torch reference.
        y = y.to(dtype).to(tl.float32) * weight.to(tl.float32)
        tl.store(y_ptr + row * K + k, y.to(dtype), mask=k < K)

    @triton.jit
    def _norm_row(x_ptr, weight, y_ptr, k, K, eps):
        dtype = x_ptr.dtype.element_ty
        x = tl.load(x_ptr + k, mask=k < K, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(order_independent_sum(x * x).to(tl.float32) / K + eps)
        y = (x * inverse).to(dtype).to(tl.float32) * weight.to(tl.float32)
        tl.store(y_ptr + k, y.to(dtype), mask=k < K)

    @triton.jit
    def _norm_cat_kernel(
        a_ptr,
        b_ptr,
        c_ptr,
        a_weight_ptr,
        b_weight_ptr,
        c_weight_ptr,
        y_ptr,
        K,
        a_stride,
        b_stride,
        c_stride,
        eps,
        PARTS: tl.constexpr,
        BLOCK_K: tl.constexpr,
        PDL: tl.constexpr,
    ):
        """Writes norm(a), norm(b) and, with three PARTS, norm(c) side by side; one program per row and part."""
        row = tl.program_id(0).to(tl.int64)
        k = tl.arange(0, BLOCK_K)
        y_ptr += row * PARTS * K + tl.program_id(1) * K
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()
        if tl.program_id(1) == 0:
            weight = tl.load(a_weight_ptr + k, mask=k < K, other=0.0)
            _norm_row(a_ptr + row * a_stride, weight, y_ptr, k, K, eps)
        elif tl.program_id(1) == 1:
            weight = tl.load(b_weight_ptr + k, mask=k < K, other=0.0)
            _norm_row(b_ptr + row * b_stride, weight, y_ptr, k, K, eps)
        elif PARTS > 2:
            weight = tl.load(c_weight_ptr + k, mask=k < K, other=0.0)
            _norm_row(c_ptr + row * c_stride, weight, y_ptr, k, K, eps)

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
    return _norm_launch(x, None, weight, eps, pdl)[0]


def add_rms_norm_triton(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, pdl: bool | None = None
) -> tuple[Tensor, Tensor]:
    return _norm_launch(x, residual, weight, eps, pdl)


def _norm_launch(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, pdl: bool | None
) -> tuple[Tensor, Tensor]:
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


FUSED_PARTS = (2, 3)  # numbers of parts that `norm_cat_triton` supports


def norm_cat_triton(
    parts: Sequence[Tensor], weights: Sequence[Tensor], eps: float, *, pdl: bool | None = None
) -> Tensor:
    T, K = parts[0].shape
    assert len(parts) in FUSED_PARTS and all(x.shape == (T, K) and x.stride(1) == 1 for x in parts)
    y = torch.empty(T, len(parts) * K, dtype=parts[0].dtype, device=parts[0].device)
    if T == 0:
        return y
    block = triton.next_power_of_2(K)
    a, b, c = (*parts, parts[0])[:3]  # the third is not read if there are two
    _norm_cat_kernel[(T, len(parts))](
        a,
        b,
        c,
        *(*weights, weights[0])[:3],
        y,
        K,
        a.stride(0),
        b.stride(0),
        c.stride(0),
        eps,
        PARTS=len(parts),
        BLOCK_K=block,
        num_warps=max(1, min(16, block // 256)),
        **pdl_launch_options(y.device, pdl),
    )
    return y


def silu_mul_triton(y_T2I: Tensor, *, pdl: bool | None = None) -> Tensor:
    T, half = y_T2I.shape[0], y_T2I.shape[1] // 2
    assert y_T2I.stride(1) == 1 and y_T2I.shape[1] == 2 * half
    out = torch.empty(T, half, dtype=y_T2I.dtype, device=y_T2I.device)
    if T == 0:
        return out
    block = 1024
    _silu_mul_kernel[(T, triton.cdiv(half, block))](
        y_T2I, out, half, y_T2I.stride(0), BLOCK=block, num_warps=4, **pdl_launch_options(y_T2I.device, pdl)
    )
    return out
