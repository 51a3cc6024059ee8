"""`peagle bench`: numbers against the server's log and the engine's counts, failures, resuming."""

from __future__ import annotations

import asyncio
import json
import math
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forks
import numpy as np
import pytest
from engine_integrity import check_scheduler
from engines import engine, target
from hypothesis import given
from hypothesis import strategies as st
from pairs import drafter_folder, prompts
from scipy import stats
from streaming import FAULTS, MANNERS, StreamServer
from support import many

from peagle.bench.engines import EmbeddedBench, PromptTokenizer
from peagle.bench.run import BenchVariant, EngineVariants, run_bench
from peagle.bench.server import ServerBench
from peagle.bench.workload import BenchPrompt, Load, RequestTiming, Workload, summarize_repeat
from peagle.cli import main
from peagle.cli.app import parse_items, repeat_flags
from peagle.config import BenchEngineSettings, BenchServerSettings, BenchSettings, SamplingParams
from peagle.display import ProgressBar
from peagle.errors import UserError
from peagle.http_client import EventDecoder, parse_metrics, parse_server_url
from peagle.results.comparison import (
    all_warnings,
    check_comparable,
    compute_speedup,
    find_baseline,
    row_warnings,
)
from peagle.results.files import read_results
from peagle.results.schema import BenchRepeat, BenchRow, Percentiles, Results

TOKENIZER: Any = SimpleNamespace(tokenizer=lambda text, add_special_tokens: {"input_ids": [1, 2, 3]})
QUICK = {"connect_s": 2.0, "stall_s": 0.7, "total_s": 2.0}


def workload(texts: list[str], max_tokens: int = 4, **other: Any) -> Workload:
    asks = tuple(BenchPrompt(text=text) for text in texts)
    return Workload("here", asks, max_tokens, other.pop("ignore_eos", True), other.pop("temperature", 0.0), 0)


def silent(num_finished: int) -> None:
    pass


def ask_server(
    server: StreamServer, work: Workload, load: Load, tokenizer: Any = None, **settings: Any
) -> tuple[BenchRepeat, list[str]]:
    own = BenchServerSettings(server.url, **{**QUICK, **settings})
    with ServerBench(own, tokenizer) as client:
        return client.measure(work, work.prompts, load, 0, silent)


# Numbers


traces = st.builds(
    lambda sent, gaps, tokens, failed: RequestTiming(
        sent, list(np.cumsum([sent, *gaps])[1:]), 5, max(tokens, 1), "HTTP 500" if failed else None
    ),
    st.floats(0, 100),
    st.lists(st.floats(1e-5, 3), min_size=1, max_size=6),
    st.integers(1, 40),
    st.booleans(),
)


@many(150)
@given(st.lists(traces, max_size=12), st.floats(0.1, 100))
def test_repeat_summary_matches_numpy(runs: list[RequestTiming], seconds: float) -> None:
    made = summarize_repeat(runs, seconds, 2.0)
    good = [t for t in runs if t.failure is None]
    want = {
        "ttft_ms": [t.chunk_times[0] - t.sent_at for t in good],
        "e2el_ms": [t.chunk_times[-1] - t.sent_at for t in good],
        "tpot_ms": [
            (t.chunk_times[-1] - t.chunk_times[0]) / (t.num_output_tokens - 1) for t in good if t.num_output_tokens > 1
        ],
        "itl_ms": [gap for t in good for gap in np.diff(t.chunk_times)],
    }
    for name, values in want.items():
        found = getattr(made, name)
        if not values:
            assert found is None
            continue
        expected = [np.mean(values), *np.percentile(values, [50, 95, 99])]
        assert [found.mean, found.median, found.p95, found.p99] == pytest.approx([1e3 * v for v in expected], abs=1e-6)
    assert made.completed == len(good) and made.failed == ({"HTTP 500": len(runs) - len(good)} if runs != good else {})
    assert made.output_throughput == pytest.approx(sum(t.num_output_tokens for t in good) / seconds)


def repeat(tokens: int, seconds: float, requests: int = 32, failed: dict[str, int] | None = None) -> BenchRepeat:
    some = Percentiles(1.0, 1.0, 1.0, 1.0)
    return BenchRepeat(seconds, requests, failed or {}, 10, tokens, some, some, some, some)


