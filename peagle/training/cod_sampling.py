"""Which (anchor, depth) rows a packed batch trains on.

Knows nothing about drafters, attention or losses. Depth 0 has a row for every token: they are what everyone else
sees. A chain hangs on a depth-0 row (its anchor) and has rows at depths 1, 2, .. up to where it ends. The row at
(a, d) is asked for token a + d + 2, so that is where its question must be: in the same document and in a response,
as must the questions of all rows before it in the chain.

Chains are sampled: of the anchors whose chain could reach depth d about rate^d do, nested, so that a chain which is
kept at a depth is kept at every smaller one. Every anchor draws one number for that; depth d keeps the smallest.

Worked example: a document of 8 tokens, the response is tokens 3 to 7, 3 depths, rate 0.5.

    anchor            0  1  2  3  4  5  6  7
    asks for token    2  3  4  5  6  7  -  -      depth 0; token 2 belongs to the prompt, so it is not asked for
    could reach 1        4  5  6  7               4 anchors: round(4 * 0.5)  = 2 of them do
    could reach 2        5  6  7                  3 anchors: round(3 * 0.25) = 1 of those two, if any of them could

If the draw is 1 and 4 for depth 1, only 1 can go on: anchors asked at depth 0 are 1 2 3 4 5, and the chain rows, by
anchor, are (1,1) (1,2) (4,1).

Shapes: N tokens of a batch, A anchors that are asked at depth 0, R chain rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.data.batches import PackedBatch


@dataclass(frozen=True)
class CodPositions:
    """Indices into a batch. Chain rows are sorted by anchor, then depth, so that each chain lies in one piece."""

    anchor_A: Tensor  # depth-0 rows that are asked
    anchor_R: Tensor
    depth_R: Tensor
    first_R: Tensor  # the row, of R, that its chain begins with
    counts: tuple[int, ...]  # rows that are asked, by depth

    @property
    def depths(self) -> int:
        return len(self.counts)

    def chunk_slices(self, limit: int) -> Iterator[slice]:
        """Whole chains, at most `limit` rows together; a single chain may be longer than that."""
        total = len(self.anchor_R)
        if total <= limit:
            if total:
                yield slice(0, total)
            return
        starts = self.first_R.unique_consecutive()
        begin = 0
        while begin < total:
            after = int(torch.searchsorted(starts, begin + limit, right=True))
            end = int(starts[after - 1]) if begin + limit < total else total
            if end <= begin:  # the chain that begins here is longer than the limit
                end = int(starts[after]) if after < len(starts) else total
            yield slice(begin, end)
            begin = end


def sampling_generator(seed: int, step: int, rank: int = 0) -> torch.Generator:
    """The draws of a step are a function of these, so that a run which is resumed needs no other memory of them."""
    mixed = (seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + rank * 0x94D049BB133111EB) % 2**63
    return torch.Generator().manual_seed(mixed)


def sample_cod_positions(batch: PackedBatch, depths: int, rate: float, rng: torch.Generator) -> CodPositions:
    """All tensors on the CPU, as the batch is."""
    size = len(batch.token_ids_N)
    index = torch.arange(size)
    reach_N = _reach(batch)
    anchor_A = index[reach_N > 0]
    kept = anchor_A[torch.rand(len(anchor_A), generator=rng).argsort()]
    counts, ends_N = [len(anchor_A)], torch.zeros(size, dtype=torch.long)
    ends_N[anchor_A] = 1
    for depth in range(1, depths):
        able = int((reach_N > depth).sum())
        kept = kept[reach_N[kept] > depth][: round(able * rate**depth)]
        ends_N[kept] = depth + 1
        counts.append(len(kept))
    return _laid_out(anchor_A, ends_N, tuple(counts))


def all_cod_positions(batch: PackedBatch, depths: int) -> CodPositions:
    """Every row there is."""
    return sample_cod_positions(batch, depths, 1.0, torch.Generator())


def _reach(batch: PackedBatch) -> Tensor:
    """How many depths a chain on each anchor could have, depth 0 included: the asked tokens from a + 2 on."""
    asked, size = batch.loss_mask_N, len(batch.loss_mask_N)
    index = torch.arange(size)
    # the next token that may not be asked for: one outside a response, or the end of the document
    stop_N = torch.where(asked, batch.end_N, index)
    stop_N = stop_N.flip(0).cummin(0).values.flip(0)  # documents end before the next one's tokens, so ends never fall
    after = (index + 2).clamp(max=size - 1)
    inside = index + 2 < batch.end_N
    return torch.where(inside, (stop_N[after] - (index + 2)).clamp(min=0), 0)


def _laid_out(anchor_A: Tensor, ends_N: Tensor, counts: tuple[int, ...]) -> CodPositions:
    lengths_A = ends_N[anchor_A] - 1
    anchor_R = anchor_A.repeat_interleave(lengths_A)
    starts_A = lengths_A.cumsum(0) - lengths_A
    first_R = starts_A.repeat_interleave(lengths_A)
    depth_R = torch.arange(len(anchor_R)) - first_R + 1
    return CodPositions(anchor_A, anchor_R, depth_R, first_R, counts)
