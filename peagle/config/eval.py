"""Settings of `peagle eval`: measuring acceptance."""

from __future__ import annotations

from dataclasses import dataclass

from peagle.config.sampling import SamplingParams
from peagle.config.speculation import check_num_speculative_tokens
from peagle.errors import UserError


@dataclass(frozen=True)
class EvalSettings:
    """Workload and method. Results are comparable if all fields up to `seed` are equal."""

    num_speculative_tokens: tuple[int, ...] = (1, 3, 5, 7)
    temperatures: tuple[float, ...] = (0.0,)
    max_tokens: int = 512  # output tokens per request
    max_model_len: int = 4096  # prompt and output, if the target supports it; longer prompts are skipped
    limit: int | None = None  # rows of each data set
    raw: bool = False  # prompts without a chat template
    each_k: bool = False  # run the engine for every K, instead of one replay over the target's output
    context_bounds: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384, 32768)  # context lengths, in tokens
    seed: int = 0  # of sampling, and of the bootstrap
    bootstrap_samples: int = 2000  # resamples for a confidence interval
    min_samples: int = 5  # responses below which no interval is given
    min_drafts: int = 500  # drafts below which a row carries a warning
    replay_tokens: int = 8192  # tokens per forward pass of target and drafter
    replay_rows: int = 8192  # mask rows per forward pass of the drafter
    replay_logits: int = 32 << 20  # drafter logits in memory at once
    gpu_memory_utilization: float = 0.6  # of the engine; the replay needs the rest

    def __post_init__(self) -> None:
        for k in self.num_speculative_tokens:
            check_num_speculative_tokens(k)
        for temperature in self.temperatures:
            SamplingParams(temperature=temperature, max_tokens=self.max_tokens, seed=self.seed)
        for name, given in (("-k", self.num_speculative_tokens), ("--temperature", self.temperatures)):
            if not given:
                raise UserError(f"{name}: give at least one value")
        if self.limit is not None and self.limit < 1:
            raise UserError(f"--limit {self.limit}: must be at least 1")
        if self.max_model_len < 2:
            raise UserError(f"--max-model-len {self.max_model_len}: must be at least 2, a prompt and an output token")
        edges = self.context_bounds
        if any(b <= a for a, b in zip((0, *edges), edges, strict=False)):
            raise UserError(
                f"--context-bounds {','.join(map(str, edges))}: must be increasing lengths, separated by commas"
            )


@dataclass(frozen=True)
class EvalServerSettings:
    """A server whose speculative decoding counters are read."""

    url: str
    model: str | None = None  # None: the only model of the server
    concurrency: int = 16  # requests between two reads of the counters; 1 gives counts per request
    timeout_s: float = 600.0  # of one request
    retries: int = 3
    backoff_s: float = 0.5  # before the first retry; doubles with each further one
    max_backoff_s: float = 30.0  # upper bound of the backoff
    settle_s: float = 3.0  # time for the counters to catch up with the responses
    failures: int = 3  # consecutive failed groups before the run stops

    def __post_init__(self) -> None:
        for name, least in (("concurrency", 1), ("timeout_s", 0.001), ("retries", 0)):
            if getattr(self, name) < least:
                raise UserError(f"--{name.removesuffix('_s')} {getattr(self, name)}: must be at least {least}")
