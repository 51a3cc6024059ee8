"""CUDA graphs of decode steps and prefill passes.

A graph is captured from a callable that launches the work; nothing here depends on what it launches. There is one
decode graph for each batch size and number of draft tokens, up to two more for small batches of short sequences, and
one prefill graph for each number of prompt rows. Unused rows of a decode graph have slot -1, the padding slot.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from peagle.engine.prefill_inputs import Int64Array, PrefillShape, pack_prefill_inputs
from peagle.kernels.host_transfer import pin_for_copy
from peagle.kernels.triton_utils import HAVE_TRITON
from peagle.models.decoder import Decoder
from peagle.models.drafter import Drafter

# Most target rows of a captured decode step, where k is one of several choices; fewer for large k.
MAX_DECODE_ROWS = 2048
LARGE_K, MAX_LARGE_K_ROWS = 8, 640

PREFILL_ROWS = (64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
LARGE_MODEL_PARAMETERS = 2e9  # larger models keep the GPU busy longer than the host, except for short prompts
MAX_LARGE_MODEL_PREFILL_ROWS = 512

# Largest batches with graphs for short sequences: all lengths, or all but the shortest.
SHORTEST_SEQ_MAX_BATCH, SHORT_SEQ_MAX_BATCH = 2, 8

DecodeStepFn = Callable[[Tensor, int, int | None], Tensor]  # slots_B, k, max_seq_len -> result_BX
PrefillFn = Callable[[Tensor, PrefillShape], Tensor]  # packed, shape -> first tokens [F]


def decode_batch_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, 8, 16, then steps of about a quarter, so that padding stays small."""
    sizes, size = [], 1
    while size < max_num_seqs:
        sizes.append(size)
        size = size * 2 if size < 16 else size + max(8, 1 << (size.bit_length() - 2))
    return [*sizes, max_num_seqs]


def prefill_graph_sizes(num_parameters: int, max_prefill_tokens: int) -> list[int]:
    """Numbers of prompt rows for which launching takes the host longer than running takes the GPU."""
    is_large = num_parameters > LARGE_MODEL_PARAMETERS
    limit = min(max_prefill_tokens, MAX_LARGE_MODEL_PREFILL_ROWS if is_large else max_prefill_tokens)
    return [rows for rows in PREFILL_ROWS if rows <= limit]


def find_short_seq_lens(target: Decoder, drafter: Drafter | None) -> tuple[int, ...]:
    """Sequence lengths up to which a faster attention kernel exists for both models, ascending; maybe none."""
    windows, layers = list(target.cfg.windows), [target.cfg.layer_at(i) for i in range(target.cfg.num_layers)]
    if drafter is not None:
        windows, layers = windows + list(drafter.cfg.windows), [*layers, drafter.cfg.layer]
    if not HAVE_TRITON or any(window is not None for window in windows):
        return ()
    from peagle.kernels.attention.paged_launch import get_short_context_limits  # imports Triton

    weight = target.embed_tokens.weight
    heads = {(layer.num_heads, layer.num_kv_heads, layer.head_dim) for layer in layers}
    lengths = [get_short_context_limits(*each, weight.dtype, weight.device) for each in heads]
    return lengths[0] if all(lengths) else ()  # the same wherever there are any


def _capture(run: Callable[[], Tensor], pool: Any) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Captures the work that `run` launches. Returns the graph and the output of `run`."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()  # compiles kernels
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        out = run()
    return graph, out


@dataclass
class DecodeGraph:
    """A captured decode step with its input and output tensors."""

    slots_B: Tensor
    result_BX: Tensor  # output tokens, number of accepted tokens, number of draft tokens
    graph: torch.cuda.CUDAGraph
    loaded_slots: list[int] | None = None  # content of `slots_B`, if `load_slots` wrote it last

    def load_slots(self, slots: list[int]) -> None:
        """Sets the slots of the next replay, padded with -1. Copies only if they changed."""
        if slots != self.loaded_slots:
            self.loaded_slots = slots
            rows = torch.tensor(slots + [-1] * (len(self.slots_B) - len(slots)))
            self.slots_B.copy_(pin_for_copy(rows, self.slots_B.device), non_blocking=True)

    def replay(self) -> None:
        self.graph.replay()


@dataclass
class PrefillGraph:
    """A captured prefill pass with its input and output tensors."""

    shape: PrefillShape
    packed: Tensor
    first_tokens_F: Tensor
    graph: torch.cuda.CUDAGraph

    def replay(self, packed: Int64Array) -> Tensor:
        """The first tokens of the prompts that end, in memory that the next replay overwrites."""
        self.packed.copy_(pin_for_copy(torch.from_numpy(packed), self.packed.device), non_blocking=True)
        self.graph.replay()
        return self.first_tokens_F


