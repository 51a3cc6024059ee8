# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, check-untyped-defs=False
"""Paged attention of decode and verification steps in Triton: few rows per sequence, split-KV (flash decoding).

Nothing on the host depends on a sequence length, so CUDA graphs can capture it.

`_paged_kernel`: a program handles one sequence, one key/value head and some splits of the keys, for all rows and all
query heads that share the key/value head, so keys are read once.
`_combine_kernel`: adds up the splits, in the same order for all batches.

Batch invariance: a row gets the same bits in decode and in verification, and in every batch.
- Keys are cut into segments of one or two tiles at fixed positions, which go round robin to the splits. The number of
  splits depends on the model and the GPU only, so the order of summation depends only on a row's position. The number
  of programs depends on the batch; a program with several splits computes them one after another.
- Tiles and splits behind a row add exactly nothing to it: weights of 0, and a rescaling by 1.
- Keys and values are the left operands of the matrix products and rows the right ones: tiles of at least 64 keys use
  one kind of instruction (wgmma) for any number of rows, and sum over keys in one order.
There are two exceptions. A batch with more (sequence, key/value head) pairs than the GPU has multiprocessors uses one
split, with smaller tiles for wide heads: other bits, but the same for all such batches. And in large models a batch of
more than 16 rows has at most as many splits as programs, because its GEMMs round differently anyway (tile_configs.py):
keeping the splits of one request cost 4 to 8% of a step of 4 to 16 requests.

Example: 3 splits of 7 segments on 2 programs; segments in the order of computation, | where a split ends:

    program 0   0 3 6 | 2 5 |
    program 1   1 4 |

Programmatic dependent launch (PDL): before it waits, a kernel that starts early may only read what was written before
some earlier, normally launched kernel. Such a kernel starts after all its predecessors have ended; early starters
behind it may run beside any number of the kernels in between. Here the early reads are block tables and lengths; models
run a normally launched embedding lookup after writing them. Prefetching cached keys into the L2 is not a read and is
always allowed. At least one program of every kernel must wait, even without work: its successor relies on all
predecessors of an ended kernel having ended.

Shapes: B sequences, H query heads, G key/value heads, GROUP = H / G, D head width.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.config import ChunkedAttention, Window
from peagle.kernels.attention.paged_launch import PagedLaunchConfig, choose_paged_launch, get_max_key_tiles
from peagle.kernels.attention.rotary_triton import inverse_rms, rotate_pairs
from peagle.kernels.attention.types import PagedAttentionInputs
from peagle.kernels.fp8 import FP8_MAX
from peagle.kernels.triton_utils import supports_pdl

_NEW_ROWS = 16  # rows written to the cache at a time
_FP8_MAX = tl.constexpr(FP8_MAX)


@triton.jit
def _softmax_step(scores, v, running_max, running_sum, acc, PRECISION: tl.constexpr):
    """Adds one tile [keys, queries] to the online softmax; `running_sum` keeps one sum per key of a tile."""
    new_max = tl.maximum(running_max, tl.max(scores, 0))
    reference = tl.where(new_max == float("-inf"), 0.0, new_max)
    rescale = tl.exp2(running_max - reference)[None, :]
    p = tl.exp2(scores - reference[None, :])
    running_sum = running_sum * rescale + p
    acc = tl.dot(tl.trans(v), p.to(v.dtype), acc * rescale, input_precision=PRECISION)
    return new_max, running_sum, acc


@triton.jit
def first_visible(position, window, WINDOW_KIND: tl.constexpr):
    """First position that a row sees; WINDOW_KIND is 1 for a sliding window, 2 for chunked attention."""
    if WINDOW_KIND == 2:
        return position // window * window
    else:
        return position - window + 1


@triton.jit
def _segment_range(start, query_len, splits, window, SEGMENT: tl.constexpr, WINDOW_KIND: tl.constexpr):
    """First visible segment, end of the segments, and the number of splits in use; the same in every kernel."""
    first = 0
    if WINDOW_KIND:
        first = tl.maximum(first_visible(start, window, WINDOW_KIND), 0) // SEGMENT
    end = tl.maximum((start + query_len + SEGMENT - 1) // SEGMENT, 1)
    return first, end, tl.minimum(end - first, splits)


@triton.jit
def _owner(segment, first, splits, programs, ONE_SPLIT: tl.constexpr):
    """The program that computes a segment."""
    split = (segment - first) % splits
    return split if ONE_SPLIT else split % programs


@triton.jit
def _count_segments(program, first, end, splits, programs, ONE_SPLIT: tl.constexpr):
    """The number of segments of a program that has any: equally many of each split, one more of the first splits."""
    if ONE_SPLIT:
        count = (end - first - program + splits - 1) // splits
    else:
        rounds, rest = (end - first) // splits, (end - first) % splits
        own_splits = (splits - program + programs - 1) // programs
        count = rounds * own_splits + (rest - program + programs - 1) // programs
    return count


@triton.jit
def _next_segment(segment, split, first, end, splits, programs, ONE_SPLIT: tl.constexpr):
    """The next segment of a program and its split, counted from the first visible segment's. After the last: any."""
    segment += splits
    if not ONE_SPLIT:
        split_ends = segment >= end
        split += split_ends * programs
        segment += split_ends * (first + split - segment)
    return segment, split


