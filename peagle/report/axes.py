"""Chart axes: ranges, ticks, number formats, and the mapping from values to pixels."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

AxisScale = Literal["linear", "log"]
NumberUnit = Literal["number", "share", "times"]
LOG_RANGE = 12  # a value axis is logarithmic if the largest value is this many times the smallest


@dataclass(frozen=True)
class ChartAxis:
    label: str
    unit: NumberUnit = "number"
    scale: AxisScale = "linear"
    ticks: tuple[float, ...] | None = None  # None: round numbers
    start: float | None = None  # first value of a linear axis; None: a round number below the smallest value


@dataclass(frozen=True)
class PixelScale:
    """Maps values to pixels."""

    low: float
    high: float
    start: float
    end: float
    scale: AxisScale

    def __call__(self, value: float) -> float:
        if self.high == self.low:
            return self.start
        if self.scale == "log":
            share = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + min(max(share, 0.0), 1.0) * (self.end - self.start)


def format_number(value: float | None, unit: NumberUnit = "number") -> str:
    """Formats with three or four significant digits; a dash for None."""
    if value is None:
        return "–"
    if unit == "share":
        return f"{value:.1%}" if 0 < abs(value) < 0.1 else f"{value:.0%}"
    if unit == "times":
        return f"{value:.2f}×" if abs(value) < 10 else f"{value:.1f}×"
    if abs(value) >= 1e15:
        return f"{value:.2e}"
    if value == round(value) or abs(value) >= 100:
        return f"{value:,.0f}"
    if abs(value) >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.2g}"


def format_interval(interval: tuple[float, float] | None) -> str:
    return f"{format_number(interval[0])} to {format_number(interval[1])}" if interval is not None else "–"


def format_ticks(ticks: Sequence[float], unit: NumberUnit) -> list[str]:
    """Formats all ticks of an axis with the same number of decimals."""
    if unit == "share":
        return [f"{tick:.0%}" for tick in ticks]
    decimals = max((len(f"{tick:.6f}".rstrip("0").partition(".")[2]) for tick in ticks), default=0)
    is_wide = len(ticks) > 1 and max(ticks) >= 1000 * max(min(ticks), 1e-12)  # a logarithmic axis of small numbers
    return [format_number(tick, unit) if is_wide else f"{tick:,.{decimals}f}" for tick in ticks]


def load_axis(label: str, loads: Sequence[float]) -> ChartAxis:
    """Axis with a tick per load, logarithmic beyond a factor of 4."""
    ticks = tuple(sorted(set(loads)))
    scale: AxisScale = "log" if ticks[0] > 0 and ticks[-1] > 4 * ticks[0] else "linear"
    return ChartAxis(label, scale=scale, ticks=ticks)


def value_axis(label: str, values: Sequence[float]) -> ChartAxis:
    """Axis from zero, or a logarithmic one for a wide range. Panels that share it have the same ticks."""
    is_wide = bool(values) and min(values) > 0 and max(values) > LOG_RANGE * min(values)
    axis = ChartAxis(label, scale="log" if is_wide else "linear", start=0.0)
    return dataclasses.replace(axis, ticks=axis_range(axis, values, num_ticks=5)[0])


def axis_range(axis: ChartAxis, values: Sequence[float], num_ticks: int) -> tuple[tuple[float, ...], float, float]:
    """Ticks, first value and last value of an axis."""
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    if axis.ticks is not None:
        return axis.ticks, min(*axis.ticks, low), max(*axis.ticks, high)
    if axis.scale == "log":
        ticks = log_ticks(max(low, 1e-9), max(high, 1e-9))
    else:
        ticks = linear_ticks(low if axis.start is None else axis.start, high, num_ticks)
    return ticks, min(ticks), max(ticks)


def linear_ticks(low: float, high: float, num_ticks: int = 5) -> tuple[float, ...]:
    """Multiples of 1, 2 or 5 times a power of ten that enclose both values."""
    smallest_range = max(abs(low), 1e-3) * 1e-6
    high = high if high - low > smallest_range else low + max(abs(low) * 0.1, 1e-6)
    rough_step = (high - low) / num_ticks
    power = 10.0 ** math.floor(math.log10(rough_step))
    step = next(s * power for s in (1, 2, 5, 10) if s * power >= rough_step * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return tuple(round(i * step, 12) for i in range(first, last + 1))


def log_ticks(low: float, high: float) -> tuple[float, ...]:
    """1, 2 and 5 times powers of ten that enclose both values; only the powers if there would be more than 9 ticks."""
    first, last = math.floor(math.log10(low) - 1e-9), math.ceil(math.log10(high) + 1e-9)
    for steps in ((1, 2, 5), (1,)):
        ticks = [round(s * 10.0**e, 12) for e in range(first - 1, last + 1) for s in steps]
        below = max(i for i, t in enumerate(ticks) if t <= low * (1 + 1e-9))
        above = min(i for i, t in enumerate(ticks) if t >= high * (1 - 1e-9))
        if above == below:
            above += 1
            ticks.append(ticks[-1] * 10)
        if above - below <= 8:
            break
    return tuple(ticks[below : above + 1])
