"""Chunks of prompts as one row of numbers, so that all a step has to know of them goes to the device in one piece.

Knows nothing about models or graphs. A recorded pass has room for more than there is: rows that are left over belong to
its last sequence, which keeps nothing, and ends that are left over have slot -1, which nobody has.

Shapes: T rows of prompts, B sequences, F prompts that are read to their end, R = T + F * masks rows of the drafter,
M blocks in a table.
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
from peagle.kernels.attention.paged import PagedAttentionMetadata

Int64Array = NDArray[np.int64]
A = TypeVar("A", Tensor, Int64Array)


@dataclass(frozen=True)
class PrefillShape:
    """How much there is to read, or at most."""

    rows: int  # T
    sequences: int  # B
    ends: int  # F
    max_rows: int  # of one sequence
    max_context: int | None  # positions read before; None: as many as there can be
    masks: int | None  # rows of a drafter behind each prompt's end; None: there is no drafter

    @classmethod
    def of(cls, chunks: Sequence[PrefillChunk], masks: int | None) -> PrefillShape:
        counts = [c.end - c.begin for c in chunks]
        context = max(c.begin for c in chunks)
        return cls(sum(counts), len(chunks), sum(c.is_last for c in chunks), max(counts), context, masks)

    def takes(self, other: PrefillShape) -> bool:
        fits = self.rows >= other.rows and self.ends >= other.ends and self.max_rows >= other.max_rows
        return fits and self.sequences > other.sequences  # the last is what is left over

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of the fields of `PrefillInputs`."""
        t, b, f = self.rows, self.sequences, self.ends
        rows = (t, t, b, b, b, b + 1)
        drafted = (b, b + 1, *[t + f * self.masks] * 3) if self.masks is not None else (0,) * 5
        return (*rows, *drafted, f, f, f, f, f)


@dataclass(frozen=True)
class PrefillInputs(Generic[A]):
    """Pieces of one array, in this order."""

    tokens_T: A
    positions_T: A
    slots_B: A
    starts_B: A
    live_B: A
    first_B1: A  # rows where the sequences begin, and where the last ends
    draft_live_B: A
    draft_first_B1: A
    draft_tokens_R: A  # -1 - f: the one that follows end f
    draft_positions_R: A
    draft_source_R: A  # the row of T whose state it reads; T: the mask's
    slots_F: A
    last_F: A  # row of T
    guess_F: A  # row of R, the first that guesses
    ends_F: A  # the position behind the prompt
    known_F: A  # the token there; -1: yet to be said

    @classmethod
    def cut(cls, packed: A, room: PrefillShape) -> PrefillInputs[A]:
        ends = list(accumulate(room.sizes))
        return cls(*(packed[end - size : end] for size, end in zip(room.sizes, ends, strict=True)))


def where(
    packed: Tensor, room: PrefillShape, tables_BM: Tensor
) -> tuple[PagedAttentionMetadata, PagedAttentionMetadata]:
    """Where the target's rows sit, and the drafter's; int32."""
    p: PrefillInputs[Tensor] = PrefillInputs.cut(packed, room)
    most, context = room.max_rows, room.max_context
    return (
        PagedAttentionMetadata(tables_BM, p.starts_B, p.live_B, most, p.first_B1, context),
        PagedAttentionMetadata(
            tables_BM, p.starts_B, p.draft_live_B, most + (room.masks or 0), p.draft_first_B1, context
        ),
    )


def split_last_chunks(chunks: Sequence[PrefillChunk]) -> tuple[list[Request], list[Request]]:
    """Whose prompts they end: first those whose next token is yet to be said, then those that have said it before."""
    ended = [c.request for c in chunks if c.is_last]
    return [r for r in ended if not r.output_token_ids], [r for r in ended if r.output_token_ids]


def pack_prefill_inputs(
    chunks: Sequence[PrefillChunk], ends: Sequence[Request], room: PrefillShape, longest: int, mask_id: int | None
) -> Int64Array:
    """For `PrefillInputs.cut`, ends in the order given. `longest` is the context's length, where rows
    behind a prompt may not reach."""
    packed = np.zeros(sum(room.sizes), np.int64)
    p = PrefillInputs.cut(packed, room)
    p.slots_B[:] = p.slots_F[:] = -1
    p.ends_F[:] = longest
    place = {r.id: f for f, r in enumerate(ends)}
    row, draft_row = 0, 0
    for b, c in enumerate(chunks):
        count, masks = c.end - c.begin, room.masks or 0 if c.is_last else 0
        ids = c.request.all_token_ids[c.begin : c.end + 1]
        p.tokens_T[row : row + count] = ids[:count]
        p.positions_T[row : row + count] = np.arange(c.begin, c.end)
        p.slots_B[b], p.starts_B[b], p.live_B[b] = c.request.slot, c.begin, min(count, longest - c.begin)
        if c.is_last:
            f, said = place[c.request.id], c.request.output_token_ids
            p.slots_F[f], p.ends_F[f], p.known_F[f] = c.request.slot, c.end, said[-1] if said else -1
            p.last_F[f], p.guess_F[f] = row + count - 1, draft_row + count - 1
        if room.masks is not None:
            behind = draft_row + count + masks
            following = [*ids[1:count], -1 - place[c.request.id], *[mask_id or 0] * masks] if c.is_last else ids[1:]
            p.draft_tokens_R[draft_row:behind] = following
            p.draft_positions_R[draft_row:behind] = np.minimum(np.arange(c.begin, c.end + masks), longest - 1)
            p.draft_source_R[draft_row : draft_row + count] = np.arange(row, row + count)
            p.draft_source_R[draft_row + count : behind] = room.rows
            p.draft_live_B[b] = min(count + masks, longest - c.begin)
            draft_row = behind
            p.draft_first_B1[b + 1 :] = draft_row
        row += count
        p.first_B1[b + 1 :] = row
    p.first_B1[-1] = len(p.tokens_T)
    if room.masks is not None:
        p.draft_first_B1[-1] = len(p.draft_tokens_R)
    return packed
