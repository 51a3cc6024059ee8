# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, check-untyped-defs=False
"""The Triton versions of experts.py, but for packed weights (experts_packed_triton.py) and for pairs in order
(experts_ordered_triton.py).

`_experts_kernel`: a program has one expert, some of its output columns and a tile of rows. It looks through the rows'
choices for its expert; nothing is sorted beforehand, and a program that finds none is done. So for a tile's worth of
rows the experts hit are read once each, and no others. Weights are the left operand and rows the right one, as in
linear.py: a row's sums do not depend on which other rows there are.

`_route_kernel`: a program has one row's choices. `_sum_kernel`: one row's pairs, and some columns. A kernel is launched
while the one before it ends, which it waits for before it reads or writes anything.

With TRITON_INTERPRET=1 in the environment, set before the import, the launchers take CPU tensors.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.moe.experts import ExpertWeights
from peagle.kernels.triton_utils import supports_pdl

# For the gated product and the one after it: rows and columns of a tile of weights, warps, tiles under way. One for all
# numbers of rows, so that a row's sums stay those it has alone.
TILES = {False: (64, 64, 4, 4), True: (64, 64, 4, 4)}


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
        at = tl.min(tl.where(shares == top, e, BLOCK), 0)  # of equals the first
        best = tl.where(c == i, top, best)
        which = tl.where(c == i, at, which)
        shares = tl.where(e == at, -2.0, shares)
    if NORMED:
        total = tl.sum(best, 0)
    tl.store(weights + row * CHOSEN + c, best / total, mask=c < CHOSEN)
    tl.store(experts + row * CHOSEN + c, which, mask=c < CHOSEN)


@triton.jit
def gated_tile(gate, up, alpha, limit, CLAMPED: tl.constexpr):
    if CLAMPED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        return (up + 1.0) * gate / (1.0 + tl.exp(-gate * alpha))
    else:
        return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def product_tile(
    x,
    w,
    bias,
    weights,
    y,
    e,
    block,
    source,
    pair,
    hit,
    N,
    K,
    x_row,
    alpha,
    limit,
    PAIRED: tl.constexpr,
    GLU: tl.constexpr,
    CLAMPED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One block of an expert's output columns for the pairs that are `hit`, whose rows of x are `source`. One body for
    all kernels, so that a row's sums are the same in each."""
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    HALVES: tl.constexpr = 2 if GLU else 1
    # Past the last weight row the last one is read again: no mask in the loop, and nothing of it is stored.
    rows = e.to(tl.int64) * N * HALVES + tl.minimum(n, N - 1)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    k = tl.arange(0, BLOCK_K)
    w_at = w + rows[:, None] * K + k[None, :]
    x_at = x + source[None, :] * x_row + k[:, None]
    up_step = (e * 0 + N).to(tl.int64) * K  # a width of 1 is a plain number here, without a type
    for start in range(0, K, BLOCK_K):
        if EVEN_K:
            rows_x = tl.load(x_at + start, mask=hit[None, :], other=0.0)
            rows_w = tl.load(w_at + start)
        else:
            inside = start + k < K
            rows_x = tl.load(x_at + start, mask=hit[None, :] & inside[:, None], other=0.0)
            rows_w = tl.load(w_at + start, mask=inside[None, :], other=0.0)
        acc = tl.dot(rows_w, rows_x, acc, input_precision=PRECISION)
        if GLU:
            if EVEN_K:
                rows_w = tl.load(w_at + start + up_step)
            else:
                rows_w = tl.load(w_at + start + up_step, mask=(start + k < K)[None, :], other=0.0)
            up = tl.dot(rows_w, rows_x, up, input_precision=PRECISION)
    if bias is not None:
        b_at = bias + e * N * HALVES + n
        acc += tl.load(b_at, mask=n < N, other=0.0).to(tl.float32)[:, None]
        if GLU:
            up += tl.load(b_at + N, mask=n < N, other=0.0).to(tl.float32)[:, None]
    if GLU:
        acc = gated_tile(acc, up, alpha, limit, CLAMPED)
    if PAIRED:
        acc = acc * tl.load(weights + pair, mask=hit, other=0.0)[None, :]
    to = y + pair[None, :] * N + n[:, None]
    tl.store(to, acc.to(y.dtype.element_ty), mask=hit[None, :] & (n < N)[:, None])


