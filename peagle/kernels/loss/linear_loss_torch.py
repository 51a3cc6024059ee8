"""Plain torch reference of the row losses: softmax, loss and gradient of one chunk's logits.

Shapes: C rows, Q teacher positions, V student vocabulary, U teacher vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from peagle.config import LK_ETA, Objective

MIN_ACCEPTANCE = 1e-30  # lower bound of the acceptance inside a logarithm: keeps the loss `lk` finite


def compute_row_losses_torch(
    z_CV: Tensor,
    t_QU: Tensor,
    position_index_C: Tensor,
    weight_C: Tensor,
    draft_ids: Tensor | None,
    objective: Objective,
    gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes loss, acceptance, match and teacher token [C] of rows with student logits z and teacher logits
    t[position_index]; see `LinearLossOutput`. With `gradient`, overwrites z with the gradient of sum weight * loss.
    """
    exact = torch.float64 if z_CV.dtype == torch.float64 else torch.float32
    log_q = z_CV.to(exact).log_softmax(-1)
    log_p_QU = t_QU.to(exact).log_softmax(-1)
    log_p = (log_p_QU if draft_ids is None else log_p_QU[:, draft_ids])[position_index_C]
    q, p = log_q.exp(), log_p.exp()
    acceptance = torch.minimum(p, q).sum(-1)
    ce = -(p * log_q).sum(-1)
    kl = ce + (p * log_p.masked_fill(p == 0, 0.0)).sum(-1)
    tv = 1 - acceptance
    lam = (-LK_ETA * acceptance).exp()
    floor = acceptance.clamp(min=MIN_ACCEPTANCE)
    loss = {"ce": ce, "kl": kl, "tv": tv, "lk": -floor.log(), "lk-hybrid": lam * kl + (1 - lam) * tv}[objective]
    student_token = z_CV.argmax(-1) if draft_ids is None else draft_ids[z_CV.argmax(-1)]
    teacher_token = t_QU.argmax(-1)[position_index_C]
    if gradient:
        below = q < p
        dz_kl = q * p.sum(-1, keepdim=True) - p
        dz_tv = q * ((q * below).sum(-1, keepdim=True) - below.to(exact))
        lam, floor = lam[:, None], floor[:, None]
        dz = {"ce": dz_kl, "kl": dz_kl, "tv": dz_tv, "lk": dz_tv / floor, "lk-hybrid": lam * dz_kl + (1 - lam) * dz_tv}
        z_CV.copy_(dz[objective] * weight_C[:, None])
    return loss, acceptance, student_token == teacher_token, teacher_token
