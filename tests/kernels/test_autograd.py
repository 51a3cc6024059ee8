"""The ways back of norm, gate and rotation against autograd through their plain twins, interpreted and natively.

Triton decides at import whether kernels are interpreted, so the interpreted tests run in a child pytest over this file.
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

from peagle.kernels.attention.rotary import split_qkv_rope_torch
from peagle.kernels.norm.rms_norm_torch import rms_norm_torch, silu_mul_torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    patch_interpreter()
EPS = 0.1  # large enough that leaving it out shows

on_a_device = pytest.mark.parametrize(
    "device, dtype, tolerance",
    [("cpu", torch.float32, 1e-5)]
    if INTERPRETED
    else [pytest.param("cuda", torch.bfloat16, 2e-2, marks=pytest.mark.gpu)],
)


@pytest.mark.skipif(INTERPRETED, reason="this is the child")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is made for Linux only")
def test_interpreted() -> None:
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
    """Results, and the gradients of a random question about them, in fp64 for the plain one."""
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


needs_triton = pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="runs in the child")


@needs_triton
@on_a_device
@many(25)
@given(rows=st.integers(1, 70), width=st.integers(1, 70), strided=st.booleans())
def test_norm(device: str, dtype: torch.dtype, tolerance: float, rows: int, width: int, strided: bool) -> None:
    from peagle.kernels import autograd as trained

    torch.manual_seed(rows * 100 + width)
    x = torch.randn(rows, 2 * width, device=device, dtype=dtype)[:, :width]
    given = [x if strided else x.contiguous(), torch.randn(width, device=device, dtype=dtype)]
    compare(
        lambda x, w: (trained.rms_norm_autograd(x, w, EPS),),
        lambda x, w: (rms_norm_torch(x, w, EPS),),
        given,
        tolerance,
    )


@needs_triton
@on_a_device
def test_norm_of_many_rows(device: str, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows than programs, so that each has several, the last fewer."""
    from peagle.kernels import autograd as trained

    monkeypatch.setattr(trained, "_MAX_NORM_PROGRAMS", 4)
    given = [torch.randn(27, 40, device=device, dtype=dtype), torch.randn(40, device=device, dtype=dtype)]
    compare(
        lambda x, w: (trained.rms_norm_autograd(x, w, EPS),),
        lambda x, w: (rms_norm_torch(x, w, EPS),),
        given,
        tolerance,
    )


@needs_triton
@on_a_device
@many(15)
@given(rows=st.integers(1, 20), half=st.one_of(st.integers(1, 50), st.just(1100)))
def test_gate(device: str, dtype: torch.dtype, tolerance: float, rows: int, half: int) -> None:
    from peagle.kernels import autograd as trained

    torch.manual_seed(rows * 100 + half)
    given = [torch.randn(rows, 2 * half, device=device, dtype=dtype) * 2]
    compare(lambda y: (trained.silu_mul_autograd(y),), lambda y: (silu_mul_torch(y),), given, tolerance)


@needs_triton
@on_a_device
@pytest.mark.parametrize("heads, kv_heads, width", [(4, 2, 16), (9, 3, 64), (1, 1, 32)])
def test_rotation(device: str, dtype: torch.dtype, tolerance: float, heads: int, kv_heads: int, width: int) -> None:
    from peagle.kernels import autograd as trained

    torch.manual_seed(heads)
    half = torch.rand(11, 1, width // 2, device=device) * 6
    angles = torch.cat([half, half], -1)
    cos, sin = angles.cos(), angles.sin()
    x = torch.randn(11, (heads + 2 * kv_heads) * width, device=device, dtype=dtype)

    def fast(x: Tensor) -> tuple[Tensor, ...]:
        # a copy, as the product would be; a leaf may not be turned in place
        return trained.split_qkv_rope_autograd(x * 1.0, cos.to(dtype), sin.to(dtype), heads, kv_heads)

    def plain(x: Tensor) -> tuple[Tensor, ...]:
        return split_qkv_rope_torch(x, cos.to(dtype).double(), sin.to(dtype).double(), heads, kv_heads)

    compare(fast, plain, [x], tolerance)
