"""How many drafts the next round should have.

A round for `batch` requests with k drafts costs cost(batch, k) and brings batch * (1 + a_1 + .. + a_k) tokens,
a_i being how often draft i is accepted. The k with the most tokens per second wins; 0 is one of them. Costs
come from a table measured on this machine, acceptance from the rounds themselves. Which k runs never changes
the text, so the choice may be wrong without harm.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from peagle.errors import UserError

PRIOR_RATE = 0.65  # each draft given the one before, until rounds have shown better
PRIOR_WEIGHT = 16.0  # rounds
MEMORY = 2048.0  # rounds an estimate remembers
RECONSIDER_EVERY = 16  # rounds
EXPLORE_EVERY = 64  # rounds, then one with the most drafts: deep positions are only seen by drafting deep
EXPLORE_SHARE = 0.02  # of the time at most, so where drafting deep costs many rounds it is tried less often


@dataclass
class CostTable:
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
    def load(cls, path: Path) -> CostTable:
        try:
            rows = json.loads(path.read_text())["rounds"]
            return cls({(int(r["batch"]), int(r["drafts"])): float(r["ms"]) / 1e3 for r in rows})
        except OSError as error:
            raise UserError(f"--cost-table {path}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError):
            raise UserError(f"--cost-table {path}: not a table written by `peagle tune`") from None


class Acceptance:
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


class DraftCount:
    """`choices` are the numbers of drafts a round may have; one choice is no choice."""

    def __init__(self, choices: Sequence[int], table: CostTable | None = None) -> None:
        self.choices = sorted(choices)
        self.table = table or CostTable()
        self.acceptance = Acceptance(self.choices[-1])
        self._rounds, self._explore_at = 0, EXPLORE_EVERY
        self._best: dict[int, int] = {}  # by batch size, until acceptance has moved on
        self._costs: dict[int, dict[int, float | None]] = {}  # by batch size, looked up in the table once

    def __call__(self, batch: int) -> int:
        if len(self.choices) == 1 or not self.table or batch == 0:
            return self.choices[-1]
        self._rounds += 1
        if self._rounds % RECONSIDER_EVERY == 0:
            self._best.clear()
        if batch not in self._best:
            self._best[batch] = self.best(batch)
        if self._rounds >= self._explore_at:
            costs = self._costs_at(batch)
            most = max(costs)
            usual, deep = costs[self._best[batch]], costs[most]
            extra = deep / usual - 1 if usual and deep else 0.0  # in rounds
            self._explore_at = self._rounds + max(EXPLORE_EVERY, round(extra / EXPLORE_SHARE))
            return most
        return self._best[batch]

    def best(self, batch: int) -> int:
        costs = self._costs_at(batch)
        return max(costs, key=lambda k: self._speed(k, costs[k]))

    def tokens_per_second(self, batch: int, k: int) -> float:
        return batch * self._speed(k, self.table.cost(batch, k))

    def _speed(self, k: int, cost: float | None) -> float:
        return (1 + sum(self.acceptance.rates[:k])) / cost if cost else 0.0

    def _costs_at(self, batch: int) -> dict[int, float | None]:
        """Of the choices at this load."""
        if batch not in self._costs:
            self._costs[batch] = {k: self.table.cost(batch, k) for k in self.table.reaching(batch, self.choices)}
        return self._costs[batch]

    def observe(self, drafts: int, accepted: int) -> None:
        self.acceptance.observe(drafts, accepted)
