"""The tiled GEMM: it has the bits of the Triton GEMM, and its tiles fit into an SM.

Gluon has no interpreter: on a CPU the tests read the compiler's output, on a GPU they run the kernel.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_weight_stationary import SHAPES, compiled, same_as_triton, usage_of

from peagle.kernels.gemm.gluon_gemms import _gluon_kernel
from peagle.kernels.gemm.tile_configs import (
    MAX_STATIONARY_ROWS,
    MAX_TILED_ROWS,
    SHARED_BYTES,
    TILE_K,
    TILES,
    TileConfig,
    config_for,
)


def tiles_of(N: int, K: int, glu: bool) -> dict[TileConfig, int]:
    """Returns every tile of a shape, with a row count that uses it."""
    found = {config_for(T, N, K, glu).tile: T for T in range(MAX_STATIONARY_ROWS + 1, MAX_TILED_ROWS + 1, 13)}
    return {tile: T for tile, T in found.items() if tile is not None}


@pytest.mark.parametrize("shape", SHAPES)
def test_small_shapes_with_many_rows_have_tiles(shape: tuple[int, int, bool]) -> None:
    assert len(tiles_of(*shape)) >= 2
    assert config_for(MAX_STATIONARY_ROWS, *shape).tile is None and config_for(MAX_TILED_ROWS, *shape).tile is not None
    if shape in TILES:
        assert [rows for rows, _ in TILES[shape]] == sorted(rows for rows, _ in TILES[shape])
        assert TILES[shape][-1][0] == MAX_TILED_ROWS


@given(
    T=st.integers(1, MAX_TILED_ROWS),
    N=st.integers(1, 4096),
    K=st.one_of(st.integers(1, 2048), st.integers(1, 40).map(lambda steps: steps * TILE_K)),
    glu=st.booleans(),
)
def test_a_tile_divides_what_it_computes(T: int, N: int, K: int, glu: bool) -> None:
    N *= 2 if glu else 1
    config = config_for(T, N, K, glu)
    tile = config.tile
    if tile is None:
        return
    columns = N // 2 if glu else N
    assert columns % tile.block_n == 0 and K % TILE_K == 0 and (K // TILE_K) % config.accumulators == 0
    assert config.block_k == TILE_K and not config.weight_stationary, "other steps, or two kernels at once"
    # An MMA takes 16 columns and 8 rows; each warp copies whole rows of a step.
    assert tile.block_n % (16 * tile.warps_n) == 0 and tile.block_m % (8 * tile.warps_m) == 0
    steps = K // TILE_K
    buffer_bytes = min(tile.steps_ahead + 1, steps) * 2 * TILE_K
    assert buffer_bytes * (tile.block_n * (2 if glu else 1) + tile.block_m) <= SHARED_BYTES


@pytest.mark.parametrize("shape", SHAPES)
def test_tiles_use_the_mma_of_few_rows(shape: tuple[int, int, bool], tmp_path: Path) -> None:
    N, K, glu = shape
    steps, parts = K // TILE_K, 2 if glu else 1
    tiles = list(tiles_of(*shape).items())
    for tile, T in tiles if shape in TILES else tiles[-1:]:  # compiling each tile takes seconds
        ahead, warps = min(tile.steps_ahead, steps), tile.warps_n * tile.warps_m
        fixed = {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": TILE_K, "STEPS": steps}
        fixed |= {
            "STEPS_AHEAD": ahead,
            "REGISTER_TILES": 0,
            "WARPS_N": tile.warps_n,
            "WARPS_M": tile.warps_m,
        }
        fixed |= {
            "ACCUMULATORS": config_for(T, *shape).accumulators,
            "LATE_LAUNCH": tile.late_launch,
            "BLOCK_SQUARES": 16,
        }
        made = compiled(_gluon_kernel, shape, warps, **fixed)
        before, after = made.asm["ptx"].split("griddepcontrol.wait")
        assert "wgmma" not in after
        products = re.findall(r"mma\.sync\.aligned\.m16n8k16", after)
        assert len(products) * warps * 16 * 8 * 16 == tile.block_n * tile.block_m * K * parts
        copies = r"cp\.async\.\w+\.shared\.global"
        copied = [len(re.findall(copies, half)) * 16 * 32 * warps for half in (before, after)]
        assert copied[0] == 2 * TILE_K * ahead * tile.block_n * parts, "not the weights, or not before the wait"
        assert sum(copied) == 2 * K * (tile.block_n * parts + tile.block_m)
        assert "ld.global" not in before and "st.global" not in before
        assert len(re.findall(r"st\.global\.v4", after)) > 0, "results are not stored as vectors"
        assert made.metadata.shared <= SHARED_BYTES
        assert usage_of(made.asm["cubin"], tmp_path)["STACK"] <= 8, "sums spill from registers"


@pytest.mark.gpu
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_bits_equal_the_triton_gemm(
    shape: tuple[int, int, bool], dtype: torch.dtype, pdl: bool, monkeypatch: pytest.MonkeyPatch
) -> None:

    def takes(T: int, residual: bool) -> bool:
        usual = not (shape[2] and residual)  # no model has both
        return usual and config_for(T, *shape).tile is not None

    rows = (MAX_STATIONARY_ROWS + 1, 48, 64, 65, 100, 128, 129, 256, 257, 300, 384, 385, 512, 513, MAX_TILED_ROWS)
    same_as_triton(shape, dtype, pdl, monkeypatch, rows, takes)
