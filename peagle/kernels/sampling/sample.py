"""Samples tokens: the argmax, or a seeded draw after temperature and filters. Shapes: R rows, V vocabulary.

The noise of a draw is a pure function of (seed, position of the sampled token, token id). Two properties follow.

Exact rejection sampling. Let p be a row's distribution after temperature and filters. The argmax of logits /
temperature + Gumbel noise is a draw x from p (the Gumbel-max trick). A greedy draft token d does not depend on that
noise, and accepting it if and only if x == d is exact rejection sampling: d is accepted with probability p(d), which is
min(1, p(d) / q(d)) for the one-hot q of a greedy draft, and if it is rejected, x has the distribution max(p - q, 0),
normalized.

Reproducibility. The output gains x in either case, and x depends only on the logits, the seed and the position. So
seeded sampled output is the same, token for token, with and without speculation, for every number of draft tokens and
in every batch, as far as the logits are the same: rounding that differs between shapes can flip near-ties, as for
greedy output.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

import math

import torch
from torch import Tensor

from peagle.kernels.sampling.noise import BLOCK, LANES, SAMPLE_STREAM, bits_torch, gumbel_torch, row_bits_torch
from peagle.kernels.sampling.processors import ProcessedRows
from peagle.kernels.triton_utils import HAVE_TRITON, pdl_launch_options, runs_triton

if HAVE_TRITON:
    import triton
    from triton import language as tl

    from peagle.kernels.sampling.noise import gumbel, philox_words
    from peagle.kernels.sampling.processors import load_flags, process_logits
    from peagle.kernels.triton_utils import wait_for_previous

    @triton.jit
    def _block_argmax_kernel(
        logits, stride, vocab, float_params, int_params, position, cutoffs, slots, flags_S, processors,
        best, best_at, chunks,
        SAMPLE: tl.constexpr, ROWS: tl.constexpr, STREAM: tl.constexpr, LANES: tl.constexpr, PDL: tl.constexpr,
    ) -> None:  # fmt: skip
        """Writes the best score of one row in one chunk of 4 * LANES tokens, and the lowest token that has it.

        The chunk is loaded as four blocks of LANES tokens: token i of each block uses one word of Philox call i.
        ROWS is the number of rows per request, 0 without logits processors.
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
        if ROWS:
            slot, flags = load_flags(flags_S, slots, row // ROWS, processors[0])
            if flags & 7:  # HAS_PROCESSORS
                at = tl.load(position + row)
                x0 = process_logits(x0, i0, row, slot, flags, at, processors, vocab, ROWS)
                x1 = process_logits(x1, i1, row, slot, flags, at, processors, vocab, ROWS)
                x2 = process_logits(x2, i2, row, slot, flags, at, processors, vocab, ROWS)
                x3 = process_logits(x3, i3, row, slot, flags, at, processors, vocab, ROWS)
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
    def _row_argmax_kernel(
        best, best_at, tokens, chunks, vocab, CHECKED: tl.constexpr, CHUNKS: tl.constexpr, PDL: tl.constexpr
    ) -> None:
        wait_for_previous(PDL)
        row = tl.program_id(0).to(tl.int64)
        lane = tl.arange(0, CHUNKS)
        inside = lane < chunks
        x = tl.load(best + row * chunks + lane, mask=inside, other=-float("inf"))
        at = tl.load(best_at + row * chunks + lane, mask=inside, other=2147483647)
        highest = tl.max(x, 0)
        first = tl.min(tl.where(x == highest, at, 2147483647), 0)
        token = tl.minimum(first, vocab - 1).to(tl.int64)  # NaN equals nothing: still a valid token
        if CHECKED:
            token = tl.where((highest > -float("inf")) & (highest < float("inf")), token, -1)
        tl.store(tokens + row, token)

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
    def _load_processed(
        start, i, row, slot, flags, position, processors, VOCAB: tl.constexpr, ROWS: tl.constexpr
    ):  # fmt: skip
        x = tl.load(start + i, mask=i < VOCAB, other=-float("inf")).to(tl.float32)
        if ROWS:
            if flags & 7:  # HAS_PROCESSORS
                x = process_logits(x, i, row, slot, flags, position, processors, VOCAB, ROWS)
        return x

    @triton.jit
    def _largest_cutoff(
        start, low, high, need, best, inverse, row, slot, flags, position, processors,
        COUNT: tl.constexpr, VOCAB: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    ):  # fmt: skip
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
                x = _load_processed(start, i, row, slot, flags, position, processors, VOCAB, ROWS)
                keep = x >= middle
                if COUNT:
                    mass += tl.where(keep, 1.0, 0.0)
                else:
                    mass += tl.where(keep, tl.exp((x - best) * inverse), 0.0)
                above = tl.minimum(above, tl.where(keep, x, float("inf")))
                below = tl.maximum(below, tl.where(keep, -float("inf"), x))
            enough = tl.sum(mass, 0) >= need
            lowest = tl.min(above, 0)
            # -0 orders below 0 but compares equal: avoid a step without progress.
            lowest = tl.where(lowest == 0.0, 0.0, lowest)
            low = tl.where(enough, lowest, low)
            high = tl.where(enough, high, tl.max(below, 0))
            step += 1
        return low

    @triton.jit
    def _cutoffs_kernel(
        logits, stride, float_params, int_params, position, slots, flags_S, processors, cutoffs,
        VOCAB: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
    ) -> None:  # fmt: skip
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
            at = tl.load(position + row)
            slot = row
            flags = 0
            if ROWS:
                slot, flags = load_flags(flags_S, slots, row // ROWS, processors[0])
            above = tl.full([WIDTH], float("inf"), tl.float32)
            below = tl.full([WIDTH], -float("inf"), tl.float32)
            for first in range(0, VOCAB, WIDTH):
                i = first + tl.arange(0, WIDTH)
                x = _load_processed(start, i, row, slot, flags, at, processors, VOCAB, ROWS)
                below = tl.maximum(below, x)
                above = tl.minimum(above, tl.where(i < VOCAB, x, float("inf")))
            best = tl.max(below, 0)
            inverse = 1.0 / tl.maximum(t, 1e-30)
            if m > 0.0:
                cutoff = best + t * tl.log(m)
            if has_top_k:
                least = _largest_cutoff(
                    start, tl.min(above, 0), best, k.to(tl.float32), best, inverse, row, slot, flags, at, processors,
                    True, VOCAB, ROWS, WIDTH,
                )  # fmt: skip
                cutoff = tl.maximum(cutoff, least)
            if p < 1.0:
                mass = tl.zeros([WIDTH], tl.float32)
                for first in range(0, VOCAB, WIDTH):
                    i = first + tl.arange(0, WIDTH)
                    x = _load_processed(start, i, row, slot, flags, at, processors, VOCAB, ROWS)
                    mass += tl.where(x >= cutoff, tl.exp((x - best) * inverse), 0.0)
                need = p * tl.sum(mass, 0)
                # All tokens below this floor together weigh less than 1 - p times the likeliest: none is needed.
                floor = best - t * (tl.log(VOCAB * 1.0) - tl.log(1.0 - p) + 1.0)
                cutoff = _largest_cutoff(
                    start, tl.maximum(cutoff, floor), best, need, best, inverse, row, slot, flags, at, processors,
                    False, VOCAB, ROWS, WIDTH,
                )  # fmt: skip
        tl.store(cutoffs + row, cutoff)


def argmax(logits_RV: Tensor) -> Tensor:
    """Returns the token with the largest logit, the lowest id among equals: int64 [R]."""
    if runs_triton(logits_RV):
        return _launch_argmax(logits_RV, None)
    if logits_RV.is_cuda:
        return logits_RV.argmax(-1)
    logits = logits_RV.detach()
    if logits.dtype != torch.float64:
        logits = logits.float()  # numpy has no bf16
    return torch.from_numpy(logits.numpy().argmax(-1))  # same result as torch's argmax, 10 times as fast


def sample_tokens(
    logits_RV: Tensor,
    float_params_3R: Tensor,
    int_params_2R: Tensor,
    position_R: Tensor,
    processed: ProcessedRows | None = None,
) -> Tensor:
    """Samples one token per row: int64 [R]; -1 if the row has no finite logit.

    Temperature 0 is the argmax, the lowest id among equals. Otherwise tokens are drawn from softmax(logits /
    temperature) after these filters, in this order: `min_p` keeps tokens at least min_p times as likely as the
    likeliest (0: off); `top_k` keeps logits not below the k-th largest, including equals (0: off); `top_p` drops a
    token if strictly likelier ones already have a mass of top_p, and keeps equals (1: off).

    `float_params` are temperature, top_p and min_p in fp32, `int_params` top_k and seed, `position` is that of the
    sampled token; logits are bf16 or fp32, the arithmetic is fp32. The module's docstring states what the noise
    guarantees. With `processed`, logits processors come first.
    """
    if runs_triton(logits_RV):
        float_params_3R, int_params_2R = float_params_3R.contiguous(), int_params_2R.contiguous()
        position_R = position_R.contiguous()
        cutoffs = logit_cutoffs_triton(logits_RV, float_params_3R, int_params_2R, position_R, processed)
        return _launch_argmax(logits_RV, (float_params_3R, int_params_2R, position_R, cutoffs), processed)
    tokens = _sample_torch(logits_RV, float_params_3R, int_params_2R, position_R)
    if processed is not None:
        for rows, logits in processed.process_torch(logits_RV, position_R):
            tokens[rows] = _sample_torch(logits, float_params_3R[:, rows], int_params_2R[:, rows], position_R[rows])
    return tokens


def _sample_torch(logits_RV: Tensor, float_params_3R: Tensor, int_params_2R: Tensor, position_R: Tensor) -> Tensor:
    tokens = argmax(logits_RV)
    tokens.masked_fill_(~logits_RV.gather(1, tokens[:, None])[:, 0].isfinite(), -1)
    sampled = ((float_params_3R[0] > 0) & (tokens >= 0)).nonzero()[:, 0]
    if len(sampled) == 0:
        return tokens
    logits, float_params, position = logits_RV[sampled].float(), float_params_3R[:, sampled], position_R[sampled]
    temperature, (top_k, seed) = float_params[0], int_params_2R[:, sampled]
    keep = logits >= logit_cutoffs_torch(logits, float_params, top_k)[:, None]
    # noise * temperature instead of logits / temperature: the same order, without overflow for tiny temperatures.
    if int(keep.sum()) < keep.numel() // 8:  # few tokens are left: draw noise for these only
        row, token = keep.nonzero(as_tuple=True)
        scores = torch.full_like(logits, -math.inf)
        noise = gumbel_torch(bits_torch(seed[row], position[row], token))
        scores[row, token] = logits[row, token] + temperature[row] * noise
    else:
        noise = gumbel_torch(row_bits_torch(seed, position, logits.shape[1]))
        scores = (logits + temperature[:, None] * noise).masked_fill(~keep, -math.inf)
    tokens[sampled] = argmax(scores)
    return tokens


def logit_cutoffs_torch(logits_RV: Tensor, float_params_3R: Tensor, top_k_R: Tensor) -> Tensor:
    """Returns the smallest logit that each row keeps, -inf if it keeps all: fp32 [R]. Reads values on the host."""
    vocab = logits_RV.shape[1]
    cutoffs = torch.full((len(logits_RV),), -math.inf, device=logits_RV.device)
    rows = zip(*float_params_3R.tolist(), top_k_R.tolist(), strict=True)
    for r, (temperature, top_p, min_p, top_k) in enumerate(rows):
        has_top_k = 0 < top_k < vocab
        if temperature <= 0 or not (has_top_k or top_p < 1 or min_p > 0):
            continue
        logits = logits_RV[r].float()
        best, cutoff = logits.max(), cutoffs[r]
        if min_p > 0:
            cutoff = best + temperature * math.log(min_p)
        if has_top_k:
            cutoff = torch.maximum(cutoff, logits.topk(int(top_k)).values[-1])
        if top_p < 1:
            need = top_p * ((logits[logits >= cutoff] - best) / temperature).exp().sum()
            for count in (1024, vocab):  # the first suffices for a peaked row and is ten times as fast
                kept = logits.topk(min(count, vocab)).values
                mass = ((kept[kept >= cutoff] - best) / temperature).exp().cumsum(0)
                if mass[-1] >= need:
                    break
            # The token at which the mass reaches top_p is the last one kept, along with equal logits.
            cutoff = kept[int((mass < need).sum().clamp(max=len(mass) - 1))]
        cutoffs[r] = cutoff
    return cutoffs


def logit_cutoffs_triton(
    logits_RV: Tensor,
    float_params_3R: Tensor,
    int_params_2R: Tensor,
    position_R: Tensor,
    processed: ProcessedRows | None = None,
) -> Tensor:
    rows, vocab = logits_RV.shape
    assert logits_RV.stride(1) == 1
    cutoffs = torch.empty(rows, dtype=torch.float32, device=logits_RV.device)
    width = min(triton.next_power_of_2(vocab), 8192)
    _cutoffs_kernel[(rows,)](
        logits_RV, logits_RV.stride(0), float_params_3R, int_params_2R, position_R,
        *_processor_arguments(processed, cutoffs), cutoffs,
        VOCAB=vocab, ROWS=processed.rows_per_request if processed is not None else 0, WIDTH=width,
        num_warps=32 if width == 8192 else 4, **pdl_launch_options(logits_RV.device),
    )  # fmt: skip
    return cutoffs


def _processor_arguments(processed: ProcessedRows | None, placeholder: Tensor) -> tuple:
    """The kernel arguments slots, flags_S and processors."""
    if processed is None:
        return placeholder, placeholder, (0,)
    return processed.slots_B.contiguous(), processed.processors.flags_S, processed.kernel_arguments


def _launch_argmax(
    logits_RV: Tensor, draw: tuple[Tensor, Tensor, Tensor, Tensor] | None, processed: ProcessedRows | None = None
) -> Tensor:
    """Returns each row's best token, by chunks, then over chunks. `draw`: float and int params, position, cutoffs."""
    rows, vocab = logits_RV.shape
    assert logits_RV.stride(1) == 1
    chunks = -(-vocab // BLOCK)
    best = torch.empty(rows, chunks, dtype=torch.float32, device=logits_RV.device)
    best_at = torch.empty(rows, chunks, dtype=torch.int32, device=logits_RV.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits_RV.device)
    options = pdl_launch_options(logits_RV.device)
    _block_argmax_kernel[(rows, chunks)](
        logits_RV, logits_RV.stride(0), vocab,
        *(draw or (best, best_at, best_at, best)),  # placeholders, not read without a draw
        *_processor_arguments(processed, best_at), best, best_at, chunks,
        SAMPLE=draw is not None, ROWS=processed.rows_per_request if processed is not None else 0,
        STREAM=SAMPLE_STREAM, LANES=LANES, num_warps=4, **options,
    )  # fmt: skip
    width = triton.next_power_of_2(chunks)
    _row_argmax_kernel[(rows,)](
        best, best_at, tokens, chunks, vocab, CHECKED=draw is not None, CHUNKS=width, num_warps=1, **options
    )
    return tokens
