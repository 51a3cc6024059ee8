# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, check-untyped-defs=False
"""The Triton versions of mxfp4.py: tiles of packed weights in registers, and whole tensors of them.

A number's four bits, its sign moved to a float's sign and the others across the border of exponent and fraction, are
that number times 2^-126, and without an exponent a subnormal one. Times 2^126 and the block's power of 2 it is right.
Up to the exponent MAX_EXPONENT both are one product; both ways are exact. For bf16 that is done with two numbers to a
register, in PTX: in plain Triton a number costs many times as many instructions, and unpacking would take longer than
reading. On Hopper the bits are the dear part: what moves and masks them runs at half the rate of what multiplies.

Words are read by pairs: the two of a register are neighbours and share a power of 2. Of single words Triton puts two
into a register which a thread happens to hold one after the other, and those may be of different blocks or rows.

Shapes as in mxfp4.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.moe.mxfp4 import BLOCK
from peagle.kernels.triton_utils import INTERPRETED

# A number's bits belong where 0x81C0 has ones; a product plus -0.0 is that product.
_FOURTH = """
    shl.b32 u, {words}, 1;
    and.b32 v, u, 0x80008000;
    shr.u32 u, {words}, 3;
    lop3.b32 v, u, 0x00800080, v, 0xEA;
    shr.u32 u, {words}, 5;
    lop3.b32 {out}, u, 0x01400140, v, 0xEA;
"""
_HEAD = "{ .reg .b32 u, v, nothing; mov.b32 nothing, 0x80008000;\n"
# $4: two words; $5: their power of 2 in bf16, twice; $0 to $3: their numbers.
ALL_FOUR = tl.constexpr(
    _HEAD
    + """
    and.b32 $0, $4, 0x81C081C0;
    shl.b32 u, $4, 3;
    and.b32 $1, u, 0x81C081C0;
    shl.b32 u, $4, 6;
    and.b32 $2, u, 0x81C081C0;
