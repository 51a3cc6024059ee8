"""Logits processors of request slots: min_tokens, logit_bias, penalties and token masks (masks.py); and logprobs.

`SamplingParams` defines their order and meaning. Their state is on the device, one row per request slot, and the
sampling kernels apply them while they read the logits, so a captured step serves any mix of requests and rows of other
requests cost nothing. Row j of a request sees the j draft tokens before it as output.

Shapes: S slots, V vocabulary; B requests, Q rows per request, R = B * Q rows.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import torch
from torch import Tensor

from peagle.config import SamplingParams
from peagle.config.sampling import MAX_LOGPROBS
from peagle.kernels.host_transfer import pin_array
from peagle.kernels.sampling.masks import (
    HAS_BAD_WORDS,
    HAS_BIAS,
    HAS_GRAMMAR,
    HAS_MASK,
    HAS_TOKENS,
    LOGPROBS,
    TokenMasks,
)
from peagle.kernels.triton_utils import HAVE_TRITON, pdl_launch_options, runs_triton

HAS_PROCESSORS = HAS_TOKENS | HAS_BIAS | HAS_MASK
# Bits of a token's entry; the bits from COUNT on are its occurrences in the output.
IN_PROMPT, IS_STOP, COUNT = 1, 2, 2

if HAVE_TRITON:
    import triton
    from triton import language as tl

    from peagle.kernels.sampling.masks import load_flags
    from peagle.kernels.triton_utils import wait_for_previous

    @triton.jit
    def process_logits(x, i, row, slot, flags, position, processors, vocab, ROWS: tl.constexpr):
        """Computes `LogitsProcessors.process_torch` of the logits x of tokens i in one row."""
        num_slots, params_3S, min_lengths_S, entries_SV, bias_SV, allowed_SNW, num_mask_rows, num_words, token_ids = (
            processors
        )
        inside = i < vocab
        j = (row % ROWS).to(tl.int32)
        if flags & 2:  # HAS_BIAS
            bias = tl.load(bias_SV + slot * vocab + i, mask=inside, other=0.0)
            x += bias
        if flags & 1:  # HAS_TOKENS
            entry = tl.load(entries_SV + slot * vocab + i, mask=inside, other=0)
            count = entry >> 2
            for k in range(0, j):
                count += (tl.load(token_ids + row - j + 1 + k) == i).to(tl.int32)
            is_banned = ((entry & 2) != 0) & (position < tl.load(min_lengths_S + slot))
            x = tl.where(is_banned, -float("inf"), x)
            repetition = tl.load(params_3S + 2 * num_slots + slot)
            is_seen = ((entry & 1) != 0) | (count > 0)
            x = tl.where(is_seen, tl.where(x > 0.0, x / repetition, x * repetition), x)
            x -= tl.load(params_3S + num_slots + slot) * count.to(tl.float32)
            x -= tl.where(count > 0, tl.load(params_3S + slot), 0.0)
        if flags & 4:  # HAS_MASK
            words = allowed_SNW + (slot * num_mask_rows + j) * num_words
            word = tl.load(words + (i >> 5), mask=inside, other=0)
            x = tl.where(((word >> (i & 31)) & 1) != 0, x, -float("inf"))
        return x

    @triton.jit
    def _logprobs_kernel(
        logits, stride, vocab, slots, flags_S, num_slots, accepted, tokens, tokens_stride, out,
        ROWS: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
    ):  # fmt: skip
        """Handles one row; a row without logprobs and one after the output return at once."""
        wait_for_previous(PDL)
        row = tl.program_id(0).to(tl.int64)
        b = row // ROWS
        _, flags = load_flags(flags_S, slots, b, num_slots)
        count = flags >> 5  # 1 + the number of alternatives
        if (count > 0) & (row % ROWS <= tl.load(accepted + b)):
            start = logits + row * stride
            token = tl.maximum(tl.load(tokens + b * tokens_stride + row % ROWS), 0)
            best = tl.full([WIDTH], -float("inf"), tl.float32)
            for first in range(0, vocab, WIDTH):
                i = first + tl.arange(0, WIDTH)
                best = tl.maximum(best, tl.load(start + i, mask=i < vocab, other=-float("inf")).to(tl.float32))
            highest = tl.max(best, 0)
            total = tl.zeros([WIDTH], tl.float32)
            for first in range(0, vocab, WIDTH):
                i = first + tl.arange(0, WIDTH)
                total += tl.exp(tl.load(start + i, mask=i < vocab, other=-float("inf")).to(tl.float32) - highest)
            log_sum = highest + tl.log(tl.sum(total, 0))
            ids = out + row * (2 * COUNT)
            values = ids + COUNT
            tl.store(ids, token.to(tl.float32))
            tl.store(values, tl.load(start + token).to(tl.float32) - log_sum)
            last = highest + 1.0
            last_at = tl.full([], -1, tl.int32)
            for n in range(1, count):  # the likeliest token after the last one, by (logit, lowest id)
                best = tl.full([WIDTH], -float("inf"), tl.float32)
                best_at = tl.full([WIDTH], 2147483647, tl.int32)
                for first in range(0, vocab, WIDTH):
                    i = first + tl.arange(0, WIDTH)
                    x = tl.load(start + i, mask=i < vocab, other=-float("inf")).to(tl.float32)
                    is_better = ((x < last) | ((x == last) & (i > last_at))) & (x > best)
                    best = tl.where(is_better, x, best)
                    best_at = tl.where(is_better, i, best_at)
                last = tl.max(best, 0)
                last_at = tl.min(tl.where(best == last, best_at, 2147483647), 0)
                tl.store(ids + n, tl.minimum(last_at, vocab - 1).to(tl.float32))
                tl.store(values + n, last - log_sum)


@dataclass
class LogitsProcessors:
    """State of the logits processors of all request slots. Only arrays that the flags of a slot name are read.

    The last slot is the padding slot, without processors.
    """

    flags_S: Tensor  # int32
    params_3S: Tensor  # fp32: presence_penalty, frequency_penalty, repetition_penalty
    min_lengths_S: Tensor  # prompt and output tokens below which stop tokens are banned
    entries_SV: Tensor  # int32: in the prompt? a stop token? number of occurrences in the output
    bias_SV: Tensor  # fp32
    masks: TokenMasks
    _host_flags: dict[int, int] = field(default_factory=dict)  # `flags_S` of slots with any

    @classmethod
    def allocate(cls, num_slots: int, vocab_size: int, max_speculative_tokens: int, device: torch.device) -> Self:
        """Allocates `num_slots` request slots and the padding slot."""

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        count = num_slots + 1
        return cls(
            flags_S=zeros(count, dtype=torch.int32),
            params_3S=zeros(3, count, dtype=torch.float32),
            min_lengths_S=zeros(count, dtype=torch.int64),
            entries_SV=zeros(count, vocab_size, dtype=torch.int32),
            bias_SV=zeros(count, vocab_size, dtype=torch.float32),
            masks=TokenMasks.allocate(count, vocab_size, max_speculative_tokens, device),
        )

    @property
    def vocab_size(self) -> int:
        return self.entries_SV.shape[1]

    @staticmethod
    def num_bytes(num_slots: int, vocab_size: int, max_speculative_tokens: int) -> int:
        """Bytes of the large arrays."""
        return (num_slots + 1) * (8 * vocab_size + (max_speculative_tokens + 1) * -(-vocab_size // 32) * 4)

    def set_slot(
        self,
        slot: int,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int],
        eos_ids: Collection[int],
    ) -> None:
        """Prepares a slot for a request. `output_token_ids` leaves out the newest token, which `commit_state` adds."""
        vocab_size, flags = self.vocab_size, get_flags(params)
        if flags == 0 and self._host_flags.pop(slot, 0) == 0:
            return
        self.flags_S[slot] = flags
        if flags:
            self._host_flags[slot] = flags
        if flags & HAS_TOKENS:
            stops = np.fromiter((t for t in {*params.stop_token_ids, *eos_ids} if t < vocab_size), np.int64)
            entries_V = np.bincount(np.asarray(output_token_ids, np.int64), minlength=vocab_size) << COUNT
            entries_V[np.asarray(prompt_token_ids)] |= IN_PROMPT
            entries_V[stops] |= IS_STOP
            self._copy(entries_V.astype(np.int32), self.entries_SV[slot])
            penalties = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty)
            self._copy(np.array(penalties, np.float32), self.params_3S[:, slot])
            # A grammar's masks leave out stop tokens themselves, unless it allows no others.
            min_length = len(prompt_token_ids) + params.min_tokens if params.grammar is None else 0
            self.min_lengths_S[slot] = min_length
        if flags & HAS_BIAS:
            allowed = params.allowed_token_ids
            bias_V = np.full(vocab_size, 0.0 if allowed is None else -np.inf, np.float32)
            bias_V[list(allowed or ())] = 0.0
            bias_V[np.fromiter(params.logit_bias, np.int64)] += np.fromiter(params.logit_bias.values(), np.float32)
            self._copy(bias_V, self.bias_SV[slot])
        if flags & HAS_BAD_WORDS:
            self.masks.set_bad_words(slot, params.bad_words_token_ids, output_token_ids)

    @staticmethod
    def _copy(values: np.ndarray, to: Tensor) -> None:
        to.copy_(pin_array(values) if to.is_cuda else torch.from_numpy(values), non_blocking=True)

    def count_torch(self, slots_B: Tensor, output_token_ids_BQ: Tensor, num_accepted_B: Tensor) -> None:
        """Counts the tokens that a step adds to the output. On a GPU, `commit_state` does it in its launch."""
        self.masks.append_torch(self.flags_S, slots_B, output_token_ids_BQ, num_accepted_B)
        for b in (self.flags_S[slots_B] & HAS_TOKENS).nonzero()[:, 0].tolist():
            token_ids = output_token_ids_BQ[b, : int(num_accepted_B[b]) + 1].clamp(min=0)
            entries_V = self.entries_SV[slots_B[b]]
            entries_V.index_add_(0, token_ids, torch.full_like(token_ids, 1 << COUNT, dtype=torch.int32))

    def process_torch(self, logits_RV: Tensor, slot: int, token_ids_Q: Tensor, positions_R: Tensor) -> Tensor:
        """The processed fp32 logits of a request's rows. `positions_R` are those of the sampled tokens."""
        logits, flags, vocab = logits_RV.float(), int(self.flags_S[slot]), logits_RV.shape[1]
        if flags & HAS_BIAS:
            logits = logits + self.bias_SV[slot]
        if flags & HAS_TOKENS:
            entries_V, (presence, frequency, repetition) = self.entries_SV[slot], self.params_3S[:, slot].tolist()
            counts = (entries_V >> COUNT).repeat(len(logits), 1)
            for j in range(1, len(logits)):
                counts[j:, token_ids_Q[j]] += 1
            is_early = (positions_R < self.min_lengths_S[slot])[:, None]
            logits = logits.masked_fill(is_early & ((entries_V & IS_STOP) != 0), -torch.inf)
            if repetition != 1.0:
                scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
                logits = torch.where(((entries_V & IN_PROMPT) != 0) | (counts > 0), scaled, logits)
            logits = logits - frequency * counts - presence * (counts > 0)
        if flags & HAS_MASK:
            bits = torch.arange(32, dtype=torch.int32, device=logits.device)
            allowed = (self.masks.allowed_SNW[slot, : len(logits), :, None] >> bits & 1).bool().flatten(1)[:, :vocab]
            logits = logits.masked_fill(~allowed, -torch.inf)
        return logits

    def compute_logprobs(
        self, logits_RV: Tensor, slots_B: Tensor, output_token_ids_BQ: Tensor, num_accepted_B: Tensor
    ) -> Tensor:
        """Log-probabilities of the raw logits, for slots that ask for them: fp32 [R, 2, 1 + MAX_LOGPROBS].

        [:, 0] are token ids (exact in fp32) and [:, 1] their log-probabilities: the output token, then the likeliest
        tokens. Rows of other slots and rows after the output are not written.
        """
        (num_rows, vocab), count = logits_RV.shape, 1 + MAX_LOGPROBS
        rows_per_request = num_rows // len(slots_B)
        out = torch.empty(num_rows, 2, count, dtype=torch.float32, device=logits_RV.device)
        if runs_triton(logits_RV):
            width = min(triton.next_power_of_2(vocab), 8192)
            _logprobs_kernel[(num_rows,)](
                logits_RV, logits_RV.stride(0), vocab, slots_B.contiguous(), self.flags_S, len(self.flags_S),
                num_accepted_B.contiguous(), output_token_ids_BQ, output_token_ids_BQ.stride(0), out,
                ROWS=rows_per_request, COUNT=count, WIDTH=width,
                num_warps=16 if width == 8192 else 4, **pdl_launch_options(logits_RV.device),
            )  # fmt: skip
            return out
        num_logprobs_B = (self.flags_S[slots_B] >> LOGPROBS) - 1
        for b in (num_logprobs_B >= 0).nonzero()[:, 0].tolist():
            num_tokens, n = int(num_accepted_B[b]) + 1, int(num_logprobs_B[b])
            rows = slice(b * rows_per_request, b * rows_per_request + num_tokens)
            logprobs = logits_RV[rows].float().log_softmax(-1)
            top, own_ids = logprobs.topk(n, -1), output_token_ids_BQ[b, :num_tokens, None].clamp(min=0)
            out[rows, 0, : n + 1] = torch.cat([own_ids, top.indices], 1).float()
            out[rows, 1, : n + 1] = torch.cat([logprobs.gather(1, own_ids), top.values], 1)
        return out


