"""Output tokens/s, TTFT and ITL of `peagle serve` and `vllm serve` on one GPU, with `vllm bench serve` as the client.

    python benchmarks/serve_http.py --model llama-8b --smollm2 FOLDER --vllm-path DEST --out results.json
    python benchmarks/serve_http.py --model smollm2 --smollm2 FOLDER --prompts FOLDER --vllm-path DEST --out r.json

llama-8b is the Llama-3.1-8B shape with SmolLM2's vocabulary and tokenizer, random weights and synthetic acceptance on
both sides (see shapes.py). smollm2 is the real model with the shipped drafters; its prompts are MT-Bench, HumanEval and
GSM8K. vLLM runs each load in the configurations that are best for it: P-EAGLE with K=7 for few requests, EAGLE-3 with
K=3 for many, no speculation for 256. The servers of vLLM start at once, then peagle, which times decode steps at its
start. All caches are empty. Every load runs twice: the first pass is what the first users of a fresh server get (cold);
the second repeats its prompts (steady), which both servers find in their prefix caches. Results are written after every
load. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import urllib.request
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from random_weights import random_weights
from shapes import SHAPES, write_checkpoints

ROOT = Path(__file__).resolve().parent.parent
Json = dict[str, Any]
SAMPLING: dict[str, Json] = {
    "greedy": {"temperature": 0},
    "penalty": {"temperature": 0, "presence_penalty": 0.3},
    "logprobs": {"temperature": 0, "logprobs": 2},
    "sampled": {"temperature": 0.7, "top_p": 0.95},
    "json_schema": {
        "temperature": 0,
        "response_format": {
            "type": "json_schema",
            "json_schema": {
                "name": "answer",
                "schema": {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]},
            },
        },
    },
}


@dataclass(frozen=True)
class Load:
    concurrency: int
    num_prompts: int
    sampling: str = "greedy"
    passes: tuple[str, ...] = ("cold", "steady")


LOADS = {
    "llama-8b": [Load(64, 192), Load(8, 32), Load(1, 8), Load(256, 512)],
    "smollm2": [Load(64, 512), Load(256, 1024), Load(8, 128), Load(1, 24)],
}


@dataclass
class RunningServer:
    process: subprocess.Popen[bytes]
    port: int
    log: Path
    started_at: float
    concurrency: tuple[int, int]  # the smallest and the largest that it is measured with
    ready_s: float | None = None


def build_random_llm(job: Json) -> Any:
    """The embedded engine with random weights, in the engine process of `peagle serve`."""
    import torch

    from peagle import LLM
    from peagle.checkpoints.drafter import read_drafter_config
    from peagle.checkpoints.target import Target, read_target_config
    from peagle.models.decoder import Decoder
    from peagle.models.drafter import Drafter

    dtype, device, folder = torch.bfloat16, torch.device("cuda"), Path(job["target"])
    cfg = read_target_config(folder)
    target = Target(folder, random_weights(Decoder, cfg, dtype, device), frozenset())
    drafter_cfg = read_drafter_config(Path(job["drafter"]), cfg)
    drafter = random_weights(Drafter, drafter_cfg, dtype, device).share_weights(target.model)
    return LLM(target, drafter, "auto", **job["options"])


def serve_random_weights(job: Json) -> None:
    from peagle.config import ServeSettings
    from peagle.server.engine_client import EngineClient, start_engine_process
    from peagle.server.logs import start_logging
    from peagle.server.server import bind_socket, run_server

    settings = ServeSettings(port=job["port"], served_model_name="m", max_queued_requests=2000)
    start_logging(False)
    start_engine = partial(start_engine_process, partial(build_random_llm, job), False)
    listener = bind_socket(settings.host, settings.port)
    target_folder = Path(job["target"])
    run_server(lambda: EngineClient(start_engine, settings), settings, job["drafter"], "auto", listener, target_folder)


def run_bench_client(arguments: list[str], timeout: float, log: Path) -> Json | None:
    """Runs `vllm bench serve` in a fork of this process, which has imported it. None if it fails or takes too long."""
    from vllm.benchmarks import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    parsed = parser.parse_args(arguments)
    receiver, sender = multiprocessing.get_context("fork").Pipe(duplex=False)

    def run() -> None:
        with open(log, "w") as output, redirect_stdout(output), redirect_stderr(output):
            try:
                sender.send(serve.main(parsed))
            except BaseException:
                traceback.print_exc()
                sender.send(None)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    sender.close()
    result: Json | None = None
    try:
        if receiver.poll(timeout):
            result = receiver.recv()
    except EOFError:
        pass
    process.kill()
    process.join()
    return result


class Comparison:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.began = time.time()
        self.scratch = Path(tempfile.mkdtemp())
        self.servers: dict[str, RunningServer] = {}
        self.results: Json = {"model": args.model, "rows": [], "ready_s": {}}
        paths = [*([str(args.vllm_path)] if args.vllm_path else []), str(ROOT)]
        self.env = dict(
            os.environ,
            PYTHONPATH=os.pathsep.join(paths),
            PEAGLE_FAIL_ON_COMPILATION="1",
            VLLM_USE_FLASHINFER_SAMPLER="0",
            VLLM_NO_USAGE_STATS="1",
            HF_HUB_OFFLINE="1",
            TOKENIZERS_PARALLELISM="false",
            PYTHONUNBUFFERED="1",
        )

    def note(self, *words: object) -> None:
        print(f"[{time.time() - self.began:4.0f}s]", *words, flush=True)

    def start(self, name: str, port: int, command: list[str], concurrency: tuple[int, int] = (1, 256)) -> None:
        env = dict(self.env)
        for variable in ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
            env[variable] = str(self.scratch / f"{variable}-{name}")
        log = self.scratch / f"{name}.log"
        with open(log, "wb") as output:
            process = subprocess.Popen(
                command, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, cwd=self.scratch
            )
        self.servers[name] = RunningServer(process, port, log, time.time(), concurrency)

    def start_vllm(
        self, name: str, port: int, model: str, speculative: Json | None, dummy: bool, concurrency: tuple[int, int]
    ) -> None:
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model, "--port", str(port)]
        command += ["--dtype", "bfloat16", "--served-model-name", "m"]
        command += ["--max-model-len", "2048", "--max-num-seqs", "256", "--gpu-memory-utilization", "0.1"]
        kv_cache_bytes = self.args.kv_cache_bytes // (1 if concurrency[1] > 8 else 4)
        command += ["--kv-cache-memory-bytes", str(kv_cache_bytes)]
        command += ["--speculative-config", json.dumps(speculative)] if speculative is not None else []
        command += ["--compilation-config", json.dumps({"max_cudagraph_capture_size": 1024})]
        self.start(name, port, command + (["--load-format", "dummy"] if dummy else []), concurrency)

    def start_peagle(self, port: int, model: str, drafter: str, rates: tuple[float, ...] | None) -> None:
        if rates is None:
            command = [sys.executable, "-m", "peagle", "serve", model, "-d", drafter, "--port", str(port)]
            command += ["--dtype", "bfloat16", "--max-model-len", "2048", "--max-num-seqs", "256"]
            command += ["--served-model-name", "m", "--max-queued-requests", "2000"]
            command += ["--kv-cache-memory-bytes", str(self.args.kv_cache_bytes)]
        else:
            options = {"max_model_len": 2048, "max_num_seqs": 256, "kv_cache_memory_bytes": self.args.kv_cache_bytes}
            options |= {"synthetic_acceptance_rates": rates, "device": "cuda", "dtype": "bfloat16"}
            job = {"target": model, "drafter": drafter, "port": port, "options": options}
            command = [sys.executable, str(Path(__file__).resolve()), "--serve-random-weights", json.dumps(job)]
        self.start("peagle", port, command)

    def start_servers(self) -> None:
        if self.args.model == "llama-8b":
            shape = SHAPES["llama-8b"]
            config = {"vocab_size": 49152, "bos_token_id": 1, "eos_token_id": 2}
            folders = write_checkpoints("llama-8b", False, self.scratch, config, mask_token_id=16)
            for pattern in ("token*", "special*", "*.jinja"):
                for file in self.args.smollm2.glob(pattern):
                    shutil.copy(file, folders["target"])
            rates = shape.acceptance_rates(7)
            synthetic = {"method": "eagle3", "rejection_sample_method": "synthetic"}
            eagle3 = {"model": folders["eagle3"], "num_speculative_tokens": 3}
            eagle3 |= {"synthetic_acceptance_rates": shape.acceptance_rates(3)}
            p_eagle = {"model": folders["p-eagle"], "num_speculative_tokens": 7, "parallel_drafting": True}
            p_eagle |= {"synthetic_acceptance_rates": rates}
            if "vllm" in self.args.engines:
                self.start_vllm("vllm-eagle3-k3", 8101, folders["target"], synthetic | eagle3, True, (64, 256))
                self.start_vllm("vllm-p-eagle-k7", 8102, folders["target"], synthetic | p_eagle, True, (1, 8))
                self.start_vllm("vllm-no-drafter", 8103, folders["target"], None, True, (256, 256))
            self.wait_until_ready()
            if "peagle" in self.args.engines:
                self.start_peagle(8201, folders["target"], folders["p-eagle"], rates)
        else:
            target, drafter = str(self.args.smollm2), str(ROOT / "checkpoints" / "smollm2-135m-p-eagle")
            p_eagle = {"method": "eagle3", "model": drafter, "num_speculative_tokens": 7, "parallel_drafting": True}
            if "vllm" in self.args.engines:
                self.start_vllm("vllm-p-eagle-k7", 8102, target, p_eagle, False, (1, 256))
            self.wait_until_ready()
            if "peagle" in self.args.engines:
                self.start_peagle(8201, target, drafter, None)
        self.wait_until_ready()

    def wait_until_ready(self) -> None:
        pending = {name for name, server in self.servers.items() if server.ready_s is None}
        while pending and self.seconds_left() > 0:
            for name in list(pending):
                server = self.servers[name]
                if server.process.poll() is not None:
                    self.note(name, "did not start:", server.log.read_text(errors="replace")[-2000:])
                    del self.servers[name]
                    pending.discard(name)
                    continue
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{server.port}/health", timeout=2).read()
                except OSError:
                    continue
                server.ready_s = self.results["ready_s"][name] = round(time.time() - server.started_at, 1)
                self.note(name, f"ready after {server.ready_s:.0f} s")
                pending.discard(name)
            time.sleep(0.5)

    def seconds_left(self) -> float:
        return self.args.seconds - (time.time() - self.began)

    def run(self) -> None:
        self.start_servers()
        loads = [load for load in LOADS[self.args.model] if load.concurrency in self.args.concurrency]
        loads += [Load(8, 64, sampling) for sampling in self.args.sampling]
        for load in loads:
            for name, server in list(self.servers.items()):
                least, most = server.concurrency
                for which in load.passes if least <= load.concurrency <= most else ():
                    if self.seconds_left() > 20:
                        self.run_client(name, load, which)

    def client_data(self, load: Load) -> list[str]:
        if self.args.model == "llama-8b":
            lengths = ["--random-input-len", "256", "--random-output-len", "256"]
            return ["--dataset-name", "random", *lengths, "--ignore-eos"]
        names = ("mt_bench", "humaneval", "gsm8k")
        lines = [line for name in names for line in open(self.args.prompts / f"{name}.jsonl", encoding="utf-8")]
        turns = [json.loads(line)["turns"][0] for line in lines]
        path = self.scratch / f"prompts-{load.num_prompts}.jsonl"
        prompts = [{"prompt": turns[(7 * i) % len(turns)]} for i in range(load.num_prompts)]
        path.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts), encoding="utf-8")
        options = ["--custom-output-len", "256", "--disable-shuffle"]
        return ["--dataset-name", "custom", "--dataset-path", str(path), *options]

    def run_client(self, name: str, load: Load, which: str) -> None:
        server = self.servers[name]
        if server.process.poll() is not None:
            self.note(name, "has ended:", server.log.read_text(errors="replace")[-2000:])
            return
        command = ["--backend", "openai", "--endpoint", "/v1/completions", "--model", "m"]
        command += ["--base-url", f"http://127.0.0.1:{server.port}", "--tokenizer", str(self.args.smollm2)]
        command += ["--max-concurrency", str(load.concurrency), "--num-prompts", str(load.num_prompts)]
        command += ["--disable-tqdm", "--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,99"]
        command += [*self.client_data(load), "--extra-body", json.dumps(SAMPLING[load.sampling])]
        before = self.read_counters(server.port)
        row: Json = {"server": name, "pass": which, **{k: v for k, v in asdict(load).items() if k != "passes"}}
        measured = run_bench_client(command, self.seconds_left(), self.scratch / "client.log")
        if measured is None:
            row["error"] = "not finished in time: " + (self.scratch / "client.log").read_text(errors="replace")[-500:]
        else:
            after = self.read_counters(server.port)
            num_drafts = after["drafts"] - before["drafts"]
            row |= {
                "completed": measured["completed"],
                "output_tokens_per_second": round(measured["output_throughput"], 1),
                "ttft_p50_ms": round(measured["p50_ttft_ms"], 2),
                "ttft_p99_ms": round(measured["p99_ttft_ms"], 2),
                "tpot_p50_ms": round(measured["p50_tpot_ms"], 3),
                "itl_p99_ms": round(measured["p99_itl_ms"], 2),
                "acceptance_length": round(1 + (after["accepted"] - before["accepted"]) / num_drafts, 3)
                if num_drafts
                else None,
            }
        self.note(json.dumps(row))
        self.results["rows"].append(row)
        self.save()

    @staticmethod
    def read_counters(port: int) -> dict[str, float]:
        text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
        found = re.findall(r"vllm:spec_decode_num_(drafts|accepted)(?:_tokens)?_total\{[^}]*\} ([0-9.e+]+)", text)
        return {key: sum(float(value) for name, value in found if name == key) for key in ("drafts", "accepted")}

    def save(self) -> None:
        if self.args.out:
            self.args.out.parent.mkdir(parents=True, exist_ok=True)
            self.args.out.write_text(json.dumps(self.results, indent=1) + "\n")

    def close(self) -> None:
        for name, server in self.servers.items():
            if self.args.out:
                shutil.copy(server.log, self.args.out.with_name(f"{name}.log"))
            if server.process.poll() is None:
                os.killpg(server.process.pid, signal.SIGKILL)
        shutil.rmtree(self.scratch, ignore_errors=True)

    def stamp(self) -> None:
        from peagle.results.provenance import Provenance

        self.results["provenance"] = asdict(Provenance.collect(" ".join(["python", *sys.argv])))

    def print_table(self) -> None:
        print(f"{'server':18}{'load':>18}{'pass':>8}{'tokens/s':>10}{'TTFT p50/p99 ms':>18}{'ITL p99 ms':>12}")
        for row in self.results["rows"]:
            load = f"{row['concurrency']} {row['sampling']}"
            line = f"{row['server']:18}{load:>18}{row['pass']:>8}"
            if "error" in row:
                print(line, row["error"].splitlines()[-1] if row["error"] else "")
                continue
            ttft = f"{row['ttft_p50_ms']:.0f} / {row['ttft_p99_ms']:.0f}"
            print(f"{line}{row['output_tokens_per_second']:>10,.0f}{ttft:>18}{row['itl_p99_ms']:>12.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=LOADS, default="llama-8b")
    parser.add_argument("--engines", nargs="+", choices=("vllm", "peagle"), default=["vllm", "peagle"])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--sampling", nargs="*", choices=SAMPLING, default=["penalty", "logprobs", "sampled"])
    parser.add_argument("--smollm2", type=Path, help="folder of SmolLM2-135M-Instruct; llama-8b uses its tokenizer")
    parser.add_argument("--prompts", type=Path, help="folder with mt_bench.jsonl, humaneval.jsonl, gsm8k.jsonl")
    parser.add_argument("--vllm-path", type=Path, help="folder with an unpacked vLLM; default: the installed one")
    parser.add_argument("--kv-cache-bytes", type=int, default=17 << 30, help="KV cache of each server")
    parser.add_argument("--seconds", type=float, default=560, help="wall-clock limit for everything")
    parser.add_argument("--out", type=Path, help="results as JSON")
    parser.add_argument("--serve-random-weights", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve_random_weights:
        return serve_random_weights(args.serve_random_weights)
    if args.vllm_path is not None:
        sys.path.insert(0, str(args.vllm_path))
    comparison = Comparison(args)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        comparison.run()
    finally:
        comparison.stamp()
        comparison.save()
        comparison.close()
        comparison.print_table()
        print(json.dumps(comparison.results))


if __name__ == "__main__":
    main()
