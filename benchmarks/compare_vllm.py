"""Output tokens/s of peagle and stock vLLM on one GPU, for targets of the size people serve.

    python benchmarks/compare_vllm.py --vllm-path DEST --model llama-8b --out results.json

Both engines load the same checkpoints (random weights, synthetic acceptance; see shapes.py), get the same prompts (256
random tokens, 256 output tokens, greedy) through their offline API, and run at 1, 8 and 64 concurrent requests without
speculation, with EAGLE-3 and with P-EAGLE, each at several K. Every configuration is a process of its own. Processes
start side by side, since starting is host work, and are measured one at a time. Each measurement is warmed up by one
full batch and then repeats whole batches for at least --measure-seconds.

Results are written after every measurement; the same command with --resume measures only what is missing. Prints a
table, then one JSON line. --tiny runs toy sizes on the CPU to test the script itself.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from random_weights import random_llm
from shapes import SHAPES, spread_weights, write_checkpoints

ROOT = Path(__file__).resolve().parent.parent

Json = dict[str, Any]
Generate = Callable[[list[list[int]], int], tuple[int, int | None]]  # prompts, max_tokens -> tokens, decode steps
ENGINES = ("vllm", "peagle")
PROMPT_TOKENS = OUTPUT_TOKENS = 256
CONCURRENCY = (1, 8, 64)
KV_CACHE_BYTES = int(5.4e9)


@dataclass(frozen=True)
class Configuration:
    """One engine with one method and K."""

    engine: str
    method: str  # none, eagle3, p-eagle
    k: int | str  # 0 without speculation; "auto" in peagle

    @property
    def name(self) -> str:
        return f"{self.engine}-{self.method}" + (f"-k{self.k}" if self.method != "none" else "")


def configurations(ks: list[int], eagle3_ks: list[int], engines: list[str]) -> list[Configuration]:
    found = []
    for engine in engines:
        found.append(Configuration(engine, "none", 0))
        found += [Configuration(engine, "eagle3", k) for k in eagle3_ks]
        found += [Configuration(engine, "p-eagle", k) for k in ks]
        if engine == "peagle":
            found.append(Configuration(engine, "p-eagle", "auto"))
    return found


def open_peagle(job: Json) -> Generate:
    from peagle import SamplingParams

    speculation: Json = {}
    if job["drafter"]:
        speculation = {"num_speculative_tokens": job["k"], "synthetic_acceptance_rates": job["rates"]}
    llm = random_llm(
        job["target"],
        job["drafter"],
        device=job["device"],
        dtype=job["dtype"],
        spread_weights=spread_weights if job["spread"] else None,
        max_num_seqs=job["max_num_seqs"],
        max_model_len=job["max_model_len"],
        kv_cache_memory_bytes=job["kv_cache_bytes"],
        enable_prefix_caching=False,
        tokenizer=False,
        **speculation,
    )

    def generate(prompts: list[list[int]], max_tokens: int) -> tuple[int, int | None]:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        outputs = [request.outputs[0] for request in llm.generate(prompts, params)]
        return sum(len(o.token_ids) for o in outputs), sum(o.num_decode_steps for o in outputs)

    return generate


def open_vllm(job: Json) -> Generate:
    """CUDA graphs, torch.compile and asynchronous scheduling are vLLM's defaults."""
    from vllm import LLM, SamplingParams

    settings: Json = {}
    if job["drafter"]:
        spec: Json = {"method": "eagle3", "model": job["drafter"], "num_speculative_tokens": job["k"]}
        if job["method"] == "p-eagle":
            spec["parallel_drafting"] = True
        if job["device"] == "cuda":
            spec |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": job["rates"]}
            spec["use_local_argmax_reduction"] = True  # the same tokens, faster than vLLM's default
        settings["speculative_config"] = spec
    if job["device"] == "cpu":
        settings["enforce_eager"] = True
    elif job["k"]:
        # The default of 512 tokens is less than 64 requests need to draft with K >= 5.
        settings["max_cudagraph_capture_size"] = 1024
    if job["spread"]:
        settings["worker_extension_cls"] = "shapes.SpreadWorker"
    llm = LLM(
        job["target"],
        dtype=job["dtype"],
        load_format="dummy",
        skip_tokenizer_init=True,
        max_num_seqs=job["max_num_seqs"],
        max_model_len=job["max_model_len"],
        max_num_batched_tokens=job["max_num_batched_tokens"],
        kv_cache_memory_bytes=job["kv_cache_bytes"],
        gpu_memory_utilization=0.05,  # replaced by the line above, but checked against the memory that is free
        enable_prefix_caching=False,
        seed=0,
        **settings,
    )
    if job["spread"]:
        llm.collective_rpc("spread")
    decode_steps = _count_vllm_outputs(llm)

    def generate(prompts: list[list[int]], max_tokens: int) -> tuple[int, int | None]:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        decode_steps[0] = 0
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return sum(len(o.outputs[0].token_ids) for o in outputs), decode_steps[0] - len(prompts)

    return generate


