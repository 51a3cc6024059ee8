"""What would go wrong on a given vLLM, found before anything is written or created.

Knows how released versions behave (their sources, 0.16 to 0.32) and asks the validator about the drafter's folder.
Errors stop it, warnings do not; each says what to do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from peagle.checkpoints.target import read_target_config
from peagle.checkpoints.validate import VllmVersion, inspect_drafter, parse_version
from peagle.config import VLLM_VERSION, DrafterConfig
from peagle.deploy.models import Pair, TargetFacts
from peagle.errors import UserError

RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
# vLLM keeps the caches of layers in groups of equal size. Where the kinds of layers differ in number by less than
# this factor, the larger number is the size; else the smaller, and the other kind is spread over several groups.
GROUP_FACTOR_BEFORE, GROUP_FACTOR, GROUPS_FIXED = 1.25, 1.5, (0, 18)
ONE_GROUP = "--disable-hybrid-kv-cache-manager"
OURS = {
    "--speculative-config": "-k and --drafter say it",
    "--tensor-parallel-size": "use --tensor-parallel",
    "-tp": "use --tensor-parallel",
    "--tp": "use --tensor-parallel",
    "--model": "TARGET says it",
    "--host": "use --host",
    "--port": "use --port",
    "--api-key": "put it into the environment as VLLM_API_KEY, which is in no file",
}
SECRET = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL)S?$", re.IGNORECASE)
LOADED = 64  # requests at once from which many drafts were measured to cost more than they bring
FEW = 3
# Findings of the validator that leave a deployment working
BEARABLE = ("no eagle_aux_hidden_state_layer_ids", "max_position_embeddings is")


@dataclass(frozen=True)
class Hazard:
    level: Literal["error", "warning"]
    text: str


def check(
    pair: Pair,
    vllm_version: str,
    *,
    tensor_parallel: int = 1,
    max_model_len: int | None = None,
    max_num_seqs: int | None = None,
    env: Mapping[str, str],
    extra: Sequence[str] = (),
) -> list[Hazard]:
    version = parse_version(vllm_version)
    found = _unread(pair)
    found += _checkpoint(pair, vllm_version, max_model_len)
    found += _version(version)
    found += _runner(pair.parallel, env)
    if pair.target_facts is not None:
        facts, drafter = pair.target_facts, pair.drafter_config
        if drafter is not None:
            found += _groups(facts, drafter, version, extra)
        found += _shards(facts, drafter, tensor_parallel)
    found += _draft_tokens(pair, max_num_seqs)
    found += _words(extra)
    found += [_error(f"--env {name}: a secret has no place in a file") for name in env if SECRET.search(name)]
    return found


def _error(text: str) -> Hazard:
    return Hazard("error", text)


def _warning(text: str) -> Hazard:
    return Hazard("warning", text)


def _unread(pair: Pair) -> list[Hazard]:
    unread = [model.name for model in (pair.target, pair.drafter) if model.folder is None]
    found = [_warning(f"{name}: on the hub and not looked at (--unchecked)") for name in unread]
    if pair.drafter.folder is None:
        found.append(_warning(f"{pair.drafter.name}: taken for a P-EAGLE drafter, so parallel_drafting is set"))
    return found


def _checkpoint(pair: Pair, vllm_version: str, max_model_len: int | None) -> list[Hazard]:
    """The validator's findings, with the target's part where the target is one that it can read."""
    folder = pair.drafter.folder
    if folder is None:
        return []
    target, found = pair.target.folder, []
    if target is not None:
        try:
            read_target_config(target)
        except UserError:
            target, found = None, _fit(pair)
    report = inspect_drafter(folder, pair.drafter.name, target, pair.target.name, vllm_version, pair.draft_tokens)
    for text in report.findings:
        if not text.startswith(BEARABLE):
            found.append(_error(f"{pair.drafter.name}: {text}"))
        elif not text.startswith(BEARABLE[1]):
            found.append(_warning(f"{pair.drafter.name}: {text}"))
    return found + _reach(pair, max_model_len)


def _reach(pair: Pair, max_model_len: int | None) -> list[Hazard]:
    drafter, facts = pair.drafter_config, pair.target_facts
    longest = max_model_len if max_model_len is not None else facts.positions if facts is not None else None
    if drafter is None or longest is None or longest <= drafter.max_positions:
        return []
    return [
        _warning(
            f"texts may have {longest} tokens, the drafter reaches {drafter.max_positions}: nothing is drafted beyond, "
            f"without a word; --max-model-len {drafter.max_positions} keeps texts below it"
        )
    ]


def _version(version: VllmVersion) -> list[Hazard]:
    if version <= parse_version(VLLM_VERSION):
        return []
    asked = ".".join(map(str, version))
    return [_warning(f"--vllm-version {asked}: newer than {VLLM_VERSION}, the newest that is known here")]


def _runner(parallel: bool, env: Mapping[str, str]) -> list[Hazard]:
    if not parallel or env.get(RUNNER, "0").strip().lower() in ("0", "false", ""):
        return []
    return [
        _error(f"{RUNNER}={env[RUNNER]}: Model Runner V2 does not draft in parallel; leave it away, or set it to 0")
    ]


def _groups(facts: TargetFacts, drafter: DrafterConfig, version: VllmVersion, extra: Sequence[str]) -> list[Hazard]:
    """A target with sliding and full layers: all of the drafter's caches must fall into one group."""
    if not splits_drafter_cache(facts, drafter, version) or ONE_GROUP in extra:
        return []
    fixed = ".".join(map(str, GROUPS_FIXED))
    remedy = (
        f"use vLLM {fixed} or newer"
        if not splits_drafter_cache(facts, drafter, GROUPS_FIXED)
        else f"add -- {ONE_GROUP}"
    )
    return [
        _error(
            f"{facts.architecture} has {facts.sliding} sliding and {facts.layers - facts.sliding} full layers: vLLM "
            f"{'.'.join(map(str, version))} spreads the drafter's {drafter.num_layers} over several cache groups and "
            f"stops at validate_same_kv_cache_group; {remedy}"
        )
    ]


