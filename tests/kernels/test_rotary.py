"""QK norm and rotary embedding against complex arithmetic, and the Triton kernel against the torch version."""

from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor
from triton_interpreter import patch_interpreter, run_in_interpreter

from peagle.kernels.attention.rotary import split_qkv_rope
from peagle.kernels.attention.types import QKNormRope


def build_rope_inputs(
    width: int, heads: int, kv_heads: int, rows: int, norm: bool, dtype: torch.dtype
) -> tuple[Tensor, QKNormRope]:
    gen = torch.Generator().manual_seed(width + rows)
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * width, generator=gen).to(dtype)
    angles = torch.randint(0, 5000, (rows, 1), generator=gen).float() * 10.0 ** -torch.linspace(0, 4, width // 2)
    angles = torch.cat([angles, angles], -1)[:, None, :]
    weights = [torch.randn(width, generator=gen).to(dtype) if norm else None for _ in range(2)]
    return qkv, QKNormRope(angles.cos().to(dtype), angles.sin().to(dtype), *weights, 1e-6)


def check_triton_rope(
    width: int, heads: int, kv_heads: int, rows: int, norm: bool, dtype: torch.dtype, device: str
) -> None:
    from peagle.kernels.attention.rotary_triton import split_qkv_rope_triton

    qkv, rope = build_rope_inputs(width, heads, kv_heads, rows, norm, dtype)
    want = split_qkv_rope(qkv, heads, kv_heads, rope)
    there = {f.name: value.to(device) for f in fields(rope) if isinstance(value := getattr(rope, f.name), Tensor)}
    have = split_qkv_rope_triton(qkv.clone().to(device), heads, kv_heads, replace(rope, **there))
    for a, b in zip(have, want, strict=True):
        # Without a norm there is no sum whose order could differ, so results are equal.
        step = 2.0**-7 if dtype == torch.bfloat16 else 1e-6
        torch.testing.assert_close(a.cpu(), b, rtol=step if norm else 0, atol=step if norm else 0)


@pytest.mark.parametrize("norm", [False, True])
def test_split_qkv_rope_rotates_pairs(norm: bool) -> None:
    """Entries i and i + d/2 of a head form a complex number that is rotated by the angle."""
    heads, kv_heads, width = 6, 2, 16
    qkv, rope = build_rope_inputs(width, heads, kv_heads, 5, norm, torch.float64)
    parts = qkv.clone().view(5, -1, width).split([heads, kv_heads, kv_heads], 1)
    have = split_qkv_rope(qkv, heads, kv_heads, rope)
    turn = torch.complex(rope.cos, rope.sin)[..., : width // 2]
    for x, rotated, weight in zip(parts[:2], have[:2], (rope.q_norm, rope.k_norm), strict=True):
        if weight is not None:
            x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
        want = torch.complex(*x.chunk(2, -1)) * turn
        torch.testing.assert_close(rotated, torch.cat([want.real, want.imag], -1))
    assert torch.equal(have[2], parts[2])


# head width, query heads, key/value heads, rows, norm
ROPE_SHAPES = [(128, 32, 8, 1, False), (64, 9, 3, 5, False), (32, 4, 4, 3, True), (128, 16, 8, 2, True)]


def test_triton_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


def check_in_the_interpreter() -> None:
    patch_interpreter()
    for shape in ROPE_SHAPES:
        check_triton_rope(*shape, torch.float32, "cpu")
    print("kernels checked")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", ROPE_SHAPES)
def test_triton_on_the_gpu(shape: tuple[int, int, int, int, bool], dtype: torch.dtype) -> None:
    check_triton_rope(*shape, dtype, "cuda")


if __name__ == "__main__":
    check_in_the_interpreter()
