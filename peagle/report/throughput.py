"""Throughput sections: throughput, speedup, latency and recommendations, from rows of `peagle bench`.

Rows with different workloads, kinds of load, machines or targets are in separate sections and are never compared.
"""

from __future__ import annotations

from collections.abc import Sequence

from peagle.report.axes import ChartAxis, format_interval, format_number, value_axis
from peagle.report.bench_runs import (
    NOT_MEASURED,
    BenchRun,
    ComparableRuns,
    compare_runs,
    is_conclusive,
    name_runs,
    recommend_per_load,
)
from peagle.report.charts import ChartLine, ChartPanel, ChartPoint, HeatCell, HeatPanel, LinePanel
from peagle.report.page import (
    HeadlineTile,
    ReportBlock,
    ReportFigure,
    ReportNote,
    ReportSection,
    ReportTable,
    SectionResult,
)
from peagle.report.render import render_sentence
from peagle.report.sources import METHOD_ORDER, ResultSource, engine_name, group_by, method_name, split_panels
from peagle.results.comparison import Speedup
from peagle.results.schema import Interval, Percentiles

AUTO_STYLE = 5
COLOURS = "Blue is faster, orange slower, grey equal within 5% or inconclusive."

GroupKey = tuple[str, str, str, str]  # workload digest, kind of load, machine, target


def build_throughput_sections(sources: Sequence[ResultSource]) -> SectionResult:
    runs = [BenchRun(row, source) for source in sources for row in source.results.rows]
    if not runs:
        return SectionResult()
    has_targets = len({run.source.target for run in runs} - {""}) > 1
    keys: list[GroupKey] = [
        (
            run.row.workload_sha256,
            "open loop" if run.row.concurrency is None else "closed loop",
            run.source.machine,
            run.source.target if has_targets else "",
        )
        for run in runs
    ]
    groups = {key: ComparableRuns(name_runs(members)) for key, members in group_by(runs, keys).items()}
    names = _name_groups(list(groups))
    warnings = []
    if len(groups) > 1:
        warnings.append("Runs with different workloads, loads, machines or targets are not compared.")
    sections, recommendations = [], []
    for key, group in groups.items():
        title = f"Throughput: {names[key]}" if names[key] else "Throughput"
        sections.append(ReportSection(title, _build_blocks(group)))
        for engine, members in group.engines.items():
            for load in recommend_per_load(group, members):
                facts = {"section": names[key], "engine": engine, "unit": group.load_unit, "r": load}
                recommendations.append(render_sentence("bench.txt.jinja", **facts))
        # files of `peagle bench` already contain the warnings of their rows
        new = [w for run in group.runs for w in run.warnings if not run.source.results.warnings]
        warnings += sorted(new, key=lambda warning: "failed" not in warning)
    largest = max(groups.values(), key=lambda group: len(group.runs))
    return SectionResult(
        tuple(sections), tuple(recommendations), tuple(_build_tiles(largest)), tuple(dict.fromkeys(warnings))
    )


def _name_groups(keys: Sequence[GroupKey]) -> dict[GroupKey, str]:
    """The parts of each key that differ between groups."""
    parts = {key: (f"workload {key[0][:8]}", *key[1:3], key[3] or "unknown target") for key in keys}
    varying = [i for i in range(4) if len({values[i] for values in parts.values()}) > 1]
    return {key: ", ".join(values[i] for i in varying) for key, values in parts.items()}


def _build_blocks(group: ComparableRuns) -> tuple[ReportBlock, ...]:
    notes = []
    for members in group.engines.values():
        addresses = list(dict.fromkeys(engine_name(run.row.engine) for run in members))
        if len(addresses) > 1:
            notes.append(ReportNote(f"Shown as one engine: {', '.join(addresses)}."))
    if not any(run.row.method == "none" for run in group.runs):
        notes.append(ReportNote("No speedups: there is no run without speculation."))
    speedups = [_figure_speedup(group, engine, runs) for engine, runs in group.engines.items()]
    figures = [_figure_by_load(group), *speedups, _figure_side_by_side(group)]
    return (*notes, *(figure for figure in figures if figure is not None), _runs_table(group))


def _fastest_per_load(group: ComparableRuns, runs: Sequence[BenchRun]) -> list[BenchRun]:
    return [run for load in group.loads if (run := group.fastest(runs, load)) is not None]


