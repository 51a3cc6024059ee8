"""A batch's gradients as one CUDA graph: what the host says again and again is said once.

A small drafter's step is a thousand launches of a few microseconds each, and the host takes four times as long to ask
for them as the GPU to do them. A graph needs the same sizes every time, so a batch is brought into a frame: tokens are
filled up to the size of a batch, rows to a sixteenth of it, and what is filled up counts nothing. There is a graph for
each frame that was met; the first two steps of a frame run as they are and warm its kernels up, the third is captured.
A batch that fits no frame (nothing asked, more chains than one chunk takes, too many questions in a part of the loss)
is left to `partition.accumulate`, which computes the same.

Frames are filled on the CPU, by the thread that prepares batches, as one flat tensor: one copy brings it over.

Knows nothing about optimizers. Shapes: N tokens of a frame, A depth-0 rows that are asked, R chain rows, S = A + R,
C rows of a frame that are asked for as one part of the loss, K depths.
"""

from __future__ import annotations

import math
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
from peagle.training.loss import DepthMetrics, DraftLoss, LossSettings
from peagle.training.loss_weighting import NOBODY, Links
from peagle.training.partition import ChainChunk, DrafterForward, Eagle3Steps, run_forward_backward

PARTS = 16  # of a batch: rows are filled up to whole ones
LEAST_PART = 64  # rows
SPOTS = 0.5  # positions a part of the loss asks at, of its rows: rows of several depths share one
WARM = 2  # steps of a frame before it is captured


@dataclass(frozen=True)
class GraphShape:
    """Of a frame: its tokens, its depth-0 rows, and its chain rows by depth, 1 first."""

    tokens: int
    asked: int
    chained: tuple[int, ...]
    parallel: bool
    most: int  # rows of a part of the loss

    @property
    def loss(self) -> StaticLossShape:
        rows = self.asked + sum(self.chained)
        most = min(self.most, rows)
        return StaticLossShape(rows, most, max(1, math.ceil(SPOTS * most)))

    @property
    def pieces(self) -> list[tuple[str, int]]:
        """What a frame holds, in order."""
        chained, loss = sum(self.chained), self.loss
        own = [("token", self.tokens), ("position", self.tokens), ("start", self.tokens)]
        own += [("anchor_A", self.asked), ("drafted_A", self.asked)]
        if self.parallel:
            own += [(name, chained) for name in ("anchor_R", "depth_R", "first_R")]
        else:
            own += [(f"depth {d}", rows) for d, rows in enumerate(self.chained, 1)]
        own += [(name, loss.num_rows) for name in ("depths", "before", "text", "order", "spot")]
        return [*own, ("positions", self.spots)]

    @property
    def spots(self) -> int:
        return len(self.loss.chunks) * self.loss.chunk_positions

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        names, sizes = zip(*self.pieces, strict=True)
        return dict(zip(names, flat.split(sizes), strict=True))


@dataclass(frozen=True)
class PaddedBatch:
    """A batch and its rows, filled up; all in one tensor, on the CPU."""

    sizes: GraphShape
    flat: Tensor


@dataclass(frozen=True)
class PaddedChunk(ChainChunk):
    """All rows of a frame, on the device."""

    depth_S: Tensor
    before_S: Tensor
    text_S: Tensor
    drafted_A: Tensor
    plan: LossSchedule
    steps: Eagle3Steps | None

    def depths(self) -> Tensor:
        return self.depth_S

    def links(self, view: DrafterForward) -> Links:
        return Links(self.before_S, self.text_S, self.drafted_A)

    def asked(self) -> LossSchedule:
        return self.plan

    def walk(self) -> Eagle3Steps:
        assert self.steps is not None
        return self.steps


