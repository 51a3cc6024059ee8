"""A request on its way through the engine: its prompts, and the answers that somebody waits for.

Knows nothing about the engine. Tickets belong to its thread, an `Answer` to asyncio's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from peagle.config import SamplingParams
from peagle.engine.request import RequestGroup
from peagle.server.pieces import DeadlinePassed, Piece, Timing


@dataclass(eq=False)
class Ticket:
    """One prompt on its way through the engine."""

    answer: Answer
    first_index: int  # of its n answers
    prompt_ids: list[int]
    params: SamplingParams
    stream: bool
    timings: list[Timing]
    group: RequestGroup | None = None
    shown: list[int] = field(default_factory=list)  # characters of each answer that are out
    rounds: list[int] = field(default_factory=list)  # rounds of each that are out
    aborted: bool = False

    def __post_init__(self) -> None:
        self.shown, self.rounds = [0] * self.params.n, [0] * self.params.n


class Answer:
    """The pieces of a request's answers, in the order in which they come; `aclose` aborts what is left."""

    def __init__(
        self, total: int, deadline_s: float, done: Callable[[Answer], None], abort: Callable[[Answer], None]
    ) -> None:
        """`done` is called once the engine has no more for it, `abort` where nobody waits for the rest."""
        self.total, self._done, self._abort = total, done, abort
        self.left = total  # answers whose end was not read yet
        self.unfinished = total  # and that the engine is still at
        self.tickets: list[Ticket] = []
        self._pieces: asyncio.Queue[Piece | Exception] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        self.timer = loop.call_later(deadline_s, self._pieces.put_nowait, DeadlinePassed())

    def __aiter__(self) -> Answer:
        return self

    async def __anext__(self) -> Piece:
        if self.left == 0:
            raise StopAsyncIteration
        piece = await self._pieces.get()
        if isinstance(piece, Exception):
            await self.aclose()
            raise piece
        self.left -= piece.finish_reason is not None
        return piece

    async def aclose(self) -> None:
        self._abort(self)

    def put(self, piece: Piece | Exception) -> None:
        """In asyncio's thread. Whoever reads slowly holds nothing of the engine's any more."""
        self._pieces.put_nowait(piece)
        self.unfinished -= isinstance(piece, Piece) and piece.finish_reason is not None
        if self.unfinished == 0:
            self._done(self)

    @property
    def timings(self) -> list[Timing]:
        return [timing for ticket in self.tickets for timing in ticket.timings]
