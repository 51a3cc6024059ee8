"""What a drafter's folder holds, and everything wrong with it that vLLM would swallow or misread.

Knows how released versions of vLLM read a drafter; changes nothing. Each finding is one line.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from peagle.checkpoints import speculators
from peagle.checkpoints.drafter import (
    ARCHITECTURES,
    canonical,
    find_fit_problems,
    find_tensor_problems,
    mask_ids,
    plain_values,
    read_drafter_config,
)
from peagle.checkpoints.files import SafetensorsFolder, read_config_json
from peagle.checkpoints.target import eos_ids, has_tokenizer, load_tokenizer, read_target_config
from peagle.config import (
    VLLM_VERSION,
    DecoderConfig,
    DrafterConfig,
    check_num_speculative_tokens,
    default_num_speculative_tokens,
)
from peagle.errors import UserError

AUX_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
KNOWN_ARCHITECTURES = (*ARCHITECTURES.values(), "Eagle3LlamaForCausalLM", "PeagleLlamaForCausalLM")
# Targets whose hidden states no version of vLLM up to VLLM_VERSION hands to a drafter.
NO_AUX_HIDDEN_STATES = ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")
Version = tuple[int, int]


@dataclass
class Report:
    facts: dict[str, str] = field(default_factory=dict)
    serve: str = ""
    findings: list[str] = field(default_factory=list)


def parse_version(text: str) -> Version:
    match = re.match(r"v?(\d+)\.(\d+)", text)
    if match is None:
        raise UserError(f"--vllm {text}: expected a version such as 0.32")
    return int(match[1]), int(match[2])


def inspect_drafter(
    folder: Path,
    name: str,
    target_folder: Path | None = None,
    target_name: str | None = None,
    vllm: str = VLLM_VERSION,
    draft_tokens: int | None = None,
) -> Report:
    """A folder that is no checkpoint at all is the caller's mistake (UserError), not a finding."""
    version = parse_version(vllm)
    raw, values, weights = read_config_json(folder), plain_values(folder), SafetensorsFolder(folder)
    target = read_target_config(target_folder) if target_folder is not None else None
    report = Report()
    report.facts["drafter"] = f"{name} ({'speculators' if speculators.is_speculators(raw) else 'plain'} format)"
    try:
        cfg = read_drafter_config(folder, target)
    except UserError as error:
        report.findings += [str(error).removeprefix(f"{folder / 'config.json'}: "), *_bad_numbers(weights)]
        report.serve = "not before what is found is mended"
        return report
    found = report.findings
    found += find_tensor_problems(cfg, weights.shapes)
    found += _bad_numbers(weights)
    found += _vocabulary_map(cfg, weights, version)
    found += _misread_fields(raw, values, cfg, version)
    found += _too_new(cfg, version)
    if target is not None and target_folder is not None:
        found += find_fit_problems(cfg, target)
        found += _against_target(cfg, target, target_folder)
    report.facts |= _facts(cfg, weights, target_folder)
    report.serve = serve_line(
        cfg, vllm_model_name(target_name, target_folder), vllm_model_name(name, folder), draft_tokens
    )
    return report


def vllm_model_name(name: str | None, folder: Path | None) -> str:
    """A name that vLLM understands too: ours for what is built in are folders to it."""
    if name is None:
        return "TARGET"
    return name if "/" in name or folder is None or Path(name).exists() else str(folder)


def serve_line(cfg: DrafterConfig, target: str, drafter: str, draft_tokens: int | None) -> str:
    """The exact command for stock vLLM."""
    config = build_speculative_config(drafter, draft_tokens, cfg.parallel)
    return shlex.join(["vllm", "serve", target, "--speculative-config", json.dumps(config, separators=(",", ":"))])


def build_speculative_config(drafter: str, k: int | None, parallel: bool) -> dict[str, Any]:
    """What vLLM's --speculative-config takes. It needs the method named, and to be told of parallel drafting."""
    k = check_num_speculative_tokens(default_num_speculative_tokens(parallel) if k is None else k)
    config: dict[str, Any] = {"method": "eagle3", "model": drafter, "num_speculative_tokens": k}
    return {**config, "parallel_drafting": True} if parallel else config


