"""How many drafts the next round should have.

A round for `batch` requests with k drafts costs cost(batch, k) and brings batch * (1 + a_1 + .. + a_k) tokens,
a_i being how often draft i is accepted. The k with the most tokens per second wins; 0 is one of them. Costs
come from a table measured on this machine, acceptance from the rounds themselves, and so does what the table did
not know: the host's part, other lengths, a machine that was busy when it was measured. Which k runs never changes
the text, so the choice may be wrong without harm.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from peagle.errors import UserError

PRIOR_RATE = 0.65  # each draft given the one before, until rounds have shown better
PRIOR_WEIGHT = 16.0  # rounds
MEMORY = 2048.0  # rounds an estimate remembers
RECONSIDER_EVERY = 16  # rounds
EXPLORE_EVERY = 64  # rounds, then one with the most drafts: deep positions are only seen by drafting deep
EXPLORE_SHARE = 0.02  # of the time at most, so where drafting deep costs many rounds it is tried less often
TABLE_WEIGHT = 4.0  # rounds of one kind that must have been timed for these to count as much as the others
CLOCK_MEMORY = 32.0  # rounds of one kind that the mean of their times is about
DOUBT = 0.8  # rounds that were never timed may be so much faster than they seem, for which they are looked at
OUTLIER = 2.0  # a round that took so many times as long as usual was held up by something else


@dataclass
class StepCostTable:
    """Seconds of a round, by batch size and number of drafts; between measured batch sizes on a line."""

    seconds: dict[tuple[int, int], float] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.seconds)

    @property
    def batches(self) -> list[int]:
        return sorted({batch for batch, _ in self.seconds})

    def cost(self, batch: int, k: int) -> float | None:
        known = sorted((b, s) for (b, drafts), s in self.seconds.items() if drafts == k)
        if not known:
            return None
        at = bisect_left(known, (batch, 0.0))
        if at == 0:
            return known[0][1]
        if at == len(known):
            last, cost = known[-1]
            return cost * batch / last  # past the table a round is bound by arithmetic
        (low, low_cost), (high, high_cost) = known[at - 1], known[at]
        return low_cost + (high_cost - low_cost) * (batch - low) / (high - low)

    def reaching(self, batch: int, choices: Sequence[int]) -> list[int]:
        """Those whose costs are known up to this batch, or as far as any are."""
        ends = {k: max((b for b, drafts in self.seconds if drafts == k), default=0) for k in choices}
        far = min(batch, max(ends.values()))
        return [k for k in choices if ends[k] >= far]

    def save(self, path: Path, **about: object) -> None:
        rows = [{"batch": b, "drafts": k, "ms": round(s * 1e3, 4)} for (b, k), s in sorted(self.seconds.items())]
        path.write_text(json.dumps({**about, "rounds": rows}, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> StepCostTable:
        try:
            rows = json.loads(path.read_text())["rounds"]
            return cls({(int(r["batch"]), int(r["drafts"])): float(r["ms"]) / 1e3 for r in rows})
        except OSError as error:
            raise UserError(f"--cost-table {path}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError):
            raise UserError(f"--cost-table {path}: not a table written by `peagle tune`") from None


class AcceptanceEstimate:
    """How often each draft is accepted, over the recent past."""

    def __init__(self, most: int) -> None:
        self.tried = [PRIOR_WEIGHT] * most
        self.accepted = [PRIOR_WEIGHT * PRIOR_RATE ** (i + 1) for i in range(most)]

    def observe(self, drafts: int, accepted: int) -> None:
        for i in range(drafts):
            if self.tried[i] >= MEMORY:
                self.tried[i] *= 0.5
                self.accepted[i] *= 0.5
            self.tried[i] += 1
            self.accepted[i] += i < accepted

    def assume(self, rates: Sequence[float]) -> None:
        """Starts from these instead of the prior; drafts past the last are taken to be as hard as that one."""
        known = list(rates)
        step = known[-1] / (known[-2] if len(known) > 1 else 1.0) if known and known[-1] > 0 else 0.0
        while len(known) < len(self.tried):
            known.append((known[-1] if known else 1.0) * step)
        self.tried = [PRIOR_WEIGHT] * len(self.tried)
        self.accepted = [PRIOR_WEIGHT * rate for rate in known[: len(self.tried)]]

    @property
    def rates(self) -> list[float]:
        return [a / t for a, t in zip(self.accepted, self.tried, strict=True)]


class Clock:
    """How much longer rounds take than the table says, by the batch size that they were recorded for and drafts."""

    def __init__(self) -> None:
        self.seen: dict[tuple[int, int], tuple[float, float]] = {}  # the mean, and of how many

    def observe(self, size: int, k: int, ratio: float) -> None:
        mean, count = self.seen.get((size, k)) or (self.ratio(size, k), 0.0)
        count = min(count + 1, CLOCK_MEMORY)
        self.seen[size, k] = mean + (min(max(ratio, mean / OUTLIER), mean * OUTLIER) - mean) / count, count

    def knows(self, size: int) -> bool:
        return any(at == size for at, _ in self.seen)

    def ratio(self, size: int, k: int) -> float:
        """Of rounds that were hardly ever timed mostly that of others of this size."""
        others = [seen for (at, _), seen in self.seen.items() if at == size]
        if not others:
            return 1.0
        usual = sum(mean * count for mean, count in others) / sum(count for _, count in others)
        mean, count = self.seen.get((size, k), (usual, 0.0))
        return (usual * TABLE_WEIGHT + mean * count) / (TABLE_WEIGHT + count)


class AdaptiveK:
    """`choices` are the numbers of drafts a round may have; one choice is no choice."""

    def __init__(self, choices: Sequence[int], table: StepCostTable | None = None) -> None:
        self.choices = sorted(choices)
        self.table = table or StepCostTable()
        self.acceptance = AcceptanceEstimate(self.choices[-1])
        self.clock = Clock()
        self._rounds, self._explore_at, self._explored = 0, EXPLORE_EVERY, 0
        self._best: dict[int, int] = {}  # by batch size, until acceptance has moved on
        self._costs: dict[int, dict[int, float | None]] = {}  # by batch size, looked up in the table once
        self._sizes: dict[int, int] = {}

    def __call__(self, batch: int) -> int:
        if len(self.choices) == 1 or not self.table or batch == 0:
            return self.choices[-1]
        self._rounds += 1
        if self._rounds % RECONSIDER_EVERY == 0:
            self._best.clear()
        if batch not in self._best:
            self._best[batch] = self.best(batch)
        if self._rounds >= self._explore_at:
            return self._look(batch, self._best[batch])
        return self._best[batch]

    def _look(self, batch: int, usual: int) -> int:
        """The most drafts, for how often they hold; in turns with others, where rounds are timed."""
        costs = self._costs_at(batch)
        k, self._explored = max(costs), self._explored + 1
        others = [other for other in costs if other not in (usual, k)]
        if others and self._explored % 2 and self.clock.knows(self._size(batch)):
            k = max(others, key=partial(self._promise, batch))
        lost = 0.0  # usual rounds
        if seconds := self._seconds(batch, usual):
            lost = self._seconds(batch, k) / seconds - self._tokens(k) / self._tokens(usual)
        self._explore_at = self._rounds + max(EXPLORE_EVERY, round(lost / EXPLORE_SHARE))
        return k

    def _promise(self, batch: int, k: int) -> float:
        """How fast rounds may be, of which few have been timed."""
        size = self._size(batch)
        _, count = self.clock.seen.get((size, k), (0.0, 0.0))
        return self._speed_at(batch, k) * (1 + DOUBT / (count + 1) ** 0.5)

    def best(self, batch: int) -> int:
        return max(self._costs_at(batch), key=partial(self._speed_at, batch))

    def _speed_at(self, batch: int, k: int) -> float:
        return self._speed(k, self._seconds(batch, k))

    def _seconds(self, batch: int, k: int) -> float:
        """Of a round, by the table and by what rounds have shown of it."""
        return (self._costs_at(batch)[k] or 0.0) * self.clock.ratio(self._size(batch), k)

    def tokens_per_second(self, batch: int, k: int) -> float:
        return batch * self._speed(k, self.table.cost(batch, k))

    def _speed(self, k: int, cost: float | None) -> float:
        return self._tokens(k) / cost if cost else 0.0

    def _tokens(self, k: int) -> float:
        return 1 + sum(self.acceptance.rates[:k])

    def _size(self, batch: int) -> int:
        """The measured batch size that a round of so many counts to."""
        if batch not in self._sizes:
            sizes = self.table.batches
            self._sizes[batch] = sizes[min(bisect_left(sizes, batch), len(sizes) - 1)]
        return self._sizes[batch]

    def _costs_at(self, batch: int) -> dict[int, float | None]:
        """Of the choices at this load."""
        if batch not in self._costs:
            self._costs[batch] = {k: self.table.cost(batch, k) for k in self.table.reaching(batch, self.choices)}
        return self._costs[batch]

    def observe(self, drafts: int, accepted: int) -> None:
        self.acceptance.observe(drafts, accepted)

    def timed(self, batch: int, k: int, seconds: float) -> None:
        """A round took so long, with what the host has to do for it."""
        if len(self.choices) > 1 and self.table and (cost := self._costs_at(batch).get(k)):
            self.clock.observe(self._size(batch), k, seconds / cost)