def row(rates: list[float], method: str = "p-eagle", **changed: Any) -> BenchRow:
    made = [repeat(3200, 3200 / rate) for rate in rates]
    return replace(BenchRow("n", "embedded", None, method, None, 4, None, made, "a" * 64), **changed)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:Precision loss")
@many(60)
@given(
    st.lists(st.floats(50, 200), min_size=2, max_size=6),
    st.lists(st.floats(50, 200), min_size=2, max_size=6),
)
def test_speedup_has_welchs_interval(fast: list[float], slow: list[float]) -> None:
    found = compute_speedup(row(fast), row(slow, "none"))
    assert found.ratio == pytest.approx(np.mean(fast) / np.mean(slow))
    assert found.ci95 is not None
    low, high = found.ci95
    a, b = np.log(fast), np.log(slow)
    error = math.sqrt(a.var(ddof=1) / len(a) + b.var(ddof=1) / len(b))
    if error < 1e-6:
        return
    freedom = stats.ttest_ind(a, b, equal_var=False).df
    # near a whole number either of the two is right: rounding decides, and it is not the same here and there
    reaches = [stats.t.ppf(0.975, max(1, math.floor(freedom + way))) * error for way in (-1e-6, 1e-6)]
    assert any(math.log(high / low) / 2 == pytest.approx(reach, rel=1e-3) for reach in reaches)
    assert math.sqrt(low * high) == pytest.approx(found.ratio)