def splits_drafter_cache(facts: TargetFacts, drafter: DrafterConfig, version: VllmVersion) -> bool:
    """vLLM's grouping: gpt-oss-20b has 12 + 12 layers, and 4 of a drafter make 16 full ones. 16 < 12 * 1.5, so groups
    have 16 and all full layers fit one; with 1.25 groups had 12, and 16 full layers were dealt out to two."""
    full = facts.layers - facts.sliding
    if not facts.sliding or not full or drafter.num_layers < 2 or drafter.windows:
        return False  # one kind of layer; or one drafter layer; or kinds of its own
    if (facts.kv_heads, facts.head_dim) != (drafter.layer.num_kv_heads, drafter.layer.head_dim):
        kinds = [facts.sliding, full, drafter.num_layers]
        mine = drafter.num_layers
    else:
        kinds = [facts.sliding, full + drafter.num_layers]
        mine = full + drafter.num_layers
    factor = GROUP_FACTOR if version >= GROUPS_FIXED else GROUP_FACTOR_BEFORE
    size = max(kinds) if max(kinds) < min(kinds) * factor else min(kinds)
    return mine > size


def _fit(pair: Pair) -> list[Hazard]:
    """What the validator would say, could it read the target."""
    facts, drafter, found = pair.target_facts, pair.drafter_config, []
    if facts is None or drafter is None:
        return []
    if drafter.target_hidden_size != facts.width:
        found.append(f"made for a target of width {drafter.target_hidden_size}, this one is {facts.width} wide")
    if drafter.vocab_size != facts.vocab:
        found.append(f"made for a vocabulary of {drafter.vocab_size}, this target's has {facts.vocab}")
    if max(drafter.aux_layer_ids) > facts.layers:
        found.append(
            f"aux_layer_ids contains layer {max(drafter.aux_layer_ids)}, but the target has {facts.layers} layers"
        )
    return [_error(f"{pair.drafter.name}: {text}") for text in found]


def _shards(facts: TargetFacts, drafter: DrafterConfig | None, parallel: int) -> list[Hazard]:
    """The drafter is cut like the target."""
    counts = [("the target", facts.heads, facts.kv_heads)]
    if drafter is not None:
        counts.append(("the drafter", drafter.layer.num_heads, drafter.layer.num_kv_heads))
    found = []
    for whose, heads, kv_heads in counts:
        if heads % parallel or (kv_heads % parallel and parallel % kv_heads):
            found.append(
                _error(
                    f"--tensor-parallel {parallel}: {whose} has {heads} heads over {kv_heads}, which it cannot split"
                )
            )
    return found


def _draft_tokens(pair: Pair, max_num_seqs: int | None) -> list[Hazard]:
    found = []
    k, trained = pair.draft_tokens, pair.trained_tokens
    if trained is not None and k > trained:
        found.append(_warning(f"-k {k}: trained for {trained} drafts a round; those beyond are seldom right"))
    if max_num_seqs is not None and max_num_seqs >= LOADED and k > FEW:
        found.append(
            _warning(
                f"-k {k} with {max_num_seqs} requests at once: measured slower than -k {FEW} at {LOADED}; `peagle tune`"
            )
        )
    return found


def _words(extra: Sequence[str]) -> list[Hazard]:
    given = [word.partition("=")[0] for word in extra]
    return [_error(f"{flag} behind --: {OURS[flag]}") for flag in given if flag in OURS]
