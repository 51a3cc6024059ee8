"""Rows and documents of results: the dataclasses behind the JSON files of `peagle eval`, `bench`, `tune` and `plan`.

docs/results.md describes every field. Properties named in `derived` are computed from the other fields: they are
written to the file for readers without this package and ignored when a file is read.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self, TypeAlias

import numpy as np

from peagle.errors import UserError
from peagle.results.provenance import Provenance

SCHEMA_VERSION = 2
Interval: TypeAlias = tuple[float, float]
ResultKind = Literal["eval", "bench", "tune", "plan"]
LoopingResponses = Literal["included", "excluded"]
METHOD_NAMES = {"none": "no speculation", "eagle3": "EAGLE-3", "p-eagle": "P-EAGLE"}


def configuration_name(method: str, k: int | str | None) -> str:
    """For example 'P-EAGLE with K=7'."""
    if method == "none" or k == 0:
        return METHOD_NAMES["none"]
    name = METHOD_NAMES.get(method, method)
    return name if k is None else f"{name} with K={k}"


def _require(condition: bool, field_name: str, expected: str) -> None:
    if not condition:
        raise UserError(f"{field_name}: must be {expected}")


@dataclass(frozen=True)
class AcceptanceRow:
    """Acceptance of one drafter at one K, over a data set or a part of it."""

    drafter: str
    method: Literal["p-eagle", "eagle3"]
    engine: str
    dataset: str
    category: str | None
    context_range: tuple[int, int] | None
    temperature: float
    num_speculative_tokens: int
    looping_responses: LoopingResponses
    num_responses: int
    num_output_tokens: int
    num_drafts: int
    num_accepted_tokens_per_pos: list[int]
    acceptance_length_ci95: Interval | None = None

    derived = "acceptance_length", "per_position_acceptance_rates", "per_position_conditional_rates"

    def __post_init__(self) -> None:
        k, accepted = self.num_speculative_tokens, self.num_accepted_tokens_per_pos
        _require(k >= 1, "num_speculative_tokens", "at least 1")
        _require(self.temperature >= 0, "temperature", "0 or more")
        for name in ("num_responses", "num_output_tokens", "num_drafts"):
            _require(getattr(self, name) >= 0, name, "0 or more")
        _require(len(accepted) == k, "num_accepted_tokens_per_pos", f"one count for each of {k} positions")
        non_increasing = all(a >= b for a, b in zip([self.num_drafts, *accepted], [*accepted, 0], strict=True))
        _require(non_increasing, "num_accepted_tokens_per_pos", "non-increasing counts, at most num_drafts")

    @property
    def is_whole_dataset(self) -> bool:
        """Whether the row covers a whole data set, including looping responses."""
        return self.category is None and self.context_range is None and self.looping_responses == "included"

    @property
    def acceptance_length(self) -> float | None:
        """Mean number of accepted tokens per draft plus 1 for the target's own token."""
        return 1 + sum(self.num_accepted_tokens_per_pos) / self.num_drafts if self.num_drafts else None

    @property
    def per_position_acceptance_rates(self) -> list[float | None]:
        """Share of all drafts in which position i was accepted."""
        return [count / self.num_drafts if self.num_drafts else None for count in self.num_accepted_tokens_per_pos]

    @property
    def per_position_conditional_rates(self) -> list[float | None]:
        """Share of the drafts with all earlier positions accepted in which position i was accepted."""
        accepted = self.num_accepted_tokens_per_pos
        reached = [self.num_drafts, *accepted[:-1]]
        return [count / total if total else None for count, total in zip(accepted, reached, strict=True)]


@dataclass(frozen=True)
class Percentiles:
    """Summary of a latency distribution, in milliseconds."""

    mean: float
    median: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self | None:
        """Linearly interpolated percentiles as numpy computes them; None if there are no values."""
        if not values:
            return None
        median, p95, p99 = np.percentile(values, (50, 95, 99)).tolist()
        return cls(float(np.mean(values)), median, p95, p99)


