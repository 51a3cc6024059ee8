"""What comes out of the engine for a request: pieces, when they came, or why none will.

Knows nothing about how they are made.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from peagle.engine.request import CompletionOutput


class Overloaded(Exception):
    """The queue is full."""


class Unavailable(Exception):
    """No engine to ask: not yet, not now, or not any more."""


class DeadlinePassed(Exception):
    """The answer was not there in time."""


class EngineFailed(Exception):
    """The engine failed while it worked on this request."""


@dataclass
class Timing:
    """When an answer got what; written by the engine's thread alone. Seconds count from the arrival."""

    arrived: float
    queue_s: float | None = None
    first_s: float | None = None
    last_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)  # between steps that brought tokens
    tokens: int = 0

    def gained(self, tokens: int, now: float) -> None:
        since = now - self.arrived
        if self.last_s is None:
            self.first_s = since
        else:
            self.gaps_s.append(since - self.last_s)
        self.last_s = since
        self.tokens += tokens


@dataclass(frozen=True)
class Piece:
    """What one step added to an answer; without streaming there is one piece, with everything."""

    index: int  # which of the request's answers
    text: str
    token_ids: list[int]
    drafted: list[bool]  # the token came from a draft
    logprobs: list[dict[int, float]] | None
    finish_reason: str | None
    output: CompletionOutput | None = None  # at the end
    timing: Timing | None = None
