"""The report page in Chromium: layout, contrast, overlaps, network access, scripts, keyboard and print.

Needs Chromium (`make test-browser`). test_build.py tests what needs no browser.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from playwright.sync_api import expect
from report_page import PROVENANCE, sample_acceptance, sample_throughput
from test_build import HOSTILE, bench, bench_row

from peagle.config import ReportSettings
from peagle.report.build import build_page
from peagle.report.page import render_html
from peagle.report.sources import ResultSource
from peagle.results.schema import AcceptanceRow, PlanRow, Results, TuneRow
from scripts.browser import Tab, open_browser

pytestmark = pytest.mark.browser

LOOKS = [(1280, False, "screen"), (1280, True, "screen"), (800, True, "screen"), (400, False, "screen")]
LOOKS += [(320, True, "screen"), (700, True, "print")]

# Every visible text: its WCAG 2 contrast ratio, whether it leaves its chart, and its font size.
READ_TEXTS = """
(() => {
  const parse = (c) => { const m = c.match(/[\\d.]+/g).map(Number); return m.length > 3 ? m : [...m, 1]; };
  const linear = (v) => v <= 10.01 ? v / 3294.6 : ((v / 255 + 0.055) / 1.055) ** 2.4;
  const light = (c) => 0.2126 * linear(c[0]) + 0.7152 * linear(c[1]) + 0.0722 * linear(c[2]);
  const behind = (node) => { for (let n = node; n; n = n.parentElement) {
    const c = parse(getComputedStyle(n).backgroundColor); if (c[3] === 1) return c; } return [255, 255, 255, 1]; };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let t = walker.nextNode(); t; t = walker.nextNode()) {
    const node = t.parentElement;
    if (!t.textContent.trim() || ["SCRIPT", "STYLE", "title", "desc"].includes(node.tagName)) continue;
    const box = node.getBoundingClientRect();
    if (!box.width || !box.height || !node.checkVisibility()) continue;
    const svg = node.closest("svg"), style = getComputedStyle(node);
    const under = behind(node);
    let out = false;
    if (svg) {
      const frame = svg.getBoundingClientRect();
      const beyond = [frame.left - box.left, box.right - frame.right, frame.top - box.top, box.bottom - frame.bottom];
      out = Math.max(...beyond) > 1;
    }
    const front = parse(svg ? style.fill : style.color);
    const [a, b] = [light(front.slice(0, 3)), light(under.slice(0, 3))].sort((x, y) => y - x);
    found.push([t.textContent.slice(0, 60), (a + 0.05) / (b + 0.05), out, parseFloat(style.fontSize)]);
  }
  return found;
})()
"""

# Pairs of chart texts that overlap.
READ_OVERLAPS = """
(() => [...document.querySelectorAll("svg")].filter((s) => s.checkVisibility()).flatMap((svg) => {
  const texts = [...svg.querySelectorAll("text.axis, text.tick")];
  const boxes = texts.map((e) => [e.textContent, e.getBoundingClientRect()]);
  const across = (x, y) => Math.min(x.right, y.right) - Math.max(x.left, y.left);
  const down = (x, y) => Math.min(x.bottom, y.bottom) - Math.max(x.top, y.top);
  return boxes.flatMap(([a, x], i) => boxes.slice(i + 1).filter(([, y]) => across(x, y) > 2 && down(x, y) > 4)
    .map(([b]) => `${svg.querySelector("title").textContent}: ${a} / ${b}`));
}))()
"""

# The focused element; opens <details>, so that its content gets the focus next.
FOCUSED = """
(() => {
  const e = document.activeElement;
  if (e.tagName === "SUMMARY") e.parentNode.open = true;
  return [e.tagName, e.className, [...document.querySelectorAll("*")].indexOf(e)];
})()
"""


@pytest.fixture(scope="module")
def tab() -> Iterator[Tab]:
    with open_browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pages of all kinds of results, of sample results, of no results, and with hostile names."""
    folder = tmp_path_factory.mktemp("pages")
    hostile = replace(
        all_kinds()[0], rows=[replace(row, label=HOSTILE, drafter=HOSTILE) for row in all_kinds()[0].rows]
    )
    contents = {
        "all_kinds": all_kinds(),
        "sample": [sample_throughput(), sample_acceptance()],
        "nothing": [],
        "hostile": [replace(hostile, warnings=[HOSTILE * 3, "x" * 300], settings={HOSTILE: "y" * 300})],
    }
    for name, results in contents.items():
        sources = [ResultSource(f"{name}{i}", r) for i, r in enumerate(results)]
        title = HOSTILE if name == "hostile" else ReportSettings.title
        (folder / f"{name}.html").write_text(
            render_html(build_page(sources, ReportSettings(title=title))), encoding="utf-8"
        )
    return {name: folder / f"{name}.html" for name in contents}


