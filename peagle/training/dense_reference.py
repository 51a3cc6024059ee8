"""Training rows, all at once, with a stored mask: slow, whole and obvious.

The oracle that faster training is held against, and enough to train small drafters with. Knows nothing about
data, optimizers or checkpoints.

A sequence of T tokens makes (anchor a, depth d) rows. Depth 0 is the ordinary EAGLE-3 row at position a: the
target's aux states at a and the token at a+1. Depth d >= 1 is what sits d rows after it at inference: P-EAGLE's mask
row, or EAGLE-3's own output at depth d-1 with the token at a+d+1. Either stands at position a+d, sees the
depth-0 rows up to a, its own chain (a, 1..d) and nothing else, and is asked for the token at a+d+2, by the
target's own distribution there.

Worked example, T = 6, 2 depths. Rows that have a question (a+d+2 < 6) and what they see:

    (0,0): 0,0                      (0,1): 0,0  0,1
    (1,0): 0,0 1,0                  (1,1): 0,0 1,0  1,1
    (2,0): 0,0 1,0 2,0              (2,1): 0,0 1,0 2,0  2,1
    (3,0): 0,0 1,0 2,0 3,0

Shapes: B sequences of T tokens, R rows in each, N tap width, D drafter width, V target vocabulary.
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
        """Row i sees row j."""
        a_i, a_j = self.anchor_R[:, None], self.anchor_R[None, :]
        d_i, d_j = self.depth_R[:, None], self.depth_R[None, :]
        return ((d_j == 0) & (a_j <= a_i)) | ((a_j == a_i) & (d_j <= d_i))


def sample_nested_positions(length: int, depths: int, rate: float, rng: torch.Generator) -> DensePositions:
    """Depth 0 whole; of the chains that reach depth d-1 about `rate` go on to depth d, so kept chains nest."""
    anchors = torch.arange(length - 2)
    kept = [anchors]
    for depth in range(1, depths):
        inside = kept[-1][kept[-1] + depth + 2 < length]
        count = min(len(inside), round((length - 2 - depth) * rate**depth))
        chosen = torch.randperm(len(inside), generator=rng)[:count]
        kept.append(inside[chosen.sort().values])
    depth_R = torch.cat([torch.full((len(k),), d) for d, k in enumerate(kept)])
    return DensePositions(torch.cat(kept), depth_R)


def batched(batch: int, visible_RR: Tensor | None) -> Attend:
    """Attention within each sequence of a flat batch; None means causal."""

    def attend(layer: int, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, window: Window) -> Tensor:
        assert window is None, "sliding windows are not trained here"
        q, k, v = (x.unflatten(0, (batch, -1)).transpose(1, 2) for x in (q_THd, k_TGd, v_TGd))
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=visible_RR, is_causal=visible_RR is None, enable_gqa=True
        )
        return out.transpose(1, 2).flatten(0, 1)

    return attend


@torch.no_grad()
def read_target(target: Decoder, tokens_BT: Tensor, aux_layer_ids: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The target's final hidden states [B, T, width] and aux_hidden_states [B, T, N] over whole sequences."""
    batch, length = tokens_BT.shape
    positions = torch.arange(length, device=tokens_BT.device).repeat(batch)
    hidden, aux_hidden_states = target(tokens_BT.flatten(), positions, batched(batch, None), aux_layer_ids)
    assert aux_hidden_states is not None
    return hidden.unflatten(0, (batch, length)), aux_hidden_states.unflatten(0, (batch, length))


def drafter_states(drafter: Drafter, tokens_BT: Tensor, aux_hidden_states_BTN: Tensor, rows: DensePositions) -> Tensor:
    """What the head reads at every row [B, R, D]."""
    if drafter.cfg.parallel:
        return _parallel_states(drafter, tokens_BT, aux_hidden_states_BTN, rows)
    return _sequential_states(drafter, tokens_BT, aux_hidden_states_BTN, rows)


