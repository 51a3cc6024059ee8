"""The families a decoder can be: what their config.json says, as a `DecoderConfig`, and how their files differ.

A family is data: which features its layers have, and which steps of `published.py` lead from its tensors to ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from peagle.checkpoints import gemma, llama4
from peagle.checkpoints import weight_conversion as published
from peagle.checkpoints.config_reader import (
    ConfigReader,
    completed,
    experts_config,
    layer_config,
    positions,
    proportional_rope,
    rope_config,
)
from peagle.checkpoints.transformers_model import foreign_config, is_foreign
from peagle.checkpoints.weight_conversion import TensorSources
from peagle.config import AttentionTemperature, DecoderConfig, LayerConfig, RopeConfig, Window
from peagle.errors import UserError
from peagle.kernels.moe.mxfp4 import BLOCK

FP8 = "fp8"


@dataclass(frozen=True)
class Family:
    model_type: str  # transformers' name for its config
    layer: Callable[[ConfigReader], LayerConfig]
    adapt: Callable[[TensorSources, ConfigReader], TensorSources] = lambda sources, fields: sources
    slides_everywhere: bool = False  # where no `layer_types` says which layers slide
    scaled_embeddings: bool = False  # by the root of the width
    nested: str | None = None  # where config.json keeps the text model's fields
    turns_in_part: bool = False  # `adapt` sees to heads of which only a part is turned
    packed: tuple[str, ...] = ()  # ways of packing weights into few bits that `adapt` undoes, beside FP8
    adapt_packed: Callable[[TensorSources, ConfigReader], TensorSources] | None = (
        None  # `adapt` that leaves experts in few bits
    )
    layers: Callable[[ConfigReader, LayerConfig], tuple[LayerConfig, ...]] = (
        lambda fields, layer: ()
    )  # if they may differ
    missing: Callable[[ConfigReader], str | None] = lambda fields: None  # what only transformers' own modules have
    windows: Callable[[ConfigReader], tuple[Window, ...]] | None = None  # None: what `sliding_windows` finds
    mend: Callable[[dict[str, Any]], dict[str, Any]] = lambda values: values  # fields that transformers reads no more
    reach: Callable[[ConfigReader], int] = positions  # how long texts may be
    heat: Callable[[ConfigReader], AttentionTemperature | None] = lambda fields: None
    proportional: bool = False  # heads may be turned in part in the way that needs nothing of `adapt`
    caps_logits: bool = False  # if its config says so


def _same_bias(fields: ConfigReader) -> LayerConfig:
    bias = fields.get("attention_bias", bool, False)
    mlp_bias = fields.get("mlp_bias", bool, False)
    return layer_config(fields, qkv_bias=bias, out_bias=bias, mlp_bias=mlp_bias, qk_norm=False)


def _no_bias(fields: ConfigReader) -> LayerConfig:
    return layer_config(fields, qkv_bias=False, out_bias=False, mlp_bias=False, qk_norm=False)


def _qkv_bias(fields: ConfigReader) -> LayerConfig:
    return layer_config(fields, qkv_bias=True, out_bias=False, mlp_bias=False, qk_norm=False)


def _qk_norms(fields: ConfigReader) -> LayerConfig:
    bias = fields.get("attention_bias", bool, False)
    return layer_config(fields, qkv_bias=bias, out_bias=bias, mlp_bias=False, qk_norm=True)


def _qwen3_moe(fields: ConfigReader) -> LayerConfig:
    if fields.values.get("mlp_only_layers") or fields.size("decoder_sparse_step", 1) != 1:
        raise fields.error("layers without experts among layers with them (mlp_only_layers, decoder_sparse_step)")
    experts = experts_config(fields, "moe_intermediate_size", norm_topk_prob=fields.get("norm_topk_prob", bool, False))
    return replace(_qk_norms(fields), experts=experts)


def _qwen3_moe_names(sources: TensorSources, fields: ConfigReader) -> TensorSources:
    return published.renamed(sources, {".mlp.gate.": ".mlp.router."})


def _gpt_oss(fields: ConfigReader) -> LayerConfig:
    clamp = fields.positive("swiglu_alpha", 1.702), fields.positive("swiglu_limit", 7.0)
    experts = experts_config(fields, "intermediate_size", bias=True, clamp=clamp)
    return replace(_same_bias(fields), attention_sinks=True, experts=experts)


def _gpt_oss_tensors(sources: TensorSources, fields: ConfigReader) -> TensorSources:
    return published.split_experts(sources)


def _gpt_oss_packed(sources: TensorSources, fields: ConfigReader) -> TensorSources:
    return published.split_experts(sources, keep_mxfp4=True)


def _phi3_tensors(sources: TensorSources, fields: ConfigReader) -> TensorSources:
    """Merged products as several, and heads turned in part as if they were turned whole."""
    layer, rope = _no_bias(fields), rope_config(fields, more=True)
    q, kv, inner = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim, layer.intermediate_size
    sources = published.rows_apart(sources, ".qkv_proj.", {"q_proj": q, "k_proj": kv, "v_proj": kv})
    sources = published.rows_apart(sources, ".gate_up_proj.", {"gate_proj": inner, "up_proj": inner})
    if rope.partial_rotary_factor == 1.0:
        return sources
    turned = int(layer.head_dim * rope.partial_rotary_factor)
    return published.changed(
        sources,
        lambda name: ".q_proj." in name or ".k_proj." in name,
        lambda w: published.pairs_apart(w, layer.head_dim, turned),
    )


GEMMA3 = Family("gemma3_text", gemma.gemma3, gemma.gemma3_tensors, scaled_embeddings=True)
GEMMA4 = Family(
    "gemma4_text",
    gemma.gemma4,
    gemma.gemma4_tensors,
    scaled_embeddings=True,
    layers=gemma.gemma4_layers,
    missing=gemma.gemma4_missing,
    proportional=True,
    caps_logits=True,
)
LLAMA4 = Family(
    "llama4_text",
    llama4.layer,
    llama4.tensors,
    layers=llama4.layers,
    windows=llama4.windows,
    mend=llama4.mended,
    reach=llama4.reach,
    heat=llama4.heat,
)
FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family("llama", _same_bias),
    "MistralForCausalLM": Family("mistral", _no_bias, slides_everywhere=True),
    "Qwen2ForCausalLM": Family("qwen2", _qkv_bias),
    "Qwen3ForCausalLM": Family("qwen3", _qk_norms),
    "Qwen3MoeForCausalLM": Family("qwen3_moe", _qwen3_moe, _qwen3_moe_names, slides_everywhere=True),
    "Phi3ForCausalLM": Family("phi3", _no_bias, _phi3_tensors, slides_everywhere=True, turns_in_part=True),
    "GptOssForCausalLM": Family("gpt_oss", _gpt_oss, _gpt_oss_tensors, packed=("mxfp4",), adapt_packed=_gpt_oss_packed),
    "Gemma3ForCausalLM": GEMMA3,
    "Gemma3ForConditionalGeneration": replace(GEMMA3, nested="text_config"),
    "Gemma4ForCausalLM": GEMMA4,
    "Gemma4ForConditionalGeneration": replace(GEMMA4, nested="text_config"),
    "Llama4ForCausalLM": LLAMA4,
    "Llama4ForConditionalGeneration": replace(LLAMA4, nested="text_config"),
}


def named_architecture(values: dict[str, Any]) -> Any:
    names = values.get("architectures") or ["none named"]
    return names[0] if isinstance(names, list) else names


def family_of(values: dict[str, Any], source: Path) -> Family:
    architecture = named_architecture(values)
    if not isinstance(architecture, str) or architecture not in FAMILIES:
        raise UserError(
            f"{source}: architecture {architecture!r} is not supported; supported: {', '.join(FAMILIES)}, "
            "and, slower, what the installed transformers has as a causal language model"
        )
    return FAMILIES[architecture]


def foreign(values: dict[str, Any]) -> bool:
    """Not one of ours, but transformers has it."""
    architecture = named_architecture(values)
    return isinstance(architecture, str) and architecture not in FAMILIES and is_foreign(architecture)


def read_fields(values: dict[str, Any], source: Path) -> ConfigReader:
    """What config.json says of the text model, with what its writer left out."""
    family = family_of(values, source)
    quantization(values, source)
    if family.nested is not None:
        values = ConfigReader(values, source).section(family.nested).values
    return completed({**family.mend(values), "model_type": family.model_type}, source)


def quantization(values: dict[str, Any], source: Path) -> ConfigReader | None:
    """How weights are packed, where they are, and in a way that can be undone."""
    if not values.get("quantization_config"):
        return None
    packing = ConfigReader(values, source).section("quantization_config")
    method, can = packing.get("quant_method", str, "without a name"), (FP8, *family_of(values, source).packed)
    if method not in can:
        raise UserError(
            f"{source}: quantized weights (quantization_config, {method}) are not supported; "
            f"supported here: {', '.join(can)}"
        )
    if method == FP8 and len(packing.int_list("weight_block_size") or ()) != 2:
        raise UserError(f"{source}: FP8 weights without weight_block_size are not supported")
    return packing


def packs_experts(values: dict[str, Any], source: Path) -> bool:
    """Whether config.json says that experts' weights are in few bits, in a way that kernels read as it is."""
    if foreign(values) or family_of(values, source).adapt_packed is None:
        return False
    packing = quantization(values, source)
    return packing is not None and packing.get("quant_method", str) != FP8


