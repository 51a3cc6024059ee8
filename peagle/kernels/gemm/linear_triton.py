"""The Triton GEMM for few rows: one launch with norm, gate, bias and residual.

The norm is applied in one of two ways: the kernel that wrote x prepared it (`ResidualStream.squares`), or a separate
launch computes it first. Shapes as in linear.py.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, disable-error-code="assignment,misc,operator"
# (kernels annotate compile-time constants only, and their tuples grow; the functions that launch them are typed)

from typing import Any

import torch
from torch import Tensor

from peagle.kernels.gemm.gluon_gemms import launch_gluon, supports_gluon
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
from peagle.kernels.norm.rms_norm import ResidualStream, rms_norm_triton
from peagle.kernels.triton_utils import HAVE_TRITON, pdl_launch_options, supports_pdl

# Most sums of squares that a GEMM takes over from its predecessor: every program reads all of them into registers.
MAX_SQUARES = 8192
MIN_COLUMNS = 16  # fewest columns per program of a small shape

_NUM_COUNTERS = 16384  # int32 counters per device at which the parts of split GEMMs meet

if HAVE_TRITON:
    import triton
    import triton.language as tl

    from peagle.kernels.norm.rms_norm import order_independent_sum

    @triton.jit
    def _prefetch_rows(w_ptr, rows, k, K, COUNT: tl.constexpr, PREFETCH_LINES: tl.constexpr, COPIES: tl.constexpr):
        """Prefetches COUNT elements of each row from column k on into L2, by line or by one bulk request per row."""
        NBYTES: tl.constexpr = COUNT * w_ptr.dtype.element_ty.primitive_bitwidth // 8
        first = w_ptr + rows.to(tl.int64)[:, None] * K + k
        if PREFETCH_LINES:
            addresses = first.to(tl.int64) + (tl.arange(0, NBYTES // 128) * 128)[None, :]
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; // $0", "=r,l", [addresses], dtype=tl.int32, is_pure=False, pack=1
            )
        else:
            # With fewer rows than threads, several threads hold each row: only the first copy sends the request.
            copy = tl.arange(0, COPIES)[None, :]
            addresses = first.to(tl.int64) + copy.to(tl.int64) * 0
            nbytes = tl.where(copy == 0, NBYTES, 0) + (rows * 0)[:, None]
            tl.inline_asm_elementwise(
                "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; } // $0",
                "=r,l,r", [addresses, nbytes], dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip

    @triton.jit
    def _load_squares(squares_ptr, squares_count, m, M, BLOCK_SQUARES: tl.constexpr):
        i = tl.arange(0, BLOCK_SQUARES)
        known = (i < squares_count)[:, None] & (m < M)[None, :]
        return tl.load(squares_ptr + i[:, None] * M + m[None, :], mask=known, other=0.0)

    @triton.jit
    def _inverse_rms(squares, K, eps):
        return tl.rsqrt(order_independent_sum(squares).to(tl.float32) / K + eps)[None, :]

    @triton.jit
    def _finish(
        acc, up, scale, residual, bias_ptr, w_scale_ptr, y_ptr,
        next_norm, scaled_ptr, next_squares_ptr, n, m, tile, M, N,
    ):  # fmt: skip
        """Applies scales, norm, bias, gate and residual to the sum over K and stores it; absent parts are None."""
        inside = (n < N)[:, None] & (m < M)[None, :]
        dtype = y_ptr.dtype.element_ty
        if w_scale_ptr is not None:
            acc = acc * tl.load(w_scale_ptr + n, mask=n < N, other=0.0)[:, None]
            if up is not None:
                up = up * tl.load(w_scale_ptr + N + n, mask=n < N, other=0.0)[:, None]
        if scale is not None:
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
        offsets = m[None, :] * N + n[:, None]
        tl.store(y_ptr + offsets, y, mask=inside)
        if next_norm is not None:
            y = tl.where(inside, y.to(tl.float32), 0.0)
            tl.store(scaled_ptr + offsets, (y * next_norm.to(tl.float32)[:, None]).to(dtype), mask=inside)
            tl.store(next_squares_ptr + tile * M + m, order_independent_sum(y * y), mask=m < M)

    # These arguments change between launches; specializing on them would recompile each time.
    @triton.jit(do_not_specialize=["M", "squares_count"])
    def _linear_kernel(
        x_ptr, w_ptr, y_ptr,
        squares_ptr, squares_count, residual_ptr, next_norm_ptr, scaled_ptr, next_squares_ptr,
        M, N, K, x_stride, residual_stride, eps,
        bias_ptr, partial_ptr, counter_ptr, w_scale_ptr,
        BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
        STEPS: tl.constexpr, ACCUMULATORS: tl.constexpr, EVEN_K: tl.constexpr, GLU: tl.constexpr, PDL: tl.constexpr,
        PREFETCH: tl.constexpr, PREFETCH_LINES: tl.constexpr, COPIES: tl.constexpr, LATE_LAUNCH: tl.constexpr,
        BLOCK_SQUARES: tl.constexpr,
    ):  # fmt: skip
        """Computes one transposed output tile, [BLOCK_N weights] x [BLOCK_M rows], over one of SPLIT_K parts of K.

        An MMA waits for the previous one on the same accumulator. ACCUMULATORS sums take the steps over K in turn, so
        that these waits overlap.
        """
        # Programs that share weights have neighbouring ids, so that the weights are read from memory once.
        tile = tl.program_id(1)
        part = tl.program_id(2)
        n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
        k = tl.arange(0, BLOCK_K)
        inside = (n < N)[:, None] & (m < M)[None, :]
        # Programs past the last weight row read it again, without a mask in the loop, and do not store the result.
        rows = tl.minimum(n, N - 1)
        begin = part * (STEPS * BLOCK_K)

        if PDL:
            # Let the successor start prefetching its weights, then prefetch ours. Only after the wait are the results
            # of earlier kernels visible, and their inputs free to be overwritten.
            if not LATE_LAUNCH:
                tl.extra.cuda.gdc_launch_dependents()
            if PREFETCH > 0:
                _prefetch_rows(w_ptr, rows, begin, K, PREFETCH, PREFETCH_LINES, COPIES)
                if GLU:
                    _prefetch_rows(w_ptr, rows + N, begin, K, PREFETCH, PREFETCH_LINES, COPIES)
            tl.extra.cuda.gdc_wait()

        # Load the operands of the epilogue before the loop over K, so that they have arrived when it ends.
        next_norm = None
        if next_norm_ptr is not None:
            next_norm = tl.load(next_norm_ptr + n, mask=n < N, other=0.0)
        residual = None
        if residual_ptr is not None and SPLIT_K == 1:
            residual = tl.load(residual_ptr + m[None, :] * residual_stride + n[:, None], mask=inside, other=0.0)
        squares = None
        if squares_ptr is not None and SPLIT_K == 1:
            squares = _load_squares(squares_ptr, squares_count, m, M, BLOCK_SQUARES)

        x_ptrs = x_ptr + m[None, :] * x_stride + (begin + k)[:, None]
        w_ptrs = w_ptr + rows.to(tl.int64)[:, None] * K + (begin + k)[None, :]
        up_offset = (tile * 0 + N).to(tl.int64) * K  # Triton passes N = 1 as an untyped constant
        accs = ()
        ups = ()
        for _ in tl.static_range(ACCUMULATORS):
            accs = accs + (tl.zeros([BLOCK_N, BLOCK_M], tl.float32),)
            if GLU:
                ups = ups + (tl.zeros([BLOCK_N, BLOCK_M], tl.float32),)
        for turn in range(STEPS // ACCUMULATORS):
            new_accs = ()
            new_ups = ()
            for a in tl.static_range(ACCUMULATORS):
                start = begin + (turn * ACCUMULATORS + a) * BLOCK_K
                if EVEN_K:
                    x = tl.load(x_ptrs, mask=(m < M)[None, :], other=0.0)
                    w = tl.load(w_ptrs)
                else:
                    x = tl.load(x_ptrs, mask=(m < M)[None, :] & (start + k < K)[:, None], other=0.0)
                    w = tl.load(w_ptrs, mask=(start + k < K)[None, :], other=0.0)
                new_accs = new_accs + (tl.dot(w.to(x.dtype), x, accs[a]),)
                if GLU:
                    if EVEN_K:
                        w = tl.load(w_ptrs + up_offset)
                    else:
                        w = tl.load(w_ptrs + up_offset, mask=(start + k < K)[None, :], other=0.0)
                    new_ups = new_ups + (tl.dot(w.to(x.dtype), x, ups[a]),)
                x_ptrs += BLOCK_K
                w_ptrs += BLOCK_K
            accs = new_accs
            ups = new_ups
        acc = accs[0]
        up = ups[0] if GLU else None
        for a in tl.static_range(1, ACCUMULATORS):
            acc += accs[a]
            if GLU:
                up += ups[a]
        if PDL and LATE_LAUNCH:
            tl.extra.cuda.gdc_launch_dependents()

        if SPLIT_K == 1:
            scale = None
            if squares is not None:
                scale = _inverse_rms(squares, K, eps)
            _finish(
                acc, up, scale, residual, bias_ptr, w_scale_ptr, y_ptr,
                next_norm, scaled_ptr, next_squares_ptr, n, m, tile, M, N,
            )  # fmt: skip
        else:
            # Each part stores its sums; the last one to arrive adds all of them, in order.
            tl.static_assert(not GLU, "a gated GEMM is not split")
            SIZE: tl.constexpr = BLOCK_N * BLOCK_M
            tiles = tl.num_programs(1)
            offsets = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + m[None, :]
            used = (m < M)[None, :]
            tl.store(partial_ptr + (part * tiles + tile) * SIZE + offsets, acc, mask=used)
            tl.debug_barrier()  # all threads have stored before one of them signals
            arrived = tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel")
            if arrived == SPLIT_K - 1:
                acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
                for other in tl.static_range(SPLIT_K):
                    # .cg: from L2, where the stores of other programs are visible
                    partial = partial_ptr + (other * tiles + tile) * SIZE + offsets
                    acc += tl.load(partial, mask=used, other=0.0, cache_modifier=".cg")
                if residual_ptr is not None:
                    residual = tl.load(residual_ptr + m[None, :] * residual_stride + n[:, None], mask=inside, other=0.0)
                scale = None
                if squares_ptr is not None:
                    scale = _inverse_rms(_load_squares(squares_ptr, squares_count, m, M, BLOCK_SQUARES), K, eps)
                _finish(
                    acc, up, scale, residual, bias_ptr, w_scale_ptr, y_ptr,
                    next_norm, scaled_ptr, next_squares_ptr, n, m, tile, M, N,
                )  # fmt: skip
                tl.store(counter_ptr + tile, 0)  # ready for the next launch


_counters: dict[torch.device, Tensor] = {}


def _counters_on(device: torch.device) -> Tensor:
    """Returns the device's counters, which every split launch resets to zero; for one stream at a time."""
    if device not in _counters:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("call the linear layer once before capturing it: its counters outlive the graph")
        _counters[device] = torch.zeros(_NUM_COUNTERS, dtype=torch.int32, device=device)
    return _counters[device]


