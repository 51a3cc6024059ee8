# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, check-untyped-defs=False
"""Triton GEMMs of the experts, plain or MXFP4; few rows of MXFP4 in bf16 go to mxfp4_few_rows_triton.py.

A program has a block of one expert's output columns. Few rows of plain weights are not sorted: a program has all of
them and scans their choices for its expert; if it finds none, it returns. So every chosen expert is read once, and no
other. Otherwise rows are sorted by expert, and a program has a tile of one expert's pairs; an expert is read once per
tile, from the second tile on out of the cache. MXFP4 weights are unpacked in registers, in the order in which the MMA
needs them.

A row's bits do not depend on the other rows. Weights are the left operand and rows the right one, as in gemm/linear.py:
tiles may differ as long as Hopper's wgmma takes 64 weight rows, by four warps, and 16 columns at a time. For MXFP4 this
assumes that mma.sync by one warp (few rows) and wgmma by four warps give the same sums. NVIDIA does not guarantee that;
on an H200 they were equal to the bit, for one row alone and among 4 to 300.

With TRITON_INTERPRET=1 set before the import, the launcher takes CPU tensors. Shapes as in experts.py.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.moe.experts_torch import ExpertWeights
from peagle.kernels.moe.mxfp4 import COLUMN_STEP, PackedWeights
from peagle.kernels.moe.mxfp4_few_rows_triton import MAX_FEW_ROWS, launch_few_rows
from peagle.kernels.moe.mxfp4_triton import HAVE_PTX, mxfp4_sums
from peagle.kernels.moe.routing_triton import find_tile, gate_tile, permuted_column, sort_pairs, sum_experts_triton
from peagle.kernels.triton_utils import pdl_launch_options, wait_for_previous

MAX_SCAN_ROWS = 16  # one tile holds all rows, so rows that did not choose an expert cost nothing
# (most pairs per expert on average, pairs per tile). Tiles have about twice the average, so that most experts have one
# tile and are read once; with more pairs, further tiles read the weights from the cache.
PAIRS_PER_TILE = ((8, 16), (16, 32), (48, 64), (math.inf, 128))
# Rows and columns of a weight tile, warps, stages; of sorted rows by pairs per tile, for the first and the second GEMM.
# The fastest on an H200 for Qwen3-Coder-30B-A3B's layer.
SCAN_TILE = (64, 64, 4, 4)
TILES = {
    16: ((64, 128, 4, 3), (128, 64, 4, 3)),
    32: ((64, 64, 4, 3), (64, 64, 4, 4)),
    64: ((64, 64, 4, 3), (128, 64, 4, 4)),
    128: ((128, 64, 8, 4), (128, 64, 4, 3)),
}
# With four stages and odd widths Triton 3.6 computed wrong addresses in fp32: it used the upper half of a 32-bit
# product for a 64-bit one.
FP32_TILE = (32, 32, 4, 3)
# Pairs per iteration of the sort, and its warps: for up to MAX_FEW_PAIRS pairs, and for more.
MAX_FEW_PAIRS = 1024
SORT_SCANS = ((1024, 4), (4096, 8))
# MXFP4: most rows, pairs per tile, and a limit on registers per thread. With at least 64 weight rows and four warps the
# MMA is wgmma, which takes weights from registers; with fewer they go through shared memory.
MXFP4_TILES = ((64, 16, None), (256, 32, 128), (math.inf, 64, 168))
MXFP4_TILE, MXFP4_FP32_TILE = (64, COLUMN_STEP, 4, 3), (32, COLUMN_STEP, 4, 3)


@triton.jit
def _plain_sums(x, w, e, n, source, hit, N, K, x_row, PAIRED, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K):
    """Returns a tile's sums over K: of outputs and, unless PAIRED, of ups."""
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
    return acc, up


