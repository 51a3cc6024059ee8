"""Linear layers, fused with the norm before them and SwiGLU, bias and residual after them.

Decoding reads every weight once for a handful of rows, so a GEMM costs what streaming its weights costs. The Triton
GEMM (linear_triton.py) takes up to `max_triton_rows` rows of a shape (tile_configs.py); more rows go to cuBLAS with
single-launch kernels around it. fp32, fp64 and training use the torch reference (linear_torch.py), and the CPU in
inference mode uses the faster of torch and a C kernel (`linear_cpu`).

Batch invariance. A row's result depends neither on the other rows nor on their number, up to MAX_TILED_ROWS rows of
small shapes; for large shapes this holds up to MAX_FEW_ROWS rows and, separately, beyond. Weights are the left operand
of every MMA and rows the right one, so each output adds the same products in the same order by the same instruction for
any number of rows: 16 columns of K at a time, whatever the stages, warps and tiles. Two configurations round alike if
their `rounding_kind` is equal: the same split of K (parts are added in order), the same instruction (mma.sync below 64
columns, wgmma otherwise), and the same accumulators. Small shapes use several accumulators in turn, because an MMA
waits for the previous one on the same accumulator; they are added at the end. With one accumulator block_k is free too.
Sums of squares are taken in fp64, so 1 / rms has the same bits in every kernel.

The two configurations of (4096, 4096) and (4096, 14336), o and down of an 8B model, differ in kind: for more rows they
are split, since 32 columns without a split would read x twice as often as 64. So the tokens of such a model may change
where a decode step goes from MAX_FEW_ROWS rows to more. cuBLAS reads a norm that is rounded first: other bits again.

fp8 weights have one scale per output row. The Triton GEMM converts them to the dtype of x as it loads them, so a decode
step reads half the bytes. More rows, at least MAX_SKINNY_ROWS, are quantized as well (`fp8_gemm`), which changes the
result by more than rounding.

Shapes: T rows, K input width, N output width (twice the result's width for a gated GEMM).
"""

from typing import Any

import torch
from torch import Tensor

from peagle.kernels.gemm.linear_torch import linear_cpu, linear_torch
from peagle.kernels.gemm.linear_triton import linear_residual_triton, linear_triton
from peagle.kernels.gemm.tile_configs import max_triton_rows
from peagle.kernels.norm.rms_norm import ResidualStream, add_rms_norm, rms_norm
from peagle.kernels.triton_utils import supports_triton


def linear(
    x: Tensor | ResidualStream,
    weight_NK: Tensor,
    bias: Tensor | None = None,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    glu: bool = False,
    residual: Tensor | None = None,
    weight_scale: Tensor | None = None,
) -> Tensor:
    """Computes residual + glu(norm(x) @ weight^T + bias), where each part is optional: [T, N], or [T, N/2] with glu.

    Weight rows of a gated GEMM are all gates, then all ups. `weight_scale` [N] scales the rows of an fp8 weight.
    """
    if isinstance(x, ResidualStream) and x.normed is not None and x.norm_weight is norm_weight:
        x, norm_weight = x.normed, None
    plain = x.x if isinstance(x, ResidualStream) else x
    options: dict[str, Any] = {"norm_weight": norm_weight, "eps": eps, "glu": glu, "residual": residual}
    if _supports_kernels(plain, weight_NK, weight_scale, bias, norm_weight, residual):
        N, K = weight_NK.shape
        if len(plain) <= max_triton_rows(N, K, glu, weight_scale is not None):
            return linear_triton(x, weight_NK, bias, weight_scale=weight_scale, **options)
        if weight_scale is None and residual is not None and bias is None and not glu:  # cuBLAS adds it
            normed = plain if norm_weight is None else rms_norm(plain, norm_weight, eps)
            return torch.addmm(residual, normed, weight_NK.t())
    elif plain.is_cpu and torch.is_inference_mode_enabled() and weight_scale is None:
        return linear_cpu(plain, weight_NK, bias, **options)
    return linear_torch(plain, weight_NK, bias, weight_scale=weight_scale, **options)


def linear_residual(
    residual: Tensor,
    x: Tensor,
    weight_NK: Tensor,
    bias: Tensor | None = None,
    *,
    next_norm: Tensor | None = None,
    eps: float = 0.0,
    weight_scale: Tensor | None = None,
) -> ResidualStream:
    """Adds a linear layer to the residual stream and prepares the norm that reads it next (`next_norm`, `eps`)."""
    if next_norm is not None and _supports_kernels(x, weight_NK, weight_scale, bias, next_norm, residual):
        N, K = weight_NK.shape
        if len(x) > max_triton_rows(N, K, False, weight_scale is not None):
            # One launch for sum and norm; cuBLAS would first copy the residual into its output.
            y = linear_torch(x, weight_NK, bias, weight_scale=weight_scale)
            normed, total = add_rms_norm(y, residual, next_norm, eps)
            return ResidualStream(total, next_norm, normed=normed)
        if x.dtype == torch.bfloat16:  # in fp16, x * weight could overflow where the norm would not
            options: dict[str, Any] = {"residual": residual, "next_norm": next_norm, "weight_scale": weight_scale}
            return linear_residual_triton(x, weight_NK, bias, **options)
    return ResidualStream(linear(x, weight_NK, bias, residual=residual, weight_scale=weight_scale))


def _supports_kernels(x: Tensor, weight_NK: Tensor, weight_scale: Tensor | None, *others: Tensor | None) -> bool:
    if weight_scale is None:
        others = (weight_NK, *others)
    return x.dim() == 2 and weight_NK.is_contiguous() and supports_triton(x, *others)
