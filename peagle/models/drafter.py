"""The drafter: P-EAGLE and autoregressive EAGLE-3 in one module.

A row at position p pairs the target's hidden state at p with the token at p + 1 and predicts the token at p + 2. A
P-EAGLE mask row has neither yet: it gets the mask token's embedding and `mask_hidden`, which passes through `fc` like
real auxiliary hidden states.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from peagle.config import DrafterConfig
from peagle.kernels.gemm.linear import linear
from peagle.kernels.norm.rms_norm import ResidualStream, norm_cat
from peagle.models.decoder import Decoder
from peagle.models.layers import (
    MLP,
    Angles,
    Attend,
    Attention,
    DecoderLayer,
    RMSNorm,
    Rope,
    lookup_embeddings,
    next_input_norm,
    project,
)


class FirstLayer(nn.Module):
    """EAGLE-3's first layer: attends over cat[norm(embedding), norm(hidden)]; the hidden state is the residual."""

    def __init__(self, cfg: DrafterConfig) -> None:
        super().__init__()
        width, eps = cfg.layer.hidden_size, cfg.layer.norm_eps
        self.input_layernorm = RMSNorm(width, eps)
        self.hidden_norm = RMSNorm(width, eps)
        self.self_attn = Attention(cfg.layer, 2 * width)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.mlp = MLP(cfg.layer)
        self.norm_before_residual = cfg.norm_before_residual

    def forward(
        self,
        embeds_TD: Tensor,
        hidden_TD: Tensor,
        angles: Angles,
        attend: Attend,
        layer: int,
        window: int | None,
        next_norm: RMSNorm | None = None,
    ) -> ResidualStream:
        first, second, mlp_norm = self.input_layernorm, self.hidden_norm, self.post_attention_layernorm
        both = norm_cat((embeds_TD, hidden_TD), (first.weight, second.weight), first.eps)
        x_TD = both.chunk(2, -1)[1] if self.norm_before_residual else hidden_TD
        stream = self.self_attn(both, x_TD, angles, attend, layer, window, next_norm=mlp_norm)
        return self.mlp(stream, mlp_norm, next_norm)


class Drafter(nn.Module):
    """A P-EAGLE or EAGLE-3 drafter."""

    def __init__(self, cfg: DrafterConfig) -> None:
        super().__init__()
        self.cfg = cfg
        width, eps = cfg.layer.hidden_size, cfg.layer.norm_eps
        self.fc = nn.Linear(cfg.aux_hidden_size, width, bias=False)
        self.input_norm = RMSNorm(cfg.aux_hidden_size, eps) if cfg.norm_before_fc else None
        self.fc_norm = (
            nn.ModuleList(RMSNorm(cfg.target_hidden_size, eps) for _ in cfg.aux_layer_ids) if cfg.fc_norm else None
        )
        self.mask_hidden = nn.Parameter(torch.zeros(1, 1, cfg.aux_hidden_size)) if cfg.parallel else None
        rest = (DecoderLayer(cfg.layer) for _ in range(1, cfg.num_layers))
        self.layers = nn.ModuleList([FirstLayer(cfg), *rest])
        self.norm = RMSNorm(width, eps)
        self.embed_tokens = nn.Embedding(cfg.vocab_size, width) if cfg.own_embeddings else None
        self.lm_head = nn.Linear(width, cfg.draft_vocab_size, bias=False) if cfg.own_head else None
        # target_id = draft_id + d2t[draft_id]; an integer table, so a buffer that no dtype cast touches
        self.register_buffer("d2t", torch.zeros(cfg.draft_vocab_size, dtype=torch.long) if cfg.reduced_vocab else None)
        self.rope = Rope(cfg.rope, cfg.layer.head_dim)
        self._shared: Callable[[], Decoder] | None = None
        self.recompute = False  # activation checkpointing, for training

    d2t: Tensor | None

    def share_weights(self, target: Decoder) -> Drafter:
        """Uses the target's embeddings and lm_head where the drafter has none, and returns the drafter."""
        self._shared = lambda: target  # a function, so that the target is not registered as a submodule
        return self

    def _target(self) -> Decoder:
        assert self._shared is not None, "a drafter without embeddings or head must `share_weights(target)` first"
        return self._shared()

    @property
    def embed_tokens_weight(self) -> Tensor:
        own = self.embed_tokens
        return (own if own is not None else self._target().embed_tokens).weight

    @property
    def lm_head_weight(self) -> Tensor:
        own = self.lm_head
        return (own if own is not None else self._target().lm_head).weight

    def combine_hidden_states(self, aux_TN: Tensor) -> Tensor:
        """Projects concatenated auxiliary hidden states [T, n * target width] to [T, D]."""
        if self.input_norm is not None:
            aux_TN = self.input_norm(aux_TN)
        if self.fc_norm is not None:
            weights = [norm.get_parameter("weight") for norm in self.fc_norm]
            aux_TN = norm_cat(aux_TN.chunk(len(weights), -1), weights, self.cfg.layer.norm_eps)
        return project(self.fc, aux_TN)

    def mask_hidden_states(self, num_rows: int) -> Tensor:
        """Returns the hidden states of P-EAGLE's mask rows, [num_rows, D]."""
        assert self.mask_hidden is not None, "an autoregressive drafter has no mask rows"
        return self.combine_hidden_states(self.mask_hidden[0]).expand(num_rows, -1)

    def forward(
        self, token_ids_T: Tensor, hidden_TD: Tensor, positions_T: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """Returns the input of lm_head [T, D], and the hidden state that an EAGLE-3 step passes to the next."""
        embeds_TD = lookup_embeddings(token_ids_T, self.embed_tokens_weight)
        angles = self.rope(positions_T, hidden_TD.dtype)
        entering: tuple[Tensor | ResidualStream, ...] = (embeds_TD, hidden_TD)
        for i, layer in enumerate(self.layers):
            inputs = (*entering, angles, attend, i, self.cfg.window(i), next_input_norm(self.layers, i))
            stream: ResidualStream = (
                checkpoint(layer, *inputs, use_reentrant=False) if self.recompute else layer(*inputs)
            )
            entering = (stream,)
        normed = self.norm(stream.x)
        return normed, normed if self.cfg.norm_output else stream.x

    def compute_logits(self, hidden_TD: Tensor) -> Tensor:
        """Returns logits over the draft vocabulary."""
        return linear(hidden_TD, self.lm_head_weight)

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Maps token ids of the draft vocabulary to the target's."""
        return draft_ids if self.d2t is None else draft_ids + self.d2t[draft_ids]
