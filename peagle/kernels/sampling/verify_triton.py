"""Triton kernel of draft acceptance. Shapes as in verify.py."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import torch
from torch import Tensor

from peagle.kernels.sampling.noise_torch import ACCEPT_STREAM
from peagle.kernels.sampling.types import AcceptedTokens
from peagle.kernels.triton_utils import HAVE_TRITON, pdl_launch_options

if HAVE_TRITON:
    import triton
    from triton import language as tl

    from peagle.kernels.sampling.sample_triton import philox_words, uniform

    @triton.jit
    def _accept_kernel(
        tokens,
        tokens_stride,
        target,
        target_stride,
        available,
        rates,
        seed,
        position,
        accepted,
        result,
        K: tl.constexpr,
        SYNTHETIC: tl.constexpr,
        STREAM: tl.constexpr,
        WIDTH: tl.constexpr,
        PDL: tl.constexpr,
    ) -> None:
        """Handles one request; WIDTH >= K + 1."""
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()
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


def accept_draft_tokens_triton(
    token_ids_BQ: Tensor,
    target_token_ids_BQ: Tensor,
    num_draft_tokens_B: Tensor,
    synthetic_rates_K: Tensor | None,
    seed_B: Tensor,
    position_B: Tensor,
) -> AcceptedTokens:
    requests, rows = token_ids_BQ.shape
    assert token_ids_BQ.stride(1) == 1 and target_token_ids_BQ.stride(1) == 1
    accepted = torch.empty(requests, dtype=torch.int64, device=token_ids_BQ.device)
    result = torch.empty(requests, rows + 2, dtype=torch.int64, device=token_ids_BQ.device)
    rates_K = accepted if synthetic_rates_K is None else synthetic_rates_K.contiguous()  # a placeholder is not read
    _accept_kernel[(requests,)](
        token_ids_BQ,
        token_ids_BQ.stride(0),
        target_token_ids_BQ,
        target_token_ids_BQ.stride(0),
        num_draft_tokens_B.contiguous(),
        rates_K,
        seed_B.contiguous(),
        position_B.contiguous(),
        accepted,
        result,
        K=rows - 1,
        SYNTHETIC=synthetic_rates_K is not None,
        STREAM=ACCEPT_STREAM,
        WIDTH=triton.next_power_of_2(rows),
        num_warps=1,
        **pdl_launch_options(token_ids_BQ.device),
    )
    return AcceptedTokens(accepted, result[:, :rows], result)
