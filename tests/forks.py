"""Fast Python processes for tests: forked from a server that has already imported torch.

    process = forks.Process("-m", "peagle", "generate", "Hello")      # the arguments of `python`
    assert process.wait() == 0 and "world" in process.stdout()

Each pytest process has one server, which only imports the slow modules, so it has no state and no threads that a fork
could break. A forked process has its own id, streams, environment, signals and exit status, and computes with one
thread. Environment variables that torch, transformers or Triton read when they are imported have no effect; tests of
those need `subprocess`.
"""

from __future__ import annotations

import array
import atexit
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# Modules that commands, training runs and tokenizers import, including lazy imports.
PRELOADED = """
    torch.distributed.device_mesh torch.distributed.fsdp torch.distributed.tensor torch.utils.tensorboard
    transformers.activations transformers.models.auto.tokenization_auto transformers.utils.type_validators
    peagle.cli peagle.engine.llm peagle.data.responses peagle.training.run rich.progress
""".split()


class Process:
    """A forked process. Its output goes to files, so the test need not read it while it runs, or to a terminal."""

    def __init__(
        self, *arguments: str, stdin: bytes = b"", env: dict[str, str] | None = None, terminal: int | None = None
    ) -> None:
        """`terminal`: handle of a pseudo-terminal, used for input and output."""
        self._stdin, self._stdout, self._stderr = (tempfile.TemporaryFile() for _ in range(3))
        self._stdin.write(stdin)
        self._stdin.seek(0)
        self._report, report = os.pipe()
        request = {"arguments": arguments, "env": {**os.environ, **(env or {})}, "cwd": os.getcwd()}
        streams = [self._stdin.fileno(), self._stdout.fileno(), self._stderr.fileno()]
        handles = streams if terminal is None else [terminal] * 3
        socket.send_fds(server(), [json.dumps(request).encode()], [*handles, report])
        os.close(report)
        self.returncode: int | None = None
        self.pid = self._receive(120)
        assert self.pid > 0, "the server has ended"

    def _receive(self, timeout: float) -> int:
        ready, _, _ = select.select([self._report], [], [], timeout)
        if not ready:
            raise TimeoutError(f"no report for {timeout} s; output so far: {self.stdout()}{self.stderr()}")
        number = array.array("q")
        number.frombytes(os.read(self._report, number.itemsize) or b"\xff" * number.itemsize)
        return number[0]

    def wait(self, timeout: float = 300) -> int:
        """Its exit status; minus the signal that ended it."""
        if self.returncode is None:
            self.returncode = self._receive(timeout)
            os.close(self._report)
        return self.returncode

    def has_ended(self) -> bool:
        return bool(select.select([self._report], [], [], 0)[0])

    def wait_for(self, text: str, timeout: float = 300) -> str:
        """Returns the output as soon as it has a complete line with this text."""
        self.wait_until(lambda: text in self.stdout().rpartition("\n")[0], timeout)
        return self.stdout()

    def wait_until(self, condition: Callable[[], Any], timeout: float = 300) -> None:
        """Waits for an effect of the running process."""
        ends = time.monotonic() + timeout
        while True:
            ended = select.select([self._report], [], [], 0.01)[0]
            if condition():
                return
            assert not ended and time.monotonic() < ends, f"it ended or waits: {self.stdout()}{self.stderr()}"

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    def end(self) -> None:
        """Kills it if it still runs."""
        if self.returncode is None:
            with suppress(ProcessLookupError):
                self.kill()
            self.wait()

    def stdout(self) -> str:
        return self._read(self._stdout.fileno())

    def stderr(self) -> str:
        return self._read(self._stderr.fileno())

    @staticmethod
    def _read(handle: int) -> str:
        return os.pread(handle, os.fstat(handle).st_size, 0).decode()


@cache
def server() -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [sys.executable, __file__, str(theirs.fileno())]
    process = subprocess.Popen(
        command, pass_fds=[theirs.fileno()], env=env, stdin=subprocess.DEVNULL, start_new_session=True
    )
    theirs.close()
    atexit.register(process.wait, 10)
    atexit.register(ours.close)  # runs first: the server ends when the channel is closed
    return ours


# The server


def serve(channel: socket.socket) -> dict:
    """Returns the request, in the forked process that shall run it."""
    while True:
        message, handles, _, _ = socket.recv_fds(channel, 1 << 20, 4)
        with suppress(ChildProcessError):  # no children
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not message:
            os.killpg(0, signal.SIGKILL)  # the tests have ended, so stop running children
        if not os.fork():
            channel.close()
            _fork_and_report(handles)
            return json.loads(message)
        for handle in handles:
            os.close(handle)


def _fork_and_report(handles: list[int]) -> None:
    """Returns in the requested process. A process between it and the server waits for its end and reports it."""
    *streams, report = handles
    child = os.fork()
    if child:
        os.write(report, array.array("q", [child]).tobytes())
        _, status = os.waitpid(child, 0)
        os.write(report, array.array("q", [os.waitstatus_to_exitcode(status)]).tobytes())
        os._exit(0)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests run in the background
    for i, handle in enumerate(streams):
        os.dup2(handle, i)
    for handle in handles:
        os.close(handle)
    sys.stdin, sys.stdout = open(0), open(1, "w")
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace")


def run_request(request: dict) -> None:
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    first, *rest = request["arguments"]
    if first == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        code, *rest = rest
        sys.argv = ["-c", *rest]
        exec(code, {"__name__": "__main__"})
    else:
        sys.argv = [first, *rest]
        sys.path.insert(0, str(Path(first).parent))
        runpy.run_path(first, run_name="__main__")


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    for name in PRELOADED:
        __import__(name)
    assert threading.active_count() == 1 and len(os.listdir("/proc/self/task")) == 1, "a fork would lose threads"
    run_request(serve(channel))


if __name__ == "__main__":
    main()
