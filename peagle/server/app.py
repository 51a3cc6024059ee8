"""The FastAPI application: routes, API key, request log and the OpenAPI description."""

import hmac
import re
import time
import uuid
from contextlib import asynccontextmanager
from functools import cache, partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from peagle import __version__
from peagle.server import routes
from peagle.server.errors import CLIENT_ERRORS, ApiError, answer_http_exception, to_api_error
from peagle.server.logs import format_traceback, log_event
from peagle.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from peagle.server.request_body import CLIENT_DISCONNECTED, ClientDisconnected
from peagle.server.server_context import ServerContext

PATHS_WITHOUT_KEY = ("/", "/version", "/metrics", "/health")  # as in vLLM; and all below /health/
UNLOGGED_PATHS = ("/metrics", "/health")  # polled every few seconds
REQUEST_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
PORT = re.compile(r":\d*$")
MAX_PATH_LENGTH = 200
DIRECT_ROUTES = {"/v1/chat/completions": routes.chat_completions, "/v1/completions": routes.completions}
REQUEST_BODIES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    error: ErrorDetail


def build_app(context: ServerContext) -> FastAPI:
    """Builds the application. It starts and stops the engine."""
    settings = context.settings

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> Any:
        context.engine.start()
        yield
        await context.engine.stop()

    app = FastAPI(
        title="peagle",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        exception_handlers={HTTPException: answer_http_exception},
    )
    app.state.context = context
    app.include_router(routes.router)
    app.add_middleware(ApiMiddleware, api_key=settings.api_key)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type", "x-request-id"],
            expose_headers=["x-request-id", "retry-after"],
        )
    app.add_middleware(RequestMiddleware, hosts=settings.accepted_hosts)
    app.openapi = cache(partial(_build_openapi, app))  # type: ignore[method-assign]
    return app


def _build_openapi(app: FastAPI) -> dict[str, Any]:
    """Adds the schemas of the request bodies: the routes parse them without FastAPI, within limits."""
    description = get_openapi(title=app.title, version=app.version, routes=app.routes)
    models = [(model, "validation") for model in (*REQUEST_BODIES.values(), ErrorBody)]
    _, schemas = models_json_schema(models, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    description.setdefault("components", {})["schemas"] = schemas["$defs"]
    error = {"description": "An error in OpenAI's format.", "content": _refer_to_schema(ErrorBody)}
    for path, operations in description["paths"].items():
        for operation in operations.values():
            operation["responses"] = {"200": {"description": "Success."}, "default": error}
            if path in REQUEST_BODIES:
                operation["requestBody"] = {"required": True, "content": _refer_to_schema(REQUEST_BODIES[path])}
    return description


def _refer_to_schema(model: type[BaseModel]) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}


class ApiMiddleware:
    """Checks the API key, and answers errors in OpenAI's format.

    Calls the routes of completions without the router's layers, which cost as much time as a route itself.
    """

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        self.app, self.api_key = app, api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            if self.api_key is not None and scope["method"] != "OPTIONS":
                check_api_key(scope, self.api_key)
            route = DIRECT_ROUTES.get(scope["path"]) if scope["method"] == "POST" else None
            app = self.app if route is None else await route(Request(scope, receive))
            await app(scope, receive, send)
        except CLIENT_ERRORS as error:
            await to_api_error(error).response()(scope, receive, send)


def check_api_key(scope: Scope, api_key: str) -> None:
    """Raises for a request without the API key. The comparison takes constant time."""
    if scope["path"] not in PATHS_WITHOUT_KEY and not scope["path"].startswith("/health/"):
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        equal = hmac.compare_digest(key.strip().encode(), api_key.encode())
        if scheme.lower() != "bearer" or not equal:
            message = "the API key is missing or wrong: send it as `Authorization: Bearer KEY`"
            raise ApiError(401, message, code="invalid_api_key")


def check_host(headers: Headers, hosts: frozenset[str]) -> None:
    """Raises for a request to another host: a page of another site could reach this server by DNS rebinding."""
    host = PORT.sub("", headers.get("host", "")).lower()
    if host not in hosts:
        message = f"host: {host[:100]!r} is not allowed; start the server with --allowed-hosts to accept it"
        raise ApiError(403, message, code="host_not_allowed")


class RequestMiddleware:
    """Gives every request an id, checks its host, and logs it when it ends. Routes add to `scope["log_fields"]`."""

    def __init__(self, app: ASGIApp, hosts: frozenset[str] | None) -> None:
        """`hosts` are those that are accepted; None: any."""
        self.app, self.hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_headers = Headers(scope=scope)
        given_id = request_headers.get("x-request-id", "")
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
            if self.hosts is not None:
                check_host(request_headers, self.hosts)
            await self.app(scope, receive, send_with_headers)
        except ClientDisconnected:
            status = CLIENT_DISCONNECTED
        except ApiError as error:  # of the host
            await error.response()(scope, receive, send_with_headers)
        except Exception as error:
            trace = format_traceback(error)
            log_event("unexpected error", level="error", id=request_id, error=type(error).__name__, trace=trace)
            if not status:
                await to_api_error(error).response()(scope, receive, send_with_headers)
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
