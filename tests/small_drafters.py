"""Small random drafters, batches and hidden states for tests of training, with the gradients of a drafter."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import dense_reference as dense
import pairs
import torch
from torch import Tensor

from peagle.config import DrafterConfig
from peagle.data.batches import PackedBatch
from peagle.models.decoder import Decoder
from peagle.models.drafter import Drafter
from peagle.training.hidden_states.online import TargetHiddenStates

PARALLEL = replace(pairs.BASE, mask_token_id=pairs.MASK_ID)
REDUCED = {"draft_vocab_size": pairs.REDUCED, "own_head": True}
CONFIGS = {
    "p-eagle": replace(PARALLEL, num_layers=2, fc_norm=True),
    "p-eagle-own": replace(PARALLEL, num_layers=2, own_embeddings=True, **REDUCED),
    "p-eagle-window": replace(PARALLEL, num_layers=2, windows=(4, 7)),
    "eagle3": replace(pairs.BASE, num_layers=2, norm_before_residual=True),
    "eagle3-own": replace(pairs.BASE, own_embeddings=True, norm_output=True, **REDUCED),
}
# a prompt with its response, a response alone, two turns, and a document too short for a label
MASKS = [[0] * 5 + [1] * 14, [1] * 9, [0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1], [0, 1]]


@cache
def load_target(dtype: torch.dtype) -> Decoder:
    return pairs.load_decoder(pairs.FIXTURES / "target", dtype=torch.float32).to(dtype)


def random_drafter(cfg: DrafterConfig, dtype: torch.dtype) -> Drafter:
    torch.manual_seed(1)
    drafter = Drafter(cfg).to(dtype)
    for parameter in drafter.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    if drafter.d2t is not None:
        drafter.d2t.copy_(torch.arange(len(drafter.d2t)) * 2)  # draft id i is token 3 i
    return drafter.share_weights(load_target(dtype))


def hidden_states_of(batch: PackedBatch, cfg: DrafterConfig, dtype: torch.dtype) -> TargetHiddenStates:
    """Computed document by document with the reference."""
    sizes = batch.start_N.unique_consecutive(return_counts=True)[1].tolist()
    parts = [
        dense.compute_target_states(load_target(dtype), tokens[None], cfg.aux_layer_ids)
        for tokens in batch.token_ids_N.split(sizes)
    ]
    return TargetHiddenStates(torch.cat([h[0] for h, _ in parts]), torch.cat([a[0] for _, a in parts]))


def with_greedy_tokens(batch: PackedBatch, share: float = 0.8) -> PackedBatch:
    """The batch with this share of its tokens replaced by the target's greedy ones."""
    rng = torch.Generator().manual_seed(5)
    token_N, target = batch.token_ids_N.clone(), load_target(torch.float64)
    for i in range(1, len(token_N)):
        start = int(batch.start_N[i])
        if start < i and torch.rand((), generator=rng) < share:
            hidden, _ = dense.compute_target_states(target, token_N[None, start:i], pairs.BASE.aux_layer_ids)
            token_N[i] = target.compute_logits(hidden[0, -1:]).argmax()
    return replace(batch, token_ids_N=token_N)


def take_gradients(drafter: Drafter) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None}
    drafter.zero_grad(set_to_none=True)
    return found


def assert_gradients_close(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        error = (ours[name] - value).norm() / value.norm().clamp(min=1e-30)
        assert error < tolerance, (name, float(error))
