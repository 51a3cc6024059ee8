"""Ranged attention, the attention of training: row r sees one range of keys, lo_r <= j < hi_r.

It covers packed documents, mask-token rows over the depth-0 rows before them, and mask-token rows over their own chain.
Visibility is two numbers per row, so no mask and no rows x keys tensor is stored: the backward pass recomputes scores
tile by tile from the log-sum-exp of each row (`lse`). With `lse`, `merge_attn_states` joins attention over two disjoint
sets of keys.

Shapes: R rows, S keys, H query heads, G key/value heads, d head width; M rows and N keys of one chunk.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from peagle.kernels.attention.types import KeyRanges
from peagle.kernels.triton_utils import supports_triton_float

_MAX_TRITON_WIDTH = 256

Kernels = tuple[Callable[..., tuple[Tensor, Tensor]], Callable[..., tuple[Tensor, ...]]]  # forward and backward


def _accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _group_by_kv_head(x_MHd: Tensor, kv_heads: int, dtype: torch.dtype) -> Tensor:
    """[M, H, d] -> [G, H / G * M, d]"""
    return x_MHd.to(dtype).unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)


def _ungroup(x: Tensor, rows: int) -> Tensor:
    """[G, H / G * M, ...] -> [M, H, ...]"""
    x = x.unflatten(1, (-1, rows)).transpose(1, 2)
    return x.transpose(0, 1).flatten(1, 2)


def _masked_scores(q: Tensor, k: Tensor, ranges: KeyRanges, rows: slice, keys: slice) -> Tensor:
    """Returns [G, H / G * M, N] scores, -inf where a row does not see a key."""
    keys_N = torch.arange(keys.start, keys.stop, device=q.device)
    hidden_MN = (keys_N < ranges.lo_R[rows, None]) | (keys_N >= ranges.hi_R[rows, None])
    scores = (q @ k.mT).mul_(q.shape[-1] ** -0.5)
    scores.unflatten(1, (-1, len(hidden_MN))).masked_fill_(hidden_MN, float("-inf"))
    return scores


def forward_torch(q_RHd: Tensor, k_SGd: Tensor, v_SGd: Tensor, ranges: KeyRanges) -> tuple[Tensor, Tensor]:
    """Computes output and log-sum-exp chunk by chunk of rows, each over the keys that any of its rows sees."""
    dtype, kv_heads = _accumulate_dtype(q_RHd.dtype), k_SGd.shape[1]
    out_RHd = torch.empty_like(q_RHd, memory_format=torch.contiguous_format)
    lse_RH = q_RHd.new_empty(q_RHd.shape[:2], dtype=dtype)
    for rows, keys in ranges.get_chunks(q_RHd.shape[1]):
        q = _group_by_kv_head(q_RHd[rows], kv_heads, dtype)
        k, v = (x[keys].to(dtype).transpose(0, 1) for x in (k_SGd, v_SGd))
        scores = _masked_scores(q, k, ranges, rows, keys)
        row_max = scores.new_full(scores.shape[:2], float("-inf")) if not scores.shape[2] else scores.amax(-1)
        row_max = row_max.masked_fill(row_max == float("-inf"), 0.0)
        p = scores.sub_(row_max[..., None]).exp_()
        total = p.sum(-1)
        count = rows.stop - rows.start
        out_RHd[rows] = _ungroup((p @ v) / total.where(total > 0, 1.0)[..., None], count).to(out_RHd.dtype)
        lse_RH[rows] = _ungroup(row_max + total.log(), count)
    return out_RHd, lse_RH


def backward_torch(
    saved: tuple[Tensor, ...], ranges: KeyRanges, dout_RHd: Tensor, dlse_RH: Tensor | None
) -> tuple[Tensor, ...]:
    """Computes the gradients of q, k and v; recomputes the scores chunk by chunk."""
    q_RHd, k_SGd, v_SGd, out_RHd, lse_RH = saved
    dtype, kv_heads = _accumulate_dtype(q_RHd.dtype), k_SGd.shape[1]
    dq_RHd = torch.empty_like(q_RHd, memory_format=torch.contiguous_format)
    dk_SGd, dv_SGd = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (k_SGd, v_SGd))
    delta_RH = (out_RHd.to(dtype) * dout_RHd.to(dtype)).sum(-1)
    if dlse_RH is not None:
        delta_RH -= dlse_RH
    empty_RH = lse_RH == float("-inf")
    delta_RH, lse_RH = delta_RH.masked_fill(empty_RH, 0.0), lse_RH.masked_fill(empty_RH, 0.0)
    for rows, keys in ranges.get_chunks(q_RHd.shape[1]):
        q, dout = (_group_by_kv_head(x[rows], kv_heads, dtype) for x in (q_RHd, dout_RHd))
        k, v = (x[keys].to(dtype).transpose(0, 1) for x in (k_SGd, v_SGd))
        lse, delta = (_group_by_kv_head(x[rows, :, None], kv_heads, dtype) for x in (lse_RH, delta_RH))
        p = _masked_scores(q, k, ranges, rows, keys).sub_(lse).exp_()
        dv_SGd[keys] += (p.mT @ dout).transpose(0, 1)
        ds = (dout @ v.mT).sub_(delta).mul_(p).mul_(q.shape[-1] ** -0.5)
        dk_SGd[keys] += (ds.mT @ q).transpose(0, 1)
        dq_RHd[rows] = _ungroup(ds @ k, rows.stop - rows.start).to(dq_RHd.dtype)
    return dq_RHd, dk_SGd.to(k_SGd.dtype), dv_SGd.to(v_SGd.dtype)


class RangedAttentionFunction(torch.autograd.Function):
    """Saves q, k, v, out and lse; the backward kernel recomputes the scores."""

    @staticmethod
    def forward(
        ctx: Any, q_RHd: Tensor, k_SGd: Tensor, v_SGd: Tensor, ranges: KeyRanges, kernels: Kernels
    ) -> tuple[Tensor, Tensor]:
        forward_kernel, ctx.backward_kernel = kernels
        out_RHd, lse_RH = forward_kernel(q_RHd, k_SGd, v_SGd, ranges)
        ctx.save_for_backward(q_RHd, k_SGd, v_SGd, out_RHd, lse_RH)
        ctx.ranges = ranges
        ctx.set_materialize_grads(False)
        return out_RHd, lse_RH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_RHd: Tensor | None, dlse_RH: Tensor | None) -> tuple[Tensor | None, ...]:
        if dout_RHd is None and dlse_RH is None:
            return (None,) * 5
        if dout_RHd is None:
            dout_RHd = torch.zeros_like(ctx.saved_tensors[3])
        return *ctx.backward_kernel(ctx.saved_tensors, ctx.ranges, dout_RHd, dlse_RH), None, None


def ranged_attention(q_RHd: Tensor, k_SGd: Tensor, v_SGd: Tensor, ranges: KeyRanges) -> tuple[Tensor, Tensor]:
    """Computes attention over each row's key range.

    Returns the output [R, H, d] and the log-sum-exp of each row [R, H] in fp32 (fp64 for fp64 inputs). Both are
    differentiable in q, k and v. A row without keys has output 0, lse -inf and no gradient. All ranges must lie within
    the keys, and all keys and values must be finite, visible or not.
    """
    assert len(ranges) == len(q_RHd) and k_SGd.shape == v_SGd.shape, (q_RHd.shape, k_SGd.shape, v_SGd.shape)
    assert q_RHd.shape[1] % k_SGd.shape[1] == 0 and q_RHd.shape[2] == k_SGd.shape[2], (q_RHd.shape, k_SGd.shape)
    assert q_RHd.dtype == k_SGd.dtype == v_SGd.dtype, (q_RHd.dtype, k_SGd.dtype, v_SGd.dtype)
    kernels: Kernels = (forward_torch, backward_torch)
    if supports_triton_float(q_RHd) and q_RHd.shape[-1] <= _MAX_TRITON_WIDTH:
        from peagle.kernels.attention.ranged_triton import backward_triton, forward_triton

        kernels = (forward_triton, backward_triton)
    return RangedAttentionFunction.apply(q_RHd, k_SGd, v_SGd, ranges, kernels)


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


class MergeAttnStatesFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, kernels: Kernels
    ) -> tuple[Tensor, Tensor]:
        forward_kernel, ctx.backward_kernel = kernels
        ctx.save_for_backward(out_a, lse_a, out_b, lse_b)
        return forward_kernel(out_a, lse_a, out_b, lse_b)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.backward_kernel(*ctx.saved_tensors, dout, dlse), None


def merge_attn_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merges attention of the same rows over two disjoint sets of keys into attention over both. Differentiable.

    Takes and returns out [R, H, d] and lse [R, H] of `ranged_attention`. Rows without keys on both sides stay 0 and
    -inf.
    """
    assert out_a.shape == out_b.shape and lse_a.shape == lse_b.shape == out_a.shape[:2], (out_a.shape, out_b.shape)
    kernels: Kernels = (merge_forward_torch, merge_backward_torch)
    if supports_triton_float(out_a) and len(out_a):
        from peagle.kernels.attention.ranged_triton import merge_backward_triton, merge_forward_triton

        kernels = (merge_forward_triton, merge_backward_triton)
    return MergeAttnStatesFunction.apply(out_a, lse_a, out_b, lse_b, kernels)
