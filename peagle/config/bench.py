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
    request_rates: tuple[float, ...] = ()  # open loop: requests per second, independent of the responses
    num_prompts: int | None = None  # requests per repeat; None: enough for the heaviest load
    repeats: int = 3
    num_warmups: int | None = None  # requests before the first repeat of a load; None: the whole workload once
    max_tokens: int = 128
    ignore_eos: bool = False
    temperature: float = 0.0
    random_input_len: int | None = None  # tokens of random prompts
    raw: bool = False  # prompts without a chat template
    seed: int = 0
    default_concurrency: tuple[int, ...] = (1, 8)  # if neither concurrency nor request_rates are given
    min_prompts: int = 32
    min_open_loop_s: float = 10.0  # duration of an open loop, if `num_prompts` is None

    def __post_init__(self) -> None:
        if not self.concurrency and not self.request_rates:
            object.__setattr__(self, "concurrency", self.default_concurrency)
        require = field_validator(self)
        for concurrency in self.concurrency:
            if concurrency < 1:
                raise UserError(f"--concurrency {concurrency}: must be at least 1")
        for rate in self.request_rates:
            if not 0 < rate < 1e6:
                raise UserError(f"--request-rate {rate:g}: must be above 0, in requests per second")
        for name in ("num_prompts", "repeats", "random_input_len", "max_tokens"):
            require(getattr(self, name) is None or getattr(self, name) >= 1, name, "at least 1")
        require(self.num_warmups is None or self.num_warmups >= 0, "num_warmups", "0 or more")
        require(0.0 <= self.temperature <= 100.0, "temperature", "between 0 (greedy) and 100")
        require(0 <= self.seed < 2**31, "seed", "between 0 and 2^31 - 1")

    @property
    def total_prompts(self) -> int:
        """Requests per repeat, equal for every load, so that all rows run the same prompts."""
        if self.num_prompts is not None:
            return self.num_prompts
        open_loop = [int(rate * self.min_open_loop_s) for rate in self.request_rates]
        return max([self.min_prompts, *(2 * concurrency for concurrency in self.concurrency), *open_loop])


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
        if not self.total_s > 0:
            raise UserError(f"--timeout {self.total_s:g}: must be above 0 seconds")


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
