"""Muon against singular values, and against a slow step of each map alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pairs
import pytest
import runs
import torch
from torch import Tensor

from peagle.config import TrainConfig
from peagle.errors import UserError
from peagle.models.drafter import Drafter
from peagle.training.optimizer import Optimizer, orthogonalize, stack_by_shape
from peagle.training.run import train

pytestmark = pytest.mark.usefixtures("one_thread")
SHAPES = [(1, 5), (3, 5), (16, 17), (64, 192), (40, 160), (100, 130)]
# every part that Muon and AdamW may get: two layers, a head, embeddings, norms, mask_hidden
CFG = replace(pairs.BASE, mask_token_id=pairs.MASK_ID, num_layers=2, own_head=True, own_embeddings=True, fc_norm=True)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")  # some CPUs have no fast bf16
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_singular_values_become_one(precision: torch.dtype) -> None:
    """They end between 0.68 and 1.14 for gradients of any scale."""
    rng = torch.Generator().manual_seed(0)
    for shape in SHAPES:
        x = torch.randn(4, *shape, generator=rng) * torch.tensor([1e-12, 1e-3, 1.0, 1e6])[:, None, None]
        values = torch.linalg.svdvals(orthogonalize(x, precision).float())
        assert 0.67 < values.min() and values.max() < 1.15, shape
    assert not orthogonalize(torch.zeros(1, 4, 6), precision).any()


def test_singular_vectors_stay() -> None:
    """Only singular values change, also in a square matrix with very small ones."""
    x = torch.randn(3, 20, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u, s, v = torch.linalg.svd(x)
    s = s / x.flatten(1).norm(dim=1, keepdim=True)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    assert torch.allclose(orthogonalize(x, torch.float64), u @ torch.diag_embed(s) @ v, atol=1e-10)


def test_stacks() -> None:
    """The example of the module's docstring."""
    qkv, other = torch.zeros(16, 6), torch.zeros(6, 8)
    stacks = stack_by_shape([*qkv.split([8, 4, 4]), other])
    assert {shape: len(views) for shape, views in stacks.items()} == {(6, 8): 2, (4, 6): 2}


# The step


def drafter(seed: int, dtype: torch.dtype = torch.float64) -> Drafter:
    torch.manual_seed(seed)
    module = Drafter(CFG).to(dtype)
    for p in module.parameters():
        torch.nn.init.normal_(p, std=0.1)
    return module


