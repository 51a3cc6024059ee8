"""How the Triton product computes each shape: measured ones by a table, the others by rule, without timing anything.

Knows nothing about tensors. Two configurations of one `kind` round alike; linear.py says what hangs on that.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from peagle.kernels.triton_utils import HAVE_TRITON

if HAVE_TRITON:
    import triton

MAX_SKINNY_ROWS = 64  # most rows of one program of the Triton product
MAX_TILED_ROWS = (
    640  # most rows it takes where K is small: in several programs, so that a row's bits stay what they are
)
MAX_SOME_ROWS = 128  # up to here small shapes have their second configuration
MAX_FEW_ROWS = 16  # up to here a shape has one configuration, above it may have another, or go to cuBLAS
MAX_STATIONARY_ROWS = 32  # most rows for weights that are held in shared memory
SHARED_BYTES = 226 * 1024  # of one processor, for all programs on it


@dataclass(frozen=True)
class TileConfig:
    """How a program computes many rows of a small shape (linear_tiles.py), all of it for speed alone.

    block_n, block_m: columns (a gated product takes that many gates and as many ups) and rows.
    warps_n, warps_m: warps that share the columns, and the rows.
    ahead: steps over K that are asked for before the one that is multiplied; up to the wait, of the weights.
    late: as in GemmConfig.
    """

    block_n: int
    block_m: int
    warps_n: int
    warps_m: int
    ahead: int
    late: bool = False


@dataclass(frozen=True)
class GemmConfig:
    """How one shape is computed. `kind` says what of it the rounding depends on; the rest is for speed alone.

    block_n: output columns per program (a gated product takes that many gates and as many ups).
    prefetch: weights of each row (elements along K) a program asks into L2 before it waits for its predecessor.
    lines: prefetched line by line instead of row by row.
    fuse_norm: norm inside the product; otherwise a launch of its own before it.
    tma: weights come by tensor descriptor instead of per-thread asynchronous copies.
    late: the successor may start only once the loop is done, so that it cannot take memory or processors before.
    chains: sums that the steps over K go to in turns, each step block_k wide; stages count rounds of them.
    block_m: rows per program; 0: as block_rows says.
    held: weights are in shared memory before the wait, where that can be (linear_held.py).
    tile: larger tiles, where those can be (linear_tiles.py).
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
    chains: int = 1
    block_m: int = 0
    held: bool = False
    tile: TileConfig | None = None

    @property
    def kind(self) -> tuple[int, int, bool, int, int]:
        """Configurations of one kind round alike: the parts that K is split into (1: none), the instruction, the norm's
        place, which steps are summed with which. wgmma takes 64 columns and the warps of a group."""
        instruction = 64 if self.block_n >= 64 and self.warps % 4 == 0 else 16
        return self.split_k, instruction, self.fuse_norm, self.chains, self.block_k if self.chains > 1 else 0


# Of small shapes: one warp does a tile's few products sooner than several would meet; few rows a program, so that x is
# not what it waits for.
FEW_SMALL = GemmConfig(16, 64, 10, 1, prefetch=512, lines=True, chains=3, block_m=8)
SOME_SMALL = GemmConfig(16, 64, 10, 1, prefetch=512, lines=True, chains=3, block_m=16)
MANY_SMALL = GemmConfig(32, 64, 3, 4, chains=3, block_m=64)

