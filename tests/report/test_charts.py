"""Axis ticks and number formats."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from support import many

from peagle.report.charts import ChartAxis, format_number, format_ticks, linear_ticks, log_ticks


@many(300)
@given(st.floats(-1e6, 1e6), st.floats(0, 1e6))
def test_linear_ticks_are_round_and_enclose_the_values(low: float, width: float) -> None:
    ticks = linear_ticks(low, low + width)
    tolerance = 1e-6 + 1e-8 * (ticks[1] - ticks[0])
    assert ticks[0] <= low + tolerance and ticks[-1] >= low + width - tolerance
    steps = {round((b - a) / (ticks[1] - ticks[0]), 3) for a, b in zip(ticks, ticks[1:], strict=False)}
    assert 2 <= len(ticks) <= 12 and steps == {1.0}


@many(300)
@given(st.floats(1e-5, 1e6), st.floats(12, 1e6))
def test_log_ticks_rise_and_enclose_the_values(low: float, factor: float) -> None:
    ticks = log_ticks(low, low * factor)
    assert ticks[0] <= low * 1.0001 and ticks[-1] >= low * factor * 0.9999
    assert 2 <= len(ticks) <= 14 and list(ticks) == sorted(set(ticks))
    assert {f"{tick:e}"[0] for tick in ticks} <= set("125")


def test_ticks_of_an_axis_have_the_same_number_of_decimals() -> None:
    assert format_ticks(ChartAxis("", (1.0, 1.5, 2.0))) == ["1.0", "1.5", "2.0"]
    assert format_ticks(ChartAxis("", (0.0, 5000.0))) == ["0", "5,000"]
    assert format_ticks(ChartAxis("", (0.0, 0.25), unit="share")) == ["0%", "25%"]
    assert format_ticks(ChartAxis("", (0.5, 10.0), is_log=True)) == ["0.50", "10"]


def test_numbers_have_three_or_four_digits() -> None:
    values = (None, 3.0, 2.345, 23.45, 1234.5, 0.0123, 2e16)
    assert [format_number(v) for v in values] == ["–", "3", "2.35", "23.4", "1,234", "0.012", "2.00e+16"]
    assert format_number(0.523, "share") == "52%" and format_number(1.5, "times") == "1.50×"
