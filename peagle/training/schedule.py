"""Progress of a run and its learning rate.

A run has a length in steps, in minutes, or both; its progress is the larger share. Decay follows the progress. Warm-up
follows the steps, but takes at most a tenth of the run: of its steps, or of its minutes with at least 20 steps.
Everything depends only on the step, the seconds of training so far (over all resumes) and the length, so a resumed run
has the learning rates of an uninterrupted one.

    warmup_steps 100   run of 1,000 steps or more: 100 steps   200 steps: 20   10 minutes: 100 steps or 1 minute

    cosine     decays from the start           trapezoid  constant until the last quarter, then linear
    linear     the same, linearly              constant   no decay
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from peagle.config import (
    DEFAULT_EPOCHS,
    MIN_LR_RATIO,
    MIN_WARMUP_STEPS,
    TRAPEZOID_DECAY_FRACTION,
    WARMUP_DIVISOR,
    LrSchedule,
    TrainConfig,
)


@dataclass(frozen=True)
class Schedule:
    peak_lr: float
    max_warmup_steps: int
    decay: LrSchedule
    steps: int | None
    minutes: float | None

    @classmethod
    def from_config(cls, cfg: TrainConfig, steps_per_epoch: float) -> Schedule:
        steps, epochs = cfg.steps, cfg.epochs
        if steps is None and cfg.minutes is None and epochs is None:
            epochs = DEFAULT_EPOCHS
        if epochs is not None:
            epoch_steps = max(1, math.ceil(epochs * steps_per_epoch))
            steps = epoch_steps if steps is None else min(steps, epoch_steps)
        warmup = cfg.warmup_steps if steps is None else min(cfg.warmup_steps, steps // WARMUP_DIVISOR)
        return cls(cfg.lr, warmup, cfg.lr_schedule, steps, cfg.minutes)

    def progress(self, step: int, seconds: float) -> float:
        """0 at the start, 1 at the end."""
        shares = [step / self.steps] if self.steps is not None else []
        shares += [seconds / (60 * self.minutes)] if self.minutes is not None else []
        return min(1.0, max(shares))

    def learning_rate(self, step: int, progress: float) -> float:
        """Of step `step`, counted from 0."""
        by_steps = (step + 1) / max(self.max_warmup_steps, 1)
        # the first step compiles kernels and may take long, so time alone does not end the warm-up
        by_time = min(WARMUP_DIVISOR * progress, (step + 1) / MIN_WARMUP_STEPS)
        return self.peak_lr * min(1.0, max(by_steps, by_time)) * self._decay_factor(progress)

    def _decay_factor(self, progress: float) -> float:
        if self.decay == "constant":
            return 1.0
        if self.decay == "cosine":
            factor = 0.5 * (1 + math.cos(math.pi * progress))
        elif self.decay == "linear":
            factor = 1 - progress
        else:
            factor = min(1.0, (1 - progress) / TRAPEZOID_DECAY_FRACTION)
        return MIN_LR_RATIO + (1 - MIN_LR_RATIO) * factor

    def describe_length(self) -> str:
        parts = [f"{self.steps:,} steps"] if self.steps is not None else []
        parts += [f"{self.minutes:g} minutes"] if self.minutes is not None else []
        return " or ".join(parts)
