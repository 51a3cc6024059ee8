"""The engine against stock vLLM on the CPU: a whole batch at once, the same tokens, the same counts."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from pairs import RECIPES, drafter_folder, target_folder

from peagle.config import SamplingParams
from peagle.engine.llm import LLM

pytestmark = pytest.mark.vllm


def neighbour() -> ModuleType:
    """test_parity.py: in importlib mode test files cannot import each other by name."""
    name = "parity_helpers"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("test_parity.py"))
        assert spec is not None and spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


@pytest.mark.parametrize("name", ["p-eagle-4-reduced", "p-eagle-1-wide", "eagle3-4-reduced"])
def test_same_tokens_and_counts(name: str) -> None:
    parity, k = neighbour(), 3
    with parity.engine(
        parity.speculative_config(drafter_folder(name), k, RECIPES[name].cfg.parallel), target_folder()
    ) as llm:
        theirs = parity.run_vllm(llm, parity.PROMPTS, k, max_tokens=40)
        stop = theirs.tokens[0][11]
        stopped = parity.run_vllm(llm, parity.PROMPTS, k, max_tokens=40, stop_token_ids=[stop])
    ours = LLM(
        target_folder(),
        drafter_folder(name),
        k,
        device="cpu",
        dtype="float32",
        max_model_len=parity.MAX_LENGTH,
        max_num_seqs=4,  # less than there are prompts, so some are read while others decode
        prefill_chunk_tokens=16,
        tokenizer=False,
    )
    for params, want in (
        (SamplingParams(max_tokens=40), theirs),
        (SamplingParams(max_tokens=40, stop_token_ids=[stop]), stopped),
    ):
        outputs = [o.outputs[0] for o in ours.generate(parity.PROMPTS, params)]
        assert [o.token_ids for o in outputs] == want.tokens
        assert sum(o.num_drafts for o in outputs) == want.drafts
        assert [sum(c) for c in zip(*(o.num_accepted_tokens_per_pos for o in outputs), strict=True)] == want.accepted
    assert 0 < theirs.accepted[0] < theirs.drafts, "an untrained drafter would prove nothing"
