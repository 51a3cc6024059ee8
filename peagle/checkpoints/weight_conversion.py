"""A target's tensors as its makers publish them -> under the names and in the form that the decoder wants.

Each function here takes sources, a tensor's name to its shape and how to read it, and returns others made of them.
Nothing is read before it is asked for, and then only what is needed for it. What is packed is unpacked, or packed anew,
where it will live, as a GPU does that faster.

Knows formats, not families: `families.py` says which of these a family needs.
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


@dataclass(frozen=True)
class TensorSource:
    shape: tuple[int, ...]
    read: Callable[[], Tensor]
    part: Callable[[int], Tensor] | None = None  # one entry of the first dimension; None: read it whole


TensorSources = dict[str, TensorSource]

# In names of tensors that a text does not need.
NOT_TEXT = ("vision_tower.", "vision_model.", "audio_tower.", "multi_modal_projector.", "embed_vision.", "embed_audio.")
EXPERTS, BLOCKS, SCALES = ".mlp.experts.", "_blocks", "_scales"  # in names of GPT-OSS's


@dataclass(frozen=True)
class Published:
    """What `slots.fill` reads from."""

    folder: Path
    sources: TensorSources

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: source.shape for name, source in self.sources.items()}

    def __getitem__(self, name: str) -> Tensor:
        return self.sources[name].read()


def stored(weights: SafetensorsFolder, device: torch.device | str) -> TensorSources:
    def source(name: str) -> TensorSource:
        return TensorSource(
            weights.shapes[name], lambda: weights[name].to(device), lambda i: weights.part(name, i).to(device)
        )

    return {name: source(name) for name in weights.names() if not name.endswith("rotary_emb.inv_freq")}


def changed(sources: TensorSources, chosen: Callable[[str], bool], change: Callable[[Tensor], Tensor]) -> TensorSources:
    """The same shapes; `change` on the values of some."""

    def through(source: TensorSource) -> TensorSource:
        return TensorSource(source.shape, lambda: change(source.read()))

    return {name: through(source) if chosen(name) else source for name, source in sources.items()}


def renamed(sources: TensorSources, parts: Mapping[str, str]) -> TensorSources:
    """`parts` of names, old to new, dots included; a new one of "" drops the tensor."""
    out: TensorSources = {}
    for name, source in sources.items():
        old = next((old for old in parts if old in name), None)
        if old is None:
            out[name] = source
        elif parts[old]:
            out[name.replace(old, parts[old])] = source
    return out


def text_part(sources: TensorSources) -> TensorSources:
    """Of a model that also sees and hears, in the older order of its names and in the newer one."""
    names = {
        "language_model.model.": "model.",
        "model.language_model.": "model.",
        "language_model.lm_head.": "lm_head.",
    }
    return renamed(sources, dict.fromkeys(NOT_TEXT, "") | names)


def rows_apart(sources: TensorSources, together: str, parts: Mapping[str, int]) -> TensorSources:
    """Tensors with `together` in their names, dots included, as several of that many rows each."""
    out: TensorSources = {}
    for name, source in sources.items():
        if together not in name:
            out[name] = source
            continue
        start = 0
        for part, rows in parts.items():
            out[name.replace(together, f".{part}.")] = _rows(source, start, rows)
            start += rows
        if start != source.shape[0]:
            out[name] = source  # not what it should be: named as it is to whoever compares shapes
    return out


def _rows(source: TensorSource, start: int, count: int) -> TensorSource:
    return TensorSource((count, *source.shape[1:]), lambda: source.read()[start : start + count])


def pairs_apart(weight: Tensor, head_dim: int, turned: int) -> Tensor:
    """Rows of a head in the order that a whole turn has: those that pair with each other half a head apart.

    For a head of 8 of which 4 are turned, 0 with 2 and 1 with 3: rows 0 1 4 5 | 2 3 6 7. Queries and keys in the same
    order give the same scores.
    """
    rows = torch.arange(head_dim, device=weight.device)
    half, rest = turned // 2, (head_dim - turned) // 2
    first, second, kept = rows[:half], rows[half:turned], rows[turned:]
    order = torch.cat([first, kept[:rest], second, kept[rest:]])
    return weight.unflatten(0, (-1, head_dim))[:, order].flatten(0, 1)


def pairs_from_neighbours(weight: Tensor, head_dim: int) -> Tensor:
    """Rows of a head whose neighbours pair with each other, in the same order: 0 2 4 6 | 1 3 5 7 for a head of 8."""
    return weight.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


def ones(width: int) -> TensorSource:
    """Weights that a file does not have, since they change nothing."""
    return TensorSource((width,), lambda: torch.ones(width))


def unpacked_fp8(sources: TensorSources, block: tuple[int, int]) -> TensorSources:
    """Eight-bit weights with a factor for every block of rows and columns, in a tensor beside them -> fp32."""
    out: TensorSources = {}
    for name, source in sources.items():
        scales = sources.get(f"{name}_scale_inv")
        if scales is not None:
            out[name] = _scaled(source, scales, block)
        elif not name.endswith("_scale_inv"):
            out[name] = source
    return out


def _scaled(source: TensorSource, scales: TensorSource, block: tuple[int, int]) -> TensorSource:
    def read() -> Tensor:
        weight, factors = source.read().float(), scales.read().float()
        for axis in (0, 1):
            factors = factors.repeat_interleave(block[axis], axis).narrow(axis, 0, weight.shape[axis])
        return weight * factors

    return TensorSource(source.shape, read)


def has_packed_experts(sources: TensorSources) -> bool:
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
        parts = ("gate_proj", "up_proj") if kind.startswith("gate_up_proj") else ("down_proj",)
        last = "bias" if kind.endswith("_bias") else "weight"
        for e in range(source.shape[0]):
            for i, part in enumerate(parts):
                rows, to = slice(i, None, len(parts)), f"{layer}{EXPERTS}{e}.{part}"
                if not interleaved:
                    each = source.shape[-1] // len(parts)
                    rows = slice(i * each, (i + 1) * each)
                if keep_mxfp4 and kind.endswith(BLOCKS):
                    out[f"{to}.words"] = _words(source, e, rows)
                elif keep_mxfp4 and kind.endswith(SCALES):
                    out[f"{to}.exponents"] = _exponents(source, e, rows, name)
                elif not kind.endswith(SCALES):
                    out[f"{to}.{last}"] = _entry(source, scales, e, rows)
    return out


def _words(source: TensorSource, e: int, rows: slice) -> TensorSource:
    assert source.part is not None
    part, (_, height, blocks, _) = source.part, source.shape
    shape = len(range(height)[rows]), packed_widths(blocks * BLOCK)[0]
    return TensorSource(shape, lambda: pack_words(part(e)[rows]))


def _exponents(source: TensorSource, e: int, rows: slice, name: str) -> TensorSource:
    assert source.part is not None
    part, (_, height, blocks) = source.part, source.shape
    shape = len(range(height)[rows]), packed_widths(blocks * BLOCK)[1]

    def read() -> Tensor:
        exponents = part(e)[rows]
        if (most := int(exponents.max())) > MAX_EXPONENT:
            raise UserError(
                f"{name}: weights with an exponent of {most} cannot stay packed (at most {MAX_EXPONENT}); "
                "use --dtype float32"
            )
        return pad_exponents(exponents)

    return TensorSource(shape, read)


def _entry(source: TensorSource, scales: TensorSource | None, e: int, rows: slice) -> TensorSource:
    """Some output rows of one expert."""
    assert source.part is not None
    part = source.part
    if scales is not None and scales.part is not None:
        exponents = scales.part
        _, height, blocks, half = source.shape
        shape: tuple[int, ...] = (len(range(height)[rows]), blocks * half * 2)
        return TensorSource(shape, lambda: dequantize_mxfp4(part(e)[rows], exponents(e)[rows]))
    if len(source.shape) == 2:
        return TensorSource((len(range(source.shape[1])[rows]),), lambda: part(e)[rows])
    return TensorSource((len(range(source.shape[2])[rows]), source.shape[1]), lambda: part(e).mT[rows])


def dequantize_mxfp4(blocks: Tensor, exponents: Tensor) -> Tensor:
    """[rows, blocks, 16] bytes of two numbers each, the lower half first, and a power of 2 for each block -> bf16,
    which holds them exactly, [rows, blocks * 32]."""
    return dequantize(torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2), exponents)
