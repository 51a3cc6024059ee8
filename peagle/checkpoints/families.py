"""The families a decoder can be: what their config.json says, as a `DecoderConfig`, and how their files differ.

A family is data: which features its layers have, and which steps of `published.py` lead from its tensors to ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from peagle.checkpoints import published
from peagle.checkpoints.fields import Fields, completed, layer_config, positions, rope_config
from peagle.checkpoints.foreign import foreign_config, is_foreign
from peagle.checkpoints.published import Sources
from peagle.config import DecoderConfig, ExpertsConfig, LayerConfig, RopeConfig
from peagle.errors import UserError
from peagle.kernels.mxfp4 import BLOCK

GELU = "gelu_pytorch_tanh"
FP8 = "fp8"
PLAIN_THETA = 1e6  # of a drafter for a target whose own positions it cannot have


@dataclass(frozen=True)
class Family:
    model_type: str  # transformers' name for its config
    layer: Callable[[Fields], LayerConfig]
    adapt: Callable[[Sources, Fields], Sources] = lambda sources, fields: sources
    slides_everywhere: bool = False  # where no `layer_types` says which layers slide
    scaled_embeddings: bool = False  # by the root of the width
    nested: str | None = None  # where config.json keeps the text model's fields
    turns_in_part: bool = False  # `adapt` sees to heads of which only a part is turned
    packed: tuple[str, ...] = ()  # ways of packing weights into few bits that `adapt` undoes, beside FP8
    adapt_packed: Callable[[Sources, Fields], Sources] | None = None  # `adapt` that leaves experts in few bits


def _same_bias(fields: Fields) -> LayerConfig:
    bias = fields.get("attention_bias", bool, False)
    mlp_bias = fields.get("mlp_bias", bool, False)
    return layer_config(fields, qkv_bias=bias, out_bias=bias, mlp_bias=mlp_bias, qk_norm=False)


def _no_bias(fields: Fields) -> LayerConfig:
    return layer_config(fields, qkv_bias=False, out_bias=False, mlp_bias=False, qk_norm=False)


def _qkv_bias(fields: Fields) -> LayerConfig:
    return layer_config(fields, qkv_bias=True, out_bias=False, mlp_bias=False, qk_norm=False)


def _qk_norms(fields: Fields) -> LayerConfig:
    bias = fields.get("attention_bias", bool, False)
    return layer_config(fields, qkv_bias=bias, out_bias=bias, mlp_bias=False, qk_norm=True)


def _experts(fields: Fields, width_field: str, **more: Any) -> ExpertsConfig:
    """transformers keeps the number under the second name, published configs under either."""
    name = "num_experts" if fields.values.get("num_experts") is not None else "num_local_experts"
    count, chosen = fields.size(name), fields.size("num_experts_per_tok")
    if chosen > count:
        raise fields.wrong(f"num_experts_per_tok {chosen} is more than {name} {count}")
    return ExpertsConfig(count, chosen, fields.size(width_field), **more)


def _qwen3_moe(fields: Fields) -> LayerConfig:
    if fields.values.get("mlp_only_layers") or fields.size("decoder_sparse_step", 1) != 1:
        raise fields.wrong("layers without experts among layers with them (mlp_only_layers, decoder_sparse_step)")
    experts = _experts(fields, "moe_intermediate_size", normed=fields.get("norm_topk_prob", bool, False))
    return replace(_qk_norms(fields), experts=experts)


def _qwen3_moe_names(sources: Sources, fields: Fields) -> Sources:
    return published.renamed(sources, {".mlp.gate.": ".mlp.router."})


def _gemma3(fields: Fields) -> LayerConfig:
    for name in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if fields.values.get(name):
            raise fields.wrong(f"{name} is not supported")
    activation = fields.get("hidden_activation", str, GELU)
    if activation != GELU:
        raise fields.wrong(f"hidden_activation {activation!r} is not supported; supported: {GELU}")
    return replace(_qk_norms(fields), activation="gelu_tanh", out_norms=True)


def _gemma3_tensors(sources: Sources, fields: Fields) -> Sources:
    """A norm's weight is stored less 1. How attention scales its scores is put into the queries' norm."""
    names = {
        ".post_attention_layernorm.": ".attention_out_norm.",
        ".pre_feedforward_layernorm.": ".post_attention_layernorm.",
        ".post_feedforward_layernorm.": ".mlp_out_norm.",
    }
    usual, scalar = _gemma3(fields).head_dim, fields.positive("query_pre_attn_scalar")
    sources = published.changed(sources, lambda name: name.endswith("norm.weight"), lambda w: w.float() + 1)
    if scalar != usual:
        more = (usual / scalar) ** 0.5
        sources = published.changed(sources, lambda name: name.endswith(".q_norm.weight"), lambda w: w * more)
    return published.renamed(sources, names)


def _gemma3_text_part(sources: Sources, fields: Fields) -> Sources:
    """Of a model that also sees pictures, in the older order of its names and in the newer one."""
    sources = published.renamed(sources, {"vision_tower.": "", "multi_modal_projector.": ""})
    names = {
        "language_model.model.": "model.",
        "model.language_model.": "model.",
        "language_model.lm_head.": "lm_head.",
    }
    return _gemma3_tensors(published.renamed(sources, names), fields)


def _gemma4(fields: Fields) -> LayerConfig:
    """The sizes that most of its layers have, as a drafter's for it."""
    return _no_bias(fields)


