"""Plain torch references of the norms and of SwiGLU's gate."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F


def rms_norm_torch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = x.float() if x.dtype != torch.float64 else x
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return weight * y.to(x.dtype)


def add_rms_norm_torch(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = residual + x
    return rms_norm_torch(total, weight, eps), total


def norm_cat_torch(parts: Sequence[Tensor], weights: Sequence[Tensor], eps: float) -> Tensor:
    return torch.cat([rms_norm_torch(x, weight, eps) for x, weight in zip(parts, weights, strict=True)], -1)


def silu_mul_torch(y_T2I: Tensor) -> Tensor:
    gate, up = y_T2I.chunk(2, -1)
    return F.silu(gate) * up
