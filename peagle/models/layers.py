"""Layers of targets and drafters: norm, rotary embedding, attention, MLP, mixture of experts.

The caller passes in `attend`, which computes attention and owns masks and KV caches.

Shapes: T rows (tokens of any number of sequences, flat), D hidden width, H query heads, G key/value heads, d head
width, X = (H + 2 G) d, I MLP width.
"""

import math
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from peagle.config import LayerConfig, RopeConfig, Window
from peagle.kernels.attention.rotary import split_qkv_rope
from peagle.kernels.attention.types import QKNormRope
from peagle.kernels.fp8 import quantize_rows
from peagle.kernels.gather import gather_rows
from peagle.kernels.gemm.linear import linear, linear_residual
from peagle.kernels.moe.experts import expert_mlp, route
from peagle.kernels.moe.experts_torch import ExpertWeights
from peagle.kernels.moe.mxfp4 import PackedWeights, packed_widths
from peagle.kernels.norm.rms_norm import ResidualStream, add_rms_norm, rms_norm

Angles = tuple[Tensor, Tensor]  # cos and sin, [T, 1, d]
# Layers without rotary embedding have a scale of their queries, [T, 1, 1], or None.
RotaryOrScale = Angles | Tensor | None


class Attend(Protocol):
    """Computes attention of one layer; it may keep keys and values for later calls."""

    def __call__(self, layer: int, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, window: Window) -> Tensor:
        """Returns [T, H, d]; `window` limits which keys a row sees (`peagle.config.Window`).

        A target's layers with attention sinks pass `sinks` [H] too: one more logit in each head's softmax, whose value
        is 0.
        """
        ...


def lookup_embeddings(token_ids_T: Tensor, table_VD: Tensor) -> Tensor:
    """Returns the rows of the embedding table for these tokens."""
    if token_ids_T.is_cuda and not torch.is_grad_enabled():
        # Without overlap: attention kernels read block tables and lengths before they wait for their predecessor.
        return gather_rows(table_VD, token_ids_T, overlap=False)
    return F.embedding(token_ids_T, table_VD)


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Linear(nn.Linear):
    """A linear layer. Once quantized, its weight is fp8, with one scale per output row."""

    weight_scale: Tensor | None = None

    def quantize(self) -> None:
        if all(size % 16 == 0 for size in self.weight.shape):  # torch._scaled_mm takes no others
            values, self.weight_scale = quantize_rows(self.weight)
            self.weight = nn.Parameter(values, requires_grad=False)


def rope_frequencies(rope: RopeConfig, head_dim: int, long: bool = True) -> tuple[Tensor, float]:
    """Returns the angle per position of each rotary pair, fp32 [d/2], and the factor on cos and sin.

    Pairs that are not rotated have an angle of 0. `long`: longrope's frequencies for long sequences.
    """
    if rope.rope_type == "proportional":  # the first pairs rotate as in a fully rotated head
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
        keep = keep.clamp(0, 1)  # 1: short wavelength, kept; 0: long, stretched
        return freq * keep + freq / rope.factor * (1 - keep), 1.0
    if rope.rope_type == "longrope":
        scale = rope.attention_factor
        if scale is None:
            growth = math.log(rope.factor) / math.log(rope.original_max_positions) if rope.factor > 1 else 0.0
            scale = math.sqrt(1 + growth)
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
    """Rotary embedding: cos and sin of any positions; not part of a checkpoint."""

    freq: Tensor
    table: Tensor | None = None  # cached cos and sin: [positions, 1, 2 d]

    def __init__(self, rope: RopeConfig, head_dim: int) -> None:
        super().__init__()
        self.cfg, self.head_dim = rope, head_dim
        with torch.device("cpu"):  # a real tensor even if the model is built on `meta`
            freq, self.scale = rope_frequencies(rope, head_dim, long=rope.factor > 1.0)
        self.register_buffer("freq", freq, persistent=False)

    def set_max_model_len(self, max_model_len: int) -> None:
        """Chooses longrope's frequencies by the longest sequence that will be served, as vLLM does.

        They cannot depend on the current length, since cached keys keep their rotation. By default the config's limit
        decides.
        """
        if self.cfg.rope_type != "longrope":
            return
        freq, _ = rope_frequencies(self.cfg, self.head_dim, long=max_model_len > self.cfg.original_max_positions)
        if not torch.equal(freq, self.freq.cpu()):
            self.freq, self.table = freq.to(self.freq.device), None

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        """Moves between devices, but stays fp32 when the model is cast."""
        freq = self.freq
        super()._apply(fn, recurse)
        self.freq = freq.to(self.freq.device) if self.freq.device.type != "meta" else freq
        return self

    def build_cos_sin_cache(self, num_positions: int, dtype: torch.dtype) -> None:
        """Caches cos and sin of the first `num_positions`; later calls must not exceed them."""
        if self.table is not None and len(self.table) >= num_positions and self.table.dtype == dtype:
            return
        self.table = None
        self.table = torch.cat(self(torch.arange(num_positions, device=self.freq.device), dtype), -1)

    def forward(self, positions_T: Tensor, dtype: torch.dtype) -> Angles:
        """Returns cos and sin of every row, for all layers."""
        if self.table is not None and self.table.dtype == dtype and not torch.is_grad_enabled():
            cos, sin = gather_rows(self.table, positions_T).chunk(2, -1)  # one launch for both
            return cos, sin
        angles = positions_T.float()[:, None] * self.freq
        angles = torch.cat([angles, angles], -1)[:, None, :]  # [T, 1, d]
        scale: float | Tensor = self.scale
        if self.cfg.partial_rotary_factor < 1.0:  # unrotated pairs are not scaled
            scale = torch.where(self.freq == 0.0, 1.0, self.scale).repeat(2)
        return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)


