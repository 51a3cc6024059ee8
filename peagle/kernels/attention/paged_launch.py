"""How attention over pages is launched: tiles, shares of the keys, programs. Knows no kernel.

Shapes as in paged_attention.py; what shares are stands in paged_attention_triton.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from peagle.kernels.attention.paged import Pages
from peagle.kernels.gemm.tile_configs import MAX_FEW_ROWS, is_small_shape

_MAX_SPLITS = 32
_LONG_SPLITS = 4  # from here on asking for tiles ahead pays
_MIN_QUERIES, _MAX_QUERIES = 16, 64
_MANY_QUERIES = 16  # of many requests to a small model: its programs are short, and each has room beside others
# Of few requests to a small model with narrow heads: shares have pieces of two large tiles, and what fits into one of
# them needs no adding up of shares, which takes half as long as all the rest. Where a GPU has room for that.
_LARGE_TILE, _LARGE_SPAN = 256, 2
_LARGE_BYTES = 3 * 2 * 256 * 64 * 2 + 32768  # of shared memory: three stages of keys and values, queries and weights

_sm_counts: dict[torch.device, int] = {}
_shared_bytes: dict[torch.device, int] = {}


@dataclass(frozen=True)
class Launch:
    """What the paged kernel is compiled and launched with. Tile, span, splits and warps decide which keys are added up
    with which, and must not depend on the batch; the others are for speed alone."""

    tile: int  # keys at a time
    queries: int  # rows x heads of a group at a time; more go to several programs
    splits: int  # shares
    warps: int
    stages: int
    ahead: int  # tiles asked into the L2 ahead of their use: a power of two, or 0: none
    programs: int = 0  # for the shares; 0: one each
    registers: int = 0  # that a thread may have; 0: as many as it takes
    span: int = 1  # tiles of a piece, one or two; pieces go round robin to the shares


@dataclass(frozen=True)
class Rule:
    """How launches fill the GPU. `reach` decides bits, of the batches between two values of it, and so does `steady`;
    the others are for speed alone, and about few requests alone."""

    reach: float = 1  # requests x key/value heads to a multiprocessor up to which requests are few
    fill: int = 1  # programs to a multiprocessor that the shares aim for
    stages: int = 0  # 0: 3 where a request's keys are cut into many short pieces, else 2
    ahead: bool | None = None  # whether tiles are asked for ahead; None: there
    registers: int = 0  # as of a launch
    steady: bool = False  # as many shares for any number of rows, also where the model's products round otherwise


RULE = Rule()


def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 132  # the interpreter: as on an H200
    if device not in _sm_counts:
        _sm_counts[device] = torch.cuda.get_device_properties(device).multi_processor_count
    return _sm_counts[device]


def shared_memory(device: torch.device) -> int:
    """Bytes that a program may have."""
    if device.type != "cuda":
        return 227 << 10  # as above
    if device not in _shared_bytes:
        index = torch.cuda.current_device() if device.index is None else device.index
        _shared_bytes[device] = triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"]
    return _shared_bytes[device]


def near_positions(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[int, ...]:
    """Lengths up to which few sequences are worth rounds of their own: one program has all keys, in one tile or two,
    and no shares are added up."""
    small = is_small_shape((heads + 2 * kv_heads) * head_dim, heads * head_dim)  # the model, by its first product
    large = small and head_dim < 128 and dtype != torch.float32 and shared_memory(device) >= _LARGE_BYTES
    return (_LARGE_TILE, _LARGE_TILE * _LARGE_SPAN) if large else ()


def most_tiles(pages: Pages, block_size: int, tile: int) -> int:
    """That a sequence can have, its new rows included."""
    most = pages.block_tables_BM.shape[1] * block_size
    if pages.max_context is not None:
        most = min(most, pages.max_context + pages.max_rows)
    return max(1, triton.cdiv(most, tile))


def choose_launch(
    pages: Pages,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    rule: Rule = RULE,
) -> Launch:
    """Nothing that decides which keys are added up with which depends on the number of rows, of requests, or on the
    longest context; but for one step, from few requests to many, and in large models for more than few rows."""
    batch = len(pages.block_tables_BM)
    queries = max(_MIN_QUERIES, triton.next_power_of_2(pages.max_rows * (heads // kv_heads)))
    processors = multiprocessors(device)
    # Few programs: each has its processor to itself, and what counts is how often it waits for memory. Many: several
    # to a processor, which wait in turns.
    large = bool(near_positions(heads, kv_heads, head_dim, dtype, device))
    few = batch * kv_heads <= rule.reach * processors
    small = is_small_shape((heads + 2 * kv_heads) * head_dim, heads * head_dim)  # the model, by its first product
    exact, wide, narrow = dtype == torch.float32, head_dim > 128, head_dim < 128  # of wide heads fewer keys fit
    tile = 32 if exact else 64 if narrow or (wide and few) else 128 if few else 32
    splits = max(1, min(processors // kv_heads, _MAX_SPLITS)) if few else 1
    if large and few:
        # A processor has room for one program. Each has few queries, as long as there are processors for them, and one
        # piece, where that is not too many: those without keys end at once.
        wanted, pairs = pages.max_rows * (heads // kv_heads), batch * kv_heads
        size = _MIN_QUERIES if triton.cdiv(wanted, _MIN_QUERIES) * pairs <= processors else 2 * _MIN_QUERIES
        others = triton.cdiv(wanted, size) * pairs
        programs = min(splits, most_tiles(pages, block_size, _LARGE_TILE * _LARGE_SPAN))
        if programs * others > 3 * processors:
            programs = max(1, min(programs, rule.fill * processors // others))
        return Launch(
            tile=_LARGE_TILE,
            queries=min(queries, size),
            splits=splits,
            warps=8,
            stages=rule.stages or 3,
            ahead=int(rule.ahead is not False),
            programs=programs,
            registers=rule.registers,
            span=_LARGE_SPAN,
        )
    crowded = few and narrow and processors // (batch * kv_heads) < _LONG_SPLITS  # two to a processor: in turns, too
    wanted = rule.fill * (2 if crowded else 1) * processors // (batch * kv_heads)
    programs = max(1, min(wanted, splits, most_tiles(pages, block_size, tile)))
    if head_dim > 256:  # a tile's keys and values are 128 KiB: no room to load another's ahead, nor for as many queries
        return Launch(tile, min(queries, 32), splits, warps=8, stages=1, ahead=0, programs=programs)
    if exact:
        return Launch(tile, min(queries, 32), splits, warps=4, stages=2, ahead=0, programs=programs)
    # More rows of a large model than those: its GEMMs round otherwise than those of few rows, whatever attention does.
    if few and not rule.steady and batch * pages.max_rows > MAX_FEW_ROWS and not small:
        splits = programs
    alone = few and not crowded and (programs >= _LONG_SPLITS or narrow)  # keys are cut into many short pieces
    ahead = alone if rule.ahead is None else few and rule.ahead
    stages, registers = 2 if wide or (few and not alone) else 3, 0
    if not few and not narrow and not wide and queries == 32:  # so that more of them fit on a processor
        stages, registers = 2, 128
    if few and not wide:
        stages, registers = rule.stages or stages, rule.registers
    # A program of few queries is a shorter one, where there are processors for twice as many. In a small model also
    # where each has one share of the keys, as most have none then and end at once; in large ones that was not timed.
    size = _MIN_QUERIES if few and narrow and 2 * batch * kv_heads * programs <= processors else _MAX_QUERIES
    if small and few and narrow and programs == min(splits, most_tiles(pages, block_size, tile)):
        sizes = (size for size in (16, 32) if batch * kv_heads * programs * -(-queries // size) <= 3 * processors)
        size = next(sizes, size)
    if small and narrow and not few:
        size = _MANY_QUERIES
    return Launch(
        tile=tile,
        queries=min(queries, size),
        splits=splits,
        warps=8 if wide else max(4, tile // 16),
        stages=stages,
        ahead=256 // tile if ahead else 0,
        programs=programs,
        registers=registers,
    )
