"""Whole rounds, passes over short prompts, and what is guessed one by one behind them, as CUDA graphs.

Knows nothing about what is recorded: `Runner.round` and `Runner.one_by_one`, and the models' own passes. There is one
graph for each batch size and number of drafts, and for each number of prompt rows. Rows past a batch's end get slot -1,
which reads nobody's state and writes nowhere that matters; rows past a prompt's belong to a sequence that keeps
nothing.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from peagle.engine.speculation import CostTable
from peagle.kernels.paged_attention import Pages

if TYPE_CHECKING:
    from peagle.engine.runner import Runner

# Rows of the target's pass. Where there is a choice of drafts, larger rounds are not worth recording; deep ones less.
MOST_ROWS, DEEP, DEEP_ROWS = 2048, 8, 256

CHUNK_ROWS = (64, 128, 192, 256, 384, 512, 1024, 2048, 3072, 4096, 6144, 8192)
LARGE = 2e9  # parameters; from here on the GPU is busy longer than the host with anything but short prompts

Pass = Callable[[Tensor, "Tensor | None", Tensor, Pages], "tuple[Tensor, Tensor | None]"]
Guess = Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]


def batch_sizes(most: int) -> list[int]:
    """1, 2, 4, 8, then in steps of about a quarter: what padding wastes stays small."""
    sizes, size = [], 1
    while size < most:
        sizes.append(size)
        size = size * 2 if size < 16 else size + max(8, 1 << (size.bit_length() - 2))
    return [*sizes, most]


def worth_recording(size: int, k: int, choices: Sequence[int]) -> bool:
    """At every size something is: the one choice there is, or the smallest."""
    return k == choices[0] or size * (k + 1) <= (MOST_ROWS if k < DEEP else DEEP_ROWS)


@dataclass
class RoundBuffers:
    """What a recorded round reads and writes."""

    slots_B: Tensor
    result_BX: Tensor  # emitted tokens, accepted, available
    graph: torch.cuda.CUDAGraph
    slots: list[int] | None = None  # what `slots_B` holds, as far as `load` was the last to write it

    def load(self, slots: list[int], to_device: Callable[[list[int]], Tensor]) -> None:
        """The rows of the next replay, -1 behind them; nothing is sent if they are those of the last."""
        if slots != self.slots:
            self.slots = slots
            self.slots_B.copy_(to_device(slots + [-1] * (len(self.slots_B) - len(slots))))

    def replay(self) -> None:
        self.graph.replay()


def chunk_sizes(parameters: int, most: int) -> list[int]:
    """Numbers of prompt rows worth recording: those that take the host longer to launch than the GPU to run."""
    return [rows for rows in CHUNK_ROWS if rows <= min(most, 512 if parameters > LARGE else most)]


@dataclass
class ChunkBuffers:
    """What a recorded pass over the rows of up to B - 1 prompts reads and writes; the last sequence is padding."""

    tokens_T: Tensor
    hidden_TD: Tensor | None
    positions_T: Tensor
    meta_3B: Tensor  # int32: starts, live rows, first rows; one entry more, where the last sequence's rows end
    pages: Pages
    out: tuple[Tensor, Tensor | None]
    graph: torch.cuda.CUDAGraph

    def replay(
        self, tokens: Tensor, hidden: Tensor | None, positions: Tensor, tables_BM: Tensor, meta_3B: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """`meta` as `ChunkGraphs.meta` makes it. The result lies in the graph's memory until the next replay."""
        rows = len(tokens)
        self.tokens_T[:rows].copy_(tokens)
        self.positions_T[:rows].copy_(positions)
        if self.hidden_TD is not None and hidden is not None:
            self.hidden_TD[:rows].copy_(hidden)
        self.pages.block_tables_BM[: len(tables_BM)].copy_(tables_BM)
        self.meta_3B.copy_(meta_3B)
        self.graph.replay()
        said, more = self.out
        return said[:rows], more[:rows] if more is not None else None


