"""What a run will take, counted from shapes before anything runs: parameters, rows, operations, memory, disk, time.

Knows nothing about batches or modules, and of GPUs only the rates of a `TrainingHardware`. Estimates: attention
is counted at the mean length that is given, activations as `chunk_size` counts them. Time is operations over rates,
unless a rate in tokens a second is known; ranks take the same time, and wait for each other once a step.

Worked example, rate 0.5, 3 depths, 8 tokens of which 4 are asked: rows 4 at depth 0, 2 at depth 1, 1 at depth 2; the
drafter computes all 8 depth-0 rows and 3 chain rows, 11/8 rows a token; the head is asked 7 times, 7/8 a token.

Letters: D width, I MLP width, V vocabulary.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from peagle.config import (
    LOSS_LOGITS,
    ChunkedAttention,
    DecoderConfig,
    DrafterConfig,
    LayerConfig,
    MeasureSettings,
    TrainConfig,
    Window,
)
from peagle.training.chunk_size import chain_row_bytes, depth_zero_row_bytes, passing_row_bytes

REACHED = 0.35  # share of the matrix rate that a pass is taken to reach where nothing was measured
ATTENTION_BACK = 2.5  # of its forward pass: five products of which the first is made again, where that has two
GRADIENT_BYTES = 4  # they are summed over ranks in fp32


@dataclass(frozen=True)
class DatasetStats:
    """What a plan must know of the data."""

    tokens: int
    asked_share: float  # of tokens that belong to responses
    mean_length: float  # of a document


@dataclass(frozen=True)
class TrainingHardware:
    """GPUs that train together. Rates are one GPU's, in operations or bytes a second."""

    world: int
    products: float  # of the drafter's matrices
    attention: float  # of the drafter's
    target: float  # of the target's pass
    rate_from: str
    per_node: int = 1
    link: float = math.inf  # bytes that each sends to the next while all of them sum
    memory_rate: float = math.inf
    memory: float | None = None  # bytes; None: not known

    def together(self, size: float) -> float:
        """Seconds of a ring that gives everybody the others' shares of so many bytes; a sum takes two."""
        return (self.world - 1) / self.world * size / self.link


@dataclass(frozen=True)
class FlopsPerToken:
    """Operations a token."""

    target: float  # its layers
    drafter: float  # its products, forward and back
    attention: float  # the drafter's
    head: float  # the loss, with the teacher's logits

    @property
    def total(self) -> float:
        return self.target + self.drafter + self.attention + self.head


