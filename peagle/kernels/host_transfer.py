"""Copies between host and GPU that do not wait for work queued on the GPU.

A copy from pageable memory blocks until everything queued before it is done; a copy from pinned memory is queued.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from collections import deque

import numpy as np
import torch
from torch import Tensor

from peagle.kernels.triton_utils import HAVE_TRITON, runs_triton

_BLOCK = 1024

if HAVE_TRITON:
    import triton
    import triton.language as tl

    @triton.jit(do_not_specialize=["count"])
    def _copy_kernel(source, to, count, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(to + at, tl.load(source + at, mask=at < count), mask=at < count)


def pin_for_copy(x: Tensor, device: torch.device) -> Tensor:
    """Pins a host tensor that will be copied to a GPU; the caching allocator keeps it until the copy is done."""
    return x.pin_memory() if x.is_cpu and device.type == "cuda" else x


def pin_array(x: np.ndarray) -> Tensor:
    """A pinned copy. Torch would wake threads to copy many elements, which can take milliseconds."""
    pinned = torch.empty_like(torch.from_numpy(x), pin_memory=True)
    pinned.numpy()[...] = x
    return pinned


def copy_to_device(x: Tensor, device: torch.device | str) -> Tensor:
    """Copies a tensor to the device without blocking the host."""
    device = torch.device(device)
    return pin_for_copy(x, device).to(device, non_blocking=True)


class PinnedRing:
    """Keeps the last `max_in_flight` pinned host tensors alive while kernels read and write them in place.

    A kernel that accesses host memory takes half the time of a copy for the few bytes of a decode step (4 instead of
    8 us on an H200): a copy switches the GPU to its copy engine and back.
    """

    def __init__(self, max_in_flight: int) -> None:
        # The caching allocator does not track kernels that access host memory, so the tensors are kept here.
        self._in_flight: deque[Tensor] = deque(maxlen=max_in_flight)

    def to_pinned(self, x: Tensor) -> Tensor:
        """Returns a pinned copy of a host tensor, which kernels can read."""
        self._in_flight.append(x.pin_memory())
        return self._in_flight[-1]

    def copy_to_host(self, x: Tensor, host: Tensor | None = None) -> Tensor:
        """Queues a copy of `x` to pinned host memory; it is complete once an event recorded after this call is."""
        if host is None:
            host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        if not runs_triton(x) or not x.is_contiguous() or x.numel() == 0:
            return host.copy_(x, non_blocking=True)
        self._in_flight.append(host)
        _copy_kernel[(triton.cdiv(x.numel(), _BLOCK),)](x, host, x.numel(), BLOCK=_BLOCK, num_warps=1)
        return host
