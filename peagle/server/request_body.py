"""Reads the body of a request within limits of size and time, and notices when the client disconnects."""

import asyncio
import time
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from starlette.types import Receive

from peagle.config import ServeSettings
from peagle.server.errors import ApiError, invalid_value

# A client that is still sending a body that is too large: bytes and seconds until its connection is closed.
MAX_DISCARDED_BYTES, DISCARD_TIMEOUT_S, DISCARD_GAP_S = 64 << 20, 10.0, 0.5
# A body of the default size may have this many strings, lists and objects, and this many values (token ids, above
# all). The limits bound the time that parsing blocks other threads.
MIN_MAX_CONTAINERS, MIN_MAX_VALUES = 1 << 16, 1 << 19
PIECE_BYTES = 1 << 16
LONG_FIELDS = (
    b"prompt messages tokens tools stop stop_token_ids logit_bias allowed_token_ids bad_words response_format"
    b" chat_template_kwargs"
).split()
CLIENT_DISCONNECTED = 499  # a status for the log only

T = TypeVar("T")


class ClientDisconnected(Exception):
    """The client has closed its connection."""


async def read_body(request: Request, settings: ServeSettings) -> bytes:
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":  # browsers send other types across origins without asking
        raise ApiError(415, "content-type: must be application/json")
    too_large = ApiError(413, f"the body has more than {settings.max_body_bytes} bytes", code="request_too_large")
    length = request.headers.get("content-length", "")
    if length.isdigit() and (len(length) > 18 or int(length) > settings.max_body_bytes):
        await _discard_body(request)
        raise too_large
    parts, size = [], 0
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnected()
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > settings.max_body_bytes:
                    await _discard_body(request)
                    raise too_large
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        raise ApiError(408, "the body did not arrive in time", code="timeout") from None


def parse_json(data: bytes, max_body_bytes: int) -> dict[str, Any]:
    """Parses a JSON object. Raises `ApiError`, also if it has too many values."""
    _check_num_values(data, max_body_bytes)
    try:
        value = msgspec.json.decode(data)
    except UnicodeDecodeError:
        raise _invalid_json("is not UTF-8") from None
    except RecursionError:
        raise _invalid_json("is nested too deeply") from None
    except msgspec.DecodeError as error:  # also for a number that is too large
        raise _invalid_json(f"is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise _invalid_json("must be a JSON object")
    return value


def _check_num_values(data: bytes, max_body_bytes: int) -> None:
    """Counts the values before they become objects: 4 MB of `[],[],...` would need a second and 200 MB."""
    max_containers = max(MIN_MAX_CONTAINERS, max_body_bytes // 64)
    max_values = max(MIN_MAX_VALUES, max_body_bytes // 8)
    for num_bytes, num_containers, num_commas in count_values(data):
        if num_containers > max_containers or num_commas > max_values:
            # The field that is being read, as far as that is clear without parsing.
            position, field = max((data.rfind(b'"%s"' % name, 0, num_bytes), name.decode()) for name in LONG_FIELDS)
            limit = f"{max_containers} strings, lists and objects, or {max_values} values"
            raise invalid_value(field if position >= 0 else "body", f"more than {limit} in one body", "too_many_values")


def count_values(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yields the bytes read so far, and the strings, lists and objects, and the commas in them, piece by piece.

    Other threads can run between two pieces. Without escaped characters, the quotes divide the text into parts outside
    and inside of strings, in turns.
    """
    num_containers = num_commas = inside = 0
    half_escape = b""
    for begin in range(0, len(data), PIECE_BYTES):
        piece = (half_escape + data[begin : begin + PIECE_BYTES]).replace(rb"\\", b"")
        half_escape = b"\\" if piece.endswith(b"\\") else b""
        parts = piece.removesuffix(half_escape).replace(rb"\"", b"").split(b'"')
        outside = b"".join(parts[inside::2])
        num_containers += outside.count(b"[") + outside.count(b"{") + (inside + len(parts) - 1) // 2
        num_commas += outside.count(b",")
        inside = (inside + len(parts) - 1) % 2
        yield begin + PIECE_BYTES, num_containers, num_commas


def _invalid_json(problem: str) -> ApiError:
    return ApiError(400, f"the body {problem}", code="invalid_json")


async def _discard_body(request: Request) -> None:
    """Lets the client finish sending: if the connection were closed earlier, it would not read the error."""
    if "expect" in request.headers:
        return  # the client waits for permission before it sends
    started, size = time.monotonic(), 0
    try:
        while size < MAX_DISCARDED_BYTES and time.monotonic() - started < DISCARD_TIMEOUT_S:
            async with asyncio.timeout(DISCARD_GAP_S):
                message = await request.receive()
            size += len(message.get("body", b""))
            if not message.get("more_body", False):
                return
    except TimeoutError:
        pass


async def wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def run_while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Awaits the work. Cancels it and raises `ClientDisconnected` if the client disconnects first."""
    task, disconnect = asyncio.ensure_future(work), asyncio.ensure_future(wait_for_disconnect(receive))
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnected()
    finally:
        for future in (task, disconnect):
            future.cancel()
        await asyncio.gather(task, disconnect, return_exceptions=True)
