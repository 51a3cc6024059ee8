"""Settings of `peagle report`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReportSettings:
    """The title, and thresholds for marking uncertain values."""

    title: str = "What speculative decoding brings"
    few_answers: int = 20  # outputs of a data set below which its acceptance is drawn hollow
    loops_matter: float = 0.03  # rise of the acceptance length by looping outputs that is reported
