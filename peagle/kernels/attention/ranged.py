"""Ranged attention, the attention of training: row r sees one range of keys, lo_r <= j < hi_r.

It covers packed documents, mask-token rows over the depth-0 rows before them, and mask-token rows over their own chain.
Visibility is two numbers per row, so no mask and no rows x keys tensor is stored: the backward pass recomputes scores
tile by tile from the log-sum-exp of each row (`lse`). With `lse`, `merge_attn_states` joins attention over two disjoint
sets of keys.

Shapes: R rows, S keys, H query heads, G key/value heads, d head width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from peagle.kernels.attention.key_ranges import KeyRanges
from peagle.kernels.attention.ranged_torch import (
    backward_torch,
    forward_torch,
    merge_backward_torch,
    merge_forward_torch,
)
from peagle.kernels.triton_utils import supports_triton_float

__all__ = ["KeyRanges", "merge_attn_states", "ranged_attention", "ranged_attention_torch"]

_MAX_TRITON_WIDTH = 256

Forward = Callable[[Tensor, Tensor, Tensor, KeyRanges, float], tuple[Tensor, Tensor]]
Backward = Callable[..., tuple[Tensor, Tensor, Tensor]]


class RangedAttentionFunction(torch.autograd.Function):
    """Saves q, k, v, out and lse; the given backward function recomputes the scores."""

    @staticmethod
    def forward(
        ctx: Any,
        q_RHd: Tensor,
        k_SGd: Tensor,
        v_SGd: Tensor,
        ranges: KeyRanges,
        scale: float,
        forward: Forward,
        backward: Backward,
    ) -> tuple[Tensor, Tensor]:
        out_RHd, lse_RH = forward(q_RHd, k_SGd, v_SGd, ranges, scale)
        ctx.save_for_backward(q_RHd, k_SGd, v_SGd, out_RHd, lse_RH)
        ctx.ranges, ctx.scale, ctx.backward_fn = ranges, scale, backward
        ctx.set_materialize_grads(False)
        return out_RHd, lse_RH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_RHd: Tensor | None, dlse_RH: Tensor | None) -> tuple[Tensor | None, ...]:
        if dout_RHd is None and dlse_RH is None:
            return (None,) * 7
        q_RHd, k_SGd, v_SGd, out_RHd, lse_RH = ctx.saved_tensors
        if dout_RHd is None:
            dout_RHd = torch.zeros_like(out_RHd)
        grads = ctx.backward_fn(q_RHd, k_SGd, v_SGd, out_RHd, lse_RH, ctx.ranges, ctx.scale, dout_RHd, dlse_RH)
        return *grads, None, None, None, None


def _checked_scale(q_RHd: Tensor, k_SGd: Tensor, v_SGd: Tensor, ranges: KeyRanges, scale: float | None) -> float:
    assert len(ranges) == len(q_RHd) and k_SGd.shape == v_SGd.shape, (q_RHd.shape, k_SGd.shape, v_SGd.shape)
    assert q_RHd.shape[1] % k_SGd.shape[1] == 0 and q_RHd.shape[2] == k_SGd.shape[2], (q_RHd.shape, k_SGd.shape)
    assert q_RHd.dtype == k_SGd.dtype == v_SGd.dtype, (q_RHd.dtype, k_SGd.dtype, v_SGd.dtype)
    return q_RHd.shape[-1] ** -0.5 if scale is None else scale


def ranged_attention_torch(
    q_RHd: Tensor, k_SGd: Tensor, v_SGd: Tensor, ranges: KeyRanges, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """As `ranged_attention`, in plain torch."""
    scale = _checked_scale(q_RHd, k_SGd, v_SGd, ranges, scale)
    return RangedAttentionFunction.apply(q_RHd, k_SGd, v_SGd, ranges, scale, forward_torch, backward_torch)


def ranged_attention(
    q_RHd: Tensor, k_SGd: Tensor, v_SGd: Tensor, ranges: KeyRanges, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Computes attention over each row's key range.

    Returns the output [R, H, d] and the log-sum-exp of each row [R, H] in fp32 (fp64 for fp64 inputs). Both are
    differentiable in q, k and v. A row without keys has output 0, lse -inf and no gradient. `scale` defaults to
    d ** -0.5. All ranges must lie within the keys, and all keys and values must be finite, visible or not.
    """
    if not supports_triton_float(q_RHd) or q_RHd.shape[-1] > _MAX_TRITON_WIDTH:
        return ranged_attention_torch(q_RHd, k_SGd, v_SGd, ranges, scale)
    from peagle.kernels.attention.ranged_triton import backward_triton, forward_triton

    scale = _checked_scale(q_RHd, k_SGd, v_SGd, ranges, scale)
    return RangedAttentionFunction.apply(q_RHd, k_SGd, v_SGd, ranges, scale, forward_triton, backward_triton)


class MergeAttnStatesFunction(torch.autograd.Function):
    """Merges two attention states with the given forward and backward functions."""

    @staticmethod
    def forward(
        ctx: Any,
        out_a: Tensor,
        lse_a: Tensor,
        out_b: Tensor,
        lse_b: Tensor,
        forward: Callable[..., tuple[Tensor, Tensor]],
        backward: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(out_a, lse_a, out_b, lse_b)
        ctx.backward_fn = backward
        return forward(out_a, lse_a, out_b, lse_b)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.backward_fn(*ctx.saved_tensors, dout, dlse), None, None


def merge_attn_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merges attention of the same rows over two disjoint sets of keys into attention over both. Differentiable.

    Takes and returns out [R, H, d] and lse [R, H] of `ranged_attention`. Rows without keys on both sides stay 0 and
    -inf.
    """
    assert out_a.shape == out_b.shape and lse_a.shape == lse_b.shape == out_a.shape[:2], (out_a.shape, out_b.shape)
    if not supports_triton_float(out_a) or not len(out_a):
        return MergeAttnStatesFunction.apply(out_a, lse_a, out_b, lse_b, merge_forward_torch, merge_backward_torch)
    from peagle.kernels.attention.merge_triton import merge_backward_triton, merge_forward_triton

    return MergeAttnStatesFunction.apply(out_a, lse_a, out_b, lse_b, merge_forward_triton, merge_backward_triton)
