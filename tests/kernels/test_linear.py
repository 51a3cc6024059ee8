"""Linear layers against fp64, in Triton's interpreter on the CPU and compiled on a GPU.

Triton decides at import whether kernels are interpreted, so the interpreted tests run in a child pytest over this file.
The interpreter's MMA supports fp16, not bf16.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from support import many
from torch import Tensor
from torch.nn import functional as F
from triton_interpreter import patch_interpreter

from peagle.kernels.fp8 import FP8_DTYPE, dequantize_rows, fp8_gemm, quantize_rows_torch, quantize_rows_triton
from peagle.kernels.gather import gather_rows_triton
from peagle.kernels.gemm import linear as kernels
from peagle.kernels.gemm import tile_configs as shapes
from peagle.kernels.gemm.linear import linear, linear_residual
from peagle.kernels.gemm.linear_torch import linear_torch
from peagle.kernels.gemm.linear_triton import _counters, linear_residual_triton, linear_triton
from peagle.kernels.gemm.tile_configs import GemmConfig, config_for
from peagle.kernels.norm.rms_norm import (
    ResidualStream,
    add_rms_norm,
    add_rms_norm_triton,
    norm_cat,
    norm_cat_triton,
    rms_norm,
    rms_norm_torch,
    rms_norm_triton,
    silu_mul,
    silu_mul_torch,
    silu_mul_triton,
)
from peagle.models.layers import RMSNorm

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    patch_interpreter()
EPS = 0.1  # large enough that leaving it out shows

# Kernels run in the interpreter in the child process, otherwise on the GPU.
on_a_device = pytest.mark.parametrize(
    ("device", "dtype"),
    [("cpu", torch.float16)]
    if INTERPRETED
    else [
        pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.float16, marks=pytest.mark.gpu),
    ],
)


@pytest.mark.skipif(INTERPRETED, reason="this is the child")
def test_in_the_interpreter():
    assert importlib.util.find_spec("triton"), "the tests need triton==3.6.0, for its interpreter"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__],
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


@contextmanager
def poisoned() -> Iterator[None]:
    """Fills new memory with NaN, so that outputs and partial sums that are never written show."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(before)


class Case:
    """Inputs of one call, and a bound on the rounding error of its result."""

    def __init__(self, T, N, K, dtype, device, *, norm=False, glu=False, bias=False, residual=False, fp8=False, seed=0):
        generator = torch.Generator().manual_seed(seed)

        def draw(*size: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(*size, generator=generator) * scale).to(dtype).to(device)

        columns = N // 2 if glu else N
        # Slices of wider rows, as queries are slices of q, k and v.
        self.x = draw(T, K + 8)[:, :K]
        self.weight = self.stored = draw(N, K, scale=K**-0.5)
        self.options: dict[str, Tensor] = {}
        if fp8:
            self.stored, scale = quantize_rows_torch(self.weight)
            self.options["weight_scale"] = scale
            self.weight = dequantize_rows(self.stored, scale, torch.float32)
        self.bias = draw(N) if bias else None
        self.norm = draw(K) if norm else None
        self.residual = draw(T, columns + 8)[:, :columns] if residual else None
        self.glu = glu

    def run(self, function, rows: int | None = None, **options) -> Tensor:
        return function(
            self.x[:rows],
            self.stored,
            self.bias,
            norm_weight=self.norm,
            eps=EPS,
            glu=self.glu,
            residual=self.residual[:rows] if self.residual is not None else None,
            **self.options,
            **options,
        )

    def check(self, y: Tensor) -> None:
        def wide(t: Tensor | None) -> Tensor | None:
            return None if t is None else t.double()

        x, weight, bias, norm, residual = map(wide, (self.x, self.weight, self.bias, self.norm, self.residual))
        truth = linear_torch(x, weight, bias, norm_weight=norm, eps=EPS, glu=self.glu, residual=residual)
        assert y.shape == truth.shape and y.dtype == self.x.dtype
        # Each input of the GEMM may be off by two roundings, and so may the result of each later step.
        x = x if norm is None else rms_norm_torch(x, norm, EPS)
        z = F.linear(x, weight, bias)
        spread = F.linear(x.abs(), weight.abs(), None if bias is None else bias.abs())
        if self.glu:
            (gate, up), (gate_spread, up_spread) = z.chunk(2, -1), spread.chunk(2, -1)
            spread = 1.1 * gate_spread * up.abs() + gate.abs() * up_spread + truth.abs()
        if residual is not None:
            spread = spread + residual.abs()
        bound = 2 * torch.finfo(self.x.dtype).eps * (spread + truth.abs()) + 1e-6
        off = (y.double() - truth).abs()
        assert (off <= bound).all(), f"{(off / bound).max().item():.2f} times too far"  # NaN fails too


