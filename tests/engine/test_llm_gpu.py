"""The engine on a GPU: tokens and counts of the reference in fp32, with and without graphs; batch-invariant bf16."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import engines
import pairs
import pytest
import torch
from engine_integrity import check_scheduler

from benchmarks.random_weights import random_weights
from peagle.checkpoints.target import Target
from peagle.config import DecoderConfig, DrafterConfig, LayerConfig, RopeConfig, SamplingParams
from peagle.engine.cuda_graphs import DecodeGraph, DecodeGraphs
from peagle.engine.grammar import from_json_schema, from_regex
from peagle.engine.llm import LLM
from peagle.engine.request import PrefillChunk, RequestState
from peagle.kernels.triton_utils import watch_compilations
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
def test_greedy_tokens_and_counts_equal_the_reference(name: str | None, graphs: bool) -> None:
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
    check_scheduler(llm.scheduler)
    captured = [graph.shape.num_rows for graph in llm.model_runner.prefill.graphs]
    assert bool(captured) == graphs and captured == sorted(captured)


@pytest.mark.parametrize("name", [None, "p-eagle-1", "p-eagle-4-reduced", "eagle3-1"])
def test_prompts_share_captured_passes_with_decode_requests(name: str | None) -> None:
    target, drafter = pairs.load_pair(name or "p-eagle-1")
    llm = engine(name, 3, max_num_seqs=16, prefill_chunk_tokens=20, max_prefill_tokens=64)
    runner, merged = llm.model_runner, list[int]()
    launch_mixed = runner.prefill.launch_mixed

    def record(slots: list[int], k: int, chunks: Sequence[PrefillChunk]) -> Any:
        assert runner.prefill.find_mixed_graph(len(slots), k, chunks) is not None
        merged.append(len(slots))
        return launch_mixed(slots, k, chunks)

    runner.prefill.launch_mixed = record  # type: ignore[method-assign]
    prompts = pairs.prompts(30)
    params = [SamplingParams(max_tokens=TOKENS - i, ignore_eos=True) for i in range(len(prompts))]
    params[5:25:5] = [SamplingParams(max_tokens=TOKENS, ignore_eos=True, logprobs=1, repetition_penalty=1.3)] * 4
    for prompt, own, output in zip(prompts, params, llm.generate(prompts, params), strict=True):
        want = reference.generate(target, prompt, own, frozenset(), drafter if name else None, 3)
        assert output.outputs[0].token_ids == want.token_ids
        if name is not None:
            assert output.outputs[0].num_accepted_tokens_per_pos == want.num_accepted_tokens_per_pos
    assert len(merged) > 20 and max(merged) > 10
    check_scheduler(llm.scheduler)


@pytest.mark.parametrize("name", PAIRS)
def test_all_parameters_with_a_drafter(name: str) -> None:
    params = [
        SamplingParams(max_tokens=TOKENS, ignore_eos=True, repetition_penalty=1.3, logprobs=2),
        SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=0.9, top_p=0.9, seed=5),
        SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=0.9, min_p=0.05, seed=6, logit_bias={101: 2.0}),
        SamplingParams(max_tokens=TOKENS, min_tokens=20, frequency_penalty=0.5),
        SamplingParams(max_tokens=TOKENS, bad_words_token_ids=[[*b"th"], [*b"e"]], allowed_token_ids=[*range(32, 123)]),
    ]
    prompts = pairs.prompts(len(params))
    with_drafter = engine(name, 3).generate(prompts, params)
    without = engine(None, 0).generate(prompts, params)
    for ours, plain in zip(with_drafter, without, strict=True):
        assert ours.outputs[0].token_ids == plain.outputs[0].token_ids


@pytest.mark.parametrize("name", ["p-eagle-1", "eagle3-1"])
def test_masks_of_grammars_are_computed_while_the_target_runs(name: str) -> None:
    """A captured step waits for them on the device; a step without a graph is launched after them."""
    words, listed = from_regex("[a-z]{2,9}( [a-z]{2,9})*"), from_json_schema({"type": "array", "items": {"enum": [7]}})
    params = [
        SamplingParams(max_tokens=TOKENS, grammar=words, bad_words_token_ids=[[*b"th"]]),
        SamplingParams(max_tokens=TOKENS, ignore_eos=True),
        SamplingParams(max_tokens=9, grammar=listed, temperature=2.0, seed=3),
        SamplingParams(max_tokens=3 * TOKENS, grammar=words, min_tokens=TOKENS, temperature=1.0, seed=4),
        SamplingParams(max_tokens=TOKENS, grammar=from_regex("(the|of a|any)"), logprobs=1),
    ]
    prompts, outputs = pairs.prompts(len(params)), []
    for drafter, graphs in ((name, True), (name, False), (None, True)):
        drafter_folder = pairs.drafter_folder(drafter) if drafter is not None else None
        options = {"device": "cuda", "dtype": "float32", "max_num_seqs": 3, "kv_cache_memory_bytes": 1 << 28}
        llm = LLM(engines.target().folder, drafter_folder, 3 if drafter else "auto", cuda_graphs=graphs, **options)
        assert llm.model_runner.overlaps_grammars == graphs
        outputs.append([(o.outputs[0].token_ids, o.outputs[0].finish_reason) for o in llm.generate(prompts, params)])
        assert llm.model_runner._num_mask_steps > 10 or not graphs
    assert outputs[0] == outputs[1] == outputs[2]
    assert "error" not in {reason for _, reason in outputs[0]}


def test_preempted_requests_finish() -> None:
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    prompts = pairs.prompts(12)
    expected = engine("p-eagle-1", 3, max_num_seqs=8).generate(prompts, params)
    tight = engine("p-eagle-1", 3, max_num_seqs=8, max_model_len=96, kv_cache_memory_bytes=1 << 19)
    for ours, want in zip(tight.generate(prompts, params), expected, strict=True):
        assert ours.outputs[0].token_ids == want.outputs[0].token_ids
    check_scheduler(tight.scheduler)


LENGTH = 64  # tokens of every prompt and of every prefill pass, so each prompt is prefilled alone
SMOLLM2 = LayerConfig(576, 1536, 9, 3, 64, 1e-5)


def bf16_outputs(
    target: Path | Target, drafter: Path | Drafter | None, max_num_seqs: int, vocab: int, **more: object
) -> list[list[int]]:
    """Greedy outputs of 20 prompts, with 7 draft tokens per step if there is a drafter."""
    options = {"device": "cuda", "dtype": "bfloat16", "tokenizer": False, "kv_cache_memory_bytes": 1 << 28}
    options |= {
        "max_num_seqs": max_num_seqs,
        "max_prefill_tokens": LENGTH,
        "prefill_chunk_tokens": LENGTH,
        "enable_prefix_caching": False,
    }
    llm = LLM(target, drafter, 7 if drafter is not None else "auto", **(options | {"max_model_len": 256} | more))
    rng = torch.Generator().manual_seed(0)
    starts = torch.randint(len(pairs.TEXT) - LENGTH, (20,), generator=rng).tolist()
    prompts = [[byte * vocab // 256 for byte in pairs.TEXT[s : s + LENGTH]] for s in starts]
    if vocab == pairs.VOCAB:
        prompts = [list(pairs.TEXT[s : s + LENGTH]) for s in starts]
    # Lengths differ, so that requests finish at different times and all batch sizes occur.
    params = [SamplingParams(max_tokens=20 + 7 * (i % 16), ignore_eos=True) for i in range(len(prompts))]
    return [o.outputs[0].token_ids for o in llm.generate(prompts, params)]


def test_bf16_output_does_not_depend_on_speculation_or_batch() -> None:
    """Batches of up to 8 requests: up to 64 target rows with a drafter, 8 without."""
    target, drafter = pairs.target_folder(), pairs.drafter_folder("p-eagle-4")
    want = bf16_outputs(target, None, 8, pairs.VOCAB)
    assert len({tuple(output) for output in want}) > 10
    for max_num_seqs in (1, 4, 8):
        assert bf16_outputs(target, drafter, max_num_seqs, pairs.VOCAB) == want, max_num_seqs
    assert bf16_outputs(target, None, 4, pairs.VOCAB) == want


def random_smollm2(parallel: bool = True) -> tuple[Target, Drafter, int]:
    """Random weights have many near-ties, which any difference in the last bit reverses. Also the vocabulary size."""
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


def test_bf16_output_of_a_random_smollm2_does_not_either() -> None:
    target, drafter, vocab = random_smollm2()
    want = bf16_outputs(target, None, 8, vocab)
    assert len({tuple(output) for output in want}) > 10
    for max_num_seqs, own in ((8, drafter), (4, drafter), (4, None), (1, None)):
        assert bf16_outputs(target, own, max_num_seqs, vocab) == want, (max_num_seqs, own is not None)


def test_output_with_an_fp8_kv_cache_does_not_either() -> None:
    target, drafter, vocab = random_smollm2()
    want = bf16_outputs(target, None, 8, vocab, kv_cache_dtype="fp8")
    assert len({tuple(output) for output in want}) > 10 and want != bf16_outputs(target, None, 8, vocab)
    for max_num_seqs, own in ((8, drafter), (4, drafter), (4, None), (1, None)):
        have = bf16_outputs(target, own, max_num_seqs, vocab, kv_cache_dtype="fp8")
        assert have == want, (max_num_seqs, own is not None)


def test_output_with_fp8_weights_does_not_either() -> None:
    """All passes have few enough rows to keep their activations in bf16."""
    target, drafter = pairs.target_folder(), pairs.drafter_folder("p-eagle-4")
    want = bf16_outputs(target, None, 8, pairs.VOCAB, quantization="fp8")
    assert len({tuple(output) for output in want}) > 10
    for max_num_seqs, own in ((8, drafter), (4, drafter), (4, None), (1, None)):
        have = bf16_outputs(target, own, max_num_seqs, pairs.VOCAB, quantization="fp8", kv_cache_dtype="auto")
        assert have == want, (max_num_seqs, own is not None)


@pytest.mark.parametrize("parallel", [True, False])
def test_short_sequence_graphs_give_the_same_output(parallel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs grow past both short sequence lengths, alone and in a batch; graphs of all lengths are used."""
    target, drafter, vocab = random_smollm2(parallel)
    used: set[int | None] = set()
    found = DecodeGraphs.find

    def find(graphs: DecodeGraphs, batch: int, k: int, length: int) -> DecodeGraph | None:
        graph = found(graphs, batch, k, length)
        used.add(next(length for (_, _, length), one in graphs.captured.items() if one is graph))
        return graph

    def outputs(max_num_seqs: int) -> list[list[int]]:
        options = {"device": "cuda", "dtype": "bfloat16", "tokenizer": False, "kv_cache_memory_bytes": 1 << 28}
        options |= {"max_prefill_tokens": LENGTH, "prefill_chunk_tokens": LENGTH, "enable_prefix_caching": False}
        llm = LLM(target, drafter, 7, max_num_seqs=max_num_seqs, max_model_len=1024, **options)
        prompts = [[(31 * i + 7 * n) % vocab for i in range(n * LENGTH)] for n in (7, 3, 1, 9)]
        requests = []
        for prompt, max_tokens in zip(prompts, (90, 100, 250, 60), strict=True):
            requests += llm.add_request(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True)).requests
            while requests[-1].state in (RequestState.WAITING, RequestState.PREFILL):
                llm.step()  # prompts that are prefilled together have other chunks, whose bits differ
        while llm.has_unfinished_requests:
            llm.step()
        return [request.output_token_ids for request in requests]

    monkeypatch.setattr(DecodeGraphs, "find", find)
    short = [outputs(max_num_seqs) for max_num_seqs in (1, 2, 4)]
    assert used == {256, 512, None}
    monkeypatch.setattr("peagle.engine.loader.find_short_seq_lens", lambda *args: ())
    used.clear()
    assert outputs(1) == short[0] == short[1] == short[2] and used == {None}


