"""What training a drafter for each of the published heads' targets takes on 1 to 64 GPUs: computed, not measured.

    python benchmarks/training_scale.py --out benchmarks/results/training-scale.json

Plans of the recipes (`peagle train --dry-run`), for one pass over so many tokens, all documents as long as the recipe
allows and all of it asked: the most that it can take. Rates are an H200's, measured on one GPU; the target's pass, the
links and that ranks take equally long are assumptions, which `peagle/measuring/training_scale.py` names. Bound: the
matrix rate, up to where `read` outgrows the disk. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from peagle.planning.gpus import find_gpu  # noqa: E402
from peagle.planning.training_scale import NETWORK, Cluster, assumed_data, on_paper  # noqa: E402
from peagle.training.recipe import make_recipe  # noqa: E402
from peagle.training.resource_plan import TrainingPlan  # noqa: E402

RECIPES = ("gpt-oss-20b", "gpt-oss-120b", "qwen3-coder-30b", "gemma-4-31b")
DAY = 86400.0
HEADER = ("target", "GPUs", "GiB of a GPU", "tokens/s", "of linear", "disk, TB", "read, GB/s", "days", "vLLM's days")


def planned(name: str, gpus: int, args: argparse.Namespace) -> TrainingPlan:
    recipe = make_recipe(ROOT / "recipes" / f"{name}-p-eagle.toml", {"epochs": 1.0})
    data = assumed_data(recipe, args.tokens, args.mean_length)
    each = min(gpus, 8)
    cluster = Cluster(find_gpu(args.gpu), each, gpus // each, args.network * 1e9)
    if gpus == 1:
        recipe = replace(recipe, train=replace(recipe.train, shard_target=False))
    return on_paper(recipe, cluster, data)


def line(name: str, gpus: int, plan: TrainingPlan, alone: TrainingPlan) -> dict[str, Any]:
    return {
        "target": name,
        "gpus": gpus,
        "gib": sum(plan.memory.values()) / 2**30,
        "fits": plan.fits,
        "tokens_per_second": plan.tokens_per_second,
        "of_linear": plan.tokens_per_second / alone.tokens_per_second / gpus,
        "disk_tb": plan.disk.get("states", 0.0) / 1e12,
        "read_gb_per_second": plan.read_per_second / 1e9,
        "days": plan.seconds / DAY,
        "target_days": plan.target_seconds / DAY,
        "step_seconds": plan.step_seconds,
    }


def row(found: dict[str, Any]) -> str:
    def some(value: float, form: str) -> str:
        return format(value, form) if value else ""

    cells = [
        found["target"],
        str(found["gpus"]),
        f"{found['gib']:.0f}" + ("" if found["fits"] else ", too much"),
        f"{found['tokens_per_second']:,.0f}",
        f"{found['of_linear']:.0%}",
        some(found["disk_tb"], ".0f"),
        some(found["read_gb_per_second"], ".1f"),
        f"{found['days']:.3f}",
        some(found["target_days"], ".3f"),
    ]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1_000_000_000, help="of the data, seen once")
    parser.add_argument("--mean-length", type=int, help="of a document; as long as the recipe allows if not given")
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 8, 32, 64], help="8 to a node")
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--network", type=float, default=NETWORK / 1e9, help="GB/s that a GPU sends to other nodes")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = []
    print("| " + " | ".join(HEADER) + " |")
    print("|" + "---|" * len(HEADER))
    for name in RECIPES:
        alone = planned(name, 1, args)
        for gpus in args.gpus:
            found.append(line(name, gpus, planned(name, gpus, args), alone))
            print(row(found[-1]))
    asked = {key: value for key, value in vars(args).items() if key != "out"}
    said = {"computed": True, "asked": asked, "python": platform.python_version(), "lines": found}
    if args.out is not None:
        args.out.write_text(json.dumps(said) + "\n")
    print(json.dumps(said))


if __name__ == "__main__":
    main()
