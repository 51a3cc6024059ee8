# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, check-untyped-defs=False
"""The Triton versions of ranged_attention.py: flash attention forward and backward, no atomics, nothing read back.

lo and hi never fall, so to a tile of rows the keys are three stretches: those that only its first rows see, those that
all its rows see, those that only its last rows see. The same holds for a tile of keys and the rows that see it
(`Ranges.row_spans`). Every kernel goes through the outer stretches in one loop, with masks, and through the middle
one in another, without. Tiles begin where the first stretch does, not at multiples of their size.

`_forward_kernel`, `_dq_kernel`: a program has a tile of rows and one head.
`_dkv_kernel`: a program has a tile of keys and one key/value head, for all heads that share it.
`_delta_kernel`: what both need to know of a row: sum(out * dout) - dlse, and its lse in base 2.

lse is kept [H, R], so that a tile reads it in one piece, and handed out as a transposed view. A row's base address is
64 bits wide, offsets within a tile are 32.

With TRITON_INTERPRET=1 in the environment, set before the import, the launchers take CPU tensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from peagle.kernels.attention.key_ranges import KeyRanges, pad_row_count

_LN2 = tl.constexpr(math.log(2.0))


@triton.jit
def _take(
    x,
    row,
    head,
    i,
    cols,
    there,
    row_step,
    head_step,
    MASKED: tl.constexpr,
    TMA: tl.constexpr,
    D: tl.constexpr,
    WIDE: tl.constexpr,
):
    """[len(i), WIDE] from row `row` on, of one head; 0 behind the width D and (if MASKED) where a row is not `there`.

    TMA: x is a descriptor of [rows, heads * D] that brings this many rows, and 0 for those behind the last.
    """
    if TMA:
        return x.load([row, head * D])
    else:
        to = x + row.to(tl.int64) * row_step + head * head_step + (i * row_step)[:, None] + cols[None, :]
        if MASKED and D != WIDE:
            return tl.load(to, mask=there[:, None] & (cols < D)[None, :], other=0.0)
        elif MASKED:
            return tl.load(to, mask=there[:, None], other=0.0)
        elif D != WIDE:
            return tl.load(to, mask=(cols < D)[None, :], other=0.0)
        else:
            return tl.load(to)


@triton.jit
def _line(x, head, row, i, there, pitch, other, TMA: tl.constexpr, ROWS: tl.constexpr):
    """[ROWS] numbers of [H, R]. By pointers every thread fetches all it needs of a short line itself, over and over."""
    if TMA:
        return tl.reshape(x.load([head, row]), (ROWS,))
    else:
        return tl.load(x + head * pitch + row + i, mask=there, other=other)


@triton.jit
def _stretches(first, whole, broken, end, TILE: tl.constexpr):
    """[first, end) in tiles: how many before the ones wholly in [whole, broken), how many of those, how many after."""
    before = tl.cdiv(tl.maximum(tl.minimum(whole, end) - first, 0), TILE)
    middle = tl.maximum(broken - (first + before * TILE), 0) // TILE
    after = tl.cdiv(tl.maximum(end - (first + (before + middle) * TILE), 0), TILE)
    return before, middle, after


@triton.jit
def _keys_of(lo, hi, r0, rows, ROWS: tl.constexpr, TILE: tl.constexpr):
    """The keys a tile of rows sees: where they begin and end, and their stretches."""
    last = tl.minimum(r0 + ROWS, rows) - 1
    first, end = tl.load(lo + r0), tl.load(hi + last)
    before, middle, after = _stretches(first, tl.load(lo + last), tl.load(hi + r0), end, TILE)
    return first, end, before, middle, after


@triton.jit(do_not_specialize=["rows"])
def _forward_kernel(
    q,
    k,
    v,
    lo,
    hi,
    out,
    lse,
    rows,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    out_row,
    out_head,
    scale,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):
    """`scale` is in base 2."""
    # The last rows see the most keys: they go first, so that short programs fill the end.
    r0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    h = tl.program_id(1)
    g = h // GROUP
    i, j, cols = tl.arange(0, ROWS), tl.arange(0, TILE), tl.arange(0, WIDE)
    there = r0 + i < rows
    queries = _take(q, r0, h, i, cols, there, q_row, q_head, True, TMA, D, WIDE)
    first, end, before, middle, after = _keys_of(lo, hi, r0, rows, ROWS, TILE)
    best = tl.zeros((ROWS,), tl.float32) - float("inf")
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, WIDE), tl.float32)

    own_lo = tl.load(lo + r0 + i, mask=there, other=0)
    own_hi = tl.load(hi + r0 + i, mask=there, other=0)
    for t in range(before + after):
        n = tl.where(t < before, t, t + middle) * TILE
        pos = first + n + j
        keys = _take(k, first + n, g, j, cols, pos < end, k_row, k_head, True, TMA, D, WIDE)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale
        seen = (pos[None, :] >= own_lo[:, None]) & (pos[None, :] < own_hi[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        new = tl.maximum(best, tl.max(scores, 1))
        ref = tl.where(new == float("-inf"), 0.0, new)
        keep = tl.exp2(best - ref)
        p = tl.exp2(scores - ref[:, None])
        total = total * keep + tl.sum(p, 1)
        acc = acc * keep[:, None]
        values = _take(v, first + n, g, j, cols, pos < end, v_row, v_head, True, TMA, D, WIDE)
        acc = tl.dot(p.to(values.dtype), values, acc, input_precision=PRECISION)
        best = new
    for t in range(before, before + middle):
        n = t * TILE
        keys = _take(k, first + n, g, j, cols, j, k_row, k_head, False, TMA, D, WIDE)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        new = tl.maximum(best, tl.max(scores, 1) * scale)
        keep = tl.exp2(best - new)
        p = tl.exp2(scores * scale - new[:, None])
        total = total * keep + tl.sum(p, 1)
        acc = acc * keep[:, None]
        values = _take(v, first + n, g, j, cols, j, v_row, v_head, False, TMA, D, WIDE)
        acc = tl.dot(p.to(values.dtype), values, acc, input_precision=PRECISION)
        best = new

    some = total > 0.0
    result = acc / tl.where(some, total, 1.0)[:, None]
    to = out + r0.to(tl.int64) * out_row + h * out_head + (i * out_row)[:, None] + cols[None, :]
    tl.store(to, result.to(out.dtype.element_ty), mask=there[:, None] & (cols < D)[None, :])
    sums = tl.where(some, (best + tl.log2(tl.where(some, total, 1.0))) * _LN2, float("-inf"))
    tl.store(lse + h * rows + r0 + i, sums, mask=there)


@triton.jit(do_not_specialize=["rows", "pitch"])
def _delta_kernel(
    out,
    dout,
    lse,
    dlse,
    about,
    rows,
    pitch,
    out_row,
    out_head,
    dout_row,
    dout_head,
    lse_row,
    lse_head,
    dlse_row,
    dlse_head,
    HAS_DLSE: tl.constexpr,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Row h of `about` becomes head h's lse in base 2, row H + h its sum(out * dout) - dlse.

    A row that sees nothing gets an lse of inf: whatever is exp2(score - lse) is then 0.
    """
    r0, h = (tl.program_id(0) * ROWS).to(tl.int64), tl.program_id(1)
    i, cols = tl.arange(0, ROWS), tl.arange(0, WIDE)
    there = r0 + i < rows
    o = _take(out, r0, h, i, cols, there, out_row, out_head, True, False, D, WIDE).to(tl.float32)
    do = _take(dout, r0, h, i, cols, there, dout_row, dout_head, True, False, D, WIDE).to(tl.float32)
    result = tl.sum(o * do, 1)
    if HAS_DLSE:
        result -= tl.load(dlse + (r0 + i) * dlse_row + h * dlse_head, mask=there, other=0.0)
    sums = tl.load(lse + (r0 + i) * lse_row + h * lse_head, mask=there, other=float("-inf"))
    empty = sums == float("-inf")
    tl.store(about + h * pitch + r0 + i, tl.where(empty, float("inf"), sums / _LN2), mask=there)
    tl.store(about + (tl.num_programs(1) + h) * pitch + r0 + i, tl.where(empty, 0.0, result), mask=there)


