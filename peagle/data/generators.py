"""Response generators, and loop detection.

A generator accepts requests while `num_free_slots` is above 0 and returns results as they finish. There are two: the
embedded engine, and an OpenAI-compatible server that receives concurrent chat completions.

The server is asked for token ids (vLLM's `return_token_ids`) and must use the same prompt tokens as this target's chat
template. Without token ids the text of a response is tokenized later. Lost connections, 429, 5xx and invalid responses
are retried; a request that the server rejects (400, 413, 422) rejects its row; 401, 403 and 404 end the run.

Small models often repeat themselves, and a drafter learns nothing from that. Worked example with 8-grams:
1 2 3 4 5 6 7 8 9 | 3 4 5 6 7 8 9 3 4 .. The 8-gram behind the bar occurred at the third token already, so the loop
starts there.
"""

import gc
import json
import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from peagle import config, http_client
from peagle.checkpoints.target import eos_ids
from peagle.config import EndpointSettings, ResponseEngineSettings, SamplingParams
from peagle.engine.llm import LLM
from peagle.engine.request import RequestGroup
from peagle.errors import UserError

LOOP = "loop"  # finish reason of a looping response
LOOP_CHECK_INTERVAL = 64  # output tokens between two checks of a running request
MAX_BACKOFF_S = 30.0
REJECTED_STATUSES = (400, 413, 422)
FATAL_STATUSES = (401, 403, 404)
JSON = dict[str, Any]


@dataclass(frozen=True)
class GenerationRequest:
    """One assistant turn to generate."""

    request_id: int
    messages: Sequence[dict[str, str]]
    prompt_token_ids: list[int]  # `messages` in the chat template
    params: SamplingParams


@dataclass(frozen=True)
class GenerationResult:
    """`token_ids` include the end-of-turn token. A server without `return_token_ids` gives only `text`."""

    request_id: int
    token_ids: list[int] | None = None
    text: str | None = None  # None: not decoded yet
    finish_reason: str = "stop"  # "stop", "length", or "loop" for a request stopped early because it repeats itself
    rejected: str | None = None  # permanent: why this request can never be answered
    detail: str = ""  # the server's own message
    error: str | None = None  # temporary: why this attempt failed


