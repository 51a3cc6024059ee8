"""`ServerContext`: the engine, tokenizer, settings and metrics that every route uses."""

import asyncio
import threading
import time
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel
from starlette.types import Scope

from peagle.config import Grammar
from peagle.config.sampling import MAX_BAD_WORDS
from peagle.engine.grammar import check_grammar, is_checked, json_schema_grammar
from peagle.errors import UserError
from peagle.server.engine_client import EngineClient
from peagle.server.engine_messages import EngineInfo
from peagle.server.errors import QUEUE_FULL, ApiError, EngineUnavailableError, QueueFullError, invalid_value
from peagle.server.metrics import ServerMetrics
from peagle.server.protocol import ResponseFormat, ToolUsage
from peagle.server.request_body import parse_json, read_body, run_while_connected
from peagle.server.request_stream import RequestStream
from peagle.server.response_writer import OpenAIResponseWriter
from peagle.server.tokenization import ServerTokenizer
from peagle.server.tool_calls import ToolCallFormat, ToolCallParser, build_forced_schema, get_forced_format, get_format
from peagle.server.work_pool import WorkPool

# Work is measured in characters to tokenize; parsing JSON is about 16 times as fast.
MAX_INLINE_WORK = 4 << 10
LARGE_WORK = 128 << 10
PARSING_SPEED = 16

T = TypeVar("T")
Model = TypeVar("Model", bound=BaseModel)


