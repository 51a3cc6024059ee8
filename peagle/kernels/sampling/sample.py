"""Samples tokens: the argmax, or a seeded draw after temperature and filters. Shapes: R rows, V vocabulary.

The noise of a draw is a pure function of (seed, position of the sampled token, token id). Two properties follow.

Exact rejection sampling. Let p be a row's distribution after temperature and filters. The argmax of logits /
temperature + Gumbel noise is a draw x from p (the Gumbel-max trick). A greedy draft token d does not depend on that
noise, and accepting it if and only if x == d is exact rejection sampling: d is accepted with probability p(d), which is
min(1, p(d) / q(d)) for the one-hot q of a greedy draft, and if it is rejected, x has the distribution max(p - q, 0),
normalized.

Reproducibility. The output gains x in either case, and x depends only on the logits, the seed and the position. So
seeded sampled output is the same, token for token, with and without speculation, for every number of draft tokens and
in every batch, as far as the logits are the same: rounding that differs between shapes can flip near-ties, as for
greedy output.
"""

from __future__ import annotations

from torch import Tensor

from peagle.kernels.sampling.sample_torch import argmax_torch, sample_tokens_torch
from peagle.kernels.sampling.sample_triton import argmax_triton, sample_tokens_triton
from peagle.kernels.triton_utils import runs_triton


def argmax(logits_RV: Tensor) -> Tensor:
    """Returns the token with the largest logit, the lowest id among equals: int64 [R]."""
    return argmax_triton(logits_RV) if runs_triton(logits_RV) else argmax_torch(logits_RV)


def sample_tokens(
    logits_RV: Tensor,
    temperature_R: Tensor,
    top_k_R: Tensor,
    top_p_R: Tensor,
    min_p_R: Tensor,
    seed_R: Tensor,
    position_R: Tensor,
) -> Tensor:
    """Samples one token per row: int64 [R].

    Temperature 0 is the argmax, the lowest id among equals. Otherwise tokens are drawn from softmax(logits /
    temperature) after these filters, in this order: `min_p` keeps tokens at least min_p times as likely as the
    likeliest (0: off); `top_k` keeps logits not below the k-th largest, including equals (0: off); `top_p` drops a
    token if strictly likelier ones already have a mass of top_p, and keeps equals (1: off).

    `seed` and `position` (of the sampled token) are int64; logits are bf16 or fp32, the arithmetic is fp32. The
    module's docstring states what the noise guarantees.
    """
    sample = sample_tokens_triton if runs_triton(logits_RV) else sample_tokens_torch
    return sample(logits_RV, temperature_R, top_k_R, top_p_R, min_p_R, seed_R, position_R)
