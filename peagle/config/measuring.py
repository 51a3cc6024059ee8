"""What is measured: load and acceptance, by which engine or server; what is planned, tuned and reported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from peagle.config.engine import CPU_BATCHES, GPU_MEMORY_FRACTION
from peagle.config.sampling import SamplingParams
from peagle.config.speculation import DEFAULT_DRAFT_TOKENS, MAX_DRAFT_TOKENS, check_draft_tokens
from peagle.config.validation import requirer
from peagle.errors import UserError

Helped = Literal["none", "eagle3", "p-eagle"]


@dataclass(frozen=True)
class BenchSettings:
    """The load that is measured. Rows are comparable only where all of it but loads and `repeats` is the same."""

    concurrency: tuple[int, ...] = ()  # closed loop: so many requests at once, the next as soon as one is answered
    rates: tuple[float, ...] = ()  # open loop: so many requests a second arrive, whoever waits
    requests: int | None = None  # of a repeat; None: enough for the heaviest of the loads
    waves: int | None = None  # a closed load asks so many times its concurrency of them; None: all
    repeats: int = 3
    warmup: int | None = None  # requests before each load; None: as many as run at once
    max_tokens: int = 128
    ignore_eos: bool = False
    temperature: float = 0.0
    random_input: int | None = None  # tokens of made-up prompts
    raw: bool = False  # prompts as they are, without a chat template
    seed: int = 0
    usual_concurrency: tuple[int, ...] = (1, 8)  # where no load is asked for
    least_requests: int = 32
    least_arriving_s: float = 10.0  # of an open loop, where `requests` is ours to choose

    def __post_init__(self) -> None:
        if not self.concurrency and not self.rates:
            object.__setattr__(self, "concurrency", self.usual_concurrency)
        require = requirer(self)
        for c in self.concurrency:
            if c < 1:
                raise UserError(f"--concurrency {c}: must be at least 1")
        for rate in self.rates:
            if not 0 < rate < 1e6:
                raise UserError(f"--rate {rate:g}: must be above 0, in requests a second")
        for name in ("requests", "waves", "repeats", "random_input", "max_tokens"):
            require(getattr(self, name) is None or getattr(self, name) >= 1, name, "at least 1")
        require(self.warmup is None or self.warmup >= 0, "warmup", "0 or more")
        require(0.0 <= self.temperature <= 100.0, "temperature", "between 0 (greedy) and 100")
        require(0 <= self.seed < 2**31, "seed", "between 0 and 2^31 - 1")

    @property
    def count(self) -> int:
        """Requests of a repeat: the same for every load, so that all rows answer the same prompts."""
        if self.requests is not None:
            return self.requests
        arriving = [int(rate * self.least_arriving_s) for rate in self.rates]
        return max([self.least_requests, *((self.waves or 2) * c for c in self.concurrency), *arriving])

    def count_of(self, concurrency: int | None) -> int:
        """Requests of a repeat of one load, the first of all: a single one at a time would take far longer than 64."""
        if self.waves is None or concurrency is None:
            return self.count
        return min(self.count, max(self.least_requests, self.waves * concurrency))


@dataclass(frozen=True)
class BenchDoubts:
    """When a measurement is not to be trusted as it is."""

    least_seconds: float = 3.0  # of a repeat
    least_waves: int = 2  # requests for each that runs at once
    spread: float = 0.10  # between the fastest and the slowest repeat, of their mean
    lengths: float = 0.25  # by which mean answers may differ before two rows are not the same work
    elsewhere: float = 0.02  # of a server's tokens that went to others
    cached: float = 0.10  # of prompt tokens that came out of a server's prefix cache
    served: float = 0.80  # of an open loop's requests a second, below which the queue may have grown


@dataclass(frozen=True)
class ServerSettings:
    """An OpenAI-compatible server that is measured."""

    url: str
    model: str | None = None  # None: the one that the server has
    connect_s: float = 10.0
    stall_s: float = 60.0  # without a byte
    total_s: float = 600.0  # of one request
    failures: int = 8  # one after another, or twice as many as run at once, before the rest is not sent

    def __post_init__(self) -> None:
        for name, flag in (("connect_s", "connect-timeout"), ("stall_s", "stall-timeout"), ("total_s", "timeout")):
            if not getattr(self, name) > 0:
                raise UserError(f"--{flag} {getattr(self, name):g}: must be above 0 seconds")


@dataclass(frozen=True)
class EmbeddedSettings:
    """The embedded engine that is measured. None means: what suits the device, the target and the load."""

    device: str | None = None
    dtype: str | None = None
    max_num_seqs: int | None = None
    max_model_len: int | None = None
    gpu_memory_fraction: float = GPU_MEMORY_FRACTION
    kv_cache_memory: int | None = None  # bytes; where it is given, the share above plays no part
    cost_table: str | None = None
    prefix_reuse: bool = False  # every repeat asks the same prompts: reuse would spare all but the first their reading


@dataclass(frozen=True)
class EvalSettings:
    """What acceptance is measured on. Numbers compare only where all of it up to `seed` is the same."""

    draft_tokens: tuple[int, ...] = (1, 3, 5, 7)
    temperatures: tuple[float, ...] = (0.0,)
    max_tokens: int = 512  # of an answer
    max_model_len: int = 4096  # prompt and answer together, where the target can; longer prompts are not asked
    limit: int | None = None  # rows of each data set
    raw: bool = False  # prompts as they are, without a chat template
    each_k: bool = False  # real rounds for every K, instead of one pass over what the target said
    context_edges: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384, 32768)  # where a round begins
    seed: int = 0  # of sampling and of the resampling behind intervals
    resamples: int = 2000  # behind an interval
    least_samples: int = 5  # answers below which there is none
    few_rounds: int = 500  # below which a row is worth a warning
    replay_tokens: int = 8192  # that target and drafter read at once
    replay_rows: int = 8192  # chain rows that the drafter reads at once
    replay_logits: int = 32 << 20  # of the drafter that live at once
    gpu_memory_fraction: float = 0.6  # the pass over what was said needs the rest
    kv_cache_memory: int | None = None  # bytes, instead of that share

    def __post_init__(self) -> None:
        for k in self.draft_tokens:
            check_draft_tokens(k)
        for temperature in self.temperatures:
            SamplingParams(temperature=temperature, max_tokens=self.max_tokens, seed=self.seed)
        for name, given in (("-k", self.draft_tokens), ("--temperature", self.temperatures)):
            if not given:
                raise UserError(f"{name}: give one at least")
        if self.limit is not None and self.limit < 1:
            raise UserError(f"--limit {self.limit}: must be at least 1")
        if self.max_model_len < 2:
            raise UserError(f"--max-model-len {self.max_model_len}: must leave room for a prompt token and an answer")
        edges = self.context_edges
        if any(b <= a for a, b in zip((0, *edges), edges, strict=False)):
            raise UserError(f"--context {','.join(map(str, edges))}: must be rising, by commas")


@dataclass(frozen=True)
class EvalServerSettings:
    """A server whose counters tell what was accepted."""

    url: str
    model: str | None = None  # None: the one that the server has
    concurrency: int = 16  # requests at once; counters are read between so many. 1 tells every answer apart
    timeout_s: float = 600.0  # of one request
    retries: int = 3
    backoff_s: float = 0.5  # before the first of them, then twice that, and so on
    longest_wait_s: float = 30.0  # between two tries
    settle_s: float = 3.0  # that counters may lag behind answers
    failures: int = 3  # groups given up one after another, before the server is

    def __post_init__(self) -> None:
        for name, least in (("concurrency", 1), ("timeout_s", 0.001), ("retries", 0)):
            if getattr(self, name) < least:
                raise UserError(f"--{name.removesuffix('_s')} {getattr(self, name)}: must be at least {least}")


PlanEngine = Literal["auto", "embedded", "vllm"]


@dataclass(frozen=True)
class PlanSettings:
    """The load that is planned for, and what is tried for it."""

    concurrency: tuple[int, ...] = (1, 8, 64)  # requests at once on one copy of the model
    drafts: tuple[int, ...] = (1, 2, 3, 4, 5, 7, 9)  # that are tried, as far as acceptance is known
    prompt_tokens: int = 512
    output_tokens: int = 256
    load: float | None = None  # output tokens a second, of all together
    per_user: float | None = None  # output tokens a second that each request gets at least
    tensor_parallel: int = 1
    engine: PlanEngine = "auto"  # the embedded one where it can run the target, else vLLM
    measured_k: int = DEFAULT_DRAFT_TOKENS  # the K of an acceptance length that is given alone
    memory_fraction: float = GPU_MEMORY_FRACTION
    reserved: int = 3 << 30  # bytes of it for activations and graphs
    most_gpus: int = 64  # that hold one copy of a model
    searched: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # `concurrency` where `per_user` decides it

    def __post_init__(self) -> None:
        require = requirer(self)
        for c in self.concurrency:
            if not 1 <= c <= 1 << 20:
                raise UserError(f"--concurrency {c}: must be at least 1")
        for k in self.drafts:
            if not 1 <= k <= MAX_DRAFT_TOKENS:
                raise UserError(f"--drafts {k}: must be between 1 and {MAX_DRAFT_TOKENS}; none is always compared")
        require(bool(self.concurrency), "concurrency", "given")
        require(bool(self.drafts), "drafts", "given")
        require(0 <= self.prompt_tokens < 1 << 31, "prompt_tokens", "0 (their reading is left out) or more")
        require(1 <= self.output_tokens < 1 << 31, "output_tokens", "at least 1")
        for name in ("load", "per_user"):
            value = getattr(self, name)
            require(value is None or 0 < value < 1e15, name, "above 0, in tokens a second")
        require(1 <= self.tensor_parallel <= self.most_gpus, "tensor_parallel", f"from 1 to {self.most_gpus}")
        require(self.engine in get_args(PlanEngine), "engine", " or ".join(get_args(PlanEngine)))
        require(0 < self.memory_fraction <= 1, "memory_fraction", "above 0 and at most 1")
        check_draft_tokens(self.measured_k)


@dataclass(frozen=True)
class TuneSettings:
    """The rounds that are timed."""

    max_num_seqs: int = 64
    max_model_len: int = 2048
    context: int = 0  # tokens behind each request
    repeats: int = 5  # of each round; the fastest counts
    warmup: int = 1
    batches: tuple[int, ...] | None = None  # None: those recorded on a GPU, `cpu_batches` on a CPU
    cpu_batches: tuple[int, ...] = CPU_BATCHES
    concurrency: tuple[int, ...] = ()  # loads that vLLM's K is named for; none: every batch

    def __post_init__(self) -> None:
        require = requirer(self)
        require(self.max_num_seqs >= 1, "max_num_seqs", "at least 1")
        require(self.max_model_len >= 2, "max_model_len", "at least 2")
        require(0 <= self.context < self.max_model_len, "context", f"from 0 to below {self.max_model_len}")
        require(self.repeats >= 1, "repeats", "at least 1")
        for name in ("batches", "concurrency"):
            for value in getattr(self, name) or ():
                if not 1 <= value <= self.max_num_seqs:
                    raise UserError(f"--{name} {value}: must be from 1 to --max-num-seqs, {self.max_num_seqs}")


@dataclass(frozen=True)
class ReportSettings:
    """What a report is called, and when it doubts what it shows."""

    title: str = "What speculative decoding brings"
    few_answers: int = 20  # of a data set, below which its acceptance is drawn hollow
    loops_matter: float = 0.03  # by which looping answers may lift the acceptance length before it is said
