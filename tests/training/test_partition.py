"""Partitioned training against the dense reference: equal loss and gradients for any chunk size."""

from __future__ import annotations

from dataclasses import replace

import dense_reference as dense
import pytest
import torch
from packed import packed_batch
from small_drafters import (
    CONFIGS,
    MASKS,
    PARALLEL,
    assert_gradients_close,
    hidden_states_of,
    load_target,
    random_drafter,
    take_gradients,
    with_greedy_tokens,
)
from torch import Tensor

from peagle.config import OBJECTIVES, Objective, TrainConfig
from peagle.data.batches import PackedBatch
from peagle.models.drafter import Drafter
from peagle.training.cod_sampling import CodPositions, all_cod_positions, sample_cod_positions, sampling_generator
from peagle.training.hidden_states.online import TargetHiddenStates
from peagle.training.loss import DraftLoss, depth_weights, position_weights
from peagle.training.partition import DrafterForward, accumulate_gradients, split_chains

UNIFORM = TrainConfig(objective="ce", loss_weighting="uniform")
ACCEPTANCE = replace(UNIFORM, loss_weighting="acceptance")


def reference_loss(
    drafter: Drafter,
    batch: PackedBatch,
    states: TargetHiddenStates,
    positions: CodPositions,
    settings: TrainConfig = UNIFORM,
) -> Tensor:
    """Weighted cross-entropy of every position, document by document, with a stored mask."""
    assert settings.objective == "ce"
    weights = depth_weights(positions.num_depths, settings.depth_decay)
    target = load_target(states.hidden_ND.dtype)
    total = torch.zeros((), dtype=states.hidden_ND.dtype)
    chains = set(zip(positions.anchor_R.tolist(), positions.depth_R.tolist(), strict=True))
    with_loss = chains | {(a, 0) for a in positions.anchor_A.tolist()}
    for start in batch.start_N.unique().tolist():
        end = int(batch.end_N[start])
        if end - start < 3:
            continue
        here = [(a, 0) for a in range(end - start - 1)]
        for depth in range(1, positions.num_depths):
            here += sorted((a - start, d) for a, d in chains if d == depth and start <= a < end)
        dense_positions = dense.DensePositions(*(torch.tensor(x) for x in zip(*here, strict=True)))
        output = dense.compute_drafter_outputs(
            drafter, batch.token_ids_N[None, start:end], states.aux_hidden_states_NX[None, start:end], dense_positions
        )
        kept = [i for i, (a, d) in enumerate(here) if (a + start, d) in with_loss]
        depth_R, position_R = dense_positions.depth_R[kept], dense_positions.position_R[kept]
        with torch.no_grad():
            logits = target.compute_logits(states.hidden_ND[start + position_R + 1])
        losses = dense.position_losses(drafter, output[0, kept], logits)
        weight = torch.tensor([weights[d] / positions.counts[d] for d in depth_R.tolist()], dtype=losses.dtype)
        if settings.loss_weighting == "acceptance":
            with torch.no_grad():
                ids = drafter.to_target_ids(torch.arange(drafter.cfg.draft_vocab_size))
                q = drafter.compute_logits(output[0, kept]).softmax(-1)
                acceptance = torch.minimum(q, logits.softmax(-1)[:, ids]).sum(-1)
            label = batch.token_ids_N[start + position_R + 2]
            reached = {here[i]: acceptance[k] * (logits[k].argmax() == label[k]) for k, i in enumerate(kept)}
            for k, i in enumerate(kept):
                anchor, depth = here[i]
                for earlier in range(depth):
                    weight[k] *= reached[anchor, earlier]
        total = total + (losses * weight).sum()
    return total


