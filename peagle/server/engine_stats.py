"""Counts of the engine since the server started, across engine restarts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from peagle.engine.llm import LLM
from peagle.engine.request import Request


@dataclass(frozen=True)
class EngineStats:
    """A snapshot. Every field but the first three only grows."""

    num_requests_running: int = 0
    num_requests_waiting: int = 0
    kv_cache_usage: float = 0.0  # share of the cache's blocks in use, 0 to 1
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_decode_steps: int = 0  # summed over requests
    num_drafts: int = 0  # decode steps that had draft tokens
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: tuple[int, ...] = ()
    num_preemptions: int = 0
    num_prefix_cache_hits: int = 0
    num_prefix_cache_queries: int = 0
    num_restarts: int = 0


class EngineStatsCounter:
    """Counts in the engine's thread. Counts that an `LLM` keeps itself are carried over when it is replaced."""

    def __init__(self) -> None:
        self.num_prompt_tokens = self.num_output_tokens = self.num_decode_steps = self.num_restarts = 0
        self._previous: Counter[str] = Counter()  # counts of engines that failed
        self._previous_drafts: Counter[int] = Counter()  # drafts by number of accepted tokens
        self._llm: LLM | None = None

    def attach_engine(self, llm: LLM) -> None:
        self._llm = llm

    def detach_engine(self) -> None:
        """Keeps the counts of an engine that failed."""
        self.num_restarts += 1
        if self._llm is not None:
            self._previous += _read_counts(self._llm)
            self._previous_drafts += _read_drafts(self._llm)
            self._llm = None

    def count_tokens(self, request: Request, num_new_tokens: int, first: bool) -> None:
        self.num_output_tokens += num_new_tokens
        if not first:
            self.num_decode_steps += 1
        elif request.index == 0:
            self.num_prompt_tokens += len(request.prompt_token_ids)

    def snapshot(self, llm: LLM, num_queued_commands: int) -> EngineStats:
        """`num_queued_commands`: requests that the engine has not seen yet."""
        scheduler = llm.scheduler
        pool = scheduler.pool
        drafts = self._previous_drafts + _read_drafts(llm)
        max_accepted = max(len(llm.acceptance_histogram) - 1, *self._previous_drafts, 0)
        accepted_per_pos = [
            sum(count for accepted, count in drafts.items() if accepted > position) for position in range(max_accepted)
        ]
        return EngineStats(
            num_requests_running=len(scheduler.running),
            num_requests_waiting=len(scheduler.waiting) + num_queued_commands,
            kv_cache_usage=1 - pool.num_free_blocks / (pool.num_blocks - 1),
            num_prompt_tokens=self.num_prompt_tokens,
            num_output_tokens=self.num_output_tokens,
            num_decode_steps=self.num_decode_steps,
            num_drafts=sum(drafts.values()),
            num_accepted_tokens=sum(accepted_per_pos),
            num_accepted_tokens_per_pos=tuple(accepted_per_pos),
            num_restarts=self.num_restarts,
            **(self._previous + _read_counts(llm)),
        )


def _read_counts(llm: LLM) -> Counter[str]:
    """Counts that end with an `LLM`, by their field of `EngineStats`."""
    return Counter(
        num_draft_tokens=llm.num_draft_tokens,
        num_preemptions=llm.scheduler.num_preemptions,
        num_prefix_cache_hits=llm.scheduler.pool.num_hit_tokens,
        num_prefix_cache_queries=llm.scheduler.pool.num_queried_tokens,
    )


def _read_drafts(llm: LLM) -> Counter[int]:
    return Counter(dict(enumerate(llm.acceptance_histogram)))
