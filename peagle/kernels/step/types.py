"""Tensors of a decode step on the device: the state of request slots, and the inputs of target and drafter.

Shapes: S slots, N = most draft tokens + 1, M blocks in a block table; B requests, K draft tokens, Q = K + 1 verified
rows per request, T = B * Q rows; R drafter rows, D drafter width. Integers are int64 unless noted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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
    def allocate(
        cls, num_slots: int, max_speculative_tokens: int, blocks_per_slot: int, device: torch.device
    ) -> SlotState:
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
