"""Allocation, reference counts and prefix caching of KV cache blocks.

One block id stands for the same block in every layer of the target's and the drafter's KV cache, so one pool serves
both. A block can be reused by another sequence that starts with the same tokens. The drafter's KV entry at position p
depends on the token at p+1, so with a drafter the hash of a block covers one more token than the block (`lookahead`):

    block size 2, tokens a b c d e:  block 0 has the hash of (a b c), block 1 that of (a b c) + (c d e)

Block 0 is the padding block: rows that pad a batch write there.
"""

from __future__ import annotations

import heapq
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

BLOCK_SIZE = 16
PADDING_BLOCK = 0

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

    def hash_block(self, previous: BlockHash, tokens: Sequence[int], index: int) -> BlockHash:
        """The hash of block `index` of a sequence, given the hash of the block before (b"" for the first)."""
        begin = index * self.block_size
        covered = tokens[begin : begin + self.block_size + self.lookahead]
        return blake2b(array("q", covered).tobytes(), digest_size=16, key=previous[:64]).digest()

    def find_cached_blocks(self, tokens: Sequence[int]) -> tuple[list[int], list[BlockHash]]:
        """Finds the longest cached prefix of `tokens` and takes a reference to its blocks.

        At least one token stays uncached: its forward pass yields the logits of the next token.
        """
        blocks: list[int] = []
        hashes: list[BlockHash] = []
        if not self.prefix_caching:
            return blocks, hashes
        for index in range((len(tokens) - max(self.lookahead, 1)) // self.block_size):
            block_hash = self.hash_block(hashes[-1] if hashes else b"", tokens, index)
            block = self._block_of_hash.get(block_hash)
            if block is None:
                break
            blocks.append(block)
            hashes.append(block_hash)
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

    def check_integrity(self, blocks_of_users: Iterable[Sequence[int]]) -> None:
        """Asserts that every block is in exactly one state and has as many references as users."""
        counts = [0] * self.num_blocks
        counts[PADDING_BLOCK] = 1
        for blocks in blocks_of_users:
            assert len(set(blocks)) == len(blocks), "a sequence holds a block twice"
            for block in blocks:
                counts[block] += 1
        wrong = [b for b in range(self.num_blocks) if counts[b] != self.ref_counts[b]]
        assert not wrong, f"blocks {wrong[:8]} have wrong reference counts {[self.ref_counts[b] for b in wrong[:8]]}"
        uncached, evictable, hashed = set(self._uncached), set(self._evictable), self._hash_of_block.keys()
        unused = {b for b in range(self.num_blocks) if counts[b] == 0}
        assert len(uncached) == len(self._uncached) and not uncached & evictable, "a block is free twice"
        assert uncached | evictable == unused, f"{len(unused)} unused blocks, {len(uncached | evictable)} free blocks"
        assert evictable <= hashed and not uncached & hashed, "a free block is in the wrong list"
        assert {h: b for b, h in self._hash_of_block.items()} == self._block_of_hash, "hashes and blocks disagree"
