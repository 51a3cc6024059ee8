"""Load on an OpenAI-compatible server: streamed completions, failures by name, speculative decoding counters.

Token counts are the server's `usage`; without it the text is tokenized, or chunks are counted. vLLM's /metrics, if
present, is read before and after a repeat: it gives the acceptance length and shows whether other clients or a prefix
cache affected the measurement.
"""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from peagle.bench.engines import PromptTokenizer
from peagle.bench.workload import BenchEngine, BenchPrompt, Load, OnProgress, RequestTiming, Workload, summarize_repeat
from peagle.config import BenchServerSettings, BenchWarningThresholds
from peagle.errors import UserError
from peagle.http_client import (
    AsyncHttpClient,
    EventDecoder,
    HttpClient,
    HttpTimeouts,
    RequestFailed,
    error_message,
    find_model,
    parse_metrics,
    parse_server_url,
)
from peagle.results.schema import BenchRepeat

COUNTER_DELAY_S = 0.5  # before counters that disagree with the responses are read again


@dataclass
class _ResponseStream:
    """State of one streamed response."""

    timing: RequestTiming
    max_chunks: int
    usage: dict[str, Any] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)  # of the chunks that have one
    finished: bool = False

    def add_event(self, event: str, now: float) -> bool:
        """Handles one event; True if it was the last."""
        if event == "[DONE]":
            self.finished = True
            return True
        try:
            value = json.loads(event)
            choice = value["choices"][0] if value.get("choices") else None
            text = choice.get("text") or (choice.get("delta") or {}).get("content") or "" if choice is not None else ""
            self.usage |= value.get("usage") or {}
            self.texts += [str(text)] if text else []
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise RequestFailed("not JSON", f"{event[:60]!r} in an event") from None
        if choice is not None:
            self.timing.chunk_times.append(now)
            if len(self.timing.chunk_times) > self.max_chunks:
                raise RequestFailed("does not end", f"more than {self.max_chunks} chunks")
            self.finished = self.finished or choice.get("finish_reason") is not None
        elif "error" in value:
            raise RequestFailed("error in the stream", error_message(event.encode()))
        return False