class ChunkGraphs:
    """One model's passes over prompt rows; `width` is that of the hidden states it reads, None for a target."""

    def __init__(self, run: Pass, sizes: Sequence[int], width: int | None, blocks: int, like: Tensor) -> None:
        self.run, self.sizes, self.width, self.blocks, self.like = run, sorted(sizes), width, blocks, like
        self.recorded: dict[int, ChunkBuffers] = {}

    @staticmethod
    def sequences(rows: int) -> int:
        return min(rows // 16, 128) + 1

    @staticmethod
    def longest(rows: int) -> int:
        return min(rows, 1024)

    def capture(self, pool: Any) -> None:
        for rows in reversed(self.sizes):
            self._record(rows, pool)

    def _record(self, rows: int, pool: Any) -> None:
        device, sequences = self.like.device, self.sequences(rows)
        tokens = torch.zeros(rows, dtype=torch.long, device=device)
        hidden = None
        if self.width is not None:
            hidden = torch.zeros(rows, self.width, dtype=self.like.dtype, device=device)
        tables = torch.zeros(sequences, self.blocks, dtype=torch.int32, device=device)
        meta = torch.zeros(3, sequences + 1, dtype=torch.int32, device=device)
        meta[2, -1] = rows
        pages = Pages(tables, meta[0, :-1], meta[1, :-1], self.longest(rows), meta[2])
        inputs = (tokens, hidden, torch.zeros_like(tokens), pages)
        graph, out = _recorded(lambda: self.run(*inputs), pool)
        self.recorded[rows] = ChunkBuffers(tokens, hidden, inputs[2], meta, pages, out, graph)

    def find(self, counts: Sequence[int]) -> ChunkBuffers | None:
        """For sequences of these many rows each, if some recorded pass has room for them."""
        rows = sum(counts)
        at = bisect_left(self.sizes, rows)
        if at == len(self.sizes):
            return None
        size = self.sizes[at]
        if len(counts) >= self.sequences(size) or max(counts) > self.longest(size):
            return None
        return self.recorded[size]

    @staticmethod
    def meta(buffers: ChunkBuffers, starts: list[int], live: list[int], counts: list[int]) -> list[list[int]]:
        """Rows behind those of the prompts go to the last sequence; those between have none."""
        total = buffers.meta_3B.shape[1]
        first = [0]
        for count in counts:
            first.append(first[-1] + count)
        blank = total - len(starts)
        first += [first[-1]] * (total - len(first) - 1) + [len(buffers.tokens_T)]
        return [starts + [0] * blank, live + [0] * blank, first]


@dataclass
class GuessBuffers:
    """What a recorded chain of guesses for up to B requests reads and writes."""

    inputs: tuple[Tensor, Tensor, Tensor, Tensor]  # first guesses, what they hand on, positions, block tables
    longest: int
    out_BK: Tensor
    graph: torch.cuda.CUDAGraph

    def replay(self, *given: Tensor) -> Tensor:
        """The result lies in the graph's memory until the next replay."""
        batch = len(given[0])
        for buffer, values in zip(self.inputs, given, strict=True):
            buffer[:batch].copy_(values)
        self.inputs[2][batch:].fill_(self.longest)  # outside of the context, where nothing is read or kept
        self.graph.replay()
        return self.out_BK[:batch]


class GuessGraphs:
    """Guesses of a drafter that makes them one by one, `k` in all, the first of them given."""

    def __init__(
        self, run: Guess, sizes: Sequence[int], k: int, width: int, blocks: int, longest: int, like: Tensor
    ) -> None:
        self.run, self.sizes, self.k = run, sorted(sizes), k
        self.width, self.blocks, self.longest, self.like = width, blocks, longest, like
        self.recorded: dict[int, GuessBuffers] = {}

    def capture(self, pool: Any) -> None:
        for size in reversed(self.sizes):
            self._record(size, pool)

    def _record(self, size: int, pool: Any) -> None:
        device = self.like.device
        guess = torch.zeros(size, dtype=torch.long, device=device)
        hidden = torch.zeros(size, self.width, dtype=self.like.dtype, device=device)
        tables = torch.zeros(size, self.blocks, dtype=torch.int32, device=device)
        inputs = (guess, hidden, torch.full_like(guess, self.longest), tables)
        graph, out = _recorded(lambda: self.run(*inputs, self.k), pool)
        self.recorded[size] = GuessBuffers(inputs, self.longest, out, graph)

    def find(self, batch: int) -> GuessBuffers | None:
        at = bisect_left(self.sizes, batch)
        return self.recorded.get(self.sizes[at]) if at < len(self.sizes) else None


def _recorded(run: Callable[[], Any], pool: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of what `run` launches, and what it returned."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()  # compiles what has to be compiled
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        out = run()
    return graph, out


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
                if worth_recording(size, k, self.choices):
                    self._record(size, k)
        for beside in self.runner.beside_rounds:
            beside.capture(self.pool)
        torch.cuda.synchronize()
        self.seconds, self.memory = time.perf_counter() - started, free - torch.cuda.mem_get_info()[0]

    def _record(self, size: int, k: int) -> None:
        slots = torch.full((size,), -1, device=self.runner.device)
        graph, result = _recorded(lambda: self.runner.round(slots, k), self.pool)
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
