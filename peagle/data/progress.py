"""What a run of `peagle data` shows: progress while it goes, a summary at its end.

Knows nothing about how responses come to be.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

LINE_EVERY_S = 5.0  # between lines of progress, where there is no terminal
DRAW_EVERY_S = 0.2
PERCENTILES = (10, 50, 90, 99)


@dataclass(frozen=True)
class DataSummary:
    """Of a whole file, over all runs that wrote it; `new` and below are of this run alone."""

    out: str
    rows: int
    asked: int  # rows that the settings ask for
    tokens: int  # of responses
    lengths: dict[str, int]  # percentiles of response tokens
    ended: float  # share of the rows whose answer reached its end
    cut: int  # rows that end where their answer began to loop
    dropped: dict[str, int]  # responses not kept, by reason
    refused: dict[str, int]  # prompts not asked, by reason
    duplicates: int  # prompts that were there before
    new: int
    failed: int  # not answered this time, to be asked again
    generated: int  # tokens, dropped ones included
    seconds: float
    interrupted: bool

    @property
    def tokens_per_second(self) -> float:
        return self.generated / self.seconds if self.seconds else 0.0

    @property
    def complete(self) -> bool:
        return self.rows + sum(self.dropped.values()) >= self.asked

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "tokens_per_second": round(self.tokens_per_second, 1), "complete": self.complete}

    def text(self) -> str:
        lines = [f"{self.out}: {self.rows:,} rows of {self.asked:,}, {self.tokens:,} response tokens"]
        if self.rows:
            lengths = ", ".join(f"{name} {value:,}" for name, value in self.lengths.items())
            lines.append(f"  tokens of a row: {lengths}; {self.ended:.1%} reached their end")
        if self.cut:
            lines.append(f"  cut where they began to loop: {self.cut:,}")
        if self.dropped:
            lines.append(f"  responses dropped: {_counts(self.dropped)}")
        if self.refused:
            lines.append(f"  prompts refused: {_counts(self.refused)} (each in {self.out}.refused)")
        if self.duplicates:
            lines.append(f"  prompts that were there twice: {self.duplicates:,}")
        if self.failed:
            lines.append(f"  not answered this time: {self.failed:,}; the same command asks them again")
        rate = f", {self.tokens_per_second:,.0f} tokens/s" if self.generated else ""
        lines.append(f"  this run: {self.new:,} rows in {self.seconds:,.1f} s{rate}")
        if self.interrupted:
            lines.append("  interrupted: run the same command again to go on")
        return "\n".join(lines)


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in counts.items())


def percentiles(lengths: Any) -> dict[str, int]:
    values = np.asarray(lengths)
    if not len(values):
        return {}
    found = {f"p{p}": int(np.percentile(values, p, method="lower")) for p in PERCENTILES}
    return {**found, "longest": int(values.max())}


@dataclass
class GenerationProgress:
    """Rows done, tokens a second and the time left, on stderr: a bar on a terminal, now and then a line elsewhere."""

    total: int
    before: int  # rows that were there when it began
    shown: bool = True
    rows: int = 0
    tokens: int = 0
    dropped: int = 0
    _began: float = field(default_factory=time.monotonic)
    _next: float = 0.0
    _bar: Any = None

    def __post_init__(self) -> None:
        if not self.shown or not sys.stderr.isatty():
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as Bar

        columns = (TextColumn("rows"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[said]}"))
        self._bar = Bar(*columns, console=Console(stderr=True), auto_refresh=False)
        self._task = self._bar.add_task("", total=self.total, completed=self.before, said="")
        self._bar.start()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def add(self, tokens: int, kept: bool) -> None:
        self.rows += 1
        self.tokens += tokens
        self.dropped += not kept

    def show(self, last: bool = False) -> None:
        now = time.monotonic()
        if not self.shown or (now < self._next and not last):
            return
        done = self.before + self.rows
        left = (self.total - done) * self.seconds / self.rows if self.rows else None
        said = f"{self.tokens / max(self.seconds, 1e-9):,.0f} tokens/s, {self.dropped:,} dropped, {_time(left)} left"
        if self._bar is not None:
            self._bar.update(self._task, completed=done, said=said, refresh=True)
        elif self._next:  # not at once: there is nothing to say yet
            print(f"{done:,} of {self.total:,} rows, {said}", file=sys.stderr, flush=True)
        self._next = now + (DRAW_EVERY_S if self._bar is not None else LINE_EVERY_S)

    def close(self) -> None:
        self.show(last=True)
        if self._bar is not None:
            self._bar.stop()


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"