class ServerBench(BenchEngine):
    """`with ServerBench(...) as server: server.measure(...)`."""

    def __init__(self, settings: BenchServerSettings, tokenizer: PromptTokenizer | None = None) -> None:
        self.settings, self.tokenizer = settings, tokenizer
        base_url = parse_server_url(settings.url, "--engine")
        timeouts = HttpTimeouts(settings.connect_s, settings.stall_s, settings.total_s)
        self._http = HttpClient(base_url, timeouts)
        self.model = settings.model or find_model(self._http, f"--engine {settings.url}")
        self.has_metrics = True  # until /metrics turns out to be missing
        self._consecutive_failures = 0
        self._loop, self._client = asyncio.Runner(), AsyncHttpClient(base_url, timeouts)

    def __exit__(self, *error: object) -> None:
        self._loop.run(self._client.close())
        self._loop.close()
        self._http.close()

    def measure(
        self, workload: Workload, prompts: Sequence[BenchPrompt], load: Load, seed: int, on_progress: OnProgress
    ) -> tuple[BenchRepeat, list[str]]:
        """Failures are counted. Too many in a row, or counters that contradict the declared speculation, raise."""
        bodies = [self._build_body(prompt, workload, i) for i, prompt in enumerate(prompts)]
        max_chunks = 4 * workload.max_tokens + 64  # a server may split the text of a token
        streams = [_ResponseStream(RequestTiming(0.0), max_chunks) for _ in prompts]
        counters_before = self._read_counters()
        gc.collect()  # not during the measurement
        failure_limit = max(self.settings.failures, 2 * (load.concurrency or 1))
        duration = self._loop.run(self._send_all(prompts, bodies, streams, load, seed, failure_limit, on_progress))
        if self._consecutive_failures >= failure_limit:
            raise UserError(
                f"--engine {self.settings.url}: gave up after {self._consecutive_failures} consecutive failures "
                f"({self._last_failure}); finished repeats are kept"
            )
        warnings = self._count_tokens(prompts, streams)
        acceptance_length = self._check_counters(counters_before, streams, warnings)
        timings = [stream.timing for stream in streams]
        details = {t.failure: t.failure_detail for t in reversed(timings) if t.failure and t.failure_detail}
        warnings += [f"the first {name!r}: {detail}" for name, detail in details.items()]
        return summarize_repeat(timings, duration, acceptance_length), warnings

    async def _send_all(
        self,
        prompts: Sequence[BenchPrompt],
        bodies: list[bytes],
        streams: list[_ResponseStream],
        load: Load,
        seed: int,
        failure_limit: int,
        on_progress: OnProgress,
    ) -> float:
        """Runs the load, until too many requests in a row have failed. Returns the seconds it took."""
        self._consecutive_failures = 0
        start = time.perf_counter()

        num_finished, slots = 0, asyncio.Semaphore(load.concurrency or len(prompts))

        async def send_request(i: int) -> None:
            nonlocal num_finished
            async with slots:
                if self._consecutive_failures < failure_limit:
                    path = "/v1/chat/completions" if prompts[i].messages else "/v1/completions"
                    await self._stream_response(path, bodies[i], streams[i])
                    num_finished += 1
                    on_progress(num_finished)

        async with asyncio.TaskGroup() as tasks:
            for i, arrival in enumerate(load.arrival_times(len(prompts), seed) or [0.0] * len(prompts)):
                if (delay := start + arrival - time.perf_counter()) > 0:
                    await asyncio.sleep(delay)
                tasks.create_task(send_request(i))
        return time.perf_counter() - start

    async def _stream_response(self, path: str, body: bytes, stream: _ResponseStream) -> None:
        """Reads to the end of the body, so that the connection can be reused; after [DONE] a failure has no effect."""
        timing, done = stream.timing, False
        timing.sent_at = time.perf_counter()
        try:
            async with self._client.request("POST", path, body) as response:
                content_type = response.headers.get("content-type", "text/event-stream").lower()
                if response.status_code != 200:
                    raise RequestFailed(f"HTTP {response.status_code}", error_message(await response.aread()))
                if "event-stream" not in content_type:
                    raise RequestFailed("not a stream", f"{content_type[:40]}: {error_message(await response.aread())}")
                decoder = EventDecoder()
                async for chunk in response.aiter_raw():
                    now = time.perf_counter()
                    done = done or any(stream.add_event(event, now) for event in decoder.feed(chunk))
            if not timing.chunk_times:
                raise RequestFailed("no tokens", "the stream ended without a chunk")
            if not stream.finished:
                raise RequestFailed("ended early", "the stream ended before the response")
            self._consecutive_failures = 0
        except RequestFailed as error:
            if not done or not timing.chunk_times:
                timing.failure, timing.failure_detail = error.name, error.detail
                self._consecutive_failures += 1
                self._last_failure = error

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

    def _count_tokens(self, prompts: Sequence[BenchPrompt], streams: list[_ResponseStream]) -> list[str]:
        """Sets the token counts of the completed requests. Returns a warning if the server does not send all."""
        estimated = False
        for prompt, stream in zip(prompts, streams, strict=True):
            counts = [stream.usage.get(name) for name in ("completion_tokens", "prompt_tokens")]
            num_output_tokens, num_input_tokens = (count if isinstance(count, int) else 0 for count in counts)
            if not num_output_tokens and stream.timing.failure is None:
                estimated, num_output_tokens = True, len(stream.texts)
                if self.tokenizer is not None:
                    text = "".join(stream.texts)
                    num_output_tokens = len(self.tokenizer.tokenizer(text, add_special_tokens=False)["input_ids"])
            stream.timing.num_output_tokens = num_output_tokens
            stream.timing.num_input_tokens = num_input_tokens or len(prompt.token_ids or ())
        how = "by tokenizing the text" if self.tokenizer is not None else "as chunks; give TARGET for its tokenizer"
        return [f"the server sends no usage: output tokens are counted {how}"] if estimated else []

    def _read_counters(self) -> dict[str, float]:
        """vLLM's metrics, summed over their labels; empty if the server has none."""
        counters: defaultdict[str, float] = defaultdict(float)
        try:
            reply = self._http.request("GET", "/metrics") if self.has_metrics else None
        except RequestFailed:
            return {}  # requests to the server will report the problem
        if reply is not None and reply.status == 200:
            for name, _, value in parse_metrics(reply.body):
                counters[name] += value
        self.has_metrics = bool(counters)
        return counters

    def _check_counters(
        self, before: dict[str, float], streams: list[_ResponseStream], warnings: list[str]
    ) -> float | None:
        """The acceptance length if the counters report it. Adds warnings where they disagree with the responses."""
        if not before:
            return None
        received = sum(stream.timing.num_output_tokens for stream in streams)
        any_failed = any(stream.timing.failure is not None for stream in streams)
        for delay in (COUNTER_DELAY_S, 0):
            after = self._read_counters() or before
            change = {name: value - before.get(name, 0) for name, value in after.items()}
            counted = change.get("vllm:generation_tokens", received)
            disagrees = abs(counted - received) > BenchWarningThresholds.elsewhere * max(received, 1)
            if any_failed or not disagrees:
                break
            time.sleep(delay)
        else:
            warnings.append(
                f"the server counted {counted:,.0f} tokens, {received:,} were received: "
                "it served other clients, or its counters are late"
            )
        share = change.get("vllm:prefix_cache_hits", 0) / (change.get("vllm:prefix_cache_queries") or 1)
        if share > BenchWarningThresholds.cached:
            warnings.append(
                f"{share:.0%} of the prompt tokens hit the server's prefix cache, which lowers TTFT; start vLLM with "
                "--no-enable-prefix-caching to avoid it"
            )
        num_drafts = change.get("vllm:spec_decode_num_drafts", 0)
        any_completed = any(not stream.timing.failure for stream in streams)
        self._check_declared(num_drafts, change.get("vllm:spec_decode_num_draft_tokens", 0), any_completed)
        accepted = change.get("vllm:spec_decode_num_accepted_tokens", 0)
        return 1 + accepted / num_drafts if num_drafts else None

    def _check_declared(self, num_drafts: float, num_draft_tokens: float, any_completed: bool) -> None:
        """Raises UserError if the counters contradict --method or -k: the row would be mislabelled."""
        method, k, url = self.settings.method, self.settings.num_speculative_tokens, self.settings.url
        mean = num_draft_tokens / num_drafts if num_drafts else 0.0
        if method == "none" and num_drafts:
            raise UserError(
                f"--engine {url}: its counters report {mean:.3g} draft tokens per step; "
                f"give --method p-eagle or eagle3, and -k {round(mean)}"
            )
        if method != "none" and any_completed and not num_drafts:
            raise UserError(f"--method {method}: the counters of {url} report no draft tokens")
        # near max_model_len a server may draft fewer tokens
        if k is not None and num_drafts and not 0.8 * k <= mean <= 1.01 * k:
            raise UserError(f"-k {k}: the counters of {url} report {mean:.3g} draft tokens per step")