def all_kinds() -> list[Results]:
    """Every kind of chart, many lines, and more warnings than the page shows at once."""
    rows = []
    for engine, load in product(("embedded", "http://localhost:8000/v1"), (1, 8, 64)):
        for method, k, gain in (
            ("none", None, 1),
            ("eagle3", 3, 1.9),
            ("p-eagle", 3, 2.1),
            ("p-eagle", 7, 2.9),
            ("p-eagle", "auto", 3),
        ):
            speed = 100 * load**0.8 * gain * (1 - load * (k if isinstance(k, int) else 0) / 900)
            rows.append(bench_row(method, k, load, speed, speed * 1.02, engine=engine))
    accepted = []
    for (name, method, temperature), k in product(
        product(("mt_bench", "humaneval"), ("p-eagle", "eagle3"), (0.0, 1.0)), (3, 7)
    ):
        for category, context in (
            (None, None),
            ("coding", None),
            ("writing", None),
            (None, (0, 512)),
            (None, (512, 1024)),
        ):
            counts = [int(900 * 0.7**i) for i in range(1, k + 1)]
            head = (
                f"llama-{method}",
                method,
                "embedded",
                name,
                category,
                context,
                temperature,
                k,
                "included",
                40,
                9000,
                1000,
            )
            accepted.append(AcceptanceRow(*head, counts, (1.2, 3.9)))
    tuned = [
        TuneRow(b, k, 4 + k * b / 40, 250 * b / (1 + k * b / 160), k == 3)
        for b, k in product((1, 2, 4, 8, 16, 32, 64, 128), (0, 1, 3, 7))
    ]
    planned = [
        PlanRow(load, k, method, 4.0, load * 200 * (1 + k / 4), 1, 9 / load, method == "p-eagle")
        for load, (method, k) in product((1, 8, 64), (("none", 0), ("eagle3", 3), ("p-eagle", 7)))
    ]
    return [
        replace(bench(*rows), warnings=[f"{engine} was warm: {'very ' * i}" for i, engine in enumerate("abcdefgh")]),
        Results("eval", PROVENANCE, {"max_tokens": 512}, accepted),
        Results("tune", PROVENANCE, {}, tuned),
        Results("plan", PROVENANCE, {"gpu": "h200"}, planned),
    ]


@pytest.mark.parametrize("name", ["all_kinds", "sample", "nothing", "hostile"])
def test_the_page_fits_is_readable_and_offline(tab: Tab, pages: dict[str, Path], name: str):
    tab.set_screen(1280)
    tab.open(pages[name])
    for width, dark, media in LOOKS:
        tab.set_screen(width, dark, media)
        where = f"{name}, {width} px, {'dark' if dark else 'light'}, {media}"
        assert tab.evaluate("document.documentElement.scrollWidth") <= width, f"{where}: scrolls sideways"
        texts = tab.evaluate(READ_TEXTS)
        assert len(texts) > 5
        dim = [(text, round(ratio, 2)) for text, ratio, _, _ in texts if ratio < 4.5]
        assert not dim, f"{where}: {dim[:5]}"
        assert not [text for text, _, outside, _ in texts if outside], where
        assert min(height for *_, height in texts) >= 10, where
        assert media == "print" or not tab.evaluate(READ_OVERLAPS), where
        if media == "print":
            assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not tab.console_messages, "nothing on the console"
    assert [url for url in tab.requests if not url.startswith("file://")] == [] and len(tab.requests) == 1


