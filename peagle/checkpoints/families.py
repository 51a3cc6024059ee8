"""The model families that `Decoder` runs: how to read their config.json and convert their tensors.

A family is data: readers of its config, and the steps of `tensors.py` that its tensors need.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from peagle.checkpoints import tensors
from peagle.checkpoints.config_reader import ConfigReader, build_transformers_config, fill_defaults
from peagle.checkpoints.tensors import TensorSource, TensorSources
from peagle.config import AttentionTemperature, DecoderConfig, LayerConfig, RopeConfig
from peagle.errors import UserError
from peagle.kernels.moe.mxfp4 import BLOCK

FP8, MXFP4 = "fp8", "mxfp4"
MAX_POSITIONS = 1 << 20  # of the ten million in Llama 4 Scout's config: rotary tables have a row per position
# Of a model that runs through transformers: fields that are read, and fields that change logits or attention in ways
# that TransformersDecoder does not pass on.
TRANSFORMERS_FIELDS = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("max_position_embeddings", "layer_types"),
)
TRANSFORMERS_UNSUPPORTED = (
    *("final_logit_softcapping", "attn_logit_softcapping", "attention_chunk_size", "logit_scale", "is_encoder_decoder"),
)
GELU = "gelu_pytorch_tanh"
GEMMA4_GLOBAL_HEAD_DIM = 512  # by default
# Embeddings for every layer, layers that share keys and values, experts beside an MLP; the dense model (31B) has none.
GEMMA4_UNSUPPORTED = ("hidden_size_per_layer_input", "num_kv_shared_layers", "enable_moe_block")
GEMMA_NORM_NAMES = {
    ".post_attention_layernorm.": ".attention_out_norm.",
    ".pre_feedforward_layernorm.": ".post_attention_layernorm.",
    ".post_feedforward_layernorm.": ".mlp_out_norm.",
}


@dataclass(frozen=True)
class Family:
    model_type: str  # transformers' name of its config
    read_layer: Callable[[ConfigReader], LayerConfig]
    convert_weights: Callable[[TensorSources, ConfigReader], TensorSources] = lambda sources, config: sources
    # Per-layer configs; an empty tuple if all layers are equal.
    read_layers: Callable[[ConfigReader, LayerConfig], tuple[LayerConfig, ...]] = lambda config, layer: ()
    transformers_fields: tuple[str, ...] = ()  # features that only transformers implements
    quant_methods: tuple[str, ...] = (FP8,)
    sliding_by_default: bool = False  # all layers slide if there is no `layer_types`
    chunked_attention: bool = False  # instead of sliding windows
    scale_embeddings: bool = False  # by the square root of the hidden size
    partial_rotary: bool = False  # `convert_weights` reorders partially rotated heads
    logit_softcapping: bool = False


_read_unbiased_layer = partial(ConfigReader.read_layer, qkv_bias=False, out_bias=False, mlp_bias=False)
_read_qwen2_layer = partial(ConfigReader.read_layer, qkv_bias=True, out_bias=False, mlp_bias=False)
_read_qwen3_layer = partial(ConfigReader.read_layer, qk_norm=True, mlp_bias=False)


def _read_qwen3_moe_layer(config: ConfigReader) -> LayerConfig:
    if config.values.get("mlp_only_layers") or config.size("decoder_sparse_step", 1) != 1:
        raise config.error("dense layers between MoE layers (mlp_only_layers, decoder_sparse_step) are not supported")
    norm_topk_prob = config.get("norm_topk_prob", bool, False)
    experts = config.read_experts("moe_intermediate_size", norm_topk_prob=norm_topk_prob)
    return replace(_read_qwen3_layer(config), experts=experts)


def _read_gpt_oss_layer(config: ConfigReader) -> LayerConfig:
    clamp = config.positive("swiglu_alpha", 1.702), config.positive("swiglu_limit", 7.0)
    experts = config.read_experts("intermediate_size", bias=True, clamp=clamp)
    return replace(config.read_layer(), attention_sinks=True, experts=experts)


def _convert_phi3(sources: TensorSources, config: ConfigReader) -> TensorSources:
    """Splits merged projections, and reorders partially rotated heads."""
    layer, rope = _read_unbiased_layer(config), config.read_rope(of_target=True)
    q, kv = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    mlp = layer.intermediate_size
    sources = tensors.split_rows(sources, ".qkv_proj.", {"q_proj": q, "k_proj": kv, "v_proj": kv})
    sources = tensors.split_rows(sources, ".gate_up_proj.", {"gate_proj": mlp, "up_proj": mlp})
    if rope.partial_rotary_factor == 1.0:
        return sources
    rotary_dim = int(layer.head_dim * rope.partial_rotary_factor)
    spread = partial(tensors.spread_rotary_pairs, head_dim=layer.head_dim, rotary_dim=rotary_dim)
    return tensors.transform(sources, (".q_proj.", ".k_proj."), spread)


def _read_gemma_layer(config: ConfigReader) -> LayerConfig:
    activation = config.get("hidden_activation", str, GELU)
    if activation != GELU:
        raise config.error(f"hidden_activation {activation!r} is not supported; supported: {GELU}")
    return replace(_read_qwen3_layer(config), activation="gelu_tanh", output_norms=True)


def read_gemma3_layer(config: ConfigReader) -> LayerConfig:
    for name in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if config.values.get(name):
            raise config.error(f"{name} is not supported")
    return _read_gemma_layer(config)


def _convert_gemma3(sources: TensorSources, config: ConfigReader) -> TensorSources:
    """Adds 1 to norm weights, which are stored minus 1, and folds query_pre_attn_scalar into the query norm."""
    head_dim, scalar = read_gemma3_layer(config).head_dim, config.positive("query_pre_attn_scalar")
    sources = tensors.select_text_model(sources)
    sources = tensors.transform(sources, ("norm.weight",), lambda w: w.float() + 1)
    if scalar != head_dim:
        scale = (head_dim / scalar) ** 0.5
        sources = tensors.transform(sources, (".q_norm.weight",), lambda w: w * scale)
    return tensors.rename(sources, GEMMA_NORM_NAMES)


def read_gemma4_layer(config: ConfigReader) -> LayerConfig:
    """Returns the sliding-window layer, the most common one."""
    if config.values.get("use_bidirectional_attention") == "all":  # "vision" concerns images only
        raise config.error("use_bidirectional_attention is not supported")
    return replace(_read_gemma_layer(config), v_norm=True, layer_scalar=True)


def read_gemma4_layers(config: ConfigReader, layer: LayerConfig) -> tuple[LayerConfig, ...]:
    """Full-attention layers have larger heads, and fewer KV heads if keys are used as values.

    Published configs have global fields for them; transformers writes `per_layer_config`, keyed by layer number.
    """
    layer_types: list[str] = config.values["layer_types"]
    full: dict[str, Any] = {"head_dim": config.size("global_head_dim", GEMMA4_GLOBAL_HEAD_DIM)}
    heads = config.optional_size("num_global_key_value_heads")
    if heads is not None and config.get("attention_k_eq_v", bool, False):
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
        shape = _read_gemma_layer(ConfigReader({**config.values, **fields}, config.source))
        return replace(layer, head_dim=shape.head_dim, num_kv_heads=shape.num_kv_heads)

    layers = tuple(read_one(i, layer_type) for i, layer_type in enumerate(layer_types))
    head_dims = {(layer_type, each.head_dim) for layer_type, each in zip(layer_types, layers, strict=True)}
    if len(head_dims) > len(set(layer_types)):
        raise config.error("head_dim that differs between layers of one type (per_layer_config) is not supported")
    return layers


def _convert_gemma4(sources: TensorSources, config: ConfigReader) -> TensorSources:
    """Uses key projections as value projections where the config says so, and cancels the attention scale.

    Gemma 4 does not scale attention scores; the query norm is multiplied by the scale's inverse. Unlike in Gemma 3,
    norm weights are stored without an offset.
    """
    sources = tensors.rename(tensors.select_text_model(sources), GEMMA_NORM_NAMES)
    for i, layer_type in enumerate(config.values["layer_types"]):
        prefix = f"model.layers.{i}.self_attn.k_proj."
        if layer_type == "full_attention" and config.get("attention_k_eq_v", bool, False):
            keys = {name: source for name, source in sources.items() if name.startswith(prefix)}
            sources |= {name.replace(".k_proj.", ".v_proj."): source for name, source in keys.items()}
    return tensors.transform(sources, (".q_norm.weight",), lambda w: w.float() * len(w) ** 0.5)


def _read_llama4_layer(config: ConfigReader) -> LayerConfig:
    """Returns an MoE layer with rotary embeddings, the most common one."""
    size, qk_norm = config.size("intermediate_size"), config.get("use_qk_norm", bool, False)
    experts = config.read_experts("intermediate_size", sigmoid_scaled_input=True, shared_intermediate_size=size)
    return replace(config.read_layer(qk_norm, mlp_bias=False), experts=experts)


def _read_llama4_layers(config: ConfigReader, layer: LayerConfig) -> tuple[LayerConfig, ...]:
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


def _convert_llama4(sources: TensorSources, config: ConfigReader) -> TensorSources:
    """Deinterleaves rotary pairs, adds weights of 1 for the query and key norms, and splits the experts.

    Llama 4 applies the norms after the rotation. The order does not matter: a rotation preserves the norm, and the
    weights are all 1.
    """
    layer = _read_llama4_layer(config)
    sources = tensors.rename(tensors.select_text_model(sources), {".feed_forward.": ".mlp."})
    deinterleave = partial(tensors.deinterleave_rotary_pairs, head_dim=layer.head_dim)
    sources = tensors.transform(sources, (".q_proj.", ".k_proj."), deinterleave)
    for i, own in enumerate(_read_llama4_layers(config, layer)):
        if own.qk_norm:
            names = (f"model.layers.{i}.self_attn.{name}.weight" for name in ("q_norm", "k_norm"))
            sources |= dict.fromkeys(names, TensorSource((layer.head_dim,), lambda: torch.ones(layer.head_dim)))
    return tensors.split_experts(sources, interleaved=False)


GEMMA3 = Family("gemma3_text", read_gemma3_layer, _convert_gemma3, scale_embeddings=True)
GEMMA4 = Family(
    "gemma4_text",
    read_gemma4_layer,
    _convert_gemma4,
    read_layers=read_gemma4_layers,
    transformers_fields=GEMMA4_UNSUPPORTED,
    scale_embeddings=True,
    logit_softcapping=True,
)
LLAMA4 = Family(
    "llama4_text", _read_llama4_layer, _convert_llama4, read_layers=_read_llama4_layers, chunked_attention=True
)
FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family("llama", ConfigReader.read_layer),
    "MistralForCausalLM": Family("mistral", _read_unbiased_layer, sliding_by_default=True),
    "Qwen2ForCausalLM": Family("qwen2", _read_qwen2_layer),
    "Qwen3ForCausalLM": Family("qwen3", _read_qwen3_layer),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe",
        _read_qwen3_moe_layer,
        lambda sources, _: tensors.rename(sources, {".mlp.gate.": ".mlp.router."}),
        sliding_by_default=True,
    ),
    "Phi3ForCausalLM": Family(
        "phi3", _read_unbiased_layer, _convert_phi3, sliding_by_default=True, partial_rotary=True
    ),
    "GptOssForCausalLM": Family(
        "gpt_oss", _read_gpt_oss_layer, lambda sources, _: tensors.split_experts(sources), quant_methods=(FP8, MXFP4)
    ),
    "Gemma3ForCausalLM": GEMMA3,
    "Gemma3ForConditionalGeneration": GEMMA3,
    "Gemma4ForCausalLM": GEMMA4,
    "Gemma4ForConditionalGeneration": GEMMA4,
    "Llama4ForCausalLM": LLAMA4,
    "Llama4ForConditionalGeneration": LLAMA4,
}


def get_family(values: dict[str, Any], source: Path) -> Family | None:
    """Returns None for a causal language model that runs through transformers."""
    names = values.get("architectures") or ["none named"]
    architecture = names[0] if isinstance(names, list) else names
    if isinstance(architecture, str) and architecture in FAMILIES:
        return FAMILIES[architecture]
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        if architecture == name or (isinstance(name, tuple) and architecture in name):
            return None
    raise UserError(
        f"{source}: architecture {architecture!r} is not supported; supported: {', '.join(FAMILIES)}, "
        "and, slower, every causal language model of the installed transformers"
    )


def read_text_config(values: dict[str, Any], source: Path, family: Family) -> ConfigReader:
    """Returns the text model's fields with all defaults. Multimodal models have them in `text_config`."""
    if values["architectures"][0].endswith("ForConditionalGeneration"):
        values = ConfigReader(values, source).section("text_config").values
    if type(tuning := values.get("attn_temperature_tuning")) is int:  # transformers expects a bool
        values = {**values, "attn_temperature_tuning": bool(tuning)}
    return fill_defaults({**values, "model_type": family.model_type}, source)


