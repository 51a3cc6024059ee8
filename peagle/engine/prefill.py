"""Prefill: the part of a step that computes prompt chunks, the first tokens, and the first draft tokens.

The inputs of a pass are packed into a single int64 array, so that one copy sends them to the device. A captured pass
has a fixed shape that may be larger than the step. Unused rows belong to its last sequence, whose keys and values are
not written; unused prompt ends have slot -1, the padding slot.

Shapes: T prompt rows, B sequences, F prompts that end in this step, R = T + F * num_mask_rows drafter rows, K draft
tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, product
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from peagle.engine.cuda_graphs import DecodeGraph, MixedKind, StepResult, capture_graph
from peagle.engine.kv_cache import KVCache, PagedAttention
from peagle.engine.proposer import DraftBatch
from peagle.engine.request import PrefillChunk, Request
from peagle.engine.step_parts import DecodePart, StepPart, StepState
from peagle.kernels.attention.paged import prefill_attention
from peagle.kernels.attention.types import PagedAttentionMetadata
from peagle.kernels.host_transfer import copy_to_device, pin_for_copy
from peagle.kernels.step import commit_state

ALIGNMENT = 4  # elements: 16 bytes of int32
MAX_UNUSED_MIXED_ROWS = 64  # more cost as much time as a pass of its own
WARM_UP_ROWS = (8, 16, 32, 64, 128, 256, 384, 512, 640, 1024)  # kernels differ between these (gemm/tile_configs.py)

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

    def pad_ends(self) -> PrefillShape:
        """Rounds the number of prompt ends up to a power of two, if tokens are drafted one after another there: the
        kernel that does it differs between batch sizes, and all can be compiled before the first request."""
        if not self.num_ends or self.num_mask_rows != 0:
            return self
        return replace(self, num_ends=1 << (self.num_ends - 1).bit_length())

    @property
    def field_sizes(self) -> tuple[int, ...]:
        """Lengths of the fields of `PrefillInputs`."""
        t, b, f = self.num_rows, self.num_sequences, self.num_ends
        target = (t, t, b, b, b, b + 1)
        drafter = (b, b + 1, *[t + f * self.num_mask_rows] * 3) if self.num_mask_rows is not None else (0,) * 5
        return (*target, *drafter, f, f, f, f, f)

    @property
    def field_starts(self) -> tuple[int, ...]:
        """Where the fields begin in the packed array, and its length. All are aligned alike in any shape: Triton
        compiles a kernel again for a pointer of another alignment."""
        return tuple(accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in self.field_sizes), initial=0))


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
        starts = shape.field_starts[:-1]
        return cls(*(packed[start:][:size] for start, size in zip(starts, shape.field_sizes, strict=True)))


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
    packed = np.zeros(shape.field_starts[-1], np.int64)
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


class PrefillPart:
    """Prompt chunks, packed by `pack_prefill_inputs`: their keys and values, and the first token of each prompt that
    ends, whose slot is then ready to decode."""

    def __init__(self, state: StepState, packed: Tensor, shape: PrefillShape, k: int) -> None:
        """`k`: draft tokens after each prompt that ends."""
        self.state, self.shape, self.k, self.num_requests = state, shape, k, shape.num_ends
        self.inputs: PrefillInputs[Tensor] = PrefillInputs.unpack(packed, shape)
        self.ints: PrefillInputs[Tensor] = PrefillInputs.unpack(packed.int(), shape)
        p, i = self.inputs, self.ints
        self.token_ids_T, self.positions_T = p.token_ids_T, p.positions_T
        self.logit_rows: Tensor | None = p.last_rows_F
        self.block_tables_BM = state.slots.block_tables_SM[p.slots_B]
        self.attend = self._attention(state.kv_cache, i.query_lens_B, i.query_start_loc_B1, shape.max_query_len)
        self.first_tokens_F = p.known_token_ids_F
        self.logprobs_F2N = torch.empty(0, device=packed.device)

    def _attention(
        self, cache: KVCache, query_lens_B: Tensor, query_start_loc_B1: Tensor, max_query_len: int
    ) -> PagedAttention:
        metadata = PagedAttentionMetadata(
            self.block_tables_BM,
            self.ints.num_computed_tokens_B,
            query_lens_B,
            max_query_len,
            query_start_loc_B1,
            self.shape.max_context_len,
        )
        return PagedAttention(cache, metadata, prefill_attention)

    def sample(self, logits_FV: Tensor) -> None:
        """Samples the token after each prompt that ends."""
        p = self.inputs
        self.first_tokens_F, self.logprobs_F2N = self.state.sampler.sample_first_tokens(
            logits_FV, p.end_slots_F, p.num_tokens_F
        )

    @property
    def newest_tokens_F(self) -> Tensor:
        """The token after each prompt that ends; a resumed request knows it."""
        known_F = self.inputs.known_token_ids_F
        return torch.where(known_F < 0, self.first_tokens_F, known_F).clamp(min=0)

    def build_draft_batch(self, hidden_TD: Tensor) -> DraftBatch:
        """The same prompt rows, and mask rows after the prompts that end."""
        proposer, p, i, shape = self.state.proposer, self.inputs, self.ints, self.shape
        assert proposer is not None and shape.num_mask_rows is not None
        token_ids_R = p.draft_token_ids_R
        if shape.num_ends:
            sampled_R = self.newest_tokens_F[(-1 - token_ids_R).clamp(min=0)]
            token_ids_R = torch.where(token_ids_R < 0, sampled_R, token_ids_R)
        if shape.num_mask_rows and shape.num_ends:
            assert proposer.mask_hidden_D is not None
            hidden_TD = torch.cat([hidden_TD, proposer.mask_hidden_D[None]])[p.draft_source_rows_R]
        max_query_len = shape.max_query_len + shape.num_mask_rows
        sample_rows = p.first_draft_rows_F
        if proposer.drafter.cfg.parallel:
            sample_rows = (sample_rows[:, None] + torch.arange(self.k, device=sample_rows.device)).flatten()
        return DraftBatch(
            token_ids_R,
            hidden_TD,
            p.draft_positions_R,
            self._attention(proposer.kv_cache, i.draft_query_lens_B, i.draft_query_start_loc_B1, max_query_len),
            sample_rows,
            shape.num_ends,
            p.num_tokens_F,
            self.state.slots.block_tables_SM[p.end_slots_F],
        )

    def commit(self, draft_token_ids_FK: Tensor) -> None:
        if self.shape.num_ends:
            newest_F, p = self.newest_tokens_F, self.inputs
            commit_state(
                self.state.slots,
                p.end_slots_F,
                newest_F[:, None],
                torch.zeros_like(newest_F),
                draft_token_ids_FK,
                self.state.max_model_len,
                p.num_tokens_F,
                self.state.sampler.processors,
            )

    @property
    def result(self) -> StepResult:
        """The first token [F] of each prompt that ends, and their logprobs."""
        return self.first_tokens_F, self.logprobs_F2N


@dataclass
class PrefillGraph:
    """A captured prefill pass with its input and output tensors."""

    shape: PrefillShape
    packed: Tensor
    result: StepResult
    graph: torch.cuda.CUDAGraph

    def load_inputs(self, packed: Int64Array) -> None:
        self.packed.copy_(pin_for_copy(torch.from_numpy(packed), self.packed.device), non_blocking=True)

    def replay(self) -> StepResult:
        """The result, in memory that the next replay overwrites."""
        self.graph.replay()
        return self.result


@dataclass
class MixedGraph:
    """A captured pass over decode requests and prompt chunks; both hold the same graph."""

    k: int
    decode: DecodeGraph
    prefill: PrefillGraph


class Prefill:
    """Launches the prompt chunks of a step: in a pass of their own, or in one pass with its decode requests."""

    def __init__(self, run_step: Callable[[Sequence[StepPart], int], None], state: StepState) -> None:
        self.run_step, self.state, self.device = run_step, state, state.slots.token_ids_SN.device
        proposer = state.proposer
        self.mask_token_id = proposer.mask_token_id if proposer is not None else None
        self.max_speculative_tokens = proposer.max_speculative_tokens if proposer is not None else 0
        self.num_mask_rows = self.count_mask_rows(self.max_speculative_tokens)
        self.graphs: list[PrefillGraph] = []  # by ascending number of rows
        # By number of decode requests, then by descending number of draft tokens and ascending number of prompt rows.
        self.mixed_graphs: dict[int, list[MixedGraph]] = {}

    def count_mask_rows(self, k: int) -> int | None:
        """Drafter rows after the end of each prompt, to draft k tokens; None without a drafter."""
        return self.state.proposer.num_mask_rows(k) if self.state.proposer is not None else None

    def find_ended(self, chunks: Sequence[PrefillChunk]) -> tuple[list[Request], list[Request]]:
        """The requests whose prompt ends: those that get their first token, and those that are resumed."""
        ended = [c.request for c in chunks if c.is_last]
        return [r for r in ended if not r.output_token_ids], [r for r in ended if r.output_token_ids]

    def pack(self, chunks: Sequence[PrefillChunk], shape: PrefillShape) -> Int64Array:
        new, resumed = self.find_ended(chunks)
        return pack_prefill_inputs(chunks, new + resumed, shape, self.state.max_model_len, self.mask_token_id)

    def launch(self, chunks: Sequence[PrefillChunk]) -> StepResult:
        """Launches a pass over the chunks, as a captured graph if there is one that fits. Returns the first tokens of
        prompts that end, and their logprobs."""
        shape = PrefillShape.from_chunks(chunks, self.num_mask_rows)
        graph = self.find_graph(shape)
        if graph is not None:
            graph.load_inputs(self.pack(chunks, graph.shape))
            return graph.replay()
        shape = shape.pad_ends()
        return self.forward(copy_to_device(torch.from_numpy(self.pack(chunks, shape)), self.device), shape)

    def launch_mixed(self, slots: list[int], k: int, chunks: Sequence[PrefillChunk]) -> tuple[StepResult, StepResult]:
        """Launches one pass over decode requests and chunks. Returns the results of `DecodePart` and `launch`."""
        graph = self.find_mixed_graph(len(slots), k, chunks)
        if graph is not None:
            graph.decode.load_slots(slots)
            graph.prefill.load_inputs(self.pack(chunks, graph.prefill.shape))
            return graph.decode.replay(), graph.prefill.result
        shape = PrefillShape.from_chunks(chunks, self.count_mask_rows(k))
        inputs = torch.tensor(slots), torch.from_numpy(self.pack(chunks, shape))
        slots_B, packed = (copy_to_device(x, self.device) for x in inputs)
        return self.forward_mixed(slots_B, packed, shape, k)

    def forward(self, packed: Tensor, shape: PrefillShape) -> StepResult:
        part = PrefillPart(self.state, packed, shape, self.max_speculative_tokens)
        self.run_step([part], part.k)
        return part.result

    def forward_mixed(
        self, slots_B: Tensor, packed: Tensor, shape: PrefillShape, k: int
    ) -> tuple[StepResult, StepResult]:
        decode, prefill = DecodePart(self.state, slots_B, k), PrefillPart(self.state, packed, shape, k)
        self.run_step([decode, prefill], k)
        return decode.result, prefill.result

    # Captured passes

    def graph_shape(self, num_rows: int, num_mask_rows: int | None) -> PrefillShape:
        return PrefillShape(
            num_rows,
            num_sequences=min(num_rows // 16, 128) + 1,
            num_ends=min(max(num_rows // 16, 4), 128),
            max_query_len=min(num_rows, 1024),
            max_context_len=None,
            num_mask_rows=num_mask_rows,
        )

    def _padding(self, shape: PrefillShape) -> Tensor:
        """Inputs of a pass without chunks."""
        packed = pack_prefill_inputs([], [], shape, self.state.max_model_len, None)
        return copy_to_device(torch.from_numpy(packed), self.device)

    def capture(self, sizes: Sequence[int], pool: Any) -> None:
        """Captures a pass for each number of rows, largest first, so that smaller ones reuse its memory."""
        for num_rows in sorted(sizes, reverse=True):
            shape = self.graph_shape(num_rows, self.num_mask_rows)
            packed = self._padding(shape)
            graph, result = capture_graph(partial(self.forward, packed, shape), pool)
            self.graphs.insert(0, PrefillGraph(shape, packed, result, graph))

    def capture_mixed(self, kinds: Sequence[MixedKind], pool: Any) -> None:
        """Captures mixed passes, largest first."""
        for kind in sorted(kinds, reverse=True):
            shape = self.graph_shape(kind.num_prefill_rows, self.count_mask_rows(kind.k))
            slots_B, packed = torch.full((kind.num_requests,), -1, device=self.device), self._padding(shape)
            graph, (decode, prefill) = capture_graph(partial(self.forward_mixed, slots_B, packed, shape, kind.k), pool)
            mixed = MixedGraph(kind.k, DecodeGraph(slots_B, decode, graph), PrefillGraph(shape, packed, prefill, graph))
            self.mixed_graphs.setdefault(kind.num_requests, []).append(mixed)
        for graphs in self.mixed_graphs.values():
            graphs.sort(key=lambda g: (-g.k, g.prefill.shape.num_rows))

    def warm_up(self, max_num_rows: int, max_num_seqs: int) -> None:
        """Runs passes of padding in all sizes, so that none compiles a kernel or allocates memory later."""
        sizes = [rows for rows in WARM_UP_ROWS if rows < max_num_rows]
        while sizes and 2 * sizes[-1] < max_num_rows:
            sizes.append(2 * sizes[-1])
        shapes = []
        for num_rows in [*sizes, max_num_rows]:
            batch_sizes, context_lens = {1}, list[int | None]([0])
            if num_rows <= WARM_UP_ROWS[-1]:
                batch_sizes, context_lens = {1, min(num_rows, max_num_seqs)}, [0, None]
            for num_seqs, max_context_len in product(batch_sizes, context_lens):
                max_query_len = min(-(-num_rows // num_seqs), self.state.max_model_len)
                shapes.append((num_rows, num_seqs, num_seqs, max_query_len, max_context_len, self.num_mask_rows))
        if self.num_mask_rows == 0:  # all shapes of `pad_ends`
            exponents = range((min(max_num_seqs, max_num_rows) - 1).bit_length() + 1)
            shapes += [(1 << e, 1 << e, 1 << e, 1, 0, self.num_mask_rows) for e in exponents]
        for shape in (PrefillShape(*numbers).pad_ends() for numbers in shapes):
            self.forward(self._padding(shape), shape)

    def find_graph(self, shape: PrefillShape) -> PrefillGraph | None:
        """The smallest graph that fits, unless it has more than twice the rows of the smallest with enough rows."""
        larger = [g for g in self.graphs if g.shape.num_rows >= shape.num_rows]
        limit = 2 * larger[0].shape.num_rows if larger else 0
        return next((g for g in larger if g.shape.fits(shape) and g.shape.num_rows <= limit), None)

    def find_mixed_graph(self, num_requests: int, k: int, chunks: Sequence[PrefillChunk]) -> MixedGraph | None:
        """The smallest graph that fits and drafts k tokens, or fewer but more than half as many per step; None if it
        has many unused prompt rows, or there is none."""
        batch_size = min((size for size in self.mixed_graphs if size >= num_requests), default=None)
        if batch_size is None:
            return None
        shape = PrefillShape.from_chunks(chunks, None)
        for graph in self.mixed_graphs[batch_size]:
            num_unused_rows = graph.prefill.shape.num_rows - shape.num_rows
            if (k + 1) / 2 < graph.k + 1 <= k + 1 and graph.prefill.shape.fits(shape):
                return graph if num_unused_rows <= MAX_UNUSED_MIXED_ROWS else None
        return None