class ServerContext:
    def __init__(self, engine: EngineClient, drafter: str | None, num_speculative_tokens: int | str | None) -> None:
        """`drafter` and `num_speculative_tokens` are the values of the command line, for /peagle/info."""
        self.engine, self.settings = engine, engine.settings
        self.drafter, self.num_speculative_tokens = drafter, num_speculative_tokens
        self.created, self.metrics = int(time.time()), ServerMetrics(engine.settings.served_model_name)
        engine.on_rejection = self.metrics.observe_rejection
        # Large requests have threads of their own, so that the others do not wait for them.
        self._pool, self._large_pool, self._grammar_pool = WorkPool(2), WorkPool(1), WorkPool(2)

    @property
    def info(self) -> EngineInfo:
        if self.engine.info is None:
            raise EngineUnavailableError(self.engine.state)
        return self.engine.info

    @cached_property
    def tokenizer(self) -> ServerTokenizer:
        return ServerTokenizer(Path(self.info.target_folder))

    async def load_tokenizer(self, target_folder: Path) -> None:
        """Loads and checks the tokenizer while the engine starts. Raises UserError if it is broken."""
        tokenizer = await asyncio.to_thread(ServerTokenizer, target_folder)
        tokenizer.check_chat_template()
        self.tokenizer = tokenizer

    async def read_request(self, request: Request, model: type[Model]) -> Model:
        """Reads, parses and validates the body of a request."""
        data = await read_body(request, self.settings)
        self.engine.check_state()
        request.state.work = len(data) // PARSING_SPEED
        body = await self.run(request, partial(self._parse, data, model))
        request.state.work = len(data)  # of tokenization
        return body

    def _parse(self, data: bytes, model: type[Model]) -> Model:
        settings, info, body = self.settings, self.info, parse_json(data, self.settings.max_body_bytes)
        limits = {
            "prompt": info.max_model_len * self.engine.max_completions,
            "tokens": info.max_model_len,
            "messages": settings.max_messages,
            "tools": settings.max_tools,
            "stop": settings.max_stop_strings,
            "stop_token_ids": settings.max_stop_token_ids,
            "logit_bias": info.vocab_size,
            "allowed_token_ids": info.vocab_size,
            "bad_words": MAX_BAD_WORDS,
            "chat_template_kwargs": settings.max_template_kwargs,
        }
        for name, limit in limits.items():
            value = body.get(name)
            if isinstance(value, list | dict) and len(value) > limit:
                raise invalid_value(name, f"at most {limit} items, not {len(value)}")
        if isinstance(body.get("model"), str):
            self.check_model(body["model"])
        return model.model_validate(body)

    async def run(self, request: Request, function: Callable[[], T]) -> T:
        """Runs a function in the event loop if it has little work to do, else in a thread.

        Raises ClientDisconnected if the client leaves meanwhile. What it waits for is then cancelled.
        """
        if request.state.work <= MAX_INLINE_WORK:
            return function()
        pool = self._pool if request.state.work <= LARGE_WORK else self._large_pool
        return await self._run_in_pool(pool, request, function)

    async def _run_in_pool(self, pool: WorkPool, request: Request, function: Callable[[], T]) -> T:
        if pool.num_waiting > self.engine.max_completions:
            self.metrics.observe_rejection(QUEUE_FULL)
            raise QueueFullError()
        client = request.client.host if request.client is not None else ""
        return await run_while_connected(request.receive, pool.run(client, function))

    def encode(self, field: str, text: str, add_special_tokens: bool) -> list[int]:
        """Tokenizes a text. One that is certainly too long for the context is refused before."""
        max_model_len = self.info.max_model_len
        if self.tokenizer.count_min_tokens(text) > max_model_len:
            message = f"the model's context has {max_model_len} tokens, too few for {len(text)} characters"
            raise invalid_value(field, message, "context_length_exceeded")
        return self.tokenizer.encode(text, add_special_tokens)

    def check_model(self, model: str) -> None:
        if model != self.settings.served_model_name:
            message = f"model: this server has {self.settings.served_model_name!r} only"
            raise ApiError(404, message, "model", "model_not_found")

    @cached_property
    def tool_call_format(self) -> ToolCallFormat | None:
        """None: unknown, tool calls stay text."""
        return get_format(self.tokenizer.chat_template, self.settings.tool_call_parser)

    def get_tool_parser_factory(self, tools: ToolUsage) -> Callable[[], ToolCallParser] | None:
        call_format = get_forced_format(self.tool_call_format) if tools.forced else self.tool_call_format
        if call_format is None or tools.definitions is None:
            return None
        return partial(ToolCallParser, call_format, [tool["function"]["name"] for tool in tools.definitions])

    async def build_grammar(
        self, request: Request, response_format: ResponseFormat | None, tools: ToolUsage
    ) -> Grammar | None:
        """Builds and checks the grammar of a request. The engine compiles it."""
        if response_format is None and not tools.forced:
            return None

        def build() -> Grammar | None:
            if tools.forced:
                return json_schema_grammar(build_forced_schema(self.tool_call_format, tools.forced))
            schema = response_format.get_schema() if response_format is not None else None
            return None if schema is None else json_schema_grammar(schema)

        cancelled = threading.Event()
        try:
            grammar = await self.run(request, build)
            if grammar is None or is_checked(grammar):
                return grammar and check_grammar(grammar)
            return await self._run_in_pool(self._grammar_pool, request, partial(check_grammar, grammar, cancelled))
        except (UserError, RecursionError) as error:
            if not tools.forced:
                raise
            message = str(error) if isinstance(error, UserError) else "nested too deeply"
            raise invalid_value("tools", message.removeprefix("grammar: ")) from None
        finally:
            cancelled.set()

    def log_prompt(self, request: Request, prompt: Any) -> None:
        if self.settings.log_prompts:
            request.scope["log_fields"]["prompt"] = prompt

    def record_request(
        self, scope: Scope, request_stream: RequestStream, writer: OpenAIResponseWriter, failed: bool
    ) -> None:
        """Updates the metrics and the log when a request has ended, finished or not."""
        now = time.perf_counter()
        finish_reasons = []
        completions = [(c, request) for request in request_stream.requests for c in request.completions]
        for c, request in completions:
            finish_reason = c.finish_reason if c.index in writer.finished else None
            finish_reasons.append(finish_reason or ("error" if failed else "abort"))
            elapsed_s, max_tokens = now - c.arrival_time, writer.params.max_tokens
            self.metrics.observe_request(c, elapsed_s, request.num_prompt_tokens, finish_reasons[-1], max_tokens)
        ttfts = [c.first_token_s for c, _ in completions if c.first_token_s is not None]
        scope["log_fields"] |= {
            "prompt_tokens": writer.num_prompt_tokens,
            "completion_tokens": sum(len(c.token_ids) for c, _ in completions),
            "ttft_ms": round(min(ttfts) * 1e3, 1) if ttfts else None,
            "finish_reason": ",".join(sorted(set(finish_reasons))),
        }


async def get_context(request: Request) -> ServerContext:  # FastAPI would call a plain function in a thread
    context: ServerContext = request.app.state.context
    return context
