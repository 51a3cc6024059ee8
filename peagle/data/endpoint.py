"""An OpenAI-compatible server as the one who answers: chat completions, many at once, with patience.

Knows HTTP and nothing about tokenizers. A server that gives token ids (vLLM: `return_token_ids`) is asked for them
and its prompt must be the one that we render; another one's text is turned into ids elsewhere. What may pass (a lost
connection, 429, 5xx, an answer that makes no sense) is tried again, what a server will always refuse about one
request is that row's fault, and what it refuses about all of them ends the run. $OPENAI_API_KEY is sent if set.
"""

from __future__ import annotations

import http.client
import json
import os
import queue
import threading
from typing import Any
from urllib.parse import urlsplit

from peagle.config import EndpointSettings
from peagle.data.generators import GenerationRequest, GenerationResult
from peagle.errors import UserError

LONGEST_WAIT_S = 30.0  # between two tries
ROW_FAULTS = (400, 413, 422)
HOPELESS = {401: "it wants another $OPENAI_API_KEY", 403: "it forbids it", 404: "no such address or model"}
JSON = dict[str, Any]


class _Again(Exception):
    """Worth another try, after `wait_s` if the server says so."""

    def __init__(self, reason: str, wait_s: float | None = None) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


class _RowFault(Exception):
    def __init__(self, status: int, said: str) -> None:
        super().__init__(f"{status} {said}")
        self.status = status


