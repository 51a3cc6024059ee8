"""AdaptiveK against an exhaustive search over k, and how it learns from the steps it observes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import many

from peagle.errors import UserError
from peagle.speculative.adaptive_k import ESTIMATE_WINDOW, EXPLORE_EVERY, AcceptanceEstimate, AdaptiveK, StepCostTable

CHOICES = (0, 1, 3, 5)


def linear_costs(base: float, each: float, batch_sizes: tuple[int, ...] = (1, 8, 64)) -> StepCostTable:
    """A step costs `base` plus `each` for every target row."""
    return StepCostTable({(b, k): base + each * b * (k + 1) for b in batch_sizes for k in CHOICES})


def observe_steps(adaptive: AdaptiveK, rate: float, num_steps: int, seed: int = 0) -> AdaptiveK:
    """Observes steps in which each draft token is accepted with probability `rate`, given the one before."""
    rng = random.Random(seed)
    for _ in range(num_steps):
        accepted = 0
        while accepted < CHOICES[-1] and rng.random() < rate:
            accepted += 1
        adaptive.acceptance.observe(CHOICES[-1], accepted)
    return adaptive


@many(200)
@given(
    st.dictionaries(
        st.tuples(st.sampled_from([1, 4, 16]), st.sampled_from(CHOICES)), st.floats(1e-4, 1.0), min_size=12
    ),
    st.floats(0, 1),
    st.integers(1, 40),
)
def test_highest_tokens_per_second_wins(seconds: dict[tuple[int, int], float], rate: float, batch: int) -> None:
    table = StepCostTable(seconds)
    adaptive = observe_steps(AdaptiveK(CHOICES, table), rate, 200)
    rates = adaptive.acceptance.rates

    def speed(k: int) -> float:
        cost = table.cost(batch, k)
        assert cost is not None
        return (1 + sum(rates[:k])) / cost

    assert speed(adaptive.choose_k(batch)) == max(speed(k) for k in CHOICES)


def test_zero_when_nothing_is_accepted() -> None:
    adaptive = observe_steps(AdaptiveK(CHOICES, linear_costs(1e-3, 1e-4)), 0.0, 500)
    assert [adaptive.choose_k(b) for b in (1, 8, 64, 200)] == [0, 0, 0, 0]


def test_largest_when_draft_tokens_are_free_and_accepted() -> None:
    adaptive = observe_steps(AdaptiveK(CHOICES, linear_costs(1e-3, 0.0)), 0.9, 500)
    assert [adaptive.choose_k(b) for b in (1, 8, 64)] == [5, 5, 5]


def test_smaller_k_for_larger_batches() -> None:
    adaptive = observe_steps(AdaptiveK(CHOICES, linear_costs(1e-3, 5e-5)), 0.6, 2000)
    ks = [adaptive.choose_k(b) for b in (1, 2, 4, 8, 16, 32, 64)]
    assert ks == sorted(ks, reverse=True) and ks[0] == 5 and ks[-1] < 3


def test_exploration_finds_improved_acceptance() -> None:
    """With k = 0 as the best choice it still explores the largest k, and switches once draft tokens are accepted."""
    adaptive = observe_steps(AdaptiveK(CHOICES, linear_costs(1e-3, 1e-4)), 0.0, 3000)
    chosen = [adaptive.choose_k(8) for _ in range(4 * EXPLORE_EVERY)]
    assert 1 <= chosen.count(5) <= 4 and set(chosen) == {0, 5}  # costly explorations are rarer
    for _ in range(EXPLORE_EVERY * 100):
        k = adaptive.choose_k(8)
        if k:
            adaptive.acceptance.observe(k, k)
            for _ in range(31):  # the other requests of the batch
                adaptive.acceptance.observe(k, k)
    assert adaptive.choose_k(8) == 5


def test_single_choice_missing_table_and_empty_batch() -> None:
    assert AdaptiveK([3]).choose_k(8) == 3
    assert AdaptiveK([0]).choose_k(8) == 0
    assert AdaptiveK(CHOICES).choose_k(8) == 5  # no table: the largest
    assert AdaptiveK(CHOICES, linear_costs(1, 1)).choose_k(0) == 5  # empty batch: the largest


def test_acceptance_estimate_follows_observations() -> None:
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
    assert max(acceptance.num_drafted) <= ESTIMATE_WINDOW + 1, "old observations must decay"


def test_cost_interpolation_and_extrapolation() -> None:
    table = StepCostTable({(2, 1): 1.0, (6, 1): 3.0, (8, 1): 3.0})
    costs = {b: table.cost(b, 1) for b in (1, 2, 3, 4, 6, 7, 8, 16)}
    assert costs == {1: 1.0, 2: 1.0, 3: 1.5, 4: 2.0, 6: 3.0, 7: 3.0, 8: 3.0, 16: 6.0}
    assert table.cost(2, 5) is None
    assert AdaptiveK([0, 1, 5], StepCostTable({(1, 1): 1.0})).choose_k(1) == 1, "k = 5 was never measured"


def test_large_k_only_at_batch_sizes_where_it_was_measured() -> None:
    """Past the largest measured batch size of all choices every choice is a candidate again."""
    table = StepCostTable({(b, k): 1e-3 for b in (1, 8, 64) for k in CHOICES if k < 5 or b <= 8})
    adaptive = observe_steps(AdaptiveK(CHOICES, table), 0.99, 500)
    assert [adaptive.choose_k(b) for b in (1, 8, 9, 64)] == [5, 5, 3, 3] and adaptive.best_k(65) == 3
    assert {adaptive.choose_k(64) for _ in range(3 * EXPLORE_EVERY)} == {3}, "unmeasured choices must not be explored"
    assert AdaptiveK(CHOICES, StepCostTable({(b, k): 1e-3 for b in (1, 4) for k in CHOICES})).best_k(100) == 5


def test_table_round_trip(tmp_path: Path) -> None:
    table = linear_costs(1e-3, 1e-4)
    table.save(tmp_path / "costs.json", device="cpu")
    loaded = StepCostTable.load(tmp_path / "costs.json")
    assert loaded.seconds == pytest.approx(table.seconds) and loaded.batch_sizes == [1, 8, 64]


@pytest.mark.parametrize("content", [None, "", "{}", "[]", '{"steps": [{"batch_size": 1}]}', '{"steps": [["x"]]}'])
def test_invalid_table_files_are_refused(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "costs.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match="--cost-table .*costs.json: ") as error:
        StepCostTable.load(path)
    assert "\n" not in str(error.value)


def simulate(
    adaptive: AdaptiveK, batch: int, true: StepCostTable, rate: float, num_steps: int, noise: float = 0.0, seed: int = 0
) -> list[int]:
    """Runs steps that take the time given by `true`, with outliers. Returns the chosen k of each step."""
    rng, chosen = random.Random(seed), []
    for _ in range(num_steps):
        k = adaptive.choose_k(batch)
        chosen.append(k)
        cost = true.cost(batch, k)
        assert cost is not None
        adaptive.observe_step_time(batch, k, cost * (1 + noise * rng.random()) * (50 if rng.random() < 0.01 else 1))
        for _ in range(batch):
            accepted = 0
            while accepted < k and rng.random() < rate:
                accepted += 1
            adaptive.acceptance.observe(k, accepted)
    return chosen


@many(25)
@given(
    st.lists(st.floats(0.7, 1.4), min_size=4, max_size=4),
    st.sampled_from([0.3, 0.6, 0.9]),
    st.sampled_from([1, 8]),
    st.floats(0.5, 20.0),
)
def test_step_times_correct_a_wrong_table(factors: list[float], rate: float, batch: int, slowdown: float) -> None:
    """The table is wrong by a different factor for each k and by a common one. The choice ends near the optimum."""
    table = linear_costs(1e-3, 2e-5)
    factor = dict(zip(CHOICES, factors, strict=True))
    true = StepCostTable({(b, k): seconds * factor[k] * slowdown for (b, k), seconds in table.seconds.items()})
    adaptive = AdaptiveK(CHOICES, table)
    chosen = simulate(adaptive, batch, true, rate, 12000, noise=0.05)

    def speed(k: int) -> float:
        cost = true.cost(batch, k)
        assert cost is not None
        return sum(rate**i for i in range(k + 1)) / cost

    best = max(map(speed, CHOICES))
    usual = max(set(chosen[-1000:]), key=chosen[-1000:].count)
    assert speed(usual) >= 0.92 * best
    assert sum(map(speed, chosen[-4000:])) / 4000 >= 0.9 * best, "exploration must cost little"


def test_corrections_are_kept_by_batch_size() -> None:
    table = linear_costs(1e-3, 0.0)
    adaptive = observe_steps(AdaptiveK(CHOICES, table), 0.8, 500)
    for _ in range(200):
        adaptive.observe_step_time(8, 5, 4e-3)
        for k in (0, 1, 3):
            adaptive.observe_step_time(8, k, 1e-3)
    assert adaptive.best_k(8) == 3 and adaptive.best_k(5) == 3 and adaptive.best_k(1) == 5 and adaptive.best_k(64) == 5
    adaptive.observe_step_time(8, 2, 1e-3)  # not a choice
    assert (8, 2) not in adaptive.correction.observed


def test_outlier_timings_are_clipped() -> None:
    adaptive = AdaptiveK(CHOICES, linear_costs(1e-3, 0.0))
    for _ in range(100):
        adaptive.observe_step_time(1, 3, 1e-3)
    adaptive.observe_step_time(1, 3, 60.0)
    assert adaptive.correction.ratio(1, 3) < 1.05
