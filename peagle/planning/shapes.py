"""Shapes of targets and drafters, as far as a plan needs them: how many bytes a pass reads, how much it computes.

Reads a config.json of any decoder of the usual fields, experts and quantized weights included, without its weights; of
some families as the engine reads it. Knows some models by name, and nothing about GPUs or time. What it cannot read it
names.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from peagle.checkpoints.config_reader import MAX_LAYERS, ConfigReader
from peagle.checkpoints.speculators import is_speculators, speculators_to_plain
from peagle.config import LAYERS, MASK_TOKEN_ID_KEYS, ChunkedAttention, ExpertsConfig, Method, Window
from peagle.errors import UserError

DTYPE_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "float8_e4m3fn": 1.0}
MXFP4_BYTES = 4.25 / 8  # 4 bits, and a scale of 8 bits for every 32 of them
NUM_AUX_LAYERS = 3  # layers of the target that a drafter reads, unless its config says otherwise
# Architectures whose configs say less than the usual fields, or have layers that differ by more than those say.
PECULIAR = ("Gemma3For", "Gemma4For", "Llama4For")


@dataclass(frozen=True)
class Shape:
    """A decoder. `windows[i]` is layer i's window, None where it sees everything."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    windows: tuple[Window, ...]
    moe: tuple[bool, ...]  # which layers have experts
    intermediate: int  # of a layer without them
    experts: int = 0
    active: int = 0  # experts a token goes to
    expert_intermediate: int = 0
    shared_intermediate: int = 0  # of what every token goes to beside them
    tie_word_embeddings: bool = False
    weight_bytes: float = 2.0  # of a weight of attention and plain MLPs
    expert_bytes: float = 2.0
    head_bytes: float = 2.0  # and of embeddings
    kv_bytes: float = 2.0  # of a key's or value's element
    kv_shapes: tuple[tuple[int, int], ...] = ()  # of each layer: kv_heads and head_dim, where they differ

    @property
    def layers(self) -> int:
        return len(self.windows)

    def kv_at(self, layer: int) -> tuple[int, int]:
        """Heads of its keys, and how wide every head is."""
        return self.kv_shapes[layer] if self.kv_shapes else (self.kv_heads, self.head_dim)

    def attention_weights(self, layer: int) -> int:
        kv_heads, head_dim = self.kv_at(layer)
        return 2 * self.hidden * head_dim * (self.heads + kv_heads)

    @property
    def head_weights(self) -> int:
        return self.hidden * self.vocab

    def mlp_weights(self, layer: int) -> int:
        """Of what every token goes to, a router included."""
        if not self.moe[layer]:
            return 3 * self.hidden * self.intermediate
        return self.hidden * (3 * self.shared_intermediate + self.experts)

    @property
    def expert_weights(self) -> int:
        """Of one."""
        return 3 * self.hidden * self.expert_intermediate

    def experts_touched(self, rows: int) -> float:
        """Of a layer, by so many tokens that choose independently: E (1 - (1 - a/E)^rows)."""
        return self.experts * (1 - (1 - self.active / self.experts) ** rows) if self.experts else 0.0

    @property
    def stored_bytes(self) -> float:
        """All weights in memory."""
        total = self.head_weights * self.head_bytes * (1 if self.tie_word_embeddings else 2)
        for layer in range(self.layers):
            total += (self.attention_weights(layer) + self.mlp_weights(layer)) * self.weight_bytes
            total += self.experts * self.expert_weights * self.expert_bytes if self.moe[layer] else 0.0
        return total

    def cached_bytes(self, tokens: int, parts: int = 1) -> float:
        """Keys and values of a request of so many tokens, over all of so many GPUs: heads that are fewer than those lie
        on several."""
        total = 0.0
        for layer, window in enumerate(self.windows):
            kept = min(tokens, window.chunk_size if isinstance(window, ChunkedAttention) else window or tokens)
            kv_heads, head_dim = self.kv_at(layer)
            total += kept * 2 * max(kv_heads, parts) * head_dim * self.kv_bytes
        return total


@dataclass(frozen=True)
class DrafterShape:
    """A drafter: the layers of `body`, and what is put before and behind them."""

    body: Shape  # its vocabulary is what it may say
    method: Method
    aux_hidden_size: int
    own_tables: bool  # its own embeddings and head lie in memory beside the target's

    @property
    def combine_weights(self) -> int:
        """Of what makes one state of the aux_hidden_states ones, and of the first layer's second half of inputs."""
        shape = self.body
        return self.aux_hidden_size * shape.hidden + shape.hidden * shape.head_dim * (shape.heads + 2 * shape.kv_heads)

    @property
    def stored_bytes(self) -> float:
        shape = self.body
        tables = shape.head_weights * shape.head_bytes * 2
        return shape.stored_bytes - (0 if self.own_tables else tables) + self.combine_weights * shape.weight_bytes


