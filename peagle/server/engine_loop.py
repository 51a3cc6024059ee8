"""The engine's thread: runs `LLM.step` in a loop and exchanges commands and deltas with asyncio.

The boundary between the HTTP front end and the engine:

- The front end sends commands through one queue: add a request, abort it, call a function between two steps, stop.
- The engine sends `OutputDelta` objects and exceptions into the `RequestStream` of a request. It also replaces
  `EngineLoop.stats` after every step, and writes the `CompletionTiming` objects that the front end reads.
- Only the engine's thread touches the `LLM`. The one exception is `compile_grammar`, which is thread-safe.
- This module knows nothing about HTTP, and the front end knows nothing about `LLM`.

When a step fails, the requests in that step fail with it, because one of them may be the cause. Waiting requests are
kept, the engine is rebuilt, and the new engine serves them.
"""

from __future__ import annotations

import asyncio
import gc
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from peagle.config import Grammar, SamplingParams, ServeSettings
from peagle.engine.llm import LLM
from peagle.engine.request import Request, RequestGroup, RequestState
from peagle.errors import UserError
from peagle.server.engine_stats import EngineStats, EngineStatsCounter
from peagle.server.logs import format_traceback, log_event
from peagle.server.request_stream import (
    CompletionTiming,
    EngineFailedError,
    EngineRequest,
    EngineUnavailableError,
    OutputDelta,
    QueueFullError,
    RequestStream,
)

MAX_ERROR_LENGTH = 200
STOP_TIMEOUT_S = 5.0  # for the running step; a model that is still loading is not waited for
POLL_S = 0.02

T = TypeVar("T")
EngineState = Literal["starting", "ready", "restarting", "draining", "failed"]


@dataclass(frozen=True)
class EngineInfo:
    """Properties of the engine that do not change while the server runs."""

    target_folder: Path
    max_model_len: int
    vocab_size: int
    max_speculative_tokens: int
    method: Literal["p-eagle", "eagle3"] | None
    max_num_seqs: int
    device: str
    dtype: str
    memory_bytes: dict[str, int]

    @classmethod
    def from_llm(cls, llm: LLM) -> EngineInfo:
        drafter = llm.drafter
        return cls(
            target_folder=llm.target.folder,
            max_model_len=llm.max_model_len,
            vocab_size=llm.target.model.cfg.vocab_size,
            max_speculative_tokens=llm.scheduler.max_speculative_tokens,
            method=None if drafter is None else "p-eagle" if drafter.cfg.parallel else "eagle3",
            max_num_seqs=llm.scheduler.max_num_seqs,
            device=str(llm.model_runner.device),
            dtype=llm.dtype,
            memory_bytes=llm.memory_bytes(),
        )


