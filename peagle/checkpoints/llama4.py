"""Llama 4's text model: config and tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from peagle.checkpoints import config_reader
from peagle.checkpoints.config_reader import ConfigReader, read_experts_config, read_layer_config, read_layer_types
from peagle.checkpoints.weight_conversion import (
    TensorSources,
    deinterleave_rotary_pairs,
    ones,
    rename_tensors,
    select_text_model,
    split_experts,
    transform_tensors,
)
from peagle.config import AttentionTemperature, ChunkedAttention, LayerConfig, Window

MAX_POSITIONS = 1 << 20  # of the ten million in Scout's config: rotary tables have a row per position


def fix_config(values: dict[str, Any]) -> dict[str, Any]:
    """Published configs store attn_temperature_tuning as 4; transformers expects a bool."""
    tuning = values.get("attn_temperature_tuning")
    return {**values, "attn_temperature_tuning": bool(tuning)} if type(tuning) is int else values


def read_layer(config: ConfigReader) -> LayerConfig:
    """Returns an MoE layer with rotary embeddings, the most common one."""
    bias, qk_norm = config.get("attention_bias", bool, False), config.get("use_qk_norm", bool, False)
    size = config.size("intermediate_size")
    experts = read_experts_config(config, "intermediate_size", sigmoid_scaled_input=True, shared_intermediate_size=size)
    layer = read_layer_config(config, qkv_bias=bias, out_bias=bias, mlp_bias=False, qk_norm=qk_norm)
    return replace(layer, experts=experts)


def read_layers(config: ConfigReader, layer: LayerConfig) -> tuple[LayerConfig, ...]:
    """Some layers are dense; some have neither rotary embeddings nor query and key norms."""
    num_layers = config.size("num_hidden_layers")
    uses_rope, moe_layers = config.int_list("no_rope_layers") or (), config.int_list("moe_layers") or ()
    if len(uses_rope) < num_layers:
        raise config.error(f"no_rope_layers must have {num_layers} entries")
    dense_size = config.size("intermediate_size_mlp")

    def read_one(i: int) -> LayerConfig:
        own = layer if uses_rope[i] else replace(layer, use_rope=False, qk_norm=False)
        return own if i in moe_layers else replace(own, experts=None, intermediate_size=dense_size)

    return tuple(read_one(i) for i in range(num_layers))


def read_windows(config: ConfigReader) -> tuple[Window, ...]:
    num_layers = config.size("num_hidden_layers")
    layer_types = read_layer_types(config, num_layers, "", ("full_attention", "chunked_attention"))
    if all(layer_type == "full_attention" for layer_type in layer_types):
        return (None,) * num_layers
    chunked = ChunkedAttention(config.size("attention_chunk_size", maximum=2**31 - 1))
    return tuple(None if layer_type == "full_attention" else chunked for layer_type in layer_types)


def read_max_positions(config: ConfigReader) -> int:
    return min(config_reader.read_max_positions(config), MAX_POSITIONS)


def read_attention_temperature(config: ConfigReader) -> AttentionTemperature | None:
    if not config.get("attn_temperature_tuning", bool, False):
        return None
    return AttentionTemperature(config.size("floor_scale", maximum=2**31 - 1), config.get("attn_scale", float))


def convert_weights(sources: TensorSources, config: ConfigReader) -> TensorSources:
    """Deinterleaves rotary pairs, adds weights of 1 for the query and key norms, and splits the experts.

    Llama 4 applies the norms after the rotation. The order does not matter: a rotation preserves the norm, and the
    weights are all 1.
    """
    layer = read_layer(config)
    sources = rename_tensors(select_text_model(sources), {".feed_forward.": ".mlp."})
    sources = transform_tensors(
        sources,
        lambda name: ".q_proj." in name or ".k_proj." in name,
        lambda weight: deinterleave_rotary_pairs(weight, layer.head_dim),
    )
    for i, own in enumerate(read_layers(config, layer)):
        if own.qk_norm:
            names = (f"model.layers.{i}.self_attn.{name}.weight" for name in ("q_norm", "k_norm"))
            sources |= dict.fromkeys(names, ones(layer.head_dim))
    return split_experts(sources, interleaved=False)