@triton.jit(do_not_specialize=["rows", "pitch"])
def _dq_kernel(
    q,
    k,
    v,
    dout,
    lo,
    hi,
    about,
    dq,
    rows,
    pitch,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    dout_row,
    dout_head,
    dq_row,
    dq_head,
    scale,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):
    r0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    h = tl.program_id(1)
    g = h // GROUP
    i, j, cols = tl.arange(0, ROWS), tl.arange(0, TILE), tl.arange(0, WIDE)
    there = r0 + i < rows
    queries = _take(q, r0, h, i, cols, there, q_row, q_head, True, TMA, D, WIDE)
    do = _take(dout, r0, h, i, cols, there, dout_row, dout_head, True, TMA, D, WIDE)
    sums = tl.load(about + h * pitch + r0 + i, mask=there, other=float("inf"))
    own_delta = tl.load(about + (tl.num_programs(1) + h) * pitch + r0 + i, mask=there, other=0.0)
    first, end, before, middle, after = _keys_of(lo, hi, r0, rows, ROWS, TILE)
    acc = tl.zeros((ROWS, WIDE), tl.float32)

    own_lo = tl.load(lo + r0 + i, mask=there, other=0)
    own_hi = tl.load(hi + r0 + i, mask=there, other=0)
    for t in range(before + after):
        n = tl.where(t < before, t, t + middle) * TILE
        pos = first + n + j
        keys = _take(k, first + n, g, j, cols, pos < end, k_row, k_head, True, TMA, D, WIDE)
        values = _take(v, first + n, g, j, cols, pos < end, v_row, v_head, True, TMA, D, WIDE)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        dp = tl.dot(do, tl.trans(values), input_precision=PRECISION)
        seen = (pos[None, :] >= own_lo[:, None]) & (pos[None, :] < own_hi[:, None])
        p = tl.where(seen, tl.exp2(scores * scale - sums[:, None]), 0.0)
        ds = p * (dp - own_delta[:, None])
        acc = tl.dot(ds.to(keys.dtype), keys, acc, input_precision=PRECISION)
    for t in range(before, before + middle):
        n = t * TILE
        keys = _take(k, first + n, g, j, cols, j, k_row, k_head, False, TMA, D, WIDE)
        values = _take(v, first + n, g, j, cols, j, v_row, v_head, False, TMA, D, WIDE)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        dp = tl.dot(do, tl.trans(values), input_precision=PRECISION)
        p = tl.exp2(scores * scale - sums[:, None])
        ds = p * (dp - own_delta[:, None])
        acc = tl.dot(ds.to(keys.dtype), keys, acc, input_precision=PRECISION)

    acc *= scale * _LN2
    to = dq + r0.to(tl.int64) * dq_row + h * dq_head + (i * dq_row)[:, None] + cols[None, :]
    tl.store(to, acc.to(dq.dtype.element_ty), mask=there[:, None] & (cols < D)[None, :])


