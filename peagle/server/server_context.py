"""`ServerContext`: the engine, tokenizer, settings and metrics that every route uses."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import Request

from peagle.config import Grammar, SamplingParams, ServeSettings
from peagle.engine.grammar import from_json_schema
from peagle.errors import UserError
from peagle.server.engine_client import EngineClient
from peagle.server.engine_messages import EngineInfo
from peagle.server.errors import ApiError, invalid_value
from peagle.server.protocol import ResponseFormat, ToolUsage
from peagle.server.request_stream import EngineUnavailableError, QueueFullError, RequestStream
from peagle.server.response_writer import OpenAIResponseWriter
from peagle.server.tokenization import ServerTokenizer
from peagle.server.tool_calls import (
    ToolCallFormat,
    ToolCallParser,
    build_forced_schema,
    get_forced_format,
    get_format,
)

if TYPE_CHECKING:
    from starlette.types import Scope

    from peagle.server.metrics import ServerMetrics

MAX_PARALLEL_GRAMMARS = 2


class ServerContext:
    def __init__(
        self,
        engine: EngineClient,
        settings: ServeSettings,
        drafter: str | None,
        num_speculative_tokens: int | str | None,
    ) -> None:
        """`drafter` and `num_speculative_tokens` are the values of the command line, for /peagle/info."""
        self.engine, self.settings = engine, settings
        self.drafter, self.num_speculative_tokens = drafter, num_speculative_tokens
        self.created = int(time.time())
        self._grammar_workers = asyncio.Semaphore(MAX_PARALLEL_GRAMMARS)

    @cached_property
    def metrics(self) -> "ServerMetrics":
        from peagle.server.metrics import ServerMetrics

        return ServerMetrics(self.settings.served_model_name)

    @property
    def info(self) -> EngineInfo:
        if self.engine.info is None:
            raise EngineUnavailableError(self.engine.state)
        return self.engine.info

    @cached_property
    def tokenizer(self) -> ServerTokenizer:
        return ServerTokenizer(Path(self.info.target_folder))

    async def load_tokenizer(self) -> None:
        """Loads the tokenizer once the engine has started, so that the first request does not wait for it."""
        await self.engine.started.wait()
        if self.engine.info is not None:
            await asyncio.to_thread(lambda: self.tokenizer)

    def check_ready(self, model: str | None) -> None:
        """Raises if the engine takes no requests, or if the request names another model."""
        if self.engine.state not in ("ready", "restarting"):
            self.metrics.observe_rejection("unready")
            raise EngineUnavailableError(self.engine.state)
        if model is not None:
            self.check_model(model)

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
        return lambda: ToolCallParser(call_format, tools.function_names)

    def start_tag_is_special_token(self, tools: ToolUsage) -> bool:
        call_format = self.tool_call_format
        special_tokens = self.tokenizer.special_tokens
        return tools.definitions is not None and call_format is not None and call_format.start_tag in special_tokens

    async def build_grammar(self, response_format: ResponseFormat | None, tools: ToolUsage) -> Grammar | None:
        """Builds and checks the grammar of a request in worker threads. The engine compiles it."""
        if response_format is None and not tools.forced:
            return None
        async with self._grammar_workers:
            if tools.forced:
                return await self._build_tool_grammar(tools)
            assert response_format is not None
            return await asyncio.to_thread(response_format.to_grammar)

    async def _build_tool_grammar(self, tools: ToolUsage) -> Grammar:
        try:
            schema = build_forced_schema(self.tool_call_format, tools.forced)
            return await asyncio.to_thread(from_json_schema, schema)
        except (UserError, RecursionError) as error:
            message = str(error) if isinstance(error, UserError) else "nested too deeply"
            raise invalid_value("tools", message.removeprefix("grammar: ")) from None

    def check_capacity(self, num_completions: int) -> None:
        """Raises if the queue is full, before any work is put into the request."""
        with self._count_rejections():
            self.engine.check_capacity(num_completions)

    def submit(self, prompts: list[list[int]], params: SamplingParams, stream: bool) -> RequestStream:
        with self._count_rejections():
            return self.engine.submit(prompts, params, lambda: self.tokenizer.new_detokenizer(params), stream)

    @contextmanager
    def _count_rejections(self) -> Iterator[None]:
        try:
            yield
        except QueueFullError:
            self.metrics.observe_rejection("max_num_queued_reqs")
            raise
        except EngineUnavailableError:
            self.metrics.observe_rejection("unready")
            raise

    def log_prompt(self, request: Request, prompt: Any) -> None:
        if self.settings.log_prompts:
            request.scope["log_fields"]["prompt"] = prompt

    def record_request(
        self,
        scope: "Scope",
        request_stream: RequestStream,
        writer: OpenAIResponseWriter,
        params: SamplingParams,
        failed: bool,
    ) -> None:
        """Updates the metrics and the log when a request has ended, finished or not."""
        now = time.perf_counter()
        finish_reasons = []
        completions = request_stream.completions
        for completion in completions:
            timing = completion.timing
            finish_reason = completion.finish_reason if completion.index in writer.finished else None
            finish_reasons.append(finish_reason or ("error" if failed else "abort"))
            self.metrics.observe_request(
                ttft_s=timing.first_token_s,
                itl_s=timing.token_gaps_s,
                e2e_s=now - timing.arrival_time,
                queue_s=timing.queue_s if timing.queue_s is not None else now - timing.arrival_time,
                num_prompt_tokens=request_stream.requests[completion.index // params.n].num_prompt_tokens,
                num_output_tokens=len(completion.token_ids),
                finish_reason=finish_reasons[-1],
                max_tokens=params.max_tokens,
            )
        ttfts = [c.timing.first_token_s for c in completions if c.timing.first_token_s is not None]
        scope["log_fields"] |= {
            "prompt_tokens": writer.num_prompt_tokens,
            "completion_tokens": sum(len(completion.token_ids) for completion in completions),
            "ttft_ms": round(min(ttfts) * 1e3, 1) if ttfts else None,
            "finish_reason": ",".join(sorted(set(finish_reasons))),
        }


def get_context(request: Request) -> ServerContext:
    context = request.app.state.context
    assert isinstance(context, ServerContext)
    return context
