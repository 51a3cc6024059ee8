"""Logs a training run: a progress line, `log.jsonl`, and TensorBoard if it is installed.

A line of the log is one JSON object of kind "step" or "validation".
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
    """Means over the steps since the record before. Lists are by depth."""

    step: int
    tokens: int
    seconds: float
    loss: float
    loss_by_depth: list[float]
    match_by_depth: list[float]
    accept_by_depth: list[float]
    prefix_match_by_depth: list[float]
    positions_by_depth: list[int]
    lr: float
    grad_norm: float
    tokens_per_second: float
    memory_gb: float


class StepLog:
    """Does nothing on ranks other than the main one."""

    def __init__(self, log: Path, step: int = 0, enabled: bool = True) -> None:
        """TensorBoard events after `step` are discarded."""
        self.log, self.enabled = log, enabled
        self._tensorboard = _open_tensorboard(log.parent / ".training" / "tensorboard", step) if enabled else None
        self._bar: Any = None
        self.best: tuple[int, float] | None = None

    @property
    def size(self) -> int:
        return self.log.stat().st_size if self.log.exists() else 0

    def show_progress(self) -> AbstractContextManager[Any]:
        """A progress bar on a terminal; elsewhere the lines are printed."""
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        screen = Console(stderr=True)
        if not (self.enabled and screen.is_terminal):
            return nullcontext()
        columns = (BarColumn(8), TextColumn("{task.description}"))
        progress = Progress(*columns, console=screen)
        task = progress.add_task("", total=1.0)

        def update(done: float, text: str | None) -> None:
            progress.update(task, completed=done, description=text)  # None keeps the text

        self._bar = (progress, update)
        return progress

    def update_progress(self, progress: float) -> None:
        if self._bar is not None:
            self._bar[1](progress, None)

    def write_step(self, record: StepRecord, progress: float) -> None:
        if not self.enabled:
            return
        self._write({"kind": "step", **asdict(record)})
        seconds_left = record.seconds * (1 - progress) / max(progress, 1e-9)
        text = f"{100 * progress:3.0f}%  {format_record(record, self.best, seconds_left)}"
        if self._bar is not None:
            self._bar[1](progress, text)
        else:
            print(text, flush=True)
        if self._tensorboard is not None:
            for name in ("loss", "lr", "grad_norm", "tokens_per_second", "memory_gb"):
                self._tensorboard.add_scalar(name, getattr(record, name), record.step)
            for name in ("loss", "match", "accept", "prefix_match"):
                for depth, value in enumerate(getattr(record, f"{name}_by_depth")):
                    self._tensorboard.add_scalar(f"{name}/depth_{depth}", value, record.step)

    def write_validation(
        self, step: int, acceptance_length: float, acceptance_rates: list[float], seconds: float, is_best: bool
    ) -> None:
        if not self.enabled:
            return
        values = {"step": step, "acceptance_length": acceptance_length, "acceptance_rates": acceptance_rates}
        self._write({"kind": "validation", **values, "seconds": seconds, "is_best": is_best})
        rates = " ".join(f"{100 * r:.0f}" for r in acceptance_rates)
        best = ", best so far" if is_best else ""
        self.print(f"step {step:,}: acceptance length {acceptance_length:.3f} (accepted by position: {rates}%){best}")
        if is_best:
            self.best = (step, acceptance_length)
        if self._tensorboard is not None:
            self._tensorboard.add_scalar("acceptance_length", acceptance_length, step)

    def print(self, text: str) -> None:
        if not self.enabled:
            return
        if self._bar is not None:
            self._bar[0].console.print(text, highlight=False, markup=False)
        else:
            print(text, flush=True)

    def close(self) -> None:
        if self._tensorboard is not None:
            self._tensorboard.close()

    def _write(self, values: dict[str, Any]) -> None:
        try:
            with self.log.open("a", encoding="utf-8") as file:
                file.write(json.dumps(_round_floats(values)) + "\n")
        except OSError as error:
            raise UserError(
                f"{self.log}: cannot be written ({error.strerror}); the saved training state is intact"
            ) from None


def format_record(record: StepRecord, best: tuple[int, float] | None, seconds_left: float) -> str:
    """0:12:31 left  step 1,200  loss 2.131  match 61 44 33%  best 2.31 at 1,000  lr 8.1e-04  212k tokens/s  41.2 GB"""
    match = " ".join(f"{100 * m:.0f}" for m in record.match_by_depth)
    speed = record.tokens_per_second
    hours, seconds = divmod(round(seconds_left), 3600)
    parts = [
        f"{hours}:{seconds // 60:02}:{seconds % 60:02} left",
        f"step {record.step:,}",
        f"loss {record.loss:.3f}",
        f"match {match}%",
    ]
    parts += [f"best {best[1]:.2f} at {best[0]:,}"] if best is not None else []
    parts += [f"lr {record.lr:.1e}", f"{speed / 1e3:.0f}k tokens/s" if speed >= 1e4 else f"{speed:.0f} tokens/s"]
    parts += [f"{record.memory_gb:.1f} GB"] if record.memory_gb else []
    return "  ".join(parts)


def _round_floats(value: Any) -> Any:
    """Nine digits distinguish any two fp32 numbers."""
    if isinstance(value, float):
        return float(f"{value:.9g}")
    if isinstance(value, list):
        return [_round_floats(v) for v in value]
    return {k: _round_floats(v) for k, v in value.items()} if isinstance(value, dict) else value


def _open_tensorboard(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=step + 1)
