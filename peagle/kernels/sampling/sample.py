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

import math

import torch
from torch import Tensor

from peagle.kernels.sampling.noise_torch import bits_torch, gumbel_torch, row_bits_torch
from peagle.kernels.sampling.sampling_triton import argmax_triton, sample_tokens_triton
from peagle.kernels.triton_utils import runs_triton


def argmax(logits_RV: Tensor) -> Tensor:
    """Returns the token with the largest logit, the lowest id among equals: int64 [R]."""
    if runs_triton(logits_RV):
        return argmax_triton(logits_RV)
    if logits_RV.is_cuda:
        return logits_RV.argmax(-1)
    logits = logits_RV.detach()
    if logits.dtype != torch.float64:
        logits = logits.float()  # numpy has no bf16
    return torch.from_numpy(logits.numpy().argmax(-1))  # same result as torch's argmax, 10 times as fast


def sample_tokens(logits_RV: Tensor, float_params_3R: Tensor, int_params_2R: Tensor, position_R: Tensor) -> Tensor:
    """Samples one token per row: int64 [R].

    Temperature 0 is the argmax, the lowest id among equals. Otherwise tokens are drawn from softmax(logits /
    temperature) after these filters, in this order: `min_p` keeps tokens at least min_p times as likely as the
    likeliest (0: off); `top_k` keeps logits not below the k-th largest, including equals (0: off); `top_p` drops a
    token if strictly likelier ones already have a mass of top_p, and keeps equals (1: off).

    `float_params` are temperature, top_p and min_p in fp32, `int_params` top_k and seed, `position` is that of the
    sampled token; logits are bf16 or fp32, the arithmetic is fp32. The module's docstring states what the noise
    guarantees.
    """
    if runs_triton(logits_RV):
        return sample_tokens_triton(logits_RV, float_params_3R, int_params_2R, position_R)
    tokens = argmax(logits_RV)
    sampled = (float_params_3R[0] > 0).nonzero()[:, 0]
    if len(sampled) == 0:
        return tokens
    logits, float_params, position = logits_RV[sampled].float(), float_params_3R[:, sampled], position_R[sampled]
    temperature, (top_k, seed) = float_params[0], int_params_2R[:, sampled]
    keep = logits >= logit_cutoffs_torch(logits, float_params, top_k)[:, None]
    # noise * temperature instead of logits / temperature: the same order, without overflow for tiny temperatures.
    if int(keep.sum()) < keep.numel() // 8:  # few tokens are left: draw noise for these only
        row, token = keep.nonzero(as_tuple=True)
        scores = torch.full_like(logits, -math.inf)
        noise = gumbel_torch(bits_torch(seed[row], position[row], token))
        scores[row, token] = logits[row, token] + temperature[row] * noise
    else:
        noise = gumbel_torch(row_bits_torch(seed, position, logits.shape[1]))
        scores = (logits + temperature[:, None] * noise).masked_fill(~keep, -math.inf)
    tokens[sampled] = argmax(scores)
    return tokens


def logit_cutoffs_torch(logits_RV: Tensor, float_params_3R: Tensor, top_k_R: Tensor) -> Tensor:
    """Returns the smallest logit that each row keeps, -inf if it keeps all: fp32 [R]. Reads values on the host."""
    vocab = logits_RV.shape[1]
    cutoffs = torch.full((len(logits_RV),), -math.inf, device=logits_RV.device)
    rows = zip(*float_params_3R.tolist(), top_k_R.tolist(), strict=True)
    for r, (temperature, top_p, min_p, top_k) in enumerate(rows):
        has_top_k = 0 < top_k < vocab
        if temperature <= 0 or not (has_top_k or top_p < 1 or min_p > 0):
            continue
        logits = logits_RV[r].float()
        best, cutoff = logits.max(), cutoffs[r]
        if min_p > 0:
            cutoff = best + temperature * math.log(min_p)
        if has_top_k:
            cutoff = torch.maximum(cutoff, logits.topk(int(top_k)).values[-1])
        if top_p < 1:
            need = top_p * ((logits[logits >= cutoff] - best) / temperature).exp().sum()
            for count in (1024, vocab):  # the first suffices for a peaked row and is ten times as fast
                kept = logits.topk(min(count, vocab)).values
                mass = ((kept[kept >= cutoff] - best) / temperature).exp().cumsum(0)
                if mass[-1] >= need:
                    break
            # The token at which the mass reaches top_p is the last one kept, along with equal logits.
            cutoff = kept[int((mass < need).sum().clamp(max=len(mass) - 1))]
        cutoffs[r] = cutoff
    return cutoffs
