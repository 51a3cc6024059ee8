"""Prepares steps in a background thread: this rank's batches, their COD positions and their padding.

All ranks share one endless sequence of batches. Batch i belongs to rank i mod world size, and its COD positions depend
only on (seed, i). So a run has the same batches on one GPU as on several, and resumes from the cursor and i alone.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from peagle.config import TrainConfig
from peagle.data.batches import BatchCursor, PackedBatch
from peagle.training.cod_sampling import CodPositions, sample_cod_positions, sampling_generator
from peagle.training.cuda_graphs import BatchPadder, PaddedBatch
from peagle.training.distributed import DistributedContext
from peagle.training.resume import TrainingState

PREFETCH_STEPS = 2


class BatchStream(Protocol):
    def __call__(self, start: BatchCursor) -> Iterator[tuple[PackedBatch, BatchCursor]]:
        """This rank's batches from `start` on, endlessly, each with the cursor behind it."""
        ...


@dataclass(frozen=True)
class StepInputs:
    """The batches of one step on this rank, and the data cursor after it."""

    batches: tuple[tuple[PackedBatch, CodPositions], ...]
    cursor: BatchCursor
    padded: tuple[PaddedBatch | None, ...] = ()  # the same batches for CUDA graphs, if they fit

    @property
    def num_tokens(self) -> int:
        return sum(len(batch) for batch, _ in self.batches)

    @property
    def counts(self) -> list[int]:
        """Positions by depth."""
        return [sum(counts) for counts in zip(*(positions.counts for _, positions in self.batches), strict=True)]

    @property
    def row_ids(self) -> list[str]:
        return [row_id for batch, _ in self.batches for row_id in batch.row_ids]


class StepLoader:
    def __init__(
        self,
        stream: BatchStream,
        cfg: TrainConfig,
        world: DistributedContext,
        state: TrainingState,
        padder: BatchPadder | None = None,
    ) -> None:
        self.batches, self.cfg, self.world, self.padder = stream(state.cursor), cfg, world, padder
        self.batch_index = state.batches + world.rank

    def load_step(self) -> StepInputs:
        cfg, batches = self.cfg, []
        for _ in range(cfg.gradient_accumulation_steps):
            batch, cursor = next(self.batches)
            rng = sampling_generator(cfg.seed, self.batch_index)
            batches.append((batch, sample_cod_positions(batch, cfg.num_depths, cfg.down_sample_ratio, rng)))
            self.batch_index += self.world.size
        padded = tuple(self.padder.pad(*pair) if self.padder is not None else None for pair in batches)
        return StepInputs(tuple(batches), cursor, padded)

    @contextmanager
    def prefetching(self) -> Iterator[Iterator[StepInputs]]:
        """Endless steps from a thread that ends with the block."""
        ready: queue.Queue[StepInputs | BaseException] = queue.Queue(PREFETCH_STEPS)
        stopped = threading.Event()

        def put(item: StepInputs | BaseException) -> None:
            while not stopped.is_set():
                try:
                    return ready.put(item, timeout=0.1)
                except queue.Full:
                    continue

        def prepare() -> None:
            try:
                while not stopped.is_set():
                    put(self.load_step())
            except BaseException as error:  # raised in the consumer
                put(error)

        def steps() -> Iterator[StepInputs]:
            while True:
                item = ready.get()
                if isinstance(item, BaseException):
                    raise item
                yield item

        thread = threading.Thread(target=prepare, name="step-loader", daemon=True)
        thread.start()
        try:
            yield steps()
        finally:
            stopped.set()
            thread.join()