def _count_vllm_outputs(llm: Any) -> list[int]:
    """Counts outputs of the engine core: one is one request's share of one step. Costs nothing in the engine."""
    core, count = llm.llm_engine.engine_core, [0]
    receive = core.get_output

    def counted() -> Any:
        outputs = receive()
        count[0] += sum(1 for one in outputs.outputs if one.new_token_ids)
        return outputs

    core.get_output = counted
    return count


def measure(generate: Generate, job: Json, concurrency: int) -> Json:
    """Repeats whole batches for at least `measure_seconds`, after one batch of warm-up."""

    def batch(number: int) -> list[list[int]]:
        rng = random.Random(f"{concurrency}-{number}")  # the same prompts in both engines, never the same one twice
        ids = range(10, job["vocab_size"] - 10)
        return [rng.choices(ids, k=job["prompt_tokens"]) for _ in range(concurrency)]

    generate(batch(-1), job["output_tokens"])
    tokens, steps, seconds, rates = 0, 0, 0.0, []
    while seconds < job["measure_seconds"]:
        prompts = batch(len(rates))
        began = time.perf_counter()
        count, num_steps = generate(prompts, job["output_tokens"])
        took = time.perf_counter() - began
        tokens, steps, seconds = tokens + count, steps + (num_steps or 0), seconds + took
        rates.append(count / took)
    result: Json = {"output_tokens_per_second": tokens / seconds, "seconds": seconds, "batches": len(rates)}
    result["slowest_batch"], result["fastest_batch"] = min(rates), max(rates)
    if steps:
        result["acceptance_length"] = (tokens - len(rates) * concurrency) / steps
    return result


def run_worker(file: Path) -> None:
    """Builds one engine, writes `ready`, then measures one concurrency for each line of standard input."""
    job = json.loads(file.read_text())
    folder = file.parent
    try:
        generate = (open_vllm if job["engine"] == "vllm" else open_peagle)(job)
        version = sys.modules[job["engine"]].__version__
        _write_json(folder / "ready.json", {"seconds": time.time() - job["started"], "version": version})
    except BaseException as error:
        _write_json(folder / "ready.json", {"error": f"{type(error).__name__}: {error}"[:2000]})
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    for line in sys.stdin:
        concurrency = int(line)
        try:
            result = measure(generate, job, concurrency)
        except Exception as error:
            traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {error}"[:2000]}
        _write_json(folder / f"{concurrency}.json", result)
    os._exit(0)


def _write_json(path: Path, value: Any) -> None:
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_text(json.dumps(value, indent=1))
    os.replace(unfinished, path)