def _facts(cfg: DrafterConfig, weights: SafetensorsFolder, target_folder: Path | None) -> dict[str, str]:
    layer = cfg.layer
    shared = [what for what, own in (("embeddings", cfg.own_embeddings), ("head", cfg.own_head)) if not own]
    dtypes = sorted({str(weights[n].dtype).removeprefix("torch.") for n in weights.names() if "fc" in n})
    parameters = sum(
        torch.Size(shape).numel() for n, shape in weights.shapes.items() if canonical(n) not in ("d2t", "t2d")
    )
    mask = "none"
    if cfg.mask_token_id is not None:
        mask = str(cfg.mask_token_id)
        tokenizer = _tokenizer(target_folder)
        if tokenizer is not None and cfg.mask_token_id < len(tokenizer):
            mask += f" ({tokenizer.convert_ids_to_tokens(cfg.mask_token_id)!r})"
    options = [
        name for name in ("fc_norm", "norm_before_fc", "norm_before_residual", "norm_output") if getattr(cfg, name)
    ]
    return {
        "kind": "P-EAGLE, all drafts in one pass" if cfg.parallel else "EAGLE-3, one draft a pass",
        "shape": f"{cfg.num_layers} layer(s), {layer.hidden_size} wide, {layer.num_heads} heads over "
        f"{layer.num_kv_heads} of {layer.head_dim}, MLP {layer.intermediate_size}, {', '.join(dtypes)}",
        "parameters": f"{parameters:,}",
        "aux_layer_ids": f"{', '.join(map(str, cfg.aux_layer_ids))} of a target {cfg.target_hidden_size} wide",
        "mask id": mask,
        "vocabulary": f"{cfg.draft_vocab_size:,} of the target's {cfg.vocab_size:,}",
        "shared": f"{' and '.join(shared)} with the target" if shared else "nothing with the target",
        "options": ", ".join(options) or "none",
        "positions": f"{cfg.max_positions:,}, rope {cfg.rope.rope_type}, theta {cfg.rope.theta:g}",
    }


def _bad_numbers(weights: SafetensorsFolder) -> list[str]:
    found = []
    for name in weights.names():
        tensor = weights[name]
        if tensor.is_floating_point():
            bad = int((~tensor.isfinite()).sum())
            if bad:
                found.append(f"tensor {name!r} holds {bad} NaN or infinite values")
            elif tensor.numel() and not tensor.any():
                found.append(f"tensor {name!r} is all zeros")
    return found


def _vocabulary_map(cfg: DrafterConfig, weights: SafetensorsFolder, version: Version) -> list[str]:
    if not cfg.reduced_vocab:
        if "d2t" in weights and weights["d2t"].any():
            return ["d2t moves tokens of a full vocabulary; only a reduced one has such a map"]
        extra = [name for name in ("d2t", "t2d") if name in weights]
        if extra and version >= (0, 30):
            return [f"{' and '.join(extra)} in a full-vocabulary drafter: vLLM 0.30 and newer refuse d2t there"]
        return []
    if "d2t" not in weights or weights.shapes["d2t"] != (cfg.draft_vocab_size,):
        return []  # the tensor check has said so
    d2t = weights["d2t"]
    if d2t.dtype != torch.int64:
        return [f"d2t is {str(d2t.dtype).removeprefix('torch.')}, expected int64"]
    ids = torch.arange(len(d2t)) + d2t
    if ids.min() < 0 or ids.max() >= cfg.vocab_size:
        return [f"d2t points outside the vocabulary (ids {int(ids.min())} to {int(ids.max())})"]
    found = []
    if len(ids.unique()) < len(ids):
        found.append("d2t maps several draft ids to one target id")
    if "t2d" in weights:
        t2d = weights["t2d"].bool()
        expected = torch.zeros(cfg.vocab_size, dtype=torch.bool)
        expected[ids] = True
        if t2d.shape != expected.shape or not torch.equal(t2d, expected):
            found.append("t2d does not mark the target ids that d2t names")
    return found


