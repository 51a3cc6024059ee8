"""The engine in a thread of its own, and asyncio outside: requests in, pieces of answers out.

Knows nothing about HTTP. Everything that touches the `LLM` runs in the one thread; the others leave it notes in an
inbox, and it leaves pieces in the queue of an `Answer`.

When a step of the engine fails, the requests that it was working on fail with it: one of them may be the cause. Those
that were waiting are kept, the engine is built anew, and they are answered by the new one.
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
from peagle.server.logs import log, where
from peagle.server.pieces import EngineFailed, Overloaded, Piece, Timing, Unavailable
from peagle.server.stats import Counters, EngineStats
from peagle.server.tickets import Answer, Ticket

LONGEST_ERROR = 200
STOP_S = 5.0  # for the step that runs; a model that is being loaded is not waited for

T = TypeVar("T")
LoopState = Literal["starting", "ready", "restarting", "draining", "failed"]


@dataclass(frozen=True)
class EngineFacts:
    """What does not change while the server runs."""

    folder: Path
    max_model_len: int
    vocab_size: int
    most_drafts: int
    method: Literal["p-eagle", "eagle3"] | None
    max_num_seqs: int
    device: str
    dtype: str
    memory: dict[str, int]


class EngineLoop:
    def __init__(self, make_llm: Callable[[], LLM], settings: ServeSettings) -> None:
        self.make_llm, self.settings = make_llm, settings
        self.state: LoopState = "starting"
        self.last_error: str | None = None
        self.refused: BaseException | None = None  # why it did not start
        self.facts: EngineFacts | None = None
        self.open: set[Answer] = set()
        self.began = asyncio.Event()  # ready for the first time, or given up
        self._inbox: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._tickets: dict[RequestGroup, Ticket] = {}
        self._llm: LLM | None = None
        self._counters = Counters()
        self._stats = EngineStats()
        self._failures = 0  # in a row
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)

    # Called from asyncio

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def submit(
        self, prompt_ids: list[int], params: SamplingParams, request_id: str, stream: bool = True
    ) -> Answer:
        return await self.submit_all([prompt_ids], params, request_id, stream)

    async def submit_all(
        self, prompts: Sequence[list[int]], params: SamplingParams, request_id: str, stream: bool = True
    ) -> Answer:
        """Refuses at once what it cannot take: `Overloaded`, `Unavailable`. Answer i * n + j is prompt i's j-th."""
        total = len(prompts) * params.n
        self.check_room(total)
        answer = Answer(total, self.settings.deadline_s, self._closed, self._abandoned)
        now = time.perf_counter()
        for i, prompt_ids in enumerate(prompts):
            timings = [Timing(now) for _ in range(params.n)]
            answer.tickets.append(Ticket(answer, i * params.n, prompt_ids, params, stream, timings))
        self.open.add(answer)
        self._inbox.put(("add", answer))
        return answer

    def check_room(self, answers: int) -> None:
        """Raises if as many more could not be taken now."""
        if self.state not in ("ready", "restarting"):
            raise Unavailable(self.state)
        if sum(a.total for a in self.open) + answers > self.capacity:
            raise Overloaded()

    @property
    def capacity(self) -> int:
        """Answers that may be under way at once."""
        return self.settings.max_queue + (self.facts.max_num_seqs if self.facts is not None else 0)

    def stats(self) -> EngineStats:
        return self._stats

    async def inspect(self, look: Callable[[LLM], T]) -> T:
        """Runs it in the engine's thread, between two steps."""
        done: Future[T] = Future()
        self._inbox.put(("look", (look, done)))
        return await asyncio.wrap_future(done)

    async def prepare(self, grammar: Grammar) -> None:
        """Compiles it, in neither thread: a large one takes a while."""
        if (llm := self._llm) is not None:  # while there is none, `add` will do it
            await asyncio.to_thread(llm.compile_grammar, grammar)

    def drain(self) -> None:
        """From here on new requests are refused; those under way go on."""
        if self.state != "failed":
            self.state = "draining"

    async def stop(self, drain_seconds: float) -> None:
        """Ends the thread, after at most so many seconds for what is under way."""
        self.drain()
        until = time.monotonic() + drain_seconds
        while self.open and self._thread.is_alive() and time.monotonic() < until:
            await asyncio.sleep(0.02)
        self._inbox.put(("stop", None))
        until = time.monotonic() + STOP_S
        while self._thread.is_alive() and time.monotonic() < until:
            await asyncio.sleep(0.02)

    def _closed(self, answer: Answer) -> None:
        self.open.discard(answer)
        answer.timer.cancel()

    def _abandoned(self, answer: Answer) -> None:
        if answer in self.open:
            self._closed(answer)
            self._inbox.put(("abort", answer))

    # The engine's thread

    def _work(self) -> None:
        try:
            self._build()
            self._tell_begun()
            self._turn()
        except BaseException as error:  # its tickets must hear of it, whatever it was
            self.state, self.last_error = "failed", _summary(error)
            self.refused = error
            log("engine gave up", level="error", error=self.last_error)
            self._tell_begun()
            self._end_all(Unavailable("failed"))
            self._refuse_all()

    def _tell_begun(self) -> None:
        self._post(self.began.set)

    def _turn(self) -> None:
        """Notes, a step, pieces; and again."""
        while True:
            assert self._llm is not None
            if not self._read_inbox(wait=not self._llm.has_unfinished_requests):
                self._end_all(Unavailable("draining"))
                return
            failure = None
            try:
                if self._llm.has_unfinished_requests:
                    touched = self._llm.step()
                    self._note_starts()
                    self._hand_out(touched)
                    del touched
            except Exception as error:
                failure = error
            if failure is not None:
                summary = _summary(failure)
                log("engine failed", level="error", error=summary, trace=where(failure))
                failure = None  # its traceback holds the engine's memory
                self._recover(summary)

    def _read_inbox(self, wait: bool) -> bool:
        """False: stop."""
        while True:
            try:
                what, value = self._inbox.get(block=wait)
            except queue.Empty:
                return True
            wait = False
            if what == "add":
                for ticket in value.tickets:
                    self._add(ticket)
            elif what == "abort":
                for ticket in value.tickets:
                    self._abort(ticket)
            elif what == "look":
                self._look(*value)
            else:
                return False

    def _look(self, look: Callable[[LLM], Any], done: Future[Any]) -> None:
        try:
            done.set_result(look(self._engine))
        except BaseException as error:
            done.set_exception(error)

    @property
    def _engine(self) -> LLM:
        assert self._llm is not None
        return self._llm

    def _add(self, ticket: Ticket) -> None:
        if ticket.aborted:
            return
        try:
            ticket.group = self._engine.add_request(ticket.prompt_ids, ticket.params, stream=ticket.stream)
            self._tickets[ticket.group] = ticket
        except Exception as error:  # this request's own: nobody else is touched
            if not isinstance(error, UserError):
                log("request failed", level="error", error=_summary(error), trace=where(error))
            self._fail(ticket, error if isinstance(error, UserError) else EngineFailed(_summary(error)))

    def _abort(self, ticket: Ticket) -> None:
        ticket.aborted = True
        if ticket.group is not None and self._tickets.pop(ticket.group, None) is not None:
            self._engine.abort_group(ticket.group)
            self._count()

    def _hand_out(self, touched: list[Request]) -> None:
        now = time.perf_counter()
        out: list[tuple[Answer, Piece | Exception]] = []
        for request in touched:
            ticket = self._tickets.get(request.group) if request.group is not None else None
            if ticket is None:
                continue
            try:
                piece = self._piece(ticket, request, now)
            except Exception as error:  # text that cannot be made is one request's misfortune
                self._abort(ticket)
                log("request failed", level="error", error=_summary(error), trace=where(error))
                out.append((ticket.answer, EngineFailed(_summary(error))))
                continue
            if piece is not None:
                out.append((ticket.answer, piece))
        for request in touched:  # only now: several answers to a prompt may end in one step
            if request.group is not None and request.group.finished:
                self._failures = 0
                self._tickets.pop(request.group, None)
        self._count()  # who has got an answer finds it counted
        if out:
            self._post(_deliver, out)

    def _count(self) -> None:
        self._stats = self._counters.snapshot(self._engine, self._inbox.qsize())

    def _piece(self, ticket: Ticket, request: Request, now: float) -> Piece | None:
        i, ended = request.index, request.finish_reason is not None
        timing = ticket.timings[i]
        sent = timing.tokens
        gained = len(request.output_token_ids) - sent
        timing.gained(gained, now)
        self._counters.gained(request, gained, first=sent == 0)
        if not ended and not ticket.stream:
            return None
        output = self._engine.build_output(ticket.group).outputs[i] if ended and ticket.group is not None else None
        index, reason = ticket.first_index + i, request.finish_reason
        if not ticket.stream:
            assert output is not None
            return Piece(
                index, output.text, output.token_ids, output.is_draft_token, output.logprobs, reason, output, timing
            )
        text = request.detokenizer
        shown = "" if text is None else text.text if ended else text.showable
        new_text = shown[ticket.shown[i] :]
        ticket.shown[i] = max(ticket.shown[i], len(shown))
        flags = [False] * (sent == 0)  # the first token came from the prompt's own pass
        for accepted in request.num_accepted_tokens_per_step[ticket.rounds[i] :]:
            flags += [True] * accepted + [False]
        ticket.rounds[i] = len(request.num_accepted_tokens_per_step)
        flags = (flags + [False] * gained)[:gained]
        logprobs = request.logprobs[sent:] if request.params.logprobs is not None else None
        return Piece(index, new_text, request.output_token_ids[sent:], flags, logprobs, reason, output, timing)

    def _note_starts(self) -> None:
        """Times at which requests left the queue. They leave it in order, so the first that has not ends the search."""
        now = time.perf_counter()
        for ticket in self._tickets.values():
            if ticket.timings[-1].queue_s is not None:
                continue
            assert ticket.group is not None
            for request, timing in zip(ticket.group.requests, ticket.timings, strict=True):
                if timing.queue_s is None and request.state is not RequestState.WAITING:
                    timing.queue_s = now - timing.arrived
            if ticket.timings[-1].queue_s is None:
                break

    # When it fails

    def _build(self) -> None:
        llm = self.make_llm()
        self._llm = llm
        drafter = llm.drafter
        self.facts = EngineFacts(
            folder=llm.target.folder,
            max_model_len=llm.max_model_len,
            vocab_size=llm.target.model.cfg.vocab_size,
            most_drafts=llm.scheduler.max_speculative_tokens,
            method=None if drafter is None else "p-eagle" if drafter.cfg.parallel else "eagle3",
            max_num_seqs=llm.scheduler.max_num_seqs,
            device=str(llm.model_runner.device),
            dtype=llm.dtype,
            memory=llm.memory_bytes(),
        )
        self._counters.began(llm)
        self._stats = self._counters.snapshot(llm, 0)
        if self.state != "draining":
            self.state = "ready"

    def _recover(self, summary: str) -> None:
        """Fails what was being worked on, builds the engine anew and hands it what was waiting."""
        self.last_error = summary
        self._failures += 1
        if self.state == "ready":
            self.state = "restarting"
        waiting = self._keep_waiting(summary)
        self._counters.restarted()
        self._llm = None
        gc.unfreeze()  # or what the engine held in circles would stay for ever
        gc.collect()
        if self._failures >= self.settings.failures:
            for ticket in waiting:
                self._fail(ticket, EngineFailed(summary))
            raise RuntimeError(f"{self._failures} failures in a row, the last: {summary}")
        for turn in range(self.settings.rebuilds):
            try:
                self._build()
                break
            except Exception as error:
                self.last_error = _summary(error)
                if turn + 1 == self.settings.rebuilds:
                    for ticket in waiting:
                        self._fail(ticket, EngineFailed(self.last_error))
                    raise
                log("engine could not be rebuilt, trying again", level="error", error=self.last_error)
                time.sleep(2.0**turn)
        log("engine rebuilt", level="warning", restarts=self._counters.restarts, kept=len(waiting))
        for ticket in waiting:
            self._add(ticket)

    def _keep_waiting(self, summary: str) -> list[Ticket]:
        """Fails the requests that were begun; the others, and no way from any of them to the old engine."""
        waiting = []
        for group, ticket in self._tickets.items():
            if all(r.state is RequestState.WAITING and not r.output_token_ids for r in group.requests):
                waiting.append(ticket)
            else:
                self._fail(ticket, EngineFailed(summary))
            ticket.group = None
        self._tickets.clear()
        return waiting

    def _fail(self, ticket: Ticket, error: Exception) -> None:
        ticket.aborted = True
        self._post(_deliver, [(ticket.answer, error)])

    def _end_all(self, error: Exception) -> None:
        for ticket in list(self._tickets.values()):
            if self._llm is not None and ticket.group is not None:
                self._llm.abort_group(ticket.group)
            self._fail(ticket, error)
        self._tickets.clear()

    def _refuse_all(self) -> None:
        """What comes in after the engine was given up."""
        while True:
            what, value = self._inbox.get()
            if what == "stop":
                return
            if what == "add":
                for ticket in value.tickets:
                    self._fail(ticket, Unavailable("failed"))
            elif what == "look":
                value[1].set_exception(Unavailable("failed"))

    def _post(self, call: Callable[..., object], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *args)
        except RuntimeError:
            pass  # asyncio is gone: nobody is left to hear it


def _deliver(out: list[tuple[Answer, Piece | Exception]]) -> None:
    for answer, piece in out:
        answer.put(piece)


def _summary(error: BaseException) -> str:
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said}"[:LONGEST_ERROR] if said else type(error).__name__
