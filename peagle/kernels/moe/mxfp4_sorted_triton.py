# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, check-untyped-defs=False
"""Triton kernels of MXFP4 experts: pairs sorted by expert; few rows in bf16 go to mxfp4_few_rows_triton.py.

`_mxfp4_kernel`: a program has a block of output columns of one expert and a tile of the pairs that chose it. Weights
are the left operand and are unpacked in registers, in the order in which the MMA needs them.

A row's bits depend neither on the other rows nor on their number: both files add 16 columns at a time, the same ones in
the same order. This assumes that mma.sync by one warp and wgmma by four warps give the same sums. NVIDIA does not
guarantee that; on an H200 they were equal to the bit, for one row alone and among 4 to 300.

With TRITON_INTERPRET=1 set before the import, the launchers take CPU tensors. Shapes as in experts.py.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.moe.experts_torch import ExpertWeights
from peagle.kernels.moe.experts_triton import (
    clamp_arguments,
    find_tile,
    finish_tile,
    max_tiles,
    permuted_column,
    sort_pairs,
    sum_experts_triton,
)
from peagle.kernels.moe.mxfp4 import BLOCK, COLUMN_STEP
from peagle.kernels.moe.mxfp4_few_rows_triton import MAX_FEW_ROWS, launch_few_rows
from peagle.kernels.moe.mxfp4_triton import HAVE_PTX, row_start, unpack_tile

# Most rows, pairs per tile, and a limit on registers per thread. With at least 64 weight rows and four warps the MMA is
# wgmma, which takes weights from registers; with fewer they go through shared memory.
TILES = ((64, 16, None), (256, 32, 128), (math.inf, 64, 168))
BLOCK_N, FP32_BLOCK_N = 64, 32  # rows of a weight tile
WARPS, STAGES = 4, 3


@triton.jit
def _load_order(i, BLOCK_N: tl.constexpr):
    """Returns which row of a weight tile is loaded as the i-th.

    Triton deals groups of eight loaded rows to the warps in turn, and the MMA needs two adjacent groups from each warp.
    """
    return i % (BLOCK_N // 2) // 8 * 16 + i // (BLOCK_N // 2) * 8 + i % 8


@triton.jit
def _restore_order(tile):
    """Puts the rows of a tile loaded in `_load_order` back in order, without moving data between threads."""
    N: tl.constexpr = tile.shape[0]
    W: tl.constexpr = tile.shape[1]
    return tl.reshape(tl.permute(tl.reshape(tile, (2, N // 16, 8, W)), (1, 0, 2, 3)), (N, W))


@triton.jit
def _wait_for_mma(sums, ASM: tl.constexpr):
    """Reads an MMA's sums at once. Otherwise Triton overlaps it with the next step, which may unpack its weights into
    registers that the MMA still reads."""
    if ASM:
        sums = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [sums], dtype=tl.float32, is_pure=True, pack=1)
    return sums


@triton.jit
def _mxfp4_kernel(
    x,
    w,
    exponents,
    bias,
    order,
    ends,
    weights,
    y,
    E,
    N,
    G,
    x_row,
    y_row,
    exponents_row,
    alpha,
    limit,
    CHOSEN: tl.constexpr,
    EXPERTS: tl.constexpr,
    PAIRED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ASM: tl.constexpr,
):
    """PAIRED: the second GEMM, where rows of x are pairs of row and expert and the result is weighted.

    The columns of x, and of the first GEMM's y, are permuted and padded to whole steps (`permuted_column`).
    """
    GLU: tl.constexpr = not PAIRED
    BLOCK_K: tl.constexpr = 128
    m = tl.arange(0, BLOCK_M)
    e, first, end = find_tile(ends, tl.program_id(0), E, BLOCK_M, EXPERTS)
    hit = first + m < end
    block = tl.program_id(1)
    if e < E:
        pair = tl.load(order + first + m, mask=hit, other=0).to(tl.int64)
        source = pair if PAIRED else pair // CHOSEN
        n = block * BLOCK_N + tl.arange(0, BLOCK_N)
        HALVES: tl.constexpr = 2 if GLU else 1
        # Programs past the last weight row read it again, without a mask in the loop, and do not store the result.
        read = block * BLOCK_N + _load_order(tl.arange(0, BLOCK_N), BLOCK_N)
        rows = e.to(tl.int64) * N * HALVES + tl.minimum(read, N - 1)
        k = tl.arange(0, BLOCK_K)
        two = tl.arange(0, BLOCK_K // 8)  # words are loaded in pairs, see mxfp4_triton.py
        x_at = x + source[None, :] * x_row + k[:, None]
        whole_steps = tl.cdiv(G, BLOCK_K // 32)
        w_at = w + row_start(rows, whole_steps)[:, None] + two[None, :]
        # Rows of exponents are padded, so no step reads past one.
        s_at = exponents + rows[:, None] * exponents_row + tl.arange(0, BLOCK_K // 32)[None, :]
        ups = (e * 0 + N).to(tl.int64)
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        # Columns that only pad y have no sums.
        steps = tl.where(block * BLOCK_N < N, whole_steps, 0)
        # Too few bytes for an asynchronous copy: loaded one step ahead.
        powers = tl.load(s_at)
        up_powers = tl.load(s_at + ups * exponents_row) if GLU else powers
        for step in range(0, steps):
            rows_x = tl.load(x_at + step * BLOCK_K, mask=hit[None, :], other=0.0)
            w_step = w_at + step * 128
            pairs = tl.load(w_step)
            s_next = s_at + tl.minimum(step + 1, steps - 1) * (BLOCK_K // 32)
            numbers = unpack_tile(_restore_order(pairs), _restore_order(powers), ASM, x.dtype.element_ty)
            powers = tl.load(s_next)
            acc = _wait_for_mma(tl.dot(numbers, rows_x, acc, input_precision="ieee"), ASM)
            if GLU:
                pairs = tl.load(w_step + row_start(ups, whole_steps))
                numbers = unpack_tile(_restore_order(pairs), _restore_order(up_powers), ASM, x.dtype.element_ty)
                up_powers = tl.load(s_next + ups * exponents_row)
                up = _wait_for_mma(tl.dot(numbers, rows_x, up, input_precision="ieee"), ASM)
        acc = finish_tile(acc, up, bias, weights, e, n, pair, hit, N, alpha, limit, PAIRED)
        column = n
        if GLU:
            acc = tl.where((n < N)[:, None], acc, 0.0)
            column = permuted_column(n)
        to = y + pair[None, :] * y_row + column[:, None]
        tl.store(to, acc.to(y.dtype.element_ty), mask=hit[None, :] & (n < y_row)[:, None])


def expert_mlp_mxfp4(x_TD: Tensor, weight_TC: Tensor, expert_TC: Tensor, experts: ExpertWeights) -> Tensor:
    """Computes `expert_mlp` (experts.py) for any number of rows of MXFP4 weights."""
    (rows, chosen), (count, width, inner) = expert_TC.shape, experts.down_EDI.shape
    assert x_TD.stride(1) == 1 and weight_TC.is_contiguous() and expert_TC.is_contiguous()
    if not rows:
        return torch.empty_like(x_TD)
    y_PD = x_TD.new_empty(rows * chosen, width)
    if rows <= MAX_FEW_ROWS and x_TD.dtype == torch.bfloat16:
        hidden_PI = x_TD.new_empty(rows * chosen, inner)
        launch_few_rows(x_TD, hidden_PI, weight_TC, expert_TC, experts, paired=False)
        launch_few_rows(hidden_PI, y_PD, weight_TC, expert_TC, experts, paired=True)
    else:
        order_P, ends_E, permuted_TK = sort_pairs(expert_TC, count, x_TD)
        assert permuted_TK is not None
        hidden_PI = x_TD.new_empty(rows * chosen, triton.cdiv(inner, COLUMN_STEP) * COLUMN_STEP)
        _launch(permuted_TK, hidden_PI, weight_TC, order_P, ends_E, experts, paired=False)
        _launch(hidden_PI, y_PD, weight_TC, order_P, ends_E, experts, paired=True)
    return sum_experts_triton(y_PD, chosen)


def _launch(
    x: Tensor, y: Tensor, weight_TC: Tensor, order_P: Tensor, ends_E: Tensor, experts: ExpertWeights, paired: bool
) -> None:
    w, bias = experts.packed_gemm(paired)
    assert x.shape[1] % COLUMN_STEP == 0 and (paired or y.shape[1] % COLUMN_STEP == 0), "permuted columns are padded"
    (rows, chosen), count = weight_TC.shape, len(w)
    _, block_m, registers = next(tile for tile in TILES if rows <= tile[0])
    options, block_n = {} if registers is None else {"maxnreg": registers}, BLOCK_N
    if x.dtype == torch.float32:
        options, block_n = {}, FP32_BLOCK_N
    # Tiles of one expert follow each other, so that the second reads the weights from the cache.
    _mxfp4_kernel[(max_tiles(len(y), count, block_m), triton.cdiv(y.shape[1], block_n))](
        x,
        w.words_ERW.view(torch.int32),
        w.exponents_ERG,
        bias,
        order_P,
        ends_E,
        weight_TC,
        y,
        count,
        w.shape[1] // (1 if paired else 2),
        w.shape[2] // BLOCK,
        x.stride(0),
        y.stride(0),
        w.exponents_ERG.shape[2],
        *clamp_arguments(experts),
        CHOSEN=chosen,
        EXPERTS=triton.next_power_of_2(count),
        PAIRED=paired,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        ASM=HAVE_PTX,
        num_warps=WARPS,
        num_stages=STAGES,
        **options,
    )
