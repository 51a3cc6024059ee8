"""Sampling and draft acceptance: noise, filters, draws, acceptance, synthetic acceptance.

The torch versions are compared with naive Python. The `check_*` functions compare the Triton kernels with the torch
versions, on a GPU (marker `gpu`) or in Triton's interpreter. The interpreter is chosen when a kernel is defined, so it
runs in a process of its own: this file, run as a script.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, reject
from hypothesis import strategies as st
from scipy.stats import chi2_contingency, chisquare
from support import many
from torch import Tensor
from triton_interpreter import launching_triton, patch_interpreter, run_in_interpreter

from peagle.config import SamplingParams
from peagle.errors import UserError
from peagle.kernels.sampling import noise, sample, verify
from peagle.kernels.sampling.sample import argmax, logit_cutoffs_torch, logit_cutoffs_triton, sample_tokens
from peagle.kernels.sampling.verify import accept_draft_tokens, to_conditional_rates
from peagle.kernels.triton_utils import HAVE_TRITON
from peagle.speculative.reference import compute_probs

if HAVE_TRITON:
    import triton
    from triton import language as tl

TOLERATED = 1e-3  # p-value; the seeds are fixed


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def ids(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.long)


# The noise


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # the vectors that come with Random123
        ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_matches_random123(counter: tuple[int, ...], key: tuple[int, int], words: str) -> None:
    seed = key[1] << 32 | key[0]
    seed -= 2**64 if seed >= 2**63 else 0  # the same bits, signed
    got = noise.philox_torch(ids(seed), ids(counter[0]), ids(counter[1]), counter[2], counter[3])
    assert " ".join(f"{int(x):08x}" for x in got) == words


@pytest.mark.parametrize("vocab", [1, 900, 1024, 1025, 4096, 5000, 12289])
def test_row_bits_are_the_bits_of_each_token(vocab: int) -> None:
    seeds, positions = ids(5, -7), ids(0, 2**31)
    want = noise.bits_torch(seeds[:, None], positions[:, None], torch.arange(vocab))
    assert torch.equal(noise.row_bits_torch(seeds, positions, vocab), want)


def test_streams_do_not_share_words() -> None:
    token = torch.arange(20_000)
    words = [
        noise.bits_torch(ids(seed), ids(position), token, stream)
        for seed, position, stream in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1 << 32, 0, 0))
    ]
    together = torch.cat(words)
    # Equal words among n of 2^32 are expected n^2 / 2^33 times by chance: about one here.
    assert len(together) - len(together.unique()) <= 6
    for a in range(len(words)):
        for b in range(a):
            assert int((words[a] == words[b]).sum()) <= 1


def test_noise_is_a_finite_gumbel_for_every_word() -> None:
    corners = [0, 1, 2, 255, 256, 2**28 - 1, 2**28, 2**28 + 1, 2**31, 2**32 - 257, 2**32 - 2, 2**32 - 1]
    bits = torch.cat([ids(*corners), torch.randint(0, 2**32, (20_000,), generator=rng(0))]).sort().values
    w = noise.uniform_torch(bits)
    assert w.dtype == torch.float32
    assert float(w.min()) > 0 and float(w.max()) < 1
    assert bool((w.diff() >= 0).all())
    drawn = noise.gumbel_torch(bits)
    want = -torch.log(-torch.log1p(-w.double()))
    torch.testing.assert_close(drawn.double(), want, rtol=1e-6, atol=1e-6)


NEIGHBOURS = {  # how the second of two neighbouring words differs from the first, in (seed, position, token)
    "seed": (1, 0, 0),
    "position": (0, 1, 0),
    "token": (0, 0, 1),
    "token of the same call": (0, 0, 1024),
    "seed and position": (1, -1, 0),
    "position and token": (0, 1, -1),
    "high half of the seed": (1 << 32, 0, 0),
}


@pytest.mark.parametrize("step", NEIGHBOURS.values(), ids=NEIGHBOURS.keys())
def test_noise_is_uniform_and_neighbours_are_independent(step: tuple[int, int, int]) -> None:
    seed, position, token = torch.meshgrid(
        100 + torch.arange(0, 64, 2), 100 + torch.arange(0, 64, 2), 2 + torch.arange(0, 128, 4), indexing="ij"
    )
    first = noise.bits_torch(seed, position, token).flatten()
    second = noise.bits_torch(seed + step[0], position + step[1], token + step[2]).flatten()
    for shift in (0, 12, 28):  # low, middle and high bits
        a, b = (first >> shift) & 15, (second >> shift) & 15
        table = torch.bincount(a * 16 + b, minlength=256).view(16, 16)
        assert chisquare(table.flatten().numpy()).pvalue > TOLERATED
        assert chi2_contingency(table.numpy()).pvalue > TOLERATED
    assert chisquare(torch.bincount(second >> 22, minlength=1024).numpy()).pvalue > TOLERATED


# Sampling


def settings_of(params: SamplingParams, seed: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Arguments of `sample_tokens`: float params, int params, positions."""
    floats = torch.tensor([[params.temperature], [params.top_p], [params.min_p]]).expand(-1, len(seed))
    return floats, torch.stack([torch.full_like(seed, params.top_k), seed]), position


