"""`peagle hidden-states` with a stock vLLM server on the CPU: training on its files equals online training."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import runs
import torch
from typer.testing import CliRunner

from peagle.cli import app
from peagle.training.run import train

pytestmark = pytest.mark.vllm
# The connector needs pinned memory and CUDA events, which a CPU has not: replace both in the server process.
ON_A_CPU = """
import threading, time, torch
empty_like = torch.empty_like
torch.empty_like = lambda x, *, pin_memory=False, **options: empty_like(x, **options)
def watch():
    while True:
        if not hasattr(torch.cuda.Event, "query"):
            torch.cuda.Event.query = lambda self: True
        time.sleep(0.02)
threading.Thread(target=watch, daemon=True).start()
"""


def until_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + 400
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    pytest.fail(f"the server did not start: {log.read_text()[-2000:]}")


def test_a_server_writes_what_a_drafter_is_trained_on(tmp_path: Path) -> None:
    usual = {"init": "random", "aux_layer_ids": (1, 2, 4), "steps": 3, "log_every": 1}
    read = runs.recipe(tmp_path, **usual, vllm_hidden_states=str(tmp_path / "states"))
    online = runs.recipe(tmp_path, **usual)
    (tmp_path / "r.toml").write_text(read.toml())
    states = ["hidden-states", "--recipe", str(tmp_path / "r.toml")]
    _, _, *told = shlex.split(CliRunner().invoke(app, states).output)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (tmp_path / "patch").mkdir()
    (tmp_path / "patch" / "sitecustomize.py").write_text(ON_A_CPU)
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "patch"), "VLLM_CPU_KVCACHE_SPACE": "1"}
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", *told, "--port", str(port)]
    command += ["--dtype", "float32", "--enforce-eager", "--max-num-seqs", "8", "--skip-tokenizer-init"]
    url = f"http://127.0.0.1:{port}"
    with open(tmp_path / "log", "wb") as log, subprocess.Popen(command, stdout=log, stderr=log, env=env) as process:
        try:
            until_healthy(url, process, tmp_path / "log")
            done = CliRunner().invoke(app, [*states, "--endpoint", url])
        finally:
            process.terminate()
    assert done.exit_code == 0 and "48 rows sent" in done.output, (done.output, done.exception)
    kept = []
    for name, recipe in (("read", read), ("online", online)):
        assert train(recipe, tmp_path / name, "cpu").finished
        kept.append(runs.saved(tmp_path / name)["masters"])
    assert float((kept[0] - kept[1]).abs().max()) < 1e-4 and torch.isfinite(kept[0]).all()
