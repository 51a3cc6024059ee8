# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, check-untyped-defs=False
"""Unpacks MXFP4 words (mxfp4.py) in Triton: a tile in registers for a GEMM, or whole tensors.

The four bits of a number, with the sign moved to a float's sign bit and the others across the border of exponent and
fraction, are that number times 2^-126, or a subnormal one if its exponent bits are zero. Multiplied by 2^126 and by the
block's power of 2 it is exact. Up to MAX_EXPONENT both factors are one multiplication. This is done in PTX for two bf16
numbers per register; plain Triton, which the interpreter runs, would need many more instructions, and unpacking would
take longer than loading. On Hopper the bit operations dominate: they run at half the rate of multiplications.

Words are loaded in pairs: the two words of a register are neighbours and share a power of 2. If single words were
loaded, Triton would pair any two that a thread holds, possibly of different blocks or rows.

Shapes as in mxfp4.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.moe.mxfp4 import BLOCK
from peagle.kernels.triton_utils import INTERPRETED

# Decodes two words ($4) with their power of 2 in bf16, given twice ($5), into four pairs of numbers ($0 to $3). A
# number's bits belong where 0x81C0 has ones. fma with -0.0 is a plain multiplication.
_DECODE = tl.constexpr(
    """{ .reg .b32 u, v, nothing; mov.b32 nothing, 0x80008000;

    and.b32 $0, $4, 0x81C081C0;
    shl.b32 u, $4, 3;
    and.b32 $1, u, 0x81C081C0;
    shl.b32 u, $4, 6;
    and.b32 $2, u, 0x81C081C0;

    shl.b32 u, $4, 1;
    and.b32 v, u, 0x80008000;
    shr.u32 u, $4, 3;
    lop3.b32 v, u, 0x00800080, v, 0xEA;
    shr.u32 u, $4, 5;
    lop3.b32 $3, u, 0x01400140, v, 0xEA;
"""
    + "".join(f"fma.rn.bf16x2 ${i}, ${i}, $5, nothing;\n" for i in range(4))
    + "}"
)
FOUR_WORDS = tl.constexpr((tl.int32,) * 4)
ROWS, WIDTH = 8, 1024  # tile of `unpack_words_triton`
HAVE_PTX = not INTERPRETED and torch.version.cuda is not None


@triton.jit
def _multiply_halves(bits, powers):
    low = (bits << 16).to(tl.float32, bitcast=True) * (powers << 16).to(tl.float32, bitcast=True)
    high = (bits & -65536).to(tl.float32, bitcast=True) * (powers & -65536).to(tl.float32, bitcast=True)
    return ((low.to(tl.int32, bitcast=True) >> 16) & 65535) | (high.to(tl.int32, bitcast=True) & -65536)


@triton.jit
def decode(pairs, powers, ASM: tl.constexpr):
    """Decodes pairs of words with their power of 2, given twice, into four pairs of bf16 numbers."""
    if ASM:
        return tl.inline_asm_elementwise(
            _DECODE, "=&r,=&r,=&r,=&r,r,r", [pairs, powers], dtype=FOUR_WORDS, is_pure=True, pack=1
        )
    else:
        fourth = ((pairs << 1) & -2147450880) | ((pairs >> 3) & 0x00800080) | ((pairs >> 5) & 0x01400140)
        return (
            _multiply_halves(pairs & -2118090304, powers),
            _multiply_halves((pairs << 3) & -2118090304, powers),
            _multiply_halves((pairs << 6) & -2118090304, powers),
            _multiply_halves(fourth, powers),
        )


@triton.jit
def _split_pairs(pairs, DTYPE: tl.constexpr):
    """Splits pairs of bf16 numbers [N, P] into numbers [N, 2 P], low half first."""
    N: tl.constexpr = pairs.shape[0]
    P: tl.constexpr = pairs.shape[1]
    halves = tl.reshape(tl.join(pairs.to(tl.int16), (pairs >> 16).to(tl.int16)), (N, 2 * P))
    return halves.to(tl.bfloat16, bitcast=True).to(DTYPE)


@triton.jit
def _unpack(pairs, exponents, ASM: tl.constexpr, DTYPE: tl.constexpr):
    """Unpacks pairs of words [N, 4 G] and exponents [N, G] into numbers [N, G, 4, 2, 2, 2].

    The last four axes are the pair, the word of the pair, and the number of the word: its low bit, then its high bit.
    """
    N: tl.constexpr = exponents.shape[0]
    G: tl.constexpr = exponents.shape[1]
    powers = exponents.to(tl.int32) * 0x00800080 + 126 * 0x00800080  # times 2^126, in bf16 and twice
    powers = tl.reshape(tl.broadcast_to(powers[:, :, None], (N, G, 4)), (N, G * 4))
    first, second, third, fourth = decode(pairs, powers, ASM)
    first, second = _split_pairs(first, DTYPE), _split_pairs(second, DTYPE)
    third, fourth = _split_pairs(third, DTYPE), _split_pairs(fourth, DTYPE)
    numbers = tl.join(tl.join(first, second), tl.join(third, fourth))
    return tl.reshape(numbers, (N, G, 4, 2, 2, 2))


@triton.jit
def unpack_tile(pairs, exponents, ASM: tl.constexpr, DTYPE: tl.constexpr):
    """Unpacks pairs of words [N, 4 G] and exponents [N, G] into numbers [N, 32 G] with permuted columns.

    The permutation puts the same columns of all blocks side by side (mxfp4_few_rows_triton.py). Threads keep their
    registers: it only relabels which number each one is.
    """
    N: tl.constexpr = exponents.shape[0]
    G: tl.constexpr = exponents.shape[1]
    return tl.reshape(tl.permute(_unpack(pairs, exponents, ASM, DTYPE), (0, 2, 5, 4, 1, 3)), (N, 32 * G))


@triton.jit
def row_start(row, steps):
    """Returns where a row's words begin, in pairs; each further step is 128 pairs later (mxfp4.py)."""
    return row // 8 * (steps * 128) + row % 8 * 16


@triton.jit
def _load_order(i, BLOCK_N: tl.constexpr):
    """Returns which row of a weight tile is loaded as the i-th.

    Triton deals groups of eight loaded rows to the warps in turn, and the MMA needs two adjacent groups from each warp.
    """
    return i % (BLOCK_N // 2) // 8 * 16 + i // (BLOCK_N // 2) * 8 + i % 8


@triton.jit
def _restore_order(tile):
    """Puts the rows of a tile loaded in `_load_order` back in order, without moving data between threads."""
    N: tl.constexpr = tile.shape[0]
    W: tl.constexpr = tile.shape[1]
    return tl.reshape(tl.permute(tl.reshape(tile, (2, N // 16, 8, W)), (1, 0, 2, 3)), (N, W))


@triton.jit
def _wait_for_mma(sums, ASM: tl.constexpr):
    """Reads an MMA's sums at once. Otherwise Triton overlaps it with the next step, which may unpack its weights into
    registers that the MMA still reads."""
    if ASM:
        sums = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [sums], dtype=tl.float32, is_pure=True, pack=1)
    return sums


@triton.jit
def mxfp4_sums(x, w, exponents, e, block, source, hit, N, K, x_row, exponents_row, PAIRED, BLOCK_M, BLOCK_N, ASM):
    """Returns a tile's sums over K for weights unpacked in registers: of outputs and, unless PAIRED, of ups."""
    BLOCK_K: tl.constexpr = 128
    # Programs past the last weight row read it again, without a mask in the loop, and do not store the result.
    read = block * BLOCK_N + _load_order(tl.arange(0, BLOCK_N), BLOCK_N)
    rows = e.to(tl.int64) * N * (1 if PAIRED else 2) + tl.minimum(read, N - 1)
    k = tl.arange(0, BLOCK_K)
    two = tl.arange(0, BLOCK_K // 8)
    x_at = x + source[None, :] * x_row + k[:, None]
    whole_steps = tl.cdiv(K, BLOCK_K)
    w_at = w + row_start(rows, whole_steps)[:, None] + two[None, :]
    # Rows of exponents are padded, so no step reads past one.
    s_at = exponents + rows[:, None] * exponents_row + tl.arange(0, BLOCK_K // 32)[None, :]
    ups = (e * 0 + N).to(tl.int64)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    # Columns that only pad y have no sums.
    steps = tl.where(block * BLOCK_N < N, whole_steps, 0)
    # Too few bytes for an asynchronous copy: loaded one step ahead.
    powers = tl.load(s_at)
    up_powers = powers if PAIRED else tl.load(s_at + ups * exponents_row)
    for step in range(0, steps):
        rows_x = tl.load(x_at + step * BLOCK_K, mask=hit[None, :], other=0.0)
        w_step = w_at + step * 128
        pairs = tl.load(w_step)
        s_next = s_at + tl.minimum(step + 1, steps - 1) * (BLOCK_K // 32)
        numbers = unpack_tile(_restore_order(pairs), _restore_order(powers), ASM, x.dtype.element_ty)
        powers = tl.load(s_next)
        acc = _wait_for_mma(tl.dot(numbers, rows_x, acc, input_precision="ieee"), ASM)
        if not PAIRED:
            pairs = tl.load(w_step + row_start(ups, whole_steps))
            numbers = unpack_tile(_restore_order(pairs), _restore_order(up_powers), ASM, x.dtype.element_ty)
            up_powers = tl.load(s_next + ups * exponents_row)
            up = _wait_for_mma(tl.dot(numbers, rows_x, up, input_precision="ieee"), ASM)
    return acc, up


@triton.jit
def _unpack_kernel(
    pairs, exponents, out, R, G, exponents_row, ROWS: tl.constexpr, WIDTH: tl.constexpr, ASM: tl.constexpr
):
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    two = tl.program_id(1) * (WIDTH // 8) + tl.arange(0, WIDTH // 8)
    g = tl.program_id(1) * (WIDTH // 32) + tl.arange(0, WIDTH // 32)
    known = (r < R)[:, None] & (two < 4 * G)[None, :]
    in_row = two // 16 * 128 + two % 16
    pairs_RN = tl.load(pairs + row_start(r, tl.cdiv(G, 4))[:, None] + in_row[None, :], mask=known, other=0)
    its = exponents + r[:, None] * exponents_row + g[None, :]
    exponents_RG = tl.load(its, mask=(r < R)[:, None] & (g < exponents_row)[None, :], other=0)
    numbers = tl.permute(_unpack(pairs_RN, exponents_RG, ASM, out.dtype.element_ty), (0, 1, 5, 4, 2, 3))
    to = out + r[:, None] * (32 * G) + n[None, :]
    tl.store(to, tl.reshape(numbers, (ROWS, WIDTH)), mask=(r < R)[:, None] & (n < 32 * G)[None, :])


def unpack_words_triton(words_ERW: Tensor, exponents_ERG: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    assert words_ERW.is_contiguous() and exponents_ERG.is_contiguous()
    count, rows, _ = words_ERW.shape
    out = words_ERW.new_empty(count, rows, columns, dtype=dtype)
    grid = (triton.cdiv(count * rows, ROWS), triton.cdiv(columns, WIDTH))
    args = (words_ERW.view(torch.int32), exponents_ERG, out, count * rows, columns // BLOCK, exponents_ERG.shape[2])
    _unpack_kernel[grid](*args, ROWS=ROWS, WIDTH=WIDTH, ASM=HAVE_PTX, num_warps=4)
    return out
