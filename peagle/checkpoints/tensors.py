"""Tensors of checkpoint files: conversion of published formats, and loading into a module's parameters.

A `TensorSource` is a tensor's shape and how to read it. Conversions map named sources to other sources without reading
anything, so loading reads only the tensors that are needed; dequantization and packing happen on the target device.
`families.py` composes them for each family.

Files store q/k/v, gate/up and experts as separate tensors; modules merge each group into one parameter. A layout maps
the tensors of a file to rows of parameters. It is built from a module on the `meta` device, so names and shapes are
known before weights are read. Loaders fill it, writers invert it, and the validator compares it with a file's header.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor, nn

from peagle.checkpoints.files import SafetensorsFolder
from peagle.config import LayerConfig
from peagle.errors import UserError
from peagle.kernels.moe.mxfp4 import BLOCK, MAX_EXPONENT, dequantize, pack_words, packed_widths, pad_exponents
from peagle.models.layers import Attention

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
# Parts of the names of tensors that a text model does not need.
VISION_AND_AUDIO = (
    *("vision_tower.", "vision_model.", "audio_tower."),
    *("multi_modal_projector.", "embed_vision.", "embed_audio."),
)
# Multimodal checkpoints prefix the text model's names, in one of two orders.
TEXT_MODEL_NAMES = {
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
EXPERTS, BLOCKS, SCALES = ".mlp.experts.", "_blocks", "_scales"  # parts of GPT-OSS's names


@dataclass(frozen=True)
class TensorSource:
    shape: tuple[int, ...]
    read: Callable[[], Tensor]
    read_entry: Callable[[int], Tensor] | None = None  # reads one index of the first dimension, if that is possible

    def entry(self, i: int) -> TensorSource:
        """One index of the first dimension."""
        assert self.read_entry is not None
        return TensorSource(self.shape[1:], partial(self.read_entry, i))

    def map(self, transform: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> TensorSource:
        """Applies `transform`, which returns a tensor of this shape."""
        return TensorSource(shape, lambda: transform(self.read()))

    def select_rows(self, rows: slice) -> TensorSource:
        return self.map(lambda tensor: tensor[rows], (len(range(self.shape[0])[rows]), *self.shape[1:]))


TensorSources = dict[str, TensorSource]


def open_sources(weights: SafetensorsFolder, device: torch.device | str) -> TensorSources:
    def source(name: str) -> TensorSource:
        return TensorSource(
            weights.shapes[name], lambda: weights[name].to(device), lambda i: weights.read_entry(name, i).to(device)
        )

    return {name: source(name) for name in weights.shapes if not name.endswith("rotary_emb.inv_freq")}


def transform(sources: TensorSources, parts: Sequence[str], change: Callable[[Tensor], Tensor]) -> TensorSources:
    """Applies a shape-preserving `change` to the tensors with one of `parts` in their names."""
    selected = {name: source for name, source in sources.items() if any(part in name for part in parts)}
    return sources | {name: source.map(change, source.shape) for name, source in selected.items()}


def rename(sources: TensorSources, parts: Mapping[str, str]) -> TensorSources:
    """Replaces parts of names, old to new. A tensor whose new part is "" is dropped."""
    out: TensorSources = {}
    for name, source in sources.items():
        old = next((old for old in parts if old in name), None)
        if old is None:
            out[name] = source
        elif parts[old]:
            out[name.replace(old, parts[old])] = source
    return out


def select_text_model(sources: TensorSources) -> TensorSources:
    """Drops the vision and audio tensors of a multimodal model and renames the text model's."""
    return rename(sources, dict.fromkeys(VISION_AND_AUDIO, "") | TEXT_MODEL_NAMES)


def split_rows(sources: TensorSources, merged: str, parts: Mapping[str, int]) -> TensorSources:
    """Splits tensors with `merged` (with its dots) in their names into `parts`: name to number of rows."""
    out: TensorSources = {}
    for name, source in sources.items():
        if merged not in name or sum(parts.values()) != source.shape[0]:
            out[name] = source  # the comparison with the layout reports a wrong shape
            continue
        start = 0
        for part, num_rows in parts.items():
            out[name.replace(merged, f".{part}.")] = source.select_rows(slice(start, start + num_rows))
            start += num_rows
    return out


