"""Names and styles of result rows."""

from __future__ import annotations

from peagle.report.sources import assign_styles, engine_name, merge_warnings, shortest_labels
from peagle.results.schema import configuration_name


def test_labels_have_only_the_fields_that_distinguish_them() -> None:
    keys = [("P-EAGLE", "a", "t=0"), ("P-EAGLE", "a", "t=1"), ("EAGLE-3", "b", "t=0")]
    assert list(shortest_labels(keys).values()) == ["P-EAGLE t=0", "P-EAGLE t=1", "EAGLE-3 t=0"]
    assert list(shortest_labels([("a", "x"), ("b", "y"), ("a", "x")]).values()) == ["a", "b"]
    assert shortest_labels([]) == {}


def test_a_second_line_of_a_method_gets_an_unused_style() -> None:
    styles = assign_styles(["none", "p-eagle", "p-eagle", "eagle3"])
    assert styles[0] == 0 and styles[1] == 1 and styles[3] == 2 and len(set(styles)) == 4


def test_engines_and_configurations_have_short_names() -> None:
    assert engine_name("embedded") == "peagle" and engine_name("http://gpu:8000/v1") == "gpu:8000"
    assert configuration_name("none", None) == configuration_name("p-eagle", 0) == "no speculation"
    assert configuration_name("p-eagle", "auto") == "P-EAGLE with K=auto"


def test_warnings_about_several_runs_are_merged() -> None:
    runs = [f"peagle p-eagle K={k}, c={c}: a repeat took only {c / 9:.1f} s" for k in (3, 7) for c in (1, 8)]
    others = ["the run was not finished", "a, b, K=3: other words of 3.1"]
    assert merge_warnings([*runs, *others, others[0]]) == [f"{runs[0]} (and 3 more)", *others]
