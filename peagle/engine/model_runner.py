"""Executes a scheduled step on the device: the decode step of running requests, then prefill.

One decode step, for B requests with K draft tokens each (Q = K + 1 rows per request, T = B * Q):

    verify   the target processes the newest token and the draft tokens of each request in one pass
    accept   the sampler samples the target's token of each row and accepts draft tokens while they equal it
    draft    the drafter processes the accepted tokens and K - 1 mask rows: K new draft tokens in one pass

The step reads and writes `DeviceState`, so it can be launched before the tokens of the last step are on the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from peagle.engine.cuda_graphs import DecodeGraphs
from peagle.engine.device_state import DeviceState
from peagle.engine.kv_cache import KVCache, decode_attention
from peagle.engine.logits_processors import compute_allowed_tokens
from peagle.engine.prefill import Prefill
from peagle.engine.proposer import DraftProposer
from peagle.engine.request import Logprobs, Request, SchedulerOutput
from peagle.engine.sampler import Sampler
from peagle.engine.step_output import PendingStep, VerifyOutput
from peagle.kernels.sampling.verify import AcceptedTokens
from peagle.kernels.step.step import build_verify_inputs, commit_state
from peagle.kernels.triton_utils import device_context
from peagle.models.decoder import Decoder
from peagle.models.drafter import Drafter
from peagle.models.fused_cpu import FusedCpuDecoder


class ModelRunner:
    def __init__(
        self,
        target: Decoder,
        drafter: Drafter | None,
        num_blocks: int,
        max_num_seqs: int,
        max_model_len: int,
        max_speculative_tokens: int,
        synthetic_rates: Sequence[float] | None = None,
    ) -> None:
        """`synthetic_rates` are conditional acceptance rates, for benchmarks."""
        self.target, self.drafter = target, drafter
        self.max_model_len, self.max_speculative_tokens = max_model_len, max_speculative_tokens
        weight = target.embed_tokens.weight
        self.device = weight.device
        on_cpu = self.device.type == "cpu"
        self.run_target = FusedCpuDecoder(target) if on_cpu and FusedCpuDecoder.supports(target) else target
        # Decode steps avoid the launch that concatenates aux hidden states; the drafter takes them one by one.
        self.run_target_decode: Callable[..., tuple[Tensor, Tensor | Sequence[Tensor] | None]] = self.run_target
        if self.run_target is target and not target.cfg.uses_transformers:
            self.run_target_decode = target.compute_hidden_states
        self.kv_cache = KVCache.allocate_for_target(target.cfg, num_blocks, weight)
        self.aux_layer_ids: tuple[int, ...] = drafter.cfg.aux_layer_ids if drafter is not None else ()
        self.proposer: DraftProposer | None = None
        if drafter is not None:
            self.proposer = DraftProposer(drafter, num_blocks, max_model_len, max_speculative_tokens)
        self.device_state = DeviceState(max_num_seqs, max_speculative_tokens, max_model_len, self.device)
        self.state = self.device_state.slots
        max_positions = max(m.cfg.max_positions for m in (target, drafter) if m is not None)
        for rope in [*target.ropes, *([drafter.rope] if drafter is not None else [])]:
            rope.build_cos_sin_cache(max_positions, weight.dtype)
        self.sampler = Sampler(self.state, synthetic_rates)
        self.prefill = Prefill(
            target, self.run_target, self.kv_cache, self.state, self.sampler, self.proposer, max_model_len
        )
        self.decode_graphs: DecodeGraphs | None = None

    def refresh_drafter(self) -> None:
        """Call it after the drafter's weights changed in place."""
        if self.proposer is not None:
            self.proposer.refresh_mask_hidden()

    @torch.inference_mode()
    def launch(self, scheduled: SchedulerOutput, changed_requests: list[Request]) -> PendingStep:
        """Launches a step. `changed_requests` got a slot or blocks since the last launch; the list is cleared."""
        launched_at = time.perf_counter()
        logprobs: Logprobs = {}
        decode_BX: Tensor | None = None
        new_requests: list[Request] = []
        first_tokens_F: Tensor | None = None
        done: torch.cuda.Event | None = None
        with device_context(self.device):
            self.device_state.update_slots(changed_requests)
            if scheduled.decode_requests:
                decode_BX = self._launch_decode(scheduled, logprobs)
            if scheduled.prefill_chunks:
                new_requests, first_tokens_F = self.prefill.launch(scheduled.prefill_chunks, logprobs)
            if self.device.type == "cuda":
                if decode_BX is not None:
                    decode_BX = self.device_state.copy_to_host(decode_BX)
                if first_tokens_F is not None:
                    first_tokens_F = self.device_state.copy_to_host(first_tokens_F)
                done = torch.cuda.Event()
                done.record()
        return PendingStep(scheduled, decode_BX, new_requests, first_tokens_F, done, logprobs, launched_at)

    def _launch_decode(self, scheduled: SchedulerOutput, logprobs: Logprobs) -> Tensor:
        """Launches the decode step as a captured graph if there is one that fits. Returns `result_BX`."""
        requests, k = scheduled.decode_requests, scheduled.num_draft_tokens
        slots = [r.slot for r in requests]
        if scheduled.limited_requests:
            self.device_state.limit_draft_tokens(scheduled.limited_requests)
        needs_logits_processing = scheduled.needs_logits_processing
        if self.decode_graphs is not None and not needs_logits_processing:
            graph = self.decode_graphs.find(len(slots), k, max(r.num_tokens + r.max_in_flight_tokens for r in requests))
            if graph is not None:
                graph.load_slots(slots)
                graph.replay()
                return graph.result_BX[: len(requests)]
        slots_B = self.device_state.to_device(slots)
        if not needs_logits_processing:
            return self.decode_step(slots_B, k)
        matched = [r for r in requests if r.matcher is not None]
        draft_token_ids = self.device_state.fetch_draft_tokens(matched, k)
        verified = self.verify(slots_B, k)
        # The host computes grammar masks while the target runs.
        allowed = compute_allowed_tokens(matched, draft_token_ids, self.target.cfg.vocab_size, self.device)
        return self.draft(verified, self.sampler.sample_and_accept_processed(verified, requests, allowed, logprobs))

    # The decode step

    def decode_step(self, slots_B: Tensor, k: int, max_seq_len: int | None = None) -> Tensor:
        """Verifies k draft tokens per request and drafts k new ones. This is the work that decode graphs capture.

        Returns [B, Q + 2]: output tokens, the number of accepted tokens and the number of draft tokens.
        `max_seq_len`: most positions of a request after the step, which selects attention kernels for short sequences.
        """
        verified = self.verify(slots_B, k, max_seq_len)
        accepted = self.sampler.sample_and_accept(verified)
        return self.draft(verified, accepted)

    def verify(self, slots_B: Tensor, k: int, max_seq_len: int | None = None) -> VerifyOutput:
        """Runs the target over the newest token and k draft tokens of each request."""
        rows = build_verify_inputs(self.state, slots_B, k, self.max_model_len)
        attend = decode_attention(
            self.kv_cache, rows.block_tables_BM, rows.num_computed_tokens_B, rows.query_lens_B, k + 1, max_seq_len
        )
        hidden_TD, aux_hidden_states = self.run_target_decode(
            rows.token_ids_BQ.flatten(), rows.positions_T, attend, self.aux_layer_ids
        )
        combined_TD: Tensor | None = None
        if self.drafter is not None and aux_hidden_states is not None:
            combined_TD = self.drafter.combine_hidden_states(aux_hidden_states)
        return VerifyOutput(slots_B, rows, self.target.compute_logits(hidden_TD), combined_TD, max_seq_len)

    def draft(self, verified: VerifyOutput, accepted: AcceptedTokens) -> Tensor:
        """Drafts tokens for the next step and commits the state of the slots. Returns `result_BX`."""
        num_accepted_B, output_BQ, result_BX = accepted
        draft_token_ids_BK = output_BQ[:, :0]
        if self.proposer is not None:
            draft_token_ids_BK = self.proposer.propose_after_verify(verified, accepted)
        commit_state(self.state, verified.slots_B, output_BQ, num_accepted_B, draft_token_ids_BK, self.max_model_len)
        return result_BX
