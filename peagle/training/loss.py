"""The training loss: objective, weight of every (anchor, depth) position, and metrics by depth.

The loss is a weighted mean over depths of the mean over the positions of a depth, so COD sampling does not reduce the
influence of deep positions.

A draft token helps only if every draft token before it is accepted. With `--loss-weighting acceptance`, position
(anchor a, depth d) has the further weight

    w(a, d) = product over i < d of  alpha(a, i) * [argmax of the target at (a, i) == the token of the text]

where alpha = sum min(p, q) is the acceptance probability of the current drafter. The indicator is 0 where a sampled
text leaves the greedy path: drafts behind that token belong to another text. The weight is not differentiated. With
`--loss-weighting uniform` every weight is 1.

Shapes: N tokens of a batch, R positions of any depth, D drafter width, K depths, M metrics.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from peagle.config import MAX_SPECULATIVE_TOKENS, TrainConfig
from peagle.kernels.loss.linear_loss import LossSchedule, Teacher, linear_loss
from peagle.models.decoder import Decoder
from peagle.models.drafter import Drafter
from peagle.training.hidden_states.online import TargetHiddenStates

NO_PREVIOUS = -1  # the position starts its chain (depth 0), or is padding
# Rows of metrics: number of positions; sums of loss, of acceptance probability sum min(p, q), of an argmax equal to the
# target's, and of one equal here and at all earlier depths, along the greedy text.
NUM_METRICS = 5


def depth_weights(num_depths: int, decay: float = 1.0) -> list[float]:
    """Weight of each depth in the loss: 1, decay, decay^2, .., normalized to sum 1."""
    raw = [decay**d for d in range(num_depths)]
    return [w / sum(raw) for w in raw]


def position_weights(counts: Sequence[int], decay: float = 1.0) -> Tensor:
    """Weight of one position of each depth: the depth's weight divided by its number of positions."""
    weights = depth_weights(len(counts), decay)
    each = [weight / max(count, 1) for weight, count in zip(weights, counts, strict=True)]
    return torch.tensor(each, dtype=torch.float64)


class ChainLinks:
    """Links the positions of a chunk to chains: `previous_R` is the index of the position one depth before, and
    `label_R` the token of the text that each position predicts.

    Worked example, two chains of positions 0 2 3 and 1 4: previous_R = -1 -1 0 2 1
        prefix_product of values a b c d e = 1, 1, a, a c, b
    """

    def __init__(self, previous_R: Tensor, label_R: Tensor) -> None:
        assert len(previous_R) == len(label_R), (len(previous_R), len(label_R))
        self.label_R = label_R
        end = len(previous_R)  # a sentinel that is its own predecessor
        jump = torch.where(previous_R == NO_PREVIOUS, end, previous_R)
        jump = torch.cat([jump, jump.new_full((1,), end)])
        self.jumps = [jump]  # predecessors at distance 1, 2, 4, ..
        while 1 << len(self.jumps) < MAX_SPECULATIVE_TOKENS:
            self.jumps.append(self.jumps[-1][self.jumps[-1]])

    def prefix_product(self, value_R: Tensor) -> Tensor:
        """The product of the values of all earlier positions of each position's chain."""
        value = torch.cat([value_R, value_R.new_ones(1)])
        product = value[self.jumps[0]]
        for jump in self.jumps:
            product = product * product[jump]
        return product[:-1]

    def acceptance_weight(self, acceptance_R: Tensor, teacher_token_R: Tensor) -> Tensor:
        """w of each position, from the acceptance probabilities and the target's argmax at all positions."""
        return self.prefix_product(acceptance_R * (teacher_token_R == self.label_R))


class DraftLoss:
    """Computes the loss of drafter outputs against the target's distributions, and adds up `metrics_MK` by depth.

    Metrics stay on the device; those of batches and ranks add up.
    """

    def __init__(
        self, drafter: Drafter, target: Decoder, states: TargetHiddenStates, cfg: TrainConfig, position_weight_K: Tensor
    ) -> None:
        """`position_weight_K`, on the device, may have a last entry 0 for the depth of padding positions."""
        device = states.hidden_ND.device
        draft_ids = None
        if drafter.d2t is not None:
            draft_ids = drafter.to_target_ids(torch.arange(len(drafter.d2t), device=drafter.d2t.device)).to(device)
        self.head = drafter.lm_head_weight
        self.teacher = Teacher(states.hidden_ND, target.lm_head.weight, draft_ids)
        self.cfg, self.position_weight_K = cfg, position_weight_K
        self.metrics_MK = torch.zeros(NUM_METRICS, len(position_weight_K), dtype=torch.float64, device=device)

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
            self.cfg.objective,
            scale_by_earlier=links.acceptance_weight if self.cfg.loss_weighting == "acceptance" else None,
        )
        match_R = result.match_R.to(self.position_weight_K.dtype)
        prefix_match_R = match_R * links.acceptance_weight(match_R, result.teacher_token_R)
        values = (torch.ones_like(depth_R), result.loss_R, result.acceptance_R, match_R, prefix_match_R)
        for total_K, value_R in zip(self.metrics_MK, values, strict=True):
            total_K.index_add_(0, depth_R, value_R.to(total_K.dtype))
        return result.total
