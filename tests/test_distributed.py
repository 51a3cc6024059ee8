"""Two gloo processes train what one does: the same gradients, and the same drafter on both, bit for bit."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from torch import Tensor

from peagle.errors import UserError
from peagle.training.distributed import World, shard
from peagle.training.resume import RunFolder

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


def gradients(home: Path, name: str, ranks: int, **settings: Any) -> list[Tensor]:
    """Of every step, as each rank has them after the sum; the run's folder is `home / name`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    processes: list[subprocess.Popen[str]] = []
    for rank in range(ranks):
        env = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        recipe = runs.recipe(home, steps=3, log_every=2, **settings)
        processes.append(runs.start(recipe, home / name, "--gradients", str(home / f"{name}.grad"), **env))
    said = [process.communicate(timeout=300)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes), "\n".join(said)
    assert all('"finished": true' in text for text in said)
    assert "P-EAGLE for" in said[0] and all("P-EAGLE for" not in text for text in said[1:])
    return [torch.load(home / f"{name}.{rank}") for rank in range(ranks)]


@pytest.fixture(scope="module")
def alone(home: Path) -> Tensor:
    return gradients(home, "alone", 1, accumulate=2)[0]


@pytest.mark.parametrize("settings", [{}, {"shard_target": True}], ids=["whole target", "sharded target"])
def test_two_are_one(home: Path, alone: Tensor, settings: dict[str, Any]) -> None:
    name = "-".join(["two", *settings])
    first, second = gradients(home, name, 2, **settings)
    assert torch.equal(first, second)  # so AdamW, which is given nothing else, does the same on both
    assert alone.shape == first.shape == (3, first.shape[1]) and alone.abs().max() > 0.1
    for step in range(3):
        assert torch.allclose(first[step], alone[step], rtol=1e-4, atol=1e-6 * float(alone[step].abs().max())), step
    lines, want = runs.lines(home / name), runs.lines(home / "alone")
    assert [line["rows_by_depth"] for line in lines] == [line["rows_by_depth"] for line in want]
    assert [line["tokens"] for line in lines] == [line["tokens"] for line in want]
    assert [line["loss"] for line in lines] == pytest.approx([line["loss"] for line in want], rel=1e-5)
    both = [RunFolder(home / folder).standing() for folder in (name, "alone")]
    assert both[0].cursor == both[1].cursor and both[0].batches == both[1].batches == 6


def test_one_process_cannot_share(home: Path) -> None:
    with pytest.raises(UserError, match="--shard-target: there is one process"):
        shard(None, World())  # type: ignore[arg-type]
