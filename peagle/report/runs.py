"""Measured runs that may be compared with each other, what they are called, and which of them to serve with.

Knows rows of `bench`; knows nothing about charts but the styles of lines.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from peagle.errors import UserError
from peagle.report.axes import Axis, load_scale, shown
from peagle.report.series import (
    NAMES,
    ORDER,
    Source,
    by_key,
    choice_name,
    labels,
    listed,
    method_name,
    segments,
    server_host,
    server_name,
    styles,
)
from peagle.results.comparison import Speedup, compute_speedup, row_warnings
from peagle.results.schema import BenchRow

NOT_MEASURED = "not measured"
OWN_ENGINE = NAMES["embedded"]  # comes first


@dataclass(frozen=True)
class Run:
    """A row, with what the page calls its engine, method and drafter together."""

    row: BenchRow
    source: Source
    system: str = ""  # method, and whatever else tells it from others of the same engine
    engine: str = ""  # empty where there is one alone
    style: int = 0
    doubted: tuple[str, ...] = ()

    @property
    def load(self) -> float:
        row = self.row
        value = row.request_rate if row.concurrency is None else row.concurrency
        assert value is not None, "results are checked when they are read"
        return float(value)

    @property
    def speed(self) -> float:
        return self.row.output_throughput

    @property
    def choice(self) -> str:
        return choice_name(self.row.method, self.row.num_speculative_tokens)

    @property
    def short(self) -> str:
        return (
            f"{self.system} K={self.row.num_speculative_tokens}"
            if self.row.num_speculative_tokens is not None
            else self.system
        )

    @property
    def label(self) -> str:
        return f"{self.short}, {self.engine}" if self.engine else self.short


@dataclass(frozen=True)
class Group:
    """Runs that may be compared: the same prompts and lengths, the same kind of load, the same machine."""

    runs: tuple[Run, ...]

    @property
    def open_loop(self) -> bool:
        return self.runs[0].row.concurrency is None

    @property
    def loads(self) -> list[float]:
        return sorted({run.load for run in self.runs})

    @property
    def engines(self) -> dict[str, list[Run]]:
        """A panel each: two engines in one would be too many lines to follow."""
        return by_key(self.runs, [run.engine for run in self.runs])

    @property
    def load_axis(self) -> Axis:
        ticks = tuple(self.loads)
        label = "requests a second" if self.open_loop else "requests at once"
        return Axis(label, scale=load_scale(ticks), ticks=ticks)

    def load_name(self, load: float) -> str:
        if self.open_loop:
            return f"{shown(load)} requests/s"
        return f"{shown(load)} request{'' if load == 1 else 's'} at once"

    def loads_name(self, loads: Sequence[float], bare: bool = False) -> str:
        """From the first to the last; bare without what they count."""
        name = shown if bare else self.load_name
        return name(loads[0]) if len(loads) == 1 else f"{shown(loads[0])} to {name(loads[-1])}"

    def best(self, runs: Sequence[Run], load: float) -> Run | None:
        """The fastest of them there, of those with a fixed K or none."""
        there = [run for run in runs if run.load == load and run.row.num_speculative_tokens != "auto"]
        return max(there, key=lambda run: run.speed, default=None)

    def baseline(self, run: Run) -> Run | None:
        """Without a drafter, by the same engine, under the same load; of the same file, if there are several."""
        same = [r for r in self.runs if r.row.method == "none" and (r.engine, r.load) == (run.engine, run.load)]
        return next((r for r in same if r.source is run.source), same[0] if same else None)


def named(runs: Sequence[Run]) -> tuple[Run, ...]:
    """With names and styles; those of an engine that no two of its runs of one load and K share."""
    places = _engines(runs)
    named = []
    for place in sorted(dict.fromkeys(places.values()), key=lambda place: place != OWN_ENGINE):
        members = [run for run in runs if places[run.row.engine] == place]
        where = place if len(set(places.values())) > 1 else ""
        named += [dataclasses.replace(run, engine=where) for run in _named_of_engine(members)]
    return tuple(named)


def _engines(runs: Sequence[Run]) -> dict[str, str]:
    """What the page calls each engine.

    A server drafts one number of tokens, so that K is swept over servers: those of one host that never did the same
    thing are taken as one.
    """
    hosts = by_key(runs, [server_host(run.row.engine) for run in runs])
    names: dict[str, str] = {}
    for host, members in hosts.items():
        addresses = list(dict.fromkeys(run.row.engine for run in members))
        done = {(_setting(run), run.row.engine) for run in members}
        complementary = len({setting for setting, _ in done}) == len(done)
        short = {address: server_name(address) for address in addresses}
        distinct = len(set(short.values())) == len(addresses)
        for address in addresses:
            one = host if complementary and len(addresses) > 1 else short[address] if distinct else address
            names[address] = one
    return names


def _named_of_engine(runs: Sequence[Run]) -> list[Run]:
    twice = max(Counter(_setting(run) for run in runs).values()) > 1
    within = Counter((_setting(run), run.source.name) for run in runs)
    keys = [
        (
            method_name(run.row.method),
            run.row.drafter or "",
            run.source.name if twice else "",
            run.row.label if within[_setting(run), run.source.name] > 1 else "",
        )
        for run in runs
    ]
    names = dict(zip(dict.fromkeys(keys), labels(list(dict.fromkeys(keys))), strict=True))
    ordered = sorted(zip(runs, keys, strict=True), key=lambda pair: ORDER.index(pair[0].row.method))
    first = {names[key]: run.row.method for run, key in ordered}
    style = dict(zip(first, styles(list(first.values())), strict=True))
    return [
        dataclasses.replace(run, system=names[key], style=style[names[key]], doubted=tuple(row_warnings(run.row)))
        for run, key in ordered
    ]


def _setting(run: Run) -> tuple[object, ...]:
    row = run.row
    return row.method, row.drafter, row.num_speculative_tokens, run.load


def ratio_of(run: Run | None, base: Run | None) -> Speedup | str:
    """Or why there is none."""
    if run is None or base is None:
        return NOT_MEASURED
    if base.speed <= 0 or run.speed <= 0:
        return "no tokens"
    try:
        return compute_speedup(run.row, base.row)
    except UserError as refused:
        return str(refused)


def recommendations(group: Group) -> list[str]:
    """A sentence for each engine: what to serve with at which load."""
    said = []
    for engine, runs in group.engines.items():
        if len({run.choice for run in runs}) < 2:
            continue
        best = [max(at, key=lambda run: run.speed) for load in group.loads if (at := _at(runs, load))]
        chosen = {run.load: run for run in best}
        parts: list[str] = []
        for loads, choice in segments([(run.load, run.choice) for run in best]):
            parts.append(f"{choice} at {group.loads_name(loads, bool(parts))}")
            parts[-1] += _gain(group, [chosen[load] for load in loads], bool(parts[1:]))
        opening = f"With {engine}, use" if engine else "Use"
        said.append(f"{opening} {listed(parts)}.{_close(runs, best)}")
    return said


def _gain(group: Group, best: Sequence[Run], said: bool) -> str:
    """Over no drafter; what it is over is `said` once."""
    if best[0].row.method == "none":
        return " (no drafter was faster)"
    ratios = [ratio_of(run, group.baseline(run)) for run in best]
    given = [shown(ratio.ratio, "times") for ratio in ratios if not isinstance(ratio, str)]
    if len(given) < len(best):
        return ""
    ends = given[0] if len(set(given)) == 1 else f"{given[0]} to {given[-1]}"
    return f" ({ends})" if said else f" ({ends} the speed without a drafter)"


def _close(runs: Sequence[Run], best: Sequence[Run]) -> str:
    """Where the lead over the next is within the error."""
    near: list[tuple[float, str]] = []
    for run in best:
        second = max((r for r in _at(runs, run.load) if r.choice != run.choice), key=lambda r: r.speed, default=None)
        ratio = ratio_of(run, second)
        if second is not None and not isinstance(ratio, str) and (ratio.ci95 is None or ratio.ci95[0] <= 1):
            near.append((run.load, second.choice))
    parts = [
        f"{choice} at {shown(loads[0])}" + (f" to {shown(loads[-1])}" if len(loads) > 1 else "")
        for loads, choice in segments(near)
    ]
    return f" As good within the error: {listed(parts)}." if parts else ""


def _at(runs: Sequence[Run], load: float) -> list[Run]:
    return [run for run in runs if run.load == load]
