"""Runs several engines on the same prompt in turns, each with its own clock.

A turn is one engine step. The engine that has used the least time goes next, so that the texts on the screen grow as if
each engine had the machine to itself.
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
class DemoResult:
    """The result of one method on one prompt, or on all of them."""

    name: str
    drafter: str | None
    token_ids: list[int]
    num_forward_passes: int  # of the target: the prefill and the decode steps
    num_decode_steps: int
    num_drafts: int  # decode steps with draft tokens
    num_draft_tokens: int
    num_accepted_tokens_per_pos: list[int]
    seconds: float
    first_token_seconds: float

    @property
    def acceptance_length(self) -> float | None:
        return 1 + sum(self.num_accepted_tokens_per_pos) / self.num_drafts if self.num_drafts else None

    @property
    def tokens_per_second(self) -> float:
        return len(self.token_ids) / self.seconds if self.seconds else 0.0

    def speedup_over(self, baseline: DemoResult) -> float:
        return self.tokens_per_second / baseline.tokens_per_second if baseline.tokens_per_second else 0.0

    def to_json(self, baseline: DemoResult) -> dict[str, Any]:
        length = self.acceptance_length
        return asdict(self) | {
            "acceptance_length": round(length, 4) if length is not None else None,
            "tokens_per_second": round(self.tokens_per_second, 3),
            "seconds": round(self.seconds, 4),
            "first_token_seconds": round(self.first_token_seconds, 4),
            "speedup": round(self.speedup_over(baseline), 4),
        }


@dataclass
class DemoEngine:
    """One method: an engine, its clock, and its current request."""

    name: str
    drafter: str | None
    llm: LLM
    seconds: float = 0.0
    first_token_seconds: float = 0.0
    _request: Request | None = field(default=None, repr=False)
    _num_previous_draft_tokens: int = 0

    def start_request(self, prompt_token_ids: list[int], params: SamplingParams) -> None:
        self._request = self.llm.add_request(prompt_token_ids, params).requests[0]
        self.seconds = self.first_token_seconds = 0.0
        self._num_previous_draft_tokens = self.llm.num_draft_tokens

    @property
    def request(self) -> Request:
        assert self._request is not None, "no request was started"
        return self._request

    @property
    def finished(self) -> bool:
        return self.request.finish_reason is not None

    def step(self) -> None:
        started = time.perf_counter()
        self.llm.step()
        if self.llm.model_runner.device.type == "cuda":
            import torch

            torch.cuda.synchronize()  # drafting must not run on the next engine's clock
        self.seconds += time.perf_counter() - started
        if self.request.output_token_ids and not self.first_token_seconds:
            self.first_token_seconds = self.seconds

    @property
    def result(self) -> DemoResult:
        """The result so far."""
        request = self.request
        return DemoResult(
            self.name,
            self.drafter,
            list(request.output_token_ids),
            1 + request.num_decode_steps,
            request.num_decode_steps,
            request.num_drafts,
            self.llm.num_draft_tokens - self._num_previous_draft_tokens,
            list(request.num_accepted_tokens_per_pos),
            self.seconds,
            self.first_token_seconds,
        )


def merge_results(results: Sequence[DemoResult]) -> DemoResult:
    """Sums the results of one method over all prompts."""
    return DemoResult(
        results[0].name,
        results[0].drafter,
        [token_id for result in results for token_id in result.token_ids],
        sum(result.num_forward_passes for result in results),
        sum(result.num_decode_steps for result in results),
        sum(result.num_drafts for result in results),
        sum(result.num_draft_tokens for result in results),
        [sum(counts) for counts in zip(*(result.num_accepted_tokens_per_pos for result in results), strict=True)],
        sum(result.seconds for result in results),
        sum(result.first_token_seconds for result in results),
    )


def run_in_turns(engines: Sequence[DemoEngine], after_step: Callable[[], None]) -> None:
    """Runs all requests to their end. Calls `after_step` between steps, on no engine's clock."""
    while unfinished := [engine for engine in engines if not engine.finished]:
        min(unfinished, key=lambda engine: engine.seconds).step()
        after_step()


def find_first_difference(results: Sequence[DemoResult]) -> int | None:
    """Returns the first index at which the outputs differ, or None."""
    outputs = [result.token_ids for result in results]
    for i in range(max(map(len, outputs))):
        if len({output[i] if i < len(output) else None for output in outputs}) > 1:
            return i
    return None