"""
    + _FOURTH.format(words="$4", out="$3")
    + "".join(f"fma.rn.bf16x2 ${i}, ${i}, $5, nothing;\n" for i in range(4))
    + "}"
)
# $1: two words; $2: which of their numbers; $3: the power of 2, twice; $0: the numbers.
_ONE_OF_FOUR = tl.constexpr(
    _HEAD
    + ".reg .pred last; .reg .b32 fourth, large; mov.b32 large, 0x7E807E80;"
    + _FOURTH.format(words="$1", out="fourth")
    + """
    mul.lo.u32 u, $2, 3;
    shl.b32 u, $1, u;
    and.b32 u, u, 0x81C081C0;
    setp.eq.u32 last, $2, 3;
    selp.b32 u, fourth, u, last;
    fma.rn.bf16x2 u, u, large, nothing;
    fma.rn.bf16x2 $0, u, $3, nothing;
}"""
)
ROWS, WIDTH = 8, 1024  # of a tile that `unpacked_triton` unpacks
HAVE_PTX = not INTERPRETED and torch.version.cuda is not None


@triton.jit
def _number(bits, powers, DTYPE: tl.constexpr):
    """`bits`: as a bf16 has them."""
    large = tl.full((1, 1), 126 + 127 << 23, tl.int32).to(tl.float32, bitcast=True)
    return ((bits << 16).to(tl.float32, bitcast=True) * large * powers).to(DTYPE)


@triton.jit
def _fourth(bits):
    return ((bits << 1) & 0x8000) | ((bits >> 3) & 0x0080) | ((bits >> 5) & 0x0140)


@triton.jit
def _apart(pairs):
    """[N, P] -> [N, 2 P]: what lies in the lower and in the upper half, as numbers of 16 bits."""
    N: tl.constexpr = pairs.shape[0]
    P: tl.constexpr = pairs.shape[1]
    return tl.reshape(tl.join(pairs.to(tl.int16), (pairs >> 16).to(tl.int16)), (N, 2 * P))


@triton.jit
def four_numbers(pairs, powers):
    """What ALL_FOUR does, in plain Triton."""
    return (
        _both(pairs & -2118090304, powers),
        _both((pairs << 3) & -2118090304, powers),
        _both((pairs << 6) & -2118090304, powers),
        _both(((pairs << 1) & -2147450880) | ((pairs >> 3) & 0x00800080) | ((pairs >> 5) & 0x01400140), powers),
    )


@triton.jit
def _both(bits, powers):
    low = (bits << 16).to(tl.float32, bitcast=True) * (powers << 16).to(tl.float32, bitcast=True)
    high = (bits & -65536).to(tl.float32, bitcast=True) * (powers & -65536).to(tl.float32, bitcast=True)
    return ((low.to(tl.int32, bitcast=True) >> 16) & 65535) | (high.to(tl.int32, bitcast=True) & -65536)


@triton.jit
def _spread(exponents, TO: tl.constexpr, BIASED: tl.constexpr, ASM: tl.constexpr):
    """[N, G] exponents -> [N, TO * G]: powers of 2 for PTX, as said there, 2^126 times as large unless BIASED."""
    N: tl.constexpr = exponents.shape[0]
    G: tl.constexpr = exponents.shape[1]
    if ASM:
        powers = exponents.to(tl.int32) * 0x00800080
        if not BIASED:
            powers += 126 * 0x00800080
    else:
        powers = (exponents.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return tl.reshape(tl.broadcast_to(powers[:, :, None], (N, G, TO)), (N, G * TO))


@triton.jit
def unpacked_tile(pairs, exponents, ASM: tl.constexpr, DTYPE: tl.constexpr):
    """[N, W / 2] pairs of words and [N, W / 8] exponents -> [N, 4 W], in turn: of all blocks the same
    columns side by side, as experts_lanes_triton.py says."""
    N: tl.constexpr = exponents.shape[0]
    G: tl.constexpr = exponents.shape[1]
    if ASM:
        first, second, third, fourth = tl.inline_asm_elementwise(
            ALL_FOUR,
            "=&r,=&r,=&r,=&r,r,r",
            [pairs, _spread(exponents, 4, False, ASM)],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
        first = _apart(first).to(DTYPE, bitcast=True)
        second = _apart(second).to(DTYPE, bitcast=True)
        third = _apart(third).to(DTYPE, bitcast=True)
        fourth = _apart(fourth).to(DTYPE, bitcast=True)
    else:
        powers = _spread(exponents, 8, False, ASM)
        bits = _apart(pairs).to(tl.int32)
        first = _number(bits & 0x81C0, powers, DTYPE)
        second = _number((bits << 3) & 0x81C0, powers, DTYPE)
        third = _number((bits << 6) & 0x81C0, powers, DTYPE)
        fourth = _number(_fourth(bits), powers, DTYPE)
    # A thread keeps its registers: this only says which number each one is.
    numbers = tl.join(tl.join(first, second), tl.join(third, fourth))
    numbers = tl.permute(tl.reshape(numbers, (N, G, 4, 2, 2, 2)), (0, 2, 5, 4, 1, 3))
    return tl.reshape(numbers, (N, 32 * G))


@triton.jit
def row_start(row, steps):
    """Where the words of a row begin, in pairs; those of its next step come 128 pairs later (mxfp4.py)."""
    return row // 8 * (steps * 128) + row % 8 * 16


@triton.jit
def _unpack_kernel(
    pairs, exponents, out, R, G, exponents_row, ROWS: tl.constexpr, WIDTH: tl.constexpr, ASM: tl.constexpr
):
    """A thread has one of the four numbers of neighbouring words, so that what it writes lies side by side."""
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    two = tl.program_id(1) * (WIDTH // 2) + tl.arange(0, WIDTH // 2)
    g = tl.program_id(1) * (WIDTH // 32) + tl.arange(0, WIDTH // 32)
    known = (r < R)[:, None] & (two < 16 * G)[None, :]
    in_row = two // 64 * 128 + two % 64 // 16 * 4 + two % 4
    pairs_RN = tl.load(pairs + row_start(r, tl.cdiv(G, 4))[:, None] + in_row[None, :], mask=known, other=0)
    its = exponents + r[:, None] * exponents_row + g[None, :]
    exponents_RG = tl.load(its, mask=(r < R)[:, None] & (g < exponents_row)[None, :], other=0)
    which = tl.broadcast_to((two % 16 // 4)[None, :], (ROWS, WIDTH // 2))
    if ASM:
        numbers = tl.inline_asm_elementwise(
            _ONE_OF_FOUR,
            "=r,r,r,r",
            [pairs_RN, which, _spread(exponents_RG, 16, True, ASM)],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
        numbers = _apart(numbers).to(out.dtype.element_ty, bitcast=True)
    else:
        bits = _apart(pairs_RN).to(tl.int32)
        which = (n % 32 // 8)[None, :]
        bits = tl.where(which == 3, _fourth(bits), (bits << which * 3) & 0x81C0)
        numbers = _number(bits, _spread(exponents_RG, 32, True, ASM), out.dtype.element_ty)
    tl.store(out + r[:, None] * (32 * G) + n[None, :], numbers, mask=(r < R)[:, None] & (n < 32 * G)[None, :])


def in_ptx(dtype: torch.dtype) -> bool:
    return dtype == torch.bfloat16 and HAVE_PTX


def unpacked_triton(words_ERW: Tensor, exponents_ERG: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    assert words_ERW.is_contiguous() and exponents_ERG.is_contiguous()
    count, rows, _ = words_ERW.shape
    out = words_ERW.new_empty(count, rows, columns, dtype=dtype)
    grid = (triton.cdiv(count * rows, ROWS), triton.cdiv(columns, WIDTH))
    args = (words_ERW.view(torch.int32), exponents_ERG, out, count * rows, columns // BLOCK, exponents_ERG.shape[2])
    _unpack_kernel[grid](*args, ROWS=ROWS, WIDTH=WIDTH, ASM=in_ptx(dtype), num_warps=4)
    return out
