"""How many chain rows are computed together: what a row keeps for its way back, and how many such rows fit.

Counted from the config, for the kernels that train on a GPU (`kernels.trained`, `ranged_attention`): each keeps what
entered it, in its own dtype. Knows nothing about batches or modules.

Worked example: D 32, I 48, 4 heads of 16 over 2 key/value heads (so q is 64 wide and the merged product 128), bf16.
A chain row keeps, in elements:

    layer 0        embedding 32, both norms side by side 64, product 128, attention over depth 0, over the chain and
                   merged 3 * 64, stream 32, its norm 32, gate and up 96, their product 48, stream 32       = 656
    later layers   norm 32 in place of the 96                                                               = 592
    once           what is said 32, cos and sin 2 * 16                                                      =  64

and in each layer 4 bytes for each head's sum, of both attentions: 2 layers take 2 * 1312 + 2 * 32 = 2688 bytes.

Letters: D width, I MLP width.
"""

from __future__ import annotations

import torch

from peagle.config import (
    CHUNK_BYTES,
    CHUNK_HEADROOM,
    CPU_CHUNK_ROWS,
    LEAST_CHUNK_ROWS,
    LOSS_LOGITS,
    DrafterConfig,
)
from peagle.models.drafter import Drafter


def chain_row_bytes(cfg: DrafterConfig, depths: int, element: int, recompute: bool = False) -> int:
    """What a chain row keeps until it has been gone through backwards."""
    layer = cfg.layer
    queries = layer.num_heads * layer.head_dim
    hidden = 0 if cfg.parallel else layer.hidden_size  # a mask row's is one for all
    windowed = 2 * queries if any(cfg.windows) else 0  # queries and results, put in order by depth and back
    inside = _layer_elements(cfg, element) + 2 * queries + windowed
    sums = 4 * 2 * layer.num_heads
    if not cfg.parallel:
        # EAGLE-3's rows read their chain's keys and values stacked, as many as they are deep; scores and weights
        inside += (depths + 1) * layer.num_kv_heads * layer.head_dim + 2 * queries
        sums += 4 * 2 * layer.num_heads * depths
    return _row_bytes(cfg, element, recompute, inside, sums, hidden, outside=0)


def depth_zero_row_bytes(cfg: DrafterConfig, element: int, recompute: bool = False) -> int:
    """What a depth-0 row keeps until the end of the step, and the gradients that chains gather in it."""
    layer = cfg.layer
    keys = 2 * layer.num_kv_heads * layer.head_dim
    gathered = cfg.num_layers * keys + layer.hidden_size
    if recompute:  # keys and values outlive their layer, and the product they are part of with them
        gathered += cfg.num_layers * (layer.num_heads * layer.head_dim + keys)
    normed = cfg.aux_hidden_size * (cfg.fc_norm + cfg.norm_before_fc)
    sums = 4 * layer.num_heads
    return _row_bytes(
        cfg, element, recompute, _layer_elements(cfg, element), sums, layer.hidden_size, gathered + normed
    )


def _layer_elements(cfg: DrafterConfig, element: int) -> int:
    """Of a layer behind the first, with one attention."""
    layer = cfg.layer
    queries, keys = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    product = queries + 2 * keys
    if layer.qk_norm:  # plain torch: queries and keys also in fp32, normed, and turned
        product += (queries + keys) * (4 // element + 2 if element < 4 else 2)
    return 4 * layer.hidden_size + product + queries + 3 * layer.intermediate_size


def _row_bytes(
    cfg: DrafterConfig, element: int, recompute: bool, inside: int, sums: int, hidden: int, outside: int
) -> int:
    width, layers = cfg.layer.hidden_size, cfg.num_layers
    once = width + 2 * cfg.layer.head_dim + outside
    if recompute:  # what enters the layers, and the inside of one
        return element * ((layers + 1) * width + hidden + inside + 2 * width + once) + sums
    return element * (layers * inside + 2 * width + hidden + once) + layers * sums


def passing_row_bytes(cfg: DrafterConfig, element: int) -> int:
    """The gradients inside one layer, while it is gone through backwards."""
    layer = cfg.layer
    product = (layer.num_heads + 2 * layer.num_kv_heads) * layer.head_dim
    through_mlp = 3 * layer.intermediate_size + 3 * layer.hidden_size
    through_attention = 3 * product + 2 * layer.num_heads * layer.head_dim + 2 * layer.hidden_size
    return element * max(through_mlp, through_attention)


def chunk_rows_for(
    cfg: DrafterConfig, tokens: int, depths: int, free: int, element: int, recompute: bool = False
) -> int:
    """Chain rows that fit beside the depth-0 rows of `tokens` tokens into `free` bytes, and no more than pay off.

    `free` has weights, gradients, optimizer and the target's states taken off.
    """
    logits = 4 * element * min(LOSS_LOGITS, tokens * depths * cfg.draft_vocab_size)
    room = CHUNK_HEADROOM * free - tokens * depth_zero_row_bytes(cfg, element, recompute) - logits
    passing = passing_row_bytes(cfg, element)
    each = chain_row_bytes(cfg, depths, element, recompute)
    # chains are gone through before depth 0 is, so what passes is of the larger of the two, not of both
    fit = min(room // (each + passing), (room - tokens * passing) // each) if room > 0 else 0
    return max(LEAST_CHUNK_ROWS, min(int(fit), CHUNK_BYTES // each))


def free_bytes(device: torch.device) -> int:
    """Of a GPU, for this process: what nobody has, and what the allocator holds without need."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def auto_chunk_rows(drafter: Drafter, tokens: int, depths: int, reserved: int = 0) -> int:
    """For batches of `tokens` tokens, with `reserved` bytes still to be taken by others, such as the optimizer."""
    weight = drafter.fc.weight
    if weight.device.type != "cuda":
        return CPU_CHUNK_ROWS
    cfg, element = drafter.cfg, weight.element_size()
    # the target's states, and a gradient for each weight while chunks are summed
    taken = tokens * element * (cfg.aux_hidden_size + cfg.target_hidden_size)
    taken += sum(2 * p.nbytes for p in drafter.parameters() if p.requires_grad)
    free = free_bytes(weight.device) - taken - reserved
    return chunk_rows_for(cfg, tokens, depths, free, element, drafter.recompute)
