"""The KV cache: allocation and prefix caching of its blocks, its tensors, attention over them, and its size.

One block id stands for the same block in every layer of the target's and the drafter's KV cache, so one pool serves
both. A block can be reused by another sequence that starts with the same tokens. The drafter's KV entry at position p
depends on the token at p+1, so with a drafter the hash of a block covers one more token than the block (`lookahead`):

    block size 2, tokens a b c d e:  block 0 has the hash of (a b c), block 1 that of (a b c) + (c d e)

A cache salt keys the hash of the first block, and so of all blocks after it: sequences with different salts share
none.

Block 0 is the padding block: rows that pad a batch write there.
"""

import heapq
import os
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from itertools import accumulate
from typing import Self

import torch
from torch import Tensor

from peagle.config import DecoderConfig, DrafterConfig, EngineSettings, LayerConfig, Window
from peagle.errors import UserError
from peagle.kernels.attention.paged import SingleSequenceAttention, paged_attention
from peagle.kernels.attention.rotary import apply_rope
from peagle.kernels.attention.types import PagedAttentionInputs, PagedAttentionMetadata, QKNormRope
from peagle.kernels.fp8 import FP8_DTYPE

BLOCK_SIZE = 16
PADDING_BLOCK = 0
GIB = 1 << 30
GPU_RESERVED_BYTES = 3 * GIB  # activations and CUDA graphs
MAX_CPU_CACHE_BYTES = 4 * GIB

BlockHash = bytes


