"""Launch parameters of the paged attention kernel: key tiles, splits and programs.

Terms and shapes as in paged_triton.py. Measured on an H200; processors are its streaming multiprocessors.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton

from peagle.kernels.attention.types import PagedAttentionMetadata
from peagle.kernels.gemm.tile_configs import MAX_FEW_ROWS, is_small_shape

_MAX_SPLITS = 32
_MIN_PREFETCH_PROGRAMS = 4  # programs per sequence and head from which prefetching tiles into the L2 pays
_MIN_QUERIES, _MAX_QUERIES = 16, 64
_MANY_REQUESTS_QUERIES = 16  # small models with many requests: short programs, several to a processor
# Small models with narrow heads and few requests use segments of two large tiles: a context that fits one segment
# needs no combination of splits, which takes half as long as everything else. Needs enough shared memory.
_LARGE_TILE, _LARGE_SEGMENT_TILES = 256, 2
_LARGE_TILE_BYTES = 3 * 2 * 256 * 64 * 2 + 32768  # three stages of keys and values, plus queries and weights


@dataclass(frozen=True)
class PagedLaunchConfig:
    """Compile and launch parameters of the paged attention kernel.

    `tile`, `segment_tiles`, `splits` and `warps` decide the order of summation and must not depend on the batch; the
    others affect speed only.
    """

    tile: int  # keys per tile
    queries: int  # rows x heads of a group per program; more are spread over several programs
    splits: int
    warps: int
    stages: int
    prefetch: int  # segments prefetched into the L2 ahead of their use: a power of two, or 0
    programs: int = 0  # programs that share the splits; 0: one each
    max_registers: int = 0  # per thread; 0: no limit
    segment_tiles: int = 1  # tiles per segment, one or two; segments go round robin to the splits


@cache
def get_num_sms(device: torch.device) -> int:
    """Returns the number of streaming multiprocessors; in the interpreter that of an H200."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


@cache
def get_shared_memory(device: torch.device) -> int:
    """Returns the bytes of shared memory that a program may use; in the interpreter that of an H200."""
    if device.type != "cuda":
        return 227 << 10
    index = torch.cuda.current_device() if device.index is None else device.index
    return triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"]


def get_short_context_limits(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[int, ...]:
    """Returns the context lengths up to which a separate CUDA graph pays, ascending; () if none does.

    Up to these lengths one program holds all keys of a sequence in one tile or two, and no splits are combined.
    """
    small = is_small_shape((heads + 2 * kv_heads) * head_dim, heads * head_dim)  # judged by the QKV projection
    large_tiles = small and head_dim < 128 and dtype != torch.float32 and get_shared_memory(device) >= _LARGE_TILE_BYTES
    return (_LARGE_TILE, _LARGE_TILE * _LARGE_SEGMENT_TILES) if large_tiles else ()


def get_max_key_tiles(metadata: PagedAttentionMetadata, block_size: int, tile: int) -> int:
    """Returns the most tiles that a sequence can have, including its new rows."""
    max_keys = metadata.block_tables_BM.shape[1] * block_size
    if metadata.max_computed_tokens is not None:
        max_keys = min(max_keys, metadata.max_computed_tokens + metadata.max_query_len)
    return max(1, triton.cdiv(max_keys, tile))


def choose_paged_launch(
    metadata: PagedAttentionMetadata,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> PagedLaunchConfig:
    """Chooses launch parameters for a batch.

    The order of summation depends neither on the number of rows, nor on the number of requests, nor on the longest
    context, with two exceptions: one step from few requests to many, and more than MAX_FEW_ROWS rows of a large model.
    """
    pairs = len(metadata.block_tables_BM) * kv_heads  # of a sequence and a key/value head
    group_queries = metadata.max_query_len * (heads // kv_heads)
    queries = max(_MIN_QUERIES, triton.next_power_of_2(group_queries))
    num_sms = get_num_sms(device)
    # With few programs each has a processor to itself, and memory latency counts. With many, several share a processor
    # and hide each other's latency.
    few = pairs <= num_sms
    small = is_small_shape((heads + 2 * kv_heads) * head_dim, heads * head_dim)
    exact, wide, narrow = dtype == torch.float32, head_dim > 128, head_dim < 128
    splits = max(1, min(num_sms // kv_heads, _MAX_SPLITS)) if few else 1
    if few and get_short_context_limits(heads, kv_heads, head_dim, dtype, device):
        # One program per processor, with few queries each. It gets one segment if that does not make too many
        # programs: those without keys end at once.
        fits = triton.cdiv(group_queries, _MIN_QUERIES) * pairs <= num_sms
        program_queries = _MIN_QUERIES if fits else 2 * _MIN_QUERIES
        programs_per_split = triton.cdiv(group_queries, program_queries) * pairs
        programs = min(splits, get_max_key_tiles(metadata, block_size, _LARGE_TILE * _LARGE_SEGMENT_TILES))
        if programs * programs_per_split > 3 * num_sms:
            programs = max(1, min(programs, num_sms // programs_per_split))
        queries = min(queries, program_queries)
        how = {"warps": 8, "stages": 3, "prefetch": 1, "segment_tiles": _LARGE_SEGMENT_TILES}
        return PagedLaunchConfig(_LARGE_TILE, queries, splits, programs=programs, **how)
    tile = 32 if exact else 64 if narrow or (wide and few) else 128 if few else 32
    max_tiles = get_max_key_tiles(metadata, block_size, tile)
    crowded = few and narrow and num_sms // pairs < _MIN_PREFETCH_PROGRAMS  # then two programs share a processor
    programs = max(1, min((2 if crowded else 1) * num_sms // pairs, splits, max_tiles))
    if head_dim > 256:  # keys and values of a tile take 128 KiB: no shared memory for a second stage
        return PagedLaunchConfig(tile, min(queries, 32), splits, warps=8, stages=1, prefetch=0, programs=programs)
    if exact:
        return PagedLaunchConfig(tile, min(queries, 32), splits, warps=4, stages=2, prefetch=0, programs=programs)
    # Beyond MAX_FEW_ROWS the GEMMs of a large model round differently anyway, so the order of summation may change.
    if few and len(metadata.block_tables_BM) * metadata.max_query_len > MAX_FEW_ROWS and not small:
        splits = programs
    prefetches = few and not crowded and (programs >= _MIN_PREFETCH_PROGRAMS or narrow)
    stages, max_registers = 2 if wide or (few and not prefetches) else 3, 0
    if not few and not narrow and not wide and queries == 32:  # fits more programs on a processor
        stages, max_registers = 2, 128
    # Fewer queries make shorter programs, if there are processors for twice as many. In small models also if each
    # program has one split, because most of those have no keys and end at once; not timed in large models.
    program_queries = _MIN_QUERIES if few and narrow and 2 * pairs * programs <= num_sms else _MAX_QUERIES
    if small and few and narrow and programs == min(splits, max_tiles):
        sizes = (size for size in (16, 32) if pairs * programs * -(-queries // size) <= 3 * num_sms)
        program_queries = next(sizes, program_queries)
    if small and narrow and not few:
        program_queries = _MANY_REQUESTS_QUERIES
    return PagedLaunchConfig(
        tile=tile,
        queries=min(queries, program_queries),
        splits=splits,
        warps=8 if wide else max(4, tile // 16),
        stages=stages,
        prefetch=256 // tile if prefetches else 0,
        programs=programs,
        max_registers=max_registers,
    )
