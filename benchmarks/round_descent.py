"""Tiles of SmolLM2's products, looked for in whole rounds: one shape's configuration is changed at a time.

    python benchmarks/round_descent.py --seconds 240 --out descent.json

About the products of SmolLM2-135M's layers alone, which launches and latencies decide: what is best in a chain of
products (kernel_linear.py --descend) is not always best between attentions that overlap with it. Random weights and a
drafter of 4 layers, as in round.py. A shape has three configurations in TUNED, by its rows: each is looked for in
recorded rounds that have so many, and has an even part of the seconds; `--only` leaves the others as they are. What
makes these rounds faster twice is kept, until nothing does. Only configurations of one `kind` are tried, which round
alike; that they do is invariance.py's to say.

Prints as it goes, then lines to be put into TUNED in peagle/kernels/linear_shapes.py; changes no file but the one given
by --out, which is rewritten after every step. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also where this file is imported from elsewhere
from kernel_linear import Job, Shape, chain_jobs, fits, precompile, say
from round import build, fill, shape_config, timed

from peagle.engine.cuda_graphs import RoundGraphs
from peagle.engine.model_runner import Runner
from peagle.kernels.gemm import linear_triton
from peagle.kernels.gemm import tile_configs as shapes
from peagle.kernels.gemm.tile_configs import Config

SHAPE = "smollm2"
BASES = ("FEW_SMALL", "SOME_SMALL", "MANY_SMALL")  # what the configurations of a shape are written as changes of
ROUNDS = (((1, 7),), ((8, 7), (16, 7)), ((64, 3), (64, 7)))  # for each of them: requests, and drafts of each
TILES = (  # block_m, block_n, warps
    ((8, 16, 1), (8, 16, 2), (8, 16, 4), (16, 16, 1), (8, 32, 2)),
    ((16, 16, 1), (32, 16, 2), (16, 32, 2), (64, 16, 4), (32, 32, 4), (32, 16, 1)),
    (
        (64, 32, 4),
        (32, 32, 2),
        (128, 32, 4),
        (64, 16, 2),
        (32, 16, 2),
        (128, 32, 8),
        (64, 32, 8),
        (128, 16, 4),
        (256, 16, 8),
    ),
)
MOST, DRAFTS = 64, 7  # of ROUNDS
CONTEXT = 384
LONGEST = CONTEXT + 192  # the rounds of one timing add to the context
CLEARLY = 0.997  # of the time before
OWN = shape_config(SHAPE).layer
PRODUCTS = (
    Shape("qkv", (OWN.num_heads + 2 * OWN.num_kv_heads) * OWN.head_dim, OWN.hidden_size, norm=True),
    Shape("o", OWN.hidden_size, OWN.num_heads * OWN.head_dim, residual=True),
    Shape("glu", 2 * OWN.intermediate_size, OWN.hidden_size, norm=True, glu=True),
    Shape("down", OWN.hidden_size, OWN.intermediate_size, residual=True),
)


def configs(shape: Shape) -> tuple[Config, Config, Config]:
    found = shapes.TUNED[shape.N, shape.K, shape.glu]
    assert len(found) == 3, shape
    return found


def put(shape: Shape, at: int, config: Config) -> None:
    few, some, many = (config if i == at else usual for i, usual in enumerate(configs(shape)))
    shapes.TUNED[shape.N, shape.K, shape.glu] = few, some, many


@contextmanager
def trying(shape: Shape, at: int, config: Config) -> Iterator[None]:
    usual = configs(shape)[at]
    put(shape, at, config)
    try:
        yield
    finally:
        put(shape, at, usual)


def launched(shape: Shape, at: int, config: Config) -> dict[int, Config]:
    """By rows of a round: what the configuration comes to, which has no more stages than fit."""
    with trying(shape, at, config):
        every = [batch * (k + 1) for batch, k in ROUNDS[at]]
        return {rows: shapes.config_for(rows, shape.N, shape.K, shape.glu) for rows in every}


def alternatives(shape: Shape, at: int) -> list[Config]:
    usual = configs(shape)[at]
    found = [replace(usual, late=not usual.late)]
    if at == 0:
        found.append(replace(usual, lines=not usual.lines))
    if at < 2:
        found += [replace(usual, prefetch=p) for p in (0, getattr(shapes, BASES[at]).prefetch)]
    else:
        found += [replace(usual, stages=stages) for stages in (2, 3)]
    found += [replace(usual, block_m=m, block_n=n, warps=warps) for m, n, warps in TILES[at]]
    found = [c for c in dict.fromkeys(found) if c != usual and c.kind == usual.kind]
    return [c for c in found if all(fits(shape, rows, own) for rows, own in launched(shape, at, c).items())]


def compilations(places: Sequence[int]) -> Iterator[Job]:
    for at in places:
        found = {s: [launched(s, at, c) for c in (configs(s)[at], *alternatives(s, at))] for s in PRODUCTS}
        for rows in launched(PRODUCTS[0], at, configs(PRODUCTS[0])[at]):
            yield from chain_jobs(rows, True, {s: [c[rows] for c in each] for s, each in found.items()})


def descend(at: int, measure: Callable[[], float], end: float, note: Callable[..., None]) -> tuple[float, float]:
    """What is measured before and after. Leaves in TUNED what it has found until nothing helps, or until `end`."""
    before = best = measure()
    seen = {tuple(configs(s)[at] for s in PRODUCTS)}
    known = 0
    while known < len(seen):
        known = len(seen)
        for shape in PRODUCTS:
            for config in alternatives(shape, at):
                with trying(shape, at, config):
                    table = tuple(configs(s)[at] for s in PRODUCTS)
                    if table in seen or time.monotonic() > end:
                        continue
                    seen.add(table)
                    try:
                        took = measure()
                    except Exception as error:
                        took = math.inf
                        say(f"   FAILED {shape.name} {config}: {type(error).__name__}: {error}"[:600])
                    again = measure() if took < best * CLEARLY else math.inf
                kept = again < math.inf and again < measure() * CLEARLY  # one after the other: clocks drift
                if kept:
                    put(shape, at, config)
                    best = again
                note(shape.name, config, took, kept)
    return before, best


class Rounds:
    """Requests with as much context each, in a cache filled with noise."""

    def __init__(self, device: torch.device) -> None:
        target, drafter = build(SHAPE, 4, True, device)
        per = -(-LONGEST // 16)
        self.runner = Runner(target, drafter, 1 + MOST * per, MOST, LONGEST, DRAFTS, [0.0] * DRAFTS)
        fill(self.runner.cache)
        order = torch.randperm(MOST * per, device=device)
        self.runner.state.block_tables_SM[:MOST] = 1 + order.view(MOST, per).int()

    def ms(self, at: int) -> float:
        """Of a round, recorded anew; the mean over the kinds of rounds."""
        total = 0.0
        for batch, k in ROUNDS[at]:
            graphs = RoundGraphs(self.runner, [batch], [k])
            graphs.capture()
            recorded = graphs.rounds[batch, k]
            recorded.slots_B.copy_(torch.arange(batch, device=recorded.slots_B.device))
            times = []
            for _ in range(4):
                self.runner.state.start_S[:MOST] = CONTEXT
                times.append(timed(recorded))
            total += min(times)
        return total / len(ROUNDS[at])


def line_of(shape: Shape) -> str:
    """As it stands in TUNED."""
    written = []
    for base, config in zip(BASES, configs(shape), strict=True):
        usual = asdict(getattr(shapes, base))
        changed = [f"{name}={value}" for name, value in asdict(config).items() if value != usual[name]]
        written.append(f"replace({base}, {', '.join(changed)})" if changed else base)
    return f"    {(shape.N, shape.K, shape.glu)}: ({', '.join(written)}),"


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=240, help="for the search, once all is compiled")
    parser.add_argument("--only", choices=BASES, nargs="+", default=BASES, help="configurations that are looked for")
    parser.add_argument("--workers", type=int, default=15, help="processes that compile beforehand; 0: none")
    parser.add_argument("--out", type=Path, help="JSON file for everything measured")
    args = parser.parse_args()
    linear_triton.can_hold = lambda *given: False  # where weights are held there is nothing to choose
    started = time.monotonic()
    places = [at for at, base in enumerate(BASES) if base in args.only]
    if args.workers:
        precompile(list(dict.fromkeys(compilations(places))), args.workers)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    results: dict[str, Any] = {"bench": "round_descent", "command": " ".join(["python", *sys.argv]), "commit": commit}
    results |= {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "descents": []}
    tried: list[dict[str, Any]] = []

    def save() -> None:
        results.update(table=[line_of(s) for s in PRODUCTS], seconds=round(time.monotonic() - started, 1))
        if args.out:
            args.out.write_text(json.dumps({**results, "tried": tried}, indent=1) + "\n")

    def note(at: int, name: str, config: Config, took: float, kept: bool) -> None:
        ms = round(took, 4) if took < math.inf else None  # None: failed
        tried.append({"for": BASES[at], "shape": name, "ms": ms, "kept": kept, **asdict(config)})
        if kept:
            say(f"   {took:.4f} ms  {name} {config}")
        save()

    torch.manual_seed(0)
    rounds = Rounds(torch.device("cuda"))
    for at in places:
        rounds.ms(at)  # compiles the rest
    say(f"ready after {time.monotonic() - started:.1f} s")
    deadline = time.monotonic() + args.seconds
    for i, at in enumerate(places):
        each = ROUNDS[at]
        say(f"{BASES[at]}, rounds of " + " and ".join(f"{batch} x {k + 1} rows" for batch, k in each))
        # What one does not use is the others'.
        end = time.monotonic() + (deadline - time.monotonic()) / (len(places) - i)
        before, after = descend(at, partial(rounds.ms, at), end, partial(note, at))
        results["descents"].append({"rounds": each, "before_ms": before, "after_ms": after})
        save()
        say(f"   {before:.4f} -> {after:.4f} ms; {len(tried)} tried so far")
    say("\n".join(results["table"]))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
