"""How attention over pages is launched: tiles, shares of the keys, programs. Knows no kernel.

Shapes as in paged_attention.py; what shares are stands in paged_attention_triton.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from peagle.kernels.paged_attention import Pages

# Programs per multiprocessor that splitting the keys aims for.
_FILL = 1
_MAX_SPLITS = 32
_LONG_SPLITS = 4  # from here on asking for tiles ahead pays
_MIN_QUERIES, _MAX_QUERIES = 16, 64

_sm_counts: dict[torch.device, int] = {}


@dataclass(frozen=True)
class Launch:
    """What the paged kernel is compiled and launched with. Tile, splits and warps decide which keys are added up with
    which, and must not depend on the batch; the others are for speed alone."""

    tile: int  # keys at a time
    queries: int  # rows x heads of a group at a time; more go to several programs
    splits: int  # shares
    warps: int
    stages: int
    ahead: int  # tiles asked into the L2 ahead of their use: a power of two, or 0: none
    programs: int = 0  # for the shares; 0: one each


def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 132  # the interpreter: as on an H200
    if device not in _sm_counts:
        _sm_counts[device] = torch.cuda.get_device_properties(device).multi_processor_count
    return _sm_counts[device]


def most_tiles(pages: Pages, block_size: int, tile: int) -> int:
    """That a sequence can have, its new rows included."""
    most = pages.block_tables_BM.shape[1] * block_size
    if pages.max_context is not None:
        most = min(most, pages.max_context + pages.max_rows)
    return max(1, triton.cdiv(most, tile))


def choose_launch(
    pages: Pages, heads: int, kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> Launch:
    """Nothing that decides which keys are added up with which depends on the number of rows, of requests, or on the
    longest context; but for one step, from few requests to many."""
    batch = len(pages.block_tables_BM)
    queries = max(_MIN_QUERIES, triton.next_power_of_2(pages.max_rows * (heads // kv_heads)))
    processors = _FILL * _multiprocessors(device)
    # Few programs: each has its processor to itself, and what counts is how often it waits for memory. Many: several
    # to a processor, which wait in turns.
    few = batch * kv_heads <= processors
    exact, wide = dtype == torch.float32, head_dim > 128  # of wide heads fewer keys fit at a time
    tile = 32 if exact else 64 if head_dim < 128 or (wide and few) else 128 if few else 32
    splits = max(1, min(processors // kv_heads, _MAX_SPLITS)) if few else 1
    programs = max(1, min(processors // (batch * kv_heads), splits, most_tiles(pages, block_size, tile)))
    if head_dim > 256:  # a tile's keys and values are 128 KiB: no room to load another's ahead, nor for as many queries
        return Launch(tile, min(queries, 32), splits, warps=8, stages=1, ahead=0, programs=programs)
    if exact:
        return Launch(tile, min(queries, 32), splits, warps=4, stages=2, ahead=0, programs=programs)
    alone = few and (programs >= _LONG_SPLITS or head_dim < 128)  # a request's keys are cut into many short pieces
    return Launch(
        tile=tile,
        queries=min(queries, _MAX_QUERIES),
        splits=splits,
        warps=8 if wide else max(4, tile // 16),
        stages=2 if wide or (few and not alone) else 3,
        ahead=256 // tile if alone else 0,
        programs=programs,
    )
