"""Shapes of targets and drafters: bytes of weights and KV cache, and weights that a forward pass uses.

A shape comes from a config.json (the weights are not read) or from `known_models.json`. Norms and biases are ignored.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import Any

from peagle.checkpoints.config_reader import MAX_LAYERS, ConfigReader
from peagle.checkpoints.speculators import is_speculators, speculators_to_plain
from peagle.config import DEFAULT_NUM_LAYERS, MASK_TOKEN_ID_KEYS, ChunkedAttention, ExpertsConfig, Method, Window
from peagle.errors import UserError

DTYPE_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "float8_e4m3fn": 1.0}
MXFP4_BYTES = 4.25 / 8  # 4 bits per weight and one 8-bit scale per 32 weights
NUM_AUX_LAYERS = 3  # default number of auxiliary hidden states of a drafter
# Their layers differ in ways that the common config fields do not describe; the engine's own reader is used.
NON_UNIFORM_ARCHITECTURES = ("Gemma3For", "Gemma4For", "Llama4For")
NUM_EXPERTS_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts")
KNOWN_MODELS: dict[str, dict[str, Any]] = json.loads(
    resources.files("peagle.planning").joinpath("known_models.json").read_text(encoding="utf-8")
)


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder. `windows[i]` is the attention window of layer i; None is full attention."""

    name: str
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    windows: tuple[Window, ...]
    is_moe_layer: tuple[bool, ...]
    intermediate_size: int  # of layers without experts
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0
    tie_word_embeddings: bool = False
    bytes_per_weight: float = 2.0  # of attention and dense MLPs
    bytes_per_expert_weight: float = 2.0
    bytes_per_vocab_weight: float = 2.0  # of embeddings and lm_head
    bytes_per_kv: float = 2.0
    kv_shapes: tuple[tuple[int, int], ...] = ()  # (num_kv_heads, head_dim) of each layer, where layers differ

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    def kv_shape(self, layer: int) -> tuple[int, int]:
        """`(num_kv_heads, head_dim)` of one layer."""
        return self.kv_shapes[layer] if self.kv_shapes else (self.num_kv_heads, self.head_dim)

    def num_attention_weights(self, layer: int) -> int:
        num_kv_heads, head_dim = self.kv_shape(layer)
        return 2 * self.hidden_size * head_dim * (self.num_heads + num_kv_heads)

    def num_mlp_weights(self, layer: int) -> int:
        """Weights that every token uses: a dense MLP, or the router and the shared expert."""
        if not self.is_moe_layer[layer]:
            return 3 * self.hidden_size * self.intermediate_size
        return self.hidden_size * (3 * self.shared_expert_intermediate_size + self.num_experts)

    @property
    def num_weights_per_expert(self) -> int:
        return 3 * self.hidden_size * self.moe_intermediate_size

    @property
    def num_lm_head_weights(self) -> int:
        return self.hidden_size * self.vocab_size

    def expected_active_experts(self, num_rows: int) -> float:
        """Experts of a layer that the rows use, if rows choose independently: E (1 - (1 - a/E)^rows)."""
        if not self.num_experts:
            return 0.0
        return self.num_experts * (1 - (1 - self.num_experts_per_tok / self.num_experts) ** num_rows)

    @property
    def total_weight_bytes(self) -> float:
        total = self.num_lm_head_weights * self.bytes_per_vocab_weight * (1 if self.tie_word_embeddings else 2)
        for layer in range(self.num_layers):
            total += (self.num_attention_weights(layer) + self.num_mlp_weights(layer)) * self.bytes_per_weight
            if self.is_moe_layer[layer]:
                total += self.num_experts * self.num_weights_per_expert * self.bytes_per_expert_weight
        return total

    def kv_cache_bytes(self, num_tokens: int, tensor_parallel_size: int = 1) -> float:
        """KV cache of one request over all GPUs. GPUs beyond the number of KV heads store copies."""
        total = 0.0
        for layer, window in enumerate(self.windows):
            window_size = window.chunk_size if isinstance(window, ChunkedAttention) else window or num_tokens
            num_kv_heads, head_dim = self.kv_shape(layer)
            num_stored_heads = max(num_kv_heads, tensor_parallel_size)
            total += min(num_tokens, window_size) * 2 * num_stored_heads * head_dim * self.bytes_per_kv
        return total


