# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, check-untyped-defs=False
"""Triton kernels of plain (not MXFP4) experts for many rows, sorted by expert.

`_sorted_kernel`: a program has a tile of one expert's pairs and a block of output columns. An expert is read once per
tile, from the second tile on out of the cache. The GEMM is that of experts_triton.py, so a row's bits are the same as
among few rows: tiles may differ as long as weights are the left operand and Hopper's wgmma takes 64 of their rows, by
four warps, and 16 columns at a time.

With TRITON_INTERPRET=1 set before the import, the launchers take CPU tensors. Shapes as in experts.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.moe.experts_triton import (
    FP32_TILE,
    clamp_arguments,
    expert_gemm_tile,
    plain_weights,
    sum_experts_triton,
)
from peagle.kernels.moe.sorting_triton import find_tile, sort_pairs
from peagle.kernels.moe.types import ExpertWeights
from peagle.kernels.triton_utils import pdl_launch_options

# (most pairs per expert on average, pairs per tile). Tiles have about twice the average, so that most experts have one
# tile and are read once; with more pairs, further tiles read the weights from the cache.
PAIRS_PER_TILE = ((8, 16), (16, 32), (48, 64))
MAX_TILE_PAIRS = 128
# By pairs per tile and whether it is the second GEMM: rows and columns of a weight tile, warps, stages. The fastest on
# an H200 for Qwen3-Coder-30B-A3B's layer.
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
# Pairs per iteration of the sort, and its warps: for up to MAX_FEW_PAIRS pairs, and for more.
MAX_FEW_PAIRS = 1024
SORT_SCANS = ((1024, 4), (4096, 8))


@triton.jit
def _sorted_kernel(
    x,
    w,
    bias,
    order,
    ends,
    weights,
    y,
    E,
    N,
    K,
    x_row,
    alpha,
    limit,
    CHOSEN: tl.constexpr,
    EXPERTS: tl.constexpr,
    PAIRED: tl.constexpr,
    GLU: tl.constexpr,
    CLAMPED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """PAIRED: rows of x are pairs of row and expert, and the result is weighted. EXPERTS: E as a power of 2."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    e, first, end = find_tile(ends, tl.program_id(1), E, BLOCK_M, EXPERTS)
    if e < E:
        m = first + tl.arange(0, BLOCK_M)
        hit = m < end
        pair = tl.load(order + m, mask=hit, other=0)
        source = pair if PAIRED else pair // CHOSEN
        expert_gemm_tile(
            x,
            w,
            bias,
            weights,
            y,
            e,
            tl.program_id(0),
            source.to(tl.int64),
            pair.to(tl.int64),
            hit,
            N,
            K,
            x_row,
            alpha,
            limit,
            PAIRED,
            GLU,
            CLAMPED,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            EVEN_K,
            PRECISION,
        )


def pairs_per_tile(pairs: int, count: int) -> int:
    return next((tile for average, tile in PAIRS_PER_TILE if pairs <= average * count), MAX_TILE_PAIRS)


def expert_mlp_sorted(x_TD: Tensor, weight_TC: Tensor, expert_TC: Tensor, experts: ExpertWeights) -> Tensor:
    """Computes `expert_mlp` (experts.py) for any number of rows of plain weights."""
    (rows, chosen), (count, width, inner) = expert_TC.shape, experts.down_EDI.shape
    assert x_TD.stride(1) == 1 and weight_TC.is_contiguous() and expert_TC.is_contiguous()
    if not rows:
        return torch.empty_like(x_TD)
    scan, warps = SORT_SCANS[expert_TC.numel() > MAX_FEW_PAIRS]
    order_P, ends_E, _ = sort_pairs(expert_TC, count, scan=scan, warps=warps)
    hidden_PI = x_TD.new_empty(rows * chosen, inner)
    y_PD = x_TD.new_empty(rows * chosen, width)
    block_m = pairs_per_tile(rows * chosen, count)
    _launch(x_TD, hidden_PI, weight_TC, order_P, ends_E, experts, block_m, paired=False)
    _launch(hidden_PI, y_PD, weight_TC, order_P, ends_E, experts, block_m, paired=True)
    return sum_experts_triton(y_PD, chosen)


def _launch(
    x: Tensor,
    y: Tensor,
    weight_TC: Tensor,
    order_P: Tensor,
    ends_E: Tensor,
    experts: ExpertWeights,
    block_m: int,
    paired: bool,
) -> None:
    w, bias = plain_weights(experts, paired)
    assert w.dtype == x.dtype
    (pairs, columns), (count, _, depth) = y.shape, w.shape
    block_n, block_k, warps, stages = FP32_TILE if x.dtype == torch.float32 else TILES[block_m, paired]
    # An expert's tiles are `blocks` programs apart, so they run together. Programs left over are the last ones.
    blocks, max_tiles = triton.cdiv(columns, block_n), min(pairs, (pairs + count * (block_m - 1)) // block_m)
    _sorted_kernel[(blocks, max_tiles)](
        x,
        w,
        bias,
        order_P,
        ends_E,
        weight_TC,
        y,
        count,
        columns,
        depth,
        x.stride(0),
        *clamp_arguments(experts),
        CHOSEN=weight_TC.shape[1],
        EXPERTS=triton.next_power_of_2(count),
        PAIRED=paired,
        GLU=not paired,
        CLAMPED=experts.clamp is not None,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        EVEN_K=depth % block_k == 0,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=warps,
        num_stages=stages,
        **pdl_launch_options(x.device),
    )
