"""The paged KV cache tensors, and attention of a model's layers over them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.config import DecoderConfig, Window
from peagle.engine.block_pool import BLOCK_SIZE
from peagle.kernels.attention.paged import PagedAttentionMetadata, SingleSequenceAttention, paged_attention
from peagle.kernels.attention.rotary import QKNormRope
from peagle.kernels.triton_utils import supports_pdl


@dataclass
class KVCache:
    """Keys and values of every layer: [layers, blocks, block size, kv heads, head dim].
    Where layers differ in their heads, a list of [blocks, block size, kv heads, head dim]."""

    keys: Tensor | list[Tensor]
    values: Tensor | list[Tensor]

    @classmethod
    def allocate(cls, num_layers: int, num_blocks: int, num_kv_heads: int, head_dim: int, like: Tensor) -> KVCache:
        """A zeroed cache of the dtype and device of `like`."""
        shape = (num_layers, num_blocks, BLOCK_SIZE, num_kv_heads, head_dim)
        return cls(*(torch.zeros(shape, dtype=like.dtype, device=like.device) for _ in range(2)))

    @classmethod
    def allocate_for_target(cls, cfg: DecoderConfig, num_blocks: int, like: Tensor) -> KVCache:
        heads = [(layer.num_kv_heads, layer.head_dim) for layer in map(cfg.layer_at, range(cfg.num_layers))]
        if len(set(heads)) == 1:
            return cls.allocate(cfg.num_layers, num_blocks, *heads[0], like)
        each = [cls.allocate(1, num_blocks, *shape, like) for shape in heads]
        return cls([one.keys[0] for one in each], [one.values[0] for one in each])

    @property
    def num_blocks(self) -> int:
        return len(self.keys[0])

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for both in (self.keys, self.values) for tensor in both)


class PagedAttention:
    """The `attend` callable of a model's forward pass: attention over the cache for the rows of one step."""

    def __init__(
        self, cache: KVCache, metadata: PagedAttentionMetadata, attend: Callable[..., Tensor] = paged_attention
    ) -> None:
        self.cache, self.metadata, self.attend = cache, metadata, attend
        self.rotates = attend is paged_attention and cache.keys[0].is_cuda  # the kernel applies RoPE
        self.one: SingleSequenceAttention | None = None  # fast path: few rows of one sequence on the CPU
        if isinstance(cache.keys, Tensor) and isinstance(cache.values, Tensor):
            self.one = SingleSequenceAttention.try_create(cache.keys, cache.values, metadata)

    def __call__(
        self,
        layer: int,
        q_THd: Tensor,
        k_TGd: Tensor,
        v_TGd: Tensor,
        window: Window,
        rope: QKNormRope | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        if self.one is not None and window is None and sinks is None:
            return self.one(layer, q_THd, k_TGd, v_TGd)
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        more = {"rope": rope} if rope is not None else {}
        pdl = supports_pdl(q_THd.device)
        return self.attend(q_THd, k_TGd, v_TGd, keys, values, self.metadata, window, pdl=pdl, sinks=sinks, **more)


def max_context_len(max_seq_len: int | None, num_rows: int) -> int | None:
    """Upper bound of the cached positions before a pass over `num_rows` rows, if sequences have at most `max_seq_len`
    positions after it. None: no bound is known."""
    return None if max_seq_len is None else max_seq_len - num_rows
