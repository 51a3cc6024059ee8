"""A request on its way through the engine loop, and the stream of its output.

`EngineRequest` objects belong to the engine's thread, a `RequestStream` to asyncio's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from peagle.config import SamplingParams
from peagle.engine.request import CompletionOutput, RequestGroup


class QueueFullError(Exception):
    """The queue of waiting requests is full."""


class EngineUnavailableError(Exception):
    """The engine takes no requests. The message is its state."""


class RequestTimeoutError(Exception):
    """The request did not finish within the server's time limit."""


class EngineFailedError(Exception):
    """The engine failed while it worked on this request."""


@dataclass
class CompletionTiming:
    """Times of one completion in seconds since its arrival. Only the engine's thread writes them."""

    arrival_time: float
    queue_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    token_gaps_s: list[float] = field(default_factory=list)  # between steps that produced tokens
    num_output_tokens: int = 0

    def record_tokens(self, num_new_tokens: int, now: float) -> None:
        elapsed = now - self.arrival_time
        if self.last_token_s is None:
            self.first_token_s = elapsed
        else:
            self.token_gaps_s.append(elapsed - self.last_token_s)
        self.last_token_s = elapsed
        self.num_output_tokens += num_new_tokens


@dataclass(frozen=True)
class OutputDelta:
    """What one engine step adds to a completion. Without streaming, one delta holds the whole completion."""

    index: int  # of the completion within its HTTP request
    text: str
    token_ids: list[int]
    is_draft_token: list[bool]  # per token: an accepted draft token
    logprobs: list[dict[int, float]] | None
    finish_reason: str | None
    output: CompletionOutput | None = None  # in the last delta
    timing: CompletionTiming | None = None


@dataclass(eq=False)
class EngineRequest:
    """One prompt in the engine, with n completions."""

    request_stream: RequestStream
    first_index: int  # of its completions within the HTTP request
    prompt_token_ids: list[int]
    params: SamplingParams
    stream: bool
    timings: list[CompletionTiming]  # one per completion
    group: RequestGroup | None = None
    sent_characters: list[int] = field(default_factory=list)  # per completion
    sent_steps: list[int] = field(default_factory=list)  # per completion: decode steps already sent
    aborted: bool = False

    def __post_init__(self) -> None:
        self.sent_characters, self.sent_steps = [0] * self.params.n, [0] * self.params.n


class RequestStream:
    """Async iterator over the output deltas of an HTTP request. `aclose` aborts the rest."""

    def __init__(
        self,
        num_completions: int,
        timeout_s: float,
        on_finished: Callable[[RequestStream], None],
        on_abort: Callable[[RequestStream], None],
    ) -> None:
        """`on_finished` is called when the engine has delivered everything, `on_abort` by `aclose`."""
        self.num_completions = num_completions
        self.requests: list[EngineRequest] = []
        self._on_finished, self._on_abort = on_finished, on_abort
        self._num_unread = num_completions  # completions whose last delta was not read yet
        self._num_unfinished = num_completions  # completions that the engine still works on
        self._deltas: asyncio.Queue[OutputDelta | Exception] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        self.timeout = loop.call_later(timeout_s, self._deltas.put_nowait, RequestTimeoutError())

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> OutputDelta:
        if self._num_unread == 0:
            raise StopAsyncIteration
        delta = await self._deltas.get()
        if isinstance(delta, Exception):
            await self.aclose()
            raise delta
        self._num_unread -= delta.finish_reason is not None
        return delta

    async def aclose(self) -> None:
        self._on_abort(self)

    def put(self, delta: OutputDelta | Exception) -> None:
        """Queues a delta, in asyncio's thread. A client that reads slowly holds no resources of the engine."""
        self._deltas.put_nowait(delta)
        self._num_unfinished -= isinstance(delta, OutputDelta) and delta.finish_reason is not None
        if self._num_unfinished == 0:
            self._on_finished(self)

    @property
    def timings(self) -> list[CompletionTiming]:
        return [timing for request in self.requests for timing in request.timings]
