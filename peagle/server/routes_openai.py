"""/v1/chat/completions and /v1/completions: a request is read, sent through the engine and answered.

Knows nothing about how the engine works.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from peagle.config import SamplingParams
from peagle.errors import UserError
from peagle.server.answers import Writer
from peagle.server.context import Context, context_of
from peagle.server.errors import ApiError, as_api_error
from peagle.server.limits import CLIENT_GONE, ClientGone, gone, read_json, unless_gone
from peagle.server.pieces import DeadlinePassed, Piece
from peagle.server.protocol import ChatRequest, CompletionRequest, Sampling, ToolUse
from peagle.server.tickets import Answer
from peagle.speculative.reference import check_prompt

router = APIRouter()
DONE = b"data: [DONE]\n\n"
NO_TOOLS = ToolUse()


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    context = context_of(request)
    asked = ChatRequest.model_validate(await read_json(request, context.settings))
    prompts = context.ready(asked.model)
    messages, tools = [message.as_template_sees_it() for message in asked.messages], asked.tool_use()
    context.tell_prompt(request, messages)
    context.check_room(asked.n or 1)
    ids = await prompts.chat(messages, tools.offered, more=asked.chat_template_kwargs)
    return await respond(request, context, asked, "chat", [ids], asked.longest, tools)


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    context = context_of(request)
    asked = CompletionRequest.model_validate(await read_json(request, context.settings))
    prompts = context.ready(asked.model)
    context.tell_prompt(request, asked.prompt)
    given = asked.prompts
    if not given:
        raise ApiError(400, "prompt: must not be empty", "prompt", "invalid_value")
    if len(given) * (asked.n or 1) > context.engine.capacity:
        raise ApiError(400, f"prompt: more than {context.engine.capacity} answers at once", "prompt", "invalid_value")
    context.check_room(len(given) * (asked.n or 1))
    ids = [await prompts.encode(one) if isinstance(one, str) else one for one in given]
    return await respond(request, context, asked, "text", ids, asked.max_tokens)


async def respond(
    request: Request,
    context: Context,
    asked: Sampling,
    kind: Literal["chat", "text"],
    ids: list[list[int]],
    max_tokens: int | None,
    tools: ToolUse = NO_TOOLS,
) -> Response:
    params = await to_params(context, asked, kind, ids, max_tokens, tools)
    stream = asked.stream is True
    writer = Writer(
        kind=kind,
        id=f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{request.scope['request_id']}",
        model=asked.model or context.settings.model,
        prompts=context.prompts,
        prompt_tokens=sum(len(one) for one in ids),
        total=len(ids) * params.n,
        alternatives=params.logprobs,
        show_tokens=asked.extra.tokens,
        skip_special=params.skip_special_tokens,
        make_reader=context.reader_of(tools),
        include_usage=stream and asked.stream_options is not None and asked.stream_options.include_usage is True,
        k=min(
            context.facts.most_drafts if (k := params.max_speculative_tokens) is None else k, context.facts.most_drafts
        ),
    )
    answer = await context.submit(ids, params, request.scope["request_id"], stream)
    outcome = "abort"
    try:
        if stream:
            # its status tells how the request fared in the queue; from the first piece on it is 200
            first = checked(await unless_gone(request.receive, answer.__anext__()))
            outcome = "stream"
            return EventStream(context, answer, writer, first, params)
        pieces = await unless_gone(request.receive, collect(answer))
        outcome = "whole"
        return JSONResponse(writer.whole(pieces))
    except ClientGone:
        return Response(status_code=CLIENT_GONE)
    except Exception as error:
        outcome = "error"
        if isinstance(error, DeadlinePassed) and all(t.first_s is None for t in answer.timings):
            context.metrics.observe_refusal("deadline")
        raise
    finally:
        if outcome != "stream":
            await answer.aclose()
            context.ended(request.scope, answer, writer, params, outcome)


async def to_params(
    context: Context,
    asked: Sampling,
    kind: Literal["chat", "text"],
    ids: list[list[int]],
    max_tokens: int | None,
    tools: ToolUse,
) -> SamplingParams:
    """Refuses what cannot fit: an answer that is asked for is given whole or not at all."""
    most, where = context.facts.max_model_len, "messages" if kind == "chat" else "prompt"
    longest = max(len(one) for one in ids)
    if longest >= most or (max_tokens is not None and longest + max_tokens > most):
        wanted = f"{longest} tokens of prompt" + (f" and {max_tokens} of answer" if max_tokens is not None else "")
        param = where if longest >= most or max_tokens is None else "max_tokens"
        message = f"{param}: this model's context has {most} tokens, but {wanted} are asked for"
        raise ApiError(400, message, param, "context_length_exceeded")
    for one in ids:
        try:
            check_prompt(one, context.facts.vocab_size, most)
        except UserError as error:
            raise ApiError(400, f"{where}: {error}", where, "invalid_value") from None
    room = most - longest
    if max_tokens is None:
        max_tokens = room if kind == "chat" else min(context.settings.completion_tokens, room)
    grammar = await context.grammar(asked.response_format, tools)
    params = asked.to_params(context.settings, max_tokens, context.facts.most_drafts, grammar)
    return replace(params, skip_special_tokens=False) if context.marks_calls_by_special_tokens(tools) else params


async def collect(answer: Answer) -> list[Piece]:
    return [checked(piece) async for piece in answer]


def checked(piece: Piece) -> Piece:
    """An answer that cannot go on as its format wants is no answer."""
    if piece.finish_reason == "error":
        reason = piece.output.stop_reason if piece.output is not None else None
        message = f"response_format: the answer cannot go on ({reason})"
        raise ApiError(400, message, "response_format", "cannot_be_followed")
    return piece


class EventStream(Response):
    """Server-sent events. When the client leaves, or the server must stop, the request is aborted at once."""

    def __init__(self, context: Context, answer: Answer, writer: Writer, first: Piece, params: SamplingParams) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self.context, self.answer, self.writer, self.first, self.params = context, answer, writer, first, params
        self.outcome = "abort"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        watch, work = asyncio.ensure_future(gone(receive)), asyncio.ensure_future(self._send_all(send))
        try:
            # who reads so slowly that the answer lies here beyond its time is left, too
            patience = self.context.settings.deadline_s
            await asyncio.wait({watch, work}, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (watch, work):
                task.cancel()
            await asyncio.gather(watch, work, return_exceptions=True)
            await self.answer.aclose()
            self.context.ended(scope, self.answer, self.writer, self.params, self.outcome)

    async def _send_all(self, send: Send) -> None:
        async for event in self._events():
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": DONE})

    async def _events(self) -> AsyncIterator[bytes]:
        for chunk in self.writer.opening():
            yield _event(chunk)
        yield _event(self.writer.chunk(self.first))
        try:
            async for piece in self.answer:
                yield _event(self.writer.chunk(checked(piece)))
            for chunk in self.writer.closing():
                yield _event(chunk)
            self.outcome = "whole"
        except Exception as error:  # the status is out already: the stream itself has to tell
            self.outcome = "error"
            yield _event(as_api_error(error, self.context.settings.retry_after_s).body)


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
