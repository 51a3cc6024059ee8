"""Muon: matrices step along their momentum's nearest orthogonal matrix, so no direction of a map is left behind.

Knows which of the layers' matrices are several maps in one, and nothing else about them; nor about schedules or
files. Works in place on pieces of flat buffers, and every rank does the same on the same sums, so none has to tell
another. A step of one map W with rows x cols, gradient g and momentum m:

    m <- 0.95 m + 0.05 g          u <- orthogonalised(0.05 g + 0.95 m)          Nesterov's
    W <- (1 - lr decay) W - lr 0.2 sqrt(max(rows, cols)) u

The factor makes steps about as long as AdamW's (Moonshot's rule), so that learning rate and decay carry over.
`orthogonalised` makes all singular values roughly 1, by five steps of Newton and Schulz with a quintic whose slope at
0 is steep. Maps of one shape, or of one shape turned over, go through it as one stack: a few launches for a module.

Worked example: q, k, v of 8, 4, 4 rows in one matrix of 16 x 6, and a matrix of 6 x 8. They are four maps in two
stacks: q turned over and the last, 6 x 8; k and v, 4 x 6.

Shapes: M places of a flat buffer, B maps of r rows and c columns, r <= c.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from peagle.config import MUON_MOMENTUM, MUON_SCALE
from peagle.models.layers import MLP, Attention

QUINTIC = (3.4445, -4.7750, 2.0315)  # of x, x^3, x^5
STEPS = 5


def merged_rows(module: nn.Module) -> dict[str, list[int]]:
    """Rows of the maps that lie in one matrix, by the matrix's name; those that are one map are not in it."""
    rows = {}
    for name, part in module.named_modules():
        if isinstance(part, Attention):
            kv = part.kv_heads * part.head_dim
            rows[f"{name}.qkv_proj.weight"] = [part.heads * part.head_dim, kv, kv]
        elif isinstance(part, MLP):
            rows[f"{name}.gate_up_proj.weight"] = [part.gate_up_proj.out_features // 2] * 2
    return rows


def stacked(maps: Iterable[Tensor]) -> dict[tuple[int, int], list[Tensor]]:
    """By shape, each turned so that it is not higher than wide."""
    stacks: dict[tuple[int, int], list[Tensor]] = {}
    for x in maps:
        x = x if x.shape[0] <= x.shape[1] else x.mT
        stacks.setdefault((x.shape[0], x.shape[1]), []).append(x)
    return stacks


def orthogonalised(x_Brc: Tensor, precision: torch.dtype) -> Tensor:
    """U S V -> about U V. Zeros stay zeros."""
    a, b, c = QUINTIC
    norm_B11 = torch.linalg.vector_norm(x_Brc, dim=(1, 2), keepdim=True)  # at least the largest singular value
    x_Brc = (x_Brc / norm_B11.clamp(min=torch.finfo(norm_B11.dtype).tiny)).to(precision)
    for _ in range(STEPS):
        square_Brr = torch.bmm(x_Brc, x_Brc.mT)
        factor_Brr = torch.baddbmm(square_Brr, square_Brr, square_Brr, beta=b, alpha=c)
        x_Brc = torch.baddbmm(x_Brc, factor_Brr, x_Brc, beta=a)
    return x_Brc


class Muon:
    """Steps `masters_M`. `maps` are views of `grad_M`, which is used up."""

    def __init__(self, masters_M: Tensor, grad_M: Tensor, maps: Iterable[Tensor], weight_decay: float) -> None:
        self.masters_M, self.grad_M = masters_M, grad_M
        self.momentum_M = torch.zeros_like(masters_M)
        self.stacks = stacked(maps)
        self.weight_decay = weight_decay
        fast = grad_M.is_cuda and grad_M.dtype == torch.float32
        self.precision = torch.bfloat16 if fast else grad_M.dtype  # the result need not be exact

    def step(self, lr: float | Tensor, too_long: Tensor | None, finite: Tensor) -> None:
        """Gradients are divided by `too_long` first; those that are not `finite` change nothing. No host waits."""
        masters_M, grad_M, momentum_M = self.masters_M, self.grad_M, self.momentum_M
        if too_long is not None:
            grad_M.div_(too_long)
        torch.where(finite, grad_M, momentum_M, out=grad_M)  # the mean of the momentum and itself is what it was
        momentum_M.lerp_(grad_M, 1 - MUON_MOMENTUM)
        grad_M.lerp_(momentum_M, MUON_MOMENTUM)
        for (_, width), views in self.stacks.items():
            torch._foreach_copy_(views, list(orthogonalised(torch.stack(views), self.precision)))
            torch._foreach_mul_(views, MUON_SCALE * width**0.5)
        rate = lr * finite.to(masters_M.dtype)
        masters_M.mul_(1 - rate * self.weight_decay).addcmul_(grad_M, rate, value=-1)
