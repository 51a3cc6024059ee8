"""Reads the body of a request within limits of size and time, and notices when the client disconnects."""

import asyncio
import json
import time
from collections.abc import Coroutine
from typing import Any, NoReturn, TypeVar

from fastapi import Request
from starlette.types import Receive

from peagle.config import ServeSettings
from peagle.server.errors import ApiError

# A client that is still sending a body that is too large: bytes and seconds until its connection is closed.
MAX_DISCARDED_BYTES, DISCARD_TIMEOUT_S, DISCARD_GAP_S = 64 << 20, 10.0, 0.5
CLIENT_DISCONNECTED = 499  # a status for the log only

T = TypeVar("T")


class ClientDisconnected(Exception):
    """The client has closed its connection."""


async def read_json(request: Request, settings: ServeSettings) -> dict[str, Any]:
    """Reads a JSON object, or raises `ApiError`."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":  # browsers send other types across origins without asking
        raise ApiError(415, "content-type: must be application/json")
    data = await _read_body(request, settings)
    try:
        text = data.decode("utf-8")
        value = json.loads(text, parse_constant=_refuse_constant)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()  # fails on half of a surrogate pair
    except UnicodeDecodeError as error:
        raise _invalid_json(f"is not UTF-8 (at byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise _invalid_json(f"is not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None
    except UnicodeEncodeError:
        raise _invalid_json("holds half of a surrogate pair") from None
    except RecursionError:
        raise _invalid_json("is nested too deeply") from None
    except ValueError:  # an integer of thousands of digits
        raise _invalid_json("holds a number that is too long") from None
    if not isinstance(value, dict):
        raise _invalid_json("must be a JSON object")
    return value


def _invalid_json(problem: str) -> ApiError:
    return ApiError(400, f"the body {problem}", code="invalid_json")


def _refuse_constant(name: str) -> NoReturn:
    raise _invalid_json(f"is not JSON: {name} is no number")


async def _read_body(request: Request, settings: ServeSettings) -> bytes:
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
