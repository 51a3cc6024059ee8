"""Whole rounds as CUDA graphs: one for each batch size and number of drafts.

Knows nothing about what a round does: `Runner.round` is recorded as it is. Rows past a batch's end get slot -1,
which reads nobody's state and writes nowhere that matters.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from peagle.engine.speculation import CostTable

if TYPE_CHECKING:
    from peagle.engine.runner import Runner

MOST_ROWS = 2048  # of the target's pass; where there is a choice of drafts, larger rounds are not worth recording


def batch_sizes(most: int) -> list[int]:
    """1, 2, 4, 8, then in steps of about a quarter: what padding wastes stays small."""
    sizes, size = [], 1
    while size < most:
        sizes.append(size)
        size = size * 2 if size < 16 else size + max(8, 1 << (size.bit_length() - 2))
    return [*sizes, most]


@dataclass
class RoundBuffers:
    """What a recorded round reads and writes."""

    slots_B: Tensor
    result_BX: Tensor  # emitted tokens, accepted, available
    graph: torch.cuda.CUDAGraph

    def replay(self) -> None:
        self.graph.replay()


class RoundGraphs:
    def __init__(self, runner: Runner, sizes: Sequence[int], choices: Sequence[int]) -> None:
        self.runner, self.sizes, self.choices = runner, sorted(sizes), sorted(choices)
        self.rounds: dict[tuple[int, int], RoundBuffers] = {}
        self.pool = torch.cuda.graph_pool_handle()
        self.seconds = 0.0
        self.memory = 0

    def capture(self) -> None:
        """Records every size, largest first, so that the smaller ones fit into its memory."""
        torch.cuda.empty_cache()  # so that what is free afterwards says what the graphs hold
        started, free = time.perf_counter(), torch.cuda.mem_get_info()[0]
        for size in reversed(self.sizes):
            for k in reversed(self.choices):
                if len(self.choices) == 1 or size * (k + 1) <= MOST_ROWS or k == self.choices[0]:
                    self._record(size, k)
        torch.cuda.synchronize()
        self.seconds, self.memory = time.perf_counter() - started, free - torch.cuda.mem_get_info()[0]

    def _record(self, size: int, k: int) -> None:
        slots = torch.full((size,), -1, device=self.runner.device)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.runner.round(slots, k)  # compiles what has to be compiled
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            result = self.runner.round(slots, k)
        self.rounds[size, k] = RoundBuffers(slots, result, graph)

    def find(self, batch: int, k: int) -> RoundBuffers | None:
        at = bisect_left(self.sizes, batch)
        return self.rounds.get((self.sizes[at], k)) if at < len(self.sizes) else None

    def measure(self, repeats: int = 3) -> CostTable:
        """Seconds of each recorded round."""
        table = CostTable()
        for key, buffers in self.rounds.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            buffers.replay()
            begin.record()
            for _ in range(repeats):
                buffers.replay()
            end.record()
            end.synchronize()
            table.seconds[key] = begin.elapsed_time(end) / repeats / 1e3
        return table
