"""The reference against stock vLLM on the CPU: the same folders, the same tokens, the same counts.

Greedy and fp32, since vLLM's sampling with speculation does not work on the CPU. Counts are compared draft
position by draft position: that a folder loads proves nothing, a wrong tap or mask id only lowers them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pairs import EOS_ID, RECIPES, drafter_folder, load_pair, prompts, target_folder

from peagle.config import SamplingParams
from peagle.reference import generate

pytestmark = pytest.mark.vllm
MAX_LENGTH = 128
PROMPTS = prompts(6)


@dataclass
class Counts:
    tokens: list[list[int]]
    drafts: int
    accepted: list[int]


@contextmanager
def engine(speculative: dict[str, Any] | None, target: Path | None = None) -> Iterator[Any]:
    from vllm import LLM

    llm = LLM(
        str(target or target_folder()),
        dtype="float32",
        enforce_eager=True,
        max_model_len=MAX_LENGTH,
        max_num_seqs=8,
        skip_tokenizer_init=True,
        disable_log_stats=False,
        speculative_config=speculative,
        seed=0,
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def run_vllm(llm: Any, prompts: list[list[int]], k: int, **sampling: Any) -> Counts:
    from vllm import SamplingParams as VllmParams

    def totals() -> dict[str, Any]:
        return {m.name: getattr(m, "value", None) or getattr(m, "values", None) for m in llm.get_metrics()}

    before = totals()
    params = VllmParams(temperature=0.0, detokenize=False, **sampling)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    after = totals()
    was = before.get("vllm:spec_decode_num_accepted_tokens_per_pos") or [0] * k
    now = after.get("vllm:spec_decode_num_accepted_tokens_per_pos") or [0] * k
    drafts = (after.get("vllm:spec_decode_num_drafts") or 0) - (before.get("vllm:spec_decode_num_drafts") or 0)
    return Counts(
        tokens=[list(o.outputs[0].token_ids) for o in outputs],
        drafts=drafts,
        accepted=[b - a for a, b in zip(was, now, strict=True)],
    )


def run_reference(name: str, prompts: list[list[int]], k: int, params: SamplingParams) -> Counts:
    target, drafter = load_pair(name)
    eos = frozenset({EOS_ID})
    runs = [generate(target, p, params, eos, drafter, k, max_length=MAX_LENGTH) for p in prompts]
    return Counts(
        tokens=[r.token_ids for r in runs],
        drafts=sum(r.num_drafts for r in runs),
        accepted=[sum(r.accepted_per_position[i] for r in runs) for i in range(k)],
    )


def speculative_config(folder: Path, k: int, parallel: bool) -> dict[str, Any]:
    return {
        "method": "eagle3",
        "model": str(folder),
        "num_speculative_tokens": k,
        "parallel_drafting": parallel,
    }


@pytest.mark.parametrize("k", [1, 3, 5])
@pytest.mark.parametrize("name", RECIPES)
def test_same_tokens_and_counts(name: str, k: int) -> None:
    parallel = RECIPES[name].cfg.parallel
    with engine(speculative_config(drafter_folder(name), k, parallel)) as llm:
        theirs = run_vllm(llm, PROMPTS, k, max_tokens=40)
        # a stop inside an accepted run cuts the text, not the counts
        stop = theirs.tokens[0][11]
        stopped = run_vllm(llm, PROMPTS, k, max_tokens=40, stop_token_ids=[stop])
        full = run_vllm(llm, PROMPTS[:3], k, max_tokens=1000, ignore_eos=True)
    assert theirs == run_reference(name, PROMPTS, k, SamplingParams(max_tokens=40))
    assert stopped == run_reference(name, PROMPTS, k, SamplingParams(max_tokens=40, stop_token_ids=(stop,)))
    # The tokens alone: within K of a full context vLLM stops drafting for the whole batch and counts
    # zeros as drafts, so what is counted there depends on who else is in the batch.
    ours = run_reference(name, PROMPTS[:3], k, SamplingParams(max_tokens=1000, ignore_eos=True))
    assert full.tokens == ours.tokens
    assert 0 < theirs.accepted[0] < theirs.drafts, "an untrained drafter would prove nothing"
