"""A drafter's folder <-> `Drafter`, in the plain format that stock vLLM loads.

Reads every spelling in use (layer 0 as `midlayer.` or `layers.0.`, each name of the mask id, the speculators
format's config) and writes one. What vLLM swallows silently, such as a missing `fc.weight`, is refused here.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peagle.checkpoints import speculators
from peagle.checkpoints.config_reader import (
    ConfigReader,
    completed,
    layer_config,
    layer_fields,
    positions,
    rope_config,
    rope_fields,
)
from peagle.checkpoints.families import sliding_windows
from peagle.checkpoints.files import SafetensorsFolder, read_config_json, write_folder, write_json, write_weights
from peagle.checkpoints.tensor_layout import Layout, build_layout, fill, problems, split_parameters
from peagle.config import MASK_TOKEN_ID_KEYS, DecoderConfig, DrafterConfig
from peagle.errors import UserError
from peagle.models.decoder import Decoder
from peagle.models.drafter import Drafter

ARCHITECTURES = {"llama": "LlamaForCausalLMEagle3", "qwen3": "Eagle3Qwen3ForCausalLM"}
DERIVED = ("t2d",)  # written for readers that want it, made anew from d2t, never read


def mask_ids(values: dict[str, Any]) -> dict[str, Any]:
    """Each name under which a config gives the id of the mask token: ours, and those of kindred drafters
    that vLLM looks up too."""
    nested = values.get("dflash_config")
    given = {name: values.get(name) for name in (*MASK_TOKEN_ID_KEYS, "dspark_noise_token_id")}
    given["dflash_config.mask_token_id"] = nested.get("mask_token_id") if isinstance(nested, dict) else None
    return {name: value for name, value in given.items() if value is not None}


def canonical(name: str) -> str:
    """The module's name for a tensor of the file."""
    return re.sub(r"^midlayer\.", "layers.0.", name)


def plain_tensor_name(name: str) -> str:
    """The plain format's name for a tensor of the module."""
    return re.sub(r"^layers\.0\.", "midlayer.", name)


def read_drafter_config(folder: Path, target: DecoderConfig | None = None) -> DrafterConfig:
    """`target` is asked only for the default aux_layer_ids of a drafter whose config names none."""
    values = plain_values(folder)
    source = folder / "config.json"
    kind = values.get("model_type", "llama")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise UserError(f"{source}: a {kind!r} drafter is not supported; supported: {', '.join(ARCHITECTURES)}")
    fields = completed({**values, "model_type": kind}, source)
    nested = fields.section("eagle_config")
    if nested.get("use_aux_hidden_state", bool, True) is False:
        raise UserError(f"{source}: a drafter without aux_hidden_states layers (use_aux_hidden_state false) is EAGLE-1")
    bias = fields.get("attention_bias", bool, False)
    num_layers = fields.size("num_hidden_layers")
    vocab = fields.size("vocab_size")
    mlp_bias = fields.get("mlp_bias", bool, False)
    layer = layer_config(fields, qkv_bias=bias, out_bias=bias, mlp_bias=mlp_bias, qk_norm=kind == "qwen3")
    windows = sliding_windows(fields, num_layers)
    names = {canonical(name) for name in SafetensorsFolder(folder).names()}
    return DrafterConfig(
        vocab_size=vocab,
        draft_vocab_size=fields.size("draft_vocab_size", vocab),
        num_layers=num_layers,
        layer=layer,
        rope=rope_config(fields),
        max_positions=positions(fields),
        target_hidden_size=fields.size("target_hidden_size", layer.hidden_size),
        aux_layer_ids=_aux_layer_ids(fields, nested, target),
        mask_token_id=_mask_id(values, source, parallel="mask_hidden" in names, vocab=vocab),
        fc_norm=fields.get("fc_norm", bool, False),
        norm_before_fc=nested.get("norm_before_fc", bool, fields.get("norm_before_fc", bool, False)),
        norm_before_residual=fields.get("norm_before_residual", bool, False),
        norm_output=fields.get("norm_output", bool, False),
        own_embeddings="embed_tokens.weight" in names,
        own_head="lm_head.weight" in names,
        windows=windows if any(windows) else (),
    )


def plain_values(folder: Path) -> dict[str, Any]:
    """The folder's config in the plain format's terms, whichever format it is in."""
    values = read_config_json(folder)
    if speculators.is_speculators(values):
        return speculators.speculators_to_plain(values, folder / "config.json")
    return values


