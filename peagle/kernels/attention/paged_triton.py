# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, check-untyped-defs=False
"""Attention of few rows a sequence over metadata, in Triton: rounds. Nothing on the host depends on a length, so CUDA
graphs can hold it.

`_paged_kernel`: a program has one sequence, one key/value head and some shares of the keys, for all rows and all heads
that share the keys, which are thus read once.

The same row gets the same bits whether it is verified or decoded, and whoever is computed with it:
- Key tiles lie at fixed positions and go round robin to the shares, in small models two at a time; how many shares
  there are depends on the model and the GPU. So which keys are added up with which depends on a row's position alone.
  How many programs there are for the shares depends on the batch; one with several computes them one after another and
  leaves each by itself.
- Tiles and shares that lie behind a row add exactly nothing to it: weights of 0, and a rescaling by 1.
- Keys and values are the left operands of the products and rows the right ones: tiles of at least 64 keys are one kind
  of instruction (wgmma) for any number of rows, and the sum over a tile's keys has one order.
There are two exceptions. Of a batch with more heads than the GPU has processors, `batch * kv_heads > multiprocessors`,
one share has all keys, in smaller tiles for wide heads: other bits, the same ones for all such batches. And in large
models there are no more shares than programs for a batch of more than 16 rows, whose products round otherwise anyway
(linear_shapes.py): leaving and adding up as many shares as for one request took 4 to 8% of a round of 4 to 16.

With shares 0, 1, 2 for 7 tiles and 2 programs, tiles in the order in which they are computed, | where a share ends:

    program 0   0 3 6 | 2 5 |
    program 1   1 4 |

`_combine_kernel`: adds up the shares, for all batches in one order.

Programmatic dependent launch: a kernel that starts early may, before it waits, read only what was written ahead of
some normally launched kernel that came before it. Such a kernel starts when all before it have ended; its early
successors may start while any number of the kernels between it and them still run. Here that is block tables, starts
and lives, after which the models look up embeddings by a plain torch kernel. Asking cached keys into the L2 is no
reading and always allowed. Some program of every kernel must wait, even one with nothing to do: the successor counts
on everything before a kernel that has ended to have ended too.

With TRITON_INTERPRET=1 in the environment, set before the import, the launchers take CPU tensors.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.config import ChunkedAttention, Window
from peagle.kernels.attention.paged_launch import PagedLaunchConfig, choose_paged_launch, get_max_key_tiles
from peagle.kernels.attention.paged_metadata import PagedAttentionMetadata
from peagle.kernels.attention.rotary import QKNormRope
from peagle.kernels.attention.rotary_triton import inverse_rms, rotated


@triton.jit
def _step_by_keys(scores, v, best, total, acc, PRECISION: tl.constexpr):
    """One tile into the running softmax, [keys, queries]; `total` stays one sum per slot of it, added up at the end."""
    new = tl.maximum(best, tl.max(scores, 0))
    ref = tl.where(new == float("-inf"), 0.0, new)
    keep = tl.exp2(best - ref)[None, :]
    p = tl.exp2(scores - ref[None, :])
    total = total * keep + p
    acc = tl.dot(tl.trans(v), p.to(v.dtype), acc * keep, input_precision=PRECISION)
    return new, total, acc


@triton.jit
def first_seen(position, window, WINDOWED: tl.constexpr):
    """Of a row; WINDOWED is 1 for a window that slides, 2 for a chunk."""
    if WINDOWED == 2:
        return position // window * window
    else:
        return position - window + 1


@triton.jit
def _shares(start, live, splits, window, TILE: tl.constexpr, WINDOWED: tl.constexpr):
    """First tile seen, tile after the last, and how many shares have a tile; every kernel must find the same."""
    low = 0
    if WINDOWED:
        low = tl.maximum(first_seen(start, window, WINDOWED), 0) // TILE
    tiles = tl.maximum((start + live + TILE - 1) // TILE, 1)
    return low, tiles, tl.minimum(tiles - low, splits)


@triton.jit
def _owner(tile, low, splits, programs, WHOLE: tl.constexpr):
    """Which program has a tile."""
    place = (tile - low) % splits
    return place if WHOLE else place % programs


@triton.jit
def _tiles_of(program, low, tiles, splits, programs, WHOLE: tl.constexpr):
    """How many tiles a program that has any has: of each of its shares as many, and of the first ones one more."""
    if WHOLE:
        count = (tiles - low - program + splits - 1) // splits
    else:
        rounds, rest = (tiles - low) // splits, (tiles - low) % splits
        shares = (splits - program + programs - 1) // programs
        count = rounds * shares + (rest - program + programs - 1) // programs
    return count


@triton.jit
def _tile_after(tile, place, low, tiles, splits, programs, WHOLE: tl.constexpr):
    """The next tile of a program, and its share's place among those in use. After the last tile: any tile."""
    tile += splits
    if not WHOLE:
        ends = tile >= tiles
        place += ends * programs
        tile += ends * (low + place - tile)
    return tile, place


