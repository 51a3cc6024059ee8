# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, check-untyped-defs=False
"""Ranged attention in Triton: flash attention, forward and backward without atomics; and the merge of two states.

Key ranges never decrease, so a tile of rows sees three runs of keys: leading keys that only its first rows see, keys
that all its rows see, and trailing keys that only its last rows see. The same holds for a tile of keys and the rows
that see it (`KeyRanges.get_row_spans`). Every kernel processes the outer runs in one loop with masks and the full run
in another without. Tiles start where the first run does, not at multiples of their size.

`_forward_kernel`, `_dq_kernel`: a program handles a tile of rows of one query head.
`_dkv_kernel`: a program handles a tile of keys of one key/value head, for all query heads that share it.
`_row_stats_kernel`: computes what both backward kernels need of a row: lse in base 2 and sum(out * dout) - dlse.

lse is stored [H, R], so that a tile is contiguous, and returned as a transposed view. Row base addresses have 64 bits,
offsets within a tile 32.

Shapes: R rows, S keys, H query heads, G key/value heads, d head width; WIDTH is d padded to a power of two.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from peagle.kernels.attention.types import AttentionLaunch, KeyRanges, pad_row_count

_LN2 = tl.constexpr(math.log(2.0))


@triton.jit
def load_rows(
    x, row, head, i, cols, valid, row_stride, head_stride,
    MASKED: tl.constexpr, TMA: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Loads [len(i), WIDTH] of one head from row `row` on; 0 beyond the width D and (if MASKED) where not `valid`.

    TMA: x is a descriptor of [rows, heads * D] with blocks of this many rows; it loads 0 beyond the last row.
    """
    if TMA:
        return x.load([row, head * D])
    else:
        to = x + row.to(tl.int64) * row_stride + head * head_stride + (i * row_stride)[:, None] + cols[None, :]
        if MASKED and D != WIDTH:
            return tl.load(to, mask=valid[:, None] & (cols < D)[None, :], other=0.0)
        elif MASKED:
            return tl.load(to, mask=valid[:, None], other=0.0)
        elif D != WIDTH:
            return tl.load(to, mask=(cols < D)[None, :], other=0.0)
        else:
            return tl.load(to)


@triton.jit
def _load_row_values(x, head, row, i, valid, pitch, other, TMA: tl.constexpr, ROWS: tl.constexpr):
    """Loads [ROWS] values of line `head` of x [heads, pitch]. TMA avoids that each thread loads a short line itself."""
    if TMA:
        return tl.reshape(x.load([head, row]), (ROWS,))
    else:
        return tl.load(x + head * pitch + row + i, mask=valid, other=other)


@triton.jit
def _count_tiles(first, full_first, full_end, end, TILE: tl.constexpr):
    """Cuts [first, end) into tiles: the number before those within [full_first, full_end), of those, and after."""
    leading = tl.cdiv(tl.maximum(tl.minimum(full_first, end) - first, 0), TILE)
    full = tl.maximum(full_end - (first + leading * TILE), 0) // TILE
    trailing = tl.cdiv(tl.maximum(end - (first + (leading + full) * TILE), 0), TILE)
    return leading, full, trailing


@triton.jit
def _find_key_tiles(lo, hi, r0, rows, ROWS: tl.constexpr, TILE: tl.constexpr):
    """Returns the first key and the end of the keys that a tile of rows sees, and the tile counts of `_count_tiles`."""
    last = tl.minimum(r0 + ROWS, rows) - 1
    first, end = tl.load(lo + r0), tl.load(hi + last)
    leading, full, trailing = _count_tiles(first, tl.load(lo + last), tl.load(hi + r0), end, TILE)
    return first, end, leading, full, trailing


