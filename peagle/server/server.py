"""Runs the application under uvicorn, with time limits for clients and a graceful shutdown.

On SIGTERM or Ctrl-C new requests get status 503 and running ones may finish within `shutdown_timeout_s`. A second
signal ends the server at once.
"""

import asyncio
import gc
import json
import resource
import signal
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from peagle.config import ServeSettings
from peagle.errors import UserError
from peagle.server.app import build_app
from peagle.server.engine_client import POLL_S, EngineClient
from peagle.server.errors import ApiError
from peagle.server.logs import log_event
from peagle.server.server_context import ServerContext

MAX_OPEN_FILES = 1 << 16  # connections are files; idle clients soon reach the usual limit of 1024
BACKLOG = 2048
ACCEPT_RETRY_S = 1.0  # after an error
YOUNG_OBJECTS = 20_000  # between two runs of the garbage collector; hundreds of streams create many
MAX_HEADER_BYTES = 32 << 10
MAX_HEADERS = 128


class LimitedProtocol(HttpToolsProtocol):
    """Limits the time and the size of a request's header. uvicorn itself has no such limits."""

    header_timeout_s = ServeSettings.header_timeout_s
    _header_timer: asyncio.TimerHandle | None = None
    _num_header_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        if self._header_timer is None and (self.cycle is None or self.cycle.response_complete):
            self._start_timer()  # the next request on this connection begins
        if self._header_timer is not None:
            self._num_header_bytes += len(data)
            end = data.find(b"\r\n\r\n")  # of the header
            num_free_bytes = MAX_HEADER_BYTES - (self._num_header_bytes - len(data))
            if len(data) > num_free_bytes and not 0 <= end <= num_free_bytes:
                self.send_400_response(f"the header has more than {MAX_HEADER_BYTES} bytes")
                return
        super().data_received(data)

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            raise ValueError("too many headers")  # the parser refuses the request

    def on_headers_complete(self) -> None:
        self._stop_timer()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _start_timer(self) -> None:
        self._num_header_bytes = 0
        self._header_timer = self.loop.call_later(self.header_timeout_s, self.transport.close)

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def send_400_response(self, msg: str) -> None:
        """Reports invalid HTTP in OpenAI's error format."""
        body = json.dumps(ApiError(400, msg, code="invalid_http").body).encode()
        if self.cycle is None or self.cycle.response_complete:  # otherwise it would mix with another response
            head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
            self.transport.write(f"{head}\r\nconnection: close\r\n\r\n".encode() + body)
        self.transport.close()


