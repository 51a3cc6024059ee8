"""One training step of a P-EAGLE drafter: time, peak memory and share of the GPU's matrix rate, by sequence length.

    python benchmarks/training_step.py --speculators-path DEST --out training_step.json

A step is forward and backward of one sequence without the optimizer: 4 layers of the 8B shape, vocabulary 128,256,
8 depths, down_sample_ratio 0.8, KL to the target's distribution, bf16 weights, frozen embeddings and LM head. Hidden
states of the target are random. Variants (training_variants.py):

    ours                the sequence partition of peagle.training
    ours-again          with activation checkpointing
    whole, logits       depth 0 and all chains in one autograd graph; with full logits
    algorithm1          the paper's Algorithm 1
    speculators         speculators 0.9.0 as its trainer runs it: fp32 weights, bf16 autocast, torch.compile
    speculators-eager   the same without torch.compile

Every variant is a process of its own and stops at the first length that does not fit. Results are added to --out as
they come; --resume measures what is missing. --tiny runs toy sizes on the CPU. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LENGTHS = [2048, 4096, 8192, 16384, 20480, 32768, 65536]
QUICK = [2048, 8192, 20480]
MATRIX_RATE = 790e12  # bf16 FLOP/s of GEMMs on an H200, measured
GB = 10**9
PROFILED = ("ours", "speculators", "speculators-eager")
KINDS = {
    "attention": ("_forward_kernel", "_delta_kernel", "_dq_kernel", "_dkv_kernel", "_merge", "flex_attention", "fmha"),
    "products": ("gemm", "nvjet", "cutlass", "xmma", "splitK", "_linear_kernel"),
    "loss": ("_rows_kernel", "_teacher_kernel", "_loss_", "_fused_loss", "log_softmax", "LogSoftMax"),
}

Json = dict[str, Any]


def plan(args: argparse.Namespace) -> list[Json]:
    """Processes, the most important first, since time may run out."""
    if args.tiny:
        lengths = [128, 256]
    else:
        lengths = args.lengths or (QUICK if args.quick else LENGTHS)

    def some(*wanted: int) -> list[int]:
        return lengths if args.tiny else [n for n in wanted if n in lengths]

    jobs: list[Json] = [
        {"variant": "ours", "lengths": lengths, "seconds": 150},
        {"variant": "whole", "lengths": lengths, "seconds": 60},
    ]
    if args.speculators_path:
        theirs = some(2048, 4096, 8192, 16384, 20480, 32768)
        jobs.append({"variant": "speculators", "lengths": theirs, "seconds": 420})
    jobs += [
        {"variant": "algorithm1", "lengths": some(8192, 20480), "seconds": 60},
        {"variant": "ours-again", "lengths": some(20480), "seconds": 60},
        {"variant": "logits", "lengths": some(2048, 8192, 20480), "seconds": 60},
    ]
    if args.speculators_path:
        jobs.append({"variant": "speculators-eager", "lengths": theirs, "seconds": 240})
    jobs.append({"variant": "ours-again", "lengths": some(65536), "seconds": 90})
    wanted = set(args.variants.split(",")) if args.variants else {job["variant"] for job in jobs}
    unknown = wanted - {job["variant"] for job in jobs}
    if unknown:
        raise SystemExit(f"--variants {','.join(sorted(unknown))}: not among {', '.join(j['variant'] for j in jobs)}")
    return [job for job in jobs if job["variant"] in wanted]


def measure(step: Callable[[], None], job: Json, clear: Callable[[], None]) -> Json:
    """One warm-up step, up to three timed steps, and one under the profiler."""
    import torch

    cuda = job["device"] == "cuda"
    times: list[float] = []
    base = first = peak = 0.0
    for turn in range(4):
        clear()
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            base = torch.cuda.memory_allocated()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            began = time.perf_counter()
            begin.record()
            step()
            end.record()
            end.synchronize()
            took = begin.elapsed_time(end)
            first = first or (time.perf_counter() - began) * 1e3
            peak = max(peak, torch.cuda.max_memory_allocated())
        else:
            began = time.perf_counter()
            step()
            took = (time.perf_counter() - began) * 1e3
            first = first or took
        if turn:
            times.append(took)
        if sum(times) > 3000:
            break
    found: Json = {"ms": statistics.median(times), "ms_all": times, "first_ms": first}
    if cuda:
        found |= {"peak_gb": peak / GB, "before_gb": base / GB}
        if job["variant"] in PROFILED:
            clear()
            try:
                found["kernels_ms"] = profiled(step)
            except RuntimeError as error:  # the timing stays valid
                found["profile_error"] = f"{type(error).__name__}: {error}"[:300]
    return found


def profiled(step: Callable[[], None]) -> Json:
    """Milliseconds of one step's kernels by kind."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    sums = dict.fromkeys([*KINDS, "rest"], 0.0)
    for event in profile.events():
        sums[kind_of(event.name)] += event.device_time / 1e3
    return sums


