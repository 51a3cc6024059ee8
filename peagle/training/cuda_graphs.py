"""Captures the forward and backward pass of a batch as one CUDA graph.

A step of a small drafter has about a thousand kernel launches of a few microseconds; launching them one by one takes
the host four times as long as the GPU needs to run them. A graph needs constant shapes, so batches are padded: tokens
to the batch size, anchors to multiples of a sixteenth of it. Padding has weight 0. Each padded shape has its own graph:
the first two steps of a shape run eagerly and warm up its kernels, the third is captured. Batches that fit no padded
shape (no chain, more positions than a chunk, too many teacher positions in a loss chunk) run with
`partition.accumulate_gradients`, which computes the same gradients.

The data thread pads batches on the CPU into one flat tensor, so one copy moves a batch to the GPU.

Shapes: N padded tokens, A depth-0 anchors with a loss, R chain positions, S = A + R.
"""

import math
from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.config import LOSS_LOGITS, TrainConfig
from peagle.data.batches import PackedBatch
from peagle.kernels.host_transfer import copy_to_device
from peagle.kernels.loss.linear_loss import LossSchedule, StaticLossShape
from peagle.models.decoder import Decoder
from peagle.models.drafter import Drafter
from peagle.training.cod_sampling import CodPositions
from peagle.training.hidden_states.online import OnlineHiddenStates
from peagle.training.loss import NO_PREVIOUS, ChainLinks, DraftLoss
from peagle.training.partition import ChainChunk, DrafterForward, Eagle3Steps, run_forward_backward

PADDING_STEPS = 16  # anchors are padded to multiples of batch_tokens / PADDING_STEPS
MIN_PADDING_STEP = 64
TEACHER_POSITION_SHARE = 0.5  # distinct teacher positions per row of a loss chunk: depths share positions
WARMUP_STEPS = 2  # eager steps of a shape before it is captured


@dataclass(frozen=True)
class GraphShape:
    """Sizes of a padded batch."""

    num_tokens: int
    num_anchors: int
    chain_positions: tuple[int, ...]  # by depth, starting at 1
    parallel: bool
    max_loss_rows: int

    @property
    def loss_shape(self) -> StaticLossShape:
        rows = self.num_anchors + sum(self.chain_positions)
        chunk_rows = min(self.max_loss_rows, rows)
        return StaticLossShape(rows, chunk_rows, max(1, math.ceil(TEACHER_POSITION_SHARE * chunk_rows)))

    @property
    def fields(self) -> list[tuple[str, int]]:
        """Names and sizes of the flat tensor's parts, in order."""
        loss = self.loss_shape
        parts = [("token", self.num_tokens), ("position", self.num_tokens), ("start", self.num_tokens)]
        parts += [("anchor_A", self.num_anchors)]
        if self.parallel:
            parts += [(name, sum(self.chain_positions)) for name in ("anchor_R", "depth_R", "chain_start_R")]
        else:
            parts += [(f"depth {d}", size) for d, size in enumerate(self.chain_positions, 1)]
        parts += [(name, loss.num_rows) for name in ("depths", "previous", "label", "order", "position_index")]
        return [*parts, ("teacher_positions", len(loss.chunks) * loss.chunk_positions)]

    def split_fields(self, flat: Tensor) -> dict[str, Tensor]:
        names, sizes = zip(*self.fields, strict=True)
        return dict(zip(names, flat.split(sizes), strict=True))


@dataclass(frozen=True)
class PaddedBatch:
    """A padded batch and its positions as one flat tensor on the CPU."""

    shape: GraphShape
    flat: Tensor


@dataclass(frozen=True)
class PaddedChunk(ChainChunk):
    """All positions of a padded batch, on the device."""

    depth_S: Tensor
    previous_S: Tensor
    label_S: Tensor
    schedule: LossSchedule
    steps: Eagle3Steps | None

    def depths(self) -> Tensor:
        return self.depth_S

    def build_links(self, forward: DrafterForward) -> ChainLinks:
        return ChainLinks(self.previous_S, self.label_S)

    def label_positions(self) -> LossSchedule:
        return self.schedule

    def eagle3_steps(self) -> Eagle3Steps:
        assert self.steps is not None
        return self.steps


