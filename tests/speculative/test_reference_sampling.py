"""Sampled output of the reference has the target's distribution for any drafter.

`verify` is compared with the target's distribution in three ways: exactly, by enumerating every decision it can take;
by counting many draws; and inside whole generations. Wrong versions of it must fail.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, reject
from hypothesis import strategies as st
from scipy.stats import chisquare
from support import many
from torch import Tensor

from peagle.config import DecoderConfig, DrafterConfig, LayerConfig, RopeConfig, SamplingParams
from peagle.kernels.attention.dense import causal_attention
from peagle.models.decoder import Decoder
from peagle.models.drafter import Drafter
from peagle.speculative import reference
from peagle.speculative.reference import DraftProposal, compute_probs, generate

Verify = Callable[[DraftProposal, Tensor, torch.Generator], tuple[int, int]]
Rows = dict[tuple[int, ...], list[float]]  # a distribution after each sequence of tokens
TOLERATED = 1e-3  # p-value: a right implementation falls below in one seed of a thousand, and seeds are fixed
CAUGHT = 1e-9


pytestmark = pytest.mark.usefixtures("one_thread")


# The distribution of one token


class Borderline(Exception):
    pass


def naive_distribution(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    """Computes the distribution token by token; raises Borderline where rounding would decide."""
    order = sorted(range(len(logits)), key=lambda i: -logits[i])
    least = logits[order[top_k - 1]] if 0 < top_k <= len(logits) else -math.inf
    order = [i for i in order if logits[i] >= least]
    weights = [math.exp((logits[i] - logits[order[0]]) / temperature) for i in order]
    total, mass, kept = sum(weights), 0.0, 0
    for weight in weights:
        if top_p < 1.0 and abs(mass - top_p) < 1e-9:
            raise Borderline
        if mass >= top_p < 1.0:
            break
        mass += weight / total
        kept += 1
    kept += sum(logits[i] == logits[order[kept - 1]] for i in order[kept:])  # equals stay together
    probs = [0.0] * len(logits)
    for i, weight in zip(order[:kept], weights[:kept], strict=True):
        probs[i] = weight / sum(weights[:kept])
    return probs


LOGIT = st.integers(-20_000, 20_000).map(lambda n: n / 1024) | st.integers(-3, 3).map(float)  # and ties
LOGITS = st.lists(LOGIT, min_size=1, max_size=9)


@many(1000)
@given(
    logits=LOGITS,
    temperature=st.floats(0.05, 5.0) | st.just(1.0),
    top_k=st.integers(0, 12),
    top_p=st.floats(0.01, 1.0) | st.just(1.0),
)
def test_the_distribution_matches_the_naive_one(
    logits: list[float], temperature: float, top_k: int, top_p: float
) -> None:
    try:
        want = naive_distribution(logits, temperature, top_k, top_p)
    except Borderline:
        reject()
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    probs = compute_probs(torch.tensor([logits]), params)[0]
    assert probs.dtype == torch.float64
    assert float(probs.sum()) == pytest.approx(1.0, abs=1e-12)
    got = probs.tolist()
    assert sorted(got) == pytest.approx(sorted(want), abs=1e-9)
    for value in set(logits):  # token by token, but top-p may keep any of equally likely ones
        alike = [i for i, x in enumerate(logits) if x == value]
        assert sorted(got[i] for i in alike) == pytest.approx(sorted(want[i] for i in alike), abs=1e-9)


@many(100)
@given(st.lists(st.lists(LOGIT, min_size=5, max_size=5), min_size=1, max_size=4))
def test_rows_do_not_mix(rows: list[list[float]]) -> None:
    logits = torch.tensor(rows)
    for params in (
        SamplingParams(),
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=1.3, top_k=2, top_p=0.9),
        SamplingParams(temperature=1.0, top_p=0.5),
    ):
        together = compute_probs(logits, params)
        apart = torch.cat([compute_probs(row[None], params) for row in logits])
        torch.testing.assert_close(together, apart)


@many(300)
@given(LOGITS)
def test_greedy_is_one_hot(logits: list[float]) -> None:
    probs = compute_probs(torch.tensor([logits]), SamplingParams())[0].tolist()
    assert sorted(probs) == [0.0] * (len(logits) - 1) + [1.0]
    assert logits[probs.index(1.0)] == max(logits)


def test_ties() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0]])
    two = compute_probs(logits, SamplingParams(temperature=1.0, top_k=2))[0]
    assert two.tolist() == pytest.approx([0, 1 / 3, 1 / 3, 1 / 3])  # none of equals is preferred
    half = compute_probs(torch.zeros(1, 4), SamplingParams(temperature=1.0, top_p=0.5))[0]
    assert half.tolist() == [0.25] * 4  # nor here


@pytest.mark.parametrize("top_k", [4, 5, 1000])
def test_top_k_beyond_the_vocabulary_is_off(top_k: int) -> None:
    logits = torch.tensor([[0.5, -1.0, 2.0, 0.0]])
    off = compute_probs(logits, SamplingParams(temperature=0.8))
    assert torch.equal(compute_probs(logits, SamplingParams(temperature=0.8, top_k=top_k)), off)


@pytest.mark.parametrize("top_p", [1e-9, 1e-300, 5e-324])
def test_tiny_top_p_keeps_the_best_token(top_p: float) -> None:
    logits = torch.tensor([[0.5, -1.0, 0.6, 0.0]])
    probs = compute_probs(logits, SamplingParams(temperature=1.0, top_p=top_p))
    assert probs.tolist() == [[0, 0, 1, 0]]


def test_top_k_comes_before_top_p() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    probs = compute_probs(logits, SamplingParams(temperature=1.0, top_k=2, top_p=0.5))
    assert probs[0].tolist() == pytest.approx([1, 0, 0, 0])  # 4/7 of what top-k left is enough


@pytest.mark.parametrize("temperature", [1e-6, 1e-12, 1e-300, 5e-324])
@pytest.mark.parametrize("scale", [1.0, 1e4, 1e30])
@pytest.mark.parametrize("limits", [(0, 1.0), (2, 1.0), (0, 0.9), (3, 0.5)])
def test_tiny_temperature_is_greedy(temperature: float, scale: float, limits: tuple[int, float]) -> None:
    logits = torch.tensor([[-1.0, 0.5, 2.0, -3.0], [-1.0, -0.5, -2.0, -3.0]]) * scale
    params = SamplingParams(temperature=temperature, top_k=limits[0], top_p=limits[1])
    assert compute_probs(logits, params).tolist() == [[0, 0, 1, 0], [0, 1, 0, 0]]


def test_high_temperature_is_uniform_without_masked_logits() -> None:
    logits = torch.tensor([[1.0, -torch.inf, 2.0, 3.0]])
    probs = compute_probs(logits, SamplingParams(temperature=100.0))[0]
    assert probs.tolist() == pytest.approx([1 / 3, 0, 1 / 3, 1 / 3], abs=0.01)
    assert probs[1] == 0


def test_draw_follows_its_weights() -> None:
    rng = torch.Generator().manual_seed(0)
    weights = torch.tensor([0.02, 0.0, 0.13, 0.05], dtype=torch.float64)  # a residual sums to less than 1
    counts = Counter(reference.sample_token(weights, rng) for _ in range(10_000))
    assert counts[1] == 0
    seen = [counts[i] for i in (0, 2, 3)]
    assert chisquare(seen, [10_000 * w / 0.20 for w in (0.02, 0.13, 0.05)]).pvalue > TOLERATED


# Verification, by enumeration


def random_rows(choose: random.Random, vocab: int, depth: int, zeros: float, sharp: float = 1.0) -> Rows:
    """A distribution after every sequence of up to `depth` tokens, each token impossible with chance `zeros`."""
    rows = {}
    for length in range(depth + 1):
        for prefix in itertools.product(range(vocab), repeat=length):
            weights = [0.0 if choose.random() < zeros else choose.random() ** sharp for _ in range(vocab)]
            weights[choose.randrange(vocab)] += 0.2
            rows[prefix] = [w / sum(weights) for w in weights]
    return rows


def probability(rows: Rows, sequence: Sequence[int], after: int = 0) -> float:
    """Returns the probability of the rest of the sequence after its first `after` tokens."""
    return math.prod(rows[tuple(sequence[:i])][sequence[i]] for i in range(after, len(sequence)))


def draft_of(tokens: Sequence[int], proposed: Rows) -> DraftProposal:
    probs = [proposed[tuple(tokens[:i])] for i in range(len(tokens))]
    return DraftProposal(list(tokens), torch.tensor(probs, dtype=torch.float64))


def targets_for(tokens: Sequence[int], target: Rows) -> Tensor:
    return torch.tensor([target[tuple(tokens[:i])] for i in range(len(tokens) + 1)], dtype=torch.float64)


class ScriptedVerify:
    """Runs `verify` with given uniform numbers; records what it accepted and the distribution of the next token."""

    def __init__(self, draft: DraftProposal, target_probs: Tensor) -> None:
        self.draft, self.target_probs = draft, target_probs

    def __call__(self, uniforms: Sequence[float]) -> tuple[int, list[float]]:
        given, weights = iter(uniforms), []

        def rand(*size: Any, **options: Any) -> Tensor:
            return torch.tensor(next(given), dtype=options.get("dtype"))

        def draw(probs: Tensor, rng: torch.Generator) -> int:
            weights.append(probs.tolist())
            return 0

        with mock.patch.object(torch, "rand", rand), mock.patch.object(reference, "sample_token", draw):
            accepted, _ = reference.verify_draft_tokens(self.draft, self.target_probs, torch.Generator())
        (only,) = weights
        return accepted, [w / sum(only) for w in only]

    def chance_to_keep(self, i: int) -> float:
        """Returns the acceptance probability of draft token i after those before it, by bisection."""
        if self(self.uniforms(i, 1 - 2**-53))[0] > i:
            return 1.0
        low, high = 0.0, 1.0  # kept below, not kept above
        if self(self.uniforms(i, 0.0))[0] == i:
            return 0.0
        while high - low > 1e-13:
            middle = (low + high) / 2
            low, high = (middle, high) if self(self.uniforms(i, middle))[0] > i else (low, middle)
        return low

    def uniforms(self, i: int, at_i: float) -> list[float]:
        return [0.0] * i + [at_i] + [0.0] * (len(self.draft.token_ids) - i - 1)


def outcomes(drafts: Sequence[int], proposed: Rows, target: Rows) -> Iterator[tuple[tuple[int, ...], float]]:
    """Yields every output of a verification step with these draft tokens, and its probability."""
    decided = ScriptedVerify(draft_of(drafts, proposed), targets_for(drafts, target))
    reached = 1.0
    for i in range(len(drafts) + 1):
        keep = decided.chance_to_keep(i) if i < len(drafts) else 0.0
        if reached * (1 - keep) > 0:
            accepted, weights = decided(decided.uniforms(i, 1 - 2**-53)[: len(drafts)])
            assert accepted == i
            for token, weight in enumerate(weights):
                yield (*drafts[:i], token), reached * (1 - keep) * weight
        reached *= keep
        if reached == 0:
            return


def exact_joint(proposed: Rows, target: Rows, vocab: int, k: int) -> dict[tuple, float]:
    """Returns the distribution of the first K + 1 output tokens; after a rejection the target continues."""
    joint: dict[tuple, float] = dict.fromkeys(itertools.product(range(vocab), repeat=k + 1), 0.0)
    for drafts in itertools.product(range(vocab), repeat=k):
        drawn = probability(proposed, drafts)
        if drawn == 0:
            continue
        for emitted, chance in outcomes(drafts, proposed, target):
            for rest in itertools.product(range(vocab), repeat=k + 1 - len(emitted)):
                sequence = emitted + rest
                joint[sequence] += drawn * chance * probability(target, sequence, len(emitted))
    return joint


def one_hot(rows: Rows) -> Rows:
    return {prefix: [float(i == row.index(max(row))) for i in range(len(row))] for prefix, row in rows.items()}


@many(80)
@given(
    st.sampled_from([(3, 1), (4, 1), (5, 1), (3, 2), (4, 2), (3, 3)]),
    st.integers(0, 2**32),
    st.sampled_from([0.0, 0.3, 0.7]),
    st.sampled_from([0.0, 0.3, 0.7]),
    st.sampled_from(["drawn", "greedy", "same", "near"]),
)
def test_a_step_has_the_targets_distribution_exactly(
    size: tuple[int, int], seed: int, target_zeros: float, proposed_zeros: float, kind: str
) -> None:
    vocab, k = size
    choose = random.Random(seed)
    target = random_rows(choose, vocab, k, target_zeros, sharp=2.0)
    proposed = random_rows(choose, vocab, k, proposed_zeros, sharp=2.0)
    if kind == "greedy":
        proposed = one_hot(proposed)
    if kind == "same":
        proposed = target
    if kind == "near":
        proposed = {x: [0.98 * p + 0.02 * q for p, q in zip(target[x], proposed[x], strict=True)] for x in target}
    for sequence, chance in exact_joint(proposed, target, vocab, k).items():
        assert chance == pytest.approx(probability(target, sequence), abs=1e-10)


def test_draft_tokens_from_the_target_are_always_accepted() -> None:
    target = random_rows(random.Random(5), 4, 3, 0.2)
    for drafts in itertools.product(range(4), repeat=3):
        if probability(target, drafts) > 0:
            decided = ScriptedVerify(draft_of(drafts, target), targets_for(drafts, target))
            assert decided([1 - 2**-53] * 3)[0] == 3


def test_impossible_draft_tokens_are_rejected_and_certain_ones_accepted() -> None:
    p = torch.tensor([[0.5, 0.5, 0.0], [0.0, 1.0, 0.0]], dtype=torch.float64)
    q = torch.tensor([[0.2, 0.2, 0.6]], dtype=torch.float64)
    for uniform in (0.0, 0.5, 1 - 2**-53):
        assert ScriptedVerify(DraftProposal([2], q), p)([uniform]) == (0, [0.5, 0.5, 0.0])
        assert ScriptedVerify(DraftProposal([0], q), p)([uniform]) == (1, [0.0, 1.0, 0.0])


def test_without_draft_tokens_the_target_is_sampled() -> None:
    p = torch.tensor([[0.1, 0.9]], dtype=torch.float64)
    assert ScriptedVerify(DraftProposal([], p[:0]), p)([]) == (0, pytest.approx([0.1, 0.9]))


# Verification, by counting; wrong versions must be noticed


def accepts_always(draft: DraftProposal, target_probs: Tensor, rng: torch.Generator) -> tuple[int, int]:
    return len(draft.token_ids), reference.sample_token(target_probs[-1], rng)


def accepts_never(draft: DraftProposal, target_probs: Tensor, rng: torch.Generator) -> tuple[int, int]:
    """Wrong: it samples from the residual distribution instead of the target."""
    return 0, reference.sample_token((target_probs[0] - draft.probs_KV[0]).clamp(min=0), rng)


def forgets_to_subtract(draft: DraftProposal, target_probs: Tensor, rng: torch.Generator) -> tuple[int, int]:
    for i, x in enumerate(draft.token_ids):
        p, q = target_probs[i], draft.probs_KV[i]
        if float(torch.rand((), generator=rng)) * q[x] >= p[x]:
            return i, reference.sample_token(p, rng)
    return len(draft.token_ids), reference.sample_token(target_probs[len(draft.token_ids)], rng)


def looks_one_row_late(draft: DraftProposal, target_probs: Tensor, rng: torch.Generator) -> tuple[int, int]:
    accepted, _ = reference.verify_draft_tokens(draft, target_probs, rng)
    return accepted, reference.sample_token(target_probs[min(accepted + 1, len(draft.token_ids))], rng)


def keeps_by_the_targets_chance(draft: DraftProposal, target_probs: Tensor, rng: torch.Generator) -> tuple[int, int]:
    """Correct for greedy draft tokens, wrong for sampled ones."""
    for i, x in enumerate(draft.token_ids):
        if float(torch.rand((), generator=rng)) >= target_probs[i, x]:
            return i, reference.sample_token((target_probs[i] - draft.probs_KV[i]).clamp(min=0), rng)
    return len(draft.token_ids), reference.sample_token(target_probs[len(draft.token_ids)], rng)


def fit(counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """Returns the chi-square p-value, 0 if an impossible sequence occurred; rare sequences are merged."""
    total = sum(counts.values())
    if any(expected.get(x, 0.0) <= 0 for x in counts):
        return 0.0
    often = [x for x, chance in expected.items() if chance * total >= 5]
    seen, want = [counts[x] for x in often], [expected[x] * total for x in often]
    if total - sum(want) >= 5:
        seen, want = [*seen, total - sum(seen)], [*want, total - sum(want)]
    assert len(seen) > 1
    return float(chisquare(seen, [w * sum(seen) / sum(want) for w in want]).pvalue)


@dataclass(frozen=True)
class Scene:
    """A target and a drafter, given by their distributions after every sequence."""

    vocab: int
    k: int
    target: Rows
    proposed: Rows

    def fit(self, verify: Verify, count: int, seed: int) -> float:
        """Counts the first two output tokens over many steps."""
        rng = torch.Generator().manual_seed(seed)
        made: dict[tuple[int, ...], tuple[DraftProposal, Tensor]] = {}
        choose = random.Random(seed)
        counts: Counter[tuple[int, ...]] = Counter()
        for _ in range(count):
            drafts: tuple[int, ...] = ()
            while len(drafts) < self.k:
                drafts += (choose.choices(range(self.vocab), self.proposed[drafts])[0],)
            if drafts not in made:
                made[drafts] = draft_of(drafts, self.proposed), targets_for(drafts, self.target)
            accepted, bonus = verify(*made[drafts], rng)
            emitted = (*drafts[:accepted], bonus)
            if len(emitted) == 1:
                emitted += (choose.choices(range(self.vocab), self.target[emitted])[0],)
            counts[emitted[:2]] += 1
        pairs_ = itertools.product(range(self.vocab), repeat=2)
        return fit(counts, {pair: probability(self.target, pair) for pair in pairs_})


def scene(name: str) -> Scene:
    choose = random.Random(11)
    vocab, k = 5, 3
    target = random_rows(choose, vocab, k, 0.0, sharp=2.0)
    other = random_rows(choose, vocab, k, 0.0, sharp=3.0)
    if name == "good":
        mixed = {x: [0.9 * p + 0.1 * q for p, q in zip(target[x], other[x], strict=True)] for x in target}
        return Scene(vocab, k, target, mixed)
    if name == "bad":
        return Scene(vocab, k, target, other)
    if name == "one-hot":
        return Scene(vocab, k, target, one_hot(target))
    if name == "wrong one-hot":
        return Scene(vocab, k, target, one_hot(other))
    assert name == "disjoint", name

    def only(rows: Rows, ids: set[int]) -> Rows:
        kept = {x: [p if i in ids else 0.0 for i, p in enumerate(row)] for x, row in rows.items()}
        return {x: [p / sum(row) for p in row] for x, row in kept.items()}

    return Scene(vocab, k, only(target, {0, 1, 2}), only(other, {3, 4}))


SCENES = ("good", "bad", "one-hot", "wrong one-hot", "disjoint")


@pytest.mark.parametrize("name", SCENES)
def test_many_steps_have_the_targets_distribution(name: str) -> None:
    assert scene(name).fit(reference.verify_draft_tokens, 12_000, seed=1) > TOLERATED


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        (accepts_always, "good"),
        (accepts_always, "one-hot"),
        (accepts_always, "disjoint"),
        (accepts_never, "one-hot"),
        (accepts_never, "bad"),
        (forgets_to_subtract, "bad"),
        (forgets_to_subtract, "one-hot"),
        (looks_one_row_late, "bad"),
        (keeps_by_the_targets_chance, "bad"),
    ],
)
def test_a_wrong_verification_is_noticed(wrong: Verify, name: str) -> None:
    assert scene(name).fit(wrong, 4000, seed=1) < CAUGHT


# Generation

VOCAB, LENGTH, PROMPT = 6, 3, [2, 0, 5]


def spread_weights(module: torch.nn.Module, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        if parameter.dim() > 1:
            wide = 1.0 if name.startswith(("embed_tokens", "mask_hidden")) else parameter.shape[-1] ** -0.5
            torch.nn.init.normal_(parameter, std=wide, generator=rng)


class CachingDecoder(Decoder):
    """Caches results by input: thousands of short sequences over six tokens repeat."""

    def forward(self, token_ids_T, positions_T, attend, aux_layer_ids=()):  # type: ignore[no-untyped-def]
        memory = self.__dict__.setdefault("memory", {})
        key = (tuple(token_ids_T.tolist()), tuple(positions_T.tolist()), tuple(aux_layer_ids))
        if key not in memory:
            memory[key] = super().forward(token_ids_T, positions_T, attend, aux_layer_ids)
        return memory[key]


class CachingDrafter(Drafter):
    def forward(self, token_ids_T, hidden_TD, positions_T, attend):  # type: ignore[no-untyped-def]
        memory = self.__dict__.setdefault("memory", {})
        key = (tuple(token_ids_T.tolist()), tuple(positions_T.tolist()), hidden_TD.numpy().tobytes())
        if key not in memory:
            memory[key] = super().forward(token_ids_T, hidden_TD, positions_T, attend)
        return memory[key]


@pytest.fixture(scope="module")
def target() -> Decoder:
    layer = LayerConfig(8, 16, num_heads=2, num_kv_heads=1, head_dim=4)
    model = CachingDecoder(DecoderConfig("llama", VOCAB, 1, layer, RopeConfig(), 64, False, (None,)))
    spread_weights(model, 3)
    return model.eval()


def make_drafter(target: Decoder, kind: str) -> Drafter:
    cfg = DrafterConfig(
        vocab_size=VOCAB,
        draft_vocab_size=4 if kind.endswith("reduced") else VOCAB,
        num_layers=1,
        layer=target.cfg.layer,
        rope=RopeConfig(),
        max_positions=64,
        target_hidden_size=8,
        aux_layer_ids=(0, 1),
        mask_token_id=3 if kind.startswith("p-eagle") else None,
        own_head=kind.endswith("reduced"),
    )
    drafter = CachingDrafter(cfg).share_weights(target)
    spread_weights(drafter, 4)
    if drafter.d2t is not None:
        drafter.d2t.copy_(torch.tensor([0, 2, 4, 5]) - torch.arange(4))
    return drafter.eval()


@torch.inference_mode()
def own_joint(target: Decoder, temperature: float, top_k: int, top_p: float) -> dict[tuple[int, ...], float]:
    """Returns the target's distribution of the next tokens, from every sequence of them."""
    joint = {(): 1.0}
    for _ in range(LENGTH):
        longer = {}
        for prefix, chance in joint.items():
            tokens = torch.tensor([*PROMPT, *prefix])
            hidden, _ = target(tokens, torch.arange(len(tokens)), causal_attention)
            row = naive_distribution(target.compute_logits(hidden)[-1].tolist(), temperature, top_k, top_p)
            longer |= {(*prefix, x): chance * p for x, p in enumerate(row) if p > 0}
        joint = longer
    assert sum(joint.values()) == pytest.approx(1.0)
    return joint


