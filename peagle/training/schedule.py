"""How far a run is, when it ends, and the learning rate there.

Knows nothing about optimizers or clocks: the seconds of training so far are given, and those of earlier processes
count, so a run that is resumed goes on where it was. A run has a length in steps, in minutes, or both; how far it is
is the larger share. Decay goes by that share. Warm-up goes by steps, but takes a tenth of the run at most: of its
steps, where they are known, and of its minutes, though then 20 steps at least. All of it follows from the step, that
share and the length alone, so a resumed run has the rates it would have had; one that is made longer has the longer
one's from there on.

    warm-up of 100     1,000 steps or more: 100 steps     200 steps: 20     10 minutes: 100 steps or 1 minute

    cosine     falls from the first step on          trapezoid  level until the last quarter, then linear
    linear     the same, straight                    constant   never falls
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from peagle.config import DEFAULT_EPOCHS, LEAST_LR, LEAST_WARMUP, RUN_PER_WARMUP, TRAPEZOID_DECAY, Decay, TrainConfig


@dataclass(frozen=True)
class Schedule:
    lr: float
    warmup: int  # steps, at most
    decay: Decay
    steps: int | None
    minutes: float | None

    @classmethod
    def of(cls, cfg: TrainConfig, steps_per_epoch: float) -> Schedule:
        steps, epochs = cfg.steps, cfg.epochs
        if steps is None and cfg.minutes is None and epochs is None:
            epochs = DEFAULT_EPOCHS
        if epochs is not None:
            passes = max(1, math.ceil(epochs * steps_per_epoch))
            steps = passes if steps is None else min(steps, passes)
        warmup = cfg.warmup if steps is None else min(cfg.warmup, steps // RUN_PER_WARMUP)
        return cls(cfg.lr, warmup, cfg.decay, steps, cfg.minutes)

    def done(self, step: int, seconds: float) -> float:
        """0 at the start, 1 at the end."""
        shares = [step / self.steps] if self.steps is not None else []
        shares += [seconds / (60 * self.minutes)] if self.minutes is not None else []
        return min(1.0, max(shares))

    def rate(self, step: int, done: float) -> float:
        """Of step `step`, counted from 0."""
        by_steps = (step + 1) / max(self.warmup, 1)
        # the first step may take long, for kernels are compiled then: time alone does not warm up
        by_time = min(RUN_PER_WARMUP * done, (step + 1) / LEAST_WARMUP)
        risen = max(by_steps, by_time)
        return self.lr * min(1.0, risen) * self._fallen(done)

    def _fallen(self, done: float) -> float:
        if self.decay == "constant":
            return 1.0
        if self.decay == "cosine":
            left = 0.5 * (1 + math.cos(math.pi * done))
        elif self.decay == "linear":
            left = 1 - done
        else:
            left = min(1.0, (1 - done) / TRAPEZOID_DECAY)
        return LEAST_LR + (1 - LEAST_LR) * left

    def length(self) -> str:
        parts = [f"{self.steps:,} steps"] if self.steps is not None else []
        parts += [f"{self.minutes:g} minutes"] if self.minutes is not None else []
        return " or ".join(parts)
