"""Targets that run through Hugging Face transformers: config, weights and a numerical check.

A config does not describe everything a model computes. So the model runs on a short random sequence three times: in
plain transformers, with our attention in one pass, and with our attention in two passes like a chunked prefill. The
target is accepted only if all three agree.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peagle.checkpoints.config_reader import (
    ConfigReader,
    build_transformers_config,
    read_layer_config,
    read_max_positions,
)
from peagle.config import DecoderConfig, RopeConfig
from peagle.errors import UserError, first_line
from peagle.kernels.attention.dense import causal_attention, masked_attention, sink_attention
from peagle.models.transformers_model import (
    ATTENTION_NAME,
    TransformersDecoder,
    attention_forward,
    logits_to_keep_kwargs,
)

# Fields that change logits or attention in ways that TransformersDecoder does not pass on.
UNSUPPORTED_FIELDS = (
    "final_logit_softcapping",
    "attn_logit_softcapping",
    "attention_chunk_size",
    "logit_scale",
    "is_encoder_decoder",
)
SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
NUM_CHECKED_TOKENS = 12


def is_transformers_causal_lm(architecture: str) -> bool:
    """Whether transformers has a causal language model of this name."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    return any(architecture == name or (isinstance(name, tuple) and architecture in name) for name in names)


def read_transformers_config(values: dict[str, Any], source: Path) -> DecoderConfig:
    config = build_transformers_config(values, source)
    # Attributes instead of JSON fields, since families use different field names for these sizes.
    names = (*SIZES, "max_position_embeddings", *UNSUPPORTED_FIELDS)
    found = {name: getattr(config, name, None) for name in names}
    reader = ConfigReader(found | {"intermediate_size": getattr(config, "intermediate_size", None) or 1}, source)
    for name in UNSUPPORTED_FIELDS:
        if reader.values[name]:
            raise reader.error(f"{name} is not supported in a target that runs through transformers")
    if values.get("quantization_config"):
        raise reader.error("quantized weights are not supported in a target that runs through transformers")
    num_layers = reader.size("num_hidden_layers")
    return DecoderConfig(
        family=str(config.model_type),
        vocab_size=reader.size("vocab_size"),
        num_layers=num_layers,
        layer=read_layer_config(reader, qkv_bias=False, out_bias=False, mlp_bias=False, qk_norm=False),
        rope=RopeConfig(),
        max_positions=read_max_positions(reader),
        tie_word_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
        windows=_read_windows(config, num_layers, reader),
        uses_transformers=True,
    )


def _read_windows(config: Any, num_layers: int, reader: ConfigReader) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    default = "sliding_attention" if window else "full_attention"
    layer_types = getattr(config, "layer_types", None) or [default] * num_layers
    unknown = [kind for kind in layer_types if kind not in ("full_attention", "sliding_attention")]
    if unknown:
        raise reader.error(f"layer type {unknown[0]!r} is not supported in a target that runs through transformers")
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def load_transformers_model(
    folder: Path, cfg: DecoderConfig, dtype: torch.dtype, device: torch.device | str, unsupported_feature: str = ""
) -> TransformersDecoder:
    """`unsupported_feature` is why a model of a supported family runs through transformers, for the warning."""
    from transformers import AttentionInterface, AutoModelForCausalLM

    AttentionInterface.register(ATTENTION_NAME, attention_forward)
    what = f"a {cfg.family} model" + (f" with {unsupported_feature}" if unsupported_feature else "")
    warnings.warn(f"{folder}: {what} runs through transformers' own modules, which is slower", stacklevel=3)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation="eager",
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
        )
    except Exception as error:  # model code raises various types
        raise UserError(f"{folder}: transformers cannot load it ({first_line(error)})") from None
    model = extract_text_model(model).to(device).eval().requires_grad_(False)
    try:
        return wrap_and_verify(cfg, model)
    except UserError as error:
        raise UserError(f"{folder}: a {cfg.family} model cannot run here ({error}); try --engine vllm") from None


def extract_text_model(model: Any) -> Any:
    """Returns the causal language model of a multimodal model, or the model itself."""
    from transformers import AutoModelForCausalLM

    language_model = getattr(model.base_model, "language_model", None)
    if language_model is None:
        return model
    with torch.device("meta"):
        text = AutoModelForCausalLM.from_config(model.config.get_text_config(), attn_implementation="eager")
    text.model, text.lm_head = language_model, model.lm_head
    return text


class _ChunkedPrefillAttention:
    """Attention over one sequence that arrives in several passes; keeps keys and values per layer."""

    def __init__(self) -> None:
        self.cache: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None, sinks: Tensor | None = None
    ) -> Tensor:
        if layer in self.cache:
            k, v = (torch.cat(pair) for pair in zip(self.cache[layer], (k, v), strict=True))
        self.cache[layer] = k, v
        rows, keys = torch.arange(len(k) - len(q), len(k)), torch.arange(len(k))
        distance = (rows[:, None] - keys).to(q.device)
        visible = (distance >= 0) & (distance < (window or len(k)))
        return masked_attention(q, k, v, visible) if sinks is None else sink_attention(q, k, v, visible, sinks)


@torch.inference_mode()
def wrap_and_verify(cfg: DecoderConfig, transformers_model: Any) -> TransformersDecoder:
    """Replaces the model's attention by ours; raises a UserError if that changes its logits."""
    device, dtype = transformers_model.get_input_embeddings().weight.device, transformers_model.dtype
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(cfg.vocab_size, (NUM_CHECKED_TOKENS,), generator=generator).to(device)
    positions = torch.arange(NUM_CHECKED_TOKENS, device=device)
    try:
        options = logits_to_keep_kwargs(transformers_model.forward)
        output = transformers_model(input_ids=tokens[None], position_ids=positions[None], use_cache=False, **options)
        expected = output.logits[0].float()
    except Exception as error:  # model code raises various types
        raise UserError(f"transformers itself fails: {first_line(error)}") from None
    transformers_model.set_attn_implementation(ATTENTION_NAME)
    model = TransformersDecoder(cfg, transformers_model)
    if getattr(model.lm_head, "bias", None) is not None:
        raise UserError("its head has a bias")
    try:
        whole = model.compute_logits(model(tokens, positions, causal_attention)[0])
        windows = tuple(model.bridge.windows.get(i, -1) for i in range(cfg.num_layers))
        attention, half = _ChunkedPrefillAttention(), NUM_CHECKED_TOKENS // 2
        chunks = [
            model.compute_logits(model(tokens[rows], positions[rows], attention)[0])
            for rows in (slice(half), slice(half, None))
        ]
    except (RuntimeError, TypeError, KeyError, IndexError) as error:
        raise UserError(first_line(error)) from None
    if windows != cfg.windows:
        raise UserError("the attention windows of its layers differ from its config")
    tolerance = (0.01 if dtype == torch.float32 else 0.3) * expected.std()
    for logits, problem in (
        (whole, "its attention or its head computes something else"),
        (torch.cat(chunks), "it does not support chunked prefill"),
    ):
        if not (logits.float() - expected).abs().max() <= tolerance:
            raise UserError(problem)
    return model
