"""COD sampling: the worked example, and the rules against a slow implementation."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from packed import packed_batch
from support import many

from peagle.data.batches import PackedBatch
from peagle.training.cod_sampling import CodPositions, all_cod_positions, sample_cod_positions, sampling_generator


def test_worked_example() -> None:
    batch = packed_batch([[0, 0, 0, 1, 1, 1, 1, 1]])
    for seed in range(200):
        rows = sample_cod_positions(batch, 3, 0.5, torch.Generator().manual_seed(seed))
        assert rows.anchor_A.tolist() == [1, 2, 3, 4, 5]
        assert rows.counts[:2] == (5, 2) and rows.counts[2] <= 1
        if list(zip(rows.anchor_R.tolist(), rows.depth_R.tolist(), strict=True)) == [(1, 1), (1, 2), (4, 1)]:
            assert rows.chain_start_R.tolist() == [0, 0, 2]
            return
    pytest.fail("the draw of the example never came")


documents = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=30), min_size=1, max_size=5)


def is_valid_position(batch: PackedBatch, anchor: int, depth: int) -> bool:
    """True if all labels of the chain up to (anchor, depth) are response tokens of the same document."""
    end = int(batch.end_N[anchor])
    return all(anchor + d + 2 < end and bool(batch.loss_mask_N[anchor + d + 2]) for d in range(depth + 1))


def chains(rows: CodPositions) -> dict[int, int]:
    """Anchor -> depth of its last position; checks that the depths of each chain are 1, 2, 3, .."""
    deepest = dict.fromkeys(rows.anchor_A.tolist(), 0)
    before = (-1, 0)
    triples = zip(rows.anchor_R.tolist(), rows.depth_R.tolist(), rows.chain_start_R.tolist(), strict=True)
    for i, (anchor, depth, first) in enumerate(triples):
        assert depth == (before[1] + 1 if anchor == before[0] else 1) and anchor >= before[0]
        assert first == i - depth + 1
        deepest[anchor] = depth
        before = (anchor, depth)
    return deepest


@many(150)
@given(documents, st.integers(1, 6), st.sampled_from([0.3, 0.8, 1.0]), st.integers(0, 9))
def test_rules(masks: list[list[int]], depths: int, rate: float, seed: int) -> None:
    batch = packed_batch(masks)
    size = len(batch.token_ids_N)
    rows = sample_cod_positions(batch, depths, rate, sampling_generator(seed, 3))
    deepest = chains(rows)
    assert list(deepest) == [a for a in range(size) if is_valid_position(batch, a, 0)]  # all of depth 0
    for anchor, depth in deepest.items():  # so all labels are inside their document and a response
        assert depth < depths and is_valid_position(batch, anchor, depth)
    kept_before = len(deepest)
    for depth in range(1, depths):  # and as many go on as should, or as can
        able = sum(is_valid_position(batch, a, depth) for a in range(size))
        going = sum(d >= depth for d in deepest.values())
        candidates = sum(is_valid_position(batch, a, depth) for a, d in deepest.items() if d >= depth - 1)
        assert going == rows.counts[depth] == min(candidates, round(able * rate**depth))
        assert going <= kept_before
        kept_before = going
    again = sample_cod_positions(batch, depths, rate, sampling_generator(seed, 3))
    assert all(torch.equal(getattr(rows, n), getattr(again, n)) for n in ("anchor_A", "anchor_R", "depth_R"))


def test_no_anchor_is_preferred() -> None:
    """Over many draws every anchor that can have a depth is kept at that depth's ratio."""
    batch = packed_batch([[1] * 40])
    reached = torch.zeros(3, 40)
    draws = 600
    for step in range(draws):
        rows = sample_cod_positions(batch, 3, 0.5, sampling_generator(0, step))
        for depth in (1, 2):
            reached[depth, rows.anchor_R[rows.depth_R == depth]] += 1
    for depth, able in ((1, 37), (2, 36)):
        share = reached[depth, :able] / draws
        wanted = round(able * 0.5**depth) / able
        assert (share - wanted).abs().max() < 5 * (wanted * (1 - wanted) / draws) ** 0.5


@many(80)
@given(documents, st.integers(1, 5), st.integers(1, 40))
def test_chunks_are_whole_chains(masks: list[list[int]], depths: int, limit: int) -> None:
    rows = all_cod_positions(packed_batch(masks), depths)
    covered = 0
    for chunk in rows.chunk_slices(limit):
        assert chunk.start == covered and chunk.stop > chunk.start
        assert rows.depth_R[chunk.start] == 1
        whole = int((rows.depth_R[chunk] == 1).sum())
        assert chunk.stop - chunk.start <= limit or whole == 1
        covered = chunk.stop
    assert covered == len(rows.anchor_R)