def configs() -> st.SearchStrategy[GemmConfig]:
    return st.builds(
        GemmConfig,
        block_n=st.sampled_from([16, 32]),
        block_k=st.sampled_from([16, 32, 64]),
        stages=st.just(3),
        warps=st.sampled_from([2, 4]),
        split_k=st.sampled_from([1, 1, 2, 3]),
        prefetch=st.sampled_from([0, 64, 128]),
        accumulators=st.sampled_from([1, 1, 2, 3]),
        block_m=st.sampled_from([0, 8, 16]),
    )


@st.composite
def calls(draw: st.DrawFn) -> tuple[dict[str, object], GemmConfig | None]:
    glu = draw(st.booleans())
    K = draw(st.one_of(st.integers(1, 200), st.sampled_from([64, 128, 192, 256])))
    N = draw(st.integers(1, 70)) * (2 if glu else 1)
    flags = {name: draw(st.booleans()) for name in ("norm", "bias", "residual", "fp8")}
    T = draw(st.one_of(st.sampled_from([1, 8, 16, 17, 32, 33, 64, 65, 150]), st.integers(1, 64)))
    config = draw(st.one_of(st.none(), configs()))
    if config is not None:
        if T > (config.block_m or shapes.MAX_SKINNY_ROWS):
            config = replace(config, split_k=1)
        if glu:
            config = replace(config, split_k=1)
        if -(-K // config.block_k // config.split_k) % config.accumulators:
            config = replace(config, accumulators=1)
    return {"T": T, "N": N, "K": K, "glu": glu, **flags}, config


# All parts together, with a masked end of K.
WHOLE = {"T": 20, "N": 70, "K": 250, "glu": True, "norm": True, "bias": True, "residual": True}


@on_a_device
@many(16)
@given(calls())
@example((WHOLE | {"glu": False}, GemmConfig(16, 32, 3, 2, split_k=3)))
@example((WHOLE | {"glu": False, "K": 256}, GemmConfig(32, 64, 3, 4, split_k=2, prefetch=64)))
@example((WHOLE, GemmConfig(16, 32, 3, 2, accumulators=4, block_m=8)))
@example((WHOLE | {"K": 192}, GemmConfig(16, 64, 2, 2, accumulators=3, block_m=16)))
@example((WHOLE | {"T": 1}, None))
@example((WHOLE | {"glu": False, "K": 256, "fp8": True}, GemmConfig(32, 64, 3, 4, split_k=2, prefetch=64)))
@example((WHOLE | {"K": 192, "fp8": True}, GemmConfig(16, 64, 2, 2, accumulators=3, block_m=16)))
@example((WHOLE | {"T": 130}, None))
@example(({"T": 3, "N": 1, "K": 64, "glu": False, "norm": False, "bias": True, "residual": True}, None))
@example(({"T": 3, "N": 2, "K": 1, "glu": True, "norm": True, "bias": True, "residual": True}, None))
def test_the_triton_gemm_against_fp64(device, dtype, call):
    shape, config = call
    case = Case(**shape, dtype=dtype, device=device)
    with poisoned():
        y = case.run(linear_triton, config=config)
    case.check(y)


@on_a_device
@many(6)
@given(
    st.sampled_from([1, 8, 17, 40]),
    st.integers(1, 200),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2]),
    st.booleans(),
)
@example(40, 200, 2, 2, True)
@example(8, 1, 1, 1, False)
def test_a_prepared_norm_is_the_norm(device, dtype, T, D, split, next_split, glu):
    first = Case(T, D, 64, dtype, device, bias=True, residual=True)
    then = Case(T, 6, D, dtype, device, norm=True, glu=glu, bias=True, seed=1)
    with poisoned():
        stream = linear_residual_triton(
            first.x,
            first.weight,
            first.bias,
            residual=first.residual,
            next_norm=then.norm,
            config=GemmConfig(16, 32, 3, 2, split_k=split),
        )
        y = linear_triton(
            stream,
            then.weight,
            then.bias,
            norm_weight=then.norm,
            eps=EPS,
            glu=glu,
            config=GemmConfig(16, 32, 3, 2, split_k=1 if glu else next_split),  # a gated GEMM is not split
        )
    first.check(stream.x)
    assert torch.equal(stream.x, first.run(linear_triton, config=GemmConfig(16, 32, 3, 2, split_k=split)))
    assert stream.scaled is not None and stream.squares is not None
    assert torch.equal(stream.scaled, (stream.x.float() * then.norm.float()).to(dtype))
    torch.testing.assert_close(stream.squares.sum(0), stream.x.double().square().sum(-1), rtol=1e-14, atol=0)
    then.x = stream.x
    then.check(y)
    # A GEMM with another norm reads x itself.
    other = then.norm.clone()
    assert torch.equal(
        linear_triton(stream, then.weight, norm_weight=other, eps=EPS),
        linear_triton(stream.x, then.weight, norm_weight=other, eps=EPS),
    )


