"""One drafter folder into another: plain <-> speculators, the tensors bit for bit.

Speculators keeps a head and embeddings in every checkpoint, so they are copied from the target on the way
there and left out again on the way back where they equal the target's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from peagle.checkpoints import speculators
from peagle.checkpoints.drafter import (
    build_drafter_config,
    canonical,
    check_drafter_fits,
    drafter_tensors,
    load_unshared_drafter,
    plain_tensor_name,
    read_drafter_config,
    same_tensor,
)
from peagle.checkpoints.files import SafetensorsFolder, read_config_json, write_folder, write_json, write_weights
from peagle.checkpoints.target import read_target_config

Format = Literal["plain", "speculators"]


def format_of(folder: Path) -> Format:
    return "speculators" if speculators.is_speculators(read_config_json(folder)) else "plain"


def convert(source: Path, out: Path, to: Format, target: Path, target_name: str, draft_tokens: int) -> dict[str, str]:
    """Writes `out`; returns what became of the shared tables, for the user to read."""
    target_cfg = read_target_config(target)
    cfg = read_drafter_config(source, target_cfg)
    check_drafter_fits(cfg, target_cfg, source)
    drafter = load_unshared_drafter(source, cfg, dtype=None)
    tensors = {canonical(name): tensor for name, tensor in drafter_tensors(drafter).items()}
    values = build_drafter_config(cfg, drafter.fc.weight.dtype)
    fate: dict[str, str] = {}
    theirs = SafetensorsFolder(target)
    for name in ("embed_tokens.weight", "lm_head.weight"):
        tied = name == "lm_head.weight" and target_cfg.tie_word_embeddings
        table = theirs["model.embed_tokens.weight" if tied or name.startswith("embed") else name]
        if to == "speculators" and name not in tensors:
            tensors[name] = table.to(drafter.fc.weight.dtype)
            fate[name] = "copied from the target"
        elif to == "plain" and name in tensors and same_tensor(tensors[name], table.to(tensors[name].dtype)):
            del tensors[name]
            fate[name] = "left out: equal to the target's, so shared with it"
    if to == "plain":
        tensors = {plain_tensor_name(name): tensor for name, tensor in tensors.items()}
    else:
        architectures = read_config_json(target).get("architectures", [])
        values = speculators.plain_to_speculators(values, target_name, architectures, draft_tokens)

    def write(into: Path) -> None:
        write_weights(tensors, into)
        write_json(values, into / "config.json")

    write_folder(out, write)
    return fate
