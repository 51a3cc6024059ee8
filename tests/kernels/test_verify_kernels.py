"""What a round does between the two models: choose tokens, accept drafts, feed the drafter, move the state on.

The torch versions are held against naive Python. The Triton ones are held against the torch ones by the `check_*`
functions, which take a device: on a GPU as they are (marker `gpu`), elsewhere in Triton's interpreter. That is chosen
when a kernel is defined, so it gets a process of its own: this file, run as a script.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, reject
from hypothesis import strategies as st
from scipy.stats import chi2_contingency, chisquare
from support import many
from torch import Tensor
from triton_interpreter import patch_interpreter

from peagle.config import SamplingParams
from peagle.errors import UserError
from peagle.kernels.host_transfer import PinnedRing
from peagle.kernels.sampling import sample as sampling
from peagle.kernels.sampling import verify
from peagle.kernels.sampling.sample import argmax, sample_tokens
from peagle.kernels.sampling.verify import accept_draft_tokens, rates_for_acceptance_length, to_conditional_rates
from peagle.kernels.step import draft_inputs as draft_module
from peagle.kernels.step.draft_inputs import DraftInputs, build_draft_inputs, commit_state
from peagle.kernels.step.slot_updates import SlotUpdates, apply_updates_torch, apply_updates_triton
from peagle.kernels.step.verify_inputs import (
    SlotState,
    build_verify_inputs,
    build_verify_inputs_torch,
    build_verify_inputs_triton,
)
from peagle.speculative.reference import compute_probs

if sampling.triton is not None:
    from triton import language as tl

TOLERATED = 1e-3  # p-value; the seeds are fixed
ROOT = Path(__file__).resolve().parents[2]


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
def test_philox_is_philox(counter: tuple[int, ...], key: tuple[int, int], words: str) -> None:
    seed = key[1] << 32 | key[0]
    seed -= 2**64 if seed >= 2**63 else 0  # the same bits, signed
    got = sampling.philox_torch(ids(seed), ids(counter[0]), ids(counter[1]), counter[2], counter[3])
    assert " ".join(f"{int(x):08x}" for x in got) == words


@pytest.mark.parametrize("vocab", [1, 900, 1024, 1025, 4096, 5000, 12289])
def test_whole_rows_have_each_tokens_own_word(vocab: int) -> None:
    seeds, positions = ids(5, -7), ids(0, 2**31)
    want = sampling.bits_torch(seeds[:, None], positions[:, None], torch.arange(vocab))
    assert torch.equal(sampling.row_bits_torch(seeds, positions, vocab), want)


def test_no_two_uses_share_a_word() -> None:
    token = torch.arange(20_000)
    words = [
        sampling.bits_torch(ids(seed), ids(position), token, stream)
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
    w = sampling.uniform_torch(bits)
    assert w.dtype == torch.float32
    assert float(w.min()) > 0 and float(w.max()) < 1
    assert bool((w.diff() >= 0).all())
    noise = sampling.gumbel_torch(bits)
    want = -torch.log(-torch.log1p(-w.double()))
    torch.testing.assert_close(noise.double(), want, rtol=1e-6, atol=1e-6)


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
    first = sampling.bits_torch(seed, position, token).flatten()
    second = sampling.bits_torch(seed + step[0], position + step[1], token + step[2]).flatten()
    for shift in (0, 12, 28):  # low, middle and high bits
        a, b = (first >> shift) & 15, (second >> shift) & 15
        table = torch.bincount(a * 16 + b, minlength=256).view(16, 16)
        assert chisquare(table.flatten().numpy()).pvalue > TOLERATED
        assert chi2_contingency(table.numpy()).pvalue > TOLERATED
    assert chisquare(torch.bincount(second >> 22, minlength=1024).numpy()).pvalue > TOLERATED


# Choosing


def settings_of(rows: int, params: SamplingParams) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        torch.full((rows,), params.temperature),
        torch.full((rows,), params.top_k),
        torch.full((rows,), params.top_p),
        torch.full((rows,), params.min_p),
    )


@many(200)
@given(st.lists(st.lists(st.integers(-3, 3), min_size=6, max_size=6), min_size=1, max_size=4), st.booleans())
def test_greedy_is_the_first_largest(rows: list[list[int]], half: bool) -> None:
    logits = torch.tensor(rows, dtype=torch.bfloat16 if half else torch.float32)
    want = [row.index(max(row)) for row in rows]
    got = sample_tokens(
        logits, *settings_of(len(rows), SamplingParams()), torch.arange(len(rows)), torch.arange(len(rows))
    )
    assert got.dtype == torch.long
    assert got.tolist() == argmax(logits).tolist() == want


def naive_kept(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> list[bool]:
    """Which tokens survive; rejected where rounding would decide."""
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
def test_the_cut_keeps_what_should_survive(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    want = naive_kept(logits, temperature, top_k, top_p, min_p)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    row = torch.tensor([logits])
    cut = sampling.cuts_torch(row, *settings_of(1, params))
    assert (row >= cut)[0].tolist() == want


def test_a_flat_row_is_cut_too() -> None:
    # More tokens than the quick way looks at.
    row = torch.linspace(-1, 1, 5000)[torch.randperm(5000, generator=rng(0))][None]
    for top_p in (0.1, 0.5, 0.999):
        cut = sampling.cuts_torch(row, *settings_of(1, SamplingParams(temperature=1.0, top_p=top_p)))
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
def test_draws_have_the_shaped_distribution(params: SamplingParams, across: str) -> None:
    draws = 4000
    logits = torch.randn(12, generator=rng(3)) * 1.5
    probs = compute_probs(logits[None], params)[0]
    seeds, positions = torch.arange(draws), torch.full((draws,), 7)
    if across == "positions":
        seeds, positions = positions, seeds
    got = sample_tokens(logits.expand(draws, -1), *settings_of(draws, params), seeds, positions)
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
        got = sample_tokens(logits.expand(50, -1), *settings_of(50, params), torch.zeros_like(at), at)
        counts += torch.bincount(bins[got], minlength=20)
    assert chisquare(counts.numpy(), (mass * draws).numpy()).pvalue > TOLERATED


def test_a_row_does_not_depend_on_its_batch() -> None:
    rows, vocab = 7, 5000
    logits = torch.randn(rows, vocab, generator=rng(6)) * 3
    args = mixed_settings(rows)
    together = sample_tokens(logits, *args)
    apart = [int(sample_tokens(logits[r : r + 1], *(x[r : r + 1] for x in args))) for r in range(rows)]
    assert together.tolist() == apart


@pytest.mark.parametrize("temperature", [1e-38, 1e-6, 100.0])
def test_extreme_temperatures(temperature: float) -> None:
    logits = torch.tensor([[1.0, 90.0, 90.5, -300.0]]).expand(300, -1)
    params = SamplingParams(temperature=temperature, top_p=0.9)
    got = sample_tokens(logits, *settings_of(300, params), torch.zeros(300, dtype=torch.long), torch.arange(300))
    if temperature < 1:
        assert got.unique().tolist() == [2]
    else:
        assert len(got.unique()) >= 3


def test_what_is_masked_is_never_drawn() -> None:
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 1.0]]).expand(500, -1)
    for params in SHAPES.values():
        got = sample_tokens(logits, *settings_of(500, params), torch.zeros(500, dtype=torch.long), torch.arange(500))
        assert set(got.tolist()) <= {1, 3}


# Accepting


@st.composite
def rounds(draw: Any) -> tuple[list[list[int]], list[list[int]], list[int]]:
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
@given(rounds())
def test_accept_is_the_naive_one(case: tuple[list[list[int]], list[list[int]], list[int]]) -> None:
    zeros = torch.zeros(len(case[0]), dtype=torch.long)
    tokens, chosen, available = (torch.tensor(x) for x in case)
    accepted, emitted, _ = accept_draft_tokens(tokens, chosen, available, None, zeros, zeros)
    assert accepted.dtype == emitted.dtype == torch.long
    want = [naive_accept(*row) for row in zip(*case, strict=True)]
    assert list(zip(accepted.tolist(), emitted.tolist(), strict=True)) == want
    for chosen_row, emitted_row, count in zip(case[1], emitted.tolist(), accepted.tolist(), strict=True):
        assert emitted_row[: count + 1] == chosen_row[: count + 1]  # the text gains what the target chose


def toy_logits(text: list[int], vocab: int) -> Tensor:
    """A model: logits that depend on all of the text."""
    return torch.randn(vocab, generator=rng(hash(tuple(text)))) * 1.5


def toy_generate(params: SamplingParams, k: int, length: int, guess_right: float) -> list[int]:
    """Speculation with drafts that are sometimes what the target will choose."""
    vocab, text = 8, [1, 2]
    luck = rng(k)

    def target(prefix: list[int]) -> int:
        args = (*settings_of(1, params), ids(params.seed or 0), ids(len(prefix)))
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
def test_a_seeded_text_is_the_same_with_and_without_speculation(name: str) -> None:
    shape = SHAPES[name]
    for seed in (1, 2):
        params = SamplingParams(
            temperature=shape.temperature, top_k=shape.top_k, top_p=shape.top_p, min_p=shape.min_p, seed=seed
        )
        plain = toy_generate(params, 0, 40, 0.0)
        assert len(set(plain)) > 3
        for k in (1, 3, 6):
            assert toy_generate(params, k, 40, 0.7) == plain


def test_synthetic_acceptance_has_its_rates() -> None:
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
        assert bool((accepted != 2).all())  # the third always holds if the second does
        for row in range(50):
            count = int(accepted[row])
            want = [*range(1, count + 1), 100 + count] + [-1] * (k - count)
            assert emitted[row].tolist() == want
    accepted, *_ = accept_draft_tokens(tokens, chosen, torch.full((requests,), 1), rates, seeds, positions)
    assert int(accepted.max()) == 1


def test_synthetic_certainties() -> None:
    requests = 2000
    tokens = torch.zeros(requests, 4, dtype=torch.long)
    args = (torch.full((requests,), 3), torch.tensor([1.0, 1.0, 0.0]), torch.arange(requests), torch.arange(requests))
    accepted, *_ = accept_draft_tokens(tokens, tokens, *args)
    assert accepted.unique().tolist() == [2]


@pytest.mark.parametrize(
    ("length", "k", "want"),
    [
        (1.0, 3, [0.0, 0.0, 0.0]),
        (2.0, 3, [1.0, 0.0, 0.0]),
        (2.25, 3, [1.0, 0.25, 0.0]),
        (4.0, 3, [1.0, 1.0, 1.0]),
        (3.5, 3, [1.0, 1.0, 0.5]),
        (1.5, 1, [0.5]),
        (1.0, 0, []),
    ],
)
def test_rates_for_a_length(length: float, k: int, want: list[float]) -> None:
    assert rates_for_acceptance_length(length, k) == want
    rates = to_conditional_rates(want)
    assert all(0 <= r <= 1 for r in rates)
    assert 1 + sum(want) == pytest.approx(length)
    reached = 1.0
    for unconditional, rate in zip(want, rates, strict=True):
        reached *= rate
        assert reached == pytest.approx(unconditional)


def test_rates_that_make_no_sense_are_refused() -> None:
    for length, k in ((0.99, 3), (4.01, 3), (math.nan, 3), (math.inf, 3)):
        with pytest.raises(UserError, match="between 1 and 4"):
            rates_for_acceptance_length(length, k)
    for bad in ([1.1], [0.5, -0.1], [math.nan]):
        with pytest.raises(UserError, match="between 0 and 1"):
            to_conditional_rates(bad)
    with pytest.raises(UserError, match="larger than the one before"):
        to_conditional_rates([0.5, 0.6])
    assert to_conditional_rates([0.8, 0.4, 0.0, 0.0]) == [0.8, 0.5, 0.0, 0.0]


# The drafter's rows


def test_the_worked_example() -> None:
    x, b, mask = 21, 22, 99
    hidden = torch.tensor([[10.0], [11.0], [12.0]])
    args = (torch.tensor([[x, b, -1]]), ids(1), ids(10), hidden, torch.tensor([-1.0]), mask, 2)
    rows = build_draft_inputs(*args, ids(100))
    assert rows.token_ids_R.tolist() == [x, b, mask, mask]
    assert rows.hidden_states_RD[:, 0].tolist() == [10.0, 11.0, -1.0, -1.0]
    assert rows.positions_R.tolist() == [10, 11, 12, 13]
    assert rows.query_lens_B.tolist() == [3]
    assert rows.sample_rows_BK.tolist() == [[1, 2]]
    rows = build_draft_inputs(*args, ids(12))
    assert rows.query_lens_B.tolist() == [2]
    assert rows.positions_R.tolist() == [10, 11, 11, 11]


def naive_draft_inputs(
    emitted: list[list[int]], accepted: list[int], starts: list[int], mask: int | None, k: int, limit: list[int]
) -> dict[str, Any]:
    """Row by row, from the table of section 3 of the specification; a hidden state is its row's number, -1 the mask."""
    verified = len(emitted[0])
    out: dict[str, Any] = {name: [] for name in ("tokens", "hidden", "positions", "live", "sample")}
    rows = verified + k - 1 if mask is not None and k > 0 else verified
    for b, (tokens, m, start, end) in enumerate(zip(emitted, accepted, starts, limit, strict=True)):
        guesses = k if mask is not None else min(k, 1)
        live = m + max(guesses, 1)
        for j in range(rows):
            out["positions"].append(max(min(start + j, end - 1), 0))
            if j <= m:
                out["tokens"].append(tokens[j])
                out["hidden"].append(b * verified + j)
            elif mask is not None:
                out["tokens"].append(mask)
                out["hidden"].append(-1)
            else:  # padding of EAGLE-3: any token
                out["tokens"].append(0)
                out["hidden"].append(b * verified + j)
        out["live"].append(max(min(live, end - start), 0))
        out["sample"].append([b * rows + m + i for i in range(guesses)])
    return out