class PrefillGraphs:
    """Captured prefill passes: the target, the first tokens, the drafter."""

    def __init__(
        self,
        run: PrefillFn,
        sizes: Sequence[int],
        num_mask_rows: int | None,
        max_model_len: int,
        device: torch.device,
    ) -> None:
        self.run, self.sizes, self.num_mask_rows = run, sorted(sizes), num_mask_rows
        self.max_model_len, self.device = max_model_len, device
        self.captured: list[PrefillGraph] = []  # by ascending number of rows

    def graph_shape(self, num_rows: int) -> PrefillShape:
        return PrefillShape(
            num_rows,
            num_sequences=min(num_rows // 16, 128) + 1,
            num_ends=min(max(num_rows // 32, 4), 128),
            max_query_len=min(num_rows, 1024),
            max_context_len=None,
            num_mask_rows=self.num_mask_rows,
        )

    def capture(self, pool: Any) -> None:
        graphs = [self._capture(self.graph_shape(num_rows), pool) for num_rows in reversed(self.sizes)]
        self.captured = graphs[::-1]

    def _capture(self, shape: PrefillShape, pool: Any) -> PrefillGraph:
        packed = torch.from_numpy(pack_prefill_inputs([], [], shape, self.max_model_len, None)).to(self.device)
        graph, first_tokens_F = _capture(lambda: self.run(packed, shape), pool)
        return PrefillGraph(shape, packed, first_tokens_F, graph)

    def find(self, shape: PrefillShape) -> PrefillGraph | None:
        """The smallest graph that fits, unless it has more than twice the rows of the smallest with enough rows."""
        larger = [g for g in self.captured if g.shape.num_rows >= shape.num_rows]
        limit = 2 * larger[0].shape.num_rows if larger else 0
        return next((g for g in larger if g.shape.fits(shape) and g.shape.num_rows <= limit), None)


class DecodeGraphs:
    """Captured decode steps by batch size and number of draft tokens."""

    def __init__(
        self,
        run: DecodeStepFn,
        batch_sizes: Sequence[int],
        choices: Sequence[int],
        max_model_len: int,
        short_seq_lens: Sequence[int],
        device: torch.device,
    ) -> None:
        """`choices`: numbers of draft tokens. `short_seq_lens`: see `find_short_seq_lens`."""
        self.run, self.batch_sizes, self.choices = run, sorted(batch_sizes), sorted(choices)
        self.max_model_len, self.short_seq_lens, self.device = max_model_len, tuple(short_seq_lens), device
        self.captured: dict[tuple[int, int], DecodeGraph] = {}
        self.captured_short: dict[tuple[int, int], dict[int, DecodeGraph]] = {}  # then by sequence length
        self.pool = torch.cuda.graph_pool_handle()
        self.capture_seconds = 0.0
        self.memory_bytes = 0

    def capture(self, prefill_graphs: PrefillGraphs | None = None) -> None:
        """Captures all graphs, largest first, so that smaller ones reuse their memory."""
        torch.cuda.empty_cache()  # so that the difference in free memory is the memory of the graphs
        started, free = time.perf_counter(), torch.cuda.mem_get_info()[0]
        for batch_size in reversed(self.batch_sizes):
            for k in reversed(self.choices):
                if self._is_worth_capturing(batch_size, k):
                    self._capture_step(batch_size, k)
        if prefill_graphs is not None:
            prefill_graphs.capture(self.pool)
        torch.cuda.synchronize()
        self.capture_seconds = time.perf_counter() - started
        self.memory_bytes = free - torch.cuda.mem_get_info()[0]

    def _is_worth_capturing(self, batch_size: int, k: int) -> bool:
        """The smallest k always is, so every batch size has a graph."""
        max_rows = MAX_DECODE_ROWS if k < LARGE_K else MAX_LARGE_K_ROWS
        return k == self.choices[0] or batch_size * (k + 1) <= max_rows

    def _capture_step(self, batch_size: int, k: int) -> None:
        self.captured[batch_size, k] = self._capture(batch_size, k, None)
        lengths = self.short_seq_lens
        if batch_size > SHORTEST_SEQ_MAX_BATCH:
            lengths = lengths[1:] if batch_size <= SHORT_SEQ_MAX_BATCH else ()
        self.captured_short[batch_size, k] = {
            length: self._capture(batch_size, k, length) for length in lengths if length < self.max_model_len
        }

    def _capture(self, batch_size: int, k: int, max_seq_len: int | None) -> DecodeGraph:
        slots_B = torch.full((batch_size,), -1, device=self.device)
        graph, result_BX = _capture(lambda: self.run(slots_B, k, max_seq_len), self.pool)
        return DecodeGraph(slots_B, result_BX, graph)

    def find(self, batch_size: int, k: int, max_num_tokens: int) -> DecodeGraph | None:
        """The smallest graph that fits. `max_num_tokens`: most tokens of a request before the step."""
        i = bisect_left(self.batch_sizes, batch_size)
        if i == len(self.batch_sizes):
            return None
        short = self.captured_short.get((self.batch_sizes[i], k), {})
        # After the step a request has up to k verified draft tokens, one more token and k new draft tokens.
        fits = (short[length] for length in sorted(short) if max_num_tokens + 2 * k + 1 <= length)
        return next(fits, self.captured.get((self.batch_sizes[i], k)))
