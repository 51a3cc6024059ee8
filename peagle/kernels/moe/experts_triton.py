# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, check-untyped-defs=False
"""Triton kernels of routing and of plain (not MXFP4) experts for few rows; and the tile GEMM that sorted rows share.

`_scan_kernel`: a program has one expert, a block of its output columns and all rows. It scans the rows' choices for its
expert, without sorting; a program that finds none returns. So every chosen expert is read once, and no other. Weights
are the left operand and rows the right one, as in gemm/linear.py: a row's bits do not depend on the other rows.

`_route_kernel`: a program has one row. `_sum_kernel`: a program has one row's pairs and a block of columns.

With TRITON_INTERPRET=1 set before the import, the launchers take CPU tensors. Shapes as in experts.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.moe.types import ExpertWeights
from peagle.kernels.triton_utils import pdl_launch_options

BLOCK_ROWS = 16  # rows of the one tile of x, so the most rows that `expert_mlp_triton` takes
TILE = (64, 64, 4, 4)  # rows and columns of a weight tile, warps, stages
# With four stages and odd widths Triton 3.6 computed wrong addresses in fp32: it used the upper half of a 32-bit
# product for a 64-bit one.
FP32_TILE = (32, 32, 4, 3)


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
def apply_gate_tile(gate, up, alpha, limit, CLAMPED: tl.constexpr):
    if CLAMPED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        return (up + 1.0) * gate / (1.0 + tl.exp(-gate * alpha))
    else:
        return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def expert_gemm_tile(
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
    """Computes a block of an expert's output columns for the pairs that are `hit`; their rows of x are `source`.

    The scan and the sorted kernel share this body, so that a row's bits are the same in both.
    """
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    HALVES: tl.constexpr = 2 if GLU else 1
    # Programs past the last weight row read it again, without a mask in the loop, and do not store the result.
    rows = e.to(tl.int64) * N * HALVES + tl.minimum(n, N - 1)
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
        acc = apply_gate_tile(acc, up, alpha, limit, CLAMPED)
    if PAIRED:
        acc = acc * tl.load(weights + pair, mask=hit, other=0.0)[None, :]
    to = y + pair[None, :] * N + n[:, None]
    tl.store(to, acc.to(y.dtype.element_ty), mask=hit[None, :] & (n < N)[:, None])


@triton.jit(do_not_specialize=["T"])  # compiled once for all row counts
def _scan_kernel(
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
    """PAIRED: rows of x are pairs of row and expert, and the result is weighted. CHOICES: CHOSEN as a power of 2."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    e = tl.program_id(1)
    m = tl.arange(0, BLOCK_M)
    c = tl.arange(0, CHOICES)
    known = (m < T)[:, None] & (c < CHOSEN)[None, :]
    mine = tl.load(chosen + m[:, None] * CHOSEN + c[None, :], mask=known, other=-1) == e
    hit = tl.max(mine.to(tl.int32), 1) > 0
    if tl.max(hit.to(tl.int32), 0) > 0:
        pair = m.to(tl.int64) * CHOSEN + tl.sum(tl.where(mine, c[None, :], 0), 1)
        source = m.to(tl.int64)
        if PAIRED:
            source = pair
        expert_gemm_tile(
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
    """Computes `expert_mlp` (experts.py) for up to BLOCK_ROWS rows of plain weights."""
    (rows, chosen), width = expert_TC.shape, x_TD.shape[1]
    assert rows <= BLOCK_ROWS and x_TD.stride(1) == 1 and weight_TC.is_contiguous() and expert_TC.is_contiguous()
    if not rows:
        return torch.empty_like(x_TD)
    hidden_PI = x_TD.new_empty(rows * chosen, experts.down_EDI.shape[2])
    y_PD = x_TD.new_empty(rows * chosen, width)
    _launch(x_TD, hidden_PI, weight_TC, expert_TC, experts, paired=False)
    _launch(hidden_PI, y_PD, weight_TC, expert_TC, experts, paired=True)
    return sum_experts_triton(y_PD, chosen)


def sum_experts_triton(y_PD: Tensor, chosen: int) -> Tensor:
    """Adds up each row's pairs, which are weighted already, in fp32 and in the order of its choices."""
    if chosen == 1:
        return y_PD
    (pairs, width), block = y_PD.shape, 1024
    y_TD = y_PD.new_empty(pairs // chosen, width)
    grid, options = (pairs // chosen, triton.cdiv(width, block)), pdl_launch_options(y_PD.device)
    _sum_kernel[grid](y_PD, y_TD, width, CHOSEN=chosen, BLOCK=block, num_warps=4, **options)
    return y_TD


def plain_weights(experts: ExpertWeights, paired: bool) -> tuple[Tensor, Tensor | None]:
    """Returns the weights and bias of the second GEMM if `paired`, else of the gated first one."""
    w, bias = experts.gate_up_EXD, experts.gate_up_bias_EX
    if paired:
        w, bias = experts.down_EDI, experts.down_bias_ED
    assert isinstance(w, Tensor) and w.is_contiguous() and (bias is None or bias.is_contiguous())
    return w, bias


def clamp_arguments(experts: ExpertWeights) -> tuple[float, float]:
    """Returns alpha and limit of the clamped gate; zeros without one."""
    return (0.0, 0.0) if experts.clamp is None else (experts.clamp.alpha, experts.clamp.limit)


def _launch(x: Tensor, y: Tensor, weight_TC: Tensor, expert_TC: Tensor, experts: ExpertWeights, paired: bool) -> None:
    w, bias = plain_weights(experts, paired)
    (rows, chosen), columns, depth = expert_TC.shape, y.shape[1], x.shape[1]
    assert w.dtype == x.dtype
    block_n, block_k, warps, stages = FP32_TILE if x.dtype == torch.float32 else TILE
    _scan_kernel[(triton.cdiv(columns, block_n), len(w))](
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
        *clamp_arguments(experts),
        CHOSEN=chosen,
        CHOICES=triton.next_power_of_2(chosen),
        PAIRED=paired,
        GLU=not paired,
        CLAMPED=experts.clamp is not None,
        BLOCK_M=BLOCK_ROWS,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        EVEN_K=depth % block_k == 0,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=warps,
        num_stages=stages,
        **pdl_launch_options(x.device),
    )
