"""A server of OpenAI's protocol that streams words at a fixed pace, keeps a log of it, and misbehaves on demand.

Knows nothing about its clients. The prompt chooses how a request is served: `fault:NAME` or `as:NAME` anywhere in
it, so the same prompt is always treated alike.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

# What is done to a request, and what a client must call it. `reset` is one with a RST, `closed` one with a FIN.
FAULTS = {
    "429": "HTTP 429",
    "503": "HTTP 503",
    "400": "HTTP 400",
    "reset": "connection reset",
    "closed": "connection closed",
    "rubbish": "not HTTP",
    "half a head": "connection closed",
    "no end of headers": "not HTTP",
    "bad chunk": "not HTTP",
    "bad length": "not HTTP",
    "page": "not a stream",
    "json": "not a stream",
    "plain lines": "not a stream",
    "long line": "not a stream",
    "not text": "not a stream",
    "broken event": "not JSON",
    "list event": "not JSON",
    "choice of text": "not JSON",
    "deep event": "not JSON",
    "error event": "error in the stream",
    "cut": "ended early",
    "reset midway": "connection reset",
    "no finish": "ended early",
    "nothing": "no tokens",
    "no usage": None,  # no failure: the client counts the tokens
    "rubbish usage": "not JSON",
    "silent": "stalled",
    "stalls": "stalled",
    "drips": "timed out",
}
# Other ways to say the same: all of them are answers.
MANNERS = (
    "plain",
    "crlf",
    "comments",
    "bytewise",
    "length",
    "http/1.0",
    "usage in the last",
    "chatter behind",
    "lingers",
)
SSE = "Content-Type: text/event-stream\r\n"


@dataclass
class Served:
    """One request as the server saw it; seconds of `time.perf_counter`."""

    received: float
    path: str
    body: dict[str, Any]
    connection: int
    written: list[float] = field(default_factory=list)
    tokens: int = 0


class StreamServer:
    """`with StreamServer(...) as server:`, then `server.url`. `metrics` makes the text of /metrics from it."""

    def __init__(
        self,
        first_s: float = 0.01,
        each_s: float = 0.002,
        bunch: int = 1,
        models: tuple[str, ...] = ("small",),
        metrics: Callable[[StreamServer], str] | None = None,
    ) -> None:
        self.first_s, self.each_s, self.bunch = first_s, each_s, bunch
        self.models, self.metrics = models, metrics
        self.log: list[Served] = []
        self.running = self.most_running = self.connections = 0

    def __enter__(self) -> StreamServer:
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(10)

    @property
    def answered(self) -> list[Served]:
        return [s for s in self.log if "completions" in s.path]

    async def _serve(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._talk, "127.0.0.1", 0, backlog=512)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        await self._end.wait()
        server.close()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        number = self.connections
        try:
            while await self._once(reader, writer, number):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client left, or the test is over
        finally:
            writer.close()

    async def _once(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        now = time.perf_counter()
        method, path, _ = head.split("\r\n")[0].split()
        length = next((int(h.split(":")[1]) for h in head.lower().split("\r\n") if h.startswith("content-length")), 0)
        body = json.loads(await reader.readexactly(length)) if length else {}
        served = Served(now, path, body, number)
        self.log.append(served)
        if method == "GET":
            return await self._get(writer, path)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            return await self._answer(writer, served)
        finally:
            self.running -= 1

    async def _get(self, writer: asyncio.StreamWriter, path: str) -> bool:
        if path == "/v1/models":
            text, status = json.dumps({"data": [{"id": name} for name in self.models]}), "200 OK"
        elif path == "/metrics" and self.metrics is not None:
            text, status = self.metrics(self), "200 OK"
        else:
            text, status = '{"detail": "Not Found"}', "404 Not Found"
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode())
        await writer.drain()
        return True

    async def _answer(self, writer: asyncio.StreamWriter, served: Served) -> bool:
        prompt = json.dumps(served.body.get("messages", served.body.get("prompt")))
        fault = next((name for name in FAULTS if f"fault:{name}." in prompt), None)
        if fault is not None:
            return await self._misbehave(writer, served, fault)
        manner = next((name for name in MANNERS if f"as:{name}." in prompt), "plain")
        await self._stream(writer, served, manner)
        return manner not in ("http/1.0", "lingers")

    def _events(self, served: Served, manner: str) -> list[tuple[float, str]]:
        """What comes when, from the time the request was received."""
        count, chat = served.body["max_tokens"], "messages" in served.body
        events, due = [], self.first_s
        usage = {"prompt_tokens": 7, "completion_tokens": count, "total_tokens": 7 + count}
        for begin in range(0, count, self.bunch):
            text, last = "word " * min(self.bunch, count - begin), begin + self.bunch >= count
            choice: dict[str, Any] = {"index": 0, "finish_reason": "length" if last else None}
            choice |= {"delta": {"content": text}} if chat else {"text": text}
            event: dict[str, Any] = {"id": "x", "choices": [choice]}
            if last and manner == "usage in the last":
                event["usage"] = usage
            events.append((due, json.dumps(event)))
            due += self.each_s
        if manner != "usage in the last":
            assert served.body["stream_options"] == {"include_usage": True}
            events.append((due - self.each_s, json.dumps({"id": "x", "choices": [], "usage": usage})))
        return events

    async def _stream(self, writer: asyncio.StreamWriter, served: Served, manner: str) -> None:
        end = "\r\n" if manner == "crlf" else "\n"
        events = self._events(served, manner)
        if manner == "length":
            text = "".join(f"data: {e}{end}{end}" for _, e in events) + f"data: [DONE]{end}{end}"
            head = f"HTTP/1.1 200 OK\r\n{SSE}Content-Length: {len(text)}\r\n\r\n"
        elif manner == "http/1.0":
            head = f"HTTP/1.0 200 OK\r\n{SSE}\r\n"
        else:
            head = f"HTTP/1.1 200 OK\r\n{SSE}Transfer-Encoding: chunked\r\n\r\n"
        chunked = manner not in ("length", "http/1.0")
        writer.write(head.encode())

        async def say(text: str) -> None:
            data = text.encode()
            data = b"%x\r\n%b\r\n" % (len(data), data) if chunked else data
            for piece in [data[i : i + 1] for i in range(len(data))] if manner == "bytewise" else [data]:
                writer.write(piece)
                await writer.drain()

        for due, event in events:
            await asyncio.sleep(max(0.0, served.received + due - time.perf_counter()))
            if manner == "comments":
                await say(f": still here{end}{end}event: message{end}")
            if '"text"' in event or '"delta"' in event:
                served.written.append(time.perf_counter())
            await say(f"data: {event}{end}{end}")
        served.tokens = served.body["max_tokens"]
        await say(f"data: [DONE]{end}{end}")
        if manner == "chatter behind":
            await say(f"data: not JSON at all{end}{end}")
        if manner == "lingers":
            await asyncio.sleep(30)
        if chunked:
            writer.write(b"0\r\n\r\n")
            await writer.drain()

    async def _misbehave(self, writer: asyncio.StreamWriter, served: Served, fault: str) -> bool:
        async def send(text: str | bytes) -> None:
            writer.write(text if isinstance(text, bytes) else text.encode())
            await writer.drain()

        def chunk(text: str) -> str:
            return f"{len(text.encode()):x}\r\n{text}\r\n"

        def reset() -> None:
            plain = writer.get_extra_info("socket")
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

        ok = f"HTTP/1.1 200 OK\r\n{SSE}Transfer-Encoding: chunked\r\n\r\n"
        word = 'data: {"choices": [{"index": 0, "text": "word ", "finish_reason": null}]}\n\n'
        done = 'data: {"choices": [{"index": 0, "text": "end", "finish_reason": "stop"}]}\n\n'
        usage, end = 'data: {"choices": [], "usage": {"completion_tokens": 2}}\n\n', "data: [DONE]\n\n"
        bodies = {
            "plain lines": "hello\n\n",
            "long line": "data: " + "x" * (2 << 20),
            "broken event": word + "data: {broken\n\n",
            "list event": word + "data: [1, 2]\n\n",
            "choice of text": 'data: {"choices": ["word"]}\n\n',
            "deep event": "data: " + "[" * 200_000 + "\n\n",
            "error event": word + 'data: {"error": {"message": "out of memory"}}\n\n',
            "no finish": word + word + usage,
            "nothing": usage + end,
            "no usage": word + done + end,
            "rubbish usage": word + done + 'data: {"choices": [], "usage": {"completion_tokens": "two"}}\n\n' + end,
        }
        if fault.isdigit():
            text = json.dumps({"error": {"message": f"this is a {fault}"}})
            await send(f"HTTP/1.1 {fault} Some\r\nRetry-After: 1\r\nContent-Length: {len(text)}\r\n\r\n{text}")
            return True
        if fault in bodies:
            await send(ok + chunk(bodies[fault]) + "0\r\n\r\n")
            return True
        if fault == "reset":
            reset()
        elif fault == "rubbish":
            await send(b"\x00\xff\xfe whatever\r\n\r\n")
        elif fault == "half a head":
            await send("HTTP/1.1 200 OK\r\nContent-")
        elif fault == "no end of headers":
            await send("HTTP/1.1 200 OK\r\n" + "X-More: yes\r\n" * 20_000)
        elif fault == "bad chunk":
            await send(ok + chunk(word) + "wide\r\n" + word)
        elif fault == "bad length":
            await send(f"HTTP/1.1 200 OK\r\n{SSE}Content-Length: many\r\n\r\n")
        elif fault == "page":
            await send("HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 13\r\n\r\n<html></html>")
        elif fault == "json":
            await send("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")
        elif fault == "not text":
            await send(ok.encode() + b"8\r\n\xff\xfe\xff\xfe\n\n\n\n\r\n0\r\n\r\n")
        elif fault in ("cut", "reset midway"):
            await send(ok + chunk(word) + chunk(word))
            if fault == "reset midway":
                await asyncio.sleep(0.05)  # or the words may be lost with the connection
                reset()
        elif fault == "silent":
            await asyncio.sleep(60)
        elif fault == "stalls":
            await send(ok + chunk(word))
            await asyncio.sleep(60)
        elif fault == "drips":
            await send(ok)
            for _ in range(600):
                await send(chunk(": awake\n\n"))
                await asyncio.sleep(0.1)
        return False
