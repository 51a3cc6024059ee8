"""Paged attention: new rows attend over a paged KV cache and each other, and are written to the cache.

`paged_attention` serves decode and verification steps, where every sequence has the same few rows.
`prefill_attention` serves prompts, where each sequence has its own number of rows.
Both pick a Triton kernel or the torch reference.

Shapes: B sequences, T query rows of all sequences, H query heads, G key/value heads, d head width, M blocks in a
sequence's block table. A cache is [blocks, block size, G, d].
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from peagle.config import Window
from peagle.kernels.attention.paged_metadata import PagedAttentionMetadata
from peagle.kernels.attention.paged_torch import SingleSequenceAttention, paged_attention_torch
from peagle.kernels.attention.rotary import QKNormRope
from peagle.kernels.triton_utils import supports_triton_float

__all__ = [
    "PagedAttentionMetadata",
    "SingleSequenceAttention",
    "paged_attention",
    "paged_attention_torch",
    "prefill_attention",
]

# Prompts without cached keys on a GPU: cuDNN, called by torch, is fastest, but builds a plan of hundreds of ms for each
# new shape. Only row counts that are a multiple of this use it; full prefill chunks are.
_CUDNN_ROW_MULTIPLE = 1024
# torch's varlen flash attention is faster than our kernel for heads at least this wide, up to this many rows.
_VARLEN_MIN_WIDTH, _VARLEN_MAX_ROWS = 128, 256
_LIBRARY_MAX_WIDTH = 256  # for wider heads torch's attention would materialise all scores


def _is_power_of_two_width(q_THd: Tensor) -> bool:
    width = q_THd.shape[-1]
    return width >= 16 and width & (width - 1) == 0


def paged_attention(
    q_THd: Tensor,
    k_TGd: Tensor,
    v_TGd: Tensor,
    cache_k: Tensor,
    cache_v: Tensor,
    metadata: PagedAttentionMetadata,
    window: Window,
    pdl: bool = False,
    rope: QKNormRope | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attends with `metadata.max_query_len` rows per sequence and writes the valid rows to the cache; [T, H, d].

    `window` limits the positions that a row sees.
    `pdl` enables programmatic dependent launch: the kernel may start before its predecessor has ended and then waits
    for it. It reads `metadata` before it waits, so an earlier, normally launched kernel must have written that.
    `rope`: q and k are not yet normed and rotated; the kernel does both.
    `sinks`: [H], one extra logit per head in the softmax, without a value.
    """
    assert metadata.query_start_loc_B1 is None, "sequences of different row counts need prefill_attention"
    if not supports_triton_float(q_THd) or not _is_power_of_two_width(q_THd):
        if rope is not None:
            q_THd, k_TGd = rope.apply(q_THd, k_TGd)
        return paged_attention_torch(q_THd, k_TGd, v_TGd, cache_k, cache_v, metadata, window, sinks)
    from peagle.kernels.attention.paged_triton import paged_attention_triton

    args = (q_THd, k_TGd, v_TGd, cache_k, cache_v, metadata, window, pdl)
    return paged_attention_triton(*args, rope=rope, sinks=sinks)


def prefill_attention(
    q_THd: Tensor,
    k_TGd: Tensor,
    v_TGd: Tensor,
    cache_k: Tensor,
    cache_v: Tensor,
    metadata: PagedAttentionMetadata,
    window: Window,
    pdl: bool = False,
    sinks: Tensor | None = None,
) -> Tensor:
    """As `paged_attention` for any number of rows per sequence (`metadata.query_start_loc_B1`), up to whole prompts."""
    if not supports_triton_float(q_THd) or not _is_power_of_two_width(q_THd):
        return paged_attention_torch(q_THd, k_TGd, v_TGd, cache_k, cache_v, metadata, window, sinks)
    from peagle.kernels.attention.prefill_triton import prefill_attention_triton, write_kv_triton

    plain = metadata.max_computed_tokens == 0 and window is None and sinks is None and q_THd.dtype != torch.float32
    if plain and q_THd.shape[-1] <= _LIBRARY_MAX_WIDTH:
        batch, max_rows = len(metadata.num_computed_tokens_B), metadata.max_query_len
        if len(q_THd) == batch * max_rows and max_rows % _CUDNN_ROW_MULTIPLE == 0:
            write_kv_triton(k_TGd, v_TGd, cache_k, cache_v, metadata, pdl)
            return _causal_attention_uniform(q_THd, k_TGd, v_TGd, batch)
        short = q_THd.shape[-1] >= _VARLEN_MIN_WIDTH and max_rows <= _VARLEN_MAX_ROWS
        if short and _find_varlen_attention() is not None:
            write_kv_triton(k_TGd, v_TGd, cache_k, cache_v, metadata, pdl)
            return _causal_attention_varlen(q_THd, k_TGd, v_TGd, metadata)
    return prefill_attention_triton(q_THd, k_TGd, v_TGd, cache_k, cache_v, metadata, window, pdl, sinks=sinks)


def _causal_attention_uniform(q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, batch: int) -> Tensor:
    """Causal attention of sequences of equal length with nothing cached. Padding must be finite."""
    q, k, v = (x.unflatten(0, (batch, -1)).transpose(1, 2) for x in (q_THd, k_TGd, v_TGd))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2).flatten(0, 1)


@cache
def _find_varlen_attention() -> tuple[Callable[..., Any], dict[str, Any]] | None:
    """Returns torch's varlen flash attention and the arguments that make it causal in this torch release."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    names = inspect.signature(varlen_attn).parameters
    causal: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in names else {"is_causal": True}
    if "enable_gqa" in names:  # earlier releases always allow fewer key/value heads
        causal["enable_gqa"] = True
    return varlen_attn, causal


def _causal_attention_varlen(q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, metadata: PagedAttentionMetadata) -> Tensor:
    """Causal attention of sequences of different lengths with nothing cached. Padding must not be nan."""
    found = _find_varlen_attention()
    assert found is not None
    varlen_attn, causal = found
    start_loc, max_rows = metadata.get_query_start_loc(), metadata.max_query_len
    return varlen_attn(q_THd, k_TGd, v_TGd, start_loc, start_loc, max_rows, max_rows, **causal)
