"""The requests of a benchmark: prompts, output lengths, and closed or open loops."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from peagle.config import BenchSettings
from peagle.data.prompts import Prompt
from peagle.errors import UserError
from peagle.eval.datasets import EvalDataset

COMMON_TOKEN_IDS = range(100, 1000)  # present in every real vocabulary; for servers whose tokenizer is unknown


@dataclass(frozen=True)
class BenchPrompt:
    """Prompt of one request: exactly one of chat messages, raw text and token ids."""

    messages: tuple[tuple[str, str], ...] = ()  # (role, content)
    text: str | None = None
    token_ids: tuple[int, ...] | None = None

    @property
    def canonical_json(self) -> str:
        return json.dumps([self.messages, self.text, self.token_ids], ensure_ascii=False)

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
            digest.update(f"{prompt.canonical_json}\n".encode(errors="surrogatepass"))
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
        """Seconds at which the requests of an open loop arrive; None for a closed loop."""
        return None if self.request_rate is None else poisson_arrivals(num_requests, self.request_rate, seed)


def list_loads(settings: BenchSettings) -> list[Load]:
    return [*(Load(c) for c in settings.concurrency), *(Load(request_rate=r) for r in settings.request_rates)]


def poisson_arrivals(num_requests: int, request_rate: float, seed: int) -> list[float]:
    """Arrival times of a Poisson process, scaled so that the last one is at num_requests / request_rate.

    The scaling is that of `vllm bench serve`. Without it the mean rate would differ between seeds by about one part in
    the square root of the number of requests.
    """
    rng = random.Random(seed)
    times, now = [], 0.0
    for _ in range(num_requests):
        now += rng.expovariate(request_rate)
        times.append(now)
    scale = num_requests / request_rate / now if now else 1.0
    return [time * scale for time in times]


def dataset_workload(datasets: Sequence[EvalDataset], settings: BenchSettings) -> Workload:
    """The first prompts of the data sets, interleaved. Of a conversation only the first turn is sent."""
    columns = zip_longest(*(dataset.prompts.rows for dataset in datasets))
    rows = [row for column in columns for row in column if row is not None]
    count = settings.total_prompts
    prompts = [_bench_prompt(row, settings.raw) for row in rows[:count]]
    warnings = []
    if len(prompts) < count:
        warnings.append(f"{count} requests of {len(prompts)} prompts: repeated prompts may hit a prefix cache")
    prompts = [prompts[i % len(prompts)] for i in range(count)]
    name = "+".join(dataset.name for dataset in datasets)
    return _build_workload(name, prompts, settings, settings.ignore_eos, warnings)


def random_workload(token_ids: Sequence[int], settings: BenchSettings) -> Workload:
    """Prompts of random tokens. EOS is ignored, so that all output lengths are equal."""
    assert settings.random_input_len is not None and token_ids
    rng = random.Random(settings.seed)
    prompts = [
        BenchPrompt(token_ids=tuple(rng.choices(token_ids, k=settings.random_input_len)))
        for _ in range(settings.total_prompts)
    ]
    warning = "prompts are random tokens: acceptance and speedup differ from those of real text"
    return _build_workload(f"random {settings.random_input_len}", prompts, settings, True, [warning])


def random_token_ids(vocab_size: int, special_token_ids: Iterable[int] = ()) -> list[int]:
    """Token ids for random prompts: the vocabulary without special tokens."""
    token_ids = sorted(set(range(vocab_size)) - set(special_token_ids))
    if not token_ids:
        raise UserError("--random-input-len: all tokens of this vocabulary are special; give --data")
    return token_ids


def _bench_prompt(row: Prompt, raw: bool) -> BenchPrompt:
    if raw:
        return BenchPrompt(text=row.turns[0] if row.system is None else f"{row.system}\n\n{row.turns[0]}")
    system = (("system", row.system),) if row.system is not None else ()
    return BenchPrompt(messages=(*system, ("user", row.turns[0])))


def _build_workload(
    name: str, prompts: Sequence[BenchPrompt], settings: BenchSettings, ignore_eos: bool, warnings: Sequence[str]
) -> Workload:
    return Workload(
        name,
        tuple(prompts),
        settings.max_tokens,
        ignore_eos,
        settings.temperature,
        settings.seed,
        tuple(warnings),
    )