@on_a_device
def test_rows_with_a_prepared_norm_are_batch_invariant(device, dtype):
    most = 16 if INTERPRETED else 64
    first = Case(most, 300, 64, dtype, device, residual=True)
    then = Case(most, 48, 300, dtype, device, norm=True)
    config = GemmConfig(16, 32, 3, 2)

    def run(rows: int) -> tuple[Tensor, Tensor]:
        stream = linear_residual_triton(
            first.x[:rows], first.weight, residual=first.residual[:rows], next_norm=then.norm, config=config
        )
        assert stream.squares is not None
        return stream.squares, linear_triton(stream, then.weight, norm_weight=then.norm, eps=EPS, config=config)

    squares, full = run(most)
    for rows in (1, 7, 15, 16, 17, 32, 33, 64):
        if rows <= most:
            some, y = run(rows)
            assert torch.equal(some, squares[:, :rows]) and torch.equal(y, full[:rows]), rows


SMOLLM2 = {"qkv": (960, 576), "o": (576, 576), "gate_up": (3072, 576), "down": (576, 1536), "head": (49152, 576)}


@on_a_device
def test_1_over_rms_has_the_same_bits_in_every_kernel(device, dtype):
    """With integers, GEMMs are exact in any order, in numpy too, so only 1 / rms could differ."""
    generator = torch.Generator().manual_seed(0)
    N, K = SMOLLM2["o"]

    def integers(*size: int) -> Tensor:
        return torch.randint(-2, 3, size, generator=generator).to(dtype).to(device)

    x, weight, norm = integers(64, K), integers(N, K), torch.ones(N, dtype=dtype, device=device)
    residual = (torch.randn(64, N, generator=generator) * 8).to(dtype).to(device)
    wide = linear_torch(x.double(), weight.double(), residual=residual.double()).to(dtype)
    one_by_one = torch.eye(N, dtype=dtype, device=device)[:48]  # a GEMM that only applies the norm
    want = wide.double().square().sum(-1).float()
    normed: dict[int, Tensor] = {}
    for rows in (1, 8, 17, 64):
        stream = linear_residual_triton(x[:rows], weight, residual=residual[:rows], next_norm=norm)
        assert torch.equal(stream.x, wide[:rows]) and stream.squares is not None
        # 1 / rms is computed from fp32: the same bits from 18 partial sums, from 36, and from the whole row
        assert torch.equal(stream.squares.sum(0).float(), want[:rows]), rows
        normed[rows] = linear_triton(stream, one_by_one, norm_weight=norm, eps=EPS)
        # With a weight of 1 both orders of rounding are equal.
        plain = rms_norm_triton(stream.x, norm, EPS)
        both = norm_cat_triton((stream.x, stream.x), (norm, norm), EPS)
        assert torch.equal(plain[:, :48], normed[rows]) and torch.equal(both, torch.cat([plain, plain], -1)), rows
        added = add_rms_norm_triton(stream.x, torch.zeros_like(stream.x), norm, EPS)[0]
        assert torch.equal(added, plain)
    for rows, some in normed.items():
        assert torch.equal(some, normed[64][:rows])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 8, 16, 17, 32, 33, 64, 65, 128, 129, 256, 384, 512])
