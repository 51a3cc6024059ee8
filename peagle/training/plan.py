"""What a run will take, counted from shapes before anything runs: parameters, rows, operations, memory, time.

Knows nothing about batches or modules. Estimates: attention is counted at the mean length that is given, activations
as `chunk_size` counts them. Time is operations over the matrix rate of the device and the share of it
that training reaches, unless a rate in tokens a second is known.

Worked example, rate 0.5, 3 depths, 8 tokens of which 4 are asked: rows 4 at depth 0, 2 at depth 1, 1 at depth 2; the
drafter computes all 8 depth-0 rows and 3 chain rows, 11/8 rows a token; the head is asked 7 times, 7/8 a token.

Letters: D width, I MLP width, V vocabulary.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from peagle.config import LOSS_LOGITS, DecoderConfig, DrafterConfig, LayerConfig, TrainConfig
from peagle.training.chunk_size import chain_row_bytes, depth_zero_row_bytes, passing_row_bytes

REACHED = 0.35  # share of the matrix rate that training is taken to reach where nothing was measured


@dataclass(frozen=True)
class Data:
    """What a plan must know of the data."""

    tokens: int
    asked_share: float  # of tokens that belong to responses
    mean_length: float  # of a document


@dataclass(frozen=True)
class Plan:
    trainable: int  # parameters
    shared: int  # of the target, that the drafter reads
    target: int
    rows_by_depth: tuple[int, ...]  # of a step, all ranks
    tokens_per_step: int
    flops_target: float  # a token
    flops_drafter: float
    flops_head: float
    memory: dict[str, float]  # bytes on a device, by what they are
    steps_per_epoch: float
    tokens_total: float | None  # of the whole run; None where only minutes are given
    seconds: float
    tokens_per_second: float
    rate_from: str

    @property
    def flops(self) -> float:
        return self.flops_target + self.flops_drafter + self.flops_head

    def text(self) -> str:
        def count(n: float) -> str:
            return f"{n / 1e9:.2f}B" if n >= 1e9 else f"{n / 1e6:.1f}M" if n >= 1e6 else f"{n:,.0f}"

        gb = {name: size / 2**30 for name, size in self.memory.items()}
        rows = " ".join(f"{n:,}" for n in self.rows_by_depth)
        total = "as many as the minutes allow" if self.tokens_total is None else count(self.tokens_total)
        lines = [
            f"parameters   {count(self.trainable)} trained, {count(self.shared)} shared with the target, "
            f"which has {count(self.target)}",
            f"a step       {self.tokens_per_step:,} tokens, {sum(self.rows_by_depth):,} rows asked; by depth: {rows}",
            f"a token      {self.flops / 1e9:.3g} GFLOP: target {self.flops_target / 1e9:.3g}, "
            f"drafter {self.flops_drafter / 1e9:.3g}, head and loss {self.flops_head / 1e9:.3g}",
            f"memory       {sum(gb.values()):.2f} GiB: " + ", ".join(f"{name} {size:.2f}" for name, size in gb.items()),
            f"data         {self.steps_per_epoch:,.1f} steps an epoch; the run sees {total} tokens",
            f"time         {_clock(self.seconds)} at {self.tokens_per_second:,.0f} tokens/s ({self.rate_from})",
        ]
        return "\n".join(lines)


def make_plan(
    cfg: TrainConfig,
    target: DecoderConfig,
    drafter: DrafterConfig,
    data: Data,
    world: int,
    steps: int | None,
    element_bytes: int,
    chunk_rows: int | None,
    known_rate: float | None,
    matrix_rate: float,
) -> Plan:
    """`chunk_rows` None: all rows at once. `known_rate` is in tokens a second, `matrix_rate` in operations."""
    step_tokens = cfg.batch_tokens * cfg.accumulate * world
    share, depths = data.asked_share, cfg.num_depths
    rows = tuple(round(step_tokens * share * cfg.rate**d) for d in range(depths))
    flops = flops_per_token(cfg, target, drafter, data)
    rate = known_rate if known_rate is not None else REACHED * matrix_rate * world / sum(flops)
    total = None if steps is None else float(steps * step_tokens)
    seconds = [total / rate] if total is not None else []
    seconds += [60 * cfg.minutes] if cfg.minutes is not None else []
    return Plan(
        trainable=trainable(drafter),
        shared=shared(drafter, target),
        target=decoder_parameters(target),
        rows_by_depth=rows,
        tokens_per_step=step_tokens,
        flops_target=flops[0],
        flops_drafter=flops[1],
        flops_head=flops[2],
        memory=memory(cfg, target, drafter, data, world, element_bytes, chunk_rows),
        steps_per_epoch=data.tokens / step_tokens,
        tokens_total=total,
        seconds=min(seconds),
        tokens_per_second=rate,
        rate_from="as logged or given" if known_rate is not None else f"{REACHED:.0%} of the measured matrix rate",
    )


def layer_parameters(layer: LayerConfig, input_width: int) -> int:
    q, kv = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    attention = input_width * (q + 2 * kv) + q * layer.hidden_size
    biases = layer.qkv_bias * (q + 2 * kv) + layer.out_bias * layer.hidden_size
    biases += layer.mlp_bias * (2 * layer.intermediate_size + layer.hidden_size)
    norms = 2 * layer.hidden_size + layer.qk_norm * 2 * layer.head_dim
    return attention + 3 * layer.hidden_size * layer.intermediate_size + norms + biases


def decoder_parameters(cfg: DecoderConfig) -> int:
    tables = (1 if cfg.tied_head else 2) * cfg.vocab_size * cfg.layer.hidden_size
    return cfg.num_layers * layer_parameters(cfg.layer, cfg.layer.hidden_size) + tables + cfg.layer.hidden_size


def trainable(cfg: DrafterConfig) -> int:
    width = cfg.layer.hidden_size
    layers = layer_parameters(cfg.layer, 2 * width) + width  # layer 0 has a norm more
    layers += (cfg.num_layers - 1) * layer_parameters(cfg.layer, width)
    small = width + (cfg.tap_width if cfg.parallel else 0)
    small += cfg.tap_width * (cfg.fc_norm + cfg.norm_before_fc)
    tables = cfg.own_embeddings * cfg.vocab_size * width + cfg.own_head * cfg.draft_vocab_size * width
    return layers + cfg.tap_width * width + small + tables


def maps(cfg: DrafterConfig) -> int:
    """Of the trainable parameters those of matrices between hidden states, which Muon steps."""
    width, heads = cfg.layer.hidden_size, cfg.layer.num_heads * cfg.layer.head_dim
    inner = width * (heads + 3 * cfg.layer.intermediate_size)
    product = heads + 2 * cfg.layer.num_kv_heads * cfg.layer.head_dim
    return cfg.tap_width * width + cfg.num_layers * inner + (cfg.num_layers + 1) * width * product  # layer 0 reads two


def state_bytes(cfg: TrainConfig, drafter: DrafterConfig, element: int) -> int:
    """Masters, gradients and moments. From fp32 up a parameter is its own master; AdamW has two moments, Muon one."""
    exact = max(element, 4)
    copies = (element < exact) + 1 + 2
    one_less = maps(drafter) if cfg.optimizer == "muon" else 0
    return exact * (copies * trainable(drafter) - one_less)


def shared(cfg: DrafterConfig, target: DecoderConfig) -> int:
    """Of the target's tables, those that the drafter has none of its own for."""
    tables = (not cfg.own_embeddings) + (not cfg.own_head)
    return (1 if target.tied_head and tables else tables) * cfg.vocab_size * cfg.layer.hidden_size