def _gemma4_text_part(sources: Sources, fields: Fields) -> Sources:
    """Unlike Gemma 3's, a norm's weight is what it is."""
    return published.renamed(sources, {"model.language_model.": "model."})


def _gpt_oss(fields: Fields) -> LayerConfig:
    clamp = fields.positive("swiglu_alpha", 1.702), fields.positive("swiglu_limit", 7.0)
    experts = _experts(fields, "intermediate_size", bias=True, clamp=clamp)
    return replace(_same_bias(fields), sinks=True, experts=experts)


def _gpt_oss_tensors(sources: Sources, fields: Fields) -> Sources:
    return published.experts_apart(sources)


def _gpt_oss_packed(sources: Sources, fields: Fields) -> Sources:
    return published.experts_apart(sources, packed=True)


def _phi3_tensors(sources: Sources, fields: Fields) -> Sources:
    """Merged products as several, and heads turned in part as if they were turned whole."""
    layer, rope = _no_bias(fields), rope_config(fields, more=True)
    q, kv, inner = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim, layer.intermediate_size
    sources = published.rows_apart(sources, ".qkv_proj.", {"q_proj": q, "k_proj": kv, "v_proj": kv})
    sources = published.rows_apart(sources, ".gate_up_proj.", {"gate_proj": inner, "up_proj": inner})
    if rope.rotated == 1.0:
        return sources
    turned = int(layer.head_dim * rope.rotated)
    return published.changed(
        sources,
        lambda name: ".q_proj." in name or ".k_proj." in name,
        lambda w: published.pairs_apart(w, layer.head_dim, turned),
    )


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family("llama", _same_bias),
    "MistralForCausalLM": Family("mistral", _no_bias, slides_everywhere=True),
    "Qwen2ForCausalLM": Family("qwen2", _qkv_bias),
    "Qwen3ForCausalLM": Family("qwen3", _qk_norms),
    "Qwen3MoeForCausalLM": Family("qwen3_moe", _qwen3_moe, _qwen3_moe_names, slides_everywhere=True),
    "Phi3ForCausalLM": Family("phi3", _no_bias, _phi3_tensors, slides_everywhere=True, turns_in_part=True),
    "GptOssForCausalLM": Family("gpt_oss", _gpt_oss, _gpt_oss_tensors, packed=("mxfp4",), adapt_packed=_gpt_oss_packed),
    "Gemma3ForCausalLM": Family("gemma3_text", _gemma3, _gemma3_tensors, scaled_embeddings=True),
    "Gemma3ForConditionalGeneration": Family(
        "gemma3_text", _gemma3, _gemma3_text_part, scaled_embeddings=True, nested="text_config"
    ),
}
# Known by their embeddings, last norm and head alone: drafters are trained on states that vLLM computed.
TABLES: dict[str, Family] = {
    "Gemma4ForConditionalGeneration": Family(
        "gemma4_text", _gemma4, _gemma4_text_part, scaled_embeddings=True, nested="text_config"
    ),
}


