"""`--engine vllm`: builds the equivalent `vllm serve` command and keeps its process running.

Settings that vLLM has no flag for are refused rather than ignored.
"""

import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

import httpx

from peagle.checkpoints.validate import build_vllm_flags
from peagle.config import ServeSettings, ToolCallParserName
from peagle.errors import UserError
from peagle.server.logs import log_event

API_KEY_VARIABLE = "VLLM_API_KEY"  # an environment variable: a flag would be visible in the list of processes
DEFAULT_COMMAND = "vllm serve"
MAX_RESTARTS = 3  # in a row
STABLE_S = 60.0  # serving this long resets the number of restarts
POLL_S = 1.0
PARSERS = {"hermes": "hermes", "llama3": "llama3_json", "mistral": "mistral"}  # our names to vLLM's
PARSER_FLAGS = ("--tool-call-parser", "--enable-auto-tool-choice")
UNSUPPORTED_SETTINGS = (
    *("max_queued_requests", "max_body_bytes", "request_timeout_s", "log_json", "log_prompts"),
    "allowed_hosts",
)


def build_vllm_command(command: list[str], target: str, settings: ServeSettings, **options: Any) -> list[str]:
    """Adds model and flags to a command that begins with `vllm serve` or vLLM's server module.

    `options` are further flags; None is vLLM's default.
    """
    defaults = ServeSettings()
    for name in UNSUPPORTED_SETTINGS:
        if getattr(settings, name) != getattr(defaults, name):
            flag = "--" + name.removesuffix("_s").replace("_", "-")
            raise UserError(f"{flag}: vLLM has no such option; omit it, or use --engine embedded")
    if settings.port == 0:
        raise UserError("--port 0: not with --engine vllm, which does not report the port it chose")
    if "serve" in command:
        model_index = command.index("serve") + 1
        command = [*command[:model_index], target, *command[model_index:]]
    else:
        command = [*command, "--model", target]
    flags = build_vllm_flags(
        host=settings.host,
        port=settings.port,
        served_model_name=settings.served_model_name if settings.served_model_name not in ("", target) else None,
        **options,
        allowed_origins=list(settings.cors_origins),  # some versions of vLLM allow every origin by default
        shutdown_timeout=int(settings.shutdown_timeout_s),
    )
    command += [word for flag in flags.items() for word in flag]
    return command + build_parser_flags(settings.tool_call_parser)


def build_parser_flags(parser: ToolCallParserName) -> list[str]:
    return ["--enable-auto-tool-choice", "--tool-call-parser", PARSERS[parser]] if parser in PARSERS else []


def has_parser_flags(command: Sequence[str]) -> bool:
    return any(word.partition("=")[0].replace("_", "-") in PARSER_FLAGS for word in command)


def build_vllm_environment(settings: ServeSettings, environment: dict[str, str]) -> dict[str, str]:
    """Passes the API key to vLLM by its own environment variable."""
    kept = {name: value for name, value in environment.items() if name not in (API_KEY_VARIABLE, "PEAGLE_API_KEY")}
    return kept if settings.api_key is None else {**kept, API_KEY_VARIABLE: settings.api_key}


def find_vllm(command: str = DEFAULT_COMMAND) -> list[str]:
    """Splits the command and finds its program."""
    try:
        program, *arguments = shlex.split(command)
    except ValueError as error:
        raise UserError(f"--vllm-command {command}: {error}") from None
    path = shutil.which(program)
    if path is None:
        fix = "install vLLM, set --vllm-command, or use --engine embedded"
        raise UserError(f"--engine vllm: `{program}` is not installed; {fix}")
    return [path, *arguments]


def supervise(command: list[str], environment: dict[str, str], address: tuple[str, int]) -> int:
    """Runs vLLM, forwards signals, and restarts it if it dies after it has served. Returns its exit status."""
    signals: list[int] = []  # received so far
    process: subprocess.Popen[bytes] | None = None

    def forward_signal(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        if process is not None and process.poll() is None:
            process.send_signal(number) if len(signals) == 1 else _kill_group(process)

    previous = {number: signal.signal(number, forward_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    has_served, num_restarts = False, 0
    try:
        while True:
            # A session of its own: Ctrl-C in a terminal reaches vLLM once, through us.
            process = subprocess.Popen(command, env=environment, start_new_session=True)
            log_event("vllm started", pid=process.pid)
            if signals:  # received during the start
                process.send_signal(signals[0])
            ready_time = _wait_for_exit(process, address)
            status = process.returncode
            _kill_group(process)  # its workers may have survived it, and hold GPU memory
            has_served = has_served or ready_time is not None
            stable = ready_time is not None and time.monotonic() - ready_time >= STABLE_S
            num_restarts = 1 if stable else num_restarts + 1
            if signals or status == 0 or not has_served or num_restarts > MAX_RESTARTS:
                break
            log_event("vllm died, restarting", level="error", status=status)
            restart_time = time.monotonic() + 2.0 ** (num_restarts - 1)
            while not signals and time.monotonic() < restart_time:
                time.sleep(0.05)
            if signals:
                break
        if signals and status < 0:
            return 0
        return status if status >= 0 else 128 - status
    finally:
        if process is not None:
            _kill_group(process)
            process.wait()
        for number, handler in previous.items():
            signal.signal(number, handler)


def _wait_for_exit(process: subprocess.Popen[bytes], address: tuple[str, int]) -> float | None:
    """Waits for the process to end. Returns when it became ready, or None if it never did."""
    ready_time = None
    while True:
        try:
            process.wait(timeout=POLL_S)
            return ready_time
        except subprocess.TimeoutExpired:
            if ready_time is None and _is_ready(*address):
                ready_time = time.monotonic()
                log_event("vllm ready", address=f"http://{address[0]}:{address[1]}")


def _is_ready(host: str, port: int) -> bool:
    local_host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)
    try:
        return httpx.get(f"http://{local_host}:{port}/health", timeout=POLL_S).status_code == 200
    except (httpx.HTTPError, httpx.InvalidURL):
        return False


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kills the process and its workers."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
