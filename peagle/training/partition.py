"""Sequence partition: exact gradients of a batch, with peak memory set by the chunk size.

Depth 0 never attends to a chain. So depth 0 runs once; the tensors that chains read (keys and values of every layer,
for EAGLE-3 also the pre-norm output) and its own output become autograd leaves. Chains then run in chunks of any size:
forward, loss, backward. A chunk leaves only its gradients in the parameters and in the leaves. One backward pass
through depth 0, started from the gradients of the leaves, completes the step. Nothing is recomputed, and the gradients
equal those of the whole batch at once for any chunk size.

A position (anchor a, depth d) attends to the depth-0 positions of its document up to a, to its own chain up to itself,
and to nothing else. Both are ranges of rows.

Shapes: N tokens of a batch, R chain positions of a chunk, A its depth-0 anchors with a loss, S = A + R, D drafter
width; in attention also S steps of a chain, H heads, G key/value heads, d head dimension.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from peagle.config import TrainConfig, Window
from peagle.data.batches import PackedBatch
from peagle.kernels.attention.ranged import merge_attn_states, ranged_attention
from peagle.kernels.attention.types import KeyRanges
from peagle.kernels.host_transfer import copy_to_device
from peagle.kernels.loss.linear_loss import LossSchedule
from peagle.models.decoder import Decoder
from peagle.models.drafter import Drafter
from peagle.training.cod_sampling import CodPositions
from peagle.training.hidden_states.online import DocumentAttention, TargetHiddenStates
from peagle.training.loss import NO_PREVIOUS, ChainLinks, DraftLoss, position_weights

WindowSize = int | None


def accumulate_gradients(
    drafter: Drafter,
    target: Decoder,
    states: TargetHiddenStates,
    batch: PackedBatch,
    positions: CodPositions,
    cfg: TrainConfig,
    chunk_size: int,
    counts: tuple[int, ...] | None = None,
) -> Tensor:
    """Adds the gradients of the batch's loss to the parameters' `.grad` and returns metrics [M, K].

    `batch` and `positions` are on the CPU, `states` on the device. `counts` are the positions by depth that the loss
    averages over, if a step has more batches or ranks than this one.
    """
    device = states.hidden_ND.device
    position_weight_K = position_weights(counts or positions.counts, cfg.depth_decay).to(device)
    loss = DraftLoss(drafter, target, states, cfg, position_weight_K)
    forward = DrafterForward(drafter, states, batch, device)
    run_forward_backward(loss, forward, split_chains(positions, chunk_size))
    return loss.metrics_MK


def run_forward_backward(draft_loss: DraftLoss, forward: DrafterForward, chunks: Iterable[ChainChunk]) -> None:
    """Depth 0 forward; every chunk forward and backward; depth 0 backward."""
    depth_zero = forward.run_depth_zero()
    leaves = depth_zero.detach_as_leaves()
    for chunk in chunks:
        chunk_loss(draft_loss, forward, leaves, chunk).backward()
    pairs = [(root, leaf.grad) for root, leaf in zip(depth_zero.tensors(), leaves.tensors(), strict=True)]
    pairs = [(root, grad) for root, grad in pairs if grad is not None and root.requires_grad]
    if pairs:
        torch.autograd.backward([root for root, _ in pairs], [grad for _, grad in pairs])


def chunk_loss(
    draft_loss: DraftLoss, forward: DrafterForward, depth_zero: DepthZeroOutputs, chunk: ChainChunk
) -> Tensor:
    output_AD = depth_zero.output_ND[forward.to_device(chunk.anchor_A)]
    output_SD = torch.cat([output_AD, forward.run_chains(depth_zero, chunk)])
    depth_S, links = forward.to_device(chunk.depths()), chunk.build_links(forward)
    return draft_loss.compute(output_SD, depth_S, chunk.label_positions(), links)


@dataclass(frozen=True)
class DepthZeroOutputs:
    """What chains and the loss read of depth 0."""

    output_ND: Tensor
    prenorm_ND: Tensor
    keys_values: dict[int, tuple[Tensor, Tensor]]  # by layer

    def detach_as_leaves(self) -> DepthZeroOutputs:
        def detach(x: Tensor) -> Tensor:
            return x.detach().requires_grad_()

        keys_values = {layer: (detach(k), detach(v)) for layer, (k, v) in self.keys_values.items()}
        return DepthZeroOutputs(detach(self.output_ND), detach(self.prenorm_ND), keys_values)

    def tensors(self) -> list[Tensor]:
        return [self.output_ND, self.prenorm_ND, *(x for pair in self.keys_values.values() for x in pair)]


@dataclass(frozen=True)
class Eagle3Steps:
    """Chains in EAGLE-3's order of execution: all positions of a depth together, sorted by anchor."""

    anchor_M: Tensor  # anchors at depth 1
    continuing: list[Tensor]  # per further depth: which positions of the depth before have a successor
    restore_R: Tensor | None  # index of each chunk position in execution order; None: keep execution order


