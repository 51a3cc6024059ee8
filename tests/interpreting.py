"""Triton's interpreter for tests. It is chosen when Triton is imported, so each test file runs itself as a script."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def check_in_a_child(file: str) -> None:
    """Fails, not skips, where triton is not installed: nothing else runs these kernels without a GPU."""
    root = Path(__file__).resolve().parent.parent
    path = os.pathsep.join([str(root), str(root / "tests"), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, file], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    assert "kernels checked" in done.stdout


def mend_interpreter() -> None:
    """Triton 3.6 makes loop bounds of one-element arrays by int(), which numpy 2.4 refuses. Half its time goes into
    what changes no result: the language is patched anew for each function that a kernel calls, and sums and products
    of integers are checked for overflow, of which tensors as small as here have none.

    And programs run one after another: the last one first from here on, as a GPU would hardly ever. Kernels must not
    depend on the order, which in the usual one nobody would notice."""
    from triton import language as tl
    from triton.runtime import interpreter

    patch_tensor, patch = interpreter._patch_lang_tensor, interpreter._patch_lang
    patched: set[int] = set()  # ids of the modules that are patched now

    def patch_and_mend(tensor, scope) -> None:  # type: ignore[no-untyped-def]
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    @cache
    def seen_by(fn: Any) -> frozenset[int]:
        return frozenset(id(value) for value in fn.__globals__.values() if value is tl or value is tl.core)

    class Scope:
        def __init__(self, fn: Any) -> None:
            self.new = seen_by(fn) - patched
            self.inner = patch(fn) if self.new else None
            patched.update(self.new)

        def restore(self) -> None:
            if self.inner is not None:
                self.inner.restore()
            patched.difference_update(self.new)

    interpreter._patch_lang_tensor, interpreter._patch_lang = patch_and_mend, Scope
    builder = interpreter.interpreter_builder
    builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    set_index = builder.set_grid_idx
    builder.set_grid_idx = lambda *at: set_index(*(n - 1 - i for n, i in zip(builder.grid_dim, at, strict=True)))


class _Poison(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.new_empty.default and result.is_floating_point():
            result.fill_(float("nan"))
        return result


def poisoned() -> TorchDispatchMode:
    """new_empty gives nan for as long as this is entered: whatever a kernel does not write is found."""
    return _Poison()
