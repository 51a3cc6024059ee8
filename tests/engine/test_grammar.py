"""Constrained outputs match their grammar and are those of the reference, with and without a drafter.

The constraints given to the reference do not use the engine's masks: choices are matched by their letters, other
grammars by a new matcher of the library for every output, with bytes as tokens.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import engines
import jsonschema
import pairs
import pytest
import reference_extras
import torch
from engines import ArrivingRequest, ExpectedOutput, check
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from scipy.stats import chisquare
from support import many
from torch import Tensor

from peagle.checkpoints.target import Target, load_tokenizer
from peagle.config import Grammar, GrammarLimits, ParserLimits, SamplingParams
from peagle.engine.grammar import (
    GrammarCompiler,
    GrammarMatcher,
    compute_bitmasks,
    from_json_schema,
    from_regex,
    to_library_grammar,
)
from peagle.engine.llm import LLM
from peagle.engine.request import CompletionOutput, Request
from peagle.errors import UserError
from peagle.kernels.sampling.noise import bits_torch, gumbel_torch
from peagle.speculative import reference

pytestmark = pytest.mark.usefixtures("one_thread")

EOS = frozenset({pairs.EOS_ID, 500})  # one that is never text, one beyond the vocabulary
TEXTUAL = frozenset({ord("e"), 500})  # one that is text as well
MAX_MODEL_LEN = 96
TIGHT = {ord(" "): -9.0, ord("\n"): -30.0}  # the target never saw JSON and would emit whitespace
LETTERS = [*b"abcdefghijklmnopqrstuvwxyz ", pairs.EOS_ID]
CHOICES = ("the work", "the", "a copy", "any", "of e")


@cache
def target(eos: frozenset[int] = EOS) -> Target:
    own = engines.target()
    return Target(own.folder, own.model, eos)


def engine(name: str | None, k: int | str, eos: frozenset[int] = EOS, **options: Any) -> LLM:
    own = target(eos)
    with mock.patch.object(engines, "target", lambda: own):
        return engines.engine(name, k, **{"max_model_len": MAX_MODEL_LEN, **options})


def unpack_bitmasks(bits_NQW: Tensor, vocab_size: int) -> Tensor:
    """uint8 [N, Q, bytes] -> bool [N, Q, V]."""
    bits = (bits_NQW[..., None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return bits.bool().flatten(2)[..., :vocab_size]


# Constraints for the reference


class ChoiceConstraint:
    """One of several strings, matched by their letters."""

    def __init__(self, choices: Sequence[str], eos: frozenset[int], ignore_eos: bool) -> None:
        self.choices, self.eos = [c.encode() for c in choices], frozenset() if ignore_eos else eos
        self.never = eos

    def allowed(self, output: Sequence[int]) -> Tensor | None:
        generated = bytes(output)
        rest = [c[len(generated) :] for c in self.choices if c.startswith(generated)]
        letters = {r[0] for r in rest if r} - self.never
        if not letters or self.never & set(output):
            return None
        may = torch.zeros(pairs.VOCAB, dtype=torch.bool)
        may[[t for t in letters | (self.eos if b"" in rest else set()) if t < pairs.VOCAB]] = True
        return may if may.any() else None

    def complete(self, output: Sequence[int]) -> bool:
        return bytes(output) in self.choices and self.allowed(output) is None


@cache
def byte_tokens() -> LLTokenizer:
    tokens = [bytes([b]) for b in range(pairs.VOCAB)]
    end = pairs.VOCAB
    table = SimpleNamespace(eos_token_id=end, bos_token_id=None, tokens=[*tokens, b"<end>"], special_token_ids=[end])

    class Table(SimpleNamespace):
        def __call__(self, text: bytes) -> list[int]:
            return list(text)

    return LLTokenizer(TokenizerWrapper(Table(**vars(table))))


class LibraryConstraint:
    """A new matcher of the library for every output."""

    def __init__(self, grammar: Grammar, eos: frozenset[int], ignore_eos: bool) -> None:
        self.library_grammar = to_library_grammar(grammar)
        self.eos, self.ends = frozenset(t for t in eos if t < pairs.VOCAB), not ignore_eos

    def after(self, output: tuple[int, ...]) -> tuple[frozenset[int], bool]:
        """Tokens that may follow, and whether the text may end. Nothing if the output itself does not match."""
        matcher = LLMatcher(byte_tokens(), self.library_grammar, log_level=0)
        if max([*output, 0]) >= pairs.VOCAB or self.eos & set(output) or not matcher.consume_tokens(list(output)):
            return frozenset(), False
        accepting = matcher.is_accepting()
        bits = matcher.compute_bitmask()
        may = {t for t in range(pairs.VOCAB) if bits[t // 8] >> t % 8 & 1}
        return frozenset(may - self.eos), accepting

    def allowed(self, output: Sequence[int]) -> Tensor | None:
        text, may_end = self.after(tuple(output))
        if not text:
            return None
        may = torch.zeros(pairs.VOCAB, dtype=torch.bool)
        may[sorted(text | (self.eos if may_end and self.ends else frozenset()))] = True
        return may

    def complete(self, output: Sequence[int]) -> bool:
        text, may_end = self.after(tuple(output))
        return may_end and not text


@cache
def constraint(grammar: Grammar, eos: frozenset[int], ignore_eos: bool) -> reference_extras.Constraint:
    if grammar == choice():
        return ChoiceConstraint(CHOICES, eos, ignore_eos)
    return LibraryConstraint(grammar, eos, ignore_eos)


def from_choice(choices: Sequence[str]) -> Grammar:
    """One of these strings."""
    return from_regex("|".join("".join(f"\\x{{{ord(c):x}}}" for c in choice) for choice in choices))


@cache
def choice() -> Grammar:
    return from_choice(CHOICES)


# Expected outputs


@cache
def expected_output(
    prompt: tuple[int, ...],
    params: SamplingParams,
    name: str | None = None,
    k: int = 0,
    eos: frozenset[int] = EOS,
) -> ExpectedOutput:
    rules = constraint(params.grammar, eos, params.ignore_eos) if params.grammar is not None else None
    if not params.greedy:
        return expected_sampled_output(prompt, params, eos, rules)
    least, original = float("inf"), reference.compute_probs

    def watched(logits_KV: Tensor, p: SamplingParams) -> Tensor:
        nonlocal least
        best = logits_KV.double().topk(2, -1).values
        least = min([least, *(best[:, 0] - best[:, 1]).tolist()])
        return original(logits_KV, p)

    read, propose = (
        engines.memoized(reference.run_target, name),
        engines.memoized(reference.propose_draft_tokens, name),
    )
    with mock.patch.multiple(reference, compute_probs=watched, run_target=read, propose_draft_tokens=propose):
        drafter = engines.drafter(name) if name else None
        made = reference_extras.generate(
            target().model, prompt, params, eos, drafter, k, MAX_MODEL_LEN, decode=engines.decode, constraint=rules
        )
    clear = least > engines.MIN_LEAD
    return ExpectedOutput(made.token_ids, made.finish_reason, made.stop_reason, made.text, made.logprobs, clear, made)


def expected_sampled_output(
    prompt: tuple[int, ...], params: SamplingParams, eos: frozenset[int], rules: reference_extras.Constraint | None
) -> ExpectedOutput:
    out = reference.Generation(list(prompt), params, eos, min(params.max_tokens, MAX_MODEL_LEN - len(prompt)))
    generated = out.token_ids
    logprobs: list[dict[int, float]] = []
    least = float("inf")
    while True:
        allowed = rules.allowed(generated) if rules is not None else None
        if rules is not None and allowed is None:
            return ExpectedOutput(
                generated, "error", None, engines.decode(generated), logprobs, least > engines.MIN_LEAD
            )
        raw = engines.logits_after((*prompt, *generated))
        logits = reference_extras.process_logits(raw, params, prompt, generated, eos, allowed)
        kept = reference.compute_probs(logits[None], params)[0] > 0
        words = bits_torch(
            torch.tensor(params.seed), torch.tensor(len(prompt) + len(generated)), torch.arange(len(logits))
        )
        scores = (logits + params.temperature * gumbel_torch(words).double()).masked_fill(~kept, -torch.inf)
        best = scores.topk(2).values
        least = min(least, float(best[0] - best[1]))
        generated.append(int(scores.argmax()))
        if params.logprobs is not None:
            logprobs.append(reference_extras.compute_token_logprobs(raw, generated[-1], params.logprobs))
        end = reference_extras.find_finish(out, params.stop, engines.decode, rules)
        if end is not None:
            return ExpectedOutput(generated, *end, logprobs, least > engines.MIN_LEAD)


def check_output(got: CompletionOutput, want: ExpectedOutput, counts: bool) -> None:
    if got.finish_reason == "error":
        assert "continues a matching output" in str(got.stop_reason)
        got = replace(got, stop_reason=None)
    check(got, want, counts and got.finish_reason != "error")


def prompt(start: int, length: int = 20) -> tuple[int, ...]:
    return tuple(pairs.TEXT[start : start + length])


# Outputs match and are those of the reference


def schemas() -> st.SearchStrategy[dict[str, Any]]:
    word = st.sampled_from(["a", "work", "of", "x y", 'q"', "n\u00e9"])
    simple = st.one_of(
        st.just({"type": "boolean"}),
        st.just({"type": "null"}),
        st.integers(-40, 40).map(lambda low: {"type": "integer", "minimum": low, "maximum": low + 25}),
        st.lists(word, min_size=1, max_size=3, unique=True).map(lambda words: {"enum": words}),
        st.integers(0, 6).map(lambda most: {"type": "string", "maxLength": most}),
        st.sampled_from([{"type": "string", "pattern": "^[a-f]{2,4}$"}, {"const": {"k": [1, None]}}]),
        st.just({"anyOf": [{"type": "boolean"}, {"type": "string", "minLength": 2, "maxLength": 3}]}),
    )

    def larger(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
        array = st.tuples(inner, st.integers(0, 1), st.integers(1, 2)).map(
            lambda a: {"type": "array", "items": a[0], "minItems": a[1], "maxItems": a[2]}
        )
        fields = st.dictionaries(word, inner, min_size=1, max_size=2)
        return array | st.tuples(fields, st.booleans()).map(
            lambda f: {
                "type": "object",
                "properties": f[0],
                "required": list(f[0]) if f[1] else [],
                "additionalProperties": False,
            }
        )

    return st.recursive(simple, larger, max_leaves=3)


SEEN: Counter[str] = Counter()
PAIRS = [(None, 0), ("p-eagle-1", 4), ("eagle3-1", 2)]


def test_json_matches_its_schema_with_and_without_drafter() -> None:
    """Some outputs are cut by max_tokens; the others validate."""
    llms = {pair: engine(*pair) for pair in PAIRS}

    @many(8)
    @given(schemas(), st.sampled_from([700, 2300, 4100]), st.integers(0, 3))
    def property_(schema: dict[str, Any], start: int, seed: int) -> None:
        params = SamplingParams(max_tokens=60, grammar=from_json_schema(schema), logit_bias=TIGHT)
        if seed:
            params = replace(params, temperature=2.0, seed=seed, top_p=0.95, logprobs=1)
        for (name, k), llm in llms.items():
            want = expected_output(prompt(start), params, *((name, k) if name and params.greedy else ()))
            (got,) = llm.generate([list(prompt(start))], params)[0].outputs
            if want.is_clear:
                check_output(got, want, counts=name is not None)
                SEEN["equal"] += 1
            if got.finish_reason == "stop":
                jsonschema.validate(json.loads(got.text), schema)
                SEEN["finished"] += 1
                SEEN["accepted"] += sum(got.num_accepted_tokens_per_pos)
            else:
                assert got.finish_reason == (
                    "error" if "\u00e9" in json.dumps(schema, ensure_ascii=False) else "length"
                )

    SEEN.clear()
    property_()
    for llm in llms.values():
        engines.check_all_released(llm)
    assert SEEN["equal"] > 16 and SEEN["finished"] > 10 and SEEN["accepted"] > 5, SEEN


def make_params(**options: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 24, **options})


@cache
def constrained_params() -> list[SamplingParams]:
    words = from_regex("[a-z]{2,7}( [a-z]{2,7}){0,4}")
    listed = from_json_schema({"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 4})
    return [
        make_params(grammar=choice()),
        make_params(grammar=choice(), temperature=3.0, seed=5, top_k=2),
        make_params(grammar=choice(), min_tokens=20),  # the grammar ends earlier, and wins
        make_params(grammar=choice(), ignore_eos=True),
        make_params(grammar=words, min_tokens=9),
        make_params(grammar=words, ignore_eos=True),
        make_params(grammar=words, min_tokens=6, stop_token_ids=[*range(ord("a"), ord("z") + 1), ord(" ")]),
        make_params(grammar=words, stop=["t", "he"], logprobs=2),
        make_params(grammar=words, stop_token_ids=[ord("o"), ord("i")]),
        make_params(grammar=words, bad_words_token_ids=[[ord("t"), ord("h")], [ord(" ")]], allowed_token_ids=LETTERS),
        make_params(grammar=words, repetition_penalty=1.6, frequency_penalty=0.5, presence_penalty=0.5, logprobs=0),
        make_params(grammar=words, temperature=2.5, seed=8, min_p=0.01, presence_penalty=1.0, logprobs=2),
        make_params(grammar=words, temperature=1.5, seed=9, top_p=0.8, logit_bias={ord("z"): 4.0, pairs.EOS_ID: 9.0}),
        make_params(grammar=listed, logit_bias=TIGHT),
        make_params(grammar=listed, temperature=2.0, seed=1, logit_bias=TIGHT),
        make_params(grammar=from_regex("[ab]{3}\u00e9"), logprobs=1),  # é is not in the vocabulary
    ]


PLAIN = [
    SamplingParams(max_tokens=30),
    SamplingParams(max_tokens=30, temperature=1.6, seed=3),
    SamplingParams(max_tokens=MAX_MODEL_LEN, ignore_eos=True),
    SamplingParams(max_tokens=MAX_MODEL_LEN, ignore_eos=True, temperature=0.5, seed=4),
    SamplingParams(max_tokens=20, stop=["th"], logprobs=1),
    SamplingParams(max_tokens=24, repetition_penalty=1.3),
]


@pytest.mark.parametrize(
    ("name", "k", "eos"),
    [
        (None, 0, TEXTUAL),
        ("p-eagle-1", 3, EOS),
        ("p-eagle-4-reduced", 5, TEXTUAL),
        ("eagle3-4-reduced", 3, EOS),
        ("p-eagle-1", "auto", EOS),
        ("eagle3-1", "auto", TEXTUAL),
    ],
)
def test_mixed_batches(name: str | None, k: int | str, eos: frozenset[int]) -> None:
    """With too few blocks, aborts, and a number of draft tokens that changes from step to step."""
    rng = random.Random(f"{name} {k} {sorted(eos)}")
    fixed = name is not None and isinstance(k, int)
    requests = []
    for params in [*constrained_params(), *PLAIN]:
        long = params.max_tokens == MAX_MODEL_LEN  # fill the KV cache from the start
        stays = rng.randint(0, 12) if rng.random() < 0.1 and not long else None
        start, length = rng.choice([700, 2300]), rng.randint(14, 26)
        requests.append(ArrivingRequest(prompt(start, length), params, 0 if long else rng.randint(1, 9), stays))
    rng.shuffle(requests)
    expected = [expected_output(r.prompt, r.params, *((name, k) if fixed else (None, 0)), eos) for r in requests]
    llm = engine(name, k, eos, blocks=7, max_num_seqs=5)
    if k == "auto":
        llm.scheduler.choose_k = lambda batch: rng.choice(llm.adaptive_k.choices)
    groups = engines.run_requests(llm, requests)
    clear = 0
    for request, group, want in zip(requests, groups, expected, strict=True):
        (got,) = llm.build_output(group).outputs
        if got.finish_reason == "abort":
            assert got.token_ids == want.token_ids[: len(got.token_ids)] or not want.is_clear
        elif want.is_clear:
            check_output(got, want, counts=fixed)
            clear += 1
        if request.params.grammar is not None and request.params.ignore_eos:
            assert not eos & set(got.token_ids)
    assert clear > 12
    assert sum(g.requests[0].num_preemptions for g in groups) > 0
    reasons = Counter(llm.build_output(g).outputs[0].finish_reason for g in groups)
    assert reasons["error"] > 0 and reasons["stop"] > 5 and reasons["length"] > 1, reasons


@pytest.mark.parametrize("num_plain", [0, 3])
def test_preempted_requests_continue_in_their_grammar(num_plain: int) -> None:
    lines = from_regex("[a-z ]{1,200}")
    params = [
        make_params(max_tokens=66, ignore_eos=True, grammar=lines),
        make_params(max_tokens=60, min_tokens=60, grammar=lines),
    ]
    requests = [ArrivingRequest(prompt(start, 18), p) for p in params for start in (700, 2300)]
    plain = [replace(r, params=replace(r.params, grammar=None)) for r in requests[:num_plain]]
    requests[:num_plain] = plain
    llm = engine("p-eagle-1", 4, blocks=9)
    sampler: Any = llm.model_runner.sampler
    send = sampler.send_grammar_masks

    def check_and_send(requests: list[Request], draft_token_ids: list[list[int]], awaited: bool = False) -> None:
        """The masks are for the draft tokens that the step verifies, also right after a request was resumed."""
        current = [llm.model_runner.state.token_ids_SN[r.slot, 1:].tolist() for r in requests]
        assert all(own == now[: len(own)] for own, now in zip(draft_token_ids, current, strict=True))
        send(requests, draft_token_ids, awaited)

    sampler.send_grammar_masks = check_and_send
    groups = engines.run_requests(llm, requests)
    for request, group in zip(requests, groups, strict=True):
        want = expected_output(request.prompt, request.params, "p-eagle-1", 4)
        assert want.is_clear and len(want.token_ids) >= 60
        check(llm.build_output(group).outputs[0], want, counts=False)
    assert sum(g.requests[0].num_preemptions for g in groups) > 0


def test_n_outputs_and_stream() -> None:
    llm = engine("p-eagle-1", 3, max_num_seqs=3)
    params = make_params(grammar=choice(), temperature=20.0, seed=2, n=5)
    (output,) = llm.generate([list(prompt(700))], params)
    for i, got in enumerate(output.outputs):
        check(got, expected_output(prompt(700), replace(params, n=1, seed=2 + i)), counts=False)
        assert got.text in CHOICES
    assert len({o.text for o in output.outputs}) > 1
    for own in (make_params(grammar=choice()), constrained_params()[-1]):
        pieces = list(llm.stream(list(prompt(2300)), own))
        want = expected_output(prompt(2300), own)
        assert pieces[-1].text == want.text
        assert [p.finish_reason for p in pieces] == [None] * (len(pieces) - 1) + [want.finish_reason]
    engines.check_all_released(llm)


# Sampling


TEMPERATURE = 3.0


def exact_probs(start: tuple[int, ...]) -> dict[str, float]:
    """Probability of each choice under the target."""
    rules, params = (
        ChoiceConstraint(CHOICES, EOS, False),
        SamplingParams(temperature=TEMPERATURE, top_p=0.98, grammar=choice()),
    )
    open_, ended = {(): 1.0}, Counter[str]()
    while open_:
        longer: dict[tuple[int, ...], float] = {}
        for generated, chance in open_.items():
            if rules.complete(generated):
                ended[bytes(generated).decode()] += chance  # type: ignore[assignment]
                continue
            logits = reference_extras.process_logits(
                engines.logits_after((*start, *generated)), params, start, generated, EOS, rules.allowed(generated)
            )
            for token, p in enumerate(reference.compute_probs(logits[None], params)[0].tolist()):
                if p and token in EOS:
                    ended[bytes(generated).decode()] += chance * p  # type: ignore[assignment]
                elif p:
                    longer[(*generated, token)] = chance * p
        open_ = longer
    return dict(ended)


def chisquare_pvalue(counts: Counter[str], expected: dict[str, float]) -> float:
    assert set(counts) <= set(expected)
    total = sum(counts.values())
    often = [c for c, p in expected.items() if p * total >= 5]
    assert len(often) >= 3
    got, want = [counts[c] for c in often], [expected[c] * total for c in often]
    rest = total - sum(got), total - sum(want)
    if rest[1] > 1:
        got, want = [*got, rest[0]], [*want, rest[1]]
    return float(chisquare(got, [w * sum(got) / sum(want) for w in want]).pvalue)


@pytest.mark.parametrize(("name", "k"), [("p-eagle-1", 3), ("eagle3-1", 2)])
def test_sampled_outputs_have_the_constrained_distribution(name: str, k: int) -> None:
    start = prompt(700)
    params = SamplingParams(max_tokens=12, temperature=TEMPERATURE, top_p=0.98, grammar=choice(), seed=0, n=500)
    llm = engine(name, k, max_num_seqs=50)
    counts = Counter(o.text for o in llm.generate([list(start)], params)[0].outputs)
    assert chisquare_pvalue(counts, exact_probs(start)) > 1e-3
    if name != "eagle3-1":
        return
    own: Counter[str] = Counter()  # of the reference with sampled draft tokens
    for seed in range(100):
        made = reference_extras.generate(
            target().model, start, replace(params, n=1, seed=seed), EOS, engines.drafter(name), k, MAX_MODEL_LEN,
            sample_draft_tokens=True, decode=engines.decode, constraint=ChoiceConstraint(CHOICES, EOS, False),
        )  # fmt: skip
        own[str(made.text)] += 1
    assert chisquare_pvalue(own, exact_probs(start)) > 1e-3


# Bitmasks


@dataclass(frozen=True)
class Vocabulary:
    """A vocabulary size that differs from the tokenizer's, and EOS ids of any kind."""

    size: int
    eos: frozenset[int]