class EngineGenerator:
    """The embedded engine, kept full."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.max_model_len: int | None = llm.max_model_len  # prompt and output tokens together
        self._running: dict[int, tuple[int, RequestGroup]] = {}  # engine request id -> (request_id, group)
        # 25% more than can run, so that a freed slot is filled in the next step
        self._max_requests = llm.scheduler.max_num_seqs + max(llm.scheduler.max_num_seqs // 4, 1)

    @property
    def num_free_slots(self) -> int:
        return self._max_requests - len(self._running)

    def submit(self, request: GenerationRequest) -> None:
        group = self.llm.add_request(request.prompt_token_ids, request.params)
        self._running[group.requests[0].id] = (request.request_id, group)

    def poll(self) -> list[GenerationResult]:
        results = []
        for request in self.llm.step():
            output_ids, finish_reason = request.output_token_ids, request.finish_reason
            if finish_reason is None and len(output_ids) % LOOP_CHECK_INTERVAL == 0 and is_repeating(output_ids):
                finish_reason = LOOP
            if finish_reason is not None:
                request_id, group = self._running.pop(request.id)
                results.append(GenerationResult(request_id, list(output_ids), None, finish_reason))
                if finish_reason == LOOP:
                    self.llm.abort_group(group)
        return results

    def close(self) -> None:
        for _, group in self._running.values():
            self.llm.abort_group(group)
        self._running.clear()


def load_engine_generator(target: Path, settings: ResponseEngineSettings) -> EngineGenerator:
    """Loads an engine without tokenizer: the thread that writes rows decodes them."""
    if not eos_ids(target):
        raise UserError(f"{target}: config.json and generation_config.json have no eos_token_id, so no response ends")
    on_gpu = (settings.device or ("cuda" if torch.cuda.is_available() else "cpu")).startswith("cuda")
    max_num_seqs = settings.max_num_seqs or (config.GPU_RESPONSES if on_gpu else None)
    return EngineGenerator(LLM(target, tokenizer=False, **{**vars(settings), "max_num_seqs": max_num_seqs}))


def release_engine_memory() -> None:
    """Frees the memory of a deleted engine. An engine freezes its objects for the garbage collector and has reference
    cycles, so deleting it is not enough."""
    gc.unfreeze()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# The server


class _RetryableError(Exception):
    """A request may succeed when it is sent again, after `wait_s` if the server named a time."""

    def __init__(self, reason: str, wait_s: float | None = None) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


class _RequestRejected(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status} {message}")
        self.status = status


class EndpointGenerator:
    def __init__(self, settings: EndpointSettings) -> None:
        self.settings = settings
        self.max_model_len: int | None = None  # unknown
        self.requests_token_ids = True  # until the server rejects the field
        parts = urlsplit(settings.url if "://" in settings.url else f"http://{settings.url}")
        base_url = http_client.parse_server_url(f"{parts.scheme}://{parts.netloc}", "--endpoint")
        self._path = parts.path.rstrip("/").removesuffix("/chat/completions") or "/v1"
        timeout = settings.timeout_s
        self._http = http_client.HttpClient(base_url, http_client.HttpTimeouts(timeout, timeout, timeout))
        self._stop = threading.Event()
        self.model = settings.model or http_client.find_model(self._http, f"--endpoint {base_url}", self._path)
        self._executor = ThreadPoolExecutor(settings.concurrency)
        self._pending: dict[Future[GenerationResult], int] = {}  # request ids
        self._num_completed = self._consecutive_errors = 0

    @property
    def num_free_slots(self) -> int:
        return self.settings.concurrency - len(self._pending)

    def submit(self, request: GenerationRequest) -> None:
        self._pending[self._executor.submit(self._generate_with_retries, request)] = request.request_id

    def poll(self) -> list[GenerationResult]:
        wait(self._pending, timeout=0.2, return_when=FIRST_COMPLETED)
        return [self._receive(future, self._pending.pop(future)) for future in list(self._pending) if future.done()]

    def close(self) -> None:
        self._stop.set()
        self._http.close()
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _receive(self, future: Future[GenerationResult], request_id: int) -> GenerationResult:
        try:
            result = future.result()
        except UserError:
            raise
        except Exception as error:
            result = GenerationResult(request_id, error=repr(error))
        if result.error is None:
            self._num_completed += 1
            self._consecutive_errors = 0
            return result
        self._consecutive_errors += 1
        if not self._num_completed or self._consecutive_errors >= self.settings.failures:
            raise UserError(
                f"--endpoint {self.settings.url}: gave up after {self.settings.retries + 1} tries each of "
                f"{self._consecutive_errors} request(s) ({result.error}); finished rows are kept, and the same command "
                "resumes the run"
            )
        return result

    def _generate_with_retries(self, request: GenerationRequest) -> GenerationResult:
        for attempt in range(self.settings.retries + 1):
            try:
                return self._generate(request)
            except _RequestRejected as error:
                rejected = f"refused by the server ({error.status})"
                return GenerationResult(request.request_id, rejected=rejected, detail=str(error))
            except _RetryableError as error:
                reason = str(error)
                if attempt < self.settings.retries:
                    wait_s = error.wait_s if error.wait_s is not None else self.settings.backoff_s * 2**attempt
                    self._stop.wait(min(wait_s, MAX_BACKOFF_S))
            if self._stop.is_set():
                break
        return GenerationResult(request.request_id, error=reason)

    def _generate(self, request: GenerationRequest) -> GenerationResult:
        params = request.params
        body: JSON = {
            "model": self.model,
            "messages": list(request.messages),
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "seed": params.seed,
        }
        if params.top_k:
            body["top_k"] = params.top_k
        requests_token_ids = self.requests_token_ids
        if requests_token_ids:
            body["return_token_ids"] = True
        try:
            reply = self._post("/chat/completions", body)
        except _RequestRejected as error:
            if requests_token_ids and "return_token_ids" in str(error):
                self.requests_token_ids = False
                return self._generate(request)
            raise
        return self._parse_completion(reply, request)

    def _parse_completion(self, reply: JSON, request: GenerationRequest) -> GenerationResult:
        try:
            choice = reply["choices"][0]
            message, finish_reason = choice["message"], choice["finish_reason"]
            text = message.get("content") or ""
            token_ids, prompt_token_ids = choice.get("token_ids"), reply.get("prompt_token_ids")
            text.encode()
            if token_ids is not None:
                token_ids = [int(i) for i in token_ids]
        except (KeyError, IndexError, TypeError, AttributeError, ValueError):
            raise _RetryableError(f"invalid response: {json.dumps(reply)[:120]}") from None
        if finish_reason not in ("stop", "length"):
            return GenerationResult(request.request_id, rejected=f"ended with {finish_reason!r}")
        if prompt_token_ids is not None and list(prompt_token_ids) != request.prompt_token_ids:
            raise UserError(
                f"--endpoint {self.settings.url}: the server's prompt has {len(prompt_token_ids)} tokens, the target's "
                f"chat template gives {len(request.prompt_token_ids)} for {request.messages[-1]['content']!r:.80}; "
                "give -t the server's target, or its template with --chat-template FILE"
            )
        if not token_ids and (message.get("reasoning_content") or message.get("reasoning")):
            return GenerationResult(request.request_id, rejected="reasoning kept apart, without token ids")
        if not token_ids and not text:
            return GenerationResult(request.request_id, rejected="empty answer")
        return GenerationResult(request.request_id, token_ids or None, text, finish_reason)

    def _post(self, path: str, body: JSON) -> JSON:
        try:
            reply = self._http.request("POST", self._path + path, body)
        except http_client.RequestFailed as error:
            raise _RetryableError(f"no answer: {error}") from None
        if (status := reply.status_code) != 200:
            message = http_client.error_message(reply.content)
            if status in FATAL_STATUSES:
                raise UserError(
                    f"--endpoint {self.settings.url}: {status}, {http_client.STATUS_HELP[status]} ({message})"
                )
            if status in REJECTED_STATUSES:
                raise _RequestRejected(status, message)
            seconds = reply.headers.get("Retry-After", "")
            raise _RetryableError(f"{status} {message}", float(seconds) if seconds.isdigit() else None)
        try:
            return dict(json.loads(reply.content))
        except (ValueError, TypeError):
            raise _RetryableError(f"the response is not JSON: {reply.content[:80]!r}") from None


# Loops


def is_looping(token_ids: Sequence[int], finished: bool) -> bool:
    """True for an unfinished response in which more than 30% of the 8-grams are repeats."""
    if finished:
        return False
    n = config.LOOP_NGRAM_TOKENS
    grams = [tuple(token_ids[i : i + n]) for i in range(len(token_ids) - n + 1)]
    return len(set(grams)) < (1 - config.LOOP_REPEATED_SHARE) * len(grams)


def num_tokens_before_loop(token_ids: Sequence[int]) -> int:
    """Number of tokens before the first repeated 8-gram."""
    seen = set()
    for i in range(len(token_ids) - config.LOOP_NGRAM_TOKENS + 1):
        gram = tuple(token_ids[i : i + config.LOOP_NGRAM_TOKENS])
        if gram in seen:
            return i
        seen.add(gram)
    return len(token_ids)


def is_repeating(token_ids: Sequence[int]) -> bool:
    """True if the last 96 tokens are one sequence repeated three times or more."""
    last = list(token_ids[-config.LOOP_TAIL_TOKENS :])
    if len(last) < config.LOOP_TAIL_TOKENS:
        return False
    end = last[-config.LOOP_NGRAM_TOKENS :]
    return any(
        last[-config.LOOP_NGRAM_TOKENS - period : -period] == end and last[period:] == last[:-period]
        for period in range(1, config.LOOP_TAIL_TOKENS // 3 + 1)
    )