def test_rows_of_different_workloads_are_not_compared() -> None:
    base, fast = row([100, 101], "none"), row([150, 152])
    check_comparable(fast, base)
    assert compute_speedup(row([150]), row([100], "none")).ci95 is None
    with pytest.raises(UserError, match="workloads differ"):
        compute_speedup(replace(fast, workload_sha256="b" * 64), base)
    shorter = replace(fast, repeats=[replace(r, total_output_tokens=r.total_output_tokens // 2) for r in fast.repeats])
    with pytest.raises(UserError, match="50 and 100 tokens"):
        check_comparable(shorter, base)
    with pytest.raises(UserError, match="is empty"):
        check_comparable(replace(fast, repeats=[repeat(0, 1.0, 0, {"HTTP 500": 8})]), base)
    assert any("50 and 100 tokens" in warning for warning in all_warnings([base, shorter]))
    # other servers have other addresses, but a server's baseline is no engine's
    served, plain = replace(fast, engine="http://b"), replace(base, engine="http://a")
    assert find_baseline(served, [base, plain, served]) is plain
    assert find_baseline(fast, [plain, replace(base, concurrency=8)]) is None


def test_unreliable_rows_have_warnings() -> None:
    assert row_warnings(row([100, 101, 102])) == []
    for doubtful, expected in [
        (row([100, 125]), "repeats differ by 22%"),
        (row([100]), "no interval"),
        (row([2000, 2000]), "only 1.6 s"),
        (row([100, 100], concurrency=17), "only 32 requests at concurrency 17.*--num-prompts 34"),
        (row([100, 100], repeats=[repeat(3200, 32, failed={"HTTP 429": 3}), repeat(3200, 32)]), r"3 of 67.*HTTP 429 3"),
        (row([100, 100], request_rate=2.0, concurrency=None), "1 requests/s completed of 2"),
    ]:
        (found,) = row_warnings(doubtful)
        assert re.search(expected, found), found


# Arrivals


def test_arrivals_are_a_poisson_process() -> None:
    for seed in range(5):
        times = np.array(Load(request_rate=8.0).arrival_times(4000, seed))
        assert times[-1] == pytest.approx(500.0) and (np.diff(times) > 0).all()
        gaps = np.diff(times, prepend=0.0)
        assert stats.kstest(gaps, "expon", args=(0, 1 / 8)).pvalue > 0.001
        assert stats.kstest(times[:-1], "uniform", args=(0, 500)).pvalue > 0.001
        counts = np.histogram(times, np.arange(0, 501))[0]
        assert counts.var() / counts.mean() == pytest.approx(1.0, abs=0.2)  # neither even nor in bursts
        assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 0.06  # without a memory
    slow = Load(request_rate=2.0)
    assert slow.arrival_times(50, 1) == slow.arrival_times(50, 1) != slow.arrival_times(50, 2)


# Bytes


@many(120)
@given(st.data())
def test_events_do_not_depend_on_chunk_boundaries(data: st.DataObject) -> None:
    expected = data.draw(st.lists(st.text(st.characters(blacklist_characters="\n\r", codec="utf-8")), max_size=5))
    end = data.draw(st.sampled_from(["\n", "\r\n"]))
    stream = "".join(f": ping{end}data: {text}{end}{end}" for text in expected).encode()
    decoder, events = EventDecoder(), []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        events += decoder.feed(stream[:size])
        stream = stream[size:]
    assert events == expected


def test_server_urls() -> None:
    for url in ("http://h:8000", "h:8000/v1/", "http://h:8000/v1/chat/completions", "http://h:8000/v1/completions"):
        assert parse_server_url(url) == "http://h:8000"
    assert parse_server_url("https://h/proxy/v1") == "https://h/proxy"
    assert parse_server_url("https://h:443") == "https://h" and parse_server_url("http://[::1]:80") == "http://[::1]"
    for url in ("ftp://h", "http://", "http://h:port"):
        with pytest.raises(UserError, match="--engine"):
            parse_server_url(url, "--engine")


# A server


def test_latencies_match_the_servers_log() -> None:
    """Two tokens a chunk, so that tokens and chunks differ; the server's clock is this process's."""
    with StreamServer(first_s=0.08, each_s=0.02, bunch=2) as server:
        work = workload([f"p {i}" for i in range(12)], max_tokens=9)
        repeat, _ = ask_server(server, work, Load(4))
        assert server.most_running == 4
        log = server.answered
    assert (repeat.completed, repeat.failed) == (12, {})
    assert (repeat.total_output_tokens, repeat.total_input_tokens) == (12 * 9, 12 * 7)
    for name, values in {
        "ttft_ms": [s.written[0] - s.received for s in log],
        "e2el_ms": [s.written[-1] - s.received for s in log],
        "tpot_ms": [(s.written[-1] - s.written[0]) / 8 for s in log],
        "itl_ms": [gap for s in log for gap in np.diff(s.written)],
    }.items():
        found = getattr(repeat, name)
        assert found.mean >= 1e3 * np.mean(values) - 2 and found.median >= 1e3 * np.median(values) - 2
    lasted = max(s.written[-1] for s in log) - min(s.received for s in log)
    assert repeat.duration >= lasted
    assert {s.body["max_tokens"] for s in log} == {9} and all(s.body["ignore_eos"] for s in log)
    assert len({s.connection for s in log}) == 4, "connections are used again"


def test_open_loop_does_not_wait_for_responses() -> None:
    with StreamServer(first_s=0.5) as server:
        work = workload([f"p {i}" for i in range(20)])
        made, _ = ask_server(server, work, Load(request_rate=20.0))
        log = sorted(server.answered, key=lambda s: s.received)
        assert server.most_running > 5, "it does not wait for answers"
    assert made.completed == 20
    due = np.array(Load(request_rate=20.0).arrival_times(20, 0))
    received = np.array([s.received for s in log])
    assert (received - received[-1] <= due - due[-1] + 0.5).all()


@pytest.mark.parametrize("chat", [False, True])
def test_all_valid_stream_formats_are_accepted(chat: bool) -> None:
    with StreamServer() as server:
        texts = [f"as:{manner}. {i}" for i in range(2) for manner in MANNERS]
        work = workload(texts)
        if chat:
            work = replace(work, prompts=tuple(BenchPrompt(messages=(("user", text),)) for text in texts))
        made, _ = ask_server(server, work, Load(3), total_s=20.0)
        assert made.failed == {} and made.completed == len(texts)
        assert made.total_output_tokens == 4 * len(texts)
        assert {s.path for s in server.answered} == {"/v1/chat/completions" if chat else "/v1/completions"}


@pytest.mark.parametrize("load", [Load(5), Load(request_rate=60.0)], ids=str)
def test_every_fault_is_counted_by_name(load: Load) -> None:
    """Good and bad requests beside each other on shared connections: all good ones are answered, all bad ones named."""
    texts = [f"as:{MANNERS[i % len(MANNERS)]}. {i}" for i in range(len(FAULTS))]
    mixed = [text for i, fault in enumerate(FAULTS) for text in (texts[i], f"fault:{fault}. {i}")]
    with StreamServer() as server:
        made, warnings = ask_server(server, workload(mixed), load, TOKENIZER, failures=1000)
    assert made.failed == Counter(name for name in FAULTS.values() if name)
    assert (made.completed, made.total_output_tokens) == (len(FAULTS) + 1, 4 * len(FAULTS) + 3)
    assert "the server sends no usage: output tokens are counted by tokenizing the text" in warnings
    assert any("'HTTP 503': this is a 503" in warning for warning in warnings)


def test_servers_without_usage_need_a_tokenizer() -> None:
    with StreamServer() as server, pytest.raises(UserError, match="sends no usage; give TARGET"):
        ask_server(server, workload(["fault:no usage."] * 2), Load(1))


def test_gives_up_after_consecutive_failures() -> None:
    with StreamServer() as server:
        work = workload(["fine", *["fault:429."] * 50])
        with pytest.raises(UserError, match="gave up after .* consecutive failures .HTTP 429: this is a 429"):
            ask_server(server, work, Load(2))
        assert len(server.answered) < 20
    for port in (1, 9):
        with ServerBench(BenchServerSettings(f"http://127.0.0.1:{port}", "m", **QUICK)) as client:
            with pytest.raises(UserError, match="connection refused"):
                client.measure(work, work.prompts, Load(2), 0, silent)
    with pytest.raises(UserError, match="connection refused"):
        ServerBench(BenchServerSettings("http://127.0.0.1:9", **QUICK))
    with StreamServer(models=("a", "b")) as server, pytest.raises(UserError, match="--model NAME, one of a, b"):
        ServerBench(BenchServerSettings(server.url))


def vllm_metrics(server: StreamServer, drafts: bool = False, others: int = 0, cached: float = 0.0) -> str:
    tokens = sum(s.tokens for s in server.answered)
    reads = sum(s.path == "/metrics" for s in server.log)
    lines = [
        "# HELP vllm:generation_tokens_total Number of generation tokens processed.",
        f'vllm:generation_tokens_total{{engine="0",model_name="a b"}} {tokens + others * reads}.0',
        f'vllm:prefix_cache_queries_total{{engine="0"}} {7.0 * len(server.answered)}',
        f'vllm:prefix_cache_hits_total{{engine="0"}} {7.0 * cached * len(server.answered)}',
        'vllm:generation_tokens_created{engine="0"} 1.7e+09',
    ]
    if drafts:  # every round drafts 3 and keeps 1, so it brings 2 tokens
        for part in (0, 1):  # two engines behind one address
            lines += [
                f'vllm:spec_decode_num_drafts_total{{engine="{part}"}} {tokens / 4}',
                f'vllm:spec_decode_num_draft_tokens_total{{engine="{part}"}} {tokens / 4 * 3}',
                f'vllm:spec_decode_num_accepted_tokens_total{{engine="{part}"}} {tokens / 4}',
            ]
    return "\n".join(lines) + "\n"


def test_server_counters_give_acceptance_and_warnings() -> None:
    work = workload([f"p {i}" for i in range(6)], max_tokens=8)
    with StreamServer(metrics=lambda s: vllm_metrics(s, drafts=True)) as server:
        made, warnings = ask_server(server, work, Load(2), method="p-eagle", num_speculative_tokens=3)
        assert made.acceptance_length == pytest.approx(2.0) and warnings == []
        with pytest.raises(UserError, match="--method none.*report 3 draft tokens"):
            ask_server(server, work, Load(2))
        with pytest.raises(UserError, match="-k 7.*report 3 draft tokens"):
            ask_server(server, work, Load(2), method="eagle3", num_speculative_tokens=7)
    with StreamServer(metrics=lambda s: vllm_metrics(s, others=5, cached=0.5)) as server:
        made, warnings = ask_server(server, work, Load(2))
        assert made.acceptance_length is None
        assert any("counted 53 tokens, 48 were received" in n for n in warnings)
        assert any("50% of the prompt tokens hit the server's prefix cache" in n for n in warnings)
        with pytest.raises(UserError, match="report 0 draft tokens"):
            ask_server(server, work, Load(2), method="p-eagle", num_speculative_tokens=3)
    text = b'vllm:a_total nonsense\nvllm:b_total{x="y z"} 2\nother_total 3\n'
    assert list(parse_metrics(text)) == [("vllm:b", {"x": "y z"}, 2.0)]


# The document


class Counting:
    """A bench whose measurements take no time; `stop_after` interrupts it."""

    def __init__(self) -> None:
        self.measured: list[tuple[str, int]] = []
        self.stop_after: int | None = None

    def __enter__(self) -> Counting:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def measure(self, work: Workload, asks: Any, load: Load, seed: int, tell: Any) -> Any:
        if self.stop_after == len(self.measured):
            raise KeyboardInterrupt
        self.measured.append((str(load), seed))
        return repeat(100 * len(asks), 5.0, len(asks)), ["a note"]


def run(path: Path, counting: Counting, methods: tuple[str, ...] = ("none", "p-eagle"), **changed: Any) -> Results:
    settings = BenchSettings((1, 2), (4.0,), num_prompts=8, **{"repeats": 2, "num_warmups": 0, **changed})
    variants = [BenchVariant(m, "embedded", None, m, None, lambda: counting) for m in methods]  # type: ignore[arg-type]
    return run_bench(variants, workload(["a"] * 8, settings.max_tokens), settings, ProgressBar(), path, {"target": "t"})


def test_same_command_resumes(tmp_path: Path) -> None:
    path, counting = tmp_path / "out.json", Counting()
    counting.stop_after = 3
    first = run(path, counting)
    assert not first.finished
    assert [len(r.repeats) for r in read_results(path).rows] == [2, 1]
    counting.stop_after = None
    whole = run(path, counting)
    assert whole.finished and whole == read_results(path)
    # every load of every variant twice, with the same two arrivals, and nothing of it again
    assert Counter(counting.measured) == Counter(
        [(load, seed) for load in ("c=1", "c=2", "4/s") for seed in (0, 1)] * 2
    )
    before = len(counting.measured)
    assert run(path, counting).rows == whole.rows and len(counting.measured) == before
    more = run(path, counting, ("none", "p-eagle", "eagle3"), repeats=3)
    assert len(counting.measured) - before == 3 * 2 + 3 * 3
    assert {r.method for r in more.rows} == {"none", "p-eagle", "eagle3"}
    assert sum("a note" in w for w in more.warnings) == 9, "once for each row, though every repeat reports it"
    for changed, expected in [
        ({"max_tokens": 5}, "max_tokens 128, now"),
        ({"num_warmups": 3}, "num_warmups 0, now it is 3"),
    ]:
        with pytest.raises(UserError, match=f"was started with {expected}"):
            run(path, counting, **changed)


# The engine


@pytest.mark.parametrize(("name", "k"), [(None, 0), ("p-eagle-4", 4), ("eagle3-1", 2)])
def test_embedded_counts_match_generate(name: str | None, k: int) -> None:
    texts = prompts(6, 16)
    work = replace(workload([], 20), prompts=tuple(BenchPrompt(token_ids=tuple(p)) for p in texts), ignore_eos=False)
    llm = engine(name, k, max_num_seqs=2)
    outputs = [o.outputs[0] for o in llm.generate(texts, SamplingParams(max_tokens=20))]
    drafts = sum(o.num_drafts for o in outputs)
    want = 1 + sum(sum(o.num_accepted_tokens_per_pos) for o in outputs) / drafts if drafts else None
    with EmbeddedBench(llm, PromptTokenizer(target().folder)) as embedded:
        for load in (Load(1), Load(5), Load(request_rate=500.0)):
            told: list[int] = []
            steps = _counted_steps(llm)
            began = time.perf_counter()
            made, _ = embedded.measure(work, work.prompts, load, 0, told.append)
            took = time.perf_counter() - began
            assert (made.completed, made.failed) == (6, {})
            assert told == [1, 2, 3, 4, 5, 6] and made.total_output_tokens == sum(len(o.token_ids) for o in outputs)
            assert made.total_input_tokens == sum(map(len, texts))
            assert made.acceptance_length == (pytest.approx(want) if want is not None else None)
            assert 0 < made.duration <= took
            assert made.ttft_ms is not None and made.e2el_ms is not None
            assert made.ttft_ms.mean <= made.e2el_ms.mean <= 1e3 * took
            if load.concurrency == 1:
                # requests follow each other without a gap, so their times fill the whole
                assert 6 * made.e2el_ms.mean / 1e3 == pytest.approx(made.duration, rel=0.05, abs=0.01)
                assert steps[0] == pytest.approx(sum(1 + o.num_decode_steps for o in outputs), abs=6)
            check_scheduler(llm.scheduler)
            assert not llm.has_unfinished_requests


def _counted_steps(llm: Any) -> list[int]:
    counted, step = [0], type(llm).step

    def counting() -> Any:
        counted[0] += 1
        return step(llm)

    llm.step = counting
    return counted


def test_embedded_open_loop_counts_from_arrival() -> None:
    """The engine is slowed to 50 ms a step, so who arrives in the middle of one waits for it: half of it on average."""
    llm = engine(None, 0, max_num_seqs=4)
    step = llm.step

    def slow() -> Any:
        time.sleep(0.05)
        return step()

    llm.step = slow  # type: ignore[method-assign]
    work = replace(workload([], 1), prompts=tuple(BenchPrompt(token_ids=(65, 66, 67)) for _ in range(24)))
    with EmbeddedBench(llm, PromptTokenizer(target().folder)) as embedded:
        made, _ = embedded.measure(work, work.prompts, Load(request_rate=12.0), 3, silent)
    assert made.ttft_ms is not None and made.ttft_ms.mean >= 50
    assert made.ttft_ms.p95 > 65, "waiting for a step that runs counts"
    assert 24 / 12.0 <= made.duration


def test_errors_are_raised_before_weights_are_loaded(tmp_path: Path) -> None:
    folder, drafter = str(target().folder), str(drafter_folder("p-eagle-1"))
    embedded = EngineVariants(folder, [drafter], [2, "auto"], True, BenchEngineSettings(device="cpu", dtype="float32"))
    long = BenchSettings((1,), num_prompts=2, max_tokens=1000, random_input_len=8)
    with pytest.raises(UserError, match="--max-tokens 1000.*max_model_len 256"):
        embedded.build(embedded.build_workload([], long), long)
    with pytest.raises(UserError, match="--data.*--random-input-len"):
        embedded.build_workload([], BenchSettings())
    fine = BenchSettings((1, 4), num_prompts=2, max_tokens=8, random_input_len=8)
    work = embedded.build_workload([], fine)
    assert [(v.label, v.num_speculative_tokens) for v in embedded.build(work, fine)] == [
        ("peagle no drafter", None),
        ("peagle p-eagle K=2", 2),
        ("peagle p-eagle K=auto", "auto"),
    ]
    assert work.sha256 == embedded.build_workload([], fine).sha256 and work.ignore_eos
    other = [replace(fine, **c) for c in ({"max_tokens": 9}, {"seed": 1}, {"temperature": 1.0}, {"num_prompts": 3})]
    assert len({work.sha256, *(embedded.build_workload([], s).sha256 for s in other)}) == 5
    (tmp_path / "p.jsonl").write_text(
        '{"prompt": "a"}\n{"turns": ["b", "c"]}\n{"messages": [{"role": "user", "content": "d"}]}\n'
    )
    read = embedded.build_workload([str(tmp_path / "p.jsonl")], replace(fine, random_input_len=None, num_prompts=4))
    assert [ask.messages[-1][1] for ask in read.prompts] == [
        "a",
        "b",
        "d",
        "a",
    ] and "repeated prompts" in read.warnings[0]


# The command line


def test_options_with_several_values() -> None:
    several = {"--c", "-k"}
    assert repeat_flags(["t", "--c", "1", "8", "--x", "2", "-k", "3", "auto"], several) == [
        *("t", "--c", "1", "--c", "8", "--x", "2", "-k", "3", "-k", "auto")
    ]
    assert repeat_flags(["--c", "-1", "-k", "--x"], several) == ["--c", "-1", "-k", "--x"]
    assert repeat_flags(["--c", "1", "--", "2"], several) == ["--c", "1", "--", "2"]
    assert parse_items(int, "--c", ["1,8", "64", "8"]) == (1, 8, 64)


@dataclass
class CommandResult:
    status: int
    out: str
    err: str


@pytest.fixture
def peagle(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., CommandResult]:
    def called(*args: str) -> CommandResult:
        monkeypatch.setattr(sys, "argv", ["peagle", "bench", *args])
        with pytest.raises(SystemExit) as left:
            main()
        captured = capsys.readouterr()
        return CommandResult(int(left.value.code or 0), captured.out, captured.err)

    return called


@pytest.fixture(scope="module")
def slow_server() -> Iterator[StreamServer]:
    with StreamServer(first_s=0.05, each_s=0.01) as server:
        yield server


def test_command_measures_a_server_and_resumes_a_file(
    slow_server: StreamServer, tmp_path: Path, peagle: Callable[..., CommandResult]
) -> None:
    file, out = tmp_path / "p.jsonl", tmp_path / "out.json"
    file.write_text("".join(json.dumps({"prompt": f"hello {i}"}) + "\n" for i in range(8)))
    common = [
        "--engine",
        slow_server.url,
        "--data",
        str(file),
        "--num-prompts",
        "8",
        "--repeats",
        "2",
        "--out",
        str(out),
    ]
    first = peagle(*common, "--concurrency", "1", "4", "--max-tokens", "5", "--json")
    assert first.status == 0, first.err
    results = json.loads(first.out)
    assert results["kind"] == "bench" and results["finished"]
    assert [(r["concurrency"], len(r["repeats"])) for r in results["rows"]] == [(1, 2), (4, 2)]
    assert all(r["repeats"][0]["total_output_tokens"] == 40 for r in results["rows"])
    assert results["rows"][1]["output_throughput"] > 0
    second = peagle(*common, "--concurrency", "1,4", "--max-tokens", "5", "--method", "p-eagle", "-k", "3")
    assert second.status == 0, second.err
    assert "speedup" in second.out and "p-eagle K=3" in second.out and "x" in second.out
    assert len(read_results(out).rows) == 4
    refused = peagle(*common, "--max-tokens", "6")
    assert refused.status == 2 and "was started with max_tokens 5, now it is 6" in refused.err
    bad = peagle(
        "--engine",
        slow_server.url,
        "--random-input-len",
        "4",
        "--concurrency",
        "2",
        "--num-prompts",
        "4",
        "--max-tokens",
        "3",
    )
    assert bad.status == 0, bad.err
    file.write_text(json.dumps({"prompt": "fault:503."}) + "\n" + json.dumps({"prompt": "fine"}) + "\n")
    failed = peagle(
        "--engine", slow_server.url, "--data", str(file), "--num-prompts", "4", "--repeats", "1", "--max-tokens", "3"
    )
    assert failed.status == 1 and "HTTP 503 2" in failed.err and "this is a 503" in failed.err


def test_ctrl_c_keeps_finished_repeats(slow_server: StreamServer, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = ["-m", "peagle", "bench", "--engine", slow_server.url, "--random-input-len", "4"]
    command += ["--num-prompts", "8", "--concurrency", "2", "--max-tokens", "20", "--repeats", "50", "--out", str(out)]
    process = forks.Process(*command)
    process.wait_until(lambda: out.exists() and len(read_results(out).rows[0].repeats) >= 2)
    process.kill(signal.SIGINT)
    status, err = process.wait(), process.stderr()
    assert status == 130 and "the same command resumes" in err and "Traceback" not in err
    kept = read_results(out)
    assert not kept.finished and 2 <= len(kept.rows[0].repeats) < 50
    assert all(not r.failed and r.completed == 8 for r in kept.rows[0].repeats)


def test_cancelled_run_leaves_no_tasks_or_connections() -> None:
    """Neither tasks nor connections with half an answer in them: the next run is as good as the first."""
    with StreamServer(first_s=0.1, each_s=0.1) as server:
        work = workload([f"p {i}" for i in range(8)])
        with ServerBench(BenchServerSettings(server.url, "m", **QUICK)) as client:

            async def cancelled() -> int:
                streams = [client._build_stream(prompt, work, 0) for prompt in work.prompts]
                task = asyncio.create_task(client._send_all(streams, Load(4), 0, silent))
                await asyncio.sleep(0.25)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                return len(asyncio.all_tasks())

            assert client._loop.run(cancelled()) == 1
            made, _ = client.measure(work, work.prompts, Load(4), 0, silent)
    assert (made.completed, made.failed) == (8, {})
    assert made.itl_ms is not None and made.itl_ms.mean >= 90
