"""A decode step between the two models: the rows of target and drafter, and the updates of the request slots.

Each function is one Triton launch on a GPU, and plain torch elsewhere. Hidden states come in combined
(`Drafter.combine_hidden_states`), draft tokens as target token ids. Shapes as in types.py.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from peagle.kernels.host_transfer import PinnedRing, copy_to_device
from peagle.kernels.step.step_triton import (
    apply_updates_triton,
    build_draft_inputs_triton,
    build_verify_inputs_triton,
    commit_state_triton,
)
from peagle.kernels.step.types import DraftInputs, SlotState, VerifyInputs
from peagle.kernels.triton_utils import runs_triton


def build_verify_inputs(state: SlotState, slots_B: Tensor, k: int, max_model_len: int) -> VerifyInputs:
    """Builds the rows that verify k draft tokens per request; slot -1 is the padding slot.

    Row j of a request has token j of its slot (the newest token, then the draft tokens) at position
    num_computed_tokens + j.

    Worked example: a slot whose newest token n is at position 5, with draft tokens x y, k = 2, max_model_len 7. Its
    rows are n x y at positions 5 6 6 (the last is outside the context), of which 2 are valid; the tokens sampled after
    them have positions 6 7 8, and 0 draft tokens are valid, since no step may end past the context.
    """
    if runs_triton(slots_B):
        return build_verify_inputs_triton(state, slots_B, k, max_model_len)
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
        state.float_params_3S[:, slots_T],
        state.int_params_2S[:, slots_T],
    )


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
    if runs_triton(output_token_ids_BQ):
        rows_of_target = (output_token_ids_BQ, num_accepted_B, num_computed_tokens_B, hidden_states_TD)
        return build_draft_inputs_triton(*rows_of_target, mask_hidden_D, mask_token_id, k, max_model_len)
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
    starts = num_computed_tokens_B.long()
    positions = (starts[:, None] + at).clamp(max=max_model_len - 1).clamp(min=0)
    live = torch.minimum(last[:, 0] + 1 + masks, max_model_len - starts).clamp(min=0)
    sampled = torch.arange(k if mask_token_id is not None else min(k, 1), device=output_token_ids_BQ.device)
    sample = torch.arange(requests, device=output_token_ids_BQ.device)[:, None] * rows + last + sampled
    return DraftInputs(tokens.flatten(), hidden.flatten(0, 1), positions.flatten(), live.int(), sample)


def commit_state(
    state: SlotState,
    slots_B: Tensor,
    output_token_ids_BQ: Tensor,
    num_accepted_B: Tensor,
    draft_token_ids_BK: Tensor,
    max_model_len: int,
    positions_B: Tensor | None = None,
) -> None:
    """Writes what each request's next decode step reads into its slot, in place.

    The newest token and its draft tokens go to token_ids[slot, 0 .. K] (N > K; later columns stay), num_computed_tokens
    becomes the newest token's position, and num_draft_tokens is how many draft tokens the context has room for: with
    num_computed_tokens n the request has n + 1 tokens, and a step adds one more token than it verifies, so
    max_model_len - n - 2. `positions` are those of the newest tokens; None: directly behind the accepted tokens.
    Slots are distinct; a negative one is padding and changes nothing.
    """
    if runs_triton(state.token_ids_SN):
        accepted = (output_token_ids_BQ, num_accepted_B, draft_token_ids_BK)
        commit_state_triton(state, slots_B, *accepted, max_model_len, positions_B)
        return
    positions_B = state.num_computed_tokens_S[slots_B] + num_accepted_B + 1 if positions_B is None else positions_B
    newest_B, k = output_token_ids_BQ.gather(1, num_accepted_B[:, None])[:, 0], draft_token_ids_BK.shape[1]
    used = slots_B >= 0
    if not used.all():
        written = (slots_B, newest_B, draft_token_ids_BK, positions_B)
        slots_B, newest_B, draft_token_ids_BK, positions_B = (x[used] for x in written)
    state.token_ids_SN[slots_B, 0] = newest_B
    if k:
        state.token_ids_SN[slots_B, 1 : k + 1] = draft_token_ids_BK
    state.num_computed_tokens_S[slots_B] = positions_B
    state.num_draft_tokens_S[slots_B] = (max_model_len - positions_B - 2).clamp(0, k)


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

    def pop_updates(self) -> Tensor:
        """Returns the collected updates [2, N], cells and values, and clears them."""
        cells_2N = torch.tensor((self._cells, self._values))
        self._cells, self._values = [], []
        return cells_2N

    def send(self) -> None:
        """Applies the collected updates to the state."""
        if not self._cells:
            return
        cells_2N = self.pop_updates()
        if runs_triton(self.state.token_ids_SN):
            apply_updates_triton(self.state, self.pinned.to_pinned(cells_2N))
        else:
            apply_updates_torch(self.state, cells_2N)


def apply_updates_torch(state: SlotState, cells_2N: Tensor) -> None:
    """Writes values to cells; `cells_2N` is on the host."""
    cell_N, value_N = cells_2N
    first = 0
    for array in state.host_arrays:
        in_array_N = (cell_N >= first) & (cell_N < first + array.numel())
        values = value_N[in_array_N]
        if array.is_floating_point():
            values = values.int().view(torch.float32)
        at = copy_to_device(cell_N[in_array_N] - first, array.device)
        array.view(-1)[at] = copy_to_device(values.to(array.dtype), array.device)
        first += array.numel()
