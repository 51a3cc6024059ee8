"""Recommendations: only from conclusive comparisons, with ties."""

from __future__ import annotations

import pytest
from report_page import PROVENANCE
from test_build import around, bench, bench_row

from peagle.report.sources import ResultSource
from peagle.report.throughput import BenchRun, ComparableRuns, is_conclusive, name_runs
from peagle.report.throughput import recommend as recommend_runs
from peagle.results.comparison import Speedup
from peagle.results.schema import BenchRow, Results


def recommend(*rows: BenchRow) -> list[str]:
    source = ResultSource("file", Results("bench", PROVENANCE, {}, list(rows)))
    group = ComparableRuns(name_runs([BenchRun(row, source) for row in rows]))
    return list(recommend_runs(group, group.runs))


@pytest.mark.parametrize(
    ("ci95", "expected"),
    [((1.1, 1.2), True), ((0.8, 0.9), True), ((0.9, 1.2), False), ((1.1, 2.3), False), (None, False)],
)
def test_an_interval_must_exclude_1_and_be_narrow(ci95: tuple[float, float] | None, expected: bool) -> None:
    assert is_conclusive(Speedup(1.15, ci95)) is expected


def test_the_fastest_configuration_is_recommended_with_its_ties() -> None:
    rows = [bench_row("none", None, load, *around(100.0 * load)) for load in (1, 8, 64)]
    rows += [bench_row("p-eagle", 7, 1, *around(300.0)), bench_row("p-eagle", 7, 8, *around(1600.0))]
    rows += [bench_row("p-eagle", 3, 1, *around(250.0)), bench_row("p-eagle", 3, 8, *around(1596.0))]
    rows += [bench_row("p-eagle", 3, 64, *around(5000.0))]
    assert recommend(*rows) == [
        "concurrency 1: P-EAGLE with K=7 is fastest (3.00× no speculation).",
        "concurrency 8: P-EAGLE with K=7 is fastest (2.00× no speculation); tied: P-EAGLE with K=3.",
        "concurrency 64: no speculation is fastest.",
    ]


def test_noise_gives_no_recommendation() -> None:
    noisy = recommend(bench_row("none", None, 4, 100.0, 140.0, 90.0), bench_row("p-eagle", 3, 4, 110.0, 150.0, 120.0))
    single = recommend(bench_row("none", None, 4, 100.0), bench_row("p-eagle", 3, 4, 300.0))
    wide = recommend(bench_row("none", None, 4, 100.0, 190.0), bench_row("p-eagle", 3, 4, 10000.0, 20000.0))
    for recommendations in (noisy, single, wide):
        assert recommendations == ["concurrency 4: cannot tell; rerun with more requests."]


def test_a_single_configuration_gives_no_recommendation() -> None:
    assert recommend(bench_row("none", None, 4, *around(100.0))) == []
    assert bench(bench_row("none", None, 4, 1.0)).kind == "bench"