def as_naive(rows: DraftInputs) -> dict[str, Any]:
    return {
        "tokens": rows.token_ids_R.tolist(),
        "hidden": rows.hidden_states_RD[:, 0].tolist(),
        "positions": rows.positions_R.tolist(),
        "live": rows.query_lens_B.tolist(),
        "sample": rows.sample_rows_BK.tolist(),
    }


@many(300)
@given(st.data())
def test_draft_inputs_are_the_naive_ones(data: st.DataObject) -> None:
    batch, k = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 4))
    mask = data.draw(st.sampled_from([None, 1, 77]))
    accepted = data.draw(st.lists(st.integers(0, k), min_size=batch, max_size=batch))
    starts = data.draw(st.lists(st.integers(0, 20), min_size=batch, max_size=batch))
    room = data.draw(st.lists(st.integers(0, 12), min_size=batch, max_size=batch))
    limit = [s + r for s, r in zip(starts, room, strict=True)]
    emitted = [[10 * b + j if j <= m else -1 for j in range(k + 1)] for b, m in enumerate(accepted)]
    hidden = torch.arange(batch * (k + 1)).float()[:, None].expand(-1, 3).contiguous()
    rows = build_draft_inputs(
        torch.tensor(emitted),
        torch.tensor(accepted),
        torch.tensor(starts),
        hidden,
        torch.full((3,), -1.0) if mask is not None else None,
        mask,
        k,
        torch.tensor(limit),
    )
    assert as_naive(rows) == naive_draft_inputs(emitted, accepted, starts, mask, k, limit)
    assert bool((rows.hidden_states_RD == rows.hidden_states_RD[:, :1]).all())
    assert rows.query_lens_B.dtype == torch.int32
    assert rows.token_ids_R.dtype == rows.positions_R.dtype == rows.sample_rows_BK.dtype == torch.long
    assert rows.sample_rows_BK.shape == (batch, k if mask is not None else min(k, 1))


