"""The target: one decoder for all families, which differ in what their config says (`DecoderConfig`).

Knows nothing about checkpoints, tokenizers or caches. Returns hidden states, not logits: most rows of a
prompt need none, so the caller picks its rows and asks `logits` for those.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from peagle.config import AttentionTemperature, DecoderConfig
from peagle.kernels.norm.rms_norm import ResidualStream
from peagle.models.layers import Attend, DecoderLayer, RMSNorm, Rope, Turn, look_up, norm_after, project
from peagle.models.moe import ExpertMLP


class Decoder(nn.Module):
    def __init__(self, cfg: DecoderConfig) -> None:
        super().__init__()
        self.cfg = cfg
        width = cfg.layer.hidden_size
        self.embed_tokens = nn.Embedding(cfg.vocab_size, width)
        layers = [cfg.layer_at(i) for i in range(cfg.num_layers)]
        self.layers = nn.ModuleList(
            DecoderLayer(layer, ExpertMLP(layer) if layer.experts is not None else None) for layer in layers
        )
        self.norm = RMSNorm(width, cfg.layer.norm_eps)
        self.lm_head = nn.Linear(width, cfg.vocab_size, bias=False)
        self.tie_weights()

        def head_dim(windowed: bool) -> int:
            """Of the layers that see everything, or of the others."""
            pairs = zip(layers, cfg.windows, strict=True)
            found = {layer.head_dim for layer, window in pairs if (window is not None) == windowed}
            assert len(found) < 2, "a rope is of one width"
            return found.pop() if found else cfg.layer.head_dim

        self.rope = Rope(cfg.rope, head_dim(windowed=False))
        self.local_rope = Rope(cfg.local_rope, head_dim(windowed=True)) if cfg.local_rope is not None else None

    @property
    def ropes(self) -> list[Rope]:
        return [self.rope] if self.local_rope is None else [self.rope, self.local_rope]

    def tie_weights(self) -> None:
        """Makes the head read the embedding table where the config says so; again after a load."""
        if self.cfg.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(
        self, token_ids_T: Tensor, positions_T: Tensor, attend: Attend, aux_layer_ids: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """Final (normed) hidden states [T, D], and the aux states layers side by side [T, len(aux layers) * D].

        Tap k is the residual stream entering layer k; aux hidden state L what the last layer put out, before the norm.
        """
        hidden_TD, aux_hidden_states = self.compute_hidden_states(token_ids_T, positions_T, attend, aux_layer_ids)
        return hidden_TD, torch.cat(aux_hidden_states, -1) if aux_layer_ids else None

    def compute_hidden_states(
        self, token_ids_T: Tensor, positions_T: Tensor, attend: Attend, aux_layer_ids: Sequence[int] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """The same, each aux hidden state by itself."""
        stream = ResidualStream(self.embed(token_ids_T))
        angles = self.rope(positions_T, stream.x.dtype)
        local = angles if self.local_rope is None else self.local_rope(positions_T, stream.x.dtype)
        heat = query_heat(self.cfg.attention_temperature, positions_T)
        aux_hidden_states = {}
        for i, (layer, window) in enumerate(zip(self.layers, self.cfg.windows, strict=True)):
            if i in aux_layer_ids:
                aux_hidden_states[i] = stream.x
            turn: Turn = angles if window is None else local
            if not self.cfg.layer_at(i).use_rope:
                turn = heat
            stream = layer(stream, turn, attend, i, window, norm_after(self.layers, i))
        aux_hidden_states[self.cfg.num_layers] = stream.x
        return self.norm(stream.x), [aux_hidden_states[k] for k in aux_layer_ids]

    def embed(self, token_ids_T: Tensor) -> Tensor:
        """What the first layer reads."""
        embeds_TD = look_up(token_ids_T, self.embed_tokens.weight)
        scale = self.cfg.embedding_scale
        if scale == 1.0:
            return embeds_TD
        return embeds_TD * torch.tensor(scale, dtype=embeds_TD.dtype).item()  # rounded, as Gemma was trained

    def compute_logits(self, hidden_TD: Tensor) -> Tensor:
        return capped(project(self.lm_head, hidden_TD), self.cfg.final_logit_softcapping)


def query_heat(heat: AttentionTemperature | None, positions_T: Tensor) -> Tensor | None:
    """What queries that are not turned are multiplied by, [T, 1, 1]; None: nothing."""
    if heat is None:
        return None
    pieces_T = torch.floor((positions_T.float() + 1.0) / heat.floor_scale)
    return (1.0 + heat.attn_scale * torch.log1p(pieces_T))[:, None, None]


def capped(logits_TV: Tensor, cap: float | None) -> Tensor:
    """Bent to lie between `cap` and its negative, perhaps in place. In fp32, as bf16 would make neighbours one."""
    if cap is None:
        return logits_TV
    exact = logits_TV if logits_TV.dtype == torch.float64 else logits_TV.float()
    return exact.div_(cap).tanh_().mul_(cap)
