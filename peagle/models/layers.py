"""Norm, rotary positions, attention, MLP: the pieces targets and drafters are made of.

Knows nothing about checkpoints, caches or masks: who sees whom is the injected `attend`'s business.

Shapes: T rows (tokens of any number of sequences, flat), D width, H heads, G key/value heads, d head width.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from peagle.config import LayerConfig, RopeConfig, Window
from peagle.kernels.attention.rotary import QKNormRope, split_qkv_rope
from peagle.kernels.gather import gather_rows
from peagle.kernels.gemm.linear import linear, linear_residual
from peagle.kernels.norm.rms_norm import ResidualStream, add_rms_norm, rms_norm
from peagle.kernels.triton_utils import supports_pdl

Angles = tuple[Tensor, Tensor]  # cos and sin, [T, 1, d]
# Of heads that have no rotary positions: what queries are multiplied by, [T, 1, 1], if anything.
Turn = Angles | Tensor | None


class Attend(Protocol):
    """How layer `layer`'s rows see each other; keys and values may be kept for later calls."""

    def __call__(self, layer: int, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, window: Window) -> Tensor:
        """Returns [T, H, d]; `window` limits what a row sees, as `peagle.config` has it.

        For layers that have sinks a further argument, `sinks`, [H]: each is one more score in a head's softmax, of a
        key that every row sees and whose value is 0. Only a target's layers do."""
        ...


def look_up(token_ids_T: Tensor, table_VD: Tensor) -> Tensor:
    """Embeddings. On a GPU taking few rows has the faster kernel, which has no way back."""
    if token_ids_T.is_cuda and not torch.is_grad_enabled():
        # Attention looks up places and lengths of sequences before it waits for what is ahead of it.
        return gather_rows(table_VD, token_ids_T, after_all=True)
    return F.embedding(token_ids_T, table_VD)


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


