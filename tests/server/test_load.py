"""Load: five hundred streams at once, more than the queue takes, and clients that leave.

Every answer is compared with the engine's own, in the client that asked (`scripts/serve_load.py`), and the server's
counters with what happened.
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
def asks() -> list[Ask]:
    """From an engine without a drafter: drafts change no text."""
    made = make_asks(str(engines.target().folder), None, CLIENTS, 12, dtype="float32", device="cpu", threads=1)
    assert len({a.text for a in made}) > 0.9 * CLIENTS, "answers must tell whose they are"
    return made


def scrape(url: str, label: str = "") -> Counter[str]:
    """Every series summed over its labels; those that have `label` also by its values."""
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(urlopen(f"{url}/metrics").read().decode()):
        for sample in family.samples:
            found[sample.name] += sample.value
            if label in sample.labels:
                found[f"{sample.name} {sample.labels[label]}"] += sample.value
    return found


def nothing_wrong(report: Report) -> None:
    assert (report.lost, report.mixed, report.differs, report.failures) == (0, 0, 0, {})
    assert report.kv_use_left == 0


def test_five_hundred_streams_at_once() -> None:
    flags = [*FLAGS, "--max-num-seqs", "64", "--max-queued-requests", str(CLIENTS)]
    with serving(str(engines.target().folder), DRAFTER, flags) as url:
        report = load(url, "steady", asks(), CLIENTS)
        print(report)
        nothing_wrong(report)
        assert (report.ok, report.refused, report.uncounted_tokens) == (CLIENTS, 0, 0)
        assert report.most_running > 8 and report.most_waiting > CLIENTS / 2 and 0 < report.most_kv_use < 1

        told = scrape(url, "finished_reason")
        for reason, count in Counter(a.finish_reason for a in asks()).items():
            assert told[f"vllm:request_success_total {reason}"] == count
        assert told["vllm:request_success_total"] == CLIENTS
        for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time"):
            assert told[f"vllm:{name}_seconds_count"] == CLIENTS, name
        assert told["vllm:request_generation_tokens_sum"] == told["vllm:generation_tokens_total"]
        prompts = sum(len(a.body["prompt"] if "prompt" in a.body else a.body["messages"][0]["content"]) for a in asks())
        assert told["vllm:request_prompt_tokens_sum"] == told["vllm:prompt_tokens_total"] == prompts  # a byte, a token

        told = scrape(url, "position")
        drafts, held = (told[f"vllm:spec_decode_num_{name}_total"] for name in ("drafts", "accepted_tokens"))
        places = [told[f"vllm:spec_decode_num_accepted_tokens_per_pos_total {i}"] for i in range(K)]
        assert drafts > places[0] and places == sorted(places, reverse=True) and sum(places) == held > drafts
        # a round with drafts brings those that held and one more; only at an answer's end may some of them be cut off
        first, every = CLIENTS, told["vllm:generation_tokens_total"]
        assert 0 <= drafts + held + first - every < CLIENTS * K


def test_too_many_are_refused_at_once_and_all_are_served_afterwards() -> None:
    flags = [*FLAGS, "--max-num-seqs", "8", "--max-queued-requests", "8"]
    with serving(str(engines.target().folder), DRAFTER, flags) as url:
        report = load(url, "overload", asks(), 200)
        print(report)
        nothing_wrong(report)
        assert report.ok >= 16 and report.refused > 50 and report.ok + report.refused == 200
        assert report.recovered == AGAIN
        assert scrape(url, "reason")["vllm:admission_rejections_total max_num_queued_reqs"] >= report.refused

        report = load(url, "soak", asks(), 12, seconds=6)
        print(report)
        nothing_wrong(report)
        assert report.left > 0 and report.ok > 20 and report.refused == 0
        # some may have been answered to the end before they were seen to leave
        assert 0 < scrape(url, "finished_reason")["vllm:request_success_total abort"] <= report.left
