"""Models, servers and in-process engine of serve_http.py.

`llama-8b`, `gpt-oss-20b` and `qwen3-coder-30b-a3b` are the shapes of shapes.py with SmolLM2's vocabulary and tokenizer:
random weights and synthetic acceptance on both sides. `smollm2` is the real model with the included drafters.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from random_weights import random_llm
from shapes import SHAPES, spread_weights, write_checkpoints

ROOT = Path(__file__).resolve().parent.parent
Json = dict[str, Any]
NUM_SPECULATIVE_TOKENS = 7  # of P-EAGLE; "auto" in peagle chooses from 0 to 7


@dataclass(frozen=True)
class VllmConfiguration:
    """A configuration of vLLM and the smallest and largest number of requests that it is measured with."""

    method: str | None  # "eagle3", "p-eagle", or None: no speculation
    num_speculative_tokens: int = 0
    concurrency: tuple[int, int] = (1, 256)

    @property
    def name(self) -> str:
        return f"vllm-{self.method}-k{self.num_speculative_tokens}" if self.method else "vllm-no-drafter"


def eagle3(*concurrency: int) -> VllmConfiguration:
    return VllmConfiguration("eagle3", 3, concurrency)  # type: ignore[arg-type]


def p_eagle(*concurrency: int) -> VllmConfiguration:
    return VllmConfiguration("p-eagle", NUM_SPECULATIVE_TOKENS, concurrency)  # type: ignore[arg-type]


@dataclass(frozen=True)
class ServedModel:
    """A target with its drafters, and the options that both servers get."""

    shape: str | None  # name in SHAPES; None: SmolLM2 itself
    vllm: tuple[VllmConfiguration, ...]
    kv_cache_tokens: int = 137_000  # 256 requests of 512 tokens and their draft tokens
    max_model_len: int = 2048
    max_num_seqs: int = 256
    one_at_a_time: bool = False  # the servers do not fit on the GPU together

    @property
    def has_experts(self) -> bool:
        return self.shape is not None and "num_experts_per_tok" in SHAPES[self.shape].published_config


MODELS = {
    "llama-8b": ServedModel("llama-8b", (eagle3(64, 256), p_eagle(1, 8), VllmConfiguration(None, 0, (256, 256)))),
    # 8 prompts of 16,384 tokens stay in the prefix cache.
    "llama-8b-16k": ServedModel("llama-8b", (p_eagle(1, 8), eagle3(1, 8)), 145_000, 20480, 16),
    "gpt-oss-20b": ServedModel("gpt-oss-20b", (eagle3(64, 64), p_eagle(64, 64)), 250_000),
    "qwen3-coder-30b-a3b": ServedModel("qwen3-coder-30b-a3b", (p_eagle(64, 64), eagle3(64, 64)), one_at_a_time=True),
    "smollm2": ServedModel(None, (p_eagle(1, 256), eagle3(64, 256)), 500_000),
}


@dataclass
class RunningServer:
    process: subprocess.Popen[bytes]
    port: int
    log: Path
    started_at: float
    concurrency: tuple[int, int] = (1, 256)
    ready_s: float | None = None

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def log_tail(self) -> str:
        return self.log.read_text(errors="replace")[-2000:]


class Servers:
    """Starts and stops servers. Each name has its own caches of compiled kernels, empty at its first start."""

    def __init__(self, model: ServedModel, smollm2: Path, vllm_path: Path | None, note: Callable[..., None]) -> None:
        self.model, self.smollm2, self.note = model, smollm2, note
        self.scratch = Path(tempfile.mkdtemp(prefix="serve-http-"))
        self.running: dict[str, RunningServer] = {}
        self.logs: dict[str, Path] = {}
        paths = [*([str(vllm_path.resolve())] if vllm_path else []), str(ROOT), str(ROOT / "benchmarks")]
        self.env = dict(
            os.environ,
            PYTHONPATH=os.pathsep.join(paths),
            VLLM_USE_FLASHINFER_SAMPLER="0",
            VLLM_NO_USAGE_STATS="1",
            HF_HUB_OFFLINE="1",
            TOKENIZERS_PARALLELISM="false",
            PYTHONUNBUFFERED="1",
        )

    @cached_property
    def folders(self) -> dict[str, str]:
        """Folders of the target and its drafters."""
        if self.model.shape is None:
            drafters = {name: str(ROOT / "checkpoints" / f"smollm2-135m-{name}") for name in ("p-eagle", "eagle3")}
            return {"target": str(self.smollm2), **drafters}
        config = {"vocab_size": 49152, "bos_token_id": 1, "eos_token_id": 2}
        config |= {"pad_token_id": 2} if "pad_token_id" in SHAPES[self.model.shape].published_config else {}
        folders = write_checkpoints(self.model.shape, False, self.scratch, config, mask_token_id=16)
        for pattern in ("token*", "special*", "*.jinja"):
            for file in self.smollm2.glob(pattern):
                shutil.copy(file, folders["target"])
        return folders

    def acceptance_rates(self, num_speculative_tokens: int) -> list[float] | None:
        """Synthetic ones, for random weights."""
        if self.model.shape is None:
            return None
        return list(SHAPES[self.model.shape].acceptance_rates(num_speculative_tokens))

    def kv_cache_bytes(self, method: str | None, num_tokens: int) -> int:
        """The same number of tokens in every server; a deeper drafter needs more bytes for them."""
        from peagle.checkpoints.drafter import read_drafter_config
        from peagle.checkpoints.target import read_target_config
        from peagle.engine.kv_cache import BLOCK_SIZE, block_bytes

        target = read_target_config(Path(self.folders["target"]))
        drafter = read_drafter_config(Path(self.folders[method]), target) if method else None
        return -(-num_tokens // BLOCK_SIZE) * block_bytes(target, drafter, 2)

    def start_vllm(self, configuration: VllmConfiguration) -> None:
        model, method, concurrency = self.model, configuration.method, configuration.concurrency
        num_tokens = model.kv_cache_tokens
        if concurrency[1] < 64 and model.max_num_seqs >= 64:
            num_tokens //= 4  # other servers need the memory
        port = 8101 + model.vllm.index(configuration)
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", self.folders["target"]]
        command += ["--port", str(port), "--dtype", "bfloat16", "--served-model-name", "m"]
        command += ["--max-model-len", str(model.max_model_len), "--max-num-seqs", str(model.max_num_seqs)]
        command += ["--gpu-memory-utilization", "0.1"]  # replaced by the next option
        command += ["--kv-cache-memory-bytes", str(self.kv_cache_bytes(method, num_tokens))]
        num_rows = concurrency[1] * (configuration.num_speculative_tokens + 1)
        command += ["--compilation-config", json.dumps({"max_cudagraph_capture_size": max(1024, num_rows)})]
        command += ["--load-format", "dummy"] if model.shape is not None else []
        if method is not None:
            k = configuration.num_speculative_tokens
            speculative: Json = {"method": "eagle3", "model": self.folders[method], "num_speculative_tokens": k}
            speculative |= {"use_local_argmax_reduction": True}  # the same tokens, faster than vLLM's default
            speculative |= {"parallel_drafting": True} if method == "p-eagle" else {}
            if (rates := self.acceptance_rates(k)) is not None:
                speculative |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}
            command += ["--speculative-config", json.dumps(speculative)]
        more_env = {}
        if model.has_experts:
            command += ["--worker-extension-cls", "shapes.SpreadWorker"]
            more_env["VLLM_SERVER_DEV_MODE"] = "1"  # for /collective_rpc
        self._start(configuration.name, port, command, concurrency, more_env)

    @property
    def peagle_job(self) -> Json:
        """What `build_llm` needs to build the engine that the server has."""
        options: Json = {"max_model_len": self.model.max_model_len, "max_num_seqs": self.model.max_num_seqs}
        kv_cache_bytes = self.kv_cache_bytes("p-eagle", self.model.kv_cache_tokens)
        options |= {"dtype": "bfloat16", "kv_cache_memory_bytes": kv_cache_bytes}
        if (rates := self.acceptance_rates(NUM_SPECULATIVE_TOKENS)) is not None:
            options |= {"synthetic_acceptance_rates": rates}
        folders = {"target": self.folders["target"], "drafter": self.folders["p-eagle"]}
        is_random, spread = self.model.shape is not None, self.model.has_experts
        return folders | {"options": options, "random": is_random, "spread": spread}

    def command(self, action: str, job: Json) -> list[str]:
        """A call of this file."""
        job_file = self.scratch / f"{action}.json"
        job_file.write_text(json.dumps(job))
        return [sys.executable, str(Path(__file__).resolve()), action, str(job_file)]

    def start_peagle(self, port: int = 8201) -> None:
        job = self.peagle_job
        if job["random"]:
            command = self.command("serve", job | {"port": port})
        else:
            command = [sys.executable, "-m", "peagle", "serve", job["target"], "-d", job["drafter"]]
            command += ["--port", str(port), "--served-model-name", "m", "--max-queued-requests", "2000"]
            for name, value in job["options"].items():
                command += [f"--{name.replace('_', '-')}", str(value)]
        self._start("peagle", port, command, more_env={"PEAGLE_FAIL_ON_COMPILATION": "1"})

    def _start(
        self,
        name: str,
        port: int,
        command: list[str],
        concurrency: tuple[int, int] = (1, 256),
        more_env: dict[str, str] | None = None,
    ) -> None:
        process, log = self.spawn(name, command, more_env)
        self.running[name] = RunningServer(process, port, log, time.time(), concurrency)

    def spawn(
        self, name: str, command: list[str], more_env: dict[str, str] | None = None
    ) -> tuple[subprocess.Popen[bytes], Path]:
        """Starts a process in a session of its own, with the caches of that name and a log that is appended to."""
        env = self.env | (more_env or {})
        for variable in ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
            env[variable] = str(self.scratch / f"{variable}-{name}")
        log = self.logs[name] = self.scratch / f"{name}.log"
        with open(log, "ab") as output:
            process = subprocess.Popen(
                command, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, cwd=self.scratch
            )
        return process, log

    def wait_until_ready(self, deadline: float) -> None:
        """Waits for all servers that were started. Those that end or miss the deadline are removed."""
        pending = {name for name, server in self.running.items() if server.ready_s is None}
        while pending and time.time() < deadline:
            for name in sorted(pending):
                server = self.running[name]
                if server.process.poll() is not None:
                    break
                try:
                    urllib.request.urlopen(server.url("/health"), timeout=2).read()
                except OSError:
                    continue
                server.ready_s = round(time.time() - server.started_at, 1)
                self.note(name, f"ready after {server.ready_s:.0f} s")
                pending.discard(name)
            for name in sorted(pending):
                if self.running[name].process.poll() is not None:
                    self.note(name, "did not start:", self.running[name].log_tail())
                    pending.discard(name)
                    self.stop(name)
            time.sleep(0.2)
        for name in pending:
            self.note(name, "was not ready in time:", self.running[name].log_tail())
            self.stop(name)

    def spread_weights(self, name: str) -> str | None:
        """Gives a server of vLLM the weights of shapes.py. Returns the error, if there is one."""
        url, body = self.running[name].url("/collective_rpc"), json.dumps({"method": "spread"}).encode()
        try:
            request = urllib.request.Request(url, body, {"content-type": "application/json"})
            urllib.request.urlopen(request, timeout=60).read()
        except OSError as error:
            reason = error.read().decode(errors="replace") if isinstance(error, urllib.error.HTTPError) else error
            return f"{name}: the weights were not spread, so few experts are read: {reason}"
        return None

    def stop(self, name: str, seconds: float = 20) -> None:
        """Lets peagle stop by itself; vLLM is killed."""
        server = self.running.pop(name)
        if name == "peagle" and server.process.poll() is None:
            server.process.terminate()
            try:
                server.process.wait(seconds)
            except subprocess.TimeoutExpired:
                self.note(name, "did not stop")
        kill_group(server.process)

    def close(self, log_folder: Path | None) -> None:
        for name in list(self.running):
            self.stop(name, 5)
        for name, log in self.logs.items() if log_folder else ():
            shutil.copy(log, log_folder / f"{name}.log")  # type: ignore[operator]
        shutil.rmtree(self.scratch, ignore_errors=True)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Engine processes are children of the server."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def build_llm(job: Json) -> Any:
    """The engine that `peagle serve` has."""
    import torch

    from peagle import LLM

    folders = job["target"], job["drafter"]
    if not job["random"]:
        return LLM(*folders, **job["options"])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return random_llm(
        *folders, device=device, spread_weights=spread_weights if job["spread"] else None, **job["options"]
    )


def serve_random_weights(job: Json) -> None:
    """`peagle serve` with an engine that has random weights."""
    from peagle.config import ServeSettings
    from peagle.server.engine_client import EngineClient, start_engine_process
    from peagle.server.logs import start_logging
    from peagle.server.server import bind_socket, run_server

    settings = ServeSettings(port=job["port"], served_model_name="m", max_queued_requests=2000)
    start_logging(False)
    start_engine = partial(start_engine_process, partial(build_llm, job), False)
    listener = bind_socket(settings.host, settings.port)
    target_folder = Path(job["target"])
    run_server(lambda: EngineClient(start_engine, settings), settings, job["drafter"], "auto", listener, target_folder)


def generate_in_process(job: Json) -> None:
    """Runs the prompts of each pass through `LLM.step`, as many at a time as the clients of the server send.

    Prompts are tokenized before and no output is decoded: this is what the engine process of the server does. Writes
    one row per pass.
    """
    from peagle import SamplingParams

    llm = build_llm(job)
    llm.warm_up()  # the server does it, too
    params = SamplingParams(**job["params"], detokenize=False)
    rows = []
    for which, prompts in job["passes"].items():
        waiting = deque(llm.tokenizer(prompts).input_ids)
        running: list[Any] = []
        num_output_tokens, began = 0, time.perf_counter()
        while waiting or running:
            while waiting and len(running) < job["concurrency"]:
                running.append(llm.add_request(waiting.popleft(), params))
            llm.step()
            for group in running:
                if group.finished:
                    num_output_tokens += len(group.requests[0].output_token_ids)
            running = [group for group in running if not group.finished]
        seconds = time.perf_counter() - began
        rate = round(num_output_tokens / seconds, 1)
        rows.append({"pass": which, "output_tokens_per_second": rate, "seconds": round(seconds, 2)})
        Path(job["out"]).write_text(json.dumps(rows))


if __name__ == "__main__":
    action, job_file = sys.argv[1:]
    {"serve": serve_random_weights, "generate": generate_in_process}[action](json.loads(Path(job_file).read_text()))
