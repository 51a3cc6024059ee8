"""Compilations of kernels after the start are noticed. Compiles for a GPU, which needs none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import sys, torch, triton
from triton import language as tl
from triton.backends.compiler import GPUTarget
from peagle.kernels.host_transfer import _copy_kernel
from peagle.kernels.triton_utils import watch_compilations


class Hopper:  # stands in for a driver: nothing is launched
    get_current_device = get_current_stream = lambda self, device=None: 0
    get_current_target = lambda self: GPUTarget("cuda", 90, 32)


triton.runtime.driver.set_active(Hopper())
x, long = torch.zeros(64), torch.zeros(64, dtype=torch.long)
_copy_kernel.warmup(x, x, 64, BLOCK=64, grid=(1,))
names = []
watch_compilations(names.append)
_copy_kernel.warmup(x, x, 32, BLOCK=64, grid=(1,))
print(names)
_copy_kernel.warmup(long, long, 64, BLOCK=64, grid=(1,))
print(names)
"""


def test_a_kernel_that_is_compiled_after_the_start_is_noticed() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[]", "['_copy_kernel']"]
