"""Executes a scheduled step on the device: the decode step of running requests and prompt chunks.

`ModelRunner.run_step`, for B decode requests with K draft tokens each:

    verify   the target processes the newest token and the draft tokens of each request in one pass
    accept   the sampler samples the target's token of each row and accepts draft tokens while they equal it
    draft    the drafter processes the accepted tokens and K - 1 mask rows: K new draft tokens in one pass

Prompt chunks join the same pass where that is faster: few prompt rows cost little beside the decode requests, and a
pass of their own reads all weights again. The step reads and writes `SlotState`, so it can be launched before the
tokens of the last step are on the host.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from peagle.config.sampling import MAX_LOGPROBS
from peagle.engine.cuda_graphs import DecodeGraphs, StepResult
from peagle.engine.kv_cache import BLOCK_SIZE, KVCache, join_attention
from peagle.engine.prefill import Prefill
from peagle.engine.proposer import DraftProposer, join
from peagle.engine.request import Logprobs, PrefillChunk, Request, SchedulerOutput
from peagle.engine.sampler import Sampler, read_logprobs
from peagle.engine.step_parts import DecodePart, StepPart, StepState
from peagle.kernels.host_transfer import PinnedRing, copy_to_device
from peagle.kernels.sampling.processors import LogitsProcessors
from peagle.kernels.step import SlotState, SlotUpdates
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
        self.step_state = StepState(self.kv_cache, self.state, self.sampler, self.proposer, max_model_len)
        self.prefill = Prefill(self.run_step, self.step_state)
        self.decode_graphs: DecodeGraphs | None = None

    @torch.inference_mode()
    def launch(self, scheduled: SchedulerOutput, changed_requests: list[Request]) -> PendingStep:
        """Launches a step. `changed_requests` got a slot or blocks since the last launch; the list is cleared."""
        step = PendingStep(scheduled, time.perf_counter())
        decoding, chunks = scheduled.decode_requests, scheduled.prefill_chunks
        with device_context(self.device):
            self._update_slots(changed_requests)
            step.new_requests, _ = self.prefill.find_ended(chunks)
            if matched := [r for r in step.new_requests if r.matcher is not None]:
                self.sampler.send_grammar_masks(matched, [[] for _ in matched])
            memory = self._reserve_host_memory(step)
            if decoding:
                self._prepare_decode(step)
            if decoding and chunks and self._is_merged(scheduled):
                slots, k = [r.slot for r in decoding], scheduled.num_draft_tokens
                decode_result, first_tokens = self.prefill.launch_mixed(slots, k, chunks)
                self._copy_first_tokens(step, first_tokens, memory)
                self._copy_decode_result(step, decode_result, memory)
            else:
                if chunks:  # before the decode step, which may wait for the host
                    self._copy_first_tokens(step, self.prefill.launch(chunks), memory)
                if decoding:
                    self._copy_decode_result(step, self._launch_decode(step), memory)
            if any(r.matcher is not None for r in (*decoding, *(chunk.request for chunk in chunks))):
                self._host_token_ids_SN = self._copy_to_host(self.state.token_ids_SN, memory.get("token_ids"))
            if self.device.type == "cuda":
                step.done = torch.cuda.Event()
                step.done.record()
        return step

    def choose_mixed_k(self, num_requests: int, k: int, chunks: Sequence[PrefillChunk]) -> int:
        """The number of draft tokens of a step that also computes these chunks: at most k, so that a captured pass can
        compute both."""
        graph = self.prefill.find_mixed_graph(num_requests, k, chunks)
        return graph.k if graph is not None else k

    def _is_merged(self, scheduled: SchedulerOutput) -> bool:
        """Whether one pass computes decode requests and prompt chunks."""
        if self.decode_graphs is None:
            return True
        k = scheduled.num_draft_tokens
        graph = self.prefill.find_mixed_graph(len(scheduled.decode_requests), k, scheduled.prefill_chunks)
        return graph is not None and graph.k == k

    def _reserve_host_memory(self, step: PendingStep) -> dict[str, Tensor]:
        """Memory for the results of a step that waits for masks: after its launch, an allocation could wait for it."""
        requests, num_rows = step.scheduled.decode_requests, step.scheduled.num_draft_tokens + 1
        if not self.overlaps_grammars or all(r.matcher is None for r in requests):
            return {}
        num_new, empty = len(step.new_requests), partial(torch.empty, pin_memory=True)
        return {
            "result": empty(len(requests), num_rows + 2, dtype=torch.int64),
            "logprobs": empty(len(requests) * num_rows, 2, 1 + MAX_LOGPROBS),
            "token_ids": empty(self.state.token_ids_SN.shape, dtype=torch.int64),
            "first_tokens": empty(num_new, dtype=torch.int64),
            "first_logprobs": empty(num_new, 2, 1 + MAX_LOGPROBS),
        }

    def _copy_first_tokens(self, step: PendingStep, result: StepResult, memory: dict[str, Tensor]) -> None:
        first_tokens_F, logprobs_F2N = (x[: len(step.new_requests)] for x in result)
        if step.new_requests:
            step.first_tokens_F = self._copy_to_host(first_tokens_F, memory.get("first_tokens"))
        if any(r.params.logprobs is not None for r in step.new_requests):
            step.first_logprobs_F2N = self._copy_to_host(logprobs_F2N, memory.get("first_logprobs"))

    def _copy_decode_result(self, step: PendingStep, result: StepResult, memory: dict[str, Tensor]) -> None:
        requests, num_rows = step.scheduled.decode_requests, step.scheduled.num_draft_tokens + 1
        result_BX, logprobs_T2N = result  # of a graph, possibly for more requests
        step.result_BX = self._copy_to_host(result_BX[: len(requests)], memory.get("result"))
        if any(r.params.logprobs is not None for r in requests):
            step.logprobs_T2N = self._copy_to_host(logprobs_T2N[: len(requests) * num_rows], memory.get("logprobs"))

    def _copy_to_host(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        """A copy that is complete once the step is done; into `memory`, if it is given."""
        return self._pinned.copy_to_host(x, memory) if self.device.type == "cuda" else x.clone()

    def _prepare_decode(self, step: PendingStep) -> None:
        """Sends what the decode step needs and the slots do not hold: own limits of draft tokens, masks of grammars."""
        if step.scheduled.limited_requests:
            self._limit_draft_tokens(step.scheduled.limited_requests)
        step.masked_requests = [r for r in step.scheduled.decode_requests if r.matcher is not None]
        step.token_ids_SN = self._host_token_ids_SN
        if step.masked_requests and self.overlaps_grammars:
            self._num_mask_steps += 1
            step.mask_step = self._num_mask_steps
            self.processors.masks.await_step(step.mask_step)
        elif step.masked_requests:
            self._send_grammar_masks(step)

    def _launch_decode(self, step: PendingStep) -> StepResult:
        """Launches the decode step as a captured graph if there is one that fits."""
        requests, k = step.scheduled.decode_requests, step.scheduled.num_draft_tokens
        slots = [r.slot for r in requests]
        if self.decode_graphs is not None:
            graph = self.decode_graphs.find(len(slots), k, max(r.num_tokens + r.max_in_flight_tokens for r in requests))
            if graph is not None:
                graph.load_slots(slots)
                return graph.replay()
        return self.decode_step(copy_to_device(torch.tensor(slots), self.device), k)

    @property
    def overlaps_grammars(self) -> bool:
        """Whether the masks of grammars are computed while the target runs."""
        return self.sampler.awaits_masks

    @torch.inference_mode()
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

    # The step

    def run_step(self, parts: Sequence[StepPart], k: int, max_seq_len: int | None = None) -> None:
        """Computes the parts of a step in one pass of the target and one of the drafter, which drafts k tokens per
        request. This is the work that graphs capture."""
        num_rows = [len(part.token_ids_T) for part in parts]
        attend = join_attention([part.attend for part in parts], num_rows)
        token_ids_T, positions_T = join([p.token_ids_T for p in parts]), join([p.positions_T for p in parts])
        hidden_TD, aux_hidden_states = self.run_target(token_ids_T, positions_T, attend, self.aux_layer_ids)
        draft_hidden_TD: Tensor | None = None
        if self.drafter is not None and aux_hidden_states is not None:
            draft_hidden_TD = self.drafter.combine_hidden_states(aux_hidden_states)

        own_rows = zip(parts, hidden_TD.split(num_rows), strict=True)
        sampled = [own_TD if part.logit_rows is None else own_TD[part.logit_rows] for part, own_TD in own_rows]
        if any(len(rows) for rows in sampled):
            logits = self.target.compute_logits(join(sampled)).split([len(rows) for rows in sampled])
            for part, own_logits in zip(parts, logits, strict=True):
                if len(own_logits):
                    part.sample(own_logits)

        draft_token_ids = [part.token_ids_T.new_empty(part.num_requests, 0) for part in parts]
        if self.proposer is not None and draft_hidden_TD is not None:
            own_hidden = draft_hidden_TD.split(num_rows)
            batches = [part.build_draft_batch(own_TD) for part, own_TD in zip(parts, own_hidden, strict=True)]
            draft_token_ids = self.proposer.propose(batches, k, max_seq_len)
        for part, own_draft_token_ids in zip(parts, draft_token_ids, strict=True):
            part.commit(own_draft_token_ids)

    def decode_step(self, slots_B: Tensor, k: int, max_seq_len: int | None = None) -> StepResult:
        """Runs a step without prompt chunks; see `DecodePart`."""
        part = DecodePart(self.step_state, slots_B, k, max_seq_len)
        self.run_step([part], k, max_seq_len)
        return part.result
