# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, check-untyped-defs=False
"""The Triton versions of paged_attention.py: nothing on the host depends on a length, so CUDA graphs can hold them.

`_paged_kernel`: a program has one sequence, one key/value head and one share of the keys, for all rows and all heads
that share the keys, which are thus read once. Key tiles lie at fixed positions and go round robin to the shares, so
which keys are added up with which depends on a row's position and on the number of shares, not on how many rows are
computed together or on the length: the same row gets the same sums whether it is verified or decoded.

`_prefill_kernel`: a program has one tile of rows and one head.

With TRITON_INTERPRET=1 in the environment, set before the import, the launchers take CPU tensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.paged_attention import Pages


@triton.jit
def _step(scores, v, best, total, acc, GUARD: tl.constexpr, PRECISION: tl.constexpr):
    """One tile into the running softmax. GUARD: a row may have seen nothing yet."""
    new = tl.maximum(best, tl.max(scores, 1))
    ref = new
    if GUARD:
        ref = tl.where(new == float("-inf"), 0.0, new)
    keep = tl.exp2(best - ref)
    p = tl.exp2(scores - ref[:, None])
    total = total * keep + tl.sum(p, 1)
    acc = acc * keep[:, None]
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return new, total, acc


@triton.jit
def _shares(start, live, splits, window, TILE: tl.constexpr, WINDOWED: tl.constexpr):
    """First tile seen, tile after the last, and how many shares have a tile; every kernel must find the same."""
    low = 0
    if WINDOWED:
        low = tl.maximum(start - window + 1, 0) // TILE
    tiles = tl.maximum((start + live + TILE - 1) // TILE, 1)
    return low, tiles, tl.minimum(tiles - low, splits)


@triton.jit
def _combine(parts, sums, part0, step, m, valid, low, used, splits, D: tl.constexpr):
    """Adds up the shares of queries m in the order of the shares, whoever arrived first."""
    # .cg: past the L1, which may hold what was there before the other programs wrote.
    cols = tl.arange(0, D)
    top = tl.zeros(m.shape, tl.float32) - float("inf")
    for s in tl.range(0, splits, loop_unroll_factor=8):
        ok = valid & ((s + splits - low % splits) % splits < used)
        at = part0 + s * step + m
        top = tl.maximum(top, tl.load(sums + at * 2, mask=ok, other=float("-inf"), cache_modifier=".cg"))
    ref = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros(m.shape, tl.float32)
    acc = tl.zeros((m.shape[0], D), tl.float32)
    for s in tl.range(0, splits, loop_unroll_factor=8):  # several loads under way at a time
        ok = valid & ((s + splits - low % splits) % splits < used)
        at = part0 + s * step + m
        weight = tl.exp2(tl.load(sums + at * 2, mask=ok, other=float("-inf"), cache_modifier=".cg") - ref)
        total += weight * tl.load(sums + at * 2 + 1, mask=ok, other=0.0, cache_modifier=".cg")
        part = tl.load(parts + at[:, None] * D + cols[None, :], mask=ok[:, None], other=0.0, cache_modifier=".cg")
        acc += weight[:, None] * part
    return acc / tl.where(total > 0.0, total, 1.0)[:, None]


@triton.jit(do_not_specialize=["rows", "splits", "window"])  # one compilation for all of them
def _paged_kernel(
    q,
    k,
    v,
    cache_k,
    cache_v,
    out,
    parts,
    sums,
    counters,
    tables,
    starts,
    lives,
    rows,
    splits,
    window,
    table_row,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    block_step,
    slot_step,
    head_step,
    scale,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    QUERIES: tl.constexpr,
    WINDOWED: tl.constexpr,
    LAST: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    g = tl.program_id(0) % G
    query_tile = tl.program_id(0) // G
    split = tl.program_id(1)
    b = tl.program_id(2)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    live = tl.load(lives + b).to(tl.int32)
    # A sequence without live rows is an empty place of the batch: its start means nothing.
    start = tl.where(live > 0, tl.load(starts + b).to(tl.int32), 0)
    end = start + live
    low, tiles, used = _shares(start, live, splits, window, TILE, WINDOWED)
    place = (split + splits - low % splits) % splits
    if place >= used:
        return
    first = low + place

    m = query_tile * QUERIES + tl.arange(0, QUERIES)
    j = m // GROUP
    head = g * GROUP + m % GROUP
    valid = m < rows * GROUP
    own = start + j
    cols = tl.arange(0, D)
    slots = tl.arange(0, TILE)
    row = b.to(tl.int64) * rows + j
    queries = tl.load(q + (row * q_row + head * q_head)[:, None] + cols[None, :], mask=valid[:, None], other=0.0)
    table = tables + b.to(tl.int64) * table_row
    best = tl.zeros((QUERIES,), tl.float32) - float("inf")
    total = tl.zeros((QUERIES,), tl.float32)
    acc = tl.zeros((QUERIES, D), tl.float32)

    cached = start // TILE  # tiles before this one are in the cache whole, and every row is past them
    for tile in range(first, cached, splits):
        pos = tile * TILE + slots
        block = tl.load(table + pos // BLOCK).to(tl.int64)
        at = block * block_step + (pos % BLOCK) * slot_step + g * head_step
        keys = tl.load(cache_k + at[:, None] + cols[None, :])
        values = tl.load(cache_v + at[:, None] + cols[None, :])
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale
        if WINDOWED:
            scores = tl.where(pos[None, :] > own[:, None] - window, scores, float("-inf"))
        best, total, acc = _step(scores, values, best, total, acc, WINDOWED, PRECISION)

    # The tiles with the last cached keys and the new rows. These few are not worth the shared memory of a pipeline.
    rest = first + tl.maximum((cached - first + splits - 1) // splits, 0) * splits
    for tile in tl.range(rest, tiles, splits, num_stages=1):
        pos = tile * TILE + slots
        old = pos < start
        fresh = (pos >= start) & (pos < end)
        block = tl.load(table + pos // BLOCK, mask=pos < end, other=0).to(tl.int64)
        at = (block * block_step + (pos % BLOCK) * slot_step + g * head_step)[:, None] + cols[None, :]
        new = b.to(tl.int64) * rows + (pos - start)
        # One load through selected pointers: two loads and a select would hold twice the registers.
        new_k = k + (new * k_row + g * k_head)[:, None] + cols[None, :]
        new_v = v + (new * v_row + g * v_head)[:, None] + cols[None, :]
        keys = tl.load(tl.where(old[:, None], cache_k + at, new_k), mask=(pos < end)[:, None], other=0.0)
        values = tl.load(tl.where(old[:, None], cache_v + at, new_v), mask=(pos < end)[:, None], other=0.0)
        # Positions from `start` on, which no program of this launch reads from the cache.
        tl.store(cache_k + at, keys, mask=fresh[:, None] & (query_tile == 0))
        tl.store(cache_v + at, values, mask=fresh[:, None] & (query_tile == 0))
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale
        seen = (pos[None, :] <= own[:, None]) & (pos < end)[None, :]
        if WINDOWED:
            seen = seen & (pos[None, :] > own[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
        best, total, acc = _step(scores, values, best, total, acc, True, PRECISION)

    heads = G * GROUP
    to = out + (row * heads * D + head * D)[:, None] + cols[None, :]
    if used == 1:
        result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
        tl.store(to, result.to(out.dtype.element_ty), mask=valid[:, None])
    else:
        # Partial sums lie as [B, splits, G, rows * GROUP].
        step = G * rows * GROUP
        part0 = b.to(tl.int64) * splits * step + g * rows * GROUP
        at = part0 + split * step + m
        tl.store(parts + at[:, None] * D + cols[None, :], acc, mask=valid[:, None])
        tl.store(sums + at * 2, best, mask=valid)
        tl.store(sums + at * 2 + 1, total, mask=valid)
        if LAST:
            # All threads' sums are written before the one that counts the program in.
            tl.debug_barrier()
            counter = counters + b * tl.num_programs(0) + tl.program_id(0)
            arrived = tl.atomic_add(counter, 1, sem="acq_rel")
            if arrived == used - 1:
                for q0 in range(0, QUERIES, 16):
                    some = query_tile * QUERIES + q0 + tl.arange(0, 16)
                    real = some < rows * GROUP
                    whole = _combine(parts, sums, part0, step, some, real, low, used, splits, D)
                    line = (b.to(tl.int64) * rows + some // GROUP) * heads + g * GROUP + some % GROUP
                    to_some = out + (line * D)[:, None] + cols[None, :]
                    tl.store(to_some, whole.to(out.dtype.element_ty), mask=real[:, None])
                tl.store(counter, 0)


@triton.jit(do_not_specialize=["rows", "splits", "window"])  # one compilation for all of them
def _combine_kernel(
    parts,
    sums,
    out,
    starts,
    lives,
    rows,
    splits,
    window,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    TILE: tl.constexpr,
    QUERIES: tl.constexpr,
    WINDOWED: tl.constexpr,
    PDL: tl.constexpr,
):
    g = tl.program_id(1)
    b = tl.program_id(2)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    live = tl.load(lives + b).to(tl.int32)
    start = tl.where(live > 0, tl.load(starts + b).to(tl.int32), 0)
    low, tiles, used = _shares(start, live, splits, window, TILE, WINDOWED)
    if used == 1:
        return  # the only share wrote the result
    m = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    valid = m < rows * GROUP
    step = G * rows * GROUP
    part0 = b.to(tl.int64) * splits * step + g * rows * GROUP
    result = _combine(parts, sums, part0, step, m, valid, low, used, splits, D)
    row = b.to(tl.int64) * rows + m // GROUP
    head = g * GROUP + m % GROUP
    to = out + (row * (G * GROUP) * D + head * D)[:, None] + tl.arange(0, D)[None, :]
    tl.store(to, result.to(out.dtype.element_ty), mask=valid[:, None])


@triton.jit(do_not_specialize=["window"])
def _prefill_kernel(
    q,
    k,
    v,
    cache_k,
    cache_v,
    out,
    tables,
    starts,
    lives,
    offsets,
    window,
    table_row,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    block_step,
    slot_step,
    head_step,
    scale,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WINDOWED: tl.constexpr,
    CONTEXT: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    tl.static_assert(ROWS % TILE == 0)
    # The last rows see the most keys: they go first, so that short programs fill the end.
    row0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    h = tl.program_id(1)
    g = h // GROUP
    b = tl.program_id(2)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    offset = tl.load(offsets + b).to(tl.int64)
    count = (tl.load(offsets + b + 1) - offset).to(tl.int32)
    if row0 >= count:
        return
    # Padding may hold anything, nan included: no key of it is loaded, and a tile of nothing else computes nothing.
    live = tl.load(lives + b).to(tl.int32)
    start = 0
    if CONTEXT:
        start = tl.where(row0 < live, tl.load(starts + b).to(tl.int32), 0)
    j = row0 + tl.arange(0, ROWS)
    valid = j < count
    cols = tl.arange(0, D)
    slots = tl.arange(0, TILE)
    queries = tl.load(q + ((offset + j) * q_row + h * q_head)[:, None] + cols[None, :], mask=valid[:, None], other=0.0)
    best = tl.zeros((ROWS,), tl.float32) - float("inf")
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, D), tl.float32)

    if CONTEXT:
        table = tables + b.to(tl.int64) * table_row
        low = 0
        if WINDOWED:
            low = tl.maximum(start + row0 - window + 1, 0) // TILE * TILE
        for n in range(low, start, TILE):
            pos = n + slots
            old = pos < start
            block = tl.load(table + pos // BLOCK, mask=old, other=0).to(tl.int64)
            at = (block * block_step + (pos % BLOCK) * slot_step + g * head_step)[:, None] + cols[None, :]
            keys = tl.load(cache_k + at, mask=old[:, None], other=0.0)
            values = tl.load(cache_v + at, mask=old[:, None], other=0.0)
            scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale
            seen = old[None, :]
            if WINDOWED:
                seen = seen & (pos[None, :] > (start + j)[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
            best, total, acc = _step(scores, values, best, total, acc, WINDOWED, PRECISION)

    k += offset * k_row + g * k_head
    v += offset * v_row + g * v_head
    low_row = 0
    if WINDOWED:
        low_row = tl.maximum(row0 - window + 1, 0) // TILE * TILE
    for n in range(low_row, tl.where(row0 < live, row0, 0), TILE):
        new = n + slots
        keys = tl.load(k + (new * k_row.to(tl.int64))[:, None] + cols[None, :])
        values = tl.load(v + (new * v_row.to(tl.int64))[:, None] + cols[None, :])
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale
        if WINDOWED:
            scores = tl.where(new[None, :] > j[:, None] - window, scores, float("-inf"))
        best, total, acc = _step(scores, values, best, total, acc, WINDOWED, PRECISION)

    for n in range(row0, tl.minimum(row0 + ROWS, live), TILE):
        new = n + slots
        fresh = new < live
        keys = tl.load(k + (new * k_row.to(tl.int64))[:, None] + cols[None, :], mask=fresh[:, None], other=0.0)
        values = tl.load(v + (new * v_row.to(tl.int64))[:, None] + cols[None, :], mask=fresh[:, None], other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale
        seen = new[None, :] <= j[:, None]
        if WINDOWED:
            seen = seen & (new[None, :] > j[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
        best, total, acc = _step(scores, values, best, total, acc, True, PRECISION)

    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    to = out + ((offset + j) * (H * D) + h * D)[:, None] + cols[None, :]
    tl.store(to, result.to(out.dtype.element_ty), mask=valid[:, None])


@triton.jit
def _write_kernel(
    k,
    v,
    cache_k,
    cache_v,
    tables,
    starts,
    lives,
    offsets,
    table_row,
    k_row,
    k_head,
    v_row,
    v_head,
    block_step,
    slot_step,
    head_step,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    g = tl.program_id(1)
    b = tl.program_id(2)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    j = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = j < tl.load(lives + b)
    pos = tl.load(starts + b) + j
    block = tl.load(tables + b.to(tl.int64) * table_row + pos // BLOCK, mask=live, other=0).to(tl.int64)
    row = tl.load(offsets + b).to(tl.int64) + j
    cols = tl.arange(0, D)[None, :]
    at = (block * block_step + (pos % BLOCK) * slot_step + g * head_step)[:, None] + cols
    mask = live[:, None]
    tl.store(cache_k + at, tl.load(k + (row * k_row + g * k_head)[:, None] + cols, mask=mask, other=0.0), mask=mask)
    tl.store(cache_v + at, tl.load(v + (row * v_row + g * v_head)[:, None] + cols, mask=mask, other=0.0), mask=mask)


@dataclass(frozen=True)
class Launch:
    """What the paged kernel is compiled and launched with."""

    tile: int  # keys at a time
    queries: int  # rows x heads of a group at a time; more go to several programs
    splits: int
    warps: int
    stages: int
    # The program that arrives last adds up the shares, else a second kernel does. It is found by counters that all
    # launches on a device share: two launches must not run at the same time.
    last: bool


@dataclass(frozen=True)
class PrefillLaunch:
    rows: int
    tile: int
    warps: int
    stages: int


# Programs per multiprocessor that splitting the keys aims for.
_FILL = 1
_MAX_SPLITS = 64
_MIN_QUERIES, _MAX_QUERIES = 16, 64

_sm_counts: dict[torch.device, int] = {}
_counters: dict[torch.device, Tensor] = {}


def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 132  # the interpreter: as on an H200
    if device not in _sm_counts:
        _sm_counts[device] = torch.cuda.get_device_properties(device).multi_processor_count
    return _sm_counts[device]


def _counter(device: torch.device, size: int) -> Tensor:
    """Zeros, which every launch leaves as zeros."""
    if device not in _counters:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            # The graph would hold the filling, and another graph might run before this one.
            raise RuntimeError("call paged_attention once before capturing it")
        _counters[device] = torch.zeros(1 << 16, dtype=torch.int32, device=device)
    assert size <= len(_counters[device])
    return _counters[device]


def choose_launch(
    pages: Pages, heads: int, kv_heads: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> Launch:
    """Only the query tile depends on the number of rows: the rest decides which keys are added up with which."""
    batch, width = pages.block_tables_BM.shape
    context = pages.max_context if pages.max_context is not None else width * block_size
    exact = dtype == torch.float32
    tile = 32 if exact else 64
    queries = max(_MIN_QUERIES, triton.next_power_of_2(pages.max_rows * (heads // kv_heads)))
    splits = _FILL * _multiprocessors(device) // (batch * kv_heads)
    splits = max(1, min(splits, _MAX_SPLITS, triton.cdiv(context, tile) + 1))
    return Launch(
        tile=tile,
        queries=min(queries, 32 if exact else _MAX_QUERIES),
        splits=splits,
        warps=4,
        stages=2 if exact else 5,  # every second one holds only the block numbers that the next one loads by
        last=False,
    )


def _cache_steps(cache_k: Tensor, cache_v: Tensor) -> tuple[int, int, int]:
    block_step, slot_step, head_step, one = cache_k.stride()
    assert cache_v.stride() == cache_k.stride() and one == 1
    return block_step, slot_step, head_step


def _check(q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, cache_k: Tensor) -> None:
    width = q_THd.shape[-1]
    if width & (width - 1) or width < 16:
        raise ValueError(f"head width {width}: the Triton attention takes powers of two from 16")
    assert q_THd.stride(-1) == k_TGd.stride(-1) == v_TGd.stride(-1) == 1
    assert q_THd.dtype == k_TGd.dtype == v_TGd.dtype == cache_k.dtype


def paged_attention_triton(
    q_THd: Tensor,
    k_TGd: Tensor,
    v_TGd: Tensor,
    cache_k: Tensor,
    cache_v: Tensor,
    pages: Pages,
    window: int | None,
    pdl: bool = False,
    launch: Launch | None = None,
) -> Tensor:
    _check(q_THd, k_TGd, v_TGd, cache_k)
    pdl = pdl and q_THd.is_cuda  # the interpreter knows nothing of it
    total_rows, heads, width = q_THd.shape
    block_size, kv_heads = cache_k.shape[1:3]
    batch, rows, group = len(pages.starts_B), pages.max_rows, heads // kv_heads
    assert total_rows == batch * rows and pages.block_tables_BM.stride(1) == 1
    if launch is None:
        launch = choose_launch(pages, heads, kv_heads, block_size, q_THd.dtype, q_THd.device)
    assert launch.tile % block_size == 0 or block_size % launch.tile == 0
    out = torch.empty((total_rows, heads, width), dtype=q_THd.dtype, device=q_THd.device)
    query_tiles = triton.cdiv(rows * group, launch.queries)
    # With one share these are not looked at, but keep their types, which a compilation is for.
    shares = batch * launch.splits * rows * heads if launch.splits > 1 else 1
    parts = torch.empty((shares, width), dtype=torch.float32, device=out.device)
    sums = torch.empty((shares, 2), dtype=torch.float32, device=out.device)
    counters = _counter(out.device, batch * kv_heads * query_tiles) if launch.last else sums
    shared = {"G": kv_heads, "GROUP": group, "D": width, "TILE": launch.tile}
    shared |= {"WINDOWED": window is not None, "PDL": pdl, "launch_pdl": pdl}
    _paged_kernel[(kv_heads * query_tiles, launch.splits, batch)](
        q_THd,
        k_TGd,
        v_TGd,
        cache_k,
        cache_v,
        out,
        parts,
        sums,
        counters,
        pages.block_tables_BM,
        pages.starts_B,
        pages.live_B,
        rows,
        launch.splits,
        window or 0,
        pages.block_tables_BM.stride(0),
        *q_THd.stride()[:2],
        *k_TGd.stride()[:2],
        *v_TGd.stride()[:2],
        *_cache_steps(cache_k, cache_v),
        width**-0.5 * math.log2(math.e),
        **shared,
        BLOCK=block_size,
        QUERIES=launch.queries,
        LAST=launch.last,
        PRECISION="ieee" if q_THd.dtype == torch.float32 else "tf32",
        num_warps=launch.warps,
        num_stages=launch.stages,
    )
    if launch.splits > 1 and not launch.last:
        queries = 4
        _combine_kernel[(triton.cdiv(rows * group, queries), kv_heads, batch)](
            parts,
            sums,
            out,
            pages.starts_B,
            pages.live_B,
            rows,
            launch.splits,
            window or 0,
            **shared,
            QUERIES=queries,
            num_warps=4,
        )
    return out


def write_rows_triton(
    k_TGd: Tensor, v_TGd: Tensor, cache_k: Tensor, cache_v: Tensor, pages: Pages, pdl: bool = False
) -> None:
    """Keys and values of the live rows into the cache."""
    block_size, kv_heads, width = cache_k.shape[1:]
    block_rows = min(32, max(1, triton.next_power_of_2(pages.max_rows)))
    _write_kernel[(triton.cdiv(pages.max_rows, block_rows), kv_heads, len(pages.starts_B))](
        k_TGd,
        v_TGd,
        cache_k,
        cache_v,
        pages.block_tables_BM,
        pages.starts_B,
        pages.live_B,
        pages.offsets_B1(),
        pages.block_tables_BM.stride(0),
        *k_TGd.stride()[:2],
        *v_TGd.stride()[:2],
        *_cache_steps(cache_k, cache_v),
        D=width,
        BLOCK=block_size,
        ROWS=block_rows,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=4,
    )


def prefill_attention_triton(
    q_THd: Tensor,
    k_TGd: Tensor,
    v_TGd: Tensor,
    cache_k: Tensor,
    cache_v: Tensor,
    pages: Pages,
    window: int | None,
    pdl: bool = False,
    launch: PrefillLaunch | None = None,
) -> Tensor:
    _check(q_THd, k_TGd, v_TGd, cache_k)
    pdl = pdl and q_THd.is_cuda  # the interpreter knows nothing of it
    total_rows, heads, width = q_THd.shape
    block_size, kv_heads = cache_k.shape[1:3]
    exact = q_THd.dtype == torch.float32
    if launch is None:
        launch = PrefillLaunch(32, 32, 4, 2) if exact else PrefillLaunch(128, 64, 8 if width >= 128 else 4, 3)
    write_rows_triton(k_TGd, v_TGd, cache_k, cache_v, pages, pdl)
    out = torch.empty((total_rows, heads, width), dtype=q_THd.dtype, device=q_THd.device)
    _prefill_kernel[(triton.cdiv(pages.max_rows, launch.rows), heads, len(pages.starts_B))](
        q_THd,
        k_TGd,
        v_TGd,
        cache_k,
        cache_v,
        out,
        pages.block_tables_BM,
        pages.starts_B,
        pages.live_B,
        pages.offsets_B1(),
        window or 0,
        pages.block_tables_BM.stride(0),
        *q_THd.stride()[:2],
        *k_TGd.stride()[:2],
        *v_TGd.stride()[:2],
        *_cache_steps(cache_k, cache_v),
        width**-0.5 * math.log2(math.e),
        H=heads,
        GROUP=heads // kv_heads,
        D=width,
        BLOCK=block_size,
        ROWS=launch.rows,
        TILE=launch.tile,
        WINDOWED=window is not None,
        CONTEXT=pages.max_context != 0,
        PRECISION="ieee" if exact else "tf32",
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=launch.warps,
        num_stages=launch.stages,
    )
    return out