def generated(
    target: Decoder,
    drafter: Drafter | None,
    runs: int,
    options: dict[str, Any],
    k: int = 2,
    sample_draft_tokens: bool = True,
) -> tuple[Counter[tuple[int, ...]], float]:
    """Counts each output, and returns the share of accepted draft tokens."""
    counts: Counter[tuple[int, ...]] = Counter()
    accepted = drafts = 0
    for seed in range(runs):
        params = SamplingParams(max_tokens=LENGTH, seed=seed, **options)
        run = generate(
            target, PROMPT, params, drafter=drafter, num_speculative_tokens=k, sample_draft_tokens=sample_draft_tokens
        )
        counts[tuple(run.token_ids)] += 1
        accepted += sum(r.num_accepted_tokens for r in run.steps)
        drafts += sum(len(r.draft_token_ids) for r in run.steps)
    return counts, accepted / max(drafts, 1)


PLAIN: dict[str, Any] = {"temperature": 0.7}
SHAPED: dict[str, Any] = {"temperature": 0.7, "top_k": 3, "top_p": 0.8}


@pytest.mark.parametrize(
    ("kind", "sample_draft_tokens", "options"),
    [
        ("none", False, SHAPED),
        ("p-eagle", True, PLAIN),
        ("p-eagle", False, PLAIN),
        ("p-eagle-reduced", True, SHAPED),
        ("p-eagle", False, SHAPED),
        ("eagle3", True, PLAIN),
        ("eagle3", True, SHAPED),
        ("eagle3-reduced", False, SHAPED),
    ],
)
def test_generations_have_the_targets_distribution(
    target: Decoder, kind: str, sample_draft_tokens: bool, options: dict[str, Any]
) -> None:
    drafter = None if kind == "none" else make_drafter(target, kind)
    counts, share = generated(target, drafter, 1500, options, sample_draft_tokens=sample_draft_tokens)
    expected = own_joint(target, options["temperature"], options.get("top_k", 0), options.get("top_p", 1.0))
    assert len(expected) >= 8
    assert fit(counts, expected) > TOLERATED
    assert drafter is None or 0.05 < share < 0.95


