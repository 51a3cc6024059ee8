"""The weight-stationary GEMM: it has the bits of the Triton GEMM, and loads its weights before the wait.

Gluon has no interpreter: on a CPU the tests read the compiler's output, on a GPU they run the kernel.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from peagle.kernels.gemm import gluon_gemms, linear_triton
from peagle.kernels.gemm.linear_triton import linear_residual_triton
from peagle.kernels.gemm.tile_configs import MAX_STATIONARY_ROWS, config_for, stationary_rows
from peagle.kernels.norm.rms_norm import ResidualStream

# N, K, gated: SmolLM2's q/k/v, o, gate and up, down; its drafters' first q/k/v and fc
SHAPES = [
    (960, 576, False),
    (576, 576, False),
    (3072, 576, True),
    (576, 1536, False),
    (960, 1152, False),
    (576, 1728, False),
]


def usage_of(cubin: bytes, folder: Path) -> dict[str, int]:
    """Returns the registers, stack and memory that the assembler allocated for a kernel."""
    from triton import knobs

    (folder / "kernel.cubin").write_bytes(cubin)
    command = [knobs.nvidia.cuobjdump.path, "-res-usage", str(folder / "kernel.cubin")]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(number) for name, number in re.findall(r"(\w+):(\d+)", output)}


@pytest.mark.parametrize("shape", SHAPES)
def test_small_shapes_with_few_rows_are_weight_stationary(shape: tuple[int, int, bool]) -> None:
    N, K, glu = shape
    for T in (1, 8, 9, 16, 17, MAX_STATIONARY_ROWS):
        config = config_for(T, N, K, glu)
        columns = (2 if glu else 1) * config.block_n
        assert config.weight_stationary and stationary_rows(T) % 8 == 0
        assert 2 * K * (columns + stationary_rows(T)) <= 227 * 1024
    assert not config_for(MAX_STATIONARY_ROWS + 1, N, K, glu).weight_stationary


@pytest.mark.parametrize(
    "shape", [(49152, 576, False), (4096, 4096, False), (960, 600, False), (24, 576, False), (64, 8192, False)]
)
def test_other_shapes_are_not(shape: tuple[int, int, bool]) -> None:
    """An lm_head, a large model's o, a K that is no multiple of a step, half a tile of columns, and one too large."""
    assert not config_for(8, *shape).weight_stationary


def test_an_untested_triton_release_warns_and_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.zeros(8, 576), torch.zeros(960, 576)
    monkeypatch.setattr(gluon_gemms, "is_hopper", lambda device: True)
    assert gluon_gemms.supports_gluon(x, weight, None) and not gluon_gemms.supports_gluon(x[:, 1:], weight, None)
    assert not gluon_gemms.supports_gluon(x, weight, torch.zeros(960))
    monkeypatch.setattr(gluon_gemms, "HAVE_GLUON", False)
    with pytest.warns(UserWarning, match=r"need Triton 3\.6\.x"):
        assert not gluon_gemms.supports_gluon(x, weight, None)


def compiled(kernel: Any, shape: tuple[int, int, bool], warps: int, **fixed: object) -> Any:
    """Compiles for Hopper as models use it: GEMMs that widen have a norm, the others add to the residual stream."""
    triton = pytest.importorskip("triton", reason="Triton is made for Linux only")
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    assert gluon_gemms.HAVE_GLUON, f"Triton {triton.__version__} is not one of {gluon_gemms.TRITON_RELEASES}"
    N, K, glu = shape
    absent = ("residual_ptr", "next_norm_ptr", "scaled_ptr", "next_squares_ptr") if N > K else ("squares_ptr",)
    fixed |= {"GLU": glu, "PDL": True, **dict.fromkeys(absent)}
    names = kernel.arg_names
    types = {"squares_ptr": "*fp64", "next_squares_ptr": "*fp64", "eps": "fp32"}
    types |= {name: "*bf16" for name in names if name.endswith("_ptr") and name not in types}
    signature = {name: "constexpr" if name in fixed else types.get(name, "i32") for name in names}
    plain = ("M", "squares_count", "eps", *fixed)
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name not in plain}
    source = GluonASTSource(kernel, signature, {(names.index(name),): value for name, value in fixed.items()}, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "launch_pdl": True})


