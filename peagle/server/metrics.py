"""What the server tells Prometheus: vLLM's names, labels and buckets, so that its clients and dashboards work here.

Knows nothing about HTTP or the engine: requests are told to it when they end, and the engine's counters come as a
snapshot when someone asks. No text of a request ever gets here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from peagle.server.stats import EngineStats

# vLLM's bounds (vllm/v1/metrics/buckets.py), so that percentiles of two servers are cut at the same places.
REQUEST_SECONDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
BETWEEN_TOKENS_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
# vLLM stops at the model's longest text, which is not known before the engine has started; bounds above it stay equal.
TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))

ENGINE = "0"  # vLLM numbers its replicas; here there is one
FINISH_REASONS = ("stop", "length", "abort", "error")
QUEUE_FULL, UNREADY = "max_num_queued_reqs", "unready"  # the first is vLLM's word
REFUSALS = (QUEUE_FULL, UNREADY)
LABELS = ("model_name", "engine")
SLEEP_STATES = {"awake": 1, "weights_offloaded": 0, "discard_all": 0}  # of an engine that never sleeps


class Metrics:
    """One server's metrics. `model` is the name that clients ask for."""

    def __init__(self, model: str, registry: CollectorRegistry | None = None) -> None:
        self.model = model
        self.registry = registry if registry is not None else CollectorRegistry()
        ProcessCollector(registry=self.registry)

        def histogram(name: str, what: str, buckets: Sequence[float]) -> Histogram:
            made = Histogram(f"vllm:{name}", what, LABELS, buckets=buckets, registry=self.registry)
            return made.labels(model, ENGINE)

        self._first = histogram("time_to_first_token_seconds", "From arrival to the first token.", FIRST_TOKEN_SECONDS)
        self._between = histogram(
            "inter_token_latency_seconds",
            "Between two steps that brought a request tokens; with drafts a step brings several.",
            BETWEEN_TOKENS_SECONDS,
        )
        self._each = histogram(
            "request_time_per_output_token_seconds",
            "Time a token after the first, the mean of a request.",
            BETWEEN_TOKENS_SECONDS,
        )
        self._whole = histogram("e2e_request_latency_seconds", "From arrival to the last token.", REQUEST_SECONDS)
        self._queued = histogram("request_queue_time_seconds", "Before the engine took the request.", REQUEST_SECONDS)
        self._worked = histogram(
            "request_inference_time_seconds", "From leaving the queue to the last token.", REQUEST_SECONDS
        )
        self._prefill = histogram(
            "request_prefill_time_seconds", "From leaving the queue to the first token.", REQUEST_SECONDS
        )
        self._decode = histogram("request_decode_time_seconds", "From the first token to the last.", REQUEST_SECONDS)
        self._prompt = histogram("request_prompt_tokens", "Tokens of a request's prompt.", TOKENS)
        self._generated = histogram("request_generation_tokens", "Tokens of a request's answer.", TOKENS)
        self._longest = histogram(
            "request_max_num_generation_tokens", "Tokens of the longest answer; each counts by itself.", TOKENS
        )
        self._asked = histogram("request_params_max_tokens", "The max_tokens of a request.", TOKENS)
        ended = Counter(
            "vllm:request_success",
            "Requests that ended, by why they did.",
            (*LABELS, "finished_reason"),
            registry=self.registry,
        )
        self._ended = {reason: ended.labels(model, ENGINE, reason) for reason in FINISH_REASONS}
        refused = Counter(
            "vllm:admission_rejections",
            "Requests that were not let in, by why.",
            ("model_name", "reason"),
            registry=self.registry,
        )
        self._refused = {reason: refused.labels(model, reason) for reason in REFUSALS}

    def observe_request(
        self,
        *,
        ttft_s: float | None,
        itl_s: Sequence[float],
        e2e_s: float,
        queue_s: float,
        prompt_tokens: int,
        generated_tokens: int,
        finish_reason: str,
        max_tokens: int | None = None,
    ) -> None:
        """An answer has ended; n answers to one prompt are n requests, as in vLLM.

        All seconds count from the arrival, but for `itl_s`: what lay between its pieces. `ttft_s` is None where no
        token came. `finish_reason` is the engine's, or "abort" (the client left) or "error".
        """
        assert finish_reason in self._ended, finish_reason
        self._ended[finish_reason].inc()
        self._whole.observe(e2e_s)
        self._queued.observe(queue_s)
        self._prompt.observe(prompt_tokens)
        self._generated.observe(generated_tokens)
        self._longest.observe(generated_tokens)
        if max_tokens is not None:
            self._asked.observe(max_tokens)
        if ttft_s is None:
            return
        self._first.observe(ttft_s)
        for seconds in itl_s:
            self._between.observe(seconds)
        decoding = sum(itl_s)
        self._prefill.observe(max(ttft_s - queue_s, 0.0))
        self._decode.observe(decoding)
        self._worked.observe(max(ttft_s - queue_s, 0.0) + decoding)
        self._each.observe(decoding / (generated_tokens - 1) if generated_tokens > 1 else 0.0)

    def observe_refusal(self, reason: str) -> None:
        """A request was not let in: `QUEUE_FULL` (429) or `UNREADY` (503)."""
        assert reason in self._refused, reason
        self._refused[reason].inc()

    def render(self, stats: EngineStats) -> tuple[bytes, str]:
        """Everything in Prometheus' text format, and its content type."""
        engine = CollectorRegistry(auto_describe=False)
        engine.register(_EngineCollector(self.model, stats))
        return generate_latest(self.registry) + generate_latest(engine), CONTENT_TYPE_LATEST