class Worker:
    """The parent's end of a worker process."""

    def __init__(self, config: Configuration, job: Json, scratch: Path, args: argparse.Namespace) -> None:
        self.config = config
        self.folder = Path(tempfile.mkdtemp(prefix=f"{config.name}-", dir=scratch))
        self.log = self.folder / "log.txt"
        file = self.folder / "job.json"
        file.write_text(json.dumps(job | asdict(config) | {"started": time.time()}))
        env = os.environ | {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        paths = [str(ROOT), str(ROOT / "benchmarks"), *filter(None, [env.get("PYTHONPATH")])]
        if config.engine == "vllm":
            env |= {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
            paths = [str(args.vllm_path.resolve())] * bool(args.vllm_path) + paths
            if args.tiny:
                env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        env["PYTHONPATH"] = os.pathsep.join(paths)
        command = [sys.executable, str(Path(__file__).resolve()), "--worker", str(file)]
        with open(self.log, "wb") as log:
            # A process group of its own: vLLM's engine core is a grandchild that must end too.
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=env, start_new_session=True
            )

    def read(self, name: str) -> Json | None:
        path = self.folder / f"{name}.json"
        if path.exists():
            found: Json = json.loads(path.read_text())
            return found
        if self.process.poll() is not None:
            return {"error": f"exit status {self.process.returncode}; see {self.log}"}
        return None

    def wait_for(self, name: str, deadline: float) -> Json:
        while time.time() < deadline:
            if (found := self.read(name)) is not None:
                return found
            time.sleep(0.05)
        return {"error": "out of time"}

    def measure(self, concurrency: int, deadline: float) -> Json:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{concurrency}\n".encode())
        self.process.stdin.flush()
        return self.wait_for(str(concurrency), deadline)

    def stop(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()


class Comparison:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.began = args, time.time()
        self.shape = SHAPES[args.model]
        self.scratch = Path(tempfile.mkdtemp(prefix="compare-vllm-"))
        self.folders = write_checkpoints(args.model, args.tiny, self.scratch)
        self.results: Json = {"model": args.model, "measurements": {}, "start_seconds": {}, "notes": []}
        if args.resume and args.out and args.out.exists():
            self.results |= json.loads(args.out.read_text())
        self.workers: list[Worker] = []

    def note(self, text: str) -> None:
        print(f"[{time.time() - self.began:5.0f} s] {text}", flush=True)

    def seconds_left(self) -> float:
        return self.args.seconds - (time.time() - self.began)

    def job(self, config: Configuration) -> Json:
        tiny = self.args.tiny
        values = json.loads(Path(self.folders["target"], "config.json").read_text())
        k = max(self.args.k) if config.k == "auto" else int(config.k)
        return {
            "target": self.folders["target"],
            "drafter": self.folders[config.method] if config.method != "none" else None,
            "rates": list(self.shape.acceptance_rates(k)),
            "spread": "num_experts_per_tok" in values,
            "vocab_size": values["vocab_size"],
            "device": "cpu" if tiny else "cuda",
            "dtype": "float32" if tiny else "bfloat16",
            "max_num_seqs": max(self.args.concurrency),
            "max_model_len": 128 if tiny else 1024,
            "max_num_batched_tokens": 2048 if tiny else 16896,
            "kv_cache_bytes": 1 << 28 if tiny else KV_CACHE_BYTES,
            "prompt_tokens": 16 if tiny else PROMPT_TOKENS,
            "output_tokens": 16 if tiny else OUTPUT_TOKENS,
            "measure_seconds": self.args.measure_seconds,
        }

    def missing(self, config: Configuration) -> list[int]:
        done = self.results["measurements"].get(config.name, {})
        return [c for c in self.args.concurrency if "error" in done.get(str(c), {"error": ""})]

    def run(self, configs: list[Configuration]) -> None:
        queue = [config for config in configs if self.missing(config)]
        at_once = max(1, int(self.args.gpu_memory_gb / self.shape.gpu_gb))
        while queue and self.seconds_left() > self.args.measure_seconds:
            wave, queue = queue[:at_once], queue[at_once:]
            self.run_wave(wave)

    def run_wave(self, wave: list[Configuration]) -> None:
        """Starts one worker per configuration side by side, then measures them one after the other."""
        self.note(f"starting {', '.join(config.name for config in wave)}")
        self.workers = [Worker(config, self.job(config), self.scratch, self.args) for config in wave]
        deadline = time.time() + max(0.0, min(self.args.start_seconds, self.seconds_left()))
        started = []
        for worker in self.workers:
            state = worker.wait_for("ready", deadline)
            name = worker.config.name
            if "error" in state:
                self.results["notes"].append(f"{name} did not start: {state['error']}")
                self.note(self.results["notes"][-1])
                print(worker.log.read_text(errors="replace")[-3000:], flush=True)
                worker.stop()
            else:
                self.results["start_seconds"][name] = state["seconds"]
                self.results[f"{worker.config.engine}_version"] = state["version"]
                started.append(worker)
        for worker in started:
            name = worker.config.name
            for concurrency in self.missing(worker.config):
                result = worker.measure(concurrency, time.time() + max(1.0, self.seconds_left()))
                self.results["measurements"].setdefault(name, {})[str(concurrency)] = result
                figure = result.get("error") or f"{result['output_tokens_per_second']:,.0f} tokens/s"
                self.note(f"{name}, {concurrency} requests: {figure}")
                self.save()
            worker.stop()
        self.workers = []

    def save(self) -> None:
        if self.args.out:
            self.args.out.parent.mkdir(parents=True, exist_ok=True)
            _write_json(self.args.out, self.results)

    def close(self) -> None:
        for worker in self.workers:
            worker.stop()
        shutil.rmtree(self.scratch, ignore_errors=True)

    def stamp(self) -> None:
        from peagle.results.provenance import Provenance

        made = asdict(Provenance.collect(" ".join(["python", *sys.argv])))
        self.results.setdefault("calls", []).append(made | {"seconds": time.time() - self.began})

    def print_table(self) -> None:
        def figure(config: str, concurrency: int) -> str:
            found = self.results["measurements"].get(config, {}).get(str(concurrency), {})
            rate = found.get("output_tokens_per_second")
            length = found.get("acceptance_length", 1.0)
            return "-" if rate is None else f"{rate:,.0f}" + (f" ({length:.2f})" if length > 1.05 else "")

        print(f"{self.shape.label}: output tokens/s (acceptance length)")
        print(f"{'':24}" + "".join(f"{c:>18}" for c in self.args.concurrency))
        for config in self.results["measurements"]:
            print(f"{config:24}" + "".join(f"{figure(config, c):>18}" for c in self.args.concurrency))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="llama-8b", help="target shape")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("-k", type=int, nargs="+", default=[3, 5, 7], help="K of P-EAGLE; peagle also runs K auto")
    parser.add_argument("--eagle3-k", type=int, nargs="+", default=[3], help="K of EAGLE-3")
    parser.add_argument("--concurrency", type=int, nargs="+", default=list(CONCURRENCY))
    parser.add_argument("--vllm-path", type=Path, help="folder with an unpacked vLLM; default: the installed one")
    parser.add_argument("--out", type=Path, help="results as JSON, written after every measurement")
    parser.add_argument("--resume", action="store_true", help="keep the results in --out, measure the rest")
    parser.add_argument("--seconds", type=float, default=570, help="wall-clock limit for everything")
    parser.add_argument("--start-seconds", type=float, default=240, help="limit for starting a group of engines")
    parser.add_argument("--measure-seconds", type=float, default=10, help="least duration of one measurement")
    parser.add_argument("--gpu-memory-gb", type=float, default=140, help="memory that engines side by side may use")
    parser.add_argument("--tiny", action="store_true", help="toy sizes on the CPU")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return run_worker(args.worker)
    comparison = Comparison(args)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        comparison.run(configurations(args.k, args.eagle3_k, args.engines))
    finally:
        comparison.close()
        comparison.stamp()
        comparison.save()
        comparison.print_table()
        print(json.dumps(comparison.results))


if __name__ == "__main__":
    main()
