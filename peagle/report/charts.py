"""Charts as inline SVG: lines with intervals and labels at their ends, and maps of coloured cells.

Knows nothing about results or pages. Colours are classes that the page's style sheet fills in, so a chart follows it
into the dark and onto paper. Widths of text are guessed, since no font is at hand, and guessed too wide rather than
too narrow.

A chart is drawn twice where a page has room for a large one: text in it is never scaled down to fit a phone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TypeAlias

from peagle.report.axes import Axis, Pixels, Unit, axis_range, shown, tick_texts

Size = tuple[int, int]

WIDE: Size = (720, 340)
HALF: Size = (528, 300)
SMALL: Size = (352, 264)
STYLES = 6  # lines that a panel can tell apart; style 0 is for what all others are measured against
CHARACTER = 0.58  # mean width of a character, in its height
TEXT, FINE = 12, 11  # heights of text, in pixels
LINE_HEIGHT = 14
TOP, BOTTOM, LEFT, RIGHT = 34, 44, 12, 14
MARK = 4.2
CELL_HEIGHT = 42
LEAST_CELL, MOST_CELL = 58, 104
HEAT_EDGES = (0.75, 0.95, 1.05, 1.5, 2.0, 3.0)  # of ratios: two steps below, one that is even, four above


@dataclass(frozen=True)
class Point:
    x: float
    y: float
    low: float | None = None  # of an interval or a spread
    high: float | None = None
    tip: str = ""  # the whole truth, when pointed at
    note: str = ""  # beside it
    doubtful: bool = False  # drawn hollow


@dataclass(frozen=True)
class Line:
    label: str
    points: tuple[Point, ...]
    style: int


@dataclass(frozen=True)
class Level:
    """A value that the lines are to be seen against."""

    label: str
    y: float
    style: int
    tip: str = ""


@dataclass(frozen=True)
class LinePanel:
    title: str
    x: Axis
    y: Axis
    lines: tuple[Line, ...]
    levels: tuple[Level, ...] = ()


@dataclass(frozen=True)
class Cell:
    text: str
    fine: str = ""  # below it
    ratio: float | None = None  # decides the colour; None: no colour
    tip: str = ""
    marked: bool = False


@dataclass(frozen=True)
class HeatPanel:
    title: str
    row_label: str
    column_label: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[tuple[Cell | None, ...], ...]  # a row for each of `rows`


Panel: TypeAlias = LinePanel | HeatPanel


def draw(panel: Panel, size: Size, name: str) -> str:
    """An <svg> of that width; `name` is unique on the page, and what its ids begin with."""
    if isinstance(panel, HeatPanel):
        body, height, told = _heat(panel, size)
    else:
        body, height, told = _lines(panel, size)
    return (
        f'<svg class="chart" role="img" aria-labelledby="{name}-t {name}-d" viewBox="0 0 {size[0]} {_n(height)}" '
        f'width="{size[0]}" height="{_n(height)}">'
        f'<title id="{name}-t">{escape(panel.title)}</title><desc id="{name}-d">{escape(told)}</desc>{body}</svg>'
    )


def _lines(panel: LinePanel, size: Size) -> tuple[str, float, str]:
    width, height = size
    labels = [(line.label, line.style) for line in panel.lines] + [(v.label, v.style) for v in panel.levels]
    room = min(max((_width(text) for text, _ in labels), default=0), 0.34 * width)
    values = [v for line in panel.lines for p in line.points for v in (p.y, p.low, p.high) if v is not None]
    values += [level.y for level in panel.levels]
    y_ticks, y_low, y_high = axis_range(panel.y, values, want=5)
    places = [p.x for line in panel.lines for p in line.points]
    x_ticks, x_low, x_high = axis_range(panel.x, places, want=6)
    y_texts = tick_texts(y_ticks, panel.y.unit)
    left = LEFT + max(_width(text, FINE) for text in y_texts) + 6
    right = width - RIGHT - room - (14 if labels else 0)
    top, bottom = TOP, height - BOTTOM
    inset = 12 if len(set(places)) > 1 else (right - left) / 2
    to_x = Pixels(x_low, x_high, left + inset, right - inset, panel.x.scale)
    to_y = Pixels(y_low, y_high, bottom, top, panel.y.scale)

    parts = [f'<text class="axis" x="{LEFT}" y="14">{escape(panel.y.label)}</text>']
    for tick, text in zip(y_ticks, y_texts, strict=True):
        y = _n(to_y(tick))
        parts.append(f'<line class="grid" x1="{_n(left)}" x2="{_n(right)}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="tick end" x="{_n(left - 6)}" y="{y}" dy="4">{text}</text>')
    parts.append(f'<line class="base" x1="{_n(left)}" x2="{_n(right)}" y1="{_n(bottom)}" y2="{_n(bottom)}"/>')
    for tick in _apart(x_ticks, to_x, panel.x.unit):
        parts.append(
            f'<text class="tick mid" x="{_n(to_x(tick))}" y="{_n(bottom + 16)}">{shown(tick, panel.x.unit)}</text>'
        )
    parts.append(f'<text class="axis end" x="{_n(right)}" y="{_n(bottom + 34)}">{escape(panel.x.label)}</text>')

    for level in panel.levels:
        y = _n(to_y(level.y))
        parts.append(
            f'<line class="level s{level.style}" x1="{_n(left)}" x2="{_n(right)}" y1="{y}" y2="{y}">'
            f"{_tip(level.tip)}</line>"
        )
    parts += [_line(line, to_x, to_y) for line in panel.lines]
    parts.append(_notes(panel.lines, to_x, to_y))
    ends = [(to_x(line.points[-1].x), to_y(line.points[-1].y)) for line in panel.lines if line.points]
    ends += [(right, to_y(level.y)) for level in panel.levels]
    labels = [(line.label, line.style) for line in panel.lines if line.points]
    labels += [(level.label, level.style) for level in panel.levels]
    parts.append(_end_labels(labels, ends, right + 14, room, top, bottom))
    told = f"{panel.y.label} against {panel.x.label}. " + "; ".join(
        f"{line.label}: " + ", ".join(shown(p.y, panel.y.unit) for p in line.points) for line in panel.lines
    )
    return "".join(parts), height, told


def _line(line: Line, to_x: Pixels, to_y: Pixels) -> str:
    at = [(to_x(p.x), to_y(p.y)) for p in line.points]
    path = " ".join(f"{_n(x)},{_n(y)}" for x, y in at)
    parts = [f'<g class="s{line.style}">']
    if len(at) > 1:
        parts.append(f'<polyline class="line" points="{path}"/>')
    for point, (x, y) in zip(line.points, at, strict=True):
        if point.low is not None or point.high is not None:
            ends = [to_y(v) for v in (point.low, point.high) if v is not None]
            low, high = max([y, *ends]), min([y, *ends])
            caps = "".join(f"M{_n(x - 3)} {_n(e)}H{_n(x + 3)}" for e in ends)
            parts.append(f'<path class="bar" d="M{_n(x)} {_n(low)}V{_n(high)}{caps}"/>')
    for point, (x, y) in zip(line.points, at, strict=True):
        hollow = " hollow" if point.doubtful else ""
        parts.append(f'<path class="mark{hollow}" d="{_mark(line.style, x, y)}"/>')
    for point, (x, y) in zip(line.points, at, strict=True):
        parts.append(f'<circle class="hit" cx="{_n(x)}" cy="{_n(y)}" r="11">{_tip(point.tip)}</circle>')
    return "".join(parts) + "</g>"


def _notes(lines: Sequence[Line], to_x: Pixels, to_y: Pixels) -> str:
    """Above their points; one that would lie on another is left to the tip and the table."""
    parts: list[str] = []
    placed: list[tuple[float, float, float]] = []
    for point in (point for line in lines for point in line.points if point.note):
        x, y = to_x(point.x), to_y(point.high if point.high is not None else point.y) - 7
        half = _width(point.note, FINE) / 2
        if all(abs(x - other_x) > half + other or abs(y - other_y) > FINE for other_x, other_y, other in placed):
            placed.append((x, y, half))
            parts.append(f'<text class="note mid" x="{_n(x)}" y="{_n(y)}">{escape(point.note)}</text>')
    return "".join(parts)


def _mark(style: int, x: float, y: float) -> str:
    """A shape for each style, so that lines can be told apart without colour."""
    r = MARK
    if style == 0:  # a bar lying down
        return f"M{_n(x - r)} {_n(y - 2)}h{_n(2 * r)}v4h{_n(-2 * r)}z"
    if style == 1:
        return f"M{_n(x - r)} {_n(y)}a{r} {r} 0 1 0 {_n(2 * r)} 0a{r} {r} 0 1 0 {_n(-2 * r)} 0z"
    if style == 2:
        s = r * 0.92
        return f"M{_n(x - s)} {_n(y - s)}h{_n(2 * s)}v{_n(2 * s)}h{_n(-2 * s)}z"
    if style == 3:
        return f"M{_n(x)} {_n(y - r - 1)}l{_n(r + 1)} {_n(2 * r)}h{_n(-2 * (r + 1))}z"
    if style == 4:
        return f"M{_n(x)} {_n(y - r - 1)}l{_n(r + 1)} {_n(r + 1)}l{_n(-r - 1)} {_n(r + 1)}l{_n(-r - 1)} {_n(-r - 1)}z"
    return f"M{_n(x)} {_n(y + r + 1)}l{_n(r + 1)} {_n(-2 * r)}h{_n(-2 * (r + 1))}z"


def _end_labels(
    labels: Sequence[tuple[str, int]],
    ends: Sequence[tuple[float, float]],
    x: float,
    room: float,
    top: float,
    bottom: float,
) -> str:
    """Names at the ends of lines, moved apart where they would meet, with a thread back to where they belong."""
    if not labels:
        return ""
    per_line = 2 if 2 * LINE_HEIGHT * len(labels) <= bottom - top else 1
    wrapped = [_wrap(text, room, per_line) for text, _ in labels]
    heights = [LINE_HEIGHT * len(lines) + 2 for lines in wrapped]
    centres = _spread([y for _, y in ends], heights, top - 6, bottom + 6)
    parts = []
    for (_, style), (end_x, end_y), lines, height, y in zip(labels, ends, wrapped, heights, centres, strict=True):
        parts.append(
            f'<path class="thread s{style}" d="M{_n(end_x + MARK + 2)} {_n(end_y)}L{_n(x - 4)} {_n(y)}"/>'
            if x - 4 > end_x + MARK + 2
            else ""
        )
        first = y - height / 2 + LINE_HEIGHT - 2
        spans = "".join(
            f'<tspan x="{_n(x)}" y="{_n(first + i * LINE_HEIGHT)}">{escape(t)}</tspan>' for i, t in enumerate(lines)
        )
        parts.append(f'<text class="label">{spans}</text>')
    return "".join(parts)


def _heat(panel: HeatPanel, size: Size) -> tuple[str, float, str]:
    """Cells under column names, beside row names; columns that do not fit go into a block below."""
    width = size[0]
    room = min(max((_width(r) for r in panel.rows), default=0), 0.36 * width) + 10
    left = LEFT + room
    fitting = max(1, int((width - left - RIGHT) // LEAST_CELL))
    blocks = math.ceil(len(panel.columns) / fitting) or 1
    per_block = math.ceil(len(panel.columns) / blocks)
    cell = min(MOST_CELL, (width - left - RIGHT) / max(per_block, 1))
    parts, y = [], 14.0
    for begin in range(0, len(panel.columns), max(per_block, 1)):
        columns = panel.columns[begin : begin + per_block]
        parts.append(f'<text class="axis" x="{_n(left)}" y="{_n(y)}">{escape(panel.column_label)}</text>')
        parts.append(f'<text class="axis end" x="{_n(left - 10)}" y="{_n(y + 18)}">{escape(panel.row_label)}</text>')
        for i, column in enumerate(columns):
            x = left + (i + 0.5) * cell
            parts.append(f'<text class="tick mid" x="{_n(x)}" y="{_n(y + 18)}">{escape(_cut(column, cell))}</text>')
        y += 26
        for row, cells in zip(panel.rows, panel.cells, strict=True):
            lines = _wrap(row, room - 10, 2)
            first = y + CELL_HEIGHT / 2 + 4 - (len(lines) - 1) * LINE_HEIGHT / 2
            spans = "".join(
                f'<tspan x="{_n(left - 10)}" y="{_n(first + i * LINE_HEIGHT)}">{escape(t)}</tspan>'
                for i, t in enumerate(lines)
            )
            parts.append(f'<text class="label end">{spans}</text>')
            for i, value in enumerate(cells[begin : begin + per_block]):
                parts.append(_cell(value, left + i * cell, y, cell))
            y += CELL_HEIGHT
        y += 26
    told = f"{panel.row_label} by {panel.column_label}. " + "; ".join(
        f"{row}: " + ", ".join(c.text if c else "none" for c in cells)
        for row, cells in zip(panel.rows, panel.cells, strict=True)
    )
    return "".join(parts), y - 18, told


def _cell(cell: Cell | None, x: float, y: float, width: float) -> str:
    box = f'x="{_n(x + 1)}" y="{_n(y + 1)}" width="{_n(width - 2)}" height="{CELL_HEIGHT - 2}" rx="4"'
    middle = _n(x + width / 2)
    if cell is None:
        return (
            f'<rect class="cell none" {box}/><text class="tick mid" x="{middle}" y="{_n(y + CELL_HEIGHT / 2 + 4)}">'
            "–</text>"
        )
    step = "even" if cell.ratio is None else f"h{heat_step(cell.ratio)}"
    marked = " marked" if cell.marked else ""
    text_y = y + CELL_HEIGHT / 2 + (-1 if cell.fine else 5)
    fine = f'<text class="fine mid" x="{middle}" y="{_n(text_y + 14)}">{escape(cell.fine)}</text>' if cell.fine else ""
    return (
        f'<g class="{step}"><rect class="cell{marked}" {box}>{_tip(cell.tip)}</rect>'
        f'<text class="value mid" x="{middle}" y="{_n(text_y)}">{escape(cell.text)}</text>{fine}</g>'
    )


def heat_step(ratio: float) -> int:
    """0 and 1: slower, 2: even, 3 to 6: faster."""
    return sum(ratio >= edge for edge in HEAT_EDGES)


def _apart(ticks: Sequence[float], to_x: Pixels, unit: Unit) -> list[float]:
    """Those whose texts do not meet."""
    kept: list[float] = []
    free = -math.inf
    for tick in sorted(ticks):
        half = _width(shown(tick, unit), FINE) / 2
        if to_x(tick) - half >= free:
            kept.append(tick)
            free = to_x(tick) + half + 5
    return kept


def _spread(wanted: Sequence[float], heights: Sequence[float], top: float, bottom: float) -> list[float]:
    """Centres as near to those wanted as boxes of these heights allow, in their order, between the two edges."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    centres = list(wanted)
    edge = top
    for i in order:
        centres[i] = max(wanted[i], edge + heights[i] / 2)
        edge = centres[i] + heights[i] / 2
    edge = bottom
    for i in reversed(order):
        centres[i] = min(centres[i], edge - heights[i] / 2)
        edge = centres[i] - heights[i] / 2
    return centres


def _width(text: str, height: float = TEXT) -> float:
    wide = sum(2 if ord(c) > 0x2E80 else 1.25 if c in "MWmw@%" else 1 for c in text)
    return wide * CHARACTER * height


def _cut(text: str, room: float) -> str:
    if _width(text) <= room:
        return text
    while text and _width(text + "…") > room:
        text = text[:-1]
    return f"{text}…"


def _wrap(text: str, room: float, most: int) -> list[str]:
    """At spaces, into as many lines as there may be; what is left over is cut."""
    lines: list[str] = []
    words = text.split(" ")
    while words and len(lines) < most - 1:
        taken = 1
        while taken < len(words) and _width(" ".join(words[: taken + 1])) <= room:
            taken += 1
        lines.append(_cut(" ".join(words[:taken]), room))
        words = words[taken:]
    if words:
        lines.append(_cut(" ".join(words), room))
    return lines


def _tip(text: str) -> str:
    return f"<title>{escape(text)}</title>" if text else ""


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
