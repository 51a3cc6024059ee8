"""Samples tokens from the target's logits and accepts draft tokens; logits processors and logprobs.

A token is the argmax of logits plus Gumbel noise that is a function of (seed, position, token), so a draft token is
accepted if and only if it equals the token that the target samples at its position: the output is the same for any
number of draft tokens.

Logits processors are min_tokens, logit_bias, penalties and grammars; `SamplingParams` defines their order and meaning.
Batches without any of them, and without logprobs, skip their code.

Shapes: B requests, Q = K + 1 rows per request, T = B * Q rows, F prompts that end, K draft tokens, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from peagle.engine.grammar import compute_bitmasks, unpack_bitmasks
from peagle.engine.request import Logprobs, Request
from peagle.kernels.host_transfer import copy_to_device
from peagle.kernels.sampling.sample import sample_tokens
from peagle.kernels.sampling.verify import AcceptedTokens, accept_draft_tokens
from peagle.kernels.step import SlotState, VerifyInputs


class Sampler:
    def __init__(self, state: SlotState, synthetic_rates: Sequence[float] | None) -> None:
        """`synthetic_rates`: accept draft tokens at random with these conditional rates, for benchmarks."""
        self.state = state
        self.synthetic_rates_K: Tensor | None = None
        if synthetic_rates is not None:
            device = state.token_ids_SN.device
            self.synthetic_rates_K = torch.tensor(synthetic_rates, dtype=torch.float32, device=device)

    def sample_and_accept(self, i: VerifyInputs, logits_TV: Tensor) -> AcceptedTokens:
        """Samples the target's token of each row and accepts draft tokens while they equal it."""
        rates = self.synthetic_rates_K
        sampled_T = sample_tokens(logits_TV, i.float_params_3T, i.int_params_2T, i.sample_positions_T)
        sampled_BQ, seeds, positions = sampled_T.view(i.token_ids_BQ.shape), i.int_params_2T[1], i.sample_positions_T
        if rates is not None:
            num_rows = sampled_BQ.shape[1]
            rates, seeds, positions = rates[: num_rows - 1], seeds[::num_rows], positions[::num_rows]
        return accept_draft_tokens(i.token_ids_BQ, sampled_BQ, i.num_draft_tokens_B, rates, seeds, positions)

    def sample_and_accept_processed(
        self,
        inputs: VerifyInputs,
        logits_TV: Tensor,
        requests: list[Request],
        allowed: dict[int, Tensor],
        logprobs: Logprobs,
    ) -> AcceptedTokens:
        """The same for a batch in which some requests have logits processors or ask for logprobs."""
        token_ids_BQ = inputs.token_ids_BQ
        raw_BQV = logits_TV.view(*token_ids_BQ.shape, -1)
        processed_BQV = process_batch_logits(raw_BQV, requests, token_ids_BQ[:, 1:], allowed)
        accepted = self.sample_and_accept(inputs, processed_BQV.flatten(0, 1))
        if any(r.params.logprobs is not None for r in requests):
            counts, outputs = accepted.num_accepted_B.tolist(), accepted.output_token_ids_BQ.tolist()
            output_token_ids = [row[: count + 1] for row, count in zip(outputs, counts, strict=True)]
            add_logprobs(logprobs, raw_BQV, requests, output_token_ids)
        return accepted

    def sample_first_tokens(self, logits_FV: Tensor, slots_F: Tensor, positions_F: Tensor) -> Tensor:
        """Samples the token after each prompt that ends."""
        params = self.state.float_params_3S[:, slots_F], self.state.int_params_2S[:, slots_F]
        return sample_tokens(logits_FV, *params, positions_F)

    def sample_first_tokens_processed(
        self, requests: list[Request], logprobs: Logprobs, logits_FV: Tensor, slots_F: Tensor, positions_F: Tensor
    ) -> Tensor:
        """The same where some requests have logits processors or ask for logprobs. Rows past `requests` are resumed
        requests, whose sampled token is not used."""
        raw_F1V = logits_FV[:, None]
        matched = [r for r in requests if r.matcher is not None]
        allowed = compute_allowed_tokens(matched, [[] for _ in matched], logits_FV.shape[-1], logits_FV.device)
        no_drafts_F0 = positions_F[:, None][:, :0]
        processed_F1V = process_batch_logits(raw_F1V, requests, no_drafts_F0, allowed)
        first_tokens_F = self.sample_first_tokens(processed_F1V[:, 0], slots_F, positions_F)
        if any(r.params.logprobs is not None for r in requests):
            add_logprobs(logprobs, raw_F1V, requests, [[token] for token in first_tokens_F.tolist()])
        return first_tokens_F


