"""Products of few rows in small models, whose weights wait in shared memory for the rows they are multiplied with.

What a small product takes is mostly waiting: for the kernel ahead, then for its result and for the weights. Weights are
nobody's output. Here a program asks for all of its own as it starts, while the kernel ahead still runs, and once that
one is done it has only the rows left to wait for. Triton has no words for that (it copies to shared memory in loops
alone), so this is written in Gluon, its lower level, which is experimental: it is used with the releases and on the
GPUs it was tried with, and otherwise linear_triton.py does the same, bit for bit.

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

from peagle.kernels.gemm.tile_configs import GemmConfig, held_rows
from peagle.kernels.norm.rms_norm import ResidualStream
from peagle.kernels.triton_utils import HAVE_TRITON, INTERPRETED

RELEASES = ("3.6.",)  # of Triton
KEPT = 9  # tiles of weights that are in registers, too, before the wait; with 12 a round of 8 rows takes 3% longer

HAVE_GLUON = False
if HAVE_TRITON:
    import triton

    if triton.__version__.startswith(RELEASES) and not INTERPRETED:
        from triton.experimental import gluon
        from triton.experimental.gluon import language as gl
        from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
        from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

        HAVE_GLUON = True


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """As the GPU was that it was tried on: others have less shared memory, or other instructions."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def can_hold(x_TK: Tensor, weight_NK: Tensor, bias: Tensor | None) -> bool:
    """Whether these are for Gluon's products, here: they are copied in pieces of 16 bytes, and have no bias."""
    if bias is not None or not is_hopper(x_TK.device):
        return False
    if not HAVE_GLUON:
        warnings.warn(
            f"Triton {triton.__version__}: small models have their fastest products with {RELEASES[0]}x alone; "
            "the text is the same, but rounds take longer",
            stacklevel=2,
        )
        return False
    return x_TK.stride(0) % 16 == 0 and x_TK.data_ptr() % 16 == 0 and weight_NK.data_ptr() % 16 == 0


