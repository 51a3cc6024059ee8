"""Linear layers by torch: the reference and, on the CPU, the GEMM that measured fastest for few rows.

Few rows are bound by memory traffic, as on a GPU, but a BLAS library may be tuned for many. The C kernel
(skinny_cpu.py) computes the whole fused layer in one call. Shapes as in linear.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from peagle.kernels.gemm import skinny_cpu
from peagle.kernels.norm.rms_norm import rms_norm, silu_mul

MEASURED_ROWS = (1, 2, 4, 8)  # a row count in between uses the choice for the next one


def _matvec_per_row(x_TK: Tensor, weight_NK: Tensor, bias: Tensor | None) -> Tensor:
    """Multiplies row by row; some libraries are much faster at that than at a GEMM of two or three rows."""
    y = x_TK.new_empty(x_TK.shape[0], weight_NK.shape[0])
    for row, out in zip(x_TK.unbind(0), y.unbind(0), strict=True):
        torch.mv(weight_NK, row, out=out)
    return y if bias is None else y.add_(bias)


def _weights_first(x_TK: Tensor, weight_NK: Tensor, bias: Tensor | None) -> Tensor:
    """Multiplies with the weights as the left operand, so that threads split the weight rows."""
    y = torch.mm(weight_NK, x_TK.t()).t().contiguous()
    return y if bias is None else y.add_(bias)


_TORCH_GEMMS = (F.linear, _matvec_per_row, _weights_first)
_fastest_gemm: dict[tuple[int, int, int, torch.dtype], Any] = {}  # by N, K, T and dtype; F.linear if absent


def select_cpu_gemms(weights: Iterable[Tensor], budget_s: float = 0.5) -> None:
    """Measures which GEMM is fastest for few rows of these weights, and remembers it for `linear_cpu`.

    The C kernel is used for all row counts of all of these weights or for none: its rows have the same bits for any row
    count. A slice of a large weight is measured. Shapes beyond the time budget use F.linear, or the C kernel if the
    others do.
    """
    new = {(*w.shape, w.dtype): w for w in weights if (*w.shape, 1, w.dtype) not in _fastest_gemm}
    c_kernel = {gemm for gemm in (skinny_cpu.gemm,) if new and skinny_cpu.library() is not None}
    began = time.perf_counter()
    lost_s = 0.0  # time that the C kernel loses against the fastest torch GEMMs, summed over all measurements
    for (N, K, dtype), weight in new.items():
        part = weight[: max(1, (1 << 20) // K)]
        for at, rows in enumerate(MEASURED_ROWS):
            if time.perf_counter() - began > budget_s:
                break
            x = torch.ones(rows, K, dtype=dtype)
            seconds = _measure({*_TORCH_GEMMS, *(c_kernel if dtype == torch.float32 else ())}, x, part)
            for count in range(1 + (MEASURED_ROWS[at - 1] if at else 0), rows + 1):
                _fastest_gemm[N, K, count, dtype] = min(_TORCH_GEMMS, key=seconds.__getitem__)
            fastest_torch = min(seconds[gemm] for gemm in _TORCH_GEMMS)
            lost_s += sum(seconds[gemm] - fastest_torch for gemm in c_kernel if gemm in seconds)
    if lost_s < 0:
        for N, K, dtype in new:
            if dtype == torch.float32:
                counts = range(1, skinny_cpu.MAX_ROWS + 1)
                _fastest_gemm.update({(N, K, count, dtype): skinny_cpu.gemm for count in counts})


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
    gemm: Any = F.linear,
) -> Tensor:
    """Computes `linear` (linear.py) step by step."""
    y = gemm(x_TK if norm_weight is None else rms_norm(x_TK, norm_weight, eps), weight_NK, bias)
    if glu:
        y = silu_mul(y)
    return y if residual is None else residual + y


def linear_cpu(x_TK: Tensor, weight_NK: Tensor, bias: Tensor | None = None, **options: Any) -> Tensor:
    """Computes `linear` (linear.py) with the GEMM that `select_cpu_gemms` chose; options as those of `linear`."""
    rows: int = x_TK.shape[0]
    gemm: Any = F.linear
    if rows <= skinny_cpu.MAX_ROWS and x_TK.dim() == 2:
        gemm = _fastest_gemm.get((*weight_NK.shape, rows, x_TK.dtype), F.linear)
    if gemm is skinny_cpu.gemm:
        y = skinny_cpu.gemm(x_TK, weight_NK, bias, **options)
        if y is not None:
            return y
        gemm = F.linear
    return linear_torch(x_TK, weight_NK, bias, gemm=gemm, **options)
