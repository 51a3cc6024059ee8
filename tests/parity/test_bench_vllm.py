"""`peagle bench` beside `vllm bench serve`: the same server, the same prompts, the same numbers within 3%.

The server is ours and keeps a pace, so what differs is how the two clients send, read and count. They are run in turns,
and of each number the best of the turns is compared: what else the machine does can only make a turn worse.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from peagle.bench.server import ServerBench
from peagle.bench.workload import BenchPrompt, Load, Workload
from peagle.config import BenchServerSettings
from peagle.results.schema import BenchRepeat

pytestmark = pytest.mark.vllm
TESTS = Path(__file__).resolve().parent.parent
TOKENS, BUNCH, TURNS, WITHIN = 17, 2, 6, 0.03
SERVE = f"""
import sys, time
from streaming import StreamServer
with StreamServer(first_s=0.4, each_s=0.06, bunch={BUNCH}) as server:
    print(server.url, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A process of its own: in this one it would take time from the clients."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE], cwd=TESTS, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.communicate("")


def theirs(url: str, path: str, texts: list[str], load: Load) -> dict[str, Any]:
    from vllm.benchmarks.datasets import SampleRequest
    from vllm.benchmarks.serve import TaskType, benchmark

    with contextlib.redirect_stdout(io.StringIO()):
        return asyncio.run(
            benchmark(
                task_type=TaskType.GENERATION,
                endpoint_type="openai-chat" if "chat" in path else "openai",
                api_url=url + path,
                base_url=url,
                model_id="small",
                model_name="small",
                tokenizer=object(),  # never called, since the server counts; without one it reports no latencies
                input_requests=[SampleRequest(prompt=t, prompt_len=7, expected_output_len=TOKENS) for t in texts],
                logprobs=None,
                request_rate=load.request_rate or float("inf"),
                burstiness=1.0,
                disable_tqdm=True,
                num_warmups=load.concurrency or 10,
                profile=False,
                selected_percentile_metrics=["ttft", "tpot", "itl", "e2el"],
                selected_percentiles=[50, 95],
                ignore_eos=True,
                goodput_config_dict={},
                max_concurrency=load.concurrency,
                lora_modules=None,
                extra_headers=None,
                extra_body={"max_tokens": TOKENS, "temperature": 0.0},  # for chats it asks for lengths by a newer name
            )
        )


def ours(url: str, path: str, texts: list[str], load: Load) -> BenchRepeat:
    prompts = tuple(BenchPrompt(messages=(("user", t),)) if "chat" in path else BenchPrompt(text=t) for t in texts)
    work = Workload("same", prompts, TOKENS, True, 0.0, 0)
    with ServerBench(BenchServerSettings(url)) as client:
        warmup = load.concurrency or 10
        client.measure(work, prompts[:warmup], Load(warmup), 0, lambda num_finished: None)
        return client.measure(work, prompts, load, 0, lambda num_finished: None)[0]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("load", [Load(1), Load(8), Load(request_rate=10.0)], ids=str)
def test_the_same_numbers_as_vllm_bench_serve(url: str, path: str, load: Load) -> None:
    texts = [f"prompt {i}" for i in range(4 if load.concurrency == 1 else 40)]
    best: dict[str, tuple[float, float]] = {}  # of each number: theirs, ours
    for turn in range(TURNS):
        their, own = theirs(url, path, texts, load), ours(url, path, texts, load)
        assert (their["completed"], their["total_output_tokens"]) == (own.completed, own.total_output_tokens)
        assert (own.total_output_tokens, own.total_input_tokens) == (TOKENS * len(texts), their["total_input_tokens"])
        assert own.failed == {}
        assert their["output_throughput"] * their["duration"] == pytest.approx(own.total_output_tokens)
        found = {"duration": own.duration}
        for name, short in (("ttft_ms", "ttft"), ("tpot_ms", "tpot"), ("itl_ms", "itl"), ("e2el_ms", "e2el")):
            times = getattr(own, name)
            found |= {f"mean_{short}_ms": times.mean, f"median_{short}_ms": times.median, f"p95_{short}_ms": times.p95}
        for name, value in found.items():
            before = best.get(name, (float("inf"), float("inf")))
            best[name] = min(before[0], float(their[name])), min(before[1], value)
        apart = {name: f"{b / a - 1:+.1%}" for name, (a, b) in best.items() if abs(b / a - 1) >= WITHIN}
        if turn and not apart:
            return
    pytest.fail(f"after {TURNS} turns apart by {WITHIN:.0%} or more: {apart}")
