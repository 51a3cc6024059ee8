"""The engine against the reference: equal tokens and counts, in any batch.

`engines` computes the expected output of a request. Everything around it is random: arrivals and aborts, the number of
KV cache blocks, the prefill chunks, the number of draft tokens per step, and the number of steps in flight.
"""

from __future__ import annotations

import random
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import engines
import pairs
import pytest
import torch
from engine_integrity import check_scheduler
from engine_soak import soak, spread_weights
from engines import MAX_MODEL_LEN, ArrivingRequest, check, emulate_prefill_graphs, engine, expected_output, run_requests
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare
from support import many, set_config
from torch import Tensor

from peagle.checkpoints.drafter import read_drafter_config, save_drafter
from peagle.checkpoints.target import Target
from peagle.config import (
    DecoderConfig,
    DrafterConfig,
    EngineSettings,
    ExpertsConfig,
    LayerConfig,
    RopeConfig,
    SamplingParams,
    Window,
)
from peagle.engine import loader
from peagle.engine.kv_cache import count_blocks, resolve_kv_cache_dtype
from peagle.engine.llm import LLM
from peagle.engine.loader import resolve_choices
from peagle.engine.model_runner import PendingStep
from peagle.engine.proposer import DraftBatch
from peagle.engine.quantization import check_quantization
from peagle.engine.request import Request
from peagle.errors import UserError
from peagle.kernels.attention.dense import causal_attention
from peagle.models.decoder import Decoder
from peagle.models.drafter import Drafter
from peagle.speculative import reference
from peagle.speculative.adaptive_k import StepCostTable

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = (1, 2, 5, 15, 16, 17, 18, 31, 33, 34, 48, MAX_MODEL_LEN - 2, MAX_MODEL_LEN - 1)
STARTS = (700, 2300)
LONG = [
    SamplingParams(max_tokens=30, ignore_eos=True),
    SamplingParams(max_tokens=MAX_MODEL_LEN, ignore_eos=True),
    SamplingParams(max_tokens=MAX_MODEL_LEN, temperature=1.6, seed=3, ignore_eos=True),
]
PLAIN = [
    SamplingParams(max_tokens=1),
    SamplingParams(max_tokens=9),
    SamplingParams(max_tokens=24, stop_token_ids=[ord("e"), ord(",")]),
    SamplingParams(max_tokens=24, stop_token_ids=[ord("r"), ord("n")], ignore_eos=True),
    SamplingParams(max_tokens=30, stop=["th", "n t"]),
    SamplingParams(max_tokens=25, temperature=3.0, seed=11, top_k=6, top_p=0.9),
    SamplingParams(max_tokens=25, temperature=2.0, seed=2**63 - 1, min_p=0.02),
]
PROCESSED = [
    SamplingParams(max_tokens=20, repetition_penalty=1.4, logprobs=3),
    SamplingParams(max_tokens=20, frequency_penalty=0.7, bad_words_token_ids=[[*b"th"], [*b" of"], [*b"e s"], [*b"q"]]),
    SamplingParams(max_tokens=20, min_tokens=9, stop_token_ids=[ord("e"), ord("o")], logprobs=0),
    SamplingParams(max_tokens=20, logit_bias={ord(" "): -6.0}, allowed_token_ids=[*b"abcdefghijqr "], ignore_eos=True),
    SamplingParams(max_tokens=16, temperature=2.0, seed=5, presence_penalty=1.0, bad_words_token_ids=[[*b"e"]]),
]


def prompt(start: int, length: int) -> tuple[int, ...]:
    return tuple(pairs.TEXT[start : start + length])


@dataclass(frozen=True)
class Scenario:
    options: dict[str, Any]  # of the engine
    requests: list[ArrivingRequest]


def random_scenario(rng: random.Random) -> Scenario:
    """Half of them are crowded: long outputs in a KV cache that is too small for all of them."""
    crowded = rng.random() < 0.5
    params = LONG * (6 if crowded else 2) + PLAIN + (PROCESSED if rng.random() < 0.3 else [])
    requests = []
    for _ in range(rng.randint(4, 7)):
        length = rng.choice(LENGTHS[:7] if crowded else LENGTHS)
        arrival_step = rng.randint(0, 3 if crowded else 15)
        abort_after = rng.randint(0, 20) if rng.random() < 0.15 else None
        text = prompt(rng.choice(STARTS), length)
        requests.append(ArrivingRequest(text, rng.choice(params), arrival_step, abort_after))
    options = {
        "blocks": rng.choice([5, 6, 7] if crowded else [4, 8, 16]),
        "max_num_seqs": rng.choice([3, 4] if crowded else [1, 2, 4]),
        "prefill_chunk_tokens": rng.choice([7, 16, 40]),
        "max_prefill_tokens": rng.choice([5, 16, 33, 200]),
        "enable_prefix_caching": rng.random() < 0.8,
    }
    return Scenario(options, requests)


