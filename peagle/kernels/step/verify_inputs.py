"""From the state of the slots to the rows of a verification: one launch for everything a round reads first.

Knows nothing about models. Row j of request b holds token j of its slot (the newest, then the drafts) and sits at
the slot's start + j.

Shapes: S slots, B requests, Q = K + 1 rows a request, M blocks in a table, T = B * Q rows.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.kernels.triton_utils import pdl_launch_options

try:
    import triton
    from triton import language as tl
except ImportError:  # no wheel for this machine: the torch version serves
    triton = None

_jit = triton.jit if triton is not None else lambda kernel: kernel


@dataclass
class SlotState:
    """What the next round of each slot starts from. The last is nobody's and never changes: rows that pad a batch
    have slot -1, which reads it and writes nowhere."""

    token_ids_SN: Tensor  # the newest token, then its drafts
    num_computed_tokens_S: Tensor  # position of the newest token: so many are read
    num_draft_tokens_S: Tensor  # how many of the drafts are real
    block_tables_SM: Tensor  # int32
    float_params_3S: Tensor  # fp32: temperature, top_p, min_p
    int_params_2S: Tensor  # top_k, seed

    @property
    def temperature_S(self) -> Tensor:
        return self.float_params_3S[0]

    @property
    def top_p_S(self) -> Tensor:
        return self.float_params_3S[1]

    @property
    def min_p_S(self) -> Tensor:
        return self.float_params_3S[2]

    @property
    def top_k_S(self) -> Tensor:
        return self.int_params_2S[0]

    @property
    def seed_S(self) -> Tensor:
        return self.int_params_2S[1]

    @classmethod
    def allocate(cls, slots: int, max_speculative_tokens: int, blocks_per_slot: int, device: torch.device) -> SlotState:
        def zeros(*shape: int, dtype: torch.dtype = torch.long) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        count = slots + 1
        shares = zeros(3, count, dtype=torch.float32)
        shares[1] = 1.0
        return cls(
            token_ids_SN=zeros(count, max_speculative_tokens + 1),
            num_computed_tokens_S=zeros(count),
            num_draft_tokens_S=zeros(count),
            block_tables_SM=zeros(count, blocks_per_slot, dtype=torch.int32),
            float_params_3S=shares,
            int_params_2S=zeros(2, count),
        )


@dataclass
class VerifyInputs:
    """int64 but where it says otherwise."""

    token_ids_BQ: Tensor
    num_computed_tokens_B: Tensor  # int32
    query_lens_B: Tensor  # int32: rows that lie inside the context
    num_draft_tokens_B: Tensor  # drafts that are real
    block_tables_BM: Tensor  # int32
    positions_T: Tensor  # of the rows, inside the context
    sample_positions_T: Tensor  # of the tokens chosen after them
    temperature_T: Tensor  # fp32
    top_k_T: Tensor
    top_p_T: Tensor  # fp32
    min_p_T: Tensor  # fp32
    seed_T: Tensor


def build_verify_inputs_torch(state: SlotState, slots_B: Tensor, k: int, longest: int) -> VerifyInputs:
    rows = k + 1
    starts = state.num_computed_tokens_S[slots_B]
    positions = starts[:, None] + torch.arange(rows, device=slots_B.device)
    slots_T = slots_B.repeat_interleave(rows)
    return VerifyInputs(
        state.token_ids_SN[slots_B, :rows],
        starts.int(),
        (longest - starts).clamp(0, rows).int(),
        state.num_draft_tokens_S[slots_B].clamp(max=k),
        state.block_tables_SM[slots_B],
        positions.clamp(max=longest - 1).flatten(),
        positions.flatten() + 1,
        state.temperature_S[slots_T],
        state.top_k_S[slots_T],
        state.top_p_S[slots_T],
        state.min_p_S[slots_T],
        state.seed_S[slots_T],
    )


@_jit
def _verify_inputs_kernel(
    slots,
    tokens_S,
    tokens_stride,
    num_computed_tokens_S,
    num_draft_tokens_S,
    tables_S,
    temperature_S,
    top_k_S,
    top_p_S,
    min_p_S,
    seed_S,
    tokens,
    starts,
    lives,
    available,
    tables,
    positions,
    nexts,
    temperature,
    top_k,
    top_p,
    min_p,
    seed,
    last_slot,
    longest,
    M,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (b, c): chunk c of request b's table; the first also does the rest. WIDTH >= ROWS."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    b = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + b)
    slot = tl.where(slot < 0, last_slot, slot)
    at = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    entries = tl.load(tables_S + slot * M + at, mask=at < M, other=0)
    if tl.program_id(1) == 0:
        row = tl.arange(0, WIDTH)
        real = row < ROWS
        out = b * ROWS + row
        blank = row.to(tl.int64) * 0
        # Everything is asked for before anything is stored: a store waits for its value, and all behind it wait too.
        start = tl.load(num_computed_tokens_S + slot)
        ready = tl.load(num_draft_tokens_S + slot)
        token = tl.load(tokens_S + slot * tokens_stride + row, mask=real, other=0)
        heat = tl.load(temperature_S + slot) + blank.to(tl.float32)
        most_p = tl.load(top_p_S + slot) + blank.to(tl.float32)
        least_p = tl.load(min_p_S + slot) + blank.to(tl.float32)
        most = tl.load(top_k_S + slot) + blank
        drawn = tl.load(seed_S + slot) + blank
        tl.store(starts + b, start.to(tl.int32))
        tl.store(lives + b, tl.minimum(tl.maximum(longest - start, 0), ROWS).to(tl.int32))
        tl.store(available + b, tl.minimum(ready, ROWS - 1))
        tl.store(tokens + out, token, mask=real)
        tl.store(positions + out, tl.minimum(start + row, longest - 1), mask=real)
        tl.store(nexts + out, start + row + 1, mask=real)
        tl.store(temperature + out, heat, mask=real)
        tl.store(top_p + out, most_p, mask=real)
        tl.store(min_p + out, least_p, mask=real)
        tl.store(top_k + out, most, mask=real)
        tl.store(seed + out, drawn, mask=real)
    tl.store(tables + b * M + at, entries, mask=at < M)


def build_verify_inputs_triton(state: SlotState, slots_B: Tensor, k: int, longest: int) -> VerifyInputs:
    batch, rows, device = len(slots_B), k + 1, slots_B.device
    blocks = state.block_tables_SM.shape[1]
    longs = torch.empty(6, batch * rows, dtype=torch.int64, device=device)
    floats = torch.empty(3, batch * rows, dtype=torch.float32, device=device)
    ints = torch.empty(2, batch, dtype=torch.int32, device=device)
    tables = torch.empty(batch, blocks, dtype=torch.int32, device=device)
    made = VerifyInputs(
        longs[0].view(batch, rows),
        ints[0],
        ints[1],
        longs[5, :batch],
        tables,
        longs[1],
        longs[2],
        floats[0],
        longs[3],
        floats[1],
        floats[2],
        longs[4],
    )
    chunk = 256
    _verify_inputs_kernel[(batch, triton.cdiv(blocks, chunk))](
        slots_B,
        state.token_ids_SN,
        state.token_ids_SN.stride(0),
        state.num_computed_tokens_S,
        state.num_draft_tokens_S,
        state.block_tables_SM,
        state.temperature_S,
        state.top_k_S,
        state.top_p_S,
        state.min_p_S,
        state.seed_S,
        made.token_ids_BQ,
        made.num_computed_tokens_B,
        made.query_lens_B,
        made.num_draft_tokens_B,
        made.block_tables_BM,
        made.positions_T,
        made.sample_positions_T,
        made.temperature_T,
        made.top_k_T,
        made.top_p_T,
        made.min_p_T,
        made.seed_T,
        len(state.num_computed_tokens_S) - 1,
        longest,
        blocks,
        ROWS=rows,
        WIDTH=triton.next_power_of_2(rows),
        CHUNK=chunk,
        num_warps=1,
        **pdl_launch_options(device),
    )
    return made


def build_verify_inputs(state: SlotState, slots_B: Tensor, k: int, longest: int) -> VerifyInputs:
    """The rows of a round that verifies k drafts a request; `longest` is the context's length.

    Worked example: a slot whose newest token n sits at 5 with drafts x y, k = 2, longest 7. Its rows are n x y at
    positions 5 6 6 (the last lies outside the context), of which 2 are live; chosen after them are the tokens at
    6 7 8, and 0 drafts are available, as no round may end past the context.
    """
    made = build_verify_inputs_triton if slots_B.is_cuda and triton is not None else build_verify_inputs_torch
    return made(state, slots_B, k, longest)