class Listener:
    """Accepts all waiting connections at once.

    uvloop accepts one per iteration of its event loop: hundreds of clients that connect together would wait seconds.
    """

    def __init__(self, sock: socket.socket, new_protocol: Callable[[], asyncio.Protocol]) -> None:
        self._socket, self._new_protocol = sock, new_protocol
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[Any]] = set()
        sock.setblocking(False)
        sock.listen(BACKLOG)
        self._start()

    def _start(self) -> None:
        if self._socket.fileno() >= 0:  # not closed
            self._loop.add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:  # too many open files, most likely
                log_event("cannot accept connections", level="error", error=error.strerror)
                self._loop.remove_reader(self._socket)
                self._loop.call_later(ACCEPT_RETRY_S, self._start)
                return
            task = self._loop.create_task(self._connect(connection))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _connect(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        await self._loop.connect_accepted_socket(self._new_protocol, connection)

    def close(self) -> None:
        self._loop.remove_reader(self._socket)

    async def wait_closed(self) -> None:
        pass


class DrainingServer(uvicorn.Server):
    """Drains on the first signal and exits on the second."""

    def __init__(self, config: uvicorn.Config, engine: EngineClient) -> None:
        super().__init__(config)
        self.engine, self.shutdown_timeout_s = engine, engine.settings.shutdown_timeout_s
        self._draining: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        config, state, app_state = self.config, self.server_state, self.lifespan.state
        new_protocol: Any = partial(config.http_protocol_class, config, state, app_state)  # type: ignore[call-arg]
        self.servers += [Listener(sock, new_protocol) for sock in sockets or ()]  # type: ignore[misc]

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._loop.call_soon_threadsafe(self._shut_down, signal.Signals(sig).name)

    def _shut_down(self, signal_name: str) -> None:
        if self._draining is not None:
            self.should_exit = self.force_exit = True
            self._draining.cancel()
            return
        num_requests = len(self.engine.open_streams)
        log_event("draining", signal=signal_name, requests=num_requests, timeout_s=self.shutdown_timeout_s)
        self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        self.engine.drain()
        deadline = self._loop.time() + self.shutdown_timeout_s
        while (self.engine.open_streams or self.server_state.tasks) and self._loop.time() < deadline:
            await asyncio.sleep(POLL_S)
        num_aborted = len(self.engine.open_streams)
        log_event("stopping", level="warning" if num_aborted else "info", aborted=num_aborted)
        await self.engine.stop()  # open requests get an error
        self.should_exit = True


def bind_socket(host: str, port: int) -> socket.socket:
    """Binds the address before the model is loaded, so that a wrong address is reported at once."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, proto)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        return listener
    except (OSError, OverflowError, UnicodeError) as error:
        raise UserError(f"--host {host} --port {port}: {getattr(error, 'strerror', None) or error}") from None


def build_server(engine: EngineClient, drafter: str | None, num_speculative_tokens: int | str | None) -> DrainingServer:
    settings = engine.settings
    protocol = type("Protocol", (LimitedProtocol,), {"header_timeout_s": settings.header_timeout_s})
    config = uvicorn.Config(
        build_app(ServerContext(engine, drafter, num_speculative_tokens)),
        http=protocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=int(settings.keep_alive_s),
        timeout_graceful_shutdown=1,  # after our own draining
    )
    return DrainingServer(config, engine)


def run_server(
    build_engine: Callable[[], EngineClient],
    settings: ServeSettings,
    drafter: str | None,
    num_speculative_tokens: int | str | None,
    listener: socket.socket,
    target_folder: Path,
) -> None:
    """Serves until a signal. Raises the error if the model or its tokenizer cannot be loaded."""
    _raise_file_limit()
    host, port = listener.getsockname()[:2]
    address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def main() -> None:
        engine = build_engine()
        server = build_server(engine, drafter, num_speculative_tokens)

        async def report_start() -> None:
            started = time.monotonic()
            log_event("loading", model=settings.served_model_name, address=address)
            try:
                await server.config.app.state.context.load_tokenizer(target_folder)  # type: ignore[union-attr]
                await engine.started.wait()
                if engine.info is None and engine.fatal_error is not None:
                    raise engine.fatal_error
            except Exception:
                server.should_exit = True
                raise
            # Reference counts free almost everything. The collector would scan the imported libraries again and again.
            gc.collect()
            gc.freeze()
            gc.set_threshold(YOUNG_OBJECTS, 10, 10)
            info = engine.info
            assert info is not None
            drafter_and_k = f"{drafter} ({info.method}, K {num_speculative_tokens})" if drafter else "none"
            memory = ", ".join(f"{name} {size / (1 << 30):.2f} GiB" for name, size in info.memory_bytes.items() if size)
            log_event(
                f"ready: {settings.served_model_name}, drafter {drafter_and_k}, max_model_len {info.max_model_len}, "
                f"max_num_seqs {info.max_num_seqs}, {info.dtype} on {info.device}, {memory}, at {address}",
                seconds=round(time.monotonic() - started, 1),
            )

        reporting = asyncio.ensure_future(report_start())
        await server.serve([listener])
        if not reporting.cancel():
            reporting.result()  # raises what ended the start

    with asyncio.Runner(loop_factory=find_event_loop()) as runner:
        runner.run(main())


def find_event_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, which is faster, where it is installed."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def _raise_file_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(MAX_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
