"""Roofline model of decode steps and prefills: bytes over bandwidth, FLOPs over FLOP/s, plus constants per engine.

docs/planning.md has the formulas; tests/planning/test_plan.py compares them with measured decode steps. `gpus.json` has
data sheet figures of GPUs: memory, bandwidth, dense bf16 TFLOP/s without sparsity, one-way link bandwidth, and rough
on-demand prices of 2026.
"""

import json
import math
from collections import Counter
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from peagle.config import ChunkedAttention, Window
from peagle.errors import UserError
from peagle.planning.shapes import (
    DrafterShape,
    ModelShape,
    count_attention_weights,
    count_mlp_weights,
    expected_active_experts,
)

GB, TB, TFLOP = 1e9, 1e12, 1e12
LINK_LATENCY_S = {"nvlink": 8e-6, "pcie": 25e-6}  # of a small all-reduce inside a CUDA graph
OVERLAP_EXPONENT = 1.5  # 1 adds the bounds of an operation, infinity takes the larger one
MAX_BATCHED_TOKENS = 8192  # prompt tokens of one prefill pass
ACTIVATION_BYTES = 2.0  # per element that GPUs exchange


@dataclass(frozen=True)
class GpuSpec:
    name: str
    memory_bytes: float
    memory_bandwidth: float  # bytes/s
    matrix_flops: float  # dense bf16 FLOP/s
    link_bandwidth: float  # bytes/s to other GPUs of the node, one way
    link_latency_s: float  # of the smallest all-reduce
    price_per_hour: float | None  # dollars; None if unknown


def _build_gpu(
    name: str, memory_gb: float, bandwidth_tb_s: float, tflops: float, link_gb_s: float, link: str, price: float | None
) -> GpuSpec:
    latency_s = LINK_LATENCY_S[link]
    return GpuSpec(name, memory_gb * GB, bandwidth_tb_s * TB, tflops * TFLOP, link_gb_s * GB, latency_s, price)


DATA_SHEETS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("gpus.json").read_text(encoding="utf-8"))
GPUS = {name: _build_gpu(name, **figures) for name, figures in DATA_SHEETS.items()}
CUSTOM_GPU = {"link_gb_s": 64, "link": "pcie", "price": None}


def find_gpu(name: str) -> GpuSpec:
    key = name.strip().lower().replace("_", "-").replace(" ", "-").removeprefix("nvidia-").removeprefix("amd-")
    if key in GPUS:
        return GPUS[key]
    matches = get_close_matches(key, GPUS, n=1, cutoff=0.4)
    hint = f"did you mean {matches[0]}? " if matches else ""
    raise UserError(
        f"--gpu {name}: not a known GPU; {hint}known: {', '.join(GPUS)}; "
        "or describe it with --memory-bandwidth, --tflops and --gpu-memory"
    )


def describe_gpu(
    name: str | None,
    memory_bandwidth: float | None = None,  # TB/s
    tflops: float | None = None,
    gpu_memory: float | None = None,  # GB
    link_bandwidth: float | None = None,  # GB/s
    price: float | None = None,
) -> GpuSpec:
    """A known GPU with overrides, or, without a name, a GPU described by bandwidth, TFLOP/s and memory."""
    required = {"--memory-bandwidth": memory_bandwidth, "--tflops": tflops, "--gpu-memory": gpu_memory}
    missing = [flag for flag, value in required.items() if value is None]
    if name is None and missing:
        raise UserError(f"{', '.join(missing)}: required without --gpu (known GPUs: {', '.join(GPUS)})")
    for flag, value in {**required, "--link-bandwidth": link_bandwidth}.items():
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"{flag} {value:g}: must be above 0")
    if price is not None and not 0 <= price < math.inf:
        raise UserError(f"--price {price:g}: must be 0 or more")
    given = {"bandwidth_tb_s": memory_bandwidth, "tflops": tflops, "memory_gb": gpu_memory}
    given |= {"link_gb_s": link_bandwidth, "price": price}
    known = "custom" if name is None else find_gpu(name).name
    figures = DATA_SHEETS.get(known, CUSTOM_GPU) | {key: value for key, value in given.items() if value is not None}
    return _build_gpu(known, **figures)