@dataclass(frozen=True)
class DrafterShape:
    """Sizes of a drafter: decoder layers plus the fusion of the auxiliary hidden states."""

    body: ModelShape  # its vocab_size is the draft vocabulary
    method: Method
    aux_hidden_size: int
    has_own_vocab_weights: bool  # embeddings and lm_head are not shared with the target

    @property
    def num_fusion_weights(self) -> int:
        """Weights of `fc` and of the second input half of layer 0's q, k and v projections."""
        shape = self.body
        qkv_width = shape.head_dim * (shape.num_heads + 2 * shape.num_kv_heads)
        return self.aux_hidden_size * shape.hidden_size + shape.hidden_size * qkv_width

    @property
    def total_weight_bytes(self) -> float:
        shape = self.body
        shared = 0 if self.has_own_vocab_weights else shape.num_lm_head_weights * shape.bytes_per_vocab_weight * 2
        return shape.total_weight_bytes - shared + self.num_fusion_weights * shape.bytes_per_weight


def load_target_shape(name: str, weight_bits: float | None = None, kv_cache_bits: float | None = None) -> ModelShape:
    """Reads a folder with a config.json, a config.json or a known name. Given bits override those of the config."""
    values, source = _load_config(name, "--target", list(KNOWN_MODELS), KNOWN_MODELS)
    if is_speculators(values) or values.get("eagle_aux_hidden_state_layer_ids") is not None:
        raise UserError(f"--target {name}: is a drafter; pass it as --drafter")
    return parse_shape(values, source, name, weight_bits, kv_cache_bits)


def load_drafter_shape(name: str, target: ModelShape, flag: str = "--drafter") -> DrafterShape:
    """Reads a folder or a config.json, or builds a default drafter: `p-eagle`, or `p-eagle:2` with 2 layers."""
    kind, _, count = name.partition(":")
    if kind in DEFAULT_NUM_LAYERS:
        if count and not (count.isdecimal() and 1 <= int(count) <= MAX_LAYERS):
            raise UserError(f"{flag} {name}: the part after the colon must be a number of layers, as in {kind}:2")
        method: Method = "eagle3" if kind == "eagle3" else "p-eagle"
        return default_drafter_shape(target, method, int(count) if count else DEFAULT_NUM_LAYERS[method])
    values, source = _load_config(name, flag, list(DEFAULT_NUM_LAYERS), {})
    if is_speculators(values):
        values = speculators_to_plain(values, source)
    fields = ConfigReader(values, source)
    vocab_size = fields.size("vocab_size")
    draft_vocab_size = fields.size("draft_vocab_size", vocab_size)
    body_values = {**values, "vocab_size": draft_vocab_size, "tie_word_embeddings": False}
    body = parse_shape(body_values, source, name, None, None)
    target_hidden_size = fields.size("target_hidden_size", body.hidden_size)
    if target_hidden_size != target.hidden_size:
        raise UserError(
            f"{flag} {name}: its target_hidden_size is {target_hidden_size}, "
            f"{target.name} has hidden_size {target.hidden_size}"
        )
    layer_ids = fields.int_list("eagle_aux_hidden_state_layer_ids")
    num_aux_layers = len(layer_ids) if layer_ids else fields.size("num_aux_hidden_states", NUM_AUX_LAYERS)
    is_parallel = any(values.get(key) is not None for key in MASK_TOKEN_ID_KEYS)
    return DrafterShape(
        body,
        "p-eagle" if is_parallel else "eagle3",
        num_aux_layers * target_hidden_size,
        has_own_vocab_weights=draft_vocab_size != vocab_size,
    )


def default_drafter_shape(target: ModelShape, method: Method, num_layers: int) -> DrafterShape:
    """A bf16 drafter of the target's width. For an MoE target, its MLP is as wide as the experts that a token uses,
    as in the released GPT-OSS drafters."""
    active_width = target.num_experts_per_tok * target.moe_intermediate_size + target.shared_expert_intermediate_size
    body = ModelShape(
        name=f"{method} with {num_layers} layer{'s' * (num_layers > 1)}",
        hidden_size=target.hidden_size,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        vocab_size=target.vocab_size,
        windows=(None,) * num_layers,
        is_moe_layer=(False,) * num_layers,
        intermediate_size=active_width if any(target.is_moe_layer) else target.intermediate_size,
        bytes_per_kv=target.bytes_per_kv,
    )
    return DrafterShape(body, method, NUM_AUX_LAYERS * target.hidden_size, has_own_vocab_weights=False)


