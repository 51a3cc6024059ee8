"""Settings of `peagle bench`: measuring throughput and latency."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from peagle.config.engine import GPU_MEMORY_UTILIZATION
from peagle.config.validation import field_validator
from peagle.errors import UserError

SpeculationMethod = Literal["none", "eagle3", "p-eagle"]


@dataclass(frozen=True)
class BenchSettings:
    """The workload. Rows are comparable if all fields but the loads and `repeats` are equal."""

    concurrency: tuple[int, ...] = ()  # closed loop: requests in flight; a finished one is replaced at once
    rates: tuple[float, ...] = ()  # open loop: requests per second, independent of the responses
    requests: int | None = None  # per repeat; None: enough for the heaviest load
    waves: int | None = None  # closed loop: requests per repeat as a multiple of the concurrency; None: `requests`
    repeats: int = 3
    warmup: int | None = None  # requests before each load; None: the concurrency
    max_tokens: int = 128
    ignore_eos: bool = False
    temperature: float = 0.0
    random_input: int | None = None  # tokens of random prompts
    raw: bool = False  # prompts without a chat template
    seed: int = 0
    usual_concurrency: tuple[int, ...] = (1, 8)  # if neither concurrency nor rates are given
    least_requests: int = 32
    least_arriving_s: float = 10.0  # duration of an open loop, if `requests` is None

    def __post_init__(self) -> None:
        if not self.concurrency and not self.rates:
            object.__setattr__(self, "concurrency", self.usual_concurrency)
        require = field_validator(self)
        for c in self.concurrency:
            if c < 1:
                raise UserError(f"--concurrency {c}: must be at least 1")
        for rate in self.rates:
            if not 0 < rate < 1e6:
                raise UserError(f"--rate {rate:g}: must be above 0, in requests per second")
        for name in ("requests", "waves", "repeats", "random_input", "max_tokens"):
            require(getattr(self, name) is None or getattr(self, name) >= 1, name, "at least 1")
        require(self.warmup is None or self.warmup >= 0, "warmup", "0 or more")
        require(0.0 <= self.temperature <= 100.0, "temperature", "between 0 (greedy) and 100")
        require(0 <= self.seed < 2**31, "seed", "between 0 and 2^31 - 1")

    @property
    def count(self) -> int:
        """Requests per repeat, equal for every load, so that all rows run the same prompts."""
        if self.requests is not None:
            return self.requests
        arriving = [int(rate * self.least_arriving_s) for rate in self.rates]
        return max([self.least_requests, *((self.waves or 2) * c for c in self.concurrency), *arriving])

    def count_of(self, concurrency: int | None) -> int:
        """Requests per repeat of one load: a prefix of all prompts if `waves` bounds them."""
        if self.waves is None or concurrency is None:
            return self.count
        return min(self.count, max(self.least_requests, self.waves * concurrency))


@dataclass(frozen=True)
class BenchWarningThresholds:
    """Limits beyond which a row carries a warning."""

    least_seconds: float = 3.0  # duration of a repeat
    least_waves: int = 2  # requests per concurrent request
    spread: float = 0.10  # between the fastest and the slowest repeat, relative to the mean
    lengths: float = 0.25  # relative difference of mean output lengths between two rows
    elsewhere: float = 0.02  # share of the server's tokens that other clients received
    cached: float = 0.10  # share of prompt tokens from the server's prefix cache
    served: float = 0.80  # share of the requested rate that the server sustained


@dataclass(frozen=True)
class BenchServerSettings:
    """An OpenAI-compatible server under test."""

    url: str
    model: str | None = None  # None: the only model of the server
    connect_s: float = 10.0
    stall_s: float = 60.0  # without a byte
    total_s: float = 600.0  # of one request
    failures: int = 8  # consecutive failures before the run stops; at least twice the concurrency

    def __post_init__(self) -> None:
        for name, flag in (("connect_s", "connect-timeout"), ("stall_s", "stall-timeout"), ("total_s", "timeout")):
            if not getattr(self, name) > 0:
                raise UserError(f"--{flag} {getattr(self, name):g}: must be above 0 seconds")


@dataclass(frozen=True)
class BenchEngineSettings:
    """The embedded engine under test. None: chosen for the device, the target and the load."""

    device: str | None = None
    dtype: str | None = None
    max_num_seqs: int | None = None
    max_model_len: int | None = None
    gpu_memory_utilization: float = GPU_MEMORY_UTILIZATION
    kv_cache_memory_bytes: int | None = None  # instead of that fraction
    cost_table: str | None = None
    enable_prefix_caching: bool = False  # repeats send the same prompts, so caching would skip their prefill
