"""The requests of a benchmark: prompts, output lengths, closed or open loops, and the timings of single requests.

Metrics are defined as in `vllm bench serve`: TTFT is from sending to the first chunk, TPOT the remaining time over the
remaining tokens, ITL the time between chunks, E2EL the time to the last chunk.
"""

import hashlib
import json
import random
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import accumulate, pairwise, zip_longest

from peagle.config import BenchSettings
from peagle.data.prompts import Prompt
from peagle.errors import UserError
from peagle.eval.datasets import open_datasets
from peagle.results.schema import BenchRepeat, Percentiles

COMMON_TOKEN_IDS = range(100, 1000)  # present in every real vocabulary; for servers whose tokenizer is unknown
OnProgress = Callable[[int], None]  # number of finished requests


@dataclass(frozen=True)
class BenchPrompt:
    """Prompt of one request: exactly one of chat messages, raw text and token ids."""

    messages: tuple[tuple[str, str], ...] = ()  # (role, content)
    text: str | None = None
    token_ids: tuple[int, ...] | None = None

    def chat_messages(self) -> list[dict[str, str]]:
        return [{"role": role, "content": content} for role, content in self.messages]


@dataclass(frozen=True)
class Workload:
    """The requests of one repeat, in the order in which they are sent."""

    name: str
    prompts: tuple[BenchPrompt, ...]
    max_tokens: int
    ignore_eos: bool
    temperature: float
    seed: int
    warnings: tuple[str, ...] = ()

    @property
    def sha256(self) -> str:
        """Hash of prompts, output lengths and sampling. Rows with different hashes are not comparable."""
        digest = hashlib.sha256()
        for prompt in self.prompts:
            content = json.dumps([prompt.messages, prompt.text, prompt.token_ids], ensure_ascii=False)
            digest.update(f"{content}\n".encode(errors="surrogatepass"))
        digest.update(json.dumps([self.max_tokens, self.ignore_eos, self.temperature]).encode())
        return digest.hexdigest()


@dataclass(frozen=True)
class Load:
    """A closed loop of `concurrency` requests in flight, or an open loop of `request_rate` requests per second."""

    concurrency: int | None = None
    request_rate: float | None = None

    def __post_init__(self) -> None:
        assert (self.concurrency is None) != (self.request_rate is None)

    def __str__(self) -> str:
        return f"c={self.concurrency}" if self.request_rate is None else f"{self.request_rate:g}/s"

    def arrival_times(self, num_requests: int, seed: int) -> list[float] | None:
        """Seconds at which the requests of an open loop arrive, a Poisson process; None for a closed loop.

        They are scaled so that the last one is at num_requests / request_rate, as in `vllm bench serve`. Without it the
        mean rate would differ between seeds by about one part in the square root of the number of requests.
        """
        if self.request_rate is None:
            return None
        rng = random.Random(seed)
        times = list(accumulate(rng.expovariate(self.request_rate) for _ in range(num_requests)))
        scale = num_requests / self.request_rate / times[-1] if times else 1.0
        return [time * scale for time in times]


def build_workload(
    data: Sequence[str],
    settings: BenchSettings,
    random_token_ids: Callable[[], Sequence[int]] = lambda: COMMON_TOKEN_IDS,
) -> Workload:
    """The first prompts of the data sets, interleaved, or prompts of random tokens.

    Of a conversation only the first turn is sent. With random prompts EOS is ignored, so that all output lengths are
    equal.
    """
    count, length = settings.total_prompts, settings.random_input_len
    if length is not None:
        if data:
            raise UserError(f"--random-input-len {length}: replaces --data; give one of them")
        rng, token_ids = random.Random(settings.seed), random_token_ids()
        prompts = [BenchPrompt(token_ids=tuple(rng.choices(token_ids, k=length))) for _ in range(count)]
        name, ignore_eos = f"random {length}", True
        warnings = ["prompts are random tokens: acceptance and speedup differ from those of real text"]
    else:
        if not data:
            raise UserError("--data: give files or data sets with prompts, or --random-input-len N for random prompts")
        datasets = open_datasets(data)
        columns = zip_longest(*(dataset.prompts.rows for dataset in datasets))
        rows = [row for column in columns for row in column if row is not None][:count]
        prompts = [_bench_prompt(rows[i % len(rows)], settings.raw) for i in range(count)]
        name, ignore_eos = "+".join(dataset.name for dataset in datasets), settings.ignore_eos
        warnings = []
        if len(rows) < count:
            warnings.append(f"{count} requests of {len(rows)} prompts: repeated prompts may hit a prefix cache")
    return Workload(
        name, tuple(prompts), settings.max_tokens, ignore_eos, settings.temperature, settings.seed, tuple(warnings)
    )


def _bench_prompt(row: Prompt, raw: bool) -> BenchPrompt:
    if raw:
        return BenchPrompt(text=row.turns[0] if row.system is None else f"{row.system}\n\n{row.turns[0]}")
    system = (("system", row.system),) if row.system is not None else ()
    return BenchPrompt(messages=(*system, ("user", row.turns[0])))


class BenchEngine(AbstractContextManager["BenchEngine"]):
    """An engine or server that is ready for requests."""

    @abstractmethod
    def measure(
        self, workload: Workload, prompts: Sequence[BenchPrompt], load: Load, seed: int, on_progress: OnProgress
    ) -> tuple[BenchRepeat, list[str]]:
        """Sends all prompts once. Returns the numbers and warnings about them."""


@dataclass
class RequestTiming:
    """One request; all times are seconds on the same clock."""

    sent_at: float
    chunk_times: list[float] = field(default_factory=list)
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    failure: str | None = None  # short name, counted in BenchRepeat.failed
    failure_detail: str = ""


def summarize_repeat(
    timings: Sequence[RequestTiming], duration: float, acceptance_length: float | None = None
) -> BenchRepeat:
    """Failed requests are counted by name and are in none of the other numbers."""
    completed = [t for t in timings if t.failure is None]
    ttfts = [t.chunk_times[0] - t.sent_at for t in completed]
    e2els = [t.chunk_times[-1] - t.sent_at for t in completed]
    tpots = [
        (e2el - ttft) / (t.num_output_tokens - 1)
        for t, ttft, e2el in zip(completed, ttfts, e2els, strict=True)
        if t.num_output_tokens > 1
    ]
    gaps = [later - earlier for t in completed for earlier, later in pairwise(t.chunk_times)]
    latencies = {"ttft_ms": ttfts, "tpot_ms": tpots, "itl_ms": gaps, "e2el_ms": e2els}
    return BenchRepeat(
        duration=duration,
        completed=len(completed),
        failed=dict(Counter(t.failure for t in timings if t.failure is not None)),
        total_input_tokens=sum(t.num_input_tokens for t in completed),
        total_output_tokens=sum(t.num_output_tokens for t in completed),
        acceptance_length=acceptance_length,
        **{name: Percentiles.of([s * 1e3 for s in seconds]) for name, seconds in latencies.items()},
    )
