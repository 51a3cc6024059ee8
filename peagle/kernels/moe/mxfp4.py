"""Weights of four bits: MXFP4, two numbers to a byte and a power of 2 for every 32 of them along the input.

Files have neighbours side by side. Here four numbers make a word of 16 bits, those that lie 8 places apart, so that a
kernel has its numbers two to a register without moving any, in the order in which a product of matrices wants them. For
a block of 8 instead of 32, numbers a to h: files have ab cd ef gh (the first is the lower half of its byte), this has
aceg bdfh. Within a word of numbers a to d, capitals for signs, bits lie as ADdBddCaaabbbccc: one shift brings those of
each of the first three to where a bf16 has them, and three bring the last one's (its high, low and middle bit).

Rows go by eights and columns by steps of 128: first what all eight have in the first step, 64 bytes each, one row after
the other, then what they have in the second, and so on; the last step is filled up with zeros. So a warp that reads a
step of eight rows finds 512 bytes in one piece. Of rows that lie apart it would get 64 bytes at a time, and that took a
third longer on an H200. Rows of exponents are filled up to whole runs of 16 bytes, so that a kernel can fetch several
at once.

Every such number is exact in bf16. What an exponent of 0, 2^-127, belongs to a kernel may take for 0.

Shapes: E experts, R rows of one, K columns, W = K / 4 words, G = K / 32 blocks, or more as said.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from peagle.kernels.triton_utils import HAVE_TRITON, INTERPRETED

BLOCK = 32  # numbers that share an exponent
HEIGHT = 8  # rows whose words lie together
STEP = 128  # columns that do
RUN = 16  # exponents that a row has a multiple of
BIAS = 127  # of the exponent as it is stored

# An exponent up to which a kernel has a number in one product; weights of 12 and more have larger ones.
MAX_EXPONENT = 128

# What four bits mean: a sign, two bits of exponent, one of fraction.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class PackedWeights:
    """Takes the place of a tensor [E, R, K]."""

    words_ERW: Tensor  # int16; in what order those of eight rows lie stands above
    exponents_ERG: Tensor  # uint8
    columns: int

    def __len__(self) -> int:
        return len(self.words_ERW)

    @property
    def shape(self) -> tuple[int, int, int]:
        count, rows, _ = self.words_ERW.shape
        return count, rows, self.columns

    def __getitem__(self, e: int) -> Tensor:
        """One expert's weights in bf16."""
        return unpacked(self.words_ERW[e], self.exponents_ERG[e], self.columns)


def packed_widths(columns: int) -> tuple[int, int]:
    """Words and exponents of a row."""
    assert columns % BLOCK == 0
    return -(-columns // STEP) * STEP // 4, -(-columns // BLOCK // RUN) * RUN


def pack_words(blocks: Tensor) -> Tensor:
    """[..., R, G, 16] bytes as files have them -> [..., R, W], filled up; R is a multiple of HEIGHT."""
    numbers = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)
    first, second, third, fourth = numbers.to(torch.int16).chunk(4, -1)
    words = (first & 7) << 6 | (first & 8) << 12
    words |= (second & 7) << 3 | (second & 8) << 9
    words |= (third & 7) | (third & 8) << 6
    words |= (fourth & 13) << 11 | (fourth & 2) << 9
    filled = F.pad(words.flatten(-2), (0, -words.shape[-2] * 8 % (STEP // 4)))
    return filled.unflatten(-1, (-1, STEP // 4)).unflatten(-3, (-1, HEIGHT)).transpose(-3, -2).reshape(filled.shape)


def zero_padding(weights: PackedWeights) -> None:
    """Kernels count on zeros behind the last column; for words that are drawn by lot."""
    if used := weights.columns % STEP // 4:
        count, rows, _ = weights.words_ERW.shape
        steps = weights.words_ERW.view(count, rows // HEIGHT, -1, HEIGHT, STEP // 4)
        steps[:, :, -1, :, used:] = 0


def pad_exponents(scales: Tensor) -> Tensor:
    """[..., G] as files have them -> filled up."""
    return F.pad(scales, (0, -scales.shape[-1] % RUN))


def unpacked(words: Tensor, exponents: Tensor, columns: int) -> Tensor:
    """[..., R, W] words and [..., R, G] exponents -> [..., R, K], bf16."""
    rows, width = words.shape[-2:]
    by_eights = words.reshape(*words.shape[:-2], rows // HEIGHT, -1, HEIGHT, STEP // 4)
    in_rows = by_eights.transpose(-3, -2).reshape(*words.shape[:-2], rows, width)
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
    """[..., G, 32] numbers of four bits and [..., G] exponents -> [..., K], bf16."""
    table = torch.tensor([*E2M1, *(-x for x in E2M1)], dtype=torch.float32, device=codes.device)
    return torch.ldexp(table[codes.int()], exponents.int()[..., None] - BIAS).flatten(-2).bfloat16()


def whole(weights: Tensor | PackedWeights, dtype: torch.dtype) -> Tensor:
    """[E, R, K]: all experts; packed ones in `dtype`, without asking the host for anything."""
    if isinstance(weights, Tensor):
        return weights
    if weights.words_ERW.is_cuda and HAVE_TRITON and not INTERPRETED:
        from peagle.kernels.moe.mxfp4_triton import unpacked_triton

        return unpacked_triton(weights.words_ERW, weights.exponents_ERG, weights.columns, dtype)
    return unpacked(weights.words_ERW, weights.exponents_ERG, weights.columns).to(dtype)
