"""The experts' products by tile, beside the time that reading the experts hit takes: GPT-OSS-20B's, packed, and
Qwen3-Coder-30B-A3B's, in bf16.

    python benchmarks/kernel_experts.py --out kernel_experts.json

For 8 rows (one request, 7 drafts) and 64, experts chosen by lot; both products of a layer. A tile is what `TILES` in
experts_triton.py and experts_packed_triton.py says, or `LANES` in experts_lanes_triton.py; the one in use comes first,
and what others compute is held against it. Microseconds inside a CUDA graph. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from triton.testing import do_bench_cudagraph

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from peagle.kernels import experts_lanes_triton, experts_packed_triton, experts_triton
from peagle.kernels.experts import Clamp, Experts, route_torch
from peagle.kernels.mxfp4 import Packed, packed_widths

COPY_RATE = 4.3e12  # bytes a second, read and written, on an H200
PACKED_BYTES = 17 / 32  # of a number
OTHERS: dict[bool, list[tuple[int | None, ...]]] = {  # by whether packed
    False: [(64, 128, 4, 3), (64, 64, 4, 6), (128, 64, 4, 3), (128, 64, 8, 4), (32, 128, 4, 4), (32, 256, 4, 3)],
    True: [(16, 64, 4, 2, 72), (16, 64, 4, 3, 72), (16, 128, 4, 3, None), (32, 64, 4, 3, 128), (64, 64, 4, 3, 168)],
}
OTHER_LANES: list[tuple[int | None, ...]] = [(1, 1, 128, False), (1, 2, 128, False), (2, 1, 128, False)]


@dataclass(frozen=True)
class Shape:
    count: int
    chosen: int
    width: int
    inner: int
    packed: bool


SHAPES = {
    "gpt-oss-20b": Shape(32, 4, 2880, 2880, packed=True),
    "qwen3-coder-30b-a3b": Shape(128, 8, 2048, 768, packed=False),
}


def random_experts(shape: Shape) -> Experts:
    def matrix(rows: int, columns: int) -> torch.Tensor | Packed:
        if not shape.packed:
            return torch.randn(shape.count, rows, columns, dtype=torch.bfloat16, device="cuda") * columns**-0.5
        words, exponents = packed_widths(columns)
        bits = torch.randint(-(2**15), 2**15, (shape.count, rows, words), dtype=torch.int16, device="cuda")
        return Packed(bits, torch.full((shape.count, rows, exponents), 120, dtype=torch.uint8, device="cuda"))

    def bias(rows: int) -> torch.Tensor | None:
        return torch.randn(shape.count, rows, device="cuda").bfloat16() if shape.packed else None

    clamp = Clamp(1.702, 7.0) if shape.packed else None
    both = matrix(2 * shape.inner, shape.width), matrix(shape.width, shape.inner)
    return Experts(*both, bias(2 * shape.inner), bias(shape.width), clamp)


def prepared(
    x: torch.Tensor, y: torch.Tensor, experts: Experts, weight_TC: torch.Tensor, expert_TC: torch.Tensor, paired: bool
) -> tuple[dict[Any, Any], Any, Callable[[], None]]:
    """The tiles, which of them the product takes, and the product."""
    w, bias = experts.gate_up_EXD, experts.gate_up_bias_EX
    if paired:
        w, bias = experts.down_EDI, experts.down_bias_ED
    if isinstance(w, torch.Tensor):
        args = (x, w, bias, y, weight_TC, expert_TC, experts)
        return experts_triton.TILES, paired, lambda: experts_triton._launch(*args, paired=paired)
    rows = len(weight_TC)
    if rows <= experts_packed_triton.FEW_ROWS:
        key = min(most for most, _ in experts_lanes_triton.LANES if rows <= most), paired
        lanes_args = (x, y, weight_TC, expert_TC, experts, paired)
        return experts_lanes_triton.LANES, key, lambda: experts_lanes_triton.launch_lanes(*lanes_args)
    kind = experts_packed_triton.kind_of(rows)
    order_P, ends_E, turned = experts_packed_triton.order_of(expert_TC, len(w), None if paired else x)
    if turned is None:  # columns in any order do for a measurement
        turned = torch.nn.functional.pad(x, (0, -x.shape[1] % experts_packed_triton.STEP))
    packed_args = (turned, y, weight_TC, order_P, ends_E, experts, kind)
    return (
        experts_packed_triton.TILES,
        (kind, paired),
        lambda: experts_packed_triton._launch(*packed_args, paired=paired),
    )


def measure(name: str, shape: Shape, rows: int, deadline: float) -> list[dict[str, Any]]:
    experts = random_experts(shape)
    weight_TC, expert_TC = route_torch(torch.randn(rows, shape.count, device="cuda"), shape.chosen, True)
    hit = len(expert_TC.unique())
    found = []
    for paired in (False, True):
        pairs, (deep, wide) = rows * shape.chosen, (shape.inner, shape.width)[:: 1 if paired else -1]
        x = torch.randn(pairs if paired else rows, deep, dtype=torch.bfloat16, device="cuda")
        filled = wide if paired or rows <= experts_packed_triton.FEW_ROWS else -(-wide // 128) * 128
        y = torch.empty(pairs, filled if shape.packed else wide, dtype=torch.bfloat16, device="cuda")
        numbers = hit * deep * wide * (1 if paired else 2)
        floor = numbers * (PACKED_BYTES if shape.packed else 2) / COPY_RATE * 1e6
        tiles, key, run = prepared(x, y, experts, weight_TC, expert_TC, paired)
        want, used = None, tiles[key]
        others = OTHER_LANES if tiles is experts_lanes_triton.LANES else OTHERS[shape.packed]
        for tile in [used, *(t for t in others if t != used)]:
            if time.time() > deadline:
                break
            tiles[key] = tile
            y.fill_(float("nan"))
            run()
            want = y.float() if want is None else want
            off = float((y.float() - want).abs().max() / want.abs().max())
            assert off < 0.02, (name, rows, paired, tile, off)
            row = {"shape": name, "rows": rows, "product": "second" if paired else "gated", "hit": hit, "tile": tile}
            found.append(
                row | {"us": float(do_bench_cudagraph(run, rep=8)) * 1e3, "floor_us": floor, "in_use": tile == used}
            )
        tiles[key] = used
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--seconds", type=float, default=90, help="for all; what does not fit stays unmeasured")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    deadline = time.time() + args.seconds
    found = []
    for name, shape in SHAPES.items():
        for rows in args.rows:
            torch.manual_seed(rows)
            found += measure(name, shape, rows, deadline)
    for r in found:
        label = f"{r['shape']:20} {r['rows']:3} rows {r['product']:6} hit {r['hit']:3}"
        print(f"{label}  {r['us']:8.1f} us  floor {r['floor_us']:6.1f}  {r['tile']}{'  <- in use' * r['in_use']}")
    line = json.dumps({"bench": "kernel_experts", "rows": found})
    if args.out:
        args.out.write_text(line)
    print(line)


if __name__ == "__main__":
    main()