if HAVE_GLUON:

    @gluon.jit
    def prepared_squares(
        squares_ptr, count, first, M, BLOCK_SQUARES: gl.constexpr, BLOCK_M: gl.constexpr, LAYOUT: gl.constexpr
    ):
        """What the producer of rows left of their sums of squares."""
        i = gl.arange(0, BLOCK_SQUARES, gl.SliceLayout(1, LAYOUT))
        j = first + gl.arange(0, BLOCK_M, gl.SliceLayout(0, LAYOUT))
        known = (i < count)[:, None] & (j < M)[None, :]
        return gl.load(squares_ptr + i[:, None] * M + j[None, :], mask=known, other=0.0)

    @gluon.jit
    def scale_of(squares, K, eps, SUMS: gl.constexpr):
        """1 / rms of each row."""
        total = gl.convert_layout(gl.sum(squares, 0).to(gl.float32), gl.SliceLayout(0, SUMS))
        return gl.rsqrt(total / K + eps)[None, :]

    @gluon.jit
    def scaled_and_gated(acc, up, scale, GLU: gl.constexpr):
        if scale is not None:
            acc = acc * scale
            if GLU:
                up = up * scale
        if GLU:
            acc = acc / (1.0 + gl.exp(-acc)) * up
        return acc

    @gluon.jit
    def leave(y, y_ptr, next_norm, scaled_ptr, next_squares_ptr, n, m, inside, tile, M, y_stride):
        """The result, and what the next product wants of its norm."""
        dtype: gl.constexpr = y_ptr.dtype.element_ty
        spot = m[None, :] * y_stride + n[:, None]
        gl.store(y_ptr + spot, y, mask=inside)
        if next_norm is not None:
            y = gl.where(inside, y.to(gl.float32), 0.0)
            gl.store(scaled_ptr + spot, (y * next_norm.to(gl.float32)[:, None]).to(dtype), mask=inside)
            gl.store(next_squares_ptr + tile * M + m, gl.sum((y * y).to(gl.float64), 0), mask=m < M)

    @gluon.jit(do_not_specialize=["M", "squares_count"])
    def _held_kernel(
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
        CHAINS: gl.constexpr,
        KEEP: gl.constexpr,
        GLU: gl.constexpr,
        PDL: gl.constexpr,
        BLOCK_SQUARES: gl.constexpr,
        WARPS: gl.constexpr,
    ):
        """One tile of outputs, transposed: [BLOCK_N weights] x [BLOCK_M rows]; sums as in linear_triton.py."""
        dtype: gl.constexpr = y_ptr.dtype.element_ty
        SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, WARPS], [16, 8])
        LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
        RIGHT: gl.constexpr = gl.DotOperandLayout(1, SUMS, 2)
        COPIES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
        SQUARES: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [1, WARPS], [1, 0])
        SHARED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
        PARTS: gl.constexpr = 2 if GLU else 1
        TURNS: gl.constexpr = STEPS // CHAINS

        tile = gl.program_id(0)
        if PDL:
            gdc_launch_dependents()
        # A piece of memory for each: of parts of one piece the compiler thinks that they overlap, and has them wait.
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
        kept = ()
        for step in gl.static_range(KEEP):
            kept = kept + (weights[step * PARTS].load(LEFT),)
            if GLU:
                kept = kept + (weights[step * PARTS + 1].load(LEFT),)
        if PDL:
            gdc_wait()

        # Nothing past the last row is read: were that one read again instead, all programs would ask for the same words
        # several times. What is multiplied there is nobody's, and not stored.
        first = gl.program_id(1) * BLOCK_M
        m = first + gl.arange(0, BLOCK_M, gl.SliceLayout(1, COPIES))
        x_ptrs = x_ptr + m[:, None] * x_stride + k[None, :]
        there = (m < M)[:, None]
        for turn in gl.static_range(TURNS):
            for chain in gl.static_range(CHAINS):
                at = (turn * CHAINS + chain) * BLOCK_K
                async_copy.async_copy_global_to_shared(rows[turn * CHAINS + chain], x_ptrs + at, mask=there)
            async_copy.commit_group()

        # What the end needs is asked for here, so that it has arrived when the loop ends.
        n = tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, SUMS))
        m = first + gl.arange(0, BLOCK_M, gl.SliceLayout(0, SUMS))
        inside = (m < M)[None, :] & (n < N)[:, None]
        next_norm = None
        if next_norm_ptr is not None:
            next_norm = gl.load(next_norm_ptr + n)
        residual = None
        if residual_ptr is not None:
            residual = gl.load(residual_ptr + m[None, :] * residual_stride + n[:, None], mask=inside, other=0.0)
        theirs = None
        if squares_ptr is not None:
            theirs = prepared_squares(squares_ptr, squares_count, first, M, BLOCK_SQUARES, BLOCK_M, SQUARES)

        accs = ()
        ups = ()
        for _ in gl.static_range(CHAINS):
            accs = accs + (gl.zeros([BLOCK_N, BLOCK_M], gl.float32, SUMS),)
            if GLU:
                ups = ups + (gl.zeros([BLOCK_N, BLOCK_M], gl.float32, SUMS),)
        for turn in gl.static_range(TURNS):
            async_copy.wait_group(TURNS - 1 - turn)
            new_accs = ()
            new_ups = ()
            for chain in gl.static_range(CHAINS):
                x = rows[turn * CHAINS + chain].permute((1, 0)).load(RIGHT)
                if turn * CHAINS + chain < KEEP:
                    w = kept[(turn * CHAINS + chain) * PARTS]
                else:
                    w = weights[(turn * CHAINS + chain) * PARTS].load(LEFT)
                new_accs = new_accs + (mma_v2(w, x, accs[chain]),)
                if GLU:
                    if turn * CHAINS + chain < KEEP:
                        w = kept[(turn * CHAINS + chain) * PARTS + 1]
                    else:
                        w = weights[(turn * CHAINS + chain) * PARTS + 1].load(LEFT)
                    new_ups = new_ups + (mma_v2(w, x, ups[chain]),)
            accs = new_accs
            ups = new_ups
        acc = accs[0]
        up_acc = ups[0] if GLU else None
        for chain in gl.static_range(1, CHAINS):
            acc += accs[chain]
            if GLU:
                up_acc += ups[chain]

        scale = None
        if theirs is not None:
            scale = scale_of(theirs, K, eps, SUMS)
        acc = scaled_and_gated(acc, up_acc, scale, GLU)
        if residual is not None:
            acc += residual.to(gl.float32)
        leave(acc.to(dtype), y_ptr, next_norm, scaled_ptr, next_squares_ptr, n, m, inside, tile, M, y_stride)


def arguments(
    x_TK: Tensor, weight_NK: Tensor, squares: Tensor | None, residual: Tensor | None, out: ResidualStream, eps: float
) -> tuple[Any, ...]:
    """What kernels of this kind are given before their constants; they write into `out` and what it has for a norm."""
    (T, K), columns = x_TK.shape, out.x.shape[1]
    given = (x_TK, weight_NK, out.x, squares, 0 if squares is None else len(squares), residual)
    strides = (x_TK.stride(0), residual.stride(0) if residual is not None else columns, columns)
    return *given, out.norm_weight, out.scaled, out.squares, T, columns, K, *strides, eps


def launch_held(
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
    parts, steps, rows = 2 if glu else 1, K // cfg.block_k, held_rows(T)
    _held_kernel[(columns // cfg.block_n, triton.cdiv(T, rows))](
        *arguments(x_TK, weight_NK, squares, residual, out, eps),
        BLOCK_M=rows,
        BLOCK_N=cfg.block_n,
        BLOCK_K=cfg.block_k,
        STEPS=steps,
        CHAINS=cfg.chains,
        KEEP=min(KEPT // parts, steps),
        GLU=glu,
        PDL=pdl,
        BLOCK_SQUARES=1 if squares is None else triton.next_power_of_2(len(squares)),
        WARPS=rows // 8,
        num_warps=rows // 8,
        **({"launch_pdl": True} if pdl else {}),
    )
