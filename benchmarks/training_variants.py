"""Variants of a training step that `training_step.py` compares, and the FLOPs of a step.

All variants compute the same gradients:

    ours        depth 0 once, its keys and values as leaves, chains in chunks, one backward through depth 0
    whole       depth 0 and all chains in one graph, one backward; the same kernels and the same loss
    logits      like whole, with the logits of all positions stored, as in plain torch
    algorithm1  Algorithm 1 of the P-EAGLE paper: chains in segments, each with its own forward and backward pass, which
                recomputes the depth-0 positions it depends on

Shapes: N tokens of a batch, R positions, V vocabulary.
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
        """Without `whole_target` only the target's embeddings and LM head are created."""
        layers = shape.target_layers if whole_target else 0
        target = random_weights(Decoder, shape.target(layers), dtype, device)
        drafter = random_weights(Drafter, shape.drafter, dtype, device).share_weights(target)
        return cls(shape, drafter.requires_grad_(True), target)


@dataclass(frozen=True)
class Work:
    """One batch and its positions on the CPU, and the target's hidden states on the device."""

    batch: PackedBatch
    rows: CodPositions
    states: TargetHiddenStates


def documents(lengths: list[int], prompt: float, vocab: int, seed: int = 0) -> PackedBatch:
    """Packed documents of random tokens; the first `prompt` share of each has no loss."""
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
    """A batch with random hidden states of the target."""
    head, shape = models.target.lm_head.weight, models.shape
    width = shape.layer.hidden_size
    states = TargetHiddenStates(
        torch.randn(len(batch), width, dtype=head.dtype, device=head.device),
        torch.randn(len(batch), len(shape.aux_layer_ids) * width, dtype=head.dtype, device=head.device),
    )
    rows = sample_cod_positions(batch, shape.depths, shape.rate, sampling_generator(0, 0))
    return Work(batch, rows, states)


def create_loss(models: Models, work: Work) -> DraftLoss:
    weight_K = position_weights(work.rows.counts).to(work.states.hidden_ND.device)
    return DraftLoss(models.drafter, models.target, work.states, LOSS, weight_K)


def create_forward(models: Models, work: Work) -> DrafterForward:
    return DrafterForward(models.drafter, work.states, work.batch, work.states.hidden_ND.device)


def ours(models: Models, work: Work, chunk_rows: int) -> None:
    accumulate_gradients(models.drafter, models.target, work.states, work.batch, work.rows, LOSS, chunk_rows)


def whole(models: Models, work: Work, chunk_rows: int) -> None:
    forward, (everything,) = create_forward(models, work), split_chains(work.rows, EVERYTHING)
    chunk_loss(create_loss(models, work), forward, forward.run_depth_zero(), everything).backward()


def logits(models: Models, work: Work, chunk_rows: int) -> None:
    forward, (everything,) = create_forward(models, work), split_chains(work.rows, EVERYTHING)
    leaves = forward.run_depth_zero()
    anchors = leaves.output_ND[forward.to_device(everything.anchor_A)]
    output = torch.cat([anchors, forward.run_chains(leaves, everything)])
    exact = torch.float64 if output.dtype == torch.float64 else torch.float32
    log_q_RV = models.drafter.compute_logits(output).log_softmax(-1, dtype=exact)
    with torch.no_grad():
        positions = forward.to_device(everything.label_positions() - 1)
        log_p_RV = models.target.compute_logits(work.states.hidden_ND)[positions].log_softmax(-1, dtype=exact)
    loss_R = torch.nn.functional.kl_div(log_q_RV, log_p_RV, reduction="none", log_target=True).sum(-1)
    weight_R = position_weights(work.rows.counts)[everything.depths()]
    (loss_R * weight_R.to(loss_R)).sum().backward()


