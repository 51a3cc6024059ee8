"""Settings of `peagle data`: generating the target's responses, and packing them into batches."""

from dataclasses import dataclass

from peagle.config.engine import GPU_MEMORY_UTILIZATION, MAX_MODEL_LEN_HELP
from peagle.config.options import Settings, device_option, dtype_option, option
from peagle.config.sampling import SamplingParams
from peagle.errors import UserError

LOOP_NGRAM_TOKENS = 8
LOOP_REPEATED_SHARE = 0.3  # repeated n-grams above which an unfinished response counts as a loop
LOOP_TAIL_TOKENS = 96  # generation stops if the last tokens repeat the same text three times
MIN_TOKENS_BEFORE_LOOP = 32  # a looping response with fewer tokens before its loop is dropped
LEAD_TEMPERATURE = 1.0
GPU_RESPONSES = 1024  # generated at once on a GPU; more than the engine's default, since latency does not matter
OPEN_BATCHES = 16  # filled at the same time by packing, so that most documents fit one
# Rows of a response file whose prompts are checked against the chat template: the first, and every n-th of the others
CHECKED_ROWS, CHECKED_EVERY = 64, 1000
MAX_VARIED_PROMPT_TOKENS = 256  # that the target may add to the start of a prompt


@dataclass(frozen=True)
class ResponseSettings(Settings):
    """How the target generates responses. A resumed run may change only `samples` and `limit`: they add rows."""

    temperature: float = option(0.7, "Sampling temperature; 0 is greedy.", min=0, max=100, panel="Sampling")
    top_p: float = option(0.9, "Nucleus sampling; 1 disables it.", above=0, max=1)
    top_k: int = option(0, "Top-k sampling; 0 disables it.", min=0)
    max_tokens: int = option(1024, "Maximum tokens per response.", min=1)
    samples: int = option(1, "Responses per prompt.", min=1)
    seed: int = option(0, "Seed of the responses.", min=0)
    limit: int | None = option(None, "Use only the first N prompts.", min=1, panel="Data", show_default="all")
    lead: int = option(
        0, "Begin every sample but the first with up to this many freely sampled tokens.", min=0, panel="Sampling"
    )
    loop_tokens: int = option(0, "Tokens kept behind the start of a loop; the rest is cut.", min=0)
    vary: int = option(
        0,
        "Keep up to this many prompt tokens in every sample but the first; the target writes the rest of the prompt.",
        min=0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.samples > 1 and self.temperature == 0 and not self.lead and not self.vary:
            raise UserError(
                f"--samples {self.samples}: all samples are equal at --temperature 0; vary their first tokens with "
                "--lead 64 or their prompts with --vary 16"
            )
        if self.lead >= self.max_tokens:
            raise UserError(f"--lead {self.lead}: must be less than --max-tokens {self.max_tokens}")
        for flag, value in (("--lead", self.lead), ("--vary", self.vary)):
            if value and self.samples == 1:
                raise UserError(f"{flag} {value}: needs --samples 2 or more, since the first sample is unchanged")

    def params(self, seed: int, before: int = 0) -> SamplingParams:
        """Sampling parameters of a response that already has `before` tokens."""
        return SamplingParams(self.max_tokens - before, self.temperature, self.top_k, self.top_p, seed)

    def lead_params(self, sample: int, seed: int) -> SamplingParams | None:
        """Sampling parameters of a response's first tokens, or None; their number follows from the seed."""
        if not self.lead or not sample:
            return None
        return SamplingParams(1 + seed % self.lead, LEAD_TEMPERATURE, self.top_k, self.top_p, seed)

    def vary_params(self, seed: int, end: int) -> SamplingParams:
        """Sampling parameters of a prompt written by the target, ending at the token that ends a user turn."""
        free = (LEAD_TEMPERATURE, self.top_k, self.top_p, seed)
        return SamplingParams(MAX_VARIED_PROMPT_TOKENS, *free, stop_token_ids=(end,))


@dataclass(frozen=True)
class ResponseEngineSettings:
    """The embedded engine that generates responses. None: chosen for the device and the target."""

    device: str | None = device_option()
    dtype: str | None = dtype_option()
    max_num_seqs: int | None = option(None, "Maximum concurrent responses.", show_default="by device")
    max_model_len: int | None = option(None, MAX_MODEL_LEN_HELP, show_default="the target's limit")
    gpu_memory_utilization: float = option(GPU_MEMORY_UTILIZATION, "Fraction of GPU memory to use.")
    kv_cache_memory_bytes: int | None = option(None, "Size of the KV cache, instead of that fraction.")


@dataclass(frozen=True)
class EndpointSettings(Settings):
    """An OpenAI-compatible server that generates responses."""

    url: str = ""
    model: str | None = option(
        None, "Model name on the server.", panel="Server", show_default="its only model", metavar="NAME"
    )
    concurrency: int = option(64, "Concurrent requests to a server.", min=1)
    timeout_s: float = option(600.0, "Seconds before a request is retried.", min=0.001)
    retries: int = option(5, "Retries per request.", min=0)
    backoff_s: float = 0.5  # before the first retry; doubles with each further one
    failures: int = 8  # consecutive failed requests before the run stops
