"""C kernels for few rows in fp32 (skinny_cpu.c): a fused GEMM, and attention of one sequence.

They are compiled on first use into peagle's cache folder and run on torch's OpenMP threads, since two thread pools
would compete for the cores. linear_torch.py measures whether they are faster. Without a compiler, or with PEAGLE_CC=0,
`library` returns None, torch does the work, and a debug log says why.
"""

import ctypes
import ctypes.util
import functools
import hashlib
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from peagle.paths import cache_folder

LOGGER = logging.getLogger("peagle.kernels")
SOURCE = Path(__file__).with_suffix(".c")
MAX_ROWS = 16  # torch's GEMM is faster for more
COMPILERS = ("cc", "gcc", "clang")
# Without -fno-schedule-insns gcc moves loads so early that the sums no longer fit into 32 registers.
FLAGS = ("-O3", "-fno-schedule-insns", "-ffp-contract=fast", "-std=gnu11", "-fPIC", "-shared")
COMPILE_TIMEOUT_S = 120
OPENMP = re.compile(r"lib(gomp|iomp5|omp)\b.*\.so")


def compiler_command() -> list[str]:
    """Returns $PEAGLE_CC, $CC or the first compiler found; empty if there is none or PEAGLE_CC is 0."""
    if os.environ.get("PEAGLE_CC", "") == "0":
        return []
    configured = os.environ.get("PEAGLE_CC") or os.environ.get("CC")
    if configured:
        return shlex.split(configured)
    found = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    return [found] if found else []


def cpu_fingerprint() -> str:
    """Returns the CPU's name and features from Linux, which code compiled for this CPU depends on."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return platform.processor()
    kept = ("flags", "features", "model name", "vendor_id", "cpu implementer", "cpu part", "cpu variant")
    return "\n".join(line for line in first.splitlines() if line.split(":")[0].strip().lower() in kept)


def compile_library(folder: Path) -> Path:
    """Returns the shared library in `folder`, compiled if it is missing; safe for concurrent processes."""
    command = compiler_command()
    if not command:
        raise OSError("no C compiler (cc, gcc, clang or $CC)")
    run = functools.partial(subprocess.run, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
    version = run([*command, "--version"], timeout=COMPILE_TIMEOUT_S, check=True).stdout
    native = "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"
    parts = [SOURCE.read_text(), *command, version, *FLAGS, native, platform.machine(), cpu_fingerprint()]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]
    final = folder / f"skinny-{key}.so"
    if not final.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".build-") as work:
            built = Path(work) / final.name
            run([*command, *FLAGS, native, str(SOURCE), "-o", str(built), "-lm"], timeout=COMPILE_TIMEOUT_S, check=True)
            os.replace(built, final)
    return final


@functools.cache
def find_gomp_parallel() -> int | None:
    """Returns the address of GOMP_parallel in torch's OpenMP library, else in the system's; None: one thread."""
    maps = Path("/proc/self/maps")
    mapped = (line.split(maxsplit=5)[-1] for line in maps.read_text().splitlines()) if maps.exists() else ()
    beside = str(Path(torch.__file__).parent.parent / "torch")  # torch/lib, or torch.libs next to it
    loaded = sorted({path for path in mapped if OPENMP.match(os.path.basename(path))})
    loaded.sort(key=lambda path: not path.startswith(beside))
    for name in [*loaded, ctypes.util.find_library("gomp")]:
        try:
            if name is not None:
                return ctypes.cast(ctypes.CDLL(name).GOMP_parallel, ctypes.c_void_p).value
        except (OSError, AttributeError):
            continue
    return None


@functools.cache
def library() -> ctypes.CDLL | None:
    """Loads the C kernels, or returns None; the first call may compile for some seconds."""
    pointer, number = ctypes.c_void_p, ctypes.c_long
    try:
        loaded = ctypes.CDLL(str(compile_library(cache_folder() / "kernels")))
        real = ctypes.c_float
        loaded.peagle_gemm.argtypes = [pointer, number, *[pointer] * 4, real, *[pointer] * 2, *[number] * 4, pointer]
        loaded.peagle_attention.argtypes = [*[pointer] * 6, *[number] * 6, pointer]
    except (OSError, AttributeError, ValueError, subprocess.SubprocessError) as error:
        stderr = getattr(error, "stderr", None)
        LOGGER.debug("C kernels are unavailable: %s", f"{error}: {stderr.strip()}" if stderr else error)
        return None
    LOGGER.debug("C kernels loaded, running on %s", "torch's threads" if find_gomp_parallel() else "one thread")
    return loaded


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def gemm(
    x_TK: Tensor,
    weight_NK: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    glu: bool = False,
) -> Tensor | None:
    """Computes `linear` (linear.py) for up to MAX_ROWS rows.

    A row's bits do not depend on the other rows. Returns None if the library is unavailable. The caller ensures that
    all tensors are fp32 on the CPU and dense, except for the row stride of x.
    """
    found, rows, N, stride = library(), x_TK.shape[0], weight_NK.shape[0], x_TK.stride()
    if found is None or stride[1] != 1 or not weight_NK.is_contiguous():
        return None
    y = torch.empty(rows, N)
    gated = torch.empty(rows, N // 2) if glu else None
    added = None if residual is None or glu else residual.contiguous()  # a name keeps it alive during the call
    operands = [_address(t) for t in (weight_NK, bias, added, norm_weight)]
    outputs = y.data_ptr(), _address(gated)
    sizes = rows, N, x_TK.shape[1], torch.get_num_threads(), find_gomp_parallel()
    if found.peagle_gemm(x_TK.data_ptr(), stride[0], *operands, eps, *outputs, *sizes):
        return None
    if gated is None:
        return y
    return gated if residual is None else gated.add_(residual)


def supports_attention(head_dim: int) -> bool:
    """Whether `attention` takes heads of this width on this machine."""
    found = library()
    return found is not None and head_dim % (2 * found.peagle_lanes()) == 0  # floats in a vector register


def attention(
    qkv_TX: Tensor, cos_Td: Tensor, sin_Td: Tensor, keys_SGd: Tensor, values_SGd: Tensor, heads: int
) -> Tensor:
    """Rotates queries and keys, writes keys and values to the last T of S positions, and attends causally: [T, H * d].

    A row's bits depend on its position only. The caller ensures that all tensors are fp32 on the CPU with dense rows
    (keys and values may be views of a cache), and that the first half of the sines is negated.
    """
    found = library()
    assert found is not None and qkv_TX.is_contiguous() and cos_Td.is_contiguous() and sin_Td.is_contiguous()
    (S, kv_heads, width), rows = keys_SGd.shape, len(qkv_TX)
    out = torch.empty(rows, heads * width)
    tensors = [t.data_ptr() for t in (qkv_TX, cos_Td, sin_Td, keys_SGd, values_SGd, out)]
    sizes = rows, heads, kv_heads, width, S - rows, torch.get_num_threads()
    if found.peagle_attention(*tensors, *sizes, find_gomp_parallel()):
        raise MemoryError(f"attention of {rows} rows over {S} positions")
    return out
