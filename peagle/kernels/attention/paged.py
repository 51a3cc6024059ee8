"""Attention of new rows over a paged cache and over each other; writes their keys and values into the cache.

`paged_attention` serves decoding and verification, where every sequence has the same few new rows.
`prefill_attention` serves prompts, where each sequence has its own, possibly large, number of them.
Both take a `Pages`, which says where the rows of one step sit and is shared by all layers of that step.

Knows nothing about models, nor about who gave a sequence its blocks.

Shapes: B sequences, T rows (the sequences' new rows, flat), H heads, G key/value heads, d head width, M blocks in a
sequence's table. A cache is [blocks, block size, G, d].
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from peagle.config import Window
from peagle.kernels.attention.dense import first_seen, sink_attention
from peagle.kernels.attention.rotary import Rotation
from peagle.kernels.gemm import skinny_cpu

# Prompts with nothing cached, on a GPU. cuDNN, which torch's attention calls, is the fastest, but plans every new shape
# for hundreds of ms: only numbers of rows that are a multiple of this go there, as full chunks do. 0: none.
PLANNED_ROWS = 1024
# torch's flash attention over differing lengths is faster than ours for heads of at least this width, up to this many
# rows.
_VARLEN_WIDTH, _VARLEN_ROWS = 128, 256
_LIBRARY_WIDTH = 256  # of wider heads torch's attention would keep all scores
# On the CPU, up to this many rows of a sequence run with the heads that share a key/value head folded into the rows:
# keys are then read once, which is up to 2.5 times as fast for one row and no faster from 32 on.
_FOLD_ROWS = 16
# More rows than this over cached keys go in pieces, which spares each piece the keys only later rows see.
_PIECE_ROWS = 64


@dataclass
class Pages:
    """Where the new rows of one step sit: made once per step, read by every layer.

    Row j of sequence b is at position `starts[b] + j`. It sees the cached keys before `starts[b]` and the rows
    0..j of its own sequence. The keys and values of rows j < `live[b]` are written to the cache; later rows are
    padding, which is written nowhere and whose output means nothing.

    The torch versions read the tensors once and keep what they found, so the tensors must not change during the
    object's life. The Triton versions read them on the device at every launch: a CUDA graph captured with one object
    replays with whatever its tensors then hold.
    """

    block_tables_BM: Tensor  # int32; entries past a sequence's last used block mean nothing
    starts_B: Tensor  # int32: how many positions of the sequence are cached
    live_B: Tensor  # int32: how many of its new rows are real
    max_rows: int  # the most new rows of any sequence, padding included
    cu_rows_B1: Tensor | None = None  # int32: sequence b owns rows cu[b] to cu[b + 1]; None: each has max_rows
    max_context: int | None = None  # no start is larger; 0: nothing is cached; None: as much as a table can hold
    _offsets_B1: Tensor | None = field(default=None, init=False, repr=False, compare=False)
    _pieces: dict[tuple[int, Window], _Pieces] = field(default_factory=dict, init=False, repr=False, compare=False)

    def offsets_B1(self) -> Tensor:
        """`cu_rows_B1`, made if every sequence has the same number of rows."""
        if self.cu_rows_B1 is not None:
            return self.cu_rows_B1
        if self._offsets_B1 is None:
            batch, device = len(self.starts_B), self.starts_B.device
            self._offsets_B1 = torch.arange(batch + 1, dtype=torch.int32, device=device) * self.max_rows
        return self._offsets_B1

    def pieces(self, block_size: int, window: Window) -> _Pieces:
        """The same on the host, in the form the torch versions use."""
        key = (block_size, window)
        if key not in self._pieces:
            self._pieces[key] = _cut(self, block_size, window)
        return self._pieces[key]


@dataclass
class _Piece:
    """Some consecutive rows of one sequence, and the keys that any of them sees."""

    device: torch.device
    rows: slice  # of T
    first: int  # position of the first row
    low: int  # position of the first key
    keys: slice | None  # of the flat cache, where the blocks lie one after another
    blocks: Tensor | None = None  # else the blocks to gather,
    skip: int = 0  # and how many of their first slots are not wanted
    causal: bool = False  # nothing but these rows is seen, and no window cuts in
    biases: dict[tuple[torch.dtype, int], Tensor] = field(default_factory=dict)

    def bias(self, dtype: torch.dtype, window: Window, repeat: int) -> Tensor:
        """0 where a row sees a key, else -inf; each row `repeat` times."""
        key = (dtype, repeat)
        if key in self.biases:
            return self.biases[key]
        count = self.rows.stop - self.rows.start
        own = torch.arange(self.first, self.first + count, device=self.device)[:, None]
        keys = torch.arange(self.low, self.first + count, device=self.device)
        hidden = keys > own
        if window is not None:
            hidden |= keys < first_seen(own, window)
        bias = torch.zeros(hidden.shape, dtype=dtype, device=self.device).masked_fill_(hidden, float("-inf"))
        if repeat > 1:
            bias = bias.repeat_interleave(repeat, 0)
        if count <= _FOLD_ROWS:
            self.biases[key] = bias  # large ones are cheaper to make again than to keep
        return bias


@dataclass
class _Pieces:
    pieces: list[_Piece]
    all_live: bool
    live_rows: Tensor | None  # of T; None: all of them
    slots: Tensor  # where the live rows go in the flat cache
    run: slice | None  # the same, where they go one after another


def _cut(pages: Pages, block_size: int, window: Window) -> _Pieces:
    tables, starts, live = pages.block_tables_BM.tolist(), pages.starts_B.tolist(), pages.live_B.tolist()
    device = pages.block_tables_BM.device
    if pages.cu_rows_B1 is None:
        offsets = [b * pages.max_rows for b in range(len(starts) + 1)]
    else:
        offsets = pages.cu_rows_B1.tolist()
    pieces: list[_Piece] = []
    slots: list[int] = []
    live_rows: list[int] = []
    for b, start in enumerate(starts):
        count, first_row = live[b], offsets[b]
        if not count:
            continue
        table = tables[b]
        slots += [table[p // block_size] * block_size + p % block_size for p in range(start, start + count)]
        live_rows += range(first_row, first_row + count)
        causal = start == 0 and count > 1 and first_seen(count - 1, window) <= 0
        step = count if causal or count <= _PIECE_ROWS else _PIECE_ROWS
        for at in range(0, count, step):
            first, end = start + at, start + min(at + step, count)
            low = max(0, first_seen(first, window))
            used = table[low // block_size : (end + block_size - 1) // block_size]
            skip = low % block_size
            piece = _Piece(device, slice(first_row + at, first_row + end - start), first, low, None, causal=causal)
            if used == list(range(used[0], used[0] + len(used))):
                begin = used[0] * block_size + skip
                piece.keys = slice(begin, begin + end - low)
            else:
                piece.blocks, piece.skip = torch.tensor(used, device=device), skip
            pieces.append(piece)
    all_live = len(slots) == offsets[-1]
    run = None
    if slots and slots == list(range(slots[0], slots[0] + len(slots))):
        run = slice(slots[0], slots[0] + len(slots))
    return _Pieces(
        pieces,
        all_live,
        None if all_live else torch.tensor(live_rows, dtype=torch.long, device=device),
        torch.tensor(slots, dtype=torch.long, device=device),
        run,
    )


def paged_attention_torch(
    q_THd: Tensor,
    k_TGd: Tensor,
    v_TGd: Tensor,
    cache_k: Tensor,
    cache_v: Tensor,
    pages: Pages,
    window: Window,
    sinks: Tensor | None = None,
) -> Tensor:
    """Any numbers of rows; a loop over the sequences, each reading its keys back from the cache."""
    size, kv_heads, width = cache_k.shape[1:]
    cut = pages.pieces(size, window)
    flat_k, flat_v = cache_k.view(-1, kv_heads, width), cache_v.view(-1, kv_heads, width)
    for flat, new in ((flat_k, k_TGd), (flat_v, v_TGd)):
        new = new if cut.live_rows is None else new[cut.live_rows]
        if cut.run is not None:
            flat[cut.run] = new
        else:
            flat.index_copy_(0, cut.slots, new)
    if len(cut.pieces) == 1 and cut.all_live:
        return _attend(q_THd, cut.pieces[0], cache_k, cache_v, flat_k, flat_v, window, sinks)
    out_THd = q_THd.new_empty(q_THd.shape) if cut.all_live else q_THd.new_zeros(q_THd.shape)
    for piece in cut.pieces:
        out_THd[piece.rows] = _attend(q_THd[piece.rows], piece, cache_k, cache_v, flat_k, flat_v, window, sinks)
    return out_THd


def _attend(
    q_MHd: Tensor,
    piece: _Piece,
    cache_k: Tensor,
    cache_v: Tensor,
    flat_k: Tensor,
    flat_v: Tensor,
    window: Window,
    sinks: Tensor | None,
) -> Tensor:
    if piece.keys is not None:
        k_SGd, v_SGd = flat_k[piece.keys], flat_v[piece.keys]
    else:
        assert piece.blocks is not None
        end = piece.skip + piece.first - piece.low + len(q_MHd)
        k_SGd = cache_k.index_select(0, piece.blocks).flatten(0, 1)[piece.skip : end]
        v_SGd = cache_v.index_select(0, piece.blocks).flatten(0, 1)[piece.skip : end]
    rows, heads, width = q_MHd.shape
    if sinks is not None:
        return sink_attention(q_MHd, k_SGd, v_SGd, piece.bias(q_MHd.dtype, window, 1) == 0, sinks)
    kv_heads = k_SGd.shape[1]
    k, v = k_SGd.transpose(0, 1)[None], v_SGd.transpose(0, 1)[None]
    if rows > _FOLD_ROWS:
        q = q_MHd.transpose(0, 1)[None]
        bias = None if piece.causal else piece.bias(q.dtype, window, 1)
        out = F.scaled_dot_product_attention(q, k, v, bias, is_causal=piece.causal, enable_gqa=True)
        return out[0].transpose(0, 1)
    bias = None if rows == 1 else piece.bias(q_MHd.dtype, window, heads // kv_heads)
    return _folded(q_MHd, k_SGd.transpose(0, 1)[:, None], v_SGd.transpose(0, 1)[:, None], bias)


def _folded(q_MHd: Tensor, k_G1Sd: Tensor, v_G1Sd: Tensor, bias: Tensor | None) -> Tensor:
    """Key/value heads as the batch, the heads that share one as rows: then a single row costs no copies."""
    rows, heads, width = q_MHd.shape
    kv_heads = len(k_G1Sd)
    if rows == 1:
        q = q_MHd.view(kv_heads, 1, heads // kv_heads, width)
        return F.scaled_dot_product_attention(q, k_G1Sd, v_G1Sd).reshape(1, heads, width)
    q = q_MHd.unflatten(1, (kv_heads, -1)).transpose(0, 1).reshape(kv_heads, 1, -1, width)
    out = F.scaled_dot_product_attention(q, k_G1Sd, v_G1Sd, bias)
    return out.view(kv_heads, rows, -1, width).transpose(0, 1).reshape(rows, heads, width)


class OneSequence:
    """Attention of few rows of one sequence whose blocks lie one after another, on the CPU: the most common step there.

    Where each layer's rows go and what they see is cut out of the cache for all layers at once.
    """

    def __init__(self, keys: Tensor, values: Tensor, piece: _Piece, run: slice) -> None:
        """`keys` and `values` are whole caches, [layers, blocks, block size, G, d]."""
        assert piece.keys is not None
        flat_k, flat_v = keys.flatten(1, 2), values.flatten(1, 2)
        self.turns = keys.dtype == torch.float32 and piece.low == 0 and skinny_cpu.attends(keys.shape[-1])
        self.piece, self.rows = piece, run.stop - run.start
        seen = flat_k[:, piece.keys], flat_v[:, piece.keys]
        if self.turns:
            self.seen_k, self.seen_v = seen[0].unbind(0), seen[1].unbind(0)
        self.new_k, self.new_v = flat_k[:, run].unbind(0), flat_v[:, run].unbind(0)
        self.keys, self.values = (x.transpose(1, 2)[:, :, None].unbind(0) for x in seen)

    @classmethod
    def find(cls, keys: Tensor, values: Tensor, pages: Pages) -> OneSequence | None:
        if not keys.is_cpu or len(pages.starts_B) != 1 or pages.max_rows > _FOLD_ROWS:
            return None
        cut = pages.pieces(keys.shape[2], None)
        if len(cut.pieces) != 1 or not cut.all_live or cut.run is None or cut.pieces[0].keys is None:
            return None
        return cls(keys, values, cut.pieces[0], cut.run)

    def turned(self, layer: int, qkv_TX: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
        """[T, H * d], of rows that are yet to be turned, where `turns`; the first half of `sin` is negated."""
        return skinny_cpu.attention(qkv_TX, cos, sin, self.seen_k[layer], self.seen_v[layer], heads)

    def __call__(self, layer: int, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor) -> Tensor:
        self.new_k[layer].copy_(k_TGd)
        self.new_v[layer].copy_(v_TGd)
        bias = None
        if self.rows > 1:
            bias = self.piece.bias(q_THd.dtype, None, q_THd.shape[1] // k_TGd.shape[1])
        return _folded(q_THd, self.keys[layer], self.values[layer], bias)


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _takes_triton(q_THd: Tensor) -> bool:
    width = q_THd.shape[-1]
    kinds = (torch.bfloat16, torch.float16, torch.float32)
    return q_THd.is_cuda and _has_triton() and q_THd.dtype in kinds and width >= 16 and width & (width - 1) == 0


def paged_attention(
    q_THd: Tensor,
    k_TGd: Tensor,
    v_TGd: Tensor,
    cache_k: Tensor,
    cache_v: Tensor,
    pages: Pages,
    window: Window,
    pdl: bool = False,
    rotation: Rotation | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """[T, H, d]: a row sees its sequence's cached keys and its rows up to itself, at most `window` of them.

    Every sequence has `pages.max_rows` rows. Keys and values of live rows are written to the cache.
    `pdl`: the kernel may be launched before the one ahead of it has ended, and then waits for it itself. `pages` must
    then have been filled before some normally launched kernel: they are read before the wait.
    `rotation`: q and k come without it; it is done on the way.
    `sinks`: [H], one more score in each head's softmax, which takes its share and brings nothing.
    """
    assert pages.cu_rows_B1 is None, "sequences with their own numbers of rows go through prefill_attention"
    if not _takes_triton(q_THd):
        if rotation is not None:
            q_THd, k_TGd = rotation.turn(q_THd, k_TGd)
        return paged_attention_torch(q_THd, k_TGd, v_TGd, cache_k, cache_v, pages, window, sinks)
    from peagle.kernels.attention.paged_triton import paged_attention_triton

    more = {"rotation": rotation, "sinks": sinks}
    return paged_attention_triton(q_THd, k_TGd, v_TGd, cache_k, cache_v, pages, window, pdl, **more)  # type: ignore[arg-type]


def prefill_attention(
    q_THd: Tensor,
    k_TGd: Tensor,
    v_TGd: Tensor,
    cache_k: Tensor,
    cache_v: Tensor,
    pages: Pages,
    window: Window,
    pdl: bool = False,
    sinks: Tensor | None = None,
) -> Tensor:
    """The same for sequences of differing numbers of rows, `pages.cu_rows_B1`, up to whole prompts."""
    if not _takes_triton(q_THd):
        return paged_attention_torch(q_THd, k_TGd, v_TGd, cache_k, cache_v, pages, window, sinks)
    from peagle.kernels.attention.prefill_triton import prefill_attention_triton, write_rows_triton

    plain = pages.max_context == 0 and window is None and sinks is None and q_THd.dtype != torch.float32
    if plain and q_THd.shape[-1] <= _LIBRARY_WIDTH:
        even = len(q_THd) == len(pages.starts_B) * pages.max_rows
        if even and PLANNED_ROWS and pages.max_rows % PLANNED_ROWS == 0:
            write_rows_triton(k_TGd, v_TGd, cache_k, cache_v, pages, pdl)
            return even_causal(q_THd, k_TGd, v_TGd, len(pages.starts_B))
        short = q_THd.shape[-1] >= _VARLEN_WIDTH and pages.max_rows <= _VARLEN_ROWS
        if short and _varlen() is not None:
            write_rows_triton(k_TGd, v_TGd, cache_k, cache_v, pages, pdl)
            return varlen_causal(q_THd, k_TGd, v_TGd, pages)
    return prefill_attention_triton(q_THd, k_TGd, v_TGd, cache_k, cache_v, pages, window, pdl, sinks=sinks)


def even_causal(q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, batch: int) -> Tensor:
    """The rows among themselves, for sequences of equal length without anything cached. Padding must hold numbers."""
    q, k, v = (x.unflatten(0, (batch, -1)).transpose(1, 2) for x in (q_THd, k_TGd, v_TGd))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2).flatten(0, 1)


@cache
def _varlen() -> tuple[Callable[..., Any], dict[str, Any]] | None:
    """torch's flash attention over sequences of differing lengths, and how this release is asked for causal."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    names = inspect.signature(varlen_attn).parameters
    how: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in names else {"is_causal": True}
    if "enable_gqa" in names:  # earlier ones share keys between heads unasked
        how["enable_gqa"] = True
    return varlen_attn, how


def varlen_causal(q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, pages: Pages) -> Tensor:
    """The rows among themselves, for sequences that have nothing cached. Padding must hold numbers, not nan."""
    found = _varlen()
    assert found is not None
    attend, how = found
    cu, most = pages.offsets_B1(), pages.max_rows
    return attend(q_THd, k_TGd, v_TGd, cu, cu, most, most, **how)