def named_architecture(values: dict[str, Any]) -> Any:
    names = values.get("architectures") or ["none named"]
    return names[0] if isinstance(names, list) else names


def family_of(values: dict[str, Any], source: Path) -> Family:
    architecture = named_architecture(values)
    if isinstance(architecture, str) and architecture in TABLES:
        return TABLES[architecture]
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


def read_fields(values: dict[str, Any], source: Path) -> Fields:
    """What config.json says of the text model, with what its writer left out."""
    family = family_of(values, source)
    quantization(values, source)
    if family.nested is not None:
        values = Fields(values, source).section(family.nested).values
    return completed({**values, "model_type": family.model_type}, source)


def quantization(values: dict[str, Any], source: Path) -> Fields | None:
    """How weights are packed, where they are, and in a way that can be undone."""
    if not values.get("quantization_config"):
        return None
    packing = Fields(values, source).section("quantization_config")
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
    if experts is None or layer.hidden_size % BLOCK or experts.width % BLOCK:
        return cfg
    return replace(cfg, layer=replace(layer, experts=replace(experts, packed=True)))


def adapted(sources: Sources, values: dict[str, Any], source: Path, packed: bool = False) -> Sources:
    """A file's tensors as the decoder wants them; `packed`: one that `packs_experts` and keeps them so."""
    packing = quantization(values, source)
    if packing is not None and packing.get("quant_method", str) == FP8:
        rows, columns = packing.int_list("weight_block_size") or (1, 1)
        sources = published.unpacked_fp8(sources, (rows, columns))
    family = family_of(values, source)
    adapt = family.adapt_packed if packed and family.adapt_packed is not None else family.adapt
    return adapt(sources, read_fields(values, source))


def decoder_config(values: dict[str, Any], source: Path, tables_only: bool = False) -> DecoderConfig:
    """`tables_only`: of a target whose layers nobody will run."""
    architecture = named_architecture(values)
    in_part = isinstance(architecture, str) and architecture in TABLES
    if in_part and not tables_only:
        raise UserError(
            f"{source}: the layers of {architecture} do not run here; vLLM runs them, and `peagle train` "
            "learns from what it writes: --vllm-states DIR --init random --held-out 0"
        )
    if foreign(values) and not in_part:
        return foreign_config(values, source)
    family, fields = family_of(values, source), read_fields(values, source)
    num_layers, layer = fields.size("num_hidden_layers"), family.layer(fields)
    # a drafter turns its heads in the plain way, whatever the target does
    rope, local_rope = (RopeConfig(theta=PLAIN_THETA),) * 2 if in_part else ropes(fields, family)
    return DecoderConfig(
        family=family.model_type,
        vocab_size=fields.size("vocab_size"),
        num_layers=num_layers,
        layer=layer,
        rope=rope,
        max_positions=positions(fields),
        tied_head=fields.get("tie_word_embeddings", bool, False),
        windows=sliding_windows(fields, num_layers, family.slides_everywhere),
        local_rope=local_rope if local_rope != rope else None,
        embedding_scale=layer.hidden_size**0.5 if family.scaled_embeddings else 1.0,
    )


def ropes(fields: Fields, family: Family) -> tuple[RopeConfig, RopeConfig]:
    """Of layers that see everything, and of layers with a window: some families keep them apart."""
    scaling = fields.section("rope_parameters")
    if "full_attention" not in scaling.values:
        rope = rope_config(fields, more=family.turns_in_part)
        return rope, rope
    full, sliding = (scaling.section(kind) for kind in ("full_attention", "sliding_attention"))
    return rope_config(fields, full), rope_config(fields, sliding)


def sliding_windows(fields: Fields, num_layers: int, everywhere: bool = False) -> tuple[int | None, ...]:
    """Some families slide in every layer; the others where `layer_types` says so."""
    window = fields.optional_size("sliding_window")
    default = "sliding_attention" if everywhere else "full_attention"
    kinds = fields.values.get("layer_types") or [default] * num_layers
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise fields.wrong(f"layer_types must name {num_layers} layers")
    unknown = [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")]
    if unknown:
        raise fields.wrong(f"layer type {unknown[0]!r} is not supported")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
