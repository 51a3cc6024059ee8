# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, check-untyped-defs=False
"""Attention of few rows of few short sequences with one trip to the L2 instead of two, where all keys are in one piece
(`Launch.near`).

What a program has to wait for is the product ahead: queries, and keys and values of new rows. Old keys and values are
nobody's output, so they are there before the wait, and addresses are known. New ones go to the cache for later rounds,
and are not read back from there: a new key's scores are computed by themselves and put where its place in the tile is.
A row's bits are those of `_paged_kernel` (paged_attention_triton.py, which says what may be read before the wait): the
same products of the same keys, in tiles of the same places, added up in the same order.

Old keys are read, not only asked for, before the wait. They were written by earlier rounds, which are over: a round's
look-up of embeddings begins when all before it is done.

With TRITON_INTERPRET=1 in the environment, set before the import, the launcher takes CPU tensors.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.paged_attention import Pages
from peagle.kernels.paged_attention_triton import (
    cache_steps,
    check_heads,
    step_by_keys,
    sum_over_keys,
    turned,
    turning_pairs,
)
from peagle.kernels.paged_launches import MOST_NEW, Launch, most_tiles
from peagle.kernels.rotary import Rotation


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
        q_other, q_cos, q_sin = turning_pairs(q_at, row[None, :], cols[:, None], valid, cos, sin, angle_row, D)
        k_other, k_cos, k_sin = turning_pairs(k_at, new, cols[None, :], fresh, cos, sin, angle_row, D)
    values = tl.load(v_at, mask=here, other=values)
    if TILES > 1:
        later_values = tl.load(later_v_at, mask=there, other=later_values)
    if ROTATE:
        queries = turned(queries, q_other, q_cos, q_sin, cols[:, None], valid, q_norm, eps, 0, D, NORM)
        key = turned(key, k_other, k_cos, k_sin, cols[None, :], fresh, k_norm, eps, 1, D, NORM)

    best = tl.zeros((QUERIES,), tl.float32) - float("inf")
    total = tl.zeros((TILE, QUERIES), tl.float32)
    acc = tl.zeros((D, QUERIES), tl.float32)
    # Of its own in shared memory: the assembler of CUDA 12.8 loses the address of an operand that two products have,
    # if their tiles differ.
    twins = tl.where(m[None, :] <= rows * GROUP, queries, tl.zeros_like(queries))
    new_scores = tl.dot(key, twins, input_precision=PRECISION)
    scores = _merged(tl.dot(keys, queries, input_precision=PRECISION), new_scores, n, live, QUERIES, NEW) * scale
    scores = tl.where(pos[:, None] <= own[None, :], scores, float("-inf"))
    best, total, acc = step_by_keys(scores, values, best, total, acc, PRECISION)
    if TILES > 1:
        later_scores = tl.dot(later_keys, queries, input_precision=PRECISION)
        later_scores = _merged(later_scores, new_scores, n + TILE, live, QUERIES, NEW) * scale
        later_scores = tl.where((pos + TILE)[:, None] <= own[None, :], later_scores, float("-inf"))
        best, total, acc = step_by_keys(later_scores, later_values, best, total, acc, PRECISION)
    sum_of = sum_over_keys(total, PRECISION)
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
    """As `paged_attention_triton`, where no sequence has more than a piece of keys, new ones included. `new`: rows of
    the product with new keys; fewer than 64 are another kind of instruction, which may round otherwise."""
    check_heads(q_THd, k_TGd, v_TGd, cache_k)
    total_rows, heads, width = q_THd.shape
    block_size, kv_heads = cache_k.shape[1:3]
    batch, rows, group = len(pages.starts_B), pages.max_rows, heads // kv_heads
    tiles = most_tiles(pages, block_size, launch.tile)
    assert total_rows == batch * rows and rows <= new and tiles <= launch.span <= 2
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
        TILES=tiles,
        QUERIES=launch.queries,
        NEW=new,
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
