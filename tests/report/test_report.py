"""`peagle report`: what a reader can take from the page is what was measured, and nothing else.

Values are read back off the axes by their ticks, ratios are worked out anew, names are a stranger's.
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

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_page import (
    STAMP,
    Node,
    charts,
    finite,
    measured_acceptance,
    measured_speed,
    number,
    read_page,
    values_read,
)
from support import many
from typer.testing import CliRunner

from peagle.cli.app import app
from peagle.config import ReportSettings
from peagle.errors import UserError
from peagle.report.axes import linear_ticks, log_ticks, tick_texts
from peagle.report.build import build_page, folded, write_report
from peagle.report.html import html_of
from peagle.report.markdown import markdown_of
from peagle.report.series import Source, labels
from peagle.results.files import write_results
from peagle.results.schema import AcceptanceRow, BenchRepeat, BenchRow, PlanRow, Results, TuneRow
from peagle.results.statistics import Percentiles

HOSTILE = (
    "</title><script>alert(1)</script><img src=x onerror=alert(2)> & \"'` | ]]> *b* [l](javascript:x) \u202ex\x07\ud800"
)
KINDS = ("eval", "bench", "tune", "plan")


def page_of(*results: Results, settings: ReportSettings | None = None):
    return build_page([Source(f"file{i}", r) for i, r in enumerate(results)], settings or ReportSettings())


def repeat(speed: float, tokens: int = 4000, requests: int = 40, failed: dict[str, int] | None = None) -> BenchRepeat:
    times = Percentiles(5.0, 4.0, 8.0, 9.0)
    return BenchRepeat(tokens / speed, requests, failed or {}, 100, tokens, times, times, times, times, 2.5)


def bench_row(
    method: str, k, load: float, *speeds: float, prompts: str = "a", engine: str = "embedded", **more
) -> BenchRow:
    drafter = None if method == "none" else f"{method}-drafter"
    row = BenchRow(
        f"{engine} {method} {k}",
        engine,
        drafter,
        method,
        k,
        int(load),
        None,
        [repeat(s) for s in speeds],
        prompts * 64,
    )
    return replace(row, **more)


def bench(*rows: BenchRow) -> Results:
    return Results("bench", STAMP, {}, list(rows))


def section(page: Node, title: str) -> Node:
    return next(s for s in page.all("section") if s.all("h2")[0].text == title)


def figure(page: Node, title: str) -> Node:
    return next(f for f in page.all("figure") if f.all("h3")[0].text == title)


def raw_charts(html: str, title: str):
    """The charts of one figure, as XML, each size once."""
    body = next(part for part in html.split("<figure")[1:] if f"<h3>{title}</h3>" in part)
    return charts(body.split("<details")[0])


def test_what_was_measured_can_be_read_off_the_charts():
    acceptance, speed = measured_acceptance(), measured_speed()
    html = html_of(page_of(acceptance, speed))
    for chart in raw_charts(html, "Acceptance by position"):
        read = values_read(chart)
        for style, name in enumerate(("mt_bench", "humaneval", "gsm8k"), 1):
            row = next(r for r in acceptance.rows if r.dataset == name and r.num_speculative_tokens == 7)
            expected = [(i, count / row.num_drafts) for i, count in enumerate(row.num_accepted_tokens_per_pos, 1)]
            assert read[f"s{style}"] == [pytest.approx(p, abs=0.004) for p in expected], name
    for chart in raw_charts(html, "Acceptance length by K"):
        row = next(r for r in acceptance.rows if r.dataset == "humaneval" and r.num_speculative_tokens == 3)
        assert (3, pytest.approx(row.acceptance_length, abs=0.01)) in [
            (round(x), y) for x, y in values_read(chart)["s2"]
        ]
    found = {e.findtext("title"): values_read(e) for e in raw_charts(html, "Throughput against load")}
    turns = [r.output_throughput for r in _row(speed, "peagle/8b-p7", 8).repeats]
    assert (8, pytest.approx(sum(turns) / 3, rel=0.02)) in [(round(x), y) for x, y in found["peagle"]["s1"]]


def _row(results: Results, name: str, load: int) -> BenchRow:
    return next(r for r in results.rows if r.label == name and r.concurrency == load)


def test_the_measured_ratios_are_those_of_the_means():
    html = html_of(page_of(measured_speed()))
    page = read_page(html)
    speed = measured_speed()

    def mean(name: str, load: int) -> float:
        return sum(r.output_throughput for r in _row(speed, name, load).repeats) / 3

    table = figure(page, "Speed-up over no speculation, peagle").all("table")[0].rows
    line = next(row for row in table if row[0] == "P-EAGLE K=7")
    assert number(line[2].split()[0]) == pytest.approx(mean("peagle/8b-p7", 1) / mean("peagle/8b-none", 1), abs=0.006)
    assert line[3:] == ["–", "–"], "there is no run without a drafter at 8 and at 64"
    sides = figure(page, "Side by side, best K each").all("table")[0].rows
    line = next(row for row in sides if row[0] == "peagle over localhost:8000, P-EAGLE")
    for column, load in ((1, 1), (2, 8)):
        ratio = mean("peagle/8b-p7", load) / mean("vllm/8b-p7", load)
        assert number(line[column].split()[0]) == pytest.approx(ratio, abs=0.006)
    assert line[3] == "–", "with a fixed K only one of them ran at 64"


positive = st.floats(0.05, 5e6, allow_nan=False)


@st.composite
def bench_results(draw) -> Results:
    rows = []
    prompts = draw(st.lists(st.sampled_from("abc"), min_size=1, max_size=2, unique=True))
    loads = draw(st.lists(st.sampled_from([1, 3, 8, 64, 500]), min_size=1, max_size=4, unique=True))
    engines = draw(st.lists(st.sampled_from(["embedded", "http://h:1/v1", "http://h:2/v1"]), min_size=1, unique=True))
    for sha, engine, load in product(prompts, engines, loads):
        kinds = [("none", None), ("eagle3", 1), ("p-eagle", 3), ("p-eagle", 7), ("p-eagle", "auto")]
        for method, k in draw(st.lists(st.sampled_from(kinds), min_size=1, unique=True)):
            speeds = draw(st.lists(positive, min_size=1, max_size=3))
            rows.append(bench_row(method, k, load, *speeds, prompts=sha, engine=engine))
    return bench(*draw(st.permutations(rows)))


@st.composite
def eval_results(draw) -> Results:
    rows = []
    for name, method in product(("set", "other"), ("p-eagle", "eagle3")):
        rounds = draw(st.integers(0, 10**6))
        kept = sorted(draw(st.lists(st.integers(0, rounds), min_size=8, max_size=8)), reverse=True)
        for k in draw(st.lists(st.integers(1, 8), max_size=3, unique=True)):
            for category, context in ((None, None), ("c", None), (None, (0, 256)), (None, (256, 512))):
                length = 1 + sum(kept[:k]) / rounds if rounds else 1.0
                head = (
                    "d",
                    method,
                    "embedded",
                    name,
                    category,
                    context,
                    draw(st.sampled_from([0.0, 1.0])),
                    k,
                    "included",
                )
                rows.append(
                    AcceptanceRow(*head, draw(st.integers(1, 99)), 9, rounds, kept[:k], (length - 0.1, length + 0.2))
                )
    return Results("eval", STAMP, {}, rows)


@st.composite
def outlooks(draw) -> list[Results]:
    tuned = [
        TuneRow(batch, k, draw(positive), draw(positive), draw(st.booleans()))
        for batch, k in product(
            draw(st.sets(st.integers(1, 512), max_size=9)), draw(st.sets(st.integers(0, 9), max_size=3))
        )
    ]
    planned = [
        PlanRow(load, k, method, draw(positive), draw(positive), 2, draw(st.none() | positive), draw(st.booleans()))
        for load, (method, k) in product(
            draw(st.sets(st.integers(1, 512), max_size=3)), (("none", 0), ("eagle3", 3), ("p-eagle", 7))
        )
    ]
    return [Results("tune", STAMP, {}, tuned), Results("plan", STAMP, {}, planned)]


@many(25)
@given(bench_results(), eval_results(), outlooks())
def test_any_results_make_a_sound_page(benched: Results, evaluated: Results, others: list[Results]):
    built = page_of(benched, evaluated, *others)
    html = html_of(built)
    page = read_page(html)
    ids = [node.attributes["id"] for node in page.all() if "id" in node.attributes]
    assert len(ids) == len(set(ids))
    for node in page.all():
        for name in (node.attributes.get("aria-labelledby") or "").split():
            assert name in ids
        if (node.attributes.get("href") or "#").startswith("#"):
            assert (node.attributes.get("href") or "#")[1:] in [*ids, ""]
    for chart in charts(html):
        assert finite(chart)
        assert chart.get("role") == "img" and chart.findtext("title") and chart.findtext("desc")
    for found in page.all("figure"):
        assert found.all("svg") and found.all("table"), "a table stands beside every chart"
    for row in benched.rows:
        speeds = [r.output_throughput for r in row.repeats]
        shown = [
            number(cell) for table in page.all("table") for line in table.rows for cell in line[2:3] if _numeric(cell)
        ]
        assert any(math.isclose(value, sum(speeds) / len(speeds), rel_tol=0.06, abs_tol=0.006) for value in shown)
    markdown = markdown_of(built)
    for table in re.findall(r"(?:^\|.*\n?)+", markdown, re.M):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1


def _numeric(cell: str) -> bool:
    return re.fullmatch(r"[\d.,e+-]*\d", cell) is not None


@many(20)
@given(bench_results())
def test_nothing_is_set_beside_what_was_asked_otherwise(results: Results):
    """Every ratio on the page is one between rows of the same prompts, engine and load; each set has its section."""
    page = read_page(html_of(page_of(results)))
    shas = {row.workload_sha256 for row in results.rows}
    speeds = [s for s in page.all("section") if s.all("h2")[0].text.startswith("Speed")]
    assert len(speeds) == len(shas)
    warned = "Runs of different prompts or lengths are not compared" in page.text
    assert warned == (len(shas) > 1)
    for one in speeds:
        title = one.all("h2")[0].text
        rows = [r for r in results.rows if len(shas) == 1 or title.endswith(f"prompts {r.workload_sha256[:8]}")]
        shown = {number(text.split()[0]) for text in _ratios(one)}
        possible = [
            a.output_throughput / b.output_throughput for a, b in product(rows, rows) if a.concurrency == b.concurrency
        ]
        for value in shown:
            assert any(math.isclose(value, p, rel_tol=0.006, abs_tol=0.0051) for p in possible), value
        assert len(one.all("table")[-1].rows) - 1 == len(rows)


def _ratios(node: Node) -> list[str]:
    return [t.text for t in node.all("text", class_="value") if "×" in t.text]


def test_other_lengths_machines_loads_and_targets_are_kept_apart():
    same = [bench_row("none", None, 1, 100.0, 101.0), bench_row("p-eagle", 7, 1, 300.0, 301.0)]
    short = replace(same[1], repeats=[repeat(300.0, tokens=400), repeat(301.0, tokens=400)])
    page = read_page(html_of(page_of(bench(same[0], short))))
    assert not _ratios(page) and "mean output lengths" in figure(page, "Speed-up over no speculation").text
    elsewhere = Results("bench", replace(STAMP, machine={"gpu": "B200"}), {}, [same[1]])
    arriving = bench(replace(same[1], concurrency=None, request_rate=2.0))
    other = replace(bench(same[1]), settings={"target": "t2"})
    own = replace(bench(same[0]), settings={"target": "t1"})
    for results in ((bench(same[0]), elsewhere), (bench(same[0]), arriving), (own, other)):
        page = read_page(html_of(page_of(*results)))
        assert not _ratios(page) and "are not compared" in page.all("aside")[0].text
        assert len([s for s in page.all("section") if s.all("h2")[0].text.startswith("Speed")]) == 2


def test_servers_that_share_out_the_values_of_k_are_one_engine():
    plain, drafting = "http://gpu:8000/v1", "http://gpu:8001/v1"
    rows = [bench_row("none", None, 1, 100.0, engine=plain), bench_row("p-eagle", 7, 1, 250.0, engine=drafting)]
    page = read_page(html_of(page_of(bench(*rows))))
    assert set(_ratios(page)) == {"2.50×"} and "gpu:8000 and gpu:8001 are taken as one engine" in page.text
    twice = read_page(html_of(page_of(bench(*rows, bench_row("none", None, 1, 90.0, engine=drafting)))))
    assert set(_ratios(twice)) >= {"2.78×"} and "taken as one engine" not in twice.text


def test_data_sets_asked_otherwise_are_others():
    head = ("d", "p-eagle", "embedded", "gsm8k", None, None, 0.0, 2, "included", 50, 900, 100)
    ours = Results("eval", STAMP, {"max_tokens": 64}, [AcceptanceRow(*head, [60, 20])])
    longer = Results("eval", STAMP, {"max_tokens": 512}, [AcceptanceRow(*head, [90, 80])])
    page = page_of(ours, longer)
    assert any("asked in different ways" in warning for warning in page.warnings)
    html = html_of(page)
    assert "gsm8k max tokens 64" in html and "gsm8k max tokens 512" in html
    again = page_of(ours, replace(ours, provenance=replace(STAMP, commit="1" * 40)))
    assert not again.warnings, "the same set, measured twice"


def test_a_strangers_names_stay_text():
    rows = [bench_row(m, k, 8, 10.0, 11.0, label=HOSTILE, drafter=HOSTILE, engine=HOSTILE) for m, k in _KINDS]
    head = (HOSTILE, "p-eagle", HOSTILE, HOSTILE, None, None, 0.0, 2, "included", 5, 9, 10, [5, 2])
    provenance = replace(
        STAMP, command=HOSTILE, commit=HOSTILE, versions={HOSTILE: HOSTILE}, machine={"gpu": HOSTILE, HOSTILE: HOSTILE}
    )
    failing = replace(rows[1], repeats=[repeat(9.0, failed={HOSTILE: 3})])
    results = [
        Results("bench", provenance, {HOSTILE: HOSTILE, "target": HOSTILE}, [*rows, failing], False, [HOSTILE]),
        Results(
            "eval",
            provenance,
            {"max_tokens": HOSTILE},
            [AcceptanceRow(*head), replace(AcceptanceRow(*head), category=HOSTILE)],
        ),
        Results("plan", provenance, {"gpu": HOSTILE}, [PlanRow(1, 3, HOSTILE, 1.0, 2.0, 1, 3.0, True)]),
    ]
    built = build_page([Source(HOSTILE + str(i), r) for i, r in enumerate(results)], ReportSettings(title=HOSTILE))
    html = html_of(built)
    html.encode("utf-8")
    page = read_page(html)
    assert len(page.all("script")) == 1 and not page.all("img")
    assert not [name for node in page.all() for name in node.attributes if name.startswith("on")]
    assert {node.attributes.get("href", "#")[:1] for node in page.all("a")} == {"#"}
    assert len(charts(html)) == len(page.all("svg")) and not set("\u202e\x07") & set(html)
    visible = HOSTILE.replace("\u202e", "\ufffd").replace("\x07", "\ufffd").replace("\ud800", "\ufffd")
    assert page.all("h1")[0].text == visible == page.all("pre")[0].text == page.all("title")[0].text
    for table in page.all("table"):
        assert len({len(row) for row in table.rows}) == 1
    markdown = markdown_of(built)
    fenced = re.sub(r"^(`{3,})\n.*?\n\1$", "", markdown, flags=re.M | re.S)
    assert "<" not in fenced and not re.search(r"(?<!\\)\[|(?<!\\)`", fenced)


_KINDS = (("none", None), ("eagle3", 3), ("p-eagle", 7), ("p-eagle", "auto"))


def test_the_policy_lets_our_own_lines_run_and_nothing_else():
    page = read_page(html_of(page_of(measured_acceptance())))
    policy = next(m.attributes["content"] for m in page.all("meta") if "http-equiv" in m.attributes)
    assert policy is not None and policy.startswith("default-src 'none'")
    for kind in ("script", "style"):
        (element,) = page.all(kind)
        digest = base64.b64encode(hashlib.sha256(element.text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert "unsafe" not in policy and not [node for node in page.all() if "style" in node.attributes]
    assert not re.search(
        r"(?:src|href|url\()=?[\"']?(?:https?:)?//", "".join(_tags(html_of(page_of(measured_speed()))))
    )


def _tags(html: str) -> list[str]:
    return re.findall(r"<[^>]*>", html)


@pytest.mark.parametrize("given_kinds", [(), ("eval",), ("bench", "plan"), KINDS])
def test_a_page_of_little_says_what_is_missing(given_kinds: tuple[str, ...]):
    page = page_of(*(Results(kind, STAMP, {}, [], finished=False) for kind in given_kinds))
    shown = read_page(html_of(page)).text
    for kind in KINDS:
        assert f"(peagle {kind})" in shown
    assert "not enough to recommend anything" in shown
    assert len(page.warnings) == 2 * len(given_kinds)
    assert "Not in these results" in markdown_of(page)


def test_what_failed_was_short_or_alone_is_said_and_drawn_hollow():
    good = bench_row("none", None, 4, 100.0, 101.0, 100.5)
    bad = replace(bench_row("p-eagle", 3, 4, 200.0), repeats=[repeat(200.0, failed={"timeout": 4})])
    brief = replace(bench_row("p-eagle", 5, 4, 1.0), repeats=[repeat(9000.0), repeat(9100.0)])
    built = page_of(replace(bench(good, bad, brief), warnings=["the server was busy"]))
    html = html_of(built)
    said = "\n".join(built.warnings)
    assert "the server was busy" in said and "timeout 4" in said and "one repeat" in said and "took only 0.44 s" in said
    for chart in raw_charts(html, "Throughput against K"):
        assert len([e for e in chart.iter("path") if e.get("class") == "mark hollow"]) == 2
    assert "hollow" not in re.sub(r"(?s)<style>.*</style>", "", html_of(page_of(bench(good))))


def test_the_recommendation_is_the_fastest_and_says_when_it_is_close():
    rows = [bench_row("none", None, load, *_around(100.0 * load)) for load in (1, 8, 64)]
    rows += [bench_row("p-eagle", 7, 1, *_around(300.0)), bench_row("p-eagle", 7, 8, *_around(1600.0))]
    rows += [bench_row("p-eagle", 3, 1, *_around(250.0)), bench_row("p-eagle", 3, 8, *_around(1596.0))]
    rows += [bench_row("p-eagle", 3, 64, *_around(5000.0))]
    (said,) = page_of(bench(*rows)).recommendations
    assert said == (
        "Use P-EAGLE with K=7 at 1 to 8 requests at once (3.00× to 2.00× the speed without a drafter) and no "
        "speculation at 64 (no drafter was faster). As good within the error: P-EAGLE with K=3 at 8."
    )
    tuned = Results(
        "tune", STAMP, {"rates_from": "a guess"}, [TuneRow(b, k, 1.0, 9.0, True) for b, k in ((1, 7), (8, 7), (64, 0))]
    )
    page = page_of(tuned)
    assert page.recommendations == (
        "By the rounds measured on NVIDIA H200, K=7 at 1 to 8 requests at once and no drafts at 64 should bring the "
        "most tokens.",
    )
    assert "guessed" in page.warnings[0]


def test_a_speed_up_within_the_error_is_neither_blue_nor_shown_off():
    noisy = [bench_row("none", None, 4, 100.0, 140.0, 90.0), bench_row("p-eagle", 3, 4, 110.0, 150.0, 120.0)]
    clear = [bench_row("none", None, 4, *_around(100.0)), bench_row("p-eagle", 3, 4, *_around(115.0))]
    for rows, step, tile in ((noisy, "h2", False), (clear, "h3", True)):
        built = page_of(bench(*rows))
        assert ("Largest speed-up" in [t.name for t in built.tiles]) is tile
        for chart in raw_charts(html_of(built), "Speed-up over no speculation"):
            assert [g.get("class") for g in chart.iter("g")] == [step]


def _around(speed: float) -> tuple[float, float, float]:
    return speed * 0.995, speed, speed * 1.005


@many(300)
@given(st.floats(-1e6, 1e6), st.floats(0, 1e6))
def test_linear_ticks_are_round_and_enclose(low: float, width: float):
    ticks = linear_ticks(low, low + width)
    near = 1e-6 + 1e-8 * (ticks[1] - ticks[0])  # what a picture cannot show
    assert ticks[0] <= low + near and ticks[-1] >= low + width - near
    steps = {round((b - a) / (ticks[1] - ticks[0]), 3) for a, b in zip(ticks, ticks[1:], strict=False)}
    assert 2 <= len(ticks) <= 12 and steps == {1.0}


@many(300)
@given(st.floats(1e-5, 1e6), st.floats(1, 1e6))
def test_logarithmic_ticks_rise_and_enclose(low: float, factor: float):
    ticks = log_ticks(low, low * factor)
    assert ticks[0] <= low * 1.0001 and ticks[-1] >= low * factor * 0.9999
    assert 2 <= len(ticks) <= 14 and list(ticks) == sorted(set(ticks))
    assert {f"{tick:e}"[0] for tick in ticks} <= set("125")


def test_ticks_of_an_axis_have_the_same_decimals():
    assert tick_texts((1.0, 1.5, 2.0), "number") == ["1.0", "1.5", "2.0"]
    assert tick_texts((0.0, 5000.0), "number") == ["0", "5,000"]
    assert tick_texts((0.0, 0.25), "share") == ["0%", "25%"]


def test_labels_take_what_tells_them_apart_and_no_more():
    keys = [("P-EAGLE", "a", "t=0"), ("P-EAGLE", "a", "t=1"), ("EAGLE-3", "b", "t=0")]
    assert labels(keys) == ["P-EAGLE t=0", "P-EAGLE t=1", "EAGLE-3 t=0"]
    assert labels([("a", "x"), ("b", "y")]) == ["a", "b"]


def test_the_command_writes_both_and_refuses_in_one_line(tmp_path: Path):
    first, second = tmp_path / "speed.json", tmp_path / "acceptance.json"
    write_results(first, measured_speed())
    write_results(second, measured_acceptance())
    out, markdown = tmp_path / "r.html", tmp_path / "r.md"
    args = ["report", str(first), str(second), str(first), "--out", str(out), "--markdown", str(markdown)]
    run = CliRunner().invoke(app, [*args, "--title", "Ours", "--json"])
    assert run.exit_code == 0, run.output
    said = json.loads(run.stdout)
    assert said["html"] == str(out) and said["recommendations"] and len(said["missing"]) == 2
    assert read_page(out.read_text()).all("h1")[0].text == "Ours" and markdown.read_text().startswith("# Ours\n")
    assert out.read_text().count("benchmarks/serving.py --vllm-path") == 1, "a file given twice counts once"
    assert json.loads(first.read_text()), "and is as it was"
    assert not list(tmp_path.glob("*unfinished*"))

    for paths, html, message in (
        ([tmp_path / "none.json"], out, "none.json"),
        ([markdown], out, "is not JSON"),
        ([first], first, "give another place"),
        ([first], tmp_path / "no" / "r.html", "cannot be written"),
    ):
        with pytest.raises(UserError, match=message) as refused:
            write_report(paths, html, None)
        assert "\n" not in str(refused.value)
    assert json.loads(first.read_text())["kind"] == "bench"


@pytest.mark.parametrize("number", ["1e999", "1" + "0" * 400, "-1e300"])
def test_numbers_that_are_none_are_refused_by_name(tmp_path: Path, number: str):
    path = tmp_path / "b.json"
    write_results(path, bench(bench_row("none", None, 1, 10.0)))
    text = path.read_text()
    for field in ("duration", "median", "acceptance_length"):
        path.write_text(re.sub(rf'"{field}": [\d.e+-]+', f'"{field}": {number}', text))
        with pytest.raises(UserError, match=field):
            write_report([path], tmp_path / "r.html", None)
    path.write_text(re.sub(r'"duration": [\d.e+-]+', '"duration": 1e-320', text))
    with pytest.raises(UserError, match=r"rows\[0\]"):
        write_report([path], tmp_path / "r.html", None)


def test_what_is_said_of_many_runs_stands_once():
    runs = [f"file: peagle p-eagle K={k}, c={c}: a repeat took only {c / 9:.1f} s" for k in (3, 7) for c in (1, 8)]
    others = ["file: the run was not finished", "file2: the run was not finished", "a, b, K=3: other words of 3.1"]
    assert folded([*runs, *others, others[0]]) == (f"{runs[0]} (and 3 more like it)", *others)
