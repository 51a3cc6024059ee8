"""The part of a report about acceptance: by position, by K, by category, by context.

Knows rows of `eval`. Data sets are told apart by name and by what was asked of them: a set that was answered to other
lengths is another set.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from peagle.config import ReportSettings
from peagle.report.axes import Axis, load_scale, shown
from peagle.report.charts import Cell, HeatPanel, Line, LinePanel, Panel, Point
from peagle.report.page import Block, Figure, Note, Part, Section, Table, Tile
from peagle.report.series import (
    Source,
    by_key,
    chunks,
    interval,
    labels,
    method_name,
    server_name,
    share,
    styles,
)
from peagle.results.schema import AcceptanceRow

# Of the settings of a run, those that change what an acceptance length means.
WORK = ("max_tokens", "raw", "chat_template", "target")


@dataclass(frozen=True)
class Found:
    """A row, with what the page calls its drafter and its data set."""

    row: AcceptanceRow
    series: str
    dataset: str
    few: bool

    @property
    def length(self) -> float:
        length = self.row.acceptance_length
        assert length is not None, "rows without rounds are left out"
        return length


def acceptance_part(sources: Sequence[Source], settings: ReportSettings) -> Part:
    measured = [(row, source) for source in sources for row in source.results.rows if row.num_drafts]
    empty = sum(not row.num_drafts for source in sources for row in source.results.rows)
    warnings = [f"{empty} rows of acceptance hold no round and are left out."] if empty else []
    if not measured:
        return Part(warnings=tuple(warnings))
    found = _named(measured, settings)
    if len({f.dataset for f in found}) > len({f.row.dataset for f in found}):
        warnings.append(
            "Data sets of one name that were asked in different ways are not compared: they are shown as others."
        )
    whole = [f for f in found if f.row.category is None and f.row.context_range is None]
    plain = [f for f in whole if f.row.looping_responses == "included"] or whole
    warnings += _loops(whole, settings) + _few(plain, settings)
    blocks: list[Block] = []
    if plain:
        blocks += [_positions(plain, conditional=False), _positions(plain, conditional=True), _by_k(plain)]
    else:
        blocks.append(Note("These results hold parts of data sets alone, no whole one.", "warning"))
    categories = [
        f for f in found if f.row.category is not None and f.row.looping_responses == found[0].row.looping_responses
    ]
    contexts = [
        f
        for f in found
        if f.row.context_range is not None and f.row.looping_responses == found[0].row.looping_responses
    ]
    if categories:
        blocks.append(_by_category(categories, plain))
    if contexts:
        blocks.append(_by_context(contexts))
    blocks.append(_table(whole))
    tiles = _tiles(plain)
    return Part((Section("Acceptance", tuple(blocks)),), _sentences(plain), tiles, tuple(warnings))


def _named(measured: Sequence[tuple[AcceptanceRow, Source]], settings: ReportSettings) -> list[Found]:
    def setting(row: AcceptanceRow) -> tuple[Any, ...]:
        part = (row.dataset, row.category, row.context_range, row.num_speculative_tokens, row.looping_responses)
        return (row.drafter, row.method, row.engine, row.temperature, part)

    several = len(Counter(source.name for _, source in measured)) > 1
    twice = several and max(Counter(setting(row) for row, _ in measured).values()) > 1
    series = [
        (
            method_name(row.method),
            f"t={row.temperature:g}",
            row.drafter,
            server_name(row.engine),
            source.name if twice else "",
        )
        for row, source in measured
    ]
    names = dict(zip(dict.fromkeys(series), labels(list(dict.fromkeys(series))), strict=True))
    sets = [_asked(row, source) for row, source in measured]
    asked = dict(zip(dict.fromkeys(sets), labels(list(dict.fromkeys(sets))), strict=True))
    return [
        Found(row, names[key], asked[of], row.num_responses < settings.few_answers)
        for (row, _), key, of in zip(measured, series, sets, strict=True)
    ]


def _asked(row: AcceptanceRow, source: Source) -> tuple[str, ...]:
    """A data set's name, and what was asked of it: the more of it differs, the longer is what it is called."""
    settings = source.results.settings
    data = settings.get("data")
    about = data.get(row.dataset) if isinstance(data, dict) else None
    prompts = str(about.get("sha256", ""))[:8] if isinstance(about, dict) else ""
    told = (f"{name.replace('_', ' ')} {settings[name]}" if settings.get(name) is not None else "" for name in WORK)
    return row.dataset, *told, f"prompts {prompts}" if prompts else ""


