"""Chooses the chunk size: activation bytes per position, and how many positions fit GPU memory.

Counted from the config for the GPU training kernels, each of which saves its inputs in its own dtype.

Worked example: D 32, I 48, 4 heads of 16 with 2 key/value heads (q is 64 wide, the merged qkv 128), bf16.
A chain position saves, in elements:

    layer 0        embedding 32, both norms 64, qkv 128, attention over depth 0, over the chain and merged 3 * 64,
                   residual 32, its norm 32, gate and up 96, their product 48, residual 32                  = 656
    later layers   norm 32 instead of the 96                                                                = 592
    once           output 32, cos and sin 2 * 16                                                            =  64

and per layer 4 bytes for each head's log-sum-exp of both attentions: 2 layers take 2 * 1312 + 2 * 32 = 2688 bytes.

Letters: D width, I MLP width.
"""

from __future__ import annotations

import torch

from peagle.config import (
    CHUNK_MEMORY_FRACTION,
    CPU_CHUNK_SIZE,
    LOSS_LOGITS,
    MAX_CHUNK_BYTES,
    MIN_CHUNK_SIZE,
    DrafterConfig,
)
from peagle.models.drafter import Drafter


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
    logits = 4 * element * min(LOSS_LOGITS, num_tokens * num_depths * cfg.draft_vocab_size)
    depth_zero = num_tokens * depth_zero_position_bytes(cfg, element, recompute)
    available = CHUNK_MEMORY_FRACTION * free - depth_zero - logits
    temporary = backward_position_bytes(cfg, element)
    each = chain_position_bytes(cfg, num_depths, element, recompute)
    # chunks finish before the backward pass of depth 0, so their temporary gradients never coexist
    fit = min(available // (each + temporary), (available - num_tokens * temporary) // each) if available > 0 else 0
    return max(MIN_CHUNK_SIZE, min(int(fit), MAX_CHUNK_BYTES // each))


def free_gpu_bytes(device: torch.device) -> int:
    """GPU memory this process can allocate: free memory, and unused memory of the caching allocator."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def auto_chunk_size(drafter: Drafter, num_tokens: int, num_depths: int, reserved: int = 0) -> int:
    """Chunk size for batches of `num_tokens`; `reserved` bytes will be allocated later, e.g. by the optimizer."""
    weight = drafter.fc.weight
    if weight.device.type != "cuda":
        return CPU_CHUNK_SIZE
    cfg, element = drafter.cfg, weight.element_size()
    used = num_tokens * element * (cfg.aux_hidden_size + cfg.target_hidden_size)
    used += sum(2 * p.nbytes for p in drafter.parameters() if p.requires_grad)  # gradients while chunks accumulate
    free = free_gpu_bytes(weight.device) - used - reserved
    return fit_chunk_size(cfg, num_tokens, num_depths, free, element, drafter.recompute)
