"""Tensors on their way from the host to a GPU, without waiting for what the GPU still has to do.

From ordinary memory a copy waits for everything queued before it; from pinned memory it is queued itself.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sent(x: Tensor, device: torch.device | str) -> Tensor:
    device = torch.device(device)
    if x.is_cpu and device.type == "cuda":
        x = x.pin_memory()  # the allocator keeps it until the copy is done
    return x.to(device, non_blocking=True)