@pytest.mark.parametrize("parallel", [True, False])
def test_nothing_is_compiled_after_the_warm_up(parallel: bool) -> None:
    target, drafter, vocab = random_smollm2(parallel)
    options = {"device": "cuda", "dtype": "bfloat16", "tokenizer": False, "kv_cache_memory_bytes": 1 << 30}
    llm = LLM(target, drafter, max_num_seqs=40, max_model_len=2048, max_prefill_tokens=8192, **options)
    llm.warm_up()
    compiled: list[str] = []
    watch_compilations(compiled.append)
    rng = random.Random(3)
    all_options = (
        {},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 30, "min_p": 0.01, "seed": 1},
        {"presence_penalty": 0.5, "frequency_penalty": 0.1, "repetition_penalty": 1.2},
        {"logprobs": 5, "logit_bias": {3: 2.0}, "min_tokens": 4},
    )
    lengths = (1, 2, 3, 5, 15, 16, 17, 31, 33, 100, 257, 700, 1500, 1900)
    for num_prompts in (1, 2, 3, 5, 17, 40, 70):
        prompts = [[rng.randrange(vocab) for _ in range(rng.choice(lengths))] for _ in range(num_prompts)]
        params = [
            SamplingParams(
                max_tokens=rng.randint(4, 40), ignore_eos=True, n=rng.choice((1, 1, 3)), **rng.choice(all_options)
            )
            for _ in prompts
        ]
        llm.generate(prompts, params)
    watch_compilations(lambda kernel: None)
    assert not compiled


def test_captured_graphs() -> None:
    llm = engine("p-eagle-1", 3)
    graphs = llm.model_runner.decode_graphs
    assert graphs is not None and {k for _, k, _ in graphs.captured} == {3}
    torch.cuda.synchronize()