@triton.jit(do_not_specialize=["T"])  # compiled once for all row counts
def _experts_kernel(
    x, w, exponents, bias, chosen, order, ends, weights, y,
    T, E, N, K, x_row, y_row, exponents_row, alpha, limit,
    CHOSEN: tl.constexpr, EXPERTS: tl.constexpr, PAIRED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes a block of an expert's output columns for the pairs that are `hit`; rows are sorted unless ends is None.

    PAIRED: the second GEMM, where rows of x are pairs and the result is weighted. EXPERTS: E as a power of 2.
    MXFP4 if there are exponents; then the columns of x, and of the first GEMM's y, are permuted and padded to whole
    steps (`permuted_column`).
    """
    wait_for_previous(PDL)
    # Plain: an expert's tiles run together, and programs left over are the last ones. MXFP4: tiles of one expert follow
    # each other, so that the second reads the weights from the cache.
    block = tl.program_id(0 if exponents is None else 1)
    tile = tl.program_id(1 if exponents is None else 0)
    m = tl.arange(0, BLOCK_M)
    if ends is None:
        e = tile
        CHOICES: tl.constexpr = triton.next_power_of_2(CHOSEN)
        c = tl.arange(0, CHOICES)
        known = (m < T)[:, None] & (c < CHOSEN)[None, :]
        mine = tl.load(chosen + m[:, None] * CHOSEN + c[None, :], mask=known, other=-1) == e
        hit = tl.max(mine.to(tl.int32), 1) > 0
        has_pairs = tl.max(hit.to(tl.int32), 0) > 0
        pair = m.to(tl.int64) * CHOSEN + tl.sum(tl.where(mine, c[None, :], 0), 1)
        source = pair if PAIRED else m.to(tl.int64)
    else:
        e, first, end = find_tile(ends, tile, E, BLOCK_M, EXPERTS)
        hit = first + m < end
        has_pairs = e < E
        pair = tl.load(order + first + m, mask=hit, other=0)
        source = (pair if PAIRED else pair // CHOSEN).to(tl.int64)
        pair = pair.to(tl.int64)
    if has_pairs:
        n = block * BLOCK_N + tl.arange(0, BLOCK_N)
        if exponents is None:
            acc, up = _plain_sums(x, w, e, n, source, hit, N, K, x_row, PAIRED, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K)
        else:
            acc, up = mxfp4_sums(
                x, w, exponents, e, block, source, hit, N, K, x_row, exponents_row, PAIRED, BLOCK_M, BLOCK_N, ASM
            )
        if bias is not None:
            b_at = bias + e * N * (1 if PAIRED else 2) + n
            acc += tl.load(b_at, mask=n < N, other=0.0).to(tl.float32)[:, None]
            if not PAIRED:
                up += tl.load(b_at + N, mask=n < N, other=0.0).to(tl.float32)[:, None]
        column = n
        if PAIRED:
            acc = acc * tl.load(weights + pair, mask=hit, other=0.0)[None, :]
        else:
            acc = gate_tile(acc, up, alpha, limit)
            if exponents is not None:
                acc = tl.where((n < N)[:, None], acc, 0.0)
                column = permuted_column(n)
        to = y + pair[None, :] * y_row + column[:, None]
        tl.store(to, acc.to(y.dtype.element_ty), mask=hit[None, :] & (n < y_row)[:, None])


def pairs_per_tile(pairs: int, count: int) -> int:
    return next(tile for average, tile in PAIRS_PER_TILE if pairs <= average * count)


def expert_mlp_triton(
    x_TD: Tensor, weight_TC: Tensor, expert_TC: Tensor, experts: ExpertWeights, sort: bool = False
) -> Tensor:
    """Computes `expert_mlp` (experts.py) for any number of rows; `sort` sorts even few rows of plain weights."""
    (rows, chosen), (count, width, inner) = expert_TC.shape, experts.down_EDI.shape
    assert x_TD.stride(1) == 1 and weight_TC.is_contiguous() and expert_TC.is_contiguous()
    if not rows:
        return torch.empty_like(x_TD)
    pairs, packed = rows * chosen, isinstance(experts.down_EDI, PackedWeights)
    y_PD = x_TD.new_empty(pairs, width)
    if packed and rows <= MAX_FEW_ROWS and x_TD.dtype == torch.bfloat16:
        hidden_PI = x_TD.new_empty(pairs, inner)
        launch_few_rows(x_TD, hidden_PI, weight_TC, expert_TC, experts, paired=False)
        launch_few_rows(hidden_PI, y_PD, weight_TC, expert_TC, experts, paired=True)
        return sum_experts_triton(y_PD, chosen)
    fp32, block_m, order_P, ends_E, permuted_TK = x_TD.dtype == torch.float32, MAX_SCAN_ROWS, None, None, None
    options: dict[str, Any] = pdl_launch_options(x_TD.device, pdl=False if packed else None)
    if packed:
        _, block_m, registers = next(tile for tile in MXFP4_TILES if rows <= tile[0])
        order_P, ends_E, permuted_TK = sort_pairs(expert_TC, count, x_TD)
        if registers is not None and not fp32:
            options["maxnreg"] = registers
    elif sort or rows > MAX_SCAN_ROWS:
        scan, sort_warps = SORT_SCANS[pairs > MAX_FEW_PAIRS]
        order_P, ends_E, _ = sort_pairs(expert_TC, count, scan=scan, warps=sort_warps)
        block_m = pairs_per_tile(pairs, count)
    max_tiles = count if ends_E is None else min(pairs, (pairs + count * (block_m - 1)) // block_m)
    hidden_PI = x_TD.new_empty(pairs, triton.cdiv(inner, COLUMN_STEP) * COLUMN_STEP if packed else inner)
    for paired, x, y, columns, depth in (
        (False, x_TD if permuted_TK is None else permuted_TK, hidden_PI, inner, width),
        (True, hidden_PI, y_PD, width, inner),
    ):
        w, exponents, bias = experts.gemm_weights(paired)
        assert packed or w.dtype == x.dtype
        if packed:
            block_n, block_k, warps, stages = MXFP4_FP32_TILE if fp32 else MXFP4_TILE
        else:
            block_n, block_k, warps, stages = SCAN_TILE if ends_E is None else TILES[block_m][paired]
            if fp32:
                block_n, block_k, warps, stages = FP32_TILE
        blocks = triton.cdiv(y.shape[1], block_n)
        _experts_kernel[(max_tiles, blocks) if packed else (blocks, max_tiles)](
            x, w, exponents, bias, expert_TC, order_P, ends_E, weight_TC, y,
            rows, count, columns, depth, x.stride(0), y.stride(0), 0 if exponents is None else exponents.shape[2],
            *(experts.clamp or (None, None)),
            CHOSEN=chosen, EXPERTS=triton.next_power_of_2(count), PAIRED=paired, BLOCK_M=block_m, BLOCK_N=block_n,
            BLOCK_K=block_k, EVEN_K=depth % block_k == 0, ASM=HAVE_PTX, num_warps=warps, num_stages=stages, **options,
        )  # fmt: skip
    return sum_experts_triton(y_PD, chosen)
