"""Products of many rows in small models: rounds of many requests, and prompts.

A tile of 64 columns and 64 rows asks L2 for half of what four of 32 and 32 do. Larger tiles take more registers, and
the several sums of a small product (linear.py says what they are for) multiply that; so here they are taken one after
another, and one and the total of those before it are kept. The numbers are those of linear_triton.py, bit for bit. In
Gluon, as linear_held.py is, since Triton gives tiles this large another instruction, which rounds otherwise. A residual
comes without a gate and without a norm, as models have it: with either, Triton multiplies and adds in one instruction,
which here are two.

Shapes as in linear.py.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: disable-error-code="assignment,misc,operator,unreachable,var-annotated"

from __future__ import annotations

from torch import Tensor

from peagle.kernels.gemm.tile_configs import TILE_K, TileConfig
from peagle.kernels.gemm.weight_stationary import HAVE_GLUON, arguments
from peagle.kernels.norm.rms_norm import ResidualStream

if HAVE_GLUON:
    import triton
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

    from peagle.kernels.gemm.weight_stationary import leave, prepared_squares, scale_of, scaled_and_gated

    @gluon.jit(do_not_specialize=["M", "squares_count"])
    def _tiles_kernel(
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
        AHEAD: gl.constexpr,
        BUFFERS: gl.constexpr,
        GLU: gl.constexpr,
        PDL: gl.constexpr,
        LATE: gl.constexpr,
        BLOCK_SQUARES: gl.constexpr,
        WARPS_N: gl.constexpr,
        WARPS_M: gl.constexpr,
    ):
        """One tile of outputs, transposed: [BLOCK_N weights] x [BLOCK_M rows]. AHEAD steps are asked for before the one
        that is multiplied, into BUFFERS places in turns."""
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
        TURNS: gl.constexpr = STEPS // CHAINS

        tile = gl.program_id(1)
        if PDL and not LATE:
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
        # Chain by chain: the i-th step that is multiplied is the (i % TURNS)-th of chain i // TURNS.
        for i in gl.static_range(AHEAD):
            at = ((i % TURNS) * CHAINS + i // TURNS) * BLOCK_K
            async_copy.async_copy_global_to_shared(weights[i * PARTS], w_ptrs + at)
            if GLU:
                async_copy.async_copy_global_to_shared(weights[i * PARTS + 1], w_ptrs + up + at)
        async_copy.commit_group()
        if PDL:
            gdc_wait()

        # Past the last row it is read again; nothing of that is stored.
        first = gl.program_id(0) * BLOCK_M
        m = first + gl.arange(0, BLOCK_M, gl.SliceLayout(1, COPIES))
        x_ptrs = x_ptr + gl.minimum(m, M - 1)[:, None] * x_stride + k[None, :]
        for i in gl.static_range(AHEAD):
            at = ((i % TURNS) * CHAINS + i // TURNS) * BLOCK_K
            async_copy.async_copy_global_to_shared(rows[i], x_ptrs + at)
            async_copy.commit_group()

        # What the end needs is asked for here, so that it has arrived when the loop ends.
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
            theirs = prepared_squares(squares_ptr, squares_count, first, M, BLOCK_SQUARES, BLOCK_M, SQUARES)
            scale = scale_of(theirs, K, eps, SUMS)

        acc = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, SUMS)
        up_acc = acc
        total = acc
        up_total = acc
        for i in gl.static_range(STEPS):
            async_copy.wait_group(STEPS - 1 - i if STEPS - 1 - i < AHEAD - 1 else AHEAD - 1)
            if i + AHEAD < STEPS:
                at = (((i + AHEAD) % TURNS) * CHAINS + (i + AHEAD) // TURNS) * BLOCK_K
                async_copy.async_copy_global_to_shared(weights[(i + AHEAD) % BUFFERS * PARTS], w_ptrs + at)
                if GLU:
                    async_copy.async_copy_global_to_shared(weights[(i + AHEAD) % BUFFERS * PARTS + 1], w_ptrs + up + at)
                async_copy.async_copy_global_to_shared(rows[(i + AHEAD) % BUFFERS], x_ptrs + at)
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
        if PDL and LATE:
            gdc_launch_dependents()

        total = scaled_and_gated(total, up_total, scale, GLU)
        # Neighbours in memory to one thread.
        if residual is not None:
            y = (gl.convert_layout(total, OUT) + residual.to(gl.float32)).to(dtype)
        else:
            y = gl.convert_layout(total.to(dtype), OUT)
        leave(y, y_ptr, next_norm, scaled_ptr, next_squares_ptr, n, m, inside, tile, M, y_stride)


def launch_tiles(
    x_TK: Tensor,
    weight_NK: Tensor,
    squares: Tensor | None,
    residual: Tensor | None,
    out: ResidualStream,
    eps: float,
    tile: TileConfig,
    chains: int,
    pdl: bool,
    glu: bool,
) -> None:
    (T, K), columns = x_TK.shape, out.x.shape[1]
    steps = K // TILE_K
    ahead = min(tile.ahead, steps)
    _tiles_kernel[(triton.cdiv(T, tile.block_m), columns // tile.block_n)](
        *arguments(x_TK, weight_NK, squares, residual, out, eps),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=TILE_K,
        STEPS=steps,
        CHAINS=chains,
        AHEAD=ahead,
        BUFFERS=min(ahead + 1, steps),
        GLU=glu,
        PDL=pdl,
        LATE=tile.late,
        BLOCK_SQUARES=1 if squares is None else triton.next_power_of_2(len(squares)),
        WARPS_N=tile.warps_n,
        WARPS_M=tile.warps_m,
        num_warps=tile.warps_n * tile.warps_m,
        **({"launch_pdl": True} if pdl else {}),
    )
