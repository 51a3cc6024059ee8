"""`--quantization fp8`: stores the target's attention and MLP weights in fp8 once they are loaded."""

import warnings

import torch

from peagle.config import DecoderConfig
from peagle.engine.kv_cache import check_fp8_gpu
from peagle.errors import UserError
from peagle.kernels.triton_utils import device_context
from peagle.models.decoder import Decoder
from peagle.models.layers import Linear


def check_quantization(
    name: str, cfg: DecoderConfig, dtype: torch.dtype, device: torch.device, is_loaded: bool
) -> None:
    """Raises a UserError for what cannot be quantized, before anything is loaded."""
    flag = f"--quantization {name}"
    if is_loaded:
        raise UserError(f"{flag}: would change a loaded target; pass its folder")
    if cfg.uses_transformers:
        raise UserError(f"{flag}: not for {cfg.family}, which runs through transformers; omit the flag")
    if any(layer.experts is not None for layer in (cfg.layer, *cfg.layers)):
        raise UserError(f"{flag}: dense models only, the target has experts; omit the flag")
    if device.type == "cuda" and dtype != torch.bfloat16:
        raise UserError(f"{flag}: needs --dtype bfloat16 on a GPU")
    check_fp8_gpu(flag, device)
    if device.type == "cpu":
        warnings.warn(f"{flag}: slow on a CPU, where every step dequantizes the weights", stacklevel=5)


@torch.no_grad()
def quantize_target(model: Decoder) -> None:
    """Quantizes attention and MLP projections; embeddings, LM head and norms keep their dtype."""
    device = model.embed_tokens.weight.device
    with device_context(device):
        for module in model.modules():
            if isinstance(module, Linear):
                module.quantize()
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the KV cache gets what is free