def test_network_requests_are_blocked_and_recorded(tab: Tab, tmp_path: Path):
    page = tmp_path / "asks.html"
    with socket.create_server(("127.0.0.1", 0)) as server:
        url_of_image = f"http://127.0.0.1:{server.getsockname()[1]}/x.png"
        page.write_text(f"<img src={url_of_image}><script>fail()</script>")
        tab.open(page)
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()
    assert tab.requests == [page.as_uri(), url_of_image]
    assert any(
        "ERR_INTERNET_DISCONNECTED" in message for message in tab.console_messages
    ) and "fail is not defined" in str(tab.console_messages)


def test_no_foreign_script_runs_and_the_page_needs_none(tab: Tab, pages: dict[str, Path]):
    tab.page.add_init_script("window.alert = () => { window.hit = true; };")
    tab.open(pages["hostile"])
    assert tab.evaluate("window.hit === undefined && document.scripts.length === 1")
    # An injected script does not run.
    tab.evaluate(
        "document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.hit = 1'}))"
    )
    assert tab.evaluate("window.hit === undefined")
    tab.set_screen(1280)
    tab.open(pages["all_kinds"])
    with_script = tab.page.locator("body").inner_text()
    with tab.page.context.browser.new_page(java_script_enabled=False, viewport={"width": 1280, "height": 900}) as plain:
        plain.goto(pages["all_kinds"].as_uri())
        assert plain.locator("body").inner_text() == with_script
        assert plain.locator(".hit > title").count() > 50, "values when pointed at, even so"


def test_hovering_a_point_shows_its_value(tab: Tab, pages: dict[str, Path]):
    tab.set_screen(1280)
    tab.open(pages["all_kinds"])
    tip = tab.page.locator("#tip")
    tab.page.locator(".hit:visible").first.hover()
    assert re.search(r"tokens/s \(95% ", tip.inner_text())
    box = tip.bounding_box()
    assert box is not None and 0 <= box["x"] and box["x"] + box["width"] <= 1280 and 0 <= box["y"]
    tab.page.mouse.move(1, 1)
    expect(tip).to_be_hidden()


def test_the_keyboard_reaches_every_table(tab: Tab, pages: dict[str, Path]):
    tab.set_screen(400)
    tab.open(pages["all_kinds"])
    summaries = tab.page.locator("summary").count()
    seen = set()
    for _ in range(3 * summaries + 60):
        tab.page.keyboard.press("Tab")
        seen.add(tuple(tab.evaluate(FOCUSED)))
    assert len([tag for tag, _, _ in seen if tag == "SUMMARY"]) == summaries
    assert len([name for _, name, _ in seen if name == "scroll"]) == tab.page.locator(".scroll").count()
    assert tab.evaluate("document.documentElement.scrollWidth") <= 400, "open tables scroll by themselves"


def test_the_printed_page_has_every_warning(tab: Tab, pages: dict[str, Path]):
    tab.set_screen(1280, dark=True)
    tab.open(pages["all_kinds"])
    warnings = "[...document.querySelectorAll('aside li')].map((e) => e.checkVisibility())"
    assert not all(tab.evaluate(warnings)), "some are folded away"
    printed = tab.page.pdf(format="A4", print_background=True, prefer_css_page_size=True)
    assert printed.startswith(b"%PDF") and 4 <= len(re.findall(rb"/Type\s*/Page\b", printed)) <= 20
    tab.set_screen(700, media="print")
    shown = tab.evaluate(warnings)
    assert len(shown) > 6 and all(shown)
