"""CUDA graphs of decode steps; which graphs of decode steps and of prefill passes are captured.

A graph is captured from a callable that launches the work; nothing here depends on what it launches. There is one
decode graph for each batch size and number of draft tokens, up to two more for small batches of short sequences, one
prefill graph for each number of prompt rows, and mixed graphs that compute both. Unused rows of a decode graph have
slot -1, the padding slot.
"""

import gc
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from peagle.kernels.gemm.tile_configs import MAX_TILED_ROWS
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

# Mixed passes: numbers of decode requests and of prompt rows. More prompt rows are as fast in a pass of their own.
MIXED_BATCH_SIZES = (16, 32, 48, 64, 96, 128, 192, 256)
MIXED_PREFILL_ROWS = (64, 128, 256)
LARGE_BATCH_SIZE, LARGE_BATCH_PREFILL_ROWS = 128, 512  # large batches of large models have more prompts to compute
MAX_MIXED_K = 7
# From this many decode rows of a large model more of them cost more time. Passes of a small model have so few rows that
# a row's bits do not depend on them (gemm/tile_configs.py).
MAX_LARGE_MODEL_MIXED_DECODE_ROWS = 256
SLOW_ROWS = range(385, 512)  # cuBLAS takes longer for these numbers of rows of a large model than for 512 (H200)

# Largest batches with graphs for short sequences: all lengths, or all but the shortest.
SHORTEST_SEQ_MAX_BATCH, SHORT_SEQ_MAX_BATCH = 2, 8

StepResult = tuple[Tensor, Tensor]  # result_BX and logprobs_T2N; of a prefill, the first tokens and their logprobs
R = TypeVar("R")
DecodeStepFn = Callable[[Tensor, int, int | None], StepResult]  # of slots_B, k and max_seq_len


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


@dataclass(frozen=True, order=True)
class MixedKind:
    """Size of a captured pass over decode requests and prompt chunks."""

    num_requests: int
    k: int
    num_prefill_rows: int


