"""Models with random weights, for benchmarks and tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from peagle.kernels.moe.mxfp4 import COLUMN_STEP, ROW_GROUP, PackedWeights
from peagle.models.decoder import Decoder
from peagle.models.layers import ExpertMLP

if TYPE_CHECKING:
    from peagle import LLM


def random_weights(model_class, cfg, dtype: torch.dtype, device: torch.device):  # type: ignore[no-untyped-def]
    """A Decoder or Drafter of this config with random weights."""
    with torch.device("meta"):
        model = model_class(cfg)
    model.to(dtype).to_empty(device=device)
    if isinstance(model, Decoder):
        model.tie_weights()
    for name, parameter in model.named_parameters():
        if parameter.dtype == torch.int16:  # four MXFP4 numbers
            parameter.random_(-(1 << 15), 1 << 15)
        elif parameter.dtype == torch.uint8:  # MXFP4 scales: 2^-7 times numbers of standard deviation 2.9
            parameter.fill_(120)
        elif parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.02)
        else:
            is_scale = name.endswith(("norm.weight", "layer_scalar"))
            torch.nn.init.ones_(parameter) if is_scale else torch.nn.init.zeros_(parameter)
    for module in model.modules():
        if isinstance(module, ExpertMLP):
            for matrix in (module.weights().gate_up_EXD, module.weights().down_EDI):
                if isinstance(matrix, PackedWeights):
                    zero_padding(matrix)
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("d2t"):
            buffer.zero_()
    return model.eval().requires_grad_(False)


def zero_padding(weights: PackedWeights) -> None:
    """Zeros the words behind the last column, as kernels require; for randomly drawn words."""
    if used := weights.columns % COLUMN_STEP // 4:
        count, rows, _ = weights.words_ERW.shape
        steps = weights.words_ERW.view(count, rows // ROW_GROUP, -1, ROW_GROUP, COLUMN_STEP // 4)
        steps[:, :, -1, :, used:] = 0


def random_llm(
    target_folder: str | Path,
    drafter_folder: str | Path | None,
    *,
    device: str,
    dtype: str,
    spread_weights: Callable[..., None] | None = None,
    **options: Any,
) -> LLM:
    """An `LLM` with random weights from the configs of its folders. `spread_weights` is the function of shapes.py; it
    runs before the engine times its steps."""
    from peagle import LLM
    from peagle.checkpoints.drafter import read_drafter_config
    from peagle.checkpoints.target import Target, read_target_config
    from peagle.models.drafter import Drafter

    folder, on_device = Path(target_folder), (getattr(torch, dtype), torch.device(device))
    cfg = read_target_config(folder, keep_mxfp4=device == "cuda")
    target, drafter = Target(folder, random_weights(Decoder, cfg, *on_device), frozenset()), None
    if drafter_folder is not None:
        drafter_cfg = read_drafter_config(Path(drafter_folder), cfg)
        drafter = random_weights(Drafter, drafter_cfg, *on_device).share_weights(target.model)
    if spread_weights is not None:
        # The drafter first: where it has no embeddings or head it shares the target's.
        if drafter is not None:
            spread_weights(drafter, is_drafter=True)
        spread_weights(target.model)
    return LLM(target, drafter, device=device, dtype=dtype, **options)
