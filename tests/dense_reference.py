"""Reference implementation of the training loss: all positions at once with a stored attention mask.

Slow and simple; tests compare the partitioned training with it.

A sequence of T tokens makes (anchor a, depth d) positions. Depth 0 is the ordinary EAGLE-3 position a: the target's
auxiliary hidden states at a and the token at a+1. Depth d >= 1 is the position d rows after it at inference: P-EAGLE's
mask position, or EAGLE-3's own output at depth d-1 with the token at a+d+1. It has RoPE position a+d, attends to the
depth-0 positions up to a, to its own chain (a, 1..d) and to nothing else, and predicts the token at a+d+2 from the
target's distribution there.

Worked example, T = 6, 2 depths. Positions with a label (a+d+2 < 6) and what they attend to:

    (0,0): 0,0                      (0,1): 0,0  0,1
    (1,0): 0,0 1,0                  (1,1): 0,0 1,0  1,1
    (2,0): 0,0 1,0 2,0              (2,1): 0,0 1,0 2,0  2,1
    (3,0): 0,0 1,0 2,0 3,0

Shapes: B sequences of T tokens, R positions in each, N width of the auxiliary hidden states, D drafter width, V target
vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from peagle.config import Window
from peagle.models.decoder import Decoder
from peagle.models.drafter import Drafter
from peagle.models.layers import Attend


@dataclass(frozen=True)
class DensePositions:
    """The same (anchor, depth) pairs for every sequence of a batch, depth 0 first."""

    anchor_R: Tensor
    depth_R: Tensor

    @property
    def position_R(self) -> Tensor:
        return self.anchor_R + self.depth_R

    def visible_RR(self) -> Tensor:
        """True where row i attends to row j."""
        a_i, a_j = self.anchor_R[:, None], self.anchor_R[None, :]
        d_i, d_j = self.depth_R[:, None], self.depth_R[None, :]
        return ((d_j == 0) & (a_j <= a_i)) | ((a_j == a_i) & (d_j <= d_i))


def sample_nested_positions(
    num_tokens: int, num_depths: int, down_sample_ratio: float, rng: torch.Generator
) -> DensePositions:
    """Keeps all of depth 0 and about down_sample_ratio^d of depth d, nested."""
    kept = [torch.arange(num_tokens - 2)]
    for depth in range(1, num_depths):
        able = kept[-1][kept[-1] + depth + 2 < num_tokens]
        count = min(len(able), round((num_tokens - 2 - depth) * down_sample_ratio**depth))
        chosen = torch.randperm(len(able), generator=rng)[:count]
        kept.append(able[chosen.sort().values])
    depth_R = torch.cat([torch.full((len(k),), d) for d, k in enumerate(kept)])
    return DensePositions(torch.cat(kept), depth_R)


def masked_attention(batch_size: int, visible_RR: Tensor | None) -> Attend:
    """Attention within each sequence of a flat batch; None means causal."""

    def attend(layer: int, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, window: Window) -> Tensor:
        assert window is None, "the reference has no sliding windows"
        q, k, v = (x.unflatten(0, (batch_size, -1)).transpose(1, 2) for x in (q_THd, k_TGd, v_TGd))
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=visible_RR, is_causal=visible_RR is None, enable_gqa=True
        )
        return out.transpose(1, 2).flatten(0, 1)

    return attend


@torch.no_grad()
def compute_target_states(target: Decoder, tokens_BT: Tensor, aux_layer_ids: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The target's final hidden states [B, T, width] and auxiliary hidden states [B, T, N]."""
    batch_size, num_tokens = tokens_BT.shape
    positions = torch.arange(num_tokens, device=tokens_BT.device).repeat(batch_size)
    attend = masked_attention(batch_size, None)
    hidden, aux_hidden_states = target(tokens_BT.flatten(), positions, attend, aux_layer_ids)
    assert aux_hidden_states is not None
    return hidden.unflatten(0, (batch_size, num_tokens)), aux_hidden_states.unflatten(0, (batch_size, num_tokens))


def compute_drafter_outputs(
    drafter: Drafter, tokens_BT: Tensor, aux_hidden_states_BTN: Tensor, positions: DensePositions
) -> Tensor:
    """The drafter's normed outputs at every position [B, R, D]."""
    compute = _parallel_outputs if drafter.cfg.parallel else _sequential_outputs
    return compute(drafter, tokens_BT, aux_hidden_states_BTN, positions)


