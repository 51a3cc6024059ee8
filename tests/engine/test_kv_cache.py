"""BlockPool against a naive model that keeps whole token prefixes instead of hashes; attention of joined parts."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
from engine_integrity import check_pool
from hypothesis import given
from hypothesis import strategies as st
from support import many
from torch import Tensor

from peagle.config import LayerConfig
from peagle.engine.kv_cache import PADDING_BLOCK, BlockPool, KVCache, PagedAttention, decode_attention, join_attention
from peagle.kernels.attention.paged import prefill_attention
from peagle.kernels.attention.types import PagedAttentionMetadata, QKNormRope

SIZE = 2


@dataclass
class Sequence:
    """A sequence with blocks for all its tokens; the first `len(hashes)` are in the prefix cache."""

    tokens: list[int]
    blocks: list[int]
    hashes: list[bytes] = field(default_factory=list)


class NaiveModel:
    """The token prefix that each cached block depends on."""

    def __init__(self, lookahead: int) -> None:
        self.lookahead = lookahead
        self.content: dict[int, tuple[int, ...]] = {}

    def prefix(self, tokens: list[int], index: int) -> tuple[int, ...]:
        return tuple(tokens[: (index + 1) * SIZE + self.lookahead])


@many(150)
@given(st.integers(0, 2**32), st.integers(0, 1), st.integers(2, 12), st.booleans())
def test_random_use(seed: int, lookahead: int, num_blocks: int, prefix_caching: bool) -> None:
    rng = random.Random(seed)
    pool, naive = BlockPool(num_blocks, SIZE, prefix_caching, lookahead), NaiveModel(lookahead)
    sequences: list[Sequence] = []
    any_hit = False
    for _ in range(60):
        action = rng.random()
        if action < 0.5:
            tokens = [rng.randrange(2) for _ in range(rng.randint(1, 9))]
            blocks, hashes = pool.find_cached_blocks(tokens)
            any_hit |= bool(blocks)
            assert len(blocks) * SIZE + max(lookahead, 1) <= len(tokens), "one token must stay uncached"
            for index, block in enumerate(blocks):
                assert naive.content[block] == naive.prefix(tokens, index), "found the block of another prefix"
            before, missing = pool.num_free_blocks, -(-len(tokens) // SIZE) - len(blocks)
            new = pool.allocate(missing)
            assert (new is None) == (missing > before)
            if new is None:
                pool.release(blocks)
            else:
                assert pool.num_free_blocks == before - missing and PADDING_BLOCK not in new
                for block in new:
                    naive.content.pop(block, None)
                sequences.append(Sequence(tokens, blocks + new, hashes))
        elif action < 0.75 and sequences:
            sequence = rng.choice(sequences)
            full = min(len(sequence.tokens) // SIZE, (len(sequence.tokens) - lookahead) // SIZE)
            for index in range(len(sequence.hashes), max(full, 0)):
                block_hash = pool.hash_block(sequence.hashes[-1] if sequence.hashes else b"", sequence.tokens, index)
                sequence.hashes.append(block_hash)
                pool.cache_block(sequence.blocks[index], block_hash)
                naive.content.setdefault(sequence.blocks[index], naive.prefix(sequence.tokens, index))
        elif action < 0.97 and sequences:
            pool.release(reversed(sequences.pop(rng.randrange(len(sequences))).blocks))
        check_pool(pool, [s.blocks for s in sequences])
    assert prefix_caching or not any_hit
    for sequence in sequences:
        pool.release(sequence.blocks)
    check_pool(pool, [])
    assert pool.num_free_blocks == num_blocks - 1


def allocate_and_cache(pool: BlockPool, tokens: list[int]) -> list[int]:
    blocks = pool.allocate(-(-len(tokens) // pool.block_size))
    assert blocks is not None
    block_hash = b""
    for index in range((len(tokens) - pool.lookahead) // pool.block_size):
        block_hash = pool.hash_block(block_hash, tokens, index)
        pool.cache_block(blocks[index], block_hash)
    return blocks


def test_worked_example() -> None:
    """With a drafter a block is found only if the token after it is the same too."""
    pool = BlockPool(9, SIZE, lookahead=1)
    a, b, c, d, e = range(5)
    blocks = allocate_and_cache(pool, [a, b, c, d, e])
    pool.release(blocks)
    assert pool.find_cached_blocks([a, b, c, d, e])[0] == blocks[:2]
    assert pool.find_cached_blocks([a, b, c, d, a])[0] == blocks[:1]
    assert pool.find_cached_blocks([a, b, d])[0] == []
    assert pool.find_cached_blocks([a, b, c])[0] == blocks[:1]
    assert pool.find_cached_blocks([a, b])[0] == []
    without_drafter = BlockPool(9, SIZE, lookahead=0)
    blocks = allocate_and_cache(without_drafter, [a, b, c, d])
    assert without_drafter.find_cached_blocks([a, b, c, d, a])[0] == blocks
    assert without_drafter.find_cached_blocks([a, b, c, d])[0] == blocks[:1], "one token must stay uncached"
    assert without_drafter.find_cached_blocks([a, b, d])[0] == blocks[:1]


def test_least_recently_used_block_is_evicted_first() -> None:
    pool = BlockPool(5, SIZE, lookahead=0)
    first, second = allocate_and_cache(pool, [1, 1]), allocate_and_cache(pool, [2, 2])
    pool.release(first)
    pool.release(second)
    pool.release(pool.find_cached_blocks([1, 1, 0])[0])  # now the other one is least recently used
    assert pool.allocate(3) is not None
    assert pool.find_cached_blocks([1, 1, 0])[0] == first and pool.find_cached_blocks([2, 2, 0])[0] == []


def test_equal_blocks_keep_the_first_hash() -> None:
    pool = BlockPool(9, SIZE, lookahead=0)
    first, again = allocate_and_cache(pool, [1, 2]), allocate_and_cache(pool, [1, 2])
    assert pool.find_cached_blocks([1, 2, 3])[0] == first
    pool.release(first + again)
    check_pool(pool, [first])


@pytest.mark.parametrize("broken", ["leak", "double", "lost"])
def test_integrity_check_detects_errors(broken: str) -> None:
    pool = BlockPool(5, SIZE)
    blocks = pool.allocate(2)
    assert blocks is not None
    if broken == "leak":
        users: list[list[int]] = []
    elif broken == "double":
        users = [blocks, blocks]
    else:
        pool._uncached.pop()
        users = [blocks]
    with pytest.raises(AssertionError):
        check_pool(pool, users)


def test_double_release_is_detected() -> None:
    pool = BlockPool(5, SIZE)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(blocks)


def test_a_salt_separates_cached_prefixes() -> None:
    """Blocks are found only with the salt that they were hashed with, also behind the first block."""
    tokens = [1, 2, 3, 4, 5]
    pool = BlockPool(9, 2, lookahead=0)
    blocks_by_salt = {}
    for salt in (None, "a", "b", ""):
        assert pool.find_cached_blocks(tokens, salt)[0] == []
        blocks_by_salt[salt] = blocks = pool.allocate(2)
        assert blocks is not None
        block_hash = pool.hash_salt(salt)
        for index, block in enumerate(blocks):
            block_hash = pool.hash_block(block_hash, tokens, index)
            pool.cache_block(block, block_hash)
    for salt, blocks in blocks_by_salt.items():
        assert pool.find_cached_blocks(tokens, salt)[0] == blocks


@pytest.mark.parametrize("width", [16, 24])  # the Triton kernels take powers of two only
def test_joined_attention_equals_its_parts(width: int) -> None:
    """Two decode requests and a prompt of three tokens, with the keys rotated by the attention kernel of the former."""
    generator = torch.Generator().manual_seed(width)
    heads, kv_heads, cached, rows = 4, 2, 5, 2
    layer = LayerConfig(64, 64, heads, kv_heads, width, 1e-5)
    qkv_TX = torch.randn(2 * rows + 3, (heads + 2 * kv_heads) * width, generator=generator)
    angles = torch.randn(len(qkv_TX), 1, width // 2, generator=generator).repeat(1, 1, 2)
    rope = QKNormRope(angles.cos(), angles.sin())
    start = KVCache.allocate([layer], 8, qkv_TX)
    for tensor in (start.keys[0], start.values[0]):
        tensor.normal_(generator=generator)

    def attend(parts: list[slice], rotates: bool) -> Tensor:
        cache = KVCache(start.keys.clone(), start.values.clone())  # type: ignore[union-attr]
        lengths = torch.tensor([cached] * 2, dtype=torch.int32), torch.tensor([rows] * 2, dtype=torch.int32)
        decode = decode_attention(cache, torch.tensor([[1, 2], [3, 4]], dtype=torch.int32), *lengths, rows, None)
        prompt = torch.tensor([0], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
        start_loc = torch.tensor([0, 3], dtype=torch.int32)
        metadata = PagedAttentionMetadata(torch.tensor([[5, 6]], dtype=torch.int32), *prompt, 3, start_loc)
        prefill = PagedAttention(cache, metadata, prefill_attention)
        decode.rotates = rotates
        calls = [join_attention([decode, prefill], [2 * rows, 3])] if len(parts) == 1 else [decode, prefill]
        outputs = []
        for call, own in zip(calls, parts, strict=True):
            q, k, v = qkv_TX[own].unflatten(1, (-1, width)).split([heads, kv_heads, kv_heads], 1)
            if call.rotates:
                outputs.append(call(0, q, k, v, None, rope.select_rows(own)))
            else:
                outputs.append(call(0, *rope.select_rows(own).apply(q, k), v, None))
        return torch.cat(outputs)

    alone = attend([slice(0, 2 * rows), slice(2 * rows, None)], rotates=False)
    for rotates in (False, True):
        torch.testing.assert_close(attend([slice(0, None)], rotates), alone)
