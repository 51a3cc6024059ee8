"""A target that only transformers can compute: its config, its weights, and whether it may be trusted.

What a model does beyond its attention cannot be read from a config. So before anything is made of it, the model reads
a short text three times: by transformers alone, through our attention at once, and in two parts, as an engine reads.
Only if all three agree is it used.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peagle.checkpoints.config_reader import ConfigReader, config_object, layer_config, positions
from peagle.config import DecoderConfig, RopeConfig
from peagle.errors import UserError, first_line
from peagle.kernels.attention.dense import causal_attention, masked_attention, sink_attention
from peagle.models.transformers_model import (
    ATTENTION_NAME,
    TransformersDecoder,
    attention_forward,
    logits_to_keep_kwargs,
)

# ConfigReader that change logits or attention in ways that are not handed over.
REFUSED = (
    "final_logit_softcapping",
    "attn_logit_softcapping",
    "attention_chunk_size",
    "logit_scale",
    "is_encoder_decoder",
)
SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
CHECKED = 12  # tokens


def is_foreign(architecture: str) -> bool:
    """Whether transformers has a causal language model of this name."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    return any(architecture == name or (isinstance(name, tuple) and architecture in name) for name in names)


def foreign_config(values: dict[str, Any], source: Path) -> DecoderConfig:
    config = config_object(values, source)
    # by attribute, since families have names of their own for these
    found = {name: getattr(config, name, None) for name in (*SIZES, "max_position_embeddings", *REFUSED)}
    known = ConfigReader(found | {"intermediate_size": getattr(config, "intermediate_size", None) or 1}, source)
    for name in REFUSED:
        if known.values[name]:
            raise known.error(f"{name} is not supported in a target that runs through transformers")
    if values.get("quantization_config"):
        raise known.error("quantized weights are not supported in a target that runs through transformers")
    plain = {"qkv_bias": False, "out_bias": False, "mlp_bias": False, "qk_norm": False}
    num_layers = known.size("num_hidden_layers")
    return DecoderConfig(
        family=str(config.model_type),
        vocab_size=known.size("vocab_size"),
        num_layers=num_layers,
        layer=layer_config(known, **plain),
        rope=RopeConfig(),
        max_positions=positions(known),
        tie_word_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
        windows=_windows(config, num_layers, known),
        uses_transformers=True,
    )


def _windows(config: Any, num_layers: int, fields: ConfigReader) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * num_layers
    unknown = [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")]
    if unknown:
        raise fields.error(f"layer type {unknown[0]!r} is not supported in a target that runs through transformers")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def load_foreign(
    folder: Path, cfg: DecoderConfig, dtype: torch.dtype, device: torch.device | str, why: str = ""
) -> TransformersDecoder:
    """`why`: what a model of a family of ours has that ours have not."""
    from transformers import AttentionInterface, AutoModelForCausalLM

    AttentionInterface.register(ATTENTION_NAME, attention_forward)
    what = f"a {cfg.family} model with {why}" if why else f"a {cfg.family} model"
    warnings.warn(f"{folder}: {what} runs through transformers' own modules, which is slower", stacklevel=3)
    try:
        theirs = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation="eager",
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
        )
    except Exception as error:  # whatever its reader of the moment raises
        raise UserError(f"{folder}: transformers cannot load it ({first_line(error)})") from None
    theirs = text_model(theirs).to(device).eval().requires_grad_(False)
    try:
        return checked(cfg, theirs)
    except UserError as error:
        raise UserError(f"{folder}: a {cfg.family} model cannot run here ({error}); try --engine vllm") from None


def text_model(theirs: Any) -> Any:
    """Of a model that also sees, the part that writes, as a model of its own."""
    from transformers import AutoModelForCausalLM

    inner = getattr(theirs.base_model, "language_model", None)
    if inner is None:
        return theirs
    with torch.device("meta"):
        text = AutoModelForCausalLM.from_config(theirs.config.get_text_config(), attn_implementation="eager")
    text.model, text.lm_head = inner, theirs.lm_head
    return text


class _InParts:
    """Attention of one sequence that comes in parts."""

    def __init__(self) -> None:
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None, sinks: Tensor | None = None
    ) -> Tensor:
        if layer in self.kept:
            k, v = (torch.cat(both) for both in zip(self.kept[layer], (k, v), strict=True))
        self.kept[layer] = k, v
        rows, keys = torch.arange(len(k) - len(q), len(k)), torch.arange(len(k))
        behind = (rows[:, None] - keys).to(q.device)
        seen = (behind >= 0) & (behind < (window or len(k)))
        return masked_attention(q, k, v, seen) if sinks is None else sink_attention(q, k, v, seen, sinks)


@torch.inference_mode()
def checked(cfg: DecoderConfig, theirs: Any) -> TransformersDecoder:
    """The model with its attention handed over, if that changes nothing."""
    device, dtype = theirs.get_input_embeddings().weight.device, theirs.dtype
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(cfg.vocab_size, (CHECKED,), generator=generator).to(device)
    places = torch.arange(CHECKED, device=device)
    try:
        more = logits_to_keep_kwargs(theirs.forward)
        want = theirs(input_ids=tokens[None], position_ids=places[None], use_cache=False, **more).logits[0].float()
    except Exception as error:  # whatever its own code of the moment raises
        raise UserError(f"transformers itself fails: {first_line(error)}") from None
    theirs.set_attn_implementation(ATTENTION_NAME)
    model = TransformersDecoder(cfg, theirs)
    if getattr(model.lm_head, "bias", None) is not None:
        raise UserError("its head has a bias")
    try:
        whole = model.compute_logits(model(tokens, places, causal_attention)[0])
        windows = tuple(model.bridge.windows.get(i, -1) for i in range(cfg.num_layers))
        part, half = _InParts(), CHECKED // 2
        parts = [
            model.compute_logits(model(tokens[at], places[at], part)[0]) for at in (slice(half), slice(half, None))
        ]
    except (RuntimeError, TypeError, KeyError, IndexError) as error:
        raise UserError(first_line(error)) from None
    if windows != cfg.windows:
        raise UserError("not all of its layers attend as its config says")
    most = (0.01 if dtype == torch.float32 else 0.3) * want.std()
    for got, what in (
        (whole, "its attention or its head does something of its own"),
        (torch.cat(parts), "it cannot read in parts"),
    ):
        if not (got.float() - want).abs().max() <= most:
            raise UserError(what)
    return model
