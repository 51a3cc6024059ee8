"""Acceptance from the spec_decode counters of vLLM, in this process or behind a server's /metrics.

Counters are sums over all requests between two reads. So requests are sent in groups of one category, and a group is
one sample; only a group of a single request gives the counts of one response.

A failed request of a server (reset, timeout, 429, 5xx, invalid response) may have changed the counters, so its whole
group is measured again.
"""

import json
import os
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from peagle import http_client
from peagle.checkpoints.target import eos_ids
from peagle.checkpoints.validate import build_speculative_config
from peagle.config import EvalServerSettings, SamplingParams
from peagle.data.generators import FATAL_STATUSES, REJECTED_STATUSES
from peagle.data.prompts import Prompt
from peagle.errors import UserError
from peagle.eval.conversations import ConversationRunner, EvalDrafter, EvalJob, EvalRequest, EvalResponse, Evaluator
from peagle.eval.samples import AcceptanceSample

UNEXPLAINED = "the counters include tokens of other requests"
SpecDecodeCounters: TypeAlias = NDArray[np.int64]  # drafts, generated tokens, then accepted tokens at each position


class GroupInvalid(Exception):
    """The counts of a group cannot be used because a request failed; the message is a short reason."""


class CounterEvaluator(Evaluator):
    """Measures groups of requests by the counters before and after them."""

    @abstractmethod
    def read_counters(self, min_generation_tokens: int = 0) -> SpecDecodeCounters:
        """Current totals. Waits a while for late counters until `min_generation_tokens` are reached."""

    @abstractmethod
    def complete(self, requests: list[EvalRequest]) -> list[EvalResponse]: ...

    def measure_group(self, group: list[Prompt], temperature: float) -> list[AcceptanceSample]:
        """One sample for every turn of the group."""
        samples: list[AcceptanceSample] = []

        def complete(requests: list[EvalRequest]) -> list[EvalResponse]:
            if not requests:
                return []
            before = self.read_counters()
            responses = self.complete(requests)
            num_tokens = sum(response.num_tokens for response in responses)
            change = self.read_counters(int(before[1]) + num_tokens) - before
            if change.min() < 0:
                raise GroupInvalid("counters decreased (restart?)")
            num_drafts, num_generated, *accepted = change.tolist()
            if num_generated != num_tokens:
                self.warnings.append(UNEXPLAINED)
            looping = responses[0].is_looping if len(responses) == 1 else None
            category = group[0].category
            samples.append(AcceptanceSample(category, len(responses), num_tokens, num_drafts, tuple(accepted), looping))
            return responses

        self.runner.run(group, temperature, complete)
        return samples

    def measure_groups(self, job: EvalJob, concurrency: int) -> list[AcceptanceSample]:
        """Samples of the data set in groups of the same category."""
        by_category: dict[str | None, list[Prompt]] = {}
        for row in job.dataset.prompts.rows:
            by_category.setdefault(row.category, []).append(row)
        members = by_category.values()
        groups = [rows[i : i + concurrency] for rows in members for i in range(0, len(rows), concurrency)]
        samples: list[AcceptanceSample] = []
        for i, group in enumerate(groups):
            samples += self.measure_group(group, job.temperature)
            self.on_progress("groups", i + 1, len(groups))
        return samples


