"""A run's folder: the plain checkpoint on top, the state it goes on from below, each whole or not there.

    OUT/config.json, model.safetensors, README.md    the best drafter so far, loadable by anyone
    OUT/recipe.toml, log.jsonl                       what was asked for, and how it went
    OUT/.training/step-00001000-0/                   masters, optimizer moments, where the data stands
    OUT/.training/best/                              the same files as on top; linked, so they take no room

Knows nothing about training: it keeps tensors and a `TrainingState`. A state is written under another name, synced,
renamed, and only then is the one before it removed; so a process that is killed, or a disk that is full, at any
moment leaves the newest whole state. Safetensors and JSON only.
"""

from __future__ import annotations

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

FORMAT = 1  # raised when the meaning of a saved state changes
UNFINISHED = "unfinished-"


@dataclass(frozen=True)
class TrainingState:
    """Where a run is: what another process needs beside the tensors to go on as if nothing had happened."""

    step: int = 0
    batches: int = 0  # taken from the data, over all ranks
    tokens: int = 0  # of those batches
    seconds: float = 0.0  # of training
    log_bytes: int = 0  # of log.jsonl that belong to these steps
    unlogged_steps: int = 0  # since its last line; their sums are among the tensors
    unlogged_tokens: int = 0
    unlogged_seconds: float = 0.0
    best_acceptance: float | None = None
    best_step: int | None = None
    cursor: BatchCursor = BatchCursor()  # the batch that comes next


