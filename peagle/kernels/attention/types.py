"""Types shared by the attention kernels.

Shapes: B sequences, T rows of all sequences, H query heads, G key/value heads, d head width, M blocks in a sequence's
block table; R rows and S keys of ranged attention.
"""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from peagle.config import Window
from peagle.kernels.fp8 import FP8_DTYPE, to_fp8
from peagle.kernels.norm.rms_norm import rms_norm_torch

# The torch version processes chunks of at most this many scores over all heads: 16 MB in fp32.
MAX_CHUNK_SCORES = 4 << 20
# A chunk ends when it would compute more than twice the visible scores of its rows, but not before this many rows.
MIN_CHUNK_ROWS = 32


@dataclass(frozen=True)
class QKNormRope:
    """Rotary angles [T, 1, d] of a step's rows, and the weights of the optional RMS norms of q and k."""

    cos: Tensor
    sin: Tensor
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 0.0

    def select_rows(self, rows: slice) -> Self:
        return replace(self, cos=self.cos[rows], sin=self.sin[rows])

    @property
    def has_norm(self) -> bool:
        return self.q_norm is not None and self.k_norm is not None

    def apply(self, q_THd: Tensor, k_TGd: Tensor) -> tuple[Tensor, Tensor]:
        """Returns normed and rotated copies of q and k, computed in plain torch."""
        if self.q_norm is not None and self.k_norm is not None:
            q_THd = rms_norm_torch(q_THd, self.q_norm, self.eps)
            k_TGd = rms_norm_torch(k_TGd, self.k_norm, self.eps)
        return _rotate(q_THd, self.cos, self.sin), _rotate(k_TGd, self.cos, self.sin)


