"""Several engines answer one prompt, in turns, each on a clock of its own.

A turn is one step, and a clock runs in its owner's turns only. Who has used the least time is next: what grows on a
screen grows as it would if each had the machine to itself, and a busy moment slows all alike. Knows nothing about
flags, texts or screens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from peagle.config import SamplingParams

if TYPE_CHECKING:
    from peagle.engine.llm import LLM
    from peagle.engine.request import Request


@dataclass(frozen=True)
class Run:
    """What one way of answering did with one prompt, or with all of them."""

    name: str
    drafter: str | None
    token_ids: list[int]
    rounds: int  # passes of the target after the one over the prompt
    drafts: int  # rounds that had drafts
    drafted_tokens: int
    num_accepted_tokens_per_pos: list[int]
    seconds: float
    first_token_seconds: float
    passes: int

    @property
    def acceptance_length(self) -> float | None:
        """Tokens a round with drafts brings, the target's own included."""
        return 1 + sum(self.num_accepted_tokens_per_pos) / self.drafts if self.drafts else None

    @property
    def tokens_per_second(self) -> float:
        return len(self.token_ids) / self.seconds if self.seconds else 0.0

    def as_json(self) -> dict[str, Any]:
        length = self.acceptance_length
        figures = {
            "acceptance_length": round(length, 4) if length is not None else None,
            "tokens_per_second": round(self.tokens_per_second, 3),
            "seconds": round(self.seconds, 4),
            "first_token_seconds": round(self.first_token_seconds, 4),
        }
        return {**asdict(self), **figures}


@dataclass
class Racer:
    """One way of answering: an engine, its clock, and what it has said to the prompt at hand."""

    name: str
    drafter: str | None
    llm: LLM
    seconds: float = 0.0
    first_token_seconds: float = 0.0
    _request: Request | None = field(default=None, repr=False)
    _drafted_before: int = 0

    def ask(self, prompt_ids: list[int], params: SamplingParams) -> None:
        # text that grows with the tokens is the screen's affair, and on nobody's clock
        self._request = self.llm.add_request(prompt_ids, params).requests[0]
        self.seconds = self.first_token_seconds = 0.0
        self._drafted_before = self.llm.num_draft_tokens

    @property
    def request(self) -> Request:
        assert self._request is not None, "nothing was asked"
        return self._request

    @property
    def done(self) -> bool:
        return self.request.finish_reason is not None

    def turn(self) -> None:
        started = time.perf_counter()
        self.llm.step()
        if self.llm.model_runner.device.type == "cuda":
            import torch

            torch.cuda.synchronize()  # its drafting must not run on the next one's clock
        self.seconds += time.perf_counter() - started
        if self.request.output_token_ids and not self.first_token_seconds:
            self.first_token_seconds = self.seconds

    @property
    def run(self) -> Run:
        """As far as it has come."""
        r = self.request
        return Run(
            self.name,
            self.drafter,
            list(r.output_token_ids),
            r.num_decode_steps,
            r.num_drafts,
            self.llm.num_draft_tokens - self._drafted_before,
            list(r.num_accepted_tokens_per_pos),
            self.seconds,
            self.first_token_seconds,
            1 + r.num_decode_steps,
        )


def together(runs: Sequence[Run]) -> Run:
    """One way's runs over all prompts, as one."""
    return Run(
        runs[0].name,
        runs[0].drafter,
        [token for run in runs for token in run.token_ids],
        sum(run.rounds for run in runs),
        sum(run.drafts for run in runs),
        sum(run.drafted_tokens for run in runs),
        [sum(counts) for counts in zip(*(run.num_accepted_tokens_per_pos for run in runs), strict=True)],
        sum(run.seconds for run in runs),
        sum(run.first_token_seconds for run in runs),
        sum(run.passes for run in runs),
    )


def speed_up(run: Run, alone: Run) -> float:
    return run.tokens_per_second / alone.tokens_per_second if alone.tokens_per_second else 0.0


def race(racers: Sequence[Racer], watch: Callable[[], None]) -> None:
    """All answer what they were asked; `watch` is called between turns, on nobody's clock."""
    while left := [racer for racer in racers if not racer.done]:
        min(left, key=lambda racer: racer.seconds).turn()
        watch()


def first_difference(runs: Sequence[Run]) -> int | None:
    """The first place at which not all said the same; None if there is none."""
    texts = [run.token_ids for run in runs]
    for place in range(max(map(len, texts))):
        if len({text[place] if place < len(text) else None for text in texts}) > 1:
            return place
    return None
