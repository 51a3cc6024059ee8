"""Prefill: forward passes over prompt chunks, the first tokens, and the first draft tokens.

Shapes: T prompt rows, F prompts that end in this step, K draft tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from peagle.engine.cuda_graphs import PrefillGraphs
from peagle.engine.kv_cache import KVCache, PagedAttention
from peagle.engine.prefill_inputs import (
    PrefillInputs,
    PrefillShape,
    build_prefill_metadata,
    pack_prefill_inputs,
    split_ended_requests,
)
from peagle.engine.proposer import DraftProposer
from peagle.engine.request import Logprobs, PrefillChunk, Request
from peagle.engine.sampler import Sampler
from peagle.kernels.attention.paged import prefill_attention
from peagle.kernels.host_transfer import copy_to_device
from peagle.kernels.step.step import commit_state
from peagle.kernels.step.types import SlotState
from peagle.models.decoder import Decoder

FirstTokenSampler = Callable[[Tensor, PrefillInputs[Tensor]], Tensor]  # logits [F, V] -> tokens [F]


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
        self.graphs: PrefillGraphs | None = None

    def launch(self, chunks: Sequence[PrefillChunk], logprobs: Logprobs) -> tuple[list[Request], Tensor | None]:
        """Launches the chunks. Returns the requests that get their first token, and these tokens on the device."""
        new, resumed = split_ended_requests(chunks)
        shape = PrefillShape.from_chunks(chunks, self.num_mask_rows)
        processed = any(r.needs_logits_processing for r in new)
        graph = self.graphs.find(shape) if self.graphs is not None and not processed else None
        packed = pack_prefill_inputs(
            chunks, new + resumed, graph.shape if graph is not None else shape, self.max_model_len, self.mask_token_id
        )
        if graph is not None:
            first_tokens_F = graph.replay(packed)
        else:
            sample = partial(self.sampler.sample_first_tokens_processed, new, logprobs) if processed else None
            first_tokens_F = self.forward(copy_to_device(torch.from_numpy(packed), self.device), shape, sample)
        return new, first_tokens_F[: len(new)] if new else None

    def forward(self, packed: Tensor, shape: PrefillShape, sample: FirstTokenSampler | None = None) -> Tensor:
        """[F]: the first token of each prompt that ends, whose slots are then ready to decode."""
        p: PrefillInputs[Tensor] = PrefillInputs.unpack(packed, shape)
        metadata, draft_metadata = build_prefill_metadata(packed.int(), shape, self.state.block_tables_SM[p.slots_B])
        attend = PagedAttention(self.kv_cache, metadata, prefill_attention)
        hidden_TD, aux_hidden_states = self.run_target(p.token_ids_T, p.positions_T, attend, self.aux_layer_ids)
        first_tokens_F = p.known_token_ids_F
        if shape.num_ends:
            logits_FV = self.target.compute_logits(hidden_TD[p.last_rows_F])
            first_tokens_F = (sample or self.sampler.sample_first_tokens)(logits_FV, p)
        newest_F = torch.where(p.known_token_ids_F < 0, first_tokens_F, p.known_token_ids_F)
        draft_token_ids_FK = newest_F[:, None][:, :0]
        if self.proposer is not None and aux_hidden_states is not None:
            draft_token_ids_FK = self.proposer.propose_after_prefill(
                p, shape, newest_F, aux_hidden_states, draft_metadata, self.state.block_tables_SM
            )
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
            )
        return first_tokens_F
