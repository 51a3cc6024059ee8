"""How far a run is, when it ends, and the learning rate there.

Knows nothing about optimizers or clocks: the seconds of training so far are given, and those of earlier processes
count, so a run that is resumed goes on where it was. A run has a length in steps, in minutes, or both; how far it is
is the larger share. Warm-up goes by steps, decay by that share.

    cosine     falls from the first step on          trapezoid  level until the last quarter, then linear
    linear     the same, straight                    constant   never falls
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from peagle.config import DEFAULT_EPOCHS, LEAST_LR, TRAPEZOID_DECAY, Decay, TrainConfig


@dataclass(frozen=True)
class Schedule:
    lr: float
    warmup: int
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
        return cls(cfg.lr, cfg.warmup, cfg.decay, steps, cfg.minutes)

    def done(self, step: int, seconds: float) -> float:
        """0 at the start, 1 at the end."""
        shares = [step / self.steps] if self.steps is not None else []
        shares += [seconds / (60 * self.minutes)] if self.minutes is not None else []
        return min(1.0, max(shares))

    def rate(self, step: int, done: float) -> float:
        """Of step `step`, counted from 0."""
        return self.lr * min(1.0, (step + 1) / max(self.warmup, 1)) * self._fallen(done)

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
