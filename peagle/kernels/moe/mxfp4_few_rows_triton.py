# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, check-untyped-defs=False
# mypy: disable-error-code="assignment,attr-defined,misc,operator,var-annotated"
"""The packed experts' products (experts_packed_triton.py) for few rows in bf16, thread by thread.

Here a tensor has one number for each thread, and what Triton would arrange is written out: a thread reads its own
weights and rows from memory, 16 bytes at once and steps ahead, unpacks them where they are, and gives them to the
product instruction of a warp, 16 weight rows by 8 rows of x by 16 columns. Nothing goes through shared memory and no
thread waits for another, so warps hide each other's latencies; a program is four of them, so that work spreads evenly
over the machine. For more rows than an instruction takes experts_packed_triton.py is faster.

A step is 128 columns: 4 blocks (mxfp4.py) of a weight row, one for each of the 4 threads that share it. An instruction
does not care which 16 columns it adds up, as long as weights and rows agree: instruction (p, h) of a step takes of each
block t the columns 16 h + 8 b + 2 p + c (b and c: 0 or 1). `turned` puts rows in that order for kernels that take
columns as they come. So a thread has one exponent in a step, and of a row of x 64 bytes in one piece. Four steps are a
turn, for which a thread reads exponents at once.

Columns of a product do not mix: nothing is read for a row of x that did not choose the expert, and what comes of that
is not stored. Of the few rows that there are most experts have one or two, so that spares most of the reading.

In the interpreter the instructions are spelled out.

Shapes as in experts.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.moe.experts import ExpertWeights
from peagle.kernels.moe.experts_triton import gated_tile
from peagle.kernels.moe.mxfp4 import BLOCK, PackedWeights
from peagle.kernels.moe.mxfp4_triton import ALL_FOUR, four_numbers, in_ptx, row_start
from peagle.kernels.triton_utils import supports_pdl

FEW_ROWS = 8  # of x, at most: those of one product instruction
# Up to so many rows, and by whether the product is the second one: steps that are read ahead. Results are the same with
# all; these are the fastest for GPT-OSS-20B's layer on an H200 (benchmarks/results/h200-kernel-experts-order.json).
# Programs of one warp, turns of one or two steps and fewer registers were slower or no faster, and so were 16 gates and
# then their ups to a warp, instead of 8 of both.
READ_AHEAD: dict[tuple[int, bool], int] = {
    (1, False): 3,
    (1, True): 3,
    (4, False): 1,
    (4, True): 1,
    (8, False): 1,
    (8, True): 2,
}
MOST_WARPS = 4  # of a program

_MMA = tl.constexpr(
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
)
_READ = tl.constexpr("ld.global.v4.b32 {$0,$1,$2,$3}, [$4];")
# 64 bytes, by threads whose $17 is not negative; the others keep what they have.
_READ_OWN = tl.constexpr(
    "{ .reg .pred own; setp.ge.s32 own, $17, 0;"
    + "".join(f" @own ld.global.v4.b32 {{${i},${i + 1},${i + 2},${i + 3}}}, [$16+{4 * i}];" for i in (0, 4, 8, 12))
    + " } // "
    + " ".join(f"${i}" for i in range(18, 34))
)
_SIXTEEN = tl.constexpr((tl.int32,) * 16)
_OWN_REGISTERS = tl.constexpr(",".join(["=r"] * 16 + ["l", "r"] + [str(i) for i in range(16)]))
# Of weights, which nobody else reads: past the first cache, and 128 bytes at once from memory into the second.
_READ_ONCE = tl.constexpr("ld.global.L1::no_allocate.L2::128B.v4.b32 {$0,$1,$2,$3}, [$4];")


@triton.jit
def turned(k):
    """Where columns are once they are in turn, and, the same, which they were: within 128 the bits of the block and
    those of p have changed places."""
    return (k & -103) | ((k & 6) << 4) | ((k & 96) >> 4)


@triton.jit
def _thread(THREADS: tl.constexpr, ASM: tl.constexpr):
    """Its number. Asked for, and so right however Triton spreads a tensor over threads."""
    i = tl.arange(0, THREADS)
    if ASM:
        i = tl.inline_asm_elementwise("mov.u32 $0, %tid.x; // $1", "=r,r", [i], dtype=tl.int32, is_pure=True, pack=1)
    return i


@triton.jit
def _four(at, READ: tl.constexpr, ASM: tl.constexpr):
    """16 bytes -> four of int32. Not pure: a kernel before may have to be waited for."""
    if ASM:
        return tl.inline_asm_elementwise(
            READ,
            "=r,=r,=r,=r,l",
            [at.to(tl.int64)],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=False,
            pack=1,
        )
    else:
        return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)


@triton.jit
def _asked(i, ASM: tl.constexpr):
    """`i`, once all that was to be read before has been asked for: the compiler moves no reading across a barrier, here
    of one warp, and would else put off what is only needed in the next step until its end."""
    if ASM:
        i = tl.inline_asm_elementwise(
            "bar.warp.sync 0xffffffff; mov.b32 $0, $1;", "=r,r", [i], dtype=tl.int32, is_pure=False, pack=1
        )
    return i


@triton.jit
def _tile(pairs, WARPS: tl.constexpr):
    """[threads] of two numbers of bf16 each -> [WARPS, 8, 8] fp32, as a warp's threads hold them: interpreted only."""
    low = (pairs << 16).to(tl.float32, bitcast=True)
    high = (pairs & -65536).to(tl.float32, bitcast=True)
    return tl.reshape(tl.join(low, high), (WARPS, 8, 8))


