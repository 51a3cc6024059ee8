# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, check-untyped-defs=False
"""The Triton version of linear_loss.py's `compute_row_losses_torch`: what lies between the products with the heads.

`_teacher_kernel`: a program has one position: log of the sum of its logits, and the likeliest token. Rows that ask at
the same position share it.
`_rows_kernel`: a program has one row and goes over its logits twice for ce and kl, three times for the others, whose
gradient needs a sum that is known only at the end. The first sweep finds the sum and the likeliest token, the second
what p and q have in common, the last writes the gradient over the logits. A row's logits stay in the L2 between
sweeps, and rows of one position come one after another, which keeps the teacher's there too.

Sums are kept per place of a block, in fp32, and added up at the end: no program waits for itself within a sweep.

With TRITON_INTERPRET=1 in the environment, set before the import, the launcher takes CPU tensors.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.config import OBJECTIVES, Objective
from peagle.kernels.loss.types import MIN_ACCEPTANCE, RowLosses

_LOG2E = tl.constexpr(math.log2(math.e))
_LN2 = tl.constexpr(math.log(2.0))
_LOW = tl.constexpr(-1e30)  # below every logit, and no nan when subtracted from itself
_LEAST = tl.constexpr(MIN_ACCEPTANCE)

_BLOCK, _WARPS = 4096, 16  # 16 bytes of bf16 a thread; many threads a row, so that few rows share the L2


@triton.jit
def _sum_and_best(x, count, BLOCK: tl.constexpr):
    """Of `count` logits: log2 of the sum of their powers of e, and where the first of the largest is."""
    lanes = tl.arange(0, BLOCK)
    best = tl.zeros((BLOCK,), tl.float32) + _LOW
    total = tl.zeros((BLOCK,), tl.float32)
    where = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, count, BLOCK):
        at = start + lanes
        logit = tl.load(x + at, mask=at < count, other=float("-inf")).to(tl.float32) * _LOG2E
        more = logit > best
        shrink = tl.exp2(-tl.abs(logit - best))  # of whichever is the smaller against the larger
        total = tl.where(more, total * shrink + 1.0, total + shrink)
        where = tl.where(more, at, where)
        best = tl.where(more, logit, best)
    top = tl.max(best, 0)
    log_sum = top + tl.log2(tl.sum(total * tl.exp2(best - top), 0))
    return log_sum, tl.min(tl.where(best == top, where, 2147483647), 0)


@triton.jit
def _teacher_kernel(t, sums, bests, count, t_row, BLOCK: tl.constexpr):
    spot = tl.program_id(0)
    log_sum, best = _sum_and_best(t + spot.to(tl.int64) * t_row, count, BLOCK)
    tl.store(sums + spot, log_sum)
    tl.store(bests + spot, best)


@triton.jit
def _p_and_q(z, t, ids, at, inside, log_sum, teacher_sum, REDUCED: tl.constexpr):
    """log2 of p and q, and both themselves; 0 outside."""
    logit = tl.load(z + at, mask=inside, other=float("-inf")).to(tl.float32) * _LOG2E
    if REDUCED:
        asked = tl.load(t + tl.load(ids + at, mask=inside, other=0), mask=inside, other=float("-inf"))
    else:
        asked = tl.load(t + at, mask=inside, other=float("-inf"))
    log_q, log_p = logit - log_sum, asked.to(tl.float32) * _LOG2E - teacher_sum
    return log_p, log_q, tl.exp2(log_p), tl.exp2(log_q)


@triton.jit
def _mass(t, ids, count, teacher_sum, BLOCK: tl.constexpr):
    """How likely the teacher is to say something the student can say."""
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, count, BLOCK):
        at = start + lanes
        inside = at < count
        asked = tl.load(t + tl.load(ids + at, mask=inside, other=0), mask=inside, other=float("-inf"))
        total += tl.exp2(asked.to(tl.float32) * _LOG2E - teacher_sum)
    return tl.sum(total, 0)


@triton.jit
def _rows_kernel(
    z,
    t,
    ids,
    spots,
    weights,
    sums,
    bests,
    losses,
    accepts,
    matches,
    count,
    z_row,
    t_row,
    eta,
    OBJECTIVE: tl.constexpr,
    REDUCED: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    spot = tl.load(spots + row)
    z += row.to(tl.int64) * z_row
    t += spot.to(tl.int64) * t_row
    teacher_sum, teacher_best = tl.load(sums + spot), tl.load(bests + spot)
    weight = tl.load(weights + row)
    log_sum, best = _sum_and_best(z, count, BLOCK)
    if REDUCED:
        best = tl.load(ids + best).to(tl.int32)
    tl.store(matches + row, (best == teacher_best).to(tl.int8))

    lanes = tl.arange(0, BLOCK)
    common = tl.zeros((BLOCK,), tl.float32)  # sum min(p, q)
    below = tl.zeros((BLOCK,), tl.float32)  # sum of q where q < p
    apart = tl.zeros((BLOCK,), tl.float32)  # ce or kl
    OF_KL: tl.constexpr = OBJECTIVE == "ce" or OBJECTIVE == "kl"
    OF_TV: tl.constexpr = not OF_KL
    mass = 1.0  # sum p
    if REDUCED and (OF_KL or OBJECTIVE == "lk-hybrid"):
        mass = _mass(t, ids, count, teacher_sum, BLOCK)
    for start in range(0, count, BLOCK):
        at = start + lanes
        inside = at < count
        log_p, log_q, p, q = _p_and_q(z, t, ids, at, inside, log_sum, teacher_sum, REDUCED)
        common += tl.minimum(p, q)
        if OBJECTIVE == "ce":
            apart -= tl.where(p > 0.0, p * log_q, 0.0)
        elif OBJECTIVE == "kl" or OBJECTIVE == "lk-hybrid":
            apart += tl.where(p > 0.0, p * (log_p - log_q), 0.0)
        if OF_TV:
            below += tl.where(q < p, q, 0.0)
        elif GRADIENT:
            tl.store(z + at, ((q * mass - p) * weight).to(z.dtype.element_ty), mask=inside)
    accept = tl.sum(common, 0)
    floor = tl.maximum(accept, _LEAST)
    kl = tl.sum(apart, 0) * _LN2
    tv = 1.0 - accept
    lam = tl.exp2(-eta * accept * _LOG2E)
    if OF_KL:
        loss = kl
    elif OBJECTIVE == "tv":
        loss = tv
    elif OBJECTIVE == "lk":
        loss = -tl.log2(floor) * _LN2
    else:
        loss = lam * kl + (1.0 - lam) * tv
    tl.store(losses + row, loss)
    tl.store(accepts + row, accept)

    if GRADIENT and OF_TV:
        share = tl.sum(below, 0)
        of_tv, of_kl = weight, weight
        if OBJECTIVE == "lk":
            of_tv = weight / floor
        elif OBJECTIVE == "lk-hybrid":
            of_tv, of_kl = weight * (1.0 - lam), weight * lam
        for start in range(0, count, BLOCK):
            at = start + lanes
            inside = at < count
            log_p, log_q, p, q = _p_and_q(z, t, ids, at, inside, log_sum, teacher_sum, REDUCED)
            dz = of_tv * q * (share - tl.where(q < p, 1.0, 0.0))
            if OBJECTIVE == "lk-hybrid":
                dz += of_kl * (q * mass - p)
            tl.store(z + at, dz.to(z.dtype.element_ty), mask=inside)


def compute_row_losses_triton(
    z_CV: Tensor,
    t_QU: Tensor,
    position_index_C: Tensor,
    weight_C: Tensor,
    draft_ids: Tensor | None,
    objective: Objective,
    eta: float,
    gradient: bool,
    block: int = _BLOCK,
    warps: int = _WARPS,
) -> RowLosses:
    """As `compute_row_losses_torch`; sums are fp32 whatever the logits are."""
    assert objective in OBJECTIVES and z_CV.stride(1) == t_QU.stride(1) == 1, objective
    rows, count = z_CV.shape
    sums = z_CV.new_empty(len(t_QU), dtype=torch.float32)
    bests = z_CV.new_empty(len(t_QU), dtype=torch.int32)
    loss, accept = z_CV.new_empty(2, rows, dtype=torch.float32)
    match = z_CV.new_empty(rows, dtype=torch.bool)
    _teacher_kernel[(len(t_QU),)](
        t_QU, sums, bests, t_QU.shape[1], t_QU.stride(0), BLOCK=block, num_warps=warps, num_stages=1
    )
    _rows_kernel[(rows,)](
        z_CV,
        t_QU,
        draft_ids,
        position_index_C,
        weight_C,
        sums,
        bests,
        loss,
        accept,
        match.view(torch.int8),
        count,
        z_CV.stride(0),
        t_QU.stride(0),
        eta,
        OBJECTIVE=objective,
        REDUCED=draft_ids is not None,
        GRADIENT=gradient,
        BLOCK=block,
        num_warps=warps,
        num_stages=1,
    )
    return RowLosses(loss, accept, match, bests[position_index_C].long())
