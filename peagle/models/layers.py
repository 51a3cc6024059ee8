"""Norm, rotary positions, attention, MLP: the pieces targets and drafters are made of.

Knows nothing about checkpoints, caches or masks: who sees whom is the injected `attend`'s business.

Shapes: T rows (tokens of any number of sequences, flat), D width, H heads, G key/value heads, d head width.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor, nn

from peagle.config import LayerConfig, RopeConfig
from peagle.kernels.linear import Stream, linear, linear_onto, rms_norm, supports_pdl
from peagle.kernels.rotary import Rotation, split_rotate

Angles = tuple[Tensor, Tensor]  # cos and sin, [T, 1, d]


class Attend(Protocol):
    """How layer `layer`'s rows see each other; keys and values may be kept for later calls."""

    def __call__(self, layer: int, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, window: int | None) -> Tensor:
        """Returns [T, H, d]; `window` limits a row to that many latest positions, its own included."""
        ...


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


def rope_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Angle per position for each rotary pair (fp32, [d/2]), and the factor on cos and sin."""
    freq = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    if rope.kind == "default":
        return freq, 1.0
    if rope.kind == "linear":
        return freq / rope.factor, 1.0
    if rope.kind == "llama3":
        wavelength = 2 * math.pi / freq
        turns = rope.original_max_positions / wavelength
        keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        keep = keep.clamp(0, 1)  # 1: a short wave, kept; 0: a long one, stretched; between: blended
        return freq * keep + freq / rope.factor * (1 - keep), 1.0
    assert rope.kind == "yarn", rope.kind

    def pair_with(rotations: float) -> float:
        span = rope.original_max_positions / (rotations * 2 * math.pi)
        return head_dim * math.log(span) / (2 * math.log(rope.theta))

    low, high = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    stretch = ((torch.arange(head_dim // 2).float() - low) / ((high - low) or 0.001)).clamp(0, 1)

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    scale = rope.attention_factor
    if scale is None:
        both = rope.mscale and rope.mscale_all_dim
        scale = mscale(rope.mscale) / mscale(rope.mscale_all_dim) if both else mscale(1.0)  # type: ignore[arg-type]
    return freq / rope.factor * stretch + freq * (1 - stretch), scale


class Rope(nn.Module):
    """cos and sin for any positions; never part of a checkpoint."""

    freq: Tensor
    table: Angles | None = None  # of the first positions, for who asks often

    def __init__(self, rope: RopeConfig, head_dim: int) -> None:
        super().__init__()
        with torch.device("cpu"):  # a real tensor even while the weights are built on `meta`
            freq, self.scale = rope_frequencies(rope, head_dim)
        self.register_buffer("freq", freq, persistent=False)

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        """Moves between devices, but stays fp32 whatever dtype the model is cast to."""
        freq = self.freq
        super()._apply(fn, recurse)
        self.freq = freq.to(self.freq.device) if self.freq.device.type != "meta" else freq
        return self

    def tabulate(self, length: int, dtype: torch.dtype) -> None:
        """Keeps the angles of positions below `length`, beyond which nobody may ask from then on."""
        if self.table is not None and len(self.table[0]) >= length and self.table[0].dtype == dtype:
            return
        self.table = None
        cos, sin = self(torch.arange(length, device=self.freq.device), dtype)
        self.table = cos, sin

    def forward(self, positions_T: Tensor, dtype: torch.dtype) -> Angles:
        """Of every row, once for all layers."""
        if self.table is not None and self.table[0].dtype == dtype and not torch.is_grad_enabled():
            return self.table[0][positions_T], self.table[1][positions_T]
        angles = positions_T.float()[:, None] * self.freq
        angles = torch.cat([angles, angles], -1)[:, None, :]  # [T, 1, d]
        return (angles.cos() * self.scale).to(dtype), (angles.sin() * self.scale).to(dtype)


class Attention(nn.Module):
    """Merged q/k/v product, optional q/k norms, rotary positions; `attend` does the rest."""

    def __init__(self, cfg: LayerConfig, input_width: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
        q_width, kv_width = cfg.num_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim
        self.qkv_proj = nn.Linear(input_width, q_width + 2 * kv_width, bias=cfg.qkv_bias)
        self.o_proj = nn.Linear(q_width, cfg.hidden_size, bias=cfg.out_bias)
        self.q_norm = RMSNorm(cfg.head_dim, cfg.norm_eps) if cfg.qk_norm else None
        self.k_norm = RMSNorm(cfg.head_dim, cfg.norm_eps) if cfg.qk_norm else None

    def forward(
        self,
        x_TD: Tensor | Stream,
        residual_TD: Tensor,
        angles: Angles,
        attend: Attend,
        layer: int,
        window: int | None,
        norm: RMSNorm | None = None,
        next_norm: RMSNorm | None = None,
    ) -> Stream:
        """The residual stream after attention over `norm(x)`, on its way to `next_norm`."""
        qkv_TX = project(self.qkv_proj, x_TD, norm=norm)
        q_norm, k_norm, eps = None, None, 0.0
        if self.q_norm is not None and self.k_norm is not None:
            q_norm, k_norm, eps = self.q_norm.weight, self.k_norm.weight, self.q_norm.eps
        if getattr(attend, "rotates", False):  # turns queries and keys on its way
            q, k, v = qkv_TX.unflatten(1, (-1, self.head_dim)).split([self.heads, self.kv_heads, self.kv_heads], 1)
            rotation = Rotation(*angles, q_norm, k_norm, eps)
            out_THd = attend(layer, q, k, v, window, rotation=rotation)  # type: ignore[call-arg]
        else:
            pdl = supports_pdl(qkv_TX.device)
            q, k, v = split_rotate(qkv_TX, *angles, self.heads, self.kv_heads, q_norm, k_norm, eps, pdl)
            out_THd = attend(layer, q, k, v, window)
        return project_onto(residual_TD, self.o_proj, out_THd.flatten(1), next_norm)


class MLP(nn.Module):
    """SwiGLU with the gate and up products merged."""

    def __init__(self, cfg: LayerConfig) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(cfg.hidden_size, 2 * cfg.intermediate_size, bias=cfg.mlp_bias)
        self.down_proj = nn.Linear(cfg.intermediate_size, cfg.hidden_size, bias=cfg.mlp_bias)

    def forward(self, stream: Stream, norm: RMSNorm, next_norm: RMSNorm | None) -> Stream:
        """The residual stream x after the MLP over `norm(x)`, on its way to `next_norm`."""
        hidden_TI = project(self.gate_up_proj, stream, norm=norm, glu=True)
        return project_onto(stream.x, self.down_proj, hidden_TI, next_norm)


def project(layer: nn.Linear, x: Tensor | Stream, norm: RMSNorm | None = None, glu: bool = False) -> Tensor:
    """A product with what stands around it, as few launches as there are for it."""
    weight, eps = (norm.weight, norm.eps) if norm is not None else (None, 0.0)
    return linear(x, layer.weight, layer.bias, norm_weight=weight, eps=eps, glu=glu)


def project_onto(residual: Tensor, layer: nn.Linear, x: Tensor, next_norm: RMSNorm | None) -> Stream:
    """A product added to the residual stream. Where the norm that comes next is known, half of it is done already."""
    weight, eps = (next_norm.weight, next_norm.eps) if next_norm is not None else (None, 0.0)
    return linear_onto(residual, x, layer.weight, layer.bias, next_norm=weight, eps=eps)


class DecoderLayer(nn.Module):
    """A pre-norm layer on the residual stream."""

    def __init__(self, cfg: LayerConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(cfg.hidden_size, cfg.norm_eps)
        self.self_attn = Attention(cfg, cfg.hidden_size)
        self.post_attention_layernorm = RMSNorm(cfg.hidden_size, cfg.norm_eps)
        self.mlp = MLP(cfg)

    def forward(
        self,
        stream: Stream,
        angles: Angles,
        attend: Attend,
        layer: int,
        window: int | None,
        next_norm: RMSNorm | None = None,
    ) -> Stream:
        """`next_norm` is the next layer's, where one follows."""
        norm, mlp_norm = self.input_layernorm, self.post_attention_layernorm
        stream = self.self_attn(stream, stream.x, angles, attend, layer, window, norm, next_norm=mlp_norm)
        return self.mlp(stream, mlp_norm, next_norm)


def norm_after(layers: nn.ModuleList, i: int) -> RMSNorm | None:
    """What layer i + 1 does first to the residual stream; None after the last layer."""
    following: DecoderLayer | None = layers[i + 1] if i + 1 < len(layers) else None  # type: ignore[assignment]
    return following.input_layernorm if following is not None else None
