"""Metadata of one step's paged attention, shared by all layers.

Shapes: B sequences, M blocks in a sequence's block table.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from peagle.config import Window


@dataclass
class PagedAttentionMetadata:
    """Positions and cache blocks of the query rows of one step.

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
