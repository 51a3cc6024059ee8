"""Launch configurations of the GEMM kernels.

Two configurations of one `rounding_kind` give the same bits; linear.py explains what depends on that.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TileConfig:
    """Launch configuration of the tiled GEMM (tiled.py); it affects speed only.

    block_n, block_m: output columns (for a gated GEMM, that many gates and as many ups) and rows per program.
    warps_n, warps_m: warps along the columns and along the rows.
    steps_ahead: steps over K that are prefetched.
    late_launch: as in GemmConfig.
    """

    block_n: int
    block_m: int
    warps_n: int
    warps_m: int
    steps_ahead: int
    late_launch: bool = False


@dataclass(frozen=True)
class GemmConfig:
    """Launch configuration of one GEMM shape. `rounding_kind` names the fields that affect rounding.

    block_n: output columns per program (for a gated GEMM, that many gates and as many ups).
    prefetch: elements of each weight row that a program prefetches into L2 before it waits for its predecessor.
    prefetch_lines: prefetch line by line instead of one bulk request per row.
    late_launch: let the successor start only after the loop over K, so that it does not take resources earlier.
    accumulators: partial sums that take the steps over K in turn; `stages` counts turns of all of them.
    block_m: rows per program; 0: `block_rows` decides.
    weight_stationary: use the weight-stationary GEMM (weight_stationary.py) where it is supported.
    tile: use the tiled GEMM (tiled.py) with this tile where it is supported.
    """

    block_n: int
    block_k: int
    stages: int
    warps: int
    split_k: int = 1
    prefetch: int = 0
    prefetch_lines: bool = False
    late_launch: bool = False
    accumulators: int = 1
    block_m: int = 0
    weight_stationary: bool = False
    tile: TileConfig | None = None

    @property
    def rounding_kind(self) -> tuple[int, int, int, int]:
        """The parts of K, the MMA instruction's width and the accumulators: equal kinds give equal bits.

        wgmma needs 64 columns and a group of four warps.
        """
        instruction = 64 if self.block_n >= 64 and self.warps % 4 == 0 else 16
        return self.split_k, instruction, self.accumulators, self.block_k if self.accumulators > 1 else 0
