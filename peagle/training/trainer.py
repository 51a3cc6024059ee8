"""The training loop: batches in, a drafter that is measured, chosen and saved out.

Knows nothing about where batches, aux states and measurements come from. A step: the target's states of each batch, all
gradients of it (`partition.accumulate`), their sum over ranks, one step of the optimizer. The GPU is waited for only
when a line is logged, a state saved or acceptance measured; until then sums stay on the device, and so does the number
of the first step that went wrong. The checkpoint is the drafter with the longest measured acceptance, not the lowest
loss.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor

from peagle.config import TrainConfig
from peagle.data.batches import PackedBatch
from peagle.errors import UserError
from peagle.models.decoder import Decoder
from peagle.models.drafter import Drafter
from peagle.training.cod_sampling import CodPositions
from peagle.training.cuda_graphs import BatchPadder, GraphedStep, PaddedBatch
from peagle.training.distributed import DistributedContext
from peagle.training.hidden_states.online import HiddenStatesSource
from peagle.training.loss import DepthMetrics, LossSettings, depth_weights, row_weights
from peagle.training.optimizer import Optimizer
from peagle.training.partition import accumulate_gradients
from peagle.training.resume import RunFolder, TrainingState
from peagle.training.schedule import Schedule
from peagle.training.step_loader import BatchStream, StepInputs, StepLoader
from peagle.training.step_log import StepLog, StepRecord
from peagle.training.validation import ValidationAcceptance


@dataclass(frozen=True)
class TrainerParts:
    """What a trainer is put together from."""

    drafter: Drafter
    target: Decoder
    hidden_states: HiddenStatesSource
    stream: BatchStream
    schedule: Schedule
    folder: RunFolder
    world: DistributedContext
    measure: Callable[[Drafter], ValidationAcceptance] | None  # the first rank's
    write_checkpoint: Callable[[Path, TrainingState, ValidationAcceptance | None], None]  # into an empty folder
    chunk_rows: int
    stop_at: float | None = None  # by the process's clock
    framed: tuple[BatchPadder, GraphedStep] | None = None  # for those batches that fit a frame


class Trainer:
    def __init__(self, parts: TrainerParts, cfg: TrainConfig) -> None:
        self.parts, self.cfg = parts, cfg
        self.world, self.folder, self.schedule = parts.world, parts.folder, parts.schedule
        self.optimizer = Optimizer(parts.drafter, cfg)
        self.device = self.optimizer.grad_P.device
        self.window = LogWindow.opened(cfg.num_depths, self.device)
        self.standing = TrainingState()
        found = self.folder.load(self.optimizer.layout())
        if found is not None:
            self.standing, tensors = found
            self.optimizer.restore(tensors, self.standing.step)
            if self.world.first:  # the sum over ranks, so one of them keeps it
                self.window.totals += DepthMetrics(*tensors["unlogged"].to(self.device))
        self.resumed = found is not None
        self.journal = StepLog(self.folder.log, self.standing.step, self.world.first)
        if self.world.first:
            self.folder.cut_log(self.standing.log_bytes)
        if self.standing.best_step is not None and self.standing.best_acceptance is not None:
            self.journal.best = (self.standing.best_step, self.standing.best_acceptance)
        self.weights = depth_weights(cfg.num_depths, cfg.depth_decay)
        self.asked_to_stop = False
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self.clock = self.saved = time.perf_counter()

    def run(self) -> TrainingState:
        framer = self.parts.framed[0] if self.parts.framed is not None else None
        feed = StepLoader(self.parts.stream, self.cfg, self.world, self.standing, framer)
        done, stop = self._done(), False
        with self._signals(), self.journal.watching(), feed.running() as portions:
            self.clock = self.saved = time.perf_counter()
            while done < 1.0 and not stop:
                portion = next(portions)
                counts, tokens, done, stop, save = self._agree(portion)
                self._step(portion, counts, tokens, done)
                done = max(done, self.schedule.done(self.standing.step, 0.0))
                self.journal.moved(done)
                if done >= 1.0 or self._every(self.cfg.log_every):
                    self._log(done)
                if done >= 1.0 or self._every(self.cfg.measure_every):
                    self._measure()
                if done >= 1.0 or stop or save:
                    self._save()
        self.journal.close()
        return self.standing

    def _every(self, steps: int) -> bool:
        return steps > 0 and self.standing.step % steps == 0

    def _agree(self, portion: StepInputs) -> tuple[tuple[int, ...], int, float, bool, bool]:
        """What all ranks must hold alike: rows of the step by depth and its tokens, how far the run is, whether to
        stop or save after it."""
        now, limit = time.perf_counter(), self.parts.stop_at
        stop = self.asked_to_stop or (limit is not None and now > limit)
        save = now - self.saved > 60 * self.cfg.save_minutes
        first = [self._done(), float(save)] if self.world.first else [0.0, 0.0]
        told = [*portion.counts, portion.tokens, *first, float(stop)]
        *counts, tokens, done, saves, stops = self.world.sum_numbers(told)
        return tuple(int(c) for c in counts), int(tokens), done, stops > 0, saves > 0

    def _step(self, portion: StepInputs, counts: tuple[int, ...], tokens: int, done: float) -> None:
        cfg = self.cfg
        with self._own_stream():
            for (batch, rows), framed in zip(portion.batches, portion.framed, strict=True):
                self.window.totals += self._gradients(batch, rows, framed, counts)
            self.world.sum_in_place(self.optimizer.collect())
            lr = self.schedule.rate(self.standing.step, done)
            self.window.note(self.optimizer.step(lr), lr, self.standing.step + 1, portion)
        now = time.perf_counter()
        self.standing = replace(
            self.standing,
            step=self.standing.step + 1,
            batches=self.standing.batches + cfg.accumulate * self.world.size,
            tokens=self.standing.tokens + tokens,
            seconds=self.standing.seconds + now - self.clock,
            unlogged_steps=self.standing.unlogged_steps + 1,
            unlogged_tokens=self.standing.unlogged_tokens + tokens,
            unlogged_seconds=self.standing.unlogged_seconds + now - self.clock,
            cursor=portion.cursor,
        )
        self.clock = now

    def _gradients(
        self, batch: PackedBatch, rows: CodPositions, framed: PaddedBatch | None, counts: tuple[int, ...]
    ) -> DepthMetrics:
        parts, cfg = self.parts, self.cfg
        if framed is not None and parts.framed is not None:
            return parts.framed[1].accumulate(framed, row_weights(counts, self.weights))
        return accumulate_gradients(
            parts.drafter,
            parts.target,
            parts.hidden_states.states(batch),
            batch,
            rows,
            LossSettings.of(cfg),
            self.weights,
            parts.chunk_rows,
            counts,
        )

    @contextmanager
    def _own_stream(self) -> Iterator[None]:
        """Graphs cannot be captured on a GPU's default stream, and what accumulates gradients stays on the stream where
        it was first: so all steps run on one of their own, in turn with everything else."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield
        torch.cuda.current_stream().wait_stream(self.stream)

    def _done(self) -> float:
        running = time.perf_counter() - self.clock
        return self.schedule.done(self.standing.step, self.standing.seconds + running)

    def _log(self, done: float) -> None:
        self._check_finite()
        sums = self.window.sums()
        self.world.sum_in_place(sums)
        memory = torch.cuda.max_memory_allocated(self.device) / 1e9 if self.device.type == "cuda" else 0.0
        line = self.window.line(sums, self.weights, self.standing, memory)
        self.window = LogWindow.opened(self.cfg.num_depths, self.device)
        self.journal.line(line, done)
        none = replace(self.standing, unlogged_steps=0, unlogged_tokens=0, unlogged_seconds=0.0)
        self.standing = replace(none, log_bytes=self.journal.size)

    def _check_finite(self) -> None:
        """Ends a run whose numbers are no longer numbers, before anything of it is saved. Waits for the device."""
        window, bad = self.window, int(self.window.bad_step)
        if bad < 0:
            return
        names = next(names for step, names in window.names if step == bad)
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        newest = self.folder.newest()
        left = "nothing was saved yet" if newest is None else f"the state before it is in {newest}"
        raise UserError(
            f"step {bad}: the gradient is not finite; rows of its batch: {shown}; {left}; try a lower --lr or --clip"
        )

    def _measure(self) -> None:
        self._check_finite()
        if self.parts.measure is None:
            return
        started, step = time.perf_counter(), self.standing.step
        measured = self.parts.measure(self.parts.drafter)
        took, best_yet = time.perf_counter() - started, self.standing.best_acceptance
        # a drafter foretells loops with ease, and is not chosen for that
        counted = measured.without_loops if measured.without_loops.rounds else measured
        best = best_yet is None or counted.length > best_yet
        self.journal.measured(step, counted.length, list(counted.per_position), took, best)
        if best:
            self.standing = replace(self.standing, best_acceptance=counted.length, best_step=step)
            self._publish(measured)
        self.standing = replace(self.standing, log_bytes=self.journal.size)
        self.clock = time.perf_counter()

    def _save(self) -> None:
        """The state, and as long as nothing was measured the checkpoint too."""
        self._check_finite()
        if self.standing.best_step is None:
            self._publish(None)
        sums = self.window.sums()
        self.world.sum_in_place(sums)
        if self.world.first:
            tensors = {**self.optimizer.state(), "unlogged": sums}
            self.folder.save(self.standing, tensors, self.optimizer.layout())
        self.clock = self.saved = time.perf_counter()

    def _publish(self, measured: ValidationAcceptance | None) -> None:
        if self.world.first:
            self.folder.publish(lambda into: self.parts.write_checkpoint(into, self.standing, measured))

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """The first Ctrl-C (or SIGTERM) ends after the step; the second ends at once."""

        def ask(number: int, frame: FrameType | None) -> None:
            if self.asked_to_stop:
                raise KeyboardInterrupt
            self.asked_to_stop = True
            self.journal.say("stopping after this step; once more to stop at once, without saving")

        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, ask) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@dataclass
