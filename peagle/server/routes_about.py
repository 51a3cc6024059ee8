"""Everything but answers: models, tokens, health, version, metrics, and the page at /.

Knows nothing about sampling.
"""

from importlib.resources import files
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response

from peagle import __version__
from peagle.server.context import Context, context_of
from peagle.server.errors import ApiError
from peagle.server.limits import read_json
from peagle.server.protocol import DetokenizeRequest, TokenizeRequest

router = APIRouter()
PAGE_POLICY = "frame-ancestors 'none'"  # the rest of it stands in the page; this part may not


@router.get("/v1/models")
async def models(request: Request) -> JSONResponse:
    return JSONResponse({"object": "list", "data": [_model(context_of(request))]})


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> JSONResponse:
    context = context_of(request)
    if name != context.settings.model:
        raise ApiError(404, f"model: this server has {context.settings.model!r} only", "model", "model_not_found")
    return JSONResponse(_model(context))


def _model(context: Context) -> dict[str, Any]:
    facts = context.engine.facts
    return {
        "id": context.settings.model,
        "object": "model",
        "created": context.created,
        "owned_by": "peagle",
        "root": str(facts.folder) if facts is not None else context.settings.model,  # vllm bench's tokenizer
        "max_model_len": facts.max_model_len if facts is not None else None,
    }


@router.post("/tokenize")
async def tokenize(request: Request) -> JSONResponse:
    context = context_of(request)
    asked = TokenizeRequest.model_validate(await read_json(request, context.settings))
    prompts = context.ready(asked.model)
    if (asked.prompt is None) == (asked.messages is None):
        raise ApiError(400, "prompt: give it or messages, and not both", "prompt", "invalid_value")
    if asked.prompt is not None:
        ids = await prompts.encode(asked.prompt, asked.add_special_tokens is not False)
    else:
        messages = [message.as_template_sees_it() for message in asked.messages or ()]
        tools = [tool.model_dump(exclude_none=True) for tool in asked.tools] if asked.tools else None
        begin = asked.add_generation_prompt is not False
        ids = await prompts.chat(messages, tools, begin, asked.chat_template_kwargs)
    found: dict[str, Any] = {"count": len(ids), "max_model_len": context.facts.max_model_len, "tokens": ids}
    if asked.return_token_strs:
        found["token_strs"] = prompts.tokenizer.convert_ids_to_tokens(ids)
    return JSONResponse(found)


@router.post("/detokenize")
async def detokenize(request: Request) -> JSONResponse:
    context = context_of(request)
    asked = DetokenizeRequest.model_validate(await read_json(request, context.settings))
    prompts = context.ready(asked.model)
    if any(token >= context.facts.vocab_size for token in asked.tokens):
        message = f"tokens: outside the vocabulary (0 to {context.facts.vocab_size - 1})"
        raise ApiError(400, message, "tokens", "invalid_value")
    return JSONResponse({"prompt": prompts.tokenizer.decode(asked.tokens)})


@router.get("/health")
@router.get("/health/ready")
async def ready(request: Request) -> JSONResponse:
    """Whether requests are taken."""
    return _health(context_of(request), ("ready",))


@router.get("/health/live")
async def live(request: Request) -> JSONResponse:
    """Whether there is any sense in waiting: only an engine that was given up needs a new process."""
    return _health(context_of(request), ("starting", "ready", "restarting", "draining"))


def _health(context: Context, good: tuple[str, ...]) -> JSONResponse:
    engine, stats = context.engine, context.engine.stats()
    body = {
        "status": engine.state,
        "restarts": stats.restarts,
        "last_error": engine.last_error,
        "running": stats.running,
        "waiting": stats.waiting,
    }
    headers = {} if engine.state in good else {"retry-after": str(context.settings.retry_after_s)}
    return JSONResponse(body, 200 if engine.state in good else 503, headers)


@router.get("/version")
async def version() -> JSONResponse:
    return JSONResponse({"version": __version__})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    context = context_of(request)
    data, kind = context.metrics.render(context.engine.stats())
    return Response(data, headers={"content-type": kind})


@router.get("/peagle/info")
async def info(request: Request) -> JSONResponse:
    context = context_of(request)
    facts = context.facts
    known = {
        **context.about,
        "model": context.settings.model,
        "method": facts.method,
        "max_k": facts.most_drafts,
        "max_model_len": facts.max_model_len,
        "version": __version__,
    }
    return JSONResponse(known)


@router.get("/", include_in_schema=False)
async def page() -> HTMLResponse:
    """The playground: one file of the package, whatever the path says."""
    text = files("peagle.server").joinpath("static/index.html").read_text(encoding="utf-8")
    return HTMLResponse(text, headers={"content-security-policy": PAGE_POLICY})
