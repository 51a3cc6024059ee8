"""HTTP/1.1 as a load generator needs it: many streams at once, a time for every piece, and no way to hang.

Knows nothing about models or tokens. Everything that can go wrong with a server has a short name (`Failed.name`), to be
counted. Connections are kept and used again, as serving clients do; one that the server closed meanwhile is replaced.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

from peagle.config import BenchServerSettings
from peagle.errors import UserError

READ = 1 << 16  # bytes at once
LONGEST_LINE = 1 << 20
LONGEST_ERROR = 1 << 14  # bytes of an error's body that are read
LINGER_S = 1.0  # for the end of a body whose last event has come; a connection is not worth more


class Failed(Exception):
    """One request went wrong; `name` is one of a few, `detail` what was seen."""

    def __init__(self, name: str, detail: str = "") -> None:
        super().__init__(f"{name}: {detail}" if detail else name)
        self.name, self.detail = name, detail


class _Stale(Exception):
    """A kept connection was closed by the server before it said anything: nobody's failure."""


@dataclass(frozen=True)
class Address:
    host: str
    port: int
    secure: bool
    path: str  # in front of /v1, mostly empty

    @property
    def netloc(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.secure else 80) else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{'https' if self.secure else 'http'}://{self.netloc}{self.path}"


def parse_url(url: str) -> Address:
    """`http://host:8000`, with or without /v1 and what comes behind it."""
    wrong = UserError(f"--url {url}: must be an address like http://localhost:8000")
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port
    except ValueError:
        raise wrong from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise wrong
    path = parts.path.rstrip("/").removesuffix("/chat/completions").removesuffix("/completions").removesuffix("/v1")
    secure = parts.scheme == "https"
    return Address(parts.hostname, port or (443 if secure else 80), secure, path)


class Body:
    """Bytes of a response, in whatever pieces they come -> bytes of its body. `done` once it is whole."""

    def __init__(self, headers: dict[str, str]) -> None:
        self.chunked = "chunked" in headers.get("transfer-encoding", "").lower()
        length = headers.get("content-length")
        if length is not None and not self.chunked and not length.isdigit():
            raise Failed("not HTTP", f"Content-Length {length[:40]!r}")
        self.left = int(length) if length is not None and not self.chunked else None
        self.done = self.left == 0
        self._held = b""
        self._open = 0  # bytes of the current chunk that have not come, its line end included
        self._trailing = False

    def feed(self, data: bytes) -> bytes:
        if not self.chunked:
            if self.left is None:
                return data
            taken = data[: self.left]
            self.left -= len(taken)
            self.done = self.left == 0
            return taken
        self._held += data
        out = []
        while not self.done and self._held:
            if self._open:
                piece = self._held[: self._open]
                self._held = self._held[len(piece) :]
                # the last two of `_open` are the line end behind the chunk
                out.append(piece[: max(0, self._open - 2)])
                self._open -= len(piece)
                continue
            line, found, rest = self._held.partition(b"\r\n")
            if not found:
                if len(self._held) > 1024:
                    raise Failed("not HTTP", "a chunk without a size")
                break
            self._held = rest
            if self._trailing:
                self.done = not line
                continue
            size = line.partition(b";")[0].strip()
            try:
                count = int(size, 16)
            except ValueError:
                raise Failed("not HTTP", f"a chunk of size {size[:20]!r}") from None
            if count < 0 or not size.isalnum():
                raise Failed("not HTTP", f"a chunk of size {size[:20]!r}")
            self._trailing = count == 0
            self._open = count + 2 if count else 0
        return b"".join(out)

    def end(self) -> None:
        """The connection was closed: fine where nothing else could have told the end."""
        if self.chunked or self.left:
            raise Failed("ended early", "the connection was closed in the middle of an answer")
        self.done = True


class Events:
    """Bytes of an event stream, in whatever pieces they come -> what its `data:` lines say, event by event."""

    def __init__(self) -> None:
        self._held = b""
        self._data: list[str] = []

    def feed(self, data: bytes) -> list[str]:
        *lines, self._held = (self._held + data).split(b"\n")
        if len(self._held) > LONGEST_LINE:
            raise Failed("not a stream", "a line without an end")
        found = []
        for raw in lines:
            try:
                line = raw.rstrip(b"\r").decode()
            except UnicodeDecodeError:
                raise Failed("not a stream", f"not UTF-8: {raw[:40]!r}") from None
            field, _, value = line.partition(":")
            if not line:
                if self._data:
                    found.append("\n".join(self._data))
                self._data = []
            elif field == "data":
                self._data.append(value.removeprefix(" "))
            elif field not in ("", "event", "id", "retry"):  # an empty one is a comment, often to keep awake
                raise Failed("not a stream", f"{line[:60]!r} where an event should be")
        return found