@many(200)
@given(st.lists(st.lists(st.integers(-3, 3), min_size=6, max_size=6), min_size=1, max_size=4), st.booleans())
def test_greedy_is_the_lowest_id_among_the_largest(rows: list[list[int]], half: bool) -> None:
    logits = torch.tensor(rows, dtype=torch.bfloat16 if half else torch.float32)
    want = [row.index(max(row)) for row in rows]
    got = sample_tokens(logits, *settings_of(SamplingParams(), torch.arange(len(rows)), torch.arange(len(rows))))
    assert got.dtype == torch.long
    assert got.tolist() == argmax(logits).tolist() == want


def naive_kept(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> list[bool]:
    """Which tokens the filters keep; the example is rejected where rounding would decide."""
    best = max(logits)
    weights = [math.exp((x - best) / temperature) for x in logits]
    if any(0 < abs(w - min_p) < 1e-5 for w in weights):
        reject()
    kept = [w >= min_p for w in weights]
    if 0 < top_k < len(logits):
        least = sorted(logits)[-top_k]
        kept = [k and x >= least for k, x in zip(kept, logits, strict=True)]
    if top_p < 1:
        total = sum(w for w, k in zip(weights, kept, strict=True) if k)
        for i, x in enumerate(logits):
            larger = sum(w for w, k, y in zip(weights, kept, logits, strict=True) if k and y > x) / total
            if abs(larger - top_p) < 1e-5:
                reject()
            kept[i] = kept[i] and larger < top_p
    return kept


VALUE = st.integers(-20_000, 20_000).map(lambda n: n / 1024) | st.integers(-3, 3).map(float)  # and ties


@many(600)
@given(
    logits=st.lists(VALUE, min_size=1, max_size=9),
    temperature=st.floats(0.05, 5.0) | st.just(1.0),
    top_k=st.integers(0, 12),
    top_p=st.floats(0.01, 1.0) | st.just(1.0),
    min_p=st.floats(0.0, 1.0) | st.just(0.0),
)
def test_cutoffs_keep_the_right_tokens(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    want = naive_kept(logits, temperature, top_k, top_p, min_p)
    row = torch.tensor([logits])
    cut = logit_cutoffs_torch(row, torch.tensor([[temperature], [top_p], [min_p]]), ids(top_k))
    assert (row >= cut)[0].tolist() == want


def test_a_flat_row_is_filtered_too() -> None:
    # More tokens than the fast path for peaked rows looks at.
    row = torch.linspace(-1, 1, 5000)[torch.randperm(5000, generator=rng(0))][None]
    for top_p in (0.1, 0.5, 0.999):
        cut = logit_cutoffs_torch(row, torch.tensor([[1.0], [top_p], [0.0]]), ids(0))
        probs = row.double().softmax(-1)
        assert float(probs[row > cut].sum()) < top_p + 1e-5
        assert float(probs[row >= cut].sum()) >= top_p - 1e-5


SHAPES = {
    "plain": SamplingParams(temperature=1.0),
    "cool": SamplingParams(temperature=0.6),
    "top-k": SamplingParams(temperature=1.0, top_k=3),
    "top-p": SamplingParams(temperature=1.3, top_p=0.6),
    "min-p": SamplingParams(temperature=0.9, min_p=0.2),
    "all": SamplingParams(temperature=1.5, top_k=7, top_p=0.8, min_p=0.1),
}


@pytest.mark.parametrize("params", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("across", ["positions", "seeds"])
def test_draws_have_the_filtered_distribution(params: SamplingParams, across: str) -> None:
    draws = 4000
    logits = torch.randn(12, generator=rng(3)) * 1.5
    probs = compute_probs(logits[None], params)[0]
    seeds, positions = torch.arange(draws), torch.full((draws,), 7)
    if across == "positions":
        seeds, positions = positions, seeds
    got = sample_tokens(logits.expand(draws, -1), *settings_of(params, seeds, positions))
    counts = torch.bincount(got, minlength=12)
    assert counts[probs == 0].sum() == 0
    possible = probs > 0
    assert chisquare(counts[possible].numpy(), (probs[possible] * draws).numpy()).pvalue > TOLERATED


def test_draws_over_a_large_vocabulary_have_its_distribution() -> None:
    # Tokens of every lane and of several blocks; binned by probability mass.
    draws, vocab = 400, 10_000
    logits = torch.randn(vocab, generator=rng(4)) * 2
    params = SamplingParams(temperature=1.0)
    counts = torch.zeros(20)
    probs = compute_probs(logits[None], params)[0]
    order = torch.randperm(vocab, generator=rng(5))
    bins = torch.empty(vocab, dtype=torch.long)
    bins[order] = (probs[order].cumsum(0) * 20).long().clamp(max=19)
    mass = torch.zeros(20, dtype=torch.float64).index_add(0, bins, probs)
    for first in range(0, draws, 50):
        at = torch.arange(first, first + 50)
        got = sample_tokens(logits.expand(50, -1), *settings_of(params, torch.zeros_like(at), at))
        counts += torch.bincount(bins[got], minlength=20)
    assert chisquare(counts.numpy(), (mass * draws).numpy()).pvalue > TOLERATED


def test_a_row_does_not_depend_on_its_batch() -> None:
    rows, vocab = 7, 5000
    logits = torch.randn(rows, vocab, generator=rng(6)) * 3
    args = mixed_settings(rows)
    together = sample_tokens(logits, *args)
    apart = [int(sample_tokens(logits[r : r + 1], *(x[..., r : r + 1] for x in args))) for r in range(rows)]
    assert together.tolist() == apart


@pytest.mark.parametrize("temperature", [1e-38, 1e-6, 100.0])
def test_extreme_temperatures(temperature: float) -> None:
    logits = torch.tensor([[1.0, 90.0, 90.5, -300.0]]).expand(300, -1)
    params = SamplingParams(temperature=temperature, top_p=0.9)
    got = sample_tokens(logits, *settings_of(params, torch.zeros(300, dtype=torch.long), torch.arange(300)))
    if temperature < 1:
        assert got.unique().tolist() == [2]
    else:
        assert len(got.unique()) >= 3


def test_masked_tokens_are_never_drawn() -> None:
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 1.0]]).expand(500, -1)
    for params in SHAPES.values():
        got = sample_tokens(logits, *settings_of(params, torch.zeros(500, dtype=torch.long), torch.arange(500)))
        assert set(got.tolist()) <= {1, 3}


