"""The residual stream as it travels between GEMMs and norms."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


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
