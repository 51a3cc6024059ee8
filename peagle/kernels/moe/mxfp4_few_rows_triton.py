# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, check-untyped-defs=False
# mypy: disable-error-code="assignment,attr-defined,misc,operator,var-annotated"
"""Triton kernel of MXFP4 experts for few rows in bf16, written warp by warp.

Tensors here have one element per thread, and what Triton would arrange is explicit: a thread loads its own weights and
rows from global memory, 16 bytes at a time and steps ahead, unpacks them in registers, and passes them to the
warp-level MMA of 16 weight rows by 8 rows of x by 16 columns. There is no shared memory and no synchronization between
warps, so warps hide each other's latencies; a program has four warps, so that work spreads evenly over the SMs. For
more rows than one MMA takes, experts_triton.py is faster.

A step is 128 columns: 4 blocks (mxfp4.py) of a weight row, one for each of the 4 threads that share it. An MMA may add
any 16 columns as long as weights and rows agree: MMA (p, h) of a step takes from each block t the columns
16 h + 8 b + 2 p + c (b and c: 0 or 1). `permuted_column` (routing_triton.py) puts rows in that order for kernels that
take columns in sequence. So a thread has one exponent per step, and 64 contiguous bytes of a row of x. Four steps are a
turn, for which a thread loads all exponents at once.

Output columns do not mix rows of x: a thread loads nothing for a row that did not choose the expert, and such results
are not stored. Among so few rows most experts have one or two, so this saves most of the loads of x.

The interpreter runs plain Triton code in place of the PTX. Shapes as in experts.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.moe.experts_torch import ExpertWeights
from peagle.kernels.moe.mxfp4 import BLOCK
from peagle.kernels.moe.mxfp4_triton import FOUR_WORDS, HAVE_PTX, decode, row_start
from peagle.kernels.moe.routing_triton import gate_tile
from peagle.kernels.triton_utils import pdl_launch_options

MAX_FEW_ROWS = 8  # rows of x of one MMA
# By the most rows: steps that the first and the second GEMM load ahead, which affects speed only. These are the fastest
# for GPT-OSS-20B's layer on an H200.
STEPS_AHEAD = {1: (3, 3), 4: (1, 1), 8: (1, 2)}
MAX_WARPS = 4  # warps per program

_MMA = tl.constexpr(
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
)
_LOAD = tl.constexpr("ld.global.v4.b32 {$0,$1,$2,$3}, [$4];")
# Loads 64 bytes in threads whose $17 is not negative; the others keep their registers.
_LOAD_IF_CHOSEN = tl.constexpr(
    "{ .reg .pred own; setp.ge.s32 own, $17, 0;"
    + "".join(f" @own ld.global.v4.b32 {{${i},${i + 1},${i + 2},${i + 3}}}, [$16+{4 * i}];" for i in (0, 4, 8, 12))
    + " } // "
    + " ".join(f"${i}" for i in range(18, 34))
)
_SIXTEEN = tl.constexpr((tl.int32,) * 16)
_OWN_REGISTERS = tl.constexpr(",".join(["=r"] * 16 + ["l", "r"] + [str(i) for i in range(16)]))
# For weights, which no other program reads: bypass L1, and fetch 128 bytes at a time into L2.
_LOAD_ONCE = tl.constexpr("ld.global.L1::no_allocate.L2::128B.v4.b32 {$0,$1,$2,$3}, [$4];")


@triton.jit
def _thread_index(THREADS: tl.constexpr, ASM: tl.constexpr):
    """Returns the thread's index from the hardware, which is correct for any layout that Triton picks."""
    i = tl.arange(0, THREADS)
    if ASM:
        i = tl.inline_asm_elementwise("mov.u32 $0, %tid.x; // $1", "=r,r", [i], dtype=tl.int32, is_pure=True, pack=1)
    return i


@triton.jit
def _load_four(at, LOAD: tl.constexpr, ASM: tl.constexpr):
    """Loads 16 bytes as four int32. Not pure: it must not move before the wait for the previous kernel."""
    if ASM:
        return tl.inline_asm_elementwise(
            LOAD, "=r,=r,=r,=r,l", [at.to(tl.int64)], dtype=FOUR_WORDS, is_pure=False, pack=1
        )
    else:
        return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)


@triton.jit
def _after_loads(i, ASM: tl.constexpr):
    """Returns `i` behind a warp barrier, which the compiler moves no load across.

    Otherwise it would delay loads for the next step until the end of this one.
    """
    if ASM:
        i = tl.inline_asm_elementwise(
            "bar.warp.sync 0xffffffff; mov.b32 $0, $1;", "=r,r", [i], dtype=tl.int32, is_pure=False, pack=1
        )
    return i


@triton.jit
def _operand_tile(pairs, WARPS: tl.constexpr):
    """Converts each thread's pair of bf16 to the operand tiles [WARPS, 8, 8] in fp32; for the interpreter."""
    low = (pairs << 16).to(tl.float32, bitcast=True)
    high = (pairs & -65536).to(tl.float32, bitcast=True)
    return tl.reshape(tl.join(low, high), (WARPS, 8, 8))