@many(300)
@given(st.data())
def test_commit_moves_the_state_on(data: st.DataObject) -> None:
    count, k = 5, data.draw(st.integers(0, 3))
    slots = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=3, unique=True))
    slots += [-1] * data.draw(st.integers(0, 2))
    accepted = [data.draw(st.integers(0, k)) for _ in slots]
    longest = data.draw(st.integers(3, 30))
    each = data.draw(st.booleans())
    emitted = [[100 * b + j for j in range(k + 1)] for b in range(len(slots))]
    drafts = torch.arange(len(slots) * k).view(len(slots), k) + 1000
    tokens, start = torch.arange(count * 6).view(count, 6), torch.arange(count) * 3
    available = torch.full((count,), 9)
    want = tokens.tolist(), start.tolist(), available.tolist()
    for b, (slot, m) in enumerate(zip(slots, accepted, strict=True)):
        if slot >= 0:
            want[0][slot][: k + 1] = [emitted[b][m], *drafts[b].tolist()]
            want[1][slot] += m + 1
            known = want[1][slot] + 1  # tokens known, the newest included, as the reference counts them
            want[2][slot] = max(min(k, longest - known - 1), 0)
    most = torch.full((len(slots),), longest) if each else longest
    commit_state(
        committed((tokens, start, available)),
        torch.tensor(slots),
        torch.tensor(emitted),
        torch.tensor(accepted),
        drafts,
        most,
    )
    assert (tokens.tolist(), start.tolist(), available.tolist()) == want


