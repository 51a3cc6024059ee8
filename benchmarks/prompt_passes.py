"""Recorded passes over prompts: what they take, and what they would with room for just these.

    python benchmarks/prompt_passes.py --out prompt_passes.json

SmolLM2's shape with a P-EAGLE drafter of 4 layers, random weights. A pass is the whole graph of a step: the target, the
first tokens, the drafter and its drafts. It is recorded for more rows, sequences and ends than there are; "tight" is
recorded for these alone. For three of them the kernels follow, recorded without dependent launches, since kernels that
overlap have no times of their own. Prints tables, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also where this file is imported from elsewhere
from round import build, by_kernel, one_after_another, timed

from peagle.config import SamplingParams
from peagle.engine.cuda_graphs import CHUNK_ROWS, PromptBuffers, PromptGraphs
from peagle.engine.model_runner import Runner
from peagle.engine.prefill import Numbers, Room, ends_of, lay_out
from peagle.engine.request import Chunk, Request

DRAFTS, LONGEST, SLOTS = 7, 2048, 64
PROMPTS = ((1, 60), (1, 110), (1, 180), (2, 110), (3, 110), (4, 110), (5, 110), (6, 110), (9, 110), (18, 110))
TAKEN_APART = ((1, 110), (4, 110), (9, 110))


def prompts(count: int, length: int) -> list[Chunk]:
    made = []
    for slot in range(count):
        ids, nobody = [(7 * i + slot) % 40000 for i in range(length)], frozenset[int]()
        request = Request(slot, ids, SamplingParams(max_tokens=20), 0, nobody, nobody, nobody, longest=LONGEST)
        request.slot = slot
        made.append(Chunk(request, 0, length))
    return made


def laid_out(chunks: list[Chunk], room: Room) -> Numbers:
    fresh, _ = ends_of(chunks)
    return lay_out(chunks, fresh, room, LONGEST, 0)


def milliseconds(recorded: PromptBuffers, chunks: list[Chunk]) -> float:
    recorded.replay(laid_out(chunks, recorded.room))
    return timed(recorded.graph)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = torch.device("cuda")
    target, drafter = build("smollm2", 4, True, device)
    per = LONGEST // 16
    runner = Runner(target, drafter, 1 + SLOTS * per, SLOTS, LONGEST, DRAFTS)
    runner.state.block_tables_SM[:SLOTS] = 1 + torch.arange(SLOTS * per, device=device).view(SLOTS, per).int()
    pool = torch.cuda.graph_pool_handle()
    graphs = PromptGraphs(runner, [rows for rows in CHUNK_ROWS if rows <= 2048])
    graphs.capture(pool)
    rows: list[dict[str, Any]] = []
    for count, length in PROMPTS:
        chunks = prompts(count, length)
        recorded = graphs.find(Room.of(chunks, runner.masks))
        assert recorded is not None
        tiled = -(-length // 64) * 64 + 64
        tight = graphs.record(replace(recorded.room, sequences=count + 1, max_rows=tiled, ends=count), pool)
        row: dict[str, Any] = {"prompts": count, "tokens": length, "rows": recorded.room.rows}
        row |= {"ms": milliseconds(recorded, chunks), "tight_ms": milliseconds(tight, chunks)}
        print(
            f"{count:3} x {length}: {row['rows']:5} rows {row['ms']:8.3f} ms, tight {row['tight_ms']:8.3f}", flush=True
        )
        if (count, length) in TAKEN_APART:
            with one_after_another():
                apart = graphs.record(recorded.room, pool)
            row["apart_ms"] = milliseconds(apart, chunks)
            row["kernels"] = by_kernel(partial(apart.replay, laid_out(chunks, apart.room)))
        rows.append(row)
    line = {"bench": "prompt_passes", "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}
    print(json.dumps(line))
    if args.out:
        args.out.write_text(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
