"""fp8 (e4m3): conversion that saturates, and quantization with one fp32 scale per row."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

import torch
from torch import Tensor

from peagle.kernels.triton_utils import HAVE_TRITON, runs_triton

FP8_DTYPE, FP8_MAX = torch.float8_e4m3fn, 448.0
_MIN_AMAX = 1e-12  # of a row: rows of zeros need a scale, too

if HAVE_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def _quantize_rows_kernel(
        x_ptr, y_ptr, scale_ptr, K, x_stride, FP8_MAX: tl.constexpr, MIN_AMAX: tl.constexpr, BLOCK_K: tl.constexpr
    ):
        row = tl.program_id(0).to(tl.int64)
        k = tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + row * x_stride + k, mask=k < K, other=0.0).to(tl.float32)
        scale = tl.div_rn(tl.maximum(tl.max(tl.abs(x), 0), MIN_AMAX), FP8_MAX)
        y = tl.clamp(tl.div_rn(x, scale), -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
        tl.store(y_ptr + row * K + k, y.to(y_ptr.dtype.element_ty), mask=k < K)
        tl.store(scale_ptr + row, scale)


def to_fp8(x: Tensor) -> Tensor:
    """Converts to fp8 and saturates, which not every torch release does itself."""
    return x.clamp(-FP8_MAX, FP8_MAX).to(FP8_DTYPE)


def quantize_rows(x_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Returns fp8 values [T, K] and fp32 scales [T]; the largest value of a row becomes the largest of fp8."""
    return quantize_rows_triton(x_TK) if runs_triton(x_TK) else quantize_rows_torch(x_TK)


def quantize_rows_torch(x_TK: Tensor) -> tuple[Tensor, Tensor]:
    x_TK = x_TK.float()
    scale_T = x_TK.abs().amax(-1).clamp(min=_MIN_AMAX) / FP8_MAX
    return to_fp8(x_TK / scale_T[:, None]), scale_T


def quantize_rows_triton(x_TK: Tensor) -> tuple[Tensor, Tensor]:
    (T, K), device = x_TK.shape, x_TK.device
    assert x_TK.stride(1) == 1
    y, scale_T = torch.empty(T, K, dtype=FP8_DTYPE, device=device), torch.empty(T, dtype=torch.float32, device=device)
    block = triton.next_power_of_2(K)
    _quantize_rows_kernel[T,](
        x_TK, y, scale_T, K, x_TK.stride(0),
        FP8_MAX=FP8_MAX, MIN_AMAX=_MIN_AMAX, BLOCK_K=block, num_warps=8 if block >= 4096 else 4,
    )  # fmt: skip
    return y, scale_T


def dequantize_rows(values_NK: Tensor, scale_N: Tensor, dtype: torch.dtype) -> Tensor:
    return (values_NK.float() * scale_N[:, None]).to(dtype)


def fp8_gemm(x_TK: Tensor, weight_NK: Tensor, scale_N: Tensor, bias: Tensor | None = None) -> Tensor:
    """Quantizes the rows of x and returns x @ weight^T + bias in bf16, computed by fp8 tensor cores."""
    x_TK, scale_T = quantize_rows(x_TK)
    y = torch._scaled_mm(x_TK, weight_NK.t(), scale_T[:, None], scale_N[None], out_dtype=torch.bfloat16)
    return y if bias is None else y + bias