# Triton: each check compares with the torch version on the CPU

if sampling.triton is not None:

    @sampling._jit
    def words_kernel(seed, position, out, STREAM: tl.constexpr, LANES: tl.constexpr):
        call = tl.program_id(1) * LANES + tl.arange(0, LANES)
        row = tl.program_id(0)
        words = sampling._words(tl.load(seed + row), tl.load(position + row), call, STREAM)
        start = out + row * tl.num_programs(1) * 4 * LANES + tl.program_id(1) * 4 * LANES + tl.arange(0, LANES)
        for i in tl.static_range(4):
            tl.store(start + i * LANES, words[i].to(tl.int64))


def mixed_settings(rows: int) -> tuple[Tensor, ...]:
    """Temperature, top_k, top_p, min_p, seed, position: a row of each kind, over and over."""
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
    kinds = kinds[torch.arange(rows) % len(kinds)]
    seeds = torch.arange(rows) * 7919 - 5 + (torch.arange(rows) << 40)
    return kinds[:, 0], kinds[:, 1].long(), kinds[:, 2], kinds[:, 3], seeds, torch.arange(rows) * 31 + 2


def to(device: str, values: tuple[Tensor, ...]) -> list[Tensor]:
    return [x.to(device) for x in values]


def check_words(device: str) -> None:
    seeds, positions = ids(0, -1, 2**62 + 12345), ids(0, 70_000, 2**31 + 5)
    for stream in (sampling.SAMPLE_STREAM, sampling.ACCEPT_STREAM):
        out = torch.empty(3, 2 * sampling.BLOCK, dtype=torch.long, device=device)
        words_kernel[(3, 2)](*to(device, (seeds, positions)), out, STREAM=stream, LANES=sampling.LANES)
        token = torch.arange(out.shape[1])
        assert torch.equal(out.cpu(), sampling.bits_torch(seeds[:, None], positions[:, None], token, stream))


