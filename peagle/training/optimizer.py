"""AdamW or Muon on one flat buffer of a module's trainable parameters.

Parameters become views of a flat `working` buffer, decayed ones first, so that copying, clipping, summing over ranks
and the AdamW update are one or two calls each. With Muon, the first parameters are the matrices it updates, and AdamW
updates the rest.

- In bf16, updates apply to fp32 `masters`, which are rounded into `working` after every step.
- In fp32 and fp64, the working parameters are their own masters.
- Gradients accumulate in `grad`, in the precision of the masters: after each backward pass a parameter's `.grad` is
  added there and dropped, so the gradients of many small chunks are not rounded against their sum.

Worked example, a matrix A of 2 x 3 and a vector b of 2, slices aligned to 4 elements: A has elements 0 to 5 of the
decayed 0..8, b has 8 and 9 of the others 8..12. Padding is and stays zero.

Shapes: P elements of the flat buffer, A of them updated by AdamW.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from peagle.config import TrainConfig
from peagle.training.muon import Muon, merged_row_counts

ALIGNMENT = 64  # elements
ADAMW_EPS = 1e-8
WARMUP_STEPS = 2  # eager steps before the update is captured


@dataclass(frozen=True)
class ParameterSlice:
    """Location of a parameter in the flat buffer."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        return torch.Size(self.shape).numel()

    def view(self, flat_P: Tensor) -> Tensor:
        return flat_P[self.start : self.start + self.size].view(self.shape)


def is_decayed(name: str, shape: tuple[int, ...]) -> bool:
    """True for weight matrices. Embedding rows of tokens that do not occur must not shrink."""
    return len(shape) == 2 and not name.startswith("embed_tokens.")


def is_layer_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """True for matrices from hidden states to hidden states, which Muon updates. The LM head has a row per token."""
    return is_decayed(name, shape) and not name.startswith("lm_head.")


