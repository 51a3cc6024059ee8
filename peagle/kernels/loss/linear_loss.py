"""The loss of rows against a teacher's distributions, from hidden states: no [R, V] tensor of logits is ever whole.

Rows are taken in the order of their questions, in chunks of a bounded number of logits. The teacher's logits at the
positions of a chunk are computed once and serve every row that asks there. The gradient is computed on the way
forward: the student's logits z of a chunk are replaced by d loss/d z and multiplied back at once, so that nothing
but d hidden (and d head, if the head is trained) is kept.

With p the teacher's and q the student's probabilities of the V tokens the student can say, accept = sum min(p, q):

    ce         -sum p log q
    kl         sum p (log p - log q)
    tv         1 - accept
    lk         -log accept
    lk-hybrid  lam kl + (1 - lam) tv, where lam = exp(-eta accept), held fixed: kl while little is accepted

Rows may stand in chains, a draft behind a draft. Then a row counts by its reach: the product, over all rows before it,
of `accept` where the text goes on with the teacher's likeliest token and of 0 where it does not. Drafts behind one that
is refused are of no use, and where a sampled text leaves the likely path, the draft behind is asked about another text
than drafts would have led to. The reach is held fixed, like lam. A row's question comes behind those of the rows before
it, so these are known when it is asked.

Chains may count by where they begin, too. A round of drafting begins behind a token that the target had to say itself,
most often since the draft of it was refused; texts are mostly easy, and rounds mostly begin where they are not. So a
chain counts `ANYWAY` at least, and all the more the less likely a draft of the token before it was kept.

And rows may count by what they open: a draft that is kept lets the one behind it be looked at. By value a row counts 1
and the drafts behind it that would then be kept. Times its reach that is what it adds to a round, so with `tv` the
gradient is that of the drafts kept in a round. Where a chain was not sampled on, what would come is taken to be kept as
likely as its last row.

Over a reduced vocabulary p is the teacher's softmax over everything it can say, picked at `draft_ids` and not
normalised again: mass outside asks nothing.

Knows nothing about drafters, depths or where hidden states come from.

Shapes: R rows, D student width, V student vocabulary, P positions, T teacher width, U teacher vocabulary; of one
chunk C rows and Q positions.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from peagle.config import LK_ETA, LOSS_LOGITS, MAX_DRAFT_TOKENS, OBJECTIVES, Objective
from peagle.kernels.attention.ranged import takes_triton
from peagle.kernels.host_transfer import sent

LEAST = 1e-30  # an acceptance below it is taken for it: where nothing is accepted, lk would be infinite
NOBODY = -1  # before a chain's first row
EARLIER = -2  # the last row of the part that was asked before this one
ANYWAY = 0.2  # that a round begins behind a draft that is sure to be kept, of one that is sure to be refused


@dataclass(frozen=True)
class Teacher:
    """The distribution at position i is softmax(hidden[i] @ head.T)."""

    hidden_PT: Tensor
    head_UT: Tensor
    draft_ids: Tensor | None = None  # [V] the teacher's ids of a reduced vocabulary; None: V = U


@dataclass(frozen=True)
class LinearLoss:
    total: Tensor  # sum of weight * loss; differentiable in the student's hidden states and head
    loss_R: Tensor  # these three: without gradient, in the order of the rows given
    accept_R: Tensor  # sum min(p, q)
    match_R: Tensor  # bool: the likeliest tokens are the same one (of equals the lowest id counts)
    best_R: Tensor  # the teacher's likeliest


@dataclass(frozen=True)
class Chunk:
    """Rows `rows` of the sorted order; they ask at the positions `spots` of the sorted distinct questions."""

    rows: slice
    spots: slice


@dataclass(frozen=True)
class Plan:
    """Who is computed together with whom.

    Worked example, at most 3 rows or positions a chunk, questions 7 2 7 2 5 7:
        order 1 3 4 0 2 5, positions 2 5 7, spot_R 0 0 1 2 2 2; chunks: rows 0:3 of spots 0:2, rows 3:6 of spots 2:3
    """

    order_R: Tensor  # the rows, by question
    positions: Tensor  # the distinct questions, rising
    spot_R: Tensor  # of the sorted rows: which of `positions` they ask at
    chunks: list[Chunk]


def plan(question_R: Tensor, most: int, device: torch.device) -> Plan:
    """At most `most` rows and positions a chunk. Questions on the CPU spare the device a wait."""
    question = question_R.cpu().numpy()
    small = len(question) and question.max() < 1 << 16  # then sorting takes one pass over each byte
    order = np.argsort(question.astype(np.uint16) if small else question, kind="stable")
    positions, begins = np.unique(question[order], return_index=True)
    ends = np.append(begins[1:], len(order))  # of each position's rows
    spots = np.repeat(np.arange(len(positions)), ends - begins)
    chunks: list[Chunk] = []
    row = 0
    while row < len(order):
        first = int(spots[row])
        last = int(np.searchsorted(ends, row + most, side="right"))  # positions before it end within the chunk
        last = min(last, first + most)
        # more rows may ask at one position than fit
        end = int(ends[last - 1]) if last > first else row + most
        chunks.append(Chunk(slice(row, end), slice(first, max(last, first + 1))))
        row = end

    def moved(x: NDArray[np.int64]) -> Tensor:
        return sent(torch.from_numpy(x), device)

    return Plan(moved(order), moved(positions), moved(spots), chunks)


@dataclass(frozen=True)
class Frame:
    """A plan's sizes where they must be the same every time: chunks of `most` rows that ask at `spots` positions.

    Worked example, 7 rows, chunks of 3 with 2 positions, questions 7 2 7 2 5: rows 5 and 6 are nobody's, and come last.
        order 1 3 4 0 2 5 6, chunks 1 3 4 | 0 2 5 | 6, positions 2 5 | 7 7 | 7 7, spot_R 0 0 1 2 2 2 4
    """

    rows: int
    most: int
    spots: int

    @property
    def chunks(self) -> list[Chunk]:
        starts = range(0, self.rows, self.most)
        return [
            Chunk(slice(row, min(row + self.most, self.rows)), slice(i * self.spots, (i + 1) * self.spots))
            for i, row in enumerate(starts)
        ]

    def plan(self, question_R: Tensor) -> Plan | None:
        """On the CPU; None where a chunk asks at more positions than it may. Rows that are missing ask what the last
        one does: give them no weight."""
        question = question_R.numpy()
        assert 0 < len(question) <= self.rows, (len(question), self.rows)
        order = np.arange(self.rows)
        order[: len(question)] = np.argsort(question, kind="stable")
        asked = np.full(self.rows, question.max())
        asked[: len(question)] = question[order[: len(question)]]
        positions = np.full(len(self.chunks) * self.spots, asked[-1])
        spot = np.zeros(self.rows, dtype=np.int64)
        for chunk in self.chunks:
            own = asked[chunk.rows]
            rank = np.concatenate([[0], np.cumsum(own[1:] != own[:-1])])
            if rank[-1] >= self.spots:
                return None
            spot[chunk.rows] = chunk.spots.start + rank
            positions[chunk.spots.start + rank] = own
        return Plan(torch.from_numpy(order), torch.from_numpy(positions), torch.from_numpy(spot), self.chunks)


@dataclass(frozen=True)
class Said:
    """What a chunk's rows say about the loss, [C] each."""

    loss: Tensor
    accept: Tensor
    match: Tensor
    best: Tensor


