"""Plain torch attention over dense rows: the reference for all faster versions.

Shapes: T rows, S keys, H query heads, G key/value heads, d head width.
"""

from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from peagle.config import ChunkedAttention, Window

Position = TypeVar("Position", int, Tensor)


def first_visible_position(position: Position, window: Window) -> Position:
    """Returns the first position that a query at `position` sees. A sliding window may return a negative one."""
    if window is None:
        return position * 0
    if isinstance(window, ChunkedAttention):
        return position // window.chunk_size * window.chunk_size
    return position - window + 1


def causal_attention(
    layer: int, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, window: Window, sinks: Tensor | None = None
) -> Tensor:
    """Computes causal attention of one whole sequence without a cache."""
    del layer
    rows = torch.arange(len(q_THd), device=q_THd.device)
    visible_TT = None
    if window is not None or sinks is not None:
        visible_TT = (rows <= rows[:, None]) & (rows >= first_visible_position(rows, window)[:, None])
    if sinks is not None and visible_TT is not None:
        return sink_attention(q_THd, k_TGd, v_TGd, visible_TT, sinks)
    return masked_attention(q_THd, k_TGd, v_TGd, visible_TT)


def masked_attention(q_THd: Tensor, k_SGd: Tensor, v_SGd: Tensor, visible_TS: Tensor | None) -> Tensor:
    """Computes attention under a boolean mask; None means causal."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q_THd, k_SGd, v_SGd))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible_TS, is_causal=visible_TS is None, enable_gqa=True)
    return out[0].transpose(0, 1)


def sink_attention(q_THd: Tensor, k_SGd: Tensor, v_SGd: Tensor, visible_TS: Tensor, sinks_H: Tensor) -> Tensor:
    """Computes masked attention with attention sinks: one extra logit per head in the softmax, without a value."""
    exact = torch.float64 if q_THd.dtype == torch.float64 else torch.float32
    q, k, v = (x.to(exact).transpose(0, 1) for x in (q_THd, k_SGd, v_SGd))
    q = q.unflatten(0, (len(k), -1))  # [G, H / G, T, d]
    scores = (q @ k[:, None].mT * q.shape[-1] ** -0.5).masked_fill(~visible_TS, float("-inf"))
    sinks = sinks_H.to(exact).view(*q.shape[:2], 1, 1).expand(-1, -1, q.shape[2], -1)
    weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    return (weights @ v[:, None]).flatten(0, 1).transpose(0, 1).to(q_THd.dtype)


def apply_sinks(out_THd: Tensor, lse_TH: Tensor, sinks_H: Tensor) -> Tensor:
    """Adds attention sinks to a result that was computed without them, from its log-sum-exp."""
    return out_THd * torch.sigmoid(lse_TH - sinks_H.to(lse_TH.dtype))[..., None].to(out_THd.dtype)