class Attention(nn.Module):
    """Fused QKV projection, optional QK norms and rotary embedding, attention, and the output projection."""

    def __init__(self, cfg: LayerConfig, input_width: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
        q_width, kv_width = cfg.num_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim
        self.qkv_proj = Linear(input_width, q_width + 2 * kv_width, bias=cfg.qkv_bias)
        self.o_proj = Linear(q_width, cfg.hidden_size, bias=cfg.out_bias)
        self.q_norm = RMSNorm(cfg.head_dim, cfg.norm_eps) if cfg.qk_norm else None
        self.k_norm = RMSNorm(cfg.head_dim, cfg.norm_eps) if cfg.qk_norm else None
        self.sinks = nn.Parameter(torch.zeros(cfg.num_heads)) if cfg.attention_sinks else None
        self.v_eps = cfg.norm_eps if cfg.v_norm else None
        assert cfg.use_rope or not cfg.qk_norm, "QK norm is applied with the rotary embedding"

    def forward(
        self,
        x_TD: Tensor | ResidualStream,
        residual_TD: Tensor,
        rotary: RotaryOrScale,
        attend: Attend,
        layer: int,
        window: Window,
        norm: RMSNorm | None = None,
        next_norm: RMSNorm | None = None,
        out_norm: RMSNorm | None = None,
    ) -> ResidualStream:
        """Adds attention over `norm(x)` to the residual stream and prepares `next_norm`."""
        qkv_TX = project(self.qkv_proj, x_TD, norm=norm)
        options: dict[str, Any] = {"sinks": self.sinks} if self.sinks is not None else {}
        if isinstance(rotary, tuple):
            q_norm, k_norm, eps = None, None, 0.0
            if self.q_norm is not None and self.k_norm is not None:
                q_norm, k_norm, eps = self.q_norm.weight, self.k_norm.weight, self.q_norm.eps
            rope = QKNormRope(*rotary, q_norm, k_norm, eps)
            if getattr(attend, "rotates", False):  # rotates in the attention kernel
                q, k, v = self._split(qkv_TX)
                options["rope"] = rope
            else:
                q, k, v = split_qkv_rope(qkv_TX, self.heads, self.kv_heads, rope)
        else:
            q, k, v = self._split(qkv_TX)
            q = q if rotary is None else (q * rotary).to(q.dtype)
        if self.v_eps is not None:
            v = F.rms_norm(v, (self.head_dim,), eps=self.v_eps)
        out_THd = attend(layer, q, k, v, window, **options)
        return project_residual(residual_TD, self.o_proj, out_THd.flatten(1), next_norm, out_norm)

    def _split(self, qkv_TX: Tensor) -> tuple[Tensor, ...]:
        return qkv_TX.unflatten(1, (-1, self.head_dim)).split([self.heads, self.kv_heads, self.kv_heads], 1)


class MLP(nn.Module):
    """A gated MLP with fused gate and up projections."""

    def __init__(self, cfg: LayerConfig) -> None:
        super().__init__()
        self.gate_up_proj = Linear(cfg.hidden_size, 2 * cfg.intermediate_size, bias=cfg.mlp_bias)
        self.down_proj = Linear(cfg.intermediate_size, cfg.hidden_size, bias=cfg.mlp_bias)
        self.activation = cfg.activation

    def gate_up(self, x: Tensor | ResidualStream, norm: RMSNorm | None = None) -> Tensor:
        """Returns the gated activations [T, I], the input of `down_proj`."""
        if self.activation == "silu":
            return project(self.gate_up_proj, x, norm=norm, glu=True)
        gate, up = project(self.gate_up_proj, x, norm=norm).chunk(2, -1)
        return F.gelu(gate, approximate="tanh") * up

    def forward(
        self, stream: ResidualStream, norm: RMSNorm, next_norm: RMSNorm | None, out_norm: RMSNorm | None = None
    ) -> ResidualStream:
        """Adds the MLP over `norm(x)` to the residual stream x and prepares `next_norm`."""
        return project_residual(stream.x, self.down_proj, self.gate_up(stream, norm), next_norm, out_norm)


def project(layer: nn.Linear, x: Tensor | ResidualStream, norm: RMSNorm | None = None, glu: bool = False) -> Tensor:
    """Applies a linear layer, fused with a norm before it and a gate after it."""
    weight, eps = (norm.weight, norm.eps) if norm is not None else (None, 0.0)
    scale = getattr(layer, "weight_scale", None)
    return linear(x, layer.weight, layer.bias, norm_weight=weight, eps=eps, glu=glu, weight_scale=scale)


def project_residual(
    residual: Tensor, layer: Linear, x: Tensor, next_norm: RMSNorm | None, out_norm: RMSNorm | None
) -> ResidualStream:
    """Adds a linear layer to the residual stream, through `out_norm`, and prepares the next norm, if there is one."""
    if out_norm is not None:
        return add_residual(residual, out_norm(project(layer, x)), next_norm)
    weight, eps = (next_norm.weight, next_norm.eps) if next_norm is not None else (None, 0.0)
    scale = layer.weight_scale
    return linear_residual(residual, x, layer.weight, layer.bias, next_norm=weight, eps=eps, weight_scale=scale)


def add_residual(residual: Tensor, y: Tensor, next_norm: RMSNorm | None) -> ResidualStream:
    """Adds any tensor to the residual stream and prepares the next norm, if there is one."""
    if next_norm is None:
        return ResidualStream(residual + y)
    normed, total = add_rms_norm(y, residual, next_norm.weight, next_norm.eps)
    return ResidualStream(total, next_norm.weight, normed=normed)


class ExpertMLP(nn.Module):
    """A mixture-of-experts MLP: a router and the weights of all experts. Has the interface of `MLP`.

    Weights are matrices with the experts' rows one after another, so that a checkpoint's tensors fill rows as in any
    other layer. MXFP4 weights are words and exponents instead. Shapes as in `peagle.kernels.moe.experts`.
    """

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
        def of_experts(name: str) -> Any:
            parameter: Tensor | None = getattr(self, name)
            return None if parameter is None else parameter.unflatten(0, (self.cfg.num_experts, -1))

        def matrix(name: str, columns: int) -> Tensor | PackedWeights:
            if not self.cfg.mxfp4:
                return of_experts(name)
            return PackedWeights(of_experts(f"{name}_words"), of_experts(f"{name}_exponents"), columns)

        gate_up, down = matrix("gate_up", self.router.in_features), matrix("down", self.cfg.intermediate_size)
        return ExpertWeights(gate_up, down, of_experts("gate_up_bias"), of_experts("down_bias"), self.cfg.clamp)


class DecoderLayer(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self, cfg: LayerConfig) -> None:
        super().__init__()

        def norm() -> RMSNorm:
            return RMSNorm(cfg.hidden_size, cfg.norm_eps)

        self.input_layernorm = norm()
        self.self_attn = Attention(cfg, cfg.hidden_size)
        self.post_attention_layernorm = norm()  # before the MLP; the name is Llama's
        self.mlp: MLP = MLP(cfg) if cfg.experts is None else ExpertMLP(cfg)  # type: ignore[assignment]
        self.attention_out_norm = norm() if cfg.output_norms else None
        self.mlp_out_norm = norm() if cfg.output_norms else None
        self.layer_scalar = nn.Parameter(torch.ones(1)) if cfg.layer_scalar else None

    def forward(
        self,
        stream: ResidualStream,
        rotary: RotaryOrScale,
        attend: Attend,
        layer: int,
        window: Window,
        next_norm: RMSNorm | None = None,
    ) -> ResidualStream:
        """Runs the layer; `next_norm` is the next layer's input norm, None after the last layer."""
        norm, mlp_norm = self.input_layernorm, self.post_attention_layernorm
        inputs = (stream, stream.x, rotary, attend, layer, window)
        stream = self.self_attn(*inputs, norm, next_norm=mlp_norm, out_norm=self.attention_out_norm)
        if self.layer_scalar is None:
            return self.mlp(stream, mlp_norm, next_norm, self.mlp_out_norm)
        return ResidualStream(self.mlp(stream, mlp_norm, None, self.mlp_out_norm).x * self.layer_scalar)


def next_input_norm(layers: nn.ModuleList, i: int) -> RMSNorm | None:
    """Returns the input norm of layer i + 1, None after the last layer."""
    following: DecoderLayer | None = layers[i + 1] if i + 1 < len(layers) else None  # type: ignore[assignment]
    return following.input_layernorm if following is not None else None