def plan_flat_buffer(
    shapes: Iterable[tuple[str, tuple[int, ...]]], alignment: int = ALIGNMENT
) -> tuple[list[ParameterSlice], int]:
    """Slices in order (layer matrices, other decayed parameters, the rest) and the size of the buffer."""
    shapes = sorted(shapes, key=lambda named: not is_layer_matrix(*named))
    slices: list[ParameterSlice] = []
    start = 0
    for decayed in (True, False):
        for name, shape in shapes:
            if is_decayed(name, shape) == decayed:
                slices.append(ParameterSlice(name, shape, start))
                start += -(-slices[-1].size // alignment) * alignment
    return slices, start


def optimizer_bytes(module: nn.Module, cfg: TrainConfig) -> int:
    """Bytes of masters, gradients and moments, before padding. From fp32 up, parameters are their masters. AdamW has
    two moments, Muon one."""
    total = 0
    for name, parameter in module.named_parameters():
        exact = max(parameter.element_size(), 4)
        uses_muon = cfg.optimizer == "muon" and is_layer_matrix(name, tuple(parameter.shape))
        copies = (parameter.element_size() < exact) + 1 + (1 if uses_muon else 2)
        total += exact * copies * parameter.numel()
    return total


class Optimizer:
    """Takes over a module's trainable parameters: they become views of `working_P`."""

    def __init__(self, module: nn.Module, cfg: TrainConfig) -> None:
        parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        assert parameters, "nothing to train"
        self.slices, size = plan_flat_buffer((name, tuple(p.shape)) for name, p in parameters.items())
        self.max_grad_norm = cfg.max_grad_norm
        first = next(iter(parameters.values()))
        dtype, device = first.dtype, first.device
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        self.working_P = torch.zeros(size, dtype=dtype, device=device)
        self.grad_P = torch.zeros(size, dtype=exact, device=device)
        for part in self.slices:
            parameter = parameters[part.name]
            assert parameter.dtype == dtype and parameter.device == device, part.name
            part.view(self.working_P).copy_(parameter.data)
            parameter.data = part.view(self.working_P)
            parameter.register_post_accumulate_grad_hook(partial(_move_gradient, into=part.view(self.grad_P)))
        self._parameters = [(parameters[part.name], part.view(self.grad_P)) for part in self.slices]
        self.own_masters = dtype == exact
        self.masters_P = self.working_P if self.own_masters else self.working_P.to(exact)
        self.muon = self._create_muon(module, cfg) if cfg.optimizer == "muon" else None
        begin = 0 if self.muon is None else len(self.muon.momentum_M)
        self.exp_avg_A, self.exp_avg_sq_A = (torch.zeros_like(self.masters_P[begin:]) for _ in range(2))
        self.num_steps = torch.zeros((), dtype=torch.float32, device=device)
        # AdamW updates the decayed parameters and the others separately
        split = next((part.start for part in self.slices if not is_decayed(part.name, part.shape)), size)
        self.groups = []
        for start, end, decay in ((begin, split, cfg.weight_decay), (split, size, 0.0)):
            if start < end:
                own, moments = slice(start, end), slice(start - begin, end - begin)
                views = (self.masters_P[own], self.grad_P[own], self.exp_avg_A[moments], self.exp_avg_sq_A[moments])
                self.groups.append((views, decay))
        self.betas = (cfg.beta1, cfg.beta2)
        self.lr = torch.zeros((), dtype=torch.float32, device=device)  # read by the captured step
        self.graph: torch.cuda.CUDAGraph | None = None
        self.num_eager_steps = 0

    def _create_muon(self, module: nn.Module, cfg: TrainConfig) -> Muon:
        own = [part for part in self.slices if is_layer_matrix(part.name, part.shape)]
        end = next((part.start for part in self.slices if part not in own), len(self.masters_P))
        merged = merged_row_counts(module)
        matrices = [x for p in own for x in p.view(self.grad_P).split(merged.get(p.name, p.shape[0]))]
        return Muon(self.masters_P[:end], self.grad_P[:end], matrices, cfg.weight_decay)

    @torch.no_grad()
    def collect(self) -> Tensor:
        """All gradients since the last step, including those put into `.grad` without a backward pass."""
        for parameter, into in self._parameters:
            if parameter.grad is not None:
                _move_gradient(parameter, into)
        return self.grad_P

    @torch.no_grad()
    def step(self, lr: float) -> Tensor:
        """Updates the parameters, clears the gradients and returns their norm on the device.

        On a GPU the third step is captured as a CUDA graph; then the next step overwrites the returned norm.
        """
        self.collect()
        if not self.lr.is_cuda:
            return self._step(lr)
        self.lr.fill_(lr)
        if self.graph is None:
            self.num_eager_steps += 1
            if self.num_eager_steps <= WARMUP_STEPS or torch.cuda.current_stream() == torch.cuda.default_stream():
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
        grad_scale = (norm / self.max_grad_norm).clamp(min=1.0) if self.max_grad_norm else None  # a divisor
        if self.muon is not None:
            self.muon.step(lr, grad_scale, finite)
        self.num_steps += 1
        for (masters, grad, exp_avg, exp_avg_sq), weight_decay in self.groups:
            # the call behind torch.optim.AdamW(fused=True); found_inf skips the update
            torch._fused_adamw_(
                [masters],
                [grad],
                [exp_avg],
                [exp_avg_sq],
                [],
                [self.num_steps],
                lr=lr,
                beta1=self.betas[0],
                beta2=self.betas[1],
                weight_decay=weight_decay,
                eps=ADAMW_EPS,
                amsgrad=False,
                maximize=False,
                grad_scale=None if grad_scale is None else grad_scale.float(),
                found_inf=(~finite).float(),
            )
        if not self.own_masters:
            self.working_P.copy_(self.masters_P)
        grad_P.zero_()
        return norm

    def state(self) -> dict[str, Tensor]:
        """The tensors to save. The working parameters follow from the masters."""
        muon = {"momentum": self.muon.momentum_M} if self.muon is not None else {}
        return {"masters": self.masters_P, "exp_avg": self.exp_avg_A, "exp_avg_sq": self.exp_avg_sq_A, **muon}

    @torch.no_grad()
    def restore(self, tensors: dict[str, Tensor], step: int) -> None:
        for name, into in self.state().items():
            into.copy_(tensors[name])
        self.num_steps.fill_(step)
        if not self.own_masters:
            self.working_P.copy_(self.masters_P)
        self.grad_P.zero_()

    def layout(self) -> list[list[object]]:
        """Names, shapes and starts as JSON, to check that a saved state fits this module."""
        return [[part.name, list(part.shape), part.start] for part in self.slices]


@torch.no_grad()
def _move_gradient(parameter: Tensor, into: Tensor) -> None:
    assert parameter.grad is not None
    into.add_(parameter.grad)
    parameter.grad = None