@dataclass
class Response:
    """A status and headers that have come, and a body that comes."""

    status: int
    headers: dict[str, str]
    body: Body
    _connection: _Connection
    _total: asyncio.Timeout
    _stall: asyncio.Timeout
    _stall_s: float

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes, until it is whole."""
        while not self.body.done:
            data = await self._connection.reader.read(READ)
            self._stall.reschedule(asyncio.get_running_loop().time() + self._stall_s)
            if not data:
                self.body.end()
                return
            yield self.body.feed(data)

    async def whole(self, most: int) -> bytes:
        found = b""
        async for piece in self.pieces():
            found += piece
            if len(found) > most:
                raise Failed("too long", f"more than {most} bytes")
        return found

    async def linger(self) -> None:
        """The end of a body that has said all, so that the connection can be used again. It is too late to fail."""
        self._total.reschedule(None)
        self._stall.reschedule(None)
        try:
            async with asyncio.timeout(LINGER_S):
                while not self.body.done and (data := await self._connection.reader.read(READ)):
                    self.body.feed(data)
        except (TimeoutError, Failed, OSError):
            pass


@dataclass
class _Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    used: bool = False

    def close(self) -> None:
        self.writer.transport.abort()


class Client:
    """Of one server, inside one event loop."""

    def __init__(self, address: Address, settings: BenchServerSettings) -> None:
        self.address, self.settings = address, settings
        self._idle: list[_Connection] = []
        self._tls = ssl.create_default_context() if address.secure else None
        key = os.environ.get("OPENAI_API_KEY")
        self._headers = f"Host: {address.netloc}\r\nUser-Agent: peagle\r\n"
        self._headers += f"Authorization: Bearer {key}\r\n" if key else ""

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    @asynccontextmanager
    async def request(self, method: str, path: str, body: bytes = b"") -> AsyncIterator[Response]:
        """A response whose body is read inside the block. Whatever goes wrong in there is a `Failed`."""
        settings = self.settings
        stall = total = None
        try:
            async with asyncio.timeout(settings.total_s) as total, asyncio.timeout(None) as stall:
                connection, head = await self._answered(method, path, body, stall)
                try:
                    status, headers = _parsed(head)
                    decoded = Body(headers)
                    if status in (204, 304):
                        decoded.done = True
                    yield Response(status, headers, decoded, connection, total, stall, settings.stall_s)
                    if decoded.done and headers.get("connection", "").lower() != "close":
                        self._idle.append(connection)
                        connection = None  # type: ignore[assignment]
                finally:
                    if connection is not None:
                        connection.close()
        except TimeoutError:
            if stall is not None and stall.expired():
                raise Failed("stalled", f"not a byte for {settings.stall_s:g} s") from None
            if total is not None and total.expired():
                raise Failed("timed out", f"not done in {settings.total_s:g} s") from None
            raise Failed("no connection", f"not there in {settings.connect_s:g} s") from None
        except OSError as error:
            raise _named(error) from None

    async def _answered(self, method: str, path: str, body: bytes, stall: asyncio.Timeout) -> tuple[_Connection, bytes]:
        while True:
            connection = await self._connection()
            try:
                return connection, await self._head(connection, method, path, body, stall)
            except _Stale:
                connection.close()
            except BaseException:
                connection.close()
                raise

    async def _head(
        self, connection: _Connection, method: str, path: str, body: bytes, stall: asyncio.Timeout
    ) -> bytes:
        used, connection.used = connection.used, True
        kind = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n" if method == "POST" else ""
        asked = f"{method} {self.address.path}{path} HTTP/1.1\r\n{self._headers}{kind}\r\n"
        stall.reschedule(asyncio.get_running_loop().time() + self.settings.stall_s)
        try:
            connection.writer.write(asked.encode() + body)
            await connection.writer.drain()
            return await connection.reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError as error:
            if used and not error.partial:
                raise _Stale from None
            if error.partial:
                raise Failed("not HTTP", f"{error.partial[:60]!r}") from None
            raise Failed("connection closed", "without an answer") from None
        except asyncio.LimitOverrunError:
            raise Failed("not HTTP", "headers without an end") from None
        except ConnectionError:
            if used:
                raise _Stale from None
            raise

    async def _connection(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if not connection.reader.at_eof() and not connection.writer.is_closing():
                return connection
            connection.close()
        async with asyncio.timeout(self.settings.connect_s):
            reader, writer = await asyncio.open_connection(self.address.host, self.address.port, ssl=self._tls)
        if (plain := writer.get_extra_info("socket")) is not None:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return _Connection(reader, writer)


def _parsed(head: bytes) -> tuple[int, dict[str, str]]:
    first, *lines = head.decode("latin-1").split("\r\n")
    words = first.split(None, 2)
    if len(words) < 2 or not words[0].startswith("HTTP/1.") or not (words[1].isdigit() and len(words[1]) == 3):
        raise Failed("not HTTP", f"{first[:60]!r}")
    headers = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if colon:
            headers[name.strip().lower()] = value.strip()
    if words[0] == "HTTP/1.0":
        headers["connection"] = "close"
    return int(words[1]), headers


def _named(error: OSError) -> Failed:
    if isinstance(error, ConnectionRefusedError):
        return Failed("connection refused")
    if isinstance(error, ConnectionError):
        return Failed("connection reset")
    if isinstance(error, socket.gaierror):
        return Failed("host not found")
    if isinstance(error, ssl.SSLError):
        return Failed("TLS", error.reason or str(error))
    text = error.strerror or str(error)
    # asyncio joins what every address of a host said
    return Failed("connection refused", text) if "Connect call failed" in str(error) else Failed("network", text)
