"""How prompts become the target's responses, and these batches."""

from __future__ import annotations

from dataclasses import dataclass

from peagle.config.engine import GPU_MEMORY_FRACTION
from peagle.config.sampling import SamplingParams
from peagle.errors import UserError

LOOP_GRAM = 8  # tokens
LOOP_SHARE = 0.3  # of the 8-grams of an answer without an end that may be repeats, before it counts as a loop
CIRCLE = 96  # last tokens that say the same three times or more: such an answer is not waited for
BEFORE_LOOP = 32  # tokens before a loop that make the answer worth keeping up to there
LEAD_TEMPERATURE = 1.0
MOST_VARIED = 256  # tokens that the target may add to a prompt's beginning


@dataclass(frozen=True)
class ResponseSettings:
    """How the target writes responses to prompts. Of all of them only `samples` and `limit` may change between a
    run and its continuation: more of them are more rows."""

    temperature: float = 0.7
    top_p: float = 0.9
    top_k: int = 0
    max_tokens: int = 1024  # of an answer
    samples: int = 1  # responses to each prompt
    seed: int = 0
    limit: int | None = None  # prompts
    lead: int = 0  # first tokens of every sample but the first that are sampled freely, at most
    loop_tokens: int = 0  # of an answer that goes round in circles: so many from where that begins are kept
    vary: int = 0  # tokens of a prompt, at most, with which the prompts of every sample but the first begin

    def __post_init__(self) -> None:
        self.params(0)
        if self.samples < 1:
            raise UserError(f"--samples {self.samples}: must be at least 1")
        if self.samples > 1 and self.temperature == 0 and not self.lead and not self.vary:
            raise UserError(
                f"--samples {self.samples}: at --temperature 0 they would all be the same; --lead 64 gives each a "
                "beginning of its own, --vary 16 a prompt"
            )
        if not 0 <= self.lead < self.max_tokens:
            raise UserError(f"--lead {self.lead}: must be 0 or more, and less than --max-tokens {self.max_tokens}")
        if self.lead and self.samples == 1:
            raise UserError(f"--lead {self.lead}: the first sample has none, so give --samples 2 or more")
        if self.vary < 0:
            raise UserError(f"--vary {self.vary}: must be 0 or more")
        if self.vary and self.samples == 1:
            raise UserError(
                f"--vary {self.vary}: the first sample has the prompt as it is, so give --samples 2 or more"
            )
        if self.loop_tokens < 0:
            raise UserError(f"--loop-tokens {self.loop_tokens}: must be 0 or more")
        if self.limit is not None and self.limit < 1:
            raise UserError(f"--limit {self.limit}: must be at least 1")
        if self.seed < 0:
            raise UserError(f"--seed {self.seed}: must be 0 or more")

    def params(self, seed: int, before: int = 0) -> SamplingParams:
        """Of an answer of which `before` tokens are there."""
        return SamplingParams(self.max_tokens - before, self.temperature, self.top_k, self.top_p, seed)

    def lead_params(self, sample: int, seed: int) -> SamplingParams | None:
        """Of an answer's first tokens, where they are asked for apart. How many there are follows from the seed."""
        if not self.lead or not sample:
            return None
        return SamplingParams(1 + seed % self.lead, LEAD_TEMPERATURE, self.top_k, self.top_p, seed)

    def vary_params(self, seed: int, end: int) -> SamplingParams:
        """Of a prompt that the target makes up, up to the token that ends a user's turn."""
        free = (LEAD_TEMPERATURE, self.top_k, self.top_p, seed)
        return SamplingParams(MOST_VARIED, *free, stop_token_ids=(end,))


@dataclass(frozen=True)
class WriterSettings:
    """The embedded engine as a writer of responses. None means: what suits the device and the target."""

    device: str | None = None
    dtype: str | None = None
    max_num_seqs: int | None = None
    max_model_len: int | None = None
    gpu_num_seqs: int = 1024  # on a GPU; the engine's own default is for serving, where latency matters
    gpu_memory_fraction: float = GPU_MEMORY_FRACTION
    kv_cache_memory: int | None = None  # bytes, instead of that share


@dataclass(frozen=True)
class EndpointSettings:
    """An OpenAI-compatible server as a writer of responses."""

    url: str
    model: str | None = None  # None: the one that the server has
    concurrency: int = 64  # requests at once
    timeout_s: float = 600.0  # of one request
    retries: int = 5  # of one request
    backoff_s: float = 0.5  # before the first of them, then twice that, and so on
    failures: int = 8  # requests given up one after another, before the server is

    def __post_init__(self) -> None:
        for name, least in (("concurrency", 1), ("timeout_s", 0.001), ("retries", 0)):
            if getattr(self, name) < least:
                raise UserError(f"--{name.removesuffix('_s')} {getattr(self, name)}: must be at least {least}")


@dataclass(frozen=True)
class BatchDefaults:
    """How written responses become batches."""

    open_batches: int = 16  # being filled at once, so that a document finds one it fits into
    checked_rows: int = 64  # the first of a file, whose prompts are compared with the chat template
    checked_every: int = 1000  # and every so many of the rest