class BatchPadder:
    """Brings batches into frames. Knows the sizes a run has, and no device but whether frames are copied to one."""

    def __init__(self, cfg: TrainConfig, vocab: int, parallel: bool, chunk_rows: int, pinned: bool) -> None:
        self.tokens, self.depths, self.rate = cfg.batch_tokens, cfg.num_depths, cfg.rate
        self.part = max(LEAST_PART, cfg.batch_tokens // PARTS)
        self.most = max(1, LOSS_LOGITS // vocab)
        self.parallel, self.chunk_rows, self.pinned = parallel, chunk_rows, pinned

    def sizes(self, asked: int) -> GraphShape:
        """Pads the number of anchors to a multiple of `part`; every depth gets its share of them."""
        asked = -(-asked // self.part) * self.part
        chained = tuple(math.ceil(asked * self.rate**depth) for depth in range(1, self.depths))
        return GraphShape(self.tokens, asked, chained, self.parallel, self.most)

    def framed(self, batch: PackedBatch, rows: CodPositions) -> PaddedBatch | None:
        """None where it does not fit."""
        sizes = self.sizes(len(rows.anchor_A))
        if not len(rows.anchor_R) or len(batch) > sizes.tokens or sum(sizes.chained) > self.chunk_rows:
            return None
        assert all(count <= room for count, room in zip(rows.counts[1:], sizes.chained, strict=True)), rows.counts
        flat = torch.empty(sum(size for _, size in sizes.pieces), dtype=torch.long, pin_memory=self.pinned)
        into = sizes.views(flat)
        _fill_tokens(into, batch)
        _fill(into["anchor_A"], rows.anchor_A)
        into["before"].fill_(NOBODY)
        into["drafted_A"].fill_(NOBODY)
        chunk = ChainChunk(rows.anchor_A, rows.anchor_R, rows.depth_R, rows.first_R, False)
        into["drafted_A"][: len(rows.anchor_A)] = chunk.drafted()
        if self.parallel:
            question_S = _fill_mask_rows(into, chunk, sizes, rows.depths)
        else:
            question_S = _fill_steps(into, chunk, sizes, rows.depths)
        into["text"].copy_(batch.token_ids_N[question_S])
        asked = sizes.loss.build_schedule(question_S - 1)
        if asked is None:
            return None
        into["order"].copy_(asked.order_R)
        into["spot"].copy_(asked.position_index_R)
        into["positions"].copy_(asked.positions_P)
        return PaddedBatch(sizes, flat)


def _fill(into: Tensor, values: Tensor) -> None:
    """What is missing repeats the last: ranges of attention must never fall."""
    into[: len(values)] = values
    into[len(values) :] = values[-1]


def _fill_tokens(into: dict[str, Tensor], batch: PackedBatch) -> None:
    """What is missing is one more document, which nobody asks."""
    size, missing = len(batch), len(into["token"]) - len(batch)
    into["token"][:size], into["token"][size:] = batch.token_ids_N, 0
    into["position"][:size], into["position"][size:] = batch.position_N, torch.arange(missing)
    into["start"][:size], into["start"][size:] = batch.start_N, size


def _questions(into: dict[str, Tensor], anchors: list[Tensor], rooms: list[int], nobody: int) -> Tensor:
    """Writes the depth of every row that is asked, `nobody` where it is filled up, and returns what each is asked for.
    Depth by depth: rows with these anchors, in so much room."""
    depths: list[Tensor] = []
    questions: list[Tensor] = []
    for depth, (anchor, room) in enumerate(zip(anchors, rooms, strict=True)):
        own = torch.full((room,), nobody)
        own[: len(anchor)] = depth
        depths.append(own)
        asked = torch.empty(room, dtype=torch.long)
        _fill(asked, anchor + depth + 2 if len(anchor) else questions[-1][-1:])
        questions.append(asked)
    into["depths"].copy_(torch.cat(depths))
    return torch.cat(questions)


def _fill_mask_rows(into: dict[str, Tensor], chunk: ChainChunk, sizes: GraphShape, nobody: int) -> Tensor:
    """P-EAGLE's chains as they lie; what is missing are chains of one row on the last anchor."""
    count, room = len(chunk.anchor_R), sum(sizes.chained)
    _fill(into["anchor_R"], chunk.anchor_R)
    into["depth_R"][:count], into["depth_R"][count:] = chunk.depth_R, 1
    into["first_R"][:count], into["first_R"][count:] = chunk.first_R, torch.arange(count, room)
    into["depths"].fill_(nobody)
    into["depths"][: len(chunk.anchor_A)] = 0
    into["depths"][sizes.asked : sizes.asked + count] = chunk.depth_R
    before_R = chunk.before()[len(chunk.anchor_A) :]
    moved = before_R + sizes.asked - len(chunk.anchor_A)  # behind depth 0's room, not behind its rows
    into["before"][sizes.asked : sizes.asked + count] = moved.where(chunk.depth_R > 1, before_R)
    question_S = torch.empty(sizes.asked + room, dtype=torch.long)
    _fill(question_S[: sizes.asked], chunk.anchor_A + 2)
    _fill(question_S[sizes.asked :], chunk.anchor_R + chunk.depth_R + 2)
    return question_S


def _fill_steps(into: dict[str, Tensor], chunk: ChainChunk, sizes: GraphShape, nobody: int) -> Tensor:
    """EAGLE-3's chains depth by depth. What is missing follows the last row of the depth before."""
    walk, rooms = chunk.walk(), list(sizes.chained)
    _fill(into["depth 1"], walk.anchor_M)
    anchors, begin = [walk.anchor_M], sizes.asked
    into["before"][begin : begin + len(walk.anchor_M)] = torch.searchsorted(chunk.anchor_A, walk.anchor_M)
    for depth in range(2, len(rooms) + 1):
        going_on = walk.going_on[depth - 2] if depth - 2 < len(walk.going_on) else walk.anchor_M[:0]
        index = into[f"depth {depth}"]
        index[: len(going_on)], index[len(going_on) :] = going_on, rooms[depth - 2] - 1
        anchors.append(anchors[-1][going_on])
        end = begin + rooms[depth - 2]
        into["before"][end : end + len(going_on)] = begin + going_on
        begin = end
    return _questions(into, [chunk.anchor_A, *anchors], [sizes.asked, *rooms], nobody)


class GraphedStep:
    """The gradients of framed batches. They go where backward passes leave them, as with `partition.accumulate`."""

    def __init__(self, drafter: Drafter, target: Decoder, online: OnlineHiddenStates, cfg: TrainConfig) -> None:
        self.drafter, self.target, self.online, self.cfg = drafter, target, online, cfg
        self.device = online.device
        self.weight_K = torch.zeros(cfg.num_depths + 1, dtype=torch.float64, device=self.device)
        self.flats: dict[GraphShape, Tensor] = {}
        self.met: dict[GraphShape, int] = {}
        self.graphs: dict[GraphShape, tuple[torch.cuda.CUDAGraph, DepthMetrics]] = {}
        self.pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None

    def accumulate(self, framed: PaddedBatch, row_weight_K: Tensor) -> DepthMetrics:
        """`row_weight_K`, on the CPU: what one row of each depth counts. The totals live until the next call."""
        sizes = framed.sizes
        if sizes not in self.flats:
            self.flats[sizes] = torch.empty(len(framed.flat), dtype=torch.long, device=self.device)
        self.flats[sizes].copy_(framed.flat, non_blocking=True)
        # rows that were filled up have a depth of their own, the last, which counts nothing
        self.weight_K[:-1].copy_(copy_to_device(row_weight_K, self.device))
        if sizes not in self.graphs:
            self.met[sizes] = self.met.get(sizes, 0) + 1
            if self.device.type != "cuda" or self.met[sizes] <= WARM:
                return self._gradients(sizes)
            self._capture(sizes)
        graph, totals = self.graphs[sizes]
        graph.replay()
        return totals

    def _capture(self, sizes: GraphShape) -> None:
        graph = torch.cuda.CUDAGraph()
        # batches are prepared meanwhile, by a thread that asks for pinned memory
        stream = torch.cuda.current_stream()
        with torch.cuda.graph(graph, pool=self.pool, stream=stream, capture_error_mode="thread_local"):
            totals = self._gradients(sizes)
        self.graphs[sizes] = (graph, totals)

    def _gradients(self, sizes: GraphShape) -> DepthMetrics:
        own = sizes.views(self.flats[sizes])
        start_N = own["start"]
        nobody = start_N.new_zeros(0)
        batch = PackedBatch(own["token"], own["position"], start_N, nobody, nobody, ())  # type: ignore[arg-type]
        states = self.online.states(batch)
        examiner = DraftLoss(
            self.drafter, self.target, states, LossSettings.of(self.cfg), (), [], self.weight_K, self.cfg.num_depths
        )
        run_forward_backward(examiner, DrafterForward(self.drafter, states, batch, self.device), [_chunk(own, sizes)])
        return DepthMetrics(*(total[:-1] for total in examiner.totals.tensors()))


def _chunk(own: dict[str, Tensor], sizes: GraphShape) -> PaddedChunk:
    plan = LossSchedule(own["order"], own["positions"], own["spot"], sizes.loss.chunks)
    asked_A, links = own["anchor_A"], (own["depths"], own["before"], own["text"], own["drafted_A"])
    if sizes.parallel:
        return PaddedChunk(asked_A, own["anchor_R"], own["depth_R"], own["first_R"], False, *links, plan, None)
    first_M = own["depth 1"]
    steps = Eagle3Steps(first_M, [own[f"depth {d}"] for d in range(2, len(sizes.chained) + 1)], None)
    # of chain rows only the walk is read
    return PaddedChunk(asked_A, first_M, first_M, first_M, False, *links, plan, steps)
