"""Errors in OpenAI's format: {"error": {"message", "type", "param", "code"}}."""

import re
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from peagle.errors import UserError
from peagle.server.request_stream import (
    EngineFailedError,
    EngineUnavailableError,
    QueueFullError,
    RequestTimeoutError,
)

FLAG = re.compile(r"--([a-z][a-z-]*)")
MAX_MESSAGE_LENGTH = 400
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}
STATE_MESSAGES = {
    "starting": "the model is still loading",
    "restarting": "the engine is restarting",
    "draining": "the server is shutting down",
    "failed": "the engine has failed",
}


class ApiError(Exception):
    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.retry_after = status, param, code, retry_after

    @property
    def body(self) -> dict[str, Any]:
        error_type = ERROR_TYPES.get(self.status, "invalid_request_error")
        message = str(self)[:MAX_MESSAGE_LENGTH]
        return {"error": {"message": message, "type": error_type, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        headers = {"retry-after": str(self.retry_after)} if self.retry_after is not None else {}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return JSONResponse(self.body, self.status, headers)


# Exceptions of a route that have a response in `to_api_error`. All others are unexpected.
CLIENT_ERRORS = (
    *(ApiError, UserError, ValidationError),
    *(QueueFullError, EngineUnavailableError, RequestTimeoutError, EngineFailedError),
)


def invalid_value(param: str, message: str, code: str = "invalid_value") -> ApiError:
    """Status 400 for a field of the request."""
    return ApiError(400, f"{param}: {message}", param, code)


def to_api_error(error: BaseException, retry_after: int) -> ApiError:
    """Maps an exception to the client's error. An unexpected exception shows nothing of its message."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        return ApiError(429, "the queue is full: try again later", code="queue_full", retry_after=retry_after)
    if isinstance(error, EngineUnavailableError):
        message = STATE_MESSAGES.get(str(error), "the server cannot answer now")
        return ApiError(503, message, code="unavailable", retry_after=retry_after)
    if isinstance(error, RequestTimeoutError):
        message = "the request did not finish within the server's --request-timeout"
        return ApiError(503, message, code="deadline", retry_after=retry_after)
    if isinstance(error, EngineFailedError):
        message = "the engine failed while it worked on this request; the request may be sent again"
        return ApiError(500, message, code="engine_error")
    if isinstance(error, UserError):
        return _from_user_error(error)
    if isinstance(error, ValidationError):
        return _from_validation_error(error)
    return ApiError(500, "internal server error", code="internal_error")


def _from_user_error(error: UserError) -> ApiError:
    """Replaces the CLI flag in an engine's message by the API field: --top-p becomes top_p."""
    message = str(error)
    if message.startswith("grammar: "):
        return invalid_value("response_format", message.removeprefix("grammar: "))
    found = FLAG.search(message)
    param = found[1].replace("-", "_") if found is not None else None
    return ApiError(400, FLAG.sub(lambda m: m[1].replace("-", "_"), message), param)


def _from_validation_error(error: ValidationError) -> ApiError:
    """Reports the first invalid field by its path, without its value."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    parts = (str(part) for part in first["loc"] if not _is_union_branch(part))
    path = ".".join(parts)[: MAX_MESSAGE_LENGTH // 4] or None
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"{path}: not supported by this server", path, "unsupported_parameter")
    if first["type"] == "missing":
        return ApiError(400, f"{path}: required", path, "missing_required_parameter")
    code = "unsupported_parameter" if "not supported" in message else "invalid_value"
    return ApiError(400, f"{path}: {message[0].lower()}{message[1:]}" if path else message, path, code)


def _is_union_branch(part: int | str) -> bool:
    """Pydantic's paths name the type of a union that it tried; clients do not need it."""
    return isinstance(part, str) and (
        part in ("str", "int", "float", "bool", "none") or any(c in part for c in "[]()") or part[:1].isupper()
    )


def add_error_handlers(app: FastAPI, retry_after: int) -> None:
    async def handle_error(request: Request, error: Exception) -> Response:
        return to_api_error(error, retry_after).response()

    async def handle_http_exception(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        messages = {404: "no such path", 405: f"{request.method} is not allowed here"}
        response = ApiError(error.status_code, messages.get(error.status_code, str(error.detail))).response()
        response.headers.update(error.headers or {})
        return response

    for error_class in CLIENT_ERRORS:
        app.add_exception_handler(error_class, handle_error)
    app.add_exception_handler(HTTPException, handle_http_exception)