@pytest.mark.parametrize("settings", [UNIFORM, ACCEPTANCE], ids=["uniform", "acceptance"])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("kind", [k for k in CONFIGS if k != "p-eagle-window"])
def test_gradients_equal_the_reference(kind: str, dtype: torch.dtype, tolerance: float, settings: TrainConfig) -> None:
    cfg, batch = CONFIGS[kind], with_greedy_tokens(packed_batch(MASKS, vocab=128))
    drafter, states = random_drafter(cfg, dtype), hidden_states_of(batch, cfg, dtype)
    rows = sample_cod_positions(batch, 5, 0.8, sampling_generator(0, 0))
    assert rows.counts[-1] >= 5
    settings = replace(settings, depth_decay=0.9)
    weights = depth_weights(5, 0.9)
    loss = reference_loss(drafter, batch, states, rows, settings)
    loss.backward()
    expected = take_gradients(drafter)
    for chunk in (1, 7, 20, 10**9):
        totals = accumulate_gradients(drafter, load_target(dtype), states, batch, rows, settings, chunk)
        counts, losses, *_ = totals.tolist()
        assert counts == list(rows.counts)
        mean = sum(w * float(s) / n for w, s, n in zip(weights, losses, rows.counts, strict=True))
        assert settings.loss_weighting == "acceptance" or mean == pytest.approx(loss.item(), rel=tolerance)
        assert_gradients_close(take_gradients(drafter), expected, tolerance)


