# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, check-untyped-defs=False
"""The Triton versions of mxfp4.py: tiles of packed weights in registers, and whole tensors of them.

A number's four bits, its sign moved to a float's sign and the others across the border of exponent and fraction, are
that number times 2^-126, and without an exponent a subnormal one: a product by 2^126 makes it right, another by the
block's power of 2 scales it. Both are exact. For bf16 that is done with two numbers to a register, in PTX: in plain
Triton a number costs four times as many instructions, and unpacking would take longer than reading.

Shapes as in mxfp4.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.launching import INTERPRETED

# $4: two words; $5: their powers of 2, bf16; $0 to $3: their numbers. 0x8000: where a sign goes, 0x01C0: where the
# three other bits go, 0x7E80: 2^126; a product plus -0.0 is that product.
_ONE_OF_FOUR = """
    {sign}
    {others}
    and.b32 sign, sign, 0x80008000;
    lop3.b32 u, u, 0x01C001C0, sign, 0xEA;
    fma.rn.bf16x2 u, u, large, nothing;
    fma.rn.bf16x2 ${out}, u, $5, nothing;
"""
_SIGNS = ("shl.b32 sign, $4, 12;", "shl.b32 sign, $4, 8;", "shl.b32 sign, $4, 4;", "mov.b32 sign, $4;")
_OTHERS = ("shl.b32 u, $4, 6;", "shl.b32 u, $4, 2;", "shr.u32 u, $4, 2;", "shr.u32 u, $4, 6;")
_ASM = tl.constexpr(
    "{ .reg .b32 u, sign, large, nothing; mov.b32 large, 0x7E807E80; mov.b32 nothing, 0x80008000;\n"
    + "".join(_ONE_OF_FOUR.format(sign=_SIGNS[i], others=_OTHERS[i], out=i) for i in range(4))
    + "}"
)
ROWS, WIDTH = 16, 128  # of a tile that `unpacked_triton` unpacks; words across


@triton.jit
def _number(bits, powers, SIGN: tl.constexpr, OTHERS: tl.constexpr, DTYPE: tl.constexpr):
    """The four bits are shifted so far that their sign is a float's, and that the others end at its bit 22."""
    large = tl.full((1, 1), 126 + 127 << 23, tl.int32).to(tl.float32, bitcast=True)
    tiny = (((bits << SIGN) & -2147483648) | ((bits << OTHERS) & (7 << 22))).to(tl.float32, bitcast=True)
    return (tiny * large * powers).to(DTYPE)


@triton.jit
def unpacked_tile(words, exponents, ASM: tl.constexpr, DTYPE: tl.constexpr):
    """[N, W] words and [N, W / 8] exponents -> four of [N, W]: of every block the first 8 numbers, the next, ..."""
    N: tl.constexpr = exponents.shape[0]
    G: tl.constexpr = exponents.shape[1]
    powers = (exponents.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    if ASM:
        powers = powers.to(tl.bfloat16)
    powers = tl.reshape(tl.broadcast_to(powers[:, :, None], (N, G, 8)), (N, G * 8))
    if ASM:
        numbers = tl.inline_asm_elementwise(
            _ASM,
            "=&r,=&r,=&r,=&r,r,r",
            [words, powers],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        bits = words.to(tl.int32)
        numbers = (
            _number(bits, powers, 28, 22, DTYPE),
            _number(bits, powers, 24, 18, DTYPE),
            _number(bits, powers, 20, 14, DTYPE),
            _number(bits, powers, 16, 10, DTYPE),
        )
    return numbers


@triton.jit
def _unpack_kernel(words, exponents, out, R, W, G, ROWS: tl.constexpr, WIDTH: tl.constexpr, ASM: tl.constexpr):
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    w = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    g = tl.program_id(1) * (WIDTH // 8) + tl.arange(0, WIDTH // 8)
    known = (r < R)[:, None] & (w < W)[None, :]
    words_RW = tl.load(words + r[:, None] * W + w[None, :], mask=known, other=0)
    powers_RG = tl.load(exponents + r[:, None] * G + g[None, :], mask=(r < R)[:, None] & (g < G)[None, :], other=0)
    first, second, third, fourth = unpacked_tile(words_RW, powers_RG, ASM, out.dtype.element_ty)
    at = out + r[:, None] * (4 * W) + (w // 8 * 32 + w % 8)[None, :]
    tl.store(at, first, mask=known)
    tl.store(at + 8, second, mask=known)
    tl.store(at + 16, third, mask=known)
    tl.store(at + 24, fourth, mask=known)


def in_ptx(dtype: torch.dtype) -> bool:
    return dtype == torch.bfloat16 and not INTERPRETED and torch.version.cuda is not None


def unpacked_triton(words_ERW: Tensor, exponents_ERG: Tensor, dtype: torch.dtype) -> Tensor:
    assert words_ERW.is_contiguous() and exponents_ERG.is_contiguous()
    count, rows, width = words_ERW.shape
    out = words_ERW.new_empty(count, rows, 4 * width, dtype=dtype)
    grid = (triton.cdiv(count * rows, ROWS), triton.cdiv(width, WIDTH))
    args = (words_ERW, exponents_ERG, out, count * rows, width, exponents_ERG.shape[2])
    _unpack_kernel[grid](*args, ROWS=ROWS, WIDTH=WIDTH, ASM=in_ptx(dtype), num_warps=4)
    return out
