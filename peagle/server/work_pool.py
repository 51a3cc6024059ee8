"""`WorkPool`: runs slow work in threads, in turns between clients."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class WorkPool:
    """Runs a few functions at a time. Clients take turns, so one with much work does not delay the others.

    Work that is cancelled while it waits never runs. Running work keeps its place until its function returns.
    """

    def __init__(self, num_threads: int) -> None:
        self.num_free = num_threads
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # by client, the next one first

    @property
    def num_waiting(self) -> int:
        return sum(len(turns) for turns in self._waiting.values())

    async def run(self, client: str, function: Callable[[], T]) -> T:
        await self._wait_for_turn(client)
        running = asyncio.get_running_loop().run_in_executor(None, function)
        running.add_done_callback(lambda _: self._end_turn())
        return await asyncio.shield(running)

    async def _wait_for_turn(self, client: str) -> None:
        if self.num_free:
            self.num_free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._waiting[client].remove(turn)
                if not self._waiting[client]:
                    del self._waiting[client]
            else:  # its turn came at the same time
                self._end_turn()
            raise

    def _end_turn(self) -> None:
        if not self._waiting:
            self.num_free += 1
            return
        client, turns = self._waiting.popitem(last=False)
        turns.popleft().set_result(None)
        if turns:
            self._waiting[client] = turns  # behind the other clients