@dataclass(frozen=True)
class ChainChunk:
    """Whole chains and the depth-0 anchors whose loss is computed with them. All tensors are on the CPU."""

    anchor_A: Tensor
    anchor_R: Tensor
    depth_R: Tensor
    chain_start_R: Tensor  # counted from the chunk's first position

    def depths(self) -> Tensor:
        """[S], depth 0 first."""
        return torch.cat([torch.zeros_like(self.anchor_A), self.depth_R])

    def label_positions(self) -> Tensor | LossSchedule:
        """[S]: batch index of the token each position predicts."""
        return torch.cat([self.anchor_A, self.anchor_R + self.depth_R]) + 2

    def previous(self) -> Tensor:
        """[S]: index of the position one depth before. A chain's anchor is always in the same chunk."""
        num_anchors, num_positions = len(self.anchor_A), len(self.anchor_R)
        previous_R = torch.arange(num_anchors - 1, num_anchors + num_positions - 1)
        first = self.depth_R == 1
        previous_R[first] = torch.searchsorted(self.anchor_A, self.anchor_R[first])
        return torch.cat([torch.full_like(self.anchor_A, NO_PREVIOUS), previous_R])

    def build_links(self, forward: DrafterForward) -> ChainLinks:
        labels = self.label_positions()
        assert isinstance(labels, Tensor)
        label_S = forward.token_N[forward.to_device(labels)]
        return ChainLinks(forward.to_device(self.previous()), label_S)

    def eagle3_steps(self) -> Eagle3Steps:
        at = self.depth_R.eq(1).nonzero()[:, 0]
        anchor_M, order, continuing = self.anchor_R[at], [at], []
        next_depth = torch.cat([self.depth_R[1:], self.depth_R.new_zeros(1)])
        for depth in range(1, int(self.depth_R.max())):
            longer = (next_depth[at] > depth).nonzero()[:, 0]
            at = at[longer] + 1
            order.append(at)
            continuing.append(longer)
        return Eagle3Steps(anchor_M, continuing, torch.cat(order).argsort())


def split_chains(positions: CodPositions, chunk_size: int) -> Iterator[ChainChunk]:
    """Splits positions into chunks. A depth-0 anchor goes with the chains beside it, since they share labels."""
    slices = list(positions.chunk_slices(chunk_size)) or [slice(0, 0)]
    begin = 0
    for i, part in enumerate(slices):
        end = len(positions.anchor_A)
        if i < len(slices) - 1:
            end = int(torch.searchsorted(positions.anchor_A, positions.anchor_R[part.stop - 1], right=True))
        chain_start_R = positions.chain_start_R[part] - part.start
        yield ChainChunk(
            positions.anchor_A[begin:end], positions.anchor_R[part], positions.depth_R[part], chain_start_R
        )
        begin = end


