"""Plain torch reference of draft acceptance. Shapes as in verify.py."""

from __future__ import annotations

import torch
from torch import Tensor

from peagle.kernels.sampling.noise_torch import ACCEPT_STREAM, bits_torch, uniform_torch
from peagle.kernels.sampling.types import AcceptedTokens


def accept_draft_tokens_torch(
    token_ids_BQ: Tensor,
    target_token_ids_BQ: Tensor,
    num_draft_tokens_B: Tensor,
    synthetic_rates_K: Tensor | None,
    seed_B: Tensor,
    position_B: Tensor,
) -> AcceptedTokens:
    draft_token_ids = token_ids_BQ[:, 1:]
    if draft_token_ids.shape[1] == 0:
        return _pack_result(
            target_token_ids_BQ.new_zeros(len(target_token_ids_BQ)), target_token_ids_BQ, num_draft_tokens_B
        )
    at = torch.arange(token_ids_BQ.shape[1], device=token_ids_BQ.device)
    if synthetic_rates_K is None:
        matches = draft_token_ids == target_token_ids_BQ[:, :-1]
    else:
        words = bits_torch(seed_B[:, None], position_B[:, None] + at[:-1], torch.zeros_like(at[:-1]), ACCEPT_STREAM)
        matches = uniform_torch(words) < synthetic_rates_K
    matches = matches & (at[:-1] < num_draft_tokens_B[:, None])
    accepted = matches.long().cumprod(1).sum(1)
    drafted = torch.cat([draft_token_ids, draft_token_ids[:, :1]], 1)  # the last column is never read
    emitted = torch.where(at == accepted[:, None], target_token_ids_BQ, -1)
    return _pack_result(accepted, torch.where(at < accepted[:, None], drafted, emitted), num_draft_tokens_B)


def _pack_result(num_accepted_B: Tensor, output_token_ids_BQ: Tensor, num_draft_tokens_B: Tensor) -> AcceptedTokens:
    packed_BX = torch.cat([output_token_ids_BQ, num_accepted_B[:, None], num_draft_tokens_B[:, None].long()], 1)
    return AcceptedTokens(num_accepted_B, output_token_ids_BQ, packed_BX)
