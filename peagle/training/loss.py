"""What rows are asked, how much each counts, and what came of it.

Knows nothing about attention or how rows were computed. Depths count evenly, whatever share of them was sampled: a
row's weight is its depth's weight over the rows of that depth, so the loss is a weighted mean of per-depth means. By
reach, a row counts as much of that as the drafts before it in its chain are likely to be accepted, as the drafter is
now: behind a word that nobody can foretell, or that was sampled against the odds, there is nothing to learn that would
ever be used. By start, a whole chain counts by the chance that a round begins with it. By value, a row counts by the
drafts it opens the way to.

Shapes: N tokens of a batch, R rows of any depths, D drafter width, K depths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.config import Objective, TrainConfig
from peagle.kernels.loss.linear_loss import LossSchedule, Teacher, linear_loss
from peagle.models.decoder import Decoder
from peagle.models.drafter import Drafter
from peagle.training.hidden_states.online import TargetHiddenStates
from peagle.training.loss_weighting import Links


@dataclass(frozen=True)
class LossSettings:
    """What rows are asked to do."""

    objective: Objective
    sharpen: float = 1.0  # times the target's logits
    by_reach: bool = False
    by_start: bool = False
    by_value: bool = False

    @classmethod
    def of(cls, cfg: TrainConfig) -> LossSettings:
        return cls(cfg.objective, cfg.sharpen, cfg.by_reach, cfg.by_start, cfg.by_value)

    def __str__(self) -> str:
        ways = {"by reach": self.by_reach, "by start": self.by_start, "by value": self.by_value}
        *others, last = [""] + [f" {way}" for way, on in ways.items() if on]
        counted = f"{','.join(others[1:])} and{last}" if len(others) > 1 else last
        return self.objective + counted + (f" against logits times {self.sharpen:g}" if self.sharpen != 1 else "")


@dataclass
class DepthMetrics:
    """By depth, on the device: sums over rows, so totals of batches and ranks add up."""

    rows_K: Tensor
    loss_K: Tensor
    accept_K: Tensor  # of sum min(p, q): the chance that a sampled token is accepted
    match_K: Tensor  # of rows whose likeliest token is the target's
    unbroken_K: Tensor  # of those that match as all before them do, in text the target would write: greedy's accepted

    @classmethod
    def none(cls, depths: int, device: torch.device) -> DepthMetrics:
        return cls(*torch.zeros(5, depths, dtype=torch.float64, device=device))

    def add(self, depth_R: Tensor, *values: Tensor) -> None:
        """`values` of rows of these depths: loss, accept, match, unbroken."""
        own = self.tensors()
        for into, value in zip(own, (torch.ones_like(depth_R), *values), strict=True):
            into.index_add_(0, depth_R, value.to(into.dtype))

    def tensors(self) -> tuple[Tensor, ...]:
        return self.rows_K, self.loss_K, self.accept_K, self.match_K, self.unbroken_K

    def __add__(self, other: DepthMetrics) -> DepthMetrics:
        return DepthMetrics(*(a + b for a, b in zip(self.tensors(), other.tensors(), strict=True)))


def depth_weights(depths: int, decay: float = 1.0) -> list[float]:
    """Each depth's part of the loss, summing to 1: 1, decay, decay^2, .. A decay of 1 counts all depths alike."""
    raw = [decay**d for d in range(depths)]
    return [w / sum(raw) for w in raw]


def row_weights(counts: Sequence[int], weights: Sequence[float]) -> Tensor:
    """What one row of each depth counts."""
    each = [weight / max(count, 1) for weight, count in zip(weights, counts, strict=True)]
    return torch.tensor(each, dtype=torch.float64)


class DraftLoss:
    """Asks rows of a batch for the target's own distributions."""

    def __init__(
        self,
        drafter: Drafter,
        target: Decoder,
        states: TargetHiddenStates,
        aim: LossSettings,
        counts: tuple[int, ...],
        weights: list[float],
        weight_K: Tensor | None = None,
        depths: int | None = None,
    ) -> None:
        """`weight_K`, on the device, is what a row of each depth counts, if that is known already; there may be more of
        them than `depths`, for nobody's rows."""
        self.head, device = drafter.lm_head_weight, states.hidden_ND.device
        draft_ids = None
        if drafter.d2t is not None:
            draft_ids = drafter.to_target_ids(torch.arange(len(drafter.d2t), device=drafter.d2t.device)).to(device)
        self.teacher = Teacher(states.hidden_ND * aim.sharpen, target.lm_head.weight, draft_ids)
        self.aim = aim
        self.weight_K = row_weights(counts, weights).to(device) if weight_K is None else weight_K
        self.depths = len(self.weight_K) if depths is None else depths
        self.totals = DepthMetrics.none(len(self.weight_K), device)
        self.kept_last = torch.zeros((), device=device)  # the chance that what the last depth-0 row asked for was

    def ask(self, said_RD: Tensor, depth_R: Tensor, question_R: Tensor | LossSchedule, links: Links) -> Tensor:
        """The rows' part of the loss. `question_R`, on the CPU, is the token each is asked for; or the plan of who is
        asked where.

        The token's distribution is what the target said at the one before it.
        """
        where = question_R if isinstance(question_R, LossSchedule) else question_R - 1
        aim, last, counted = self.aim, self.depths - 1, None
        if aim.by_reach or aim.by_start or aim.by_value:
            kept_earlier = self.kept_last if aim.by_start else None
            left_R = (last - depth_R).clamp(min=0) if aim.by_value else None
            counted = links.counting(aim.by_reach, kept_earlier, left_R, last)
        asked = linear_loss(
            said_RD,
            self.head,
            self.teacher,
            where,
            self.weight_K[depth_R],
            aim.objective,
            scale_by_earlier=None if counted is None else counted.share,
            scale_by_all=counted.worth if counted is not None and aim.by_value else None,
        )
        if aim.by_start and len(links.drafted_F):
            self.kept_last = links.kept(asked.acceptance_R, asked.teacher_token_R)[len(links.drafted_F) - 1]
        match_R = asked.match_R.to(self.weight_K.dtype)
        unbroken_R = match_R * links.reach(match_R, asked.teacher_token_R)
        self.totals.add(depth_R, asked.loss_R, asked.acceptance_R, match_R, unbroken_R)
        return asked.total
