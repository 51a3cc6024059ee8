"""Which configuration each GEMM shape gets: measured shapes from a table, others by rule, without timing anything.

Shapes are N output columns (twice the result's width for a gated GEMM), K input columns and whether they are gated.
"""

from dataclasses import dataclass, replace

from peagle.kernels.triton_utils import HAVE_TRITON

if HAVE_TRITON:
    import triton

# Row counts at which a shape's configuration changes.
MAX_FEW_ROWS = 16  # most rows of the first configuration; a large shape may have another, or cuBLAS, beyond
MAX_STATIONARY_ROWS = 32  # most rows of the weight-stationary GEMM
MAX_SKINNY_ROWS = 64  # most rows of one program of the Triton GEMM
MAX_SOME_ROWS = 128  # most rows of a small shape's second configuration
MAX_TILED_ROWS = 640  # most rows of a small shape that Triton takes, so that a row's bits do not change up to there
SHARED_BYTES = 226 * 1024  # shared memory of one SM of an H100 or H200

Shape = tuple[int, int, bool]  # N, K, gated


@dataclass(frozen=True)
class TileConfig:
    """Launch configuration of the tiled GEMM (gluon_gemms.py); it affects speed only."""

    block_n: int  # output columns per program (for a gated GEMM, that many gates and as many ups)
    block_m: int  # rows per program
    warps_n: int  # along the columns
    warps_m: int  # along the rows
    steps_ahead: int  # steps over K that are prefetched
    late_launch: bool = False  # as in GemmConfig


@dataclass(frozen=True)
class GemmConfig:
    """Launch configuration of one GEMM shape. `rounding_kind` names the fields that affect rounding."""

    block_n: int  # output columns per program (for a gated GEMM, that many gates and as many ups)
    block_k: int
    stages: int  # of the pipelined loop over K; a stage is a turn of all accumulators
    warps: int
    split_k: int = 1
    prefetch: int = 0  # elements of each weight row that a program prefetches into L2 before it waits
    prefetch_lines: bool = False  # line by line instead of one bulk request per row
    late_launch: bool = False  # let the successor start after the loop over K, so that it takes no resources earlier
    accumulators: int = 1  # partial sums that take the steps over K in turn
    block_m: int = 0  # rows per program; 0: `block_rows` decides
    weight_stationary: bool = False  # use the weight-stationary GEMM (gluon_gemms.py) where it is supported
    tile: TileConfig | None = None  # use the tiled GEMM (gluon_gemms.py) with this tile where it is supported

    @property
    def rounding_kind(self) -> tuple[int, int, int, int]:
        """The parts of K, the MMA instruction's width and the accumulators: equal kinds give equal bits.

        wgmma needs 64 columns and a group of four warps.
        """
        instruction = 64 if self.block_n >= 64 and self.warps % 4 == 0 else 16
        return self.split_k, instruction, self.accumulators, self.block_k if self.accumulators > 1 else 0


# Small shapes: one warp per program avoids synchronization, and few rows per program keep the loads of x short.
FEW_SMALL = GemmConfig(16, 64, 10, 1, prefetch=512, prefetch_lines=True, accumulators=3, block_m=8)
SOME_SMALL = GemmConfig(16, 64, 10, 1, prefetch=512, prefetch_lines=True, accumulators=3, block_m=16)
MANY_SMALL = GemmConfig(32, 64, 3, 4, accumulators=3, block_m=64)

