"""Noise of sampling as a pure function of (seed, position, token): the Philox generator in plain torch and Triton.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), as in tl.philox. One call makes four
words, which four tokens share: in each block of 4096 ids, those that are equal modulo 1024. The four are a fixed
distance apart, so the GPU needs no exchange between threads.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

import torch
from torch import Tensor

from peagle.kernels.triton_utils import HAVE_TRITON

LANES = 1024  # Philox calls per block of tokens
BLOCK = 4 * LANES
# The purpose of a draw is a part of Philox's counter, so that no two purposes share a word.
SAMPLE_STREAM, ACCEPT_STREAM = 0, 1

_MASK = 0xFFFFFFFF
_LARGEST_UNIFORM = 1.0 - 2.0**-24  # the largest fp32 below 1
_SERIES_LIMIT = 1.0 / 16.0  # below this, -log(1 - w) is summed as a series, since 1 - w would lose bits of w

if HAVE_TRITON:
    import triton
    from triton import language as tl

    @triton.jit
    def philox_words(seed, position, call, STREAM: tl.constexpr):
        """Returns four words for each Philox call of a block; seed is a scalar, position a scalar or a block."""
        zero = call * 0
        return tl.philox(seed, call, zero + position.to(tl.int32), zero, zero + STREAM)

    @triton.jit
    def uniform(bits):
        """Computes `uniform_torch` of a block of uint32."""
        return tl.minimum(bits.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10, 0.99999994)

    @triton.jit
    def gumbel(bits):
        """Computes `gumbel_torch` of a block of uint32."""
        w = uniform(bits)
        series = 0.25 + w * (0.2 + w * 0.16666666666666666)
        series = w * (1.0 + w * (0.5 + w * (0.3333333333333333 + w * series)))
        return -tl.log(tl.where(w < 0.0625, series, -tl.log(1.0 - w)))


def philox_torch(seed: Tensor, c0: Tensor, c1: Tensor, c2: int, c3: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns four 32-bit words, stored in int64, for each 64-bit seed and counter; the arguments broadcast.

    A product of two 32-bit words wraps around in int64, which loses no bits.
    """
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    c0, c1 = torch.broadcast_tensors(c0 & _MASK, c1 & _MASK)
    x0, x1 = c0, c1
    x2, x3 = torch.full_like(c0, c2), torch.full_like(c0, c3)
    for _ in range(10):
        a, b = x0 * 0xD2511F53, x2 * 0xCD9E8D57
        x0, x2 = ((b >> 32) & _MASK) ^ x1 ^ k0, ((a >> 32) & _MASK) ^ x3 ^ k1
        x1, x3 = b & _MASK, a & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return x0, x1, x2, x3


def bits_torch(seed: Tensor, position: Tensor, token: Tensor, stream: int = SAMPLE_STREAM) -> Tensor:
    """Returns the 32-bit word of (seed, position, token) in int64; the arguments broadcast."""
    seed, position, token = torch.broadcast_tensors(seed, position, token)
    words = philox_torch(seed, token // BLOCK * LANES + token % LANES, position, 0, stream)
    return torch.stack(words, -1).gather(-1, (token // LANES % 4)[..., None])[..., 0]


def row_bits_torch(seed_R: Tensor, position_R: Tensor, vocab: int) -> Tensor:
    """Returns `bits_torch` of the whole vocabulary [R, V], with one Philox call per four tokens."""
    if vocab <= LANES:
        calls = torch.arange(vocab, device=seed_R.device)
        return philox_torch(seed_R[:, None], calls, position_R[:, None], 0, SAMPLE_STREAM)[0]
    blocks = -(-vocab // BLOCK)
    calls = torch.arange(blocks * LANES, device=seed_R.device)
    words = philox_torch(seed_R[:, None], calls[None, :], position_R[:, None], 0, SAMPLE_STREAM)
    return torch.stack([w.unflatten(1, (blocks, LANES)) for w in words], 2).flatten(1)[:, :vocab]


def uniform_torch(bits: Tensor) -> Tensor:
    """Maps a 32-bit word to fp32 strictly between 0 and 1: all 32 bits count near 0, 24 near 1."""
    return (bits.float() * 2.0**-32 + 2.0**-33).clamp(max=_LARGEST_UNIFORM)


def gumbel_torch(bits: Tensor) -> Tensor:
    """Returns Gumbel noise -log(-log(u)) in fp32 for u = 1 - uniform(bits).

    Large noise decides the argmax, and it comes from u close to 1, where fp32 is coarse. So u is represented by its
    distance w from 1, and for small w, -log(u) by the series of -log(1 - w): the largest noise is 23.
    """
    w = uniform_torch(bits)
    series = w * (1 + w * (1 / 2 + w * (1 / 3 + w * (1 / 4 + w * (1 / 5 + w * (1 / 6))))))
    return -torch.where(w < _SERIES_LIMIT, series, -torch.log(1 - w)).log()
