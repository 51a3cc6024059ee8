"""Linear layers of few rows, with what stands around them: norm before, SwiGLU, bias and residual after.

Decoding reads every weight once for a handful of rows, so a product costs what streaming its weights costs. The
Triton kernels here take up to SKINNY rows; more rows go to cuBLAS with single-launch kernels around it, and the CPU,
fp32, fp64 and training go to the plain torch twins (`*_torch`), which every faster version is held against.

A row's result depends neither on the other rows nor on their number: weights are the left operand of every product
and rows the right one, so however many rows there are, each output sums the same products in the same order by the
same instruction. Splitting K is part of a shape's configuration for all row counts, and parts are summed in order.

Shapes: T rows, K input width, N output width (twice the result's width for a gated product), I half of such an N.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# (kernels declare only what is a compile-time constant; the functions around them are typed)

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor

    HAVE_TRITON = True
except ImportError:  # no Triton for this machine: the torch twins and cuBLAS do everything
    HAVE_TRITON = False

SKINNY = 64  # most rows the Triton product takes

# Triton reads the variable when a kernel is declared, that is below, so a later change means nothing.
INTERPRETED = HAVE_TRITON and os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")

# Split products meet at these many int32 counters per device.
_COUNTERS = 16384


@dataclass(frozen=True)
class Config:
    """How one shape is computed. Stages, prefetch, lines and tma change the speed alone, the others also the rounding.

    block_n: output columns per program (a gated product takes that many gates and as many ups).
    prefetch: weights of each row (elements along K) a program asks into L2 before it waits for its predecessor.
    lines: prefetched line by line instead of row by row.
    fuse_norm: norm inside the product; otherwise a launch of its own before it.
    tma: weights come by tensor descriptor instead of per-thread asynchronous copies.
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


def rms_norm_torch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = x.float() if x.dtype != torch.float64 else x
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return weight * y.to(x.dtype)


