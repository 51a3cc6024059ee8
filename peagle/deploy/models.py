"""What is to be served: the names vLLM is told, and what can be read of them here.

Knows folders and hub ids. Of a target on the hub only the configuration and the tokenizer are fetched, never weights.
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
class Model:
    """`name` is a hub id or a whole path; `folder` is where it can be read, None where it cannot."""

    name: str
    on_hub: bool
    folder: Path | None


@dataclass(frozen=True)
class TargetFacts:
    """What vLLM's rules ask of a target, of any architecture; a count of layers with a sliding window."""

    architecture: str
    width: int
    vocab: int
    layers: int
    sliding: int
    heads: int
    kv_heads: int
    head_dim: int
    positions: int
    quantized: bool


@dataclass(frozen=True)
class Pair:
    """Both models; facts are None of one that could not be read."""

    target: Model
    drafter: Model
    target_facts: TargetFacts | None
    drafter_config: DrafterConfig | None
    parallel: bool  # a drafter that could not be read counts as P-EAGLE; the checks say so
    draft_tokens: int
    trained_tokens: int | None


def resolve_pair(target: str, drafter: str, draft_tokens: int | None, unchecked: bool) -> Pair:
    """With `unchecked` nothing is fetched, so that what is on the hub stays unread."""
    first, second = resolve_deployed_target(target, unchecked), find_drafter(drafter, unchecked)
    facts = target_facts(first.folder) if first.folder is not None else None
    config = trained = None
    parallel = True
    if second.folder is not None:
        config = _drafter_config(second.folder, first.folder)
        parallel = "mask_hidden" in SafetensorsFolder(second.folder)
        trained = trained_num_speculative_tokens(second.folder)
    k = check_num_speculative_tokens(default_num_speculative_tokens(parallel) if draft_tokens is None else draft_tokens)
    return Pair(first, second, facts, config, parallel, k, trained)


def resolve_deployed_target(name: str, unchecked: bool) -> Model:
    if not _on_hub(name):
        return _local(resolve_target(name))
    return Model(name, True, None if unchecked else _fetch_small(name))


def find_drafter(name: str, unchecked: bool) -> Model:
    if not _on_hub(name):
        return _local(resolve_drafter(name))
    return Model(name, True, None if unchecked else resolve_drafter(name))


def _on_hub(name: str) -> bool:
    return not os.path.exists(os.path.expanduser(name)) and HUB_ID.fullmatch(name) is not None


def _local(folder: Path) -> Model:
    whole = folder.resolve()
    return Model(str(whole), False, whole)


def _fetch_small(name: str) -> Path:
    from huggingface_hub import snapshot_download

    files = [pattern for pattern in HUB_FILES if "safetensors" not in pattern]
    try:
        return Path(snapshot_download(name, allow_patterns=files))
    except Exception as error:  # whatever the hub's client of the moment raises
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UserError(
            f"{name}: its configuration could not be fetched ({reason}); give a folder, or --unchecked"
        ) from None


def _drafter_config(folder: Path, target: Path | None) -> DrafterConfig | None:
    """None where it is broken, which the checks tell in full."""
    from peagle.checkpoints.target import read_target_config

    try:
        cfg = read_target_config(target) if target is not None else None
    except UserError:  # a target that vLLM can run need not be one that runs here
        cfg = None
    try:
        return read_drafter_config(folder, cfg)
    except UserError:
        return None


def target_facts(folder: Path) -> TargetFacts:
    """From config.json, also of architectures that do not run here; nested where the model sees pictures too."""
    raw = read_config_json(folder)
    nested = raw.get("text_config")
    values = nested if isinstance(nested, dict) else raw
    try:
        values = {**values, **fill_defaults(values, folder / "config.json").values}
    except UserError:
        pass  # newer than the installed transformers: what is written has to do

    def number(name: str, otherwise: int | None = None) -> int:
        value = values.get(name)
        if type(value) is not int or value < 1:
            if otherwise is not None:
                return otherwise
            raise UserError(f"{folder / 'config.json'}: field {name!r} is {value!r}, expected a whole number")
        return value

    heads, width, layers = number("num_attention_heads"), number("hidden_size"), number("num_hidden_layers")
    architectures = raw.get("architectures")
    return TargetFacts(
        architecture=architectures[0] if isinstance(architectures, list) and architectures else "unknown",
        width=width,
        vocab=number("vocab_size"),
        layers=layers,
        sliding=_sliding(values, layers),
        heads=heads,
        kv_heads=number("num_key_value_heads", heads),
        head_dim=number("head_dim", max(width // heads, 1)),
        positions=number("max_position_embeddings"),
        quantized=bool(raw.get("quantization_config")),
    )


def _sliding(values: dict[str, Any], layers: int) -> int:
    kinds = values.get("layer_types")
    if isinstance(kinds, list):
        return sum(kind == "sliding_attention" for kind in kinds)
    if values.get("model_type") == "mistral" and values.get("sliding_window"):
        return layers
    return 0