def _positions(found: Sequence[Found], conditional: bool) -> Figure:
    """Of each drafter and data set the row with the most drafts."""
    longest = [max(rows, key=lambda f: f.row.num_speculative_tokens) for rows in _each(found).values()]

    def points(f: Found) -> list[Point]:
        shares = f.row.per_position_conditional_rates if conditional else f.row.per_position_acceptance_rates
        return [
            Point(
                float(i),
                value,
                tip=f"{f.series}, {f.dataset}, draft {i}: {value:.1%} of {_reached(f, i, conditional):,} rounds",
                doubtful=f.few,
            )
            for i, value in enumerate(shares, 1)
            if value is not None
        ]

    x = Axis("draft", ticks=tuple(float(i) for i in range(1, max(f.row.num_speculative_tokens for f in longest) + 1)))
    label = "accepted, if all before it were" if conditional else "accepted, all before it too"
    panels = _panels(longest, points, x, Axis(label, "share", ticks=(0.0, 0.25, 0.5, 0.75, 1.0)))
    if conditional:
        title = "Each draft given those before it"
        caption = (
            "Of the rounds in which all drafts before it were accepted. A level line is a drafter that does not tire."
        )
    else:
        title = "Acceptance by position"
        caption = (
            "Share of all rounds in which draft 1, 2, .. was accepted. One plus the sum of a line is its acceptance "
            "length."
        )
    width = max(f.row.num_speculative_tokens for f in longest)
    rows = tuple(
        (
            f.series,
            f.dataset,
            *map(
                share,
                _padded(
                    f.row.per_position_conditional_rates if conditional else f.row.per_position_acceptance_rates, width
                ),
            ),
        )
        for f in longest
    )
    heads = ("", "data set", *(str(i) for i in range(1, width + 1)))
    return Figure(title, caption, _few_points(longest), panels, Table(title, heads, rows))


def _by_k(found: Sequence[Found]) -> Figure:
    lines = [sorted(rows, key=lambda f: f.row.num_speculative_tokens) for rows in _each(found).values()]
    firsts = [rows[0] for rows in lines]

    def points(first: Found) -> list[Point]:
        rows = next(rows for rows in lines if rows[0] is first)
        return [_length_point(f, float(f.row.num_speculative_tokens)) for f in rows]

    ticks = tuple(sorted({float(f.row.num_speculative_tokens) for f in found}))
    x, y = Axis("K, drafts a round", ticks=ticks), Axis("tokens a round", start=1.0)
    panels = _panels(firsts, points, x, y)
    rows = []
    for members in lines:
        at = {float(f.row.num_speculative_tokens): _with_interval(f) for f in members}
        rows.append((members[0].series, members[0].dataset, *(at.get(k, "–") for k in ticks)))
    caption = (
        "Tokens that a round of drafting and verifying gains, the target's own included, with 95% intervals over "
        "answers. Where it levels off, more drafts are drafted in vain."
    )
    heads = ("", "data set", *(f"K={shown(k)}" for k in ticks))
    table = Table("Acceptance length by K", heads, tuple(rows))
    return Figure("Acceptance length by K", caption, _few_points(found), panels, table)


def _panels(found: Sequence[Found], points: Callable[[Found], list[Point]], x: Axis, y: Axis) -> tuple[Panel, ...]:
    """A panel for each data set with a line for each drafter; of a single drafter one panel, a line for each set."""
    lone = len({f.series for f in found}) == 1
    grouped = {found[0].series: list(found)} if lone else by_key(found, [f.dataset for f in found])
    panels: list[Panel] = []
    for title, members in grouped.items():
        for some in chunks(members):
            colours = range(1, len(some) + 1) if lone else styles([f.row.method for f in some])
            lines = tuple(
                Line(f.dataset if lone else f.series, tuple(points(f)), style % 6)
                for f, style in zip(some, colours, strict=True)
            )
            panels.append(LinePanel(title, x, y, lines))
    return tuple(panels)


