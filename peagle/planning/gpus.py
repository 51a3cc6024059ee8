"""GPUs on paper: what their makers say of them, and about what an hour costs.

Knows nothing about models. Rates are per GPU: bytes of memory, bytes a second, dense bf16 products (not the figure with
sparsity), bytes a second that it sends to its neighbours, and how long a small message takes to all of them.
docs/planning.md says where they come from and which were checked.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from peagle.errors import UserError

GB, TB, TFLOP = 1e9, 1e12, 1e12
NVLINK_S = 8e-6  # of a small all-reduce within one machine, in a graph
PCIE_S = 25e-6


@dataclass(frozen=True)
class Gpu:
    name: str
    memory: float  # bytes
    bandwidth: float  # bytes a second
    matrix_rate: float  # operations a second in bf16; a multiply and an add are two
    link: float  # bytes a second to its neighbours, one way
    link_s: float  # of the smallest all-reduce
    price: float | None  # dollars an hour; None: not known

    def __post_init__(self) -> None:
        for flag, value in (("memory", self.memory), ("bandwidth", self.bandwidth), ("matrix-rate", self.matrix_rate)):
            if not 0 < value < math.inf:
                raise UserError(f"--{flag}: must be above 0")
        if self.price is not None and not 0 <= self.price < math.inf:
            raise UserError(f"--price {self.price}: must be 0 or more")


def _gpu(
    name: str, memory: float, bandwidth: float, rate: float, link: float, price: float | None, pcie: bool = False
) -> Gpu:
    return Gpu(name, memory * GB, bandwidth * TB, rate * TFLOP, link * GB, PCIE_S if pcie else NVLINK_S, price)


# name, GB, TB/s, TFLOP/s, GB/s one way, dollars an hour
GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        _gpu("b300", 288, 8.0, 2250, 900, 7.0),
        _gpu("b200", 180, 8.0, 2250, 900, 5.5),
        _gpu("h200", 141, 4.8, 989, 450, 3.8),
        _gpu("h100", 80, 3.35, 989, 450, 3.0),
        _gpu("h100-nvl", 94, 3.9, 835, 300, 2.8),
        _gpu("h100-pcie", 80, 2.0, 756, 64, 2.4, pcie=True),
        _gpu("a100", 80, 2.039, 312, 300, 1.6),
        _gpu("a100-40gb", 40, 1.555, 312, 300, 1.3),
        _gpu("l40s", 48, 0.864, 362, 32, 1.2, pcie=True),
        _gpu("l4", 24, 0.3, 121, 32, 0.7, pcie=True),
        _gpu("a10g", 24, 0.6, 70, 32, 1.0, pcie=True),
        _gpu("rtx-4090", 24, 1.008, 165, 32, 0.5, pcie=True),
        _gpu("mi300x", 192, 5.3, 1307, 448, 3.0),
        _gpu("mi325x", 256, 6.0, 1307, 448, 3.5),
    )
}


def gpu_by_name(name: str) -> Gpu:
    known = name.strip().lower().replace("_", "-").replace(" ", "-").removeprefix("nvidia-").removeprefix("amd-")
    if known in GPUS:
        return GPUS[known]
    near = get_close_matches(known, GPUS, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]}? " if near else ""
    raise UserError(
        f"--gpu {name}: not in the table; {hint}known: {', '.join(GPUS)}; "
        "or describe it with --bandwidth, --matrix-rate and --memory"
    )


def describe_gpu(
    name: str | None,
    bandwidth: float | None,
    matrix_rate: float | None,
    memory: float | None,
    link: float | None,
    price: float | None,
) -> Gpu:
    """The GPU of that name but for what was given (TB/s, TFLOP/s, GB, GB/s, dollars), or one of these figures alone."""
    if name is None:
        missing = [
            flag
            for flag, value in (("--bandwidth", bandwidth), ("--matrix-rate", matrix_rate), ("--memory", memory))
            if value is None
        ]
        if missing:
            raise UserError(f"{', '.join(missing)}: needed where no --gpu is named (known: {', '.join(GPUS)})")
        own = Gpu("described", 1.0, 1.0, 1.0, 64 * GB, PCIE_S, None)
    else:
        own = gpu_by_name(name)
    given: dict[str, Any] = {
        "bandwidth": bandwidth and bandwidth * TB,
        "matrix_rate": matrix_rate and matrix_rate * TFLOP,
        "memory": memory and memory * GB,
        "link": link and link * GB,
        "price": price,
    }
    for flag, value in (("bandwidth", bandwidth), ("matrix-rate", matrix_rate), ("memory", memory), ("link", link)):
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"--{flag} {value}: must be above 0")
    return replace(own, **{key: value for key, value in given.items() if value is not None})
