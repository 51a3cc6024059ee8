"""Chooses the number of draft tokens of the next decode step (`num_speculative_tokens="auto"`).

A decode step for `batch_size` requests with k draft tokens each takes cost(batch_size, k) seconds and yields
batch_size * (1 + a_1 + .. + a_k) tokens, where a_i is the acceptance rate of position i. The k with the highest
tokens per second wins; k = 0 is a candidate.

- Costs come from a table measured on this machine (`StepCostTable`). Timings of real steps correct the table
  (`StepTimeCorrection`): host overhead, other context lengths, a machine that was busy during the measurement.
- Acceptance rates come from the steps themselves (`AcceptanceEstimate`).

The choice never changes the output tokens, only the speed.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from peagle.errors import UserError

PRIOR_RATE = 0.65  # prior acceptance rate of a position, given that the position before was accepted
PRIOR_WEIGHT = 16.0  # weight of the prior, in steps
ESTIMATE_WINDOW = 2048.0  # steps after which an acceptance estimate halves its past
RECONSIDER_EVERY = 16  # steps between two evaluations of the best k
EXPLORE_EVERY = 64  # steps between two explorations: deep positions are observed only by drafting deep
EXPLORE_SHARE = 0.02  # largest share of the time that exploration may cost one request; more requests teach more
USUAL_RATIO_WEIGHT = 4.0  # weight of the mean correction of a batch size, in steps
TIMING_WINDOW = 32.0  # steps that the running mean of a correction covers
EXPLORE_BONUS = 0.8  # optimism about the speed of rarely timed choices
OUTLIER_FACTOR = 2.0  # a timing is clipped to this factor around the running mean


@dataclass
class StepCostTable:
    """Seconds of a decode step by (batch size, k), linearly interpolated between measured batch sizes."""

    seconds: dict[tuple[int, int], float] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.seconds)

    @property
    def batch_sizes(self) -> list[int]:
        return sorted({batch_size for batch_size, _ in self.seconds})

    def cost(self, batch_size: int, k: int) -> float | None:
        """Seconds of a step, or None if k was never measured. Past the largest batch size, cost is proportional."""
        measured = sorted((size, s) for (size, num_draft_tokens), s in self.seconds.items() if num_draft_tokens == k)
        if not measured:
            return None
        i = bisect_left(measured, (batch_size, 0.0))
        if i == 0:
            return measured[0][1]
        if i == len(measured):
            last_size, last_cost = measured[-1]
            return last_cost * batch_size / last_size
        (low, low_cost), (high, high_cost) = measured[i - 1], measured[i]
        return low_cost + (high_cost - low_cost) * (batch_size - low) / (high - low)

    def measured_choices(self, batch_size: int, choices: Sequence[int]) -> list[int]:
        """The choices that were measured up to this batch size, or as far as any choice was."""
        largest = {k: max((size for size, drafts in self.seconds if drafts == k), default=0) for k in choices}
        required = min(batch_size, max(largest.values()))
        return [k for k in choices if largest[k] >= required]

    def save(self, path: Path, **metadata: object) -> None:
        rows = [
            {"batch_size": size, "num_draft_tokens": k, "ms": round(s * 1e3, 4)}
            for (size, k), s in sorted(self.seconds.items())
        ]
        path.write_text(json.dumps({**metadata, "steps": rows}, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> StepCostTable:
        try:
            rows = json.loads(path.read_text())["steps"]
            return cls({(int(r["batch_size"]), int(r["num_draft_tokens"])): float(r["ms"]) / 1e3 for r in rows})
        except OSError as error:
            raise UserError(f"--cost-table {path}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError):
            raise UserError(f"--cost-table {path}: not a cost table; write one with `peagle tune --out`") from None


class AcceptanceEstimate:
    """Acceptance rate of each draft position over recent steps."""

    def __init__(self, max_speculative_tokens: int) -> None:
        self.set_prior_rates([PRIOR_RATE ** (i + 1) for i in range(max_speculative_tokens)])

    def observe(self, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        for i in range(num_draft_tokens):
            if self.num_drafted[i] >= ESTIMATE_WINDOW:
                self.num_drafted[i] *= 0.5
                self.num_accepted[i] *= 0.5
            self.num_drafted[i] += 1
            self.num_accepted[i] += i < num_accepted_tokens

    def set_prior_rates(self, rates: Sequence[float]) -> None:
        """Replaces the estimate by these rates, one for each position."""
        self.num_drafted = [PRIOR_WEIGHT] * len(rates)
        self.num_accepted = [PRIOR_WEIGHT * rate for rate in rates]

    @property
    def rates(self) -> list[float]:
        return [a / n for a, n in zip(self.num_accepted, self.num_drafted, strict=True)]


class StepTimeCorrection:
    """Ratio of measured step time to table cost, by (measured batch size, k)."""

    def __init__(self) -> None:
        self.observed: dict[tuple[int, int], tuple[float, float]] = {}  # running mean, number of timings

    def observe(self, size: int, k: int, ratio: float) -> None:
        mean, count = self.observed.get((size, k)) or (self.ratio(size, k), 0.0)
        count = min(count + 1, TIMING_WINDOW)
        clipped = min(max(ratio, mean / OUTLIER_FACTOR), mean * OUTLIER_FACTOR)
        self.observed[size, k] = mean + (clipped - mean) / count, count

    def ratio(self, size: int, k: int) -> float:
        """The mean ratio of this k, shrunk towards the mean ratio of all k at this batch size."""
        same_size = [timing for (observed_size, _), timing in self.observed.items() if observed_size == size]
        if not same_size:
            return 1.0
        usual = sum(mean * count for mean, count in same_size) / sum(count for _, count in same_size)
        mean, count = self.observed.get((size, k), (usual, 0.0))
        return (usual * USUAL_RATIO_WEIGHT + mean * count) / (USUAL_RATIO_WEIGHT + count)


class AdaptiveK:
    """Chooses k from `choices` for each decode step. With one choice, or without a cost table, takes the largest."""

    def __init__(self, choices: Sequence[int], table: StepCostTable | None = None) -> None:
        self.choices = sorted(choices)
        self.table = table or StepCostTable()
        self.acceptance = AcceptanceEstimate(self.choices[-1])
        self.correction = StepTimeCorrection()
        self._num_steps, self._explore_at, self._num_explorations = 0, EXPLORE_EVERY, 0
        self._measured_sizes = self.table.batch_sizes
        # Caches by batch size. The first is cleared every RECONSIDER_EVERY steps.
        self._best: dict[int, int] = {}
        self._costs: dict[int, dict[int, float | None]] = {}

    def choose_k(self, batch_size: int) -> int:
        """The number of draft tokens of the next step: the best k, or now and then one to explore."""
        if len(self.choices) == 1 or not self.table or batch_size == 0:
            return self.choices[-1]
        self._num_steps += 1
        if self._num_steps % RECONSIDER_EVERY == 0:
            self._best.clear()
        if batch_size not in self._best:
            self._best[batch_size] = self.best_k(batch_size)
        if self._num_steps >= self._explore_at:
            return self._explore(batch_size, self._best[batch_size])
        return self._best[batch_size]

    def _explore(self, batch_size: int, best: int) -> int:
        """Alternates between the largest k, to observe deep positions, and the most promising other k, to time it."""
        costs = self._costs_at(batch_size)
        k, self._num_explorations = max(costs), self._num_explorations + 1
        others = [other for other in costs if other not in (best, k)]
        timed_sizes = {size for size, _ in self.correction.observed}
        if others and self._num_explorations % 2 and self._measured_size(batch_size) in timed_sizes:
            k = max(others, key=partial(self._speed, batch_size, bonus=EXPLORE_BONUS))
        lost_steps = 0.0  # cost of this exploration, in steps with the best k
        if seconds := self._seconds(batch_size, best):
            lost_steps = self._seconds(batch_size, k) / seconds - self._num_tokens(k) / self._num_tokens(best)
        largest_share = EXPLORE_SHARE / batch_size**0.5
        self._explore_at = self._num_steps + max(EXPLORE_EVERY, round(lost_steps / largest_share))
        return k

    def best_k(self, batch_size: int) -> int:
        return max(self._costs_at(batch_size), key=partial(self._speed, batch_size))

    def _speed(self, batch_size: int, k: int, bonus: float = 0.0) -> float:
        """Tokens per second of a request, with an exploration bonus for rarely timed choices."""
        seconds = self._seconds(batch_size, k)
        _, count = self.correction.observed.get((self._measured_size(batch_size), k), (0.0, 0.0))
        return self._num_tokens(k) / seconds * (1 + bonus / (count + 1) ** 0.5) if seconds else 0.0

    def _seconds(self, batch_size: int, k: int) -> float:
        """Corrected seconds of a step."""
        return (self._costs_at(batch_size)[k] or 0.0) * self.correction.ratio(self._measured_size(batch_size), k)

    def tokens_per_second(self, batch_size: int, k: int) -> float:
        """Output tokens per second of the batch, by the table alone."""
        cost = self.table.cost(batch_size, k)
        return batch_size * (self._num_tokens(k) / cost) if cost else 0.0

    def _num_tokens(self, k: int) -> float:
        """Expected output tokens of a step of one request."""
        return 1 + sum(self.acceptance.rates[:k])

    def _measured_size(self, batch_size: int) -> int:
        """The smallest measured batch size that holds this batch; corrections are kept by it."""
        sizes = self._measured_sizes
        return sizes[min(bisect_left(sizes, batch_size), len(sizes) - 1)]

    def _costs_at(self, batch_size: int) -> dict[int, float | None]:
        """Table cost of each candidate k at this batch size."""
        if batch_size not in self._costs:
            candidates = self.table.measured_choices(batch_size, self.choices)
            self._costs[batch_size] = {k: self.table.cost(batch_size, k) for k in candidates}
        return self._costs[batch_size]

    def observe_step_time(self, batch_size: int, k: int, seconds: float) -> None:
        """Records the wall-clock time of a step, host work included."""
        if len(self.choices) > 1 and self.table and (cost := self._costs_at(batch_size).get(k)):
            self.correction.observe(self._measured_size(batch_size), k, seconds / cost)
