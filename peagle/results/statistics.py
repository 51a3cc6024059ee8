"""Percentiles and confidence intervals of measured values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

Interval: TypeAlias = tuple[float, float]


@dataclass(frozen=True)
class Percentiles:
    """Summary of a latency distribution, in milliseconds."""

    mean: float
    median: float
    p95: float
    p99: float

    @staticmethod
    def of(values: Sequence[float]) -> Percentiles | None:
        """Linearly interpolated percentiles as numpy computes them; None if there are no values."""
        if not values:
            return None
        median, p95, p99 = np.percentile(values, (50, 95, 99)).tolist()
        return Percentiles(float(np.mean(values)), median, p95, p99)


def mean_ci95(values: Sequence[float]) -> Interval | None:
    """95% confidence interval of the mean by Student's t distribution; None for fewer than two values."""
    if len(values) < 2:
        return None
    mean = float(np.mean(values))
    margin = t_quantile_975(len(values) - 1) * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return mean - margin, mean + margin


def t_quantile_975(degrees_of_freedom: int) -> float:
    """97.5% quantile of Student's t distribution, by bisection of its cumulative distribution."""
    low, high = 0.0, 20.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_central_mass(middle, degrees_of_freedom) < 0.95 else (low, middle)
    return (low + high) / 2


def _t_central_mass(t: float, degrees_of_freedom: int) -> float:
    """Probability that |T| < t.

    With theta = atan(t / sqrt(n)) it is a finite sum of powers of cos(theta): Abramowitz and Stegun 26.7.3 (odd n)
    and 26.7.4 (even n).
    """
    theta = math.atan(t / math.sqrt(degrees_of_freedom))
    cos_squared, odd = math.cos(theta) ** 2, degrees_of_freedom % 2
    term = math.cos(theta) if odd else 1.0
    total = 0.0
    for i in range(1 + odd, degrees_of_freedom, 2):
        total += term
        term *= cos_squared * i / (i + 1)
    return 2 / math.pi * (theta + math.sin(theta) * total) if odd else math.sin(theta) * total
