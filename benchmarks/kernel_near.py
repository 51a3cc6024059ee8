# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, check-untyped-defs=False
"""Attention of few rows of few short sequences with one trip to the L2 instead of two, against the kernel in use.

    python benchmarks/kernel_near.py --out near.json

What a program has to wait for is the product ahead: queries, and keys and values of new rows. Old keys and values are
nobody's output, so here they are there before the wait, and addresses are known. New ones go to the cache for later
rounds, and are not read back from there: a new key's scores are computed by themselves and put where its place in the
tile is. A row's bits are those of `_paged_kernel`: the same products of the same keys, in tiles of the same places,
added up in the same order.

First compares bits on random data, then times whole rounds of SmolLM2's shape with each kernel, in turns: this one with
64 and with 16 rows in the product with new keys, of which 16 take an instruction that may round otherwise, and the one
in use with 8 queries a program, where all products take that. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also where this file is imported from elsewhere
from peagle.config import Window
from peagle.kernels import paged_attention_triton as usual
from peagle.kernels.paged_attention import Pages
from peagle.kernels.paged_attention_triton import _pairs, _step_by_keys, _sum_over_keys, _turn, cache_steps, check_heads
from peagle.kernels.paged_launches import Launch, choose_launch, near_positions
from peagle.kernels.rotary import Rotation

MOST_NEW = 64  # rows of the product with new keys: fewer are another kind of instruction


@triton.jit
def _merged(scores, new_scores, n, live, QUERIES: tl.constexpr, NEW: tl.constexpr):
    """Scores of a tile, those of new keys in their places: `n` is how far behind the first of these a key lies."""
    at = tl.minimum(tl.maximum(n, 0), NEW - 1)
    theirs = tl.gather(new_scores, at[:, None] + tl.zeros((1, QUERIES), tl.int32), 0)
    return tl.where(((n >= 0) & (n < live))[:, None], theirs, scores)


@triton.jit(do_not_specialize=["rows", "table_width"])
def _near_kernel(
    q,
    k,
    v,
    cos,
    sin,
    q_norm,
    k_norm,
    cache_k,
    cache_v,
    out,
    tables,
    starts,
    lives,
    rows,
    table_row,
    table_width,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    angle_row,
    block_step,
    slot_step,
    head_step,
    scale,
    eps,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    QUERIES: tl.constexpr,
    NEW: tl.constexpr,
    ROTATE: tl.constexpr,
    NORM: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    g = tl.program_id(0) % G
    query_tile = tl.program_id(0) // G
    b = tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    live = tl.load(lives + b).to(tl.int32)
    start = tl.load(starts + b).to(tl.int32)
    table = tables + b.to(tl.int64) * table_row
    cols = tl.arange(0, D)
    pos = tl.arange(0, TILE)
    block = tl.load(table + pos // BLOCK, mask=pos // BLOCK < table_width, other=0)
    start = tl.where(live > 0, start, 0)  # a sequence without live rows is an empty place of the batch
    n = pos - start
    at = (block.to(tl.int64) * block_step + (pos % BLOCK) * slot_step + g * head_step)[:, None] + cols[None, :]
    keys = tl.load(cache_k + at, mask=(n < 0)[:, None], other=0.0)
    values = tl.load(cache_v + at, mask=(n < 0)[:, None], other=0.0)
    first_v = v + b.to(tl.int64) * rows * v_row + g * v_head
    here = ((n >= 0) & (n < live))[:, None]
    v_at = first_v + (n * v_row)[:, None] + cols[None, :]
    if TILES > 1:
        later_block = tl.load(table + (pos + TILE) // BLOCK, mask=(pos + TILE) // BLOCK < table_width, other=0)
        later_base = later_block.to(tl.int64) * block_step + (pos % BLOCK) * slot_step + g * head_step
        later_at = later_base[:, None] + cols[None, :]
        later_keys = tl.load(cache_k + later_at, mask=(n + TILE < 0)[:, None], other=0.0)
        later_values = tl.load(cache_v + later_at, mask=(n + TILE < 0)[:, None], other=0.0)
        there = ((n + TILE >= 0) & (n + TILE < live))[:, None]
        later_v_at = v_at + TILE * v_row
    i = tl.arange(0, NEW)
    fresh = (i < live)[:, None]
    to_block = tl.load(table + (start + i) // BLOCK, mask=i < live, other=0).to(tl.int64)
    to = (to_block * block_step + ((start + i) % BLOCK) * slot_step + g * head_step)[:, None] + cols[None, :]
    new = (b.to(tl.int64) * rows + i)[:, None]
    k_at = k + new * k_row + g * k_head
    m = query_tile * QUERIES + tl.arange(0, QUERIES)
    valid = (m < rows * GROUP)[None, :]
    own = start + m // GROUP
    head = g * GROUP + m % GROUP
    row = b.to(tl.int64) * rows + m // GROUP
    q_at = q + (row * q_row + head * q_head)[None, :]
    out_at = out + (row * (G * GROUP * D) + head * D)[None, :] + cols[:, None]
    if PDL:
        tl.extra.cuda.gdc_wait()

    queries = tl.load(q_at + cols[:, None], mask=valid, other=0.0)  # [D, QUERIES]
    key = tl.load(k_at + cols[None, :], mask=fresh, other=0.0)
    if ROTATE:
        q_other, q_cos, q_sin = _pairs(q_at, row[None, :], cols[:, None], valid, cos, sin, angle_row, D)
        k_other, k_cos, k_sin = _pairs(k_at, new, cols[None, :], fresh, cos, sin, angle_row, D)
    values = tl.load(v_at, mask=here, other=values)
    if TILES > 1:
        later_values = tl.load(later_v_at, mask=there, other=later_values)
    if ROTATE:
        queries = _turn(queries, q_other, q_cos, q_sin, cols[:, None], valid, q_norm, eps, 0, D, NORM)
        key = _turn(key, k_other, k_cos, k_sin, cols[None, :], fresh, k_norm, eps, 1, D, NORM)

    best = tl.zeros((QUERIES,), tl.float32) - float("inf")
    total = tl.zeros((TILE, QUERIES), tl.float32)
    acc = tl.zeros((D, QUERIES), tl.float32)
    # Of its own in shared memory: the assembler of CUDA 12.8 loses the address of an operand that two products have,
    # if their tiles differ.
    twins = tl.where(m[None, :] <= rows * GROUP, queries, tl.zeros_like(queries))
    new_scores = tl.dot(key, twins, input_precision=PRECISION)
    scores = _merged(tl.dot(keys, queries, input_precision=PRECISION), new_scores, n, live, QUERIES, NEW) * scale
    scores = tl.where(pos[:, None] <= own[None, :], scores, float("-inf"))
    best, total, acc = _step_by_keys(scores, values, best, total, acc, PRECISION)
    if TILES > 1:
        later_scores = tl.dot(later_keys, queries, input_precision=PRECISION)
        later_scores = _merged(later_scores, new_scores, n + TILE, live, QUERIES, NEW) * scale
        later_scores = tl.where((pos + TILE)[:, None] <= own[None, :], later_scores, float("-inf"))
        best, total, acc = _step_by_keys(later_scores, later_values, best, total, acc, PRECISION)
    sum_of = _sum_over_keys(total, PRECISION)
    result = acc / tl.where(sum_of > 0.0, sum_of, 1.0)[None, :]
    tl.store(out_at, result.to(out.dtype.element_ty), mask=valid)

    # For later rounds, which is nobody's hurry. Programs of further query tiles write the same.
    tl.store(cache_k + to, key, mask=fresh)
    tl.store(cache_v + at, values, mask=here)
    if TILES > 1:
        tl.store(cache_v + later_at, later_values, mask=there)


def near_attention(
    q_THd: Tensor,
    k_TGd: Tensor,
    v_TGd: Tensor,
    cache_k: Tensor,
    cache_v: Tensor,
    pages: Pages,
    launch: Launch,
    pdl: bool = False,
    rotation: Rotation | None = None,
    new: int = MOST_NEW,
) -> Tensor:
    """`pages` say that no sequence has more than `launch`'s piece of keys, new ones included."""
    check_heads(q_THd, k_TGd, v_TGd, cache_k)
    total_rows, heads, width = q_THd.shape
    block_size, kv_heads = cache_k.shape[1:3]
    batch, rows, group = len(pages.starts_B), pages.max_rows, heads // kv_heads
    assert total_rows == batch * rows and rows <= MOST_NEW and pages.max_context is not None
    most = pages.max_context + rows
    assert most <= launch.tile * launch.span
    pdl = pdl and q_THd.is_cuda  # the interpreter knows nothing of it
    cos = sin = q_norm = k_norm = q_THd  # not looked at, but typed
    angle_row, eps = 0, 0.0
    if rotation is not None:
        cos, sin, eps, angle_row = rotation.cos, rotation.sin, rotation.eps, rotation.cos.stride(0)
        if rotation.normed:
            assert rotation.q_norm is not None and rotation.k_norm is not None
            q_norm, k_norm = rotation.q_norm, rotation.k_norm
    out = torch.empty((total_rows, heads, width), dtype=q_THd.dtype, device=q_THd.device)
    _near_kernel[(kv_heads * triton.cdiv(rows * group, launch.queries), batch)](
        q_THd,
        k_TGd,
        v_TGd,
        cos,
        sin,
        q_norm,
        k_norm,
        cache_k,
        cache_v,
        out,
        pages.block_tables_BM,
        pages.starts_B,
        pages.live_B,
        rows,
        pages.block_tables_BM.stride(0),
        pages.block_tables_BM.shape[1],
        *q_THd.stride()[:2],
        *k_TGd.stride()[:2],
        *v_TGd.stride()[:2],
        angle_row,
        *cache_steps(cache_k, cache_v),
        width**-0.5 * math.log2(math.e),
        eps,
        G=kv_heads,
        GROUP=group,
        D=width,
        BLOCK=block_size,
        TILE=launch.tile,
        TILES=1 if most <= launch.tile else 2,
        QUERIES=launch.queries,
        NEW=new if rows <= new else MOST_NEW,
        ROTATE=rotation is not None,
        NORM=rotation is not None and rotation.normed,
        PRECISION="ieee" if q_THd.dtype == torch.float32 else "tf32",
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=launch.warps,
        num_stages=1,
        enable_fp_fusion=rotation is None,  # as of `_paged_kernel`
    )
    return out