def check_choose(device: str) -> None:
    wide = [(64, 128_256), (9, 201_088)] if device == "cuda" else []
    for rows, vocab in [(3, 1), (9, 1025), (9, 9000), *wide]:
        for dtype in (torch.float32, torch.bfloat16):
            logits = (torch.randn(rows, vocab, generator=rng(vocab)) * 3).to(dtype)
            compare_choice(device, logits, mixed_settings(rows))
    padded = torch.randn(4, 130, generator=rng(1))
    compare_choice(device, padded[:, :100], mixed_settings(4))  # rows further apart than the vocabulary


def check_choose_ties_and_corners(device: str) -> None:
    ties = torch.randint(-2, 3, (9, 300), generator=rng(2)).float()
    compare_choice(device, ties, mixed_settings(9))
    compare_choice(device, ties * 0.0, mixed_settings(9))  # zeros of both signs
    compare_choice(device, torch.full((9, 5000), 3.0), mixed_settings(9))
    compare_choice(device, ties * 1e-44, mixed_settings(9))  # next to nothing, on both sides of zero
    masked = ties.masked_fill(torch.rand(9, 300, generator=rng(3)) < 0.9, -math.inf)
    compare_choice(device, masked, mixed_settings(9))
    temperature, *rest = mixed_settings(9)
    for scale in (1e-38, 1e-3, 50.0):
        compare_choice(device, ties, (temperature * scale, *rest))


def compare_choice(device: str, logits: Tensor, args: tuple[Tensor, ...]) -> None:
    there, on = logits.to(device), to(device, args)
    if logits.stride(0) != logits.shape[1]:
        there = logits.new_empty(len(logits), logits.stride(0)).to(device)[:, : logits.shape[1]].copy_(logits)
    assert torch.equal(sampling.argmax_triton(there).cpu(), sampling.argmax_torch(logits))
    cuts = sampling.cuts_triton(there, *on[:4]).cpu()
    want = sampling.cuts_torch(logits, *args[:4])
    same = (logits >= cuts[:, None]).eq(logits >= want[:, None]).all(1)
    for r in (~same).nonzero()[:, 0].tolist():  # the mass may reach top_p within rounding
        temperature, top_p, row = float(args[0][r]), float(args[2][r]), logits[r].double()
        unfiltered = (x[r : r + 1] for x in (args[0], args[1], torch.ones_like(args[2]), args[3]))
        weights = ((row - row.max()) / temperature).exp()
        weights /= weights[row >= sampling.cuts_torch(logits[r : r + 1], *unfiltered)].sum()
        low, high = sorted((float(cuts[r]), float(want[r])))
        assert float(weights[row >= high].sum()) == pytest.approx(top_p, abs=1e-4), (r, low, high)
        assert float(weights[row > low].sum()) == pytest.approx(top_p, abs=1e-4), (r, low, high)
    assert float(same.double().mean()) >= 0.9
    chosen = sampling.sample_tokens_triton(there, *on).cpu()
    assert chosen.dtype == torch.long
    assert torch.equal(chosen[same], sampling.sample_tokens_torch(logits, *args)[same])