@triton.jit(do_not_specialize=["rows"])
def _forward_kernel(
    q, k, v, lo, hi, out, lse,
    rows,
    q_row_stride, q_head_stride, k_row_stride, k_head_stride, v_row_stride, v_head_stride,
    out_row_stride, out_head_stride,
    scale,
    GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Computes out and lse of a tile of rows; `scale` is in base 2."""
    # The last rows see the most keys: they start first, so that short programs fill the end.
    r0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    h = tl.program_id(1)
    g = h // GROUP
    i, j, cols = tl.arange(0, ROWS), tl.arange(0, TILE), tl.arange(0, WIDTH)
    valid = r0 + i < rows
    queries = load_rows(q, r0, h, i, cols, valid, q_row_stride, q_head_stride, True, TMA, D, WIDTH)
    first, end, leading, full, trailing = _find_key_tiles(lo, hi, r0, rows, ROWS, TILE)
    running_max = tl.zeros((ROWS,), tl.float32) - float("inf")
    running_sum = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, WIDTH), tl.float32)

    row_lo = tl.load(lo + r0 + i, mask=valid, other=0)
    row_hi = tl.load(hi + r0 + i, mask=valid, other=0)
    for MASKED in tl.static_range(1, -1, -1):
        for t in range(0 if MASKED else leading, leading + (trailing if MASKED else full)):
            n = (tl.where(t < leading, t, t + full) if MASKED else t) * TILE
            pos = first + n + j
            keys = load_rows(k, first + n, g, j, cols, pos < end, k_row_stride, k_head_stride, MASKED, TMA, D, WIDTH)
            scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
            if MASKED:
                visible = (pos[None, :] >= row_lo[:, None]) & (pos[None, :] < row_hi[:, None])
                scores = tl.where(visible, scores * scale, float("-inf"))
                new = tl.maximum(running_max, tl.max(scores, 1))
                reference = tl.where(new == float("-inf"), 0.0, new)
                p = tl.exp2(scores - reference[:, None])
            else:
                new = tl.maximum(running_max, tl.max(scores, 1) * scale)
                reference = new
                p = tl.exp2(scores * scale - new[:, None])
            rescale = tl.exp2(running_max - reference)
            running_sum = running_sum * rescale + tl.sum(p, 1)
            acc = acc * rescale[:, None]
            values = load_rows(v, first + n, g, j, cols, pos < end, v_row_stride, v_head_stride, MASKED, TMA, D, WIDTH)
            acc = tl.dot(p.to(values.dtype), values, acc, input_precision=PRECISION)
            running_max = new

    nonempty = running_sum > 0.0
    result = acc / tl.where(nonempty, running_sum, 1.0)[:, None]
    to = out + r0.to(tl.int64) * out_row_stride + h * out_head_stride + (i * out_row_stride)[:, None] + cols[None, :]
    tl.store(to, result.to(out.dtype.element_ty), mask=valid[:, None] & (cols < D)[None, :])
    lse2 = tl.where(nonempty, (running_max + tl.log2(tl.where(nonempty, running_sum, 1.0))) * _LN2, float("-inf"))
    tl.store(lse + h * rows + r0 + i, lse2, mask=valid)


@triton.jit(do_not_specialize=["rows", "pitch"])
def _row_stats_kernel(
    out, dout, lse, dlse, row_stats,
    rows, pitch,
    out_row_stride, out_head_stride, dout_row_stride, dout_head_stride,
    lse_row_stride, lse_head_stride, dlse_row_stride, dlse_head_stride,
    HAS_DLSE: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Writes lse in base 2 to row h of `row_stats`, and sum(out * dout) - dlse to row H + h.

    Rows without keys get lse inf, so that exp2(score - lse) is 0.
    """
    r0, h = (tl.program_id(0) * ROWS).to(tl.int64), tl.program_id(1)
    i, cols = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    valid = r0 + i < rows
    o = load_rows(out, r0, h, i, cols, valid, out_row_stride, out_head_stride, True, False, D, WIDTH).to(tl.float32)
    do = load_rows(dout, r0, h, i, cols, valid, dout_row_stride, dout_head_stride, True, False, D, WIDTH).to(tl.float32)
    result = tl.sum(o * do, 1)
    if HAS_DLSE:
        result -= tl.load(dlse + (r0 + i) * dlse_row_stride + h * dlse_head_stride, mask=valid, other=0.0)
    lse2 = tl.load(lse + (r0 + i) * lse_row_stride + h * lse_head_stride, mask=valid, other=float("-inf"))
    empty = lse2 == float("-inf")
    tl.store(row_stats + h * pitch + r0 + i, tl.where(empty, float("inf"), lse2 / _LN2), mask=valid)
    tl.store(row_stats + (tl.num_programs(1) + h) * pitch + r0 + i, tl.where(empty, 0.0, result), mask=valid)


@triton.jit(do_not_specialize=["rows", "pitch"])
def _dq_kernel(
    q, k, v, dout, lo, hi, row_stats, dq,
    rows, pitch,
    q_row_stride, q_head_stride, k_row_stride, k_head_stride, v_row_stride, v_head_stride,
    dout_row_stride, dout_head_stride, dq_row_stride, dq_head_stride,
    scale,
    GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Computes dq of a tile of rows."""
    r0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    h = tl.program_id(1)
    g = h // GROUP
    i, j, cols = tl.arange(0, ROWS), tl.arange(0, TILE), tl.arange(0, WIDTH)
    valid = r0 + i < rows
    queries = load_rows(q, r0, h, i, cols, valid, q_row_stride, q_head_stride, True, TMA, D, WIDTH)
    do = load_rows(dout, r0, h, i, cols, valid, dout_row_stride, dout_head_stride, True, TMA, D, WIDTH)
    lse2 = tl.load(row_stats + h * pitch + r0 + i, mask=valid, other=float("inf"))
    delta = tl.load(row_stats + (tl.num_programs(1) + h) * pitch + r0 + i, mask=valid, other=0.0)
    first, end, leading, full, trailing = _find_key_tiles(lo, hi, r0, rows, ROWS, TILE)
    acc = tl.zeros((ROWS, WIDTH), tl.float32)

    row_lo = tl.load(lo + r0 + i, mask=valid, other=0)
    row_hi = tl.load(hi + r0 + i, mask=valid, other=0)
    for MASKED in tl.static_range(1, -1, -1):
        for t in range(0 if MASKED else leading, leading + (trailing if MASKED else full)):
            n = (tl.where(t < leading, t, t + full) if MASKED else t) * TILE
            pos = first + n + j
            keys = load_rows(k, first + n, g, j, cols, pos < end, k_row_stride, k_head_stride, MASKED, TMA, D, WIDTH)
            values = load_rows(v, first + n, g, j, cols, pos < end, v_row_stride, v_head_stride, MASKED, TMA, D, WIDTH)
            scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
            dp = tl.dot(do, tl.trans(values), input_precision=PRECISION)
            p = tl.exp2(scores * scale - lse2[:, None])
            if MASKED:
                p = tl.where((pos[None, :] >= row_lo[:, None]) & (pos[None, :] < row_hi[:, None]), p, 0.0)
            ds = p * (dp - delta[:, None])
            acc = tl.dot(ds.to(keys.dtype), keys, acc, input_precision=PRECISION)

    acc *= scale * _LN2
    to = dq + r0.to(tl.int64) * dq_row_stride + h * dq_head_stride + (i * dq_row_stride)[:, None] + cols[None, :]
    tl.store(to, acc.to(dq.dtype.element_ty), mask=valid[:, None] & (cols < D)[None, :])


@triton.jit(do_not_specialize=["keys", "pitch"])
def _dkv_kernel(
    q, k, v, dout, bounds, row_spans, row_stats, dk, dv,
    keys, pitch,
    q_row_stride, q_head_stride, k_row_stride, k_head_stride, v_row_stride, v_head_stride,
    dout_row_stride, dout_head_stride, dk_row_stride, dk_head_stride,
    scale,
    GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Computes dk and dv of a tile of keys.

    Scores are transposed, [keys, rows], so that no operand of the four matrix products needs a transposed copy.
    """
    tile, g = tl.program_id(0), tl.program_id(1)
    tiles, G = tl.num_programs(0), tl.num_programs(1)
    n0 = tile * TILE
    i, j, cols = tl.arange(0, ROWS), tl.arange(0, TILE), tl.arange(0, WIDTH)
    pos = n0 + j
    is_key = pos < keys
    tile_k = load_rows(k, n0, g, j, cols, is_key, k_row_stride, k_head_stride, True, TMA, D, WIDTH)
    tile_v = load_rows(v, n0, g, j, cols, is_key, v_row_stride, v_head_stride, True, TMA, D, WIDTH)
    # Row values are loaded from multiples of 4 rows, as TMA requires.
    first, full_first = tl.load(row_spans + tile) // 4 * 4, tl.load(row_spans + tiles + tile)
    full_end, end = tl.load(row_spans + 2 * tiles + tile), tl.load(row_spans + 3 * tiles + tile)
    leading, full, trailing = _count_tiles(first, full_first, full_end, end, ROWS)
    acc_k = tl.zeros((TILE, WIDTH), tl.float32)
    acc_v = tl.zeros((TILE, WIDTH), tl.float32)

    for MASKED in tl.static_range(1, -1, -1):
        # One loop over heads and tiles, because short ranges would not fill a loop per head. The divisor must not be 0,
        # even if the loop has no iteration: the compiler may hoist the first iteration's division, conclude that the
        # divisor is not 0, hence that there is an iteration, and run it on arbitrary memory.
        tiles_per_head = leading + trailing if MASKED else full
        divisor = tl.maximum(tiles_per_head, 1)
        for t in range(GROUP * tiles_per_head):
            h = g * GROUP + t // divisor
            at = t % divisor
            r = first + (tl.where(at < leading, at, at + full) if MASKED else leading + at) * ROWS
            valid = r + i < end if MASKED else i >= 0
            queries = load_rows(q, r, h, i, cols, valid, q_row_stride, q_head_stride, MASKED, TMA, D, WIDTH)
            do = load_rows(dout, r, h, i, cols, valid, dout_row_stride, dout_head_stride, MASKED, TMA, D, WIDTH)
            lse2 = _load_row_values(row_stats, h, r, i, valid, pitch, 0.0, TMA, ROWS)
            delta = _load_row_values(row_stats, G * GROUP + h, r, i, valid, pitch, 0.0, TMA, ROWS)
            scores = tl.dot(tile_k, tl.trans(queries), input_precision=PRECISION)
            p = tl.exp2(scores * scale - lse2[None, :])
            if MASKED:
                row_lo = _load_row_values(bounds, 0, r, i, valid, pitch, 0, TMA, ROWS)
                row_hi = _load_row_values(bounds, 1, r, i, valid, pitch, 0, TMA, ROWS)
                p = tl.where((pos[:, None] >= row_lo[None, :]) & (pos[:, None] < row_hi[None, :]), p, 0.0)
            acc_v = tl.dot(p.to(do.dtype), do, acc_v, input_precision=PRECISION)
            dp = tl.dot(tile_v, tl.trans(do), input_precision=PRECISION)
            ds = p * (dp - delta[None, :])
            acc_k = tl.dot(ds.to(queries.dtype), queries, acc_k, input_precision=PRECISION)

    acc_k *= scale * _LN2
    at = n0.to(tl.int64) * dk_row_stride + g * dk_head_stride + (j * dk_row_stride)[:, None] + cols[None, :]
    mask = is_key[:, None] & (cols < D)[None, :]
    tl.store(dk + at, acc_k.to(dk.dtype.element_ty), mask=mask)
    tl.store(dv + at, acc_v.to(dv.dtype.element_ty), mask=mask)


# Launches of the forward, dq and dkv kernels by padded head width, for an H200. fp32 uses no tensor cores.
_LAUNCHES_16_BIT = {
    64: ((128, 64, 8, 3), (64, 64, 4, 3), (64, 64, 4, 3)),
    128: ((128, 128, 8, 2), (128, 64, 8, 3), (64, 128, 8, 2)),
    256: ((64, 32, 4, 2), (64, 32, 4, 2), (32, 64, 8, 2)),
}
_LAUNCHES_FP32 = {
    64: ((32, 32, 4, 2), (32, 32, 4, 2), (32, 16, 4, 2)),
    128: ((32, 16, 4, 2), (32, 16, 4, 2), (16, 16, 4, 2)),
    256: ((16, 16, 4, 1), (16, 16, 4, 1), (16, 16, 4, 1)),
}


def choose_ranged_launches(width: int, dtype: torch.dtype) -> list[AttentionLaunch]:
    launches = _LAUNCHES_FP32 if dtype == torch.float32 else _LAUNCHES_16_BIT
    return [AttentionLaunch(*launch) for launch in launches[max(64, triton.next_power_of_2(width))]]


def _launch_options(q: Tensor, k: Tensor, launch: AttentionLaunch, tma: bool) -> dict[str, Any]:
    return {
        "GROUP": q.shape[1] // k.shape[1], "D": q.shape[2], "WIDTH": max(16, triton.next_power_of_2(q.shape[2])),
        "ROWS": launch.rows, "TILE": launch.tile, "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        "TMA": tma, "num_warps": launch.warps, "num_stages": launch.stages,
    }  # fmt: skip


def with_unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _supports_tma(*tensors: Tensor) -> bool:
    """Whether TMA can load these: contiguous heads, and all rows aligned to 16 bytes."""
    width = tensors[0].shape[-1]
    return (
        width >= 16
        and width & (width - 1) == 0
        and all(x.stride(1) == width for x in tensors)
        and all(x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0 for x in tensors)
    )


def _row_tiles(x: Tensor, rows: int, tma: bool) -> Tensor | TensorDescriptor:
    """Returns the tensor, or a TMA descriptor of tiles of `rows` rows."""
    if not tma:
        return x
    count, heads, width = x.shape
    return TensorDescriptor(x, [count, heads * width], [x.stride(0), 1], [rows, width])


def _row_values(x: Tensor, rows: int, tile: int, tma: bool) -> Tensor | TensorDescriptor:
    """As `_row_tiles` for one value per row, [heads, pad_row_count(rows)]."""
    return TensorDescriptor(x, [len(x), rows], [x.stride(0), 1], [1, tile]) if tma else x


def forward_triton(
    q_RHd: Tensor,
    k_SGd: Tensor,
    v_SGd: Tensor,
    ranges: KeyRanges,
    launch: AttentionLaunch | None = None,
    tma: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes out and lse; `launch` and `tma` override the choices."""
    q, k, v = with_unit_stride(q_RHd), with_unit_stride(k_SGd), with_unit_stride(v_SGd)
    rows, heads, width = q.shape
    if not rows or not len(k):
        return q.new_zeros(q.shape), q.new_full((rows, heads), float("-inf"), dtype=torch.float32)
    launch = launch or choose_ranged_launches(width, q.dtype)[0]
    out_RHd = q.new_empty(q.shape)
    lse_HR = q.new_empty(heads, rows, dtype=torch.float32)
    tma = _supports_tma(q, k, v) if tma is None else tma
    _forward_kernel[triton.cdiv(rows, launch.rows), heads](
        _row_tiles(q, launch.rows, tma), _row_tiles(k, launch.tile, tma), _row_tiles(v, launch.tile, tma),
        ranges.lo_R, ranges.hi_R, out_RHd, lse_HR, rows,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *out_RHd.stride()[:2], width**-0.5 * math.log2(math.e),
        **_launch_options(q, k, launch, tma),
    )  # fmt: skip
    return out_RHd, lse_HR.T


def backward_triton(
    saved: tuple[Tensor, ...],
    ranges: KeyRanges,
    dout_RHd: Tensor,
    dlse_RH: Tensor | None,
    launch: AttentionLaunch | None = None,
    tma: bool | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the gradients of q, k and v; `launch` and `tma` override the choices."""
    *qkv, out_RHd, lse_RH = saved
    q, k, v, dout = (with_unit_stride(x) for x in (*qkv, dout_RHd))
    (rows, heads, width), (keys, kv_heads, _) = q.shape, k.shape
    if not rows or not keys:
        return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    _, dq_launch, dkv_launch = [launch] * 3 if launch else choose_ranged_launches(width, q.dtype)
    use_tma = _supports_tma(q, k, v, dout) if tma is None else tma
    dq, dk, dv = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    pitch = pad_row_count(rows)
    row_stats = q.new_empty(2 * heads, pitch, dtype=torch.float32)
    dlse = lse_RH if dlse_RH is None else dlse_RH
    _row_stats_kernel[triton.cdiv(rows, 64), heads](
        out_RHd, dout, lse_RH, dlse, row_stats, rows, pitch,
        *out_RHd.stride()[:2], *dout.stride()[:2], *lse_RH.stride(), *dlse.stride(),
        HAS_DLSE=dlse_RH is not None, D=width, WIDTH=max(16, triton.next_power_of_2(width)), ROWS=64,
    )  # fmt: skip
    strides = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *dout.stride()[:2])
    scale2 = width**-0.5 * math.log2(math.e)

    def tiles(launch: AttentionLaunch) -> tuple[Tensor | TensorDescriptor, ...]:
        sizes = (launch.rows, launch.tile, launch.tile, launch.rows)
        return tuple(_row_tiles(x, size, use_tma) for x, size in zip((q, k, v, dout), sizes, strict=True))

    _dkv_kernel[triton.cdiv(keys, dkv_launch.tile), kv_heads](
        *tiles(dkv_launch), _row_values(ranges.bounds, rows, dkv_launch.rows, use_tma),
        ranges.get_row_spans(keys, dkv_launch.tile), _row_values(row_stats, rows, dkv_launch.rows, use_tma),
        dk, dv, keys, pitch, *strides, *dk.stride()[:2], scale2,
        **_launch_options(q, k, dkv_launch, use_tma),
    )  # fmt: skip
    _dq_kernel[triton.cdiv(rows, dq_launch.rows), heads](
        *tiles(dq_launch), ranges.lo_R, ranges.hi_R, row_stats, dq, rows, pitch, *strides, *dq.stride()[:2], scale2,
        **_launch_options(q, k, dq_launch, use_tma),
    )  # fmt: skip
    return dq, dk, dv


# The merge of two attention states

_MERGE_ROWS = 64  # per program


@triton.jit
def _merge_weights(a, b):
    """Returns each side's weight (0 and 0 if both are empty) and the merged lse."""
    running_max = tl.maximum(a, b)
    running_max = tl.where(running_max == float("-inf"), 0.0, running_max)
    weight_a, weight_b = tl.exp(a - running_max), tl.exp(b - running_max)
    running_sum = weight_a + weight_b
    nonempty = running_sum > 0.0
    over = tl.where(nonempty, running_sum, 1.0)
    return weight_a / over, weight_b / over, tl.where(nonempty, running_max + tl.log(over), float("-inf"))


@triton.jit(do_not_specialize=["rows"])
def _merge_kernel(
    out_a, lse_a, out_b, lse_b, dout, dlse,
    result_a, result_lse_a, result_b, result_lse_b,
    rows,
    a_row_stride, a_head_stride, b_row_stride, b_head_stride,
    lse_a_row_stride, lse_a_head_stride, lse_b_row_stride, lse_b_head_stride,
    dout_row_stride, dout_head_stride, dlse_row_stride, dlse_head_stride,
    BACKWARD: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Writes out [R, H, d] and lse [H, R] to the first results, or with BACKWARD the gradients of both inputs in the
    same layouts."""
    r0, h, heads = (tl.program_id(0) * ROWS).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    i, cols = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    r = r0 + i
    valid = r < rows
    wide = valid[:, None] & (cols < D)[None, :]
    a = load_rows(out_a, r0, h, i, cols, valid, a_row_stride, a_head_stride, True, False, D, WIDTH).to(tl.float32)
    b = load_rows(out_b, r0, h, i, cols, valid, b_row_stride, b_head_stride, True, False, D, WIDTH).to(tl.float32)
    sum_a = tl.load(lse_a + r * lse_a_row_stride + h * lse_a_head_stride, mask=valid, other=0.0)
    sum_b = tl.load(lse_b + r * lse_b_row_stride + h * lse_b_head_stride, mask=valid, other=0.0)
    weight_a, weight_b, merged_lse = _merge_weights(sum_a, sum_b)
    to = (r * heads + h)[:, None] * D + cols[None, :]
    line = h * rows + r
    if BACKWARD:
        d = load_rows(dout, r0, h, i, cols, valid, dout_row_stride, dout_head_stride, True, False, D, WIDTH)
        d = d.to(tl.float32)
        dmerged = tl.load(dlse + r * dlse_row_stride + h * dlse_head_stride, mask=valid, other=0.0)
        shift = weight_a * weight_b * tl.sum(d * (a - b), 1)
        tl.store(result_a + to, (d * weight_a[:, None]).to(result_a.dtype.element_ty), mask=wide)
        tl.store(result_b + to, (d * weight_b[:, None]).to(result_b.dtype.element_ty), mask=wide)
        tl.store(result_lse_a + line, weight_a * dmerged + shift, mask=valid)
        tl.store(result_lse_b + line, weight_b * dmerged - shift, mask=valid)
    else:
        result = a * weight_a[:, None] + b * weight_b[:, None]
        tl.store(result_a + to, result.to(result_a.dtype.element_ty), mask=wide)
        tl.store(result_lse_a + line, merged_lse, mask=valid)


def _launch_merge(
    states: tuple[Tensor, ...], grads: tuple[Tensor | None, Tensor | None], results: list[Tensor | None]
) -> None:
    """Launches the backward pass if there are gradients, otherwise the forward pass."""
    (out_a, lse_a, out_b, lse_b), (dout, dlse) = states, grads
    rows, heads, width = out_a.shape
    grad_strides = (0, 0, 0, 0) if dout is None or dlse is None else (*dout.stride()[:2], *dlse.stride())
    _merge_kernel[triton.cdiv(rows, _MERGE_ROWS), heads](
        *states, *grads, *results, rows,
        *out_a.stride()[:2], *out_b.stride()[:2], *lse_a.stride(), *lse_b.stride(), *grad_strides,
        BACKWARD=dout is not None, D=width, WIDTH=max(16, triton.next_power_of_2(width)), ROWS=_MERGE_ROWS,
    )  # fmt: skip


def merge_forward_triton(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    states = (with_unit_stride(out_a), lse_a, with_unit_stride(out_b), lse_b)
    out_RHd, lse_HR = out_a.new_empty(out_a.shape), lse_a.new_empty(lse_a.T.shape)
    _launch_merge(states, (None, None), [out_RHd, lse_HR, None, None])
    return out_RHd, lse_HR.T


def merge_backward_triton(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, dout: Tensor, dlse: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    states = (with_unit_stride(out_a), lse_a, with_unit_stride(out_b), lse_b)
    dout_a, dlse_a, dout_b, dlse_b = results = [x.new_empty(x.shape) for x in (out_a, lse_a.T, out_b, lse_b.T)]
    _launch_merge(states, (with_unit_stride(dout), dlse), [*results])
    return dout_a, dlse_a.T, dout_b, dlse_b.T
