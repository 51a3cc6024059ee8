"""Typed reading of config.json fields: wrong types and absent fields get one line, never a traceback.

Knows the Llama-style names that targets and drafters share (shape and rotary fields), nothing more.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from peagle.config import ExpertsConfig, LayerConfig, RopeConfig
from peagle.errors import UserError

T = TypeVar("T", int, float, bool, str)
ROPE_KINDS = ("default", "linear", "llama3", "yarn")
MORE_ROPE_KINDS = (*ROPE_KINDS, "longrope")  # of targets alone: drafters are written for readers that do not know it
MAX_SIZE = 2**24  # far above any real width or vocabulary, and no product of two of them overflows
MAX_LAYERS = 1024


class ConfigReader:
    """A config.json's object and where it came from, for error messages."""

    def __init__(self, values: dict[str, Any], source: Path) -> None:
        self.values = values
        self.source = source

    def error(self, message: str) -> UserError:
        return UserError(f"{self.source}: {message}")

    def get(self, name: str, kind: type[T], default: T | None = None) -> T:
        """The field as `kind`; null counts as absent; without a default it must be there."""
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
        """A count that a tensor's shape hangs on."""
        value = self.get(name, int, default)
        if not 1 <= value <= maximum:
            raise self.error(f"field {name!r} is {value}, expected a size from 1 to {maximum}")
        return value

    def optional_size(self, name: str) -> int | None:
        return None if self.values.get(name) is None else self.size(name, maximum=2**31 - 1)

    def positive(self, name: str, default: float | None = None) -> float:
        value = self.get(name, float, default)
        if not 1e-30 < value < 1e30:  # neither nan nor anything that overflows on the way
            raise self.error(f"field {name!r} is {value}, expected a positive number")
        return value

    def optional_positive(self, name: str) -> float | None:
        """Zero counts as absent too, as transformers reads it."""
        return self.positive(name) if self.values.get(name) else None

    def section(self, name: str) -> ConfigReader:
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


def completed(values: dict[str, Any], source: Path) -> ConfigReader:
    """The object with what its writer left out: transformers saves only what differs from its defaults,
    and those differ by family, so transformers' own config class fills them in."""
    return ConfigReader(config_object(values, source).to_dict(), source)


def config_object(values: dict[str, Any], source: Path) -> Any:
    """As transformers has it."""
    from transformers import CONFIG_MAPPING
    from transformers.utils import logging

    fields = ConfigReader(values, source)
    fields.size("num_hidden_layers", 1, MAX_LAYERS)  # before a list that long is made of it
    kind = fields.get("model_type", str)
    if kind not in CONFIG_MAPPING:
        raise UserError(f"{source}: model_type {kind!r} is not known to the installed transformers")
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # its warnings about rope fields are no findings of ours
    try:
        config = CONFIG_MAPPING[kind](**values)
        config.to_dict()
        return config
    except Exception as error:  # a validator of transformers' or huggingface_hub's choosing
        reason = (str(error).splitlines() or [type(error).__name__])[-1].strip()
        raise UserError(f"{source}: not a usable {kind} config ({reason})") from None
    finally:
        logging.set_verbosity(verbosity)