SEEN: Counter[str] = Counter()  # events that the random scenarios must contain


def run_scenario(name: str | None, k: int | str, max_in_flight_steps: int, rng: random.Random) -> None:
    scenario = random_scenario(rng)
    fixed = name is not None and isinstance(k, int)
    expected = {r: expected_output(r.prompt, r.params, *((name, k) if fixed else ())) for r in scenario.requests}
    requests = [r for r in scenario.requests if expected[r].is_clear]
    llm = engine(name, k, **scenario.options)
    llm.max_in_flight_steps = max_in_flight_steps
    replays = emulate_prefill_graphs(llm, rng.choice([[], [16], [8, 24, 200]]))
    if k == "auto":
        llm.scheduler.choose_k = lambda batch: rng.choice(llm.adaptive_k.choices)
    for request, group in zip(requests, run_requests(llm, requests), strict=True):
        (got,) = llm.build_output(group).outputs
        want = expected[request]
        if request.abort_after is not None and got.finish_reason == "abort":
            assert got.token_ids == want.token_ids[: len(got.token_ids)]
            SEEN["aborted"] += 1
        else:
            check(got, want, counts=k != "auto")
        assert len(got.token_ids) <= 1 + got.num_decode_steps + sum(got.num_accepted_tokens_per_pos)
        SEEN["preempted"] += group.requests[0].num_preemptions > 0
        SEEN["accepted"] += sum(got.num_accepted_tokens_per_pos)
        SEEN["full"] += len(request.prompt) + len(got.token_ids) == MAX_MODEL_LEN
    SEEN["prefix hits"] += llm.scheduler.pool.num_hit_tokens
    SEEN["replayed"] += len(replays)


PAIRS = [
    (None, 0),
    ("p-eagle-1", 3),
    ("p-eagle-1", "auto"),
    ("p-eagle-4-reduced", 5),
    ("eagle3-1", 1),
    ("eagle3-4-reduced", 3),
    ("eagle3-4-reduced", "auto"),
]


@pytest.mark.parametrize("max_in_flight_steps", [0, 1])
@pytest.mark.parametrize(("name", "k"), PAIRS)
def test_outputs_do_not_depend_on_the_batch(name: str | None, k: int | str, max_in_flight_steps: int) -> None:
    SEEN.clear()

    @many(4)
    @given(st.integers(0, 2**32))
    def property_(seed: int) -> None:
        run_scenario(name, k, max_in_flight_steps, random.Random(f"{name} {k} {max_in_flight_steps} {seed}"))

    property_()
    assert SEEN["preempted"] and SEEN["prefix hits"] and SEEN["full"] and (SEEN["accepted"] or name is None), SEEN
    assert SEEN["replayed"], SEEN


@pytest.mark.parametrize("name", ["p-eagle-1", "eagle3-1", None])
def test_all_parameters_in_one_batch_and_alone(name: str | None) -> None:
    requests = [ArrivingRequest(prompt(STARTS[i % 2], 20 + i), p) for i, p in enumerate(LONG + PLAIN + PROCESSED)]
    expected = [expected_output(r.prompt, r.params, *((name, 3) if name else ())) for r in requests]
    assert sum(want.is_clear for want in expected) >= len(requests) - 1
    llm = engine(name, 3 if name else 0, max_num_seqs=20)
    together = [llm.build_output(group).outputs[0] for group in run_requests(llm, requests)]
    alone = [llm.generate(list(r.prompt), r.params)[0].outputs[0] for r in requests[-len(PROCESSED) :]]
    for got, want in zip(together + alone, expected + expected[-len(PROCESSED) :], strict=True):
        if want.is_clear:
            check(got, want, counts=name is not None)
    reasons = {(got.finish_reason, type(got.stop_reason)) for got in together}
    assert {("length", type(None)), ("stop", type(None)), ("stop", int), ("stop", str)} <= reasons


def test_n_outputs_have_consecutive_seeds() -> None:
    llm = engine("p-eagle-1", 3, max_num_seqs=3)
    params = SamplingParams(max_tokens=12, temperature=6.0, seed=2**63 - 2, n=4)
    (output,) = llm.generate([list(prompt(700, 20))], params)
    assert [o.index for o in output.outputs] == [0, 1, 2, 3] and output.finished
    for i, got in enumerate(output.outputs):
        check(got, expected_output(prompt(700, 20), replace(params, n=1, seed=(params.seed + i) % 2**63)), counts=False)
    assert len({tuple(o.token_ids) for o in output.outputs}) == 4
    (greedy,) = llm.generate([list(prompt(700, 20))], SamplingParams(max_tokens=5, n=2))
    assert greedy.outputs[0].token_ids == greedy.outputs[1].token_ids
    unseeded = [llm.generate(list(prompt(700, 20)), SamplingParams(12, 3.0))[0].outputs[0].token_ids for _ in range(2)]
    assert unseeded[0] != unseeded[1]