def kind_of(name: str) -> str:
    return next((kind for kind, marks in KINDS.items() if any(m in name for m in marks)), "rest")


def our_steps(job: Json) -> Callable[[int], Json]:
    import torch
    from training_variants import SHAPES, VARIANTS, Models, documents, random_work, step_flops

    from peagle.training.memory import auto_chunk_size

    device = torch.device(job["device"])
    shape = SHAPES[job["shape"]]
    models = Models.random(shape, torch.bfloat16 if device.type == "cuda" else torch.float32, device)
    name = job["variant"]
    models.drafter.recompute = name == "ours-again"
    variant = VARIANTS["ours" if name == "ours-again" else name]
    weights = sum(p.nbytes for p in (*models.drafter.parameters(), *models.target.parameters()))

    def at(tokens: int) -> Json:
        work = random_work(models, documents([tokens], 0.0, shape.vocab))
        rows = job["chunk_rows"] or auto_chunk_size(models.drafter, tokens, shape.depths)
        found = measure(lambda: variant(models, work, rows), job, lambda: models.drafter.zero_grad(set_to_none=True))
        flops = step_flops(shape, work.batch, work.rows)
        found |= {"rows": len(work.rows.anchor_R) + tokens, "weights_gb": weights / GB}
        found |= {"flops": flops.total, "attention_flops": flops.attention}
        return found | ({"chunk_rows": rows} if name in ("ours", "ours-again", "algorithm1") else {})

    return at


def worker(file: Path) -> None:
    """Measures one length after another until one fails; writes one line each."""
    job = json.loads(file.read_text())
    faulthandler.dump_traceback_later(max(1, job["seconds"] - 5))  # a stack trace before the time limit
    lines = file.with_name("records.jsonl")
    import torch

    torch.manual_seed(0)
    tokens = 0

    def write(record: Json) -> None:
        with open(lines, "a") as into:
            into.write(json.dumps({"variant": job["variant"], **record}) + "\n")

    try:
        if job["variant"].startswith("speculators"):
            from training_speculators import speculators_steps

            at = speculators_steps(job, measure)
        else:
            at = our_steps(job)
        for tokens in job["lengths"]:
            if job["device"] == "cuda":
                torch.cuda.empty_cache()
            began = time.time()
            found = at(tokens)
            found |= {"tokens": tokens, "tok_s": tokens / found["ms"] * 1e3, "wall_s": time.time() - began}
            write(found | {"share": found["flops"] / found["ms"] * 1e3 / MATRIX_RATE})
    except torch.OutOfMemoryError as error:
        write({"tokens": tokens, "error": f"out of memory: {str(error).splitlines()[0][:300]}"})
    except Exception as error:
        traceback.print_exc()
        write({"tokens": tokens, "error": f"{type(error).__name__}: {error}"[:1000]})
        raise SystemExit(1) from None


