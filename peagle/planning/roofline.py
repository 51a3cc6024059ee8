"""Seconds of a round and of reading a prompt, on paper: bytes over bandwidth, operations over matrix rate, and the few
constants that an engine was measured to have.

Knows shapes and GPUs; nothing about acceptance, load or money. The formulas and where each constant comes from stand in
docs/planning.md; tests/planning/test_planning.py holds them against measured rounds.
"""

from __future__ import annotations

from dataclasses import dataclass

from peagle.config import ChunkedAttention, Window
from peagle.planning.gpus import Gpu
from peagle.planning.shapes import DrafterShape, Shape

SHARPNESS = 1.5  # how far the larger of two bounds hides the smaller: 1 would add them, infinity take the larger
PROMPT_CHUNK = 8192  # tokens of prompts that are read together
ACTIVATION_BYTES = 2.0  # of an element that GPUs send each other


@dataclass(frozen=True)
class Engine:
    """What an engine makes of a GPU. Fitted once, on rounds measured on one H200."""

    name: str
    memory_share: float  # of the bandwidth, when reading weights
    cache_share: float  # of the bandwidth, when reading keys and values
    matrix_share: float  # of the matrix rate
    packed_share: float  # of the bandwidth, when reading experts of four bits
    layer_s: float  # a layer takes no less: launches and waits of its kernels
    expert_layer_s: float  # nor does one with experts
    pass_s: float  # of each pass of the drafter, beside its work
    draft_host_s: float  # a round with drafts takes no less: the host's work


EMBEDDED = Engine("embedded", 0.79, 0.63, 0.70, 0.50, 18e-6, 50e-6, 0.0, 0.0)
VLLM = Engine("vllm", 0.77, 0.85, 0.62, 0.77, 59e-6, 165e-6, 0.1e-3, 4.9e-3)
ENGINES = {engine.name: engine for engine in (EMBEDDED, VLLM)}


@dataclass(frozen=True)
class Machine:
    """GPUs that hold one copy of the model together (`tensor_parallel` of them), and the engine on them."""

    gpu: Gpu
    engine: Engine
    tensor_parallel: int = 1

    def bound(self, read: float, computed: float, least: float = 0.0) -> float:
        """Seconds of work that reads so many bytes of weights and does so many operations, at least `least`."""
        memory = read / self.tensor_parallel / (self.gpu.bandwidth * self.engine.memory_share)
        return joined(memory, self.compute(computed), least)

    def compute(self, operations: float) -> float:
        return operations / self.tensor_parallel / (self.gpu.matrix_rate * self.engine.matrix_share)

    def attention(self, kv_heads: int, cached: float, operations: float) -> float:
        """Of a layer whose rows read so many bytes of keys and values. Heads that are fewer than the GPUs lie on
        several of them."""
        parts = min(self.tensor_parallel, kv_heads)
        return joined(cached / parts / (self.gpu.bandwidth * self.engine.cache_share), self.compute(operations))

    def all_reduce(self, elements: float) -> float:
        """A ring: every GPU sends all but its own part twice."""
        if (parts := self.tensor_parallel) == 1:
            return 0.0
        return self.gpu.link_s + 2 * (parts - 1) / parts * elements * ACTIVATION_BYTES / self.gpu.link

    def all_gather(self, elements: float) -> float:
        if (parts := self.tensor_parallel) == 1:
            return 0.0
        return self.gpu.link_s + (parts - 1) / parts * elements * ACTIVATION_BYTES / self.gpu.link


def joined(*seconds: float) -> float:
    """Bounds that hide each other in part."""
    return float(sum(s**SHARPNESS for s in seconds) ** (1 / SHARPNESS))


@dataclass(frozen=True)
class Batch:
    """Requests that go through a pass together, each with so many new rows behind so many tokens: `context` on average,
    evenly spread over `span` of them, half of it on either side."""

    requests: int
    rows: int  # of each request
    context: float
    span: float = 1.0

    @property
    def all_rows(self) -> int:
        return self.requests * self.rows

    def seen(self, window: Window) -> float:
        """Keys that a row reads, on average."""
        first, last = self.context - self.span / 2, self.context + self.span / 2
        return (seen_before(last, window) - seen_before(first, window)) / self.span


def seen_before(position: float, window: Window) -> float:
    """Keys that all rows before a position read together: each as many as there are before itself, no more than a
    sliding window holds, none from before its chunk."""
    if isinstance(window, ChunkedAttention):
        chunks, rest = divmod(position, window.chunk_size)
        return (chunks * window.chunk_size**2 + rest**2) / 2
    growing = min(position, window or position)
    return growing**2 / 2 + (position - growing) * growing


