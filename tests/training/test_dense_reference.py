"""The dense reference: visibility, sampled positions, and equality of training positions with inference rows."""

from __future__ import annotations

from dataclasses import replace

import dense_reference as dense
import pairs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.config import LayerConfig, SamplingParams
from peagle.kernels.attention.dense import causal_attention
from peagle.models.decoder import Decoder
from peagle.models.drafter import Drafter
from peagle.speculative.reference import propose_draft_tokens

LENGTH = 14


def rng_of(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rows_of(chains: list[tuple[int, int]]) -> dense.DensePositions:
    return dense.DensePositions(torch.tensor([a for a, _ in chains]), torch.tensor([d for _, d in chains]))


def chains_of(rows: dense.DensePositions) -> list[tuple[int, int]]:
    return list(zip(rows.anchor_R.tolist(), rows.depth_R.tolist(), strict=True))


def test_worked_example() -> None:
    """The table of the module's docstring, row by row."""
    shown = {
        (0, 0): [(0, 0)],
        (1, 0): [(0, 0), (1, 0)],
        (2, 0): [(0, 0), (1, 0), (2, 0)],
        (3, 0): [(0, 0), (1, 0), (2, 0), (3, 0)],
        (0, 1): [(0, 0), (0, 1)],
        (1, 1): [(0, 0), (1, 0), (1, 1)],
        (2, 1): [(0, 0), (1, 0), (2, 0), (2, 1)],
    }
    rows = dense.sample_nested_positions(6, 2, 1.0, rng_of(0))
    chains = chains_of(rows)
    assert chains == list(shown)
    visible = rows.visible_RR()
    assert {c: [chains[j] for j in visible[i].nonzero()[:, 0]] for i, c in enumerate(chains)} == shown
    assert rows.position_R.tolist() == [0, 1, 2, 3, 1, 2, 3]
    table = dense.__doc__ or ""
    for (anchor, depth), seen in shown.items():
        line = table[table.index(f"({anchor},{depth}):") :].splitlines()[0].split("  (")[0]
        assert line.split(":")[1].split() == [f"{a},{d}" for a, d in seen], line


nestings = st.tuples(st.integers(3, 40), st.integers(1, 9), st.floats(0.0, 1.0, allow_nan=False), st.integers(0, 2**31))


@settings(max_examples=80, deadline=None)
@given(nestings)
def test_visible_rows(how: tuple[int, int, float, int]) -> None:
    """Lists the rows before each position in the sequence that inference would compute."""
    length, depths, rate, seed = how
    rows = dense.sample_nested_positions(length, depths, rate, rng_of(seed))
    chains = chains_of(rows)
    visible = rows.visible_RR()
    assert visible.shape == (len(chains), len(chains)) and visible.dtype == torch.bool
    for i, (anchor, depth) in enumerate(chains):
        before = {(p, 0) for p in range(anchor + 1)} | {(anchor, d) for d in range(1, depth + 1)}
        assert {chains[j] for j in visible[i].nonzero()[:, 0].tolist()} == before
        # the rows seen stand at positions 0 .. own, each taken once: the causal row that inference has
        assert sorted(rows.position_R[visible[i]].tolist()) == list(range(anchor + depth + 1))


@settings(max_examples=150, deadline=None)
@given(nestings)
def test_nested_rows(how: tuple[int, int, float, int]) -> None:
    length, depths, rate, seed = how
    rows = dense.sample_nested_positions(length, depths, rate, rng_of(seed))
    chains = chains_of(rows)
    assert len(set(chains)) == len(chains)
    assert chains == sorted(chains, key=lambda c: (c[1], c[0])), "depth by depth, anchors in order"
    for anchor, depth in chains:
        assert 0 <= anchor and 0 <= depth < depths and anchor + depth + 2 < length
        assert depth == 0 or (anchor, depth - 1) in chains
    kept = [[a for a, d in chains if d == depth] for depth in range(depths)]
    assert kept[0] == list(range(length - 2))
    for depth in range(1, depths):
        could = sum(a + depth + 2 < length for a in kept[depth - 1])
        assert len(kept[depth]) == min(could, max(round((length - 2 - depth) * rate**depth), 0))
    again = dense.sample_nested_positions(length, depths, rate, rng_of(seed))
    assert torch.equal(again.anchor_R, rows.anchor_R) and torch.equal(again.depth_R, rows.depth_R)


def test_down_sample_ratio_on_long_sequences() -> None:
    rows = dense.sample_nested_positions(2000, 4, 0.8, rng_of(0))
    counts = torch.bincount(rows.depth_R).tolist()
    assert counts[0] == 1998
    for before, after in zip(counts, counts[1:], strict=False):
        assert abs(after / before - 0.8) < 0.01
    other = dense.sample_nested_positions(2000, 4, 0.8, rng_of(1))
    assert not torch.equal(other.anchor_R, rows.anchor_R), "another seed keeps other chains"


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**31))
def test_every_anchor_is_kept_equally_often(seed: int) -> None:
    """Over many draws each anchor is kept about as often as the others."""
    rng = rng_of(seed)
    count = torch.zeros(10)
    for _ in range(400):
        rows = dense.sample_nested_positions(13, 2, 0.5, rng)
        count[rows.anchor_R[rows.depth_R == 1]] += 1
    assert 120 < count.min() and count.max() < 280  # 200 expected, standard deviation 10


