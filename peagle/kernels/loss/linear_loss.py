"""Fused linear layer and distillation loss: computes the loss of rows from hidden states without [R, V] logits.

Rows are sorted by teacher position and processed in chunks of a bounded number of logits, so that rows with the same
teacher position share its logits. The forward pass computes the gradient too: each chunk's student logits z are
overwritten with d loss/d z and multiplied back at once, so only d hidden (and d head, if the head is trained) is kept.

With p the teacher's and q the student's probabilities over the student's V tokens, acceptance = sum min(p, q):

    ce         -sum p log q
    kl         sum p (log p - log q)
    tv         1 - acceptance
    lk         -log acceptance
    lk-hybrid  lam kl + (1 - lam) tv, where lam = exp(-LK_ETA acceptance) is not differentiated

Over a reduced draft vocabulary, p is the teacher's softmax over its whole vocabulary, gathered at `draft_ids` and not
normalised again: probability outside the draft vocabulary contributes nothing.

Shapes: R rows, D student width, V student vocabulary, P teacher positions, T teacher width, U teacher vocabulary; C
rows and Q positions of one chunk.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from peagle.config import LK_ETA, LOSS_LOGITS, MIN_ACCEPTANCE, OBJECTIVES, Objective
from peagle.kernels.host_transfer import copy_to_device
from peagle.kernels.triton_utils import supports_triton_float

_TORCH_COPIES = 8  # of a chunk's logits, made by the torch version: its chunks are smaller by this factor

RowLossFn = Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]  # see `compute_row_losses_torch`

# (acceptance_R, teacher_token_R) -> scale_R, a factor on each row's weight that is not differentiated.
RowScale = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Teacher:
    """The teacher's distribution at position i is softmax(hidden_PT[i] @ head_UT.T)."""

    hidden_PT: Tensor
    head_UT: Tensor
    draft_ids: Tensor | None = None  # [V] teacher token ids of a reduced draft vocabulary; None: V = U


@dataclass(frozen=True)
class LinearLossOutput:
    """Results of `linear_loss`. Per-row tensors are in the order of the input rows and carry no gradient."""

    total: Tensor  # sum of weight * scale * loss; differentiable in the student's hidden states and head
    loss_R: Tensor
    acceptance_R: Tensor  # sum min(p, q)
    match_R: Tensor  # bool: student and teacher have the same argmax token (the lowest id wins ties)
    teacher_token_R: Tensor  # the teacher's argmax token


@dataclass(frozen=True)
class LossSchedule:
    """Rows sorted by teacher position and cut into chunks.

    Worked example, at most 3 rows or positions per chunk, teacher positions 7 2 7 2 5 7:
        order_R 1 3 4 0 2 5, positions_P 2 5 7, position_index_R 0 0 1 2 2 2
        chunks: rows 0:3 with positions 0:2, rows 3:6 with positions 2:3
    """

    order_R: Tensor  # row indices, sorted by teacher position
    positions_P: Tensor  # the distinct teacher positions, ascending
    position_index_R: Tensor  # index into positions_P of each sorted row
    chunks: list[tuple[slice, slice]]  # of the sorted rows, and of positions_P


def build_loss_schedule(position_R: Tensor, max_chunk_rows: int, device: torch.device) -> LossSchedule:
    """Builds a schedule with at most `max_chunk_rows` rows and positions per chunk.

    `position_R` is each row's teacher position. Pass it on the CPU to avoid a device synchronisation.
    """
    position = position_R.cpu().numpy()
    fits_16_bits = len(position) and position.max() < 1 << 16  # numpy then uses radix sort
    order = np.argsort(position.astype(np.uint16) if fits_16_bits else position, kind="stable")
    positions, begins = np.unique(position[order], return_index=True)
    ends = np.append(begins[1:], len(order))  # end of each position's rows
    position_index = np.repeat(np.arange(len(positions)), ends - begins)
    chunks: list[tuple[slice, slice]] = []
    row = 0
    while row < len(order):
        first = int(position_index[row])
        last = int(np.searchsorted(ends, row + max_chunk_rows, side="right"))  # positions before it end in the chunk
        last = min(last, first + max_chunk_rows)
        # One position may have more rows than fit into a chunk.
        end = int(ends[last - 1]) if last > first else row + max_chunk_rows
        chunks.append((slice(row, end), slice(first, max(last, first + 1))))
        row = end

    def to_device(x: NDArray[np.int64]) -> Tensor:
        return copy_to_device(torch.from_numpy(x), device)

    return LossSchedule(to_device(order), to_device(positions), to_device(position_index), chunks)


