"""The C kernels for few rows: accuracy against fp64, batch-invariant bits, and compilation with and without a compiler.

Without a compiler only the last tests run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pairs import load_pair
from support import many, threads
from torch import Tensor
from torch.nn import functional as F

from peagle.engine.kv_cache import KVCache, PagedAttention
from peagle.kernels.attention.types import PagedAttentionMetadata
from peagle.kernels.gemm import linear_torch as kernels
from peagle.kernels.gemm import skinny_cpu
from peagle.models.fused_cpu import FusedCpuDecoder

EPS = 1e-5
compiled = pytest.mark.skipif(skinny_cpu.library() is None, reason="no C compiler here")


def gemm(x: Tensor, *args, **options) -> Tensor:
    y = skinny_cpu.gemm(x, *args, **options)
    assert y is not None
    return y


def exact(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, norm: Tensor | None, glu: bool
) -> Tensor:
    x = x.double()
    if norm is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * norm
    y = x @ weight.double().T + (0 if bias is None else bias)
    if glu:
        gate, up = y.chunk(2, -1)
        y = gate * torch.sigmoid(gate) * up
    return y if residual is None else y + residual


@compiled
@many(80)
@given(
    rows=st.integers(1, skinny_cpu.MAX_ROWS),
    half=st.integers(1, 70),
    K=st.sampled_from([1, 3, 4, 16, 31, 64, 100, 576]),
    parts=st.tuples(*[st.booleans()] * 4),
    scale=st.sampled_from([1e-3, 1.0, 30.0]),
    count=st.integers(1, 3),
)
def test_the_fused_gemm(rows, half, K, parts, scale, count):
    """Against fp64; and the same bits row by row on one thread as for all rows on several."""
    torch.manual_seed(rows * K + half)
    has_bias, has_norm, glu, strided = parts
    N = 2 * half
    x = torch.randn(rows, K + 5)[:, 2 : K + 2] if strided else torch.randn(rows, K)
    x, weight = x * scale if not strided else x.mul_(scale), torch.randn(N, K) * K**-0.5
    bias, norm = torch.randn(N) if has_bias else None, torch.randn(K) if has_norm else None
    residual = None if glu else torch.randn(rows, N)
    with threads(count):
        y = gemm(x, weight, bias, residual, norm, EPS, glu)
    truth = exact(x, weight, bias, residual, norm, glu)
    torch.testing.assert_close(y.double(), truth, rtol=3e-5, atol=2e-5 * max(1.0, scale))
    with threads(1):
        for row in range(rows):
            own = None if residual is None else residual[row : row + 1]
            assert torch.equal(gemm(x[row : row + 1], weight, bias, own, norm, EPS, glu)[0], y[row])


@compiled
def test_gates_far_from_zero():
    gate = torch.tensor([-1e4, -200.0, -90.0, -88.0, -20.0, -1e-8, 0.0, 1e-8, 20.0, 88.0, 90.0, 1e4])
    weight = torch.eye(24)
    y = gemm(torch.cat([gate, torch.ones(12)])[None], weight, glu=True)[0]
    torch.testing.assert_close(y, F.silu(gate), rtol=3e-7, atol=1e-34)


@compiled
@many(40)
@given(
    rows=st.integers(1, skinny_cpu.MAX_ROWS),
    start=st.sampled_from([0, 1, 2, 3, 4, 15, 16, 37, 200]),
    shape=st.sampled_from([(9, 3, 64), (4, 2, 32), (4, 4, 64), (6, 1, 96), (2, 1, 128)]),
    sharp=st.sampled_from([0.1, 1.0, 8.0]),
)
def test_attention_and_its_kv_writes(rows, start, shape, sharp):
    torch.manual_seed(rows + 31 * start)
    (heads, kv_heads, width), S = shape, start + rows
    cache = torch.randn(2, S + 3, kv_heads, width)  # the last positions must stay untouched
    keys, values = cache[:, :S].clone()
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * width) * sharp
    turns = torch.rand(rows, width // 2) * 6
    cos, sin = torch.cat([turns.cos()] * 2, 1), torch.cat([-turns.sin(), turns.sin()], 1)
    before = cache.clone()
    with threads(2):
        out = skinny_cpu.attention(qkv, cos, sin, cache[0, :S], cache[1, :S], heads)

    q, k, v = qkv.double().view(rows, -1, width).split([heads, kv_heads, kv_heads], 1)
    q, k = (x * cos[:, None] + x.roll(width // 2, -1) * sin[:, None] for x in (q, k))
    keys, values = torch.cat([keys[:start], k]), torch.cat([values[:start], v])
    seen = torch.arange(S) <= torch.arange(start, S)[:, None]
    truth = F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in (q, keys, values)), seen, enable_gqa=True)
    torch.testing.assert_close(out.double(), truth.transpose(0, 1).flatten(1), rtol=0, atol=5e-6 * max(1.0, sharp) ** 2)
    torch.testing.assert_close(cache[:, :S].double(), torch.stack([keys, values]), rtol=1e-5, atol=1e-6)
    assert torch.equal(cache[:, :start], before[:, :start]) and torch.equal(cache[:, S:], before[:, S:])
    with threads(1):
        for row in range(rows):
            end, own = start + row + 1, slice(row, row + 1)
            alone = skinny_cpu.attention(qkv[own], cos[own], sin[own], cache[0, :end], cache[1, :end], heads)
            assert torch.equal(alone[0], out[row])


@compiled
def test_rows_have_the_same_bits_in_any_batch(monkeypatch):
    """So speculation cannot change the output even where two tokens are equally likely."""
    target, _ = load_pair("p-eagle-1")
    own = [m.weight for m in target.modules() if isinstance(m, torch.nn.Linear)]
    monkeypatch.setattr(kernels, "_c_kernel_shapes", {w.shape for w in own})
    tokens, layer = torch.arange(40) * 7 % 100, target.cfg.layer
    blocks = torch.arange(1, 9, dtype=torch.int32)[None]

    def read(steps: list[int]) -> Tensor:
        cache, found, at = KVCache.allocate([layer] * target.cfg.num_layers, 9, own[0]), [], 0
        for rows in steps:
            pages = PagedAttentionMetadata(blocks, torch.tensor([at]).int(), torch.tensor([rows]).int(), rows)
            attend = PagedAttention(cache, pages)
            assert attend.one is not None and attend.one.applies_rope
            hidden, _ = FusedCpuDecoder(target)(tokens[at : at + rows], torch.arange(at, at + rows), attend)
            found.append(target.compute_logits(hidden))
            at += rows
        return torch.cat(found)

    with torch.inference_mode():
        alone = read([1] * 40)
        assert torch.equal(read([16, 1, 8, 3, 2, 4, 6]), alone)
        assert torch.equal(read([5] * 8), alone)
        target_says = target(tokens, torch.arange(40), _causal)[0]
    torch.testing.assert_close(alone, target.compute_logits(target_says), rtol=1e-4, atol=1e-4)


def _causal(layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    out = F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in (q, k, v)), is_causal=True, enable_gqa=True)
    return out.transpose(0, 1)


@compiled
@pytest.mark.parametrize("faster", [True, False])
def test_the_c_kernel_takes_all_row_counts_or_none(monkeypatch, faster):
    def measured(gemms, x, weight):
        return {gemm: 1.0 if (gemm is skinny_cpu.gemm) == faster else 2.0 for gemm in gemms}

    monkeypatch.setattr(kernels, "_c_kernel_shapes", set())
    monkeypatch.setattr(kernels, "_measure", measured)
    weights = [torch.randn(24, 16), torch.randn(8, 16), torch.randn(24, 16, dtype=torch.float64)]
    kernels.select_cpu_gemms(weights, budget_s=60.0)
    assert kernels._c_kernel_shapes == ({(24, 16), (8, 16)} if faster else set())
    with torch.inference_mode():
        for weight in weights:
            for rows in (1, 2, 7, 16, 17):
                x, norm, residual = (torch.randn(*s).to(weight) for s in ((rows, 16), (16,), (rows, len(weight) // 2)))
                y = kernels.linear_cpu(x, weight, norm_weight=norm, eps=EPS, glu=True, residual=residual)
                truth = exact(x, weight, None, residual, norm, True)
                torch.testing.assert_close(y.double(), truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "environment", [{"PEAGLE_CC": "0"}, {"CC": "false"}, {"CC": "/no/such/compiler"}, {"PEAGLE_CACHE": "/dev/null/no"}]
)
def test_without_the_library_torch_takes_over_and_a_debug_log_says_so(environment, monkeypatch, caplog, capfd):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(skinny_cpu, "library", cache(skinny_cpu.library.__wrapped__))
    monkeypatch.setattr(kernels, "_c_kernel_shapes", set())
    caplog.set_level("DEBUG", "peagle.kernels")
    weight, x = torch.randn(8, 4), torch.randn(3, 4)
    kernels.select_cpu_gemms([weight])
    assert skinny_cpu.library() is None and not skinny_cpu.supports_attention(64)
    with torch.inference_mode():
        torch.testing.assert_close(kernels.linear_cpu(x, weight), x @ weight.T)
    assert [r.levelname for r in caplog.records] == ["DEBUG"] and capfd.readouterr() == ("", "")


@compiled
def test_processes_compile_concurrently_and_share_torchs_threads(tmp_path, monkeypatch):
    """A process loads no second OpenMP library, and one file is left."""
    code = (
        "import re, torch\n"
        "from peagle.kernels.gemm import skinny_cpu\n"
        "def pools(): return set(re.findall(r'\\S*lib(?:gomp|iomp5|omp)\\b\\S*', open('/proc/self/maps').read()))\n"
        "torch.set_num_threads(2)\n"
        "torch.randn(500, 500) @ torch.randn(500, 500)\n"
        "before = pools()\n"
        "assert skinny_cpu.gemm(torch.ones(2, 3), torch.ones(400, 3)).tolist() == [[3.0] * 400] * 2\n"
        "assert skinny_cpu.find_gomp_parallel() is not None and pools() == before, pools() - before\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PEAGLE_CACHE": str(tmp_path)}
    started = [subprocess.Popen([sys.executable, "-c", code], env=env) for _ in range(2)]
    assert [process.wait() for process in started] == [0, 0]
    (found,) = (tmp_path / "kernels").iterdir()
    found.write_bytes(b"torn")  # e.g. a full disk: not used, and no error
    monkeypatch.setenv("PEAGLE_CACHE", str(tmp_path))
    assert skinny_cpu.library.__wrapped__() is None