class BlockPool:
    def __init__(
        self, num_blocks: int, block_size: int = BLOCK_SIZE, prefix_caching: bool = True, lookahead: int = 1
    ) -> None:
        """`lookahead`: number of tokens past its own that the content of a block depends on (1 with a drafter)."""
        assert num_blocks > 1
        self.num_blocks, self.block_size = num_blocks, block_size
        self.prefix_caching, self.lookahead = prefix_caching, lookahead
        self.ref_counts = [0] * num_blocks
        self.ref_counts[PADDING_BLOCK] = 1
        self._uncached = list(range(1, num_blocks))  # free, without a hash; a heap, so sequences get adjacent blocks
        self._evictable: OrderedDict[int, None] = OrderedDict()  # free, with a hash, least recently used first
        self._hash_of_block: dict[int, BlockHash] = {}
        self._block_of_hash: dict[BlockHash, int] = {}
        self.num_hit_tokens = self.num_queried_tokens = 0  # prefix cache metrics

    @property
    def num_free_blocks(self) -> int:
        return len(self._uncached) + len(self._evictable)

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Allocates blocks for one user, evicting cached blocks if necessary. None if there are not enough."""
        if num_blocks > self.num_free_blocks:
            return None
        blocks = []
        for _ in range(num_blocks):
            if self._uncached:
                block = heapq.heappop(self._uncached)
            else:
                block, _ = self._evictable.popitem(last=False)
                del self._block_of_hash[self._hash_of_block.pop(block)]
            self.ref_counts[block] = 1
            blocks.append(block)
        return blocks

    def release(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.ref_counts[block] -= 1
            assert self.ref_counts[block] >= 0, f"block {block} released twice"
            if self.ref_counts[block] == 0:
                if block in self._hash_of_block:
                    self._evictable[block] = None
                else:
                    heapq.heappush(self._uncached, block)

    @staticmethod
    def hash_salt(salt: str | None) -> BlockHash:
        """The previous hash of the first block of a sequence."""
        return b"" if salt is None else blake2b(salt.encode(errors="surrogatepass"), digest_size=16).digest()

    def hash_block(self, previous: BlockHash, tokens: Sequence[int], index: int) -> BlockHash:
        """The hash of block `index` of a sequence, given the hash of the block before (for the first: `hash_salt`)."""
        begin = index * self.block_size
        covered = tokens[begin : begin + self.block_size + self.lookahead]
        return blake2b(array("q", covered).tobytes(), digest_size=16, key=previous[:64]).digest()

    def find_cached_blocks(self, tokens: Sequence[int], salt: str | None = None) -> tuple[list[int], list[BlockHash]]:
        """Finds the longest cached prefix of `tokens` and takes a reference to its blocks.

        At least one token stays uncached: its forward pass yields the logits of the next token.
        """
        blocks: list[int] = []
        hashes: list[BlockHash] = []
        previous = self.hash_salt(salt)
        if not self.prefix_caching:
            return blocks, hashes
        for index in range((len(tokens) - max(self.lookahead, 1)) // self.block_size):
            previous = self.hash_block(previous, tokens, index)
            block = self._block_of_hash.get(previous)
            if block is None:
                break
            blocks.append(block)
            hashes.append(previous)
        for block in blocks:
            if self.ref_counts[block] == 0:
                del self._evictable[block]
            self.ref_counts[block] += 1
        return blocks, hashes

    def cache_block(self, block: int, block_hash: BlockHash) -> None:
        """Makes a full block findable. Its content must be final; the first block with a hash keeps it."""
        if self.prefix_caching and block_hash not in self._block_of_hash and block not in self._hash_of_block:
            self._block_of_hash[block_hash] = block
            self._hash_of_block[block] = block_hash


@dataclass
class KVCache:
    """Keys and values of every layer: [layers, blocks, block size, kv heads, head dim].
    Where layers differ in their heads, a list of [blocks, block size, kv heads, head dim]."""

    keys: Tensor | list[Tensor]
    values: Tensor | list[Tensor]

    @classmethod
    def allocate(
        cls, layers: Sequence[LayerConfig], num_blocks: int, like: Tensor, dtype: torch.dtype | None = None
    ) -> Self:
        """A zeroed cache on the device of `like`, by default of its dtype."""
        heads = [(layer.num_kv_heads, layer.head_dim) for layer in layers]
        zeros = partial(torch.zeros, dtype=dtype or like.dtype, device=like.device)
        if len(set(heads)) == 1:
            return cls(*(zeros(len(heads), num_blocks, BLOCK_SIZE, *heads[0]) for _ in range(2)))
        return cls(*([zeros(num_blocks, BLOCK_SIZE, *shape) for shape in heads] for _ in range(2)))

    @property
    def num_blocks(self) -> int:
        return len(self.keys[0])

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for both in (self.keys, self.values) for tensor in both)


class PagedAttention:
    """The `attend` callable of a model's forward pass: attention over the cache for the rows of one step."""

    def __init__(
        self,
        cache: KVCache,
        metadata: PagedAttentionMetadata,
        attend: Callable[[PagedAttentionInputs], Tensor] = paged_attention,
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
        out: Tensor | None = None,
    ) -> Tensor:
        if self.one is not None and window is None and sinks is None:
            return self.one(layer, q_THd, k_TGd, v_TGd)
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        inputs = PagedAttentionInputs(q_THd, k_TGd, v_TGd, keys, values, self.metadata, window, sinks, rope, out)
        return self.attend(inputs)


class JoinedAttention:
    """The `attend` callable of a pass over several parts, each of which owns consecutive rows."""

    def __init__(self, parts: Sequence[PagedAttention], num_rows: Sequence[int]) -> None:
        ends = list(accumulate(num_rows))
        self.parts = [(part, slice(end - n, end)) for part, end, n in zip(parts, ends, num_rows, strict=True)]
        self.rotates = any(part.rotates for part in parts)

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
        out_THd = q_THd.new_empty(q_THd.shape)
        for part, rows in self.parts:
            own_rope, q, k = rope.select_rows(rows) if rope is not None else None, q_THd[rows], k_TGd[rows]
            if own_rope is not None and not part.rotates:
                q, k = apply_rope(q, k, own_rope)
                own_rope = None
            result = part(layer, q, k, v_TGd[rows], window, own_rope, sinks, out_THd[rows])
            if result.data_ptr() != out_THd[rows].data_ptr():
                out_THd[rows] = result
        return out_THd