def rope_frequencies(rope: RopeConfig, head_dim: int, long: bool = True) -> tuple[Tensor, float]:
    """Angle per position for each rotary pair (fp32, [d/2]), and the factor on cos and sin.

    Pairs behind those that are turned have an angle of 0. `long`: longrope's frequencies for long texts.
    """
    if rope.rope_type == "proportional":  # the first pairs turn as they do in a head that is turned whole
        freq, _ = rope_frequencies(RopeConfig(theta=rope.theta), head_dim)
        freq[int(rope.partial_rotary_factor * head_dim // 2) :] = 0.0
        return freq / rope.factor, 1.0
    if rope.partial_rotary_factor < 1.0:
        freq, factor = rope_frequencies(
            replace(rope, partial_rotary_factor=1.0), int(head_dim * rope.partial_rotary_factor), long
        )
        return torch.cat([freq, torch.zeros(head_dim // 2 - len(freq))]), factor
    freq = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    if rope.rope_type == "default":
        return freq, 1.0
    if rope.rope_type == "linear":
        return freq / rope.factor, 1.0
    if rope.rope_type == "llama3":
        wavelength = 2 * math.pi / freq
        turns = rope.original_max_positions / wavelength
        keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        keep = keep.clamp(0, 1)  # 1: a short wave, kept; 0: a long one, stretched; between: blended
        return freq * keep + freq / rope.factor * (1 - keep), 1.0
    if rope.rope_type == "longrope":
        scale = rope.attention_factor
        if scale is None:
            more = math.log(rope.factor) / math.log(rope.original_max_positions) if rope.factor > 1 else 0.0
            scale = math.sqrt(1 + more)
        return freq / torch.tensor(rope.long_factors if long else rope.short_factors), scale
    assert rope.rope_type == "yarn", rope.rope_type

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
    table: Tensor | None = None  # cos and sin of the first positions, for who asks often: [positions, 1, 2 d]

    def __init__(self, rope: RopeConfig, head_dim: int) -> None:
        super().__init__()
        self.cfg, self.head_dim = rope, head_dim
        with torch.device("cpu"):  # a real tensor even while the weights are built on `meta`
            freq, self.scale = rope_frequencies(rope, head_dim, long=rope.factor > 1.0)
        self.register_buffer("freq", freq, persistent=False)

    def set_max_model_len(self, length: int) -> None:
        """Says how long texts may become, which is what decides over longrope's frequencies, in vLLM too: a key must be
        turned alike all its life, so the length of a text so far cannot. Not said: as long as the config allows."""
        if self.cfg.rope_type != "longrope":
            return
        freq, _ = rope_frequencies(self.cfg, self.head_dim, long=length > self.cfg.original_max_positions)
        if not torch.equal(freq, self.freq.cpu()):
            self.freq, self.table = freq.to(self.freq.device), None

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        """Moves between devices, but stays fp32 whatever dtype the model is cast to."""
        freq = self.freq
        super()._apply(fn, recurse)
        self.freq = freq.to(self.freq.device) if self.freq.device.type != "meta" else freq
        return self

    def build_cos_sin_cache(self, length: int, dtype: torch.dtype) -> None:
        """Keeps the angles of positions below `length`, beyond which nobody may ask from then on."""
        if self.table is not None and len(self.table) >= length and self.table.dtype == dtype:
            return
        self.table = None
        self.table = torch.cat(self(torch.arange(length, device=self.freq.device), dtype), -1)

    def forward(self, positions_T: Tensor, dtype: torch.dtype) -> Angles:
        """Of every row, once for all layers."""
        if self.table is not None and self.table.dtype == dtype and not torch.is_grad_enabled():
            cos, sin = gather_rows(self.table, positions_T).chunk(2, -1)  # one launch for both
            return cos, sin
        angles = positions_T.float()[:, None] * self.freq
        angles = torch.cat([angles, angles], -1)[:, None, :]  # [T, 1, d]
        scale: float | Tensor = self.scale
        if self.cfg.partial_rotary_factor < 1.0:  # what is not turned is not scaled either
            scale = torch.where(self.freq == 0.0, 1.0, self.scale).repeat(2)
        return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)


class Attention(nn.Module):
    """Merged q/k/v product, optional norms, rotary positions where the layer has them; `attend` does the rest."""

    def __init__(self, cfg: LayerConfig, input_width: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
        q_width, kv_width = cfg.num_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim
        self.qkv_proj = nn.Linear(input_width, q_width + 2 * kv_width, bias=cfg.qkv_bias)
        self.o_proj = nn.Linear(q_width, cfg.hidden_size, bias=cfg.out_bias)
        self.q_norm = RMSNorm(cfg.head_dim, cfg.norm_eps) if cfg.qk_norm else None
        self.k_norm = RMSNorm(cfg.head_dim, cfg.norm_eps) if cfg.qk_norm else None
        self.sinks = nn.Parameter(torch.zeros(cfg.num_heads)) if cfg.attention_sinks else None
        self.rotary = cfg.use_rope
        self.v_eps = cfg.norm_eps if cfg.v_norm else None
        assert cfg.use_rope or not cfg.qk_norm, "heads are normed where they are turned"

    def forward(
        self,
        x_TD: Tensor | ResidualStream,
        residual_TD: Tensor,
        turn: Turn,
        attend: Attend,
        layer: int,
        window: Window,
        norm: RMSNorm | None = None,
        next_norm: RMSNorm | None = None,
        out_norm: RMSNorm | None = None,
    ) -> ResidualStream:
        """The residual stream after attention over `norm(x)`, on its way to `next_norm`."""
        qkv_TX = project(self.qkv_proj, x_TD, norm=norm)
        more: dict[str, Any] = {"sinks": self.sinks} if self.sinks is not None else {}
        if isinstance(turn, tuple):
            q_norm, k_norm, eps = None, None, 0.0
            if self.q_norm is not None and self.k_norm is not None:
                q_norm, k_norm, eps = self.q_norm.weight, self.k_norm.weight, self.q_norm.eps
            if getattr(attend, "rotates", False):  # turns queries and keys on its way
                q, k, v = self._split(qkv_TX)
                more["rope"] = QKNormRope(*turn, q_norm, k_norm, eps)
            else:
                pdl = supports_pdl(qkv_TX.device)
                q, k, v = split_qkv_rope(qkv_TX, *turn, self.heads, self.kv_heads, q_norm, k_norm, eps, pdl)
        else:
            q, k, v = self._split(qkv_TX)
            q = q if turn is None else (q * turn).to(q.dtype)
        if self.v_eps is not None:
            v = F.rms_norm(v, (self.head_dim,), eps=self.v_eps)
        out_THd = attend(layer, q, k, v, window, **more)
        if out_norm is not None:
            return add_onto(residual_TD, out_norm(project(self.o_proj, out_THd.flatten(1))), next_norm)
        return project_onto(residual_TD, self.o_proj, out_THd.flatten(1), next_norm)

    def _split(self, qkv_TX: Tensor) -> tuple[Tensor, ...]:
        return qkv_TX.unflatten(1, (-1, self.head_dim)).split([self.heads, self.kv_heads, self.kv_heads], 1)


class MLP(nn.Module):
    """A gated product with the gate's and the up's weights merged."""

    def __init__(self, cfg: LayerConfig) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(cfg.hidden_size, 2 * cfg.intermediate_size, bias=cfg.mlp_bias)
        self.down_proj = nn.Linear(cfg.intermediate_size, cfg.hidden_size, bias=cfg.mlp_bias)
        self.activation = cfg.activation

    def gated(self, x: Tensor | ResidualStream, norm: RMSNorm | None = None) -> Tensor:
        """What `down_proj` reads."""
        if self.activation == "silu":
            return project(self.gate_up_proj, x, norm=norm, glu=True)
        gate, up = project(self.gate_up_proj, x, norm=norm).chunk(2, -1)
        return F.gelu(gate, approximate="tanh") * up

    def forward(
        self, stream: ResidualStream, norm: RMSNorm, next_norm: RMSNorm | None, out_norm: RMSNorm | None = None
    ) -> ResidualStream:
        """The residual stream x after the MLP over `norm(x)`, on its way to `next_norm`."""
        hidden_TI = self.gated(stream, norm)
        if out_norm is not None:
            return add_onto(stream.x, out_norm(project(self.down_proj, hidden_TI)), next_norm)
        return project_onto(stream.x, self.down_proj, hidden_TI, next_norm)


def project(layer: nn.Linear, x: Tensor | ResidualStream, norm: RMSNorm | None = None, glu: bool = False) -> Tensor:
    """A product with what stands around it, as few launches as there are for it."""
    weight, eps = (norm.weight, norm.eps) if norm is not None else (None, 0.0)
    return linear(x, layer.weight, layer.bias, norm_weight=weight, eps=eps, glu=glu)


def project_onto(residual: Tensor, layer: nn.Linear, x: Tensor, next_norm: RMSNorm | None) -> ResidualStream:
    """A product added to the residual stream. Where the norm that comes next is known, half of it is done already."""
    weight, eps = (next_norm.weight, next_norm.eps) if next_norm is not None else (None, 0.0)
    return linear_residual(residual, x, layer.weight, layer.bias, next_norm=weight, eps=eps)


def add_onto(residual: Tensor, y: Tensor, next_norm: RMSNorm | None) -> ResidualStream:
    """The same for what is no product."""
    if next_norm is None:
        return ResidualStream(residual + y)
    normed, total = add_rms_norm(y, residual, next_norm.weight, next_norm.eps)
    return ResidualStream(total, next_norm.weight, normed=normed)


class DecoderLayer(nn.Module):
    """A pre-norm layer on the residual stream. `mlp` is for a target whose MLP is no `MLP`, but is called as one."""

    def __init__(self, cfg: LayerConfig, mlp: nn.Module | None = None) -> None:
        super().__init__()

        def norm() -> RMSNorm:
            return RMSNorm(cfg.hidden_size, cfg.norm_eps)

        self.input_layernorm = norm()
        self.self_attn = Attention(cfg, cfg.hidden_size)
        self.post_attention_layernorm = norm()  # before the MLP: Llama's name for it
        self.mlp: MLP = MLP(cfg) if mlp is None else mlp  # type: ignore[assignment]
        self.attention_out_norm = norm() if cfg.output_norms else None
        self.mlp_out_norm = norm() if cfg.output_norms else None
        self.layer_scalar = nn.Parameter(torch.ones(1)) if cfg.layer_scalar else None

    def forward(
        self,
        stream: ResidualStream,
        turn: Turn,
        attend: Attend,
        layer: int,
        window: Window,
        next_norm: RMSNorm | None = None,
    ) -> ResidualStream:
        """`next_norm` is the next layer's, where one follows."""
        norm, mlp_norm = self.input_layernorm, self.post_attention_layernorm
        given = (stream, stream.x, turn, attend, layer, window)
        stream = self.self_attn(*given, norm, next_norm=mlp_norm, out_norm=self.attention_out_norm)
        if self.layer_scalar is None:
            return self.mlp(stream, mlp_norm, next_norm, self.mlp_out_norm)
        return ResidualStream(self.mlp(stream, mlp_norm, None, self.mlp_out_norm).x * self.layer_scalar)


def norm_after(layers: nn.ModuleList, i: int) -> RMSNorm | None:
    """What layer i + 1 does first to the residual stream; None after the last layer."""
    following: DecoderLayer | None = layers[i + 1] if i + 1 < len(layers) else None  # type: ignore[assignment]
    return following.input_layernorm if following is not None else None