@dataclass(frozen=True)
class TrainingPlan:
    trainable: int  # parameters
    shared: int  # of the target, that the drafter reads
    target: int
    rows_by_depth: tuple[int, ...]  # of a step, all ranks
    tokens_per_step: int
    flops: FlopsPerToken  # of a token; what is read from disk costs none
    memory: dict[str, float]  # bytes on a device, by what they are
    device_memory: float | None  # that there is
    host_bytes: float  # of a node, while the target is loaded
    disk: dict[str, float]  # bytes, by what they are
    state_bytes_per_token: int  # that a step reads from disk
    target_seconds: float  # of the target's pass over the data, once, where others write its states
    step_seconds: dict[str, float]  # by what they go to; empty where a rate is known
    steps_per_epoch: float
    tokens_total: float | None  # of the whole run; None where only minutes are given
    seconds: float
    tokens_per_second: float
    rate_from: str
    world: int

    @property
    def fits(self) -> bool:
        return self.device_memory is None or sum(self.memory.values()) <= self.device_memory

    @property
    def read_per_second(self) -> float:
        """Bytes from disk, all ranks."""
        return self.tokens_per_second * self.state_bytes_per_token

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "fits": self.fits, "read_per_second": self.read_per_second}

    def text(self) -> str:
        gb = {name: size / 2**30 for name, size in self.memory.items()}
        rows = " ".join(f"{n:,}" for n in self.rows_by_depth)
        total = "as many as the minutes allow" if self.tokens_total is None else _count(self.tokens_total)
        of, room = self.flops, ""
        if self.device_memory is not None:
            room = f" of {self.device_memory / 2**30:.0f}" + ("" if self.fits else ", WHICH DOES NOT FIT")
        lines = [
            f"parameters   {_count(self.trainable)} trained, {_count(self.shared)} shared with the target, "
            f"which has {_count(self.target)}",
            f"a step       {self.tokens_per_step:,} tokens on {self.world} GPU{'s' * (self.world > 1)}, "
            f"{sum(self.rows_by_depth):,} rows asked; by depth: {rows}",
            f"a token      {of.total / 1e9:.3g} GFLOP: target {of.target / 1e9:.3g}, drafter {of.drafter / 1e9:.3g}, "
            f"its attention {of.attention / 1e9:.3g}, head and loss {of.head / 1e9:.3g}",
            f"memory       {sum(gb.values()):.2f} GiB{room}: "
            + ", ".join(f"{name} {size:.2f}" for name, size in gb.items() if size),
            "disk         " + ", ".join(f"{name} {_size(size)}" for name, size in self.disk.items()),
        ]
        if self.host_bytes:
            lines.append(f"host         {self.host_bytes / 2**30:.1f} GiB a node while the target is loaded")
        if self.state_bytes_per_token:
            written = f"; written once, in {_clock(self.target_seconds)} on as many GPUs" if self.target_seconds else ""
            lines.append(
                f"states       {self.state_bytes_per_token:,} bytes a token, {_size(self.read_per_second)}/s while "
                f"training{written}"
            )
        if self.step_seconds:
            parts = ", ".join(f"{name} {seconds:.3f}" for name, seconds in self.step_seconds.items() if seconds)
            lines.append(f"seconds      {sum(self.step_seconds.values()):.3f} a step: {parts}")
        lines += [
            f"data         {self.steps_per_epoch:,.1f} steps an epoch; the run sees {total} tokens",
            f"time         {_clock(self.seconds)} at {self.tokens_per_second:,.0f} tokens/s ({self.rate_from})",
        ]
        return "\n".join(lines)


def make_plan(
    cfg: TrainConfig,
    target: DecoderConfig,
    drafter: DrafterConfig,
    data: DatasetStats,
    machine: TrainingHardware,
    steps: int | None,
    element: int,
    chunk_rows: int | None,
    known_rate: float | None,
) -> TrainingPlan:
    """`chunk_rows` None: all rows at once. `known_rate` is in tokens a second, of all ranks."""
    step_tokens = cfg.batch_tokens * cfg.accumulate * machine.world
    flops = flops_per_token(cfg, target, drafter, data)
    parts = {} if known_rate is not None else step_seconds(cfg, target, drafter, flops, machine, element)
    rate = known_rate if known_rate is not None else step_tokens / sum(parts.values())
    total = None if steps is None else float(steps * step_tokens)
    seconds = [total / rate] if total is not None else []
    seconds += [60 * cfg.minutes] if cfg.minutes is not None else []
    per_token = state_bytes_per_token(cfg, target, drafter)
    asked_elsewhere = data.tokens * target_flops(target, data) / (machine.target * machine.world)
    ranks = machine.per_node if cfg.shard_target and not cfg.tables_only else 0  # one that is not spread goes straight
    return TrainingPlan(
        trainable=trainable(drafter),
        shared=shared(drafter, target),
        target=decoder_parameters(target),
        rows_by_depth=tuple(round(step_tokens * data.asked_share * cfg.rate**d) for d in range(cfg.num_depths)),
        tokens_per_step=step_tokens,
        flops=flops,
        memory=memory(cfg, target, drafter, data, machine.world, element, chunk_rows),
        device_memory=machine.memory,
        host_bytes=float(ranks * element * decoder_parameters(target)),
        disk={
            **({"states": float(per_token * data.tokens)} if per_token else {}),
            "saves": float(2 * saved_bytes(cfg, drafter, element) + 2 * element * trainable(drafter)),
        },
        state_bytes_per_token=per_token,
        target_seconds=asked_elsewhere if cfg.vllm_states is not None else 0.0,
        step_seconds=parts,
        steps_per_epoch=data.tokens / step_tokens,
        tokens_total=total,
        seconds=min(seconds),
        tokens_per_second=rate,
        rate_from="as logged or given" if known_rate is not None else machine.rate_from,
        world=machine.world,
    )