def check_accept(device: str) -> None:
    for k in (0, 1, 3, 7, 18):
        batch = 12
        tokens = torch.randint(0, 2, (batch, k + 1), generator=rng(k))
        chosen = torch.randint(0, 2, (batch, k + 1), generator=rng(k + 50))
        chosen[:6, :-1] = tokens[:6, 1:]  # all hold
        available = torch.randint(0, k + 1, (batch,), generator=rng(k + 100))
        available[:4] = k
        seeds, positions = torch.arange(batch) << 33, torch.arange(batch) * 5 + 2**31 - 60
        for rates in (None, torch.linspace(1, 0.5, k)):
            want = verify.accept_draft_tokens_torch(tokens, chosen, available, rates, seeds, positions)
            there = None if rates is None else rates.to(device)
            args = to(device, (tokens, chosen, available))
            got = verify.accept_draft_tokens_triton(*args, there, *to(device, (seeds, positions)))
            for a, b in zip(got, want, strict=True):
                assert a.dtype == torch.long
                assert torch.equal(a.cpu(), b)


def check_draft_inputs(device: str) -> None:
    for k, width, mask, dtype in (
        (3, 40, 500, torch.float32),
        (1, 64, 1, torch.bfloat16),
        (7, 2880, 500, torch.bfloat16),
        (0, 16, 500, torch.float32),
        (3, 40, None, torch.float32),
        (0, 5, None, torch.bfloat16),
    ):
        batch = 4
        accepted = torch.randint(0, k + 1, (batch,), generator=rng(k))
        emitted = torch.randint(0, 400, (batch, k + 1), generator=rng(k + 1))
        emitted[torch.arange(k + 1) > accepted[:, None]] = -1
        starts, limit = ids(0, 10, 50, 3).int(), ids(100, 12, 51, 3).int()
        hidden = torch.randn(batch * (k + 1), width, generator=rng(2)).to(dtype)
        mask_hidden = torch.randn(width, generator=rng(3)).to(dtype) if mask is not None else None
        want = draft_module.build_draft_inputs_torch(emitted, accepted, starts, hidden, mask_hidden, mask, k, limit)
        on = to(device, (emitted, accepted, starts, hidden))
        there = None if mask_hidden is None else mask_hidden.to(device)
        got = draft_module.build_draft_inputs_triton(*on, there, mask, k, limit.to(device))
        for name, value in vars(want).items():
            other = getattr(got, name)
            assert other.dtype == value.dtype and other.shape == value.shape, name
            assert torch.equal(other.cpu(), value), name


def committed(parts: tuple[Tensor, ...]) -> SlotState:
    """A state of these token ids, computed tokens and draft counts: the fields that `commit_state` writes."""
    return SlotState(*parts, *[torch.empty(0)] * 3)


def check_commit_state(device: str) -> None:
    for k, dtype in ((3, torch.long), (0, torch.long), (7, torch.int32)):
        state = (torch.arange(60).view(6, 10), torch.arange(6).to(dtype) * 4, torch.full((6,), 9, dtype=dtype))
        slots, accepted = ids(4, 0, -1, 5), torch.arange(4) % (k + 1)
        emitted = torch.randint(0, 400, (4, k + 1), generator=rng(k))
        drafts = torch.randint(0, 400, (4, k), generator=rng(k + 1))
        for longest in (1, 22, 2000, ids(8, 9, 10, 24)):
            want, got = tuple(x.clone() for x in state), to(device, tuple(x.clone() for x in state))
            draft_module.commit_state_torch(committed(want), slots, emitted, accepted, drafts, longest)
            most = longest.to(device) if isinstance(longest, Tensor) else longest
            draft_module.commit_state_triton(committed(got), *to(device, (slots, emitted, accepted, drafts)), most)
            for a, b in zip(got, want, strict=True):
                assert torch.equal(a.cpu(), b)
            # Where they are is said: the same as if they had gone there in a round
            moved, before = tuple(x.clone() for x in state), state[1][slots] + accepted + 1
            args = (*to(device, (slots, emitted, accepted, drafts)), most, before.to(device))
            for commit in (draft_module.commit_state_torch, draft_module.commit_state_triton):
                placed = to(device, tuple(x.clone() for x in moved))
                placed[1].fill_(33)
                commit(committed(placed), *args)
                for i, (a, b) in enumerate(zip(placed, want, strict=True)):
                    rows = slots[slots >= 0] if i == 1 else slice(None)
                    assert torch.equal(a.cpu()[rows], b[rows])
                assert (placed[1].cpu()[[1, 2, 3]] == 33).all()


