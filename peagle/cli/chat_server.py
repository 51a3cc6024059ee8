"""A running server as the one that `chat` talks with.

Knows HTTP and OpenAI's chat completions; a server that is not `peagle serve` is talked with too, unshaded. A key
comes from $OPENAI_API_KEY.
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

READ = 1 << 16  # bytes at once
NEEDS = {401: "it wants another $OPENAI_API_KEY", 403: "it forbids it", 429: "it has all it can do"}


class ServerBackend:
    def __init__(self, url: str) -> None:
        self.settings = BenchServerSettings(url)
        self.address = parse_url(url)
        self._headers = {"Content-Type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            self._headers["Authorization"] = f"Bearer {key}"
        self._connection: http.client.HTTPConnection | None = None
        self._stopped = False
        about = self._get("/peagle/info", missing=True)
        self._shades = about is not None  # it tells which tokens were drafts
        if about is not None:
            self.model = str(about["model"])
            self.max_speculative_tokens = int(about["max_speculative_tokens"] or 0) if about["drafter"] else 0
            self.description = f"{self.model} at {self.address}" + (
                f" with {about['drafter']}" if about["drafter"] else ""
            )
        else:
            self.model, self.max_speculative_tokens = self._first_model(), 0
            self.description = f"{self.model} at {self.address}, which does not tell drafts apart"

    def stop(self) -> None:
        self._stopped = True
        if self._connection is not None and self._connection.sock is not None:
            try:
                self._connection.sock.shutdown(socket.SHUT_RDWR)  # wakes who reads from it; the server notices
            except OSError:
                pass

    def respond(self, messages: list[dict[str, str]], params: SamplingParams) -> Iterator[list[tuple[str, bool]]]:
        self._stopped = False
        body: dict[str, Any] = {"model": self.model, "messages": messages, "stream": True}
        body |= {"max_tokens": params.max_tokens, "temperature": params.temperature, "top_p": params.top_p}
        if params.seed is not None:
            body["seed"] = params.seed
        if self._shades:
            drafts = (
                {"num_speculative_tokens": params.max_speculative_tokens}
                if params.max_speculative_tokens
                else {"speculation": False}
            )
            body["peagle"] = {"tokens": True, **(drafts if self.max_speculative_tokens else {})}
        self._pending: list[tuple[str, bool]] = []
        self._shown = 0  # characters of the text
        self.output = CompletionOutput(0, "", [], None, num_accepted_tokens_per_pos=[0] * self.max_speculative_tokens)
        try:
            for event in self._events(body):
                yield self._take(event)
        except UserError:
            raise
        except (OSError, http.client.HTTPException, Failed) as error:
            if not self._stopped:
                raise UserError(f"--url {self.settings.url}: the answer broke off ({error})") from None
        except (LookupError, TypeError, AttributeError, ValueError, RecursionError):
            raise UserError(f"--url {self.settings.url}: an answer that makes no sense") from None
        finally:
            self._close()
        if self._stopped:
            self.output.finish_reason = "abort"
            count_decode_steps(self.output)
        elif self.output.finish_reason is None:
            raise UserError(f"--url {self.settings.url}: the answer broke off")

    def _take(self, event: dict[str, Any]) -> list[tuple[str, bool]]:
        """What one event adds."""
        out, parts = self.output, []
        if (error := event.get("error")) is not None:
            raise UserError(f"--url {self.settings.url}: {error.get('message', error)}")
        told = event.get("peagle")
        for choice in event.get("choices", ()):
            text = (choice.get("delta") or {}).get("content") or ""
            out.text += text
            out.finish_reason = choice.get("finish_reason") or out.finish_reason
            mine = choice.get("peagle") or {}
            if "texts" in mine:
                out.token_ids += mine["token_ids"]
                out.is_draft_token += mine["is_draft_token"]
                self._pending += zip(mine["texts"], mine["is_draft_token"], strict=True)
                parts += self._showable()
            elif text:
                parts.append((text, False))
            told = mine if "num_decode_steps" in mine else told
        if told and "num_decode_steps" in told:
            out.num_decode_steps, out.num_drafts = told["num_decode_steps"], told["num_drafts"]
            counts = told["num_accepted_tokens_per_pos"]
            out.num_accepted_tokens_per_pos[: len(counts)] = counts
        return parts

    def _showable(self) -> list[tuple[str, bool]]:
        """Tokens say where a character came from, the text how far it may be shown: a stop string is in one only."""
        parts = []
        while self._pending and self._shown < len(self.output.text):
            token, drafted = self._pending.pop(0)
            cut = token[: len(self.output.text) - self._shown]
            self._shown += len(cut)
            parts.append((cut, drafted))
            if len(cut) < len(token):
                self._pending.insert(0, (token[len(cut) :], drafted))
        return parts

    def _events(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        reply = self._ask("POST", "/v1/chat/completions", body)
        if reply.status != 200:
            raise self._refused(reply)
        events = Events()
        while data := reply.read1(READ):
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
            raise UserError(f"--url {self.settings.url}: no answer ({why}); is the server running?") from None

    def _get(self, path: str, missing: bool = False) -> dict[str, Any] | None:
        """What is at an address; None if nothing is and that is fine."""
        try:
            reply = self._ask("GET", path)
            if missing and reply.status in (404, 405):
                return None
            if reply.status != 200:
                raise self._refused(reply)
            found = json.loads(reply.read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise UserError(f"--url {self.settings.url}: {path} makes no sense ({error})") from None
        finally:
            self._close()
        return found if isinstance(found, dict) else {}

    def _first_model(self) -> str:
        listed = (self._get("/v1/models") or {}).get("data") or []
        if not listed:
            raise UserError(f"--url {self.settings.url}: it lists no model")
        return str(listed[0]["id"])

    def _refused(self, reply: http.client.HTTPResponse) -> UserError:
        said = reply.read(READ).decode(errors="replace")
        try:
            error = json.loads(said)["error"]
            said = str(error["message"])
        except (ValueError, KeyError, TypeError):
            pass
        needs = f"{NEEDS[reply.status]}: " if reply.status in NEEDS else ""
        after = reply.getheader("Retry-After")
        wait = f"; try again in {after} s" if after else ""
        return UserError(f"--url {self.settings.url}: {reply.status}, {needs}{' '.join(said.split())[:300]}{wait}")

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def count_decode_steps(out: CompletionOutput) -> None:
    """Counts of an answer that was stopped, from its tokens alone: a round ends with a token of the target's own.

    drafted -, yes, yes, no, no: the first came with the prompt, then a round with two drafts and one with none.
    """
    run = 0
    out.num_decode_steps, out.num_accepted_tokens_per_pos = 0, [0] * len(out.num_accepted_tokens_per_pos)
    for i, drafted in enumerate(out.is_draft_token[1:], 2):
        if drafted:
            out.num_accepted_tokens_per_pos[run] += 1
            run += 1
        if not drafted or i == len(out.is_draft_token):
            out.num_decode_steps += 1
            run = 0
    out.num_drafts = out.num_decode_steps if any(out.num_accepted_tokens_per_pos) else 0
