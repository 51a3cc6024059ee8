"""COD sampling: selects the (anchor, depth) positions of a packed batch that are trained.

Depth 0 has one position per token: the ordinary EAGLE-3 position, which all others attend to. A chain starts at a
depth-0 position, its anchor, and has positions at depths 1, 2, .. The position (a, d) predicts token a + d + 2. That
token must lie in the same document and in a response, and so must the labels of all earlier positions of the chain.

Of the anchors whose chain can have depth d, about down_sample_ratio^d are kept. Kept anchors are nested: an anchor kept
at a depth is kept at every smaller depth. Each anchor draws one random number, and depth d keeps the smallest.

Worked example: a document of 8 tokens, the response is tokens 3 to 7, 3 depths, down_sample_ratio 0.5.

    anchor            0  1  2  3  4  5  6  7
    depth-0 label     2  3  4  5  6  7  -  -      token 2 belongs to the prompt, so anchor 0 has no loss
    can have depth 1     4  5  6  7               4 anchors: round(4 * 0.5)  = 2 of them are kept
    can have depth 2     5  6  7                  3 anchors: round(3 * 0.25) = 1 of those two, if one of them can

If depth 1 keeps anchors 1 and 4, only 1 can continue: depth-0 anchors with a loss are 1 2 3 4 5, and the chain
positions, by anchor, are (1,1) (1,2) (4,1).

Shapes: N tokens of a batch, A depth-0 anchors with a loss, R chain positions.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.data.batches import PackedBatch


@dataclass(frozen=True)
class CodPositions:
    """Indices into a batch. Chain positions are sorted by anchor, then depth, so each chain is contiguous."""

    anchor_A: Tensor
    anchor_R: Tensor
    depth_R: Tensor
    chain_start_R: Tensor  # index, in R, of the first position of the chain
    counts: tuple[int, ...]  # positions with a loss, by depth

    @property
    def num_depths(self) -> int:
        return len(self.counts)

    def chunk_slices(self, chunk_size: int) -> Iterator[slice]:
        """Slices of whole chains with at most `chunk_size` positions; a longer chain is a slice of its own."""
        total = len(self.anchor_R)
        bounds = torch.cat([self.chain_start_R.unique_consecutive(), torch.tensor([total])])
        begin = 0
        while begin < total:
            after = int(torch.searchsorted(bounds, begin + chunk_size, right=True))
            end = int(bounds[after - 1])
            if end <= begin:  # the first chain is longer than chunk_size
                end = int(bounds[after])
            yield slice(begin, end)
            begin = end


def sampling_generator(seed: int, step: int) -> torch.Generator:
    """A generator that depends only on its arguments, so a resumed run needs no saved random state."""
    return torch.Generator().manual_seed((seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9) % 2**63)


def sample_cod_positions(
    batch: PackedBatch, num_depths: int, down_sample_ratio: float, rng: torch.Generator
) -> CodPositions:
    """Samples positions of a batch on the CPU; the result is on the CPU too."""
    size = len(batch.token_ids_N)
    index = torch.arange(size)
    max_depths_N = _max_chain_depths(batch)
    anchor_A = index[max_depths_N > 0]
    kept = anchor_A[torch.rand(len(anchor_A), generator=rng).argsort()]
    counts, num_depths_N = [len(anchor_A)], torch.zeros(size, dtype=torch.long)
    num_depths_N[anchor_A] = 1
    for depth in range(1, num_depths):
        num_able = int((max_depths_N > depth).sum())
        kept = kept[max_depths_N[kept] > depth][: round(num_able * down_sample_ratio**depth)]
        num_depths_N[kept] = depth + 1
        counts.append(len(kept))
    return _expand_chains(anchor_A, num_depths_N, tuple(counts))


def all_cod_positions(batch: PackedBatch, num_depths: int) -> CodPositions:
    """Every valid position."""
    return sample_cod_positions(batch, num_depths, 1.0, torch.Generator())


def _max_chain_depths(batch: PackedBatch) -> Tensor:
    """Number of depths, depth 0 included, a chain at each anchor can have: the response tokens from a + 2 on."""
    mask, size = batch.loss_mask_N, len(batch.loss_mask_N)
    index = torch.arange(size)
    # first token at or after each one that has no loss: outside a response, or behind the document
    stop_N = torch.where(mask, batch.end_N, index)
    stop_N = stop_N.flip(0).cummin(0).values.flip(0)
    after = (index + 2).clamp(max=size - 1)
    inside = index + 2 < batch.end_N
    return torch.where(inside, (stop_N[after] - (index + 2)).clamp(min=0), 0)


def _expand_chains(anchor_A: Tensor, num_depths_N: Tensor, counts: tuple[int, ...]) -> CodPositions:
    lengths_A = num_depths_N[anchor_A] - 1
    anchor_R = anchor_A.repeat_interleave(lengths_A)
    starts_A = lengths_A.cumsum(0) - lengths_A
    chain_start_R = starts_A.repeat_interleave(lengths_A)
    depth_R = torch.arange(len(anchor_R)) - chain_start_R + 1
    return CodPositions(anchor_A, anchor_R, depth_R, chain_start_R, counts)
