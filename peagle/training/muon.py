"""Muon: updates weight matrices along the orthogonalized momentum.

For one matrix W [rows, cols] with gradient g and momentum m:

    m <- 0.95 m + 0.05 g          u <- orthogonalize(0.05 g + 0.95 m)          Nesterov momentum
    W <- (1 - lr decay) W - lr 0.2 sqrt(max(rows, cols)) u

The factor gives updates about the root mean square of AdamW's (Moonshot's rule), so learning rate and weight decay
carry over. `orthogonalize` maps all singular values to roughly 1 with five Newton-Schulz steps. Matrices of one shape,
or of that shape transposed, are stacked: a few launches per drafter. Every rank updates on the same summed gradients.

Worked example: q, k, v of 8, 4, 4 rows merged in one weight of 16 x 6, and a weight of 6 x 8. These are four matrices
in two stacks: q transposed and the last one, 6 x 8; k and v, 4 x 6.

Shapes: M elements of a flat buffer, B matrices of r rows and c columns, r <= c.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from peagle.config import MUON_MOMENTUM, MUON_UPDATE_RMS
from peagle.models.layers import MLP, Attention

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # coefficients of x, x^3, x^5
NEWTON_SCHULZ_STEPS = 5


def merged_row_counts(module: nn.Module) -> dict[str, list[int]]:
    """Rows of the matrices merged in one weight, by the weight's name."""
    rows = {}
    for name, part in module.named_modules():
        if isinstance(part, Attention):
            kv = part.kv_heads * part.head_dim
            rows[f"{name}.qkv_proj.weight"] = [part.heads * part.head_dim, kv, kv]
        elif isinstance(part, MLP):
            rows[f"{name}.gate_up_proj.weight"] = [part.gate_up_proj.out_features // 2] * 2
    return rows


def stack_by_shape(matrices: Iterable[Tensor]) -> dict[tuple[int, int], list[Tensor]]:
    """Groups matrices by shape, each transposed if it has more rows than columns."""
    stacks: dict[tuple[int, int], list[Tensor]] = {}
    for x in matrices:
        x = x if x.shape[0] <= x.shape[1] else x.mT
        stacks.setdefault((x.shape[0], x.shape[1]), []).append(x)
    return stacks


def orthogonalize(x_Brc: Tensor, dtype: torch.dtype) -> Tensor:
    """U S V -> about U V. Zeros stay zeros."""
    a, b, c = NEWTON_SCHULZ
    norm_B11 = torch.linalg.vector_norm(x_Brc, dim=(1, 2), keepdim=True)  # at least the largest singular value
    x_Brc = (x_Brc / norm_B11.clamp(min=torch.finfo(norm_B11.dtype).tiny)).to(dtype)
    for _ in range(NEWTON_SCHULZ_STEPS):
        square_Brr = torch.bmm(x_Brc, x_Brc.mT)
        factor_Brr = torch.baddbmm(square_Brr, square_Brr, square_Brr, beta=b, alpha=c)
        x_Brc = torch.baddbmm(x_Brc, factor_Brr, x_Brc, beta=a)
    return x_Brc


class Muon:
    """Updates `masters_M`. `matrices` are views of `grad_M`, which the step overwrites."""

    def __init__(self, masters_M: Tensor, grad_M: Tensor, matrices: Iterable[Tensor], weight_decay: float) -> None:
        self.masters_M, self.grad_M = masters_M, grad_M
        self.momentum_M = torch.zeros_like(masters_M)
        self.stacks = stack_by_shape(matrices)
        self.weight_decay = weight_decay
        use_bf16 = grad_M.is_cuda and grad_M.dtype == torch.float32
        self.dtype = torch.bfloat16 if use_bf16 else grad_M.dtype  # orthogonalization need not be exact

    def step(self, lr: float | Tensor, grad_scale: Tensor | None, finite: Tensor) -> None:
        """Divides the gradients by `grad_scale` first. Does nothing unless `finite`. Never waits for the device."""
        masters_M, grad_M, momentum_M = self.masters_M, self.grad_M, self.momentum_M
        if grad_scale is not None:
            grad_M.div_(grad_scale)
        torch.where(finite, grad_M, momentum_M, out=grad_M)  # averaging the momentum with itself keeps it
        momentum_M.lerp_(grad_M, 1 - MUON_MOMENTUM)
        grad_M.lerp_(momentum_M, MUON_MOMENTUM)
        for (_, width), views in self.stacks.items():
            torch._foreach_copy_(views, list(orthogonalize(torch.stack(views), self.dtype)))
            torch._foreach_mul_(views, MUON_UPDATE_RMS * width**0.5)
        rate = lr * finite.to(masters_M.dtype)
        masters_M.mul_(1 - rate * self.weight_decay).addcmul_(grad_M, rate, value=-1)
