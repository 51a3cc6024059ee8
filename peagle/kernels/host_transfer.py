"""Tensors on their way from the host to a GPU and back, without waiting for what the GPU still has to do.

From ordinary memory a copy waits for everything queued before it; from pin_for_copy memory it is queued itself.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from peagle.kernels.triton_utils import HAVE_TRITON, INTERPRETED

_BLOCK = 1024

if HAVE_TRITON:
    import triton
    import triton.language as tl

    @triton.jit(do_not_specialize=["count"])
    def _copy_kernel(source, to, count, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(to + at, tl.load(source + at, mask=at < count), mask=at < count)


def pin_for_copy(x: Tensor, device: torch.device) -> Tensor:
    """What a copy to the device need not wait for; the allocator keeps it until that is done."""
    return x.pin_memory() if x.is_cpu and device.type == "cuda" else x


def copy_to_device(x: Tensor, device: torch.device | str) -> Tensor:
    device = torch.device(device)
    return pin_for_copy(x, device).to(device, non_blocking=True)


class PinnedRing:
    """Small tensors in the host's memory that kernels read and write there.

    What a round says is there in half the time of a copy (4 and 8 us on an H200), for which the GPU changes to another
    of its engines and back.
    """

    def __init__(self, max_in_flight: int) -> None:
        """`max_in_flight`: how many may be on their way at once."""
        self._kept: deque[Tensor] = deque(
            maxlen=max_in_flight
        )  # the allocator knows nothing of kernels that work there

    def to_pinned(self, x: Tensor) -> Tensor:
        """`x`, of the host, where a kernel can read it."""
        self._kept.append(x.pin_memory())
        return self._kept[-1]

    def copy_to_host(self, x: Tensor) -> Tensor:
        """What `x` will be when the GPU comes to it, on the host; there once an event recorded after this is."""
        host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        if not HAVE_TRITON or INTERPRETED or not x.is_contiguous() or x.numel() == 0:
            return host.copy_(x, non_blocking=True)
        self._kept.append(host)
        _copy_kernel[(triton.cdiv(x.numel(), _BLOCK),)](x, host, x.numel(), BLOCK=_BLOCK, num_warps=1)
        return host
