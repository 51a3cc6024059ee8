"""Helpers that several tests share: hypothesis settings, torch threads, edits of checkpoint folders."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from safetensors.torch import load_file, save_file

WEIGHTS = "model.safetensors"


def many(examples: int) -> settings:
    """Hypothesis settings with the same examples on every run and no time limit."""
    return settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def edit_config(folder: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    values = json.loads((folder / "config.json").read_text())
    edit(values)
    (folder / "config.json").write_text(json.dumps(values))


def set_config(folder: Path, **fields: Any) -> None:
    edit_config(folder, lambda values: values.update(fields))


def edit_weights(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / WEIGHTS)
    edit(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
