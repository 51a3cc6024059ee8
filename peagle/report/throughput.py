"""Throughput sections: throughput, speedup, latency and recommendations, from rows of `peagle bench`.

Rows with different workloads, kinds of load, machines or targets are in separate sections and are never compared.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from peagle.errors import UserError
from peagle.report.charts import (
    ChartAxis,
    ChartLine,
    ChartPanel,
    ChartPoint,
    format_interval,
    format_number,
    linear_ticks,
    log_ticks,
    with_interval,
)
from peagle.report.page import HeadlineTile, ReportBlock, ReportPage, ReportSection, ReportTable
from peagle.report.sources import (
    ENGINE_NAMES,
    ResultSource,
    assign_styles,
    engine_name,
    group_by,
    merge_warnings,
    method_name,
    shortest_labels,
    split_panels,
)
from peagle.results.comparison import Speedup, compute_speedup, row_warnings
from peagle.results.schema import METHOD_NAMES, BenchRow, configuration_name

AUTO_STYLE = 5
LOG_RANGE = 12  # the axis of values is logarithmic if the largest is this many times the smallest
NOT_MEASURED = "–"
MAX_INTERVAL_WIDTH = 2.0  # upper over lower end; a wider interval supports no recommendation
COLOURS = "Blue is faster, orange slower, grey equal within 5% or inconclusive."


@dataclass(frozen=True)
class BenchRun:
    """A row with the names that the page uses."""

    row: BenchRow
    source: ResultSource
    system: str = ""  # method and, if needed, drafter and file
    engine: str = ""  # empty if there is only one engine
    style: int = 0

    @property
    def load(self) -> float:
        return float(self.row.concurrency or self.row.request_rate or 0)

    @property
    def throughput(self) -> float:
        return self.row.output_throughput

    @property
    def k(self) -> int | Literal["auto"] | None:
        return self.row.num_speculative_tokens

    @property
    def configuration(self) -> str:
        return configuration_name(self.row.method, self.k)

    @property
    def short_label(self) -> str:
        return f"{self.system} K={self.k}" if self.k is not None else self.system

    @property
    def label(self) -> str:
        return add_engine(self.short_label, self.engine)


def add_engine(text: str, engine: str) -> str:
    return f"{text}, {engine}" if engine else text


@dataclass(frozen=True)
class ComparableRuns:
    """Runs of the same workload, kind of load, machine and target."""

    runs: list[BenchRun]

    @property
    def load_unit(self) -> str:
        return "request rate" if self.runs[0].row.concurrency is None else "concurrency"

    @property
    def loads(self) -> list[float]:
        return sorted({run.load for run in self.runs})

    @property
    def engines(self) -> dict[str, list[BenchRun]]:
        return group_by(self.runs, [run.engine for run in self.runs])

    def load_name(self, load: float) -> str:
        return f"{self.load_unit} {format_number(load)}"

    def fastest(self, runs: Sequence[BenchRun], load: float) -> BenchRun | None:
        """The fastest run with a fixed K or without speculation."""
        candidates = [run for run in runs if run.load == load and run.k != "auto"]
        return max(candidates, key=lambda run: run.throughput, default=None)

    def baseline(self, run: BenchRun) -> BenchRun | None:
        """The run without speculation of the same engine and load, preferably of the same file."""
        same = [r for r in self.runs if r.row.method == "none" and (r.engine, r.load) == (run.engine, run.load)]
        return next((r for r in same if r.source is run.source), same[0] if same else None)


def add_throughput(page: ReportPage, sources: Sequence[ResultSource]) -> None:
    runs = [BenchRun(row, source) for source in sources for row in source.results.rows]
    if not runs:
        return
    has_targets = len({run.source.target for run in runs} - {""}) > 1
    keys = [
        (
            run.row.workload_sha256,
            "open loop" if run.row.concurrency is None else "closed loop",
            run.source.machine,
            run.source.target if has_targets else "",
        )
        for run in runs
    ]
    groups = {key: ComparableRuns(name_runs(members)) for key, members in group_by(runs, keys).items()}
    if len(groups) > 1:
        page.warnings.append("Runs with different workloads, loads, machines or targets are not compared.")
    # a section is named by the parts of its key that differ between sections
    parts = [(f"workload {key[0][:8]}", *key[1:3], key[3] or "unknown target") for key in groups]
    varying = [i for i in range(4) if len({values[i] for values in parts}) > 1]
    for group, values in zip(groups.values(), parts, strict=True):
        name = ", ".join(values[i] for i in varying)
        page.sections.append(ReportSection(f"Throughput: {name}" if name else "Throughput", _build_blocks(group)))
        for engine, members in group.engines.items():
            page.recommendations += [
                ", ".join(part for part in (name, engine, sentence) if part) for sentence in recommend(group, members)
            ]
        # files of `peagle bench` already contain the warnings of their rows
        new = [warning for run in group.runs if not run.source.results.warnings for warning in row_warnings(run.row)]
        page.warnings += merge_warnings(sorted(new, key=lambda warning: "failed" not in warning))
    page.tiles += _build_tiles(max(groups.values(), key=lambda group: len(group.runs)))


def name_runs(runs: Sequence[BenchRun]) -> list[BenchRun]:
    """Adds engine and system names and styles; the embedded engine comes first."""
    names = _name_engines(runs)
    ordered = sorted(dict.fromkeys(names.values()), key=lambda name: name != ENGINE_NAMES["embedded"])
    named: list[BenchRun] = []
    for name in ordered:
        members = _name_systems([run for run in runs if names[run.row.engine] == name])
        named += [dataclasses.replace(run, engine=name if len(ordered) > 1 else "") for run in members]
    return named


def _name_engines(runs: Sequence[BenchRun]) -> dict[str, str]:
    """Names by engine address. Servers of one host that never ran the same configuration count as one engine, since
    a server has one K."""
    names: dict[str, str] = {}
    hosts = [engine_name(run.row.engine).rpartition(":")[0] or engine_name(run.row.engine) for run in runs]
    for host, members in group_by(runs, hosts).items():
        addresses = {run.row.engine for run in members}
        configurations = {(_configuration_key(run), run.row.engine) for run in members}
        is_one_engine = len(addresses) > 1 and len({key for key, _ in configurations}) == len(configurations)
        names |= {address: host if is_one_engine else engine_name(address) for address in addresses}
    return names


def _name_systems(runs: Sequence[BenchRun]) -> list[BenchRun]:
    is_repeated = max(Counter(_configuration_key(run) for run in runs).values()) > 1
    keys = [
        (method_name(run.row.method), run.row.drafter or "", run.source.name if is_repeated else "") for run in runs
    ]
    labels = shortest_labels(keys)
    ordered = sorted(zip(runs, keys, strict=True), key=lambda pair: list(METHOD_NAMES).index(pair[0].row.method))
    methods = {labels[key]: run.row.method for run, key in ordered}
    styles = dict(zip(methods, assign_styles(list(methods.values())), strict=True))
    return [dataclasses.replace(run, system=labels[key], style=styles[labels[key]]) for run, key in ordered]


def _configuration_key(run: BenchRun) -> tuple[object, ...]:
    return run.row.method, run.row.drafter, run.k, run.load


def compare_runs(run: BenchRun | None, baseline: BenchRun | None) -> Speedup | str:
    """The speedup, or the reason why there is none."""
    if run is None or baseline is None:
        return NOT_MEASURED
    if baseline.throughput <= 0 or run.throughput <= 0:
        return "no tokens"
    try:
        return compute_speedup(run.row, baseline.row)
    except UserError as error:
        return str(error)


def is_conclusive(speedup: Speedup | str) -> bool:
    """Whether the interval excludes 1 and is narrower than a factor of MAX_INTERVAL_WIDTH."""
    if isinstance(speedup, str) or speedup.ci95 is None:
        return False
    low, high = speedup.ci95
    return (low > 1 or high < 1) and high <= MAX_INTERVAL_WIDTH * low


def recommend(group: ComparableRuns, runs: Sequence[BenchRun]) -> Iterator[str]:
    """A sentence per load: the fastest run, compared with no speculation or, if that is fastest, with the next one."""
    for load in group.loads:
        candidates = sorted((r for r in runs if r.load == load), key=lambda r: r.throughput, reverse=True)
        others = [r for r in candidates if r.configuration != candidates[0].configuration]
        if not others:
            continue
        fastest, baseline = candidates[0], group.baseline(candidates[0])
        has_baseline = baseline is not None and baseline is not fastest
        speedup = compare_runs(fastest, baseline if has_baseline else others[0])
        if isinstance(speedup, str) or not is_conclusive(speedup):
            yield f"{group.load_name(load)}: cannot tell; rerun with more requests."
            continue
        gain = f" ({format_number(speedup.ratio, 'times')} no speculation)" if has_baseline else ""
        ties = dict.fromkeys(r.configuration for r in others if not is_conclusive(compare_runs(fastest, r)))
        tied = f"; tied: {', '.join(ties)}" if ties else ""
        yield f"{group.load_name(load)}: {fastest.configuration} is fastest{gain}{tied}."


def _build_blocks(group: ComparableRuns) -> list[ReportBlock]:
    blocks: list[ReportBlock] = []
    for members in group.engines.values():
        addresses = dict.fromkeys(engine_name(run.row.engine) for run in members)
        if len(addresses) > 1:
            blocks.append(f"Shown as one engine: {', '.join(addresses)}.")
    if not any(run.row.method == "none" for run in group.runs):
        blocks.append("No speedups: there is no run without speculation.")
    if len(group.loads) > 1:
        blocks.append(_throughput_figure(group))
    blocks += [_speedup_table(group, engine, runs) for engine, runs in group.engines.items()]
    blocks += [_side_by_side_table(group), _runs_table(group)]
    return [block for block in blocks if isinstance(block, str) or block.rows]


def _throughput_figure(group: ComparableRuns) -> ReportTable:
    title = "Throughput by load"
    loads, unit = tuple(group.loads), "requests/s" if group.load_unit == "request rate" else "concurrency"
    x = ChartAxis(unit, loads, is_log=loads[0] > 0 and loads[-1] > 4 * loads[0])
    upper_ends = [interval[1] for run in group.runs if (interval := run.row.output_throughput_ci95) is not None]
    values = [*(run.throughput for run in group.runs), *upper_ends]
    low, high = min(values), max(values)
    is_log = low > 0 and high > LOG_RANGE * low
    y = ChartAxis("output tokens/s", log_ticks(low, high) if is_log else linear_ticks(0.0, high), is_log)
    panels, rows = [], []
    for engine, members in group.engines.items():
        lines = []
        for system, runs in group_by(members, [run.system for run in members]).items():
            fastest = [run for load in group.loads if (run := group.fastest(runs, load)) is not None]
            auto = sorted((run for run in runs if run.k == "auto"), key=lambda run: run.load)
            for name, selected, style in ((system, fastest, runs[0].style), (f"{system} K=auto", auto, AUTO_STYLE)):
                if selected:
                    lines.append(ChartLine(name, tuple(_throughput_point(group, run) for run in selected), style))
                    ks = {run.load: f" (K={run.k})" if run.k is not None else "" for run in selected}
                    cells = {run.load: format_number(run.throughput) + ks[run.load] for run in selected}
                    rows.append((add_engine(name, engine), *(cells.get(load, "–") for load in group.loads)))
        panels += [ChartPanel(engine or title, x, y, tuple(some)) for some in split_panels(lines)]
    caption = "Output tokens/s with 95% intervals; the fastest K of each method. Hollow points: see the warnings."
    headings = ("run", *map(group.load_name, group.loads))
    return ReportTable(title, headings, tuple(rows), caption, panels=tuple(panels))


def _throughput_point(group: ComparableRuns, run: BenchRun) -> ChartPoint:
    interval = run.row.output_throughput_ci95
    error = f" (95% {format_interval(interval)})" if interval else ", one repeat"
    tooltip = f"{run.label}, {group.load_name(run.load)}: {format_number(run.throughput)} tokens/s{error}"
    return ChartPoint(run.load, run.throughput, interval, tooltip, is_uncertain=bool(row_warnings(run.row)))


def _speedup_table(group: ComparableRuns, engine: str, members: Sequence[BenchRun]) -> ReportTable:
    speedups: dict[str, list[Speedup | str]] = {}
    for label, runs in group_by(members, [run.short_label for run in members]).items():
        if runs[0].row.method != "none" and any(group.baseline(run) for run in runs):
            by_load = {run.load: compare_runs(run, group.baseline(run)) for run in runs}
            speedups[label] = [by_load.get(load, NOT_MEASURED) for load in group.loads]
    caption = "Output tokens/s relative to the same engine without speculation, with 95% intervals."
    return _ratio_table(group, add_engine("Speedup over no speculation", engine), caption, speedups)


def _side_by_side_table(group: ComparableRuns) -> ReportTable:
    """P-EAGLE against EAGLE-3 per engine, and each engine against the others, each side at its fastest K."""
    engines = list(group.engines)
    pairs = {add_engine("P-EAGLE over EAGLE-3", e): ((e, "p-eagle"), (e, "eagle3")) for e in engines}
    for i, engine in enumerate(engines):
        for other in engines[i + 1 :]:
            for method in METHOD_NAMES:
                pairs[f"{engine} over {other}, {method_name(method)}"] = (engine, method), (other, method)
    systems = group_by(group.runs, [(run.engine, run.row.method) for run in group.runs])
    speedups = {
        name: [
            compare_runs(group.fastest(systems[first], load), group.fastest(systems[second], load))
            for load in group.loads
        ]
        for name, (first, second) in pairs.items()
        if first in systems and second in systems
    }
    caption = "Output tokens/s of one over the other, each with its fastest K."
    return _ratio_table(group, "Side by side, fastest K each", caption, speedups)


def _ratio_table(
    group: ComparableRuns, title: str, caption: str, speedups: dict[str, list[Speedup | str]]
) -> ReportTable:
    """A row per name and a column per load. Colours mark conclusive speedups."""
    rows, ratios = [], []
    for name, values in speedups.items():
        texts = [s if isinstance(s, str) else with_interval(format_number(s.ratio, "times"), s.ci95) for s in values]
        rows.append((name, *texts))
        ratios.append(tuple(None if isinstance(s, str) else s.ratio if is_conclusive(s) else 1.0 for s in values))
    headings = ("run", *map(group.load_name, group.loads))
    return ReportTable(title, headings, tuple(rows), f"{caption} {COLOURS}", is_open=True, ratios=tuple(ratios))


def _runs_table(group: ComparableRuns) -> ReportTable:
    headings = ["run", group.load_unit, "tokens/s", "95% interval", "acceptance length"]
    latencies = [(name, p) for name in ("ttft_ms", "tpot_ms", "itl_ms") for p in ("median", "p99")]
    headings += [f"{name.removesuffix('_ms').upper()} {p} ms" for name, p in latencies]
    rows = []
    for run in group.runs:
        repeats = run.row.repeats
        values = [_mean([repeat.acceptance_length for repeat in repeats])]
        values += [_mean([getattr(getattr(r, name), p, None) for r in repeats]) for name, p in latencies]
        num_failed = sum(sum(repeat.failed.values()) for repeat in repeats)
        throughput = (format_number(run.throughput), format_interval(run.row.output_throughput_ci95))
        counts = (str(len(repeats)), str(num_failed))
        rows.append((run.label, format_number(run.load), *throughput, *map(format_number, values), *counts))
    return ReportTable("All runs", (*headings, "repeats", "failed"), tuple(rows))


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


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
