"""Decoder and drafter passes on the CPU with little Python overhead, and the same bits as the modules.

A small model's layer has some thirty operations of a few microseconds beside its four GEMMs, so calling modules and
choosing kernels costs as much as the operations. Here everything that does not change between passes is looked up once.
The weights are the modules' own.

Shapes as in `peagle.models.layers`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from peagle.config import Window
from peagle.kernels.gemm.linear_torch import linear_cpu
from peagle.kernels.norm.rms_norm import norm_cat, rms_norm
from peagle.models.decoder import Decoder
from peagle.models.drafter import Drafter, FirstLayer
from peagle.models.layers import Angles, Attend, DecoderLayer, Linear


def _negate_half(angles: Angles) -> Angles:
    """Negates the first half of the sines: a rotation is then x * cos + (x with swapped halves) * sin."""
    cos, sin = angles
    half = sin.shape[-1] // 2
    return cos.contiguous(), torch.cat([-sin[..., :half], sin[..., half:]], -1)


class FusedCpuLayer:
    """One layer of a decoder or drafter."""

    def __init__(self, layer: DecoderLayer | FirstLayer, window: Window) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.window = window
        self.norm, self.eps = layer.input_layernorm.weight, layer.input_layernorm.eps
        self.mlp_norm = layer.post_attention_layernorm.weight
        self.heads, self.kv_heads, self.width = attention.heads, attention.kv_heads, attention.head_dim
        self.qkv, self.qkv_bias = attention.qkv_proj.weight, attention.qkv_proj.bias
        self.out, self.out_bias = attention.o_proj.weight, attention.o_proj.bias
        q_norm, k_norm = attention.q_norm, attention.k_norm
        self.head_norms = (q_norm.weight, k_norm.weight) if q_norm is not None and k_norm is not None else None
        self.gate_up, self.gate_up_bias = mlp.gate_up_proj.weight, mlp.gate_up_proj.bias
        self.down, self.down_bias = mlp.down_proj.weight, mlp.down_proj.bias
        self.split_sizes = [self.heads + self.kv_heads, self.kv_heads]

    def __call__(self, x_TD: Tensor, attn_input: Tensor | None, angles: Angles, attend: Attend, index: int) -> Tensor:
        """Returns the residual stream after this layer; attention reads `attn_input`, or norm(x) if it is None."""
        x_TD = linear_cpu(self.attend(x_TD, attn_input, angles, attend, index), self.out, self.out_bias, residual=x_TD)
        hidden = linear_cpu(x_TD, self.gate_up, self.gate_up_bias, norm_weight=self.mlp_norm, eps=self.eps, glu=True)
        return linear_cpu(hidden, self.down, self.down_bias, residual=x_TD)

    def attend(self, x_TD: Tensor, attn_input: Tensor | None, angles: Angles, attend: Attend, index: int) -> Tensor:
        """Returns the attention output [T, H * d] and writes keys and values to the cache."""
        rows, heads, (cos, sin) = x_TD.shape[0], self.heads, angles
        if attn_input is None:
            qkv = linear_cpu(x_TD, self.qkv, self.qkv_bias, norm_weight=self.norm, eps=self.eps)
        else:
            qkv = linear_cpu(attn_input, self.qkv, self.qkv_bias)
        if self.head_norms is None and self.window is None:
            one = getattr(attend, "one", None)
            if one is not None and one.applies_rope:
                return one.attend_with_rope(index, qkv, cos, sin, heads)
        qk, v = torch.split_with_sizes(qkv.view(rows, -1, self.width), self.split_sizes, 1)
        if self.head_norms is not None:
            q_norm, k_norm = self.head_norms
            qk = torch.cat([rms_norm(qk[:, :heads], q_norm, self.eps), rms_norm(qk[:, heads:], k_norm, self.eps)], 1)
        rotated = (qk * cos).add_(qk.roll(self.width // 2, -1).mul_(sin))
        q, k = torch.split_with_sizes(rotated, [heads, self.kv_heads], 1)
        return attend(index, q, k, v, self.window).reshape(rows, -1)


class FusedCpuDecoder:
    """Has the interface of `Decoder`; supports models of plain Llama layers only."""

    @staticmethod
    def supports(model: Decoder) -> bool:
        cfg = model.cfg
        plain = not cfg.uses_transformers and not cfg.layers and cfg.local_rope is None
        quantized = any(isinstance(m, Linear) and m.weight_scale is not None for m in model.modules())
        return plain and not quantized and cfg.layer == cfg.layer.as_llama and cfg.embedding_scale == 1.0

    def __init__(self, model: Decoder) -> None:
        self.model = model
        layers: Sequence[DecoderLayer] = list(model.layers)  # type: ignore[arg-type]
        self.layers = [FusedCpuLayer(layer, window) for layer, window in zip(layers, model.cfg.windows, strict=True)]

    def __call__(
        self, token_ids_T: Tensor, positions_T: Tensor, attend: Attend, aux_layer_ids: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None]:
        model = self.model
        x_TD = F.embedding(token_ids_T, model.embed_tokens.weight)
        angles = _negate_half(model.rope(positions_T, x_TD.dtype))
        aux_hidden_states = {}
        for i, layer in enumerate(self.layers):
            if i in aux_layer_ids:
                aux_hidden_states[i] = x_TD
            x_TD = layer(x_TD, None, angles, attend, i)
        aux_hidden_states[len(self.layers)] = x_TD
        return model.norm(x_TD), torch.cat([aux_hidden_states[k] for k in aux_layer_ids], -1) if aux_layer_ids else None


class FusedCpuDrafter:
    """Has the interface of `Drafter`."""

    def __init__(self, model: Drafter) -> None:
        self.model = model
        layers: Sequence[DecoderLayer | FirstLayer] = list(model.layers)  # type: ignore[arg-type]
        self.layers = [FusedCpuLayer(layer, model.cfg.window(i)) for i, layer in enumerate(layers)]
        first = layers[0]
        assert isinstance(first, FirstLayer)
        self.hidden_norm, self.norm_before_residual = first.hidden_norm.weight, first.norm_before_residual

    def __call__(
        self, token_ids_T: Tensor, hidden_TD: Tensor, positions_T: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        model, first = self.model, self.layers[0]
        embeds_TD = F.embedding(token_ids_T, model.embed_tokens_weight)
        angles = _negate_half(model.rope(positions_T, hidden_TD.dtype))
        normed = norm_cat((embeds_TD, hidden_TD), (first.norm, self.hidden_norm), first.eps)
        x_TD = normed.chunk(2, -1)[1] if self.norm_before_residual else hidden_TD
        for i, layer in enumerate(self.layers):
            x_TD = layer(x_TD, normed if i == 0 else None, angles, attend, i)
        normed = model.norm(x_TD)
        return normed, normed if model.cfg.norm_output else x_TD
