"""Two gloo processes train what one does: the same gradients, and the same drafter on both, bit for bit."""

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
from peagle.training.resume import RunFolder
from peagle.training.run import load_training_inputs

pytestmark = pytest.mark.usefixtures("one_thread")
STEPS = 3


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


def together(home: Path, name: str, ranks: int, *options: str, **settings: Any) -> list[str]:
    """What the processes of a run said; its folder is `home / name`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    recipe = runs.recipe(home, **{"steps": STEPS, "log_every": 2, **settings})
    processes = []
    for rank in range(ranks):
        env = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        processes.append(runs.start(recipe, home / name, *options, **env))
    ended = [process.wait() for process in processes]
    said = [process.said() + process.complaints() for process in processes]
    assert not any(ended), "\n".join(said)
    assert all('"finished": true' in text for text in said)
    assert "p-eagle for" in said[0] and all("p-eagle for" not in text for text in said[1:])
    return said


def trained(home: Path, name: str, ranks: int, **settings: Any) -> list[dict[str, Tensor]]:
    """Of each rank the gradients of every step, after the sum, and the weights after the last."""
    together(home, name, ranks, "--gradients", str(home / f"{name}.grad"), **settings)
    return [torch.load(home / f"{name}.{rank}") for rank in range(ranks)]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        # started from a trained drafter, so that there is something to accept
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
def test_two_are_one(home: Path, settings: dict[str, Any]) -> None:
    name, each = "-".join(["two", *settings]), settings.get("gradient_accumulation_steps", 1)
    first, second = trained(home, name, 2, **settings)
    (alone,) = trained(
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


def test_one_fills_the_cache_and_the_other_reads_it(home: Path) -> None:
    cache = str(home / "cache")
    first, second = together(home, "cached", 2, hidden_states_cache=cache, steps=1)
    assert "1 of 1 shards" in first and "cache" not in second
    (home / "cache" / "hidden-states-00000.safetensors").write_bytes(b"cut")
    first, second = together(home, "cached-again", 2, hidden_states_cache=cache, steps=1)
    assert "1 of 1 shards" in first and "cache" not in second


def test_a_target_too_large_to_measure_with(home: Path) -> None:
    """The run goes on without, and says so once."""
    said = together(home, "crowded", 2, "--room", str(4 << 30), shard_target=True, validation_size=4, steps=1)
    told = "no validation, the newest drafter is published: the whole target (0.00 GB) does not fit one GPU"
    assert told in said[0] and "validation" not in said[1]
    assert [line["kind"] for line in runs.lines(home / "crowded")] == ["step"]
    assert RunFolder(home / "crowded").read_state().best_step is None and (home / "crowded" / "config.json").exists()


def test_what_cannot_be_shared(home: Path) -> None:
    with pytest.raises(UserError, match="--shard-target: needs several processes"):
        shard_target(None, DistributedContext())  # type: ignore[arg-type]
    with pytest.raises(UserError, match="--hidden-states-cache kept: .* --shard-target"):
        load_training_inputs(runs.recipe(home, shard_target=True, hidden_states_cache="kept"))