def with_packed_experts(cfg: DecoderConfig) -> DecoderConfig:
    """The same where widths are none that can be packed."""
    layer, experts = cfg.layer, cfg.layer.experts
    if experts is None or layer.hidden_size % BLOCK or experts.intermediate_size % BLOCK:
        return cfg
    return replace(cfg, layer=replace(layer, experts=replace(experts, mxfp4=True)))


def adapted(sources: TensorSources, values: dict[str, Any], source: Path, packed: bool = False) -> TensorSources:
    """A file's tensors as the decoder wants them; `packed`: one that `packs_experts` and keeps them so."""
    packing = quantization(values, source)
    if packing is not None and packing.get("quant_method", str) == FP8:
        rows, columns = packing.int_list("weight_block_size") or (1, 1)
        sources = published.unpacked_fp8(sources, (rows, columns))
    family = family_of(values, source)
    adapt = family.adapt_packed if packed and family.adapt_packed is not None else family.adapt
    return adapt(sources, read_fields(values, source))


def read_decoder_config(values: dict[str, Any], source: Path, skip_layers: bool = False) -> DecoderConfig:
    """`skip_layers`: of a target whose layers nobody will run."""
    if foreign(values):
        return foreign_config(values, source)
    family, fields = family_of(values, source), read_fields(values, source)
    theirs = family.missing(fields) is not None and not skip_layers
    if theirs and values.get("quantization_config"):
        raise fields.error("quantized weights are not supported in a target that runs through transformers")
    num_layers, layer = fields.size("num_hidden_layers"), family.layer(fields)
    if family.windows is not None:
        windows = family.windows(fields)
    else:
        windows = sliding_windows(fields, num_layers, family.slides_everywhere)
    layers = family.layers(fields, layer)
    (rope, local_rope), alike = ropes(fields, family), len({own.head_dim for own in layers}) < 2
    return DecoderConfig(
        family=family.model_type,
        vocab_size=fields.size("vocab_size"),
        num_layers=num_layers,
        layer=layer,
        rope=rope,
        max_positions=family.reach(fields),
        tie_word_embeddings=fields.get("tie_word_embeddings", bool, False),
        windows=windows,
        local_rope=None if local_rope == rope and alike else local_rope,
        embedding_scale=layer.hidden_size**0.5 if family.scaled_embeddings else 1.0,
        layers=layers if set(layers) != {layer} else (),
        final_logit_softcapping=fields.optional_positive("final_logit_softcapping") if family.caps_logits else None,
        attention_temperature=family.heat(fields),
        uses_transformers=theirs,
    )


