"""The routes: chat and text completions, models, tokenization, health, version, metrics, and the playground at /."""

import asyncio
from collections.abc import Sequence
from functools import partial
from importlib.resources import files
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from starlette.types import Receive, Scope, Send

from peagle import __version__
from peagle.config import Grammar, SamplingParams, check_prompt
from peagle.errors import UserError
from peagle.server.errors import RETRY_AFTER_S, RequestTimeoutError, invalid_value, to_api_error
from peagle.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    SamplingRequest,
    TokenizeRequest,
    ToolUsage,
)
from peagle.server.request_body import CLIENT_DISCONNECTED, ClientDisconnected, wait_for_disconnect
from peagle.server.request_stream import OutputDelta, RequestStream
from peagle.server.response_writer import OpenAIResponseWriter, encode_event
from peagle.server.server_context import ServerContext, get_context

router = APIRouter()
LAST_EVENTS_TIMEOUT_S = 5.0  # to send the error of a request that has reached its deadline
DONE_EVENT = b"data: [DONE]\n\n"
Kind = Literal["chat", "text"]
Context = Annotated[ServerContext, Depends(get_context)]
PAGE_POLICY = "frame-ancestors 'none'"  # the one part of the page's policy that its <meta> may not hold


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    context = await get_context(request)
    body = await context.read_request(request, ChatRequest)
    return await respond(request, context, body, "chat", body.n or 1)


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    context = await get_context(request)
    body = await context.read_request(request, CompletionRequest)
    if not body.prompts:
        raise invalid_value("prompt", "must not be empty")
    num_completions = len(body.prompts) * (body.n or 1)
    if num_completions > context.engine.max_completions:
        raise invalid_value("prompt", f"more than {context.engine.max_completions} completions at once")
    return await respond(request, context, body, "text", num_completions)


async def respond(
    request: Request, context: ServerContext, body: SamplingRequest, kind: Kind, num_completions: int
) -> Response:
    """Sends a request through the engine and returns the response, streamed or whole."""
    deadline = asyncio.get_running_loop().time() + context.settings.request_timeout_s
    with context.engine.reserve(num_completions):
        try:
            async with asyncio.timeout_at(deadline):
                prompts, tools = await context.run(request, partial(tokenize_prompts, request, context, body))
                grammar = await context.build_grammar(request, body.response_format, tools)
                build_params = partial(build_sampling_params, context, body, prompts, grammar, tools)
                params = await context.run(request, build_params)
        except TimeoutError:
            raise RequestTimeoutError() from None
        stream = body.stream is True
        writer = OpenAIResponseWriter(
            kind=kind,
            id=f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{request.scope['request_id']}",
            model=body.model or context.settings.served_model_name,
            tokenizer=context.tokenizer,
            num_prompt_tokens=sum(len(prompt) for prompt in prompts),
            num_completions=len(prompts) * params.n,
            params=params,
            include_tokens=body.options.tokens,
            include_usage=body.stream_options is not None and body.stream_options.include_usage is True,
            max_speculative_tokens=context.info.max_speculative_tokens,
            new_tool_parser=context.get_tool_parser_factory(tools),
        )
        new_detokenizer = partial(context.tokenizer.new_detokenizer, params)
        request_stream = context.engine.submit(prompts, params, new_detokenizer, stream, deadline)
    streaming = failed = False
    try:
        request_stream.client_watcher = asyncio.ensure_future(fail_on_disconnect(request.receive, request_stream))
        if stream:
            # The first delta decides the status: a request may still fail in the queue.
            first = await anext(request_stream)
            streaming = True
            return EventStreamResponse(context, request_stream, writer, first)
        return JSONResponse(writer.whole_response([delta async for delta in request_stream]))
    except ClientDisconnected:
        return Response(status_code=CLIENT_DISCONNECTED)
    except Exception:
        failed = True
        raise
    finally:
        if not streaming:  # otherwise the response does it when the stream ends
            await request_stream.aclose()
            context.record_request(request.scope, request_stream, writer, failed)


