"""Tensors on their way from the host to a GPU, without waiting for what the GPU still has to do.

From ordinary memory a copy waits for everything queued before it; from pinned memory it is queued itself.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pinned(x: Tensor, device: torch.device) -> Tensor:
    """What a copy to the device need not wait for; the allocator keeps it until that is done."""
    return x.pin_memory() if x.is_cpu and device.type == "cuda" else x


def sent(x: Tensor, device: torch.device | str) -> Tensor:
    device = torch.device(device)
    return pinned(x, device).to(device, non_blocking=True)
