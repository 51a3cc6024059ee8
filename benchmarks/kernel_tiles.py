"""Products of many rows of SmolLM2: every tile of linear_tiles.py for each, beside Triton's product and cuBLAS.

    python benchmarks/kernel_tiles.py --out tiles.json

Each is timed by itself, in a graph of dependent launches over the weights of 30 layers, with what stands around it in a
model: norms prepared by the product before it, residuals, the norm that follows. cuBLAS is timed without any of that.
Results are compared bit by bit with Triton's. Then the head, which has Triton's product alone. Compiles beforehand in
several processes, stops when the seconds are over, prints a line for each product, the fastest first, then JSON.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from peagle.kernels.gemm.linear_triton import stream_triton
from peagle.kernels.gemm.tile_configs import SHARED_BYTES, TILE_K, TILED, Config, Tile, config_for
from peagle.kernels.norm.rms_norm import Stream

# N, K, gated; and of the head
PRODUCTS = {"qkv": (960, 576, False), "o": (576, 576, False), "glu": (3072, 576, True), "down": (576, 1536, False)}
HEAD = (49152, 576)
LAYERS = 30
ROWS = (512, 256, 128, 64, 384, TILED, 112, 48)
EPS = 1e-5
# Columns and rows, and the warps that share each.
SIZES = (
    *((64, 128, 2, 4), (64, 64, 2, 2), (64, 64, 2, 4), (64, 64, 4, 2), (64, 32, 2, 2), (64, 32, 4, 1), (64, 32, 4, 2)),
    *((32, 128, 1, 4), (32, 128, 2, 4), (32, 64, 1, 4), (32, 64, 2, 2), (32, 64, 2, 4)),
    *((32, 32, 1, 2), (32, 32, 2, 2), (32, 32, 1, 4), (16, 64, 1, 4), (16, 32, 1, 2)),
)
HEADS = (
    Config(64, 64, 3, 4),
    *(Config(128, 64, stages, 8, block_m=128) for stages in (3, 4)),
    Config(128, 64, 4, 4, block_m=64),
    Config(128, 64, 4, 4, block_m=128),
    Config(64, 64, 4, 4, block_m=128),
    Config(128, 64, 3, 8, block_m=256),
)


def tiles_of(name: str) -> list[Tile]:
    """That fit: their steps over K lie side by side in shared memory."""
    _, K, glu = PRODUCTS[name]
    steps = K // TILE_K
    tiles = [Tile(*size, ahead) for size in SIZES for ahead in (2, 3, 4, 6, 9) if ahead <= steps]

    def nbytes(tile: Tile) -> int:
        return 2 * TILE_K * min(tile.ahead + 1, steps) * (tile.block_n * (2 if glu else 1) + tile.block_m)

    return [tile for tile in tiles if nbytes(tile) <= SHARED_BYTES]


def worth_timing(tile: Tile, name: str, rows: int) -> bool:
    """Not with hardly a program, nor mostly for rows that are not there."""
    N, _, glu = PRODUCTS[name]
    blocks = -(-rows // tile.block_m)
    return 24 <= blocks * (N // (2 if glu else 1) // tile.block_n) <= 400 and blocks * tile.block_m < 1.7 * rows


class Bench:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.weights = {
            name: [self.draw(N, K) * K**-0.5 for _ in range(LAYERS)] for name, (N, K, _) in PRODUCTS.items()
        }
        self.head = self.draw(*HEAD) * 0.04
        self.norm = torch.rand(576, device="cuda", dtype=torch.bfloat16) + 0.5

    @staticmethod
    def draw(*size: int) -> Tensor:
        return torch.randn(*size, device="cuda", dtype=torch.bfloat16)

    def inputs(self, name: str, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        squares = torch.rand(9, rows, device="cuda", dtype=torch.float64) * 128
        return self.draw(rows, PRODUCTS[name][1]), self.draw(rows, 576), squares

    def product(self, name: str, given: tuple[Tensor, Tensor, Tensor], config: Config, layer: int = 0) -> Stream:
        """As a model has it: a normed input, or a residual and the norm behind it."""
        (x, residual, squares), weight, norm = given, self.weights[name][layer], self.norm
        if name in ("o", "down"):
            return stream_triton(x, weight, residual=residual, next_norm=norm, config=config)
        prepared = Stream(x, norm, x, squares)
        return stream_triton(prepared, weight, norm_weight=norm, eps=EPS, glu=PRODUCTS[name][2], config=config)

    def compare(self, name: str, rows: int) -> dict[str, Any]:
        given, usual = self.inputs(name, rows), replace(config_for(rows, *PRODUCTS[name]), held=False)
        plain = replace(usual, tile=None)
        wanted = self.product(name, given, plain)
        x, weights = given[0], self.weights[name]

        def layers(config: Config) -> float:
            return microseconds(lambda: [self.product(name, given, config, i) for i in range(LAYERS)]) / LAYERS

        found: list[dict[str, Any]] = []
        for tile in tiles_of(name):
            if worth_timing(tile, name, rows):
                config = replace(usual, tile=tile)
                y = self.product(name, given, config)
                same = torch.equal(y.x, wanted.x) and (wanted.scaled is None or torch.equal(y.scaled, wanted.scaled))
                found.append({"us": layers(config), "same": same, "tile": repr(tile), "used": tile == usual.tile})
        best = sorted(found, key=lambda row: row["us"])
        cublas = microseconds(lambda: [F.linear(x, weight) for weight in weights]) / LAYERS
        return {"product": name, "rows": rows, "triton_us": layers(plain), "cublas_us": cublas, "tiles": best}

    def compare_heads(self, rows: int) -> dict[str, Any]:
        x, head = self.draw(rows, HEAD[1]), self.head
        wanted = stream_triton(x, head, config=config_for(rows, *HEAD, False)).x
        found = []
        for config in HEADS:
            same = torch.equal(stream_triton(x, head, config=config).x, wanted)
            us = microseconds(lambda c=config: [stream_triton(x, head, config=c) for _ in range(4)]) / 4
            found.append({"us": us, "same": same, "config": repr(config)})
        cublas = microseconds(lambda: [F.linear(x, head) for _ in range(4)]) / 4
        return {
            "product": "head",
            "rows": rows,
            "cublas_us": cublas,
            "configs": sorted(found, key=lambda row: row["us"]),
        }


def microseconds(run: Callable[[], Any], turns: int = 6) -> float:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = run()
    graph.replay()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(turns):
        graph.replay()
    end.record()
    end.synchronize()
    del kept
    return begin.elapsed_time(end) / turns * 1e3


def compile_some(part: int, parts: int) -> None:
    bench = Bench()
    jobs = [(name, tile) for name in PRODUCTS for tile in tiles_of(name)]
    for name, tile in jobs[part::parts]:
        bench.product(name, bench.inputs(name, 64), replace(config_for(64, *PRODUCTS[name]), held=False, tile=tile))
    for config in HEADS[part::parts]:
        stream_triton(bench.draw(256, HEAD[1]), bench.head, config=config)
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--seconds", type=float, default=120, help="for timing, once all is compiled")
    parser.add_argument("--workers", type=int, default=14, help="processes that compile beforehand; 0: none")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.workers:
        with multiprocessing.get_context("spawn").Pool(args.workers) as pool:
            pool.starmap(compile_some, [(i, args.workers) for i in range(args.workers)])
    bench, results, until = Bench(), [], time.monotonic() + args.seconds
    for rows in args.rows:
        for name in PRODUCTS:
            if time.monotonic() < until:
                results.append(row := bench.compare(name, rows))
                first = "  ".join(f"{t['us']:.2f}{'' if t['same'] else '!'} {t['tile']}" for t in row["tiles"][:4])
                print(
                    f"{rows} rows, {name}: triton {row['triton_us']:.2f}, cublas {row['cublas_us']:.2f}; {first}",
                    flush=True,
                )
    for rows in (64, 128, 256, 512, TILED):
        if time.monotonic() < until:
            results.append(row := bench.compare_heads(rows))
            first = "  ".join(f"{c['us']:.1f}{'' if c['same'] else '!'} {c['config']}" for c in row["configs"][:3])
            print(f"{rows} rows, head: cublas {row['cublas_us']:.1f}; {first}", flush=True)
    text = json.dumps(
        {"bench": "tiles", "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": results}
    )
    if args.out:
        args.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
