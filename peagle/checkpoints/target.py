"""Loads a target from a Hugging Face folder: `Decoder`, tokenizer and EOS ids.

Other causal language models run through transformers. A config does not describe everything a model computes. So such a
model runs on a short random sequence three times: in plain transformers, with our attention in one pass, and with our
attention in two passes like a chunked prefill. The target is accepted only if all three agree.
"""

from __future__ import annotations

import hashlib
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from peagle.checkpoints.families import convert_weights, read_decoder_config
from peagle.checkpoints.files import SafetensorsFolder, read_config_json, read_json
from peagle.checkpoints.tensors import BLOCKS, build_layout, find_layout_problems, load_parameters, open_sources
from peagle.config import DecoderConfig
from peagle.errors import UserError, first_line
from peagle.kernels.attention.dense import causal_attention, masked_attention, sink_attention
from peagle.models.decoder import Decoder
from peagle.models.transformers_model import ATTENTION_NAME, TransformersDecoder, all_logits_kwargs, attention_forward

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


NUM_CHECKED_TOKENS = 12  # of a model that runs through transformers
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")


@dataclass(frozen=True)
class Target:
    """A loaded target."""

    folder: Path
    model: Decoder
    eos_ids: frozenset[int]


def read_target_config(folder: Path, skip_layers: bool = False, keep_mxfp4: bool = False) -> DecoderConfig:
    """Reads the config that `load_decoder` would use with the same options, from config.json alone."""
    return read_decoder_config(read_config_json(folder), folder / "config.json", skip_layers, keep_mxfp4)


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
        return _load_transformers_model(folder, cfg, dtype, device)
    sources = open_sources(SafetensorsFolder(folder), device)
    if keep_mxfp4 and any(name.endswith(BLOCKS) for name in sources):
        cfg = read_decoder_config(values, source, skip_layers, keep_mxfp4)
    with torch.device("meta"):
        model = Decoder(replace(cfg, num_layers=0, windows=()) if skip_layers else cfg)
    model.cfg = cfg
    layout = build_layout(model, cfg.layer)
    layout = {name if name.startswith("lm_head") else f"model.{name}": rows for name, rows in layout.items()}
    sources = convert_weights(sources, values, source, cfg.layer.experts is not None and cfg.layer.experts.mxfp4)
    if cfg.tie_word_embeddings:
        del layout["lm_head.weight"]
        sources.pop("lm_head.weight", None)
    if skip_layers:
        sources = {name: tensor for name, tensor in sources.items() if name in layout}
    if problems := find_layout_problems(layout, {name: tensor.shape for name, tensor in sources.items()}):
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise UserError(f"{folder}: {problems[0]}{more}")
    if cfg.tie_word_embeddings:
        model.lm_head.weight = None  # type: ignore[assignment]
    load_parameters(model, layout, lambda name: sources[name].read(), folder, dtype, device)
    model.tie_weights()
    for rope in model.ropes:
        rope.to(device)
    return model.eval().requires_grad_(False)


def load_target(
    folder: Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", keep_mxfp4: bool = False
) -> Target:
    """Raises a UserError if a weight is NaN or infinite."""
    model = load_decoder(folder, dtype, device, keep_mxfp4=keep_mxfp4)
    weights = {name: p for name, p in model.named_parameters() if p.is_floating_point()}
    sums = torch.stack([p.sum(dtype=torch.float32) for p in weights.values()])  # NaN and infinity stay in a sum
    for (name, weight), is_finite in zip(weights.items(), sums.isfinite().tolist(), strict=True):
        if not is_finite:
            stored = str(weight.dtype).removeprefix("torch.")
            raise UserError(f"{folder}: {name} holds values that are NaN or infinite in {stored}; see --dtype")
    return Target(folder, model, eos_ids(folder))


def target_fingerprint(folder: Path) -> str:
    """A hash of a model's config, tokenizer and weight file sizes; equal for copies in other folders."""
    digest = hashlib.sha256()
    for name in ("config.json", "tokenizer.json"):
        if (folder / name).is_file():
            digest.update((folder / name).read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
    return digest.hexdigest()[:16]


def eos_ids(folder: Path) -> frozenset[int]:
    """Returns the EOS ids of generation_config.json, or else of config.json."""
    path = folder / "generation_config.json"
    eos = read_json(path).get("eos_token_id") if path.is_file() else None
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


def _load_transformers_model(
    folder: Path, cfg: DecoderConfig, dtype: torch.dtype, device: torch.device | str
) -> TransformersDecoder:
    from transformers import AttentionInterface, AutoModelForCausalLM

    AttentionInterface.register(ATTENTION_NAME, attention_forward)
    warnings.warn(f"{folder}: this {cfg.family} model runs through transformers, which is slower", stacklevel=3)
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


@torch.inference_mode()
def wrap_and_verify(cfg: DecoderConfig, transformers_model: Any) -> TransformersDecoder:
    """Replaces the model's attention by ours; raises a UserError if that changes its logits."""
    device, dtype = transformers_model.get_input_embeddings().weight.device, transformers_model.dtype
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(cfg.vocab_size, (NUM_CHECKED_TOKENS,), generator=generator).to(device)
    positions = torch.arange(NUM_CHECKED_TOKENS, device=device)
    try:
        options = all_logits_kwargs(transformers_model.forward)
        output = transformers_model(input_ids=tokens[None], position_ids=positions[None], use_cache=False, **options)
        expected = output.logits[0].float()
    except Exception as error:  # model code raises various types
        raise UserError(f"transformers itself fails: {first_line(error)}") from None
    transformers_model.set_attn_implementation(ATTENTION_NAME)
    model = TransformersDecoder(cfg, transformers_model)
    if getattr(model.lm_head, "bias", None) is not None:
        raise UserError("its head has a bias")
    cache: dict[int, tuple[Tensor, Tensor]] = {}

    def attend_chunk(layer: int, q: Tensor, k: Tensor, v: Tensor, window: Any, sinks: Tensor | None = None) -> Tensor:
        """Keeps keys and values per layer for the next chunk."""
        if layer in cache:
            k, v = (torch.cat(pair) for pair in zip(cache[layer], (k, v), strict=True))
        cache[layer] = k, v
        distance = (torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))).to(q.device)
        visible = (distance >= 0) & (distance < (window or len(k)))
        return masked_attention(q, k, v, visible) if sinks is None else sink_attention(q, k, v, visible, sinks)

    try:
        whole = model.compute_logits(model(tokens, positions, causal_attention)[0])
        windows = tuple(model.bridge.windows.get(i, -1) for i in range(cfg.num_layers))
        half = NUM_CHECKED_TOKENS // 2
        chunks = [
            model.compute_logits(model(tokens[rows], positions[rows], attend_chunk)[0])
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
