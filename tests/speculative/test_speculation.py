"""How many drafts: the choice against trying all of them, and what it learns from rounds."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import many

from peagle.errors import UserError
from peagle.speculative.adaptive_k import EXPLORE_EVERY, MEMORY, AcceptanceEstimate, AdaptiveK, StepCostTable

CHOICES = (0, 1, 3, 5)


def linear_costs(base: float, each: float, batches: tuple[int, ...] = (1, 8, 64)) -> StepCostTable:
    """A round costs `base`, and `each` for every row of every request."""
    return StepCostTable({(b, k): base + each * b * (k + 1) for b in batches for k in CHOICES})


def taught(count: AdaptiveK, rate: float, rounds: int, seed: int = 0) -> AdaptiveK:
    """Rounds whose drafts hold with this chance, each if the one before does."""
    choose = random.Random(seed)
    for _ in range(rounds):
        accepted = 0
        while accepted < CHOICES[-1] and choose.random() < rate:
            accepted += 1
        count.observe(CHOICES[-1], accepted)
    return count


@many(200)
@given(
    st.dictionaries(
        st.tuples(st.sampled_from([1, 4, 16]), st.sampled_from(CHOICES)), st.floats(1e-4, 1.0), min_size=12
    ),
    st.floats(0, 1),
    st.integers(1, 40),
)
def test_the_most_tokens_a_second_win(seconds: dict[tuple[int, int], float], rate: float, batch: int) -> None:
    table = StepCostTable(seconds)
    count = taught(AdaptiveK(CHOICES, table), rate, 200)
    rates = count.acceptance.rates

    def speed(k: int) -> float:
        cost = table.cost(batch, k)
        assert cost is not None
        return (1 + sum(rates[:k])) / cost

    assert speed(count(batch)) == max(speed(k) for k in CHOICES)


def test_no_drafts_where_they_are_never_accepted_and_cost() -> None:
    count = taught(AdaptiveK(CHOICES, linear_costs(1e-3, 1e-4)), 0.0, 500)
    assert [count(b) for b in (1, 8, 64, 200)] == [0, 0, 0, 0]


def test_all_drafts_where_they_are_free_and_hold() -> None:
    count = taught(AdaptiveK(CHOICES, linear_costs(1e-3, 0.0)), 0.9, 500)
    assert [count(b) for b in (1, 8, 64)] == [5, 5, 5]


def test_fewer_drafts_the_larger_the_batch() -> None:
    count = taught(AdaptiveK(CHOICES, linear_costs(1e-3, 5e-5)), 0.6, 2000)
    ks = [count(b) for b in (1, 2, 4, 8, 16, 32, 64)]
    assert ks == sorted(ks, reverse=True) and ks[0] == 5 and ks[-1] < 3


def test_it_looks_again_and_changes_its_mind() -> None:
    """Having given up on drafts it still drafts deep now and then, and returns once they hold."""
    count = taught(AdaptiveK(CHOICES, linear_costs(1e-3, 1e-4)), 0.0, 3000)
    chosen = [count(8) for _ in range(4 * EXPLORE_EVERY)]
    assert 1 <= chosen.count(5) <= 4 and set(chosen) == {0, 5}  # the dearer a look, the rarer
    for _ in range(EXPLORE_EVERY * 100):
        k = count(8)
        if k:
            count.observe(k, k)
            for _ in range(31):  # the other requests of the batch
                count.observe(k, k)
    assert count(8) == 5


def test_one_choice_is_no_choice() -> None:
    assert AdaptiveK([3])(8) == 3
    assert AdaptiveK([0])(8) == 0
    assert AdaptiveK(CHOICES)(8) == 5  # no table yet: as many as may be
    assert AdaptiveK(CHOICES, linear_costs(1, 1))(0) == 5  # nobody decodes


def test_rates_follow_the_rounds() -> None:
    acceptance = AcceptanceEstimate(3)
    assert acceptance.rates == sorted(acceptance.rates, reverse=True) and 0 < acceptance.rates[2] < 1
    for i in range(4000):
        acceptance.observe(3, (0, 1, 3, 3)[i % 4])
    assert acceptance.rates == pytest.approx([0.75, 0.5, 0.5], abs=0.01)
    for _ in range(4000):
        acceptance.observe(2, 2)
    assert acceptance.rates[:2] == pytest.approx([1, 1], abs=0.2) and acceptance.rates[2] == pytest.approx(
        0.5, abs=0.01
    )
    assert max(acceptance.tried) <= MEMORY + 1, "the past is forgotten"


def test_between_and_beyond_what_was_measured() -> None:
    table = StepCostTable({(2, 1): 1.0, (6, 1): 3.0, (8, 1): 3.0})
    costs = {b: table.cost(b, 1) for b in (1, 2, 3, 4, 6, 7, 8, 16)}
    assert costs == {1: 1.0, 2: 1.0, 3: 1.5, 4: 2.0, 6: 3.0, 7: 3.0, 8: 3.0, 16: 6.0}
    assert table.cost(2, 5) is None
    assert AdaptiveK([0, 1, 5], StepCostTable({(1, 1): 1.0}))(1) == 1, "what was not measured is not chosen"


def test_deep_rounds_only_as_far_as_they_were_measured() -> None:
    """Drafts that are free and always hold: as many as there are costs for, but past all of them as many as may be."""
    table = StepCostTable({(b, k): 1e-3 for b in (1, 8, 64) for k in CHOICES if k < 5 or b <= 8})
    count = taught(AdaptiveK(CHOICES, table), 0.99, 500)
    assert [count(b) for b in (1, 8, 9, 64)] == [5, 5, 3, 3] and count.best(65) == 3
    assert {count(64) for _ in range(3 * EXPLORE_EVERY)} == {3}, "nor to look whether they would hold"
    assert AdaptiveK(CHOICES, StepCostTable({(b, k): 1e-3 for b in (1, 4) for k in CHOICES})).best(100) == 5


def test_a_table_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    table = linear_costs(1e-3, 1e-4)
    table.save(tmp_path / "costs.json", device="this one")
    loaded = StepCostTable.load(tmp_path / "costs.json")
    assert loaded.seconds == pytest.approx(table.seconds) and loaded.batches == [1, 8, 64]


@pytest.mark.parametrize("content", [None, "", "{}", "[]", '{"rounds": [{"batch": 1}]}', '{"rounds": [["x"]]}'])
def test_what_is_no_table_is_refused(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "costs.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match="--cost-table .*costs.json: ") as error:
        StepCostTable.load(path)
    assert "\n" not in str(error.value)


def played(
    count: AdaptiveK, batch: int, true: StepCostTable, rate: float, rounds: int, noise: float = 0.0, seed: int = 0
) -> list[int]:
    """Rounds that take what `true` says: the numbers of drafts that were chosen."""
    rng, chosen = random.Random(seed), []
    for _ in range(rounds):
        k = count(batch)
        chosen.append(k)
        cost = true.cost(batch, k)
        assert cost is not None
        count.timed(batch, k, cost * (1 + noise * rng.random()) * (50 if rng.random() < 0.01 else 1))
        for _ in range(batch):
            accepted = 0
            while accepted < k and rng.random() < rate:
                accepted += 1
            count.observe(k, accepted)
    return chosen


@many(25)
@given(
    st.lists(st.floats(0.7, 1.4), min_size=4, max_size=4),
    st.sampled_from([0.3, 0.6, 0.9]),
    st.sampled_from([1, 8]),
    st.floats(0.5, 20.0),
)
def test_rounds_say_what_the_table_did_not_know(wrong: list[float], rate: float, batch: int, slower: float) -> None:
    """The table is off by another factor for each number of drafts, and all of it by one. What is chosen in the end is
    as good as the best there is, or nearly."""
    table = linear_costs(1e-3, 2e-5)
    factor = dict(zip(CHOICES, wrong, strict=True))
    true = StepCostTable({(b, k): seconds * factor[k] * slower for (b, k), seconds in table.seconds.items()})
    count = AdaptiveK(CHOICES, table)
    chosen = played(count, batch, true, rate, 12000, noise=0.05)

    def speed(k: int) -> float:
        cost = true.cost(batch, k)
        assert cost is not None
        return sum(rate**i for i in range(k + 1)) / cost

    best = max(map(speed, CHOICES))
    usual = max(set(chosen[-1000:]), key=chosen[-1000:].count)
    assert speed(usual) >= 0.92 * best
    assert sum(map(speed, chosen[-4000:])) / 4000 >= 0.9 * best, "nor does looking around cost much"


def test_rounds_of_another_size_are_not_judged_by_these() -> None:
    table = linear_costs(1e-3, 0.0)
    count = taught(AdaptiveK(CHOICES, table), 0.8, 500)
    for _ in range(200):
        count.timed(8, 5, 4e-3)
        for k in (0, 1, 3):
            count.timed(8, k, 1e-3)
    assert count.best(8) == 3 and count.best(5) == 3 and count.best(1) == 5 and count.best(64) == 5
    count.timed(8, 2, 1e-3)  # nobody's choice
    assert (8, 2) not in count.clock.seen


def test_a_round_that_was_held_up_counts_little() -> None:
    count = AdaptiveK(CHOICES, linear_costs(1e-3, 0.0))
    for _ in range(100):
        count.timed(1, 3, 1e-3)
    count.timed(1, 3, 60.0)
    assert count.clock.ratio(1, 3) < 1.05