class VllmEvaluator(CounterEvaluator):
    """Stock vLLM in this process; a new engine for every drafter and K."""

    def __init__(self, target: Path, runner: ConversationRunner, dtype: str, concurrency: int) -> None:
        super().__init__(runner)
        self.target, self.dtype, self.concurrency = target, dtype, concurrency
        self.eos_ids = sorted(eos_ids(target))
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the counters are read in this process
        self._llm: Any = None
        self._started: tuple[EvalDrafter, int] | None = None  # drafter and K of the running engine

    def measure(self, job: EvalJob) -> Iterator[tuple[int, list[AcceptanceSample]]]:
        for k in job.ks:
            self._start(job.drafter, k)
            yield k, self.measure_groups(job, self.concurrency)

    def close(self) -> None:
        if self._started is not None:
            self._llm.llm_engine.engine_core.shutdown()
            self._llm = self._started = None

    def _start(self, drafter: EvalDrafter, k: int) -> None:
        if self._started == (drafter, k):
            return
        self.close()
        import torch

        options: dict[str, Any] = {
            "dtype": self.dtype,
            "enforce_eager": not torch.cuda.is_available(),  # compiling for a CPU takes minutes
            "max_num_seqs": self.concurrency,
            "max_model_len": self.runner.max_model_len,
            "disable_log_stats": False,
            "seed": self.settings.seed,
        }
        if torch.cuda.is_available():
            options["gpu_memory_utilization"] = self.settings.gpu_memory_utilization
        speculative_config = build_speculative_config(str(drafter.folder), k, drafter.method == "p-eagle")
        self._llm = start_vllm(self.target, speculative_config, options)
        self._started = (drafter, k)

    def read_counters(self, min_generation_tokens: int = 0) -> SpecDecodeCounters:
        assert self._started is not None
        values = {m.name: getattr(m, "value", None) or getattr(m, "values", None) for m in self._llm.get_metrics()}
        k = self._started[1]
        per_pos = values.get("vllm:spec_decode_num_accepted_tokens_per_pos") or [0] * k
        totals = [values.get(f"vllm:{name}") or 0 for name in ("spec_decode_num_drafts", "generation_tokens")]
        return np.array([*totals, *per_pos[:k]], dtype=np.int64)

    def complete(self, requests: list[EvalRequest]) -> list[EvalResponse]:
        params = [to_vllm_params(request.params, self.eos_ids) for request in requests]
        prompts = [{"prompt_token_ids": request.prompt_token_ids} for request in requests]
        outputs = [out.outputs[0] for out in self._llm.generate(prompts, params, use_tqdm=False)]
        return [EvalResponse(list(o.token_ids), o.finish_reason or "length", len(o.token_ids)) for o in outputs]


def start_vllm(target: Path, speculative_config: dict[str, Any] | None, options: dict[str, Any]) -> Any:
    """vLLM's LLM for a target with or without a drafter; its failures as UserError."""
    try:
        from vllm import LLM
    except ImportError as error:
        raise UserError(f"--engine vllm: vLLM cannot be imported ({error}); pip install vllm") from None
    try:
        return LLM(str(target), speculative_config=speculative_config, skip_tokenizer_init=True, **options)
    except Exception as error:  # vLLM raises many types
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        drafter = f" with {speculative_config['model']}" if speculative_config else ""
        raise UserError(f"--engine vllm: does not start{drafter} ({reason})") from error


def to_vllm_params(params: SamplingParams, eos_ids: list[int], **options: Any) -> Any:
    """vLLM's parameters for the same sampling. It runs without a tokenizer here, so EOS ids are stop tokens."""
    import vllm

    return vllm.SamplingParams(
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        ignore_eos=params.ignore_eos,
        stop_token_ids=None if params.ignore_eos else eos_ids,
        seed=params.seed if params.temperature else None,
        detokenize=False,
        **options,
    )


