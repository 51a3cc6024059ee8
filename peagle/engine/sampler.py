"""Samples tokens from the target's logits, accepts draft tokens and computes logprobs.

A token is the argmax of logits plus Gumbel noise that is a function of (seed, position, token), so a draft token is
accepted if and only if it equals the token that the target samples at its position: the output is the same for any
number of draft tokens.

Shapes: B requests, Q = K + 1 rows per request, T = B * Q rows, F prompts that end, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from peagle.engine.grammar import compute_bitmasks, forbid_tokens
from peagle.engine.request import Logprobs, Request
from peagle.kernels.sampling.processors import LogitsProcessors, ProcessedRows
from peagle.kernels.sampling.sample import sample_tokens
from peagle.kernels.sampling.verify import AcceptedTokens, accept_draft_tokens
from peagle.kernels.step import SlotState, VerifyInputs


class Sampler:
    def __init__(self, state: SlotState, processors: LogitsProcessors, synthetic_rates: Sequence[float] | None) -> None:
        """`synthetic_rates`: accept draft tokens at random with these conditional rates, for benchmarks."""
        self.state, self.processors = state, processors
        self.awaits_masks = False  # whether decode steps wait for the masks of grammars
        self.synthetic_rates_K: Tensor | None = None
        if synthetic_rates is not None:
            device = state.token_ids_SN.device
            self.synthetic_rates_K = torch.tensor(synthetic_rates, dtype=torch.float32, device=device)

    def sample_and_accept(self, i: VerifyInputs, slots_B: Tensor, logits_TV: Tensor) -> tuple[AcceptedTokens, Tensor]:
        """Samples the target's token of each row and accepts draft tokens while they equal it. Returns the tokens and
        their logprobs."""
        rates, processed = self.synthetic_rates_K, ProcessedRows(self.processors, slots_B, i.token_ids_BQ)
        self.processors.masks.prepare(self.processors.flags_S, slots_B, i.token_ids_BQ, self.awaits_masks)
        sampled_T = sample_tokens(logits_TV, i.float_params_3T, i.int_params_2T, i.sample_positions_T, processed)
        sampled_BQ, seeds, positions = sampled_T.view(i.token_ids_BQ.shape), i.int_params_2T[1], i.sample_positions_T
        if rates is not None:
            num_rows = sampled_BQ.shape[1]
            rates, seeds, positions = rates[: num_rows - 1], seeds[::num_rows], positions[::num_rows]
        accepted = accept_draft_tokens(i.token_ids_BQ, sampled_BQ, i.num_draft_tokens_B, rates, seeds, positions)
        output_BQ, num_accepted_B = accepted.output_token_ids_BQ, accepted.num_accepted_B
        return accepted, self.processors.compute_logprobs(logits_TV, slots_B, output_BQ, num_accepted_B)

    def sample_first_tokens(self, logits_FV: Tensor, slots_F: Tensor, positions_F: Tensor) -> tuple[Tensor, Tensor]:
        """Samples the token after each prompt that ends. Returns the tokens and their logprobs."""
        params = self.state.float_params_3S[:, slots_F], self.state.int_params_2S[:, slots_F]
        no_draft_tokens_F1 = positions_F[:, None]
        processed = ProcessedRows(self.processors, slots_F, no_draft_tokens_F1)
        self.processors.masks.prepare(self.processors.flags_S, slots_F, no_draft_tokens_F1, awaits=False)
        tokens_F = sample_tokens(logits_FV, *params, positions_F, processed)
        none_accepted_F = torch.zeros_like(tokens_F)
        return tokens_F, self.processors.compute_logprobs(logits_FV, slots_F, tokens_F[:, None], none_accepted_F)

    def send_grammar_masks(
        self, requests: Sequence[Request], draft_token_ids: Sequence[list[int]], awaited: bool = False
    ) -> None:
        """Sends the tokens that grammars allow after the output of each request and after each of its draft tokens.
        `awaited`: to a step that is launched already and waits for them."""
        states = [(r.matcher, own) for r, own in zip(requests, draft_token_ids, strict=True) if r.matcher is not None]
        masks_BQW = compute_bitmasks(states)
        for request, masks_QW in zip(requests, masks_BQW, strict=True):
            num_early_rows = request.params.min_tokens - len(request.output_token_ids)
            if num_early_rows > 0:
                stop_ids = {*request.params.stop_token_ids, *request.eos_ids}
                forbid_tokens(masks_QW[:num_early_rows], stop_ids, self.processors.vocab_size)
        masks = self.processors.masks
        (masks.set_awaited_masks if awaited else masks.set_grammar_masks)([r.slot for r in requests], masks_BQW)


def read_logprobs(
    requests: Sequence[Request], logprobs_T2N: Tensor, rows_per_request: int, num_tokens: Sequence[int]
) -> Logprobs:
    """Logprobs of the requests that ask for them, from the result of `compute_logprobs` on the host."""
    logprobs: Logprobs = {}
    for b, (request, count) in enumerate(zip(requests, num_tokens, strict=True)):
        if request.params.logprobs is not None:
            rows = logprobs_T2N[b * rows_per_request :][:count, :, : 1 + request.params.logprobs]
            pairs = zip(rows[:, 0].int().tolist(), rows[:, 1].tolist(), strict=True)
            logprobs[request.id] = [dict(zip(ids, values, strict=True)) for ids, values in pairs]
    return logprobs
