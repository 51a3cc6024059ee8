"""Acceptance curves: from rates, from an acceptance length, and from results of `peagle eval`."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import many

from peagle.errors import UserError
from peagle.planning.acceptance import curve_from_length, curve_from_rates, curve_from_results, load_curves
from peagle.results.files import write_results
from peagle.results.provenance import Provenance
from peagle.results.schema import AcceptanceRow, PlanRow, Results


@many(60)
@given(st.integers(1, 20), st.floats(0, 1))
def test_curve_from_length_has_that_length(k: int, share: float) -> None:
    length = 1 + share * k
    curve = curve_from_length(length, k)
    assert curve.acceptance_length(k) == pytest.approx(length, abs=1e-6)
    assert curve.acceptance_length(k) == pytest.approx(1 + sum(curve.rates))


@pytest.mark.parametrize("rates", ["0.5,0.6", "1.2", "-0.1", "0.5;0.3", "", "nan", "0.9,inf"])
def test_invalid_rates_are_refused(rates: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"--acceptance-rates {rates}: must be")):
        curve_from_rates(rates)


def acceptance_row(**changes: Any) -> AcceptanceRow:
    row = AcceptanceRow(
        "d", "p-eagle", "embedded", "mt_bench", None, None, 0.0, 3, "included", 5, 300, 100, [70, 50, 20]
    )
    return replace(row, **changes)


def test_eval_results_are_pooled_over_data_sets(tmp_path: Path) -> None:
    rows = [
        acceptance_row(num_speculative_tokens=1, num_accepted_tokens_per_pos=[70]),
        acceptance_row(looping_responses="excluded"),
        acceptance_row(
            looping_responses="excluded", dataset="gsm8k", num_drafts=300, num_accepted_tokens_per_pos=[270, 150, 90]
        ),
        acceptance_row(),
        acceptance_row(temperature=1.0, num_accepted_tokens_per_pos=[1, 1, 1]),
        acceptance_row(category="maths", looping_responses="excluded", num_accepted_tokens_per_pos=[0, 0, 0]),
        acceptance_row(context_range=(0, 512), looping_responses="excluded", num_accepted_tokens_per_pos=[0, 0, 0]),
    ]
    path = tmp_path / "eval.json"
    write_results(path, Results("eval", Provenance.collect("test"), {}, rows))
    curve = curve_from_results(path, "p-eagle")
    assert curve is not None and curve.rates == (340 / 400, 200 / 400, 110 / 400)
    assert curve_from_results(path, "eagle3") is None
    assert load_curves(["eagle3", "p-eagle"], [], None, 7, path) == [None, curve]
    write_results(
        path, Results("plan", Provenance.collect("test"), {}, [PlanRow(1, 0, "none", 1.0, 1.0, 1, None, True)])
    )
    with pytest.raises(UserError, match="--eval .*of kind plan"):
        curve_from_results(path, "p-eagle")


def test_load_curves_takes_one_source() -> None:
    first, second = load_curves(["p-eagle", "eagle3"], ["0.5,0.2"], None, 7, None)
    assert first is not None and first.rates == (0.5, 0.2) and second is None
    with pytest.raises(UserError, match="--acceptance-rates and --acceptance-length"):
        load_curves(["p-eagle"], ["0.5"], 2.0, 7, None)
    with pytest.raises(UserError, match="--acceptance-rates: 2 lists for 1 drafters"):
        load_curves(["p-eagle"], ["0.5", "0.4"], None, 7, None)