# Drafters with known right and wrong draft tokens


def rig_drafter(llm: LLM, is_right: Callable[[int], bool]) -> None:
    """Drafts the expected output, with a wrong token at positions where `is_right` is false."""

    def draft(request: Request, position: int, k: int) -> list[int]:
        """Draft tokens for `position` and the k - 1 positions after it."""
        output = expected_output(tuple(request.prompt_token_ids), request.params).token_ids
        ahead = [*output, *[0] * MAX_MODEL_LEN][position - len(request.prompt_token_ids) :][:k]
        return [t if is_right(position + i) else (t + 1) % pairs.VOCAB for i, t in enumerate(ahead)]

    def propose(batches: Sequence[DraftBatch], k: int, max_seq_len: int | None = None) -> list[Tensor]:
        proposed = []
        for batch in batches:
            made = []
            newest_rows = batch.sample_rows.view(batch.num_requests, k)[:, :1].flatten()
            starts = batch.positions_R[newest_rows] + 2  # the row at p drafts the token at p + 2
            for table, start in zip(batch.block_tables_BM.tolist(), starts.tolist(), strict=False):
                owners = [r for r in llm.scheduler.running if r.block_ids == table[: len(r.block_ids)]]
                made.append(draft(max(owners, key=lambda r: len(r.block_ids)), start, k))
            proposed.append(torch.tensor(made, dtype=torch.long).view(batch.num_requests, k))
        return proposed

    runner: Any = llm.model_runner
    runner.proposer.propose = propose


@pytest.mark.parametrize("kind", ["always", "never", "sometimes"])
@pytest.mark.parametrize("k", [1, 4])
def test_counts_with_known_draft_tokens(kind: str, k: int) -> None:
    wrong = {"always": set(), "never": set(range(MAX_MODEL_LEN)), "sometimes": {26, 27, 33, 41, 45}}[kind]
    llm = engine("p-eagle-1", k)
    rig_drafter(llm, lambda position: position not in wrong)
    params = SamplingParams(max_tokens=MAX_MODEL_LEN, ignore_eos=True)
    requests = [
        ArrivingRequest(prompt(start, length), params, step)
        for step, (start, length) in enumerate([(700, 17), (2300, 24), (700, 40)])
    ]
    for request, group in zip(requests, run_requests(llm, requests), strict=True):
        (got,) = llm.build_output(group).outputs
        check(got, expected_output(request.prompt, params), counts=False)
        num_tokens, num_steps, num_drafts, accepted, flags = len(request.prompt) + 1, 0, 0, [0] * k, [False]
        while num_tokens < MAX_MODEL_LEN:
            num_drafted = min(k, MAX_MODEL_LEN - num_tokens - 1)
            num_accepted = next((i for i in range(num_drafted) if num_tokens + i in wrong), num_drafted)
            num_steps, num_drafts = num_steps + 1, num_drafts + (num_drafted > 0)
            accepted = [a + (i < num_accepted) for i, a in enumerate(accepted)]
            flags += [True] * num_accepted + [False]
            num_tokens += num_accepted + 1
        assert (got.num_decode_steps, got.num_drafts, got.num_accepted_tokens_per_pos) == (
            num_steps,
            num_drafts,
            accepted,
        )
        assert got.is_draft_token == flags
        if kind == "never":
            assert got.acceptance_length == 1 and got.num_decode_steps == len(got.token_ids) - 1
    if kind == "always":  # ends with a whole step, before the context is full
        (got,) = llm.generate(list(prompt(700, 17)), SamplingParams(1 + 5 * (k + 1), ignore_eos=True))[0].outputs
        assert got.acceptance_length == k + 1 and got.num_decode_steps == 5 and sum(got.is_draft_token) == 5 * k


def test_auto_stops_drafting_when_nothing_is_accepted() -> None:
    llm = engine("p-eagle-1", "auto")
    llm.adaptive_k.table = StepCostTable({(1, k): 1.0 + k for k in llm.adaptive_k.choices})
    rig_drafter(llm, lambda position: False)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    outputs = [llm.generate(list(prompt(700, 17)), params)[0].outputs[0] for _ in range(3)]
    check(outputs[-1], expected_output(prompt(700, 17), params), counts=False)
    assert outputs[-1].num_drafts <= 2 and outputs[0].num_decode_steps == 39


def test_auto_times_its_steps() -> None:
    """Steps without prefill are timed and compared with the cost table."""
    llm = engine("p-eagle-1", "auto")
    llm.adaptive_k.table = StepCostTable({(1, k): 1e-9 for k in llm.adaptive_k.choices})
    llm.generate(list(prompt(700, 17)), SamplingParams(max_tokens=40, ignore_eos=True))
    seen = llm.adaptive_k.correction.observed
    assert seen and {size for size, _ in seen} == {1} and sum(count for _, count in seen.values()) <= 39
    # The true ratio is far above 1; each observation moves the mean by a factor of 2 at most.
    assert max(mean for mean, count in seen.values() if count > 4) > 4


