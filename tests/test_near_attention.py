"""Attention of short sequences with one trip to the L2: in Triton's interpreter against key by key, and to the bit
against the kernel for any length, also compiled; and what the compiler makes of it for a Hopper GPU."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from interpreting import check_in_a_child, mend_interpreter
from test_paged_attention import BLOCK, Case, tolerance


@st.composite
def near_cases(draw: st.DrawFn) -> tuple[Case, int]:
    """And the tile, of which no sequence has more than two."""
    tile, rows = draw(st.sampled_from([32, 64])), draw(st.integers(1, 16))
    lives = draw(st.lists(st.integers(0, rows), min_size=1, max_size=3))
    edges = st.sampled_from([0, 1, tile - rows, tile - 1, tile, 2 * tile - rows])
    starts = [min(draw(st.one_of(edges, st.integers(0, 2 * tile))), 2 * tile - rows) for _ in lives]
    group, kv_heads, width = draw(st.sampled_from([(1, 3, 16), (3, 1, 16), (2, 2, 32)]))
    flags = draw(st.booleans()), draw(st.booleans())
    return Case(
        group, kv_heads, width, starts, [rows] * len(lives), lives, None, *flags, draw(st.integers(0, 99))
    ), tile


def test_in_the_interpreter() -> None:
    check_in_a_child(__file__)


def check_in_the_interpreter() -> None:
    from peagle.kernels.near_attention_triton import near_attention
    from peagle.kernels.paged_attention_triton import paged_attention_triton
    from peagle.kernels.paged_launches import Launch

    mend_interpreter()

    @settings(max_examples=24, deadline=None, derandomize=True, database=None, phases=(Phase.explicit, Phase.generate))
    @given(near_cases(), st.sampled_from(["", "plain", "norm"]), st.sampled_from([torch.float32, torch.float16]))
    def check(made: tuple[Case, int], turn: str, dtype: torch.dtype) -> None:
        case, tile = made
        case.build(dtype, "cpu")
        rotation = case.rotation(turn == "norm", dtype, "cpu") if turn else None
        rows = max(case.rows)
        pages = case.pages("cpu", max(case.starts))
        launch = Launch(tile, 16, 1, 4, 2, 0, 1, span=2)
        given = case.q, case.k, case.v
        before = case.cache_k.clone(), case.cache_v.clone()

        def run(*args):  # type: ignore[no-untyped-def]
            return near_attention(*args, pages, launch, rotation=rotation, new=16)  # as many as there are rows

        case.check(run, tolerance(dtype), rotation)
        mine, theirs = ([x.clone() for x in before] for _ in range(2))
        got = run(*given, *mine)
        want = paged_attention_triton(*given, *theirs, pages, None, launch=launch, rotation=rotation)
        live = [b * rows + j for b, count in enumerate(case.live) for j in range(count)]
        assert torch.equal(got[live], want[live])
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)

    check()


@pytest.mark.parametrize("new", [64, 16])
@pytest.mark.parametrize("tiles", [1, 2])
def test_compiled_for_a_gpu(tiles: int, new: int) -> None:
    """With 64 new rows all products are of the kind that the kernel in use has. No operand's address is in one register
    with another kind's (test_paged_attention.py says why), and old keys are asked for before the wait."""
    pytest.importorskip("triton", reason="Triton is made for Linux only")
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from peagle.kernels.near_attention_triton import _near_kernel

    fixed = {"G": 3, "GROUP": 3, "D": 64, "BLOCK": BLOCK, "TILE": 256, "TILES": tiles, "QUERIES": 16, "NEW": new}
    fixed |= {"ROTATE": True, "NORM": False, "PRECISION": "tf32", "PDL": True}
    names = _near_kernel.arg_names
    types = dict.fromkeys(names[: names.index("tables")], "*bf16") | dict.fromkeys(
        ("tables", "starts", "lives"), "*i32"
    )
    types |= dict.fromkeys(("scale", "eps"), "fp32")
    signature = {name: "constexpr" if name in fixed else types.get(name, "i32") for name in names}
    plain = ("rows", "table_row", "table_width", "scale", "eps", *fixed)
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name not in plain}
    options = {"num_warps": 8, "num_stages": 1, "launch_pdl": True, "enable_fp_fusion": False}
    made = compile(ASTSource(_near_kernel, signature, fixed, aligned), GPUTarget("cuda", 90, 32), options=options)
    before, after = made.asm["ptx"].split("griddepcontrol.wait")
    assert "wgmma.mma_async" in after and ("mma.sync" in after) == (new < 64)
    old = re.compile(r"ld\.global\.v4\.b32")
    assert len(old.findall(before)) >= 2 * 8 * tiles, "keys and values: eight pieces a thread"
    kinds: dict[str, set[int]] = {}
    for register, constant in re.findall(r"(?:or\.b64|add\.s64)\s+%rd\d+, (%rd\d+), (-?\d{12,});", before + after):
        kinds.setdefault(register, set()).add(int(constant) >> 32)
    assert len(kinds) >= 3 and all(len(found) == 1 for found in kinds.values()), kinds


@pytest.mark.gpu
def test_bits_are_those_of_the_kernel_for_any_length() -> None:
    from benchmarks.kernel_near import CASES, same_bits

    assert [case for case in CASES if not same_bits(*case)] == []


if __name__ == "__main__":
    check_in_the_interpreter()
    print("kernels checked")
