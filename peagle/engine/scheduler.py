"""Who runs in the next step: rounds for those that decode, chunks for those whose prompts are being read.

Knows nothing about tensors or text. Plans one step ahead of what has come back: a launched round brings
between one and k+1 tokens, so blocks are provided for the most it can bring. When blocks run out, the request
admitted last gives its own back and reads its tokens again later.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence

from peagle.engine.kv_cache import BlockPool
from peagle.engine.request import PrefillChunk, Request, RequestState, SchedulerOutput

PREFILL_EVERY = 8  # steps at most that a prompt waits for company, while MANY decode and few places are free
MANY = 16
BLOCKS_AHEAD = 3  # that a request gets with one it needs, while half of them all are free


class Scheduler:
    def __init__(
        self,
        pool: BlockPool,
        max_num_seqs: int,
        max_speculative_tokens: int,
        drafts_for: Callable[[int], int],
        chunk_tokens: int,
        idle_chunk_tokens: int,
        round_sizes: Sequence[int] | None = None,
    ) -> None:
        """`chunk_tokens` a step are read while others decode, `idle_chunk_tokens` when nobody does. `round_sizes`
        are the numbers of drafts that rounds are recorded for; None: any will do."""
        self.pool, self.max_speculative_tokens, self.drafts_for = pool, max_speculative_tokens, drafts_for
        self.max_num_seqs = max_num_seqs
        self.round_sizes = range(max_speculative_tokens + 1) if round_sizes is None else round_sizes
        self.chunk_tokens, self.idle_chunk_tokens = chunk_tokens, idle_chunk_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in the order of admission
        self._slots = list(range(max_num_seqs))
        self._since_prefill = PREFILL_EVERY
        self._reading = 0  # how many of them are
        self.moved: list[Request] = []  # whose blocks changed since the runner last asked
        self.num_preemptions = 0
        self._limited = 0  # requests alive that say how many drafts they want at most

    def add(self, request: Request) -> None:
        self.waiting.append(request)
        self._limited += request.params.max_speculative_tokens is not None

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def schedule(self) -> SchedulerOutput | None:
        """None: nothing to do until what is in flight has come back."""
        ready = RequestState.DECODING
        decoding = [
            r for r in self.running if r.state is ready and r.num_tokens + r.num_in_flight_steps < r.max_total_tokens
        ]
        # (a round in flight brings at least one token, so those left out are sure to be full)
        k = self.drafts_for(len(decoding))
        if self._limited and decoding:
            k = min(k, self._wanted(decoding))
        ahead, size = max(2 * k, 1) - 1, self.pool.block_size
        for request in decoding:
            tokens = request.num_tokens + request.max_in_flight_tokens + ahead
            # those that gave their blocks back for one before them are no longer decoding
            if tokens > len(request.block_ids) * size and request.state is ready:
                if not self._make_room(request, tokens):
                    return None
        if self.waiting and self.waiting[0].num_preemptions:
            decoding = [r for r in decoding if r.state is ready]
        chunks = self._chunks(len(decoding))
        if not decoding and not chunks:
            return None
        limited = [r for r in decoding if r.params.max_speculative_tokens is not None] if self._limited else []
        return SchedulerOutput(decoding, k, chunks, limited)

    def _wanted(self, decoding: list[Request]) -> int:
        """The most drafts that anybody wants; a recorded round has one of a few numbers of them."""
        most = max(
            self.max_speculative_tokens if (k := r.params.max_speculative_tokens) is None else k for r in decoding
        )
        return min((k for k in self.round_sizes if k >= most), default=self.max_speculative_tokens)

    def _make_room(self, request: Request, tokens: int) -> bool:
        """Blocks for the first `tokens` positions; False if that has to wait for what is in flight."""
        missing = self._missing(request, tokens)
        while missing > 0:
            blocks = self.pool.allocate(missing + self._ahead(request, missing))
            if blocks is not None:
                request.block_ids += blocks
                self.moved.append(request)
                return True
            if any(r.num_in_flight_steps for r in self.running):
                return False
            self._preempt(self.running[-1])
            if request.state is not RequestState.DECODING:
                return True
        return True

    def _ahead(self, request: Request, missing: int) -> int:
        """Of blocks that it will need later: whenever some change hands the device is told, between two rounds."""
        plenty = self.pool.num_free_blocks - missing - BLOCKS_AHEAD >= self.pool.num_blocks // 2
        return max(0, min(BLOCKS_AHEAD, self._missing(request, request.max_total_tokens) - missing)) if plenty else 0

    def _missing(self, request: Request, tokens: int) -> int:
        return -(-min(tokens, request.max_model_len) // self.pool.block_size) - len(request.block_ids)

    def _preempt(self, request: Request) -> None:
        self._take_back(request)
        request.state = RequestState.WAITING
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(request)

    def _chunks(self, decoding: int) -> list[PrefillChunk]:
        self._since_prefill += 1
        reading = [r for r in self.running if r.state is RequestState.PREFILL] if self._reading else []
        if not reading and (not self.waiting or not self._worth_admitting(decoding)):
            return []
        budget = self.chunk_tokens if decoding else self.idle_chunk_tokens
        chunks = []
        for request in reading:
            if budget > 0:
                chunks.append(self._chunk(request, budget))
                budget -= chunks[-1].end - chunks[-1].begin
        while self.waiting and budget > 0 and self._slots:
            request = self.waiting[0]
            if not self._admit(request):
                break
            self.waiting.popleft()
            chunks.append(self._chunk(request, budget))
            budget -= chunks[-1].end - chunks[-1].begin
        if chunks:
            self._since_prefill = 0
        return chunks

    def _worth_admitting(self, decoding: int) -> bool:
        """A full engine waits until several places are free: reading prompts one by one costs more launches."""
        if decoding < MANY or self._since_prefill >= PREFILL_EVERY:
            return True
        return len(self._slots) * 16 >= self.max_num_seqs

    @staticmethod
    def _chunk(request: Request, budget: int) -> PrefillChunk:
        return PrefillChunk(
            request, request.num_computed_tokens, min(request.num_prefill_tokens, request.num_computed_tokens + budget)
        )

    def _admit(self, request: Request) -> bool:
        """Gives it a slot and blocks for its whole prompt; one block for each that decodes is left alone."""
        request.block_ids, request.block_hashes = self.pool.find_cached_blocks(
            request.all_token_ids[: request.num_prefill_tokens]
        )
        missing = self._missing(request, request.num_prefill_tokens + max(self.max_speculative_tokens, 1))
        spare = len(self.running)
        blocks = (
            self.pool.allocate(missing) if self.pool.num_free_blocks >= missing + spare or not self.running else None
        )
        if blocks is None:
            self.pool.release(request.block_ids)
            request.block_ids, request.block_hashes = [], []
            return False
        request.num_computed_tokens = len(request.block_ids) * self.pool.block_size
        self.pool.num_queried_tokens += request.num_prefill_tokens
        self.pool.num_hit_tokens += request.num_computed_tokens
        request.block_ids += blocks
        request.slot = heapq.heappop(self._slots)
        request.state = RequestState.PREFILL
        self._reading += 1
        self.running.append(request)
        self.moved.append(request)
        return True

    def launched(self, plan: SchedulerOutput) -> None:
        """The plan is on its way: what it writes can be counted on by everything launched later."""
        for request in plan.decode_requests:
            request.num_in_flight_steps += 1
            request.max_in_flight_tokens += plan.num_draft_tokens + 1
        for chunk in plan.prefill_chunks:
            request = chunk.request
            request.num_computed_tokens = chunk.end
            self._publish(request, chunk.end)
            if chunk.is_last:
                request.state = RequestState.DECODING
                self._reading -= 1
                if not request.output_token_ids:  # the pass says a first token; coming back, the newest is known
                    request.num_in_flight_steps += 1
                    request.max_in_flight_tokens += 1

    def returned(self, request: Request, rows: int) -> None:
        """A pass over `rows` rows has come back and its tokens are appended."""
        request.num_in_flight_steps -= 1
        request.max_in_flight_tokens -= rows
        if request.num_tokens >= request.num_tokens_for_next_hash:
            self._publish(request, request.num_tokens - 1)

    def _publish(self, request: Request, final: int) -> None:
        """Names the blocks before position `final`, as far as the tokens that name them are known."""
        size = self.pool.block_size
        full = min(final // size, (request.num_tokens - self.pool.lookahead) // size)
        if full > len(request.block_hashes) and self.pool.prefix_caching:
            tokens = request.all_token_ids
            for index in range(len(request.block_hashes), full):
                name = self.pool.hash_block(request.block_hashes[-1] if request.block_hashes else b"", tokens, index)
                request.block_hashes.append(name)
                self.pool.cache_block(request.block_ids[index], name)
        request.num_tokens_for_next_hash = (
            (len(request.block_hashes) + 1) * size + 1 if self.pool.prefix_caching else request.max_model_len + 1
        )

    def finish(self, request: Request) -> None:
        """Takes everything back; rounds in flight write before anything launched later does."""
        if request.state is RequestState.WAITING:
            if request in self.waiting:
                self.waiting.remove(request)
        elif request.state is not RequestState.FINISHED:
            self._take_back(request)
        if request.state is not RequestState.FINISHED:
            self._limited -= request.params.max_speculative_tokens is not None
        request.state = RequestState.FINISHED

    def _take_back(self, request: Request) -> None:
        self._reading -= request.state is RequestState.PREFILL
        self.pool.release(reversed(request.block_ids))  # a start outlives what follows it: without it that is not found
        request.block_ids, request.block_hashes = [], []
        heapq.heappush(self._slots, request.slot)
        request.slot, request.num_computed_tokens = -1, 0
        self.running.remove(request)

    def check_integrity(self) -> None:
        self.pool.check_integrity([r.block_ids for r in self.running])
        used = [r.slot for r in self.running]
        assert sorted(used + self._slots) == list(range(self.max_num_seqs)), "a slot is lost or doubled"
        assert all(not r.block_ids and r.slot < 0 for r in self.waiting), "a waiting request holds something"