def chain_rows(cfg: TrainConfig, asked_share: float) -> float:
    """Of a token, without depth 0."""
    return asked_share * sum(cfg.rate**d for d in range(1, cfg.num_depths))


def flops_per_token(
    cfg: TrainConfig, target: DecoderConfig, drafter: DrafterConfig, data: Data
) -> tuple[float, float, float]:
    """Of the target's pass, of the drafter's passes forward and back, of the head and the loss."""

    def attention(layer: LayerConfig) -> float:
        return 4 * layer.num_heads * layer.head_dim * data.mean_length / 2

    head = 2 * target.vocab_size * target.layer.hidden_size
    layers = layer_parameters(target.layer, target.layer.hidden_size)
    reading = target.num_layers * (2 * layers + attention(target.layer)) + head * data.asked_share
    width = drafter.layer.hidden_size
    own = layer_parameters(drafter.layer, 2 * width) + (drafter.num_layers - 1) * layer_parameters(drafter.layer, width)
    again = 4 if cfg.checkpoint_layers else 3  # forward, backward to inputs, backward to weights
    rows = 1 + chain_rows(cfg, data.asked_share)
    drafting = rows * again * (2 * own + drafter.num_layers * attention(drafter.layer))
    drafting += 3 * 2 * drafter.tap_width * width
    asked = data.asked_share + chain_rows(cfg, data.asked_share)
    student = 2 * drafter.draft_vocab_size * width
    return reading, drafting, asked * student * (3 if drafter.own_head else 2)


def memory(
    cfg: TrainConfig,
    target: DecoderConfig,
    drafter: DrafterConfig,
    data: Data,
    world: int,
    element: int,
    chunk_rows: int | None,
) -> dict[str, float]:
    tokens, own, recompute = cfg.batch_tokens, trainable(drafter), cfg.checkpoint_layers
    chains = tokens * chain_rows(cfg, data.asked_share)
    together = chains if chunk_rows is None else min(chunk_rows, chains)
    row = chain_row_bytes(drafter, cfg.num_depths, element, recompute) + passing_row_bytes(drafter, element)
    spread = world if cfg.shard_target else 1
    return {
        "target": element * decoder_parameters(target) / spread,
        "drafter": float(element * own),
        "masters, gradients, moments": float(state_bytes(cfg, drafter, element)),
        "taps": float(element * tokens * (drafter.tap_width + target.layer.hidden_size)),
        "depth 0": float(tokens * depth_zero_row_bytes(drafter, element, recompute)),
        "chunk": row * together,
        "logits": 4.0 * element * min(LOSS_LOGITS, tokens * drafter.draft_vocab_size),
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
    minutes = seconds / 60
    return f"{seconds:.0f} s" if minutes < 2 else f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"