def step_seconds(
    cfg: TrainConfig,
    target: DecoderConfig,
    drafter: DrafterConfig,
    flops: FlopsPerToken,
    machine: TrainingHardware,
    element: int,
) -> dict[str, float]:
    """Of one step of one rank, by what they go to. Gradients are summed when all of them are there; a target that is
    spread is gathered for every batch, a layer ahead of the one that runs."""
    tokens = cfg.batch_tokens * cfg.accumulate
    reading = tokens * flops.target / machine.target
    if cfg.shard_target and flops.target:
        gathered = cfg.accumulate * machine.together(element * layers_parameters(target))
        reading = max(reading, gathered)
    return {
        "target": reading,
        "drafter": tokens * flops.drafter / machine.products,
        "attention": tokens * flops.attention / machine.attention,
        "head and loss": tokens * flops.head / machine.products,
        "optimizer": 2 * state_bytes(cfg, drafter, element) / machine.memory_rate,  # read and written
        "summing gradients": 2 * machine.together(GRADIENT_BYTES * trainable(drafter)),
    }


def state_bytes_per_token(cfg: TrainConfig, target: DecoderConfig, drafter: DrafterConfig) -> int:
    """On disk: of each tap and of what leaves the last layer (vLLM, before the norm; a cache, behind it)."""
    width = target.layer.hidden_size
    if cfg.vllm_states is not None:
        return len({*drafter.aux_layer_ids, target.num_layers}) * width * 2
    if cfg.cache is None:
        return 0
    states = 1 + len(drafter.aux_layer_ids)
    return states * width * 2 if cfg.cache_dtype == "bfloat16" else states * (width + 4)


def layer_parameters(layer: LayerConfig, input_width: int) -> int:
    q, kv = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    attention = input_width * (q + 2 * kv) + q * layer.hidden_size
    biases = layer.qkv_bias * (q + 2 * kv) + layer.out_bias * layer.hidden_size
    biases += layer.mlp_bias * (2 * layer.intermediate_size + layer.hidden_size)
    norms = (2 + 2 * layer.output_norms) * layer.hidden_size + layer.qk_norm * 2 * layer.head_dim
    return (
        attention
        + mlp_parameters(layer)
        + norms
        + biases
        + layer.attention_sinks * layer.num_heads
        + layer.layer_scalar
    )


def mlp_parameters(layer: LayerConfig) -> int:
    experts, width = layer.experts, layer.hidden_size
    if experts is None:
        return 3 * width * layer.intermediate_size
    biases = experts.bias * (2 * experts.intermediate_size + width + 1)
    return (
        experts.num_experts * (3 * width * experts.intermediate_size + width + biases)
        + 3 * width * experts.shared_intermediate_size
    )


def for_a_token(layer: LayerConfig) -> LayerConfig:
    """The layer as one token meets it, with the experts chosen for it alone."""
    experts = layer.experts
    return (
        layer if experts is None else replace(layer, experts=replace(experts, num_experts=experts.num_experts_per_tok))
    )


def decoder_parameters(cfg: DecoderConfig) -> int:
    return layers_parameters(cfg) + table_parameters(cfg)


def layers_parameters(cfg: DecoderConfig) -> int:
    return sum(layer_parameters(cfg.layer_at(i), cfg.layer.hidden_size) for i in range(cfg.num_layers))