@dataclass(frozen=True)
class StaticLossShape:
    """Fixed chunk sizes for CUDA graphs: chunks of `chunk_rows` rows with `chunk_positions` positions each.

    Worked example, 7 rows, chunks of 3 rows with 2 positions, teacher positions 7 2 7 2 5: rows 5 and 6 are padding.
        order_R 1 3 4 0 2 5 6, chunks 1 3 4 | 0 2 5 | 6, positions_P 2 5 | 7 7 | 7 7, position_index_R 0 0 1 2 2 2 4
    """

    num_rows: int
    chunk_rows: int
    chunk_positions: int

    @property
    def chunks(self) -> list[tuple[slice, slice]]:
        starts = range(0, self.num_rows, self.chunk_rows)
        width = self.chunk_positions
        return [
            (slice(row, min(row + self.chunk_rows, self.num_rows)), slice(i * width, (i + 1) * width))
            for i, row in enumerate(starts)
        ]

    def build_schedule(self, position_R: Tensor) -> LossSchedule | None:
        """Builds a schedule on the CPU, or returns None if a chunk has more positions than `chunk_positions`.

        Padding rows repeat the last teacher position; give them weight 0.
        """
        position = position_R.numpy()
        count = len(position)
        assert 0 < count <= self.num_rows, (count, self.num_rows)
        order = np.arange(self.num_rows)
        order[:count] = np.argsort(position, kind="stable")
        sorted_position = np.full(self.num_rows, position.max())
        sorted_position[:count] = position[order[:count]]
        positions = np.full(len(self.chunks) * self.chunk_positions, sorted_position[-1])
        position_index = np.zeros(self.num_rows, dtype=np.int64)
        for rows, chunk_positions in self.chunks:
            own = sorted_position[rows]
            rank = np.concatenate([[0], np.cumsum(own[1:] != own[:-1])])
            if rank[-1] >= self.chunk_positions:
                return None
            position_index[rows] = chunk_positions.start + rank
            positions[chunk_positions.start + rank] = own
        order_R, positions_P, index_R = (torch.from_numpy(x) for x in (order, positions, position_index))
        return LossSchedule(order_R, positions_P, index_R, self.chunks)


