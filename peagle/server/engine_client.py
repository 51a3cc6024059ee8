"""The front end's side of the engine process: starts it, sends requests, hands its deltas to their streams.

When the engine process ends unexpectedly, the requests in work fail with it, because one of them may be the cause. The
waiting requests are kept, a new process is started, and it serves them.
"""

import asyncio
import multiprocessing
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import zip_longest
from multiprocessing.process import BaseProcess
from typing import Literal

import msgspec

from peagle.config import SamplingParams, ServeSettings
from peagle.engine.detokenizer import Detokenizer
from peagle.engine.llm import LLM
from peagle.errors import UserError
from peagle.server.engine_core import run_engine_process
from peagle.server.engine_messages import (
    AbortRequest,
    Command,
    EngineCounters,
    EngineFailed,
    EngineInfo,
    EngineMessage,
    EngineReady,
    MessageReader,
    RequestFailed,
    StepOutput,
    encode_message,
)
from peagle.server.errors import QUEUE_FULL, UNREADY, EngineFailedError, EngineUnavailableError, QueueFullError
from peagle.server.logs import log_event
from peagle.server.request_stream import Completion, EngineRequest, RequestStream

STOP_TIMEOUT_S = 5.0  # for the running step; then the process is killed
POLL_S = 0.02
STREAM_INTERVAL_S = 1e-4  # between two chunks of a stream, for each stream: writing a chunk takes this long
MIN_DELAY_S = 0.002  # shorter ones are left out
SUMMED_COUNTERS = (  # over engines
    *("num_draft_tokens", "num_preemptions", "num_prefix_cache_hits", "num_prefix_cache_queries"),
    "num_late_compilations",
)

EngineState = Literal["starting", "ready", "restarting", "draining", "failed"]


def start_engine_process(build_llm: Callable[[], LLM], log_json: bool, sock: socket.socket) -> BaseProcess:
    context = multiprocessing.get_context("spawn")  # a fork would share threads and CUDA with the front end
    process = context.Process(target=run_engine_process, args=(build_llm, sock, log_json), name="engine", daemon=True)
    process.start()
    return process


class EngineStats(EngineCounters):
    """Current values, and counts since the server started, over all engine processes."""

    num_requests_waiting: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_decode_steps: int = 0  # summed over requests
    num_restarts: int = 0

    @property
    def num_accepted_tokens_per_pos(self) -> list[int]:
        drafts = self.acceptance_histogram
        return [sum(drafts[i:]) for i in range(1, len(drafts))]


