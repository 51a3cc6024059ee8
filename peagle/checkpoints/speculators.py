"""Converts config.json between the speculators format and the plain one.

Speculators keeps the transformer's fields in `transformer_layer_config` and names the target ("verifier"). Tensors have
the same names in both formats, except that layer 0 is `layers.0.` in speculators.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peagle.config import MASK_TOKEN_ID_KEYS
from peagle.errors import UserError

SPECULATORS_VERSION = "0.9.0"  # of the format that is written
MODEL_TYPES = ("peagle", "eagle3")
TOP_LEVEL_FIELDS = (
    "draft_vocab_size",
    "target_hidden_size",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "eagle_aux_hidden_state_layer_ids",
    "mask_token_id",
)
PLAIN_ONLY = (*MASK_TOKEN_ID_KEYS, "architectures", "dtype", "torch_dtype")


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


def get_num_speculative_tokens(values: dict[str, Any]) -> Any:
    """Returns the number of draft tokens in speculators_config, or None."""
    methods = (values.get("speculators_config") or {}).get("proposal_methods") or [{}]
    return methods[0].get("speculative_tokens") if isinstance(methods[0], dict) else None


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
