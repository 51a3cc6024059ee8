"""Trained drafters on one GPU, here and in stock vLLM: what they have accepted, and how fast each engine is with them.

    python benchmarks/drafters.py --p-eagle DIR --eagle3 DIR --data-dir DIR --vllm-path DEST --out DIR

Everything is `peagle eval` and `peagle bench`. Starting vLLM is mostly host work, so all start side by side, and
a lock lets one alone measure its speed; acceptance, which no clock is part of, is counted while they start, and what is
not done by then after them. Writes acceptance.json (K of 1, 3, 5, 7, 10 in one pass), acceptance-vllm.json (its own
counters, K of 3 and 7) and speed.json for `peagle report`, then prints both tables and one JSON line. What is in DIR
already is not measured again.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

SETS = ("mt_bench", "humaneval", "gsm8k")
KV_BYTES = 3 << 30


def runs(drafts: Sequence[int], deep: Sequence[int] = ()) -> list[tuple[str, str]]:
    """Methods and K; P-EAGLE, which pays for no pass by each, has the deep ones, too."""
    both = [(method, str(k)) for method in ("eagle3", "p-eagle") for k in drafts]
    return [("none", "0"), *both, *(("p-eagle", str(k)) for k in deep)]


def worker(args: argparse.Namespace) -> None:
    """One engine: started at once, measured when it has the lock."""
    from peagle.bench.run import Variant, bench
    from peagle.bench.variants import Embedded
    from peagle.bench.workload import Load
    from peagle.config import BenchEngineSettings, BenchSettings

    class Told:
        def start(self, name: str, load: Load, part: str, requests: int) -> None:
            print(f"{time.strftime('%H:%M:%S')} {name} {load} {part}", flush=True)

        def tell(self, requests: int, tokens: int) -> None: ...

    settings = BenchSettings(
        concurrency=tuple(args.loads),
        requests=args.requests,
        waves=args.waves,
        repeats=args.repeats,
        max_tokens=args.speed_tokens,
    )
    length, dtype = (2048, "bfloat16") if args.device == "cuda" else (1024, "float32")
    own = BenchEngineSettings(args.device, dtype, max_num_seqs=64, max_model_len=length, kv_cache_memory_bytes=KV_BYTES)
    drafters = [str(args.eagle3 if args.method == "eagle3" else args.p_eagle)] if args.method != "none" else []
    k: Any = args.k if args.k == "auto" else int(args.k)
    asked = Embedded(args.target, drafters, [k], not drafters, own, args.side)
    data = [str(args.data_dir / f"{name}.jsonl") for name in SETS]
    workload = asked.workload(data, settings)

    def in_turn(variant: Variant) -> Callable[[], Any]:
        @contextmanager
        def opened() -> Iterator[Any]:
            with ExitStack() as stack:
                lock = stack.enter_context(open(args.lock))
                engine = None if args.k == "auto" else stack.enter_context(variant.open())
                Path(args.ready).touch()
                fcntl.flock(lock, fcntl.LOCK_EX)
                # the table K is chosen from is measured at the start, so that one starts alone too
                yield stack.enter_context(variant.open()) if engine is None else engine

        return opened

    variants = [replace(v, open=in_turn(v)) for v in asked.variants(workload, settings)]
    bench(variants, workload, settings, Told(), args.part, asked.fixed)


class Session:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.began = args, time.time()
        self.out: Path = args.out
        self.parts = self.out / "parts"
        self.parts.mkdir(parents=True, exist_ok=True)
        self.running: list[subprocess.Popen[bytes]] = []
        self.commands: dict[str, tuple[str, list[str]]] = {}

    def left(self) -> float:
        return self.args.seconds - (time.time() - self.began)

    def say(self, text: str) -> None:
        print(f"[{time.time() - self.began:6.1f} s] {text}", flush=True)

    def start(self, name: str, side: str, command: list[str]) -> subprocess.Popen[bytes]:
        env = {**os.environ, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        path = [str(ROOT), *filter(None, [env.get("PYTHONPATH")])]
        if side == "vllm":
            env |= {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
            path = [*([str(self.args.vllm_path)] if self.args.vllm_path else []), *path]
        env["PYTHONPATH"] = os.pathsep.join(path)
        self.commands[name] = side, command
        with open(self.parts / f"{name}.log", "ab") as log:
            # a session of its own: vLLM's engine is a grandchild, and both must be gone at the end
            made = subprocess.Popen(command, stdout=log, stderr=log, env=env, start_new_session=True)
        self.running.append(made)
        return made

    def evals(self) -> dict[str, subprocess.Popen[bytes]]:
        a = self.args
        common = [a.target, "--data", *SETS, "--data-dir", str(a.data_dir), "--dtype", a.eval_dtype]
        common += ["--max-tokens", str(a.max_tokens), "--max-model-len", "2560"]
        peagle = [sys.executable, "-m", "peagle", "eval", *common]
        both = ["-d", str(a.p_eagle), str(a.eagle3)]
        found = {}
        ours = [
            *both,
            "-k",
            "1",
            "3",
            "5",
            "7",
            "10",
            *map(str, a.deep),
            "--temperature",
            "0",
            "1",
            "--kv-cache-memory-bytes",
            str(8 * KV_BYTES),
        ]
        found["acceptance"] = self.start(
            "acceptance", "embedded", [*peagle, *ours, "--out", str(self.out / "acceptance.json")]
        )
        if a.vllm_path or a.vllm:
            for method, folder in (("p-eagle", a.p_eagle), ("eagle3", a.eagle3)):
                for k in ("3", "7"):
                    name = f"acceptance-vllm-{method}-{k}"
                    own = ["-d", str(folder), "-k", k, "--engine", "vllm", "--concurrency", "64"]
                    own += ["--kv-cache-memory-bytes", str(KV_BYTES), "--out", str(self.parts / f"{name}.json")]
                    found[name] = self.start(name, "vllm", [*peagle, *own])
        return found

    def benches(self, lock: Path) -> dict[str, subprocess.Popen[bytes]]:
        a = self.args
        found = {}
        wanted = [("embedded", *one) for one in (*runs(a.drafts, a.deep), ("p-eagle", "auto"))]
        if a.vllm_path or a.vllm:
            wanted += [("vllm", *one) for one in runs(a.vllm_drafts or a.drafts) if one[0] in a.vllm_methods]
        for side, method, k in wanted:
            name = f"speed-{side}-{method}-{k}"
            command = [sys.executable, str(Path(__file__).resolve()), "--worker", "--side", side, "--method", method]
            command += ["--k", k, "--lock", str(lock), "--part", str(self.parts / f"{name}.json")]
            command += ["--ready", str(self.parts / f"{name}.ready"), "--requests", str(a.requests)]
            command += ["--loads", *map(str, a.loads), "--waves", str(a.waves), "--repeats", str(a.repeats)]
            command += ["--speed-tokens", str(a.speed_tokens), "--target", a.target, "--device", a.device]
            command += ["--p-eagle", str(a.p_eagle), "--eagle3", str(a.eagle3), "--data-dir", str(a.data_dir)]
            found[name] = self.start(name, side, command)
        return found

    def run(self) -> None:
        lock = self.parts / "lock"
        lock.touch()
        with open(lock) as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            benches, evals = self.benches(lock), {} if self.args.skip_eval else self.evals()
            self.say(f"started {len(benches)} engines and {len(evals)} counts of acceptance")
            told: set[str] = set()
            while self.left() > self.args.for_speed:
                time.sleep(0.5)
                ready = {n for n in benches if (self.parts / f"{n}.ready").exists() or benches[n].poll() is not None}
                counted = {n for n, process in evals.items() if process.poll() is not None}
                for name in sorted((ready | counted) - told):
                    failed = benches.get(name, evals.get(name)).poll() not in (None, 0)  # type: ignore[union-attr]
                    self.say(f"{name}{' FAILED' if failed else ' ready' if name in ready else ' counted'}")
                told |= ready | counted
                if len(ready) == len(benches) and len(counted) == len(evals):
                    break
            for name, process in {**evals, **benches}.items():
                if name not in told:
                    self.say(f"{name} was too slow")
                    self.stop(process)
        self.wait(benches)
        self.say("measured")
        late = [name for name in evals if name not in told]
        self.wait({name: self.start(name, *self.commands[name]) for name in late})  # these go on where they were

    def wait(self, running: dict[str, subprocess.Popen[bytes]]) -> None:
        for name, process in running.items():
            try:
                process.wait(max(0.1, self.left()))
            except subprocess.TimeoutExpired:
                self.say(f"out of time: {name}")
                self.stop(process)

    def stop(self, process: subprocess.Popen[bytes]) -> None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def close(self) -> None:
        for process in self.running:
            self.stop(process)

    def merge(self, pattern: str, into: str) -> None:
        """Documents of the same settings as one."""
        from peagle.results.files import read_results, write_results

        parts = [read_results(path) for path in sorted(self.parts.glob(pattern))]
        if not parts:
            return
        first = parts[0]
        versions = {name: version for part in parts for name, version in part.provenance.versions.items()}
        shell = " ".join(["python", "benchmarks/drafters.py", *sys.argv[1:]])
        stamp = replace(first.provenance, command=shell, versions=versions, duration=time.time() - self.began)
        settings = {k: v for part in parts for k, v in part.settings.items()}
        warnings = list(dict.fromkeys(w for part in parts for w in part.warnings))
        rows = [row for part in parts for row in part.rows]
        made = replace(first, provenance=stamp, settings=settings, rows=rows, warnings=warnings)
        write_results(self.out / into, replace(made, finished=all(part.finished for part in parts)))

    def report(self) -> None:
        from peagle.results.files import read_results

        self.merge("speed-*.json", "speed.json")
        self.merge("acceptance-vllm-*.json", "acceptance-vllm.json")
        line: dict[str, Any] = {"acceptance": [], "speed": []}
        for name in ("acceptance.json", "acceptance-vllm.json"):
            if (self.out / name).exists():
                for r in read_results(self.out / name).rows:
                    if r.category is None and r.context_range is None and r.acceptance_length is not None:
                        al = round(r.acceptance_length, 3)
                        line["acceptance"].append(
                            [
                                r.engine,
                                r.method,
                                r.dataset,
                                r.temperature,
                                r.looping_responses,
                                r.num_speculative_tokens,
                                al,
                            ]
                        )
        if (self.out / "speed.json").exists():
            for r in read_results(self.out / "speed.json").rows:
                al = r.repeats[-1].acceptance_length
                spread = [round(x.output_tokens_per_second) for x in r.repeats]
                line["speed"].append(
                    [r.name, r.concurrency, round(r.output_tokens_per_second), spread, al and round(al, 3)]
                )
        for kind in ("acceptance", "speed"):
            for row in line[kind]:
                print("  ".join(str(cell) for cell in row))
        print(json.dumps(line))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--p-eagle", type=Path, required=True)
    parser.add_argument("--eagle3", type=Path, required=True)
    parser.add_argument("--data-dir", type=Path, required=True, help=f"with {', '.join(SETS)} as .jsonl")
    parser.add_argument("--vllm-path", type=Path, help="folder with an unpacked vLLM, for its processes alone")
    parser.add_argument("--vllm", action="store_true", help="measure vLLM as it is installed")
    parser.add_argument(
        "--vllm-methods", nargs="+", default=["none", "eagle3", "p-eagle"], help="that vLLM is run with"
    )
    parser.add_argument("--vllm-drafts", type=int, nargs="+", help="K of vLLM's runs, where they are not all of them")
    parser.add_argument("--out", type=Path, help="folder of the results")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--loads", type=int, nargs="+", default=[1, 8, 64], help="requests at once")
    parser.add_argument("--drafts", type=int, nargs="+", default=[3, 7], help="K of the runs, beside ours with K auto")
    parser.add_argument("--deep", type=int, nargs="+", default=[], help="more K of our runs with P-EAGLE alone")
    parser.add_argument("--requests", type=int, default=256, help="of the three sets in turn, first turns")
    parser.add_argument("--waves", type=int, default=4, help="requests for each that runs at once, as far as there are")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=512, help="of answers whose acceptance is counted")
    parser.add_argument("--speed-tokens", type=int, default=512, help="of answers at most whose speed is measured")
    parser.add_argument("--eval-dtype", default="bfloat16", help="float32: both engines write the same texts")
    parser.add_argument("--seconds", type=float, default=760, help="wall clock for everything")
    parser.add_argument(
        "--for-speed",
        type=float,
        default=520,
        help="seconds of it kept for measuring; what has not started is left out",
    )
    parser.add_argument("--skip-eval", action="store_true", help="speed alone")
    for name in ("--side", "--method", "--k", "--lock", "--ready"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--part", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker(args)
    if args.out is None:
        parser.error("--out is needed")
    session = Session(args)
    try:
        session.run()
    finally:
        session.close()
        session.report()


if __name__ == "__main__":
    main()
