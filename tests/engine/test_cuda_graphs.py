"""Which graphs are captured, and which graph a step gets. Capture and replay are tested on a GPU (test_llm_gpu.py)."""

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import many

from benchmarks.random_weights import random_weights
from peagle.config import DecoderConfig, LayerConfig, RopeConfig
from peagle.engine.cuda_graphs import (
    PREFILL_ROWS,
    DecodeGraph,
    DecodeGraphs,
    MixedKind,
    decode_batch_sizes,
    find_short_seq_lens,
    mixed_graph_kinds,
    prefill_graph_sizes,
)
from peagle.engine.loader import check_capturable
from peagle.errors import UserError
from peagle.kernels.gemm.tile_configs import MAX_TILED_ROWS
from peagle.models.decoder import Decoder


@many(60)
@given(st.integers(1, 2048))
def test_batch_sizes_end_with_the_largest_and_pad_little(max_num_seqs: int) -> None:
    sizes = decode_batch_sizes(max_num_seqs)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == max_num_seqs
    for batch_size in range(1, max_num_seqs + 1):
        padded = min(s for s in sizes if s >= batch_size)
        assert padded <= max(2 * batch_size - 1, 8) if batch_size < 16 else padded <= 1.51 * batch_size + 8


def test_large_targets_capture_short_prefills_only() -> None:
    assert max(prefill_graph_sizes(8_000_000_000, 16384)) == 512
    assert prefill_graph_sizes(135_000_000, 16384) == list(PREFILL_ROWS)
    assert prefill_graph_sizes(135_000_000, 100) == [64]


def test_mixed_passes_are_captured_where_they_are_faster() -> None:
    auto, large = (0, 1, 2, 3, 5, 7, 9, 12), 8_000_000_000
    kinds = mixed_graph_kinds(large, 256, auto, 16384)
    by_size = {n: {kind.k for kind in kinds if kind.num_requests == n} for n in (16, 32, 48, 64, 128, 256)}
    assert by_size == {16: {3, 7}, 32: {3, 7}, 48: {1, 3}, 64: {1, 3}, 128: {0, 1}, 256: {0, 1}}
    assert {kind.num_prefill_rows for kind in kinds if kind.num_requests == 64} == {64, 128, 256}
    assert {kind.num_prefill_rows for kind in kinds if kind.num_requests == 256} == {64, 128, 256, 512}
    assert not any(384 < kind.num_requests * (kind.k + 1) + kind.num_prefill_rows < 512 for kind in kinds)
    small = mixed_graph_kinds(135_000_000, 256, auto, 16384)
    assert max(kind.num_requests * (kind.k + 1) + kind.num_prefill_rows for kind in small) <= MAX_TILED_ROWS
    assert MixedKind(64, 7, 64) in small
    assert {kind.k for kind in mixed_graph_kinds(large, 64, (7,), 100)} == {7}
    assert mixed_graph_kinds(large, 8, auto, 16384) == []
    assert {kind.num_requests for kind in mixed_graph_kinds(large, 40, auto, 16384)} == {16, 32, 40}


@pytest.mark.parametrize(
    ("head_dim", "supported"), [(16, True), (64, True), (128, True), (8, False), (80, False), (96, False)]
)
def test_unsupported_head_sizes_are_refused(head_dim: int, supported: bool) -> None:
    layer = LayerConfig(64, 128, num_heads=2, num_kv_heads=1, head_dim=head_dim)
    cfg = DecoderConfig("llama", 32, 1, layer, RopeConfig(), 64, False, (None,))
    with nullcontext() if supported else pytest.raises(UserError, match=f"head_dim {head_dim} .*cuda_graphs=False"):
        check_capturable(cfg, None)


@pytest.mark.parametrize(
    ("head_dim", "window", "dtype", "want"),
    [
        (64, None, torch.bfloat16, (256, 512)),
        (64, 100, torch.bfloat16, ()),
        (64, None, torch.float32, ()),
        (128, None, torch.bfloat16, ()),
    ],
)
def test_short_seq_lens_of_small_targets_without_windows(head_dim, window, dtype, want) -> None:
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    layer = LayerConfig(64, 128, num_heads=3, num_kv_heads=1, head_dim=head_dim)
    cfg = DecoderConfig("llama", 32, 2, layer, RopeConfig(), 64, False, (None, window))
    assert find_short_seq_lens(random_weights(Decoder, cfg, dtype, torch.device("cpu")), None, 1024) == want


@many(120)
@given(
    st.integers(1, 5),
    st.sampled_from([0, 3, 7]),
    st.one_of(st.integers(1, 600), st.integers(235, 260), st.integers(490, 515)),
)
def test_short_sequence_graphs_cover_all_positions_of_a_step(batch_size: int, k: int, num_tokens: int) -> None:
    graphs = DecodeGraphs.__new__(DecodeGraphs)  # without the parts that need a GPU
    empty = torch.zeros(0)
    by_length = {length: DecodeGraph(empty, empty, None) for length in (256, 512, None)}  # type: ignore[arg-type]
    graphs.batch_sizes, graphs.short_seq_lens = [1, 2, 4], (256, 512)
    kinds = [(1, 256), (1, 512), (2, 512), *((size, None) for size in (1, 2, 4))]
    graphs.captured = {(size, k, length): by_length[length] for size, length in kinds}
    found = graphs.find(batch_size, k, num_tokens)
    if batch_size > 4:
        assert found is None
        return
    last_position = num_tokens - 1 + max(2 * k - 1, k)  # newest token, k verified and k - 1 further draft positions
    lengths = {1: (256, 512), 2: (512,), 3: (), 4: ()}[batch_size]
    length = next(length for length, graph in by_length.items() if graph is found)
    assert length is None or (length in lengths and last_position < length), "the graph is too short"
    sufficient = [n for n in lengths if last_position + 3 <= n]
    assert not sufficient or (length is not None and length <= sufficient[0]), "a shorter graph would fit"