# Acceptance


@st.composite
def verifications(draw: Any) -> tuple[list[list[int]], list[list[int]], list[int]]:
    batch, k = draw(st.integers(1, 4)), draw(st.integers(0, 5))
    row = st.lists(st.integers(0, 2), min_size=k + 1, max_size=k + 1)
    return (
        draw(st.lists(row, min_size=batch, max_size=batch)),
        draw(st.lists(row, min_size=batch, max_size=batch)),
        draw(st.lists(st.integers(0, k), min_size=batch, max_size=batch)),
    )


def naive_accept(tokens: list[int], chosen: list[int], available: int) -> tuple[int, list[int]]:
    drafts, emitted = tokens[1:], []
    while len(emitted) < available and drafts[len(emitted)] == chosen[len(emitted)]:
        emitted.append(drafts[len(emitted)])
    accepted = len(emitted)
    emitted.append(chosen[accepted])
    return accepted, emitted + [-1] * (len(tokens) - len(emitted))


@many(500)
@given(verifications())
def test_acceptance_matches_the_naive_loop(case: tuple[list[list[int]], list[list[int]], list[int]]) -> None:
    zeros = torch.zeros(len(case[0]), dtype=torch.long)
    tokens, chosen, available = (torch.tensor(x) for x in case)
    accepted, emitted, _ = accept_draft_tokens(tokens, chosen, available, None, zeros, zeros)
    assert accepted.dtype == emitted.dtype == torch.long
    want = [naive_accept(*row) for row in zip(*case, strict=True)]
    assert list(zip(accepted.tolist(), emitted.tolist(), strict=True)) == want
    for chosen_row, emitted_row, count in zip(case[1], emitted.tolist(), accepted.tolist(), strict=True):
        assert emitted_row[: count + 1] == chosen_row[: count + 1]  # the output is what the target sampled


