"""Triton kernels of step.py, one launch each. Shapes as in types.py."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import torch
from torch import Tensor

from peagle.kernels.step.types import DraftInputs, SlotState, VerifyInputs
from peagle.kernels.triton_utils import HAVE_TRITON, pdl_launch_options

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
            tl.store(token_ids + row, tl.where(j <= m, token, mask_token))
            start = tl.load(starts + b).to(tl.int64)
            tl.store(positions + row, tl.maximum(tl.minimum(start + j, max_model_len - 1), 0))
            if j < SAMPLES:
                tl.store(sample + b * SAMPLES + j, b * ROWS + m + j)
            if j == 0:
                tl.store(live + b, tl.maximum(tl.minimum(m + 1 + (ROWS - Q), max_model_len - start), 0).to(tl.int32))

    @triton.jit
    def _commit_kernel(
        tokens, tokens_stride, starts, available, slots, emitted, emitted_stride, accepted, drafts, drafts_stride,
        max_model_len, positions,
        K: tl.constexpr, HAS_POSITIONS: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
    ) -> None:  # fmt: skip
        """Handles one request; WIDTH >= K + 1."""
        wait_for_previous(PDL)
        b = tl.program_id(0).to(tl.int64)
        slot = tl.load(slots + b).to(tl.int64)
        if slot >= 0:
            m = tl.load(accepted + b).to(tl.int64)
            at = tl.arange(0, WIDTH)
            newest = tl.load(emitted + b * emitted_stride + m)
            draft = tl.load(drafts + b * drafts_stride + at - 1, mask=(at > 0) & (at <= K), other=0)
            tl.store(tokens + slot * tokens_stride + at, tl.where(at == 0, newest, draft), mask=at <= K)
            if HAS_POSITIONS:
                start = tl.load(positions + b).to(tl.int64)
            else:
                start = tl.load(starts + slot).to(tl.int64) + m + 1
            tl.store(starts + slot, start)
            tl.store(available + slot, tl.maximum(tl.minimum(max_model_len - start - 2, K), 0))

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


def build_verify_inputs_triton(state: SlotState, slots_B: Tensor, k: int, max_model_len: int) -> VerifyInputs:
    batch, rows, device = len(slots_B), k + 1, slots_B.device
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
        *(slots_B, state.token_ids_SN, state.token_ids_SN.stride(0)),
        *(state.num_computed_tokens_S, state.num_draft_tokens_S, *state.host_arrays),
        *vars(inputs).values(),  # in the order of the fields
        *(len(state.num_computed_tokens_S), max_model_len, blocks),
        ROWS=rows,
        WIDTH=triton.next_power_of_2(rows),
        CHUNK=chunk,
        num_warps=1,
        **pdl_launch_options(device),
    )
    return inputs


def build_draft_inputs_triton(
    output_token_ids_BQ: Tensor,
    num_accepted_B: Tensor,
    num_computed_tokens_B: Tensor,
    hidden_states_TD: Tensor,
    mask_hidden_D: Tensor | None,
    mask_token_id: int | None,
    k: int,
    max_model_len: int,
) -> DraftInputs:
    requests, verified = output_token_ids_BQ.shape
    width = hidden_states_TD.shape[1]
    masked = mask_token_id is not None
    assert not masked or mask_hidden_D is not None, "mask rows need mask_hidden"
    assert output_token_ids_BQ.stride(1) == 1 and hidden_states_TD.stride(1) == 1
    rows = verified + (max(k - 1, 0) if masked else 0)
    samples = k if masked else min(k, 1)
    device = output_token_ids_BQ.device
    out = DraftInputs(
        torch.empty(requests * rows, dtype=torch.int64, device=device),
        torch.empty(requests * rows, width, dtype=hidden_states_TD.dtype, device=device),
        torch.empty(requests * rows, dtype=torch.int64, device=device),
        torch.empty(requests, dtype=torch.int32, device=device),
        torch.empty(requests, samples, dtype=torch.int64, device=device),
    )
    block = min(triton.next_power_of_2(width), 2048)
    _draft_inputs_kernel[(requests * rows, -(-width // block))](
        *(output_token_ids_BQ, output_token_ids_BQ.stride(0), num_accepted_B.contiguous()),
        *(num_computed_tokens_B.contiguous(), hidden_states_TD, hidden_states_TD.stride(0)),
        hidden_states_TD if mask_hidden_D is None else mask_hidden_D.contiguous(),  # not read without mask rows
        *(mask_token_id or 0, max_model_len),
        *(out.token_ids_R, out.hidden_states_RD, out.positions_R, out.query_lens_B),
        out.sample_rows_BK if samples else out.positions_R,  # an empty tensor has no address; not written
        Q=verified,
        ROWS=rows,
        SAMPLES=samples,
        MASKED=masked,
        D=width,
        WIDTH=block,
        num_warps=4,
        **pdl_launch_options(device),
    )
    return out


def commit_state_triton(
    state: SlotState,
    slots_B: Tensor,
    output_token_ids_BQ: Tensor,
    num_accepted_B: Tensor,
    draft_token_ids_BK: Tensor,
    max_model_len: int,
    positions_B: Tensor | None = None,
) -> None:
    k = draft_token_ids_BK.shape[1]
    assert state.token_ids_SN.stride(1) == 1 and output_token_ids_BQ.stride(1) == 1
    assert k < 2 or draft_token_ids_BK.stride(1) == 1
    _commit_kernel[(len(slots_B),)](
        *(state.token_ids_SN, state.token_ids_SN.stride(0), state.num_computed_tokens_S, state.num_draft_tokens_S),
        *(slots_B.contiguous(), output_token_ids_BQ, output_token_ids_BQ.stride(0), num_accepted_B.contiguous()),
        draft_token_ids_BK if k else output_token_ids_BQ,  # an empty tensor has no address; not read
        *(draft_token_ids_BK.stride(0), max_model_len),
        slots_B if positions_B is None else positions_B.contiguous(),
        K=k,
        HAS_POSITIONS=positions_B is not None,
        WIDTH=triton.next_power_of_2(k + 1),
        num_warps=1,
        **pdl_launch_options(state.token_ids_SN.device),
    )


def apply_updates_triton(state: SlotState, cells_2N: Tensor) -> None:
    """Writes values to cells; `cells_2N` is on the device or in pinned host memory."""
    count, (tables, float_params, int_params) = cells_2N.shape[1], state.host_arrays
    sizes = {"TABLES": tables.numel(), "FLOAT_PARAMS": float_params.numel()}
    _updates_kernel[(triton.cdiv(count, _BLOCK),)](
        cells_2N, count, tables, float_params, int_params, **sizes, BLOCK=_BLOCK, num_warps=4
    )
