"""The scheduler alone, on passes that bring as many tokens as chance has it: who waits for whom, and for what."""

from __future__ import annotations

import random
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import many

from peagle.config import SamplingParams
from peagle.engine.kv_cache import BlockPool
from peagle.engine.request import Request, RequestState, SchedulerOutput
from peagle.engine.scheduler import BLOCKS_AHEAD, MANY, PREFILL_EVERY, Scheduler

SIZE, LONGEST = 4, 40


def make_request(number: int, prompt: list[int], max_tokens: int) -> Request:
    none: frozenset[int] = frozenset()
    return Request(
        number,
        prompt,
        SamplingParams(max_tokens),
        0,
        stop_token_ids=none,
        all_stop_token_ids=none,
        eos_ids=none,
        max_model_len=LONGEST,
    )


def make_scheduler(
    blocks: int = 200, seqs: int = 8, most: int = 3, chunk: int = 8, idle: int = 16, drafter: bool = True
) -> Scheduler:
    pool = BlockPool(blocks + 1, SIZE, lookahead=int(drafter))
    return Scheduler(pool, seqs, most, lambda batch: most, chunk, idle)


class Device:
    """Stands for the runner: knows how far each request really is, and that it writes only where it may."""

    def __init__(self, scheduler: Scheduler, choose: random.Random, lookahead: int, stops: float = 0.0) -> None:
        """Each token ends its text with chance `stops`."""
        self.scheduler, self.choose, self.lookahead, self.stops = scheduler, choose, lookahead, stops
        self.start: dict[int, int] = {}  # position of the newest token, by request
        self.in_flight: deque[tuple[SchedulerOutput, list[tuple[Request, int, int]]]] = deque()

    def writes(self, request: Request, begin: int, end: int) -> None:
        """Positions begin to end, as far as the context goes."""
        assert min(end, LONGEST) <= len(request.block_ids) * SIZE, "written beyond its blocks"
        for index in range(begin // SIZE, -(-min(end, LONGEST) // SIZE)):
            shared = self.scheduler.pool.ref_counts[request.block_ids[index]] > 1
            assert not shared, "written into a block that others read"
            assert index >= len(request.block_hashes), "written into a block that is published"

    def launch(self, plan: SchedulerOutput) -> None:
        gains = []
        k = plan.num_draft_tokens
        for request in plan.decode_requests:
            assert request.state is RequestState.DECODING and request.slot >= 0
            start, gain = self.start[request.id], self.choose.randint(1, k + 1)
            self.writes(request, start, start + 2 * k if k else start + 1)
            self.start[request.id] = start + gain
            gains.append((request, gain, k + 1))
        for chunk in plan.prefill_chunks:
            request = chunk.request
            assert chunk.begin == request.num_computed_tokens < chunk.end <= request.num_prefill_tokens
            masks = max(self.scheduler.max_speculative_tokens - 1, 0) if chunk.is_last else 0
            self.writes(request, chunk.begin, chunk.end + masks)
            if chunk.is_last:
                self.start[request.id] = chunk.end
                if not request.output_token_ids:
                    gains.append((request, 1, 1))
        self.in_flight.append((plan, gains))
        self.scheduler.launched(plan)
        for chunk in plan.prefill_chunks:
            self.named_is_final(chunk.request, chunk.end)

    def named_is_final(self, request: Request, read: int) -> None:
        """All of a published block has been read, and what its name covers is known."""
        named = len(request.block_hashes) * SIZE
        assert named <= read and named + self.scheduler.pool.lookahead <= request.num_tokens

    def commit(self) -> None:
        _, gains = self.in_flight.popleft()
        for request, gain, rows in gains:
            if request.state is RequestState.FINISHED:
                continue
            for _ in range(gain):
                request.output_token_ids.append(len(request.output_token_ids) % 3)
                request.num_tokens += 1
                full = len(request.output_token_ids) >= request.params.max_tokens or request.num_tokens >= LONGEST
                if full or self.choose.random() < self.stops:
                    request.finish_reason = "stop"
                    break
            self.scheduler.returned(request, rows)
            self.named_is_final(request, request.num_tokens - 1)
            if request.finish_reason:
                self.scheduler.finish(request)

    def step(self) -> SchedulerOutput | None:
        plan = self.scheduler.schedule()
        if plan is not None:
            self.launch(plan)
        if self.in_flight and (plan is None or len(self.in_flight) > self.lookahead):
            self.commit()
        self.scheduler.check_integrity()
        return plan


@many(120)
@given(st.integers(0, 2**32), st.integers(0, 2))
def test_random_load(seed: int, lookahead: int) -> None:
    """Everybody ends, the first in line is never preempted, and nobody writes where another reads."""
    choose = random.Random(seed)
    most = choose.choice([0, 1, 3, 7])
    sizes = choose.randint(10, 30), choose.randint(1, 5), most, choose.randint(1, 9), 16
    scheduler = make_scheduler(*sizes, drafter=most > 0)
    scheduler.drafts_for = lambda batch: choose.randint(0, most)
    device = Device(scheduler, choose, lookahead, stops=0.02)
    requests: list[Request] = []
    steps = 0
    while len(requests) < 12 or not scheduler.idle or device.in_flight:
        if len(requests) < 12 and choose.random() < 0.5:
            prompt = [t % 3 for t in range(choose.randint(1, LONGEST - 1))]
            requests.append(make_request(len(requests), prompt, choose.randint(1, 30)))
            scheduler.add(requests[-1])
        if requests and choose.random() < 0.03:
            scheduler.finish(choose.choice(requests))
        first = scheduler.running[0] if scheduler.running else None
        times = first.num_preemptions if first else 0
        device.step()
        assert first is None or first.num_preemptions == times, "the eldest lost its blocks"
        steps += 1
        assert steps < 3000, "it does not end"
    assert all(r.state is RequestState.FINISHED for r in requests)
    scheduler.pool.reset_prefix_cache()
    assert scheduler.pool.num_free_blocks == scheduler.pool.num_blocks - 1


def test_the_last_admitted_gives_way_and_comes_back_first() -> None:
    scheduler = make_scheduler(blocks=10, seqs=3, most=1, idle=100)
    device = Device(scheduler, random.Random(0), 0)
    requests = [make_request(i, [i] * 5, 34) for i in range(3)]
    for request in requests[:2]:
        scheduler.add(request)
    while not requests[1].num_preemptions:
        device.step()
    assert requests[0].num_preemptions == 0 and not requests[1].block_ids
    scheduler.add(requests[2])
    assert list(scheduler.waiting) == [requests[1], requests[2]]
    kept = len(requests[1].output_token_ids)
    while requests[1].state is RequestState.WAITING:
        device.step()
    assert len(requests[1].output_token_ids) == kept and requests[1].num_prefill_tokens == 5 + kept - 1


@pytest.mark.parametrize(("blocks", "most_times"), [(40, 3), (13, 8)])
def test_blocks_come_some_at_a_time_while_half_are_free(blocks: int, most_times: int) -> None:
    """Nobody has more than those, none past its end, and where room is scarce each comes when it is needed."""
    scheduler = make_scheduler(blocks=blocks, seqs=1, most=1, idle=100)
    device = Device(scheduler, random.Random(0), 0)
    request = make_request(0, [0] * 5, 30)
    scheduler.add(request)
    times, held = 0, 0
    while device.step() is not None or device.in_flight:
        if request.state is RequestState.FINISHED:
            break
        needed = -(-(request.num_tokens + 2) // SIZE)
        assert needed <= len(request.block_ids) + 1 and len(request.block_ids) <= min(needed + 1 + BLOCKS_AHEAD, 9)
        times, held = times + (len(request.block_ids) > held), len(request.block_ids)
    assert held == 9 and times <= most_times and (blocks > 13 or times > 4)


def test_prompts_are_cut_by_who_else_is_there() -> None:
    scheduler = make_scheduler(chunk=3, idle=16)
    device = Device(scheduler, random.Random(0), 0)
    scheduler.add(make_request(0, [0] * 10, 30))
    scheduler.add(make_request(1, [1] * 10, 30))
    plan = device.step()
    assert plan is not None and [(c.begin, c.end) for c in plan.prefill_chunks] == [(0, 10), (0, 6)]
    plan = device.step()  # the first decodes now, so the second reads in small pieces
    assert plan is not None and [(c.begin, c.end) for c in plan.prefill_chunks] == [(6, 9)]
    assert [r.id for r in plan.decode_requests] == [0]


def test_many_that_decode_are_not_held_up_at_every_step() -> None:
    """While few slots are free, a prompt waits for others to be read with; it is not forgotten."""
    scheduler = make_scheduler(blocks=2000, seqs=MANY + 1, most=0, chunk=50, idle=2000)
    device = Device(scheduler, random.Random(0), 0)
    for i in range(MANY):
        scheduler.add(make_request(i, [i, i], 30))
    device.step()
    scheduler.add(make_request(1000, [5] * 39, 30))
    waits = 0
    while scheduler.waiting:
        plan = device.step()
        assert plan is not None and len(plan.decode_requests) > MANY // 2
        waits += 1
    assert 1 < waits <= PREFILL_EVERY + 1


def test_no_round_for_what_is_surely_full() -> None:
    scheduler = make_scheduler(most=3)
    device = Device(scheduler, random.Random(0), lookahead=1)
    request = make_request(0, [0] * 4, 2)
    scheduler.add(request)
    assert device.step() is not None  # the prompt: brings the first token
    plan = device.step()  # a round, launched before that token is back
    assert plan is not None and plan.decode_requests == [request]
    assert request.num_in_flight_steps == 1 and len(request.output_token_ids) == 1
    assert scheduler.schedule() is None, "the round in flight brings the second and last"


@pytest.mark.parametrize("state", ["waiting", "reading", "decoding"])
def test_finishing_in_any_state_gives_back(state: str) -> None:
    scheduler = make_scheduler(chunk=3, idle=3)
    device = Device(scheduler, random.Random(0), 0)
    request = make_request(0, [0] * 8, 30)
    scheduler.add(request)
    for _ in range({"waiting": 0, "reading": 1, "decoding": 5}[state]):
        device.step()
    scheduler.finish(request)
    scheduler.finish(request)  # twice does no harm
    assert scheduler.idle
    scheduler.check_integrity()
    scheduler.pool.reset_prefix_cache()
    assert scheduler.pool.num_free_blocks == scheduler.pool.num_blocks - 1


def test_the_start_of_a_prompt_outlives_its_end() -> None:
    scheduler = make_scheduler(blocks=12, most=1, idle=100)
    device = Device(scheduler, random.Random(0), 0)
    scheduler.add(make_request(0, [7] * 30, 1))
    while not scheduler.idle:
        device.step()
    assert scheduler.pool.allocate(8) is not None  # all blank ones and some of the named
    assert scheduler.pool.find_cached_blocks([7] * 30)[0], "without its first block the rest cannot be found"


@pytest.mark.parametrize("drafter", [True, False])
@pytest.mark.parametrize("length", [7, 8, 9])
def test_a_prompt_that_goes_on_with_an_answer_finds_all_of_it(length: int, drafter: bool) -> None:
    scheduler = make_scheduler(idle=100, drafter=drafter)
    device = Device(scheduler, random.Random(0), 0)
    request = make_request(0, [7] * length, 18)
    scheduler.add(request)
    while not scheduler.idle:
        device.step()
    found, _ = scheduler.pool.find_cached_blocks([*request.all_token_ids, 1, 1])
    assert len(found) == (request.num_tokens - 1) // SIZE


def test_what_was_found_is_counted_once() -> None:
    scheduler = make_scheduler(blocks=12, seqs=2, most=1, idle=100)
    device = Device(scheduler, random.Random(0), 0)
    for number in range(3):
        scheduler.add(make_request(number, [3] * 20, 15))
    while not scheduler.idle:
        device.step()
    pool = scheduler.pool
    assert pool.num_hit_tokens % SIZE == 0 and 0 < pool.num_hit_tokens < pool.num_queried_tokens
    assert scheduler.num_preemptions or pool.num_queried_tokens == 60
