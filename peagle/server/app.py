"""The FastAPI application: routes, middleware and the OpenAPI description."""

import asyncio
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from peagle import __version__
from peagle.config import ServeSettings
from peagle.server import routes_info, routes_openai
from peagle.server.engine_client import EngineClient
from peagle.server.errors import add_error_handlers
from peagle.server.middleware import ApiKeyMiddleware, RequestLogMiddleware
from peagle.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from peagle.server.server_context import ServerContext

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


def build_app(
    engine: EngineClient,
    settings: ServeSettings,
    drafter: str | None = None,
    num_speculative_tokens: int | str | None = None,
) -> FastAPI:
    """Builds the application. It starts and stops the engine."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> Any:
        engine.start()
        loading = asyncio.ensure_future(app.state.context.load_tokenizer())
        yield
        loading.cancel()
        await engine.stop()

    app = FastAPI(title="peagle", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.router.redirect_slashes = False
    app.state.context = ServerContext(engine, settings, drafter, num_speculative_tokens)
    app.include_router(routes_openai.router)
    app.include_router(routes_info.router)
    add_error_handlers(app, settings.retry_after_s)
    if settings.api_key is not None:
        app.add_middleware(ApiKeyMiddleware, key=settings.api_key)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type", "x-request-id"],
            expose_headers=["x-request-id", "retry-after"],
        )
    app.add_middleware(RequestLogMiddleware)
    app.openapi = lambda: _build_openapi(app)  # type: ignore[method-assign]
    return app


def _build_openapi(app: FastAPI) -> dict[str, Any]:
    """Adds the schemas of the request bodies: the routes parse them without FastAPI, within limits."""
    if app.openapi_schema is None:
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
        app.openapi_schema = description
    return app.openapi_schema


def _refer_to_schema(model: type[BaseModel]) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}