def table_parameters(cfg: DecoderConfig) -> int:
    """Embeddings, head and the last norm: all that is needed of a target whose states lie on disk."""
    return (1 if cfg.tie_word_embeddings else 2) * cfg.vocab_size * cfg.layer.hidden_size + cfg.layer.hidden_size


def trainable(cfg: DrafterConfig) -> int:
    width = cfg.layer.hidden_size
    layers = layer_parameters(cfg.layer, 2 * width) + width  # layer 0 has a norm more
    layers += (cfg.num_layers - 1) * layer_parameters(cfg.layer, width)
    small = width + (cfg.aux_hidden_size if cfg.parallel else 0)
    small += cfg.aux_hidden_size * (cfg.fc_norm + cfg.norm_before_fc)
    tables = cfg.own_embeddings * cfg.vocab_size * width + cfg.own_head * cfg.draft_vocab_size * width
    return layers + cfg.aux_hidden_size * width + small + tables


def largest_matrix(cfg: DrafterConfig) -> int:
    """Of the trainable ones: its gradient is whole for a moment, before it is added to the masters'."""
    tables = max(cfg.own_embeddings * cfg.vocab_size, cfg.own_head * cfg.draft_vocab_size)
    return cfg.layer.hidden_size * max(tables, 2 * cfg.layer.intermediate_size, cfg.aux_hidden_size)


def maps(cfg: DrafterConfig) -> int:
    """Of the trainable parameters those of matrices between hidden states, which Muon steps."""
    width, heads = cfg.layer.hidden_size, cfg.layer.num_heads * cfg.layer.head_dim
    inner = width * (heads + 3 * cfg.layer.intermediate_size)
    product = heads + 2 * cfg.layer.num_kv_heads * cfg.layer.head_dim
    return (
        cfg.aux_hidden_size * width + cfg.num_layers * inner + (cfg.num_layers + 1) * width * product
    )  # layer 0 reads two


def state_bytes(cfg: TrainConfig, drafter: DrafterConfig, element: int) -> int:
    """Masters, gradients and moments. From fp32 up a parameter is its own master; AdamW has two moments, Muon one."""
    exact = max(element, 4)
    copies = (element < exact) + 1 + 2
    one_less = maps(drafter) if cfg.optimizer == "muon" else 0
    return exact * (copies * trainable(drafter) - one_less)


def saved_bytes(cfg: TrainConfig, drafter: DrafterConfig, element: int) -> int:
    """Of a state to go on from: masters and moments. The one before it goes when a new one is whole."""
    return max(element, 4) * (3 * trainable(drafter) - (maps(drafter) if cfg.optimizer == "muon" else 0))


def shared(cfg: DrafterConfig, target: DecoderConfig) -> int:
    """Of the target's tables, those that the drafter has none of its own for."""
    tables = (not cfg.own_embeddings) + (not cfg.own_head)
    return (1 if target.tie_word_embeddings and tables else tables) * cfg.vocab_size * cfg.layer.hidden_size


def chain_rows(cfg: TrainConfig, asked_share: float) -> float:
    """Of a token, without depth 0."""
    return asked_share * sum(cfg.rate**d for d in range(1, cfg.num_depths))


def attention_flops(layer: LayerConfig, length: float, window: Window = None) -> float:
    """Of a row that sees half of its document on average, no more than the window."""
    seen = (
        min(length, window.chunk_size) / 2
        if isinstance(window, ChunkedAttention)
        else min(length / 2, window or length)
    )
    return 4 * layer.num_heads * layer.head_dim * seen


def target_flops(target: DecoderConfig, data: DatasetStats) -> float:
    """Of its layers, a token. Its head is asked by the loss."""
    layers = [target.layer_at(i) for i in range(target.num_layers)]
    products = sum(2 * layer_parameters(for_a_token(layer), layer.hidden_size) for layer in layers)
    seen = zip(layers, target.windows, strict=True)
    return products + sum(attention_flops(layer, data.mean_length, window) for layer, window in seen)


