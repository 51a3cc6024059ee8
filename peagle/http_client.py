"""HTTP client for OpenAI-compatible servers: JSON requests, server-sent events, timeouts and named failures.

`HttpClient` is synchronous and may be shared by threads; `AsyncHttpClient` streams many responses at once. Both send
$OPENAI_API_KEY if it is set and raise `RequestFailed` with a short reason, so that failures can be counted.
"""

import asyncio
import json
import os
import re
import socket
import ssl
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import httpx

from peagle.errors import UserError

MAX_LINE_BYTES = 1 << 20  # of an event stream
METRIC_LINE = re.compile(r"^(vllm:\w+?)(?:_total)?(\{.*\})?\s+(\S+)")
METRIC_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
STATUS_HELP = {
    401: "check $OPENAI_API_KEY",
    403: "the server denies access",
    404: "check the address and --model",
    429: "the server is busy",
}


class RequestFailed(Exception):
    """A request failed. `name` is one of a few short reasons, `detail` says what was seen."""

    def __init__(self, name: str, detail: str = "") -> None:
        super().__init__(f"{name}: {detail}" if detail else name)
        self.name, self.detail = name, detail


@dataclass(frozen=True)
class HttpTimeouts:
    """Time limits of a request, in seconds."""

    connect_s: float = 10.0
    stall_s: float = 60.0  # without a byte
    total_s: float = 600.0


def parse_server_url(url: str, flag: str = "--url") -> str:
    """Base URL of a server from `host:8000`, `http://host:8000`, `.../v1` or `.../v1/chat/completions`."""
    error = UserError(f"{flag} {url}: must be an address such as http://localhost:8000")
    try:
        parts = httpx.URL(url if "://" in url else f"http://{url}")
    except httpx.InvalidURL:
        raise error from None
    if parts.scheme not in ("http", "https") or not parts.host:
        raise error
    path = parts.path.rstrip("/").removesuffix("/chat/completions").removesuffix("/completions").removesuffix("/v1")
    return f"{parts.scheme}://{parts.netloc.decode()}{path}"


def error_message(body: bytes, max_chars: int = 160) -> str:
    """Error text of a response body: `error.message`, `error`, or the body itself."""
    try:
        value = json.loads(body)
        error = value.get("error", value)
        text = error.get("message", error) if isinstance(error, dict) else error
    except (ValueError, AttributeError, RecursionError):
        text = body.decode(errors="replace")
    return " ".join(str(text).split())[:max_chars]


def parse_metrics(body: bytes) -> Iterator[tuple[str, dict[str, str], float]]:
    """Names without `_total`, labels and values of vLLM's metrics in the text of /metrics."""
    for line in body.decode(errors="replace").splitlines():
        if (match := METRIC_LINE.match(line)) is not None:
            with suppress(ValueError):
                yield match[1], dict(METRIC_LABEL.findall(match[2] or "")), float(match[3])


class EventDecoder:
    """Bytes of an event stream, in pieces of any size, to the `data` of its events."""

    def __init__(self) -> None:
        self._buffer = b""
        self._data: list[str] = []

    def feed(self, data: bytes) -> list[str]:
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        if len(self._buffer) > MAX_LINE_BYTES:
            raise RequestFailed("not a stream", "a line without an end")
        events = []
        for raw in lines:
            try:
                line = raw.rstrip(b"\r").decode()
            except UnicodeDecodeError:
                raise RequestFailed("not a stream", f"not UTF-8: {raw[:40]!r}") from None
            field, _, value = line.partition(":")
            if not line:
                if self._data:
                    events.append("\n".join(self._data))
                self._data = []
            elif field == "data":
                self._data.append(value.removeprefix(" "))
            elif field not in ("", "event", "id", "retry"):  # an empty field is a comment that keeps the stream alive
                raise RequestFailed("not a stream", f"{line[:60]!r} where an event should be")
        return events


