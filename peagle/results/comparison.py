"""Compares rows of `peagle bench`: speedups with confidence intervals, and warnings about unreliable measurements."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from peagle.config import BenchWarningThresholds
from peagle.errors import UserError
from peagle.results.schema import BenchRow, Interval, t_quantile_975


@dataclass(frozen=True)
class Speedup:
    """Ratio of two output throughputs with its 95% confidence interval; None if a row has a single repeat."""

    ratio: float
    ci95: Interval | None

    def __str__(self) -> str:
        interval = f" ({self.ci95[0]:.2f} to {self.ci95[1]:.2f})" if self.ci95 is not None else ""
        return f"{self.ratio:.2f}x{interval}"


def compute_speedup(row: BenchRow, baseline: BenchRow) -> Speedup:
    """Ratio of mean output throughputs. Raises UserError if the rows are not comparable.

    The interval is Welch's, on logarithms since the error of a ratio is a factor. Degrees of freedom are rounded down.
    """
    check_comparable(row, baseline)
    ratio = row.output_throughput / baseline.output_throughput
    logs = [
        [math.log(repeat.output_throughput) for repeat in one.repeats if repeat.total_output_tokens]
        for one in (row, baseline)
    ]
    if any(len(values) < 2 for values in logs):
        return Speedup(ratio, None)
    variances = [float(np.var(values, ddof=1)) / len(values) for values in logs]
    if sum(variances) == 0:
        return Speedup(ratio, (ratio, ratio))
    pairs = zip(variances, logs, strict=True)
    freedom = sum(variances) ** 2 / sum(variance**2 / (len(values) - 1) for variance, values in pairs)
    factor = math.exp(t_quantile_975(max(1, math.floor(freedom))) * math.sqrt(sum(variances)))
    return Speedup(ratio, (ratio / factor, ratio * factor))


def check_comparable(first: BenchRow, second: BenchRow) -> None:
    """Raises UserError if the rows ran different workloads or their mean output lengths differ."""
    names = f"{first.label!r} and {second.label!r} ({first.load_name}, {second.load_name})"
    if first.workload_sha256 != second.workload_sha256:
        raise UserError(
            f"{names} cannot be compared: the workloads differ ({first.workload_sha256[:8]}, "
            f"{second.workload_sha256[:8]}); measure both with the same prompts, lengths and sampling"
        )
    first_mean, second_mean = mean_output_tokens(first), mean_output_tokens(second)
    if first_mean is None or second_mean is None:
        raise UserError(f"{names} cannot be compared: {'the first' if first_mean is None else 'the second'} is empty")
    if abs(first_mean - second_mean) > BenchWarningThresholds.lengths * max(first_mean, second_mean):
        raise UserError(
            f"{names} cannot be compared: mean output lengths are {first_mean:.0f} and {second_mean:.0f} tokens; "
            "use --ignore-eos to make them equal"
        )


def mean_output_tokens(row: BenchRow) -> float | None:
    """Mean output tokens per completed request; None if there are none."""
    tokens = sum(repeat.total_output_tokens for repeat in row.repeats)
    completed = sum(repeat.completed for repeat in row.repeats)
    return tokens / completed if tokens and completed else None


def find_baseline(row: BenchRow, rows: Sequence[BenchRow]) -> BenchRow | None:
    """The row without a drafter under the same load.

    The same engine is preferred. Another server is accepted too, since each server configuration has its own address.
    """

    def comparable_load(one: BenchRow) -> tuple[bool, int | None, float | None]:
        return one.engine == "embedded", one.concurrency, one.request_rate

    baselines = [one for one in rows if one.method == "none" and comparable_load(one) == comparable_load(row)]
    same_engine = [one for one in baselines if one.engine == row.engine]
    return next(iter(same_engine or baselines), None)


def row_warnings(row: BenchRow) -> list[str]:
    """Reasons to distrust this row, one sentence each."""
    limits, repeats = BenchWarningThresholds, row.repeats
    failed = sum((Counter(repeat.failed) for repeat in repeats), Counter())
    warnings = []
    if failed:
        by_reason = ", ".join(f"{name} {count}" for name, count in failed.most_common())
        total = failed.total() + sum(repeat.completed for repeat in repeats)
        warnings.append(f"{failed.total()} of {total} requests failed ({by_reason}) and are in no other number")
    if all(repeat.completed for repeat in repeats):
        completed, shortest = min(repeat.completed for repeat in repeats), min(repeat.duration for repeat in repeats)
        if row.concurrency is not None and completed < limits.least_waves * row.concurrency:
            warnings.append(
                f"only {completed} requests at concurrency {row.concurrency}: ramp-up and drain dominate; "
                f"use --num-prompts {limits.least_waves * row.concurrency} or more"
            )
        if shortest < limits.least_seconds:
            warnings.append(
                f"a repeat took only {shortest:.2g} s, less than {limits.least_seconds:g}: raise --num-prompts or "
                "--max-tokens"
            )
        throughputs = [repeat.output_throughput for repeat in repeats]
        spread = (max(throughputs) - min(throughputs)) / (row.output_throughput or 1.0)
        if len(repeats) == 1:
            warnings.append("one repeat gives no interval: use --repeats 3 or more")
        elif spread > limits.spread:
            warnings.append(f"repeats differ by {spread:.0%}: the machine was busy, or a repeat is too short")
        served = min(repeat.completed / repeat.duration for repeat in repeats)
        if row.request_rate is not None and served < limits.served * row.request_rate:
            warnings.append(
                f"{served:.3g} requests/s completed of {row.request_rate:g} sent: the queue grew, or the run was too "
                "short for its last responses"
            )
    return [f"{row.label}, {row.load_name}: {warning}" for warning in warnings]


def all_warnings(rows: Sequence[BenchRow]) -> list[str]:
    """Warnings of every row alone and of every row beside its baseline."""
    warnings = [warning for row in rows for warning in row_warnings(row)]
    for row in rows:
        baseline = find_baseline(row, rows)
        if baseline is not None and baseline is not row:
            try:
                check_comparable(row, baseline)
            except UserError as error:
                warnings.append(str(error))
    return warnings
