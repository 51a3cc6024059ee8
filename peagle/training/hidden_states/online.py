"""What the target says at each token of a packed batch: its final hidden states and its aux_hidden_states.

`OnlineHiddenStates` runs the target with the drafter and stores nothing; `cache` keeps them on disk, `vllm_files` reads
those that vLLM stored. Knows nothing about drafters or losses.

Worked example: two documents, of 3 and 2 tokens, in one batch. What row i of the target sees, in a layer without a
window and in one with a window of 2:

    index       0  1  2  3  4
    start       0  0  0  3  3
    position    0  1  2  0  1
    low         0  0  0  3  3      no window: the document's first token
    low, 2      0  0  1  3  3      a window of 2: the token itself and the one before it
    high        1  2  3  4  5

Shapes: N tokens of a packed batch, D target width, X tap width (aux_hidden_states * D), H heads, G key/value heads,
d head width.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from peagle.config import Window
from peagle.data.batches import PackedBatch, PackedEpoch
from peagle.kernels.attention.dense import apply_sinks, first_visible_position
from peagle.kernels.attention.ranged import KeyRanges, ranged_attention
from peagle.models.decoder import Decoder


@dataclass(frozen=True)
class TargetHiddenStates:
    """On the device, one row for each token of a batch. Nothing in them asks for gradients."""

    hidden_ND: Tensor  # final ones, normed: what the target's head reads
    aux_hidden_states_NX: Tensor  # the aux_hidden_states layers, side by side


class HiddenStatesSource(Protocol):
    def states(self, batch: PackedBatch) -> TargetHiddenStates:
        """The batch lies on the CPU."""
        ...


@dataclass(frozen=True)
class PackedDocument:
    """One data row as it is trained on. Its tokens are its name: where they are equal, so are the states."""

    row_id: str
    token_ids: NDArray[np.int32]

    @property
    def name(self) -> str:
        return token_hash(self.token_ids)


def token_hash(token_ids: NDArray[np.int32]) -> str:
    return hashlib.blake2b(token_ids.astype(np.int32).tobytes(), digest_size=16).hexdigest()


def documents(batch: PackedBatch) -> list[PackedDocument]:
    """Of a batch on the CPU, in order."""
    starts = batch.start_N.unique_consecutive()
    bounds = zip(batch.row_ids, starts.tolist(), batch.end_N[starts].tolist(), strict=True)
    token_N = batch.token_ids_N.int().numpy()
    return [PackedDocument(row_id, token_N[start:end]) for row_id, start, end in bounds]


def documents_in_order(packing: PackedEpoch) -> Iterator[PackedDocument]:
    """The rows of a packing in the order of the data, cut as they are in its batches."""
    own = packing.examples
    for e in own.chosen.tolist():
        begin = packing.begin_E[e]
        yield PackedDocument(own.row_ids[e], own.token_T[begin : begin + packing.length_E[e]])


class DocumentAttention:
    """Attention of a packed batch: a row sees its own document up to itself, less where the layer has a window."""

    def __init__(self, start_N: Tensor) -> None:
        self.start_N = start_N
        self.index_N = torch.arange(len(start_N), device=start_N.device)
        self._ranges: dict[Window, KeyRanges] = {}

    def ranges(self, window: Window) -> KeyRanges:
        """Made once for each window, so that layers share what the kernel finds out about it."""
        if window not in self._ranges:
            low_N = self.start_N
            if window is not None:
                low_N = low_N + first_visible_position(self.index_N - self.start_N, window).clamp(min=0)
            self._ranges[window] = KeyRanges(low_N, self.index_N + 1)
        return self._ranges[window]

    def __call__(
        self,
        layer: int,
        q_NHd: Tensor,
        k_NGd: Tensor,
        v_NGd: Tensor,
        window: Window,
        sinks: Tensor | None = None,
    ) -> Tensor:
        out_NHd, lse_NH = ranged_attention(q_NHd, k_NGd, v_NGd, self.ranges(window))
        return out_NHd if sinks is None else apply_sinks(out_NHd, lse_NH, sinks)


class OnlineHiddenStates:
    """The target itself, asked anew for every batch."""

    def __init__(self, target: Decoder, aux_layer_ids: Sequence[int]) -> None:
        assert aux_layer_ids and max(aux_layer_ids) <= target.cfg.num_layers, aux_layer_ids
        self.target, self.aux_layer_ids = target, tuple(aux_layer_ids)

    @property
    def device(self) -> torch.device:
        return self.target.embed_tokens.weight.device

    # not inference mode: what comes out of that may not be saved for a backward pass, which the aux_hidden_states are
    @torch.no_grad()
    def states(self, batch: PackedBatch) -> TargetHiddenStates:
        moved = batch.to(self.device)
        attend = DocumentAttention(moved.start_N)
        hidden_ND, aux_hidden_states_NX = self.target(moved.token_ids_N, moved.position_N, attend, self.aux_layer_ids)
        assert aux_hidden_states_NX is not None
        return TargetHiddenStates(hidden_ND, aux_hidden_states_NX)


@torch.no_grad()
def fingerprint(target: Decoder) -> str:
    """Tells targets apart: shape and weights, and what the weights are kept in.

    Of every matrix the rows' and the columns' sums, over the numbers' bits as integers: exact, so the same on every
    device, and as fast as the weights can be read.
    """
    digest = hashlib.sha256(repr(target.cfg).encode())
    for name, weight in sorted(target.named_parameters()):
        bits = weight.detach().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[weight.element_size()])
        bits = bits.reshape(len(bits), -1)
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        for sums in (bits.sum(0, dtype=torch.int64), bits.sum(1, dtype=torch.int64)):
            digest.update(sums.cpu().numpy().tobytes())
    return digest.hexdigest()
