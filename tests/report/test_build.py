"""`peagle report`: a reader finds what was measured, and nothing else.

Chart values are read back by the ticks of their axes, ratios are computed anew, names are hostile.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_page import (
    PROVENANCE,
    Node,
    charts,
    is_inside,
    number,
    read_page,
    read_values,
    sample_acceptance,
    sample_throughput,
)
from support import many
from typer.testing import CliRunner

from peagle.cli.app import app
from peagle.config import ReportSettings
from peagle.errors import UserError
from peagle.report.build import build_page, write_report
from peagle.report.page import ReportPage, render_html, render_markdown
from peagle.report.sources import ResultSource
from peagle.results.files import write_results
from peagle.results.schema import AcceptanceRow, BenchRepeat, BenchRow, Percentiles, PlanRow, Results, TuneRow

HOSTILE = (
    "</title><script>alert(1)</script><img src=x onerror=alert(2)> & \"'` | ]]> *b* [l](javascript:x) \u202ex\x07\ud800"
)
KINDS = ("eval", "bench", "tune", "plan")
CONFIGURATIONS: tuple[tuple[str, Any], ...] = (("none", None), ("eagle3", 3), ("p-eagle", 7), ("p-eagle", "auto"))


def page_of(*results: Results, settings: ReportSettings | None = None) -> ReportPage:
    return build_page([ResultSource(f"file{i}", r) for i, r in enumerate(results)], settings or ReportSettings())


def repeat(
    throughput: float, num_tokens: int = 4000, completed: int = 40, failed: dict[str, int] | None = None
) -> BenchRepeat:
    times = Percentiles(5.0, 4.0, 8.0, 9.0)
    return BenchRepeat(
        num_tokens / throughput, completed, failed or {}, 100, num_tokens, times, times, times, times, 2.5
    )


def bench_row(
    method: Any, k: Any, load: float, *throughputs: float, workload: str = "a", engine: str = "embedded", **more: Any
) -> BenchRow:
    drafter = None if method == "none" else f"{method}-drafter"
    repeats = [repeat(throughput) for throughput in throughputs]
    row = BenchRow(f"{engine} {method} {k}", engine, drafter, method, k, int(load), None, repeats, workload * 64)
    return replace(row, **more)


def bench(*rows: BenchRow) -> Results:
    return Results("bench", PROVENANCE, {}, list(rows))


def around(throughput: float) -> tuple[float, float, float]:
    return throughput * 0.995, throughput, throughput * 1.005


def table_of(page: Node, title: str) -> Node:
    (found,) = page.all("div", **{"aria-label": title})
    return found.all("table")[0]


def figure_charts(html: str, title: str) -> list[Any]:
    body = next(part for part in html.split("<figure")[1:] if f"<h3>{title}</h3>" in part)
    return charts(body.split("<details")[0])


def ratios(node: Node) -> list[str]:
    return [cell.text for cell in node.all("td") if "×" in cell.text]


def throughput_sections(page: Node) -> list[Node]:
    return [s for s in page.all("section") if s.all("h2")[0].text.startswith("Throughput")]


def test_values_can_be_read_off_the_charts() -> None:
    acceptance, throughput = sample_acceptance(), sample_throughput()
    html = render_html(page_of(acceptance, throughput))
    for chart in figure_charts(html, "Acceptance by position"):
        lines = read_values(chart)
        for style, name in enumerate(("mt_bench", "humaneval", "gsm8k"), 1):
            row = next(r for r in acceptance.rows if r.dataset == name and r.num_speculative_tokens == 7)
            expected = [(i, n / row.num_drafts) for i, n in enumerate(row.num_accepted_tokens_per_pos, 1)]
            assert lines[f"s{style}"] == [pytest.approx(p, abs=0.004) for p in expected], name
    for chart in figure_charts(html, "Acceptance length by K"):
        row = next(r for r in acceptance.rows if r.dataset == "humaneval" and r.num_speculative_tokens == 3)
        points = [(round(x), y) for x, y in read_values(chart)["s2"]]
        assert (3, pytest.approx(row.acceptance_length, abs=0.01)) in points
    by_engine = {chart.findtext("title"): read_values(chart) for chart in figure_charts(html, "Throughput by load")}
    mean = find_row(throughput, "embedded", 7, 8).output_throughput
    assert (8, pytest.approx(mean, rel=0.02)) in [(round(x), y) for x, y in by_engine["peagle"]["s1"]]


def find_row(results: Results, engine: str, k: Any, concurrency: int) -> BenchRow:
    return next(
        r
        for r in results.rows
        if r.engine.startswith(engine) and r.num_speculative_tokens == k and r.concurrency == concurrency
    )


def test_ratios_are_those_of_the_means() -> None:
    throughput = sample_throughput()
    page = read_page(render_html(page_of(throughput)))

    def mean(engine: str, k: Any, concurrency: int) -> float:
        return find_row(throughput, engine, k, concurrency).output_throughput

    table = table_of(page, "Speedup over no speculation, peagle").rows
    line = next(row for row in table if row[0] == "P-EAGLE K=7")
    expected = mean("embedded", 7, 1) / mean("embedded", None, 1)
    assert number(line[1].split()[0]) == pytest.approx(expected, abs=0.006)
    assert line[2:] == ["–", "–"], "there is no baseline at 8 and 64"
    table = table_of(page, "Side by side, fastest K each").rows
    line = next(row for row in table if row[0] == "peagle over localhost:8000, P-EAGLE")
    for column, concurrency in ((1, 1), (2, 8)):
        expected = mean("embedded", 7, concurrency) / mean("http", 7, concurrency)
        assert number(line[column].split()[0]) == pytest.approx(expected, abs=0.006)
    assert line[3] == "–", "only one engine ran a fixed K at 64"


positive = st.floats(0.05, 5e6, allow_nan=False)


@st.composite
def bench_results(draw: Any) -> Results:
    rows = []
    workloads = draw(st.lists(st.sampled_from("abc"), min_size=1, max_size=2, unique=True))
    loads = draw(st.lists(st.sampled_from([1, 3, 8, 64, 500]), min_size=1, max_size=4, unique=True))
    engines = draw(st.lists(st.sampled_from(["embedded", "http://h:1/v1", "http://h:2/v1"]), min_size=1, unique=True))
    for workload, engine, load in product(workloads, engines, loads):
        kinds = [("none", None), ("eagle3", 1), ("p-eagle", 3), ("p-eagle", 7), ("p-eagle", "auto")]
        for method, k in draw(st.lists(st.sampled_from(kinds), min_size=1, unique=True)):
            throughputs = draw(st.lists(positive, min_size=1, max_size=3))
            rows.append(bench_row(method, k, load, *throughputs, workload=workload, engine=engine))
    return bench(*draw(st.permutations(rows)))


@st.composite
def eval_results(draw: Any) -> Results:
    rows = []
    for name, method in product(("set", "other"), ("p-eagle", "eagle3")):
        num_drafts = draw(st.integers(0, 10**6))
        accepted = sorted(draw(st.lists(st.integers(0, num_drafts), min_size=8, max_size=8)), reverse=True)
        temperature, looping = draw(st.sampled_from([0.0, 1.0])), draw(st.sampled_from(["included", "excluded"]))
        for k in draw(st.lists(st.integers(1, 8), max_size=3, unique=True)):
            for category, context in ((None, None), ("c", None), (None, (0, 256)), (None, (256, 512))):
                length = 1 + sum(accepted[:k]) / num_drafts if num_drafts else 1.0
                head = ("d", method, "embedded", name, category, context, temperature, k, looping)
                counts = (draw(st.integers(1, 99)), 9, num_drafts, accepted[:k])
                rows.append(AcceptanceRow(*head, *counts, (length - 0.1, length + 0.2)))
    return Results("eval", PROVENANCE, {}, rows)


@st.composite
def estimates(draw: Any) -> list[Results]:
    batch_sizes, ks = draw(st.sets(st.integers(1, 512), max_size=9)), draw(st.sets(st.integers(0, 9), max_size=3))
    tuned = [
        TuneRow(size, k, draw(positive), draw(positive), draw(st.booleans())) for size, k in product(batch_sizes, ks)
    ]
    concurrencies = draw(st.sets(st.integers(1, 512), max_size=3))
    planned = [
        PlanRow(c, k, method, draw(positive), draw(positive), 2, draw(st.none() | positive), draw(st.booleans()))
        for c, (method, k) in product(concurrencies, (("none", 0), ("eagle3", 3), ("p-eagle", 7)))
    ]
    return [Results("tune", PROVENANCE, {}, tuned), Results("plan", PROVENANCE, {}, planned)]


@many(25)
@given(bench_results(), eval_results(), estimates())
def test_any_results_make_a_valid_page(benched: Results, evaluated: Results, others: list[Results]) -> None:
    built = page_of(benched, evaluated, *others)
    html = render_html(built)
    page = read_page(html)
    ids = [node.attributes["id"] for node in page.all() if "id" in node.attributes]
    assert len(ids) == len(set(ids))
    for node in page.all():
        for name in (node.attributes.get("aria-labelledby") or "").split():
            assert name in ids
        if (node.attributes.get("href") or "#").startswith("#"):
            assert (node.attributes.get("href") or "#")[1:] in [*ids, ""]
    for chart in charts(html):
        assert is_inside(chart)
        assert chart.get("role") == "img" and chart.findtext("title") and chart.findtext("desc")
    for found in page.all("figure"):
        assert found.all("svg") and found.all("table"), "every chart has a table"
    cells = [cell for table in page.all("table") for line in table.rows for cell in line[2:3]]
    numbers = [number(cell) for cell in cells if re.fullmatch(r"[\d.,e+-]*\d", cell)]
    for row in benched.rows:
        assert any(math.isclose(value, row.output_throughput, rel_tol=0.06, abs_tol=0.006) for value in numbers)
    for table in re.findall(r"(?:^\|.*\n?)+", render_markdown(built), re.M):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1


@many(20)
@given(bench_results())
def test_only_runs_of_the_same_workload_and_load_are_compared(results: Results) -> None:
    page = read_page(render_html(page_of(results)))
    workloads = {row.workload_sha256 for row in results.rows}
    sections = throughput_sections(page)
    assert len(sections) == len(workloads)
    assert ("are not compared" in page.text) == (len(workloads) > 1)
    for section in sections:
        title = section.all("h2")[0].text
        rows = [r for r in results.rows if len(workloads) == 1 or title.endswith(f"workload {r.workload_sha256[:8]}")]
        possible = [
            a.output_throughput / b.output_throughput for a, b in product(rows, rows) if a.concurrency == b.concurrency
        ]
        for value in {number(text.split()[0]) for text in ratios(section)}:
            assert any(math.isclose(value, p, rel_tol=0.006, abs_tol=0.0051) for p in possible), value
        assert len(section.all("table")[-1].rows) - 1 == len(rows)


def test_other_lengths_machines_loads_and_targets_are_not_compared() -> None:
    baseline, drafted = bench_row("none", None, 1, 100.0, 101.0), bench_row("p-eagle", 7, 1, 300.0, 301.0)
    short = replace(drafted, repeats=[repeat(300.0, num_tokens=400), repeat(301.0, num_tokens=400)])
    page = read_page(render_html(page_of(bench(baseline, short))))
    assert not ratios(page) and "mean output lengths" in table_of(page, "Speedup over no speculation").text
    other_machine = Results("bench", replace(PROVENANCE, machine={"gpu": "B200"}), {}, [drafted])
    open_loop = bench(replace(drafted, concurrency=None, request_rate=2.0))
    targets = [replace(bench(row), settings={"target": f"t{i}"}) for i, row in enumerate((baseline, drafted))]
    for results in ((bench(baseline), other_machine), (bench(baseline), open_loop), targets):
        page = read_page(render_html(page_of(*results)))
        assert not ratios(page) and "are not compared" in page.all("aside")[0].text
        assert len(throughput_sections(page)) == 2


def test_servers_with_different_k_are_one_engine() -> None:
    plain, drafting = "http://gpu:8000/v1", "http://gpu:8001/v1"
    rows = [bench_row("none", None, 1, 100.0, engine=plain), bench_row("p-eagle", 7, 1, 250.0, engine=drafting)]
    page = read_page(render_html(page_of(bench(*rows))))
    assert ratios(page) == ["2.50×"] and "Shown as one engine: gpu:8000, gpu:8001" in page.text
    page = read_page(render_html(page_of(bench(*rows, bench_row("none", None, 1, 90.0, engine=drafting)))))
    assert "2.78×" in ratios(page) and "Shown as one engine" not in page.text


def test_data_sets_with_other_settings_are_not_compared() -> None:
    head = ("d", "p-eagle", "embedded", "gsm8k", None, None, 0.0, 2, "included", 50, 900, 100)
    short = Results("eval", PROVENANCE, {"max_tokens": 64}, [AcceptanceRow(*head, [60, 20])])
    long = Results("eval", PROVENANCE, {"max_tokens": 512}, [AcceptanceRow(*head, [90, 80])])
    page = page_of(short, long)
    assert any("not compared" in warning for warning in page.warnings)
    html = render_html(page)
    assert "gsm8k max_tokens 64" in html and "gsm8k max_tokens 512" in html
    again = page_of(short, replace(short, provenance=replace(PROVENANCE, commit="1" * 40)))
    assert not again.warnings, "the same data set, measured twice"


@pytest.mark.parametrize("looping", ["included", "excluded"])
def test_the_acceptance_tile_names_the_treatment_of_looping_responses(looping: Any) -> None:
    row = sample_acceptance().rows[-1]
    both = [replace(row, looping_responses="included"), replace(row, looping_responses=looping)]
    (tile,) = page_of(Results("eval", PROVENANCE, {}, both[:1] if looping == "included" else both)).tiles
    assert tile.title == "Acceptance length" and tile.description.endswith(f"looping responses {looping}")


def test_hostile_names_stay_text() -> None:
    rows = [bench_row(m, k, 8, 10.0, 11.0, label=HOSTILE, drafter=HOSTILE, engine=HOSTILE) for m, k in CONFIGURATIONS]
    head = (HOSTILE, "p-eagle", HOSTILE, HOSTILE, None, None, 0.0, 2, "included", 5, 9, 10, [5, 2])
    machine = {"gpu": HOSTILE, HOSTILE: HOSTILE}
    provenance = replace(PROVENANCE, command=HOSTILE, commit=HOSTILE, versions={HOSTILE: HOSTILE}, machine=machine)
    failing = replace(rows[1], repeats=[repeat(9.0, failed={HOSTILE: 3})])
    acceptance = [AcceptanceRow(*head), replace(AcceptanceRow(*head), category=HOSTILE)]
    settings = {HOSTILE: HOSTILE, "target": HOSTILE}
    results = [
        Results("bench", provenance, settings, [*rows, failing], False, [HOSTILE]),
        Results("eval", provenance, {"max_tokens": HOSTILE}, acceptance),
        Results("plan", provenance, {"gpu": HOSTILE}, [PlanRow(1, 3, HOSTILE, 1.0, 2.0, 1, 3.0, True)]),
    ]
    sources = [ResultSource(HOSTILE + str(i), r) for i, r in enumerate(results)]
    built = build_page(sources, ReportSettings(title=HOSTILE))
    html = render_html(built)
    html.encode("utf-8")
    page = read_page(html)
    assert len(page.all("script")) == 1 and not page.all("img")
    assert not [name for node in page.all() for name in node.attributes if name.startswith("on")]
    assert {node.attributes.get("href", "#")[:1] for node in page.all("a")} == {"#"}
    assert len(charts(html)) == len(page.all("svg", class_="chart")) and not set("\u202e\x07") & set(html)
    visible = HOSTILE.replace("\u202e", "\ufffd").replace("\x07", "\ufffd").replace("\ud800", "\ufffd")
    assert page.all("h1")[0].text == visible == page.all("pre")[0].text == page.all("title")[0].text
    for table in page.all("table"):
        assert len({len(row) for row in table.rows}) == 1
    markdown = re.sub(r"^    .*$", "", render_markdown(built), flags=re.M)  # without code
    assert "<" not in markdown and not re.search(r"(?<!\\)\[|(?<!\\)`", markdown)


def test_the_content_policy_allows_only_the_page_itself() -> None:
    page = read_page(render_html(page_of(sample_acceptance())))
    policy = next(m.attributes["content"] for m in page.all("meta") if "http-equiv" in m.attributes)
    assert policy is not None and policy.startswith("default-src 'none'")
    for kind in ("script", "style"):
        (element,) = page.all(kind)
        digest = base64.b64encode(hashlib.sha256(element.text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert "unsafe" not in policy and not [node for node in page.all() if "style" in node.attributes]
    tags = "".join(re.findall(r"<[^>]*>", render_html(page_of(sample_throughput()))))
    assert not re.search(r"(?:src|href|url\()=?[\"']?(?:https?:)?//", tags)


@pytest.mark.parametrize("kinds", [(), ("eval",), ("bench", "plan"), KINDS])
def test_missing_results_are_listed(kinds: tuple[Any, ...]) -> None:
    page = page_of(*(Results(kind, PROVENANCE, {}, [], finished=False) for kind in kinds))
    text = read_page(render_html(page)).text
    for kind in KINDS:
        assert f"(peagle {kind})" in text
    assert "no recommendation" in text
    assert len(page.warnings) == 2 * len(kinds)
    assert "Not in these results" in render_markdown(page)


def test_unreliable_runs_have_warnings_and_hollow_points() -> None:
    rows = [bench_row("none", None, load, *around(100.0)) for load in (4, 8)]
    failed = replace(bench_row("p-eagle", 3, 4, 200.0), repeats=[repeat(200.0, failed={"timeout": 4})])
    brief = replace(bench_row("p-eagle", 3, 8, 1.0), repeats=[repeat(9000.0), repeat(9100.0)])
    built = page_of(bench(*rows, failed, brief))
    warnings = "\n".join(built.warnings)
    assert "timeout 4" in warnings and "one repeat" in warnings and "took only 0.44 s" in warnings
    for chart in figure_charts(render_html(built), "Throughput by load"):
        assert len([e for e in chart.iter("path") if e.get("class") == "mark hollow"]) == 2
    own = page_of(replace(bench(*rows, failed), warnings=["the server was busy"]))
    assert own.warnings == ["file0: the server was busy"], "warnings of the file are not repeated"
    html = render_html(page_of(bench(*rows)))
    assert "hollow" not in re.sub(r"(?s)<style>.*</style>", "", html)


def test_recommendations_of_tune_and_plan_are_those_of_the_files() -> None:
    tuned = [TuneRow(1, 7, 1.0, 9.0, True)]
    settings = {"acceptance_source": "assumed", "recommendation": "Fastest: K=7 up to batch size 1."}
    planned = [PlanRow(1, 3, "p-eagle", 1.0, 2.0, 1, 3.0, True)]
    plan_settings = {"recommendation": "Fastest: P-EAGLE with K=3 at concurrency 1."}
    page = page_of(Results("tune", PROVENANCE, settings, tuned), Results("plan", PROVENANCE, plan_settings, planned))
    assert page.recommendations == [
        "Decode steps on NVIDIA H200. Fastest: K=7 up to batch size 1.",
        "Roofline model. Fastest: P-EAGLE with K=3 at concurrency 1.",
    ]
    assert "assumed" in page.warnings[0]


@pytest.mark.parametrize(
    ("baseline", "drafted", "step", "has_tile"),
    [((100.0, 140.0, 90.0), (110.0, 150.0, 120.0), "h2", False), (around(100.0), around(115.0), "h3", True)],
)
def test_an_inconclusive_speedup_is_grey_and_has_no_tile(
    baseline: tuple[float, ...], drafted: tuple[float, ...], step: str, has_tile: bool
) -> None:
    page = page_of(bench(bench_row("none", None, 4, *baseline), bench_row("p-eagle", 3, 4, *drafted)))
    assert ("Largest speedup" in [tile.title for tile in page.tiles]) is has_tile
    (cell,) = table_of(read_page(render_html(page)), "Speedup over no speculation").all("td")
    assert cell.has("class_", step)


def test_the_command_writes_both_formats(tmp_path: Path) -> None:
    first, second = tmp_path / "bench.json", tmp_path / "eval.json"
    write_results(first, sample_throughput())
    write_results(second, sample_acceptance())
    out, markdown = tmp_path / "r.html", tmp_path / "r.md"
    args = ["report", str(first), str(second), str(first), "--out", str(out), "--markdown", str(markdown)]
    run = CliRunner().invoke(app, [*args, "--title", "Ours", "--json"])
    assert run.exit_code == 0, run.output
    summary = json.loads(run.stdout)
    assert summary["html"] == str(out) and summary["recommendations"] and len(summary["missing"]) == 2
    assert read_page(out.read_text()).all("h1")[0].text == "Ours" and markdown.read_text().startswith("# Ours\n")
    assert out.read_text().count("peagle bench TARGET") == 1, "a file that is passed twice counts once"
    assert not list(tmp_path.glob("*unfinished*"))
    for paths, html, message in (
        ([tmp_path / "none.json"], out, "none.json"),
        ([markdown], out, "JSON"),
        ([first], first, "--out .*is one of the result files"),
        ([first], first / "r.html", "cannot be written"),
    ):
        with pytest.raises(UserError, match=message) as raised:
            write_report(paths, html, None)
        assert "\n" not in str(raised.value)
    assert json.loads(first.read_text())["kind"] == "bench"


@pytest.mark.parametrize("value", ["1e999", "1" + "0" * 400, "-1e300"])
def test_invalid_numbers_are_refused_by_name(tmp_path: Path, value: str) -> None:
    path = tmp_path / "b.json"
    write_results(path, bench(bench_row("none", None, 1, 10.0)))
    text = path.read_text()
    for field in ("duration", "median", "acceptance_length"):
        path.write_text(re.sub(rf'"{field}": [\d.e+-]+', f'"{field}": {value}', text))
        with pytest.raises(UserError, match=field):
            write_report([path], tmp_path / "r.html", None)
    path.write_text(re.sub(r'"duration": [\d.e+-]+', '"duration": 1e-320', text))
    with pytest.raises(UserError, match=r"rows\[0\]"):
        write_report([path], tmp_path / "r.html", None)
