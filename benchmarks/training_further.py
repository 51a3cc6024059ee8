"""A drafter trained on: new text of the target's, the run, means of start and end, and which of them is the best.

    python benchmarks/training_further.py shards/*.jsonl.gz --start checkpoints/smollm2-135m-p-eagle --held held.jsonl \
        --write-seconds 330 --minutes 8.5 --out DIR \
        --data="--temperature 0 --samples 6 --vary 24 --max-tokens 384 --loop-tokens 64" \
        --train="--depths 16 --lr 2e-3 --optimizer muon --batch-tokens 16384"

Every step is a command of peagle's, its log in DIR: one `data` for each file of prompts, all at once and stopped after
--write-seconds; `train --init START`; `average`, once for each of --shares; one `eval` of them all. DIR/best is the one
with the most tokens a round at --choose on the held prompts, loops included, and DIR/further.json has all figures. What
is in DIR already is not done again. Prints a table and one JSON line. With --texts nothing is written: FILES are what
another run has written.

With --try, once for each way to train, short runs of --try-steps steps come first, all at once and from the same start,
and the long one takes the flags of whichever is best on the held prompts:

    ... --try="" --try="--by-value" --try="--by-value --objective tv" --try-steps 300
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

Held = dict[str, dict[str, dict[int, float]]]  # tokens a round: drafter or flags, with loops or without, K
STOPPING = 60.0  # seconds that a stopped writer has to save what it is at


class Steps:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.out, self.began = args, args.out, time.time()
        self.seconds: dict[str, float] = {}
        self.out.mkdir(parents=True, exist_ok=True)
        self.common = ["-t", args.target, "--device", args.device]

    def say(self, text: str) -> None:
        print(f"[{time.time() - self.began:6.1f} s] {text}", flush=True)

    def start(self, log: str, *words: object) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "peagle", *map(str, words)]
        with open(self.out / f"{log}.log", "ab") as file:
            return subprocess.Popen(command, stdout=file, stderr=file, cwd=ROOT, preexec_fn=_hears_interrupts)

    def run(self, log: str, *words: object) -> None:
        process = self.start(log, *words)
        try:
            if process.wait():
                sys.exit(f"{log} failed: {self.out / log}.log\n{self.tail(log)}")
        finally:
            self.end([process])

    def tail(self, log: str) -> str:
        return (self.out / f"{log}.log").read_bytes()[-2000:].decode(errors="replace")

    def end(self, running: list[subprocess.Popen[bytes]]) -> None:
        """As Ctrl-C does: each saves what it has."""
        for process in running:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
        for process in running:
            try:
                process.wait(STOPPING)
            except subprocess.TimeoutExpired:
                process.kill()

    # What is done

    @property
    def texts(self) -> list[Path]:
        return self.args.texts or [self.out / f"responses-{i}.jsonl" for i in range(len(self.args.prompts))]

    def write(self) -> None:
        begin, running = time.time(), []
        try:
            for prompts, text in zip(self.args.prompts, self.texts, strict=True):
                words = ["data", prompts, "--out", text, *self.common, *shlex.split(self.args.data)]
                running.append(self.start(text.stem, *words))
            while any(process.poll() is None for process in running):
                if time.time() - begin > self.args.write_seconds:
                    break
                time.sleep(0.2)
            stopped = [process.poll() is None for process in running]
        finally:
            self.end(running)
        for process, text, early in zip(running, self.texts, stopped, strict=True):
            if not text.exists() or (process.returncode and not early):
                sys.exit(f"{text.stem} failed:\n{self.tail(text.stem)}")
        self.seconds["write"] = time.time() - begin
        self.say(f"{sum(map(lines, self.texts)):,} rows")

    def training(self, out: str, *more: object) -> list[object]:
        a = self.args
        words = ["--init", a.start, "--out", self.out / out, *self.common, *shlex.split(a.train), *more]
        return ["train", *self.texts, *words]

    def attempt(self) -> Held:
        """Short runs by each of --try: what came of them, by their flags."""
        begin, a, running = time.time(), self.args, []
        names = [f"try-{i}" for i in range(len(a.tries))]
        try:
            for name, flags in zip(names, a.tries, strict=True):
                length = ["--steps", a.try_steps]
                running.append(self.start(name, *self.training(name, *shlex.split(flags), *length)))
            for process, name in zip(running, names, strict=True):
                if process.wait():
                    sys.exit(f"{name} failed:\n{self.tail(name)}")
        finally:
            self.end(running)
        self.seconds["tries"] = time.time() - begin
        self.say("tried")
        folders = {"start": a.start, **{name: self.out / name for name in names}}
        held = self.measure(folders, "tries")
        flags_of = dict(zip(names, a.tries, strict=True))
        return {flags_of.get(name, name): own for name, own in held.items()}

    def train(self, flags: str) -> None:
        begin, a = time.time(), self.args
        length = ["--minutes", a.minutes] if a.minutes else []
        self.run("train", *self.training("end", *shlex.split(flags), *length))
        self.seconds["train"] = time.time() - begin
        self.say("trained")

    def drafters(self) -> dict[str, Path]:
        """All that may be the best, by name."""
        from peagle.checkpoints.average import average
        from peagle.checkpoints.drafter import trained_draft_tokens

        end = self.out / "end"
        found = {"start": self.args.start, "end": end}
        for share in self.args.shares:
            name = f"mean-{share:g}"
            found[name] = self.out / name
            if not found[name].exists():
                average([self.args.start, end], found[name], [1 - share, share])
                # The mean says what both were trained for; how deep this one may draft is about to be measured.
                config = json.loads((found[name] / "config.json").read_text())
                config["trained_draft_tokens"] = trained_draft_tokens(end)
                (found[name] / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        return found

    def measure(self, drafters: dict[str, Path], into: str) -> Held:
        from peagle.results.schema import read_results

        begin, a = time.time(), self.args
        words = ["eval", a.target, "-d", *drafters.values(), "--data", a.held, "-k", *a.drafts, "--device", a.device]
        words += ["--max-tokens", a.max_tokens, "--out", self.out / f"{into}.json", *shlex.split(a.eval)]
        self.run(f"eval-{into}", *words)
        self.seconds[into] = self.seconds.get(into, 0.0) + time.time() - begin
        names = {folder.name: name for name, folder in drafters.items()}
        found: Held = {name: {} for name in drafters}
        for row in read_results(self.out / f"{into}.json").rows:
            if row.category is None and row.context is None and row.acceptance_length is not None:
                own = found[names[Path(row.drafter).name]].setdefault(row.loops, {})
                own[row.k] = round(row.acceptance_length, 4)
        return found

    def keep(self, best: str, drafters: dict[str, Path]) -> None:
        """The drafter alone, without what a run leaves beside it."""
        into = self.out / "best"
        shutil.rmtree(into, ignore_errors=True)
        into.mkdir()
        for name in ("config.json", "model.safetensors"):
            shutil.copy2(drafters[best] / name, into / name)


def _hears_interrupts() -> None:
    """Also where this runs behind a shell's `&`, which has all below it ignore them."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def lines(path: Path) -> int:
    with open(path, "rb") as file:
        return sum(1 for _ in file)


