"""GPU memory of a training run: the chunk size that fits it, and the plan of `peagle train --dry-run`.

Activations are counted from the config for the GPU training kernels, each of which saves its inputs in its own dtype.

Worked example of activations in bf16: D 32, I 48, 4 heads of 16 with 2 key/value heads (q is 64 wide, the merged qkv
128). A chain position saves, in elements:

    layer 0        embedding 32, both norms 64, qkv 128, attention over depth 0, over the chain and merged 3 * 64,
                   residual 32, its norm 32, gate and up 96, their product 48, residual 32                  = 656
    later layers   norm 32 instead of the 96                                                                = 592
    once           output 32, cos and sin 2 * 16                                                            =  64

and per layer 4 bytes for each head's log-sum-exp of both attentions: 2 layers take 2 * 1312 + 2 * 32 = 2688 bytes.

The dry run builds both models on the meta device and counts their tensors. Its time is the FLOPs of the matrix products
divided by a share of the measured matrix rate, unless a rate in tokens per second is known.

Worked example of positions, down_sample_ratio 0.5, 3 depths, 8 tokens of which 4 are response tokens: 4 positions at
depth 0, 2 at depth 1, 1 at depth 2. The drafter computes all 8 depth-0 positions and 3 chain positions, 11/8 per token;
the LM head runs for 7 positions, 7/8 per token.

Letters: D width, I MLP width.
"""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from peagle import config
from peagle.checkpoints.files import parse_device
from peagle.config import DecoderConfig, DrafterConfig, TrainConfig
from peagle.models.decoder import Decoder
from peagle.models.drafter import Drafter
from peagle.models.layers import ExpertMLP
from peagle.training.drafter_init import plan_drafter_config
from peagle.training.optimizer import optimizer_bytes
from peagle.training.recipe import Recipe, load_training_inputs, training_dtype
from peagle.training.resume import read_log

MATRIX_RATE_REACHED = 0.35  # of the measured rate of a large matrix product, assumed for a training step


def chain_position_bytes(cfg: DrafterConfig, num_depths: int, element: int, recompute: bool = False) -> int:
    """Activation bytes of a chain position until its backward pass; `element` is the size of a number."""
    layer = cfg.layer
    queries = layer.num_heads * layer.head_dim
    hidden = 0 if cfg.parallel else layer.hidden_size  # mask positions share one hidden state
    windowed = 2 * queries if any(cfg.windows) else 0  # queries and outputs, sorted by depth and back
    per_layer = _layer_elements(cfg, element) + 2 * queries + windowed
    lse_bytes = 4 * 2 * layer.num_heads
    if not cfg.parallel:
        # EAGLE-3 stacks the keys and values of a chain, one per depth; scores and weights
        per_layer += (num_depths + 1) * layer.num_kv_heads * layer.head_dim + 2 * queries
        lse_bytes += 4 * 2 * layer.num_heads * num_depths
    return _position_bytes(cfg, element, recompute, per_layer, lse_bytes, hidden, once=0)


def depth_zero_position_bytes(cfg: DrafterConfig, element: int, recompute: bool = False) -> int:
    """Activation bytes of a depth-0 position until the end of the step, with the gradients of its leaves."""
    layer = cfg.layer
    keys_values = 2 * layer.num_kv_heads * layer.head_dim
    leaf_gradients = cfg.num_layers * keys_values + layer.hidden_size
    if recompute:  # keys and values outlive their layer, together with the qkv output they are views of
        leaf_gradients += cfg.num_layers * (layer.num_heads * layer.head_dim + keys_values)
    normed = cfg.aux_hidden_size * (cfg.fc_norm + cfg.norm_before_fc)
    per_layer, lse_bytes = _layer_elements(cfg, element), 4 * layer.num_heads
    return _position_bytes(
        cfg, element, recompute, per_layer, lse_bytes, layer.hidden_size, once=leaf_gradients + normed
    )


