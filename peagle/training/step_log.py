"""How a run goes, told to people and to files: a line to watch, `log.jsonl`, TensorBoard where it is installed.

Knows nothing about training; it is handed finished numbers. A line of the log is one JSON object: of a step
(`"kind": "step"`), a measurement (`"measure"`), or a moment of the run (`"start"`, `"end"`).
"""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from peagle.errors import UserError


@dataclass(frozen=True)
class StepRecord:
    """The steps since the line before. Lists are by depth, and means over rows."""

    step: int
    tokens: int
    seconds: float
    loss: float
    loss_by_depth: list[float]
    match_by_depth: list[float]
    accept_by_depth: list[float]
    unbroken_by_depth: list[float]
    rows_by_depth: list[int]
    lr: float
    grad_norm: float
    tokens_per_second: float
    memory_gb: float


class StepLog:
    """Only the first rank has one that speaks."""

    def __init__(self, log: Path, step: int = 0, speaks: bool = True) -> None:
        """What was told of steps behind `step` is forgotten."""
        self.log, self.speaks = log, speaks
        self._board = _tensorboard(log.parent / ".training" / "tensorboard", step) if speaks else None
        self._bar: Any = None
        self.best: tuple[int, float] | None = None

    @property
    def size(self) -> int:
        return self.log.stat().st_size if self.log.exists() else 0

    def watching(self) -> AbstractContextManager[Any]:
        """The moving line, on a terminal; elsewhere lines come one after another."""
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        screen = Console(stderr=True)
        if not (self.speaks and screen.is_terminal):
            return nullcontext()
        columns = (BarColumn(8), TextColumn("{task.description}"))
        progress = Progress(*columns, console=screen)
        task = progress.add_task("", total=1.0)

        def move(done: float, text: str | None) -> None:
            progress.update(task, completed=done, description=text)  # None leaves the text as it is

        self._bar = (progress, move)
        return progress

    def moved(self, done: float) -> None:
        if self._bar is not None:
            self._bar[1](done, None)

    def line(self, line: StepRecord, done: float) -> None:
        if not self.speaks:
            return
        self._write({"kind": "step", **asdict(line)})
        left = line.seconds * (1 - done) / max(done, 1e-9)
        text = f"{100 * done:3.0f}%  {summary(line, self.best, left)}"
        if self._bar is not None:
            self._bar[1](done, text)
        else:
            print(text, flush=True)
        if self._board is not None:
            for name in ("loss", "lr", "grad_norm", "tokens_per_second", "memory_gb"):
                self._board.add_scalar(name, getattr(line, name), line.step)
            for name in ("loss", "match", "accept", "unbroken"):
                for depth, value in enumerate(getattr(line, f"{name}_by_depth")):
                    self._board.add_scalar(f"{name}/depth_{depth}", value, line.step)

    def measured(self, step: int, acceptance: float, by_position: list[float], seconds: float, best: bool) -> None:
        if not self.speaks:
            return
        values = {"step": step, "acceptance": acceptance, "by_position": by_position, "seconds": seconds, "best": best}
        self._write({"kind": "measure", **values})
        rates = " ".join(f"{100 * r:.0f}" for r in by_position)
        self.say(f"step {step:,}: acceptance length {acceptance:.3f} (drafts accepted: {rates}%){', the best' * best}")
        if best:
            self.best = (step, acceptance)
        if self._board is not None:
            self._board.add_scalar("acceptance", acceptance, step)

    def moment(self, kind: str, **values: Any) -> None:
        if self.speaks:
            self._write({"kind": kind, **values})

    def say(self, text: str) -> None:
        if not self.speaks:
            return
        if self._bar is not None:
            self._bar[0].console.print(text, highlight=False, markup=False)
        else:
            print(text, flush=True)

    def close(self) -> None:
        if self._board is not None:
            self._board.close()

    def _write(self, values: dict[str, Any]) -> None:
        try:
            with self.log.open("a", encoding="utf-8") as file:
                file.write(json.dumps(_rounded(values)) + "\n")
        except OSError as error:
            raise UserError(f"{self.log}: cannot be written ({error.strerror}); the saved state is whole") from None


def summary(line: StepRecord, best: tuple[int, float] | None, left: float) -> str:
    """0:12:31 left  step 1,200  loss 2.131  match 61 44 33%  best 2.31 at 1,000  lr 8.1e-04  212k tokens/s  41.2 GB"""
    match = " ".join(f"{100 * m:.0f}" for m in line.match_by_depth)
    speed = line.tokens_per_second
    hours, seconds = divmod(round(left), 3600)
    parts = [
        f"{hours}:{seconds // 60:02}:{seconds % 60:02} left",
        f"step {line.step:,}",
        f"loss {line.loss:.3f}",
        f"match {match}%",
    ]
    parts += [f"best {best[1]:.2f} at {best[0]:,}"] if best is not None else []
    parts += [f"lr {line.lr:.1e}", f"{speed / 1e3:.0f}k tokens/s" if speed >= 1e4 else f"{speed:.0f} tokens/s"]
    parts += [f"{line.memory_gb:.1f} GB"] if line.memory_gb else []
    return "  ".join(parts)


def _rounded(value: Any) -> Any:
    """Nine digits tell any two fp32 numbers apart."""
    if isinstance(value, float):
        return float(f"{value:.9g}")
    if isinstance(value, list):
        return [_rounded(v) for v in value]
    return {k: _rounded(v) for k, v in value.items()} if isinstance(value, dict) else value


def _tensorboard(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=step + 1)
