"""Plain torch references of verify_inputs.py, draft_inputs.py and slot_updates.py. Shapes as in types.py."""

from __future__ import annotations

import torch
from torch import Tensor

from peagle.kernels.host_transfer import copy_to_device
from peagle.kernels.step.types import DraftInputs, SlotState, VerifyInputs


def build_verify_inputs_torch(state: SlotState, slots_B: Tensor, k: int, max_model_len: int) -> VerifyInputs:
    rows = k + 1
    starts = state.num_computed_tokens_S[slots_B]
    positions = starts[:, None] + torch.arange(rows, device=slots_B.device)
    slots_T = slots_B.repeat_interleave(rows)
    return VerifyInputs(
        state.token_ids_SN[slots_B, :rows],
        starts.int(),
        (max_model_len - starts).clamp(0, rows).int(),
        state.num_draft_tokens_S[slots_B].clamp(max=k),
        state.block_tables_SM[slots_B],
        positions.clamp(max=max_model_len - 1).flatten(),
        positions.flatten() + 1,
        state.temperature_S[slots_T],
        state.top_k_S[slots_T],
        state.top_p_S[slots_T],
        state.min_p_S[slots_T],
        state.seed_S[slots_T],
    )


def build_draft_inputs_torch(
    output_token_ids_BQ: Tensor,
    num_accepted_B: Tensor,
    num_computed_tokens_B: Tensor,
    hidden_states_TD: Tensor,
    mask_hidden_D: Tensor | None,
    mask_token_id: int | None,
    k: int,
    position_limit_B: Tensor,
) -> DraftInputs:
    requests, verified = output_token_ids_BQ.shape
    masks = max(k - 1, 0) if mask_token_id is not None else 0
    rows = verified + masks
    at = torch.arange(rows, device=output_token_ids_BQ.device)
    last = num_accepted_B.long()[:, None]
    is_real = at <= last  # [B, rows]

    tokens = output_token_ids_BQ.new_full((requests, rows), 0 if mask_token_id is None else mask_token_id)
    tokens[:, :verified] = torch.where(is_real[:, :verified], output_token_ids_BQ, tokens[:, :verified])
    hidden = hidden_states_TD.new_empty(requests, rows, hidden_states_TD.shape[1])
    hidden[:, :verified] = hidden_states_TD.unflatten(0, (requests, verified))
    if mask_token_id is not None:
        assert mask_hidden_D is not None, "mask rows need mask_hidden"
        hidden = torch.where(is_real[..., None], hidden, mask_hidden_D.to(hidden.dtype))
    limit = position_limit_B.long()
    starts = num_computed_tokens_B.long()
    positions = torch.minimum(starts[:, None] + at, limit[:, None] - 1).clamp(min=0)
    live = torch.minimum(last[:, 0] + 1 + masks, limit - starts).clamp(min=0)
    sampled = torch.arange(k if mask_token_id is not None else min(k, 1), device=output_token_ids_BQ.device)
    sample = torch.arange(requests, device=output_token_ids_BQ.device)[:, None] * rows + last + sampled
    return DraftInputs(tokens.flatten(), hidden.flatten(0, 1), positions.flatten(), live.int(), sample)


def commit_state_torch(
    state: SlotState,
    slots_B: Tensor,
    output_token_ids_BQ: Tensor,
    num_accepted_B: Tensor,
    draft_token_ids_BK: Tensor,
    max_model_len: Tensor | int,
    positions_B: Tensor | None = None,
) -> None:
    used = slots_B >= 0
    if not used.all():
        slots_B, num_accepted_B, draft_token_ids_BK, output_token_ids_BQ = (
            slots_B[used],
            num_accepted_B[used],
            draft_token_ids_BK[used],
            output_token_ids_BQ[used],
        )
        max_model_len = max_model_len[used] if isinstance(max_model_len, Tensor) else max_model_len
        positions_B = positions_B[used] if positions_B is not None else None
    slots, accepted, k = slots_B.long(), num_accepted_B.long(), draft_token_ids_BK.shape[1]
    state.token_ids_SN[slots, 0] = output_token_ids_BQ.gather(1, accepted[:, None])[:, 0].to(state.token_ids_SN.dtype)
    if k:
        state.token_ids_SN[slots, 1 : k + 1] = draft_token_ids_BK.to(state.token_ids_SN.dtype)
    start = state.num_computed_tokens_S[slots].long() + accepted + 1 if positions_B is None else positions_B.long()
    state.num_computed_tokens_S[slots] = start.to(state.num_computed_tokens_S.dtype)
    limit = max_model_len.long() if isinstance(max_model_len, Tensor) else max_model_len
    state.num_draft_tokens_S[slots] = (limit - start - 2).clamp(0, k).to(state.num_draft_tokens_S.dtype)


def updated_arrays(state: SlotState) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the arrays that the host updates, in the order in which their cells are numbered."""
    return state.block_tables_SM, state.float_params_3S, state.int_params_2S


def apply_updates_torch(state: SlotState, cells_2N: Tensor) -> None:
    """Writes values to cells; `cells_2N` is on the host."""
    cell_N, value_N = cells_2N
    first = 0
    for array in updated_arrays(state):
        in_array_N = (cell_N >= first) & (cell_N < first + array.numel())
        values = value_N[in_array_N]
        if array.is_floating_point():
            values = values.int().view(torch.float32)
        at = copy_to_device(cell_N[in_array_N] - first, array.device)
        array.view(-1)[at] = copy_to_device(values.to(array.dtype), array.device)
        first += array.numel()
