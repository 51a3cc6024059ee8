"""Generates responses with an OpenAI-compatible server: concurrent chat completions with retries.

The server is asked for token ids (vLLM's `return_token_ids`) and must use the same prompt tokens as this target's chat
template. Without token ids the text of a response is tokenized later. Lost connections, 429, 5xx and invalid responses
are retried; a request that the server rejects (400, 413, 422) rejects its row; 401, 403 and 404 end the run.
"""

from __future__ import annotations

import json
import queue
import threading
from typing import Any
from urllib.parse import urlsplit

from peagle.config import EndpointSettings
from peagle.data.generators import GenerationRequest, GenerationResult
from peagle.errors import UserError
from peagle.http_client import (
    STATUS_HELP,
    HttpClient,
    HttpReply,
    HttpTimeouts,
    RequestFailed,
    error_message,
    parse_server_url,
)

MAX_BACKOFF_S = 30.0
REJECTED_STATUSES = (400, 413, 422)
FATAL_STATUSES = (401, 403, 404)
JSON = dict[str, Any]


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
        self.max_model_len: int | None = None
        self.requests_token_ids = True  # until the server rejects the field
        parts = urlsplit(settings.url if "://" in settings.url else f"http://{settings.url}")
        base_url = parse_server_url(f"{parts.scheme}://{parts.netloc}", "--endpoint")
        self._path = parts.path.rstrip("/").removesuffix("/chat/completions") or "/v1"
        timeout = settings.timeout_s
        self._http = HttpClient(base_url, HttpTimeouts(timeout, timeout, timeout))
        self._stop = threading.Event()
        self.model = settings.model or self._find_model()
        self._requests: queue.SimpleQueue[GenerationRequest | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[GenerationResult | UserError] = queue.SimpleQueue()
        self._num_open = self._num_completed = self._consecutive_errors = 0
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(settings.concurrency)]
        for thread in self._threads:
            thread.start()

    @property
    def num_free_slots(self) -> int:
        return self.settings.concurrency - self._num_open

    def submit(self, request: GenerationRequest) -> None:
        self._num_open += 1
        self._requests.put(request)

    def poll(self) -> list[GenerationResult]:
        results: list[GenerationResult] = []
        try:
            results.append(self._receive(self._results.get(timeout=0.2)))
            while not self._results.empty():
                results.append(self._receive(self._results.get()))
        except queue.Empty:
            pass
        return results

    def close(self) -> None:
        self._stop.set()
        for _ in self._threads:
            self._requests.put(None)
        self._http.close()
        for thread in self._threads:
            thread.join(timeout=2.0)

    def _receive(self, result: GenerationResult | UserError) -> GenerationResult:
        self._num_open -= 1
        if isinstance(result, UserError):
            raise result
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

    def _work(self) -> None:
        while (request := self._requests.get()) is not None and not self._stop.is_set():
            try:
                self._results.put(self._generate_with_retries(request))
            except UserError as error:
                self._results.put(error)
            except Exception as error:  # otherwise the run would wait forever for this result
                self._results.put(GenerationResult(request.request_id, error=repr(error)))

    def _generate_with_retries(self, request: GenerationRequest) -> GenerationResult:
        for attempt in range(self.settings.retries + 1):
            try:
                return self._generate(request)
            except _RequestRejected as error:
                return GenerationResult(
                    request.request_id, rejected=f"refused by the server ({error.status})", detail=str(error)
                )
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
            reply = self._request_json("POST", "/chat/completions", body)
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
        if not token_ids:
            if message.get("reasoning_content") or message.get("reasoning"):
                return GenerationResult(request.request_id, rejected="reasoning kept apart, without token ids")
            if not text:
                return GenerationResult(request.request_id, rejected="empty answer")
            token_ids = None
        return GenerationResult(request.request_id, token_ids, text, finish_reason)

    def _find_model(self) -> str:
        url = self.settings.url
        try:
            names = [str(model["id"]) for model in self._request_json("GET", "/models", None)["data"]]
        except (_RetryableError, _RequestRejected) as error:
            raise UserError(f"--endpoint {url}: {error}") from None
        except (KeyError, TypeError):
            raise UserError(f"--endpoint {url}: does not list its models; give --model NAME") from None
        if len(names) != 1:
            raise UserError(f"--endpoint {url}: give --model NAME, one of {', '.join(names) or 'none'}")
        return names[0]

    def _request_json(self, method: str, path: str, body: JSON | None) -> JSON:
        try:
            reply = self._http.request(method, self._path + path, body)
        except RequestFailed as error:
            raise _RetryableError(f"no answer: {error}") from None
        if reply.status != 200:
            self._raise_status(reply)
        try:
            value = json.loads(reply.body)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise _RetryableError(f"the response is not JSON: {reply.body[:80]!r}")
        return value

    def _raise_status(self, reply: HttpReply) -> None:
        status, message = reply.status, error_message(reply.body)
        if status in FATAL_STATUSES:
            raise UserError(f"--endpoint {self.settings.url}: {status}, {STATUS_HELP[status]} ({message})")
        if status in REJECTED_STATUSES:
            raise _RequestRejected(status, message)
        retry_after = reply.retry_after
        raise _RetryableError(
            f"{status} {message}", float(retry_after) if retry_after and retry_after.isdigit() else None
        )
