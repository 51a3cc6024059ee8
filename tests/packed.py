"""Packed batches for tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from peagle.data.batches import PackedBatch


def packed_batch(masks: Sequence[Sequence[int]], vocab: int = 64, seed: int = 0) -> PackedBatch:
    """Documents one after another, of random tokens; a mask says which of a document's tokens are a response's."""
    lengths = [len(mask) for mask in masks]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    rng = torch.Generator().manual_seed(seed)

    def spread(values: Sequence[int]) -> Tensor:
        return torch.tensor(values).repeat_interleave(torch.tensor(lengths))

    return PackedBatch(
        token_ids_N=torch.randint(0, vocab, (sum(lengths),), generator=rng),
        position_N=torch.cat([torch.arange(n) for n in lengths]),
        start_N=spread(starts),
        end_N=spread([s + n for s, n in zip(starts, lengths, strict=True)]),
        loss_mask_N=torch.tensor([bool(x) for mask in masks for x in mask]),
        row_ids=tuple(f"row {i}" for i in range(len(masks))),
    )
