"""Load a `peagle serve` process with many streaming clients and compare every response with the engine's own.

    python scripts/serve_load.py --mode steady --clients 500
    python scripts/serve_load.py --mode overload --clients 500 -- --max-queued-requests 32
    python scripts/serve_load.py --mode soak --clients 16 --seconds 300

steady: all clients send a request at once, --repeats times. overload: the same with a short queue; rejected clients
retry afterwards and must succeed. soak: clients send requests in a loop and one in ten disconnects early; memory and
KV blocks must not grow. Arguments after `--` go to the server. --url uses a running server with the same target.

Prompts differ, and every other client has its own seed, so that a response identifies its request. Expected texts are
generated in this process before the server starts. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from peagle.config import SamplingParams
from peagle.http_client import AsyncHttpClient, EventDecoder, HttpTimeouts, RequestFailed, parse_server_url
from peagle.results.provenance import Provenance

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "LICENSE").read_text()
PROMPT_CHARACTERS = 24
HANGS_UP = 10  # soak: one request in this many is aborted
WATCH_S = {"steady": 0.25, "overload": 0.25, "soak": 1.0}  # seconds between two reads of /metrics
AGAIN = 32  # concurrent retries after an overload
SETTLE_S = 20.0  # time for the last requests to finish
START_S = 300.0
MIB = 1 << 20


@dataclass(frozen=True)
class Ask:
    """A request and its expected response."""

    path: str
    body: dict[str, Any]
    text: str
    tokens: int
    finish_reason: str | None


@dataclass(frozen=True)
class Outcome:
    """Outcome of a request: ok, lost, mixed (another's response), differs, refused (429, 503) or left (aborted)."""

    kind: str
    seconds: float
    ttft: float | None = None
    tokens: int = 0
    detail: str = ""


@dataclass(frozen=True)
class Sample:
    """/metrics at one moment; counters summed over labels."""

    at: float
    values: dict[str, float]

    def __getitem__(self, name: str) -> float:
        return self.values.get(name, 0.0)


FLAT_MIB = 48.0  # allowed memory growth in the second half of a soak


@dataclass
class Report:
    mode: str
    clients: int
    requests: int = 0
    ok: int = 0
    lost: int = 0
    mixed: int = 0
    differs: int = 0
    refused: int = 0
    left: int = 0
    seconds: float = 0.0
    requests_per_second: float = 0.0
    tokens: int = 0
    tokens_per_second: float = 0.0
    acceptance_length: float | None = None
    ttft_ms: dict[str, float] = field(default_factory=dict)
    e2e_ms: dict[str, float] = field(default_factory=dict)
    refusal_ms: dict[str, float] = field(default_factory=dict)
    metrics_ms: dict[str, float] = field(default_factory=dict)  # latency of /metrics under load
    most_running: int = 0
    most_waiting: int = 0
    most_kv_use: float = 0.0
    kv_use_left: float = 0.0  # after all requests have finished
    uncounted_tokens: int = 0  # received by clients but missing in the server's counter
    rss_mib: dict[str, float] = field(default_factory=dict)
    rss_grown_mib: float = 0.0  # soak: from the second quarter of the time to the last
    recovered_s: float | None = None  # overload: from the end of the burst to the next answer
    recovered: int = 0  # overload: right answers afterwards
    failures: dict[str, int] = field(default_factory=dict)


# Expected responses


def make_asks(target: str, drafter: str | None, count: int, tokens: int, **engine: Any) -> list[Ask]:
    """`count` different prompts with the engine's responses; half are chats if the target has a template."""
    from peagle.engine.llm import LLM, Prompt

    llm = LLM(target, drafter, **engine)
    chats = bool(llm.tokenizer.chat_template)
    step = max(1, (len(TEXT) - PROMPT_CHARACTERS) // count)
    shared = {"max_tokens": tokens, "stream": True, "stream_options": {"include_usage": True}}
    requests: list[tuple[str, dict[str, Any]]] = []
    prompts: list[Prompt] = []
    params = []
    for i in range(count):
        place = i * step % (len(TEXT) - PROMPT_CHARACTERS)
        prompt = TEXT[place : place + PROMPT_CHARACTERS]
        # half are sampled with their own seed, so that responses differ
        own = {"temperature": 0.0} if i % 2 else {"temperature": 0.8, "seed": i}
        if chats and i % 4 < 2:
            messages = [{"role": "user", "content": prompt}]
            requests.append(("/v1/chat/completions", {"messages": messages, **own, **shared}))
            prompts.append(llm.encode_chat(messages))
        else:
            requests.append(("/v1/completions", {"prompt": prompt, **own, **shared}))
            prompts.append(prompt)
        params.append(SamplingParams(max_tokens=tokens, **own))  # type: ignore[arg-type]
    answers = [answer.outputs[0] for answer in llm.generate(prompts, params)]
    return [
        Ask(path, body, answer.text, len(answer.token_ids), answer.finish_reason)
        for (path, body), answer in zip(requests, answers, strict=True)
    ]


# One client


async def ask(
    client: AsyncHttpClient, model: str, own: Ask, all_texts: frozenset[str], hang_up: bool = False
) -> Outcome:
    began = time.perf_counter()
    ttft, text, usage, reason, ids = None, "", None, None, set()

    def outcome(kind: str, detail: str = "") -> Outcome:
        return Outcome(kind, time.perf_counter() - began, ttft, usage or 0, detail)

    try:
        async with client.request("POST", own.path, json.dumps({"model": model, **own.body}).encode()) as response:
            if response.status_code != 200:
                body = await response.aread()
                if response.status_code in (429, 503):
                    if "retry-after" not in response.headers:
                        return outcome("lost", f"HTTP {response.status_code} without Retry-After")
                    return outcome("refused", f"HTTP {response.status_code}")
                return outcome("lost", f"HTTP {response.status_code} {body[:200]!r}")
            events, done = EventDecoder(), False
            async for piece in response.aiter_raw():
                for event in events.feed(piece):
                    if event == "[DONE]":
                        done = True
                        continue
                    data = json.loads(event)
                    if "error" in data:
                        return outcome("lost", f"error in the stream: {data['error']}")
                    ids.add(data["id"])
                    usage = data["usage"]["completion_tokens"] if data.get("usage") else usage
                    for choice in data["choices"]:
                        new = choice["text"] if "text" in choice else choice["delta"].get("content")
                        if new and ttft is None:
                            ttft = time.perf_counter() - began
                        text += new or ""
                        reason = choice.get("finish_reason") or reason
                if hang_up and ttft is not None:
                    return outcome("left")
    except RequestFailed as error:
        return outcome("lost", str(error))
    if len(ids) != 1 or text != own.text and text in all_texts:
        return outcome("mixed", f"ids {sorted(ids)}")
    if not done or usage is None or reason is None:
        return outcome("lost", "the stream ended without its end")
    if (text, usage, reason) != (own.text, own.tokens, own.finish_reason):
        return outcome("differs", f"{(text, usage, reason)} for {(own.text, own.tokens, own.finish_reason)}")
    return outcome("ok")


async def get(client: AsyncHttpClient, path: str) -> str:
    async with client.request("GET", path) as response:
        body = await response.aread()
    if response.status_code != 200:
        raise RequestFailed(f"HTTP {response.status_code}", f"from {path}")
    return body.decode()


async def look(client: AsyncHttpClient) -> Sample:
    totals: defaultdict[str, float] = defaultdict(float)
    for line in (await get(client, "/metrics")).splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            totals[name.partition("{")[0]] += float(value)
    return Sample(time.perf_counter(), dict(totals))


# All of them


class Load:
    """One run against one server: clients, outcomes and metrics."""

    def __init__(self, url: str, mode: str, asks: Sequence[Ask], clients: int) -> None:
        self.address, self.asks, self.mode = parse_server_url(url), asks, mode
        self.settings = HttpTimeouts(connect_s=60.0, stall_s=300.0, total_s=900.0)
        self.texts = frozenset(a.text for a in asks)
        self.outcomes: list[Outcome] = []
        self.samples: list[Sample] = []
        self.looks: list[float] = []
        self.report = Report(mode, clients)

    @asynccontextmanager
    async def client(self) -> AsyncIterator[AsyncHttpClient]:
        client = AsyncHttpClient(self.address, self.settings)
        try:
            yield client
        finally:
            await client.close()

    async def watch(self) -> None:
        async with self.client() as client:
            while True:
                began = time.perf_counter()
                self.samples.append(await look(client))
                self.looks.append(time.perf_counter() - began)
                await asyncio.sleep(WATCH_S[self.mode])

    async def at_once(self, clients: int, repeats: float = math.inf, seconds: float = math.inf) -> list[Outcome]:
        """Each client has its own connection and sends the next request after a response."""
        end = time.perf_counter() + seconds

        async def one(number: int) -> list[Outcome]:
            found: list[Outcome] = []
            async with self.client() as client:
                while len(found) < repeats and time.perf_counter() < end:
                    turn = number + len(found) * clients
                    hang_up = self.mode == "soak" and turn % HANGS_UP == 0
                    own = self.asks[turn % len(self.asks)]
                    found.append(await ask(client, self.model, own, self.texts, hang_up))
            return found

        return [o for found in await asyncio.gather(*map(one, range(clients))) for o in found]

    async def settled(self) -> Sample:
        """Reads the metrics after the engine has become idle."""
        async with self.client() as client:
            end = time.perf_counter() + SETTLE_S
            while True:
                sample = await look(client)
                busy = sample["vllm:num_requests_running"] + sample["vllm:num_requests_waiting"]
                if not busy or time.perf_counter() > end:
                    return sample
                await asyncio.sleep(0.2)

    async def run(self, clients: int, repeats: int, seconds: float) -> Report:
        async with self.client() as client:
            self.model = json.loads(await get(client, "/v1/models"))["data"][0]["id"]
        before = await self.settled()
        watching = asyncio.create_task(self.watch())
        began = time.perf_counter()
        try:
            if self.mode == "soak":
                self.outcomes = await self.at_once(clients, seconds=seconds)
            else:
                self.outcomes = await self.at_once(clients, repeats)
            elapsed = time.perf_counter() - began
            if self.mode == "overload":
                await self.recover()
        finally:
            watching.cancel()
            (stopped,) = await asyncio.gather(watching, return_exceptions=True)
        if isinstance(stopped, RequestFailed):
            raise stopped
        self.fill(before, await self.settled(), elapsed)
        return self.report

    async def recover(self) -> None:
        """Rejected requests are sent again, a few at a time; all must succeed."""
        began = time.perf_counter()
        async with self.client() as client:
            while (await ask(client, self.model, self.asks[0], self.texts)).kind == "refused":
                await asyncio.sleep(0.05)
        self.report.recovered_s = time.perf_counter() - began
        again = await self.at_once(4, AGAIN // 4)
        self.report.recovered = sum(outcome.kind == "ok" for outcome in again)

    def fill(self, before: Sample, after: Sample, elapsed: float) -> None:
        report, outcomes = self.report, self.outcomes
        kinds = Counter(outcome.kind for outcome in outcomes)
        for kind in ("ok", "lost", "mixed", "differs", "refused", "left"):
            setattr(report, kind, kinds[kind])
        report.requests, report.seconds = len(outcomes), elapsed
        report.tokens = sum(o.tokens for o in outcomes)
        report.requests_per_second = report.ok / elapsed
        report.tokens_per_second = report.tokens / elapsed
        served = [o for o in outcomes if o.kind == "ok"]
        report.ttft_ms = percentiles([o.ttft for o in served if o.ttft is not None])
        report.e2e_ms = percentiles([o.seconds for o in served])
        report.refusal_ms = percentiles([o.seconds for o in outcomes if o.kind == "refused"])
        report.metrics_ms = percentiles(self.looks)
        report.failures = dict(Counter(o.detail for o in outcomes if o.kind in ("lost", "mixed", "differs")))
        seen = [before, *self.samples, after]
        report.most_running = int(max(s["vllm:num_requests_running"] for s in seen))
        report.most_waiting = int(max(s["vllm:num_requests_waiting"] for s in seen))
        report.most_kv_use = max(s["vllm:kv_cache_usage_perc"] for s in seen)
        report.kv_use_left = after["vllm:kv_cache_usage_perc"]
        if self.mode == "steady":
            counted = after["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"]
            report.uncounted_tokens = report.tokens - int(counted)
        drafts = after["vllm:spec_decode_num_drafts_total"] - before["vllm:spec_decode_num_drafts_total"]
        held = (
            after["vllm:spec_decode_num_accepted_tokens_total"] - before["vllm:spec_decode_num_accepted_tokens_total"]
        )
        report.acceptance_length = 1 + held / drafts if drafts else None
        memory = [s["process_resident_memory_bytes"] / MIB for s in seen]
        report.rss_mib = {"before": memory[0], "most": max(memory), "after": memory[-1]}
        quarter = len(memory) // 4
        if self.mode == "soak" and quarter:
            report.rss_grown_mib = middle(memory[-quarter:]) - middle(memory[quarter : 2 * quarter])


def middle(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {}
    ordered = sorted(seconds)
    return {f"p{p}": 1e3 * ordered[min(len(ordered) - 1, len(ordered) * p // 100)] for p in (50, 95, 99)}


# The server


@contextmanager
def serving(target: str, drafter: str | None, flags: Sequence[str]) -> Iterator[str]:
    """Runs `peagle serve` as a child process within the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "peagle", "serve", target, "--port", str(port), *flags]
    command += ["--drafter", drafter] if drafter is not None else []
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            if not asyncio.run(_ready(url, process)):
                log.seek(0)
                raise SystemExit(f"the server does not start: {log.read()[-2000:].decode(errors='replace')}")
            yield url
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                raise


async def _ready(url: str, process: subprocess.Popen[bytes]) -> bool:
    client = AsyncHttpClient(parse_server_url(url), HttpTimeouts())
    end = time.perf_counter() + START_S
    while time.perf_counter() < end and process.poll() is None:
        try:
            await get(client, "/health/ready")
            await client.close()
            return True
        except RequestFailed:
            await asyncio.sleep(0.1)
    return False


def load(url: str, mode: str, asks: Sequence[Ask], clients: int, repeats: int = 1, seconds: float = 60.0) -> Report:
    return asyncio.run(Load(url, mode, asks, clients).run(clients, repeats, seconds))


def table(report: Report) -> str:
    rows = []
    for name, value in asdict(report).items():
        if isinstance(value, dict):
            value = "  ".join(f"{k} {v:,.1f}" if isinstance(v, float) else f"{k} x{v}" for k, v in value.items())
        rows.append(f"{name.replace('_', ' '):20} {f'{value:,.2f}' if isinstance(value, float) else value}")
    return "\n".join(rows)


def main() -> None:
    words, flags = sys.argv[1:], []
    if "--" in words:
        words, flags = words[: words.index("--")], words[words.index("--") + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=list(WATCH_S), default="steady")
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafter")
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=1, help="requests of each client (steady, overload)")
    parser.add_argument("--seconds", type=float, default=180.0, help="of a soak")
    parser.add_argument("--tokens", type=int, default=16, help="of an answer")
    parser.add_argument("--prompts", type=int, help="different ones; as many as clients, unless given")
    parser.add_argument("--dtype", help="of the engine and the server; float32: the same text in any company")
    parser.add_argument("--url", help="a server that runs already")
    args = parser.parse_args(words)
    stamp = Provenance.collect(shlex.join(["python", *sys.argv]), ("fastapi", "uvicorn", "prometheus-client"))
    asks = make_asks(args.target, args.drafter, args.prompts or args.clients, args.tokens, dtype=args.dtype)
    flags += ["--dtype", args.dtype] if args.dtype else []

    def measure(url: str) -> Report:
        return load(url, args.mode, asks, args.clients, args.repeats, args.seconds)

    if args.url:
        report = measure(args.url)
    else:
        with serving(args.target, args.drafter, flags) as url:
            report = measure(url)
    print(table(report))
    print(json.dumps({"stamp": asdict(stamp.with_duration()), **asdict(report)}))
    if report.lost or report.mixed or report.differs or report.kv_use_left or report.rss_grown_mib > FLAT_MIB:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
