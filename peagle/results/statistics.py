"""From the times of single requests to the numbers of a row, and when to doubt them.

Knows nothing about engines or servers. What is counted is what `vllm bench serve` counts: TTFT from sending to the
first chunk, TPOT the rest of the time over the rest of the tokens, ITL between chunks, end to end to the last chunk.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from peagle.config import BenchWarningThresholds
from peagle.errors import UserError
from peagle.results.schema import BenchRepeat, BenchRow, Percentiles, t_975

NOT_SENT = "not sent"  # the rest of a load, when whoever answers was given up


@dataclass
class Trace:
    """One request. Seconds on whatever clock, the same for all of a run."""

    sent: float
    chunks: list[float] = field(default_factory=list)  # when each came
    input_tokens: int = 0
    output_tokens: int = 0
    failed: str | None = None  # of a few names, to be counted
    detail: str = ""

    @property
    def ttft(self) -> float:
        return self.chunks[0] - self.sent

    @property
    def e2e(self) -> float:
        return self.chunks[-1] - self.sent

    @property
    def tpot(self) -> float | None:
        return (self.e2e - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None


def repeat_of(traces: Sequence[Trace], seconds: float, acceptance_length: float | None = None) -> BenchRepeat:
    """What failed is counted by name and is in none of the other numbers."""
    good = [t for t in traces if t.failed is None]
    tpots = [t.tpot for t in good]
    gaps = [after - before for t in good for before, after in zip(t.chunks, t.chunks[1:], strict=False)]
    return BenchRepeat(
        seconds=seconds,
        requests=len(good),
        failed=dict(Counter(t.failed for t in traces if t.failed is not None)),
        input_tokens=sum(t.input_tokens for t in good),
        output_tokens=sum(t.output_tokens for t in good),
        ttft_ms=_milliseconds([t.ttft for t in good]),
        tpot_ms=_milliseconds([tpot for tpot in tpots if tpot is not None]),
        itl_ms=_milliseconds(gaps),
        e2e_ms=_milliseconds([t.e2e for t in good]),
        acceptance_length=acceptance_length,
    )


def _milliseconds(seconds: list[float]) -> Percentiles | None:
    return Percentiles.of([s * 1e3 for s in seconds])


def load_name(row: BenchRow) -> str:
    return f"c={row.concurrency}" if row.rate is None else f"{row.rate:g}/s"


def comparable(a: BenchRow, b: BenchRow) -> None:
    """Refuses to set beside each other what did different work."""
    names = f"{a.name!r} and {b.name!r} ({load_name(a)}, {load_name(b)})"
    if a.prompts != b.prompts:
        raise UserError(
            f"{names} cannot be compared: other prompts, lengths or sampling ({a.prompts[:8]}, {b.prompts[:8]}); "
            "measure both with the same --prompts, --requests, --max-tokens, --ignore-eos, --temperature and --seed"
        )
    mean_a, mean_b = mean_length(a), mean_length(b)
    if mean_a is None or mean_b is None:
        raise UserError(f"{names} cannot be compared: {'the first' if mean_a is None else 'the second'} has no answers")
    if abs(mean_a - mean_b) > BenchWarningThresholds.lengths * max(mean_a, mean_b):
        raise UserError(
            f"{names} cannot be compared: their answers have {mean_a:.0f} and {mean_b:.0f} tokens on average; "
            "--ignore-eos makes them equal"
        )


def mean_length(row: BenchRow) -> float | None:
    """Tokens of an answer; None where there is none."""
    tokens, requests = sum(r.output_tokens for r in row.repeats), sum(r.requests for r in row.repeats)
    return tokens / requests if tokens and requests else None


@dataclass(frozen=True)
class Speedup:
    """How many times as many tokens a second; the interval is one of 95%, None where a row has a single repeat."""

    value: float
    ci95: tuple[float, float] | None

    def __str__(self) -> str:
        if self.ci95 is None:
            return f"{self.value:.2f}x"
        return f"{self.value:.2f}x ({self.ci95[0]:.2f} to {self.ci95[1]:.2f})"


def speedup(row: BenchRow, base: BenchRow) -> Speedup:
    """Of mean tokens a second. Refused where the two cannot be compared.

    The interval is Welch's, on logarithms: a ratio's error is a factor. Degrees of freedom are rounded down.
    """
    comparable(row, base)
    value = row.output_tokens_per_second / base.output_tokens_per_second
    logs = [[math.log(r.output_tokens_per_second) for r in one.repeats if r.output_tokens] for one in (row, base)]
    if any(len(values) < 2 for values in logs):
        return Speedup(value, None)
    parts = [_variance(values) / len(values) for values in logs]
    if sum(parts) == 0:
        return Speedup(value, (value, value))
    freedom = sum(parts) ** 2 / sum(p**2 / (len(v) - 1) for p, v in zip(parts, logs, strict=True))
    factor = math.exp(t_975(max(1, math.floor(freedom))) * math.sqrt(sum(parts)))
    return Speedup(value, (value / factor, value * factor))


def _variance(values: list[float]) -> float:
    mean = sum(values) / len(values)
    return sum((v - mean) ** 2 for v in values) / (len(values) - 1)


def baseline_of(row: BenchRow, rows: Sequence[BenchRow]) -> BenchRow | None:
    """The row without a drafter under the same load: of the same engine, or, since a server has one address for each
    way to run it, of another server."""
    plain = [r for r in rows if r.method == "none" and _place(r) == _place(row)]
    own = [r for r in plain if r.engine == row.engine]
    return next(iter(own or plain), None)


def _place(row: BenchRow) -> tuple[bool, str, int | None, float | None]:
    return row.engine == "embedded", row.load, row.concurrency, row.rate


def doubts(row: BenchRow, limits: BenchWarningThresholds | None = None) -> list[str]:
    """Why this row's numbers may not mean what they seem to, one sentence each."""
    limits = limits or BenchWarningThresholds()
    said = []
    failed: Counter[str] = Counter()
    for repeat in row.repeats:
        failed.update(repeat.failed)
    if failed:
        named = ", ".join(f"{name} {count}" for name, count in failed.most_common())
        asked = sum(failed.values()) + sum(r.requests for r in row.repeats)
        said.append(f"{sum(failed.values())} of {asked} requests failed ({named}), and are in no other number")
    fewest = min(r.requests for r in row.repeats)
    if fewest == 0:
        return [f"{row.name}, {load_name(row)}: {sentence}" for sentence in said]  # nothing else is worth a word
    if row.concurrency is not None and fewest < limits.least_waves * row.concurrency:
        said.append(
            f"only {fewest} requests for {row.concurrency} at once: filling and emptying weighs on the numbers, "
            f"--requests {limits.least_waves * row.concurrency} or more"
        )
    shortest = min(r.seconds for r in row.repeats)
    if shortest < limits.least_seconds:
        said.append(
            f"a repeat took only {shortest:.2g} s, less than {limits.least_seconds:g}: --requests or --max-tokens"
        )
    rates = [r.output_tokens_per_second for r in row.repeats]
    if len(rates) == 1:
        said.append("one repeat has no spread: --repeats 3 or more")
    elif (mean := sum(rates) / len(rates)) > 0 and (apart := (max(rates) - min(rates)) / mean) > limits.spread:
        said.append(f"repeats differ by {apart:.0%}: something else was running, or a repeat is too short")
    if row.rate is not None:
        served = min(r.requests / r.seconds for r in row.repeats)
        if served < limits.served * row.rate:
            said.append(
                f"{served:.3g} requests/s were answered of {row.rate:g} that arrived: the queue grew, or the run was "
                "too short for its last answers"
            )
    return [f"{row.name}, {load_name(row)}: {sentence}" for sentence in said]


def all_doubts(rows: Sequence[BenchRow]) -> list[str]:
    """Of every row alone, and of every row beside its baseline."""
    said = [doubt for row in rows for doubt in doubts(row)]
    for row in rows:
        base = baseline_of(row, rows)
        if base is not None and base is not row:
            try:
                comparable(row, base)
            except UserError as refused:
                said.append(str(refused))
    return said