def compute_row_losses_torch(
    z_CV: Tensor,
    t_QU: Tensor,
    position_index_C: Tensor,
    weight_C: Tensor,
    draft_ids: Tensor | None,
    objective: Objective,
    gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes loss, acceptance, match and teacher token [C] of rows with student logits z and teacher logits
    t[position_index]; see `LinearLossOutput`. With `gradient`, overwrites z with the gradient of sum weight * loss.
    """
    exact = torch.float64 if z_CV.dtype == torch.float64 else torch.float32
    log_q = z_CV.to(exact).log_softmax(-1)
    log_p_QU = t_QU.to(exact).log_softmax(-1)
    log_p = (log_p_QU if draft_ids is None else log_p_QU[:, draft_ids])[position_index_C]
    q, p = log_q.exp(), log_p.exp()
    acceptance = torch.minimum(p, q).sum(-1)
    ce = -(p * log_q).sum(-1)
    kl = ce + (p * log_p.masked_fill(p == 0, 0.0)).sum(-1)
    tv = 1 - acceptance
    lam = (-LK_ETA * acceptance).exp()
    floor = acceptance.clamp(min=MIN_ACCEPTANCE)
    loss = {"ce": ce, "kl": kl, "tv": tv, "lk": -floor.log(), "lk-hybrid": lam * kl + (1 - lam) * tv}[objective]
    student_token = z_CV.argmax(-1) if draft_ids is None else draft_ids[z_CV.argmax(-1)]
    teacher_token = t_QU.argmax(-1)[position_index_C]
    if gradient:
        below = q < p
        dz_kl = q * p.sum(-1, keepdim=True) - p
        dz_tv = q * ((q * below).sum(-1, keepdim=True) - below.to(exact))
        lam, floor = lam[:, None], floor[:, None]
        dz = {"ce": dz_kl, "kl": dz_kl, "tv": dz_tv, "lk": dz_tv / floor, "lk-hybrid": lam * dz_kl + (1 - lam) * dz_tv}
        z_CV.copy_(dz[objective] * weight_C[:, None])
    return loss, acceptance, student_token == teacher_token, teacher_token


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
        scale_by_earlier: RowScale | None,
        needs_grad: tuple[bool, bool],
        row_losses: RowLossFn,
    ) -> tuple[Tensor, ...]:
        exact = torch.float64 if hidden_RD.dtype == torch.float64 else torch.float32
        rows, device = len(hidden_RD), hidden_RD.device
        weight_R = weight_R.to(device, exact)
        loss_R, acceptance_R = hidden_RD.new_zeros(2, rows, dtype=exact)
        match_R, token_R = (hidden_RD.new_zeros(rows, dtype=dtype) for dtype in (torch.bool, torch.long))
        results = (loss_R, acceptance_R, match_R, token_R)
        dhidden_RD = torch.empty_like(hidden_RD) if needs_grad[0] else None
        dhead_VD = torch.zeros_like(head_VD, dtype=exact) if needs_grad[1] else None
        scale_R = hidden_RD.new_ones(rows, dtype=exact)
        for chunk_rows, chunk_positions in schedule.chunks:
            at = schedule.order_R[chunk_rows]
            hidden_CD = hidden_RD[at]
            z_CV = hidden_CD @ head_VD.T
            t_QU = teacher.hidden_PT[schedule.positions_P[chunk_positions]] @ teacher.head_UT.T
            index_C = schedule.position_index_R[chunk_rows] - chunk_positions.start
            found = row_losses(z_CV, t_QU, index_C, weight_R[at], teacher.draft_ids, objective, any(needs_grad))
            for result_R, found_C in zip(results, found, strict=True):
                result_R.index_copy_(0, at, found_C)
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
        ctx.mark_non_differentiable(*results)
        return (weight_R * scale_R * loss_R).sum(), *results

    @staticmethod
    def backward(ctx: Any, dtotal: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        dhidden_RD, dhead_VD = ctx.saved_tensors
        dhidden = None if dhidden_RD is None else dhidden_RD * dtotal.to(dhidden_RD.dtype)
        dhead = None if dhead_VD is None else (dhead_VD * dtotal).to(ctx.head_dtype)
        return dhidden, dhead, *(None,) * 7


def linear_loss(
    hidden_RD: Tensor,
    head_VD: Tensor,
    teacher: Teacher,
    position_R: Tensor | LossSchedule,
    weight_R: Tensor,
    objective: Objective,
    max_logits: int = LOSS_LOGITS,
    scale_by_earlier: RowScale | None = None,
    row_losses: RowLossFn | None = None,
) -> LinearLossOutput:
    """Computes sum weight * loss, where row r learns the teacher's distribution at position_R[r].

    `max_logits` bounds the student's and the teacher's logits that exist at once. The order of the rows does not
    matter. Pass `position_R` on the CPU to avoid a device synchronisation, or pass a
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
    if row_losses is None:
        row_losses = compute_row_losses_torch
        if supports_triton_float(hidden_RD) and supports_triton_float(teacher.hidden_PT):
            from peagle.kernels.loss.linear_loss_triton import compute_row_losses_triton

            row_losses = compute_row_losses_triton
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
    settings = (weight_R, objective, scale_by_earlier, needs_grad, row_losses)
    return LinearLossOutput(*LinearLossFunction.apply(hidden_RD, head_VD, teacher, schedule, *settings))
