"""GPT-OSS-20B's packed products for few rows by setting (`LANES` in experts_lanes_triton.py), beside the kernel they
replace (old_experts_packed_triton.py) and the time that reading the experts hit takes.

    python benchmarks/kernel_experts_lanes.py --out kernel_experts_lanes.json

First all are compiled, by several processes; then each is held against an fp32 product of weights unpacked by torch,
and a row's result against the one it has alone, to the bit; then timed, in a CUDA graph over the weights of several
layers, more than the cache holds. Prints tables, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import old_experts_packed_triton as old
from kernel_experts import COPY_RATE, PACKED_BYTES, SHAPES, random_experts

from peagle.kernels import experts_lanes_triton as lanes
from peagle.kernels import experts_packed_triton as new
from peagle.kernels.experts import Experts, gated, route_torch
from peagle.kernels.mxfp4 import Packed

SHAPE = SHAPES["gpt-oss-20b"]
LAYERS = 4
ROWS = (1, 4, 8, 16)
SETTINGS: dict[bool, list[tuple[Any, ...]]] = {
    False: [
        (1, 2, 128, True),
        (1, 1, 128, True),
        (1, 3, 128, True),
        (2, 1, 128, True),
        (2, 2, 128, True),
        (4, 1, 128, True),
        (1, 2, 0, True),
        (1, 2, 256, True),
        (1, 1, 128, False),
        (1, 2, 128, False),
        (2, 1, 128, False),
    ],
    True: [
        (1, 2, 128, False),
        (1, 1, 128, False),
        (1, 3, 128, False),
        (2, 1, 128, False),
        (2, 2, 128, False),
        (4, 1, 128, False),
        (1, 2, 0, False),
        (1, 2, 256, False),
    ],
}
Setting = tuple[Any, ...] | None  # None: the old kernel
IN_USE = dict(lanes.LANES)
MODULES = {"old": old, "new": new}


def spills(paired: bool, setting: Setting, rows: int) -> bool:
    """Gates and ups apart, two steps ahead and two eights of rows are more than a thread's registers hold."""
    return not paired and setting is not None and not setting[3] and setting[1] > 1 and rows > 8