# Found on an H200 with programmatic dependent launch, by changing one shape at a time: all in the products of a whole
# model (benchmarks/kernel_linear.py --descend), SmolLM2's then in whole rounds (benchmarks/round_descent.py). Keyed by
# N, K and whether gated: for few rows, for some (None: cuBLAS is faster), and where there is a third, for more.
TUNED: dict[tuple[int, int, bool], tuple[GemmConfig, GemmConfig | None] | tuple[GemmConfig, GemmConfig, GemmConfig]] = {
    # 8 billion parameters: q/k/v, o, gate and up, down, lm_head, then a drafter's q/k/v and fc
    (6144, 4096, False): (GemmConfig(64, 256, 5, 4, prefetch=512), GemmConfig(64, 128, 6, 4, prefetch=512)),
    (4096, 4096, False): (GemmConfig(32, 512, 4, 4, prefetch=1024), GemmConfig(64, 128, 6, 4, 2, prefetch=1024)),
    (28672, 4096, True): (GemmConfig(64, 128, 4, 4, prefetch=128, late=True), GemmConfig(64, 64, 4, 4, prefetch=128)),
    (4096, 14336, False): (GemmConfig(32, 128, 13, 4, prefetch=1024), GemmConfig(64, 128, 6, 4, 2, prefetch=1024)),
    (128256, 4096, False): (GemmConfig(64, 128, 4, 4, prefetch=128), GemmConfig(64, 128, 3, 4, prefetch=128)),
    (6144, 8192, False): (GemmConfig(32, 128, 6, 4, 2, prefetch=512), None),
    (4096, 12288, False): (GemmConfig(32, 256, 8, 4, prefetch=1024), GemmConfig(64, 128, 6, 4, 2, prefetch=1024)),
    # SmolLM2-135M: q/k/v, o, gate and up, down, lm_head
    (960, 576, False): (FEW_SMALL, replace(SOME_SMALL, late=True), replace(MANY_SMALL, late=True)),
    (576, 576, False): (replace(FEW_SMALL, lines=False), SOME_SMALL, MANY_SMALL),
    (3072, 576, True): (
        replace(FEW_SMALL, lines=False, late=True),
        replace(SOME_SMALL, warps=4, block_m=64, late=True),
        replace(MANY_SMALL, warps=2, block_m=32),
    ),
    (576, 1536, False): (
        replace(FEW_SMALL, chains=6),
        replace(SOME_SMALL, warps=2, chains=6, block_m=32, late=True),
        replace(MANY_SMALL, block_n=16, warps=2, chains=6, block_m=32),
    ),
    (49152, 576, False): (
        GemmConfig(64, 64, 7, 4, prefetch=128),
        GemmConfig(64, 64, 3, 4, prefetch=128),
        GemmConfig(128, 64, 3, 8, block_m=128),
    ),
}

# Of SmolLM2-135M's products, each by itself (benchmarks/kernel_tiles.py): up to how many rows, and None where weights
# that come by Triton's loop are as fast.
TILES: dict[tuple[int, int, bool], list[tuple[int, TileConfig | None]]] = {
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
        (128, TileConfig(32, 32, 1, 2, 6, late=True)),
        (256, TileConfig(64, 32, 2, 2, 6)),
        (384, TileConfig(64, 64, 2, 2, 6)),
        (MAX_TILED_ROWS, TileConfig(32, 128, 1, 4, 6, late=True)),
    ],
}
TILE_K = 64  # of a step
MOST_STEPS = 32  # each is a piece of the program


def block_rows(T: int) -> int:
    """Rows a program computes: few sizes, as each is a compilation."""
    return 16 if T <= 16 else 32 if T <= 32 else 64


def held_rows(T: int) -> int:
    """The same where weights are held: eight for each warp. Two programs with the same weights are faster than one with
    twice the rows; what the second copy takes is over before the wait."""
    return 8 if T <= MAX_FEW_ROWS else MAX_STATIONARY_ROWS


