"""Who runs in the next step: rounds for those that decode, chunks for those whose prompts are being read.

Knows nothing about tensors or text. Plans one step ahead of what has come back: a launched round brings
between one and k+1 tokens, so blocks are provided for the most it can bring. When blocks run out, the request
admitted last gives its own back and reads its tokens again later.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable

from peagle.engine.kv_cache import BlockPool
from peagle.engine.request import Chunk, Plan, Request, State

PREFILL_EVERY = 8  # steps at most between two that read prompts, while many decode
MANY = 64  # decoding requests; below that, prompts are read at once


class Scheduler:
    def __init__(
        self,
        pool: BlockPool,
        max_num_seqs: int,
        most_drafts: int,
        drafts_for: Callable[[int], int],
        chunk_tokens: int,
        idle_chunk_tokens: int,
    ) -> None:
        """`chunk_tokens` a step are read while others decode, `idle_chunk_tokens` when nobody does."""
        self.pool, self.most_drafts, self.drafts_for = pool, most_drafts, drafts_for
        self.max_num_seqs = max_num_seqs
        self.chunk_tokens, self.idle_chunk_tokens = chunk_tokens, idle_chunk_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in the order of admission
        self._slots = list(range(max_num_seqs))
        self._since_prefill = PREFILL_EVERY
        self.moved: list[Request] = []  # whose blocks changed since the runner last asked
        self.preemptions = 0

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def plan(self) -> Plan | None:
        """None: nothing to do until what is in flight has come back."""
        decoding = [r for r in self.running if r.state is State.DECODING and self._wants_a_round(r)]
        k = self.drafts_for(len(decoding))
        placed: list[Request] = []
        for request in decoding:
            if request.state is not State.DECODING:
                continue  # gave its blocks back for one before it
            if not self._make_room(request, request.length - 1 + request.reach + max(2 * k, 1)):
                return None
            if request.state is State.DECODING:
                placed.append(request)
        placed = [r for r in placed if r.state is State.DECODING]
        chunks = self._chunks(len(placed))
        return Plan(placed, k, chunks) if placed or chunks else None

    @staticmethod
    def _wants_a_round(request: Request) -> bool:
        """Not if the rounds in flight are sure to fill it up: each brings at least one token."""
        least = len(request.output_ids) + request.in_flight
        return least < request.params.max_tokens and len(request.prompt_ids) + least < request.longest

    def _make_room(self, request: Request, tokens: int) -> bool:
        """Blocks for the first `tokens` positions; False if that has to wait for what is in flight."""
        missing = self._missing(request, tokens)
        while missing > 0:
            blocks = self.pool.allocate(missing)
            if blocks is not None:
                request.blocks += blocks
                self.moved.append(request)
                return True
            if any(r.in_flight for r in self.running):
                return False
            self._preempt(self.running[-1])
            if request.state is not State.DECODING:
                return True
        return True

    def _missing(self, request: Request, tokens: int) -> int:
        return -(-min(tokens, request.longest) // self.pool.block_size) - len(request.blocks)

    def _preempt(self, request: Request) -> None:
        self._take_back(request)
        request.state = State.WAITING
        request.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(request)

    def _chunks(self, decoding: int) -> list[Chunk]:
        self._since_prefill += 1
        if not self.waiting and not any(r.state is State.READING for r in self.running):
            return []
        if decoding >= MANY and self._since_prefill < PREFILL_EVERY and decoding > self.max_num_seqs // 2:
            return []
        budget = self.chunk_tokens if decoding else self.idle_chunk_tokens
        chunks = []
        for request in self.running:
            if request.state is State.READING and budget > 0:
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

    @staticmethod
    def _chunk(request: Request, budget: int) -> Chunk:
        return Chunk(request, request.read, min(request.to_read, request.read + budget))

    def _admit(self, request: Request) -> bool:
        """Gives it a slot and blocks for its whole prompt; one block for each that decodes is left alone."""
        request.blocks, request.names = self.pool.find(request.tokens[: request.to_read])
        missing = self._missing(request, request.to_read + max(self.most_drafts, 1))
        spare = len(self.running)
        blocks = self.pool.allocate(missing) if self.pool.available >= missing + spare or not self.running else None
        if blocks is None:
            self.pool.release(request.blocks)
            request.blocks, request.names = [], []
            return False
        request.read = len(request.blocks) * self.pool.block_size
        self.pool.asked += request.to_read
        self.pool.hits += request.read
        request.blocks += blocks
        request.slot = heapq.heappop(self._slots)
        request.state = State.READING
        self.running.append(request)
        self.moved.append(request)
        return True

    def launched(self, plan: Plan) -> None:
        """The plan is on its way: what it writes can be counted on by everything launched later."""
        for request in plan.decoding:
            request.in_flight += 1
            request.reach += plan.drafts + 1
        for chunk in plan.chunks:
            request = chunk.request
            request.read = chunk.end
            self._publish(request, chunk.end)
            if chunk.final:
                request.state = State.DECODING
                if not request.output_ids:  # the pass says a first token; coming back, the newest is known
                    request.in_flight += 1
                    request.reach += 1

    def returned(self, request: Request, rows: int) -> None:
        """A pass over `rows` rows has come back and its tokens are appended."""
        request.in_flight -= 1
        request.reach -= rows
        if request.state is State.DECODING:
            self._publish(request, request.length - 1)

    def _publish(self, request: Request, final: int) -> None:
        """Names the blocks before position `final`, as far as the tokens that name them are known."""
        size = self.pool.block_size
        full = min(final // size, (request.length - self.pool.lookahead) // size)
        if full <= len(request.names) or not self.pool.reuse:
            return
        tokens = request.tokens
        for index in range(len(request.names), full):
            name = self.pool.name(request.names[-1] if request.names else b"", tokens, index)
            request.names.append(name)
            self.pool.publish(request.blocks[index], name)

    def finish(self, request: Request) -> None:
        """Takes everything back; rounds in flight write before anything launched later does."""
        if request.state is State.WAITING:
            if request in self.waiting:
                self.waiting.remove(request)
        elif request.state is not State.FINISHED:
            self._take_back(request)
        request.state = State.FINISHED

    def _take_back(self, request: Request) -> None:
        self.pool.release(reversed(request.blocks))  # a start outlives what follows it: without it that is not found
        request.blocks, request.names = [], []
        heapq.heappush(self._slots, request.slot)
        request.slot, request.read = -1, 0
        self.running.remove(request)

    def check_integrity(self) -> None:
        self.pool.check_integrity([r.blocks for r in self.running])
        used = [r.slot for r in self.running]
        assert sorted(used + self._slots) == list(range(self.max_num_seqs)), "a slot is lost or doubled"
        assert all(not r.blocks and r.slot < 0 for r in self.waiting), "a waiting request holds something"
