"""Packs conversations into batches, in an order fixed by (seed, epoch).

A conversation is never split. One longer than a batch, or than `max_seq_len`, loses the start of its prompt, then the
end of its response. A batch with documents [7 8 9], whose response is [8 9], and [4 5], whose response is [5]:

    token_ids_N  7 8 9 4 5
    position_N   0 1 2 0 1
    start_N      0 0 0 3 3
    end_N        3 3 3 5 5
    loss_mask_N  . x x . x

All ranks share one endless sequence of batches, epoch after epoch: in each step, rank r of w takes the r-th of the next
w batches. So no batch is skipped or repeated at the end of an epoch.

Shapes: N tokens of a batch, D documents of a batch, E examples of the dataset.
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
    position_N: LongTensor  # within the document
    start_N: LongTensor  # index of the document's first token
    end_N: LongTensor  # index behind the document's last token
    loss_mask_N: BoolTensor  # True for response tokens
    row_ids: tuple[str, ...]  # of the documents

    def to(self, device: torch.device | str) -> PackedBatch:
        names = ("token_ids_N", "position_N", "start_N", "end_N", "loss_mask_N")
        moved: dict[str, Any] = {name: copy_to_device(getattr(self, name), device) for name in names}
        return replace(self, **moved)

    def __len__(self) -> int:
        return len(self.token_ids_N)


@dataclass(frozen=True)
class BatchCursor:
    """The next batch."""

    epoch: int = 0
    batch: int = 0


@dataclass(frozen=True)
class PackedEpoch(Sequence[PackedBatch]):
    """The batches of an epoch; each is built on access."""

    dataset: ResponseDataset
    tokens_per_batch: int
    begin_E: NDArray[np.int64]  # first kept token
    num_removed_E: NDArray[np.int64]  # tokens removed before it
    length_E: NDArray[np.int64]  # kept tokens
    groups: tuple[NDArray[np.int64], ...]  # examples of each batch

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, index: int) -> PackedBatch:  # type: ignore[override]
        group, dataset = self.groups[index], self.dataset
        length_D = self.length_E[group]
        end_D = np.cumsum(length_D)
        start_D = end_D - length_D
        size = int(end_D[-1])
        index_N = np.arange(size)
        start_N = np.repeat(start_D, length_D)
        token_N = dataset.token_T[np.repeat(self.begin_E[group] - start_D, length_D) + index_N]
        return PackedBatch(
            torch.from_numpy(token_N.astype(np.int64)),  # type: ignore[arg-type]
            torch.from_numpy(index_N - start_N),  # type: ignore[arg-type]
            torch.from_numpy(start_N),  # type: ignore[arg-type]
            torch.from_numpy(np.repeat(end_D, length_D)),  # type: ignore[arg-type]
            torch.from_numpy(self._loss_mask(group, start_D, length_D, size)),  # type: ignore[arg-type]
            tuple(dataset.row_ids[e] for e in group.tolist()),
        )

    def _loss_mask(
        self, group: NDArray[np.int64], start_D: NDArray[np.int64], length_D: NDArray[np.int64], size: int
    ) -> NDArray[np.bool_]:
        """Adds +1 at the start and -1 behind the end of each span, then takes the cumulative sum."""
        spans, offset = self.dataset.span_S2, self.dataset.span_offset_E
        count_D = offset[group + 1] - offset[group]
        which = np.repeat(offset[group] - (np.cumsum(count_D) - count_D), count_D) + np.arange(count_D.sum())
        removed, start, length = (np.repeat(x_D, count_D) for x_D in (self.num_removed_E[group], start_D, length_D))
        steps = np.zeros(size + 1, np.int32)
        for side, sign in ((0, 1), (1, -1)):
            np.add.at(steps, start + np.clip(spans[which, side] - removed, 0, length), sign)
        return np.cumsum(steps[:-1]) > 0

    @property
    def num_truncated(self) -> int:
        """Conversations that were too long."""
        return int((self.length_E[self.dataset.selected] < self.dataset.lengths).sum())

    @property
    def fill_rate(self) -> float:
        """Share of the batches' capacity that is used."""
        return int(self.length_E[self.dataset.selected].sum()) / (len(self) * self.tokens_per_batch)


