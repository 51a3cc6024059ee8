"""peagle on the CPU beside transformers' generate: SmolLM2, one prompt at a time, greedy, float32.

    python benchmarks/cpu_generate.py --threads 2 --max-tokens 64

transformers, peagle without a drafter and peagle with the shipped one answer the same prompts, taking turns, with
the same number of threads, so that a busy neighbour slows all of them. All go on past the end of the text, so all
write the same number of tokens, and the same tokens up to rounding: how many answers agree is counted. Prints a
table, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

import peagle
from peagle.checkpoints.target import encode_prompt, load_tokenizer

PROMPTS = [
    "Explain why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "A train travels 180 km in 3 hours. How far does it travel in 5 hours at the same speed?",
    "Give three tips for staying healthy.",
]


def with_transformers(folder: Path) -> Callable[[list[int], int], tuple[list[int], None]]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    model.eval()
    model.generation_config.eos_token_id = None  # as ignore_eos does
    model.generation_config.pad_token_id = 0

    def generate(ids: list[int], max_tokens: int) -> tuple[list[int], None]:
        prompt = torch.tensor([ids])
        with torch.inference_mode():
            out = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=max_tokens, do_sample=False
            )
        return out[0, len(ids) :].tolist(), None

    return generate


def with_peagle(folder: Path, drafter: Path | None, k: int | str, threads: int) -> Callable[[list[int], int], Any]:
    """Every call into peagle's engine stands here."""
    settings: dict[str, Any] = {"num_speculative_tokens": k} if drafter is not None else {}
    llm = peagle.LLM(
        folder,
        drafter,
        device="cpu",
        dtype="float32",
        max_num_seqs=1,
        max_model_len=2048,
        threads=threads,
        tokenizer=False,
        prefix_reuse=False,
        **settings,
    )

    def generate(ids: list[int], max_tokens: int) -> tuple[list[int], int]:
        params = peagle.SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        out = llm.generate([ids], params)[0].outputs[0]
        return list(out.token_ids), out.rounds

    return generate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafter", default="smollm2-135m-p-eagle")
    parser.add_argument("-k", default="auto", help="drafts a round: a number or auto")
    parser.add_argument("--prompts", type=Path, help="JSONL with `prompt` or `turns`; a few of its own if not given")
    parser.add_argument("--limit", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()

    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    folder, drafter = peagle.resolve_target(args.target), peagle.resolve_drafter(args.drafter)
    k = args.k if args.k == "auto" else int(args.k)
    texts = PROMPTS
    if args.prompts:
        rows = [json.loads(line) for line in args.prompts.read_text().splitlines()[: args.limit]]
        texts = [row.get("prompt") or row["turns"][0] for row in rows]
    tokenizer = load_tokenizer(folder)
    prompts = [encode_prompt(tokenizer, text, raw=False) for text in texts[: args.limit]]

    sides = {
        "transformers": with_transformers(folder),
        "peagle": with_peagle(folder, None, 0, args.threads),
        f"peagle, drafter, K {k}": with_peagle(folder, drafter, k, args.threads),
    }
    torch.set_num_threads(args.threads)
    for generate in sides.values():
        generate(prompts[0], 8)
    names = list(sides)
    rates: dict[str, list[float]] = {name: [] for name in names}
    answers: dict[str, dict[int, list[int]]] = {name: {} for name in names}
    rounds = dict.fromkeys(names, 0)
    for turn in range(args.repeats * len(prompts)):
        which = turn % len(prompts)
        for i in range(len(names)):
            name = names[(turn + i) % len(names)]  # nobody is always first
            started = time.perf_counter()
            tokens, took = sides[name](prompts[which], args.max_tokens)
            rates[name].append(len(tokens) / (time.perf_counter() - started))
            answers[name][which] = tokens
            rounds[name] += took or args.max_tokens - 1

    base = statistics.median(rates["transformers"])
    results = {}
    print(f"{'':<24} {'tok/s':>8} {'ratio':>7} {'paired':>7} {'AL':>6} {'same text':>10}")
    for name in names:
        rate = statistics.median(rates[name])
        al = args.repeats * len(prompts) * (args.max_tokens - 1) / rounds[name]
        # turn by turn: what is left when the machine was not equally busy all the time
        paired = statistics.median(a / b for a, b in zip(rates[name], rates["transformers"], strict=True))
        same = sum(answers[name][i] == answers["transformers"][i] for i in range(len(prompts)))
        print(f"{name:<24} {rate:>8.1f} {rate / base:>6.2f}x {paired:>6.2f}x {al:>6.2f} {same:>7}/{len(prompts)}")
        results[name] = {
            "tok_s": round(rate, 2),
            "ratio": round(rate / base, 3),
            "paired_ratio": round(paired, 3),
            "acceptance_length": round(al, 3),
            "same_text": same,
            "all_tok_s": [round(r, 2) for r in rates[name]],
        }
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    stamp = {
        "command": " ".join(["python", *sys.argv]),
        "commit": commit,
        "peagle": peagle.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": f"{platform.machine()}, {args.threads} threads",
    }
    settings = {"max_tokens": args.max_tokens, "prompts": len(prompts), "repeats": args.repeats, "dtype": "float32"}
    print(json.dumps({"results": results, "settings": settings, **stamp}))


if __name__ == "__main__":
    main()
