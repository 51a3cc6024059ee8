"""Settings of `peagle plan` and `peagle tune`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from peagle.config.engine import CPU_TIMED_BATCH_SIZES, GPU_MEMORY_UTILIZATION
from peagle.config.speculation import (
    DEFAULT_NUM_SPECULATIVE_TOKENS,
    MAX_SPECULATIVE_TOKENS,
    check_num_speculative_tokens,
)
from peagle.config.validation import field_validator
from peagle.errors import UserError

PlanEngine = Literal["auto", "embedded", "vllm"]


@dataclass(frozen=True)
class PlanSettings:
    """The load of `peagle plan` and the values of K that it compares."""

    concurrency: tuple[int, ...] = (1, 8, 64)  # concurrent requests per replica
    num_speculative_tokens: tuple[int, ...] = (1, 2, 3, 4, 5, 7, 9)
    num_prompt_tokens: int = 512
    num_output_tokens: int = 256
    throughput: float | None = None  # output tokens/s of all replicas
    per_user_throughput: float | None = None  # minimum output tokens/s of each request
    tensor_parallel_size: int = 1
    engine: PlanEngine = "auto"
    acceptance_length_k: int = DEFAULT_NUM_SPECULATIVE_TOKENS  # the K that an acceptance length was measured with
    gpu_memory_utilization: float = GPU_MEMORY_UTILIZATION
    reserved_bytes: int = 3 << 30  # per GPU, for activations and CUDA graphs
    max_tensor_parallel_size: int = 64
    concurrency_search: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # used with per_user_throughput

    def __post_init__(self) -> None:
        require = field_validator(self)
        for c in self.concurrency:
            if not 1 <= c <= 1 << 20:
                raise UserError(f"--concurrency {c}: must be at least 1")
        for k in self.num_speculative_tokens:
            if not 1 <= k <= MAX_SPECULATIVE_TOKENS:
                raise UserError(
                    f"-k {k}: must be between 1 and {MAX_SPECULATIVE_TOKENS}; no speculation is always planned"
                )
        require(bool(self.concurrency), "concurrency", "a list of integers")
        require(bool(self.num_speculative_tokens), "num_speculative_tokens", "a list of integers")
        require(0 <= self.num_prompt_tokens < 1 << 31, "num_prompt_tokens", "0 or more")
        require(1 <= self.num_output_tokens < 1 << 31, "num_output_tokens", "at least 1")
        for name in ("throughput", "per_user_throughput"):
            value = getattr(self, name)
            require(value is None or 0 < value < 1e15, name, "above 0, in tokens/s")
        max_size = self.max_tensor_parallel_size
        require(1 <= self.tensor_parallel_size <= max_size, "tensor_parallel_size", f"from 1 to {max_size}")
        require(self.engine in get_args(PlanEngine), "engine", " or ".join(get_args(PlanEngine)))
        require(0 < self.gpu_memory_utilization <= 1, "gpu_memory_utilization", "above 0 and at most 1")
        check_num_speculative_tokens(self.acceptance_length_k)


@dataclass(frozen=True)
class TuneSettings:
    """The decode steps that `peagle tune` times."""

    max_num_seqs: int = 64
    max_model_len: int = 2048
    context_len: int = 0  # tokens in the KV cache of each request
    repeats: int = 5  # per step kind; the fastest counts
    warmup: int = 1
    batch_sizes: tuple[int, ...] | None = None  # None: those with a CUDA graph, or `cpu_batch_sizes`
    cpu_batch_sizes: tuple[int, ...] = CPU_TIMED_BATCH_SIZES
    concurrency: tuple[int, ...] = ()  # loads to print a vLLM config for; empty: every batch size

    def __post_init__(self) -> None:
        require = field_validator(self)
        require(self.max_num_seqs >= 1, "max_num_seqs", "at least 1")
        require(self.max_model_len >= 2, "max_model_len", "at least 2")
        require(0 <= self.context_len < self.max_model_len, "context_len", f"from 0 to below {self.max_model_len}")
        require(self.repeats >= 1, "repeats", "at least 1")
        for name, flag in (("batch_sizes", "--batch-sizes"), ("concurrency", "--concurrency")):
            for value in getattr(self, name) or ():
                if not 1 <= value <= self.max_num_seqs:
                    raise UserError(f"{flag} {value}: must be from 1 to --max-num-seqs, {self.max_num_seqs}")