@triton.jit
def _matmul(rows, columns):
    """Multiplies [W, 8, 8] by [W, 8, 8] over the last axis of both."""
    return tl.sum(rows[:, :, None, :] * columns[:, None, :, :], 3)


@triton.jit
def _mma(sums, a0, a1, a2, a3, b0, b1, WARPS: tl.constexpr, ASM: tl.constexpr):
    """Adds one MMA to `sums`. a: weight rows g and 8 + g of the first 8 columns, then of the others; b: row g of x."""
    if ASM:
        return tl.inline_asm_elementwise(
            _MMA, "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
            [a0, a1, a2, a3, b0, b1, sums[0], sums[1], sums[2], sums[3]],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        x0, x1 = _operand_tile(b0, WARPS), _operand_tile(b1, WARPS)
        upper = _matmul(_operand_tile(a0, WARPS), x0) + _matmul(_operand_tile(a2, WARPS), x1)
        lower = _matmul(_operand_tile(a1, WARPS), x0) + _matmul(_operand_tile(a3, WARPS), x1)
        first, second = tl.split(tl.reshape(upper, (WARPS * 32, 2)))
        third, fourth = tl.split(tl.reshape(lower, (WARPS * 32, 2)))
        return sums[0] + first, sums[1] + second, sums[2] + third, sums[3] + fourth


@triton.jit
def _load_both(at, LOWER: tl.constexpr, LOAD: tl.constexpr, ASM: tl.constexpr):
    """Loads 16 bytes of the upper row and of the lower row, LOWER elements after it."""
    return _load_four(at, LOAD, ASM), _load_four(at + LOWER, LOAD, ASM)


@triton.jit
def _load_block(old, x, pair, ASM: tl.constexpr):
    """Loads 64 bytes of x in threads whose `pair` is not negative; others keep `old`."""
    if ASM:
        return tl.inline_asm_elementwise(
            _LOAD_IF_CHOSEN, _OWN_REGISTERS, [x.to(tl.int64), pair] + old, dtype=_SIXTEEN, is_pure=False, pack=1
        )
    else:
        got = ()
        for word in tl.static_range(16):
            got = got + (tl.load(x + word, mask=pair >= 0, other=0),)
        return got


@triton.jit
def _power(four, t, ASM: tl.constexpr):
    """Returns the power of 2 of block t among four exponents, as `decode` needs it."""
    if ASM:
        one = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, 0, $2;", "=r,r,r", [four, 0x4440 + t], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        one = (four >> 8 * t) & 255
    return one * 0x00800080 + 126 * 0x00800080


@triton.jit
def _multiply_step(sums, rows_x, words, upper, lower, t, WARPS: tl.constexpr, ASM: tl.constexpr):
    """Multiplies a step's words with rows of x; `upper` and `lower` are exponents of the upper and lower 8 rows."""
    power0, power1 = _power(upper, t, ASM), _power(lower, t, ASM)
    for p in tl.static_range(4):
        first = decode(words[0][p], power0, ASM)
        second = decode(words[1][p], power1, ASM)
        for h in tl.static_range(2):
            a0, a1, a2, a3 = first[2 * h], second[2 * h], first[2 * h + 1], second[2 * h + 1]
            sums = _mma(sums, a0, a1, a2, a3, rows_x[8 * h + p], rows_x[8 * h + 4 + p], WARPS, ASM)
    return sums


@triton.jit
def _find_pair(chosen, row, T, e, CHOSEN: tl.constexpr):
    """Returns the index of a row's pair with expert e, or -1."""
    pair = row * 0 - 1
    for c in tl.static_range(CHOSEN):
        at = row * CHOSEN + c
        pair = tl.where(tl.load(chosen + at, mask=row < T, other=-1) == e, at, pair)
    return pair


@triton.jit(do_not_specialize=["T"])
def _few_rows_kernel(
    x, w, exponents, bias, chosen, weights, y,
    T, x_row, alpha, limit,
    N: tl.constexpr, G: tl.constexpr, E_ROW: tl.constexpr, CHOSEN: tl.constexpr, PAIRED: tl.constexpr,
    AHEAD: tl.constexpr, WARPS: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x, w and exponents are int32, x_row counts int32; rows of exponents have E_ROW bytes. PAIRED: the second GEMM;
    of the first, a warp has 8 gates and their ups. A thread loads row g of x, if it chose the expert, and has sums of
    rows 2 t and 2 t + 1."""
    GLU: tl.constexpr = not PAIRED
    i = _thread_index(32 * WARPS, ASM)
    g, t = i % 32 // 4, i % 4
    e = tl.program_id(1)
    # Weight rows of a warp that are not ups, and the distance to its lower 8 rows.
    TILE: tl.constexpr = 8 if GLU else 16
    LOWER: tl.constexpr = N if GLU else 8
    if PDL and not PAIRED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    own = _find_pair(chosen, g, T, e, CHOSEN)
    if tl.max(own, 0) >= 0:
        n = (tl.program_id(0) * WARPS + i // 32) * TILE + g
        row = e * (2 * N if GLU else N) + n
        STEPS: tl.constexpr = (G + 3) // 4
        TURNS: tl.constexpr = (STEPS - AHEAD) // 4  # 1 to AHEAD + 3 steps remain, the last one partial
        LOWER_W: tl.constexpr = LOWER * STEPS * 16
        LOWER_E: tl.constexpr = LOWER * E_ROW // 4
        w_at = w + row_start(row.to(tl.int64), STEPS) + t * 4
        e_at = exponents + row.to(tl.int64) * (E_ROW // 4)
        powers = _load_both(e_at, LOWER_E, _LOAD, ASM)
        got = ()
        for step in tl.static_range(AHEAD):
            got = got + (_load_both(w_at + step * 128, LOWER_W, _LOAD_ONCE, ASM),)
        if PDL and PAIRED:
            # No kernel writes weights, and the choices were complete before the previous kernel began.
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
                if u == 2:  # earlier there are not enough registers
                    e_at += 4
                    next_powers = _load_both(e_at, LOWER_E, _LOAD, ASM)
                line = line + (_load_both(w_at + (u + AHEAD) * 128, LOWER_W, _LOAD_ONCE, ASM),)
                upper = _after_loads(powers[0][u], ASM)
                rows_x = _load_block(rows_x, x_at + u * 64, own, ASM)
                sums = _multiply_step(sums, rows_x, line[u], upper, powers[1][u], t, WARPS, ASM)
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
                powers = _load_both(e_at + u, LOWER_E, _LOAD, ASM)
            if u + AHEAD < LEFT:
                line = line + (_load_both(w_at + (u + AHEAD) * 128, LOWER_W, _LOAD_ONCE, ASM),)
            block = x_at + u * 64
            if u == LEFT - 1:  # past the end weights are 0, so any block of x does: load the step's first
                block -= tl.where(4 * (STEPS - 1) + t < G, 0, t * 16)
            upper = _after_loads(powers[0][u % 4], ASM)
            rows_x = _load_block(rows_x, block, own, ASM)
            sums = _multiply_step(sums, rows_x, line[u], upper, powers[1][u % 4], t, WARPS, ASM)
        for eight in tl.static_range(TILE // 8):
            own_bias = 0.0
            up_bias = 0.0
            if bias is not None:
                b_at = bias + row + 8 * eight
                own_bias = tl.load(b_at).to(tl.float32)
                if GLU:
                    up_bias = tl.load(b_at + N).to(tl.float32)
            for second in tl.static_range(2):
                pair = _find_pair(chosen, 2 * t + second, T, e, CHOSEN)
                total = sums[2 * eight + second] + own_bias
                if GLU:
                    total = gate_tile(total, sums[2 + second] + up_bias, alpha, limit)
                if PAIRED:
                    total = total * tl.load(weights + pair, mask=pair >= 0, other=0.0)
                to = y + pair.to(tl.int64) * N + n + 8 * eight
                tl.store(to, total.to(y.dtype.element_ty), mask=pair >= 0)


def launch_few_rows(
    x: Tensor, y: Tensor, weight_TC: Tensor, expert_TC: Tensor, experts: ExpertWeights, paired: bool
) -> None:
    """Computes one GEMM for up to MAX_FEW_ROWS rows; rows of y, and of x if `paired`, are pairs of row and expert."""
    words, exponents, bias = experts.gemm_weights(paired)
    assert exponents is not None and x.dtype == torch.bfloat16 and y.is_contiguous()
    if x.stride(0) % 8 or x.data_ptr() % 16:  # loads are 16 bytes wide
        x = x.clone(memory_format=torch.contiguous_format)
    (rows, chosen), columns = weight_TC.shape, y.shape[1]
    assert rows <= MAX_FEW_ROWS and columns % 32 == 0
    ahead = next(steps for max_rows, steps in STEPS_AHEAD.items() if rows <= max_rows)[paired]
    tile = 16 if paired else 8
    warps = 1 if columns % (tile * MAX_WARPS) else MAX_WARPS
    blocks = x.shape[1] // BLOCK
    _few_rows_kernel[(columns // (tile * warps), len(words))](
        x.view(torch.int32), words, exponents.view(torch.int32), bias, expert_TC, weight_TC, y, rows, x.stride(0) // 2,
        *(experts.clamp or (None, None)),
        N=columns, G=blocks, E_ROW=exponents.shape[2], CHOSEN=chosen, PAIRED=paired,
        AHEAD=min(ahead, triton.cdiv(blocks, 4)), WARPS=warps, ASM=HAVE_PTX,
        num_warps=warps, num_stages=1, **pdl_launch_options(x.device),
    )  # fmt: skip
