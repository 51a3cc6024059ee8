"""Reads a report back: HTML with the standard parser, SVG as XML, and chart values by the ticks of their axes.

Also has sample results. Does not use the code that writes reports.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from html.parser import HTMLParser
from xml.etree import ElementTree

from peagle.results.provenance import Provenance
from peagle.results.schema import AcceptanceRow, BenchRepeat, BenchRow, Results

VOID = {"meta", "link", "br", "img", "input", "hr"}
PROVENANCE = Provenance(
    "peagle bench -t T", "0" * 40, {"peagle": "0.1.0"}, {"gpu": "NVIDIA H200"}, "2026-01-02T03:04:05+00:00", 9
)


@dataclass
class Node:
    tag: str
    attributes: dict[str, str | None]
    children: list[Node | str] = field(default_factory=list)

    def all(self, tag: str | None = None, **attributes: str) -> list[Node]:
        """Descendants by tag and attributes; `class_` is one of the classes."""
        found = []
        for child in self.children:
            if isinstance(child, Node):
                if tag in (None, child.tag) and all(child.has(name, value) for name, value in attributes.items()):
                    found.append(child)
                found += child.all(tag, **attributes)
        return found

    def has(self, name: str, value: str) -> bool:
        if name == "class_":
            return value in (self.attributes.get("class") or "").split()
        return self.attributes.get(name) == value

    @property
    def text(self) -> str:
        return "".join(child if isinstance(child, str) else child.text for child in self.children)

    @property
    def rows(self) -> list[list[str]]:
        """Rows of a table, the headings first."""
        return [[cell.text for cell in row.children if isinstance(cell, Node)] for row in self.all("tr")]


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.root = Node("root", {})
        self.open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        node = Node(tag, dict(attrs))
        self.open[-1].children.append(node)
        if tag not in VOID:
            self.open.append(node)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open[-1].children.append(Node(tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1].tag == tag, f"</{tag}> closes <{self.open[-1].tag}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.open[-1].children.append(data)


def read_page(html: str) -> Node:
    """Parses HTML. Every tag must be closed, in order."""
    reader = _Reader()
    reader.feed(html)
    reader.close()
    assert reader.open == [reader.root], f"never closed: {[node.tag for node in reader.open[1:]]}"
    return reader.root


def charts(html: str) -> list[ElementTree.Element]:
    """The charts as XML. Raises if one is not well-formed."""
    return [ElementTree.fromstring(svg) for svg in re.findall(r'<svg class="chart".*?</svg>', html, re.S)]


def number(text: str) -> float:
    value = float(text.rstrip("%×").replace(",", ""))
    return value / 100 if text.endswith("%") else value


def read_values(chart: ElementTree.Element) -> dict[str, list[tuple[float, float]]]:
    """The points of each line, by its style class, computed from pixels and ticks."""
    ticks = [e for e in chart.iter("text") if "tick" in e.get("class", "")]
    ups = [(float(e.get("y", "")), number(e.text or "")) for e in ticks if "end" in e.get("class", "")]
    alongs = [(float(e.get("x", "")), number(e.text or "")) for e in ticks if "mid" in e.get("class", "")]
    to_y, to_x = _scale(ups), _scale(alongs)
    found = {}
    for group in chart.iter("g"):
        hits = [e for e in group if e.get("class") == "hit"]
        if hits:
            found[group.get("class", "")] = [(to_x(float(h.get("cx", ""))), to_y(float(h.get("cy", "")))) for h in hits]
    return found


def _scale(ticks: list[tuple[float, float]]) -> Callable[[float], float]:
    """A linear or logarithmic scale, whichever fits the inner ticks."""
    (first, low), *between, (last, high) = (
        sorted(ticks) if len(ticks) > 1 else [ticks[0], (ticks[0][0] + 1, ticks[0][1])]
    )

    def linear(pixel: float) -> float:
        return low + (high - low) * (pixel - first) / (last - first)

    def log(pixel: float) -> float:
        return low * (high / low) ** ((pixel - first) / (last - first))

    if low > 0 and high > 0 and between:
        errors = [sum(abs(scale(pixel) - value) for pixel, value in between) for scale in (linear, log)]
        return linear if errors[0] < errors[1] else log
    return linear


def sample_acceptance() -> Results:
    """A small P-EAGLE drafter: 8 responses of 64 tokens from each of three data sets."""
    counts = {
        "mt_bench": (365, [123, 18, 2, 0, 0, 0, 0]),
        "humaneval": (271, [169, 50, 16, 5, 3, 0, 0]),
        "gsm8k": (251, [170, 60, 15, 5, 4, 4, 4]),
    }
    rows = []
    for name, (num_drafts, accepted) in counts.items():
        for k in (1, 3, 5, 7):
            head = ("smollm2-135m-p-eagle", "p-eagle", "embedded", name, None, None, 0.0, k, "included")
            rows.append(AcceptanceRow(*head, 8, 512, num_drafts, accepted[:k]))
    provenance = Provenance("peagle eval", "35d8bc5", {"torch": "2.13.0+cpu"}, {"cpu": "aarch64"}, "2026-01-02", 647)
    return Results("eval", provenance, {"max_tokens": 64}, rows)


# engine, method, K, concurrency, output tokens and seconds of each repeat: an 8B shape on one H200
SAMPLE_RUNS = [
    ("embedded", "none", None, 1, 512, (2.086, 2.086, 2.087)),
    ("embedded", "p-eagle", 7, 1, 2048, (3.028, 3.074, 3.075)),
    ("embedded", "p-eagle", 7, 8, 2048, (0.534, 0.512, 0.576)),
    ("embedded", "p-eagle", "auto", 64, 16384, (1.503, 1.456, 1.477)),
    ("http://localhost:8000/v1", "none", None, 1, 512, (2.452, 2.451, 2.453)),
    ("http://localhost:8000/v1", "none", None, 64, 16384, (1.925, 1.926, 1.915)),
    ("http://localhost:8000/v1", "p-eagle", 7, 1, 2048, (3.549, 3.836, 3.676)),
    ("http://localhost:8000/v1", "p-eagle", 7, 8, 2048, (0.96, 0.919, 0.59)),
    ("http://localhost:8000/v1", "p-eagle", 7, 64, 16384, (1.936, 1.945, 1.899)),
    ("http://localhost:8000/v1", "p-eagle", 5, 64, 16384, (2.128, 1.733, 1.711)),
    ("http://localhost:8000/v1", "p-eagle", 3, 64, 16384, (1.572, 1.826, 1.505)),
    ("http://localhost:8000/v1", "eagle3", 3, 64, 16384, (1.464, 1.476, 1.462)),
]


def sample_throughput() -> Results:
    """Two engines without latencies."""
    rows = []
    for engine, method, k, concurrency, num_tokens, durations in SAMPLE_RUNS:
        repeats = [
            BenchRepeat(seconds, num_tokens // 256, {}, 0, num_tokens, None, None, None, None, 3.4)
            for seconds in durations
        ]
        drafter = None if method == "none" else "8b"
        label = f"{engine} {method} {k}"
        rows.append(BenchRow(label, engine, drafter, method, k, concurrency, None, repeats, "a" * 64))
    machine = {"gpu": "NVIDIA H200", "cuda": "13.0"}
    provenance = Provenance("peagle bench TARGET", "edd1893", {"vllm": "0.26.0"}, machine, "2026-01-02", 423)
    return Results("bench", provenance, {}, rows)


def is_inside(chart: ElementTree.Element) -> bool:
    """Whether all coordinates are finite and inside the view box."""
    _, _, width, height = map(float, chart.get("viewBox", "").split())
    for element in chart.iter():
        for name, limit in (("x", width), ("x1", width), ("x2", width), ("cx", width)) + tuple(
            (name, height) for name in ("y", "y1", "y2", "cy")
        ):
            value = element.get(name)
            if value is not None and not (math.isfinite(float(value)) and -0.5 <= float(value) <= limit + 0.5):
                return False
        if re.search(r"nan|inf", element.get("d", "") + element.get("points", "")):
            return False
    return True
