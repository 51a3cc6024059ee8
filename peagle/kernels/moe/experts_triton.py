# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, check-untyped-defs=False
"""Triton kernels of routing, of sorting pairs of row and expert, and of plain (not MXFP4) experts.

`_route_kernel`: a program has one row. `_sum_kernel`: a program has one row's pairs and a block of columns.

`_experts_kernel`: a program has a block of one expert's output columns. Few rows are not sorted: a program has all of
them and scans their choices for its expert; if it finds none, it returns. So every chosen expert is read once, and no
other. More rows are sorted by expert, and a program has a tile of one expert's pairs; an expert is read once per tile,
from the second tile on out of the cache.

Nothing is read back to the host: a program finds its expert and pairs from the experts' end positions (`find_tile`),
the grid has as many programs as there can be tiles, and those left over return.

A row's bits do not depend on the other rows. Weights are the left operand and rows the right one, as in gemm/linear.py:
tiles may differ as long as Hopper's wgmma takes 64 weight rows, by four warps, and 16 columns at a time.

With TRITON_INTERPRET=1 set before the import, the launchers take CPU tensors. Shapes as in experts.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.moe.experts_torch import ExpertWeights
from peagle.kernels.moe.mxfp4 import COLUMN_STEP
from peagle.kernels.triton_utils import pdl_launch_options

MAX_SCAN_ROWS = 16  # one tile holds all rows, so rows that did not choose an expert cost nothing
# (most pairs per expert on average, pairs per tile). Tiles have about twice the average, so that most experts have one
# tile and are read once; with more pairs, further tiles read the weights from the cache.
PAIRS_PER_TILE = ((8, 16), (16, 32), (48, 64))
MAX_TILE_PAIRS = 128
# Rows and columns of a weight tile, warps, stages; of sorted rows by pairs per tile and whether it is the second GEMM.
# The fastest on an H200 for Qwen3-Coder-30B-A3B's layer.
SCAN_TILE = (64, 64, 4, 4)
TILES = {
    (16, False): (64, 128, 4, 3),
    (16, True): (128, 64, 4, 3),
    (32, False): (64, 64, 4, 3),
    (32, True): (64, 64, 4, 4),
    (64, False): (64, 64, 4, 3),
    (64, True): (128, 64, 4, 4),
    (128, False): (128, 64, 8, 4),
    (128, True): (128, 64, 4, 3),
}
# With four stages and odd widths Triton 3.6 computed wrong addresses in fp32: it used the upper half of a 32-bit
# product for a 64-bit one.
FP32_TILE = (32, 32, 4, 3)

MAX_SORT_PROGRAMS = 1024
SCAN = 1024  # pairs, or columns of x, that a program of the sort looks at per iteration by default
# Pairs per iteration of the sort, and its warps: for up to MAX_FEW_PAIRS pairs, and for more.
MAX_FEW_PAIRS = 1024
SORT_SCANS = ((1024, 4), (4096, 8))


@triton.jit
def _route_kernel(
    logits, weights, experts, row_step, E, CHOSEN: tl.constexpr, BLOCK: tl.constexpr, NORMED: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK)
    c = tl.arange(0, BLOCK)
    scores = tl.load(logits + row * row_step + e, mask=e < E, other=float("-inf")).to(tl.float32)
    shares = tl.exp(scores - tl.max(scores, 0))
    total = tl.sum(shares, 0)
    shares = tl.where(e < E, shares, -1.0)
    best = tl.zeros((BLOCK,), tl.float32)
    which = tl.zeros((BLOCK,), tl.int32)
    for i in tl.static_range(CHOSEN):
        top = tl.max(shares, 0)
        at = tl.min(tl.where(shares == top, e, BLOCK), 0)  # the first of equal scores
        best = tl.where(c == i, top, best)
        which = tl.where(c == i, at, which)
        shares = tl.where(e == at, -2.0, shares)
    if NORMED:
        total = tl.sum(best, 0)
    tl.store(weights + row * CHOSEN + c, best / total, mask=c < CHOSEN)
    tl.store(experts + row * CHOSEN + c, which, mask=c < CHOSEN)


@triton.jit
def permuted_column(k):
    """Returns where column k goes in the order of MXFP4 MMAs (mxfp4_few_rows_triton.py); it is its own inverse.

    Within 128 columns, the bits of the block and those of the register pair are swapped.
    """
    return (k & -103) | ((k & 6) << 4) | ((k & 96) >> 4)


@triton.jit(do_not_specialize=["P", "T"])
def _sort_kernel(chosen, order, ends, x, out, P, E, T, K, x_row, out_row, SCAN: tl.constexpr, WIDTH: tl.constexpr):
    """Stably sorts the pairs by expert, writes where each expert's pairs end, and permutes and zero-pads x."""
    e = tl.program_id(0)
    i = tl.arange(0, SCAN)
    if e < E:
        lower = tl.zeros((SCAN,), tl.int32)
        for start in range(0, P, SCAN):
            expert = tl.load(chosen + start + i, mask=start + i < P, other=2147483647)
            lower += (expert < e).to(tl.int32)
        at = tl.sum(lower, 0)
        for start in range(0, P, SCAN):
            mine = tl.load(chosen + start + i, mask=start + i < P, other=-1) == e
            rank = tl.cumsum(mine.to(tl.int32), 0)
            tl.store(order + at + rank - 1, start + i, mask=mine)
            at += tl.sum(mine.to(tl.int32), 0)
        tl.store(ends + e, at)
    if x is not None:
        k = tl.arange(0, WIDTH)
        for row in range(e, T, tl.num_programs(0)):
            long = e.to(tl.int64) * 0 + row
            from_row, to_row = x + long * x_row, out + long * out_row
            for start in range(0, out_row, WIDTH):
                rows_x = tl.load(from_row + start + k, mask=start + k < K, other=0.0)
                tl.store(to_row + permuted_column(start + k), rows_x, mask=start + k < out_row)


