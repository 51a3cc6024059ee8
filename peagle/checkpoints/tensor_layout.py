"""Maps the tensors of a checkpoint file to rows of a module's parameters.

Files store q/k/v, gate/up and experts as separate tensors; modules merge each group into one parameter. A layout is
built from a module on the `meta` device, so names and shapes are known before weights are read. Loaders fill it,
writers invert it, and the validator compares it with a file's header.
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
class ParameterRows:
    """Rows [start, start + shape[0]) of a parameter."""

    param: str
    start: int
    shape: tuple[int, ...]


TensorLayout = dict[str, ParameterRows]  # by name in the file

# Parameters that merge all experts of a layer -> the tensors of each expert in a file.
EXPERT_TENSORS = {
    ".mlp.gate_up": ("gate_proj.weight", "up_proj.weight"),
    ".mlp.gate_up_bias": ("gate_proj.bias", "up_proj.bias"),
    ".mlp.gate_up_words": ("gate_proj.words", "up_proj.words"),
    ".mlp.gate_up_exponents": ("gate_proj.exponents", "up_proj.exponents"),
    ".mlp.down": ("down_proj.weight",),
    ".mlp.down_words": ("down_proj.words",),
    ".mlp.down_exponents": ("down_proj.exponents",),
    ".mlp.down_bias": ("down_proj.bias",),
}


class TensorReader(Protocol):
    """Reads tensors by name."""

    @property
    def folder(self) -> Path: ...

    def __getitem__(self, name: str) -> Tensor: ...


def build_layout(module: nn.Module, layer: LayerConfig) -> TensorLayout:
    """Returns all tensors that the module needs, by their names before merging."""
    layout: TensorLayout = {}
    for param, tensor in module.state_dict().items():
        merged = next((name for name in EXPERT_TENSORS if param.endswith(name)), None)
        if merged is not None and layer.experts is not None:
            names = [
                f"{param.removesuffix(merged)}.mlp.experts.{e}.{name}"
                for e in range(layer.experts.num_experts)
                for name in EXPERT_TENSORS[merged]
            ]
            rows = len(tensor) // len(names)
            layout |= {name: ParameterRows(param, i * rows, (rows, *tensor.shape[1:])) for i, name in enumerate(names)}
            continue
        start = 0
        for name, rows in _unmerged_names(module, param, len(tensor) if tensor.dim() else 0):
            layout[name] = ParameterRows(param, start, (rows, *tensor.shape[1:]) if tensor.dim() else ())
            start += rows
    return layout


def _unmerged_names(module: nn.Module, param: str, rows: int) -> list[tuple[str, int]]:
    """The tensors of a file that make up a parameter, with the number of rows of each."""
    owner, merged, last = param.partition(".qkv_proj.")
    if merged:  # head sizes may differ between layers
        attention: Attention = module.get_submodule(owner)  # type: ignore[assignment]
        q, kv = (heads * attention.head_dim for heads in (attention.heads, attention.kv_heads))
        return [(f"{owner}.{name}.{last}", size) for name, size in (("q_proj", q), ("k_proj", kv), ("v_proj", kv))]
    owner, merged, last = param.partition(".gate_up_proj.")
    if merged:
        return [(f"{owner}.{name}.{last}", rows // 2) for name in ("gate_proj", "up_proj")]
    return [(param, rows)]


def find_layout_problems(layout: TensorLayout, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Lists missing, unknown and wrongly shaped tensors of a file."""
    found = [f"tensor {name!r} is missing" for name in layout if name not in shapes]
    found += [f"tensor {name!r} is not known here" for name in shapes if name not in layout]
    for name, rows in layout.items():
        if name in shapes and shapes[name] != rows.shape:
            found.append(f"tensor {name!r} has shape {list(shapes[name])}, expected {list(rows.shape)}")
    return found


def load_parameters(
    module: nn.Module,
    layout: TensorLayout,
    weights: TensorReader,
    file_names: Mapping[str, str],
    dtype: torch.dtype | None,
    device: torch.device | str,
) -> None:
    """Replaces the module's `meta` parameters. Floating-point tensors are cast to `dtype`, or kept if it is None.

    FP8 tensors are rejected, since their scales are not read here.
    """
    state: dict[str, Tensor] = {}
    expected = module.state_dict()
    for name, rows in layout.items():
        tensor = weights[file_names[name]].reshape(rows.shape).to(device)
        floating = expected[rows.param].is_floating_point()
        one_byte = tensor.dtype.itemsize < 2 and tensor.dtype != expected[rows.param].dtype
        if floating != tensor.is_floating_point() or one_byte:
            stored = str(tensor.dtype).removeprefix("torch.")
            raise UserError(f"{weights.folder}: tensor {file_names[name]!r} is stored as {stored}, not supported")
        if not floating:
            tensor = tensor.to(expected[rows.param].dtype)
        elif dtype is not None:
            tensor = tensor.to(dtype)
        if rows.shape == tuple(expected[rows.param].shape):
            state[rows.param] = tensor
            continue
        if rows.param not in state:
            state[rows.param] = torch.empty(expected[rows.param].shape, dtype=tensor.dtype, device=device)
        if state[rows.param].dtype != tensor.dtype:
            raise UserError(f"{weights.folder}: tensor {file_names[name]!r} has another dtype than its neighbours")
        state[rows.param][rows.start : rows.start + rows.shape[0]] = tensor
    module.load_state_dict(state, assign=True)


def split_parameters(module: nn.Module, layout: TensorLayout) -> dict[str, Tensor]:
    """Returns the module's tensors under their names in a file."""
    state = module.state_dict()
    return {
        name: state[rows.param][rows.start : rows.start + rows.shape[0]] if rows.shape else state[rows.param]
        for name, rows in layout.items()
    }
