"""The backend of `peagle chat --url`: a running server with OpenAI's chat completions.

Servers other than `peagle serve` work too, without shading. The API key comes from $OPENAI_API_KEY.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
from collections.abc import Iterator
from typing import Any

from peagle.bench.http_client import Events, Failed, parse_url
from peagle.config import BenchServerSettings, SamplingParams
from peagle.engine.request import CompletionOutput
from peagle.errors import UserError

READ_BYTES = 1 << 16
STATUS_HINTS = {401: "set $OPENAI_API_KEY to the server's key", 403: "forbidden", 429: "the server is overloaded"}


class ServerBackend:
    def __init__(self, url: str) -> None:
        self.settings = BenchServerSettings(url)
        self.address = parse_url(url)
        self._headers = {"Content-Type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            self._headers["Authorization"] = f"Bearer {key}"
        self._connection: http.client.HTTPConnection | None = None
        self._stopped = False
        info = self._get("/peagle/info", missing=True)
        self._reports_tokens = info is not None  # with a flag for draft tokens
        if info is not None:
            self.model, drafter = str(info["model"]), info["drafter"]
            self.max_speculative_tokens = int(info["max_speculative_tokens"] or 0) if drafter else 0
            self.description = f"{self.model} at {self.address}" + (f" with {drafter}" if drafter else "")
        else:
            self.model, self.max_speculative_tokens = self._first_model(), 0
            self.description = f"{self.model} at {self.address}, which does not report draft tokens"

    def stop(self) -> None:
        self._stopped = True
        if self._connection is not None and self._connection.sock is not None:
            try:
                self._connection.sock.shutdown(socket.SHUT_RDWR)  # ends a blocked read, and tells the server
            except OSError:
                pass

    def respond(self, messages: list[dict[str, str]], params: SamplingParams) -> Iterator[list[tuple[str, bool]]]:
        self._stopped = False
        body: dict[str, Any] = {"model": self.model, "messages": messages, "stream": True}
        body |= {"max_tokens": params.max_tokens, "temperature": params.temperature, "top_p": params.top_p}
        if params.seed is not None:
            body["seed"] = params.seed
        if self._reports_tokens:
            drafts = (
                {"num_speculative_tokens": params.max_speculative_tokens}
                if params.max_speculative_tokens
                else {"speculation": False}
            )
            body["peagle"] = {"tokens": True, **(drafts if self.max_speculative_tokens else {})}
        self._pending: list[tuple[str, bool]] = []
        self._num_shown = 0  # characters of the text
        self.output = CompletionOutput(0, "", [], None, num_accepted_tokens_per_pos=[0] * self.max_speculative_tokens)
        try:
            for event in self._events(body):
                yield self._add_event(event)
        except UserError:
            raise
        except (OSError, http.client.HTTPException, Failed) as error:
            if not self._stopped:
                raise UserError(f"--url {self.settings.url}: the response was interrupted ({error})") from None
        except (LookupError, TypeError, AttributeError, ValueError, RecursionError):
            raise UserError(f"--url {self.settings.url}: the response is not a chat completion") from None
        finally:
            self._close()
        if self._stopped:
            self.output.finish_reason = "abort"
            count_decode_steps(self.output)
        elif self.output.finish_reason is None:
            raise UserError(f"--url {self.settings.url}: the response was interrupted")

    def _add_event(self, event: dict[str, Any]) -> list[tuple[str, bool]]:
        """Adds an event to the output. Returns the new text."""
        out, parts = self.output, []
        if (error := event.get("error")) is not None:
            raise UserError(f"--url {self.settings.url}: {error.get('message', error)}")
        stats = event.get("peagle")
        for choice in event.get("choices", ()):
            text = (choice.get("delta") or {}).get("content") or ""
            out.text += text
            out.finish_reason = choice.get("finish_reason") or out.finish_reason
            tokens = choice.get("peagle") or {}
            if "texts" in tokens:
                out.token_ids += tokens["token_ids"]
                out.is_draft_token += tokens["is_draft_token"]
                self._pending += zip(tokens["texts"], tokens["is_draft_token"], strict=True)
                parts += self._take_shown_parts()
            elif text:
                parts.append((text, False))
        if stats and "num_decode_steps" in stats:
            out.num_decode_steps, out.num_drafts = stats["num_decode_steps"], stats["num_drafts"]
            counts = stats["num_accepted_tokens_per_pos"]
            out.num_accepted_tokens_per_pos[: len(counts)] = counts
        return parts

    def _take_shown_parts(self) -> list[tuple[str, bool]]:
        """Returns the pending tokens up to the length of the text, which a stop string may cut."""
        parts = []
        while self._pending and self._num_shown < len(self.output.text):
            token, is_draft_token = self._pending.pop(0)
            part = token[: len(self.output.text) - self._num_shown]
            self._num_shown += len(part)
            parts.append((part, is_draft_token))
            if len(part) < len(token):
                self._pending.insert(0, (token[len(part) :], is_draft_token))
        return parts

    def _events(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        reply = self._ask("POST", "/v1/chat/completions", body)
        if reply.status != 200:
            raise self._refused(reply)
        events = Events()
        while data := reply.read1(READ_BYTES):
            for event in events.feed(data):
                if event == "[DONE]":
                    return
                yield json.loads(event)

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> http.client.HTTPResponse:
        kind = http.client.HTTPSConnection if self.address.secure else http.client.HTTPConnection
        self._connection = kind(self.address.host, self.address.port, timeout=self.settings.connect_s)
        try:
            self._connection.connect()
            self._connection.sock.settimeout(self.settings.total_s)
            data = json.dumps(body).encode() if body is not None else None
            self._connection.request(method, self.address.path + path, data, self._headers)
            return self._connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            if self._stopped:
                raise
            why = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise UserError(f"--url {self.settings.url}: no response ({why}); is the server running?") from None

    def _get(self, path: str, missing: bool = False) -> dict[str, Any] | None:
        """Returns the JSON object at a path; None if it is missing and `missing` allows that."""
        try:
            reply = self._ask("GET", path)
            if missing and reply.status in (404, 405):
                return None
            if reply.status != 200:
                raise self._refused(reply)
            value = json.loads(reply.read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise UserError(f"--url {self.settings.url}: {path} is not JSON ({error})") from None
        finally:
            self._close()
        return value if isinstance(value, dict) else {}

    def _first_model(self) -> str:
        models = (self._get("/v1/models") or {}).get("data") or []
        if not models:
            raise UserError(f"--url {self.settings.url}: /v1/models lists no model")
        return str(models[0]["id"])

    def _refused(self, reply: http.client.HTTPResponse) -> UserError:
        message = reply.read(READ_BYTES).decode(errors="replace")
        try:
            message = str(json.loads(message)["error"]["message"])
        except (ValueError, KeyError, TypeError):
            pass
        hint = f"{STATUS_HINTS[reply.status]}: " if reply.status in STATUS_HINTS else ""
        after = reply.getheader("Retry-After")
        retry = f"; try again in {after} s" if after else ""
        return UserError(
            f"--url {self.settings.url}: status {reply.status}, {hint}{' '.join(message.split())[:300]}{retry}"
        )

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def count_decode_steps(out: CompletionOutput) -> None:
    """Counts the decode steps of a stopped response from its tokens: every step ends with a token of the target.

    is_draft_token = [False, True, True, False, False]: the prefill, a step with two accepted tokens, one with none.
    """
    position = 0
    out.num_decode_steps, out.num_accepted_tokens_per_pos = 0, [0] * len(out.num_accepted_tokens_per_pos)
    for i, is_draft_token in enumerate(out.is_draft_token[1:], 2):
        if is_draft_token:
            out.num_accepted_tokens_per_pos[position] += 1
            position += 1
        if not is_draft_token or i == len(out.is_draft_token):
            out.num_decode_steps += 1
            position = 0
    out.num_drafts = out.num_decode_steps if any(out.num_accepted_tokens_per_pos) else 0