def slot_state(seed: int, slots: int = 5, drafts: int = 7, blocks: int = 300) -> SlotState:
    rng = torch.Generator().manual_seed(seed)
    state = SlotState.allocate(slots, drafts, blocks, torch.device("cpu"))
    for name, most in (
        ("token_ids_SN", 1000),
        ("num_computed_tokens_S", 60),
        ("num_draft_tokens_S", 8),
        ("block_tables_SM", 50),
    ):
        getattr(state, name).random_(0, most, generator=rng)
    for name in ("temperature_S", "top_p_S", "min_p_S"):
        getattr(state, name).uniform_(generator=rng)
    state.top_k_S.random_(0, 9, generator=rng)
    state.seed_S.random_(0, 2**62, generator=rng)
    return state


def check_round_inputs(device: str) -> None:
    for k in (0, 1, 3, 7):
        state = slot_state(k)
        slots = torch.tensor([3, -1, 0, 4])
        want = build_verify_inputs_torch(state, slots, k, 50)
        moved = SlotState(**{f.name: getattr(state, f.name).to(device) for f in fields(state)})
        have = build_verify_inputs_triton(moved, slots.to(device), k, 50)
        for f in fields(want):
            a, b = getattr(want, f.name), getattr(have, f.name).cpu()
            assert a.dtype == b.dtype and torch.equal(a, b), (k, f.name)


def check_slot_changes(device: str) -> None:
    """Blocks and settings land where they belong, and nothing else moves: more cells than a program has, seeds of 63
    bits, shares that no shorter float holds, and the ends of every array."""
    for seed in range(3):
        g = rng(seed)
        state = slot_state(seed, slots=9)
        want = SlotState(**{f.name: getattr(state, f.name).clone() for f in fields(state)})
        changes = SlotUpdates(state, PinnedRing(2))
        for slot in (0, 4, 8):
            first = int(torch.randint(0, 250, (), generator=g))
            blocks = torch.randint(0, 2**31 - 1, (300 - first,), generator=g)
            changes.set_blocks(slot, first, blocks.tolist())
            want.block_tables_SM[slot, first:] = blocks.int()
            shares, counts = torch.rand(3, generator=g), torch.randint(0, 2**63 - 1, (2,), generator=g)
            changes.set_sampling_params(slot, shares.tolist(), counts.tolist())
            want.float_params_3S[:, slot], want.int_params_2S[:, slot] = shares, counts
        cells = changes.pop_updates()
        moved = SlotState(**{f.name: getattr(state, f.name).to(device) for f in fields(state)})
        apply_updates_triton(moved, cells.to(device))
        apply_updates_torch(state, cells)
        for f in fields(want):
            for have in (state, moved):
                assert torch.equal(getattr(want, f.name), getattr(have, f.name).cpu()), (seed, f.name)


@pytest.mark.gpu
def test_changes_are_read_from_the_hosts_memory() -> None:
    """By a kernel that may run long after a list was made: no list made meanwhile is read in its place."""
    state, want = (SlotState.allocate(8, 3, 40, torch.device(device)) for device in ("cuda", "cpu"))
    sides = [SlotUpdates(each, PinnedRing(64)) for each in (state, want)]
    busy = torch.randn(4096, 4096, device="cuda")
    for _ in range(20):
        busy = busy @ busy
    for turn in range(40):
        for changes in sides:
            changes.set_blocks(turn % 8, turn % 30, [turn, turn + 1, turn + 2])
            changes.set_sampling_params(turn % 8, (turn / 7, turn / 9, turn / 11), (turn, 2**62 + turn))
            changes.send()
    for f in fields(want):
        assert torch.equal(getattr(want, f.name), getattr(state, f.name).cpu()), f.name


def test_the_rows_of_a_round() -> None:
    """The worked example of `build_verify_inputs`, and a row of nobody's."""
    state = SlotState.allocate(2, 2, 4, torch.device("cpu"))
    state.token_ids_SN[1] = torch.tensor([7, 8, 9])
    state.num_computed_tokens_S[1] = 5
    rows = build_verify_inputs(state, torch.tensor([1, -1]), 2, 7)
    assert rows.token_ids_BQ.tolist() == [[7, 8, 9], [0, 0, 0]]
    assert rows.positions_T.tolist() == [5, 6, 6, 0, 1, 2]
    assert rows.sample_positions_T.tolist() == [6, 7, 8, 1, 2, 3]
    assert rows.query_lens_B.tolist() == [2, 3] and rows.num_draft_tokens_B.tolist() == [0, 0]


CHECKS: dict[str, Callable[[str], None]] = {
    name: check for name, check in list(globals().items()) if name.startswith("check_")
}


