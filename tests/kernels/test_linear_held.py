"""Products whose weights are held in shared memory: the bits of the Triton product, and asked for before the wait.

There is no interpreter for Gluon: on a CPU this reads what the compiler makes of the kernel, on a GPU it runs.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from peagle.kernels.gemm import linear_triton
from peagle.kernels.gemm import weight_stationary as linear_held
from peagle.kernels.gemm.linear_triton import linear_residual_triton
from peagle.kernels.gemm.tile_configs import MAX_STATIONARY_ROWS, config_for, held_rows
from peagle.kernels.norm.rms_norm import ResidualStream

# N, K, gated: of SmolLM2 q/k/v, o, gate and up, down; of its drafters the first q/k/v and what combines three aux
# states
SHAPES = [
    (960, 576, False),
    (576, 576, False),
    (3072, 576, True),
    (576, 1536, False),
    (960, 1152, False),
    (576, 1728, False),
]


def usage_of(cubin: bytes, folder: Path) -> dict[str, int]:
    """What the assembler needed for a kernel."""
    from triton import knobs

    (folder / "kernel.cubin").write_bytes(cubin)
    command = [knobs.nvidia.cuobjdump.path, "-res-usage", str(folder / "kernel.cubin")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(number) for name, number in re.findall(r"(\w+):(\d+)", said)}


@pytest.mark.parametrize("shape", SHAPES)
def test_small_products_of_few_rows_are_held(shape: tuple[int, int, bool]) -> None:
    N, K, glu = shape
    for T in (1, 8, 9, 16, 17, MAX_STATIONARY_ROWS):
        config = config_for(T, N, K, glu)
        columns = (2 if glu else 1) * config.block_n
        assert config.held and held_rows(T) % 8 == 0
        assert 2 * K * (columns + held_rows(T)) <= 227 * 1024
    assert not config_for(MAX_STATIONARY_ROWS + 1, N, K, glu).held


@pytest.mark.parametrize(
    "shape", [(49152, 576, False), (4096, 4096, False), (960, 600, False), (24, 576, False), (64, 8192, False)]
)
def test_others_are_not(shape: tuple[int, int, bool]) -> None:
    """A head, a large model's, one whose rows are no whole steps, one with half a tile, one that does not fit."""
    assert not config_for(8, *shape).held


def test_another_release_of_triton_says_that_it_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.zeros(8, 576), torch.zeros(960, 576)
    monkeypatch.setattr(linear_held, "is_hopper", lambda device: True)
    assert linear_held.can_hold(x, weight, None) and not linear_held.can_hold(x[:, 1:], weight, None)
    assert not linear_held.can_hold(x, weight, torch.zeros(960))
    monkeypatch.setattr(linear_held, "HAVE_GLUON", False)
    with pytest.warns(UserWarning, match=r"fastest products with 3\.6\.x alone"):
        assert not linear_held.can_hold(x, weight, None)


def compiled(kernel: Any, shape: tuple[int, int, bool], warps: int, **fixed: object) -> Any:
    """For a Hopper, as it is used: rows of the width of the model come with a norm, others go onto the residual."""
    triton = pytest.importorskip("triton", reason="Triton is made for Linux only")
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    assert linear_held.HAVE_GLUON, f"Triton {triton.__version__} is not one of {linear_held.RELEASES}"
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
    launcher: str,
    rows: Iterable[int],
    takes: Callable[[int, bool], bool],
) -> None:
    """Plain rows, rows whose producer prepared their norm, with a residual and a norm for the next. `takes` says if the
    launcher is used for so many rows, with a residual or without."""
    N, K, glu = shape
    columns = N // 2 if glu else N
    launched = []
    launch = getattr(linear_triton, launcher)

    def counted(*args):
        launched.append(1)
        launch(*args)

    monkeypatch.setattr(linear_triton, launcher, counted)
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
            monkeypatch.setattr(linear_triton, "can_hold", lambda *args: False)
            wanted = linear_residual_triton(given, weight, glu=glu, pdl=pdl, **more)
            monkeypatch.setattr(linear_triton, "can_hold", linear_held.can_hold)
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
def test_weights_are_asked_for_before_the_wait(shape: tuple[int, int, bool], T: int, tmp_path: Path) -> None:
    N, K, glu = shape
    config, rows, parts = config_for(T, N, K, glu), held_rows(T), 2 if glu else 1
    steps, warps = K // config.block_k, rows // 8
    kept = min(linear_held.KEPT // parts, steps)
    fixed = {"BLOCK_M": rows, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "STEPS": steps}
    fixed |= {"CHAINS": config.chains, "KEEP": kept, "BLOCK_SQUARES": 64, "WARPS": warps}
    made = compiled(linear_held._held_kernel, shape, warps, **fixed)
    before, after = made.asm["ptx"].split("griddepcontrol.wait")
    copies = r"cp\.async\.\w+\.shared\.global"
    # 16 bytes a thread: all weights before, nothing but rows behind
    assert len(re.findall(copies, before)) * 16 * 32 * warps == 2 * K * config.block_n * parts
    assert len(re.findall(copies, after)) * 16 * 32 * warps == 2 * K * rows
    assert "ld.global" not in before and "st.global" not in before and "griddepcontrol.launch" in before
    fragments = re.findall(r"ldmatrix", before)
    assert len(fragments) * 4 * 8 * 8 == kept * parts * config.block_n * config.block_k  # four of 8 by 8 at a time
    assert "bar.sync" not in before.split("cp.async.commit_group")[0], "a copy waits for another"
    assert usage_of(made.asm["cubin"], tmp_path)["STACK"] == 0, "registers do not suffice"


@pytest.mark.gpu
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_held_product_is_the_triton_product(
    shape: tuple[int, int, bool], dtype: torch.dtype, pdl: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    same_as_triton(
        *(shape, dtype, pdl, monkeypatch, "launch_held"),
        (1, 2, 7, 8, 9, 14, 16, 17, 20, MAX_STATIONARY_ROWS),
        lambda T, residual: True,
    )
