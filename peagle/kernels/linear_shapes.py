"""How the Triton product computes each shape: measured ones by a table, the others by rule, without timing anything.

Knows nothing about tensors. Two configurations of one `kind` round alike; linear.py says what hangs on that.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from peagle.kernels.launching import HAVE_TRITON

if HAVE_TRITON:
    import triton

SKINNY = 64  # most rows of one program of the Triton product
TILED = 512  # most rows it takes where K is small: in tiles of SKINNY, so that a row's bits stay what they are
FEW = 16  # up to here a shape has one configuration, above it may have another, or go to cuBLAS
SHARED_BYTES = 226 * 1024  # of one processor, for all programs on it


@dataclass(frozen=True)
class Config:
    """How one shape is computed. `kind` says what of it the rounding depends on; the rest is for speed alone.

    block_n: output columns per program (a gated product takes that many gates and as many ups).
    prefetch: weights of each row (elements along K) a program asks into L2 before it waits for its predecessor.
    lines: prefetched line by line instead of row by row.
    fuse_norm: norm inside the product; otherwise a launch of its own before it.
    tma: weights come by tensor descriptor instead of per-thread asynchronous copies.
    late: the successor may start only once the loop is done, so that it cannot take memory or processors before.
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

    @property
    def kind(self) -> tuple[int, int, bool]:
        """Configurations of one kind round alike: the parts that K is split into (1: none), the instruction, the norm's
        place. wgmma takes 64 columns and the warps of a group."""
        return self.split_k, 64 if self.block_n >= 64 and self.warps % 4 == 0 else 16, self.fuse_norm


SMALL = Config(16, 64, 10, 2, prefetch=512, lines=True)

# Found on an H200 with programmatic dependent launch, by changing one shape at a time in the chain of a whole model
# (benchmarks/kernel_linear.py --descend). Keyed by N, K and whether gated: for up to FEW rows, and for
# more of them (None: cuBLAS is faster).
TUNED: dict[tuple[int, int, bool], tuple[Config, Config | None]] = {
    # 8 billion parameters: q/k/v, o, gate and up, down, lm_head, then a drafter's q/k/v and fc
    (6144, 4096, False): (Config(64, 256, 5, 4, prefetch=512), Config(64, 128, 6, 4, prefetch=512)),
    (4096, 4096, False): (Config(32, 512, 4, 4, prefetch=1024), Config(64, 128, 6, 4, 2, prefetch=1024)),
    (28672, 4096, True): (Config(64, 128, 4, 4, prefetch=128, late=True), Config(64, 64, 4, 4, prefetch=128)),
    (4096, 14336, False): (Config(32, 128, 13, 4, prefetch=1024), Config(64, 128, 6, 4, 2, prefetch=1024)),
    (128256, 4096, False): (Config(64, 128, 4, 4, prefetch=128), Config(64, 128, 3, 4, prefetch=128)),
    (6144, 8192, False): (Config(32, 128, 6, 4, 2, prefetch=512), None),
    (4096, 12288, False): (Config(32, 256, 8, 4, prefetch=1024), Config(64, 128, 6, 4, 2, prefetch=1024)),
    # SmolLM2-135M: q/k/v, o, gate and up, down, lm_head
    (960, 576, False): (SMALL, SMALL),
    (576, 576, False): (Config(32, 64, 10, 4, prefetch=512, lines=True), SMALL),
    (3072, 576, True): (Config(16, 64, 10, 1, prefetch=512, lines=True, late=True), SMALL),
    (576, 1536, False): (Config(16, 64, 10, 4, prefetch=64, lines=True), SMALL),
    (49152, 576, False): (Config(64, 64, 7, 4, prefetch=128), Config(64, 64, 3, 4, prefetch=128)),
}


def block_rows(T: int) -> int:
    """Rows a program computes: few sizes, as each is a compilation."""
    return 16 if T <= 16 else 32 if T <= 32 else 64


def config_for(T: int, N: int, K: int, glu: bool) -> Config:
    """The configuration of a shape, measured or by rule: no timing at start-up.

    Up to FEW rows all row counts sum in the same order, and so do all above; only stages differ within either.
    """
    few, many = TUNED.get((N, K, glu)) or (None, None)
    config = (few if T <= FEW else many) or _rule(T, N, K, glu)
    # Whatever the table says, what is loaded ahead must fit, and no more of it than there is.
    tile_bytes = (config.block_n * (2 if glu else 1) + block_rows(T)) * config.block_k * 2
    steps = triton.cdiv(K, config.block_k * config.split_k)
    stages = max(2, min(config.stages, SHARED_BYTES // tile_bytes, steps + 1))
    if T > SKINNY:  # several programs to a processor, and every weight is asked for by several
        return replace(config, stages=min(stages, 4), prefetch=0)
    return replace(config, stages=stages, prefetch=min(config.prefetch, power_of_two_within(K)))


def skinny_rows(N: int, K: int, glu: bool) -> int:
    """Most rows that go to the Triton product: as long as it is faster than cuBLAS with its small kernels, and in small
    models a whole batch of rounds, since cuBLAS rounds otherwise and would let a text depend on its company."""
    many = TUNED[N, K, glu][1] if (N, K, glu) in TUNED else _many_rows(N, K, glu)
    if is_small(N, K) or (many is not None and K < 1024):
        return TILED
    return SKINNY if many is not None else FEW


def is_small(N: int, K: int) -> bool:
    return N * K < 1 << 22


def _rule(T: int, N: int, K: int, glu: bool) -> Config:
    """Comes to what the measured shapes were found to want.

    Programs that fill the processors evenly, and so much shared memory that no others fit beside them: programs of
    the next kernel that start early would end up unevenly spread.
    """
    columns = N // 2 if glu else N
    if is_small(N, K):
        # Launches and latencies decide: many small programs that ask for all of their K at once.
        block_n = 16 if columns < 132 * 64 else 64
        block_k = 256 if K % 256 == 0 and K >= 1024 and block_n == 16 else 128 if K % 128 == 0 else 64
        return Config(block_n, block_k, 10, 2 if block_n == 16 else 4, prefetch=512, lines=True)
    many = _many_rows(N, K, glu) if T > FEW else None
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
    return Config(block_n, block_k, max(3, stages), {128: 8, 16: 2}.get(block_n, 4), prefetch=prefetch)


def _many_rows(N: int, K: int, glu: bool) -> Config | None:
    """For more than FEW rows of a large shape: wide tiles, so that x is not read too often. None: cuBLAS is faster."""
    if glu:
        return Config(64, 64, 4, 4, prefetch=128) if N >= 132 * 128 else None
    if N > 132 * 128:
        return Config(64, 128 if K % 128 == 0 else 64, 3, 4, prefetch=128)
    if 110 <= 2 * triton.cdiv(N, 64) <= 132 and K % 256 == 0:
        return Config(64, 128, 6, 4, split_k=2, prefetch=1024)
    return None


def power_of_two_within(K: int) -> int:
    return 1 << (K.bit_length() - 1)
