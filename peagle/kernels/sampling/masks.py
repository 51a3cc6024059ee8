"""Token masks of request slots: the tokens that grammars and bad words leave to each row of a decode step.

The host computes the masks of grammars. A captured decode step does not need them at its launch: while the target runs,
the host reads the tokens of the step before, computes the masks into pinned memory and announces them there; the step
waits for the announcement before it samples. Bad words are matched on the device.

Shapes: S slots, N = most draft tokens + 1, W = ceil(V / 32) words of a token mask; B requests, Q rows per request; C
bad words of up to L tokens.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from peagle.config.sampling import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS
from peagle.kernels.host_transfer import copy_to_device, pin_for_copy
from peagle.kernels.triton_utils import HAVE_TRITON, pdl_launch_options, runs_triton

# Flags of a slot. The bits from LOGPROBS on are 1 + the number of alternatives per token; 0: no logprobs.
HAS_TOKENS, HAS_BIAS, HAS_MASK, HAS_GRAMMAR, HAS_BAD_WORDS, LOGPROBS = 1, 2, 4, 8, 16, 5
# A step whose masks never come must end at some time: a host read takes about a microsecond.
MAX_READS = 10_000_000

if HAVE_TRITON:
    import triton
    from triton import language as tl

    from peagle.kernels.triton_utils import wait_for_previous

    @triton.jit
    def load_flags(flags_S, slots, b, num_slots):
        """The slot of request b, and its flags; slot -1 is the padding slot."""
        slot = tl.load(slots + b)
        slot = tl.where(slot < 0, num_slots - 1, slot).to(tl.int64)
        return slot, tl.load(flags_S + slot)

    @triton.jit
    def _prepare_masks_kernel(
        slots, flags_S, num_slots, token_ids, allowed, host_allowed, announced_step, awaited_step, words, tail,
        num_mask_rows, num_words,
        ROWS: tl.constexpr, AWAIT: tl.constexpr, C: tl.constexpr, L: tl.constexpr, WIDTH: tl.constexpr,
        MAX_READS: tl.constexpr, PDL: tl.constexpr,
    ):  # fmt: skip
        """Writes the mask of one row; a row without a mask returns at once."""
        wait_for_previous(PDL)
        row = tl.program_id(0).to(tl.int64)
        j = row % ROWS
        slot, flags = load_flags(flags_S, slots, row // ROWS, num_slots)
        if flags & 4:  # HAS_MASK
            own = (slot * num_mask_rows + j) * num_words
            i = tl.arange(0, WIDTH)
            if flags & 8:  # HAS_GRAMMAR
                if AWAIT:
                    awaited = tl.load(awaited_step)
                    reads = 0
                    while (tl.load(announced_step, volatile=True) < awaited) & (reads < MAX_READS):
                        reads += 1
                    tl.debug_barrier()
                    mask = tl.load(host_allowed + own + i, mask=i < num_words, volatile=True)
                    tl.store(allowed + own + i, mask, mask=i < num_words)
            else:
                tl.store(allowed + own + i, tl.full([WIDTH], -1, tl.int32), mask=i < num_words)
            if flags & 16:  # HAS_BAD_WORDS
                tl.debug_barrier()
                first = words + (slot * C + tl.arange(0, C)) * L
                matches = tl.load(first + L - 1) >= 0
                for distance in range(1, L):  # back from the token after this row
                    is_draft = distance <= j
                    draft = tl.load(token_ids + row - distance + 1, mask=is_draft, other=0).to(tl.int32)
                    known = tl.load(tail + slot * L + L - distance + j, mask=distance > j, other=0)
                    word = tl.load(first + L - 1 - distance)
                    matches = matches & ((word == -1) | (word == tl.where(is_draft, draft, known)))
                banned = tl.load(first + L - 1)
                tl.atomic_and(allowed + own + (banned >> 5), ~(1 << (banned & 31)), mask=matches)


@dataclass
class TokenMasks:
    """Only slots with HAS_MASK are read or written."""

    allowed_SNW: Tensor  # int32: one bit per token
    bad_words_SCL: Tensor  # int32: tokens, -1 before the first one; unused words are all -1
    tail_SL: Tensor  # int32: the last output tokens, -1 before the first one
    awaited_step: Tensor  # int64 [1]: the next captured step waits for the masks of this step
    host_allowed_SNW: Tensor | None = None  # as `allowed_SNW`, in pinned memory of the host
    announced_step: Tensor | None = None  # int64 [1], pinned: the last step whose masks are in `host_allowed_SNW`

    @classmethod
    def allocate(cls, num_slots: int, vocab_size: int, max_speculative_tokens: int, device: torch.device) -> Self:
        shape = num_slots, max_speculative_tokens + 1, -(-vocab_size // 32)
        words = num_slots, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS
        masks = cls(
            torch.zeros(shape, dtype=torch.int32, device=device),
            torch.full(words, -1, dtype=torch.int32, device=device),
            torch.full((num_slots, MAX_BAD_WORD_TOKENS), -1, dtype=torch.int32, device=device),
            torch.zeros(1, dtype=torch.int64, device=device),
        )
        if device.type == "cuda":
            masks.host_allowed_SNW = torch.zeros(shape, dtype=torch.int32, pin_memory=True)
            masks.announced_step = torch.zeros(1, dtype=torch.int64, pin_memory=True)
        return masks

    def set_bad_words(self, slot: int, words: Sequence[Sequence[int]], output_token_ids: Sequence[int]) -> None:
        """`output_token_ids` leaves out the newest token, as in `LogitsProcessors.set_slot`."""
        size, device = MAX_BAD_WORD_TOKENS, self.tail_SL.device
        unused = [-1] * size
        rows = [[*unused, *word][-size:] for word in words] + [unused] * (MAX_BAD_WORDS - len(words))
        rows.append([*unused, *output_token_ids[-size:]][-size:])
        values = copy_to_device(torch.tensor(rows, dtype=torch.int32), device)
        self.bad_words_SCL[slot], self.tail_SL[slot] = values[:-1], values[-1]

    def set_grammar_masks(self, slots: Sequence[int], allowed_BQW: Tensor) -> None:
        """Sets the first Q masks of slots, for work that is launched later: uint8 [B, Q, bytes], one bit per token."""
        words_BQW, device = self._to_words(allowed_BQW), self.allowed_SNW.device
        slots_B = copy_to_device(torch.tensor(slots), device)
        self.allowed_SNW[slots_B, : words_BQW.shape[1]] = copy_to_device(words_BQW, device)

    def await_step(self, step: int) -> None:
        """Makes the captured step that is launched next wait until `announce_step` is called."""
        self.awaited_step.copy_(pin_for_copy(torch.tensor([step]), self.awaited_step.device), non_blocking=True)

    def set_awaited_masks(self, slots: Sequence[int], allowed_BQW: Tensor) -> None:
        """As `set_grammar_masks`, for a step that waits. All earlier steps must be complete."""
        assert self.host_allowed_SNW is not None
        words_BQW = self._to_words(allowed_BQW).numpy()  # torch would wake threads to copy many elements
        self.host_allowed_SNW.numpy()[slots, : allowed_BQW.shape[1]] = words_BQW

    def announce_step(self, step: int) -> None:
        assert self.announced_step is not None
        self.announced_step.fill_(step)

    def _to_words(self, allowed_BQW: Tensor) -> Tensor:
        num_bytes = 4 * self.allowed_SNW.shape[2]
        return torch.nn.functional.pad(allowed_BQW, (0, num_bytes - allowed_BQW.shape[2])).view(torch.int32)

    def prepare(self, flags_S: Tensor, slots_B: Tensor, token_ids_BQ: Tensor, awaits: bool) -> None:
        """Completes the masks of rows whose tokens are `token_ids`; row j sees the tokens 1 to j as output."""
        if not runs_triton(token_ids_BQ):
            self._prepare_torch(flags_S, slots_B, token_ids_BQ)
            return
        (_, num_rows), (num_slots, num_mask_rows, num_words) = token_ids_BQ.shape, self.allowed_SNW.shape
        host = (self.host_allowed_SNW, self.announced_step) if awaits else (self.allowed_SNW, self.awaited_step)
        _prepare_masks_kernel[(token_ids_BQ.numel(),)](
            slots_B.contiguous(), flags_S, num_slots, token_ids_BQ.contiguous(), self.allowed_SNW, *host,
            self.awaited_step, self.bad_words_SCL, self.tail_SL, num_mask_rows, num_words,
            ROWS=num_rows, AWAIT=awaits, C=MAX_BAD_WORDS, L=MAX_BAD_WORD_TOKENS,
            WIDTH=triton.next_power_of_2(num_words), MAX_READS=MAX_READS,
            num_warps=8, **pdl_launch_options(token_ids_BQ.device),
        )  # fmt: skip

    def _prepare_torch(self, flags_S: Tensor, slots_B: Tensor, token_ids_BQ: Tensor) -> None:
        for b in (flags_S[slots_B] & HAS_BAD_WORDS).nonzero()[:, 0].tolist():
            slot, size = int(slots_B[b]), MAX_BAD_WORD_TOKENS - 1
            words_CL = self.bad_words_SCL[slot]
            for j, row_W in enumerate(self.allowed_SNW[slot, : token_ids_BQ.shape[1]]):
                if not flags_S[slot] & HAS_GRAMMAR:
                    row_W.fill_(-1)
                last_tokens = torch.cat([self.tail_SL[slot], token_ids_BQ[b, 1 : j + 1].int()])[-size:]
                matches_C = ((words_CL[:, :-1] == -1) | (words_CL[:, :-1] == last_tokens)).all(1)
                for token in words_CL[matches_C, -1].tolist():
                    if token >= 0:
                        row_W[token // 32] &= ~(torch.ones((), dtype=torch.int32) << token % 32)

    def append_torch(self, flags_S: Tensor, slots_B: Tensor, output_token_ids_BQ: Tensor, accepted_B: Tensor) -> None:
        """Appends the tokens that a step adds to the output. On a GPU, `commit_state` does it in its launch."""
        for b in (flags_S[slots_B] & HAS_BAD_WORDS).nonzero()[:, 0].tolist():
            added = output_token_ids_BQ[b, : int(accepted_B[b]) + 1].clamp(min=0).int()
            tail_L = self.tail_SL[slots_B[b]]
            tail_L.copy_(torch.cat([tail_L, added])[-len(tail_L) :])
