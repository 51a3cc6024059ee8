"""The engine against the reference: token for token, count for count, whoever else is in the batch.

What a request must get comes from `engines`. Everything around it is drawn: who arrives and leaves when, how many
blocks there are, how prompts are cut up, how many drafts a round has, and whether steps are planned ahead.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pairs
import pytest
from engines import LONGEST, Asked, check, engine, play, truth
from hypothesis import given
from hypothesis import strategies as st
from support import many

from peagle.config import SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = (1, 2, 5, 15, 16, 17, 18, 31, 33, 34, 48, LONGEST - 2, LONGEST - 1)
STARTS = (0, 2300)
LONG = [
    SamplingParams(max_tokens=30, ignore_eos=True),
    SamplingParams(max_tokens=LONGEST, ignore_eos=True),
    SamplingParams(max_tokens=LONGEST, temperature=0.8, seed=3, ignore_eos=True),
]
PLAIN = [
    SamplingParams(max_tokens=1),
    SamplingParams(max_tokens=9),
    SamplingParams(max_tokens=24, stop_token_ids=[ord("e"), ord(",")]),
    SamplingParams(max_tokens=24, stop_token_ids=[ord("r"), ord("n")], ignore_eos=True),
    SamplingParams(max_tokens=30, stop=["th", "n t"]),
    SamplingParams(max_tokens=25, temperature=1.1, seed=11, top_k=6, top_p=0.9),
    SamplingParams(max_tokens=25, temperature=1.3, seed=2**63 - 1, min_p=0.02),
]
SHAPED = [
    SamplingParams(max_tokens=20, repetition_penalty=1.4, logprobs=3),
    SamplingParams(max_tokens=20, frequency_penalty=0.7, presence_penalty=0.4),
    SamplingParams(max_tokens=20, min_tokens=9, stop_token_ids=[ord("e"), ord("o")], logprobs=0),
    SamplingParams(max_tokens=20, logit_bias={ord(" "): -6.0, ord("q"): 3.0}, ignore_eos=True),
    SamplingParams(max_tokens=16, temperature=0.9, seed=5, presence_penalty=1.0, logprobs=2),
]


def prompt(start: int, length: int) -> tuple[int, ...]:
    return tuple(pairs.TEXT[start : start + length])


@dataclass(frozen=True)
class Scene:
    sizes: dict[str, Any]
    asked: list[Asked]


def scene(choose: random.Random) -> Scene:
    """Half of them crowded: requests that outgrow what they got at first, in a cache too small for all of them."""
    crowded = choose.random() < 0.5
    params = LONG * (6 if crowded else 2) + PLAIN + (SHAPED if choose.random() < 0.3 else [])
    asked = []
    for _ in range(choose.randint(4, 7)):
        length = choose.choice(LENGTHS[:7] if crowded else LENGTHS)
        at = choose.randint(0, 3 if crowded else 15)
        stays = choose.randint(0, 20) if choose.random() < 0.15 else None
        asked.append(Asked(prompt(choose.choice(STARTS), length), choose.choice(params), at, stays))
    sizes = {
        "blocks": choose.choice([5, 6, 7] if crowded else [4, 8, 16]),
        "max_num_seqs": choose.choice([3, 4] if crowded else [1, 2, 4]),
        "prefill_chunk": choose.choice([7, 16, 40]),
        "max_prefill_tokens": choose.choice([5, 16, 33, 200]),
        "prefix_reuse": choose.random() < 0.8,
    }
    return Scene(sizes, asked)


SEEN: Counter[str] = Counter()  # that what shall be tested did happen


def run(name: str | None, k: int | str, lookahead: int, choose: random.Random) -> None:
    drawn = scene(choose)
    fixed = name is not None and isinstance(k, int)
    wanted = {a: truth(a.prompt, a.params, *((name, k) if fixed else ())) for a in drawn.asked}
    asked = [a for a in drawn.asked if wanted[a].clear]
    llm = engine(name, k, **drawn.sizes)
    llm.lookahead = lookahead
    if k == "auto":
        llm.scheduler.drafts_for = lambda batch: choose.choice(llm.draft_count.choices)
    for one, group in zip(asked, play(llm, asked), strict=True):
        (got,) = llm.output(group).outputs
        want = wanted[one]
        if one.stays is not None and got.finish_reason == "abort":
            assert got.token_ids == want.token_ids[: len(got.token_ids)]
            SEEN["aborted"] += 1
        else:
            check(got, want, counts=k != "auto")
        assert len(got.token_ids) <= 1 + got.rounds + sum(got.accepted_per_position)
        SEEN["preempted"] += group.requests[0].preemptions > 0
        SEEN["accepted"] += sum(got.accepted_per_position)
        SEEN["full"] += len(one.prompt) + len(got.token_ids) == LONGEST
    SEEN["found"] += llm.scheduler.pool.hits


PAIRS = [
    (None, 0),
    ("p-eagle-1", 3),
    ("p-eagle-1", "auto"),
    ("p-eagle-4-reduced", 5),
    ("eagle3-1", 1),
    ("eagle3-4-reduced", 3),
    ("eagle3-4-reduced", "auto"),
]


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize(("name", "k"), PAIRS)
def test_every_request_gets_what_it_gets_alone(name: str | None, k: int | str, lookahead: int) -> None:
    SEEN.clear()

    @many(6)
    @given(st.integers(0, 2**32))
    def property_(seed: int) -> None:
        run(name, k, lookahead, random.Random(f"{name} {k} {lookahead} {seed}"))

    property_()
    print(SEEN)
    assert SEEN["preempted"] and SEEN["found"] and SEEN["full"] and (SEEN["accepted"] or name is None)
