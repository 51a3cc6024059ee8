"""Acceptance of a drafter on the first prompts of a JSONL file, by the reference: slow, exact, on any machine.

    python benchmarks/acceptance.py --prompts mt_bench.jsonl --limit 8 --max-tokens 64 -k 7

Rows hold a `prompt` or a `turns` list, of which the first is asked. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from pathlib import Path

import torch

import peagle
from peagle.checkpoints.target import encode_prompt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True, nargs="+")
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafter", default="smollm2-135m-p-eagle")
    parser.add_argument("--limit", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("-k", type=int, default=7)
    args = parser.parse_args()

    target = peagle.load_target(peagle.resolve_target(args.target))
    tokenizer = peagle.load_tokenizer(target.folder)
    drafter = peagle.load_drafter(peagle.resolve_drafter(args.drafter), target.model)
    params = peagle.SamplingParams(max_tokens=args.max_tokens)
    results = {}
    print(f"{'prompts':<12} {'answers':>7} {'tokens':>7} {'rounds':>7} {'AL':>6}   accepted share by position")
    for file in args.prompts:
        rows = [json.loads(line) for line in file.read_text().splitlines()[: args.limit]]
        started, runs = time.time(), []
        for row in rows:
            ids = encode_prompt(tokenizer, row.get("prompt") or row["turns"][0], raw=False)
            runs.append(peagle.generate(target.model, ids, params, target.eos_ids, drafter, args.k))
        rounds = sum(r.num_drafts for r in runs)
        accepted = [sum(r.accepted_per_position[i] for r in runs) for i in range(args.k)]
        tokens = sum(len(r.token_ids) for r in runs)
        length = 1 + sum(accepted) / rounds
        shares = " ".join(f"{a / rounds:.2f}" for a in accepted)
        print(f"{file.stem:<12} {len(runs):>7} {tokens:>7} {rounds:>7} {length:>6.2f}   {shares}", flush=True)
        results[file.stem] = {
            "answers": len(runs),
            "tokens": tokens,
            "rounds": rounds,
            "accepted_per_position": accepted,
            "acceptance_length": round(length, 4),
            "seconds": round(time.time() - started, 1),
        }
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    stamp = {
        "command": " ".join(["python", *sys.argv]),
        "commit": commit,
        "peagle": peagle.__version__,
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
    }
    settings = {"k": args.k, "max_tokens": args.max_tokens, "temperature": 0, "dtype": "float32"}
    print(json.dumps({"results": results, "settings": settings, **stamp}))


if __name__ == "__main__":
    main()