def tokenize_prompts(
    request: Request, context: ServerContext, body: SamplingRequest
) -> tuple[list[list[int]], ToolUsage]:
    """Renders, tokenizes and checks the prompts. Refuses a `max_tokens` that does not fit: it is never cut."""
    tools, max_model_len, max_tokens = ToolUsage(), context.info.max_model_len, body.get_max_tokens()
    if isinstance(body, ChatRequest):
        messages, tools = [message.to_template_input() for message in body.messages], body.get_tool_usage()
        context.log_prompt(request, messages)
        prompts: Sequence[str | list[int]] = [
            context.tokenizer.render_chat(messages, tools.definitions, template_kwargs=body.chat_template_kwargs)
        ]
    else:
        assert isinstance(body, CompletionRequest)
        context.log_prompt(request, body.prompt)
        prompts = body.prompts
    field, is_text = ("messages", False) if isinstance(body, ChatRequest) else ("prompt", True)
    encoded = []
    for prompt in prompts:
        if isinstance(prompt, str):
            prompt = context.encode(field, prompt, add_special_tokens=is_text)
        too_long = len(prompt) >= max_model_len
        if too_long or (max_tokens is not None and len(prompt) + max_tokens > max_model_len):
            wanted = f"{len(prompt)} prompt tokens" + (f" and max_tokens {max_tokens}" if max_tokens else "")
            message = f"the model's context has {max_model_len} tokens, less than {wanted}"
            raise invalid_value(field if too_long else "max_tokens", message, "context_length_exceeded")
        try:
            check_prompt(prompt, context.info.vocab_size, max_model_len)
        except UserError as error:
            raise invalid_value(field, str(error)) from None
        encoded.append(prompt)
    return encoded, tools


def build_sampling_params(
    context: ServerContext, body: SamplingRequest, prompts: list[list[int]], grammar: Grammar | None, tools: ToolUsage
) -> SamplingParams:
    max_tokens = body.get_max_tokens()
    if max_tokens is None:
        max_tokens = context.info.max_model_len - max(map(len, prompts))
        if isinstance(body, CompletionRequest):
            max_tokens = min(max_tokens, context.settings.default_completion_tokens)
    call_format = context.tool_call_format if tools.definitions is not None else None
    has_special_tag = call_format is not None and call_format.start_tag in context.tokenizer.special_tokens
    skip_special_tokens = False if has_special_tag else body.skip_special_tokens
    options = {"grammar": grammar, "skip_special_tokens": skip_special_tokens}
    params = body.to_sampling_params(context.settings, max_tokens, context.info.max_speculative_tokens, **options)
    if params.bad_words:
        params = params.tokenize_bad_words(partial(context.tokenizer.encode, add_special_tokens=False))
    return params


async def fail_on_disconnect(receive: Receive, request_stream: RequestStream) -> None:
    await wait_for_disconnect(receive)
    request_stream.fail(ClientDisconnected())


class EventStreamResponse(Response):
    """Server-sent events. The request is aborted as soon as the client disconnects or the server stops."""

    def __init__(
        self, context: ServerContext, request_stream: RequestStream, writer: OpenAIResponseWriter, first: OutputDelta
    ) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self.context, self.request_stream, self.writer, self.first = context, request_stream, writer, first
        self.failed = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            # Also ends a response that the client reads too slowly.
            async with asyncio.timeout_at(self.request_stream.deadline + LAST_EVENTS_TIMEOUT_S):
                await self._send_events(send)
        except (ClientDisconnected, TimeoutError):
            pass
        finally:
            await self.request_stream.aclose()
            self.context.record_request(scope, self.request_stream, self.writer, self.failed)

    async def _send_events(self, send: Send) -> None:
        """Sends every delta in one write, the last one with the end of the response."""
        events = self.writer.first_events() + self.writer.event(self.first)
        try:
            while self.request_stream.num_unread:
                await send({"type": "http.response.body", "body": events, "more_body": True})
                events = self.writer.event(await anext(self.request_stream))
            events += self.writer.last_events()
        except ClientDisconnected:
            raise
        except Exception as error:  # the status has been sent: the stream itself carries the error
            self.failed = True
            events = encode_event(to_api_error(error).body)
        await send({"type": "http.response.body", "body": events + DONE_EVENT})


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
