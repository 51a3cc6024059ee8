"""Linear layers of few rows, with what stands around them: norm before, SwiGLU, bias and residual after.

Decoding reads every weight once for a handful of rows, so a product costs what streaming its weights costs. The
Triton kernels here take up to `skinny_rows` of a shape; more rows go to cuBLAS with single-launch kernels around it,
and fp32, fp64 and training go to the plain torch twins (`*_torch`), which every faster version is held against. The
CPU, in inference mode, has versions of fewer operations (`*_cpu`), and products of few rows in the way that measured
fastest there.

A row's result depends neither on the other rows nor on their number, up to TILED rows for small shapes, and on
either side of FEW for large ones. Weights are the left operand of every product and rows the right one, so however
many rows there are, each output sums the same products in the same order by the same instruction: 16 of K at a time,
one after another, whatever block_k, stages and warps are. That takes two configurations to be of one `kind`: both
without a split of K, or the same one (parts are summed in order), and both below 64 columns (mma.sync) or not (wgmma).
Sums of squares are taken in fp64, where their order does not show, so 1 / rms is the same by every kernel here.

Large shapes whose two configurations differ in kind: (4096, 4096) and (4096, 14336), as o and down of 8 billion
parameters. Those of more rows are split, since 32 columns without a split would read x twice as often as 64; so such a
model's text may change where a round goes from at most FEW rows to more. More than `skinny_rows` go to cuBLAS, with a
norm that is rounded before the product: other bits again.

The norm before a product costs no launch where a product wrote its input (`linear_onto`): that one knows the rows.

Shapes: T rows, K input width, N output width (twice the result's width for a gated product), I half of such an N.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# (kernels declare only what is a compile-time constant; the functions around them are typed)

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from peagle.kernels import skinny_cpu

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor

    HAVE_TRITON = True
except ImportError:  # no Triton for this machine: the torch twins and cuBLAS do everything
    HAVE_TRITON = False

SKINNY = 64  # most rows of one program of the Triton product
TILED = 512  # most rows it takes where K is small: in tiles of SKINNY, so that a row's bits stay what they are
FEW = 16  # up to here a shape has one configuration, above it may have another, or go to cuBLAS
SHARED_BYTES = 226 * 1024  # of one processor, for all programs on it

# Triton reads the variable when a kernel is declared, that is below, so a later change means nothing.
INTERPRETED = HAVE_TRITON and os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")

# Sums of squares that a product takes over from its predecessor: each program reads them all, into registers.
MOST_SQUARES = 8192

# Split products meet at these many int32 counters per device.
_COUNTERS = 16384


@dataclass(frozen=True)
class Config:
    """How one shape is computed. `kind` says what of it the rounding depends on; the rest is for speed alone.

    block_n: output columns per program (a gated product takes that many gates and as many ups).
    prefetch: weights of each row (elements along K) a program asks into L2 before it waits for its predecessor.
    lines: prefetched line by line instead of row by row.
    fuse_norm: norm inside the product; otherwise a launch of its own before it.
    tma: weights come by tensor descriptor instead of per-thread asynchronous copies.
    late: the successor may start only once the loop is done, so that it cannot take memory or processors before.
    """

    block_n: int
    block_k: int
    stages: int
    warps: int
    split_k: int = 1
    prefetch: int = 0
    lines: bool = False
    fuse_norm: bool = False
    tma: bool = False
    late: bool = False

    @property
    def kind(self) -> tuple[int, int, bool]:
        """Configurations of one kind round alike: the parts that K is split into (1: none), the instruction, the norm's
        place. wgmma takes 64 columns and the warps of a group."""
        return self.split_k, 64 if self.block_n >= 64 and self.warps % 4 == 0 else 16, self.fuse_norm


@dataclass(frozen=True)
class Stream:
    """The residual stream x, and what the product that wrote it already did for the norm that follows.

    With `squares` the next product needs no launch for its norm: it reads `scaled` and multiplies its rows by
    1 / rms at the end. With `normed` the norm came along with the sum. Without, it is taken of x, the plain way.
    """

    x: Tensor
    norm_weight: Tensor | None = None  # of that norm
    scaled: Tensor | None = None  # x * norm_weight
    squares: Tensor | None = None  # of x, summed over the columns of each program that wrote it: fp64 [programs, T]
    normed: Tensor | None = None  # the norm itself


SMALL = Config(16, 64, 10, 2, prefetch=512, lines=True)

# Found on an H200 with programmatic dependent launch, by changing one shape at a time in the chain of a whole model
# (benchmarks/kernel_linear.py --descend). Keyed by N, K and whether gated: for up to FEW rows, and for
# more of them (None: cuBLAS is faster).
TUNED: dict[tuple[int, int, bool], tuple[Config, Config | None]] = {
    # 8 billion parameters: q/k/v, o, gate and up, down, lm_head, then a drafter's q/k/v and fc
    (6144, 4096, False): (Config(64, 256, 5, 4, prefetch=512), Config(64, 128, 6, 4, prefetch=512)),
    (4096, 4096, False): (Config(32, 512, 4, 4, prefetch=1024), Config(64, 128, 6, 4, 2, prefetch=1024)),
    (28672, 4096, True): (Config(64, 128, 4, 4, prefetch=128, late=True), Config(64, 64, 4, 4, prefetch=128)),
    (4096, 14336, False): (Config(32, 128, 13, 4, prefetch=1024), Config(64, 128, 6, 4, 2, prefetch=1024)),
    (128256, 4096, False): (Config(64, 128, 4, 4, prefetch=128), Config(64, 128, 3, 4, prefetch=128)),
    (6144, 8192, False): (Config(32, 128, 6, 4, 2, prefetch=512), None),
    (4096, 12288, False): (Config(32, 256, 8, 4, prefetch=1024), Config(64, 128, 6, 4, 2, prefetch=1024)),
    # SmolLM2-135M: q/k/v, o, gate and up, down, lm_head
    (960, 576, False): (SMALL, SMALL),
    (576, 576, False): (Config(32, 64, 10, 4, prefetch=512, lines=True), SMALL),
    (3072, 576, True): (Config(16, 64, 10, 1, prefetch=512, lines=True, late=True), SMALL),
    (576, 1536, False): (Config(16, 64, 10, 4, prefetch=64, lines=True), SMALL),
    (49152, 576, False): (Config(64, 64, 7, 4, prefetch=128), Config(64, 64, 3, 4, prefetch=128)),
}


def rms_norm_torch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = x.float() if x.dtype != torch.float64 else x
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return weight * y.to(x.dtype)


def add_rms_norm_torch(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = residual + x
    return rms_norm_torch(total, weight, eps), total


def norm_cat_torch(a: Tensor, a_weight: Tensor, b: Tensor, b_weight: Tensor, eps: float) -> Tensor:
    return torch.cat([rms_norm_torch(a, a_weight, eps), rms_norm_torch(b, b_weight, eps)], -1)


def silu_mul_torch(y_T2I: Tensor) -> Tensor:
    gate, up = y_T2I.chunk(2, -1)
    return F.silu(gate) * up


def linear_torch(
    x_TK: Tensor,
    weight_NK: Tensor,
    bias: Tensor | None = None,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    glu: bool = False,
    residual: Tensor | None = None,
    norm: Callable[[Tensor, Tensor, float], Tensor] = rms_norm_torch,
    gate: Callable[[Tensor], Tensor] = silu_mul_torch,
) -> Tensor:
    """`norm` and `gate` may be others that compute the same: those that training has fast ways back for."""
    x = x_TK if norm_weight is None else norm(x_TK, norm_weight, eps)
    y = F.linear(x, weight_NK, bias)
    if glu:
        y = gate(y)
    return y if residual is None else residual + y


# On the CPU: the product of few rows is memory traffic there too, but the library's may be made for many rows.
MOST_FEW_CPU = skinny_cpu.MOST_ROWS  # rows up to which it is asked which way is fastest
MEASURED_ROWS = (1, 2, 4, 8)  # numbers between, and more, go the way of the next one


def _row_by_row(x_TK: Tensor, weight_NK: Tensor, bias: Tensor | None) -> Tensor:
    """As many matrix-vector products, which some libraries do far better than a product of two or three rows."""
    y = x_TK.new_empty(x_TK.shape[0], weight_NK.shape[0])
    for row, out in zip(x_TK.unbind(0), y.unbind(0), strict=True):
        torch.mv(weight_NK, row, out=out)
    return y if bias is None else y.add_(bias)


def _swapped(x_TK: Tensor, weight_NK: Tensor, bias: Tensor | None) -> Tensor:
    """Weights as the left operand, so that it is their rows that are shared out between threads."""
    y = torch.mm(weight_NK, x_TK.t()).t().contiguous()
    return y if bias is None else y.add_(bias)


_WAYS = (F.linear, _row_by_row, _swapped)
_ways: dict[tuple[int, int, int, torch.dtype], Any] = {}  # by N, K, T and dtype; F.linear where nothing was measured


def measure_products(weights: Iterable[Tensor], budget: float = 0.5) -> None:
    """Which way is the fastest for products of few rows with these weights, on this machine, now.

    Our own product takes all numbers of rows of all of these weights, or none: by it a row's bits do not depend on
    that number. Of a large weight a slice is enough. What was not reached within the budget of seconds goes the way of
    all, else the library's.
    """
    new = {(*w.shape, w.dtype): w for w in weights if (*w.shape, 1, w.dtype) not in _ways}
    own = {way for way in (skinny_cpu.product,) if new and skinny_cpu.library() is not None}
    began = time.perf_counter()
    lost = 0.0  # seconds, by our own product
    for (N, K, dtype), weight in new.items():
        part = weight[: max(1, (1 << 20) // K)]
        for at, rows in enumerate(MEASURED_ROWS):
            if time.perf_counter() - began > budget:
                break
            x = torch.ones(rows, K, dtype=dtype)
            best = _seconds({*_WAYS, *(own if dtype == torch.float32 else ())}, x, part)
            for between in range(1 + (MEASURED_ROWS[at - 1] if at else 0), rows + 1):
                _ways[N, K, between, dtype] = min(_WAYS, key=best.__getitem__)
            lost += sum(best.get(way, 0.0) - min(best[other] for other in _WAYS) for way in own if way in best)
    if lost < 0:
        for N, K, dtype in new:
            if dtype == torch.float32:
                _ways.update({(N, K, rows, dtype): skinny_cpu.product for rows in range(1, MOST_FEW_CPU + 1)})


def _seconds(ways: Iterable[Any], x: Tensor, weight: Tensor) -> dict[Any, float]:
    """Of each way the fastest of three, taken in turns."""
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(3):
        for way in best:
            started = time.perf_counter()
            way(x, weight, None)
            best[way] = min(best[way], time.perf_counter() - started)
    return best


def linear_cpu(
    x_TK: Tensor,
    weight_NK: Tensor,
    bias: Tensor | None = None,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    glu: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """The way that `measure_products` found fastest; by our own all in one call."""
    rows: int = x_TK.shape[0]
    way: Any = F.linear
    if rows <= MOST_FEW_CPU and x_TK.dim() == 2:
        way = _ways.get((*weight_NK.shape, rows, x_TK.dtype), F.linear)
    if way is skinny_cpu.product:
        y = skinny_cpu.product(x_TK, weight_NK, bias, None if glu else residual, norm_weight, eps, glu)
        if y is not None:
            return y if residual is None or not glu else y.add_(residual)
        way = F.linear
    y = way(x_TK if norm_weight is None else rms_norm(x_TK, norm_weight, eps), weight_NK, bias)
    if glu:
        y = silu_mul_torch(y)
    return y if residual is None else y.add_(residual)


if HAVE_TRITON:

    @triton.jit
    def _prefetch_rows(w_ptr, rows, k, K, COUNT: tl.constexpr, LINES: tl.constexpr, COPIES: tl.constexpr):
        """Asks COUNT elements of each row, from column k on, into L2: line by line, or a row by one bulk request."""
        NBYTES: tl.constexpr = COUNT * w_ptr.dtype.element_ty.primitive_bitwidth // 8
        first = w_ptr + rows.to(tl.int64)[:, None] * K + k
        if LINES:
            addresses = first.to(tl.int64) + (tl.arange(0, NBYTES // 128) * 128)[None, :]
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; // $0", "=r,l", [addresses], dtype=tl.int32, is_pure=False, pack=1
            )
        else:
            # With fewer rows than threads every row would be asked for by several: only the first copy asks.
            copy = tl.arange(0, COPIES)[None, :]
            addresses = first.to(tl.int64) + copy.to(tl.int64) * 0
            nbytes = tl.where(copy == 0, NBYTES, 0) + (rows * 0)[:, None]
            tl.inline_asm_elementwise(
                "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; } // $0",
                "=r,l,r",
                [addresses, nbytes],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )

    @triton.jit
    def _finish(
        acc,
        up,
        squares,
        residual,
        bias_ptr,
        y_ptr,
        next_norm,
        scaled_ptr,
        next_squares_ptr,
        n,
        m,
        inside,
        tile,
        M,
        N,
        K,
        y_stride,
        eps,
    ):
        """Everything after the sum over K. None: `up` without a gate, `squares` without a norm, and so on."""
        dtype = y_ptr.dtype.element_ty
        if squares is not None:
            scale = tl.rsqrt(squares / K + eps)[None, :]
            acc = acc * scale
            if up is not None:
                up = up * scale
        if bias_ptr is not None:
            acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
            if up is not None:
                up += tl.load(bias_ptr + N + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        if up is not None:
            acc = acc / (1.0 + tl.exp(-acc)) * up
        if residual is not None:
            acc += residual.to(tl.float32)
        y = acc.to(dtype)
        spot = m[None, :] * y_stride + n[:, None]
        tl.store(y_ptr + spot, y, mask=inside)
        if next_norm is not None:
            y = tl.where(inside, y.to(tl.float32), 0.0)
            tl.store(scaled_ptr + spot, (y * next_norm.to(tl.float32)[:, None]).to(dtype), mask=inside)
            tl.store(next_squares_ptr + tile * M + m, _sum_in_any_order(y * y), mask=m < M)

    @triton.jit
    def _sum_in_any_order(x):
        """Over the first axis, in fp64. Who adds what to what depends on the number of rows and of columns a program
        has, but so little of the sum does that none of it is left once it is rounded to fp32."""
        return tl.sum(x.to(tl.float64), 0)

    # These change from launch to launch and must not cost a compilation each time.
    @triton.jit(do_not_specialize=["M", "squares_count"])
    def _linear_kernel(
        x_ptr,
        w_ptr,
        w_desc,
        y_ptr,
        bias_ptr,
        norm_ptr,
        squares_ptr,
        squares_count,
        residual_ptr,
        next_norm_ptr,
        scaled_ptr,
        next_squares_ptr,
        partial_ptr,
        counter_ptr,
        M,
        N,
        K,
        x_stride,
        residual_stride,
        y_stride,
        eps,
        BLOCK_M: tl.constexpr,
        BLOCK_N: tl.constexpr,
        BLOCK_K: tl.constexpr,
        SPLIT_K: tl.constexpr,
        STEPS: tl.constexpr,
        EVEN_K: tl.constexpr,
        GLU: tl.constexpr,
        PDL: tl.constexpr,
        PREFETCH: tl.constexpr,
        LINES: tl.constexpr,
        COPIES: tl.constexpr,
        LATE: tl.constexpr,
        BLOCK_SQUARES: tl.constexpr,
    ):
        """One tile of outputs, transposed: [BLOCK_N weights] x [BLOCK_M rows], over one of SPLIT_K parts of K."""
        NORM: tl.constexpr = norm_ptr is not None
        tile = tl.program_id(0)
        part = tl.program_id(1)
        n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
        k = tl.arange(0, BLOCK_K)
        inside = (n < N)[:, None] & (m < M)[None, :]
        # Past the last weight row the last one is read again: no mask in the loop, and nothing of it is stored.
        rows = tl.minimum(n, N - 1)
        begin = part * (STEPS * BLOCK_K)

        if PDL:
            # Let the successor start asking for its weights too, then ask for ours. Only after the wait is all that
            # earlier kernels wrote there to be read, and what they read free to be overwritten.
            if not LATE:
                tl.extra.cuda.gdc_launch_dependents()
            if PREFETCH > 0:
                _prefetch_rows(w_ptr, rows, begin, K, PREFETCH, LINES, COPIES)
                if GLU:
                    _prefetch_rows(w_ptr, rows + N, begin, K, PREFETCH, LINES, COPIES)
            tl.extra.cuda.gdc_wait()

        # What the end needs is asked for here where it can be, so that it has arrived when the loop ends.
        next_norm = None
        if next_norm_ptr is not None:
            next_norm = tl.load(next_norm_ptr + n, mask=n < N, other=0.0)
        residual = None
        residual_ptrs = None
        if residual_ptr is not None:
            residual_ptrs = residual_ptr + m[None, :] * residual_stride + n[:, None]
            if SPLIT_K == 1:
                residual = tl.load(residual_ptrs, mask=inside, other=0.0)
        their_squares = None
        squares_ptrs = None
        if squares_ptr is not None:
            i = tl.arange(0, BLOCK_SQUARES)
            squares_ptrs = squares_ptr + i[:, None] * M + m[None, :]
            if SPLIT_K == 1:
                their_squares = tl.load(squares_ptrs, mask=(i < squares_count)[:, None] & (m < M)[None, :], other=0.0)

        x_ptrs = x_ptr + m[None, :] * x_stride + (begin + k)[:, None]
        w_ptrs = w_ptr + rows.to(tl.int64)[:, None] * K + (begin + k)[None, :]
        up_offset = (tile * 0 + N).to(tl.int64) * K  # a width of 1 is a plain number here, without a type
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        up = None
        if GLU:
            up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        squares = None
        if NORM:
            squares = tl.zeros([BLOCK_K, BLOCK_M], tl.float32)  # summed over K at the end: no exchange in the loop
            # The compiler pipelines what it copies to shared memory, not these few: fetched one step ahead.
            norm_next = tl.load(norm_ptr + begin + k, mask=begin + k < K, other=0.0)
        for step in range(STEPS):
            start = begin + step * BLOCK_K
            if EVEN_K:
                x = tl.load(x_ptrs, mask=(m < M)[None, :], other=0.0)
            else:
                x = tl.load(x_ptrs, mask=(m < M)[None, :] & (start + k < K)[:, None], other=0.0)
            if NORM:
                norm = norm_next
                norm_next = tl.load(norm_ptr + start + BLOCK_K + k, mask=start + BLOCK_K + k < K, other=0.0)
                x_fp32 = x.to(tl.float32)
                squares += x_fp32 * x_fp32
                x = (x_fp32 * norm.to(tl.float32)[:, None]).to(x_ptr.dtype.element_ty)
            if w_desc is not None:
                w = w_desc.load([tile * BLOCK_N, start])
            elif EVEN_K:
                w = tl.load(w_ptrs)
            else:
                w = tl.load(w_ptrs, mask=(start + k < K)[None, :], other=0.0)
            acc = tl.dot(w, x, acc)
            if GLU:
                if w_desc is not None:
                    w = w_desc.load([N + tile * BLOCK_N, start])
                elif EVEN_K:
                    w = tl.load(w_ptrs + up_offset)
                else:
                    w = tl.load(w_ptrs + up_offset, mask=(start + k < K)[None, :], other=0.0)
                up = tl.dot(w, x, up)
            x_ptrs += BLOCK_K
            w_ptrs += BLOCK_K
        if PDL and LATE:
            tl.extra.cuda.gdc_launch_dependents()
        if NORM:
            squares = _sum_in_any_order(squares).to(tl.float32)

        if SPLIT_K == 1:
            if their_squares is not None:
                squares = _sum_in_any_order(their_squares).to(tl.float32)
            _finish(
                acc,
                up,
                squares,
                residual,
                bias_ptr,
                y_ptr,
                next_norm,
                scaled_ptr,
                next_squares_ptr,
                n,
                m,
                inside,
                tile,
                M,
                N,
                K,
                y_stride,
                eps,
            )
        else:
            # Each part leaves its sums; whichever comes last adds them all up, in order.
            SIZE: tl.constexpr = BLOCK_N * BLOCK_M * (2 if GLU else 1) + BLOCK_M
            tiles = tl.num_programs(0)
            spot = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + m[None, :]
            used = (m < M)[None, :]
            mine = partial_ptr + (part * tiles + tile) * SIZE + BLOCK_M
            tl.store(mine + spot, acc, mask=used)
            if GLU:
                tl.store(mine + BLOCK_N * BLOCK_M + spot, up, mask=used)
            if NORM:
                tl.store(mine - BLOCK_M + m, squares, mask=m < M)
            tl.debug_barrier()  # the whole program has stored before its one thread says so
            arrived = tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel")
            if arrived == SPLIT_K - 1:
                acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
                if GLU:
                    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
                if NORM:
                    squares = tl.zeros([BLOCK_M], tl.float32)
                for other in tl.static_range(SPLIT_K):
                    # .cg: from L2, where the other programs' stores are
                    theirs = partial_ptr + (other * tiles + tile) * SIZE + BLOCK_M
                    acc += tl.load(theirs + spot, mask=used, other=0.0, cache_modifier=".cg")
                    if GLU:
                        offset = BLOCK_N * BLOCK_M
                        up += tl.load(theirs + offset + spot, mask=used, other=0.0, cache_modifier=".cg")
                    if NORM:
                        squares += tl.load(theirs - BLOCK_M + m, mask=m < M, other=0.0, cache_modifier=".cg")
                if residual_ptr is not None:
                    residual = tl.load(residual_ptrs, mask=inside, other=0.0)
                if squares_ptr is not None:
                    known = (tl.arange(0, BLOCK_SQUARES) < squares_count)[:, None] & used
                    squares = _sum_in_any_order(tl.load(squares_ptrs, mask=known, other=0.0)).to(tl.float32)
                _finish(
                    acc,
                    up,
                    squares,
                    residual,
                    bias_ptr,
                    y_ptr,
                    next_norm,
                    scaled_ptr,
                    next_squares_ptr,
                    n,
                    m,
                    inside,
                    tile,
                    M,
                    N,
                    K,
                    y_stride,
                    eps,
                )
                tl.store(counter_ptr + tile, 0)  # ready for the next launch

    @triton.jit
    def _rms_norm_kernel(
        x_ptr,
        residual_ptr,
        weight_ptr,
        y_ptr,
        total_ptr,
        K,
        x_stride,
        residual_stride,
        eps,
        BLOCK_K: tl.constexpr,
        PDL: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        k = tl.arange(0, BLOCK_K)
        weight = tl.load(weight_ptr + k, mask=k < K, other=0.0)  # weights are nobody's output: no need to wait
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()
        dtype = x_ptr.dtype.element_ty
        x = tl.load(x_ptr + row * x_stride + k, mask=k < K, other=0.0).to(tl.float32)
        if residual_ptr is not None:
            residual = tl.load(residual_ptr + row * residual_stride + k, mask=k < K, other=0.0)
            total = (x + residual.to(tl.float32)).to(dtype)
            tl.store(total_ptr + row * K + k, total, mask=k < K)
            x = total.to(tl.float32)
        y = x * tl.rsqrt(_sum_in_any_order(x * x).to(tl.float32) / K + eps)
        # Rounded before the weight comes in, as the torch twin does.
        y = y.to(dtype).to(tl.float32) * weight.to(tl.float32)
        tl.store(y_ptr + row * K + k, y.to(dtype), mask=k < K)

    @triton.jit
    def _norm_row(x_ptr, weight, y_ptr, k, K, eps):
        dtype = x_ptr.dtype.element_ty
        x = tl.load(x_ptr + k, mask=k < K, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(_sum_in_any_order(x * x).to(tl.float32) / K + eps)
        y = (x * inverse).to(dtype).to(tl.float32) * weight.to(tl.float32)
        tl.store(y_ptr + k, y.to(dtype), mask=k < K)

    @triton.jit
    def _norm_cat_kernel(
        a_ptr,
        b_ptr,
        a_weight_ptr,
        b_weight_ptr,
        y_ptr,
        K,
        a_stride,
        b_stride,
        eps,
        BLOCK_K: tl.constexpr,
        PDL: tl.constexpr,
    ):
        """norm(a) and norm(b) side by side; one program for each row of either."""
        row = tl.program_id(0).to(tl.int64)
        k = tl.arange(0, BLOCK_K)
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()
        if tl.program_id(1) == 0:
            weight = tl.load(a_weight_ptr + k, mask=k < K, other=0.0)
            _norm_row(a_ptr + row * a_stride, weight, y_ptr + row * 2 * K, k, K, eps)
        else:
            weight = tl.load(b_weight_ptr + k, mask=k < K, other=0.0)
            _norm_row(b_ptr + row * b_stride, weight, y_ptr + row * 2 * K + K, k, K, eps)

    @triton.jit
    def _silu_mul_kernel(y_ptr, out_ptr, HALF, y_stride, BLOCK: tl.constexpr, PDL: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()
        gate = tl.load(y_ptr + row * y_stride + i, mask=i < HALF, other=0.0).to(tl.float32)
        up = tl.load(y_ptr + row * y_stride + HALF + i, mask=i < HALF, other=0.0).to(tl.float32)
        dtype = y_ptr.dtype.element_ty
        silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)  # rounded, as torch does
        tl.store(out_ptr + row * HALF + i, (silu * up).to(dtype), mask=i < HALF)


def block_rows(T: int) -> int:
    """Rows a program computes: few sizes, as each is a compilation."""
    return 16 if T <= 16 else 32 if T <= 32 else 64


def config_for(T: int, N: int, K: int, glu: bool) -> Config:
    """The configuration of a shape, measured or by rule: no timing at start-up.

    Up to FEW rows all row counts sum in the same order, and so do all above; only stages differ within either.
    """
    few, many = TUNED.get((N, K, glu)) or (None, None)
    config = (few if T <= FEW else many) or _rule(T, N, K, glu)
    # Whatever the table says, what is loaded ahead must fit, and no more of it than there is.
    tile_bytes = (config.block_n * (2 if glu else 1) + block_rows(T)) * config.block_k * 2
    steps = triton.cdiv(K, config.block_k * config.split_k)
    stages = max(2, min(config.stages, SHARED_BYTES // tile_bytes, steps + 1))
    if T > SKINNY:  # several programs to a processor, and every weight is asked for by several
        return replace(config, stages=min(stages, 4), prefetch=0)
    return replace(config, stages=stages, prefetch=min(config.prefetch, _power_of_two_within(K)))


def skinny_rows(N: int, K: int, glu: bool) -> int:
    """Most rows that go to the Triton product: as long as it is faster than cuBLAS with its small kernels, and in small
    models a whole batch of rounds, since cuBLAS rounds otherwise and would let a text depend on its company."""
    many = TUNED[N, K, glu][1] if (N, K, glu) in TUNED else _many_rows(N, K, glu)
    if _small(N, K) or (many is not None and K < 1024):
        return TILED
    return SKINNY if many is not None else FEW


def _small(N: int, K: int) -> bool:
    return N * K < 1 << 22


def _rule(T: int, N: int, K: int, glu: bool) -> Config:
    """Comes to what the measured shapes were found to want.

    Programs that fill the processors evenly, and so much shared memory that no others fit beside them: programs of
    the next kernel that start early would end up unevenly spread.
    """
    columns = N // 2 if glu else N
    if _small(N, K):
        # Launches and latencies decide: many small programs that ask for all of their K at once.
        block_n = 16 if columns < 132 * 64 else 64
        block_k = 256 if K % 256 == 0 and K >= 1024 and block_n == 16 else 128 if K % 128 == 0 else 64
        return Config(block_n, block_k, 10, 2 if block_n == 16 else 4, prefetch=512, lines=True)
    many = _many_rows(N, K, glu) if T > FEW else None
    if many is not None:
        return many
    if columns > 132 * 128:
        block_n = 64
    else:

        def fill(block: int) -> float:
            programs = triton.cdiv(columns, block)
            return programs / (132 * triton.cdiv(programs, 132))

        sizes = (128, 64, 32, 16) if glu else (64, 32, 16)
        block_n = next((block for block in sizes if fill(block) >= 0.8), 16)
    weight_rows = block_n * (2 if glu else 1)
    block_k = 256 if weight_rows <= 32 else 128
    while K % block_k and block_k > 64:
        block_k //= 2
    resident = min(3, triton.cdiv(columns, 132 * block_n))
    stages = min(13, SHARED_BYTES // resident // ((weight_rows + block_rows(T)) * block_k * 2))
    # About 8 MiB over the whole launch: what the memory delivers while the predecessor drains and x arrives.
    prefetch = _power_of_two_within(min(K, (4 << 20) // min(N, 264 * weight_rows)))
    return Config(block_n, block_k, max(3, stages), {128: 8, 16: 2}.get(block_n, 4), prefetch=prefetch)


def _many_rows(N: int, K: int, glu: bool) -> Config | None:
    """For more than FEW rows of a large shape: wide tiles, so that x is not read too often. None: cuBLAS is faster."""
    if glu:
        return Config(64, 64, 4, 4, prefetch=128) if N >= 132 * 128 else None
    if N > 132 * 128:
        return Config(64, 128 if K % 128 == 0 else 64, 3, 4, prefetch=128)
    if 110 <= 2 * triton.cdiv(N, 64) <= 132 and K % 256 == 0:
        return Config(64, 128, 6, 4, split_k=2, prefetch=1024)
    return None


def _power_of_two_within(K: int) -> int:
    return 1 << (K.bit_length() - 1)


@functools.cache
def supports_pdl(device: torch.device) -> bool:
    """Programmatic dependent launch: from Hopper on, and never in the interpreter."""
    return not INTERPRETED and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


_counters: dict[torch.device, Tensor] = {}


def _counters_on(device: torch.device) -> Tensor:
    """Zeros that every split launch leaves zero again. One stream at a time."""
    if device not in _counters:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("call the linear layer once before capturing it: its counters outlive the graph")
        _counters[device] = torch.zeros(_COUNTERS, dtype=torch.int32, device=device)
    return _counters[device]


def linear_triton(
    x: Tensor | Stream,
    weight_NK: Tensor,
    bias: Tensor | None = None,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    glu: bool = False,
    residual: Tensor | None = None,
    config: Config | None = None,
    pdl: bool | None = None,
) -> Tensor:
    """One launch (two where the norm is neither fused nor in the stream) for up to SKINNY rows of bf16 or fp16."""
    return stream_triton(
        x,
        weight_NK,
        bias,
        norm_weight=norm_weight,
        eps=eps,
        glu=glu,
        residual=residual,
        config=config,
        pdl=pdl,
    ).x


def stream_triton(
    x: Tensor | Stream,
    weight_NK: Tensor,
    bias: Tensor | None = None,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    glu: bool = False,
    residual: Tensor | None = None,
    next_norm: Tensor | None = None,
    config: Config | None = None,
    pdl: bool | None = None,
) -> Stream:
    squares = None
    if isinstance(x, Stream):
        if norm_weight is not None and x.norm_weight is norm_weight and x.squares is not None:
            x_TK, squares, norm_weight = x.scaled, x.squares, None
        else:
            x_TK = x.x
    else:
        x_TK = x
    assert x_TK is not None
    (T, K), N = x_TK.shape, weight_NK.shape[0]
    assert T <= TILED and weight_NK.shape[1] == K and weight_NK.is_contiguous() and not (glu and N % 2), (T, N, K)
    assert x_TK.stride(1) == 1 or K == 1, "rows of x must be contiguous"
    columns = N // 2 if glu else N
    assert residual is None or (residual.shape == (T, columns) and residual.stride(1) == 1), "residual"
    y = torch.empty(T, columns, dtype=x_TK.dtype, device=x_TK.device)
    if T == 0:
        return Stream(y)
    cfg = config or config_for(T, N, K, glu)
    assert T <= SKINNY or cfg.split_k == 1, "parts of K meet at one counter for all rows"
    if pdl is None:
        pdl = supports_pdl(x_TK.device)
    if norm_weight is not None and not cfg.fuse_norm:
        x_TK = rms_norm_triton(x_TK, norm_weight, eps, pdl=pdl)
        norm_weight = None
    block_m = block_rows(T)
    tiles = triton.cdiv(columns, cfg.block_n)
    stream = Stream(y)
    # Not by T, on which it must not depend where all row counts have one configuration.
    most_rows = FEW if T <= FEW and not _small(N, K) else SKINNY
    if next_norm is not None and triton.next_power_of_2(tiles) * most_rows <= MOST_SQUARES:
        next_squares = torch.empty(tiles, T, dtype=torch.float64, device=y.device)
        stream = Stream(y, next_norm, torch.empty_like(y), next_squares)
    partials = counters = None
    if cfg.split_k > 1:
        counters = _counters_on(x_TK.device)
        assert tiles <= len(counters), "too wide to split"
        size = (cfg.block_n * (2 if glu else 1) + 1) * block_m
        partials = torch.empty(cfg.split_k * tiles * size, dtype=torch.float32, device=x_TK.device)
    descriptor = None
    if cfg.tma:
        descriptor = TensorDescriptor(weight_NK, [N, K], [K, 1], [cfg.block_n, cfg.block_k])
    steps = triton.cdiv(triton.cdiv(K, cfg.block_k), cfg.split_k)
    even = steps * cfg.split_k * cfg.block_k == K
    # A bulk request asks for whole 16-byte pieces, and must stay inside the weights.
    prefetch = min(cfg.prefetch, _power_of_two_within(steps * cfg.block_k if even else K)) if pdl else 0
    if prefetch < 64 or K % 8 or weight_NK.data_ptr() % 16 or not (even or cfg.split_k == 1):
        prefetch = 0
    _linear_kernel[(tiles, cfg.split_k, triton.cdiv(T, block_m))](
        x_TK,
        weight_NK,
        descriptor,
        y,
        bias,
        norm_weight,
        squares,
        0 if squares is None else len(squares),
        residual,
        stream.norm_weight,
        stream.scaled,
        stream.squares,
        partials,
        counters,
        T,
        columns,
        K,
        x_TK.stride(0),
        residual.stride(0) if residual is not None else columns,
        columns,
        eps,
        BLOCK_M=block_m,
        BLOCK_N=cfg.block_n,
        BLOCK_K=cfg.block_k,
        SPLIT_K=cfg.split_k,
        STEPS=steps,
        EVEN_K=even,
        GLU=glu,
        PDL=pdl,
        PREFETCH=prefetch,
        LINES=cfg.lines,
        COPIES=max(1, cfg.warps * 32 // cfg.block_n),
        LATE=cfg.late,
        BLOCK_SQUARES=1 if squares is None else triton.next_power_of_2(len(squares)),
        num_warps=cfg.warps,
        num_stages=cfg.stages,
        **({"launch_pdl": True} if pdl else {}),
    )
    return stream


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float, *, pdl: bool | None = None) -> Tensor:
    return _norm_launch(x, None, weight, eps, pdl)[0]


def add_rms_norm_triton(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, pdl: bool | None = None
) -> tuple[Tensor, Tensor]:
    return _norm_launch(x, residual, weight, eps, pdl)


def _norm_launch(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, pdl: bool | None
) -> tuple[Tensor, Tensor]:
    T, K = x.shape
    assert x.stride(1) == 1 and (residual is None or (residual.shape == x.shape and residual.stride(1) == 1))
    y = torch.empty(T, K, dtype=x.dtype, device=x.device)
    total = y if residual is None else torch.empty_like(y)
    if T == 0:
        return y, total
    if pdl is None:
        pdl = supports_pdl(x.device)
    block = triton.next_power_of_2(K)
    _rms_norm_kernel[(T,)](
        x,
        residual,
        weight,
        y,
        total,
        K,
        x.stride(0),
        residual.stride(0) if residual is not None else K,
        eps,
        BLOCK_K=block,
        PDL=pdl,
        num_warps=max(1, min(16, block // 256)),
        **({"launch_pdl": True} if pdl else {}),
    )
    return y, total


def norm_cat_triton(
    a: Tensor, a_weight: Tensor, b: Tensor, b_weight: Tensor, eps: float, *, pdl: bool | None = None
) -> Tensor:
    T, K = a.shape
    assert b.shape == a.shape and a.stride(1) == 1 and b.stride(1) == 1
    y = torch.empty(T, 2 * K, dtype=a.dtype, device=a.device)
    if T == 0:
        return y
    if pdl is None:
        pdl = supports_pdl(a.device)
    block = triton.next_power_of_2(K)
    _norm_cat_kernel[(T, 2)](
        a,
        b,
        a_weight,
        b_weight,
        y,
        K,
        a.stride(0),
        b.stride(0),
        eps,
        BLOCK_K=block,
        PDL=pdl,
        num_warps=max(1, min(16, block // 256)),
        **({"launch_pdl": True} if pdl else {}),
    )
    return y


def silu_mul_triton(y_T2I: Tensor, *, pdl: bool | None = None) -> Tensor:
    T, half = y_T2I.shape[0], y_T2I.shape[1] // 2
    assert y_T2I.stride(1) == 1 and y_T2I.shape[1] == 2 * half
    out = torch.empty(T, half, dtype=y_T2I.dtype, device=y_T2I.device)
    if T == 0:
        return out
    if pdl is None:
        pdl = supports_pdl(y_T2I.device)
    block = 1024
    _silu_mul_kernel[(T, triton.cdiv(half, block))](
        y_T2I,
        out,
        half,
        y_T2I.stride(0),
        BLOCK=block,
        PDL=pdl,
        num_warps=4,
        **({"launch_pdl": True} if pdl else {}),
    )
    return out


def _fast(*tensors: Tensor | None) -> bool:
    """Whether the Triton kernels can take these: one half type, on a CUDA device, nothing to differentiate."""
    given = [t for t in tensors if t is not None]
    return _halves(given) and not _differentiates(given)


def trains_fast(*tensors: Tensor | None) -> bool:
    """Whether these are for the kernels of `trained`: as above, but with something to differentiate."""
    given = [t for t in tensors if t is not None]
    return _halves(given) and _differentiates(given)


def _halves(given: list[Tensor]) -> bool:
    return (
        HAVE_TRITON
        and not INTERPRETED
        and given[0].is_cuda
        and given[0].dtype in (torch.bfloat16, torch.float16)
        and all(t.dtype == given[0].dtype and t.stride(-1) == 1 for t in given)
    )


def _differentiates(given: list[Tensor]) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in given)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.dtype == torch.float32 and x.is_cpu and torch.is_inference_mode_enabled():
        return F.rms_norm(x, (x.shape[-1],), weight, eps)  # the twin's arithmetic, in one call
    if x.dim() == 2 and trains_fast(x, weight):
        from peagle.kernels.trained import rms_norm_trained

        return rms_norm_trained(x, weight, eps)
    return rms_norm_triton(x, weight, eps) if x.dim() == 2 and _fast(x, weight) else rms_norm_torch(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(norm of the sum, the sum)"""
    if x.dim() == 2 and _fast(x, residual, weight):
        return add_rms_norm_triton(x, residual, weight, eps)
    return add_rms_norm_torch(x, residual, weight, eps)


