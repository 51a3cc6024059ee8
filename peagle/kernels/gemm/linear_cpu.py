"""Products of few rows on the CPU, in the way that measured fastest on this machine.

They are memory traffic there too, but the library's may be made for many rows. Our own product (skinny_cpu.py) does
all of it in one call. Shapes as in linear.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from peagle.kernels.gemm import skinny_cpu
from peagle.kernels.norm.rms_norm import rms_norm, silu_mul_torch

MOST_FEW_CPU = skinny_cpu.MOST_ROWS  # rows up to which it is asked which way is fastest
MEASURED_ROWS = (1, 2, 4, 8)  # numbers between, and more, go the way of the next one


def _row_by_row(x_TK: Tensor, weight_NK: Tensor, bias: Tensor | None) -> Tensor:
    """As many matrix-vector products, which some libraries do far better than a product of two or three rows."""
    y = x_TK.new_empty(x_TK.shape[0], weight_NK.shape[0])
    for row, out in zip(x_TK.unbind(0), y.unbind(0), strict=True):
        torch.mv(weight_NK, row, out=out)
    return y if bias is None else y.add_(bias)


def _swapped(x_TK: Tensor, weight_NK: Tensor, bias: Tensor | None) -> Tensor:
    """Weights as the left operand, so that it is their rows that are shared out between threads."""
    y = torch.mm(weight_NK, x_TK.t()).t().contiguous()
    return y if bias is None else y.add_(bias)


_WAYS = (F.linear, _row_by_row, _swapped)
_ways: dict[tuple[int, int, int, torch.dtype], Any] = {}  # by N, K, T and dtype; F.linear where nothing was measured


def select_cpu_gemms(weights: Iterable[Tensor], budget: float = 0.5) -> None:
    """Which way is the fastest for products of few rows with these weights, on this machine, now.

    Our own product takes all numbers of rows of all of these weights, or none: by it a row's bits do not depend on
    that number. Of a large weight a slice is enough. What was not reached within the budget of seconds goes the way of
    all, else the library's.
    """
    new = {(*w.shape, w.dtype): w for w in weights if (*w.shape, 1, w.dtype) not in _ways}
    own = {way for way in (skinny_cpu.product,) if new and skinny_cpu.library() is not None}
    began = time.perf_counter()
    lost = 0.0  # seconds, by our own product
    for (N, K, dtype), weight in new.items():
        part = weight[: max(1, (1 << 20) // K)]
        for at, rows in enumerate(MEASURED_ROWS):
            if time.perf_counter() - began > budget:
                break
            x = torch.ones(rows, K, dtype=dtype)
            best = _seconds({*_WAYS, *(own if dtype == torch.float32 else ())}, x, part)
            for between in range(1 + (MEASURED_ROWS[at - 1] if at else 0), rows + 1):
                _ways[N, K, between, dtype] = min(_WAYS, key=best.__getitem__)
            lost += sum(best.get(way, 0.0) - min(best[other] for other in _WAYS) for way in own if way in best)
    if lost < 0:
        for N, K, dtype in new:
            if dtype == torch.float32:
                _ways.update({(N, K, rows, dtype): skinny_cpu.product for rows in range(1, MOST_FEW_CPU + 1)})


def _seconds(ways: Iterable[Any], x: Tensor, weight: Tensor) -> dict[Any, float]:
    """Of each way the fastest of three, taken in turns."""
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(3):
        for way in best:
            started = time.perf_counter()
            way(x, weight, None)
            best[way] = min(best[way], time.perf_counter() - started)
    return best


def linear_cpu(
    x_TK: Tensor,
    weight_NK: Tensor,
    bias: Tensor | None = None,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    glu: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """The way that `select_cpu_gemms` found fastest; by our own all in one call."""
    rows: int = x_TK.shape[0]
    way: Any = F.linear
    if rows <= MOST_FEW_CPU and x_TK.dim() == 2:
        way = _ways.get((*weight_NK.shape, rows, x_TK.dtype), F.linear)
    if way is skinny_cpu.product:
        y = skinny_cpu.product(x_TK, weight_NK, bias, None if glu else residual, norm_weight, eps, glu)
        if y is not None:
            return y if residual is None or not glu else y.add_(residual)
        way = F.linear
    y = way(x_TK if norm_weight is None else rms_norm(x_TK, norm_weight, eps), weight_NK, bias)
    if glu:
        y = silu_mul_torch(y)
    return y if residual is None else y.add_(residual)