# Sampling

VOCAB, LENGTH, PROMPT = 6, 3, [2, 0, 5]


@cache
def tiny_target() -> Target:
    layer = LayerConfig(8, 16, num_heads=2, num_kv_heads=1, head_dim=4)
    model = Decoder(DecoderConfig("llama", VOCAB, 1, layer, RopeConfig(), 64, False, (None,)))
    spread_weights(model, 3)
    return Target(Path("nowhere"), model.eval().requires_grad_(False), frozenset())


@torch.inference_mode()
def exact_joint(params: SamplingParams) -> dict[tuple[int, ...], float]:
    """Joint distribution of the next tokens under the reference."""
    joint = {(): 1.0}
    for _ in range(LENGTH):
        longer = {}
        for generated, chance in joint.items():
            logits = reference.run_target(tiny_target().model, [*PROMPT, *generated], 1, ())[0]
            row = reference.compute_probs(reference.process_logits(logits[0], params, PROMPT, generated)[None], params)[
                0
            ].tolist()
            longer |= {(*generated, x): chance * p for x, p in enumerate(row) if p > 0}
        joint = longer
    return joint


@pytest.mark.parametrize(
    ("parallel", "options"),
    [
        (True, {"temperature": 1.0}),
        (False, {"temperature": 1.4, "top_k": 4, "min_p": 0.05}),
        (True, {"temperature": 0.8, "top_p": 0.85, "frequency_penalty": 0.8}),
    ],
)
def test_sampled_outputs_have_the_target_distribution(tmp_path: Path, parallel: bool, options: dict[str, Any]) -> None:
    layer = tiny_target().model.cfg.layer
    cfg = DrafterConfig(VOCAB, VOCAB, 1, layer, RopeConfig(), 64, 8, (0, 1), mask_token_id=3 if parallel else None)
    drafter = Drafter(cfg).share_weights(tiny_target().model)
    spread_weights(drafter, 4)
    save_drafter(drafter, tmp_path / "drafter")
    llm = LLM(tiny_target(), tmp_path / "drafter", 2, device="cpu", dtype="float32", threads=1, max_num_seqs=128)
    params = SamplingParams(max_tokens=LENGTH, n=1500, seed=17, **options)
    outputs = llm.generate([PROMPT], params)[0].outputs
    counts = Counter(tuple(o.token_ids) for o in outputs)
    expected = exact_joint(params)
    assert set(counts) <= set(expected)
    often = [x for x, chance in expected.items() if chance * params.n >= 5]
    seen, want = [counts[x] for x in often], [expected[x] * params.n for x in often]
    rest = params.n - sum(want)
    if rest >= 5:
        seen, want = [*seen, params.n - sum(seen)], [*want, rest]
    assert chisquare(seen, [w * sum(seen) / sum(want) for w in want]).pvalue > 1e-3
    assert sum(sum(o.num_accepted_tokens_per_pos) for o in outputs) > params.n / 50


# The public API


def test_generate_chat_and_stream_agree(terminal: None, capsys: pytest.CaptureFixture[str]) -> None:
    llm = engine("p-eagle-1", 3)
    text = bytes(prompt(700, 20)).decode()
    params = SamplingParams(max_tokens=30, stop=["def"], ignore_eos=True)
    want = expected_output(prompt(700, 20), params)
    texts, ids = [text, text[:12]], [list(prompt(700, 20)), list(prompt(700, 12))]
    by_text, by_ids = llm.generate(texts, params), llm.generate(ids, params, progress=True)
    assert [o.outputs for o in by_text] == [o.outputs for o in by_ids]
    assert [o.prompt for o in by_text] == texts and [o.prompt for o in by_ids] == [None, None]
    assert [o.prompt_token_ids for o in by_text] == ids
    check(by_text[0].outputs[0], want, counts=False)
    assert llm.generate(ids[0], params)[0].outputs == by_ids[0].outputs
    words = [{"role": "user", "content": part} for part in text.split(" ")]
    assert " output tokens/s" in capsys.readouterr().err
    assert llm.chat(words, params)[0].outputs == by_ids[0].outputs
    assert [o.outputs for o in llm.chat([words, words], [params, params])] == [by_ids[0].outputs] * 2
    assert llm.generate([]) == []
    for source in (text, ids[0], words):
        *parts, last = llm.stream(source, replace(params, logprobs=1))
        assert replace(last, logprobs=None) == by_ids[0].outputs[0] and len(last.logprobs or []) == len(want.token_ids)
        assert len(parts) > 1 and all(part.finish_reason is None for part in parts)
        for part, following in pairwise([*parts, last]):
            assert following.text.startswith(part.text) and len(following.token_ids) > len(part.token_ids)
            assert following.token_ids[: len(part.token_ids)] == part.token_ids
            assert following.is_draft_token[: len(part.token_ids)] == part.is_draft_token
            assert len(part.logprobs or []) == len(part.token_ids)
    engines.check_all_released(llm)


