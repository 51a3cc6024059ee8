"""Assigns rows to chunks so that rows with the same teacher position share its logits.

Shapes: R rows, P distinct teacher positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from peagle.kernels.host_transfer import copy_to_device


@dataclass(frozen=True)
class LossChunk:
    """Rows `rows` of the sorted order; `positions` slices `LossSchedule.positions_P`."""

    rows: slice
    positions: slice


@dataclass(frozen=True)
class LossSchedule:
    """Rows sorted by teacher position and cut into chunks.

    Worked example, at most 3 rows or positions per chunk, teacher positions 7 2 7 2 5 7:
        order_R 1 3 4 0 2 5, positions_P 2 5 7, position_index_R 0 0 1 2 2 2
        chunks: rows 0:3 with positions 0:2, rows 3:6 with positions 2:3
    """

    order_R: Tensor  # row indices, sorted by teacher position
    positions_P: Tensor  # the distinct teacher positions, ascending
    position_index_R: Tensor  # index into positions_P of each sorted row
    chunks: list[LossChunk]


def build_loss_schedule(position_R: Tensor, max_chunk_rows: int, device: torch.device) -> LossSchedule:
    """Builds a schedule with at most `max_chunk_rows` rows and positions per chunk.

    `position_R` is each row's teacher position. Pass it on the CPU to avoid a device synchronisation.
    """
    position = position_R.cpu().numpy()
    fits_16_bits = len(position) and position.max() < 1 << 16  # numpy then uses radix sort
    order = np.argsort(position.astype(np.uint16) if fits_16_bits else position, kind="stable")
    positions, begins = np.unique(position[order], return_index=True)
    ends = np.append(begins[1:], len(order))  # end of each position's rows
    position_index = np.repeat(np.arange(len(positions)), ends - begins)
    chunks: list[LossChunk] = []
    row = 0
    while row < len(order):
        first = int(position_index[row])
        last = int(np.searchsorted(ends, row + max_chunk_rows, side="right"))  # positions before it end in the chunk
        last = min(last, first + max_chunk_rows)
        # One position may have more rows than fit into a chunk.
        end = int(ends[last - 1]) if last > first else row + max_chunk_rows
        chunks.append(LossChunk(slice(row, end), slice(first, max(last, first + 1))))
        row = end

    def to_device(x: NDArray[np.int64]) -> Tensor:
        return copy_to_device(torch.from_numpy(x), device)

    return LossSchedule(to_device(order), to_device(positions), to_device(position_index), chunks)


@dataclass(frozen=True)
class StaticLossShape:
    """Fixed chunk sizes for CUDA graphs: chunks of `chunk_rows` rows with `chunk_positions` positions each.

    Worked example, 7 rows, chunks of 3 rows with 2 positions, teacher positions 7 2 7 2 5: rows 5 and 6 are padding.
        order_R 1 3 4 0 2 5 6, chunks 1 3 4 | 0 2 5 | 6, positions_P 2 5 | 7 7 | 7 7, position_index_R 0 0 1 2 2 2 4
    """

    num_rows: int
    chunk_rows: int
    chunk_positions: int

    @property
    def chunks(self) -> list[LossChunk]:
        starts = range(0, self.num_rows, self.chunk_rows)
        width = self.chunk_positions
        return [
            LossChunk(slice(row, min(row + self.chunk_rows, self.num_rows)), slice(i * width, (i + 1) * width))
            for i, row in enumerate(starts)
        ]

    def build_schedule(self, position_R: Tensor) -> LossSchedule | None:
        """Builds a schedule on the CPU, or returns None if a chunk has more positions than `chunk_positions`.

        Padding rows repeat the last teacher position; give them weight 0.
        """
        position = position_R.numpy()
        count = len(position)
        assert 0 < count <= self.num_rows, (count, self.num_rows)
        order = np.arange(self.num_rows)
        order[:count] = np.argsort(position, kind="stable")
        sorted_position = np.full(self.num_rows, position.max())
        sorted_position[:count] = position[order[:count]]
        positions = np.full(len(self.chunks) * self.chunk_positions, sorted_position[-1])
        position_index = np.zeros(self.num_rows, dtype=np.int64)
        for chunk in self.chunks:
            own = sorted_position[chunk.rows]
            rank = np.concatenate([[0], np.cumsum(own[1:] != own[:-1])])
            if rank[-1] >= self.chunk_positions:
                return None
            position_index[chunk.rows] = chunk.positions.start + rank
            positions[chunk.positions.start + rank] = own
        order_R, positions_P, index_R = (torch.from_numpy(x) for x in (order, positions, position_index))
        return LossSchedule(order_R, positions_P, index_R, self.chunks)
