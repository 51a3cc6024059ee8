"""Inspects a drafter folder, and finds problems that vLLM ignores or misinterprets, by vLLM version.

Each finding is one line.
"""

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from peagle import config
from peagle.checkpoints import drafter
from peagle.checkpoints.config_reader import is_speculators
from peagle.checkpoints.drafter import AUX_LAYER_IDS
from peagle.checkpoints.files import SafetensorsFolder, read_config_json
from peagle.checkpoints.target import eos_ids, has_tokenizer, load_tokenizer, read_target_sizes
from peagle.config import DecoderConfig, DrafterConfig, check_num_speculative_tokens, default_num_speculative_tokens
from peagle.errors import UserError

KNOWN_ARCHITECTURES = (*drafter.ARCHITECTURES.values(), "Eagle3LlamaForCausalLM", "PeagleLlamaForCausalLM")
# Targets for which vLLM, up to VLLM_VERSION, cannot extract auxiliary hidden states.
NO_AUX_HIDDEN_STATES = ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")
# Beginnings of findings with which vLLM still works.
MISSING_AUX_LAYER_IDS = f"no {AUX_LAYER_IDS}"
SHORT_MAX_POSITIONS = "max_position_embeddings is"
VllmVersion = tuple[int, int]


@dataclass
class DrafterReport:
    facts: dict[str, str]
    serve: str  # the `vllm serve` command
    findings: list[str]


def parse_version(text: str) -> VllmVersion:
    match = re.match(r"v?(\d+)\.(\d+)", text)
    if match is None:
        raise UserError(f"--vllm-version {text}: must be a version like 0.32")
    return int(match[1]), int(match[2])


def inspect_drafter(
    folder: Path,
    name: str,
    target_folder: Path | None = None,
    target_name: str | None = None,
    vllm: str = config.VLLM_VERSION,
    num_speculative_tokens: int | None = None,
) -> DrafterReport:
    """Inspects a folder. Raises a UserError only if it is not a checkpoint folder at all."""
    version = parse_version(vllm)
    raw, values, weights = read_config_json(folder), drafter.read_plain_config(folder), SafetensorsFolder(folder)
    target = read_target_sizes(target_folder) if target_folder is not None else None
    facts = {"drafter": f"{name} ({'speculators' if is_speculators(raw) else 'plain'} format)"}
    try:
        cfg = drafter.read_drafter_config(folder, target)
    except UserError as error:
        findings = [str(error).removeprefix(f"{folder / 'config.json'}: "), *_find_bad_values(weights)]
        return DrafterReport(facts, "none: fix the findings first", findings)
    found = drafter.find_tensor_problems(cfg, weights.shapes) + _find_bad_values(weights)
    found += _find_vocab_map_problems(cfg, weights, version)
    found += _find_misread_fields(raw, values, cfg, version)
    found += _find_newer_features(cfg, is_speculators(raw), version)
    if target is not None and target_folder is not None:
        found += drafter.find_fit_problems(cfg, target)
        found += _find_target_problems(cfg, target, target_folder)
    speculative = build_speculative_config(vllm_model_name(name, folder), num_speculative_tokens, cfg.parallel)
    options = ["--speculative-config", json.dumps(speculative, separators=(",", ":"))]
    serve = shlex.join(["vllm", "serve", vllm_model_name(target_name, target_folder), *options])
    return DrafterReport(facts | _list_facts(cfg, weights), serve, found)


def vllm_model_name(name: str | None, folder: Path | None) -> str:
    """Returns a model name that vLLM accepts: built-in names become folders."""
    if name is None:
        return "TARGET"
    return name if "/" in name or folder is None or Path(name).exists() else str(folder)


def build_speculative_config(drafter: str, k: int | None, parallel: bool) -> dict[str, Any]:
    """Returns the value of vLLM's --speculative-config, which needs the method and the parallel_drafting flag."""
    k = check_num_speculative_tokens(default_num_speculative_tokens(parallel) if k is None else k)
    values: dict[str, Any] = {"method": "eagle3", "model": drafter, "num_speculative_tokens": k}
    return {**values, "parallel_drafting": True} if parallel else values


def build_vllm_flags(**options: Any) -> dict[str, str]:
    """Returns flags of `vllm serve` and their values; options that are None keep vLLM's defaults."""

    def to_text(value: Any) -> str:
        return json.dumps(value, separators=(",", ":")) if isinstance(value, dict | list) else str(value)

    return {f"--{name.replace('_', '-')}": to_text(value) for name, value in options.items() if value is not None}


