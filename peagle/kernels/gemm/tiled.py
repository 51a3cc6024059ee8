"""The tiled GEMM: many rows of small models, for large decode batches and prompts.

A tile of 64 columns and 64 rows reads half as much from L2 as four of 32 by 32. Larger tiles take more registers, and a
small GEMM's several accumulators (linear.py) multiply that; so this kernel computes one accumulator after another and
keeps the total of the finished ones. The bits are those of linear_triton.py. It is written in Gluon, like
weight_stationary.py, since Triton gives tiles this large another MMA instruction, which rounds differently. A residual
comes without a gate and without a norm: with either, Triton fuses multiplication and addition, which are separate here.

Shapes as in linear.py.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: disable-error-code="assignment,misc,operator,unreachable,var-annotated"

from __future__ import annotations

from torch import Tensor

from peagle.kernels.gemm.tile_configs import TILE_K
from peagle.kernels.gemm.types import TileConfig
from peagle.kernels.gemm.weight_stationary import HAVE_GLUON, kernel_arguments
from peagle.kernels.norm.types import ResidualStream
from peagle.kernels.triton_utils import pdl_launch_options

if HAVE_GLUON:
    import triton
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

    from peagle.kernels.gemm.weight_stationary import apply_norm_and_gate, inverse_rms, load_squares, store_output

    @gluon.jit(do_not_specialize=["M", "squares_count"])
    def _tiled_kernel(
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
        STEPS_AHEAD: gl.constexpr,
        BUFFERS: gl.constexpr,
        GLU: gl.constexpr,
        PDL: gl.constexpr,
        LATE_LAUNCH: gl.constexpr,
        BLOCK_SQUARES: gl.constexpr,
        WARPS_N: gl.constexpr,
        WARPS_M: gl.constexpr,
    ):
        """Computes one transposed output tile, [BLOCK_N weights] x [BLOCK_M rows].

        STEPS_AHEAD steps over K are prefetched into BUFFERS shared buffers, used in turn.
        """
        dtype: gl.constexpr = y_ptr.dtype.element_ty
        WARPS: gl.constexpr = WARPS_N * WARPS_M
        SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS_N, WARPS_M], [16, 8])
        LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
        RIGHT: gl.constexpr = gl.DotOperandLayout(1, SUMS, 2)
        COPIES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
        SQUARES: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [1, WARPS], [1, 0])
        OUT: gl.constexpr = gl.BlockedLayout([8, 1], [BLOCK_N // 8, 256 // BLOCK_N], [1, WARPS], [0, 1])
        SHARED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
        PARTS: gl.constexpr = 2 if GLU else 1
        TURNS: gl.constexpr = STEPS // ACCUMULATORS

        tile = gl.program_id(1)
        if PDL and not LATE_LAUNCH:
            gdc_launch_dependents()
        weights = ()
        rows = ()
        for _ in gl.static_range(BUFFERS * PARTS):
            weights = weights + (gl.allocate_shared_memory(dtype, [BLOCK_N, BLOCK_K], SHARED),)
        for _ in gl.static_range(BUFFERS):
            rows = rows + (gl.allocate_shared_memory(dtype, [BLOCK_M, BLOCK_K], SHARED),)
        k = gl.arange(0, BLOCK_K, gl.SliceLayout(0, COPIES))
        n = tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, COPIES))
        w_ptrs = w_ptr + n.to(gl.int64)[:, None] * K + k[None, :]
        up = (tile * 0 + N).to(gl.int64) * K
        # Accumulator by accumulator: the i-th step is the (i % TURNS)-th of accumulator i // TURNS.
        for i in gl.static_range(STEPS_AHEAD):
            at = ((i % TURNS) * ACCUMULATORS + i // TURNS) * BLOCK_K
            async_copy.async_copy_global_to_shared(weights[i * PARTS], w_ptrs + at)
            if GLU:
                async_copy.async_copy_global_to_shared(weights[i * PARTS + 1], w_ptrs + up + at)
        async_copy.commit_group()
        if PDL:
            gdc_wait()

        # Rows past the last one read it again, and their results are not stored.
        first = gl.program_id(0) * BLOCK_M
        m = first + gl.arange(0, BLOCK_M, gl.SliceLayout(1, COPIES))
        x_ptrs = x_ptr + gl.minimum(m, M - 1)[:, None] * x_stride + k[None, :]
        for i in gl.static_range(STEPS_AHEAD):
            at = ((i % TURNS) * ACCUMULATORS + i // TURNS) * BLOCK_K
            async_copy.async_copy_global_to_shared(rows[i], x_ptrs + at)
            async_copy.commit_group()

        # Load the operands of the epilogue before the loop over K, so that they have arrived when it ends.
        n = tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, OUT))
        m = first + gl.arange(0, BLOCK_M, gl.SliceLayout(0, OUT))
        inside = (m < M)[None, :] & (n < N)[:, None]
        next_norm = None
        if next_norm_ptr is not None:
            next_norm = gl.load(next_norm_ptr + n)
        residual = None
        if residual_ptr is not None:
            residual = gl.load(residual_ptr + m[None, :] * residual_stride + n[:, None], mask=inside, other=0.0)
        scale = None
        if squares_ptr is not None:
            squares = load_squares(squares_ptr, squares_count, first, M, BLOCK_SQUARES, BLOCK_M, SQUARES)
            scale = inverse_rms(squares, K, eps, SUMS)

        acc = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, SUMS)
        up_acc = acc
        total = acc
        up_total = acc
        for i in gl.static_range(STEPS):
            async_copy.wait_group(STEPS - 1 - i if STEPS - 1 - i < STEPS_AHEAD - 1 else STEPS_AHEAD - 1)
            if i + STEPS_AHEAD < STEPS:
                at = (((i + STEPS_AHEAD) % TURNS) * ACCUMULATORS + (i + STEPS_AHEAD) // TURNS) * BLOCK_K
                async_copy.async_copy_global_to_shared(weights[(i + STEPS_AHEAD) % BUFFERS * PARTS], w_ptrs + at)
                if GLU:
                    async_copy.async_copy_global_to_shared(
                        weights[(i + STEPS_AHEAD) % BUFFERS * PARTS + 1], w_ptrs + up + at
                    )
                async_copy.async_copy_global_to_shared(rows[(i + STEPS_AHEAD) % BUFFERS], x_ptrs + at)
                async_copy.commit_group()
            x = rows[i % BUFFERS].permute((1, 0)).load(RIGHT)
            acc = mma_v2(weights[i % BUFFERS * PARTS].load(LEFT), x, acc)
            if GLU:
                up_acc = mma_v2(weights[i % BUFFERS * PARTS + 1].load(LEFT), x, up_acc)
            if (i + 1) % TURNS == 0:
                if i + 1 == TURNS:
                    total = acc
                    up_total = up_acc
                else:
                    total += acc
                    if GLU:
                        up_total += up_acc
                acc = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, SUMS)
                up_acc = acc
        if PDL and LATE_LAUNCH:
            gdc_launch_dependents()

        total = apply_norm_and_gate(total, up_total, scale, GLU)
        # Give each thread outputs that are adjacent in memory.
        if residual is not None:
            y = (gl.convert_layout(total, OUT) + residual.to(gl.float32)).to(dtype)
        else:
            y = gl.convert_layout(total.to(dtype), OUT)
        store_output(y, y_ptr, next_norm, scaled_ptr, next_squares_ptr, n, m, inside, tile, M, y_stride)


def launch_tiled(
    x_TK: Tensor,
    weight_NK: Tensor,
    squares: Tensor | None,
    residual: Tensor | None,
    out: ResidualStream,
    eps: float,
    tile: TileConfig,
    accumulators: int,
    pdl: bool,
    glu: bool,
) -> None:
    (T, K), columns = x_TK.shape, out.x.shape[1]
    steps = K // TILE_K
    ahead = min(tile.steps_ahead, steps)
    _tiled_kernel[(triton.cdiv(T, tile.block_m), columns // tile.block_n)](
        *kernel_arguments(x_TK, weight_NK, squares, residual, out, eps),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=TILE_K,
        STEPS=steps,
        ACCUMULATORS=accumulators,
        STEPS_AHEAD=ahead,
        BUFFERS=min(ahead + 1, steps),
        GLU=glu,
        LATE_LAUNCH=tile.late_launch,
        BLOCK_SQUARES=1 if squares is None else triton.next_power_of_2(len(squares)),
        WARPS_N=tile.warps_n,
        WARPS_M=tile.warps_m,
        num_warps=tile.warps_n * tile.warps_m,
        **pdl_launch_options(x_TK.device, pdl),
    )
