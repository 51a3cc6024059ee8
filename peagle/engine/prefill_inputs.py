"""Packs the prefill chunks of one step into a single int64 array, so that one copy sends it to the device.

A captured prefill graph has a fixed shape that may be larger than the step. Unused rows belong to its last sequence,
whose keys and values are not written; unused prompt ends have slot -1, the padding slot.

Shapes: T prompt rows, B sequences, F prompts that end in this step, R = T + F * num_mask_rows drafter rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from peagle.engine.request import PrefillChunk, Request
from peagle.kernels.attention.types import PagedAttentionMetadata

Int64Array = NDArray[np.int64]
A = TypeVar("A", Tensor, Int64Array)


@dataclass(frozen=True)
class PrefillShape:
    """Size of a prefill pass: exact for one step, an upper bound for a captured graph."""

    num_rows: int  # T
    num_sequences: int  # B
    num_ends: int  # F
    max_query_len: int  # most rows of one sequence
    max_context_len: int | None  # most cached positions before a chunk; None: unbounded
    num_mask_rows: int | None  # drafter rows after the end of each prompt; None: no drafter

    @classmethod
    def from_chunks(cls, chunks: Sequence[PrefillChunk], num_mask_rows: int | None) -> PrefillShape:
        query_lens = [c.end - c.begin for c in chunks]
        num_ends = sum(c.is_last for c in chunks)
        max_context_len = max(c.begin for c in chunks)
        return cls(sum(query_lens), len(chunks), num_ends, max(query_lens), max_context_len, num_mask_rows)

    def fits(self, other: PrefillShape) -> bool:
        """Whether a pass of the other shape fits into this one, whose last sequence takes the unused rows."""
        rows_fit = self.num_rows >= other.num_rows and self.max_query_len >= other.max_query_len
        return rows_fit and self.num_ends >= other.num_ends and self.num_sequences > other.num_sequences

    @property
    def field_sizes(self) -> tuple[int, ...]:
        """Lengths of the fields of `PrefillInputs`."""
        t, b, f = self.num_rows, self.num_sequences, self.num_ends
        target = (t, t, b, b, b, b + 1)
        drafter = (b, b + 1, *[t + f * self.num_mask_rows] * 3) if self.num_mask_rows is not None else (0,) * 5
        return (*target, *drafter, f, f, f, f, f)


@dataclass(frozen=True)
class PrefillInputs(Generic[A]):
    """Views of the packed array, in this order."""

    token_ids_T: A
    positions_T: A
    slots_B: A
    num_computed_tokens_B: A
    query_lens_B: A  # rows whose keys and values are written
    query_start_loc_B1: A  # first row of each sequence, and the number of rows
    draft_query_lens_B: A
    draft_query_start_loc_B1: A
    draft_token_ids_R: A  # -1 - f: the token after prompt end f, sampled in this pass
    draft_positions_R: A
    draft_source_rows_R: A  # row of T with the hidden state; T: mask_hidden
    end_slots_F: A
    last_rows_F: A  # last row of the prompt in T
    first_draft_rows_F: A  # first row of R that predicts a draft token
    num_tokens_F: A  # length of the prefill: the position of the next token
    known_token_ids_F: A  # the next token of a resumed request; -1: to be sampled

    @classmethod
    def unpack(cls, packed: A, shape: PrefillShape) -> PrefillInputs[A]:
        sizes = shape.field_sizes
        return cls(*(packed[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)))


def build_prefill_metadata(
    packed: Tensor, shape: PrefillShape, block_tables_BM: Tensor
) -> tuple[PagedAttentionMetadata, PagedAttentionMetadata]:
    """Positions of the target's rows and of the drafter's rows in the KV cache. `packed` is int32."""
    p: PrefillInputs[Tensor] = PrefillInputs.unpack(packed, shape)
    starts, query_len, context_len = p.num_computed_tokens_B, shape.max_query_len, shape.max_context_len
    draft_query_len = query_len + (shape.num_mask_rows or 0)
    return (
        PagedAttentionMetadata(block_tables_BM, starts, p.query_lens_B, query_len, p.query_start_loc_B1, context_len),
        PagedAttentionMetadata(
            block_tables_BM, starts, p.draft_query_lens_B, draft_query_len, p.draft_query_start_loc_B1, context_len
        ),
    )


def split_ended_requests(chunks: Sequence[PrefillChunk]) -> tuple[list[Request], list[Request]]:
    """Requests whose prefill ends in this step: new ones, whose first token is sampled, and resumed ones."""
    ended = [c.request for c in chunks if c.is_last]
    return [r for r in ended if not r.output_token_ids], [r for r in ended if r.output_token_ids]


def pack_prefill_inputs(
    chunks: Sequence[PrefillChunk],
    ended: Sequence[Request],
    shape: PrefillShape,
    max_model_len: int,
    mask_token_id: int | None,
) -> Int64Array:
    """Packs the fields of `PrefillInputs`, prompt ends in the order of `ended`.

    Worked example: one chunk with tokens a b c at positions 0 1 2 that ends a new prompt, 2 mask rows (m = mask id):

        target   tokens a b c          positions 0 1 2
        drafter  tokens b c -1 m m     positions 0 1 2 3 4     hidden states of rows 0 1 2, then mask_hidden twice

    -1 stands for the token that the target samples after c. Draft tokens are read off rows 2, 3 and 4.
    """
    packed = np.zeros(sum(shape.field_sizes), np.int64)
    p = PrefillInputs.unpack(packed, shape)
    p.slots_B[:] = p.end_slots_F[:] = -1
    p.num_tokens_F[:] = max_model_len
    end_index = {r.id: f for f, r in enumerate(ended)}
    row, draft_row = 0, 0
    for b, c in enumerate(chunks):
        num_rows, num_masks = c.end - c.begin, shape.num_mask_rows or 0 if c.is_last else 0
        ids = c.request.all_token_ids[c.begin : c.end + 1]
        p.token_ids_T[row : row + num_rows] = ids[:num_rows]
        p.positions_T[row : row + num_rows] = np.arange(c.begin, c.end)
        p.slots_B[b], p.num_computed_tokens_B[b] = c.request.slot, c.begin
        p.query_lens_B[b] = min(num_rows, max_model_len - c.begin)
        if c.is_last:
            f, output = end_index[c.request.id], c.request.output_token_ids
            p.end_slots_F[f], p.num_tokens_F[f] = c.request.slot, c.end
            p.known_token_ids_F[f] = output[-1] if output else -1
            p.last_rows_F[f], p.first_draft_rows_F[f] = row + num_rows - 1, draft_row + num_rows - 1
        if shape.num_mask_rows is not None:
            draft_end = draft_row + num_rows + num_masks
            next_ids = ids[1:]
            if c.is_last:
                next_ids = [*ids[1:num_rows], -1 - end_index[c.request.id], *[mask_token_id or 0] * num_masks]
            p.draft_token_ids_R[draft_row:draft_end] = next_ids
            positions = np.arange(c.begin, c.end + num_masks)
            p.draft_positions_R[draft_row:draft_end] = np.minimum(positions, max_model_len - 1)
            p.draft_source_rows_R[draft_row : draft_row + num_rows] = np.arange(row, row + num_rows)
            p.draft_source_rows_R[draft_row + num_rows : draft_end] = shape.num_rows
            p.draft_query_lens_B[b] = min(num_rows + num_masks, max_model_len - c.begin)
            draft_row = draft_end
            p.draft_query_start_loc_B1[b + 1 :] = draft_row
        row += num_rows
        p.query_start_loc_B1[b + 1 :] = row
    p.query_start_loc_B1[-1] = len(p.token_ids_T)
    if shape.num_mask_rows is not None:
        p.draft_query_start_loc_B1[-1] = len(p.draft_token_ids_R)
    return packed
