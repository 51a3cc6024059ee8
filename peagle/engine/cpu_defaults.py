"""Default number of threads and default dtype, which depend on the CPU."""

from __future__ import annotations

import os
import time
import warnings
from pathlib import Path

import torch
from torch.nn import functional as F

from peagle.checkpoints.files import parse_dtype
from peagle.kernels.gemm.skinny_cpu import cpu_fingerprint

BF16_FEATURES = {"amx_bf16", "avx512_bf16", "bf16"}  # in /proc/cpuinfo, x86 and Arm


def usable_cores() -> int:
    """Number of cores this process may use: its affinity, limited by the CPU quota of its cgroup."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            count = min(count, max(1, round(int(quota) / int(period))))
    except (OSError, ValueError):
        pass
    return count


def lacks_bf16() -> bool:
    """Whether this CPU is known to have no bfloat16 instructions."""
    features = [line for line in cpu_fingerprint().splitlines() if line.lower().startswith(("flags", "features"))]
    return bool(features) and BF16_FEATURES.isdisjoint(" ".join(features).split())


def resolve_dtype(name: str | None, device: torch.device) -> torch.dtype:
    """The named dtype, or the default: bfloat16 on a GPU, the faster of bfloat16 and float32 on a CPU."""
    if name is None:
        return _default_dtype(device)
    dtype = parse_dtype(name)
    if dtype == torch.bfloat16 and device.type == "cpu" and lacks_bf16():
        warnings.warn(
            "--dtype bfloat16: this CPU has no bfloat16 instructions and emulates them slowly; "
            "use --dtype float32 or leave --dtype out",
            stacklevel=4,
        )
        warnings.filterwarnings("ignore", "mkldnn_matmul failed")  # torch's warning about the same
    return dtype


def _default_dtype(device: torch.device) -> torch.dtype:
    if device.type != "cpu":
        return torch.bfloat16
    if lacks_bf16():  # decided without timing, which a busy machine would distort
        return torch.float32
    best = {torch.float32: float("inf"), torch.bfloat16: float("inf")}
    operands = {dtype: (torch.ones(4, 512, dtype=dtype), torch.ones(1024, 512, dtype=dtype)) for dtype in best}
    for run in range(8):  # the first is the warm-up
        for dtype, (x, w) in operands.items():
            started = time.perf_counter()
            F.linear(x, w)
            elapsed = time.perf_counter() - started
            best[dtype] = min(best[dtype], elapsed) if run else best[dtype]
        if best[torch.bfloat16] > 4 * best[torch.float32]:  # emulated
            break
    return torch.bfloat16 if best[torch.bfloat16] < best[torch.float32] else torch.float32
