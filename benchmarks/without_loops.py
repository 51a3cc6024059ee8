"""Prompts whose greedy answers do not end in a loop, for speeds that no loop flatters.

    python benchmarks/without_loops.py --data-dir SETS --out FOLDER
    python benchmarks/drafters.py ... --data-dir FOLDER --requests N      # N as it is printed here

A small model answers some prompts with the same few words over and over, which any drafter foresees. The first turns of
the three sets are answered once without a drafter; a loop is what `peagle eval` calls so. Prints how many of each set
are left, and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from drafters import SETS

from peagle import LLM, SamplingParams
from peagle.data.loops import looping
from peagle.data.prompts import read_prompts
from peagle.results.stamp import Stamp


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--data-dir", type=Path, required=True, help=f"with {', '.join(SETS)} as .jsonl")
    parser.add_argument("--out", type=Path, required=True, help="folder for what is left of them")
    parser.add_argument("--max-tokens", type=int, default=512, help="of an answer")
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    stamp = Stamp.now(" ".join(["python", *sys.argv]))
    llm = LLM(args.target, dtype=args.dtype, max_model_len=2048)
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens)
    args.out.mkdir(parents=True, exist_ok=True)
    sets = {}
    for name in SETS:
        rows = read_prompts(str(args.data_dir / f"{name}.jsonl")).rows
        answers = llm.chat([[{"role": "user", "content": row.turns[0]}] for row in rows], params, progress=True)
        said = [answer.outputs[0] for answer in answers]
        loops = [looping(one.token_ids, one.finish_reason == "stop") for one in said]
        kept = [row.turns[0] for row, loop in zip(rows, loops, strict=True) if not loop]
        (args.out / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": turn}) + "\n" for turn in kept))
        tokens = sum(len(one.token_ids) for one in said)
        sets[name] = {"prompts": len(rows), "left": len(kept), "tokens": tokens}
        print(f"{name}: {len(kept)} of {len(rows)} prompts left; answers had {tokens:,} tokens", flush=True)
    left = sum(found["left"] for found in sets.values())
    print(json.dumps({"command": stamp.command, "commit": stamp.commit, "sets": sets, "left": left}))


if __name__ == "__main__":
    main()