class BatchPadder:
    """Pads batches of a run, on the CPU."""

    def __init__(self, cfg: TrainConfig, vocab_size: int, parallel: bool, chunk_size: int, pin_memory: bool) -> None:
        self.cfg = cfg
        self.padding_step = max(MIN_PADDING_STEP, cfg.batch_tokens // PADDING_STEPS)
        self.max_loss_rows = max(1, LOSS_LOGITS // vocab_size)
        self.parallel, self.chunk_size, self.pin_memory = parallel, chunk_size, pin_memory

    def padded_shape(self, num_anchors: int) -> GraphShape:
        """`sample_cod_positions` keeps at most this share of the anchors at each depth."""
        num_anchors = -(-num_anchors // self.padding_step) * self.padding_step
        ratio = self.cfg.down_sample_ratio
        chain_positions = tuple(math.ceil(num_anchors * ratio**depth) for depth in range(1, self.cfg.num_depths))
        return GraphShape(self.cfg.batch_tokens, num_anchors, chain_positions, self.parallel, self.max_loss_rows)

    def pad(self, batch: PackedBatch, positions: CodPositions) -> PaddedBatch | None:
        """None if the batch fits no padded shape."""
        shape = self.padded_shape(len(positions.anchor_A))
        if not len(positions.anchor_R) or len(batch) > shape.num_tokens or sum(shape.chain_positions) > self.chunk_size:
            return None
        sizes = zip(positions.counts[1:], shape.chain_positions, strict=True)
        assert all(count <= size for count, size in sizes), positions.counts
        flat = torch.empty(sum(size for _, size in shape.fields), dtype=torch.long, pin_memory=self.pin_memory)
        out = shape.split_fields(flat)
        _pad_tokens(out, batch)
        _pad_with_last(out["anchor_A"], positions.anchor_A)
        out["previous"].fill_(NO_PREVIOUS)
        chunk = ChainChunk(positions.anchor_A, positions.anchor_R, positions.depth_R, positions.chain_start_R)
        pad_chains = _pad_mask_positions if self.parallel else _pad_eagle3_steps
        label_position_S = pad_chains(out, chunk, shape, positions.num_depths)
        out["label"].copy_(batch.token_ids_N[label_position_S])
        schedule = shape.loss_shape.build_schedule(label_position_S - 1)
        if schedule is None:
            return None
        out["order"].copy_(schedule.order_R)
        out["position_index"].copy_(schedule.position_index_R)
        out["teacher_positions"].copy_(schedule.positions_P)
        return PaddedBatch(shape, flat)


def _pad_with_last(out: Tensor, values: Tensor) -> None:
    """Repeats the last value, because attention ranges must not decrease."""
    out[: len(values)] = values
    out[len(values) :] = values[-1]


def _pad_tokens(out: dict[str, Tensor], batch: PackedBatch) -> None:
    """Padding is one more document, without a loss."""
    size, num_padding = len(batch), len(out["token"]) - len(batch)
    out["token"][:size], out["token"][size:] = batch.token_ids_N, 0
    out["position"][:size], out["position"][size:] = batch.position_N, torch.arange(num_padding)
    out["start"][:size], out["start"][size:] = batch.start_N, size


def _pad_mask_positions(out: dict[str, Tensor], chunk: ChainChunk, shape: GraphShape, padding_depth: int) -> Tensor:
    """P-EAGLE: padding are chains of one position at the last anchor. Returns the label positions [S]."""
    count, size = len(chunk.anchor_R), sum(shape.chain_positions)
    _pad_with_last(out["anchor_R"], chunk.anchor_R)
    out["depth_R"][:count], out["depth_R"][count:] = chunk.depth_R, 1
    out["chain_start_R"][:count], out["chain_start_R"][count:] = chunk.chain_start_R, torch.arange(count, size)
    out["depths"].fill_(padding_depth)
    out["depths"][: len(chunk.anchor_A)] = 0
    out["depths"][shape.num_anchors : shape.num_anchors + count] = chunk.depth_R
    previous_R = chunk.previous()[len(chunk.anchor_A) :]
    shifted = previous_R + shape.num_anchors - len(chunk.anchor_A)  # chain positions follow the padded anchors
    out["previous"][shape.num_anchors : shape.num_anchors + count] = shifted.where(chunk.depth_R > 1, previous_R)
    label_position_S = torch.empty(shape.num_anchors + size, dtype=torch.long)
    _pad_with_last(label_position_S[: shape.num_anchors], chunk.anchor_A + 2)
    _pad_with_last(label_position_S[shape.num_anchors :], chunk.anchor_R + chunk.depth_R + 2)
    return label_position_S


def _pad_eagle3_steps(out: dict[str, Tensor], chunk: ChainChunk, shape: GraphShape, padding_depth: int) -> Tensor:
    """EAGLE-3, depth by depth: padding continues the last position of the depth before. Returns the label positions."""
    steps, sizes = chunk.eagle3_steps(), list(shape.chain_positions)
    _pad_with_last(out["depth 1"], steps.anchor_M)
    anchors, begin = [chunk.anchor_A, steps.anchor_M], shape.num_anchors
    out["previous"][begin : begin + len(steps.anchor_M)] = torch.searchsorted(chunk.anchor_A, steps.anchor_M)
    for depth in range(2, len(sizes) + 1):
        continuing = steps.continuing[depth - 2] if depth - 2 < len(steps.continuing) else steps.anchor_M[:0]
        index = out[f"depth {depth}"]
        index[: len(continuing)], index[len(continuing) :] = continuing, sizes[depth - 2] - 1
        anchors.append(anchors[-1][continuing])
        end = begin + sizes[depth - 2]
        out["previous"][end : end + len(continuing)] = begin + continuing
        begin = end
    sizes = [shape.num_anchors, *sizes]
    out["depths"].fill_(padding_depth)
    label_position_S = last = torch.empty(sum(sizes), dtype=torch.long)
    parts = zip(anchors, out["depths"].split(sizes), label_position_S.split(sizes), strict=True)
    for depth, (anchor, own_depth, label) in enumerate(parts):
        own_depth[: len(anchor)] = depth
        _pad_with_last(label, anchor + depth + 2 if len(anchor) else last)
        last = label[-1:]
    return label_position_S


class GraphedStep:
    """Computes the gradients of padded batches, from the third step of a shape on by replaying its CUDA graph."""

    def __init__(
        self, drafter: Drafter, target: Decoder, hidden_states: OnlineHiddenStates, padder: BatchPadder
    ) -> None:
        self.drafter, self.target, self.hidden_states = drafter, target, hidden_states
        self.cfg, self.padder = padder.cfg, padder
        self.device = hidden_states.device
        # the last entry is the depth of padding positions, with weight 0
        self.position_weight_K = torch.zeros(self.cfg.num_depths + 1, dtype=torch.float64, device=self.device)
        self.inputs: dict[GraphShape, Tensor] = {}
        self.num_eager_steps: Counter[GraphShape] = Counter()
        self.graphs: dict[GraphShape, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self.pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None

    def accumulate_gradients(self, batch: PaddedBatch, position_weight_K: Tensor) -> Tensor:
        """Adds to `.grad`. `position_weight_K` is on the CPU. The next call overwrites the returned metrics."""
        shape = batch.shape
        if shape not in self.inputs:
            self.inputs[shape] = torch.empty(len(batch.flat), dtype=torch.long, device=self.device)
        self.inputs[shape].copy_(batch.flat, non_blocking=True)
        self.position_weight_K[:-1].copy_(copy_to_device(position_weight_K, self.device))
        if shape not in self.graphs:
            self.num_eager_steps[shape] += 1
            if self.device.type != "cuda" or self.num_eager_steps[shape] <= WARMUP_STEPS:
                return self._run(shape)
            graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
            # thread_local: the data thread allocates pinned memory meanwhile
            with torch.cuda.graph(graph, pool=self.pool, stream=stream, capture_error_mode="thread_local"):
                self.graphs[shape] = (graph, self._run(shape))
        graph, metrics = self.graphs[shape]
        graph.replay()
        return metrics

    def _run(self, shape: GraphShape) -> Tensor:
        inputs = shape.split_fields(self.inputs[shape])
        start_N = inputs["start"]
        unused = start_N.new_zeros(0)
        batch = PackedBatch(inputs["token"], inputs["position"], start_N, unused, unused, ())  # type: ignore[arg-type]
        states = self.hidden_states.states(batch)
        loss = DraftLoss(self.drafter, self.target, states, self.cfg, self.position_weight_K)
        forward = DrafterForward(self.drafter, states, batch, self.device)
        schedule = LossSchedule(
            inputs["order"], inputs["teacher_positions"], inputs["position_index"], shape.loss_shape.chunks
        )
        if shape.parallel:
            chain, steps = (inputs["anchor_R"], inputs["depth_R"], inputs["chain_start_R"]), None
        else:  # EAGLE-3 reads the steps, not the chain tensors
            chain = (inputs["depth 1"],) * 3
            continuing = [inputs[f"depth {d}"] for d in range(2, len(shape.chain_positions) + 1)]
            steps = Eagle3Steps(inputs["depth 1"], continuing, None)
        links = (inputs["depths"], inputs["previous"], inputs["label"])
        run_forward_backward(loss, forward, [PaddedChunk(inputs["anchor_A"], *chain, *links, schedule, steps)])
        return loss.metrics_MK[:, :-1]