def same_as_triton(
    shape: tuple[int, int, bool],
    dtype: torch.dtype,
    pdl: bool,
    monkeypatch: pytest.MonkeyPatch,
    rows: Iterable[int],
    takes: Callable[[int, bool], bool],
) -> None:
    """Compares Gluon with the Triton GEMM: plain rows, rows with a prepared norm, and with a residual and a next norm.
    `takes` says whether the Gluon GEMM is used for a row count, with or without a residual."""
    N, K, glu = shape
    columns = N // 2 if glu else N
    launched = []
    launch = linear_triton.launch_gluon

    def counted(*args, **options):
        launched.append(1)
        launch(*args, **options)

    monkeypatch.setattr(linear_triton, "launch_gluon", counted)
    torch.manual_seed(0)

    def draw(*size: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*size, device="cuda") * scale).to(dtype)

    weight, norm, next_norm = draw(N, K, scale=K**-0.5), draw(K), draw(columns)
    for T in rows:
        x, residual = draw(T, K), draw(T, columns)
        prepared = ResidualStream(
            x, norm, (x * norm).contiguous(), torch.rand(36, T, dtype=torch.float64, device="cuda") * 30
        )
        for given, more in [
            (x, {}),
            (prepared, {"norm_weight": norm, "eps": 1e-5}),
            (x, {"residual": residual, "next_norm": next_norm}),
        ]:
            before = len(launched)
            y = linear_residual_triton(given, weight, glu=glu, pdl=pdl, **more)
            after = len(launched)
            assert after == before + takes(T, "residual" in more)
            monkeypatch.setattr(linear_triton, "supports_gluon", lambda *args: False)
            wanted = linear_residual_triton(given, weight, glu=glu, pdl=pdl, **more)
            monkeypatch.setattr(linear_triton, "supports_gluon", gluon_gemms.supports_gluon)
            assert len(launched) == after
            assert y.x.isfinite().all() and torch.equal(y.x, wanted.x), (T, more.keys())
            assert (y.scaled is None) == (wanted.scaled is None)
            if y.scaled is not None:
                assert torch.equal(y.scaled, wanted.scaled)
                assert torch.equal(y.squares.sum(0).float(), wanted.squares.sum(0).float())
                if y.squares.shape == wanted.squares.shape:  # the same columns a program
                    assert torch.equal(y.squares.float(), wanted.squares.float())
    assert launched


@pytest.mark.parametrize("T", [1, 12, 18])
@pytest.mark.parametrize("shape", SHAPES)
def test_weights_are_loaded_before_the_wait(shape: tuple[int, int, bool], T: int, tmp_path: Path) -> None:
    N, K, glu = shape
    config, rows, parts = config_for(T, N, K, glu), stationary_rows(T), 2 if glu else 1
    steps, warps = K // config.block_k, rows // 8
    kept = min(gluon_gemms.REGISTER_TILES // parts, steps)
    fixed = {"BLOCK_M": rows, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "STEPS": steps}
    fixed |= {"STEPS_AHEAD": steps, "WARPS_N": 1, "WARPS_M": warps, "LATE_LAUNCH": False}
    fixed |= {"ACCUMULATORS": config.accumulators, "REGISTER_TILES": kept, "BLOCK_SQUARES": 64}
    made = compiled(gluon_gemms._gluon_kernel, shape, warps, **fixed)
    before, after = made.asm["ptx"].split("griddepcontrol.wait")
    copies = r"cp\.async\.\w+\.shared\.global"
    # 16 bytes per thread: all weights before the wait, only rows after it
    assert len(re.findall(copies, before)) * 16 * 32 * warps == 2 * K * config.block_n * parts
    assert len(re.findall(copies, after)) * 16 * 32 * warps == 2 * K * rows
    assert "ld.global" not in before and "st.global" not in before and "griddepcontrol.launch" in before
    fragments = re.findall(r"ldmatrix", before)
    assert (
        len(fragments) * 4 * 8 * 8 == kept * parts * config.block_n * config.block_k
    )  # four 8 by 8 matrices at a time
    assert "bar.sync" not in before.split("cp.async.commit_group")[0], "copies are serialized"
    assert usage_of(made.asm["cubin"], tmp_path)["STACK"] == 0, "registers spill"


@pytest.mark.gpu
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_bits_equal_the_triton_gemm(
    shape: tuple[int, int, bool], dtype: torch.dtype, pdl: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    same_as_triton(
        *(shape, dtype, pdl, monkeypatch),
        (1, 2, 7, 8, 9, 14, 16, 17, 20, MAX_STATIONARY_ROWS),
        lambda T, residual: True,
    )