@dataclass(frozen=True)
class EngineSpec:
    """Constants of an inference engine, fitted to decode steps measured on one H200."""

    name: str
    weight_bandwidth_share: float  # of the memory bandwidth, when reading weights
    kv_bandwidth_share: float  # of the memory bandwidth, when reading the KV cache
    flops_share: float
    mxfp4_bandwidth_share: float  # of the memory bandwidth, when reading 4-bit experts
    min_layer_s: float
    min_moe_layer_s: float
    draft_pass_overhead_s: float  # per forward pass of the drafter
    min_draft_step_s: float  # of a decode step with draft tokens: work of the host


EMBEDDED = EngineSpec("embedded", 0.79, 0.63, 0.70, 0.50, 18e-6, 50e-6, 0.0, 0.0)
VLLM = EngineSpec("vllm", 0.77, 0.85, 0.62, 0.77, 59e-6, 165e-6, 0.1e-3, 4.9e-3)
ENGINES = {engine.name: engine for engine in (EMBEDDED, VLLM)}


def combine_bounds(*seconds: float) -> float:
    """Time of an operation with several bounds; the larger bound partly hides the smaller ones."""
    return float(sum(s**OVERLAP_EXPONENT for s in seconds) ** (1 / OVERLAP_EXPONENT))


@dataclass(frozen=True)
class Replica:
    """One copy of the model on `tensor_parallel_size` GPUs, served by one engine."""

    gpu: GpuSpec
    engine: EngineSpec
    tensor_parallel_size: int = 1

    def compute_seconds(self, flops: float) -> float:
        return flops / self.tensor_parallel_size / (self.gpu.matrix_flops * self.engine.flops_share)

    def gemm_seconds(self, weight_bytes: float, flops: float, min_seconds: float = 0.0) -> float:
        bandwidth = self.gpu.memory_bandwidth * self.engine.weight_bandwidth_share
        read_seconds = weight_bytes / self.tensor_parallel_size / bandwidth
        return combine_bounds(read_seconds, self.compute_seconds(flops), min_seconds)

    def attention_seconds(self, num_kv_heads: int, kv_bytes: float, flops: float) -> float:
        """Attention of one layer. GPUs beyond the number of KV heads read copies."""
        num_shards = min(self.tensor_parallel_size, num_kv_heads)
        bandwidth = self.gpu.memory_bandwidth * self.engine.kv_bandwidth_share
        return combine_bounds(kv_bytes / num_shards / bandwidth, self.compute_seconds(flops))

    def link_seconds(self, num_elements: float, num_transfers: int) -> float:
        """Ring collective: each GPU sends all but its own shard, once (all-gather) or twice (all-reduce)."""
        if (size := self.tensor_parallel_size) == 1:
            return 0.0
        sent_bytes = num_transfers * (size - 1) / size * num_elements * ACTIVATION_BYTES
        return self.gpu.link_latency_s + sent_bytes / self.gpu.link_bandwidth


@dataclass(frozen=True)
class ForwardBatch:
    """Requests of one forward pass. Their context lengths are spread evenly: `context_span` tokens around the mean."""

    num_requests: int
    rows_per_request: int
    mean_context_len: float
    context_span: float = 1.0

    @property
    def num_rows(self) -> int:
        return self.num_requests * self.rows_per_request

    def mean_keys_per_row(self, window: Window) -> float:
        """Keys that one row attends to, on average over the span."""
        first = self.mean_context_len - self.context_span / 2
        last = self.mean_context_len + self.context_span / 2
        return (count_attended_keys(last, window) - count_attended_keys(first, window)) / self.context_span


def count_attended_keys(num_positions: float, window: Window) -> float:
    """Keys that rows 0..num_positions attend to in total, limited by a sliding window or a chunk."""
    if isinstance(window, ChunkedAttention):
        num_chunks, rest = divmod(num_positions, window.chunk_size)
        return (num_chunks * window.chunk_size**2 + rest**2) / 2
    growing = min(num_positions, window or num_positions)
    return growing**2 / 2 + (num_positions - growing) * growing


