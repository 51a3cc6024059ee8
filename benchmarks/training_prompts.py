"""Prompts for training, ready to be answered: several files mixed, some with a second turn, some kept aside.

    python benchmarks/training_prompts.py prompts.jsonl.gz functions.jsonl --without held.jsonl --leave-out t0 \
        --follow 0.3 --alone functions gsm8k_train --hold functions=60 --shards 4 --out DIR

Writes DIR/shard-0.jsonl.gz and so on, each a fair share of all, and DIR/held.jsonl: the --without prompts, and so many
of a source as --hold says. A second turn asks for more of the same or for something else with it, as users do
(FOLLOW_UPS); sources that --alone names, and prompts that have turns of their own, get none. The same files and flags
give the same prompts.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import sys
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from peagle.data.prompts import Prompt, read_prompts  # noqa: E402

FOLLOW_UPS = (
    "Rewrite your answer in half as many words.",
    "Make it longer, with more detail.",
    "Can you give me an example?",
    "Explain this to a child of ten.",
    "Now say the same more politely.",
    "What are the three most important points of what you said?",
    "Put it into a table.",
    "Write it as a list of bullet points.",
    "Are you sure? Check your answer step by step.",
    "What would change if the opposite were true?",
    "Why is that?",
    "Give me two more.",
    "Rewrite it as a short story.",
    "Turn your answer into an email to a colleague.",
    "Summarize your answer in one sentence.",
    "Which words in your answer could I look up to learn more?",
    "What could go wrong with that?",
    "Please correct any mistakes in your answer and write it again.",
    "Repeat your answer, but replace every number with a word.",
    "Write a title for it.",
    "Ask me three questions about it.",
    "Rewrite it in the style of a newspaper.",
    "How would you do the same in another way?",
    "Add a short conclusion to it.",
    "Show me the code for that in Python.",
    "Begin every sentence of your answer with the letter A.",
    "Compare the first and the last thing you mentioned.",
    "Thank you. What should I do next?",
)


def mixed(args: argparse.Namespace) -> tuple[list[Prompt], list[Prompt]]:
    """To be trained with, and kept aside."""
    held = [row for path in args.without for row in read_prompts(str(path)).rows]
    kept_out = {row.content for row in held}
    rows = [row for path in args.prompts for row in read_prompts(str(path)).rows]
    rows = [r for r in rows if r.content not in kept_out and not any(r.source.startswith(s) for s in args.leave_out)]
    rng = random.Random(args.seed)
    rng.shuffle(rows)
    for source, count in (one.split("=") for one in args.hold):
        own = [row for row in rows if row.source == source][: int(count)]
        if len(own) < int(count):
            raise SystemExit(f"--hold {source}={count}: there are {len(own)} such prompts")
        held += own
    kept_out = {row.content for row in held}
    made = []
    for row in rows:
        if row.content in kept_out:
            continue
        if len(row.turns) == 1 and row.source not in args.alone and rng.random() < args.follow:
            row = replace(row, turns=(*row.turns, rng.choice(FOLLOW_UPS)))
        made.append(row)
    return made, held


def line(row: Prompt) -> bytes:
    said: dict[str, object] = {"turns": row.turns}
    if row.system is not None:
        turns = [("system", row.system), *(("user", turn) for turn in row.turns)]
        said = {"messages": [{"role": role, "content": text} for role, text in turns]}
    return json.dumps({"id": row.id, "source": row.source, **said}).encode() + b"\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path, nargs="+")
    parser.add_argument("--without", type=Path, nargs="*", default=[], help="prompts that are kept aside already")
    parser.add_argument("--leave-out", nargs="*", default=[], help="sources that begin so")
    parser.add_argument("--follow", type=float, default=0.3, help="share of prompts that get a second turn")
    parser.add_argument("--alone", nargs="*", default=[], help="sources that get none")
    parser.add_argument("--hold", nargs="*", default=[], metavar="SOURCE=N", help="to keep aside, too")
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    rows, held = mixed(args)
    for i in range(args.shards):
        with open(args.out / f"shard-{i}.jsonl.gz", "wb") as raw, gzip.GzipFile("", "wb", 9, raw, mtime=0) as file:
            file.writelines(map(line, rows[i :: args.shards]))
    (args.out / "held.jsonl").write_bytes(b"".join(map(line, held)))
    longer = sum(len(row.turns) > 1 for row in rows)
    print(f"{len(rows):,} prompts in {args.shards} files, {longer:,} of them with a second turn; {len(held):,} aside")


if __name__ == "__main__":
    main()
