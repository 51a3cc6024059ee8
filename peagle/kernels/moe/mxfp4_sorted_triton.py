# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, check-untyped-defs=False
"""experts.py for packed weights (mxfp4.py), in Triton.

Up to FEW_ROWS rows in bf16 are experts_lanes_triton.py's, which looks through the rows' choices for an expert. For
others, pairs are put in the order of their experts first, by `_order_kernel`. `_packed_kernel`: a program has some
output columns of one expert, and a tile of the pairs that chose it; which expert and which of its pairs a tile has is
found from where experts end, and tiles left over are done at once. So nothing is asked of the host.

Weights are the left operand and become numbers in registers, in the order in which the product wants them. A row's sums
depend neither on which other rows there are nor on how many: 16 columns at a time, the same ones in the same order in
both files. For that a warp's product instruction must give the sums of the one of four warps. Nobody promises it; on an
H200 it was seen to, to the bit, for a row alone and among 4 to 300.

With TRITON_INTERPRET=1 in the environment, set before the import, the launchers take CPU tensors.

Shapes as in experts.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.moe.experts import ExpertWeights
from peagle.kernels.moe.experts_triton import gated_tile, summed_triton
from peagle.kernels.moe.mxfp4 import BLOCK, STEP, PackedWeights
from peagle.kernels.moe.mxfp4_few_rows_triton import FEW_ROWS, launch_lanes, turned
from peagle.kernels.moe.mxfp4_triton import HAVE_PTX, in_ptx, row_start, unpacked_tile

# By up to how many rows there are, and by whether the product is the second one: pairs of a tile, rows of a tile of
# weights, warps, tiles under way, and registers of a thread if the compiler would take more. From 64 rows of weights
# and four warps on the product is Hopper's own, which takes them from registers; with fewer they go through memory.
TILES = {
    (64, False): (16, 64, 4, 3, None),
    (64, True): (16, 64, 4, 3, None),
    (256, False): (32, 64, 4, 3, 128),
    (256, True): (32, 64, 4, 3, 128),
    (None, False): (64, 64, 4, 3, 168),
    (None, True): (64, 64, 4, 3, 168),
}
MOST_PROGRAMS = 1024  # of `_order_kernel`
SCAN = 1024  # pairs that `_order_kernel` looks at in one go, unless told otherwise, and columns of x


@triton.jit(do_not_specialize=["P", "T"])
def _order_kernel(chosen, order, ends, x, out, P, E, T, K, x_row, out_row, SCAN: tl.constexpr, WIDTH: tl.constexpr):
    """Pairs by expert, and among one expert's by number; `ends`: where each expert's end. And x's columns in turn, with
    zeros up to a whole number of steps."""
    e = tl.program_id(0)
    i = tl.arange(0, SCAN)
    if e < E:
        lower = tl.zeros((SCAN,), tl.int32)
        for start in range(0, P, SCAN):
            expert = tl.load(chosen + start + i, mask=start + i < P, other=2147483647)
            lower += (expert < e).to(tl.int32)
        at = tl.sum(lower, 0)
        for start in range(0, P, SCAN):
            mine = tl.load(chosen + start + i, mask=start + i < P, other=-1) == e
            rank = tl.cumsum(mine.to(tl.int32), 0)
            tl.store(order + at + rank - 1, start + i, mask=mine)
            at += tl.sum(mine.to(tl.int32), 0)
        tl.store(ends + e, at)
    if x is not None:
        k = tl.arange(0, WIDTH)
        for row in range(e, T, tl.num_programs(0)):
            long = e.to(tl.int64) * 0 + row
            from_row, to_row = x + long * x_row, out + long * out_row
            for start in range(0, out_row, WIDTH):
                rows_x = tl.load(from_row + start + k, mask=start + k < K, other=0.0)
                tl.store(to_row + turned(start + k), rows_x, mask=start + k < out_row)


@triton.jit
def tile_of(ends, tile, E, BLOCK_M: tl.constexpr, EXPERTS: tl.constexpr):
    """A tile's expert, E if there is none for it, where its pairs begin among those in order, and where they end."""
    e = tl.arange(0, EXPERTS)
    end = tl.load(ends + e, mask=e < E, other=0)
    begin = tl.load(ends + e - 1, mask=(e > 0) & (e < E), other=0)
    tiles = tl.where(e < E, (end - begin + BLOCK_M - 1) // BLOCK_M, 0)
    after = tl.cumsum(tiles, 0)
    own = tl.sum(((after <= tile) & (e < E)).to(tl.int32), 0)
    first = tl.sum(tl.where(e == own, begin + (tile - after + tiles) * BLOCK_M, 0), 0)
    return own, first, tl.sum(tl.where(e == own, end, 0), 0)


@triton.jit
def _read_place(i, BLOCK_N: tl.constexpr):
    """Which row of a tile is read as the i-th. Triton gives a warp every so many-th eight of the rows it reads, and the
    product wants two eights from it that follow each other."""
    return i % (BLOCK_N // 2) // 8 * 16 + i // (BLOCK_N // 2) * 8 + i % 8


@triton.jit
def _in_place(tile):
    """A tile whose rows were read so, in order. No thread has to give anything away."""
    N: tl.constexpr = tile.shape[0]
    W: tl.constexpr = tile.shape[1]
    return tl.reshape(tl.permute(tl.reshape(tile, (2, N // 16, 8, W)), (1, 0, 2, 3)), (N, W))


@triton.jit
def _ended(sums, ENDED: tl.constexpr):
    """A product's sums, read at once. Else Triton lets it go on into the next step, whose weights may then be unpacked
    into registers that it still reads."""
    if ENDED:
        sums = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [sums], dtype=tl.float32, is_pure=True, pack=1)
    return sums


@triton.jit
def _packed_kernel(
    x,
    w,
    exponents,
    bias,
    order,
    ends,
    weights,
    y,
    E,
    N,
    G,
    x_row,
    y_row,
    exponents_row,
    alpha,
    limit,
    CHOSEN: tl.constexpr,
    EXPERTS: tl.constexpr,
    PAIRED: tl.constexpr,
    GLU: tl.constexpr,
    CLAMPED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    ASM: tl.constexpr,
    ENDED: tl.constexpr,
):
    """PAIRED: rows of x are pairs of row and expert already, and the result is weighted. x's columns are in turn and
    filled up to whole steps, and so become those of a GLU's y."""
    BLOCK_K: tl.constexpr = 128
    m = tl.arange(0, BLOCK_M)
    e, first, end = tile_of(ends, tl.program_id(0), E, BLOCK_M, EXPERTS)
    hit = first + m < end
    block = tl.program_id(1)
    if e < E:
        pair = tl.load(order + first + m, mask=hit, other=0).to(tl.int64)
        source = pair if PAIRED else pair // CHOSEN
        n = block * BLOCK_N + tl.arange(0, BLOCK_N)
        HALVES: tl.constexpr = 2 if GLU else 1
        # Past the last weight row the last one is read again: no mask in the loop, and nothing of it is stored.
        read = block * BLOCK_N + _read_place(tl.arange(0, BLOCK_N), BLOCK_N)
        rows = e.to(tl.int64) * N * HALVES + tl.minimum(read, N - 1)
        k = tl.arange(0, BLOCK_K)
        two = tl.arange(0, BLOCK_K // 8)  # words are read by pairs, see mxfp4_triton.py
        x_at = x + source[None, :] * x_row + k[:, None]
        whole_steps = tl.cdiv(G, BLOCK_K // 32)
        w_at = w + row_start(rows, whole_steps)[:, None] + two[None, :]
        # Rows of exponents are filled up, so no step reads past one.
        s_at = exponents + rows[:, None] * exponents_row + tl.arange(0, BLOCK_K // 32)[None, :]
        ups = (e * 0 + N).to(tl.int64)
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        # Of columns that only fill y's rows up there is nothing to add up.
        steps = tl.where(block * BLOCK_N < N, whole_steps, 0)
        # Too few bytes for a copy ahead of time: fetched a step ahead.
        powers = tl.load(s_at)
        up_powers = tl.load(s_at + ups * exponents_row) if GLU else powers
        for step in range(0, steps):
            rows_x = tl.load(x_at + step * BLOCK_K, mask=hit[None, :], other=0.0)
            w_step = w_at + step * 128
            pairs = tl.load(w_step)
            s_next = s_at + tl.minimum(step + 1, steps - 1) * (BLOCK_K // 32)
            numbers = unpacked_tile(_in_place(pairs), _in_place(powers), ASM, x.dtype.element_ty)
            powers = tl.load(s_next)
            acc = _ended(tl.dot(numbers, rows_x, acc, input_precision=PRECISION), ENDED)
            if GLU:
                pairs = tl.load(w_step + row_start(ups, whole_steps))
                numbers = unpacked_tile(_in_place(pairs), _in_place(up_powers), ASM, x.dtype.element_ty)
                up_powers = tl.load(s_next + ups * exponents_row)
                up = _ended(tl.dot(numbers, rows_x, up, input_precision=PRECISION), ENDED)
        if bias is not None:
            b_at = bias + e * N * HALVES + n
            acc += tl.load(b_at, mask=n < N, other=0.0).to(tl.float32)[:, None]
            if GLU:
                up += tl.load(b_at + N, mask=n < N, other=0.0).to(tl.float32)[:, None]
        if GLU:
            acc = gated_tile(acc, up, alpha, limit, CLAMPED)
        if PAIRED:
            acc = acc * tl.load(weights + pair, mask=hit, other=0.0)[None, :]
        spot = n
        if GLU:
            acc = tl.where((n < N)[:, None], acc, 0.0)
            spot = turned(n)
        to = y + pair[None, :] * y_row + spot[:, None]
        tl.store(to, acc.to(y.dtype.element_ty), mask=hit[None, :] & (n < y_row)[:, None])


def most_rows(rows: int) -> int | None:
    """Of the tiles for so many."""
    return next((most for most, _ in TILES if most is not None and rows <= most), None)


def order_of(
    expert_TC: Tensor, count: int, x_TD: Tensor | None = None, scan: int = SCAN, warps: int = 4
) -> tuple[Tensor, Tensor, Tensor | None]:
    """[P] pairs by expert, [E] where each expert's end among them, and x with its columns in turn, filled up."""
    order_P, ends_E = expert_TC.new_empty(expert_TC.numel()), expert_TC.new_empty(count)
    programs, turned_TK, width = count, None, 0
    if x_TD is not None:
        width = x_TD.shape[1]
        turned_TK = x_TD.new_empty(len(x_TD), triton.cdiv(width, STEP) * STEP)
        programs = max(count, min(len(x_TD), MOST_PROGRAMS))
    _order_kernel[(programs,)](
        expert_TC,
        order_P,
        ends_E,
        x_TD,
        turned_TK,
        expert_TC.numel(),
        count,
        len(expert_TC),
        width,
        0 if x_TD is None else x_TD.stride(0),
        0 if turned_TK is None else turned_TK.shape[1],
        SCAN=scan,
        WIDTH=SCAN,
        num_warps=warps,
    )
    return order_P, ends_E, turned_TK


def expert_mlp_packed(x_TD: Tensor, weight_TC: Tensor, expert_TC: Tensor, experts: ExpertWeights) -> Tensor:
    (rows, chosen), (count, width, inner) = expert_TC.shape, experts.down_EDI.shape
    assert x_TD.stride(1) == 1 and weight_TC.is_contiguous() and expert_TC.is_contiguous()
    if not rows:
        return torch.empty_like(x_TD)
    y_PD = x_TD.new_empty(rows * chosen, width)
    if rows <= FEW_ROWS and x_TD.dtype == torch.bfloat16:
        hidden_PI = x_TD.new_empty(rows * chosen, inner)
        launch_lanes(x_TD, hidden_PI, weight_TC, expert_TC, experts, paired=False)
        launch_lanes(hidden_PI, y_PD, weight_TC, expert_TC, experts, paired=True)
    else:
        order_P, ends_E, turned_TK = order_of(expert_TC, count, x_TD)
        assert turned_TK is not None
        hidden_PI = x_TD.new_empty(rows * chosen, triton.cdiv(inner, STEP) * STEP)
        _launch(turned_TK, hidden_PI, weight_TC, order_P, ends_E, experts, paired=False)
        _launch(hidden_PI, y_PD, weight_TC, order_P, ends_E, experts, paired=True)
    return summed_triton(y_PD, chosen)


def _launch(
    x: Tensor, y: Tensor, weight_TC: Tensor, order_P: Tensor, ends_E: Tensor, experts: ExpertWeights, paired: bool
) -> None:
    w, bias = experts.gate_up_EXD, experts.gate_up_bias_EX
    if paired:
        w, bias = experts.down_EDI, experts.down_bias_ED
    assert isinstance(w, PackedWeights)
    twos, exponents = w.words_ERW.view(torch.int32), w.exponents_ERG
    assert twos.is_contiguous() and exponents.is_contiguous() and (bias is None or bias.is_contiguous())
    assert x.shape[1] % STEP == 0 and (paired or y.shape[1] % STEP == 0), "columns in turn are whole steps"
    chosen, pairs, count = weight_TC.shape[1], len(y), len(w)
    columns = w.shape[1] // (1 if paired else 2)
    block_m, block_n, warps, stages, registers = TILES[most_rows(len(weight_TC)), paired]
    if x.dtype == torch.float32:
        block_n, warps, stages, registers = 32, 4, 3, None
    # Tiles of one expert come one after another, so that the second has its weights from the cache.
    most_tiles = min(pairs, (pairs + count * (block_m - 1)) // block_m)
    clamp = experts.clamp
    _packed_kernel[(most_tiles, triton.cdiv(y.shape[1], block_n))](
        x,
        twos,
        exponents,
        bias,
        order_P,
        ends_E,
        weight_TC,
        y,
        count,
        columns,
        w.shape[2] // BLOCK,
        x.stride(0),
        y.stride(0),
        exponents.shape[2],
        clamp.alpha if clamp is not None else 0.0,
        clamp.limit if clamp is not None else 0.0,
        CHOSEN=chosen,
        EXPERTS=triton.next_power_of_2(count),
        PAIRED=paired,
        GLU=not paired,
        CLAMPED=clamp is not None,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        ASM=in_ptx(x.dtype),
        ENDED=HAVE_PTX,
        num_warps=warps,
        num_stages=stages,
        **({} if registers is None or not in_ptx(x.dtype) else {"maxnreg": registers}),
    )
