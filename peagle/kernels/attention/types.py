"""Types shared by the attention kernels.

Shapes: B sequences, T rows of all sequences, H query heads, G key/value heads, d head width, M blocks in a sequence's
block table.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from peagle.config import Window


@dataclass(frozen=True)
class QKNormRope:
    """Rotary angles [T, 1, d] of a step's rows, and the weights of the optional RMS norms of q and k."""

    cos: Tensor
    sin: Tensor
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 0.0

    @property
    def has_norm(self) -> bool:
        return self.q_norm is not None and self.k_norm is not None

    def apply(self, q_THd: Tensor, k_TGd: Tensor) -> tuple[Tensor, Tensor]:
        """Returns normed and rotated copies of q and k, computed in plain torch."""
        if self.q_norm is not None and self.k_norm is not None:
            q_THd, k_TGd = _rms_norm(q_THd, self.q_norm, self.eps), _rms_norm(k_TGd, self.k_norm, self.eps)
        return _rotate(q_THd, self.cos, self.sin), _rotate(k_TGd, self.cos, self.sin)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = x.float() if x.dtype != torch.float64 else x
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return weight * y.to(x.dtype)


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
    _uniform_start_loc_B1: Tensor | None = field(default=None, init=False, repr=False, compare=False)
    torch_plans: dict[tuple[int, Window], Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def get_query_start_loc(self) -> Tensor:
        """Returns `query_start_loc_B1`, computed if all sequences have the same number of rows."""
        if self.query_start_loc_B1 is not None:
            return self.query_start_loc_B1
        if self._uniform_start_loc_B1 is None:
            batch, device = len(self.num_computed_tokens_B), self.num_computed_tokens_B.device
            self._uniform_start_loc_B1 = torch.arange(batch + 1, dtype=torch.int32, device=device) * self.max_query_len
        return self._uniform_start_loc_B1


class PagedAttentionInputs(NamedTuple):
    """Arguments of paged attention in one layer. A cache is [blocks, block size, G, d]."""

    q_THd: Tensor
    k_TGd: Tensor
    v_TGd: Tensor
    cache_k: Tensor
    cache_v: Tensor
    metadata: PagedAttentionMetadata
    window: Window = None  # limits the positions that a row sees
    sinks_H: Tensor | None = None  # one extra logit per head in the softmax, without a value
    rope: QKNormRope | None = None  # q and k are not yet normed and rotated; the attention kernel does both


class AttentionLaunch(NamedTuple):
    """Tiles and launch parameters of an attention kernel with many rows per program."""

    rows: int  # per program or row tile
    tile: int  # keys per key tile
    warps: int
    stages: int
