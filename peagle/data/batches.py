"""Packed batches: whole conversations one behind another, in an order that (seed, epoch) fixes.

Knows nothing about files and text. A conversation is never split. One that is longer than a batch, or than
`max_length`, loses the front of its prompt, then the end of its response. N tokens of a batch with documents
[7 8 9], whose response is [8 9], and [4 5], whose response is [5]:

    token_ids_N  7 8 9 4 5
    position_N   0 1 2 0 1
    start_N      0 0 0 3 3
    end_N        3 3 3 5 5
    loss_mask_N  . x x . x

Several processes share one endless row of batches, epoch behind epoch: in a step, process r of w takes the r-th of
the next w. So no batch is left out or repeated where an epoch ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import BoolTensor, LongTensor

from peagle.config import PackingSettings
from peagle.data.dataset import ResponseDataset
from peagle.errors import UserError
from peagle.kernels.host_transfer import copy_to_device


@dataclass(frozen=True)
class PackedBatch:
    token_ids_N: LongTensor
    position_N: LongTensor  # within its document
    start_N: LongTensor  # index in the batch of the first token of its document
    end_N: LongTensor  # index behind the last token of its document
    loss_mask_N: BoolTensor  # the token is a response's: worth predicting
    row_ids: tuple[str, ...]  # of the rows in it, for messages

    def to(self, device: torch.device | str) -> PackedBatch:
        moved: dict[str, Any] = {
            name: copy_to_device(getattr(self, name), device)
            for name in ("token_ids_N", "position_N", "start_N", "end_N", "loss_mask_N")
        }
        return replace(self, **moved)

    def __len__(self) -> int:
        return len(self.token_ids_N)


@dataclass(frozen=True)
class BatchCursor:
    """The batch that comes next."""

    epoch: int = 0
    batch: int = 0


@dataclass(frozen=True)
class PackedEpoch(Sequence[PackedBatch]):
    """An epoch's batches; each is built when it is asked for."""

    examples: ResponseDataset
    tokens_per_batch: int
    begin_E: NDArray[np.int64]  # first token that is kept
    front_E: NDArray[np.int64]  # tokens cut off before it
    length_E: NDArray[np.int64]  # tokens kept
    groups: tuple[NDArray[np.int64], ...]  # examples of each batch

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, index: int) -> PackedBatch:  # type: ignore[override]
        chosen = self.groups[index]
        own = self.examples
        length_D = self.length_E[chosen]
        behind_D = np.cumsum(length_D)
        first_D = behind_D - length_D
        count = int(behind_D[-1])
        place_N = np.arange(count)
        start_N = np.repeat(first_D, length_D)
        token_N = own.token_T[np.repeat(self.begin_E[chosen] - first_D, length_D) + place_N]
        return PackedBatch(
            torch.from_numpy(token_N.astype(np.int64)),  # type: ignore[arg-type]
            torch.from_numpy(place_N - start_N),  # type: ignore[arg-type]
            torch.from_numpy(start_N),  # type: ignore[arg-type]
            torch.from_numpy(np.repeat(behind_D, length_D)),  # type: ignore[arg-type]
            torch.from_numpy(self._asked(chosen, first_D, length_D, count)),  # type: ignore[arg-type]
            tuple(own.row_ids[e] for e in chosen.tolist()),
        )

    def _asked(
        self, chosen: NDArray[np.int64], first_D: NDArray[np.int64], length_D: NDArray[np.int64], count: int
    ) -> NDArray[np.bool_]:
        """Where spans lie: +1 where one begins, -1 behind its end, summed up."""
        spans, offset = self.examples.span_S2, self.examples.span_offset_E
        number_D = offset[chosen + 1] - offset[chosen]
        which = np.repeat(offset[chosen] - (np.cumsum(number_D) - number_D), number_D) + np.arange(number_D.sum())
        front, first, length = (np.repeat(x_D, number_D) for x_D in (self.front_E[chosen], first_D, length_D))
        steps = np.zeros(count + 1, np.int32)
        for side, sign in ((0, 1), (1, -1)):
            np.add.at(steps, first + np.clip(spans[which, side] - front, 0, length), sign)
        return np.cumsum(steps[:-1]) > 0

    @property
    def truncated(self) -> int:
        """Conversations that were too long."""
        own = self.examples
        return int((self.length_E[own.chosen] < own.lengths).sum())

    @property
    def filled(self) -> float:
        """Share of the room that tokens take; the rest is lost to conversations that did not fit."""
        return int(self.length_E[self.examples.chosen].sum()) / (len(self) * self.tokens_per_batch)


