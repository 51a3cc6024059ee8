"""Gemma 3 and Gemma 4: configs and tensors.

Gemma 4's dense model (31B) runs here; `UNSUPPORTED` lists what the other sizes add.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from peagle.checkpoints.config_reader import ConfigReader, read_layer_config
from peagle.checkpoints.weight_conversion import (
    TensorSources,
    rename_tensors,
    select_text_model,
    transform_tensors,
)
from peagle.config import LayerConfig

GELU = "gelu_pytorch_tanh"
DEFAULT_GLOBAL_HEAD_DIM = 512  # of Gemma 4
UNSUPPORTED = {
    "hidden_size_per_layer_input": "embeddings for every layer",
    "num_kv_shared_layers": "layers that share keys and values",
    "enable_moe_block": "experts beside an MLP",
}
NORM_NAMES = {
    ".post_attention_layernorm.": ".attention_out_norm.",
    ".pre_feedforward_layernorm.": ".post_attention_layernorm.",
    ".post_feedforward_layernorm.": ".mlp_out_norm.",
}


def _read_layer(config: ConfigReader) -> LayerConfig:
    activation = config.get("hidden_activation", str, GELU)
    if activation != GELU:
        raise config.error(f"hidden_activation {activation!r} is not supported; supported: {GELU}")
    bias = config.get("attention_bias", bool, False)
    layer = read_layer_config(config, qkv_bias=bias, out_bias=bias, mlp_bias=False, qk_norm=True)
    return replace(layer, activation="gelu_tanh", output_norms=True)


def read_gemma3_layer(config: ConfigReader) -> LayerConfig:
    for name in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if config.values.get(name):
            raise config.error(f"{name} is not supported")
    return _read_layer(config)


def convert_gemma3(sources: TensorSources, config: ConfigReader) -> TensorSources:
    """Adds 1 to norm weights, which are stored minus 1, and folds query_pre_attn_scalar into the query norm."""
    head_dim, scalar = read_gemma3_layer(config).head_dim, config.positive("query_pre_attn_scalar")
    sources = select_text_model(sources)
    sources = transform_tensors(sources, lambda name: name.endswith("norm.weight"), lambda w: w.float() + 1)
    if scalar != head_dim:
        scale = (head_dim / scalar) ** 0.5
        sources = transform_tensors(sources, lambda name: name.endswith(".q_norm.weight"), lambda w: w * scale)
    return rename_tensors(sources, NORM_NAMES)


def read_gemma4_layer(config: ConfigReader) -> LayerConfig:
    """Returns the sliding-window layer, the most common one."""
    if config.values.get("use_bidirectional_attention") == "all":  # "vision" concerns images only
        raise config.error("use_bidirectional_attention is not supported")
    return replace(_read_layer(config), v_norm=True, layer_scalar=True)


def read_gemma4_layers(config: ConfigReader, layer: LayerConfig) -> tuple[LayerConfig, ...]:
    """Full-attention layers have larger heads, and fewer KV heads if keys are used as values.

    Published configs have global fields for them; transformers writes `per_layer_config`, keyed by layer number.
    """
    layer_types: list[str] = config.values["layer_types"]
    full: dict[str, Any] = {"head_dim": config.size("global_head_dim", DEFAULT_GLOBAL_HEAD_DIM)}
    if _uses_keys_as_values(config) and (heads := config.optional_size("num_global_key_value_heads")) is not None:
        full["num_key_value_heads"] = heads
    per_layer = config.section("per_layer_config")
    keys = {int(name): name for name in per_layer.values if name.isdecimal()}  # a key may be "5" or "05"
    if len(keys) < len(per_layer.values):
        raise config.error("per_layer_config must have layer numbers as keys")

    def read_one(i: int, layer_type: str) -> LayerConfig:
        if keys:
            fields = per_layer.section(keys.get(i, "")).values
        else:
            fields = full if layer_type == "full_attention" else {}
        if unknown := fields.keys() - {"head_dim", "num_key_value_heads"}:
            raise config.error(f"{min(unknown)} that differs between layers (per_layer_config) is not supported")
        shape = _read_layer(ConfigReader({**config.values, **fields}, config.source))
        return replace(layer, head_dim=shape.head_dim, num_kv_heads=shape.num_kv_heads)

    layers = tuple(read_one(i, layer_type) for i, layer_type in enumerate(layer_types))
    head_dims = {(layer_type, each.head_dim) for layer_type, each in zip(layer_types, layers, strict=True)}
    if len(head_dims) > len(set(layer_types)):
        raise config.error("head_dim that differs between layers of one type (per_layer_config) is not supported")
    return layers


def _uses_keys_as_values(config: ConfigReader) -> bool:
    """In full-attention layers."""
    return config.get("attention_k_eq_v", bool, False)


def find_gemma4_unsupported(config: ConfigReader) -> str | None:
    return next((f"{what} ({name})" for name, what in UNSUPPORTED.items() if config.values.get(name)), None)


def convert_gemma4(sources: TensorSources, config: ConfigReader) -> TensorSources:
    """Uses key projections as value projections where the config says so, and cancels the attention scale.

    Gemma 4 does not scale attention scores; the query norm is multiplied by the scale's inverse. Unlike in Gemma 3,
    norm weights are stored without an offset.
    """
    sources = rename_tensors(select_text_model(sources), NORM_NAMES)
    for i, layer_type in enumerate(config.values["layer_types"]):
        prefix = f"model.layers.{i}.self_attn.k_proj."
        if layer_type == "full_attention" and _uses_keys_as_values(config):
            keys = {name: source for name, source in sources.items() if name.startswith(prefix)}
            sources |= {name.replace(".k_proj.", ".v_proj."): source for name, source in keys.items()}
    return transform_tensors(sources, lambda name: name.endswith(".q_norm.weight"), lambda w: w.float() * len(w) ** 0.5)
