"""Mixture of experts: routing rows to experts, and the gated MLPs of the chosen experts.

On the CPU `expert_mlp` is the reference, `expert_mlp_torch`, which loops over the experts. On a GPU it is
`expert_mlp_triton` for up to MAX_TRITON_ROWS rows (few are scanned, more sorted by expert; the same bits), and torch's
grouped GEMM for more, for which MXFP4 weights become a temporary tensor. Both run without the host reading any result,
so CUDA graphs can capture them.

Shapes: T rows, D hidden width, E experts, C chosen experts per row, I width of an expert, P = T * C pairs of row and
expert, X = 2 I.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from peagle.kernels.moe.experts_torch import ExpertWeights, apply_gate, expert_mlp_torch, route_torch, sum_experts
from peagle.kernels.moe.mxfp4 import PackedWeights, unpack_words
from peagle.kernels.triton_utils import runs_triton

# Largest row count for which the Triton kernels were measured against the grouped GEMM and its copies, on an H200: they
# are 1.6 to 1.9 times as fast for 16 to 8,192 rows of Qwen3-Coder-30B-A3B's layer, and faster for GPT-OSS-20B's. Each
# tile of rows unpacks MXFP4 weights again; for very many rows, unpacking once into a bf16 tensor may be faster.
MAX_TRITON_ROWS = 8192


def route(logits_TE: Tensor, chosen: int, normed: bool) -> tuple[Tensor, Tensor]:
    """Returns the weights [T, C] fp32 and ids [T, C] int32 of each row's `chosen` most likely experts.

    Weights are probabilities over all experts or, if `normed`, over the chosen ones.
    """
    if runs_triton(logits_TE):
        from peagle.kernels.moe.routing_triton import route_triton

        return route_triton(logits_TE, chosen, normed)
    return route_torch(logits_TE, chosen, normed)


def expert_mlp(x_TD: Tensor, weight_TC: Tensor, expert_TC: Tensor, experts: ExpertWeights) -> Tensor:
    """Returns the weighted sum of each row's chosen experts: [T, D]."""
    if not runs_triton(x_TD):
        return expert_mlp_torch(x_TD, weight_TC, expert_TC, experts)
    aligned = all(width % 8 == 0 for width in experts.down_EDI.shape[1:])  # rows of a multiple of 16 bytes
    if len(x_TD) > MAX_TRITON_ROWS and x_TD.dtype == torch.bfloat16 and aligned:
        return expert_mlp_grouped(x_TD, weight_TC, expert_TC, experts)
    from peagle.kernels.moe.experts_triton import expert_mlp_triton

    return expert_mlp_triton(x_TD, weight_TC, expert_TC, experts)


def expert_mlp_grouped(x_TD: Tensor, weight_TC: Tensor, expert_TC: Tensor, experts: ExpertWeights) -> Tensor:
    """Sorts pairs by expert and calls torch's grouped GEMM; group ends stay on the device."""
    chosen, count = expert_TC.shape[1], len(experts.down_EDI)
    expert_P, order_P = expert_TC.flatten().sort(stable=True)
    ids_E = torch.arange(count, dtype=expert_P.dtype, device=x_TD.device)
    ends_E = torch.searchsorted(expert_P, ids_E, right=True, out_int32=True)
    gate_up_EDX = dequantize_weights(experts.gate_up_EXD, x_TD.dtype).mT
    hidden = F.grouped_mm(x_TD[order_P // chosen], gate_up_EDX, offs=ends_E)
    if experts.gate_up_bias_EX is not None:
        hidden = hidden + experts.gate_up_bias_EX[expert_P]
    down_EID = dequantize_weights(experts.down_EDI, x_TD.dtype).mT
    y = F.grouped_mm(apply_gate(hidden, experts.clamp), down_EID, offs=ends_E)
    if experts.down_bias_ED is not None:
        y = y + experts.down_bias_ED[expert_P]
    return sum_experts(torch.empty_like(y).index_copy_(0, order_P, y), weight_TC)


def dequantize_weights(weights: Tensor | PackedWeights, dtype: torch.dtype) -> Tensor:
    """Returns the weights of all experts as a tensor [E, R, K]; MXFP4 weights are converted to `dtype`."""
    if isinstance(weights, Tensor):
        return weights
    if runs_triton(weights.words_ERW):
        from peagle.kernels.moe.mxfp4_triton import unpack_words_triton

        return unpack_words_triton(weights.words_ERW, weights.exponents_ERG, weights.columns, dtype)
    return unpack_words(weights.words_ERW, weights.exponents_ERG, weights.columns).to(dtype)
