"""Rotary embedding with a hand-written backward pass, for training with 16-bit tensors on a GPU.

Shapes: T rows, X width of all heads.
"""

# mypy: allow-untyped-calls

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from peagle.kernels.attention.rotary_triton import split_qkv_rope_triton
from peagle.kernels.attention.types import QKNormRope


class RopeFunction(torch.autograd.Function):
    """Rotates queries and keys of the fused QKV projection in place. The backward pass rotates the other way."""

    @staticmethod
    def forward(ctx: Any, qkv_TX: Tensor, heads: int, kv_heads: int, rope: QKNormRope) -> Tensor:
        ctx.save_for_backward(rope.cos, rope.sin)
        ctx.heads, ctx.kv_heads = heads, kv_heads
        ctx.mark_dirty(qkv_TX)
        split_qkv_rope_triton(qkv_TX, heads, kv_heads, rope)
        return qkv_TX

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dqkv_TX: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        dqkv_TX = dqkv_TX.clone(memory_format=torch.contiguous_format)  # autograd may share a gradient tensor
        split_qkv_rope_triton(dqkv_TX, ctx.heads, ctx.kv_heads, QKNormRope(cos, -sin))
        return dqkv_TX, None, None, None


def split_qkv_rope_autograd(
    qkv_TX: Tensor, heads: int, kv_heads: int, rope: QKNormRope
) -> tuple[Tensor, Tensor, Tensor]:
    """As `split_qkv_rope` without norms; returns views of `qkv_TX`, which must not be used again."""
    qkv = RopeFunction.apply(qkv_TX, heads, kv_heads, rope).unflatten(1, (heads + 2 * kv_heads, -1))
    return qkv.split([heads, kv_heads, kv_heads], 1)
