"""Numbers of a dry run against real modules, optimizers and batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pairs
import pytest
import runs
import torch

from peagle.config import TrainConfig
from peagle.data.batches import load_responses
from peagle.models.decoder import Decoder
from peagle.models.drafter import Drafter
from peagle.training import memory
from peagle.training.optimizer import ALIGNMENT, Optimizer, optimizer_bytes

pytestmark = pytest.mark.usefixtures("one_thread")


def test_plan_of_a_run(tmp_path: Path) -> None:
    recipe = runs.recipe(tmp_path, num_depths=3, down_sample_ratio=0.5, batch_tokens=2000, steps=10)
    plan = memory.plan_run(recipe, tmp_path / "planned", "cpu", num_gpus=1, known_rate=1000.0)
    assert plan["seconds"] == 10 * 2000 / 1000.0 and plan["tokens_per_step"] == 2000 and plan["tokens_total"] == 20000
    target = pairs.load_pair("p-eagle-1")[0]
    assert plan["target_parameters"] == sum(p.numel() for p in target.parameters())
    assert plan["memory"]["target"] == sum(p.nbytes for p in target.parameters())
    assert not (tmp_path / "planned").exists()
    for word in ("trained", "GB", "steps per epoch", "tokens/s"):
        assert word in memory.format_plan(plan)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_optimizer_bytes_equal_real_optimizers(kind: Any, dtype: torch.dtype) -> None:
    """Up to the padding of the flat buffer."""
    cfg = TrainConfig(optimizer=kind)
    for name in pairs.RECIPES:
        drafter = pairs.load_pair(name)[1].to(dtype).requires_grad_(True)
        planned = optimizer_bytes(drafter, cfg)
        optimizer = Optimizer(drafter, cfg)
        state = [optimizer.grad_P, *optimizer.state().values()]
        allocated = sum(x.nbytes for x in state if x is not optimizer.working_P)
        unaligned = sum(part.size % ALIGNMENT > 0 for part in optimizer.slices)
        assert planned <= allocated <= planned + 4 * 8 * ALIGNMENT * unaligned, name
        assert unaligned == 0 or name == "p-eagle-1-wide"  # the others match to the byte


def test_docstring_example() -> None:
    cfg = TrainConfig(down_sample_ratio=0.5, num_depths=3)
    assert 8 * (1 + memory._chain_positions_per_token(cfg, 0.5)) == 11
    assert 8 * (0.5 + memory._chain_positions_per_token(cfg, 0.5)) == 7


def test_plan_with_stored_hidden_states(tmp_path: Path) -> None:
    recipe = runs.recipe(tmp_path, vllm_hidden_states=str(tmp_path), init="random", steps=10)
    plan = memory.plan_run(recipe, tmp_path / "planned", "cpu", num_gpus=4, known_rate=None)
    target = pairs.load_pair("p-eagle-1")[0]
    num_tokens = load_responses(recipe.data, None, pairs.VOCAB).num_tokens
    # three auxiliary layers and the final one, in bf16
    assert plan["disk"]["hidden states"] == num_tokens * 4 * target.cfg.layer.hidden_size * 2
    assert plan["tokens_per_step"] == 4 * recipe.train.batch_tokens and plan["tokens_per_second"] > 0
    head = (target.embed_tokens, target.norm, target.lm_head)
    assert plan["memory"]["target"] == sum(p.nbytes for part in head for p in part.parameters())
    assert plan["fits"]


def test_sharding_divides_the_target() -> None:
    target, drafter = Decoder(pairs.TARGET).bfloat16(), Drafter(pairs.BASE).bfloat16()
    cfg = TrainConfig(shard_target=True, init="random", validation_size=0)
    planned = memory.memory_by_use(cfg, target, drafter, response_share=0.5, num_gpus=8, free=None)
    layers = sum(p.nbytes for p in target.layers.parameters())
    head = sum(p.nbytes for p in target.parameters()) - layers
    assert planned["target"] == pytest.approx(layers * (1 / 8 + 2 / pairs.TARGET.num_layers) + head)
