"""One drafter from several of the same shape: the mean of their weights.

Drafters that were trained on from the same one lie close enough together for their mean to be a drafter too, and often
a better one than any of them. Of strangers it is noise.
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


def average(sources: Sequence[Path], out: Path, shares: Sequence[float]) -> None:
    """Writes `out`, in the plain format and the first one's dtype. `shares` are each one's part, of any sum."""
    assert len(sources) == len(shares) > 1, (sources, shares)
    configs = [read_drafter_config(source) for source in sources]
    for source, cfg in zip(sources[1:], configs[1:], strict=True):
        ours, theirs = asdict(configs[0]), asdict(cfg)
        other = [name for name in ours if ours[name] != theirs[name]]
        if other:
            raise UserError(
                f"{source}: cannot be averaged with {sources[0]}: {other[0]} is {theirs[other[0]]!r} here and "
                f"{ours[other[0]]!r} there"
            )
    drafters = [load_unshared_drafter(source, configs[0], dtype=None) for source in sources]
    every = [drafter_tensors(drafter) for drafter in drafters]
    tensors = {name: _mean(name, [own[name] for own in every], shares, sources) for name in every[0]}
    values = build_drafter_config(configs[0], drafters[0].fc.weight.dtype)
    trained = [tokens for source in sources if (tokens := trained_num_speculative_tokens(source)) is not None]
    if trained:
        values["trained_draft_tokens"] = min(trained)

    def write(into: Path) -> None:
        write_weights(tensors, into)
        write_json(values, into / "config.json")

    write_folder(out, write)


def _mean(name: str, tensors: Sequence[Tensor], shares: Sequence[float], sources: Sequence[Path]) -> Tensor:
    first = tensors[0]
    if not first.is_floating_point():  # which tokens a reduced vocabulary has
        for source, tensor in zip(sources[1:], tensors[1:], strict=True):
            if not same_tensor(first, tensor):
                raise UserError(f"{source}: cannot be averaged with {sources[0]}: they have different tokens ({name})")
        return first
    total = torch.zeros(first.shape, dtype=torch.float64)
    for tensor, share in zip(tensors, shares, strict=True):
        total += tensor.double() * share
    return (total / sum(shares)).to(first.dtype)
