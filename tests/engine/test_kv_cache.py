"""The block pool against a naive one that keeps whole token sequences instead of names."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import many

from peagle.engine.kv_cache import PADDING_BLOCK, BlockPool

SIZE = 2


@dataclass
class Holder:
    """A sequence that has blocks for all its tokens; the first `named` are published."""

    tokens: list[int]
    blocks: list[int]
    names: list[bytes] = field(default_factory=list)


class Naive:
    """What lies in which block, said by whole prefixes: who reads a block back must find its own tokens."""

    def __init__(self, lookahead: int) -> None:
        self.lookahead = lookahead
        self.content: dict[int, tuple[int, ...]] = {}

    def prefix(self, tokens: list[int], index: int) -> tuple[int, ...]:
        return tuple(tokens[: (index + 1) * SIZE + self.lookahead])


@many(150)
@given(st.integers(0, 2**32), st.integers(0, 1), st.integers(2, 12), st.booleans())
def test_random_use(seed: int, lookahead: int, num_blocks: int, reuse: bool) -> None:
    choose = random.Random(seed)
    pool, naive = BlockPool(num_blocks, SIZE, reuse, lookahead), Naive(lookahead)
    holders: list[Holder] = []
    found_some = False
    for _ in range(60):
        action = choose.random()
        if action < 0.5:
            tokens = [choose.randrange(2) for _ in range(choose.randint(1, 9))]
            blocks, names = pool.find_cached_blocks(tokens)
            found_some |= bool(blocks)
            assert len(blocks) * SIZE + max(lookahead, 1) <= len(tokens), "nothing is left to read"
            for index, block in enumerate(blocks):
                assert naive.content[block] == naive.prefix(tokens, index), "another sequence's block was found"
            before, missing = pool.num_free_blocks, -(-len(tokens) // SIZE) - len(blocks)
            new = pool.allocate(missing)
            assert (new is None) == (missing > before)
            if new is None:
                pool.release(blocks)
            else:
                assert pool.num_free_blocks == before - missing and PADDING_BLOCK not in new
                for block in new:
                    naive.content.pop(block, None)
                holders.append(Holder(tokens, blocks + new, names))
        elif action < 0.75 and holders:
            holder = choose.choice(holders)
            full = min(len(holder.tokens) // SIZE, (len(holder.tokens) - lookahead) // SIZE)
            for index in range(len(holder.names), max(full, 0)):
                name = pool.hash_block(holder.names[-1] if holder.names else b"", holder.tokens, index)
                holder.names.append(name)
                pool.cache_block(holder.blocks[index], name)
                naive.content.setdefault(holder.blocks[index], naive.prefix(holder.tokens, index))
        elif action < 0.97 and holders:
            pool.release(reversed(holders.pop(choose.randrange(len(holders))).blocks))
        elif action > 0.99:
            pool.reset_prefix_cache()
            assert pool.find_cached_blocks([0, 1] * 5) == ([], [])
        pool.check_integrity([h.blocks for h in holders])
    assert reuse or not found_some
    for holder in holders:
        pool.release(holder.blocks)
    pool.reset_prefix_cache()
    pool.check_integrity([])
    assert pool.num_free_blocks == num_blocks - 1


def published(pool: BlockPool, tokens: list[int]) -> list[int]:
    blocks = pool.allocate(-(-len(tokens) // pool.block_size))
    assert blocks is not None
    name = b""
    for index in range((len(tokens) - pool.lookahead) // pool.block_size):
        name = pool.hash_block(name, tokens, index)
        pool.cache_block(blocks[index], name)
    return blocks


def test_the_worked_example() -> None:
    """With a drafter a block is found only if the token behind it is the same too."""
    pool = BlockPool(9, SIZE, lookahead=1)
    a, b, c, d, e = range(5)
    blocks = published(pool, [a, b, c, d, e])
    pool.release(blocks)
    assert pool.find_cached_blocks([a, b, c, d, e])[0] == blocks[:2]
    assert pool.find_cached_blocks([a, b, c, d, a])[0] == blocks[:1]
    assert pool.find_cached_blocks([a, b, d])[0] == []
    assert pool.find_cached_blocks([a, b, c])[0] == blocks[:1]
    assert pool.find_cached_blocks([a, b])[0] == []
    alone = BlockPool(9, SIZE, lookahead=0)
    blocks = published(alone, [a, b, c, d])
    assert alone.find_cached_blocks([a, b, c, d, a])[0] == blocks
    assert alone.find_cached_blocks([a, b, c, d])[0] == blocks[:1], "one token must be left to read"
    assert alone.find_cached_blocks([a, b, d])[0] == blocks[:1]


def test_what_was_used_last_stays_longest() -> None:
    pool = BlockPool(5, SIZE, lookahead=0)
    first, second = published(pool, [1, 1]), published(pool, [2, 2])
    pool.release(first)
    pool.release(second)
    pool.release(pool.find_cached_blocks([1, 1, 0])[0])  # used again, so the other one is older now
    assert pool.allocate(3) is not None
    assert pool.find_cached_blocks([1, 1, 0])[0] == first and pool.find_cached_blocks([2, 2, 0])[0] == []


def test_equal_blocks_keep_the_first_name() -> None:
    pool = BlockPool(9, SIZE, lookahead=0)
    first, again = published(pool, [1, 2]), published(pool, [1, 2])
    assert pool.find_cached_blocks([1, 2, 3])[0] == first
    pool.release(first + again)
    pool.check_integrity([first])


@pytest.mark.parametrize("broken", ["leak", "double", "lost"])
def test_the_integrity_check_can_fail(broken: str) -> None:
    pool = BlockPool(5, SIZE)
    blocks = pool.allocate(2)
    assert blocks is not None
    if broken == "leak":
        held: list[list[int]] = []
    elif broken == "double":
        held = [blocks, blocks]
    else:
        pool._blank.pop()
        held = [blocks]
    with pytest.raises(AssertionError):
        pool.check_integrity(held)


def test_released_twice_is_noticed() -> None:
    pool = BlockPool(5, SIZE)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(blocks)
