"""What is held against every request before anything is done for it: its key, its size, its time, whether anyone
still waits for the answer. And the line in the log when it is over.

Knows nothing about what is asked.
"""

import asyncio
import hmac
import json
import re
import time
import uuid
from collections.abc import Coroutine
from typing import Any, NoReturn, TypeVar

from fastapi import Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from peagle.config import ServeSettings
from peagle.server.errors import ApiError, as_api_error
from peagle.server.logs import log, where

OPEN = ("/", "/version", "/metrics")  # without a key, as in vLLM; and all of /health
QUIET = ("/metrics", "/health")  # asked every few seconds, and not worth a line
REQUEST_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
LONGEST_PATH = 200
LINGER_S, LINGER_GAP_S, LINGER_BYTES = 10.0, 0.5, 64 << 20  # given to a body that is refused for its size
CLIENT_GONE = 499  # nobody sees it but the log

T = TypeVar("T")


class ClientGone(Exception):
    """Whoever asked has left."""


async def read_json(request: Request, settings: ServeSettings) -> Any:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # also keeps pages of other origins from sending anything unasked
        raise ApiError(415, "content-type: must be application/json")
    data = await read_body(request, settings)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8 (at byte {error.start})", code="invalid_json") from None
    try:
        value = json.loads(text, parse_constant=_not_json)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair is no character
    except json.JSONDecodeError as error:
        message = f"the body is not JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        raise ApiError(400, message, code="invalid_json") from None
    except UnicodeEncodeError:
        raise ApiError(400, "the body holds half of a surrogate pair", code="invalid_json") from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply", code="invalid_json") from None
    except ValueError:  # a number of thousands of digits
        raise ApiError(400, "the body holds a number that is too long", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    return value


def _not_json(name: str) -> NoReturn:
    raise ApiError(400, f"the body is not JSON: {name} is no number", code="invalid_json")


async def read_body(request: Request, settings: ServeSettings) -> bytes:
    too_large = ApiError(413, f"the body has more than {settings.max_body} bytes", code="request_too_large")
    length = request.headers.get("content-length", "")
    if length.isdigit() and (len(length) > 18 or int(length) > settings.max_body):
        await _discard(request)
        raise too_large
    parts, size = [], 0
    try:
        async with asyncio.timeout(settings.body_s):
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone()
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > settings.max_body:
                    await _discard(request)
                    raise too_large
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        raise ApiError(408, "the body did not arrive in time", code="timeout") from None


async def _discard(request: Request) -> None:
    """Lets a client that is still sending finish: one that is cut off in the middle never reads why."""
    if "expect" in request.headers:
        return  # it asks before it sends
    began, size = time.monotonic(), 0
    try:
        while size < LINGER_BYTES and time.monotonic() - began < LINGER_S:
            async with asyncio.timeout(LINGER_GAP_S):
                message = await request.receive()
            size += len(message.get("body", b""))
            if not message.get("more_body", False):
                return
    except TimeoutError:
        pass  # it has stopped sending


async def gone(receive: Receive) -> None:
    """Returns once the client has closed its end."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Does the work; if the client leaves before it is done, it is cancelled."""
    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(gone(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone()
    finally:
        for one in (task, watch):
            one.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


class KeyCheck:
    """Refuses requests without the key. It is compared in the same time whatever is sent."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self.app, self.key = app, key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] != "OPTIONS":
            path = scope["path"]
            if path not in OPEN and path != "/health" and not path.startswith("/health/"):
                scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
                same = hmac.compare_digest(given.strip().encode(), self.key)
                if scheme.lower() != "bearer" or not same:
                    message = "the API key is missing or wrong: send it as `Authorization: Bearer KEY`"
                    await ApiError(401, message, code="invalid_api_key").response()(scope, receive, send)
                    return
        await self.app(scope, receive, send)


class RequestLog:
    """Gives every request an id, and the log a line when it is over. Routes add to it through `scope["told"]`."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        asked = Headers(scope=scope).get("x-request-id", "")
        request_id = asked if REQUEST_ID.fullmatch(asked) else uuid.uuid4().hex
        scope["request_id"], scope["told"] = request_id, {}
        began, status = time.perf_counter(), 0

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                headers["x-content-type-options"] = "nosniff"
            await send(message)

        try:
            await self.app(scope, receive, watched)
        except ClientGone:
            status = CLIENT_GONE
        except Exception as error:
            log("unforeseen error", level="error", id=request_id, error=type(error).__name__, trace=where(error))
            if not status:
                await as_api_error(error, 0).response()(scope, receive, watched)
            status = 500
        finally:
            if not any(scope["path"].startswith(quiet) for quiet in QUIET):
                log(
                    "request",
                    level="error" if status >= 500 and status != 503 else "info",
                    id=request_id,
                    method=scope["method"],
                    path=scope["path"][:LONGEST_PATH],
                    status=status or CLIENT_GONE,
                    ms=round((time.perf_counter() - began) * 1e3, 1),
                    **scope["told"],
                )
