"""The C kernels for few rows (`skinny_cpu.c`), compiled when first wanted and kept in peagle's cache folder.

Knows compilers and the thread pool that torch has loaded, which it shares: two pools would spin against each other.
Does not know when they pay; `linear` measures that. Wherever it cannot be had (no compiler, no permission,
`PEAGLE_CC=0`) `library` is None, and nobody is told but a debug log.
"""

from __future__ import annotations

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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from peagle.paths import cache_folder

LOGGER = logging.getLogger("peagle.kernels")
SOURCE = Path(__file__).with_suffix(".c")
MOST_ROWS = 16  # beyond, the library's product is the better one
COMPILERS = ("cc", "gcc", "clang")
# gcc schedules loads so early on 32 registers that the sums no longer fit in them.
FLAGS = ("-O3", "-fno-schedule-insns", "-ffp-contract=fast", "-std=gnu11", "-fPIC", "-shared")
COMPILE_TIMEOUT_S = 120
OPENMP = re.compile(r"lib(gomp|iomp5|omp)\b.*\.so")


@dataclass(frozen=True)
class Library:
    multiply: Callable[..., int]
    attend: Callable[..., int]
    lanes: int
    parallel: int | None  # whom to hand to them as the last argument


def compiler() -> list[str]:
    """$CC or what is there; empty if there is none, or it was turned off."""
    if os.environ.get("PEAGLE_CC", "") == "0":
        return []
    asked = os.environ.get("PEAGLE_CC") or os.environ.get("CC")
    if asked:
        return shlex.split(asked)
    found = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    return [found] if found else []


def cpu_fingerprint() -> str:
    """What code compiled for this very CPU depends on: its name and features, as Linux tells them."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return platform.processor()
    kept = ("flags", "features", "model name", "vendor_id", "cpu implementer", "cpu part", "cpu variant")
    return "\n".join(line for line in first.splitlines() if line.split(":")[0].strip().lower() in kept)


def compiled(folder: Path) -> Path:
    """The library in `folder`, built there unless it is there already. Processes may do this at the same time."""
    command = compiler()
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


def pool() -> int | None:
    """Where GOMP_parallel of the OpenMP library lies that torch runs on; the system's if torch has none of its own."""
    loaded = []
    try:
        for line in Path("/proc/self/maps").read_text().splitlines():
            path = line.split(maxsplit=5)[-1]
            if OPENMP.match(os.path.basename(path)) and path not in loaded:
                loaded.append(path)
    except OSError:
        pass
    beside = str(Path(torch.__file__).parent.parent)  # torch/lib, or torch.libs next to it
    loaded.sort(key=lambda path: not path.startswith(beside + os.sep + "torch"))
    for name in [*loaded, ctypes.util.find_library("gomp")]:
        try:
            if name is not None:
                return ctypes.cast(ctypes.CDLL(name).GOMP_parallel, ctypes.c_void_p).value
        except (OSError, AttributeError):
            continue
    return None


@functools.cache
def library() -> Library | None:
    """The first call may compile, which takes some seconds."""
    try:
        loaded = ctypes.CDLL(str(compiled(cache_folder() / "kernels")))
        multiply, attend, lanes = loaded.peagle_product, loaded.peagle_attention, loaded.peagle_lanes()
    except (OSError, AttributeError, ValueError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None)
        LOGGER.debug("no C kernels for few rows: %s", f"{error}: {said.strip()}" if said else error)
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_long
    multiply.argtypes = [pointer, number, *[pointer] * 4, ctypes.c_float, *[pointer] * 2, *[number] * 4, pointer]
    attend.argtypes = [*[pointer] * 6, *[number] * 6, pointer]
    parallel = pool()
    LOGGER.debug("C kernels for few rows, %s", "torch's threads" if parallel else "one thread")
    return Library(multiply, attend, lanes, parallel)


def product(
    x_TK: Tensor,
    weight_NK: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    glu: bool = False,
) -> Tensor | None:
    """residual + glu(norm(x) @ weight^T + bias), each part only where asked for, in fp32, for up to MOST_ROWS rows. A
    row's bits do not depend on the others. A gated product has no residual. None: not to be had here.

    Nothing is checked but what may differ from call to call: all are fp32 on the CPU, all but x dense.
    """
    found, rows, N, stride = library(), x_TK.shape[0], weight_NK.shape[0], x_TK.stride()
    if found is None or stride[1] != 1 or not weight_NK.is_contiguous():
        return None
    dense = None if residual is None else residual.contiguous()  # named, so that it lives as long as the call
    y = torch.empty(rows, N)
    gated = torch.empty(rows, N // 2) if glu else None
    failed = found.multiply(
        x_TK.data_ptr(),
        stride[0],
        weight_NK.data_ptr(),
        None if bias is None else bias.data_ptr(),
        None if dense is None else dense.data_ptr(),
        None if norm_weight is None else norm_weight.data_ptr(),
        eps,
        y.data_ptr(),
        None if gated is None else gated.data_ptr(),
        rows,
        N,
        x_TK.shape[1],
        torch.get_num_threads(),
        found.parallel,
    )
    return None if failed else y if gated is None else gated


def attends(width: int) -> bool:
    """Whether `attention` takes heads of this width here."""
    found = library()
    return found is not None and width % (2 * found.lanes) == 0


def attention(
    qkv_TX: Tensor, cos_Td: Tensor, sin_Td: Tensor, keys_SGd: Tensor, values_SGd: Tensor, heads: int
) -> Tensor:
    """[T, H * d]: the rows turned, their keys and values written to the last T of S positions, and what each row sees
    of the positions up to its own. A row's bits depend on its position alone.

    All fp32 on the CPU, rows dense; keys and values may be views of a cache. The sines' first half is negated.
    """
    found = library()
    assert found is not None and qkv_TX.is_contiguous() and cos_Td.is_contiguous() and sin_Td.is_contiguous()
    (S, kv_heads, width), rows = keys_SGd.shape, len(qkv_TX)
    out = torch.empty(rows, heads * width)
    failed = found.attend(
        qkv_TX.data_ptr(),
        cos_Td.data_ptr(),
        sin_Td.data_ptr(),
        keys_SGd.data_ptr(),
        values_SGd.data_ptr(),
        out.data_ptr(),
        rows,
        heads,
        kv_heads,
        width,
        S - rows,
        torch.get_num_threads(),
        found.parallel,
    )
    if failed:
        raise MemoryError(f"attention of {rows} rows over {S} positions")
    return out
