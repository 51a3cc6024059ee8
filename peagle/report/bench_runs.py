"""Rows of `peagle bench` that may be compared, their names, and the fastest configuration at each load."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from peagle.errors import UserError
from peagle.report.axes import ChartAxis, format_number, load_axis
from peagle.report.sources import (
    ENGINE_NAMES,
    METHOD_ORDER,
    ResultSource,
    assign_styles,
    configuration_name,
    engine_host,
    engine_name,
    group_by,
    method_name,
    shortest_labels,
)
from peagle.results.comparison import Speedup, compute_speedup, row_warnings
from peagle.results.schema import BenchRow

NOT_MEASURED = "not measured"
MAX_INTERVAL_WIDTH = 2.0  # upper over lower end; a wider interval supports no recommendation


@dataclass(frozen=True)
class BenchRun:
    """A row with the names that the page uses."""

    row: BenchRow
    source: ResultSource
    system: str = ""  # method and, if needed, drafter, file and label
    engine: str = ""  # empty if there is only one engine
    style: int = 0
    warnings: tuple[str, ...] = ()

    @property
    def load(self) -> float:
        value = self.row.request_rate if self.row.concurrency is None else self.row.concurrency
        assert value is not None, "rows are validated when they are read"
        return float(value)

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
        return f"{self.short_label}, {self.engine}" if self.engine else self.short_label


@dataclass(frozen=True)
class ComparableRuns:
    """Runs of the same workload, kind of load, machine and target."""

    runs: tuple[BenchRun, ...]

    @property
    def is_open_loop(self) -> bool:
        return self.runs[0].row.concurrency is None

    @property
    def loads(self) -> list[float]:
        return sorted({run.load for run in self.runs})

    @property
    def engines(self) -> dict[str, list[BenchRun]]:
        return group_by(self.runs, [run.engine for run in self.runs])

    @property
    def load_unit(self) -> str:
        return "request rate" if self.is_open_loop else "concurrency"

    @property
    def load_axis(self) -> ChartAxis:
        return load_axis("requests/s" if self.is_open_loop else "concurrency", self.loads)

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


@dataclass(frozen=True)
class LoadRecommendation:
    """The fastest configuration at one load. `configuration` is None if the measurements cannot tell."""

    load: str
    configuration: str | None
    speedup: str  # over no speculation; empty if unknown
    ties: tuple[str, ...]  # other configurations that are not measurably slower


def recommend_per_load(group: ComparableRuns, runs: Sequence[BenchRun]) -> list[LoadRecommendation]:
    """Compares the fastest run at each load with no speculation, or with the next configuration if that is fastest."""
    recommendations = []
    for load in group.loads:
        candidates = sorted((r for r in runs if r.load == load), key=lambda r: r.throughput, reverse=True)
        others = [r for r in candidates if r.configuration != candidates[0].configuration]
        if not others:
            continue
        fastest, baseline = candidates[0], group.baseline(candidates[0])
        has_baseline = baseline is not None and baseline is not fastest
        speedup = compare_runs(fastest, baseline if has_baseline else others[0])
        ties = [r.configuration for r in others if not is_conclusive(compare_runs(fastest, r))]
        recommendations.append(
            LoadRecommendation(
                format_number(load),
                fastest.configuration if is_conclusive(speedup) else None,
                format_number(speedup.ratio, "times") if has_baseline and isinstance(speedup, Speedup) else "",
                tuple(dict.fromkeys(ties)),
            )
        )
    return recommendations


def name_runs(runs: Sequence[BenchRun]) -> tuple[BenchRun, ...]:
    """Adds engine and system names, styles and warnings; the embedded engine comes first."""
    names = _name_engines(runs)
    ordered = sorted(dict.fromkeys(names.values()), key=lambda name: name != ENGINE_NAMES["embedded"])
    named: list[BenchRun] = []
    for name in ordered:
        members = _name_systems([run for run in runs if names[run.row.engine] == name])
        named += [dataclasses.replace(run, engine=name if len(ordered) > 1 else "") for run in members]
    return tuple(named)


def _name_engines(runs: Sequence[BenchRun]) -> dict[str, str]:
    """Names by engine address. Servers of one host that never ran the same configuration count as one engine, since
    a server has one K."""
    names: dict[str, str] = {}
    for host, members in group_by(runs, [engine_host(run.row.engine) for run in runs]).items():
        addresses = list(dict.fromkeys(run.row.engine for run in members))
        configurations = {(_configuration_key(run), run.row.engine) for run in members}
        is_one_engine = len(addresses) > 1 and len({key for key, _ in configurations}) == len(configurations)
        short_names = {address: engine_name(address) for address in addresses}
        is_unique = len(set(short_names.values())) == len(addresses)
        for address in addresses:
            names[address] = host if is_one_engine else short_names[address] if is_unique else address
    return names


def _name_systems(runs: Sequence[BenchRun]) -> list[BenchRun]:
    is_repeated = max(Counter(_configuration_key(run) for run in runs).values()) > 1
    per_file = Counter((_configuration_key(run), run.source.name) for run in runs)
    keys = [
        (
            method_name(run.row.method),
            run.row.drafter or "",
            run.source.name if is_repeated else "",
            run.row.label if per_file[_configuration_key(run), run.source.name] > 1 else "",
        )
        for run in runs
    ]
    labels = shortest_labels(keys)
    ordered = sorted(zip(runs, keys, strict=True), key=lambda pair: METHOD_ORDER.index(pair[0].row.method))
    methods = {labels[key]: run.row.method for run, key in ordered}
    styles = dict(zip(methods, assign_styles(list(methods.values())), strict=True))
    return [
        dataclasses.replace(run, system=labels[key], style=styles[labels[key]], warnings=tuple(row_warnings(run.row)))
        for run, key in ordered
    ]


def _configuration_key(run: BenchRun) -> tuple[object, ...]:
    return run.row.method, run.row.drafter, run.k, run.load
