"""Sends changes of block tables and sampling parameters from the host to the request slots, in one launch.

An update is a cell index and a value; the cells of the three arrays that the host writes are numbered consecutively.
The kernel reads the updates from pinned host memory: a copy per array and several scatter launches would delay the next
step.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from peagle.kernels.host_transfer import PinnedRing
from peagle.kernels.step.step_torch import apply_updates_torch
from peagle.kernels.step.step_triton import apply_updates_triton
from peagle.kernels.step.types import SlotState
from peagle.kernels.triton_utils import runs_triton


class SlotUpdates:
    """Collects updates of a state and sends them together. A cell must not change twice before `send`."""

    def __init__(self, state: SlotState, pinned: PinnedRing) -> None:
        self.state, self.pinned = state, pinned
        self.num_slots, self.blocks_per_slot = state.block_tables_SM.shape
        self._cells: list[int] = []
        self._values: list[int] = []

    def set_blocks(self, slot: int, first: int, block_ids: Sequence[int]) -> None:
        """Sets the slot's block table from entry `first` on."""
        cell = slot * self.blocks_per_slot + first
        self._cells += range(cell, cell + len(block_ids))
        self._values += block_ids

    def set_sampling_params(self, slot: int, float_params: Sequence[float], int_params: Sequence[int]) -> None:
        """Sets the slot's column of `float_params_3S` and of `int_params_2S`."""
        cell = self.num_slots * self.blocks_per_slot + slot
        count = len(float_params) + len(int_params)
        self._cells += range(cell, cell + count * self.num_slots, self.num_slots)
        # fp32 values travel as their bits
        self._values += struct.unpack(f"{len(float_params)}i", struct.pack(f"{len(float_params)}f", *float_params))
        self._values += int_params

    def pop_updates(self) -> Tensor:
        """Returns the collected updates [2, N], cells and values, and clears them."""
        cells_2N = torch.tensor((self._cells, self._values))
        self._cells, self._values = [], []
        return cells_2N

    def send(self) -> None:
        """Applies the collected updates to the state."""
        if not self._cells:
            return
        cells_2N = self.pop_updates()
        if runs_triton(self.state.token_ids_SN):
            apply_updates_triton(self.state, self.pinned.to_pinned(cells_2N))
        else:
            apply_updates_torch(self.state, cells_2N)
