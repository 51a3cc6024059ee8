"""Load on an OpenAI-compatible server: streamed completions, failures by name, speculative decoding counters.

Token counts are the server's `usage`. vLLM's /metrics, if present, is read before and after a repeat: it gives the
acceptance length and shows whether other clients or a prefix cache affected the measurement.
"""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from peagle.bench.timing import RequestTiming, summarize_repeat
from peagle.bench.workload import BenchPrompt, Load, Workload
from peagle.config import BenchServerSettings, BenchWarningThresholds, SpeculationMethod
from peagle.errors import UserError
from peagle.http_client import (
    AsyncHttpClient,
    AsyncResponse,
    EventDecoder,
    HttpTimeouts,
    RequestFailed,
    error_message,
    parse_server_url,
)
from peagle.results.comparison import NOT_SENT
from peagle.results.schema import BenchRepeat

METRIC_PREFIX = "vllm:"
MAX_METRICS_BYTES = 1 << 24
MAX_ERROR_BYTES = 1 << 14
COUNTER_DELAY_S = 0.5  # before counters that disagree with the responses are read again
OnProgress = Callable[[int, int], None]  # finished requests, new tokens


@dataclass(frozen=True)
class MeasuredRepeat:
    """One repeat and warnings about it."""

    repeat: BenchRepeat
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class DeclaredSpeculation:
    """Speculation of the server as given on the command line; checked against its counters."""

    method: SpeculationMethod = "none"
    num_speculative_tokens: int | None = None


@dataclass
class _ResponseStream:
    """State of one streamed response."""

    timing: RequestTiming
    max_chunks: int
    num_input_tokens: int | None = None
    num_output_tokens: int | None = None
    finished: bool = False

    def add_event(self, event: str, now: float) -> bool:
        """Handles one event; True if it was the last."""
        if event == "[DONE]":
            self.finished = True
            return True
        try:
            value = json.loads(event)
        except (ValueError, RecursionError):
            raise RequestFailed("not JSON", f"{event[:60]!r} in an event") from None
        if not isinstance(value, dict):
            raise RequestFailed("not JSON", f"{event[:60]!r} in an event, not an object")
        if "error" in value and not value.get("choices"):
            raise RequestFailed("error in the stream", error_message(event.encode()))
        choices, usage = value.get("choices"), value.get("usage")
        if isinstance(usage, dict):
            self.num_output_tokens = _valid_count(usage.get("completion_tokens"), self.num_output_tokens)
            self.num_input_tokens = _valid_count(usage.get("prompt_tokens"), self.num_input_tokens)
        if isinstance(choices, list) and choices:
            if not isinstance(choices[0], dict):
                raise RequestFailed("not JSON", f"{event[:60]!r} in an event, an invalid choice")
            self.timing.chunk_times.append(now)
            if len(self.timing.chunk_times) > self.max_chunks:
                raise RequestFailed("does not end", f"more than {self.max_chunks} chunks")
            self.finished = self.finished or choices[0].get("finish_reason") is not None
        return False


