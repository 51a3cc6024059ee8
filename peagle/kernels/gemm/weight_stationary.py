"""The weight-stationary GEMM: few rows of small models, whose weights wait in shared memory for the rows.

A small GEMM mostly waits: for the previous kernel, then for its result and for the weights. No kernel writes weights,
so a program here loads all of its weights as it starts, while the previous kernel still runs, and then waits for rows
only. Triton cannot express that (it copies to shared memory in loops only), so this kernel is written in Gluon,
Triton's lower and experimental level. It is used with the Triton releases and GPUs it was tested with; otherwise
linear_triton.py computes the same bits.

Shapes as in linear.py.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: disable-error-code="assignment,misc,operator,unreachable,var-annotated"

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch import Tensor

from peagle.kernels.gemm.tile_configs import stationary_rows
from peagle.kernels.gemm.types import GemmConfig
from peagle.kernels.norm.types import ResidualStream
from peagle.kernels.triton_utils import HAVE_TRITON, INTERPRETED, pdl_launch_options

TRITON_RELEASES = ("3.6.",)  # releases whose Gluon was tested
# Weight tiles that are also loaded into registers before the wait; with 12, a decode step of 8 rows takes 3% longer.
REGISTER_TILES = 9

HAVE_GLUON = False
if HAVE_TRITON:
    import triton

    if triton.__version__.startswith(TRITON_RELEASES) and not INTERPRETED:
        from triton.experimental import gluon
        from triton.experimental.gluon import language as gl
        from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
        from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

        HAVE_GLUON = True


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Whether this is the GPU generation that Gluon kernels were tested on: others differ in shared memory or MMAs."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def supports_gluon(x_TK: Tensor, weight_NK: Tensor, bias: Tensor | None) -> bool:
    """Whether the Gluon GEMMs (here and in tiled.py) take these tensors: no bias, rows aligned to 16 bytes."""
    if bias is not None or not is_hopper(x_TK.device):
        return False
    if not HAVE_GLUON:
        warnings.warn(
            f"Triton {triton.__version__}: the fastest GEMM kernels of small models need Triton "
            f"{TRITON_RELEASES[0]}x; falling back to slower ones with the same results",
            stacklevel=2,
        )
        return False
    return x_TK.stride(0) % 16 == 0 and x_TK.data_ptr() % 16 == 0 and weight_NK.data_ptr() % 16 == 0


if HAVE_GLUON:

    @gluon.jit
    def load_squares(
        squares_ptr, count, first, M, BLOCK_SQUARES: gl.constexpr, BLOCK_M: gl.constexpr, LAYOUT: gl.constexpr
    ):
        """Loads the partial sums of squares that the kernel before wrote for these rows."""
        i = gl.arange(0, BLOCK_SQUARES, gl.SliceLayout(1, LAYOUT))
        j = first + gl.arange(0, BLOCK_M, gl.SliceLayout(0, LAYOUT))
        known = (i < count)[:, None] & (j < M)[None, :]
        return gl.load(squares_ptr + i[:, None] * M + j[None, :], mask=known, other=0.0)

    @gluon.jit
    def inverse_rms(squares, K, eps, SUMS: gl.constexpr):
        """Returns 1 / rms of each row."""
        total = gl.convert_layout(gl.sum(squares, 0).to(gl.float32), gl.SliceLayout(0, SUMS))
        return gl.rsqrt(total / K + eps)[None, :]

    @gluon.jit
    def apply_norm_and_gate(acc, up, scale, GLU: gl.constexpr):
        if scale is not None:
            acc = acc * scale
            if GLU:
                up = up * scale
        if GLU:
            acc = acc / (1.0 + gl.exp(-acc)) * up
        return acc

    @gluon.jit
    def store_output(y, y_ptr, next_norm, scaled_ptr, next_squares_ptr, n, m, inside, tile, M, y_stride):
        """Stores the result and, if there is a next norm, what prepares it."""
        dtype: gl.constexpr = y_ptr.dtype.element_ty
        offsets = m[None, :] * y_stride + n[:, None]
        gl.store(y_ptr + offsets, y, mask=inside)
        if next_norm is not None:
            y = gl.where(inside, y.to(gl.float32), 0.0)
            gl.store(scaled_ptr + offsets, (y * next_norm.to(gl.float32)[:, None]).to(dtype), mask=inside)
            gl.store(next_squares_ptr + tile * M + m, gl.sum((y * y).to(gl.float64), 0), mask=m < M)

    @gluon.jit(do_not_specialize=["M", "squares_count"])
    def _weight_stationary_kernel(
        x_ptr,
        w_ptr,
        y_ptr,
        squares_ptr,
        squares_count,
        residual_ptr,
        next_norm_ptr,
        scaled_ptr,
        next_squares_ptr,
        M,
        N,
        K,
        x_stride,
        residual_stride,
        y_stride,
        eps,
        BLOCK_M: gl.constexpr,
        BLOCK_N: gl.constexpr,
        BLOCK_K: gl.constexpr,
        STEPS: gl.constexpr,
        ACCUMULATORS: gl.constexpr,
        REGISTER_TILES: gl.constexpr,
        GLU: gl.constexpr,
        PDL: gl.constexpr,
        BLOCK_SQUARES: gl.constexpr,
        WARPS: gl.constexpr,
    ):
        """Computes one transposed output tile, [BLOCK_N weights] x [BLOCK_M rows]; sums as in linear_triton.py."""
        dtype: gl.constexpr = y_ptr.dtype.element_ty
        SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, WARPS], [16, 8])
        LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
        RIGHT: gl.constexpr = gl.DotOperandLayout(1, SUMS, 2)
        COPIES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
        SQUARES: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [1, WARPS], [1, 0])
        SHARED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
        PARTS: gl.constexpr = 2 if GLU else 1
        TURNS: gl.constexpr = STEPS // ACCUMULATORS

        tile = gl.program_id(0)
        if PDL:
            gdc_launch_dependents()
        # Separate allocations: the compiler would serialize copies into parts of one allocation.
        weights = ()
        rows = ()
        for _ in gl.static_range(STEPS * PARTS):
            weights = weights + (gl.allocate_shared_memory(dtype, [BLOCK_N, BLOCK_K], SHARED),)
        for _ in gl.static_range(STEPS):
            rows = rows + (gl.allocate_shared_memory(dtype, [BLOCK_M, BLOCK_K], SHARED),)
        k = gl.arange(0, BLOCK_K, gl.SliceLayout(0, COPIES))
        n = tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, COPIES))
        w_ptrs = w_ptr + n.to(gl.int64)[:, None] * K + k[None, :]
        up = (tile * 0 + N).to(gl.int64) * K
        for step in gl.static_range(STEPS):
            async_copy.async_copy_global_to_shared(weights[step * PARTS], w_ptrs + step * BLOCK_K)
            if GLU:
                async_copy.async_copy_global_to_shared(weights[step * PARTS + 1], w_ptrs + up + step * BLOCK_K)
        async_copy.commit_group()
        async_copy.wait_group(0)
        registers = ()
        for step in gl.static_range(REGISTER_TILES):
            registers = registers + (weights[step * PARTS].load(LEFT),)
            if GLU:
                registers = registers + (weights[step * PARTS + 1].load(LEFT),)
        if PDL:
            gdc_wait()

        # Rows past the last one are masked: reading the last row again would load the same words several times in every
        # program. Their results are not stored.
        first = gl.program_id(1) * BLOCK_M
        m = first + gl.arange(0, BLOCK_M, gl.SliceLayout(1, COPIES))
        x_ptrs = x_ptr + m[:, None] * x_stride + k[None, :]
        valid = (m < M)[:, None]
        for turn in gl.static_range(TURNS):
            for i in gl.static_range(ACCUMULATORS):
                at = (turn * ACCUMULATORS + i) * BLOCK_K
                async_copy.async_copy_global_to_shared(rows[turn * ACCUMULATORS + i], x_ptrs + at, mask=valid)
            async_copy.commit_group()

        # Load the operands of the epilogue before the loop over K, so that they have arrived when it ends.
        n = tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, SUMS))
        m = first + gl.arange(0, BLOCK_M, gl.SliceLayout(0, SUMS))
        inside = (m < M)[None, :] & (n < N)[:, None]
        next_norm = None
        if next_norm_ptr is not None:
            next_norm = gl.load(next_norm_ptr + n)
        residual = None
        if residual_ptr is not None:
            residual = gl.load(residual_ptr + m[None, :] * residual_stride + n[:, None], mask=inside, other=0.0)
        squares = None
        if squares_ptr is not None:
            squares = load_squares(squares_ptr, squares_count, first, M, BLOCK_SQUARES, BLOCK_M, SQUARES)

        accs = ()
        ups = ()
        for _ in gl.static_range(ACCUMULATORS):
            accs = accs + (gl.zeros([BLOCK_N, BLOCK_M], gl.float32, SUMS),)
            if GLU:
                ups = ups + (gl.zeros([BLOCK_N, BLOCK_M], gl.float32, SUMS),)
        for turn in gl.static_range(TURNS):
            async_copy.wait_group(TURNS - 1 - turn)
            new_accs = ()
            new_ups = ()
            for i in gl.static_range(ACCUMULATORS):
                x = rows[turn * ACCUMULATORS + i].permute((1, 0)).load(RIGHT)
                if turn * ACCUMULATORS + i < REGISTER_TILES:
                    w = registers[(turn * ACCUMULATORS + i) * PARTS]
                else:
                    w = weights[(turn * ACCUMULATORS + i) * PARTS].load(LEFT)
                new_accs = new_accs + (mma_v2(w, x, accs[i]),)
                if GLU:
                    if turn * ACCUMULATORS + i < REGISTER_TILES:
                        w = registers[(turn * ACCUMULATORS + i) * PARTS + 1]
                    else:
                        w = weights[(turn * ACCUMULATORS + i) * PARTS + 1].load(LEFT)
                    new_ups = new_ups + (mma_v2(w, x, ups[i]),)
            accs = new_accs
            ups = new_ups
        acc = accs[0]
        up_acc = ups[0] if GLU else None
        for i in gl.static_range(1, ACCUMULATORS):
            acc += accs[i]
            if GLU:
                up_acc += ups[i]

        scale = None
        if squares is not None:
            scale = inverse_rms(squares, K, eps, SUMS)
        acc = apply_norm_and_gate(acc, up_acc, scale, GLU)
        if residual is not None:
            acc += residual.to(gl.float32)
        store_output(acc.to(dtype), y_ptr, next_norm, scaled_ptr, next_squares_ptr, n, m, inside, tile, M, y_stride)


def kernel_arguments(
    x_TK: Tensor, weight_NK: Tensor, squares: Tensor | None, residual: Tensor | None, out: ResidualStream, eps: float
) -> tuple[Any, ...]:
    """Returns the arguments of a Gluon GEMM before its constants; it writes into the tensors of `out`."""
    (T, K), columns = x_TK.shape, out.x.shape[1]
    given = (x_TK, weight_NK, out.x, squares, 0 if squares is None else len(squares), residual)
    strides = (x_TK.stride(0), residual.stride(0) if residual is not None else columns, columns)
    return *given, out.norm_weight, out.scaled, out.squares, T, columns, K, *strides, eps


def launch_weight_stationary(
    x_TK: Tensor,
    weight_NK: Tensor,
    squares: Tensor | None,
    residual: Tensor | None,
    out: ResidualStream,
    eps: float,
    cfg: GemmConfig,
    pdl: bool,
    glu: bool,
) -> None:
    (T, K), columns = x_TK.shape, out.x.shape[1]
    parts, steps, rows = 2 if glu else 1, K // cfg.block_k, stationary_rows(T)
    _weight_stationary_kernel[(columns // cfg.block_n, triton.cdiv(T, rows))](
        *kernel_arguments(x_TK, weight_NK, squares, residual, out, eps),
        BLOCK_M=rows,
        BLOCK_N=cfg.block_n,
        BLOCK_K=cfg.block_k,
        STEPS=steps,
        ACCUMULATORS=cfg.accumulators,
        REGISTER_TILES=min(REGISTER_TILES // parts, steps),
        GLU=glu,
        BLOCK_SQUARES=1 if squares is None else triton.next_power_of_2(len(squares)),
        WARPS=rows // 8,
        num_warps=rows // 8,
        **pdl_launch_options(x_TK.device, pdl),
    )