@cache
def compiler_for(vocabulary: Vocabulary) -> GrammarCompiler:
    return GrammarCompiler(engines.tokenizer(), vocabulary.size, vocabulary.eos)


VOCABULARIES = [
    Vocabulary(v, e) for v in (pairs.VOCAB, 123, 177, 160 + 8, 400) for e in (EOS, TEXTUAL, frozenset[int]())
]
PATTERNS = ["[a-z]{2,9}", "(the|a) [a-e]*", "x{3}", "\\{\\}|[a-c\u00e9]+"]


@many(80)
@given(
    st.sampled_from(VOCABULARIES),
    st.lists(
        st.tuples(st.sampled_from(PATTERNS), st.booleans(), st.randoms(use_true_random=False)), min_size=1, max_size=3
    ),
    st.integers(0, 4),
)
def test_bitmasks_of_a_batch(vocabulary: Vocabulary, requests: list[tuple[str, bool, random.Random]], k: int) -> None:
    """Each row equals the library's mask of that output alone; computing masks does not change the matchers."""
    own, states, rules = compiler_for(vocabulary), [], []
    for pattern, ignore_eos, rng in requests:
        grammar = from_regex(pattern)
        rule = LibraryConstraint(grammar, vocabulary.eos, ignore_eos)
        matcher = GrammarMatcher(own, grammar, ignore_eos)
        generated = walk(rule, rng, rng.randint(0, 3), vocabulary.size)
        assert all(matcher.accept_token(t) for t in generated)
        drafts = walk(rule, rng, k, vocabulary.size, generated)
        drafts = [rng.randrange(vocabulary.size) if rng.random() < 0.15 else t for t in drafts]
        drafts += [rng.choice([5, vocabulary.size - 1, 499, 10**6]) for _ in range(k - len(drafts))]
        states.append((matcher, drafts))
        rules.append((rule, generated))
    for _ in range(2):
        masks = unpack_bitmasks(compute_bitmasks(states), vocabulary.size)
        assert masks.shape == (len(states), k + 1, vocabulary.size)
        for (_, drafts), (rule, generated), rows in zip(states, rules, masks, strict=True):
            for j, row in enumerate(rows):
                text, may_end = rule.after((*generated, *drafts[:j]))
                text = {t for t in text if t < vocabulary.size}
                ends = {t for t in vocabulary.eos if t < vocabulary.size} if may_end and rule.ends else set()
                want = set(text) | ends if text else set(range(vocabulary.size))
                assert set(row.nonzero()[:, 0].tolist()) == want
    for (matcher, _), (rule, generated) in zip(states, rules, strict=True):
        text, may_end = rule.after(tuple(generated))
        assert matcher.is_complete == (may_end and not {t for t in text if t < vocabulary.size})


