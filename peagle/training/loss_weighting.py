"""How much each row of the training loss counts, from the rows before and behind it in its chain of draft tokens.

Rows may stand in chains, a draft behind a draft. Then a row counts by its reach: the product, over all rows before it,
of `acceptance` where the text goes on with the teacher's likeliest token and of 0 where it does not. Drafts behind one
that is refused are of no use, and where a sampled text leaves the likely path, the draft behind is asked about another
text than drafts would have led to. The reach is not differentiated. A row's question comes behind those of the rows
before it, so these are known when it is asked.

Chains may count by where they begin, too. A round of drafting begins behind a token that the target had to say itself,
most often since the draft of it was refused; texts are mostly easy, and rounds mostly begin where they are not. So a
chain counts `ANYWAY` at least, and all the more the less likely a draft of the token before it was kept.

And rows may count by what they open: a draft that is kept lets the one behind it be looked at. By value a row counts 1
and the drafts behind it that would then be kept. Times its reach that is what it adds to a round, so with `tv` the
gradient is that of the drafts kept in a round. Where a chain was not sampled on, what would come is taken to be kept as
likely as its last row.
"""

from __future__ import annotations

from copy import copy

import torch
from torch import Tensor

from peagle.config import MAX_SPECULATIVE_TOKENS

NOBODY = -1  # before a chain's first row
EARLIER = -2  # the last row of the part that was asked before this one
ANYWAY = 0.2  # that a round begins behind a draft that is sure to be kept, of one that is sure to be refused


class Links:
    """Which rows stand behind which (`before_R`, or `NOBODY`), and how the text goes on where each is asked.

    Worked example, two chains of rows 0 2 3 and 1 4: before -1 -1 0 2 1
        values a b c d e -> before each: 1, 1, a, a c, b

    The first rows of chains come first. `drafted_F` says of each which other was asked for the token it reads last, or
    NOBODY where the text begins. Above, if the anchors of the two are neighbours: -1 0.
    """

    by_reach = True
    kept_earlier: Tensor | None = None
    left_R: Tensor | None = None
    most_left = 0

    def __init__(self, before_R: Tensor, text_R: Tensor, drafted_F: Tensor) -> None:
        assert len(before_R) == len(text_R), (len(before_R), len(text_R))
        self.text_R, self.drafted_F = text_R, drafted_F
        rows = len(before_R)
        at = torch.where(before_R == NOBODY, rows, before_R)
        at = torch.cat([at, at.new_full((1,), rows)])  # behind the rows is nobody, before whom is nobody
        self.jumps = [at]  # by 1, 2, 4, .. rows
        while 1 << len(self.jumps) < MAX_SPECULATIVE_TOKENS:
            self.jumps.append(self.jumps[-1][self.jumps[-1]])

    def product(self, value_R: Tensor) -> Tensor:
        """Of the values of all rows before each."""
        value = torch.cat([value_R, value_R.new_ones(1)])
        product = value[self.jumps[0]]
        for jump in self.jumps:
            product = product * product[jump]
        return product[:-1]

    def kept(self, accept_R: Tensor, best_R: Tensor) -> Tensor:
        """The chance that what a row says is, where the text is what drafts would have led to."""
        return accept_R * (best_R == self.text_R)

    def reach(self, accept_R: Tensor, best_R: Tensor) -> Tensor:
        return self.product(self.kept(accept_R, best_R))

    def counting(
        self,
        by_reach: bool = True,
        kept_earlier: Tensor | None = None,
        left_R: Tensor | None = None,
        most_left: int = 0,
    ) -> Links:
        """The same, but rows count by their reach if that is asked for; by where chains begin, if it is said how likely
        EARLIER was kept; by value, if it is said how many rows, of `most_left`, a chain might have behind each."""
        made = copy(self)
        made.by_reach, made.kept_earlier, made.left_R, made.most_left = by_reach, kept_earlier, left_R, most_left
        return made

    def share(self, accept_R: Tensor, best_R: Tensor) -> Tensor:
        """What rows count by what is before them."""
        kept_R = self.kept(accept_R, best_R)
        begins_R = torch.ones_like(kept_R)
        if self.kept_earlier is not None:
            drafted_F = self.drafted_F
            before_F = torch.where(drafted_F == EARLIER, self.kept_earlier.to(kept_R.dtype), kept_R[drafted_F])
            begins_R[: len(drafted_F)] -= (1.0 - ANYWAY) * torch.where(drafted_F == NOBODY, 0.0, before_F)
        return begins_R * self.product(kept_R * begins_R if self.by_reach else begins_R)

    def worth(self, accept_R: Tensor, best_R: Tensor) -> Tensor:
        """What rows count by what is behind them: 1, and the drafts that would be kept if this one is."""
        assert self.left_R is not None
        kept_R, rows = self.kept(accept_R, best_R), len(accept_R)
        before = self.jumps[0]
        behind = torch.full_like(before, rows).scatter(0, before[:-1], torch.arange(rows, device=before.device))
        behind_R = behind[:-1]  # anybody may stand behind nobody
        ends_R, at_R = behind_R == rows, behind_R.clamp(max=max(rows - 1, 0))
        likely_R = sum((kept_R**step * (step <= self.left_R) for step in range(1, self.most_left + 1)), kept_R * 0.0)
        opened_R = likely_R
        for _ in range(self.most_left):
            opened_R = torch.where(ends_R, likely_R, kept_R[at_R] * (1.0 + opened_R[at_R]))
        return 1.0 + opened_R
