"""The optimizer, AdamW or Muon on one flat buffer of a module's trainable parameters, and the learning rate.

Parameters become views of a flat `working` buffer, decayed ones first, so that copying, clipping, summing over ranks
and the AdamW update are one or two calls each. With Muon, the first parameters are the matrices it updates, and AdamW
updates the rest. Every rank updates on the same summed gradients.

- In bf16, updates apply to fp32 `masters`, which are rounded into `working` after every step.
- In fp32 and fp64, the working parameters are their own masters.
- Gradients accumulate in `grad`, in the precision of the masters: after each backward pass a parameter's `.grad` is
  added there and dropped, so the gradients of many small chunks are not rounded against their sum.

Worked example, a matrix A of 2 x 3 and a vector b of 2, slices aligned to 4 elements: A has elements 0 to 5 of the
decayed 0..8, b has 8 and 9 of the others 8..12. Padding is and stays zero.

Muon updates weight matrices along the orthogonalized momentum. For one matrix W [rows, cols] with gradient g and
momentum m:

    m <- 0.95 m + 0.05 g          u <- orthogonalize(0.05 g + 0.95 m)          Nesterov momentum
    W <- (1 - lr decay) W - lr 0.2 sqrt(max(rows, cols)) u

The factor gives updates about the root mean square of AdamW's (Moonshot's rule), so learning rate and weight decay
carry over. `orthogonalize` maps all singular values to roughly 1 with five Newton-Schulz steps. Matrices of one shape,
or of that shape transposed, are stacked: a few launches per drafter.

Worked example: q, k, v of 8, 4, 4 rows merged in one weight of 16 x 6, and a weight of 6 x 8. These are four matrices
in two stacks: q transposed and the last one, 6 x 8; k and v, 4 x 6.

Shapes: P elements of the flat buffer, A of them updated by AdamW, M by Muon; B matrices of r rows and c columns,
r <= c.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from peagle import config
from peagle.checkpoints.tensors import list_merged_tensors
from peagle.config import TrainConfig

ALIGNMENT = 64  # elements
ADAMW_EPS = 1e-8
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # coefficients of x, x^3, x^5
NEWTON_SCHULZ_STEPS = 5


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
        momentum_M.lerp_(grad_M, 1 - config.MUON_MOMENTUM)
        grad_M.lerp_(momentum_M, config.MUON_MOMENTUM)
        for (_, width), views in self.stacks.items():
            torch._foreach_copy_(views, list(orthogonalize(torch.stack(views), self.dtype)))
            torch._foreach_mul_(views, config.MUON_UPDATE_RMS * width**0.5)
        rate = lr * finite.to(masters_M.dtype)
        masters_M.mul_(1 - rate * self.weight_decay).addcmul_(grad_M, rate, value=-1)


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
        self.lr = torch.zeros((), dtype=torch.float32, device=device)

    def _create_muon(self, module: nn.Module, cfg: TrainConfig) -> Muon:
        own = [part for part in self.slices if is_layer_matrix(part.name, part.shape)]
        end = next((part.start for part in self.slices if part not in own), len(self.masters_P))
        matrices: list[Tensor] = []
        for part in own:
            rows = [rows for _, rows in list_merged_tensors(module, part.name, part.shape[0])]
            matrices += part.view(self.grad_P).split(rows)
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
        """Updates the parameters, clears the gradients and returns their norm on the device."""
        grad_P = self.collect()
        rate = self.lr.fill_(lr) if self.lr.is_cuda else lr
        norm = torch.linalg.vector_norm(grad_P)
        finite = norm.isfinite()
        grad_scale = (norm / self.max_grad_norm).clamp(min=1.0) if self.max_grad_norm else None  # a divisor
        if self.muon is not None:
            self.muon.step(rate, grad_scale, finite)
        self.num_steps += 1
        for (masters, grad, exp_avg, exp_avg_sq), weight_decay in self.groups:
            # the call behind torch.optim.AdamW(fused=True); found_inf skips the update
            torch._fused_adamw_(
                *([masters], [grad], [exp_avg], [exp_avg_sq], [], [self.num_steps]),
                lr=rate,
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


class Schedule:
    """Progress of a run and its learning rate.

    A run has a length in steps, in minutes, or both; its progress is the larger share. Decay follows the progress.
    Warm-up follows the steps, but takes at most a tenth of the run: of its steps, or of its minutes with at least 20
    steps. Everything depends only on the step, the seconds of training so far (over all resumes) and the length, so a
    resumed run has the learning rates of an uninterrupted one.

        warmup_steps 100   run of 1,000 steps or more: 100 steps   200 steps: 20   10 minutes: 100 steps or 1 minute

        cosine     decays from the start           trapezoid  constant until the last quarter, then linear
        linear     the same, linearly              constant   no decay
    """

    def __init__(self, cfg: TrainConfig, steps_per_epoch: float) -> None:
        self.cfg, steps, epochs = cfg, cfg.steps, cfg.epochs
        if steps is None and cfg.minutes is None and epochs is None:
            epochs = config.DEFAULT_EPOCHS
        if epochs is not None:
            epoch_steps = max(1, math.ceil(epochs * steps_per_epoch))
            steps = epoch_steps if steps is None else min(steps, epoch_steps)
        self.steps, self.max_warmup_steps = steps, cfg.warmup_steps
        if steps is not None:
            self.max_warmup_steps = min(cfg.warmup_steps, steps // config.WARMUP_DIVISOR)

    def progress(self, step: int, seconds: float) -> float:
        """0 at the start, 1 at the end."""
        shares = [step / self.steps] if self.steps is not None else []
        shares += [seconds / (60 * self.cfg.minutes)] if self.cfg.minutes is not None else []
        return min(1.0, max(shares))

    def learning_rate(self, step: int, progress: float) -> float:
        """Of step `step`, counted from 0."""
        by_steps = (step + 1) / max(self.max_warmup_steps, 1)
        # the first step compiles kernels and may take long, so time alone does not end the warm-up
        by_time = min(config.WARMUP_DIVISOR * progress, (step + 1) / config.MIN_WARMUP_STEPS)
        factor = {
            "constant": 1.0,
            "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
            "linear": 1 - progress,
            "trapezoid": min(1.0, (1 - progress) / config.TRAPEZOID_DECAY_FRACTION),
        }[self.cfg.lr_schedule]
        decayed = config.MIN_LR_RATIO + (1 - config.MIN_LR_RATIO) * factor
        return self.cfg.lr * min(1.0, max(by_steps, by_time)) * decayed
