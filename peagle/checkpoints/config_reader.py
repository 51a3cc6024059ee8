"""Typed access to config.json: a missing or invalid field raises a one-line UserError.

Reads and writes the Llama-style fields that targets and drafters share: layer sizes and rotary embeddings. Converts
between the plain format of a drafter's config and the speculators format, which keeps the transformer's fields in
`transformer_layer_config` and names the target ("verifier").
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from peagle.config import MASK_TOKEN_ID_KEYS, ChunkedAttention, ExpertsConfig, LayerConfig, RopeConfig
from peagle.errors import UserError

T = TypeVar("T", int, float, bool, str)
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
TARGET_ROPE_TYPES = (*ROPE_TYPES, "longrope")  # vLLM does not support longrope in a drafter
MAX_SIZE = 2**24  # far above real sizes; the product of two of them does not overflow
MAX_LAYERS = 1024
SPECULATORS_VERSION = "0.9.0"  # of the format that is written
MODEL_TYPES = ("peagle", "eagle3")
TOP_LEVEL_FIELDS = (
    *("draft_vocab_size", "target_hidden_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"),
    *("eagle_aux_hidden_state_layer_ids", "mask_token_id"),
)
PLAIN_ONLY = (*MASK_TOKEN_ID_KEYS, "architectures", "dtype", "torch_dtype")


class ConfigReader:
    """A JSON object and the file it came from, which error messages name."""

    def __init__(self, values: dict[str, Any], source: Path) -> None:
        self.values, self.source = values, source

    def error(self, message: str) -> UserError:
        return UserError(f"{self.source}: {message}")

    def get(self, name: str, kind: type[T], default: T | None = None) -> T:
        """Returns the field, checked to be a `kind`. Null counts as missing; without a default it is required."""
        value = self.values.get(name)
        if value is None:
            if default is None:
                raise self.error(f"field {name!r} is missing")
            return default
        if kind is float and type(value) is int and abs(value) < 2**63:
            return kind(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.error(f"field {name!r} is {value!r}, expected {kind.__name__}")
        return value

    def size(self, name: str, default: int | None = None, maximum: int = MAX_SIZE) -> int:
        """Returns a size or count of at least 1."""
        value = self.get(name, int, default)
        if not 1 <= value <= maximum:
            raise self.error(f"field {name!r} is {value}, expected a size from 1 to {maximum}")
        return value

    def optional_size(self, name: str) -> int | None:
        return None if self.values.get(name) is None else self.size(name, maximum=2**31 - 1)

    def positive(self, name: str, default: float | None = None) -> float:
        value = self.get(name, float, default)
        if not 1e-30 < value < 1e30:  # also excludes nan
            raise self.error(f"field {name!r} is {value}, expected a positive number")
        return value

    def optional_positive(self, name: str) -> float | None:
        """Zero counts as missing, as in transformers."""
        return self.positive(name) if self.values.get(name) else None

    def section(self, name: str) -> ConfigReader:
        """Returns a nested object; an empty one if it is missing."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.error(f"field {name!r} is {value!r}, expected an object")
        return ConfigReader(value or {}, self.source)

    def int_list(self, name: str) -> tuple[int, ...] | None:
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(type(v) is int for v in value):
            raise self.error(f"field {name!r} is {value!r}, expected a list of integers")
        return tuple(value)

    @property
    def max_positions(self) -> int:
        return self.size("max_position_embeddings", maximum=2**31 - 1)

    def read_layer(self, qk_norm: bool = False, **biases: Any) -> LayerConfig:
        """`biases` are those of LayerConfig that do not follow from the fields `attention_bias` and `mlp_bias`."""
        attention_bias = self.get("attention_bias", bool, False)
        heads, hidden_size = self.size("num_attention_heads"), self.size("hidden_size")
        kv_heads = self.size("num_key_value_heads", heads)
        head_dim = self.size("head_dim", max(hidden_size // heads, 1))
        if heads % kv_heads:
            raise self.error(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
        if heads * head_dim > MAX_SIZE:
            raise self.error(f"num_attention_heads {heads} times head_dim {head_dim} is more than {MAX_SIZE}")
        if head_dim % 2:
            raise self.error(f"head_dim {head_dim} is odd; rotary embeddings need an even one")
        activation = self.get("hidden_act", str, "silu")
        if activation not in ("silu", "swish"):
            raise self.error(f"hidden_act {activation!r} is not supported; supported: silu")
        layer = LayerConfig(
            hidden_size=hidden_size,
            intermediate_size=self.size("intermediate_size"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            norm_eps=self.positive("rms_norm_eps", 1e-6),
            qkv_bias=attention_bias,
            out_bias=attention_bias,
            mlp_bias=self.get("mlp_bias", bool, False),
            qk_norm=qk_norm,
        )
        return replace(layer, **biases)

    def read_experts(self, size_field: str, **options: Any) -> ExpertsConfig:
        """`size_field` names the intermediate size of one expert. The number of experts has two names in use."""
        name = "num_experts" if self.values.get("num_experts") is not None else "num_local_experts"
        num_experts, num_experts_per_tok = self.size(name), self.size("num_experts_per_tok")
        if num_experts_per_tok > num_experts:
            raise self.error(f"num_experts_per_tok {num_experts_per_tok} is more than {name} {num_experts}")
        return ExpertsConfig(num_experts, num_experts_per_tok, self.size(size_field), **options)

    def read_windows(self, num_layers: int, sliding_by_default: bool = False, chunked: bool = False) -> tuple[Any, ...]:
        """Returns the attention window of each layer, from `layer_types`; `chunked` is the kind of Llama 4."""
        limited = "chunked_attention" if chunked else "sliding_attention"
        default = limited if sliding_by_default else "full_attention"
        layer_types = self.values.get("layer_types") or [default] * num_layers
        if not isinstance(layer_types, list) or len(layer_types) != num_layers:
            raise self.error(f"layer_types must name {num_layers} layers")
        if unknown := [layer_type for layer_type in layer_types if layer_type not in ("full_attention", limited)]:
            raise self.error(f"layer type {unknown[0]!r} is not supported")
        window: Any = None
        if chunked and limited in layer_types:
            window = ChunkedAttention(self.size("attention_chunk_size", maximum=2**31 - 1))
        elif limited in layer_types:
            window = self.optional_size("sliding_window")
        return tuple(window if layer_type == limited else None for layer_type in layer_types)

    def read_rope(self, rope: ConfigReader | None = None, of_target: bool = False) -> RopeConfig:
        """Reads `rope_parameters` (`fill_defaults` converts older spellings to it), or the section `rope` of it.

        `of_target` allows longrope and partial rotation, which vLLM does not support in a drafter.
        """
        rope = self.section("rope_parameters") if rope is None else rope
        theta = rope.positive("rope_theta", RopeConfig.theta)
        rope_type: Any = rope.get("rope_type", str)
        supported = TARGET_ROPE_TYPES if of_target else ROPE_TYPES
        if rope_type not in supported:
            raise self.error(f"rope type {rope_type!r} is not supported; supported: {', '.join(supported)}")
        partial = rope.get("partial_rotary_factor", float, self.get("partial_rotary_factor", float, 1.0))
        if partial != 1.0 and not (of_target and rope_type in ("default", "longrope") and 0.0 < partial < 1.0):
            raise self.error(f"partial_rotary_factor {partial} is not supported with rope type {rope_type!r}")
        if rope_type == "default":
            return RopeConfig(theta=theta, partial_rotary_factor=partial)
        if rope_type == "linear":
            return RopeConfig(theta, "linear", rope.positive("factor"))
        original = rope.optional_size("original_max_position_embeddings") or self.max_positions
        factor = rope.positive("factor", None if rope_type == "llama3" else self.max_positions / original)
        common = RopeConfig(theta, rope_type, factor, original, partial_rotary_factor=partial)
        if rope_type == "llama3":
            low, high = rope.positive("low_freq_factor"), rope.positive("high_freq_factor")
            if low > high:  # equal ones are valid (Llama 4 Scout)
                raise self.error(f"low_freq_factor {low} must not be above high_freq_factor {high}")
            return replace(common, low_freq_factor=low, high_freq_factor=high)
        attention_factor = rope.optional_positive("attention_factor")
        if rope_type == "longrope":
            head_dim = self.size("head_dim", self.size("hidden_size") // self.size("num_attention_heads"))
            short, long = (
                rope.read_pair_factors(f"{n}_factor", int(head_dim * partial) // 2) for n in ("short", "long")
            )
            return replace(common, attention_factor=attention_factor, short_factors=short, long_factors=long)
        if theta <= 1:
            raise self.error(f"field 'rope_theta' is {theta}, expected more than 1 for yarn")
        return replace(
            common,
            beta_fast=rope.positive("beta_fast", RopeConfig.beta_fast),
            beta_slow=rope.positive("beta_slow", RopeConfig.beta_slow),
            attention_factor=attention_factor,
            mscale=rope.optional_positive("mscale"),
            mscale_all_dim=rope.optional_positive("mscale_all_dim"),
            truncate=rope.get("truncate", bool, RopeConfig.truncate),
        )

    def read_proportional_rope(self) -> RopeConfig:
        """Gemma 4's kind: only the first rotary pairs of a head rotate, at the frequencies of a full rotation."""
        partial = self.get("partial_rotary_factor", float, 1.0)
        if not 0.0 <= partial <= 1.0:
            raise self.error(f"partial_rotary_factor is {partial}, expected a number from 0 to 1")
        factor = self.positive("factor", 1.0)
        return RopeConfig(self.positive("rope_theta"), "proportional", factor, partial_rotary_factor=partial)

    def read_pair_factors(self, name: str, num_pairs: int) -> tuple[float, ...]:
        values = self.values.get(name)
        if not isinstance(values, list) or not all(type(v) in (int, float) and 1e-6 < v < 1e9 for v in values):
            raise self.error(f"field {name!r} must be a list of positive numbers")
        if len(values) != num_pairs:
            raise self.error(f"field {name!r} must be a list of {num_pairs} numbers, one per rotary pair")
        return tuple(float(v) for v in values)


def fill_defaults(values: dict[str, Any], source: Path) -> ConfigReader:
    """Adds the fields that transformers omits when it saves a config: those equal to the family's defaults."""
    return ConfigReader(build_transformers_config(values, source).to_dict(), source)


def build_transformers_config(values: dict[str, Any], source: Path) -> Any:
    """Returns the transformers config object of `values`."""
    from transformers import CONFIG_MAPPING
    from transformers.utils import logging

    config = ConfigReader(values, source)
    config.size("num_hidden_layers", 1, MAX_LAYERS)  # checked first: transformers builds lists of this length
    model_type = config.get("model_type", str)
    if model_type not in CONFIG_MAPPING:
        raise UserError(f"{source}: model_type {model_type!r} is not known to the installed transformers")
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # hides warnings about rope fields
    try:
        built = CONFIG_MAPPING[model_type](**values)
        built.to_dict()
        return built
    except Exception as error:  # validators of transformers and huggingface_hub raise various types
        reason = (str(error).splitlines() or [type(error).__name__])[-1].strip()
        raise UserError(f"{source}: not a usable {model_type} config ({reason})") from None
    finally:
        logging.set_verbosity(verbosity)


def rope_to_json(rope: RopeConfig) -> dict[str, Any]:
    """Returns the fields of transformers 5 and those of older readers."""
    values: dict[str, Any] = {"rope_type": rope.rope_type, "rope_theta": rope.theta}
    if rope.rope_type != "default":
        values["factor"] = rope.factor
    if rope.rope_type in ("llama3", "yarn"):
        values["original_max_position_embeddings"] = rope.original_max_positions
    if rope.rope_type == "llama3":
        values |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.rope_type == "yarn":
        values |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            if getattr(rope, name) is not None:
                values[name] = getattr(rope, name)
    fields: dict[str, Any] = {"rope_theta": rope.theta, "rope_parameters": values}
    if rope.rope_type != "default":
        fields["rope_scaling"] = {k: v for k, v in values.items() if k != "rope_theta"}
    return fields


def is_speculators(values: dict[str, Any]) -> bool:
    return "speculators_model_type" in values


def speculators_to_plain(values: dict[str, Any], source: Path) -> dict[str, Any]:
    kind = values["speculators_model_type"]
    if kind not in MODEL_TYPES:
        raise UserError(f"{source}: speculators type {kind!r} is not supported; supported: {', '.join(MODEL_TYPES)}")
    shape = values.get("transformer_layer_config")
    if not isinstance(shape, dict):
        raise UserError(f"{source}: transformer_layer_config is missing or not an object")
    plain = {name: value for name, value in shape.items() if name not in PLAIN_ONLY}
    plain |= {name: values[name] for name in TOP_LEVEL_FIELDS if values.get(name) is not None}
    if "norm_before_residual" not in plain:
        # vLLM's default, which differs from speculators'
        plain["norm_before_residual"] = kind == "eagle3"
    if kind == "eagle3":
        plain.pop("mask_token_id", None)
    return plain


def plain_to_speculators(
    plain: dict[str, Any], verifier: str, verifier_architectures: list[str], num_speculative_tokens: int
) -> dict[str, Any]:
    """Converts the result of `build_drafter_config`. `num_speculative_tokens` becomes vLLM's default."""
    if plain["fc_norm"] and plain["norm_before_fc"]:
        raise UserError("speculators does not support fc_norm together with norm_before_fc; keep the plain format")
    kind = "peagle" if "mask_token_id" in plain else "eagle3"
    dtype = plain["dtype"]
    own = {name: plain[name] for name in TOP_LEVEL_FIELDS if name in plain}
    shape = {name: value for name, value in plain.items() if name not in (*TOP_LEVEL_FIELDS, *PLAIN_ONLY)}
    # vLLM reads these two only from transformer_layer_config for a peagle checkpoint
    shape |= {name: plain[name] for name in ("fc_norm", "norm_output")}
    return {
        "architectures": ["PEagleDraftModel" if kind == "peagle" else "Eagle3DraftModel"],
        "speculators_model_type": kind,
        "speculators_version": SPECULATORS_VERSION,
        "dtype": dtype,
        "torch_dtype": dtype,
        **own,
        "transformer_layer_config": shape,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": num_speculative_tokens}],
            "verifier": {"name_or_path": verifier, "architectures": verifier_architectures},
        },
        "tie_word_embeddings": False,
    }