def algorithm1(models: Models, work: Work, chunk_rows: int) -> None:
    """A segment runs the depth-0 positions up to its last anchor, and one more, which provides the next token. Its loss
    has the anchors behind those of the previous segment."""
    loss, whole_batch = create_loss(models, work), create_forward(models, work)
    for segment in split_chains(work.rows, chunk_rows):
        last = max(int(x.max()) for x in (segment.anchor_A, segment.anchor_R) if len(x))
        part = slice(0, last + 2)
        batch = work.batch
        named = ("token_ids_N", "position_N", "start_N", "end_N", "loss_mask_N")
        prefix = replace(batch, **{name: getattr(batch, name)[part] for name in named})
        states = TargetHiddenStates(work.states.hidden_ND[part], work.states.aux_hidden_states_NX[part])
        forward = create_forward(models, Work(prefix, work.rows, states))
        leaves = forward.run_depth_zero()
        output = torch.cat([leaves.output_ND[forward.to_device(segment.anchor_A)], forward.run_chains(leaves, segment)])
        # labels may lie behind the prefix
        links = segment.build_links(whole_batch)
        loss.compute(output, forward.to_device(segment.depths()), segment.label_positions(), links).backward()


VARIANTS: dict[str, Callable[[Models, Work, int], None]] = {
    "ours": ours,
    "whole": whole,
    "logits": logits,
    "algorithm1": algorithm1,
}


@dataclass(frozen=True)
class Flops:
    """FLOPs of the matrix products that a step needs, without recomputation and masked keys."""

    depth_zero: float  # layers and fc, forward and backward
    chains: float
    loss: float  # student and teacher logits, and gradients of the hidden states
    attention_zero: float
    attention_chains: float

    @property
    def attention(self) -> float:
        return self.attention_zero + self.attention_chains

    @property
    def total(self) -> float:
        return self.depth_zero + self.chains + self.loss + self.attention


def layer_products(layer: LayerConfig, layers: int, first_width: int) -> float:
    """Forward FLOPs of one row; the first layer's input has `first_width`."""
    heads, wide = layer.num_heads * layer.head_dim, layer.num_heads + 2 * layer.num_kv_heads
    inputs = first_width + (layers - 1) * layer.hidden_size
    rest = heads * layer.hidden_size + 3 * layer.hidden_size * layer.intermediate_size
    return 2.0 * (inputs * wide * layer.head_dim + layers * rest)


def step_flops(shape: Shape, batch: PackedBatch, rows: CodPositions) -> Flops:
    """Backward costs twice the forward pass, in attention 2.5 times; the input of fc has no gradient."""
    layer, width = shape.layer, shape.layer.hidden_size
    of_row = 3 * layer_products(layer, shape.drafter_layers, 2 * width)
    fc = 2.0 * len(shape.aux_layer_ids) * width * width
    position_R = rows.anchor_R - batch.start_N[rows.anchor_R]
    pairs_zero = float((batch.position_N + 1).sum())
    pairs_chains = float((position_R + 1 + rows.depth_R).sum())
    of_pair = 14.0 * layer.num_heads * layer.head_dim * shape.drafter_layers
    label_positions = torch.cat([rows.anchor_A, rows.anchor_R + rows.depth_R]).unique()
    of_logits = 2.0 * width * shape.vocab
    return Flops(
        depth_zero=len(batch) * (of_row + 2 * fc),
        chains=len(rows.anchor_R) * of_row + 3 * fc,
        loss=of_logits * (2 * sum(rows.counts) + len(label_positions)),
        attention_zero=pairs_zero * of_pair,
        attention_chains=pairs_chains * of_pair,
    )


def target_flops(shape: Shape, batch: PackedBatch) -> tuple[float, float]:
    """FLOPs of the layers and of attention in the target's forward pass."""
    layer = shape.layer
    products = len(batch) * layer_products(layer, shape.target_layers, layer.hidden_size)
    pairs = float((batch.position_N + 1).sum())
    return products, pairs * 4.0 * layer.num_heads * layer.head_dim * shape.target_layers
