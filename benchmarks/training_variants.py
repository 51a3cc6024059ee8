"""One training step of a drafter, in the ways that `training_step.py` sets side by side, and what each must compute.

All leave the same gradients in the drafter's parameters:

    ours        depth 0 once, its keys and values as leaves, chains in chunks, one backward through depth 0
    whole       depth 0 and all chains in one graph, one backward; the same kernels and the same loss
    logits      as whole, and the logits of all rows at once, as plain torch has them
    algorithm1  the P-EAGLE paper's: chains cut into segments, each with a forward and backward pass of its own that
                runs the depth-0 rows it depends on again

Knows nothing about clocks or processes.

Shapes: N tokens of a batch, R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from random_weights import random_weights

from peagle.config import DecoderConfig, DrafterConfig, LayerConfig, RopeConfig, TrainConfig
from peagle.data.batches import PackedBatch
from peagle.models.decoder import Decoder
from peagle.models.drafter import Drafter
from peagle.training.cod_sampling import CodPositions, sample_cod_positions, sampling_generator
from peagle.training.hidden_states.online import TargetHiddenStates
from peagle.training.loss import DraftLoss, position_weights
from peagle.training.partition import DrafterForward, accumulate_gradients, chunk_loss, split_chains

EVERYTHING = 1 << 40  # rows: no chunks
LOSS = TrainConfig(objective="kl", loss_weighting="uniform")


@dataclass(frozen=True)
class Shape:
    """A drafter, how it is trained, and the target beside it."""

    layer: LayerConfig
    vocab: int
    target_layers: int
    aux_layer_ids: tuple[int, ...]
    tied: bool = False
    drafter_layers: int = 4
    depths: int = 8
    rate: float = 0.8

    @property
    def drafter(self) -> DrafterConfig:
        return DrafterConfig(
            vocab_size=self.vocab,
            draft_vocab_size=self.vocab,
            num_layers=self.drafter_layers,
            layer=self.layer,
            rope=RopeConfig(),
            max_positions=1 << 17,
            target_hidden_size=self.layer.hidden_size,
            aux_layer_ids=self.aux_layer_ids,
            mask_token_id=0,
        )

    def target(self, layers: int) -> DecoderConfig:
        windows = (None,) * layers
        return DecoderConfig("llama", self.vocab, layers, self.layer, RopeConfig(), 1 << 17, self.tied, windows)


SHAPES = {
    "8b": Shape(LayerConfig(4096, 14336, 32, 8, 128, 1e-5), 128256, 32, (2, 16, 29)),
    "small": Shape(LayerConfig(576, 1536, 9, 3, 64, 1e-5), 49152, 30, (2, 15, 27), tied=True),
    "tiny": Shape(LayerConfig(32, 48, 4, 2, 16, 1e-5), 96, 3, (1, 2), drafter_layers=2, depths=4),
}


@dataclass(frozen=True)
class Models:
    shape: Shape
    drafter: Drafter
    target: Decoder

    @classmethod
    def random(cls, shape: Shape, dtype: torch.dtype, device: torch.device, whole_target: bool = False) -> Models:
        """Where the target's states come from elsewhere, only its embeddings and head are made."""
        layers = shape.target_layers if whole_target else 0
        target = random_weights(Decoder, shape.target(layers), dtype, device)
        drafter = random_weights(Drafter, shape.drafter, dtype, device).share_weights(target)
        return cls(shape, drafter.requires_grad_(True), target)


@dataclass(frozen=True)
class Work:
    """One batch. `batch` and `rows` on the CPU, as a data loader gives them; the target's states on the device."""

    batch: PackedBatch
    rows: CodPositions
    states: TargetHiddenStates


def documents(lengths: list[int], prompt: float, vocab: int, seed: int = 0) -> PackedBatch:
    """Packed one after another, of random tokens; the first `prompt` share of each is not asked."""
    rng = torch.Generator().manual_seed(seed)
    length_M = torch.tensor(lengths)
    start_N = (length_M.cumsum(0) - length_M).repeat_interleave(length_M)
    end_N = length_M.cumsum(0).repeat_interleave(length_M)
    position_N = torch.arange(int(length_M.sum())) - start_N
    return PackedBatch(
        token_ids_N=torch.randint(1, vocab, (len(start_N),), generator=rng),
        position_N=position_N,
        start_N=start_N,
        end_N=end_N,
        loss_mask_N=position_N >= (prompt * (end_N - start_N)).long(),
        row_ids=tuple(f"document {i}" for i in range(len(lengths))),
    )


def random_work(models: Models, batch: PackedBatch) -> Work:
    """With noise for what the target says."""
    head, shape = models.target.lm_head.weight, models.shape
    width = shape.layer.hidden_size
    states = TargetHiddenStates(
        torch.randn(len(batch), width, dtype=head.dtype, device=head.device),
        torch.randn(len(batch), len(shape.aux_layer_ids) * width, dtype=head.dtype, device=head.device),
    )
    rows = sample_cod_positions(batch, shape.depths, shape.rate, sampling_generator(0, 0))
    return Work(batch, rows, states)


def examiner_of(models: Models, work: Work) -> DraftLoss:
    weight_K = position_weights(work.rows.counts).to(work.states.hidden_ND.device)
    return DraftLoss(models.drafter, models.target, work.states, LOSS, weight_K)


def view_of(models: Models, work: Work) -> DrafterForward:
    return DrafterForward(models.drafter, work.states, work.batch, work.states.hidden_ND.device)


