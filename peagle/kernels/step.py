"""A decode step between the two models: the rows of target and drafter, and the updates of the request slots.

Each function is one Triton launch on a GPU, and plain torch elsewhere. Hidden states come in combined
(`Drafter.combine_hidden_states`), draft tokens as target token ids.

Shapes: S slots, N = most draft tokens + 1, M blocks in a block table; B requests, K draft tokens, Q = K + 1 verified
rows per request, T = B * Q rows; R drafter rows, D drafter width. Integers are int64 unless noted.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from peagle.config.sampling import MAX_BAD_WORD_TOKENS
from peagle.kernels.host_transfer import PinnedRing
from peagle.kernels.sampling.processors import LogitsProcessors
from peagle.kernels.triton_utils import HAVE_TRITON, pdl_launch_options, runs_triton

_BLOCK = 128  # updates per program

if HAVE_TRITON:
    import triton
    from triton import language as tl

    from peagle.kernels.triton_utils import wait_for_previous

    @triton.jit
    def _verify_inputs_kernel(
        slots,
        tokens_S, tokens_stride, num_computed_tokens_S, num_draft_tokens_S, tables_S, float_params_S, int_params_S,
        tokens, starts, query_lens, available, tables, positions, nexts, float_params, int_params,
        num_slots, max_model_len, M,
        ROWS: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
    ):  # fmt: skip
        """Program (b, c) copies chunk c of request b's block table; the first also writes the rest. WIDTH >= ROWS."""
        wait_for_previous(PDL)
        b = tl.program_id(0).to(tl.int64)
        slot = tl.load(slots + b)
        slot = tl.where(slot < 0, num_slots - 1, slot)
        at = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
        entries = tl.load(tables_S + slot * M + at, mask=at < M, other=0)
        if tl.program_id(1) == 0:
            row = tl.arange(0, WIDTH)
            real = row < ROWS
            out = b * ROWS + row
            total = tl.num_programs(0) * ROWS
            float_param, int_param = tl.arange(0, 4)[:, None], tl.arange(0, 2)[:, None]
            # All loads come before the first store: a store waits for its value, and later instructions wait with it.
            start = tl.load(num_computed_tokens_S + slot)
            num_draft_tokens = tl.load(num_draft_tokens_S + slot)
            token = tl.load(tokens_S + slot * tokens_stride + row, mask=real, other=0)
            floats = tl.load(float_params_S + float_param * num_slots + slot, mask=float_param < 3, other=0.0)
            ints = tl.load(int_params_S + int_param * num_slots + slot)
            tl.store(starts + b, start.to(tl.int32))
            tl.store(query_lens + b, tl.minimum(tl.maximum(max_model_len - start, 0), ROWS).to(tl.int32))
            tl.store(available + b, tl.minimum(num_draft_tokens, ROWS - 1))
            tl.store(tokens + out, token, mask=real)
            tl.store(positions + out, tl.minimum(start + row, max_model_len - 1), mask=real)
            tl.store(nexts + out, start + row + 1, mask=real)
            tl.store(float_params + float_param * total + out, floats, mask=(float_param < 3) & real[None, :])
            tl.store(int_params + int_param * total + out, ints, mask=real[None, :])
        tl.store(tables + b * M + at, entries, mask=at < M)

    @triton.jit
    def _draft_inputs_kernel(
        emitted, emitted_stride, accepted, starts, hidden, hidden_stride, mask_hidden, mask_token, max_model_len,
        token_ids, hidden_out, positions, live, sample,
        Q: tl.constexpr, ROWS: tl.constexpr, SAMPLES: tl.constexpr, MASKED: tl.constexpr,
        D: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
    ) -> None:  # fmt: skip
        """Writes WIDTH hidden values of one row; the row's first program also writes the rest."""
        wait_for_previous(PDL)
        row = tl.program_id(0).to(tl.int64)
        b = row // ROWS
        j = row % ROWS
        m = tl.load(accepted + b).to(tl.int64)
        at = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
        if MASKED:
            real = j <= m
            own = tl.load(hidden + (b * Q + j) * hidden_stride + at, mask=(at < D) & real, other=0.0)
            mask = tl.load(mask_hidden + at, mask=(at < D) & (j > m), other=0.0)
            tl.store(hidden_out + row * D + at, tl.where(real, own, mask.to(own.dtype)), mask=at < D)
        else:  # as many rows as were verified, so each has a hidden state, read or not
            own = tl.load(hidden + (b * Q + j) * hidden_stride + at, mask=at < D, other=0.0)
            tl.store(hidden_out + row * D + at, own, mask=at < D)
        if tl.program_id(1) == 0:
            token = tl.load(emitted + b * emitted_stride + j, mask=j <= m, other=0)
            tl.store(token_ids + row, tl.where(j <= m, tl.maximum(token, 0), mask_token))
            start = tl.load(starts + b).to(tl.int64)
            tl.store(positions + row, tl.maximum(tl.minimum(start + j, max_model_len - 1), 0))
            if j < SAMPLES:
                tl.store(sample + b * SAMPLES + j, b * ROWS + m + j)
            if j == 0:
                tl.store(live + b, tl.maximum(tl.minimum(m + 1 + (ROWS - Q), max_model_len - start), 0).to(tl.int32))

    @triton.jit
    def _commit_kernel(
        tokens, tokens_stride, starts, available, slots, emitted, emitted_stride, accepted, drafts, drafts_stride,
        max_model_len, positions, flags_S, entries_SV, vocab, tail_SL,
        K: tl.constexpr, HAS_POSITIONS: tl.constexpr, COUNTS: tl.constexpr, L: tl.constexpr, WIDTH: tl.constexpr,
        PDL: tl.constexpr,
    ) -> None:  # fmt: skip
        """Handles one request; WIDTH >= K + 1."""
        wait_for_previous(PDL)
        b = tl.program_id(0).to(tl.int64)
        slot = tl.load(slots + b).to(tl.int64)
        if slot >= 0:
            m = tl.load(accepted + b).to(tl.int64)
            at = tl.arange(0, WIDTH)
            newest = tl.maximum(tl.load(emitted + b * emitted_stride + m), 0)
            draft = tl.load(drafts + b * drafts_stride + at - 1, mask=(at > 0) & (at <= K), other=0)
            tl.store(tokens + slot * tokens_stride + at, tl.where(at == 0, newest, draft), mask=at <= K)
            if HAS_POSITIONS:
                start = tl.load(positions + b).to(tl.int64)
            else:
                start = tl.load(starts + slot).to(tl.int64) + m + 1
            tl.store(starts + slot, start)
            tl.store(available + slot, tl.maximum(tl.minimum(max_model_len - start - 2, K), 0))
            if COUNTS:
                flags = tl.load(flags_S + slot)
                if flags & 1:  # HAS_TOKENS
                    added = tl.maximum(tl.load(emitted + b * emitted_stride + at, mask=at <= m, other=0), 0)
                    tl.atomic_add(entries_SV + slot * vocab + added, 4, mask=at <= m)
                if flags & 16:  # HAS_BAD_WORDS
                    tail = tail_SL + slot * L
                    source = tl.arange(0, L) + m + 1
                    known = tl.load(tail + source, mask=source < L, other=0)
                    new = tl.load(emitted + b * emitted_stride + source - L, mask=source >= L, other=0)
                    tl.debug_barrier()
                    tl.store(tail + tl.arange(0, L), tl.where(source < L, known, tl.maximum(new, 0).to(tl.int32)))

    @triton.jit(do_not_specialize=["count"])
    def _updates_kernel(
        cells, count, tables, float_params, int_params,
        TABLES: tl.constexpr, FLOAT_PARAMS: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        valid = n < count
        cell = tl.load(cells + n, mask=valid, other=0)
        value = tl.load(cells + count + n, mask=valid, other=0)
        low = value.to(tl.int32)
        tl.store(tables + cell, low, mask=valid & (cell < TABLES))
        cell -= TABLES
        tl.store(
            float_params + cell, low.to(tl.float32, bitcast=True), mask=valid & (cell >= 0) & (cell < FLOAT_PARAMS)
        )
        cell -= FLOAT_PARAMS
        tl.store(int_params + cell, value, mask=valid & (cell >= 0))


@dataclass
class SlotState:
    """The persistent batch: what the next decode step of each request slot starts from.

    The last slot is the padding slot and never changes: requests that pad a batch have slot -1, which reads it and
    writes nowhere.
    """

    token_ids_SN: Tensor  # the newest token, then its draft tokens
    num_computed_tokens_S: Tensor  # tokens in the KV cache, so the position of the newest token
    num_draft_tokens_S: Tensor  # how many of the draft tokens are valid
    block_tables_SM: Tensor  # int32
    float_params_3S: Tensor  # fp32: temperature, top_p, min_p
    int_params_2S: Tensor  # top_k, seed

    @property
    def host_arrays(self) -> tuple[Tensor, Tensor, Tensor]:
        """The arrays that the host updates, in the order in which their cells are numbered."""
        return self.block_tables_SM, self.float_params_3S, self.int_params_2S

    @classmethod
    def allocate(cls, num_slots: int, max_speculative_tokens: int, blocks_per_slot: int, device: torch.device) -> Self:
        """Allocates `num_slots` request slots and the padding slot."""

        def zeros(*shape: int, dtype: torch.dtype = torch.long) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        count = num_slots + 1
        float_params = zeros(3, count, dtype=torch.float32)
        float_params[1] = 1.0  # top_p of the padding slot
        return cls(
            token_ids_SN=zeros(count, max_speculative_tokens + 1),
            num_computed_tokens_S=zeros(count),
            num_draft_tokens_S=zeros(count),
            block_tables_SM=zeros(count, blocks_per_slot, dtype=torch.int32),
            float_params_3S=float_params,
            int_params_2S=zeros(2, count),
        )


@dataclass
class VerifyInputs:
    """Rows that the target verifies: row j of request b is row b * Q + j."""

    token_ids_BQ: Tensor  # the newest token, then the draft tokens
    num_computed_tokens_B: Tensor  # int32
    query_lens_B: Tensor  # int32: rows of each request inside the context
    num_draft_tokens_B: Tensor  # valid draft tokens
    block_tables_BM: Tensor  # int32
    positions_T: Tensor  # of the rows, clamped to the context
    sample_positions_T: Tensor  # of the tokens sampled after the rows
    float_params_3T: Tensor  # fp32: temperature, top_p, min_p
    int_params_2T: Tensor  # top_k, seed


@dataclass(frozen=True)
class DraftInputs:
    """Rows of one drafter pass: request b owns rows b * (R / B) to (b + 1) * (R / B)."""

    token_ids_R: Tensor
    hidden_states_RD: Tensor
    positions_R: Tensor
    query_lens_B: Tensor  # int32: valid rows of each request; the rest is padding, whose KV is not written
    sample_rows_BK: Tensor  # the rows whose outputs are draft tokens: [B, 1] for EAGLE-3, [B, 0] for no draft tokens


def build_verify_inputs(state: SlotState, slots_B: Tensor, k: int, max_model_len: int) -> VerifyInputs:
    """Builds the rows that verify k draft tokens per request; slot -1 is the padding slot.

    Row j of a request has token j of its slot (the newest token, then the draft tokens) at position
    num_computed_tokens + j.

    Worked example: a slot whose newest token n is at position 5, with draft tokens x y, k = 2, max_model_len 7. Its
    rows are n x y at positions 5 6 6 (the last is outside the context), of which 2 are valid; the tokens sampled after
    them have positions 6 7 8, and 0 draft tokens are valid, since no step may end past the context.
    """
    batch, rows, device = len(slots_B), k + 1, slots_B.device
    if not runs_triton(slots_B):
        starts, slots_T = state.num_computed_tokens_S[slots_B], slots_B.repeat_interleave(rows)
        positions = starts[:, None] + torch.arange(rows, device=device)
        return VerifyInputs(
            state.token_ids_SN[slots_B, :rows],
            starts.int(),
            (max_model_len - starts).clamp(0, rows).int(),
            state.num_draft_tokens_S[slots_B].clamp(max=k),
            state.block_tables_SM[slots_B],
            positions.clamp(max=max_model_len - 1).flatten(),
            positions.flatten() + 1,
            state.float_params_3S[:, slots_T],
            state.int_params_2S[:, slots_T],
        )
    blocks = state.block_tables_SM.shape[1]
    longs = torch.empty(6, batch * rows, dtype=torch.int64, device=device)
    ints = torch.empty(2, batch, dtype=torch.int32, device=device)
    inputs = VerifyInputs(
        longs[0].view(batch, rows),
        ints[0],
        ints[1],
        longs[5, :batch],
        torch.empty(batch, blocks, dtype=torch.int32, device=device),
        longs[1],
        longs[2],
        torch.empty(3, batch * rows, dtype=torch.float32, device=device),
        longs[3:5],
    )
    chunk = 256
    _verify_inputs_kernel[(batch, triton.cdiv(blocks, chunk))](
        slots_B, state.token_ids_SN, state.token_ids_SN.stride(0),
        state.num_computed_tokens_S, state.num_draft_tokens_S, *state.host_arrays,
        *vars(inputs).values(),  # in the order of the fields
        len(state.num_computed_tokens_S), max_model_len, blocks,
        ROWS=rows, WIDTH=triton.next_power_of_2(rows), CHUNK=chunk, num_warps=1, **pdl_launch_options(device),
    )  # fmt: skip
    return inputs


def build_draft_inputs(
    output_token_ids_BQ: Tensor,
    num_accepted_B: Tensor,
    num_computed_tokens_B: Tensor,
    hidden_states_TD: Tensor,
    mask_hidden_D: Tensor | None,
    mask_token_id: int | None,
    k: int,
    max_model_len: int,
) -> DraftInputs:
    """Builds the drafter's rows after a step that verified Q rows per request and accepted draft tokens 1..m.

    `output_token_ids` and `num_accepted` come from `accept_draft_tokens`; `num_computed_tokens` is the position of row
    0, `hidden_states` are the combined auxiliary hidden states of the verified rows, and `mask_hidden` is that of a
    mask row. Row j of a request is at position num_computed_tokens + j:

        j <= m          the next token, output_token_ids[j], and the hidden state: its KV stays
        m < j < m + K   the mask token and hidden state (P-EAGLE): its KV is overwritten before any later read
        beyond          padding, which `query_lens` leaves out

    Rows m .. m + K - 1 give the draft tokens. EAGLE-3 (mask_token_id None) has no mask rows; row m gives its first
    draft token. With k = 0 there are no draft tokens: the pass only updates the drafter's KV cache.

    Worked example, P-EAGLE, one request, K = 2, Q = 3, row 0 at position 10, mask token 99. The target verified tokens
    a x y at positions 10 11 12, accepted x and replaced y by b, so m = 1 and output_token_ids is x b -1:

        row           0         1         2         3
        token         x         b         99        99
        hidden state  at 10     at 11     mask      mask
        position      10        11        12        13

    query_len is 3, as row 3 is padding; rows 1 and 2 draft the tokens at 13 and 14. (The row at p drafts the token at
    p + 2.) With max_model_len 12, query_len is 2, and the positions of rows 2 and 3 are clamped to 11.
    """
    (requests, verified), width = output_token_ids_BQ.shape, hidden_states_TD.shape[1]
    masked, device = mask_token_id is not None, output_token_ids_BQ.device
    assert not masked or mask_hidden_D is not None, "mask rows need mask_hidden"
    rows = verified + (max(k - 1, 0) if masked else 0)
    samples = k if masked else min(k, 1)
    if not runs_triton(output_token_ids_BQ):
        at, last, starts = torch.arange(rows, device=device), num_accepted_B[:, None], num_computed_tokens_B.long()
        is_real = at <= last  # [B, rows]
        tokens = output_token_ids_BQ.new_full((requests, rows), mask_token_id or 0)
        output = output_token_ids_BQ.clamp(min=0)
        tokens[:, :verified] = torch.where(is_real[:, :verified], output, tokens[:, :verified])
        hidden = hidden_states_TD.new_empty(requests, rows, width)
        hidden[:, :verified] = hidden_states_TD.unflatten(0, (requests, verified))
        if mask_hidden_D is not None:
            hidden = torch.where(is_real[..., None], hidden, mask_hidden_D.to(hidden.dtype))
        positions = (starts[:, None] + at).clamp(max=max_model_len - 1).clamp(min=0)
        live = torch.minimum(last[:, 0] + 1 + rows - verified, max_model_len - starts).clamp(min=0)
        sample = torch.arange(requests, device=device)[:, None] * rows + last + torch.arange(samples, device=device)
        return DraftInputs(tokens.flatten(), hidden.flatten(0, 1), positions.flatten(), live.int(), sample)
    assert output_token_ids_BQ.stride(1) == 1 and hidden_states_TD.stride(1) == 1
    inputs = DraftInputs(
        torch.empty(requests * rows, dtype=torch.int64, device=device),
        torch.empty(requests * rows, width, dtype=hidden_states_TD.dtype, device=device),
        torch.empty(requests * rows, dtype=torch.int64, device=device),
        torch.empty(requests, dtype=torch.int32, device=device),
        torch.empty(requests, samples, dtype=torch.int64, device=device),
    )
    block = min(triton.next_power_of_2(width), 2048)
    _draft_inputs_kernel[(requests * rows, -(-width // block))](
        output_token_ids_BQ, output_token_ids_BQ.stride(0), num_accepted_B.contiguous(),
        num_computed_tokens_B.contiguous(), hidden_states_TD, hidden_states_TD.stride(0),
        hidden_states_TD if mask_hidden_D is None else mask_hidden_D.contiguous(),  # not read without mask rows
        mask_token_id or 0, max_model_len,
        inputs.token_ids_R, inputs.hidden_states_RD, inputs.positions_R, inputs.query_lens_B,
        inputs.sample_rows_BK if samples else inputs.positions_R,  # an empty tensor has no address; not written
        Q=verified, ROWS=rows, SAMPLES=samples, MASKED=masked, D=width, WIDTH=block,
        num_warps=4, **pdl_launch_options(device),
    )  # fmt: skip
    return inputs


def commit_state(
    state: SlotState,
    slots_B: Tensor,
    output_token_ids_BQ: Tensor,
    num_accepted_B: Tensor,
    draft_token_ids_BK: Tensor,
    max_model_len: int,
    positions_B: Tensor | None = None,
    processors: LogitsProcessors | None = None,
) -> None:
    """Writes what each request's next decode step reads into its slot, in place.

    The newest token and its draft tokens go to token_ids[slot, 0 .. K] (N > K; later columns stay), num_computed_tokens
    becomes the newest token's position, and num_draft_tokens is how many draft tokens the context has room for: with
    num_computed_tokens n the request has n + 1 tokens, and a step adds one more token than it verifies, so
    max_model_len - n - 2. `positions` are those of the newest tokens; None: directly behind the accepted tokens.
    Slots are distinct; a negative one is padding and changes nothing. `processors` count the tokens as output.
    Token -1 of `sample_tokens`, for a row without finite logits, becomes 0: its request ends with an error.
    """
    k = draft_token_ids_BK.shape[1]
    if not runs_triton(state.token_ids_SN):
        if positions_B is None:
            positions_B = state.num_computed_tokens_S[slots_B] + num_accepted_B + 1
        newest_B = output_token_ids_BQ.gather(1, num_accepted_B[:, None])[:, 0].clamp(min=0)
        used = slots_B >= 0
        if not used.all():
            written = (slots_B, newest_B, draft_token_ids_BK, positions_B, output_token_ids_BQ, num_accepted_B)
            slots_B, newest_B, draft_token_ids_BK, positions_B, output_token_ids_BQ, num_accepted_B = (
                x[used] for x in written
            )
        if processors is not None:
            processors.count_torch(slots_B, output_token_ids_BQ, num_accepted_B)
        state.token_ids_SN[slots_B, 0] = newest_B
        if k:
            state.token_ids_SN[slots_B, 1 : k + 1] = draft_token_ids_BK
        state.num_computed_tokens_S[slots_B] = positions_B
        state.num_draft_tokens_S[slots_B] = (max_model_len - positions_B - 2).clamp(0, k)
        return
    assert state.token_ids_SN.stride(1) == 1 and output_token_ids_BQ.stride(1) == 1
    assert k < 2 or draft_token_ids_BK.stride(1) == 1
    _commit_kernel[(len(slots_B),)](
        state.token_ids_SN, state.token_ids_SN.stride(0), state.num_computed_tokens_S, state.num_draft_tokens_S,
        slots_B.contiguous(), output_token_ids_BQ, output_token_ids_BQ.stride(0), num_accepted_B.contiguous(),
        draft_token_ids_BK if k else output_token_ids_BQ,  # an empty tensor has no address; not read
        draft_token_ids_BK.stride(0), max_model_len, slots_B if positions_B is None else positions_B.contiguous(),
        *((processors.flags_S, processors.entries_SV) if processors is not None else (slots_B, slots_B)),
        processors.vocab_size if processors is not None else 0,
        processors.masks.tail_SL if processors is not None else slots_B,
        K=k, HAS_POSITIONS=positions_B is not None, COUNTS=processors is not None, L=MAX_BAD_WORD_TOKENS,
        WIDTH=triton.next_power_of_2(k + 1), num_warps=1, **pdl_launch_options(state.token_ids_SN.device),
    )  # fmt: skip


class SlotUpdates:
    """Collects changes of block tables and sampling parameters, and sends them to the slots in one launch.

    An update is a cell index and a value; the cells of `SlotState.host_arrays` are numbered consecutively. The kernel
    reads the updates from pinned host memory: a copy per array and several scatter launches would delay the next step.
    A cell must not change twice before `send`.
    """

    def __init__(self, state: SlotState, pinned: PinnedRing) -> None:
        self.state, self.pinned = state, pinned
        self.num_slots, self.blocks_per_slot = state.block_tables_SM.shape
        self._cells: list[int] = []
        self._values: list[int] = []

    def set_blocks(self, slot: int, first: int, block_ids: Sequence[int]) -> None:
        """Sets the slot's block table from entry `first` on."""
        cell = slot * self.blocks_per_slot + first
        self._cells += range(cell, cell + len(block_ids))
        self._values += block_ids

    def set_sampling_params(self, slot: int, float_params: Sequence[float], int_params: Sequence[int]) -> None:
        """Sets the slot's column of `float_params_3S` and of `int_params_2S`."""
        cell = self.num_slots * self.blocks_per_slot + slot
        count = len(float_params) + len(int_params)
        self._cells += range(cell, cell + count * self.num_slots, self.num_slots)
        # fp32 values travel as their bits
        self._values += struct.unpack(f"{len(float_params)}i", struct.pack(f"{len(float_params)}f", *float_params))
        self._values += int_params

    def send(self) -> None:
        """Applies the collected updates to the state."""
        if not self._cells:
            return
        cells_2N = torch.tensor((self._cells, self._values))
        self._cells, self._values = [], []
        tables, float_params, int_params = arrays = self.state.host_arrays
        if runs_triton(tables):
            cells_2N, count = self.pinned.to_pinned(cells_2N), cells_2N.shape[1]
            sizes = {"TABLES": tables.numel(), "FLOAT_PARAMS": float_params.numel()}
            _updates_kernel[(triton.cdiv(count, _BLOCK),)](
                cells_2N, count, tables, float_params, int_params, **sizes, BLOCK=_BLOCK, num_warps=4
            )
            return
        (cells_N, values_N), first = cells_2N.to(tables.device), 0
        for array in arrays:
            in_array_N = (cells_N >= first) & (cells_N < first + array.numel())
            values = values_N[in_array_N]
            values = values.int().view(torch.float32) if array.is_floating_point() else values.to(array.dtype)
            array.view(-1)[cells_N[in_array_N] - first] = values
            first += array.numel()