class EndpointGenerator:
    def __init__(self, settings: EndpointSettings) -> None:
        self.settings = settings
        self.max_model_len: int | None = None
        parts = urlsplit(settings.url if "://" in settings.url else f"http://{settings.url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"--endpoint {settings.url}: must be an address like http://localhost:8000/v1")
        self._host, self._secure = parts.netloc.rpartition("@")[2], parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/chat/completions")
        self._path = path or "/v1"
        self.wants_ids = True  # until the server says that it does not know the word
        self._stop = threading.Event()
        self._local = threading.local()
        self._alive: set[http.client.HTTPConnection] = set()
        self.model = settings.model or self._only_model()
        self._in: queue.SimpleQueue[GenerationRequest | None] = queue.SimpleQueue()
        self._out: queue.SimpleQueue[GenerationResult | UserError] = queue.SimpleQueue()
        self._open = self._answered = self._failed_since = 0
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(settings.concurrency)]
        for thread in self._threads:
            thread.start()

    @property
    def num_free_slots(self) -> int:
        return self.settings.concurrency - self._open

    def submit(self, request: GenerationRequest) -> None:
        self._open += 1
        self._in.put(request)

    def poll(self) -> list[GenerationResult]:
        answers: list[GenerationResult] = []
        try:
            answers.append(self._received(self._out.get(timeout=0.2)))
            while not self._out.empty():
                answers.append(self._received(self._out.get()))
        except queue.Empty:
            pass
        return answers

    def close(self) -> None:
        self._stop.set()
        for _ in self._threads:
            self._in.put(None)
        for connection in list(self._alive):
            if connection.sock is not None:
                try:
                    connection.sock.shutdown(2)  # wakes the thread that reads from it
                except OSError:
                    pass
        for thread in self._threads:
            thread.join(timeout=2.0)

    def _received(self, got: GenerationResult | UserError) -> GenerationResult:
        self._open -= 1
        if isinstance(got, UserError):
            raise got
        if got.error is None:
            self._answered += 1
            self._failed_since = 0
            return got
        self._failed_since += 1
        if not self._answered or self._failed_since >= self.settings.failures:
            raise UserError(
                f"--endpoint {self.settings.url}: gave up after {self.settings.retries + 1} tries each of "
                f"{self._failed_since} request(s) ({got.error}); the rows so far are kept, the same command goes on"
            )
        return got

    def _work(self) -> None:
        while (request := self._in.get()) is not None and not self._stop.is_set():
            try:
                self._out.put(self._patiently(request))
            except UserError as error:
                self._out.put(error)
            except Exception as error:  # a bug of ours must not leave the run waiting for this answer
                self._out.put(GenerationResult(request.request_id, error=repr(error)))

    def _patiently(self, request: GenerationRequest) -> GenerationResult:
        for turn in range(self.settings.retries + 1):
            try:
                return self._answer(request)
            except _RowFault as fault:
                return GenerationResult(
                    request.request_id, rejected=f"refused by the server ({fault.status})", detail=str(fault)
                )
            except _Again as again:
                reason = str(again)
                if turn < self.settings.retries:
                    pause = again.wait_s if again.wait_s is not None else self.settings.backoff_s * 2**turn
                    self._stop.wait(min(pause, LONGEST_WAIT_S))
            if self._stop.is_set():
                break
        return GenerationResult(request.request_id, error=reason)

    def _answer(self, request: GenerationRequest) -> GenerationResult:
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
        asked_ids = self.wants_ids
        if asked_ids:
            body["return_token_ids"] = True
        try:
            reply = self._call("POST", "/chat/completions", body)
        except _RowFault as fault:
            if asked_ids and "return_token_ids" in str(fault):
                self.wants_ids = False
                return self._answer(request)
            raise
        return self._understood(reply, request)

    def _understood(self, reply: JSON, request: GenerationRequest) -> GenerationResult:
        try:
            choice = reply["choices"][0]
            message, finish = choice["message"], choice["finish_reason"]
            text = message.get("content") or ""
            ids, prompt_ids = choice.get("token_ids"), reply.get("prompt_token_ids")
            text.encode()
            if ids is not None:
                ids = [int(i) for i in ids]
        except (KeyError, IndexError, TypeError, AttributeError, ValueError):
            raise _Again(f"an answer that makes no sense: {json.dumps(reply)[:120]}") from None
        if finish not in ("stop", "length"):
            return GenerationResult(request.request_id, rejected=f"ended with {finish!r}")
        if prompt_ids is not None and list(prompt_ids) != request.prompt_token_ids:
            raise UserError(
                f"--endpoint {self.settings.url}: the server reads other tokens ({len(prompt_ids)}) than this target's "
                f"chat template makes ({len(request.prompt_token_ids)}) of {request.messages[-1]['content']!r:.80}; "
                "give -t the server's own target, or its template with --chat-template FILE"
            )
        if not ids:
            if message.get("reasoning_content") or message.get("reasoning"):
                return GenerationResult(request.request_id, rejected="reasoning kept apart, without token ids")
            if not text:
                return GenerationResult(request.request_id, rejected="empty answer")
            ids = None
        return GenerationResult(request.request_id, ids, text, finish)

    def _only_model(self) -> str:
        try:
            listed = self._call("GET", "/models", None)["data"]
            names = [str(model["id"]) for model in listed]
        except (_Again, _RowFault) as error:
            raise UserError(f"--endpoint {self.settings.url}: {error}") from None
        except (KeyError, TypeError):
            raise UserError(f"--endpoint {self.settings.url}: does not list its models; give --model NAME") from None
        if len(names) != 1:
            raise UserError(f"--endpoint {self.settings.url}: give --model NAME, one of {', '.join(names) or 'none'}")
        return names[0]

    def _call(self, method: str, path: str, body: JSON | None) -> JSON:
        """One request on this thread's own connection, which is kept as long as it works."""
        connection = getattr(self._local, "connection", None)
        if connection is None:
            kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
            connection = self._local.connection = kind(self._host, timeout=self.settings.timeout_s)
            self._alive.add(connection)
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        try:
            connection.request(
                method, self._path + path, json.dumps(body).encode() if body is not None else None, headers
            )
            reply = connection.getresponse()
            status, data = reply.status, reply.read()
            after = reply.getheader("Retry-After")
        except (OSError, http.client.HTTPException) as error:
            self._local.connection = None
            self._alive.discard(connection)
            connection.close()
            raise _Again(f"no answer: {error or type(error).__name__}") from None
        if status != 200:
            self._complain(status, data, after)
        try:
            value = json.loads(data)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise _Again(f"an answer that is not JSON: {data[:80]!r}")
        return value

    def _complain(self, status: int, data: bytes, after: str | None) -> None:
        said = error_message(data)
        if status in HOPELESS:
            raise UserError(f"--endpoint {self.settings.url}: {status}, {HOPELESS[status]} ({said})")
        if status in ROW_FAULTS:
            raise _RowFault(status, said)
        raise _Again(f"{status} {said}", float(after) if after and after.isdigit() else None)


def error_message(data: bytes, longest: int = 160) -> str:
    """What a server says in an error's body, whichever form it has."""
    try:
        value = json.loads(data)
        error = value.get("error", value)
        said = error.get("message", error) if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        said = data.decode(errors="replace")
    return " ".join(str(said).split())[:longest]
