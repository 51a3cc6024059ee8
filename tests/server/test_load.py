"""Load: five hundred streams, more requests than the queue holds, and clients that disconnect.

The clients (`scripts/serve_load.py`) compare every output with the engine's own output.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from urllib.request import urlopen

import engines
import pairs
from prometheus_client.parser import text_string_to_metric_families

from scripts.serve_load import AGAIN, Ask, Report, load, make_asks, serving

DRAFTER, K = str(pairs.drafter_folder("p-eagle-1")), 5
FLAGS = ("--dtype", "float32", "--device", "cpu", "-k", str(K))
CLIENTS = 500


@cache
def get_requests() -> list[Ask]:
    """Requests with the expected output of an engine without a drafter."""
    requests = make_asks(str(engines.target().folder), None, CLIENTS, 12, dtype="float32", device="cpu", threads=1)
    assert len({a.text for a in requests}) > 0.9 * CLIENTS, "outputs must differ between requests"
    return requests


def scrape(url: str, label: str = "") -> Counter[str]:
    """Sums every series over its labels, and also by the values of `label`."""
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(urlopen(f"{url}/metrics").read().decode()):
        for sample in family.samples:
            found[sample.name] += sample.value
            if label in sample.labels:
                found[f"{sample.name} {sample.labels[label]}"] += sample.value
    return found


def check_report(report: Report) -> None:
    assert (report.lost, report.mixed, report.differs, report.failures) == (0, 0, 0, {})
    assert report.kv_use_left == 0


def test_five_hundred_concurrent_streams() -> None:
    flags = [*FLAGS, "--max-num-seqs", "64", "--max-queued-requests", str(CLIENTS)]
    with serving(str(engines.target().folder), DRAFTER, flags) as url:
        report = load(url, "steady", get_requests(), CLIENTS)
        print(report)
        check_report(report)
        assert (report.ok, report.refused, report.uncounted_tokens) == (CLIENTS, 0, 0)
        assert report.most_running > 8 and report.most_waiting > CLIENTS / 2 and 0 < report.most_kv_use < 1

        metrics = scrape(url, "finished_reason")
        for reason, count in Counter(a.finish_reason for a in get_requests()).items():
            assert metrics[f"vllm:request_success_total {reason}"] == count
        assert metrics["vllm:request_success_total"] == CLIENTS
        for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time"):
            assert metrics[f"vllm:{name}_seconds_count"] == CLIENTS, name
        assert metrics["vllm:request_generation_tokens_sum"] == metrics["vllm:generation_tokens_total"]
        prompts = sum(
            len(a.body["prompt"] if "prompt" in a.body else a.body["messages"][0]["content"]) for a in get_requests()
        )
        assert (
            metrics["vllm:request_prompt_tokens_sum"] == metrics["vllm:prompt_tokens_total"] == prompts
        )  # a byte, a token

        metrics = scrape(url, "position")
        drafts, accepted = (metrics[f"vllm:spec_decode_num_{name}_total"] for name in ("drafts", "accepted_tokens"))
        per_position = [metrics[f"vllm:spec_decode_num_accepted_tokens_per_pos_total {i}"] for i in range(K)]
        assert (
            drafts > per_position[0]
            and per_position == sorted(per_position, reverse=True)
            and sum(per_position) == accepted > drafts
        )
        # a decode step adds the accepted tokens and one more; only the end of a completion may cut some
        first, every = CLIENTS, metrics["vllm:generation_tokens_total"]
        assert 0 <= drafts + accepted + first - every < CLIENTS * K


def test_overload_is_rejected_and_passes() -> None:
    flags = [*FLAGS, "--max-num-seqs", "8", "--max-queued-requests", "8"]
    with serving(str(engines.target().folder), DRAFTER, flags) as url:
        report = load(url, "overload", get_requests(), 200)
        print(report)
        check_report(report)
        assert report.ok >= 16 and report.refused > 50 and report.ok + report.refused == 200
        assert report.recovered == AGAIN
        assert scrape(url, "reason")["vllm:admission_rejections_total max_num_queued_reqs"] >= report.refused

        report = load(url, "soak", get_requests(), 12, seconds=6)
        print(report)
        check_report(report)
        assert report.left > 0 and report.ok > 20 and report.refused == 0
        # some requests may have finished before the disconnect was noticed
        assert 0 < scrape(url, "finished_reason")["vllm:request_success_total abort"] <= report.left