class EngineConnection(asyncio.Protocol):
    """The front end's end of the socket."""

    def __init__(self, on_message: Callable[[EngineMessage], None]) -> None:
        self.on_message = on_message
        self.closed = asyncio.Event()
        self._reader = MessageReader(EngineMessage)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        for message in self._reader.feed(data):
            self.on_message(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()

    def send(self, message: msgspec.Struct) -> None:
        """Drops the message if the engine has ended: the next one gets all open requests."""
        if not self.transport.is_closing():
            self.transport.write(encode_message(message))


class EngineClient:
    def __init__(self, start_engine: Callable[[socket.socket], BaseProcess], settings: ServeSettings) -> None:
        """`start_engine` starts an engine that serves a socket."""
        self.settings = settings
        self.state: EngineState = "starting"
        self.info: EngineInfo | None = None
        self.last_error: str | None = None
        self.fatal_error: Exception | None = None
        self.open_streams: set[RequestStream] = set()
        self.on_rejection: Callable[[str], None] = lambda reason: None  # is told why a request is refused
        self.started = asyncio.Event()  # the engine is ready for the first time, or has failed
        self._start_engine = start_engine
        self._engine: BaseProcess | None = None
        self._connection: EngineConnection | None = None  # of an engine that is ready
        self._requests: dict[int, EngineRequest] = {}
        self._num_preparing = 0  # completions whose request is being prepared
        self._updated: dict[Completion, RequestStream] = {}  # with tokens that their stream has not been notified of
        self._notification: asyncio.TimerHandle | None = None
        self._error: EngineFailed | None = None  # of the current engine
        self._num_failures = 0  # in a row
        self._num_restarts = 0
        self._num_prompt_tokens = self._num_output_tokens = self._num_decode_steps = 0
        self._counters = EngineCounters()
        self._previous_counters = EngineCounters()  # sums over engines that have ended

    # Requests

    def submit(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        new_detokenizer: Callable[[], Detokenizer],
        stream: bool,
        deadline: float,
    ) -> RequestStream:
        """Queues prompts within `reserve`. Completion j of prompt i has index i * n + j."""
        self.check_state()
        request_stream = RequestStream(len(prompts) * params.n, stream, deadline, self._abort_stream)
        now = time.perf_counter()
        for i, prompt_token_ids in enumerate(prompts):
            indices = range(i * params.n, (i + 1) * params.n)
            completions = [Completion(index, params, new_detokenizer(), now) for index in indices]
            request = EngineRequest(request_stream, prompt_token_ids, params, completions)
            request_stream.requests.append(request)
            self._requests[request.id] = request
            self._send(request.command)
        self.open_streams.add(request_stream)
        return request_stream

    def reserve(self, num_completions: int) -> AbstractContextManager[None]:
        """Keeps places for completions while their request is prepared. Raises if the engine cannot take them now."""
        self.check_state()
        num_open = sum(stream.num_completions for stream in self.open_streams)
        if num_open + self._num_preparing + num_completions > self.max_completions:
            self.on_rejection(QUEUE_FULL)
            raise QueueFullError()
        return self._prepare(num_completions)

    @contextmanager
    def _prepare(self, num_completions: int) -> Iterator[None]:
        self._num_preparing += num_completions
        try:
            yield
        finally:
            self._num_preparing -= num_completions

    def check_state(self) -> None:
        if self.state not in ("ready", "restarting"):
            self.on_rejection(UNREADY)
            raise EngineUnavailableError(self.state)

    @property
    def max_completions(self) -> int:
        """Completions that may run or wait at once."""
        return self.settings.max_queued_requests + (self.info.max_num_seqs if self.info is not None else 0)

    def _close_stream(self, request_stream: RequestStream) -> None:
        self.open_streams.discard(request_stream)
        request_stream.timeout.cancel()
        for request in request_stream.requests:
            self._requests.pop(request.id, None)

    def _abort_stream(self, request_stream: RequestStream) -> None:
        if request_stream in self.open_streams:
            for request in request_stream.requests:
                if request.num_unfinished:
                    self._send(AbortRequest(request.id))
            self._close_stream(request_stream)

    def _send(self, command: Command) -> None:
        """Sends to an engine that is ready. One that becomes ready later gets all open requests then."""
        if self._connection is not None:
            self._connection.send(command)

    # Messages of the engine

    def _handle_message(self, message: EngineMessage) -> None:
        if isinstance(message, StepOutput):
            self._handle_step(message)
        elif isinstance(message, RequestFailed):
            request = self._requests.get(message.request_id)
            if request is not None:
                self._notify_updated()
                error = UserError(message.error) if message.is_user_error else EngineFailedError()
                request.request_stream.fail(error)
        elif isinstance(message, EngineReady):
            self._handle_ready(message)
        else:
            self._error = message

    def _handle_step(self, step: StepOutput) -> None:
        self._counters = step.counters
        for request_id, index in step.started:
            if (request := self._requests.get(request_id)) is not None:
                completion = request.completions[index]
                request.started, completion.queue_s = True, step.time - completion.arrival_time
        for delta in step.deltas:
            request = self._requests.get(delta.request_id)
            if request is None:
                continue  # it was aborted
            completion = request.completions[delta.index]
            if completion.finish_reason is not None:
                continue  # a stop string has ended it
            num_tokens, num_decode_steps = len(completion.token_ids), completion.num_decode_steps
            finished = completion.add(delta, step.time)
            self._num_output_tokens += len(completion.token_ids) - num_tokens
            self._num_decode_steps += delta.num_decode_steps - num_decode_steps
            if num_tokens == 0 and delta.index == 0:
                self._num_prompt_tokens += request.num_prompt_tokens
            if finished:
                if delta.finish_reason is None:  # by a stop string, which the engine does not know
                    self._send(AbortRequest(request.id, delta.index))
                self._finish_completion(request)
            if finished or num_tokens == 0:
                request.request_stream.notify(completion)
            else:
                self._updated[completion] = request.request_stream
        self._notify_later()

    def _notify_later(self) -> None:
        """Notifies the streams of new tokens: at once if they are few, otherwise less often the more they are."""
        delay = STREAM_INTERVAL_S * len(self.open_streams)
        if delay < MIN_DELAY_S:
            self._notify_updated()
        elif self._updated and self._notification is None:
            self._notification = asyncio.get_running_loop().call_later(delay, self._notify_updated)

    def _notify_updated(self) -> None:
        self._notification = None
        updated, self._updated = self._updated, {}
        for completion, stream in updated.items():
            if completion.finish_reason is None:  # otherwise its stream has been notified
                stream.notify(completion)

    def _finish_completion(self, request: EngineRequest) -> None:
        self._num_failures = 0
        request.num_unfinished -= 1
        if request.num_unfinished == 0:
            del self._requests[request.id]
        stream = request.request_stream
        stream.num_unfinished -= 1
        if stream.num_unfinished == 0:
            self._close_stream(stream)

    def _handle_ready(self, message: EngineReady) -> None:
        self.info, self._counters = message.info, message.counters
        self._connection = self._current_connection
        if self.state != "draining":
            self.state = "ready"
        for request in self._requests.values():
            self._connection.send(request.command)
        if self._num_restarts:
            log_event("engine restarted", level="warning", restarts=self._num_restarts, kept=len(self._requests))
        self.started.set()

    # Start, restart, stop

    def start(self) -> None:
        self._supervisor = asyncio.ensure_future(self._supervise())

    async def _supervise(self) -> None:
        """Starts the engine, and starts it again when it ends."""
        num_failed_starts = 0
        while True:
            await self._run_engine()
            was_ready = self._connection is not None
            self._connection = None
            exitcode = self._engine.exitcode if self._engine is not None else None
            if self._error is not None:
                self.last_error = self._error.error
            elif exitcode is not None and exitcode < 0:
                self.last_error = f"the engine process was killed by {signal.Signals(-exitcode).name}"
            else:
                self.last_error = f"the engine process ended with status {exitcode}"
            num_failed_starts = 0 if was_ready else num_failed_starts + 1
            self._num_failures += was_ready
            self._num_restarts += was_ready
            self._previous_counters, self._counters = self.stats, EngineCounters()
            started = {request.request_stream for request in self._requests.values() if request.started}
            self._fail_streams(started, EngineFailedError())
            if self.info is None or num_failed_starts >= self.settings.max_rebuild_attempts:
                break
            if self._num_failures >= self.settings.max_consecutive_failures:
                self.last_error = f"{self._num_failures} failures in a row, the last: {self.last_error}"
                break
            if self.state == "ready":
                self.state = "restarting"
            log_event("engine ended, restarting", level="error", error=self.last_error)
            await asyncio.sleep(2.0 ** (num_failed_starts - 1) if num_failed_starts else 0.0)
        self.state = "failed"
        is_user_error = self._error is not None and self._error.is_user_error
        self.fatal_error = UserError(self.last_error) if is_user_error else RuntimeError(self.last_error)
        if not is_user_error:  # the command line reports those
            log_event("engine failed for good", level="error", error=self.last_error)
        self._fail_streams(self.open_streams, EngineUnavailableError("failed"))
        self.started.set()

    async def _run_engine(self) -> None:
        """Starts an engine and returns when it has ended."""
        self._error = None
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        loop = asyncio.get_running_loop()
        _, self._current_connection = await loop.create_connection(
            lambda: EngineConnection(self._handle_message), sock=ours
        )
        try:
            self._engine = self._start_engine(theirs)
            theirs.close()  # the engine has its own copy, so that its end closes the connection
            await self._current_connection.closed.wait()
            await self._end_process(STOP_TIMEOUT_S)  # it closes the connection last
        finally:
            self._current_connection.transport.close()

    async def _end_process(self, timeout_s: float) -> None:
        """Waits until the engine process has ended. Kills it after some time."""
        deadline = time.monotonic() + timeout_s
        while self._engine is not None and self._engine.is_alive():
            if time.monotonic() > deadline:
                self._engine.kill()
            await asyncio.sleep(POLL_S)

    def _fail_streams(self, streams: set[RequestStream], error: Exception) -> None:
        self._notify_updated()
        for stream in list(streams):
            stream.fail(error)
            self._close_stream(stream)

    def drain(self) -> None:
        """Refuses new requests from now on; running ones continue."""
        if self.state != "failed":
            self.state = "draining"

    async def stop(self) -> None:
        """Ends the engine. Requests that are still open get an error."""
        self.drain()
        self._supervisor.cancel()
        self._fail_streams(self.open_streams, EngineUnavailableError("draining"))
        await self._end_process(STOP_TIMEOUT_S if self._connection is not None else 0.0)

    @property
    def stats(self) -> EngineStats:
        current, previous = self._counters, self._previous_counters
        histograms = zip_longest(current.acceptance_histogram, previous.acceptance_histogram, fillvalue=0)
        num_unfinished = sum(stream.num_unfinished for stream in self.open_streams)
        return EngineStats(
            num_requests_running=current.num_requests_running,
            num_requests_waiting=max(num_unfinished - current.num_requests_running, 0) + self._num_preparing,
            kv_cache_usage=current.kv_cache_usage,
            acceptance_histogram=[sum(counts) for counts in histograms],
            num_prompt_tokens=self._num_prompt_tokens,
            num_output_tokens=self._num_output_tokens,
            num_decode_steps=self._num_decode_steps,
            num_restarts=self._num_restarts,
            **{name: getattr(current, name) + getattr(previous, name) for name in SUMMED_COUNTERS},
        )
