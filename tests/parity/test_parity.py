"""The reference against stock vLLM on the CPU: the same folders, the same tokens, the same counts.

Greedy and fp32, since vLLM's sampling with speculation does not work on the CPU. Counts are compared draft
position by draft position: that a folder loads proves nothing, a wrong tap or mask id only lowers them.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pairs import EOS_ID, RECIPES, drafter_folder, load_pair, prompts, target_folder
from support import edit_weights

from peagle.checkpoints.drafter import convert_drafter, load_drafter
from peagle.checkpoints.target import encode_prompt, load_decoder, load_target, load_tokenizer
from peagle.checkpoints.validate import inspect_drafter
from peagle.config import SamplingParams
from peagle.errors import UserError
from peagle.hub.resolve import DEFAULT_DRAFTER, EAGLE3_DRAFTER, resolve_drafter, resolve_target
from peagle.speculative.reference import Generation, generate

pytestmark = pytest.mark.vllm
MAX_LENGTH = 128
PROMPTS = prompts(6)


@dataclass
class Counts:
    tokens: list[list[int]]
    drafts: int
    accepted: list[int]


@contextmanager
def engine(speculative: dict[str, Any] | None, target: Path, **settings: Any) -> Iterator[Any]:
    from vllm import LLM

    llm = LLM(
        str(target),
        dtype="float32",
        enforce_eager=True,
        max_num_seqs=8,
        skip_tokenizer_init=True,
        disable_log_stats=False,
        speculative_config=speculative,
        seed=0,
        **{"max_model_len": MAX_LENGTH, **settings},
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def spec_decode_totals(llm: Any, k: int) -> tuple[int, list[int]]:
    """vLLM's running counts: drafts, and accepted tokens by position."""
    values = {m.name: getattr(m, "value", None) or getattr(m, "values", None) for m in llm.get_metrics()}
    drafts = values.get("vllm:spec_decode_num_drafts") or 0
    return drafts, values.get("vllm:spec_decode_num_accepted_tokens_per_pos") or [0] * k


def run_vllm(llm: Any, prompts: list[list[int]], k: int, **sampling: Any) -> Counts:
    from vllm import SamplingParams as VllmParams

    drafts_before, accepted_before = spec_decode_totals(llm, k)
    params = VllmParams(temperature=0.0, detokenize=False, **sampling)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    drafts, accepted = spec_decode_totals(llm, k)
    return Counts(
        tokens=[list(o.outputs[0].token_ids) for o in outputs],
        drafts=drafts - drafts_before,
        accepted=[now - was for was, now in zip(accepted_before, accepted, strict=True)],
    )


def counts_of(runs: list[Generation], k: int) -> Counts:
    return Counts(
        tokens=[r.token_ids for r in runs],
        drafts=sum(r.num_drafts for r in runs),
        accepted=[sum(r.num_accepted_tokens_per_pos[i] for r in runs) for i in range(k)],
    )


def run_reference(name: str, prompts: list[list[int]], k: int, params: SamplingParams) -> Counts:
    target, drafter = load_pair(name)
    eos = frozenset({EOS_ID})
    return counts_of([generate(target, p, params, eos, drafter, k, max_model_len=MAX_LENGTH) for p in prompts], k)


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
    with engine(speculative_config(drafter_folder(name), k, parallel), target_folder()) as llm:
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


def test_speculators_format_gives_the_same(tmp_path: Path) -> None:
    """A folder converted to the speculators format drafts in vLLM as the plain one does here."""
    for name in ("p-eagle-4-reduced", "eagle3-4-reduced"):
        out = tmp_path / name
        convert_drafter(
            drafter_folder(name), out, "speculators", target_folder(), str(target_folder()), num_speculative_tokens=4
        )
        # served by its own name: target, method, number of drafts and parallel drafting come from the folder
        with engine(None, out) as llm:
            theirs = run_vllm(llm, PROMPTS, 4, max_tokens=40)
        assert theirs == run_reference(name, PROMPTS, 4, SamplingParams(max_tokens=40)), name
    out = tmp_path / "p-eagle-1-reduced"
    convert_drafter(
        drafter_folder(out.name), out, "speculators", target_folder(), str(target_folder()), num_speculative_tokens=4
    )
    with engine(speculative_config(out, 5, parallel=True), target_folder()) as llm:
        theirs = run_vllm(llm, PROMPTS, 5, max_tokens=40)
    assert theirs == run_reference(out.name, PROMPTS, 5, SamplingParams(max_tokens=40))


def test_what_vllm_swallows_the_validator_finds(tmp_path: Path) -> None:
    """Without fc.weight vLLM loads and drafts rubbish; here it is a finding, and refused."""
    broken = tmp_path / "broken"
    shutil.copytree(drafter_folder("p-eagle-1"), broken)
    edit_weights(broken, lambda tensors: tensors.pop("fc.weight"))
    with engine(speculative_config(broken, 3, True), target_folder()) as llm:
        theirs = run_vllm(llm, PROMPTS, 3, max_tokens=40)
    right = run_reference("p-eagle-1", PROMPTS, 3, SamplingParams(max_tokens=40))
    assert theirs.tokens == right.tokens and sum(theirs.accepted) < sum(right.accepted) / 2
    assert "tensor 'fc.weight' is missing" in inspect_drafter(broken, str(broken)).findings
    with pytest.raises(UserError, match="fc.weight"):
        load_drafter(broken, load_decoder(target_folder()))


@pytest.mark.parametrize(("name", "k"), [(DEFAULT_DRAFTER, 7), (EAGLE3_DRAFTER, 3)])
def test_smollm2_with_the_shipped_drafters(name: str, k: int) -> None:
    """The real model: chat prompts, fp32."""
    folder, drafter_at = resolve_target("smollm2-135m"), resolve_drafter(name)
    tokenizer = load_tokenizer(folder)
    asked = ["What is the capital of France?", "Write a haiku about rain.", "Count from one to ten in words."]
    prompts = [encode_prompt(tokenizer, text, raw=False) for text in asked]
    with engine(speculative_config(drafter_at, k, name == DEFAULT_DRAFTER), folder, max_model_len=512) as llm:
        theirs = run_vllm(llm, prompts, k, max_tokens=24, stop_token_ids=[2])
    target = load_target(folder)
    drafter = load_drafter(drafter_at, target.model)
    params = SamplingParams(max_tokens=24)
    ours = [generate(target.model, p, params, target.eos_ids, drafter, k, max_model_len=512) for p in prompts]
    assert theirs == counts_of(ours, k)
    assert sum(theirs.accepted) > 0
