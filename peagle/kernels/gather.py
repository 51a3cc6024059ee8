"""Rows of a table by their numbers: embeddings, angles of positions, the rows of a pass that guess.

Torch's indexing is a launch that the next cannot overlap; this one says what it needs and waits for that alone.

Shapes: V rows of a table, T of them wanted, D numbers a row.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import torch
from torch import Tensor

from peagle.kernels.triton_utils import HAVE_TRITON, INTERPRETED, pdl_launch_options

MOST = 512  # rows; of more, indexing is as fast
PIECE = 1024  # numbers of a row that a program copies

if HAVE_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def _gather_rows_kernel(table, table_row, ids, out, D, WIDTH: tl.constexpr, PDL: tl.constexpr):
        t = tl.program_id(0).to(tl.int64)
        at = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()
        row = tl.load(ids + t).to(tl.int64)
        tl.store(out + t * D + at, tl.load(table + row * table_row + at, mask=at < D), mask=at < D)


def gather_rows_triton(table: Tensor, ids_T: Tensor, after_all: bool = False) -> Tensor:
    flat_VD = table.view(len(table), -1)
    width = flat_VD.shape[1]
    out = torch.empty(len(ids_T), *table.shape[1:], dtype=table.dtype, device=table.device)
    if len(ids_T) == 0 or width == 0:
        return out
    assert flat_VD.stride(1) == 1 and ids_T.is_contiguous()
    piece = min(triton.next_power_of_2(width), PIECE)
    grid = (len(ids_T), triton.cdiv(width, piece))
    _gather_rows_kernel[grid](
        flat_VD,
        flat_VD.stride(0),
        ids_T,
        out,
        width,
        WIDTH=piece,
        num_warps=max(1, min(4, piece // 256)),
        **({"PDL": False} if after_all else pdl_launch_options(table.device)),
    )
    return out


def gather_rows(table: Tensor, ids_T: Tensor, after_all: bool = False) -> Tensor:
    """table[ids_T], which must not be negative; no way back. `after_all`: starts when all before it is done, and so
    what comes behind it may read what they wrote without waiting."""
    if HAVE_TRITON and not INTERPRETED and table.is_cuda and len(ids_T) <= MOST:
        return gather_rows_triton(table, ids_T, after_all)
    return table[ids_T]
