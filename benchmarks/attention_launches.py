"""Which launches of paged attention are fastest on this GPU, and which simple rule for choosing them.

    python benchmarks/attention_launches.py --budget 300 --out launches.json
    python benchmarks/attention_launches.py --rounds --of launches.json --out rounds.json

The first times attention with its rotation, behind a kernel that writes the merged product, as kernel_attention.py
does: in a graph of dependent launches over enough different pages to miss the L2, here with tables as wide as an
engine's and contexts that vary by an eighth. For each point: the launch in use, and others that differ in what is for
speed alone: programs, stages, tiles asked for ahead, registers. What decides bits stays as `choose_launch` has it, for
32 requests and more both as it is for few and as it is for many. Every output is compared with that of the first launch
that adds up alike, to the bit.

A recorded round serves all contexts, so what matters in the end is one launch for all contexts of a batch (the second
table), and a `Rule` for all batches and shapes (the third): times over those of the launch in use, geometric means.

The second command times whole recorded rounds under the rule in use, with its shares held or let go, and under the
best of the first command's, in turns. Points come by importance until the budget is spent. Prints as it goes, the file
given by --out is rewritten after every point, and the last line is one short JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also where this file is imported from elsewhere
import round as rounds_of
from attention_rules import (
    BIG,
    COLUMNS,
    FULL,
    SMALL,
    SUNK,
    TOY,
    TOYS,
    WINDOWED,
    Grid,
    Point,
    Row,
    Shape,
    label,
    launch_of,
    launches,
    points_of,
    ruled,
    score,
    short,
    steadiest,
    toy_points,
)
from kernel_attention import BLOCK, COLD_BYTES, DTYPE, _copy_kernel, say, seconds

from peagle.config import LayerConfig
from peagle.engine.cuda_graphs import RoundGraphs
from peagle.engine.model_runner import Runner
from peagle.kernels.attention import paged_triton as kernels
from peagle.kernels.attention.paged import Pages
from peagle.kernels.attention.paged_launch import RULE, Launch, Rule
from peagle.kernels.attention.rotary import Rotation
from peagle.kernels.triton_utils import INTERPRETED
from peagle.results.stamp import Stamp

MOST_COPIES = 192  # of a point's pages
TIMED = 0.002  # seconds, of each of three timings


class Chain:
    """Attention of one point, each time over other pages, behind a kernel that writes what it reads."""

    def __init__(self, point: Point, dtype: torch.dtype, device: torch.device, most_copies: int) -> None:
        s, total = point.shape, point.requests * point.rows
        self.point = point
        gen = torch.Generator(device).manual_seed(0)
        like: dict[str, Any] = {"dtype": dtype, "device": device}
        contexts = point.contexts()
        each = [triton.cdiv(n + point.rows, BLOCK) for n in contexts]
        read = sum(min(n, s.window or n) + point.rows for n in contexts) * 2 * s.kv_heads * s.width * dtype.itemsize
        copies = max(1, min(most_copies, math.ceil(COLD_BYTES / read)))
        shape = (copies * sum(each), BLOCK, s.kv_heads, s.width)
        self.cache_k, self.cache_v = (torch.empty(shape, **like).normal_(generator=gen) for _ in range(2))
        order = torch.randperm(shape[0], generator=gen, device=device).int().split(each * copies)
        starts = torch.tensor(contexts, dtype=torch.int32, device=device)
        live = torch.full_like(starts, point.rows)
        self.pages = []
        for i in range(copies):
            tables = torch.zeros(point.requests, COLUMNS, dtype=torch.int32, device=device)
            for b, blocks in enumerate(order[i * point.requests : (i + 1) * point.requests]):
                tables[b, : len(blocks)] = blocks
            self.pages.append(Pages(tables, starts, live, point.rows))
        merged = torch.empty(total, (s.heads + 2 * s.kv_heads) * s.width, **like)
        self.source, self.qkv = merged.normal_(generator=gen), torch.empty_like(merged)
        angles = 6 * torch.rand(total, 1, s.width // 2, generator=gen, device=device)
        cos, sin = (torch.cat([x, x], -1).to(dtype) for x in (angles.cos(), angles.sin()))
        self.rotation = Rotation(cos, sin)
        self.sinks = torch.empty(s.heads, **like).normal_(generator=gen) if s.sinks else None
        self.before_s: float | None = None

    def before(self) -> None:
        if self.qkv.is_cuda:
            copy(self.source, self.qkv)
        else:
            self.qkv.copy_(self.source)

    def attend(self, pages: Pages, launch: Launch) -> Tensor:
        """PDL as in rounds; the launcher knows where there is none."""
        s = self.point.shape
        self.before()
        q, k, v = self.qkv.unflatten(1, (-1, s.width)).split((s.heads, s.kv_heads, s.kv_heads), 1)
        args = (q, k, v, self.cache_k, self.cache_v, pages, s.window, True, launch, self.rotation, self.sinks)
        return kernels.paged_attention_triton(*args)

    def us(self, launch: Launch) -> float:
        """Of attention alone."""
        clock = partial(seconds, least=TIMED) if self.qkv.is_cuda else wall
        if self.before_s is None:
            self.before_s = clock([self.before] * len(self.pages))
        return 1e6 * (clock([partial(self.attend, pages, launch) for pages in self.pages]) - self.before_s)


def copy(source: Tensor, to: Tensor) -> None:
    count = source.numel()
    _copy_kernel[(triton.cdiv(count, 1024),)](source, to, COUNT=count, launch_pdl=True)


def wall(calls: list[Callable[[], Any]]) -> float:
    began = time.perf_counter()
    for call in calls:
        call()
    return (time.perf_counter() - began) / len(calls)


def measured(chain: Chain, tried: list[Launch], failed: list[str]) -> list[Row]:
    """Of each launch: its time, and whether its bits are those of the first that adds up alike. The first one is timed
    once more at the end, as clocks drift."""
    first: dict[tuple[int, ...], Tensor] = {}
    rows: dict[Launch, Row] = {}
    for launch in (*tried, tried[0]):
        try:
            if launch not in rows:
                out = chain.attend(chain.pages[0], launch)
                same = torch.equal(out, first.setdefault((launch.tile, launch.splits, launch.warps), out))
                rows[launch] = {**asdict(launch), "us": round(chain.us(launch), 3), "same_bits": same}
            else:
                before = rows[launch]["us"]
                rows[launch] |= {"first_us": before, "us": min(before, round(chain.us(launch), 3))}
        except Exception as error:
            failed.append(f"{chain.point} {launch}: {type(error).__name__}: {error}".splitlines()[0][:300])
            say(f"  FAILED {failed[-1]}")
    return list(rows.values())


def compile_one(job: tuple[Shape, int, Launch] | int) -> str:
    """In a process of its own: one tiny call, whose kernels the other processes then find in Triton's cache."""
    device = torch.device("cuda")
    try:
        if isinstance(job, int):
            copy(*torch.empty(2, job, dtype=DTYPE, device=device))
        else:
            shape, rows, launch = job
            chain = Chain(Point(shape, 1, 100, rows), DTYPE, device, most_copies=1)
            chain.attend(chain.pages[0], launch)
        torch.cuda.synchronize()
        return ""
    except Exception as error:
        return f"{job}: {error}".splitlines()[0][:300]


