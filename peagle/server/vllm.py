"""`--engine vllm`: the `vllm serve` that does the same, kept running.

Knows vLLM's flags and nothing of its inside. What it has no flag for is refused: better no server than one without
the limit that was asked for.
"""

from __future__ import annotations

import http.client
import json
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from peagle.config import ServeSettings, ToolParser
from peagle.errors import UserError
from peagle.server.logs import log

KEY_VARIABLE = "VLLM_API_KEY"  # read by vLLM; a flag would show the key to everyone who lists processes
VLLM = "vllm serve"
RESTARTS = 3  # in a row
RAN_WELL_S = 60.0  # that it took requests; when it dies after that, its restarts are counted anew
LOOK_S = 1.0  # between two looks at it
PARSERS = {"hermes": "hermes", "llama3": "llama3_json", "mistral": "mistral"}  # vLLM's names of ours
PARSER_FLAGS = ("--tool-call-parser", "--enable-auto-tool-choice")
OURS_ALONE = ("max_queue", "max_body", "deadline_s", "log_json", "log_prompts")  # settings that vLLM has no flag for


@dataclass(frozen=True)
class VllmOptions:
    """Of the engine; None: vLLM's own choice."""

    target: str
    speculative: dict[str, Any] | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    dtype: str | None = None
    gpu_memory_utilization: float | None = None


def vllm_command(words: list[str], options: VllmOptions, settings: ServeSettings) -> list[str]:
    """The command line; `words` begin it: `vllm serve` or its module, and flags. The key is not in it: see
    `vllm_environment`."""
    usual = ServeSettings()
    for name in OURS_ALONE:
        if getattr(settings, name) != getattr(usual, name):
            flag = "--" + name.removesuffix("_s").replace("_", "-")
            raise UserError(f"{flag}: vLLM has nothing like it; leave it away, or use --engine embedded")
    if settings.port == 0:
        raise UserError("--port 0: not with --engine vllm, which would not tell which one it took")
    if "serve" in words:  # `vllm serve TARGET`, and what else was said after it
        at = words.index("serve") + 1
        command = [*words[:at], options.target, *words[at:]]
    else:
        command = [*words, "--model", options.target]
    command += ["--host", settings.host, "--port", str(settings.port)]
    if settings.model and settings.model != options.target:
        command += ["--served-model-name", settings.model]
    if options.speculative is not None:
        command += ["--speculative-config", json.dumps(options.speculative, separators=(",", ":"))]
    for flag, value in (
        ("--max-model-len", options.max_model_len),
        ("--max-num-seqs", options.max_num_seqs),
        ("--dtype", options.dtype),
        ("--gpu-memory-utilization", options.gpu_memory_utilization),
    ):
        if value is not None:
            command += [flag, str(value)]
    command += tool_words(settings.tool_parser)
    # some versions let every origin in unless told otherwise
    command += ["--allowed-origins", json.dumps(list(settings.cors_origins))]
    command += ["--shutdown-timeout", str(int(settings.drain_s))]
    return command


def tool_words(parser: ToolParser) -> list[str]:
    """None for auto: what it comes to stands in the chat template, and vLLM does not look there."""
    return ["--enable-auto-tool-choice", "--tool-call-parser", PARSERS[parser]] if parser in PARSERS else []


def has_tool_words(words: Sequence[str]) -> bool:
    """A command that says for itself how calls are read: vLLM has more parsers than we have names for."""
    return any(word.partition("=")[0].replace("_", "-") in PARSER_FLAGS for word in words)


def vllm_environment(settings: ServeSettings, around: dict[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in around.items() if name not in (KEY_VARIABLE, "PEAGLE_API_KEY")}
    return kept if settings.api_key is None else {**kept, KEY_VARIABLE: settings.api_key}


def find_vllm(words: str = VLLM) -> list[str]:
    """The words of a command, the first of them as a file."""
    try:
        first, *rest = shlex.split(words)
    except ValueError as error:
        raise UserError(f"--vllm-command {words}: {error}") from None
    program = shutil.which(first)
    if program is None:
        where = "install vLLM, name another by --vllm-command, or use --engine embedded"
        raise UserError(f"--engine vllm: there is no `{first}` command here; {where}")
    return [program, *rest]


def supervise(command: list[str], environment: dict[str, str], address: tuple[str, int]) -> int:
    """Runs it, passes signals on, and starts it again if it dies once it has served; its exit status at the end."""
    asked: list[int] = []  # signals that we were sent
    child: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        if child is not None and child.poll() is None:
            child.send_signal(number) if len(asked) == 1 else _kill(child)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    served, in_a_row = False, 0
    try:
        while True:
            # a group of its own: Ctrl-C in a terminal reaches it once, through us
            child = subprocess.Popen(command, env=environment, start_new_session=True)
            log("vllm started", pid=child.pid)
            if asked:  # while it was being started
                child.send_signal(asked[0])
            ready_at = _watch(child, address)
            status = child.returncode
            _kill(child)  # what it started may have outlived it, and holds its memory
            served = served or ready_at is not None
            well = ready_at is not None and time.monotonic() - ready_at >= RAN_WELL_S
            in_a_row = 1 if well else in_a_row + 1
            if asked or status == 0 or not served or in_a_row > RESTARTS:
                break
            log("vllm died, starting it again", level="error", status=status)
            until = time.monotonic() + 2.0 ** (in_a_row - 1)
            while not asked and time.monotonic() < until:
                time.sleep(0.05)
            if asked:
                break
        if asked and status < 0:
            return 0
        return status if status >= 0 else 128 - status
    finally:
        if child is not None:
            _kill(child)
            child.wait()
        for number, handler in before.items():
            signal.signal(number, handler)


def _watch(child: subprocess.Popen[bytes], address: tuple[str, int]) -> float | None:
    """Until it has ended: since when it took requests, None if it never did."""
    ready_at = None
    while True:
        try:
            child.wait(timeout=LOOK_S)
            return ready_at
        except subprocess.TimeoutExpired:
            if ready_at is None and _is_ready(*address):
                ready_at = time.monotonic()
                log("vllm ready", address=f"http://{address[0]}:{address[1]}")


def _is_ready(host: str, port: int) -> bool:
    near = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    connection = http.client.HTTPConnection(near, port, timeout=LOOK_S)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _kill(child: subprocess.Popen[bytes]) -> None:
    """All of its processes."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
