"""Attention of drafter training, as ranges of visible rows: no mask is stored.

A position (anchor a, depth d) attends to the depth-0 positions of its document up to a, to its own chain up to itself,
and to nothing else. Both are ranges (see `kernels.attention.ranged`).

Shapes: N depth-0 positions, R chain positions, S steps of a chain, H heads, G key/value heads, d head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from peagle.config import ChunkedAttention
from peagle.kernels.attention.ranged import merge_attn_states, ranged_attention
from peagle.kernels.attention.types import KeyRanges
from peagle.training.hidden_states.online import DocumentAttention

WindowSize = int | None


class DepthZeroAttention(DocumentAttention):
    """Attention of depth 0 over its document. Stores the keys and values of every layer for the chains."""

    def __init__(self, start_N: Tensor) -> None:
        super().__init__(start_N)
        self.keys_values: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(
        self,
        layer: int,
        q_NHd: Tensor,
        k_NGd: Tensor,
        v_NGd: Tensor,
        window: WindowSize | ChunkedAttention,
        sinks: Tensor | None = None,
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
    _depth_zero_parts: dict[WindowSize, list[tuple[Tensor | None, KeyRanges]]] = field(default_factory=dict)
    _chain_ranges: dict[WindowSize, KeyRanges] = field(default_factory=dict)

    def __call__(self, layer: int, q_RHd: Tensor, k_RGd: Tensor, v_RGd: Tensor, window: WindowSize) -> Tensor:
        if window not in self._chain_ranges:
            row_R = torch.arange(len(self.anchor_R), device=self.anchor_R.device)
            self._chain_ranges[window] = KeyRanges(_window_start(self.chain_start_R, row_R, window), row_R + 1)
            self._depth_zero_parts[window] = self._split_by_depth(window)
        parts = self._depth_zero_parts[window]
        over_depth_zero = self._attend_depth_zero(q_RHd, *self.depth_zero[layer], parts)
        over_chain = ranged_attention(q_RHd, k_RGd, v_RGd, self._chain_ranges[window])
        return merge_attn_states(*over_depth_zero, *over_chain)[0]

    def _split_by_depth(self, window: WindowSize) -> list[tuple[Tensor | None, KeyRanges]]:
        """Groups of rows with non-decreasing ranges: all rows, or one depth each if there is a window."""
        if window is None:
            return [(None, KeyRanges(self.start_R, self.anchor_R + 1))]
        parts: list[tuple[Tensor | None, KeyRanges]] = []
        for depth in range(1, int(self.depth_R.max()) + 1):
            at = self.depth_R.eq(depth).nonzero()[:, 0]
            parts.append((at, _depth_zero_ranges(self.start_R[at], self.anchor_R[at], depth, window)))
        return parts

    @staticmethod
    def _attend_depth_zero(
        q_RHd: Tensor, k_NGd: Tensor, v_NGd: Tensor, parts: list[tuple[Tensor | None, KeyRanges]]
    ) -> tuple[Tensor, Tensor]:
        rows = [at for at, _ in parts if at is not None]
        if not rows:
            return ranged_attention(q_RHd, k_NGd, v_NGd, parts[0][1])
        outs, lses = zip(*(ranged_attention(q_RHd[at], k_NGd, v_NGd, ranges) for at, ranges in parts), strict=True)
        restore = torch.cat(rows).argsort()
        return torch.cat(outs)[restore], torch.cat(lses)[restore]


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
