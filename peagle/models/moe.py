"""A mixture-of-experts MLP: a router and the weights of all experts.

Weights are matrices with the experts' rows one after another, so that a checkpoint's tensors fill rows as in any other
layer. MXFP4 weights are words and exponents instead. Shapes as in `peagle.kernels.moe.experts`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from peagle.config import LayerConfig
from peagle.kernels.moe.experts import expert_mlp, route
from peagle.kernels.moe.experts_torch import ClampedGate, ExpertWeights
from peagle.kernels.moe.mxfp4 import PackedWeights, packed_widths
from peagle.kernels.norm.types import ResidualStream
from peagle.models.layers import MLP, RMSNorm, add_residual, project


class ExpertMLP(nn.Module):
    """Has the interface of `MLP`."""

    def __init__(self, cfg: LayerConfig) -> None:
        super().__init__()
        experts, width = cfg.experts, cfg.hidden_size
        assert experts is not None
        self.cfg = experts
        self.router = nn.Linear(width, experts.num_experts, bias=experts.bias)
        self._matrix("gate_up", experts.num_experts * 2 * experts.intermediate_size, width)
        self._matrix("down", experts.num_experts * width, experts.intermediate_size)
        for name, rows in (("gate_up_bias", 2 * experts.intermediate_size), ("down_bias", width)):
            bias = nn.Parameter(torch.empty(experts.num_experts * rows)) if experts.bias else None
            self.register_parameter(name, bias)
        self.clamp = ClampedGate(*experts.clamp) if experts.clamp is not None else None
        own = replace(cfg, intermediate_size=experts.shared_intermediate_size, mlp_bias=False)
        self.shared_expert = MLP(own) if experts.shared_intermediate_size else None

    def _matrix(self, name: str, rows: int, columns: int) -> None:
        if not self.cfg.mxfp4:
            self.register_parameter(name, nn.Parameter(torch.empty(rows, columns)))
            return
        words, exponents = packed_widths(columns)
        for part, width, dtype in (("words", words, torch.int16), ("exponents", exponents, torch.uint8)):
            parameter = nn.Parameter(torch.empty(rows, width, dtype=dtype), requires_grad=False)
            self.register_parameter(f"{name}_{part}", parameter)

    def forward(
        self, stream: ResidualStream, norm: RMSNorm, next_norm: RMSNorm | None, out_norm: RMSNorm | None = None
    ) -> ResidualStream:
        ready = stream.normed is not None and stream.norm_weight is norm.weight
        x_TD = stream.normed if ready else norm(stream.x)
        assert x_TD is not None
        scores_TE = project(self.router, x_TD)
        if self.cfg.sigmoid_scaled_input:
            y_TD = self._scaled_inputs(x_TD, scores_TE)
        else:
            weight_TC, expert_TC = route(scores_TE, self.cfg.num_experts_per_tok, self.cfg.norm_topk_prob)
            y_TD = expert_mlp(x_TD, weight_TC, expert_TC, self.weights())
        if self.shared_expert is not None:
            y_TD = y_TD + project(self.shared_expert.down_proj, self.shared_expert.gate_up(x_TD))
        return add_residual(stream.x, y_TD if out_norm is None else out_norm(y_TD), next_norm)

    def _scaled_inputs(self, x_TD: Tensor, scores_TE: Tensor) -> Tensor:
        """Llama 4: an expert's input is scaled by its router score, so each pair of row and expert becomes a row."""
        score_TC, expert_TC = scores_TE.topk(self.cfg.num_experts_per_tok, -1)
        share_TC = torch.sigmoid(score_TC.float()).to(x_TD.dtype)
        x_PD = (x_TD[:, None] * share_TC[..., None]).flatten(0, 1)
        ones_P1 = torch.ones(len(x_PD), 1, dtype=torch.float32, device=x_PD.device)
        y_PD = expert_mlp(x_PD, ones_P1, expert_TC.int().reshape(-1, 1), self.weights())
        return y_PD.unflatten(0, expert_TC.shape).sum(1)

    def weights(self) -> ExpertWeights:
        def of_experts(name: str) -> Tensor:
            parameter: Tensor = getattr(self, name)
            return parameter.unflatten(0, (self.cfg.num_experts, -1))

        def matrix(name: str, columns: int) -> Tensor | PackedWeights:
            if not self.cfg.mxfp4:
                return of_experts(name)
            return PackedWeights(of_experts(f"{name}_words"), of_experts(f"{name}_exponents"), columns)

        gate_up_bias, down_bias = (
            (of_experts("gate_up_bias"), of_experts("down_bias")) if self.cfg.bias else (None, None)
        )
        gate_up, down = matrix("gate_up", self.router.in_features), matrix("down", self.cfg.intermediate_size)
        return ExpertWeights(gate_up, down, gate_up_bias, down_bias, self.clamp)
