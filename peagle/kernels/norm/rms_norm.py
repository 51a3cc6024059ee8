"""What stands around products: norms, alone or with a sum before them, and the gate of SwiGLU.

Each has a plain torch twin (`*_torch`), which every faster version is held against: Triton's (norms_triton.py), and
for training those of trained.py, with their way back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from peagle.kernels.norm.rms_norm_triton import (
    NORMED_AT_ONCE,
    add_rms_norm_triton,
    norm_cat_triton,
    rms_norm_triton,
    silu_mul_triton,
)
from peagle.kernels.triton_utils import supports_triton, supports_triton_autograd


@dataclass(frozen=True)
class ResidualStream:
    """The residual stream x, and what the product that wrote it already did for the norm that follows.

    With `squares` the next product needs no launch for its norm: it reads `scaled` and multiplies its rows by
    1 / rms at the end. With `normed` the norm came along with the sum. Without, it is taken of x, the plain way.
    """

    x: Tensor
    norm_weight: Tensor | None = None  # of that norm
    scaled: Tensor | None = None  # x * norm_weight
    squares: Tensor | None = None  # of x, summed over the columns of each program that wrote it: fp64 [programs, T]
    normed: Tensor | None = None  # the norm itself


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


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.dtype == torch.float32 and x.is_cpu and torch.is_inference_mode_enabled():
        return F.rms_norm(x, (x.shape[-1],), weight, eps)  # the twin's arithmetic, in one call
    if x.dim() == 2 and supports_triton_autograd(x, weight):
        from peagle.kernels.autograd import rms_norm_autograd

        return rms_norm_autograd(x, weight, eps)
    return (
        rms_norm_triton(x, weight, eps)
        if x.dim() == 2 and supports_triton(x, weight)
        else rms_norm_torch(x, weight, eps)
    )


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(norm of the sum, the sum)"""
    if x.dim() == 2 and supports_triton(x, residual, weight):
        return add_rms_norm_triton(x, residual, weight, eps)
    return add_rms_norm_torch(x, residual, weight, eps)


def norm_cat(parts: Sequence[Tensor], weights: Sequence[Tensor], eps: float) -> Tensor:
    """Each normed by itself, side by side, as one tensor."""
    if len(parts) in NORMED_AT_ONCE and parts[0].dim() == 2 and supports_triton(*parts, *weights):
        return norm_cat_triton(parts, weights, eps)
    return torch.cat([rms_norm(x, weight, eps) for x, weight in zip(parts, weights, strict=True)], -1)


def silu_mul(y_T2I: Tensor) -> Tensor:
    if y_T2I.dim() == 2 and supports_triton_autograd(y_T2I):
        from peagle.kernels.autograd import silu_mul_autograd

        return silu_mul_autograd(y_T2I)
    return silu_mul_triton(y_T2I) if y_T2I.dim() == 2 and supports_triton(y_T2I) else silu_mul_torch(y_T2I)