def compile_ahead(wanted: list[tuple[Point, list[Launch]]], workers: int) -> None:
    """Kernels are made for programs that have one share at most, or for those that may have several."""
    jobs: dict[tuple[Shape, int, Launch] | int, None] = {}
    for point, tried in wanted:
        shape = point.shape
        jobs[point.requests * point.rows * (shape.heads + 2 * shape.kv_heads) * shape.width] = None
        for launch in tried:
            programs = launch.splits if launch.programs >= launch.splits else 1
            jobs[shape, point.rows, replace(launch, programs=programs)] = None
    # Rows count only by the queries of a launch.
    unique = {job if isinstance(job, int) else (job[0], job[2]): job for job in jobs}
    began = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(min(workers, len(unique))) as pool:
        errors = [error for error in pool.imap_unordered(compile_one, unique.values()) if error]
    say(f"{len(unique)} kernels compiled in {time.monotonic() - began:.0f} s", *errors)


@dataclass
class Setting:
    device: torch.device
    dtype: torch.dtype
    toy: bool
    workers: int
    deadline: float
    out: Path | None
    results: Row

    def save(self) -> None:
        if self.out is not None:
            # What a rule took at a point is what its launch took.
            points = [{k: v for k, v in p.items() if k != "rules"} for p in self.results.get("points", ())]
            self.out.write_text(json.dumps(self.results | {"points": points}) + "\n")