def _read_quant_method(values: dict[str, Any], source: Path, family: Family) -> str | None:
    """Returns the name of a supported method of quantization, or None if the weights are not quantized."""
    if not values.get("quantization_config"):
        return None
    quantization = ConfigReader(values, source).section("quantization_config")
    method = quantization.get("quant_method", str, "unnamed")
    if method not in family.quant_methods:
        supported = ", ".join(family.quant_methods)
        raise UserError(f"{source}: quantization_config {method!r} is not supported; supported here: {supported}")
    if method == FP8 and len(quantization.int_list("weight_block_size") or ()) != 2:
        raise UserError(f"{source}: FP8 weights without weight_block_size are not supported")
    return method


def convert_weights(
    sources: TensorSources, values: dict[str, Any], source: Path, keep_mxfp4: bool = False
) -> TensorSources:
    """Converts a file's tensors to the names and formats of `Decoder`."""
    family = get_family(values, source)
    assert family is not None
    if _read_quant_method(values, source, family) == FP8:
        sources = tensors.dequantize_fp8(sources, tuple(values["quantization_config"]["weight_block_size"]))
    if keep_mxfp4:
        return tensors.split_experts(sources, keep_mxfp4=True)
    return family.convert_weights(sources, read_text_config(values, source, family))


def read_decoder_config(
    values: dict[str, Any], source: Path, skip_layers: bool = False, keep_mxfp4: bool = False
) -> DecoderConfig:
    """Translates config.json.

    `skip_layers`: the layers will not run, so their features need no support. `keep_mxfp4`: experts that are stored in
    MXFP4 stay packed, if their sizes are multiples of its block.
    """
    family = get_family(values, source)
    if family is None:
        return _read_transformers_config(values, source)
    quant_method, config = _read_quant_method(values, source, family), read_text_config(values, source, family)
    uses_transformers = any(config.values.get(name) for name in family.transformers_fields) and not skip_layers
    if uses_transformers and quant_method is not None:
        raise config.error("quantized weights are not supported in a target that runs through transformers")
    num_layers, layer = config.size("num_hidden_layers"), family.read_layer(config)
    experts = layer.experts
    if keep_mxfp4 and experts is not None and quant_method == MXFP4:
        packed = layer.hidden_size % BLOCK == 0 and experts.intermediate_size % BLOCK == 0
        layer = replace(layer, experts=replace(experts, mxfp4=packed))
    temperature = softcapping = None
    if config.values.get("attn_temperature_tuning"):
        scale = config.size("floor_scale", maximum=2**31 - 1)
        temperature = AttentionTemperature(scale, config.get("attn_scale", float))
    if family.logit_softcapping:
        softcapping = config.optional_positive("final_logit_softcapping")
    layers = family.read_layers(config, layer)
    rope, local_rope = _read_ropes(config, family)
    same_head_dims = len({each.head_dim for each in layers}) < 2
    return DecoderConfig(
        family=family.model_type,
        vocab_size=config.size("vocab_size"),
        num_layers=num_layers,
        layer=layer,
        rope=rope,
        max_positions=min(config.max_positions, MAX_POSITIONS),
        tie_word_embeddings=config.get("tie_word_embeddings", bool, False),
        windows=config.read_windows(num_layers, family.sliding_by_default, family.chunked_attention),
        local_rope=None if local_rope == rope and same_head_dims else local_rope,
        embedding_scale=layer.hidden_size**0.5 if family.scale_embeddings else 1.0,
        layers=layers if set(layers) != {layer} else (),
        final_logit_softcapping=softcapping,
        attention_temperature=temperature,
        uses_transformers=uses_transformers,
    )