class Layer:
    """Weights, rows, choices, and what is between the products."""

    def __init__(self, rows: int, experts: Experts) -> None:
        weight_TC, expert_TC = route_torch(torch.randn(rows, SHAPE.count, device="cuda"), SHAPE.chosen, True)
        self.rows, self.experts, self.weight_TC, self.expert_TC = rows, experts, weight_TC, expert_TC
        self.x = torch.randn(rows, SHAPE.width, dtype=torch.bfloat16, device="cuda")
        self.hidden = torch.randn(rows * SHAPE.chosen, SHAPE.inner, dtype=torch.bfloat16, device="cuda")
        self.outs = {
            False: torch.empty_like(self.hidden),
            True: torch.empty(rows * SHAPE.chosen, SHAPE.width, dtype=torch.bfloat16, device="cuda"),
        }

    def hit(self) -> int:
        return len(self.expert_TC.unique())

    def launch(self, paired: bool, setting: Setting, pdl: bool | None = None) -> torch.Tensor:
        x, y = self.hidden if paired else self.x, self.outs[paired]
        if setting is None:
            old._launch(x, y, self.weight_TC, self.expert_TC, None, self.experts, "few", paired=paired)
        else:
            for most, second in lanes.LANES:
                if second == paired:
                    lanes.LANES[most, second] = setting  # type: ignore[assignment]
            lanes.launch_lanes(x, y, self.weight_TC, self.expert_TC, self.experts, paired=paired, pdl=pdl)
        return y

    def expected(self, paired: bool) -> torch.Tensor:
        w, bias = self.experts.gate_up_EXD, self.experts.gate_up_bias_EX
        if paired:
            w, bias = self.experts.down_EDI, self.experts.down_bias_ED
        assert isinstance(w, Packed) and bias is not None
        want = torch.empty_like(self.outs[paired], dtype=torch.float32)
        experts = self.expert_TC.flatten().tolist()
        for e in set(experts):
            pairs = torch.tensor([p for p, other in enumerate(experts) if other == e], device="cuda")
            rows = self.hidden[pairs] if paired else self.x[pairs // SHAPE.chosen]
            y = rows.float() @ w[e].float().T + bias[e].float()
            want[pairs] = y * self.weight_TC.flatten()[pairs, None] if paired else gated(y, self.experts.clamp)
        return want


def compile_one(job: tuple[Any, Any]) -> tuple[tuple[Any, Any], str]:
    """In a process of its own: what it compiles the others find on disk. A product and a setting of it, or a module and
    a number of rows of a whole layer."""
    try:
        experts = random_experts(SHAPE)
        lanes.LANES.update(IN_USE)
        if isinstance(job[0], str):
            layer = Layer(job[1], experts)
            MODULES[job[0]].expert_mlp_packed(layer.x, layer.weight_TC, layer.expert_TC, experts)
        else:
            for rows in (8, 16) if job[1] is not None else (8,):
                if not spills(*job, rows):
                    Layer(rows, experts).launch(*job)
        torch.cuda.synchronize()
    except Exception as error:  # a setting that does not compile is left out
        return job, repr(error)[:300]
    return job, ""


def microseconds(run: Callable[[], Any], launches: int) -> float:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(9):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / launches)
    return sorted(times)[len(times) // 2]


def check(paired: bool, setting: Setting, layer: Layer) -> tuple[float, bool]:
    """How far off, of the largest number; whether rows alone give the same bits."""
    layer.outs[paired].fill_(float("nan"))
    got = layer.launch(paired, setting).clone()
    want = layer.expected(paired)
    off = float((got.float() - want).abs().max() / want.abs().max())
    same = True
    for row in sorted({0, layer.rows // 2, layer.rows - 1}):
        alone = Layer(1, layer.experts)
        alone.x, alone.weight_TC = layer.x[row : row + 1], layer.weight_TC[row : row + 1].contiguous()
        alone.expert_TC = layer.expert_TC[row : row + 1].contiguous()
        part = slice(row * SHAPE.chosen, (row + 1) * SHAPE.chosen)
        alone.hidden = layer.hidden[part]
        same &= torch.equal(alone.launch(paired, setting), got[part])
    return off, same


def check_kinds(experts: Experts) -> dict[str, bool]:
    """Whole layers: the first row's bits alone, against those it has among more, by kernels for few, some and many."""
    found = {}
    layer = Layer(300, experts)
    alone = new.expert_mlp_packed(layer.x[:1], layer.weight_TC[:1], layer.expert_TC[:1], experts)
    for rows in (4, 8, 16, 17, 64, 128, 129, 300):
        among = new.expert_mlp_packed(layer.x[:rows], layer.weight_TC[:rows], layer.expert_TC[:rows], experts)
        found[str(rows)] = torch.equal(among[:1], alone)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--seconds", type=float, default=60, help="for measuring; what does not fit stays unmeasured")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    jobs: list[tuple[Any, Any]] = [(name, rows) for rows in (256, 64) for name in MODULES]
    jobs += [("new", 16), ("new", 8), ("new", 4)]
    jobs += [(paired, setting) for paired in (False, True) for setting in (None, *SETTINGS[paired])]
    begun = time.time()
    with multiprocessing.get_context("spawn").Pool(min(args.workers, len(jobs))) as pool:
        failed = {job: why for job, why in pool.imap_unordered(compile_one, jobs, chunksize=1) if why}
    print(f"compiled in {time.time() - begun:.0f} s; failed: {failed or 'none'}", flush=True)
    deadline = time.time() + args.seconds
    torch.manual_seed(0)
    weights = [random_experts(SHAPE) for _ in range(LAYERS)]
    kinds = check_kinds(weights[0])
    print("a row's bits alone and among so many:", kinds, flush=True)
    products: list[dict[str, Any]] = []
    for rows in (8, 4, 1, 16):
        torch.manual_seed(rows)
        layers = [Layer(rows, experts) for experts in weights]
        hits = sum(layer.hit() for layer in layers) / LAYERS
        for paired in (False, True):
            floor = hits * SHAPE.width * SHAPE.inner * (1 if paired else 2) * PACKED_BYTES / COPY_RATE * 1e6
            before = 0.0
            for setting in (None, *SETTINGS[paired]):
                if time.time() > deadline or (paired, setting) in failed or spills(paired, setting, rows):
                    continue
                off, same = check(paired, setting, layers[0])

                def all_layers(paired: bool = paired, setting: Setting = setting, layers: Any = layers) -> None:
                    for _ in range(3):
                        for layer in layers:
                            layer.launch(paired, setting)

                us = microseconds(all_layers, 3 * LAYERS)
                before = before or us
                row = {"rows": rows, "product": "second" if paired else "gated", "hit": hits, "setting": setting}
                products.append(row | {"us": us, "floor_us": floor, "of_old": us / before, "off": off, "alone": same})
                good = "" if off < 0.01 and same else f"  WRONG: off {off:.3g}, alone {same}"
                label = f"{rows:3} rows {row['product']:6} hit {hits:4.1f} {setting or 'old'!s:20}"
                print(f"{label} {us:7.1f} us  floor {floor:5.1f}  {us / before:5.2f} of old{good}", flush=True)
    lanes.LANES.update(IN_USE)
    whole: list[dict[str, Any]] = []
    for rows in (*ROWS, 64, 256):
        layers = [Layer(rows, experts) for experts in weights]
        row = {"rows": rows}
        for name, module in MODULES.items():
            if time.time() < deadline + 30:

                def all_of_it(module: Any = module, layers: Any = layers) -> None:
                    for layer in layers:
                        module.expert_mlp_packed(layer.x, layer.weight_TC, layer.expert_TC, layer.experts)

                row[name] = microseconds(all_of_it, LAYERS)  # type: ignore[assignment]
        whole.append(row)
        print("whole layer:", row, flush=True)
    line = json.dumps(
        {
            "bench": "kernel_experts_lanes",
            "gpu": torch.cuda.get_device_name(),
            "products": products,
            "layers": whole,
            "kinds": kinds,
        }
    )
    if args.out:
        args.out.write_text(line)
    print(line)


if __name__ == "__main__":
    main()