def ours(models: Models, work: Work, chunk_rows: int) -> None:
    accumulate_gradients(models.drafter, models.target, work.states, work.batch, work.rows, LOSS, chunk_rows)


def whole(models: Models, work: Work, chunk_rows: int) -> None:
    view, (everything,) = view_of(models, work), split_chains(work.rows, EVERYTHING)
    chunk_loss(examiner_of(models, work), view, view.run_depth_zero(), everything).backward()


def logits(models: Models, work: Work, chunk_rows: int) -> None:
    view, (everything,) = view_of(models, work), split_chains(work.rows, EVERYTHING)
    leaves = view.run_depth_zero()
    said = torch.cat([leaves.output_ND[view.to_device(everything.anchor_A)], view.run_chains(leaves, everything)])
    exact = torch.float64 if said.dtype == torch.float64 else torch.float32
    log_q_RV = models.drafter.compute_logits(said).log_softmax(-1, dtype=exact)
    with torch.no_grad():
        positions = view.to_device(everything.label_positions() - 1)
        log_p_RV = models.target.compute_logits(work.states.hidden_ND)[positions].log_softmax(-1, dtype=exact)
    loss_R = torch.nn.functional.kl_div(log_q_RV, log_p_RV, reduction="none", log_target=True).sum(-1)
    weight_R = position_weights(work.rows.counts)[everything.depths()]
    (loss_R * weight_R.to(loss_R)).sum().backward()


def algorithm1(models: Models, work: Work, chunk_rows: int) -> None:
    """A segment's depth-0 rows are those up to its last anchor; it asks those behind the last segment's anchors.

    One row more is run than is seen by anyone, so that the last one's token is there.
    """
    examiner, all_of_it = examiner_of(models, work), view_of(models, work)
    for segment in split_chains(work.rows, chunk_rows):
        last = max(int(x.max()) for x in (segment.anchor_A, segment.anchor_R) if len(x))
        part = slice(0, last + 2)
        batch = work.batch
        named = ("token_ids_N", "position_N", "start_N", "end_N", "loss_mask_N")
        prefix = replace(batch, **{name: getattr(batch, name)[part] for name in named})
        states = TargetHiddenStates(work.states.hidden_ND[part], work.states.aux_hidden_states_NX[part])
        view = view_of(models, Work(prefix, work.rows, states))
        leaves = view.run_depth_zero()
        said = torch.cat([leaves.output_ND[view.to_device(segment.anchor_A)], view.run_chains(leaves, segment)])
        # what is asked for may lie behind the prefix
        links = segment.build_links(all_of_it)
        examiner.compute(said, view.to_device(segment.depths()), segment.label_positions(), links).backward()


VARIANTS: dict[str, Callable[[Models, Work, int], None]] = {
    "ours": ours,
    "whole": whole,
    "logits": logits,
    "algorithm1": algorithm1,
}


@dataclass(frozen=True)
class Flops:
    """Of matrix products, what a step needs: nothing twice, nothing that no row sees."""

    depth_zero: float  # products of the layers and fc, forward and back
    chains: float
    loss: float  # logits of rows and of the questions' teacher, and the gradient of the rows' hidden states
    attention_zero: float
    attention_chains: float

    @property
    def attention(self) -> float:
        return self.attention_zero + self.attention_chains

    @property
    def total(self) -> float:
        return self.depth_zero + self.chains + self.loss + self.attention


def layer_products(layer: LayerConfig, layers: int, first_width: int) -> float:
    """Of one row, forward; the first layer's attention reads `first_width`."""
    heads, wide = layer.num_heads * layer.head_dim, layer.num_heads + 2 * layer.num_kv_heads
    inputs = first_width + (layers - 1) * layer.hidden_size
    rest = heads * layer.hidden_size + 3 * layer.hidden_size * layer.intermediate_size
    return 2.0 * (inputs * wide * layer.head_dim + layers * rest)


def step_flops(shape: Shape, batch: PackedBatch, rows: CodPositions) -> Flops:
    """Backward is twice forward, less for fc, whose input asks for no gradient; 5 products for 2 in attention."""
    layer, width = shape.layer, shape.layer.hidden_size
    of_row = 3 * layer_products(layer, shape.drafter_layers, 2 * width)
    fc = 2.0 * len(shape.aux_layer_ids) * width * width
    position_R = rows.anchor_R - batch.start_N[rows.anchor_R]
    pairs_zero = float((batch.position_N + 1).sum())
    pairs_chains = float((position_R + 1 + rows.depth_R).sum())
    of_pair = 14.0 * layer.num_heads * layer.head_dim * shape.drafter_layers
    questions = torch.cat([rows.anchor_A, rows.anchor_R + rows.depth_R]).unique()
    of_logits = 2.0 * width * shape.vocab
    return Flops(
        depth_zero=len(batch) * (of_row + 2 * fc),
        chains=len(rows.anchor_R) * of_row + 3 * fc,
        loss=of_logits * (2 * sum(rows.counts) + len(questions)),
        attention_zero=pairs_zero * of_pair,
        attention_chains=pairs_chains * of_pair,
    )


def target_flops(shape: Shape, batch: PackedBatch) -> tuple[float, float]:
    """Products and attention of the target's forward pass."""
    layer = shape.layer
    products = len(batch) * layer_products(layer, shape.target_layers, layer.hidden_size)
    pairs = float((batch.position_N + 1).sum())
    return products, pairs * 4.0 * layer.num_heads * layer.head_dim * shape.target_layers
