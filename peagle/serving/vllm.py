"""`--engine vllm`: the `vllm serve` that does the same, kept running.

Knows vLLM's flags and nothing of its inside. What it has no flag for is refused: better no server than one without
the limit that was asked for.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from types import FrameType
from typing import Any

from peagle.config import ServeSettings
from peagle.errors import UserError
from peagle.serving.logs import log

KEY_VARIABLE = "VLLM_API_KEY"  # read by vLLM; a flag would show the key to everyone who lists processes
RESTARTS = 3
RAN_WELL_S = 60.0  # one that ended sooner never served, and would not the next time
OURS_ALONE = ("max_queue", "max_body", "deadline_s", "log_json", "log_prompts")  # settings that vLLM has no flag for


@dataclass(frozen=True)
class VllmOptions:
    """Of the engine; None: vLLM's own choice."""

    target: str
    speculative: dict[str, Any] | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    dtype: str | None = None
    gpu_memory_fraction: float | None = None


def vllm_command(program: str, options: VllmOptions, settings: ServeSettings) -> list[str]:
    """The command line. The key is not in it: see `vllm_environment`."""
    usual = ServeSettings()
    for name in OURS_ALONE:
        if getattr(settings, name) != getattr(usual, name):
            flag = "--" + name.removesuffix("_s").replace("_", "-")
            raise UserError(f"{flag}: vLLM has nothing like it; leave it away, or use --engine embedded")
    command = [program, "serve", options.target, "--host", settings.host, "--port", str(settings.port)]
    if settings.model and settings.model != options.target:
        command += ["--served-model-name", settings.model]
    if options.speculative is not None:
        command += ["--speculative-config", json.dumps(options.speculative, separators=(",", ":"))]
    for flag, value in (
        ("--max-model-len", options.max_model_len),
        ("--max-num-seqs", options.max_num_seqs),
        ("--dtype", options.dtype),
        ("--gpu-memory-utilization", options.gpu_memory_fraction),
    ):
        if value is not None:
            command += [flag, str(value)]
    # some versions let every origin in unless told otherwise
    command += ["--allowed-origins", json.dumps(list(settings.cors_origins))]
    command += ["--shutdown-timeout", str(int(settings.drain_s))]
    return command


def vllm_environment(settings: ServeSettings, around: dict[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in around.items() if name not in (KEY_VARIABLE, "PEAGLE_API_KEY")}
    return kept if settings.api_key is None else {**kept, KEY_VARIABLE: settings.api_key}


def find_vllm() -> str:
    program = shutil.which("vllm")
    if program is None:
        raise UserError("--engine vllm: there is no `vllm` command here; install vLLM, or use --engine embedded")
    return program


def supervise(command: list[str], environment: dict[str, str]) -> int:
    """Runs it, passes signals on, starts it again if it dies after it has served; its exit status at the end."""
    asked: list[int] = []  # signals that we were sent
    child: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        if child is not None and child.poll() is None:
            child.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        for restart in range(RESTARTS + 1):
            began = time.monotonic()
            # a group of its own: Ctrl-C in a terminal reaches it once, through us
            child = subprocess.Popen(command, env=environment, start_new_session=True)
            log("vllm started", pid=child.pid)
            status = child.wait()
            ran_s = time.monotonic() - began
            if asked or status == 0 or ran_s < RAN_WELL_S or restart == RESTARTS:
                break
            log("vllm died, starting it again", level="error", status=status, ran_seconds=round(ran_s))
            time.sleep(2.0**restart)
            if asked:
                break
        if asked and status in (-signal.SIGTERM, -signal.SIGINT):
            return 0
        return status if status >= 0 else 128 - status
    finally:
        _end(child)
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(child: subprocess.Popen[bytes] | None) -> None:
    """None of its processes may outlive us."""
    if child is None:
        return
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
    child.wait()
