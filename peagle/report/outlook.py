"""The part of a report about what is expected rather than measured: `tune`'s table of rounds, `plan`'s of loads.

Knows their rows. Each document stands alone: what is expected of one machine says nothing about another.
"""

from __future__ import annotations

from collections.abc import Sequence

from peagle.report.axes import Axis, load_scale, shown
from peagle.report.charts import Cell, HeatPanel, Line, LinePanel, Panel, Point
from peagle.report.page import Block, Figure, Note, Part, Section, Table, Tile
from peagle.report.series import (
    Source,
    by_key,
    choice_name,
    chunks,
    listed,
    method_name,
    number,
    segments,
    styles,
)
from peagle.results.schema import PlanRow, TuneRow

GUESSED = "a guess"  # what `tune` says of rates that nobody gave it


def tune_part(sources: Sequence[Source]) -> Part:
    sections, said, warnings = [], [], []
    for source in sources:
        rows: list[TuneRow] = source.results.rows
        if not rows:
            continue
        where = f": {source.name}" if len(sources) > 1 else ""
        chosen = sorted((row for row in rows if row.chosen), key=lambda row: row.batch_size)
        sentence = _tuned(chosen, f"By the rounds measured on {source.machine}, ")
        said += [sentence] if sentence else []
        lead: list[Block] = [] if sentence else [Note("No K was chosen in these results.", "warning")]
        if source.results.settings.get("rates_from") == GUESSED:
            warnings.append(f"{source.name}: acceptance was guessed, not measured, and the chosen K rests on it.")
        sections.append(Section(f"K by load{where}", (*lead, _rounds(rows))))
    return Part(tuple(sections), tuple(said), warnings=tuple(warnings))


def _tuned(chosen: Sequence[TuneRow], opening: str) -> str:
    if not chosen:
        return ""
    pairs = segments(
        [
            (float(row.batch_size), f"K={row.num_speculative_tokens}" if row.num_speculative_tokens else "no drafts")
            for row in chosen
        ]
    )
    return f"{opening}{_at_loads(pairs)} should bring the most tokens."


def _rounds(rows: Sequence[TuneRow]) -> Figure:
    """Tokens a second against no drafts, if those are there, else against the best of the batch."""
    at = {(row.num_speculative_tokens, row.batch_size): row for row in rows}
    ks, batches = sorted({row.num_speculative_tokens for row in rows}), sorted({row.batch_size for row in rows})
    against = 0 in ks
    cells = []
    for k in ks:
        line: list[Cell | None] = []
        for batch in batches:
            row = at.get((k, batch))
            if row is None:
                line.append(None)
                continue
            base = at.get((0, batch)) if against else None
            ratio = _over(row.expected_output_throughput, base.expected_output_throughput if base else None)
            tip = f"K={k}, {batch} at once: a round takes {shown(row.step_ms)} ms, "
            tip += f"{shown(row.expected_output_throughput)} tokens/s are expected"
            tip += f", {shown(ratio, 'times')} no drafts" if ratio is not None else ""
            text = shown(row.expected_output_throughput)
            line.append(Cell(text, f"{shown(row.step_ms)} ms", ratio, tip, row.chosen))
        cells.append(tuple(line))
    names = tuple(f"K={k}" if k else "no drafts" for k in ks)
    title = "Expected tokens/s and time of a round"
    panel = HeatPanel(title, "", "requests at once", names, tuple(map(str, batches)), tuple(cells))
    table = Table(
        title,
        ("K", "requests at once", "ms a round", "expected tokens/s", "chosen"),
        tuple(
            (
                str(r.num_speculative_tokens),
                str(r.batch_size),
                shown(r.step_ms),
                shown(r.expected_output_throughput),
                "yes" if r.chosen else "",
            )
            for r in sorted(rows, key=lambda r: (r.batch_size, r.num_speculative_tokens))
        ),
    )
    caption = "Rounds are measured; tokens a second follow from them and from acceptance."
    reading = "The framed cell of a column was chosen."
    reading = f"Blue is faster than no drafts, orange slower. {reading}" if against else reading
    return Figure(title, caption, reading, (panel,), table)


def plan_part(sources: Sequence[Source]) -> Part:
    sections, said, tiles = [], [], []
    for source in sources:
        rows: list[PlanRow] = source.results.rows
        if not rows:
            continue
        where = f": {source.name}" if len(sources) > 1 else ""
        sentence = _planned(rows, str(source.results.settings.get("gpu") or "the given GPU"))
        said += [sentence] if sentence else []
        lead: list[Block] = [] if sentence else [Note("No row was chosen in these results.", "warning")]
        figures = [_plan_figure(rows, cost=False)]
        if any(row.cost_per_million_tokens is not None for row in rows):
            figures.append(_plan_figure(rows, cost=True))
            tiles += _saving(rows)
        sections.append(Section(f"Plan{where}", (*lead, *figures, _plan_table(rows))))
    return Part(tuple(sections), tuple(said), tuple(tiles[:1]))


