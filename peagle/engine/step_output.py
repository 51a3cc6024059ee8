"""Outputs of a step: of its verification pass on the device, and of the whole step on its way to the host.

Shapes: B requests, Q = K + 1 rows per request, T = B * Q rows, V vocabulary, D drafter width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.engine.request import Logprobs, Request, SchedulerOutput
from peagle.kernels.step.types import VerifyInputs


@dataclass
class VerifyOutput:
    """The target's forward pass over the newest token and the draft tokens of each request."""

    slots_B: Tensor
    inputs: VerifyInputs
    logits_TV: Tensor
    hidden_states_TD: Tensor | None  # combined aux hidden states, the drafter's input; None without a drafter
    max_seq_len: int | None = None  # most positions of a request after the step, new draft tokens included


@dataclass
class PendingStep:
    """A launched step whose tokens are not on the host yet."""

    scheduled: SchedulerOutput
    decode_host: Tensor | None  # [B, Q + 2]: output tokens (then -1), num accepted, num draft tokens
    new_requests: list[Request]  # requests whose first token comes from this step's prefill
    first_tokens_host: Tensor | None
    done: torch.cuda.Event | None
    logprobs: Logprobs
    launched_at: float  # time.perf_counter()

    def wait(self) -> tuple[list[list[int]], list[int]]:
        """Waits for the step. Returns the rows of `decode_host` and the first token of each new request."""
        if self.done is not None:
            self.done.synchronize()
        decode_rows = self.decode_host.tolist() if self.decode_host is not None else []
        return decode_rows, self.first_tokens_host.tolist() if self.first_tokens_host is not None else []