@pytest.mark.parametrize(
    ("wrong", "sample_draft_tokens"),
    [(accepts_always, False), (accepts_always, True), (forgets_to_subtract, False)],
)
def test_wrong_generations_are_noticed(target: Decoder, wrong: Verify, sample_draft_tokens: bool) -> None:
    with mock.patch.object(reference, "verify_draft_tokens", wrong):
        counts, _ = generated(
            target, make_drafter(target, "p-eagle"), 900, PLAIN, sample_draft_tokens=sample_draft_tokens
        )
    assert fit(counts, own_joint(target, 0.7, 0, 1.0)) < CAUGHT


# Seeds


def texts(target: Decoder, drafter: Drafter | None, seeds: Sequence[int | None], **options: Any) -> list[tuple]:
    runs = (
        generate(
            target,
            PROMPT,
            SamplingParams(max_tokens=40, temperature=1.0, seed=seed),
            drafter=drafter,
            num_speculative_tokens=3,
            **options,
        )
        for seed in seeds
    )
    return [tuple(run.token_ids) for run in runs]


@pytest.mark.parametrize("sample_draft_tokens", [False, True])
@pytest.mark.parametrize("kind", ["none", "p-eagle", "eagle3"])
def test_a_seed_decides_the_output(target: Decoder, kind: str, sample_draft_tokens: bool) -> None:
    drafter = None if kind == "none" else make_drafter(target, kind)
    first = texts(target, drafter, range(6), sample_draft_tokens=sample_draft_tokens)
    torch.rand(7)  # numbers drawn elsewhere are none of its business
    assert texts(target, drafter, range(6), sample_draft_tokens=sample_draft_tokens) == first
    assert len(set(first)) == 6
    assert texts(target, drafter, [2**63 - 1]) == texts(target, drafter, [2**63 - 1])


