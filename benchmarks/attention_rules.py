"""Launches of paged attention worth trying, by shape and batch, and how rules that choose among them are scored.

For attention_launches.py and round.py. Times nothing and touches no GPU.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also where this file is imported from elsewhere
from kernel_attention import BLOCK, Model

from peagle.kernels.attention import paged_triton as kernels
from peagle.kernels.attention.paged import Pages
from peagle.kernels.attention.paged_launch import RULE, Launch, Rule, choose_launch, multiprocessors

Row = dict[str, Any]

COLUMNS = 2048  # of block tables
BOTH_FROM = 32  # requests, from which on launches for few and for many are compared


@dataclass(frozen=True)
class Shape(Model):
    window: int | None = None
    sinks: bool = False


BIG, SMALL = Shape("8b", 32, 8, 128), Shape("smollm2-135m", 9, 3, 64)
SUNK = Shape("gpt-oss-20b", 64, 8, 64, None, True)
WINDOWED = Shape("gpt-oss-20b window", 64, 8, 64, 128, True)
TOYS = (Shape("toy", 4, 2, 16), Shape("toy window", 4, 2, 16, 40, True))


@dataclass(frozen=True)
class Point:
    shape: Shape
    requests: int
    context: int
    rows: int

    @property
    def pairs(self) -> int:
        return self.requests * self.shape.kv_heads

    def contexts(self) -> list[int]:
        if self.requests == 1:
            return [self.context]
        gen = torch.Generator().manual_seed(self.context)
        return torch.randint(self.context * 7 // 8, self.context * 9 // 8, (self.requests,), generator=gen).tolist()

    def launch(self, rule: Rule, dtype: torch.dtype, device: torch.device) -> Launch:
        """As in an engine, which knows no context when it records its rounds."""
        tables = torch.empty(self.requests, COLUMNS, dtype=torch.int32, device="meta")
        pages = Pages(tables, tables[:, 0], tables[:, 0], self.rows)
        s = self.shape
        return choose_launch(pages, s.heads, s.kv_heads, s.width, BLOCK, dtype, device, rule)

    def __str__(self) -> str:
        return f"{self.shape.name:18}{self.requests:4} x {self.rows:<3}{self.context:6}"


@contextmanager
def ruled(rule: Rule) -> Iterator[None]:
    """Within it attention is launched by this rule, also in rounds that are recorded here and replayed later."""
    usual = kernels.choose_launch
    kernels.choose_launch = partial(choose_launch, rule=rule)
    try:
        yield
    finally:
        kernels.choose_launch = usual


@dataclass(frozen=True)
class Grid:
    programs: tuple[int, ...]
    kinds: tuple[tuple[int, bool, int], ...]  # stages, whether tiles are asked for ahead, registers
    fills: tuple[int, ...]
    reaches: tuple[int, ...]

    def rules(self) -> list[Rule]:
        each = [(reach, fill, *kind) for reach in self.reaches for fill in self.fills for kind in self.kinds]
        return list(dict.fromkeys([RULE, *(Rule(*values) for values in each)]))


# Never one stage: there the assembler of CUDA 12.8 loses an address (paged_attention_triton.py), and heads of 64 read
# what is not theirs.
KINDS = ((2, False, 0), (2, True, 0), (2, False, 128), (3, False, 0), (3, True, 0))
FULL = Grid((1, 2, 3, 4, 5, 6, 8, 12, 16), KINDS, (1, 2, 3, 4), (1, 2, 4))
TOY = Grid((1, 2), ((2, False, 0), (3, False, 0)), (1, 2), (1,))


def points_of(shapes: tuple[Shape, ...]) -> list[Point]:
    """The most important first."""
    first = [(BIG, 8), (BIG, 1), (SMALL, 8), (SMALL, 1), (SMALL, 16), (SMALL, 64)]
    found = [Point(shape, requests, 512, 8) for shape, requests in first]
    every = (8, 1, 64, 16, 32, 4, 2)
    for context in (512, 1024, 300, 4096):
        found += [Point(shape, requests, context, 8) for shape in shapes for requests in every]
        if context == 512:
            found += [Point(shape, 1, 16384, 8) for shape in shapes]
    found += [Point(shape, 64, context, 4) for context in (512, 1024, 300, 4096) for shape in shapes]
    return [p for p in dict.fromkeys(found) if p.shape in shapes]


def toy_points() -> list[Point]:
    return [*(Point(shape, 3, 90, 3) for shape in TOYS), Point(TOYS[0], 3, 40, 3), Point(TOYS[0], 1, 40, 3)]


def launches(point: Point, grid: Grid, dtype: torch.dtype, device: torch.device) -> list[Launch]:
    """The one in use first, those of the rules, and more numbers of programs: from so many that half of the processors
    have one, or every tile, up to one for every tile; and one for every share."""
    found = [point.launch(rule, dtype, device) for rule in grid.rules()]
    bases = [found[0]]
    if point.requests >= BOTH_FROM:
        bases += [point.launch(Rule(reach=reach), dtype, device) for reach in (0, max(grid.reaches))]
    seen = max(point.contexts()) + point.rows
    if point.shape.window is not None:
        seen = min(seen, point.shape.window + point.rows)
    for base in bases:
        tiles = triton.cdiv(seen, base.tile)
        least = min(tiles, triton.cdiv(multiprocessors(device), 2 * point.pairs))
        most = min((n for n in grid.programs if n >= tiles), default=base.splits)
        counts = [n for n in grid.programs if least <= n <= min(most, base.splits)]
        for stages, asks, registers in grid.kinds:
            ahead = 256 // base.tile if asks and base.splits > 1 else 0
            changed = replace(base, stages=stages, ahead=ahead, registers=registers)
            found += [replace(changed, programs=n) for n in (*counts, base.splits)]
    return list(dict.fromkeys(found))


def label(rule: Rule) -> str:
    if rule == RULE:
        return "in use"
    more = f", {rule.registers} registers" if rule.registers else ""
    more += "" if rule.steady == RULE.steady else ", steady" if rule.steady else ", not steady"
    ahead = "as usual" if rule.ahead is None else int(rule.ahead)
    return f"reach {rule.reach} fill {rule.fill} stages {rule.stages or 'as usual'} ahead {ahead}{more}"


def mean(ratios: list[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def score(points: list[Row], rules: list[Rule]) -> list[Row]:
    """Of each rule, the best first: times over those of the launch in use. A rule whose launch did not run at some
    point comes behind all that ran everywhere."""
    found = []
    for rule in rules:
        ran = [(p["rules"][label(rule)] / p["in_use_us"], p) for p in points if label(rule) in p["rules"]]
        if not ran:
            continue
        worst, where = max(ran, key=lambda x: x[0])
        shapes = {name: mean([r for r, p in ran if p["shape"] == name]) for name in {p["shape"]: 0 for _, p in ran}}
        row: Row = {"rule": asdict(rule), "label": label(rule), "mean": mean([r for r, _ in ran]), "worst": worst}
        at = f"{where['shape']} {where['requests']} x {where['rows']} at {where['context']}"
        found.append(row | {"worst_at": at, "shapes": shapes, "missing": len(points) - len(ran)})
    return sorted(found, key=lambda r: (r["missing"], r["mean"]))


def launch_of(row: Row) -> Launch:
    return Launch(**{name: row[name] for name in Launch.__dataclass_fields__})


def steadiest(points: list[Row]) -> list[Row]:
    """Of each batch the launch that is best over all its contexts, among those timed at all of them."""
    batches: dict[tuple[str, int, int], list[Row]] = {}
    for p in points:
        batches.setdefault((p["shape"], p["requests"], p["rows"]), []).append(p)
    found = []
    for (shape, requests, rows), every in batches.items():
        ratios: dict[Launch, list[float]] = {}
        for p in every:
            for row in p["launches"]:
                ratios.setdefault(launch_of(row), []).append(row["us"] / p["in_use_us"])
        best = min((x for x in ratios if len(ratios[x]) == len(every)), key=lambda x: mean(ratios[x]))
        row = {"shape": shape, "requests": requests, "rows": rows, "contexts": sorted(p["context"] for p in every)}
        found.append(row | {"mean": mean(ratios[best]), "worst": max(ratios[best])} | asdict(best))
    return found


def short(row: Row) -> str:
    more = f" registers {row['registers']}" if row["registers"] else ""
    kind = f"tile {row['tile']:<3} splits {row['splits']:<2}"
    return f"{kind} programs {row['programs']:<2} stages {row['stages']} ahead {row['ahead']}{more}"