def _load_config(
    name: str, flag: str, suggestions: list[str], built_in: dict[str, dict[str, Any]]
) -> tuple[dict[str, Any], Path]:
    known = name.strip().lower()
    if known in built_in:
        return built_in[known], Path(known)
    path = Path(name).expanduser()
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        matches = get_close_matches(known.rsplit("/", 1)[-1], suggestions, n=1, cutoff=0.5)
        hint = f"did you mean {matches[0]}? " if matches else ""
        problem = "has no config.json" if path.is_dir() else "is not a folder, a config.json or a known name"
        raise UserError(f"{flag} {name}: {problem}; {hint}known names: {', '.join(suggestions)}")
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{flag} {name}: {file} is not readable as JSON ({' '.join(str(error).split())})") from None
    if not isinstance(values, dict):
        raise UserError(f"{flag} {name}: {file} is not a JSON object")
    return values, file


def parse_shape(
    values: dict[str, Any], source: Path, name: str, weight_bits: float | None, kv_cache_bits: float | None
) -> ModelShape:
    """Reads the values of a config.json. `source` is the file that error messages name."""
    config = ConfigReader(values, source)
    text_config = config.section("text_config") if "text_config" in values else config
    dtype_bytes = _parse_dtype_bytes(config, text_config)
    if weight_bits is not None:
        bytes_per_weight = bytes_per_expert_weight = weight_bits / 8
    else:
        bytes_per_weight, bytes_per_expert_weight = _parse_quantization(config, dtype_bytes)
    architectures = values.get("architectures")
    first = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    if first.startswith(NON_UNIFORM_ARCHITECTURES):
        shape = _shape_from_engine(values, source, name)
    else:
        shape = _shape_from_fields(config, text_config, name)
    return replace(
        shape,
        bytes_per_weight=bytes_per_weight,
        bytes_per_expert_weight=bytes_per_expert_weight,
        bytes_per_vocab_weight=min(dtype_bytes, 2.0),
        bytes_per_kv=kv_cache_bits / 8 if kv_cache_bits is not None else min(dtype_bytes, 2.0),
    )


def _shape_from_engine(values: dict[str, Any], source: Path, name: str) -> ModelShape:
    """Reads the config as the embedded engine does, ignoring quantization."""
    from peagle.checkpoints.families import find_unsupported_feature, read_decoder_config  # slow: imports torch

    values = {field: value for field, value in values.items() if field != "quantization_config"}
    cfg = read_decoder_config(values, source)
    if cfg.uses_transformers:
        raise UserError(f"{source}: {find_unsupported_feature(values, source)} cannot be planned yet")
    layers = [cfg.layer_at(i) for i in range(cfg.num_layers)]
    experts = next((layer.experts for layer in layers if layer.experts is not None), ExpertsConfig(0, 0, 0))
    return ModelShape(
        name=name,
        hidden_size=cfg.layer.hidden_size,
        num_heads=cfg.layer.num_heads,
        num_kv_heads=cfg.layer.num_kv_heads,
        head_dim=cfg.layer.head_dim,
        vocab_size=cfg.vocab_size,
        windows=cfg.windows,
        is_moe_layer=tuple(layer.experts is not None for layer in layers),
        intermediate_size=next((layer.intermediate_size for layer in layers if layer.experts is None), 0),
        num_experts=experts.num_experts,
        num_experts_per_tok=experts.num_experts_per_tok,
        moe_intermediate_size=experts.intermediate_size,
        shared_expert_intermediate_size=experts.shared_intermediate_size,
        tie_word_embeddings=cfg.tie_word_embeddings,
        kv_shapes=tuple((layer.num_kv_heads, layer.head_dim) for layer in cfg.layers),
    )


