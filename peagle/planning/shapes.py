"""Sizes of targets and drafters: bytes of weights and KV cache, and weights that a forward pass uses.

Sizes come from a config.json (the weights are not read) or from `known_models.json`. Norms and biases are ignored.
"""

import json
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from peagle.checkpoints.config_reader import (
    MAX_LAYERS,
    ConfigReader,
    fill_defaults,
    is_speculators,
    speculators_to_plain,
)
from peagle.checkpoints.families import get_family, read_decoder_config
from peagle.checkpoints.files import read_json
from peagle.config import (
    DEFAULT_NUM_LAYERS,
    MASK_TOKEN_ID_KEYS,
    ChunkedAttention,
    DecoderConfig,
    ExpertsConfig,
    LayerConfig,
    Method,
)
from peagle.errors import UserError

DTYPE_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "float8_e4m3fn": 1.0}
MXFP4_BYTES = 4.25 / 8  # 4 bits per weight and one 8-bit scale per 32 weights
NUM_AUX_LAYERS = 3  # default number of auxiliary hidden states of a drafter
# Experts and latent attention, of which DecoderConfig says nothing if a target runs through transformers.
UNPLANNED_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts", "kv_lora_rank")
KNOWN_MODELS: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("known_models.json").read_text(encoding="utf-8")
)


def count_attention_weights(layer: LayerConfig) -> int:
    return 2 * layer.hidden_size * layer.head_dim * (layer.num_heads + layer.num_kv_heads)


def count_mlp_weights(layer: LayerConfig) -> int:
    """Weights that every token uses: a dense MLP, or the router and the shared expert."""
    if layer.experts is None:
        return 3 * layer.hidden_size * layer.intermediate_size
    return layer.hidden_size * (3 * layer.experts.shared_intermediate_size + layer.experts.num_experts)


def expected_active_experts(experts: ExpertsConfig, num_rows: int) -> float:
    """Experts of a layer that the rows use, if rows choose independently: E (1 - (1 - a/E)^rows)."""
    return experts.num_experts * (1 - (1 - experts.num_experts_per_tok / experts.num_experts) ** num_rows)


@dataclass(frozen=True)
class ModelShape:
    """A decoder, and the bytes of its weights and of its KV cache."""

    name: str
    cfg: DecoderConfig
    bytes_per_weight: float = 2.0  # of attention and dense MLPs
    bytes_per_expert_weight: float = 2.0
    bytes_per_vocab_weight: float = 2.0  # of embeddings and lm_head
    bytes_per_kv: float = 2.0

    @property
    def layers(self) -> list[LayerConfig]:
        return [self.cfg.layer_at(i) for i in range(self.cfg.num_layers)]

    @property
    def experts(self) -> ExpertsConfig | None:
        """The experts of the first layer that has some."""
        return next((layer.experts for layer in self.layers if layer.experts is not None), None)

    @property
    def num_lm_head_weights(self) -> int:
        return self.cfg.layer.hidden_size * self.cfg.vocab_size

    @property
    def total_weight_bytes(self) -> float:
        total = self.num_lm_head_weights * self.bytes_per_vocab_weight * (1 if self.cfg.tie_word_embeddings else 2)
        for layer in self.layers:
            total += (count_attention_weights(layer) + count_mlp_weights(layer)) * self.bytes_per_weight
            if (experts := layer.experts) is not None:
                num_weights = experts.num_experts * 3 * layer.hidden_size * experts.intermediate_size
                total += num_weights * self.bytes_per_expert_weight
        return total

    def kv_cache_bytes(self, num_tokens: int, tensor_parallel_size: int = 1) -> float:
        """KV cache of one request over all GPUs. GPUs beyond the number of KV heads store copies."""
        total = 0.0
        for layer, window in zip(self.layers, self.cfg.windows, strict=True):
            window_size = window.chunk_size if isinstance(window, ChunkedAttention) else window or num_tokens
            num_stored_heads = max(layer.num_kv_heads, tensor_parallel_size)
            total += min(num_tokens, window_size) * 2 * num_stored_heads * layer.head_dim * self.bytes_per_kv
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
        layer = self.body.cfg.layer
        qkv_width = layer.head_dim * (layer.num_heads + 2 * layer.num_kv_heads)
        return self.aux_hidden_size * layer.hidden_size + layer.hidden_size * qkv_width

    @property
    def total_weight_bytes(self) -> float:
        shape = self.body
        shared = 0 if self.has_own_vocab_weights else shape.num_lm_head_weights * shape.bytes_per_vocab_weight * 2
        return shape.total_weight_bytes - shared + self.num_fusion_weights * shape.bytes_per_weight


def load_target_shape(name: str, weight_bits: float | None = None, kv_cache_bits: float | None = None) -> ModelShape:
    """Reads a folder with a config.json, a config.json or a known name. Given bits override those of the config."""
    values, source = _load_config(name, "--target", KNOWN_MODELS)
    if is_speculators(values) or values.get("eagle_aux_hidden_state_layer_ids") is not None:
        raise UserError(f"--target {name}: is a drafter; pass it as --drafter")
    return parse_shape(values, source, name, weight_bits, kv_cache_bits)


