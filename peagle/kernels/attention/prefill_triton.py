# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, check-untyped-defs=False
"""Attention of many rows a sequence over metadata, in Triton: prompts.

`_write_kernel` puts the new rows into the cache, `_prefill_kernel` reads it: a program has one tile of rows and one
head. Nothing on the host depends on a length, so CUDA graphs can hold them; what dependent launches may read before
they wait stands in paged_attention_triton.py. With TRITON_INTERPRET=1 in the environment, set before the import, the
launchers take CPU tensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.config import Window
from peagle.kernels.attention.paged_metadata import PagedAttentionMetadata
from peagle.kernels.attention.paged_triton import cache_steps, check_heads, first_seen, kind_of, sunk

_WIDE_PREFILL_ROWS = 4096


@dataclass(frozen=True)
class PrefillLaunchConfig:
    rows: int
    tile: int
    warps: int
    stages: int


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
def _place(program, offsets, sequences, ROWS: tl.constexpr, SEQUENCES: tl.constexpr):
    """Which sequence a program works for, and on which tile of ROWS of its rows, of which there may be fewer.

    A sequence has the programs from `first row // ROWS + its number` on: at least as many as tiles, whatever the
    lengths, and over all sequences hardly more than there are rows.
    """
    b = tl.arange(0, SEQUENCES)
    first = tl.load(offsets + b, mask=b < sequences, other=0).to(tl.int32) // ROWS + b
    mine = tl.sum(((first <= program) & (b < sequences)).to(tl.int32), 0) - 1
    return mine, program - tl.load(offsets + mine).to(tl.int32) // ROWS - mine


def programs(rows: int, metadata: PagedAttentionMetadata, tile: int) -> int:
    """For `_place`."""
    return rows // tile + len(metadata.num_computed_tokens_B)


@triton.jit(do_not_specialize=["window", "sequences"])
def _prefill_kernel(
    q,
    k,
    v,
    sinks,
    cache_k,
    cache_v,
    out,
    tables,
    starts,
    lives,
    offsets,
    sequences,
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
    SINKS: tl.constexpr,
    CONTEXT: tl.constexpr,
    PRECISION: tl.constexpr,
    SEQUENCES: tl.constexpr,
    PDL: tl.constexpr,
):
    tl.static_assert(ROWS % TILE == 0)
    h = tl.program_id(1)
    g = h // GROUP
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    b, tile = _place(tl.program_id(0), offsets, sequences, ROWS, SEQUENCES)
    offset = tl.load(offsets + b).to(tl.int64)
    count = (tl.load(offsets + b + 1) - offset).to(tl.int32)
    # The last rows see the most keys: they go first, so that short programs fill the end.
    row0 = (tl.cdiv(count, ROWS) - 1 - tile) * ROWS
    if row0 < 0:
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
            low = tl.maximum(first_seen(start + row0, window, WINDOWED), 0) // TILE * TILE
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
                seen = seen & (pos[None, :] >= first_seen(start + j, window, WINDOWED)[:, None])
            scores = tl.where(seen, scores, float("-inf"))
            best, total, acc = _step(scores, values, best, total, acc, WINDOWED, PRECISION)

    k += offset * k_row + g * k_head
    v += offset * v_row + g * v_head
    low_row = 0
    if WINDOWED:
        low_row = tl.maximum(first_seen(start + row0, window, WINDOWED) - start, 0) // TILE * TILE
    for n in range(low_row, tl.where(row0 < live, row0, 0), TILE):
        new = n + slots
        keys = tl.load(k + (new * k_row.to(tl.int64))[:, None] + cols[None, :])
        values = tl.load(v + (new * v_row.to(tl.int64))[:, None] + cols[None, :])
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale
        if WINDOWED:
            seen = start + new[None, :] >= first_seen(start + j, window, WINDOWED)[:, None]
            scores = tl.where(seen, scores, float("-inf"))
        best, total, acc = _step(scores, values, best, total, acc, WINDOWED, PRECISION)

    for n in range(row0, tl.minimum(row0 + ROWS, live), TILE):
        new = n + slots
        fresh = new < live
        keys = tl.load(k + (new * k_row.to(tl.int64))[:, None] + cols[None, :], mask=fresh[:, None], other=0.0)
        values = tl.load(v + (new * v_row.to(tl.int64))[:, None] + cols[None, :], mask=fresh[:, None], other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale
        seen = new[None, :] <= j[:, None]
        if WINDOWED:
            seen = seen & (start + new[None, :] >= first_seen(start + j, window, WINDOWED)[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        best, total, acc = _step(scores, values, best, total, acc, True, PRECISION)

    if SINKS:
        total = sunk(total, best, tl.load(sinks + h))
    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    to = out + ((offset + j) * (H * D) + h * D)[:, None] + cols[None, :]
    tl.store(to, result.to(out.dtype.element_ty), mask=valid[:, None])


@triton.jit(do_not_specialize=["sequences"])
def _write_kernel(
    k,
    v,
    cache_k,
    cache_v,
    tables,
    starts,
    lives,
    offsets,
    sequences,
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
    SEQUENCES: tl.constexpr,
    PDL: tl.constexpr,
):
    g = tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    b, tile = _place(tl.program_id(0), offsets, sequences, ROWS, SEQUENCES)
    j = tile * ROWS + tl.arange(0, ROWS)
    live = j < tl.load(lives + b)
    pos = tl.load(starts + b) + j
    block = tl.load(tables + b.to(tl.int64) * table_row + pos // BLOCK, mask=live, other=0).to(tl.int64)
    row = tl.load(offsets + b).to(tl.int64) + j
    cols = tl.arange(0, D)[None, :]
    at = (block * block_step + (pos % BLOCK) * slot_step + g * head_step)[:, None] + cols
    mask = live[:, None]
    tl.store(cache_k + at, tl.load(k + (row * k_row + g * k_head)[:, None] + cols, mask=mask, other=0.0), mask=mask)
    tl.store(cache_v + at, tl.load(v + (row * v_row + g * v_head)[:, None] + cols, mask=mask, other=0.0), mask=mask)


def write_kv_triton(
    k_TGd: Tensor, v_TGd: Tensor, cache_k: Tensor, cache_v: Tensor, metadata: PagedAttentionMetadata, pdl: bool = False
) -> None:
    """Keys and values of the live rows into the cache."""
    block_size, kv_heads, width = cache_k.shape[1:]
    block_rows = min(32, max(1, triton.next_power_of_2(metadata.max_query_len)))
    _write_kernel[(programs(len(k_TGd), metadata, block_rows), kv_heads)](
        k_TGd,
        v_TGd,
        cache_k,
        cache_v,
        metadata.block_tables_BM,
        metadata.num_computed_tokens_B,
        metadata.query_lens_B,
        metadata.get_query_start_loc(),
        len(metadata.num_computed_tokens_B),
        metadata.block_tables_BM.stride(0),
        *k_TGd.stride()[:2],
        *v_TGd.stride()[:2],
        *cache_steps(cache_k, cache_v),
        D=width,
        BLOCK=block_size,
        ROWS=block_rows,
        SEQUENCES=triton.next_power_of_2(len(metadata.num_computed_tokens_B)),
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
    metadata: PagedAttentionMetadata,
    window: Window,
    pdl: bool = False,
    launch: PrefillLaunchConfig | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    check_heads(q_THd, k_TGd, v_TGd, cache_k)
    kind, span = kind_of(window)
    pdl = pdl and q_THd.is_cuda  # the interpreter knows nothing of it
    total_rows, heads, width = q_THd.shape
    block_size, kv_heads = cache_k.shape[1:3]
    exact = q_THd.dtype == torch.float32
    if launch is None:
        # Without cached keys wide tiles are faster from here on; with them, and for narrow heads, never.
        wide = width == 128 and metadata.max_computed_tokens == 0 and metadata.max_query_len >= _WIDE_PREFILL_ROWS
        launch = (
            PrefillLaunchConfig(32, 32, 4, 2)
            if exact
            else PrefillLaunchConfig(128 if wide else 64, 64, 8 if wide else 4, 3)
        )
        if width > 256:
            launch = PrefillLaunchConfig(32, 16, 8, 1) if exact else PrefillLaunchConfig(32, 32, 8, 2)
        elif width > 128 and not exact:
            launch = PrefillLaunchConfig(64, 32, 8, 2)
    write_kv_triton(k_TGd, v_TGd, cache_k, cache_v, metadata, pdl)
    out = torch.empty((total_rows, heads, width), dtype=q_THd.dtype, device=q_THd.device)
    _prefill_kernel[(programs(total_rows, metadata, launch.rows), heads)](
        q_THd,
        k_TGd,
        v_TGd,
        q_THd if sinks is None else sinks,
        cache_k,
        cache_v,
        out,
        metadata.block_tables_BM,
        metadata.num_computed_tokens_B,
        metadata.query_lens_B,
        metadata.get_query_start_loc(),
        len(metadata.num_computed_tokens_B),
        span,
        metadata.block_tables_BM.stride(0),
        *q_THd.stride()[:2],
        *k_TGd.stride()[:2],
        *v_TGd.stride()[:2],
        *cache_steps(cache_k, cache_v),
        width**-0.5 * math.log2(math.e),
        H=heads,
        GROUP=heads // kv_heads,
        D=width,
        BLOCK=block_size,
        ROWS=launch.rows,
        TILE=launch.tile,
        WINDOWED=kind,
        SINKS=sinks is not None,
        CONTEXT=metadata.max_computed_tokens != 0,
        PRECISION="ieee" if exact else "tf32",
        SEQUENCES=triton.next_power_of_2(len(metadata.num_computed_tokens_B)),
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=launch.warps,
        num_stages=launch.stages,
    )
    return out
