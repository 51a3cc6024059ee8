# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, check-untyped-defs=False
"""Sorts pairs of row and expert by expert, in Triton, so that each expert's pairs form tiles.

Nothing is read back to the host: a program finds its expert and pairs from the experts' end positions (`find_tile`),
the grid has as many programs as there can be tiles, and those left over return. Shapes as in experts.py.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.moe.mxfp4 import COLUMN_STEP

MAX_SORT_PROGRAMS = 1024
SCAN = 1024  # pairs, or columns of x, that a program looks at per iteration by default


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
