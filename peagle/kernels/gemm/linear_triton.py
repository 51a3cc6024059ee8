"""The Triton version of linear.py: products of few rows, in one launch with norm, gate, bias and residual.

Shapes as in linear.py; which tiles a shape has is linear_shapes.py's.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, disable-error-code="assignment,misc,operator"
# (kernels declare only what is a compile-time constant, and their tuples grow; the functions around them are typed)

from __future__ import annotations

import torch
from torch import Tensor

from peagle.kernels.gemm.tile_configs import (
    MAX_FEW_ROWS,
    MAX_SKINNY_ROWS,
    MAX_TILED_ROWS,
    GemmConfig,
    block_rows,
    config_for,
    is_small_shape,
    power_of_two_within,
)
from peagle.kernels.gemm.tiled import launch_tiles
from peagle.kernels.gemm.weight_stationary import can_hold, launch_held
from peagle.kernels.norm.rms_norm import ResidualStream
from peagle.kernels.norm.rms_norm_triton import rms_norm_triton
from peagle.kernels.triton_utils import HAVE_TRITON, supports_pdl

# Sums of squares that a product takes over from its predecessor: each program reads them all, into registers.
MOST_SQUARES = 8192
LEAST_COLUMNS = 16  # of any program of a small shape

# Split products meet at these many int32 counters per device.
_COUNTERS = 16384

if HAVE_TRITON:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor

    from peagle.kernels.norm.rms_norm_triton import sum_in_any_order

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
            tl.store(next_squares_ptr + tile * M + m, sum_in_any_order(y * y), mask=m < M)

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
        CHAINS: tl.constexpr,
        EVEN_K: tl.constexpr,
        GLU: tl.constexpr,
        PDL: tl.constexpr,
        PREFETCH: tl.constexpr,
        LINES: tl.constexpr,
        COPIES: tl.constexpr,
        LATE: tl.constexpr,
        BLOCK_SQUARES: tl.constexpr,
    ):
        """One tile of outputs, transposed: [BLOCK_N weights] x [BLOCK_M rows], over one of SPLIT_K parts of K.

        A product instruction waits for the one before it on the same sum. CHAINS sums take the steps in turns, so that
        these waits overlap.
        """
        NORM: tl.constexpr = norm_ptr is not None
        # Programs of the same weights follow each other, so that these are read once where there are many rows.
        tile = tl.program_id(1)
        part = tl.program_id(2)
        n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
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
        accs = ()
        ups = ()
        for _ in tl.static_range(CHAINS):
            accs = accs + (tl.zeros([BLOCK_N, BLOCK_M], tl.float32),)
            if GLU:
                ups = ups + (tl.zeros([BLOCK_N, BLOCK_M], tl.float32),)
        squares = None
        if NORM:
            squares = tl.zeros([BLOCK_K, BLOCK_M], tl.float32)  # summed over K at the end: no exchange in the loop
            # The compiler pipelines what it copies to shared memory, not these few: fetched one step ahead.
            norm_next = tl.load(norm_ptr + begin + k, mask=begin + k < K, other=0.0)
        for turn in range(STEPS // CHAINS):
            new_accs = ()
            new_ups = ()
            for chain in tl.static_range(CHAINS):
                start = begin + (turn * CHAINS + chain) * BLOCK_K
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
                new_accs = new_accs + (tl.dot(w, x, accs[chain]),)
                if GLU:
                    if w_desc is not None:
                        w = w_desc.load([N + tile * BLOCK_N, start])
                    elif EVEN_K:
                        w = tl.load(w_ptrs + up_offset)
                    else:
                        w = tl.load(w_ptrs + up_offset, mask=(start + k < K)[None, :], other=0.0)
                    new_ups = new_ups + (tl.dot(w, x, ups[chain]),)
                x_ptrs += BLOCK_K
                w_ptrs += BLOCK_K
            accs = new_accs
            ups = new_ups
        acc = accs[0]
        up = ups[0] if GLU else None
        for chain in tl.static_range(1, CHAINS):
            acc += accs[chain]
            if GLU:
                up += ups[chain]
        if PDL and LATE:
            tl.extra.cuda.gdc_launch_dependents()
        if NORM:
            squares = sum_in_any_order(squares).to(tl.float32)

        if SPLIT_K == 1:
            if their_squares is not None:
                squares = sum_in_any_order(their_squares).to(tl.float32)
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
            tiles = tl.num_programs(1)
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
                    squares = sum_in_any_order(tl.load(squares_ptrs, mask=known, other=0.0)).to(tl.float32)
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


_counters: dict[torch.device, Tensor] = {}


def _counters_on(device: torch.device) -> Tensor:
    """Zeros that every split launch leaves zero again. One stream at a time."""
    if device not in _counters:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("call the linear layer once before capturing it: its counters outlive the graph")
        _counters[device] = torch.zeros(_COUNTERS, dtype=torch.int32, device=device)
    return _counters[device]


def linear_triton(
    x: Tensor | ResidualStream,
    weight_NK: Tensor,
    bias: Tensor | None = None,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    glu: bool = False,
    residual: Tensor | None = None,
    config: GemmConfig | None = None,
    pdl: bool | None = None,
) -> Tensor:
    """One launch (two where the norm is neither fused nor in the stream) for rows of bf16 or fp16."""
    return linear_residual_triton(
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


def linear_residual_triton(
    x: Tensor | ResidualStream,
    weight_NK: Tensor,
    bias: Tensor | None = None,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    glu: bool = False,
    residual: Tensor | None = None,
    next_norm: Tensor | None = None,
    config: GemmConfig | None = None,
    pdl: bool | None = None,
) -> ResidualStream:
    squares = None
    if isinstance(x, ResidualStream):
        if norm_weight is not None and x.norm_weight is norm_weight and x.squares is not None:
            x_TK, squares, norm_weight = x.scaled, x.squares, None
        else:
            x_TK = x.x
    else:
        x_TK = x
    assert x_TK is not None
    (T, K), N = x_TK.shape, weight_NK.shape[0]
    assert T <= MAX_TILED_ROWS and weight_NK.shape[1] == K and weight_NK.is_contiguous() and not (glu and N % 2), (
        T,
        N,
        K,
    )
    assert x_TK.stride(1) == 1 or K == 1, "rows of x must be contiguous"
    columns = N // 2 if glu else N
    assert residual is None or (residual.shape == (T, columns) and residual.stride(1) == 1), "residual"
    y = torch.empty(T, columns, dtype=x_TK.dtype, device=x_TK.device)
    if T == 0:
        return ResidualStream(y)
    cfg = config or config_for(T, N, K, glu)
    block_m = cfg.block_m or block_rows(T)
    assert T <= block_m or cfg.split_k == 1, "parts of K meet at one counter for all rows"
    if pdl is None:
        pdl = supports_pdl(x_TK.device)
    if norm_weight is not None and not cfg.fuse_norm:
        x_TK = rms_norm_triton(x_TK, norm_weight, eps, pdl=pdl)
        norm_weight = None
    # A residual behind a norm or a gate, which no model has, is added there by an instruction that tiles do not have.
    tile = cfg.tile if norm_weight is None and (residual is None or (squares is None and not glu)) else None
    if tile is not None and not can_hold(x_TK, weight_NK, bias):
        tile = None
    tiles = triton.cdiv(columns, tile.block_n if tile is not None else cfg.block_n)
    stream = ResidualStream(y)
    # Not by T, on which it must not depend where all row counts are to round alike.
    most_rows, most_tiles = MAX_FEW_ROWS if T <= MAX_FEW_ROWS else MAX_SKINNY_ROWS, tiles
    if is_small_shape(N, K):
        most_rows, most_tiles = MAX_SKINNY_ROWS, triton.cdiv(columns, LEAST_COLUMNS)
    if next_norm is not None and triton.next_power_of_2(most_tiles) * most_rows <= MOST_SQUARES:
        next_squares = torch.empty(tiles, T, dtype=torch.float64, device=y.device)
        stream = ResidualStream(y, next_norm, torch.empty_like(y), next_squares)
    if cfg.held and norm_weight is None and can_hold(x_TK, weight_NK, bias):
        launch_held(x_TK, weight_NK, squares, residual, stream, eps, cfg, pdl, glu)
        return stream
    if tile is not None:
        launch_tiles(x_TK, weight_NK, squares, residual, stream, eps, tile, cfg.chains, pdl, glu)
        return stream
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
    assert steps % cfg.chains == 0, (K, cfg)
    even = steps * cfg.split_k * cfg.block_k == K
    # A bulk request asks for whole 16-byte pieces, and must stay inside the weights.
    prefetch = min(cfg.prefetch, power_of_two_within(steps * cfg.block_k if even else K)) if pdl else 0
    if prefetch < 64 or K % 8 or weight_NK.data_ptr() % 16 or not (even or cfg.split_k == 1):
        prefetch = 0
    _linear_kernel[(triton.cdiv(T, block_m), tiles, cfg.split_k)](
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
        CHAINS=cfg.chains,
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