@triton.jit(do_not_specialize=["keys", "pitch"])
def _dkv_kernel(
    q,
    k,
    v,
    dout,
    bounds,
    spans,
    about,
    dk,
    dv,
    keys,
    pitch,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    dout_row,
    dout_head,
    dk_row,
    dk_head,
    scale,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):
    """Scores stand on their side, [keys, rows], so that all four products take their operands as they come."""
    tile, g = tl.program_id(0), tl.program_id(1)
    tiles, G = tl.num_programs(0), tl.num_programs(1)
    n0 = tile * TILE
    i, j, cols = tl.arange(0, ROWS), tl.arange(0, TILE), tl.arange(0, WIDE)
    pos = n0 + j
    there = pos < keys
    own_k = _take(k, n0, g, j, cols, there, k_row, k_head, True, TMA, D, WIDE)
    own_v = _take(v, n0, g, j, cols, there, v_row, v_head, True, TMA, D, WIDE)
    first, whole = tl.load(spans + tile) // 4 * 4, tl.load(spans + tiles + tile)  # lines are read from 16 bytes on
    broken, end = tl.load(spans + 2 * tiles + tile), tl.load(spans + 3 * tiles + tile)
    before, middle, after = _stretches(first, whole, broken, end, ROWS)
    acc_k = tl.zeros((TILE, WIDE), tl.float32)
    acc_v = tl.zeros((TILE, WIDE), tl.float32)

    # A divisor must never be 0, not even where a loop has no turn: the compiler may take the first turn's division out
    # of the loop, conclude that the divisor is not 0, hence that there is a turn, and run it on what lies in memory.
    edges, wholes = tl.maximum(before + after, 1), tl.maximum(middle, 1)
    for t in range(GROUP * (before + after)):  # one loop over heads and tiles: short ranges would not fill their own
        h, at = t // edges, t % edges
        r = tl.where(at < before, at, at + middle) * ROWS
        real = first + r + i < end
        queries = _take(q, first + r, g * GROUP + h, i, cols, real, q_row, q_head, True, TMA, D, WIDE)
        do = _take(dout, first + r, g * GROUP + h, i, cols, real, dout_row, dout_head, True, TMA, D, WIDE)
        sums = _line(about, g * GROUP + h, first + r, i, real, pitch, 0.0, TMA, ROWS)
        own_delta = _line(about, (G + g) * GROUP + h, first + r, i, real, pitch, 0.0, TMA, ROWS)
        own_lo = _line(bounds, 0, first + r, i, real, pitch, 0, TMA, ROWS)
        own_hi = _line(bounds, 1, first + r, i, real, pitch, 0, TMA, ROWS)
        scores = tl.dot(own_k, tl.trans(queries), input_precision=PRECISION)
        seen = (pos[:, None] >= own_lo[None, :]) & (pos[:, None] < own_hi[None, :])
        p = tl.where(seen, tl.exp2(scores * scale - sums[None, :]), 0.0)
        acc_v = tl.dot(p.to(do.dtype), do, acc_v, input_precision=PRECISION)
        dp = tl.dot(own_v, tl.trans(do), input_precision=PRECISION)
        ds = p * (dp - own_delta[None, :])
        acc_k = tl.dot(ds.to(queries.dtype), queries, acc_k, input_precision=PRECISION)
    for t in range(GROUP * middle):
        h, at = t // wholes, t % wholes
        r = (before + at) * ROWS
        queries = _take(q, first + r, g * GROUP + h, i, cols, i, q_row, q_head, False, TMA, D, WIDE)
        do = _take(dout, first + r, g * GROUP + h, i, cols, i, dout_row, dout_head, False, TMA, D, WIDE)
        sums = _line(about, g * GROUP + h, first + r, i, i >= 0, pitch, 0.0, TMA, ROWS)
        own_delta = _line(about, (G + g) * GROUP + h, first + r, i, i >= 0, pitch, 0.0, TMA, ROWS)
        scores = tl.dot(own_k, tl.trans(queries), input_precision=PRECISION)
        p = tl.exp2(scores * scale - sums[None, :])
        acc_v = tl.dot(p.to(do.dtype), do, acc_v, input_precision=PRECISION)
        dp = tl.dot(own_v, tl.trans(do), input_precision=PRECISION)
        ds = p * (dp - own_delta[None, :])
        acc_k = tl.dot(ds.to(queries.dtype), queries, acc_k, input_precision=PRECISION)

    acc_k *= scale * _LN2
    at = n0.to(tl.int64) * dk_row + g * dk_head + (j * dk_row)[:, None] + cols[None, :]
    mask = there[:, None] & (cols < D)[None, :]
    tl.store(dk + at, acc_k.to(dk.dtype.element_ty), mask=mask)
    tl.store(dv + at, acc_v.to(dv.dtype.element_ty), mask=mask)


