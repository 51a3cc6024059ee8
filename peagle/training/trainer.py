"""The training loop.

A step: the target's hidden states of each batch, its gradients (`partition.accumulate_gradients`, or a CUDA graph),
their sum over ranks, one optimizer step. The host waits for the GPU only to log, save or validate; until then metrics
stay on the device. The published checkpoint is the drafter with the longest acceptance length on the validation set,
not the one with the lowest loss.
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
from peagle.training.loss import DepthMetrics, LossSettings, depth_weights, position_weights
from peagle.training.optimizer import Optimizer
from peagle.training.partition import accumulate_gradients
from peagle.training.resume import RunFolder, TrainingState
from peagle.training.schedule import Schedule
from peagle.training.step_loader import BatchStream, StepInputs, StepLoader
from peagle.training.step_log import StepLog, StepRecord
from peagle.training.validation import ValidationAcceptance


@dataclass(frozen=True)
class TrainerParts:
    """The components of a trainer."""

    drafter: Drafter
    target: Decoder
    hidden_states: HiddenStatesSource
    stream: BatchStream
    schedule: Schedule
    folder: RunFolder
    world: DistributedContext
    validate: Callable[[Drafter], ValidationAcceptance] | None  # on the main rank
    write_checkpoint: Callable[[Path, TrainingState, ValidationAcceptance | None], None]  # into an empty folder
    chunk_size: int
    stop_at: float | None = None  # time.perf_counter() at which the run saves and stops
    graphs: tuple[BatchPadder, GraphedStep] | None = None


class Trainer:
    def __init__(self, parts: TrainerParts, cfg: TrainConfig) -> None:
        self.parts, self.cfg = parts, cfg
        self.world, self.folder, self.schedule = parts.world, parts.folder, parts.schedule
        self.optimizer = Optimizer(parts.drafter, cfg)
        self.device = self.optimizer.grad_P.device
        self.window = LogWindow.open(cfg.num_depths, self.device)
        self.state = TrainingState()
        loaded = self.folder.load(self.optimizer.layout())
        if loaded is not None:
            self.state, tensors = loaded
            self.optimizer.restore(tensors, self.state.step)
            if self.world.is_main:  # the saved metrics are sums over ranks
                self.window.metrics += DepthMetrics(*tensors["unlogged"].to(self.device))
        self.resumed = loaded is not None
        self.log = StepLog(self.folder.log, self.state.step, self.world.is_main)
        if self.world.is_main:
            self.folder.truncate_log(self.state.log_bytes)
        if self.state.best_step is not None and self.state.best_acceptance is not None:
            self.log.best = (self.state.best_step, self.state.best_acceptance)
        self.weights = depth_weights(cfg.num_depths, cfg.depth_decay)
        self.stop_requested = False
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self.clock = self.saved_at = time.perf_counter()

    def run(self) -> TrainingState:
        padder = self.parts.graphs[0] if self.parts.graphs is not None else None
        loader = StepLoader(self.parts.stream, self.cfg, self.world, self.state, padder)
        progress, stop = self._progress(), False
        with self._handle_signals(), self.log.show_progress(), loader.prefetching() as steps:
            self.clock = self.saved_at = time.perf_counter()
            while progress < 1.0 and not stop:
                inputs = next(steps)
                counts, num_tokens, progress, stop, save = self._synchronize(inputs)
                self._step(inputs, counts, num_tokens, progress)
                progress = max(progress, self.schedule.progress(self.state.step, 0.0))
                self.log.update_progress(progress)
                if progress >= 1.0 or self._is_due(self.cfg.log_every):
                    self._log(progress)
                if progress >= 1.0 or self._is_due(self.cfg.validation_every):
                    self._validate()
                if progress >= 1.0 or stop or save:
                    self._save()
        self.log.close()
        return self.state

    def _is_due(self, every_steps: int) -> bool:
        return every_steps > 0 and self.state.step % every_steps == 0

    def _synchronize(self, inputs: StepInputs) -> tuple[tuple[int, ...], int, float, bool, bool]:
        """Values all ranks must agree on: positions by depth, tokens, progress, whether to stop, whether to save."""
        now, limit = time.perf_counter(), self.parts.stop_at
        stop = self.stop_requested or (limit is not None and now > limit)
        save = now - self.saved_at > 60 * self.cfg.save_minutes
        from_main = [self._progress(), float(save)] if self.world.is_main else [0.0, 0.0]
        numbers = [*inputs.counts, inputs.num_tokens, *from_main, float(stop)]
        *counts, num_tokens, progress, saves, stops = self.world.sum_numbers(numbers)
        return tuple(int(c) for c in counts), int(num_tokens), progress, stops > 0, saves > 0

    def _step(self, inputs: StepInputs, counts: tuple[int, ...], num_tokens: int, progress: float) -> None:
        cfg = self.cfg
        with self._on_side_stream():
            for (batch, positions), padded in zip(inputs.batches, inputs.padded, strict=True):
                self.window.metrics += self._accumulate(batch, positions, padded, counts)
            self.world.sum_in_place(self.optimizer.collect())
            lr = self.schedule.learning_rate(self.state.step, progress)
            self.window.record(self.optimizer.step(lr), lr, self.state.step + 1, inputs)
        now = time.perf_counter()
        self.state = replace(
            self.state,
            step=self.state.step + 1,
            batches=self.state.batches + cfg.gradient_accumulation_steps * self.world.size,
            tokens=self.state.tokens + num_tokens,
            seconds=self.state.seconds + now - self.clock,
            unlogged_steps=self.state.unlogged_steps + 1,
            unlogged_tokens=self.state.unlogged_tokens + num_tokens,
            unlogged_seconds=self.state.unlogged_seconds + now - self.clock,
            cursor=inputs.cursor,
        )
        self.clock = now

    def _accumulate(
        self, batch: PackedBatch, positions: CodPositions, padded: PaddedBatch | None, counts: tuple[int, ...]
    ) -> DepthMetrics:
        parts, cfg = self.parts, self.cfg
        if padded is not None and parts.graphs is not None:
            return parts.graphs[1].accumulate_gradients(padded, position_weights(counts, self.weights))
        return accumulate_gradients(
            parts.drafter,
            parts.target,
            parts.hidden_states.states(batch),
            batch,
            positions,
            LossSettings.from_config(cfg),
            self.weights,
            parts.chunk_size,
            counts,
        )

    @contextmanager
    def _on_side_stream(self) -> Iterator[None]:
        """Runs steps on one stream that is not the default: graphs cannot be captured on the default stream, and
        autograd accumulates gradients on the stream of their first backward pass."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield
        torch.cuda.current_stream().wait_stream(self.stream)

    def _progress(self) -> float:
        running = time.perf_counter() - self.clock
        return self.schedule.progress(self.state.step, self.state.seconds + running)

    def _log(self, progress: float) -> None:
        self._check_finite()
        sums = self.window.sums()
        self.world.sum_in_place(sums)
        memory = torch.cuda.max_memory_allocated(self.device) / 1e9 if self.device.type == "cuda" else 0.0
        record = self.window.to_record(sums, self.weights, self.state, memory)
        self.window = LogWindow.open(self.cfg.num_depths, self.device)
        self.log.write_step(record, progress)
        logged = replace(self.state, unlogged_steps=0, unlogged_tokens=0, unlogged_seconds=0.0)
        self.state = replace(logged, log_bytes=self.log.size)

    def _check_finite(self) -> None:
        """Stops a run with a non-finite gradient before anything of it is saved. Waits for the device."""
        window, bad_step = self.window, int(self.window.bad_step)
        if bad_step < 0:
            return
        row_ids = next(row_ids for step, row_ids in window.row_ids if step == bad_step)
        shown = ", ".join(row_ids[:8]) + (f" and {len(row_ids) - 8} more" if len(row_ids) > 8 else "")
        newest = self.folder.newest_state()
        saved = "no state was saved" if newest is None else f"the last good state is in {newest}"
        raise UserError(
            f"step {bad_step}: the gradient is not finite; rows of its batch: {shown}; {saved}; "
            "try a lower --lr or --max-grad-norm"
        )

    def _validate(self) -> None:
        self._check_finite()
        if self.parts.validate is None:
            return
        started, step = time.perf_counter(), self.state.step
        measured = self.parts.validate(self.parts.drafter)
        seconds, best_acceptance = time.perf_counter() - started, self.state.best_acceptance
        # loops are easy to draft, so they do not decide which drafter is best
        counts = measured.without_loops if measured.without_loops.num_drafts else measured
        is_best = best_acceptance is None or counts.acceptance_length > best_acceptance
        self.log.write_validation(step, counts.acceptance_length, list(counts.acceptance_rates), seconds, is_best)
        if is_best:
            self.state = replace(self.state, best_acceptance=counts.acceptance_length, best_step=step)
            self._publish(measured)
        self.state = replace(self.state, log_bytes=self.log.size)
        self.clock = time.perf_counter()

    def _save(self) -> None:
        """Saves the training state, and publishes the checkpoint as long as there was no validation."""
        self._check_finite()
        if self.state.best_step is None:
            self._publish(None)
        sums = self.window.sums()
        self.world.sum_in_place(sums)
        if self.world.is_main:
            tensors = {**self.optimizer.state(), "unlogged": sums}
            self.folder.save(self.state, tensors, self.optimizer.layout())
        self.clock = self.saved_at = time.perf_counter()

    def _publish(self, measured: ValidationAcceptance | None) -> None:
        if self.world.is_main:
            self.folder.publish(lambda folder: self.parts.write_checkpoint(folder, self.state, measured))

    @contextmanager
    def _handle_signals(self) -> Iterator[None]:
        """The first Ctrl-C or SIGTERM saves and stops after the step; the second stops at once."""

        def request_stop(number: int, frame: FrameType | None) -> None:
            if self.stop_requested:
                raise KeyboardInterrupt
            self.stop_requested = True
            self.log.print("stopping after this step; press Ctrl-C again to stop at once without saving")

        signals = (signal.SIGINT, signal.SIGTERM)
        handlers = {number: signal.signal(number, request_stop) for number in signals}
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)


