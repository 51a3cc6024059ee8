"""Processes for tests that need not import torch: they are forked from one that has.

    process = forks.Process("-m", "peagle", "generate", "Hello")      # what would follow `python` on the command line
    assert process.wait() == 0 and "world" in process.said()

A server imports what takes long, once for all tests of a pytest process, and does nothing else, so it has no state and
no threads that a fork could break. What is forked has its own id, streams, environment, signals and exit status, and
computes with one thread. Only variables that are read when torch, transformers or Triton are imported come too late:
who tests those, or importing itself, needs a process of its own.
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
from contextlib import suppress
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# What commands, training runs and their tokenizers import, the lazy parts too.
PRELOADED = """
    torch.distributed.device_mesh torch.distributed.fsdp torch.distributed.tensor
    transformers.activations transformers.models.auto.tokenization_auto transformers.utils.type_validators
    peagle.cli peagle.engine.llm peagle.data.responses peagle.training.run rich.progress
""".split()


class Process:
    """One that was forked. Its output is kept in files, so nobody has to read along."""

    def __init__(self, *arguments: str, stdin: bytes = b"", env: dict[str, str] | None = None) -> None:
        self._stdin, self._stdout, self._stderr = (tempfile.TemporaryFile() for _ in range(3))
        self._stdin.write(stdin)
        self._stdin.seek(0)
        self._report, report = os.pipe()
        asked = {"arguments": arguments, "env": {**os.environ, **(env or {})}, "cwd": os.getcwd()}
        handles = [self._stdin.fileno(), self._stdout.fileno(), self._stderr.fileno(), report]
        socket.send_fds(server(), [json.dumps(asked).encode()], handles)
        os.close(report)
        self.returncode: int | None = None
        self.pid = self._told(120)
        assert self.pid > 0, "the server has ended"

    def _told(self, timeout: float) -> int:
        ready, _, _ = select.select([self._report], [], [], timeout)
        if not ready:
            raise TimeoutError(f"nothing for {timeout} s; so far: {self.said()}{self.complaints()}")
        number = array.array("q")
        number.frombytes(os.read(self._report, number.itemsize) or b"\xff" * number.itemsize)
        return number[0]

    def wait(self, timeout: float = 300) -> int:
        """Its exit status; minus the signal that ended it."""
        if self.returncode is None:
            self.returncode = self._told(timeout)
            os.close(self._report)
        return self.returncode

    def has_ended(self) -> bool:
        return bool(select.select([self._report], [], [], 0)[0])

    def wait_for(self, text: str, timeout: float = 300) -> str:
        """What it said, as soon as that has a line with this text."""
        ends = time.monotonic() + timeout
        while True:
            ended = select.select([self._report], [], [], 0.01)[0]
            said = self.said()
            if text in said[: said.rfind("\n") + 1]:
                return said
            assert not ended and time.monotonic() < ends, f"it did not say {text!r}: {said}{self.complaints()}"

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    def said(self) -> str:
        return self._read(self._stdout.fileno())

    def complaints(self) -> str:
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
    atexit.register(ours.close)  # before that: it ends when nobody can ask any more
    return ours


# The server


def serve(channel: socket.socket) -> dict:
    """Returns in a forked process, with what that is asked to be."""
    while True:
        message, handles, _, _ = socket.recv_fds(channel, 1 << 20, 4)
        with suppress(ChildProcessError):  # there are none
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not message:
            os.killpg(0, signal.SIGKILL)  # whoever would have waited for those that still run is gone
        if not os.fork():
            channel.close()
            _fork_and_report(handles)
            return json.loads(message)
        for handle in handles:
            os.close(handle)


def _fork_and_report(handles: list[int]) -> None:
    """Returns in the process that was asked for. The one between it and the server waits for its end."""
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


def become(asked: dict) -> None:
    os.environ.clear()
    os.environ.update(asked["env"])
    os.chdir(asked["cwd"])
    first, *rest = asked["arguments"]
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
    import peagle.engine.loader

    peagle.engine.loader.usable_cores = lambda: 1
    assert threading.active_count() == 1 and len(os.listdir("/proc/self/task")) == 1, "a fork would lose threads"
    become(serve(channel))


if __name__ == "__main__":
    main()