def test_smollm2s_layers_are_batch_invariant(rows):
    """Every GEMM and norm of a layer, and lm_head, as a model calls them."""
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*size, generator=generator) * scale).bfloat16().cuda()

    weights = {name: draw(n, k, scale=k**-0.5) for name, (n, k) in SMOLLM2.items()}
    norm, mlp_norm = draw(576), draw(576)
    x, attended = draw(shapes.MAX_TILED_ROWS, 576), draw(shapes.MAX_TILED_ROWS, 576)

    def chain(count: int) -> list[Tensor]:
        first = linear(x[:count], weights["qkv"], norm_weight=norm, eps=EPS)
        stream = linear_residual(x[:count], attended[:count], weights["o"], next_norm=mlp_norm, eps=EPS)
        hidden = linear(stream, weights["gate_up"], norm_weight=mlp_norm, eps=EPS, glu=True)
        after = linear_residual(stream.x, hidden, weights["down"], next_norm=norm, eps=EPS)
        assert stream.squares is not None and after.squares is not None
        qkv = linear(after, weights["qkv"], norm_weight=norm, eps=EPS)
        logits = linear(rms_norm(after.x, norm, EPS), weights["head"])
        return [first, stream.x, hidden, after.x, qkv, logits]

    names = ("first qkv", "o", "gate_up", "down", "qkv", "head")
    for name, some, most in zip(names, chain(rows), chain(shapes.MAX_TILED_ROWS), strict=True):
        assert torch.equal(some, most[:rows]), name


@on_a_device
def test_quantizing_rows(device, dtype):
    """Each row's largest value becomes 448, and rows of zeros stay zeros; rounding is to the nearest."""
    x = (torch.randn(5, 150, generator=torch.Generator().manual_seed(0)) * 3).to(dtype).to(device)[:, :140]
    x[2] = 0
    values, scale = quantize_rows_triton(x)
    expected, expected_scale = quantize_rows_torch(x.cpu())  # a GPU divides by a number through its reciprocal
    assert values.dtype == FP8_DTYPE and torch.equal(scale.cpu(), expected_scale)
    assert torch.equal(values.double().cpu(), expected.double())
    assert values.double().abs().amax(1).tolist() == [448.0, 448.0, 0.0, 448.0, 448.0]
    error = (dequantize_rows(values, scale, torch.float32) - x.float()).abs()
    assert (error <= 2**-4 * x.float().abs() + 2**-10 * scale[:, None]).all()  # 3 bits of mantissa, or subnormal


@pytest.mark.skipif(INTERPRETED, reason="needs no Triton")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_fp8_gemm(device):
    case = Case(100, 96, 64, torch.bfloat16, device, bias=True, fp8=True)
    y = fp8_gemm(case.x, case.stored, case.options["weight_scale"], case.bias)
    case.x, plain = dequantize_rows(*quantize_rows_torch(case.x.cpu()), torch.float32).to(device), case.x
    truth = F.linear(case.x, case.weight, case.bias.float())
    spread = F.linear(case.x.abs(), case.weight.abs(), case.bias.abs().float())
    assert ((y.float() - truth).abs() <= 2**-7 * spread).all()  # the sum and the bias are rounded to bf16
    whole = F.linear(plain.float(), case.weight, case.bias.float())
    assert ((y.float() - whole).abs() <= (2**-7 + 2**-4) * spread).all()  # as is x to fp8


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 64, 65, 641])
@pytest.mark.parametrize(("N", "K", "glu"), [(960, 576, False), (4096, 4096, False), (19456, 2560, True)])
def test_fp8_weights_on_the_gpu(rows, N, K, glu):
    """The error of quantized activations is random: a row's relative error is below that of its elements."""
    case = Case(rows, N, K, torch.bfloat16, "cuda", norm=True, glu=glu, fp8=True)
    y = case.run(linear).double()
    if rows <= 64:
        return case.check(y.bfloat16())
    scale = case.options.pop("weight_scale").double()
    truth = case.run(
        lambda x, *_, **options: linear_torch(x.double(), case.stored.double() * scale[:, None], **options)
    )
    assert ((y - truth).norm(dim=1) <= 2**-4 * truth.norm(dim=1)).all()


