"""Attention over dense rows: the plain torch version every faster one is held against.

Knows nothing about models or caches. Shapes: T rows, H heads, G key/value heads, d head width.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def causal_attention(layer: int, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, window: int | None) -> Tensor:
    """One sequence, whole, no cache: row i sees rows j <= i, and only i - j < window if there is one."""
    del layer
    rows = torch.arange(len(q_THd), device=q_THd.device)
    visible_TT = None
    if window is not None:
        behind = rows[:, None] - rows[None, :]
        visible_TT = (behind >= 0) & (behind < window)
    return masked_attention(q_THd, k_TGd, v_TGd, visible_TT)


def masked_attention(q_THd: Tensor, k_SGd: Tensor, v_SGd: Tensor, visible_TS: Tensor | None) -> Tensor:
    """Rows see what `visible` says; None means causal."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q_THd, k_SGd, v_SGd))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible_TS, is_causal=visible_TS is None, enable_gqa=True)
    return out[0].transpose(0, 1)