class EngineLoop:
    def __init__(self, build_llm: Callable[[], LLM], settings: ServeSettings) -> None:
        self.build_llm, self.settings = build_llm, settings
        self.state: EngineState = "starting"
        self.stats = EngineStats()
        self.info: EngineInfo | None = None
        self.last_error: str | None = None
        self.fatal_error: BaseException | None = None
        self.open_streams: set[RequestStream] = set()
        self.started = asyncio.Event()  # the engine is ready for the first time, or has failed
        self._commands: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._requests: dict[RequestGroup, EngineRequest] = {}
        self._llm: LLM | None = None
        self._stats_counter = EngineStatsCounter()
        self._num_failures = 0  # in a row
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # Called from asyncio

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def submit(self, prompts: Sequence[list[int]], params: SamplingParams, stream: bool = True) -> RequestStream:
        """Queues prompts. Completion j of prompt i has index i * n + j. Raises if the engine cannot take them."""
        num_completions = len(prompts) * params.n
        self.check_capacity(num_completions)
        request_stream = RequestStream(
            num_completions, self.settings.request_timeout_s, self._close_stream, self._abort_stream
        )
        now = time.perf_counter()
        for i, prompt_token_ids in enumerate(prompts):
            timings = [CompletionTiming(now) for _ in range(params.n)]
            request = EngineRequest(request_stream, i * params.n, prompt_token_ids, params, stream, timings)
            request_stream.requests.append(request)
        self.open_streams.add(request_stream)
        self._commands.put(("add", request_stream))
        return request_stream

    def check_capacity(self, num_completions: int) -> None:
        """Raises if the engine cannot take this many more completions now."""
        if self.state not in ("ready", "restarting"):
            raise EngineUnavailableError(self.state)
        if sum(stream.num_completions for stream in self.open_streams) + num_completions > self.max_completions:
            raise QueueFullError()

    @property
    def max_completions(self) -> int:
        """Completions that may run or wait at once."""
        return self.settings.max_queued_requests + (self.info.max_num_seqs if self.info is not None else 0)

    async def call_in_engine(self, function: Callable[[LLM], T]) -> T:
        """Calls a function in the engine's thread, between two steps."""
        result: Future[T] = Future()
        self._commands.put(("call", (function, result)))
        return await asyncio.wrap_future(result)

    async def compile_grammar(self, grammar: Grammar) -> None:
        """Compiles a grammar in a worker thread, because a large one takes a while."""
        if (llm := self._llm) is not None:  # during a rebuild, the engine compiles it when it adds the request
            await asyncio.to_thread(llm.compile_grammar, grammar)

    def drain(self) -> None:
        """Refuses new requests from now on; running ones continue."""
        if self.state != "failed":
            self.state = "draining"

    async def stop(self) -> None:
        """Ends the thread. Requests that are still open get an error."""
        self.drain()
        self._commands.put(("stop", None))
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while self._thread.is_alive() and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)

    def _close_stream(self, request_stream: RequestStream) -> None:
        self.open_streams.discard(request_stream)
        request_stream.timeout.cancel()

    def _abort_stream(self, request_stream: RequestStream) -> None:
        if request_stream in self.open_streams:
            self._close_stream(request_stream)
            self._commands.put(("abort", request_stream))

    # The engine's thread

    def _run(self) -> None:
        try:
            self._build_engine()
            self._call_in_asyncio(self.started.set)
            self._run_steps()
        except BaseException as error:  # every open request must get an answer
            self.state, self.last_error = "failed", _summarize(error)
            self.fatal_error = error
            log_event("engine failed for good", level="error", error=self.last_error)
            self._call_in_asyncio(self.started.set)
            self._fail_all(EngineUnavailableError("failed"))
            self._refuse_commands()

    def _run_steps(self) -> None:
        """The central loop: run commands, run one engine step, send its deltas."""
        while True:
            if not self._run_commands(wait=not self._engine.has_unfinished_requests):
                self._fail_all(EngineUnavailableError("draining"))
                return
            failure = None
            try:
                if self._engine.has_unfinished_requests:
                    updated = self._engine.step()
                    self._record_queue_times()
                    self._send_deltas(updated)
                    del updated
            except Exception as error:
                failure = error
            if failure is not None:
                summary = _summarize(failure)
                log_event("engine step failed", level="error", error=summary, trace=format_traceback(failure))
                failure = None  # its traceback keeps the engine's memory alive
                self._rebuild_engine(summary)

    def _run_commands(self, wait: bool) -> bool:
        """Runs all queued commands. Returns False on stop."""
        while True:
            try:
                name, value = self._commands.get(block=wait)
            except queue.Empty:
                return True
            wait = False
            if name == "add":
                for request in value.requests:
                    self._add_request(request)
            elif name == "abort":
                for request in value.requests:
                    self._abort_request(request)
            elif name == "call":
                self._call_function(*value)
            else:
                return False

    def _call_function(self, function: Callable[[LLM], Any], result: Future[Any]) -> None:
        try:
            result.set_result(function(self._engine))
        except BaseException as error:
            result.set_exception(error)

    @property
    def _engine(self) -> LLM:
        assert self._llm is not None
        return self._llm

    def _add_request(self, request: EngineRequest) -> None:
        if request.aborted:
            return
        try:
            request.group = self._engine.add_request(request.prompt_token_ids, request.params, stream=request.stream)
            self._requests[request.group] = request
        except UserError as error:
            self._fail_request(request, error)
        except Exception as error:  # only this request fails
            self._fail_request(request, _log_request_failure(error))

    def _abort_request(self, request: EngineRequest) -> None:
        request.aborted = True
        if request.group is not None and self._requests.pop(request.group, None) is not None:
            self._engine.abort_group(request.group)
            self._update_stats()

    def _send_deltas(self, updated: list[Request]) -> None:
        now = time.perf_counter()
        deltas: list[tuple[RequestStream, OutputDelta | Exception]] = []
        for completion in updated:
            request = self._requests.get(completion.group) if completion.group is not None else None
            if request is None:
                continue
            try:
                delta = self._build_delta(request, completion, now)
            except Exception as error:  # only this request fails
                self._abort_request(request)
                deltas.append((request.request_stream, _log_request_failure(error)))
                continue
            if delta is not None:
                deltas.append((request.request_stream, delta))
        for completion in updated:  # after all deltas: several completions of a group may end in one step
            if completion.group is not None and completion.group.finished:
                self._num_failures = 0
                self._requests.pop(completion.group, None)
        self._update_stats()  # before the deltas: a client that has its answer finds it counted
        if deltas:
            self._call_in_asyncio(_put_deltas, deltas)

    def _update_stats(self) -> None:
        self.stats = self._stats_counter.snapshot(self._engine, self._commands.qsize())

    def _build_delta(self, request: EngineRequest, completion: Request, now: float) -> OutputDelta | None:
        """Returns the new tokens of a completion; None without streaming until it has finished."""
        i, finish_reason = completion.index, completion.finish_reason
        timing = request.timings[i]
        num_sent = timing.num_output_tokens
        num_new = len(completion.output_token_ids) - num_sent
        timing.record_tokens(num_new, now)
        self._stats_counter.count_tokens(completion, num_new, first=num_sent == 0)
        finished = finish_reason is not None
        index = request.first_index + i
        output = self._engine.build_output(request.group).outputs[i] if finished and request.group is not None else None
        if not request.stream:
            if output is None:
                return None
            return OutputDelta(
                index,
                output.text,
                output.token_ids,
                output.is_draft_token,
                output.logprobs,
                finish_reason,
                output,
                timing,
            )
        detokenizer = completion.detokenizer
        text = "" if detokenizer is None else detokenizer.text if finished else detokenizer.streamable_text
        new_text = text[request.sent_characters[i] :]
        request.sent_characters[i] = max(request.sent_characters[i], len(text))
        is_draft_token = [False] * (num_sent == 0)  # the prefill produces the first token
        for num_accepted in completion.num_accepted_tokens_per_step[request.sent_steps[i] :]:
            is_draft_token += [True] * num_accepted + [False]
        request.sent_steps[i] = len(completion.num_accepted_tokens_per_step)
        is_draft_token = (is_draft_token + [False] * num_new)[:num_new]
        logprobs = completion.logprobs[num_sent:] if completion.params.logprobs is not None else None
        new_token_ids = completion.output_token_ids[num_sent:]
        return OutputDelta(index, new_text, new_token_ids, is_draft_token, logprobs, finish_reason, output, timing)

    def _record_queue_times(self) -> None:
        """Records when requests left the queue. They leave it in order, so the first waiting one ends the search."""
        now = time.perf_counter()
        for request in self._requests.values():
            if request.timings[-1].queue_s is not None:
                continue
            assert request.group is not None
            for completion, timing in zip(request.group.requests, request.timings, strict=True):
                if timing.queue_s is None and completion.state is not RequestState.WAITING:
                    timing.queue_s = now - timing.arrival_time
            if request.timings[-1].queue_s is None:
                break

    # Failure and recovery

    def _build_engine(self) -> None:
        self._llm = self.build_llm()
        self.info = EngineInfo.from_llm(self._llm)
        self._stats_counter.attach_engine(self._llm)
        self.stats = self._stats_counter.snapshot(self._llm, 0)
        if self.state != "draining":
            self.state = "ready"

    def _rebuild_engine(self, error_summary: str) -> None:
        """Fails the running requests, rebuilds the engine, and adds the waiting requests again."""
        self.last_error = error_summary
        self._num_failures += 1
        if self.state == "ready":
            self.state = "restarting"
        waiting = self._fail_running(error_summary)
        self._stats_counter.detach_engine()
        self._llm = None
        gc.unfreeze()  # otherwise reference cycles would keep the old engine's memory
        gc.collect()
        try:
            if self._num_failures >= self.settings.max_consecutive_failures:
                raise RuntimeError(f"{self._num_failures} failures in a row, the last: {error_summary}")
            self._try_to_build_engine()
        except Exception:
            for request in waiting:
                self._fail_request(request, EngineFailedError(self.last_error))
            raise
        log_event("engine rebuilt", level="warning", restarts=self._stats_counter.num_restarts, kept=len(waiting))
        for request in waiting:
            self._add_request(request)

    def _try_to_build_engine(self) -> None:
        for attempt in range(self.settings.max_rebuild_attempts):
            try:
                self._build_engine()
                return
            except Exception as error:
                self.last_error = _summarize(error)
                if attempt + 1 == self.settings.max_rebuild_attempts:
                    raise
                log_event("engine rebuild failed, retrying", level="error", error=self.last_error)
                time.sleep(2.0**attempt)

    def _fail_running(self, error_summary: str) -> list[EngineRequest]:
        """Fails the requests that have started and returns the others, without references to the old engine."""
        waiting = []
        for group, request in self._requests.items():
            if all(r.state is RequestState.WAITING and not r.output_token_ids for r in group.requests):
                waiting.append(request)
            else:
                self._fail_request(request, EngineFailedError(error_summary))
            request.group = None
        self._requests.clear()
        return waiting

    def _fail_request(self, request: EngineRequest, error: Exception) -> None:
        request.aborted = True
        self._call_in_asyncio(_put_deltas, [(request.request_stream, error)])

    def _fail_all(self, error: Exception) -> None:
        for request in list(self._requests.values()):
            if self._llm is not None and request.group is not None:
                self._llm.abort_group(request.group)
            self._fail_request(request, error)
        self._requests.clear()

    def _refuse_commands(self) -> None:
        """Answers the commands that arrive after the engine has failed for good."""
        while True:
            name, value = self._commands.get()
            if name == "stop":
                return
            if name == "add":
                for request in value.requests:
                    self._fail_request(request, EngineUnavailableError("failed"))
            elif name == "call":
                value[1].set_exception(EngineUnavailableError("failed"))

    def _call_in_asyncio(self, callback: Callable[..., object], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            pass  # the event loop is closed


def _put_deltas(deltas: list[tuple[RequestStream, OutputDelta | Exception]]) -> None:
    for request_stream, delta in deltas:
        request_stream.put(delta)


def _log_request_failure(error: Exception) -> EngineFailedError:
    log_event("request failed", level="error", error=_summarize(error), trace=format_traceback(error))
    return EngineFailedError(_summarize(error))


def _summarize(error: BaseException) -> str:
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message}"[:MAX_ERROR_LENGTH] if message else type(error).__name__