class RunFolder:
    def __init__(self, out: Path) -> None:
        self.out = Path(os.path.abspath(out))
        self.inner = self.out / ".training"
        self.log = self.out / "log.jsonl"
        self.recipe = self.out / "recipe.toml"

    def create(self) -> None:
        """Makes the folder, or accepts one that holds a run or nothing."""
        if self.out.exists() and not self.inner.is_dir():
            if not self.out.is_dir() or any(self.out.iterdir()):
                raise UserError(f"--out {self.out}: exists already and holds no run; name a new folder")
        try:
            self.inner.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--out {self.out}: cannot be made ({error.strerror})") from None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One process at a time; the lock goes with the process, however it ends."""
        with (self.inner / "lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise UserError(f"--out {self.out}: another process is training there") from None
            yield

    @property
    def started(self) -> bool:
        return self.recipe.is_file()

    def newest(self) -> Path | None:
        """The state to go on from."""
        states = sorted(self.inner.glob("step-*"))  # a step may have been saved twice, numbered then
        return states[-1] if states else None

    def save(self, standing: TrainingState, tensors: dict[str, Tensor], layout: list[list[object]]) -> None:
        """Afterwards this is the only state; if it cannot be written the one before it stays."""

        def write(into: Path) -> None:
            write_weights(tensors, into)
            write_json({"format": FORMAT, **asdict(standing), "layout": layout}, into / "state.json")

        before = sorted(self.inner.glob("step-*"))
        kept = f"the state of step {_step_of(before[-1])} is whole" if before else "nothing was saved before"
        again = sum(_step_of(path) == standing.step for path in before)
        place = self.inner / f"step-{standing.step:08d}-{again}"
        self._put(place, write, kept)
        for path in before:
            self._remove(path)

    def load(self, layout: list[list[object]]) -> tuple[TrainingState, dict[str, Tensor]] | None:
        """The newest state, if there is one and it is one of this drafter."""
        place = self.newest()
        if place is None:
            return None
        values = read_json(place / "state.json")
        standing = _standing(values, place)
        if values.get("layout") != layout:
            raise UserError(f"{place}: a state of a drafter of another shape; name a new --out")
        weights = SafetensorsFolder(place)
        return standing, {name: weights[name] for name in weights.names()}

    def standing(self) -> TrainingState:
        """Of the newest state; the beginning if there is none."""
        place = self.newest()
        return _standing(read_json(place / "state.json"), place) if place is not None else TrainingState()

    def amend(self, write: Callable[[Path], None]) -> None:
        """Lets `write` replace files of the checkpoint, each as a whole."""
        write(self.inner / "best")
        self._show()

    def publish(self, write: Callable[[Path], None]) -> None:
        """Makes what `write` fills a folder with the checkpoint of this run."""
        best = self.inner / "best"
        aside = self.inner / f"{UNFINISHED}replaced"
        shutil.rmtree(aside, ignore_errors=True)
        kept = "the checkpoint before it is whole" if best.exists() else "there is none before it"
        self._put(best, write, kept, aside)
        self._show()

    def tidy(self) -> None:
        """Ends what a killed process began, and removes what it left half done."""
        aside, best = self.inner / f"{UNFINISHED}replaced", self.inner / "best"
        if aside.exists() and not best.exists():
            aside.rename(best)
        for path in sorted(self.inner.glob("step-*"))[:-1]:
            self._remove(path)
        for path in self.inner.glob(f"{UNFINISHED}*"):
            shutil.rmtree(path, ignore_errors=True)
        if best.exists():
            self._show()

    def cut_log(self, size: int) -> None:
        """Forgets lines of steps that will be taken again."""
        if self.log.exists() and self.log.stat().st_size > size:
            os.truncate(self.log, size)

    def start(self, recipe: str) -> None:
        unfinished = self.recipe.with_name(f".{self.recipe.name}.{UNFINISHED}")
        unfinished.write_text(recipe, encoding="utf-8")
        unfinished.replace(self.recipe)

    def _show(self) -> None:
        """The best checkpoint's files, on top. Each appears whole; a mixture lasts until `tidy` at the latest."""
        best = self.inner / "best"
        names = {path.name for path in best.iterdir()}
        for path in best.iterdir():
            beside = self.out / f".{path.name}.{UNFINISHED}"
            beside.unlink(missing_ok=True)
            try:
                os.link(path, beside)
            except OSError:  # a file system without links
                shutil.copyfile(path, beside)
            beside.replace(self.out / path.name)
            beside.unlink(missing_ok=True)  # a link is not renamed onto a link to the same file
        for path in self.out.glob("model*.safetensors*"):
            if path.name not in names:  # shards of a checkpoint that was cut otherwise
                path.unlink()

    def _remove(self, path: Path) -> None:
        """Takes its name first, so that half of it never passes for a state."""
        gone = self.inner / f"{UNFINISHED}{path.name}"
        shutil.rmtree(gone, ignore_errors=True)
        path.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)

    def _put(self, place: Path, write: Callable[[Path], None], kept: str, aside: Path | None = None) -> None:
        unfinished = self.inner / f"{UNFINISHED}{place.name}"
        shutil.rmtree(unfinished, ignore_errors=True)
        try:
            unfinished.mkdir(parents=True)
            write(unfinished)
            for path in [*unfinished.iterdir(), unfinished]:
                _sync(path)
            if aside is not None and place.exists():
                place.rename(aside)
            unfinished.rename(place)
            _sync(self.inner)
        except OSError as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            reason = error.strerror or str(error).splitlines()[0]
            raise UserError(f"--out {self.out}: cannot be written ({reason}); {kept}") from None
        if aside is not None:
            shutil.rmtree(aside, ignore_errors=True)


def _standing(values: dict[str, Any], place: Path) -> TrainingState:
    if values.get("format") != FORMAT:
        raise UserError(f"{place}: a state of another version of peagle; name a new --out")
    try:
        own = {f.name: values[f.name] for f in fields(TrainingState)}
        return TrainingState(**{**own, "cursor": BatchCursor(**own["cursor"])})
    except (KeyError, TypeError):
        raise UserError(f"{place / 'state.json'}: damaged; delete the folder {place} to start anew") from None


def _step_of(state: Path) -> int:
    return int(state.name.split("-")[1])


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def log_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
