"""Who sees whom while a drafter trains, by rule: an `Attend` for depth 0, one for chains, one for EAGLE-3's steps.

Knows nothing about losses or chunks of rows. A row at (anchor a, depth d) sees the depth-0 rows of its document up to
a, its own chain up to itself, and nothing else. Both are ranges (see `kernels.ranged_attention`), so no mask exists.

Shapes: N depth-0 rows, R chain rows, H heads, G key/value heads, d head width, S earlier steps of a chain.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from peagle.config import ChunkedAttention
from peagle.kernels.attention.ranged import KeyRanges, merge_attn_states, ranged_attention
from peagle.training.hidden_states.online import DocumentAttention

Window = int | None


class DepthZeroAttention(DocumentAttention):
    """Rows see their document up to themselves. Keys and values of every layer are kept for the chains."""

    def __init__(self, start_N: Tensor) -> None:
        super().__init__(start_N)
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(
        self,
        layer: int,
        q_NHd: Tensor,
        k_NGd: Tensor,
        v_NGd: Tensor,
        window: Window | ChunkedAttention,
        sinks: Tensor | None = None,
    ) -> Tensor:
        if layer not in self.kept:  # a recomputed layer comes by twice; the graph holds on to the first
            self.kept[layer] = (k_NGd, v_NGd)
        return super().__call__(layer, q_NHd, k_NGd, v_NGd, window, sinks)


@dataclass
class ChainAttention:
    """Mask rows, all depths of a chain at once: depth 0 up to the anchor, and the chain up to the row itself."""

    depth_zero: dict[int, tuple[Tensor, Tensor]]
    start_R: Tensor
    anchor_R: Tensor
    depth_R: Tensor
    first_R: Tensor
    _above: dict[Window, list[tuple[Tensor | None, KeyRanges]]] = field(default_factory=dict)
    _own: dict[Window, KeyRanges] = field(default_factory=dict)

    def __call__(self, layer: int, q_RHd: Tensor, k_RGd: Tensor, v_RGd: Tensor, window: Window) -> Tensor:
        if window not in self._own:
            row_R = torch.arange(len(self.anchor_R), device=self.anchor_R.device)
            self._own[window] = KeyRanges(_low(self.first_R, row_R, window), row_R + 1)
            self._above[window] = self._parts(window)
        above = self._over_depth_zero(q_RHd, *self.depth_zero[layer], self._above[window])
        return merge_attn_states(*above, *ranged_attention(q_RHd, k_RGd, v_RGd, self._own[window]))[0]

    def _parts(self, window: Window) -> list[tuple[Tensor | None, KeyRanges]]:
        """Rows whose ranges never fall. Where a window ends with the row's position, that is one depth at a time."""
        if window is None:
            return [(None, KeyRanges(self.start_R, self.anchor_R + 1))]
        parts: list[tuple[Tensor | None, KeyRanges]] = []
        for depth in range(1, int(self.depth_R.max()) + 1):
            at = self.depth_R.eq(depth).nonzero()[:, 0]
            parts.append((at, _up_to_anchor(self.start_R[at], self.anchor_R[at], depth, window)))
        return parts

    @staticmethod
    def _over_depth_zero(
        q_RHd: Tensor, k_NGd: Tensor, v_NGd: Tensor, parts: list[tuple[Tensor | None, KeyRanges]]
    ) -> tuple[Tensor, Tensor]:
        rows = [at for at, _ in parts if at is not None]
        if not rows:
            return ranged_attention(q_RHd, k_NGd, v_NGd, parts[0][1])
        outs, lses = zip(*(ranged_attention(q_RHd[at], k_NGd, v_NGd, ranges) for at, ranges in parts), strict=True)
        back = torch.cat(rows).argsort()
        return torch.cat(outs)[back], torch.cat(lses)[back]


@dataclass
class Eagle3StepAttention:
    """EAGLE-3's rows of one depth: depth 0 up to the anchor, and the rows before it in its chain, each kept by layer.

    `follow` moves on to the next depth, with the chains that have one.
    """

    depth_zero: dict[int, tuple[Tensor, Tensor]]
    start_R: Tensor
    anchor_R: Tensor
    depth: int = 1
    chain: dict[int, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)
    _ranges: dict[Window, KeyRanges] = field(default_factory=dict)

    def follow(self, going_on: Tensor) -> Eagle3StepAttention:
        chain = {i: [(k[going_on], v[going_on]) for k, v in rows] for i, rows in self.chain.items()}
        return Eagle3StepAttention(
            self.depth_zero, self.start_R[going_on], self.anchor_R[going_on], self.depth + 1, chain
        )

    def __call__(self, layer: int, q_RHd: Tensor, k_RGd: Tensor, v_RGd: Tensor, window: Window) -> Tensor:
        if window not in self._ranges:
            self._ranges[window] = _up_to_anchor(self.start_R, self.anchor_R, self.depth, window)
        before = self.chain.get(layer, [])[: self.depth - 1]  # without what a recomputed layer put there itself
        self.chain[layer] = [*before, (k_RGd, v_RGd)]
        seen = self.chain[layer][-window:] if window is not None else self.chain[layer]
        earlier = ranged_attention(q_RHd, *self.depth_zero[layer], self._ranges[window])
        return merge_attn_states(*earlier, *_over_few(q_RHd, seen))[0]


def _low(start: Tensor, position: Tensor, window: Window) -> Tensor:
    return start if window is None else torch.maximum(start, position - window + 1)


def _up_to_anchor(start_R: Tensor, anchor_R: Tensor, depth: int, window: Window) -> KeyRanges:
    """The depth-0 rows that rows of one depth see; a window may have left them behind."""
    return KeyRanges(_low(start_R, anchor_R + depth, window).minimum(anchor_R + 1), anchor_R + 1)


def _over_few(q_RHd: Tensor, seen: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Every row over its own few keys."""
    k_RSGd, v_RSGd = (torch.stack(x, 1) for x in zip(*seen, strict=True))
    exact = torch.float64 if q_RHd.dtype == torch.float64 else torch.float32
    q = q_RHd.unflatten(1, (k_RSGd.shape[2], -1)) * q_RHd.shape[-1] ** -0.5  # [R, G, heads that share one, d]
    scores = torch.einsum("rghd,rsgd->rghs", q, k_RSGd).to(exact)
    lse = scores.logsumexp(-1)
    weight = (scores - lse[..., None]).exp().to(q_RHd.dtype)
    out = torch.einsum("rghs,rsgd->rghd", weight, v_RSGd)
    return out.flatten(1, 2), lse.flatten(1, 2)
