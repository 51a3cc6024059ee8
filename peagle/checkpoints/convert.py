"""Converts drafter folders between the plain and the speculators format, and averages the weights of several.

Conversion keeps tensors bit-identical. Speculators stores head and embeddings in every checkpoint. They are copied from
the target when converting to it, and omitted when converting back if they equal the target's.

The average of drafters that were fine-tuned from the same checkpoint is often better than each of them. Averaging
unrelated drafters gives noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from peagle.checkpoints.config_reader import is_speculators, plain_to_speculators
from peagle.checkpoints.drafter import (
    build_drafter_config,
    check_drafter_fits,
    drafter_tensors,
    load_unshared_drafter,
    module_tensor_name,
    plain_tensor_name,
    read_drafter_config,
    trained_num_speculative_tokens,
)
from peagle.checkpoints.files import SafetensorsFolder, read_config_json, save_checkpoint
from peagle.checkpoints.target import read_target_config
from peagle.errors import UserError

CheckpointFormat = Literal["plain", "speculators"]


def detect_format(folder: Path) -> CheckpointFormat:
    return "speculators" if is_speculators(read_config_json(folder)) else "plain"


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
            tensors[name] = table.to(drafter.fc.weight.dtype, copy=True)
            messages[name] = "copied from the target"
        elif to == "plain" and name in tensors and torch.equal(tensors[name], table.to(tensors[name].dtype)):
            del tensors[name]
            messages[name] = "omitted: equal to the target's, which is shared"
    if to == "plain":
        tensors = {plain_tensor_name(name): tensor for name, tensor in tensors.items()}
    else:
        architectures = read_config_json(target).get("architectures", [])
        values = plain_to_speculators(values, target_name, architectures, num_speculative_tokens)

    save_checkpoint(tensors, values, out)
    return messages


def average_drafters(sources: Sequence[Path], out: Path, weights: Sequence[float]) -> None:
    """Writes the weighted average in the plain format and the first drafter's dtype. `weights` need not sum to 1."""
    assert len(sources) == len(weights) > 1, (sources, weights)
    configs = [read_drafter_config(source) for source in sources]
    for source, cfg in zip(sources[1:], configs[1:], strict=True):
        first, other = asdict(configs[0]), asdict(cfg)
        different = [name for name in first if first[name] != other[name]]
        if different:
            name = different[0]
            raise UserError(
                f"{source}: cannot be averaged with {sources[0]}: {name} is {other[name]!r} instead of {first[name]!r}"
            )
    drafters = [load_unshared_drafter(source, configs[0], dtype=None) for source in sources]
    for source, drafter in zip(sources, drafters, strict=True):
        d2t = drafters[0].d2t
        if d2t is not None and drafter.d2t is not None and not torch.equal(d2t, drafter.d2t):
            raise UserError(f"{source}: cannot be averaged with {sources[0]}: their draft vocabularies differ")
    inputs = [drafter_tensors(drafter) for drafter in drafters]
    tensors = {name: _average([each[name] for each in inputs], weights) for name in inputs[0]}
    values = build_drafter_config(configs[0], drafters[0].fc.weight.dtype)
    trained = [tokens for source in sources if (tokens := trained_num_speculative_tokens(source)) is not None]
    if trained:
        values["trained_draft_tokens"] = min(trained)
    save_checkpoint(tensors, values, out)


def _average(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    first = tensors[0]
    if not first.is_floating_point():  # d2t and t2d
        return first
    total = torch.zeros(first.shape, dtype=torch.float64)
    for tensor, weight in zip(tensors, weights, strict=True):
        total += tensor.double() * weight
    return (total / sum(weights)).to(first.dtype)
