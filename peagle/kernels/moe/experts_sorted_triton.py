# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, check-untyped-defs=False
"""experts.py for weights that are not packed and more rows than a tile has, in Triton.

Pairs are put in the order of their experts first, as for packed weights (experts_packed_triton.py). `_ordered_kernel`:
a program has a tile of an expert's pairs and some output columns; which, it finds from where experts end, and programs
left over are done at once. So nothing is asked of the host, and an expert is read once for each of its tiles, from the
second on out of the cache.

The product is experts_triton.py's, so a row's sums are those it has among few rows: tiles may differ, as long as
weights are the left operand and Hopper's product takes 64 of their rows, by four warps, and 16 columns at a time.

With TRITON_INTERPRET=1 in the environment, set before the import, the launchers take CPU tensors.

Shapes as in experts.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.moe.experts import ExpertWeights
from peagle.kernels.moe.experts_triton import product_tile, summed_triton
from peagle.kernels.moe.mxfp4_sorted_triton import order_of, tile_of
from peagle.kernels.triton_utils import supports_pdl

# A tile's pairs by how many an expert has on average. About twice as many, so that most experts have one tile and are
# read once; where pairs are many, the weights of a second tile come from the cache.
PAIRS = ((8, 16), (16, 32), (48, 64))
MOST_PAIRS = 128
# By a tile's pairs and whether the product is the second one: rows and columns of a tile of weights, warps, tiles under
# way. The fastest on an H200 for Qwen3-Coder-30B-A3B's layer (benchmarks/kernel_experts_many.py); weights by tensor
# descriptor were no more than 2% faster.
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
# Pairs that the order looks at in one go, and warps: for up to FEW_PAIRS, and for more. Goes wait for each other.
FEW_PAIRS = 1024
SCANS = ((1024, 4), (4096, 8))


@triton.jit
def _ordered_kernel(
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
    """PAIRED: rows of x are pairs of row and expert already, and the result is weighted. EXPERTS: E rounded up."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    e, first, end = tile_of(ends, tl.program_id(1), E, BLOCK_M, EXPERTS)
    if e < E:
        m = first + tl.arange(0, BLOCK_M)
        hit = m < end
        pair = tl.load(order + m, mask=hit, other=0)
        source = pair if PAIRED else pair // CHOSEN
        product_tile(
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


def pairs_of_a_tile(pairs: int, count: int) -> int:
    return next((tile for most, tile in PAIRS if pairs <= most * count), MOST_PAIRS)


def in_order(expert_TC: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """[P] pairs by expert, and [E] where each expert's end among them."""
    scan, warps = SCANS[expert_TC.numel() > FEW_PAIRS]
    order_P, ends_E, _ = order_of(expert_TC, count, scan=scan, warps=warps)
    return order_P, ends_E


def expert_mlp_ordered(x_TD: Tensor, weight_TC: Tensor, expert_TC: Tensor, experts: ExpertWeights) -> Tensor:
    (rows, chosen), (count, width, inner) = expert_TC.shape, experts.down_EDI.shape
    assert x_TD.stride(1) == 1 and weight_TC.is_contiguous() and expert_TC.is_contiguous()
    if not rows:
        return torch.empty_like(x_TD)
    order_P, ends_E = in_order(expert_TC, count)
    hidden_PI = x_TD.new_empty(rows * chosen, inner)
    y_PD = x_TD.new_empty(rows * chosen, width)
    block_m = pairs_of_a_tile(rows * chosen, count)
    _launch(x_TD, hidden_PI, weight_TC, order_P, ends_E, experts, block_m, paired=False)
    _launch(hidden_PI, y_PD, weight_TC, order_P, ends_E, experts, block_m, paired=True)
    return summed_triton(y_PD, chosen)


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
    w, bias = experts.gate_up_EXD, experts.gate_up_bias_EX
    if paired:
        w, bias = experts.down_EDI, experts.down_bias_ED
    assert isinstance(w, Tensor) and w.is_contiguous() and w.dtype == x.dtype
    assert bias is None or bias.is_contiguous()
    (pairs, columns), (count, _, depth) = y.shape, w.shape
    block_n, block_k, warps, stages = TILES[block_m, paired]
    if x.dtype == torch.float32:
        block_n, block_k, warps, stages = 32, 32, 4, 3  # as in experts_triton.py
    # Of one expert, tiles are `blocks` programs apart, so they run together. Programs left over are the last ones.
    blocks, most_tiles = triton.cdiv(columns, block_n), min(pairs, (pairs + count * (block_m - 1)) // block_m)
    clamp, pdl = experts.clamp, supports_pdl(x.device)
    _ordered_kernel[(blocks, most_tiles)](
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
        clamp.alpha if clamp is not None else 0.0,
        clamp.limit if clamp is not None else 0.0,
        CHOSEN=weight_TC.shape[1],
        EXPERTS=triton.next_power_of_2(count),
        PAIRED=paired,
        GLU=not paired,
        CLAMPED=clamp is not None,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        EVEN_K=depth % block_k == 0,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        PDL=pdl,
        num_warps=warps,
        num_stages=stages,
        **({"launch_pdl": True} if pdl else {}),
    )
