"""A layer's experts: which of them a row goes to, and their gated products.

Five ways to the same result. `expert_mlp_torch` loops over the experts hit, for the CPU. `expert_mlp_triton` reads
every expert hit once for up to FEW_ROWS rows. `expert_mlp_ordered` puts pairs in the order of their experts, for up to
MOST_ROWS rows, and has the same bits. `expert_mlp_packed` unpacks weights of four bits (mxfp4.py) in registers, for up
to MOST_ROWS_PACKED rows. `expert_mlp_grouped` sorts rows by expert for the library's grouped product; packed weights
become a tensor that lives as long as its product. All but the first never ask the host for anything, so CUDA graphs can
hold them.

Knows nothing about models or files.

Shapes: T rows, D width, E experts, C of them chosen for a row, I width of an expert, P = T * C pairs of row and expert.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from peagle.kernels.moe.mxfp4 import PackedWeights, whole
from peagle.kernels.triton_utils import HAVE_TRITON, INTERPRETED

FEW_ROWS = 16  # up to here a tile holds all rows, and those that an expert was not chosen for are for free
# Up to here it was seen to be faster than the library's grouped product with the copies around it: 1.6 to 1.9 times for
# 16 to 8,192 rows of Qwen3-Coder-30B-A3B's layer on an H200.
MOST_ROWS = 8192
# Up to here packed weights are unpacked anew for every tile of an expert's rows. That costs about as much as the tile's
# product, so in the end it may be better to unpack them once, though they are then written and read in bf16. On an H200
# it was not yet for GPT-OSS-20B's layer and so many rows.
MOST_ROWS_PACKED = 8192


@dataclass(frozen=True)
class ClampedGate:
    """GPT-OSS's gate: gate and up are cut at `limit`, and the gate is gate * sigmoid(alpha * gate) * (up + 1)."""

    alpha: float
    limit: float


@dataclass(frozen=True)
class ExpertWeights:
    """Weights of all experts of a layer; rows of `gate_up` are an expert's gates, then its ups."""

    gate_up_EXD: Tensor | PackedWeights  # X = 2 I
    down_EDI: Tensor | PackedWeights
    gate_up_bias_EX: Tensor | None = None
    down_bias_ED: Tensor | None = None
    clamp: ClampedGate | None = None  # None: SwiGLU


def gated(y_TX: Tensor, clamp: ClampedGate | None) -> Tensor:
    gate, up = y_TX.chunk(2, -1)
    if clamp is None:
        return F.silu(gate) * up
    gate, up = gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit)
    return (up + 1) * (gate * torch.sigmoid(gate * clamp.alpha))


def route_torch(logits_TE: Tensor, chosen: int, normed: bool) -> tuple[Tensor, Tensor]:
    probs_TE = logits_TE.softmax(-1, dtype=torch.float32)
    weight_TC, expert_TC = probs_TE.topk(chosen, -1)
    if normed:
        weight_TC = weight_TC / weight_TC.sum(-1, keepdim=True)
    return weight_TC, expert_TC.int()


def route(logits_TE: Tensor, chosen: int, normed: bool) -> tuple[Tensor, Tensor]:
    """Of each row the likeliest experts, [T, C] int32, and their weights, [T, C] fp32: shares of all experts, or, if
    `normed`, of the chosen ones."""
    if _on_gpu(logits_TE):
        from peagle.kernels.moe.experts_triton import route_triton

        return route_triton(logits_TE, chosen, normed)
    return route_torch(logits_TE, chosen, normed)


def expert_mlp_torch(x_TD: Tensor, weight_TC: Tensor, expert_TC: Tensor, experts: ExpertWeights) -> Tensor:
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
        hidden = gated(F.linear(x_TD[pairs // chosen], experts.gate_up_EXD[e].to(x_TD.dtype), bias), experts.clamp)
        bias = None if experts.down_bias_ED is None else experts.down_bias_ED[e]
        y_PD[pairs] = F.linear(hidden, experts.down_EDI[e].to(x_TD.dtype), bias)
    return _summed(y_PD, weight_TC)


def expert_mlp_grouped(x_TD: Tensor, weight_TC: Tensor, expert_TC: Tensor, experts: ExpertWeights) -> Tensor:
    """Pairs sorted by expert, so that an expert's are neighbours; where each expert's end stays on the device."""
    chosen, count = expert_TC.shape[1], len(experts.down_EDI)
    expert_P, order_P = expert_TC.flatten().sort(stable=True)
    numbers_E = torch.arange(count, dtype=expert_P.dtype, device=x_TD.device)
    ends_E = torch.searchsorted(expert_P, numbers_E, right=True, out_int32=True)
    hidden = F.grouped_mm(x_TD[order_P // chosen], whole(experts.gate_up_EXD, x_TD.dtype).mT, offs=ends_E)
    if experts.gate_up_bias_EX is not None:
        hidden = hidden + experts.gate_up_bias_EX[expert_P]
    y = F.grouped_mm(gated(hidden, experts.clamp), whole(experts.down_EDI, x_TD.dtype).mT, offs=ends_E)
    if experts.down_bias_ED is not None:
        y = y + experts.down_bias_ED[expert_P]
    return _summed(torch.empty_like(y).index_copy_(0, order_P, y), weight_TC)


def _summed(y_PD: Tensor, weight_TC: Tensor) -> Tensor:
    """A row's experts by their weights, added up in fp32."""
    y_TCD = y_PD.unflatten(0, weight_TC.shape)
    return (y_TCD * weight_TC.to(y_TCD.dtype)[..., None]).sum(1)


def expert_mlp(x_TD: Tensor, weight_TC: Tensor, expert_TC: Tensor, experts: ExpertWeights) -> Tensor:
    """[T, D]: what a row's chosen experts make of it, by their weights."""
    if not _on_gpu(x_TD):
        return expert_mlp_torch(x_TD, weight_TC, expert_TC, experts)
    packed, rows = isinstance(experts.gate_up_EXD, PackedWeights), len(x_TD)
    if rows > (MOST_ROWS_PACKED if packed else MOST_ROWS) and _takes_grouped(x_TD, experts):
        return expert_mlp_grouped(x_TD, weight_TC, expert_TC, experts)
    if packed:
        from peagle.kernels.moe.mxfp4_sorted_triton import expert_mlp_packed

        return expert_mlp_packed(x_TD, weight_TC, expert_TC, experts)
    if rows > FEW_ROWS:
        from peagle.kernels.moe.experts_sorted_triton import expert_mlp_ordered

        return expert_mlp_ordered(x_TD, weight_TC, expert_TC, experts)
    from peagle.kernels.moe.experts_triton import expert_mlp_triton

    return expert_mlp_triton(x_TD, weight_TC, expert_TC, experts)


def _on_gpu(x: Tensor) -> bool:
    return x.is_cuda and HAVE_TRITON and not INTERPRETED


def _takes_grouped(x_TD: Tensor, experts: ExpertWeights) -> bool:
    """The library's product: bf16 with rows of whole 16 bytes."""
    widths = (experts.down_EDI.shape[1], experts.down_EDI.shape[2])
    return x_TD.dtype == torch.bfloat16 and hasattr(F, "grouped_mm") and all(width % 8 == 0 for width in widths)