def _list_facts(cfg: DrafterConfig, weights: SafetensorsFolder) -> dict[str, str]:
    layer = cfg.layer
    shared = [name for name, own in (("embeddings", cfg.own_embeddings), ("head", cfg.own_head)) if not own]
    dtypes = sorted({str(weights[n].dtype).removeprefix("torch.") for n in weights.shapes if "fc" in n})
    parameters = sum(torch.Size(shape).numel() for n, shape in weights.shapes.items() if n not in ("d2t", "t2d"))
    flags = ("fc_norm", "norm_before_fc", "norm_before_residual", "norm_output")
    return {
        "kind": "P-EAGLE (parallel drafting)" if cfg.parallel else "EAGLE-3 (autoregressive)",
        "shape": f"{cfg.num_layers} layer(s), hidden size {layer.hidden_size}, {layer.num_heads} heads and "
        f"{layer.num_kv_heads} KV heads of {layer.head_dim}, MLP {layer.intermediate_size}, {', '.join(dtypes)}",
        "parameters": f"{parameters:,}",
        "aux_layer_ids": f"{', '.join(map(str, cfg.aux_layer_ids))}, target hidden size {cfg.target_hidden_size}",
        "mask token id": "none" if cfg.mask_token_id is None else str(cfg.mask_token_id),
        "vocabulary": f"{cfg.draft_vocab_size:,} of the target's {cfg.vocab_size:,}",
        "shared weights": f"{' and '.join(shared)} of the target" if shared else "none",
        "options": ", ".join(name for name in flags if getattr(cfg, name)) or "none",
        "positions": f"{cfg.max_positions:,}, rope {cfg.rope.rope_type}, theta {cfg.rope.theta:g}",
    }


def _find_bad_values(weights: SafetensorsFolder) -> list[str]:
    found = []
    for name in weights.shapes:
        tensor = weights[name]
        if tensor.is_floating_point():
            if bad := int((~tensor.isfinite()).sum()):
                found.append(f"tensor {name!r} holds {bad} NaN or infinite values")
            elif tensor.numel() and not tensor.any():
                found.append(f"tensor {name!r} is all zeros")
    return found


def _find_vocab_map_problems(cfg: DrafterConfig, weights: SafetensorsFolder, version: VllmVersion) -> list[str]:
    if "d2t" not in weights or (cfg.reduced_vocab and weights.shapes["d2t"] != (cfg.draft_vocab_size,)):
        return []  # find_tensor_problems reports it
    d2t = weights["d2t"]
    if d2t.dtype != torch.int64:
        return [f"d2t is {str(d2t.dtype).removeprefix('torch.')}, expected int64"]
    if found := drafter.find_d2t_problems(cfg, d2t):
        return found
    if not cfg.reduced_vocab:
        return ["d2t in a full-vocabulary drafter: vLLM 0.30 and newer reject it"] if version >= (0, 30) else []
    matches = "t2d" not in weights or torch.equal(weights["t2d"].bool(), drafter.build_t2d(d2t, cfg.vocab_size))
    return [] if matches else ["t2d does not match d2t"]