@triton.jit
def _product(rows, columns):
    """[W, 8, 8] by [W, 8, 8], over the last axis of both."""
    return tl.sum(rows[:, :, None, :] * columns[:, None, :, :], 3)


@triton.jit
def _mma(sums, a0, a1, a2, a3, b0, b1, WARPS: tl.constexpr, ASM: tl.constexpr):
    """a: rows g, then 8 + g, of the first 8 columns, then of the others; b: row g of x, the same columns."""
    if ASM:
        return tl.inline_asm_elementwise(
            _MMA,
            "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
            [a0, a1, a2, a3, b0, b1, sums[0], sums[1], sums[2], sums[3]],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    else:
        x0, x1 = _tile(b0, WARPS), _tile(b1, WARPS)
        upper = _product(_tile(a0, WARPS), x0) + _product(_tile(a2, WARPS), x1)
        lower = _product(_tile(a1, WARPS), x0) + _product(_tile(a3, WARPS), x1)
        first, second = tl.split(tl.reshape(upper, (WARPS * 32, 2)))
        third, fourth = tl.split(tl.reshape(lower, (WARPS * 32, 2)))
        return sums[0] + first, sums[1] + second, sums[2] + third, sums[3] + fourth


@triton.jit
def _numbers(pairs, power, ASM: tl.constexpr):
    """Two words of int32 and their power of 2, twice -> four times two numbers of bf16."""
    if ASM:
        return tl.inline_asm_elementwise(
            ALL_FOUR,
            "=&r,=&r,=&r,=&r,r,r",
            [pairs, power],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        return four_numbers(pairs, power)


@triton.jit
def _both(at, LOWER: tl.constexpr, READ: tl.constexpr, ASM: tl.constexpr):
    """Of row g, and of another one whose own lie LOWER after it."""
    return _four(at, READ, ASM), _four(at + LOWER, READ, ASM)


@triton.jit
def _block_of(old, x, own, ASM: tl.constexpr):
    """Four times 16 bytes of x for threads whose `own` is not negative; others keep the `old` ones."""
    if ASM:
        return tl.inline_asm_elementwise(
            _READ_OWN,
            _OWN_REGISTERS,
            [x.to(tl.int64), own] + old,
            dtype=_SIXTEEN,
            is_pure=False,
            pack=1,
        )
    else:
        got = ()
        for word in tl.static_range(16):
            got = got + (tl.load(x + word, mask=own >= 0, other=0),)
        return got


@triton.jit
def _power(four, t, ASM: tl.constexpr):
    """Of four exponents the one of block t, as ALL_FOUR wants it."""
    if ASM:
        one = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, 0, $2;", "=r,r,r", [four, 0x4440 + t], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        one = (four >> 8 * t) & 255
    return one * 0x00800080 + 126 * 0x00800080


@triton.jit
def _step(sums, rows_x, got, upper, lower, t, WARPS: tl.constexpr, ASM: tl.constexpr):
    """`got`, and exponents: of the upper and of the lower 8 rows."""
    power0, power1 = _power(upper, t, ASM), _power(lower, t, ASM)
    for p in tl.static_range(4):
        first = _numbers(got[0][p], power0, ASM)
        second = _numbers(got[1][p], power1, ASM)
        for h in tl.static_range(2):
            a0, a1, a2, a3 = first[2 * h], second[2 * h], first[2 * h + 1], second[2 * h + 1]
            sums = _mma(sums, a0, a1, a2, a3, rows_x[8 * h + p], rows_x[8 * h + 4 + p], WARPS, ASM)
    return sums


@triton.jit
def _pair_of(chosen, row, T, e, CHOSEN: tl.constexpr):
    """Of a row: the number of its pair with expert e, or -1."""
    pair = row * 0 - 1
    for c in tl.static_range(CHOSEN):
        at = row * CHOSEN + c
        pair = tl.where(tl.load(chosen + at, mask=row < T, other=-1) == e, at, pair)
    return pair


@triton.jit(do_not_specialize=["T"])
def _lanes_kernel(
    x,
    w,
    exponents,
    bias,
    chosen,
    weights,
    y,
    T,
    x_row,
    alpha,
    limit,
    N: tl.constexpr,
    G: tl.constexpr,
    E_ROW: tl.constexpr,
    CHOSEN: tl.constexpr,
    PAIRED: tl.constexpr,
    GLU: tl.constexpr,
    CLAMPED: tl.constexpr,
    AHEAD: tl.constexpr,
    WARPS: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """x, w, exponents: as int32, x_row too; rows of exponents have E_ROW bytes. GLU: a warp has 8 gates and their
    ups. A thread reads row g of x, if it chose the expert, and has sums of rows 2 t and 2 t + 1."""
    i = _thread(32 * WARPS, ASM)
    g, t = i % 32 // 4, i % 4
    e = tl.program_id(1)
    # Weight rows of a warp that are not ups, and where the second half of its rows is.
    TILE: tl.constexpr = 8 if GLU else 16
    LOWER: tl.constexpr = N if GLU else 8
    if PDL and not PAIRED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    own = _pair_of(chosen, g, T, e, CHOSEN)
    if tl.max(own, 0) >= 0:
        n = (tl.program_id(0) * WARPS + i // 32) * TILE + g
        row = e * (2 * N if GLU else N) + n
        STEPS: tl.constexpr = (G + 3) // 4
        TURNS: tl.constexpr = (STEPS - AHEAD) // 4  # one to AHEAD + 3 steps are left for the end, the last one in part
        LOWER_W: tl.constexpr = LOWER * STEPS * 16
        LOWER_E: tl.constexpr = LOWER * E_ROW // 4
        w_at = w + row_start(row.to(tl.int64), STEPS) + t * 4
        e_at = exponents + row.to(tl.int64) * (E_ROW // 4)
        powers = _both(e_at, LOWER_E, _READ, ASM)
        got = ()
        for step in tl.static_range(AHEAD):
            got = got + (_both(w_at + step * 128, LOWER_W, _READ_ONCE, ASM),)
        if PDL and PAIRED:
            # Weights are nobody's output, and choices were there before the kernel ahead began: the rest is only now.
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        source = tl.maximum(own, 0) if PAIRED else tl.maximum(own, 0) // CHOSEN
        x_at = x + source.to(tl.int64) * x_row + t * 16
        zero = i.to(tl.float32) * 0.0
        sums = (zero, zero, zero, zero)
        rows_x = (i, i, i, i, i, i, i, i, i, i, i, i, i, i, i, i)
        for _ in range(0, TURNS):
            line = got
            for u in tl.static_range(4):
                if u == 2:  # not before: there are registers enough only now
                    e_at += 4
                    next_powers = _both(e_at, LOWER_E, _READ, ASM)
                line = line + (_both(w_at + (u + AHEAD) * 128, LOWER_W, _READ_ONCE, ASM),)
                upper = _asked(powers[0][u], ASM)
                rows_x = _block_of(rows_x, x_at + u * 64, own, ASM)
                sums = _step(sums, rows_x, line[u], upper, powers[1][u], t, WARPS, ASM)
            got = ()
            for u in tl.static_range(AHEAD):
                got = got + (line[4 + u],)
            powers = next_powers
            w_at += 4 * 128
            x_at += 4 * 64
        LEFT: tl.constexpr = STEPS - 4 * TURNS
        line = got
        for u in tl.static_range(LEFT):
            if u > 0 and u % 4 == 0:
                powers = _both(e_at + u, LOWER_E, _READ, ASM)
            if u + AHEAD < LEFT:
                line = line + (_both(w_at + (u + AHEAD) * 128, LOWER_W, _READ_ONCE, ASM),)
            block = x_at + u * 64
            if u == LEFT - 1:  # past the end weights are 0, and the step's first block of x does
                block -= tl.where(4 * (STEPS - 1) + t < G, 0, t * 16)
            upper = _asked(powers[0][u % 4], ASM)
            rows_x = _block_of(rows_x, block, own, ASM)
            sums = _step(sums, rows_x, line[u], upper, powers[1][u % 4], t, WARPS, ASM)
        for eight in tl.static_range(TILE // 8):
            own_bias = 0.0
            up_bias = 0.0
            if bias is not None:
                b_at = bias + row + 8 * eight
                own_bias = tl.load(b_at).to(tl.float32)
                if GLU:
                    up_bias = tl.load(b_at + N).to(tl.float32)
            for second in tl.static_range(2):
                pair = _pair_of(chosen, 2 * t + second, T, e, CHOSEN)
                total = sums[2 * eight + second] + own_bias
                if GLU:
                    total = gated_tile(total, sums[2 + second] + up_bias, alpha, limit, CLAMPED)
                if PAIRED:
                    total = total * tl.load(weights + pair, mask=pair >= 0, other=0.0)
                to = y + pair.to(tl.int64) * N + n + 8 * eight
                tl.store(to, total.to(y.dtype.element_ty), mask=pair >= 0)


def launch_lanes(
    x: Tensor, y: Tensor, weight_TC: Tensor, expert_TC: Tensor, experts: ExpertWeights, paired: bool
) -> None:
    """For up to FEW_ROWS rows. Those of x are pairs of row and expert if `paired`, y's always."""
    w, bias = experts.gate_up_EXD, experts.gate_up_bias_EX
    if paired:
        w, bias = experts.down_EDI, experts.down_bias_ED
    assert isinstance(w, PackedWeights) and x.dtype == torch.bfloat16 and y.is_contiguous()
    twos, exponents = w.words_ERW.view(torch.int32), w.exponents_ERG
    assert twos.is_contiguous() and exponents.is_contiguous() and (bias is None or bias.is_contiguous())
    if x.stride(0) % 8 or x.data_ptr() % 16:  # 16 bytes are read at once
        x = x.clone(memory_format=torch.contiguous_format)
    (rows, chosen), columns = weight_TC.shape, y.shape[1]
    assert rows <= FEW_ROWS and columns % 32 == 0
    ahead = READ_AHEAD[min(most for most, _ in READ_AHEAD if rows <= most), paired]
    tile = 16 if paired else 8
    warps = 1 if columns % (tile * MOST_WARPS) else MOST_WARPS
    blocks, clamp, pdl = w.shape[2] // BLOCK, experts.clamp, supports_pdl(x.device)
    ahead = min(ahead, triton.cdiv(blocks, 4))
    _lanes_kernel[(columns // (tile * warps), len(w))](
        x.view(torch.int32),
        twos,
        exponents.view(torch.int32),
        bias,
        expert_TC,
        weight_TC,
        y,
        rows,
        x.stride(0) // 2,
        clamp.alpha if clamp is not None else 0.0,
        clamp.limit if clamp is not None else 0.0,
        N=columns,
        G=blocks,
        E_ROW=exponents.shape[2],
        CHOSEN=chosen,
        PAIRED=paired,
        GLU=not paired,
        CLAMPED=clamp is not None,
        AHEAD=ahead,
        WARPS=warps,
        ASM=in_ptx(x.dtype),
        PDL=pdl,
        num_warps=warps,
        num_stages=1,
        **({"launch_pdl": True} if pdl else {}),
    )
