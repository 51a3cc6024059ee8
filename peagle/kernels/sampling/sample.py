"""Which token each row of logits says: the largest logit, or a seeded draw shaped by temperature and filters.

Knows nothing about drafts, requests or models. Shapes: R rows, V vocabulary.

The noise of a draw is a pure function of (seed, position of the token being chosen, token id). Two things follow.

Exactness. Let p be a row's shaped distribution. The argmax of logits / temperature + Gumbel noise is a draw x from p
(the Gumbel-max identity). A greedy draft d was made without looking at that noise, and keeping it if and only if
x == d is exact rejection sampling: d holds with probability p(d), which is min(1, p(d) / q(d)) for the one-hot q of a
greedy draft, and where it falls x has the distribution of p without d, which is max(p - q, 0) normalised.

Sameness. Either way the text gains x, and x depends on nothing but the logits, the seed and the position. So a seeded
sampled text is the same, token for token, with and without speculation, for every number of drafts, in every batch,
as far as the logits are: rounding that differs between shapes can tip a near-tie, as it can for greedy text.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from peagle.kernels.triton_utils import pdl_launch_options

try:
    import triton
    from triton import language as tl
except ImportError:  # no wheel for this machine: the torch versions serve
    triton = None

_jit = triton.jit if triton is not None else lambda kernel: kernel

# Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), as in tl.philox. One call makes
# four words, so four tokens share it: in each block of 4096 ids, those that are equal modulo 1024. That keeps the four
# a fixed distance apart, which needs no shuffling of lanes on the GPU.
LANES = 1024
BLOCK = 4 * LANES
SAMPLE_STREAM, ACCEPT_STREAM = 0, 1  # streams: who asks is a part of the counter, so no two uses share a word

_MASK = 0xFFFFFFFF
_LARGEST = 1.0 - 2.0**-24  # the largest fp32 below 1
_SERIES = 1.0 / 16.0  # below this -log(1 - w) is summed, as 1 - w would round away what is left of w


def philox_torch(seed: Tensor, c0: Tensor, c1: Tensor, c2: int, c3: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four words of 32 bits, held in int64, for each seed (64 bits) and counter; the arguments broadcast.

    A product of two 32-bit words wraps around in int64, which loses no bit of it.
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
    """The word of 32 bits, in int64, that belongs to (seed, position, token); the arguments broadcast."""
    seed, position, token = torch.broadcast_tensors(seed, position, token)
    words = philox_torch(seed, token // BLOCK * LANES + token % LANES, position, 0, stream)
    return torch.stack(words, -1).gather(-1, (token // LANES % 4)[..., None])[..., 0]


def row_bits_torch(seed_R: Tensor, position_R: Tensor, vocab: int) -> Tensor:
    """bits_torch of every token of the vocabulary [R, V], with one Philox call for four tokens."""
    if vocab <= LANES:
        return philox_torch(
            seed_R[:, None], torch.arange(vocab, device=seed_R.device), position_R[:, None], 0, SAMPLE_STREAM
        )[0]
    blocks = -(-vocab // BLOCK)
    calls = torch.arange(blocks * LANES, device=seed_R.device)
    words = philox_torch(seed_R[:, None], calls[None, :], position_R[:, None], 0, SAMPLE_STREAM)
    return torch.stack([w.unflatten(1, (blocks, LANES)) for w in words], 2).flatten(1)[:, :vocab]


def uniform_torch(bits: Tensor) -> Tensor:
    """A word of 32 bits -> fp32 strictly between 0 and 1: all 32 bits count near 0, 24 near 1."""
    return (bits.float() * 2.0**-32 + 2.0**-33).clamp(max=_LARGEST)


def gumbel_torch(bits: Tensor) -> Tensor:
    """-log(-log(u)) in fp32 for u = 1 - uniform(bits).

    Large noise decides who wins, and it comes from u close to 1, where fp32 is coarse. So u is given by its distance
    w from 1, and -log(u) for small w by the series of -log(1 - w): the largest noise is 23, in steps of 2^-32.
    """
    w = uniform_torch(bits)
    series = w * (1 + w * (1 / 2 + w * (1 / 3 + w * (1 / 4 + w * (1 / 5 + w * (1 / 6))))))
    return -torch.where(w < _SERIES, series, -torch.log(1 - w)).log()


def argmax_torch(logits_RV: Tensor) -> Tensor:
    if logits_RV.is_cuda:
        return logits_RV.argmax(-1)
    logits = logits_RV.detach()
    if logits.dtype != torch.float64:
        logits = logits.float()  # numpy has no bf16
    return torch.from_numpy(logits.numpy().argmax(-1))  # the same as torch's, 10 times as fast


def cuts_torch(logits_RV: Tensor, temperature_R: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor) -> Tensor:
    """The least logit that a row keeps, -inf where it keeps all: fp32 [R]. Reads values: for the CPU."""
    vocab = logits_RV.shape[1]
    cuts = torch.full((len(logits_RV),), -math.inf, device=logits_RV.device)
    rows = zip(*(x.tolist() for x in (temperature_R, top_k_R, top_p_R, min_p_R)), strict=True)
    for r, (temperature, top_k, top_p, min_p) in enumerate(rows):
        some_k = 0 < top_k < vocab
        if temperature <= 0 or not (some_k or top_p < 1 or min_p > 0):
            continue
        logits = logits_RV[r].float()
        best, cut = logits.max(), cuts[r]
        if min_p > 0:
            cut = best + temperature * math.log(min_p)
        if some_k:
            cut = torch.maximum(cut, logits.topk(int(top_k)).values[-1])
        if top_p < 1:
            need = top_p * ((logits[logits >= cut] - best) / temperature).exp().sum()
            for most in (1024, vocab):  # a peaked row is done with the first, which is ten times as fast
                kept = logits.topk(min(most, vocab)).values
                mass = ((kept[kept >= cut] - best) / temperature).exp().cumsum(0)
                if mass[-1] >= need:
                    break
            # The first token at which the mass reaches top_p is the last one kept, along with its equals.
            cut = kept[int((mass < need).sum().clamp(max=len(mass) - 1))]
        cuts[r] = cut
    return cuts


def sample_tokens_torch(
    logits_RV: Tensor,
    temperature_R: Tensor,
    top_k_R: Tensor,
    top_p_R: Tensor,
    min_p_R: Tensor,
    seed_R: Tensor,
    position_R: Tensor,
) -> Tensor:
    tokens = argmax_torch(logits_RV)
    drawn = (temperature_R > 0).nonzero()[:, 0]
    if len(drawn) == 0:
        return tokens
    temperature, seed, position = temperature_R[drawn].float(), seed_R[drawn], position_R[drawn]
    logits = logits_RV[drawn].float()
    cuts = cuts_torch(logits, temperature, top_k_R[drawn], top_p_R[drawn], min_p_R[drawn])
    keep = logits >= cuts[:, None]
    # Times the temperature instead of logits divided by it: the same order, and no overflow when it is tiny.
    if int(keep.sum()) < keep.numel() // 8:  # few are left: noise for these alone
        row, token = keep.nonzero(as_tuple=True)
        scores = torch.full_like(logits, -math.inf)
        noise = gumbel_torch(bits_torch(seed[row], position[row], token))
        scores[row, token] = logits[row, token] + temperature[row] * noise
    else:
        noise = gumbel_torch(row_bits_torch(seed, position, logits.shape[1]))
        scores = (logits + temperature[:, None] * noise).masked_fill(~keep, -math.inf)
    tokens[drawn] = argmax_torch(scores)
    return tokens


@_jit
def _words(seed: tl.tensor, position: tl.tensor, call: tl.tensor, STREAM: tl.constexpr) -> tl.tensor:
    """Four words for each of a block of Philox calls; seed is a scalar, position a scalar or a block."""
    zero = call * 0
    return tl.philox(seed, call, zero + position.to(tl.int32), zero, zero + STREAM)


@_jit
def _uniform(bits: tl.tensor) -> tl.tensor:
    """uniform_torch of a block of uint32."""
    return tl.minimum(bits.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10, 0.99999994)


@_jit
def _gumbel(bits: tl.tensor) -> tl.tensor:
    """gumbel_torch of a block of uint32."""
    w = _uniform(bits)
    series = 0.25 + w * (0.2 + w * 0.16666666666666666)
    series = w * (1.0 + w * (0.5 + w * (0.3333333333333333 + w * series)))
    return -tl.log(tl.where(w < 0.0625, series, -tl.log(1.0 - w)))


@_jit
def _best_kernel(
    logits: tl.tensor,
    stride: tl.tensor,
    vocab: tl.tensor,
    temperature: tl.tensor,
    cuts: tl.tensor,
    seed: tl.tensor,
    position: tl.tensor,
    best: tl.tensor,
    best_at: tl.tensor,
    chunks: tl.tensor,
    SAMPLE: tl.constexpr,
    STREAM: tl.constexpr,
    LANES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """The best score of one row in one chunk of 4 * LANES tokens, and the lowest token that has it.

    The chunk is read as four blocks of LANES tokens, since token i of each of them takes one word of Philox call i.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    lane = tl.arange(0, LANES)
    i0 = chunk * (4 * LANES) + lane
    i1 = i0 + LANES
    i2 = i1 + LANES
    i3 = i2 + LANES
    start = logits + row * stride
    x0 = tl.load(start + i0, mask=i0 < vocab, other=-float("inf")).to(tl.float32)
    x1 = tl.load(start + i1, mask=i1 < vocab, other=-float("inf")).to(tl.float32)
    x2 = tl.load(start + i2, mask=i2 < vocab, other=-float("inf")).to(tl.float32)
    x3 = tl.load(start + i3, mask=i3 < vocab, other=-float("inf")).to(tl.float32)
    if SAMPLE:
        t = tl.load(temperature + row).to(tl.float32)
        if t > 0.0:  # greedy rows pay for no noise
            cut = tl.load(cuts + row)
            n0, n1, n2, n3 = _words(tl.load(seed + row), tl.load(position + row), chunk * LANES + lane, STREAM)
            x0 = tl.where(x0 >= cut, x0 + t * _gumbel(n0), -float("inf"))
            x1 = tl.where(x1 >= cut, x1 + t * _gumbel(n1), -float("inf"))
            x2 = tl.where(x2 >= cut, x2 + t * _gumbel(n2), -float("inf"))
            x3 = tl.where(x3 >= cut, x3 + t * _gumbel(n3), -float("inf"))
    most = tl.max(tl.maximum(tl.maximum(x0, x1), tl.maximum(x2, x3)), 0)
    far = 2147483647
    first = tl.minimum(tl.where(x0 == most, i0, far), tl.where(x1 == most, i1, far))
    first = tl.minimum(first, tl.minimum(tl.where(x2 == most, i2, far), tl.where(x3 == most, i3, far)))
    tl.store(best + row * chunks + chunk, most)
    tl.store(best_at + row * chunks + chunk, tl.min(first, 0))


