"""Reading and writing JSON and safetensors; a damaged file raises a one-line UserError.

Only safetensors are read: `.bin` and `.pt` files are pickles, which can run code. A checkpoint folder is written under
a temporary name and renamed when it is complete.
"""

import json
import os
import shutil
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from peagle.errors import UserError, first_line

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
        raise UserError(f"--device {name}: not usable on this machine ({first_line(error)})") from None
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
        raise UserError(f"{path}: not valid JSON ({first_line(error)})") from None
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

    Files stay open, since parsing the header for every tensor is slow with thousands of them. Reading a tensor twice
    may return the same memory.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._handles: dict[str, Any] = {}  # by tensor name
        for file in self._files():
            with self._explain_errors(file):
                handle = safe_open(folder / file, framework="pt")
                for name in handle.keys():
                    if name in self._handles:
                        raise UserError(f"{folder}: tensor {name!r} is in {file} and in another file")
                    self._handles[name] = handle
                    self.shapes[name] = tuple(handle.get_slice(name).get_shape())

    def _files(self) -> list[str]:
        if (self.folder / INDEX).is_file():
            weight_map = read_json(self.folder / INDEX).get("weight_map")
            files: list[Any] = list(weight_map.values()) if isinstance(weight_map, dict) else [None]
            if not all(isinstance(file, str) and Path(file).name == file for file in files):
                raise UserError(f"{self.folder / INDEX}: weight_map must map tensors to files of the folder")
            return sorted(set(files))
        files = sorted(path.name for path in self.folder.glob("*.safetensors"))
        if not files:
            pickles = sorted(p.name for p in self.folder.iterdir() if p.suffix in (".bin", ".pt", ".pth"))
            hint = f" ({pickles[0]} is a pickle, which is never opened; convert it to safetensors)" if pickles else ""
            raise UserError(f"{self.folder}: no .safetensors file{hint}")
        return files

    @contextmanager
    def _explain_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except (SafetensorError, OSError, struct.error, ValueError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(
                f"{self.folder}: {what!r}: missing, damaged or truncated safetensors ({first_line(error)})"
            ) from None

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._handles:
            raise UserError(f"{self.folder}: tensor {name!r} is missing")
        with self._explain_errors(name):
            return self._handles[name].get_tensor(name)

    def read_entry(self, name: str, index: int) -> Tensor:
        """Reads one index of a tensor's first dimension."""
        with self._explain_errors(name):
            return self._handles[name].get_slice(name)[index]

    def __contains__(self, name: str) -> bool:
        return name in self._handles


def save_checkpoint(tensors: dict[str, Tensor], config: dict[str, Any], folder: Path) -> None:
    """Writes weights and config.json to a new folder."""
    with new_folder(folder) as unfinished:
        write_weights(tensors, unfinished)
        write_json(config, unfinished / "config.json")


def write_weights(tensors: dict[str, Tensor], folder: Path) -> None:
    path = folder / WEIGHTS
    try:
        save_file({n: t.detach().cpu().contiguous() for n, t in tensors.items()}, path, metadata={"format": "pt"})
    except SafetensorError as error:  # for example a full disk
        raise OSError(str(error)) from None
    path.chmod(0o644)  # safetensors makes files readable by the owner only


def write_json(value: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder that becomes `folder`, which must not exist or be empty, at the end of the block."""
    folder = Path(os.path.abspath(folder))  # "." has no name to derive the temporary one from
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: exists already and is not empty; give a new folder")
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}.unfinished")
    try:
        unfinished.mkdir(parents=True)
        yield unfinished
        if folder.exists():
            folder.rmdir()
        unfinished.rename(folder)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror or error})") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
