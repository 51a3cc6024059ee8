# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, check-untyped-defs=False
"""Row losses in Triton: softmax, loss and gradient of one chunk's logits.

`_teacher_kernel`: a program handles one teacher position: log-sum-exp and argmax of its logits. Rows with the same
position share the result.
`_row_loss_kernel`: a program handles one row and passes over its logits twice for ce and kl, three times for the other
losses, whose gradient needs a sum that is known only at the end. The first pass finds log-sum-exp and argmax, the
second compares p and q, the last overwrites the logits with the gradient. A row's logits stay in the L2 between passes,
and so do the teacher's, because rows of one position are adjacent.

Sums are kept per element of a block in fp32 and reduced at the end, so no pass waits for a reduction.

Shapes: C rows, Q teacher positions, V student vocabulary, U teacher vocabulary. All logarithms are in base 2.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.config import LK_ETA, MIN_ACCEPTANCE, OBJECTIVES, Objective

_LOG2E = tl.constexpr(math.log2(math.e))
_LN2 = tl.constexpr(math.log(2.0))
_LOWEST = tl.constexpr(-1e30)  # below every logit; unlike -inf, subtracting it from itself gives no nan
_MIN_ACCEPTANCE = tl.constexpr(MIN_ACCEPTANCE)

_BLOCK, _WARPS = 4096, 16  # 16 bytes of bf16 per thread; many threads per row, so that few rows share the L2


@triton.jit
def _log_sum_and_argmax(x, count, BLOCK: tl.constexpr):
    """Returns log2 of the sum of e ** x, and the index of the first maximum, of `count` logits."""
    lanes = tl.arange(0, BLOCK)
    running_max = tl.zeros((BLOCK,), tl.float32) + _LOWEST
    running_sum = tl.zeros((BLOCK,), tl.float32)
    max_at = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, count, BLOCK):
        at = start + lanes
        logit = tl.load(x + at, mask=at < count, other=float("-inf")).to(tl.float32) * _LOG2E
        larger = logit > running_max
        rescale = tl.exp2(-tl.abs(logit - running_max))  # the smaller relative to the larger
        running_sum = tl.where(larger, running_sum * rescale + 1.0, running_sum + rescale)
        max_at = tl.where(larger, at, max_at)
        running_max = tl.where(larger, logit, running_max)
    top = tl.max(running_max, 0)
    log_sum = top + tl.log2(tl.sum(running_sum * tl.exp2(running_max - top), 0))
    return log_sum, tl.min(tl.where(running_max == top, max_at, 2147483647), 0)


@triton.jit
def _teacher_kernel(t, log_sums, tokens, count, t_stride, BLOCK: tl.constexpr):
    position = tl.program_id(0)
    log_sum, token = _log_sum_and_argmax(t + position.to(tl.int64) * t_stride, count, BLOCK)
    tl.store(log_sums + position, log_sum)
    tl.store(tokens + position, token)


@triton.jit
def _load_p_and_q(z, t, draft_ids, at, inside, log_sum, teacher_log_sum, REDUCED: tl.constexpr):
    """Returns log p, log q, p and q; p and q are 0 where not `inside`."""
    logit = tl.load(z + at, mask=inside, other=float("-inf")).to(tl.float32) * _LOG2E
    if REDUCED:
        teacher = tl.load(t + tl.load(draft_ids + at, mask=inside, other=0), mask=inside, other=float("-inf"))
    else:
        teacher = tl.load(t + at, mask=inside, other=float("-inf"))
    log_q, log_p = logit - log_sum, teacher.to(tl.float32) * _LOG2E - teacher_log_sum
    return log_p, log_q, tl.exp2(log_p), tl.exp2(log_q)


@triton.jit
def _sum_draft_mass(t, draft_ids, count, teacher_log_sum, BLOCK: tl.constexpr):
    """Returns the teacher's probability of the draft vocabulary."""
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, count, BLOCK):
        at = start + lanes
        inside = at < count
        teacher = tl.load(t + tl.load(draft_ids + at, mask=inside, other=0), mask=inside, other=float("-inf"))
        total += tl.exp2(teacher.to(tl.float32) * _LOG2E - teacher_log_sum)
    return tl.sum(total, 0)


