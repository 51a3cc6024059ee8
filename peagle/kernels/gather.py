"""Gathers rows of a table by index: embeddings, rotary angles, the rows that are sampled.

Torch's indexing cannot overlap with the next launch; this kernel uses programmatic dependent launch.

Shapes: V rows of the table, T indices, D elements per row.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

import torch
from torch import Tensor

from peagle.kernels.triton_utils import HAVE_TRITON, pdl_launch_options, runs_triton

MAX_KERNEL_ROWS = 512  # torch's indexing is as fast for more rows
MAX_BLOCK_WIDTH = 1024  # elements of a row that one program copies

if HAVE_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def _gather_rows_kernel(table, table_stride, ids, out, D, WIDTH: tl.constexpr, PDL: tl.constexpr):
        t = tl.program_id(0).to(tl.int64)
        at = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()
        row = tl.load(ids + t).to(tl.int64)
        tl.store(out + t * D + at, tl.load(table + row * table_stride + at, mask=at < D), mask=at < D)


def gather_rows_triton(table: Tensor, ids_T: Tensor, overlap: bool = True) -> Tensor:
    flat_VD = table.view(len(table), -1)
    width = flat_VD.shape[1]
    out = torch.empty(len(ids_T), *table.shape[1:], dtype=table.dtype, device=table.device)
    if len(ids_T) == 0 or width == 0:
        return out
    assert flat_VD.stride(1) == 1 and ids_T.is_contiguous()
    block = min(triton.next_power_of_2(width), MAX_BLOCK_WIDTH)
    _gather_rows_kernel[(len(ids_T), triton.cdiv(width, block))](
        flat_VD, flat_VD.stride(0), ids_T, out, width,
        WIDTH=block,
        num_warps=max(1, min(4, block // 256)), **(pdl_launch_options(table.device) if overlap else {"PDL": False}),
    )  # fmt: skip
    return out


def gather_rows(table: Tensor, ids_T: Tensor, overlap: bool = True) -> Tensor:
    """Returns table[ids_T] for non-negative ids; not differentiable.

    Without `overlap` the kernel starts only when all earlier kernels are done, so a later kernel may read their
    results before its own wait.
    """
    if runs_triton(table) and len(ids_T) <= MAX_KERNEL_ROWS:
        return gather_rows_triton(table, ids_T, overlap)
    return table[ids_T]
