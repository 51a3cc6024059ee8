"""Load on an OpenAI-compatible server: streamed completions, failures by name, speculative decoding counters.

Token counts are the server's `usage`; without it the text is tokenized. vLLM's /metrics, if present, is read before and
after a repeat: it gives the acceptance length and shows whether other clients or a prefix cache affected the
measurement.
"""

import asyncio
import gc
import json
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
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

COUNTER_DELAY_S = 0.5  # by which counters may be later than the responses


@dataclass
class _ResponseStream:
    """A request and its streamed response."""

    path: str
    body: bytes
    timing: RequestTiming
    text: str = ""
    finished: bool = False

    def add_event(self, event: str, now: float) -> bool:
        """Handles one event; True if it was the last."""
        if event == "[DONE]":
            self.finished = True
            return True
        try:
            value = json.loads(event)
            choice = value["choices"][0] if value.get("choices") else None
            if choice is not None:
                self.text += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
                self.finished = self.finished or choice.get("finish_reason") is not None
            if usage := value.get("usage"):
                self.timing.num_output_tokens = int(usage["completion_tokens"])
                self.timing.num_input_tokens = int(usage.get("prompt_tokens", 0))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise RequestFailed("not JSON", f"{event[:60]!r} in an event") from None
        if choice is not None:
            self.timing.chunk_times.append(now)
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
        streams = [self._build_stream(prompt, workload, i) for i, prompt in enumerate(prompts)]
        counters_before = self._read_counters()
        gc.collect()  # not during the measurement
        duration = self._loop.run(self._send_all(streams, load, seed, on_progress))
        timings = [stream.timing for stream in streams]
        if not all(timing.sent_at for timing in timings):
            raise UserError(
                f"--engine {self.settings.url}: gave up after too many consecutive failures ({self._last_failure}); "
                "finished repeats are kept"
            )
        warnings = self._count_tokens(streams)
        acceptance_length = self._check_counters(counters_before, timings, warnings)
        details = {t.failure: t.failure_detail for t in reversed(timings) if t.failure and t.failure_detail}
        warnings += [f"the first {name!r}: {detail}" for name, detail in details.items()]
        return summarize_repeat(timings, duration, acceptance_length), warnings

    async def _send_all(self, streams: list[_ResponseStream], load: Load, seed: int, on_progress: OnProgress) -> float:
        """Runs the load, until too many requests in a row have failed. Returns the seconds it took."""
        failure_limit = max(self.settings.failures, 2 * (load.concurrency or 1))
        self._consecutive_failures = 0
        start = time.perf_counter()
        num_finished, slots = 0, asyncio.Semaphore(load.concurrency or len(streams))

        async def send_request(stream: _ResponseStream) -> None:
            nonlocal num_finished
            async with slots:
                if self._consecutive_failures < failure_limit:
                    await self._stream_response(stream)
                    num_finished += 1
                    on_progress(num_finished)

        async with asyncio.TaskGroup() as tasks:
            arrival_times = load.arrival_times(len(streams), seed) or [0.0] * len(streams)
            for stream, arrival in zip(streams, arrival_times, strict=True):
                if (delay := start + arrival - time.perf_counter()) > 0:
                    await asyncio.sleep(delay)
                tasks.create_task(send_request(stream))
        return time.perf_counter() - start

    async def _stream_response(self, stream: _ResponseStream) -> None:
        """Reads to the end of the body, so that the connection can be reused; after [DONE] a failure has no effect."""
        timing, done = stream.timing, False
        timing.sent_at = time.perf_counter()
        try:
            async with self._client.request("POST", stream.path, stream.body) as response:
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

    def _build_stream(self, prompt: BenchPrompt, workload: Workload, index: int) -> _ResponseStream:
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
        path = "/v1/chat/completions" if prompt.messages else "/v1/completions"
        return _ResponseStream(path, json.dumps(body).encode(), RequestTiming(0.0))

    def _count_tokens(self, streams: list[_ResponseStream]) -> list[str]:
        """Counts output tokens that the server did not count. Returns a warning if there are such."""
        uncounted = [s for s in streams if s.timing.failure is None and not s.timing.num_output_tokens]
        if not uncounted:
            return []
        if self.tokenizer is None:
            raise UserError(f"--engine {self.settings.url}: sends no usage; give TARGET for its tokenizer")
        for stream in uncounted:
            token_ids = self.tokenizer.tokenizer(stream.text, add_special_tokens=False)["input_ids"]
            stream.timing.num_output_tokens = len(token_ids)
        return ["the server sends no usage: output tokens are counted by tokenizing the text"]

    def _read_counters(self) -> dict[str, float]:
        """vLLM's metrics, summed over their labels; empty if the server has none."""
        counters: defaultdict[str, float] = defaultdict(float)
        try:
            reply = self._http.request("GET", "/metrics")
        except RequestFailed:
            return {}  # requests to the server will report the problem
        if reply.status_code == 200:
            for name, _, value in parse_metrics(reply.content):
                counters[name] += value
        return counters

    def _check_counters(
        self, before: dict[str, float], timings: list[RequestTiming], warnings: list[str]
    ) -> float | None:
        """The acceptance length if the counters report it. Adds warnings where they disagree with the responses."""
        if not before:
            return None
        time.sleep(COUNTER_DELAY_S)
        after = self._read_counters() or before
        change = {name: value - before.get(name, 0) for name, value in after.items()}
        received = sum(timing.num_output_tokens for timing in timings)
        counted = change.get("vllm:generation_tokens", received)
        all_completed = not any(timing.failure for timing in timings)
        if all_completed and abs(counted - received) > BenchWarningThresholds.elsewhere * max(received, 1):
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
        mean_k = change.get("vllm:spec_decode_num_draft_tokens", 0) / (num_drafts or 1)
        declared_k = self.settings.num_speculative_tokens or 0
        # near max_model_len a server may draft fewer tokens
        if counted and not 0.8 * declared_k <= mean_k <= 1.01 * declared_k:
            raise UserError(
                f"--method {self.settings.method}, -k {declared_k}: the counters of {self.settings.url} report "
                f"{mean_k:.3g} draft tokens per step, so the row would be mislabelled"
            )
        accepted = change.get("vllm:spec_decode_num_accepted_tokens", 0)
        return 1 + accepted / num_drafts if num_drafts else None