def layer_config(fields: ConfigReader, *, qkv_bias: bool, out_bias: bool, mlp_bias: bool, qk_norm: bool) -> LayerConfig:
    heads, width = fields.size("num_attention_heads"), fields.size("hidden_size")
    kv_heads = fields.size("num_key_value_heads", heads)
    head_dim = fields.size("head_dim", max(width // heads, 1))
    if heads % kv_heads:
        raise fields.error(f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    if heads * head_dim > MAX_SIZE:
        raise fields.error(f"num_attention_heads {heads} times head_dim {head_dim} is more than {MAX_SIZE}")
    if head_dim % 2:
        raise fields.error(f"head_dim {head_dim} is odd; rotary positions need pairs")
    activation = fields.get("hidden_act", str, "silu")
    if activation not in ("silu", "swish"):
        raise fields.error(f"hidden_act {activation!r} is not supported; supported: silu")
    return LayerConfig(
        hidden_size=width,
        intermediate_size=fields.size("intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=fields.positive("rms_norm_eps", 1e-6),
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
    )


def experts_config(fields: ConfigReader, width_field: str, **more: Any) -> ExpertsConfig:
    """transformers keeps the number under the second name, published configs under either."""
    name = "num_experts" if fields.values.get("num_experts") is not None else "num_local_experts"
    count, chosen = fields.size(name), fields.size("num_experts_per_tok")
    if chosen > count:
        raise fields.error(f"num_experts_per_tok {chosen} is more than {name} {count}")
    return ExpertsConfig(count, chosen, fields.size(width_field), **more)


def positions(fields: ConfigReader) -> int:
    return fields.size("max_position_embeddings", maximum=2**31 - 1)


def rope_config(fields: ConfigReader, scaling: ConfigReader | None = None, more: bool = False) -> RopeConfig:
    """From `rope_parameters`, which `completed` has made of every older spelling, or from a part of them.

    `more`: what only targets may have, heads that are turned in part, and longrope.
    """
    scaling = fields.section("rope_parameters") if scaling is None else scaling
    theta = scaling.positive("rope_theta", RopeConfig.theta)
    kind = scaling.get("rope_type", str)  # missing where every kind of layer has parameters of its own
    kinds = MORE_ROPE_KINDS if more else ROPE_KINDS
    if kind not in kinds:
        raise fields.error(f"rope type {kind!r} is not supported; supported: {', '.join(kinds)}")
    rotated = scaling.get("partial_rotary_factor", float, fields.get("partial_rotary_factor", float, 1.0))
    if rotated != 1.0 and not more:
        raise fields.error("partial_rotary_factor is not supported")
    if not 0.0 < rotated <= 1.0:
        raise fields.error(f"partial_rotary_factor is {rotated}, expected a share of a head")
    if kind == "longrope" or rotated != 1.0:
        return _longrope(fields, scaling, theta, rotated, kind)
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, rope_type="linear", factor=scaling.positive("factor"))
    longest = positions(fields)
    original = scaling.optional_size("original_max_position_embeddings") or longest
    if kind == "llama3":
        low, high = scaling.positive("low_freq_factor"), scaling.positive("high_freq_factor")
        if low > high:  # Scout's are equal: nothing is blended
            raise fields.error(f"low_freq_factor {low} must not be above high_freq_factor {high}")
        return RopeConfig(
            theta=theta,
            rope_type="llama3",
            factor=scaling.positive("factor"),
            original_max_positions=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    if theta <= 1:
        raise fields.error(f"field 'rope_theta' is {theta}, expected more than 1 for yarn")
    return RopeConfig(
        theta=theta,
        rope_type="yarn",
        factor=scaling.positive("factor", longest / original),
        original_max_positions=original,
        beta_fast=scaling.positive("beta_fast", RopeConfig.beta_fast),
        beta_slow=scaling.positive("beta_slow", RopeConfig.beta_slow),
        attention_factor=scaling.optional_positive("attention_factor"),
        mscale=scaling.optional_positive("mscale"),
        mscale_all_dim=scaling.optional_positive("mscale_all_dim"),
        truncate=scaling.get("truncate", bool, RopeConfig.truncate),
    )


def proportional_rope(scaling: ConfigReader) -> RopeConfig:
    """Of a head only the first pairs are turned, as fast as if all were."""
    rotated = scaling.get("partial_rotary_factor", float, 1.0)
    if not 0.0 <= rotated <= 1.0:
        raise scaling.error(f"partial_rotary_factor is {rotated}, expected a share of a head")
    factor = scaling.positive("factor", 1.0)
    return RopeConfig(scaling.positive("rope_theta"), "proportional", factor, partial_rotary_factor=rotated)


def _longrope(fields: ConfigReader, scaling: ConfigReader, theta: float, rotated: float, kind: str) -> RopeConfig:
    if kind == "default":
        return RopeConfig(theta=theta, partial_rotary_factor=rotated)
    if kind != "longrope":
        raise fields.error(f"partial_rotary_factor together with rope type {kind!r} is not supported")
    head_dim = fields.size("head_dim", fields.size("hidden_size") // fields.size("num_attention_heads"))
    longest = positions(fields)
    original = scaling.optional_size("original_max_position_embeddings") or longest
    return RopeConfig(
        theta=theta,
        rope_type="longrope",
        factor=scaling.positive("factor", longest / original),
        original_max_positions=original,
        attention_factor=scaling.optional_positive("attention_factor"),
        short_factors=_factors(scaling, "short_factor", int(head_dim * rotated) // 2),
        long_factors=_factors(scaling, "long_factor", int(head_dim * rotated) // 2),
        partial_rotary_factor=rotated,
    )


def _factors(scaling: ConfigReader, name: str, count: int) -> tuple[float, ...]:
    values = scaling.values.get(name)
    if not isinstance(values, list) or len(values) != count or not all(type(v) in (int, float) for v in values):
        raise scaling.error(f"field {name!r} must be a list of {count} numbers, one for each pair that is turned")
    if not all(1e-6 < v < 1e9 for v in values):
        raise scaling.error(f"field {name!r} must hold positive numbers")
    return tuple(float(v) for v in values)


def rope_fields(rope: RopeConfig) -> dict[str, Any]:
    """The same, as transformers 5 and older readers want it, side by side."""
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


def layer_fields(layer: LayerConfig) -> dict[str, Any]:
    return {
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_attention_heads": layer.num_heads,
        "num_key_value_heads": layer.num_kv_heads,
        "head_dim": layer.head_dim,
        "rms_norm_eps": layer.norm_eps,
        "hidden_act": "silu",
        "attention_bias": layer.qkv_bias,
        "mlp_bias": layer.mlp_bias,
    }