def toy_logits(text: list[int], vocab: int) -> Tensor:
    """A toy model: logits that depend on all tokens."""
    return torch.randn(vocab, generator=rng(hash(tuple(text)))) * 1.5


def toy_generate(params: SamplingParams, k: int, length: int, guess_right: float) -> list[int]:
    """Speculative decoding with draft tokens that are sometimes right."""
    vocab, text = 8, [1, 2]
    luck = rng(k)

    def target(prefix: list[int]) -> int:
        args = settings_of(params, ids(params.seed or 0), ids(len(prefix)))
        return int(sample_tokens(toy_logits(prefix, vocab)[None], *args))

    while len(text) < length:
        drafts: list[int] = []
        for _ in range(k):
            wild = int(torch.randint(vocab, (), generator=luck))
            drafts.append(target(text + drafts) if float(torch.rand((), generator=luck)) < guess_right else wild)
        chosen = [target(text + drafts[:i]) for i in range(k + 1)]
        _, emitted, _ = accept_draft_tokens(
            ids(text[-1], *drafts)[None], ids(*chosen)[None], ids(k), None, ids(0), ids(0)
        )
        text = text + [t for t in emitted[0].tolist() if t >= 0]
    return text[:length]


@pytest.mark.parametrize("name", ["plain", "top-p", "all"])
def test_seeded_output_is_the_same_with_and_without_speculation(name: str) -> None:
    shape = SHAPES[name]
    for seed in (1, 2):
        params = SamplingParams(
            temperature=shape.temperature, top_k=shape.top_k, top_p=shape.top_p, min_p=shape.min_p, seed=seed
        )
        plain = toy_generate(params, 0, 40, 0.0)
        assert len(set(plain)) > 3
        for k in (1, 3, 6):
            assert toy_generate(params, k, 40, 0.7) == plain


def test_synthetic_acceptance_matches_its_rates() -> None:
    requests, k = 20_000, 4
    tokens = torch.arange(k + 1).expand(requests, -1)
    chosen = 100 + tokens
    unconditional = [0.9, 0.6, 0.6, 0.1]
    rates = torch.tensor(to_conditional_rates(unconditional))
    available = torch.full((requests,), k)
    for seeds, positions in (
        (torch.arange(requests), torch.full((requests,), 9)),
        (torch.full((requests,), 9), torch.arange(requests) * k),
    ):
        accepted, emitted, _ = accept_draft_tokens(tokens, chosen, available, rates, seeds, positions)
        share = [float((accepted > i).double().mean()) for i in range(k)]
        assert share == pytest.approx(unconditional, abs=4 * 0.5 / math.sqrt(requests))
        assert bool((accepted != 2).all())  # the third is always accepted if the second is
        for row in range(50):
            count = int(accepted[row])
            want = [*range(1, count + 1), 100 + count] + [-1] * (k - count)
            assert emitted[row].tolist() == want
    accepted, *_ = accept_draft_tokens(tokens, chosen, torch.full((requests,), 1), rates, seeds, positions)
    assert int(accepted.max()) == 1


def test_synthetic_rates_of_zero_and_one() -> None:
    requests = 2000
    tokens = torch.zeros(requests, 4, dtype=torch.long)
    args = (torch.full((requests,), 3), torch.tensor([1.0, 1.0, 0.0]), torch.arange(requests), torch.arange(requests))
    accepted, *_ = accept_draft_tokens(tokens, tokens, *args)
    assert accepted.unique().tolist() == [2]