def _planned(rows: Sequence[PlanRow], gpu: str) -> str:
    chosen = sorted((row for row in rows if row.chosen), key=lambda row: row.concurrency)
    if not chosen:
        return ""
    pairs = [(float(row.concurrency), choice_name(row.method, row.num_speculative_tokens)) for row in chosen]
    gpus = sorted({row.num_gpus for row in chosen})
    needed = f"{gpus[0]}" if len(gpus) == 1 else f"{gpus[0]} to {gpus[-1]}"
    return f"On paper, by a roofline model: {_at_loads(segments(pairs))}, on {needed} x {gpu}."


def _best(rows: Sequence[PlanRow]) -> dict[str, list[PlanRow]]:
    """Of each method the fastest K at each load, by load."""
    methods = by_key(rows, [row.method for row in rows])
    best = {}
    for method, members in methods.items():
        loads = by_key(members, [row.concurrency for row in members])
        best[method] = [max(loads[load], key=lambda row: row.output_throughput) for load in sorted(loads)]
    return best


def _plan_figure(rows: Sequence[PlanRow], cost: bool) -> Figure:
    def value(row: PlanRow) -> float | None:
        return row.cost_per_million_tokens if cost else row.output_throughput

    lines, told = [], []
    best = _best(rows)
    for (method, members), style in zip(best.items(), styles(list(best)), strict=True):
        points = []
        for row in members:
            y = value(row)
            if y is None:
                continue
            what = f"${shown(y)} a million tokens" if cost else f"{shown(y)} tokens/s"
            points.append(
                Point(
                    row.concurrency,
                    y,
                    tip=f"{choice_name(method, row.num_speculative_tokens)}, {row.concurrency} at once: {what}",
                )
            )
            told.append((method_name(method), str(row.concurrency), str(row.num_speculative_tokens), shown(y)))
        if points:
            lines.append(Line(method_name(method), tuple(points), style))
    ticks = tuple(sorted({float(row.concurrency) for row in rows}))
    x = Axis("requests at once", scale=load_scale(ticks), ticks=ticks)
    heights = [p.y for line in lines for p in line.points]
    wide = bool(heights) and min(heights) > 0 and max(heights) > 12 * min(heights)
    name = "$ a million tokens" if cost else "expected tokens/s"
    y_axis = Axis(name, "number", "log" if wide else "linear", None, 0.0)
    title = "Cost of a million output tokens" if cost else "Expected throughput by load"
    panels: tuple[Panel, ...] = tuple(LinePanel(title, x, y_axis, tuple(some)) for some in chunks(lines))
    caption = "Expected from a roofline model, not measured; of each method the fastest K at each load."
    return Figure(title, caption, "", panels, Table(title, ("", "requests at once", "K", name), tuple(told)))


def _plan_table(rows: Sequence[PlanRow]) -> Table:
    heads = ("", "K", "requests at once", "ms a round", "tokens/s", "GPUs", "$ a million tokens", "chosen")
    told = tuple(
        (
            method_name(row.method),
            str(row.num_speculative_tokens),
            str(row.concurrency),
            shown(row.step_ms),
            shown(row.output_throughput),
            str(row.num_gpus),
            number(row.cost_per_million_tokens),
            "yes" if row.chosen else "",
        )
        for row in sorted(rows, key=lambda row: (row.concurrency, row.method, row.num_speculative_tokens))
    )
    return Table("All that was planned", heads, told)


def _saving(rows: Sequence[PlanRow]) -> list[Tile]:
    """The largest share of the cost without a drafter that a chosen row saves."""
    without = {r.concurrency: r.cost_per_million_tokens for r in rows if r.method == "none"}
    found = []
    for row in rows:
        ratio = _over(row.cost_per_million_tokens, without.get(row.concurrency))
        if row.chosen and ratio is not None and ratio < 1:
            found.append((ratio, row))
    if not found:
        return []
    ratio, row = min(found, key=lambda pair: pair[0])
    about = f"{choice_name(row.method, row.num_speculative_tokens)} at {row.concurrency} at once, on paper"
    return [Tile("Cost saved by drafting", f"{1 - ratio:.0%}", about)]


def _over(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


def _span(loads: Sequence[float]) -> str:
    return shown(loads[0]) if len(loads) == 1 else f"{shown(loads[0])} to {shown(loads[-1])}"


def _at_loads(pairs: Sequence[tuple[list[float], str]]) -> str:
    """What is counted is said once: 'K=7 at 1 to 8 requests at once and K=3 at 64'."""
    ends = [" request at once" if pairs[0][0] == [1.0] else " requests at once", *[""] * (len(pairs) - 1)]
    return listed([f"{choice} at {_span(loads)}{end}" for (loads, choice), end in zip(pairs, ends, strict=True)])