class ServerBench:
    """`with ServerBench(...) as server: server.measure(...)`."""

    def __init__(self, settings: BenchServerSettings, declared: DeclaredSpeculation) -> None:
        self.settings, self.declared = settings, declared
        self.base_url = parse_server_url(settings.url, "--engine")
        self.model = settings.model or ""
        self.has_metrics = True  # until /metrics turns out to be missing
        self._consecutive_failures = 0

    def __enter__(self) -> ServerBench:
        self._loop = asyncio.Runner()
        timeouts = HttpTimeouts(self.settings.connect_s, self.settings.stall_s, self.settings.total_s)
        self._client = AsyncHttpClient(self.base_url, timeouts)
        if not self.model:
            try:
                self.model = self._loop.run(self._find_model())
            except BaseException:
                self.__exit__(None, None, None)
                raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._loop.run(self._client.close())
        self._loop.close()

    def measure(
        self, workload: Workload, prompts: Sequence[BenchPrompt], load: Load, seed: int, on_progress: OnProgress
    ) -> MeasuredRepeat:
        """Sends all prompts once. Failures are counted; only counters that contradict `declared` raise."""
        bodies = [self._build_body(prompt, workload, i) for i, prompt in enumerate(prompts)]
        gc.collect()  # not during the measurement
        return self._loop.run(self._measure(workload, prompts, bodies, load, seed, on_progress))

    async def _measure(
        self,
        workload: Workload,
        prompts: Sequence[BenchPrompt],
        bodies: list[bytes],
        load: Load,
        seed: int,
        on_progress: OnProgress,
    ) -> MeasuredRepeat:
        counters_before = await self._read_counters()
        max_chunks = 4 * workload.max_tokens + 64  # a server may split the text of a token
        streams = [_ResponseStream(RequestTiming(0.0, failure=NOT_SENT), max_chunks) for _ in prompts]
        failure_limit = max(self.settings.failures, 2 * (load.concurrency or 1))
        self._consecutive_failures = 0
        start = time.perf_counter()

        async def send_request(i: int) -> None:
            if self._consecutive_failures < failure_limit:
                path = "/v1/chat/completions" if prompts[i].messages else "/v1/completions"
                await self._stream_response(path, bodies[i], streams[i])
                on_progress(1, streams[i].num_output_tokens or 0)

        async with asyncio.TaskGroup() as tasks:
            arrival_times = load.arrival_times(len(prompts), seed)
            if arrival_times is None:
                assert load.concurrency is not None
                queue = iter(range(len(prompts)))

                async def work() -> None:
                    for i in queue:
                        await send_request(i)

                for _ in range(min(load.concurrency, len(prompts))):
                    tasks.create_task(work())
            else:
                for i, arrival in enumerate(arrival_times):
                    await asyncio.sleep(max(0.0, start + arrival - time.perf_counter()))
                    tasks.create_task(send_request(i))
        duration = time.perf_counter() - start
        for prompt, stream in zip(prompts, streams, strict=True):
            _count_tokens(prompt, stream)
        warnings, acceptance_length = await self._check_counters(counters_before, streams)
        timings = [stream.timing for stream in streams]
        details = {t.failure: t.failure_detail for t in reversed(timings) if t.failure and t.failure_detail}
        warnings += [f"the first {name!r}: {detail}" for name, detail in details.items()]
        return MeasuredRepeat(summarize_repeat(timings, duration, acceptance_length), tuple(warnings))

    async def _stream_response(self, path: str, body: bytes, stream: _ResponseStream) -> None:
        timing = stream.timing
        timing.failure, timing.sent_at = None, time.perf_counter()
        try:
            async with self._client.request("POST", path, body) as response:
                if response.status != 200:
                    raise RequestFailed(f"HTTP {response.status}", await _read_error(response))
                content_type = response.headers.get("content-type", "text/event-stream").lower()
                if "event-stream" not in content_type:
                    raise RequestFailed("not a stream", f"{content_type[:40]}: {await _read_error(response)}")
                decoder, done = EventDecoder(), False
                async for chunk in response.chunks():
                    now = time.perf_counter()
                    done = any(stream.add_event(event, now) for event in decoder.feed(chunk))
                    if done:
                        break
                if done:
                    await response.drain()
            if not timing.chunk_times:
                raise RequestFailed("no tokens", "the stream ended without a chunk")
            if not stream.finished:
                raise RequestFailed("ended early", "the stream ended before the response")
            self._consecutive_failures = 0
        except RequestFailed as error:
            timing.failure, timing.failure_detail = error.name, error.detail
            self._consecutive_failures += 1

    def _build_body(self, prompt: BenchPrompt, workload: Workload, index: int) -> bytes:
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": workload.max_tokens,
            "temperature": workload.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if prompt.messages:
            body["messages"] = prompt.chat_messages()
        else:
            body["prompt"] = list(prompt.token_ids) if prompt.token_ids is not None else prompt.text
        if workload.ignore_eos:
            body["ignore_eos"] = True
        if workload.temperature > 0:
            body["seed"] = workload.seed + index
        return json.dumps(body).encode()

    async def _find_model(self) -> str:
        url = self.settings.url
        try:
            async with self._client.request("GET", "/v1/models") as response:
                body = await response.read(MAX_METRICS_BYTES)
                if response.status != 200:
                    raise RequestFailed(f"HTTP {response.status}", error_message(body))
            names = [str(model["id"]) for model in json.loads(body)["data"]]
        except RequestFailed as error:
            raise UserError(f"--engine {url}: {error}") from None
        except (ValueError, KeyError, TypeError):
            raise UserError(f"--engine {url}: does not list its models; give --model NAME") from None
        if len(names) != 1:
            raise UserError(f"--engine {url}: give --model NAME, one of {', '.join(names) or 'none'}")
        return names[0]

    async def _read_counters(self) -> dict[str, float] | None:
        if not self.has_metrics:
            return None
        try:
            async with self._client.request("GET", "/metrics") as response:
                body = await response.read(MAX_METRICS_BYTES)
            counters = parse_counters(body.decode(errors="replace")) if response.status == 200 else {}
        except RequestFailed:
            return None  # requests to the server will report the problem
        self.has_metrics = bool(counters)
        return counters or None

    async def _check_counters(
        self, before: dict[str, float] | None, streams: list[_ResponseStream]
    ) -> tuple[list[str], float | None]:
        """Warnings where the counters disagree with the responses, and the acceptance length if they report it."""
        if before is None:
            return [], None
        change = await self._counter_change(before)
        received = sum(stream.timing.num_output_tokens for stream in streams)
        any_failed = any(stream.timing.failure is not None for stream in streams)
        thresholds = BenchWarningThresholds()

        def disagrees() -> bool:
            counted = change.get("generation_tokens")
            limit = thresholds.elsewhere * max(received, 1)
            return counted is not None and not any_failed and abs(counted - received) > limit

        if disagrees():
            await asyncio.sleep(COUNTER_DELAY_S)
            change = await self._counter_change(before)
        warnings = []
        if disagrees():
            warnings.append(
                f"the server counted {change['generation_tokens']:,.0f} tokens, {received:,} were received: "
                "it served other clients, or its counters are late"
            )
        queries = change.get("prefix_cache_queries", 0)
        if queries and (share := change.get("prefix_cache_hits", 0) / queries) > thresholds.cached:
            warnings.append(
                f"{share:.0%} of the prompt tokens hit the server's prefix cache, which lowers TTFT; start vLLM with "
                "--no-enable-prefix-caching to avoid it"
            )
        num_drafts = change.get("spec_decode_num_drafts", 0)
        any_completed = any(not stream.timing.failure for stream in streams)
        self._check_declared(num_drafts, change.get("spec_decode_num_draft_tokens", 0), any_completed)
        accepted = change.get("spec_decode_num_accepted_tokens", 0)
        return warnings, 1 + accepted / num_drafts if num_drafts else None

    async def _counter_change(self, before: dict[str, float]) -> dict[str, float]:
        after = await self._read_counters() or before
        return {name: value - before.get(name, 0) for name, value in after.items()}

    def _check_declared(self, num_drafts: float, num_draft_tokens: float, any_completed: bool) -> None:
        """Raises UserError if the counters contradict --method or -k: the row would be mislabelled."""
        method, k, url = self.declared.method, self.declared.num_speculative_tokens, self.settings.url
        if method == "none" and num_drafts:
            mean = num_draft_tokens / num_drafts
            raise UserError(
                f"--engine {url}: its counters report {mean:.3g} draft tokens per step; "
                f"give --method p-eagle or eagle3, and -k {round(mean)}"
            )
        if method != "none" and any_completed and not num_drafts:
            raise UserError(f"--method {method}: the counters of {url} report no draft tokens")
        # near max_model_len a server may draft fewer tokens
        if k is not None and num_drafts and not 0.8 * k <= num_draft_tokens / num_drafts <= 1.01 * k:
            mean = num_draft_tokens / num_drafts
            raise UserError(f"-k {k}: the counters of {url} report {mean:.3g} draft tokens per step")