def _find_misread_fields(
    raw: dict[str, Any], values: dict[str, Any], cfg: DrafterConfig, version: VllmVersion
) -> list[str]:
    """Lists fields that this version of vLLM misinterprets."""
    found = []
    in_speculators_format = is_speculators(raw)
    aux_layer_ids = values.get(AUX_LAYER_IDS) or (values.get("eagle_config") or {}).get(AUX_LAYER_IDS)
    if aux_layer_ids is None:
        found.append(f"{MISSING_AUX_LAYER_IDS}: readers use different defaults")
    elif list(aux_layer_ids) != sorted(aux_layer_ids):
        found.append(f"{AUX_LAYER_IDS} {aux_layer_ids} is not sorted: vLLM concatenates in ascending order anyway")
    num_given, num_ids = values.get("num_aux_hidden_states"), len(cfg.aux_layer_ids)
    if num_given is not None and num_given != num_ids:
        found.append(f"num_aux_hidden_states is {num_given}, but there are {num_ids} aux_layer_ids")
    if num_given is None and num_ids != 3:
        found.append(f"{num_ids} aux_layer_ids without num_aux_hidden_states: vLLM assumes 3")
    if "target_hidden_size" in raw and raw["target_hidden_size"] is None and not in_speculators_format:
        found.append("target_hidden_size is null: vLLM fails; omit the field or give the number")
    if not in_speculators_format:
        architectures = values.get("architectures")
        if architectures is None or architectures[0] not in KNOWN_ARCHITECTURES:
            found.append(f"architectures {architectures}: vLLM expects {KNOWN_ARCHITECTURES[0]}")
        theta, nested = values.get("rope_theta"), (values.get("rope_parameters") or {}).get("rope_theta")
        if theta is not None and nested is not None and theta != nested:
            found.append(f"rope_theta is {theta}, but {nested} in rope_parameters: readers differ in which they use")
        given = list(drafter.read_mask_token_ids(values))
        if cfg.parallel and version < (0, 28) and not {"pard_token", "ptd_token_id"} & set(given):
            names = " and ".join(given)
            found.append(f"mask token id only as {names}: vLLM {_dotted(version)} reads pard_token or ptd_token_id")
    else:
        if "norm_before_residual" not in raw:
            found.append("norm_before_residual is missing: vLLM and speculators have different defaults")
        shape = raw.get("transformer_layer_config") or {}
        for name in ("fc_norm", "norm_output"):
            if raw.get(name) and not shape.get(name) and cfg.parallel:
                found.append(f"{name} is outside transformer_layer_config: vLLM ignores it for a peagle drafter")
    return found


def _find_newer_features(cfg: DrafterConfig, in_speculators_format: bool, version: VllmVersion) -> list[str]:
    """Lists features that this version of vLLM lacks; it ignores their fields, and acceptance drops."""
    needs = [
        (cfg.parallel, "parallel drafting", (0, 16)),
        (cfg.norm_before_fc, "norm_before_fc", (0, 18)),
        (cfg.fc_norm, "fc_norm", (0, 22)),
        (cfg.norm_output, "norm_output", (0, 22)),
        (len(cfg.aux_layer_ids) != 3, "a number of aux_layer_ids other than 3", (0, 22)),
        (cfg.layer.hidden_size != cfg.target_hidden_size, "a hidden size other than the target's", (0, 22)),
        (cfg.parallel and in_speculators_format, "a peagle drafter in the speculators format", (0, 22)),
    ]
    return [
        f"{feature} needs vLLM {_dotted(minimum)} or newer, not {_dotted(version)}"
        for used, feature, minimum in needs
        if used and version < minimum
    ]


def _find_target_problems(cfg: DrafterConfig, target: DecoderConfig, folder: Path) -> list[str]:
    found = []
    for name in read_config_json(folder).get("architectures") or []:
        if name in NO_AUX_HIDDEN_STATES:
            found.append(f"vLLM cannot extract auxiliary hidden states of {name}: serve it with peagle serve")
    if cfg.max_positions < target.max_positions:
        found.append(
            f"{SHORT_MAX_POSITIONS} {cfg.max_positions}, the target's {target.max_positions}: "
            "vLLM stops drafting at that length without a warning"
        )
    if cfg.mask_token_id is not None and cfg.mask_token_id < target.vocab_size:
        if reason := _why_mask_id_is_unsafe(cfg.mask_token_id, folder):
            found.append(f"mask token id {cfg.mask_token_id} {reason}: use a reserved id that never occurs in text")
    return found


def _why_mask_id_is_unsafe(mask_id: int, folder: Path) -> str | None:
    """Why the id may occur in text; None for a padding row or an unused special token."""
    if mask_id in eos_ids(folder):
        return "is an EOS id"
    tokenizer = load_tokenizer(folder) if has_tokenizer(folder) else None
    if tokenizer is None or mask_id >= len(tokenizer):
        return None
    token = tokenizer.convert_ids_to_tokens(mask_id)
    special = {str(added) for added in tokenizer.added_tokens_decoder.values() if added.special}
    if mask_id not in tokenizer.all_special_ids and token not in special:
        return f"is an ordinary token of the tokenizer ({token!r})"
    if mask_id in (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id):
        return f"is the BOS, EOS or padding token ({token!r})"
    if token in (tokenizer.chat_template or ""):
        return f"is part of the chat template ({token!r})"
    return None


def _dotted(version: VllmVersion) -> str:
    return ".".join(map(str, version))
