# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, check-untyped-defs=False
"""experts.py for packed weights (mxfp4.py), in Triton.

`_packed_kernel`: a program has some output columns of one expert, and a tile of the pairs that chose it. For up to
FEW_ROWS rows it looks through the rows' choices for its expert, as `experts_triton.py` does. For more, pairs are put in
the order of their experts first, by `_order_kernel`, a program for each expert; which expert and which of its pairs a
tile has is found from where experts end, and tiles left over are done at once. So nothing is asked of the host.

Weights are the left operand and become numbers in registers, in the order in which the product wants them. A row's sums
depend neither on which other rows there are nor on how many: 16 columns at a time, by one instruction for all tiles.

With TRITON_INTERPRET=1 in the environment, set before the import, the launchers take CPU tensors.

Shapes as in experts.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from old_mxfp4_triton import HAVE_PTX, in_ptx, unpacked_tile
from torch import Tensor

from peagle.kernels.experts import Experts
from peagle.kernels.experts_triton import gated_tile
from peagle.kernels.mxfp4 import BLOCK, Packed

FEW_ROWS = 16  # up to here a tile holds all rows, and nothing has to be put in order
SOME_ROWS = 128  # up to here experts have few pairs: small tiles
# For up to FEW_ROWS, up to SOME_ROWS and more, by whether the product is the second one: pairs of a tile, rows of a
# tile of weights, warps, tiles under way, and registers of a thread if the compiler would take more. From 64 rows and
# four warps on the product is Hopper's own, which takes weights from registers; with fewer they would go through
# memory.
TILES = {
    ("few", False): (16, 64, 4, 3, None),
    ("few", True): (16, 64, 4, 4, 72),
    ("some", False): (16, 64, 4, 3, None),
    ("some", True): (16, 64, 4, 3, 72),
    ("many", False): (64, 64, 4, 3, 168),
    ("many", True): (64, 64, 4, 3, 168),
}
SCAN = 1024  # pairs that `_order_kernel` looks at in one go


@triton.jit(do_not_specialize=["P"])
def _order_kernel(chosen, order, ends, P, SCAN: tl.constexpr):
    """Pairs by expert, and among one expert's by number; `ends`: where each expert's end."""
    e = tl.program_id(0)
    i = tl.arange(0, SCAN)
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


@triton.jit
def _tile_of(ends, tile, E, BLOCK_M: tl.constexpr, EXPERTS: tl.constexpr):
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
def _exponents(at):
    """Where rows have a step's -> [N, 4]. The four are fetched as one number, enough for a copy ahead of time. Made
    without numbering columns, they lie with the threads that need them, as Triton 3.6 sees it."""
    N: tl.constexpr = at.shape[0]
    four = tl.load(at)
    even = tl.join(four & 255, (four >> 16) & 255)
    odd = tl.join((four >> 8) & 255, (four >> 24) & 255)
    return tl.reshape(tl.join(even, odd), (N, 4))


@triton.jit
def _ended(sums, ENDED: tl.constexpr):
    """A product's sums, read at once. Else Triton lets it go on into the next step, whose weights may then be unpacked
    into registers that it still reads."""
    if ENDED:
        sums = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [sums], dtype=tl.float32, is_pure=True, pack=1)
    return sums


@triton.jit(do_not_specialize=["T"])  # one compilation for all numbers of rows of a tile
def _packed_kernel(
    x,
    w,
    exponents,
    bias,
    chosen,
    ends,
    weights,
    y,
    T,
    E,
    N,
    G,
    x_row,
    exponents_row,
    alpha,
    limit,
    CHOSEN: tl.constexpr,
    CHOICES: tl.constexpr,
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
    """PAIRED: rows of x are pairs of row and expert already, and the result is weighted. CHOICES: CHOSEN rounded up.
    `ends`: pairs are in order, `chosen` is that order. Else a tile has the first rows, and `chosen` what they chose."""
    BLOCK_K: tl.constexpr = 128
    m = tl.arange(0, BLOCK_M)
    if ends is not None:
        e, first, end = _tile_of(ends, tl.program_id(0), E, BLOCK_M, EXPERTS)
        hit = first + m < end
        pair = tl.load(chosen + first + m, mask=hit, other=0).to(tl.int64)
        block = tl.program_id(1)
        found = e < E
    else:
        e = tl.program_id(1)
        c = tl.arange(0, CHOICES)
        known = (m < T)[:, None] & (c < CHOSEN)[None, :]
        mine = tl.load(chosen + m[:, None] * CHOSEN + c[None, :], mask=known, other=-1) == e
        hit = tl.max(mine.to(tl.int32), 1) > 0
        pair = m.to(tl.int64) * CHOSEN + tl.sum(tl.where(mine, c[None, :], 0), 1)
        block = tl.program_id(0)
        found = tl.max(hit.to(tl.int32), 0) > 0
    if found:
        source = pair if PAIRED else pair // CHOSEN
        n = block * BLOCK_N + tl.arange(0, BLOCK_N)
        HALVES: tl.constexpr = 2 if GLU else 1
        # Past the last weight row the last one is read again: no mask in the loop, and nothing of it is stored.
        rows = e.to(tl.int64) * N * HALVES + tl.minimum(n, N - 1)
        k = tl.arange(0, BLOCK_K)
        two = tl.arange(0, BLOCK_K // 8)  # words are read by pairs, see mxfp4_triton.py
        # Said so, rows are seen to be whole runs of 16 bytes, whatever the width.
        K, w_row = 32 * G, 4 * G
        x_at = x + source[None, :] * x_row + k[:, None]
        w_at = w + rows[:, None] * w_row + two[None, :]
        s_at = exponents + rows * exponents_row  # rows of exponents are filled up, so no step reads past one
        ups = (e * 0 + N).to(tl.int64)
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        steps = tl.cdiv(K, BLOCK_K)
        for step in range(0, steps):
            inside = step * (BLOCK_K // 8) + two < w_row
            rows_x = tl.load(x_at + step * BLOCK_K, mask=hit[None, :] & (step * BLOCK_K + k < K)[:, None], other=0.0)
            w_step = w_at + step * (BLOCK_K // 8)
            pairs = tl.load(w_step, mask=inside[None, :], other=0)
            s_step = s_at + step
            numbers = unpacked_tile(pairs, _exponents(s_step), ASM, x.dtype.element_ty)
            acc = _ended(tl.dot(numbers, rows_x, acc, input_precision=PRECISION), ENDED)
            if GLU:
                pairs = tl.load(w_step + ups * w_row, mask=inside[None, :], other=0)
                powers = _exponents(s_step + ups * exponents_row)
                numbers = unpacked_tile(pairs, powers, ASM, x.dtype.element_ty)
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
        to = y + pair[None, :] * N + n[:, None]
        tl.store(to, acc.to(y.dtype.element_ty), mask=hit[None, :] & (n < N)[:, None])


def kind_of(rows: int) -> str:
    return "few" if rows <= FEW_ROWS else "some" if rows <= SOME_ROWS else "many"


def order_of(expert_TC: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """[P] pairs by expert, and [E] where each expert's end among them."""
    order_P, ends_E = expert_TC.new_empty(expert_TC.numel()), expert_TC.new_empty(count)
    _order_kernel[(count,)](expert_TC, order_P, ends_E, expert_TC.numel(), SCAN=SCAN, num_warps=4)
    return order_P, ends_E


