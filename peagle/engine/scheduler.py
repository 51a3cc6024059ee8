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
from peagle.engine.request import Chunk, Plan, Request, State

PREFILL_EVERY = 8  # steps at most that a prompt waits for company, while MANY decode and few places are free
MANY = 16
BLOCKS_AHEAD = 3  # that a request gets with one it needs, while half of them all are free


class Scheduler:
    def __init__(
        self,
        pool: BlockPool,
        max_num_seqs: int,
        most_drafts: int,
        drafts_for: Callable[[int], int],
        chunk_tokens: int,
        idle_chunk_tokens: int,
        round_sizes: Sequence[int] | None = None,
    ) -> None:
        """`chunk_tokens` a step are read while others decode, `idle_chunk_tokens` when nobody does. `round_sizes`
        are the numbers of drafts that rounds are recorded for; None: any will do."""
        self.pool, self.most_drafts, self.drafts_for = pool, most_drafts, drafts_for
        self.max_num_seqs = max_num_seqs
        self.round_sizes = range(most_drafts + 1) if round_sizes is None else round_sizes
        self.chunk_tokens, self.idle_chunk_tokens = chunk_tokens, idle_chunk_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in the order of admission
        self._slots = list(range(max_num_seqs))
        self._since_prefill = PREFILL_EVERY
        self._reading = 0  # how many of them are
        self.moved: list[Request] = []  # whose blocks changed since the runner last asked
        self.preemptions = 0
        self._limited = 0  # requests alive that say how many drafts they want at most

    def add(self, request: Request) -> None:
        self.waiting.append(request)
        self._limited += request.params.draft_tokens is not None

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def plan(self) -> Plan | None:
        """None: nothing to do until what is in flight has come back."""
        ready = State.DECODING
        decoding = [r for r in self.running if r.state is ready and r.length + r.in_flight < r.end]
        # (a round in flight brings at least one token, so those left out are sure to be full)
        k = self.drafts_for(len(decoding))
        if self._limited and decoding:
            k = min(k, self._wanted(decoding))
        ahead, size = max(2 * k, 1) - 1, self.pool.block_size
        for request in decoding:
            tokens = request.length + request.reach + ahead
            # those that gave their blocks back for one before them are no longer decoding
            if tokens > len(request.blocks) * size and request.state is ready:
                if not self._make_room(request, tokens):
                    return None
        if self.waiting and self.waiting[0].preemptions:
            decoding = [r for r in decoding if r.state is ready]
        chunks = self._chunks(len(decoding))
        if not decoding and not chunks:
            return None
        limited = [r for r in decoding if r.params.draft_tokens is not None] if self._limited else []
        return Plan(decoding, k, chunks, limited)

    def _wanted(self, decoding: list[Request]) -> int:
        """The most drafts that anybody wants; a recorded round has one of a few numbers of them."""
        most = max(self.most_drafts if (k := r.params.draft_tokens) is None else k for r in decoding)
        return min((k for k in self.round_sizes if k >= most), default=self.most_drafts)

    def _make_room(self, request: Request, tokens: int) -> bool:
        """Blocks for the first `tokens` positions; False if that has to wait for what is in flight."""
        missing = self._missing(request, tokens)
        while missing > 0:
            blocks = self.pool.allocate(missing + self._ahead(request, missing))
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

    def _ahead(self, request: Request, missing: int) -> int:
        """Of blocks that it will need later: whenever some change hands the device is told, between two rounds."""
        plenty = self.pool.available - missing - BLOCKS_AHEAD >= self.pool.num_blocks // 2
        return max(0, min(BLOCKS_AHEAD, self._missing(request, request.end) - missing)) if plenty else 0

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
        reading = [r for r in self.running if r.state is State.READING] if self._reading else []
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
        self._reading += 1
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
                self._reading -= 1
                if not request.output_ids:  # the pass says a first token; coming back, the newest is known
                    request.in_flight += 1
                    request.reach += 1

    def returned(self, request: Request, rows: int) -> None:
        """A pass over `rows` rows has come back and its tokens are appended."""
        request.in_flight -= 1
        request.reach -= rows
        if request.length >= request.next_name:
            self._publish(request, request.length - 1)

    def _publish(self, request: Request, final: int) -> None:
        """Names the blocks before position `final`, as far as the tokens that name them are known."""
        size = self.pool.block_size
        full = min(final // size, (request.length - self.pool.lookahead) // size)
        if full > len(request.names) and self.pool.reuse:
            tokens = request.tokens
            for index in range(len(request.names), full):
                name = self.pool.name(request.names[-1] if request.names else b"", tokens, index)
                request.names.append(name)
                self.pool.publish(request.blocks[index], name)
        request.next_name = (len(request.names) + 1) * size + 1 if self.pool.reuse else request.longest + 1

    def finish(self, request: Request) -> None:
        """Takes everything back; rounds in flight write before anything launched later does."""
        if request.state is State.WAITING:
            if request in self.waiting:
                self.waiting.remove(request)
        elif request.state is not State.FINISHED:
            self._take_back(request)
        if request.state is not State.FINISHED:
            self._limited -= request.params.draft_tokens is not None
        request.state = State.FINISHED

    def _take_back(self, request: Request) -> None:
        self._reading -= request.state is State.READING
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
