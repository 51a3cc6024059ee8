# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, check-untyped-defs=False
"""Unpacks MXFP4 words (mxfp4.py) in Triton: a tile in registers, or whole tensors.

The four bits of a number, with the sign moved to a float's sign bit and the others across the border of exponent and
fraction, are that number times 2^-126, or a subnormal one if its exponent bits are zero. Multiplied by 2^126 and by the
block's power of 2 it is exact. Up to MAX_EXPONENT both factors are one multiplication. For bf16 this is done in PTX for
two numbers per register; plain Triton would need many more instructions, and unpacking would take longer than loading.
On Hopper the bit operations dominate: they run at half the rate of multiplications.

Words are loaded in pairs: the two words of a register are neighbours and share a power of 2. If single words were
loaded, Triton would pair any two that a thread holds, possibly of different blocks or rows.

Shapes as in mxfp4.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.moe.mxfp4 import BLOCK, PackedWeights
from peagle.kernels.moe.types import ExpertWeights
from peagle.kernels.triton_utils import INTERPRETED

# A number's bits belong where 0x81C0 has ones. fma with -0.0 is a plain multiplication.
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
DECODE_ALL = tl.constexpr(
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
# $1: two words; $2: which of their four numbers; $3: their power of 2, twice; $0: the numbers.
_DECODE_ONE = tl.constexpr(
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
ROWS, WIDTH = 8, 1024  # tile of `unpack_words_triton`
HAVE_PTX = not INTERPRETED and torch.version.cuda is not None


@triton.jit
def _to_number(bits, powers, DTYPE: tl.constexpr):
    """Converts bits at their places in a bf16 to numbers."""
    large = tl.full((1, 1), 126 + 127 << 23, tl.int32).to(tl.float32, bitcast=True)
    return ((bits << 16).to(tl.float32, bitcast=True) * large * powers).to(DTYPE)


@triton.jit
def _fourth_bits(bits):
    return ((bits << 1) & 0x8000) | ((bits >> 3) & 0x0080) | ((bits >> 5) & 0x0140)


@triton.jit
def _split_pairs(pairs):
    """Splits 32-bit pairs [N, P] into their 16-bit halves [N, 2 P], low half first."""
    N: tl.constexpr = pairs.shape[0]
    P: tl.constexpr = pairs.shape[1]
    return tl.reshape(tl.join(pairs.to(tl.int16), (pairs >> 16).to(tl.int16)), (N, 2 * P))


@triton.jit
def decode_all(pairs, powers):
    """Does in plain Triton what DECODE_ALL does in PTX."""
    return (
        _multiply_halves(pairs & -2118090304, powers),
        _multiply_halves((pairs << 3) & -2118090304, powers),
        _multiply_halves((pairs << 6) & -2118090304, powers),
        _multiply_halves(
            ((pairs << 1) & -2147450880) | ((pairs >> 3) & 0x00800080) | ((pairs >> 5) & 0x01400140), powers
        ),
    )


@triton.jit
def _multiply_halves(bits, powers):
    low = (bits << 16).to(tl.float32, bitcast=True) * (powers << 16).to(tl.float32, bitcast=True)
    high = (bits & -65536).to(tl.float32, bitcast=True) * (powers & -65536).to(tl.float32, bitcast=True)
    return ((low.to(tl.int32, bitcast=True) >> 16) & 65535) | (high.to(tl.int32, bitcast=True) & -65536)


@triton.jit
def _powers_of_two(exponents, TO: tl.constexpr, BIASED: tl.constexpr, ASM: tl.constexpr):
    """Expands exponents [N, G] to powers of 2 [N, TO * G], for PTX twice per register; times 2^126 unless BIASED."""
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
def unpack_tile(pairs, exponents, ASM: tl.constexpr, DTYPE: tl.constexpr):
    """Unpacks pairs of words [N, W / 2] and exponents [N, W / 8] into numbers [N, 4 W] with permuted columns.

    The permutation puts the same columns of all blocks side by side (mxfp4_few_rows_triton.py).
    """
    N: tl.constexpr = exponents.shape[0]
    G: tl.constexpr = exponents.shape[1]
    if ASM:
        first, second, third, fourth = tl.inline_asm_elementwise(
            DECODE_ALL,
            "=&r,=&r,=&r,=&r,r,r",
            [pairs, _powers_of_two(exponents, 4, False, ASM)],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
        first = _split_pairs(first).to(DTYPE, bitcast=True)
        second = _split_pairs(second).to(DTYPE, bitcast=True)
        third = _split_pairs(third).to(DTYPE, bitcast=True)
        fourth = _split_pairs(fourth).to(DTYPE, bitcast=True)
    else:
        powers = _powers_of_two(exponents, 8, False, ASM)
        bits = _split_pairs(pairs).to(tl.int32)
        first = _to_number(bits & 0x81C0, powers, DTYPE)
        second = _to_number((bits << 3) & 0x81C0, powers, DTYPE)
        third = _to_number((bits << 6) & 0x81C0, powers, DTYPE)
        fourth = _to_number(_fourth_bits(bits), powers, DTYPE)
    # Threads keep their registers: this only relabels which number each one is.
    numbers = tl.join(tl.join(first, second), tl.join(third, fourth))
    numbers = tl.permute(tl.reshape(numbers, (N, G, 4, 2, 2, 2)), (0, 2, 5, 4, 1, 3))
    return tl.reshape(numbers, (N, 32 * G))


@triton.jit
def row_start(row, steps):
    """Returns where a row's words begin, in pairs; each further step is 128 pairs later (mxfp4.py)."""
    return row // 8 * (steps * 128) + row % 8 * 16


