"""The model families that `Decoder` runs: how to read their config.json and convert their tensors.

A family is data: readers of its config, and the steps of `weight_conversion.py` that its tensors need.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from peagle.checkpoints import gemma, llama4
from peagle.checkpoints.config_reader import (
    ConfigReader,
    fill_defaults,
    read_experts_config,
    read_layer_config,
    read_layer_types,
    read_max_positions,
    read_proportional_rope,
    read_rope_config,
)
from peagle.checkpoints.transformers_model import is_transformers_causal_lm, read_transformers_config
from peagle.checkpoints.weight_conversion import (
    TensorSources,
    dequantize_fp8,
    rename_tensors,
    split_experts,
    split_rows,
    spread_rotary_pairs,
    transform_tensors,
)
from peagle.config import AttentionTemperature, DecoderConfig, LayerConfig, RopeConfig, Window
from peagle.errors import UserError
from peagle.kernels.moe.mxfp4 import BLOCK

FP8 = "fp8"


@dataclass(frozen=True)
class Family:
    model_type: str  # transformers' name of its config
    read_layer: Callable[[ConfigReader], LayerConfig]
    convert_weights: Callable[[TensorSources, ConfigReader], TensorSources] = lambda sources, config: sources
    # The same, but experts stay in MXFP4.
    convert_weights_mxfp4: Callable[[TensorSources, ConfigReader], TensorSources] | None = None
    # Per-layer configs; an empty tuple if all layers are equal.
    read_layers: Callable[[ConfigReader, LayerConfig], tuple[LayerConfig, ...]] = lambda config, layer: ()
    read_windows: Callable[[ConfigReader], tuple[Window, ...]] | None = None  # None: `read_sliding_windows`
    read_max_positions: Callable[[ConfigReader], int] = read_max_positions
    read_attention_temperature: Callable[[ConfigReader], AttentionTemperature | None] = lambda config: None
    # A feature of this config that only transformers implements.
    find_unsupported: Callable[[ConfigReader], str | None] = lambda config: None
    fix_config: Callable[[dict[str, Any]], dict[str, Any]] = lambda values: values  # for fields transformers rejects
    text_section: str | None = None  # the section of config.json that holds the text model
    quant_methods: tuple[str, ...] = ()  # supported besides FP8
    sliding_by_default: bool = False  # all layers slide if there is no `layer_types`
    scale_embeddings: bool = False  # by the square root of the hidden size
    partial_rotary: bool = False  # `convert_weights` reorders partially rotated heads
    proportional_rope: bool = False
    logit_softcapping: bool = False


def _read_llama_layer(config: ConfigReader) -> LayerConfig:
    bias, mlp_bias = config.get("attention_bias", bool, False), config.get("mlp_bias", bool, False)
    return read_layer_config(config, qkv_bias=bias, out_bias=bias, mlp_bias=mlp_bias, qk_norm=False)


def _read_mistral_layer(config: ConfigReader) -> LayerConfig:
    return read_layer_config(config, qkv_bias=False, out_bias=False, mlp_bias=False, qk_norm=False)


def _read_qwen2_layer(config: ConfigReader) -> LayerConfig:
    return read_layer_config(config, qkv_bias=True, out_bias=False, mlp_bias=False, qk_norm=False)


def _read_qwen3_layer(config: ConfigReader) -> LayerConfig:
    bias = config.get("attention_bias", bool, False)
    return read_layer_config(config, qkv_bias=bias, out_bias=bias, mlp_bias=False, qk_norm=True)


def _read_qwen3_moe_layer(config: ConfigReader) -> LayerConfig:
    if config.values.get("mlp_only_layers") or config.size("decoder_sparse_step", 1) != 1:
        raise config.error("dense layers between MoE layers (mlp_only_layers, decoder_sparse_step) are not supported")
    norm_topk_prob = config.get("norm_topk_prob", bool, False)
    experts = read_experts_config(config, "moe_intermediate_size", norm_topk_prob=norm_topk_prob)
    return replace(_read_qwen3_layer(config), experts=experts)


def _convert_qwen3_moe(sources: TensorSources, config: ConfigReader) -> TensorSources:
    return rename_tensors(sources, {".mlp.gate.": ".mlp.router."})


def _read_gpt_oss_layer(config: ConfigReader) -> LayerConfig:
    clamp = config.positive("swiglu_alpha", 1.702), config.positive("swiglu_limit", 7.0)
    experts = read_experts_config(config, "intermediate_size", bias=True, clamp=clamp)
    return replace(_read_llama_layer(config), attention_sinks=True, experts=experts)


def _convert_gpt_oss(sources: TensorSources, config: ConfigReader, keep_mxfp4: bool = False) -> TensorSources:
    return split_experts(sources, keep_mxfp4=keep_mxfp4)


def _convert_phi3(sources: TensorSources, config: ConfigReader) -> TensorSources:
    """Splits merged projections, and reorders partially rotated heads."""
    layer, rope = _read_mistral_layer(config), read_rope_config(config, of_target=True)
    q, kv = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    mlp = layer.intermediate_size
    sources = split_rows(sources, ".qkv_proj.", {"q_proj": q, "k_proj": kv, "v_proj": kv})
    sources = split_rows(sources, ".gate_up_proj.", {"gate_proj": mlp, "up_proj": mlp})
    if rope.partial_rotary_factor == 1.0:
        return sources
    rotary_dim = int(layer.head_dim * rope.partial_rotary_factor)
    return transform_tensors(
        sources,
        lambda name: ".q_proj." in name or ".k_proj." in name,
        lambda weight: spread_rotary_pairs(weight, layer.head_dim, rotary_dim),
    )


GPT_OSS = Family(
    "gpt_oss",
    _read_gpt_oss_layer,
    _convert_gpt_oss,
    convert_weights_mxfp4=partial(_convert_gpt_oss, keep_mxfp4=True),
    quant_methods=("mxfp4",),
)
GEMMA3 = Family("gemma3_text", gemma.read_gemma3_layer, gemma.convert_gemma3, scale_embeddings=True)
GEMMA4 = Family(
    "gemma4_text",
    gemma.read_gemma4_layer,
    gemma.convert_gemma4,
    read_layers=gemma.read_gemma4_layers,
    find_unsupported=gemma.find_gemma4_unsupported,
    scale_embeddings=True,
    proportional_rope=True,
    logit_softcapping=True,
)
LLAMA4 = Family(
    "llama4_text",
    llama4.read_layer,
    llama4.convert_weights,
    read_layers=llama4.read_layers,
    read_windows=llama4.read_windows,
    read_max_positions=llama4.read_max_positions,
    read_attention_temperature=llama4.read_attention_temperature,
    fix_config=llama4.fix_config,
)
FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family("llama", _read_llama_layer),
    "MistralForCausalLM": Family("mistral", _read_mistral_layer, sliding_by_default=True),
    "Qwen2ForCausalLM": Family("qwen2", _read_qwen2_layer),
    "Qwen3ForCausalLM": Family("qwen3", _read_qwen3_layer),
    "Qwen3MoeForCausalLM": Family("qwen3_moe", _read_qwen3_moe_layer, _convert_qwen3_moe, sliding_by_default=True),
    "Phi3ForCausalLM": Family("phi3", _read_mistral_layer, _convert_phi3, sliding_by_default=True, partial_rotary=True),
    "GptOssForCausalLM": GPT_OSS,
    "Gemma3ForCausalLM": GEMMA3,
    "Gemma3ForConditionalGeneration": replace(GEMMA3, text_section="text_config"),
    "Gemma4ForCausalLM": GEMMA4,
    "Gemma4ForConditionalGeneration": replace(GEMMA4, text_section="text_config"),
    "Llama4ForCausalLM": LLAMA4,
    "Llama4ForConditionalGeneration": replace(LLAMA4, text_section="text_config"),
}


def get_architecture(values: dict[str, Any]) -> Any:
    names = values.get("architectures") or ["none named"]
    return names[0] if isinstance(names, list) else names


def get_family(values: dict[str, Any], source: Path) -> Family:
    architecture = get_architecture(values)
    if not isinstance(architecture, str) or architecture not in FAMILIES:
        raise UserError(
            f"{source}: architecture {architecture!r} is not supported; supported: {', '.join(FAMILIES)}, "
            "and, slower, every causal language model of the installed transformers"
        )
    return FAMILIES[architecture]


def is_transformers_only(values: dict[str, Any]) -> bool:
    """Whether the architecture is not in FAMILIES, but in transformers."""
    architecture = get_architecture(values)
    return isinstance(architecture, str) and architecture not in FAMILIES and is_transformers_causal_lm(architecture)


def read_text_config(values: dict[str, Any], source: Path) -> ConfigReader:
    """Returns the text model's fields with all defaults."""
    family = get_family(values, source)
    read_quantization(values, source)
    if family.text_section is not None:
        values = ConfigReader(values, source).section(family.text_section).values
    return fill_defaults({**family.fix_config(values), "model_type": family.model_type}, source)


