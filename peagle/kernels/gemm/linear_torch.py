"""Linear layers by torch: the reference and, for few rows on the CPU, a C kernel where it measured faster.

Few rows are bound by memory traffic, as on a GPU, but a BLAS library may be tuned for many. The C kernel
(skinny_cpu.py) computes the whole fused layer in one call. Shapes as in linear.py.
"""

import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from peagle.kernels.fp8 import dequantize_rows, fp8_gemm
from peagle.kernels.gemm import skinny_cpu
from peagle.kernels.norm.rms_norm import rms_norm, silu_mul

MEASURED_ROWS = (1, 2, 4, 8)

_c_kernel_shapes: set[tuple[int, ...]] = set()  # shapes of the fp32 weights that use the C kernel


def select_cpu_gemms(weights: Iterable[Tensor], budget_s: float = 0.5) -> None:
    """Measures whether the C kernel is faster for few rows of these weights, and remembers it for `linear_cpu`.

    It is used for all row counts of all of these fp32 weights or for none: its rows have the same bits for any row
    count. A slice of a large weight is measured, until the time budget is spent.
    """
    new = {w.shape: w for w in weights if w.dtype == torch.float32 and w.shape not in _c_kernel_shapes}
    if not new or skinny_cpu.library() is None:
        return
    began = time.perf_counter()
    lost_s = 0.0  # time that the C kernel loses against torch, summed over all measurements
    for (_, K), weight in new.items():
        for rows in MEASURED_ROWS:
            if time.perf_counter() - began <= budget_s:
                seconds = _measure((F.linear, skinny_cpu.gemm), torch.ones(rows, K), weight[: max(1, (1 << 20) // K)])
                lost_s += seconds[skinny_cpu.gemm] - seconds[F.linear]
    if lost_s < 0:
        _c_kernel_shapes.update(new)


def _measure(gemms: Iterable[Any], x: Tensor, weight: Tensor) -> dict[Any, float]:
    """Returns each GEMM's fastest of three calls in seconds; calls alternate between the GEMMs."""
    best = dict.fromkeys(gemms, float("inf"))
    for _ in range(3):
        for gemm in best:
            started = time.perf_counter()
            gemm(x, weight, None)
            best[gemm] = min(best[gemm], time.perf_counter() - started)
    return best


def linear_torch(
    x_TK: Tensor,
    weight_NK: Tensor,
    bias: Tensor | None = None,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    glu: bool = False,
    residual: Tensor | None = None,
    weight_scale: Tensor | None = None,
) -> Tensor:
    """Computes `linear` (linear.py) step by step. With fp8 weights it dequantizes them, or on a GPU quantizes x too."""
    x_TK = x_TK if norm_weight is None else rms_norm(x_TK, norm_weight, eps)
    if weight_scale is not None and x_TK.is_cuda:
        y = fp8_gemm(x_TK, weight_NK, weight_scale, bias)
    else:
        weight_NK = weight_NK if weight_scale is None else dequantize_rows(weight_NK, weight_scale, x_TK.dtype)
        y = F.linear(x_TK, weight_NK, bias)
    if glu:
        y = silu_mul(y)
    return y if residual is None else residual + y


def linear_cpu(x_TK: Tensor, weight_NK: Tensor, bias: Tensor | None = None, **options: Any) -> Tensor:
    """Computes `linear` (linear.py) with the GEMM that `select_cpu_gemms` chose; options as those of `linear`."""
    few = x_TK.shape[0] <= skinny_cpu.MAX_ROWS and x_TK.dim() == 2 and x_TK.dtype == torch.float32
    if few and weight_NK.shape in _c_kernel_shapes:
        y = skinny_cpu.gemm(x_TK, weight_NK, bias, **options)
        if y is not None:
            return y
    return linear_torch(x_TK, weight_NK, bias, **options)
