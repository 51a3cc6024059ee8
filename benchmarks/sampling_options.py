"""Time of a decode step with each sampling option: used by all of 8 requests, and by one of 64.

    python benchmarks/sampling_options.py --shape 8b --tokenizer FOLDER --out results.json

The embedded engine with random weights and a P-EAGLE drafter; FOLDER holds the tokenizer that grammars need. A step is
timed from commit to commit, after the prefill of all requests, so the host's work counts. Options take turns, and the
fastest of all repeats counts. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from decode_step import SHAPES, build_models

from peagle import LLM, SamplingParams
from peagle.checkpoints.target import Target
from peagle.engine.grammar import from_json_schema
from peagle.engine.request import RequestState
from peagle.results.provenance import Provenance

PROMPT_TOKENS, NUM_STEPS, WARM_UP_STEPS = 128, 60, 8
LOADS = ((8, 8), (64, 1))  # requests, and how many of them use the option


def build_options() -> dict[str, dict[str, Any]]:
    strings = {"type": "array", "items": {"type": "string"}, "minItems": 1000}
    return {
        "none": {},
        "temperature 0.7, top_p 0.95": {"temperature": 0.7, "top_p": 0.95},
        "penalties": {"presence_penalty": 0.3, "repetition_penalty": 1.1},
        "logit_bias": {"logit_bias": dict.fromkeys(range(100, 150), 1.0)},
        "min_tokens": {"min_tokens": 512},
        "allowed_token_ids": {"allowed_token_ids": list(range(40_000))},
        "bad_words": {"bad_words_token_ids": [[n, n + 1] for n in range(100, 132)]},
        "logprobs": {"logprobs": 5},
        "JSON schema": {"grammar": from_json_schema(strings)},
    }


def time_steps(llm: LLM, num_requests: int, num_with_option: int, option: dict[str, Any], rng: random.Random) -> float:
    """Seconds per decode step of all requests."""
    vocab_size, plain = llm.target.model.cfg.vocab_size, {"max_tokens": 1024, "ignore_eos": True, "detokenize": False}
    groups = []
    for i in range(num_requests):
        prompt = [rng.randrange(vocab_size) for _ in range(PROMPT_TOKENS)]
        groups.append(llm.add_request(prompt, SamplingParams(**plain, **(option if i < num_with_option else {}))))
    while any(group.requests[0].state is not RequestState.DECODING for group in groups):
        llm.step()
    for _ in range(WARM_UP_STEPS):
        llm.step()
    began = time.perf_counter()
    for _ in range(NUM_STEPS):
        llm.step()
    seconds = (time.perf_counter() - began) / NUM_STEPS
    for group in groups:
        if group.finished:
            raise RuntimeError(f"a request ended: {group.requests[0].finish_reason}, {group.requests[0].stop_reason}")
        llm.abort_group(group)
    while llm.has_unfinished_requests:
        llm.step()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with a tokenizer.json")
    parser.add_argument("-k", type=int, default=3, help="draft tokens per step")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="results as JSON")
    args = parser.parse_args()
    model, drafter = build_models(args.shape, 4, "p-eagle")
    target = Target(args.tokenizer, model, frozenset())
    max_num_seqs = max(num_requests for num_requests, _ in LOADS)
    llm = LLM(target, drafter, args.k, max_num_seqs=max_num_seqs, max_model_len=2048, kv_cache_memory_bytes=12 << 30)
    llm.warm_up()
    options, rng, best = build_options(), random.Random(0), dict[tuple[int, str], float]()
    for _ in range(args.repeats):
        for num_requests, num_with_option in LOADS:
            for name, option in options.items():
                seconds = time_steps(llm, num_requests, num_with_option, option, rng)
                best[num_requests, name] = min(seconds, best.get((num_requests, name), seconds))
    rows = []
    print(f"{'option':30}{'8 of 8, ms':>12}{'ratio':>8}{'1 of 64, ms':>14}{'ratio':>8}")
    for name in options:
        times = {f"{with_option}_of_{n}": best[n, name] for n, with_option in LOADS}
        ratios = [best[n, name] / best[n, "none"] for n, _ in LOADS]
        rows.append({"option": name, **{f"{load}_ms": 1e3 * seconds for load, seconds in times.items()}})
        (all_ms, one_ms), (all_ratio, one_ratio) = [1e3 * seconds for seconds in times.values()], ratios
        print(f"{name:30}{all_ms:>12.3f}{all_ratio:>8.2f}{one_ms:>14.3f}{one_ratio:>8.2f}")
    line = {"shape": args.shape, "k": args.k, "prompt_tokens": PROMPT_TOKENS, "rows": rows}
    line |= asdict(Provenance.collect(" ".join(["python", *sys.argv])))
    print(json.dumps(line))
    if args.out:
        args.out.write_text(json.dumps(line, indent=1) + "\n")


if __name__ == "__main__":
    main()
