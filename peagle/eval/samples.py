"""Counts: what a drafter did for one answer, and how answers make rows of results.

Knows nothing about models, engines or text. A `Sample` is one answer, or several of which only the sum is known; rows
are sums of samples, and intervals come from drawing samples again and again.

`walk` plays an answer's rounds for any K from what was foretold at every place. Worked example: the prompt has 3
tokens, the answer is the 6 tokens 3..8, and after the first n tokens the drafter foretells `runs[n]` of those that
come next. The first token comes with the prompt, so the first round begins at n = 4:

    n          4  5  6  7  8
    runs       2  0  1  3  0
    K = 1      1     1     0       rounds at 4, 6, 8: accepted 1, 1, 0
    K = 3      2        3          rounds at 4, 7: accepted 2, then 3: two lie behind the end, but they are counted
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from peagle.config import EvalSettings
from peagle.results.schema import AcceptanceRow, LoopingResponses
from peagle.results.statistics import Interval

RESAMPLES_AT_ONCE = 100


@dataclass(frozen=True)
class Round:
    start: int  # tokens of prompt and answer before it, the newest included
    accepted: int  # before the text is cut at its end, as vLLM counts
    gained: int  # tokens of the answer


@dataclass(frozen=True)
class Sample:
    category: str | None
    answers: int
    tokens: int
    rounds: int  # with drafts to verify
    accepted: tuple[int, ...]  # rounds in which draft 1, 2, .. K was
    loops: bool | None = None  # None: of several answers, nobody knows which of the counts are whose
    played: tuple[Round, ...] | None = None  # the rounds themselves, where they are known one by one


def walk(
    prompt_tokens: int, answer_tokens: int, runs: Mapping[int, int] | Sequence[int], k: int, longest: int
) -> list[Round]:
    """The rounds with drafts; the last place of a full context has none."""
    rounds, n, end = [], prompt_tokens + 1, prompt_tokens + answer_tokens
    while n < end:
        drafts = min(k, longest - n - 1)
        accepted = min(runs[n], drafts) if drafts > 0 else 0
        if drafts > 0:
            rounds.append(Round(n, accepted, min(accepted + 1, end - n)))
        n += accepted + 1
    return rounds


def sample_of(category: str | None, tokens: int, loops: bool, rounds: Sequence[Round], k: int) -> Sample:
    accepted = tuple(sum(r.accepted > i for r in rounds) for i in range(k))
    return Sample(category, 1, tokens, len(rounds), accepted, loops, tuple(rounds))


@dataclass(frozen=True)
class Subject:
    """What a row is about, beside its counts."""

    drafter: str
    method: Literal["p-eagle", "eagle3"]
    engine: str
    dataset: str
    temperature: float
    k: int


def rows_of(samples: Sequence[Sample], subject: Subject, settings: EvalSettings) -> list[AcceptanceRow]:
    """The whole; without loops, where answers are told apart; by category, by context, where there are several."""

    def row(
        some: Sequence[Sample],
        category: str | None = None,
        context: tuple[int, int] | None = None,
        loops: LoopingResponses = "included",
    ) -> AcceptanceRow:
        return AcceptanceRow(
            subject.drafter,
            subject.method,
            subject.engine,
            subject.dataset,
            category,
            context,
            subject.temperature,
            subject.k,
            loops,
            num_responses=sum(s.answers for s in some),
            num_output_tokens=sum(s.tokens for s in some),
            num_drafts=sum(s.rounds for s in some),
            num_accepted_tokens_per_pos=[sum(s.accepted[i] for s in some) for i in range(subject.k)],
            acceptance_length_ci95=interval(some, settings),
        )

    rows = [row(samples)]
    if all(s.loops is not None for s in samples):
        rows.append(row([s for s in samples if not s.loops], loops="excluded"))
    categories = sorted({s.category for s in samples if s.category is not None})
    if len(categories) > 1 or (categories and any(s.category is None for s in samples)):
        rows += [row([s for s in samples if s.category == c], category=c) for c in categories]
    if all(s.played is not None for s in samples):
        inside = [(edges, within(samples, edges, subject.k)) for edges in buckets(samples, settings.context_edges)]
        rows += [row(some, context=edges) for edges, some in inside if len(inside) > 1]
    return rows


def buckets(samples: Iterable[Sample], edges: Sequence[int]) -> list[tuple[int, int]]:
    """The ranges in which rounds begin; the last one ends where the last round does begin, or doubles."""
    starts = [r.start for s in samples for r in s.played or ()]
    bounds = [0, *edges]
    while starts and max(starts) >= bounds[-1]:
        bounds.append(max(2 * bounds[-1], 1))
    ranges = zip(bounds, bounds[1:], strict=False)
    return [(low, high) for low, high in ranges if any(low <= start < high for start in starts)]


def within(samples: Iterable[Sample], edges: tuple[int, int], k: int) -> list[Sample]:
    """Of each answer what its rounds in the range did; tokens are those that they gained."""
    parts = []
    for s in samples:
        rounds = [r for r in s.played or () if edges[0] <= r.start < edges[1]]
        if rounds:
            parts.append(sample_of(s.category, sum(r.gained for r in rounds), bool(s.loops), rounds, k))
    return parts


def interval(samples: Sequence[Sample], settings: EvalSettings) -> Interval | None:
    """95% of the acceptance lengths of as many samples, drawn from these with repetition; None of too few."""
    # sorted, so that the order in which they were asked makes no difference
    counts = np.array(sorted((s.rounds, sum(s.accepted)) for s in samples if s.rounds), dtype=np.float64)
    if len(counts) < settings.least_samples:
        return None
    rng = np.random.default_rng(settings.seed)
    lengths: list[NDArray[np.float64]] = []
    for _ in range(0, settings.resamples, RESAMPLES_AT_ONCE):
        drawn = rng.integers(len(counts), size=(RESAMPLES_AT_ONCE, len(counts)))
        rounds, accepted = counts[drawn].sum(1).T
        lengths.append(1 + accepted / rounds)
    low, high = np.percentile(np.concatenate(lengths), (2.5, 97.5))
    return float(low), float(high)


Tell = Callable[[str, int, int], None]  # what is being done, how much of it, of how much
