"""Checks that no KV cache block and no request slot of an engine is lost or used twice."""

from collections.abc import Iterable, Sequence

from peagle.engine.kv_cache import PADDING_BLOCK, BlockPool
from peagle.engine.scheduler import Scheduler


def check_pool(pool: BlockPool, blocks_of_users: Iterable[Sequence[int]]) -> None:
    """Asserts that every block is in exactly one state and has as many references as users."""
    counts = [0] * pool.num_blocks
    counts[PADDING_BLOCK] = 1
    for blocks in blocks_of_users:
        assert len(set(blocks)) == len(blocks), "a sequence holds a block twice"
        for block in blocks:
            counts[block] += 1
    wrong = [b for b in range(pool.num_blocks) if counts[b] != pool.ref_counts[b]]
    assert not wrong, f"blocks {wrong[:8]} have wrong reference counts {[pool.ref_counts[b] for b in wrong[:8]]}"
    uncached, evictable, hashed = set(pool._uncached), set(pool._evictable), pool._hash_of_block.keys()
    unused = {b for b in range(pool.num_blocks) if counts[b] == 0}
    assert len(uncached) == len(pool._uncached) and not uncached & evictable, "a block is free twice"
    assert uncached | evictable == unused, f"{len(unused)} unused blocks, {len(uncached | evictable)} free blocks"
    assert evictable <= hashed and not uncached & hashed, "a free block is in the wrong list"
    assert {h: b for b, h in pool._hash_of_block.items()} == pool._block_of_hash, "hashes and blocks disagree"


def check_scheduler(scheduler: Scheduler) -> None:
    check_pool(scheduler.pool, [r.block_ids for r in scheduler.running])
    slots = [r.slot for r in scheduler.running]
    assert sorted(slots + scheduler._free_slots) == list(range(scheduler.max_num_seqs)), "a slot is lost or used twice"
    assert all(not r.block_ids and r.slot < 0 for r in scheduler.waiting), "a waiting request holds blocks or a slot"
