"""An OpenAI-compatible server under load: streamed completions, who failed and why, what its counters say.

Knows the protocol and nothing about how a server works. Tokens are counted by the server (`usage`) or a tokenizer.
vLLM's /metrics is read before and after where it is there: acceptance comes from it, and whether somebody else was
being served or the prompts were in its cache. $OPENAI_API_KEY is sent if set.
"""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from peagle.bench.http_client import LONGEST_ERROR, Client, Events, Failed, parse_url
from peagle.bench.timing import RequestTiming, summarize_repeat
from peagle.bench.workload import Ask, Load, Workload, arrivals
from peagle.config import BenchServerSettings, BenchWarningThresholds, SpeculationMethod
from peagle.errors import UserError
from peagle.results.comparison import NOT_SENT
from peagle.results.schema import BenchRepeat

COUNTERS = "vllm:"
LONGEST_METRICS = 1 << 24
LATE_COUNTERS_S = 0.5  # before they are read a second time, where they do not agree with what was received
JSON = dict[str, Any]
Tell = Callable[[int, int], None]  # requests that ended, tokens that came


@dataclass(frozen=True)
class Measured:
    """One repeat, and what has to be said about it beside its numbers."""

    repeat: BenchRepeat
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Stated:
    """What the user says that the server runs; its counters must not say otherwise."""

    method: SpeculationMethod = "none"
    k: int | None = None


@dataclass
class _Stream:
    """What one answer has said so far."""

    trace: RequestTiming
    most_chunks: int
    text: list[str] = field(default_factory=list)
    input_tokens: int | None = None
    output_tokens: int | None = None
    finished: bool = False

    def take(self, said: str, now: float) -> bool:
        """One event; True once it was the last."""
        if said == "[DONE]":
            self.finished = True
            return True
        try:
            value = json.loads(said)
        except (ValueError, RecursionError):
            raise Failed("not JSON", f"{said[:60]!r} in an event") from None
        if not isinstance(value, dict):
            raise Failed("not JSON", f"{said[:60]!r} in an event, not an object")
        if "error" in value and not value.get("choices"):
            raise Failed("error in the stream", _message(said.encode()))
        choices, usage = value.get("choices"), value.get("usage")
        if isinstance(usage, dict):
            self.output_tokens = _count(usage.get("completion_tokens"), self.output_tokens)
            self.input_tokens = _count(usage.get("prompt_tokens"), self.input_tokens)
        if isinstance(choices, list) and choices:
            choice = choices[0]
            if not isinstance(choice, dict):
                raise Failed("not JSON", f"{said[:60]!r} in an event, a choice that is none")
            self.trace.chunk_times.append(now)
            if len(self.trace.chunk_times) > self.most_chunks:
                raise Failed("does not end", f"more than {self.most_chunks} chunks")
            delta = choice.get("delta")
            text = delta.get("content") if isinstance(delta, dict) else choice.get("text")
            if isinstance(text, str):
                self.text.append(text)
            self.finished = self.finished or choice.get("finish_reason") is not None
        return False


