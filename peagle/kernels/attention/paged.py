"""Paged attention: new rows attend over a paged KV cache and each other, and are written to the cache.

`paged_attention` serves decode and verification steps, where every sequence has the same few rows.
`prefill_attention` serves prompts, where each sequence has its own number of rows.
Both pick a Triton kernel or `paged_attention_torch`: the reference on every device, and the CPU implementation.

Shapes: B sequences, T query rows of all sequences, N rows and S keys of one segment, H query heads, G key/value heads,
d head width. A cache is [blocks, block size, G, d].
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from peagle.config import Window
from peagle.kernels.attention.dense import first_visible_position, sink_attention
from peagle.kernels.attention.types import PagedAttentionInputs, PagedAttentionMetadata, to_cache_dtype
from peagle.kernels.fp8 import FP8_DTYPE
from peagle.kernels.gemm import skinny_cpu
from peagle.kernels.triton_utils import supports_triton_float

# Prompts without cached keys on a GPU: cuDNN, called by torch, is fastest, but builds a plan of hundreds of ms for each
# new shape. Only row counts that are a multiple of this use it; full prefill chunks are.
_CUDNN_ROW_MULTIPLE = 1024
# torch's varlen flash attention is faster than our kernel for heads at least this wide, up to this many rows.
_VARLEN_MIN_WIDTH, _VARLEN_MAX_ROWS = 128, 256
_LIBRARY_MAX_WIDTH = 256  # for wider heads torch's attention would materialise all scores
# Up to this many rows of a sequence, the query heads that share a key/value head are folded into the row dimension.
# Keys are then read once: up to 2.5x faster for one row on the CPU, and no faster from 32 rows on.
_MAX_FOLDED_ROWS = 16
# Longer queries over cached keys are cut into segments, so that early rows skip the keys that only later rows see.
_SEGMENT_ROWS = 64


def _runs_triton(q_THd: Tensor) -> bool:
    width = q_THd.shape[-1]
    return supports_triton_float(q_THd) and width >= 16 and width & (width - 1) == 0


def paged_attention(inputs: PagedAttentionInputs) -> Tensor:
    """Attends with `metadata.max_query_len` rows per sequence and writes the valid rows to the cache; [T, H, d].

    With programmatic dependent launch the kernel may start before its predecessor has ended and then waits for it. It
    reads `metadata` before it waits, so an earlier, normally launched kernel must have written that.
    """
    assert inputs.metadata.query_start_loc_B1 is None, "sequences of different row counts need prefill_attention"
    if not _runs_triton(inputs.q_THd):
        return paged_attention_torch(inputs)
    from peagle.kernels.attention.paged_triton import paged_attention_triton

    return paged_attention_triton(inputs)


def prefill_attention(inputs: PagedAttentionInputs) -> Tensor:
    """As `paged_attention` for any number of rows per sequence (`metadata.query_start_loc_B1`), up to whole prompts.
    q and k come rotated. With an fp8 cache k and v may be rounded in place."""
    q_THd, metadata = inputs.q_THd, inputs.metadata
    assert metadata.query_start_loc_B1 is not None and inputs.rope is None
    if not _runs_triton(q_THd):
        return paged_attention_torch(inputs)
    from peagle.kernels.attention.prefill_triton import prefill_attention_triton, write_kv_triton

    plain = metadata.max_computed_tokens == 0 and inputs.window is None and inputs.sinks_H is None
    if plain and q_THd.dtype != torch.float32 and q_THd.shape[-1] <= _LIBRARY_MAX_WIDTH:
        batch, max_rows = len(metadata.num_computed_tokens_B), metadata.max_query_len
        if len(q_THd) == batch * max_rows and max_rows % _CUDNN_ROW_MULTIPLE == 0:  # padding must be finite
            write_kv_triton(inputs)
            q, k, v = (x.unflatten(0, (batch, -1)).transpose(1, 2) for x in inputs[:3])
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return out.transpose(1, 2).flatten(0, 1)
        short = q_THd.shape[-1] >= _VARLEN_MIN_WIDTH and max_rows <= _VARLEN_MAX_ROWS
        varlen_attention = _find_varlen_attention() if short else None
        if varlen_attention is not None:  # padding must not be nan
            write_kv_triton(inputs)
            start_loc = metadata.query_start_loc_B1
            return varlen_attention(*inputs[:3], start_loc, start_loc, max_rows, max_rows)
    return prefill_attention_triton(inputs)


@cache
def _find_varlen_attention() -> Callable[..., Any] | None:
    """Returns torch's varlen flash attention, with the arguments that make it causal in this torch release."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    names = inspect.signature(varlen_attn).parameters
    causal: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in names else {"is_causal": True}
    if "enable_gqa" in names:  # earlier releases always allow fewer key/value heads
        causal["enable_gqa"] = True
    return partial(varlen_attn, **causal)