# What their config.json says, as far as it matters here.
_LLAMA: dict[str, Any] = {"head_dim": 128, "num_key_value_heads": 8, "vocab_size": 128256}
_GPT_OSS: dict[str, Any] = {
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 201088,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "quantization_config": {"quant_method": "mxfp4"},
}
_QWEN3: dict[str, Any] = {"head_dim": 128, "num_key_value_heads": 8, "vocab_size": 151936}


def _sizes(layers: int, hidden: int, intermediate: int, heads: int) -> dict[str, int]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
    }


def _alternating(layers: int) -> list[str]:
    return ["sliding_attention", "full_attention"] * (layers // 2)


CONFIGS: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
        **_sizes(30, 576, 1536, 9),
        "head_dim": 64,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    },
    "llama-3.2-1b": {**_LLAMA, **_sizes(16, 2048, 8192, 32), "head_dim": 64, "tie_word_embeddings": True},
    "llama-3.2-3b": {**_LLAMA, **_sizes(28, 3072, 8192, 24), "tie_word_embeddings": True},
    "llama-3.1-8b": {**_LLAMA, **_sizes(32, 4096, 14336, 32)},
    "llama-3.1-70b": {**_LLAMA, **_sizes(80, 8192, 28672, 64)},
    "llama-3.1-405b": {**_LLAMA, **_sizes(126, 16384, 53248, 128)},
    "qwen3-8b": {**_QWEN3, **_sizes(36, 4096, 12288, 32)},
    "qwen3-32b": {**_QWEN3, **_sizes(64, 5120, 25600, 64)},
    "qwen3-coder-30b-a3b": {
        **_QWEN3,
        **_sizes(48, 2048, 6144, 32),
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    "gemma-4-31b": {
        **_sizes(60, 5376, 21504, 32),
        "architectures": ["Gemma4ForCausalLM"],
        "head_dim": 256,
        "num_key_value_heads": 16,
        "vocab_size": 262144,
        "tie_word_embeddings": True,
        "sliding_window": 1024,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10,
        "global_head_dim": 512,
        "num_global_key_value_heads": 4,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
    },
    "gpt-oss-20b": {**_GPT_OSS, "num_hidden_layers": 24, "num_local_experts": 32, "layer_types": _alternating(24)},
    "gpt-oss-120b": {**_GPT_OSS, "num_hidden_layers": 36, "num_local_experts": 128, "layer_types": _alternating(36)},
}


def target_shape(name: str, weight_bits: float | None = None, kv_bits: float | None = None) -> Shape:
    """A folder with a config.json, that file itself, or a built-in name. Bits given go before those of the config."""
    values, source = _config(name, "--target")
    if is_speculators(values) or values.get("eagle_aux_hidden_state_layer_ids") is not None:
        raise UserError(f"--target {name}: is a drafter; it goes to --drafter")
    return read_shape(values, source, name, weight_bits, kv_bits)


def drafter_shape(name: str, target: Shape, flag: str = "--drafter") -> DrafterShape:
    """A folder or config.json, or a method's name: a usual drafter of the target's width, `p-eagle:2` of 2 layers."""
    kind, _, count = name.partition(":")
    if kind in LAYERS:
        if count and not (count.isdecimal() and 1 <= int(count) <= MAX_LAYERS):
            raise UserError(f"{flag} {name}: behind the colon goes a number of layers, as in {kind}:2")
        method: Method = "eagle3" if kind == "eagle3" else "p-eagle"
        return usual_drafter(target, method, int(count) if count else LAYERS[method])
    values, source = _config(name, flag, ", ".join(LAYERS))
    if is_speculators(values):
        values = speculators_to_plain(values, source)
    parallel = any(values.get(key) is not None for key in MASK_TOKEN_ID_KEYS)
    fields = ConfigReader(values, source)
    vocab = fields.size("vocab_size")
    said = fields.size("draft_vocab_size", vocab)
    body = read_shape({**values, "vocab_size": said, "tie_word_embeddings": False}, source, name, None, None)
    aux_layer_ids = fields.int_list("eagle_aux_hidden_state_layer_ids")
    wide = fields.size("target_hidden_size", body.hidden)
    if wide != target.hidden:
        raise UserError(f"{flag} {name}: was made for a target {wide} wide, {target.name} is {target.hidden} wide")
    num_aux_layers = len(aux_layer_ids) if aux_layer_ids else fields.size("num_aux_hidden_states", NUM_AUX_LAYERS)
    return DrafterShape(body, "p-eagle" if parallel else "eagle3", num_aux_layers * wide, own_tables=said != vocab)


