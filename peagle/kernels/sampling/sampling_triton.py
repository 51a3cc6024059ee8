"""Triton kernels of sampling (temperature, min-p, top-k, top-p and Gumbel noise without a sort) and draft acceptance.

Shapes: R rows, V vocabulary; B requests, K draft tokens, Q = K + 1 verified rows per request.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import torch
from torch import Tensor

from peagle.kernels.sampling.noise_torch import ACCEPT_STREAM, BLOCK, LANES, SAMPLE_STREAM
from peagle.kernels.triton_utils import HAVE_TRITON, pdl_launch_options

if HAVE_TRITON:
    import triton
    from triton import language as tl

    from peagle.kernels.triton_utils import wait_for_previous

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

    @triton.jit
    def _block_argmax_kernel(
        logits, stride, vocab, float_params, int_params, position, cutoffs, best, best_at, chunks,
        SAMPLE: tl.constexpr, STREAM: tl.constexpr, LANES: tl.constexpr, PDL: tl.constexpr,
    ) -> None:  # fmt: skip
        """Writes the best score of one row in one chunk of 4 * LANES tokens, and the lowest token that has it.

        The chunk is loaded as four blocks of LANES tokens: token i of each block uses one word of Philox call i.
        """
        wait_for_previous(PDL)
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
            t = tl.load(float_params + row)
            if t > 0.0:  # greedy rows need no noise
                cutoff = tl.load(cutoffs + row)
                seed = tl.load(int_params + tl.num_programs(0) + row)
                n0, n1, n2, n3 = philox_words(seed, tl.load(position + row), chunk * LANES + lane, STREAM)
                x0 = tl.where(x0 >= cutoff, x0 + t * gumbel(n0), -float("inf"))
                x1 = tl.where(x1 >= cutoff, x1 + t * gumbel(n1), -float("inf"))
                x2 = tl.where(x2 >= cutoff, x2 + t * gumbel(n2), -float("inf"))
                x3 = tl.where(x3 >= cutoff, x3 + t * gumbel(n3), -float("inf"))
        highest = tl.max(tl.maximum(tl.maximum(x0, x1), tl.maximum(x2, x3)), 0)
        far = 2147483647
        first = tl.minimum(tl.where(x0 == highest, i0, far), tl.where(x1 == highest, i1, far))
        first = tl.minimum(first, tl.minimum(tl.where(x2 == highest, i2, far), tl.where(x3 == highest, i3, far)))
        tl.store(best + row * chunks + chunk, highest)
        tl.store(best_at + row * chunks + chunk, tl.min(first, 0))

    @triton.jit
    def _row_argmax_kernel(best, best_at, tokens, chunks, vocab, CHUNKS: tl.constexpr, PDL: tl.constexpr) -> None:
        wait_for_previous(PDL)
        row = tl.program_id(0).to(tl.int64)
        lane = tl.arange(0, CHUNKS)
        inside = lane < chunks
        x = tl.load(best + row * chunks + lane, mask=inside, other=-float("inf"))
        at = tl.load(best_at + row * chunks + lane, mask=inside, other=2147483647)
        first = tl.min(tl.where(x == tl.max(x, 0), at, 2147483647), 0)
        tl.store(
            tokens + row, tl.minimum(first, vocab - 1).to(tl.int64)
        )  # NaN equals nothing: still return a valid token

    @triton.jit
    def _midpoint(low, high):
        """Returns the fp32 number halfway from low (excluded) to high (included), counting representable numbers."""
        a = low.to(tl.int32, bitcast=True)
        b = high.to(tl.int32, bitcast=True)
        a = a ^ ((a >> 31) & 0x7FFFFFFF)  # integers in the order of the fp32 numbers
        b = b ^ ((b >> 31) & 0x7FFFFFFF)
        c = (a | b) - ((a ^ b) >> 1)  # half the sum, rounded up, without overflow
        return (c ^ ((c >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)

    @triton.jit
    def _largest_cutoff(
        start, low, high, need, best, inverse, COUNT: tl.constexpr, VOCAB: tl.constexpr, WIDTH: tl.constexpr
    ):
        """Finds the largest cutoff <= high such that the logits >= cutoff weigh at least `need`; those >= low do.

        Bisection that also moves the ends of the bracket to the nearest logits, so it ends when one value is left:
        after about 7 steps for bf16 and 10 for fp32. The first 12 steps halve values, which is fastest; further ones
        halve the count of fp32 numbers, which ends after at highest 32.
        """
        step = 0
        while (step < 48) & (low < high):  # bounded even for NaN logits
            middle = low * 0.5 + high * 0.5
            middle = tl.where((step < 12) & (middle > low), middle, _midpoint(low, high))
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
            lowest = tl.where(
                lowest == 0.0, 0.0, lowest
            )  # -0 orders below 0 but compares equal: avoid a step without progress
            low = tl.where(enough, lowest, low)
            high = tl.where(enough, high, tl.max(below, 0))
            step += 1
        return low

    @triton.jit
    def _cutoffs_kernel(
        logits, stride, float_params, int_params, cutoffs, VOCAB: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr
    ) -> None:
        """Computes `logit_cutoffs_torch` of one row; a row without filters returns at once."""
        wait_for_previous(PDL)
        row = tl.program_id(0).to(tl.int64)
        rows = tl.num_programs(0)
        t = tl.load(float_params + row)
        p = tl.load(float_params + rows + row)
        m = tl.load(float_params + 2 * rows + row)
        k = tl.load(int_params + row).to(tl.int32)
        has_top_k = (k > 0) & (k < VOCAB)
        cutoff = tl.full([], -float("inf"), tl.float32)
        if (t > 0.0) & (has_top_k | (p < 1.0) | (m > 0.0)):
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
                cutoff = best + t * tl.log(m)
            if has_top_k:
                least = _largest_cutoff(
                    start, tl.min(above, 0), best, k.to(tl.float32), best, inverse, True, VOCAB, WIDTH
                )
                cutoff = tl.maximum(cutoff, least)
            if p < 1.0:
                mass = tl.zeros([WIDTH], tl.float32)
                for first in range(0, VOCAB, WIDTH):
                    i = first + tl.arange(0, WIDTH)
                    x = tl.load(start + i, mask=i < VOCAB, other=-float("inf")).to(tl.float32)
                    mass += tl.where(x >= cutoff, tl.exp((x - best) * inverse), 0.0)
                need = p * tl.sum(mass, 0)
                # All tokens below this floor together weigh less than 1 - p times the likeliest: none is needed.
                floor = best - t * (tl.log(VOCAB * 1.0) - tl.log(1.0 - p) + 1.0)
                cutoff = _largest_cutoff(
                    start, tl.maximum(cutoff, floor), best, need, best, inverse, False, VOCAB, WIDTH
                )
        tl.store(cutoffs + row, cutoff)

    @triton.jit
    def _accept_kernel(
        tokens, tokens_stride, target, target_stride, available, rates, seed, position, accepted, result,
        K: tl.constexpr, SYNTHETIC: tl.constexpr, STREAM: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
    ) -> None:  # fmt: skip
        """Handles one request; WIDTH >= K + 1."""
        wait_for_previous(PDL)
        b = tl.program_id(0).to(tl.int64)
        at = tl.arange(0, WIDTH)
        is_draft = at < K
        draft = tl.load(tokens + b * tokens_stride + at + 1, mask=is_draft, other=-1)
        target_token = tl.load(target + b * target_stride + at, mask=at <= K, other=-1)
        if SYNTHETIC:
            word, _1, _2, _3 = philox_words(tl.load(seed + b), tl.load(position + b) + at, at * 0, STREAM)
            matches = uniform(word) < tl.load(rates + at, mask=is_draft, other=0.0)
        else:
            matches = draft == target_token
        verified = tl.load(available + b).to(tl.int64)
        matches = matches & is_draft & (at < verified)
        count = tl.min(tl.where(matches, WIDTH, at), 0)  # the first mismatch: lane K never matches
        tl.store(accepted + b, count.to(tl.int64))
        output = tl.where(at < count, draft, tl.where(at == count, target_token, -1))
        result += b * (K + 3)
        tl.store(result + at, output, mask=at <= K)
        tl.store(result + K + 1, count.to(tl.int64))
        tl.store(result + K + 2, verified)


def logit_cutoffs_triton(logits_RV: Tensor, float_params_3R: Tensor, int_params_2R: Tensor) -> Tensor:
    rows, vocab = logits_RV.shape
    assert logits_RV.stride(1) == 1
    cutoffs = torch.empty(rows, dtype=torch.float32, device=logits_RV.device)
    width = min(triton.next_power_of_2(vocab), 8192)
    _cutoffs_kernel[(rows,)](
        *(logits_RV, logits_RV.stride(0), float_params_3R, int_params_2R, cutoffs),
        VOCAB=vocab,
        WIDTH=width,
        num_warps=32 if width == 8192 else 4,
        **pdl_launch_options(logits_RV.device),
    )
    return cutoffs


def argmax_triton(logits_RV: Tensor, draw: tuple[Tensor, Tensor, Tensor, Tensor] | None = None) -> Tensor:
    """Returns each row's best token, by chunks, then over chunks. `draw`: float and int params, position, cutoffs."""
    rows, vocab = logits_RV.shape
    assert logits_RV.stride(1) == 1
    chunks = -(-vocab // BLOCK)
    best = torch.empty(rows, chunks, dtype=torch.float32, device=logits_RV.device)
    best_at = torch.empty(rows, chunks, dtype=torch.int32, device=logits_RV.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits_RV.device)
    options = pdl_launch_options(logits_RV.device)
    _block_argmax_kernel[(rows, chunks)](
        *(logits_RV, logits_RV.stride(0), vocab),
        *(draw or (best, best_at, best_at, best)),  # placeholders, not read without a draw
        *(best, best_at, chunks),
        SAMPLE=draw is not None,
        STREAM=SAMPLE_STREAM,
        LANES=LANES,
        num_warps=4,
        **options,
    )
    width = triton.next_power_of_2(chunks)
    _row_argmax_kernel[(rows,)](best, best_at, tokens, chunks, vocab, CHUNKS=width, num_warps=1, **options)
    return tokens


def sample_tokens_triton(
    logits_RV: Tensor, float_params_3R: Tensor, int_params_2R: Tensor, position_R: Tensor
) -> Tensor:
    params = float_params_3R.contiguous(), int_params_2R.contiguous()
    cutoffs = logit_cutoffs_triton(logits_RV, *params)
    return argmax_triton(logits_RV, (*params, position_R.contiguous(), cutoffs))


def accept_draft_tokens_triton(
    token_ids_BQ: Tensor,
    target_token_ids_BQ: Tensor,
    num_draft_tokens_B: Tensor,
    synthetic_rates_K: Tensor | None,
    seed_B: Tensor,
    position_B: Tensor,
) -> tuple[Tensor, Tensor]:
    """Returns the number of accepted draft tokens and `AcceptedTokens.result_BX`."""
    requests, rows = token_ids_BQ.shape
    assert token_ids_BQ.stride(1) == 1 and target_token_ids_BQ.stride(1) == 1
    accepted = torch.empty(requests, dtype=torch.int64, device=token_ids_BQ.device)
    result = torch.empty(requests, rows + 2, dtype=torch.int64, device=token_ids_BQ.device)
    rates_K = accepted if synthetic_rates_K is None else synthetic_rates_K.contiguous()  # a placeholder is not read
    _accept_kernel[(requests,)](
        *(token_ids_BQ, token_ids_BQ.stride(0), target_token_ids_BQ, target_token_ids_BQ.stride(0)),
        *(num_draft_tokens_B.contiguous(), rates_K, seed_B.contiguous(), position_B.contiguous()),
        *(accepted, result),
        K=rows - 1,
        SYNTHETIC=synthetic_rates_K is not None,
        STREAM=ACCEPT_STREAM,
        WIDTH=triton.next_power_of_2(rows),
        num_warps=1,
        **pdl_launch_options(token_ids_BQ.device),
    )
    return accepted, result