def attention(
    q_THd: Tensor,
    k_TGd: Tensor,
    v_TGd: Tensor,
    cache_k: Tensor,
    cache_v: Tensor,
    pages: Pages,
    window: Window,
    pdl: bool = False,
    rotation: Rotation | None = None,
    sinks: Tensor | None = None,
    new: int = MOST_NEW,
    queries: int = 0,
) -> Tensor:
    """As `paged_attention_triton`: by the kernel above wherever it can be. With `queries` by the one in use, so many a
    program."""
    heads, width, (block_size, kv_heads) = q_THd.shape[1], q_THd.shape[2], cache_k.shape[1:3]
    near = near_positions(heads, kv_heads, width, q_THd.dtype, q_THd.device)
    launch = choose_launch(pages, heads, kv_heads, width, block_size, q_THd.dtype, q_THd.device)
    short = pages.max_context is not None and near and pages.max_context + pages.max_rows <= near[-1]
    if short and not queries:
        return near_attention(q_THd, k_TGd, v_TGd, cache_k, cache_v, pages, launch, pdl, rotation, new)
    launch = replace(launch, queries=queries or launch.queries)
    more: dict[str, Any] = {"launch": launch, "rotation": rotation, "sinks": sinks}
    return IN_USE(q_THd, k_TGd, v_TGd, cache_k, cache_v, pages, window, pdl, **more)


