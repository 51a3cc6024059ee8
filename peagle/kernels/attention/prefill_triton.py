# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, check-untyped-defs=False
"""Paged attention of prompts in Triton: many rows per sequence.

`_write_kernel` writes new keys and values to the cache; those of an fp8 cache are also rounded in place, so that all
attention kernels see what is in the cache. `_prefill_kernel` attends: a program handles one tile of rows and one query
head. Nothing on the host depends on a sequence length, so CUDA graphs can capture both. The rules of
programmatic dependent launch are in paged_triton.py.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.attention.paged_triton import (
    add_sink,
    first_visible,
    get_cache_strides,
    get_qkv_strides,
    get_window_args,
    to_cache,
)
from peagle.kernels.attention.types import AttentionLaunch, PagedAttentionInputs, PagedAttentionMetadata
from peagle.kernels.triton_utils import supports_pdl

_WIDE_TILE_ROWS = 4096  # rows of a prompt from which wide tiles are faster
_WRITE_ROWS = 32  # rows of a program of `_write_kernel`


@triton.jit
def _softmax_step(scores, v, running_max, running_sum, acc, MAY_BE_EMPTY: tl.constexpr, PRECISION: tl.constexpr):
    """Adds one tile [rows, keys] to the online softmax. MAY_BE_EMPTY: a row may have seen no key yet."""
    new_max = tl.maximum(running_max, tl.max(scores, 1))
    reference = new_max
    if MAY_BE_EMPTY:
        reference = tl.where(new_max == float("-inf"), 0.0, new_max)
    rescale = tl.exp2(running_max - reference)
    p = tl.exp2(scores - reference[:, None])
    running_sum = running_sum * rescale + tl.sum(p, 1)
    acc = acc * rescale[:, None]
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return new_max, running_sum, acc


@triton.jit
def _find_row_tile(program, start_loc, sequences, ROWS: tl.constexpr, SEQUENCES: tl.constexpr):
    """Returns a program's sequence and its tile of ROWS rows, which may lie behind the sequence's last.

    Sequence b owns the programs from `start_loc[b] // ROWS + b` on: at least one per tile for any lengths, and in total
    hardly more than there are tiles.
    """
    b = tl.arange(0, SEQUENCES)
    first = tl.load(start_loc + b, mask=b < sequences, other=0).to(tl.int32) // ROWS + b
    sequence = tl.sum(((first <= program) & (b < sequences)).to(tl.int32), 0) - 1
    return sequence, program - tl.load(start_loc + sequence).to(tl.int32) // ROWS - sequence


def _count_programs(rows: int, metadata: PagedAttentionMetadata, tile: int) -> int:
    """Returns the number of programs that `_find_row_tile` needs."""
    return rows // tile + len(metadata.num_computed_tokens_B)


def _pad_batch(batch: int) -> int:
    """Returns 16, 256, 4096, ...: kernels are compiled for few batch sizes only, so that all can be before the first
    request."""
    padded = 16
    while padded < batch:
        padded *= 16
    return padded


@triton.jit(do_not_specialize=["window", "sequences"])
def _prefill_kernel(
    q, k, v, sinks, cache_k, cache_v, out,
    block_tables, num_computed_tokens, query_lens, start_loc,
    sequences, window,
    table_stride,
    q_row_stride, q_head_stride, k_row_stride, k_head_stride, v_row_stride, v_head_stride,
    block_stride, slot_stride, head_stride,
    scale,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr,
    WINDOW_KIND: tl.constexpr, SINKS: tl.constexpr, CONTEXT: tl.constexpr,
    PRECISION: tl.constexpr, SEQUENCES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attends over cached keys (if CONTEXT), earlier new rows, and the rows of the tile itself, in this order."""
    tl.static_assert(ROWS % TILE == 0)
    h = tl.program_id(1)
    g = h // GROUP
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    b, row_tile = _find_row_tile(tl.program_id(0), start_loc, sequences, ROWS, SEQUENCES)
    offset = tl.load(start_loc + b).to(tl.int64)
    count = (tl.load(start_loc + b + 1) - offset).to(tl.int32)
    # The last rows see the most keys: they start first, so that short programs fill the end.
    row0 = (tl.cdiv(count, ROWS) - 1 - row_tile) * ROWS
    if row0 < 0:
        return
    # Padding may hold anything, including nan: its keys are never loaded, and a tile of padding computes nothing.
    query_len = tl.load(query_lens + b).to(tl.int32)
    start = 0
    if CONTEXT:
        start = tl.where(row0 < query_len, tl.load(num_computed_tokens + b).to(tl.int32), 0)
    j = row0 + tl.arange(0, ROWS)
    valid = j < count
    cols = tl.arange(0, D)
    slots = tl.arange(0, TILE)
    queries = tl.load(
        q + ((offset + j) * q_row_stride + h * q_head_stride)[:, None] + cols[None, :], mask=valid[:, None], other=0.0
    )
    running_max = tl.zeros((ROWS,), tl.float32) - float("inf")
    running_sum = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, D), tl.float32)

    if CONTEXT:
        table = block_tables + b.to(tl.int64) * table_stride
        low = 0
        if WINDOW_KIND:
            low = tl.maximum(first_visible(start + row0, window, WINDOW_KIND), 0) // TILE * TILE
        for n in range(low, start, TILE):
            pos = n + slots
            cached = pos < start
            block = tl.load(table + pos // BLOCK, mask=cached, other=0).to(tl.int64)
            at = (block * block_stride + (pos % BLOCK) * slot_stride + g * head_stride)[:, None] + cols[None, :]
            keys = tl.load(cache_k + at, mask=cached[:, None], other=0.0)
            values = tl.load(cache_v + at, mask=cached[:, None], other=0.0).to(queries.dtype)
            scores = tl.dot(queries, tl.trans(keys.to(queries.dtype)), input_precision=PRECISION) * scale
            visible = cached[None, :]
            if WINDOW_KIND:
                visible = visible & (pos[None, :] >= first_visible(start + j, window, WINDOW_KIND)[:, None])
            scores = tl.where(visible, scores, float("-inf"))
            running_max, running_sum, acc = _softmax_step(
                scores, values, running_max, running_sum, acc, WINDOW_KIND, PRECISION
            )

    k += offset * k_row_stride + g * k_head_stride
    v += offset * v_row_stride + g * v_head_stride
    low_row = 0
    if WINDOW_KIND:
        low_row = tl.maximum(first_visible(start + row0, window, WINDOW_KIND) - start, 0) // TILE * TILE
    for n in range(low_row, tl.where(row0 < query_len, row0, 0), TILE):
        new = n + slots
        keys = tl.load(k + (new * k_row_stride.to(tl.int64))[:, None] + cols[None, :])
        values = tl.load(v + (new * v_row_stride.to(tl.int64))[:, None] + cols[None, :])
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale
        if WINDOW_KIND:
            visible = start + new[None, :] >= first_visible(start + j, window, WINDOW_KIND)[:, None]
            scores = tl.where(visible, scores, float("-inf"))
        running_max, running_sum, acc = _softmax_step(
            scores, values, running_max, running_sum, acc, WINDOW_KIND, PRECISION
        )

    for n in range(row0, tl.minimum(row0 + ROWS, query_len), TILE):
        new = n + slots
        real = new < query_len
        keys = tl.load(k + (new * k_row_stride.to(tl.int64))[:, None] + cols[None, :], mask=real[:, None], other=0.0)
        values = tl.load(v + (new * v_row_stride.to(tl.int64))[:, None] + cols[None, :], mask=real[:, None], other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale
        visible = new[None, :] <= j[:, None]
        if WINDOW_KIND:
            visible = visible & (start + new[None, :] >= first_visible(start + j, window, WINDOW_KIND)[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        running_max, running_sum, acc = _softmax_step(scores, values, running_max, running_sum, acc, True, PRECISION)

    if SINKS:
        running_sum = add_sink(running_sum, running_max, tl.load(sinks + h))
    result = acc / tl.where(running_sum > 0.0, running_sum, 1.0)[:, None]
    to = out + ((offset + j) * (H * D) + h * D)[:, None] + cols[None, :]
    tl.store(to, result.to(out.dtype.element_ty), mask=valid[:, None])


@triton.jit
def _write_rows(to, rows, mask):
    """Writes keys or values to the cache, and stores them back if the cache has another dtype."""
    new = tl.load(rows, mask=mask, other=0.0)
    rounded = to_cache(new, to)
    tl.store(to, rounded, mask=mask)
    if rounded.dtype != new.dtype:
        tl.store(rows, rounded.to(new.dtype), mask=mask)


@triton.jit(do_not_specialize=["sequences"])
def _write_kernel(
    k, v, cache_k, cache_v,
    block_tables, num_computed_tokens, query_lens, start_loc,
    sequences,
    table_stride,
    k_row_stride, k_head_stride, v_row_stride, v_head_stride,
    block_stride, slot_stride, head_stride,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, SEQUENCES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Writes one tile of rows of one key/value head to the cache."""
    g = tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    b, row_tile = _find_row_tile(tl.program_id(0), start_loc, sequences, ROWS, SEQUENCES)
    j = row_tile * ROWS + tl.arange(0, ROWS)
    real = j < tl.load(query_lens + b)
    pos = tl.load(num_computed_tokens + b) + j
    block = tl.load(block_tables + b.to(tl.int64) * table_stride + pos // BLOCK, mask=real, other=0).to(tl.int64)
    row = tl.load(start_loc + b).to(tl.int64) + j
    cols = tl.arange(0, D)[None, :]
    at = (block * block_stride + (pos % BLOCK) * slot_stride + g * head_stride)[:, None] + cols
    mask = real[:, None]
    _write_rows(cache_k + at, k + (row * k_row_stride + g * k_head_stride)[:, None] + cols, mask)
    _write_rows(cache_v + at, v + (row * v_row_stride + g * v_head_stride)[:, None] + cols, mask)


def write_kv_triton(inputs: PagedAttentionInputs) -> None:
    """Writes keys and values of the valid rows to the cache."""
    _, k_TGd, v_TGd, cache_k, cache_v, metadata, *_ = inputs
    block_size, kv_heads, width = cache_k.shape[1:]
    pdl = supports_pdl(k_TGd.device)
    batch = len(metadata.num_computed_tokens_B)
    _write_kernel[(_count_programs(len(k_TGd), metadata, _WRITE_ROWS), kv_heads)](
        k_TGd, v_TGd, cache_k, cache_v,
        metadata.block_tables_BM, metadata.num_computed_tokens_B, metadata.query_lens_B, metadata.query_start_loc_B1,
        batch, metadata.block_tables_BM.stride(0), *k_TGd.stride()[:2], *v_TGd.stride()[:2], *get_cache_strides(inputs),
        D=width, BLOCK=block_size, ROWS=_WRITE_ROWS, SEQUENCES=_pad_batch(batch), PDL=pdl, launch_pdl=pdl, num_warps=4,
    )  # fmt: skip


def choose_prefill_launch(metadata: PagedAttentionMetadata, width: int, exact: bool) -> AttentionLaunch:
    """Chooses tiles for a head width; `exact`: fp32, without tensor cores."""
    if width > 256:
        return AttentionLaunch(32, 16, 8, 1) if exact else AttentionLaunch(32, 32, 8, 2)
    if exact:
        return AttentionLaunch(32, 32, 4, 2)
    if width > 128:
        return AttentionLaunch(64, 32, 8, 2)
    # Wide tiles are faster for long prompts without cached keys, but not with them, nor for narrow heads.
    if width == 128 and metadata.max_computed_tokens == 0 and metadata.max_query_len >= _WIDE_TILE_ROWS:
        return AttentionLaunch(128, 64, 8, 3)
    return AttentionLaunch(64, 64, 4, 3)


def prefill_attention_triton(inputs: PagedAttentionInputs, launch: AttentionLaunch | None = None) -> Tensor:
    """As `prefill_attention`; `launch` overrides the chosen launch parameters."""
    q_THd, k_TGd, v_TGd, cache_k, cache_v, metadata, window, sinks_H, _, out_THd = inputs
    window_kind, window_size = get_window_args(window)
    pdl = supports_pdl(q_THd.device)
    total_rows, heads, width = q_THd.shape
    block_size, kv_heads = cache_k.shape[1:3]
    batch, exact = len(metadata.num_computed_tokens_B), q_THd.dtype == torch.float32
    if launch is None:
        launch = choose_prefill_launch(metadata, width, exact)
    write_kv_triton(inputs)
    out = out_THd if out_THd is not None else q_THd.new_empty(q_THd.shape)
    assert out.is_contiguous()
    _prefill_kernel[(_count_programs(total_rows, metadata, launch.rows), heads)](
        q_THd, k_TGd, v_TGd, q_THd if sinks_H is None else sinks_H, cache_k, cache_v, out,
        metadata.block_tables_BM, metadata.num_computed_tokens_B, metadata.query_lens_B, metadata.query_start_loc_B1,
        batch, window_size, metadata.block_tables_BM.stride(0), *get_qkv_strides(inputs), *get_cache_strides(inputs),
        width**-0.5 * math.log2(math.e),
        H=heads, GROUP=heads // kv_heads, D=width, BLOCK=block_size, ROWS=launch.rows, TILE=launch.tile,
        WINDOW_KIND=window_kind, SINKS=sinks_H is not None, CONTEXT=metadata.max_computed_tokens != 0,
        PRECISION="ieee" if exact else "tf32", SEQUENCES=_pad_batch(batch), PDL=pdl,
        launch_pdl=pdl, num_warps=launch.warps, num_stages=launch.stages,
    )  # fmt: skip
    return out
