"""Runs the drafter: K draft tokens for each request, after a verification pass or at the end of its prompt.

P-EAGLE drafts all K tokens in one pass over the new tokens and K - 1 mask rows. EAGLE-3 drafts the first token in one
pass over the new tokens, then one token per pass. `speculative/reference.py` shows the same without a cache.

Shapes: B requests, R drafter rows, K draft tokens, D drafter width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from peagle.engine.kv_cache import KVCache, PagedAttention, decode_attention, join_attention
from peagle.kernels.gather import gather_rows
from peagle.kernels.sampling.sample import argmax
from peagle.models.drafter import Drafter
from peagle.models.fused_cpu import FusedCpuDrafter


def join(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


@dataclass
class DraftBatch:
    """Rows of a drafter pass that draft the next tokens of B requests."""

    token_ids_R: Tensor
    hidden_states_RD: Tensor
    positions_R: Tensor
    attend: PagedAttention
    sample_rows: Tensor  # rows whose outputs are draft tokens: B * K for P-EAGLE, B for EAGLE-3, none without drafting
    num_requests: int
    # For EAGLE-3, which drafts one token per pass:
    next_positions_B: Tensor | None  # of the row that drafts the second token
    block_tables_BM: Tensor


class DraftProposer:
    def __init__(
        self,
        drafter: Drafter,
        num_blocks: int,
        max_model_len: int,
        max_speculative_tokens: int,
        kv_cache_dtype: torch.dtype | None = None,
    ) -> None:
        self.drafter, self.max_model_len = drafter, max_model_len
        self.max_speculative_tokens, self.mask_token_id = max_speculative_tokens, drafter.cfg.mask_token_id
        self.device = drafter.fc.weight.device
        self.run_drafter = FusedCpuDrafter(drafter) if self.device.type == "cpu" else drafter
        layers = [drafter.cfg.layer] * drafter.cfg.num_layers
        self.kv_cache = KVCache.allocate(layers, num_blocks, drafter.fc.weight, kv_cache_dtype)
        self.mask_hidden_D: Tensor | None = None
        if drafter.cfg.parallel:
            self.mask_hidden_D = drafter.fc.weight.new_empty(drafter.cfg.layer.hidden_size)
        self.refresh_mask_hidden()

    @torch.inference_mode()
    def refresh_mask_hidden(self) -> None:
        """Recomputes the hidden state of mask rows. Call it after the drafter's weights changed in place."""
        if self.mask_hidden_D is not None:
            self.mask_hidden_D.copy_(self.drafter.mask_hidden_states(1)[0])  # in place: captured graphs read it

    def num_mask_rows(self, k: int) -> int:
        """Mask rows that draft k tokens after the newest token of a request."""
        return max(k - 1, 0) if self.drafter.cfg.parallel else 0

    def propose(self, batches: Sequence[DraftBatch], k: int, max_seq_len: int | None = None) -> list[Tensor]:
        """[B, k] for each batch: draft tokens for the next step, from one pass over the rows of all batches."""
        attend = join_attention([b.attend for b in batches], [len(b.token_ids_R) for b in batches])
        output_RD, next_hidden_RD = self.run_drafter(
            join([b.token_ids_R for b in batches]),
            join([b.hidden_states_RD for b in batches]),
            join([b.positions_R for b in batches]),
            attend,
        )
        first_rows = [0, *accumulate(len(b.token_ids_R) for b in batches[:-1])]
        own_rows = zip(batches, first_rows, strict=True)
        sample_rows = join([b.sample_rows + first if first else b.sample_rows for b, first in own_rows])
        if k == 0 or not len(sample_rows):
            return [b.token_ids_R.new_empty(b.num_requests, 0) for b in batches]
        draft_token_ids = self.greedy_tokens(gather_rows(output_RD, sample_rows))
        if self.drafter.cfg.parallel:
            draft_token_ids_BK = draft_token_ids.view(-1, k)
        else:
            draft_token_ids_BK = self.propose_autoregressively(
                draft_token_ids,
                gather_rows(next_hidden_RD, sample_rows),
                join([b.next_positions_B for b in batches if b.next_positions_B is not None]),
                join([b.block_tables_BM for b in batches]),
                k,
                max_seq_len,
            )
        return list(draft_token_ids_BK.split([b.num_requests for b in batches]))

    def propose_autoregressively(
        self,
        draft_token_ids_B: Tensor,
        hidden_BD: Tensor,
        positions_B: Tensor,
        block_tables_BM: Tensor,
        k: int,
        max_seq_len: int | None = None,
    ) -> Tensor:
        """EAGLE-3: drafts tokens 2 to K, each from the token before and the drafter's own output. [B, K].
        `positions_B`: position of the first of these rows."""
        draft_token_ids = [draft_token_ids_B]
        # Positions of all passes at once: one launch instead of several per pass.
        unclamped_SB = positions_B + torch.arange(k - 1, device=self.device)[:, None]
        positions_SB = unclamped_SB.clamp(max=self.max_model_len - 1)
        starts_SB, query_lens_SB = positions_SB.int(), (self.max_model_len - unclamped_SB).clamp(0, 1).int()
        for rows_B, starts_B, query_lens_B in zip(positions_SB, starts_SB, query_lens_SB, strict=True):
            attend = decode_attention(self.kv_cache, block_tables_BM, starts_B, query_lens_B, 1, max_seq_len)
            output_BD, hidden_BD = self.run_drafter(draft_token_ids[-1], hidden_BD, rows_B, attend)
            draft_token_ids.append(self.greedy_tokens(output_BD))
        return torch.stack(draft_token_ids, 1)

    def greedy_tokens(self, output_RD: Tensor) -> Tensor:
        """The likeliest token of each row, in the target's vocabulary."""
        return self.drafter.to_target_ids(argmax(self.drafter.compute_logits(output_RD)))