IN_USE = usual.paged_attention_triton


@contextmanager
def patched(run: Any) -> Iterator[None]:
    usual.paged_attention_triton = run
    try:
        yield
    finally:
        usual.paged_attention_triton = IN_USE


def same_bits(other: Any, batch: int, rows: int, most: int, seed: int) -> bool:
    """As of the kernel in use: of all live rows, and of the caches."""
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
    for run in (IN_USE, other):
        own_k, own_v = caches.clone()
        out = run(q, k, v, own_k, own_v, pages, None, rotation=rotation)
        alive = (torch.arange(rows, device="cuda") < live_B[:, None]).flatten()
        made.append((out[alive], own_k, own_v))
    return all(torch.equal(a, b) for a, b in zip(*made, strict=True))


def rounds(
    others: dict[str, Any], layers: int, parallel: bool, drafts: int, batches: list[int], contexts: list[int]
) -> list[dict[str, Any]]:
    """Milliseconds with the kernel in use and with others."""
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
        for name, run in {"in use": IN_USE, **others}.items():
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
    cases = [(b, r, m, seed) for b in (1, 2, 8) for r in (1, 6, 8, 14, 16, 30) for m in (256, 512) for seed in (0, 1)]
    others = {"near, 64": attention, "near, 16": partial(attention, new=16), "8 queries": partial(attention, queries=8)}
    line: dict[str, Any] = {"bench": "near", "cases": len(cases), "other bits": {}}
    for name, run in others.items():
        wrong = [case for case in cases if not same_bits(run, *case)]
        line["other bits"][name] = wrong
        print(f"{name}: bits are the same in {len(cases) - len(wrong)} of {len(cases)} cases; others: {wrong}")
    line["rows"] = [
        *rounds(others, 4, True, 7, args.batch, args.context),
        *rounds(others, 4, True, 15, [1], args.context),
        *rounds(others, 1, False, 5, [1], args.context),
        *rounds(others, 0, True, 0, [1], args.context),
    ]
    line |= {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    print(json.dumps(line))
    if args.out:
        args.out.write_text(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
