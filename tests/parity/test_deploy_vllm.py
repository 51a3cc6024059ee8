"""What `peagle deploy` says about vLLM, asked of vLLM itself: its parser takes the command, and its own grouping of
caches spreads a drafter's layers exactly where the check says so."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from pairs import drafter_folder, target_folder

from peagle.checkpoints.families import FAMILIES
from peagle.checkpoints.validate import NO_AUX_HIDDEN_STATES
from peagle.config import DecoderConfig, DeploySettings, DrafterConfig, LayerConfig, RopeConfig
from peagle.deploy.checks import splits_drafter_cache
from peagle.deploy.files import VllmService
from peagle.deploy.models import resolve_pair

pytestmark = pytest.mark.vllm


def test_vllms_parser_takes_the_command() -> None:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    settings = DeploySettings(
        tensor_parallel=2,
        max_model_len=128,
        max_num_seqs=8,
        gpu_memory_utilization=0.8,
        extra=("--kv-cache-dtype", "fp8"),
    )
    pair = resolve_pair(str(target_folder()), str(drafter_folder("p-eagle-4")), 5, unchecked=False)
    words = VllmService(settings, pair).arguments()
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    assert Path(parsed.model_tag) == target_folder() and parsed.served_model_name == ["target"]
    assert (parsed.tensor_parallel_size, parsed.max_model_len, parsed.max_num_seqs) == (2, 128, 8)
    assert (parsed.gpu_memory_utilization, parsed.port, parsed.kv_cache_dtype) == (0.8, 8000, "fp8")
    given = parsed.speculative_config
    assert (json.loads(given) if isinstance(given, str) else given) == {
        "method": "eagle3",
        "model": str(drafter_folder("p-eagle-4")),
        "num_speculative_tokens": 5,
        "parallel_drafting": True,
    }
    import vllm.envs

    assert all(name in vllm.envs.environment_variables for name in VllmService(settings, pair).environment)


def groups_of_the_drafter(sliding: int, full: int, drafts: int, alike: bool) -> int:
    """Over how many cache groups vLLM spreads the drafter's layers, whose heads may be half as many."""
    import torch
    from vllm.v1.core.kv_cache_utils import _get_kv_cache_groups_uniform_page_size
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    shape: dict[str, Any] = {"block_size": 16, "num_kv_heads": 8, "head_size": 64, "dtype": torch.bfloat16}
    other = shape if alike else {**shape, "block_size": 32, "num_kv_heads": 4}
    specs: dict[str, Any] = {}
    for i in range(max(sliding, full)):  # in turn, as gpt-oss has them
        if i < sliding:
            specs[f"sliding.{i}"] = SlidingWindowSpec(**shape, sliding_window=128)
        if i < full:
            specs[f"full.{i}"] = FullAttentionSpec(**shape)
    specs |= {f"draft.{i}": FullAttentionSpec(**other) for i in range(drafts)}
    groups = _get_kv_cache_groups_uniform_page_size(specs)
    return sum(any(name.startswith("draft.") for name in group.layer_names) for group in groups)


def test_caches_are_grouped_as_the_check_says() -> None:
    seen = set()
    for sliding, full, drafts in itertools.product((1, 3, 6, 12, 15, 18, 40), (1, 3, 6, 12, 18), (1, 2, 4)):
        for alike in (True, False):
            windows = (128,) * sliding + (None,) * full
            target = DecoderConfig(
                "x", 100, len(windows), LayerConfig(64, 64, 64, 8, 64), RopeConfig(), 4096, False, windows
            )
            layer = LayerConfig(64, 64, num_heads=64, num_kv_heads=8 if alike else 4, head_dim=64)
            drafter = DrafterConfig(100, 100, drafts, layer, RopeConfig(), 4096, 64, (0, 1, 2), mask_token_id=1)
            spread = groups_of_the_drafter(sliding, full, drafts, alike) > 1
            assert splits_drafter_cache(target, drafter, (0, 32)) == spread, (sliding, full, drafts, alike)
            seen.add((spread, alike))
    assert len(seen) == 4, "both answers, for both kinds"


def test_the_targets_that_give_no_hidden_states() -> None:
    """Of those that our engine knows, exactly the ones named are without the interface that drafters need there."""
    from vllm.model_executor.models.interfaces import supports_eagle3
    from vllm.model_executor.models.registry import ModelRegistry

    # those that see pictures need more than is installed here to be looked at
    known = [name for name in FAMILIES if name.endswith("ForCausalLM")]
    without = {name for name in known if not supports_eagle3(ModelRegistry._try_load_model_cls(name))}
    assert without == {name for name in NO_AUX_HIDDEN_STATES if name in known} != set()
