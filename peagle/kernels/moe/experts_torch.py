"""Weights of a layer's experts, and plain torch references of routing and of the experts' MLP.

Shapes as in experts.py.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from peagle.kernels.moe.mxfp4 import PackedWeights


@dataclass(frozen=True)
class ExpertWeights:
    """Weights of all experts of a layer, plain or MXFP4; rows of `gate_up` are an expert's gates, then its ups."""

    gate_up_EXD: Tensor | PackedWeights
    down_EDI: Tensor | PackedWeights
    gate_up_bias_EX: Tensor | None = None
    down_bias_ED: Tensor | None = None
    clamp: tuple[float, float] | None = None  # alpha and limit of GPT-OSS's gate (`apply_gate`); None: SwiGLU

    def gemm_weights(self, paired: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Returns weights, exponents and bias of the second GEMM if `paired`, else of the gated first one.

        MXFP4 weights are words in pairs; plain weights have no exponents.
        """
        w, bias = (self.down_EDI, self.down_bias_ED) if paired else (self.gate_up_EXD, self.gate_up_bias_EX)
        words, exponents = (w, None) if isinstance(w, Tensor) else (w.words_ERW.view(torch.int32), w.exponents_ERG)
        assert all(t is None or t.is_contiguous() for t in (words, exponents, bias))
        return words, exponents, bias


def route_torch(logits_TE: Tensor, chosen: int, normed: bool) -> tuple[Tensor, Tensor]:
    probs_TE = logits_TE.softmax(-1, dtype=torch.float32)
    weight_TC, expert_TC = probs_TE.topk(chosen, -1)
    if normed:
        weight_TC = weight_TC / weight_TC.sum(-1, keepdim=True)
    return weight_TC, expert_TC.int()


def apply_gate(y_TX: Tensor, clamp: tuple[float, float] | None) -> Tensor:
    """SwiGLU; with `clamp`, gate and up are clamped at its limit and give gate * sigmoid(alpha * gate) * (up + 1)."""
    gate, up = y_TX.chunk(2, -1)
    if clamp is None:
        return F.silu(gate) * up
    alpha, limit = clamp
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


def expert_mlp_torch(x_TD: Tensor, weight_TC: Tensor, expert_TC: Tensor, experts: ExpertWeights) -> Tensor:
    """Loops over the experts that at least one row chose."""
    chosen = expert_TC.shape[1]
    order_P = expert_TC.flatten().long().argsort(stable=True)
    counts = torch.bincount(expert_TC.flatten(), minlength=len(experts.down_EDI)).tolist()
    y_PD = x_TD.new_empty(len(order_P), x_TD.shape[1])
    at = 0
    for e, count in enumerate(counts):
        if not count:
            continue
        pairs = order_P[at : at + count]
        at += count
        bias = None if experts.gate_up_bias_EX is None else experts.gate_up_bias_EX[e]
        gate_up = experts.gate_up_EXD[e].to(x_TD.dtype)
        hidden = apply_gate(F.linear(x_TD[pairs // chosen], gate_up, bias), experts.clamp)
        bias = None if experts.down_bias_ED is None else experts.down_bias_ED[e]
        y_PD[pairs] = F.linear(hidden, experts.down_EDI[e].to(x_TD.dtype), bias)
    return sum_experts(y_PD, weight_TC)


def sum_experts(y_PD: Tensor, weight_TC: Tensor) -> Tensor:
    """Adds up each row's experts by their weights."""
    y_TCD = y_PD.unflatten(0, weight_TC.shape)
    return (y_TCD * weight_TC.to(y_TCD.dtype)[..., None]).sum(1)