@dataclass
class QuerySegment:
    """Consecutive rows of one sequence, and the keys that any of them sees."""

    device: torch.device
    rows: slice  # of T
    first_position: int  # of the first row
    first_key: int  # position of the first visible key
    block_ids: Tensor | None  # the blocks to gather; None: they are contiguous in the cache
    slots: slice  # of the keys, in the gathered blocks or in the whole cache
    causal: bool  # plain causal attention among the rows: nothing cached, no window applies
    biases: dict[tuple[torch.dtype, int], Tensor] = field(default_factory=dict)

    def get_bias(self, dtype: torch.dtype, window: Window, repeat: int) -> Tensor:
        """Returns 0 where a row sees a key and -inf elsewhere, with each row repeated `repeat` times."""
        key = (dtype, repeat)
        if key in self.biases:
            return self.biases[key]
        count = self.rows.stop - self.rows.start
        row_positions = torch.arange(self.first_position, self.first_position + count, device=self.device)[:, None]
        key_positions = torch.arange(self.first_key, self.first_position + count, device=self.device)
        hidden = key_positions > row_positions
        if window is not None:
            hidden |= key_positions < first_visible_position(row_positions, window)
        bias = torch.zeros(hidden.shape, dtype=dtype, device=self.device).masked_fill_(hidden, float("-inf"))
        if repeat > 1:
            bias = bias.repeat_interleave(repeat, 0)
        if count <= _MAX_FOLDED_ROWS:
            self.biases[key] = bias  # large ones are cheaper to rebuild than to keep
        return bias


@dataclass
class QueryPlan:
    """The host's view of a step: row segments, and the cache slots that receive the new keys and values."""

    segments: list[QuerySegment]
    valid_rows: Tensor | None  # indices into T; None: all rows
    slot_mapping: Tensor | slice  # cache slot of each valid row; a slice if they are contiguous


def get_query_plan(metadata: PagedAttentionMetadata, block_size: int, window: Window) -> QueryPlan:
    """Returns the plan of this step, built once per block size and window."""
    key = (block_size, window)
    if key not in metadata.torch_plans:
        metadata.torch_plans[key] = build_query_plan(metadata, block_size, window)
    plan: QueryPlan = metadata.torch_plans[key]
    return plan