class Session:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.began = args, time.time()
        self.deadline = self.began + args.seconds
        self.scratch = Path(tempfile.mkdtemp(prefix="peagle-training-"))
        self.results: Json = {"records": [], "notes": [], "calls": []}
        if args.resume and args.out and args.out.exists():
            self.results |= json.loads(args.out.read_text())

    def say(self, text: str) -> None:
        print(f"[{time.time() - self.began:6.1f} s] {text}", flush=True)

    def save(self) -> None:
        if self.args.out:
            unfinished = self.args.out.with_name(self.args.out.name + ".unfinished")
            unfinished.write_text(json.dumps(self.results, indent=1))
            os.replace(unfinished, self.args.out)

    def of(self, variant: str) -> dict[int, Json]:
        """By length, without failures."""
        return {r["tokens"]: r for r in self.results["records"] if r["variant"] == variant and "error" not in r}

    def missing(self, job: Json) -> list[int]:
        full = [
            r["tokens"]
            for r in self.results["records"]
            if r["variant"] == job["variant"] and "out of memory" in r.get("error", "")
        ]
        done = self.of(job["variant"])
        return [n for n in job["lengths"] if n not in done and n < min(full, default=1 << 60)]

    def run(self, job: Json) -> None:
        lengths = self.missing(job)
        if not lengths:
            return
        if self.deadline - time.time() < (1 if self.args.tiny else 15):
            self.results["notes"].append(f"out of time: {job['variant']} {lengths} not measured")
            return
        folder = Path(tempfile.mkdtemp(prefix=f"{job['variant']}-", dir=self.scratch))
        limit = min(self.deadline, time.time() + job["seconds"])
        job = job | {
            "lengths": lengths,
            "seconds": limit - time.time(),
            "device": "cpu" if self.args.tiny else "cuda",
            "shape": "tiny" if self.args.tiny else "8b",
            "chunk_rows": self.args.chunk_rows,
            "speculators_path": self.args.speculators_path,
        }
        file, lines = folder / "job.json", folder / "records.jsonl"
        file.write_text(json.dumps(job))
        lines.touch()
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = os.environ | {"PYTHONPATH": path, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
        if job["variant"].startswith("speculators"):
            # compile in the worker, which logs each stage
            env["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        command = [sys.executable, str(Path(__file__).resolve()), "--worker", str(file)]
        self.say(f"measuring {job['variant']} at {lengths}, {limit - time.time():.0f} s at most")
        seen = heard = 0
        with open(folder / "log.txt", "wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=env, start_new_session=True)
        try:
            while True:
                ended = process.poll() is not None
                records = lines.read_text().splitlines()
                for line in records[seen:]:
                    self.take(json.loads(line))
                seen = len(records)
                heard = self.repeat_stages(folder / "log.txt", heard)
                if ended:
                    break
                if time.time() > limit:
                    self.results["notes"].append(f"{job['variant']}: out of time after {seen} of {lengths}")
                    self.say(self.results["notes"][-1])
                    break
                time.sleep(0.1)
        finally:
            if process.poll() is None:  # with its compiler processes
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        text = (folder / "log.txt").read_text(errors="replace")
        if process.returncode:
            where = text.rfind("most recent call first")  # a worker that ran out of time: its innermost frames
            print(text[-3000:] if where < 0 else text[where : where + 3000], flush=True)
            if seen == 0 and process.returncode > 0:
                self.results["notes"].append(f"{job['variant']} ended with {process.returncode}: {text[-600:]}")
        self.save()

    def repeat_stages(self, log: Path, heard: int) -> int:
        """Prints the worker's stage lines after byte `heard` of its log; returns the new position."""
        with open(log, "rb") as lines:
            lines.seek(heard)
            for line in lines:
                if not line.endswith(b"\n"):  # still being written
                    break
                heard += len(line)
                if line.startswith(b"stage: "):
                    self.say(line.decode(errors="replace").strip())
        return heard

    def take(self, record: Json) -> None:
        def outdone(old: Json) -> bool:
            return old["variant"] == record["variant"] and (old["tokens"] == record["tokens"] or "error" in old)

        kept = [old for old in self.results["records"] if not outdone(old)]
        self.results["records"] = [*kept, record]
        figure = record.get("error") or f"{record['ms']:.1f} ms, {record.get('peak_gb', 0):.1f} GB"
        self.say(f"{record['variant']} {record['tokens']}: {figure}")
        self.save()

    def goals(self) -> list[str]:
        """Summary lines: memory and speed relative to the other variants."""
        found = []
        ours, whole = self.of("ours"), self.of("whole")
        if 65536 in ours:
            found.append(f"64K tokens on one GPU: {ours[65536]['ms'] / 1e3:.2f} s, {ours[65536]['peak_gb']:.1f} GB")
        for name, other in (("whole", whole), ("logits", self.of("logits"))):
            for mine in ("ours", "ours-again"):
                both = sorted(self.of(mine).keys() & other.keys())
                if both and "peak_gb" in other[both[-1]]:
                    ratio = self.of(mine)[both[-1]]["peak_gb"] / other[both[-1]]["peak_gb"]
                    found.append(f"memory of {mine} at {both[-1]:,}: {ratio:.2f} of {name}")
        for name in ("speculators", "speculators-eager"):
            theirs = self.of(name)
            both = sorted(ours.keys() & theirs.keys())
            if both:
                ratio = theirs[both[-1]]["ms"] / ours[both[-1]]["ms"]
                found.append(f"against {name} at its longest, {both[-1]:,}: {ratio:.2f}x the tokens a second")
        flat = {n: (r["ms"] - r["kernels_ms"]["attention"]) / n * 1e3 for n, r in ours.items() if "kernels_ms" in r}
        if flat:
            text = ", ".join(f"{n // 1024}K {us:.1f}" for n, us in sorted(flat.items()))
            found.append(f"microseconds a token without attention: {text}")
        return found

    def report(self) -> None:
        commit = ""
        if shutil.which("git"):
            result = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT)
            commit = result.stdout.strip()
        import torch

        versions = {"python": platform.python_version(), "torch": torch.__version__}
        call = {
            "command": " ".join(["python", *sys.argv]),
            "commit": os.environ.get("PEAGLE_COMMIT") or commit or "unknown",
            "seconds": round(time.time() - self.began, 1),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "versions": versions | ({"speculators": "0.9.0"} if self.args.speculators_path else {}),
        }
        self.results["calls"].append(call)
        self.results["records"].sort(key=lambda r: (r["variant"], r["tokens"]))
        self.results["goals"] = [] if self.args.tiny else self.goals()
        self.save()
        print(table(self.results["records"]))
        for line in self.results["goals"] + self.results["notes"]:
            print(line)
        print(json.dumps({"bench": "training_step", **self.results}))


def table(records: list[Json]) -> str:
    columns = ["tokens", "ms", "tok/s", "peak GB", "TFLOP", "of 790", "attention", "products", "loss", "rest", "gaps"]
    lines = [f"{'variant':18}" + "".join(f"{name:>11}" for name in columns)]
    for r in records:
        head = f"{r['variant']:18}{r['tokens']:>11,}"
        if "error" in r:
            lines.append(f"{head}  {r['error'][:120]}")
            continue
        cells = [f"{r['ms']:.1f}", f"{r['tok_s']:,.0f}", f"{r.get('peak_gb', 0):.1f}", f"{r['flops'] / 1e12:.1f}"]
        cells.append(f"{r['share']:.0%}")
        if kinds := r.get("kernels_ms"):
            shares = [kinds[k] for k in ("attention", "products", "loss", "rest")]
            shares.append(r["ms"] - sum(shares))
            cells += [f"{x / r['ms']:.0%}" for x in shares]
        lines.append(head + "".join(f"{cell:>11}" for cell in cells))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", help="sequence lengths; default 2K to 64K")
    parser.add_argument("--quick", action="store_true", help="2K, 8K and 20K only")
    parser.add_argument("--variants", help="comma-separated; default all")
    parser.add_argument("--chunk-rows", type=int, help="chain positions per chunk; default from free memory")
    parser.add_argument("--speculators-path", help="folder with speculators 0.9.0; default: not measured")
    parser.add_argument("--seconds", type=float, default=360, help="wall-clock limit for everything")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker)
        return
    session = Session(args)
    try:
        for job in plan(args):
            session.run(job)
        session.report()
    finally:
        shutil.rmtree(session.scratch, ignore_errors=True)


if __name__ == "__main__":
    main()