def load_drafter_shape(name: str, target: ModelShape) -> DrafterShape:
    """Reads a folder or a config.json, or builds a default drafter: `p-eagle`, or `p-eagle:2` with 2 layers."""
    kind, _, count = name.partition(":")
    if kind in DEFAULT_NUM_LAYERS:
        if count and not (count.isdecimal() and 1 <= int(count) <= MAX_LAYERS):
            raise UserError(f"--drafter {name}: the part after the colon must be a number of layers, as in {kind}:2")
        method: Method = "eagle3" if kind == "eagle3" else "p-eagle"
        return default_drafter_shape(target, method, int(count) if count else DEFAULT_NUM_LAYERS[method])
    values, source = _load_config(name, "--drafter", dict.fromkeys(DEFAULT_NUM_LAYERS, {}))
    if is_speculators(values):
        values = speculators_to_plain(values, source)
    fields = ConfigReader(values, source)
    vocab_size = fields.size("vocab_size")
    draft_vocab_size = fields.size("draft_vocab_size", vocab_size)
    as_decoder = {"architectures": ["LlamaForCausalLM"], "vocab_size": draft_vocab_size, "tie_word_embeddings": False}
    body = parse_shape(values | as_decoder, source, name, None, None)
    width, target_width = body.cfg.layer.hidden_size, target.cfg.layer.hidden_size
    target_hidden_size = fields.size("target_hidden_size", width)
    if target_hidden_size != target_width:
        raise UserError(
            f"--drafter {name}: its target_hidden_size is {target_hidden_size}, "
            f"{target.name} has hidden_size {target_width}"
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
    layer, experts = target.cfg.layer.as_llama, target.experts
    if experts is not None:
        active_width = experts.num_experts_per_tok * experts.intermediate_size + experts.shared_intermediate_size
        layer = replace(layer, intermediate_size=active_width)
    cfg = replace(target.cfg, num_layers=num_layers, layer=layer, layers=(), windows=(None,) * num_layers)
    name = f"{method} with {num_layers} layer{'s' * (num_layers > 1)}"
    body = ModelShape(name, replace(cfg, tie_word_embeddings=False), bytes_per_kv=target.bytes_per_kv)
    return DrafterShape(body, method, NUM_AUX_LAYERS * layer.hidden_size, has_own_vocab_weights=False)


def _load_config(name: str, flag: str, known: dict[str, dict[str, Any]]) -> tuple[dict[str, Any], Path]:
    key = name.strip().lower()
    if key in known:
        return known[key], Path(key)
    path = Path(name).expanduser()
    file = path / "config.json" if path.is_dir() else path
    if file.is_file():
        return read_json(file), file
    matches = get_close_matches(key.rsplit("/", 1)[-1], known, n=1, cutoff=0.5)
    hint = f"did you mean {matches[0]}? " if matches else ""
    raise UserError(f"{flag} {name}: is not a folder with a config.json; {hint}known names: {', '.join(known)}")


def parse_shape(
    values: dict[str, Any], source: Path, name: str, weight_bits: float | None, kv_cache_bits: float | None
) -> ModelShape:
    """Reads the values of a config.json. `source` is the file that error messages name."""
    config = ConfigReader(values, source)
    sections = (config.section("text_config"), config)
    found = [section.values.get(key) for section in sections for key in ("dtype", "torch_dtype")]
    dtype = next((value for value in found if value is not None), "bfloat16")
    if dtype not in DTYPE_BYTES:
        raise config.error(f"dtype {dtype!r} is not known; known: {', '.join(DTYPE_BYTES)}")
    dtype_bytes = DTYPE_BYTES[dtype]
    if weight_bits is not None:
        bytes_per_weight = bytes_per_expert_weight = weight_bits / 8
    else:
        bytes_per_weight, bytes_per_expert_weight = _parse_quantization(config, dtype_bytes)
    values = {field: value for field, value in values.items() if field != "quantization_config"}
    cfg = read_decoder_config(values, source)
    if cfg.uses_transformers and get_family(values, source) is not None:
        raise config.error(f"a {cfg.family} model that runs through transformers cannot be planned yet")
    if cfg.uses_transformers:
        defaults = fill_defaults(values, source).values
        if any(defaults.get(field) for field in UNPLANNED_FIELDS):
            raise config.error(f"experts and latent attention of {cfg.family} models cannot be planned")
    return ModelShape(
        name,
        cfg,
        bytes_per_weight,
        bytes_per_expert_weight,
        bytes_per_vocab_weight=min(dtype_bytes, 2.0),
        bytes_per_kv=kv_cache_bits / 8 if kv_cache_bits is not None else min(dtype_bytes, 2.0),
    )


def _parse_quantization(config: ConfigReader, dtype_bytes: float) -> tuple[float, float]:
    """Bytes per weight of attention and dense MLPs, and bytes per expert weight."""
    quantization = config.section("quantization_config")
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
        raise config.error(f"quantization {method!r} does not state its bits; pass --weight-bits")
    return bits / 8, bits / 8
