"""Settings of `peagle data`: generating the target's responses, and packing them into batches."""

from __future__ import annotations

from dataclasses import dataclass

from peagle.config.engine import GPU_MEMORY_UTILIZATION
from peagle.config.sampling import SamplingParams
from peagle.errors import UserError

LOOP_NGRAM_TOKENS = 8
LOOP_REPEATED_SHARE = 0.3  # repeated n-grams above which an unfinished response counts as a loop
LOOP_TAIL_TOKENS = 96  # generation stops if the last tokens repeat the same text three times
MIN_TOKENS_BEFORE_LOOP = 32  # a looping response with fewer tokens before its loop is dropped
LEAD_TEMPERATURE = 1.0
MAX_VARIED_PROMPT_TOKENS = 256  # that the target may add to the start of a prompt


@dataclass(frozen=True)
class ResponseSettings:
    """How the target generates responses. A resumed run may change only `samples` and `limit`: they add rows."""

    temperature: float = 0.7
    top_p: float = 0.9
    top_k: int = 0
    max_tokens: int = 1024  # per response
    samples: int = 1  # responses per prompt
    seed: int = 0
    limit: int | None = None  # prompts
    lead: int = 0  # upper bound of first tokens sampled at temperature 1, in all samples but the first
    loop_tokens: int = 0  # tokens kept from the start of a loop
    vary: int = 0  # upper bound of prompt tokens kept in all samples but the first; the target writes the rest

    def __post_init__(self) -> None:
        self.params(0)
        if self.samples < 1:
            raise UserError(f"--samples {self.samples}: must be at least 1")
        if self.samples > 1 and self.temperature == 0 and not self.lead and not self.vary:
            raise UserError(
                f"--samples {self.samples}: all samples are equal at --temperature 0; vary their first tokens with "
                "--lead 64 or their prompts with --vary 16"
            )
        if not 0 <= self.lead < self.max_tokens:
            raise UserError(f"--lead {self.lead}: must be 0 or more, and less than --max-tokens {self.max_tokens}")
        if self.lead and self.samples == 1:
            raise UserError(f"--lead {self.lead}: needs --samples 2 or more, since the first sample is unchanged")
        if self.vary < 0:
            raise UserError(f"--vary {self.vary}: must be 0 or more")
        if self.vary and self.samples == 1:
            raise UserError(f"--vary {self.vary}: needs --samples 2 or more, since the first sample is unchanged")
        if self.loop_tokens < 0:
            raise UserError(f"--loop-tokens {self.loop_tokens}: must be 0 or more")
        if self.limit is not None and self.limit < 1:
            raise UserError(f"--limit {self.limit}: must be at least 1")
        if self.seed < 0:
            raise UserError(f"--seed {self.seed}: must be 0 or more")

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

    device: str | None = None
    dtype: str | None = None
    max_num_seqs: int | None = None
    max_model_len: int | None = None
    gpu_num_seqs: int = 1024  # on a GPU; larger than the engine's default, since latency does not matter
    gpu_memory_utilization: float = GPU_MEMORY_UTILIZATION
    kv_cache_memory_bytes: int | None = None  # instead of that fraction


@dataclass(frozen=True)
class EndpointSettings:
    """An OpenAI-compatible server that generates responses."""

    url: str
    model: str | None = None  # None: the only model of the server
    concurrency: int = 64  # requests in flight
    timeout_s: float = 600.0  # of one request
    retries: int = 5  # of one request
    backoff_s: float = 0.5  # before the first retry; doubles with each further one
    failures: int = 8  # consecutive failed requests before the run stops

    def __post_init__(self) -> None:
        for name, least in (("concurrency", 1), ("timeout_s", 0.001), ("retries", 0)):
            if getattr(self, name) < least:
                raise UserError(f"--{name.removesuffix('_s')} {getattr(self, name)}: must be at least {least}")


@dataclass(frozen=True)
class PackingSettings:
    """How responses are packed into batches."""

    open_batches: int = 16  # filled at the same time, so that most documents fit one
    checked_rows: int = 64  # first rows of a file whose prompts are checked against the chat template
    checked_every: int = 1000  # and every n-th of the other rows