def rows_torch(
    z_CV: Tensor,
    t_QU: Tensor,
    spot_C: Tensor,
    weight_C: Tensor,
    draft_ids: Tensor | None,
    objective: Objective,
    eta: float,
    gradient: bool,
) -> Said:
    """Losses of a chunk's rows from the logits of student and teacher; row i asks at t[spot_i].

    With `gradient`, z is overwritten by the gradient of sum weight * loss.
    """
    exact = torch.float64 if z_CV.dtype == torch.float64 else torch.float32
    log_q = z_CV.to(exact).log_softmax(-1)
    log_p_QU = t_QU.to(exact).log_softmax(-1)
    log_p = (log_p_QU if draft_ids is None else log_p_QU[:, draft_ids])[spot_C]
    q, p = log_q.exp(), log_p.exp()
    accept = torch.minimum(p, q).sum(-1)
    ce = -(p * log_q).sum(-1)
    kl = ce + (p * log_p.masked_fill(p == 0, 0.0)).sum(-1)
    tv = 1 - accept
    lam = (-eta * accept).exp()
    floor = accept.clamp(min=LEAST)
    loss = {"ce": ce, "kl": kl, "tv": tv, "lk": -floor.log(), "lk-hybrid": lam * kl + (1 - lam) * tv}[objective]
    said = z_CV.argmax(-1) if draft_ids is None else draft_ids[z_CV.argmax(-1)]
    best = t_QU.argmax(-1)[spot_C]
    match = said == best
    if gradient:
        below = q < p
        of_kl = q * p.sum(-1, keepdim=True) - p
        of_tv = q * ((q * below).sum(-1, keepdim=True) - below.to(exact))
        lam, floor = lam[:, None], floor[:, None]
        of = {"ce": of_kl, "kl": of_kl, "tv": of_tv, "lk": of_tv / floor, "lk-hybrid": lam * of_kl + (1 - lam) * of_tv}
        z_CV.copy_(of[objective] * weight_C[:, None])
    return Said(loss, accept, match, best)


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
        while 1 << len(self.jumps) < MAX_DRAFT_TOKENS:
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


