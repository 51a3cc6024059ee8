"""The engine on a GPU: the reference's tokens and counts in fp32, with graphs and without; bf16 that holds still."""

from __future__ import annotations

from pathlib import Path

import pairs
import pytest
import torch

from peagle.checkpoints.target import Target
from peagle.config import DecoderConfig, DrafterConfig, LayerConfig, RopeConfig, SamplingParams
from peagle.engine.cuda_graphs import DecodeGraph, DecodeGraphs
from peagle.engine.dummy_weights import random_weights
from peagle.engine.llm import LLM
from peagle.models.decoder import Decoder
from peagle.models.drafter import Drafter
from peagle.speculative import reference

pytestmark = pytest.mark.gpu

PAIRS = ("p-eagle-1", "p-eagle-4-reduced", "p-eagle-1-wide", "eagle3-1", "eagle3-4-reduced")
TOKENS = 40


def engine(name: str | None, k: int, **options: object) -> LLM:
    drafter = pairs.drafter_folder(name) if name is not None else None
    usual: dict[str, object] = {"device": "cuda", "dtype": "float32", "max_num_seqs": 4, "tokenizer": False}
    usual |= {"kv_cache_memory_bytes": 1 << 28, "prefill_chunk_tokens": 7}
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
            assert (have.num_drafts, have.num_accepted_tokens_per_pos) == (
                want.num_drafts,
                want.num_accepted_tokens_per_pos,
            )
    llm.check_integrity()
    passes = llm.model_runner.prefill.graphs
    assert (passes is not None and [one.shape.num_rows for one in passes.captured] == passes.sizes) == graphs


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
    tight = engine("p-eagle-1", 3, max_num_seqs=8, max_model_len=96, kv_cache_memory_bytes=1 << 19)
    for ours, want in zip(tight.generate(prompts, params), roomy, strict=True):
        assert ours.outputs[0].token_ids == want.outputs[0].token_ids
    tight.check_integrity()


LENGTH = 64  # of every prompt, and of every pass over prompts: each is read alone, whoever else is there
SMOLLM2 = LayerConfig(576, 1536, 9, 3, 64, 1e-5)