def apply_logits_processors(
    logits_QV: Tensor, request: Request, draft_token_ids_K: Tensor, allowed_QV: Tensor | None = None
) -> Tensor:
    """Processes the rows of one request in fp32. Row j follows the prompt, the output and the first j draft tokens.
    `allowed_QV` are the tokens that the grammar allows."""
    params, logits = request.params, logits_QV.float().clone()
    device = logits.device
    # Stop tokens are banned until the output has `min_tokens`.
    num_banned_rows = min(max(params.min_tokens - len(request.output_token_ids), 0), len(logits))
    banned_ids = sorted(t for t in {*params.stop_token_ids, *request.eos_ids} if t < logits.shape[-1])
    if num_banned_rows and banned_ids:
        banned = torch.tensor(banned_ids, device=device)
        if allowed_QV is None:
            logits[:num_banned_rows, banned] = -torch.inf
        else:  # the grammar wins where it allows nothing but banned tokens
            others = allowed_QV[:num_banned_rows].index_fill(1, banned, False).any(1, keepdim=True)
            logits[:num_banned_rows, banned] = logits[:num_banned_rows, banned].masked_fill(others, -torch.inf)
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=device)
        logits[:, ids] += torch.tensor(list(params.logit_bias.values()), device=device)
    if params.has_penalties:
        logits = _apply_penalties(logits, request, draft_token_ids_K)
    return logits if allowed_QV is None else logits.masked_fill(~allowed_QV, -torch.inf)


def _apply_penalties(logits: Tensor, request: Request, draft_token_ids_K: Tensor) -> Tensor:
    (num_rows, vocab), device, params = logits.shape, logits.device, request.params
    counts = torch.zeros(num_rows, vocab, device=device)
    output = torch.tensor(request.output_token_ids, dtype=torch.long, device=device)
    counts[0].index_add_(0, output, torch.ones(len(output), device=device))
    counts[1:] = counts[0]
    for j in range(1, num_rows):
        counts[j:, draft_token_ids_K[j - 1]] += 1
    if params.repetition_penalty != 1.0:
        seen = counts > 0
        seen[:, torch.tensor(request.prompt_token_ids, device=device)] = True
        scaled = torch.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
        logits = torch.where(seen, scaled, logits)
    return logits - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)


def process_batch_logits(
    raw_BQV: Tensor, requests: Sequence[Request], draft_token_ids_BK: Tensor, allowed: dict[int, Tensor]
) -> Tensor:
    """A processed fp32 copy of the logits of a batch. `allowed`: see `compute_allowed_tokens`."""
    processed_BQV = raw_BQV.to(torch.float32, copy=True)
    for b, r in enumerate(requests):
        if r.needs_logits_processing:
            processed_BQV[b] = apply_logits_processors(raw_BQV[b], r, draft_token_ids_BK[b], allowed.get(r.id))
    return processed_BQV


def compute_allowed_tokens(
    requests: Sequence[Request], draft_token_ids: Sequence[list[int]], vocab_size: int, device: torch.device
) -> dict[int, Tensor]:
    """Tokens that grammars allow after the output and after each draft token, by request id: bool [Q, V]."""
    states = [(r.matcher, own) for r, own in zip(requests, draft_token_ids, strict=True) if r.matcher is not None]
    if not states:
        return {}
    allowed_NQV = unpack_bitmasks(copy_to_device(compute_bitmasks(states), device), vocab_size)
    return {r.id: rows for r, rows in zip(requests, allowed_NQV, strict=True)}


def add_logprobs(
    logprobs: Logprobs, raw_BQV: Tensor, requests: Sequence[Request], output_token_ids: Sequence[list[int]]
) -> None:
    """For requests that ask for it: the log-probability of each output token and of the likeliest tokens."""
    for r, raw_QV, tokens in zip(requests, raw_BQV, output_token_ids, strict=False):
        if r.params.logprobs is None:
            continue
        rows = raw_QV[: len(tokens)].float().log_softmax(-1)
        values, ids = rows.topk(min(r.params.logprobs, rows.shape[-1]), -1)
        own = rows.gather(1, torch.tensor(tokens, device=rows.device)[:, None])[:, 0].tolist()
        likeliest = [dict(zip(*row, strict=True)) for row in zip(ids.tolist(), values.tolist(), strict=True)]
        logprobs[r.id] = [{t: value} | others for t, value, others in zip(tokens, own, likeliest, strict=True)]
