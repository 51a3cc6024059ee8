"""A module's trainable parameters as one flat buffer: exact gradients, fp32 masters, AdamW or Muon.

Knows nothing about losses, schedules or drafters. Parameters become pieces of a flat `working` buffer, decayed ones
first, so that copying, clipping, summing over ranks and AdamW's step are a call or two each, whatever the module.
If Muon is asked for, the first pieces, which are the maps between hidden states, are its own and AdamW has the rest.

- In bf16 steps are taken on fp32 `masters`, which are rounded into `working` after every step.
- In fp32 and fp64 the working parameters are their own masters.
- Gradients gather in `grad`, in the masters' precision: after each backward pass what lies in a parameter's `.grad`
  is added there and dropped, so that the many small gradients of a step's chunks are not rounded against their sum.

Worked example, a matrix A of 2 x 3 and a vector b of 2, pieces rounded up to 4 elements: A has places 0 to 5 of the
decayed 0..8, b has 8 and 9 of the others 8..12. Padding is zero and stays so.

Shapes: P places of the flat buffer, A of them AdamW's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from peagle.config import TrainConfig
from peagle.training.muon import Muon, merged_rows

ALIGN = 64  # elements: pieces begin where every kernel can load fast
EPS = 1e-8  # AdamW's
WARM = 2  # steps before one is captured


@dataclass(frozen=True)
class ParameterSlice:
    """Where a parameter lies."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        return torch.Size(self.shape).numel()

    def of(self, flat_P: Tensor) -> Tensor:
        return flat_P[self.start : self.start + self.size].view(self.shape)


def is_table(name: str) -> bool:
    """A row of it for each token."""
    return name.startswith(("embed_tokens.", "lm_head."))


def is_decayed(name: str, shape: tuple[int, ...]) -> bool:
    """Matrices that multiply. Rows of an embedding are looked up, and one that is never met should not shrink."""
    return len(shape) == 2 and not name.startswith("embed_tokens.")


def is_map(name: str, shape: tuple[int, ...]) -> bool:
    """Matrices from hidden states to hidden states. A head's rows are tokens, each learnt from where it is met."""
    return is_decayed(name, shape) and not is_table(name)


