"""Errors in OpenAI's format: {"error": {"message", "type", "param", "code"}}."""

import re
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse
from pydantic import ValidationError

from peagle.errors import UserError

FLAG = re.compile(r"--([a-z][a-z-]*)")
MAX_MESSAGE_LENGTH = 400
RETRY_AFTER_S = 1
QUEUE_FULL, UNREADY = "max_num_queued_reqs", "unready"  # reasons of rejections in the metrics; the first is vLLM's
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
    "draining": "the server is shutting down",
    "failed": "the engine has failed",
}


class ApiError(Exception):
    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    @property
    def body(self) -> dict[str, Any]:
        error_type = ERROR_TYPES.get(self.status, "invalid_request_error")
        message = str(self)[:MAX_MESSAGE_LENGTH]
        return {"error": {"message": message, "type": error_type, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        headers = {"retry-after": str(RETRY_AFTER_S)} if self.status in (429, 503) else {}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return JSONResponse(self.body, self.status, headers)


class QueueFullError(ApiError):
    def __init__(self) -> None:
        super().__init__(429, "the queue is full: try again later", code="queue_full")


class EngineUnavailableError(ApiError):
    """The engine takes no requests in this state."""

    def __init__(self, state: str) -> None:
        super().__init__(503, STATE_MESSAGES[state], code="unavailable")


class RequestTimeoutError(ApiError):
    def __init__(self) -> None:
        super().__init__(503, "the request did not finish within the server's --request-timeout", code="deadline")


class EngineFailedError(ApiError):
    def __init__(self) -> None:
        message = "the engine failed while it worked on this request; the request may be sent again"
        super().__init__(500, message, code="engine_error")


# Exceptions of a route that have a response in `to_api_error`. All others are unexpected.
CLIENT_ERRORS = (ApiError, UserError, ValidationError)


def invalid_value(param: str, message: str, code: str = "invalid_value") -> ApiError:
    """Status 400 for a field of the request."""
    return ApiError(400, f"{param}: {message}", param, code)


def to_api_error(error: Exception) -> ApiError:
    """Maps an exception to the client's error. An unexpected exception shows nothing of its message."""
    if isinstance(error, ApiError):
        return error
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


async def answer_http_exception(request: Request, error: Any) -> JSONResponse:
    """Answers an exception of the router."""
    messages = {404: "no such path", 405: f"{request.method} is not allowed here"}
    response = ApiError(error.status_code, messages.get(error.status_code, str(error.detail))).response()
    response.headers.update(error.headers or {})
    return response
