"""The target and drafter of a deployment: their names for vLLM, and their configs.

A target on the hub is not downloaded, except for its config and tokenizer.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peagle.checkpoints.config_reader import fill_defaults
from peagle.checkpoints.drafter import read_drafter_config, trained_num_speculative_tokens
from peagle.checkpoints.files import SafetensorsFolder, read_config_json
from peagle.config import DrafterConfig, check_num_speculative_tokens, default_num_speculative_tokens
from peagle.errors import UserError
from peagle.hub.resolve import HUB_FILES, HUB_ID, resolve_drafter, resolve_target


@dataclass(frozen=True)
class DeployedModel:
    """`name` is a hub id or an absolute path; `folder` is a local copy of its config, or None."""

    name: str
    on_hub: bool
    folder: Path | None


@dataclass(frozen=True)
class TargetFacts:
    """The fields of a target's config.json, of any architecture, that the checks use."""

    architecture: str
    hidden_size: int
    vocab_size: int
    num_layers: int
    num_sliding_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int


@dataclass(frozen=True)
class DeployedPair:
    """A target and a drafter. Facts and config are None if they could not be read."""

    target: DeployedModel
    drafter: DeployedModel
    target_facts: TargetFacts | None
    drafter_config: DrafterConfig | None
    parallel: bool  # an unread drafter is assumed to be P-EAGLE
    num_speculative_tokens: int
    trained_num_speculative_tokens: int | None


def resolve_pair(target: str, drafter: str, num_speculative_tokens: int | None, unchecked: bool) -> DeployedPair:
    """Resolves both models. With `unchecked`, nothing is fetched from the hub."""
    target_model, drafter_model = resolve_deployed_target(target, unchecked), _resolve_drafter(drafter, unchecked)
    facts = read_target_facts(target_model.folder) if target_model.folder is not None else None
    config = trained = None
    parallel = True
    if drafter_model.folder is not None:
        config = _read_drafter_config(drafter_model.folder, target_model.folder)
        parallel = "mask_hidden" in SafetensorsFolder(drafter_model.folder)
        trained = trained_num_speculative_tokens(drafter_model.folder)
    if num_speculative_tokens is None:
        num_speculative_tokens = default_num_speculative_tokens(parallel)
    check_num_speculative_tokens(num_speculative_tokens)
    return DeployedPair(target_model, drafter_model, facts, config, parallel, num_speculative_tokens, trained)


def resolve_deployed_target(name: str, unchecked: bool) -> DeployedModel:
    if not _is_hub_id(name):
        return _local_model(resolve_target(name))
    return DeployedModel(name, True, None if unchecked else _fetch_config(name))


def _resolve_drafter(name: str, unchecked: bool) -> DeployedModel:
    if not _is_hub_id(name):
        return _local_model(resolve_drafter(name))
    return DeployedModel(name, True, None if unchecked else resolve_drafter(name))


def _is_hub_id(name: str) -> bool:
    return not os.path.exists(os.path.expanduser(name)) and HUB_ID.fullmatch(name) is not None


def _local_model(folder: Path) -> DeployedModel:
    folder = folder.resolve()
    return DeployedModel(str(folder), False, folder)


def _fetch_config(name: str) -> Path:
    from huggingface_hub import snapshot_download

    files = [pattern for pattern in HUB_FILES if "safetensors" not in pattern]
    try:
        return Path(snapshot_download(name, allow_patterns=files))
    except Exception as error:  # huggingface_hub raises various types
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UserError(f"{name}: its config could not be fetched ({reason}); give a folder, or --unchecked") from None


def _read_drafter_config(folder: Path, target: Path | None) -> DrafterConfig | None:
    """None if the config is invalid, which the checks report."""
    from peagle.checkpoints.target import read_target_config

    try:
        cfg = read_target_config(target) if target is not None else None
    except UserError:  # vLLM supports more targets than peagle
        cfg = None
    try:
        return read_drafter_config(folder, cfg)
    except UserError:
        return None


def read_target_facts(folder: Path) -> TargetFacts:
    """Reads config.json, also of architectures that peagle does not run."""
    raw = read_config_json(folder)
    text_config = raw.get("text_config")  # of multimodal models
    values = text_config if isinstance(text_config, dict) else raw
    try:
        values = {**values, **fill_defaults(values, folder / "config.json").values}
    except UserError:
        pass  # unknown to the installed transformers: use only the fields in the file

    def size(name: str, default: int | None = None) -> int:
        value = values.get(name)
        if type(value) is not int or value < 1:
            if default is not None:
                return default
            raise UserError(f"{folder / 'config.json'}: field {name!r} is {value!r}, expected a positive integer")
        return value

    num_heads, hidden_size = size("num_attention_heads"), size("hidden_size")
    num_layers = size("num_hidden_layers")
    architectures = raw.get("architectures")
    return TargetFacts(
        architecture=architectures[0] if isinstance(architectures, list) and architectures else "unknown",
        hidden_size=hidden_size,
        vocab_size=size("vocab_size"),
        num_layers=num_layers,
        num_sliding_layers=_count_sliding_layers(values, num_layers),
        num_heads=num_heads,
        num_kv_heads=size("num_key_value_heads", num_heads),
        head_dim=size("head_dim", max(hidden_size // num_heads, 1)),
        max_positions=size("max_position_embeddings"),
    )


def _count_sliding_layers(values: dict[str, Any], num_layers: int) -> int:
    layer_types = values.get("layer_types")
    if isinstance(layer_types, list):
        return layer_types.count("sliding_attention")
    return num_layers if values.get("model_type") == "mistral" and values.get("sliding_window") else 0
