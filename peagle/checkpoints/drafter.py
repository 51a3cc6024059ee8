"""Loads, saves, converts and averages drafters, in the plain format that stock vLLM loads.

Reading accepts all spellings in use: layer 0 as `midlayer.` or `layers.0.`, every name of the mask token id, and the
speculators format. Problems that vLLM ignores silently, such as a missing `fc.weight`, raise a UserError.

Conversion to and from the speculators format keeps tensors bit-identical. Speculators stores head and embeddings in
every checkpoint. They are copied from the target when converting to it, and omitted when converting back if they equal
the target's.
"""

import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from peagle.checkpoints import config_reader
from peagle.checkpoints.config_reader import ConfigReader
from peagle.checkpoints.files import SafetensorsFolder, read_config_json, save_checkpoint
from peagle.checkpoints.target import read_target_config
from peagle.checkpoints.tensors import (
    TensorLayout,
    build_layout,
    find_layout_problems,
    load_parameters,
    split_parameters,
)
from peagle.config import MASK_TOKEN_ID_KEYS, DecoderConfig, DrafterConfig
from peagle.errors import UserError
from peagle.models.decoder import Decoder
from peagle.models.drafter import Drafter

ARCHITECTURES = {"llama": "LlamaForCausalLMEagle3", "qwen3": "Eagle3Qwen3ForCausalLM"}
AUX_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
NORM_OPTIONS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")  # fields of DrafterConfig, and JSON
CheckpointFormat = Literal["plain", "speculators"]