@pytest.mark.parametrize("want", [[0.0, 0.0], [1.0, 0.25, 0.0], [1.0, 1.0, 0.5], [0.5], []])
def test_conditional_rates_multiply_to_unconditional_ones(want: list[float]) -> None:
    rates = to_conditional_rates(want)
    assert all(0 <= r <= 1 for r in rates)
    reached = 1.0
    for unconditional, rate in zip(want, rates, strict=True):
        reached *= rate
        assert reached == pytest.approx(unconditional)


def test_invalid_rates_raise() -> None:
    for bad in ([1.1], [0.5, -0.1], [math.nan]):
        with pytest.raises(UserError, match="between 0 and 1"):
            to_conditional_rates(bad)
    with pytest.raises(UserError, match="larger than the one before"):
        to_conditional_rates([0.5, 0.6])
    assert to_conditional_rates([0.8, 0.4, 0.0, 0.0]) == [0.8, 0.5, 0.0, 0.0]


# Triton kernels against the torch versions


def test_a_row_without_finite_logits_has_no_token() -> None:
    logits = torch.randn(4, 9)
    logits[1], logits[2], logits[3] = math.nan, -math.inf, math.inf
    for params in (SamplingParams(), SamplingParams(temperature=0.8, top_k=3, top_p=0.9)):
        got = sample_tokens(logits, *settings_of(params, torch.arange(4), torch.arange(4)))
        assert got.tolist()[1:] == [-1] * 3 and got[0] >= 0


if HAVE_TRITON:

    @triton.jit
    def words_kernel(seed, position, out, STREAM: tl.constexpr, LANES: tl.constexpr):
        call = tl.program_id(1) * LANES + tl.arange(0, LANES)
        row = tl.program_id(0)
        words = noise.philox_words(tl.load(seed + row), tl.load(position + row), call, STREAM)
        start = out + row * tl.num_programs(1) * 4 * LANES + tl.program_id(1) * 4 * LANES + tl.arange(0, LANES)
        for i in tl.static_range(4):
            tl.store(start + i * LANES, words[i].to(tl.int64))


