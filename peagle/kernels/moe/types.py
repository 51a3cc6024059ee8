"""Weights of a layer's experts.

Shapes: D hidden width, E experts, I width of an expert, X = 2 I.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from peagle.kernels.moe.mxfp4 import PackedWeights


@dataclass(frozen=True)
class ClampedGate:
    """GPT-OSS's gate: gate and up are clamped at `limit`; the result is gate * sigmoid(alpha * gate) * (up + 1)."""

    alpha: float
    limit: float


@dataclass(frozen=True)
class ExpertWeights:
    """Weights of all experts of a layer, plain or MXFP4; rows of `gate_up` are an expert's gates, then its ups."""

    gate_up_EXD: Tensor | PackedWeights
    down_EDI: Tensor | PackedWeights
    gate_up_bias_EX: Tensor | None = None
    down_bias_ED: Tensor | None = None
    clamp: ClampedGate | None = None  # None: SwiGLU
