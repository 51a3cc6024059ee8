"""Data sheet figures of GPUs (`gpus.json`): memory, bandwidth, dense bf16 TFLOP/s without sparsity, one-way link
bandwidth, and rough on-demand prices of 2026."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from peagle.errors import UserError

GB, TB, TFLOP = 1e9, 1e12, 1e12
LINK_LATENCY_S = {"nvlink": 8e-6, "pcie": 25e-6}  # of a small all-reduce inside a CUDA graph


@dataclass(frozen=True)
class GpuSpec:
    name: str
    memory_bytes: float
    memory_bandwidth: float  # bytes/s
    matrix_flops: float  # dense bf16 FLOP/s
    link_bandwidth: float  # bytes/s to other GPUs of the node, one way
    link_latency_s: float  # of the smallest all-reduce
    price_per_hour: float | None  # dollars; None if unknown


GPUS = {
    name: GpuSpec(
        name,
        gpu["memory_gb"] * GB,
        gpu["bandwidth_tb_s"] * TB,
        gpu["tflops"] * TFLOP,
        gpu["link_gb_s"] * GB,
        LINK_LATENCY_S[gpu["link"]],
        gpu["price"],
    )
    for name, gpu in json.loads(Path(__file__).with_name("gpus.json").read_text(encoding="utf-8")).items()
}
CUSTOM_GPU = GpuSpec("custom", 1.0, 1.0, 1.0, 64 * GB, LINK_LATENCY_S["pcie"], None)


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
    overrides: dict[str, tuple[float | None, float]] = {
        "memory_bandwidth": (memory_bandwidth, TB),
        "matrix_flops": (tflops, TFLOP),
        "memory_bytes": (gpu_memory, GB),
        "link_bandwidth": (link_bandwidth, GB),
        "price_per_hour": (price, 1.0),
    }
    gpu = CUSTOM_GPU if name is None else find_gpu(name)
    given: dict[str, Any] = {name: value * unit for name, (value, unit) in overrides.items() if value is not None}
    return replace(gpu, **given)
