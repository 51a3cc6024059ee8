"""The target decoder; model families differ only in their `DecoderConfig`.

It returns hidden states, not logits: most rows of a prompt need none, so the caller calls `compute_logits` for its
rows.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from peagle.config import DecoderConfig
from peagle.kernels.norm.rms_norm import ResidualStream
from peagle.models.layers import Attend, DecoderLayer, RMSNorm, Rope, lookup_embeddings, next_input_norm, project


class Decoder(nn.Module):
    """A decoder-only target model."""

    def __init__(self, cfg: DecoderConfig) -> None:
        super().__init__()
        self.cfg = cfg
        width = cfg.layer.hidden_size
        self.embed_tokens = nn.Embedding(cfg.vocab_size, width)
        layers = [cfg.layer_at(i) for i in range(cfg.num_layers)]
        self.layers = nn.ModuleList(DecoderLayer(layer) for layer in layers)
        self.norm = RMSNorm(width, cfg.layer.norm_eps)
        self.lm_head = nn.Linear(width, cfg.vocab_size, bias=False)
        self.tie_weights()

        def head_dim(windowed: bool) -> int:
            """Returns the head width of layers with, or without, an attention window."""
            pairs = zip(layers, cfg.windows, strict=True)
            found = {layer.head_dim for layer, window in pairs if (window is not None) == windowed}
            assert len(found) < 2, "layers that share a rotary embedding have one head width"
            return found.pop() if found else cfg.layer.head_dim

        self.rope = Rope(cfg.rope, head_dim(windowed=False))
        self.local_rope = Rope(cfg.local_rope, head_dim(windowed=True)) if cfg.local_rope is not None else None

    @property
    def ropes(self) -> list[Rope]:
        return [module for module in self.modules() if isinstance(module, Rope)]

    def tie_weights(self) -> None:
        """Shares the embedding table with lm_head if the config ties them; call it again after loading weights."""
        if self.cfg.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(
        self, token_ids_T: Tensor, positions_T: Tensor, attend: Attend, aux_layer_ids: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """Returns final hidden states [T, D] after the norm, and auxiliary hidden states concatenated, or None.

        Auxiliary hidden state k is the residual stream entering layer k; for k = num_layers it is the last layer's
        output before the norm.
        """
        stream = ResidualStream(self.embed_input_ids(token_ids_T))
        angles = self.rope(positions_T, stream.x.dtype)
        local = angles if self.local_rope is None else self.local_rope(positions_T, stream.x.dtype)
        query_scale: Tensor | None = None  # [T, 1, 1]: factor on queries of layers without rotary embedding
        if temperature := self.cfg.attention_temperature:
            chunks_T = torch.floor((positions_T.float() + 1.0) / temperature.floor_scale)
            query_scale = (1.0 + temperature.attn_scale * torch.log1p(chunks_T))[:, None, None]
        aux_hidden_states = {}
        for i, (layer, window) in enumerate(zip(self.layers, self.cfg.windows, strict=True)):
            if i in aux_layer_ids:
                aux_hidden_states[i] = stream.x
            rotary = angles if window is None else local
            rotary_or_scale = rotary if self.cfg.layer_at(i).use_rope else query_scale
            stream = layer(stream, rotary_or_scale, attend, i, window, next_input_norm(self.layers, i))
        aux_hidden_states[self.cfg.num_layers] = stream.x
        aux_TN = torch.cat([aux_hidden_states[k] for k in aux_layer_ids], -1) if aux_layer_ids else None
        return self.norm(stream.x), aux_TN

    def embed_input_ids(self, token_ids_T: Tensor) -> Tensor:
        """Returns the scaled embeddings that enter the first layer."""
        embeds_TD = lookup_embeddings(token_ids_T, self.embed_tokens.weight)
        scale = self.cfg.embedding_scale
        if scale == 1.0:
            return embeds_TD
        return embeds_TD * torch.tensor(scale, dtype=embeds_TD.dtype).item()  # rounded as in Gemma's training

    def compute_logits(self, hidden_TD: Tensor) -> Tensor:
        logits_TV, cap = project(self.lm_head, hidden_TD), self.cfg.final_logit_softcapping
        if cap is None:
            return logits_TV
        # In fp32: in bf16 neighbouring values would collapse.
        exact = logits_TV if logits_TV.dtype == torch.float64 else logits_TV.float()
        return exact.div_(cap).tanh_().mul_(cap)
