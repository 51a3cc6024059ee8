"""Verification: which draft tokens are accepted, and the tokens that each request outputs.

Compares draft tokens with the tokens that the target sampled in their place (sample.py says why that is exact).

Shapes: B requests, K draft tokens, Q = K + 1 verified rows per request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from peagle.errors import UserError
from peagle.kernels.sampling.noise_torch import ACCEPT_STREAM, bits_torch, uniform_torch
from peagle.kernels.sampling.sampling_triton import accept_draft_tokens_triton
from peagle.kernels.triton_utils import runs_triton


class AcceptedTokens(NamedTuple):
    """Which draft tokens were accepted and what each request outputs; all int64."""

    num_accepted_B: Tensor
    output_token_ids_BQ: Tensor  # accepted draft tokens, then the target's own token, then -1
    result_BX: Tensor  # X = Q + 2: the output tokens, the number of accepted and of verified draft tokens, for the host


def accept_draft_tokens(
    token_ids_BQ: Tensor,
    target_token_ids_BQ: Tensor,
    num_draft_tokens_B: Tensor,
    synthetic_rates_K: Tensor | None,
    seed_B: Tensor,
    position_B: Tensor,
) -> AcceptedTokens:
    """Accepts draft tokens while they equal the target's tokens, and appends the target's next token.

    `token_ids` are the newest token and its draft tokens, `target_token_ids` the target's token after each of them, and
    `num_draft_tokens` how many draft tokens of each request are valid. Draft token i (token_ids[:, i + 1]) is accepted
    if all before it are, i < num_draft_tokens, and it equals target_token_ids[:, i].

    With `synthetic_rates` (fp32, see `to_conditional_rates`) the comparison is replaced by chance, as vLLM's synthetic
    acceptance does for benchmarks: draft token i is accepted with probability rate i if all before it are, by noise of
    (seed, position + i), where `position` is that of the first draft token. The output then has the draft token itself.
    """
    if runs_triton(token_ids_BQ):
        compared = (token_ids_BQ, target_token_ids_BQ, num_draft_tokens_B)
        accepted, result_BX = accept_draft_tokens_triton(*compared, synthetic_rates_K, seed_B, position_B)
        return AcceptedTokens(accepted, result_BX[:, :-2], result_BX)
    at = torch.arange(token_ids_BQ.shape[1], device=token_ids_BQ.device)
    if synthetic_rates_K is None:
        matches = token_ids_BQ[:, 1:] == target_token_ids_BQ[:, :-1]
    else:
        words = bits_torch(seed_B[:, None], position_B[:, None] + at[:-1], torch.zeros_like(at[:-1]), ACCEPT_STREAM)
        matches = uniform_torch(words) < synthetic_rates_K
    matches = matches & (at[:-1] < num_draft_tokens_B[:, None])
    accepted_B1 = matches.long().cumprod(1).sum(1, keepdim=True)
    output_BQ = torch.where(at == accepted_B1, target_token_ids_BQ, -1)
    output_BQ = torch.where(at < accepted_B1, token_ids_BQ.roll(-1, 1), output_BQ)
    result_BX = torch.cat([output_BQ, accepted_B1, num_draft_tokens_B[:, None]], 1)
    return AcceptedTokens(accepted_B1[:, 0], output_BQ, result_BX)


def to_conditional_rates(unconditional: Sequence[float]) -> list[float]:
    """Converts rates at which draft tokens 1..i are all accepted to rates of token i given that those before it are."""
    rates = [float(r) for r in unconditional]
    for rate in rates:
        if not 0.0 <= rate <= 1.0:
            raise UserError(f"synthetic acceptance rates {rates}: each must be between 0 and 1")
    before = [1.0, *rates][: len(rates)]
    if any(rate > last for rate, last in zip(rates, before, strict=True)):
        raise UserError(f"synthetic acceptance rates {rates}: none may be larger than the one before it")
    return [rate / last if last > 0 else 0.0 for rate, last in zip(rates, before, strict=True)]
