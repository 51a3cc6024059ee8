"""The training loss: objective, weight of every (anchor, depth) position, and metrics by depth.

The loss is a weighted mean over depths of the mean over the positions of a depth, so COD sampling does not reduce the
influence of deep positions. Acceptance weighting (`loss_weighting`) scales single positions further.

Shapes: N tokens of a batch, R positions of any depth, D drafter width, K depths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.config import LossWeighting, Objective, TrainConfig
from peagle.kernels.loss.linear_loss import LossSchedule, Teacher, linear_loss
from peagle.models.decoder import Decoder
from peagle.models.drafter import Drafter
from peagle.training.hidden_states.online import TargetHiddenStates
from peagle.training.loss_weighting import ChainLinks


@dataclass(frozen=True)
class LossSettings:
    objective: Objective
    weighting: LossWeighting = "uniform"

    @classmethod
    def from_config(cls, cfg: TrainConfig) -> LossSettings:
        return cls(cfg.objective, cfg.loss_weighting)


@dataclass
class DepthMetrics:
    """Sums over positions by depth, on the device; metrics of batches and ranks add up."""

    count_K: Tensor
    loss_K: Tensor
    accept_K: Tensor  # acceptance probability, sum min(p, q)
    match_K: Tensor  # argmax equals the target's
    prefix_match_K: Tensor  # argmax equals the target's here and at all earlier depths, along the greedy text

    @classmethod
    def zeros(cls, num_depths: int, device: torch.device) -> DepthMetrics:
        return cls(*torch.zeros(5, num_depths, dtype=torch.float64, device=device))

    def add(self, depth_R: Tensor, *values: Tensor) -> None:
        """Adds positions of these depths; `values` are loss, accept, match and prefix_match."""
        for total_K, value_R in zip(self.tensors(), (torch.ones_like(depth_R), *values), strict=True):
            total_K.index_add_(0, depth_R, value_R.to(total_K.dtype))

    def tensors(self) -> tuple[Tensor, ...]:
        return self.count_K, self.loss_K, self.accept_K, self.match_K, self.prefix_match_K

    def __add__(self, other: DepthMetrics) -> DepthMetrics:
        return DepthMetrics(*(a + b for a, b in zip(self.tensors(), other.tensors(), strict=True)))


def depth_weights(num_depths: int, decay: float = 1.0) -> list[float]:
    """Weight of each depth in the loss: 1, decay, decay^2, .., normalized to sum 1."""
    raw = [decay**d for d in range(num_depths)]
    return [w / sum(raw) for w in raw]


def position_weights(counts: Sequence[int], weights: Sequence[float]) -> Tensor:
    """Weight of one position of each depth: the depth's weight divided by its number of positions."""
    each = [weight / max(count, 1) for weight, count in zip(weights, counts, strict=True)]
    return torch.tensor(each, dtype=torch.float64)


class DraftLoss:
    """Computes the loss of drafter outputs against the target's distributions, and collects metrics."""

    def __init__(
        self,
        drafter: Drafter,
        target: Decoder,
        states: TargetHiddenStates,
        settings: LossSettings,
        position_weight_K: Tensor,
    ) -> None:
        """`position_weight_K`, on the device, may have a last entry 0 for the depth of padding positions."""
        device = states.hidden_ND.device
        draft_ids = None
        if drafter.d2t is not None:
            draft_ids = drafter.to_target_ids(torch.arange(len(drafter.d2t), device=drafter.d2t.device)).to(device)
        self.head = drafter.lm_head_weight
        self.teacher = Teacher(states.hidden_ND, target.lm_head.weight, draft_ids)
        self.settings, self.position_weight_K = settings, position_weight_K
        self.metrics = DepthMetrics.zeros(len(position_weight_K), device)

    def compute(
        self, output_RD: Tensor, depth_R: Tensor, label_positions: Tensor | LossSchedule, links: ChainLinks
    ) -> Tensor:
        """The loss of positions with these drafter outputs.

        `label_positions` is, on the CPU, the batch index of the token each position predicts, or a `LossSchedule` on
        the device. The target's distribution of a token is its output at the token before.
        """
        teacher_positions = label_positions if isinstance(label_positions, LossSchedule) else label_positions - 1
        result = linear_loss(
            output_RD,
            self.head,
            self.teacher,
            teacher_positions,
            self.position_weight_K[depth_R],
            self.settings.objective,
            scale_by_earlier=links.acceptance_weight if self.settings.weighting == "acceptance" else None,
        )
        match_R = result.match_R.to(self.position_weight_K.dtype)
        prefix_match_R = match_R * links.acceptance_weight(match_R, result.teacher_token_R)
        self.metrics.add(depth_R, result.loss_R, result.acceptance_R, match_R, prefix_match_R)
        return result.total
