"""Llama 4's text model: what its config says, and what its tensors need.

Knows nothing of other families, nor of how files are read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from peagle.checkpoints import weight_conversion as published
from peagle.checkpoints.config_reader import ConfigReader, experts_config, layer_config, positions
from peagle.checkpoints.weight_conversion import TensorSources
from peagle.config import AttentionTemperature, ChunkedAttention, LayerConfig, Window

LONGEST = 1 << 20  # of the ten million positions that Scout's config has; angles of all are kept


def mended(values: dict[str, Any]) -> dict[str, Any]:
    """Files of 2025 have a 4 here, which was read as a truth."""
    tuned = values.get("attn_temperature_tuning")
    return {**values, "attn_temperature_tuning": bool(tuned)} if type(tuned) is int else values


def layer(fields: ConfigReader) -> LayerConfig:
    """With experts, and heads that are turned: what most layers are."""
    bias, qk_norm = fields.get("attention_bias", bool, False), fields.get("use_qk_norm", bool, False)
    width = fields.size("intermediate_size")
    experts = experts_config(fields, "intermediate_size", sigmoid_scaled_input=True, shared_intermediate_size=width)
    shape = layer_config(fields, qkv_bias=bias, out_bias=bias, mlp_bias=False, qk_norm=qk_norm)
    return replace(shape, experts=experts)


def layers(fields: ConfigReader, usual: LayerConfig) -> tuple[LayerConfig, ...]:
    """Some have no experts, some do not turn their heads, and then do not norm them either."""
    count = fields.size("num_hidden_layers")
    turned, sparse = fields.int_list("no_rope_layers") or (), fields.int_list("moe_layers") or ()
    if len(turned) < count:
        raise fields.error(f"no_rope_layers must name {count} layers")
    dense = fields.size("intermediate_size_mlp")

    def one(i: int) -> LayerConfig:
        own = usual if turned[i] else replace(usual, use_rope=False, qk_norm=False)
        return own if i in sparse else replace(own, experts=None, intermediate_size=dense)

    return tuple(one(i) for i in range(count))


def windows(fields: ConfigReader) -> tuple[Window, ...]:
    kinds, count = fields.values["layer_types"], fields.size("num_hidden_layers")
    if not isinstance(kinds, list) or len(kinds) != count:
        raise fields.error(f"layer_types must name {count} layers")
    if unknown := [kind for kind in kinds if kind not in ("full_attention", "chunked_attention")]:
        raise fields.error(f"layer type {unknown[0]!r} is not supported")

    def one(kind: str) -> Window:
        return (
            None
            if kind == "full_attention"
            else ChunkedAttention(fields.size("attention_chunk_size", maximum=2**31 - 1))
        )

    return tuple(one(kind) for kind in kinds)


def reach(fields: ConfigReader) -> int:
    return min(positions(fields), LONGEST)


def heat(fields: ConfigReader) -> AttentionTemperature | None:
    if not fields.get("attn_temperature_tuning", bool, False):
        return None
    return AttentionTemperature(fields.size("floor_scale", maximum=2**31 - 1), fields.get("attn_scale", float))


def tensors(sources: TensorSources, fields: ConfigReader) -> TensorSources:
    """Pairs that turn together lie side by side in a head; here they lie half a head apart. The norms of heads have no
    weights, and as a turn changes no length, it does not matter that they come behind it."""
    usual = layer(fields)
    sources = published.renamed(published.text_part(sources), {".feed_forward.": ".mlp."})
    sources = published.changed(
        sources,
        lambda name: ".q_proj." in name or ".k_proj." in name,
        lambda w: published.pairs_from_neighbours(w, usual.head_dim),
    )
    for i, own in enumerate(layers(fields, usual)):
        if own.qk_norm:
            names = (f"model.layers.{i}.self_attn.{name}.weight" for name in ("q_norm", "k_norm"))
            sources |= dict.fromkeys(names, published.ones(usual.head_dim))
    return published.split_experts(sources, interleaved=False)