def _figure_by_load(group: ComparableRuns) -> ReportFigure | None:
    if len(group.loads) < 2:
        return None
    panels: list[ChartPanel] = []
    rows = []
    y = _throughput_axis(group.runs)
    title = "Throughput by load"
    for engine, members in group.engines.items():
        lines = []
        for system, runs in group_by(members, [run.system for run in members]).items():
            auto = sorted((run for run in runs if run.k == "auto"), key=lambda run: run.load)
            choices = ((system, _fastest_per_load(group, runs), runs[0].style), (f"{system} K=auto", auto, AUTO_STYLE))
            for name, selected, style in choices:
                if selected:
                    lines.append(ChartLine(name, tuple(_throughput_point(group, run) for run in selected), style))
                    cells = {run.load: _throughput_and_k(run) for run in selected}
                    rows.append((name, engine, *(cells.get(load, "–") for load in group.loads)))
        panels += [LinePanel(engine or title, group.load_axis, y, tuple(some)) for some in split_panels(lines)]
    caption = "Output tokens/s with 95% intervals; the fastest K of each method. Hollow points: see the warnings."
    table = _load_table("Output tokens/s, fastest K", group, rows)
    return ReportFigure(title, caption, tuple(panels), table)


def _figure_speedup(group: ComparableRuns, engine: str, members: Sequence[BenchRun]) -> ReportFigure | None:
    speedups: dict[str, list[Speedup | str]] = {}
    for label, runs in group_by(members, [run.short_label for run in members]).items():
        if runs[0].row.method != "none" and any(group.baseline(run) for run in runs):
            by_load = {run.load: compare_runs(run, group.baseline(run)) for run in runs}
            speedups[label] = [by_load.get(load, NOT_MEASURED) for load in group.loads]
    title = f"Speedup over no speculation, {engine}" if engine else "Speedup over no speculation"
    caption = "Output tokens/s relative to the same engine without speculation, with 95% intervals."
    return _speedup_figure(group, title, caption, speedups, {})


def _figure_side_by_side(group: ComparableRuns) -> ReportFigure | None:
    """P-EAGLE against EAGLE-3 per engine, and each engine against the others, each side at its fastest K."""
    engines = list(group.engines)

    def select(engine: str, method: str) -> list[BenchRun]:
        return [run for run in group.engines[engine] if run.row.method == method]

    pairs = {
        f"P-EAGLE over EAGLE-3{f', {engine}' if engine else ''}": (select(engine, "p-eagle"), select(engine, "eagle3"))
        for engine in engines
    }
    for i, engine in enumerate(engines):
        for other in engines[i + 1 :]:
            for method in METHOD_ORDER:
                name = f"{engine} over {other}, {method_name(method)}"
                pairs[name] = (select(engine, method), select(other, method))
    speedups: dict[str, list[Speedup | str]] = {}
    ks: dict[str, list[str]] = {}
    for name, (ours, theirs) in pairs.items():
        if ours and theirs:
            sides = [(group.fastest(ours, load), group.fastest(theirs, load)) for load in group.loads]
            speedups[name] = [compare_runs(mine, other) for mine, other in sides]
            ks[name] = [f" K={a.k or '–'} over K={b.k or '–'}" if a and b else "" for a, b in sides]
    caption = "Output tokens/s of one over the other, each with its fastest K."
    return _speedup_figure(group, "Side by side, fastest K each", caption, speedups, ks)


def _speedup_figure(
    group: ComparableRuns, title: str, caption: str, speedups: dict[str, list[Speedup | str]], ks: dict[str, list[str]]
) -> ReportFigure | None:
    if not speedups:
        return None
    cells, rows = [], []
    for name, values in speedups.items():
        pairs = list(zip(group.loads, values, strict=True))
        cells.append(tuple(_speedup_cell(f"{name}, {group.load_name(load)}", value) for load, value in pairs))
        suffixes = ks.get(name, [""] * len(values))
        rows.append((name, "", *(_speedup_text(v) + suffix for v, suffix in zip(values, suffixes, strict=True))))
    columns = tuple(format_number(load) for load in group.loads)
    panel = HeatPanel(title, group.load_axis.label, tuple(speedups), columns, tuple(cells))
    return ReportFigure(title, f"{caption} {COLOURS}", (panel,), _load_table(title, group, rows, has_engines=False))


def _speedup_cell(label: str, speedup: Speedup | str) -> HeatCell | None:
    if isinstance(speedup, str):
        return None if speedup == NOT_MEASURED else HeatCell("n/a", "", None, f"{label}: {speedup}")
    fine = f"{speedup.ci95[0]:.2f}–{speedup.ci95[1]:.2f}" if speedup.ci95 else "no interval"
    ratio = speedup.ratio if is_conclusive(speedup) else 1.0
    return HeatCell(format_number(speedup.ratio, "times"), fine, ratio, f"{label}: {speedup}")


