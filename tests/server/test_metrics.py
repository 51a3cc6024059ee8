"""/metrics has the series and labels that vLLM 0.32's dashboards and clients read, with the engine's counts.

The Grafana dashboard uses only these series.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import promql_parser
import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from peagle.config import SamplingParams
from peagle.engine.detokenizer import Detokenizer
from peagle.server.engine_client import EngineStats
from peagle.server.errors import QUEUE_FULL
from peagle.server.metrics import ServerMetrics
from peagle.server.request_stream import Completion

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "deploy" / "grafana" / "peagle.json"
FROM_PROMETHEUS = {"instance", "job"}  # labels that it adds itself
EVERY = ("model_name", "engine")
SPECULATION = {
    "vllm:spec_decode_num_drafts_total": EVERY,
    "vllm:spec_decode_num_draft_tokens_total": EVERY,
    "vllm:spec_decode_num_accepted_tokens_total": EVERY,
    "vllm:spec_decode_num_accepted_tokens_per_pos_total": (*EVERY, "position"),
}
# What vLLM's published dashboards (general, speculative decoding, service status) read, and their labels.
READ_BY_VLLM = {
    "vllm:num_requests_running": EVERY,
    "vllm:num_requests_waiting": EVERY,
    "vllm:kv_cache_usage_perc": EVERY,
    "vllm:engine_sleep_state": (*EVERY, "sleep_state"),
    "vllm:prompt_tokens_total": EVERY,
    "vllm:generation_tokens_total": EVERY,
    "vllm:request_success_total": (*EVERY, "finished_reason"),
    "vllm:request_queue_time_seconds_sum": EVERY,
    "vllm:request_prefill_time_seconds_sum": EVERY,
    "vllm:request_decode_time_seconds_sum": EVERY,
    "vllm:request_max_num_generation_tokens_sum": EVERY,
    "vllm:request_prompt_tokens_bucket": (*EVERY, "le"),
    "vllm:request_generation_tokens_bucket": (*EVERY, "le"),
    **{
        f"vllm:{name}_{part}": (*EVERY, "le") if part == "bucket" else EVERY
        for name in ("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds")
        for part in ("bucket", "sum", "count")
    },
    **SPECULATION,
}
STATS = EngineStats(
    num_requests_running=3,
    num_requests_waiting=5,
    kv_cache_usage=0.25,
    num_prompt_tokens=100,
    num_output_tokens=60,
    num_decode_steps=25,
    num_draft_tokens=60,
    acceptance_histogram=[4, 6, 6, 4],
    num_preemptions=1,
    num_prefix_cache_hits=32,
    num_prefix_cache_queries=100,
    num_restarts=2,
)


class Scrape:
    """The metrics as Prometheus parses them."""

    def __init__(self, text: str) -> None:
        self.samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
        self.labels = {s.name: set(s.labels) for s in self.samples}

    def __getitem__(self, name: str) -> float:
        (found,) = [s.value for s in self.samples if s.name == name]
        return found

    def by(self, name: str, label: str) -> dict[str, float]:
        return {s.labels[label]: s.value for s in self.samples if s.name == name}


def scrape(metrics: ServerMetrics, stats: EngineStats = STATS) -> Scrape:
    body, content_type = metrics.render(stats)
    assert content_type.startswith("text/plain; version=")
    return Scrape(body.decode())


def test_vllms_series_exist_before_the_first_request() -> None:
    found = scrape(ServerMetrics("small"))
    assert {name: found.labels.get(name) for name in READ_BY_VLLM} == {n: set(ls) for n, ls in READ_BY_VLLM.items()}
    assert {s.labels["model_name"] for s in found.samples if s.name.startswith("vllm:")} == {"small"}
    assert {s.labels["engine"] for s in found.samples if "engine" in s.labels} == {"0"}


def test_engine_counts_and_speculation_only_with_a_drafter() -> None:
    metrics = ServerMetrics("small")
    found = scrape(metrics)
    assert found.by("vllm:spec_decode_num_accepted_tokens_per_pos_total", "position") == {"0": 16, "1": 10, "2": 4}
    expected = {
        "vllm:num_requests_running": 3,
        "vllm:num_requests_waiting": 5,
        "vllm:kv_cache_usage_perc": 0.25,
        "vllm:prompt_tokens_total": 100,
        "vllm:generation_tokens_total": 60,
        "vllm:num_preemptions_total": 1,
        "vllm:prefix_cache_hits_total": 32,
        "vllm:prefix_cache_queries_total": 100,
        "vllm:spec_decode_num_drafts_total": 20,
        "vllm:spec_decode_num_draft_tokens_total": 60,
        "vllm:spec_decode_num_accepted_tokens_total": 30,
        "peagle:num_decode_steps_total": 25,
        "peagle:engine_restarts_total": 2,
    }
    assert {name: found[name] for name in expected} == expected
    assert (
        scrape(metrics, replace(STATS, num_requests_running=4, num_decode_steps=26))["peagle:num_decode_steps_total"]
        == 26
    )
    # vllm bench serve takes one of these series as a sign of speculation
    plain = scrape(metrics, replace(STATS, acceptance_histogram=[]))
    assert not [name for name in plain.labels if "spec_decode" in name]


def test_requests_fall_into_the_right_buckets() -> None:
    metrics = ServerMetrics("small")
    detokenizer = Detokenizer(lambda ids: "", (), 0)
    served, left = (Completion(i, SamplingParams(), detokenizer, arrival_time=0.0) for i in range(2))
    served.first_token_s, served.token_gaps_s, served.queue_s, served.token_ids = 0.3, [0.02, 0.2], 0.1, [1] * 12
    metrics.observe_request(served, 0.52, 7, "stop", 16)
    metrics.observe_request(left, 9.0, 40, "abort", 16)
    metrics.observe_rejection(QUEUE_FULL)
    found = scrape(metrics)

    def within(name: str, bound: float) -> float:
        buckets = {float(le): value for le, value in found.by(f"vllm:{name}_bucket", "le").items()}
        assert buckets[math.inf] == found[f"vllm:{name}_count"]
        return buckets[bound]

    assert (within("time_to_first_token_seconds", 0.25), within("time_to_first_token_seconds", 0.5)) == (0, 1)
    assert (within("inter_token_latency_seconds", 0.01), within("inter_token_latency_seconds", 0.025)) == (0, 1)
    assert within("inter_token_latency_seconds", 0.2) == found["vllm:inter_token_latency_seconds_count"] == 2
    assert (within("e2e_request_latency_seconds", 0.8), within("e2e_request_latency_seconds", 10.0)) == (1, 2)
    assert (within("request_prompt_tokens", 5), within("request_prompt_tokens", 10)) == (0, 1)
    assert (within("request_generation_tokens", 10), within("request_generation_tokens", 20)) == (1, 2)
    sums = {
        "request_queue_time": 9.1,  # also of the one that never left the queue
        "request_prefill_time": 0.2,
        "request_decode_time": 0.22,
        "request_inference_time": 0.42,
        "request_time_per_output_token": 0.22 / 11,
    }
    for name, seconds in sums.items():
        assert found[f"vllm:{name}_seconds_sum"] == pytest.approx(seconds), name
    ended = found.by("vllm:request_success_total", "finished_reason")
    assert ended == {"stop": 1, "length": 0, "abort": 1, "error": 0}
    assert found.by("vllm:admission_rejections_total", "reason")[QUEUE_FULL] == 1


def panels() -> list[dict[str, Any]]:
    return json.loads(DASHBOARD.read_text())["panels"]


def series(expression: Any) -> list[tuple[str, set[str]]]:
    """Returns the series of an expression, each with the labels it selects or groups by."""
    found: list[tuple[str, set[str]]] = []

    def visit(node: Any) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            found.append((node.name, {m.name for m in node.matchers.matchers}))
        elif isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            found.extend((name, set(node.modifier.labels)) for name, _ in series(node.expr))

    promql_parser.walk(expression, visit)
    return found


def test_the_dashboard_uses_existing_series_and_labels() -> None:
    labels = scrape(ServerMetrics("small")).labels
    used = set()
    for panel in panels():
        for target in panel.get("targets", []):
            read = series(promql_parser.parse(re.sub(r"\$__\w+", "5m", target["expr"])))
            for name, used_labels in read:
                assert name in labels, f"{panel['title']}: {name}"
                assert used_labels <= labels[name] | FROM_PROMETHEUS, f"{panel['title']}: {name} by {used_labels}"
                used.add(name)
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                assert any(label in labels[name] | FROM_PROMETHEUS for name, _ in read), panel["title"]
    assert SPECULATION.keys() <= used
    assert {n for n in READ_BY_VLLM if n.endswith("_bucket") and "seconds" in n} <= used
    missing = {"vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:request_success_total"} - used
    assert not missing


def test_the_dashboard_can_be_imported() -> None:
    board = json.loads(DASHBOARD.read_text())
    # an imported file has no id of its own, finds its data source by a variable, and its panels do not overlap
    assert board["id"] is None and board["uid"] and board["title"] and board["schemaVersion"] >= 36
    variables = {v["name"]: v for v in board["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(board["panels"])))
    assert used - variables.keys() == {"__rate_interval", "__range"}, "what Grafana knows by itself"
    ids = [p["id"] for p in board["panels"]]
    assert len(set(ids)) == len(ids)
    cells: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        own = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24 and not own & cells, panel["title"]
        cells |= own
        assert panel["type"] == "row" or panel["targets"], panel["title"]