def usual_drafter(target: Shape, method: Method, layers: int) -> DrafterShape:
    """Of the target's width in bf16. Where the target has experts, its MLP is as wide as those a token goes to: the
    released heads for GPT-OSS are (1.7 billion parameters, 4 layers)."""
    wide = target.active * target.expert_intermediate + target.shared_intermediate
    body = Shape(
        name=f"{method} of {layers} layer{'s' * (layers > 1)}",
        hidden=target.hidden,
        heads=target.heads,
        kv_heads=target.kv_heads,
        head_dim=target.head_dim,
        vocab=target.vocab,
        windows=(None,) * layers,
        moe=(False,) * layers,
        intermediate=wide if any(target.moe) else target.intermediate,
        kv_bytes=target.kv_bytes,
    )
    return DrafterShape(body, method, NUM_AUX_LAYERS * target.hidden, own_tables=False)


def _config(name: str, flag: str, others: str = "") -> tuple[dict[str, Any], Path]:
    known = name.strip().lower()
    if known in CONFIGS and not others:
        return CONFIGS[known], Path(known)
    path = Path(name).expanduser()
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        names = others or ", ".join(CONFIGS)
        near = get_close_matches(known.rsplit("/", 1)[-1], others.split(", ") if others else CONFIGS, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}? " if near else ""
        what = "holds no config.json" if path.is_dir() else "is no folder, no config.json and no known name"
        raise UserError(f"{flag} {name}: {what}; {hint}known: {names}")
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{flag} {name}: {file} cannot be read as JSON ({' '.join(str(error).split())})") from None
    if not isinstance(values, dict):
        raise UserError(f"{flag} {name}: {file} holds no JSON object")
    return values, file


def read_shape(
    values: dict[str, Any], source: Path, name: str, weight_bits: float | None, kv_bits: float | None
) -> Shape:
    """Of a config's object, `source` being what messages call it."""
    outer = ConfigReader(values, source)
    fields = outer.section("text_config") if "text_config" in values else outer
    bytes_each = _dtype_bytes(outer, fields)
    linear, expert = (weight_bits / 8,) * 2 if weight_bits is not None else _quantized(outer, bytes_each)
    named = values.get("architectures")
    peculiar = isinstance(named, list) and any(str(one).startswith(PECULIAR) for one in named[:1])
    shape = _as_run(values, source, name) if peculiar else _as_written(outer, fields, name)
    return replace(
        shape,
        weight_bytes=linear,
        expert_bytes=expert,
        head_bytes=min(bytes_each, 2.0),
        kv_bytes=kv_bits / 8 if kv_bits is not None else min(bytes_each, 2.0),
    )


def _as_run(values: dict[str, Any], source: Path, name: str) -> Shape:
    """What the embedded engine would make of it, were its weights not quantized."""
    from peagle.checkpoints.families import (
        read_decoder_config,
        unsupported_feature,
    )  # loads torch and transformers, which is slow

    values = {field: value for field, value in values.items() if field != "quantization_config"}
    cfg = read_decoder_config(values, source)
    if cfg.uses_transformers:
        raise UserError(f"{source}: {unsupported_feature(values, source)} cannot be planned yet")
    layers = [cfg.layer_at(i) for i in range(cfg.num_layers)]
    experts = next((layer.experts for layer in layers if layer.experts is not None), ExpertsConfig(0, 0, 0))
    return Shape(
        name=name,
        hidden=cfg.layer.hidden_size,
        heads=cfg.layer.num_heads,
        kv_heads=cfg.layer.num_kv_heads,
        head_dim=cfg.layer.head_dim,
        vocab=cfg.vocab_size,
        windows=cfg.windows,
        moe=tuple(layer.experts is not None for layer in layers),
        intermediate=next((layer.intermediate_size for layer in layers if layer.experts is None), 0),
        experts=experts.num_experts,
        active=experts.num_experts_per_tok,
        expert_intermediate=experts.intermediate_size,
        shared_intermediate=experts.shared_intermediate_size,
        tie_word_embeddings=cfg.tie_word_embeddings,
        kv_shapes=tuple((layer.num_kv_heads, layer.head_dim) for layer in cfg.layers),
    )


