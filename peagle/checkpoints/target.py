"""A target's folder -> `Decoder`, tokenizer, end-of-text ids.

Knows the Hugging Face layout of the families the decoder can be; an unknown one is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from peagle.checkpoints.fields import Fields, completed, layer_config, positions, rope_config
from peagle.checkpoints.files import Weights, read_config_json, read_json
from peagle.checkpoints.slots import fill, layout_of, problems
from peagle.config import DecoderConfig, LayerConfig
from peagle.errors import UserError
from peagle.models.decoder import Decoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def _same_bias(fields: Fields) -> LayerConfig:
    bias = fields.get("attention_bias", bool, False)
    mlp_bias = fields.get("mlp_bias", bool, False)
    return layer_config(fields, qkv_bias=bias, out_bias=bias, mlp_bias=mlp_bias, qk_norm=False)


def _no_bias(fields: Fields) -> LayerConfig:
    return layer_config(fields, qkv_bias=False, out_bias=False, mlp_bias=False, qk_norm=False)


def _qkv_bias(fields: Fields) -> LayerConfig:
    return layer_config(fields, qkv_bias=True, out_bias=False, mlp_bias=False, qk_norm=False)


def _qk_norms(fields: Fields) -> LayerConfig:
    bias = fields.get("attention_bias", bool, False)
    return layer_config(fields, qkv_bias=bias, out_bias=bias, mlp_bias=False, qk_norm=True)


FAMILIES: dict[str, tuple[str, Callable[[Fields], LayerConfig]]] = {
    "LlamaForCausalLM": ("llama", _same_bias),
    "MistralForCausalLM": ("mistral", _no_bias),
    "Qwen2ForCausalLM": ("qwen2", _qkv_bias),
    "Qwen3ForCausalLM": ("qwen3", _qk_norms),
}


TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")


@dataclass(frozen=True)
class Target:
    """Everything a request needs of a target."""

    folder: Path
    model: Decoder
    eos_ids: frozenset[int]


def read_target_config(folder: Path) -> DecoderConfig:
    values = read_config_json(folder)
    source = folder / "config.json"
    names = values.get("architectures") or ["none named"]
    architecture = names[0] if isinstance(names, list) else names
    if not isinstance(architecture, str) or architecture not in FAMILIES:
        raise UserError(f"{source}: architecture {architecture!r} is not supported; supported: {', '.join(FAMILIES)}")
    if values.get("quantization_config"):
        raise UserError(f"{source}: quantized weights (quantization_config) are not supported")
    family, shape_of = FAMILIES[architecture]
    fields = completed({**values, "model_type": family}, source)
    num_layers = fields.size("num_hidden_layers")
    return DecoderConfig(
        family=family,
        vocab_size=fields.size("vocab_size"),
        num_layers=num_layers,
        layer=shape_of(fields),
        rope=rope_config(fields),
        max_positions=positions(fields),
        tied_head=fields.get("tie_word_embeddings", bool, False),
        windows=sliding_windows(fields, num_layers, everywhere=family == "mistral"),
    )


def sliding_windows(fields: Fields, num_layers: int, everywhere: bool = False) -> tuple[int | None, ...]:
    """Mistral slides in every layer; the others where `layer_types` says so."""
    window = fields.optional_size("sliding_window")
    default = "sliding_attention" if everywhere else "full_attention"
    kinds = fields.values.get("layer_types") or [default] * num_layers
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise fields.wrong(f"layer_types must name {num_layers} layers")
    unknown = [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")]
    if unknown:
        raise fields.wrong(f"layer type {unknown[0]!r} is not supported")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def load_decoder(folder: Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Decoder:
    cfg = read_target_config(folder)
    with torch.device("meta"):
        model = Decoder(cfg)
    layout = layout_of(model, cfg.layer)
    if cfg.tied_head:
        del layout["lm_head.weight"]
    file_names = {name: name if name.startswith("lm_head") else f"model.{name}" for name in layout}
    weights = Weights(folder)
    wanted = {file_names[name]: slot for name, slot in layout.items()}
    ignored = {"lm_head.weight"} if cfg.tied_head else set()
    shapes = {
        name: shape
        for name, shape in weights.shapes.items()
        if name not in ignored and not name.endswith("rotary_emb.inv_freq")
    }
    found = problems(wanted, shapes)
    if found:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise UserError(f"{folder}: {found[0]}{more}")
    if cfg.tied_head:
        model.lm_head.weight = None  # type: ignore[assignment]
    fill(model, layout, weights, file_names, dtype, device)
    model.tie()
    model.rope.to(device)
    return model.eval().requires_grad_(False)


def load_target(folder: Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Target:
    return Target(folder, load_decoder(folder, dtype, device), eos_ids(folder))


def eos_ids(folder: Path) -> frozenset[int]:
    """Ids that end a text: generation_config.json's where there is one, else config.json's."""
    values: dict[str, Any] = {}
    if (folder / "generation_config.json").is_file():
        values = read_json(folder / "generation_config.json")
    eos = values.get("eos_token_id")
    if eos is None:
        eos = read_config_json(folder).get("eos_token_id")
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(type(i) is int and i >= 0 for i in ids):
        raise UserError(f"{folder}: eos_token_id is {eos!r}, expected an id or a list of ids")
    return frozenset(ids)


def has_tokenizer(folder: Path) -> bool:
    return any((folder / file).is_file() for file in TOKENIZER_FILES)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    if not has_tokenizer(folder):  # some versions of transformers make an empty one up
        raise UserError(f"{folder}: no tokenizer in it (none of {', '.join(TOKENIZER_FILES)})")
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # transformers raises whatever its reader of the moment does
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"{folder}: no usable tokenizer in it ({reason[0]})") from None


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str, raw: bool) -> list[int]:
    """Token ids of a user's message in the target's chat template, or of the text as it is."""
    if raw:
        return list(tokenizer(prompt)["input_ids"])
    if not tokenizer.chat_template:
        raise UserError("this target has no chat template: use --raw to give it the prompt as it is")
    messages = [{"role": "user", "content": prompt}]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"])
