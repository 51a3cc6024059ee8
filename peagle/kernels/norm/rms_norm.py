"""The residual stream; RMS norms, alone, after an addition or several side by side; and SwiGLU's gate.

Each function picks its torch reference, the Triton kernel (rms_norm_triton.py) or, for training, the kernel with a
backward pass (peagle.kernels.autograd).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from peagle.kernels.norm.rms_norm_triton import add_rms_norm_triton, norm_cat_triton, rms_norm_triton, silu_mul_triton
from peagle.kernels.triton_utils import supports_triton, supports_triton_autograd


@dataclass(frozen=True)
class ResidualStream:
    """The residual stream x [T, D], and work already done for the norm that follows.

    A GEMM that writes x can prepare the next norm. With `squares`, the next GEMM needs no norm launch: it reads
    `scaled` and multiplies its output rows by 1 / rms. With `normed`, the norm itself is already computed. Without
    either, the norm is computed from x.
    """

    x: Tensor
    norm_weight: Tensor | None = None  # weight of the norm that was prepared
    scaled: Tensor | None = None  # x * norm_weight
    squares: Tensor | None = None  # fp64 [programs, T]: sums of squares of x over the columns of each program
    normed: Tensor | None = None  # norm(x)


def rms_norm_torch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = x.float() if x.dtype != torch.float64 else x
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return weight * y.to(x.dtype)


def silu_mul_torch(y_T2I: Tensor) -> Tensor:
    gate, up = y_T2I.chunk(2, -1)
    return F.silu(gate) * up


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Computes weight * x / rms(x) over the last dimension."""
    if x.dtype == torch.float32 and x.is_cpu and torch.is_inference_mode_enabled():
        return F.rms_norm(x, (x.shape[-1],), weight, eps)  # the reference's arithmetic in one call
    if x.dim() == 2 and supports_triton_autograd(x, weight):
        from peagle.kernels.autograd import RMSNormFunction

        return RMSNormFunction.apply(x, weight, eps)
    if x.dim() == 2 and supports_triton(x, weight):
        return rms_norm_triton(x, weight, eps)
    return rms_norm_torch(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns the norm of residual + x, and the sum."""
    if x.dim() == 2 and supports_triton(x, residual, weight):
        return add_rms_norm_triton(x, residual, weight, eps)
    total = residual + x
    return rms_norm_torch(total, weight, eps), total


def norm_cat(parts: Sequence[Tensor], weights: Sequence[Tensor], eps: float) -> Tensor:
    """Norms each part with its own weight and concatenates the results."""
    if parts[0].dim() == 2 and supports_triton(*parts, *weights):
        return norm_cat_triton(parts, weights, eps)
    return torch.cat([rms_norm(x, weight, eps) for x, weight in zip(parts, weights, strict=True)], -1)


def silu_mul(y_T2I: Tensor) -> Tensor:
    """Computes silu(gate) * up; columns are all gates, then all ups."""
    if y_T2I.dim() == 2 and supports_triton_autograd(y_T2I):
        from peagle.kernels.autograd import SiluMulFunction

        return SiluMulFunction.apply(y_T2I)
    return silu_mul_triton(y_T2I) if y_T2I.dim() == 2 and supports_triton(y_T2I) else silu_mul_torch(y_T2I)
