"""Executes a scheduled step on the device: the decode step of running requests, then prefill.

One decode step, for B requests with K draft tokens each (Q = K + 1 rows per request, T = B * Q):

    verify   the target processes the newest token and the draft tokens of each request in one pass
    accept   the sampler samples the target's token of each row and accepts draft tokens while they equal it
    draft    the drafter processes the accepted tokens and K - 1 mask rows: K new draft tokens in one pass

The step reads and writes `SlotState`, so it can be launched before the tokens of the last step are on the host.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from peagle.config.sampling import MAX_LOGPROBS
from peagle.engine.cuda_graphs import DecodeGraphs, StepResult
from peagle.engine.kv_cache import BLOCK_SIZE, KVCache, decode_attention
from peagle.engine.prefill import Prefill
from peagle.engine.proposer import DraftProposer
from peagle.engine.request import Logprobs, Request, SchedulerOutput
from peagle.engine.sampler import Sampler, read_logprobs
from peagle.kernels.host_transfer import PinnedRing, copy_to_device
from peagle.kernels.sampling.processors import LogitsProcessors
from peagle.kernels.sampling.verify import AcceptedTokens
from peagle.kernels.step import SlotState, SlotUpdates, VerifyInputs, build_verify_inputs, commit_state
from peagle.kernels.triton_utils import device_context
from peagle.models.decoder import Decoder
from peagle.models.drafter import Drafter
from peagle.models.fused_cpu import FusedCpuDecoder

MAX_TRANSFERS_IN_FLIGHT = 64  # tensors


@dataclass
class PendingStep:
    """A launched step, whose tokens are on the host once `done`."""

    scheduled: SchedulerOutput
    launched_at: float  # time.perf_counter()
    result_BX: Tensor | None = None  # [B, Q + 2]: output tokens (then -1), num accepted, num draft tokens
    logprobs_T2N: Tensor | None = None  # of the output tokens, if a request asks for logprobs
    new_requests: list[Request] = field(default_factory=list)  # requests whose first token comes from this prefill
    first_tokens_F: Tensor | None = None
    first_logprobs_F2N: Tensor | None = None
    masked_requests: list[Request] = field(default_factory=list)  # with a grammar, whose masks the step waits for
    mask_step: int = 0  # number of the step among those that wait
    token_ids_SN: Tensor | None = None  # on the host once all earlier steps are done: the draft tokens of this step
    done: torch.cuda.Event | None = None

    def wait(self) -> tuple[list[list[int]], list[int], Logprobs]:
        """Waits for the step. Returns the rows of `result_BX`, the first token of each new request, and logprobs."""
        if self.done is not None:
            self.done.synchronize()
        decode_rows = self.result_BX.tolist() if self.result_BX is not None else []
        first_tokens = self.first_tokens_F.tolist() if self.first_tokens_F is not None else []
        logprobs: Logprobs = {}
        if self.logprobs_T2N is not None:
            num_tokens, num_rows = [row[-2] + 1 for row in decode_rows], len(decode_rows[0]) - 2
            logprobs |= read_logprobs(self.scheduled.decode_requests, self.logprobs_T2N, num_rows, num_tokens)
        if self.first_logprobs_F2N is not None:
            logprobs |= read_logprobs(self.new_requests, self.first_logprobs_F2N, 1, [1] * len(first_tokens))
        return decode_rows, first_tokens, logprobs


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
        kv_cache_dtype: torch.dtype | None = None,
    ) -> None:
        """`synthetic_rates` are conditional acceptance rates, for benchmarks. The KV cache has the target's dtype by
        default."""
        self.target, self.drafter = target, drafter
        self.max_model_len, self.max_speculative_tokens = max_model_len, max_speculative_tokens
        weight = target.embed_tokens.weight
        self.device = weight.device
        on_cpu = self.device.type == "cpu"
        self.run_target = FusedCpuDecoder(target) if on_cpu and FusedCpuDecoder.supports(target) else target
        layers = [target.cfg.layer_at(i) for i in range(target.cfg.num_layers)]
        self.kv_cache = KVCache.allocate(layers, num_blocks, weight, kv_cache_dtype)
        self.aux_layer_ids: tuple[int, ...] = drafter.cfg.aux_layer_ids if drafter is not None else ()
        self.proposer: DraftProposer | None = None
        if drafter is not None:
            self.proposer = DraftProposer(drafter, num_blocks, max_model_len, max_speculative_tokens, kv_cache_dtype)
        blocks_per_slot = -(-max_model_len // BLOCK_SIZE)
        self.state = SlotState.allocate(max_num_seqs, max_speculative_tokens, blocks_per_slot, self.device)
        self._pinned = PinnedRing(MAX_TRANSFERS_IN_FLIGHT)
        self._updates = SlotUpdates(self.state, self._pinned)
        # What each slot holds on the device: request id, its preemptions, number of blocks.
        self._sent: list[tuple[int, int, int]] = [(-1, 0, 0)] * max_num_seqs
        max_positions = max(m.cfg.max_positions for m in (target, drafter) if m is not None)
        for rope in [*target.ropes, *([drafter.rope] if drafter is not None else [])]:
            rope.build_cos_sin_cache(max_positions, weight.dtype)
        self.processors = LogitsProcessors.allocate(
            max_num_seqs, target.cfg.vocab_size, max_speculative_tokens, self.device
        )
        self.sampler = Sampler(self.state, self.processors, synthetic_rates)
        self._host_token_ids_SN = self.state.token_ids_SN  # on the host, as of the last step with a grammar
        self._num_mask_steps = 0
        self.prefill = Prefill(
            target, self.run_target, self.kv_cache, self.state, self.sampler, self.proposer, max_model_len
        )
        self.decode_graphs: DecodeGraphs | None = None

    @torch.inference_mode()
    def launch(self, scheduled: SchedulerOutput, changed_requests: list[Request]) -> PendingStep:
        """Launches a step. `changed_requests` got a slot or blocks since the last launch; the list is cleared."""
        step = PendingStep(scheduled, time.perf_counter())
        decoding, chunks = scheduled.decode_requests, scheduled.prefill_chunks
        with device_context(self.device):
            self._update_slots(changed_requests)
            if chunks:  # before the decode step, which may wait for the host
                step.new_requests, first_tokens_F, logprobs_F2N = self.prefill.launch(chunks)
                if step.new_requests:
                    step.first_tokens_F = self._copy_to_host(first_tokens_F)
                if any(r.params.logprobs is not None for r in step.new_requests):
                    step.first_logprobs_F2N = self._copy_to_host(logprobs_F2N)
            result_memory, logprobs_memory, token_ids_memory = self._reserve_host_memory(scheduled)
            if decoding:
                result_BX, logprobs_T2N = self._launch_decode(step)
                step.result_BX = self._copy_to_host(result_BX, result_memory)
                if any(r.params.logprobs is not None for r in decoding):
                    step.logprobs_T2N = self._copy_to_host(logprobs_T2N, logprobs_memory)
            if any(r.matcher is not None for r in (*decoding, *(chunk.request for chunk in chunks))):
                self._host_token_ids_SN = self._copy_to_host(self.state.token_ids_SN, token_ids_memory)
            if self.device.type == "cuda":
                step.done = torch.cuda.Event()
                step.done.record()
        return step

    def _reserve_host_memory(self, scheduled: SchedulerOutput) -> tuple[Tensor | None, ...]:
        """Memory for the results of a step that waits for masks: after its launch, an allocation could wait for it."""
        requests, num_rows = scheduled.decode_requests, scheduled.num_draft_tokens + 1
        if not self.overlaps_grammars or all(r.matcher is None for r in requests):
            return None, None, None
        logprobs_shape = len(requests) * num_rows, 2, 1 + MAX_LOGPROBS
        result = torch.empty(len(requests), num_rows + 2, dtype=torch.int64, pin_memory=True)
        logprobs = torch.empty(logprobs_shape, dtype=torch.float32, pin_memory=True)
        token_ids = torch.empty(self.state.token_ids_SN.shape, dtype=torch.int64, pin_memory=True)
        return result, logprobs, token_ids

    def _copy_to_host(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        """A copy that is complete once the step is done; into `memory`, if it is given."""
        return self._pinned.copy_to_host(x, memory) if self.device.type == "cuda" else x.clone()

    def _launch_decode(self, step: PendingStep) -> StepResult:
        """Launches the decode step as a captured graph if there is one that fits."""
        scheduled = step.scheduled
        requests, k = scheduled.decode_requests, scheduled.num_draft_tokens
        slots = [r.slot for r in requests]
        if scheduled.limited_requests:
            self._limit_draft_tokens(scheduled.limited_requests)
        step.masked_requests = [r for r in requests if r.matcher is not None]
        step.token_ids_SN = self._host_token_ids_SN
        if step.masked_requests and self.overlaps_grammars:
            self._num_mask_steps += 1
            step.mask_step = self._num_mask_steps
            self.processors.masks.await_step(step.mask_step)
        elif step.masked_requests:
            self._send_grammar_masks(step)
        if self.decode_graphs is not None:
            graph = self.decode_graphs.find(len(slots), k, max(r.num_tokens + r.max_in_flight_tokens for r in requests))
            if graph is not None:
                graph.load_slots(slots)
                result_BX, logprobs_T2N = graph.replay()
                return result_BX[: len(requests)], logprobs_T2N[: len(requests) * (k + 1)]
        return self.decode_step(copy_to_device(torch.tensor(slots), self.device), k)

    @property
    def overlaps_grammars(self) -> bool:
        """Whether the masks of grammars are computed while the target runs."""
        return self.sampler.awaits_masks

    def send_awaited_masks(self, step: PendingStep) -> None:
        """Sends the masks that a launched step waits for. The tokens of all earlier steps must be committed."""
        if step.mask_step:
            try:
                self._send_grammar_masks(step)
            finally:  # without masks, its output would be wrong, but a step that waits could not be interrupted
                self.processors.masks.announce_step(step.mask_step)
                step.mask_step = 0

    def _send_grammar_masks(self, step: PendingStep) -> None:
        requests = [r for r in step.masked_requests if r.finish_reason is None]
        if requests and step.token_ids_SN is not None:
            k, awaited = step.scheduled.num_draft_tokens, step.mask_step > 0
            draft_token_ids = [step.token_ids_SN[r.slot, 1 : k + 1].tolist() for r in requests]
            self.sampler.send_grammar_masks(requests, draft_token_ids, awaited)

    def _update_slots(self, requests: list[Request]) -> None:
        """Sends new block ids, and the sampling parameters of requests that are new in their slot."""
        for request in requests:
            if request.slot < 0:
                continue
            owner, num_preemptions, num_sent = self._sent[request.slot]
            if (owner, num_preemptions) != (request.id, request.num_preemptions):
                p, num_sent = request.params, 0
                self._updates.set_sampling_params(
                    request.slot, (p.temperature, p.top_p, p.min_p), (p.top_k, request.seed)
                )
                known_output = request.output_token_ids[:-1]  # the newest token is committed with the prefill
                self.processors.set_slot(request.slot, p, request.prompt_token_ids, known_output, request.eos_ids)
            self._updates.set_blocks(request.slot, num_sent, request.block_ids[num_sent:])
            self._sent[request.slot] = (request.id, request.num_preemptions, len(request.block_ids))
        requests.clear()
        self._updates.send()

    def _limit_draft_tokens(self, requests: Sequence[Request]) -> None:
        """Caps the draft tokens of requests with their own `max_speculative_tokens`."""
        limits = copy_to_device(
            torch.tensor([(r.slot, r.params.max_speculative_tokens) for r in requests]), self.device
        )
        num_draft_tokens_S, slots = self.state.num_draft_tokens_S, limits[:, 0]
        num_draft_tokens_S[slots] = torch.minimum(num_draft_tokens_S[slots], limits[:, 1])

    @torch.inference_mode()
    def warm_up(self, max_prefill_tokens: int) -> None:
        """Compiles what is not part of a decode graph: transfers, and prefill passes without a graph."""
        with device_context(self.device):
            self._updates.set_blocks(len(self.state.num_computed_tokens_S) - 1, 0, [0])  # of the padding slot
            self._updates.send()
            for x in (self.state.num_computed_tokens_S, self.state.float_params_3S):
                self._copy_to_host(x)
            self.processors.masks.await_step(0)
            self.prefill.warm_up(max_prefill_tokens, len(self.state.num_computed_tokens_S) - 1)

    # The decode step

    def decode_step(self, slots_B: Tensor, k: int, max_seq_len: int | None = None) -> StepResult:
        """Verifies k draft tokens per request and drafts k new ones. This is the work that decode graphs capture.

        Returns [B, Q + 2]: output tokens, the number of accepted tokens and the number of draft tokens; and logprobs.
        `max_seq_len`: most positions of a request after the step, which selects attention kernels for short sequences.
        """
        rows, logits_TV, hidden_TD = self.verify(slots_B, k, max_seq_len)
        accepted, logprobs_T2N = self.sampler.sample_and_accept(rows, slots_B, logits_TV)
        return self.draft(slots_B, rows, hidden_TD, accepted, max_seq_len), logprobs_T2N

    def verify(
        self, slots_B: Tensor, k: int, max_seq_len: int | None = None
    ) -> tuple[VerifyInputs, Tensor, Tensor | None]:
        """Runs the target over the newest token and k draft tokens of each request. Returns its inputs, the logits
        [T, V], and with a drafter the combined aux hidden states [T, D], the drafter's input."""
        rows = build_verify_inputs(self.state, slots_B, k, self.max_model_len)
        attend = decode_attention(
            self.kv_cache, rows.block_tables_BM, rows.num_computed_tokens_B, rows.query_lens_B, k + 1, max_seq_len
        )
        hidden_TD, aux_hidden_states = self.run_target(
            rows.token_ids_BQ.flatten(), rows.positions_T, attend, self.aux_layer_ids
        )
        combined_TD: Tensor | None = None
        if self.drafter is not None and aux_hidden_states is not None:
            combined_TD = self.drafter.combine_hidden_states(aux_hidden_states)
        return rows, self.target.compute_logits(hidden_TD), combined_TD

    def draft(
        self,
        slots_B: Tensor,
        rows: VerifyInputs,
        hidden_TD: Tensor | None,
        accepted: AcceptedTokens,
        max_seq_len: int | None = None,
    ) -> Tensor:
        """Drafts tokens for the next step and commits the state of the slots. Returns `result_BX`."""
        num_accepted_B, output_BQ, result_BX = accepted
        draft_token_ids_BK = output_BQ[:, :0]
        if self.proposer is not None and hidden_TD is not None:
            draft_token_ids_BK = self.proposer.propose(rows, hidden_TD, accepted, max_seq_len)
        commit_state(
            *(self.state, slots_B, output_BQ, num_accepted_B, draft_token_ids_BK, self.max_model_len),
            processors=self.processors,
        )
        return result_BX
