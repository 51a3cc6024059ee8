"""`peagle train --dry-run`: parameters, positions, FLOPs, memory, disk and time of a run, computed from shapes.

Activations are counted as in `chunk_size`, attention at the mean document length. The time is FLOPs divided by the
measured matrix rate, unless a rate in tokens per second is known.

Worked example, down_sample_ratio 0.5, 3 depths, 8 tokens of which 4 are response tokens: 4 positions at depth 0, 2 at
depth 1, 1 at depth 2. The drafter computes all 8 depth-0 positions and 3 chain positions, 11/8 per token; the LM head
runs for 7 positions, 7/8 per token.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from peagle.config import (
    LOSS_LOGITS,
    ChunkedAttention,
    DecoderConfig,
    DrafterConfig,
    LayerConfig,
    TrainConfig,
    ValidationEngineSettings,
    Window,
)
from peagle.training.chunk_size import backward_position_bytes, chain_position_bytes, depth_zero_position_bytes
from peagle.training.parameter_counts import (
    active_layer,
    count_decoder_head,
    count_decoder_layers,
    count_decoder_parameters,
    count_layer_parameters,
    count_muon_parameters,
    count_shared_parameters,
    count_trainable_parameters,
    largest_trainable_matrix,
)

MATRIX_RATE_REACHED = 0.35  # of the measured rate of a large matrix product, assumed for a training step
ATTENTION_BACKWARD = 2.5  # FLOPs of attention's backward pass over its forward pass


@dataclass(frozen=True)
class DatasetStats:
    num_tokens: int
    response_share: float  # of the tokens
    mean_length: float  # tokens per document


@dataclass(frozen=True)
class TrainingHardware:
    """Identical GPUs. `flops` is one GPU's rate, `memory` its free bytes (None: unknown)."""

    num_gpus: int
    flops: float
    memory: float | None = None


@dataclass(frozen=True)
class FlopsPerToken:
    target: float  # forward pass of its layers
    drafter: float  # matrix products, forward and backward
    attention: float  # of the drafter
    head: float  # loss, with the target's logits

    @property
    def total(self) -> float:
        return self.target + self.drafter + self.attention + self.head


@dataclass(frozen=True)
class TrainingPlan:
    trainable_parameters: int
    shared_parameters: int
    target_parameters: int
    positions_by_depth: tuple[int, ...]  # per step, all GPUs
    tokens_per_step: int
    flops_per_token: FlopsPerToken
    memory: dict[str, float]  # bytes per GPU, by use
    device_memory: float | None
    disk: dict[str, float]  # bytes, by use
    steps_per_epoch: float
    tokens_total: float | None  # None if only minutes are given
    seconds: float
    tokens_per_second: float
    rate_source: str
    num_gpus: int

    @property
    def fits(self) -> bool:
        return self.device_memory is None or sum(self.memory.values()) <= self.device_memory

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "fits": self.fits}

    def text(self) -> str:
        gib = {name: size / 2**30 for name, size in self.memory.items()}
        by_depth = " ".join(f"{n:,}" for n in self.positions_by_depth)
        total = "as many as the minutes allow" if self.tokens_total is None else _format_count(self.tokens_total)
        flops, limit = self.flops_per_token, ""
        if self.device_memory is not None:
            limit = f" of {self.device_memory / 2**30:.0f}" + ("" if self.fits else ", DOES NOT FIT")
        return "\n".join(
            [
                f"parameters   {_format_count(self.trainable_parameters)} trained, "
                f"{_format_count(self.shared_parameters)} shared with the target, which has "
                f"{_format_count(self.target_parameters)}",
                f"step         {self.tokens_per_step:,} tokens on {self.num_gpus} GPU{'s' * (self.num_gpus > 1)}, "
                f"{sum(self.positions_by_depth):,} positions; by depth: {by_depth}",
                f"per token    {flops.total / 1e9:.3g} GFLOP: target {flops.target / 1e9:.3g}, "
                f"drafter {flops.drafter / 1e9:.3g}, its attention {flops.attention / 1e9:.3g}, "
                f"head and loss {flops.head / 1e9:.3g}",
                f"memory       {sum(gib.values()):.2f} GiB{limit}: "
                + ", ".join(f"{name} {size:.2f}" for name, size in gib.items() if size),
                "disk         " + ", ".join(f"{name} {format_bytes(size)}" for name, size in self.disk.items()),
                f"data         {self.steps_per_epoch:,.1f} steps per epoch; the run sees {total} tokens",
                f"time         {_format_time(self.seconds)} at {self.tokens_per_second:,.0f} tokens/s "
                f"({self.rate_source})",
            ]
        )