def read_mask_token_ids(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the mask token id under each name that vLLM reads."""
    return {name: values[name] for name in MASK_TOKEN_ID_KEYS if values.get(name) is not None}


def module_tensor_name(name: str) -> str:
    """Returns the module's name of a file's tensor."""
    return re.sub(r"^midlayer\.", "layers.0.", name)


def plain_tensor_name(name: str) -> str:
    """Returns the plain format's name of a module's tensor."""
    return re.sub(r"^layers\.0\.", "midlayer.", name)


def read_drafter_config(folder: Path, target: DecoderConfig | None = None) -> DrafterConfig:
    """Reads a drafter's config. `target` provides the default aux_layer_ids if the config has none."""
    values = read_plain_config(folder)
    source = folder / "config.json"
    model_type = values.get("model_type", "llama")
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        raise UserError(f"{source}: a {model_type!r} drafter is not supported; supported: {', '.join(ARCHITECTURES)}")
    config = config_reader.fill_defaults({**values, "model_type": model_type}, source)
    eagle_config = config.section("eagle_config")
    if eagle_config.get("use_aux_hidden_state", bool, True) is False:
        raise UserError(f"{source}: EAGLE-1 drafters (use_aux_hidden_state false) are not supported")
    num_layers, vocab = config.size("num_hidden_layers"), config.size("vocab_size")
    layer = config.read_layer(qk_norm=model_type == "qwen3")
    windows = config.read_windows(num_layers)
    norms = {name: config.get(name, bool, False) for name in NORM_OPTIONS}
    norms["norm_before_fc"] = eagle_config.get("norm_before_fc", bool, norms["norm_before_fc"])
    names = {module_tensor_name(name) for name in SafetensorsFolder(folder).shapes}
    return DrafterConfig(
        vocab_size=vocab,
        draft_vocab_size=config.size("draft_vocab_size", vocab),
        num_layers=num_layers,
        layer=layer,
        rope=config.read_rope(),
        max_positions=config.max_positions,
        target_hidden_size=config.size("target_hidden_size", layer.hidden_size),
        aux_layer_ids=_read_aux_layer_ids(config, eagle_config, target),
        mask_token_id=_read_mask_token_id(values, source, parallel="mask_hidden" in names, vocab=vocab),
        **norms,
        own_embeddings="embed_tokens.weight" in names,
        own_head="lm_head.weight" in names,
        windows=windows if any(windows) else (),
    )


def read_plain_config(folder: Path) -> dict[str, Any]:
    """Returns the folder's config.json, converted to the plain format if it is in the speculators format."""
    values = read_config_json(folder)
    if config_reader.is_speculators(values):
        return config_reader.speculators_to_plain(values, folder / "config.json")
    return values


def trained_num_speculative_tokens(folder: Path) -> int | None:
    """Returns the number of draft tokens that the drafter was trained for, if its config has it."""
    values = read_config_json(folder)
    methods = (values.get("speculators_config") or {}).get("proposal_methods") or [{}]
    trained = values.get("trained_draft_tokens", methods[0].get("speculative_tokens"))
    return trained if type(trained) is int and trained > 0 else None


def _read_aux_layer_ids(
    config: ConfigReader, eagle_config: ConfigReader, target: DecoderConfig | None
) -> tuple[int, ...]:
    aux_layer_ids = config.int_list(AUX_LAYER_IDS) or eagle_config.int_list(AUX_LAYER_IDS)
    if not aux_layer_ids:
        if target is None:
            raise config.error(f"no {AUX_LAYER_IDS}; give --target to use its default layers")
        aux_layer_ids = target.default_aux_layer_ids
    if len(set(aux_layer_ids)) != len(aux_layer_ids) or min(aux_layer_ids) < 0:
        raise config.error(f"{AUX_LAYER_IDS} is {list(aux_layer_ids)}, expected distinct layers from 0 up")
    return tuple(sorted(aux_layer_ids))


def _read_mask_token_id(values: dict[str, Any], source: Path, parallel: bool, vocab: int) -> int | None:
    ids = read_mask_token_ids(values)
    if not parallel:
        if ids:
            raise UserError(f"{source}: has a mask token id ({ids}), but the weights have no mask_hidden")
        return None
    if not ids:
        names = ", ".join(MASK_TOKEN_ID_KEYS)
        raise UserError(f"{source}: the weights have mask_hidden, but the mask token id is missing (one of {names})")
    if len(set(map(repr, ids.values()))) > 1:
        raise UserError(f"{source}: mask token ids disagree: {ids}")
    mask_id = next(iter(ids.values()))
    if type(mask_id) is not int or not 0 <= mask_id < vocab:
        raise UserError(f"{source}: mask token id {mask_id!r} is not in the vocabulary (0 to {vocab - 1})")
    return mask_id


def drafter_layout(cfg: DrafterConfig) -> TensorLayout:
    with torch.device("meta"):
        return build_layout(Drafter(cfg), cfg.layer)


def find_tensor_problems(cfg: DrafterConfig, shapes: dict[str, tuple[int, ...]]) -> list[str]:
    """Lists problems with the names and shapes of a file's tensors."""
    found = []
    module_shapes: dict[str, tuple[int, ...]] = {}
    for file_name, shape in shapes.items():
        name = module_tensor_name(file_name)
        if name in module_shapes:
            found.append(f"tensor {file_name!r} is there twice, as midlayer. and as layers.0.")
        if name == "mask_hidden" and shape and shape[-1] == cfg.aux_hidden_size and set(shape[:-1]) <= {1}:
            shape = (1, 1, cfg.aux_hidden_size)  # vLLM accepts missing leading dimensions too
        if name == "t2d" or (name == "d2t" and not cfg.reduced_vocab):
            continue  # not needed here; the validator checks them for vLLM
        module_shapes[name] = shape
    other_width = cfg.layer.hidden_size != cfg.target_hidden_size
    if not cfg.own_head and (cfg.reduced_vocab or other_width):
        found.append("tensor 'lm_head.weight' is missing: the target's head does not fit this drafter")
    if not cfg.own_embeddings and other_width:
        found.append("tensor 'embed_tokens.weight' is missing: the target's embeddings have another width")
    return found + find_layout_problems(drafter_layout(cfg), module_shapes)


def load_drafter(
    folder: Path, target: Decoder, dtype: torch.dtype | None = torch.float32, device: torch.device | str = "cpu"
) -> Drafter:
    """Loads a drafter and shares the target's embeddings and head with it. The drafter must fit the target."""
    cfg = read_drafter_config(folder, target.cfg)
    check_drafter_fits(cfg, target.cfg, folder)
    return load_unshared_drafter(folder, cfg, dtype, device).share_weights(target)


def load_unshared_drafter(
    folder: Path, cfg: DrafterConfig, dtype: torch.dtype | None, device: torch.device | str = "cpu"
) -> Drafter:
    """Loads a drafter without a target. `dtype` None keeps every tensor's dtype."""
    weights = SafetensorsFolder(folder)
    if found := find_tensor_problems(cfg, weights.shapes):
        more = f" (and {len(found) - 1} more; see `peagle inspect`)" if len(found) > 1 else ""
        raise UserError(f"{folder}: {found[0]}{more}")
    with torch.device("meta"):
        drafter = Drafter(cfg)
    file_names = {module_tensor_name(name): name for name in weights.shapes}
    layout = build_layout(drafter, cfg.layer)
    load_parameters(drafter, layout, lambda name: weights[file_names[name]], folder, dtype, device)
    drafter.rope.to(device)
    if "d2t" in weights and (found := find_d2t_problems(cfg, weights["d2t"])):
        raise UserError(f"{folder}: {found[0]}")
    return drafter.eval().requires_grad_(False)


def find_d2t_problems(cfg: DrafterConfig, d2t: Tensor) -> list[str]:
    """Lists problems with the map from draft token ids to target token ids, which is stored as differences."""
    if not cfg.reduced_vocab:
        return ["d2t is not zero, but the draft vocabulary is not reduced"] if d2t.any() else []
    ids = torch.arange(len(d2t)) + d2t
    if ids.min() < 0 or ids.max() >= cfg.vocab_size:
        return [f"d2t points outside the vocabulary (ids {int(ids.min())} to {int(ids.max())})"]
    return ["d2t maps several draft ids to one target id"] if len(ids.unique()) < len(ids) else []


def find_fit_problems(cfg: DrafterConfig, target: DecoderConfig) -> list[str]:
    """Lists the reasons why a drafter cannot draft for a target."""
    found = []
    if cfg.target_hidden_size != target.layer.hidden_size:
        found.append(f"target_hidden_size is {cfg.target_hidden_size}, but the target's is {target.layer.hidden_size}")
    if cfg.vocab_size != target.vocab_size:
        found.append(f"vocab_size is {cfg.vocab_size}, but the target's is {target.vocab_size}")
    if cfg.draft_vocab_size > cfg.vocab_size:
        found.append(f"draft_vocab_size {cfg.draft_vocab_size} exceeds the vocabulary of {cfg.vocab_size}")
    if (last := max(cfg.aux_layer_ids)) > target.num_layers:
        found.append(f"aux_layer_ids contains layer {last}, but the target has {target.num_layers} layers")
    return found


def check_drafter_fits(cfg: DrafterConfig, target: DecoderConfig, folder: Path | None) -> None:
    """`folder`: None for a drafter that is not from a folder."""
    if found := find_fit_problems(cfg, target):
        name = "the drafter" if folder is None else f"--drafter {folder}:"
        raise UserError(f"{name} does not fit the target: {'; '.join(found)}")


def build_drafter_config(cfg: DrafterConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Returns the plain format's config.json."""
    model_type, layer = "qwen3" if cfg.layer.qk_norm else "llama", cfg.layer
    values: dict[str, Any] = {
        "architectures": [ARCHITECTURES[model_type]],
        "model_type": model_type,
        "num_hidden_layers": cfg.num_layers,
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_attention_heads": layer.num_heads,
        "num_key_value_heads": layer.num_kv_heads,
        "head_dim": layer.head_dim,
        "rms_norm_eps": layer.norm_eps,
        "hidden_act": "silu",
        "attention_bias": layer.qkv_bias,
        "mlp_bias": layer.mlp_bias,
        "vocab_size": cfg.vocab_size,
        "draft_vocab_size": cfg.draft_vocab_size,
        "target_hidden_size": cfg.target_hidden_size,
        "max_position_embeddings": cfg.max_positions,
        **config_reader.rope_to_json(cfg.rope),
        AUX_LAYER_IDS: list(cfg.aux_layer_ids),
        "num_aux_hidden_states": len(cfg.aux_layer_ids),
        **{name: getattr(cfg, name) for name in NORM_OPTIONS},
        "tie_word_embeddings": False,
        "dtype": str(dtype).removeprefix("torch."),
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if cfg.windows:
        values["use_sliding_window"] = True  # Qwen3's config class drops the window without it
        (values["sliding_window"],) = {w for w in cfg.windows if w}  # the format supports only one size
        values["layer_types"] = ["sliding_attention" if w else "full_attention" for w in cfg.windows]
    if cfg.mask_token_id is not None:
        values |= dict.fromkeys(MASK_TOKEN_ID_KEYS, cfg.mask_token_id)
    return values


def drafter_tensors(drafter: Drafter) -> dict[str, Tensor]:
    """Returns the plain format's tensors, with layer 0 as `midlayer.` and `t2d` computed from `d2t`."""
    tensors = split_parameters(drafter, build_layout(drafter, drafter.cfg.layer))
    if drafter.d2t is not None:
        tensors["t2d"] = build_t2d(drafter.d2t.cpu(), drafter.cfg.vocab_size)
    return {plain_tensor_name(name): tensor for name, tensor in tensors.items()}


def build_t2d(d2t: Tensor, vocab_size: int) -> Tensor:
    """True for the target's token ids in the draft vocabulary."""
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[torch.arange(len(d2t)) + d2t] = True
    return t2d


def save_drafter(drafter: Drafter, folder: Path) -> None:
    save_checkpoint(drafter_tensors(drafter), build_drafter_config(drafter.cfg, drafter.fc.weight.dtype), folder)


def detect_format(folder: Path) -> CheckpointFormat:
    return "speculators" if config_reader.is_speculators(read_config_json(folder)) else "plain"


def convert_drafter(
    source: Path, out: Path, to: CheckpointFormat, target: Path, target_name: str, num_speculative_tokens: int
) -> dict[str, str]:
    """Writes the folder `out`. Returns a message for each table that was copied or omitted."""
    target_cfg = read_target_config(target)
    cfg = read_drafter_config(source, target_cfg)
    check_drafter_fits(cfg, target_cfg, source)
    drafter = load_unshared_drafter(source, cfg, dtype=None)
    tensors = {module_tensor_name(name): tensor for name, tensor in drafter_tensors(drafter).items()}
    values = build_drafter_config(cfg, drafter.fc.weight.dtype)
    messages: dict[str, str] = {}
    target_weights = SafetensorsFolder(target)
    for name in ("embed_tokens.weight", "lm_head.weight"):
        tied = name == "lm_head.weight" and target_cfg.tie_word_embeddings
        table = target_weights["model.embed_tokens.weight" if tied or name.startswith("embed") else name]
        if to == "speculators" and name not in tensors:
            tensors[name] = table.to(drafter.fc.weight.dtype, copy=True)
            messages[name] = "copied from the target"
        elif to == "plain" and name in tensors and torch.equal(tensors[name], table.to(tensors[name].dtype)):
            del tensors[name]
            messages[name] = "omitted: equal to the target's, which is shared"
    if to == "plain":
        tensors = {plain_tensor_name(name): tensor for name, tensor in tensors.items()}
    else:
        architectures = read_config_json(target).get("architectures", [])
        values = config_reader.plain_to_speculators(values, target_name, architectures, num_speculative_tokens)

    save_checkpoint(tensors, values, out)
    return messages


def average_drafters(sources: Sequence[Path], out: Path, weights: Sequence[float]) -> None:
    """Writes the weighted average in the plain format and the first drafter's dtype. `weights` need not sum to 1.

    The average of drafters that were fine-tuned from the same checkpoint is often better than each of them. Averaging
    unrelated drafters gives noise.
    """
    assert len(sources) == len(weights) > 1, (sources, weights)
    configs = [read_drafter_config(source) for source in sources]
    first = asdict(configs[0])
    for source, cfg in zip(sources, configs, strict=True):
        for name, value in asdict(cfg).items():
            if value != first[name]:
                problem = f"{name} is {value!r} instead of {first[name]!r}"
                raise UserError(f"{source}: cannot be averaged with {sources[0]}: {problem}")
    drafters = [load_unshared_drafter(source, configs[0], dtype=None) for source in sources]
    inputs = [drafter_tensors(drafter) for drafter in drafters]
    for source, each in zip(sources, inputs, strict=True):
        if "d2t" in each and not torch.equal(each["d2t"], inputs[0]["d2t"]):
            raise UserError(f"{source}: cannot be averaged with {sources[0]}: their draft vocabularies differ")
    tensors = {name: _average([each[name] for each in inputs], weights) for name in inputs[0]}
    values = build_drafter_config(configs[0], drafters[0].fc.weight.dtype)
    if trained := list(filter(None, map(trained_num_speculative_tokens, sources))):
        values["trained_draft_tokens"] = min(trained)
    save_checkpoint(tensors, values, out)


def _average(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    first = tensors[0]
    if not first.is_floating_point():  # d2t and t2d
        return first
    total = torch.zeros(first.shape, dtype=torch.float64)
    for tensor, weight in zip(tensors, weights, strict=True):
        total += tensor.double() * weight
    return (total / sum(weights)).to(first.dtype)
