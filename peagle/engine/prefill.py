"""Prefill: forward passes over prompt chunks, the first tokens, and the first draft tokens.

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

from peagle.engine.cuda_graphs import StepResult, capture_graph
from peagle.engine.kv_cache import KVCache, PagedAttention
from peagle.engine.proposer import DraftProposer
from peagle.engine.request import PrefillChunk, Request
from peagle.engine.sampler import Sampler
from peagle.kernels.attention.paged import prefill_attention
from peagle.kernels.attention.types import PagedAttentionMetadata
from peagle.kernels.host_transfer import copy_to_device, pin_for_copy
from peagle.kernels.step import SlotState, commit_state
from peagle.models.decoder import Decoder

ALIGNMENT = 4  # elements: 16 bytes of int32
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


@dataclass
class PrefillGraph:
    """A captured prefill pass with its input and output tensors."""

    shape: PrefillShape
    packed: Tensor
    result: StepResult
    graph: torch.cuda.CUDAGraph

    def replay(self, packed: Int64Array) -> StepResult:
        """The result of `Prefill.forward`, in memory that the next replay overwrites."""
        self.packed.copy_(pin_for_copy(torch.from_numpy(packed), self.packed.device), non_blocking=True)
        self.graph.replay()
        return self.result


class Prefill:
    def __init__(
        self,
        target: Decoder,
        run_target: Callable[..., tuple[Tensor, Tensor | None]],
        kv_cache: KVCache,
        state: SlotState,
        sampler: Sampler,
        proposer: DraftProposer | None,
        max_model_len: int,
    ) -> None:
        self.target, self.run_target, self.kv_cache = target, run_target, kv_cache
        self.state, self.sampler, self.proposer = state, sampler, proposer
        self.max_model_len, self.device = max_model_len, target.embed_tokens.weight.device
        self.aux_layer_ids: tuple[int, ...] = proposer.drafter.cfg.aux_layer_ids if proposer is not None else ()
        self.mask_token_id = proposer.mask_token_id if proposer is not None else None
        self.num_mask_rows = proposer.num_mask_rows if proposer is not None else None
        self.graphs: list[PrefillGraph] = []  # by ascending number of rows

    def launch(self, chunks: Sequence[PrefillChunk]) -> tuple[list[Request], Tensor, Tensor]:
        """Launches the chunks. Returns the requests that get their first token, these tokens and their logprobs."""
        ended = [c.request for c in chunks if c.is_last]
        new = [r for r in ended if not r.output_token_ids]  # others are resumed and know their next token
        resumed = [r for r in ended if r.output_token_ids]
        matched = [r for r in new if r.matcher is not None]
        if matched:
            self.sampler.send_grammar_masks(matched, [[] for _ in matched])
        shape = PrefillShape.from_chunks(chunks, self.num_mask_rows)
        graph = self.find_graph(shape)
        shape = graph.shape if graph is not None else shape.pad_ends()
        packed = pack_prefill_inputs(chunks, new + resumed, shape, self.max_model_len, self.mask_token_id)
        if graph is not None:
            first_tokens_F, logprobs_F2N = graph.replay(packed)
        else:
            first_tokens_F, logprobs_F2N = self.forward(copy_to_device(torch.from_numpy(packed), self.device), shape)
        return new, first_tokens_F[: len(new)], logprobs_F2N[: len(new)]

    def forward(self, packed: Tensor, shape: PrefillShape) -> StepResult:
        """The first token [F] of each prompt that ends, whose slots are then ready to decode, and their logprobs."""
        p: PrefillInputs[Tensor] = PrefillInputs.unpack(packed, shape)
        i: PrefillInputs[Tensor] = PrefillInputs.unpack(packed.int(), shape)
        tables_BM, starts_B = self.state.block_tables_SM[p.slots_B], i.num_computed_tokens_B

        def attention(cache: KVCache, query_lens_B: Tensor, query_start_loc_B1: Tensor, max_len: int) -> PagedAttention:
            lengths = query_lens_B, max_len, query_start_loc_B1, shape.max_context_len
            return PagedAttention(cache, PagedAttentionMetadata(tables_BM, starts_B, *lengths), prefill_attention)

        attend = attention(self.kv_cache, i.query_lens_B, i.query_start_loc_B1, shape.max_query_len)
        hidden_TD, aux_hidden_states = self.run_target(p.token_ids_T, p.positions_T, attend, self.aux_layer_ids)
        first_tokens_F = p.known_token_ids_F
        logprobs_F2N = torch.empty(0, device=self.device)
        if shape.num_ends:
            logits_FV = self.target.compute_logits(hidden_TD[p.last_rows_F])
            first_tokens_F, logprobs_F2N = self.sampler.sample_first_tokens(logits_FV, p.end_slots_F, p.num_tokens_F)
        newest_F = torch.where(p.known_token_ids_F < 0, first_tokens_F, p.known_token_ids_F).clamp(min=0)
        draft_token_ids_FK = newest_F[:, None][:, :0]
        if self.proposer is not None and aux_hidden_states is not None:
            max_len = shape.max_query_len + (shape.num_mask_rows or 0)
            attend = attention(self.proposer.kv_cache, i.draft_query_lens_B, i.draft_query_start_loc_B1, max_len)
            draft_token_ids_FK = self._draft(self.proposer, p, shape, newest_F, aux_hidden_states, attend)
        if shape.num_ends:
            none_accepted_F = torch.zeros_like(newest_F)
            commit_state(
                self.state,
                p.end_slots_F,
                newest_F[:, None],
                none_accepted_F,
                draft_token_ids_FK,
                self.max_model_len,
                p.num_tokens_F,
                self.sampler.processors,
            )
        return first_tokens_F, logprobs_F2N

    def _draft(
        self,
        proposer: DraftProposer,
        p: PrefillInputs[Tensor],
        shape: PrefillShape,
        newest_F: Tensor,
        aux_hidden_states_TN: Tensor,
        attend: PagedAttention,
    ) -> Tensor:
        """[F, K]: runs the drafter over the same prompt rows, and drafts tokens for the prompts that end.
        `newest_F` is the token after each of these prompts."""
        token_ids_R, hidden_RD = p.draft_token_ids_R, proposer.drafter.combine_hidden_states(aux_hidden_states_TN)
        if shape.num_ends:
            token_ids_R = torch.where(token_ids_R < 0, newest_F[(-1 - token_ids_R).clamp(min=0)], token_ids_R)
        if shape.num_mask_rows and shape.num_ends:
            assert proposer.mask_hidden_D is not None
            hidden_RD = torch.cat([hidden_RD, proposer.mask_hidden_D[None]])[p.draft_source_rows_R]
        output_RD, next_hidden_RD = proposer.run_drafter(token_ids_R, hidden_RD, p.draft_positions_R, attend)
        k = proposer.max_speculative_tokens if shape.num_ends else 0
        if k == 0:
            return newest_F[:, None][:, :0]
        first_rows_F = p.first_draft_rows_F
        if proposer.drafter.cfg.parallel:
            sample_rows = (first_rows_F[:, None] + torch.arange(k, device=self.device)).flatten()
            return proposer.greedy_tokens(output_RD[sample_rows]).view(-1, k)
        draft_token_ids_F = proposer.greedy_tokens(output_RD[first_rows_F])
        block_tables_FM = self.state.block_tables_SM[p.end_slots_F]
        return proposer.propose_autoregressively(
            draft_token_ids_F, next_hidden_RD[first_rows_F], p.num_tokens_F, block_tables_FM, k
        )

    # Captured passes

    def graph_shape(self, num_rows: int) -> PrefillShape:
        return PrefillShape(
            num_rows,
            num_sequences=min(num_rows // 16, 128) + 1,
            num_ends=min(max(num_rows // 32, 4), 128),
            max_query_len=min(num_rows, 1024),
            max_context_len=None,
            num_mask_rows=self.num_mask_rows,
        )

    def capture(self, sizes: Sequence[int], pool: Any) -> None:
        """Captures a pass for each number of rows, largest first, so that smaller ones reuse its memory."""
        for num_rows in sorted(sizes, reverse=True):
            shape = self.graph_shape(num_rows)
            packed = torch.from_numpy(pack_prefill_inputs([], [], shape, self.max_model_len, None)).to(self.device)
            graph, result = capture_graph(partial(self.forward, packed, shape), pool)
            self.graphs.insert(0, PrefillGraph(shape, packed, result, graph))

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
                max_query_len = min(-(-num_rows // num_seqs), self.max_model_len)
                shapes.append((num_rows, num_seqs, num_seqs, max_query_len, max_context_len, self.num_mask_rows))
        if self.num_mask_rows == 0:  # all shapes of `pad_ends`
            exponents = range((min(max_num_seqs, max_num_rows) - 1).bit_length() + 1)
            shapes += [(1 << e, 1 << e, 1 << e, 1, 0, self.num_mask_rows) for e in exponents]
        for shape in (PrefillShape(*numbers).pad_ends() for numbers in shapes):
            packed = pack_prefill_inputs([], [], shape, self.max_model_len, None)
            self.forward(copy_to_device(torch.from_numpy(packed), self.device), shape)

    def find_graph(self, shape: PrefillShape) -> PrefillGraph | None:
        """The smallest graph that fits, unless it has more than twice the rows of the smallest with enough rows."""
        larger = [g for g in self.graphs if g.shape.num_rows >= shape.num_rows]
        limit = 2 * larger[0].shape.num_rows if larger else 0
        return next((g for g in larger if g.shape.fits(shape) and g.shape.num_rows <= limit), None)