@on_a_device
def test_zero_rows(device, dtype):
    case = Case(0, 6, 16, dtype, device, glu=True, norm=True, residual=True)
    assert case.run(linear_triton).shape == (0, 3)


@on_a_device
@pytest.mark.parametrize("config", [None, GemmConfig(16, 32, 3, 2, split_k=2)])
def test_rows_are_batch_invariant(device, dtype, config):
    case = Case(64, 96, 256, dtype, device, norm=True, residual=True)
    # In the interpreter numpy may add a wider product in another order: only equal widths have equal bits.
    most = 16 if INTERPRETED else 64
    full = case.run(linear_triton, most, config=config)
    for rows in (1, 7, 15, 16, 17, 32, 33, 64):
        if rows <= most:
            assert torch.equal(case.run(linear_triton, rows, config=config), full[:rows]), rows


@on_a_device
def test_a_split_gemm_is_deterministic_and_resets_its_counters(device, dtype):
    case = Case(8, 80, 256, dtype, device)
    config = GemmConfig(16, 32, 3, 2, split_k=4)
    first = case.run(linear_triton, config=config)
    for _ in range(3):
        assert torch.equal(case.run(linear_triton, config=config), first)
    assert _counters and not any(t.any() for t in _counters.values())


@on_a_device
@pytest.mark.parametrize(("T", "K"), [(1, 1), (3, 70), (5, 576), (70, 96)])
def test_norm_gate_and_gather_kernels(device, dtype, T, K):
    generator = torch.Generator().manual_seed(T)
    x, residual, wide = (torch.randn(T, w, generator=generator).to(dtype).to(device) for w in (K, K, 2 * K))
    weight = torch.randn(K, generator=generator).to(dtype).to(device)
    with poisoned():
        normed = rms_norm_triton(x, weight, EPS)
        summed, total = add_rms_norm_triton(x, residual, weight, EPS)
        gated = silu_mul_triton(wide)
        both = norm_cat_triton((x, wide[:, :K]), (weight, x[0]), EPS)
        three = norm_cat_triton((x, wide[:, K:], wide[:, :K]), (weight, weight, x[0]), EPS)
        numbers = torch.tensor([T - 1, 0, T - 1], device=device)
        taken, late = (gather_rows_triton(wide[:, K:], numbers, overlap) for overlap in (True, False))
    assert torch.equal(total, x + residual)
    assert torch.equal(taken, torch.stack([wide[T - 1, K:], wide[0, K:], wide[T - 1, K:]])) and torch.equal(taken, late)
    assert torch.equal(torch.cat([three[:, :K], three[:, 2 * K :]], 1), both)
    assert torch.equal(three[:, K : 2 * K], rms_norm_triton(wide[:, K:], weight, EPS))
    close = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-6}
    torch.testing.assert_close(normed.double(), rms_norm_torch(x.double(), weight.double(), EPS), **close)
    torch.testing.assert_close(summed.double(), rms_norm_torch(total.double(), weight.double(), EPS), **close)
    parts = ((x, weight), (wide[:, :K], x[0]))
    truth = torch.cat([rms_norm_torch(part.double(), w.double(), EPS) for part, w in parts], -1)
    torch.testing.assert_close(both.double(), truth, **close)
    torch.testing.assert_close(gated.double(), silu_mul_torch(wide.double()), **close)