@pytest.fixture(scope="module")
def interpreted() -> dict[str, str]:
    """What went wrong in each check, run in Triton's interpreter; empty where nothing did."""
    env = dict(os.environ, TRITON_INTERPRET="1", OMP_NUM_THREADS="1", PYTHONPATH=f"{ROOT}{os.pathsep}{ROOT / 'tests'}")
    done = subprocess.run([sys.executable, __file__], env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", CHECKS)
def test_triton_in_the_interpreter(name: str, interpreted: dict[str, str]) -> None:
    assert not interpreted[name], interpreted[name]


@pytest.mark.gpu
@pytest.mark.parametrize("name", CHECKS)
def test_triton_on_the_gpu(name: str) -> None:
    CHECKS[name]("cuda")


@pytest.mark.gpu
def test_a_captured_round_reads_its_inputs_anew() -> None:
    batch, k, vocab, width = 3, 4, 5000, 96
    rows = k + 1

    def inputs(seed: int) -> tuple[Tensor, ...]:
        g = rng(seed)
        logits = torch.randn(batch * rows, vocab, generator=g) * 3
        settings = tuple(x.roll(seed, 0) for x in mixed_settings(batch * rows))
        tokens = torch.cat([torch.zeros(batch, 1).long(), sample_tokens(logits, *settings).view(batch, rows)[:, :k]], 1)
        tokens[0, 2] = 0  # most drafts hold, one does not
        available = torch.randint(1, rows, (batch,), generator=g)
        hidden, mask_hidden = torch.randn(batch * rows, width, generator=g), torch.randn(width, generator=g)
        starts = torch.randint(0, 50, (batch,), generator=g)
        return logits, *settings, tokens, available, hidden, mask_hidden, starts, torch.full((batch,), 60)

    def round_of(x: list[Tensor], state: tuple[Tensor, ...]) -> list[Tensor]:
        logits, settings, (tokens, available, hidden, mask_hidden, starts, limit) = x[0], x[1:7], x[7:]
        chosen = sample_tokens(logits, *settings).view(batch, rows)
        accepted, emitted, _ = accept_draft_tokens(tokens, chosen, available, None, starts, starts)
        made = build_draft_inputs(emitted, accepted, starts, hidden, mask_hidden, 7, k, limit)
        drafts = argmax(logits)[made.sample_rows_BK % (batch * rows)]
        commit_state(committed(state), torch.arange(batch, device=logits.device), emitted, accepted, drafts, limit)
        return [chosen, accepted, emitted, *vars(made).values(), drafts]

    def fresh_state(device: str) -> tuple[Tensor, ...]:
        return (
            torch.zeros(4, rows).long().to(device),
            torch.zeros(4).long().to(device),
            torch.zeros(4).long().to(device),
        )

    there = [x.cuda() for x in inputs(0)]
    state = fresh_state("cuda")
    round_of(there, state)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = round_of(there, state)
    for seed in (1, 2, 3):
        here, fresh = inputs(seed), fresh_state("cpu")
        for a, b in zip(there, here, strict=True):
            a.copy_(b)
        for x in state:
            x.zero_()
        graph.replay()
        want = round_of(list(here), fresh)
        for a, b in zip([*result, *state], [*want, *fresh], strict=True):
            assert torch.equal(a.cpu(), b)


def test_all_of_it_works_without_triton() -> None:
    code = """
import sys
sys.modules["triton"] = None
import torch
from peagle.kernels.step.draft_inputs import build_draft_inputs
from peagle.kernels.sampling.sample import sample_tokens
from peagle.kernels.sampling.verify import accept_draft_tokens
one = torch.ones(2)
tokens = sample_tokens(torch.randn(2, 9), one, one.long() * 3, one * 0.9, one * 0.1, one.long(), one.long())
tokens, zero = tokens.view(1, 2), torch.zeros(1).long()
accepted, emitted, _ = accept_draft_tokens(tokens, tokens, zero + 1, None, zero, zero)
made = build_draft_inputs(emitted, accepted, zero, torch.randn(2, 4), torch.randn(4), 3, 1, zero + 9)
print(made.query_lens_B.tolist())
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in ("[1]", "[2]")


def main() -> None:
    if sampling.triton is None:
        sys.exit("triton is not installed: the kernels cannot be tested (pip install triton)")
    patch_interpreter()
    failed = {}
    for name, check in CHECKS.items():
        try:
            check("cpu")
            failed[name] = ""
        except Exception:
            failed[name] = traceback.format_exc()
    print(json.dumps(failed))


if __name__ == "__main__":
    main()
