"""Builds the drafter's rows after a verification step, and commits the step to the request slots.

Hidden states come in combined (`Drafter.combine_hidden_states`), draft tokens as target token ids. Shapes as in
types.py.
"""

from __future__ import annotations

from torch import Tensor

from peagle.kernels.step.step_torch import build_draft_inputs_torch, commit_state_torch
from peagle.kernels.step.step_triton import build_draft_inputs_triton, commit_state_triton
from peagle.kernels.step.types import DraftInputs, SlotState
from peagle.kernels.triton_utils import runs_triton


def build_draft_inputs(
    output_token_ids_BQ: Tensor,
    num_accepted_B: Tensor,
    num_computed_tokens_B: Tensor,
    hidden_states_TD: Tensor,
    mask_hidden_D: Tensor | None,
    mask_token_id: int | None,
    k: int,
    position_limit_B: Tensor,
) -> DraftInputs:
    """Builds the drafter's rows after a step that verified Q rows per request and accepted draft tokens 1..m.

    `output_token_ids` and `num_accepted` come from `accept_draft_tokens`; `num_computed_tokens` is the position of row
    0, `hidden_states` are the combined auxiliary hidden states of the verified rows, `mask_hidden` is that of a mask
    row, and `position_limit` is the first position that may not be written. Row j of a request is at position
    num_computed_tokens + j:

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
    p + 2.) With position_limit 12, query_len is 2, and the positions of rows 2 and 3 are clamped to 11.
    """
    build = build_draft_inputs_triton if runs_triton(output_token_ids_BQ) else build_draft_inputs_torch
    return build(
        output_token_ids_BQ,
        num_accepted_B,
        num_computed_tokens_B,
        hidden_states_TD,
        mask_hidden_D,
        mask_token_id,
        k,
        position_limit_B,
    )


def commit_state(
    state: SlotState,
    slots_B: Tensor,
    output_token_ids_BQ: Tensor,
    num_accepted_B: Tensor,
    draft_token_ids_BK: Tensor,
    max_model_len: Tensor | int,
    positions_B: Tensor | None = None,
) -> None:
    """Writes what each request's next decode step reads into its slot, in place.

    The newest token and its draft tokens go to token_ids[slot, 0 .. K] (N > K; later columns stay), num_computed_tokens
    becomes the newest token's position, and num_draft_tokens is how many draft tokens the context has room for: with
    num_computed_tokens n the request has n + 1 tokens, and a step adds one more token than it verifies, so
    max_model_len - n - 2. `positions` are those of the newest tokens; None: directly behind the accepted tokens.

    `max_model_len` is one value or one per request. Slots are distinct; a negative one is padding and changes nothing.
    Token ids are int64; other tensors may have any integer dtype.
    """
    commit = commit_state_triton if runs_triton(state.token_ids_SN) else commit_state_torch
    commit(state, slots_B, output_token_ids_BQ, num_accepted_B, draft_token_ids_BK, max_model_len, positions_B)
