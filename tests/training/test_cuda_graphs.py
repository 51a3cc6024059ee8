"""Padded batches against unpadded ones: gradients and metrics in fp64; on a GPU also replayed against eager steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from packed import packed_batch
from small_drafters import (
    CONFIGS,
    assert_gradients_close,
    load_target,
    random_drafter,
    take_gradients,
    with_greedy_tokens,
)
from support import many

from peagle.config import LossWeighting, TrainConfig
from peagle.training import cuda_graphs as captured
from peagle.training.cod_sampling import sample_cod_positions, sampling_generator
from peagle.training.cuda_graphs import BatchPadder, GraphedStep
from peagle.training.hidden_states.online import OnlineHiddenStates
from peagle.training.loss import position_weights
from peagle.training.optimizer import Optimizer
from peagle.training.partition import accumulate_gradients

DEPTHS, RATIO = 4, 0.8


def settings(method: str, tokens: int, weighting: LossWeighting) -> TrainConfig:
    sizes = {"num_depths": DEPTHS, "down_sample_ratio": RATIO, "batch_tokens": tokens, "max_seq_len": tokens}
    return TrainConfig(method=method, objective="kl", loss_weighting=weighting, depth_decay=0.9, **sizes)  # type: ignore[arg-type]


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
    weighting=st.sampled_from(["uniform", "acceptance"]),
)
def test_padding_changes_neither_gradients_nor_metrics(
    kind: str, masks: list[list[int]], spare: int, part: int, most: int, weighting: LossWeighting
) -> None:
    batch = with_greedy_tokens(packed_batch(masks, vocab=128))
    cfg = settings("eagle3" if kind.startswith("eagle3") else "p-eagle", len(batch) + spare, weighting)
    drafter, target = random_drafter(CONFIGS[kind], torch.float64), load_target(torch.float64)
    rows = sample_cod_positions(batch, DEPTHS, RATIO, sampling_generator(0, len(batch)))
    online = OnlineHiddenStates(target, drafter.cfg.aux_layer_ids)
    padder = BatchPadder(cfg, 128, drafter.cfg.parallel, 10**6, pin_memory=False)
    padder.padding_step, padder.max_loss_rows = part, most
    padded = padder.pad(batch, rows)
    if padded is None:
        sizes = padder.padded_shape(len(rows.anchor_A))
        label = np.sort(torch.cat([rows.anchor_A, rows.anchor_R + rows.depth_R]).numpy())
        assert not len(rows.anchor_R) or len(np.unique(label)) > sizes.loss_shape.chunk_positions
        return
    expected_metrics = accumulate_gradients(drafter, target, online.states(batch), batch, rows, cfg, 10**6)
    expected = take_gradients(drafter)
    metrics = GraphedStep(drafter, target, online, padder).accumulate_gradients(
        padded, position_weights(rows.counts, cfg.depth_decay)
    )
    assert_gradients_close(take_gradients(drafter), expected, 1e-10)
    assert metrics[0].tolist() == list(rows.counts)
    for ours, theirs in zip(metrics, expected_metrics, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("weighting", ["uniform", "acceptance"])
@pytest.mark.parametrize("kind", ["p-eagle", "p-eagle-own", "eagle3"])
def test_replayed_steps_equal_eager_steps(kind: str, weighting: LossWeighting) -> None:
    """The same batches with CUDA graphs and without."""
    cfg = settings("eagle3" if kind == "eagle3" else "p-eagle", 512, weighting)
    target = load_target(torch.float32).cuda()
    lengths = [[[0] * 9 + [1] * 120, [0] * 30 + [1] * (200 + 5 * i)] for i in range(8)]
    made = [packed_batch(masks, vocab=128, seed=i) for i, masks in enumerate(lengths)]
    if weighting == "acceptance":  # on random text no position after the first has a weight
        made = [with_greedy_tokens(batch) for batch in made]
    rows = [sample_cod_positions(batch, DEPTHS, RATIO, sampling_generator(0, i)) for i, batch in enumerate(made)]
    ends = []
    for graphs in (True, False):
        drafter = random_drafter(CONFIGS[kind], torch.float32).cuda().share_weights(target)
        optimizer, online = Optimizer(drafter, cfg), OnlineHiddenStates(target, drafter.cfg.aux_layer_ids)
        padder = BatchPadder(cfg, 128, drafter.cfg.parallel, 10**6, pin_memory=True)
        step = GraphedStep(drafter, target, online, padder)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())  # the drafter and its optimizer were made there
        with torch.cuda.stream(stream):
            for batch, own in zip(made, rows, strict=True):
                padded = padder.pad(batch, own)
                assert padded is not None
                if graphs:
                    step.accumulate_gradients(padded, position_weights(own.counts, cfg.depth_decay))
                else:
                    accumulate_gradients(drafter, target, online.states(batch), batch, own, cfg, 10**6)
                optimizer.step(1e-3)
        torch.cuda.synchronize()
        assert bool(step.graphs) == graphs and captured.WARMUP_STEPS < len(made)
        ends.append(optimizer.masters_P.clone())
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-3, atol=1e-5)
