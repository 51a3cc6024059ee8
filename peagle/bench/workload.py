"""What is asked of an engine or a server, and when: prompts with their asked lengths, closed and open loops.

Knows nothing about who answers. A workload's sha stands for its prompts, their order, the asked lengths and how tokens
are chosen: two rows with different ones did different work.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

from peagle.config import BenchSettings
from peagle.data.prompts import Prompt
from peagle.errors import UserError
from peagle.eval.datasets import DataSet

KNOWN_IDS = range(100, 1000)  # any real vocabulary has them, where nobody says what this one has


@dataclass(frozen=True)
class Ask:
    """One request's prompt: messages for a chat template, text as it is, or token ids."""

    messages: tuple[tuple[str, str], ...] = ()  # (role, content)
    text: str | None = None
    ids: tuple[int, ...] | None = None

    @property
    def content(self) -> str:
        return json.dumps([self.messages, self.text, self.ids], ensure_ascii=False)

    def as_messages(self) -> list[dict[str, str]]:
        return [{"role": role, "content": content} for role, content in self.messages]


@dataclass(frozen=True)
class Workload:
    """The requests of one repeat, in the order in which they are sent."""

    name: str
    asks: tuple[Ask, ...]
    max_tokens: int
    ignore_eos: bool
    temperature: float
    seed: int
    waves: int | None = None  # a load asks so many times its concurrency of them
    notes: tuple[str, ...] = ()  # what a reader of the numbers has to know about the prompts

    @property
    def sha(self) -> str:
        digest = hashlib.sha256()
        for ask in self.asks:
            digest.update(f"{ask.content}\n".encode(errors="surrogatepass"))
        shape = [self.max_tokens, self.ignore_eos, self.temperature]
        digest.update(json.dumps(shape if self.waves is None else [*shape, self.waves]).encode())
        return digest.hexdigest()

    def warmup(self, count: int) -> tuple[Ask, ...]:
        """Those that come last: what a server remembers of them helps the measured ones least."""
        return tuple(reversed(self.asks))[:count]


@dataclass(frozen=True)
class Load:
    """`concurrency` requests at once, or `rate` arriving a second."""

    concurrency: int | None = None
    rate: float | None = None

    def __post_init__(self) -> None:
        assert (self.concurrency is None) != (self.rate is None)

    @property
    def kind(self) -> Literal["closed", "open"]:
        return "closed" if self.rate is None else "open"

    @property
    def at_once(self) -> int:
        """Requests that run beside each other when it warms up."""
        if self.concurrency is not None:
            return self.concurrency
        assert self.rate is not None
        return max(1, round(self.rate))

    def __str__(self) -> str:
        return f"c={self.concurrency}" if self.rate is None else f"{self.rate:g}/s"


def loads(settings: BenchSettings) -> list[Load]:
    return [*(Load(c) for c in settings.concurrency), *(Load(rate=r) for r in settings.rates)]


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Seconds at which requests arrive: a Poisson process whose last arrival is at count / rate.

    The gaps are exponential and then stretched alike, as `vllm bench serve` does it: otherwise two seeds would differ
    in their mean rate by one part in the square root of the count.
    """
    rng = random.Random(seed)
    times, now = [], 0.0
    for _ in range(count):
        now += rng.expovariate(rate)
        times.append(now)
    stretch = count / rate / now if now else 1.0
    return [time * stretch for time in times]


def read_workload(sets: Sequence[DataSet], settings: BenchSettings) -> Workload:
    """The first prompts of each set in turn. Of several turns the first is asked: the others need an answer."""
    rows = [row for beside in zip_longest(*(s.prompts.rows for s in sets)) for row in beside if row is not None]
    asks = [_ask(row, settings.raw) for row in rows[: settings.count]]
    notes = [f"{s.name}: {len(s.prompts.rejected)} bad rows were left out" for s in sets if s.prompts.rejected]
    if len(asks) < settings.count:
        notes.append(
            f"{settings.count} requests of {len(asks)} prompts: some are asked again, and a prefix cache knows them"
        )
    asks = [asks[i % len(asks)] for i in range(settings.count)]
    return _workload("+".join(s.name for s in sets), asks, settings, settings.ignore_eos, notes)


def random_workload(ids: Sequence[int], settings: BenchSettings) -> Workload:
    """Prompts of tokens drawn from `ids`. Their answers never end early, so that all lengths are as asked."""
    assert settings.random_input is not None and ids
    rng = random.Random(settings.seed)
    asks = [Ask(ids=tuple(rng.choices(ids, k=settings.random_input))) for _ in range(settings.count)]
    note = "the prompts are random tokens: acceptance and speed-up are not those of real text"
    return _workload(f"random {settings.random_input}", asks, settings, True, [note])


def usable_ids(vocab_size: int, special: Iterable[int] = ()) -> list[int]:
    """What random prompts are made of: a special token in the middle of one could mean anything."""
    found = sorted(set(range(vocab_size)) - set(special))
    if not found:
        raise UserError("--random-input: every token of this vocabulary is special; give --prompts")
    return found


def _ask(row: Prompt, raw: bool) -> Ask:
    if raw:
        return Ask(text=row.turns[0] if row.system is None else f"{row.system}\n\n{row.turns[0]}")
    system = ((("system", row.system),) if row.system is not None else ()) + (("user", row.turns[0]),)
    return Ask(messages=system)


def _workload(
    name: str, asks: Sequence[Ask], settings: BenchSettings, ignore_eos: bool, notes: Sequence[str]
) -> Workload:
    return Workload(
        name,
        tuple(asks),
        settings.max_tokens,
        ignore_eos,
        settings.temperature,
        settings.seed,
        settings.waves,
        tuple(notes),
    )