def walk(
    rule: LibraryConstraint, rng: random.Random, steps: int, vocab: int, generated: Sequence[int] = ()
) -> list[int]:
    """A random text that the grammar allows."""
    more: list[int] = []
    for _ in range(steps):
        may = [t for t in sorted(rule.after((*generated, *more))[0]) if t < vocab]
        if not may:
            break
        more.append(rng.choice(may))
    return more


def test_grammar_is_recompiled_when_its_limits_are_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of one grammar share the memory limits of its compilation."""
    own = GrammarCompiler(engines.tokenizer(), pairs.VOCAB, EOS)
    grammar = from_regex(".*a.{6}b.*c.{5}d")
    rule = LibraryConstraint(grammar, EOS, False)
    monkeypatch.setattr("peagle.engine.grammar.LIMITS", GrammarLimits(parser=ParserLimits(max_lexer_states=40)))
    num_recompiled = 0
    for seed in range(6):
        rng, matcher, generated = random.Random(seed), GrammarMatcher(own, grammar), []
        for _ in range(12):
            before = own.compile(grammar)
            (rows,) = unpack_bitmasks(compute_bitmasks([(matcher, [])]), pairs.VOCAB)
            num_recompiled += own.compile(grammar) is not before
            want = rule.allowed(generated)
            assert want is not None and torch.equal(rows[0], want)
            generated.append(rng.choice(b"abcd"))
            assert matcher.accept_token(generated[-1])
    assert num_recompiled > 3


# Refused grammars


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def recursive_schema() -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "array"}
    schema["items"] = schema
    return schema


BAD_SCHEMAS: list[tuple[Any, str]] = [
    ("{}", "must be an object, not str"),
    ([1], "must be an object, not list"),
    (None, "must be an object, not NoneType"),
    (False, "allows no output"),
    ({"type": 5}, "type must be a string"),
    ({"type": "strin"}, "Invalid type: strin"),
    ({"not": {"type": "string"}}, "not"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"if": {"type": "string"}, "then": {"minLength": 3}}, "if"),
    ({"x-guidance": {"lenient": True}, "not": {}}, "not"),  # asks the library to ignore unsupported keywords
    ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "oneOf"),
    ({"type": "string", "format": "nonsense"}, "Unknown format"),
    ({"type": "string", "pattern": "(("}, "unclosed group"),
    ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
    ({"type": "integer", "minimum": 5, "maximum": 3}, "Unsatisfiable"),
    ({"enum": []}, "Unsatisfiable"),
    ({"$ref": "#"}, "nothing matches it"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "nothing matches it"),
    ({"$ref": "#/$defs/none"}, "does not exist"),
    ({"$ref": "http://127.0.0.1:1/schema.json"}, "not supported"),
    ({"$ref": "file:///etc/passwd"}, "not supported"),
    ({"default": float("nan")}, "JSON cannot represent"),
    ({"default": {1, 2}}, "JSON cannot represent"),
    ({"const": "\ud800"}, "not supported"),
    (nested(60), "nested more than"),
    (nested(5_000), "nested more than"),
    ({"description": "x" * 70_000}, "65536"),
    (recursive_schema(), "nested more than"),
    ({"enum": [f"v{i}" for i in range(100_000)]}, "too many values"),
    ({"type": "integer", "multipleOf": 999_983}, "too complex"),
    ({"allOf": [{"type": "string", "pattern": f".*{i}.*x{{1,50}}"} for i in range(25)]}, "too complex"),
]


@pytest.mark.parametrize(("schema", "says"), BAD_SCHEMAS, ids=[str(i) for i in range(len(BAD_SCHEMAS))])
def test_bad_schemas(schema: Any, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if says == "too complex":
        monkeypatch.setattr("peagle.engine.grammar.LIMITS", GrammarLimits(compile_cpu_s=1))
    with pytest.raises(UserError) as caught:
        from_json_schema(schema)
    assert says in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("(", "unclosed group"),
        ("(a)\\1", "backreferences"),
        ("", "only the empty text"),
        ("[^\\s\\S]", "nothing matches it"),
        ("(" * 5000 + ")" * 5000, "not supported"),
        ("a" * 70_000, "65536"),
        (7, "must be a string, not int"),
    ],
)
def test_bad_expressions(pattern: Any, says: str) -> None:
    with pytest.raises(UserError, match=says):
        from_regex(pattern)


def test_requirements() -> None:
    with mock.patch.dict(sys.modules, {"llguidance": None}), pytest.raises(UserError, match=r"peagle\[serve\]"):
        from_json_schema(True)
    with pytest.raises(UserError, match="tokenizer.json"):
        GrammarCompiler(SimpleNamespace(), pairs.VOCAB, EOS)  # type: ignore[arg-type]
    broken = SimpleNamespace(backend_tokenizer=SimpleNamespace(to_str=lambda: "{}"))
    with pytest.raises(UserError, match="tokenizer is not supported"):
        GrammarCompiler(broken, pairs.VOCAB, EOS)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="--grammar"):
        SamplingParams(grammar="a|b")  # type: ignore[arg-type]
    params, ids = make_params(grammar=choice()), list(prompt(700))
    with pytest.raises(UserError, match="needs a tokenizer"):
        engine(None, 0, tokenizer=False).generate(ids, params)
    with pytest.raises(UserError, match="synthetic"):
        engine("p-eagle-1", 3, synthetic_acceptance_rates=[0.9, 0.5, 0.2]).generate(ids, params)
    with pytest.raises(UserError, match="the reference has no tokenizer"):
        reference.generate(target().model, ids, params)


def test_grammar_without_a_first_token_is_refused() -> None:
    llm = engine("p-eagle-1", 3)
    with pytest.raises(UserError, match="can start a matching output"):
        llm.generate([list(prompt(700))], make_params(grammar=from_regex("\u00e9")))
    engines.check_all_released(llm)


def test_real_tokenizer(smollm2: Path) -> None:
    """Tokens with several characters, across parts of the grammar, and characters of several tokens."""
    tokenizer = load_tokenizer(smollm2)
    own = GrammarCompiler(tokenizer, 49_152, {0, 2})
    schema = {
        "type": "array",
        "items": {"enum": ["\u00e9t\u00e9 \u2603", 'say "x"', 12.5, None]},
        "minItems": 3,
        "maxItems": 4,
    }
    rng, matcher, generated = random.Random(0), GrammarMatcher(own, from_json_schema(schema)), []
    while not matcher.is_complete:
        draft = generated[-1:]  # usually wrong
        (rows,) = unpack_bitmasks(compute_bitmasks([(matcher, draft)]), 49_152)
        generated.append(rng.choice(rows[0].nonzero()[:, 0].tolist()))
        assert matcher.accept_token(generated[-1]) and len(generated) < 200
    jsonschema.validate(json.loads(tokenizer.decode(generated)), schema)
    assert max(len(tokenizer.decode([t])) for t in generated) > 1
    costly = GrammarMatcher(own, from_regex("a{1000000}"))  # compiles with byte tokens, fails with these
    letter = tokenizer.convert_tokens_to_ids("a")
    compute_bitmasks([(costly, [letter, letter])])
    assert not costly.accept_token(letter) and "too many expressions" in costly.error


def test_choices_with_special_characters() -> None:
    texts = ['a "b"', "x/y\\z", "new\nline", "^$.*[]()", "tab\t{1}"]
    llm = engine(None, 0)
    for text in texts:
        (got,) = llm.generate([list(prompt(700))], make_params(grammar=from_choice([text])))[0].outputs
        assert (got.text, got.finish_reason) == (text, "stop")


def test_compiled_grammars_are_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peagle.engine.grammar.LIMITS", GrammarLimits(max_cached=2))
    own = GrammarCompiler(engines.tokenizer(), pairs.VOCAB, EOS)
    first = [from_regex(p) for p in ("a+", "b+", "c+")]
    compiled = [own.compile(g) for g in first[:2]]
    assert own.compile(first[0]) is compiled[0]
    own.compile(first[2])
    assert own.compile(first[0]) is compiled[0] and own.compile(first[1]) is not compiled[1]
