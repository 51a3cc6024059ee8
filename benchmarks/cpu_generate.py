"""peagle on the CPU beside transformers' generate: SmolLM2, one prompt at a time, greedy.

    python benchmarks/cpu_generate.py --threads 2 --max-tokens 128 --drafter P_EAGLE EAGLE3 -k 2 3 5 auto
    python benchmarks/cpu_generate.py --threads 2 --dtype bfloat16      # for a CPU with matrix units

transformers, peagle without a drafter and peagle with each drafter and K answer the same prompts, taking turns, with
the same number of threads, so that a busy neighbour slows all of them. All go on past the end of the text, so all
write the same number of tokens, and the same tokens up to rounding: how many answers agree with those of peagle
without a drafter is counted, and ratios are to that too. Two rates: of whole answers, and of the tokens after the
first, without the reading of the prompt. Before that the products of one pass over the target alone, by torch and by
the C kernels, for a few numbers of rows. Prints two tables, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn import functional as F

import peagle
from peagle.checkpoints.target import Target, encode_prompt, load_target, load_tokenizer
from peagle.kernels.gemm import skinny_cpu
from peagle.results.provenance import Provenance

PROMPTS = [
    "Explain why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "A train travels 180 km in 3 hours. How far does it travel in 5 hours at the same speed?",
    "Give three tips for staying healthy.",
]
ROWS = (1, 2, 4, 6, 8, 11, 16)
TRANSFORMERS, PLAIN = "transformers", "peagle"
clock = time.perf_counter


@dataclass
class Answer:
    tokens: list[int]
    first_s: float  # until the first token
    whole_s: float
    rounds: int


@dataclass
class Side:
    """Who answers, and what came of it."""

    answer: Callable[[list[int], int], Answer]
    rates: list[float] = field(default_factory=list)
    later_rates: list[float] = field(default_factory=list)  # of the tokens after the first
    texts: dict[int, list[int]] = field(default_factory=dict)
    rounds: int = 0

    def take(self, which: int, prompt: list[int], max_tokens: int) -> None:
        got = self.answer(prompt, max_tokens)
        self.rates.append(len(got.tokens) / got.whole_s)
        self.later_rates.append((len(got.tokens) - 1) / (got.whole_s - got.first_s))
        self.texts[which] = got.tokens
        self.rounds += got.num_decode_steps


class _Clock(transformers.generation.streamers.BaseStreamer):
    """Notes when the first token comes; transformers hands over the prompt first."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(clock())

    def end(self) -> None:
        pass


def with_transformers(folder: Path, dtype: torch.dtype) -> Callable[[list[int], int], Answer]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    model.eval()
    model.generation_config.eos_token_id = None  # as ignore_eos does
    model.generation_config.pad_token_id = 0

    def generate(ids: list[int], max_tokens: int) -> Answer:
        prompt, heard, began = torch.tensor([ids]), _Clock(), clock()
        with torch.inference_mode():
            mask = torch.ones_like(prompt)
            out = model.generate(
                prompt, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False, streamer=heard
            )
        whole = clock() - began
        return Answer(out[0, len(ids) :].tolist(), heard.times[1] - began, whole, max_tokens - 1)

    return generate


def with_peagle(target: Target, drafter: Path | None, k: int | str, threads: int) -> Callable[[list[int], int], Answer]:
    """Every call into peagle's engine stands here."""
    settings: dict[str, Any] = {"num_speculative_tokens": k} if drafter is not None else {}
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
        **settings,
    )

    def generate(ids: list[int], max_tokens: int) -> Answer:
        params = peagle.SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        began, first, tokens, pieces = clock(), 0.0, [], 0
        for piece in llm.stream(ids, params):
            if piece.token_ids:
                first = first or clock() - began
                tokens += piece.token_ids
                pieces += 1
        return Answer(tokens, first, clock() - began, pieces - 1)

    return generate


def products(model: torch.nn.Module, repeats: int) -> dict[str, dict[int, float]]:
    """Milliseconds of all products of a pass over the target: the fastest of some, in turns."""
    weights = [m.weight.detach() for m in model.modules() if isinstance(m, torch.nn.Linear)]
    ways: dict[str, Callable[..., Any]] = {"torch": F.linear}
    if skinny_cpu.library() is not None and weights[0].dtype == torch.float32:
        ways["C"] = skinny_cpu.product
    best = {name: dict.fromkeys(ROWS, float("inf")) for name in ways}
    with torch.inference_mode():
        for _ in range(repeats):
            for rows in ROWS:
                xs = {w.shape[1]: torch.randn(rows, w.shape[1], dtype=w.dtype) for w in weights}
                for name, way in ways.items():
                    began = clock()
                    for weight in weights:
                        way(xs[weight.shape[1]], weight)
                    best[name][rows] = min(best[name][rows], (clock() - began) * 1e3)
    print("products of a pass, ms " + "".join(f"{rows:>8}" for rows in ROWS) + "  rows")
    for name, found in best.items():
        print(f"{name:<23}" + "".join(f"{found[rows]:>8.1f}" for rows in ROWS))
    return {name: {rows: round(ms, 2) for rows, ms in found.items()} for name, found in best.items()}


