"""The training loop.

A step: the target's hidden states of each batch, its gradients (`partition.accumulate_gradients`, or a CUDA graph),
their sum over ranks, one optimizer step. The host waits for the GPU only to log, save or validate; until then metrics
stay on the device. The published checkpoint is the drafter with the longest acceptance length on the validation set,
not the one with the lowest loss.
"""

import json
import math
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from peagle.config import TrainConfig
from peagle.data.batches import BatchCursor, PackedBatch, ResponseDataset, batches
from peagle.display import ProgressBar
from peagle.errors import UserError
from peagle.models.decoder import Decoder
from peagle.models.drafter import Drafter
from peagle.training.cod_sampling import CodPositions, sample_cod_positions, sampling_generator
from peagle.training.cuda_graphs import BatchPadder, GraphedStep, PaddedBatch
from peagle.training.distributed import DistributedContext
from peagle.training.hidden_states.online import HiddenStatesSource
from peagle.training.loss import NUM_METRICS, depth_weights, position_weights
from peagle.training.optimizer import Optimizer, Schedule
from peagle.training.partition import accumulate_gradients
from peagle.training.resume import RunFolder, TrainingState
from peagle.training.validation import AcceptanceCounts, ValidationAcceptance

PREFETCH_STEPS = 2
TENSORBOARD_SCALARS = ("loss", "lr", "grad_norm", "tokens_per_second", "memory_gb", "acceptance_length")
LoadedBatch = tuple[PackedBatch, CodPositions, PaddedBatch | None]  # padded for CUDA graphs, if it fits
StepInputs = tuple[list[LoadedBatch], BatchCursor]  # the batches of one step on this rank, and the data cursor after it


def load_steps(
    data: ResponseDataset, cfg: TrainConfig, world: DistributedContext, state: TrainingState, padder: BatchPadder | None
) -> Iterator[StepInputs]:
    """Endless steps: this rank's batches, their COD positions and their padding.

    All ranks share one endless sequence of batches. Batch i belongs to rank i mod world size, and its COD positions
    depend only on (seed, i). So a run has the same batches on one GPU as on several, and resumes from the cursor and i
    alone.
    """
    sizes = {"max_seq_len": cfg.max_seq_len, "rank": world.rank, "world_size": world.size}
    own_batches = batches(data, cfg.batch_tokens, cfg.seed, state.cursor, **sizes)
    index = state.batches + world.rank
    while True:
        loaded: list[LoadedBatch] = []
        for _ in range(cfg.gradient_accumulation_steps):
            batch, cursor = next(own_batches)
            rng = sampling_generator(cfg.seed, index)
            positions = sample_cod_positions(batch, cfg.num_depths, cfg.down_sample_ratio, rng)
            loaded.append((batch, positions, padder.pad(batch, positions) if padder is not None else None))
            index += world.size
        yield loaded, cursor


@contextmanager
def prefetch(steps: Iterator[StepInputs]) -> Iterator[Iterator[StepInputs]]:
    """The same steps, loaded ahead by a thread that ends with the block."""
    pool = ThreadPoolExecutor(1, "step-loader")
    ready = deque(pool.submit(next, steps) for _ in range(PREFETCH_STEPS))

    def loaded_steps() -> Iterator[StepInputs]:
        while True:
            ready.append(pool.submit(next, steps))
            yield ready.popleft().result()

    try:
        yield loaded_steps()
    finally:
        pool.shutdown(cancel_futures=True)