@triton.jit
def find_tile(ends, tile, E, BLOCK_M: tl.constexpr, EXPERTS: tl.constexpr):
    """Returns a tile's expert, or E if the tile is left over, and where its pairs begin and the expert's pairs end."""
    e = tl.arange(0, EXPERTS)
    end = tl.load(ends + e, mask=e < E, other=0)
    begin = tl.load(ends + e - 1, mask=(e > 0) & (e < E), other=0)
    tiles = tl.where(e < E, (end - begin + BLOCK_M - 1) // BLOCK_M, 0)
    after = tl.cumsum(tiles, 0)
    own = tl.sum(((after <= tile) & (e < E)).to(tl.int32), 0)
    first = tl.sum(tl.where(e == own, begin + (tile - after + tiles) * BLOCK_M, 0), 0)
    return own, first, tl.sum(tl.where(e == own, end, 0), 0)


@triton.jit
def apply_gate_tile(gate, up, alpha, limit):
    if limit is not None:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        return (up + 1.0) * gate / (1.0 + tl.exp(-gate * alpha))
    else:
        return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def finish_tile(acc, up, bias, weights, e, n, pair, hit, N, alpha, limit, PAIRED: tl.constexpr):
    """Adds the bias to a tile's sums, then applies the gate of the first GEMM or, if PAIRED, weights the second's."""
    if bias is not None:
        b_at = bias + e * N * (1 if PAIRED else 2) + n
        acc += tl.load(b_at, mask=n < N, other=0.0).to(tl.float32)[:, None]
        if not PAIRED:
            up += tl.load(b_at + N, mask=n < N, other=0.0).to(tl.float32)[:, None]
    if PAIRED:
        return acc * tl.load(weights + pair, mask=hit, other=0.0)[None, :]
    else:
        return apply_gate_tile(acc, up, alpha, limit)


@triton.jit(do_not_specialize=["T"])  # compiled once for all row counts
def _experts_kernel(
    x,
    w,
    bias,
    chosen,
    order,
    ends,
    weights,
    y,
    T,
    E,
    N,
    K,
    x_row,
    alpha,
    limit,
    CHOSEN: tl.constexpr,
    EXPERTS: tl.constexpr,
    PAIRED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Computes a block of an expert's output columns for the pairs that are `hit`; rows are sorted unless ends is None.

    PAIRED: the second GEMM, where rows of x are pairs and the result is weighted. EXPERTS: E as a power of 2.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    m = tl.arange(0, BLOCK_M)
    if ends is None:
        e = tl.program_id(1)
        CHOICES: tl.constexpr = triton.next_power_of_2(CHOSEN)
        c = tl.arange(0, CHOICES)
        known = (m < T)[:, None] & (c < CHOSEN)[None, :]
        mine = tl.load(chosen + m[:, None] * CHOSEN + c[None, :], mask=known, other=-1) == e
        hit = tl.max(mine.to(tl.int32), 1) > 0
        has_pairs = tl.max(hit.to(tl.int32), 0) > 0
        pair = m.to(tl.int64) * CHOSEN + tl.sum(tl.where(mine, c[None, :], 0), 1)
        source = pair if PAIRED else m.to(tl.int64)
    else:
        e, first, end = find_tile(ends, tl.program_id(1), E, BLOCK_M, EXPERTS)
        hit = first + m < end
        has_pairs = e < E
        pair = tl.load(order + first + m, mask=hit, other=0)
        source = (pair if PAIRED else pair // CHOSEN).to(tl.int64)
        pair = pair.to(tl.int64)
    if has_pairs:
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        # Programs past the last weight row read it again, without a mask in the loop, and do not store the result.
        rows = e.to(tl.int64) * N * (1 if PAIRED else 2) + tl.minimum(n, N - 1)
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        k = tl.arange(0, BLOCK_K)
        w_at = w + rows[:, None] * K + k[None, :]
        x_at = x + source[None, :] * x_row + k[:, None]
        up_step = (e * 0 + N).to(tl.int64) * K  # Triton passes N = 1 as an untyped constant
        for start in range(0, K, BLOCK_K):
            if EVEN_K:
                rows_x = tl.load(x_at + start, mask=hit[None, :], other=0.0)
                rows_w = tl.load(w_at + start)
            else:
                inside = start + k < K
                rows_x = tl.load(x_at + start, mask=hit[None, :] & inside[:, None], other=0.0)
                rows_w = tl.load(w_at + start, mask=inside[None, :], other=0.0)
            acc = tl.dot(rows_w, rows_x, acc, input_precision="ieee")
            if not PAIRED:
                if EVEN_K:
                    rows_w = tl.load(w_at + start + up_step)
                else:
                    rows_w = tl.load(w_at + start + up_step, mask=(start + k < K)[None, :], other=0.0)
                up = tl.dot(rows_w, rows_x, up, input_precision="ieee")
        acc = finish_tile(acc, up, bias, weights, e, n, pair, hit, N, alpha, limit, PAIRED)
        to = y + pair[None, :] * N + n[:, None]
        tl.store(to, acc.to(y.dtype.element_ty), mask=hit[None, :] & (n < N)[:, None])


@triton.jit
def _sum_kernel(y, out, N, CHOSEN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    at = y + row * CHOSEN * N + n
    total = tl.zeros((BLOCK,), tl.float32)
    for c in tl.static_range(CHOSEN):
        total += tl.load(at + c * N, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out + row * N + n, total.to(out.dtype.element_ty), mask=n < N)


def route_triton(logits_TE: Tensor, chosen: int, normed: bool) -> tuple[Tensor, Tensor]:
    rows, experts = logits_TE.shape
    assert logits_TE.stride(1) == 1 and chosen <= experts
    weight_TC = logits_TE.new_empty(rows, chosen, dtype=torch.float32)
    expert_TC = logits_TE.new_empty(rows, chosen, dtype=torch.int32)
    if rows:
        block = triton.next_power_of_2(experts)
        args = (logits_TE, weight_TC, expert_TC, logits_TE.stride(0), experts)
        _route_kernel[(rows,)](*args, CHOSEN=chosen, BLOCK=block, NORMED=normed, num_warps=max(1, min(4, block // 64)))
    return weight_TC, expert_TC


def sort_pairs(
    expert_TC: Tensor, count: int, x_TD: Tensor | None = None, scan: int = SCAN, warps: int = 4
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns the pairs sorted by expert [P], where each expert's pairs end [E], and x permuted and padded."""
    order_P, ends_E = expert_TC.new_empty(expert_TC.numel()), expert_TC.new_empty(count)
    programs, permuted_TK, width = count, None, 0
    if x_TD is not None:
        width = x_TD.shape[1]
        permuted_TK = x_TD.new_empty(len(x_TD), triton.cdiv(width, COLUMN_STEP) * COLUMN_STEP)
        programs = max(count, min(len(x_TD), MAX_SORT_PROGRAMS))
    _sort_kernel[(programs,)](
        expert_TC,
        order_P,
        ends_E,
        x_TD,
        permuted_TK,
        expert_TC.numel(),
        count,
        len(expert_TC),
        width,
        0 if x_TD is None else x_TD.stride(0),
        0 if permuted_TK is None else permuted_TK.shape[1],
        SCAN=scan,
        WIDTH=SCAN,
        num_warps=warps,
    )
    return order_P, ends_E, permuted_TK


def sum_experts_triton(y_PD: Tensor, chosen: int) -> Tensor:
    """Adds up each row's pairs, which are weighted already, in fp32 and in the order of its choices."""
    if chosen == 1:
        return y_PD
    (pairs, width), block = y_PD.shape, 1024
    y_TD = y_PD.new_empty(pairs // chosen, width)
    grid, options = (pairs // chosen, triton.cdiv(width, block)), pdl_launch_options(y_PD.device)
    _sum_kernel[grid](y_PD, y_TD, width, CHOSEN=chosen, BLOCK=block, num_warps=4, **options)
    return y_TD


def clamp_arguments(experts: ExpertWeights) -> tuple[float, float] | tuple[None, None]:
    """Returns alpha and limit of the clamped gate; None without one."""
    return (None, None) if experts.clamp is None else (experts.clamp.alpha, experts.clamp.limit)


def max_tiles(pairs: int, count: int, block_m: int) -> int:
    """Returns how many tiles of sorted pairs there can be."""
    return min(pairs, (pairs + count * (block_m - 1)) // block_m)


def expert_mlp_triton(
    x_TD: Tensor, weight_TC: Tensor, expert_TC: Tensor, experts: ExpertWeights, sort: bool = False
) -> Tensor:
    """Computes `expert_mlp` (experts.py) of plain weights; `sort` sorts even up to MAX_SCAN_ROWS rows."""
    (rows, chosen), (count, width, inner) = expert_TC.shape, experts.down_EDI.shape
    assert x_TD.stride(1) == 1 and weight_TC.is_contiguous() and expert_TC.is_contiguous()
    if not rows:
        return torch.empty_like(x_TD)
    block_m, order_P, ends_E = MAX_SCAN_ROWS, None, None
    if sort or rows > MAX_SCAN_ROWS:
        scan, sort_warps = SORT_SCANS[rows * chosen > MAX_FEW_PAIRS]
        order_P, ends_E, _ = sort_pairs(expert_TC, count, scan=scan, warps=sort_warps)
        block_m = pairs_per_tile(rows * chosen, count)
    hidden_PI = x_TD.new_empty(rows * chosen, inner)
    y_PD = x_TD.new_empty(rows * chosen, width)
    for paired, x, w, bias, y in (
        (False, x_TD, experts.gate_up_EXD, experts.gate_up_bias_EX, hidden_PI),
        (True, hidden_PI, experts.down_EDI, experts.down_bias_ED, y_PD),
    ):
        assert isinstance(w, Tensor) and w.is_contiguous() and (bias is None or bias.is_contiguous())
        assert w.dtype == x.dtype
        columns, depth = y.shape[1], x.shape[1]
        block_n, block_k, warps, stages = SCAN_TILE if ends_E is None else TILES[block_m, paired]
        if x.dtype == torch.float32:
            block_n, block_k, warps, stages = FP32_TILE
        # An expert's tiles are `blocks` programs apart, so they run together. Programs left over are the last ones.
        blocks = triton.cdiv(columns, block_n)
        _experts_kernel[(blocks, count if ends_E is None else max_tiles(rows * chosen, count, block_m))](
            x,
            w,
            bias,
            expert_TC,
            order_P,
            ends_E,
            weight_TC,
            y,
            rows,
            count,
            columns,
            depth,
            x.stride(0),
            *clamp_arguments(experts),
            CHOSEN=chosen,
            EXPERTS=triton.next_power_of_2(count),
            PAIRED=paired,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            EVEN_K=depth % block_k == 0,
            num_warps=warps,
            num_stages=stages,
            **pdl_launch_options(x.device),
        )
    return sum_experts_triton(y_PD, chosen)


def pairs_per_tile(pairs: int, count: int) -> int:
    return next((tile for average, tile in PAIRS_PER_TILE if pairs <= average * count), MAX_TILE_PAIRS)
