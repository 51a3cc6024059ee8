"""The part of a report about measured speed: throughput, speed-up, latency, and which K to serve with.

Knows rows of `bench`. Rows are set beside each other only where they did the same work on the same machine: other
prompts, lengths or machines make a section of their own, and no ratio crosses from one to the other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from peagle.report.axes import Axis, Scale, shared, shown
from peagle.report.charts import Cell, HeatPanel, Level, Line, LinePanel, Panel, Point
from peagle.report.page import Block, Figure, Note, Part, Section, Table, Tile
from peagle.report.runs import NOT_MEASURED, Group, Run, named, ratio_of, recommendations
from peagle.report.series import (
    ORDER,
    Source,
    by_key,
    chunks,
    interval,
    listed,
    method_name,
    number,
    server_name,
)
from peagle.results.comparison import Speedup
from peagle.results.statistics import Interval, Percentiles

AUTO_STYLE = 5
COLOURS = "Blue is faster, orange slower; grey is even within 5%, or within the error."
WIDE_RANGE = 12  # largest over smallest value, from which an axis is logarithmic


def speed_part(sources: Sequence[Source]) -> Part:
    runs = [Run(row, source) for source in sources for row in source.results.rows]
    if not runs:
        return Part()
    targets = {run.source.target for run in runs} - {""}
    keys = [
        (
            run.row.workload_sha256,
            "open" if run.row.concurrency is None else "closed",
            run.source.machine,
            run.source.target if len(targets) > 1 else "",
        )
        for run in runs
    ]
    groups = [Group(named(of_one)) for of_one in by_key(runs, keys).values()]
    kept = list(dict.fromkeys(keys))
    titles = _titles(kept)
    warnings = [_not_compared(kept)] if len(kept) > 1 else []
    sections, advice, tiles = [], [], []
    for group, title in zip(groups, titles, strict=True):
        said = recommendations(group)
        prefix = f"{title.removeprefix('Speed: ')}: " if len(groups) > 1 else ""
        advice += [prefix + sentence for sentence in said]
        tiles.append(_tiles(group))
        sections.append(Section(title, _blocks(group)))
        # what `bench` itself said of a file stands on the page already; what failed comes first
        doubted = [w for run in group.runs for w in run.doubted if w not in run.source.results.warnings]
        warnings += sorted(doubted, key=lambda warning: "failed" not in warning)
    # the group with the largest set of runs has the tiles: numbers of different work do not stand side by side
    largest = max(range(len(groups)), key=lambda i: len(groups[i].runs))
    return Part(tuple(sections), tuple(advice), tuple(tiles[largest]), tuple(dict.fromkeys(warnings)))


def _not_compared(keys: Sequence[tuple[str, str, str, str]]) -> str:
    reasons = []
    for i, what in enumerate(("prompts or lengths", "kinds of load", "machines", "targets")):
        if len({key[i] for key in keys}) > 1:
            reasons.append(what)
    return (
        f"Runs of different {' and of different '.join(reasons)} are not compared: each of the {len(keys)} sets has "
        "its own section, and no chart or speed-up spans two of them."
    )


def _titles(keys: Sequence[tuple[str, str, str, str]]) -> list[str]:
    if len(keys) == 1:
        return ["Speed"]
    named = [
        (f"prompts {prompts[:8]}", f"{load} loop", machine, target or "unknown target")
        for prompts, load, machine, target in keys
    ]
    varying = [i for i in range(4) if len({key[i] for key in named}) > 1]
    return ["Speed: " + ", ".join(key[i] for i in varying) for key in named]


def _blocks(group: Group) -> tuple[Block, ...]:
    speedups = [_speedups(group, name, runs) for name, runs in group.engines.items()]
    figures = [_by_load(group), _by_k(group), *speedups, _side_by_side(group), _latency(group)]
    every = [figure for figure in figures if figure is not None]
    missing: list[Block] = []
    for members in group.engines.values():
        addresses = list(dict.fromkeys(server_name(run.row.engine) for run in members))
        if len(addresses) > 1:
            missing.append(Note(f"{listed(addresses)} are taken as one engine: each did what no other did."))
    if not any(run.row.method == "none" for run in group.runs):
        missing.append(
            Note("No run without a drafter is among these, so there is no speed-up: bench it too.", "warning")
        )
    return (*missing, *every, _table(group))


def _by_load(group: Group) -> Figure | None:
    if len(group.loads) < 2:
        return None
    panels: list[Panel] = []
    rows = []
    y = _speed_axis(group.runs)
    for engine, members in group.engines.items():
        lines = []
        for system, runs in by_key(members, [run.system for run in members]).items():
            best = [run for load in group.loads if (run := group.best(runs, load)) is not None]
            auto = [run for run in runs if run.row.num_speculative_tokens == "auto"]
            for name, of_line, style in ((system, best, runs[0].style), (f"{system} K=auto", auto, AUTO_STYLE)):
                if of_line:
                    ordered = sorted(of_line, key=lambda run: run.load)
                    lines.append(Line(name, tuple(_speed_point(group, run) for run in ordered), style))
                    at = {run.load: _at_k(run) for run in ordered}
                    rows.append((name, engine, *(at.get(load, "–") for load in group.loads)))
        panels += [
            LinePanel(engine or "Throughput against load", group.load_axis, y, tuple(some)) for some in chunks(lines)
        ]
    caption = (
        "Output tokens a second of all requests together; of each method the K that was fastest at each load, in "
        "brackets in the table."
    )
    reading = f"Bars are 95% intervals over repeats. {_doubted(group.runs)}"
    reading = f"Equal steps up are equal factors. {reading}" if y.scale == "log" else reading
    table = _table_by_load("Output tokens/s by load, best K each", group, rows)
    return Figure("Throughput against load", caption, reading, tuple(panels), table)


def _by_k(group: Group) -> Figure | None:
    panels: list[Panel] = []
    rows = []
    ticks = tuple(
        sorted(
            {
                float(run.row.num_speculative_tokens)
                for run in group.runs
                if isinstance(run.row.num_speculative_tokens, int)
            }
        )
    )
    for engine, members in group.engines.items():
        for load in group.loads:
            there = [run for run in members if run.load == load]
            lines = []
            for system, runs in by_key(there, [run.system for run in there]).items():
                fixed = [
                    (run.row.num_speculative_tokens, run)
                    for run in runs
                    if isinstance(run.row.num_speculative_tokens, int)
                ]
                fixed.sort(key=lambda pair: pair[0])
                if fixed:
                    points = tuple(dataclasses.replace(_speed_point(group, run), x=float(k)) for k, run in fixed)
                    lines.append(Line(system, points, fixed[0][1].style))
            flat = [run for run in there if run.row.method == "none" or run.row.num_speculative_tokens == "auto"]
            levels = tuple(
                Level(
                    run.short,
                    run.speed,
                    AUTO_STYLE if run.row.num_speculative_tokens == "auto" else run.style,
                    _tip(group, run),
                )
                for run in flat
            )
            title = f"{group.load_name(load)}, {engine}" if engine else group.load_name(load)
            x, y = Axis("K, drafts a round", ticks=ticks), Axis("output tokens/s", start=0.0)
            panels += [LinePanel(title, x, y, tuple(some), levels) for some in chunks(lines)]
    if not panels:
        return None
    for (label, engine), runs in by_key(group.runs, [(run.short, run.engine) for run in group.runs]).items():
        at = {run.load: _within(shown(run.speed), run.row.output_throughput_ci95) for run in runs}
        rows.append((label, engine, *(at.get(load, "–") for load in group.loads)))
    caption = "Output tokens a second, with their 95% intervals."
    reading = (
        "A panel for each load, each with its own scale from zero; dashes are runs without a fixed K. "
        f"{_doubted(group.runs)}"
    )
    table = _table_by_load("Output tokens/s by load and K", group, rows)
    return Figure("Throughput against K", caption, reading, tuple(panels), table)


def _speedups(group: Group, engine: str, members: Sequence[Run]) -> Figure | None:
    """Each drafter and K over no speculation."""
    names, cells, rows = [], [], []
    for label, runs in by_key(members, [run.short for run in members]).items():
        if runs[0].row.method == "none" or not any(group.baseline(run) for run in runs):
            continue
        at = {run.load: run for run in runs}
        found = [ratio_of(at.get(load), group.baseline(at[load]) if load in at else None) for load in group.loads]
        names.append(label)
        cells.append(_ratio_cells(group, label, found))
        rows.append((label, engine, *map(_ratio_text, found)))
    if not names:
        return None
    title = f"Speed-up over no speculation, {engine}" if engine else "Speed-up over no speculation"
    panel = HeatPanel(title, "", group.load_axis.label, tuple(names), _heads(group), tuple(cells))
    caption = (
        "Output tokens a second over those of the same engine without a drafter, at the same load and for the same "
        "prompts, with 95% intervals."
    )
    reading = f"{COLOURS} A dash was not measured."
    return Figure(title, caption, reading, (panel,), _table_by_load(title, group, rows))


def _side_by_side(group: Group) -> Figure | None:
    """P-EAGLE over EAGLE-3 for each engine, and each engine over the others, each side at its best K."""
    engines = list(group.engines)
    sides: list[tuple[str, list[Run], list[Run]]] = []

    def of(engine: str, method: str) -> list[Run]:
        return [run for run in group.engines[engine] if run.row.method == method]

    for engine in engines:
        where = f", {engine}" if engine else ""
        sides.append((f"P-EAGLE over EAGLE-3{where}", of(engine, "p-eagle"), of(engine, "eagle3")))
    for first, engine in enumerate(engines):
        for other in engines[first + 1 :]:
            for method in ORDER:
                name = f"{engine} over {other}, {method_name(method)}"
                sides.append((name, of(engine, method), of(other, method)))
    names, cells, rows = [], [], []
    for name, ours, theirs in sides:
        if not ours or not theirs:
            continue
        pairs = [(group.best(ours, load), group.best(theirs, load)) for load in group.loads]
        found = [ratio_of(mine, their) for mine, their in pairs]
        names.append(name)
        cells.append(_ratio_cells(group, name, found))
        ks = [f"K={_k(mine)} over K={_k(their)}" if mine and their else "" for mine, their in pairs]
        rows.append((name, "", *(f"{_ratio_text(r)} {k}".strip() for r, k in zip(found, ks, strict=True))))
    if not names:
        return None
    panel = HeatPanel("Side by side, best K each", "", group.load_axis.label, tuple(names), _heads(group), tuple(cells))
    caption = "Output tokens a second of the one over the other, each at the K that was fastest for it at that load."
    unit = "/s" if group.open_loop else " at once"
    heads = ("", *(f"{shown(load)}{unit}" for load in group.loads))
    table = Table("Side by side, best K each", heads, tuple((row[0], *row[2:]) for row in rows))
    return Figure("Side by side, best K each", caption, COLOURS, (panel,), table)


def _latency(group: Group) -> Figure | None:
    drawn: list[tuple[str, Line]] = []
    for engine, members in group.engines.items():
        for system, runs in by_key(members, [run.system for run in members]).items():
            best = [run for load in group.loads if (run := group.best(runs, load)) is not None]
            points = [point for run in best if (point := _latency_point(group, run)) is not None]
            if points:
                drawn.append((engine, Line(system, tuple(points), runs[0].style)))
    if not drawn:
        return None
    points = [point for _, line in drawn for point in line.points]
    times = [value for p in points for value in (p.y, p.high) if value is not None]
    speeds = [p.x for p in points]
    x = shared(Axis("output tokens/s, all requests together", "number", _scale(speeds)), speeds)
    y = shared(Axis("ms a token (TPOT)", "number", _scale(times), None, 0.0), times)
    panels = tuple(
        LinePanel(engine or "Latency against throughput", x, y, tuple(some))
        for engine, lines in by_key([line for _, line in drawn], [engine for engine, _ in drawn]).items()
        for some in chunks(lines)
    )
    caption = "Time of each request's first token (TTFT), of each further one (TPOT) and between chunks (ITL)."
    reading = (
        f"Right and low is good. The number at a point is its load in {group.load_axis.label}; the point is the median "
        f"time a token takes a request, the bar reaches to the 95th percentile. Best K each. {_doubted(group.runs)}"
    )
    return Figure("Latency against throughput", caption, reading, panels, _latency_table(group))


def _latency_point(group: Group, run: Run) -> Point | None:
    tpot = _mean([repeat.tpot_ms for repeat in run.row.repeats])
    if tpot is None:
        return None
    tip = (
        f"{run.label}, {group.load_name(run.load)}: {shown(run.speed)} tokens/s, {shown(tpot.median)} ms a token "
        f"at the median, {shown(tpot.p95)} ms at the 95th percentile"
    )
    return Point(run.speed, tpot.median, None, tpot.p95, tip, shown(run.load), bool(run.doubted))


def _latency_table(group: Group) -> Table:
    heads = ("", group.load_axis.label, *(f"{name} {p} ms" for name in ("TTFT", "TPOT", "ITL") for p in ("p50", "p99")))
    rows = []
    for run in group.runs:
        cells: list[str] = []
        for name in ("ttft_ms", "tpot_ms", "itl_ms"):
            mean = _mean([getattr(repeat, name) for repeat in run.row.repeats])
            cells += [number(mean.median if mean else None), number(mean.p99 if mean else None)]
        rows.append((run.label, shown(run.load), *cells))
    return Table("Latency, mean over repeats", heads, tuple(rows))


def _table(group: Group) -> Table:
    heads = ("", group.load_axis.label, "tokens/s", "95% interval", "acceptance length", "repeats", "failed", "doubts")
    rows = []
    for run in group.runs:
        lengths = [r.acceptance_length for r in run.row.repeats if r.acceptance_length is not None]
        length = sum(lengths) / len(lengths) if lengths else None
        failed = sum(sum(r.failed.values()) for r in run.row.repeats)
        cells = (
            shown(run.speed),
            interval(run.row.output_throughput_ci95),
            number(length),
            str(len(run.row.repeats)),
            str(failed),
        )
        rows.append((run.label, shown(run.load), *cells, "see above" if run.doubted else ""))
    return Table("All runs", heads, tuple(rows))


def _tiles(group: Group) -> list[Tile]:
    """A speed-up that may be none, by its interval, is no figure for a glance."""
    ratios = [
        (ratio, run)
        for run in group.runs
        if run.row.method != "none" and not isinstance(ratio := ratio_of(run, group.baseline(run)), str)
    ]
    sure = [(ratio, run) for ratio, run in ratios if ratio.ci95 is None or ratio.ci95[0] > 1]
    tiles = []
    if sure:
        ratio, run = max(sure, key=lambda pair: pair[0].ratio)
        within = f"95% {interval(ratio.ci95)}" if ratio.ci95 else "one repeat, no interval"
        about = f"{run.label} at {group.load_name(run.load)}, over no speculation ({within})"
        tiles.append(Tile("Largest speed-up", shown(ratio.ratio, "times"), about))
    fastest = max(group.runs, key=lambda run: run.speed)
    tiles.append(
        Tile("Most output tokens/s", shown(fastest.speed), f"{fastest.label}, {group.load_name(fastest.load)}")
    )
    return tiles


def _ratio_cells(group: Group, name: str, found: Sequence[Speedup | str]) -> tuple[Cell | None, ...]:
    cells: list[Cell | None] = []
    for load, ratio in zip(group.loads, found, strict=True):
        where = f"{name}, {group.load_name(load)}"
        if isinstance(ratio, str):
            cells.append(None if ratio == NOT_MEASURED else Cell("n/a", "", None, f"{where}: {ratio}"))
        else:
            fine = f"{ratio.ci95[0]:.2f}–{ratio.ci95[1]:.2f}" if ratio.ci95 else "no interval"
            even = ratio.ci95 is not None and ratio.ci95[0] <= 1 <= ratio.ci95[1]
            colour = 1.0 if even else ratio.ratio
            cells.append(Cell(shown(ratio.ratio, "times"), fine, colour, f"{where}: {ratio}"))
    return tuple(cells)


def _ratio_text(ratio: Speedup | str) -> str:
    """A refusal stands in the table as it is: it says why."""
    if isinstance(ratio, str):
        return "–" if ratio == NOT_MEASURED else ratio
    return _within(shown(ratio.ratio, "times"), ratio.ci95)


def _within(value: str, ci95: Interval | None) -> str:
    return value if ci95 is None else f"{value} ({interval(ci95)})"


def _table_by_load(title: str, group: Group, rows: Sequence[tuple[str, ...]]) -> Table:
    """Cells of loads, after what a row is called and its engine, which is left out where there is one alone."""
    unit = "/s" if group.open_loop else " at once"
    loads = tuple(f"{shown(load)}{unit}" for load in group.loads)
    if len(group.engines) == 1:
        return Table(title, ("", *loads), tuple((row[0], *row[2:]) for row in rows))
    return Table(title, ("", "engine", *loads), tuple(rows))


def _heads(group: Group) -> tuple[str, ...]:
    return tuple(shown(load) for load in group.loads)


def _speed_point(group: Group, run: Run) -> Point:
    low, high = _bar(run) or (None, None)
    return Point(run.load, run.speed, low, high, _tip(group, run), doubtful=bool(run.doubted))


def _tip(group: Group, run: Run) -> str:
    within = f" (95% {interval(run.row.output_throughput_ci95)})" if run.row.output_throughput_ci95 else ", one repeat"
    return f"{run.label}, {group.load_name(run.load)}: {shown(run.speed)} tokens/s{within}"


def _speed_axis(runs: Sequence[Run]) -> Axis:
    """One for all engines, so that their panels can be compared."""
    values = [run.speed for run in runs] + [end for run in runs for end in _bar(run) or ()]
    return shared(Axis("output tokens/s", "number", _scale(values), None, 0.0), values)


def _bar(run: Run) -> Interval | None:
    """Its interval as it is drawn: that of two repeats may reach below 0, where a logarithmic axis has no end."""
    return (
        None
        if run.row.output_throughput_ci95 is None
        else (max(run.row.output_throughput_ci95[0], run.speed / 4), run.row.output_throughput_ci95[1])
    )


def _scale(values: Sequence[float]) -> Scale:
    return "log" if min(values) > 0 and max(values) / min(values) > WIDE_RANGE else "linear"


def _mean(found: Sequence[Percentiles | None]) -> Percentiles | None:
    some = [p for p in found if p is not None]
    if not some:
        return None
    return Percentiles(*(sum(getattr(p, n) for p in some) / len(some) for n in ("mean", "median", "p95", "p99")))


def _at_k(run: Run) -> str:
    return (
        shown(run.speed)
        if run.row.num_speculative_tokens is None
        else f"{shown(run.speed)} (K={run.row.num_speculative_tokens})"
    )


def _k(run: Run) -> str:
    return "–" if run.row.num_speculative_tokens is None else str(run.row.num_speculative_tokens)


def _doubted(runs: Sequence[Run]) -> str:
    return "Hollow points: see the warnings." if any(run.doubted for run in runs) else ""