def build_query_plan(metadata: PagedAttentionMetadata, block_size: int, window: Window) -> QueryPlan:
    tables = metadata.block_tables_BM.tolist()
    num_computed, num_valid = metadata.num_computed_tokens_B.tolist(), metadata.query_lens_B.tolist()
    device = metadata.block_tables_BM.device
    if metadata.query_start_loc_B1 is None:
        start_loc = [b * metadata.max_query_len for b in range(len(num_computed) + 1)]
    else:
        start_loc = metadata.query_start_loc_B1.tolist()
    segments: list[QuerySegment] = []
    slots: list[int] = []
    valid_rows: list[int] = []
    for b, start in enumerate(num_computed):
        count, first_row = num_valid[b], start_loc[b]
        if not count:
            continue
        table = tables[b]
        slots += [table[p // block_size] * block_size + p % block_size for p in range(start, start + count)]
        valid_rows += range(first_row, first_row + count)
        causal = start == 0 and count > 1 and first_visible_position(count - 1, window) <= 0
        step = count if causal or count <= _SEGMENT_ROWS else _SEGMENT_ROWS
        for at in range(0, count, step):
            first, end = start + at, start + min(at + step, count)
            first_key = max(0, first_visible_position(first, window))
            used = table[first_key // block_size : (end + block_size - 1) // block_size]
            rows = slice(first_row + at, first_row + end - start)
            contiguous = used == list(range(used[0], used[0] + len(used)))
            block_ids = None if contiguous else torch.tensor(used, device=device)
            begin = first_key % block_size + (used[0] * block_size if contiguous else 0)
            keys = slice(begin, begin + end - first_key)
            segments.append(QuerySegment(device, rows, first, first_key, block_ids, keys, causal))
    all_valid = len(slots) == start_loc[-1]
    slot_mapping: Tensor | slice = torch.tensor(slots, dtype=torch.long, device=device)
    if slots and slots == list(range(slots[0], slots[0] + len(slots))):
        slot_mapping = slice(slots[0], slots[0] + len(slots))
    return QueryPlan(segments, None if all_valid else torch.tensor(valid_rows, device=device).long(), slot_mapping)


def paged_attention_torch(inputs: PagedAttentionInputs) -> Tensor:
    """Writes the new keys and values, then attends sequence by sequence over keys read back from the cache.

    Takes any row counts: the reference of `paged_attention` and of `prefill_attention`.
    """
    q_THd, k_TGd, v_TGd, cache_k, cache_v, metadata, window, _, rope, _ = inputs
    if rope is not None:
        q_THd, k_TGd = rope.apply(q_THd, k_TGd)
    plan = get_query_plan(metadata, cache_k.shape[1], window)
    for blocks, new in ((cache_k, k_TGd), (cache_v, v_TGd)):
        flat = blocks.view(-1, *blocks.shape[2:])  # never a copy
        flat[plan.slot_mapping] = to_cache_dtype(new if plan.valid_rows is None else new[plan.valid_rows], flat.dtype)
    if len(plan.segments) == 1 and plan.valid_rows is None:
        return _attend_segment(q_THd, plan.segments[0], inputs)
    out_THd = q_THd.new_empty(q_THd.shape) if plan.valid_rows is None else q_THd.new_zeros(q_THd.shape)
    for segment in plan.segments:
        out_THd[segment.rows] = _attend_segment(q_THd[segment.rows], segment, inputs)
    return out_THd


def _attend_segment(q_NHd: Tensor, segment: QuerySegment, inputs: PagedAttentionInputs) -> Tensor:
    rows, heads, _ = q_NHd.shape
    window, sinks_H = inputs.window, inputs.sinks_H
    caches = (inputs.cache_k, inputs.cache_v)
    if segment.block_ids is not None:
        caches = (caches[0].index_select(0, segment.block_ids), caches[1].index_select(0, segment.block_ids))
    k_SGd, v_SGd = (blocks.flatten(0, 1)[segment.slots].to(q_NHd.dtype) for blocks in caches)
    if sinks_H is not None:
        return sink_attention(q_NHd, k_SGd, v_SGd, segment.get_bias(q_NHd.dtype, window, 1) == 0, sinks_H)
    if rows > _MAX_FOLDED_ROWS:
        q, k, v = (x.transpose(0, 1)[None] for x in (q_NHd, k_SGd, v_SGd))
        bias = None if segment.causal else segment.get_bias(q.dtype, window, 1)
        out = F.scaled_dot_product_attention(q, k, v, bias, is_causal=segment.causal, enable_gqa=True)
        return out[0].transpose(0, 1)
    bias = None if rows == 1 else segment.get_bias(q_NHd.dtype, window, heads // k_SGd.shape[1])
    return _folded_attention(q_NHd, k_SGd.transpose(0, 1)[:, None], v_SGd.transpose(0, 1)[:, None], bias)


def _folded_attention(q_NHd: Tensor, k_G1Sd: Tensor, v_G1Sd: Tensor, bias: Tensor | None) -> Tensor:
    """Attends with key/value heads as the batch and their query heads as rows; a single row needs no copies."""
    rows, heads, width = q_NHd.shape
    kv_heads = len(k_G1Sd)
    if rows == 1:
        q = q_NHd.view(kv_heads, 1, heads // kv_heads, width)
        return F.scaled_dot_product_attention(q, k_G1Sd, v_G1Sd).reshape(1, heads, width)
    q = q_NHd.unflatten(1, (kv_heads, -1)).transpose(0, 1).reshape(kv_heads, 1, -1, width)
    out = F.scaled_dot_product_attention(q, k_G1Sd, v_G1Sd, bias)
    return out.view(kv_heads, rows, -1, width).transpose(0, 1).reshape(rows, heads, width)


class SingleSequenceAttention:
    """Attention of a few rows of one sequence with contiguous blocks: the most common decode step on a CPU.

    Slices the caches of all layers once per step, instead of once per layer.
    """

    def __init__(self, keys: Tensor, values: Tensor, segment: QuerySegment, slot_range: slice) -> None:
        """`keys` and `values` are the caches of all layers, [layers, blocks, block size, G, d]."""
        flat_k, flat_v = keys.flatten(1, 2), values.flatten(1, 2)
        whole_context = keys.dtype == torch.float32 and segment.first_key == 0
        self.applies_rope = whole_context and skinny_cpu.supports_attention(keys.shape[-1])
        self.segment, self.rows = segment, slot_range.stop - slot_range.start
        visible = flat_k[:, segment.slots], flat_v[:, segment.slots]
        if self.applies_rope:
            self.visible_k, self.visible_v = visible[0].unbind(0), visible[1].unbind(0)
        self.new_k, self.new_v = flat_k[:, slot_range].unbind(0), flat_v[:, slot_range].unbind(0)
        self.keys, self.values = (x.transpose(1, 2)[:, :, None].unbind(0) for x in visible)

    @classmethod
    def try_create(cls, keys: Tensor, values: Tensor, metadata: PagedAttentionMetadata) -> Self | None:
        """Returns an instance if this step is one short query of a sequence with contiguous blocks on a CPU."""
        if not keys.is_cpu or keys.dtype == FP8_DTYPE:
            return None
        if len(metadata.num_computed_tokens_B) != 1 or metadata.max_query_len > _MAX_FOLDED_ROWS:
            return None
        plan = get_query_plan(metadata, keys.shape[2], None)
        whole = len(plan.segments) == 1 and plan.valid_rows is None and plan.segments[0].block_ids is None
        if not whole or not isinstance(plan.slot_mapping, slice):
            return None
        return cls(keys, values, plan.segments[0], plan.slot_mapping)

    def attend_with_rope(self, layer: int, qkv_TX: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
        """Rotates q and k, writes k and v and attends, [T, H * d]. Requires `applies_rope` and a `sin` whose first
        half is negated."""
        return skinny_cpu.attention(qkv_TX, cos, sin, self.visible_k[layer], self.visible_v[layer], heads)

    def __call__(self, layer: int, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor) -> Tensor:
        self.new_k[layer].copy_(k_TGd)
        self.new_v[layer].copy_(v_TGd)
        bias = None
        if self.rows > 1:
            bias = self.segment.get_bias(q_THd.dtype, None, q_THd.shape[1] // k_TGd.shape[1])
        return _folded_attention(q_THd, self.keys[layer], self.values[layer], bias)