class _EngineCollector(Collector):
    """The engine's own counts at one moment. They are kept over restarts of the engine, so they never fall."""

    def __init__(self, model: str, stats: EngineStats) -> None:
        self.model, self.stats = model, stats

    def collect(self) -> Iterable[Metric]:
        stats = self.stats
        yield self._gauge("vllm:num_requests_running", "Requests that the engine works on.", stats.running)
        yield self._gauge("vllm:num_requests_waiting", "Requests that wait for it.", stats.waiting)
        reasons = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason", "Why they wait: for room, always.", labels=[*LABELS, "reason"]
        )
        for reason, value in (("capacity", stats.waiting), ("deferred", 0)):
            reasons.add_metric([self.model, ENGINE, reason], value)
        yield reasons
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of the cache's blocks in use; 1 is all.", stats.kv_use)
        asleep = GaugeMetricFamily(
            "vllm:engine_sleep_state", "This engine is always awake.", labels=[*LABELS, "sleep_state"]
        )
        for state, value in SLEEP_STATES.items():
            asleep.add_metric([self.model, ENGINE, state], value)
        yield asleep
        yield self._counter("vllm:prompt_tokens", "Tokens of prompts.", stats.prompt_tokens)
        yield self._counter("vllm:generation_tokens", "Tokens of answers.", stats.generated_tokens)
        yield self._counter("vllm:num_preemptions", "Requests that gave their blocks back.", stats.preemptions)
        yield self._counter(
            "vllm:prefix_cache_queries", "Prompt tokens that were looked for in the cache.", stats.prefix_queries
        )
        yield self._counter("vllm:prefix_cache_hits", "Prompt tokens that were found there.", stats.prefix_hits)
        yield self._counter("vllm:prompt_tokens_cached", "Prompt tokens that were not read anew.", stats.prefix_hits)
        yield self._counter("peagle:engine_rounds", "Rounds of requests, with drafts and without.", stats.rounds)
        yield self._counter("peagle:engine_restarts", "Times that the engine failed and was rebuilt.", stats.restarts)
        if stats.num_accepted_tokens_per_pos:  # as in vLLM: without a drafter there are none of these
            yield from self._speculation()

    def _speculation(self) -> Iterable[Metric]:
        stats = self.stats
        yield self._counter("vllm:spec_decode_num_drafts", "Rounds of requests that had drafts.", stats.drafts)
        yield self._counter("vllm:spec_decode_num_draft_tokens", "Tokens that were drafted.", stats.draft_tokens)
        yield self._counter("vllm:spec_decode_num_accepted_tokens", "Drafted tokens that held.", stats.accepted_tokens)
        places = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafted tokens that held, by their place in the draft, from 0.",
            labels=[*LABELS, "position"],
        )
        for position, accepted in enumerate(stats.num_accepted_tokens_per_pos):
            places.add_metric([self.model, ENGINE, str(position)], accepted)
        yield places

    def _gauge(self, name: str, what: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, what, labels=LABELS)
        family.add_metric([self.model, ENGINE], value)
        return family

    def _counter(self, name: str, what: str, value: float) -> Metric:
        family = CounterMetricFamily(name, what, labels=LABELS)
        family.add_metric([self.model, ENGINE], value)
        return family
