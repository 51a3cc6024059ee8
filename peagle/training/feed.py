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
from peagle.data.batches import Batch, Cursor
from peagle.training.cod_sampling import Rows, generator, sample_rows
from peagle.training.cuda_graphs import Framed, Framer
from peagle.training.distributed import World
from peagle.training.resume import Standing

AHEAD = 2  # steps that are prepared while one runs


class Stream(Protocol):
    def __call__(self, start: Cursor) -> Iterator[tuple[Batch, Cursor]]:
        """This rank's batches from there on, without end, each with the cursor behind it."""
        ...


@dataclass(frozen=True)
class Portion:
    """One step's work of this rank, and where the data stands after it."""

    batches: tuple[tuple[Batch, Rows], ...]
    cursor: Cursor
    framed: tuple[Framed | None, ...] = ()  # the batches again, in frames, where they fit

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


class Feed:
    def __init__(
        self, stream: Stream, cfg: TrainConfig, world: World, standing: Standing, framer: Framer | None = None
    ) -> None:
        self.batches, self.cfg, self.world, self.framer = stream(standing.cursor), cfg, world, framer
        self.number = standing.batches + world.rank

    def portion(self) -> Portion:
        cfg, own = self.cfg, []
        for _ in range(cfg.accumulate):
            batch, cursor = next(self.batches)
            rows = sample_rows(batch, cfg.num_depths, cfg.rate, generator(cfg.seed, self.number))
            own.append((batch, rows))
            self.number += self.world.size
        framed = tuple(self.framer.framed(*pair) if self.framer is not None else None for pair in own)
        return Portion(tuple(own), cursor, framed)

    @contextmanager
    def running(self) -> Iterator[Iterator[Portion]]:
        """Portions without end, made by a thread that ends with the block."""
        ready: queue.Queue[Portion | BaseException] = queue.Queue(AHEAD)
        ended = threading.Event()

        def offer(thing: Portion | BaseException) -> None:
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

        def portions() -> Iterator[Portion]:
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