def replay_inference(
    drafter: Drafter, tokens: torch.Tensor, aux_hidden_states_TN: torch.Tensor, anchor: int, depth: int
) -> torch.Tensor:
    """The LM head's input for draft token `depth` after tokens[: anchor + 2], computed as at inference, with the text's
    tokens in place of an EAGLE-3 drafter's own."""
    row_tokens = tokens[1 : anchor + 2].tolist()
    hidden = drafter.combine_hidden_states(aux_hidden_states_TN[: anchor + 1])

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        return drafter(torch.tensor(row_tokens), hidden, torch.arange(len(row_tokens)), causal_attention)

    if drafter.cfg.mask_token_id is not None:
        row_tokens += [drafter.cfg.mask_token_id] * depth
        hidden = torch.cat([hidden, drafter.mask_hidden_states(depth)])
        return run()[0][-1]
    for step in range(depth):
        _, prenorm = run()
        row_tokens.append(int(tokens[anchor + 2 + step]))
        hidden = torch.cat([hidden, prenorm[-1:]])
    return run()[0][-1]


def sequences(count: int = 2, length: int = LENGTH) -> torch.Tensor:
    return torch.stack([torch.tensor(list(pairs.TEXT[500 + 97 * i : 500 + 97 * i + length])) for i in range(count)])


def biased() -> tuple[Decoder, Drafter]:
    """A random pair with biases, QK norms and an odd number of layers, which no trained pair has."""
    target = pairs.load_pair("eagle3-1")[0]
    layer = LayerConfig(64, 96, 2, 1, 16, qkv_bias=True, out_bias=True, mlp_bias=True, qk_norm=True)
    drafter = Drafter(replace(pairs.BASE, layer=layer, num_layers=3, norm_output=True, aux_layer_ids=(0, 5)))
    pairs.initialise(drafter, seed=4, scale=0.2)
    return target, drafter.share_weights(target).requires_grad_(False)