def get_flags(params: SamplingParams) -> int:
    """The flags of a slot with these parameters."""
    has_tokens = params.has_penalties or params.min_tokens > 0
    num_logprobs = 0 if params.logprobs is None else 1 + params.logprobs
    has_bias = bool(params.logit_bias) or params.allowed_token_ids is not None
    flags = HAS_TOKENS * has_tokens | HAS_BIAS * has_bias | num_logprobs << LOGPROBS
    if params.grammar is not None:
        flags |= HAS_MASK | HAS_GRAMMAR
    return flags | (HAS_MASK | HAS_BAD_WORDS if params.bad_words_token_ids else 0)


@dataclass(frozen=True)
class ProcessedRows:
    """The rows of a pass whose logits are processed: row j of request b is row b * Q + j."""

    processors: LogitsProcessors
    slots_B: Tensor  # -1: padding
    token_ids_BQ: Tensor  # the newest token, then the draft tokens

    @property
    def rows_per_request(self) -> int:
        return self.token_ids_BQ.shape[1]

    @property
    def kernel_arguments(self) -> tuple:
        p = self.processors
        num_slots, num_mask_rows, num_words = p.masks.allowed_SNW.shape
        arrays = p.params_3S, p.min_lengths_S, p.entries_SV, p.bias_SV, p.masks.allowed_SNW
        return num_slots, *arrays, num_mask_rows, num_words, self.token_ids_BQ.contiguous()

    def process_torch(self, logits_RV: Tensor, positions_R: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yields the rows of each request with logits processors, and their processed logits."""
        num_rows = self.rows_per_request
        for b in (self.processors.flags_S[self.slots_B] & HAS_PROCESSORS).nonzero()[:, 0].tolist():
            rows, slot = slice(b * num_rows, (b + 1) * num_rows), int(self.slots_B[b])
            args = logits_RV[rows], slot, self.token_ids_BQ[b], positions_R[rows]
            yield rows, self.processors.process_torch(*args)