@triton.jit
def _sum_over_keys(running_sum, PRECISION: tl.constexpr):
    if PRECISION == "ieee":
        # The order of summation depends on the number of queries; in fp64 that does not show in the fp32 result. With
        # 16-bit inputs the layout of the matrix product sums in one order for any number.
        return tl.sum(running_sum.to(tl.float64), 0).to(tl.float32)
    else:
        return tl.sum(running_sum, 0)


@triton.jit
def add_sink(total, row_max, sink):
    """Adds a sink's logit to a softmax sum in base 2 relative to `row_max`. Without keys: inf, so that output is 0."""
    return total + tl.exp2(sink.to(tl.float32) * 1.4426950408889634 - row_max)


@triton.jit
def _store_partial(row_max, row_sum, acc, partial_out, partial_stats, at, valid, cols, D: tl.constexpr):
    """Stores a split's result for queries `at`, laid out [B, splits, G, rows * GROUP]."""
    tl.store(partial_out + at[None, :] * D + cols[:, None], acc, mask=valid[None, :])
    tl.store(partial_stats + at * 2, row_max, mask=valid)
    tl.store(partial_stats + at * 2 + 1, row_sum, mask=valid)


@triton.jit
def _prefetch(cache, at, needed, D: tl.constexpr):
    """Prefetches rows of D elements at offsets `at` of the cache into the L2."""
    SIZE: tl.constexpr = cache.dtype.element_ty.primitive_bitwidth // 8
    # Sector by sector: how much more a request brings is not documented. Requests for one line are coalesced.
    sectors = tl.arange(0, max(D * SIZE // 32, 1)) * 32
    addresses = (cache + at).to(tl.int64)[:, None] + sectors[None, :]
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; } // $0",
        "=r,l,r", [addresses, needed.to(tl.int32)[:, None] + sectors[None, :] * 0],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def to_cache(x, cache):
    """Converts keys or values to the dtype of the cache; fp8 saturates."""
    dtype: tl.constexpr = cache.dtype.element_ty
    if dtype.primitive_bitwidth == 8:
        x = tl.clamp(x.to(tl.float32), -_FP8_MAX, _FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
    return x.to(dtype)


@triton.jit
def _load_rope(x_at, row, cols, mask, cos, sin, angle_stride, D: tl.constexpr):
    """Loads the inputs of `_apply_rope`: the other entry of each rotated pair, and the angles."""
    other = tl.load(x_at + (cols + D // 2) % D, mask=mask, other=0.0)
    c = tl.load(cos + row * angle_stride + cols, mask=mask, other=1.0)
    s = tl.load(sin + row * angle_stride + cols, mask=mask, other=0.0)
    return other, c, s


@triton.jit
def _apply_rope(x, other, c, s, cols, mask, norm, eps, AXIS: tl.constexpr, D: tl.constexpr, QK_NORM: tl.constexpr):
    """Norms and rotates x where `mask` is set; heads lie along AXIS."""
    c = c.to(tl.float32)
    s = tl.where(cols < D // 2, -s.to(tl.float32), s.to(tl.float32))
    if QK_NORM:
        inverse = inverse_rms((x.to(tl.float32) * x.to(tl.float32)).to(tl.float64), eps, AXIS, D)
        pair = (cols + D // 2) % D
        weight, other_weight = tl.load(norm + cols).to(tl.float32), tl.load(norm + pair).to(tl.float32)
        return tl.where(mask, rotate_pairs(x, other, weight, other_weight, inverse, c, s, True), x)
    else:
        return rotate_pairs(x, other, 1.0, 1.0, 1.0, c, s, False)  # outside the mask the angle is 0


# One compilation serves all values of the arguments that are not specialised.
@triton.jit(do_not_specialize=["rows", "splits", "window", "table_width"])
def _paged_kernel(
    q, k, v, cos, sin, q_norm, k_norm, sinks, cache_k, cache_v,
    out, partial_out, partial_stats,
    block_tables, num_computed_tokens, query_lens,
    rows, splits, window,
    table_stride, table_width,
    q_row_stride, q_head_stride, k_row_stride, k_head_stride, v_row_stride, v_head_stride,
    angle_stride,
    block_stride, slot_stride, head_stride,
    scale, eps,
    G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr, SEGMENT_TILES: tl.constexpr, QUERIES: tl.constexpr, NEW_ROWS: tl.constexpr,
    PREFETCH: tl.constexpr, ONE_SEGMENT: tl.constexpr, ONE_SPLIT: tl.constexpr,
    ROPE: tl.constexpr, QK_NORM: tl.constexpr, WINDOW_KIND: tl.constexpr, SINKS: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes attention of one query tile over some splits, and writes new keys and values to the cache.

    ONE_SPLIT: no program has more than one non-empty split. If only one split is in use, its program writes the final
    result. ONE_SEGMENT: in addition no program has more than one segment, and there are few new rows: all loads are
    then issued at once. `segment` counts segments of SEGMENT keys, `sub` the tiles within one.
    """
    SEGMENT: tl.constexpr = TILE * SEGMENT_TILES
    g = tl.program_id(0) % G
    query_tile = tl.program_id(0) // G
    program = tl.program_id(1)
    programs = tl.num_programs(1)
    b = tl.program_id(2)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    query_len = tl.load(query_lens + b).to(tl.int32)
    start = tl.load(num_computed_tokens + b).to(tl.int32)
    table = block_tables + b.to(tl.int64) * table_stride
    slots = tl.arange(0, TILE)
    early = tl.arange(0, SEGMENT * max(PREFETCH, 1))
    if PREFETCH > 0 and not WINDOW_KIND:
        # Without a window the first segments are known before `start` is, if each split has a program. Saves one wait
        # for memory at the cost of some needless block numbers.
        early_pos = (program + early // SEGMENT * programs) * SEGMENT + early % SEGMENT
        early_block = tl.load(table + early_pos // BLOCK, mask=early_pos // BLOCK < table_width, other=0)
    # A sequence without valid rows is an empty request slot: its start is undefined.
    start = tl.where(query_len > 0, start, 0)
    end = start + query_len
    first_segment, end_segment, used_splits = _segment_range(start, query_len, splits, window, SEGMENT, WINDOW_KIND)
    if program >= used_splits:
        return  # other programs wait for the previous kernel
    split = program
    segment = first_segment + split
    count = _count_segments(program, first_segment, end_segment, splits, programs, ONE_SPLIT)
    owns_first = _owner(start // SEGMENT, first_segment, splits, programs, ONE_SPLIT) == program
    owns_last = _owner(end_segment - 1, first_segment, splits, programs, ONE_SPLIT) == program
    may_own_new_rows = owns_first | owns_last | (end_segment - start // SEGMENT > 2)
    if PREFETCH > 0:
        # Prefetch the first segments while the previous kernel still runs; the loop prefetches later ones.
        if WINDOW_KIND:
            early_pos = (segment + early // SEGMENT * programs) * SEGMENT + early % SEGMENT
            early_block = tl.load(table + early_pos // BLOCK, mask=early_pos < start, other=0)
        early_at = early_block.to(tl.int64) * block_stride + (early_pos % BLOCK) * slot_stride + g * head_stride
        _prefetch(cache_k, early_at, early_pos < start, D)
        _prefetch(cache_v, early_at, early_pos < start, D)
        ahead_segment, ahead_split = segment, split
        for _ in tl.static_range(PREFETCH):
            ahead_segment, ahead_split = _next_segment(
                ahead_segment, ahead_split, first_segment, end_segment, splits, programs, ONE_SPLIT
            )
        ahead_pos = ahead_segment * SEGMENT + slots
        ahead_block = tl.load(table + ahead_pos // BLOCK, mask=ahead_pos < start, other=0)
    # Block numbers are loaded one tile ahead: in the same iteration every load would wait for another.
    block = tl.load(table + (segment * SEGMENT + slots) // BLOCK, mask=segment * SEGMENT + slots < end, other=0)
    cols = tl.arange(0, D)
    sub = 0
    if ONE_SEGMENT:
        pos = segment * SEGMENT + slots
        base = block.to(tl.int64) * block_stride + (pos % BLOCK) * slot_stride + g * head_stride
        if SEGMENT_TILES > 1:
            count = tl.minimum((end - segment * SEGMENT + TILE - 1) // TILE, SEGMENT_TILES)
            later = tl.load(table + (pos + TILE) // BLOCK, mask=pos + TILE < end, other=0)
            later_base = later.to(tl.int64) * block_stride + (pos % BLOCK) * slot_stride + g * head_stride
        new_pos = start + tl.arange(0, NEW_ROWS)
        mine = ((new_pos < end) & (_owner(new_pos // SEGMENT, first_segment, splits, programs, ONE_SPLIT) == program))[
            :, None
        ]
        to_block = tl.load(table + new_pos // BLOCK, mask=new_pos < end, other=0).to(tl.int64)
        to = (to_block * block_stride + (new_pos % BLOCK) * slot_stride + g * head_stride)[:, None] + cols[None, :]
        new_row = (b.to(tl.int64) * rows + tl.arange(0, NEW_ROWS))[:, None]
        new_k = k + new_row * k_row_stride + g * k_head_stride
        new_v = v + new_row * v_row_stride + g * v_head_stride
    if PDL:
        tl.extra.cuda.gdc_wait()

    m = query_tile * QUERIES + tl.arange(0, QUERIES)
    j = m // GROUP
    head = g * GROUP + m % GROUP
    valid = m < rows * GROUP
    query_pos = start + j
    row = b.to(tl.int64) * rows + j
    q_at = q + (row * q_row_stride + head * q_head_stride)[None, :]
    queries = tl.load(q_at + cols[:, None], mask=valid[None, :], other=0.0)  # [D, QUERIES]
    if ROPE:
        q_other, q_cos, q_sin = _load_rope(q_at, row[None, :], cols[:, None], valid[None, :], cos, sin, angle_stride, D)
    if ONE_SEGMENT:
        key = tl.load(new_k + cols[None, :], mask=mine, other=0.0)
        value = tl.load(new_v + cols[None, :], mask=mine, other=0.0)
        if ROPE:
            k_other, k_cos, k_sin = _load_rope(new_k, new_row, cols[None, :], mine, cos, sin, angle_stride, D)
            key = _apply_rope(key, k_other, k_cos, k_sin, cols[None, :], mine, k_norm, eps, 1, D, QK_NORM)
        tl.store(cache_k + to, to_cache(key, cache_k), mask=mine)
        tl.store(cache_v + to, to_cache(value, cache_v), mask=mine)
    if ROPE:
        queries = _apply_rope(queries, q_other, q_cos, q_sin, cols[:, None], valid[None, :], q_norm, eps, 0, D, QK_NORM)
    running_max = tl.zeros((QUERIES,), tl.float32) - float("inf")
    running_sum = tl.zeros((TILE, QUERIES), tl.float32)
    acc = tl.zeros((D, QUERIES), tl.float32)
    partial_at = (b.to(tl.int64) * splits * G + g) * (rows * GROUP) + m  # of the first split

    # New rows of this program's segments are written to the cache first and then read back like all others, so that the
    # loop has one path. Programs of further query tiles write them again, as programs cannot wait for each other.
    if ONE_SEGMENT:
        tl.debug_barrier()
    elif may_own_new_rows:
        for n in tl.range(0, query_len, NEW_ROWS, num_stages=1):
            new_pos = start + n + tl.arange(0, NEW_ROWS)
            mine = (new_pos < end) & (_owner(new_pos // SEGMENT, first_segment, splits, programs, ONE_SPLIT) == program)
            to_block = tl.load(table + new_pos // BLOCK, mask=mine, other=0).to(tl.int64)
            to = (to_block * block_stride + (new_pos % BLOCK) * slot_stride + g * head_stride)[:, None] + cols[None, :]
            new_row = b.to(tl.int64) * rows + n + tl.arange(0, NEW_ROWS)
            new_k = k + (new_row * k_row_stride + g * k_head_stride)[:, None]
            new_v = v + (new_row * v_row_stride + g * v_head_stride)[:, None]
            key = tl.load(new_k + cols[None, :], mask=mine[:, None], other=0.0)
            value = tl.load(new_v + cols[None, :], mask=mine[:, None], other=0.0)
            if ROPE:
                k_other, k_cos, k_sin = _load_rope(
                    new_k, new_row[:, None], cols[None, :], mine[:, None], cos, sin, angle_stride, D
                )
                key = _apply_rope(key, k_other, k_cos, k_sin, cols[None, :], mine[:, None], k_norm, eps, 1, D, QK_NORM)
            tl.store(cache_k + to, to_cache(key, cache_k), mask=mine[:, None])
            tl.store(cache_v + to, to_cache(value, cache_v), mask=mine[:, None])
        tl.debug_barrier()

    # One loop over the tiles of all splits, so that the next split's keys are loaded while one is computed.
    steps = count if ONE_SEGMENT else count * SEGMENT_TILES
    for i in range(steps):
        if not ONE_SEGMENT:
            pos = segment * SEGMENT + sub * TILE + slots
            base = block.to(tl.int64) * block_stride + (pos % BLOCK) * slot_stride + g * head_stride
        written = (pos < end)[:, None]
        at = base[:, None] + cols[None, :]
        keys = tl.load(cache_k + at, mask=written, other=0.0)
        if D <= 256:
            values = tl.load(cache_v + at, mask=written, other=0.0)
        absolute_split, last = segment % splits, segment + splits >= end_segment
        if SEGMENT_TILES > 1:
            last = last & (sub == SEGMENT_TILES - 1)
        if not ONE_SEGMENT:
            if SEGMENT_TILES > 1:
                next_segment, next_split = _next_segment(
                    segment, split, first_segment, end_segment, splits, programs, ONE_SPLIT
                )
                sub = (sub + 1) % SEGMENT_TILES
                segment, split = tl.where(sub == 0, next_segment, segment), tl.where(sub == 0, next_split, split)
            else:
                segment, split = _next_segment(segment, split, first_segment, end_segment, splits, programs, ONE_SPLIT)
            next_pos = segment * SEGMENT + sub * TILE + slots
            block = tl.load(table + next_pos // BLOCK, mask=next_pos < end, other=0)
            if PREFETCH > 0:
                ahead_at = ahead_block.to(tl.int64) * block_stride + (ahead_pos % BLOCK) * slot_stride + g * head_stride
                _prefetch(cache_k, ahead_at, ahead_pos < start, D)
                _prefetch(cache_v, ahead_at, ahead_pos < start, D)
                ahead_segment, ahead_split = _next_segment(
                    ahead_segment, ahead_split, first_segment, end_segment, splits, programs, ONE_SPLIT
                )
                ahead_pos = ahead_segment * SEGMENT + slots
                ahead_block = tl.load(table + ahead_pos // BLOCK, mask=ahead_pos < start, other=0)
        scores = tl.dot(keys.to(queries.dtype), queries, input_precision=PRECISION) * scale
        visible = pos[:, None] <= query_pos[None, :]
        if WINDOW_KIND:
            visible = visible & (pos[:, None] >= first_visible(query_pos, window, WINDOW_KIND)[None, :])
        scores = tl.where(visible, scores, float("-inf"))
        if D > 256:
            # With one stage, values reuse the shared memory of the keys. If both were loaded at once, the weights would
            # reuse it, and the assembler of CUDA 12.8 then loses their address.
            values = tl.load(cache_v + at, mask=written, other=0.0)
        values = values.to(queries.dtype)
        running_max, running_sum, acc = _softmax_step(scores, values, running_max, running_sum, acc, PRECISION)
        if not ONE_SPLIT:
            if last:
                row_sum = _sum_over_keys(running_sum, PRECISION)
                split_at = partial_at + absolute_split * (G * rows * GROUP)
                _store_partial(running_max, row_sum, acc, partial_out, partial_stats, split_at, valid, cols, D)
            running_max = tl.where(last, float("-inf"), running_max)
            running_sum = tl.where(last, 0.0, running_sum)
            acc = tl.where(last, 0.0, acc)
        if ONE_SEGMENT and SEGMENT_TILES > 1:
            pos, base = pos + TILE, later_base
        # Never taken, but the timed code has it: without this branch Triton moves the tile through registers instead of
        # copying it asynchronously.
        if ONE_SEGMENT and SEGMENT_TILES == 1 and i + 1 < count:
            segment, split = _next_segment(segment, split, first_segment, end_segment, splits, programs, ONE_SPLIT)
            pos = segment * TILE + slots
            block = tl.load(table + pos // BLOCK, mask=pos < end, other=0)
            base = block.to(tl.int64) * block_stride + (pos % BLOCK) * slot_stride + g * head_stride
    if ONE_SPLIT:
        row_sum = _sum_over_keys(running_sum, PRECISION)
        if used_splits == 1:
            if SINKS:
                row_sum = add_sink(row_sum, running_max, tl.load(sinks + head, mask=valid, other=0.0))
            result = acc / tl.where(row_sum > 0.0, row_sum, 1.0)[None, :]
            out_at = out + (row * (G * GROUP * D) + head * D)[None, :] + cols[:, None]
            tl.store(out_at, result.to(out.dtype.element_ty), mask=valid[None, :])
        else:
            split_at = partial_at + (first_segment + program) % splits * (G * rows * GROUP)
            _store_partial(running_max, row_sum, acc, partial_out, partial_stats, split_at, valid, cols, D)


@triton.jit(do_not_specialize=["rows", "splits", "window"])
def _combine_kernel(
    partial_out, partial_stats, sinks, out,
    num_computed_tokens, query_lens,
    rows, splits, window,
    G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    TILE: tl.constexpr, SEGMENT_TILES: tl.constexpr, QUERIES: tl.constexpr, SPLITS: tl.constexpr,
    WINDOW_KIND: tl.constexpr, SINKS: tl.constexpr, ONE_SPLIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Combines the splits of some queries into the final output."""
    g = tl.program_id(1)
    b = tl.program_id(2)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    query_len = tl.load(query_lens + b).to(tl.int32)
    start = tl.load(num_computed_tokens + b).to(tl.int32)
    start = tl.where(query_len > 0, start, 0)
    SEGMENT: tl.constexpr = TILE * SEGMENT_TILES
    first_segment, _, used_splits = _segment_range(start, query_len, splits, window, SEGMENT, WINDOW_KIND)
    m = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    valid = m < rows * GROUP
    s = tl.arange(0, SPLITS)
    if WINDOW_KIND:
        filled = (s < splits) & ((s + splits - first_segment % splits) % splits < used_splits)
    else:
        filled = s < used_splits
    cols = tl.arange(0, D)
    split_stride = G * rows * GROUP
    at = b.to(tl.int64) * splits * split_stride + g * rows * GROUP + s[None, :] * split_stride + m[:, None]
    ok = filled[None, :] & valid[:, None]
    if PDL:
        tl.extra.cuda.gdc_wait()  # even without work: the next kernel waits for this one only
    if ONE_SPLIT and used_splits == 1:
        return  # the only split wrote the result
    # All loads at once, as one wait for memory costs more than the rest. .cg bypasses the L1, which may be stale.
    partial = tl.load(
        partial_out + at[:, :, None] * D + cols[None, None, :], mask=ok[:, :, None], other=0.0, cache_modifier=".cg"
    )
    split_max = tl.load(partial_stats + at * 2, mask=ok, other=float("-inf"), cache_modifier=".cg")
    split_sum = tl.load(partial_stats + at * 2 + 1, mask=ok, other=0.0, cache_modifier=".cg")
    row_max = tl.max(split_max, 1)
    weight = tl.exp2(split_max - tl.where(row_max == float("-inf"), 0.0, row_max)[:, None])
    total = tl.sum(weight * split_sum, 1)
    acc = tl.sum(weight[:, :, None] * partial, 1)
    head = g * GROUP + m % GROUP
    if SINKS:
        total = add_sink(total, row_max, tl.load(sinks + head, mask=valid, other=0.0))
    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    row = b.to(tl.int64) * rows + m // GROUP
    to = out + (row * (G * GROUP) * D + head * D)[:, None] + cols[None, :]
    tl.store(to, result.to(out.dtype.element_ty), mask=valid[:, None])


def get_cache_strides(inputs: PagedAttentionInputs) -> tuple[int, int, int]:
    """Returns the strides of a block, a slot and a head, which must be equal in both caches."""
    block_stride, slot_stride, head_stride, unit = inputs.cache_k.stride()
    assert inputs.cache_v.stride() == inputs.cache_k.stride() and unit == 1
    return block_stride, slot_stride, head_stride


def get_qkv_strides(inputs: PagedAttentionInputs) -> tuple[int, ...]:
    """Returns the strides of a row and a head of q, k and v."""
    q, k, v = inputs[:3]
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1 and q.dtype == k.dtype == v.dtype
    return (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2])


def get_window_args(window: Window) -> tuple[int, int]:
    """Returns WINDOW_KIND and the window's size."""
    if isinstance(window, ChunkedAttention):
        return 2, window.chunk_size
    return (0, 0) if window is None else (1, window)


def paged_attention_triton(inputs: PagedAttentionInputs, launch: PagedLaunchConfig | None = None) -> Tensor:
    """As `paged_attention`; `launch` overrides the chosen launch parameters."""
    q_THd, k_TGd, v_TGd, cache_k, cache_v, metadata, window, sinks_H, rope, out_THd = inputs
    window_kind, window_size = get_window_args(window)
    pdl = supports_pdl(q_THd.device)
    total_rows, heads, width = q_THd.shape
    block_size, kv_heads = cache_k.shape[1:3]
    batch, rows, group = len(metadata.num_computed_tokens_B), metadata.max_query_len, heads // kv_heads
    assert total_rows == batch * rows and metadata.block_tables_BM.stride(1) == 1
    if launch is None:
        launch = choose_paged_launch(metadata, heads, kv_heads, width, block_size, q_THd.dtype, q_THd.device)
    assert launch.tile % block_size == 0 or block_size % launch.tile == 0
    programs = min(launch.programs or launch.splits, launch.splits)
    prefetch = launch.prefetch if cache_k.is_cuda else 0  # not available in the interpreter
    cos = sin = q_norm = k_norm = q_THd  # placeholders of the right type, never read
    sinks = q_THd if sinks_H is None else sinks_H
    angle_stride, eps = 0, 0.0
    if rope is not None:
        cos, sin, eps = rope.cos, rope.sin, rope.eps
        assert cos.stride() == sin.stride() and cos.stride(-1) == 1 and cos.dtype == q_THd.dtype
        angle_stride = cos.stride(0)
        if rope.q_norm is not None and rope.k_norm is not None:
            q_norm, k_norm = rope.q_norm, rope.k_norm
    out = out_THd if out_THd is not None else q_THd.new_empty(q_THd.shape)
    assert out.is_contiguous()
    # With one split these are never read, but the compilation needs their types.
    num_partials = batch * launch.splits * rows * heads if launch.splits > 1 else 1
    partial_out = torch.empty((num_partials, width), dtype=torch.float32, device=out.device)
    partial_stats = torch.empty((num_partials, 2), dtype=torch.float32, device=out.device)
    # For contexts of one tile the segment size does not matter, and the kernel is shorter.
    segment_tiles = launch.segment_tiles if get_max_key_tiles(metadata, block_size, launch.tile) > 1 else 1
    max_segments = get_max_key_tiles(metadata, block_size, launch.tile * segment_tiles)
    one_segment = programs >= max_segments and rows <= 2 * _NEW_ROWS and width < 128  # wider heads were not timed
    shared = {
        "G": kv_heads, "GROUP": group, "D": width, "TILE": launch.tile, "SEGMENT_TILES": segment_tiles,
        "WINDOW_KIND": window_kind, "SINKS": sinks_H is not None,
        "ONE_SPLIT": programs >= min(launch.splits, max_segments), "PDL": pdl, "launch_pdl": pdl,
    }  # fmt: skip
    _paged_kernel[(kv_heads * triton.cdiv(rows * group, launch.queries), programs, batch)](
        q_THd, k_TGd, v_TGd, cos, sin, q_norm, k_norm, sinks, cache_k, cache_v,
        out, partial_out, partial_stats,
        metadata.block_tables_BM, metadata.num_computed_tokens_B, metadata.query_lens_B,
        rows, launch.splits, window_size,
        metadata.block_tables_BM.stride(0), metadata.block_tables_BM.shape[1],
        *get_qkv_strides(inputs), angle_stride, *get_cache_strides(inputs), width**-0.5 * math.log2(math.e), eps,
        **shared,
        BLOCK=block_size, QUERIES=launch.queries,
        NEW_ROWS=2 * _NEW_ROWS if one_segment and rows > _NEW_ROWS else _NEW_ROWS,
        PREFETCH=prefetch if one_segment or segment_tiles == 1 else 0, ONE_SEGMENT=one_segment,
        ROPE=rope is not None, QK_NORM=rope is not None and rope.has_norm,
        PRECISION="ieee" if q_THd.dtype == torch.float32 else "tf32",
        num_warps=launch.warps, num_stages=launch.stages,
        enable_fp_fusion=rope is None,  # torch rounds both products of a rotation and their sum
        **({"maxnreg": launch.max_registers} if launch.max_registers else {}),
    )  # fmt: skip
    if min(launch.splits, max_segments) > 1:  # otherwise the only split wrote the result
        # Independent of the batch, as these decide the order of summation.
        padded_splits = triton.next_power_of_2(launch.splits)
        queries = max(1, 16 // padded_splits)
        _combine_kernel[(triton.cdiv(rows * group, queries), kv_heads, batch)](
            partial_out, partial_stats, sinks, out, metadata.num_computed_tokens_B, metadata.query_lens_B,
            rows, launch.splits, window_size,
            **shared, QUERIES=queries, SPLITS=padded_splits, num_warps=4,
        )  # fmt: skip
    return out