@triton.jit
def _unpack_kernel(
    pairs, exponents, out, R, G, exponents_row, ROWS: tl.constexpr, WIDTH: tl.constexpr, ASM: tl.constexpr
):
    """A thread decodes one of the four numbers of neighbouring words, so that it writes contiguous numbers."""
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
            _DECODE_ONE,
            "=r,r,r,r",
            [pairs_RN, which, _powers_of_two(exponents_RG, 16, True, ASM)],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
        numbers = _split_pairs(numbers).to(out.dtype.element_ty, bitcast=True)
    else:
        bits = _split_pairs(pairs_RN).to(tl.int32)
        which = (n % 32 // 8)[None, :]
        bits = tl.where(which == 3, _fourth_bits(bits), (bits << which * 3) & 0x81C0)
        numbers = _to_number(bits, _powers_of_two(exponents_RG, 32, True, ASM), out.dtype.element_ty)
    tl.store(out + r[:, None] * (32 * G) + n[None, :], numbers, mask=(r < R)[:, None] & (n < 32 * G)[None, :])


def uses_ptx(dtype: torch.dtype) -> bool:
    return dtype == torch.bfloat16 and HAVE_PTX


def packed_weights(experts: ExpertWeights, paired: bool) -> tuple[PackedWeights, Tensor, Tensor | None]:
    """Returns weights, their words in pairs, and bias: of the second GEMM if `paired`, else of the gated first one."""
    w, bias = experts.gate_up_EXD, experts.gate_up_bias_EX
    if paired:
        w, bias = experts.down_EDI, experts.down_bias_ED
    assert isinstance(w, PackedWeights) and w.words_ERW.is_contiguous() and w.exponents_ERG.is_contiguous()
    assert bias is None or bias.is_contiguous()
    return w, w.words_ERW.view(torch.int32), bias


def unpack_words_triton(words_ERW: Tensor, exponents_ERG: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    assert words_ERW.is_contiguous() and exponents_ERG.is_contiguous()
    count, rows, _ = words_ERW.shape
    out = words_ERW.new_empty(count, rows, columns, dtype=dtype)
    grid = (triton.cdiv(count * rows, ROWS), triton.cdiv(columns, WIDTH))
    args = (words_ERW.view(torch.int32), exponents_ERG, out, count * rows, columns // BLOCK, exponents_ERG.shape[2])
    _unpack_kernel[grid](*args, ROWS=ROWS, WIDTH=WIDTH, ASM=uses_ptx(dtype), num_warps=4)
    return out
