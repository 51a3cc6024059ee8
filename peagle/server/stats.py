"""What the engine has done since the server began, over restarts of the engine too.

Knows nothing about HTTP or Prometheus. `Counters` belong to the engine's thread; a snapshot is anybody's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from peagle.engine.llm import LLM
from peagle.engine.request import Request


@dataclass(frozen=True)
class EngineStats:
    """One moment. All but the first three only grow."""

    running: int = 0
    waiting: int = 0
    kv_use: float = 0.0  # of the cache's blocks, 0 to 1
    prompt_tokens: int = 0
    generated_tokens: int = 0
    drafts: int = 0  # rounds of requests that had drafts
    draft_tokens: int = 0
    accepted_tokens: int = 0
    num_accepted_tokens_per_pos: tuple[int, ...] = ()
    preemptions: int = 0
    prefix_hits: int = 0
    prefix_queries: int = 0
    restarts: int = 0
    rounds: int = 0


@dataclass
class _Kept:
    """Counts that live in an engine, and end with it."""

    by_accepted: list[int] = field(default_factory=list)  # rounds with drafts, by how many of them held
    draft_tokens: int = 0
    preemptions: int = 0
    prefix_hits: int = 0
    prefix_queries: int = 0

    @classmethod
    def of(cls, llm: LLM) -> _Kept:
        scheduler = llm.scheduler
        pool = scheduler.pool
        return cls(
            list(llm.acceptance_histogram),
            llm.num_draft_tokens,
            scheduler.num_preemptions,
            pool.num_hit_tokens,
            pool.num_queried_tokens,
        )

    def plus(self, other: _Kept) -> _Kept:
        longest = max(len(self.by_accepted), len(other.by_accepted))
        padded = [counts + [0] * (longest - len(counts)) for counts in (self.by_accepted, other.by_accepted)]
        return _Kept(
            [a + b for a, b in zip(*padded, strict=True)],
            self.draft_tokens + other.draft_tokens,
            self.preemptions + other.preemptions,
            self.prefix_hits + other.prefix_hits,
            self.prefix_queries + other.prefix_queries,
        )


class Counters:
    def __init__(self) -> None:
        self.prompt_tokens = self.generated_tokens = self.rounds = self.restarts = 0
        self._before = _Kept()  # of the engines that failed
        self._llm: LLM | None = None

    def began(self, llm: LLM) -> None:
        self._llm = llm

    def restarted(self) -> None:
        self.restarts += 1
        if self._llm is not None:
            self._before = self._before.plus(_Kept.of(self._llm))
            self._llm = None

    def gained(self, request: Request, tokens: int, first: bool) -> None:
        self.generated_tokens += tokens
        if not first:
            self.rounds += 1
        elif request.index == 0:
            self.prompt_tokens += len(request.prompt_token_ids)

    def snapshot(self, llm: LLM, unread: int) -> EngineStats:
        """`unread`: requests that the engine has not looked at."""
        scheduler = llm.scheduler
        pool, kept = scheduler.pool, self._before.plus(_Kept.of(llm))
        held = [sum(kept.by_accepted[i + 1 :]) for i in range(len(kept.by_accepted) - 1)]
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting) + unread,
            kv_use=1 - pool.num_free_blocks / (pool.num_blocks - 1),
            prompt_tokens=self.prompt_tokens,
            generated_tokens=self.generated_tokens,
            drafts=sum(kept.by_accepted),
            draft_tokens=kept.draft_tokens,
            accepted_tokens=sum(held),
            num_accepted_tokens_per_pos=tuple(held),
            preemptions=kept.preemptions,
            prefix_hits=kept.prefix_hits,
            prefix_queries=kept.prefix_queries,
            restarts=self.restarts,
            rounds=self.rounds,
        )
