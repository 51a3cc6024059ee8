"""The experts' products by tile, beside the time that reading the experts hit takes: Qwen3-Coder-30B-A3B's in bf16 for
few rows (experts_triton.py), and GPT-OSS-20B's, packed, for more than few (experts_packed_triton.py). For the others
there are kernel_experts_many.py and kernel_experts_lanes.py, which share what is needed to measure.

    python benchmarks/kernel_experts.py --out kernel_experts.json

Experts are chosen by lot; both products of a layer. A tile is what the kernel's `TILES` says; the one in use comes
first, and what others compute is held against it. Microseconds inside a CUDA graph. Prints a table, then one JSON line.
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
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))  # also where this file is imported from elsewhere

from kernel_attention import seconds

from peagle.kernels.moe import experts_triton
from peagle.kernels.moe import mxfp4_sorted_triton as experts_packed_triton
from peagle.kernels.moe.experts import Clamp, Experts, route_torch
from peagle.kernels.moe.mxfp4 import Packed, packed_widths, zero_filling

COPY_RATE = 4.3e12  # bytes a second, read and written, on an H200
OTHERS: dict[bool, list[tuple[int | None, ...]]] = {  # by whether packed
    False: [(64, 128, 4, 3), (64, 64, 4, 6), (128, 64, 4, 3), (128, 64, 8, 4), (32, 128, 4, 4), (32, 256, 4, 3)],
    True: [(16, 64, 4, 2, 72), (16, 64, 4, 3, 72), (16, 128, 4, 3, None), (32, 64, 4, 3, 128), (64, 64, 4, 3, 168)],
}


@dataclass(frozen=True)
class Shape:
    count: int
    chosen: int
    width: int
    inner: int
    packed: bool

    def floor_us(self, hit: float, paired: bool) -> float:
        """What it takes to read a product's weights."""
        numbers = hit * self.width * self.inner * (1 if paired else 2)
        return numbers * (17 / 32 if self.packed else 2) / COPY_RATE * 1e6


GPT_OSS, QWEN = "gpt-oss-20b", "qwen3-coder-30b-a3b"
SHAPES = {GPT_OSS: Shape(32, 4, 2880, 2880, packed=True), QWEN: Shape(128, 8, 2048, 768, packed=False)}
ROWS = {GPT_OSS: (16, 64, 256), QWEN: (8, 16)}


def random_experts(shape: Shape) -> Experts:
    def matrix(rows: int, columns: int) -> Tensor | Packed:
        if not shape.packed:
            return torch.randn(shape.count, rows, columns, dtype=torch.bfloat16, device="cuda") * columns**-0.5
        words, exponents = packed_widths(columns)
        bits = torch.randint(-(2**15), 2**15, (shape.count, rows, words), dtype=torch.int16, device="cuda")
        powers = torch.full((shape.count, rows, exponents), 120, dtype=torch.uint8, device="cuda")
        made = Packed(bits, powers, columns)
        zero_filling(made)
        return made

    def bias(rows: int) -> Tensor | None:
        return torch.randn(shape.count, rows, device="cuda").bfloat16() if shape.packed else None

    clamp = Clamp(1.702, 7.0) if shape.packed else None
    both = matrix(2 * shape.inner, shape.width), matrix(shape.width, shape.inner)
    return Experts(*both, bias(2 * shape.inner), bias(shape.width), clamp)


def microseconds(calls: list[Callable[[], Any]]) -> float:
    return 1e6 * seconds(calls, least=0.006)


def prepared(
    x: Tensor, y: Tensor, experts: Experts, weight_TC: Tensor, expert_TC: Tensor, paired: bool
) -> tuple[dict[Any, Any], Any, Callable[[], None]]:
    """The tiles, which of them the product takes, and the product."""
    w, bias = experts.gate_up_EXD, experts.gate_up_bias_EX
    if paired:
        w, bias = experts.down_EDI, experts.down_bias_ED
    if isinstance(w, Tensor):
        args = (x, w, bias, y, weight_TC, expert_TC, experts)
        return experts_triton.TILES, paired, lambda: experts_triton._launch(*args, paired=paired)
    key = experts_packed_triton.most_rows(len(weight_TC)), paired
    order_P, ends_E, _ = experts_packed_triton.order_of(expert_TC, len(w))
    # Columns in any order do for a measurement.
    filled = torch.nn.functional.pad(x, (0, -x.shape[1] % experts_packed_triton.STEP))
    packed_args = (filled, y, weight_TC, order_P, ends_E, experts)
    return experts_packed_triton.TILES, key, lambda: experts_packed_triton._launch(*packed_args, paired=paired)


def measure(name: str, rows: int, deadline: float) -> list[dict[str, Any]]:
    shape = SHAPES[name]
    experts = random_experts(shape)
    weight_TC, expert_TC = route_torch(torch.randn(rows, shape.count, device="cuda"), shape.chosen, True)
    hit = len(expert_TC.unique())
    found = []
    for paired in (False, True):
        pairs, (deep, wide) = rows * shape.chosen, (shape.inner, shape.width)[:: 1 if paired else -1]
        if shape.packed and not paired:
            wide += -wide % experts_packed_triton.STEP
        x = torch.randn(pairs if paired else rows, deep, dtype=torch.bfloat16, device="cuda")
        y = torch.empty(pairs, wide, dtype=torch.bfloat16, device="cuda")
        tiles, key, run = prepared(x, y, experts, weight_TC, expert_TC, paired)
        want, used = None, tiles[key]
        for tile in dict.fromkeys([used, *OTHERS[shape.packed]]):
            if time.time() > deadline:
                break
            tiles[key] = tile
            y.fill_(float("nan"))
            run()
            want = y.float() if want is None else want
            off = float((y.float() - want).abs().max() / want.abs().max())
            assert off < 0.02, (name, rows, paired, tile, off)
            row = {"shape": name, "rows": rows, "product": "second" if paired else "gated", "hit": hit, "tile": tile}
            row |= {"us": microseconds([run] * 4), "floor_us": shape.floor_us(hit, paired), "in_use": tile == used}
            found.append(row)
        tiles[key] = used
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=90, help="for all; what does not fit stays unmeasured")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    deadline = time.time() + args.seconds
    found = []
    for name, numbers in ROWS.items():
        for rows in numbers:
            torch.manual_seed(rows)
            found += measure(name, rows, deadline)
    for r in found:
        label = f"{r['shape']:20} {r['rows']:3} rows {r['product']:6} hit {r['hit']:3}"
        print(f"{label}  {r['us']:8.1f} us  floor {r['floor_us']:6.1f}  {r['tile']}{'  <- in use' * r['in_use']}")
    line = json.dumps({"bench": "kernel_experts", "rows": found})
    if args.out:
        args.out.write_text(line)
    print(line)


if __name__ == "__main__":
    main()
