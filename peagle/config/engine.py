"""Settings of the embedded engine (`LLM`), and the number of speculative tokens per decode step (K)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from peagle.config.options import Settings, checked, device_option, dtype_option, option
from peagle.errors import UserError

DEFAULT_NUM_SPECULATIVE_TOKENS = 7  # P-EAGLE peaks here in the published results
EAGLE3_NUM_SPECULATIVE_TOKENS = 3  # autoregressive drafting peaks here
MAX_SPECULATIVE_TOKENS = 64
GPU_MAX_NUM_SEQS, CPU_MAX_NUM_SEQS = 256, 16  # defaults of max_num_seqs
GPU_MAX_PREFILL_TOKENS, CPU_MAX_PREFILL_TOKENS = 16384, 256  # defaults of max_prefill_tokens
GPU_MEMORY_UTILIZATION = 0.9  # share of the whole GPU, including weights and other processes
AUTO_SPECULATIVE_TOKENS = (0, 1, 2, 3, 5, 7, 9)  # K that "auto" chooses from
AUTO_DEEP_SPECULATIVE_TOKENS = (12, 15)  # further ones for P-EAGLE drafters, if rows are cheap on the device
CPU_TIMED_BATCH_SIZES = (1, 4, 8)  # batch sizes whose decode steps are timed on a CPU

KVCacheDtype = Literal["auto", "fp8"]  # fp8 is vLLM's: e4m3 with a scale of 1

Quantization = Literal["fp8"]  # attention and MLP weights in e4m3, with a scale per output row

K_FLAGS = ("--num-speculative-tokens", "-k")
AUTO_K_HELP = "Draft tokens per decode step (K); auto picks K for the current load."
MAX_MODEL_LEN_HELP = "Maximum number of prompt and output tokens of a request."


def k_option(default: Any, help: str = "Draft tokens per decode step (K).", metavar: str = "K", **display: Any) -> Any:
    display |= {"panel": "Model", "flags": K_FLAGS, "metavar": metavar}
    return option(default, help, min=1, max=MAX_SPECULATIVE_TOKENS, **display)


def default_num_speculative_tokens(parallel: bool) -> int:
    """The default for a P-EAGLE (`parallel`) or EAGLE-3 drafter."""
    return DEFAULT_NUM_SPECULATIVE_TOKENS if parallel else EAGLE3_NUM_SPECULATIVE_TOKENS


def check_num_speculative_tokens(k: int) -> int:
    """Returns `k`, or raises a UserError if it is out of range."""
    if not 1 <= k <= MAX_SPECULATIVE_TOKENS:
        raise UserError(f"-k {k}: the number of speculative tokens must be between 1 and {MAX_SPECULATIVE_TOKENS}")
    return k


def parse_num_speculative_tokens(text: str) -> int | Literal["auto"]:
    """Parses the value of -k: a number of draft tokens, or auto."""
    if text == "auto":
        return "auto"
    try:
        num_speculative_tokens = int(text)
    except ValueError:
        raise UserError(f"-k {text}: must be a number of draft tokens, or auto") from None
    return check_num_speculative_tokens(num_speculative_tokens)


def parse_ks(texts: list[str]) -> tuple[int | Literal["auto"], ...]:
    """Parses several values of -k; commas may separate them, too."""
    return tuple(parse_num_speculative_tokens(k) for text in texts for k in text.split(","))


@dataclass(frozen=True)
class EngineSettings(Settings):
    """Options of `LLM`. None: chosen for the device."""

    num_speculative_tokens: int | Literal["auto"] = option(
        "auto", AUTO_K_HELP, panel="Model", flags=K_FLAGS, parse=parse_num_speculative_tokens, metavar="K"
    )
    device: str | None = device_option()  # None: cuda if available, else cpu
    dtype: str | None = dtype_option()  # None: bfloat16 on a GPU and on a CPU with fast bfloat16, else float32
    quantization: Quantization | None = option(None, "fp8: quantize the target's weights at load; dense models only.")
    max_num_seqs: int | None = option(
        None,
        "Maximum number of running requests.",
        min=1,
        show_default=f"{GPU_MAX_NUM_SEQS} on a GPU, {CPU_MAX_NUM_SEQS} on a CPU",
    )
    max_model_len: int | None = option(None, MAX_MODEL_LEN_HELP, min=2, show_default="the target's limit")
    kv_cache_memory_bytes: int | None = option(None, "Bytes of the KV cache.", min=1, show_default="free memory")
    kv_cache_dtype: KVCacheDtype = option(
        "auto", "auto: the target's dtype; fp8: half the memory per token, slightly different output."
    )
    gpu_memory_utilization: float = option(
        GPU_MEMORY_UTILIZATION, "Share of the GPU's memory for weights and KV cache.", above=0, max=1
    )
    max_prefill_tokens: int | None = checked(None, min=1)  # prefill tokens of a step without decoding requests
    prefill_chunk_tokens: int | None = checked(None, min=1)  # of a step with decoding requests; None: by target
    enable_prefix_caching: bool = True
    cuda_graphs: bool = True
    cost_table: str | Path | None = option(None, "Cost table of `peagle tune` for -k auto.", metavar="FILE")
    synthetic_acceptance_rates: list[float] | None = None  # vLLM's meaning: unconditional, per draft position
    threads: int | None = None  # CPU threads
    tokenizer: bool = True  # False: token ids in, token ids out

    def __post_init__(self) -> None:
        if self.num_speculative_tokens != "auto" and self.num_speculative_tokens != 0:
            check_num_speculative_tokens(self.num_speculative_tokens)
        super().__post_init__()