class ServerEvaluator(CounterEvaluator):
    """One server, with one drafter and one K."""

    measures_all_k = True
    dtype = "the server's"

    def __init__(self, server: EvalServerSettings, runner: ConversationRunner, eos_ids: Sequence[int]) -> None:
        super().__init__(runner)
        self.server, timeout = server, server.timeout_s
        base_url = http_client.parse_server_url(server.url, "--engine")
        timeouts = http_client.HttpTimeouts(timeout, timeout, timeout)
        self._http = http_client.HttpClient(base_url, timeouts, keep_alive=False)
        self._optional_fields: dict[str, Any] = {"return_token_ids": True, "stop_token_ids": sorted(eos_ids)}
        self.model = server.model or http_client.find_model(self._http, f"--engine {server.url}")
        try:
            self.num_speculative_tokens = len(self.read_counters()) - 2
        except GroupInvalid as error:
            raise UserError(f"--engine {server.url}: {error}") from None

    def measure(self, job: EvalJob) -> Iterator[tuple[int, list[AcceptanceSample]]]:
        yield self.num_speculative_tokens, self.measure_groups(job, self.server.concurrency)

    def measure_group(self, group: list[Prompt], temperature: float) -> list[AcceptanceSample]:
        for attempt in range(self.server.retries + 1):
            try:
                return super().measure_group(group, temperature)
            except GroupInvalid as error:
                reason = str(error)
                self.warnings.append(f"some requests were measured again: {reason}")
            time.sleep(self.server.backoff_s * 2**attempt)
        raise UserError(
            f"--engine {self.server.url}: gave up after {self.server.retries + 1} tries of a group of requests "
            f"({reason}); finished rows are kept; try a lower --concurrency if the server is overloaded"
        )

    def read_counters(self, min_generation_tokens: int = 0) -> SpecDecodeCounters:
        deadline = time.monotonic() + self.server.settle_s
        while (counters := self._parse_counters())[1] < min_generation_tokens and time.monotonic() <= deadline:
            time.sleep(0.02)
        return counters

    def _parse_counters(self) -> SpecDecodeCounters:
        totals, per_pos = Counter[str](), Counter[int]()
        for name, labels, value in http_client.parse_metrics(self._request("GET", "/metrics")):
            if labels.get("model_name", self.model) != self.model:
                continue
            if name == "vllm:spec_decode_num_accepted_tokens_per_pos":
                per_pos[int(labels.get("position", 0))] += int(value)
            elif name in ("vllm:spec_decode_num_drafts", "vllm:generation_tokens"):
                totals[name] += int(value)
        if len(totals) < 2 or not per_pos:
            missing = "has no vllm:spec_decode_* counters; start the server with a --speculative-config"
            raise UserError(f"--engine {self.server.url}: /metrics {missing}")
        counts = [per_pos[i] for i in range(max(per_pos) + 1)]
        return np.array([totals["vllm:spec_decode_num_drafts"], totals["vllm:generation_tokens"], *counts])

    def complete(self, requests: list[EvalRequest]) -> list[EvalResponse]:
        """All requests at once. If one fails the others are awaited, since they change the counters until they end."""
        pool = ThreadPoolExecutor(self.server.concurrency)
        try:
            futures = [pool.submit(self._complete_one, request) for request in requests]
            return [future.result() for future in futures]
        except KeyboardInterrupt:
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
            response = EvalResponse([int(i) for i in token_ids], str(finish_reason), num_tokens)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            raise GroupInvalid("invalid response") from None
        if finish_reason not in ("stop", "length"):
            raise GroupInvalid(f"finish_reason {finish_reason!r}"[:60])
        return response

    def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
        """Body of a successful response. Optional fields that the server rejects are dropped."""
        url, optional = self.server.url, dict(self._optional_fields) if body is not None else {}
        try:
            reply = self._http.request(method, path, {**body, **optional} if body is not None else None)
        except http_client.RequestFailed as error:
            raise GroupInvalid(error.name) from None
        if reply.status_code == 200:
            return reply.content
        message = http_client.error_message(reply.content, 300)
        if (status := reply.status_code) in FATAL_STATUSES:
            raise UserError(f"--engine {url}{path}: {status}, {http_client.STATUS_HELP[status]} ({message})")
        if reply.status_code not in REJECTED_STATUSES:
            raise GroupInvalid(f"status {reply.status_code}")
        rejected = [name for name in optional if name in message]
        if not rejected:
            reason, fix = f"({reply.status_code}: {message})", "check --max-model-len and --max-tokens"
            raise UserError(f"--engine {url}: rejected a request {reason}; {fix}")
        for name in rejected:
            self._optional_fields.pop(name, None)
        return self._request(method, path, body)
