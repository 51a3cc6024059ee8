"""Batches in frames against the same batches as they are: gradients and totals, P-EAGLE and EAGLE-3, in fp64; on a GPU
also steps that are replayed against those they were captured from."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from packed import packed_batch
from support import many
from test_partition import KINDS, assert_close, create_drafter, gradients, likely, target_of

from peagle.config import TrainConfig
from peagle.training import cuda_graphs as captured
from peagle.training.cod_sampling import sample_cod_positions, sampling_generator
from peagle.training.cuda_graphs import BatchPadder, GraphedStep
from peagle.training.hidden_states.online import OnlineHiddenStates
from peagle.training.loss import LossSettings, depth_weights, row_weights
from peagle.training.optimizer import Optimizer
from peagle.training.partition import accumulate_gradients

DEPTHS, RATE = 4, 0.8


def settings(method: str, tokens: int, **more: bool) -> TrainConfig:
    sizes = {"depths": DEPTHS, "rate": RATE, "batch_tokens": tokens, "max_length": tokens}
    return TrainConfig(method=method, objective="kl", **sizes, **more)  # type: ignore[arg-type]


masks = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 14)).filter(any).map(lambda n: [0] * n[0] + [1] * n[1]),
    min_size=1,
    max_size=5,
)


@pytest.mark.parametrize("kind", ["p-eagle", "p-eagle-own", "eagle3", "eagle3-own"])
@many(12)
@given(
    masks=masks,
    spare=st.integers(0, 20),
    part=st.sampled_from([1, 4, 64]),
    most=st.sampled_from([7, 1000]),
    counted=st.fixed_dictionaries({name: st.booleans() for name in ("by_reach", "by_start", "by_value")}),
)
def test_frames_change_nothing(
    kind: str, masks: list[list[int]], spare: int, part: int, most: int, counted: dict[str, bool]
) -> None:
    batch = likely(packed_batch(masks, vocab=128))
    cfg = settings("eagle3" if kind.startswith("eagle3") else "p-eagle", len(batch) + spare, **counted)
    drafter, target = create_drafter(KINDS[kind], torch.float64), target_of(torch.float64)
    rows = sample_cod_positions(batch, DEPTHS, RATE, sampling_generator(0, len(batch)))
    online, weights = OnlineHiddenStates(target, drafter.cfg.aux_layer_ids), depth_weights(DEPTHS, 0.9)
    framer = BatchPadder(cfg, 128, drafter.cfg.parallel, 10**6, pinned=False)
    framer.part, framer.most = part, most
    framed = framer.framed(batch, rows)
    if framed is None:
        sizes = framer.sizes(len(rows.anchor_A))
        question = np.sort(torch.cat([rows.anchor_A, rows.anchor_R + rows.depth_R]).numpy())
        assert not len(rows.anchor_R) or len(np.unique(question)) > sizes.loss.chunk_positions
        return
    wanted_totals = accumulate_gradients(
        drafter, target, online.states(batch), batch, rows, LossSettings.of(cfg), weights, 10**6
    )
    wanted = gradients(drafter)
    totals = GraphedStep(drafter, target, online, cfg).accumulate(framed, row_weights(rows.counts, weights))
    assert_close(gradients(drafter), wanted, 1e-10)
    assert totals.rows_K.tolist() == list(rows.counts)
    for ours, theirs in zip(totals.tensors(), wanted_totals.tensors(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("counted", [{}, {"by_reach": True, "by_start": True, "by_value": True}], ids=["all", "some"])
@pytest.mark.parametrize("kind", ["p-eagle", "p-eagle-own", "eagle3"])
def test_replayed_steps_are_the_ones_captured(kind: str, counted: dict[str, bool]) -> None:
    """The same batches through graphs and as they are, with an optimizer that is captured too."""
    cfg = settings("eagle3" if kind == "eagle3" else "p-eagle", 512, **counted)
    target = target_of(torch.float32).cuda()
    lengths = [[[0] * 9 + [1] * 120, [0] * 30 + [1] * (200 + 5 * i)] for i in range(8)]
    made = [packed_batch(masks, vocab=128, seed=i) for i, masks in enumerate(lengths)]
    if counted:  # where no text is what drafts lead to, nothing behind a first draft counts
        made = [likely(batch) for batch in made]
    rows = [sample_cod_positions(batch, DEPTHS, RATE, sampling_generator(0, i)) for i, batch in enumerate(made)]
    ends = []
    for graphs in (True, False):
        drafter = create_drafter(KINDS[kind], torch.float32).cuda().share_weights(target)
        optimizer, online = Optimizer(drafter, cfg), OnlineHiddenStates(target, drafter.cfg.aux_layer_ids)
        framer = BatchPadder(cfg, 128, drafter.cfg.parallel, 10**6, pinned=True)
        step, weights = GraphedStep(drafter, target, online, cfg), depth_weights(DEPTHS, 1.0)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())  # the drafter and its optimizer were made there
        with torch.cuda.stream(stream):
            for batch, own in zip(made, rows, strict=True):
                framed = framer.framed(batch, own)
                assert framed is not None
                if graphs:
                    step.accumulate(framed, row_weights(own.counts, weights))
                else:
                    accumulate_gradients(
                        drafter, target, online.states(batch), batch, own, LossSettings.of(cfg), weights, 10**6
                    )
                optimizer.step(1e-3)
        torch.cuda.synchronize()
        assert bool(step.graphs) == graphs and captured.WARM < len(made)
        ends.append(optimizer.masters_P.clone())
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-3, atol=1e-5)
