"""The routes, what stands before them, and their description.

Knows nothing about how a request is answered.
"""

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
from peagle.server import routes_about, routes_openai
from peagle.server.context import Context
from peagle.server.errors import add_handlers
from peagle.server.limits import KeyCheck, RequestLog
from peagle.server.loop import EngineLoop
from peagle.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

BODIES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def build_app(engine: EngineLoop, settings: ServeSettings, about: dict[str, Any] | None = None) -> FastAPI:
    """Starts the engine with the server and stops it with it. `about`: see `Context`."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> Any:
        engine.start()
        preparing = asyncio.ensure_future(app.state.context.prepare())
        yield
        preparing.cancel()
        await engine.stop(0.0)

    app = FastAPI(title="peagle", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.router.redirect_slashes = False
    app.state.context = Context(engine, settings, about or {"drafter": None, "k": None})
    app.include_router(routes_openai.router)
    app.include_router(routes_about.router)
    add_handlers(app, settings.retry_after_s)
    if settings.api_key is not None:
        app.add_middleware(KeyCheck, key=settings.api_key)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type", "x-request-id"],
            expose_headers=["x-request-id", "retry-after"],
        )
    app.add_middleware(RequestLog)
    app.openapi = lambda: _description(app)  # type: ignore[method-assign]
    return app


def _description(app: FastAPI) -> dict[str, Any]:
    """Bodies are read by hand (sizes and times have limits), so their schemas are added by hand too."""
    if app.openapi_schema is None:
        made = get_openapi(title=app.title, version=app.version, routes=app.routes)
        models = [(model, "validation") for model in BODIES.values()]
        _, definitions = models_json_schema(models, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
        made.setdefault("components", {})["schemas"] = {**definitions["$defs"], "Error": ERROR}
        for path, methods in made["paths"].items():
            for operation in methods.values():
                operation["responses"] = {
                    "200": {"description": "As asked."},
                    "default": {
                        "description": "What went wrong.",
                        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
                    },
                }
                if path in BODIES:
                    reference = {"$ref": f"#/components/schemas/{BODIES[path].__name__}"}
                    operation["requestBody"] = {
                        "required": True,
                        "content": {"application/json": {"schema": reference}},
                    }
        app.openapi_schema = made
    return app.openapi_schema
