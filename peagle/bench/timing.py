"""Timestamps of single requests, and the BenchRepeat they add up to.

Metrics are defined as in `vllm bench serve`: TTFT is from sending to the first chunk, TPOT the remaining time over the
remaining tokens, ITL the time between chunks, E2EL the time to the last chunk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from peagle.results.schema import BenchRepeat, Percentiles


@dataclass
class RequestTiming:
    """One request; all times are seconds on the same clock."""

    sent_at: float
    chunk_times: list[float] = field(default_factory=list)
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    failure: str | None = None  # short name, counted in BenchRepeat.failed
    failure_detail: str = ""

    @property
    def ttft(self) -> float:
        return self.chunk_times[0] - self.sent_at

    @property
    def e2el(self) -> float:
        return self.chunk_times[-1] - self.sent_at

    @property
    def tpot(self) -> float | None:
        return (self.e2el - self.ttft) / (self.num_output_tokens - 1) if self.num_output_tokens > 1 else None


def summarize_repeat(
    timings: Sequence[RequestTiming], duration: float, acceptance_length: float | None = None
) -> BenchRepeat:
    """Failed requests are counted by name and are in none of the other numbers."""
    completed = [t for t in timings if t.failure is None]
    tpots = [t.tpot for t in completed]
    gaps = [
        later - earlier for t in completed for earlier, later in zip(t.chunk_times, t.chunk_times[1:], strict=False)
    ]
    return BenchRepeat(
        duration=duration,
        completed=len(completed),
        failed=dict(Counter(t.failure for t in timings if t.failure is not None)),
        total_input_tokens=sum(t.num_input_tokens for t in completed),
        total_output_tokens=sum(t.num_output_tokens for t in completed),
        ttft_ms=_milliseconds([t.ttft for t in completed]),
        tpot_ms=_milliseconds([tpot for tpot in tpots if tpot is not None]),
        itl_ms=_milliseconds(gaps),
        e2el_ms=_milliseconds([t.e2el for t in completed]),
        acceptance_length=acceptance_length,
    )


def _milliseconds(seconds: list[float]) -> Percentiles | None:
    return Percentiles.of([s * 1e3 for s in seconds])
