"""A plan's numbers against modules and batches that are really there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pairs
import pytest
import runs
import torch

from peagle.config import TrainConfig
from peagle.data.batches import batches
from peagle.data.dataset import load_responses
from peagle.training import resource_plan as plan
from peagle.training.cod_sampling import sample_cod_positions, sampling_generator
from peagle.training.optimizer import ALIGN, Optimizer
from peagle.training.run import dry_run

pytestmark = pytest.mark.usefixtures("one_thread")


def test_plan_counts_what_there_is(tmp_path: Path) -> None:
    """Parameters of real modules, rows of real batches."""
    for name in pairs.RECIPES:
        target, drafter = pairs.load_pair(name)
        assert plan.trainable(drafter.cfg) == sum(p.numel() for p in drafter.parameters()), name
    assert plan.decoder_parameters(target.cfg) == sum(p.numel() for p in target.parameters())

    recipe = runs.recipe(tmp_path, depths=3, rate=0.5, batch_tokens=2000, steps=10)
    made = dry_run(recipe, tmp_path / "planned", "cpu", known_rate=1000.0)
    rows = load_responses(recipe.data, None, pairs.VOCAB)
    batch, _ = next(batches(rows, 10_000, max_length=64))
    drawn = sample_cod_positions(batch, 3, 0.5, sampling_generator(0, 0))
    for planned, real in zip(made.rows_by_depth, drawn.counts, strict=True):
        assert planned / 2000 == pytest.approx(real / len(batch), rel=0.1)
    assert made.seconds == 10 * 2000 / 1000.0 and made.tokens_per_step == 2000
    assert not (tmp_path / "planned").exists()
    text = made.text()
    for word in ("trained", "by depth", "GFLOP", "GiB", "steps an epoch", "tokens/s"):
        assert word in text


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_plan_counts_the_optimizers_state(kind: Any, dtype: torch.dtype) -> None:
    """Of real optimizers, whose pieces are padded: to no more than the next multiple."""
    cfg = TrainConfig(optimizer=kind)
    for name in pairs.RECIPES:
        drafter = pairs.load_pair(name)[1].to(dtype).requires_grad_(True)
        made = Optimizer(drafter, cfg)
        state = [made.grad_P, *made.state().values()]
        taken = sum(x.nbytes for x in state if x is not made.working_P)
        planned = plan.state_bytes(cfg, drafter.cfg, dtype.itemsize)
        unaligned = sum(piece.size % ALIGN > 0 for piece in made.pieces)
        assert planned <= taken <= planned + 4 * 8 * ALIGN * unaligned, name
        assert unaligned == 0 or name == "p-eagle-1-wide"  # so the others are counted to the byte


def test_plan_example() -> None:
    """The example of the module's docstring."""
    cfg = TrainConfig(rate=0.5, depths=3)
    assert 8 * (1 + plan.chain_rows(cfg, 0.5)) == 11
    assert 8 * (0.5 + plan.chain_rows(cfg, 0.5)) == 7
