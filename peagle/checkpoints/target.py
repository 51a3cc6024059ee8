"""Loads a target from a Hugging Face folder: `Decoder`, tokenizer and EOS ids."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from peagle.checkpoints.families import (
    convert_weights,
    find_unsupported_feature,
    has_mxfp4_config,
    keep_mxfp4_experts,
    read_decoder_config,
)
from peagle.checkpoints.files import SafetensorsFolder, read_config_json, read_json
from peagle.checkpoints.tensor_layout import build_layout, find_layout_problems, load_parameters
from peagle.checkpoints.transformers_model import load_transformers_model
from peagle.checkpoints.weight_conversion import ConvertedTensors, has_mxfp4_experts, open_sources
from peagle.config import DecoderConfig
from peagle.errors import UserError, first_line
from peagle.models.decoder import Decoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")


@dataclass(frozen=True)
class Target:
    """A loaded target."""

    folder: Path
    model: Decoder
    eos_ids: frozenset[int]


def read_target_config(folder: Path, skip_layers: bool = False, keep_mxfp4: bool = False) -> DecoderConfig:
    """Reads the config that `load_decoder` would use with the same options, from config.json alone."""
    values, source = read_config_json(folder), folder / "config.json"
    cfg = read_decoder_config(values, source, skip_layers)
    return keep_mxfp4_experts(cfg) if keep_mxfp4 and has_mxfp4_config(values, source) else cfg


def read_target_sizes(folder: Path) -> DecoderConfig:
    """Reads config.json, also of a target with quantized weights that only vLLM supports."""
    values = {name: value for name, value in read_config_json(folder).items() if name != "quantization_config"}
    return read_decoder_config(values, folder / "config.json")


def load_decoder(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    skip_layers: bool = False,
    keep_mxfp4: bool = False,
) -> Decoder:
    """`skip_layers`: only embeddings, final norm and head. `keep_mxfp4`: MXFP4 experts stay packed."""
    values, source = read_config_json(folder), folder / "config.json"
    cfg = read_decoder_config(values, source, skip_layers)
    if cfg.uses_transformers:
        return load_transformers_model(folder, cfg, dtype, device, find_unsupported_feature(values, source))
    stored = open_sources(SafetensorsFolder(folder, keep_open=True), device)
    if keep_mxfp4 and has_mxfp4_config(values, source) and has_mxfp4_experts(stored):
        cfg = keep_mxfp4_experts(cfg)
    with torch.device("meta"):
        model = Decoder(replace(cfg, num_layers=0, windows=()) if skip_layers else cfg)
    model.cfg = cfg
    layout = build_layout(model, cfg.layer)
    if cfg.tie_word_embeddings:
        del layout["lm_head.weight"]
    file_names = {name: name if name.startswith("lm_head") else f"model.{name}" for name in layout}
    expected = {file_names[name]: rows for name, rows in layout.items()}
    uses_mxfp4 = cfg.layer.experts is not None and cfg.layer.experts.mxfp4
    sources = convert_weights(stored, values, source, uses_mxfp4)
    if skip_layers:
        sources = {name: tensor for name, tensor in sources.items() if name in expected}
    weights = ConvertedTensors(folder, sources)
    shapes = weights.shapes
    if cfg.tie_word_embeddings:
        shapes.pop("lm_head.weight", None)
    problems = find_layout_problems(expected, shapes)
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise UserError(f"{folder}: {problems[0]}{more}")
    if cfg.tie_word_embeddings:
        model.lm_head.weight = None  # type: ignore[assignment]
    load_parameters(model, layout, weights, file_names, dtype, device)
    model.tie_weights()
    for rope in model.ropes:
        rope.to(device)
    return model.eval().requires_grad_(False)


def load_target(
    folder: Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", keep_mxfp4: bool = False
) -> Target:
    return Target(folder, load_decoder(folder, dtype, device, keep_mxfp4=keep_mxfp4), eos_ids(folder))


def eos_ids(folder: Path) -> frozenset[int]:
    """Returns the EOS ids of generation_config.json, or else of config.json."""
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

    if not has_tokenizer(folder):  # some versions of transformers return an empty tokenizer
        raise UserError(f"{folder}: no tokenizer (none of {', '.join(TOKENIZER_FILES)})")
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # transformers raises various types
        raise UserError(f"{folder}: no usable tokenizer ({first_line(error)})") from None


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str, raw: bool) -> list[int]:
    """Returns the token ids of a user message in the chat template, or with `raw` of the text itself."""
    if raw:
        return list(tokenizer(prompt)["input_ids"])
    if not tokenizer.chat_template:
        raise UserError("this target has no chat template; use --raw to send the prompt without one")
    messages = [{"role": "user", "content": prompt}]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"])