def linear_triton(x: Tensor | ResidualStream, weight_NK: Tensor, bias: Tensor | None = None, **options: Any) -> Tensor:
    """Computes `linear` (linear.py); options as those of `linear_residual_triton`."""
    return linear_residual_triton(x, weight_NK, bias, **options).x


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
    weight_scale: Tensor | None = None,
    config: GemmConfig | None = None,
    pdl: bool | None = None,
) -> ResidualStream:
    """Computes `linear` for up to MAX_TILED_ROWS rows of bf16 or fp16 and prepares `next_norm` if it is given.

    Takes one launch, or two if there is a norm that x does not have prepared.
    """
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
    assert T <= MAX_TILED_ROWS and weight_NK.shape[1] == K and weight_NK.is_contiguous(), (T, N, K)
    assert not (glu and N % 2), "a gated GEMM has as many gates as ups"
    assert x_TK.stride(1) == 1 or K == 1, "rows of x must be contiguous"
    columns = N // 2 if glu else N
    assert residual is None or (residual.shape == (T, columns) and residual.stride(1) == 1), "residual"
    y = torch.empty(T, columns, dtype=x_TK.dtype, device=x_TK.device)
    if T == 0:
        return ResidualStream(y)
    cfg = config or config_for(T, N, K, glu)
    if pdl is None:
        pdl = supports_pdl(x_TK.device)
    if norm_weight is not None:
        x_TK = rms_norm_triton(x_TK, norm_weight, eps, pdl=pdl)
    # The Triton GEMM adds a residual after a norm or a gate, which no model has, by an instruction that the tiled one
    # does not use.
    tile = cfg.tile if residual is None or (squares is None and not glu) else None
    gluon = (cfg.weight_stationary or tile is not None) and weight_scale is None
    gluon = gluon and supports_gluon(x_TK, weight_NK, bias)
    tile = tile if gluon else None
    tiles = triton.cdiv(columns, tile.block_n if tile is not None else cfg.block_n)
    out = ResidualStream(y)
    # Whether the next norm is prepared must not depend on T among row counts that round alike.
    max_rows, max_tiles = MAX_FEW_ROWS if T <= MAX_FEW_ROWS else MAX_SKINNY_ROWS, tiles
    if is_small_shape(N, K):
        max_rows, max_tiles = MAX_SKINNY_ROWS, triton.cdiv(columns, MIN_COLUMNS)
    if next_norm is not None and triton.next_power_of_2(max_tiles) * max_rows <= MAX_SQUARES:
        next_squares = torch.empty(tiles, T, dtype=torch.float64, device=y.device)
        out = ResidualStream(y, next_norm, torch.empty_like(y), next_squares)
    given = (x_TK, weight_NK, y, squares, 0 if squares is None else len(squares), residual)
    strides = (x_TK.stride(0), residual.stride(0) if residual is not None else columns)
    arguments = (*given, out.norm_weight, out.scaled, out.squares, T, columns, K, *strides, eps)
    options: dict[str, Any] = {"ACCUMULATORS": cfg.accumulators, "GLU": glu, **pdl_launch_options(y.device, pdl)}
    options["BLOCK_SQUARES"] = 1 if squares is None else triton.next_power_of_2(len(squares))
    if gluon:
        launch_gluon(T, columns, K, cfg, tile, *arguments, **options)
    else:
        _launch(T, columns, K, cfg, bias, *arguments, w_scale_ptr=weight_scale, **options)
    return out