@triton.jit
def _shares(a, b):
    """Each side's share of the whole, 0 and 0 if neither saw anything, and the whole's lse."""
    best = tl.maximum(a, b)
    best = tl.where(best == float("-inf"), 0.0, best)
    share_a, share_b = tl.exp(a - best), tl.exp(b - best)
    total = share_a + share_b
    some = total > 0.0
    over = tl.where(some, total, 1.0)
    return share_a / over, share_b / over, tl.where(some, best + tl.log(over), float("-inf"))


@triton.jit(do_not_specialize=["rows"])
def _merge_kernel(
    out_a,
    lse_a,
    out_b,
    lse_b,
    dout,
    dlse,
    out,
    lse,
    dout_a,
    dlse_a,
    dout_b,
    dlse_b,
    rows,
    a_row,
    a_head,
    b_row,
    b_head,
    lse_a_row,
    lse_a_head,
    lse_b_row,
    lse_b_head,
    dout_row,
    dout_head,
    dlse_row,
    dlse_head,
    BACK: tl.constexpr,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Forward writes out and lse; BACK writes the four gradients. What is written is [R, H, d], and [H, R]."""
    r0, h, heads = (tl.program_id(0) * ROWS).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    i, cols = tl.arange(0, ROWS), tl.arange(0, WIDE)
    r = r0 + i
    there = r < rows
    wide = there[:, None] & (cols < D)[None, :]
    a = _take(out_a, r0, h, i, cols, there, a_row, a_head, True, False, D, WIDE).to(tl.float32)
    b = _take(out_b, r0, h, i, cols, there, b_row, b_head, True, False, D, WIDE).to(tl.float32)
    sum_a = tl.load(lse_a + r * lse_a_row + h * lse_a_head, mask=there, other=0.0)
    sum_b = tl.load(lse_b + r * lse_b_row + h * lse_b_head, mask=there, other=0.0)
    share_a, share_b, whole = _shares(sum_a, sum_b)
    to = (r * heads + h)[:, None] * D + cols[None, :]
    line = h * rows + r
    if BACK:
        d = _take(dout, r0, h, i, cols, there, dout_row, dout_head, True, False, D, WIDE).to(tl.float32)
        dsum = tl.load(dlse + r * dlse_row + h * dlse_head, mask=there, other=0.0)
        shift = share_a * share_b * tl.sum(d * (a - b), 1)
        tl.store(dout_a + to, (d * share_a[:, None]).to(dout_a.dtype.element_ty), mask=wide)
        tl.store(dout_b + to, (d * share_b[:, None]).to(dout_b.dtype.element_ty), mask=wide)
        tl.store(dlse_a + line, share_a * dsum + shift, mask=there)
        tl.store(dlse_b + line, share_b * dsum - shift, mask=there)
    else:
        result = a * share_a[:, None] + b * share_b[:, None]
        tl.store(out + to, result.to(out.dtype.element_ty), mask=wide)
        tl.store(lse + line, whole, mask=there)


@dataclass(frozen=True)
class RangedLaunchConfig:
    rows: int
    tile: int
    warps: int
    stages: int


@dataclass(frozen=True)
class RangedLaunchConfigs:
    forward: RangedLaunchConfig
    dq: RangedLaunchConfig
    dkv: RangedLaunchConfig


# By padded head width, for an H200: 16 bits, then fp32, which is summed exactly and has no tensor cores.
_HALF = {
    64: RangedLaunchConfigs(
        RangedLaunchConfig(128, 64, 8, 3), RangedLaunchConfig(64, 64, 4, 3), RangedLaunchConfig(64, 64, 4, 3)
    ),
    128: RangedLaunchConfigs(
        RangedLaunchConfig(128, 128, 8, 2), RangedLaunchConfig(128, 64, 8, 3), RangedLaunchConfig(64, 128, 8, 2)
    ),
    256: RangedLaunchConfigs(
        RangedLaunchConfig(64, 32, 4, 2), RangedLaunchConfig(64, 32, 4, 2), RangedLaunchConfig(32, 64, 8, 2)
    ),
}
_FULL = {
    64: RangedLaunchConfigs(
        RangedLaunchConfig(32, 32, 4, 2), RangedLaunchConfig(32, 32, 4, 2), RangedLaunchConfig(32, 16, 4, 2)
    ),
    128: RangedLaunchConfigs(
        RangedLaunchConfig(32, 16, 4, 2), RangedLaunchConfig(32, 16, 4, 2), RangedLaunchConfig(16, 16, 4, 2)
    ),
    256: RangedLaunchConfigs(
        RangedLaunchConfig(16, 16, 4, 1), RangedLaunchConfig(16, 16, 4, 1), RangedLaunchConfig(16, 16, 4, 1)
    ),
}


def choose_ranged_launch(width: int, dtype: torch.dtype) -> RangedLaunchConfigs:
    return (_FULL if dtype == torch.float32 else _HALF)[max(64, triton.next_power_of_2(width))]


def _precision(dtype: torch.dtype) -> str:
    return "ieee" if dtype == torch.float32 else "tf32"


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _by_tma(*tensors: Tensor) -> bool:
    """Whether the hardware that copies whole tiles can: heads side by side, and everything on 16 bytes."""
    width = tensors[0].shape[-1]
    return (
        width >= 16
        and width & (width - 1) == 0
        and all(x.stride(1) == width for x in tensors)
        and all(x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0 for x in tensors)
    )


def _tiles(x: Tensor, rows: int, tma: bool) -> Tensor | TensorDescriptor:
    """What a kernel reads tiles of so many rows from."""
    if not tma:
        return x
    count, heads, width = x.shape
    return TensorDescriptor(x, [count, heads * width], [x.stride(0), 1], [rows, width])


def _lines(x: Tensor, rows: int, tile: int, tma: bool) -> Tensor | TensorDescriptor:
    """The same for [heads, rows] with one number each; `x` is padded to `pad_row_count` rows."""
    return TensorDescriptor(x, [len(x), rows], [x.stride(0), 1], [1, tile]) if tma else x


def forward_triton(
    q_RHd: Tensor,
    k_SGd: Tensor,
    v_SGd: Tensor,
    ranges: KeyRanges,
    scale: float,
    launch: RangedLaunchConfig | None = None,
    tma: bool | None = None,
) -> tuple[Tensor, Tensor]:
    assert scale > 0, scale
    q, k, v = _dense(q_RHd), _dense(k_SGd), _dense(v_SGd)
    rows, heads, width = q.shape
    if not rows or not len(k):
        return q.new_zeros(q.shape), q.new_full((rows, heads), float("-inf"), dtype=torch.float32)
    launch = choose_ranged_launch(width, q.dtype).forward if launch is None else launch
    out_RHd = q.new_empty(q.shape)
    lse_HR = q.new_empty(heads, rows, dtype=torch.float32)
    tma = _by_tma(q, k, v) if tma is None else tma
    _forward_kernel[triton.cdiv(rows, launch.rows), heads](
        _tiles(q, launch.rows, tma),
        _tiles(k, launch.tile, tma),
        _tiles(v, launch.tile, tma),
        ranges.lo_R,
        ranges.hi_R,
        out_RHd,
        lse_HR,
        rows,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        *out_RHd.stride()[:2],
        scale * math.log2(math.e),
        GROUP=heads // k.shape[1],
        D=width,
        WIDE=max(16, triton.next_power_of_2(width)),
        ROWS=launch.rows,
        TILE=launch.tile,
        PRECISION=_precision(q.dtype),
        TMA=tma,
        num_warps=launch.warps,
        num_stages=launch.stages,
    )
    return out_RHd, lse_HR.T


def backward_triton(
    q_RHd: Tensor,
    k_SGd: Tensor,
    v_SGd: Tensor,
    out_RHd: Tensor,
    lse_RH: Tensor,
    ranges: KeyRanges,
    scale: float,
    dout_RHd: Tensor,
    dlse_RH: Tensor | None,
    launches: RangedLaunchConfigs | None = None,
    tma: bool | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, dout = _dense(q_RHd), _dense(k_SGd), _dense(v_SGd), _dense(dout_RHd)
    (rows, heads, width), (keys, kv_heads, _) = q.shape, k.shape
    if not rows or not keys:
        return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    launches = launches or choose_ranged_launch(width, q.dtype)
    by_dq, by_dkv = launches.dq, launches.dkv
    wide = max(16, triton.next_power_of_2(width))
    tma = _by_tma(q, k, v, dout) if tma is None else tma
    dq, dk, dv = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    pitch = pad_row_count(rows)
    about = q.new_empty(2 * heads, pitch, dtype=torch.float32)
    dlse = lse_RH if dlse_RH is None else dlse_RH
    _delta_kernel[triton.cdiv(rows, 64), heads](
        out_RHd,
        dout,
        lse_RH,
        dlse,
        about,
        rows,
        pitch,
        *out_RHd.stride()[:2],
        *dout.stride()[:2],
        *lse_RH.stride(),
        *dlse.stride(),
        HAS_DLSE=dlse_RH is not None,
        D=width,
        WIDE=wide,
        ROWS=64,
    )
    strides = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *dout.stride()[:2])
    shape = {"GROUP": heads // kv_heads, "D": width, "WIDE": wide, "PRECISION": _precision(q.dtype), "TMA": tma}
    scale2 = scale * math.log2(math.e)
    _dkv_kernel[triton.cdiv(keys, by_dkv.tile), kv_heads](
        _tiles(q, by_dkv.rows, tma),
        _tiles(k, by_dkv.tile, tma),
        _tiles(v, by_dkv.tile, tma),
        _tiles(dout, by_dkv.rows, tma),
        _lines(ranges.bounds, rows, by_dkv.rows, tma),
        ranges.get_row_spans(keys, by_dkv.tile),
        _lines(about, rows, by_dkv.rows, tma),
        dk,
        dv,
        keys,
        pitch,
        *strides,
        *dk.stride()[:2],
        scale2,
        ROWS=by_dkv.rows,
        TILE=by_dkv.tile,
        num_warps=by_dkv.warps,
        num_stages=by_dkv.stages,
        **shape,
    )
    _dq_kernel[triton.cdiv(rows, by_dq.rows), heads](
        _tiles(q, by_dq.rows, tma),
        _tiles(k, by_dq.tile, tma),
        _tiles(v, by_dq.tile, tma),
        _tiles(dout, by_dq.rows, tma),
        ranges.lo_R,
        ranges.hi_R,
        about,
        dq,
        rows,
        pitch,
        *strides,
        *dq.stride()[:2],
        scale2,
        ROWS=by_dq.rows,
        TILE=by_dq.tile,
        num_warps=by_dq.warps,
        num_stages=by_dq.stages,
        **shape,
    )
    return dq, dk, dv


def _merge_strides(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[int, ...]:
    return (*out_a.stride()[:2], *out_b.stride()[:2], *lse_a.stride(), *lse_b.stride())


def merge_forward_triton(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    out_a, out_b = _dense(out_a), _dense(out_b)
    rows, heads, width = out_a.shape
    out_RHd, lse_HR = out_a.new_empty(out_a.shape), lse_a.new_empty(heads, rows)
    _merge_kernel[triton.cdiv(rows, 64), heads](
        *(out_a, lse_a, out_b, lse_b),
        *(None, None),
        *(out_RHd, lse_HR),
        *(None, None, None, None),
        rows,
        *_merge_strides(out_a, lse_a, out_b, lse_b),
        *(0, 0, 0, 0),
        BACK=False,
        D=width,
        WIDE=max(16, triton.next_power_of_2(width)),
        ROWS=64,
    )
    return out_RHd, lse_HR.T


def merge_backward_triton(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, dout: Tensor, dlse: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out_a, out_b, dout = _dense(out_a), _dense(out_b), _dense(dout)
    rows, heads, width = out_a.shape
    dout_a, dout_b = out_a.new_empty(out_a.shape), out_b.new_empty(out_b.shape)
    dlse_a, dlse_b = lse_a.new_empty(heads, rows), lse_b.new_empty(heads, rows)
    _merge_kernel[triton.cdiv(rows, 64), heads](
        *(out_a, lse_a, out_b, lse_b),
        *(dout, dlse),
        *(None, None),
        *(dout_a, dlse_a, dout_b, dlse_b),
        rows,
        *_merge_strides(out_a, lse_a, out_b, lse_b),
        *dout.stride()[:2],
        *dlse.stride(),
        BACK=True,
        D=width,
        WIDE=max(16, triton.next_power_of_2(width)),
        ROWS=64,
    )
    return dout_a, dlse_a.T, dout_b, dlse_b.T