def pack(
    dataset: ResponseDataset, tokens_per_batch: int, seed: int = 0, epoch: int = 0, max_seq_len: int | None = None
) -> PackedEpoch:
    """Packs all examples once into batches of at most `tokens_per_batch` tokens."""
    if tokens_per_batch < 1 or (max_seq_len is not None and max_seq_len < 1):
        raise UserError(f"--batch-tokens {tokens_per_batch}, --max-seq-len {max_seq_len}: must be at least 1")
    if not len(dataset):
        raise UserError("data: no example left to train on")
    limit = min(tokens_per_batch, max_seq_len or tokens_per_batch)
    whole_E = np.diff(dataset.offset_E)
    first_span_E = dataset.span_S2[dataset.span_offset_E[:-1], 0]
    num_removed_E = np.minimum(np.maximum(whole_E - limit, 0), first_span_E)
    length_E = np.minimum(whole_E, limit)
    rng = np.random.default_rng([seed, epoch])
    order = dataset.selected[np.argsort(rng.random(len(dataset)), kind="stable")]
    groups = _fill_batches(order, length_E, tokens_per_batch)
    # batches close in an order that depends on lengths, so they are shuffled again
    shuffled = np.argsort(rng.random(len(groups)), kind="stable").tolist()
    ordered = tuple(np.array(groups[i]) for i in shuffled)
    begin_E = dataset.offset_E[:-1] + num_removed_E
    return PackedEpoch(dataset, tokens_per_batch, begin_E, num_removed_E, length_E, ordered)


def _fill_batches(order: NDArray[np.int64], length_E: NDArray[np.int64], capacity: int) -> list[list[int]]:
    """Puts each example into the first open batch it fits; when too many are open, closes the fullest."""
    closed: list[list[int]] = []
    opened: list[list[int]] = []
    free: list[int] = []
    for e, length in zip(order.tolist(), length_E[order].tolist(), strict=True):
        for i, num_free in enumerate(free):
            if length <= num_free:
                opened[i].append(e)
                free[i] -= length
                break
        else:
            if len(opened) == PackingSettings.open_batches:
                fullest = free.index(min(free))
                closed.append(opened.pop(fullest))
                del free[fullest]
            opened.append([e])
            free.append(capacity - length)
    return closed + opened


def batches(
    dataset: ResponseDataset,
    tokens_per_batch: int,
    seed: int = 0,
    start: BatchCursor | None = None,
    epochs: int | None = None,
    max_seq_len: int | None = None,
    rank: int = 0,
    world_size: int = 1,
) -> Iterator[tuple[PackedBatch, BatchCursor]]:
    """One rank's batches from `start` on, each with the cursor behind its step, which is the same for every rank.

    Without `epochs` it never ends; with them, the last batches are dropped if they are too few for every rank."""
    if not 0 <= rank < world_size:
        raise UserError(f"rank {rank}: must be below the world size {world_size}")
    cursor = start or BatchCursor()
    packed = pack(dataset, tokens_per_batch, seed, cursor.epoch, max_seq_len)
    if not 0 <= cursor.batch <= len(packed):
        raise UserError(
            f"batch {cursor.batch} of epoch {cursor.epoch}: the epoch has {len(packed)} batches; the data changed"
        )
    while True:
        own = None
        for turn in range(world_size):
            while cursor.batch >= len(packed):
                cursor = BatchCursor(cursor.epoch + 1)
                if epochs is not None and cursor.epoch >= epochs:
                    return
                packed = pack(dataset, tokens_per_batch, seed, cursor.epoch, max_seq_len)
            if epochs is not None and cursor.epoch >= epochs:
                return
            if turn == rank:
                own = packed[cursor.batch]
            cursor = BatchCursor(cursor.epoch, cursor.batch + 1)
        assert own is not None
        yield own, cursor