def _rotate(x_THd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x_THd.chunk(2, -1)
    return x_THd * cos + torch.cat([-second, first], -1) * sin


@dataclass
class PagedAttentionMetadata:
    """Positions and cache blocks of the query rows of one step, shared by all layers.

    Row j of sequence b has position `num_computed_tokens_B[b] + j`. It sees the cached keys before
    `num_computed_tokens_B[b]` and rows 0..j of its own sequence. Keys and values of rows j < `query_lens_B[b]` are
    written to the cache. Later rows are padding: they are not written, and their output is undefined.

    The torch version reads the tensors on first use and caches the result, so they must not change afterwards. The
    Triton versions read them on the device at every launch: a CUDA graph replays with their current contents.
    """

    block_tables_BM: Tensor  # int32; entries after a sequence's last used block are ignored
    num_computed_tokens_B: Tensor  # int32: cached positions of the sequence
    query_lens_B: Tensor  # int32: query rows of the sequence that are not padding
    max_query_len: int  # most query rows of any sequence, including padding
    query_start_loc_B1: Tensor | None = None  # int32: cumulative row counts; None: each sequence has max_query_len rows
    max_computed_tokens: int | None = None  # upper bound of num_computed_tokens_B; None: the block table's capacity
    torch_plans: dict[tuple[int, Window], Any] = field(default_factory=dict, init=False, repr=False, compare=False)


class PagedAttentionInputs(NamedTuple):
    """Arguments of paged attention in one layer. A cache is [blocks, block size, G, d].

    A cache of FP8_DTYPE holds keys and values that are rounded to fp8 as they are written. Every row attends to the
    rounded ones, also to those of its own step, so that later steps see the same.
    """

    q_THd: Tensor
    k_TGd: Tensor
    v_TGd: Tensor
    cache_k: Tensor
    cache_v: Tensor
    metadata: PagedAttentionMetadata
    window: Window = None  # limits the positions that a row sees
    sinks_H: Tensor | None = None  # one extra logit per head in the softmax, without a value
    rope: QKNormRope | None = None  # q and k are not yet normed and rotated; the attention kernel does both
    out_THd: Tensor | None = None  # where the Triton kernels write the result; None: a new tensor


def to_cache_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Converts keys or values to the dtype of the cache."""
    return to_fp8(x) if dtype == FP8_DTYPE else x.to(dtype)


class AttentionLaunch(NamedTuple):
    """Tiles and launch parameters of an attention kernel with many rows per program."""

    rows: int  # per program or row tile
    tile: int  # keys per key tile
    warps: int
    stages: int


def pad_row_count(rows: int) -> int:
    """Rounds up to a multiple of 4: lines of 32-bit values then start at multiples of 16 bytes, as TMA requires."""
    return -(-rows // 4) * 4


class KeyRanges:
    """Row r sees keys lo_R[r] <= j < hi_R[r], none if hi <= lo. Neither lo nor hi decreases from row to row.

    Tile bounds are computed once and cached, so layers should share one object; the tensors must not change.

    Worked example: documents of 3 and 2 tokens, where each row sees its own document up to itself, and
    `get_row_spans(5, tile=2)`, which tells for each tile of two keys which rows see it:

        row   0  1  2  3  4            keys 0 1   keys 2 3   keys 4
        lo    0  0  0  3  3   first        0          2         4      first row that sees any key of the tile
        hi    1  2  3  4  5   full_first   1          3         4      first row that sees all keys of the tile
                              full_end     3          3         5      end of the rows that see all keys
                              end          3          5         5      end of the rows that see any key
    """

    def __init__(self, lo_R: Tensor, hi_R: Tensor) -> None:
        rows = len(lo_R)
        assert lo_R.shape == hi_R.shape == (rows,), (lo_R.shape, hi_R.shape)
        self.bounds = lo_R.new_zeros(2, pad_row_count(rows), dtype=torch.int32)  # lo and hi
        self.bounds[0, :rows], self.bounds[1, :rows] = lo_R, hi_R
        self.lo_R, self.hi_R = self.bounds[0, :rows], self.bounds[1, :rows]
        self._chunks: dict[int, list[tuple[slice, slice]]] = {}
        self._spans: dict[tuple[int, int], Tensor] = {}

    def __len__(self) -> int:
        return len(self.lo_R)

    def get_row_spans(self, num_keys: int, tile: int) -> Tensor:
        """Returns first, full_first, full_end and end of each key tile, [4, tiles] int32; see the example above.

        Runs on the device without synchronising.
        """
        if (num_keys, tile) not in self._spans:
            low = torch.arange(0, num_keys, tile, dtype=torch.int32, device=self.lo_R.device)
            high = (low + tile).clamp(max=num_keys)
            spans = (
                torch.searchsorted(self.hi_R, low, right=True, out_int32=True),
                torch.searchsorted(self.hi_R, high, out_int32=True),
                torch.searchsorted(self.lo_R, low, right=True, out_int32=True),
                torch.searchsorted(self.lo_R, high, out_int32=True),
            )
            self._spans[num_keys, tile] = torch.stack(spans)
        return self._spans[num_keys, tile]

    def get_chunks(self, heads: int) -> list[tuple[slice, slice]]:
        """Returns all rows in order, cut into chunks with few scores that are mostly visible: rows and their keys."""
        if heads not in self._chunks:
            self._chunks[heads] = _cut_chunks(self.lo_R.tolist(), self.hi_R.tolist(), MAX_CHUNK_SCORES // heads)
        return self._chunks[heads]


def _cut_chunks(lo: list[int], hi: list[int], max_scores: int) -> list[tuple[slice, slice]]:
    chunks: list[tuple[slice, slice]] = []

    def close_chunk(first: int, end: int) -> None:
        chunks.append((slice(first, end), slice(lo[first], max(hi[end - 1], lo[first]))))

    first = num_visible = 0
    for row in range(len(lo)):
        assert row == 0 or (lo[row - 1] <= lo[row] and hi[row - 1] <= hi[row]), f"key ranges decrease at row {row}"
        own = max(hi[row] - lo[row], 0)
        rows, keys = row + 1 - first, max(hi[row] - lo[first], 0)
        wasteful = rows > MIN_CHUNK_ROWS and rows * keys > 2 * (num_visible + own)
        if row > first and (rows * keys > max_scores or wasteful):
            close_chunk(first, row)
            first, num_visible = row, 0
        num_visible += own
    if len(lo):
        close_chunk(first, len(lo))
    return chunks