def _read_transformers_config(values: dict[str, Any], source: Path) -> DecoderConfig:
    config = build_transformers_config(values, source)
    # Attributes instead of JSON fields, since families use different field names for these sizes.
    names = (*TRANSFORMERS_FIELDS, *TRANSFORMERS_UNSUPPORTED)
    found = {name: getattr(config, name, None) for name in names}
    if getattr(config, "use_sliding_window", True) is not False:
        found["sliding_window"] = getattr(config, "sliding_window", None)
    reader = ConfigReader(found | {"intermediate_size": getattr(config, "intermediate_size", None) or 1}, source)
    for name in TRANSFORMERS_UNSUPPORTED:
        if reader.values[name]:
            raise reader.error(f"{name} is not supported in a target that runs through transformers")
    if values.get("quantization_config"):
        raise reader.error("quantized weights are not supported in a target that runs through transformers")
    num_layers = reader.size("num_hidden_layers")
    return DecoderConfig(
        family=str(config.model_type),
        vocab_size=reader.size("vocab_size"),
        num_layers=num_layers,
        layer=reader.read_layer(),
        rope=RopeConfig(),
        max_positions=reader.max_positions,
        tie_word_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
        windows=reader.read_windows(num_layers, sliding_by_default=True),
        uses_transformers=True,
    )


def _read_ropes(config: ConfigReader, family: Family) -> tuple[RopeConfig, RopeConfig]:
    """Rotary embeddings of full-attention layers and of sliding ones."""
    parameters = config.section("rope_parameters")
    if "full_attention" not in parameters.values:
        rope = config.read_rope(of_target=family.partial_rotary)
        return rope, rope
    full, sliding = (parameters.section(kind) for kind in ("full_attention", "sliding_attention"))
    if full.get("rope_type", str, "default") == "proportional":
        return full.read_proportional_rope(), config.read_rope(sliding)
    return config.read_rope(full), config.read_rope(sliding)