def join_attention(parts: Sequence[PagedAttention], num_rows: Sequence[int]) -> PagedAttention | JoinedAttention:
    return parts[0] if len(parts) == 1 else JoinedAttention(parts, num_rows)


def decode_attention(
    cache: KVCache,
    block_tables_BM: Tensor,
    starts_B: Tensor,
    query_lens_B: Tensor,
    num_rows: int,
    max_seq_len: int | None,
) -> PagedAttention:
    """Attention of `num_rows` rows per sequence from position `starts_B`, of which `query_lens_B` are valid.
    `max_seq_len`: most positions of a sequence after the pass, if known."""
    max_computed = None if max_seq_len is None else max_seq_len - num_rows
    metadata = PagedAttentionMetadata(block_tables_BM, starts_B, query_lens_B, num_rows, None, max_computed)
    return PagedAttention(cache, metadata)


def resolve_kv_cache_dtype(name: str, device: torch.device) -> torch.dtype | None:
    """The dtype of --kv-cache-dtype; None is the dtype of the model."""
    if name == "auto":
        return None
    check_fp8_gpu(f"--kv-cache-dtype {name}", device)
    return FP8_DTYPE


def check_fp8_gpu(flag: str, device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise UserError(f"{flag}: needs a GPU of compute capability 8.9 or newer; omit the flag")


def block_bytes(cfg: DecoderConfig, draft: DrafterConfig | None, element_size: int) -> int:
    """Bytes of one block: keys and values of all layers of target and drafter."""
    layers = [*map(cfg.layer_at, range(cfg.num_layers)), *([draft.layer] * draft.num_layers if draft else [])]
    return 2 * BLOCK_SIZE * sum(layer.num_kv_heads * layer.head_dim for layer in layers) * element_size


def unpacking_bytes(cfg: DecoderConfig) -> int:
    """Bytes that passes over many rows need to unpack MXFP4 experts to bf16: the largest matrix of a layer, once in
    the memory of CUDA graphs and once outside."""
    experts = cfg.layer.experts
    if experts is None or not experts.mxfp4:
        return 0
    return 2 * experts.num_experts * 2 * experts.intermediate_size * cfg.layer.hidden_size * torch.bfloat16.itemsize


def count_blocks(
    settings: EngineSettings,
    device: torch.device,
    bytes_per_block: int,
    max_model_len: int,
    max_num_seqs: int,
    reserved_bytes: int = 0,
) -> int:
    """As many blocks as memory holds and `max_num_seqs` sequences can use; one is the padding block.
    Raises UserError if one sequence does not fit. `reserved_bytes`: GPU memory to leave free."""
    blocks_per_seq = -(-max_model_len // BLOCK_SIZE)
    flag = "--kv-cache-memory-bytes"
    if settings.kv_cache_memory_bytes is not None:
        memory = settings.kv_cache_memory_bytes
    elif device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        memory = int(total * settings.gpu_memory_utilization) - (total - free) - reserved_bytes - GPU_RESERVED_BYTES
        flag = "--gpu-memory-utilization"
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        memory = min(free // 4, MAX_CPU_CACHE_BYTES)
    num_blocks = min(memory // bytes_per_block, 1 + blocks_per_seq * max_num_seqs)
    if num_blocks < 1 + blocks_per_seq:
        needed = (1 + blocks_per_seq) * bytes_per_block
        raise UserError(
            f"not enough memory for the KV cache: one sequence of {max_model_len} tokens needs {needed / GIB:.2f} GiB, "
            f"{max(memory, 0) / GIB:.2f} GiB are available; "
            f"set --max-model-len to at most {max(num_blocks - 1, 0) * BLOCK_SIZE}, or raise {flag}"
        )
    return int(num_blocks)