def layers_seconds(replica: Replica, shape: ModelShape, batch: ForwardBatch) -> float:
    """One pass through all decoder layers. Equal layers are computed once."""
    engine, num_rows, total = replica.engine, batch.num_rows, 0.0
    for (layer, window), count in Counter(zip(shape.layers, shape.cfg.windows, strict=True)).items():
        num_weights = count_attention_weights(layer) + count_mlp_weights(layer)
        weight_bytes, flops = num_weights * shape.bytes_per_weight, 2.0 * num_weights * num_rows
        min_seconds = engine.min_layer_s
        if (experts := layer.experts) is not None:
            min_seconds = engine.min_moe_layer_s
            is_packed = shape.bytes_per_expert_weight < 1.0
            slowdown = engine.weight_bandwidth_share / engine.mxfp4_bandwidth_share if is_packed else 1.0
            num_expert_weights = 3 * layer.hidden_size * experts.intermediate_size
            num_read = expected_active_experts(experts, num_rows) * num_expert_weights
            weight_bytes += num_read * shape.bytes_per_expert_weight * slowdown
            flops += 2.0 * experts.num_experts_per_tok * num_expert_weights * num_rows
        num_keys = batch.mean_keys_per_row(window)
        kv_bytes = batch.num_requests * num_keys * 2 * layer.num_kv_heads * layer.head_dim * shape.bytes_per_kv
        attention_flops = 4.0 * layer.num_heads * layer.head_dim * num_keys * num_rows
        seconds = replica.gemm_seconds(weight_bytes, flops, min_seconds)
        seconds += replica.attention_seconds(layer.num_kv_heads, kv_bytes, attention_flops)
        seconds += 2 * replica.link_seconds(num_rows * layer.hidden_size, num_transfers=2)
        total += count * seconds
    return total


def lm_head_seconds(replica: Replica, shape: ModelShape, num_rows: int) -> float:
    weight_bytes = shape.num_lm_head_weights * shape.bytes_per_vocab_weight
    seconds = replica.gemm_seconds(weight_bytes, 2.0 * shape.num_lm_head_weights * num_rows)
    return seconds + replica.link_seconds(num_rows * shape.cfg.vocab_size, num_transfers=1)


def fusion_seconds(replica: Replica, drafter: DrafterShape, num_rows: int) -> float:
    num_weights = drafter.num_fusion_weights
    return replica.gemm_seconds(num_weights * drafter.body.bytes_per_weight, 2.0 * num_weights * num_rows)


def decode_step_seconds(
    replica: Replica,
    target: ModelShape,
    drafter: DrafterShape | None,
    num_draft_tokens: int,
    num_requests: int,
    mean_context_len: float,
    context_span: float = 1.0,
) -> float:
    """One decode step: the target verifies K + 1 rows per request, then the drafter proposes K tokens.

    P-EAGLE runs one pass over K + 1 verified rows and K - 1 mask rows. EAGLE-3 runs K passes: the first over the
    verified rows, the others over one row.
    """
    k = num_draft_tokens
    assert k == 0 or drafter is not None
    batch = ForwardBatch(num_requests, k + 1, mean_context_len, context_span)
    seconds = layers_seconds(replica, target, batch) + lm_head_seconds(replica, target, batch.num_rows)
    if k == 0 or drafter is None:
        return seconds
    seconds += fusion_seconds(replica, drafter, batch.num_rows)
    passes = [(2 * k, k)] if drafter.method == "p-eagle" else [(k + 1, 1)] + [(1, 1)] * (k - 1)
    for rows_per_request, num_sampled in passes:
        draft_batch = ForwardBatch(num_requests, rows_per_request, mean_context_len, context_span)
        seconds += replica.engine.draft_pass_overhead_s + layers_seconds(replica, drafter.body, draft_batch)
        seconds += lm_head_seconds(replica, drafter.body, num_requests * num_sampled)
    return max(seconds, replica.engine.min_draft_step_s)


def prefill_seconds(
    replica: Replica, target: ModelShape, drafter: DrafterShape | None, num_prompt_tokens: int, num_requests: int = 1
) -> float:
    """Prefill of one prompt, when as many of the requests share a pass as fit into MAX_BATCHED_TOKENS."""
    if num_prompt_tokens == 0:
        return 0.0
    num_batched = max(1, min(num_requests, MAX_BATCHED_TOKENS // num_prompt_tokens))
    batch = ForwardBatch(num_batched, num_prompt_tokens, num_prompt_tokens / 2, num_prompt_tokens)
    seconds = layers_seconds(replica, target, batch) + lm_head_seconds(replica, target, num_batched)
    if drafter is not None:
        seconds += fusion_seconds(replica, drafter, batch.num_rows)
        seconds += layers_seconds(replica, drafter.body, batch)
    return seconds / num_batched
