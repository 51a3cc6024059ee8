"""Shared types of the fused linear loss.

Shapes: R rows, D student width, V student vocabulary, P teacher positions, T teacher width, U teacher vocabulary; C
rows and Q positions of one chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

MIN_ACCEPTANCE = 1e-30  # lower bound of the acceptance inside a logarithm: keeps the loss `lk` finite


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
class RowLosses:
    """Results of one chunk's rows, [C] each; fields as in `LinearLossOutput`."""

    loss: Tensor
    acceptance: Tensor
    match: Tensor
    teacher_token: Tensor


# Computes the row losses of one chunk from its logits; with gradients, overwrites the student's logits with them.
RowLossFn = Callable[..., RowLosses]

# (acceptance_R, teacher_token_R) -> scale_R, a factor on each row's weight that is not differentiated.
RowScale = Callable[[Tensor, Tensor], Tensor]