def trained_num_speculative_tokens(folder: Path) -> int | None:
    """How many drafts a round it was trained for, where its config says so."""
    values = read_config_json(folder)
    own = values.get("trained_draft_tokens")
    if own is None and speculators.is_speculators(values):
        own = speculators.proposed_tokens(values)
    return own if type(own) is int and own > 0 else None


def _aux_layer_ids(fields: ConfigReader, nested: ConfigReader, target: DecoderConfig | None) -> tuple[int, ...]:
    name = "eagle_aux_hidden_state_layer_ids"
    aux_layer_ids = fields.int_list(name) or nested.int_list(name)
    if not aux_layer_ids:
        if target is None:
            raise fields.error(f"no {name}: name the target (--target), whose default aux_layer_ids are meant then")
        aux_layer_ids = target.default_aux_layer_ids
    if len(set(aux_layer_ids)) != len(aux_layer_ids) or min(aux_layer_ids) < 0:
        raise fields.error(f"{name} is {list(aux_layer_ids)}, expected different layers, from 0 up")
    return tuple(sorted(aux_layer_ids))


def _mask_id(values: dict[str, Any], source: Path, parallel: bool, vocab: int) -> int | None:
    ids = mask_ids(values)
    if not parallel:
        if ids:
            raise UserError(f"{source}: has a mask id ({ids}), but the weights hold no mask_hidden")
        return None
    if not ids:
        names = ", ".join(MASK_TOKEN_ID_KEYS)
        raise UserError(f"{source}: the weights hold mask_hidden, but no mask id is given (one of {names})")
    if len(set(map(repr, ids.values()))) > 1:
        raise UserError(f"{source}: mask ids disagree: {ids}")
    mask_id = next(iter(ids.values()))
    if type(mask_id) is not int or not 0 <= mask_id < vocab:
        raise UserError(f"{source}: mask id {mask_id!r} is not in the vocabulary (0 to {vocab - 1})")
    return mask_id


def drafter_layout(cfg: DrafterConfig) -> Layout:
    with torch.device("meta"):
        return build_layout(Drafter(cfg), cfg.layer)


def find_tensor_problems(cfg: DrafterConfig, shapes: dict[str, tuple[int, ...]]) -> list[str]:
    """What is wrong with the tensors of a file, by its header alone."""
    layout = drafter_layout(cfg)
    seen: dict[str, tuple[int, ...]] = {}
    found = []
    for name, shape in shapes.items():
        known = canonical(name)
        if known in seen:
            found.append(f"tensor {name!r} is there twice, as midlayer. and as layers.0.")
        if known == "mask_hidden" and shape and shape[-1] == cfg.aux_hidden_size and set(shape[:-1]) <= {1}:
            shape = (1, 1, cfg.aux_hidden_size)  # some writers leave a leading 1 out; vLLM flattens it too
        if known in DERIVED or (known == "d2t" and not cfg.reduced_vocab):
            continue  # vLLM's matter, so the validator's
        seen[known] = shape
    needs_own = cfg.layer.hidden_size != cfg.target_hidden_size
    if not cfg.own_head and (cfg.reduced_vocab or needs_own):
        found.append("tensor 'lm_head.weight' is missing: the target's head does not fit this drafter")
    if not cfg.own_embeddings and needs_own:
        found.append("tensor 'embed_tokens.weight' is missing: the target's embeddings have another width")
    return found + problems(layout, seen)


def load_drafter(
    folder: Path,
    target: Decoder,
    dtype: torch.dtype | None = torch.float32,
    device: torch.device | str = "cpu",
) -> Drafter:
    """A drafter ready to draft for `target`; one made for another target is refused."""
    cfg = read_drafter_config(folder, target.cfg)
    check_drafter_fits(cfg, target.cfg, folder)
    return load_unshared_drafter(folder, cfg, dtype, device).share_weights(target)


