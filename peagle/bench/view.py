"""Rows of a benchmark as people read them: a table, and a bar while it runs.

Knows nothing about how anything is measured.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from peagle.bench.workload import Load
from peagle.errors import UserError
from peagle.results.comparison import compute_speedup, find_baseline
from peagle.results.schema import BenchRow

if TYPE_CHECKING:
    from rich.table import Table

DRAW_EVERY_S = 1.0  # drawing takes a millisecond or two from what is measured
WIDTH = 120  # of the table where no terminal says how wide it may be


class Progress:
    """A bar on a terminal, a line for each part elsewhere; on stderr."""

    def __init__(self, shown: bool = True) -> None:
        self.shown = shown
        self.bar: Any = None
        self.task: Any = None
        self.requests = self.tokens = 0
        self._next = self._began = 0.0
        if shown and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
            from rich.progress import Progress as Bar

            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]}"),
            )
            self.bar = Bar(*columns, console=Console(stderr=True), auto_refresh=False, transient=True)
            self.bar.start()

    def start(self, name: str, load: Load, part: str, requests: int) -> None:
        said = f"{name}, {load}, {part}"
        self.requests = self.tokens = 0
        self._next, self._began = 0.0, time.monotonic()
        if self.bar is not None:
            if self.task is not None:
                self.bar.remove_task(self.task)
            self.task = self.bar.add_task(said, total=requests, rate="")
            self.bar.refresh()
        elif self.shown:
            print(f"{said}: {requests} request{'s' * (requests != 1)}", file=sys.stderr, flush=True)

    def tell(self, requests: int, tokens: int) -> None:
        self.requests += requests
        self.tokens += tokens
        now = time.monotonic()
        if self.bar is not None and now >= self._next:
            rate = f"{self.tokens / max(now - self._began, 1e-9):,.0f} tokens/s"
            self.bar.update(self.task, completed=self.requests, rate=rate, refresh=True)
            self._next = now + DRAW_EVERY_S

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()


def tables(rows: Sequence[BenchRow]) -> list[Table]:
    """Speed, then latency. One line a row, load by load, so that what is to be compared stands together."""
    from rich import box
    from rich.table import Table

    speed = Table(title="speed", title_justify="left", box=box.SIMPLE_HEAD)
    times = Table(title="latency: milliseconds at p50, p95, p99", title_justify="left", box=box.SIMPLE_HEAD)
    for shown in (speed, times):
        shown.add_column("load", no_wrap=True)
        shown.add_column("engine", min_width=18)
    for name in ("tokens/s", "± 95%", "speed-up", "(95%)", "accepted", "failed"):
        speed.add_column(name, justify="right")
    for name in ("TTFT", "TPOT", "ITL", "end to end"):
        times.add_column(name, justify="right")
    order: dict[str, list[BenchRow]] = {}
    for row in rows:
        order.setdefault(row.load_name, []).append(row)
    for load, there in order.items():
        for row in there:
            first, last = (load if row is there[0] else ""), row is there[-1]
            speed.add_row(first, row.label, *_speed(row, rows), end_section=last)
            times.add_row(first, row.label, *_times(row), end_section=last)
    return [speed, times]


def _speed(row: BenchRow, rows: Sequence[BenchRow]) -> list[str]:
    rate, interval = row.output_throughput, row.output_throughput_ci95
    failed = sum(sum(r.failed.values()) for r in row.repeats)
    lengths = [r.acceptance_length for r in row.repeats if r.acceptance_length is not None]
    return [
        f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}",
        f"{(interval[1] - interval[0]) / 2 / rate:.1%}" if interval is not None and rate else "-",
        *_speedup(row, rows),
        f"{sum(lengths) / len(lengths):.2f}" if lengths else "-",
        str(failed or "-"),
    ]


def _speedup(row: BenchRow, rows: Sequence[BenchRow]) -> tuple[str, str]:
    base = find_baseline(row, rows)
    if base is None or base is row:
        return "-", ""
    try:
        found = compute_speedup(row, base)
    except UserError:  # the warnings below the table say why
        return "refused", ""
    return f"{found.ratio:.2f}x", f"{found.ci95[0]:.2f} to {found.ci95[1]:.2f}" if found.ci95 is not None else "-"


def _times(row: BenchRow) -> list[str]:
    """The mean over the repeats of each percentile."""
    cells = []
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms"):
        there = [(p.p50, p.p95, p.p99) for r in row.repeats if (p := getattr(r, name)) is not None]
        means = [sum(values) / len(there) for values in zip(*there, strict=True)]
        cells.append("  ".join(f"{f'{m:.0f}' if m >= 99.95 else f'{m:.3g}':>4}" for m in means) or "-")
    return cells