# Measured on an H200 with programmatic dependent launch, one shape at a time: the 8B shapes within all GEMMs of a
# model, SmolLM2's within whole decode steps. Per shape: the configuration for few rows, for some rows (None: cuBLAS is
# faster) and, where there is a third, for many.
TUNED: dict[Shape, tuple[GemmConfig, GemmConfig | None] | tuple[GemmConfig, GemmConfig, GemmConfig]] = {
    # 8B: q/k/v, o, gate and up, down, lm_head, then its drafter's q/k/v and fc
    (6144, 4096, False): (GemmConfig(64, 256, 5, 4, prefetch=512), GemmConfig(64, 128, 6, 4, prefetch=512)),
    (4096, 4096, False): (GemmConfig(32, 512, 4, 4, prefetch=1024), GemmConfig(64, 128, 6, 4, 2, prefetch=1024)),
    (28672, 4096, True): (
        GemmConfig(64, 128, 4, 4, prefetch=128, late_launch=True),
        GemmConfig(64, 64, 4, 4, prefetch=128),
    ),
    (4096, 14336, False): (GemmConfig(32, 128, 13, 4, prefetch=1024), GemmConfig(64, 128, 6, 4, 2, prefetch=1024)),
    (128256, 4096, False): (GemmConfig(64, 128, 4, 4, prefetch=128), GemmConfig(64, 128, 3, 4, prefetch=128)),
    (6144, 8192, False): (GemmConfig(32, 128, 6, 4, 2, prefetch=512), None),
    (4096, 12288, False): (GemmConfig(32, 256, 8, 4, prefetch=1024), GemmConfig(64, 128, 6, 4, 2, prefetch=1024)),
    # SmolLM2-135M: q/k/v, o, gate and up, down, lm_head
    (960, 576, False): (FEW_SMALL, replace(SOME_SMALL, late_launch=True), replace(MANY_SMALL, late_launch=True)),
    (576, 576, False): (replace(FEW_SMALL, prefetch_lines=False), SOME_SMALL, MANY_SMALL),
    (3072, 576, True): (
        replace(FEW_SMALL, prefetch_lines=False, late_launch=True),
        replace(SOME_SMALL, warps=4, block_m=64, late_launch=True),
        replace(MANY_SMALL, warps=2, block_m=32),
    ),
    (576, 1536, False): (
        replace(FEW_SMALL, accumulators=6),
        replace(SOME_SMALL, warps=2, accumulators=6, block_m=32, late_launch=True),
        replace(MANY_SMALL, block_n=16, warps=2, accumulators=6, block_m=32),
    ),
    (49152, 576, False): (
        GemmConfig(64, 64, 7, 4, prefetch=128),
        GemmConfig(64, 64, 3, 4, prefetch=128),
        GemmConfig(128, 64, 3, 8, block_m=128),
    ),
}

# Tiles of SmolLM2-135M's GEMMs, each measured alone on an H200: (most rows, tile); None: the Triton loop is as fast.
TILES: dict[Shape, list[tuple[int, TileConfig | None]]] = {
    (960, 576, False): [
        (64, TileConfig(32, 32, 1, 2, 9)),
        (128, TileConfig(64, 32, 2, 2, 9)),
        (384, TileConfig(32, 32, 1, 2, 9)),
        (512, TileConfig(64, 64, 2, 2, 9)),
        (MAX_TILED_ROWS, TileConfig(64, 64, 2, 2, 4)),
    ],
    (576, 576, False): [
        (64, TileConfig(16, 32, 1, 2, 4)),
        (128, TileConfig(32, 32, 1, 2, 9)),
        (256, TileConfig(32, 64, 2, 2, 9)),
        (MAX_TILED_ROWS, TileConfig(32, 32, 1, 2, 9)),
    ],
    (3072, 576, True): [
        (64, TileConfig(64, 32, 2, 2, 9)),
        (128, TileConfig(32, 64, 2, 2, 9)),
        (256, TileConfig(64, 64, 2, 2, 4)),
        (MAX_TILED_ROWS, TileConfig(64, 64, 2, 2, 3)),
    ],
    (576, 1536, False): [
        (64, None),
        (128, TileConfig(32, 32, 1, 2, 6, late_launch=True)),
        (256, TileConfig(64, 32, 2, 2, 6)),
        (384, TileConfig(64, 64, 2, 2, 6)),
        (MAX_TILED_ROWS, TileConfig(32, 128, 1, 4, 6, late_launch=True)),
    ],
}
TILE_K = 64  # columns of a step over K
MAX_TILED_STEPS = 32  # the loop over K is unrolled


def block_rows(T: int) -> int:
    """Rows per program of the Triton GEMM: three sizes only, since each is compiled separately."""
    return 16 if T <= 16 else 32 if T <= 32 else 64


def stationary_rows(T: int) -> int:
    """Rows per program of the weight-stationary GEMM, eight per warp.

    Two programs with the same weights are faster than one with twice the rows: they load the second copy before the
    wait.
    """
    return 8 if T <= MAX_FEW_ROWS else MAX_STATIONARY_ROWS


