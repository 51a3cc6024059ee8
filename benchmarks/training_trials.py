"""What pays in training: short runs that differ in one setting each, on the same data, one after another.

    python benchmarks/training_trials.py responses.jsonl --recipe recipes/smollm2-p-eagle.toml --seconds 30 \
        --out trials.json base lr=2e-3 init=random objective=kl,lr=5e-4

A trial is `base` or settings by commas, over the recipe's. Each has its own schedule of that many seconds and ends with
the acceptance length on the same held-out prompts. Prints a table as it grows, then one JSON line.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from peagle.training.recipe import make_recipe
from peagle.training.run import train


def settings_of(trial: str) -> dict[str, Any]:
    """A comma before a setting's name parts settings, any other belongs to a value: `aux_layer_ids=2,15,29,lr=1e-3`."""
    found: dict[str, str] = {}
    name = ""
    for part in [] if trial == "base" else trial.split(","):
        if "=" in part:
            name, _, found[name] = part.partition("=")
        else:
            found[name] += f",{part}"
    return {name: value_of(text) for name, text in found.items()}


def value_of(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def result_of(log: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    step = [line for line in lines if line["kind"] == "step"][-1]
    measured = [line for line in lines if line["kind"] == "measure"]
    curve = [{"step": m["step"], "length": m["acceptance"]} for m in measured]
    kept = ("step", "tokens", "seconds", "loss", "match_by_depth", "accept_by_depth", "tokens_per_second", "memory_gb")
    last = measured[-1] if measured else {}
    return {k: step[k] for k in kept} | {"measured": last, "curve": curve}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("trials", nargs="+", metavar="TRIAL")
    parser.add_argument("--recipe", type=Path, required=True)
    parser.add_argument("--target", help="instead of the recipe's")
    parser.add_argument("--seconds", type=float, default=30, help="of training, each")
    parser.add_argument("--limit", type=float, default=600, help="seconds for all; trials beyond it are left out")
    parser.add_argument("--scratch", type=Path, help="folder for the runs; a temporary one by default")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="JSON file, written after every trial")
    args = parser.parse_args()
    began = time.perf_counter()
    scratch = args.scratch or Path(tempfile.mkdtemp())
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    stamp = {"command": " ".join(["python", *sys.argv]), "commit": os.environ.get("PEAGLE_COMMIT"), "gpu": gpu}
    rows: list[dict[str, Any]] = []
    print(
        f"{'trial':32}{'steps':>7}{'tokens':>9}{'tok/s':>9}{'loss':>7}{'length':>8}  accepted by position", flush=True
    )
    for i, trial in enumerate(args.trials):
        if time.perf_counter() - began + args.seconds > args.limit:
            print(f"{trial:32} left out: no time")
            continue
        flags = {"data": (args.data,), "minutes": args.seconds / 60, "measure_every": 0, **settings_of(trial)}
        if args.target:
            flags["target"] = args.target
        out = scratch / f"trial-{i}"
        try:
            train(make_recipe(args.recipe, flags), out, args.device)
        except (RuntimeError, ValueError) as error:
            print(f"{trial:32} {type(error).__name__}: {str(error)[:150]}", flush=True)
            continue
        found = result_of(out / "log.jsonl")
        rows.append({"trial": trial, **found})
        measured = found["measured"]
        shares = " ".join(f"{share:.2f}" for share in measured.get("by_position", []))
        print(
            f"{trial:32}{found['step']:7}{found['tokens'] / 1e6:8.1f}M{found['tokens_per_second']:9,.0f}"
            f"{found['loss']:7.3f}{measured.get('acceptance', float('nan')):8.3f}  {shares}",
            flush=True,
        )
        if args.out:
            args.out.write_text(json.dumps({**stamp, "trials": rows}) + "\n")
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    print(json.dumps({**stamp, "trials": rows}))


if __name__ == "__main__":
    main()
