"""Which tensor of a file fills which rows of which parameter.

Checkpoints keep q/k/v, gate/up and experts apart, the modules keep them merged. A layout is made from a module built
on the `meta` device, so names and shapes are known without a byte of weights; the loaders fill it, the
writers read it backwards, the validator compares it with a file's header.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from peagle.config import LayerConfig
from peagle.errors import UserError
from peagle.models.layers import Attention


@dataclass(frozen=True)
class Slot:
    """Rows [start, start + shape[0]) of a parameter."""

    param: str
    start: int
    shape: tuple[int, ...]


Layout = dict[str, Slot]  # name in the file -> slot

# Parameters that hold all experts of a layer, and what each expert has of them in a file.
EXPERT_PARTS = {
    ".mlp.gate_up": ("gate_proj.weight", "up_proj.weight"),
    ".mlp.gate_up_bias": ("gate_proj.bias", "up_proj.bias"),
    ".mlp.gate_up_words": ("gate_proj.words", "up_proj.words"),
    ".mlp.gate_up_exponents": ("gate_proj.exponents", "up_proj.exponents"),
    ".mlp.down": ("down_proj.weight",),
    ".mlp.down_words": ("down_proj.words",),
    ".mlp.down_exponents": ("down_proj.exponents",),
    ".mlp.down_bias": ("down_proj.bias",),
}


class Tensors(Protocol):
    """What a layout is filled from."""

    @property
    def folder(self) -> Path: ...

    def __getitem__(self, name: str) -> Tensor: ...


def build_layout(module: nn.Module, layer: LayerConfig) -> Layout:
    """Every tensor the module wants, under its unmerged name."""
    layout: Layout = {}
    for param, tensor in module.state_dict().items():
        whole = next((name for name in EXPERT_PARTS if param.endswith(name)), None)
        if whole is not None and layer.experts is not None:
            names = [
                f"{param.removesuffix(whole)}.mlp.experts.{e}.{part}"
                for e in range(layer.experts.num_experts)
                for part in EXPERT_PARTS[whole]
            ]
            rows = len(tensor) // len(names)
            layout |= {name: Slot(param, i * rows, (rows, *tensor.shape[1:])) for i, name in enumerate(names)}
            continue
        start = 0
        for name, rows in _unmerged(module, param, len(tensor) if tensor.dim() else 0):
            layout[name] = Slot(param, start, (rows, *tensor.shape[1:]) if tensor.dim() else ())
            start += rows
    return layout


def _unmerged(module: nn.Module, param: str, rows: int) -> list[tuple[str, int]]:
    """What a file has of a parameter, and how many rows of it each has."""
    owner, together, last = param.partition(".qkv_proj.")
    if together:  # layers of one model may have heads of different widths
        attention: Attention = module.get_submodule(owner)  # type: ignore[assignment]
        q, kv = (heads * attention.head_dim for heads in (attention.heads, attention.kv_heads))
        return [(f"{owner}.{part}.{last}", size) for part, size in (("q_proj", q), ("k_proj", kv), ("v_proj", kv))]
    owner, together, last = param.partition(".gate_up_proj.")
    if together:
        return [(f"{owner}.{part}.{last}", rows // 2) for part in ("gate_proj", "up_proj")]
    return [(param, rows)]


def problems(layout: Layout, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Missing, unknown and wrongly shaped tensors of a file, a line each."""
    found = [f"tensor {name!r} is missing" for name in layout if name not in shapes]
    found += [f"tensor {name!r} is not known here" for name in shapes if name not in layout]
    for name, slot in layout.items():
        if name in shapes and shapes[name] != slot.shape:
            found.append(f"tensor {name!r} has shape {list(shapes[name])}, expected {list(slot.shape)}")
    return found


def fill(
    module: nn.Module,
    layout: Layout,
    weights: Tensors,
    file_names: Mapping[str, str],
    dtype: torch.dtype | None,
    device: torch.device | str,
) -> None:
    """Replaces the module's `meta` parameters; floating tensors become `dtype`, or stay as stored.

    Eight-bit floats are refused like integers: they mean nothing without scales, which are not read here. What the
    module itself keeps in eight bits is no float.
    """
    state: dict[str, Tensor] = {}
    wanted = module.state_dict()
    for name, slot in layout.items():
        tensor = weights[file_names[name]].reshape(slot.shape).to(device)
        floating = wanted[slot.param].is_floating_point()
        small = tensor.dtype.itemsize < 2 and tensor.dtype != wanted[slot.param].dtype
        if floating != tensor.is_floating_point() or small:
            stored = str(tensor.dtype).removeprefix("torch.")
            raise UserError(f"{weights.folder}: tensor {file_names[name]!r} is stored as {stored}, not supported")
        if not floating:
            tensor = tensor.to(wanted[slot.param].dtype)
        elif dtype is not None:
            tensor = tensor.to(dtype)
        if slot.shape == tuple(wanted[slot.param].shape):
            state[slot.param] = tensor
            continue
        if slot.param not in state:
            state[slot.param] = torch.empty(wanted[slot.param].shape, dtype=tensor.dtype, device=device)
        if state[slot.param].dtype != tensor.dtype:
            raise UserError(f"{weights.folder}: tensor {file_names[name]!r} has another dtype than its neighbours")
        state[slot.param][slot.start : slot.start + slot.shape[0]] = tensor
    module.load_state_dict(state, assign=True)


def split_parameters(module: nn.Module, layout: Layout) -> dict[str, Tensor]:
    """The module's tensors under the names of the file."""
    state = module.state_dict()
    return {
        name: state[slot.param][slot.start : slot.start + slot.shape[0]] if slot.shape else state[slot.param]
        for name, slot in layout.items()
    }
