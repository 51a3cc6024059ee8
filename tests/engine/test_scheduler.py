"""The scheduler with a simulated device whose steps yield a random number of tokens."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace

import pytest
from engine_integrity import check_scheduler
from hypothesis import given
from hypothesis import strategies as st
from support import many

from peagle.config import SamplingParams
from peagle.engine.kv_cache import BlockPool
from peagle.engine.request import Request, RequestGroup, RequestState, SchedulerOutput
from peagle.engine.scheduler import EXTRA_BLOCKS, Scheduler

SIZE, MAX_MODEL_LEN = 4, 40


def make_request(request_id: int, prompt: list[int], max_tokens: int, max_model_len: int = MAX_MODEL_LEN) -> Request:
    return Request(request_id, prompt, SamplingParams(max_tokens), 0, frozenset(), max_model_len)


def make_group(first_id: int, n: int, prompt: list[int], max_tokens: int) -> list[Request]:
    group = RequestGroup(None, prompt)
    group.requests = [make_request(first_id + i, prompt, max_tokens) for i in range(n)]
    for request in group.requests:
        request.group = group
    return group.requests


def make_scheduler(
    num_blocks: int = 200, max_num_seqs: int = 8, k: int = 3, chunk: int = 8, idle_chunk: int = 16, drafter: bool = True
) -> Scheduler:
    pool = BlockPool(num_blocks + 1, SIZE, lookahead=int(drafter))
    return Scheduler(pool, max_num_seqs, k, lambda batch_size: k, lambda batch_size, k, chunks: k, chunk, idle_chunk)


class SimulatedDevice:
    """Replaces the model runner: tracks the true position of each request and checks where each step writes."""

    def __init__(self, scheduler: Scheduler, rng: random.Random, max_in_flight: int, stop_rate: float = 0.0) -> None:
        """Each token finishes its request with probability `stop_rate`."""
        self.scheduler, self.rng = scheduler, rng
        self.max_in_flight, self.stop_rate = max_in_flight, stop_rate
        self.position: dict[int, int] = {}  # of the newest token, by request id
        self.in_flight: deque[tuple[SchedulerOutput, list[tuple[Request, int, int]]]] = deque()

    def check_write(self, request: Request, begin: int, end: int) -> None:
        """The step writes positions begin to end, up to the maximum length."""
        assert min(end, MAX_MODEL_LEN) <= len(request.block_ids) * SIZE, "written beyond its blocks"
        for index in range(begin // SIZE, -(-min(end, MAX_MODEL_LEN) // SIZE)):
            shared = self.scheduler.pool.ref_counts[request.block_ids[index]] > 1
            assert not shared, "written into a shared block"
            assert index >= len(request.block_hashes), "written into a block in the prefix cache"

    def launch(self, scheduled: SchedulerOutput) -> None:
        gains = []
        k = scheduled.num_draft_tokens
        for request in scheduled.decode_requests:
            assert request.state is RequestState.DECODING and request.slot >= 0
            start, gain = self.position[request.id], self.rng.randint(1, k + 1)
            self.check_write(request, start, start + 2 * k if k else start + 1)
            self.position[request.id] = start + gain
            gains.append((request, gain, k + 1))
        for chunk in scheduled.prefill_chunks:
            request = chunk.request
            assert chunk.begin == request.num_computed_tokens < chunk.end <= request.num_prefill_tokens
            num_masks = max(self.scheduler.max_speculative_tokens - 1, 0) if chunk.is_last else 0
            self.check_write(request, chunk.begin, chunk.end + num_masks)
            if chunk.is_last:
                self.position[request.id] = chunk.end
                if not request.output_token_ids:
                    gains.append((request, 1, 1))
        self.in_flight.append((scheduled, gains))
        self.scheduler.mark_launched(scheduled)
        for chunk in scheduled.prefill_chunks:
            self.check_cached(chunk.request, chunk.end)

    def check_cached(self, request: Request, num_computed: int) -> None:
        """Cached blocks are computed, and the tokens of their hash are known."""
        num_cached = len(request.block_hashes) * SIZE
        assert num_cached <= num_computed
        assert num_cached + self.scheduler.pool.lookahead <= request.num_tokens

    def commit(self) -> None:
        _, gains = self.in_flight.popleft()
        for request, gain, rows in gains:
            if request.state is RequestState.FINISHED:
                continue
            for _ in range(gain):
                request.output_token_ids.append(len(request.output_token_ids) % 3)
                request.num_tokens += 1
                full = len(request.output_token_ids) >= request.params.max_tokens or request.num_tokens >= MAX_MODEL_LEN
                if full or self.rng.random() < self.stop_rate:
                    request.finish_reason = "stop"
                    break
            self.scheduler.mark_returned(request, rows)
            self.check_cached(request, request.num_tokens - 1)
            if request.finish_reason:
                self.scheduler.finish_request(request)

    def step(self) -> SchedulerOutput | None:
        scheduled = self.scheduler.schedule()
        if scheduled is not None:
            self.launch(scheduled)
        if self.in_flight and (scheduled is None or len(self.in_flight) > self.max_in_flight):
            self.commit()
        check_scheduler(self.scheduler)
        return scheduled


@many(120)
@given(st.integers(0, 2**32), st.integers(0, 2))
def test_random_load(seed: int, max_in_flight: int) -> None:
    """All requests finish, the oldest is preempted only for a group without slots, and no step writes into a shared
    block."""
    rng = random.Random(seed)
    max_k = rng.choice([0, 1, 3, 7])
    sizes = rng.randint(10, 30), rng.randint(1, 5), max_k, rng.randint(1, 9), 16
    scheduler = make_scheduler(*sizes, drafter=max_k > 0)
    scheduler.choose_k = lambda batch: rng.randint(0, max_k)
    device = SimulatedDevice(scheduler, rng, max_in_flight, stop_rate=0.02)
    requests: list[Request] = []
    steps = 0
    while len(requests) < 12 or not scheduler.is_idle or device.in_flight:
        if len(requests) < 12 and rng.random() < 0.5:
            prompt = [t % 3 for t in range(rng.randint(1, MAX_MODEL_LEN - 1))]
            group = make_group(len(requests), rng.choice([1, 1, 3]), prompt, rng.randint(1, 30))
            requests += group
            for request in group:
                scheduler.add_request(request)
        if requests and rng.random() < 0.03:
            scheduler.finish_request(rng.choice(requests))
        first = scheduler.running[0] if scheduler.running else None
        num_before = first.num_preemptions if first else 0
        may_return_slot = first is not None and first.group is not None and first.group.num_slots > 1
        device.step()
        if first is not None and not may_return_slot:
            assert first.num_preemptions == num_before, "the oldest request was preempted"
        steps += 1
        assert steps < 3000, "it does not finish"
    assert all(r.state is RequestState.FINISHED for r in requests)
    assert scheduler.pool.num_free_blocks == scheduler.pool.num_blocks - 1


def test_last_admitted_request_is_preempted_and_resumed_first() -> None:
    scheduler = make_scheduler(num_blocks=10, max_num_seqs=3, k=1, idle_chunk=100)
    device = SimulatedDevice(scheduler, random.Random(0), 0)
    requests = [make_request(i, [i] * 5, 34) for i in range(3)]
    for request in requests[:2]:
        scheduler.add_request(request)
    while not requests[1].num_preemptions:
        device.step()
    assert requests[0].num_preemptions == 0 and not requests[1].block_ids
    scheduler.add_request(requests[2])
    assert list(scheduler.waiting) == [requests[1], requests[2]]
    num_output_tokens = len(requests[1].output_token_ids)
    while requests[1].state is RequestState.WAITING:
        device.step()
    assert len(requests[1].output_token_ids) == num_output_tokens
    assert requests[1].num_prefill_tokens == 5 + num_output_tokens - 1


@pytest.mark.parametrize(("num_blocks", "max_allocations"), [(40, 3), (13, 8)])
def test_extra_blocks_while_half_are_free(num_blocks: int, max_allocations: int) -> None:
    """Bounded by EXTRA_BLOCKS and the request's maximum length; without free blocks each is allocated when needed."""
    scheduler = make_scheduler(num_blocks=num_blocks, max_num_seqs=1, k=1, idle_chunk=100)
    device = SimulatedDevice(scheduler, random.Random(0), 0)
    request = make_request(0, [0] * 5, 30)
    scheduler.add_request(request)
    num_allocations, num_held = 0, 0
    while device.step() is not None or device.in_flight:
        if request.state is RequestState.FINISHED:
            break
        needed = -(-(request.num_tokens + 2) // SIZE)
        assert needed <= len(request.block_ids) + 1 and len(request.block_ids) <= min(needed + 1 + EXTRA_BLOCKS, 9)
        num_allocations += len(request.block_ids) > num_held
        num_held = len(request.block_ids)
    assert num_held == 9 and num_allocations <= max_allocations and (num_blocks > 13 or num_allocations > 4)


def test_prefill_budget_depends_on_decode_requests() -> None:
    scheduler = make_scheduler(chunk=3, idle_chunk=16)
    device = SimulatedDevice(scheduler, random.Random(0), 0)
    scheduler.add_request(make_request(0, [0] * 10, 30))
    scheduler.add_request(make_request(1, [1] * 10, 30))
    scheduled = device.step()
    assert scheduled is not None and [(c.begin, c.end) for c in scheduled.prefill_chunks] == [(0, 10), (0, 6)]
    scheduled = device.step()  # the first decodes now, so the second is prefilled in small chunks
    assert scheduled is not None and [(c.begin, c.end) for c in scheduled.prefill_chunks] == [(6, 9)]
    assert [r.id for r in scheduled.decode_requests] == [0]


def test_short_prompts_overtake_a_long_one() -> None:
    scheduler = make_scheduler(num_blocks=3000, max_num_seqs=16, chunk=64, idle_chunk=64)
    device = SimulatedDevice(scheduler, random.Random(0), 0)
    long = make_request(0, [0] * 7998, 1, max_model_len=8000)
    scheduler.add_request(long)
    for i in (1, 2):
        scheduler.add_request(make_request(i, [i] * 4, 1))
    scheduled = device.step()
    assert scheduled is not None
    assert [(c.request.id, c.end - c.begin) for c in scheduled.prefill_chunks] == [(0, 32 + 24), (1, 4), (2, 4)]
    num_steps = 1
    while long.state is not RequestState.FINISHED:  # prompts keep arriving that would use up the whole budget
        for i in range(16):
            scheduler.add_request(make_request(100 * num_steps + i, [i] * 8, 1))
        device.step()
        num_steps += 1
    assert num_steps <= 2 + 7998 // 32


@pytest.mark.parametrize("max_in_flight", [0, 1])
def test_requests_of_a_prompt_leave_slots_to_others(max_in_flight: int) -> None:
    """One prompt with many requests takes all slots, and returns one when another prompt arrives."""
    scheduler = make_scheduler(num_blocks=2000, max_num_seqs=8, idle_chunk=200)
    device = SimulatedDevice(scheduler, random.Random(0), max_in_flight)
    many = make_group(0, 30, [7] * 21, 19)
    for request in many:
        scheduler.add_request(request)
    for _ in range(3):
        device.step()
    assert len(scheduler.running) == 8
    assert scheduler.pool.num_hit_tokens == 7 * 20, "later requests reuse the blocks of the first"
    others = [make_request(100 + i, [i] * 5, 4) for i in range(3)]
    for other in others:
        scheduler.add_request(other)
    for _ in range(4 + 6 * max_in_flight):
        device.step()
    assert all(other.output_token_ids for other in others)
    assert sum(request.num_preemptions for request in many) <= len(others)
    while not scheduler.is_idle:
        device.step()
    assert all(len(request.output_token_ids) == request.params.max_tokens for request in (*many, *others))


def test_no_step_for_a_request_that_is_certain_to_finish() -> None:
    scheduler = make_scheduler(k=3)
    device = SimulatedDevice(scheduler, random.Random(0), max_in_flight=1)
    request = make_request(0, [0] * 4, 2)
    scheduler.add_request(request)
    assert device.step() is not None  # prefill: yields the first token
    scheduled = device.step()  # a decode step, launched before that token returned
    assert scheduled is not None and scheduled.decode_requests == [request]
    assert request.num_in_flight_steps == 1 and len(request.output_token_ids) == 1
    assert scheduler.schedule() is None, "the step in flight yields the second and last token"


@pytest.mark.parametrize("state", ["waiting", "prefill", "decoding"])
def test_finishing_in_any_state_releases_everything(state: str) -> None:
    scheduler = make_scheduler(chunk=3, idle_chunk=3)
    device = SimulatedDevice(scheduler, random.Random(0), 0)
    request = make_request(0, [0] * 8, 30)
    scheduler.add_request(request)
    for _ in range({"waiting": 0, "prefill": 1, "decoding": 5}[state]):
        device.step()
    scheduler.finish_request(request)
    scheduler.finish_request(request)  # has no effect
    assert scheduler.is_idle
    check_scheduler(scheduler)
    assert scheduler.pool.num_free_blocks == scheduler.pool.num_blocks - 1


def test_start_of_a_prompt_is_evicted_last() -> None:
    scheduler = make_scheduler(num_blocks=12, k=1, idle_chunk=100)
    device = SimulatedDevice(scheduler, random.Random(0), 0)
    scheduler.add_request(make_request(0, [7] * 30, 1))
    while not scheduler.is_idle:
        device.step()
    assert scheduler.pool.allocate(8) is not None  # all uncached blocks and some of the cached
    assert scheduler.pool.find_cached_blocks([7] * 30)[0], "the first block must still be cached"


@pytest.mark.parametrize("drafter", [True, False])
@pytest.mark.parametrize("length", [7, 8, 9])
def test_prompt_that_continues_an_output_hits_all_its_blocks(length: int, drafter: bool) -> None:
    scheduler = make_scheduler(idle_chunk=100, drafter=drafter)
    device = SimulatedDevice(scheduler, random.Random(0), 0)
    request = make_request(0, [7] * length, 18)
    scheduler.add_request(request)
    while not scheduler.is_idle:
        device.step()
    found, _ = scheduler.pool.find_cached_blocks([*request.all_token_ids, 1, 1])
    assert len(found) == (request.num_tokens - 1) // SIZE


def test_requests_share_prefixes_of_their_own_salt_only() -> None:
    scheduler = make_scheduler(idle_chunk=100)
    device = SimulatedDevice(scheduler, random.Random(0), 0)
    hits = []
    for salt in ("a", None, "b", "a", None):
        request = make_request(len(hits), [7] * 17, 3)
        request.params = replace(request.params, cache_salt=salt)
        before = scheduler.pool.num_hit_tokens
        scheduler.add_request(request)
        while not scheduler.is_idle:
            device.step()
        hits.append(scheduler.pool.num_hit_tokens - before)
    assert hits == [0, 0, 0, 16, 16]


def test_prefix_cache_metrics() -> None:
    scheduler = make_scheduler(num_blocks=12, max_num_seqs=2, k=1, idle_chunk=100)
    device = SimulatedDevice(scheduler, random.Random(0), 0)
    for request_id in range(3):
        scheduler.add_request(make_request(request_id, [3] * 20, 15))
    while not scheduler.is_idle:
        device.step()
    pool = scheduler.pool
    assert pool.num_hit_tokens % SIZE == 0 and 0 < pool.num_hit_tokens < pool.num_queried_tokens
    assert scheduler.num_preemptions or pool.num_queried_tokens == 60
