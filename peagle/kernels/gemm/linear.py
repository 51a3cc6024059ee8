"""Linear layers of few rows, with what stands around them: norm before, SwiGLU, bias and residual after.

Decoding reads every weight once for a handful of rows, so a product costs what streaming its weights costs. The
Triton product (linear_triton.py) takes up to `skinny_rows` of a shape (linear_shapes.py); more rows go to cuBLAS with
single-launch kernels around it (norms.py), and fp32, fp64 and training go to the plain torch twins (`*_torch`), which
every faster version is held against. The CPU, in inference mode, has versions of fewer operations, and products of few
rows in the way that measured fastest there (linear_cpu.py).

A row's result depends neither on the other rows nor on their number, up to MAX_TILED_ROWS rows for small shapes, and on
either side of few rows for large ones. Weights are the left operand of every product and rows the right one, so however
many rows there are, each output sums the same products in the same order by the same instruction: 16 of K at a time,
one after another, whatever stages, warps and tiles are. That takes two configurations to be of one `kind`: both without
a split of K, or the same one (parts are summed in order), both below 64 columns (mma.sync) or not (wgmma), and the same
`chains`. Small shapes have several: an instruction waits for the last one on its sum, so steps of block_k go to some
sums in turns, which are added up in the end. With one chain block_k is free too.
Sums of squares are taken in fp64, where their order does not show, so 1 / rms is the same by every kernel here.

Large shapes whose two configurations differ in kind: (4096, 4096) and (4096, 14336), as o and down of 8 billion
parameters. Those of more rows are split, since 32 columns without a split would read x twice as often as 64; so such a
model's text may change where a round goes from few rows to more. More than `skinny_rows` go to cuBLAS, with a
norm that is rounded before the product: other bits again.

The norm before a product costs no launch where a product wrote its input (`linear_residual`): that one knows the rows.

Shapes: T rows, K input width, N output width (twice the result's width for a gated product), I half of such an N.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from peagle.kernels.gemm.linear_cpu import linear_cpu
from peagle.kernels.gemm.linear_triton import linear_residual_triton, linear_triton
from peagle.kernels.gemm.tile_configs import skinny_rows
from peagle.kernels.norm.rms_norm import (
    ResidualStream,
    add_rms_norm,
    rms_norm,
    rms_norm_torch,
    silu_mul,
    silu_mul_torch,
)
from peagle.kernels.triton_utils import supports_triton, supports_triton_autograd


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
    """`norm` and `gate` may be others that compute the same: those that training has fast ways back for."""
    x = x_TK if norm_weight is None else norm(x_TK, norm_weight, eps)
    y = F.linear(x, weight_NK, bias)
    if glu:
        y = gate(y)
    return y if residual is None else residual + y


def linear_cublas(
    x_TK: Tensor,
    weight_NK: Tensor,
    bias: Tensor | None = None,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    glu: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """The library's product, with one launch before and at most one after it."""
    x = x_TK if norm_weight is None else rms_norm(x_TK, norm_weight, eps)
    if residual is not None and bias is None and not glu:
        return torch.addmm(residual, x, weight_NK.t())
    y = F.linear(x, weight_NK, bias)
    if glu:
        y = silu_mul(y)
    return y if residual is None else y.add_(residual)


def linear(
    x: Tensor | ResidualStream,
    weight_NK: Tensor,
    bias: Tensor | None = None,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    glu: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """residual + glu(norm(x) @ weight^T + bias), each part only where asked for; [T, N], or [T, N/2] with a gate.

    Weight rows of a gated product: all gates, then all ups.
    """
    if isinstance(x, ResidualStream) and x.normed is not None and x.norm_weight is norm_weight:
        x, norm_weight = x.normed, None
    plain = x.x if isinstance(x, ResidualStream) else x
    options: dict[str, Any] = {"norm_weight": norm_weight, "eps": eps, "glu": glu, "residual": residual}
    if not _fast_product(plain, weight_NK, bias, norm_weight, residual):
        if plain.is_cpu and torch.is_inference_mode_enabled():
            return linear_cpu(plain, weight_NK, bias, **options)
        if plain.dim() == 2 and supports_triton_autograd(plain, weight_NK, bias, norm_weight, residual):
            return linear_torch(plain, weight_NK, bias, **options, norm=rms_norm, gate=silu_mul)
        return linear_torch(plain, weight_NK, bias, **options)
    N, K = weight_NK.shape
    if len(plain) <= skinny_rows(N, K, glu):
        return linear_triton(x, weight_NK, bias, **options)
    return linear_cublas(plain, weight_NK, bias, **options)


def linear_residual(
    residual: Tensor,
    x: Tensor,
    weight_NK: Tensor,
    bias: Tensor | None = None,
    *,
    next_norm: Tensor | None = None,
    eps: float = 0.0,
) -> ResidualStream:
    """The residual stream with a product added to it; `next_norm` and `eps` are those of the norm that will read it."""
    N, K = weight_NK.shape
    if next_norm is not None and _fast_product(x, weight_NK, bias, next_norm, residual):
        if len(x) > skinny_rows(N, K, False):
            # One launch for sum and norm; cuBLAS would first copy the residual to where it adds to it.
            normed, total = add_rms_norm(F.linear(x, weight_NK, bias), residual, next_norm, eps)
            return ResidualStream(total, next_norm, normed=normed)
        if x.dtype == torch.bfloat16:  # fp16 could overflow in x * weight, where the norm's own order would not
            return linear_residual_triton(x, weight_NK, bias, residual=residual, next_norm=next_norm)
    return ResidualStream(linear(x, weight_NK, bias, residual=residual))


def _fast_product(x: Tensor, weight_NK: Tensor, *others: Tensor | None) -> bool:
    return x.dim() == 2 and weight_NK.is_contiguous() and supports_triton(x, weight_NK, *others)
