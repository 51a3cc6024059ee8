"""Which blocks of the cache belong to whom, and which can be found again by the tokens they hold.

Knows nothing about tensors or models. One block id stands for the same place in every layer's cache, the
target's and the drafter's, so there is one allocator for both.

A block can be reused for another sequence that starts with the same tokens. The drafter's row at position p
also holds the token at p+1, so with a drafter a block's name covers one token more than the block does:

    block size 2, tokens a b c d e:  block 0 is named by (a b c), block 1 by (a b c) + (c d e)

Block 0 of the cache is nobody's: rows that only pad a batch write there.
"""

from __future__ import annotations

import heapq
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

BLOCK_SIZE = 16
PADDING_BLOCK = 0  # the block id

BlockHash = bytes


class BlockPool:
    def __init__(
        self, num_blocks: int, block_size: int = BLOCK_SIZE, prefix_caching: bool = True, lookahead: int = 1
    ) -> None:
        """`lookahead`: how many tokens past its own a block's content depends on (1 with a drafter)."""
        assert num_blocks > 1
        self.num_blocks, self.block_size = num_blocks, block_size
        self.prefix_caching, self.lookahead = prefix_caching, lookahead
        self.ref_counts = [0] * num_blocks
        self.ref_counts[PADDING_BLOCK] = 1
        self._blank = list(range(1, num_blocks))  # a heap: low ids first, so that sequences lie in one piece
        self._kept: OrderedDict[int, None] = OrderedDict()  # unused but named, oldest first
        self._hash_of_block: dict[int, BlockHash] = {}
        self._block_of_hash: dict[BlockHash, int] = {}
        self.num_hit_tokens = self.num_queried_tokens = 0  # in tokens, for the metrics

    @property
    def num_free_blocks(self) -> int:
        return len(self._blank) + len(self._kept)

    def allocate(self, count: int) -> list[int] | None:
        """New blocks for one user, or None if there are not enough; the longest unused names go first."""
        if count > self.num_free_blocks:
            return None
        blocks = []
        for _ in range(count):
            if self._blank:
                block = heapq.heappop(self._blank)
            else:
                block, _ = self._kept.popitem(last=False)
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
                    self._kept[block] = None
                else:
                    heapq.heappush(self._blank, block)

    def hash_block(self, before: BlockHash, tokens: Sequence[int], index: int) -> BlockHash:
        """The name of block `index` of a sequence, given its predecessor's (b"" for the first)."""
        begin = index * self.block_size
        covered = tokens[begin : begin + self.block_size + self.lookahead]
        return blake2b(array("q", covered).tobytes(), digest_size=16, key=before[:64]).digest()

    def find_cached_blocks(self, tokens: Sequence[int]) -> tuple[list[int], list[BlockHash]]:
        """The longest start of `tokens` that lies in the cache, taken for one more user; at least one token
        is left to read, since a pass over it has to say what comes next."""
        blocks: list[int] = []
        names: list[BlockHash] = []
        if not self.prefix_caching:
            return blocks, names
        most = (len(tokens) - max(self.lookahead, 1)) // self.block_size
        for index in range(most):
            name = self.hash_block(names[-1] if names else b"", tokens, index)
            block = self._block_of_hash.get(name)
            if block is None:
                break
            blocks.append(block)
            names.append(name)
        for block in blocks:
            if self.ref_counts[block] == 0:
                del self._kept[block]
            self.ref_counts[block] += 1
        return blocks, names

    def cache_block(self, block: int, name: BlockHash) -> None:
        """Makes a full block findable. Its content must be final; a name already taken stays where it is."""
        if self.prefix_caching and name not in self._block_of_hash and block not in self._hash_of_block:
            self._block_of_hash[name] = block
            self._hash_of_block[block] = name

    def reset_prefix_cache(self) -> None:
        """Drops every name: what lies in the cache is found by nobody from here on."""
        for block in self._kept:
            heapq.heappush(self._blank, block)
        self._kept.clear()
        self._hash_of_block.clear()
        self._block_of_hash.clear()

    def check_integrity(self, held: Iterable[Sequence[int]]) -> None:
        """Proves that every block is in exactly one state, and used by exactly those who say they hold it."""
        counts = [0] * self.num_blocks
        counts[PADDING_BLOCK] = 1
        for blocks in held:
            assert len(set(blocks)) == len(blocks), "a sequence holds a block twice"
            for block in blocks:
                counts[block] += 1
        wrong = [b for b in range(self.num_blocks) if counts[b] != self.ref_counts[b]]
        assert not wrong, f"blocks {wrong[:8]} are counted {[self.ref_counts[b] for b in wrong[:8]]} times, not held so"
        blank, kept = set(self._blank), set(self._kept)
        unused = {b for b in range(self.num_blocks) if counts[b] == 0}
        assert len(blank) == len(self._blank) and not blank & kept, "a block is free twice"
        assert blank | kept == unused, f"{len(unused)} blocks are unused, {len(blank | kept)} can be had"
        assert kept <= self._hash_of_block.keys() and not blank & self._hash_of_block.keys(), (
            "names of the unused are wrong"
        )
        assert {n: b for b, n in self._hash_of_block.items()} == self._block_of_hash, "names and blocks disagree"