def test_warm_up_leaves_no_trace() -> None:
    llm, other = (engine("p-eagle-1", "auto", max_num_seqs=4) for _ in range(2))
    llm.warm_up()
    engines.check_all_released(llm)
    assert llm.acceptance_histogram == other.acceptance_histogram and llm.num_draft_tokens == 0
    assert llm.adaptive_k.acceptance.rates == other.adaptive_k.acceptance.rates
    assert not llm.adaptive_k.correction.observed
    prompt = list(pairs.TEXT[2000:2040])
    outputs = [each.generate(prompt, SamplingParams(max_tokens=20))[0].outputs[0].token_ids for each in (llm, other)]
    assert outputs[0] == outputs[1]


def test_leaving_a_stream_releases_everything() -> None:
    llm = engine("p-eagle-1", 3)
    other = llm.add_request(list(prompt(2300, 20)), LONG[0])
    for piece in llm.stream(list(prompt(700, 20)), SamplingParams(40, ignore_eos=True)):
        if piece.token_ids:
            break
    assert len(llm.scheduler.running) == 1
    while llm.has_unfinished_requests:
        llm.step()
    check(llm.build_output(other).outputs[0], expected_output(prompt(2300, 20), LONG[0]), counts=False)
    engines.check_all_released(llm)


@pytest.mark.parametrize("max_in_flight_steps", [0, 1])
@pytest.mark.parametrize("where", ["launch", "schedule", "wait"])
def test_engine_continues_after_an_interrupt(max_in_flight_steps: int, where: str) -> None:
    llm = engine("p-eagle-1", 3)
    llm.max_in_flight_steps = max_in_flight_steps
    prompts = [list(prompt(700, n)) for n in (20, 33, 5)]
    owner: Any = {"launch": llm.model_runner, "schedule": llm.scheduler, "wait": PendingStep}[where]
    original = getattr(owner, where)
    for at in (1, 4):
        calls = 0

        def interrupt(*args: Any, at: int = at) -> Any:
            nonlocal calls
            calls += 1
            if calls == at:
                raise KeyboardInterrupt
            return original(*args)

        with mock.patch.object(owner, where, interrupt), pytest.raises(KeyboardInterrupt):
            llm.generate(prompts, LONG[0])
        assert calls == at and not llm.scheduler.running and not llm.scheduler.waiting
        check_scheduler(llm.scheduler)
        for ids, output in zip(prompts, llm.generate(prompts, LONG[0]), strict=True):
            check(output.outputs[0], expected_output(tuple(ids), LONG[0], "p-eagle-1", 3), counts=True)
    while llm.has_unfinished_requests:
        llm.step()
    engines.check_all_released(llm)


# Refused requests and settings


def test_bad_requests_are_refused_without_side_effects() -> None:
    llm = engine("p-eagle-1", 3)
    bare = engine(None, 0, tokenizer=False)
    running = llm.add_request(list(prompt(700, 20)), LONG[1])
    for _ in range(3):
        llm.step()
    good = list(prompt(700, 5))
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: llm.generate([good, [0] * MAX_MODEL_LEN]), f"the prompt has {MAX_MODEL_LEN} tokens"),
        (lambda: llm.generate([good, []]), "the prompt is empty"),
        (lambda: llm.generate(""), "the prompt is empty"),
        (lambda: llm.generate([good, [3, pairs.VOCAB]]), "a prompt token is outside the vocabulary"),
        (lambda: llm.generate([good, [-1]]), "a prompt token is outside the vocabulary"),
        (lambda: llm.generate([good, good], [LONG[0]]), "1 sampling parameters for 2 prompts"),
        (lambda: llm.generate(good, SamplingParams(stop_token_ids=[pairs.VOCAB])), "--stop-token-ids 160: "),
        (lambda: llm.generate(good, SamplingParams(logit_bias={900: 1})), "--logit-bias 900: "),
        (lambda: llm.generate(good, SamplingParams(allowed_token_ids=[900])), "--allowed-token-ids 900: "),
        (
            lambda: llm.generate(good, SamplingParams(min_tokens=2, allowed_token_ids=[5, 6], stop_token_ids=[5, 6])),
            "--min-tokens 2: every token is a stop token",
        ),
        (lambda: llm.generate(good, SamplingParams(bad_words=["much too long"])), "--bad-words 'much too long': "),
        (lambda: bare.generate(good, SamplingParams(bad_words=["x"])), "--bad-words: .*tokenizer"),
        (lambda: next(llm.stream(good, SamplingParams(n=2))), "--n 2: "),
        (lambda: bare.generate(good, SamplingParams(stop=["x"])), "--stop: .*tokenizer"),
    ]
    for call, words in cases:
        with pytest.raises(UserError, match=words) as error:
            call()
        assert "\n" not in str(error.value)
        assert len(llm.scheduler.running) == 1 and not llm.scheduler.waiting
        check_scheduler(llm.scheduler)
    while llm.has_unfinished_requests:
        llm.step()
    check(llm.build_output(running).outputs[0], expected_output(prompt(700, 20), LONG[1], "p-eagle-1", 3), counts=True)
    engines.check_all_released(llm)


