"""Experts that are not packed, for many rows: the library's grouped product, the kernel that looks through all rows,
and the one that puts pairs in order, by tile. Of Qwen3-Coder-30B-A3B's shape, in bf16.

    python benchmarks/kernel_experts_many.py --out kernel_experts_many.json

First every candidate of a product alone, held against fp32 and, to the bit, against the tile in use; then whole layers:
order, both products and sum, by the tiles in use and by the fastest ones, and without dependent launches. Experts are
chosen by lot, and a graph goes through several layers, so that weights do not stay in the L2. Microseconds a layer,
beside the time that reading the experts hit takes. Kernels are compiled ahead in other processes. Prints tables, then
one short JSON line; the file given by --out has every candidate.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kernel_experts import QWEN, SHAPES, microseconds, random_experts

from peagle.kernels.moe import experts_sorted_triton as ordered
from peagle.kernels.moe import experts_triton as scanned
from peagle.kernels.moe.experts import Experts, expert_mlp_grouped, gated, route_torch
from peagle.kernels.moe.mxfp4_sorted_triton import order_of

SHAPE = SHAPES[QWEN]
MOST_SCANNED = 128  # rows; beyond, looking through them is known to be slow
ROWS = [16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192]
SCANS = [(1024, 4), (2048, 4), (4096, 4), (4096, 8), (8192, 8), (8192, 16)]  # of the order, and warps

LIKE: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
Tile = tuple[int, int, int, int]
# To compile: rows, pairs of a tile, whether the second product, its tile or None for the kernel that looks through all
# rows, and whether with dependent launches.
Job = tuple[int, int, bool, Tile | None, bool]
# By pairs of a tile and whether the product is the second one, as in `TILES`, to which these are added.
CANDIDATES: dict[tuple[int, bool], list[Tile]] = {
    (16, False): [(64, 64, 4, 3), (64, 64, 4, 5), (64, 128, 4, 3), (128, 64, 8, 3), (128, 64, 4, 3)],
    (32, False): [(64, 64, 4, 3), (64, 64, 4, 4), (64, 128, 4, 3), (128, 64, 8, 3), (128, 64, 4, 3)],
    (64, False): [(64, 64, 4, 3), (64, 64, 4, 4), (64, 128, 4, 2), (128, 64, 8, 3), (128, 64, 8, 4), (128, 64, 4, 3)],
    (128, False): [(64, 64, 4, 3), (64, 64, 4, 4), (64, 64, 8, 4), (128, 64, 8, 3), (128, 64, 8, 4)],
    (16, True): [(64, 64, 4, 6), (64, 128, 4, 3), (128, 64, 4, 3), (128, 64, 4, 4), (128, 64, 8, 4)],
    (32, True): [(64, 64, 4, 4), (64, 128, 4, 3), (128, 64, 4, 3), (128, 64, 4, 4), (128, 64, 8, 4), (256, 64, 8, 3)],
    (64, True): [(64, 64, 4, 4), (128, 64, 4, 3), (128, 64, 4, 4), (128, 64, 8, 4), (128, 128, 8, 2), (256, 64, 8, 3)],
    (128, True): [(64, 64, 4, 4), (128, 64, 4, 3), (128, 64, 8, 3), (128, 64, 8, 4), (256, 64, 8, 3)],
}


@dataclass(frozen=True)
class Lot:
    """A layer's weights and what its rows chose."""

    experts: Experts
    weight_TC: Tensor
    expert_TC: Tensor
    order_P: Tensor
    ends_E: Tensor


def tiles_of(block_m: int, paired: bool) -> list[Tile]:
    """The one in use first."""
    used = ordered.TILES[block_m, paired]
    return list(dict.fromkeys([used, *CANDIDATES[block_m, paired]]))


