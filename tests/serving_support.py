"""A server on a real port, in a thread of the test's process, so that a test can look inside while clients ask.

The pair is the small one of `pairs`, whose tokens are bytes: the target goes on with a licence's text.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any

import engines
from pairs import TEXT

from peagle.config import ServeSettings
from peagle.engine.llm import LLM
from peagle.server.context import Context
from peagle.server.loop import EngineLoop
from peagle.server.server import listen, make_server

MODEL = "small"
LONGEST = 256
K = 4
PROMPT = TEXT[1000:1040].decode()


def small_engine(**options: Any) -> LLM:
    return engines.engine("p-eagle-1", K, **{"max_model_len": LONGEST, "max_num_seqs": 4, **options})


class Served:
    """`with Served() as server:` serves at `server.url`."""

    def __init__(
        self, make_llm: Callable[[], LLM] = small_engine, send_buffer: int | None = None, **settings: Any
    ) -> None:
        """`send_buffer`: bytes that the system keeps for a client that does not read."""
        self.settings = ServeSettings(**{"model": MODEL, "host": "127.0.0.1", "port": 0, **settings})
        self.make_llm, self.send_buffer = make_llm, send_buffer
        self._begun = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> Served:
        self._thread.start()
        assert self._begun.wait(60), "the server did not start"
        if self._failure is not None:
            raise self._failure
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        def leave() -> None:
            self.server.should_exit = True

        self.loop.call_soon_threadsafe(leave)
        self._thread.join(30)
        assert not self._thread.is_alive(), "the server did not stop"

    def _serve(self) -> None:
        async def main() -> None:
            self.loop = asyncio.get_running_loop()
            listener = listen(self.settings.host, self.settings.port)
            if self.send_buffer is not None:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self.send_buffer)
            self.port = listener.getsockname()[1]
            self.engine = EngineLoop(self.make_llm, self.settings)
            self.server = make_server(self.engine, self.settings, {"drafter": "p-eagle-1", "k": K})
            serving = asyncio.ensure_future(self.server.serve([listener]))
            await self.engine.began.wait()
            while not self.server.started:
                await asyncio.sleep(0.01)
            self._begun.set()
            await serving

        try:
            asyncio.run(main())
        except BaseException as error:
            self._failure = error
            self._begun.set()
            raise

    @property
    def context(self) -> Context:
        """What its routes have."""
        app: Any = self.server.config.app
        return app.state.context

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Runs it where the server runs."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def inspect(self, look: Callable[[LLM], Any]) -> Any:
        return self.call(self.engine.inspect(look))

    def check_nothing_left(self, seconds: float = 10.0) -> None:
        """No request, no slot and no block of any client is left in the engine."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if not self.engine.open and not self.inspect(lambda llm: llm.has_unfinished_requests):
                break
            time.sleep(0.02)
        self.inspect(engines.nothing_left)

    # A plain client, which shows everything

    def ask(
        self, path: str, body: Any = None, headers: dict[str, str] | None = None, method: str | None = None
    ) -> tuple[int, dict[str, str], Any]:
        """Status, headers, and the body as JSON where it is JSON."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode() if body is not None else None
        given = {"content-type": "application/json", **(headers or {})}
        request = urllib.request.Request(self.url + path, data, given, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, dict(response.headers.items()), _parsed(response.read())
        except urllib.error.HTTPError as error:
            return error.code, dict(error.headers.items()), _parsed(error.read())

    def good(self, **more: Any) -> tuple[int, Any]:
        """A request that must be answered; its text."""
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, **more}
        status, _, said = self.ask("/v1/completions", body)
        return status, said["choices"][0]["text"] if status == 200 else said


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return data