def spread_rotary_pairs(weight: Tensor, head_dim: int, rotary_dim: int) -> Tensor:
    """Reorders the rows of each head so that rotary pairs are half a head apart, as in a fully rotated head.

    Example: a head of 8 rows with rotary_dim 4 pairs row 0 with 2 and 1 with 3. The result is 0 1 4 5 | 2 3 6 7.
    Attention scores do not change, since queries and keys get the same order.
    """
    rows = torch.arange(head_dim, device=weight.device)
    half, rest = rotary_dim // 2, (head_dim - rotary_dim) // 2
    first, second, unrotated = rows[:half], rows[half:rotary_dim], rows[rotary_dim:]
    order = torch.cat([first, unrotated[:rest], second, unrotated[rest:]])
    return weight.unflatten(0, (-1, head_dim))[:, order].flatten(0, 1)


def deinterleave_rotary_pairs(weight: Tensor, head_dim: int) -> Tensor:
    """Reorders heads whose rotary pairs are adjacent rows: a head of 8 becomes 0 2 4 6 | 1 3 5 7."""
    return weight.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


def dequantize_fp8(sources: TensorSources, block: tuple[int, ...]) -> TensorSources:
    """Multiplies FP8 weights by their scales, one per block of rows and columns (`_scale_inv` tensors), in fp32."""
    out: TensorSources = {}
    for name, source in sources.items():
        scales = sources.get(f"{name}_scale_inv")
        if scales is not None:
            out[name] = _scale_blocks(source, scales, block)
        elif not name.endswith("_scale_inv"):
            out[name] = source
    return out


def _scale_blocks(source: TensorSource, scales: TensorSource, block: tuple[int, ...]) -> TensorSource:
    def scale(weight: Tensor) -> Tensor:
        factors = scales.read().float()
        for axis in (0, 1):
            factors = factors.repeat_interleave(block[axis], axis).narrow(axis, 0, weight.shape[axis])
        return weight.float() * factors

    return source.map(scale, source.shape)


def split_experts(sources: TensorSources, keep_mxfp4: bool = False, interleaved: bool = True) -> TensorSources:
    """Splits the tensors that hold all experts of a layer into one tensor per expert and projection.

    GPT-OSS stores plain weights as [E, in, out], and MXFP4 as [E, out, in / 32, 16] bytes with [E, out, in / 32]
    exponents. MXFP4 is dequantized, or with `keep_mxfp4` repacked for `kernels.moe.mxfp4`. Gate and up rows are
    `interleaved` in GPT-OSS; in Llama 4 all gate rows come first.
    """
    out: TensorSources = {}
    for name, source in sources.items():
        layer, experts, kind = name.partition(EXPERTS)
        if not experts:
            out[name] = source
            continue
        projections = ("gate_proj", "up_proj") if kind.startswith("gate_up_proj") else ("down_proj",)
        for e, (i, projection) in product(range(source.shape[0]), enumerate(projections)):
            rows, prefix = slice(i, None, len(projections)), f"{layer}{EXPERTS}{e}.{projection}"
            if not interleaved:
                num_rows = source.shape[-1] // len(projections)
                rows = slice(i * num_rows, (i + 1) * num_rows)
            entry = source.entry(e)
            if kind.endswith(SCALES) and keep_mxfp4:
                out[f"{prefix}.exponents"] = _pack_exponents(entry.select_rows(rows), name)
            elif kind.endswith(BLOCKS) and keep_mxfp4:
                out[f"{prefix}.words"] = _pack_words(entry.select_rows(rows))
            elif kind.endswith(BLOCKS):
                exponents = sources[name.removesuffix(BLOCKS) + SCALES].entry(e)
                out[f"{prefix}.weight"] = _dequantize(entry.select_rows(rows), exponents.select_rows(rows))
            elif kind.endswith("_bias"):
                out[f"{prefix}.bias"] = entry.select_rows(rows)
            elif not kind.endswith(SCALES):
                out[f"{prefix}.weight"] = entry.map(lambda weight: weight.mT, entry.shape[::-1]).select_rows(rows)
    return out


