"""Number formats, axes, and line charts as inline SVG.

Colours are CSS classes of the page's style sheet, so charts follow dark mode and print. Legends are HTML below a chart.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

NumberUnit = Literal["number", "share", "times"]

WIDTH, HEIGHT = 400, 270  # pixels
TOP, BOTTOM, LEFT, RIGHT = 28, 44, 12, 14  # margins of the plot; LEFT is that of the tick texts
INSET = 12  # from the ends of the x axis to the first and the last tick
CHARACTER_WIDTH = 6.6  # of a tick text, on the large side
# A shape around the origin per style, so that lines are distinguishable without colour. Style 0 is the baseline.
MARKS = (
    "M-4.2-2h8.4v4h-8.4z",
    "M-4.2 0a4.2 4.2 0 1 0 8.4 0a4.2 4.2 0 1 0-8.4 0z",
    "M-3.9-3.9h7.8v7.8h-7.8z",
    "M0-5.2l5.2 8.4h-10.4z",
    "M0-5.2l5.2 5.2l-5.2 5.2l-5.2-5.2z",
    "M0 5.2l5.2-8.4h-10.4z",
)


@dataclass(frozen=True)
class ChartAxis:
    """An axis from its first tick to its last one."""

    label: str
    ticks: tuple[float, ...]
    is_log: bool = False
    unit: NumberUnit = "number"

    def share(self, value: float) -> float:
        """Where a value is: 0 at the first tick, 1 at the last one."""
        low, high = self.ticks[0], self.ticks[-1]
        if low == high:
            return 0.5
        if self.is_log:
            share = math.log(max(value, low) / low) / math.log(high / low)
        else:
            share = (value - low) / (high - low)
        return min(max(share, 0.0), 1.0)


@dataclass(frozen=True)
class ChartPoint:
    x: float
    y: float
    interval: tuple[float, float] | None = None  # ends of an error bar
    tooltip: str = ""  # shown on hover
    is_uncertain: bool = False  # drawn as a hollow mark


@dataclass(frozen=True)
class ChartLine:
    label: str
    points: tuple[ChartPoint, ...]
    style: int


@dataclass(frozen=True)
class ChartPanel:
    title: str
    x: ChartAxis
    y: ChartAxis
    lines: tuple[ChartLine, ...]


def layout_chart(panel: ChartPanel) -> dict[str, Any]:
    """Sizes, ticks and scales for `templates/chart.svg.jinja`."""
    y_texts = format_ticks(panel.y)
    left = LEFT + CHARACTER_WIDTH * max(map(len, y_texts)) + 6
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM

    def to_x(value: float) -> float:
        return left + INSET + panel.x.share(value) * (right - left - 2 * INSET)

    x_ticks: list[tuple[float, str]] = []
    free = 0.0  # where the next tick text may begin
    for tick in panel.x.ticks:
        text = format_number(tick, panel.x.unit)
        if to_x(tick) - CHARACTER_WIDTH * len(text) / 2 >= free:
            x_ticks.append((tick, text))
            free = to_x(tick) + CHARACTER_WIDTH * len(text) / 2 + 5
    return {
        "width": WIDTH,
        "height": HEIGHT,
        "left": left,
        "right": right,
        "bottom": bottom,
        "x_ticks": x_ticks,
        "y_ticks": list(zip(panel.y.ticks, y_texts, strict=True)),
        "to_x": to_x,
        "to_y": lambda value: bottom - panel.y.share(value) * (bottom - TOP),
    }


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


def with_interval(text: str, interval: tuple[float, float] | None) -> str:
    return text if interval is None else f"{text} ({format_interval(interval)})"


def format_ticks(axis: ChartAxis) -> list[str]:
    """Formats all ticks of a linear axis with the same number of decimals."""
    if axis.is_log or axis.unit == "share":
        return [format_number(tick, axis.unit) for tick in axis.ticks]
    decimals = max(len(f"{tick:.6f}".rstrip("0").partition(".")[2]) for tick in axis.ticks)
    return [f"{tick:,.{decimals}f}" for tick in axis.ticks]


def linear_ticks(low: float, high: float) -> tuple[float, ...]:
    """Multiples of 1, 2 or 5 times a power of ten that enclose both values."""
    high = max(high, low + max(abs(low) * 0.1, 1e-6))
    rough_step = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough_step))
    step = next(s * power for s in (1, 2, 5, 10) if s * power >= rough_step * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return tuple(round(i * step, 12) for i in range(first, last + 1))


def log_ticks(low: float, high: float) -> tuple[float, ...]:
    """1, 2 and 5 times powers of ten that enclose both values; only the powers if there would be more than 9 ticks."""
    first, last = math.floor(math.log10(low) - 1e-9), math.ceil(math.log10(high) + 1e-9)
    for steps in ((1, 2, 5), (1,)):
        ticks = [round(s * 10.0**e, 12) for e in range(first, last + 1) for s in steps]
        below = max(i for i, t in enumerate(ticks) if t <= low * (1 + 1e-9))
        above = min(i for i, t in enumerate(ticks) if t >= high * (1 - 1e-9))
        if above - below <= 8:
            break
    return tuple(ticks[below : above + 1])
