"""How the embedded engine runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from peagle.config.speculation import check_draft_tokens
from peagle.config.validation import requirer
from peagle.errors import UserError

GPU_SEQS, CPU_SEQS = 256, 16  # requests that run at once, where nobody says
GPU_PREFILL, CPU_PREFILL = 16384, 512  # tokens that are read in one step when nobody decodes
GPU_MEMORY_FRACTION = 0.9  # of the whole GPU: weights, and what others hold, included
AUTO_CHOICES = (0, 1, 2, 3, 5, 7, 9)  # drafts a round that "auto" chooses from
DEEP_CHOICES = (12, 15)  # and these, where a draft costs a row and no pass, and rows are cheap
CPU_BATCHES = (1, 4, 8)  # at which a round's cost is measured on a CPU


@dataclass(frozen=True)
class EngineSettings:
    """Options of `LLM`. None means: what suits the device."""

    num_speculative_tokens: int | Literal["auto"] = "auto"
    device: str | None = None  # cuda where there is one, else cpu
    dtype: str | None = None  # bfloat16 on a GPU, and on a CPU that has instructions for it and is faster by them
    max_num_seqs: int | None = None  # requests that run at once
    max_model_len: int | None = None  # tokens of prompt and answer together; None: what the target was made for
    kv_cache_memory: int | None = None  # bytes
    gpu_memory_fraction: float = GPU_MEMORY_FRACTION
    max_prefill_tokens: int | None = None  # read in one step when nobody decodes
    prefill_chunk: int | None = None  # read in one step while others decode; None: by the target's size
    prefix_reuse: bool = True
    cuda_graphs: bool = True
    cost_table: str | Path | None = None  # written by `peagle tune`; None measures at start where "auto" needs it
    load_format: Literal["auto", "dummy"] = "auto"  # dummy: random weights, for benchmarks
    synthetic_acceptance_rates: list[float] | None = None  # as vLLM's: unconditional, one for each draft
    synthetic_acceptance_length: float | None = None
    threads: int | None = None  # of the CPU
    tokenizer: bool = True  # False: token ids in, token ids out

    def __post_init__(self) -> None:
        require = requirer(self)
        if self.num_speculative_tokens != "auto" and self.num_speculative_tokens != 0:
            check_draft_tokens(self.num_speculative_tokens)
        for name in ("max_num_seqs", "max_model_len", "kv_cache_memory", "max_prefill_tokens", "prefill_chunk"):
            require(getattr(self, name) is None or getattr(self, name) >= 1, name, "at least 1")
        require(0.0 < self.gpu_memory_fraction <= 1.0, "gpu_memory_fraction", "above 0 and at most 1")
        if self.synthetic_acceptance_rates is not None and self.synthetic_acceptance_length is not None:
            raise UserError("--synthetic-acceptance-rates and --synthetic-acceptance-length: give one of them")
