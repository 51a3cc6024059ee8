"""Number of KV cache blocks that fit into memory."""

from __future__ import annotations

import os

import torch

from peagle.config import DecoderConfig, DrafterConfig, EngineSettings
from peagle.engine.block_pool import BLOCK_SIZE
from peagle.errors import UserError

GIB = 1 << 30
GPU_RESERVED_BYTES = 3 * GIB  # activations and CUDA graphs
MAX_CPU_CACHE_BYTES = 4 * GIB


def block_bytes(cfg: DecoderConfig, draft: DrafterConfig | None, element_size: int) -> int:
    """Bytes of one block: keys and values of all layers of target and drafter."""
    layers = map(cfg.layer_at, range(cfg.num_layers))
    elements = sum(layer.num_kv_heads * layer.head_dim for layer in layers)
    if draft is not None:
        elements += draft.num_layers * draft.layer.num_kv_heads * draft.layer.head_dim
    return 2 * BLOCK_SIZE * elements * element_size


def unpacking_bytes(cfg: DecoderConfig) -> int:
    """Bytes that passes over many rows need to unpack MXFP4 experts to bf16: the largest matrix of a layer, once in
    the memory of CUDA graphs and once outside."""
    experts = cfg.layer.experts
    if experts is None or not experts.mxfp4:
        return 0
    return 2 * experts.num_experts * 2 * experts.intermediate_size * cfg.layer.hidden_size * torch.bfloat16.itemsize


def count_blocks(
    settings: EngineSettings,
    device: torch.device,
    bytes_per_block: int,
    max_model_len: int,
    max_num_seqs: int,
    reserved_bytes: int = 0,
) -> int:
    """As many blocks as memory holds and `max_num_seqs` sequences can use; one is the padding block.
    Raises UserError if one sequence does not fit. `reserved_bytes`: GPU memory to leave free."""
    blocks_per_seq = -(-max_model_len // BLOCK_SIZE)
    in_use, flag = "", "--kv-cache-memory-bytes"
    if settings.kv_cache_memory_bytes is not None:
        memory = settings.kv_cache_memory_bytes
    elif device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        memory = int(total * settings.gpu_memory_utilization) - (total - free) - reserved_bytes
        memory -= GPU_RESERVED_BYTES
        in_use = f" ({(total - free) / GIB:.1f} of {total / GIB:.1f} GiB are in use, by other processes too)"
        flag = "--gpu-memory-utilization"
    else:
        memory = min(_free_ram() // 4, MAX_CPU_CACHE_BYTES)
    num_blocks = min(memory // bytes_per_block, 1 + blocks_per_seq * max_num_seqs)
    if num_blocks < 1 + blocks_per_seq:
        needed = (1 + blocks_per_seq) * bytes_per_block
        possible_len = max(memory // bytes_per_block - 1, 0) * BLOCK_SIZE
        raise UserError(
            f"not enough memory for the KV cache: one sequence of {max_model_len} tokens needs {needed / GIB:.2f} GiB, "
            f"{max(memory, 0) / GIB:.2f} GiB are available{in_use}; "
            + (f"set --max-model-len to at most {possible_len}, or " if possible_len >= 2 else "")
            + f"raise {flag}"
        )
    return int(num_blocks)


def _free_ram() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
