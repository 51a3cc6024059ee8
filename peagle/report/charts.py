"""Line charts and heatmaps as inline SVG.

Colours are CSS classes of the page's style sheet, so charts follow dark mode and print. Text widths are estimated from
the number of characters, on the large side. A page may draw a chart in two sizes: text is never scaled down.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from peagle.report.axes import ChartAxis, NumberUnit, PixelScale, axis_range, format_number, format_ticks

ChartSize = tuple[int, int]

LARGE: ChartSize = (720, 340)
MEDIUM: ChartSize = (528, 300)
SMALL: ChartSize = (352, 264)
NUM_STYLES = 6  # distinguishable lines of a panel; style 0 is the baseline
CHARACTER_WIDTH = 0.58  # mean character width relative to the font size
FONT_SIZE, SMALL_FONT_SIZE = 12, 11  # font sizes in pixels
LINE_HEIGHT = 14
TOP, BOTTOM, LEFT, RIGHT = 34, 44, 12, 14
MARK = 4.2
CELL_HEIGHT = 42
MIN_CELL_WIDTH, MAX_CELL_WIDTH = 58, 104
HEAT_EDGES = (0.75, 0.95, 1.05, 1.5, 2.0, 3.0)  # ratios: two steps below 1, one around 1, four above


@dataclass(frozen=True)
class ChartPoint:
    x: float
    y: float
    low: float | None = None  # ends of an error bar
    high: float | None = None
    tooltip: str = ""  # shown on hover
    is_uncertain: bool = False  # drawn as a hollow mark


@dataclass(frozen=True)
class ChartLine:
    label: str
    points: tuple[ChartPoint, ...]
    style: int


@dataclass(frozen=True)
class LinePanel:
    title: str
    x: ChartAxis
    y: ChartAxis
    lines: tuple[ChartLine, ...]


@dataclass(frozen=True)
class HeatCell:
    text: str
    fine: str = ""  # second line of text
    ratio: float | None = None  # selects the colour; None: grey
    tooltip: str = ""
    marked: bool = False


@dataclass(frozen=True)
class HeatPanel:
    title: str
    column_label: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[tuple[HeatCell | None, ...], ...]  # one tuple per row


ChartPanel: TypeAlias = LinePanel | HeatPanel


def layout_chart(panel: ChartPanel, size: ChartSize) -> dict[str, Any]:
    """Computes the positions of all elements, for `templates/chart.svg.jinja`."""
    layout = _layout_heatmap(panel, size) if isinstance(panel, HeatPanel) else _layout_lines(panel, size)
    return {"title": panel.title, "width": size[0], **layout}


def _layout_lines(panel: LinePanel, size: ChartSize) -> dict[str, Any]:
    width, height = size
    lines = [line for line in panel.lines if line.points]
    label_width = min(max((_text_width(item.label) for item in lines), default=0), 0.34 * width)
    values = [v for line in lines for p in line.points for v in (p.y, p.low, p.high) if v is not None]
    y_ticks, y_low, y_high = axis_range(panel.y, values, num_ticks=5)
    x_values = [point.x for line in lines for point in line.points]
    x_ticks, x_low, x_high = axis_range(panel.x, x_values, num_ticks=6)
    y_texts = format_ticks(y_ticks, panel.y.unit)
    left = LEFT + max(_text_width(text, SMALL_FONT_SIZE) for text in y_texts) + 6
    right = width - RIGHT - label_width - (14 if label_width else 0)
    top, bottom = TOP, height - BOTTOM
    inset = 12 if len(set(x_values)) > 1 else (right - left) / 2
    to_x = PixelScale(x_low, x_high, left + inset, right - inset, panel.x.scale)
    to_y = PixelScale(y_low, y_high, bottom, top, panel.y.scale)
    ends = [(to_x(line.points[-1].x), to_y(line.points[-1].y)) for line in lines]
    values_text = [
        f"{line.label}: {', '.join(format_number(p.y, panel.y.unit) for p in line.points)}" for line in lines
    ]
    return {
        "kind": "lines",
        "height": height,
        "description": f"{panel.y.label} by {panel.x.label}. {'; '.join(values_text)}",
        "axis": {"x": panel.x.label, "y": panel.y.label, "left": left, "right": right, "bottom": bottom},
        "y_ticks": [(to_y(tick), text) for tick, text in zip(y_ticks, y_texts, strict=True)],
        "x_ticks": [(to_x(t), format_number(t, panel.x.unit)) for t in _select_ticks(x_ticks, to_x, panel.x.unit)],
        "lines": [_layout_line(line, to_x, to_y) for line in lines],
        "labels": _layout_labels(lines, ends, right + 14, label_width, top, bottom),
    }


def _layout_line(line: ChartLine, to_x: PixelScale, to_y: PixelScale) -> dict[str, Any]:
    points, bars = [], []
    for point in line.points:
        x, y = to_x(point.x), to_y(point.y)
        points.append((x, y, _mark_path(line.style, x, y), point))
        if ends := [to_y(v) for v in (point.low, point.high) if v is not None]:
            bars.append((x, max([y, *ends]), min([y, *ends]), ends))
    return {"style": line.style, "points": points, "bars": bars}


def _layout_labels(
    items: Sequence[ChartLine],
    ends: Sequence[tuple[float, float]],
    x: float,
    max_width: float,
    top: float,
    bottom: float,
) -> list[dict[str, Any]]:
    """Labels at the ends of lines, moved apart if they overlap, connected to their line."""
    max_lines = 2 if 2 * LINE_HEIGHT * len(items) <= bottom - top else 1
    wrapped = [_wrap_text(item.label, max_width, max_lines) for item in items]
    heights = [LINE_HEIGHT * len(lines) + 2.0 for lines in wrapped]
    centers = _spread_labels([y for _, y in ends], heights, top - 6, bottom + 6)
    labels = []
    for item, (end_x, end_y), lines, height, y in zip(items, ends, wrapped, heights, centers, strict=True):
        first = y - height / 2 + LINE_HEIGHT - 2
        texts = [(x, first + i * LINE_HEIGHT, text) for i, text in enumerate(lines)]
        start_x = end_x + MARK + 2
        thread = (start_x, end_y, x - 4, y) if x - 4 > start_x else None
        labels.append({"style": item.style, "texts": texts, "thread": thread})
    return labels


def _layout_heatmap(panel: HeatPanel, size: ChartSize) -> dict[str, Any]:
    """Cells with row and column headings; columns that do not fit continue in a block below."""
    width = size[0]
    label_width = min(max((_text_width(r) for r in panel.rows), default=0), 0.36 * width) + 10
    left = LEFT + label_width
    max_columns = max(1, int((width - left - RIGHT) // MIN_CELL_WIDTH))
    num_blocks = math.ceil(len(panel.columns) / max_columns) or 1
    per_block = max(math.ceil(len(panel.columns) / num_blocks), 1)
    cell_width = min(MAX_CELL_WIDTH, (width - left - RIGHT) / per_block)
    blocks, y = [], 14.0
    for begin in range(0, len(panel.columns), per_block):
        names = panel.columns[begin : begin + per_block]
        columns = [(left + (i + 0.5) * cell_width, _truncate(name, cell_width)) for i, name in enumerate(names)]
        block: dict[str, Any] = {"y": y, "columns": columns, "labels": [], "cells": []}
        y += 26
        for row, cells in zip(panel.rows, panel.cells, strict=True):
            lines = _wrap_text(row, label_width - 10, 2)
            first = y + CELL_HEIGHT / 2 + 4 - (len(lines) - 1) * LINE_HEIGHT / 2
            block["labels"].append([(left - 10, first + i * LINE_HEIGHT, text) for i, text in enumerate(lines)])
            for i, cell in enumerate(cells[begin : begin + per_block]):
                step = "even" if cell is None or cell.ratio is None else f"h{heat_step(cell.ratio)}"
                block["cells"].append((left + i * cell_width, y, step, cell))
            y += CELL_HEIGHT
        blocks.append(block)
        y += 26
    values_text = [
        f"{row}: {', '.join(c.text if c else 'none' for c in cells)}"
        for row, cells in zip(panel.rows, panel.cells, strict=True)
    ]
    return {
        "kind": "heatmap",
        "height": y - 18,
        "description": "; ".join(values_text),
        "left": left,
        "column_label": panel.column_label,
        "blocks": blocks,
        "cell": (cell_width, CELL_HEIGHT),
    }


def _mark_path(style: int, x: float, y: float) -> str:
    """A shape per style, so that lines are distinguishable without colour."""
    r = MARK
    if style == 0:  # horizontal bar
        return f"M{px(x - r)} {px(y - 2)}h{px(2 * r)}v4h{px(-2 * r)}z"
    if style == 1:
        return f"M{px(x - r)} {px(y)}a{r} {r} 0 1 0 {px(2 * r)} 0a{r} {r} 0 1 0 {px(-2 * r)} 0z"
    if style == 2:
        s = r * 0.92
        return f"M{px(x - s)} {px(y - s)}h{px(2 * s)}v{px(2 * s)}h{px(-2 * s)}z"
    if style == 3:
        return f"M{px(x)} {px(y - r - 1)}l{px(r + 1)} {px(2 * r)}h{px(-2 * (r + 1))}z"
    if style == 4:
        return f"M{px(x)} {px(y - r - 1)}l{px(r + 1)} {px(r + 1)}l{px(-r - 1)} {px(r + 1)}l{px(-r - 1)} {px(-r - 1)}z"
    return f"M{px(x)} {px(y + r + 1)}l{px(r + 1)} {px(-2 * r)}h{px(-2 * (r + 1))}z"


def heat_step(ratio: float) -> int:
    """0 and 1: slower, 2: about equal, 3 to 6: faster."""
    return sum(ratio >= edge for edge in HEAT_EDGES)


def _select_ticks(ticks: Sequence[float], to_x: PixelScale, unit: NumberUnit) -> list[float]:
    """The ticks whose texts do not overlap."""
    kept: list[float] = []
    free = -math.inf
    for tick in sorted(ticks):
        half = _text_width(format_number(tick, unit), SMALL_FONT_SIZE) / 2
        if to_x(tick) - half >= free:
            kept.append(tick)
            free = to_x(tick) + half + 5
    return kept


def _spread_labels(centers: Sequence[float], heights: Sequence[float], top: float, bottom: float) -> list[float]:
    """Moves label centres apart, in their order and between the two edges, as little as possible."""
    order = sorted(range(len(centers)), key=lambda i: centers[i])
    centres = list(centers)
    edge = top
    for i in order:
        centres[i] = max(centers[i], edge + heights[i] / 2)
        edge = centres[i] + heights[i] / 2
    edge = bottom
    for i in reversed(order):
        centres[i] = min(centres[i], edge - heights[i] / 2)
        edge = centres[i] - heights[i] / 2
    return centres


def _text_width(text: str, font_size: float = FONT_SIZE) -> float:
    wide = sum(2 if ord(c) > 0x2E80 else 1.25 if c in "MWmw@%" else 1 for c in text)
    return wide * CHARACTER_WIDTH * font_size


def _truncate(text: str, max_width: float) -> str:
    if _text_width(text) <= max_width:
        return text
    while text and _text_width(text + "…") > max_width:
        text = text[:-1]
    return f"{text}…"


def _wrap_text(text: str, max_width: float, max_lines: int) -> list[str]:
    """Wraps at spaces into at most `max_lines` lines; truncates the rest."""
    lines: list[str] = []
    words = text.split(" ")
    while words and len(lines) < max_lines - 1:
        num_words = 1
        while num_words < len(words) and _text_width(" ".join(words[: num_words + 1])) <= max_width:
            num_words += 1
        lines.append(_truncate(" ".join(words[:num_words]), max_width))
        words = words[num_words:]
    if words:
        lines.append(_truncate(" ".join(words), max_width))
    return lines


def px(value: float) -> str:
    """Formats a coordinate."""
    return f"{value:.1f}".removesuffix(".0")