def mixed_settings(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Float params, int params, positions: the kinds of rows in turn."""
    kinds = torch.tensor(
        [
            [0.0, 0, 1.0, 0.0],
            [0.8, 0, 1.0, 0.0],
            [1.0, 20, 1.0, 0.0],
            [1.0, 0, 0.9, 0.0],
            [1.3, 0, 1.0, 0.05],
            [1.1, 30, 0.7, 0.01],
            [0.0, 5, 0.5, 0.5],
            [0.5, 1, 1.0, 0.0],
            [1.0, 0, 0.5, 0.0],
        ]
    )
    temperature, top_k, top_p, min_p = kinds[torch.arange(rows) % len(kinds)].T
    seeds = torch.arange(rows) * 7919 - 5 + (torch.arange(rows) << 40)
    floats, integers = torch.stack([temperature, top_p, min_p]), torch.stack([top_k.long(), seeds])
    return floats, integers, torch.arange(rows) * 31 + 2


def to(device: str, values: Sequence[Tensor]) -> list[Tensor]:
    return [x.to(device) for x in values]


def check_words(device: str) -> None:
    seeds, positions = ids(0, -1, 2**62 + 12345), ids(0, 70_000, 2**31 + 5)
    for stream in (noise.SAMPLE_STREAM, noise.ACCEPT_STREAM):
        out = torch.empty(3, 2 * noise.BLOCK, dtype=torch.long, device=device)
        words_kernel[(3, 2)](*to(device, (seeds, positions)), out, STREAM=stream, LANES=noise.LANES)
        token = torch.arange(out.shape[1])
        assert torch.equal(out.cpu(), noise.bits_torch(seeds[:, None], positions[:, None], token, stream))


def check_sampling(device: str) -> None:
    wide = [(64, 128_256), (9, 201_088)] if device == "cuda" else []
    for rows, vocab in [(3, 1), (9, 1025), (9, 9000), *wide]:
        for dtype in (torch.float32, torch.bfloat16):
            logits = (torch.randn(rows, vocab, generator=rng(vocab)) * 3).to(dtype)
            compare_samples(device, logits, mixed_settings(rows))
    padded = torch.randn(4, 130, generator=rng(1))
    compare_samples(device, padded[:, :100], mixed_settings(4))  # a row stride larger than the vocabulary


def check_sampling_of_ties_and_extremes(device: str) -> None:
    ties = torch.randint(-2, 3, (9, 300), generator=rng(2)).float()
    compare_samples(device, ties, mixed_settings(9))
    compare_samples(device, ties * 0.0, mixed_settings(9))  # zeros of both signs
    compare_samples(device, torch.full((9, 5000), 3.0), mixed_settings(9))
    compare_samples(device, ties * 1e-44, mixed_settings(9))  # subnormals of both signs
    masked = ties.masked_fill(torch.rand(9, 300, generator=rng(3)) < 0.9, -math.inf)
    compare_samples(device, masked, mixed_settings(9))
    for value in (math.nan, math.inf, -math.inf):
        invalid = ties.clone()
        invalid[3:] = value
        with launching_triton(sample):
            got = sample_tokens(invalid.to(device), *to(device, mixed_settings(9))).cpu()
        assert torch.equal(got, sample_tokens(invalid, *mixed_settings(9))) and (got[3:] == -1).all()
    floats, *rest = mixed_settings(9)
    for scale in (1e-38, 1e-3, 50.0):
        compare_samples(device, ties, (floats * torch.tensor([[scale], [1.0], [1.0]]), *rest))


def compare_samples(device: str, logits: Tensor, args: Sequence[Tensor]) -> None:
    there, on = logits.to(device), to(device, args)
    if logits.stride(0) != logits.shape[1]:
        there = logits.new_empty(len(logits), logits.stride(0)).to(device)[:, : logits.shape[1]].copy_(logits)
    (floats, (top_k, _), _) = args
    with launching_triton(sample):
        best, chosen = argmax(there).cpu(), sample_tokens(there, *on).cpu()
    assert torch.equal(best, argmax(logits))
    cuts = logit_cutoffs_triton(there, *on).cpu()
    want = logit_cutoffs_torch(logits, floats, top_k)
    same = (logits >= cuts[:, None]).eq(logits >= want[:, None]).all(1)
    for r in (~same).nonzero()[:, 0].tolist():  # rounding may decide where the mass reaches top_p
        (temperature, top_p, min_p), row = floats[:, r].tolist(), logits[r].double()
        unfiltered = torch.tensor([[temperature], [1.0], [min_p]])
        weights = ((row - row.max()) / temperature).exp()
        weights /= weights[row >= logit_cutoffs_torch(logits[r : r + 1], unfiltered, top_k[r : r + 1])].sum()
        low, high = sorted((float(cuts[r]), float(want[r])))
        assert float(weights[row >= high].sum()) == pytest.approx(top_p, abs=1e-4), (r, low, high)
        assert float(weights[row > low].sum()) == pytest.approx(top_p, abs=1e-4), (r, low, high)
    assert float(same.double().mean()) >= 0.9
    assert chosen.dtype == torch.long
    assert torch.equal(chosen[same], sample_tokens(logits, *args)[same])


def check_accept(device: str) -> None:
    for k in (0, 1, 3, 7, 18):
        batch = 12
        tokens = torch.randint(0, 2, (batch, k + 1), generator=rng(k))
        chosen = torch.randint(0, 2, (batch, k + 1), generator=rng(k + 50))
        chosen[:6, :-1] = tokens[:6, 1:]  # all are accepted
        available = torch.randint(0, k + 1, (batch,), generator=rng(k + 100))
        available[:4] = k
        seeds, positions = torch.arange(batch) << 33, torch.arange(batch) * 5 + 2**31 - 60
        for rates in (None, torch.linspace(1, 0.5, k)):
            want = accept_draft_tokens(tokens, chosen, available, rates, seeds, positions)
            there = None if rates is None else rates.to(device)
            args = to(device, (tokens, chosen, available))
            with launching_triton(verify):
                got = accept_draft_tokens(*args, there, *to(device, (seeds, positions)))
            for a, b in zip(got, want, strict=True):
                assert a.dtype == torch.long
                assert torch.equal(a.cpu(), b)


CHECKS: dict[str, Callable[[str], None]] = {
    name: check for name, check in list(globals().items()) if name.startswith("check_")
}


def test_triton_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CHECKS)
def test_triton_on_the_gpu(name: str) -> None:
    CHECKS[name]("cuda")


if __name__ == "__main__":
    patch_interpreter()
    for check in CHECKS.values():
        check("cpu")
    print("kernels checked")