def sizes_for(rows: int) -> list[int]:
    """Pairs of a tile: as in use, first, and the sizes next to it."""
    used = ordered.pairs_of_a_tile(rows * SHAPE.chosen, SHAPE.count)
    return [used, *(size for size in (used // 2, used * 2) if (size, False) in ordered.TILES)]


@contextmanager
def tile_in_use(block_m: int, paired: bool, tile: Tile) -> Iterator[None]:
    used = ordered.TILES[block_m, paired]
    ordered.TILES[block_m, paired] = tile
    try:
        yield
    finally:
        ordered.TILES[block_m, paired] = used


@contextmanager
def without_pdl() -> Iterator[None]:
    had = ordered.supports_pdl, scanned.supports_pdl
    ordered.supports_pdl = scanned.supports_pdl = lambda device: False  # type: ignore[assignment]
    try:
        yield
    finally:
        ordered.supports_pdl, scanned.supports_pdl = had


def lots_of(layers: list[Experts], rows: int) -> list[Lot]:
    lots = []
    for experts in layers:
        routed = route_torch(torch.randn(rows, SHAPE.count, device="cuda"), SHAPE.chosen, True)
        lots.append(Lot(experts, *routed, *ordered.in_order(routed[1], SHAPE.count)))
    return lots


def product(x: Tensor, y: Tensor, lot: Lot, block_m: int, paired: bool, tile: Tile) -> None:
    with tile_in_use(block_m, paired, tile):
        ordered._launch(x, y, lot.weight_TC, lot.order_P, lot.ends_E, lot.experts, block_m, paired)


def in_fp32(x: Tensor, lot: Lot, paired: bool) -> Tensor:
    """What a product gives, [P, ...]."""
    chosen = lot.expert_TC.shape[1]
    w = lot.experts.down_EDI if paired else lot.experts.gate_up_EXD
    columns = w.shape[1] // (1 if paired else 2)
    y = torch.empty(lot.expert_TC.numel(), columns, device=x.device)
    expert_P, weight_P1 = lot.expert_TC.flatten(), lot.weight_TC.flatten()[:, None]
    for e in range(len(w)):
        pairs = (expert_P == e).nonzero().flatten()
        if paired:
            y[pairs] = (x[pairs].float() @ w[e].float().T) * weight_P1[pairs]
        else:
            y[pairs] = gated(x[pairs // chosen].float() @ w[e].float().T, None)
    return y


def chained(
    x: Tensor, lot: Lot, first: tuple[int, Tile], second: tuple[int, Tile], hidden: Tensor, y_PD: Tensor
) -> Tensor:
    """expert_mlp_ordered with tiles of one's own."""
    order_P, ends_E = ordered.in_order(lot.expert_TC, len(lot.ends_E))
    own = Lot(lot.experts, lot.weight_TC, lot.expert_TC, order_P, ends_E)
    product(x, hidden, own, first[0], False, first[1])
    product(hidden, y_PD, own, second[0], True, second[1])
    return ordered.summed_triton(y_PD, lot.expert_TC.shape[1])


def measure(layers: list[Experts], rows: int, deadline: float) -> dict[str, Any]:
    torch.manual_seed(rows)
    pairs, lots = rows * SHAPE.chosen, lots_of(layers, rows)
    x_TD = torch.randn(rows, SHAPE.width, **LIKE)
    hidden_PI, y_PD = torch.empty(pairs, SHAPE.inner, **LIKE), torch.empty(pairs, SHAPE.width, **LIKE)
    hit = sum(len(lot.expert_TC.unique()) for lot in lots) / len(lots)
    floor = [SHAPE.floor_us(hit, paired) for paired in (False, True)]
    row: dict[str, Any] = {"rows": rows, "hit": hit, "floor_us": sum(floor), "products": []}
    best: dict[bool, tuple[int, Tile]] = {}
    in_use = ordered.pairs_of_a_tile(pairs, SHAPE.count)
    for paired in (False, True):
        x, y = (hidden_PI, y_PD) if paired else (x_TD, hidden_PI)
        want = in_fp32(x, lots[0], paired)
        found: list[dict[str, Any]] = []
        bits = None
        for block_m in sizes_for(rows):
            for tile in tiles_of(block_m, paired):
                if time.monotonic() > deadline and found:
                    continue
                try:
                    y.fill_(float("nan"))
                    product(x, y, lots[0], block_m, paired, tile)
                    bits = y.clone() if bits is None else bits
                    off, same = float((y.float() - want).abs().max() / want.abs().max()), torch.equal(y, bits)
                    us = microseconds([partial(product, x, y, lot, block_m, paired, tile) for lot in lots])
                except Exception as error:  # a tile that does not fit
                    print(f"  {rows} rows, {block_m}, {paired}, {tile}: {error}".splitlines()[0][:200], flush=True)
                    continue
                assert off < 0.01, (rows, block_m, paired, tile, off)
                found.append({"pairs": block_m, "tile": tile, "us": us, "off": off, "bits": same})
        if not found:
            raise RuntimeError(f"no tile works for {rows} rows")
        used = found[0]
        found.sort(key=lambda one: one["us"])
        best[paired] = found[0]["pairs"], found[0]["tile"]
        name = "second" if paired else "gated"
        row["products"].append({"product": name, "floor_us": floor[paired], "used": used, "all": found})
        product(x, y, lots[0], used["pairs"], paired, used["tile"])  # what the second product and the sum then read
    ours = {False: (in_use, ordered.TILES[in_use, False]), True: (in_use, ordered.TILES[in_use, True])}
    for name, first, second in (("in_use", ours[False], ours[True]), ("best", best[False], best[True])):
        row[f"{name}_us"] = microseconds([partial(chained, x_TD, lot, first, second, hidden_PI, y_PD) for lot in lots])
    with without_pdl():
        row["no_pdl_us"] = microseconds(
            [partial(chained, x_TD, lot, ours[False], ours[True], hidden_PI, y_PD) for lot in lots]
        )

    def whole(run: Callable[[Tensor, Tensor, Tensor, Experts], Tensor]) -> float:
        return microseconds([partial(run, x_TD, lot.weight_TC, lot.expert_TC, lot.experts) for lot in lots])

    row["grouped_us"] = whole(expert_mlp_grouped)
    row["scan_us"] = whole(scanned.expert_mlp_triton) if rows <= MOST_SCANNED else None
    if rows <= MOST_SCANNED:
        got = [
            run(x_TD, lots[0].weight_TC, lots[0].expert_TC, layers[0])
            for run in (ordered.expert_mlp_ordered, scanned.expert_mlp_triton)
        ]
        row["scan_same_bits"] = torch.equal(*got)
    row["order_us"] = microseconds([partial(ordered.in_order, lot.expert_TC, SHAPE.count) for lot in lots])
    row["orders"] = []
    for scan, warps in SCANS:
        us = microseconds([partial(order_of, lot.expert_TC, SHAPE.count, None, scan, warps) for lot in lots])
        row["orders"].append({"scan": scan, "warps": warps, "us": us})
    row["sum_us"] = microseconds([partial(ordered.summed_triton, y_PD, SHAPE.chosen)] * len(lots))
    return row


def compile_one(job: Job) -> str:
    """In a process of its own. A launch, too: weights are of the real size but hold anything."""
    rows, block_m, paired, tile, pdl = job
    try:
        experts = Experts(
            torch.empty(SHAPE.count, 2 * SHAPE.inner, SHAPE.width, **LIKE),
            torch.empty(SHAPE.count, SHAPE.width, SHAPE.inner, **LIKE),
        )
        expert_TC = torch.arange(SHAPE.chosen, dtype=torch.int32, device="cuda").repeat(rows, 1)
        weight_TC = torch.ones(rows, SHAPE.chosen, device="cuda")
        lot = Lot(experts, weight_TC, expert_TC, *ordered.in_order(expert_TC, SHAPE.count))
        x_TD = torch.zeros(rows, SHAPE.width, **LIKE)
        hidden, y = (torch.zeros(rows * SHAPE.chosen, n, **LIKE) for n in (SHAPE.inner, SHAPE.width))
        if tile is not None:
            x, to = (hidden, y) if paired else (x_TD, hidden)
            if pdl:
                product(x, to, lot, block_m, paired, tile)
            else:
                with without_pdl():
                    product(x, to, lot, block_m, paired, tile)
                    ordered.summed_triton(y, SHAPE.chosen)
        else:
            scanned.expert_mlp_triton(x_TD, weight_TC, expert_TC, experts)
        torch.cuda.synchronize()
        return ""
    except Exception as error:
        return f"{job}: {error}".splitlines()[0][:200]


def compile_ahead(all_rows: list[int], workers: int) -> None:
    jobs: dict[Job, None] = {}
    for rows in all_rows:
        if rows <= MOST_SCANNED:
            jobs[min(rows, 64), 0, False, None, True] = None
        for block_m in sizes_for(rows):
            for paired in (False, True):
                tiles = tiles_of(block_m, paired)
                jobs |= {(2, block_m, paired, tile, True): None for tile in tiles}
                jobs[2, block_m, paired, tiles[0], False] = None
    began = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(min(workers, len(jobs))) as pool:
        errors = [error for error in pool.imap_unordered(compile_one, jobs) if error]
    print(f"{len(jobs)} kernels compiled in {time.monotonic() - began:.0f} s", *errors, sep="\n  ", flush=True)


def show(row: dict[str, Any]) -> None:
    scan = "" if row["scan_us"] is None else f"  scan {row['scan_us']:.0f} (same bits: {row['scan_same_bits']})"
    whole = f"in use {row['in_use_us']:.0f}, without PDL {row['no_pdl_us']:.0f}, best {row['best_us']:.0f}"
    old = f"grouped {row['grouped_us']:.0f}{scan}"
    print(f"{row['rows']:4} rows, hit {row['hit']:.0f}: floor {row['floor_us']:.0f}  {old}  ordered: {whole}", end="")
    orders = ", ".join(f"{one['us']:.1f} {one['scan']}x{one['warps']}" for one in row["orders"])
    print(f"\n      sum {row['sum_us']:.1f}  order {row['order_us']:.1f}: {orders}")
    for part in row["products"]:
        best = "  ".join(f"{one['us']:.1f} {one['pairs']}:{short(one['tile'])}" for one in part["all"][:4])
        used, other = part["used"], sum(not one["bits"] for one in part["all"])
        print(f"      {part['product']:6} floor {part['floor_us']:.0f}  used {used['us']:.1f} ", end="")
        print(f"{used['pairs']}:{short(used['tile'])}  best: {best}  with other bits: {other}", flush=True)


def summary(row: dict[str, Any]) -> dict[str, Any]:
    """Whole layers, and the fastest tiles."""
    times = {name.removesuffix("_us"): us and round(us, 1) for name, us in row.items() if name.endswith("_us")}
    tiles = [f"{part['all'][0]['pairs']}:{short(part['all'][0]['tile'])}" for part in row["products"]]
    return {"rows": row["rows"]} | times | {"tiles": tiles}


def short(tile: Tile) -> str:
    return "x".join(map(str, tile))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=80, help="past these, only what is in use is measured")
    parser.add_argument("--workers", type=int, default=14, help="processes that compile ahead; 0: none")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    began = time.monotonic()
    if args.workers:
        compile_ahead(args.rows, args.workers)
    with torch.inference_mode():
        layers = [random_experts(SHAPE) for _ in range(args.layers)]
        found = []
        for rows in args.rows:
            found.append(measure(layers, rows, began + args.seconds))
            show(found[-1])
    about = {"bench": "kernel_experts_many", "device": torch.cuda.get_device_name(), "torch": torch.__version__}
    if args.out:
        args.out.write_text(json.dumps(about | {"rows": found}) + "\n")
    print(json.dumps(about | {"rows": [summary(row) for row in found]}))


if __name__ == "__main__":
    main()
