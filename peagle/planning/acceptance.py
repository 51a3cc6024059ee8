"""Acceptance rate of each draft position: from rates, from an acceptance length, or from results of `peagle eval`.

Rates are unconditional: the rate of position i is the share of verification steps that accept draft tokens 1..i, so
rates never increase. Past the last known position the ratio of neighbouring rates is assumed to stay the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from peagle.config import Method
from peagle.errors import UserError
from peagle.results.files import read_results
from peagle.results.schema import AcceptanceRow
from peagle.speculative.adaptive_k import PRIOR_RATE


@dataclass(frozen=True)
class AcceptanceCurve:
    rates: tuple[float, ...]
    source: str
    is_assumed: bool = False

    def rate(self, position: int) -> float:
        """Acceptance rate of draft position 1, 2, .."""
        if position <= len(self.rates):
            return self.rates[position - 1]
        last, before = self.rates[-1], self.rates[-2] if len(self.rates) > 1 else 1.0
        return last * (last / before if before else 0.0) ** (position - len(self.rates))

    def acceptance_length(self, num_speculative_tokens: int) -> float:
        """Mean number of accepted tokens per verification step, plus 1 for the bonus token."""
        return 1 + sum(self.rate(i) for i in range(1, num_speculative_tokens + 1))


def assumed_curve(num_positions: int) -> AcceptanceCurve:
    rates = tuple(PRIOR_RATE**i for i in range(1, num_positions + 1))
    return AcceptanceCurve(rates, f"assumed, {PRIOR_RATE} per draft token", is_assumed=True)


def curve_from_rates(text: str) -> AcceptanceCurve:
    try:
        rates = tuple(float(rate) for rate in text.split(","))
    except ValueError:
        raise UserError(f"--acceptance-rates {text}: must be comma-separated numbers between 0 and 1") from None
    if not all(0 <= rate <= before for before, rate in zip((1.0, *rates), rates, strict=False)):
        raise UserError(f"--acceptance-rates {text}: must be between 0 and 1, and no rate may exceed the one before it")
    return AcceptanceCurve(rates, f"acceptance rates {text}")


def curve_from_length(acceptance_length: float, num_speculative_tokens: int) -> AcceptanceCurve:
    """Finds the constant rate r per draft token with 1 + r + r^2 + .. + r^K = acceptance_length."""
    k = num_speculative_tokens
    if not 1 <= acceptance_length <= k + 1:
        raise UserError(
            f"--acceptance-length {acceptance_length:g}: must be between 1 and {k + 1} "
            f"for {k} draft tokens (--acceptance-length-k)"
        )
    low, high = 0.0, 1.0
    for _ in range(60):
        rate = (low + high) / 2
        low, high = (rate, high) if sum(rate**i for i in range(k + 1)) < acceptance_length else (low, rate)
    return AcceptanceCurve(tuple(low**i for i in range(1, k + 1)), f"acceptance length {acceptance_length:g} at K={k}")


def curve_from_results(path: Path, method: Method) -> AcceptanceCurve | None:
    """Pools the data sets of a `peagle eval` file for one drafting method; None if the file has no such rows.

    Uses the largest K, then the lowest temperature, then rows without looping answers, of the first drafter and engine.
    """
    results = read_results(path)
    if results.kind != "eval":
        raise UserError(f"--eval {path}: holds results of kind {results.kind}, must be of kind eval")
    rows: list[AcceptanceRow] = [
        r for r in results.rows if r.method == method and r.num_drafts and r.context_range is None
    ]
    rows = [r for r in rows if r.category is None] or rows
    if not rows:
        return None
    best = max(rows, key=lambda r: (r.num_speculative_tokens, -r.temperature, r.looping_responses == "excluded"))

    def group(r: AcceptanceRow) -> tuple[object, ...]:
        return r.num_speculative_tokens, r.temperature, r.looping_responses, r.drafter, r.engine

    pooled = [r for r in rows if group(r) == group(best)]
    num_drafts = sum(r.num_drafts for r in pooled)
    rates = tuple(
        sum(r.num_accepted_tokens_per_pos[i] for r in pooled) / num_drafts for i in range(best.num_speculative_tokens)
    )
    datasets = ", ".join(dict.fromkeys(r.dataset for r in pooled))
    source = f"{path.name}: {best.drafter} on {datasets} at temperature {best.temperature:g}"
    return AcceptanceCurve(rates, source)


def load_curves(
    methods: Sequence[Method],
    rates: Sequence[str],
    acceptance_length: float | None,
    acceptance_length_k: int,
    eval_results: Path | None,
) -> list[AcceptanceCurve | None]:
    """Acceptance of each method from the one source that was passed; None where it does not say."""
    flags = {"--acceptance-rates": rates, "--acceptance-length": acceptance_length, "--eval": eval_results}
    if len(passed := [flag for flag, value in flags.items() if value]) > 1:
        raise UserError(f"{' and '.join(passed)}: pass only one of them")
    if len(rates) > len(methods):
        raise UserError(f"--acceptance-rates: {len(rates)} lists for {len(methods)} drafters")
    if eval_results is not None:
        return [curve_from_results(eval_results, method) for method in methods]
    curves = [curve_from_rates(text) for text in rates]
    if acceptance_length is not None:
        curves = [curve_from_length(acceptance_length, acceptance_length_k)]
    return [*curves, *[None] * (len(methods) - len(curves))]