@pytest.mark.parametrize("kind", ["p-eagle-window", "eagle3-window"])
def test_sliding_windows(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference has no windows, so the test gives it a mask per layer."""
    cfg = replace(CONFIGS["p-eagle-window"], mask_token_id=PARALLEL.mask_token_id if kind.startswith("p") else None)
    batch = packed_batch([[0] * 6 + [1] * 16], vocab=128)
    drafter, states = random_drafter(cfg, torch.float64), hidden_states_of(batch, cfg, torch.float64)
    rows = all_cod_positions(batch, 4)

    def by_layer(batch_size: int, visible_RR: Tensor | None) -> object:
        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
            assert visible_RR is not None and window is not None
            position = here.position_R[: len(q)]
            near = position[:, None] - position[None, :] < window
            return plain(batch_size, visible_RR & near)(layer, q, k, v, None)

        return attend

    plain = dense.masked_attention
    calls: list[dense.DensePositions] = []
    states_fn = dense.compute_drafter_outputs

    def remember(drafter: Drafter, tokens: Tensor, aux_hidden_states: Tensor, rows: dense.DensePositions) -> Tensor:
        nonlocal here
        here = rows
        calls.append(rows)
        return states_fn(drafter, tokens, aux_hidden_states, rows)

    here: dense.DensePositions
    monkeypatch.setattr(dense, "compute_drafter_outputs", remember)
    monkeypatch.setattr(dense, "masked_attention", by_layer)
    reference_loss(drafter, batch, states, rows).backward()
    expected = take_gradients(drafter)
    monkeypatch.undo()
    assert calls
    for chunk in (5, 10**9):
        accumulate_gradients(drafter, load_target(torch.float64), states, batch, rows, UNIFORM, chunk)
        assert_gradients_close(take_gradients(drafter), expected, 1e-10)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_objective_is_equal_for_any_chunk_size(objective: Objective) -> None:
    cfg = CONFIGS["p-eagle"]
    batch = packed_batch(MASKS, vocab=128)
    drafter, states = random_drafter(cfg, torch.float64), hidden_states_of(batch, cfg, torch.float64)
    rows = sample_cod_positions(batch, 4, 0.7, sampling_generator(1, 0))
    found = []
    for chunk in (3, 10**9):
        totals = accumulate_gradients(
            drafter, load_target(torch.float64), states, batch, rows, replace(UNIFORM, objective=objective), chunk
        )
        found.append((take_gradients(drafter), totals))
    assert_gradients_close(found[0][0], found[1][0], 1e-10)
    for ours, theirs in zip(found[0][1], found[1][1], strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-12)


def test_prefix_match_counts_chains_that_match_completely() -> None:
    """A drafter that outputs the target's token at some positions and another at the rest."""
    batch = with_greedy_tokens(packed_batch(MASKS, vocab=128))
    rows, size, target = all_cod_positions(batch, 4), len(batch), load_target(torch.float64)
    vocab, drafter = len(target.lm_head.weight), random_drafter(CONFIGS["p-eagle"], torch.float64)
    states = hidden_states_of(batch, drafter.cfg, torch.float64)
    target_token = target.compute_logits(states.hidden_ND).argmax(-1)
    right = torch.rand(size, generator=torch.Generator().manual_seed(3)) < 0.7  # of what is token about a token
    (chunk,) = split_chains(rows, 10**9)
    token = torch.where(
        right[chunk.label_positions()],
        target_token[chunk.label_positions() - 1],
        (target_token[chunk.label_positions() - 1] + 1) % vocab,
    )
    drafter.lm_head = torch.nn.Linear(vocab, vocab, bias=False, dtype=torch.float64)
    drafter.lm_head.weight.data = torch.eye(vocab, dtype=torch.float64)
    loss = DraftLoss(drafter, target, states, UNIFORM, position_weights(rows.counts))
    one_hot = torch.nn.functional.one_hot(token, vocab).double()
    forward = DrafterForward(drafter, states, batch, torch.device("cpu"))
    loss.compute(one_hot, chunk.depths(), chunk.label_positions(), chunk.build_links(forward))
    expected = [0] * 4
    chains = set(zip(rows.anchor_R.tolist(), rows.depth_R.tolist(), strict=True)) | {
        (a, 0) for a in rows.anchor_A.tolist()
    }
    for a, d in chains:
        greedy = [bool(target_token[a + deep + 1] == batch.token_ids_N[a + deep + 2]) for deep in range(d)]
        expected[d] += all(greedy) and all(bool(right[a + deep + 2]) for deep in range(d + 1))
    assert loss.metrics_MK[-1].tolist() == expected
    assert 0 < expected[3] < expected[0] < rows.counts[0]


def test_gradients_of_batches_add_up() -> None:
    """Two batches with the counts of both are one batch of all their documents."""
    cfg, dtype = CONFIGS["eagle3"], torch.float64
    whole = packed_batch(MASKS, vocab=128)
    drafter, states = random_drafter(cfg, dtype), hidden_states_of(whole, cfg, dtype)
    rows = all_cod_positions(whole, 3)
    accumulate_gradients(drafter, load_target(dtype), states, whole, rows, UNIFORM, 10**9)
    expected = take_gradients(drafter)
    cut = len(MASKS[0]) + len(MASKS[1])
    parts = []
    for part in (slice(0, cut), slice(cut, None)):
        moved = PackedBatch(
            whole.token_ids_N[part],
            whole.position_N[part],
            whole.start_N[part] - part.start,
            whole.end_N[part] - part.start,
            whole.loss_mask_N[part],
            whole.row_ids,
        )
        parts.append((moved, TargetHiddenStates(states.hidden_ND[part], states.aux_hidden_states_NX[part])))
    for moved, part_states in parts:
        part_rows = all_cod_positions(moved, 3)
        accumulate_gradients(drafter, load_target(dtype), part_states, moved, part_rows, UNIFORM, 10**9, rows.counts)
    assert_gradients_close(take_gradients(drafter), expected, 1e-12)


def test_activation_checkpointing_changes_nothing() -> None:
    for kind in ("p-eagle", "eagle3"):
        cfg = CONFIGS[kind]
        batch = packed_batch(MASKS, vocab=128)
        drafter, states = random_drafter(cfg, torch.float64), hidden_states_of(batch, cfg, torch.float64)
        rows, found = all_cod_positions(batch, 4), []
        for drafter.recompute in (False, True):
            accumulate_gradients(drafter, load_target(torch.float64), states, batch, rows, UNIFORM, 11)
            found.append(take_gradients(drafter))
        assert_gradients_close(found[0], found[1], 1e-12)
