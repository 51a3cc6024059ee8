"""State of the request slots on the device, and the transfers that keep it current.

A decode step reads everything it needs from here, so it can be launched before the host knows the tokens of the step
before. Slot -1 is the padding slot: rows that pad a batch read it and write nowhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from peagle.engine.kv_cache import BLOCK_SIZE
from peagle.engine.request import Request
from peagle.kernels.host_transfer import PinnedRing, copy_to_device
from peagle.kernels.step.step import SlotUpdates
from peagle.kernels.step.types import SlotState

MAX_TRANSFERS_IN_FLIGHT = 64  # tensors


class DeviceState:
    def __init__(
        self, max_num_seqs: int, max_speculative_tokens: int, max_model_len: int, device: torch.device
    ) -> None:
        self.device = device
        self.slots = SlotState.allocate(max_num_seqs, max_speculative_tokens, -(-max_model_len // BLOCK_SIZE), device)
        self._pinned = PinnedRing(MAX_TRANSFERS_IN_FLIGHT)
        self._updates = SlotUpdates(self.slots, self._pinned)
        # What each slot holds on the device: request id, its preemptions, number of blocks.
        self._sent: list[tuple[int, int, int]] = [(-1, 0, 0)] * max_num_seqs

    def update_slots(self, requests: list[Request]) -> None:
        """Sends new block ids, and the sampling parameters of requests that are new in their slot."""
        for request in requests:
            if request.slot < 0:
                continue
            owner, num_preemptions, num_sent = self._sent[request.slot]
            if (owner, num_preemptions) != (request.id, request.num_preemptions):
                p, num_sent = request.params, 0
                self._updates.set_sampling_params(
                    request.slot, (p.temperature, p.top_p, p.min_p), (p.top_k, request.seed)
                )
            self._updates.set_blocks(request.slot, num_sent, request.block_ids[num_sent:])
            self._sent[request.slot] = (request.id, request.num_preemptions, len(request.block_ids))
        requests.clear()
        self._updates.send()

    def limit_draft_tokens(self, requests: Sequence[Request]) -> None:
        """Caps the draft tokens of requests with their own `max_speculative_tokens`."""
        limits = self.to_device([(r.slot, r.params.max_speculative_tokens) for r in requests])
        num_draft_tokens_S, slots = self.slots.num_draft_tokens_S, limits[:, 0]
        num_draft_tokens_S[slots] = torch.minimum(num_draft_tokens_S[slots], limits[:, 1])

    def fetch_draft_tokens(self, requests: Sequence[Request], k: int) -> list[list[int]]:
        """Waits for the draft tokens of the next step of each request."""
        if not requests or k == 0:
            return [[] for _ in requests]
        return self.slots.token_ids_SN[self.to_device([r.slot for r in requests]), 1 : k + 1].tolist()

    def to_device(self, values: Sequence[object]) -> Tensor:
        return copy_to_device(torch.tensor(values), self.device)

    def copy_to_host(self, x: Tensor) -> Tensor:
        """Queues a copy; valid once an event recorded after it is done."""
        return self._pinned.copy_to_host(x)

    def warm_up(self) -> None:
        """Compiles the transfer kernels by rewriting the padding slot."""
        self._updates.set_blocks(len(self.slots.num_computed_tokens_S) - 1, 0, [0])
        self._updates.send()
        self.copy_to_host(self.slots.num_computed_tokens_S)
