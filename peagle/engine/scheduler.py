"""Decides which requests run in the next step: decode requests first, then prefill chunks within a token budget.

Scheduling is fair: a long prompt leaves half of the budget to shorter ones, and the n requests of a prompt join the
queue one after another and return slots to prompts without a running request.

Schedules one step ahead of the tokens on the host: a launched decode step adds between 1 and k + 1 tokens, so blocks
are reserved for the maximum. When blocks run out, the request admitted last is preempted: it returns its blocks and
recomputes its tokens later.
"""

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

from peagle.engine.kv_cache import BlockPool
from peagle.engine.request import PrefillChunk, Request, RequestState, SchedulerOutput

EXTRA_BLOCKS = 3  # allocated with each needed block while half of all blocks are free, to update the device less often


class Scheduler:
    def __init__(
        self,
        pool: BlockPool,
        max_num_seqs: int,
        max_speculative_tokens: int,
        choose_k: Callable[[int], int],
        choose_mixed_k: Callable[[int, int, Sequence[PrefillChunk]], int],
        prefill_chunk_tokens: int,
        max_prefill_tokens: int,
        captured_choices: Sequence[int] | None = None,
    ) -> None:
        """
        Args:
            choose_k: Number of draft tokens of a step, given the number of decode requests.
            choose_mixed_k: That of a step with prefill chunks, given the number of decode requests, the result of
                `choose_k` and the chunks; never more.
            prefill_chunk_tokens: Prefill tokens of a step while requests decode.
            max_prefill_tokens: Prefill tokens of a step while no request decodes.
            captured_choices: Numbers of draft tokens with CUDA graphs. None: any number is as good.
        """
        self.pool, self.max_num_seqs = pool, max_num_seqs
        self.max_speculative_tokens = max_speculative_tokens
        self.choose_k, self.choose_mixed_k = choose_k, choose_mixed_k
        self.captured_choices = range(max_speculative_tokens + 1) if captured_choices is None else captured_choices
        self.prefill_chunk_tokens, self.max_prefill_tokens = prefill_chunk_tokens, max_prefill_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in the order of admission
        self.changed_requests: list[Request] = []  # got a slot or blocks since the last launch, which clears the list
        self.num_preemptions = 0
        self._free_slots = list(range(max_num_seqs))  # a heap
        self._num_prefilling = 0  # running requests in state PREFILL
        self._num_limited = 0  # unfinished requests with max_speculative_tokens set
        self._num_shared_slots = 0  # slots of requests whose group has an earlier one
        self._returning: Request | None = None  # will be preempted once no step with it is in flight

    def add_request(self, request: Request) -> None:
        """Queues a request, or lets it follow the one of its group that is in the queue."""
        self._num_limited += request.params.max_speculative_tokens is not None
        group = request.group
        if group is not None and group.last_queued is not None:
            group.followers.append(request)
        else:
            self._enqueue(request)

    def _enqueue(self, request: Request) -> None:
        self.waiting.append(request)
        if request.group is not None:
            request.group.last_queued = request

    def _enqueue_follower(self, request: Request) -> None:
        """Lets the next request of a group join the queue, if the last one to join was this request."""
        group = request.group
        if group is not None and group.last_queued is request:
            group.last_queued = None
            if group.followers:
                self._enqueue(group.followers.popleft())

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.running

    def schedule(self) -> SchedulerOutput | None:
        """The next step, or None if there is nothing to do until the steps in flight return."""
        if self._returning is not None or (self._num_shared_slots and self.waiting and not self._free_slots):
            self._return_slot()
        ready, returning = RequestState.DECODING, self._returning
        # A step in flight adds at least one token, so requests left out here are certain to be finished by it.
        decoding = [
            r
            for r in self.running
            if r.state is ready and r is not returning and r.num_tokens + r.num_in_flight_steps < r.max_total_tokens
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
        if decoding and chunks:
            k = self.choose_mixed_k(len(decoding), k, chunks)
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

    def _return_slot(self) -> None:
        """Preempts the newest request of the group with most slots, for a waiting group without any."""
        if self._free_slots or not self._num_shared_slots or not any(map(_needs_first_slot, self.waiting)):
            self._returning = None
            return
        if self._returning is None or self._returning.state is not RequestState.DECODING:
            groups = {r.group for r in self.running if r.group is not None}
            largest = max(groups, key=lambda group: group.num_slots)
            self._returning = next(r for r in reversed(self.running) if r.group is largest)
        if self._returning.num_in_flight_steps == 0:
            self._preempt(self._returning)
            self._returning = None
            self.waiting.rotate(-1)  # it was the first

    def _schedule_prefill(self, num_decoding: int) -> list[PrefillChunk]:
        prefilling = [r for r in self.running if r.state is RequestState.PREFILL] if self._num_prefilling else []
        if not prefilling and not self.waiting:
            return []
        budget = self.prefill_chunk_tokens if num_decoding else self.max_prefill_tokens
        num_tokens: dict[Request, int] = {}
        while budget > 0:  # more than once if followers join the queue
            num_before = sum(num_tokens.values())
            self._divide_budget(budget, prefilling, num_tokens)
            num_new = sum(num_tokens.values()) - num_before
            if num_new == 0:
                break
            budget, prefilling = budget - num_new, []
        return [PrefillChunk(r, r.num_computed_tokens, r.num_computed_tokens + n) for r, n in num_tokens.items()]

    def _divide_budget(self, budget: int, prefilling: list[Request], num_tokens: dict[Request, int]) -> None:
        """Adds the tokens to prefill by request: up to half the budget for the oldest prompt, the rest for the prompts
        with the fewest tokens left. So short prompts overtake long ones, and none is left behind.

        Worked example: prompts with 7998, 4 and 4 tokens left, in the order of arrival, and a budget of 64. The first
        gets 32, the others 4 each, and the first the remaining 24.
        """
        waiting = sorted(self.waiting, key=_needs_first_slot, reverse=True) if self._num_shared_slots else self.waiting
        requests = [*prefilling, *islice(waiting, len(self._free_slots))]
        shortest_first = sorted(requests, key=lambda r: r.num_prefill_tokens - r.num_computed_tokens)
        can_admit = True
        for request, limit in [(r, -(-budget // 2)) for r in requests[:1]] + [(r, budget) for r in shortest_first]:
            if request.state is RequestState.WAITING:
                can_admit = can_admit and self._admit(request)
                if not can_admit:
                    continue
            num_planned = num_tokens.get(request, 0)
            num_left = request.num_prefill_tokens - request.num_computed_tokens - num_planned
            num_new = min(num_left, limit, budget)
            if num_new > 0:
                num_tokens[request] = num_planned + num_new
                budget -= num_new
            if budget == 0:
                break

    def _admit(self, request: Request) -> bool:
        """Gives a waiting request a slot and blocks for its whole prefill, leaving one free block per running request.
        False if there are not enough blocks."""
        num_tokens = request.num_prefill_tokens
        request.block_ids, request.block_hashes = self.pool.find_cached_blocks(
            request.all_token_ids[:num_tokens], request.params.cache_salt
        )
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
        self.waiting.remove(request)
        self.running.append(request)
        self.changed_requests.append(request)
        if request.group is not None:
            self._num_shared_slots += request.group.num_slots > 0
            request.group.num_slots += 1
        if num_tokens - request.num_computed_tokens <= self.pool.block_size:
            self._enqueue_follower(request)  # it would not find more cached blocks later
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
                self._enqueue_follower(request)
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
                previous = hashes[-1] if hashes else self.pool.hash_salt(request.params.cache_salt)
                hashes.append(self.pool.hash_block(previous, token_ids, index))
                self.pool.cache_block(request.block_ids[index], hashes[-1])
        next_hash = (len(hashes) + 1) * size + 1 if self.pool.prefix_caching else request.max_model_len + 1
        request.num_tokens_for_next_hash = next_hash

    def finish_request(self, request: Request) -> None:
        """Releases everything a request holds. Steps in flight write before any step launched later."""
        if request.state is RequestState.FINISHED:
            return
        if request.state is not RequestState.WAITING:
            self._release(request)
        elif request.group is not None and request in request.group.followers:
            request.group.followers.remove(request)
        else:
            self.waiting.remove(request)
        self._enqueue_follower(request)
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
        if request.group is not None:
            request.group.num_slots -= 1
            self._num_shared_slots -= request.group.num_slots > 0


def _needs_first_slot(request: Request) -> bool:
    return request.group is None or request.group.num_slots == 0
