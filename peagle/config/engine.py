"""Settings of the embedded engine (`LLM`)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from peagle.config.speculation import check_num_speculative_tokens
from peagle.config.validation import field_validator

GPU_MAX_NUM_SEQS, CPU_MAX_NUM_SEQS = 256, 16  # defaults of max_num_seqs
GPU_MAX_PREFILL_TOKENS, CPU_MAX_PREFILL_TOKENS = 16384, 512  # defaults of max_prefill_tokens
GPU_MEMORY_UTILIZATION = 0.9  # share of the whole GPU, including weights and other processes
AUTO_SPECULATIVE_TOKENS = (0, 1, 2, 3, 5, 7, 9)  # K that "auto" chooses from
AUTO_DEEP_SPECULATIVE_TOKENS = (12, 15)  # further ones for P-EAGLE drafters, if rows are cheap on the device
CPU_TIMED_BATCH_SIZES = (1, 4, 8)  # batch sizes whose decode steps are timed on a CPU


@dataclass(frozen=True)
class EngineSettings:
    """Options of `LLM`. None: chosen for the device."""

    num_speculative_tokens: int | Literal["auto"] = "auto"
    device: str | None = None  # None: cuda if available, else cpu
    dtype: str | None = None  # None: bfloat16 on a GPU and on a CPU with fast bfloat16 instructions, else float32
    max_num_seqs: int | None = None  # running requests
    max_model_len: int | None = None  # prompt and output tokens; None: the target's maximum
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = GPU_MEMORY_UTILIZATION
    max_prefill_tokens: int | None = None  # prefill tokens of a step without decoding requests
    prefill_chunk_tokens: int | None = None  # prefill tokens of a step with decoding requests; None: by target size
    enable_prefix_caching: bool = True
    cuda_graphs: bool = True
    cost_table: str | Path | None = None  # from `peagle tune`; None: "auto" times decode steps at startup
    synthetic_acceptance_rates: list[float] | None = None  # vLLM's meaning: unconditional, per draft position
    threads: int | None = None  # CPU threads
    tokenizer: bool = True  # False: token ids in, token ids out

    def __post_init__(self) -> None:
        require = field_validator(self)
        if self.num_speculative_tokens != "auto" and self.num_speculative_tokens != 0:
            check_num_speculative_tokens(self.num_speculative_tokens)
        positive = (
            *("max_num_seqs", "max_model_len", "kv_cache_memory_bytes"),
            *("max_prefill_tokens", "prefill_chunk_tokens"),
        )
        for name in positive:
            require(getattr(self, name) is None or getattr(self, name) >= 1, name, "at least 1")
        require(0.0 < self.gpu_memory_utilization <= 1.0, "gpu_memory_utilization", "above 0 and at most 1")