def test_a_request_that_may_generate_no_token_ends_alone() -> None:
    """After "e" both allowed tokens are banned."""
    llm = engine("p-eagle-1", 3)
    banned = SamplingParams(allowed_token_ids=[*b"ex"], bad_words_token_ids=[[*b"x"], [*b"ee"]])
    masked, plain = llm.generate([list(prompt(700, 20))] * 2, [banned, PLAIN[1]])
    output = masked.outputs[0]
    assert output.token_ids == [*b"e"] and output.finish_reason == "error"
    assert output.stop_reason == "allowed_token_ids, bad_words and the grammar together allow no token"
    check(plain.outputs[0], expected_output(prompt(700, 20), PLAIN[1], "p-eagle-1", 3), counts=True)
    engines.check_all_released(llm)


@pytest.mark.parametrize("when", ["first token", "decode step"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_logits_that_are_nan_end_their_request_only(when: str, temperature: float) -> None:
    llm = engine("p-eagle-1", 3)
    name = "sample_first_tokens" if when == "first token" else "sample_and_accept"
    sampler: Any = llm.model_runner.sampler
    sample, broken_slot = getattr(sampler, name), 1

    def break_logits(*args: Any) -> Any:
        slots_B, logits_TV = (args[1], args[2]) if when == "decode step" else (args[1], args[0])
        logits_TV.view(len(slots_B), -1, logits_TV.shape[1])[slots_B == broken_slot] = float("nan")
        return sample(*args)

    setattr(sampler, name, break_logits)
    prompts = [prompt(700, 20), prompt(900, 21), prompt(2300, 22)]
    params = SamplingParams(max_tokens=20, temperature=temperature, seed=3, logprobs=1)
    outputs = [output.outputs[0] for output in llm.generate([list(p) for p in prompts], params)]
    for i in (0, 2):
        check(outputs[i], expected_output(prompts[i], params, "p-eagle-1", 3), counts=False)
    assert outputs[1].finish_reason == "error" and "NaN" in str(outputs[1].stop_reason)
    assert len(outputs[1].token_ids) == (when == "decode step")
    engines.check_all_released(llm)


def test_bad_settings_are_refused(tmp_path: Path) -> None:
    wide = tmp_path / "wide"
    shutil.copytree(pairs.drafter_folder("p-eagle-1"), wide)
    set_config(wide, vocab_size=161)
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: engine(None, 3), "--num-speculative-tokens 3: .*--drafter"),
        (lambda: engine("p-eagle-1", 65), "-k 65: "),
        (lambda: engine("p-eagle-1", -1), "-k -1: "),
        (lambda: engine(None, 0, max_model_len=257), "--max-model-len 257: .* 256 tokens"),
        (lambda: engine(None, 0, max_model_len=1), "--max-model-len 1: "),
        (lambda: engine(None, 0, max_num_seqs=0), "--max-num-seqs 0: "),
        (lambda: engine(None, 0, kv_cache_dtype="int4"), "--kv-cache-dtype int4: must be auto or fp8"),
        (lambda: engine(None, 0, quantization="int4"), "--quantization int4: must be fp8"),
        (lambda: engine(None, 0, quantization="fp8"), "--quantization fp8: .*folder"),
        (
            lambda: engine(None, 0, blocks=3),
            "one sequence of 64 tokens needs .* at most 48, or raise --kv-cache-memory-bytes",
        ),
        (
            lambda: count_blocks(EngineSettings(kv_cache_memory_bytes=1500), torch.device("cuda"), 500, 64, 1),
            "at most 32, or raise --kv-cache-memory-bytes",  # the flag that was given
        ),
        (lambda: LLM(engines.target(), wide, device="cpu"), "does not fit the target: vocab_size is 161"),
        (lambda: LLM(engines.target(), tmp_path / "none", device="cpu"), "none"),
        (lambda: engine("p-eagle-1", "auto", cost_table=tmp_path / "no.json"), "--cost-table .*no.json: "),
    ]
    for make, words in cases:
        with pytest.raises(UserError, match=words) as error:
            make()
        assert "\n" not in str(error.value)
    engine(None, 0, blocks=4)