def _shape_from_fields(config: ConfigReader, text_config: ConfigReader, name: str) -> ModelShape:
    """Reads the fields that most decoders share. `config` may hold the text model in a section."""
    if text_config.values.get("kv_lora_rank"):
        raise config.error("latent attention (kv_lora_rank) cannot be planned yet; only grouped-query attention can")
    num_layers, hidden_size = text_config.size("num_hidden_layers", maximum=MAX_LAYERS), text_config.size("hidden_size")
    num_heads = text_config.size("num_attention_heads")
    is_moe_layer = _parse_moe_layers(text_config, num_layers)
    num_experts = num_active = moe_size = shared_size = 0
    if any(is_moe_layer):
        num_experts = _first_size(text_config, *NUM_EXPERTS_FIELDS)
        num_active = _first_size(text_config, "num_experts_per_tok", "experts_per_token")
        if num_active > num_experts:
            raise config.error(f"num_experts_per_tok is {num_active}, but there are {num_experts} experts")
        moe_size = _first_size(text_config, "moe_intermediate_size", "intermediate_size")
        shared_size = text_config.optional_size("shared_expert_intermediate_size") or 0
        shared_size = shared_size or (text_config.optional_size("n_shared_experts") or 0) * moe_size
    tied = text_config.get("tie_word_embeddings", bool, False)
    return ModelShape(
        name=name,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=text_config.size("num_key_value_heads", num_heads),
        head_dim=text_config.size("head_dim", max(hidden_size // num_heads, 1)),
        vocab_size=text_config.size("vocab_size"),
        windows=_parse_windows(text_config, num_layers),
        is_moe_layer=is_moe_layer,
        intermediate_size=0 if all(is_moe_layer) else text_config.size("intermediate_size"),
        num_experts=num_experts,
        num_experts_per_tok=num_active,
        moe_intermediate_size=moe_size,
        shared_expert_intermediate_size=shared_size,
        tie_word_embeddings=config.get("tie_word_embeddings", bool, tied),
    )


def _first_size(fields: ConfigReader, *names: str) -> int:
    return fields.size(next((name for name in names if fields.values.get(name) is not None), names[0]))


def _parse_moe_layers(fields: ConfigReader, num_layers: int) -> tuple[bool, ...]:
    if not any(fields.values.get(name) for name in NUM_EXPERTS_FIELDS):
        return (False,) * num_layers
    first = fields.values.get("first_k_dense_replace") or 0
    step = fields.size("decoder_sparse_step", 1)
    dense = fields.int_list("mlp_only_layers") or ()
    return tuple(i >= first and (i + 1) % step == 0 and i not in dense for i in range(num_layers))


def _parse_windows(fields: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
    window = fields.optional_size("sliding_window")
    layer_types = fields.values.get("layer_types")
    if layer_types is None:
        return (window if fields.values.get("model_type") in ("mistral", "phi3") else None,) * num_layers
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        raise fields.error(f"layer_types must list {num_layers} layers")
    known = ("full_attention", "sliding_attention")
    for layer_type in layer_types:
        if layer_type not in known:
            raise fields.error(f"layer type {layer_type!r} cannot be planned; known: {', '.join(known)}")
    return tuple(window if layer_type == "sliding_attention" else None for layer_type in layer_types)


def _parse_dtype_bytes(config: ConfigReader, text_config: ConfigReader) -> float:
    found = [fields.values.get(key) for fields in (text_config, config) for key in ("dtype", "torch_dtype")]
    dtype = next((value for value in found if value is not None), "bfloat16")
    if dtype not in DTYPE_BYTES:
        raise config.error(f"dtype {dtype!r} is not known; known: {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]


def _parse_quantization(fields: ConfigReader, dtype_bytes: float) -> tuple[float, float]:
    """Bytes per weight of attention and dense MLPs, and bytes per expert weight."""
    quantization = fields.section("quantization_config")
    if not quantization.values:
        return dtype_bytes, dtype_bytes
    method = quantization.get("quant_method", str)
    if method == "mxfp4":
        return dtype_bytes, MXFP4_BYTES  # GPT-OSS quantizes only the experts
    if method == "fp8":
        return 1.0, 1.0
    bits = quantization.values.get("bits")
    groups = quantization.values.get("config_groups")
    if bits is None and isinstance(groups, dict) and groups:
        group = next(iter(groups.values()))
        bits = ((group.get("weights") or {}) if isinstance(group, dict) else {}).get("num_bits")
    if type(bits) is not int or not 1 <= bits <= 16:
        raise fields.error(f"quantization {method!r} does not state its bits; pass --weight-bits")
    return bits / 8, bits / 8