def make_plan(
    cfg: TrainConfig,
    target: DecoderConfig,
    drafter: DrafterConfig,
    data: DatasetStats,
    hardware: TrainingHardware,
    steps: int | None,
    element: int,
    chunk_size: int,
    known_rate: float | None,
) -> TrainingPlan:
    """`element` is the size of a number in bytes, `known_rate` in tokens per second of all GPUs."""
    step_tokens = cfg.batch_tokens * cfg.gradient_accumulation_steps * hardware.num_gpus
    flops = count_flops_per_token(cfg, target, drafter, data)
    rate = known_rate if known_rate is not None else hardware.num_gpus * hardware.flops / flops.total
    total = None if steps is None else float(steps * step_tokens)
    seconds = [total / rate] if total is not None else []
    seconds += [60 * cfg.minutes] if cfg.minutes is not None else []
    hidden_states = hidden_states_bytes_per_token(cfg, target, drafter) * data.num_tokens
    trainable, ratio = count_trainable_parameters(drafter), cfg.down_sample_ratio
    positions = tuple(round(step_tokens * data.response_share * ratio**d) for d in range(cfg.num_depths))
    return TrainingPlan(
        trainable_parameters=trainable,
        shared_parameters=count_shared_parameters(drafter, target),
        target_parameters=count_decoder_parameters(target),
        positions_by_depth=positions,
        tokens_per_step=step_tokens,
        flops_per_token=flops,
        memory=memory_by_use(cfg, target, drafter, data, hardware.num_gpus, element, chunk_size),
        device_memory=hardware.memory,
        disk={
            **({"hidden states": float(hidden_states)} if hidden_states else {}),
            # a new state is complete before the previous one is removed
            "checkpoints": float(2 * _saved_state_bytes(cfg, drafter, element) + 2 * element * trainable),
        },
        steps_per_epoch=data.num_tokens / step_tokens,
        tokens_total=total,
        seconds=min(seconds),
        tokens_per_second=rate,
        rate_source="measured or given"
        if known_rate is not None
        else f"assumes {MATRIX_RATE_REACHED:.0%} of the measured matrix rate",
        num_gpus=hardware.num_gpus,
    )


def hidden_states_bytes_per_token(cfg: TrainConfig, target: DecoderConfig, drafter: DrafterConfig) -> int:
    """Bytes on disk of the auxiliary and final hidden states of one token."""
    width = target.layer.hidden_size
    if cfg.vllm_hidden_states is not None:
        return len({*drafter.aux_layer_ids, target.num_layers}) * width * 2
    if cfg.hidden_states_cache is None:
        return 0
    states = 1 + len(drafter.aux_layer_ids)
    return states * width * 2 if cfg.hidden_states_dtype == "bfloat16" else states * (width + 4)


def optimizer_bytes(cfg: TrainConfig, drafter: DrafterConfig, element: int) -> int:
    """Masters, gradients and moments. From fp32 up, parameters are their masters. AdamW has two moments, Muon one."""
    exact = max(element, 4)
    copies = (element < exact) + 1 + 2
    muon = count_muon_parameters(drafter) if cfg.optimizer == "muon" else 0
    return exact * (copies * count_trainable_parameters(drafter) - muon)


def _saved_state_bytes(cfg: TrainConfig, drafter: DrafterConfig, element: int) -> int:
    muon = count_muon_parameters(drafter) if cfg.optimizer == "muon" else 0
    return max(element, 4) * (3 * count_trainable_parameters(drafter) - muon)


def _chain_positions_per_token(cfg: TrainConfig, response_share: float) -> float:
    return response_share * sum(cfg.down_sample_ratio**d for d in range(1, cfg.num_depths))


def _attention_flops(layer: LayerConfig, length: float, window: Window = None) -> float:
    """Of a token that attends to half of its document on average, at most to the window."""
    if isinstance(window, ChunkedAttention):
        visible = min(length, window.chunk_size) / 2
    else:
        visible = min(length / 2, window or length)
    return 4 * layer.num_heads * layer.head_dim * visible