class DrafterForward:
    """Runs the drafter over a batch: depth 0 first, then chains on top of it."""

    def __init__(self, drafter: Drafter, states: TargetHiddenStates, batch: PackedBatch, device: torch.device) -> None:
        self.drafter, self.states, self.device = drafter, states, device
        moved = batch.to(device)
        self.token_N, self.position_N, self.start_N = moved.token_ids_N, moved.position_N, moved.start_N
        # the last token of a document gets another document's token; no position with a loss uses it
        self.next_token_N = self.token_N.roll(-1)

    def to_device(self, x: Tensor) -> Tensor:
        return copy_to_device(x, self.device)

    def run_depth_zero(self) -> DepthZeroOutputs:
        attend = DepthZeroAttention(self.start_N)
        hidden_ND = self.drafter.combine_hidden_states(self.states.aux_hidden_states_NX)
        output_ND, prenorm_ND = self.drafter(self.next_token_N, hidden_ND, self.position_N, attend)
        return DepthZeroOutputs(output_ND, prenorm_ND, attend.keys_values)

    def run_chains(self, depth_zero: DepthZeroOutputs, chunk: ChainChunk) -> Tensor:
        """The drafter's output at the chunk's chain positions, [R, D]."""
        if not len(chunk.anchor_R):
            return depth_zero.output_ND[:0]
        run = self._run_mask_positions if self.drafter.cfg.parallel else self._run_eagle3_steps
        return run(depth_zero, chunk)

    def _run_mask_positions(self, depth_zero: DepthZeroOutputs, chunk: ChainChunk) -> Tensor:
        anchor_R, depth_R = self.to_device(chunk.anchor_R), self.to_device(chunk.depth_R)
        chain_start_R = self.to_device(chunk.chain_start_R)
        attend = ChainAttention(depth_zero.keys_values, self.start_N[anchor_R], anchor_R, depth_R, chain_start_R)
        mask_token_id = self.drafter.cfg.mask_token_id
        assert mask_token_id is not None
        token_R = torch.full_like(anchor_R, mask_token_id)
        hidden_RD = self.drafter.mask_hidden_states(len(anchor_R))
        return self.drafter(token_R, hidden_RD, self.position_N[anchor_R] + depth_R, attend)[0]

    def _run_eagle3_steps(self, depth_zero: DepthZeroOutputs, chunk: ChainChunk) -> Tensor:
        """Depth by depth, each on the pre-norm output of the depth before; restores the chunk's order."""
        steps, last, outputs = chunk.eagle3_steps(), len(self.next_token_N) - 1, []
        anchor = self.to_device(steps.anchor_M)
        attend = Eagle3StepAttention(depth_zero.keys_values, self.start_N[anchor], anchor)
        hidden = depth_zero.prenorm_ND[anchor]
        for continuing in (*steps.continuing, None):
            index = (attend.anchor_R + attend.depth).clamp(max=last)
            position = self.position_N[attend.anchor_R] + attend.depth
            output, prenorm = self.drafter(self.next_token_N[index], hidden, position, attend)
            outputs.append(output)
            if continuing is not None:
                continuing = self.to_device(continuing)
                attend, hidden = attend.next_step(continuing), prenorm[continuing]
        output_RD = torch.cat(outputs)
        return output_RD if steps.restore_R is None else output_RD[self.to_device(steps.restore_R)]


# Attention, as ranges of visible rows: no mask is stored (see `kernels.attention.ranged`)


class DepthZeroAttention(DocumentAttention):
    """Attention of depth 0 over its document. Stores the keys and values of every layer for the chains."""

    def __init__(self, start_N: Tensor) -> None:
        super().__init__(start_N)
        self.keys_values: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(
        self, layer: int, q_NHd: Tensor, k_NGd: Tensor, v_NGd: Tensor, window: Window, sinks: Tensor | None = None
    ) -> Tensor:
        if layer not in self.keys_values:  # activation checkpointing runs a layer twice; the graph uses the first
            self.keys_values[layer] = (k_NGd, v_NGd)
        return super().__call__(layer, q_NHd, k_NGd, v_NGd, window, sinks)


