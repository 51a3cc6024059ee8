"""Prometheus metrics with vLLM's names, labels and buckets, so that vLLM's dashboards and clients work here.

Requests are observed when they end; the engine's counts come from an `EngineStats` snapshot at every scrape. No text
of a request becomes part of a metric.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from peagle.server.engine_client import EngineStats
from peagle.server.errors import QUEUE_FULL, UNREADY
from peagle.server.request_stream import Completion

# vLLM's buckets (vllm/v1/metrics/buckets.py)
REQUEST_SECONDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_GAP_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
# vLLM stops at max_model_len, which is not known before the engine has started. Buckets above it stay equal.
TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))

HISTOGRAMS: dict[str, tuple[str, Sequence[float]]] = {
    "time_to_first_token_seconds": ("Time from arrival to the first token.", FIRST_TOKEN_SECONDS),
    "inter_token_latency_seconds": (
        "Time between two engine steps that produced tokens of a request; with draft tokens a step produces several.",
        TOKEN_GAP_SECONDS,
    ),
    "request_time_per_output_token_seconds": (
        "Mean time per output token of a request, without its first token.",
        TOKEN_GAP_SECONDS,
    ),
    "e2e_request_latency_seconds": ("Time from arrival to the last token.", REQUEST_SECONDS),
    "request_queue_time_seconds": ("Time in the queue.", REQUEST_SECONDS),
    "request_inference_time_seconds": ("Time from leaving the queue to the last token.", REQUEST_SECONDS),
    "request_prefill_time_seconds": ("Time from leaving the queue to the first token.", REQUEST_SECONDS),
    "request_decode_time_seconds": ("Time from the first token to the last.", REQUEST_SECONDS),
    "request_prompt_tokens": ("Prompt tokens per request.", TOKENS),
    "request_generation_tokens": ("Output tokens per request.", TOKENS),
    "request_max_num_generation_tokens": ("Output tokens per request; every completion counts by itself.", TOKENS),
    "request_params_max_tokens": ("The max_tokens of a request.", TOKENS),
}
ENGINE = "0"  # vLLM numbers its replicas; this server has one
FINISH_REASONS = ("stop", "length", "abort", "error")  # abort: the client has left
LABELS = ("model_name", "engine")
SLEEP_STATES = {"awake": 1, "weights_offloaded": 0, "discard_all": 0}  # this engine never sleeps


class BucketCounts:
    """A histogram. prometheus_client's own takes a lock for every value, and a request has hundreds."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class ServerMetrics(Collector):
    def __init__(self, model: str) -> None:
        """`model` is the served model name."""
        self.model, self.registry, self._stats = model, CollectorRegistry(), EngineStats()
        ProcessCollector(registry=self.registry)
        self.registry.register(self)
        self._histograms = {name: BucketCounts(bounds) for name, (_, bounds) in HISTOGRAMS.items()}
        finished = Counter(
            "vllm:request_success", "Ended requests.", (*LABELS, "finished_reason"), registry=self.registry
        )
        self._finished = {reason: finished.labels(model, ENGINE, reason) for reason in FINISH_REASONS}
        rejected = Counter(
            "vllm:admission_rejections", "Rejected requests.", ("model_name", "reason"), registry=self.registry
        )
        self._rejected = {reason: rejected.labels(model, reason) for reason in (QUEUE_FULL, UNREADY)}

    def observe_request(
        self, completion: Completion, e2e_s: float, num_prompt_tokens: int, finish_reason: str, max_tokens: int
    ) -> None:
        """Records a completion that has ended; n completions of one prompt are n requests, as in vLLM."""
        self._finished[finish_reason].inc()
        num_output_tokens, ttft_s = len(completion.token_ids), completion.first_token_s
        queue_s = completion.queue_s if completion.queue_s is not None else e2e_s
        values: dict[str, float] = {
            "e2e_request_latency_seconds": e2e_s,
            "request_queue_time_seconds": queue_s,
            "request_prompt_tokens": num_prompt_tokens,
            "request_generation_tokens": num_output_tokens,
            "request_max_num_generation_tokens": num_output_tokens,
            "request_params_max_tokens": max_tokens,
        }
        if ttft_s is not None:
            prefill_s, decode_s = max(ttft_s - queue_s, 0.0), sum(completion.token_gaps_s)
            values |= {
                "time_to_first_token_seconds": ttft_s,
                "request_prefill_time_seconds": prefill_s,
                "request_decode_time_seconds": decode_s,
                "request_inference_time_seconds": prefill_s + decode_s,
                "request_time_per_output_token_seconds": decode_s / max(num_output_tokens - 1, 1),
            }
            for seconds in completion.token_gaps_s:
                self._histograms["inter_token_latency_seconds"].observe(seconds)
        for name, value in values.items():
            self._histograms[name].observe(value)

    def observe_rejection(self, reason: str) -> None:
        """Counts a rejected request: `QUEUE_FULL` (status 429) or `UNREADY` (503)."""
        self._rejected[reason].inc()

    def render(self, stats: EngineStats) -> tuple[bytes, str]:
        """Returns all metrics in Prometheus' text format, and its content type."""
        self._stats = stats
        return generate_latest(self.registry), CONTENT_TYPE_LATEST

    def collect(self) -> Iterable[Metric]:
        for name, (text, bounds) in HISTOGRAMS.items():
            histogram = self._histograms[name]
            texts = [floatToGoString(bound) for bound in (*bounds, math.inf)]
            family = HistogramMetricFamily(f"vllm:{name}", text, labels=LABELS)
            buckets = list(zip(texts, accumulate(histogram.counts), strict=True))
            family.add_metric([self.model, ENGINE], buckets, histogram.sum)
            yield family
        gauge, counter = partial(self._build, GaugeMetricFamily), partial(self._build, CounterMetricFamily)
        s, hits, queries = self._stats, self._stats.num_prefix_cache_hits, self._stats.num_prefix_cache_queries
        waiting = {"capacity": s.num_requests_waiting, "deferred": 0}
        yield gauge("vllm:num_requests_running", "Running requests.", s.num_requests_running)
        yield gauge("vllm:num_requests_waiting", "Waiting requests.", s.num_requests_waiting)
        yield gauge("vllm:num_requests_waiting_by_reason", "Waiting requests by reason.", waiting, "reason")
        yield gauge("vllm:kv_cache_usage_perc", "Share of KV cache blocks in use, 0 to 1.", s.kv_cache_usage)
        yield gauge("vllm:engine_sleep_state", "The engine is always awake.", SLEEP_STATES, "sleep_state")
        yield counter("vllm:prompt_tokens", "Prompt tokens.", s.num_prompt_tokens)
        yield counter("vllm:generation_tokens", "Output tokens.", s.num_output_tokens)
        yield counter("vllm:num_preemptions", "Preempted requests.", s.num_preemptions)
        yield counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", queries)
        yield counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", hits)
        yield counter("vllm:prompt_tokens_cached", "Prompt tokens not computed again.", hits)
        yield counter("peagle:num_decode_steps", "Decode steps, summed over requests.", s.num_decode_steps)
        yield counter("peagle:engine_restarts", "Engine restarts after a failure.", s.num_restarts)
        yield counter("peagle:late_compilations", "Kernels compiled while requests could run.", s.num_late_compilations)
        if per_pos := s.num_accepted_tokens_per_pos:  # as in vLLM, absent without a drafter
            num_drafts, by_position = sum(s.acceptance_histogram), {str(i): count for i, count in enumerate(per_pos)}
            yield counter("vllm:spec_decode_num_drafts", "Decode steps with draft tokens.", num_drafts)
            yield counter("vllm:spec_decode_num_draft_tokens", "Draft tokens.", s.num_draft_tokens)
            yield counter("vllm:spec_decode_num_accepted_tokens", "Accepted draft tokens.", sum(per_pos))
            text = "Accepted draft tokens by position in the draft, from 0."
            yield counter("vllm:spec_decode_num_accepted_tokens_per_pos", text, by_position, "position")

    def _build(self, family: Any, name: str, text: str, value: Any, label: str | None = None) -> Metric:
        """Builds a metric with one value, or with one per value of an extra label."""
        metric = family(name, text, labels=LABELS if label is None else (*LABELS, label))
        for label_values, number in [((), value)] if label is None else [((key,), n) for key, n in value.items()]:
            metric.add_metric((self.model, ENGINE, *label_values), number)
        return metric