@dataclass(frozen=True)
class BenchRepeat:
    """One pass over the whole workload. Fields are named as in the result files of `vllm bench serve`."""

    duration: float
    completed: int
    failed: dict[str, int]
    total_input_tokens: int
    total_output_tokens: int
    ttft_ms: Percentiles | None
    tpot_ms: Percentiles | None
    itl_ms: Percentiles | None
    e2el_ms: Percentiles | None
    acceptance_length: float | None = None

    derived = ("output_throughput",)

    def __post_init__(self) -> None:
        _require(self.duration > 0, "duration", "above 0")
        for name in ("completed", "total_input_tokens", "total_output_tokens"):
            _require(getattr(self, name) >= 0, name, "0 or more")

    @property
    def output_throughput(self) -> float:
        """Output tokens per second."""
        return self.total_output_tokens / self.duration


@dataclass(frozen=True)
class BenchRow:
    """Speed of one engine with one drafter and K under one load."""

    label: str
    engine: str
    drafter: str | None
    method: Literal["none", "eagle3", "p-eagle"]
    num_speculative_tokens: int | Literal["auto"] | None
    concurrency: int | None  # of a closed loop
    request_rate: float | None  # of an open loop; exactly one of the two is set
    repeats: list[BenchRepeat]
    workload_sha256: str

    derived = "output_throughput", "output_throughput_ci95"

    def __post_init__(self) -> None:
        _require(bool(self.repeats), "repeats", "a list of at least one")
        one_load = (self.concurrency is None) != (self.request_rate is None)
        _require(one_load, "concurrency", "set if request_rate is null, and null if it is set")

    @property
    def output_throughput(self) -> float:
        """Output tokens per second, mean over the repeats."""
        return sum(repeat.output_throughput for repeat in self.repeats) / len(self.repeats)

    @property
    def output_throughput_ci95(self) -> Interval | None:
        """95% confidence interval of `output_throughput`; None for a single repeat."""
        return mean_ci95([repeat.output_throughput for repeat in self.repeats])

    @property
    def load_name(self) -> str:
        """Short name of the load for people."""
        return f"c={self.concurrency}" if self.request_rate is None else f"{self.request_rate:g}/s"


@dataclass(frozen=True)
class TuneRow:
    """Measured time of a decode step at one batch size and K, and the throughput expected from it."""

    batch_size: int
    num_speculative_tokens: int
    step_ms: float
    expected_output_throughput: float
    chosen: bool


@dataclass(frozen=True)
class PlanRow:
    """Predicted speed and cost of one K at one load."""

    concurrency: int
    num_speculative_tokens: int
    method: str
    step_ms: float
    output_throughput: float
    num_gpus: int
    cost_per_million_tokens: float | None
    chosen: bool


ROW_CLASSES: dict[str, type] = {"eval": AcceptanceRow, "bench": BenchRow, "tune": TuneRow, "plan": PlanRow}


@dataclass
class Results:
    """A result file."""

    kind: ResultKind
    provenance: Provenance
    settings: dict[str, Any]
    rows: list[Any]  # instances of ROW_CLASSES[kind]
    finished: bool = True
    warnings: list[str] = field(default_factory=list)


def mean_ci95(values: Sequence[float]) -> Interval | None:
    """95% confidence interval of the mean by Student's t distribution; None for fewer than two values."""
    if len(values) < 2:
        return None
    mean = float(np.mean(values))
    margin = t_quantile_975(len(values) - 1) * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return mean - margin, mean + margin


def t_quantile_975(degrees_of_freedom: int) -> float:
    """97.5% quantile of Student's t distribution: with t = sqrt(n) tan(theta), its density is cos(theta)^(n - 1)."""
    theta = np.linspace(0.0, math.pi / 2, 50_001)
    density = np.cos(theta) ** (degrees_of_freedom - 1)
    mass = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])  # the trapezoidal rule
    return math.sqrt(degrees_of_freedom) * math.tan(np.interp(0.95, mass / mass[-1], theta))
