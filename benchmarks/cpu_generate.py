"""SmolLM2 on the CPU: peagle beside transformers' `generate`, one prompt at a time, greedy.

    python benchmarks/cpu_generate.py --threads 2 --drafter smollm2-135m-p-eagle smollm2-135m-eagle3 -k 2 3 auto

All configurations answer the same prompts in turn with the same number of threads, so that other load slows all of
them alike. Ratios are to peagle without a drafter, turn by turn. End-of-sequence tokens are ignored: every
configuration writes the same number of tokens, and the same text up to rounding. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

import peagle
from peagle.checkpoints.target import Target, encode_prompt, load_target, load_tokenizer
from peagle.results.provenance import Provenance

PROMPTS = [
    "Explain why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "A train travels 180 km in 3 hours. How far does it travel in 5 hours at the same speed?",
    "Give three tips for staying healthy.",
]
BASELINE = "peagle"
Generate = Callable[[list[int], int], tuple[list[int], int]]  # prompt ids, max tokens -> output ids, decode steps


@dataclass
class Configuration:
    generate: Generate
    rates: list[float] = field(default_factory=list)  # output tokens/s, one per turn
    texts: dict[int, list[int]] = field(default_factory=dict)  # output ids by prompt
    decode_steps: int = 0

    def run(self, which: int, prompt: list[int], max_tokens: int) -> None:
        began = time.perf_counter()
        tokens, decode_steps = self.generate(prompt, max_tokens)
        self.rates.append(len(tokens) / (time.perf_counter() - began))
        self.texts[which] = tokens
        self.decode_steps += decode_steps


def open_transformers(folder: Path, dtype: torch.dtype) -> Generate:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0

    def generate(ids: list[int], max_tokens: int) -> tuple[list[int], int]:
        prompt = torch.tensor([ids])
        with torch.inference_mode():
            mask = torch.ones_like(prompt)
            out = model.generate(prompt, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False)
        return out[0, len(ids) :].tolist(), max_tokens - 1

    return generate


def open_peagle(target: Target, drafter: Path | None, k: int | str, threads: int) -> Generate:
    speculation: dict[str, Any] = {"num_speculative_tokens": k} if drafter is not None else {}
    llm = peagle.LLM(
        target,
        drafter,
        device="cpu",
        dtype=str(next(target.model.parameters()).dtype).removeprefix("torch."),
        max_num_seqs=1,
        max_model_len=2048,
        threads=threads,
        tokenizer=False,
        enable_prefix_caching=False,
        **speculation,
    )

    def generate(ids: list[int], max_tokens: int) -> tuple[list[int], int]:
        params = peagle.SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        output = llm.generate([ids], params)[0].outputs[0]
        return output.token_ids, output.num_decode_steps

    return generate


def report(configurations: dict[str, Configuration], num_prompts: int, max_tokens: int) -> dict[str, dict[str, Any]]:
    baseline, results = configurations[BASELINE], {}
    print(f"{'':<34} {'tokens/s':>9} {'ratio':>7} {'acceptance length':>18} {'same text':>10}")
    for name, found in configurations.items():
        rate = statistics.median(found.rates)
        ratio = statistics.median(a / b for a, b in zip(found.rates, baseline.rates, strict=True))
        acceptance_length = len(found.rates) * (max_tokens - 1) / found.decode_steps
        same = sum(found.texts[i] == baseline.texts[i] for i in range(num_prompts))
        print(f"{name:<34} {rate:>9.1f} {ratio:>6.2f}x {acceptance_length:>18.2f} {same:>7}/{num_prompts}")
        results[name] = {
            "output_tokens_per_second": round(rate, 2),
            "paired_ratio": round(ratio, 3),
            "acceptance_length": round(acceptance_length, 3),
            "same_text": same,
        }
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafter", nargs="+", default=["smollm2-135m-p-eagle"])
    parser.add_argument("-k", nargs="+", default=["auto"], help="draft tokens per step: numbers or auto")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    args = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    folder = peagle.resolve_target(args.target)
    tokenizer = load_tokenizer(folder)
    prompts = [encode_prompt(tokenizer, text, raw=False) for text in PROMPTS]
    target = load_target(folder, dtype, torch.device("cpu"))

    configurations = {
        "transformers": Configuration(open_transformers(folder, dtype)),
        BASELINE: Configuration(open_peagle(target, None, 0, args.threads)),
    }
    for drafter in map(peagle.resolve_drafter, args.drafter):
        for k in args.k:
            generate = open_peagle(target, drafter, k if k == "auto" else int(k), args.threads)
            configurations[f"{drafter.name}, K {k}"] = Configuration(generate)
    torch.set_num_threads(args.threads)
    for configuration in configurations.values():
        configuration.generate(prompts[0], 8)  # warm-up
    for turn in range(args.repeats * len(prompts)):
        which, order = turn % len(prompts), list(configurations.values())
        for i in range(len(order)):  # a different one goes first each turn
            order[(turn + i) % len(order)].run(which, prompts[which], args.max_tokens)

    results = report(configurations, len(prompts), args.max_tokens)
    settings = {"max_tokens": args.max_tokens, "repeats": args.repeats, "threads": args.threads, "dtype": args.dtype}
    provenance = asdict(Provenance.collect(" ".join(["python", *sys.argv])))
    print(json.dumps({"results": results, "settings": settings, **provenance}))


if __name__ == "__main__":
    main()
