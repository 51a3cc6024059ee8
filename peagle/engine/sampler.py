"""Samples tokens from the target's logits and accepts draft tokens.

A token is the argmax of logits plus Gumbel noise that is a function of (seed, position, token), so a draft token is
accepted if and only if it equals the token that the target samples at its position: the output is the same for any
number of draft tokens.

Shapes: B requests, Q = K + 1 rows per request, T = B * Q rows, F prompts that end, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from peagle.engine.logits_processors import add_logprobs, compute_allowed_tokens, process_batch_logits
from peagle.engine.prefill_inputs import PrefillInputs
from peagle.engine.request import Logprobs, Request
from peagle.engine.step_output import VerifyOutput
from peagle.kernels.sampling.sample import sample_tokens
from peagle.kernels.sampling.verify import AcceptedTokens, accept_draft_tokens
from peagle.kernels.step.types import SlotState


class Sampler:
    def __init__(self, state: SlotState, synthetic_rates: Sequence[float] | None) -> None:
        """`synthetic_rates`: accept draft tokens at random with these conditional rates, for benchmarks."""
        self.state = state
        self.synthetic_rates_K: Tensor | None = None
        if synthetic_rates is not None:
            device = state.token_ids_SN.device
            self.synthetic_rates_K = torch.tensor(synthetic_rates, dtype=torch.float32, device=device)

    def sample_and_accept(self, verified: VerifyOutput, logits_TV: Tensor | None = None) -> AcceptedTokens:
        """Samples the target's token of each row and accepts draft tokens while they equal it.
        `logits_TV` replaces the logits of `verified`."""
        i, rates = verified.inputs, self.synthetic_rates_K
        logits_TV = verified.logits_TV if logits_TV is None else logits_TV
        sampled_T = sample_tokens(logits_TV, i.float_params_3T, i.int_params_2T, i.sample_positions_T)
        sampled_BQ, seeds, positions = sampled_T.view(i.token_ids_BQ.shape), i.int_params_2T[1], i.sample_positions_T
        if rates is not None:
            num_rows = sampled_BQ.shape[1]
            rates, seeds, positions = rates[: num_rows - 1], seeds[::num_rows], positions[::num_rows]
        return accept_draft_tokens(i.token_ids_BQ, sampled_BQ, i.num_draft_tokens_B, rates, seeds, positions)

    def sample_and_accept_processed(
        self, verified: VerifyOutput, requests: list[Request], allowed: dict[int, Tensor], logprobs: Logprobs
    ) -> AcceptedTokens:
        """The same for a batch in which some requests have logits processors or ask for logprobs."""
        token_ids_BQ = verified.inputs.token_ids_BQ
        raw_BQV = verified.logits_TV.view(*token_ids_BQ.shape, -1)
        processed_BQV = process_batch_logits(raw_BQV, requests, token_ids_BQ[:, 1:], allowed)
        accepted = self.sample_and_accept(verified, processed_BQV.flatten(0, 1))
        if any(r.params.logprobs is not None for r in requests):
            counts, outputs = accepted.num_accepted_B.tolist(), accepted.output_token_ids_BQ.tolist()
            output_token_ids = [row[: count + 1] for row, count in zip(outputs, counts, strict=True)]
            add_logprobs(logprobs, raw_BQV, requests, output_token_ids)
        return accepted

    def sample_first_tokens(self, logits_FV: Tensor, inputs: PrefillInputs[Tensor]) -> Tensor:
        """Samples the token after each prompt that ends."""
        state, slots_F = self.state, inputs.end_slots_F
        params = state.float_params_3S[:, slots_F], state.int_params_2S[:, slots_F]
        return sample_tokens(logits_FV, *params, inputs.num_tokens_F)

    def sample_first_tokens_processed(
        self, requests: list[Request], logprobs: Logprobs, logits_FV: Tensor, inputs: PrefillInputs[Tensor]
    ) -> Tensor:
        """The same where some requests have logits processors or ask for logprobs. Rows past `requests` are resumed
        requests, whose sampled token is not used."""
        raw_F1V = logits_FV[:, None]
        matched = [r for r in requests if r.matcher is not None]
        allowed = compute_allowed_tokens(matched, [[] for _ in matched], logits_FV.shape[-1], logits_FV.device)
        no_drafts_F0 = inputs.num_tokens_F[:, None][:, :0]
        processed_F1V = process_batch_logits(raw_F1V, requests, no_drafts_F0, allowed)
        first_tokens_F = self.sample_first_tokens(processed_F1V[:, 0], inputs)
        if any(r.params.logprobs is not None for r in requests):
            add_logprobs(logprobs, raw_F1V, requests, [[token] for token in first_tokens_F.tolist()])
        return first_tokens_F