def lay_out(shapes: Iterable[tuple[str, tuple[int, ...]]], align: int = ALIGN) -> tuple[list[ParameterSlice], int]:
    """The pieces, decayed ones first and of those maps first; the places of all."""
    shapes = sorted(shapes, key=lambda named: not is_map(*named))
    pieces: list[ParameterSlice] = []
    place = 0
    for decayed in (True, False):
        for name, shape in shapes:
            if is_decayed(name, shape) == decayed:
                pieces.append(ParameterSlice(name, shape, place))
                place += -(-pieces[-1].size // align) * align
    return pieces, place


class Optimizer:
    """Takes a module's trainable parameters over: from then on they are views of `working_P`."""

    def __init__(self, module: nn.Module, cfg: TrainConfig) -> None:
        parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        assert parameters, "nothing to train"
        self.pieces, size = lay_out((name, tuple(p.shape)) for name, p in parameters.items())
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
        self.muon = self._muon(module, cfg) if cfg.optimizer == "muon" else None
        first_place = 0 if self.muon is None else len(self.muon.momentum_M)
        self.exp_avg_A, self.exp_avg_sq_A = (torch.zeros_like(self.masters_P[first_place:]) for _ in range(2))
        self.taken = torch.zeros((), dtype=torch.float32, device=device)  # steps
        self.parts = []
        for start, end, decay, share in self._runs(first_place, cfg):
            own, moments = slice(start, end), slice(start - first_place, end - first_place)
            views = (self.masters_P[own], self.grad_P[own], self.exp_avg_A[moments], self.exp_avg_sq_A[moments])
            self.parts.append((views, decay, share))
        self.betas = (cfg.beta1, cfg.beta2)
        self.lr = torch.zeros((), dtype=torch.float32, device=device)  # on a GPU, where a captured step reads it
        self.graph: torch.cuda.CUDAGraph | None = None
        self.warm = 0

    def _runs(self, first_place: int, cfg: TrainConfig) -> list[tuple[int, int, float, float]]:
        """Of AdamW's places those side by side that are treated alike: from, to, decay, share of the rate."""
        runs: list[tuple[int, int, float, float]] = []
        ends = [piece.start for piece in self.pieces[1:]] + [len(self.masters_P)]
        for piece, end in zip(self.pieces, ends, strict=True):
            if piece.start < first_place:
                continue
            decay = cfg.weight_decay if is_decayed(piece.name, piece.shape) else 0.0
            how = (decay, cfg.table_share if is_table(piece.name) else 1.0)
            start = runs.pop()[0] if runs and runs[-1][2:] == how else piece.start
            runs.append((start, end, *how))
        return runs

    def _muon(self, module: nn.Module, cfg: TrainConfig) -> Muon:
        own = [piece for piece in self.pieces if is_map(piece.name, piece.shape)]
        places = next((p.start for p in self.pieces if p not in own), len(self.masters_P))
        merged = merged_rows(module)
        maps = [x for p in own for x in p.of(self.grad_P).split(merged.get(p.name, p.shape[0]))]
        return Muon(self.masters_P[:places], self.grad_P[:places], maps, cfg.weight_decay)

    @torch.no_grad()
    def collect(self) -> Tensor:
        """All gradients since the last step; also those that were put into `.grad` without a backward pass."""
        for parameter, into in self._parameters:
            if parameter.grad is not None:
                _gather(parameter, into)
        return self.grad_P

    @torch.no_grad()
    def step(self, lr: float) -> Tensor:
        """One step on the collected gradients, which are gone then. Returns the length they had, on the device.

        On a GPU it is captured when it comes for the third time, and the length lives until the next step.
        """
        self.collect()
        if not self.lr.is_cuda:
            return self._step(lr)
        self.lr.fill_(lr)
        if self.graph is None:
            self.warm += 1
            if self.warm <= WARM or torch.cuda.current_stream() == torch.cuda.default_stream():
                return self._step(self.lr)
            self.graph = torch.cuda.CUDAGraph()
            stream = torch.cuda.current_stream()
            with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
                self.norm = self._step(self.lr)
        self.graph.replay()
        return self.norm

    def _step(self, lr: float | Tensor) -> Tensor:
        grad_P = self.grad_P
        norm = torch.linalg.vector_norm(grad_P)
        finite = norm.isfinite()
        too_long = (norm / self.clip).clamp(min=1.0) if self.clip else None  # what gradients are divided by
        if self.muon is not None:
            self.muon.step(lr, too_long, finite)
        self.taken += 1
        for (masters, grad, exp_avg, exp_avg_sq), decay, share in self.parts:
            # what torch.optim.AdamW(fused=True) calls; a gradient that is not finite changes nothing
            torch._fused_adamw_(
                [masters],
                [grad],
                [exp_avg],
                [exp_avg_sq],
                [],
                [self.taken],
                lr=lr if share == 1.0 else lr * share,
                beta1=self.betas[0],
                beta2=self.betas[1],
                weight_decay=decay,
                eps=EPS,
                amsgrad=False,
                maximize=False,
                grad_scale=None if too_long is None else too_long.float(),
                found_inf=(~finite).float(),
            )
        if not self.own_masters:
            self.working_P.copy_(self.masters_P)
        grad_P.zero_()
        return norm

    def state(self) -> dict[str, Tensor]:
        """Everything a step depends on. The working parameters are the masters, rounded."""
        own = {"momentum": self.muon.momentum_M} if self.muon is not None else {}
        return {"masters": self.masters_P, "exp_avg": self.exp_avg_A, "exp_avg_sq": self.exp_avg_sq_A, **own}

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
