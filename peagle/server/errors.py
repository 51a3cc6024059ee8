"""Everything that goes wrong, in OpenAI's shape: {"error": {"message", "type", "param", "code"}}.

Knows the exceptions of this package and of the framework, and nothing about what causes them.
"""

import re
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from peagle.errors import UserError
from peagle.server.pieces import DeadlinePassed, EngineFailed, Overloaded, Unavailable

FLAG = re.compile(r"--([a-z][a-z-]*)")
LONGEST_MESSAGE = 400
TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}
WHY_NOT = {
    "starting": "the model is still being loaded",
    "restarting": "the engine is being restarted",
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
        kind = TYPES.get(self.status, "invalid_request_error")
        message = str(self)[:LONGEST_MESSAGE]
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        headers = {"retry-after": str(self.retry_after)} if self.retry_after is not None else {}
        return {**headers, "www-authenticate": "Bearer"} if self.status == 401 else headers

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, self.headers)


def as_api_error(error: BaseException, retry_after: int) -> ApiError:
    """What a client is told. Nothing of an unforeseen error but that it happened."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Overloaded):
        return ApiError(429, "the queue is full: try again later", code="queue_full", retry_after=retry_after)
    if isinstance(error, Unavailable):
        why = WHY_NOT.get(str(error), "the server cannot answer now")
        return ApiError(503, why, code="unavailable", retry_after=retry_after)
    if isinstance(error, DeadlinePassed):
        message = "the answer was not ready before the server's deadline"
        return ApiError(503, message, code="deadline", retry_after=retry_after)
    if isinstance(error, EngineFailed):
        message = "the engine failed while it worked on this request; it may be sent again"
        return ApiError(500, message, code="engine_error")
    if isinstance(error, UserError):
        return from_user_error(error)
    if isinstance(error, ValidationError):
        return from_validation(error)
    return ApiError(500, "something went wrong inside the server", code="internal_error")


def from_user_error(error: UserError) -> ApiError:
    """The engine's own complaint; it names a flag, which is the field's name with other dashes."""
    message = str(error)
    if message.startswith("grammar: "):
        return ApiError(400, message.replace("grammar", "response_format", 1), "response_format", "invalid_value")
    found = FLAG.search(message)
    param = found[1].replace("-", "_") if found is not None else None
    return ApiError(400, FLAG.sub(lambda m: m[1].replace("-", "_"), message), param)


def from_validation(error: ValidationError) -> ApiError:
    """The first thing that is wrong, by the path to it. What was sent is not repeated."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    path = ".".join(str(part) for part in first["loc"] if not _is_branch(part))[: LONGEST_MESSAGE // 4] or None
    kind, said = first["type"], first["msg"].removeprefix("Value error, ")
    if kind == "extra_forbidden":
        return ApiError(400, f"{path}: not supported by this server", path, "unsupported_parameter")
    if kind == "missing":
        return ApiError(400, f"{path}: required", path, "missing_required_parameter")
    code = "unsupported_parameter" if "not supported" in said else "invalid_value"
    return ApiError(400, f"{path}: {said[0].lower()}{said[1:]}" if path else said, path, code)


def _is_branch(part: int | str) -> bool:
    """Which of a union's types was tried is our affair."""
    return isinstance(part, str) and (
        part in ("str", "int", "float", "bool", "none") or any(c in part for c in "[]()") or part[:1].isupper()
    )


def add_handlers(app: FastAPI, retry_after: int) -> None:
    async def known(request: Request, error: Exception) -> Response:
        return as_api_error(error, retry_after).response()

    async def framework(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        messages = {404: "no such path", 405: f"{request.method} is not allowed here"}
        made = ApiError(error.status_code, messages.get(error.status_code, str(error.detail)))
        response = made.response()
        response.headers.update(error.headers or {})
        return response

    for kind in (ApiError, Overloaded, Unavailable, DeadlinePassed, EngineFailed, UserError, ValidationError):
        app.add_exception_handler(kind, known)
    app.add_exception_handler(HTTPException, framework)