def read_quantization(values: dict[str, Any], source: Path) -> ConfigReader | None:
    """Returns quantization_config, or None; raises a UserError for methods that are not supported."""
    if not values.get("quantization_config"):
        return None
    quantization = ConfigReader(values, source).section("quantization_config")
    method = quantization.get("quant_method", str, "without a name")
    supported = (FP8, *get_family(values, source).quant_methods)
    if method not in supported:
        raise UserError(
            f"{source}: quantized weights (quantization_config, {method}) are not supported; "
            f"supported here: {', '.join(supported)}"
        )
    if method == FP8 and len(quantization.int_list("weight_block_size") or ()) != 2:
        raise UserError(f"{source}: FP8 weights without weight_block_size are not supported")
    return quantization


def has_mxfp4_config(values: dict[str, Any], source: Path) -> bool:
    """Whether config.json declares experts in MXFP4, which kernels can use without dequantization."""
    if is_transformers_only(values) or get_family(values, source).convert_weights_mxfp4 is None:
        return False
    quantization = read_quantization(values, source)
    return quantization is not None and quantization.get("quant_method", str) != FP8


def keep_mxfp4_experts(cfg: DecoderConfig) -> DecoderConfig:
    """Marks the experts as MXFP4, if their sizes are multiples of MXFP4's block."""
    layer, experts = cfg.layer, cfg.layer.experts
    if experts is None or layer.hidden_size % BLOCK or experts.intermediate_size % BLOCK:
        return cfg
    return replace(cfg, layer=replace(layer, experts=replace(experts, mxfp4=True)))


