"""Decides which requests run in the next step: decode requests first, then prefill chunks within a token budget.

Schedules one step ahead of the tokens on the host: a launched decode step adds between 1 and k + 1 tokens, so blocks
are reserved for the maximum. When blocks run out, the request admitted last is preempted: it returns its blocks and
recomputes its tokens later.
"""

import heapq
from collections import deque
from collections.abc import Callable, Sequence

from peagle.engine.kv_cache import BlockPool
from peagle.engine.request import PrefillChunk, Request, RequestState, SchedulerOutput

# A prefill waits up to this many steps for others to share its pass, while many requests decode and few slots are free.
MAX_PREFILL_DELAY = 8
MANY_DECODE_REQUESTS = 16
MAX_SEQS_PER_FREE_SLOT = 16  # fewer free slots per max_num_seqs are few

EXTRA_BLOCKS = 3  # allocated with each needed block while half of all blocks are free, to update the device less often


class Scheduler:
    def __init__(
        self,
        pool: BlockPool,
        max_num_seqs: int,
        max_speculative_tokens: int,
        choose_k: Callable[[int], int],
        prefill_chunk_tokens: int,
        max_prefill_tokens: int,
        captured_choices: Sequence[int] | None = None,
    ) -> None:
        """
        Args:
            choose_k: Number of draft tokens of a step, given the number of decode requests.
            prefill_chunk_tokens: Prefill tokens of a step while requests decode.
            max_prefill_tokens: Prefill tokens of a step while no request decodes.
            captured_choices: Numbers of draft tokens with CUDA graphs. None: any number is as good.
        """
        self.pool, self.max_num_seqs = pool, max_num_seqs
        self.max_speculative_tokens, self.choose_k = max_speculative_tokens, choose_k
        self.captured_choices = range(max_speculative_tokens + 1) if captured_choices is None else captured_choices
        self.prefill_chunk_tokens, self.max_prefill_tokens = prefill_chunk_tokens, max_prefill_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in the order of admission
        self.changed_requests: list[Request] = []  # got a slot or blocks since the last launch, which clears the list
        self.num_preemptions = 0
        self._free_slots = list(range(max_num_seqs))  # a heap
        self._steps_since_prefill = MAX_PREFILL_DELAY
        self._num_prefilling = 0  # running requests in state PREFILL
        self._num_limited = 0  # unfinished requests with max_speculative_tokens set

    def add_request(self, request: Request) -> None:
        self.waiting.append(request)
        self._num_limited += request.params.max_speculative_tokens is not None

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.running

    def schedule(self) -> SchedulerOutput | None:
        """The next step, or None if there is nothing to do until the steps in flight return."""
        ready = RequestState.DECODING
        # A step in flight adds at least one token, so requests left out here are certain to be finished by it.
        decoding = [
            r for r in self.running if r.state is ready and r.num_tokens + r.num_in_flight_steps < r.max_total_tokens
        ]
        k = self.choose_k(len(decoding))
        if self._num_limited and decoding:
            k = min(k, self._max_requested_k(decoding))
        num_new_positions, block_size = max(2 * k, 1) - 1, self.pool.block_size
        for request in decoding:
            num_positions = request.num_tokens + request.max_in_flight_tokens + num_new_positions
            # An earlier iteration may have preempted this request.
            if num_positions > len(request.block_ids) * block_size and request.state is ready:
                if not self._allocate_blocks(request, num_positions):
                    return None
        if self.waiting and self.waiting[0].num_preemptions:
            decoding = [r for r in decoding if r.state is ready]
        chunks = self._schedule_prefill(len(decoding))
        if not decoding and not chunks:
            return None
        limited = [r for r in decoding if r.params.max_speculative_tokens is not None] if self._num_limited else []
        return SchedulerOutput(decoding, k, chunks, limited)

    def _max_requested_k(self, decoding: list[Request]) -> int:
        """The largest number of draft tokens that a request asks for, rounded up to one with CUDA graphs."""
        limits = (r.params.max_speculative_tokens for r in decoding)
        requested = max(self.max_speculative_tokens if limit is None else limit for limit in limits)
        return min((k for k in self.captured_choices if k >= requested), default=self.max_speculative_tokens)

    def _allocate_blocks(self, request: Request, num_positions: int) -> bool:
        """Allocates blocks for the first `num_positions` positions, preempting the request admitted last if necessary.
        False if that has to wait for the steps in flight."""
        num_missing = self._num_missing_blocks(request, num_positions)
        while num_missing > 0:
            blocks = self.pool.allocate(num_missing + self._num_extra_blocks(request, num_missing))
            if blocks is not None:
                request.block_ids += blocks
                self.changed_requests.append(request)
                return True
            if any(r.num_in_flight_steps for r in self.running):
                return False
            self._preempt(self.running[-1])
            if request.state is not RequestState.DECODING:
                return True
        return True

    def _num_extra_blocks(self, request: Request, num_missing: int) -> int:
        if self.pool.num_free_blocks - num_missing - EXTRA_BLOCKS < self.pool.num_blocks // 2:
            return 0
        num_until_end = self._num_missing_blocks(request, request.max_total_tokens) - num_missing
        return max(0, min(EXTRA_BLOCKS, num_until_end))

    def _num_missing_blocks(self, request: Request, num_positions: int) -> int:
        return -(-min(num_positions, request.max_model_len) // self.pool.block_size) - len(request.block_ids)

    def _preempt(self, request: Request) -> None:
        self._release(request)
        request.state = RequestState.WAITING
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(request)

    def _schedule_prefill(self, num_decoding: int) -> list[PrefillChunk]:
        self._steps_since_prefill += 1
        prefilling = [r for r in self.running if r.state is RequestState.PREFILL] if self._num_prefilling else []
        if not prefilling and (not self.waiting or not self._is_worth_admitting(num_decoding)):
            return []
        budget = self.prefill_chunk_tokens if num_decoding else self.max_prefill_tokens
        chunks: list[PrefillChunk] = []
        admitted = deque(prefilling)
        while budget > 0:
            if not admitted and self.waiting and self._free_slots and self._admit(self.waiting[0]):
                admitted.append(self.waiting.popleft())
            if not admitted:
                break
            request = admitted.popleft()
            begin = request.num_computed_tokens
            chunks.append(PrefillChunk(request, begin, min(request.num_prefill_tokens, begin + budget)))
            budget -= chunks[-1].end - begin
        if chunks:
            self._steps_since_prefill = 0
        return chunks

    def _is_worth_admitting(self, num_decoding: int) -> bool:
        """Delays a prefill briefly so that several prompts share one pass."""
        if num_decoding < MANY_DECODE_REQUESTS or self._steps_since_prefill >= MAX_PREFILL_DELAY:
            return True
        return len(self._free_slots) * MAX_SEQS_PER_FREE_SLOT >= self.max_num_seqs

    def _admit(self, request: Request) -> bool:
        """Gives a waiting request a slot and blocks for its whole prefill, leaving one free block per running request.
        False if there are not enough blocks."""
        num_tokens = request.num_prefill_tokens
        request.block_ids, request.block_hashes = self.pool.find_cached_blocks(request.all_token_ids[:num_tokens])
        num_missing = self._num_missing_blocks(request, num_tokens + max(self.max_speculative_tokens, 1))
        num_spare = len(self.running)
        blocks = None
        if self.pool.num_free_blocks >= num_missing + num_spare or not self.running:
            blocks = self.pool.allocate(num_missing)
        if blocks is None:
            self.pool.release(request.block_ids)
            request.block_ids, request.block_hashes = [], []
            return False
        request.num_computed_tokens = len(request.block_ids) * self.pool.block_size
        self.pool.num_queried_tokens += num_tokens
        self.pool.num_hit_tokens += request.num_computed_tokens
        request.block_ids += blocks
        request.slot = heapq.heappop(self._free_slots)
        request.state = RequestState.PREFILL
        self._num_prefilling += 1
        self.running.append(request)
        self.changed_requests.append(request)
        return True

    def mark_launched(self, scheduled: SchedulerOutput) -> None:
        """Updates requests after their step was launched: later steps may rely on what it writes."""
        for request in scheduled.decode_requests:
            request.num_in_flight_steps += 1
            request.max_in_flight_tokens += scheduled.num_draft_tokens + 1
        for chunk in scheduled.prefill_chunks:
            request = chunk.request
            request.num_computed_tokens = chunk.end
            self._cache_full_blocks(request, chunk.end)
            if chunk.is_last:
                request.state = RequestState.DECODING
                self._num_prefilling -= 1
                if not request.output_token_ids:  # a resumed request knows its newest token
                    request.num_in_flight_steps += 1
                    request.max_in_flight_tokens += 1

    def mark_returned(self, request: Request, max_new_tokens: int) -> None:
        """Updates a request after the tokens of a step, up to `max_new_tokens`, were appended."""
        request.num_in_flight_steps -= 1
        request.max_in_flight_tokens -= max_new_tokens
        if request.num_tokens >= request.num_tokens_for_next_hash:
            self._cache_full_blocks(request, request.num_tokens - 1)

    def _cache_full_blocks(self, request: Request, num_final_positions: int) -> None:
        """Adds blocks to the prefix cache whose positions are final and whose hashed tokens are known."""
        size, hashes = self.pool.block_size, request.block_hashes
        num_full = min(num_final_positions // size, (request.num_tokens - self.pool.lookahead) // size)
        if num_full > len(hashes) and self.pool.prefix_caching:
            token_ids = request.all_token_ids
            for index in range(len(hashes), num_full):
                hashes.append(self.pool.hash_block(hashes[-1] if hashes else b"", token_ids, index))
                self.pool.cache_block(request.block_ids[index], hashes[-1])
        next_hash = (len(hashes) + 1) * size + 1 if self.pool.prefix_caching else request.max_model_len + 1
        request.num_tokens_for_next_hash = next_hash

    def finish_request(self, request: Request) -> None:
        """Releases everything a request holds. Steps in flight write before any step launched later."""
        if request.state is RequestState.FINISHED:
            return
        if request.state is not RequestState.WAITING:
            self._release(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self._num_limited -= request.params.max_speculative_tokens is not None
        request.state = RequestState.FINISHED

    def _release(self, request: Request) -> None:
        self._num_prefilling -= request.state is RequestState.PREFILL
        # In reverse, so that the start of a sequence is evicted last: later blocks are useless without it.
        self.pool.release(reversed(request.block_ids))
        request.block_ids, request.block_hashes = [], []
        heapq.heappush(self._free_slots, request.slot)
        request.slot, request.num_computed_tokens = -1, 0
        self.running.remove(request)
