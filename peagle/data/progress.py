"""Progress while `peagle data` runs, and the summary at its end."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

LINE_INTERVAL_S = 5.0  # between lines of progress without a terminal
DRAW_INTERVAL_S = 0.2
PERCENTILES = (10, 50, 90, 99)


@dataclass(frozen=True)
class DataSummary:
    """Totals of a response file over all runs; from `num_new` on, of this run alone."""

    out: str
    num_rows: int
    num_requested: int
    num_tokens: int  # of responses
    lengths: dict[str, int]  # percentiles of response tokens
    finished_share: float  # of the rows
    num_cut: int  # rows cut where their response starts to loop
    dropped: dict[str, int]  # responses by reason
    rejected: dict[str, int]  # prompts by reason
    num_duplicates: int
    num_excluded: int  # prompts removed by --exclude-ids
    num_new: int
    num_failed: int  # requests to retry
    num_generated_tokens: int  # dropped responses included
    seconds: float
    interrupted: bool

    @property
    def tokens_per_second(self) -> float:
        return self.num_generated_tokens / self.seconds if self.seconds else 0.0

    @property
    def complete(self) -> bool:
        return self.num_rows + sum(self.dropped.values()) >= self.num_requested

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "tokens_per_second": round(self.tokens_per_second, 1), "complete": self.complete}

    def text(self) -> str:
        lines = [
            f"{self.out}: {self.num_rows:,} of {self.num_requested:,} rows, {self.num_tokens:,} response tokens",
        ]
        if self.num_rows:
            lengths = ", ".join(f"{name} {value:,}" for name, value in self.lengths.items())
            lines.append(f"  tokens per row: {lengths}; {self.finished_share:.1%} finished")
        if self.num_cut:
            lines.append(f"  cut at the start of a loop: {self.num_cut:,}")
        if self.dropped:
            lines.append(f"  dropped responses: {_format_counts(self.dropped)}")
        if self.rejected:
            lines.append(f"  rejected prompts: {_format_counts(self.rejected)} (listed in {self.out}.rejected)")
        if self.num_duplicates:
            lines.append(f"  duplicate prompts: {self.num_duplicates:,}")
        if self.num_excluded:
            lines.append(f"  prompts of the validation set, excluded: {self.num_excluded:,}")
        if self.num_failed:
            lines.append(f"  failed requests: {self.num_failed:,}; the same command retries them")
        rate = f", {self.tokens_per_second:,.0f} tokens/s" if self.num_generated_tokens else ""
        lines.append(f"  this run: {self.num_new:,} rows in {self.seconds:,.1f} s{rate}")
        if self.interrupted:
            lines.append("  interrupted: the same command resumes")
        return "\n".join(lines)


def _format_counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in counts.items())


def compute_percentiles(lengths: Any) -> dict[str, int]:
    values = np.asarray(lengths)
    if not len(values):
        return {}
    found = {f"p{p}": int(np.percentile(values, p, method="lower")) for p in PERCENTILES}
    return {**found, "max": int(values.max())}


@dataclass
class GenerationProgress:
    """Rows, tokens per second and time left on stderr: a bar on a terminal, elsewhere a line every few seconds."""

    total: int
    num_before: int  # rows of earlier runs
    enabled: bool = True
    rows: int = 0
    tokens: int = 0
    dropped: int = 0
    _started: float = field(default_factory=time.monotonic)
    _next_update: float = 0.0
    _bar: Any = None

    def __post_init__(self) -> None:
        if not self.enabled or not sys.stderr.isatty():
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as Bar

        columns = (TextColumn("rows"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[status]}"))
        self._bar = Bar(*columns, console=Console(stderr=True), auto_refresh=False)
        self._task = self._bar.add_task("", total=self.total, completed=self.num_before, status="")
        self._bar.start()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def add_row(self, num_tokens: int, kept: bool) -> None:
        self.rows += 1
        self.tokens += num_tokens
        self.dropped += not kept

    def update(self, last: bool = False) -> None:
        now = time.monotonic()
        if not self.enabled or (now < self._next_update and not last):
            return
        done = self.num_before + self.rows
        left = (self.total - done) * self.seconds / self.rows if self.rows else None
        rate = self.tokens / max(self.seconds, 1e-9)
        status = f"{rate:,.0f} tokens/s, {self.dropped:,} dropped, {_format_duration(left)} left"
        if self._bar is not None:
            self._bar.update(self._task, completed=done, status=status, refresh=True)
        elif self._next_update:  # skips the first call
            print(f"{done:,} of {self.total:,} rows, {status}", file=sys.stderr, flush=True)
        self._next_update = now + (DRAW_INTERVAL_S if self._bar is not None else LINE_INTERVAL_S)

    def close(self) -> None:
        self.update(last=True)
        if self._bar is not None:
            self._bar.stop()


def _format_duration(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"
