"""Launch parameters of paged attention: batch invariance, the order of segments, and the PTX of the kernel."""

import re

import pytest
import torch

from peagle.kernels.attention.types import PagedAttentionMetadata

BLOCK = 16


def test_programs_compute_every_segment_split_by_split() -> None:
    """The example of the module's docstring and others, by the functions of the kernel."""
    from peagle.kernels.attention import paged_triton as kernels

    count_segments, next_segment, owner = (
        f.fn for f in (kernels._count_segments, kernels._next_segment, kernels._owner)
    )

    def order(program: int, low: int, tiles: int, splits: int, programs: int) -> list[int]:
        how = (low, tiles, splits, programs, programs == splits)
        segment, split, found = low + program, program, []
        for _ in range(count_segments(program, *how)):
            assert owner(segment, low, splits, programs, programs == splits) == program
            found.append(segment)
            segment, split = next_segment(segment, split, *how)
        return found

    assert [order(p, 0, 7, 3, 2) for p in range(2)] == [[0, 3, 6, 2, 5], [1, 4]]
    for low, tiles, splits, programs in ((0, 9, 4, 3), (3, 11, 5, 2), (2, 16, 4, 4), (0, 3, 8, 2), (5, 12, 3, 1)):
        used = min(programs, tiles - low)  # programs without segments return early
        orders = [order(p, low, tiles, splits, programs) for p in range(used)]
        assert sorted(sum(orders, [])) == list(range(low, tiles))
        for one in orders:  # each split from its first segment to its last, without interruption
            firsts = [tile for tile in one if tile < low + splits]
            assert one == [tile for first in firsts for tile in range(first, tiles, splits)]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width"), [(9, 3, 64), (32, 8, 128), (64, 8, 64), (4, 2, 32), (4, 1, 256), (32, 4, 512)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_order_of_summation_does_not_depend_on_the_batch(heads, kv_heads, width, dtype) -> None:
    from peagle.kernels.attention.paged_launch import choose_paged_launch, get_short_context_limits
    from peagle.kernels.gemm.tile_configs import MAX_FEW_ROWS, is_small_shape

    def summation_order(batch: int, rows: int, blocks: int, max_context: int | None = None) -> tuple[int, ...]:
        ints = torch.zeros(batch, dtype=torch.int32)
        metadata = PagedAttentionMetadata(
            torch.zeros(batch, blocks, dtype=torch.int32), ints, ints, rows, None, max_context
        )
        launch = choose_paged_launch(metadata, heads, kv_heads, width, BLOCK, dtype, torch.device("cpu"))
        assert 1 <= launch.programs <= launch.splits and launch.tile >= (64 if dtype == torch.bfloat16 else 32)
        return launch.tile, launch.splits, launch.warps, launch.segment_tiles

    near = get_short_context_limits(heads, kv_heads, width, dtype, torch.device("cpu"))
    last = 132 // kv_heads  # multiprocessors of an H200
    sizes = [(b, rows) for b in (1, 2, 3, 4, 8, last) for rows in (1, 3, 8, 40)]
    small = is_small_shape((heads + 2 * kv_heads) * width, heads * width)
    held = [
        (b, rows) for b, rows in sizes if small or dtype == torch.float32 or width > 256 or b * rows <= MAX_FEW_ROWS
    ]
    few = {summation_order(b, rows, m) for b, rows in held for m in (1, 7, 128, 2048)}
    assert few | {summation_order(2, 8, 128, 0), summation_order(2, 8, 128, 900)} == few and len(few) == 1
    assert all((tile, tile * span) == (near or (tile, tile)) for tile, _, _, span in few)
    assert bool(near) == ((heads, kv_heads, width) in {(9, 3, 64), (4, 2, 32)} and dtype == torch.bfloat16)
    assert not few & {(32, 1, 4, 1)} or kv_heads > 132
    for b, rows in set(sizes) - set(held):  # GEMMs round differently there: one split per program
        tile, splits, warps, span = summation_order(b, rows, 2048)
        [(default, most, threads, one)] = few
        assert (tile, warps, span) == (default, threads, one) and splits <= most
        assert splits <= max(1, (2 if width < 128 else 1) * 132 // (b * kv_heads))


def test_gpu_with_less_shared_memory_uses_small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    from peagle.kernels.attention import paged_launch as paged_launch

    ints = torch.zeros(1, dtype=torch.int32)
    metadata = PagedAttentionMetadata(torch.zeros(1, 128, dtype=torch.int32), ints, ints, 8)

    def launch() -> paged_launch.PagedLaunchConfig:
        return paged_launch.choose_paged_launch(metadata, 9, 3, 64, BLOCK, torch.bfloat16, torch.device("cpu"))

    default = launch()
    assert (default.tile, default.segment_tiles, default.programs) == (256, 2, 4)  # for 2,048 positions
    monkeypatch.setattr(paged_launch, "get_shared_memory", lambda device: 163 << 10)  # of an A100
    assert paged_launch.get_short_context_limits(9, 3, 64, torch.bfloat16, torch.device("cpu")) == ()
    small = launch()
    assert (small.tile, small.segment_tiles, small.programs) == (64, 1, 32)
    assert small.stages * 2 * small.tile * 64 * 2 < 99 << 10


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("one_segment", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(8, 1, 512), (9, 3, 64), (32, 8, 128)])
def test_ptx_never_shares_an_operand_address_register(
    heads: int, kv_heads: int, width: int, one_segment: bool, rows: int
) -> None:
    """The assembler of CUDA 12.8 loses the address of a matrix operand in shared memory if one register holds the
    addresses of two kinds of operands: an illegal access, which the interpreter cannot show. Seen with heads of 512,
    and with heads of 64 and one stage."""
    pytest.importorskip("triton", reason="Triton is made for Linux only")
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from peagle.kernels.attention.paged_launch import choose_paged_launch
    from peagle.kernels.attention.paged_triton import _NEW_ROWS, _paged_kernel

    ints = torch.zeros(1, dtype=torch.int32)
    metadata = PagedAttentionMetadata(torch.zeros(1, 24, dtype=torch.int32), ints, ints, rows)
    launch = choose_paged_launch(metadata, heads, kv_heads, width, BLOCK, torch.bfloat16, torch.device("cpu"))
    fixed = {"G": kv_heads, "GROUP": heads // kv_heads, "D": width, "BLOCK": BLOCK, "NEW_ROWS": _NEW_ROWS}
    fixed |= {
        "TILE": launch.tile,
        "SEGMENT_TILES": launch.segment_tiles,
        "QUERIES": launch.queries,
        "PREFETCH": launch.prefetch,
        "ONE_SEGMENT": one_segment,
    }
    fixed |= {"ONE_SPLIT": True, "PRECISION": "tf32", "WINDOW_KIND": 0}
    fixed |= dict.fromkeys(("ROPE", "QK_NORM", "SINKS", "PDL"), False)
    names = _paged_kernel.arg_names
    types = dict.fromkeys(names[: names.index("partial_out")], "*bf16") | dict.fromkeys(
        ("partial_out", "partial_stats"), "*fp32"
    )
    types |= dict.fromkeys(("block_tables", "num_computed_tokens", "query_lens"), "*i32") | dict.fromkeys(
        ("scale", "eps"), "fp32"
    )
    signature = {name: "constexpr" if name in fixed else types.get(name, "i32") for name in names}
    plain = ("rows", "splits", "window", "table_stride", "table_width", "scale", "eps", *fixed)
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name not in plain}
    source = ASTSource(_paged_kernel, signature, fixed, aligned)
    options = {"num_warps": launch.warps, "num_stages": launch.stages}
    ptx = compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    kinds: dict[str, set[int]] = {}  # by address register: upper halves of the descriptors built from it
    for register, constant in re.findall(r"(?:or\.b64|add\.s64)\s+%rd\d+, (%rd\d+), (-?\d{12,});", ptx):
        kinds.setdefault(register, set()).add(int(constant) >> 32)
    assert "wgmma.mma_async" in ptx and len(kinds) >= 3
    waits = [int(left) for left in re.findall(r"cp\.async\.wait_group\s+(\d+)", ptx)]
    several = launch.segment_tiles > 1 or not one_segment
    assert (max(waits, default=0) > 0) == (several and launch.stages > 2), (
        "with several tiles the next one must be loaded asynchronously"
    )
    assert all(len(found) == 1 for found in kinds.values()), kinds