def _by_k(lengths: dict[Any, float]) -> dict[int, float]:
    return {int(k): length for k, length in lengths.items()}


def show(held: Held) -> None:
    for name, own in held.items():
        for loops, lengths in own.items():
            print(f"{name or '-':30} {loops:8} " + "  ".join(f"K={k} {al:.3f}" for k, al in sorted(lengths.items())))
    sys.stdout.flush()


def last_step(path: Path) -> dict[str, Any]:
    """Of a run's log."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return next((row for row in reversed(rows) if row["kind"] == "step"), {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path, nargs="*", help="files of prompts; each has an engine of its own")
    parser.add_argument("--texts", type=Path, nargs="+", metavar="FILE", help="instead of prompts")
    parser.add_argument("--start", type=Path, required=True, help="folder of the drafter")
    parser.add_argument("--held", type=Path, required=True, help="prompts that are in none of the files")
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--write-seconds", type=float, default=330)
    parser.add_argument("--minutes", type=float, help="of training, where --train does not say how long")
    parser.add_argument("--data", default="", help="more flags of `peagle data`")
    parser.add_argument("--train", default="", help="of `peagle train`")
    parser.add_argument("--eval", default="", help="of `peagle eval`")
    parser.add_argument("--try", dest="tries", action="append", default=[], help="flags to try first; may come often")
    parser.add_argument("--try-steps", type=int, default=300)
    parser.add_argument("--shares", type=float, nargs="*", default=[0.5, 0.75], help="of the end, in a mean")
    parser.add_argument("--drafts", type=int, nargs="+", default=[3, 5, 7, 9, 12, 15])
    parser.add_argument("--choose", type=int, default=7, help="the K whose best is kept")
    parser.add_argument("--max-tokens", type=int, default=256, help="of answers to held prompts")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    made_here = ["end", *(f"mean-{share:g}" for share in args.shares), *(f"try-{i}" for i in range(len(args.tries)))]
    if args.start.name in made_here:
        parser.error(f"--start {args.start}: what this makes has such a name, too; rename it")
    if bool(args.prompts) == bool(args.texts):
        parser.error("give files of prompts, or --texts")
    if args.choose not in args.drafts:
        parser.error(f"--choose {args.choose}: not among --drafts {' '.join(map(str, args.drafts))}")
    if len(set(args.tries)) < len(args.tries) or "start" in args.tries:
        parser.error("--try: the same flags twice, or `start`, which are none")
    steps, noted = Steps(args), args.out / "tries-noted.json"
    if not (args.out / "end" / "model.safetensors").exists():
        if not noted.exists() and not args.texts:
            steps.write()
        if args.tries and not noted.exists():
            noted.write_text(json.dumps(steps.attempt(), indent=1) + "\n")
    tried: Held = json.loads(noted.read_text()) if noted.exists() else {}
    tried = {flags: {loops: _by_k(own) for loops, own in each.items()} for flags, each in tried.items()}
    show(tried)
    flags = max(args.tries, key=lambda flags: tried[flags]["all"][args.choose], default="")
    if not (args.out / "end" / "model.safetensors").exists():
        steps.train(flags)
    drafters = steps.drafters()
    held = steps.measure(drafters, "held")
    best = max(held, key=lambda name: held[name]["all"][args.choose])
    steps.keep(best, drafters)
    show(held)
    print(f"best at K={args.choose}: {best}, trained with {flags or 'no more flags'}")
    made = {
        "command": shlex.join(["python", "benchmarks/training_further.py", *sys.argv[1:]]),
        "rows": sum(map(lines, steps.texts)),
        "run": last_step(args.out / "end" / "log.jsonl"),
        "seconds": {name: round(value, 1) for name, value in steps.seconds.items()},
        "tried": tried,
        "flags": flags,
        "held": held,
        "best": best,
    }
    (args.out / "further.json").write_text(json.dumps(made, indent=1) + "\n")
    print(json.dumps(made))


if __name__ == "__main__":
    main()
