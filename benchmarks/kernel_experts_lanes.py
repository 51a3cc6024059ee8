"""GPT-OSS-20B's packed products for few rows by how many steps are read ahead (`READ_AHEAD` in
experts_lanes_triton.py), beside the time that reading the experts hit takes.

    python benchmarks/kernel_experts_lanes.py --out kernel_experts_lanes.json

Each is held against an fp32 product of weights unpacked by torch, and a row's result against the one it has alone, to
the bit; then timed, in a CUDA graph over the weights of several layers, more than the cache holds. The setting in use
comes first. Then whole layers, for few rows and for more. Prints tables, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kernel_experts import GPT_OSS, SHAPES, microseconds, random_experts

from peagle.kernels.moe.experts import Experts, gated, route_torch
from peagle.kernels.moe.mxfp4 import Packed
from peagle.kernels.moe.mxfp4_few_rows_triton import READ_AHEAD, launch_lanes
from peagle.kernels.moe.mxfp4_sorted_triton import expert_mlp_packed

SHAPE = SHAPES[GPT_OSS]
LAYERS = 4
SETTINGS = (1, 2, 3, 4)


class Layer:
    """Weights, rows, choices, and what is between the products."""

    def __init__(self, rows: int, experts: Experts) -> None:
        self.experts = experts
        self.weight_TC, self.expert_TC = route_torch(torch.randn(rows, SHAPE.count, device="cuda"), SHAPE.chosen, True)
        self.x = torch.randn(rows, SHAPE.width, dtype=torch.bfloat16, device="cuda")
        self.hidden = torch.randn(rows * SHAPE.chosen, SHAPE.inner, dtype=torch.bfloat16, device="cuda")

    def row(self, at: int) -> Layer:
        """One row of it."""
        alone = Layer(1, self.experts)
        alone.x, alone.hidden = self.x[at : at + 1], self.hidden[at * SHAPE.chosen : (at + 1) * SHAPE.chosen]
        alone.weight_TC, alone.expert_TC = self.weight_TC[at : at + 1], self.expert_TC[at : at + 1]
        return alone

    def product(self, paired: bool, y: Tensor | None = None) -> Tensor:
        x, wide = (self.hidden, SHAPE.width) if paired else (self.x, SHAPE.inner)
        if y is None:
            y = x.new_full((self.expert_TC.numel(), wide), float("nan"))
        launch_lanes(x, y, self.weight_TC, self.expert_TC, self.experts, paired)
        return y

    def expected(self, paired: bool) -> Tensor:
        w, bias = self.experts.gate_up_EXD, self.experts.gate_up_bias_EX
        if paired:
            w, bias = self.experts.down_EDI, self.experts.down_bias_ED
        assert isinstance(w, Packed) and bias is not None
        expert_P, weight_P1 = self.expert_TC.flatten(), self.weight_TC.flatten()[:, None]
        want = torch.empty(len(expert_P), SHAPE.width if paired else SHAPE.inner, device="cuda")
        for e in expert_P.unique().tolist():
            pairs = (expert_P == e).nonzero().flatten()
            rows = self.hidden[pairs] if paired else self.x[pairs // SHAPE.chosen]
            y = rows.float() @ w[e].float().T + bias[e].float()
            want[pairs] = y * weight_P1[pairs] if paired else gated(y, self.experts.clamp)
        return want

    def whole(self, rows: int | None = None) -> Tensor:
        return expert_mlp_packed(self.x[:rows], self.weight_TC[:rows], self.expert_TC[:rows], self.experts)


def check(paired: bool, layer: Layer) -> None:
    got, want = layer.product(paired), layer.expected(paired)
    off = float((got.float() - want).abs().max() / want.abs().max())
    assert off < 0.01, (paired, READ_AHEAD, off)
    got_TCN = got.unflatten(0, layer.expert_TC.shape)
    for at in range(len(layer.x)):
        assert torch.equal(layer.row(at).product(paired), got_TCN[at]), (paired, READ_AHEAD, at)


def measure(rows: int, paired: bool, weights: list[Experts], deadline: float) -> list[dict[str, Any]]:
    torch.manual_seed(rows)
    layers = [Layer(rows, experts) for experts in weights]
    hit = sum(len(layer.expert_TC.unique()) for layer in layers) / LAYERS
    about = {"rows": rows, "product": "second" if paired else "gated", "hit": hit}
    about["floor_us"] = SHAPE.floor_us(hit, paired)
    kept, found = dict(READ_AHEAD), []
    for setting in dict.fromkeys([kept[rows, paired], *SETTINGS]):
        if time.time() > deadline:
            break
        READ_AHEAD.update({key: setting for key in kept if key[1] == paired})  # a row alone takes it, too
        check(paired, layers[0])
        us = microseconds([partial(layer.product, paired, layer.product(paired)) for layer in layers] * 3)
        used = setting == kept[rows, paired]
        found.append(about | {"setting": setting, "us": us, "in_use": used})
        label = f"{rows:3} rows {about['product']:6} hit {hit:4.1f}  {us:7.1f} us  floor {about['floor_us']:5.1f}"
        print(f"{label}  {setting}{'  <- in use' * used}", flush=True)
    READ_AHEAD.update(kept)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=90, help="for settings; what does not fit stays unmeasured")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    deadline = time.time() + args.seconds
    torch.manual_seed(0)
    weights = [random_experts(SHAPE) for _ in range(LAYERS)]
    most = Layer(300, weights[0])
    alone = most.whole(1)
    same = {rows: torch.equal(most.whole(rows)[:1], alone) for rows in (4, 8, 9, 16, 64, 128, 129, 300)}
    print("a row's bits alone are those it has among so many:", same, flush=True)
    products = [
        one for rows in (8, 4, 1) for paired in (False, True) for one in measure(rows, paired, weights, deadline)
    ]
    whole = {}
    for rows in (1, 4, 8, 16, 64, 256):
        whole[rows] = microseconds([Layer(rows, experts).whole for experts in weights])
        print(f"whole layer, {rows:3} rows: {whole[rows]:7.1f} us", flush=True)
    about = {"bench": "kernel_experts_lanes", "gpu": torch.cuda.get_device_name(), "same_bits": same}
    line = json.dumps(about | {"products": products, "layers": whole})
    if args.out:
        args.out.write_text(line)
    print(line)


if __name__ == "__main__":
    main()
