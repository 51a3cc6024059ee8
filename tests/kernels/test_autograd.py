"""Backward kernels of RMS norm, SwiGLU and rope against autograd through their torch versions.

Triton reads TRITON_INTERPRET when a kernel is defined, so the interpreted tests run in a child pytest over this file.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import many
from torch import Tensor
from triton_interpreter import patch_interpreter

from peagle.kernels.attention.rotary import split_qkv_rope
from peagle.kernels.attention.types import QKNormRope
from peagle.kernels.norm.rms_norm import rms_norm_torch, silu_mul_torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    patch_interpreter()
EPS = 0.1  # large enough that omitting it shows

on_device = pytest.mark.parametrize(
    "device, dtype, tolerance",
    [("cpu", torch.float32, 1e-5)]
    if INTERPRETED
    else [pytest.param("cuda", torch.bfloat16, 2e-2, marks=pytest.mark.gpu)],
)


@pytest.mark.skipif(INTERPRETED, reason="runs the child process")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is made for Linux only")
def test_in_the_interpreter() -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    child = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu", __file__],
        env=env,
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stdout[-4000:] + child.stderr[-2000:]
    assert "6 passed" in child.stdout, child.stdout


def compare(
    fast: Callable[..., tuple[Tensor, ...]],
    plain: Callable[..., tuple[Tensor, ...]],
    given: list[Tensor],
    tolerance: float,
) -> None:
    """Compares results and gradients for random output gradients; the torch version runs in fp64."""
    torch.manual_seed(7)
    ours = [x.clone().requires_grad_() for x in given]
    theirs = [x.double().requires_grad_() for x in given]
    outs, wanted = fast(*ours), plain(*theirs)
    asks = [torch.randn_like(w) for w in wanted]
    sum((o.double() * a).sum() for o, a in zip(outs, asks, strict=True)).backward()
    sum((w * a).sum() for w, a in zip(wanted, asks, strict=True)).backward()
    for got, right in [*zip(outs, wanted, strict=True), *((o.grad, t.grad) for o, t in zip(ours, theirs, strict=True))]:
        assert got is not None and right is not None
        assert (got.double() - right).norm() <= tolerance * (right.norm() + 1e-30), (got, right)


needs_triton = pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="runs in the child process")


@needs_triton
@on_device
@many(12)
@given(rows=st.integers(1, 40), width=st.integers(1, 70), strided=st.booleans())
def test_rms_norm(device: str, dtype: torch.dtype, tolerance: float, rows: int, width: int, strided: bool) -> None:
    from peagle.kernels.norm import rms_norm as kernels

    torch.manual_seed(rows * 100 + width)
    x = torch.randn(rows, 2 * width, device=device, dtype=dtype)[:, :width]
    given = [x if strided else x.contiguous(), torch.randn(width, device=device, dtype=dtype)]
    compare(
        lambda x, w: (kernels.RMSNormFunction.apply(x, w, EPS),),
        lambda x, w: (rms_norm_torch(x, w, EPS),),
        given,
        tolerance,
    )


@needs_triton
@on_device
def test_rms_norm_of_many_rows(
    device: str, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More rows than programs: each program handles several rows, the last one fewer."""
    from peagle.kernels.norm import rms_norm as kernels

    monkeypatch.setattr(kernels, "_MAX_NORM_PROGRAMS", 4)
    given = [torch.randn(27, 40, device=device, dtype=dtype), torch.randn(40, device=device, dtype=dtype)]
    compare(
        lambda x, w: (kernels.RMSNormFunction.apply(x, w, EPS),),
        lambda x, w: (rms_norm_torch(x, w, EPS),),
        given,
        tolerance,
    )


@needs_triton
@on_device
@many(10)
@given(rows=st.integers(1, 20), half=st.one_of(st.integers(1, 50), st.just(1100)))
def test_silu_mul(device: str, dtype: torch.dtype, tolerance: float, rows: int, half: int) -> None:
    from peagle.kernels.norm import rms_norm as kernels

    torch.manual_seed(rows * 100 + half)
    given = [torch.randn(rows, 2 * half, device=device, dtype=dtype) * 2]
    compare(lambda y: (kernels.SiluMulFunction.apply(y),), lambda y: (silu_mul_torch(y),), given, tolerance)


@needs_triton
@on_device
@pytest.mark.parametrize("heads, kv_heads, width", [(4, 2, 16), (9, 3, 64), (1, 1, 32)])
def test_split_qkv_rope(
    device: str, dtype: torch.dtype, tolerance: float, heads: int, kv_heads: int, width: int
) -> None:
    from peagle.kernels.attention import rotary_triton as kernels

    torch.manual_seed(heads)
    half = torch.rand(11, 1, width // 2, device=device) * 6
    angles = torch.cat([half, half], -1)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    x = torch.randn(11, (heads + 2 * kv_heads) * width, device=device, dtype=dtype)

    def fast(x: Tensor) -> tuple[Tensor, ...]:
        # a copy, because a leaf must not be modified in place
        return kernels.split_qkv_rope_autograd(x * 1.0, heads, kv_heads, QKNormRope(cos, sin))

    def plain(x: Tensor) -> tuple[Tensor, ...]:
        return split_qkv_rope(x, heads, kv_heads, QKNormRope(cos.double(), sin.double()))

    compare(fast, plain, [x], tolerance)
