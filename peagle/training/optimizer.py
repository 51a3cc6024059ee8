"""A module's trainable parameters as one flat buffer: exact gradients, fp32 masters, AdamW.

Knows nothing about losses, schedules or drafters. Parameters become pieces of a flat `working` buffer, decayed ones
first, so that copying, clipping, summing over ranks and AdamW's step are a call or two each, whatever the module.

- In bf16 AdamW works on fp32 `masters`, which are rounded into `working` after every step.
- In fp32 and fp64 the working parameters are their own masters.
- Gradients gather in `grad`, in the masters' precision: after each backward pass what lies in a parameter's `.grad`
  is added there and dropped, so that the many small gradients of a step's chunks are not rounded against their sum.

Worked example, a matrix A of 2 x 3 and a vector b of 2, pieces rounded up to 4 elements: A has places 0 to 5 of the
decayed 0..8, b has 8 and 9 of the others 8..12. Padding is zero and stays so.

Shapes: P places of the flat buffer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from peagle.config import TrainConfig

ALIGN = 64  # elements: pieces begin where every kernel can load fast
EPS = 1e-8  # AdamW's


@dataclass(frozen=True)
class Piece:
    """Where a parameter lies."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        return torch.Size(self.shape).numel()

    def of(self, flat_P: Tensor) -> Tensor:
        return flat_P[self.start : self.start + self.size].view(self.shape)


def is_decayed(name: str, shape: tuple[int, ...]) -> bool:
    """Matrices that multiply. Rows of an embedding are looked up, and one that is never met should not shrink."""
    return len(shape) == 2 and not name.startswith("embed_tokens.")


def lay_out(shapes: Iterable[tuple[str, tuple[int, ...]]], align: int = ALIGN) -> tuple[list[Piece], int, int]:
    """The pieces, decayed ones first; the places of those; the places of all."""
    shapes = list(shapes)
    pieces: list[Piece] = []
    place = boundary = 0
    for decayed in (True, False):
        for name, shape in shapes:
            if is_decayed(name, shape) == decayed:
                pieces.append(Piece(name, shape, place))
                place += -(-pieces[-1].size // align) * align
        if decayed:
            boundary = place
    return pieces, boundary, place


class Optimizer:
    """Takes a module's trainable parameters over: from then on they are views of `working_P`."""

    def __init__(self, module: nn.Module, cfg: TrainConfig) -> None:
        parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        assert parameters, "nothing to train"
        self.pieces, boundary, size = lay_out((name, tuple(p.shape)) for name, p in parameters.items())
        self.clip = cfg.clip
        first = next(iter(parameters.values()))
        kind, device = first.dtype, first.device
        exact = torch.float64 if kind == torch.float64 else torch.float32
        self.working_P = torch.zeros(size, dtype=kind, device=device)
        self.grad_P = torch.zeros(size, dtype=exact, device=device)
        for piece in self.pieces:
            parameter = parameters[piece.name]
            assert parameter.dtype == kind and parameter.device == device, piece.name
            piece.of(self.working_P).copy_(parameter.data)
            parameter.data = piece.of(self.working_P)
            parameter.register_post_accumulate_grad_hook(partial(_gather, into=piece.of(self.grad_P)))
        self._parameters = [(parameters[piece.name], piece.of(self.grad_P)) for piece in self.pieces]
        self.own_masters = kind == exact
        self.masters_P = self.working_P if self.own_masters else self.working_P.to(exact)
        self.exp_avg_P, self.exp_avg_sq_P = torch.zeros_like(self.masters_P), torch.zeros_like(self.masters_P)
        self.taken = torch.zeros((), dtype=torch.float32, device=device)  # steps
        self.parts = ((slice(0, boundary), cfg.weight_decay), (slice(boundary, size), 0.0))
        self.betas = (cfg.beta1, cfg.beta2)

    @torch.no_grad()
    def collect(self) -> Tensor:
        """All gradients since the last step; also those that were put into `.grad` without a backward pass."""
        for parameter, into in self._parameters:
            if parameter.grad is not None:
                _gather(parameter, into)
        return self.grad_P

    @torch.no_grad()
    def step(self, lr: float) -> Tensor:
        """One step on the collected gradients, which are gone then. Returns the length they had, on the device."""
        grad_P = self.collect()
        norm = torch.linalg.vector_norm(grad_P)
        wrong = (~norm.isfinite()).float()
        too_long = (norm / self.clip).clamp(min=1.0).float() if self.clip else None  # what gradients are divided by
        self.taken += 1
        for part, decay in self.parts:
            # what torch.optim.AdamW(fused=True) calls; a gradient that is not finite changes nothing
            torch._fused_adamw_(
                [self.masters_P[part]],
                [grad_P[part]],
                [self.exp_avg_P[part]],
                [self.exp_avg_sq_P[part]],
                [],
                [self.taken],
                lr=lr,
                beta1=self.betas[0],
                beta2=self.betas[1],
                weight_decay=decay,
                eps=EPS,
                amsgrad=False,
                maximize=False,
                grad_scale=too_long,
                found_inf=wrong,
            )
        if not self.own_masters:
            self.working_P.copy_(self.masters_P)
        grad_P.zero_()
        return norm

    def state(self) -> dict[str, Tensor]:
        """Everything a step depends on. The working parameters are the masters, rounded."""
        return {"masters": self.masters_P, "exp_avg": self.exp_avg_P, "exp_avg_sq": self.exp_avg_sq_P}

    @torch.no_grad()
    def restore(self, tensors: dict[str, Tensor], step: int) -> None:
        for name, into in self.state().items():
            into.copy_(tensors[name])
        self.taken.fill_(step)
        if not self.own_masters:
            self.working_P.copy_(self.masters_P)
        self.grad_P.zero_()

    def layout(self) -> list[list[object]]:
        """As JSON has it, to see that a saved state is this module's."""
        return [[piece.name, list(piece.shape), piece.start] for piece in self.pieces]


@torch.no_grad()
def _gather(parameter: Tensor, into: Tensor) -> None:
    assert parameter.grad is not None
    into.add_(parameter.grad)
    parameter.grad = None
