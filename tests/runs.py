"""Small training runs for tests: a data file of the licence's text, a recipe, and a run in a process of its own.

python tests/runs.py RECIPE OUT [--slow SECONDS] [--hang-in-save STEP] [--gradients FILE] [--room BYTES]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import forks
import pairs
from safetensors.torch import load_file
from torch import Tensor

from peagle.training import resume
from peagle.training.recipe import Recipe, make_recipe
from peagle.training.run import train

LENGTH = 40


def target_folder(home: Path, tokenizer: bool = False) -> Path:
    folder = home / "target"
    if not folder.exists():
        shutil.copytree(pairs.target_folder(), folder)
        if tokenizer:
            from engines import write_tokenizer

            write_tokenizer(folder, pairs.VOCAB)
    return folder


def data_file(home: Path, rows: int = 48) -> Path:
    """Pieces of the text, of which the last two thirds are a response."""
    path = home / "responses.jsonl"
    step = (len(pairs.TEXT) - 2 * LENGTH) // rows
    with path.open("w") as file:
        for i in range(rows):
            ids = list(pairs.TEXT[i * step : i * step + LENGTH + i % 7])
            row = {"id": f"r{i}", "source": "text", "sample": 0, "token_ids": ids, "spans": [[LENGTH // 3, len(ids)]]}
            file.write(json.dumps(row) + "\n")
    return path


def recipe(home: Path, **settings: Any) -> Recipe:
    usual = {
        "num_layers": 1,
        "aux_layer_ids": (1, 2, 4),
        "mask_token": str(pairs.MASK_ID),
        "num_depths": 3,
        "batch_tokens": 96,
        "max_seq_len": 64,
        "steps": 20,
        "warmup_steps": 4,
        "validation_size": 0,
        "log_every": 3,
        "chunk_size": 16,
        "lr": 2e-3,
    }
    target, data = str(target_folder(home)), str(data_file(home))
    return make_recipe(None, {**usual, **settings, "target": target, "data": (data,)})


def start(made: Recipe, out: Path, *options: str, **env: str) -> forks.Process:
    """The run in a process of its own."""
    file = out.with_suffix(".toml")
    file.write_text(made.toml())
    return forks.Process(__file__, str(file), str(out), *options, env=env)


def saved(out: Path) -> dict[str, Tensor]:
    """The tensors of the newest state."""
    newest = resume.RunFolder(out).newest_state()
    assert newest is not None
    return load_file(newest / "model.safetensors")


def lines(out: Path) -> list[dict[str, Any]]:
    """Of the log, without what depends on the clock."""
    clock = ("seconds", "tokens_per_second", "memory_gb")
    return [{k: v for k, v in line.items() if k not in clock} for line in resume.read_log(out / "log.jsonl")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--hang-in-save", type=int, help="of this step, with half of it written")
    parser.add_argument("--slow", type=float, default=0.0, help="seconds that every batch takes longer")
    parser.add_argument("--gradients", type=Path, help="of every step, summed over ranks, and the last weights go here")
    parser.add_argument("--room", type=int, help="bytes that the device is said to have free")
    args = parser.parse_args()

    import torch

    from peagle.training import run, trainer
    from peagle.training import validation as measure

    torch.set_num_threads(1)
    write, accumulate, step = resume.write_weights, trainer.accumulate_gradients, trainer.Optimizer.step

    def hanging(tensors: dict[str, Any], folder: Path, *rest: Any) -> None:
        write(tensors, folder, *rest)
        if args.hang_in_save is not None and f"step-{args.hang_in_save:08d}" in folder.name:
            whole = (folder / "model.safetensors").read_bytes()
            (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
            print("saving", flush=True)
            time.sleep(600)

    def slow(*given: Any) -> Any:
        time.sleep(args.slow)
        return accumulate(*given)

    gradients, stepped = [], []

    def watched(self: Any, lr: float) -> Any:
        gradients.append(self.grad_P.clone())
        stepped[:] = [self]
        return step(self, lr)

    resume.write_weights, trainer.accumulate_gradients, trainer.Optimizer.step = hanging, slow, watched  # type: ignore[assignment, method-assign]
    if os.environ.get("RANK", "0") != "0":
        run.HiddenStatesCache.fill = None  # type: ignore[assignment, method-assign]  # filling a cache is the first rank's
    if args.room is not None:
        measure.free_gpu_bytes = lambda device: args.room
    outcome = train(make_recipe(args.recipe, {}), args.out, "cpu")
    if args.gradients is not None:
        rank = os.environ.get("RANK", "0")
        kept = {"gradients": torch.stack(gradients), "weights": stepped[0].masters_P}
        torch.save(kept, args.gradients.with_suffix(f".{rank}"))
    print(json.dumps({"step": outcome.state.step, "finished": outcome.finished}), flush=True)


if __name__ == "__main__":
    main()
