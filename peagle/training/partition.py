"""One batch's gradients, exactly, in memory that a chunk of chains decides and the number of drafts does not.

Depth 0 never looks at a chain. So it runs once; what chains need of it (keys and values of every layer, for EAGLE-3
also what it hands on) and what it said itself are cut off as leaves. Chains then come in chunks of any size: forward,
loss, backward, and all of a chunk is forgotten but the gradients it left in the parameters and, summed, in the
leaves. One backward through depth 0, started from the leaves' gradients, ends it. Nothing is computed twice, and the
gradients are those of the whole batch at once, for any size of chunk.

Knows nothing about optimizers, data or several processes.

Shapes: N tokens of a batch, R rows of a chunk, A of its depth-0 rows that are asked, D drafter width.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.data.batches import PackedBatch
from peagle.kernels.host_transfer import copy_to_device
from peagle.kernels.loss.linear_loss import LossSchedule
from peagle.models.decoder import Decoder
from peagle.models.drafter import Drafter
from peagle.training.attention import ChainAttention, DepthZeroAttention, Eagle3StepAttention
from peagle.training.cod_sampling import CodPositions
from peagle.training.hidden_states.online import TargetHiddenStates
from peagle.training.loss import DepthMetrics, DraftLoss, LossSettings
from peagle.training.loss_weighting import EARLIER, NOBODY, Links


@dataclass(frozen=True)
class DepthZeroOutputs:
    """What depth 0 gave, cut off from how it came about. Gradients gather in these."""

    output_ND: Tensor
    prenorm_ND: Tensor
    kept: dict[int, tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, roots: DepthZeroOutputs) -> DepthZeroOutputs:
        def cut(x: Tensor) -> Tensor:
            return x.detach().requires_grad_()

        kept = {layer: (cut(k), cut(v)) for layer, (k, v) in roots.kept.items()}
        return cls(cut(roots.output_ND), cut(roots.prenorm_ND), kept)

    def tensors(self) -> list[Tensor]:
        return [self.output_ND, self.prenorm_ND, *(x for pair in self.kept.values() for x in pair)]


def accumulate_gradients(
    drafter: Drafter,
    target: Decoder,
    states: TargetHiddenStates,
    batch: PackedBatch,
    rows: CodPositions,
    aim: LossSettings,
    weights: list[float],
    chunk_rows: int,
    counts: tuple[int, ...] | None = None,
) -> DepthMetrics:
    """Adds the gradients of the batch's loss to the parameters' `.grad`, and says how the rows did.

    `batch` and `rows` lie on the CPU, `states` on the device. `weights` is each depth's part of the loss. `counts`
    are the rows by depth that the loss is a mean over, where that is more than this batch: of several batches or
    ranks in one step.
    """
    examiner = DraftLoss(drafter, target, states, aim, counts or rows.counts, weights)
    view = DrafterForward(drafter, states, batch, states.hidden_ND.device)
    run_forward_backward(examiner, view, split_chains(rows, chunk_rows))
    return examiner.totals


def run_forward_backward(examiner: DraftLoss, view: DrafterForward, parts: Iterable[ChainChunk]) -> None:
    """Depth 0, every chunk of chains there and back, depth 0 back."""
    roots = view.depth_zero()
    leaves = DepthZeroOutputs.of(roots)
    for chunk in parts:
        loss = chunk_loss(examiner, view, leaves, chunk)
        loss.backward()
    pairs = [(root, leaf.grad) for root, leaf in zip(roots.tensors(), leaves.tensors(), strict=True)]
    pairs = [(root, grad) for root, grad in pairs if grad is not None and root.requires_grad]
    if pairs:
        torch.autograd.backward([root for root, _ in pairs], [grad for _, grad in pairs])


@dataclass(frozen=True)
class ChainChunk:
    """Whole chains, and the depth-0 rows that are asked with them: those between this chunk's anchors and the last's.

    Rows here count from the chunk's first. All on the CPU.
    """

    anchor_A: Tensor
    anchor_R: Tensor
    depth_R: Tensor
    first_R: Tensor
    goes_on: bool  # its first anchor is the neighbour of the last chunk's last

    def depths(self) -> Tensor:
        """Of all that is asked, depth 0 first."""
        return torch.cat([torch.zeros_like(self.anchor_A), self.depth_R])

    def questions(self) -> Tensor:
        return torch.cat([self.anchor_A, self.anchor_R + self.depth_R]) + 2

    def asked(self) -> Tensor | LossSchedule:
        """The questions as `Examiner.ask` takes them."""
        return self.questions()

    def before(self) -> Tensor:
        """Of all that is asked: the row before it in its chain. A chain's anchor is asked in the same chunk."""
        asked, rows = len(self.anchor_A), len(self.anchor_R)
        before_R = torch.arange(asked - 1, asked + rows - 1)
        first = self.depth_R == 1
        before_R[first] = torch.searchsorted(self.anchor_A, self.anchor_R[first])
        return torch.cat([torch.full_like(self.anchor_A, NOBODY), before_R])

    def drafted(self) -> Tensor:
        """Of the depth-0 rows: the one that is asked for the token they read last. It is the neighbour's."""
        drafted_A = torch.arange(-1, len(self.anchor_A) - 1)
        drafted_A[1:][self.anchor_A.diff() > 1] = NOBODY
        drafted_A[:1] = EARLIER if self.goes_on else NOBODY
        return drafted_A

    def links(self, view: DrafterForward) -> Links:
        """How the rows hang together, on the device."""
        text_S = view.token_N[view.moved(self.questions())]
        return Links(view.moved(self.before()), text_S, view.moved(self.drafted()))

    def walk(self) -> Eagle3Steps:
        """The chains depth by depth."""
        at = self.depth_R.eq(1).nonzero()[:, 0]
        anchor_M, order, going_on = self.anchor_R[at], [at], []
        following = torch.cat([self.depth_R[1:], self.depth_R.new_zeros(1)])  # the depth of the row behind
        for depth in range(1, int(self.depth_R.max())):
            longer = (following[at] > depth).nonzero()[:, 0]
            at = at[longer] + 1
            order.append(at)
            going_on.append(longer)
        return Eagle3Steps(anchor_M, going_on, torch.cat(order).argsort())


