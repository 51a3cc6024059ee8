"""Runs a load on an engine in this process: adds requests, steps the engine, records the time of every step."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

from peagle.bench.timing import RequestTiming

RequestId = TypeVar("RequestId", bound=Hashable)


def run_load(
    prompt_lengths: Sequence[int],
    concurrency: int | None,
    arrival_times: Sequence[float] | None,
    add_request: Callable[[int], RequestId],
    step: Callable[[], Iterable[tuple[RequestId, int, bool]]],
    abort_request: Callable[[RequestId], None],
    on_progress: Callable[[int, int], None],
) -> tuple[list[RequestTiming], float]:
    """Timings of all requests and the duration in seconds.

    `add_request(i)` starts request i and returns its id; `step` runs one engine step and returns (id, number of new
    tokens, finished) for every request that got an output. With `arrival_times` requests arrive at those seconds (open
    loop), otherwise `concurrency` requests are kept in flight (closed loop). In an open loop TTFT counts from the
    arrival, even if the engine was busy with a step, as a request would wait in a server's queue.
    """
    in_flight: dict[RequestId, RequestTiming] = {}
    timings: list[RequestTiming] = []
    num_finished = 0
    start = now = time.perf_counter()
    try:
        while num_finished < len(prompt_lengths):
            while len(timings) < len(prompt_lengths):
                i = len(timings)
                full = len(in_flight) >= (concurrency or len(prompt_lengths))
                if full or (arrival_times is not None and start + arrival_times[i] > now):
                    break
                sent_at = now if arrival_times is None else start + arrival_times[i]
                timings.append(RequestTiming(sent_at, num_input_tokens=prompt_lengths[i]))
                in_flight[add_request(i)] = timings[-1]
            if not in_flight:
                assert arrival_times is not None
                time.sleep(max(0.0, start + arrival_times[len(timings)] - time.perf_counter()))
                now = time.perf_counter()
                continue
            outputs = step()
            now = time.perf_counter()
            for request_id, num_new_tokens, finished in outputs:
                timing = in_flight[request_id]
                if num_new_tokens:
                    timing.chunk_times.append(now)
                    timing.num_output_tokens += num_new_tokens
                if finished:
                    num_finished += 1
                    del in_flight[request_id]
                on_progress(finished, num_new_tokens)
    finally:
        for request_id in in_flight:
            abort_request(request_id)
    return timings, time.perf_counter() - start
