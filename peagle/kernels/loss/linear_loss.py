"""Fused linear layer and distillation loss: computes the loss of rows from hidden states without [R, V] logits.

Rows are sorted by teacher position and processed in chunks of a bounded number of logits, so that rows with the same
teacher position share its logits. The forward pass computes the gradient too: each chunk's student logits z are
overwritten with d loss/d z and multiplied back at once, so only d hidden (and d head, if the head is trained) is kept.

With p the teacher's and q the student's probabilities over the student's V tokens, acceptance = sum min(p, q):

    ce         -sum p log q
    kl         sum p (log p - log q)
    tv         1 - acceptance
    lk         -log acceptance
    lk-hybrid  lam kl + (1 - lam) tv, where lam = exp(-eta acceptance) is not differentiated

Over a reduced draft vocabulary, p is the teacher's softmax over its whole vocabulary, gathered at `draft_ids` and not
normalised again: probability outside the draft vocabulary contributes nothing.

Shapes: R rows, D student width, V student vocabulary, P teacher positions, T teacher width, U teacher vocabulary; C
rows and Q positions of one chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from peagle.config import LK_ETA, LOSS_LOGITS, OBJECTIVES, Objective
from peagle.kernels.loss.linear_loss_torch import compute_row_losses_torch
from peagle.kernels.loss.schedule import LossSchedule, StaticLossShape, build_loss_schedule
from peagle.kernels.loss.types import LinearLossOutput, RowLossFn, RowScale, Teacher
from peagle.kernels.triton_utils import supports_triton_float

__all__ = ["LinearLossOutput", "LossSchedule", "RowScale", "StaticLossShape", "Teacher", "linear_loss"]

_TORCH_COPIES = 8  # of a chunk's logits, made by the torch version: its chunks are smaller by this factor


def _add_head_gradient(into_VD: Tensor, dz_CV: Tensor, hidden_CD: Tensor) -> None:
    """Adds dz.T @ hidden to `into_VD` in fp32, in slices that keep the temporary product small."""
    half = dz_CV.is_cuda and dz_CV.dtype in (torch.bfloat16, torch.float16)
    step = max(1, LOSS_LOGITS // hidden_CD.shape[1])
    for start in range(0, len(into_VD), step):
        left = dz_CV[:, start : start + step].T
        into = into_VD[start : start + step]
        if half:
            into += torch.mm(left, hidden_CD, out_dtype=torch.float32)
        else:
            into += left.to(into.dtype) @ hidden_CD.to(into.dtype)


def _scale_rows(x_CD: Tensor, scale_C1: Tensor | None) -> Tensor:
    return x_CD if scale_C1 is None else x_CD * scale_C1


class LinearLossFunction(torch.autograd.Function):
    """Runs the chunk loop and saves the gradients for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_RD: Tensor,
        head_VD: Tensor,
        teacher: Teacher,
        schedule: LossSchedule,
        weight_R: Tensor,
        objective: Objective,
        eta: float,
        scale_by_earlier: RowScale | None,
        needs_grad: tuple[bool, bool],
        row_losses: RowLossFn,
    ) -> tuple[Tensor, ...]:
        exact = torch.float64 if hidden_RD.dtype == torch.float64 else torch.float32
        rows, device = len(hidden_RD), hidden_RD.device
        weight_R = weight_R.to(device, exact)
        loss_R, acceptance_R = hidden_RD.new_zeros(2, rows, dtype=exact)
        match_R = hidden_RD.new_zeros(rows, dtype=torch.bool)
        token_R = hidden_RD.new_zeros(rows, dtype=torch.long)
        dhidden_RD = torch.empty_like(hidden_RD) if needs_grad[0] else None
        dhead_VD = torch.zeros_like(head_VD, dtype=exact) if needs_grad[1] else None
        scale_R = hidden_RD.new_ones(rows, dtype=exact)
        for chunk in schedule.chunks:
            at = schedule.order_R[chunk.rows]
            hidden_CD = hidden_RD[at]
            z_CV = hidden_CD @ head_VD.T
            t_QU = teacher.hidden_PT[schedule.positions_P[chunk.positions]] @ teacher.head_UT.T
            index_C = schedule.position_index_R[chunk.rows] - chunk.positions.start
            found = row_losses(z_CV, t_QU, index_C, weight_R[at], teacher.draft_ids, objective, eta, any(needs_grad))
            loss_R.index_copy_(0, at, found.loss)
            acceptance_R.index_copy_(0, at, found.acceptance)
            match_R.index_copy_(0, at, found.match)
            token_R.index_copy_(0, at, found.teacher_token)
            # z now holds logit gradients. Both gradients are linear in each row, so rows can be scaled here.
            scale_C1 = None
            if scale_by_earlier is not None:
                scale_R.index_copy_(0, at, scale_by_earlier(acceptance_R, token_R)[at])
                scale_C1 = scale_R[at][:, None].to(hidden_CD.dtype)
            if dhidden_RD is not None:
                dhidden_RD.index_copy_(0, at, _scale_rows(z_CV @ head_VD, scale_C1))
            if dhead_VD is not None:
                _add_head_gradient(dhead_VD, z_CV, _scale_rows(hidden_CD, scale_C1))
        ctx.save_for_backward(dhidden_RD, dhead_VD)
        ctx.head_dtype = head_VD.dtype
        ctx.mark_non_differentiable(loss_R, acceptance_R, match_R, token_R)
        return (weight_R * scale_R * loss_R).sum(), loss_R, acceptance_R, match_R, token_R

    @staticmethod
    def backward(ctx: Any, dtotal: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        dhidden_RD, dhead_VD = ctx.saved_tensors
        dhidden = None if dhidden_RD is None else dhidden_RD * dtotal.to(dhidden_RD.dtype)
        dhead = None if dhead_VD is None else (dhead_VD * dtotal).to(ctx.head_dtype)
        return dhidden, dhead, *(None,) * 8


def _choose_row_losses(hidden_RD: Tensor, teacher: Teacher) -> RowLossFn:
    if not supports_triton_float(hidden_RD) or not supports_triton_float(teacher.hidden_PT):
        return compute_row_losses_torch
    from peagle.kernels.loss.linear_loss_triton import compute_row_losses_triton

    return compute_row_losses_triton


def linear_loss(
    hidden_RD: Tensor,
    head_VD: Tensor,
    teacher: Teacher,
    position_R: Tensor | LossSchedule,
    weight_R: Tensor,
    objective: Objective,
    eta: float = LK_ETA,
    max_logits: int = LOSS_LOGITS,
    scale_by_earlier: RowScale | None = None,
    row_losses: RowLossFn | None = None,
) -> LinearLossOutput:
    """Computes sum weight * loss, where row r learns the teacher's distribution at position_R[r].

    `eta` belongs to lk-hybrid. `max_logits` bounds the student's and the teacher's logits that exist at once. The order
    of the rows does not matter. Pass `position_R` on the CPU to avoid a device synchronisation, or pass a
    `LossSchedule` on the device: then nothing depends on the host, and `max_logits` is ignored.

    `scale_by_earlier` scales rows by results of other rows. It is called after each chunk and may read the results of
    rows with the same or an earlier teacher position only: those of later rows are not computed yet.
    `row_losses` overrides the choice between the torch and the Triton implementation.
    """
    assert objective in OBJECTIVES, objective
    assert hidden_RD.dtype == head_VD.dtype, (hidden_RD.dtype, head_VD.dtype)
    assert teacher.hidden_PT.dtype == teacher.head_UT.dtype, (teacher.hidden_PT.dtype, teacher.head_UT.dtype)
    vocab = len(teacher.head_UT) if teacher.draft_ids is None else len(teacher.draft_ids)
    assert len(head_VD) == vocab, (len(head_VD), vocab)
    row_losses = row_losses or _choose_row_losses(hidden_RD, teacher)
    if isinstance(position_R, LossSchedule):
        schedule = position_R
    else:
        if row_losses is compute_row_losses_torch:
            max_logits = max(1, max_logits // _TORCH_COPIES)
        max_chunk_rows = max(1, max_logits // max(len(head_VD), len(teacher.head_UT)))
        schedule = build_loss_schedule(position_R, max_chunk_rows, hidden_RD.device)
    rows = len(schedule.order_R)
    assert len(hidden_RD) == rows == len(weight_R), (len(hidden_RD), rows, len(weight_R))
    enabled = torch.is_grad_enabled()
    needs_grad = (enabled and hidden_RD.requires_grad, enabled and head_VD.requires_grad)
    teacher = Teacher(teacher.hidden_PT.detach(), teacher.head_UT.detach(), teacher.draft_ids)
    settings = (weight_R, objective, eta, scale_by_earlier, needs_grad, row_losses)
    return LinearLossOutput(*LinearLossFunction.apply(hidden_RD, head_VD, teacher, schedule, *settings))
