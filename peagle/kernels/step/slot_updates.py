"""What changed hands on the host -> the state of the slots, in one launch.

Knows nothing about requests. Changes are two rows of numbers, cells and what they hold from now on; the cells of the
three arrays that the host writes are numbered through. A kernel reads them where they lie, in the host's memory: a copy
for each array and a handful of launches that scatter it would stand between two rounds.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from peagle.kernels.host_transfer import PinnedRing, copy_to_device
from peagle.kernels.step.verify_inputs import SlotState

try:
    import triton
    from triton import language as tl
except ImportError:  # no wheel for this machine: the torch version serves
    triton = None

_jit = triton.jit(do_not_specialize=["count"]) if triton is not None else lambda kernel: kernel
_BLOCK = 128


def arrays(state: SlotState) -> tuple[Tensor, Tensor, Tensor]:
    """Those that the host writes, in the order in which their cells are numbered."""
    return state.block_tables_SM, state.float_params_3S, state.int_params_2S


def apply_updates_torch(state: SlotState, cells_2N: Tensor) -> None:
    """`cells_2N` is on the host, wherever the state is."""
    where_N, what_N = cells_2N
    first = 0
    for array in arrays(state):
        own_N = (where_N >= first) & (where_N < first + array.numel())
        values = what_N[own_N]
        if array.is_floating_point():
            values = values.int().view(torch.float32)
        at = copy_to_device(where_N[own_N] - first, array.device)
        array.view(-1)[at] = copy_to_device(values.to(array.dtype), array.device)
        first += array.numel()


@_jit
def _change_kernel(
    cells,
    count,
    tables,
    shares,
    counts,
    TABLES: tl.constexpr,
    SHARES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = n < count
    where = tl.load(cells + n, mask=there, other=0)
    what = tl.load(cells + count + n, mask=there, other=0)
    low = what.to(tl.int32)
    tl.store(tables + where, low, mask=there & (where < TABLES))
    where -= TABLES
    tl.store(shares + where, low.to(tl.float32, bitcast=True), mask=there & (where >= 0) & (where < SHARES))
    where -= SHARES
    tl.store(counts + where, what, mask=there & (where >= 0))


def apply_updates_triton(state: SlotState, cells_2N: Tensor) -> None:
    """`cells_2N` is on the device, or in memory of the host that the device can read."""
    count, (tables, shares, counts) = cells_2N.shape[1], arrays(state)
    sizes = {"TABLES": tables.numel(), "SHARES": shares.numel()}
    _change_kernel[(triton.cdiv(count, _BLOCK),)](
        cells_2N, count, tables, shares, counts, **sizes, BLOCK=_BLOCK, num_warps=4
    )


class SlotUpdates:
    """Gathers changes of a state, and sends all of them at once. No cell changes twice in between."""

    def __init__(self, state: SlotState, pinned: PinnedRing) -> None:
        self.state, self.pinned = state, pinned
        self.slots, self.blocks = state.block_tables_SM.shape
        self._where: list[int] = []
        self._what: list[int] = []

    def set_blocks(self, slot: int, first: int, blocks: Sequence[int]) -> None:
        """From its entry `first` on, the slot's table has these."""
        cell = slot * self.blocks + first
        self._where += range(cell, cell + len(blocks))
        self._what += blocks

    def set_sampling_params(self, slot: int, shares: Sequence[float], counts: Sequence[int]) -> None:
        """The slot's column of `float_params_3S`, and of `int_params_2S`."""
        cell = self.slots * self.blocks + slot
        self._where += range(cell, cell + (len(shares) + len(counts)) * self.slots, self.slots)
        self._what += struct.unpack(f"{len(shares)}i", struct.pack(f"{len(shares)}f", *shares))
        self._what += counts

    def pop_updates(self) -> Tensor:
        """[2, N]: the changes gathered so far: cells, and what they hold."""
        cells_2N = torch.tensor((self._where, self._what))
        self._where, self._what = [], []
        return cells_2N

    def send(self) -> None:
        if not self._where:
            return
        cells_2N = self.pop_updates()
        if self.state.num_computed_tokens_S.is_cuda and triton is not None:
            apply_updates_triton(self.state, self.pinned.to_pinned(cells_2N))
        else:
            apply_updates_torch(self.state, cells_2N)