def mixed_graph_kinds(
    num_parameters: int, max_num_seqs: int, choices: Sequence[int], max_prefill_tokens: int
) -> list[MixedKind]:
    """The mixed passes to capture: for each number of requests those with the largest k that is worth it, and with half
    of it."""
    is_large, kinds = num_parameters > LARGE_MODEL_PARAMETERS, []
    for num_requests in sorted({min(size, max_num_seqs) for size in MIXED_BATCH_SIZES}):
        if num_requests < MIXED_BATCH_SIZES[0]:
            continue
        sizes = list(MIXED_PREFILL_ROWS)
        if is_large and num_requests >= LARGE_BATCH_SIZE:
            sizes.append(LARGE_BATCH_PREFILL_ROWS)
        candidates = [
            _round_prefill_rows(MixedKind(num_requests, k, rows), is_large)
            for k in choices
            for rows in sizes
            if k <= MAX_MIXED_K and rows <= max_prefill_tokens
        ]
        worthwhile = [kind for kind in candidates if _is_mixed_kind_worthwhile(kind, is_large)]
        if is_large and not worthwhile:  # the only choice of k has many rows
            worthwhile = candidates
        largest = max((kind.k for kind in worthwhile), default=0)
        half = max((kind.k for kind in worthwhile if kind.k <= largest // 2), default=largest)
        kinds += sorted({kind for kind in worthwhile if kind.k in (half, largest)})
    return kinds


def _round_prefill_rows(kind: MixedKind, is_large: bool) -> MixedKind:
    num_decode_rows = kind.num_requests * (kind.k + 1)
    if is_large and num_decode_rows + kind.num_prefill_rows in SLOW_ROWS:
        return replace(kind, num_prefill_rows=SLOW_ROWS.stop - num_decode_rows)
    return kind


def _is_mixed_kind_worthwhile(kind: MixedKind, is_large: bool) -> bool:
    num_decode_rows = kind.num_requests * (kind.k + 1)
    if is_large:
        return kind.k <= 1 or num_decode_rows <= MAX_LARGE_MODEL_MIXED_DECODE_ROWS
    return num_decode_rows + kind.num_prefill_rows <= MAX_TILED_ROWS


def find_short_seq_lens(target: Decoder, drafter: Drafter | None, max_model_len: int) -> tuple[int, ...]:
    """Sequence lengths below `max_model_len` up to which a faster attention kernel exists for both models, ascending;
    maybe none."""
    windows, layers = list(target.cfg.windows), [target.cfg.layer_at(i) for i in range(target.cfg.num_layers)]
    if drafter is not None:
        windows, layers = windows + list(drafter.cfg.windows), [*layers, drafter.cfg.layer]
    if not HAVE_TRITON or any(window is not None for window in windows):
        return ()
    from peagle.kernels.attention.paged_launch import get_short_context_limits  # imports Triton

    weight = target.embed_tokens.weight
    heads = {(layer.num_heads, layer.num_kv_heads, layer.head_dim) for layer in layers}
    lengths = [get_short_context_limits(*each, weight.dtype, weight.device) for each in heads]
    # The same wherever there are any.
    return tuple(length for length in lengths[0] if length < max_model_len) if all(lengths) else ()


def capture_graph(run: Callable[[], R], pool: Any) -> tuple[torch.cuda.CUDAGraph, R]:
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
    result: StepResult
    graph: torch.cuda.CUDAGraph
    loaded_slots: list[int] | None = None  # content of `slots_B`, if `load_slots` wrote it last

    def load_slots(self, slots: list[int]) -> None:
        """Sets the slots of the next replay, padded with -1. Copies only if they changed."""
        if slots != self.loaded_slots:
            self.loaded_slots = slots
            rows = torch.tensor(slots + [-1] * (len(self.slots_B) - len(slots)))
            self.slots_B.copy_(pin_for_copy(rows, self.slots_B.device), non_blocking=True)

    def replay(self) -> StepResult:
        """The result, in memory that the next replay overwrites."""
        self.graph.replay()
        return self.result


class DecodeGraphs:
    """Captured decode steps by batch size, number of draft tokens and longest sequence (None: any)."""

    def __init__(
        self, run: DecodeStepFn, batch_sizes: Sequence[int], choices: Sequence[int], short_seq_lens: Sequence[int]
    ) -> None:
        """`choices`: numbers of draft tokens. `short_seq_lens`: see `find_short_seq_lens`."""
        self.run, self.batch_sizes, self.choices = run, sorted(batch_sizes), sorted(choices)
        self.short_seq_lens = tuple(short_seq_lens)
        self.captured: dict[tuple[int, int, int | None], DecodeGraph] = {}
        self.pool = torch.cuda.graph_pool_handle()
        self.memory_bytes = 0

    def capture(
        self,
        capture_prefill: Callable[[Any], None] = lambda pool: None,
        report_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Captures all graphs, largest first, so that smaller ones reuse their memory; then those of prefill."""
        gc.collect()
        gc.freeze()  # torch collects garbage before each capture
        torch.cuda.empty_cache()  # so that the difference in free memory is the memory of the graphs
        free = torch.cuda.mem_get_info()[0]
        steps = [(b, k) for b in self.batch_sizes for k in self.choices if self._is_worth_capturing(b, k)]
        for i, (batch_size, k) in enumerate(reversed(steps)):
            report_progress(i, len(steps))
            self._capture_step(batch_size, k)
        capture_prefill(self.pool)
        torch.cuda.synchronize()
        self.memory_bytes = free - torch.cuda.mem_get_info()[0]

    def _is_worth_capturing(self, batch_size: int, k: int) -> bool:
        """The smallest k always is, so every batch size has a graph."""
        max_rows = MAX_DECODE_ROWS if k < LARGE_K else MAX_LARGE_K_ROWS
        return k == self.choices[0] or batch_size * (k + 1) <= max_rows

    def _capture_step(self, batch_size: int, k: int) -> None:
        lengths = self.short_seq_lens
        if batch_size > SHORTEST_SEQ_MAX_BATCH:
            lengths = lengths[1:] if batch_size <= SHORT_SEQ_MAX_BATCH else ()
        for length in (None, *lengths):
            slots_B = torch.full((batch_size,), -1, device="cuda")
            graph, result = capture_graph(partial(self.run, slots_B, k, length), self.pool)
            self.captured[batch_size, k, length] = DecodeGraph(slots_B, result, graph)

    def find(self, batch_size: int, k: int, max_num_tokens: int) -> DecodeGraph | None:
        """The smallest graph that fits. `max_num_tokens`: most tokens of a request before the step."""
        i = bisect_left(self.batch_sizes, batch_size)
        if i == len(self.batch_sizes):
            return None
        # After the step a request has up to k verified draft tokens, one more token and k new draft tokens.
        lengths = [length for length in self.short_seq_lens if max_num_tokens + 2 * k + 1 <= length]
        found = (self.captured.get((self.batch_sizes[i], k, length)) for length in (*lengths, None))
        return next((graph for graph in found if graph is not None), None)
