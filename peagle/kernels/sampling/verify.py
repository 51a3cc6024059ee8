"""How many drafts hold, and what the text gains.

Knows nothing about models or sampling: it compares the drafts with what the target chose in their place.

Shapes: B requests, K drafts, Q = K + 1 verified rows a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from peagle.errors import UserError
from peagle.kernels.sampling.sample import ACCEPT_STREAM, _uniform, _words, bits_torch, uniform_torch
from peagle.kernels.triton_utils import pdl_launch_options

try:
    import triton
    from triton import language as tl
except ImportError:  # no wheel for this machine: the torch versions serve
    triton = None

_jit = triton.jit if triton is not None else lambda kernel: kernel


class AcceptedTokens(NamedTuple):
    """What became of a round's drafts, all int64."""

    num_accepted_B: Tensor  # how many hold
    output_token_ids_BQ: Tensor  # the tokens that the text gains, -1 behind them
    result_BX: Tensor  # these tokens, how many drafts hold and how many there were: what the host wants to know


def accept_draft_tokens_torch(
    tokens_BQ: Tensor,
    chosen_BQ: Tensor,
    available_B: Tensor,
    synthetic_rates_K: Tensor | None,
    seed_B: Tensor,
    position_B: Tensor,
) -> AcceptedTokens:
    drafts = tokens_BQ[:, 1:]
    if drafts.shape[1] == 0:
        return _with_result(chosen_BQ.new_zeros(len(chosen_BQ)), chosen_BQ, available_B)
    at = torch.arange(tokens_BQ.shape[1], device=tokens_BQ.device)
    if synthetic_rates_K is None:
        holds = drafts == chosen_BQ[:, :-1]
    else:
        words = bits_torch(seed_B[:, None], position_B[:, None] + at[:-1], torch.zeros_like(at[:-1]), ACCEPT_STREAM)
        holds = uniform_torch(words) < synthetic_rates_K
    holds = holds & (at[:-1] < available_B[:, None])
    accepted = holds.long().cumprod(1).sum(1)
    drafted = torch.cat([drafts, drafts[:, :1]], 1)  # the last is never read
    emitted = torch.where(at == accepted[:, None], chosen_BQ, -1)
    return _with_result(accepted, torch.where(at < accepted[:, None], drafted, emitted), available_B)


def _with_result(num_accepted_B: Tensor, output_token_ids_BQ: Tensor, available_B: Tensor) -> AcceptedTokens:
    told = [output_token_ids_BQ, num_accepted_B[:, None], available_B[:, None].long()]
    return AcceptedTokens(num_accepted_B, output_token_ids_BQ, torch.cat(told, 1))