def _target_flops(target: DecoderConfig, data: DatasetStats) -> float:
    layers = [target.layer_at(i) for i in range(target.num_layers)]
    products = sum(2 * count_layer_parameters(active_layer(layer), layer.hidden_size) for layer in layers)
    windows = zip(layers, target.windows, strict=True)
    return products + sum(_attention_flops(layer, data.mean_length, window) for layer, window in windows)


def count_flops_per_token(
    cfg: TrainConfig, target: DecoderConfig, drafter: DrafterConfig, data: DatasetStats
) -> FlopsPerToken:
    width = drafter.layer.hidden_size
    weights = count_layer_parameters(drafter.layer, 2 * width)
    weights += (drafter.num_layers - 1) * count_layer_parameters(drafter.layer, width)
    chain_positions = _chain_positions_per_token(cfg, data.response_share)
    recomputed = 1 if cfg.activation_checkpointing else 0
    products = (1 + chain_positions) * (3 + recomputed) * 2 * weights  # forward, and backward to inputs and weights
    windows = drafter.windows or (None,) * drafter.num_layers
    attention = sum(_attention_flops(drafter.layer, data.mean_length, window) for window in windows)
    loss_positions = data.response_share + chain_positions
    student = 2 * drafter.draft_vocab_size * width
    teacher = 2 * target.vocab_size * target.layer.hidden_size
    online = cfg.vllm_hidden_states is None and cfg.hidden_states_cache is None
    return FlopsPerToken(
        target=_target_flops(target, data) if online else 0.0,
        drafter=products + 3 * 2 * drafter.aux_hidden_size * width,
        attention=(1 + chain_positions) * (1 + recomputed + ATTENTION_BACKWARD) * attention,
        head=loss_positions * student * (3 if drafter.own_head else 2) + data.response_share * teacher,
    )


def memory_by_use(
    cfg: TrainConfig,
    target: DecoderConfig,
    drafter: DrafterConfig,
    data: DatasetStats,
    num_gpus: int,
    element: int,
    chunk_size: int,
) -> dict[str, float]:
    """Bytes on the main rank. Of a sharded target a rank holds its share of the layers, the whole head, and two
    gathered layers: the running one and the next."""
    tokens, trainable, recompute = cfg.batch_tokens, count_trainable_parameters(drafter), cfg.activation_checkpointing
    chain_positions = min(chunk_size, tokens * _chain_positions_per_token(cfg, data.response_share))
    each = chain_position_bytes(drafter, cfg.num_depths, element, recompute) + backward_position_bytes(drafter, element)
    layers = 0.0 if cfg.target_head_only else float(count_decoder_layers(target))
    if cfg.shard_target and num_gpus > 1:
        layers = layers / num_gpus + min(2, target.num_layers) * layers / target.num_layers
    validation = ValidationEngineSettings.max_kv_cache_bytes + element * trainable
    return {
        "target": element * (layers + count_decoder_head(target)),
        "drafter": float(element * trainable),
        "optimizer": float(optimizer_bytes(cfg, drafter, element)),
        "hidden states": float(element * tokens * (drafter.aux_hidden_size + target.layer.hidden_size)),
        "depth 0": float(tokens * depth_zero_position_bytes(drafter, element, recompute)),
        "chunk": each * chain_positions,
        "logits": 4.0 * element * min(LOSS_LOGITS, tokens * drafter.draft_vocab_size),
        "largest gradient": float(element * largest_trainable_matrix(drafter)),
        "validation": float(validation) if cfg.validation_size and not cfg.shard_target else 0.0,
    }


def measure_matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large matrix product on this device."""
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


def _format_time(seconds: float) -> str:
    minutes, days = seconds / 60, seconds / 86400
    if days >= 4:
        return f"{days:,.1f} days"
    return f"{seconds:.0f} s" if minutes < 2 else f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"


def _format_count(n: float) -> str:
    return f"{n / 1e9:.2f}B" if n >= 1e9 else f"{n / 1e6:.1f}M" if n >= 1e6 else f"{n:,.0f}"


def format_bytes(n: float) -> str:
    return f"{n / 1e12:,.2f} TB" if n >= 1e12 else f"{n / 1e9:,.2f} GB" if n >= 1e8 else f"{n / 1e6:,.2f} MB"
