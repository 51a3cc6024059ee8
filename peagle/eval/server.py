"""Acceptance from a server with OpenAI's completions and vLLM's /metrics.

429 and 503 leave no trace in the counters, so those requests are retried. Any other failure (reset, timeout, 5xx,
invalid response) may have changed the counters, so the whole group is measured again.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from peagle.config import EvalServerSettings
from peagle.data.prompts import Prompt
from peagle.errors import UserError
from peagle.eval.conversations import ConversationRunner, EvalRequest, EvalResponse
from peagle.eval.counters import GroupInvalid, SpecDecodeCounters, measure_group, split_groups
from peagle.eval.datasets import EvalDataset
from peagle.eval.samples import AcceptanceSample, EvalProgress
from peagle.http_client import STATUS_HELP, HttpClient, HttpTimeouts, RequestFailed, error_message, parse_server_url

FATAL_STATUSES = (401, 403, 404)
BUSY_STATUSES = (429, 503)
METRIC_LINE = re.compile(r"^(vllm:\w+?)(?:_total)?(\{.*\})?\s+(\S+)")
METRIC_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class ServerEvaluator:
    """One server, with one drafter and one K."""

    measures_all_k = True
    dtype = "the server's"

    def __init__(
        self,
        settings: EvalServerSettings,
        runner: ConversationRunner,
        eos_ids: Sequence[int],
        on_progress: EvalProgress,
    ) -> None:
        self.settings, self.runner, self.on_progress = settings, runner, on_progress
        self.warnings: list[str] = []
        self.failures: Counter[str] = Counter()
        self._stop = threading.Event()
        timeout = settings.timeout_s
        base_url = parse_server_url(settings.url, "--engine")
        self._http = HttpClient(base_url, HttpTimeouts(timeout, timeout, timeout), keep_alive=False)
        self._optional_fields: dict[str, Any] = {"return_token_ids": True, "stop_token_ids": sorted(eos_ids)}
        try:
            self.model = settings.model or self._find_model()
            self.num_speculative_tokens = len(self.read_counters().num_accepted_tokens_per_pos)
            busy = any(name == "vllm:num_requests_running" and value > 0 for name, _, value in self._read_metrics())
        except GroupInvalid as error:
            raise UserError(f"--engine {settings.url}: {error}") from None
        if busy:
            self.warnings.append("the server was serving other requests at the start")

    def measure(
        self, drafter: object, dataset: EvalDataset, temperature: float, ks: Sequence[int]
    ) -> Iterator[tuple[int, list[AcceptanceSample]]]:
        samples: list[AcceptanceSample] = []
        groups = list(split_groups(dataset.prompts.rows, self.settings.concurrency))
        num_lost = consecutive_lost = 0
        for i, group in enumerate(groups):
            group_samples = self._measure_with_retries(group, temperature)
            samples += group_samples or []
            consecutive_lost = 0 if group_samples is not None else consecutive_lost + 1
            num_lost += group_samples is None
            nothing_measured = i + 1 == len(groups) and not samples
            if consecutive_lost >= self.settings.failures or (consecutive_lost and nothing_measured):
                raise UserError(
                    f"--engine {self.settings.url}: gave up after {self.settings.retries + 1} tries each of "
                    f"{consecutive_lost} group(s) of requests ({_format_counts(self.failures)}); finished rows are kept"
                )
            self.on_progress("groups", i + 1, len(groups))
        if self.failures:
            lost = f"; {num_lost} of {len(groups)} groups are not counted" if num_lost else ""
            self.warnings.append(f"{dataset.name}: {_format_counts(self.failures)}; groups were measured again{lost}")
            self.failures.clear()
        yield self.num_speculative_tokens, samples

    def close(self) -> None:
        pass

    def _measure_with_retries(self, group: list[Prompt], temperature: float) -> list[AcceptanceSample] | None:
        for attempt in range(self.settings.retries + 1):
            warnings: list[str] = []
            try:
                samples = measure_group(self, self.runner, group, temperature, warnings)
            except GroupInvalid as error:
                self.failures[str(error)] += 1
                if attempt < self.settings.retries:
                    time.sleep(min(self.settings.backoff_s * 2**attempt, self.settings.max_backoff_s))
                continue
            self.warnings += warnings
            return samples
        return None

    def read_counters(self, min_generation_tokens: int | None = None) -> SpecDecodeCounters:
        deadline = time.monotonic() + self.settings.settle_s
        while True:
            counters = self._parse_counters()
            generated = counters.num_generation_tokens
            if min_generation_tokens is None or generated is None or generated >= min_generation_tokens:
                return counters
            if time.monotonic() > deadline:
                return counters
            time.sleep(0.02)

    def _parse_counters(self) -> SpecDecodeCounters:
        totals, per_pos = Counter[str](), Counter[int]()
        for name, labels, value in self._read_metrics():
            if name == "vllm:spec_decode_num_accepted_tokens_per_pos":
                per_pos[int(labels.get("position", 0))] += int(value)
            else:
                totals[name] += int(value)
        if "vllm:spec_decode_num_drafts" not in totals or not per_pos:
            raise UserError(
                f"--engine {self.settings.url}: /metrics has no vllm:spec_decode_* counters; start the server with a "
                "--speculative-config"
            )
        generated = totals["vllm:generation_tokens"] if "vllm:generation_tokens" in totals else None
        counts = tuple(per_pos[i] for i in range(max(per_pos) + 1))
        return SpecDecodeCounters(totals["vllm:spec_decode_num_drafts"], counts, generated)

    def _read_metrics(self) -> Iterator[tuple[str, dict[str, str], float]]:
        """Names without `_total`, labels and values of vLLM's metrics for this model."""
        for line in self._request("GET", "/metrics").decode(errors="replace").splitlines():
            if (match := METRIC_LINE.match(line)) is None:
                continue
            labels = dict(METRIC_LABEL.findall(match[2] or ""))
            try:
                value = float(match[3])
            except ValueError:
                continue
            if value == value and labels.get("model_name", self.model) == self.model:
                yield match[1], labels, value

    def complete(self, requests: list[EvalRequest]) -> list[EvalResponse]:
        """All requests at once. If one fails the others are awaited, since they change the counters until they end."""
        pool = ThreadPoolExecutor(self.settings.concurrency)
        try:
            futures = [pool.submit(self._complete_one, request) for request in requests]
            return [future.result() for future in futures]
        except KeyboardInterrupt:
            self._stop.set()
            self._http.close()
            raise
        finally:
            pool.shutdown(cancel_futures=True)

    def _complete_one(self, request: EvalRequest) -> EvalResponse:
        params = request.params
        max_output_tokens = self.runner.max_model_len - len(request.prompt_token_ids)  # servers reject more
        body = {
            "model": self.model,
            "prompt": request.prompt_token_ids,
            "max_tokens": min(params.max_tokens, max_output_tokens),
            "temperature": params.temperature,
            "seed": params.seed,
        }
        data = self._request("POST", "/v1/completions", body)
        try:
            reply = json.loads(data)
            choice = reply["choices"][0]
            finish_reason, text, token_ids = choice["finish_reason"], choice["text"], choice.get("token_ids")
            count = (reply.get("usage") or {}).get("completion_tokens")
            if token_ids is None:
                token_ids = self.runner.encode(str(text))
            num_tokens = int(count if count is not None else len(token_ids))
            response = EvalResponse([int(i) for i in token_ids], str(finish_reason), server_token_count=num_tokens)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            raise GroupInvalid("invalid response") from None
        if finish_reason not in ("stop", "length"):
            raise GroupInvalid(f"finish_reason {finish_reason!r}"[:60])
        return response

    def _find_model(self) -> str:
        url = self.settings.url
        try:
            names = [str(model["id"]) for model in json.loads(self._request("GET", "/v1/models"))["data"]]
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"--engine {url}: does not list its models; give --model NAME") from None
        if len(names) != 1:
            raise UserError(f"--engine {url}: give --model NAME, one of {', '.join(names) or 'none'}")
        return names[0]

    def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
        """Body of a successful response. Retries busy servers, and drops optional fields that the server rejects."""
        url = self.settings.url
        for attempt in range(self.settings.retries + 1):
            optional = dict(self._optional_fields) if body is not None else {}
            try:
                reply = self._http.request(method, path, {**body, **optional} if body is not None else None)
            except RequestFailed as error:
                raise GroupInvalid(error.name) from None
            if reply.status == 200:
                return reply.body
            status, message = reply.status, error_message(reply.body, 300)
            if status in FATAL_STATUSES:
                raise UserError(f"--engine {url}{path}: {status}, {STATUS_HELP[status]} ({message})")
            rejected = [name for name in optional if name in message]
            if status in (400, 422) and rejected:
                for name in rejected:
                    self._optional_fields.pop(name, None)
                continue
            if status in (400, 413, 422):
                raise UserError(
                    f"--engine {url}: rejected a request ({status}: {message}); check --max-model-len and --max-tokens"
                )
            if status not in BUSY_STATUSES:
                raise GroupInvalid(f"status {status}")
            self.failures[f"status {status}"] += 1
            retry_after = reply.retry_after
            wait_s = (
                float(retry_after) if retry_after and retry_after.isdigit() else self.settings.backoff_s * 2**attempt
            )
            if attempt < self.settings.retries and self._stop.wait(min(wait_s, self.settings.max_backoff_s)):
                break
        raise GroupInvalid(f"status {status} after every retry")


def _format_counts(counts: Counter[str]) -> str:
    return ", ".join(f"{count}x {name}" for name, count in counts.most_common())
