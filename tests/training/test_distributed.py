"""Two gloo processes have the gradients of one, and bitwise equal drafters."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pairs
import pytest
import runs
import torch
from torch import Tensor

from peagle.errors import UserError
from peagle.training.distributed import DistributedContext, shard_target
from peagle.training.recipe import load_training_inputs
from peagle.training.resume import RunFolder

pytestmark = pytest.mark.usefixtures("one_thread")
STEPS = 3


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


def run_ranks(home: Path, name: str, ranks: int, *options: str, **settings: Any) -> list[str]:
    """Runs the ranks and returns their output. The run's folder is `home / name`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    recipe = runs.recipe(home, **{"steps": STEPS, "log_every": 2, **settings})
    processes = []
    for rank in range(ranks):
        env = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        processes.append(runs.start(recipe, home / name, *options, **env))
    ended = [process.wait() for process in processes]
    outputs = [process.stdout() + process.stderr() for process in processes]
    assert not any(ended), "\n".join(outputs)
    assert all('"finished": true' in text for text in outputs)
    assert "p-eagle for" in outputs[0] and all("p-eagle for" not in text for text in outputs[1:])
    return outputs


def train_with_gradients(home: Path, name: str, ranks: int, **settings: Any) -> list[dict[str, Tensor]]:
    """Returns for each rank the summed gradients of every step and the final weights."""
    run_ranks(home, name, ranks, "--gradients", str(home / f"{name}.grad"), **settings)
    return [torch.load(home / f"{name}.{rank}") for rank in range(ranks)]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        # started from a train_with_gradients drafter, so that there is something to accept
        {
            "shard_target": True,
            "optimizer": "muon",
            "gradient_accumulation_steps": 2,
            "validation_size": 4,
            "validation_every": 2,
            "validation_tokens": 20,
            "init": str(pairs.drafter_folder("p-eagle-1")),
            "fc_norm": False,
        },
    ],
    ids=["whole target, AdamW", "sharded target, Muon, two batches each"],
)
def test_two_ranks_equal_one(home: Path, settings: dict[str, Any]) -> None:
    name, each = "-".join(["two", *settings]), settings.get("gradient_accumulation_steps", 1)
    first, second = train_with_gradients(home, name, 2, **settings)
    (alone,) = train_with_gradients(
        home, f"{name}-alone", 1, **{**settings, "gradient_accumulation_steps": 2 * each, "shard_target": False}
    )
    assert torch.equal(first["gradients"], second["gradients"]) and torch.equal(first["weights"], second["weights"])
    assert alone["gradients"].shape == first["gradients"].shape == (STEPS, len(first["weights"]))
    for step, (got, want) in enumerate(zip(first["gradients"], alone["gradients"], strict=True)):
        largest = float(want.abs().max())
        assert largest > 0.01 and torch.allclose(got, want, rtol=1e-4, atol=1e-6 * largest), step
    lines, wanted = runs.lines(home / name), runs.lines(home / f"{name}-alone")
    for key in ("kind", "positions_by_depth", "tokens"):
        assert [line.get(key) for line in lines] == [line.get(key) for line in wanted]
    for key in ("loss", "acceptance_length", "acceptance_rates"):
        got, want = ([line[key] for line in some if key in line] for some in (lines, wanted))
        assert got == (pytest.approx(want, rel=1e-5) if key == "loss" else want)
    lengths = [line["acceptance_length"] for line in lines if line["kind"] == "validation"]
    assert len(lengths) == (2 if "validation_size" in settings else 0) and all(1.3 < length < 4 for length in lengths)
    both = [RunFolder(home / folder).read_state() for folder in (name, f"{name}-alone")]
    assert both[0].cursor == both[1].cursor and both[0].batches == both[1].batches == 2 * each * STEPS
    assert both[0].best_step == both[1].best_step


def test_only_the_main_rank_fills_the_cache(home: Path) -> None:
    cache = str(home / "cache")
    first, second = run_ranks(home, "cached", 2, hidden_states_cache=cache, steps=1)
    assert "1 of 1 shards" in first and "cache" not in second
    (home / "cache" / "hidden-states-00000.safetensors").write_bytes(b"cut")
    first, second = run_ranks(home, "cached-again", 2, hidden_states_cache=cache, steps=1)
    assert "1 of 1 shards" in first and "cache" not in second


def test_target_too_large_to_gather_for_validation(home: Path) -> None:
    """The run continues without validation and prints the reason once."""
    outputs = run_ranks(home, "crowded", 2, "--room", str(4 << 30), shard_target=True, validation_size=4, steps=1)
    reason = "no validation, the newest drafter is published: the whole target (0.00 GB) does not fit one GPU"
    assert reason in outputs[0] and "validation" not in outputs[1]
    assert [line["kind"] for line in runs.lines(home / "crowded")] == ["step"]
    assert RunFolder(home / "crowded").read_state().best_step is None and (home / "crowded" / "config.json").exists()


def test_unsupported_combinations(home: Path) -> None:
    with pytest.raises(UserError, match="--shard-target: needs several processes"):
        shard_target(None, DistributedContext())  # type: ignore[arg-type]
    with pytest.raises(UserError, match="--hidden-states-cache kept: .* --shard-target"):
        load_training_inputs(runs.recipe(home, shard_target=True, hidden_states_cache="kept"))
