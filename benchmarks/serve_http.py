"""Output tokens/s, TTFT and ITL of `peagle serve` and `vllm serve` on one GPU, with `vllm bench serve` as the client.

    python benchmarks/serve_http.py --model llama-8b --smollm2 FOLDER --vllm-path DEST --out results.json
    python benchmarks/serve_http.py --model smollm2 --smollm2 FOLDER --prompts FOLDER --vllm-path DEST --out r.json

http_servers.py describes the models. vLLM runs each load in the configurations that are best for it. Its servers start
at once, then peagle, which times decode steps at its start. All caches are empty. A load is measured twice: the first
pass is what the first users of a fresh server get (cold): every prompt once. The second repeats these prompts for about
10 s (steady); both servers find them in their prefix caches. Prompts are random words of exact lengths with answers of
fixed length, for smollm2 MT-Bench, HumanEval and GSM8K, whose answers end by themselves, after 256 tokens at most.

--restart starts peagle a second time with the compiled kernels of the first. --in-process runs the prompts of 64
requests through `peagle.LLM`, without a server. Results are written after every pass. Prints a table, then one JSON
line.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import time
import traceback
import urllib.request
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from http_servers import MODELS, Json, Servers, kill_group

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
                "schema": {
                    "type": "object",
                    "properties": {
                        "topic": {"type": "string"},
                        "difficulty": {"type": "string", "enum": ["easy", "medium", "hard"]},
                        "answer": {"type": "string"},
                        "confidence": {"type": "integer"},
                    },
                    "required": ["topic", "difficulty", "answer", "confidence"],
                    "additionalProperties": False,
                },
            },
        },
    },
}
JSON_REQUEST = "\n\nAnswer with a JSON object that has a topic, a difficulty, an answer and a confidence."
IN_PROCESS_CONCURRENCY = 64
COUNTERS = {
    "drafts": "vllm:spec_decode_num_drafts",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
    "late_compilations": "peagle:late_compilations",
}


@dataclass(frozen=True)
class Load:
    """Requests that are sent so that `concurrency` of them are always open."""

    concurrency: int
    num_distinct: int  # prompts of the cold pass
    num_prompts: int  # of the steady pass, which repeats them
    sampling: str = "greedy"
    input_len: int = 256
    output_len: int = 256


# The most important first.
LOADS = {
    "llama-8b": [Load(64, 192, 640), Load(256, 256, 768), Load(8, 32, 160), Load(1, 8, 24)],
    "llama-8b-16k": [
        Load(8, 8, 32, input_len=16384, output_len=512),
        Load(1, 4, 8, input_len=16384, output_len=512),
    ],
    "gpt-oss-20b": [Load(64, 192, 768)],
    "qwen3-coder-30b-a3b": [Load(64, 192, 768)],
    "smollm2": [Load(64, 320, 2560), Load(256, 320, 2560), Load(8, 64, 256), Load(1, 16, 48)],
}
OPTIONS = {"llama-8b": ["penalty", "logprobs", "sampled"], "smollm2": ["penalty", "logprobs", "json_schema", "sampled"]}


class Prompts:
    """Prompts of loads, equal for all servers."""

    def __init__(self, smollm2: Path, folder: Path | None) -> None:
        """`folder`: where the real prompts are; None: random words."""
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(smollm2)
        self.turns: list[str] = []
        if folder is not None:
            names = ("mt_bench", "humaneval", "gsm8k")
            lines = [line for name in names for line in open(folder / f"{name}.jsonl", encoding="utf-8")]
            self.turns = [json.loads(line)["turns"][0] for line in lines]
            random.Random(0).shuffle(self.turns)
        else:
            words = [self.tokenizer.decode([i]) for i in range(len(self.tokenizer))]
            self.words = [word for word in words if re.fullmatch(r" [a-z]{3,}", word)]  # one token each, in any text

    def build(self, load: Load) -> list[str]:
        """The distinct prompts of a load. None begins as in another load, which would find it in the prefix cache."""
        rng = random.Random(str(load))
        if not self.turns:
            return ["".join(rng.choices(self.words, k=load.input_len)) for _ in range(load.num_distinct)]
        end = JSON_REQUEST if load.sampling == "json_schema" else ""
        contents = [f"Question {rng.randrange(1000000)}: {turn}{end}" for turn in self.turns[: load.num_distinct]]
        chats = [[{"role": "user", "content": content}] for content in contents]
        prompts: list[str] = self.tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
        return prompts

    def passes(self, load: Load) -> dict[str, list[str]]:
        prompts = self.build(load)
        return {"cold": prompts, "steady": [prompts[i % len(prompts)] for i in range(load.num_prompts)]}


def run_bench_client(arguments: list[str], requests: list[Json], timeout: float, log: Path) -> Json | None:
    """Runs `vllm bench serve` with these requests in a fork of this process, which has imported it.

    Returns its result, or None if it fails or takes too long. Its own data sets cannot repeat prompts or need pandas.
    """
    from vllm.benchmarks import serve
    from vllm.benchmarks.datasets import SampleRequest
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    parsed = parser.parse_args(arguments)
    receiver, sender = multiprocessing.get_context("fork").Pipe(duplex=False)

    def run() -> None:
        serve.get_samples = lambda args, tokenizer: [SampleRequest(**request) for request in requests]
        with open(log, "w") as output, redirect_stdout(output), redirect_stderr(output):
            try:
                sender.send(serve.main(parsed))
            except BaseException:
                traceback.print_exc()
                output.flush()  # the parent reads the log, then kills this process
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
        self.args, self.model, self.began = args, MODELS[args.model], time.time()
        self.servers = Servers(self.model, args.smollm2, args.vllm_path, self.note)
        self.results: Json = {"model": args.model, "rows": [], "ready_s": {}, "notes": []}
        self.loads = [load for load in LOADS[args.model] if load.concurrency in args.concurrency]
        self.loads += [Load(8, 64, 64, sampling) for sampling in args.sampling]

    def note(self, *words: object) -> None:
        print(f"[{time.time() - self.began:4.0f}s]", *words, flush=True)

    def seconds_left(self) -> float:
        return self.args.seconds - (time.time() - self.began)

    def reserved_seconds(self) -> float:
        """For --restart and --in-process, which come last."""
        start = self.results["ready_s"].get("peagle", 75.0)
        return self.args.restart * start * 0.8 + self.args.in_process * (start * 0.8 + 30)

    def run(self) -> None:
        vllm = [partial(self.servers.start_vllm, configuration) for configuration in self.model.vllm]
        peagle = [self.servers.start_peagle]
        groups = [group for name, group in (("vllm", vllm), ("peagle", peagle)) if name in self.args.engines]
        if self.model.one_at_a_time:
            groups = [[start] for group in groups for start in group]
        for number, group in enumerate(groups):
            for start in group:
                start()
            if number == 0:
                self.prepare_client()  # meanwhile
            self.wait_until_ready()
            if self.model.one_at_a_time or group is groups[-1]:
                self.run_loads()
                self.stop([name for name in self.servers.running if name != "peagle"])
        if self.args.restart:
            self.stop(["peagle"])
            self.servers.start_peagle()
            self.wait_until_ready(", second start")
        self.stop(["peagle"])
        if self.args.in_process:
            self.run_in_process()

    def prepare_client(self) -> None:
        import vllm
        from vllm.benchmarks import serve  # noqa: F401

        self.results["vllm_version"] = vllm.__version__
        is_real = self.model.shape is None
        self.prompts = Prompts(self.args.smollm2, self.args.prompts if is_real else None)

    def wait_until_ready(self, suffix: str = "") -> None:
        known = {name for name, server in self.servers.running.items() if server.ready_s is not None}
        self.servers.wait_until_ready(time.time() + min(self.args.start_seconds, self.seconds_left()))
        for name in self.servers.running.keys() - known:
            self.results["ready_s"][name + suffix] = self.servers.running[name].ready_s
            if self.model.has_experts and name != "peagle" and (error := self.servers.spread_weights(name)):
                self.note(error)
                self.results["notes"].append(error)
        self.save()

    def stop(self, names: list[str]) -> None:
        for name in names:
            if name in self.servers.running:
                self.servers.stop(name)

    def run_loads(self) -> None:
        for load in self.loads:
            passes = self.prompts.passes(load)
            for name, server in list(self.servers.running.items()):
                least, most = server.concurrency
                for which, prompts in passes.items() if least <= load.concurrency <= most else ():
                    if self.seconds_left() - self.reserved_seconds() > 20:
                        self.run_client(name, load, which, prompts)

    def run_client(self, name: str, load: Load, which: str, prompts: list[str]) -> None:
        server = self.servers.running[name]
        if server.process.poll() is not None:
            self.note(name, "has ended:", server.log_tail())
            return
        log = self.servers.scratch / "client.log"
        command = ["--backend", "openai", "--endpoint", "/v1/completions", "--model", "m"]
        command += ["--base-url", server.url(""), "--tokenizer", str(self.args.smollm2)]
        command += ["--dataset-name", "custom", "--max-concurrency", str(load.concurrency)]
        command += ["--disable-tqdm", "--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,99"]
        command += ["--ignore-eos"] if self.model.shape is not None else []
        command += ["--extra-body", json.dumps(SAMPLING[load.sampling])]
        lengths = map(len, self.prompts.tokenizer(prompts).input_ids)
        requests: list[Json] = [
            {"prompt": prompt, "prompt_len": length, "expected_output_len": load.output_len}
            for prompt, length in zip(prompts, lengths, strict=True)
        ]
        row = self.new_row(name, load, which, prompts)
        try:
            before = self.read_counters(server.url("/metrics"))
            measured = run_bench_client(command, requests, self.seconds_left() - self.reserved_seconds(), log)
            after = self.read_counters(server.url("/metrics"))
        except OSError as error:
            row["error"], measured = f"{error}: {server.log_tail()}", None
        if measured is None:
            row.setdefault("error", "not finished: " + log.read_text(errors="replace")[-500:])
        else:
            counted = {key: after[key] - before[key] for key in COUNTERS}
            row |= {
                "completed": measured["completed"],
                "input_tokens": measured["total_input_tokens"],
                "output_tokens": measured["total_output_tokens"],
                "seconds": round(measured["duration"], 2),
                "output_tokens_per_second": round(measured["output_throughput"], 1),
                "ttft_p50_ms": round(measured["p50_ttft_ms"], 2),
                "ttft_p99_ms": round(measured["p99_ttft_ms"], 2),
                "tpot_p50_ms": round(measured["p50_tpot_ms"], 3),
                "itl_p99_ms": round(measured["p99_itl_ms"], 2),
                "acceptance_length": round(1 + counted["accepted"] / counted["drafts"], 3)
                if counted["drafts"]
                else None,
                "late_compilations": int(counted["late_compilations"]),
            }
            if measured["completed"] < len(prompts):
                row["error"] = f"{len(prompts) - measured['completed']} requests failed: {server.log_tail()[-500:]}"
        self.add_row(row)

    @staticmethod
    def new_row(server: str, load: Load, which: str, prompts: list[str]) -> Json:
        row = {"server": server, "pass": which, "concurrency": load.concurrency, "sampling": load.sampling}
        return row | {"num_prompts": len(prompts), "max_tokens": load.output_len}

    def add_row(self, row: Json) -> None:
        self.note(json.dumps(row))
        self.results["rows"].append(row)
        self.save()

    @staticmethod
    def read_counters(url: str) -> dict[str, float]:
        text = urllib.request.urlopen(url, timeout=10).read().decode()
        return {
            key: sum(float(value) for value in re.findall(rf"^{name}_total(?:{{.*}})? ([0-9.e+]+)$", text, re.M))
            for key, name in COUNTERS.items()
        }

    def run_in_process(self) -> None:
        """Runs the load in a process with the cache of compiled kernels of the server."""
        load = next(load for load in LOADS[self.args.model] if load.concurrency == IN_PROCESS_CONCURRENCY)
        passes, out = self.prompts.passes(load), self.servers.scratch / "in-process.json"
        params = {"max_tokens": load.output_len, "temperature": 0.0, "ignore_eos": self.model.shape is not None}
        job = self.servers.peagle_job
        job |= {"passes": passes, "params": params, "concurrency": load.concurrency, "out": str(out)}
        process, log = self.servers.spawn("peagle", self.servers.command("generate", job))
        try:
            process.wait(max(1.0, self.seconds_left()))
        except subprocess.TimeoutExpired:
            self.note("in-process: not finished in time")
        kill_group(process)
        rows = json.loads(out.read_text()) if out.exists() else []
        if len(rows) < len(passes):
            self.note("in-process:", log.read_text(errors="replace")[-2000:])
        for row in rows:
            self.add_row(self.new_row("in-process", load, row["pass"], passes[row["pass"]]) | row)

    def save(self) -> None:
        if self.args.out:
            self.args.out.parent.mkdir(parents=True, exist_ok=True)
            self.args.out.write_text(json.dumps(self.results, indent=1) + "\n")

    def stamp(self) -> None:
        from peagle.results.provenance import Provenance

        made = Provenance.collect(" ".join(["python", *sys.argv]))
        self.results["provenance"] = asdict(made) | {"duration": round(time.time() - self.began, 1)}

    def print_table(self) -> None:
        print(*self.results["notes"], sep="\n")
        print(f"{'server':18}{'load':>18}{'pass':>8}{'tokens/s':>10}{'TTFT p50/p99 ms':>18}{'ITL p99 ms':>12}")
        for row in self.results["rows"]:
            load = f"{row['concurrency']} {row['sampling']}"
            line = f"{row['server']:18}{load:>18}{row['pass']:>8}"
            if "error" in row:
                print(line, (row["error"].splitlines() or [""])[-1])
                continue
            line += f"{row['output_tokens_per_second']:>10,.0f}"
            if "ttft_p50_ms" in row:
                ttft = f"{row['ttft_p50_ms']:.0f} / {row['ttft_p99_ms']:.0f}"
                line += f"{ttft:>18}{row['itl_p99_ms']:>12.1f}"
            print(line)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="llama-8b")
    parser.add_argument("--engines", nargs="+", choices=("vllm", "peagle"), default=["vllm", "peagle"])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 64, 256], help="greedy loads to run")
    parser.add_argument(
        "--sampling", nargs="*", choices=SAMPLING, help="options to run with 8 requests; default: those of the model"
    )
    parser.add_argument("--smollm2", type=Path, required=True, help="SmolLM2-135M-Instruct, tokenizer of all models")
    parser.add_argument("--prompts", type=Path, help="mt_bench.jsonl, humaneval.jsonl, gsm8k.jsonl, for smollm2")
    parser.add_argument("--vllm-path", type=Path, help="folder with an unpacked vLLM; default: the installed one")
    parser.add_argument("--restart", action="store_true", help="measure a second start of peagle")
    parser.add_argument("--in-process", action="store_true", help="measure peagle without a server")
    parser.add_argument("--seconds", type=float, default=560, help="wall-clock limit for everything")
    parser.add_argument("--start-seconds", type=float, default=240, help="limit for starting servers")
    parser.add_argument("--out", type=Path, help="results as JSON")
    args = parser.parse_args()
    if args.sampling is None:
        args.sampling = OPTIONS.get(args.model, [])
    if args.model == "smollm2" and args.prompts is None:
        parser.error("--model smollm2 needs --prompts")
    if args.model != "smollm2" and "json_schema" in args.sampling:
        parser.error("--sampling json_schema: not with synthetic acceptance, which accepts forbidden tokens")
    if args.in_process and all(load.concurrency != IN_PROCESS_CONCURRENCY for load in LOADS[args.model]):
        parser.error(f"--in-process: {args.model} has no load of {IN_PROCESS_CONCURRENCY} requests")
    return args


def main() -> None:
    args = parse_arguments()
    args.smollm2 = args.smollm2.resolve()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads of tokenizers do not survive the fork of the client
    if args.vllm_path is not None:
        sys.path.insert(0, str(args.vllm_path.resolve()))
    comparison = Comparison(args)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        comparison.run()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # servers must be stopped
        comparison.stamp()
        comparison.save()
        comparison.servers.close(args.out.parent if args.out else None)
        comparison.print_table()
        print(json.dumps(comparison.results))


if __name__ == "__main__":
    main()