def _pack_words(blocks: TensorSource) -> TensorSource:
    num_rows, num_blocks, _ = blocks.shape
    return blocks.map(pack_words, (num_rows, packed_widths(num_blocks * BLOCK)[0]))


def _pack_exponents(source: TensorSource, name: str) -> TensorSource:
    def pack(exponents: Tensor) -> Tensor:
        if (largest := int(exponents.max())) > MAX_EXPONENT:
            limit = f"at most {MAX_EXPONENT} for packed weights"
            raise UserError(f"{name}: exponent {largest} is too large ({limit}); use --dtype float32")
        return pad_exponents(exponents)

    num_rows, num_blocks = source.shape
    return source.map(pack, (num_rows, packed_widths(num_blocks * BLOCK)[1]))


def _dequantize(blocks: TensorSource, exponents: TensorSource) -> TensorSource:
    """[rows, blocks, 16] bytes of two values each (low half first), one exponent per block -> bf16 [rows, blocks * 32].

    The result is exact.
    """

    def unpack(packed: Tensor) -> Tensor:
        return dequantize(torch.stack([packed & 15, packed >> 4], -1).flatten(-2), exponents.read())

    num_rows, num_blocks, num_bytes = blocks.shape
    return blocks.map(unpack, (num_rows, num_blocks * num_bytes * 2))


# Layouts


@dataclass(frozen=True)
class ParameterRows:
    """Rows [start, start + shape[0]) of a parameter."""

    param: str
    start: int
    shape: tuple[int, ...]


TensorLayout = dict[str, ParameterRows]  # by name in the file


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
        for name, rows in list_merged_tensors(module, param, len(tensor) if tensor.dim() else 0):
            layout[name] = ParameterRows(param, start, (rows, *tensor.shape[1:]) if tensor.dim() else ())
            start += rows
    return layout


def list_merged_tensors(module: nn.Module, param: str, rows: int) -> list[tuple[str, int]]:
    """The tensors of a file that are merged in a parameter, with the number of rows of each."""
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
    read: Callable[[str], Tensor],
    folder: Path,
    dtype: torch.dtype | None,
    device: torch.device | str,
) -> None:
    """Replaces the module's `meta` parameters. Floating-point tensors are cast to `dtype`, or kept if it is None.

    `read` returns a tensor of the layout. FP8 tensors are rejected, since their scales are not read here.
    """
    state: dict[str, Tensor] = {}
    expected = module.state_dict()
    for name, rows in layout.items():
        tensor, param = read(name).reshape(rows.shape).to(device), expected[rows.param]
        one_byte = tensor.dtype.itemsize < 2 and tensor.dtype != param.dtype
        if param.is_floating_point() != tensor.is_floating_point() or one_byte:
            stored = str(tensor.dtype).removeprefix("torch.")
            raise UserError(f"{folder}: tensor {name!r} is stored as {stored}, not supported")
        tensor = tensor.to((dtype or tensor.dtype) if param.is_floating_point() else param.dtype)
        if rows.shape == tuple(param.shape):
            state[rows.param] = tensor
            continue
        if rows.param not in state:
            state[rows.param] = torch.empty(param.shape, dtype=tensor.dtype, device=device)
        if state[rows.param].dtype != tensor.dtype:
            raise UserError(f"{folder}: tensor {name!r} has another dtype than its neighbours")
        state[rows.param][rows.start : rows.start + rows.shape[0]] = tensor
    module.load_state_dict(state, assign=True)


def split_parameters(module: nn.Module, layout: TensorLayout) -> dict[str, Tensor]:
    """Returns the module's tensors under their names in a file."""
    state = module.state_dict()
    return {
        name: state[rows.param][rows.start : rows.start + rows.shape[0]] if rows.shape else state[rows.param]
        for name, rows in layout.items()
    }
