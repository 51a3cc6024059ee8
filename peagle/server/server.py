"""uvicorn around the app: a port, patience with clients that has an end, and a way to stop that drops nobody.

Knows nothing about what is served.

On SIGTERM or Ctrl-C new requests are answered with 503 while those under way are finished, for at most the seconds
given for it; a second signal ends it at once.
"""

import asyncio
import json
import resource
import signal
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from peagle.config import ServeSettings
from peagle.errors import UserError
from peagle.server.app import build_app
from peagle.server.errors import ApiError
from peagle.server.logs import log
from peagle.server.loop import EngineFacts, EngineLoop

FILES = 1 << 16  # connections are files; the usual limit of 1024 is soon reached by clients that only sit there
BACKLOG = 2048


class PatientProtocol(H11Protocol):
    """Closes a connection whose request's head does not arrive in time: uvicorn itself would wait for ever."""

    head_s = ServeSettings.head_s
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._cease()
        elif self._timer is None:  # the beginning of a further request
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cease()
        super().connection_lost(exc)

    def _wait(self) -> None:
        self._timer = self.loop.call_later(self.head_s, self._give_up)

    def _cease(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._timer = None
        if not self.transport.is_closing():
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        body = json.dumps(ApiError(400, msg, code="invalid_http").body).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        if self.conn.our_state is h11.IDLE or self.conn.our_state is h11.SEND_RESPONSE:
            events = (
                h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
                h11.Data(data=body),
                h11.EndOfMessage(),
            )
            self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))
        self.transport.close()


class DrainingServer(uvicorn.Server):
    """The first signal drains, the second ends."""

    def __init__(self, config: uvicorn.Config, engine: EngineLoop, drain_s: float) -> None:
        super().__init__(config)
        self.engine, self.drain_s = engine, drain_s
        self._draining: asyncio.Task[None] | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._loop.call_soon_threadsafe(self._leave, signal.Signals(sig).name)

    def _leave(self, signal_name: str) -> None:
        if self._draining is not None:
            self.should_exit = self.force_exit = True
            self._draining.cancel()
            return
        log("draining", signal=signal_name, under_way=len(self.engine.open), seconds=self.drain_s)
        self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        self.engine.drain()
        until = self._loop.time() + self.drain_s
        while (self.engine.open or self.server_state.tasks) and self._loop.time() < until:
            await asyncio.sleep(0.02)
        left = len(self.engine.open)
        log("stopping", level="warning" if left else "info", aborted=left)
        await self.engine.stop(0.0)  # what is left hears of it
        self.should_exit = True


def listen(host: str, port: int) -> socket.socket:
    """A bound socket; whatever is wrong with the address is found before a model is loaded."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, proto)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        return listener
    except (OSError, OverflowError, UnicodeError) as error:
        raise UserError(f"--host {host} --port {port}: {getattr(error, 'strerror', None) or error}") from None


def make_server(engine: EngineLoop, settings: ServeSettings, about: dict[str, Any] | None = None) -> DrainingServer:
    protocol = type("Protocol", (PatientProtocol,), {"head_s": settings.head_s})
    config = uvicorn.Config(
        build_app(engine, settings, about),
        http=protocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=int(settings.keep_alive_s),
        timeout_graceful_shutdown=1,  # they have been given their time by then
    )
    return DrainingServer(config, engine, settings.drain_s)


def run(
    engine_of: Callable[[], EngineLoop],
    settings: ServeSettings,
    about: dict[str, Any],
    listener: socket.socket,
) -> None:
    """Serves until told to stop. A UserError if the model cannot be loaded."""
    _raise_file_limit()

    async def main() -> None:
        engine = engine_of()
        server = make_server(engine, settings, about)
        telling = asyncio.ensure_future(_tell_start(engine, settings, about, listener, server))
        await server.serve([listener])
        telling.cancel()
        if engine.facts is None and engine.refused is not None:
            raise engine.refused

    asyncio.run(main())


async def _tell_start(
    engine: EngineLoop, settings: ServeSettings, about: dict[str, Any], listener: socket.socket, server: uvicorn.Server
) -> None:
    host, port = listener.getsockname()[:2]
    log("loading", model=settings.model, address=f"http://{_shown(host)}:{port}")
    await engine.began.wait()
    if engine.facts is None:
        server.should_exit = True
        return
    log(start_summary(engine.facts, about, settings.model, f"http://{_shown(host)}:{port}"))


def start_summary(facts: EngineFacts, about: dict[str, Any], model: str, address: str) -> str:
    """Model, drafter, K, memory and address, on one line."""
    helped = f"{about['drafter']} ({facts.method}, K {about['k']})" if facts.method is not None else "none"
    memory = ", ".join(f"{name} {amount / (1 << 30):.2f} GiB" for name, amount in facts.memory.items() if amount)
    return (
        f"ready: {model}, drafter {helped}, {facts.max_model_len} tokens of context, "
        f"{facts.max_num_seqs} requests at once in {facts.dtype} on {facts.device}, {memory}, at {address}"
    )


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _raise_file_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
