"""Verification: which draft tokens are accepted, and the tokens that each request outputs.

Compares draft tokens with the tokens that the target sampled in their place (sample.py says why that is exact).

Shapes: B requests, K draft tokens, Q = K + 1 verified rows per request.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from peagle.errors import UserError
from peagle.kernels.sampling.noise import ACCEPT_STREAM, bits_torch, uniform_torch
from peagle.kernels.triton_utils import HAVE_TRITON, pdl_launch_options, runs_triton

if HAVE_TRITON:
    import triton
    from triton import language as tl

    from peagle.kernels.sampling.noise import philox_words, uniform
    from peagle.kernels.triton_utils import wait_for_previous

    @triton.jit
    def _accept_kernel(
        tokens, tokens_stride, target, target_stride, available, rates, seed, position, accepted, result,
        K: tl.constexpr, SYNTHETIC: tl.constexpr, STREAM: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
    ) -> None:  # fmt: skip
        """Handles one request; WIDTH >= K + 1."""
        wait_for_previous(PDL)
        b = tl.program_id(0).to(tl.int64)
        at = tl.arange(0, WIDTH)
        is_draft = at < K
        draft = tl.load(tokens + b * tokens_stride + at + 1, mask=is_draft, other=-1)
        target_token = tl.load(target + b * target_stride + at, mask=at <= K, other=-1)
        if SYNTHETIC:
            word, _1, _2, _3 = philox_words(tl.load(seed + b), tl.load(position + b) + at, at * 0, STREAM)
            matches = uniform(word) < tl.load(rates + at, mask=is_draft, other=0.0)
        else:
            matches = draft == target_token
        verified = tl.load(available + b).to(tl.int64)
        matches = matches & is_draft & (at < verified)
        count = tl.min(tl.where(matches, WIDTH, at), 0)  # the first mismatch: lane K never matches
        tl.store(accepted + b, count.to(tl.int64))
        output = tl.where(at < count, draft, tl.where(at == count, target_token, -1))
        result += b * (K + 3)
        tl.store(result + at, output, mask=at <= K)
        tl.store(result + K + 1, count.to(tl.int64))
        tl.store(result + K + 2, verified)


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
    (requests, rows), device = token_ids_BQ.shape, token_ids_BQ.device
    if not runs_triton(token_ids_BQ):
        at = torch.arange(rows, device=device)
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
    assert token_ids_BQ.stride(1) == 1 and target_token_ids_BQ.stride(1) == 1
    accepted_B = torch.empty(requests, dtype=torch.int64, device=device)
    result_BX = torch.empty(requests, rows + 2, dtype=torch.int64, device=device)
    rates_K = accepted_B if synthetic_rates_K is None else synthetic_rates_K.contiguous()  # a placeholder is not read
    _accept_kernel[(requests,)](
        token_ids_BQ, token_ids_BQ.stride(0), target_token_ids_BQ, target_token_ids_BQ.stride(0),
        num_draft_tokens_B.contiguous(), rates_K, seed_B.contiguous(), position_B.contiguous(), accepted_B, result_BX,
        K=rows - 1, SYNTHETIC=synthetic_rates_K is not None, STREAM=ACCEPT_STREAM, WIDTH=triton.next_power_of_2(rows),
        num_warps=1, **pdl_launch_options(device),
    )  # fmt: skip
    return AcceptedTokens(accepted_B, result_BX[:, :rows], result_BX)


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
