"""The engine on a GPU: the reference's tokens and counts in fp32, with graphs and without; bf16 that holds still."""

from __future__ import annotations

import pairs
import pytest
import torch

from peagle import reference
from peagle.config import SamplingParams
from peagle.engine.llm import LLM

pytestmark = pytest.mark.gpu

PAIRS = ("p-eagle-1", "p-eagle-4-reduced", "p-eagle-1-wide", "eagle3-1", "eagle3-4-reduced")
TOKENS = 40


def engine(name: str | None, k: int, **options: object) -> LLM:
    drafter = pairs.drafter_folder(name) if name is not None else None
    usual: dict[str, object] = {"device": "cuda", "dtype": "float32", "max_num_seqs": 4, "tokenizer": False}
    usual |= {"kv_cache_memory": 1 << 28, "prefill_chunk": 7}
    return LLM(pairs.target_folder(), drafter, k if name is not None else "auto", **(usual | options))


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("name", [None, *PAIRS])
def test_greedy_text_and_counts_are_the_references(name: str | None, graphs: bool) -> None:
    target, drafter = pairs.load_pair(name or "p-eagle-1")
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    llm = engine(name, 3, cuda_graphs=graphs)
    prompts = pairs.prompts(9)
    for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
        want = reference.generate(target, prompt, params, frozenset(), drafter if name else None, 3)
        have = output.outputs[0]
        assert have.token_ids == want.token_ids
        if name is not None:
            assert (have.num_drafts, have.accepted_per_position) == (want.num_drafts, want.accepted_per_position)
    llm.check_integrity()


@pytest.mark.parametrize("name", PAIRS)
def test_every_parameter_works_with_drafts(name: str) -> None:
    """Shaped requests go through passes that are not recorded, beside others that are."""
    asked = [
        SamplingParams(max_tokens=TOKENS, ignore_eos=True, repetition_penalty=1.3, logprobs=2),
        SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=0.9, top_p=0.9, seed=5),
        SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=0.9, min_p=0.05, seed=6, logit_bias={101: 2.0}),
        SamplingParams(max_tokens=TOKENS, min_tokens=20, frequency_penalty=0.5),
    ]
    prompts = pairs.prompts(len(asked))
    with_drafts = engine(name, 3).generate(prompts, asked)
    without = engine(None, 0).generate(prompts, asked)
    for ours, plain in zip(with_drafts, without, strict=True):
        assert ours.outputs[0].token_ids == plain.outputs[0].token_ids


def test_more_requests_than_fit_give_their_blocks_back_and_finish() -> None:
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    prompts = pairs.prompts(12)
    roomy = engine("p-eagle-1", 3, max_num_seqs=8).generate(prompts, params)
    tight = engine("p-eagle-1", 3, max_num_seqs=8, max_model_len=96, kv_cache_memory=1 << 19)
    for ours, want in zip(tight.generate(prompts, params), roomy, strict=True):
        assert ours.outputs[0].token_ids == want.outputs[0].token_ids
    tight.check_integrity()


def test_bf16_text_hardly_depends_on_speculation() -> None:
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    prompts = pairs.prompts(16)
    texts = []
    for name in (None, "p-eagle-4"):
        llm = engine(name, 3, dtype="bfloat16", max_num_seqs=1)
        texts.append([o.outputs[0].token_ids for o in llm.generate(prompts, params)])
    assert sum(a != b for a, b in zip(*texts, strict=True)) <= 1


def test_graphs_say_what_they_take() -> None:
    llm = engine("p-eagle-1", 3)
    graphs = llm.runner.graphs
    assert graphs is not None and graphs.seconds > 0 and {k for _, k in graphs.rounds} == {3}
    torch.cuda.synchronize()
