"""Whether Triton kernels can run here, for which tensors, and with which launch options."""

import functools
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

try:
    import triton
    from triton import language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: F401

    HAVE_TRITON = True

    @triton.jit
    def wait_for_previous(PDL: tl.constexpr) -> None:
        """Lets the next kernel start and waits for the previous one to end; before that, only weights may be read."""
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()

except ImportError:
    # No wheel for this platform, or a release without descriptors: the torch versions and cuBLAS do everything.
    HAVE_TRITON = False

# Triton reads the variable when a kernel is declared, so changing it after the import has no effect.
INTERPRETED = HAVE_TRITON and os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def watch_compilations(report: Callable[[str], None]) -> None:
    """Calls `report` with the name of every kernel that Triton compiles, or loads from its cache, from now on."""
    if HAVE_TRITON:
        triton.knobs.runtime.jit_cache_hook = lambda *, fn, **_: report(fn.name)


def runs_triton(x: Tensor) -> bool:
    """Whether kernels without restrictions on dtype or gradients can take this tensor."""
    return HAVE_TRITON and not INTERPRETED and x.is_cuda


def device_context(device: torch.device) -> AbstractContextManager[object]:
    """Makes `device` the thread's current GPU, on which Triton launches and CUDA graphs and events are created."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@functools.cache
def supports_pdl(device: torch.device) -> bool:
    """Whether the device has programmatic dependent launch (PDL): Hopper and later, never in the interpreter."""
    return not INTERPRETED and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def pdl_launch_options(device: torch.device, pdl: bool | None = None) -> dict[str, bool]:
    """Launch options of a kernel that starts while its predecessor ends; `pdl` overrides the check of the device.

    Such a kernel has a PDL constant and calls `gdc_wait` itself, before it reads or writes anything but weights.
    """
    if pdl is None:
        pdl = supports_pdl(device)
    return {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}


def supports_triton(*tensors: Tensor | None) -> bool:
    """Whether the inference kernels take these tensors: one half-precision dtype, on a GPU, no gradient needed."""
    given = [t for t in tensors if t is not None]
    return _are_half_on_gpu(given) and not _need_gradients(given)


def supports_triton_autograd(*tensors: Tensor | None) -> bool:
    """Whether the training kernels take these tensors: as above, but a gradient is needed."""
    given = [t for t in tensors if t is not None]
    return _are_half_on_gpu(given) and _need_gradients(given)


def _are_half_on_gpu(given: list[Tensor]) -> bool:
    return (
        runs_triton(given[0])
        and given[0].dtype in (torch.bfloat16, torch.float16)
        and all(t.dtype == given[0].dtype and t.stride(-1) == 1 for t in given)
    )


def _need_gradients(given: list[Tensor]) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in given)


def supports_triton_float(x: Tensor) -> bool:
    """Whether kernels that compute in fp32 can take this tensor: bf16, fp16 or fp32 on a CUDA device."""
    return HAVE_TRITON and x.is_cuda and x.dtype in (torch.bfloat16, torch.float16, torch.float32)