def add_rms_norm_torch(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = residual + x
    return rms_norm_torch(total, weight, eps), total


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
) -> Tensor:
    x = x_TK if norm_weight is None else rms_norm_torch(x_TK, norm_weight, eps)
    y = F.linear(x, weight_NK, bias)
    if glu:
        y = silu_mul_torch(y)
    return y if residual is None else residual + y


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
    def _finish(acc, up, squares, residual, bias_ptr, y_ptr, n, m, inside, N, K, y_stride, eps, NORM: tl.constexpr):
        """Everything after the sum over K. `up` is None without a gate, `residual` None without a residual."""
        if NORM:
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
        tl.store(y_ptr + m[None, :] * y_stride + n[:, None], acc.to(y_ptr.dtype.element_ty), mask=inside)

    # M changes from launch to launch and must not cost a compilation each time.
    @triton.jit(do_not_specialize=["M"])
    def _linear_kernel(
        x_ptr,
        w_ptr,
        w_desc,
        y_ptr,
        bias_ptr,
        norm_ptr,
        residual_ptr,
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
    ):
        """One tile of outputs, transposed: [BLOCK_N weights] x [BLOCK_M rows], over one of SPLIT_K parts of K."""
        NORM: tl.constexpr = norm_ptr is not None
        tile = tl.program_id(0)
        part = tl.program_id(1)
        n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        m = tl.arange(0, BLOCK_M)
        k = tl.arange(0, BLOCK_K)
        inside = (n < N)[:, None] & (m < M)[None, :]
        # Past the last weight row the last one is read again: no mask in the loop, and nothing of it is stored.
        rows = tl.minimum(n, N - 1)
        begin = part * (STEPS * BLOCK_K)

        if PDL:
            # Let the successor start asking for its weights too, then ask for ours. Only after the wait is all that
            # earlier kernels wrote there to be read, and what they read free to be overwritten.
            tl.extra.cuda.gdc_launch_dependents()
            if PREFETCH > 0:
                _prefetch_rows(w_ptr, rows, begin, K, PREFETCH, LINES, COPIES)
                if GLU:
                    _prefetch_rows(w_ptr, rows + N, begin, K, PREFETCH, LINES, COPIES)
            tl.extra.cuda.gdc_wait()

        residual = None
        residual_ptrs = None
        if residual_ptr is not None:
            residual_ptrs = residual_ptr + m[None, :] * residual_stride + n[:, None]
            if SPLIT_K == 1:  # asked for here, so that it has arrived when the loop ends
                residual = tl.load(residual_ptrs, mask=inside, other=0.0)

        x_ptrs = x_ptr + m[None, :] * x_stride + (begin + k)[:, None]
        w_ptrs = w_ptr + rows.to(tl.int64)[:, None] * K + (begin + k)[None, :]
        up_offset = N.to(tl.int64) * K
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
        if NORM:
            squares = tl.sum(squares, 0)

        if SPLIT_K == 1:
            _finish(acc, up, squares, residual, bias_ptr, y_ptr, n, m, inside, N, K, y_stride, eps, NORM)
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
                _finish(acc, up, squares, residual, bias_ptr, y_ptr, n, m, inside, N, K, y_stride, eps, NORM)
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
        y = x * tl.rsqrt(tl.sum(x * x, 0) / K + eps)
        # Rounded before the weight comes in, as the torch twin does.
        y = y.to(dtype).to(tl.float32) * weight.to(tl.float32)
        tl.store(y_ptr + row * K + k, y.to(dtype), mask=k < K)

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
    """The configuration of a shape, from its numbers: no timing at start-up.

    Only `stages`, which do not touch the order of summation, depend on T.
    """
    columns = N // 2 if glu else N
    # About two programs on each of 132 processors, all of them at once, keep the memory busy to the end; more of them
    # only read x more often.
    block_n = 16
    while block_n < 64 and columns // (2 * block_n) >= 180:
        block_n *= 2
    weight_rows = block_n * (2 if glu else 1)
    block_k = 128 if weight_rows <= 64 and K % 128 == 0 else 64
    # Half of the shared memory for all programs on a processor, so that the successor's fit beside them.
    resident = 1 if columns <= 132 * block_n else 2
    tile_bytes = (weight_rows + block_rows(T)) * block_k * 2
    stages = 1 + max(2, min(8, 131072 // resident // tile_bytes))
    # About 8 MiB over the whole launch: what the memory delivers while the predecessor drains and x arrives.
    prefetch = _power_of_two_within(min(K, (4 << 20) // min(N, 264 * weight_rows)))
    return Config(block_n, block_k, stages, warps=2 if block_n == 16 else 4, prefetch=prefetch)


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
    x_TK: Tensor,
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
    """One launch (two where the norm is not fused) for up to SKINNY rows of bf16 or fp16."""
    (T, K), N = x_TK.shape, weight_NK.shape[0]
    assert T <= SKINNY and weight_NK.shape[1] == K and weight_NK.is_contiguous() and not (glu and N % 2), (T, N, K)
    assert x_TK.stride(1) == 1 or K == 1, "rows of x must be contiguous"
    columns = N // 2 if glu else N
    assert residual is None or (residual.shape == (T, columns) and residual.stride(1) == 1), "residual"
    y = torch.empty(T, columns, dtype=x_TK.dtype, device=x_TK.device)
    if T == 0:
        return y
    cfg = config or config_for(T, N, K, glu)
    if pdl is None:
        pdl = supports_pdl(x_TK.device)
    if norm_weight is not None and not cfg.fuse_norm:
        x_TK = rms_norm_triton(x_TK, norm_weight, eps, pdl=pdl)
        norm_weight = None
    block_m = block_rows(T)
    tiles = triton.cdiv(columns, cfg.block_n)
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
    _linear_kernel[(tiles, cfg.split_k)](
        x_TK,
        weight_NK,
        descriptor,
        y,
        bias,
        norm_weight,
        residual,
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
        num_warps=cfg.warps,
        num_stages=cfg.stages,
        **({"launch_pdl": True} if pdl else {}),
    )
    return y


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
    return (
        HAVE_TRITON
        and not INTERPRETED
        and given[0].is_cuda
        and given[0].dtype in (torch.bfloat16, torch.float16)
        and all(t.dtype == given[0].dtype and t.stride(-1) == 1 for t in given)
        and not (torch.is_grad_enabled() and any(t.requires_grad for t in given))
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms_norm_triton(x, weight, eps) if x.dim() == 2 and _fast(x, weight) else rms_norm_torch(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(norm of the sum, the sum)"""
    if x.dim() == 2 and _fast(x, residual, weight):
        return add_rms_norm_triton(x, residual, weight, eps)
    return add_rms_norm_torch(x, residual, weight, eps)


def silu_mul(y_T2I: Tensor) -> Tensor:
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
    x_TK: Tensor,
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
    run: Callable[..., Tensor] = linear_torch
    if x_TK.dim() == 2 and weight_NK.is_contiguous() and _fast(x_TK, weight_NK, bias, norm_weight, residual):
        run = linear_triton if len(x_TK) <= SKINNY else linear_cublas
    return run(x_TK, weight_NK, bias, norm_weight=norm_weight, eps=eps, glu=glu, residual=residual)
