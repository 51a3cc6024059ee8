"""The parts of a step: decode requests (`DecodePart`) and prompt chunks (`PrefillPart` in prefill.py).

A part builds its rows of the target's and the drafter's pass, samples from its logits and commits its draft tokens.
`ModelRunner.run_step` runs one part alone or two together; the models do not know which rows belong to which.

Shapes: B requests, Q = K + 1 rows per request, T rows of the target, R rows of the drafter, K draft tokens, D hidden
width, V vocabulary.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from peagle.engine.cuda_graphs import StepResult
from peagle.engine.kv_cache import KVCache, PagedAttention, decode_attention
from peagle.engine.proposer import DraftBatch, DraftProposer
from peagle.engine.sampler import Sampler
from peagle.kernels.step import SlotState, build_draft_inputs, build_verify_inputs, commit_state


@dataclass(frozen=True)
class StepState:
    """What the parts of a step read and write on the device."""

    kv_cache: KVCache
    slots: SlotState
    sampler: Sampler
    proposer: DraftProposer | None
    max_model_len: int


class StepPart(Protocol):
    token_ids_T: Tensor
    positions_T: Tensor
    attend: PagedAttention
    logit_rows: Tensor | None  # rows of T that are sampled; None: all
    num_requests: int  # that draft tokens

    def sample(self, logits: Tensor) -> None: ...

    def build_draft_batch(self, hidden_TD: Tensor) -> DraftBatch:
        """The drafter's rows; `hidden` are the combined auxiliary hidden states of the target's rows."""
        ...

    def commit(self, draft_token_ids_BK: Tensor) -> None:
        """Writes what the next step reads to the request slots."""
        ...


class DecodePart:
    """Decode requests: verifies k draft tokens of each and drafts k new ones."""

    logit_rows: Tensor | None = None

    def __init__(self, state: StepState, slots_B: Tensor, k: int, max_seq_len: int | None = None) -> None:
        """`max_seq_len`: most positions of a request after the step, which selects attention kernels for short
        sequences."""
        self.state, self.slots_B, self.k, self.max_seq_len = state, slots_B, k, max_seq_len
        self.num_requests = len(slots_B)
        self.inputs = build_verify_inputs(state.slots, slots_B, k, state.max_model_len)
        self.token_ids_T, self.positions_T = self.inputs.token_ids_BQ.flatten(), self.inputs.positions_T
        self.attend = self._attention(state.kv_cache, self.inputs.query_lens_B, k + 1)

    def _attention(self, cache: KVCache, query_lens_B: Tensor, num_rows: int) -> PagedAttention:
        i = self.inputs
        return decode_attention(
            cache, i.block_tables_BM, i.num_computed_tokens_B, query_lens_B, num_rows, self.max_seq_len
        )

    def sample(self, logits_TV: Tensor) -> None:
        """Samples the target's token of each row and accepts draft tokens while they equal it."""
        sampler = self.state.sampler
        self.accepted, self.logprobs_T2N = sampler.sample_and_accept(self.inputs, self.slots_B, logits_TV)

    def build_draft_batch(self, hidden_TD: Tensor) -> DraftBatch:
        proposer, i = self.state.proposer, self.inputs
        assert proposer is not None
        num_accepted_B, output_BQ, _ = self.accepted
        if self.num_requests == 1 and hidden_TD.is_cpu:  # skip rejected rows: here rows cost and a sync does not
            num_kept = int(num_accepted_B) + 1
            output_BQ, hidden_TD = output_BQ[:, :num_kept], hidden_TD[:num_kept]
        rows = build_draft_inputs(
            output_BQ,
            num_accepted_B,
            i.num_computed_tokens_B,
            hidden_TD,
            proposer.mask_hidden_D,
            proposer.mask_token_id,
            self.k,
            self.state.max_model_len,
        )
        attend = self._attention(proposer.kv_cache, rows.query_lens_B, len(rows.token_ids_R) // self.num_requests)
        return DraftBatch(
            rows.token_ids_R,
            rows.hidden_states_RD,
            rows.positions_R,
            attend,
            rows.sample_rows_BK.flatten(),
            self.num_requests,
            None if proposer.drafter.cfg.parallel else i.num_computed_tokens_B + num_accepted_B + 1,
            i.block_tables_BM,
        )

    def commit(self, draft_token_ids_BK: Tensor) -> None:
        num_accepted_B, output_BQ, _ = self.accepted
        commit_state(
            *(self.state.slots, self.slots_B, output_BQ, num_accepted_B, draft_token_ids_BK, self.state.max_model_len),
            processors=self.state.sampler.processors,
        )

    @property
    def result(self) -> StepResult:
        """[B, Q + 2]: output tokens, the number of accepted tokens and the number of draft tokens; and logprobs."""
        return self.accepted.result_BX, self.logprobs_T2N
