"""The folder of a run: the published checkpoint, and the training state to resume from.

    OUT/config.json, model.safetensors, README.md    the best drafter so far, a plain checkpoint
    OUT/recipe.toml, log.jsonl                       the settings and the log
    OUT/.training/step-00001000-0/                   master weights, optimizer moments, data cursor
    OUT/.training/best/                              hard links to the published files

A state is written under a temporary name, synced and renamed; only then is the previous one removed. So a kill or a
full disk at any moment leaves the newest complete state. Safetensors and JSON only.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from peagle.checkpoints.files import SafetensorsFolder, read_json, write_json, write_weights
from peagle.data.batches import BatchCursor
from peagle.errors import UserError

FORMAT = 1  # increase when the meaning of a saved state changes
UNFINISHED = "unfinished-"


@dataclass(frozen=True)
class TrainingState:
    """Everything besides tensors that another process needs to resume exactly."""

    step: int = 0
    batches: int = 0  # consumed by all ranks
    tokens: int = 0  # of those batches
    seconds: float = 0.0  # of training
    log_bytes: int = 0  # size of log.jsonl at this step
    unlogged_steps: int = 0  # since its last line; their metrics are among the tensors
    unlogged_tokens: int = 0
    unlogged_seconds: float = 0.0
    best_acceptance: float | None = None
    best_step: int | None = None
    cursor: BatchCursor = BatchCursor()  # the next batch


class RunFolder:
    def __init__(self, out: Path) -> None:
        self.out = Path(os.path.abspath(out))
        self.inner = self.out / ".training"
        self.best, self.replaced = self.inner / "best", self.inner / f"{UNFINISHED}replaced"
        self.log = self.out / "log.jsonl"
        self.recipe = self.out / "recipe.toml"

    def create(self) -> None:
        """Creates the folder, or accepts one that is empty or holds a run."""
        is_free = self.inner.is_dir() or not self.out.exists()
        if not is_free and (not self.out.is_dir() or any(self.out.iterdir())):
            raise UserError(f"--out {self.out}: exists and holds no training run; name a new folder")
        try:
            self.inner.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--out {self.out}: cannot be created ({error.strerror})") from None

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Admits one process at a time; the lock ends with the process."""
        with (self.inner / "lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise UserError(f"--out {self.out}: another process is training in this folder") from None
            yield

    def newest_state(self) -> Path | None:
        return next(reversed(self._states()), None)

    def save(self, state: TrainingState, tensors: dict[str, Tensor], layout: list[list[object]]) -> None:
        """Writes a state and removes the previous one; if writing fails, the previous one stays."""

        def write(folder: Path) -> None:
            write_weights(tensors, folder)
            write_json({"format": FORMAT, **asdict(state), "layout": layout}, folder / "state.json")

        previous, name = self._states(), f"step-{state.step:08d}"
        repeats = sum(path.name.startswith(f"{name}-") for path in previous)
        self._write_folder(self.inner / f"{name}-{repeats}", write)
        for path in previous:
            self._remove(path)

    def load(self, layout: list[list[object]]) -> tuple[TrainingState, dict[str, Tensor]] | None:
        """The newest state, after a check that its parameters have this layout; None without a state."""
        folder = self.newest_state()
        if folder is None:
            return None
        values = read_json(folder / "state.json")
        state = _parse_state(values, folder)
        if values.get("layout") != layout:
            raise UserError(f"{folder}: the state belongs to a drafter of another shape; name a new --out")
        weights = SafetensorsFolder(folder)
        return state, {name: weights[name] for name in weights.shapes}

    def read_state(self) -> TrainingState:
        """The newest state without its tensors; the initial state if there is none."""
        folder = self.newest_state()
        return _parse_state(read_json(folder / "state.json"), folder) if folder is not None else TrainingState()

    def replace_file(self, name: str, text: str) -> None:
        """Replaces a text file of the published checkpoint atomically."""
        self.replace_text(self.best / name, text)
        self._link_best()

    def publish(self, write: Callable[[Path], None]) -> None:
        """Publishes the files that `write` puts into an empty folder."""
        self._write_folder(self.best, write)
        self._link_best()

    def recover(self) -> None:
        """Completes or removes what a killed process left unfinished."""
        if self.replaced.exists() and not self.best.exists():
            self.replaced.rename(self.best)
        for path in self._states()[:-1]:
            self._remove(path)
        for path in self.inner.glob(f"{UNFINISHED}*"):
            shutil.rmtree(path, ignore_errors=True)
        if self.best.exists():
            self._link_best()

    def truncate_log(self, size: int) -> None:
        """Removes lines of steps that will run again."""
        if self.log.exists() and self.log.stat().st_size > size:
            os.truncate(self.log, size)

    def replace_text(self, path: Path, text: str) -> None:
        """Replaces a text file of the run atomically."""
        unfinished = self.out / f".{path.name}.{UNFINISHED}"
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)

    def _states(self) -> list[Path]:
        return sorted(self.inner.glob("step-*"))  # a step saved twice has a higher last number

    def _link_best(self) -> None:
        """Links the best checkpoint's files into OUT, each atomically; `recover` completes an interrupted call."""
        names = {path.name for path in self.best.iterdir()}
        for path in self.best.iterdir():
            temporary = self.out / f".{path.name}.{UNFINISHED}"
            temporary.unlink(missing_ok=True)
            try:
                os.link(path, temporary)
            except OSError:  # the file system has no hard links
                shutil.copyfile(path, temporary)
            temporary.replace(self.out / path.name)
            temporary.unlink(missing_ok=True)  # rename does nothing if both are links to the same file
        for path in self.out.glob("model*.safetensors*"):
            if path.name not in names:  # shards of an earlier checkpoint
                path.unlink()

    def _remove(self, path: Path) -> None:
        """Renames before deleting, so that a partly deleted folder never looks like a state."""
        removed = self.inner / f"{UNFINISHED}{path.name}"
        shutil.rmtree(removed, ignore_errors=True)
        path.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)

    def _write_folder(self, folder: Path, write: Callable[[Path], None]) -> None:
        unfinished = self.inner / f"{UNFINISHED}{folder.name}"
        for path in (unfinished, self.replaced):
            shutil.rmtree(path, ignore_errors=True)
        try:
            unfinished.mkdir(parents=True)
            write(unfinished)
            for path in [*unfinished.iterdir(), unfinished]:
                _sync(path)
            if folder.exists():
                folder.rename(self.replaced)
            unfinished.rename(folder)
            _sync(self.inner)
        except OSError as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            reason = error.strerror or str(error).splitlines()[0]
            raise UserError(f"--out {self.out}: cannot be written ({reason}); earlier states are intact") from None
        shutil.rmtree(self.replaced, ignore_errors=True)


def _parse_state(values: dict[str, Any], folder: Path) -> TrainingState:
    if values.get("format") != FORMAT:
        raise UserError(f"{folder}: the state was saved by another version of peagle; name a new --out")
    try:
        known = {f.name: values[f.name] for f in fields(TrainingState)}
        return TrainingState(**{**known, "cursor": BatchCursor(**known["cursor"])})
    except (KeyError, TypeError):
        raise UserError(f"{folder / 'state.json'}: damaged; delete the folder {folder} to start again") from None


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_log(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