RowsOf = Callable[..., Said]


def _add_head_gradient(into_VD: Tensor, dz_CV: Tensor, hidden_CD: Tensor) -> None:
    """into += dz.T @ hidden, summed in fp32; in slices, so that what is added is small too."""
    half = dz_CV.is_cuda and dz_CV.dtype in (torch.bfloat16, torch.float16)
    step = max(1, LOSS_LOGITS // hidden_CD.shape[1])
    for start in range(0, len(into_VD), step):
        left = dz_CV[:, start : start + step].T
        into = into_VD[start : start + step]
        if half:
            into += torch.mm(left, hidden_CD, out_dtype=torch.float32)
        else:
            into += left.to(into.dtype) @ hidden_CD.to(into.dtype)


def _times(rows_CD: Tensor, share_C1: Tensor | None) -> Tensor:
    return rows_CD if share_C1 is None else rows_CD * share_C1


class _LinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_RD: Tensor,
        head_VD: Tensor,
        teacher: Teacher,
        question_R: Tensor | Plan,
        weight_R: Tensor,
        objective: Objective,
        eta: float,
        logits: int,
        links: Links | None,
        wanted: tuple[bool, bool],
        rows_of: RowsOf,
    ) -> tuple[Tensor, ...]:
        exact = torch.float64 if hidden_RD.dtype == torch.float64 else torch.float32
        rows, device = len(hidden_RD), hidden_RD.device
        most = max(1, logits // max(len(head_VD), len(teacher.head_UT)))
        cut = question_R if isinstance(question_R, Plan) else plan(question_R, most, device)
        weight_R = weight_R.to(device, exact)
        loss_R, accept_R = hidden_RD.new_zeros(2, rows, dtype=exact)
        match_R = hidden_RD.new_zeros(rows, dtype=torch.bool)
        best_R = hidden_RD.new_zeros(rows, dtype=torch.long)
        dhidden_RD = torch.empty_like(hidden_RD) if wanted[0] else None
        dhead_VD = torch.zeros_like(head_VD, dtype=exact) if wanted[1] else None
        reach_R = hidden_RD.new_ones(rows, dtype=exact)

        def asked(chunk: Chunk, gradient: bool) -> tuple[Tensor, Tensor, Tensor]:
            """Its rows, their hidden states, and their logits or what became of them."""
            at = cut.order_R[chunk.rows]
            hidden_CD = hidden_RD[at]
            z_CV = hidden_CD @ head_VD.T
            t_QU = teacher.hidden_PT[cut.positions[chunk.spots]] @ teacher.head_UT.T
            spot_C = cut.spot_R[chunk.rows] - chunk.spots.start
            said = rows_of(z_CV, t_QU, spot_C, weight_R[at], teacher.draft_ids, objective, eta, gradient)
            parts = ((loss_R, said.loss), (accept_R, said.accept), (match_R, said.match), (best_R, said.best))
            for into, part in parts:
                into.index_copy_(0, at, part)
            return at, hidden_CD, z_CV

        valued = links if links is not None and links.left_R is not None else None
        worth_R = hidden_RD.new_ones(rows, dtype=exact)
        if valued is not None and dhead_VD is not None:
            # The head's gradient is one sum: what rows count has to be known when they are added to it.
            for chunk in cut.chunks:
                asked(chunk, gradient=False)
            worth_R = valued.worth(accept_R, best_R)
        for chunk in cut.chunks:
            at, hidden_CD, z_CV = asked(chunk, any(wanted))
            # what a row counts by its chain can come last: both gradients are sums over rows
            reach_C1 = None
            if links is not None:
                reach_R.index_copy_(0, at, (links.share(accept_R, best_R) * worth_R)[at])
                reach_C1 = reach_R[at][:, None].to(hidden_CD.dtype)
            if dhidden_RD is not None:
                dhidden_RD.index_copy_(0, at, _times(z_CV @ head_VD, reach_C1))
            if dhead_VD is not None:
                _add_head_gradient(dhead_VD, z_CV, _times(hidden_CD, reach_C1))
        if valued is not None and dhead_VD is None:
            worth_R = valued.worth(accept_R, best_R)
            reach_R = reach_R * worth_R
            if dhidden_RD is not None:
                dhidden_RD *= worth_R[:, None].to(dhidden_RD.dtype)
        ctx.save_for_backward(dhidden_RD, dhead_VD)
        ctx.head_dtype = head_VD.dtype
        ctx.mark_non_differentiable(loss_R, accept_R, match_R, best_R)
        return (weight_R * reach_R * loss_R).sum(), loss_R, accept_R, match_R, best_R

    @staticmethod
    def backward(ctx: Any, dtotal: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        dhidden_RD, dhead_VD = ctx.saved_tensors
        dhidden = None if dhidden_RD is None else dhidden_RD * dtotal.to(dhidden_RD.dtype)
        dhead = None if dhead_VD is None else (dhead_VD * dtotal).to(ctx.head_dtype)
        return dhidden, dhead, *(None,) * 9


def linear_loss_by(
    rows_of: RowsOf,
    hidden_RD: Tensor,
    head_VD: Tensor,
    teacher: Teacher,
    question_R: Tensor | Plan,
    weight_R: Tensor,
    objective: Objective,
    eta: float,
    logits: int,
    links: Links | None = None,
) -> LinearLoss:
    assert objective in OBJECTIVES, objective
    assert hidden_RD.dtype == head_VD.dtype, (hidden_RD.dtype, head_VD.dtype)
    assert teacher.hidden_PT.dtype == teacher.head_UT.dtype, (teacher.hidden_PT.dtype, teacher.head_UT.dtype)
    said = len(teacher.head_UT) if teacher.draft_ids is None else len(teacher.draft_ids)
    assert len(head_VD) == said, (len(head_VD), said)
    asked = len(question_R.order_R if isinstance(question_R, Plan) else question_R)
    assert len(hidden_RD) == asked == len(weight_R), (len(hidden_RD), asked, len(weight_R))
    on = torch.is_grad_enabled()
    wanted = (on and hidden_RD.requires_grad, on and head_VD.requires_grad)
    assert links is None or len(links.text_R) == asked, asked
    teacher = Teacher(teacher.hidden_PT.detach(), teacher.head_UT.detach(), teacher.draft_ids)
    told = (weight_R, objective, eta, logits, links, wanted, rows_of)
    return LinearLoss(*_LinearLoss.apply(hidden_RD, head_VD, teacher, question_R, *told))


def linear_loss_torch(
    hidden_RD: Tensor,
    head_VD: Tensor,
    teacher: Teacher,
    question_R: Tensor | Plan,
    weight_R: Tensor,
    objective: Objective,
    eta: float = LK_ETA,
    logits: int = LOSS_LOGITS,
    links: Links | None = None,
) -> LinearLoss:
    """In smaller chunks: of a chunk's logits this makes some eight copies."""
    return linear_loss_by(
        rows_torch, hidden_RD, head_VD, teacher, question_R, weight_R, objective, eta, max(1, logits // 8), links
    )


def linear_loss(
    hidden_RD: Tensor,
    head_VD: Tensor,
    teacher: Teacher,
    question_R: Tensor | Plan,
    weight_R: Tensor,
    objective: Objective,
    eta: float = LK_ETA,
    logits: int = LOSS_LOGITS,
    links: Links | None = None,
) -> LinearLoss:
    """Row r is asked for the teacher's distribution at position question_r; total = sum weight * loss.

    `eta` is lk-hybrid's; `logits` bounds how many of the student's, and of the teacher's, live at once. The order of
    the rows does not matter. Give `question_R` on the CPU if it is at hand: from the device it has to be waited for.
    Or give a plan of it, all on the device: then nothing is left to the host, and `logits` plays no part. With
    `links`, on the device, rows count by their reach, and by where their chains begin and by value if those say so.
    """
    args = (hidden_RD, head_VD, teacher, question_R, weight_R, objective, eta, logits, links)
    if not takes_triton(hidden_RD) or not takes_triton(teacher.hidden_PT):
        return linear_loss_torch(*args)
    from peagle.kernels.loss.linear_loss_triton import rows_triton

    return linear_loss_by(rows_triton, *args)
