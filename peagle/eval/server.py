"""Acceptance from a server with OpenAI's completions and vLLM's /metrics.

Knows HTTP; nothing about what counts mean. A request that may be sent again without a trace (429, 503) is; one that
failed on its way (a reset, a timeout, a 5xx, rubbish) has left traces in the counters, so its whole group is asked
again and what was counted of it thrown away. Every wait has an end. $OPENAI_API_KEY is sent if set.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from peagle.config import EvalServerSettings
from peagle.data.endpoint import error_message
from peagle.data.prompts import Prompt
from peagle.errors import UserError
from peagle.eval.conversations import Asked, Said, Speaker
from peagle.eval.counters import Counters, Spoiled, group_samples, groups
from peagle.eval.datasets import DataSet
from peagle.eval.samples import Sample, Tell

HOPELESS = {401: "it wants another $OPENAI_API_KEY", 403: "it forbids it", 404: "no such address or model"}
LATER = (429, 503)
LONGEST_REPLY = 64 << 20  # bytes; more is rubbish
PLACE = re.compile(r"^(vllm:\w+?)(?:_total)?(\{.*\})?\s+(\S+)")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class Server:
    """One drafter and one K: the server's own."""

    all_k = True
    dtype = "the server's"

    def __init__(self, settings: EvalServerSettings, speaker: Speaker, eos_ids: Sequence[int], tell: Tell) -> None:
        self.settings, self.speaker, self.tell = settings, speaker, tell
        self.notes: list[str] = []
        self.failed: Counter[str] = Counter()
        self._stop = threading.Event()
        self._alive: set[http.client.HTTPConnection] = set()
        parts = urlsplit(settings.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"--engine {settings.url}: must be embedded, reference, vllm, or http://HOST:PORT")
        self._host, self._secure = parts.netloc.rpartition("@")[2], parts.scheme == "https"
        self._root = parts.path.rstrip("/").removesuffix("/v1")
        self._extras: dict[str, Any] = {"return_token_ids": True, "stop_token_ids": sorted(eos_ids)}
        try:
            self.model = settings.model or self._only_model()
            self.k = len(self.read().accepted)
            busy = self._running()
        except Spoiled as spoiled:
            raise UserError(f"--engine {settings.url}: {spoiled}") from None
        if busy:
            self.notes.append("the server was busy with other requests when this began")

    def counted(
        self, drafter: object, data: DataSet, temperature: float, ks: Sequence[int]
    ) -> Iterator[tuple[int, list[Sample]]]:
        samples: list[Sample] = []
        parts = list(groups(data.prompts.rows, self.settings.concurrency))
        lost = in_a_row = 0
        for i, group in enumerate(parts):
            got = self._patiently(group, temperature)
            samples += got or []
            in_a_row = 0 if got is not None else in_a_row + 1
            lost += got is None
            if in_a_row >= self.settings.failures or (in_a_row and i + 1 == len(parts) and not samples):
                raise self._given_up(in_a_row)
            self.tell("groups answered", i + 1, len(parts))
        if self.failed:
            self.notes.append(
                f"{data.name}: {_named(self.failed)}; groups of requests were asked again"
                + (f", and {lost} of {len(parts)} are not counted" if lost else "")
            )
            self.failed.clear()
        yield self.k, samples

    def close(self) -> None:
        pass

    def _patiently(self, group: list[Prompt], temperature: float) -> list[Sample] | None:
        for turn in range(self.settings.retries + 1):
            notes: list[str] = []
            try:
                samples = group_samples(self, self.speaker, group, temperature, notes)
            except Spoiled as spoiled:
                self.failed[str(spoiled)] += 1
                if turn < self.settings.retries:
                    time.sleep(min(self.settings.backoff_s * 2**turn, self.settings.longest_wait_s))
                continue
            self.notes += notes
            return samples
        return None

    def _given_up(self, groups_lost: int) -> UserError:
        return UserError(
            f"--engine {self.settings.url}: gave up after {self.settings.retries + 1} tries each of {groups_lost} "
            f"group(s) of requests ({_named(self.failed)}); rows that are finished are kept"
        )

    # What counters and completions say

    def read(self, at_least: int | None = None) -> Counters:
        end = time.monotonic() + self.settings.settle_s
        while True:
            found = self._counters()
            if at_least is None or found.generated is None or found.generated >= at_least or time.monotonic() > end:
                return found
            time.sleep(0.02)

    def _counters(self) -> Counters:
        totals, accepted = Counter[str](), Counter[int]()
        for name, labels, value in self._metrics():
            if name == "vllm:spec_decode_num_accepted_tokens_per_pos":
                accepted[int(labels.get("position", 0))] += int(value)
            else:
                totals[name] += int(value)
        if "vllm:spec_decode_num_drafts" not in totals or not accepted:
            raise UserError(
                f"--engine {self.settings.url}: its /metrics says nothing of speculative decoding "
                "(vllm:spec_decode_*); start it with a --speculative-config"
            )
        generated = totals["vllm:generation_tokens"] if "vllm:generation_tokens" in totals else None
        by_position = tuple(accepted[i] for i in range(max(accepted) + 1))
        return Counters(totals["vllm:spec_decode_num_drafts"], by_position, generated)

    def _running(self) -> bool:
        return any(name == "vllm:num_requests_running" and value > 0 for name, _, value in self._metrics())

    def _metrics(self) -> Iterator[tuple[str, dict[str, str], float]]:
        """Of this model alone, where they say whose they are."""
        text = self._call("GET", "/metrics", None).decode(errors="replace")
        for line in text.splitlines():
            if (found := PLACE.match(line)) is None:
                continue
            labels = dict(LABEL.findall(found[2] or ""))
            try:
                value = float(found[3])
            except ValueError:
                continue
            if value == value and labels.get("model_name", self.model) == self.model:
                yield found[1], labels, value

    def answer(self, asked: list[Asked]) -> list[Said]:
        """All at once. If one fails the others are waited for: what they do is counted until they end."""
        pool = ThreadPoolExecutor(self.settings.concurrency)
        try:
            futures = [pool.submit(self._complete, one) for one in asked]
            return [future.result() for future in futures]
        except KeyboardInterrupt:
            self._stop.set()
            for connection in list(self._alive):
                _end(connection)
            raise
        finally:
            pool.shutdown(cancel_futures=True)

    def _complete(self, asked: Asked) -> Said:
        params = asked.params
        body = {
            "model": self.model,
            "prompt": asked.prompt_ids,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "seed": params.seed,
        }
        room = self.speaker.longest - len(asked.prompt_ids)
        body["max_tokens"] = min(params.max_tokens, room)  # servers refuse more than their context has room for
        data = self._call("POST", "/v1/completions", body)
        try:
            reply = json.loads(data)
            choice = reply["choices"][0]
            finish, text, ids = choice["finish_reason"], choice["text"], choice.get("token_ids")
            counted = (reply.get("usage") or {}).get("completion_tokens")
            if ids is None:
                ids = self.speaker.encode(str(text))
            said = Said([int(i) for i in ids], str(finish), count=int(counted if counted is not None else len(ids)))
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            raise Spoiled("an answer that makes no sense") from None
        if finish not in ("stop", "length"):
            raise Spoiled(f"an answer that ended with {finish!r}"[:60])
        return said

    def _only_model(self) -> str:
        try:
            names = [str(model["id"]) for model in json.loads(self._call("GET", "/v1/models", None))["data"]]
        except (ValueError, KeyError, TypeError):
            raise UserError(f"--engine {self.settings.url}: does not list its models; give --model NAME") from None
        if len(names) != 1:
            raise UserError(f"--engine {self.settings.url}: give --model NAME, one of {', '.join(names) or 'none'}")
        return names[0]

    # HTTP

    def _call(self, method: str, path: str, body: dict[str, Any] | None) -> bytes:
        """Tries again what leaves no trace, as often as is allowed."""
        for turn in range(self.settings.retries + 1):
            extras = dict(self._extras) if body is not None else {}
            status, data, after = self._once(method, path, {**body, **extras} if body is not None else None)
            if status == 200:
                return data
            said = error_message(data, longest=300)
            if status in HOPELESS:
                raise UserError(f"--engine {self.settings.url}{path}: {status}, {HOPELESS[status]} ({said})")
            unknown = [name for name in extras if name in said]
            if status in (400, 422) and unknown:
                for name in unknown:
                    self._extras.pop(name, None)
                continue
            if status in (400, 413, 422):
                raise UserError(
                    f"--engine {self.settings.url}: refused a request ({status}: {said}); "
                    "is --max-model-len or --max-tokens more than it has?"
                )
            if status not in LATER:
                raise Spoiled(f"status {status}")
            self.failed[f"status {status}"] += 1
            pause = float(after) if after and after.isdigit() else self.settings.backoff_s * 2**turn
            if turn < self.settings.retries and self._stop.wait(min(pause, self.settings.longest_wait_s)):
                break
        raise Spoiled(f"status {status}, again and again")

    def _once(self, method: str, path: str, body: dict[str, Any] | None) -> tuple[int, bytes, str | None]:
        """One request on a connection of its own. A timer ends it: a server that sends a byte now and then would
        outlive the timeout of every single read."""
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, timeout=self.settings.timeout_s)
        late = threading.Event()
        timer = threading.Timer(self.settings.timeout_s, _end, (connection, late))
        timer.daemon = True
        timer.start()
        self._alive.add(connection)
        headers = {"Content-Type": "application/json", "Connection": "close"}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        try:
            connection.connect()
            if self._stop.is_set():  # too late for those who end the connections there are
                raise Spoiled("an interruption")
            connection.request(method, self._root + path, None if body is None else json.dumps(body), headers)
            reply = connection.getresponse()
            data = reply.read(LONGEST_REPLY)
            if reply.length:  # it promised more
                raise Spoiled("a timeout" if late.is_set() else "an answer that makes no sense")
            return reply.status, data, reply.getheader("Retry-After")
        except TimeoutError:
            raise Spoiled("a timeout") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise Spoiled("a timeout" if late.is_set() else _reason(error)) from None
        finally:
            timer.cancel()
            self._alive.discard(connection)
            connection.close()


def _end(connection: http.client.HTTPConnection, late: threading.Event | None = None) -> None:
    if late is not None:
        late.set()
    if connection.sock is not None:
        try:
            connection.sock.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads from it
        except OSError:
            pass  # it has just ended by itself


def _reason(error: Exception) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "no server there"
    if isinstance(error, ConnectionResetError | BrokenPipeError | http.client.RemoteDisconnected):
        return "a connection that was reset"
    if isinstance(error, http.client.HTTPException):
        return "an answer that makes no sense"
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__)[:80]


def _named(counts: Counter[str]) -> str:
    return ", ".join(f"{count}x {name}" for name, count in counts.most_common())