def _parallel_states(
    drafter: Drafter, tokens_BT: Tensor, aux_hidden_states_BTN: Tensor, rows: DensePositions
) -> Tensor:
    assert drafter.cfg.mask_token_id is not None
    batch, first = len(tokens_BT), rows.depth_R == 0
    tokens_BR = tokens_BT[:, rows.anchor_R + 1].where(first, drafter.cfg.mask_token_id)
    masks = int((~first).sum())
    hidden_BRD = torch.cat(
        [
            drafter.combine_hidden_states(aux_hidden_states_BTN[:, rows.anchor_R[first]]),
            drafter.mask_hidden_states(masks).expand(batch, masks, -1),
        ],
        1,
    )
    attend = batched(batch, rows.visible_RR())
    said, _ = drafter(tokens_BR.flatten(), hidden_BRD.flatten(0, 1), rows.position_R.repeat(batch), attend)
    return said.unflatten(0, (batch, -1))


def _sequential_states(
    drafter: Drafter, tokens_BT: Tensor, aux_hidden_states_BTN: Tensor, rows: DensePositions
) -> Tensor:
    """Training-time test: depth d runs on depth d-1's own output, so depth by depth, each pass whole."""
    batch, deepest = len(tokens_BT), int(rows.depth_R.max())
    tokens_BR = tokens_BT[:, rows.position_R + 1]
    visible = rows.visible_RR()
    hidden_BRD = drafter.combine_hidden_states(aux_hidden_states_BTN[:, rows.anchor_R[rows.depth_R == 0]])
    said = hidden_BRD
    for depth in range(deepest + 1):
        upto = int((rows.depth_R <= depth).sum())
        said, handed_on = drafter(
            tokens_BR[:, :upto].flatten(),
            hidden_BRD.flatten(0, 1),
            rows.position_R[:upto].repeat(batch),
            batched(batch, visible[:upto, :upto]),
        )
        said, handed_on = (x.unflatten(0, (batch, upto)) for x in (said, handed_on))
        if depth < deepest:
            before = rows.anchor_R.masked_fill(rows.depth_R != depth, -1)
            nexts = rows.anchor_R[rows.depth_R == depth + 1]
            parent = (before[:, None] == nexts[None, :]).float().argmax(0)
            hidden_BRD = torch.cat([hidden_BRD, handed_on[:, parent]], 1)
    return said


def row_losses(drafter: Drafter, said_BRD: Tensor, target_logits_BRV: Tensor) -> Tensor:
    """Cross-entropy [B, R] to the target's distribution; mass outside a reduced vocabulary asks nothing."""
    exact = torch.float64 if said_BRD.dtype == torch.float64 else torch.float32
    log_q = drafter.compute_logits(said_BRD).to(exact).log_softmax(-1)
    p = target_logits_BRV.to(exact).softmax(-1)
    if drafter.d2t is not None:
        p = p[..., drafter.to_target_ids(torch.arange(log_q.shape[-1], device=log_q.device))]
    return -(p * log_q).sum(-1)


def loss(
    drafter: Drafter, target: Decoder, tokens_BT: Tensor, rows: DensePositions, asked_BT: Tensor | None = None
) -> Tensor:
    """Mean over depths of the mean over that depth's rows: a rare deep row weighs as much as its rate is
    low. `asked` marks tokens worth predicting (a response's); None asks for all."""
    hidden_BTD, aux_hidden_states_BTN = read_target(target, tokens_BT, drafter.cfg.aux_layer_ids)
    said_BRD = drafter_states(drafter, tokens_BT, aux_hidden_states_BTN, rows)
    with torch.no_grad():
        target_logits = target.compute_logits(hidden_BTD[:, rows.position_R + 1])
    losses_BR = row_losses(drafter, said_BRD, target_logits)
    if asked_BT is None:
        asked_BT = torch.ones_like(tokens_BT, dtype=torch.bool)
    weight_BR = asked_BT[:, rows.position_R + 2].to(losses_BR.dtype)
    depths = range(int(rows.depth_R.max()) + 1)
    at = [rows.depth_R == d for d in depths]
    means = [(losses_BR[:, m] * weight_BR[:, m]).sum() / weight_BR[:, m].sum().clamp(min=1) for m in at]
    return torch.stack(means).mean()
