"""The speculators format's config <-> the plain one's.

Knows config objects only: the tensors carry the same names in both formats, but for layer 0, which
speculators calls `layers.0.`. Its config keeps the transformer's shape one level down and names its verifier.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peagle.config import MASK_TOKEN_ID_KEYS
from peagle.errors import UserError

VERSION = "0.9.0"  # of the format written here
KINDS = ("peagle", "eagle3")
OWN_FIELDS = (
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
    if kind not in KINDS:
        raise UserError(f"{source}: speculators type {kind!r} is not supported; supported: {', '.join(KINDS)}")
    shape = values.get("transformer_layer_config")
    if not isinstance(shape, dict):
        raise UserError(f"{source}: no transformer_layer_config object in it")
    plain = {name: value for name, value in shape.items() if name not in PLAIN_ONLY}
    plain |= {name: values[name] for name in OWN_FIELDS if values.get(name) is not None}
    if "norm_before_residual" not in plain:
        # vLLM's reading, since that is where such a checkpoint runs: true for eagle3, false for peagle
        plain["norm_before_residual"] = kind == "eagle3"
    if kind == "eagle3":
        plain.pop("mask_token_id", None)
    return plain


def proposed_tokens(values: dict[str, Any]) -> Any:
    """The number of drafts that the format's own config names, or None."""
    methods = (values.get("speculators_config") or {}).get("proposal_methods") or [{}]
    return methods[0].get("speculative_tokens") if isinstance(methods[0], dict) else None


def plain_to_speculators(
    plain: dict[str, Any], verifier: str, verifier_architectures: list[str], draft_tokens: int
) -> dict[str, Any]:
    """`plain` as `build_drafter_config` writes it; `draft_tokens` is what vLLM uses when not told otherwise."""
    if plain["fc_norm"] and plain["norm_before_fc"]:
        raise UserError("speculators has no drafter with both fc_norm and norm_before_fc: keep the plain format")
    kind = "peagle" if "mask_token_id" in plain else "eagle3"
    dtype = plain["dtype"]
    own = {name: plain[name] for name in OWN_FIELDS if name in plain}
    shape = {name: value for name, value in plain.items() if name not in (*OWN_FIELDS, *PLAIN_ONLY)}
    # vLLM reads these two from the transformer's section for a peagle checkpoint, and nowhere else
    shape |= {name: plain[name] for name in ("fc_norm", "norm_output")}
    return {
        "architectures": ["PEagleDraftModel" if kind == "peagle" else "Eagle3DraftModel"],
        "speculators_model_type": kind,
        "speculators_version": VERSION,
        "dtype": dtype,
        "torch_dtype": dtype,
        **own,
        "transformer_layer_config": shape,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": draft_tokens}],
            "verifier": {"name_or_path": verifier, "architectures": verifier_architectures},
        },
        "tie_word_embeddings": False,
    }
