"""Acceptance weighting of the training loss: positions whose earlier drafts are unlikely to be accepted count less.

A draft token helps only if every draft token before it is accepted. With `--loss-weighting acceptance`, position
(anchor a, depth d) has the weight

    w(a, d) = product over i < d of  alpha(a, i) * [argmax of the target at (a, i) == the token of the text]

where alpha = sum min(p, q) is the acceptance probability of the current drafter. The indicator is 0 where a sampled
text leaves the greedy path: drafts behind that token belong to another text. The weight is not differentiated. With
`--loss-weighting uniform` every weight is 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from peagle.config import MAX_SPECULATIVE_TOKENS

NO_PREVIOUS = -1  # the position starts its chain (depth 0), or is padding


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