def _layer_elements(cfg: DrafterConfig, element: int) -> int:
    """Elements saved by a layer behind the first, with one attention."""
    layer = cfg.layer
    queries, keys = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    qkv = queries + 2 * keys
    if layer.qk_norm:  # plain torch: queries and keys also in fp32, normed and rotated
        qkv += (queries + keys) * (4 // element + 2 if element < 4 else 2)
    return 4 * layer.hidden_size + qkv + queries + 3 * layer.intermediate_size


def _position_bytes(
    cfg: DrafterConfig, element: int, recompute: bool, per_layer: int, lse_bytes: int, hidden: int, once: int
) -> int:
    width, layers = cfg.layer.hidden_size, cfg.num_layers
    once += width + 2 * cfg.layer.head_dim
    if recompute:  # the inputs of all layers, and the inside of one
        return element * ((layers + 1) * width + hidden + per_layer + 2 * width + once) + lse_bytes
    return element * (layers * per_layer + 2 * width + hidden + once) + layers * lse_bytes


def backward_position_bytes(cfg: DrafterConfig, element: int) -> int:
    """Temporary gradients of a position inside one layer's backward pass."""
    layer = cfg.layer
    qkv = (layer.num_heads + 2 * layer.num_kv_heads) * layer.head_dim
    mlp = 3 * layer.intermediate_size + 3 * layer.hidden_size
    attention = 3 * qkv + 2 * layer.num_heads * layer.head_dim + 2 * layer.hidden_size
    return element * max(mlp, attention)


def fit_chunk_size(
    cfg: DrafterConfig, num_tokens: int, num_depths: int, free: int, element: int, recompute: bool = False
) -> int:
    """Chain positions that fit into `free` bytes beside depth 0 of `num_tokens` tokens.

    `free` excludes weights, gradients, optimizer and the target's hidden states.
    """
    logits = 4 * element * min(config.LOSS_LOGITS, num_tokens * num_depths * cfg.draft_vocab_size)
    depth_zero = num_tokens * depth_zero_position_bytes(cfg, element, recompute)
    available = config.CHUNK_MEMORY_FRACTION * free - depth_zero - logits
    temporary = backward_position_bytes(cfg, element)
    each = chain_position_bytes(cfg, num_depths, element, recompute)
    # chunks finish before the backward pass of depth 0, so their temporary gradients never coexist
    fit = min(available // (each + temporary), (available - num_tokens * temporary) // each) if available > 0 else 0
    return max(config.MIN_CHUNK_SIZE, min(int(fit), config.MAX_CHUNK_BYTES // each))


def free_gpu_bytes(device: torch.device) -> int | None:
    """GPU memory this process can allocate: free memory, and unused memory of the caching allocator. None on a CPU."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def auto_chunk_size(drafter: Drafter, num_tokens: int, num_depths: int, reserved: int = 0) -> int:
    """Chunk size for batches of `num_tokens`; `reserved` bytes will be allocated later, e.g. by the optimizer."""
    weight = drafter.fc.weight
    free = free_gpu_bytes(weight.device)
    if free is None:
        return config.CPU_CHUNK_SIZE
    cfg, element = drafter.cfg, weight.element_size()
    used = num_tokens * element * (cfg.aux_hidden_size + cfg.target_hidden_size)
    used += sum(2 * p.nbytes for p in drafter.parameters() if p.requires_grad)  # gradients while chunks accumulate
    return fit_chunk_size(cfg, num_tokens, num_depths, free - used - reserved, element, drafter.recompute)


# The dry run


def plan_run(recipe: Recipe, out: Path, device: str, num_gpus: int, known_rate: float | None) -> dict[str, Any]:
    """Plans a run on `num_gpus` GPUs like this one. `known_rate` is in tokens per second, over all GPUs."""
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
    free = free_gpu_bytes(where)
    state_bytes = 3 * max(dtype.itemsize, 4) * _num_parameters(drafter)  # masters and two moments
    memory = memory_by_use(cfg, target, drafter, inputs.response_share, num_gpus, free)
    return {
        "num_gpus": num_gpus,
        "trainable_parameters": _num_parameters(drafter),
        "target_parameters": _num_parameters(target),
        "tokens_per_step": step_tokens,
        "steps_per_epoch": data.num_tokens / step_tokens,
        "tokens_total": total,  # None if only minutes are given
        "memory": memory,  # bytes per GPU
        "device_memory": free,  # None on a CPU
        "fits": free is None or sum(memory.values()) <= free,
        "disk": {
            "hidden states": float(hidden_states_bytes_per_token(cfg, inputs.target, drafter_cfg) * data.num_tokens),
            # a new state is complete before the previous one is removed
            "checkpoints": 2.0 * (state_bytes + _num_bytes(drafter)),
        },
        "tokens_per_second": rate,
        "seconds": min(seconds),
    }


def format_plan(plan: dict[str, Any]) -> str:
    memory, disk = (
        ", ".join(f"{name} {size / 1e9:.2f}" for name, size in plan[sizes].items() if size)
        for sizes in ("memory", "disk")
    )
    limit = "" if plan["device_memory"] is None else f" of {plan['device_memory'] / 1e9:.0f}"
    total = "as many as the minutes allow" if plan["tokens_total"] is None else f"{plan['tokens_total']:,.0f}"
    return f"""parameters   {plan["trainable_parameters"]:,} trained; {plan["target_parameters"]:,} of the target loaded
tokens       {plan["tokens_per_step"]:,} per step, {plan["steps_per_epoch"]:,.1f} steps per epoch, {total} in all
memory       {sum(plan["memory"].values()) / 1e9:.2f} GB{limit}{"" if plan["fits"] else ", DOES NOT FIT"}: {memory}
disk         {sum(plan["disk"].values()) / 1e9:.2f} GB: {disk}
time         {plan["seconds"] / 3600:,.2f} h at {plan["tokens_per_second"]:,.0f} tokens/s on {plan["num_gpus"]} GPUs"""


def _num_parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _num_bytes(module: nn.Module) -> int:
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


def _active_parameters(layer: nn.Module) -> float:
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
        "validation": float(config.VALIDATION_KV_CACHE_BYTES + drafter_bytes) if validates else 0.0,
    }
    chunk_size = config.CPU_CHUNK_SIZE if cfg.chunk_size == "auto" else cfg.chunk_size
    if cfg.chunk_size == "auto" and free is not None:
        available = int(free - sum(held.values()) - 2 * drafter_bytes)  # as `auto_chunk_size` leaves
        chunk_size = fit_chunk_size(shape, tokens, cfg.num_depths, available, element, recompute)
    positions = min(chunk_size, tokens * _chain_positions_per_token(cfg, response_share))
    each = chain_position_bytes(shape, cfg.num_depths, element, recompute) + backward_position_bytes(shape, element)
    return held | {
        "depth 0": float(tokens * depth_zero_position_bytes(shape, element, recompute)),
        "chunk": each * positions,
        "logits": 4.0 * element * min(config.LOSS_LOGITS, tokens * shape.draft_vocab_size),
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