@dataclass(eq=False)
class Trainer:
    cfg: TrainConfig
    drafter: Drafter
    target: Decoder
    hidden_states: HiddenStatesSource
    data: ResponseDataset
    schedule: Schedule
    folder: RunFolder
    world: DistributedContext
    validate: Callable[[Drafter], ValidationAcceptance] | None  # on the main rank
    write_checkpoint: Callable[[Path, TrainingState, ValidationAcceptance | None], None]  # into an empty folder
    chunk_size: int
    stop_at: float | None = None  # time.perf_counter() at which the run saves and stops
    graphs: GraphedStep | None = None

    def __post_init__(self) -> None:
        self.optimizer = Optimizer(self.drafter, self.cfg)
        self.device = self.optimizer.grad_P.device
        self.window = LogWindow(self.cfg.num_depths, self.device)
        self.state = TrainingState()
        loaded = self.folder.load(self.optimizer.layout())
        if loaded is not None:
            self.state, tensors = loaded
            self.optimizer.restore(tensors, self.state.step)
            if self.world.is_main:  # the saved metrics are sums over ranks
                self.window.metrics_MK += tensors["unlogged"].to(self.device)
        self.log = StepLog(self.folder.log, self.state.step, self.world.is_main)
        if self.world.is_main:
            self.folder.truncate_log(self.state.log_bytes)
        self.stop_requested = False
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self.clock = self.saved_at = time.perf_counter()

    def run(self) -> TrainingState:
        padder = self.graphs.padder if self.graphs is not None else None
        steps = load_steps(self.data, self.cfg, self.world, self.state, padder)
        progress, stop = self._progress(), False
        tensorboard = self.log.tensorboard or nullcontext()
        with self._handle_signals(), self.log.bar, tensorboard, prefetch(steps) as ready:
            self.clock = self.saved_at = time.perf_counter()
            while progress < 1.0 and not stop:
                loaded, cursor = next(ready)
                counts, num_tokens, progress, stop, save = self._synchronize(loaded)
                self._step(loaded, counts, num_tokens, progress)
                self.state = replace(self.state, cursor=cursor)
                progress = max(progress, self.schedule.progress(self.state.step, 0.0))
                self.log.bar.update(None, progress, 1.0)
                if progress >= 1.0 or self._is_due(self.cfg.log_every):
                    self._log(progress)
                if progress >= 1.0 or self._is_due(self.cfg.validation_every):
                    self._validate()
                if progress >= 1.0 or stop or save:
                    self._save()
        return self.state

    def _is_due(self, every_steps: int) -> bool:
        return every_steps > 0 and self.state.step % every_steps == 0

    def _synchronize(self, loaded: list[LoadedBatch]) -> tuple[tuple[int, ...], int, float, bool, bool]:
        """Values all ranks must agree on: positions by depth, tokens, progress, whether to stop, whether to save."""
        now = time.perf_counter()
        stop = self.stop_requested or (self.stop_at is not None and now > self.stop_at)
        save = now - self.saved_at > 60 * self.cfg.save_minutes
        from_main = [self._progress(), float(save)] if self.world.is_main else [0.0, 0.0]
        own_counts = [sum(counts) for counts in zip(*(positions.counts for _, positions, _ in loaded), strict=True)]
        numbers = [*own_counts, sum(len(batch) for batch, _, _ in loaded), *from_main, float(stop)]
        *counts, num_tokens, progress, saves, stops = self.world.sum_numbers(numbers)
        return tuple(int(c) for c in counts), int(num_tokens), progress, stops > 0, saves > 0

    def _step(self, loaded: list[LoadedBatch], counts: tuple[int, ...], num_tokens: int, progress: float) -> None:
        cfg = self.cfg
        with self._on_side_stream():
            for batch in loaded:
                self.window.metrics_MK += self._accumulate(*batch, counts)
            self.world.sum_in_place(self.optimizer.collect())
            lr = self.schedule.learning_rate(self.state.step, progress)
            self.window.record(self.optimizer.step(lr), lr, self.state.step + 1)
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
        )
        self.clock = now

    def _accumulate(
        self, batch: PackedBatch, positions: CodPositions, padded: PaddedBatch | None, counts: tuple[int, ...]
    ) -> Tensor:
        cfg = self.cfg
        if padded is not None and self.graphs is not None:
            return self.graphs.accumulate_gradients(padded, position_weights(counts, cfg.depth_decay))
        states = self.hidden_states.states(batch)
        return accumulate_gradients(self.drafter, self.target, states, batch, positions, cfg, self.chunk_size, counts)

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
        sums = self.window.sums(self.world)
        memory = torch.cuda.max_memory_allocated(self.device) / 1e9 if self.device.type == "cuda" else 0.0
        weights = depth_weights(self.cfg.num_depths, self.cfg.depth_decay)
        self.log.write_step(self.window.as_json(sums, weights, self.state, memory), progress)
        self.window = LogWindow(self.cfg.num_depths, self.device)
        logged = replace(self.state, unlogged_steps=0, unlogged_tokens=0, unlogged_seconds=0.0)
        self.state = replace(logged, log_bytes=self.log.size)

    def _check_finite(self) -> None:
        """Stops a run with a non-finite gradient before anything of it is saved. Waits for the device."""
        bad_step = int(self.window.bad_step)
        if bad_step >= 0:
            raise UserError(
                f"step {bad_step}: the gradient is not finite; the last good state is {self.folder.newest_state()}; "
                "try a lower --lr or --max-grad-norm"
            )

    def _validate(self) -> None:
        self._check_finite()
        if self.validate is None:
            return
        started, step = time.perf_counter(), self.state.step
        measured = self.validate(self.drafter)
        seconds, best_acceptance = time.perf_counter() - started, self.state.best_acceptance
        # loops are easy to draft, so they do not decide which drafter is best
        counts = measured.without_loops if measured.without_loops.num_drafts else measured
        is_best = best_acceptance is None or counts.acceptance_length > best_acceptance
        self.log.write_validation(step, counts, seconds, is_best)
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
        tensors = {**self.optimizer.state(), "unlogged": self.window.sums(self.world)}
        if self.world.is_main:
            self.folder.save(self.state, tensors, self.optimizer.layout())
        self.clock = self.saved_at = time.perf_counter()

    def _publish(self, measured: ValidationAcceptance | None) -> None:
        if self.world.is_main:
            self.folder.publish(lambda folder: self.write_checkpoint(folder, self.state, measured))

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