@triton.jit(do_not_specialize=["T"])  # one compilation for all numbers of rows of a tile
def _experts_kernel(
    x,
    w,
    bias,
    chosen,
    weights,
    y,
    T,
    N,
    K,
    x_row,
    alpha,
    limit,
    CHOSEN: tl.constexpr,
    CHOICES: tl.constexpr,
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
    """PAIRED: rows of x are pairs of row and expert already, and the result is weighted. CHOICES: CHOSEN rounded up."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    e = tl.program_id(1)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.arange(0, CHOICES)
    known = (m < T)[:, None] & (c < CHOSEN)[None, :]
    mine = tl.load(chosen + m[:, None] * CHOSEN + c[None, :], mask=known, other=-1) == e
    hit = tl.max(mine.to(tl.int32), 1) > 0
    if tl.max(hit.to(tl.int32), 0) > 0:
        pair = m.to(tl.int64) * CHOSEN + tl.sum(tl.where(mine, c[None, :], 0), 1)
        source = m.to(tl.int64)
        if PAIRED:
            source = pair
        product_tile(
            x,
            w,
            bias,
            weights,
            y,
            e,
            tl.program_id(0),
            source,
            pair,
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


def expert_mlp_triton(x_TD: Tensor, weight_TC: Tensor, expert_TC: Tensor, experts: ExpertWeights) -> Tensor:
    (rows, chosen), width = expert_TC.shape, x_TD.shape[1]
    inner = experts.down_EDI.shape[2]
    gate_up_EXD, down_EDI = experts.gate_up_EXD, experts.down_EDI
    assert isinstance(gate_up_EXD, Tensor) and isinstance(down_EDI, Tensor)
    assert x_TD.stride(1) == 1 and weight_TC.is_contiguous() and expert_TC.is_contiguous()
    hidden_PI = x_TD.new_empty(rows * chosen, inner)
    y_PD = x_TD.new_empty(rows * chosen, width)
    if not rows:
        return torch.empty_like(x_TD)
    _launch(x_TD, gate_up_EXD, experts.gate_up_bias_EX, hidden_PI, weight_TC, expert_TC, experts, paired=False)
    _launch(hidden_PI, down_EDI, experts.down_bias_ED, y_PD, weight_TC, expert_TC, experts, paired=True)
    return summed_triton(y_PD, chosen)


def summed_triton(y_PD: Tensor, chosen: int) -> Tensor:
    """A row's pairs, weighted already, added up in fp32 and in the order in which they were chosen."""
    if chosen == 1:
        return y_PD
    (pairs, width), block, pdl = y_PD.shape, 1024, supports_pdl(y_PD.device)
    y_TD = y_PD.new_empty(pairs // chosen, width)
    _sum_kernel[(pairs // chosen, triton.cdiv(width, block))](
        y_PD, y_TD, width, CHOSEN=chosen, BLOCK=block, PDL=pdl, num_warps=4, **({"launch_pdl": True} if pdl else {})
    )
    return y_TD


def _launch(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    y: Tensor,
    weight_TC: Tensor,
    expert_TC: Tensor,
    experts: ExpertWeights,
    paired: bool,
) -> None:
    (rows, chosen), columns, depth = expert_TC.shape, y.shape[1], x.shape[1]
    assert w.is_contiguous() and (bias is None or bias.is_contiguous()) and w.dtype == x.dtype
    block_m = 16 if rows <= 16 else 32 if rows <= 32 else 64
    block_n, block_k, warps, stages = TILES[paired]
    if x.dtype == torch.float32:
        # With four stages Triton 3.6 made wrong addresses where a width was odd: its compiler took the upper half of a
        # 64-bit product for that of a 32-bit one.
        block_n, block_k, warps, stages = 32, 32, 4, 3
    clamp, pdl = experts.clamp, supports_pdl(x.device)
    _experts_kernel[(triton.cdiv(columns, block_n), len(w), triton.cdiv(rows, block_m))](
        x,
        w,
        bias,
        expert_TC,
        weight_TC,
        y,
        rows,
        columns,
        depth,
        x.stride(0),
        clamp.alpha if clamp is not None else 0.0,
        clamp.limit if clamp is not None else 0.0,
        CHOSEN=chosen,
        CHOICES=triton.next_power_of_2(chosen),
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