def search(setting: Setting, points: list[Point], grid: Grid) -> None:
    wanted = [(p, launches(p, grid, setting.dtype, setting.device)) for p in points]
    results, rules = setting.results, grid.rules()
    rows: list[Row] = []
    results |= {"points": rows, "failed": []}
    if setting.workers:
        compile_ahead(wanted, setting.workers)
    say(f"{'':18}requests x rows, context | in use us | best us, over it: its launch")
    for point, tried in wanted:
        if time.monotonic() > setting.deadline:
            say(f"(out of time: {len(wanted) - len(rows)} points left out)")
            break
        chain = Chain(point, setting.dtype, setting.device, 1 if setting.toy else MOST_COPIES)
        found = measured(chain, tried, results["failed"])
        if not found or launch_of(found[0]) != tried[0]:
            continue  # the launch in use failed, which has been said
        took, best = {launch_of(row): row["us"] for row in found}, min(found, key=lambda row: row["us"])
        chosen = {label(rule): point.launch(rule, setting.dtype, setting.device) for rule in rules}
        row: Row = {"shape": point.shape.name, "requests": point.requests, "context": point.context, "rows": point.rows}
        row |= {"in_use_us": found[0]["us"], "launches": found}
        row["rules"] = {name: took[launch] for name, launch in chosen.items() if launch in took}
        rows.append(row)
        setting.save()
        say(
            f"{point} | {row['in_use_us']:7.2f} | {best['us']:7.2f} {best['us'] / row['in_use_us']:5.2f}: {short(best)}"
        )
        for other in found:
            if not other["same_bits"]:
                say(f"  OTHER BITS: {short(other)}")
    summary(results, rules)


def summary(results: Row, rules: list[Rule]) -> None:
    points = results["points"]
    results |= {"batches": steadiest(points), "rules": score(points, rules)}
    say("\none launch for all contexts of a batch, over the one in use: mean, worst")
    for row in results["batches"]:
        where = f"{row['shape']:18}{row['requests']:4} x {row['rows']:<3}"
        say(f"{where} {row['mean']:5.2f} {row['worst']:5.2f}: {short(row)}")
    names = list(dict.fromkeys(p["shape"] for p in points))
    say(f"\nrules: mean, worst, mean of {', '.join(names)}")
    for i, row in enumerate(results["rules"]):
        if i < 24 or row["label"] == "in use":
            each = " ".join(f"{row['shapes'].get(name, math.nan):5.2f}" for name in names)
            gone = f", {row['missing']} missing" if row["missing"] else ""
            said = f"{row['mean']:5.3f} {row['worst']:5.2f} | {each} | {row['label']}"
            say(f"{said} (worst: {row['worst_at']}{gone})")


DRAFTS, CONTEXT, LONGEST = 7, 512, 8192
TURNS = 5
ROUNDS = {"8b": (BIG, (1, 4, 8, 16)), "smollm2": (SMALL, (1, 8, 16, 32, 64))}
TOY_MODEL = (LayerConfig(64, 64, 4, 2, 16, 1e-5), 6, 128, False)  # as round.py has them
GUESSES = (  # tried without the first command's results
    Rule(fill=1, stages=2, ahead=True),
    Rule(fill=1, stages=2, ahead=False),
    Rule(fill=2, stages=2, ahead=False),
    Rule(reach=2, fill=2, stages=2, ahead=False, registers=128),
)


@dataclass
class Unrecorded:
    """Stands for a recorded round where nothing can be recorded."""

    runner: Runner
    slots_B: Tensor

    def replay(self) -> None:
        self.runner.round(self.slots_B, DRAFTS)