def _parallel_outputs(
    drafter: Drafter, tokens_BT: Tensor, aux_hidden_states_BTN: Tensor, positions: DensePositions
) -> Tensor:
    assert drafter.cfg.mask_token_id is not None
    batch_size, first = len(tokens_BT), positions.depth_R == 0
    tokens_BR = tokens_BT[:, positions.anchor_R + 1].where(first, drafter.cfg.mask_token_id)
    num_masks = int((~first).sum())
    depth_zero = drafter.combine_hidden_states(aux_hidden_states_BTN[:, positions.anchor_R[first]])
    masks = drafter.mask_hidden_states(num_masks).expand(batch_size, num_masks, -1)
    hidden_BRD = torch.cat([depth_zero, masks], 1)
    attend = masked_attention(batch_size, positions.visible_RR())
    position = positions.position_R.repeat(batch_size)
    output, _ = drafter(tokens_BR.flatten(), hidden_BRD.flatten(0, 1), position, attend)
    return output.unflatten(0, (batch_size, -1))


def _sequential_outputs(
    drafter: Drafter, tokens_BT: Tensor, aux_hidden_states_BTN: Tensor, positions: DensePositions
) -> Tensor:
    """Training-time test: depth d runs on the drafter's own output at depth d-1. Repeats all depths in each pass."""
    batch_size, max_depth = len(tokens_BT), int(positions.depth_R.max())
    tokens_BR = tokens_BT[:, positions.position_R + 1]
    visible_RR = positions.visible_RR()
    depth_zero = positions.anchor_R[positions.depth_R == 0]
    hidden_BRD = drafter.combine_hidden_states(aux_hidden_states_BTN[:, depth_zero])
    output = hidden_BRD
    for depth in range(max_depth + 1):
        end = int((positions.depth_R <= depth).sum())
        output, prenorm = drafter(
            tokens_BR[:, :end].flatten(),
            hidden_BRD.flatten(0, 1),
            positions.position_R[:end].repeat(batch_size),
            masked_attention(batch_size, visible_RR[:end, :end]),
        )
        output, prenorm = (x.unflatten(0, (batch_size, end)) for x in (output, prenorm))
        if depth < max_depth:
            anchor_here = positions.anchor_R.masked_fill(positions.depth_R != depth, -1)
            anchor_next = positions.anchor_R[positions.depth_R == depth + 1]
            parent = (anchor_here[:, None] == anchor_next[None, :]).float().argmax(0)
            hidden_BRD = torch.cat([hidden_BRD, prenorm[:, parent]], 1)
    return output


def position_losses(drafter: Drafter, output_BRD: Tensor, target_logits_BRV: Tensor) -> Tensor:
    """Cross-entropy [B, R] to the target's distribution; mass outside a reduced vocabulary contributes nothing."""
    exact = torch.float64 if output_BRD.dtype == torch.float64 else torch.float32
    log_q = drafter.compute_logits(output_BRD).to(exact).log_softmax(-1)
    p = target_logits_BRV.to(exact).softmax(-1)
    if drafter.d2t is not None:
        p = p[..., drafter.to_target_ids(torch.arange(log_q.shape[-1], device=log_q.device))]
    return -(p * log_q).sum(-1)


def compute_loss(
    drafter: Drafter,
    target: Decoder,
    tokens_BT: Tensor,
    positions: DensePositions,
    loss_mask_BT: Tensor | None = None,
) -> Tensor:
    """Mean over depths of the mean over that depth's positions whose label is in `loss_mask_BT` (None: all)."""
    hidden_BTD, aux_hidden_states_BTN = compute_target_states(target, tokens_BT, drafter.cfg.aux_layer_ids)
    output_BRD = compute_drafter_outputs(drafter, tokens_BT, aux_hidden_states_BTN, positions)
    with torch.no_grad():
        target_logits = target.compute_logits(hidden_BTD[:, positions.position_R + 1])
    losses_BR = position_losses(drafter, output_BRD, target_logits)
    if loss_mask_BT is None:
        loss_mask_BT = torch.ones_like(tokens_BT, dtype=torch.bool)
    weight_BR = loss_mask_BT[:, positions.position_R + 2].to(losses_BR.dtype)
    depths = [positions.depth_R == d for d in range(int(positions.depth_R.max()) + 1)]
    means = [(losses_BR[:, m] * weight_BR[:, m]).sum() / weight_BR[:, m].sum().clamp(min=1) for m in depths]
    return torch.stack(means).mean()
