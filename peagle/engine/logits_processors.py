"""What a request asks of its logits beyond temperature and cut-offs: penalties, biases, a least length, a grammar.

Knows nothing about batches: one request's rows at a time, the tokens before each row given. Order and meaning
are those of `SamplingParams`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from peagle.config import SamplingParams


def apply_logits_processors(
    logits_QV: Tensor,
    params: SamplingParams,
    prompt_ids: list[int],
    output_ids: list[int],
    drafts_K: Tensor,
    barred: frozenset[int],
    allowed_QV: Tensor | None = None,
) -> Tensor:
    """Row j comes after the prompt, the output and the first j drafts; there are at most K+1 rows. fp32.

    `barred` are the ids that would end the text before it has `min_tokens`; `allowed` is what a grammar says."""
    logits = logits_QV.float().clone()
    rows, device = len(logits), logits.device
    early = min(max(params.min_tokens - len(output_ids), 0), rows)
    if early and barred:
        bar = torch.tensor(sorted(barred), device=device)
        if allowed_QV is None:
            logits[:early, bar] = -torch.inf
        else:  # which wins where all that it allows is barred
            others = allowed_QV[:early].index_fill(1, bar, False).any(1, keepdim=True)
            logits[:early, bar] = logits[:early, bar].masked_fill(others, -torch.inf)
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=device)
        logits[:, ids] += torch.tensor(list(params.logit_bias.values()), device=device)
    if params.has_penalties:
        logits = _penalised(logits, params, prompt_ids, output_ids, drafts_K)
    return logits if allowed_QV is None else logits.masked_fill(~allowed_QV, -torch.inf)


def _penalised(
    logits: Tensor, params: SamplingParams, prompt_ids: list[int], output_ids: list[int], drafts_K: Tensor
) -> Tensor:
    (rows, vocab), device = logits.shape, logits.device
    counts = torch.zeros(rows, vocab, device=device)
    said = torch.tensor(output_ids, dtype=torch.long, device=device)
    counts[0].index_add_(0, said, torch.ones(len(output_ids), device=device))
    counts[1:] = counts[0]
    for j in range(1, rows):
        counts[j:, drafts_K[j - 1]] += 1
    if params.repetition_penalty != 1.0:
        seen = counts > 0
        seen[:, torch.tensor(prompt_ids, device=device)] = True
        scaled = torch.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
        logits = torch.where(seen, scaled, logits)
    return logits - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)


def logprob_rows(logits_EV: Tensor, emitted: list[int], alternatives: int) -> list[dict[int, float]]:
    """For each emitted token its log-probability and those of the likeliest, from the raw logits."""
    logprobs = logits_EV[: len(emitted)].float().log_softmax(-1)
    values, ids = logprobs.topk(min(alternatives, logprobs.shape[-1]), -1)
    own = logprobs.gather(1, torch.tensor(emitted, device=logprobs.device)[:, None])[:, 0].tolist()
    rows = []
    for token, value, row_ids, row_values in zip(emitted, own, ids.tolist(), values.tolist(), strict=True):
        rows.append({token: value} | dict(zip(row_ids, row_values, strict=True)))
    return rows
