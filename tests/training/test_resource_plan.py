"""Numbers of a dry run against real modules, optimizers and batches."""

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
from peagle.training import parameter_counts, resource_plan
from peagle.training.cod_sampling import sample_cod_positions, sampling_generator
from peagle.training.optimizer import ALIGNMENT, Optimizer
from peagle.training.run import plan_drafter_config, plan_run

pytestmark = pytest.mark.usefixtures("one_thread")


def test_counts_equal_real_modules_and_batches(tmp_path: Path) -> None:
    """Parameters of real modules, positions of real batches."""
    for name in pairs.RECIPES:
        target, drafter = pairs.load_pair(name)
        assert parameter_counts.count_trainable_parameters(drafter.cfg) == sum(
            p.numel() for p in drafter.parameters()
        ), name
    assert parameter_counts.count_decoder_parameters(target.cfg) == sum(p.numel() for p in target.parameters())

    recipe = runs.recipe(tmp_path, num_depths=3, down_sample_ratio=0.5, batch_tokens=2000, steps=10)
    made = plan_run(recipe, tmp_path / "planned", "cpu", num_gpus=1, known_rate=1000.0)
    rows = load_responses(recipe.data, None, pairs.VOCAB)
    batch, _ = next(batches(rows, 10_000, max_seq_len=64))
    drawn = sample_cod_positions(batch, 3, 0.5, sampling_generator(0, 0))
    for planned, real in zip(made.positions_by_depth, drawn.counts, strict=True):
        assert planned / 2000 == pytest.approx(real / len(batch), rel=0.1)
    assert made.seconds == 10 * 2000 / 1000.0 and made.tokens_per_step == 2000
    assert not (tmp_path / "planned").exists()
    text = made.text()
    for word in ("trained", "by depth", "GFLOP", "GiB", "steps per epoch", "tokens/s"):
        assert word in text


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_optimizer_bytes_equal_real_optimizers(kind: Any, dtype: torch.dtype) -> None:
    """Up to the padding of the flat buffer."""
    cfg = TrainConfig(optimizer=kind)
    for name in pairs.RECIPES:
        drafter = pairs.load_pair(name)[1].to(dtype).requires_grad_(True)
        made = Optimizer(drafter, cfg)
        state = [made.grad_P, *made.state().values()]
        taken = sum(x.nbytes for x in state if x is not made.working_P)
        planned = resource_plan.optimizer_bytes(cfg, drafter.cfg, dtype.itemsize)
        unaligned = sum(piece.size % ALIGNMENT > 0 for piece in made.slices)
        assert planned <= taken <= planned + 4 * 8 * ALIGNMENT * unaligned, name
        assert unaligned == 0 or name == "p-eagle-1-wide"  # the others match to the byte


def test_docstring_example() -> None:
    cfg = TrainConfig(down_sample_ratio=0.5, num_depths=3)
    assert 8 * (1 + resource_plan._chain_positions_per_token(cfg, 0.5)) == 11
    assert 8 * (0.5 + resource_plan._chain_positions_per_token(cfg, 0.5)) == 7


def test_parts_of_a_plan_by_hand(tmp_path: Path) -> None:
    recipe = runs.recipe(tmp_path, vllm_hidden_states=str(tmp_path), init="random", steps=10)
    plan = plan_run(recipe, tmp_path / "planned", "cpu", num_gpus=4, known_rate=None)
    width = pairs.load_pair("p-eagle-1")[0].cfg.layer.hidden_size
    num_tokens = load_responses(recipe.data, None, pairs.VOCAB).num_tokens
    assert plan.disk["hidden states"] == num_tokens * 4 * width * 2  # three auxiliary layers and the final one, bf16
    assert plan.flops_per_token.target == 0 and plan.tokens_per_step == 4 * recipe.train.batch_tokens
    target = pairs.load_pair("p-eagle-1")[0].cfg
    assert plan.memory["target"] == 4 * parameter_counts.count_decoder_head(target)
    assert plan.as_json()["fits"] and plan.rate_source.startswith("assumes")


def test_sharding_divides_the_target() -> None:
    target = pairs.load_pair("p-eagle-1")[0].cfg
    cfg = TrainConfig(shard_target=True, init="random", validation_size=0)
    drafter = plan_drafter_config(cfg, target)
    stats = resource_plan.DatasetStats(1000, 0.5, 100.0)
    memory = resource_plan.memory_by_use(cfg, target, drafter, stats, 8, 2, 256)
    layers, head = parameter_counts.count_decoder_layers(target), parameter_counts.count_decoder_head(target)
    assert memory["target"] == pytest.approx(2 * (layers * (1 / 8 + 2 / target.num_layers) + head))
