"""The engine process: runs `LLM.step` in a loop, and exchanges messages with the front end between steps.

Text never reaches this process: it gets and sends token ids. HTTP, templates, tokenization, detokenization, JSON and
request logs are the front end's, so they cannot delay a step.

When a step fails, the process ends, because the state of the GPU is unknown then. The front end starts a new one.
"""

import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from peagle.engine.llm import LLM
from peagle.engine.request import Request, RequestGroup, RequestState
from peagle.errors import UserError
from peagle.kernels.triton_utils import watch_compilations
from peagle.server.engine_messages import (
    AbortRequest,
    AddRequest,
    CompletionDelta,
    EngineChannel,
    EngineCounters,
    EngineFailed,
    EngineInfo,
    EngineReady,
    RequestFailed,
    StepOutput,
)
from peagle.server.logs import format_traceback, log_event, start_logging

MAX_ERROR_LENGTH = 200
NUM_GRAMMAR_THREADS = 2
FAIL_ON_COMPILATION = "PEAGLE_FAIL_ON_COMPILATION"  # environment variable of tests and benchmarks
GRAMMAR_POLL_S = 0.005  # an idle engine looks for compiled grammars this often, if any is being compiled


@dataclass
class SentState:
    """What the front end has of a completion."""

    num_tokens: int = 0
    num_steps_with_drafter: int = 0
    earlier_times: list[float] = field(default_factory=list)  # of steps whose tokens were not sent yet


@dataclass(eq=False)
class ActiveRequest:
    """A prompt in the engine, with n completions."""

    command: AddRequest
    group: RequestGroup
    sent: list[SentState]  # per completion
    num_started: int = 0  # completions that have left the queue


class EngineCore:
    def __init__(self, llm: LLM, channel: EngineChannel) -> None:
        self.llm, self.channel = llm, channel
        self._requests: dict[int, ActiveRequest] = {}  # by request id
        self._by_group: dict[RequestGroup | None, ActiveRequest] = {}
        self._not_started: dict[int, ActiveRequest] = {}  # requests with a completion in the queue, oldest first
        self._compiling: dict[int, tuple[AddRequest, Future[Any]]] = {}
        self._grammar_threads = ThreadPoolExecutor(NUM_GRAMMAR_THREADS, thread_name_prefix="grammar")
        self.num_late_compilations = 0
        watch_compilations(self._report_compilation)

    def run(self) -> None:
        """The central loop: run commands, run one engine step, send its deltas. `ConnectionError` ends it."""
        while True:
            self.run_commands()
            if self.llm.has_unfinished_requests:
                self._send_step(self.llm.step())

    def _report_compilation(self, kernel: str) -> None:
        """A kernel that is compiled now delays all requests by seconds."""
        self.num_late_compilations += 1
        log_event("kernel compiled after the start", level="warning", kernel=kernel)
        if os.environ.get(FAIL_ON_COMPILATION) == "1":
            raise RuntimeError(f"{FAIL_ON_COMPILATION}: kernel {kernel} was compiled after the start")

    def run_commands(self) -> None:
        """Runs the commands that have arrived; waits for one if there is nothing else to do."""
        idle_timeout = GRAMMAR_POLL_S if self._compiling else None
        aborted = False
        for command in self.channel.receive(0.0 if self.llm.has_unfinished_requests else idle_timeout):
            if isinstance(command, AbortRequest):
                self._abort(command.request_id, command.index)
                aborted = True
            elif command.params.grammar is None:
                self._add(command)
            else:  # a large grammar takes about a second
                compilation = self._grammar_threads.submit(self.llm.compile_grammar, command.params.grammar)
                self._compiling[command.request_id] = command, compilation
        for request_id, (add_command, compilation) in list(self._compiling.items()):
            if compilation.done():
                del self._compiling[request_id]
                error = compilation.exception()
                if error is None:
                    self._add(add_command)
                else:
                    self._fail(request_id, error)
        if aborted and not self.llm.has_unfinished_requests:
            self._send_step([])  # the counters have changed

    def _add(self, command: AddRequest) -> None:
        try:
            group = self.llm.add_request(command.prompt_token_ids, command.params)
        except Exception as error:  # only this request fails
            self._fail(command.request_id, error)
            return
        request = ActiveRequest(command, group, [SentState() for _ in group.requests])
        self._requests[command.request_id] = self._by_group[group] = request
        self._not_started[command.request_id] = request

    def _fail(self, request_id: int, error: BaseException) -> None:
        self.channel.send(RequestFailed(request_id, *report_error("request failed", error)))

    def _abort(self, request_id: int, index: int | None) -> None:
        _, compilation = self._compiling.pop(request_id, (None, None))
        if compilation is not None:
            compilation.cancel()
        request = self._requests.get(request_id)
        if request is not None:
            self.llm.abort_group(request.group, index)
            if request.group.finished:
                self._forget(request)

    def _forget(self, request: ActiveRequest) -> None:
        del self._requests[request.command.request_id], self._by_group[request.group]
        self._not_started.pop(request.command.request_id, None)

    def _send_step(self, updated: list[Request]) -> None:
        now = time.perf_counter()
        started = self._find_started()
        requests = [(request, c) for c in updated if (request := self._by_group.get(c.group)) is not None]
        deltas = [delta for request, c in requests if (delta := _build_delta(request, c, now)) is not None]
        for request in dict.fromkeys(request for request, _ in requests):
            if request.group.finished:
                self._forget(request)
        if deltas or started or not updated:
            self.channel.send(StepOutput(now, deltas, started, self.read_counters()))

    def _find_started(self) -> list[tuple[int, int]]:
        """Completions that have left the queue. They leave it in order, so the first waiting one ends the search."""
        started: list[tuple[int, int]] = []
        for request_id, request in list(self._not_started.items()):
            completions = request.group.requests
            while request.num_started < len(completions):
                if completions[request.num_started].state is RequestState.WAITING:
                    return started
                started.append((request_id, request.num_started))
                request.num_started += 1
            del self._not_started[request_id]
        return started

    def read_counters(self) -> EngineCounters:
        scheduler = self.llm.scheduler
        pool = scheduler.pool
        return EngineCounters(
            len(scheduler.running),
            1 - pool.num_free_blocks / (pool.num_blocks - 1),
            self.llm.acceptance_histogram,
            self.llm.num_draft_tokens,
            scheduler.num_preemptions,
            pool.num_hit_tokens,
            pool.num_queried_tokens,
            self.num_late_compilations,
        )


