"""Axes: which values they run over, where their ticks are, and how numbers are written on them.

Knows nothing about drawing, but for how values become pixels.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Scale = Literal["linear", "log"]
Unit = Literal["number", "share", "times", "ms"]


@dataclass(frozen=True)
class Axis:
    label: str
    unit: Unit = "number"
    scale: Scale = "linear"
    ticks: tuple[float, ...] | None = None  # None: round numbers
    start: float | None = None  # where a linear axis begins; None: at a round number below the smallest value


@dataclass(frozen=True)
class Pixels:
    """From values to pixels."""

    low: float
    high: float
    start: float
    end: float
    scale: Scale

    def __call__(self, value: float) -> float:
        if self.high == self.low:
            return self.start
        if self.scale == "log":
            share = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + min(max(share, 0.0), 1.0) * (self.end - self.start)


def shown(value: float, unit: Unit = "number") -> str:
    """A number as a person writes it: three or four figures that matter, no more."""
    if unit == "share":
        return f"{value:.1%}" if 0 < abs(value) < 0.1 else f"{value:.0%}"
    if unit == "times":
        return f"{value:.2f}×" if abs(value) < 10 else f"{value:.1f}×"
    if value == round(value) and abs(value) < 1e15:
        text = f"{value:,.0f}"
    elif abs(value) >= 100:
        text = f"{value:,.0f}" if abs(value) < 1e15 else f"{value:.2e}"
    elif abs(value) >= 10:
        text = f"{value:.1f}"
    else:
        text = f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.2g}"
    return f"{text} ms" if unit == "ms" else text


def tick_texts(ticks: Sequence[float], unit: Unit) -> list[str]:
    """All of one axis with as many decimals as the finest of them needs."""
    if unit == "share":
        return [f"{tick:.0%}" for tick in ticks]
    places = max((len(f"{tick:.6f}".rstrip("0").partition(".")[2]) for tick in ticks), default=0)
    varied = len(ticks) > 1 and max(ticks) >= 1000 * max(min(ticks), 1e-12)  # a logarithmic axis of small numbers
    return [shown(tick, unit) if varied else f"{tick:,.{places}f}" for tick in ticks]


def load_scale(loads: Sequence[float]) -> Scale:
    """Loads and lengths are doubled rather than added to: beyond a few times the first, by their logarithms."""
    return "log" if loads[0] > 0 and loads[-1] > 4 * loads[0] else "linear"


def shared(axis: Axis, values: Sequence[float]) -> Axis:
    """The axis with ticks that fit all values, so that panels beside each other have the same one."""
    return dataclasses.replace(axis, ticks=axis_range(axis, values, want=5)[0])


def axis_range(axis: Axis, values: Sequence[float], want: int) -> tuple[tuple[float, ...], float, float]:
    """Ticks, and the values an axis runs from and to."""
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    if axis.ticks is not None:
        both = [*axis.ticks, low, high]
        return axis.ticks, min(both), max(both)
    if axis.scale == "log":
        ticks = log_ticks(max(low, 1e-9), max(high, 1e-9))
    else:
        ticks = linear_ticks(low if axis.start is None else axis.start, high, want)
    return ticks, min(ticks), max(ticks)


def linear_ticks(low: float, high: float, want: int = 5) -> tuple[float, ...]:
    """Multiples of 1, 2 or 5 times a power of ten that enclose both, about as many as wanted."""
    least = max(abs(low), 1e-3) * 1e-6  # values nearer to each other than that are one
    high = high if high - low > least else low + max(abs(low) * 0.1, 1e-6)
    rough = (high - low) / want
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(s * power for s in (1, 2, 5, 10) if s * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return tuple(round(i * step, 12) for i in range(first, last + 1))


def log_ticks(low: float, high: float) -> tuple[float, ...]:
    """1, 2 and 5 times powers of ten that enclose both; the powers alone where that would be a crowd."""
    first, last = math.floor(math.log10(low) - 1e-9), math.ceil(math.log10(high) + 1e-9)
    for steps in ((1, 2, 5), (1,)):
        every = [round(s * 10.0**e, 12) for e in range(first - 1, last + 1) for s in steps]
        below = max(i for i, t in enumerate(every) if t <= low * (1 + 1e-9))
        above = min(i for i, t in enumerate(every) if t >= high * (1 - 1e-9))
        if above == below:
            above += 1
            every.append(every[-1] * 10)
        if above - below <= 8:
            break
    return tuple(every[below : above + 1])