def expert_mlp_packed(x_TD: Tensor, weight_TC: Tensor, expert_TC: Tensor, experts: Experts) -> Tensor:
    (rows, chosen), (count, width, inner) = expert_TC.shape, experts.down_EDI.shape
    assert x_TD.stride(1) == 1 and weight_TC.is_contiguous() and expert_TC.is_contiguous()
    if not rows:
        return torch.empty_like(x_TD)
    kind = kind_of(rows)
    choices, ends_E = (expert_TC, None) if kind == "few" else order_of(expert_TC, count)
    hidden_PI = x_TD.new_empty(rows * chosen, inner)
    y_PD = x_TD.new_empty(rows * chosen, width)
    _launch(x_TD, hidden_PI, weight_TC, choices, ends_E, experts, kind, paired=False)
    _launch(hidden_PI, y_PD, weight_TC, choices, ends_E, experts, kind, paired=True)
    return y_PD.view(rows, chosen, width).sum(1)


def _launch(
    x: Tensor,
    y: Tensor,
    weight_TC: Tensor,
    choices: Tensor,
    ends_E: Tensor | None,
    experts: Experts,
    kind: str,
    paired: bool,
) -> None:
    w, bias = experts.gate_up_EXD, experts.gate_up_bias_EX
    if paired:
        w, bias = experts.down_EDI, experts.down_bias_ED
    assert isinstance(w, Packed)
    twos, fours = w.words_ERW.view(torch.int32), w.exponents_ERG.view(torch.int32)
    assert twos.is_contiguous() and fours.is_contiguous() and (bias is None or bias.is_contiguous())
    (rows, chosen), (pairs, columns), count = weight_TC.shape, y.shape, len(w)
    block_m, block_n, warps, stages, registers = TILES[kind, paired]
    if x.dtype == torch.float32:
        block_n, warps, stages, registers = 32, 4, 3, None
    blocks = triton.cdiv(columns, block_n)
    # Tiles of one expert come one after another, so that the second has its weights from the cache.
    most_tiles = min(pairs, (pairs + count * (block_m - 1)) // block_m)
    clamp = experts.clamp
    _packed_kernel[(blocks, count) if ends_E is None else (most_tiles, blocks)](
        x,
        twos,
        fours,
        bias,
        choices,
        ends_E,
        weight_TC,
        y,
        rows,
        count,
        columns,
        x.shape[1] // BLOCK,
        x.stride(0),
        fours.shape[2],
        clamp.alpha if clamp is not None else 0.0,
        clamp.limit if clamp is not None else 0.0,
        CHOSEN=chosen,
        CHOICES=triton.next_power_of_2(chosen),
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