def config_for(T: int, N: int, K: int, glu: bool) -> GemmConfig:
    """Returns the configuration of a shape for T rows.

    All T up to MAX_FEW_ROWS have one rounding kind, and so do all larger T; within either, only `stages` differs.
    """
    tuned = TUNED.get((N, K, glu), (None, None))
    config = tuned[0 if T <= MAX_FEW_ROWS else 1 if T <= MAX_SOME_ROWS else -1] or _rule(T, N, K, glu)
    # Stages must fit into shared memory, and there are no more of them than steps over K.
    rows = config.block_m or block_rows(T)
    bytes_per_turn = (config.block_n * (2 if glu else 1) + rows) * config.block_k * config.accumulators * 2
    turns = triton.cdiv(K, config.block_k * config.split_k * config.accumulators)
    stages = max(2, min(config.stages, SHARED_BYTES // bytes_per_turn, turns + 1))
    config = replace(config, tile=tile_for(T, N, K, glu, config))
    if T > MAX_SKINNY_ROWS:  # several programs share an SM, and several read the same weights
        return replace(config, stages=min(stages, 4), prefetch=0)
    prefetch = min(config.prefetch, power_of_two_within(K))
    return replace(config, stages=stages, prefetch=prefetch, weight_stationary=fits_stationary(T, N, K, glu, config))


def fits_stationary(T: int, N: int, K: int, glu: bool, config: GemmConfig) -> bool:
    """Whether all weights and all rows of a program fit into shared memory."""
    columns = N // 2 if glu else N
    small = is_small_shape(N, K) and config.block_n == 16 and config.split_k == 1
    whole = columns % config.block_n == 0 and K % config.block_k == 0
    nbytes = 2 * K * (config.block_n * (2 if glu else 1) + MAX_STATIONARY_ROWS)
    return T <= MAX_STATIONARY_ROWS and small and whole and nbytes <= SHARED_BYTES * 3 // 4


def tile_for(T: int, N: int, K: int, glu: bool, config: GemmConfig) -> TileConfig | None:
    """Returns the tile for more rows than the weight-stationary GEMM takes, measured or by rule."""
    columns, steps = N // 2 if glu else N, K // TILE_K
    even = config.block_k == TILE_K and steps % config.accumulators == 0 and steps <= MAX_TILED_STEPS
    if T <= MAX_STATIONARY_ROWS or not is_small_shape(N, K) or K % TILE_K or not even or config.split_k > 1:
        return None
    if (N, K, glu) in TILES:
        return next((tile for max_rows, tile in TILES[N, K, glu] if T <= max_rows), None)
    tile = TileConfig(32, 32, 1, 2, 4)  # few different tiles, since each takes seconds to compile
    if T > MAX_SOME_ROWS:
        tile = TileConfig(64, 64, 2, 2, 3) if glu else TileConfig(64, 32, 2, 2, 4)
    return tile if columns % tile.block_n == 0 else None


def max_triton_rows(N: int, K: int, glu: bool, fp8: bool = False) -> int:
    """Returns the largest row count for which the Triton GEMM is used instead of cuBLAS.

    Small shapes use it for whole batches even where cuBLAS is as fast: cuBLAS rounds differently, so a request's tokens
    would depend on the batch size. So do fp8 weights (`fp8`), since more rows have their activations quantized, too.
    """
    if fp8:
        return max(MAX_SKINNY_ROWS, max_triton_rows(N, K, glu))
    many = TUNED[N, K, glu][1] if (N, K, glu) in TUNED else _many_rows(N, K, glu)
    if is_small_shape(N, K) or (many is not None and K < 1024):
        return MAX_TILED_ROWS
    return MAX_SKINNY_ROWS if many is not None else MAX_FEW_ROWS


def is_small_shape(N: int, K: int) -> bool:
    return N * K < 1 << 22


def _rule(T: int, N: int, K: int, glu: bool) -> GemmConfig:
    """Derives a configuration that resembles the measured ones.

    Programs fill the SMs evenly and take so much shared memory that none of the next kernel fit beside them: those
    would start early and end up unevenly distributed.
    """
    columns = N // 2 if glu else N
    if is_small_shape(N, K):
        # Bound by latency: many small programs, each of which loads all of its K at once.
        if columns >= 132 * 64:
            return GemmConfig(64, 128 if K % 128 == 0 else 64, 10, 4, prefetch=512, prefetch_lines=True)
        config = FEW_SMALL if T <= MAX_FEW_ROWS else SOME_SMALL if T <= MAX_SOME_ROWS else MANY_SMALL
        steps = triton.cdiv(K, config.block_k)
        return replace(
            config, accumulators=next(c for c in (6, 3, 4, 2, 1) if steps % c == 0 and (steps > c or c == 1))
        )
    many = _many_rows(N, K, glu) if T > MAX_FEW_ROWS else None
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
    # About 8 MiB over the whole launch: what memory delivers until the predecessor is done and x has arrived.
    prefetch = power_of_two_within(min(K, (4 << 20) // min(N, 264 * weight_rows)))
    return GemmConfig(block_n, block_k, max(3, stages), {128: 8, 16: 2}.get(block_n, 4), prefetch=prefetch)


def _many_rows(N: int, K: int, glu: bool) -> GemmConfig | None:
    """For more than MAX_FEW_ROWS rows of a large shape: wide tiles read x less often. None: cuBLAS is faster."""
    if glu:
        return GemmConfig(64, 64, 4, 4, prefetch=128) if N >= 132 * 128 else None
    if N > 132 * 128:
        return GemmConfig(64, 128 if K % 128 == 0 else 64, 3, 4, prefetch=128)
    if 110 <= 2 * triton.cdiv(N, 64) <= 132 and K % 256 == 0:
        return GemmConfig(64, 128, 6, 4, split_k=2, prefetch=1024)
    return None


def power_of_two_within(K: int) -> int:
    return 1 << (K.bit_length() - 1)
