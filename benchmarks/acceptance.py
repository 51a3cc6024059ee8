"""Acceptance of drafters on the prompts of JSONL files, through the engine, greedy.

    python benchmarks/acceptance.py --prompts mt_bench.jsonl --limit 8 --max-tokens 64 -k 7
    python benchmarks/acceptance.py --prompts eval/*.jsonl --max-tokens 512 -k 1 3 5 7 10 --drafter P_EAGLE EAGLE3

Rows hold a `prompt` or a `turns` list, whose turns are asked one after another. The target alone decides what is said,
once; then every drafter and every K is counted on the same conversations. A drafter foretells a loop with ease, so each
line is given with and without the answers that fell into one (no end, and over 30% of their 8-grams repeated). Prints a
table, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import peagle
from peagle.checkpoints.target import Target
from peagle.engine.llm import LLM
from peagle.training.measure import Counts, count


def conversations(file: Path, limit: int | None) -> list[list[str]]:
    rows = [json.loads(line) for line in file.read_text().splitlines()[:limit]]
    return [[row["prompt"]] if "prompt" in row else list(row["turns"]) for row in rows]


def asked(llm: LLM, tokenizer: Any, talks: list[list[str]], params: peagle.SamplingParams) -> list[list[int]]:
    """Every turn's prompt as token ids, with what the target alone answered to the turns before it."""
    prompts: list[list[int]] = []
    said: list[list[dict[str, str]]] = [[] for _ in talks]
    for turn in range(max(map(len, talks))):
        going = [i for i, talk in enumerate(talks) if len(talk) > turn]
        for i in going:
            said[i].append({"role": "user", "content": talks[i][turn]})
        texts = [tokenizer.apply_chat_template(said[i], add_generation_prompt=True, tokenize=False) for i in going]
        now = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        prompts += now
        if any(len(talks[i]) > turn + 1 for i in going):
            for i, answer in zip(going, llm.generate(now, params), strict=True):
                said[i].append({"role": "assistant", "content": answer.outputs[0].text})
    return prompts


def line(counts: Counts) -> str:
    shares = " ".join(f"{share:.2f}" for share in counts.per_position)
    return f"{counts.answers:>7} {counts.tokens:>8} {counts.rounds:>7} {counts.length:>6.2f}   {shares}"


def row_of(counts: Counts) -> dict[str, Any]:
    kept = {name: value for name, value in asdict(counts).items() if name != "without_loops"}
    return {**kept, "acceptance_length": round(counts.length, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True, nargs="+")
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafter", default=["smollm2-135m-p-eagle"], nargs="+")
    parser.add_argument("--limit", type=int, help="only the first rows of each file")
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("-k", type=int, default=[7], nargs="+")
    parser.add_argument("--dtype", default="float32", help="bfloat16 is faster on a GPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    options: dict[str, Any] = {"dtype": args.dtype, "device": args.device, "max_model_len": args.max_model_len}
    options |= {"max_num_seqs": 64 if args.device != "cpu" else 8, "cuda_graphs": args.device != "cpu"}
    alone = LLM(args.target, None, **options)
    target: Target = alone.target
    tokenizer = peagle.load_tokenizer(target.folder)
    params = peagle.SamplingParams(max_tokens=args.max_tokens)
    prompts = {f.stem: asked(alone, tokenizer, conversations(f, args.limit), params) for f in args.prompts}
    del alone
    results: dict[str, Any] = {}
    print(
        f"{'drafter':<24} {'K':>2} {'prompts':<12} {'answers':>7} {'tokens':>8} {'rounds':>7} {'AL':>6}   by position"
    )
    for name in args.drafter:
        for k in args.k:
            llm = LLM(target, peagle.resolve_drafter(name), k, **options)
            for file, ids in prompts.items():
                started = time.time()
                found = count(output.outputs[0] for output in llm.generate(ids, params))
                label = f"{Path(name).name[:24]:<24} {k:>2} {file:<12}"
                print(f"{label} {line(found)}", flush=True)
                if found.looping:
                    print(f"{'':<27} {'no loops':<12} {line(found.without_loops)}", flush=True)
                results.setdefault(Path(name).name, {}).setdefault(str(k), {})[file] = {
                    "all": row_of(found),
                    "without_loops": row_of(found.without_loops),
                    "seconds": round(time.time() - started, 1),
                }
    commit = os.environ.get("PEAGLE_COMMIT")
    if commit is None:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    on_gpu = torch.cuda.is_available() and args.device != "cpu"
    stamp = {
        "command": " ".join(["python", *sys.argv]),
        "commit": commit,
        "peagle": peagle.__version__,
        "torch": torch.__version__,
        "machine": torch.cuda.get_device_name()
        if on_gpu
        else f"{platform.machine()}, {torch.get_num_threads()} threads",
    }
    settings = {"max_tokens": args.max_tokens, "temperature": 0, "dtype": args.dtype}
    text = json.dumps({"results": results, "settings": settings, **stamp})
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
