"""Hidden states of the target for a packed batch: the final ones, and the auxiliary ones the drafter reads.

`OnlineHiddenStates` runs the target in every step and stores nothing. `cache` stores hidden states on disk,
`vllm` reads those that vLLM stored.

Worked example: two documents, of 3 and 2 tokens, in one batch. The range of rows that each row attends to, in a layer
without a window and in one with a window of 2:

    index       0  1  2  3  4
    start       0  0  0  3  3
    position    0  1  2  0  1
    low         0  0  0  3  3      no window: the document's first token
    low, 2      0  0  1  3  3      a window of 2: the token itself and the one before it
    high        1  2  3  4  5

Shapes: N tokens of a packed batch, D target width, X width of all auxiliary hidden states, H heads, G key/value heads,
d head dimension.
"""

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
from peagle.kernels.attention.ranged import ranged_attention
from peagle.kernels.attention.types import KeyRanges
from peagle.models.decoder import Decoder


@dataclass(frozen=True)
class TargetHiddenStates:
    """On the device, one row per token of a batch, without gradients."""

    hidden_ND: Tensor  # after the final norm: the input of the LM head
    aux_hidden_states_NX: Tensor  # concatenated in the order of aux_layer_ids


class HiddenStatesSource(Protocol):
    def states(self, batch: PackedBatch) -> TargetHiddenStates:
        """Hidden states of a batch on the CPU."""
        ...


@dataclass(frozen=True)
class PackedDocument:
    """One data row, truncated as it is trained on. Equal tokens have equal hidden states, so their hash is its key."""

    row_id: str
    token_ids: NDArray[np.int32]

    @property
    def key(self) -> str:
        return token_hash(self.token_ids)


def token_hash(token_ids: NDArray[np.int32]) -> str:
    return hashlib.blake2b(token_ids.astype(np.int32).tobytes(), digest_size=16).hexdigest()


def split_documents(batch: PackedBatch) -> list[PackedDocument]:
    """The documents of a batch on the CPU, in order."""
    starts = batch.start_N.unique_consecutive()
    bounds = zip(batch.row_ids, starts.tolist(), batch.end_N[starts].tolist(), strict=True)
    token_N = batch.token_ids_N.int().numpy()
    return [PackedDocument(row_id, token_N[start:end]) for row_id, start, end in bounds]


def documents_in_order(epoch: PackedEpoch) -> Iterator[PackedDocument]:
    """The documents of an epoch in the order of the data."""
    dataset = epoch.dataset
    for e in dataset.selected.tolist():
        begin = epoch.begin_E[e]
        yield PackedDocument(dataset.row_ids[e], dataset.token_T[begin : begin + epoch.length_E[e]])


class DocumentAttention:
    """Causal attention within each document of a packed batch."""

    def __init__(self, start_N: Tensor) -> None:
        self.start_N = start_N
        self.index_N = torch.arange(len(start_N), device=start_N.device)
        self._ranges: dict[Window, KeyRanges] = {}

    def ranges(self, window: Window) -> KeyRanges:
        """Cached per window, so that layers share the kernel's preparation."""
        if window not in self._ranges:
            low_N = self.start_N
            if window is not None:
                low_N = low_N + first_visible_position(self.index_N - self.start_N, window).clamp(min=0)
            self._ranges[window] = KeyRanges(low_N, self.index_N + 1)
        return self._ranges[window]

    def __call__(
        self, layer: int, q_NHd: Tensor, k_NGd: Tensor, v_NGd: Tensor, window: Window, sinks: Tensor | None = None
    ) -> Tensor:
        out_NHd, lse_NH = ranged_attention(q_NHd, k_NGd, v_NGd, self.ranges(window))
        return out_NHd if sinks is None else apply_sinks(out_NHd, lse_NH, sinks)


class OnlineHiddenStates:
    """Runs the target for every batch."""

    def __init__(self, target: Decoder, aux_layer_ids: Sequence[int]) -> None:
        assert aux_layer_ids and max(aux_layer_ids) <= target.cfg.num_layers, aux_layer_ids
        self.target, self.aux_layer_ids = target, tuple(aux_layer_ids)

    @property
    def device(self) -> torch.device:
        return self.target.embed_tokens.weight.device

    # no_grad instead of inference mode: the drafter's backward pass saves the auxiliary hidden states
    @torch.no_grad()
    def states(self, batch: PackedBatch) -> TargetHiddenStates:
        moved = batch.to(self.device)
        attend = DocumentAttention(moved.start_N)
        hidden_ND, aux_hidden_states_NX = self.target(moved.token_ids_N, moved.position_N, attend, self.aux_layer_ids)
        assert aux_hidden_states_NX is not None
        return TargetHiddenStates(hidden_ND, aux_hidden_states_NX)


@torch.no_grad()
def target_weights_hash(target: Decoder) -> str:
    """A hash of the target's config, weights and dtypes.

    Sums the bits of every matrix over rows and over columns as integers: exact, equal on every device, and as fast as
    the weights can be read.
    """
    digest = hashlib.sha256(repr(target.cfg).encode())
    for name, weight in sorted(target.named_parameters()):
        bits = weight.detach().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[weight.element_size()])
        bits = bits.reshape(len(bits), -1)
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        for sums in (bits.sum(0, dtype=torch.int64), bits.sum(1, dtype=torch.int64)):
            digest.update(sums.cpu().numpy().tobytes())
    return digest.hexdigest()
