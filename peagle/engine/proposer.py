"""Runs the drafter: K draft tokens for each request after a verification pass. `prefill.py` drafts the first ones.

P-EAGLE drafts all K tokens in one pass over the accepted tokens and K - 1 mask rows. EAGLE-3 drafts the first token in
one pass over the accepted tokens, then one token per pass. `speculative/reference.py` shows the same without a cache.

Shapes: B requests, Q verified rows per request, T = B * Q, R drafter rows, K draft tokens, D drafter width.
"""

import torch
from torch import Tensor

from peagle.engine.kv_cache import KVCache, decode_attention
from peagle.kernels.gather import gather_rows
from peagle.kernels.sampling.sample import argmax
from peagle.kernels.sampling.verify import AcceptedTokens
from peagle.kernels.step import VerifyInputs, build_draft_inputs
from peagle.models.drafter import Drafter
from peagle.models.fused_cpu import FusedCpuDrafter


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

    @property
    def num_mask_rows(self) -> int:
        """Drafter rows after the end of a prompt."""
        return max(self.max_speculative_tokens - 1, 0) if self.drafter.cfg.parallel else 0

    def propose(
        self, inputs: VerifyInputs, hidden_TD: Tensor, accepted: AcceptedTokens, max_seq_len: int | None
    ) -> Tensor:
        """[B, K]: draft tokens for the next step, from the verified rows and their combined aux hidden states."""
        output_BQ = accepted.output_token_ids_BQ
        batch_size, k = len(output_BQ), output_BQ.shape[1] - 1
        starts_B, block_tables_BM = inputs.num_computed_tokens_B, inputs.block_tables_BM
        if batch_size == 1 and self.device.type == "cpu":  # skip rejected rows: here rows cost and a sync does not
            num_kept = int(accepted.num_accepted_B) + 1
            output_BQ, hidden_TD = output_BQ[:, :num_kept], hidden_TD[:num_kept]
        rows = build_draft_inputs(
            output_BQ,
            accepted.num_accepted_B,
            starts_B,
            hidden_TD,
            self.mask_hidden_D,
            self.mask_token_id,
            k,
            self.max_model_len,
        )
        num_rows = len(rows.token_ids_R) // batch_size
        attend = decode_attention(self.kv_cache, block_tables_BM, starts_B, rows.query_lens_B, num_rows, max_seq_len)
        output_RD, next_hidden_RD = self.run_drafter(rows.token_ids_R, rows.hidden_states_RD, rows.positions_R, attend)
        if k == 0:
            return output_BQ[:, :0]
        sample_rows = rows.sample_rows_BK.flatten()
        draft_token_ids = self.greedy_tokens(gather_rows(output_RD, sample_rows))
        if self.mask_token_id is not None:
            return draft_token_ids.view(batch_size, k)
        positions_B = starts_B + accepted.num_accepted_B + 1
        next_hidden_BD = gather_rows(next_hidden_RD, sample_rows)
        return self.propose_autoregressively(
            draft_token_ids, next_hidden_BD, positions_B, block_tables_BM, k, max_seq_len
        )

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