@triton.jit
def _row_loss_kernel(
    z, t, draft_ids, position_indices, weights, teacher_log_sums, teacher_tokens,
    losses, acceptances, matches,
    count, z_stride, t_stride, eta,
    OBJECTIVE: tl.constexpr, REDUCED: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes loss, acceptance and match of one row; with GRADIENT overwrites z with weight * d loss/d z."""
    row = tl.program_id(0)
    position = tl.load(position_indices + row)
    z += row.to(tl.int64) * z_stride
    t += position.to(tl.int64) * t_stride
    teacher_log_sum, teacher_token = tl.load(teacher_log_sums + position), tl.load(teacher_tokens + position)
    weight = tl.load(weights + row)
    log_sum, token = _log_sum_and_argmax(z, count, BLOCK)
    if REDUCED:
        token = tl.load(draft_ids + token).to(tl.int32)
    tl.store(matches + row, (token == teacher_token).to(tl.int8))

    lanes = tl.arange(0, BLOCK)
    overlap = tl.zeros((BLOCK,), tl.float32)  # sum min(p, q)
    below = tl.zeros((BLOCK,), tl.float32)  # sum of q where q < p
    divergence = tl.zeros((BLOCK,), tl.float32)  # ce or kl
    IS_KL: tl.constexpr = OBJECTIVE == "ce" or OBJECTIVE == "kl"
    HAS_TV: tl.constexpr = not IS_KL
    mass = 1.0  # sum p
    if REDUCED and (IS_KL or OBJECTIVE == "lk-hybrid"):
        mass = _sum_draft_mass(t, draft_ids, count, teacher_log_sum, BLOCK)
    for start in range(0, count, BLOCK):
        at = start + lanes
        inside = at < count
        log_p, log_q, p, q = _load_p_and_q(z, t, draft_ids, at, inside, log_sum, teacher_log_sum, REDUCED)
        overlap += tl.minimum(p, q)
        if OBJECTIVE == "ce":
            divergence -= tl.where(p > 0.0, p * log_q, 0.0)
        elif OBJECTIVE == "kl" or OBJECTIVE == "lk-hybrid":
            divergence += tl.where(p > 0.0, p * (log_p - log_q), 0.0)
        if HAS_TV:
            below += tl.where(q < p, q, 0.0)
        elif GRADIENT:
            tl.store(z + at, ((q * mass - p) * weight).to(z.dtype.element_ty), mask=inside)
    acceptance = tl.sum(overlap, 0)
    floor = tl.maximum(acceptance, _MIN_ACCEPTANCE)
    kl = tl.sum(divergence, 0) * _LN2
    tv = 1.0 - acceptance
    lam = tl.exp2(-eta * acceptance * _LOG2E)
    if IS_KL:
        loss = kl
    elif OBJECTIVE == "tv":
        loss = tv
    elif OBJECTIVE == "lk":
        loss = -tl.log2(floor) * _LN2
    else:
        loss = lam * kl + (1.0 - lam) * tv
    tl.store(losses + row, loss)
    tl.store(acceptances + row, acceptance)

    if GRADIENT and HAS_TV:
        sum_below = tl.sum(below, 0)
        tv_weight, kl_weight = weight, weight
        if OBJECTIVE == "lk":
            tv_weight = weight / floor
        elif OBJECTIVE == "lk-hybrid":
            tv_weight, kl_weight = weight * (1.0 - lam), weight * lam
        for start in range(0, count, BLOCK):
            at = start + lanes
            inside = at < count
            log_p, log_q, p, q = _load_p_and_q(z, t, draft_ids, at, inside, log_sum, teacher_log_sum, REDUCED)
            dz = tv_weight * q * (sum_below - tl.where(q < p, 1.0, 0.0))
            if OBJECTIVE == "lk-hybrid":
                dz += kl_weight * (q * mass - p)
            tl.store(z + at, dz.to(z.dtype.element_ty), mask=inside)


def compute_row_losses_triton(
    z_CV: Tensor,
    t_QU: Tensor,
    position_index_C: Tensor,
    weight_C: Tensor,
    draft_ids: Tensor | None,
    objective: Objective,
    gradient: bool,
    block: int = _BLOCK,
    warps: int = _WARPS,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `compute_row_losses_torch`; sums are fp32 for all dtypes."""
    assert objective in OBJECTIVES and z_CV.stride(1) == t_QU.stride(1) == 1, objective
    rows, count = z_CV.shape
    teacher_log_sums = z_CV.new_empty(len(t_QU), dtype=torch.float32)
    teacher_tokens = z_CV.new_empty(len(t_QU), dtype=torch.int32)
    loss, acceptance = z_CV.new_empty(2, rows, dtype=torch.float32)
    match = z_CV.new_empty(rows, dtype=torch.bool)
    launch = {"BLOCK": block, "num_warps": warps, "num_stages": 1}
    _teacher_kernel[(len(t_QU),)](t_QU, teacher_log_sums, teacher_tokens, t_QU.shape[1], t_QU.stride(0), **launch)
    _row_loss_kernel[(rows,)](
        z_CV, t_QU, draft_ids, position_index_C, weight_C, teacher_log_sums, teacher_tokens,
        loss, acceptance, match.view(torch.int8), count, z_CV.stride(0), t_QU.stride(0), LK_ETA,
        OBJECTIVE=objective, REDUCED=draft_ids is not None, GRADIENT=gradient, **launch,
    )  # fmt: skip
    return loss, acceptance, match, teacher_tokens[position_index_C].long()