def parse_counters(text: str) -> dict[str, float]:
    """vLLM's counters in Prometheus text, summed over labels; names without `vllm:` and `_total`."""
    counters: dict[str, float] = {}
    for line in text.splitlines():
        if not line.startswith(METRIC_PREFIX):
            continue
        name = line.partition("{")[0].partition(" ")[0]
        try:
            value = float(line.rpartition(" ")[2])
        except ValueError:
            continue
        if name.endswith("_total"):
            name = name.removeprefix(METRIC_PREFIX).removesuffix("_total")
            counters[name] = counters.get(name, 0.0) + value
    return counters


def _count_tokens(prompt: BenchPrompt, stream: _ResponseStream) -> None:
    timing = stream.timing
    if timing.failure is not None:
        return
    if not stream.num_output_tokens:
        timing.failure, timing.failure_detail = "no token count", "the server sends no usage"
        return
    timing.num_output_tokens = stream.num_output_tokens
    if stream.num_input_tokens is not None:
        timing.num_input_tokens = stream.num_input_tokens
    elif prompt.token_ids is not None:
        timing.num_input_tokens = len(prompt.token_ids)


async def _read_error(response: AsyncResponse) -> str:
    try:
        return error_message(await response.read(MAX_ERROR_BYTES))
    except RequestFailed:
        return ""  # the status alone is reported


def _valid_count(value: Any, previous: int | None) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else previous