def load_unshared_drafter(
    folder: Path, cfg: DrafterConfig, dtype: torch.dtype | None, device: torch.device | str = "cpu"
) -> Drafter:
    """The module alone; `dtype` None keeps every tensor as stored."""
    weights = SafetensorsFolder(folder)
    found = find_tensor_problems(cfg, weights.shapes)
    if found:
        more = f" (and {len(found) - 1} more; see `peagle inspect`)" if len(found) > 1 else ""
        raise UserError(f"{folder}: {found[0]}{more}")
    with torch.device("meta"):
        drafter = Drafter(cfg)
    file_names = {canonical(name): name for name in weights.names()}
    fill(drafter, build_layout(drafter, cfg.layer), weights, file_names, dtype, device)
    drafter.rope.to(device)
    if drafter.d2t is None and "d2t" in weights and weights["d2t"].any():
        raise UserError(f"{folder}: d2t moves tokens of a full vocabulary; only a reduced one has such a map")
    if drafter.d2t is not None:
        reach = torch.arange(cfg.draft_vocab_size, device=device) + drafter.d2t
        if reach.min() < 0 or reach.max() >= cfg.vocab_size:
            raise UserError(f"{folder}: d2t points outside the vocabulary of {cfg.vocab_size}")
        if len(reach.unique()) < len(reach):
            raise UserError(f"{folder}: d2t gives one token of the target to two draft tokens")
    return drafter.eval().requires_grad_(False)


def find_fit_problems(cfg: DrafterConfig, target: DecoderConfig) -> list[str]:
    """Why a drafter cannot draft for a target."""
    found = []
    if cfg.target_hidden_size != target.layer.hidden_size:
        found.append(
            f"made for a target of width {cfg.target_hidden_size}, this one is {target.layer.hidden_size} wide"
        )
    if cfg.vocab_size != target.vocab_size:
        found.append(f"made for a vocabulary of {cfg.vocab_size}, this target's has {target.vocab_size}")
    if cfg.draft_vocab_size > cfg.vocab_size:
        found.append(f"draft_vocab_size {cfg.draft_vocab_size} exceeds the vocabulary of {cfg.vocab_size}")
    if max(cfg.aux_layer_ids) > target.num_layers:
        found.append(
            f"aux_layer_ids contains layer {max(cfg.aux_layer_ids)}, but the target has {target.num_layers} layers"
        )
    return found


def check_drafter_fits(cfg: DrafterConfig, target: DecoderConfig, folder: Path) -> None:
    found = find_fit_problems(cfg, target)
    if found:
        raise UserError(f"--drafter {folder}: does not fit the target: {'; '.join(found)}")


def build_drafter_config(cfg: DrafterConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The plain config.json of a drafter."""
    kind = "qwen3" if cfg.layer.qk_norm else "llama"
    values: dict[str, Any] = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "num_hidden_layers": cfg.num_layers,
        **layer_fields(cfg.layer),
        "vocab_size": cfg.vocab_size,
        "draft_vocab_size": cfg.draft_vocab_size,
        "target_hidden_size": cfg.target_hidden_size,
        "max_position_embeddings": cfg.max_positions,
        **rope_fields(cfg.rope),
        "eagle_aux_hidden_state_layer_ids": list(cfg.aux_layer_ids),
        "num_aux_hidden_states": len(cfg.aux_layer_ids),
        "norm_before_residual": cfg.norm_before_residual,
        "norm_before_fc": cfg.norm_before_fc,
        "fc_norm": cfg.fc_norm,
        "norm_output": cfg.norm_output,
        "tie_word_embeddings": False,
        "dtype": str(dtype).removeprefix("torch."),
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if cfg.windows:
        values["use_sliding_window"] = True  # without it Qwen3's config class forgets the window
        (values["sliding_window"],) = {w for w in cfg.windows if w}  # the format has room for one
        values["layer_types"] = ["sliding_attention" if w else "full_attention" for w in cfg.windows]
    if cfg.mask_token_id is not None:
        values |= dict.fromkeys(MASK_TOKEN_ID_KEYS, cfg.mask_token_id)
    return values


def drafter_tensors(drafter: Drafter) -> dict[str, Tensor]:
    """The tensors of the plain format, layer 0 as `midlayer.`; `t2d` is made from `d2t`."""
    tensors = split_parameters(drafter, build_layout(drafter, drafter.cfg.layer))
    if drafter.d2t is not None:
        t2d = torch.zeros(drafter.cfg.vocab_size, dtype=torch.bool)
        t2d[(torch.arange(len(drafter.d2t)) + drafter.d2t.cpu())] = True
        tensors["t2d"] = t2d
    return {plain_tensor_name(name): tensor for name, tensor in tensors.items()}


def save_drafter(drafter: Drafter, folder: Path, max_shard_bytes: int | None = None) -> None:
    def write(into: Path) -> None:
        write_weights(drafter_tensors(drafter), into, max_shard_bytes)
        write_json(build_drafter_config(drafter.cfg, drafter.fc.weight.dtype), into / "config.json")

    write_folder(folder, write)


def same_tensor(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
