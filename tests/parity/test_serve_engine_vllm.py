"""`peagle serve --engine vllm` with stock vLLM: it serves, restarts after a kill, and stops with all processes."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import engines
import pairs
import pytest

from peagle.config import SamplingParams
from peagle.engine.llm import LLM

pytestmark = pytest.mark.vllm
DRAFTER, K, TOKENS, KEY = "p-eagle-4", 5, 40, "sk-hers"
# by its module: the command of the CPU build looks for a package by another name; eager, since compiling takes longer
VLLM = f"{sys.executable} -m vllm.entrypoints.openai.api_server --enforce-eager"
STARTS_S = 240.0


class Supervised:
    def __init__(self, log: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.log = log
        words = ["serve", str(engines.target().folder), "-d", str(pairs.drafter_folder(DRAFTER)), "-k", str(K)]
        words += ["--engine", "vllm", "--vllm-command", VLLM, "--port", str(self.port), "--served-model-name", "small"]
        words += ["--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "4", "--shutdown-timeout", "5"]
        env = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "PEAGLE_API_KEY": KEY}
        with open(log, "wb") as out:
            self.process = subprocess.Popen([sys.executable, "-m", "peagle", *words], stdout=out, stderr=out, env=env)

    def said(self, pattern: str, times: int) -> list[str]:
        """Waits until the log matches the pattern this often."""
        until = time.monotonic() + STARTS_S
        while len(found := re.findall(pattern, text := self.log.read_text(errors="replace"))) < times:
            assert self.process.poll() is None and time.monotonic() < until, text[-4000:]
            time.sleep(0.1)
        return found

    def ask(self, path: str, body: dict[str, object] | None = None, key: str = KEY) -> tuple[int, bytes]:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()


def gone(group: int, seconds: float = 10.0) -> bool:
    """Whether no process of the group is left, zombies aside."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        listed = subprocess.run(["ps", "-eo", "pgid=,stat="], capture_output=True, text=True, check=True).stdout.split()
        if not any(int(g) == group and not s.startswith("Z") for g, s in zip(listed[::2], listed[1::2], strict=True)):
            return True
        time.sleep(0.1)
    return False


def test_vllm_serves_restarts_and_stops(tmp_path: Path) -> None:
    prompt = bytes(pairs.prompts(3)[1]).decode()
    body: dict[str, object] = {"model": "small", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
    llm = LLM(engines.target().folder, None, device="cpu", dtype="float32", threads=1)
    wanted = llm.generate(prompt, SamplingParams(max_tokens=TOKENS))[0].outputs[0].text
    server = Supervised(tmp_path / "log")
    try:
        for life in (1, 2):
            pid = int(server.said(r"vllm started pid=(\d+)", life)[-1])
            server.said("vllm ready", life)
            status, said = server.ask("/v1/completions", body)
            assert status == 200 and json.loads(said)["choices"][0]["text"] == wanted
            assert server.ask("/v1/completions", body, key="sk-other")[0] == 401
            held = re.search(rb"vllm:spec_decode_num_accepted_tokens_total\{.*\} (\S+)", server.ask("/metrics")[1])
            assert held is not None and float(held[1]) > 0  # it drafts
            if life == 1:
                os.kill(pid, signal.SIGKILL)
                server.said("vllm died, restarting status=-9", 1)
                assert gone(pid), "its workers still hold memory"
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        assert gone(pid)
        assert KEY not in server.log.read_text(errors="replace")
    finally:
        server.process.kill()
        server.process.wait()
        for left in re.findall(r"vllm started pid=(\d+)", server.log.read_text(errors="replace")):
            if not gone(int(left), 0.1):
                os.killpg(int(left), signal.SIGKILL)
