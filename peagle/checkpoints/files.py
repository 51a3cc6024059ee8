"""JSON and safetensors in and out of a folder, with one clear line when a file is not what it says.

Knows nothing about models. Reads safetensors only: a pickle can run code, so `.bin` and `.pt` are never
opened. A whole checkpoint folder is written beside its place and moved in when complete.
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
    """A device that is really there."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"--device {name}: not usable on this machine ({reason})") from None
    return device


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; anything else is refused by name."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:  # bytes, syntax, or a number of thousands of digits
        raise UserError(f"{path}: not valid JSON ({str(error).splitlines()[0]})") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def read_config_json(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder}: no config.json in it, so not a checkpoint folder")
    return read_json(folder / "config.json")


class SafetensorsFolder:
    """The tensors of a folder, read one at a time; the header alone tells names, shapes and dtypes.

    `keep_open`: for files of thousands of tensors, whose names are read whenever one is opened. A tensor that is read
    twice may then be the same memory twice.
    """

    def __init__(self, folder: Path, keep_open: bool = False) -> None:
        self.folder = folder
        self._handles: dict[str, Any] | None = {} if keep_open else None
        self.file_of: dict[str, str] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for file in self._files():
            with self._opened(file) as handle:
                for name in handle.keys():  # not a dict
                    if name in self.file_of:
                        raise UserError(f"{folder}: tensor {name!r} is in {self.file_of[name]} and in {file}")
                    self.file_of[name] = file
                    self.shapes[name] = tuple(handle.get_slice(name).get_shape())
        self._check_index()

    def _files(self) -> list[str]:
        if (self.folder / INDEX).is_file():
            listed = self._weight_map().values()
            return sorted(set(listed))
        files = sorted(path.name for path in self.folder.glob("*.safetensors"))
        if not files:
            other = sorted(p.name for p in self.folder.iterdir() if p.suffix in (".bin", ".pt", ".pth"))
            hint = f" ({other[0]} is a pickle and never opened; convert it to safetensors)" if other else ""
            raise UserError(f"{self.folder}: no .safetensors file in it{hint}")
        return files

    def _weight_map(self) -> dict[str, str]:
        where = self.folder / INDEX
        listed = read_json(where).get("weight_map")
        if not isinstance(listed, dict) or not all(isinstance(f, str) for f in listed.values()):
            raise UserError(f"{where}: no usable weight_map in it")
        here = {path.name for path in self.folder.iterdir() if path.is_file()}
        for file in listed.values():
            if Path(file).name != file:
                raise UserError(f"{where}: {file!r} points outside the folder")
            if file not in here:
                raise UserError(f"{self.folder}: {INDEX} names {file!r}, which is not there")
        return listed

    def _check_index(self) -> None:
        if (self.folder / INDEX).is_file():
            absent = [name for name in self._weight_map() if name not in self.file_of]
            if absent:
                raise UserError(
                    f"{self.folder}: {INDEX} lists {absent[0]!r}, which no shard holds ({len(absent)} such)"
                )

    @contextmanager
    def _opened(self, file: str) -> Iterator[Any]:
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
        with self._opened(self.file_of[name]) as handle:
            return handle.get_tensor(name)

    def part(self, name: str, index: int) -> Tensor:
        """One entry of its first dimension, without reading the others."""
        with self._opened(self.file_of[name]) as handle:
            return handle.get_slice(name)[index]

    def __contains__(self, name: str) -> bool:
        return name in self.file_of


def write_weights(tensors: dict[str, Tensor], folder: Path, max_shard_bytes: int | None = None) -> None:
    """One file, or shards with an index when a limit is given and the tensors outgrow it."""
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
    except SafetensorError as error:  # a full disk, in its words
        raise OSError(str(error)) from None
    path.chmod(0o644)  # safetensors writes for its owner alone, which a shared folder does not want


def write_json(value: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Fills a temporary folder and moves it to its place, so that half a checkpoint is never seen.

    A folder that is there already is refused unless it is empty: nothing of the user's is overwritten.
    """
    folder = Path(os.path.abspath(folder))  # "." has no name to put another beside
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: exists already and is not empty; name a new folder")
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
