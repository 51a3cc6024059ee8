"""Ranged attention and the merge of attention states in plain torch, forward and backward.

Shapes: R rows, S keys, H query heads, G key/value heads, d head width; M rows and N keys of one chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor

from peagle.kernels.attention.key_ranges import KeyRanges, RowChunk


def _accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _group_by_kv_head(x_MHd: Tensor, kv_heads: int, dtype: torch.dtype) -> Tensor:
    """[M, H, d] -> [G, H / G * M, d]"""
    return x_MHd.to(dtype).unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)


def _ungroup(x: Tensor, rows: int) -> Tensor:
    """[G, H / G * M, ...] -> [M, H, ...]"""
    x = x.unflatten(1, (-1, rows)).transpose(1, 2)
    return x.transpose(0, 1).flatten(1, 2)


def _masked_scores(q: Tensor, k: Tensor, ranges: KeyRanges, chunk: RowChunk, scale: float) -> Tensor:
    """Returns [G, H / G * M, N] scores, -inf where a row does not see a key."""
    keys = torch.arange(chunk.keys.start, chunk.keys.stop, device=q.device)
    lo, hi = ranges.lo_R[chunk.rows, None], ranges.hi_R[chunk.rows, None]
    hidden_MN = (keys < lo) | (keys >= hi)
    scores = (q @ k.mT).mul_(scale)
    scores.unflatten(1, (-1, len(hidden_MN))).masked_fill_(hidden_MN, float("-inf"))
    return scores


def forward_torch(
    q_RHd: Tensor, k_SGd: Tensor, v_SGd: Tensor, ranges: KeyRanges, scale: float
) -> tuple[Tensor, Tensor]:
    """Computes output and log-sum-exp chunk by chunk of rows, each over the keys that any of its rows sees."""
    dtype, kv_heads = _accumulate_dtype(q_RHd.dtype), k_SGd.shape[1]
    out_RHd = torch.empty_like(q_RHd, memory_format=torch.contiguous_format)
    lse_RH = q_RHd.new_empty(q_RHd.shape[:2], dtype=dtype)
    for chunk in ranges.get_chunks(q_RHd.shape[1]):
        q = _group_by_kv_head(q_RHd[chunk.rows], kv_heads, dtype)
        k, v = (x[chunk.keys].to(dtype).transpose(0, 1) for x in (k_SGd, v_SGd))
        scores = _masked_scores(q, k, ranges, chunk, scale)
        row_max = scores.new_full(scores.shape[:2], float("-inf")) if not scores.shape[2] else scores.amax(-1)
        row_max = row_max.masked_fill(row_max == float("-inf"), 0.0)
        p = scores.sub_(row_max[..., None]).exp_()
        total = p.sum(-1)
        rows = chunk.rows.stop - chunk.rows.start
        out_RHd[chunk.rows] = _ungroup((p @ v) / total.where(total > 0, 1.0)[..., None], rows).to(out_RHd.dtype)
        lse_RH[chunk.rows] = _ungroup(row_max + total.log(), rows)
    return out_RHd, lse_RH


def backward_torch(
    q_RHd: Tensor,
    k_SGd: Tensor,
    v_SGd: Tensor,
    out_RHd: Tensor,
    lse_RH: Tensor,
    ranges: KeyRanges,
    scale: float,
    dout_RHd: Tensor,
    dlse_RH: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the gradients of q, k and v; recomputes the scores chunk by chunk."""
    dtype, kv_heads = _accumulate_dtype(q_RHd.dtype), k_SGd.shape[1]
    dq_RHd = torch.empty_like(q_RHd, memory_format=torch.contiguous_format)
    dk_SGd, dv_SGd = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (k_SGd, v_SGd))
    delta_RH = (out_RHd.to(dtype) * dout_RHd.to(dtype)).sum(-1)
    if dlse_RH is not None:
        delta_RH -= dlse_RH
    empty_RH = lse_RH == float("-inf")
    delta_RH, lse_RH = delta_RH.masked_fill(empty_RH, 0.0), lse_RH.masked_fill(empty_RH, 0.0)
    for chunk in ranges.get_chunks(q_RHd.shape[1]):
        q, dout = (_group_by_kv_head(x[chunk.rows], kv_heads, dtype) for x in (q_RHd, dout_RHd))
        k, v = (x[chunk.keys].to(dtype).transpose(0, 1) for x in (k_SGd, v_SGd))
        lse, delta = (_group_by_kv_head(x[chunk.rows, :, None], kv_heads, dtype) for x in (lse_RH, delta_RH))
        p = _masked_scores(q, k, ranges, chunk, scale).sub_(lse).exp_()
        dv_SGd[chunk.keys] += (p.mT @ dout).transpose(0, 1)
        ds = (dout @ v.mT).sub_(delta).mul_(p).mul_(scale)
        dk_SGd[chunk.keys] += (ds.mT @ q).transpose(0, 1)
        dq_RHd[chunk.rows] = _ungroup(ds @ k, chunk.rows.stop - chunk.rows.start).to(dq_RHd.dtype)
    return dq_RHd, dk_SGd.to(k_SGd.dtype), dv_SGd.to(v_SGd.dtype)


def _merge_weights(lse_a: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns each side's weight in the merged output (0 and 0 if both are empty) and the merged log-sum-exp."""
    larger = torch.maximum(lse_a, lse_b)
    larger = larger.masked_fill(larger == float("-inf"), 0.0)
    a, b = (lse_a - larger).exp(), (lse_b - larger).exp()
    total = a + b
    divisor = total.where(total > 0, 1.0)
    return a / divisor, b / divisor, larger + total.log()


def merge_forward_torch(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Computes the merged output and log-sum-exp."""
    weight_a, weight_b, lse = _merge_weights(lse_a, lse_b)
    out = out_a.to(lse.dtype) * weight_a[..., None] + out_b.to(lse.dtype) * weight_b[..., None]
    return out.to(out_a.dtype), lse


def merge_backward_torch(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, dout: Tensor, dlse: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes the gradients of out_a, lse_a, out_b and lse_b."""
    weight_a, weight_b, _ = _merge_weights(lse_a, lse_b)
    exact = dout.to(dlse.dtype)
    shift = weight_a * weight_b * (exact * (out_a.to(exact.dtype) - out_b.to(exact.dtype))).sum(-1)
    dout_a, dout_b = ((exact * w[..., None]).to(out_a.dtype) for w in (weight_a, weight_b))
    return dout_a, weight_a * dlse + shift, dout_b, weight_b * dlse - shift
