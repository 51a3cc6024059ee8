"""Attention over pages on a GPU: what each launch configuration takes, next to what torch and FlashInfer take.

    python benchmarks/kernel_attention.py --out attention.json
    python benchmarks/kernel_attention.py --quick --out quick.json

The second is the points that matter most, as a layer runs them: in a graph of dependent launches, behind a kernel
that writes the merged product, rotation included. The first: correctness, then configurations at a few points, then
every shape with the configuration in use, then prompts and the rotation. Everything is timed inside a CUDA graph that
goes through enough different pages to miss the L2. Prints as it goes; the file given by --out is rewritten after
every step, so a run cut short keeps what it has. The last line is one JSON object. Parts that do not run on this
machine say so and are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from peagle.kernels.attention.paged import Pages, even_causal, paged_attention_torch, varlen_causal
from peagle.kernels.attention.paged_launch import Launch, choose_launch
from peagle.kernels.attention.paged_triton import paged_attention_triton
from peagle.kernels.attention.prefill_triton import PrefillLaunch, prefill_attention_triton
from peagle.kernels.attention.rotary import Rotation, split_rotate_torch
from peagle.kernels.attention.rotary_triton import split_rotate_triton

BLOCK = 16
DTYPE = torch.bfloat16
COLD_BYTES = 160e6  # three times the L2 of an H200


@dataclass(frozen=True)
class Model:
    name: str
    heads: int
    kv_heads: int
    width: int

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


BIG = Model("8b", 32, 8, 128)
SMALL = Model("smollm2-135m", 9, 3, 64)

RESULTS: dict[str, Any] = {}
OUT: Path | None = None
DEADLINE = math.inf


def say(*words: object) -> None:
    print(*words, flush=True)


def keep(section: str, **row: Any) -> None:
    RESULTS.setdefault(section, []).append(row)
    if OUT is not None:
        OUT.write_text(json.dumps(RESULTS))


def left() -> float:
    return DEADLINE - time.monotonic()


@contextlib.contextmanager
def may_fail(what: str) -> Iterator[None]:
    """A variant that does not run here costs one line, not the run."""
    try:
        yield
    except Exception as error:
        line = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        say(f"  {what}: {line}")
        keep("failed", what=what, error=line)
        with contextlib.suppress(Exception):
            torch.cuda.synchronize()


class Pool:
    """One cache, big enough for every point of a model; different block tables are different cold copies."""

    def __init__(self, model: Model, slots: int) -> None:
        self.model = model
        self.blocks = -(-slots // BLOCK)
        shape = (self.blocks, BLOCK, model.kv_heads, model.width)
        self.k = torch.empty(shape, dtype=DTYPE, device="cuda").normal_()
        self.v = torch.empty(shape, dtype=DTYPE, device="cuda").normal_()
        self.order = torch.randperm(self.blocks, device="cuda").int()

    def copies(self, batch: int, slots: int) -> int:
        per = batch * -(-slots // BLOCK)
        cold = math.ceil(COLD_BYTES / (2 * per * BLOCK * self.model.kv_heads * self.model.width * 2))
        return max(1, min(cold, 256, self.blocks // per))

    def pages(self, batch: int, context: int, rows: int) -> list[Pages]:
        per = -(-(context + rows) // BLOCK)
        wide = -(-per // 16) * 16  # a table stride that is always a multiple of 16, as an engine would have it
        found = []
        for i in range(self.copies(batch, context + rows)):
            tables = torch.zeros(batch, wide, dtype=torch.int32, device="cuda")
            tables[:, :per] = self.order[i * batch * per : (i + 1) * batch * per].view(batch, per)
            starts = torch.full((batch,), context, dtype=torch.int32, device="cuda")
            live = torch.full((batch,), rows, dtype=torch.int32, device="cuda")
            found.append(Pages(tables, starts, live, rows, max_context=context))
        return found

    def inputs(self, total: int) -> tuple[Tensor, Tensor, Tensor]:
        m = self.model
        qkv = torch.empty(total, m.heads + 2 * m.kv_heads, m.width, dtype=DTYPE, device="cuda").normal_()
        q, k, v = qkv.split([m.heads, m.kv_heads, m.kv_heads], 1)
        return q, k, v


def seconds(calls: list[Callable[[], Any]], least: float = 0.008) -> float:
    """Per call, all of them in one graph: the best of three timings."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        calls[0]()  # compiles, and fills caches that must outlive the graph
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    calls = calls * max(1, 8 // len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def timed(count: int) -> float:
        start.record()
        for _ in range(count):
            graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000 / count

    timed(1)
    count = max(1, min(200, math.ceil(least / timed(1))))
    return min(timed(count) for _ in range(3)) / len(calls)


def attend(pool: Pool, batch: int, context: int, rows: int, launch: Launch | None, pdl: bool) -> float:
    q, k, v = pool.inputs(batch * rows)

    def call(pages: Pages) -> Callable[[], Tensor]:
        return lambda: paged_attention_triton(q, k, v, pool.k, pool.v, pages, None, pdl, launch)

    return seconds([call(pages) for pages in pool.pages(batch, context, rows)])


def sdpa(pool: Pool, batch: int, context: int, rows: int) -> float:
    """torch over keys that already lie in order; heads that share keys folded into the rows."""
    m, keys = pool.model, context + rows
    q, _, _ = pool.inputs(batch * rows)
    folded = q.reshape(batch, rows, m.kv_heads, m.group, m.width).transpose(1, 2).flatten(2, 3)
    mask = None
    if rows > 1:
        own = torch.arange(context, keys, device="cuda").repeat_interleave(m.group)
        mask = torch.arange(keys, device="cuda")[None] <= own[:, None]
    size = batch * keys
    flat = [x.view(-1, m.kv_heads, m.width) for x in (pool.k, pool.v)]

    def call(i: int) -> Callable[[], Tensor]:
        k, v = (x[i * size : (i + 1) * size].view(batch, keys, m.kv_heads, m.width).transpose(1, 2) for x in flat)
        return lambda: F.scaled_dot_product_attention(folded, k, v, mask)

    return seconds([call(i) for i in range(min(pool.copies(batch, keys), len(flat[0]) // size))])


def nbytes(model: Model, batch: int, context: int, rows: int) -> float:
    return 2.0 * batch * (context + rows) * model.kv_heads * model.width * 2


def check(pool: Pool) -> None:
    model = pool.model
    for rows, batch, context in ((1, 3, 333), (8, 2, 64), (14, 2, 1000), (14, 1, 0), (40, 2, 130)):
        pages = pool.pages(batch, context, rows)[0]
        q, k, v = pool.inputs(batch * rows)
        used = pages.block_tables_BM.flatten().unique().long()
        small = replace_tables(pages, used)
        want = paged_attention_torch(
            q.float(), k.float(), v.float(), pool.k[used].float(), pool.v[used].float(), small, None
        )
        base = choose_launch(pages, model.heads, model.kv_heads, model.width, BLOCK, DTYPE, q.device)
        for launch in (base, replace(base, splits=1), replace(base, queries=64)):
            for pdl in (False, True):
                with may_fail(f"check {model.name} rows {rows} {launch} pdl {pdl}"):
                    have = paged_attention_triton(q, k, v, pool.k, pool.v, pages, None, pdl, launch)
                    error = (have.float() - want).abs().max().item()
                    wrong = "" if error < 0.03 else "  WRONG"
                    keep("check", model=model.name, rows=rows, context=context, pdl=pdl, error=error, **asdict(launch))
                    if wrong or (launch is base and not pdl):
                        point = f"{model.name} rows {rows} context {context} pdl {pdl}"
                        say(f"  {point} {launch}: off by {error:.4f}{wrong}")


def replace_tables(pages: Pages, used: Tensor) -> Pages:
    """The same for a cache of only the used blocks."""
    tables = torch.searchsorted(used, pages.block_tables_BM.long()).int()
    return Pages(tables, pages.starts_B, pages.live_B, pages.max_rows)


def same_bits(pool: Pool) -> None:
    """The last of 8 or 14 rows against the same row alone, once the others are in the cache."""
    model = pool.model
    for rows in (8, 14):
        for context in (100, 1000, 4001):
            for wide in (False, True):
                with may_fail("same bits"):
                    pages = pool.pages(2, context, rows)[0]
                    q, k, v = pool.inputs(2 * rows)
                    launch = choose_launch(pages, model.heads, model.kv_heads, model.width, BLOCK, DTYPE, q.device)
                    many = paged_attention_triton(q, k, v, pool.k, pool.v, pages, None, launch=launch)
                    pages.starts_B += rows - 1
                    pages.live_B.fill_(1)
                    pages.max_rows = 1
                    at = [rows - 1, 2 * rows - 1]
                    alone = replace(launch, queries=launch.queries if wide else 16)
                    one = paged_attention_triton(q[at], k[at], v[at], pool.k, pool.v, pages, None, launch=alone)
                    same = torch.equal(one, many[at])
                    off = (one.float() - many[at].float()).abs().max().item()
                    tiles = f"tile {launch.queries} vs {alone.queries}"
                    say(f"  {model.name} rows {rows} context {context} {tiles}: {same} {off}")
                    keep("same_bits", model=model.name, rows=rows, context=context, same=same, off=off, wide=wide)


SHAPES = ((128, 8, 2, 2), (128, 8, 3, 2), (128, 8, 2, 0), (64, 4, 3, 4), (64, 4, 3, 0), (64, 4, 2, 4), (64, 4, 4, 0))
SWEEP = {
    BIG: ((1, 1, 16384), (8, 1, 16384), (14, 1, 16384), (8, 1, 1024), (1, 1, 256), (8, 8, 4096), (8, 64, 1024)),
    SMALL: ((8, 1, 4096), (6, 64, 512), (1, 1, 256)),
}


def configurations(model: Model, rows: int) -> list[Launch]:
    queries = max(16, 1 << (rows * model.group - 1).bit_length())
    return [Launch(tile, min(queries, 64), 0, warps, stages, ahead) for tile, warps, stages, ahead in SHAPES]


def sweep(pool: Pool, points: tuple[tuple[int, int, int], ...]) -> None:
    model = pool.model
    for rows, batch, context in points:
        if left() < 45:
            say("  (out of time for the sweep)")
            return
        timings: list[tuple[float, Launch, bool]] = []

        def measure(launch: Launch, pdl: bool, point: tuple[int, int, int], into: list) -> None:
            rows, batch, context = point
            with may_fail(f"{model.name} rows {rows} batch {batch} context {context} {launch}"):
                took = attend(pool, batch, context, rows, launch, pdl)
                into.append((took, launch, pdl))
                keep(
                    "sweep",
                    model=model.name,
                    rows=rows,
                    batch=batch,
                    context=context,
                    us=took * 1e6,
                    pdl=pdl,
                    **asdict(launch),
                )

        point = (rows, batch, context)
        pages = pool.pages(batch, context, rows)[0]
        usual = choose_launch(pages, model.heads, model.kv_heads, model.width, BLOCK, DTYPE, pool.k.device).programs
        for launch in configurations(model, rows):
            for splits in sorted({usual, max(1, min(2 * usual, context // launch.tile + 1))}):
                measure(replace(launch, splits=splits), False, point, timings)
        if not timings:
            continue
        best = min(timings, key=lambda t: t[0])[1]
        for splits in sorted({1, max(1, usual // 2), 3 * usual, 4 * usual}):
            if splits <= context // best.tile + 1 and splits <= 64:
                measure(replace(best, splits=splits), False, point, timings)
        best = min(timings, key=lambda t: t[0])[1]
        measure(best, True, point, timings)
        if best.queries != 64:
            measure(replace(best, queries=64), False, point, timings)
        timings.sort(key=lambda t: t[0])
        ideal = nbytes(model, batch, context, rows)
        say(f"  {model.name} rows {rows} batch {batch} context {context}:")
        shown = timings[:4] + [t for t in timings[4:] if t[2] or t[1].queries != best.queries]
        for took, launch, pdl in shown:
            say(f"    {took * 1e6:8.1f} us {ideal / took / 1e9:6.0f} GB/s  {launch}{' pdl' if pdl else ''}")


def grid(pool: Pool) -> None:
    model = pool.model
    say(f"  {model.name:13} rows batch context |   triton    GB/s |  pdl us | sdpa us")
    for context in (256, 1024, 4096, 16384):
        for batch in (1, 8, 64):
            for rows in (1, 8, 14):
                if left() < 25:
                    say("  (out of time for the grid)")
                    return
                row: dict[str, Any] = {"model": model.name, "rows": rows, "batch": batch, "context": context}
                with may_fail(f"grid {row}"):
                    row["us"] = attend(pool, batch, context, rows, None, False) * 1e6
                    row["gb_s"] = nbytes(model, batch, context, rows) / row["us"] / 1e3
                with may_fail(f"grid pdl {row}"):
                    row["pdl_us"] = attend(pool, batch, context, rows, None, True) * 1e6
                if rows != 14:
                    with may_fail(f"sdpa {row}"):
                        row["sdpa_us"] = sdpa(pool, batch, context, rows) * 1e6
                keep("grid", **row)
                took = f"{row.get('us', math.nan):8.1f} {row.get('gb_s', 0):7.0f}"
                say(
                    f"  {'':13} {rows:4} {batch:5} {context:7} | {took}"
                    f" | {row.get('pdl_us', math.nan):7.1f} | {row.get('sdpa_us', math.nan):7.1f}"
                )


def prefill(pool: Pool) -> None:
    model = pool.model
    for batch, rows, context in ((1, 16384, 0), (64, 128, 0), (1, 2048, 0), (1, 2048, 14336)):
        if left() < 10:
            say("  (out of time for prompts)")
            return
        pages = pool.pages(batch, context, rows)[0]
        q, k, v = pool.inputs(batch * rows)
        flop = 4.0 * model.heads * model.width * batch * (rows * context + rows * (rows + 1) / 2)
        wanted = None
        calls: dict[str, Callable[[], Tensor]] = {}
        for tile_rows, tile, warps, stages in ((128, 64, 8, 3), (128, 64, 4, 3), (128, 128, 8, 2), (64, 64, 4, 3)):
            launch = PrefillLaunch(tile_rows, tile, warps, stages)
            calls[f"triton {tile_rows}x{tile} warps {warps} stages {stages}"] = lambda launch=launch: (
                prefill_attention_triton(q, k, v, pool.k, pool.v, pages, None, launch=launch)  # noqa: B023
            )
        if context == 0:
            calls["varlen"] = lambda: varlen_causal(q, k, v, pages)  # noqa: B023
            folded = [x.unflatten(0, (batch, rows)).transpose(1, 2) for x in (q, k, v)]

            def plain(parts: list[Tensor] = folded) -> Tensor:
                out = F.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)
                return out.transpose(1, 2).flatten(0, 1)

            def cudnn(plain: Callable[[], Tensor] = plain) -> Tensor:
                from torch.nn.attention import SDPBackend, sdpa_kernel

                with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                    return plain()

            calls["sdpa"] = plain
            calls["sdpa cudnn"] = cudnn
        if batch == 1 and context:
            calls["gathered, sdpa"] = lambda: gathered(pool, q, k, v, pages, context)  # noqa: B023
        for name, call in calls.items():
            with may_fail(f"prefill {model.name} {batch}x{rows} after {context} {name}"):
                out = call()
                off = 0.0 if wanted is None else (out.float() - wanted.float()).abs().max().item()
                wanted = out if wanted is None else wanted
                took = seconds([call], 0.004)
                say(
                    f"  {model.name} {batch} x {rows} after {context} {name:32} {took * 1e6:9.1f} us "
                    f"{flop / took / 1e12:6.0f} TFLOP/s  differs by {off:.4f}"
                )
                keep(
                    "prefill",
                    model=model.name,
                    batch=batch,
                    rows=rows,
                    context=context,
                    name=name,
                    us=took * 1e6,
                    tflop_s=flop / took / 1e12,
                    off=off,
                )


def gathered(pool: Pool, q: Tensor, k: Tensor, v: Tensor, pages: Pages, context: int) -> Tensor:
    """One sequence, its cached keys copied to lie in order before the new ones, through torch's attention."""
    from torch.nn.attention.bias import causal_lower_right

    blocks = pages.block_tables_BM[0, : -(-context // BLOCK)]
    parts = []
    for cache, new in ((pool.k, k), (pool.v, v)):
        old = cache.index_select(0, blocks).flatten(0, 1)[:context]
        parts.append(torch.cat([old, new]).transpose(0, 1)[None])
    mask = causal_lower_right(len(q), context + len(q))
    out = F.scaled_dot_product_attention(q.transpose(0, 1)[None], *parts, attn_mask=mask, enable_gqa=True)
    return out[0].transpose(0, 1)


def rotary(pool: Pool) -> None:
    m = pool.model
    for rows in (1, 8, 512, 16384):
        with may_fail(f"rotary {rows}"):
            qkv = torch.empty(rows, (m.heads + 2 * m.kv_heads) * m.width, dtype=DTYPE, device="cuda").normal_()
            angles = torch.rand(rows, 1, m.width // 2, device="cuda") * 6
            cos, sin = (torch.cat([x, x], -1).to(DTYPE) for x in (angles.cos(), angles.sin()))
            weight = 1 + torch.rand(m.width, device="cuda").to(DTYPE)
            for norm in (None, weight):
                want = split_rotate_torch(qkv, cos, sin, m.heads, m.kv_heads, norm, norm, 1e-5)
                have = split_rotate_triton(qkv.clone(), cos, sin, m.heads, m.kv_heads, norm, norm, 1e-5)
                off = max((a.float() - b.float()).abs().max().item() for a, b in zip(have, want, strict=True))

                def fast(pdl: bool, norm: Tensor | None = norm) -> Callable[[], Any]:
                    return lambda: split_rotate_triton(qkv, cos, sin, m.heads, m.kv_heads, norm, norm, 1e-5, pdl)  # noqa: B023

                def slow(norm: Tensor | None = norm) -> Any:
                    return split_rotate_torch(qkv, cos, sin, m.heads, m.kv_heads, norm, norm, 1e-5)  # noqa: B023

                took = [seconds([call], 0.003) * 1e6 for call in (fast(False), fast(True), slow)]
                times = f"triton {took[0]:.1f} us, pdl {took[1]:.1f} us, torch {took[2]:.1f} us"
                say(f"  {m.name} rotary {rows} rows norm {norm is not None}: {times}, differs by {off}")
                keep("rotary", model=m.name, rows=rows, norm=norm is not None, us=took, off=off)


@triton.jit
def _copy_kernel(source, to, COUNT: tl.constexpr):
    """Stands for the product that a layer has before its attention."""
    tl.extra.cuda.gdc_launch_dependents()
    tl.extra.cuda.gdc_wait()
    at = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    tl.store(to + at, tl.load(source + at, mask=at < COUNT), mask=at < COUNT)


FEW = ((128, 8, 2, 2), (128, 8, 3, 2), (128, 8, 2, 0), (64, 4, 3, 4), (64, 4, 2, 4))
MANY = ((64, 4, 3, 0), (64, 4, 2, 0), (64, 4, 3, 2), (128, 8, 2, 0))
# rows, batch, context; launches besides the one in use: tile, warps, stages, ahead
QUICK = {
    BIG: (
        (1, 1, 256, FEW),
        (1, 1, 1024, ()),
        (1, 1, 16384, FEW),
        (8, 1, 256, FEW),
        (8, 1, 512, FEW),
        (8, 1, 1024, FEW),
        (8, 1, 16384, FEW),
        (14, 1, 256, ()),
        (14, 1, 1024, FEW),
        (14, 1, 16384, ()),
        (8, 8, 512, FEW),
        (4, 64, 512, MANY),
    ),
    SMALL: ((8, 1, 512, FEW), (8, 64, 512, MANY), (1, 1024, 256, MANY)),
}


def quick_launches(pool: Pool, rows: int, batch: int, context: int, shapes: tuple) -> list[Launch]:
    """The one in use first; with small tiles also twice the programs."""
    model = pool.model
    pages = pool.pages(batch, context, rows)[0]
    pages.max_context, pages.block_tables_BM = None, pages.block_tables_BM.new_empty(batch, 2048)  # as in an engine
    usual = choose_launch(pages, model.heads, model.kv_heads, model.width, BLOCK, DTYPE, pool.k.device)
    found = {usual: None}
    for tile, warps, stages, ahead in shapes:
        launch = replace(usual, tile=tile, warps=warps, stages=stages, ahead=ahead)
        found[launch] = None
        if tile == 64 and 1 < 2 * usual.programs <= 64 and ahead:
            found[replace(launch, splits=2 * usual.programs, programs=0)] = None
    return list(found)


BEFORE: dict[tuple[str, int, int], float] = {}


def chain(pool: Pool, rows: int, batch: int, context: int, launch: Launch, fused: bool) -> tuple[float, float]:
    """Of attention with its rotation, as it comes after another kernel; and of that kernel alone."""
    m, total = pool.model, batch * rows
    source = torch.empty(total, (m.heads + 2 * m.kv_heads) * m.width, dtype=DTYPE, device="cuda").normal_()
    qkv = torch.empty_like(source)
    angles = torch.rand(total, 1, m.width // 2, device="cuda") * 6
    cos, sin = (torch.cat([x, x], -1).to(DTYPE) for x in (angles.cos(), angles.sin()))
    split = (m.heads, m.kv_heads, m.kv_heads)

    def before() -> None:
        count = source.numel()
        _copy_kernel[(triton.cdiv(count, 1024),)](source, qkv, COUNT=count, launch_pdl=True)

    def call(pages: Pages) -> Callable[[], Tensor]:
        def both() -> Tensor:
            before()
            if fused:
                q, k, v = qkv.unflatten(1, (-1, m.width)).split(split, 1)
                rotation = Rotation(cos, sin)
                return paged_attention_triton(q, k, v, pool.k, pool.v, pages, None, True, launch, rotation)
            q, k, v = split_rotate_triton(qkv, cos, sin, m.heads, m.kv_heads, pdl=True)
            return paged_attention_triton(q, k, v, pool.k, pool.v, pages, None, True, launch)

        return both

    calls = [call(pages) for pages in pool.pages(batch, context, rows)]
    key = (m.name, total, len(calls))
    if key not in BEFORE:
        BEFORE[key] = seconds([before] * len(calls), 0.002)
    return seconds(calls, 0.004), BEFORE[key]


def quick(pool: Pool) -> None:
    model = pool.model
    for rows, batch, context, shapes in QUICK[model]:
        say(f"  {model.name} rows {rows} batch {batch} context {context}: attention and rotation, us")
        launches = quick_launches(pool, rows, batch, context, shapes)
        for launch, fused in [(launches[0], False)] + [(launch, True) for launch in launches]:
            with may_fail(f"quick {model.name} rows {rows} batch {batch} context {context} {launch}"):
                both, alone = (1e6 * took for took in chain(pool, rows, batch, context, launch, fused))
                speed = nbytes(model, batch, context, rows) / (both - alone) / 1e3
                how = "" if fused else " rotation apart"
                mark = "  <- in use" if fused and launch is launches[0] else ""
                say(f"    {both - alone:8.2f} (+ {alone:.2f}) {speed:6.0f} GB/s  {launch}{how}{mark}")
                row = {"model": model.name, "rows": rows, "batch": batch, "context": context, "fused": fused}
                keep("quick", **row, us=both - alone, before_us=alone, **asdict(launch))


def quick_check(pool: Pool) -> None:
    """The fused rotation against torch, and the bits of a row among others and alone."""
    m = pool.model
    for rows, context in ((1, 333), (8, 500), (14, 1000), (14, 0)):
        with may_fail(f"check {m.name} rows {rows} context {context}"):
            pages = pool.pages(2, context, rows)[0]
            q, k, v = pool.inputs(2 * rows)
            angles = torch.rand(2 * rows, 1, m.width // 2, device="cuda") * 6
            cos, sin = (torch.cat([x, x], -1).to(DTYPE) for x in (angles.cos(), angles.sin()))
            rotation = Rotation(cos, sin)
            used = pages.block_tables_BM.flatten().unique().long()
            turned = rotation.turn(q, k)
            caches = pool.k[used].float(), pool.v[used].float()
            want = paged_attention_torch(
                turned[0].float(), turned[1].float(), v.float(), *caches, replace_tables(pages, used), None
            )
            launch = choose_launch(pages, m.heads, m.kv_heads, m.width, BLOCK, DTYPE, q.device)
            many = paged_attention_triton(q, k, v, pool.k, pool.v, pages, None, True, launch, rotation)
            error = (many.float() - want).abs().max().item()
            pages.starts_B += rows - 1
            pages.live_B.fill_(1)
            pages.max_rows = 1
            at = [rows - 1, 2 * rows - 1]
            alone = replace(launch, queries=16)
            rotation = Rotation(cos[at], sin[at])
            one = paged_attention_triton(q[at], k[at], v[at], pool.k, pool.v, pages, None, True, alone, rotation)
            same = torch.equal(one, many[at])
            say(f"  {m.name} rows {rows} context {context}: off by {error:.4f}, same bits alone: {same}")
            keep("quick_check", model=m.name, rows=rows, context=context, error=error, same=same)


def planning(pool: Pool) -> None:
    """What torch's attention takes on the host for prompts of lengths it has not seen."""
    took = []
    for rows in (1024, 1000, 999, 1024):
        q, k, v = pool.inputs(rows)
        torch.cuda.synchronize()
        began = time.perf_counter()
        even_causal(q, k, v, 1)
        torch.cuda.synchronize()
        took.append(1e3 * (time.perf_counter() - began))
    say(f"  {pool.model.name} first sdpa of 1024, 1000, 999 rows: {took[0]:.1f} {took[1]:.1f} {took[2]:.1f} ms;")
    say(f"  1024 again: {took[3]:.2f} ms")
    keep("planning", model=pool.model.name, ms=took)


class TooLong(Exception):
    pass


def flashinfer(pool: Pool, limit: int) -> None:
    """FlashInfer builds its kernels on first use, hence the alarm."""

    def alarm(*_: object) -> None:
        raise TooLong(f"no answer in {limit} s")

    signal.signal(signal.SIGALRM, alarm)
    signal.alarm(limit)
    try:
        import flashinfer as fi

        m = pool.model
        for rows, batch, context in ((1, 1, 1024), (8, 1, 1024), (8, 1, 16384), (8, 8, 4096), (8, 64, 1024)):
            q, _, _ = pool.inputs(batch * rows)
            q = q.contiguous()
            keys = context + rows
            per = -(-keys // BLOCK)
            calls = []
            ints = {"dtype": torch.int32, "device": "cuda"}
            for pages in pool.pages(batch, context, rows)[:8]:
                wrapper = fi.BatchPrefillWithPagedKVCacheWrapper(
                    torch.empty(128 << 20, dtype=torch.uint8, device="cuda"), "NHD"
                )
                wrapper.plan(
                    torch.arange(batch + 1, **ints) * rows,
                    torch.arange(batch + 1, **ints) * per,
                    pages.block_tables_BM[:, :per].reshape(-1).contiguous(),
                    torch.full((batch,), (keys - 1) % BLOCK + 1, **ints),
                    m.heads,
                    m.kv_heads,
                    m.width,
                    BLOCK,
                    causal=True,
                    q_data_type=DTYPE,
                )
                calls.append(lambda wrapper=wrapper: wrapper.run(q, (pool.k, pool.v)))  # noqa: B023
            took = seconds(calls) * 1e6
            say(f"  flashinfer {m.name} rows {rows} batch {batch} context {context}: {took:.1f} us")
            keep("flashinfer", model=m.name, rows=rows, batch=batch, context=context, us=took)
    finally:
        signal.alarm(0)


def varlen_pages(pool: Pool) -> None:
    """torch's flash attention over pages, in releases that take a block table."""
    import inspect

    from torch.nn.attention.varlen import varlen_attn

    names = inspect.signature(varlen_attn).parameters
    if "block_table" not in names or "seqused_k" not in names:
        say("  varlen_attn takes no block table here")
        return
    rows, batch, context = 8, 8, 4096
    q, _, _ = pool.inputs(batch * rows)
    how = {"enable_gqa": True} if "enable_gqa" in names else {}
    with may_fail("varlen over pages"):
        calls = []
        for pages in pool.pages(batch, context, rows):
            cu, used = pages.offsets_B1(), pages.starts_B + rows
            how |= {"block_table": pages.block_tables_BM, "seqused_k": used, "window_size": (-1, 0)}
            calls.append(
                lambda cu=cu, how=dict(how): varlen_attn(q, pool.k, pool.v, cu, None, rows, context + rows, **how)
            )
        took = seconds(calls) * 1e6
        say(f"  varlen over pages {pool.model.name} rows {rows} batch {batch} context {context}: {took:.1f} us")
        keep("varlen_pages", model=pool.model.name, rows=rows, batch=batch, context=context, us=took)


def compile_one(job: tuple[Model, Launch, bool, bool]) -> str:
    """In a process of its own: one tiny call, whose kernel the other processes then find in Triton's cache."""
    model, launch, pdl, fused = job
    try:
        pool = Pool(model, 1024)
        pages = pool.pages(1, 100, 4)[0]
        cos = torch.ones(4, 1, model.width, dtype=DTYPE, device="cuda")
        rotation = Rotation(cos, cos) if fused else None
        paged_attention_triton(*pool.inputs(4), pool.k, pool.v, pages, None, pdl, launch, rotation)
        torch.cuda.synchronize()
        return ""
    except Exception as error:
        return f"{launch}: {error}".splitlines()[0][:200]


def jobs_of_all() -> list[tuple[Model, Launch, bool, bool]]:
    jobs = []
    for model, points in SWEEP.items():
        for rows in {point[0] for point in points} | {1, 8, 14}:
            for i, launch in enumerate(configurations(model, rows)):
                jobs += [
                    (model, replace(launch, splits=2), pdl, False) for pdl in ((False, True) if i < 4 else (False,))
                ]
    return jobs


def jobs_of_quick(pools: list[Pool]) -> list[tuple[Model, Launch, bool, bool]]:
    jobs = []
    for pool in pools:
        for rows, batch, context, shapes in QUICK[pool.model]:
            launches = quick_launches(pool, rows, batch, context, shapes)
            jobs.append((pool.model, launches[0], True, False))
            jobs += [(pool.model, launch, True, True) for launch in launches]
        for rows in (1, 8, 14):  # the checks'
            for context in (333, 500, 1000, 0):
                pages = pool.pages(2, context, rows)[0]
                m = pool.model
                launch = choose_launch(pages, m.heads, m.kv_heads, m.width, BLOCK, DTYPE, pool.k.device)
                jobs += [(m, launch, True, True), (m, replace(launch, queries=16), True, True)]
    return jobs


def compile_ahead(workers: int, jobs: list[tuple[Model, Launch, bool, bool]]) -> None:
    # The combination is compiled for each power of two of splits, the kernel itself for all of them.
    unique = list({(m, replace(x, splits=triton.next_power_of_2(x.splits)), pdl, fused) for m, x, pdl, fused in jobs})
    began = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(min(workers, len(unique))) as pool:
        errors = [error for error in pool.imap_unordered(compile_one, unique) if error]
    say(f"{len(unique)} configurations compiled in {time.monotonic() - began:.0f} s", *errors)


def main() -> None:
    global OUT, DEADLINE
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file, rewritten after every step")
    parser.add_argument("--budget", type=float, default=110, help="seconds after which parts are left out")
    parser.add_argument("--workers", type=int, default=12, help="processes that compile ahead; 0: none")
    parser.add_argument("--flashinfer", type=int, default=0, metavar="SECONDS", help="time it too, for at most so long")
    parser.add_argument(
        "--only", default="check,bits,sweep,planning,prefill,rotary,grid,varlen", help="parts, by commas"
    )
    parser.add_argument("--quick", action="store_true", help="the points that matter most, in half a minute")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("needs a CUDA device")
    OUT, DEADLINE = args.out, time.monotonic() + args.budget
    torch.manual_seed(0)
    RESULTS["device"] = torch.cuda.get_device_name()
    RESULTS["torch"] = torch.__version__
    say(RESULTS["device"], "torch", torch.__version__)
    slots = 16384 * 8 if args.quick else 64 * (16384 + 64)
    pools = [Pool(BIG, slots), Pool(SMALL, max(slots, 1024 * 272))]
    if args.workers:
        with may_fail("compiling ahead"):
            compile_ahead(args.workers, jobs_of_quick(pools) if args.quick else jobs_of_all())
    parts: dict[str, Callable[[Pool], None]] = {
        "check": check,
        "bits": same_bits,
        "sweep": lambda pool: sweep(pool, SWEEP[pool.model]),
        "prefill": prefill,
        "rotary": rotary,
        "grid": grid,
        "varlen": varlen_pages,
        "planning": planning,
    }
    if args.quick:
        parts = {"check": quick_check, "quick": quick, "planning": planning}
        args.only = "check,quick,planning"
    with torch.inference_mode():
        for name, part in parts.items():
            if name not in args.only.split(","):
                continue
            for pool in pools:
                say(f"{name} ({args.budget - left():.0f} s)")
                try:
                    part(pool)
                except Exception:
                    say(traceback.format_exc(limit=4))
        if args.flashinfer:
            try:
                flashinfer(pools[0], args.flashinfer)
            except Exception as error:
                say(f"flashinfer: {type(error).__name__}: {str(error)[:300]}")
    say(f"done in {args.budget - left():.0f} s")
    print(json.dumps(RESULTS), flush=True)


if __name__ == "__main__":
    main()
