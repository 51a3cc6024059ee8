"""Averages the weights of several drafters of the same shape.

The average of drafters that were fine-tuned from the same checkpoint is often better than each of them. Averaging
unrelated drafters gives noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from peagle.checkpoints.drafter import (
    build_drafter_config,
    drafter_tensors,
    load_unshared_drafter,
    read_drafter_config,
    same_tensor,
    trained_num_speculative_tokens,
)
from peagle.checkpoints.files import write_folder, write_json, write_weights
from peagle.errors import UserError


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
    inputs = [drafter_tensors(drafter) for drafter in drafters]
    tensors = {name: _average(name, [each[name] for each in inputs], weights, sources) for name in inputs[0]}
    values = build_drafter_config(configs[0], drafters[0].fc.weight.dtype)
    trained = [tokens for source in sources if (tokens := trained_num_speculative_tokens(source)) is not None]
    if trained:
        values["trained_draft_tokens"] = min(trained)

    def write(into: Path) -> None:
        write_weights(tensors, into)
        write_json(values, into / "config.json")

    write_folder(out, write)


def _average(name: str, tensors: Sequence[Tensor], weights: Sequence[float], sources: Sequence[Path]) -> Tensor:
    first = tensors[0]
    if not first.is_floating_point():  # d2t and t2d
        for source, tensor in zip(sources[1:], tensors[1:], strict=True):
            if not same_tensor(first, tensor):
                raise UserError(
                    f"{source}: cannot be averaged with {sources[0]}: their draft vocabularies differ ({name})"
                )
        return first
    total = torch.zeros(first.shape, dtype=torch.float64)
    for tensor, weight in zip(tensors, weights, strict=True):
        total += tensor.double() * weight
    return (total / sum(weights)).to(first.dtype)
