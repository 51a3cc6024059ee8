"""The backend of `peagle chat --url`: a running server with OpenAI's chat completions.

Servers other than `peagle serve` work too, without shading. The API key comes from $OPENAI_API_KEY.
"""

import json
from collections.abc import Iterator
from typing import Any

from peagle.config import SamplingParams
from peagle.engine.request import CompletionOutput
from peagle.errors import UserError
from peagle.http_client import EventDecoder, HttpClient, HttpTimeouts, RequestFailed, error_message, parse_server_url

STATUS_HINTS = {401: "set $OPENAI_API_KEY to the server's key", 403: "forbidden", 429: "the server is overloaded"}


class ServerBackend:
    def __init__(self, url: str) -> None:
        self.url = url
        self.address = parse_server_url(url)
        self._http = HttpClient(self.address, HttpTimeouts(stall_s=600.0), keep_alive=False)
        self._stopped = False
        info = self._get("/peagle/info", missing=True)
        self._reports_tokens = info is not None  # with a flag for draft tokens
        if info is not None:
            self.model, drafter = str(info["model"]), info["drafter"]
            self.max_speculative_tokens = int(info["max_speculative_tokens"] or 0) if drafter else 0
            self.description = f"{self.model} at {self.address}" + (f" with {drafter}" if drafter else "")
        else:
            models = (self._get("/v1/models") or {}).get("data") or []
            if not models:
                raise UserError(f"--url {url}: /v1/models lists no model")
            self.model, self.max_speculative_tokens = str(models[0]["id"]), 0
            self.description = f"{self.model} at {self.address}, which does not report draft tokens"

    def stop(self) -> None:
        self._stopped = True
        self._http.abort()  # ends a blocked read, and tells the server

    def respond(self, messages: list[dict[str, str]], params: SamplingParams) -> Iterator[list[tuple[str, bool]]]:
        self._stopped = False
        body: dict[str, Any] = {"model": self.model, "messages": messages, "stream": True}
        body |= {"max_tokens": params.max_tokens, "temperature": params.temperature, "top_p": params.top_p}
        if params.seed is not None:
            body["seed"] = params.seed
        if self._reports_tokens:
            body["peagle"] = {"tokens": True}
            if self.max_speculative_tokens:
                body["peagle"]["num_speculative_tokens"] = params.max_speculative_tokens
        self.output = CompletionOutput(0, "", [], None, num_accepted_tokens_per_pos=[0] * self.max_speculative_tokens)
        try:
            for event in self._events(body):
                yield self._add_event(event)
        except UserError:
            raise
        except RequestFailed as error:
            if not self._stopped:
                raise UserError(f"--url {self.url}: the response was interrupted ({error})") from None
        except (LookupError, TypeError, AttributeError, ValueError, RecursionError):
            raise UserError(f"--url {self.url}: the response is not a chat completion") from None
        if self._stopped:
            self.output.finish_reason = "abort"
            self.output.num_decode_steps = max(0, self.output.is_draft_token.count(False) - 1)  # all but the prefill
        elif self.output.finish_reason is None:
            raise UserError(f"--url {self.url}: the response was interrupted")

    def _add_event(self, event: dict[str, Any]) -> list[tuple[str, bool]]:
        """Adds an event to the output. Returns the new text."""
        out, parts = self.output, []
        if (error := event.get("error")) is not None:
            raise UserError(f"--url {self.url}: {error.get('message', error)}")
        stats = event.get("peagle")
        for choice in event.get("choices", ()):
            text = (choice.get("delta") or {}).get("content") or ""
            out.text += text
            out.finish_reason = choice.get("finish_reason") or out.finish_reason
            tokens = choice.get("peagle") or {}
            if "texts" not in tokens:
                parts.append((text, False))
                continue
            out.token_ids += tokens["token_ids"]
            out.is_draft_token += tokens["is_draft_token"]
            for token, is_draft_token in zip(tokens["texts"], tokens["is_draft_token"], strict=True):
                parts.append((text[: len(token)], is_draft_token))  # the text excludes an EOS token
                text = text[len(token) :]
        if stats and "num_decode_steps" in stats:
            out.num_decode_steps, out.num_drafts = stats["num_decode_steps"], stats["num_drafts"]
            counts = stats["num_accepted_tokens_per_pos"]
            out.num_accepted_tokens_per_pos[: len(counts)] = counts
        return parts

    def _events(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        with self._http.stream("POST", "/v1/chat/completions", body) as response:
            if response.status_code != 200:
                raise self._refused(response.status_code, response.read(), response.headers.get("Retry-After"))
            decoder = EventDecoder()
            for chunk in response.iter_raw():
                for event in decoder.feed(chunk):
                    if event == "[DONE]":
                        return
                    yield json.loads(event)

    def _get(self, path: str, missing: bool = False) -> dict[str, Any] | None:
        """Returns the JSON object at a path; None if it is missing and `missing` allows that."""
        try:
            reply = self._http.request("GET", path)
            if missing and reply.status_code in (404, 405):
                return None
            if reply.status_code != 200:
                raise self._refused(reply.status_code, reply.content, reply.headers.get("Retry-After"))
            value = json.loads(reply.content)
        except RequestFailed as error:
            raise UserError(f"--url {self.url}: no response ({error}); is the server running?") from None
        except ValueError as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"--url {self.url}: {path} is not JSON ({error})") from None
        return value if isinstance(value, dict) else {}

    def _refused(self, status: int, body: bytes, retry_after: str | None) -> UserError:
        hint = f"{STATUS_HINTS[status]}: " if status in STATUS_HINTS else ""
        retry = f"; try again in {retry_after} s" if retry_after else ""
        return UserError(f"--url {self.url}: status {status}, {hint}{error_message(body, 300)}{retry}")