@triton.jit
def _sum_over_keys(total, PRECISION: tl.constexpr):
    if PRECISION == "ieee":
        # Who adds what to what depends on the number of queries, but so little of an fp64 sum does that none of it
        # is left in fp32. With 16-bit inputs the products' layout adds in the same order for any number.
        return tl.sum(total.to(tl.float64), 0).to(tl.float32)
    else:
        return tl.sum(total, 0)


@triton.jit
def sunk(total, best, sink):
    """A sum of powers of 2, relative to the `best` score, with a sink's share in it. A row that has seen nothing gets
    all of infinity, and with it 0."""
    return total + tl.exp2(sink.to(tl.float32) * 1.4426950408889634 - best)


@triton.jit
def _leave(best, sum_of, acc, parts, sums, at, valid, cols, D: tl.constexpr):
    """A share's sums, at queries `at` of those that lie as [B, splits, G, rows * GROUP]."""
    tl.store(parts + at[None, :] * D + cols[:, None], acc, mask=valid[None, :])
    tl.store(sums + at * 2, best, mask=valid)
    tl.store(sums + at * 2 + 1, sum_of, mask=valid)


@triton.jit
def _prefetch(cache, at, wanted, D: tl.constexpr):
    """Asks for rows of D elements, `at` elements into the cache, to be brought to the L2."""
    SIZE: tl.constexpr = cache.dtype.element_ty.primitive_bitwidth // 8
    # Sector by sector: how much more than one a request brings is not documented. Requests for the same line go out
    # as one.
    sectors = tl.arange(0, D * SIZE // 32) * 32
    addresses = (cache + at).to(tl.int64)[:, None] + sectors[None, :]
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; } // $0",
        "=r,l,r",
        [addresses, wanted.to(tl.int32)[:, None] + sectors[None, :] * 0],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _pairs(x_at, row, cols, mask, cos, sin, angle_row, D: tl.constexpr):
    """What `_turn` has to load: the entry that each one of `x_at + cols` turns together with, and the angles."""
    other = tl.load(x_at + (cols + D // 2) % D, mask=mask, other=0.0)
    c = tl.load(cos + row * angle_row + cols, mask=mask, other=1.0)
    s = tl.load(sin + row * angle_row + cols, mask=mask, other=0.0)
    return other, c, s


@triton.jit
def _turn(x, other, c, s, cols, mask, norm, eps, AXIS: tl.constexpr, D: tl.constexpr, NORM: tl.constexpr):
    """x normed and rotated where `mask` says so; heads lie along AXIS."""
    c = c.to(tl.float32)
    s = tl.where(cols < D // 2, -s.to(tl.float32), s.to(tl.float32))
    if NORM:
        inverse = inverse_rms((x.to(tl.float32) * x.to(tl.float32)).to(tl.float64), eps, AXIS, D)
        pair = (cols + D // 2) % D
        weight, other_weight = tl.load(norm + cols).to(tl.float32), tl.load(norm + pair).to(tl.float32)
        return tl.where(mask, rotated(x, other, weight, other_weight, inverse, c, s, True), x)
    else:
        return rotated(x, other, 1.0, 1.0, 1.0, c, s, False)  # an angle of 0 outside the mask: x as it is


@triton.jit(do_not_specialize=["rows", "splits", "window", "table_width"])  # one compilation for all of them
def _paged_kernel(
    q,
    k,
    v,
    cos,
    sin,
    q_norm,
    k_norm,
    sinks,
    cache_k,
    cache_v,
    out,
    parts,
    sums,
    tables,
    starts,
    lives,
    rows,
    splits,
    window,
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
    SPAN: tl.constexpr,
    QUERIES: tl.constexpr,
    NEW: tl.constexpr,
    AHEAD: tl.constexpr,
    ONCE: tl.constexpr,
    ROTATE: tl.constexpr,
    NORM: tl.constexpr,
    WINDOWED: tl.constexpr,
    SINKS: tl.constexpr,
    WHOLE: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """A share has pieces of SPAN tiles, of TILE keys each; below `tile` is a piece, and `sub` a tile of it.
    WHOLE: no program has more than one share with anything in it. The result of an only share then needs no
    combination. ONCE: nor more than one piece, and new rows are few; then what a program has to wait for is asked for
    at once."""
    PIECE: tl.constexpr = TILE * SPAN
    g = tl.program_id(0) % G
    query_tile = tl.program_id(0) // G
    program = tl.program_id(1)
    programs = tl.num_programs(1)
    b = tl.program_id(2)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    live = tl.load(lives + b).to(tl.int32)
    start = tl.load(starts + b).to(tl.int32)
    table = tables + b.to(tl.int64) * table_row
    slots = tl.arange(0, TILE)
    soon = tl.arange(0, PIECE * max(AHEAD, 1))
    if AHEAD > 0 and not WINDOWED:
        # Without a window the first tiles are known already, if shares have one each. One wait for memory less, if some
        # numbers are for nothing.
        soon_pos = (program + soon // PIECE * programs) * PIECE + soon % PIECE
        soon_block = tl.load(table + soon_pos // BLOCK, mask=soon_pos // BLOCK < table_width, other=0)
    # A sequence without live rows is an empty place of the batch: its start means nothing.
    start = tl.where(live > 0, start, 0)
    end = start + live
    low, tiles, used = _shares(start, live, splits, window, PIECE, WINDOWED)
    if program >= used:
        return  # others wait for the kernel ahead
    place = program
    tile = low + place
    count = _tiles_of(program, low, tiles, splits, programs, WHOLE)
    owns_first = _owner(start // PIECE, low, splits, programs, WHOLE) == program
    owns_last = _owner(tiles - 1, low, splits, programs, WHOLE) == program
    brings = owns_first | owns_last | (tiles - start // PIECE > 2)  # new rows, perhaps
    if AHEAD > 0:
        # The first tiles, while the kernel ahead still runs; the loop asks for the others AHEAD of their use.
        if WINDOWED:
            soon_pos = (tile + soon // PIECE * programs) * PIECE + soon % PIECE
            soon_block = tl.load(table + soon_pos // BLOCK, mask=soon_pos < start, other=0)
        soon_at = soon_block.to(tl.int64) * block_step + (soon_pos % BLOCK) * slot_step + g * head_step
        _prefetch(cache_k, soon_at, soon_pos < start, D)
        _prefetch(cache_v, soon_at, soon_pos < start, D)
        next_tile, next_place = tile, place
        for _ in tl.static_range(AHEAD):
            next_tile, next_place = _tile_after(next_tile, next_place, low, tiles, splits, programs, WHOLE)
        next_pos = next_tile * PIECE + slots
        next_block = tl.load(table + next_pos // BLOCK, mask=next_pos < start, other=0)
    # Block numbers are fetched a tile before they are needed: in the same step every load would wait for another.
    block = tl.load(table + (tile * PIECE + slots) // BLOCK, mask=tile * PIECE + slots < end, other=0)
    cols = tl.arange(0, D)
    sub = 0
    if ONCE:
        pos = tile * PIECE + slots
        base = block.to(tl.int64) * block_step + (pos % BLOCK) * slot_step + g * head_step
        if SPAN > 1:
            count = tl.minimum((end - tile * PIECE + TILE - 1) // TILE, SPAN)
            later = tl.load(table + (pos + TILE) // BLOCK, mask=pos + TILE < end, other=0)
            later_base = later.to(tl.int64) * block_step + (pos % BLOCK) * slot_step + g * head_step
        fresh = start + tl.arange(0, NEW)
        mine = ((fresh < end) & (_owner(fresh // PIECE, low, splits, programs, WHOLE) == program))[:, None]
        to_block = tl.load(table + fresh // BLOCK, mask=fresh < end, other=0).to(tl.int64)
        to = (to_block * block_step + (fresh % BLOCK) * slot_step + g * head_step)[:, None] + cols[None, :]
        new = (b.to(tl.int64) * rows + tl.arange(0, NEW))[:, None]
        new_k = k + new * k_row + g * k_head
        new_v = v + new * v_row + g * v_head
    if PDL:
        tl.extra.cuda.gdc_wait()

    m = query_tile * QUERIES + tl.arange(0, QUERIES)
    j = m // GROUP
    head = g * GROUP + m % GROUP
    valid = m < rows * GROUP
    own = start + j
    row = b.to(tl.int64) * rows + j
    q_at = q + (row * q_row + head * q_head)[None, :]
    queries = tl.load(q_at + cols[:, None], mask=valid[None, :], other=0.0)  # [D, QUERIES]
    if ROTATE:
        q_other, q_cos, q_sin = _pairs(q_at, row[None, :], cols[:, None], valid[None, :], cos, sin, angle_row, D)
    if ONCE:
        key = tl.load(new_k + cols[None, :], mask=mine, other=0.0)
        value = tl.load(new_v + cols[None, :], mask=mine, other=0.0)
        if ROTATE:
            k_other, k_cos, k_sin = _pairs(new_k, new, cols[None, :], mine, cos, sin, angle_row, D)
            key = _turn(key, k_other, k_cos, k_sin, cols[None, :], mine, k_norm, eps, 1, D, NORM)
        tl.store(cache_k + to, key, mask=mine)
        tl.store(cache_v + to, value, mask=mine)
    if ROTATE:
        queries = _turn(queries, q_other, q_cos, q_sin, cols[:, None], valid[None, :], q_norm, eps, 0, D, NORM)
    best = tl.zeros((QUERIES,), tl.float32) - float("inf")
    total = tl.zeros((TILE, QUERIES), tl.float32)
    acc = tl.zeros((D, QUERIES), tl.float32)
    part = (b.to(tl.int64) * splits * G + g) * (rows * GROUP) + m  # of the first share

    # New rows of this program's tiles go to the cache first, and are then read back like all the others: no second way
    # through the loop. Programs of further query tiles write the same once more, as they cannot wait for each other.
    if ONCE:
        tl.debug_barrier()
    elif brings:
        for n in tl.range(0, live, NEW, num_stages=1):
            fresh = start + n + tl.arange(0, NEW)
            mine = (fresh < end) & (_owner(fresh // PIECE, low, splits, programs, WHOLE) == program)
            to_block = tl.load(table + fresh // BLOCK, mask=mine, other=0).to(tl.int64)
            to = (to_block * block_step + (fresh % BLOCK) * slot_step + g * head_step)[:, None] + cols[None, :]
            new = b.to(tl.int64) * rows + n + tl.arange(0, NEW)
            new_k = k + (new * k_row + g * k_head)[:, None]
            new_v = v + (new * v_row + g * v_head)[:, None]
            key = tl.load(new_k + cols[None, :], mask=mine[:, None], other=0.0)
            value = tl.load(new_v + cols[None, :], mask=mine[:, None], other=0.0)
            if ROTATE:
                k_other, k_cos, k_sin = _pairs(
                    new_k, new[:, None], cols[None, :], mine[:, None], cos, sin, angle_row, D
                )
                key = _turn(key, k_other, k_cos, k_sin, cols[None, :], mine[:, None], k_norm, eps, 1, D, NORM)
            tl.store(cache_k + to, key, mask=mine[:, None])
            tl.store(cache_v + to, value, mask=mine[:, None])
        tl.debug_barrier()

    # One loop over the tiles of all shares, so that the next share's keys are on their way while one is computed.
    steps = count if ONCE else count * SPAN
    for i in range(steps):
        if not ONCE:
            pos = tile * PIECE + sub * TILE + slots
            base = block.to(tl.int64) * block_step + (pos % BLOCK) * slot_step + g * head_step
        known = (pos < end)[:, None]
        at = base[:, None] + cols[None, :]
        keys = tl.load(cache_k + at, mask=known, other=0.0)
        if D <= 256:
            values = tl.load(cache_v + at, mask=known, other=0.0)
        share, last = tile % splits, tile + splits >= tiles
        if SPAN > 1:
            last = last & (sub == SPAN - 1)
        if not ONCE:
            if SPAN > 1:
                later_tile, later_place = _tile_after(tile, place, low, tiles, splits, programs, WHOLE)
                sub = (sub + 1) % SPAN
                tile, place = tl.where(sub == 0, later_tile, tile), tl.where(sub == 0, later_place, place)
            else:
                tile, place = _tile_after(tile, place, low, tiles, splits, programs, WHOLE)
            after = tile * PIECE + sub * TILE + slots
            block = tl.load(table + after // BLOCK, mask=after < end, other=0)
            if AHEAD > 0:
                next_at = next_block.to(tl.int64) * block_step + (next_pos % BLOCK) * slot_step + g * head_step
                _prefetch(cache_k, next_at, next_pos < start, D)
                _prefetch(cache_v, next_at, next_pos < start, D)
                next_tile, next_place = _tile_after(next_tile, next_place, low, tiles, splits, programs, WHOLE)
                next_pos = next_tile * PIECE + slots
                next_block = tl.load(table + next_pos // BLOCK, mask=next_pos < start, other=0)
        scores = tl.dot(keys, queries, input_precision=PRECISION) * scale
        seen = pos[:, None] <= own[None, :]
        if WINDOWED:
            seen = seen & (pos[:, None] >= first_seen(own, window, WINDOWED)[None, :])
        scores = tl.where(seen, scores, float("-inf"))
        if D > 256:
            # Where nothing is loaded ahead, values take the place that keys had in shared memory. Were both there at
            # once, the weights would take it, and the assembler of CUDA 12.8 loses the address of weights that lie
            # where the other product's keys lay.
            values = tl.load(cache_v + at, mask=known, other=0.0)
        best, total, acc = _step_by_keys(scores, values, best, total, acc, PRECISION)
        if not WHOLE:
            if last:
                sum_of = _sum_over_keys(total, PRECISION)
                _leave(best, sum_of, acc, parts, sums, part + share * (G * rows * GROUP), valid, cols, D)
            best = tl.where(last, float("-inf"), best)
            total = tl.where(last, 0.0, total)
            acc = tl.where(last, 0.0, acc)
        if ONCE and SPAN > 1:
            pos, base = pos + TILE, later_base
        # There is none. But this is the code that was timed: without the branch Triton moves the tile through registers
        # instead of copying it asynchronously, which nobody has run on a GPU yet.
        if ONCE and SPAN == 1 and i + 1 < count:
            tile, place = _tile_after(tile, place, low, tiles, splits, programs, WHOLE)
            pos = tile * TILE + slots
            block = tl.load(table + pos // BLOCK, mask=pos < end, other=0)
            base = block.to(tl.int64) * block_step + (pos % BLOCK) * slot_step + g * head_step
    if WHOLE:
        sum_of = _sum_over_keys(total, PRECISION)
        if used == 1:
            if SINKS:
                sum_of = sunk(sum_of, best, tl.load(sinks + head, mask=valid, other=0.0))
            result = acc / tl.where(sum_of > 0.0, sum_of, 1.0)[None, :]
            out_at = out + (row * (G * GROUP * D) + head * D)[None, :] + cols[:, None]
            tl.store(out_at, result.to(out.dtype.element_ty), mask=valid[None, :])
        else:
            share = (low + program) % splits
            _leave(best, sum_of, acc, parts, sums, part + share * (G * rows * GROUP), valid, cols, D)


@triton.jit(do_not_specialize=["rows", "splits", "window"])  # one compilation for all of them
def _combine_kernel(
    parts,
    sums,
    sinks,
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
    SPAN: tl.constexpr,
    QUERIES: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOWED: tl.constexpr,
    SINKS: tl.constexpr,
    WHOLE: tl.constexpr,
    PDL: tl.constexpr,
):
    g = tl.program_id(1)
    b = tl.program_id(2)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    live = tl.load(lives + b).to(tl.int32)
    start = tl.load(starts + b).to(tl.int32)
    start = tl.where(live > 0, start, 0)
    low, tiles, used = _shares(start, live, splits, window, TILE * SPAN, WINDOWED)
    m = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    valid = m < rows * GROUP
    s = tl.arange(0, SPLITS)
    if WINDOWED:
        filled = (s < splits) & ((s + splits - low % splits) % splits < used)
    else:
        filled = s < used
    cols = tl.arange(0, D)
    step = G * rows * GROUP
    at = b.to(tl.int64) * splits * step + g * rows * GROUP + s[None, :] * step + m[:, None]
    ok = filled[None, :] & valid[:, None]
    if PDL:
        tl.extra.cuda.gdc_wait()  # also with nothing to add up: the next kernel waits only for this one
    if WHOLE and used == 1:
        return  # the only share wrote the result
    # All at once, as one wait for memory costs more than the rest. .cg: past the L1, which may hold what was there
    # before.
    part = tl.load(
        parts + at[:, :, None] * D + cols[None, None, :], mask=ok[:, :, None], other=0.0, cache_modifier=".cg"
    )
    best = tl.load(sums + at * 2, mask=ok, other=float("-inf"), cache_modifier=".cg")
    total = tl.load(sums + at * 2 + 1, mask=ok, other=0.0, cache_modifier=".cg")
    top = tl.max(best, 1)
    weight = tl.exp2(best - tl.where(top == float("-inf"), 0.0, top)[:, None])
    total = tl.sum(weight * total, 1)
    acc = tl.sum(weight[:, :, None] * part, 1)
    head = g * GROUP + m % GROUP
    if SINKS:
        total = sunk(total, top, tl.load(sinks + head, mask=valid, other=0.0))
    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    row = b.to(tl.int64) * rows + m // GROUP
    to = out + (row * (G * GROUP) * D + head * D)[:, None] + cols[None, :]
    tl.store(to, result.to(out.dtype.element_ty), mask=valid[:, None])


_NEW_ROWS = 16  # written to the cache at a time


def cache_steps(cache_k: Tensor, cache_v: Tensor) -> tuple[int, int, int]:
    block_step, slot_step, head_step, one = cache_k.stride()
    assert cache_v.stride() == cache_k.stride() and one == 1
    return block_step, slot_step, head_step


def check_heads(q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, cache_k: Tensor) -> None:
    width = q_THd.shape[-1]
    if width & (width - 1) or width < 16:
        raise ValueError(f"head width {width}: the Triton attention takes powers of two from 16")
    assert q_THd.stride(-1) == k_TGd.stride(-1) == v_TGd.stride(-1) == 1
    assert q_THd.dtype == k_TGd.dtype == v_TGd.dtype == cache_k.dtype


def kind_of(window: Window) -> tuple[int, int]:
    """What kernels call WINDOWED, and how wide it is."""
    if isinstance(window, ChunkedAttention):
        return 2, window.chunk_size
    return (0, 0) if window is None else (1, window)


def paged_attention_triton(
    q_THd: Tensor,
    k_TGd: Tensor,
    v_TGd: Tensor,
    cache_k: Tensor,
    cache_v: Tensor,
    metadata: PagedAttentionMetadata,
    window: Window,
    pdl: bool = False,
    launch: PagedLaunchConfig | None = None,
    rope: QKNormRope | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    check_heads(q_THd, k_TGd, v_TGd, cache_k)
    kind, span = kind_of(window)
    pdl = pdl and q_THd.is_cuda  # the interpreter knows nothing of it
    total_rows, heads, width = q_THd.shape
    block_size, kv_heads = cache_k.shape[1:3]
    batch, rows, group = len(metadata.num_computed_tokens_B), metadata.max_query_len, heads // kv_heads
    assert total_rows == batch * rows and metadata.block_tables_BM.stride(1) == 1
    if launch is None:
        launch = choose_paged_launch(metadata, heads, kv_heads, q_THd.shape[-1], block_size, q_THd.dtype, q_THd.device)
    assert launch.tile % block_size == 0 or block_size % launch.tile == 0
    programs = min(launch.programs or launch.splits, launch.splits)
    steps = cache_steps(cache_k, cache_v)
    ahead = launch.prefetch if cache_k.is_cuda else 0  # the interpreter knows nothing of it
    cos = sin = q_norm = k_norm = q_THd  # not looked at, but typed
    sunk = q_THd if sinks is None else sinks
    angle_row, eps = 0, 0.0
    if rope is not None:
        cos, sin, eps = rope.cos, rope.sin, rope.eps
        assert cos.stride() == sin.stride() and cos.stride(-1) == 1 and cos.dtype == q_THd.dtype
        angle_row = cos.stride(0)
        if rope.has_norm:
            assert rope.q_norm is not None and rope.k_norm is not None
            q_norm, k_norm = rope.q_norm, rope.k_norm
    out = torch.empty((total_rows, heads, width), dtype=q_THd.dtype, device=q_THd.device)
    query_tiles = triton.cdiv(rows * group, launch.queries)
    # With one share these are not looked at, but keep their types, which a compilation is for.
    shares = batch * launch.splits * rows * heads if launch.splits > 1 else 1
    parts = torch.empty((shares, width), dtype=torch.float32, device=out.device)
    sums = torch.empty((shares, 2), dtype=torch.float32, device=out.device)
    # Of one tile it is the same how many a piece has, and the kernel is shorter.
    of_piece = launch.segment_tiles if get_max_key_tiles(metadata, block_size, launch.tile) > 1 else 1
    shared = {"G": kv_heads, "GROUP": group, "D": width, "TILE": launch.tile, "SPAN": of_piece}
    tiles = get_max_key_tiles(metadata, block_size, launch.tile * of_piece)
    whole = programs >= min(launch.splits, tiles)
    once = programs >= tiles and rows <= 2 * _NEW_ROWS and width < 128  # wider heads were not timed
    shared |= {
        "WINDOWED": kind,
        "SINKS": sinks is not None,
        "WHOLE": whole,
        "PDL": pdl,
        "launch_pdl": pdl,
    }
    _paged_kernel[(kv_heads * query_tiles, programs, batch)](
        q_THd,
        k_TGd,
        v_TGd,
        cos,
        sin,
        q_norm,
        k_norm,
        sunk,
        cache_k,
        cache_v,
        out,
        parts,
        sums,
        metadata.block_tables_BM,
        metadata.num_computed_tokens_B,
        metadata.query_lens_B,
        rows,
        launch.splits,
        span,
        metadata.block_tables_BM.stride(0),
        metadata.block_tables_BM.shape[1],
        *q_THd.stride()[:2],
        *k_TGd.stride()[:2],
        *v_TGd.stride()[:2],
        angle_row,
        *steps,
        width**-0.5 * math.log2(math.e),
        eps,
        **shared,
        BLOCK=block_size,
        QUERIES=launch.queries,
        NEW=2 * _NEW_ROWS if once and rows > _NEW_ROWS else _NEW_ROWS,
        AHEAD=ahead if once or of_piece == 1 else 0,
        ONCE=once,
        ROTATE=rope is not None,
        NORM=rope is not None and rope.has_norm,
        PRECISION="ieee" if q_THd.dtype == torch.float32 else "tf32",
        num_warps=launch.warps,
        num_stages=launch.stages,
        enable_fp_fusion=rope is None,  # a rope is two rounded products and a rounded sum, as torch has it
        **({"maxnreg": launch.max_registers} if launch.max_registers else {}),
    )
    if min(launch.splits, tiles) > 1:  # otherwise the only share wrote the result
        # By nothing that depends on the batch, as these decide the order of the sum.
        split_block = triton.next_power_of_2(launch.splits)
        queries = max(1, 16 // split_block)
        _combine_kernel[(triton.cdiv(rows * group, queries), kv_heads, batch)](
            parts,
            sums,
            sunk,
            out,
            metadata.num_computed_tokens_B,
            metadata.query_lens_B,
            rows,
            launch.splits,
            span,
            **shared,
            QUERIES=queries,
            SPLITS=split_block,
            num_warps=4,
        )
    return out
