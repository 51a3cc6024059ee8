"""Checks a deployment against a vLLM version before anything is written or created.

The rules come from vLLM's sources, 0.16 to 0.32. Errors stop the deployment, warnings do not; each says what to do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from peagle.checkpoints.target import read_target_config
from peagle.checkpoints.validate import (
    MISSING_AUX_LAYER_IDS,
    SHORT_MAX_POSITIONS,
    VllmVersion,
    inspect_drafter,
    parse_version,
)
from peagle.config import VLLM_VERSION, DrafterConfig
from peagle.deploy.models import DeployedPair, TargetFacts
from peagle.errors import UserError

MODEL_RUNNER_V2 = "VLLM_USE_V2_MODEL_RUNNER"
# vLLM puts the KV caches of layers into groups of equal size. If the counts of layer types differ by less than this
# factor, the larger count is the group size; else the smaller one, and the other type is split over several groups.
OLD_GROUP_FACTOR, GROUP_FACTOR, GROUP_FACTOR_SINCE = 1.25, 1.5, (0, 18)
SINGLE_GROUP_FLAG = "--disable-hybrid-kv-cache-manager"
RESERVED_FLAGS = {
    "--speculative-config": "use -k and --drafter",
    "--tensor-parallel-size": "use --tensor-parallel",
    "-tp": "use --tensor-parallel",
    "--tp": "use --tensor-parallel",
    "--model": "use TARGET",
    "--host": "use --host",
    "--port": "use --port",
    "--api-key": "set VLLM_API_KEY in the environment, so that no file has the key",
}
SECRET_NAME = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL)S?$", re.IGNORECASE)
HIGH_CONCURRENCY, HIGH_CONCURRENCY_K = 64, 3  # at 64 requests, larger K was measured to be slower


@dataclass(frozen=True)
class DeployFinding:
    level: Literal["error", "warning"]
    text: str


def check_deployment(
    pair: DeployedPair,
    vllm_version: str,
    *,
    tensor_parallel: int = 1,
    max_model_len: int | None = None,
    max_num_seqs: int | None = None,
    env: Mapping[str, str],
    extra: Sequence[str] = (),
) -> list[DeployFinding]:
    version = parse_version(vllm_version)
    found = _check_unread_models(pair)
    found += _check_drafter(pair, vllm_version)
    found += _check_max_model_len(pair, max_model_len)
    if version > parse_version(VLLM_VERSION):
        found.append(_warning(f"--vllm-version {vllm_version}: newer than {VLLM_VERSION}, the newest known version"))
    if pair.parallel and env.get(MODEL_RUNNER_V2, "0").strip().lower() not in ("0", "false", ""):
        setting = f"{MODEL_RUNNER_V2}={env[MODEL_RUNNER_V2]}"
        found.append(_error(f"{setting}: Model Runner V2 does not support parallel drafting; omit it, or set it to 0"))
    if pair.target_facts is not None:
        if pair.drafter_config is not None:
            found += _check_cache_groups(pair.target_facts, pair.drafter_config, version, extra)
        found += _check_tensor_parallel(pair.target_facts, pair.drafter_config, tensor_parallel)
    found += _check_num_speculative_tokens(pair, max_num_seqs)
    flags = [word.partition("=")[0] for word in extra]
    found += [_error(f"{flag} after --: {RESERVED_FLAGS[flag]}") for flag in flags if flag in RESERVED_FLAGS]
    secrets = [name for name in env if SECRET_NAME.search(name)]
    found += [_error(f"--env {name}: secrets must not be written to files") for name in secrets]
    return found


def _error(text: str) -> DeployFinding:
    return DeployFinding("error", text)


def _warning(text: str) -> DeployFinding:
    return DeployFinding("warning", text)


def _check_unread_models(pair: DeployedPair) -> list[DeployFinding]:
    unread = [model.name for model in (pair.target, pair.drafter) if model.folder is None]
    found = [_warning(f"{name}: on the hub and not checked (--unchecked)") for name in unread]
    if pair.drafter.folder is None:
        found.append(_warning(f"{pair.drafter.name}: assumed to be a P-EAGLE drafter, so parallel_drafting is set"))
    return found


def _check_drafter(pair: DeployedPair, vllm_version: str) -> list[DeployFinding]:
    """Runs the drafter validator; with a target that it cannot read, only the basic sizes are compared."""
    folder = pair.drafter.folder
    if folder is None:
        return []
    target, found = pair.target.folder, []
    if target is not None:
        try:
            read_target_config(target)
        except UserError:
            target, found = None, _check_sizes(pair)
    num_tokens = pair.num_speculative_tokens
    report = inspect_drafter(folder, pair.drafter.name, target, pair.target.name, vllm_version, num_tokens)
    for text in report.findings:
        if text.startswith(SHORT_MAX_POSITIONS):
            continue  # _check_max_model_len reports it
        level = _warning if text.startswith(MISSING_AUX_LAYER_IDS) else _error
        found.append(level(f"{pair.drafter.name}: {text}"))
    return found


def _check_sizes(pair: DeployedPair) -> list[DeployFinding]:
    facts, drafter, found = pair.target_facts, pair.drafter_config, []
    if facts is None or drafter is None:
        return []
    if drafter.target_hidden_size != facts.hidden_size:
        found.append(f"target_hidden_size is {drafter.target_hidden_size}, but the target's is {facts.hidden_size}")
    if drafter.vocab_size != facts.vocab_size:
        found.append(f"vocab_size is {drafter.vocab_size}, but the target's is {facts.vocab_size}")
    last = max(drafter.aux_layer_ids)
    if last > facts.num_layers:
        found.append(f"aux_layer_ids contains layer {last}, but the target has {facts.num_layers} layers")
    return [_error(f"{pair.drafter.name}: {text}") for text in found]


def _check_max_model_len(pair: DeployedPair, max_model_len: int | None) -> list[DeployFinding]:
    drafter, facts = pair.drafter_config, pair.target_facts
    if max_model_len is None and facts is not None:
        max_model_len = facts.max_positions
    if drafter is None or max_model_len is None or max_model_len <= drafter.max_positions:
        return []
    return [
        _warning(
            f"sequences may have {max_model_len} tokens, but the drafter supports {drafter.max_positions}: vLLM does "
            f"not draft beyond; --max-model-len {drafter.max_positions} limits sequences to that"
        )
    ]


def _check_cache_groups(
    facts: TargetFacts, drafter: DrafterConfig, version: VllmVersion, extra: Sequence[str]
) -> list[DeployFinding]:
    """In a target with sliding and full layers, all KV caches of the drafter must be in one group."""
    if not splits_drafter_cache(facts, drafter, version) or SINGLE_GROUP_FLAG in extra:
        return []
    since = ".".join(map(str, GROUP_FACTOR_SINCE))
    fixed = not splits_drafter_cache(facts, drafter, GROUP_FACTOR_SINCE)
    return [
        _error(
            f"{facts.architecture} has {facts.num_sliding_layers} sliding and "
            f"{facts.num_layers - facts.num_sliding_layers} full layers: vLLM {'.'.join(map(str, version))} splits the "
            f"drafter's {drafter.num_layers} over several cache groups and stops at validate_same_kv_cache_group; "
            + (f"use vLLM {since} or newer" if fixed else f"add -- {SINGLE_GROUP_FLAG}")
        )
    ]


def splits_drafter_cache(facts: TargetFacts, drafter: DrafterConfig, version: VllmVersion) -> bool:
    """Whether vLLM splits the drafter's KV caches over several groups.

    Example: gpt-oss-20b has 12 sliding and 12 full layers; 4 drafter layers make 16 full ones. 16 < 12 * 1.5, so the
    group size is 16 and all full layers fit one group. With the old factor, 16 > 12 * 1.25: the group size was 12, and
    the 16 full layers were split over two groups.
    """
    num_full = facts.num_layers - facts.num_sliding_layers
    if not facts.num_sliding_layers or not num_full or drafter.num_layers < 2 or drafter.windows:
        return False
    if (facts.num_kv_heads, facts.head_dim) == (drafter.layer.num_kv_heads, drafter.layer.head_dim):
        num_with_drafter = num_full + drafter.num_layers
        counts = [facts.num_sliding_layers, num_with_drafter]
    else:
        num_with_drafter = drafter.num_layers
        counts = [facts.num_sliding_layers, num_full, num_with_drafter]
    factor = GROUP_FACTOR if version >= GROUP_FACTOR_SINCE else OLD_GROUP_FACTOR
    group_size = max(counts) if max(counts) < min(counts) * factor else min(counts)
    return num_with_drafter > group_size


def _check_tensor_parallel(
    facts: TargetFacts, drafter: DrafterConfig | None, tensor_parallel: int
) -> list[DeployFinding]:
    """vLLM shards the drafter like the target."""
    models = [("target", facts.num_heads, facts.num_kv_heads)]
    if drafter is not None:
        models.append(("drafter", drafter.layer.num_heads, drafter.layer.num_kv_heads))
    return [
        _error(f"--tensor-parallel {tensor_parallel}: cannot split the {name}'s {heads} heads and {kv_heads} KV heads")
        for name, heads, kv_heads in models
        if heads % tensor_parallel or (kv_heads % tensor_parallel and tensor_parallel % kv_heads)
    ]


def _check_num_speculative_tokens(pair: DeployedPair, max_num_seqs: int | None) -> list[DeployFinding]:
    found = []
    k, trained = pair.num_speculative_tokens, pair.trained_num_speculative_tokens
    if trained is not None and k > trained:
        found.append(_warning(f"-k {k}: trained for {trained} draft tokens; later ones are rarely accepted"))
    if max_num_seqs is not None and max_num_seqs >= HIGH_CONCURRENCY and k > HIGH_CONCURRENCY_K:
        found.append(
            _warning(
                f"-k {k} with {max_num_seqs} concurrent requests: measured slower than -k {HIGH_CONCURRENCY_K} at "
                f"{HIGH_CONCURRENCY}; measure with `peagle tune`"
            )
        )
    return found