def _by_category(found: Sequence[Found], whole: Sequence[Found]) -> Figure:
    """At the largest K of each; the colour is against the same drafter's whole data set."""
    overall = {(f.series, f.dataset, f.row.num_speculative_tokens): f.length for f in whole}
    keys = [(f.series, f.dataset, f.row.category or "") for f in found]
    most = {key: max(rows, key=lambda f: f.row.num_speculative_tokens) for key, rows in by_key(found, keys).items()}
    columns = list(dict.fromkeys(key[0] for key in most))
    several = len({key[1] for key in most}) > 1
    names = list(dict.fromkeys((key[1], key[2]) for key in most))
    cells, rows = [], []
    for dataset, category in names:
        line: list[Cell | None] = []
        for series in columns:
            f = most.get((series, dataset, category))
            of_all = overall.get((series, dataset, f.row.num_speculative_tokens)) if f else None
            line.append(
                None if f is None else Cell(shown(f.length), _spread(f), f.length / of_all if of_all else None, _tip(f))
            )
            if f:
                told = (
                    str(f.row.num_speculative_tokens),
                    shown(f.length),
                    interval(f.row.acceptance_length_ci95),
                    str(f.row.num_responses),
                )
                rows.append((f"{dataset}: {category}", series, *told))
        cells.append(tuple(line))
    titles = tuple(f"{dataset}: {category}" if several else category for dataset, category in names)
    panel = HeatPanel("By category", "", "", titles, tuple(columns), tuple(cells))
    caption = "Acceptance length with its 95% interval, at the largest K measured."
    reading = "Blue lies above the same drafter's mean over the data set, orange below, grey within 5% of it."
    table = Table("Acceptance length by category", ("", "", "K", "length", "95% interval", "answers"), tuple(rows))
    return Figure("By category", caption, reading, (panel,), table)


def _by_context(found: Sequence[Found]) -> Figure:
    keys = [(f.series, f.dataset, f.row.context_range) for f in found]
    most = [max(rows, key=lambda f: f.row.num_speculative_tokens) for rows in by_key(found, keys).values()]
    lines = [sorted(rows, key=_end) for rows in _each(most).values()]

    def points(first: Found) -> list[Point]:
        rows = next(rows for rows in lines if rows[0] is first)
        return [_length_point(f, _end(f)) for f in rows]

    ticks = tuple(sorted({_end(f) for f in most}))
    x = Axis("tokens before the round, up to", scale=load_scale(ticks), ticks=ticks)
    panels = _panels([rows[0] for rows in lines], points, x, Axis("tokens a round", start=1.0))
    told = tuple(
        (
            f.series,
            f.dataset,
            _context(f),
            str(f.row.num_speculative_tokens),
            shown(f.length),
            interval(f.row.acceptance_length_ci95),
        )
        for rows in lines
        for f in rows
    )
    heads = ("", "data set", "tokens before", "K", "acceptance length", "95% interval")
    caption = "Acceptance length by how much stood before the round, at the largest K measured."
    return Figure("By context length", caption, _few_points(most), panels, Table("By context length", heads, told))


def _table(found: Sequence[Found]) -> Table:
    heads = ("", "data set", "K", "loops", "answers", "tokens", "rounds", "acceptance length", "95% interval")
    rows = tuple(
        (
            f.series,
            f.dataset,
            str(f.row.num_speculative_tokens),
            f.row.looping_responses,
            f"{f.row.num_responses:,}",
            f"{f.row.num_output_tokens:,}",
            f"{f.row.num_drafts:,}",
            shown(f.length),
            interval(f.row.acceptance_length_ci95),
        )
        for f in found
    )
    return Table("All counts", heads, rows)


