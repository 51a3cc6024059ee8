"""A report read the way a person reads it: sections, tables and charts out of the page, values off the axes.

Knows nothing about how pages are made: HTML by the standard parser, SVG as XML, values by the ticks beside them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

from peagle.results.provenance import Provenance
from peagle.results.schema import AcceptanceRow, BenchRepeat, BenchRow, Results

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
VOID = {"meta", "link", "br", "img", "input", "hr"}
STAMP = Provenance(
    "peagle bench -t T", "0" * 40, {"peagle": "0.1.0"}, {"gpu": "NVIDIA H200"}, "2026-01-02T03:04:05+00:00", 9
)


@dataclass
class Node:
    tag: str
    attributes: dict[str, str | None]
    children: list[Node | str] = field(default_factory=list)

    def all(self, tag: str | None = None, **attributes: str) -> list[Node]:
        """Below it; `class_` is one of its classes."""
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
        """Of a table, its headings first."""
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
    """Every tag that is opened has to be closed, in order."""
    reader = _Reader()
    reader.feed(html)
    reader.close()
    assert reader.open == [reader.root], f"never closed: {[node.tag for node in reader.open[1:]]}"
    return reader.root


def charts(html: str) -> list[ElementTree.Element]:
    """As XML: what is not well-formed raises."""
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", html, re.S)]


def number(text: str) -> float:
    value = float(text.rstrip("%×").replace(",", ""))
    return value / 100 if text.endswith("%") else value


def values_read(chart: ElementTree.Element) -> dict[str, list[tuple[float, float]]]:
    """Of each line (by its style) the points, read off the axes by two of their ticks."""
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
    """Linear or logarithmic, whichever the ticks between the ends agree with."""
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


def measured_acceptance() -> Results:
    """What was once measured of a small P-EAGLE drafter: 8 answers of 64 tokens from each set."""
    counts = {
        "mt_bench": (365, [123, 18, 2, 0, 0, 0, 0]),
        "humaneval": (271, [169, 50, 16, 5, 3, 0, 0]),
        "gsm8k": (251, [170, 60, 15, 5, 4, 4, 4]),
    }
    rows = []
    for name, (rounds, accepted) in counts.items():
        for k in (1, 3, 5, 7):
            head = ("smollm2-135m-p-eagle", "p-eagle", "embedded", name, None, None, 0.0, k, "included")
            rows.append(AcceptanceRow(*head, 8, 512, rounds, accepted[:k]))
    stamp = Provenance("peagle eval", "35d8bc5", {"torch": "2.13.0+cpu"}, {"cpu": "aarch64"}, "2026-01-02", 647)
    return Results("eval", stamp, {"max_tokens": 64}, rows)


METHODS = {
    "none": ("none", None),
    "p7": ("p-eagle", 7),
    "p5": ("p-eagle", 5),
    "p3": ("p-eagle", 3),
    "e3": ("eagle3", 3),
}


def measured_speed() -> Results:
    """What was measured on an H200 of the 8B shape, this engine beside another one; latencies were not kept."""
    kept = json.loads((RESULTS / "h200-serving.json").read_text())
    rows = []
    for name, loads in kept["measurements"].items():
        engine, _, what = name.partition("/8b-")
        if what not in (*METHODS, "auto"):
            continue
        method, k = METHODS.get(what, ("p-eagle", "auto"))
        for load, measured in loads.items():
            if not re.fullmatch(r"c\d+", load):
                continue
            repeats = [
                BenchRepeat(
                    turn["seconds"], measured["requests"], {}, 0, turn["tokens"], None, None, None, None, turn["al"]
                )
                for turn in measured["turns"]
            ]
            drafter = None if method == "none" else "8b"
            engine_row = "embedded" if engine == "peagle" else "http://localhost:8000/v1"
            rows.append(BenchRow(name, engine_row, drafter, method, k, int(load[1:]), None, repeats, "a" * 64))
    call = kept["calls"][0]
    machine = {"gpu": call["machine"]["gpu"], "cuda": call["machine"]["cuda"]}
    return Results(
        "bench", Provenance(call["command"], call["commit"], call["versions"], machine, "2026-01-02", 423), {}, rows
    )


def finite(chart: ElementTree.Element) -> bool:
    """All that is drawn has a place, and it lies on the paper."""
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