def norm_cat(a: Tensor, a_weight: Tensor, b: Tensor, b_weight: Tensor, eps: float) -> Tensor:
    """norm(a) and norm(b) side by side, as one tensor."""
    if a.dim() == 2 and _fast(a, b, a_weight, b_weight):
        return norm_cat_triton(a, a_weight, b, b_weight, eps)
    return torch.cat([rms_norm(a, a_weight, eps), rms_norm(b, b_weight, eps)], -1)


def silu_mul(y_T2I: Tensor) -> Tensor:
    if y_T2I.dim() == 2 and trains_fast(y_T2I):
        from peagle.kernels.trained import silu_mul_trained

        return silu_mul_trained(y_T2I)
    return silu_mul_triton(y_T2I) if y_T2I.dim() == 2 and _fast(y_T2I) else silu_mul_torch(y_T2I)


def linear_cublas(
    x_TK: Tensor,
    weight_NK: Tensor,
    bias: Tensor | None = None,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    glu: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """The library's product, with one launch before and at most one after it."""
    x = x_TK if norm_weight is None else rms_norm(x_TK, norm_weight, eps)
    if residual is not None and bias is None and not glu:
        return torch.addmm(residual, x, weight_NK.t())
    y = F.linear(x, weight_NK, bias)
    if glu:
        y = silu_mul(y)
    return y if residual is None else y.add_(residual)


def linear(
    x: Tensor | Stream,
    weight_NK: Tensor,
    bias: Tensor | None = None,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    glu: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """residual + glu(norm(x) @ weight^T + bias), each part only where asked for; [T, N], or [T, N/2] with a gate.

    Weight rows of a gated product: all gates, then all ups.
    """
    if isinstance(x, Stream) and x.normed is not None and x.norm_weight is norm_weight:
        x, norm_weight = x.normed, None
    plain = x.x if isinstance(x, Stream) else x
    options: dict[str, Any] = {"norm_weight": norm_weight, "eps": eps, "glu": glu, "residual": residual}
    if not _fast_product(plain, weight_NK, bias, norm_weight, residual):
        if plain.is_cpu and torch.is_inference_mode_enabled():
            return linear_cpu(plain, weight_NK, bias, **options)
        if plain.dim() == 2 and trains_fast(plain, weight_NK, bias, norm_weight, residual):
            return linear_torch(plain, weight_NK, bias, **options, norm=rms_norm, gate=silu_mul)
        return linear_torch(plain, weight_NK, bias, **options)
    N, K = weight_NK.shape
    if len(plain) <= skinny_rows(N, K, glu):
        return linear_triton(x, weight_NK, bias, **options)
    return linear_cublas(plain, weight_NK, bias, **options)


def linear_onto(
    residual: Tensor,
    x: Tensor,
    weight_NK: Tensor,
    bias: Tensor | None = None,
    *,
    next_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Stream:
    """The residual stream with a product added to it; `next_norm` and `eps` are those of the norm that will read it."""
    N, K = weight_NK.shape
    if next_norm is not None and _fast_product(x, weight_NK, bias, next_norm, residual):
        if len(x) > skinny_rows(N, K, False):
            # One launch for sum and norm; cuBLAS would first copy the residual to where it adds to it.
            normed, total = add_rms_norm(F.linear(x, weight_NK, bias), residual, next_norm, eps)
            return Stream(total, next_norm, normed=normed)
        if x.dtype == torch.bfloat16:  # fp16 could overflow in x * weight, where the norm's own order would not
            return stream_triton(x, weight_NK, bias, residual=residual, next_norm=next_norm)
    return Stream(linear(x, weight_NK, bias, residual=residual))


def _fast_product(x: Tensor, weight_NK: Tensor, *others: Tensor | None) -> bool:
    return x.dim() == 2 and weight_NK.is_contiguous() and _fast(x, weight_NK, *others)
