"""Partitioned training against the dense oracle: for any size of chunk the same loss and the same gradients."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pairs
import pytest
import torch
from packed import packed_batch
from torch import Tensor

from peagle.config import OBJECTIVES, DrafterConfig, Objective
from peagle.data.batches import PackedBatch
from peagle.models.decoder import Decoder
from peagle.models.drafter import Drafter
from peagle.training import dense_reference as dense
from peagle.training.cod_sampling import CodPositions, all_cod_positions, sample_cod_positions, sampling_generator
from peagle.training.hidden_states.online import TargetHiddenStates
from peagle.training.loss import DraftLoss, LossSettings, depth_weights
from peagle.training.partition import DrafterForward, accumulate_gradients, split_chains

PARALLEL = replace(pairs.BASE, mask_token_id=pairs.MASK_ID)
REDUCED = {"draft_vocab_size": pairs.REDUCED, "own_head": True}
KINDS = {
    "p-eagle": replace(PARALLEL, num_layers=2, fc_norm=True),
    "p-eagle-own": replace(PARALLEL, num_layers=2, own_embeddings=True, **REDUCED),
    "p-eagle-window": replace(PARALLEL, num_layers=2, windows=(4, 7)),
    "eagle3": replace(pairs.BASE, num_layers=2, norm_before_residual=True),
    "eagle3-own": replace(pairs.BASE, own_embeddings=True, norm_output=True, **REDUCED),
}
# a short prompt and its response, a response alone, two turns, and one too short to ask anything
MASKS = [[0] * 5 + [1] * 14, [1] * 9, [0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1], [0, 1]]


CE = LossSettings("ce")


@cache
def target_of(dtype: torch.dtype) -> Decoder:
    return pairs.load_decoder(pairs.FIXTURES / "target", dtype=torch.float32).to(dtype)


def create_drafter(cfg: DrafterConfig, dtype: torch.dtype) -> Drafter:
    torch.manual_seed(1)
    drafter = Drafter(cfg).to(dtype)
    for parameter in drafter.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    if drafter.d2t is not None:
        drafter.d2t.copy_(torch.arange(len(drafter.d2t)) * 2)  # draft id i is token 3 i
    return drafter.share_weights(target_of(dtype))


def states_of(batch: PackedBatch, cfg: DrafterConfig, dtype: torch.dtype) -> TargetHiddenStates:
    """Document by document, through the oracle."""
    parts = [
        dense.read_target(target_of(dtype), tokens[None], cfg.aux_layer_ids)
        for tokens in documents(batch.token_ids_N, batch)
    ]
    return TargetHiddenStates(torch.cat([h[0] for h, _ in parts]), torch.cat([t[0] for _, t in parts]))


def documents(x: Tensor, batch: PackedBatch) -> tuple[Tensor, ...]:
    return x.split(batch.start_N.unique_consecutive(return_counts=True)[1].tolist())


def likely(batch: PackedBatch, share: float = 0.8) -> PackedBatch:
    """The batch with a text that goes on as the target would in this share of its tokens."""
    rng = torch.Generator().manual_seed(5)
    token_N, target = batch.token_ids_N.clone(), target_of(torch.float64)
    for i in range(1, len(token_N)):
        start = int(batch.start_N[i])
        if start < i and torch.rand((), generator=rng) < share:
            hidden, _ = dense.read_target(target, token_N[None, start:i], pairs.BASE.aux_layer_ids)
            token_N[i] = target.compute_logits(hidden[0, -1:]).argmax()
    return replace(batch, token_ids_N=token_N)


def oracle(
    drafter: Drafter,
    batch: PackedBatch,
    states: TargetHiddenStates,
    rows: CodPositions,
    weights: list[float],
    aim: LossSettings = CE,
) -> Tensor:
    """Cross-entropy of every row, weighted, document by document, all of a document at once with a stored mask."""
    assert aim.objective == "ce"
    target = target_of(states.hidden_ND.dtype)
    total = torch.zeros((), dtype=states.hidden_ND.dtype)
    chains = set(zip(rows.anchor_R.tolist(), rows.depth_R.tolist(), strict=True))
    asked = chains | {(a, 0) for a in rows.anchor_A.tolist()}
    for start in batch.start_N.unique().tolist():
        end = int(batch.end_N[start])
        if end - start < 3:
            continue
        pairs_here = [(a, 0) for a in range(end - start - 1)]
        for depth in range(1, rows.depths):
            pairs_here += sorted((a - start, d) for a, d in chains if d == depth and start <= a < end)
        here = dense.DensePositions(*(torch.tensor(x) for x in zip(*pairs_here, strict=True)))
        said = dense.drafter_states(
            drafter, batch.token_ids_N[None, start:end], states.aux_hidden_states_NX[None, start:end], here
        )
        kept = [i for i, (a, d) in enumerate(pairs_here) if (a + start, d) in asked]
        depth = here.depth_R[kept]
        with torch.no_grad():
            logits = target.compute_logits(states.hidden_ND[start + here.position_R[kept] + 1]) * aim.sharpen
        losses = dense.row_losses(drafter, said[0, kept], logits)
        each = torch.tensor([weights[d] / rows.counts[d] for d in depth.tolist()], dtype=losses.dtype)
        if aim.by_reach or aim.by_start or aim.by_value:
            with torch.no_grad():
                ids = drafter.to_target_ids(torch.arange(drafter.cfg.draft_vocab_size))
                common = torch.minimum(
                    drafter.compute_logits(said[0, kept]).softmax(-1), logits.softmax(-1)[:, ids]
                ).sum(-1)
            text = batch.token_ids_N[start + here.position_R[kept] + 2]
            used = {pairs_here[i]: common[k] * (logits[k].argmax() == text[k]) for k, i in enumerate(kept)}
            for k, i in enumerate(kept):
                anchor, deep = pairs_here[i]
                for d in range(deep if aim.by_reach else 0):
                    each[k] *= used[anchor, d]
                if aim.by_start:
                    each[k] *= 0.2 + 0.8 * (1 - used.get((anchor - 1, 0), 0.0))
                if aim.by_value:
                    each[k] *= 1 + opened(used, anchor, deep, rows.depths)
        total = total + (losses * each).sum()
    return total


def opened(used: dict[tuple[int, int], Tensor], anchor: int, depth: int, depths: int) -> Tensor:
    """Drafts behind this one that are kept if it is; behind the last of its chain each as likely as that."""
    own = used[anchor, depth]
    if (anchor, depth + 1) in used:
        return used[anchor, depth + 1] * (1 + opened(used, anchor, depth + 1, depths))
    return sum((own**step for step in range(1, depths - depth)), own * 0)


def gradients(drafter: Drafter) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None}
    drafter.zero_grad(set_to_none=True)
    return found


def assert_close(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        error = (ours[name] - value).norm() / value.norm().clamp(min=1e-30)
        assert error < tolerance, (name, float(error))


AIMS = {
    "ce": CE,
    "by-reach": LossSettings("ce", 2.0, by_reach=True),
    "by-start": LossSettings("ce", 2.0, by_start=True),
}
AIMS |= {
    "by-both": LossSettings("ce", 2.0, by_reach=True, by_start=True),
    "by-value": LossSettings("ce", 2.0, by_value=True),
}
AIMS |= {"by-all": LossSettings("ce", 2.0, by_reach=True, by_start=True, by_value=True)}


@pytest.mark.parametrize("aim", AIMS.values(), ids=AIMS)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("kind", [k for k in KINDS if k != "p-eagle-window"])
def test_gradients_equal_the_dense_ones(kind: str, dtype: torch.dtype, tolerance: float, aim: LossSettings) -> None:
    cfg, batch = KINDS[kind], likely(packed_batch(MASKS, vocab=128))
    drafter, states = create_drafter(cfg, dtype), states_of(batch, cfg, dtype)
    rows = sample_cod_positions(batch, 5, 0.8, sampling_generator(0, 0))
    assert rows.counts[-1] >= 5
    weights = depth_weights(5, 0.9)
    loss = oracle(drafter, batch, states, rows, weights, aim)
    loss.backward()
    wanted = gradients(drafter)
    for chunk in (1, 7, 20, 10**9):
        totals = accumulate_gradients(drafter, target_of(dtype), states, batch, rows, aim, weights, chunk)
        assert totals.rows_K.tolist() == list(rows.counts)
        mean = sum(w * float(s) / n for w, s, n in zip(weights, totals.loss_K, rows.counts, strict=True))
        assert aim.by_reach or aim.by_start or aim.by_value or mean == pytest.approx(loss.item(), rel=tolerance)
        assert_close(gradients(drafter), wanted, tolerance)


@pytest.mark.parametrize("kind", ["p-eagle-window", "eagle3-window"])
def test_sliding_windows(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle refuses windows, so it is given its mask layer by layer here."""
    cfg = replace(KINDS["p-eagle-window"], mask_token_id=PARALLEL.mask_token_id if kind.startswith("p") else None)
    batch = packed_batch([[0] * 6 + [1] * 16], vocab=128)
    drafter, states = create_drafter(cfg, torch.float64), states_of(batch, cfg, torch.float64)
    rows = all_cod_positions(batch, 4)

    def by_layer(batch_size: int, visible_RR: Tensor | None) -> object:
        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
            assert visible_RR is not None and window is not None
            position = here.position_R[: len(q)]
            near = position[:, None] - position[None, :] < window
            return plain(batch_size, visible_RR & near)(layer, q, k, v, None)

        return attend

    plain = dense.batched
    kept: list[dense.DensePositions] = []
    states_fn = dense.drafter_states

    def remember(drafter: Drafter, tokens: Tensor, aux_hidden_states: Tensor, rows: dense.DensePositions) -> Tensor:
        nonlocal here
        here = rows
        kept.append(rows)
        return states_fn(drafter, tokens, aux_hidden_states, rows)

    here: dense.DensePositions
    monkeypatch.setattr(dense, "drafter_states", remember)
    monkeypatch.setattr(dense, "batched", by_layer)
    weights = depth_weights(4)
    oracle(drafter, batch, states, rows, weights).backward()
    wanted = gradients(drafter)
    monkeypatch.undo()
    assert kept
    for chunk in (5, 10**9):
        accumulate_gradients(drafter, target_of(torch.float64), states, batch, rows, LossSettings("ce"), weights, chunk)
        assert_close(gradients(drafter), wanted, 1e-10)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_objective_is_the_same_for_any_chunk(objective: Objective) -> None:
    cfg = KINDS["p-eagle"]
    batch = packed_batch(MASKS, vocab=128)
    drafter, states = create_drafter(cfg, torch.float64), states_of(batch, cfg, torch.float64)
    rows = sample_cod_positions(batch, 4, 0.7, sampling_generator(1, 0))
    weights, found = depth_weights(4), []
    for chunk in (3, 10**9):
        totals = accumulate_gradients(
            drafter, target_of(torch.float64), states, batch, rows, LossSettings(objective), weights, chunk
        )
        found.append((gradients(drafter), totals))
    assert_close(found[0][0], found[1][0], 1e-10)
    for ours, theirs in zip(found[0][1].tensors(), found[1][1].tensors(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-12)


def test_unbroken_rows_are_those_whose_whole_chain_matches() -> None:
    """A drafter that says the target's token at some positions and another at the rest."""
    batch = likely(packed_batch(MASKS, vocab=128))
    rows, size, target = all_cod_positions(batch, 4), len(batch), target_of(torch.float64)
    vocab, drafter = len(target.lm_head.weight), create_drafter(KINDS["p-eagle"], torch.float64)
    states = states_of(batch, drafter.cfg, torch.float64)
    told = target.compute_logits(states.hidden_ND).argmax(-1)
    right = torch.rand(size, generator=torch.Generator().manual_seed(3)) < 0.7  # of what is said about a token
    (chunk,) = split_chains(rows, 10**9)
    said = torch.where(right[chunk.questions()], told[chunk.questions() - 1], (told[chunk.questions() - 1] + 1) % vocab)
    drafter.lm_head = torch.nn.Linear(vocab, vocab, bias=False, dtype=torch.float64)
    drafter.lm_head.weight.data = torch.eye(vocab, dtype=torch.float64)
    examiner = DraftLoss(drafter, target, states, LossSettings("kl"), rows.counts, depth_weights(4))
    one_hot = torch.nn.functional.one_hot(said, vocab).double()
    view = DrafterForward(drafter, states, batch, torch.device("cpu"))
    examiner.ask(one_hot, chunk.depths(), chunk.questions(), chunk.links(view))
    wanted = [0] * 4
    chains = set(zip(rows.anchor_R.tolist(), rows.depth_R.tolist(), strict=True)) | {
        (a, 0) for a in rows.anchor_A.tolist()
    }
    for a, d in chains:
        went_on = [bool(told[a + deep + 1] == batch.token_ids_N[a + deep + 2]) for deep in range(d)]
        wanted[d] += all(went_on) and all(bool(right[a + deep + 2]) for deep in range(d + 1))
    assert examiner.totals.unbroken_K.tolist() == wanted
    assert 0 < wanted[3] < wanted[0] < rows.counts[0]


def test_batches_of_one_step_add_up() -> None:
    """Two batches with the counts of both are one batch of all their documents."""
    cfg, dtype = KINDS["eagle3"], torch.float64
    whole = packed_batch(MASKS, vocab=128)
    drafter, states = create_drafter(cfg, dtype), states_of(whole, cfg, dtype)
    weights, rows = depth_weights(3), all_cod_positions(whole, 3)
    accumulate_gradients(drafter, target_of(dtype), states, whole, rows, LossSettings("ce"), weights, 10**9)
    wanted = gradients(drafter)
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
        accumulate_gradients(
            drafter, target_of(dtype), part_states, moved, part_rows, LossSettings("ce"), weights, 10**9, rows.counts
        )
    assert_close(gradients(drafter), wanted, 1e-12)


def test_recomputed_layers_change_nothing() -> None:
    for kind in ("p-eagle", "eagle3"):
        cfg = KINDS[kind]
        batch = packed_batch(MASKS, vocab=128)
        drafter, states = create_drafter(cfg, torch.float64), states_of(batch, cfg, torch.float64)
        rows, weights, found = all_cod_positions(batch, 4), depth_weights(4), []
        for drafter.recompute in (False, True):
            accumulate_gradients(
                drafter, target_of(torch.float64), states, batch, rows, LossSettings("ce"), weights, 11
            )
            found.append(gradients(drafter))
        assert_close(found[0], found[1], 1e-12)
