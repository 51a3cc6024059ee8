"""`peagle train --dry-run`: parameters, memory, disk, tokens and time of a run. Nothing is loaded or written.

Both models are built on the meta device and their tensors counted; activations are counted as in `chunk_size`. The time
is the FLOPs of the matrix products divided by a share of the measured matrix rate, unless a rate in tokens per second
is known.

Worked example, down_sample_ratio 0.5, 3 depths, 8 tokens of which 4 are response tokens: 4 positions at depth 0, 2 at
depth 1, 1 at depth 2. The drafter computes all 8 depth-0 positions and 3 chain positions, 11/8 per token; the LM head
runs for 7 positions, 7/8 per token.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from peagle.checkpoints.files import parse_device
from peagle.config import (
    CPU_CHUNK_SIZE,
    LOSS_LOGITS,
    DecoderConfig,
    DrafterConfig,
    TrainConfig,
    ValidationEngineSettings,
)
from peagle.models.decoder import Decoder
from peagle.models.drafter import Drafter
from peagle.models.layers import ExpertMLP
from peagle.training.chunk_size import (
    backward_position_bytes,
    chain_position_bytes,
    depth_zero_position_bytes,
    fit_chunk_size,
    free_gpu_bytes,
)
from peagle.training.drafter_init import plan_drafter_config
from peagle.training.optimizer import optimizer_bytes
from peagle.training.recipe import Recipe
from peagle.training.resume import read_log
from peagle.training.run import load_training_inputs, training_dtype

MATRIX_RATE_REACHED = 0.35  # of the measured rate of a large matrix product, assumed for a training step


@dataclass(frozen=True)
class TrainingPlan:
    num_gpus: int
    trainable_parameters: int
    target_parameters: int
    tokens_per_step: int
    steps_per_epoch: float
    tokens_total: float | None  # None if only minutes are given
    memory: dict[str, float]  # bytes per GPU, by use
    device_memory: float | None  # free bytes of a GPU; None on a CPU
    disk: dict[str, float]  # bytes, by use
    tokens_per_second: float
    seconds: float

    @property
    def fits(self) -> bool:
        return self.device_memory is None or sum(self.memory.values()) <= self.device_memory

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "fits": self.fits}

    def text(self) -> str:
        total = "as many as the minutes allow" if self.tokens_total is None else f"{self.tokens_total / 1e6:,.1f}M"
        limit = ""
        if self.device_memory is not None:
            limit = f" of {self.device_memory / 1e9:.0f}" + ("" if self.fits else ", DOES NOT FIT")
        memory, disk = (
            ", ".join(f"{name} {size / 1e9:.2f}" for name, size in sizes.items() if size)
            for sizes in (self.memory, self.disk)
        )
        lines = [
            f"parameters   {self.trainable_parameters / 1e6:,.1f}M trained; "
            f"{self.target_parameters / 1e6:,.1f}M of the target loaded",
            f"tokens       {self.tokens_per_step:,} per step, "
            f"{self.steps_per_epoch:,.1f} steps per epoch, {total} in all",
            f"memory       {sum(self.memory.values()) / 1e9:.2f} GB{limit} per GPU: {memory}",
            f"disk         {sum(self.disk.values()) / 1e9:.2f} GB: {disk}",
            f"time         {self.seconds / 3600:,.2f} h at {self.tokens_per_second:,.0f} tokens/s "
            f"on {self.num_gpus} GPU{'s' * (self.num_gpus > 1)}",
        ]
        return "\n".join(lines)


def plan_run(recipe: Recipe, out: Path, device: str, num_gpus: int, known_rate: float | None) -> TrainingPlan:
    """Plans a run on `num_gpus` GPUs like this one. `known_rate` is in tokens per second of all GPUs."""
    inputs, cfg, where = load_training_inputs(recipe), recipe.train, parse_device(device)
    data, dtype = inputs.train_set, training_dtype(cfg.dtype, where)
    drafter_cfg = plan_drafter_config(cfg, inputs.target)
    drafter_cfg = replace(drafter_cfg, mask_token_id=0 if cfg.method == "p-eagle" else None)
    target_cfg = replace(inputs.target, num_layers=0, windows=()) if cfg.target_head_only else inputs.target
    with torch.device("meta"):
        target, drafter = Decoder(target_cfg).to(dtype), Drafter(drafter_cfg).to(dtype)
    step_tokens = cfg.batch_tokens * cfg.gradient_accumulation_steps * num_gpus
    steps, logged = inputs.schedule(num_gpus).steps, read_log(out / "log.jsonl")
    total = None if steps is None else float(steps * step_tokens)
    known_rates = [line["tokens_per_second"] for line in logged if line.get("kind") == "step"]
    rate = known_rate or (known_rates[-1] if known_rates else None)
    if rate is None:
        flops = count_flops_per_token(cfg, target, drafter, inputs.response_share, data.num_tokens / max(len(data), 1))
        rate = num_gpus * MATRIX_RATE_REACHED * measure_matrix_rate(where, dtype) / flops
    seconds = [total / rate] if total is not None else []
    seconds += [60 * cfg.minutes] if cfg.minutes is not None else []
    free = free_gpu_bytes(where) if where.type == "cuda" else None
    state_bytes = 3 * max(dtype.itemsize, 4) * _num_parameters(drafter)  # masters and two moments
    return TrainingPlan(
        num_gpus=num_gpus,
        trainable_parameters=_num_parameters(drafter),
        target_parameters=_num_parameters(target),
        tokens_per_step=step_tokens,
        steps_per_epoch=data.num_tokens / step_tokens,
        tokens_total=total,
        memory=memory_by_use(cfg, target, drafter, inputs.response_share, num_gpus, free),
        device_memory=free,
        disk={
            "hidden states": float(hidden_states_bytes_per_token(cfg, inputs.target, drafter_cfg) * data.num_tokens),
            # a new state is complete before the previous one is removed
            "checkpoints": 2.0 * (state_bytes + _num_bytes(drafter)),
        },
        tokens_per_second=rate,
        seconds=min(seconds),
    )


def _num_parameters(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _num_bytes(module: torch.nn.Module) -> int:
    return sum(p.nbytes for p in module.parameters())


def hidden_states_bytes_per_token(cfg: TrainConfig, target: DecoderConfig, drafter: DrafterConfig) -> int:
    """Bytes on disk of the auxiliary and final hidden states of one token."""
    width = target.layer.hidden_size
    if cfg.vllm_hidden_states is not None:
        return len({*drafter.aux_layer_ids, target.num_layers}) * width * 2
    if cfg.hidden_states_cache is None:
        return 0
    return (1 + len(drafter.aux_layer_ids)) * (width * 2 if cfg.hidden_states_dtype == "bfloat16" else width + 4)


def _chain_positions_per_token(cfg: TrainConfig, response_share: float) -> float:
    return response_share * sum(cfg.down_sample_ratio**d for d in range(1, cfg.num_depths))


def count_flops_per_token(
    cfg: TrainConfig, target: Decoder, drafter: Drafter, response_share: float, mean_length: float
) -> float:
    """Forward pass of the target, forward and backward pass of drafter and loss. A token attends to half its
    document."""
    chain_positions, layer = _chain_positions_per_token(cfg, response_share), drafter.cfg.layer
    recomputed = 1 if cfg.activation_checkpointing else 0
    attention = 2 * layer.num_heads * layer.head_dim * mean_length * len(drafter.layers)
    products = 2 * _num_parameters(drafter.layers)
    flops = (1 + chain_positions) * (3 + recomputed) * (products + attention) + 6 * drafter.fc.weight.numel()
    student, teacher = 2 * drafter.cfg.draft_vocab_size * layer.hidden_size, 2 * target.lm_head.weight.numel()
    head_passes = 3 if drafter.cfg.own_head else 2
    flops += (response_share + chain_positions) * student * head_passes + response_share * teacher
    if cfg.vllm_hidden_states is None and cfg.hidden_states_cache is None:
        flops += sum(2 * _active_parameters(part) for part in target.layers)
    return flops


def _active_parameters(layer: torch.nn.Module) -> float:
    """Without the experts that a token does not activate."""
    total = float(_num_parameters(layer))
    for part in layer.modules():
        if isinstance(part, ExpertMLP):
            idle = 1 - part.cfg.num_experts_per_tok / part.cfg.num_experts
            total -= idle * (part.get_parameter("gate_up").numel() + part.get_parameter("down").numel())
    return total


def memory_by_use(
    cfg: TrainConfig, target: Decoder, drafter: Drafter, response_share: float, num_gpus: int, free: float | None
) -> dict[str, float]:
    """Bytes on the main rank, of which `free` exist. Of a sharded target a rank holds its share of the layers, the
    whole head, and two gathered layers: the running one and the next."""
    shape, tokens, recompute = drafter.cfg, cfg.batch_tokens, cfg.activation_checkpointing
    element, drafter_bytes = drafter.fc.weight.element_size(), _num_bytes(drafter)
    layers, num_layers = float(_num_bytes(target.layers)), len(target.layers)
    head = _num_bytes(target) - layers
    if cfg.shard_target and num_gpus > 1:
        layers = layers / num_gpus + min(2, num_layers) * layers / num_layers
    validates = cfg.validation_size and not cfg.shard_target
    held = {
        "target": layers + head,
        "drafter": float(drafter_bytes),
        "optimizer": float(optimizer_bytes(drafter, cfg)),
        "hidden states": float(element * tokens * (shape.aux_hidden_size + target.cfg.layer.hidden_size)),
        "validation": float(ValidationEngineSettings.max_kv_cache_bytes + drafter_bytes) if validates else 0.0,
    }
    chunk_size = CPU_CHUNK_SIZE if cfg.chunk_size == "auto" else cfg.chunk_size
    if cfg.chunk_size == "auto" and free is not None:
        available = int(free - sum(held.values()) - 2 * drafter_bytes)  # as `auto_chunk_size` leaves
        chunk_size = fit_chunk_size(shape, tokens, cfg.num_depths, available, element, recompute)
    positions = min(chunk_size, tokens * _chain_positions_per_token(cfg, response_share))
    each = chain_position_bytes(shape, cfg.num_depths, element, recompute) + backward_position_bytes(shape, element)
    return held | {
        "depth 0": float(tokens * depth_zero_position_bytes(shape, element, recompute)),
        "chunk": each * positions,
        "logits": 4.0 * element * min(LOSS_LOGITS, tokens * shape.draft_vocab_size),
        "largest gradient": float(max(p.nbytes for p in drafter.parameters())),
    }


def measure_matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large matrix product on this device."""
    size = 8192 if device.type == "cuda" else 768
    a = torch.randn(size, size, device=device).to(dtype)
    best = float("inf")
    for _ in range(4):
        started = time.perf_counter()
        (a @ a)[0, 0].item()  # waits for the device
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best
