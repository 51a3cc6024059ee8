"""What every route needs: the engine, its texts, the settings, the metrics.

Knows nothing about what is asked.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

from fastapi import Request

from peagle.config import Grammar, SamplingParams, ServeSettings
from peagle.engine.grammar import from_json_schema
from peagle.errors import UserError
from peagle.server.answers import Writer
from peagle.server.errors import ApiError
from peagle.server.loop import EngineFacts, EngineLoop
from peagle.server.pieces import Overloaded, Unavailable
from peagle.server.prompts import Prompts
from peagle.server.protocol import ResponseFormat, ToolUse, grammar_of
from peagle.server.tickets import Answer
from peagle.server.tools import Form, ToolReader, forced, forced_schema, form_of

if TYPE_CHECKING:
    from starlette.types import Scope

    from peagle.server.metrics import Metrics

GRAMMARS_AT_ONCE = 2


class Context:
    def __init__(self, engine: EngineLoop, settings: ServeSettings, about: dict[str, Any]) -> None:
        """`about` is what the owner knows of the pair: names of target and drafter, and K as it was asked for."""
        self.engine, self.settings, self.about = engine, settings, about
        self.created = int(time.time())
        self._grammars = asyncio.Semaphore(GRAMMARS_AT_ONCE)

    @cached_property
    def metrics(self) -> "Metrics":
        from peagle.server.metrics import Metrics

        return Metrics(self.settings.model)

    @property
    def facts(self) -> EngineFacts:
        if self.engine.facts is None:
            raise Unavailable(self.engine.state)
        return self.engine.facts

    @cached_property
    def prompts(self) -> Prompts:
        return Prompts(self.facts.folder)

    async def prepare(self) -> None:
        """Loads what the first request would have to wait for."""
        await self.engine.began.wait()
        if self.engine.facts is not None:
            await asyncio.to_thread(lambda: self.prompts)

    def ready(self, model: str | None) -> Prompts:
        """The texts, if there is an engine that takes requests, and it is the one that is asked for."""
        if self.engine.state not in ("ready", "restarting"):
            self.metrics.observe_refusal("unready")
            raise Unavailable(self.engine.state)
        if model is not None and model != self.settings.model:
            message = f"model: this server has {self.settings.model!r} only"
            raise ApiError(404, message, "model", "model_not_found")
        return self.prompts

    @cached_property
    def tool_form(self) -> Form | None:
        """How the model writes calls; None: not known, and they stay text."""
        return form_of(self.prompts.template, self.settings.tool_parser)

    def reader_of(self, tools: ToolUse) -> Callable[[], ToolReader] | None:
        """Makes readers of answers in which there may be calls."""
        form = forced(self.tool_form) if tools.forced else self.tool_form
        if form is None or tools.offered is None:
            return None
        return lambda: ToolReader(form, tools.names)

    def marks_calls_by_special_tokens(self, tools: ToolUse) -> bool:
        form = self.tool_form
        return tools.offered is not None and form is not None and form.opens in self.prompts.special

    async def grammar(self, wanted: ResponseFormat | None, tools: ToolUse) -> Grammar | None:
        """Tried and compiled beside the engine, few at a time: others are being answered meanwhile."""
        if wanted is None and not tools.forced:
            return None
        async with self._grammars:
            try:
                if tools.forced:
                    schema = forced_schema(self.tool_form, tools.forced)
                    made: Grammar | None = await asyncio.to_thread(from_json_schema, schema)
                else:
                    assert wanted is not None
                    made = await asyncio.to_thread(grammar_of, wanted)
                if made is not None:
                    await self.engine.prepare(made)
            except (UserError, RecursionError) as error:
                if not tools.forced:
                    raise
                said = str(error) if isinstance(error, UserError) else "grammar: nested too deeply"
                message = said.replace("grammar", "tools", 1)
                raise ApiError(400, message, "tools", "invalid_value") from None
            return made

    def check_room(self, answers: int) -> None:
        """Refuses what there is no room for before work is put into it; `submit` looks again."""
        with self._counted_refusals():
            self.engine.check_room(answers)

    async def submit(self, ids: list[list[int]], params: SamplingParams, request_id: str, stream: bool) -> Answer:
        with self._counted_refusals():
            return await self.engine.submit_all(ids, params, request_id, stream)

    @contextmanager
    def _counted_refusals(self) -> Iterator[None]:
        try:
            yield
        except Overloaded:
            self.metrics.observe_refusal("max_num_queued_reqs")
            raise
        except Unavailable:
            self.metrics.observe_refusal("unready")
            raise

    def tell_prompt(self, request: Request, prompt: Any) -> None:
        if self.settings.log_prompts:
            request.scope["told"]["prompt"] = prompt

    def ended(self, scope: "Scope", answer: Answer, writer: Writer, params: SamplingParams, outcome: str) -> None:
        """A request is over, one way or the other: for the metrics and the log."""
        now = time.perf_counter()
        unfinished = "error" if outcome == "error" else "abort"
        reasons = []
        for index, timing in enumerate(answer.timings):
            output = writer.finished[index][0] if index in writer.finished else None
            reasons.append((output.finish_reason if output is not None else None) or unfinished)
            self.metrics.observe_request(
                ttft_s=timing.first_s,
                itl_s=timing.gaps_s,
                e2e_s=now - timing.arrived,
                queue_s=timing.queue_s if timing.queue_s is not None else now - timing.arrived,
                prompt_tokens=len(answer.tickets[index // params.n].prompt_ids),
                generated_tokens=timing.tokens,
                finish_reason=reasons[-1],
                max_tokens=params.max_tokens,
            )
        firsts = [timing.first_s for timing in answer.timings if timing.first_s is not None]
        scope["told"] |= {
            "prompt_tokens": writer.prompt_tokens,
            "completion_tokens": sum(timing.tokens for timing in answer.timings),
            "ttft_ms": round(min(firsts) * 1e3, 1) if firsts else None,
            "finish": ",".join(sorted(set(reasons))),
        }


def context_of(request: Request) -> Context:
    context = request.app.state.context
    assert isinstance(context, Context)
    return context
