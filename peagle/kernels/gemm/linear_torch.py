"""Plain torch reference of the fused linear layer."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional as F

from peagle.kernels.norm.rms_norm_torch import rms_norm_torch, silu_mul_torch


def linear_torch(
    x_TK: Tensor,
    weight_NK: Tensor,
    bias: Tensor | None = None,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    glu: bool = False,
    residual: Tensor | None = None,
    norm: Callable[[Tensor, Tensor, float], Tensor] = rms_norm_torch,
    gate: Callable[[Tensor], Tensor] = silu_mul_torch,
) -> Tensor:
    """Computes `linear` (linear.py); `norm` and `gate` may be replaced by functions with a faster backward pass."""
    x = x_TK if norm_weight is None else norm(x_TK, norm_weight, eps)
    y = F.linear(x, weight_NK, bias)
    if glu:
        y = gate(y)
    return y if residual is None else residual + y