KNOWN = list(shapes.TUNED)


@many(200)
@given(
    st.one_of(
        st.sampled_from(KNOWN),
        st.tuples(st.integers(1, 20000).map(lambda n: 2 * n), st.integers(1, 20000), st.booleans()),
        st.tuples(st.integers(1, 140000), st.sampled_from([64, 576, 2048, 4096, 5120]), st.just(False)),
    )
)
def test_configurations_fit_and_have_one_rounding_kind_per_range(shape):
    N, K, glu = shape
    for kind in ((1, 7, 16), (17, 32, 33, 64)):
        found = [config_for(T, N, K, glu) for T in kind]
        assert len({replace(c, stages=0, weight_stationary=False, tile=None) for c in found}) == 1
        for T, c in zip(kind, found, strict=True):
            rows = c.block_m or shapes.block_rows(T)
            tile = (c.block_n * (2 if glu else 1) + rows) * c.block_k * c.accumulators * 2
            assert -(-K // c.block_k // c.split_k) % c.accumulators == 0
            assert 2 <= c.stages and c.stages * tile <= 227 * 1024
            assert 1 <= c.prefetch <= K
    assert shapes.max_triton_rows(N, K, glu) in (shapes.MAX_FEW_ROWS, shapes.MAX_SKINNY_ROWS, shapes.MAX_TILED_ROWS)


def test_small_shapes_have_one_rounding_kind():
    for N, K, glu in (
        (96, 256, False),
        (960, 1152, False),
        (49152, 64, False),
        *(s for s in KNOWN if s[1] in (576, 1536)),
    ):
        assert shapes.max_triton_rows(N, K, glu) == shapes.MAX_TILED_ROWS
        assert (
            len({config_for(T, N, K, glu).rounding_kind for T in (1, 16, 17, 64, 65, 512, shapes.MAX_TILED_ROWS)}) == 1
        )


def test_large_shapes_with_two_rounding_kinds():
    """Only these can change a target's output between few and more rows; the last two are a drafter's."""
    both = [s for s in KNOWN if config_for(16, *s).rounding_kind != config_for(17, *s).rounding_kind]
    assert both == [(4096, 4096, False), (4096, 14336, False), (6144, 8192, False), (4096, 12288, False)]


def test_the_reference_equals_the_modules():
    x, weight, bias = torch.randn(5, 24), torch.randn(12, 24), torch.randn(12)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        a, w, b = x.to(dtype), weight.to(dtype), bias.to(dtype)
        assert torch.equal(linear_torch(a, w, b), F.linear(a, w, b))
        norm = RMSNorm(24, EPS).to(dtype)
        with torch.no_grad():
            norm.weight.normal_()
            assert torch.equal(rms_norm_torch(a, norm.weight, EPS), norm(a))
            y = linear_torch(a, w, b, norm_weight=norm.weight, eps=EPS, glu=True, residual=a[:, :6])
            gate, up = F.linear(norm(a), w, b).chunk(2, -1)
            assert torch.equal(y, a[:, :6] + F.silu(gate) * up) and y.dtype == dtype


def test_the_reference_is_differentiable():
    sizes = [(3, 8), (6, 8), (6,), (8,), (3, 3)]
    inputs = [torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in sizes]

    def call(x: Tensor, weight: Tensor, bias: Tensor, norm: Tensor, residual: Tensor) -> Tensor:
        return linear(x, weight, bias, norm_weight=norm, eps=EPS, glu=True, residual=residual)

    assert torch.autograd.gradcheck(call, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_cpu_uses_the_references(dtype):
    x, weight, norm = torch.randn(5, 24).to(dtype), torch.randn(24, 24).to(dtype), torch.randn(24).to(dtype)
    options = {"norm_weight": norm, "eps": EPS, "residual": x}
    assert torch.equal(linear(x, weight, **options), linear_torch(x, weight, **options))
    assert torch.equal(rms_norm(x, norm, EPS), rms_norm_torch(x, norm, EPS))
    assert torch.equal(silu_mul(x), silu_mul_torch(x))
    assert torch.equal(
        norm_cat((x, -x), (norm, x[0]), EPS), torch.cat([rms_norm(x, norm, EPS), rms_norm(-x, x[0], EPS)], -1)
    )
    stream = linear_residual(x, x, weight, next_norm=norm)
    assert torch.equal(stream.x, x + F.linear(x, weight)) and stream.squares is None
    ours = linear(stream, weight, norm_weight=norm, eps=EPS)
    assert torch.equal(ours, F.linear(rms_norm_torch(stream.x, norm, EPS), weight))
    summed, total = add_rms_norm(x, x, norm, EPS)
    assert torch.equal(total, x + x) and torch.equal(summed, rms_norm_torch(total, norm, EPS))


def test_many_rows_compute_the_norm_with_the_sum(monkeypatch):
    """The path of large batches on a GPU, whose functions all run on the CPU too."""
    monkeypatch.setattr(kernels, "_supports_kernels", lambda *tensors: True)
    monkeypatch.setattr(kernels, "max_triton_rows", lambda *shape: 0)
    x, weight, norm = torch.randn(5, 24), torch.randn(24, 24), torch.randn(24)
    stream = linear_residual(x, x, weight, next_norm=norm, eps=EPS)
    assert stream.normed is not None and torch.equal(stream.x, x + F.linear(x, weight))
    prepared = linear(stream, weight, norm_weight=norm, eps=EPS)
    assert torch.equal(prepared, F.linear(rms_norm_torch(stream.x, norm, EPS), weight))
    other = -norm  # prepared for another norm: computed from x
    assert torch.equal(
        linear(stream, weight, norm_weight=other, eps=EPS), F.linear(rms_norm_torch(stream.x, other, EPS), weight)
    )


def test_without_triton_the_references_remain():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from peagle.kernels.triton_utils import HAVE_TRITON\n"
        "from peagle.kernels.gemm.linear import linear\n"
        "assert not HAVE_TRITON and linear(torch.ones(2, 3), torch.ones(4, 3)).shape == (2, 4)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 64, 65, 200])
@pytest.mark.parametrize("glu", [False, True])
@pytest.mark.parametrize("norm", [False, True])
def test_triton_and_cublas_on_the_gpu(T, glu, norm, monkeypatch):
    case = Case(T, 192, 128, torch.bfloat16, "cuda", glu=glu, norm=norm, bias=glu, residual=True)
    case.check(case.run(linear))
    monkeypatch.setattr(kernels, "max_triton_rows", lambda *shape: 0)
    case.check(case.run(linear))


@pytest.mark.gpu
def test_training_on_the_gpu_is_differentiable():
    weight = torch.randn(32, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    linear(torch.randn(4, 64, device="cuda", dtype=torch.bfloat16), weight).sum().backward()
    assert weight.grad is not None


@pytest.mark.gpu
@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("prepared", [False, True])
def test_dependent_launches_in_a_graph_change_nothing(split, late, prepared):
    """Kernels that start before their predecessors end, replayed many times, against kernels that wait."""
    torch.manual_seed(0)
    made = {"dtype": torch.bfloat16, "device": "cuda"}
    layers = [[torch.randn(n, k, **made) * k**-0.5 for n, k in ((1024, 512), (512, 512))] for _ in range(16)]
    norm = torch.ones(512, **made)
    x = torch.randn(8, 512, **made)

    def run(pdl: bool) -> Tensor:
        y = ResidualStream(x)
        gated = GemmConfig(16, 64, 4, 2, prefetch=256, late_launch=late)
        config = replace(gated, split_k=split)
        for up, down in layers:
            h = linear_triton(y, up, norm_weight=norm, eps=EPS, glu=True, config=gated, pdl=pdl)
            following = norm if prepared else None
            y = linear_residual_triton(h, down, residual=y.x, next_norm=following, config=config, pdl=pdl)
            assert (y.squares is not None) == prepared
        return y.x

    truth = run(False)
    run(True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(True)
    for _ in range(50):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, truth)
