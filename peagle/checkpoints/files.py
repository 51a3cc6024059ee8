"""Reading and writing JSON and safetensors; a damaged file raises a one-line UserError.

Only safetensors are read: `.bin` and `.pt` files are pickles, which can run code. A checkpoint folder is written under
a temporary name and renamed when it is complete.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from peagle.errors import UserError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def parse_dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise UserError(f"--dtype {name}: must be one of {', '.join(DTYPES)}")
    return DTYPES[name]


def parse_device(name: str) -> torch.device:
    """Returns the device, checked to be usable on this machine."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"--device {name}: not usable on this machine ({reason})") from None
    return device


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:  # invalid UTF-8, syntax errors, or numbers with too many digits
        raise UserError(f"{path}: not valid JSON ({str(error).splitlines()[0]})") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def read_config_json(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder}: not a checkpoint folder, since it has no config.json")
    return read_json(folder / "config.json")


class SafetensorsFolder:
    """The tensors of a folder's safetensors files, read one at a time. Headers give names and shapes.

    `keep_open` avoids parsing the header for every tensor, which is slow with thousands of them. Reading a tensor twice
    may then return the same memory.
    """

    def __init__(self, folder: Path, keep_open: bool = False) -> None:
        self.folder = folder
        self._handles: dict[str, Any] | None = {} if keep_open else None
        self.file_of: dict[str, str] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for file in self._files():
            with self._open(file) as handle:
                for name in handle.keys():
                    if name in self.file_of:
                        raise UserError(f"{folder}: tensor {name!r} is in both {self.file_of[name]} and {file}")
                    self.file_of[name] = file
                    self.shapes[name] = tuple(handle.get_slice(name).get_shape())
        self._check_index()

    def _files(self) -> list[str]:
        if (self.folder / INDEX).is_file():
            return sorted(set(self._weight_map().values()))
        files = sorted(path.name for path in self.folder.glob("*.safetensors"))
        if not files:
            pickles = sorted(p.name for p in self.folder.iterdir() if p.suffix in (".bin", ".pt", ".pth"))
            hint = f" ({pickles[0]} is a pickle, which is never opened; convert it to safetensors)" if pickles else ""
            raise UserError(f"{self.folder}: no .safetensors file{hint}")
        return files

    def _weight_map(self) -> dict[str, str]:
        path = self.folder / INDEX
        weight_map = read_json(path).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
            raise UserError(f"{path}: no usable weight_map")
        present = {path.name for path in self.folder.iterdir() if path.is_file()}
        for file in weight_map.values():
            if Path(file).name != file:
                raise UserError(f"{path}: {file!r} points outside the folder")
            if file not in present:
                raise UserError(f"{self.folder}: {INDEX} names {file!r}, which does not exist")
        return weight_map

    def _check_index(self) -> None:
        if (self.folder / INDEX).is_file():
            missing = [name for name in self._weight_map() if name not in self.file_of]
            if missing:
                raise UserError(
                    f"{self.folder}: {INDEX} lists {missing[0]!r}, which is in no shard ({len(missing)} such tensors)"
                )

    @contextmanager
    def _open(self, file: str) -> Iterator[Any]:
        try:
            if self._handles is None:
                with safe_open(self.folder / file, framework="pt") as handle:
                    yield handle
                return
            if file not in self._handles:
                self._handles[file] = safe_open(self.folder / file, framework="pt")
            yield self._handles[file]
        except (SafetensorError, OSError, struct.error) as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"{self.folder / file}: damaged or truncated safetensors ({reason})") from None

    def names(self) -> list[str]:
        return list(self.file_of)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.file_of:
            raise UserError(f"{self.folder}: tensor {name!r} is missing")
        with self._open(self.file_of[name]) as handle:
            return handle.get_tensor(name)

    def read_entry(self, name: str, index: int) -> Tensor:
        """Reads one index of a tensor's first dimension."""
        with self._open(self.file_of[name]) as handle:
            return handle.get_slice(name)[index]

    def __contains__(self, name: str) -> bool:
        return name in self.file_of


def write_weights(tensors: dict[str, Tensor], folder: Path, max_shard_bytes: int | None = None) -> None:
    """Writes one file, or shards of at most `max_shard_bytes` with an index."""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if max_shard_bytes is not None and shards[-1] and size + tensor.nbytes > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor.detach().cpu().contiguous()
        size += tensor.nbytes
    if len(shards) == 1:
        _save(shards[0], folder / WEIGHTS)
        return
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards, start=1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        _save(shard, folder / file)
        weight_map |= dict.fromkeys(shard, file)
    total = sum(t.nbytes for t in tensors.values())
    write_json({"metadata": {"total_size": total}, "weight_map": weight_map}, folder / INDEX)


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:  # for example a full disk
        raise OSError(str(error)) from None
    path.chmod(0o644)  # safetensors makes files readable by the owner only


def write_json(value: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Calls `fill` with a temporary folder and renames it to `folder`, which must not exist or be empty."""
    folder = Path(os.path.abspath(folder))  # "." has no name to derive the temporary one from
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: exists already and is not empty; give a new folder")
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}.unfinished")
    try:
        unfinished.mkdir(parents=True)
        fill(unfinished)
        if folder.exists():
            folder.rmdir()
        unfinished.rename(folder)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror or error})") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