def convert_weights(
    sources: TensorSources, values: dict[str, Any], source: Path, keep_mxfp4: bool = False
) -> TensorSources:
    """Converts a file's tensors to the names and formats of `Decoder`."""
    quantization = read_quantization(values, source)
    if quantization is not None and quantization.get("quant_method", str) == FP8:
        rows, columns = quantization.int_list("weight_block_size") or (1, 1)
        sources = dequantize_fp8(sources, (rows, columns))
    family = get_family(values, source)
    convert = family.convert_weights
    if keep_mxfp4 and family.convert_weights_mxfp4 is not None:
        convert = family.convert_weights_mxfp4
    return convert(sources, read_text_config(values, source))


def read_decoder_config(values: dict[str, Any], source: Path, skip_layers: bool = False) -> DecoderConfig:
    """Translates config.json. `skip_layers`: the layers will not run, so their features need no support."""
    if is_transformers_only(values):
        return read_transformers_config(values, source)
    family, config = get_family(values, source), read_text_config(values, source)
    uses_transformers = family.find_unsupported(config) is not None and not skip_layers
    if uses_transformers and values.get("quantization_config"):
        raise config.error("quantized weights are not supported in a target that runs through transformers")
    num_layers, layer = config.size("num_hidden_layers"), family.read_layer(config)
    if family.read_windows is not None:
        windows = family.read_windows(config)
    else:
        windows = read_sliding_windows(config, num_layers, family.sliding_by_default)
    layers = family.read_layers(config, layer)
    rope, local_rope = _read_ropes(config, family)
    same_head_dims = len({each.head_dim for each in layers}) < 2
    softcapping = config.optional_positive("final_logit_softcapping") if family.logit_softcapping else None
    return DecoderConfig(
        family=family.model_type,
        vocab_size=config.size("vocab_size"),
        num_layers=num_layers,
        layer=layer,
        rope=rope,
        max_positions=family.read_max_positions(config),
        tie_word_embeddings=config.get("tie_word_embeddings", bool, False),
        windows=windows,
        local_rope=None if local_rope == rope and same_head_dims else local_rope,
        embedding_scale=layer.hidden_size**0.5 if family.scale_embeddings else 1.0,
        layers=layers if set(layers) != {layer} else (),
        final_logit_softcapping=softcapping,
        attention_temperature=family.read_attention_temperature(config),
        uses_transformers=uses_transformers,
    )


def find_unsupported_feature(values: dict[str, Any], source: Path) -> str:
    """The feature for which a target of a supported family runs through transformers; "" if there is none."""
    if is_transformers_only(values):
        return ""
    return get_family(values, source).find_unsupported(read_text_config(values, source)) or ""


def _read_ropes(config: ConfigReader, family: Family) -> tuple[RopeConfig, RopeConfig]:
    """Rotary embeddings of full-attention layers and of sliding ones."""
    parameters = config.section("rope_parameters")
    if "full_attention" not in parameters.values:
        rope = read_rope_config(config, of_target=family.partial_rotary)
        return rope, rope
    full, sliding = (parameters.section(kind) for kind in ("full_attention", "sliding_attention"))
    if family.proportional_rope and full.get("rope_type", str, "default") == "proportional":
        return read_proportional_rope(full), read_rope_config(config, sliding)
    return read_rope_config(config, full), read_rope_config(config, sliding)


def read_sliding_windows(
    config: ConfigReader, num_layers: int, sliding_by_default: bool = False
) -> tuple[int | None, ...]:
    """Returns the window of each layer, from `sliding_window` and `layer_types`."""
    window = config.optional_size("sliding_window")
    default = "sliding_attention" if sliding_by_default else "full_attention"
    layer_types = read_layer_types(config, num_layers, default)
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)