def test_more_draft_tokens_than_trained_for(tmp_path: Path) -> None:
    folder = tmp_path / "drafter"
    shutil.copytree(pairs.drafter_folder("p-eagle-1"), folder)
    set_config(folder, trained_draft_tokens=2)
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "threads": 1, "max_model_len": MAX_MODEL_LEN}
    with pytest.warns(UserWarning, match="--num-speculative-tokens 5: .* trained for 2 draft tokens"):
        llm = LLM(engines.target(), folder, 5, **options)
    check(
        llm.generate(list(prompt(700, 20)), LONG[0])[0].outputs[0],
        expected_output(prompt(700, 20), LONG[0]),
        counts=False,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LLM(engines.target(), folder, 2, **options)
        llm = LLM(engines.target(), folder, cost_table=engines.flat_cost_table(), **options)
    assert llm.adaptive_k.choices == [0, 1, 2]
    given = {**options, "cost_table": engines.flat_cost_table()}
    for trained, more in ((4, [4]), (6, [5, 6]), (8, [5, 7]), (10, [5, 7, 9]), (16, [5, 7, 9])):
        set_config(folder, trained_draft_tokens=trained)
        assert LLM(engines.target(), folder, **given).adaptive_k.choices == [0, 1, 2, 3, *more]
    llm = LLM(engines.target(), folder, synthetic_acceptance_rates=[0.5, 0.25, 0.1, 0.1], **given)
    assert llm.adaptive_k.choices == [0, 1, 2, 3, 4], "at most the number of rates"
    llm = LLM(engines.target(), folder, synthetic_acceptance_rates=[0.5] * 8, **given)
    assert llm.adaptive_k.choices == [0, 1, 2, 3, 5, 7, 8], "all rates are used"


def test_large_k_only_on_gpus_with_parallel_drafting(tmp_path: Path) -> None:
    for name, trained, on_gpu, deepest in (
        ("p-eagle-1", 16, True, [9, 12, 15]),
        ("p-eagle-1", 16, False, [5, 7, 9]),
        ("p-eagle-1", 12, True, [7, 9, 12]),
        ("p-eagle-1", 11, True, [7, 9, 11]),
        ("p-eagle-1", 10, True, [5, 7, 9]),
        ("eagle3-1", 16, True, [5, 7, 9]),
    ):
        folder = tmp_path / f"{name}-{trained}"
        shutil.copytree(pairs.drafter_folder(name), folder, dirs_exist_ok=True)
        set_config(folder, trained_draft_tokens=trained)
        cfg = read_drafter_config(folder, engines.target().model.cfg)
        assert resolve_choices(EngineSettings(), cfg, folder, on_gpu)[-3:] == deepest


@pytest.mark.parametrize(
    ("cpuinfo", "want"),
    [
        ("flags\t\t: fma avx2 avx512f", torch.float32),
        ("flags\t\t: avx512f amx_bf16", torch.bfloat16),
        ("Features\t: asimd bf16", torch.bfloat16),
        ("Features\t: asimd fphp", torch.float32),
        ("arm", torch.float32),  # features unknown
    ],
)
def test_default_dtype_on_cpus(monkeypatch, cpuinfo: str, want: torch.dtype) -> None:
    monkeypatch.setattr(loader, "cpu_fingerprint", lambda: f"model name\t: bf16\n{cpuinfo}")
    assert loader.resolve_dtype(None, torch.device("cpu")) == want
    assert loader.resolve_dtype(None, torch.device("cuda")) == torch.bfloat16
    assert loader.resolve_dtype("bfloat16", torch.device("cpu")) == torch.bfloat16


@pytest.mark.parametrize(
    ("value", "want"), [("3", 3), (" 2,1", 2), ("64", 64), ("0", None), ("", None), ("all", None), (None, None)]
)
def test_default_num_threads(monkeypatch: pytest.MonkeyPatch, value: str | None, want: int | None) -> None:
    monkeypatch.setattr(loader.os, "sched_getaffinity", lambda process: set(range(7)), raising=False)
    monkeypatch.setattr(loader.Path, "read_text", lambda path: "500000 100000\n")  # five cores
    if value is None:
        monkeypatch.delenv("OMP_NUM_THREADS")
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert loader.default_num_threads() == (want or 5)


@pytest.mark.parametrize("name", ["p-eagle-1", "eagle3-1"])
def test_drafter_with_k_0(name: str) -> None:
    llm = engine(name, 0)
    (got,) = llm.generate(list(prompt(700, 20)), LONG[0])[0].outputs
    check(got, expected_output(prompt(700, 20), LONG[0]), counts=False)
    assert got.num_drafts == 0 and got.num_accepted_tokens_per_pos == []


# KV cache in fp8


@pytest.mark.parametrize(("name", "k"), [(None, 0), ("p-eagle-1", 3), ("p-eagle-4-reduced", 5), ("eagle3-1", 2)])
def test_fp8_kv_cache(name: str | None, k: int) -> None:
    """Equals the reference with rounded keys and values: with any drafter, in any batch, with cached prefixes."""

    def attend_to_fp8(layer: int, q: Tensor, k: Tensor, v: Tensor, window: Window) -> Tensor:
        rounded = (x.clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) for x in (k, v))
        return causal_attention(layer, q, *rounded, window)

    params = SamplingParams(max_tokens=25, ignore_eos=True)
    prompts = pairs.prompts(8)
    drafter = engines.drafter(name) if name is not None else None
    llm = engine(name, k, kv_cache_dtype="fp8", prefill_chunk_tokens=7)
    assert llm.memory_bytes()["cache"] * 4 == engine(name, k).memory_bytes()["cache"]
    alone = [llm.generate(prompt, params)[0] for prompt in prompts[:3]]
    together = llm.generate(prompts, params)
    with mock.patch.object(reference, "causal_attention", attend_to_fp8):
        for got, text in zip(alone + together, prompts[:3] + prompts, strict=True):
            want = reference.generate(engines.target().model, text, params, frozenset(), drafter, k)
            assert got.outputs[0].token_ids == want.token_ids
            assert got.outputs[0].num_accepted_tokens_per_pos == want.num_accepted_tokens_per_pos