def _misread_fields(raw: dict[str, Any], values: dict[str, Any], cfg: DrafterConfig, version: Version) -> list[str]:
    """ConfigReader that vLLM, or the named version of it, reads otherwise than meant."""
    found = []
    as_speculators = speculators.is_speculators(raw)
    aux_layer_ids = values.get(AUX_LAYER_IDS) or (values.get("eagle_config") or {}).get(AUX_LAYER_IDS)
    if aux_layer_ids is None:
        found.append(f"no {AUX_LAYER_IDS}: every reader falls back to its own default aux_layer_ids")
    elif list(aux_layer_ids) != sorted(aux_layer_ids):
        found.append(
            f"{AUX_LAYER_IDS} {aux_layer_ids} is not sorted: vLLM concatenates in ascending order all the same"
        )
    counted = values.get("num_aux_hidden_states")
    if counted is not None and counted != len(cfg.aux_layer_ids):
        found.append(f"num_aux_hidden_states is {counted}, but there are {len(cfg.aux_layer_ids)} aux_layer_ids")
    if counted is None and len(cfg.aux_layer_ids) != 3:
        found.append(
            f"{len(cfg.aux_layer_ids)} aux_layer_ids without num_aux_hidden_states: vLLM takes fc for 3 of them"
        )
    if "target_hidden_size" in raw and raw["target_hidden_size"] is None and not as_speculators:
        found.append("target_hidden_size is null: vLLM fails on it; leave it out or give the number")
    if not as_speculators:
        architectures = values.get("architectures")
        if architectures is None or architectures[0] not in KNOWN_ARCHITECTURES:
            found.append(f"architectures {architectures}: vLLM knows a drafter as {KNOWN_ARCHITECTURES[0]}")
        theta, nested = values.get("rope_theta"), (values.get("rope_parameters") or {}).get("rope_theta")
        if theta is not None and nested is not None and theta != nested:
            found.append(f"rope_theta is {theta}, in rope_parameters {nested}: readers differ in which they take")
        given = list(mask_ids(values))
        if cfg.parallel and version < (0, 28) and not {"pard_token", "ptd_token_id"} & set(given):
            names = " and ".join(given)
            found.append(f"mask id only as {names}: vLLM {_dotted(version)} reads pard_token or ptd_token_id")
    else:
        if cfg.parallel and version < (0, 22):
            found.append(f"a speculators folder of kind peagle needs vLLM 0.22 or newer, not {_dotted(version)}")
        if "norm_before_residual" not in raw:
            found.append("norm_before_residual is absent: vLLM and speculators take different defaults")
        shape = raw.get("transformer_layer_config") or {}
        for name in ("fc_norm", "norm_output"):
            if raw.get(name) and not shape.get(name) and cfg.parallel:
                found.append(f"{name} stands outside transformer_layer_config: vLLM drops it for a peagle drafter")
    return found


def _too_new(cfg: DrafterConfig, version: Version) -> list[str]:
    """Features that the named version of vLLM does not have; it ignores the field and accepts less."""
    needs = [
        (cfg.parallel, "parallel drafting", (0, 16)),
        (cfg.norm_before_fc, "norm_before_fc", (0, 18)),
        (cfg.fc_norm, "fc_norm", (0, 22)),
        (cfg.norm_output, "norm_output", (0, 22)),
        (len(cfg.aux_layer_ids) != 3, "a number of aux_layer_ids other than 3", (0, 22)),
        (cfg.layer.hidden_size != cfg.target_hidden_size, "a width other than the target's", (0, 22)),
    ]
    return [
        f"{what} needs vLLM {_dotted(least)} or newer, not {_dotted(version)}"
        for used, what, least in needs
        if used and version < least
    ]


def _against_target(cfg: DrafterConfig, target: DecoderConfig, folder: Path) -> list[str]:
    found = []
    for name in read_config_json(folder).get("architectures") or []:
        if name in NO_AUX_HIDDEN_STATES:
            found.append(f"vLLM gives no hidden states of a {name} to a drafter: serve it with peagle serve")
    if cfg.max_positions < target.max_positions:
        found.append(
            f"max_position_embeddings is {cfg.max_positions}, the target's {target.max_positions}: "
            "vLLM stops drafting there without a word"
        )
    if cfg.mask_token_id is not None and cfg.mask_token_id < target.vocab_size:
        reason = _can_be_emitted(cfg.mask_token_id, folder)
        if reason:
            found.append(f"mask id {cfg.mask_token_id} {reason}: pick a reserved id that no text holds")
    return found


def _can_be_emitted(mask_id: int, folder: Path) -> str | None:
    """Why the id may turn up in a text, or None for a padding row or an unused special token."""
    if mask_id in eos_ids(folder):
        return "ends a text"
    tokenizer = _tokenizer(folder)
    if tokenizer is None or mask_id >= len(tokenizer):
        return None
    token = tokenizer.convert_ids_to_tokens(mask_id)
    if mask_id not in tokenizer.all_special_ids and token not in _special_tokens(tokenizer):
        return f"is an ordinary token of the tokenizer ({token!r})"
    if mask_id in (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id):
        return f"is a token every text may hold ({token!r})"
    if token in (tokenizer.chat_template or ""):
        return f"is part of the chat template ({token!r})"
    return None


def _tokenizer(folder: Path | None) -> Any:
    """The target's tokenizer; None where there is no target, or one that is run on token ids alone."""
    return load_tokenizer(folder) if folder is not None and has_tokenizer(folder) else None


def _special_tokens(tokenizer: Any) -> set[str]:
    return {str(t) for t in tokenizer.added_tokens_decoder.values() if t.special}


def _dotted(version: Version) -> str:
    return ".".join(map(str, version))
