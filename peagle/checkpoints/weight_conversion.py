"""Conversion of a target's published tensors to the names and formats that `Decoder` loads.

A `TensorSource` is a tensor's shape and how to read it. Each function maps named sources to other sources without
reading anything, so loading reads only the tensors that are needed. Dequantization and packing happen on the target
device. `families.py` composes these functions for each family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from peagle.checkpoints.files import SafetensorsFolder
from peagle.errors import UserError
from peagle.kernels.moe.mxfp4 import BLOCK, MAX_EXPONENT, dequantize, pack_words, packed_widths, pad_exponents

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


TensorSources = dict[str, TensorSource]


@dataclass(frozen=True)
class ConvertedTensors:
    """Converted sources, readable by `tensor_layout.load_parameters`."""

    folder: Path
    sources: TensorSources

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: source.shape for name, source in self.sources.items()}

    def __getitem__(self, name: str) -> Tensor:
        return self.sources[name].read()


def open_sources(weights: SafetensorsFolder, device: torch.device | str) -> TensorSources:
    def source(name: str) -> TensorSource:
        return TensorSource(
            weights.shapes[name], lambda: weights[name].to(device), lambda i: weights.read_entry(name, i).to(device)
        )

    return {name: source(name) for name in weights.names() if not name.endswith("rotary_emb.inv_freq")}


def transform_tensors(
    sources: TensorSources, selects: Callable[[str], bool], transform: Callable[[Tensor], Tensor]
) -> TensorSources:
    """Applies a shape-preserving `transform` to the tensors whose names `selects` accepts."""

    def transformed(source: TensorSource) -> TensorSource:
        return TensorSource(source.shape, lambda: transform(source.read()))

    return {name: transformed(source) if selects(name) else source for name, source in sources.items()}


def rename_tensors(sources: TensorSources, parts: Mapping[str, str]) -> TensorSources:
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
    return rename_tensors(sources, dict.fromkeys(VISION_AND_AUDIO, "") | TEXT_MODEL_NAMES)


def split_rows(sources: TensorSources, merged: str, parts: Mapping[str, int]) -> TensorSources:
    """Splits tensors with `merged` (with its dots) in their names into `parts`: name to number of rows."""
    out: TensorSources = {}
    for name, source in sources.items():
        if merged not in name:
            out[name] = source
            continue
        start = 0
        for part, num_rows in parts.items():
            out[name.replace(merged, f".{part}.")] = _select_rows(source, start, num_rows)
            start += num_rows
        if start != source.shape[0]:
            out[name] = source  # wrong shape: kept, so that the comparison with the layout reports it
    return out


def _select_rows(source: TensorSource, start: int, count: int) -> TensorSource:
    return TensorSource((count, *source.shape[1:]), lambda: source.read()[start : start + count])


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


def ones(size: int) -> TensorSource:
    """The weight of a norm that has none in the file."""
    return TensorSource((size,), lambda: torch.ones(size))


def dequantize_fp8(sources: TensorSources, block: tuple[int, int]) -> TensorSources:
    """Multiplies FP8 weights by their scales, one per block of rows and columns (`_scale_inv` tensors), in fp32."""
    out: TensorSources = {}
    for name, source in sources.items():
        scales = sources.get(f"{name}_scale_inv")
        if scales is not None:
            out[name] = _scale_blocks(source, scales, block)
        elif not name.endswith("_scale_inv"):
            out[name] = source
    return out


def _scale_blocks(source: TensorSource, scales: TensorSource, block: tuple[int, int]) -> TensorSource:
    def read() -> Tensor:
        weight, factors = source.read().float(), scales.read().float()
        for axis in (0, 1):
            factors = factors.repeat_interleave(block[axis], axis).narrow(axis, 0, weight.shape[axis])
        return weight * factors

    return TensorSource(source.shape, read)


def has_mxfp4_experts(sources: TensorSources) -> bool:
    return any(EXPERTS in name and name.endswith(BLOCKS) for name in sources)


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
        scales = sources.get(name.removesuffix(BLOCKS) + SCALES) if kind.endswith(BLOCKS) else None
        projections = ("gate_proj", "up_proj") if kind.startswith("gate_up_proj") else ("down_proj",)
        suffix = "bias" if kind.endswith("_bias") else "weight"
        for e in range(source.shape[0]):
            for i, projection in enumerate(projections):
                rows, prefix = slice(i, None, len(projections)), f"{layer}{EXPERTS}{e}.{projection}"
                if not interleaved:
                    num_rows = source.shape[-1] // len(projections)
                    rows = slice(i * num_rows, (i + 1) * num_rows)
                if keep_mxfp4 and kind.endswith(BLOCKS):
                    out[f"{prefix}.words"] = _pack_expert_words(source, e, rows)
                elif keep_mxfp4 and kind.endswith(SCALES):
                    out[f"{prefix}.exponents"] = _pack_expert_exponents(source, e, rows, name)
                elif not kind.endswith(SCALES):
                    out[f"{prefix}.{suffix}"] = _select_expert_rows(source, scales, e, rows)
    return out


def _pack_expert_words(source: TensorSource, e: int, rows: slice) -> TensorSource:
    assert source.read_entry is not None
    read_entry, (_, height, blocks, _) = source.read_entry, source.shape
    shape = len(range(height)[rows]), packed_widths(blocks * BLOCK)[0]
    return TensorSource(shape, lambda: pack_words(read_entry(e)[rows]))


def _pack_expert_exponents(source: TensorSource, e: int, rows: slice, name: str) -> TensorSource:
    assert source.read_entry is not None
    read_entry, (_, height, blocks) = source.read_entry, source.shape
    shape = len(range(height)[rows]), packed_widths(blocks * BLOCK)[1]

    def read() -> Tensor:
        exponents = read_entry(e)[rows]
        if (largest := int(exponents.max())) > MAX_EXPONENT:
            raise UserError(
                f"{name}: exponent {largest} is too large for packed weights (at most {MAX_EXPONENT}); "
                "use --dtype float32"
            )
        return pad_exponents(exponents)

    return TensorSource(shape, read)


def _select_expert_rows(source: TensorSource, scales: TensorSource | None, e: int, rows: slice) -> TensorSource:
    """Some output rows of expert `e`, dequantized."""
    assert source.read_entry is not None
    read_entry = source.read_entry
    if scales is not None and scales.read_entry is not None:
        read_scales = scales.read_entry
        _, height, blocks, half = source.shape
        shape: tuple[int, ...] = (len(range(height)[rows]), blocks * half * 2)
        return TensorSource(shape, lambda: dequantize_mxfp4(read_entry(e)[rows], read_scales(e)[rows]))
    if len(source.shape) == 2:
        return TensorSource((len(range(source.shape[1])[rows]),), lambda: read_entry(e)[rows])
    return TensorSource((len(range(source.shape[2])[rows]), source.shape[1]), lambda: read_entry(e).mT[rows])


def dequantize_mxfp4(blocks: Tensor, exponents: Tensor) -> Tensor:
    """[rows, blocks, 16] bytes of two values each (low half first), one exponent per block -> bf16 [rows, blocks * 32].

    The result is exact.
    """
    return dequantize(torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2), exponents)
