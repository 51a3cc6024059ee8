"""Settings of `peagle report`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReportSettings:
    """Title of a report, and thresholds for marking uncertain values."""

    title: str = "Speculative decoding report"
    min_responses: int = 20  # acceptance over fewer responses is drawn as a hollow point