def _build_delta(request: ActiveRequest, completion: Request, now: float) -> CompletionDelta | None:
    """The tokens that the front end does not have yet; None if they are to be sent with the last ones."""
    sent, finish_reason = request.sent[completion.index], completion.finish_reason
    if finish_reason is None and not request.command.send_every_step:
        sent.earlier_times.append(now)
        return None
    token_ids = completion.output_token_ids[sent.num_tokens :]
    delta = CompletionDelta(
        request.command.request_id,
        completion.index,
        token_ids,
        completion.num_accepted_tokens_per_step[sent.num_steps_with_drafter :],
        completion.num_decode_steps,
        completion.num_drafts,
        sent.earlier_times,
        completion.logprobs[sent.num_tokens :] if completion.params.logprobs is not None else None,
        finish_reason,
        completion.stop_reason,
        finish_reason == "stop" and bool(token_ids) and token_ids[-1] in completion.stop_token_ids,
    )
    sent.num_tokens += len(token_ids)
    sent.num_steps_with_drafter = len(completion.num_accepted_tokens_per_step)
    sent.earlier_times = []
    return delta


def build_engine_info(llm: LLM) -> EngineInfo:
    drafter = llm.drafter
    return EngineInfo(
        target_folder=str(llm.target.folder),
        max_model_len=llm.max_model_len,
        vocab_size=llm.target.model.cfg.vocab_size,
        max_speculative_tokens=llm.scheduler.max_speculative_tokens,
        method=None if drafter is None else "p-eagle" if drafter.cfg.parallel else "eagle3",
        max_num_seqs=llm.scheduler.max_num_seqs,
        device=str(llm.model_runner.device),
        dtype=llm.dtype,
        memory_bytes=llm.memory_bytes(),
    )


def run_engine(
    build_llm: Callable[[], LLM],
    sock: socket.socket,
    build_core: Callable[[LLM, EngineChannel], EngineCore] = EngineCore,
) -> None:
    """Loads the model and serves the front end at the other end of the socket, until it closes it."""
    channel = EngineChannel(sock)
    try:
        llm = build_llm()
        if llm.model_runner.device.type == "cuda":
            log_event("compiling kernels")
            llm.warm_up()
            torch.set_num_threads(1)  # host tensors are small, and waking threads for them can take milliseconds
        core = build_core(llm, channel)
        channel.send(EngineReady(build_engine_info(core.llm), core.read_counters()))
        core.run()
    except ConnectionError:
        pass
    except BaseException as error:
        channel.send(EngineFailed(*report_error("engine failed", error)))
    finally:
        channel.close()


def run_engine_process(build_llm: Callable[[], LLM], sock: socket.socket, log_json: bool) -> None:
    """Main function of the engine process. Signals of the terminal are the front end's, which stops the engine."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_exit_with_front_end, args=(sock.fileno(),), daemon=True).start()
    start_logging(log_json)
    run_engine(build_llm, sock)
    os._exit(0)  # a grammar that is still being compiled would delay the exit


def _exit_with_front_end(fd: int) -> None:
    """Ends this process as soon as the front end has died, also while it loads or compiles."""
    poller = select.poll()
    poller.register(fd, select.POLLRDHUP)
    poller.poll()
    time.sleep(1.0)  # a front end that stopped the engine closes the socket, too
    os._exit(1)


def report_error(event: str, error: BaseException) -> tuple[str, bool]:
    """Returns the error's message for the front end, and whether it is a user error. Logs other errors."""
    if isinstance(error, UserError):
        return str(error), True
    message = f"{type(error).__name__}: {' '.join(str(error).split())}"[:MAX_ERROR_LENGTH].removesuffix(": ")
    log_event(event, level="error", error=message, trace=format_traceback(error))
    return message, False