def report(sides: dict[str, Side], prompts: int, max_tokens: int) -> dict[str, dict[str, Any]]:
    plain, results = sides[PLAIN], {}
    print(f"{'':<34} {'tok/s':>7} {'ratio':>7} {'paired':>7} {'decode':>7} {'paired':>7} {'AL':>5} {'same text':>10}")
    for name, side in sides.items():
        rate, later = statistics.median(side.rates), statistics.median(side.later_rates)
        al = len(side.rates) * (max_tokens - 1) / side.rounds
        # turn by turn: what is left when the machine was not equally busy all the time
        paired = statistics.median(a / b for a, b in zip(side.rates, plain.rates, strict=True))
        later_paired = statistics.median(a / b for a, b in zip(side.later_rates, plain.later_rates, strict=True))
        same = sum(side.texts[i] == plain.texts[i] for i in range(prompts))
        ratio = rate / statistics.median(plain.rates)
        print(
            f"{name:<34} {rate:>7.1f} {ratio:>6.2f}x {paired:>6.2f}x {later:>7.1f} {later_paired:>6.2f}x {al:>5.2f} "
            f"{same:>7}/{prompts}"
        )
        results[name] = {
            "tok_s": round(rate, 2),
            "ratio": round(ratio, 3),
            "paired_ratio": round(paired, 3),
            "decode_tok_s": round(later, 2),
            "decode_paired_ratio": round(later_paired, 3),
            "acceptance_length": round(al, 3),
            "same_text": same,
            "all_tok_s": [round(r, 2) for r in side.rates],
        }
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafter", nargs="+", default=["smollm2-135m-p-eagle"])
    parser.add_argument("-k", nargs="+", default=["auto"], help="drafts a round: numbers or auto")
    parser.add_argument("--prompts", type=Path, help="JSONL with `prompt` or `turns`; a few of its own if not given")
    parser.add_argument("--limit", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--no-transformers", action="store_true", help="peagle alone")
    parser.add_argument("--cpu-time", action="store_true", help="of the process, for a busy machine; with one thread")
    args = parser.parse_args()
    if args.cpu_time:
        global clock
        clock, args.threads = time.process_time, 1

    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    folder = peagle.resolve_target(args.target)
    texts = PROMPTS
    if args.prompts:
        rows = [json.loads(line) for line in args.prompts.read_text().splitlines()[: args.limit]]
        texts = [row.get("prompt") or row["turns"][0] for row in rows]
    tokenizer = load_tokenizer(folder)
    prompts = [encode_prompt(tokenizer, text, raw=False) for text in texts[: args.limit]]
    target = load_target(folder, getattr(torch, args.dtype), torch.device("cpu"))
    measured = products(target.model, 4 * args.repeats)

    sides = {} if args.no_transformers else {TRANSFORMERS: Side(with_transformers(folder, getattr(torch, args.dtype)))}
    sides[PLAIN] = Side(with_peagle(target, None, 0, args.threads))
    for drafter in map(peagle.resolve_drafter, args.drafter):
        for k in args.k:
            answer = with_peagle(target, drafter, k if k == "auto" else int(k), args.threads)
            sides[f"{drafter.name}, K {k}"] = Side(answer)
    torch.set_num_threads(args.threads)
    for side in sides.values():
        side.answer(prompts[0], 8)
    for turn in range(args.repeats * len(prompts)):
        which, order = turn % len(prompts), list(sides.values())
        for i in range(len(order)):  # nobody is always first
            order[(turn + i) % len(order)].take(which, prompts[which], args.max_tokens)

    results = report(sides, len(prompts), args.max_tokens)
    stamp = Provenance.collect(" ".join(["python", *sys.argv]))
    made = {"command": stamp.command, "commit": stamp.commit, **stamp.versions}
    made["machine"] = f"{stamp.machine['cpu']}, {args.threads} threads"
    settings: dict[str, Any] = {
        "max_tokens": args.max_tokens,
        "prompts": len(prompts),
        "repeats": args.repeats,
        "dtype": args.dtype,
    }
    settings["clock"] = "CPU time" if args.cpu_time else "wall"
    print(json.dumps({"results": results, "products_ms": measured, "settings": settings, **made}))


if __name__ == "__main__":
    main()
