"""Gemma 3 and Gemma 4: what their configs say, and what their tensors need.

Knows nothing of other families, nor of how files are read. Of Gemma 4 the dense models run (31B); what the others have
more is named by `gemma4_missing`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from peagle.checkpoints import weight_conversion as published
from peagle.checkpoints.config_reader import ConfigReader, layer_config
from peagle.checkpoints.weight_conversion import TensorSources
from peagle.config import LayerConfig

GELU = "gelu_pytorch_tanh"
GLOBAL_HEAD_DIM = 512  # where a config of Gemma 4 says nothing
MISSING = {
    "hidden_size_per_layer_input": "embeddings for every layer",
    "num_kv_shared_layers": "layers that share keys and values",
    "enable_moe_block": "experts beside an MLP",
}
NORMS = {
    ".post_attention_layernorm.": ".attention_out_norm.",
    ".pre_feedforward_layernorm.": ".post_attention_layernorm.",
    ".post_feedforward_layernorm.": ".mlp_out_norm.",
}


def _layer(fields: ConfigReader) -> LayerConfig:
    activation = fields.get("hidden_activation", str, GELU)
    if activation != GELU:
        raise fields.error(f"hidden_activation {activation!r} is not supported; supported: {GELU}")
    bias = fields.get("attention_bias", bool, False)
    layer = layer_config(fields, qkv_bias=bias, out_bias=bias, mlp_bias=False, qk_norm=True)
    return replace(layer, activation="gelu_tanh", output_norms=True)


def gemma3(fields: ConfigReader) -> LayerConfig:
    for name in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if fields.values.get(name):
            raise fields.error(f"{name} is not supported")
    return _layer(fields)


def gemma3_tensors(sources: TensorSources, fields: ConfigReader) -> TensorSources:
    """A norm's weight is stored less 1. How attention scales its scores is put into the queries' norm."""
    usual, scalar = gemma3(fields).head_dim, fields.positive("query_pre_attn_scalar")
    sources = published.text_part(sources)
    sources = published.changed(sources, lambda name: name.endswith("norm.weight"), lambda w: w.float() + 1)
    if scalar != usual:
        more = (usual / scalar) ** 0.5
        sources = published.changed(sources, lambda name: name.endswith(".q_norm.weight"), lambda w: w * more)
    return published.renamed(sources, NORMS)


def gemma4(fields: ConfigReader) -> LayerConfig:
    """What most layers are: those with a window."""
    if fields.values.get("use_bidirectional_attention") == "all":  # "vision": of pictures alone
        raise fields.error("use_bidirectional_attention is not supported")
    return replace(_layer(fields), v_norm=True, layer_scalar=True)


def gemma4_layers(fields: ConfigReader, usual: LayerConfig) -> tuple[LayerConfig, ...]:
    """Layers that see everything have wider heads, and where keys are values too, fewer of them. Published configs have
    a field for each; transformers makes of them what every layer has of its own."""
    kinds: list[str] = fields.values["layer_types"]
    wide: dict[str, Any] = {"head_dim": fields.size("global_head_dim", GLOBAL_HEAD_DIM)}
    if _keys_are_values(fields) and (heads := fields.optional_size("num_global_key_value_heads")) is not None:
        wide["num_key_value_heads"] = heads
    of_each = fields.section("per_layer_config")
    numbers = {int(name): name for name in of_each.values if name.isdecimal()}  # it writes them as 05, too
    if len(numbers) < len(of_each.values):
        raise fields.error("per_layer_config is expected to have layers' numbers")

    def one(i: int, kind: str) -> LayerConfig:
        own = of_each.section(numbers.get(i, "")).values if numbers else wide if kind == "full_attention" else {}
        if unknown := own.keys() - {"head_dim", "num_key_value_heads"}:
            raise fields.error(f"{min(unknown)} that differs between layers (per_layer_config) is not supported")
        shape = _layer(ConfigReader({**fields.values, **own}, fields.source))
        return replace(usual, head_dim=shape.head_dim, num_kv_heads=shape.num_kv_heads)

    layers = tuple(one(i, kind) for i, kind in enumerate(kinds))
    if len({(kind, layer.head_dim) for kind, layer in zip(kinds, layers, strict=True)}) > len(set(kinds)):
        raise fields.error("head_dim that differs between layers of one kind (per_layer_config) is not supported")
    return layers


def _keys_are_values(fields: ConfigReader) -> bool:
    """In layers that see everything."""
    return fields.get("attention_k_eq_v", bool, False)


def gemma4_missing(fields: ConfigReader) -> str | None:
    """Of what its models may have, what our layers have not."""
    for name, what in MISSING.items():
        if fields.values.get(name):
            return f"{what} ({name})"
    return None


def gemma4_tensors(sources: TensorSources, fields: ConfigReader) -> TensorSources:
    """Unlike Gemma 3's, a norm's weight is what it is. Scores are not scaled at all, which is put into the queries'
    norm. Where keys are values too, their product is stored once and read twice."""
    sources = published.renamed(published.text_part(sources), NORMS)
    for i, kind in enumerate(fields.values["layer_types"]):
        keys = f"model.layers.{i}.self_attn.k_proj."
        if kind == "full_attention" and _keys_are_values(fields):
            sources |= {n.replace(".k_proj.", ".v_proj."): own for n, own in sources.items() if n.startswith(keys)}
    return published.changed(sources, lambda name: name.endswith(".q_norm.weight"), lambda w: w.float() * len(w) ** 0.5)