def unsupported_feature(values: dict[str, Any], source: Path) -> str:
    """What a target of a family of ours has that keeps it from running as one; "" of other families."""
    return "" if foreign(values) else family_of(values, source).missing(read_fields(values, source)) or ""


def ropes(fields: ConfigReader, family: Family) -> tuple[RopeConfig, RopeConfig]:
    """Of layers that see everything, and of layers with a window: some families keep them apart."""
    scaling = fields.section("rope_parameters")
    if "full_attention" not in scaling.values:
        rope = rope_config(fields, more=family.turns_in_part)
        return rope, rope
    full, sliding = (scaling.section(kind) for kind in ("full_attention", "sliding_attention"))
    if family.proportional and full.get("rope_type", str, "default") == "proportional":
        return proportional_rope(full), rope_config(fields, sliding)
    return rope_config(fields, full), rope_config(fields, sliding)


def sliding_windows(fields: ConfigReader, num_layers: int, everywhere: bool = False) -> tuple[int | None, ...]:
    """Some families slide in every layer; the others where `layer_types` says so."""
    window = fields.optional_size("sliding_window")
    default = "sliding_attention" if everywhere else "full_attention"
    kinds = fields.values.get("layer_types") or [default] * num_layers
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise fields.error(f"layer_types must name {num_layers} layers")
    unknown = [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")]
    if unknown:
        raise fields.error(f"layer type {unknown[0]!r} is not supported")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
