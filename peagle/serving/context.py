"""What every route needs: the engine, its texts, the settings, the metrics.

Knows nothing about what is asked.
"""

import asyncio
import time
from functools import cached_property
from typing import TYPE_CHECKING, Any

from fastapi import Request

from peagle.config import Grammar, SamplingParams, ServeSettings
from peagle.serving.answers import Writer
from peagle.serving.errors import ApiError
from peagle.serving.loop import Answer, EngineFacts, EngineLoop
from peagle.serving.pieces import Overloaded, Unavailable
from peagle.serving.prompts import Prompts
from peagle.serving.protocol import ResponseFormat, grammar_of

if TYPE_CHECKING:
    from starlette.types import Scope

    from peagle.serving.metrics import Metrics

GRAMMARS_AT_ONCE = 2


class Context:
    def __init__(self, engine: EngineLoop, settings: ServeSettings, about: dict[str, Any]) -> None:
        """`about` is what the owner knows of the pair: names of target and drafter, and K as it was asked for."""
        self.engine, self.settings, self.about = engine, settings, about
        self.created = int(time.time())
        self._grammars = asyncio.Semaphore(GRAMMARS_AT_ONCE)

    @cached_property
    def metrics(self) -> "Metrics":
        from peagle.serving.metrics import Metrics

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

    async def grammar(self, wanted: ResponseFormat | None) -> Grammar | None:
        """Tried and compiled beside the engine, few at a time: others are being answered meanwhile."""
        if wanted is None:
            return None
        async with self._grammars:
            made = await asyncio.to_thread(grammar_of, wanted)
            if made is not None:
                await self.engine.prepare(made)
            return made

    async def submit(self, ids: list[list[int]], params: SamplingParams, request_id: str, stream: bool) -> Answer:
        try:
            return await self.engine.submit_all(ids, params, request_id, stream)
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
