"""Output tokens/s that the front end of `peagle serve` delivers, without a model.

    python benchmarks/front_end.py --target FOLDER [--streams 8 64 256] [--tokens-per-second 134000]

The engine process runs the real `EngineCore`, but its `LLM` replays tokens at a given rate, so that the front end or
the client is the limit. FOLDER holds a tokenizer. The client is a process of its own with one raw socket per stream; it
sends prompts of about 100 words to /v1/completions and reads streamed responses of 256 tokens. `ms/request` and
`us/chunk` divide the CPU time of the front end. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import socket
import sys
import time
import urllib.request
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

NUM_OUTPUT_TOKENS = 256
ACCEPTED_PER_STEP = (2, 3, 2, 3, 2)  # 3.4 tokens per step
TOKENS_PER_STEP = 1 + sum(ACCEPTED_PER_STEP) / len(ACCEPTED_PER_STEP)
MIN_STEP_SECONDS = 0.0012  # of a small model
TEXT = "The front end turns tokens into text, and every request gets the same ones again, slowly or quickly. " * 20
COLUMNS = ("streams", "tokens/s", "chunks/s", "TTFT p50 ms", "TTFT p99 ms", "ITL p99 ms", "ms/request", "us/chunk")


@dataclass(eq=False)
class ReplayRequest:
    """A request and its group: what `EngineCore` reads of both."""

    params: Any
    output_token_ids: list[int] = field(default_factory=list)
    num_accepted_tokens_per_step: list[int] = field(default_factory=list)
    num_decode_steps: int = 0
    finish_reason: str | None = None
    index, state, stop_reason, stop_token_ids, logprobs = 0, None, None, (), ()

    group = property(lambda self: self)
    requests = property(lambda self: [self])
    finished = property(lambda self: self.finish_reason is not None)
    num_drafts = property(lambda self: self.num_decode_steps)


class ReplayLLM:
    """Stands in for `LLM`: every request gets the same tokens, 3 or 4 per step."""

    def __init__(self, folder: Path, tokens_per_second: float) -> None:
        from peagle.checkpoints.target import load_tokenizer

        self.token_ids = load_tokenizer(folder)(TEXT)["input_ids"][:NUM_OUTPUT_TOKENS]
        self.seconds_per_request, self.next_step = TOKENS_PER_STEP / tokens_per_second, 0.0
        self.running: list[ReplayRequest] = []
        pool = SimpleNamespace(num_free_blocks=1, num_blocks=2, num_hit_tokens=0, num_queried_tokens=0)
        self.scheduler = SimpleNamespace(
            running=self.running, pool=pool, num_preemptions=0, max_speculative_tokens=7, max_num_seqs=4096
        )
        self.acceptance_histogram, self.num_draft_tokens = [0] * 8, 0
        self.target = SimpleNamespace(folder=folder, model=SimpleNamespace(cfg=SimpleNamespace(vocab_size=1 << 20)))
        self.drafter = SimpleNamespace(cfg=SimpleNamespace(parallel=True))
        self.model_runner = SimpleNamespace(device=SimpleNamespace(type="cpu"))
        self.max_model_len, self.dtype, self.memory_bytes = 4096, "none", dict

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self.running)

    def add_request(self, prompt_token_ids: list[int], params: Any) -> ReplayRequest:
        self.running.append(ReplayRequest(params))
        return self.running[-1]

    def abort_group(self, group: ReplayRequest, index: int | None) -> None:
        group.finish_reason = "abort"
        self.running[:] = [request for request in self.running if not request.finished]

    def step(self) -> list[ReplayRequest]:
        time.sleep(max(self.next_step - time.perf_counter(), 0.0))
        seconds = max(len(self.running) * self.seconds_per_request, MIN_STEP_SECONDS)
        self.next_step = max(self.next_step, time.perf_counter() - 0.1) + seconds
        updated = list(self.running)
        for request in updated:
            begin, num_accepted = len(request.output_token_ids), 0
            if begin:
                num_accepted = ACCEPTED_PER_STEP[request.num_decode_steps % len(ACCEPTED_PER_STEP)]
                request.num_accepted_tokens_per_step.append(num_accepted)
                request.num_decode_steps += 1
            request.output_token_ids += self.token_ids[begin : begin + num_accepted + 1]
            if len(request.output_token_ids) == NUM_OUTPUT_TOKENS:
                request.finish_reason = "length"
        self.running[:] = [request for request in updated if not request.finished]
        return updated


def serve(folder: Path, tokens_per_second: float, port: int, options: dict[str, Any]) -> None:
    from peagle.config import ServeSettings
    from peagle.server.engine_client import EngineClient, start_engine_process
    from peagle.server.logs import start_logging
    from peagle.server.server import bind_socket, run_server

    settings = ServeSettings(port=port, served_model_name="m", max_queued_requests=4096, **options)
    start_logging(False, open(os.devnull, "w", encoding="utf-8"))
    start_engine: Any = partial(start_engine_process, partial(ReplayLLM, folder, tokens_per_second), False)
    listener = bind_socket("127.0.0.1", port)
    run_server(lambda: EngineClient(start_engine, settings), settings, None, None, listener, folder)


@dataclass
class Load:
    port: int
    num_streams: int
    num_requests: int
    num_sent: int = 0
    num_open: int = 0
    num_chunks: int = 0
    ttfts: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    def next_request(self) -> bytes | None:
        if self.num_sent == self.num_requests:
            return None
        self.num_sent += 1
        words = TEXT.split()
        body = {"model": "m", "prompt": f"{self.num_sent} {' '.join(words[:100])}", "max_tokens": NUM_OUTPUT_TOKENS}
        body |= {"temperature": 0, "stream": True, "ignore_eos": True, "stream_options": {"include_usage": True}}
        data = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
        return f"{head}{len(data)}\r\n\r\n".encode() + data

    async def run(self) -> dict[str, float]:
        self.ended = asyncio.Event()
        self.num_open = self.num_streams
        loop, began = asyncio.get_running_loop(), time.perf_counter()
        for _ in range(self.num_streams):
            await loop.create_connection(lambda: Stream(self), "127.0.0.1", self.port)
        await self.ended.wait()
        seconds = time.perf_counter() - began
        assert len(self.ttfts) == self.num_requests
        ttfts, gaps = sorted(self.ttfts), sorted(self.gaps)
        return {
            "streams": self.num_streams,
            "tokens/s": round(self.num_requests * NUM_OUTPUT_TOKENS / seconds),
            "chunks/s": round(self.num_chunks / seconds),
            "TTFT p50 ms": round(ttfts[len(ttfts) // 2] * 1e3, 1),
            "TTFT p99 ms": round(ttfts[len(ttfts) * 99 // 100] * 1e3, 1),
            "ITL p99 ms": round(gaps[len(gaps) * 99 // 100] * 1e3, 1),
            "num_chunks": self.num_chunks,
        }


class Stream(asyncio.Protocol):
    """Sends requests one after the other on one connection, and records when their chunks arrive."""

    def __init__(self, load: Load) -> None:
        self.load = load

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        self.send_request()

    def send_request(self) -> None:
        request = self.load.next_request()
        if request is None:
            self.transport.close()
        else:
            self.transport.write(request)
            self.sent, self.last_chunk = time.perf_counter(), 0.0

    def data_received(self, data: bytes) -> None:
        num_chunks = data.count(b"data: {")
        if num_chunks:
            now, load = time.perf_counter(), self.load
            load.num_chunks += num_chunks
            if self.last_chunk:
                load.gaps.append(now - self.last_chunk)
            else:
                load.ttfts.append(now - self.sent)
            self.last_chunk = now
        if data.endswith(b"0\r\n\r\n"):  # of the chunked encoding
            self.send_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self.load.num_open -= 1
        if self.load.num_open == 0:
            self.load.ended.set()


def run_client(load: Load) -> dict[str, float]:
    from peagle.server.server import find_event_loop

    with asyncio.Runner(loop_factory=find_event_loop()) as runner:
        return runner.run(load.run())


def read_cpu_seconds(pid: int) -> float:
    """CPU time of a process, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def wait_ready(port: int) -> None:
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health").read()
            return
        except OSError:
            time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--streams", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--requests", type=int, nargs="+", default=[256, 512, 1024], help="per number of streams")
    parser.add_argument("--tokens-per-second", type=float, default=134_000, help="of the engine")
    args = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    server = context.Process(target=serve, args=(args.target, args.tokens_per_second, port, {}))
    server.start()
    rows = []
    try:
        wait_ready(port)
        with context.Pool(1) as client:
            client.apply(run_client, (Load(port, 8, 64),))  # warm-up
            print("".join(f"{column:>13}" for column in COLUMNS), flush=True)
            for num_streams, num_requests in zip(args.streams, args.requests, strict=True):
                before = read_cpu_seconds(server.pid)
                row = client.apply(run_client, (Load(port, num_streams, num_requests),))
                cpu_seconds = read_cpu_seconds(server.pid) - before
                row["ms/request"] = round(cpu_seconds / num_requests * 1e3, 2)
                row["us/chunk"] = round(cpu_seconds / row["num_chunks"] * 1e6, 1)
                rows.append(row)
                print("".join(f"{row[column]:>13,}" for column in COLUMNS), flush=True)
    finally:
        server.terminate()
        server.join()
    from peagle.results.provenance import Provenance

    print(json.dumps({"rows": rows, "provenance": asdict(Provenance.collect(" ".join(["python", *sys.argv])))}))


if __name__ == "__main__":
    main()
