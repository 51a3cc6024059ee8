"""Converts a drafter folder between the plain and the speculators format; tensors stay bit-identical.

Speculators stores head and embeddings in every checkpoint. They are copied from the target when converting to it, and
omitted when converting back if they equal the target's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from peagle.checkpoints import speculators
from peagle.checkpoints.drafter import (
    build_drafter_config,
    check_drafter_fits,
    drafter_tensors,
    load_unshared_drafter,
    module_tensor_name,
    plain_tensor_name,
    read_drafter_config,
    same_tensor,
)
from peagle.checkpoints.files import SafetensorsFolder, read_config_json, write_folder, write_json, write_weights
from peagle.checkpoints.target import read_target_config

CheckpointFormat = Literal["plain", "speculators"]


def detect_format(folder: Path) -> CheckpointFormat:
    return "speculators" if speculators.is_speculators(read_config_json(folder)) else "plain"


def convert_drafter(
    source: Path, out: Path, to: CheckpointFormat, target: Path, target_name: str, num_speculative_tokens: int
) -> dict[str, str]:
    """Writes the folder `out`. Returns a message for each table that was copied or omitted."""
    target_cfg = read_target_config(target)
    cfg = read_drafter_config(source, target_cfg)
    check_drafter_fits(cfg, target_cfg, source)
    drafter = load_unshared_drafter(source, cfg, dtype=None)
    tensors = {module_tensor_name(name): tensor for name, tensor in drafter_tensors(drafter).items()}
    values = build_drafter_config(cfg, drafter.fc.weight.dtype)
    messages: dict[str, str] = {}
    target_weights = SafetensorsFolder(target)
    for name in ("embed_tokens.weight", "lm_head.weight"):
        tied = name == "lm_head.weight" and target_cfg.tie_word_embeddings
        table = target_weights["model.embed_tokens.weight" if tied or name.startswith("embed") else name]
        if to == "speculators" and name not in tensors:
            tensors[name] = table.to(drafter.fc.weight.dtype)
            messages[name] = "copied from the target"
        elif to == "plain" and name in tensors and same_tensor(tensors[name], table.to(tensors[name].dtype)):
            del tensors[name]
            messages[name] = "omitted: equal to the target's, which is shared"
    if to == "plain":
        tensors = {plain_tensor_name(name): tensor for name, tensor in tensors.items()}
    else:
        architectures = read_config_json(target).get("architectures", [])
        values = speculators.plain_to_speculators(values, target_name, architectures, num_speculative_tokens)

    def write(into: Path) -> None:
        write_weights(tensors, into)
        write_json(values, into / "config.json")

    write_folder(out, write)
    return messages
