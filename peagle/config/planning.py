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
    """The load to plan for, and the numbers of speculative tokens to compare."""

    concurrency: tuple[int, ...] = (1, 8, 64)  # requests per replica of the model
    drafts: tuple[int, ...] = (1, 2, 3, 4, 5, 7, 9)  # compared as far as acceptance is known
    prompt_tokens: int = 512
    output_tokens: int = 256
    load: float | None = None  # output tokens per second, all requests together
    per_user: float | None = None  # least output tokens per second of each request
    tensor_parallel: int = 1
    engine: PlanEngine = "auto"  # the embedded engine if it supports the target, else vLLM
    measured_k: int = DEFAULT_NUM_SPECULATIVE_TOKENS  # the K of an acceptance length given without one
    memory_fraction: float = GPU_MEMORY_UTILIZATION
    reserved: int = 3 << 30  # bytes of it for activations and CUDA graphs
    most_gpus: int = 64  # per replica
    searched: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # `concurrency` if `per_user` is given

    def __post_init__(self) -> None:
        require = field_validator(self)
        for c in self.concurrency:
            if not 1 <= c <= 1 << 20:
                raise UserError(f"--concurrency {c}: must be at least 1")
        for k in self.drafts:
            if not 1 <= k <= MAX_SPECULATIVE_TOKENS:
                raise UserError(f"--drafts {k}: must be between 1 and {MAX_SPECULATIVE_TOKENS}; 0 is always compared")
        require(bool(self.concurrency), "concurrency", "given")
        require(bool(self.drafts), "drafts", "given")
        require(0 <= self.prompt_tokens < 1 << 31, "prompt_tokens", "0 (prefill is left out) or more")
        require(1 <= self.output_tokens < 1 << 31, "output_tokens", "at least 1")
        for name in ("load", "per_user"):
            value = getattr(self, name)
            require(value is None or 0 < value < 1e15, name, "above 0, in tokens per second")
        require(1 <= self.tensor_parallel <= self.most_gpus, "tensor_parallel", f"from 1 to {self.most_gpus}")
        require(self.engine in get_args(PlanEngine), "engine", " or ".join(get_args(PlanEngine)))
        require(0 < self.memory_fraction <= 1, "memory_fraction", "above 0 and at most 1")
        check_num_speculative_tokens(self.measured_k)


@dataclass(frozen=True)
class TuneSettings:
    """The decode steps to time."""

    max_num_seqs: int = 64
    max_model_len: int = 2048
    context: int = 0  # tokens in the KV cache of each request
    repeats: int = 5  # of each decode step; the fastest counts
    warmup: int = 1
    batches: tuple[int, ...] | None = None  # None: the captured sizes on a GPU, `cpu_batches` on a CPU
    cpu_batches: tuple[int, ...] = CPU_TIMED_BATCH_SIZES
    concurrency: tuple[int, ...] = ()  # loads to recommend a K for in vLLM; empty: every batch size

    def __post_init__(self) -> None:
        require = field_validator(self)
        require(self.max_num_seqs >= 1, "max_num_seqs", "at least 1")
        require(self.max_model_len >= 2, "max_model_len", "at least 2")
        require(0 <= self.context < self.max_model_len, "context", f"from 0 to below {self.max_model_len}")
        require(self.repeats >= 1, "repeats", "at least 1")
        for name in ("batches", "concurrency"):
            for value in getattr(self, name) or ():
                if not 1 <= value <= self.max_num_seqs:
                    raise UserError(f"--{name} {value}: must be from 1 to --max-num-seqs, {self.max_num_seqs}")