def flops_per_token(
    cfg: TrainConfig, target: DecoderConfig, drafter: DrafterConfig, data: DatasetStats
) -> FlopsPerToken:
    width = drafter.layer.hidden_size
    own = layer_parameters(drafter.layer, 2 * width) + (drafter.num_layers - 1) * layer_parameters(drafter.layer, width)
    rows = 1 + chain_rows(cfg, data.asked_share)
    again = 1 if cfg.checkpoint_layers else 0
    products = rows * (3 + again) * 2 * own  # forward, backward to inputs, backward to weights
    windows = drafter.windows or (None,) * drafter.num_layers
    seen = sum(attention_flops(drafter.layer, data.mean_length, window) for window in windows)
    asked = data.asked_share + chain_rows(cfg, data.asked_share)
    student = 2 * drafter.draft_vocab_size * width
    teacher = 2 * target.vocab_size * target.layer.hidden_size
    online = cfg.vllm_states is None and cfg.cache is None
    return FlopsPerToken(
        target=target_flops(target, data) if online else 0.0,
        drafter=products + 3 * 2 * drafter.aux_hidden_size * width,
        attention=rows * (1 + again + ATTENTION_BACK) * seen,
        head=asked * student * (3 if drafter.own_head else 2) + data.asked_share * teacher,
    )


def memory(
    cfg: TrainConfig,
    target: DecoderConfig,
    drafter: DrafterConfig,
    data: DatasetStats,
    world: int,
    element: int,
    chunk_rows: int | None,
) -> dict[str, float]:
    """Of the first rank, which measures. Of a spread target a rank has its share of the layers, the tables whole, and
    two layers that were gathered: the one that runs and the next. Measuring with it is done when the rest is gone."""
    tokens, own, recompute = cfg.batch_tokens, trainable(drafter), cfg.checkpoint_layers
    chains = tokens * chain_rows(cfg, data.asked_share)
    together = chains if chunk_rows is None else min(chunk_rows, chains)
    row = chain_row_bytes(drafter, cfg.num_depths, element, recompute) + passing_row_bytes(drafter, element)
    layers = 0.0 if cfg.tables_only else float(layers_parameters(target))
    if cfg.shard_target and world > 1:
        layers = layers / world + min(2, target.num_layers) * layers / target.num_layers
    return {
        "target": element * (layers + table_parameters(target)),
        "drafter": float(element * own),
        "masters, gradients, moments": float(state_bytes(cfg, drafter, element)),
        "aux_hidden_states": float(element * tokens * (drafter.aux_hidden_size + target.layer.hidden_size)),
        "depth 0": float(tokens * depth_zero_row_bytes(drafter, element, recompute)),
        "chunk": row * together,
        "logits": 4.0 * element * min(LOSS_LOGITS, tokens * drafter.draft_vocab_size),
        "a gradient": float(element * largest_matrix(drafter)),
        "measuring": float(MeasureSettings.cache_bytes + element * own)
        if cfg.held_out and not cfg.shard_target
        else 0.0,
    }


def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of a large product, here and now."""
    size = 8192 if device.type == "cuda" else 768
    a = torch.randn(size, size, device=device).to(dtype)
    best = float("inf")
    for _ in range(4):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        a @ a
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best


def _clock(seconds: float) -> str:
    minutes, days = seconds / 60, seconds / 86400
    if days >= 4:
        return f"{days:,.1f} days"
    return f"{seconds:.0f} s" if minutes < 2 else f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"


def _count(n: float) -> str:
    return f"{n / 1e9:.2f}B" if n >= 1e9 else f"{n / 1e6:.1f}M" if n >= 1e6 else f"{n:,.0f}"


def _size(n: float) -> str:
    return f"{n / 1e12:,.2f} TB" if n >= 1e12 else f"{n / 1e9:,.2f} GB" if n >= 1e8 else f"{n / 1e6:,.2f} MB"
