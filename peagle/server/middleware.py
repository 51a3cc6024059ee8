"""ASGI middleware: the check of the API key, and the request log."""

import hmac
import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from peagle.server.errors import ApiError, to_api_error
from peagle.server.logs import format_traceback, log_event
from peagle.server.request_body import CLIENT_DISCONNECTED, ClientDisconnected

PATHS_WITHOUT_KEY = ("/", "/version", "/metrics", "/health")  # as in vLLM; and all below /health/
UNLOGGED_PATHS = ("/metrics", "/health")  # polled every few seconds
REQUEST_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
MAX_PATH_LENGTH = 200


class ApiKeyMiddleware:
    """Refuses requests without the API key. The comparison takes constant time."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self.app, self.key = app, key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] != "OPTIONS":
            path = scope["path"]
            if path not in PATHS_WITHOUT_KEY and not path.startswith("/health/"):
                scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
                equal = hmac.compare_digest(key.strip().encode(), self.key)
                if scheme.lower() != "bearer" or not equal:
                    message = "the API key is missing or wrong: send it as `Authorization: Bearer KEY`"
                    await ApiError(401, message, code="invalid_api_key").response()(scope, receive, send)
                    return
        await self.app(scope, receive, send)


class RequestLogMiddleware:
    """Gives every request an id and logs it when it ends. Routes add fields through `scope["log_fields"]`."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given_id = Headers(scope=scope).get("x-request-id", "")
        request_id = given_id if REQUEST_ID.fullmatch(given_id) else uuid.uuid4().hex
        scope["request_id"], scope["log_fields"] = request_id, {}
        started, status = time.perf_counter(), 0

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                headers["x-content-type-options"] = "nosniff"
            await send(message)

        try:
            await self.app(scope, receive, send_with_headers)
        except ClientDisconnected:
            status = CLIENT_DISCONNECTED
        except Exception as error:
            trace = format_traceback(error)
            log_event("unexpected error", level="error", id=request_id, error=type(error).__name__, trace=trace)
            if not status:
                await to_api_error(error, 0).response()(scope, receive, send_with_headers)
            status = 500
        finally:
            if not scope["path"].startswith(UNLOGGED_PATHS):
                log_event(
                    "request",
                    level="error" if status >= 500 and status != 503 else "info",
                    id=request_id,
                    method=scope["method"],
                    path=scope["path"][:MAX_PATH_LENGTH],
                    status=status or CLIENT_DISCONNECTED,
                    ms=round((time.perf_counter() - started) * 1e3, 1),
                    **scope["log_fields"],
                )