@pytest.mark.parametrize("kind", ["none", "p-eagle"])
def test_outputs_differ_without_a_seed(target: Decoder, kind: str) -> None:
    drafter = None if kind == "none" else make_drafter(target, kind)
    torch.manual_seed(0)
    first = texts(target, drafter, [None] * 3)
    torch.manual_seed(0)
    assert len({*first, *texts(target, drafter, [None] * 3)}) == 6


def test_sampling_does_not_advance_torchs_generator(target: Decoder) -> None:
    drafter = make_drafter(target, "p-eagle")
    before = torch.get_rng_state()
    texts(target, drafter, [1, None], sample_draft_tokens=True)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("kind", ["p-eagle", "eagle3"])
def test_greedy_output_does_not_depend_on_the_seed(target: Decoder, kind: str) -> None:
    drafter = make_drafter(target, kind)
    plain = generate(target, PROMPT, SamplingParams(max_tokens=20)).token_ids
    for seed in (0, 1, None):
        for sample_draft_tokens in (False, True):
            params = SamplingParams(max_tokens=20, seed=seed)
            run = generate(
                target,
                PROMPT,
                params,
                drafter=drafter,
                num_speculative_tokens=3,
                sample_draft_tokens=sample_draft_tokens,
            )
            assert run.token_ids == plain
