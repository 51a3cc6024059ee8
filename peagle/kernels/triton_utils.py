"""Whether Triton kernels can be launched here, and for which tensors.

Knows no kernel.
"""

from __future__ import annotations

import functools
import os
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

try:
    import triton  # noqa: F401
    from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: F401

    HAVE_TRITON = True
except ImportError:  # no Triton for this machine: the torch twins and cuBLAS do everything
    HAVE_TRITON = False

# Triton reads the variable when a kernel is declared, as its file is imported, so a later change means nothing.
INTERPRETED = HAVE_TRITON and os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def device_context(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the thread's current GPU, and graphs and events are of it, wherever the tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@functools.cache
def supports_pdl(device: torch.device) -> bool:
    """Programmatic dependent launch: from Hopper on, and never in the interpreter."""
    return not INTERPRETED and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def pdl_launch_options(device: torch.device) -> dict[str, bool]:
    """How a kernel is launched that says PDL and then waits by itself for the one ahead of it, before it reads or
    writes anything that is not a weight."""
    pdl = supports_pdl(device)
    return {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}


def supports_triton(*tensors: Tensor | None) -> bool:
    """Whether the Triton kernels can take these: one half type, on a CUDA device, nothing to differentiate."""
    given = [t for t in tensors if t is not None]
    return _halves(given) and not _differentiates(given)


def supports_triton_autograd(*tensors: Tensor | None) -> bool:
    """Whether these are for the kernels of `trained`: as above, but with something to differentiate."""
    given = [t for t in tensors if t is not None]
    return _halves(given) and _differentiates(given)


def _halves(given: list[Tensor]) -> bool:
    return (
        HAVE_TRITON
        and not INTERPRETED
        and given[0].is_cuda
        and given[0].dtype in (torch.bfloat16, torch.float16)
        and all(t.dtype == given[0].dtype and t.stride(-1) == 1 for t in given)
    )


def _differentiates(given: list[Tensor]) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in given)


def supports_triton_float(x: Tensor) -> bool:
    """Whether kernels that compute in fp32 can take this tensor: bf16, fp16 or fp32 on a CUDA device."""
    return HAVE_TRITON and x.is_cuda and x.dtype in (torch.bfloat16, torch.float16, torch.float32)