def bf16_texts(target: Path | Target, drafter: Path | Drafter | None, at_once: int, vocab: int) -> list[list[int]]:
    """Greedy, of 20 prompts, up to `at_once` at a time with 7 drafts each, if there is a drafter."""
    options = {"device": "cuda", "dtype": "bfloat16", "tokenizer": False, "kv_cache_memory_bytes": 1 << 28}
    options |= {
        "max_num_seqs": at_once,
        "max_prefill_tokens": LENGTH,
        "prefill_chunk_tokens": LENGTH,
        "enable_prefix_caching": False,
    }
    llm = LLM(target, drafter, 7 if drafter is not None else "auto", **(options | {"max_model_len": 256}))
    rng = torch.Generator().manual_seed(0)
    starts = torch.randint(len(pairs.TEXT) - LENGTH, (20,), generator=rng).tolist()
    prompts = [[byte * vocab // 256 for byte in pairs.TEXT[s : s + LENGTH]] for s in starts]
    if vocab == pairs.VOCAB:
        prompts = [list(pairs.TEXT[s : s + LENGTH]) for s in starts]
    # Lengths differ, so that requests end at different times and batches of all sizes are run.
    params = [SamplingParams(max_tokens=20 + 7 * (i % 16), ignore_eos=True) for i in range(len(prompts))]
    return [o.outputs[0].token_ids for o in llm.generate(prompts, params)]


def test_bf16_text_does_not_depend_on_speculation_or_company() -> None:
    """All texts, up to 8 at once: 64 rows a pass with drafts, 8 without, and all there is between when some end."""
    target, drafter = pairs.target_folder(), pairs.drafter_folder("p-eagle-4")
    want = bf16_texts(target, None, 8, pairs.VOCAB)
    assert len({tuple(text) for text in want}) > 10
    for at_once in (1, 4, 8):
        assert bf16_texts(target, drafter, at_once, pairs.VOCAB) == want, at_once
    assert bf16_texts(target, None, 4, pairs.VOCAB) == want


def smollm2s_shape(parallel: bool = True) -> tuple[Target, Drafter, int]:
    """Random weights: many near-ties, which any difference in the last bit would tip; and the vocabulary's size."""
    torch.manual_seed(0)
    vocab, device, dtype = 49152, torch.device("cuda"), torch.bfloat16
    cfg = DecoderConfig("llama", vocab, 4, SMOLLM2, RopeConfig(), 2048, True, (None,) * 4)
    target = Target(Path("."), random_weights(Decoder, cfg, dtype, device), frozenset())
    draft = DrafterConfig(
        vocab_size=vocab,
        draft_vocab_size=vocab,
        num_layers=1,
        layer=SMOLLM2,
        rope=RopeConfig(),
        max_positions=2048,
        target_hidden_size=SMOLLM2.hidden_size,
        aux_layer_ids=cfg.default_aux_layer_ids,
        mask_token_id=0 if parallel else None,
    )
    return target, random_weights(Drafter, draft, dtype, device).share_weights(target.model), vocab


def test_bf16_text_of_smollm2s_shape_does_not_either() -> None:
    target, drafter, vocab = smollm2s_shape()
    want = bf16_texts(target, None, 8, vocab)
    assert len({tuple(text) for text in want}) > 10
    for at_once, guess in ((8, drafter), (4, drafter), (4, None), (1, None)):
        assert bf16_texts(target, guess, at_once, vocab) == want, (at_once, guess is not None)


@pytest.mark.parametrize("parallel", [True, False])
def test_rounds_of_short_requests_write_what_the_others_do(parallel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts that grow past both lengths up to which a small model's rounds are recorded by themselves, alone and beside
    others that are longer; all lengths are used."""
    target, drafter, vocab = smollm2s_shape(parallel)
    used: set[int | None] = set()
    found = DecodeGraphs.find

    def find(graphs: DecodeGraphs, batch: int, k: int, length: int) -> DecodeGraph | None:
        recorded = found(graphs, batch, k, length)
        near = graphs.captured_short[min(s for s in graphs.batch_sizes if s >= batch), k]
        used.add(next((length for length, one in near.items() if one is recorded), None))
        return recorded

    def texts(at_once: int) -> list[list[int]]:
        options = {"device": "cuda", "dtype": "bfloat16", "tokenizer": False, "kv_cache_memory_bytes": 1 << 28}
        options |= {"max_prefill_tokens": LENGTH, "prefill_chunk_tokens": LENGTH, "enable_prefix_caching": False}
        llm = LLM(target, drafter, 7, max_num_seqs=at_once, max_model_len=1024, **options)
        prompts = [[(31 * i + 7 * n) % vocab for i in range(n * LENGTH)] for n in (7, 3, 1, 9)]
        asked = [SamplingParams(max_tokens=most, ignore_eos=True) for most in (90, 100, 250, 60)]
        return [o.outputs[0].token_ids for o in llm.generate(prompts, asked)]

    monkeypatch.setattr(DecodeGraphs, "find", find)
    near = [texts(at_once) for at_once in (1, 2, 4)]
    assert used == {256, 512, None}
    monkeypatch.setattr("peagle.engine.loader.find_short_seq_lens", lambda target, drafter: ())
    used.clear()
    assert texts(1) == near[0] == near[1] == near[2] and used == {None}


def test_graphs_say_what_they_take() -> None:
    llm = engine("p-eagle-1", 3)
    graphs = llm.model_runner.decode_graphs
    assert graphs is not None and graphs.capture_seconds > 0 and {k for _, k in graphs.captured} == {3}
    torch.cuda.synchronize()