class Rounds:
    """Requests with as much context each, in a cache filled with noise."""

    def __init__(self, shape: str, most: int, device: torch.device) -> None:
        target, drafter = rounds_of.build(shape, 4, True, device)
        per = -(-(CONTEXT + 64) // BLOCK)  # the rounds of one timing add to the context
        self.device = device
        self.runner = Runner(target, drafter, 1 + most * per, most, LONGEST, DRAFTS, [0.0] * DRAFTS)
        rounds_of.fill(self.runner.cache)
        order = torch.randperm(most * per, device=device).view(most, per)
        self.runner.state.block_tables_SM[:most, :per] = 1 + order.int()

    def record(self, batch: int, rule: Rule) -> Any:
        slots = torch.arange(batch, device=self.device)
        if self.device.type != "cuda":
            return Unrecorded(self.runner, slots)
        with ruled(rule):
            graphs = RoundGraphs(self.runner, [batch], [DRAFTS])
            graphs.capture()
        graphs.rounds[batch, DRAFTS].slots_B.copy_(slots)
        return graphs.rounds[batch, DRAFTS]

    def ms(self, recorded: Any) -> float:
        self.runner.state.start_S[:-1] = CONTEXT
        return rounds_of.timed(recorded) if self.device.type == "cuda" else 1e3 * wall([recorded.replay])


def rules_for(name: str, ranked: list[Row], top: int, used: Callable[[Rule], tuple[Launch, ...]]) -> list[Rule]:
    """The rule in use and the best for a shape, each of which comes to other launches in these rounds."""
    ranked = sorted(ranked, key=lambda row: (row["missing"], row["shapes"].get(name, math.inf)))
    found: dict[tuple[Launch, ...], Rule] = {}
    other = replace(RULE, steady=not RULE.steady)  # other bits, so the search has none of it
    for rule in (RULE, other, *([Rule(**row["rule"]) for row in ranked] if ranked else GUESSES)):
        found.setdefault(used(rule), rule)
    return list(found.values())[: 1 + top]


def whole_rounds(setting: Setting, only: tuple[Shape, ...], ranked: list[Row], top: int) -> None:
    known = {"toy": (TOYS[0], (1, 3))} if setting.toy else ROUNDS
    shapes = {name: found for name, found in known.items() if found[0] in only}
    if not shapes:
        sys.exit(f"--rounds: none of these shapes; there are {', '.join(s.name for s, _ in known.values())}")
    rounds_of.SHAPES |= {"toy": TOY_MODEL} if setting.toy else {}
    tried: dict[str, list[Rule]] = {}
    wanted = []
    for name, (shape, batches) in shapes.items():
        passes = [Point(shape, b, CONTEXT, rows) for b in batches for rows in (DRAFTS + 1, 2 * DRAFTS)]

        def used(rule: Rule, passes: list[Point] = passes) -> tuple[Launch, ...]:
            return tuple(p.launch(rule, setting.dtype, setting.device) for p in passes)

        tried[name] = rules_for(shape.name, ranked, top, used)
        for at, point in enumerate(passes):
            wanted.append((point, list(dict.fromkeys(used(rule)[at] for rule in tried[name]))))
    if setting.workers:
        compile_ahead(wanted, setting.workers)
    setting.results["rounds"] = []
    for name, (_, batches) in shapes.items():
        rounds = Rounds(name, max(batches), setting.device)
        say(f"{name}: ms of a round with {DRAFTS} drafts at {CONTEXT}, over that of the rule in use")
        for batch in batches:
            recorded = [rounds.record(batch, rule) for rule in tried[name]]
            turns = [[rounds.ms(one) for one in recorded] for _ in range(TURNS)]
            best = [min(times) for times in zip(*turns, strict=True)]
            for rule, ms in zip(tried[name], best, strict=True):
                row = {"shape": name, "requests": batch, "rule": asdict(rule), "label": label(rule), "ms": ms}
                setting.results["rounds"].append(row | {"ratio": ms / best[0]})
                say(f"{batch:4} requests {ms:8.4f} {ms / best[0]:6.3f}  {label(rule)}")
            setting.save()


@torch.inference_mode()
def main(argv: list[str] | None = None) -> Row:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file, rewritten after every point")
    parser.add_argument("--budget", type=float, default=100, help="seconds after which points are left out")
    parser.add_argument("--workers", type=int, default=14, help="processes that compile ahead; 0: none")
    parser.add_argument("--shapes", nargs="+", help="names; all unless given")
    parser.add_argument("--rounds", action="store_true", help="whole rounds, under the best rules")
    parser.add_argument("--of", type=Path, help="for --rounds: the file that the search wrote; a few guesses without")
    parser.add_argument("--top", type=int, default=4, help="for --rounds: how many rules besides the one in use")
    parser.add_argument("--toy", action="store_true", help="tiny shapes, also in Triton's interpreter")
    args = parser.parse_args(argv)
    cuda = torch.cuda.is_available()
    if not cuda and not (args.toy and INTERPRETED):
        sys.exit("needs a CUDA device, or --toy and TRITON_INTERPRET=1")
    known = TOYS if args.toy else (BIG, SMALL, SUNK, WINDOWED)
    shapes = tuple(s for s in known if args.shapes is None or s.name in args.shapes)
    if not shapes:
        sys.exit(f"--shapes {' '.join(args.shapes)}: none of {', '.join(s.name for s in known)}")
    stamp = Stamp.now(" ".join(["python", *sys.argv]))
    results: Row = {"bench": "attention_launches", "command": stamp.command, "commit": stamp.commit}
    results |= {"torch": torch.__version__, "triton": triton.__version__}
    results["gpu"] = torch.cuda.get_device_name() if cuda else "none: interpreted"
    device, dtype = (torch.device("cuda"), DTYPE) if cuda else (torch.device("cpu"), torch.float32)
    deadline = time.monotonic() + args.budget
    setting = Setting(device, dtype, args.toy, args.workers if cuda else 0, deadline, args.out, results)
    torch.manual_seed(0)
    if args.rounds:
        ranked = json.loads(args.of.read_text())["rules"] if args.of else []
        whole_rounds(setting, shapes, ranked, args.top)
    else:
        search(setting, toy_points() if args.toy else points_of(shapes), TOY if args.toy else FULL)
    results["seconds"] = round(args.budget - (deadline - time.monotonic()), 1)
    setting.save()
    line = {k: v for k, v in results.items() if not isinstance(v, list)}
    print(json.dumps(line | {"best_rules": [row["label"] for row in results.get("rules", ())[:5]]}), flush=True)
    return results


if __name__ == "__main__":
    main()
