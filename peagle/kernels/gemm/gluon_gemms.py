"""GEMMs of small models in Gluon: weight-stationary for few rows, tiled for more.

Gluon is Triton's lower and experimental level. These kernels are used with the Triton releases and GPUs they were
tested with; otherwise linear_triton.py computes the same bits. Shapes as in linear.py.

Weight-stationary: a small GEMM mostly waits, for the previous kernel, then for its result and for the weights. No
kernel writes weights, so a program loads all of its weights into shared memory as it starts, while the previous kernel
still runs, and then waits for rows only. Triton cannot express that: it copies to shared memory in loops only.

Tiled: for large decode batches and prompts. A tile of 64 columns and 64 rows reads half as much from L2 as four of 32
by 32. Larger tiles take more registers, and a small GEMM's several accumulators (linear.py) multiply that; so this
kernel computes one accumulator after another and keeps the total of the finished ones. Triton gives tiles this large
another MMA instruction, which rounds differently. A residual comes without a gate and without a norm: with either,
Triton fuses multiplication and addition, which are separate here.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# mypy: disable-error-code="assignment,misc,operator,unreachable,var-annotated"

import functools
import warnings
from typing import Any

import torch
from torch import Tensor

from peagle.kernels.gemm.tile_configs import GemmConfig, TileConfig, stationary_rows
from peagle.kernels.triton_utils import HAVE_TRITON, INTERPRETED

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
    """Whether the Gluon GEMMs take these tensors: no bias, rows aligned to 16 bytes."""
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
    def _load_squares(
        squares_ptr, count, first, M, BLOCK_SQUARES: gl.constexpr, BLOCK_M: gl.constexpr, LAYOUT: gl.constexpr
    ):
        """Loads the partial sums of squares that the kernel before wrote for these rows."""
        i = gl.arange(0, BLOCK_SQUARES, gl.SliceLayout(1, LAYOUT))
        j = first + gl.arange(0, BLOCK_M, gl.SliceLayout(0, LAYOUT))
        known = (i < count)[:, None] & (j < M)[None, :]
        return gl.load(squares_ptr + i[:, None] * M + j[None, :], mask=known, other=0.0)

    @gluon.jit
    def _inverse_rms(squares, K, eps, SUMS: gl.constexpr):
        """Returns 1 / rms of each row."""
        total = gl.convert_layout(gl.sum(squares, 0).to(gl.float32), gl.SliceLayout(0, SUMS))
        return gl.rsqrt(total / K + eps)[None, :]

    @gluon.jit
    def _apply_norm_and_gate(acc, up, scale, GLU: gl.constexpr):
        if scale is not None:
            acc = acc * scale
            if GLU:
                up = up * scale
        if GLU:
            acc = acc / (1.0 + gl.exp(-acc)) * up
        return acc

    @gluon.jit
    def _store_output(y, y_ptr, next_norm, scaled_ptr, next_squares_ptr, n, m, inside, tile, M, N):
        """Stores the result and, if there is a next norm, what prepares it."""
        dtype: gl.constexpr = y_ptr.dtype.element_ty
        offsets = m[None, :] * N + n[:, None]
        gl.store(y_ptr + offsets, y, mask=inside)
        if next_norm is not None:
            y = gl.where(inside, y.to(gl.float32), 0.0)
            gl.store(scaled_ptr + offsets, (y * next_norm.to(gl.float32)[:, None]).to(dtype), mask=inside)
            gl.store(next_squares_ptr + tile * M + m, gl.sum((y * y).to(gl.float64), 0), mask=m < M)

    @gluon.jit(do_not_specialize=["M", "squares_count"])
    def _gluon_kernel(
        x_ptr, w_ptr, y_ptr,
        squares_ptr, squares_count, residual_ptr, next_norm_ptr, scaled_ptr, next_squares_ptr,
        M, N, K, x_stride, residual_stride, eps,
        BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
        STEPS: gl.constexpr, STEPS_AHEAD: gl.constexpr, ACCUMULATORS: gl.constexpr, REGISTER_TILES: gl.constexpr,
        GLU: gl.constexpr, PDL: gl.constexpr, LATE_LAUNCH: gl.constexpr, BLOCK_SQUARES: gl.constexpr,
        WARPS_N: gl.constexpr, WARPS_M: gl.constexpr,
    ):  # fmt: skip
        """Computes one transposed output tile, [BLOCK_N weights] x [BLOCK_M rows]; sums as in linear_triton.py.

        STEPS_AHEAD steps over K are prefetched. Weight-stationary if REGISTER_TILES is not 0: all steps are, and so
        many weight tiles are also loaded into registers before the wait.
        """
        dtype: gl.constexpr = y_ptr.dtype.element_ty
        STATIONARY: gl.constexpr = REGISTER_TILES > 0
        WARPS: gl.constexpr = WARPS_N * WARPS_M
        SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS_N, WARPS_M], [16, 8])
        LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
        RIGHT: gl.constexpr = gl.DotOperandLayout(1, SUMS, 2)
        COPIES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
        SQUARES: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [1, WARPS], [1, 0])
        # Each thread of a tiled GEMM stores outputs that are adjacent in memory.
        WIDE: gl.constexpr = gl.BlockedLayout([8, 1], [BLOCK_N // 8, 256 // BLOCK_N], [1, WARPS], [0, 1])
        OUT: gl.constexpr = SUMS if STATIONARY else WIDE
        SHARED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
        BUFFERS: gl.constexpr = STEPS_AHEAD + 1 if STEPS_AHEAD < STEPS else STEPS  # used in turn
        PARTS: gl.constexpr = 2 if GLU else 1
        TURNS: gl.constexpr = STEPS // ACCUMULATORS

        tile = gl.program_id(0 if STATIONARY else 1)
        if PDL and not LATE_LAUNCH:
            gdc_launch_dependents()
        # Separate allocations: the compiler would serialize copies into parts of one allocation.
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
        # A tiled GEMM goes accumulator by accumulator: the i-th step is the (i % RUN)-th of accumulator i // RUN.
        RUN: gl.constexpr = STEPS if STATIONARY else TURNS
        for i in gl.static_range(STEPS_AHEAD):
            at = ((i % RUN) * (STEPS // RUN) + i // RUN) * BLOCK_K
            async_copy.async_copy_global_to_shared(weights[i * PARTS], w_ptrs + at)
            if GLU:
                async_copy.async_copy_global_to_shared(weights[i * PARTS + 1], w_ptrs + up + at)
        async_copy.commit_group()
        registers = ()
        if STATIONARY:
            async_copy.wait_group(0)
            for step in gl.static_range(REGISTER_TILES):
                registers = registers + (weights[step * PARTS].load(LEFT),)
                if GLU:
                    registers = registers + (weights[step * PARTS + 1].load(LEFT),)
        if PDL:
            gdc_wait()

        # Results of rows past the last one are not stored. A tiled GEMM reads the last row again for them; with few
        # rows every program would load the same words several times, so there they are masked.
        first = gl.program_id(1 if STATIONARY else 0) * BLOCK_M
        m = first + gl.arange(0, BLOCK_M, gl.SliceLayout(1, COPIES))
        if STATIONARY:
            x_ptrs = x_ptr + m[:, None] * x_stride + k[None, :]
            for step in gl.static_range(STEPS):
                async_copy.async_copy_global_to_shared(rows[step], x_ptrs + step * BLOCK_K, mask=(m < M)[:, None])
                if (step + 1) % ACCUMULATORS == 0:
                    async_copy.commit_group()
        else:
            x_ptrs = x_ptr + gl.minimum(m, M - 1)[:, None] * x_stride + k[None, :]
            for i in gl.static_range(STEPS_AHEAD):
                at = ((i % RUN) * (STEPS // RUN) + i // RUN) * BLOCK_K
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
        squares = None
        scale = None
        if squares_ptr is not None:
            squares = _load_squares(squares_ptr, squares_count, first, M, BLOCK_SQUARES, BLOCK_M, SQUARES)
            if not STATIONARY:
                scale = _inverse_rms(squares, K, eps, SUMS)

        zeros = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, SUMS)
        if STATIONARY:
            accs = ()
            ups = ()
            for _ in gl.static_range(ACCUMULATORS):
                accs = accs + (zeros,)
                if GLU:
                    ups = ups + (zeros,)
            for step in gl.static_range(STEPS):
                if step % ACCUMULATORS == 0:
                    async_copy.wait_group(TURNS - 1 - step // ACCUMULATORS)
                x = rows[step].permute((1, 0)).load(RIGHT)
                w = registers[step * PARTS] if step < REGISTER_TILES else weights[step * PARTS].load(LEFT)
                accs = accs[1:] + (mma_v2(w, x, accs[0]),)
                if GLU:
                    if step < REGISTER_TILES:
                        w = registers[step * PARTS + 1]
                    else:
                        w = weights[step * PARTS + 1].load(LEFT)
                    ups = ups[1:] + (mma_v2(w, x, ups[0]),)
            total = accs[0]
            up_total = ups[0] if GLU else None
            for i in gl.static_range(1, ACCUMULATORS):
                total += accs[i]
                if GLU:
                    up_total += ups[i]
            if squares_ptr is not None:
                scale = _inverse_rms(squares, K, eps, SUMS)
        else:
            acc = zeros
            up_acc = zeros
            total = zeros
            up_total = zeros
            for i in gl.static_range(STEPS):
                async_copy.wait_group(STEPS - 1 - i if STEPS - 1 - i < STEPS_AHEAD - 1 else STEPS_AHEAD - 1)
                if i + STEPS_AHEAD < STEPS:
                    at = (((i + STEPS_AHEAD) % RUN) * (STEPS // RUN) + (i + STEPS_AHEAD) // RUN) * BLOCK_K
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
                    acc = zeros
                    up_acc = zeros
        if PDL and LATE_LAUNCH:
            gdc_launch_dependents()

        total = _apply_norm_and_gate(total, up_total, scale, GLU)
        if residual is not None:
            y = (gl.convert_layout(total, OUT) + residual.to(gl.float32)).to(dtype)
        else:
            y = gl.convert_layout(total.to(dtype), OUT)
        _store_output(y, y_ptr, next_norm, scaled_ptr, next_squares_ptr, n, m, inside, tile, M, N)


def launch_gluon(
    T: int, N: int, K: int, cfg: GemmConfig, tile: TileConfig | None, *arguments: Any, **options: Any
) -> None:
    """Launches the tiled GEMM, or the weight-stationary one without a tile; arguments are those of linear_triton.py."""
    steps, register_tiles = K // cfg.block_k, 0
    if tile is None:
        rows = stationary_rows(T)
        tile = TileConfig(cfg.block_n, rows, 1, rows // 8, steps)
        register_tiles = min(REGISTER_TILES // (2 if options["GLU"] else 1), steps)
    blocks = (N // tile.block_n, triton.cdiv(T, tile.block_m))
    _gluon_kernel[blocks if register_tiles else blocks[::-1]](
        *arguments,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=cfg.block_k, STEPS=steps,
        STEPS_AHEAD=min(tile.steps_ahead, steps), REGISTER_TILES=register_tiles, LATE_LAUNCH=tile.late_launch,
        WARPS_N=tile.warps_n, WARPS_M=tile.warps_m, num_warps=tile.warps_n * tile.warps_m, **options,
    )  # fmt: skip
