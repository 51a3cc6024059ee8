"""The MXFP4 weight layout: packing, unpacking in plain torch, and the type that holds packed weights.

MXFP4 stores numbers of four bits (E2M1) with one power of 2 for every block of 32 along the input. Checkpoint files
store neighbours side by side, two to a byte. Here a 16-bit word holds four numbers that lie 8 columns apart, so that a
kernel gets its numbers two to a register, in the order in which an MMA needs them, without moving any.

Example with a block of 8 instead of 32, numbers a to h: files store ab cd ef gh (the first is the low half of its
byte), this layout stores aceg bdfh. Within a word of numbers a to d, with capitals for signs, the bits are
ADdBddCaaabbbccc: one shift moves those of a, b or c to where bf16 has them, and three move those of d (high, low and
middle bit).

Rows are grouped by ROW_GROUP = 8 and columns by COLUMN_STEP = 128: first the first step of all eight rows, 64 bytes
each, one row after the other, then the second step, and so on; the last step is padded with zeros. So a warp that reads
one step of eight rows reads 512 contiguous bytes; with separate rows it would read 64 bytes at a time, which took a
third longer on an H200. Exponents of a row are padded to a multiple of 16 bytes, so that a kernel can load several at
once.

Every number is exact in bf16. Kernels may treat numbers with exponent 0 (2^-127) as 0.

Shapes: E experts, R rows, K columns, W = K / 4 words and G = K / 32 exponents per row, both before padding.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK = 32  # numbers that share an exponent
ROW_GROUP = 8  # rows that are stored together
COLUMN_STEP = 128  # columns that are stored together
EXPONENT_RUN = 16  # a row's exponents are padded to a multiple of this
EXPONENT_BIAS = 127

# Largest stored exponent that kernels support: up to here they decode a number by one multiplication. Only weights of
# absolute value 12 or more have larger ones.
MAX_EXPONENT = 128

# Values of the E2M1 codes without sign: two bits of exponent, one of fraction.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class PackedWeights:
    """MXFP4 weights in place of a tensor [E, R, K]."""

    words_ERW: Tensor  # int16
    exponents_ERG: Tensor  # uint8
    columns: int

    def __len__(self) -> int:
        return len(self.words_ERW)

    @property
    def shape(self) -> tuple[int, int, int]:
        count, rows, _ = self.words_ERW.shape
        return count, rows, self.columns

    def __getitem__(self, e: int) -> Tensor:
        """Returns one expert's weights in bf16."""
        return unpack_words(self.words_ERW[e], self.exponents_ERG[e], self.columns)


def packed_widths(columns: int) -> tuple[int, int]:
    """Returns the padded numbers of words and of exponents in a row."""
    assert columns % BLOCK == 0
    return -(-columns // COLUMN_STEP) * COLUMN_STEP // 4, -(-columns // BLOCK // EXPONENT_RUN) * EXPONENT_RUN


def pack_words(blocks: Tensor) -> Tensor:
    """Packs bytes [..., R, G, 16] of a checkpoint into words [..., R, W]; R is a multiple of ROW_GROUP."""
    numbers = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)
    first, second, third, fourth = numbers.to(torch.int16).chunk(4, -1)
    words = (first & 7) << 6 | (first & 8) << 12
    words |= (second & 7) << 3 | (second & 8) << 9
    words |= (third & 7) | (third & 8) << 6
    words |= (fourth & 13) << 11 | (fourth & 2) << 9
    padded = F.pad(words.flatten(-2), (0, -words.shape[-2] * 8 % (COLUMN_STEP // 4)))
    steps = padded.unflatten(-1, (-1, COLUMN_STEP // 4)).unflatten(-3, (-1, ROW_GROUP))
    return steps.transpose(-3, -2).reshape(padded.shape)


def pad_exponents(scales: Tensor) -> Tensor:
    """Pads a checkpoint's exponents [..., G] to a multiple of EXPONENT_RUN."""
    return F.pad(scales, (0, -scales.shape[-1] % EXPONENT_RUN))


def unpack_words(words: Tensor, exponents: Tensor, columns: int) -> Tensor:
    """Unpacks words [..., R, W] and exponents [..., R, G] into bf16 weights [..., R, K]."""
    rows, width = words.shape[-2:]
    grouped = words.reshape(*words.shape[:-2], rows // ROW_GROUP, -1, ROW_GROUP, COLUMN_STEP // 4)
    in_rows = grouped.transpose(-3, -2).reshape(*words.shape[:-2], rows, width)
    bits = in_rows[..., : columns // 4].unflatten(-1, (-1, BLOCK // 4))
    numbers = (
        bits >> 6 & 7 | bits >> 12 & 8,
        bits >> 3 & 7 | bits >> 9 & 8,
        bits & 7 | bits >> 6 & 8,
        bits >> 11 & 13 | bits >> 9 & 2,
    )
    codes = torch.cat(numbers, -1)
    return dequantize(codes, exponents[..., : codes.shape[-2]])


def dequantize(codes: Tensor, exponents: Tensor) -> Tensor:
    """Converts E2M1 codes [..., G, 32] and exponents [..., G] to bf16 weights [..., K]."""
    table = torch.tensor([*E2M1, *(-x for x in E2M1)], dtype=torch.float32, device=codes.device)
    return torch.ldexp(table[codes.int()], exponents.int()[..., None] - EXPONENT_BIAS).flatten(-2).bfloat16()