@dataclass
class LogWindow:
    """Metrics of the steps since the last line of the log. Tensors stay on the device."""

    metrics: DepthMetrics
    grad_norm: Tensor
    bad_step: Tensor  # first step with a non-finite gradient, or -1
    row_ids: list[tuple[int, list[str]]]  # data rows of each step
    lr: float = 0.0

    @classmethod
    def open(cls, num_depths: int, device: torch.device) -> LogWindow:
        bad_step = torch.full((), -1, dtype=torch.long, device=device)
        return cls(DepthMetrics.zeros(num_depths, device), torch.zeros((), device=device), bad_step, [])

    def record(self, grad_norm: Tensor, lr: float, step: int, inputs: StepInputs) -> None:
        self.grad_norm, self.lr = grad_norm, lr
        self.bad_step = torch.where((self.bad_step < 0) & ~grad_norm.isfinite(), step, self.bad_step)
        self.row_ids.append((step, inputs.row_ids))

    def sums(self) -> Tensor:
        return torch.stack(self.metrics.tensors())

    def to_record(self, sums: Tensor, weights: list[float], state: TrainingState, memory_gb: float) -> StepRecord:
        """Means over the positions of all ranks. Waits for the device."""
        counts, *values = sums.tolist()
        loss, accept, match, prefix_match = (
            [x / max(n, 1.0) for x, n in zip(value, counts, strict=True)] for value in values
        )
        return StepRecord(
            step=state.step,
            tokens=state.tokens,
            seconds=state.seconds,
            loss=math.fsum(w * x for w, x in zip(weights, loss, strict=True)),
            loss_by_depth=loss,
            match_by_depth=match,
            accept_by_depth=accept,
            prefix_match_by_depth=prefix_match,
            positions_by_depth=[int(n) for n in counts],
            lr=self.lr,
            grad_norm=float(self.grad_norm),
            tokens_per_second=state.unlogged_tokens / max(state.unlogged_seconds, 1e-9),
            memory_gb=memory_gb,
        )