class ServerBench:
    """`with ServerBench(...) as server: server.measure(...)`."""

    def __init__(self, settings: BenchServerSettings, stated: Stated, tokenizer: Any = None) -> None:
        self.settings, self.stated, self.tokenizer = settings, stated, tokenizer
        self.address = parse_url(settings.url)
        self.model = settings.model or ""
        self.counts = True  # until the server has no counters to show
        self._failed_in_a_row = 0

    def __enter__(self) -> ServerBench:
        self._loop = asyncio.Runner()
        self._client = Client(self.address, self.settings)
        if not self.model:
            try:
                self.model = self._loop.run(self._only_model())
            except BaseException:
                self.__exit__(None, None, None)
                raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._client.close()
        self._loop.close()

    def measure(self, workload: Workload, asks: Sequence[Ask], load: Load, seed: int, tell: Tell) -> Measured:
        """All of `asks`, once. Raises nothing that a server could cause, but for counters that deny what was stated."""
        bodies = [self._body(ask, workload, i) for i, ask in enumerate(asks)]
        gc.collect()  # now rather than in the middle of it
        return self._loop.run(self._measured(workload, asks, bodies, load, seed, tell))

    async def _measured(
        self, workload: Workload, asks: Sequence[Ask], bodies: list[bytes], load: Load, seed: int, tell: Tell
    ) -> Measured:
        before = await self._counters()
        most = 4 * workload.max_tokens + 64  # a server may split a token's text, but not for ever
        streams = [_Stream(RequestTiming(0.0, failure=NOT_SENT), most) for _ in asks]
        limit = max(self.settings.failures, 2 * (load.concurrency or 1))
        self._failed_in_a_row = 0
        began = time.perf_counter()

        async def one(i: int) -> None:
            if self._failed_in_a_row < limit:
                await self._stream(
                    "/v1/chat/completions" if asks[i].messages else "/v1/completions", bodies[i], streams[i]
                )
                tell(1, streams[i].output_tokens or 0)

        async with asyncio.TaskGroup() as tasks:
            if load.rate is None:
                assert load.concurrency is not None
                queue = iter(range(len(asks)))

                async def work() -> None:
                    for i in queue:
                        await one(i)

                for _ in range(min(load.concurrency, len(asks))):
                    tasks.create_task(work())
            else:
                for i, due in enumerate(arrivals(len(asks), load.rate, seed)):
                    await asyncio.sleep(max(0.0, began + due - time.perf_counter()))
                    tasks.create_task(one(i))
        seconds = time.perf_counter() - began
        for ask, stream in zip(asks, streams, strict=True):
            self._settle(ask, stream)
        notes, acceptance = await self._compared(before, streams)
        seen = {
            s.trace.failure: s.trace.failure_detail
            for s in reversed(streams)
            if s.trace.failure and s.trace.failure_detail
        }
        notes += [f"the first {name!r}: {detail}" for name, detail in seen.items()]
        return Measured(summarize_repeat([s.trace for s in streams], seconds, acceptance), tuple(notes))

    async def _stream(self, path: str, body: bytes, stream: _Stream) -> None:
        trace = stream.trace
        trace.failure, trace.sent_at = None, time.perf_counter()
        try:
            async with self._client.request("POST", path, body) as response:
                if response.status != 200:
                    raise Failed(f"HTTP {response.status}", _message(await _some(response)))
                kind = response.headers.get("content-type", "text/event-stream").lower()
                if "event-stream" not in kind:
                    raise Failed("not a stream", f"{kind[:40]}: {_message(await _some(response))}")
                events, done = Events(), False
                async for piece in response.pieces():
                    now = time.perf_counter()
                    done = any(stream.take(said, now) for said in events.feed(piece))
                    if done:
                        break
                if done:
                    await response.linger()
            if not trace.chunk_times:
                raise Failed("no tokens", "the stream ended without a chunk")
            if not stream.finished:
                raise Failed("ended early", "the stream ended before the answer")
            self._failed_in_a_row = 0
        except Failed as failed:
            trace.failure, trace.failure_detail = failed.name, failed.detail
            self._failed_in_a_row += 1

    def _settle(self, ask: Ask, stream: _Stream) -> None:
        """Token counts, outside of the time that is measured."""
        trace = stream.trace
        if trace.failure is not None:
            return
        counted = stream.output_tokens
        if not counted and self.tokenizer is not None:
            counted = self._tokens("".join(stream.text))
        if not counted:
            trace.failure, trace.failure_detail = "no token count", "the server sends no usage; give --tokenizer"
            return
        trace.num_output_tokens = counted
        if stream.input_tokens is not None:
            trace.num_input_tokens = stream.input_tokens
        elif ask.ids is not None:
            trace.num_input_tokens = len(ask.ids)
        elif self.tokenizer is not None:
            trace.num_input_tokens = self._tokens(ask.text or "\n".join(content for _, content in ask.messages))

    def _tokens(self, text: str) -> int:
        return len(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _body(self, ask: Ask, workload: Workload, number: int) -> bytes:
        body: JSON = {"model": self.model, "max_tokens": workload.max_tokens, "temperature": workload.temperature}
        if ask.messages:
            body["messages"] = ask.as_messages()
        else:
            body["prompt"] = list(ask.ids) if ask.ids is not None else ask.text
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        if workload.ignore_eos:
            body["ignore_eos"] = True
        if workload.temperature > 0:
            body["seed"] = workload.seed + number
        return json.dumps(body).encode()

    async def _only_model(self) -> str:
        try:
            async with self._client.request("GET", "/v1/models") as response:
                said = await response.whole(LONGEST_METRICS)
                if response.status != 200:
                    raise Failed(f"HTTP {response.status}", _message(said))
            names = [str(model["id"]) for model in json.loads(said)["data"]]
        except Failed as failed:
            raise UserError(f"--url {self.settings.url}: {failed}") from None
        except (ValueError, KeyError, TypeError):
            raise UserError(f"--url {self.settings.url}: does not list its models; give --model NAME") from None
        if len(names) != 1:
            raise UserError(f"--url {self.settings.url}: give --model NAME, one of {', '.join(names) or 'none'}")
        return names[0]

    async def _counters(self) -> dict[str, float] | None:
        if not self.counts:
            return None
        try:
            async with self._client.request("GET", "/metrics") as response:
                said = await response.whole(LONGEST_METRICS)
            found = read_counters(said.decode(errors="replace")) if response.status == 200 else {}
        except Failed:
            return None  # it may be busy or gone: whoever asks it for an answer will hear
        self.counts = bool(found)
        return found or None

    async def _compared(
        self, before: dict[str, float] | None, streams: list[_Stream]
    ) -> tuple[list[str], float | None]:
        """What the counters say beside what was received; acceptance if they have it."""
        if before is None:
            return [], None
        moved = await self._moved(before)
        ours = sum(s.trace.num_output_tokens for s in streams)
        failed = any(s.trace.failure is not None for s in streams)
        limits = BenchWarningThresholds()

        def disagree() -> bool:
            theirs = moved.get("generation_tokens")
            return theirs is not None and not failed and abs(theirs - ours) > limits.elsewhere * max(ours, 1)

        if disagree():
            await asyncio.sleep(LATE_COUNTERS_S)
            moved = await self._moved(before)
        notes = []
        if disagree():
            notes.append(
                f"the server counted {moved['generation_tokens']:,.0f} tokens where {ours:,} were received: "
                "it was serving others too, or its counters are late"
            )
        asked = moved.get("prefix_cache_queries", 0)
        if asked and (share := moved.get("prefix_cache_hits", 0) / asked) > limits.cached:
            notes.append(
                f"{share:.0%} of the prompts came out of the server's prefix cache, so TTFT is that of prompts seen "
                "before; vLLM serves without it by --no-enable-prefix-caching"
            )
        drafts = moved.get("spec_decode_num_drafts", 0)
        self._agrees(drafts, moved.get("spec_decode_num_draft_tokens", 0), any(not s.trace.failure for s in streams))
        return notes, 1 + moved.get("spec_decode_num_accepted_tokens", 0) / drafts if drafts else None

    async def _moved(self, before: dict[str, float]) -> dict[str, float]:
        after = await self._counters() or before
        return {name: value - before.get(name, 0) for name, value in after.items()}

    def _agrees(self, drafts: float, tokens: float, answered: bool) -> None:
        """Refuses a label that the counters deny: the row would be compared as what it is not."""
        stated, url = self.stated, self.settings.url
        if stated.method == "none" and drafts:
            raise UserError(
                f"--url {url}: its counters say that it drafts {tokens / drafts:.3g} tokens a round; "
                f"say --method p-eagle or eagle3, and -k {round(tokens / drafts)}"
            )
        if stated.method != "none" and answered and not drafts:
            raise UserError(f"--method {stated.method}: the counters of {url} say that it drafts nothing")
        # towards the end of its context a server may draft less
        if stated.k is not None and drafts and not 0.8 * stated.k <= tokens / drafts <= 1.01 * stated.k:
            raise UserError(f"-k {stated.k}: the counters of {url} say that it drafts {tokens / drafts:.3g} a round")


def read_counters(text: str) -> dict[str, float]:
    """vLLM's counters in Prometheus' text, summed over their labels; names without vllm: and _total."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if not line.startswith(COUNTERS):
            continue
        name = line.partition("{")[0].partition(" ")[0]
        try:
            value = float(line.rpartition(" ")[2])
        except ValueError:
            continue
        if name.endswith("_total"):
            name = name.removeprefix(COUNTERS).removesuffix("_total")
            found[name] = found.get(name, 0.0) + value
    return found


async def _some(response: Any) -> bytes:
    try:
        return bytes(await response.whole(LONGEST_ERROR))
    except Failed:
        return b""  # what is known already matters more than why it cannot be told better


def _count(value: Any, before: int | None) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else before


def _message(data: bytes) -> str:
    """What a server says in an error's body, whichever form it has."""
    try:
        value = json.loads(data)
        error = value.get("error", value)
        said = error.get("message", error) if isinstance(error, dict) else error
    except (ValueError, AttributeError, RecursionError):
        said = data.decode(errors="replace")
    return " ".join(str(said).split())[:160]