class HttpClient:
    """Synchronous client. `abort` ends all requests in progress, from any thread."""

    def __init__(self, base_url: str, timeouts: HttpTimeouts, keep_alive: bool = True) -> None:
        self.base_url, self.timeouts = base_url, timeouts
        self._client = httpx.Client(**_client_options(base_url, timeouts, keep_alive))
        self._sockets: set[socket.socket] = set()
        self._closed = False

    def request(self, method: str, path: str, body: Any = None) -> httpx.Response:
        """One request and its whole response."""
        with self.stream(method, path, body) as response:
            deadline, data = time.monotonic() + self.timeouts.total_s, b""
            for chunk in response.iter_raw():
                data += chunk
                if time.monotonic() > deadline:
                    raise RequestFailed("timed out", f"not complete in {self.timeouts.total_s:g} s")
            return httpx.Response(response.status_code, headers=response.headers, content=data)

    @contextmanager
    def stream(self, method: str, path: str, body: Any = None) -> Iterator[httpx.Response]:
        """A response whose body is read inside the block."""
        try:
            with self._client.stream(
                method,
                self.base_url + path,
                content=None if body is None else json.dumps(body),
                extensions={"trace": self._record_socket},
            ) as response:
                yield response
        except (httpx.HTTPError, httpx.StreamError, OSError) as error:
            raise _classify(error, self.timeouts) from None

    def abort(self) -> None:
        """Shuts down all connections, which wakes the threads that read from them."""
        for connection in list(self._sockets):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Aborts all requests, including those still connecting."""
        self._closed = True
        self.abort()

    def _record_socket(self, event: str, info: dict[str, Any]) -> None:
        if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            self._sockets = {s for s in self._sockets if s.fileno() != -1}
            self._sockets.add(info["return_value"].get_extra_info("socket"))
            if self._closed:
                self.abort()


def find_model(client: HttpClient, flag: str, path: str = "/v1") -> str:
    """The only model of a server. Error messages start with `flag`."""
    try:
        reply = client.request("GET", f"{path}/models")
        if reply.status_code != 200:
            detail = f"{STATUS_HELP.get(reply.status_code, '')} ({error_message(reply.content)})"
            raise UserError(f"{flag}{path}/models: {reply.status_code}, {detail}")
        names = [str(model["id"]) for model in json.loads(reply.content)["data"]]
    except RequestFailed as error:
        raise UserError(f"{flag}: {error}") from None
    except (KeyError, TypeError, json.JSONDecodeError):
        raise UserError(f"{flag}: does not list its models; give --model NAME") from None
    if len(names) != 1:
        raise UserError(f"{flag}: give --model NAME, one of {', '.join(names) or 'none'}")
    return names[0]


class AsyncHttpClient:
    """Client of one server inside one event loop."""

    def __init__(self, base_url: str, timeouts: HttpTimeouts) -> None:
        self.base_url, self.timeouts = base_url, timeouts
        self._client = httpx.AsyncClient(**_client_options(base_url, timeouts))

    async def close(self) -> None:
        await self._client.aclose()

    @asynccontextmanager
    async def request(self, method: str, path: str, body: bytes = b"") -> AsyncIterator[httpx.Response]:
        """A response whose body is read inside the block. Every failure of the transport is a `RequestFailed`."""
        try:
            async with asyncio.timeout(self.timeouts.total_s):
                response = await self._send(method, path, body)
                try:
                    yield response
                finally:
                    await response.aclose()
        except TimeoutError:
            raise RequestFailed("timed out", f"not complete in {self.timeouts.total_s:g} s") from None
        except (httpx.HTTPError, httpx.StreamError, OSError) as error:
            raise _classify(error, self.timeouts) from None

    async def _send(self, method: str, path: str, body: bytes) -> httpx.Response:
        """Sends a request; once more if that fails, since the server may have closed an idle connection meanwhile."""
        request = self._client.build_request(method, self.base_url + path, content=body or None)
        try:
            return await self._client.send(request, stream=True)
        except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
            return await self._client.send(request, stream=True)


def _client_options(base_url: str, timeouts: HttpTimeouts, keep_alive: bool = True) -> dict[str, Any]:
    headers = {"User-Agent": "peagle", "Accept-Encoding": "identity", "Content-Type": "application/json"}
    if key := os.environ.get("OPENAI_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    verify: ssl.SSLContext | bool = ssl.create_default_context() if base_url.startswith("https:") else False
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None if keep_alive else 0)
    stall_s = min(timeouts.stall_s, timeouts.total_s)
    timeout = httpx.Timeout(connect=timeouts.connect_s, read=stall_s, write=stall_s, pool=None)
    return {"headers": headers, "verify": verify, "trust_env": False, "limits": limits, "timeout": timeout}


def _classify(error: Exception, timeouts: HttpTimeouts) -> RequestFailed:
    """The short reason for an error of httpx or the operating system."""
    text = " ".join(str(error).split())[:120]
    if isinstance(error, httpx.ConnectTimeout):
        return RequestFailed("no connection", f"not established in {timeouts.connect_s:g} s")
    if isinstance(error, httpx.TimeoutException):
        if timeouts.stall_s >= timeouts.total_s:
            return RequestFailed("timed out", f"not complete in {timeouts.total_s:g} s")
        return RequestFailed("stalled", f"no data for {timeouts.stall_s:g} s")
    if isinstance(error, httpx.RemoteProtocolError):
        if "without sending a response" in text:
            return RequestFailed("connection closed", "without a response")
        if "without sending complete message body" in text:
            return RequestFailed("ended early", "the connection was closed in the middle of a response")
        return RequestFailed("not HTTP", text)
    if isinstance(error, httpx.ConnectError):
        refused = "refused" in text or "attempts failed" in text
        return RequestFailed("connection refused") if refused else RequestFailed("no connection", text)
    if isinstance(error, httpx.ReadError | httpx.WriteError | ConnectionError):
        return RequestFailed("connection reset")
    return RequestFailed("network", text or type(error).__name__)
