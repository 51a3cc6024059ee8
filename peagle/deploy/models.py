"""The target and drafter of a deployment: their names for vLLM, and their configs.

A target on the hub is not downloaded, except for its config and tokenizer.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from peagle.checkpoints.drafter import read_drafter_config, trained_num_speculative_tokens
from peagle.checkpoints.files import SafetensorsFolder
from peagle.checkpoints.target import read_target_sizes
from peagle.config import DecoderConfig, DrafterConfig, check_num_speculative_tokens, default_num_speculative_tokens
from peagle.errors import UserError, first_line
from peagle.hub.resolve import HUB_FILES, HUB_ID, resolve_drafter, resolve_target


@dataclass(frozen=True)
class DeployedModel:
    """`name` is a hub id or an absolute path; `folder` is a local copy of its config, or None."""

    name: str
    on_hub: bool
    folder: Path | None


@dataclass(frozen=True)
class DeployedPair:
    """A target and a drafter. A config is None if it was not read, or if peagle does not support it."""

    target: DeployedModel
    drafter: DeployedModel
    target_config: DecoderConfig | None
    drafter_config: DrafterConfig | None
    parallel: bool  # an unread drafter is assumed to be P-EAGLE
    num_speculative_tokens: int
    trained_num_speculative_tokens: int | None


def resolve_pair(target: str, drafter: str, num_speculative_tokens: int | None, unchecked: bool) -> DeployedPair:
    """Resolves both models. With `unchecked`, nothing is fetched from the hub."""
    target_model = resolve_deployed_target(target, unchecked)
    drafter_model = _resolve_model(drafter, unchecked, resolve_drafter, resolve_drafter)
    target_config = drafter_config = trained = None
    parallel = True
    if target_model.folder is not None:
        with suppress(UserError):  # vLLM supports more targets than peagle
            target_config = read_target_sizes(target_model.folder)
    if (folder := drafter_model.folder) is not None:
        with suppress(UserError):  # the checks report it
            drafter_config = read_drafter_config(folder, target_config)
        parallel = "mask_hidden" in SafetensorsFolder(folder)
        trained = trained_num_speculative_tokens(folder)
    if num_speculative_tokens is None:
        num_speculative_tokens = default_num_speculative_tokens(parallel)
    check_num_speculative_tokens(num_speculative_tokens)
    return DeployedPair(
        target_model, drafter_model, target_config, drafter_config, parallel, num_speculative_tokens, trained
    )


def resolve_deployed_target(name: str, unchecked: bool) -> DeployedModel:
    return _resolve_model(name, unchecked, resolve_target, _fetch_config)


def _resolve_model(
    name: str, unchecked: bool, resolve: Callable[[str], Path], fetch: Callable[[str], Path]
) -> DeployedModel:
    if HUB_ID.fullmatch(name) is not None and not os.path.exists(os.path.expanduser(name)):
        return DeployedModel(name, True, None if unchecked else fetch(name))
    folder = resolve(name).resolve()
    return DeployedModel(str(folder), False, folder)


def _fetch_config(name: str) -> Path:
    from huggingface_hub import snapshot_download

    files = [pattern for pattern in HUB_FILES if "safetensors" not in pattern]
    try:
        return Path(snapshot_download(name, allow_patterns=files))
    except Exception as error:  # huggingface_hub raises various types
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise UserError(f"{name}: its config could not be fetched ({reason}); give a folder, or --unchecked") from None