@torch.no_grad()
@pytest.mark.parametrize("name", [*pairs.RECIPES, "biased"])
def test_training_positions_equal_inference_rows(name: str) -> None:
    target, drafter = biased() if name == "biased" else pairs.load_pair(name)
    tokens_BT = sequences()
    _, aux_hidden_states_BTN = dense.compute_target_states(target, tokens_BT, drafter.cfg.aux_layer_ids)
    for rate in (1.0, 0.7):
        rows = dense.sample_nested_positions(LENGTH, 5, rate, rng_of(2))
        said_BRD = dense.compute_drafter_outputs(drafter, tokens_BT, aux_hidden_states_BTN, rows)
        assert int(rows.depth_R.max()) == 4
        for b, tokens in enumerate(tokens_BT):
            for i, (anchor, depth) in enumerate(chains_of(rows)):
                want = replay_inference(drafter, tokens, aux_hidden_states_BTN[b], anchor, depth)
                torch.testing.assert_close(said_BRD[b, i], want, atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("name", pairs.RECIPES)
def test_training_positions_draft_the_reference_tokens(name: str) -> None:
    """The reference's draft tokens are the argmax at training positions. For EAGLE-3 the text consists of its draft
    tokens, so that both have the same inputs."""
    target, drafter = pairs.load_pair(name)
    for start in (0, 300, 900):
        known = list(pairs.TEXT[start : start + 9])
        anchor, k = len(known) - 2, 4
        _, aux_hidden_states_BTN = dense.compute_target_states(target, torch.tensor([known]), drafter.cfg.aux_layer_ids)
        draft = propose_draft_tokens(
            drafter, known, aux_hidden_states_BTN[0, : anchor + 1], k, SamplingParams(), rng_of(0)
        )
        text = torch.tensor([known + draft.token_ids + [0]])
        _, aux_hidden_states_BTN = dense.compute_target_states(target, text, drafter.cfg.aux_layer_ids)
        rows = rows_of([(a, 0) for a in range(anchor + 1)] + [(anchor, d) for d in range(1, k)])
        output = dense.compute_drafter_outputs(drafter, text, aux_hidden_states_BTN, rows)[0, -k:]
        assert drafter.to_target_ids(drafter.compute_logits(output).argmax(-1)).tolist() == draft.token_ids


@torch.no_grad()
def test_target_states_of_sequences_are_independent() -> None:
    target = pairs.load_pair("eagle3-1")[0]
    tokens_BT = sequences(3)
    hidden, aux_hidden_states_BTN = dense.compute_target_states(target, tokens_BT, (0, 3, 5))
    for b, tokens in enumerate(tokens_BT):
        alone, aux_hidden_states = target(tokens, torch.arange(LENGTH), causal_attention, (0, 3, 5))
        torch.testing.assert_close(hidden[b], alone, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(aux_hidden_states_BTN[b], aux_hidden_states, atol=1e-5, rtol=1e-5)


def direct_loss(
    drafter: Drafter, target: Decoder, tokens_BT: torch.Tensor, rows: dense.DensePositions, loss_mask_BT: torch.Tensor
) -> float:
    """Computes every position in a pass of its own and sums in fp64."""
    by_depth: dict[int, list[float]] = {}
    weights: dict[int, int] = {}
    for tokens, loss_mask in zip(tokens_BT, loss_mask_BT, strict=True):
        for anchor, depth in chains_of(rows):
            label = anchor + depth + 2  # the token loss_mask for
            read = tokens[:label]
            hidden, aux_hidden_states = target(
                read, torch.arange(len(read)), causal_attention, drafter.cfg.aux_layer_ids
            )
            assert aux_hidden_states is not None
            p = target.compute_logits(hidden[-1]).double().softmax(-1).tolist()
            head = drafter.lm_head_weight.double()
            output = replay_inference(drafter, tokens, aux_hidden_states, anchor, depth).double()
            log_q = (head @ output).log_softmax(-1).tolist()
            offsets = [0] * len(log_q) if drafter.d2t is None else drafter.d2t.tolist()
            cost = -sum(p[i + offset] * log_q[i] for i, offset in enumerate(offsets))
            by_depth.setdefault(depth, []).append(cost if loss_mask[label] else 0.0)
            weights[depth] = weights.get(depth, 0) + int(loss_mask[label])
    return sum(sum(costs) / max(weights[d], 1) for d, costs in by_depth.items()) / len(by_depth)


@torch.no_grad()
@pytest.mark.parametrize("name", ["p-eagle-1", "p-eagle-4-reduced", "p-eagle-1-wide", "eagle3-4", "eagle3-4-reduced"])
def test_loss(name: str) -> None:
    target, drafter = pairs.load_pair(name)
    tokens_BT = sequences(2, 11)
    rows = dense.sample_nested_positions(11, 4, 0.75, rng_of(7))
    everything = torch.ones_like(tokens_BT, dtype=torch.bool)
    got = dense.compute_loss(drafter, target, tokens_BT, rows)
    assert float(got) == pytest.approx(direct_loss(drafter, target, tokens_BT, rows, everything), rel=1e-5)
    some = everything.clone()
    some[0, :6] = False
    some[1, 4:] = False
    got = dense.compute_loss(drafter, target, tokens_BT, rows, some)
    assert float(got) == pytest.approx(direct_loss(drafter, target, tokens_BT, rows, some), rel=1e-5)
    assert float(dense.compute_loss(drafter, target, tokens_BT, rows, ~everything)) == 0.0


def test_loss_with_a_reduced_vocabulary() -> None:
    target, drafter = pairs.load_pair("p-eagle-1-reduced")
    assert drafter.d2t is not None
    known = (torch.arange(len(drafter.d2t)) + drafter.d2t).tolist()
    absent = next(i for i in range(pairs.VOCAB) if i not in known)
    output = torch.randn(1, 1, drafter.cfg.layer.hidden_size, generator=rng_of(0))
    certain = torch.full((1, 1, pairs.VOCAB), -100.0)
    certain[..., absent] = 100.0
    assert float(dense.position_losses(drafter, output, certain)) == 0.0
    for i in (0, 5, len(known) - 1):
        certain = torch.full((1, 1, pairs.VOCAB), -100.0)
        certain[..., known[i]] = 100.0
        want = -drafter.compute_logits(output).log_softmax(-1)[0, 0, i]
        assert float(dense.position_losses(drafter, output, certain)) == pytest.approx(float(want), rel=1e-5)


@pytest.mark.parametrize("name", ["p-eagle-4-reduced", "eagle3-4-reduced", "p-eagle-1"])
def test_only_drafter_weights_get_gradients(name: str) -> None:
    target, drafter = pairs.load_pair(name)
    drafter.requires_grad_(True)
    rows = dense.sample_nested_positions(LENGTH, 3, 0.9, rng_of(0))
    dense.compute_loss(drafter, target, sequences(), rows).backward()
    for weight, parameter in drafter.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), weight
        assert parameter.grad.abs().sum() > 0, weight
    assert all(p.grad is None for p in target.parameters())
