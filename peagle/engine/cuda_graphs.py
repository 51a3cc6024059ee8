"""Decode steps and prefill passes as CUDA graphs.

There is one graph for each batch size and number of draft tokens, two more for small batches of short requests of a
small model, and one for each number of prefill rows. Rows past the end of a batch have slot -1, the padding slot.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from peagle.engine.prefill import Int64Array, PrefillShape, pack_prefill_inputs
from peagle.kernels.host_transfer import pin_for_copy
from peagle.kernels.triton_utils import HAVE_TRITON
from peagle.models.decoder import Decoder
from peagle.models.drafter import Drafter
from peagle.speculative.adaptive_k import StepCostTable

if TYPE_CHECKING:
    from peagle.engine.model_runner import ModelRunner

# Rows of the target's pass. Where there is a choice of drafts, larger rounds are not worth recording; deep ones less:
# 64 requests with 9 drafts have 640.
MOST_ROWS, DEEP, DEEP_ROWS = 2048, 8, 640

CHUNK_ROWS = (64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
NEAR_BATCH, NEAREST_BATCH = 8, 2  # requests up to which those that are all short, or shortest, have their own rounds
TYPICAL = 256  # tokens that requests have read whose rounds are timed
LARGE = 2e9  # parameters; from here on the GPU is busy longer than the host with anything but short prompts


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
class DecodeGraph:
    """What a captured round reads and writes."""

    slots_B: Tensor
    result_BX: Tensor  # emitted tokens, accepted, available
    graph: torch.cuda.CUDAGraph
    slots: list[int] | None = None  # what `slots_B` holds, as far as `load` was the last to write it

    def load(self, slots: list[int]) -> None:
        """The rows of the next replay, -1 behind them; nothing is sent if they are those of the last."""
        if slots != self.slots:
            self.slots = slots
            rows = torch.tensor(slots + [-1] * (len(self.slots_B) - len(slots)))
            self.slots_B.copy_(pin_for_copy(rows, self.slots_B.device), non_blocking=True)

    def replay(self) -> None:
        self.graph.replay()


def chunk_sizes(parameters: int, most: int) -> list[int]:
    """Int64Array of prompt rows worth recording: those that take the host longer to launch than the GPU to run."""
    return [rows for rows in CHUNK_ROWS if rows <= min(most, 512 if parameters > LARGE else most)]


@dataclass
class PrefillGraph:
    """What a captured pass over prompts reads and writes."""

    room: PrefillShape
    packed: Tensor
    first_F: Tensor
    graph: torch.cuda.CUDAGraph

    def replay(self, packed: Int64Array) -> Tensor:
        """What follows the prompts that end; it lies in the graph's memory until the next replay."""
        self.packed.copy_(pin_for_copy(torch.from_numpy(packed), self.packed.device), non_blocking=True)
        self.graph.replay()
        return self.first_F