def _launch(T: int, N: int, K: int, cfg: GemmConfig, bias: Tensor | None, *arguments: Any, **options: Any) -> None:
    weight_NK, block_m, tiles = arguments[1], cfg.block_m or block_rows(T), triton.cdiv(N, cfg.block_n)
    partials = counters = None
    if cfg.split_k > 1:
        assert T <= block_m, "the parts of K share one counter for all rows"
        counters = _counters_on(weight_NK.device)
        assert tiles <= len(counters), "too many columns to split K"
        size = cfg.split_k * tiles * cfg.block_n * block_m
        partials = torch.empty(size, dtype=torch.float32, device=weight_NK.device)
    steps = triton.cdiv(triton.cdiv(K, cfg.block_k), cfg.split_k)
    assert steps % cfg.accumulators == 0, (K, cfg)
    even = steps * cfg.split_k * cfg.block_k == K
    # A bulk prefetch takes multiples of 16 bytes and must stay inside the weights.
    prefetch = min(cfg.prefetch, power_of_two_within(steps * cfg.block_k if even else K)) if options["PDL"] else 0
    itemsize = weight_NK.element_size()
    if prefetch * itemsize < 128 or K * itemsize % 16 or weight_NK.data_ptr() % 16 or not (even or cfg.split_k == 1):
        prefetch = 0
    _linear_kernel[(triton.cdiv(T, block_m), tiles, cfg.split_k)](
        *arguments, bias, partials, counters,
        BLOCK_M=block_m, BLOCK_N=cfg.block_n, BLOCK_K=cfg.block_k, SPLIT_K=cfg.split_k, STEPS=steps, EVEN_K=even,
        PREFETCH=prefetch, PREFETCH_LINES=cfg.prefetch_lines, COPIES=max(1, cfg.warps * 32 // cfg.block_n),
        LATE_LAUNCH=cfg.late_launch, num_warps=cfg.warps, num_stages=cfg.stages, **options,
    )  # fmt: skip