@_jit
def _best_of_chunks_kernel(
    best: tl.tensor,
    best_at: tl.tensor,
    tokens: tl.tensor,
    chunks: tl.tensor,
    vocab: tl.tensor,
    CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, CHUNKS)
    inside = lane < chunks
    x = tl.load(best + row * chunks + lane, mask=inside, other=-float("inf"))
    at = tl.load(best_at + row * chunks + lane, mask=inside, other=2147483647)
    first = tl.min(tl.where(x == tl.max(x, 0), at, 2147483647), 0)
    tl.store(tokens + row, tl.minimum(first, vocab - 1).to(tl.int64))  # NaN equals nothing: still a token


@_jit
def _between(low: tl.tensor, high: tl.tensor) -> tl.tensor:
    """The fp32 number halfway from low (excluded) to high (included), counting representable numbers."""
    a = low.to(tl.int32, bitcast=True)
    b = high.to(tl.int32, bitcast=True)
    a = a ^ ((a >> 31) & 0x7FFFFFFF)  # integers in the order of the numbers
    b = b ^ ((b >> 31) & 0x7FFFFFFF)
    c = (a | b) - ((a ^ b) >> 1)  # half the sum, rounded up, without overflow
    return (c ^ ((c >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@_jit
def _largest_cut(
    start: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    need: tl.tensor,
    best: tl.tensor,
    inverse: tl.tensor,
    COUNT: tl.constexpr,
    VOCAB: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tl.tensor:
    """The largest c such that the logits >= c weigh at least `need`; those >= low do, and no c above high is asked for.

    Bisection, which also moves the bracket's ends to the nearest logits, so it ends where one value is left: about 7
    steps for bf16, 10 for fp32. Halving values gets there fastest; halving the count of fp32 numbers, which is what
    the 13th step begins to do, surely ends after 32 more.
    """
    step = 0
    while (step < 48) & (low < high):  # bounded even if the logits are not numbers
        middle = low * 0.5 + high * 0.5
        middle = tl.where((step < 12) & (middle > low), middle, _between(low, high))
        mass = tl.zeros([WIDTH], tl.float32)
        above = tl.full([WIDTH], float("inf"), tl.float32)
        below = tl.full([WIDTH], -float("inf"), tl.float32)
        for first in range(0, VOCAB, WIDTH):
            i = first + tl.arange(0, WIDTH)
            x = tl.load(start + i, mask=i < VOCAB, other=-float("inf")).to(tl.float32)
            keep = x >= middle
            if COUNT:
                mass += tl.where(keep, 1.0, 0.0)
            else:
                mass += tl.where(keep, tl.exp((x - best) * inverse), 0.0)
            above = tl.minimum(above, tl.where(keep, x, float("inf")))
            below = tl.maximum(below, tl.where(keep, -float("inf"), x))
        enough = tl.sum(mass, 0) >= need
        lowest = tl.min(above, 0)
        lowest = tl.where(lowest == 0.0, 0.0, lowest)  # -0 counts below 0, but is equal: the step would gain nothing
        low = tl.where(enough, lowest, low)
        high = tl.where(enough, high, tl.max(below, 0))
        step += 1
    return low


@_jit
def _cuts_kernel(
    logits: tl.tensor,
    stride: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    cuts: tl.tensor,
    VOCAB: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """cuts_torch of one row; a row without filters is done at once."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    t = tl.load(temperature + row).to(tl.float32)
    k = tl.load(top_k + row).to(tl.int32)
    p = tl.load(top_p + row).to(tl.float32)
    m = tl.load(min_p + row).to(tl.float32)
    some_k = (k > 0) & (k < VOCAB)
    cut = tl.full([], -float("inf"), tl.float32)
    if (t > 0.0) & (some_k | (p < 1.0) | (m > 0.0)):
        start = logits + row * stride
        above = tl.full([WIDTH], float("inf"), tl.float32)
        below = tl.full([WIDTH], -float("inf"), tl.float32)
        for first in range(0, VOCAB, WIDTH):
            i = first + tl.arange(0, WIDTH)
            x = tl.load(start + i, mask=i < VOCAB, other=-float("inf")).to(tl.float32)
            below = tl.maximum(below, x)
            above = tl.minimum(above, tl.where(i < VOCAB, x, float("inf")))
        best = tl.max(below, 0)
        inverse = 1.0 / tl.maximum(t, 1e-30)
        if m > 0.0:
            cut = best + t * tl.log(m)
        if some_k:
            least = _largest_cut(start, tl.min(above, 0), best, k.to(tl.float32), best, inverse, True, VOCAB, WIDTH)
            cut = tl.maximum(cut, least)
        if p < 1.0:
            mass = tl.zeros([WIDTH], tl.float32)
            for first in range(0, VOCAB, WIDTH):
                i = first + tl.arange(0, WIDTH)
                x = tl.load(start + i, mask=i < VOCAB, other=-float("inf")).to(tl.float32)
                mass += tl.where(x >= cut, tl.exp((x - best) * inverse), 0.0)
            need = p * tl.sum(mass, 0)
            # All tokens below this floor together weigh less than (1 - p) times the likeliest: none is needed.
            floor = best - t * (tl.log(VOCAB * 1.0) - tl.log(1.0 - p) + 1.0)
            cut = _largest_cut(start, tl.maximum(cut, floor), best, need, best, inverse, False, VOCAB, WIDTH)
    tl.store(cuts + row, cut)


def cuts_triton(logits_RV: Tensor, temperature_R: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor) -> Tensor:
    rows, vocab = logits_RV.shape
    assert logits_RV.stride(1) == 1
    cuts = torch.empty(rows, dtype=torch.float32, device=logits_RV.device)
    width = min(triton.next_power_of_2(vocab), 8192)
    _cuts_kernel[(rows,)](
        logits_RV,
        logits_RV.stride(0),
        *(x.contiguous() for x in (temperature_R, top_k_R, top_p_R, min_p_R)),
        cuts,
        VOCAB=vocab,
        WIDTH=width,
        num_warps=32 if width == 8192 else 4,
        **pdl_launch_options(logits_RV.device),
    )
    return cuts


def _best_triton(logits_RV: Tensor, draw: tuple[Tensor, Tensor, Tensor, Tensor] | None) -> Tensor:
    """Each row's best token; `draw` is temperature, cuts, seed, position. Partial bests, then the best of those."""
    rows, vocab = logits_RV.shape
    assert logits_RV.stride(1) == 1
    chunks = -(-vocab // BLOCK)
    best = torch.empty(rows, chunks, dtype=torch.float32, device=logits_RV.device)
    best_at = torch.empty(rows, chunks, dtype=torch.int32, device=logits_RV.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits_RV.device)
    how = pdl_launch_options(logits_RV.device)
    _best_kernel[(rows, chunks)](
        logits_RV,
        logits_RV.stride(0),
        vocab,
        *(x.contiguous() for x in draw or (best, best, best_at, best_at)),  # not read without a draw
        best,
        best_at,
        chunks,
        SAMPLE=draw is not None,
        STREAM=SAMPLE_STREAM,
        LANES=LANES,
        num_warps=4,
        **how,
    )
    width = triton.next_power_of_2(chunks)
    _best_of_chunks_kernel[(rows,)](best, best_at, tokens, chunks, vocab, CHUNKS=width, num_warps=1, **how)
    return tokens


def argmax_triton(logits_RV: Tensor) -> Tensor:
    return _best_triton(logits_RV, None)


def sample_tokens_triton(
    logits_RV: Tensor,
    temperature_R: Tensor,
    top_k_R: Tensor,
    top_p_R: Tensor,
    min_p_R: Tensor,
    seed_R: Tensor,
    position_R: Tensor,
) -> Tensor:
    cuts = cuts_triton(logits_RV, temperature_R, top_k_R, top_p_R, min_p_R)
    return _best_triton(logits_RV, (temperature_R, cuts, seed_R, position_R))


def argmax(logits_RV: Tensor) -> Tensor:
    """The token with the largest logit, the lowest id of equals: int64 [R]."""
    return argmax_triton(logits_RV) if logits_RV.is_cuda and triton is not None else argmax_torch(logits_RV)


def sample_tokens(
    logits_RV: Tensor,
    temperature_R: Tensor,
    top_k_R: Tensor,
    top_p_R: Tensor,
    min_p_R: Tensor,
    seed_R: Tensor,
    position_R: Tensor,
) -> Tensor:
    """The token that each row says: int64 [R].

    Temperature 0 is the argmax, the lowest id of equals. Otherwise a draw from softmax(logits / temperature) over the
    tokens that survive, in this order: `min_p` (at least min_p times as likely as the likeliest; 0 is off), `top_k`
    (at least the k-th largest logit, equals kept; 0 is off), and `top_p` (of what is left, dropped if the strictly
    likelier already have a mass of top_p, equals kept; 1 is off).

    `seed` and `position`, of the token being chosen, are int64; logits are bf16 or fp32, the arithmetic is fp32.
    The module's docstring says what the noise guarantees.
    """
    chosen = sample_tokens_triton if logits_RV.is_cuda and triton is not None else sample_tokens_torch
    return chosen(logits_RV, temperature_R, top_k_R, top_p_R, min_p_R, seed_R, position_R)
