"""A request in the front end: the tokens and times that the engine sends become text that the response reads.

The engine's deltas are merged until the response takes them, so that a client that reads slowly gets fewer and larger
chunks, and costs the engine nothing.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass

from peagle.config import SamplingParams
from peagle.engine.detokenizer import Detokenizer
from peagle.server.engine_messages import AddRequest, CompletionDelta
from peagle.server.errors import EngineFailedError, RequestTimeoutError, invalid_value

_request_ids = itertools.count()


@dataclass(frozen=True)
class OutputDelta:
    """New text and tokens of a completion. Without streaming, one delta holds the whole completion."""

    index: int  # of the completion within its HTTP request
    text: str
    token_ids: list[int]
    is_draft_token: list[bool]  # per token: an accepted draft token
    logprobs: list[dict[int, float]] | None
    finish_reason: str | None  # in the last delta
    completion: Completion


class Completion:
    """One completion of a request: merges deltas, detokenizes them and finds stop strings."""

    def __init__(self, index: int, params: SamplingParams, detokenizer: Detokenizer, arrival_time: float) -> None:
        self.index, self.params, self.arrival_time = index, params, arrival_time
        # In seconds since the arrival.
        self.queue_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.token_gaps_s: list[float] = []  # between steps that produced tokens
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.accepted_per_step: list[int] = []  # accepted draft tokens of each decode step
        self.num_decode_steps = self.num_drafts = 0
        self.queued = False  # it is in its stream's queue
        self._detokenizer = detokenizer
        self._logprobs: list[dict[int, float]] = []
        self._is_draft_token: list[bool] = []
        self._num_taken_tokens = self._num_taken_chars = 0
        self._num_detokenized = 0
        self._ends_with_stop_token = False

    def add(self, delta: CompletionDelta, time: float) -> bool:
        """Adds what the engine sent in the step of this time. Returns True if the completion has finished."""
        flags = [False] if not self.token_ids else []  # the first token comes from the prefill
        for num_accepted in delta.num_accepted_per_step:
            flags += [True] * num_accepted + [False]
        num_new = len(delta.token_ids)
        self._is_draft_token += (flags + [False] * num_new)[:num_new]
        self.token_ids += delta.token_ids
        self._logprobs += delta.logprobs or ()
        self.accepted_per_step += delta.num_accepted_per_step
        self.num_decode_steps, self.num_drafts = delta.num_decode_steps, delta.num_drafts
        for step_time in (*delta.earlier_times, time):
            elapsed = step_time - self.arrival_time
            if self.last_token_s is None:
                self.first_token_s = elapsed
            else:
                self.token_gaps_s.append(elapsed - self.last_token_s)
            self.last_token_s = elapsed
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        self._ends_with_stop_token = delta.ends_with_stop_token
        if self.params.stop:  # a stop string finishes the completion here: the engine knows no text
            self._detokenize()
        return self.finish_reason is not None

    def _detokenize(self) -> None:
        new_tokens = self.token_ids[self._num_detokenized : len(self.token_ids) - self._ends_with_stop_token]
        self._num_detokenized += len(new_tokens)
        if self.params.stop:
            for i, token in enumerate(new_tokens, 1 + self._num_detokenized - len(new_tokens)):
                if self._detokenizer.add_token(token):
                    self.finish_reason, self.stop_reason = "stop", self._detokenizer.stop_reason
                    for per_token in (self.token_ids, self._logprobs, self._is_draft_token):
                        del per_token[i:]
                    return
        elif new_tokens:
            self._detokenizer.add_tokens(new_tokens)
        if self.finish_reason is not None:
            self._detokenizer.finish()

    def take(self) -> OutputDelta:
        """Returns what was added since the last call."""
        if not self.params.stop:
            self._detokenize()
        begin = self._num_taken_tokens
        text = self._detokenizer.streamable_text if self.finish_reason is None else self._detokenizer.text
        new_text = text[self._num_taken_chars :]
        self._num_taken_chars = max(self._num_taken_chars, len(text))
        self._num_taken_tokens = len(self.token_ids)
        return OutputDelta(
            self.index,
            new_text,
            self.token_ids[begin:],
            self._is_draft_token[begin:],
            self._logprobs[begin:] if self.params.logprobs is not None else None,
            self.finish_reason,
            self,
        )


class EngineRequest:
    """One prompt, with n completions."""

    def __init__(
        self, stream: RequestStream, prompt_token_ids: list[int], params: SamplingParams, completions: list[Completion]
    ) -> None:
        self.id, self.num_prompt_tokens = next(_request_ids), len(prompt_token_ids)
        self.request_stream, self.completions = stream, completions
        self.started = False  # the engine works on it
        self.num_unfinished = len(completions)
        every_step = stream.streams or bool(params.stop)
        self.command = AddRequest(self.id, prompt_token_ids, params.without_text(), every_step)


class RequestStream:
    """Async iterator over the output of an HTTP request. `aclose` aborts the rest."""

    def __init__(
        self, num_completions: int, stream: bool, deadline: float, on_abort: Callable[[RequestStream], None]
    ) -> None:
        """`stream`: yields the output as it grows, instead of once per completion. `deadline`: in the loop's time."""
        self.requests: list[EngineRequest] = []
        self.num_completions = self.num_unfinished = num_completions  # unfinished: the engine still works on them
        self.num_unread = num_completions  # whose last delta was not read yet
        self.client_watcher: asyncio.Task[None] | None = None  # fails the stream when its client disconnects
        self.streams, self._on_abort = stream, on_abort
        self._updates: asyncio.Queue[Completion | Exception] = asyncio.Queue()
        self.deadline = deadline
        self.timeout = asyncio.get_running_loop().call_at(deadline, self.fail, RequestTimeoutError())

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> OutputDelta:
        if self.num_unread == 0:
            raise StopAsyncIteration
        update = await self._updates.get()
        if isinstance(update, Exception):
            await self.aclose()
            raise update
        update.queued = False
        self.num_unread -= update.finish_reason is not None
        if update.finish_reason == "error":  # the grammar allows no further token, or the target's logits are NaN
            reason = str(update.stop_reason)
            if not reason.startswith("grammar: "):
                raise EngineFailedError()
            raise invalid_value("response_format", f"the output cannot continue ({reason})", "cannot_be_followed")
        return update.take()

    async def aclose(self) -> None:
        if self.client_watcher is not None:
            self.client_watcher.cancel()
        self._on_abort(self)

    def notify(self, completion: Completion) -> None:
        """A completion has new tokens or has finished."""
        if not completion.queued and (self.streams or completion.finish_reason is not None):
            completion.queued = True
            self._updates.put_nowait(completion)

    def fail(self, error: Exception) -> None:
        self._updates.put_nowait(error)
