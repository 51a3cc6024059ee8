# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, check-untyped-defs=False
"""Triton kernels around the experts' GEMMs: routing, sorting pairs of row and expert, the gate, and the final sum.

Nothing is read back to the host: a program of a sorted GEMM finds its expert and pairs from the experts' end positions
(`find_tile`), the grid has as many programs as there can be tiles, and those left over return.

`_route_kernel`: a program has one row. `_sum_kernel`: a program has one row's pairs and a block of columns.

With TRITON_INTERPRET=1 set before the import, the launchers take CPU tensors. Shapes as in experts.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.moe.mxfp4 import COLUMN_STEP
from peagle.kernels.triton_utils import pdl_launch_options, wait_for_previous

MAX_SORT_PROGRAMS = 1024
SCAN = 1024  # pairs, or columns of x, that a program of the sort looks at per iteration by default


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
def gate_tile(gate, up, alpha, limit):
    if limit is not None:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        return (up + 1.0) * gate / (1.0 + tl.exp(-gate * alpha))
    else:
        return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def _sum_kernel(y, out, N, CHOSEN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait_for_previous(PDL)
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
        expert_TC, order_P, ends_E, x_TD, permuted_TK, expert_TC.numel(), count, len(expert_TC), width,
        0 if x_TD is None else x_TD.stride(0), 0 if permuted_TK is None else permuted_TK.shape[1],
        SCAN=scan, WIDTH=SCAN, num_warps=warps,
    )  # fmt: skip
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
