"""Plain torch reference of sampling. Shapes: R rows, V vocabulary."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from peagle.kernels.sampling.noise_torch import bits_torch, gumbel_torch, row_bits_torch


def argmax_torch(logits_RV: Tensor) -> Tensor:
    if logits_RV.is_cuda:
        return logits_RV.argmax(-1)
    logits = logits_RV.detach()
    if logits.dtype != torch.float64:
        logits = logits.float()  # numpy has no bf16
    return torch.from_numpy(logits.numpy().argmax(-1))  # same result as torch's argmax, 10 times as fast


def logit_cutoffs_torch(
    logits_RV: Tensor, temperature_R: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor
) -> Tensor:
    """Returns the smallest logit that each row keeps, -inf if it keeps all: fp32 [R]. Reads values on the host."""
    vocab = logits_RV.shape[1]
    cutoffs = torch.full((len(logits_RV),), -math.inf, device=logits_RV.device)
    rows = zip(*(x.tolist() for x in (temperature_R, top_k_R, top_p_R, min_p_R)), strict=True)
    for r, (temperature, top_k, top_p, min_p) in enumerate(rows):
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


def sample_tokens_torch(
    logits_RV: Tensor,
    temperature_R: Tensor,
    top_k_R: Tensor,
    top_p_R: Tensor,
    min_p_R: Tensor,
    seed_R: Tensor,
    position_R: Tensor,
) -> Tensor:
    tokens = argmax_torch(logits_RV)
    sampled = (temperature_R > 0).nonzero()[:, 0]
    if len(sampled) == 0:
        return tokens
    temperature, seed, position = temperature_R[sampled].float(), seed_R[sampled], position_R[sampled]
    logits = logits_RV[sampled].float()
    cutoffs = logit_cutoffs_torch(logits, temperature, top_k_R[sampled], top_p_R[sampled], min_p_R[sampled])
    keep = logits >= cutoffs[:, None]
    # noise * temperature instead of logits / temperature: the same order, without overflow for tiny temperatures.
    if int(keep.sum()) < keep.numel() // 8:  # few tokens are left: draw noise for these only
        row, token = keep.nonzero(as_tuple=True)
        scores = torch.full_like(logits, -math.inf)
        noise = gumbel_torch(bits_torch(seed[row], position[row], token))
        scores[row, token] = logits[row, token] + temperature[row] * noise
    else:
        noise = gumbel_torch(row_bits_torch(seed, position, logits.shape[1]))
        scores = (logits + temperature[:, None] * noise).masked_fill(~keep, -math.inf)
    tokens[sampled] = argmax_torch(scores)
    return tokens