def pack(
    examples: ResponseDataset, tokens_per_batch: int, seed: int = 0, epoch: int = 0, max_length: int | None = None
) -> PackedEpoch:
    """All examples once, in batches of at most so many tokens."""
    if tokens_per_batch < 1 or (max_length is not None and max_length < 1):
        raise UserError(
            f"batches of {tokens_per_batch} tokens, of at most {max_length} a conversation: need at least 1"
        )
    if not len(examples):
        raise UserError("there is no example to make batches of")
    most = min(tokens_per_batch, max_length or tokens_per_batch)
    whole_E = np.diff(examples.offset_E)
    first_span_E = examples.span_S2[examples.span_offset_E[:-1], 0]
    front_E = np.minimum(np.maximum(whole_E - most, 0), first_span_E)
    length_E = np.minimum(whole_E, most)
    rng = np.random.default_rng([seed, epoch])
    order = examples.chosen[np.argsort(rng.random(len(examples)), kind="stable")]
    groups = _filled(order, length_E, tokens_per_batch)
    # which batch is full when depends on lengths; which comes when must not
    turns = np.argsort(rng.random(len(groups)), kind="stable").tolist()
    ordered = tuple(np.array(groups[i]) for i in turns)
    return PackedEpoch(examples, tokens_per_batch, examples.offset_E[:-1] + front_E, front_E, length_E, ordered)


def _filled(order: NDArray[np.int64], length_E: NDArray[np.int64], budget: int) -> list[list[int]]:
    """Each example into the first open batch with room; when too many are open, the fullest is closed."""
    closed: list[list[int]] = []
    filling: list[list[int]] = []
    room: list[int] = []
    for e, length in zip(order.tolist(), length_E[order].tolist(), strict=True):
        for i, left in enumerate(room):
            if length <= left:
                filling[i].append(e)
                room[i] -= length
                break
        else:
            if len(filling) == PackingSettings.open_batches:
                fullest = room.index(min(room))
                closed.append(filling.pop(fullest))
                del room[fullest]
            filling.append([e])
            room.append(budget - length)
    return closed + filling


def batches(
    examples: ResponseDataset,
    tokens_per_batch: int,
    seed: int = 0,
    start: BatchCursor | None = None,
    epochs: int | None = None,
    max_length: int | None = None,
    rank: int = 0,
    world_size: int = 1,
) -> Iterator[tuple[PackedBatch, BatchCursor]]:
    """One process's batches from `start` on, each with the cursor behind its step: the same for every process, and
    what to start from to go on. Without `epochs` it never ends; with them, batches that are not enough for every
    process to have one are left out at the very end."""
    if not 0 <= rank < world_size:
        raise UserError(f"process {rank} of {world_size}: must be one of them")
    cursor = start or BatchCursor()
    packing = pack(examples, tokens_per_batch, seed, cursor.epoch, max_length)
    if not 0 <= cursor.batch <= len(packing):
        raise UserError(f"batch {cursor.batch} of epoch {cursor.epoch}: it has {len(packing)}; is this the same data?")
    while True:
        own = None
        for place in range(world_size):
            while cursor.batch >= len(packing):
                cursor = BatchCursor(cursor.epoch + 1)
                if epochs is not None and cursor.epoch >= epochs:
                    return
                packing = pack(examples, tokens_per_batch, seed, cursor.epoch, max_length)
            if epochs is not None and cursor.epoch >= epochs:
                return
            if place == rank:
                own = packing[cursor.batch]
            cursor = BatchCursor(cursor.epoch, cursor.batch + 1)
        assert own is not None
        yield own, cursor