class PrefillGraphs:
    """Whole passes over prompts: the target's, first tokens, the drafter's."""

    def __init__(self, runner: ModelRunner, sizes: Sequence[int]) -> None:
        self.runner, self.sizes = runner, sorted(sizes)
        self.captured: list[PrefillGraph] = []  # by their rows

    def room(self, rows: int) -> PrefillShape:
        return PrefillShape(
            rows,
            sequences=min(rows // 16, 128) + 1,
            ends=min(max(rows // 32, 4), 128),
            max_rows=min(rows, 1024),
            max_context=None,
            masks=self.runner.masks,
        )

    def capture(self, pool: Any) -> None:
        made = [self.record(self.room(rows), pool) for rows in reversed(self.sizes)]
        self.captured = made[::-1]

    def record(self, room: PrefillShape, pool: Any) -> PrefillGraph:
        packed = torch.from_numpy(pack_prefill_inputs([], [], room, self.runner.max_model_len, None)).to(
            self.runner.device
        )
        graph, first = _recorded(lambda: self.runner.prefill(packed, room, self.runner.sample_first_tokens), pool)
        return PrefillGraph(room, packed, first, graph)

    def find(self, room: PrefillShape) -> PrefillGraph | None:
        """The first that has room for all, but for one that would mostly read nothing."""
        larger = [one for one in self.captured if one.room.rows >= room.rows]
        return next((one for one in larger if one.room.takes(room) and one.room.rows <= 2 * larger[0].room.rows), None)


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


def near_lengths(target: Decoder, drafter: Drafter | None) -> tuple[int, ...]:
    """Positions up to which rounds of requests that are all so short are worth recording by themselves."""
    windows, layers = list(target.cfg.windows), [target.cfg.layer_at(i) for i in range(target.cfg.num_layers)]
    if drafter is not None:
        windows, layers = windows + list(drafter.cfg.windows), [*layers, drafter.cfg.layer]
    if not HAVE_TRITON or any(window is not None for window in windows):
        return ()
    from peagle.kernels.attention.paged_launch import get_short_context_limits  # imports Triton

    weight = target.embed_tokens.weight
    heads = {(layer.num_heads, layer.num_kv_heads, layer.head_dim) for layer in layers}
    found = [get_short_context_limits(*each, weight.dtype, weight.device) for each in heads]
    return found[0] if all(found) else ()  # wherever there are any, they are the same


class DecodeGraphs:
    def __init__(self, runner: ModelRunner, sizes: Sequence[int], choices: Sequence[int]) -> None:
        self.runner, self.sizes, self.choices = runner, sorted(sizes), sorted(choices)
        self.captured: dict[tuple[int, int], DecodeGraph] = {}
        self.short_context_graphs: dict[
            tuple[int, int], dict[int, DecodeGraph]
        ] = {}  # by how long requests may become, too
        self.near = near_lengths(runner.target, runner.drafter)
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
        if self.runner.prefill_graphs is not None:
            self.runner.prefill_graphs.capture(self.pool)
        torch.cuda.synchronize()
        self.seconds, self.memory = time.perf_counter() - started, free - torch.cuda.mem_get_info()[0]

    def _record(self, size: int, k: int) -> None:
        self.captured[size, k] = self._recorded(size, k, None)
        near = self.near if size <= NEAREST_BATCH else self.near[1:] if size <= NEAR_BATCH else ()
        self.short_context_graphs[size, k] = {
            most: self._recorded(size, k, most) for most in near if most < self.runner.max_model_len
        }

    def _recorded(self, size: int, k: int, most: int | None) -> DecodeGraph:
        slots = torch.full((size,), -1, device=self.runner.device)
        graph, result = _recorded(lambda: self.runner.decode_step(slots, k, most), self.pool)
        return DecodeGraph(slots, result, graph)

    def find(self, batch: int, k: int, length: int) -> DecodeGraph | None:
        """The smallest that has room for all; `length`: positions that any request may have before it."""
        at = bisect_left(self.sizes, batch)
        if at == len(self.sizes):
            return None
        near = self.short_context_graphs.get((self.sizes[at], k), {})
        fits = (near[most] for most in sorted(near) if length + 2 * k + 1 <= most)  # drafts read, and drafts made
        return next(fits, self.captured.get((self.sizes[at], k)))

    def measure(self, repeats: int = 3) -> StepCostTable:
        """Seconds of each captured round, for requests that have read some hundred tokens: with nothing behind it
        attention costs nothing, and deep rounds seem cheaper than they are. For an engine that nobody has used yet."""
        table, state = StepCostTable(), self.runner.state
        tables_SM, context = (
            state.block_tables_SM[:-1],
            min(TYPICAL, self.runner.max_model_len // 2),
        )  # the last is nobody's
        blocks = len(self.runner.cache.keys[0])
        tables_SM.copy_((torch.arange(tables_SM.numel(), device=tables_SM.device) % blocks).view(tables_SM.shape))
        for batch, k in self.captured:
            buffers = self.find(batch, k, context + repeats * (k + 1))
            assert buffers is not None
            buffers.slots_B.copy_(torch.arange(batch, device=self.runner.device))
            state.num_computed_tokens_S[:-1].fill_(context)
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            buffers.replay()
            begin.record()
            for _ in range(repeats):
                buffers.replay()
            end.record()
            end.synchronize()
            table.seconds[batch, k] = begin.elapsed_time(end) / repeats / 1e3
        for left in (
            tables_SM,
            state.num_computed_tokens_S[:-1],
            state.num_draft_tokens_S[:-1],
            state.token_ids_SN[:-1],
        ):
            left.zero_()
        return table