@dataclass
class ChainAttention:
    """Attention of P-EAGLE's mask positions, all depths at once: depth 0 up to the anchor, and the chain."""

    depth_zero: dict[int, tuple[Tensor, Tensor]]
    start_R: Tensor
    anchor_R: Tensor
    depth_R: Tensor
    chain_start_R: Tensor
    _ranges: dict[WindowSize, tuple[KeyRanges, list[tuple[Tensor, KeyRanges]]]] = field(default_factory=dict)

    def __call__(self, layer: int, q_RHd: Tensor, k_RGd: Tensor, v_RGd: Tensor, window: WindowSize) -> Tensor:
        if window not in self._ranges:
            row_R = torch.arange(len(self.anchor_R), device=self.anchor_R.device)
            chain_ranges = KeyRanges(_window_start(self.chain_start_R, row_R, window), row_R + 1)
            # groups of rows with non-decreasing ranges of depth 0: all rows, or one depth each if there is a window
            groups = [(row_R, KeyRanges(self.start_R, self.anchor_R + 1))]
            if window is not None:
                at_depth = [(d, self.depth_R.eq(d).nonzero()[:, 0]) for d in range(1, int(self.depth_R.max()) + 1)]
                groups = [
                    (at, _depth_zero_ranges(self.start_R[at], self.anchor_R[at], d, window)) for d, at in at_depth
                ]
            self._ranges[window] = (chain_ranges, groups)
        chain_ranges, groups = self._ranges[window]
        keys_values = self.depth_zero[layer]
        if window is None:
            over_depth_zero = ranged_attention(q_RHd, *keys_values, groups[0][1])
        else:
            outs, lses = zip(*(ranged_attention(q_RHd[at], *keys_values, ranges) for at, ranges in groups), strict=True)
            restore = torch.cat([at for at, _ in groups]).argsort()
            over_depth_zero = torch.cat(outs)[restore], torch.cat(lses)[restore]
        return merge_attn_states(*over_depth_zero, *ranged_attention(q_RHd, k_RGd, v_RGd, chain_ranges))[0]


@dataclass
class Eagle3StepAttention:
    """Attention of EAGLE-3's positions of one depth: depth 0 up to the anchor, and the earlier steps of the chain.

    `next_step` moves to the next depth with the chains that continue.
    """

    depth_zero: dict[int, tuple[Tensor, Tensor]]
    start_R: Tensor
    anchor_R: Tensor
    depth: int = 1
    chain: dict[int, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)  # keys and values by layer and step
    _ranges: dict[WindowSize, KeyRanges] = field(default_factory=dict)

    def next_step(self, continuing: Tensor) -> Eagle3StepAttention:
        chain = {i: [(k[continuing], v[continuing]) for k, v in steps] for i, steps in self.chain.items()}
        return Eagle3StepAttention(
            self.depth_zero, self.start_R[continuing], self.anchor_R[continuing], self.depth + 1, chain
        )

    def __call__(self, layer: int, q_RHd: Tensor, k_RGd: Tensor, v_RGd: Tensor, window: WindowSize) -> Tensor:
        if window not in self._ranges:
            self._ranges[window] = _depth_zero_ranges(self.start_R, self.anchor_R, self.depth, window)
        earlier = self.chain.get(layer, [])[: self.depth - 1]  # a recomputed layer has appended its own step already
        self.chain[layer] = [*earlier, (k_RGd, v_RGd)]
        visible = self.chain[layer][-window:] if window is not None else self.chain[layer]
        over_depth_zero = ranged_attention(q_RHd, *self.depth_zero[layer], self._ranges[window])
        return merge_attn_states(*over_depth_zero, *_attend_own_steps(q_RHd, visible))[0]


def _window_start(start: Tensor, position: Tensor, window: WindowSize) -> Tensor:
    return start if window is None else torch.maximum(start, position - window + 1)


def _depth_zero_ranges(start_R: Tensor, anchor_R: Tensor, depth: int, window: WindowSize) -> KeyRanges:
    """Depth-0 rows visible to positions of one depth; empty if the window has moved past the anchor."""
    return KeyRanges(_window_start(start_R, anchor_R + depth, window).minimum(anchor_R + 1), anchor_R + 1)


def _attend_own_steps(q_RHd: Tensor, steps: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Attention of every row over the few keys of its own chain."""
    k_RSGd, v_RSGd = (torch.stack(x, 1) for x in zip(*steps, strict=True))
    exact = torch.float64 if q_RHd.dtype == torch.float64 else torch.float32
    q = q_RHd.unflatten(1, (k_RSGd.shape[2], -1)) * q_RHd.shape[-1] ** -0.5  # [R, G, heads per group, d]
    scores = torch.einsum("rghd,rsgd->rghs", q, k_RSGd).to(exact)
    lse = scores.logsumexp(-1)
    weight = (scores - lse[..., None]).exp().to(q_RHd.dtype)
    out = torch.einsum("rghs,rsgd->rghd", weight, v_RSGd)
    return out.flatten(1, 2), lse.flatten(1, 2)