def put_gradients(module: Drafter, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    for p in module.parameters():
        p.grad = torch.randn(p.shape, generator=rng, dtype=torch.float64).to(p.dtype)


def reference_update(u: Tensor) -> Tensor:
    """Orthogonalizes one matrix without transposing it."""
    x = u / u.square().sum().sqrt()
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x - 4.7750 * a @ x + 2.0315 * a @ a @ x
    return 0.2 * max(u.shape) ** 0.5 * x


def matrices_of(name: str, matrix: Tensor) -> list[Tensor]:
    """Splits merged weights: 4 query heads of 32, 2 key and value heads, an MLP of 160."""
    if "qkv_proj" in name:
        return [matrix[:128], matrix[128:192], matrix[192:]]
    return [matrix[:160], matrix[160:]] if "gate_up_proj" in name else [matrix]


@pytest.mark.parametrize("clip", [0.0, 3.0])
def test_steps_equal_a_slow_reference(clip: float) -> None:
    ours, theirs = drafter(0), drafter(0)
    cfg = TrainConfig(optimizer="muon", max_grad_norm=clip, weight_decay=0.3, beta1=0.8, beta2=0.9)
    optimizer = Optimizer(ours, cfg)
    names = dict(theirs.named_parameters())
    kinds = ("fc.", "qkv_proj", "o_proj", "gate_up_proj", "down_proj")
    matrices = {n: p for n, p in names.items() if any(kind in n for kind in kinds)}
    assert len(matrices) == 9
    rest = [p for n, p in names.items() if n not in matrices and n != "lm_head.weight"]
    groups = [
        {"params": [names["lm_head.weight"]], "weight_decay": 0.3},
        {"params": rest, "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, betas=(0.8, 0.9))
    momentum = {name: torch.zeros_like(p) for name, p in matrices.items()}
    for step in range(4):
        lr = 0.1 / (step + 1)
        for module in (ours, theirs):
            put_gradients(module, step)
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), clip or torch.inf)
        assert torch.allclose(optimizer.step(lr), norm)
        for group in reference.param_groups:
            group["lr"] = lr
        reference.step()
        for name, p in matrices.items():
            assert p.grad is not None
            momentum[name] = 0.95 * momentum[name] + p.grad
            ahead = p.grad + 0.95 * momentum[name]
            direction = torch.cat([reference_update(u) for u in matrices_of(name, ahead)])
            p.data = p.data - lr * 0.3 * p.data - lr * direction
        for name, p in ours.named_parameters():
            near = 1e-9 if name in matrices and not clip else 1e-6  # torch clips a millionth more
            assert torch.allclose(p, names[name], rtol=near, atol=near * 1e-2), name
        assert not optimizer.grad_P.any()


def test_non_finite_gradients_change_nothing() -> None:
    """A non-finite gradient in any parameter skips the step of both optimizers."""
    module = drafter(0, torch.float32)
    optimizer = Optimizer(module, TrainConfig(optimizer="muon"))
    for place, value in (("fc", torch.inf), ("norm", torch.nan), (None, 0.0)):
        put_gradients(module, 0)
        before = {name: x.clone() for name, x in optimizer.state().items()}
        if place is not None:
            module.get_submodule(place).weight.grad.view(-1)[0] = value  # type: ignore[union-attr, operator]
        optimizer.step(1e-2)
        for name, x in optimizer.state().items():
            assert torch.equal(x, before[name]) == (place is not None), (place, name)


# The run


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


def test_saved_state_is_complete() -> None:
    """Steps after a restore are bitwise equal, in bf16 with fp32 masters."""
    cfg = TrainConfig(optimizer="muon")
    first, second = drafter(0, torch.bfloat16), drafter(1, torch.bfloat16)
    one, other = Optimizer(first, cfg), Optimizer(second, cfg)
    for step in range(3):
        put_gradients(first, step)
        one.step(1e-2)
    assert one.layout() == other.layout() and one.state()["momentum"].any()
    other.restore({name: x.clone() for name, x in one.state().items()}, 3)
    for step in range(3, 6):
        for module, optimizer in ((first, one), (second, other)):
            put_gradients(module, step)
            optimizer.step(1e-2)
        assert torch.equal(one.working_P, other.working_P)
        assert all(torch.equal(x, other.state()[name]) for name, x in one.state().items())


def test_run_resumes_exactly(home: Path) -> None:
    recipe = runs.recipe(home, optimizer="muon", steps=4)
    assert train(recipe, home / "straight", "cpu").finished
    assert not train(recipe, home / "paused", "cpu", stop_after=0.0).finished
    with pytest.raises(UserError, match="optimizer was muon, is adamw"):
        train(runs.recipe(home, steps=4), home / "paused", "cpu")
    assert train(recipe, home / "paused", "cpu").finished
    straight, paused = runs.saved(home / "straight"), runs.saved(home / "paused")
    assert straight.keys() == paused.keys() >= {"masters", "momentum"}
    assert all(torch.equal(x, paused[name]) for name, x in straight.items())


def test_loss_falls_faster_than_with_adamw(home: Path) -> None:
    """At the same learning rate, after the first steps."""

    def last_loss(optimizer: str) -> float:
        out = home / f"learns-{optimizer}"
        train(runs.recipe(home, optimizer=optimizer, steps=60, lr=5e-3, log_every=20, chunk_size="auto"), out, "cpu")
        return runs.lines(out)[-1]["loss"]

    assert last_loss("muon") < 0.97 * last_loss("adamw")
