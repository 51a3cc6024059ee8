"""The roofline model: its lower bounds, its growth, tensor parallelism, attended keys, and measured decode steps."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import many

from peagle.config import ChunkedAttention, Window
from peagle.kernels.attention.dense import first_visible_position
from peagle.planning.roofline import (
    EMBEDDED,
    ENGINES,
    GPUS,
    EngineSpec,
    ForwardBatch,
    Replica,
    decode_step_seconds,
    prefill_seconds,
)
from peagle.planning.shapes import KNOWN_MODELS, count_attention_weights, load_drafter_shape, load_target_shape

H200 = GPUS["h200"]
LLAMA_8B = load_target_shape("llama-3.1-8b")
IDEAL = EngineSpec("ideal", 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0)  # full bandwidth and FLOP/s, no overheads

# (batch size, K, context length, measured ms) of the 8B shape in the embedded engine on one H200
MEASURED_STEPS = [
    (1, 1, 512, 4.850),
    (1, 3, 512, 4.900),
    (1, 7, 512, 4.969),
    (8, 1, 512, 5.203),
    (8, 3, 512, 5.633),
    (8, 7, 512, 6.088),
    (64, 1, 512, 7.759),
    (64, 3, 512, 10.647),
    (64, 7, 512, 18.268),
    (1, 7, 16384, 5.963),
]


@pytest.mark.parametrize(("batch_size", "k", "context_len", "measured_ms"), MEASURED_STEPS)
def test_decode_steps_are_within_15_percent_of_measurements(
    batch_size: int, k: int, context_len: int, measured_ms: float
) -> None:
    drafter = load_drafter_shape("p-eagle", LLAMA_8B)
    seconds = decode_step_seconds(Replica(H200, EMBEDDED), LLAMA_8B, drafter, k, batch_size, context_len)
    assert seconds * 1e3 == pytest.approx(measured_ms, rel=0.15)


def replicas() -> st.SearchStrategy[Replica]:
    return st.builds(Replica, st.sampled_from(list(GPUS.values())), st.sampled_from(list(ENGINES.values())), st.just(1))


@many(60)
@given(replicas(), st.sampled_from(sorted(KNOWN_MODELS)), st.integers(0, 8), st.integers(1, 200), st.integers(1, 20000))
def test_a_step_exceeds_its_bounds_and_grows(
    replica: Replica, name: str, k: int, num_requests: int, context_len: int
) -> None:
    shape = load_target_shape(name)
    drafter = load_drafter_shape("p-eagle", shape) if k else None
    seconds = decode_step_seconds(replica, shape, drafter, k, num_requests, context_len)
    gpu, num_rows = replica.gpu, num_requests * (k + 1)
    num_attention_weights = sum(map(count_attention_weights, shape.layers))
    weight_bytes = num_attention_weights * shape.bytes_per_weight
    weight_bytes += shape.num_lm_head_weights * shape.bytes_per_vocab_weight
    assert seconds > weight_bytes / gpu.memory_bandwidth
    assert seconds > 2 * num_rows * (num_attention_weights + shape.num_lm_head_weights) / gpu.matrix_flops
    assert seconds > num_requests * shape.kv_cache_bytes(context_len) / gpu.memory_bandwidth
    assert decode_step_seconds(replica, shape, drafter, k, num_requests + 1, context_len) >= seconds
    assert decode_step_seconds(replica, shape, drafter, k, num_requests, context_len * 2) >= seconds
    some_drafter = load_drafter_shape("p-eagle", shape)
    assert decode_step_seconds(replica, shape, some_drafter, k + 1, num_requests, context_len) >= seconds
    faster = replace(gpu, memory_bandwidth=2 * gpu.memory_bandwidth, matrix_flops=2 * gpu.matrix_flops)
    assert decode_step_seconds(replace(replica, gpu=faster), shape, drafter, k, num_requests, context_len) <= seconds
    batched = prefill_seconds(replica, shape, drafter, context_len, num_requests)
    assert batched <= prefill_seconds(replica, shape, drafter, context_len)


def test_tensor_parallelism_divides_the_work_and_adds_collectives() -> None:
    one = decode_step_seconds(Replica(H200, IDEAL), LLAMA_8B, None, 0, 4, 1000)
    four = decode_step_seconds(Replica(H200, IDEAL, 4), LLAMA_8B, None, 0, 4, 1000)
    all_reduce = H200.link_latency_s + 2 * 3 / 4 * 4 * 4096 * 2 / H200.link_bandwidth
    all_gather = H200.link_latency_s + 3 / 4 * 4 * 128256 * 2 / H200.link_bandwidth
    assert four == pytest.approx(one / 4 + 32 * 2 * all_reduce + all_gather)
    free_link = replace(H200, link_bandwidth=math.inf, link_latency_s=0.0)
    assert decode_step_seconds(Replica(free_link, IDEAL, 4), LLAMA_8B, None, 0, 4, 1000) == pytest.approx(one / 4)


def windows() -> st.SearchStrategy[Window]:
    sizes = st.integers(1, 20)
    return st.one_of(st.none(), sizes, st.builds(ChunkedAttention, sizes))


@many(200)
@given(windows(), st.integers(0, 70), st.integers(1, 70))
def test_rows_attend_to_the_keys_of_their_window(window: Window, first: int, span: int) -> None:
    """The model counts a row's own key half or not at all."""
    exact = [row - max(first_visible_position(row, window), 0) + 1 for row in range(first, first + span)]
    mean = ForwardBatch(1, 1, first + span / 2, span).mean_keys_per_row(window)
    assert mean <= sum(exact) / span + 1e-9 <= mean + 0.5 + 2e-9