@_jit
def _accept_kernel(
    tokens: tl.tensor,
    tokens_stride: tl.tensor,
    chosen: tl.tensor,
    chosen_stride: tl.tensor,
    available: tl.tensor,
    rates: tl.tensor,
    seed: tl.tensor,
    position: tl.tensor,
    accepted: tl.tensor,
    result: tl.tensor,
    K: tl.constexpr,
    SYNTHETIC: tl.constexpr,
    STREAM: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One request; WIDTH >= K + 1."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    b = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    is_draft = at < K
    draft = tl.load(tokens + b * tokens_stride + at + 1, mask=is_draft, other=-1)
    own = tl.load(chosen + b * chosen_stride + at, mask=at <= K, other=-1)
    if SYNTHETIC:
        word, _1, _2, _3 = _words(tl.load(seed + b), tl.load(position + b) + at, at * 0, STREAM)
        holds = _uniform(word) < tl.load(rates + at, mask=is_draft, other=0.0)
    else:
        holds = draft == own
    ready = tl.load(available + b).to(tl.int64)
    holds = holds & is_draft & (at < ready)
    count = tl.min(tl.where(holds, WIDTH, at), 0)  # the first that does not hold: lane K never does
    tl.store(accepted + b, count.to(tl.int64))
    gained = tl.where(at < count, draft, tl.where(at == count, own, -1))
    result += b * (K + 3)
    tl.store(result + at, gained, mask=at <= K)
    tl.store(result + K + 1, count.to(tl.int64))
    tl.store(result + K + 2, ready)


def accept_draft_tokens_triton(
    tokens_BQ: Tensor,
    chosen_BQ: Tensor,
    available_B: Tensor,
    synthetic_rates_K: Tensor | None,
    seed_B: Tensor,
    position_B: Tensor,
) -> AcceptedTokens:
    requests, rows = tokens_BQ.shape
    assert tokens_BQ.stride(1) == 1 and chosen_BQ.stride(1) == 1
    accepted = torch.empty(requests, dtype=torch.int64, device=tokens_BQ.device)
    result = torch.empty(requests, rows + 2, dtype=torch.int64, device=tokens_BQ.device)
    _accept_kernel[(requests,)](
        tokens_BQ,
        tokens_BQ.stride(0),
        chosen_BQ,
        chosen_BQ.stride(0),
        available_B.contiguous(),
        accepted if synthetic_rates_K is None else synthetic_rates_K.contiguous(),  # not read without rates
        seed_B.contiguous(),
        position_B.contiguous(),
        accepted,
        result,
        K=rows - 1,
        SYNTHETIC=synthetic_rates_K is not None,
        STREAM=ACCEPT_STREAM,
        WIDTH=triton.next_power_of_2(rows),
        num_warps=1,
        **pdl_launch_options(tokens_BQ.device),
    )
    return AcceptedTokens(accepted, result[:, :rows], result)


def accept_draft_tokens(
    tokens_BQ: Tensor,
    chosen_BQ: Tensor,
    available_B: Tensor,
    synthetic_rates_K: Tensor | None,
    seed_B: Tensor,
    position_B: Tensor,
) -> AcceptedTokens:
    """How many drafts hold, and the tokens that the text gains.

    `tokens` are the newest token and the drafts after it, `chosen` what the target chose after each of them, and
    `available` says how many drafts are real. Draft i (tokens[:, i + 1]) holds if those before it do, i < available,
    and it is chosen[:, i]. Gained are the drafts that hold and the target's own token behind them.

    With `synthetic_rates` (fp32, see `to_conditional_rates`) the comparison is replaced by chance, as vLLM's synthetic
    acceptance does for benchmarks: draft i holds with probability rate i if those before it do, by noise of
    (seed, position + i), where `position` is that of the first draft. A draft that holds is gained as it is.
    """
    accepted = accept_draft_tokens_triton if tokens_BQ.is_cuda and triton is not None else accept_draft_tokens_torch
    return accepted(tokens_BQ, chosen_BQ, available_B, synthetic_rates_K, seed_B, position_B)


def to_conditional_rates(unconditional: Sequence[float]) -> list[float]:
    """From how often drafts 1..i all hold, for each i, to how often draft i does if those before it do."""
    rates = [float(r) for r in unconditional]
    for rate in rates:
        if not 0.0 <= rate <= 1.0:
            raise UserError(f"synthetic acceptance rates {rates}: each must be between 0 and 1")
    before = [1.0, *rates][: len(rates)]
    if any(rate > last for rate, last in zip(rates, before, strict=True)):
        raise UserError(f"synthetic acceptance rates {rates}: none may be larger than the one before it")
    return [rate / last if last > 0 else 0.0 for rate, last in zip(rates, before, strict=True)]


def rates_for_acceptance_length(length: float, k: int) -> list[float]:
    """Unconditional rates of K drafts with this mean acceptance length, of the least variance: as vLLM's.

    Every round accepts the whole part of length - 1, and one draft more in a share of rounds that is the rest.
    """
    if not 1.0 <= length <= k + 1:
        raise UserError(f"synthetic acceptance length {length}: must be between 1 and {k + 1} for {k} drafts")
    return [min(max(length - 1 - i, 0.0), 1.0) for i in range(k)]