def _speedup_text(speedup: Speedup | str) -> str:
    if isinstance(speedup, str):
        return "–" if speedup == NOT_MEASURED else speedup
    return _with_interval(format_number(speedup.ratio, "times"), speedup.ci95)


def _runs_table(group: ComparableRuns) -> ReportTable:
    headings = ["run", group.load_axis.label, "tokens/s", "95% interval", "acceptance length"]
    latencies = ("ttft_ms", "tpot_ms", "itl_ms")
    headings += [f"{name.removesuffix('_ms').upper()} {p} ms" for name in latencies for p in ("median", "p99")]
    rows = []
    for run in group.runs:
        repeats = run.row.repeats
        lengths = [r.acceptance_length for r in repeats if r.acceptance_length is not None]
        values: list[float | None] = [sum(lengths) / len(lengths) if lengths else None]
        for name in latencies:
            mean = _mean_percentiles([getattr(repeat, name) for repeat in repeats])
            values += [mean.median, mean.p99] if mean else [None, None]
        num_failed = sum(sum(repeat.failed.values()) for repeat in repeats)
        throughput = (format_number(run.throughput), format_interval(run.row.output_throughput_ci95))
        counts = (str(len(repeats)), str(num_failed))
        rows.append((run.label, format_number(run.load), *throughput, *map(format_number, values), *counts))
    return ReportTable("All runs", (*headings, "repeats", "failed"), tuple(rows))


def _build_tiles(group: ComparableRuns) -> list[HeadlineTile]:
    """The largest conclusive speedup and the highest throughput."""
    speedups = [(compare_runs(run, group.baseline(run)), run) for run in group.runs if run.row.method != "none"]
    conclusive = [(s, run) for s, run in speedups if isinstance(s, Speedup) and is_conclusive(s) and s.ratio > 1]
    tiles = []
    if conclusive:
        speedup, run = max(conclusive, key=lambda pair: pair[0].ratio)
        description = f"{run.label}, {group.load_name(run.load)}, over no speculation"
        interval = f" (95% {format_interval(speedup.ci95)})"
        tiles.append(HeadlineTile("Largest speedup", format_number(speedup.ratio, "times"), description + interval))
    best = max(group.runs, key=lambda run: run.throughput)
    description = f"{best.label}, {group.load_name(best.load)}"
    tiles.append(HeadlineTile("Highest output tokens/s", format_number(best.throughput), description))
    return tiles


def _load_table(
    title: str, group: ComparableRuns, rows: Sequence[tuple[str, ...]], has_engines: bool = True
) -> ReportTable:
    """A column per load after the row's name and its engine; the engine is left out if there is only one."""
    loads = tuple(group.load_name(load) for load in group.loads)
    if not has_engines or len(group.engines) == 1:
        return ReportTable(title, ("run", *loads), tuple((row[0], *row[2:]) for row in rows))
    return ReportTable(title, ("run", "engine", *loads), tuple(rows))


def _throughput_point(group: ComparableRuns, run: BenchRun) -> ChartPoint:
    low, high = _error_bar(run) or (None, None)
    return ChartPoint(run.load, run.throughput, low, high, _tooltip(group, run), is_uncertain=bool(run.warnings))


def _tooltip(group: ComparableRuns, run: BenchRun) -> str:
    interval = run.row.output_throughput_ci95
    error = f" (95% {format_interval(interval)})" if interval else ", one repeat"
    return f"{run.label}, {group.load_name(run.load)}: {format_number(run.throughput)} tokens/s{error}"


def _throughput_axis(runs: Sequence[BenchRun]) -> ChartAxis:
    return value_axis("output tokens/s", [v for run in runs for v in (run.throughput, *(_error_bar(run) or ()))])


def _error_bar(run: BenchRun) -> Interval | None:
    """The interval, cut off at a quarter of the value: a logarithmic axis cannot show values at or below zero."""
    interval = run.row.output_throughput_ci95
    return None if interval is None else (max(interval[0], run.throughput / 4), interval[1])


def _mean_percentiles(values: Sequence[Percentiles | None]) -> Percentiles | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    return Percentiles(*(sum(getattr(v, n) for v in known) / len(known) for n in ("mean", "median", "p95", "p99")))


def _with_interval(text: str, interval: Interval | None) -> str:
    return text if interval is None else f"{text} ({format_interval(interval)})"


def _throughput_and_k(run: BenchRun) -> str:
    return format_number(run.throughput) if run.k is None else f"{format_number(run.throughput)} (K={run.k})"
