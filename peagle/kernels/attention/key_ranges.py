"""The keys that each row of ranged attention sees.

Shapes: R rows, S keys.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from peagle.kernels.host_transfer import copy_to_device

# The torch version processes chunks of at most this many scores over all heads: 16 MB in fp32.
MAX_CHUNK_SCORES = 4 << 20
# A chunk ends when it would compute more than twice the visible scores of its rows, but not before this many rows.
MIN_CHUNK_ROWS = 32


def pad_row_count(rows: int) -> int:
    """Rounds up to a multiple of 4: lines of 32-bit values then start at multiples of 16 bytes, as TMA requires."""
    return -(-rows // 4) * 4


@dataclass(frozen=True)
class RowChunk:
    """Consecutive rows, and the keys that any of them sees."""

    rows: slice
    keys: slice


@dataclass(frozen=True, eq=False)
class KeyRanges:
    """Row r sees keys lo_R[r] <= j < hi_R[r], none if hi <= lo. Neither lo nor hi decreases from row to row.

    Tile bounds are computed once and cached, so layers should share one object; the tensors must not change.

    Worked example: documents of 3 and 2 tokens, where each row sees its own document up to itself, and
    `get_row_spans(5, tile=2)`, which tells for each tile of two keys which rows see it:

        row   0  1  2  3  4            keys 0 1   keys 2 3   keys 4
        lo    0  0  0  3  3   first        0          2         4      first row that sees any key of the tile
        hi    1  2  3  4  5   full_first   1          3         4      first row that sees all keys of the tile
                              full_end     3          3         5      end of the rows that see all keys
                              end          3          5         5      end of the rows that see any key
    """

    lo_R: Tensor
    hi_R: Tensor
    bounds: Tensor = field(init=False, repr=False)  # lo and hi as one int32 tensor [2, pad_row_count(R)]
    _chunks: dict[int, list[RowChunk]] = field(default_factory=dict, init=False, repr=False)
    _spans: dict[tuple[int, int], Tensor] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        rows = len(self.lo_R)
        assert self.lo_R.shape == self.hi_R.shape == (rows,), (self.lo_R.shape, self.hi_R.shape)
        bounds = self.lo_R.new_zeros(2, pad_row_count(rows), dtype=torch.int32)
        bounds[0, :rows], bounds[1, :rows] = self.lo_R, self.hi_R
        for name, value in (("bounds", bounds), ("lo_R", bounds[0, :rows]), ("hi_R", bounds[1, :rows])):
            object.__setattr__(self, name, value)

    def __len__(self) -> int:
        return len(self.lo_R)

    def to(self, device: torch.device | str) -> KeyRanges:
        return KeyRanges(copy_to_device(self.lo_R, device), copy_to_device(self.hi_R, device))

    def get_row_spans(self, num_keys: int, tile: int) -> Tensor:
        """Returns first, full_first, full_end and end of each key tile, [4, tiles] int32; see the example above.

        Runs on the device without synchronising.
        """
        if (num_keys, tile) not in self._spans:
            low = torch.arange(0, num_keys, tile, dtype=torch.int32, device=self.lo_R.device)
            high = (low + tile).clamp(max=num_keys)
            spans = (
                torch.searchsorted(self.hi_R, low, right=True, out_int32=True),
                torch.searchsorted(self.hi_R, high, out_int32=True),
                torch.searchsorted(self.lo_R, low, right=True, out_int32=True),
                torch.searchsorted(self.lo_R, high, out_int32=True),
            )
            self._spans[num_keys, tile] = torch.stack(spans)
        return self._spans[num_keys, tile]

    def get_chunks(self, heads: int) -> list[RowChunk]:
        """Returns all rows in order, cut into chunks with few scores that are mostly visible."""
        if heads not in self._chunks:
            self._chunks[heads] = _cut_chunks(self.lo_R.tolist(), self.hi_R.tolist(), MAX_CHUNK_SCORES // heads)
        return self._chunks[heads]


def _cut_chunks(lo: list[int], hi: list[int], max_scores: int) -> list[RowChunk]:
    chunks: list[RowChunk] = []

    def close_chunk(first: int, end: int) -> None:
        chunks.append(RowChunk(slice(first, end), slice(lo[first], max(hi[end - 1], lo[first]))))

    first = num_visible = 0
    for row in range(len(lo)):
        assert row == 0 or (lo[row - 1] <= lo[row] and hi[row - 1] <= hi[row]), f"key ranges decrease at row {row}"
        own = max(hi[row] - lo[row], 0)
        rows, keys = row + 1 - first, max(hi[row] - lo[first], 0)
        wasteful = rows > MIN_CHUNK_ROWS and rows * keys > 2 * (num_visible + own)
        if row > first and (rows * keys > max_scores or wasteful):
            close_chunk(first, row)
            first, num_visible = row, 0
        num_visible += own
    if len(lo):
        close_chunk(first, len(lo))
    return chunks
