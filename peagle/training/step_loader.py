"""Steps of a run, prepared in the background: this rank's batches with the rows they train on.

Knows nothing about drafters. All ranks share one endless row of batches; batch number i is rank i mod world's, so a
step takes accumulate * world of them. The rows of a batch are a function of (seed, batch number). So a run does the
same on one GPU as on several, and one that is resumed needs nothing but the cursor and the number.
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

AHEAD = 2  # steps that are prepared while one runs


class BatchStream(Protocol):
    def __call__(self, start: BatchCursor) -> Iterator[tuple[PackedBatch, BatchCursor]]:
        """This rank's batches from there on, without end, each with the cursor behind it."""
        ...


@dataclass(frozen=True)
class StepInputs:
    """One step's work of this rank, and where the data stands after it."""

    batches: tuple[tuple[PackedBatch, CodPositions], ...]
    cursor: BatchCursor
    framed: tuple[PaddedBatch | None, ...] = ()  # the batches again, in frames, where they fit

    @property
    def tokens(self) -> int:
        return sum(len(batch) for batch, _ in self.batches)

    @property
    def counts(self) -> list[int]:
        """Rows that are asked, by depth."""
        return [sum(counts) for counts in zip(*(rows.counts for _, rows in self.batches), strict=True)]

    @property
    def row_ids(self) -> list[str]:
        return [name for batch, _ in self.batches for name in batch.row_ids]


class StepLoader:
    def __init__(
        self,
        stream: BatchStream,
        cfg: TrainConfig,
        world: DistributedContext,
        standing: TrainingState,
        framer: BatchPadder | None = None,
    ) -> None:
        self.batches, self.cfg, self.world, self.framer = stream(standing.cursor), cfg, world, framer
        self.number = standing.batches + world.rank

    def portion(self) -> StepInputs:
        cfg, own = self.cfg, []
        for _ in range(cfg.accumulate):
            batch, cursor = next(self.batches)
            rows = sample_cod_positions(batch, cfg.num_depths, cfg.rate, sampling_generator(cfg.seed, self.number))
            own.append((batch, rows))
            self.number += self.world.size
        framed = tuple(self.framer.framed(*pair) if self.framer is not None else None for pair in own)
        return StepInputs(tuple(own), cursor, framed)

    @contextmanager
    def running(self) -> Iterator[Iterator[StepInputs]]:
        """Portions without end, made by a thread that ends with the block."""
        ready: queue.Queue[StepInputs | BaseException] = queue.Queue(AHEAD)
        ended = threading.Event()

        def offer(thing: StepInputs | BaseException) -> None:
            while not ended.is_set():
                try:
                    return ready.put(thing, timeout=0.1)
                except queue.Full:
                    continue

        def prepare() -> None:
            try:
                while not ended.is_set():
                    offer(self.portion())
            except BaseException as error:  # raised again where it is waited for
                offer(error)

        def portions() -> Iterator[StepInputs]:
            while True:
                thing = ready.get()
                if isinstance(thing, BaseException):
                    raise thing
                yield thing

        thread = threading.Thread(target=prepare, name="feed", daemon=True)
        thread.start()
        try:
            yield portions()
        finally:
            ended.set()
            thread.join()