def layers_seconds(machine: Machine, shape: Shape, batch: Batch) -> float:
    """A pass through all layers."""
    rows, seconds = batch.all_rows, 0.0
    kinds: dict[tuple[Window, bool, tuple[int, int]], tuple[int, int]] = {}  # a kind -> one such layer, how many
    for i, (window, moe) in enumerate(zip(shape.windows, shape.moe, strict=True)):
        kind = window, moe, shape.kv_at(i)
        first, count = kinds.get(kind, (i, 0))
        kinds[kind] = first, count + 1
    for (window, moe, (kv_heads, head_dim)), (layer, count) in kinds.items():
        every = shape.attention_weights(layer) + shape.mlp_weights(layer)
        read, computed = every * shape.weight_bytes, 2.0 * every * rows
        if moe:
            engine, packed = machine.engine, shape.expert_bytes < 1.0
            slower = engine.memory_share / engine.packed_share if packed else 1.0
            read += shape.experts_touched(rows) * shape.expert_weights * shape.expert_bytes * slower
            computed += 2.0 * shape.active * shape.expert_weights * rows
        seen = batch.seen(window)
        cached = batch.requests * seen * 2 * kv_heads * head_dim * shape.kv_bytes
        one = machine.bound(read, computed, machine.engine.expert_layer_s if moe else machine.engine.layer_s)
        one += machine.attention(kv_heads, cached, 4.0 * shape.heads * head_dim * seen * rows)
        one += 2 * machine.all_reduce(rows * shape.hidden)
        seconds += count * one
    return seconds


def head_seconds(machine: Machine, shape: Shape, rows: int) -> float:
    read, computed = shape.head_weights * shape.head_bytes, 2.0 * shape.head_weights * rows
    return machine.bound(read, computed) + machine.all_gather(rows * shape.vocab)


def round_seconds(
    machine: Machine,
    target: Shape,
    drafter: DrafterShape | None,
    k: int,
    requests: int,
    context: float,
    span: float = 1.0,
) -> float:
    """One round of so many requests, at contexts as `Batch` has them: the target reads K + 1 rows of each, then the
    drafter makes K drafts.

    P-EAGLE's pass has the K + 1 verified rows and K - 1 masks; EAGLE-3's first pass the verified rows, the other K - 1
    one row each.
    """
    assert k == 0 or drafter is not None
    engine = machine.engine
    batch = Batch(requests, k + 1, context, span)
    seconds = layers_seconds(machine, target, batch) + head_seconds(machine, target, batch.all_rows)
    if k and drafter is not None:
        body, combined = drafter.body, drafter.combine_weights
        seconds += machine.bound(combined * body.weight_bytes, 2.0 * combined * batch.all_rows)
        parallel = drafter.method == "p-eagle"
        passes = [(2 * k, k)] if parallel else [(k + 1, 1)] + [(1, 1)] * (k - 1)
        for rows, said in passes:
            seconds += engine.pass_s + layers_seconds(machine, body, Batch(requests, rows, context, span))
            seconds += head_seconds(machine, body, requests * said)
    return max(seconds, engine.draft_host_s if k else 0.0)


def prompt_seconds(
    machine: Machine, target: Shape, drafter: DrafterShape | None, tokens: int, requests: int = 1
) -> float:
    """Reading one prompt, where as many of `requests` such are read together as a chunk holds: all their rows through
    the layers, one of each through the head."""
    if tokens == 0:
        return 0.0
    together = max(1, min(requests, PROMPT_CHUNK // tokens))
    batch = Batch(together, tokens, tokens / 2, tokens)
    seconds = layers_seconds(machine, target, batch) + head_seconds(machine, target, together)
    if drafter is not None:
        combined = drafter.combine_weights
        seconds += machine.bound(combined * drafter.body.weight_bytes, 2.0 * combined * batch.all_rows)
        seconds += layers_seconds(machine, drafter.body, batch)
    return seconds / together


def needed_bytes(target: Shape, drafter: DrafterShape | None, tokens: int, parts: int = 1) -> tuple[float, float]:
    """Of memory, over all of so many GPUs: weights, and keys and values of a request of so many tokens."""
    weights, cached = target.stored_bytes, target.cached_bytes(tokens, parts)
    if drafter is not None:
        weights, cached = weights + drafter.stored_bytes, cached + drafter.body.cached_bytes(tokens, parts)
    return weights, cached