@dataclass(frozen=True)
class Eagle3Steps:
    """Chains as EAGLE-3 takes them: all rows of a depth together, by anchor."""

    anchor_M: Tensor  # of depth 1
    going_on: list[Tensor]  # for each further depth: which rows of the one before it have a row there
    back_R: Tensor | None  # where each row of the chunk lies among all rows in order of depth; None: leave them so


def split_chains(rows: CodPositions, limit: int) -> Iterator[ChainChunk]:
    """A depth-0 row is asked in the same chunk as the chains beside it, since they have questions in common."""
    cuts = list(rows.chunk_slices(limit)) or [slice(0, 0)]
    done = 0
    for i, cut in enumerate(cuts):
        last = i == len(cuts) - 1
        end = len(rows.anchor_A)
        if not last:
            end = int(torch.searchsorted(rows.anchor_A, rows.anchor_R[cut.stop - 1], right=True))
        first_R = rows.first_R[cut] - cut.start
        goes_on = 0 < done < end and bool(rows.anchor_A[done] == rows.anchor_A[done - 1] + 1)
        yield ChainChunk(rows.anchor_A[done:end], rows.anchor_R[cut], rows.depth_R[cut], first_R, goes_on)
        done = end


def chunk_loss(examiner: DraftLoss, view: DrafterForward, leaves: DepthZeroOutputs, chunk: ChainChunk) -> Tensor:
    """The chunk's part of the loss."""
    said_AD = leaves.output_ND[view.moved(chunk.anchor_A)]
    said_RD = view.chains(leaves, chunk)
    said_SD = torch.cat([said_AD, said_RD])
    return examiner.ask(said_SD, view.moved(chunk.depths()), chunk.asked(), chunk.links(view))


class DrafterForward:
    """A batch as the drafter's rows see it: depth 0, then chains on top of it."""

    def __init__(self, drafter: Drafter, states: TargetHiddenStates, batch: PackedBatch, device: torch.device) -> None:
        self.drafter, self.states, self.device = drafter, states, device
        moved = batch.to(device)
        self.token_N, self.position_N, self.start_N = moved.token_ids_N, moved.position_N, moved.start_N
        # the token behind a document's last is another's: nobody sees or asks the row that is given it
        self.next_N = self.token_N.roll(-1)

    def moved(self, x: Tensor) -> Tensor:
        return copy_to_device(x, self.device)

    def depth_zero(self) -> DepthZeroOutputs:
        attend = DepthZeroAttention(self.start_N)
        hidden_ND = self.drafter.combine_hidden_states(self.states.aux_hidden_states_NX)
        output_ND, prenorm_ND = self.drafter(self.next_N, hidden_ND, self.position_N, attend)
        return DepthZeroOutputs(output_ND, prenorm_ND, attend.kept)

    def chains(self, leaves: DepthZeroOutputs, chunk: ChainChunk) -> Tensor:
        """What the chunk's chain rows say, [R, D]."""
        if not len(chunk.anchor_R):
            return leaves.output_ND[:0]
        return self._mask_rows(leaves, chunk) if self.drafter.cfg.parallel else self._steps(leaves, chunk)

    def _mask_rows(self, leaves: DepthZeroOutputs, chunk: ChainChunk) -> Tensor:
        anchor_R, depth_R, first_R = (self.moved(x) for x in (chunk.anchor_R, chunk.depth_R, chunk.first_R))
        attend = ChainAttention(leaves.kept, self.start_N[anchor_R], anchor_R, depth_R, first_R)
        mask_id = self.drafter.cfg.mask_token_id
        assert mask_id is not None
        token_R = torch.full_like(anchor_R, mask_id)
        hidden_RD = self.drafter.mask_hidden_states(len(anchor_R))
        return self.drafter(token_R, hidden_RD, self.position_N[anchor_R] + depth_R, attend)[0]

    def _steps(self, leaves: DepthZeroOutputs, chunk: ChainChunk) -> Tensor:
        """Depth by depth, each on what the one before it handed on; put back in the order of the chunk's rows."""
        walk, last, said = chunk.walk(), len(self.next_N) - 1, []
        anchor = self.moved(walk.anchor_M)
        attend = Eagle3StepAttention(leaves.kept, self.start_N[anchor], anchor)
        hidden = leaves.prenorm_ND[anchor]
        for going_on in (*walk.going_on, None):
            index = (attend.anchor_R + attend.depth).clamp(max=last)
            position = self.position_N[attend.anchor_R] + attend.depth
            out, handed_on = self.drafter(self.next_N[index], hidden, position, attend)
            said.append(out)
            if going_on is not None:
                going_on = self.moved(going_on)
                attend, hidden = attend.follow(going_on), handed_on[going_on]
        said_RD = torch.cat(said)
        return said_RD if walk.back_R is None else said_RD[self.moved(walk.back_R)]