def test_fp8_kv_cache_has_four_times_the_blocks_of_fp32() -> None:
    memory = {"kv_cache_memory_bytes": 10 * 40960, "max_num_seqs": 100}
    blocks = [engine(None, 0, kv_cache_dtype=name, **memory).scheduler.pool.num_blocks for name in ("auto", "fp8")]
    assert blocks[1] == 4 * blocks[0]


# fp8 weights


@pytest.mark.parametrize(("name", "k"), [(None, 0), ("p-eagle-1", 3), ("eagle3-1", 2)])
def test_fp8_weights(name: str | None, k: int) -> None:
    """Equals the reference with dequantized weights, with any drafter."""
    target, drafter = pairs.load_pair(name or "p-eagle-1")
    with torch.no_grad():
        for layer in target.layers:
            for part in (layer.self_attn.qkv_proj, layer.self_attn.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj):
                scale = part.weight.abs().amax(1, keepdim=True) / 448
                part.weight.copy_((part.weight / scale).to(torch.float8_e4m3fn).float() * scale)
    params = SamplingParams(max_tokens=25, ignore_eos=True)
    options = {"device": "cpu", "dtype": "float32", "threads": 1, "tokenizer": False, "quantization": "fp8"}
    drafter_folder = pairs.drafter_folder(name) if name is not None else None
    with pytest.warns(UserWarning, match="--quantization fp8: slow on a CPU"):
        llm = LLM(pairs.target_folder(), drafter_folder, k, **options)
    assert llm.target.model.layers[4].mlp.down_proj.weight.dtype == torch.float8_e4m3fn
    assert llm.target.model.lm_head.weight.dtype == torch.float32
    for text, got in zip(pairs.prompts(6), llm.generate(pairs.prompts(6), params), strict=True):
        want = reference.generate(target, text, params, frozenset(), drafter if name is not None else None, k)
        assert got.outputs[0].token_ids == want.token_ids
        assert got.outputs[0].num_accepted_tokens_per_pos == want.num_accepted_tokens_per_pos


def test_what_cannot_be_quantized(monkeypatch: pytest.MonkeyPatch) -> None:
    dense, gpu = engines.target().model.cfg, torch.device("cuda")
    experts = replace(dense, layer=replace(dense.layer, experts=ExpertsConfig(4, 2, 32)))
    other = replace(dense, family="falcon", uses_transformers=True)
    bf16, fp32 = torch.bfloat16, torch.float32
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    for cfg, dtype, is_loaded, words in (
        (dense, bf16, True, "a loaded target; pass its folder"),
        (other, bf16, False, "falcon, which runs through transformers; omit the flag"),
        (experts, bf16, False, "the target has experts; omit the flag"),
        (dense, fp32, False, "needs --dtype bfloat16 on a GPU"),
        (dense, bf16, False, "compute capability 8.9 or newer; omit the flag"),
    ):
        with pytest.raises(UserError, match=f"--quantization fp8: .*{words}"):
            check_quantization("fp8", cfg, dtype, gpu, is_loaded)
    with pytest.raises(UserError, match="--kv-cache-dtype fp8: .*compute capability 8.9"):
        resolve_kv_cache_dtype("fp8", gpu)


# Soak


def test_no_leaks() -> None:
    report = soak(800, 3, parallel=True, lookahead=1)
    assert report.compared > 700 and report.aborted > 20 and report.found_tokens > 1000
    assert report.grown_mib < 64
    crowded = soak(150, 2, parallel=False, lookahead=0, blocks=9)
    assert crowded.compared > 130 and crowded.preemptions > 0
