"""The loop around an engine in this process: requests are added by the load, the engine steps, every step is timed.

Knows no engine: `add` starts request i and says what it is called, `step` runs one step and says of each request that
got something how many tokens, and whether it ended. A request that arrives while a step runs would have waited in a
server's queue, so in an open loop it counts from when it was due, not from when the engine took it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

from peagle.bench.timing import RequestTiming

Name = TypeVar("Name", bound=Hashable)


def drive(
    lengths: Sequence[int],
    concurrency: int | None,
    due: Sequence[float] | None,
    add: Callable[[int], Name],
    step: Callable[[], Iterable[tuple[Name, int, bool]]],
    abort: Callable[[Name], None],
    tell: Callable[[bool, int], None],
) -> tuple[list[RequestTiming], float]:
    """Each request's times and all seconds. `lengths` are the prompts'; `due` says when each request arrives; without
    it `concurrency` are kept running."""
    running: dict[Name, RequestTiming] = {}
    traces: list[RequestTiming] = []
    ended = 0
    began = now = time.perf_counter()
    try:
        while ended < len(lengths):
            while len(traces) < len(lengths):
                i = len(traces)
                if len(running) >= (concurrency or len(lengths)) or (due is not None and began + due[i] > now):
                    break
                traces.append(RequestTiming(now if due is None else began + due[i], num_input_tokens=lengths[i]))
                running[add(i)] = traces[-1]
            if not running:
                assert due is not None
                time.sleep(max(0.0, began + due[len(traces)] - time.perf_counter()))
                now = time.perf_counter()
                continue
            touched = step()
            now = time.perf_counter()
            for name, new, over in touched:
                trace = running[name]
                if new:
                    trace.chunk_times.append(now)
                    trace.num_output_tokens += new
                if over:
                    ended += 1
                    del running[name]
                tell(over, new)
    finally:
        for name in running:
            abort(name)
    return traces, time.perf_counter() - began