def _as_written(outer: ConfigReader, fields: ConfigReader, name: str) -> Shape:
    """By the fields that most decoders share; `outer` has what may stand around the text model's own."""
    if fields.values.get("kv_lora_rank"):
        raise outer.error("latent attention (kv_lora_rank) cannot be planned yet; known: grouped heads")
    layers, hidden = fields.size("num_hidden_layers", maximum=MAX_LAYERS), fields.size("hidden_size")
    heads = fields.size("num_attention_heads")
    moe = _moe_layers(fields, layers)
    own = fields.size("intermediate_size") if not all(moe) else 0
    experts = active = wide = shared = 0
    if any(moe):
        experts = _first_size(fields, "num_experts", "num_local_experts", "n_routed_experts")
        active = _first_size(fields, "num_experts_per_tok", "experts_per_token")
        if active > experts:
            raise outer.error(f"a token goes to {active} of {experts} experts")
        wide = _first_size(fields, "moe_intermediate_size", "intermediate_size")
        shared = fields.optional_size("shared_expert_intermediate_size") or 0
        shared = shared or (fields.optional_size("n_shared_experts") or 0) * wide
    return Shape(
        name=name,
        hidden=hidden,
        heads=heads,
        kv_heads=fields.size("num_key_value_heads", heads),
        head_dim=fields.size("head_dim", max(hidden // heads, 1)),
        vocab=fields.size("vocab_size"),
        windows=_windows(fields, layers),
        moe=moe,
        intermediate=own,
        experts=experts,
        active=active,
        expert_intermediate=wide,
        shared_intermediate=shared,
        tie_word_embeddings=outer.get("tie_word_embeddings", bool, fields.get("tie_word_embeddings", bool, False)),
    )


def _first_size(fields: ConfigReader, *names: str) -> int:
    given = next((name for name in names if fields.values.get(name) is not None), names[0])
    return fields.size(given)


def _moe_layers(fields: ConfigReader, layers: int) -> tuple[bool, ...]:
    """Which layers have experts: all from the first that may, every so many of them, but those that are named."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    if not any(fields.values.get(name) for name in names):
        return (False,) * layers
    first = fields.values.get("first_k_dense_replace") or 0
    step = fields.size("decoder_sparse_step", 1)
    plain = fields.int_list("mlp_only_layers") or ()
    return tuple(i >= first and (i + 1) % step == 0 and i not in plain for i in range(layers))


def _windows(fields: ConfigReader, layers: int) -> tuple[int | None, ...]:
    window = fields.optional_size("sliding_window")
    kinds = fields.values.get("layer_types")
    if kinds is None:
        return (window if fields.values.get("model_type") in ("mistral", "phi3") else None,) * layers
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise fields.error(f"layer_types must name {layers} layers")
    unknown = [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")]
    if unknown:
        raise fields.error(f"layer type {unknown[0]!r} cannot be planned; known: full_attention, sliding_attention")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _dtype_bytes(outer: ConfigReader, fields: ConfigReader) -> float:
    named = [f.values.get(key) for f in (fields, outer) for key in ("dtype", "torch_dtype")]
    name = next((value for value in named if value is not None), "bfloat16")
    if name not in DTYPE_BYTES:
        raise outer.error(f"dtype {name!r} is not known; known: {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[name]


def _quantized(fields: ConfigReader, plain: float) -> tuple[float, float]:
    """Bytes of a weight of attention and plain MLPs, and of an expert's."""
    how = fields.section("quantization_config")
    if not how.values:
        return plain, plain
    method = how.get("quant_method", str)
    if method == "mxfp4":
        return plain, MXFP4_BYTES  # GPT-OSS: the experts alone
    if method == "fp8":
        return 1.0, 1.0
    bits = how.values.get("bits")
    groups = how.values.get("config_groups")
    if bits is None and isinstance(groups, dict) and groups:
        first = next(iter(groups.values()))
        bits = ((first.get("weights") or {}) if isinstance(first, dict) else {}).get("num_bits")
    if type(bits) is not int or not 1 <= bits <= 16:
        raise fields.error(f"quantization {method!r} does not say its bits; give --weight-bits")
    return bits / 8, bits / 8