class LogWindow:
    """The steps since the last line of the log. Tensors stay on the device."""

    totals: DepthMetrics
    norm: Tensor
    bad_step: Tensor  # the first whose gradient was not finite, or -1
    names: list[tuple[int, list[str]]]  # rows of each step's batches
    lr: float = 0.0

    @classmethod
    def opened(cls, depths: int, device: torch.device) -> LogWindow:
        bad_step = torch.full((), -1, dtype=torch.long, device=device)
        return cls(DepthMetrics.none(depths, device), torch.zeros((), device=device), bad_step, [])

    def note(self, norm: Tensor, lr: float, step: int, portion: StepInputs) -> None:
        self.norm, self.lr = norm, lr
        self.bad_step = torch.where((self.bad_step < 0) & ~norm.isfinite(), step, self.bad_step)
        self.names.append((step, portion.row_ids))

    def sums(self) -> Tensor:
        return torch.stack(self.totals.tensors())

    def line(self, sums: Tensor, weights: list[float], standing: TrainingState, memory: float) -> StepRecord:
        """Means over all ranks' rows. Waits for the device."""
        rows, *values = sums.tolist()
        loss, accept, match, unbroken = ([x / max(n, 1.0) for x, n in zip(v, rows, strict=True)] for v in values)
        return StepRecord(
            step=standing.step,
            tokens=standing.tokens,
            seconds=standing.seconds,
            loss=math.fsum(w * x for w, x in zip(weights, loss, strict=True)),
            loss_by_depth=loss,
            match_by_depth=match,
            accept_by_depth=accept,
            unbroken_by_depth=unbroken,
            rows_by_depth=[int(n) for n in rows],
            lr=self.lr,
            grad_norm=float(self.norm),
            tokens_per_second=standing.unlogged_tokens / max(standing.unlogged_seconds, 1e-9),
            memory_gb=memory,
        )
