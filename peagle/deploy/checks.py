"""Checks a deployment against a vLLM version before anything is written or created.

The rules come from vLLM's sources, 0.16 to 0.32. Errors stop the deployment, warnings do not; each says what to do.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from peagle.checkpoints.validate import (
    MISSING_AUX_LAYER_IDS,
    SHORT_MAX_POSITIONS,
    VllmVersion,
    inspect_drafter,
    parse_version,
)
from peagle.config import VLLM_VERSION, DecoderConfig, DeploySettings, DrafterConfig, SagemakerSettings
from peagle.deploy.models import DeployedPair

MODEL_RUNNER_V2 = "VLLM_USE_V2_MODEL_RUNNER"
# vLLM puts the KV caches of layers into groups of equal size. If the counts of layer types differ by less than this
# factor, the larger count is the group size; else the smaller one, and the other type is split over several groups.
OLD_GROUP_FACTOR, GROUP_FACTOR, GROUP_FACTOR_SINCE = 1.25, 1.5, (0, 18)
SINGLE_GROUP_FLAG = "--disable-hybrid-kv-cache-manager"
RESERVED_FLAGS = {
    "--speculative-config": "use -k and --drafter",
    **dict.fromkeys(("--tensor-parallel-size", "-tp", "--tp"), "use --tensor-parallel"),
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


error, warning = partial(DeployFinding, "error"), partial(DeployFinding, "warning")


def check_deployment(
    pair: DeployedPair, settings: DeploySettings | SagemakerSettings, tensor_parallel: int, extra: Sequence[str] = ()
) -> list[DeployFinding]:
    version, env = parse_version(settings.vllm_version), dict(settings.env)
    found = [*_check_models(pair, settings.vllm_version), *_check_lengths(pair, settings)]
    if version > parse_version(VLLM_VERSION):
        text = f"--vllm-version {settings.vllm_version}: newer than {VLLM_VERSION}, the newest known version"
        found.append(warning(text))
    if pair.parallel and env.get(MODEL_RUNNER_V2, "0").strip().lower() not in ("0", "false", ""):
        setting = f"{MODEL_RUNNER_V2}={env[MODEL_RUNNER_V2]}"
        found.append(error(f"{setting}: Model Runner V2 does not support parallel drafting; omit it, or set it to 0"))
    if pair.target_config is not None:
        if pair.drafter_config is not None and SINGLE_GROUP_FLAG not in extra:
            found += _check_cache_groups(pair.target_config, pair.drafter_config, version)
        for name, config in (("target", pair.target_config), ("drafter", pair.drafter_config)):
            if config is not None:  # vLLM shards the drafter like the target
                heads, kv_heads = config.layer.num_heads, config.layer.num_kv_heads
                if heads % tensor_parallel or (kv_heads % tensor_parallel and tensor_parallel % kv_heads):
                    split = f"cannot split the {name}'s {heads} heads and {kv_heads} KV heads"
                    found.append(error(f"--tensor-parallel {tensor_parallel}: {split}"))
    flags = [word.partition("=")[0] for word in extra]
    found += [error(f"{flag} after --: {RESERVED_FLAGS[flag]}") for flag in flags if flag in RESERVED_FLAGS]
    secrets = [name for name in env if SECRET_NAME.search(name)]
    found += [error(f"--env {name}: secrets must not be written to files") for name in secrets]
    return found


def _check_models(pair: DeployedPair, vllm_version: str) -> Iterator[DeployFinding]:
    """Names what is not checked, and runs the drafter validator."""
    for model in (pair.target, pair.drafter):
        if model.folder is None:
            yield warning(f"{model.name}: on the hub and not checked (--unchecked)")
    folder, name = pair.drafter.folder, pair.drafter.name
    if folder is None:
        yield warning(f"{name}: assumed to be a P-EAGLE drafter, so parallel_drafting is set")
    if pair.target.folder is not None and pair.target_config is None:
        yield warning(f"{pair.target.name}: peagle does not know this architecture; its sizes are not checked")
    if folder is None:
        return
    target = pair.target.folder if pair.target_config is not None else None
    report = inspect_drafter(folder, name, target, pair.target.name, vllm_version, pair.num_speculative_tokens)
    for text in report.findings:
        if not text.startswith(SHORT_MAX_POSITIONS):  # reported by _check_lengths
            yield (warning if text.startswith(MISSING_AUX_LAYER_IDS) else error)(f"{name}: {text}")


def _check_lengths(pair: DeployedPair, settings: DeploySettings | SagemakerSettings) -> Iterator[DeployFinding]:
    """Checks the lengths of sequences and of drafts."""
    drafter, target, max_model_len = pair.drafter_config, pair.target_config, settings.max_model_len
    if max_model_len is None and target is not None:
        max_model_len = target.max_positions
    if drafter is not None and max_model_len is not None and max_model_len > drafter.max_positions:
        yield warning(
            f"sequences may have {max_model_len} tokens, but the drafter supports {drafter.max_positions}: vLLM does "
            f"not draft beyond; --max-model-len {drafter.max_positions} limits sequences to that"
        )
    k, trained, max_num_seqs = pair.num_speculative_tokens, pair.trained_num_speculative_tokens, settings.max_num_seqs
    if trained is not None and k > trained:
        yield warning(f"-k {k}: trained for {trained} draft tokens; later ones are rarely accepted")
    if max_num_seqs is not None and max_num_seqs >= HIGH_CONCURRENCY and k > HIGH_CONCURRENCY_K:
        slower = f"measured slower than -k {HIGH_CONCURRENCY_K} at {HIGH_CONCURRENCY}"
        yield warning(f"-k {k} with {max_num_seqs} concurrent requests: {slower}; measure with `peagle tune`")


def _check_cache_groups(target: DecoderConfig, drafter: DrafterConfig, version: VllmVersion) -> Iterator[DeployFinding]:
    """In a target with sliding and full layers, all KV caches of the drafter must be in one group."""
    if splits_drafter_cache(target, drafter, version):
        since = ".".join(map(str, GROUP_FACTOR_SINCE))
        fixed = not splits_drafter_cache(target, drafter, GROUP_FACTOR_SINCE)
        yield error(
            f"{target.family} has sliding and full layers: vLLM {'.'.join(map(str, version))} splits the drafter's "
            f"{drafter.num_layers} layers over several cache groups and stops at validate_same_kv_cache_group; "
            + (f"use vLLM {since} or newer" if fixed else f"add -- {SINGLE_GROUP_FLAG}")
        )


def splits_drafter_cache(target: DecoderConfig, drafter: DrafterConfig, version: VllmVersion) -> bool:
    """Whether vLLM splits the drafter's KV caches over several groups.

    Example: gpt-oss-20b has 12 sliding and 12 full layers; 4 drafter layers make 16 full ones. 16 < 12 * 1.5, so the
    group size is 16 and all full layers fit one group. With the old factor, 16 > 12 * 1.25: the group size was 12, and
    the 16 full layers were split over two groups.
    """
    num_sliding = sum(isinstance(window, int) for window in target.windows)
    num_full = target.num_layers - num_sliding
    if not num_sliding or not num_full or drafter.num_layers < 2 or drafter.windows:
        return False
    counts = [num_sliding, num_full, drafter.num_layers]
    if (target.layer.num_kv_heads, target.layer.head_dim) == (drafter.layer.num_kv_heads, drafter.layer.head_dim):
        counts = [num_sliding, num_full + drafter.num_layers]
    factor = GROUP_FACTOR if version >= GROUP_FACTOR_SINCE else OLD_GROUP_FACTOR
    group_size = max(counts) if max(counts) < min(counts) * factor else min(counts)
    return counts[-1] > group_size
