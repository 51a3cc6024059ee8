"""Logits processors: min_tokens, logit_bias, penalties and grammars; and logprobs from the raw logits.

`SamplingParams` defines their order and meaning. Batches without any of them skip this module.

Shapes: B requests, Q rows per request, K draft tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from peagle.engine.grammar_matcher import compute_bitmasks, unpack_bitmasks
from peagle.engine.request import Logprobs, Request
from peagle.kernels.host_transfer import copy_to_device


def apply_logits_processors(
    logits_QV: Tensor, request: Request, draft_token_ids_K: Tensor, allowed_QV: Tensor | None = None
) -> Tensor:
    """Processes the rows of one request in fp32. Row j follows the prompt, the output and the first j draft tokens.
    `allowed_QV` are the tokens that the grammar allows."""
    params, logits = request.params, logits_QV.float().clone()
    device = logits.device
    # Stop tokens are banned until the output has `min_tokens`.
    num_banned_rows = min(max(params.min_tokens - len(request.output_token_ids), 0), len(logits))
    if num_banned_rows and request.all_stop_token_ids:
        banned = torch.tensor(sorted(request.all_stop_token_ids), device=device)
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


def compute_logprobs(logits_QV: Tensor, output_token_ids: list[int], num_logprobs: int) -> list[dict[int, float]]:
    """For each output token its log-probability and those of the likeliest tokens, from the raw logits."""
    logprobs = logits_QV[: len(output_token_ids)].float().log_softmax(-1)
    values, ids = logprobs.topk(min(num_logprobs, logprobs.shape[-1]), -1)
    own = logprobs.gather(1, torch.tensor(output_token_ids, device=logprobs.device)[:, None])[:, 0].tolist()
    rows = []
    for token, value, row_ids, row_values in zip(output_token_ids, own, ids.tolist(), values.tolist(), strict=True):
        rows.append({token: value} | dict(zip(row_ids, row_values, strict=True)))
    return rows


def add_logprobs(
    logprobs: Logprobs, raw_BQV: Tensor, requests: Sequence[Request], output_token_ids: Sequence[list[int]]
) -> None:
    """Adds the logprobs of the requests that ask for them."""
    for b, r in enumerate(requests):
        if r.params.logprobs is not None:
            logprobs[r.id] = compute_logprobs(raw_BQV[b], output_token_ids[b], r.params.logprobs)
