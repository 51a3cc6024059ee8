"""How often draft 1, 2, .. is accepted, whichever way it is told: rates, an acceptance length, a file of results.

Knows nothing about time. Rates are unconditional: draft i counts where all before it were accepted too, so they never
rise. Drafts past the last known one are taken to be as hard as that one was.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from peagle.config import Method
from peagle.errors import UserError
from peagle.results.files import read_results
from peagle.results.schema import AcceptanceRow
from peagle.speculative.adaptive_k import PRIOR_RATE


@dataclass(frozen=True)
class Curve:
    rates: tuple[float, ...]
    source: str
    guessed: bool = False

    def __post_init__(self) -> None:
        assert self.rates and all(0 <= b <= a <= 1 for a, b in zip((1.0, *self.rates), self.rates, strict=False))

    def rate(self, draft: int) -> float:
        """Of draft 1, 2, .."""
        if draft <= len(self.rates):
            return self.rates[draft - 1]
        last, before = self.rates[-1], self.rates[-2] if len(self.rates) > 1 else 1.0
        return last * (last / before if before else 0.0) ** (draft - len(self.rates))

    def length(self, k: int) -> float:
        """Tokens a round with K drafts gains, the target's own included."""
        return 1 + sum(self.rate(i) for i in range(1, k + 1))


def guess(drafts: int) -> Curve:
    return Curve(tuple(PRIOR_RATE**i for i in range(1, drafts + 1)), f"a guess, {PRIOR_RATE} a draft", guessed=True)


def from_rates(given: str, flag: str = "--rates") -> Curve:
    try:
        rates = tuple(float(r) for r in given.split(","))
    except ValueError:
        raise UserError(f"{flag} {given}: must be numbers between 0 and 1, by commas") from None
    if not all(0 <= b <= a <= 1 for a, b in zip((1.0, *rates), rates, strict=False)):
        raise UserError(f"{flag} {given}: must be between 0 and 1, none larger than the one before it")
    return Curve(rates, f"rates {given}")


def from_length(length: float, k: int, flag: str = "--acceptance-length") -> Curve:
    """Every draft as hard as the one before it: 1 + r + r^2 + .. + r^K is the length."""
    if not 1 <= length <= k + 1:
        raise UserError(f"{flag} {length:g}: must be between 1 and {k + 1} for {k} drafts (--measured-k)")
    low, high = 0.0, 1.0
    for _ in range(60):
        rate = (low + high) / 2
        low, high = (rate, high) if sum(rate**i for i in range(k + 1)) < length else (low, rate)
    return Curve(tuple(low**i for i in range(1, k + 1)), f"acceptance length {length:g} at K={k}")


def from_results(path: Path, method: Method, flag: str = "--results") -> Curve | None:
    """Of the drafters of that method in a file of `peagle eval`, over all its data sets; None if it has none.

    Where there is a choice: the largest K, the lowest temperature, without loops, and the first drafter and engine.
    """
    results = read_results(path)
    if results.kind != "eval":
        raise UserError(f"{flag} {path}: holds results of kind {results.kind}, acceptance is of kind eval")
    rows: list[AcceptanceRow] = [r for r in results.rows if r.method == method and r.num_drafts]
    whole = [r for r in rows if r.category is None and r.context_range is None] or [
        r for r in rows if r.context_range is None
    ]
    if not whole:
        return None
    first = max(whole, key=lambda r: (r.num_speculative_tokens, -r.temperature, r.looping_responses == "excluded"))
    same = [
        r
        for r in whole
        if (r.num_speculative_tokens, r.temperature, r.looping_responses)
        == (first.num_speculative_tokens, first.temperature, first.looping_responses)
        and (r.drafter, r.engine) == (first.drafter, first.engine)
    ]
    rounds = sum(r.num_drafts for r in same)
    rates = tuple(
        sum(r.num_accepted_tokens_per_pos[i] for r in same) / rounds for i in range(first.num_speculative_tokens)
    )
    sets = ", ".join(dict.fromkeys(r.dataset for r in same))
    return Curve(rates, f"{path.name}: {first.drafter} on {sets} at temperature {first.temperature:g}")
