# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, check-untyped-defs=False
"""Attention of few rows of few short sequences: the kernel for any length against the one for keys in one piece.

    python benchmarks/kernel_near.py --out near.json

First compares bits on random data, then times whole rounds of SmolLM2's shape with each, in turns. Prints a table, then
one JSON line.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also where this file is imported from elsewhere
from peagle.kernels import paged_attention_triton as triton_attention
from peagle.kernels.paged_attention import Pages
from peagle.kernels.paged_launches import choose_launch
from peagle.kernels.rotary import Rotation

CASES = [(b, r, m, seed) for b in (1, 2, 8) for r in (1, 6, 8, 14, 16, 30) for m in (256, 512) for seed in (0, 1)]
IN_USE = triton_attention.paged_attention_triton


def any_length(q_THd: Tensor, k: Tensor, v: Tensor, cache_k: Tensor, *more: Any, **named: Any) -> Tensor:
    heads, width, (block_size, kv_heads) = q_THd.shape[1], q_THd.shape[2], cache_k.shape[1:3]
    made = choose_launch(more[1], heads, kv_heads, width, block_size, q_THd.dtype, q_THd.device)
    return IN_USE(q_THd, k, v, cache_k, *more, **named, launch=replace(made, near=False))


KERNELS = {"any length": any_length, "near": IN_USE}


@contextmanager
def patched(run: Any) -> Iterator[None]:
    triton_attention.paged_attention_triton = run
    try:
        yield
    finally:
        triton_attention.paged_attention_triton = IN_USE


def same_bits(batch: int, rows: int, most: int, seed: int) -> bool:
    """Of all live rows, and of the caches."""
    heads, kv_heads, width, block = 9, 3, 64, 16
    gen = torch.Generator(device="cuda").manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, device="cuda").bfloat16()

    live_B = torch.randint(0 if batch > 1 else 1, rows + 1, (batch,), generator=gen, device="cuda").int()
    starts_B = torch.randint(0, most - rows + 1, (batch,), generator=gen, device="cuda").int()
    per = most // block
    tables_BM = torch.randperm(batch * per, generator=gen, device="cuda").view(batch, per).int()
    qkv = noise(batch * rows, heads + 2 * kv_heads, width)
    q, k, v = qkv.split([heads, kv_heads, kv_heads], 1)
    angles = torch.rand(batch * rows, 1, width // 2, generator=gen, device="cuda").repeat(1, 1, 2) * 6
    rotation = Rotation(angles.cos().bfloat16(), angles.sin().bfloat16())
    caches = noise(2, batch * per, block, kv_heads, width)
    pages = Pages(tables_BM, starts_B, live_B, rows, max_context=most - rows)
    made = []
    for run in KERNELS.values():
        own_k, own_v = caches.clone()
        out = run(q, k, v, own_k, own_v, pages, None, rotation=rotation)
        alive = (torch.arange(rows, device="cuda") < live_B[:, None]).flatten()
        made.append((out[alive], own_k, own_v))
    return all(torch.equal(a, b) for a, b in zip(*made, strict=True))


def rounds(layers: int, parallel: bool, drafts: int, batches: list[int], contexts: list[int]) -> list[dict[str, Any]]:
    """Milliseconds with each kernel."""
    from round import build, fill, recorded_for, timed

    from peagle.engine.graphs import RoundGraphs
    from peagle.engine.runner import Runner

    device, longest, most = torch.device("cuda"), 2048, max(batches)
    target, drafter = build("smollm2", layers, parallel, device, fc_norm=True)
    found = []
    with torch.inference_mode():
        per = longest // 16
        runner = Runner(target, drafter, 1 + most * per, most, longest, drafts, [0.0] * max(drafts, 1))
        fill(runner.cache)
        state = runner.state
        state.block_tables_SM[:most] = 1 + torch.randperm(most * per, device=device).view(most, per).int()
        every = {}
        for name, run in KERNELS.items():
            every[name] = RoundGraphs(runner, batches, [drafts])
            with patched(run):
                every[name].capture()
        for batch in batches:
            for context in contexts:
                times: dict[str, list[float]] = {name: [] for name in every}
                for _ in range(5):
                    for name, graphs in every.items():
                        recorded = recorded_for(graphs, batch, drafts, context)
                        recorded.slots_B.copy_(torch.arange(batch, device=device))
                        state.start_S[:most] = context
                        times[name].append(timed(recorded))
                row: dict[str, Any] = {"drafter": layers and ("p-eagle" if parallel else "eagle3"), "drafts": drafts}
                row |= {"batch": batch, "context": context, **{name: min(each) for name, each in times.items()}}
                found.append(row)
                print("  ".join(f"{value:.4f}" if isinstance(value, float) else str(value) for value in row.values()))
                sys.stdout.flush()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--context", type=int, nargs="+", default=[100, 200, 400])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    wrong = [case for case in CASES if not same_bits(*case)]
    print(f"bits are the same in {len(CASES) - len(wrong)} of {len(CASES)} cases; others: {wrong}")
    line: dict[str, Any] = {"bench": "near", "cases": len(CASES), "other bits": wrong}
    line["rows"] = [
        *rounds(4, True, 7, args.batch, args.context),
        *rounds(1, False, 5, [1], args.context),
        *rounds(0, True, 0, [1], args.context),
    ]
    line |= {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    print(json.dumps(line))
    if args.out:
        args.out.write_text(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