def config_for(T: int, N: int, K: int, glu: bool) -> GemmConfig:
    """The configuration of a shape, measured or by rule: no timing at start-up.

    Up to MAX_FEW_ROWS rows all row counts sum in the same order, and so do all above; only stages differ within either.
    """
    tuned = TUNED.get((N, K, glu), (None, None))
    config = tuned[0 if T <= MAX_FEW_ROWS else 1 if T <= MAX_SOME_ROWS else -1] or _rule(T, N, K, glu)
    # Whatever the table says, what is loaded ahead must fit, and no more of it than there is.
    rows = config.block_m or block_rows(T)
    bytes_a_turn = (config.block_n * (2 if glu else 1) + rows) * config.block_k * config.chains * 2
    turns = triton.cdiv(K, config.block_k * config.split_k * config.chains)
    stages = max(2, min(config.stages, SHARED_BYTES // bytes_a_turn, turns + 1))
    config = replace(config, tile=tile_for(T, N, K, glu, config))
    if T > MAX_SKINNY_ROWS:  # several programs to a processor, and every weight is asked for by several
        return replace(config, stages=min(stages, 4), prefetch=0)
    prefetch = min(config.prefetch, power_of_two_within(K))
    return replace(config, stages=stages, prefetch=prefetch, held=is_held(T, N, K, glu, config))


def is_held(T: int, N: int, K: int, glu: bool, config: GemmConfig) -> bool:
    """Whether all weights of a program fit into shared memory, and all rows beside them."""
    columns = N // 2 if glu else N
    small = is_small_shape(N, K) and config.block_n == 16 and config.split_k == 1 and not config.fuse_norm
    whole = columns % config.block_n == 0 and K % config.block_k == 0
    nbytes = 2 * K * (config.block_n * (2 if glu else 1) + MAX_STATIONARY_ROWS)
    return T <= MAX_STATIONARY_ROWS and small and whole and nbytes <= SHARED_BYTES * 3 // 4


def tile_for(T: int, N: int, K: int, glu: bool, config: GemmConfig) -> TileConfig | None:
    """The tile of more rows than weights are held for, measured or as the measured ones are."""
    columns, steps = N // 2 if glu else N, K // TILE_K
    chained = config.block_k == TILE_K and steps % config.chains == 0 and steps <= MOST_STEPS
    if (
        T <= MAX_STATIONARY_ROWS
        or not is_small_shape(N, K)
        or K % TILE_K
        or not chained
        or config.split_k > 1
        or config.fuse_norm
    ):
        return None
    if (N, K, glu) in TILES:
        return next((tile for most, tile in TILES[N, K, glu] if T <= most), None)
    tile = TileConfig(32, 32, 1, 2, 4)  # few different ones, as each is seconds of compilation
    if T > MAX_SOME_ROWS:
        tile = TileConfig(64, 64, 2, 2, 3) if glu else TileConfig(64, 32, 2, 2, 4)
    return tile if columns % tile.block_n == 0 else None


def skinny_rows(N: int, K: int, glu: bool) -> int:
    """Most rows that go to the Triton product: as long as it is faster than cuBLAS with its small kernels, and in small
    models a whole batch of rounds, since cuBLAS rounds otherwise and would let a text depend on its company."""
    many = TUNED[N, K, glu][1] if (N, K, glu) in TUNED else _many_rows(N, K, glu)
    if is_small_shape(N, K) or (many is not None and K < 1024):
        return MAX_TILED_ROWS
    return MAX_SKINNY_ROWS if many is not None else MAX_FEW_ROWS


def is_small_shape(N: int, K: int) -> bool:
    return N * K < 1 << 22


def _rule(T: int, N: int, K: int, glu: bool) -> GemmConfig:
    """Comes to what the measured shapes were found to want.

    Programs that fill the processors evenly, and so much shared memory that no others fit beside them: programs of
    the next kernel that start early would end up unevenly spread.
    """
    columns = N // 2 if glu else N
    if is_small_shape(N, K):
        # Launches and latencies decide: many small programs that ask for all of their K at once.
        if columns >= 132 * 64:
            return GemmConfig(64, 128 if K % 128 == 0 else 64, 10, 4, prefetch=512, lines=True)
        config = FEW_SMALL if T <= MAX_FEW_ROWS else SOME_SMALL if T <= MAX_SOME_ROWS else MANY_SMALL
        steps = triton.cdiv(K, config.block_k)
        return replace(config, chains=next(c for c in (6, 3, 4, 2, 1) if steps % c == 0 and (steps > c or c == 1)))
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
    # About 8 MiB over the whole launch: what the memory delivers while the predecessor drains and x arrives.
    prefetch = power_of_two_within(min(K, (4 << 20) // min(N, 264 * weight_rows)))
    return GemmConfig(block_n, block_k, max(3, stages), {128: 8, 16: 2}.get(block_n, 4), prefetch=prefetch)


def _many_rows(N: int, K: int, glu: bool) -> GemmConfig | None:
    """For more rows of a large shape: wide tiles, so that x is not read too often. None: cuBLAS is faster."""
    if glu:
        return GemmConfig(64, 64, 4, 4, prefetch=128) if N >= 132 * 128 else None
    if N > 132 * 128:
        return GemmConfig(64, 128 if K % 128 == 0 else 64, 3, 4, prefetch=128)
    if 110 <= 2 * triton.cdiv(N, 64) <= 132 and K % 256 == 0:
        return GemmConfig(64, 128, 6, 4, split_k=2, prefetch=1024)
    return None


def power_of_two_within(K: int) -> int:
    return 1 << (K.bit_length() - 1)