class LogWindow:
    """Metrics of the steps since the last line of the log. Tensors stay on the device."""

    def __init__(self, num_depths: int, device: torch.device) -> None:
        self.metrics_MK = torch.zeros(NUM_METRICS, num_depths, dtype=torch.float64, device=device)
        self.grad_norm, self.lr = torch.zeros((), device=device), 0.0
        self.bad_step = torch.full((), -1, dtype=torch.long, device=device)  # first with a non-finite gradient, or -1

    def record(self, grad_norm: Tensor, lr: float, step: int) -> None:
        self.grad_norm, self.lr = grad_norm, lr
        self.bad_step = torch.where((self.bad_step < 0) & ~grad_norm.isfinite(), step, self.bad_step)

    def sums(self, world: DistributedContext) -> Tensor:
        """Sums over ranks."""
        sums = self.metrics_MK.clone()
        world.sum_in_place(sums)
        return sums

    def as_json(self, sums: Tensor, weights: list[float], state: TrainingState, memory_gb: float) -> dict[str, Any]:
        """Means over the positions of all ranks, lists by depth. Waits for the device."""
        counts, *values = sums.tolist()
        loss, accept, match, prefix_match = (
            [x / max(n, 1.0) for x, n in zip(value, counts, strict=True)] for value in values
        )
        return {
            "kind": "step",
            "step": state.step,
            "tokens": state.tokens,
            "seconds": state.seconds,
            "loss": math.fsum(w * x for w, x in zip(weights, loss, strict=True)),
            "loss_by_depth": loss,
            "match_by_depth": match,
            "accept_by_depth": accept,
            "prefix_match_by_depth": prefix_match,
            "positions_by_depth": [int(n) for n in counts],
            "lr": self.lr,
            "grad_norm": float(self.grad_norm),
            "tokens_per_second": state.unlogged_tokens / max(state.unlogged_seconds, 1e-9),
            "memory_gb": memory_gb,
        }


class StepLog:
    """Writes `log.jsonl` and TensorBoard events, and shows them. Does nothing on ranks other than the main one."""

    def __init__(self, path: Path, step: int = 0, enabled: bool = True) -> None:
        """TensorBoard events after `step` are discarded."""
        self.path, self.enabled, self.bar = path, enabled, ProgressBar(enabled, show_count=False)
        self.tensorboard: Any = None
        if enabled:
            with suppress(ImportError):
                from torch.utils.tensorboard import SummaryWriter

                self.tensorboard = SummaryWriter(str(path.parent / ".training" / "tensorboard"), purge_step=step + 1)

    @property
    def size(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def write_step(self, values: dict[str, Any], progress: float) -> None:
        self._write(values)
        hours, seconds = divmod(round(values["seconds"] * (1 - progress) / max(progress, 1e-9)), 3600)
        match = " ".join(f"{100 * m:.0f}" for m in values["match_by_depth"])
        text = (
            f"{100 * progress:3.0f}%  {hours}:{seconds // 60:02}:{seconds % 60:02} left  step {values['step']:,}  "
            f"loss {values['loss']:.3f}  match {match}%  lr {values['lr']:.1e}  "
            f"{values['tokens_per_second']:,.0f} tokens/s  {values['memory_gb']:.1f} GB"
        )
        self.bar.update(text, progress, 1.0)
        if not self.bar.is_shown or progress >= 1.0:
            self.print(text)

    def write_validation(self, step: int, counts: AcceptanceCounts, seconds: float, is_best: bool) -> None:
        length, rates = counts.acceptance_length, list(counts.acceptance_rates)
        values = {"step": step, "acceptance_length": length, "acceptance_rates": rates}
        self._write({"kind": "validation", **values, "seconds": seconds, "is_best": is_best})
        percent, best = " ".join(f"{100 * r:.0f}" for r in rates), ", best so far" if is_best else ""
        self.print(f"step {step:,}: acceptance length {length:.3f} (accepted by position: {percent}%){best}")

    def print(self, text: str) -> None:
        if self.enabled:
            print(text, flush=True)

    def _write(self, values: dict[str, Any]) -> None:
        if not self.enabled:
            return
        for name, value in values.items() if self.tensorboard is not None else ():
            if name in TENSORBOARD_SCALARS:
                self.tensorboard.add_scalar(name, value, values["step"])
            elif name.endswith("_by_depth"):
                for depth, x in enumerate(value):
                    self.tensorboard.add_scalar(f"{name.removesuffix('_by_depth')}/depth_{depth}", x, values["step"])
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(values) + "\n")
        except OSError as error:
            raise UserError(
                f"{self.path}: cannot be written ({error.strerror}); the saved training state is intact"
            ) from None
