"""Servers for tests: one in a thread of the test's process, one in a process of its own.

The model is the small pair of `pairs`, whose tokens are bytes.
"""

from __future__ import annotations

import asyncio
import json
import queue
import shutil
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import engines
import forks
from pairs import TEXT, target_folder

from peagle.config import ServeSettings
from peagle.engine.llm import LLM
from peagle.server.engine_client import EngineClient
from peagle.server.engine_core import EngineCore, run_engine
from peagle.server.engine_messages import AbortRequest
from peagle.server.server import bind_socket, build_server, find_event_loop
from peagle.server.server_context import ServerContext

MODEL = "small"
MAX_MODEL_LEN = 256
K = 4
PROMPT = TEXT[1000:1040].decode()
GIVE_UP_S = 300.0  # a hanging test ends; no test expects a speed


def small_engine(**options: Any) -> LLM:
    return engines.engine("p-eagle-1", K, **{"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 4, **options})


def wait_until(condition: Callable[[], Any]) -> None:
    give_up = time.monotonic() + GIVE_UP_S
    while not condition():
        assert time.monotonic() < give_up, "the awaited condition never became true"
        time.sleep(0.005)


class ObservedCore(EngineCore):
    """Calls functions of a test between two steps."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.calls: queue.SimpleQueue[tuple[Callable[[LLM], Any], Future[Any]]] = queue.SimpleQueue()

    def run_commands(self) -> None:
        super().run_commands()
        while not self.calls.empty():
            function, result = self.calls.get()
            try:
                result.set_result(function(self.llm))
            except BaseException as error:
                result.set_exception(error)


class EngineThread(threading.Thread):
    """An engine in a thread of the test's process instead of a process, so that a test can reach its `LLM`."""

    exitcode = None

    def __init__(self, build_llm: Callable[[], LLM], sock: socket.socket) -> None:
        super().__init__(name="engine", daemon=True)
        self.build_llm, self.sock = build_llm, sock.dup()
        self.core: ObservedCore | None = None
        self.start()

    def run(self) -> None:
        run_engine(self.build_llm, self.sock, self._build_core)

    def _build_core(self, *args: Any) -> ObservedCore:
        self.core = ObservedCore(*args)
        return self.core

    def kill(self) -> None:
        pass  # it ends with its connection


class StepGate:
    """Lets an engine run a number of steps and holds it there until `open`."""

    def __init__(self, server: LocalServer, num_steps: int) -> None:
        self._permits = threading.Semaphore(num_steps)
        self._server = server
        server.call_in_engine(self._install)

    def _install(self, llm: LLM) -> None:
        self._step = llm.step

        def step() -> Any:
            assert self._permits.acquire(timeout=GIVE_UP_S)
            return self._step()

        llm.step = step  # type: ignore[method-assign]

    def open(self) -> None:
        self._permits.release(1 << 20)
        self._server.call_in_engine(lambda llm: setattr(llm, "step", self._step))


class LocalServer:
    """`with LocalServer() as server:` serves at `server.url`."""

    def __init__(
        self, build_llm: Callable[[], LLM] = small_engine, send_buffer: int | None = None, **settings: Any
    ) -> None:
        """`send_buffer`: bytes that the system buffers for a client that does not read."""
        self.settings = ServeSettings(**{"served_model_name": MODEL, "host": "127.0.0.1", "port": 0, **settings})
        self.build_llm, self.send_buffer = build_llm, send_buffer
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> LocalServer:
        self._thread.start()
        assert self._started.wait(GIVE_UP_S), "the server did not start"
        if self._failure is not None:
            raise self._failure
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        def stop() -> None:
            self.server.should_exit = True

        self.loop.call_soon_threadsafe(stop)
        self._thread.join(GIVE_UP_S)
        assert not self._thread.is_alive(), "the server did not stop"

    def _serve(self) -> None:
        async def main() -> None:
            self.loop = asyncio.get_running_loop()
            listener = bind_socket(self.settings.host, self.settings.port)
            if self.send_buffer is not None:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self.send_buffer)
            self.port = listener.getsockname()[1]
            self.engine = EngineClient(partial(EngineThread, self.build_llm), self.settings)
            self.server = build_server(self.engine, "p-eagle-1", K)
            serving = asyncio.ensure_future(self.server.serve([listener]))
            await self.engine.started.wait()
            while not self.server.started:
                await asyncio.sleep(0.01)
            self._started.set()
            await serving

        try:
            with asyncio.Runner(loop_factory=find_event_loop()) as runner:
                runner.run(main())
        except BaseException as error:
            self._failure = error
            self._started.set()
            raise

    @property
    def context(self) -> ServerContext:
        app: Any = self.server.config.app
        return app.state.context

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Runs a coroutine in the server's event loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(GIVE_UP_S)

    def call_in_engine(self, function: Callable[[LLM], Any]) -> Any:
        """Calls a function in the engine's thread, between two steps."""
        thread, result = self.engine._engine, Future[Any]()
        assert isinstance(thread, EngineThread) and thread.core is not None
        thread.core.calls.put((function, result))
        self.loop.call_soon_threadsafe(self.engine._send, AbortRequest(-1))  # wakes an idle engine
        return result.result(GIVE_UP_S)

    def check_engine_idle(self) -> None:
        """Waits until all requests have ended and checks that the engine holds no slot and no block."""
        wait_until(
            lambda: not self.engine.open_streams and not self.call_in_engine(lambda llm: llm.has_unfinished_requests)
        )
        self.call_in_engine(engines.check_all_released)

    def request(
        self, path: str, body: Any = None, headers: dict[str, str] | None = None, method: str | None = None
    ) -> tuple[int, dict[str, str], Any]:
        """Returns status, headers, and the body, parsed if it is JSON."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode() if body is not None else None
        headers = {"content-type": "application/json", **(headers or {})}
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=GIVE_UP_S) as response:
                return response.status, dict(response.headers.items()), _parse(response.read())
        except urllib.error.HTTPError as error:
            return error.code, dict(error.headers.items()), _parse(error.read())

    def complete(self, **options: Any) -> tuple[int, Any]:
        """Sends a valid request. Returns the status and the text."""
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, **options}
        status, _, response = self.request("/v1/completions", body)
        return status, response["choices"][0]["text"] if status == 200 else response


def _parse(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return data


def write_target(folder: Path) -> Path:
    """Writes the small target with a tokenizer, for servers in a process of their own."""
    shutil.copytree(target_folder(), folder / "target")
    engines.write_tokenizer(folder / "target", 160)
    return folder / "target"


class ServerProcess:
    """`peagle serve` in a process of its own."""

    def __init__(self, *arguments: str, **env: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        arguments = (*arguments, "--port", str(self.port), "--device", "cpu", "--dtype", "float32")
        self.process = forks.Process("-m", "peagle", "serve", *arguments, env=env)

    def request(self, path: str, body: Any = None, key: str | None = None) -> tuple[int, Any]:
        data = json.dumps(body).encode() if body is not None else None
        headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=GIVE_UP_S) as response:
                return response.status, response.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def is_ready(self) -> bool:
        try:
            return self.request("/health/ready")[0] == 200
        except OSError:
            return False

    def wait_ready(self) -> None:
        wait_until(lambda: self.is_ready() or self.process.has_ended())
        assert self.is_ready(), self.process.stderr()

    def open_stream(self, body: dict[str, Any], key: str | None = None) -> socket.socket:
        """Sends a request over a raw socket and returns it."""
        data = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"Authorization: Bearer {key}\r\n" if key is not None else ""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=GIVE_UP_S)
        connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        return connection
