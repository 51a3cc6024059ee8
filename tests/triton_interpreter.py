"""Runs Triton kernels in Triton's interpreter on the CPU.

Triton reads TRITON_INTERPRET when a kernel is defined, so a test file runs itself as a script in a child process.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def run_in_interpreter(file: str, *arguments: str) -> None:
    """Runs a test file as a script under the interpreter. Fails, not skips, without Triton: no other test without a
    GPU runs these kernels."""
    root = Path(__file__).resolve().parent.parent
    path = os.pathsep.join([str(root), str(root / "tests"), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, file, *arguments], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    assert "kernels checked" in done.stdout


@contextmanager
def launching_triton(*modules: ModuleType) -> Iterator[None]:
    """Context in which functions of these modules launch their Triton kernels on CPU tensors too."""
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(mock.patch.object(module, "runs_triton", lambda x: True))
        yield


def patch_interpreter() -> None:
    """Fixes and speeds up the interpreter of Triton 3.6, and reverses the order of programs.

    Triton converts one-element arrays to loop bounds by int(), which numpy 2.4 rejects. It truncates to fp8 and does
    not know its nan. Half of its time goes into
    patching the language anew for each function that a kernel calls, and into overflow checks of small integers.

    The interpreter runs programs in ascending order; from here on the last one runs first, so that a kernel that
    depends on the order fails.
    """
    from triton import language as tl
    from triton.runtime import interpreter

    patch_tensor, patch = interpreter._patch_lang_tensor, interpreter._patch_lang
    patched: set[int] = set()  # ids of the modules that are patched now

    def patch_tensor_index(tensor, scope) -> None:  # type: ignore[no-untyped-def]
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    @cache
    def language_modules(fn: Any) -> frozenset[int]:
        return frozenset(id(value) for value in fn.__globals__.values() if value is tl or value is tl.core)

    class PatchScope:
        def __init__(self, fn: Any) -> None:
            self.new = language_modules(fn) - patched
            self.inner = patch(fn) if self.new else None
            patched.update(self.new)

        def restore(self) -> None:
            if self.inner is not None:
                self.inner.restore()
            patched.difference_update(self.new)

    interpreter._patch_lang_tensor, interpreter._patch_lang = patch_tensor_index, PatchScope
    _cache_types()
    _convert_fp8_by_torch()
    builder = interpreter.interpreter_builder
    builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    set_index = builder.set_grid_idx
    builder.set_grid_idx = lambda *at: set_index(*(n - 1 - i for n, i in zip(builder.grid_dim, at, strict=True)))


def _cache_types() -> None:
    """Describes each shape and dtype once. The interpreter builds these descriptions anew for every operation, which
    takes longer than the operation."""
    from triton.language import core
    from triton.runtime import interpreter

    init_block_type, find_numpy_dtype = core.block_type.__init__, interpreter._get_np_dtype
    block_types: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
    tensor_shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}
    numpy_dtypes: dict[str, Any] = {}

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        if type(element_ty) is not core.dtype:  # e.g. a pointer, whose name does not tell everything
            return init_block_type(self, element_ty, shape)
        key = element_ty.name, tuple(core._unwrap_if_constexpr(size) for size in shape)
        if key not in block_types:
            init_block_type(self, element_ty, shape)
            block_types[key] = dict(vars(self))
        vars(self).update(block_types[key])
        return None

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        sizes = tuple(type.shape.values) if type.is_block() else ()
        if sizes not in tensor_shapes:
            tensor_shapes[sizes] = core.tuple([core.constexpr(n) for n in sizes]), core.constexpr(math.prod(sizes))
        self.shape, self.numel = tensor_shapes[sizes]

    def numpy_dtype(dtype: Any) -> Any:
        dtype = getattr(dtype, "element_ty", dtype) if type(dtype) is core.block_type else dtype
        if type(dtype) is not core.dtype:
            return find_numpy_dtype(dtype)
        if dtype.name not in numpy_dtypes:
            numpy_dtypes[dtype.name] = find_numpy_dtype(dtype)
        return numpy_dtypes[dtype.name]

    core.block_type.__init__, core.tensor.__init__ = init_type, init_tensor
    interpreter._get_np_dtype = numpy_dtype


def _convert_fp8_by_torch() -> None:
    """Converts to and from fp8 by torch, as a GPU does: to nearest even, saturating."""
    from triton.runtime import interpreter

    convert_float = interpreter._convert_float
    names = {"fp8e4nv": "float8_e4m3fn", "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
    carriers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}

    def convert(values: Any, source: Any, result: Any, rounding: Any) -> Any:
        if "fp8e4nv" not in (source.name, result.name):
            return convert_float(values, source, result, rounding)
        numbers = torch.from_numpy(values.copy()).view(getattr(torch, names[source.name]))
        if result.name == "fp8e4nv":
            numbers = numbers.float().clamp(-448, 448)
        rounded = numbers.to(getattr(torch, names[result.name]))
        return rounded.view(carriers[rounded.itemsize]).numpy()

    interpreter._convert_float = convert


class _FillNewEmptyWithNan(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.new_empty.default and result.is_floating_point():
            result.fill_(float("nan"))
        return result


def nan_filled_buffers() -> TorchDispatchMode:
    """Context in which `new_empty` returns nan, so that elements that a kernel does not write are found."""
    return _FillNewEmptyWithNan()