def _tiles(found: Sequence[Found]) -> tuple[Tile, ...]:
    """Of each method, at its largest K and lowest temperature: from the data set it does worst on to its best."""
    tiles = []
    for rows in by_key(found, [f.row.method for f in found]).values():
        coolest = min(f.row.temperature for f in rows)
        most = max(f.row.num_speculative_tokens for f in rows)
        of_tile = sorted(
            (f for f in rows if (f.row.temperature, f.row.num_speculative_tokens) == (coolest, most)),
            key=lambda f: f.length,
        )
        if not of_tile:
            continue
        worst, best = of_tile[0], of_tile[-1]
        value = shown(best.length) if worst is best else f"{shown(worst.length)}–{shown(best.length)}"
        about = f"{best.series}, K={most}, {worst.dataset}" + ("" if worst is best else f" to {best.dataset}")
        tiles.append(Tile("Acceptance length", value, about))
    return tuple(tiles[:2])


def _sentences(found: Sequence[Found]) -> tuple[str, ...]:
    """What acceptance alone can say, for results that hold no speed."""
    best = max(found, key=lambda f: f.length, default=None)
    if best is None:
        return ()
    return (
        f"{best.series} gains up to {shown(best.length)} tokens a round ({best.dataset}, "
        f"K={best.row.num_speculative_tokens}); which K pays is a question of speed.",
    )


def _loops(whole: Sequence[Found], settings: ReportSettings) -> list[str]:
    """Answers that repeat themselves are easy to draft: said where they carry the mean."""
    said = []
    for rows in by_key(whole, [(f.series, f.dataset, f.row.num_speculative_tokens) for f in whole]).values():
        both = {f.row.looping_responses: f for f in rows}
        if len(both) == 2 and both["included"].length > both["excluded"].length * (1 + settings.loops_matter):
            f = both["included"]
            said.append(
                f"{f.series}, {f.dataset}, K={f.row.num_speculative_tokens}: answers that repeat themselves lift the "
                f"acceptance length from {shown(both['excluded'].length)} to {shown(f.length)}."
            )
    return said


def _few(found: Sequence[Found], settings: ReportSettings) -> list[str]:
    few = sorted({f"{f.dataset} ({f.row.num_responses})" for f in found if f.few})
    if not few:
        return []
    return [f"Acceptance of fewer than {settings.few_answers} answers varies much: {', '.join(few)}."]


def _each(found: Sequence[Found]) -> dict[tuple[str, str], list[Found]]:
    return by_key(found, [(f.series, f.dataset) for f in found])


def _length_point(f: Found, x: float) -> Point:
    low, high = f.row.acceptance_length_ci95 or (None, None)
    return Point(x, f.length, low, high, _tip(f), doubtful=f.few)


def _reached(f: Found, draft: int, conditional: bool) -> int:
    return [f.row.num_drafts, *f.row.num_accepted_tokens_per_pos][draft - 1] if conditional else f.row.num_drafts


def _padded(values: Sequence[float | None], width: int) -> list[float | None]:
    return [*values, *[None] * (width - len(values))]


def _with_interval(f: Found) -> str:
    return (
        f"{shown(f.length)} ({interval(f.row.acceptance_length_ci95)})"
        if f.row.acceptance_length_ci95
        else shown(f.length)
    )


def _spread(f: Found) -> str:
    return (
        f"{f.row.acceptance_length_ci95[0]:.2f}–{f.row.acceptance_length_ci95[1]:.2f}"
        if f.row.acceptance_length_ci95
        else ""
    )


def _tip(f: Found) -> str:
    part = f", {f.row.category}" if f.row.category else f", {_context(f)} tokens before" if f.row.context_range else ""
    within = f" (95% {interval(f.row.acceptance_length_ci95)})" if f.row.acceptance_length_ci95 else ""
    where = f"{f.series}, {f.dataset}{part}, K={f.row.num_speculative_tokens}"
    return f"{where}: {shown(f.length)} tokens a round{within}, {f.row.num_responses} answers"


def _end(f: Found) -> float:
    assert f.row.context_range is not None
    return float(f.row.context_range[1])


def _context(f: Found) -> str:
    assert f.row.context_range is not None
    return f"{f.row.context_range[0]:,} to {f.row.context_range[1]:,}"


def _few_points(found: Sequence[Found]) -> str:
    return "Hollow points: few answers." if any(f.few for f in found) else ""
