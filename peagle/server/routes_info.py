"""Models, tokenization, health, version, metrics, and the playground at /."""

from functools import partial
from importlib.resources import files
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response

from peagle import __version__
from peagle.server.errors import RETRY_AFTER_S, invalid_value
from peagle.server.protocol import DetokenizeRequest, TokenizeRequest
from peagle.server.server_context import ServerContext, get_context

router = APIRouter()
Context = Annotated[ServerContext, Depends(get_context)]
PAGE_POLICY = "frame-ancestors 'none'"  # the one part of the page's policy that its <meta> may not hold


@router.get("/v1/models")
async def list_models(context: Context) -> JSONResponse:
    return JSONResponse({"object": "list", "data": [_describe_model(context)]})


@router.get("/v1/models/{name:path}")
async def get_model(context: Context, name: str) -> JSONResponse:
    context.check_model(name)
    return JSONResponse(_describe_model(context))


def _describe_model(context: ServerContext) -> dict[str, Any]:
    name, info = context.settings.served_model_name, context.engine.info
    return {
        "id": name,
        "object": "model",
        "created": context.created,
        "owned_by": "peagle",
        "root": str(info.target_folder) if info is not None else name,  # `vllm bench serve` loads its tokenizer
        "max_model_len": info.max_model_len if info is not None else None,
    }


@router.post("/tokenize")
async def tokenize(request: Request, context: Context) -> Response:
    body = await context.read_request(request, TokenizeRequest)
    return Response(await context.run(request, partial(_tokenize, context, body)), media_type="application/json")


def _tokenize(context: ServerContext, body: TokenizeRequest) -> bytes:
    if (body.prompt is None) == (body.messages is None):
        raise invalid_value("prompt", "give either prompt or messages")
    if body.prompt is not None:
        token_ids = context.encode("prompt", body.prompt, body.add_special_tokens is not False)
    else:
        messages = [message.to_template_input() for message in body.messages or ()]
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools] if body.tools else None
        add_generation_prompt = body.add_generation_prompt is not False
        text = context.tokenizer.render_chat(messages, tools, add_generation_prompt, body.chat_template_kwargs)
        token_ids = context.encode("messages", text, add_special_tokens=False)
    response = {"count": len(token_ids), "max_model_len": context.info.max_model_len, "tokens": token_ids}
    if body.return_token_strs:
        response["token_strs"] = context.tokenizer.tokenizer.convert_ids_to_tokens(token_ids)
    return msgspec.json.encode(response)


@router.post("/detokenize")
async def detokenize(request: Request, context: Context) -> JSONResponse:
    body = await context.read_request(request, DetokenizeRequest)
    vocab_size = context.info.vocab_size
    if max(body.tokens, default=0) >= vocab_size:
        raise invalid_value("tokens", f"outside the vocabulary (0 to {vocab_size - 1})")
    text = await context.run(request, partial(context.tokenizer.tokenizer.decode, body.tokens))
    return JSONResponse({"prompt": text})


@router.get("/health")
@router.get("/health/ready")
async def ready(context: Context) -> JSONResponse:
    """Status 200 if the server takes requests."""
    return _describe_health(context, ("ready",))


@router.get("/health/live")
async def live(context: Context) -> JSONResponse:
    """Status 200 unless the engine has failed for good and the process must be replaced."""
    return _describe_health(context, ("starting", "ready", "restarting", "draining"))


def _describe_health(context: ServerContext, healthy_states: tuple[str, ...]) -> JSONResponse:
    engine, stats = context.engine, context.engine.stats
    body = {
        "status": engine.state,
        "restarts": stats.num_restarts,
        "last_error": engine.last_error,
        "running": stats.num_requests_running,
        "waiting": stats.num_requests_waiting,
    }
    healthy = engine.state in healthy_states
    headers = {} if healthy else {"retry-after": str(RETRY_AFTER_S)}
    return JSONResponse(body, 200 if healthy else 503, headers)


@router.get("/version")
async def version() -> JSONResponse:
    return JSONResponse({"version": __version__})


@router.get("/metrics")
async def metrics(context: Context) -> Response:
    data, content_type = context.metrics.render(context.engine.stats)
    return Response(data, headers={"content-type": content_type})


@router.get("/peagle/info")
async def info(context: Context) -> JSONResponse:
    return JSONResponse(
        {
            "model": context.settings.served_model_name,
            "drafter": context.drafter,
            "method": context.info.method,
            "num_speculative_tokens": context.num_speculative_tokens,
            "max_speculative_tokens": context.info.max_speculative_tokens,
            "max_model_len": context.info.max_model_len,
            "version": __version__,
        }
    )


@router.get("/", include_in_schema=False)
async def playground() -> HTMLResponse:
    text = files("peagle.server").joinpath("static/index.html").read_text(encoding="utf-8")
    return HTMLResponse(text, headers={"content-security-policy": PAGE_POLICY})
