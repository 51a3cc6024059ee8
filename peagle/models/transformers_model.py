"""A target computed by transformers' own modules: any causal language model whose attention can be handed over.

Everything but attention is theirs; attention is injected here as everywhere, so pages, packed documents and drafts
work as they do for our own decoder, if slower: nothing is fused. Knows nothing about files.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from peagle.config import DecoderConfig
from peagle.errors import UserError
from peagle.models.decoder import Decoder, capped
from peagle.models.layers import Attend, Rope, project

ATTENTION_NAME = "peagle"  # of the attention below, among transformers'
NORMS = ("norm", "final_layernorm", "ln_f", "final_layer_norm")  # what transformers calls the last norm


class AttentionBridge:
    """The attention of the pass in progress, and which layers asked for it with which windows."""

    attend: Attend | None = None

    def __init__(self, cfg: DecoderConfig) -> None:
        self.heads = [(layer.num_kv_heads, layer.head_dim) for layer in map(cfg.layer_at, range(cfg.num_layers))]
        self.windows: dict[int, int | None] = {}


def attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Called by transformers' layers, with [1, heads, T, d], in place of theirs; [1, T, H, d]."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    bridge: AttentionBridge = module.bridge
    assert bridge.attend is not None
    if attention_mask is not None or softcap or v.shape != k.shape or module.layer_idx in bridge.windows:
        raise UserError("its attention is of a kind that cannot be handed over")
    if k.shape[1:] != bridge.heads[module.layer_idx]:
        raise UserError("its layers have heads that its config does not name")
    bridge.windows[module.layer_idx] = sliding_window
    usual = q.shape[-1] ** -0.5
    if scaling is not None and scaling != usual:
        q = q * (scaling / usual)
    more: dict[str, Any] = {} if s_aux is None else {"sinks": s_aux}
    return bridge.attend(module.layer_idx, q, k, v, sliding_window, **more)[None], None


def logits_to_keep_kwargs(forward: Callable[..., Any]) -> dict[str, Any]:
    """What tells a pass to compute every position, where it may leave some out: drafts are judged at each. (Asked for
    nothing, Gemma 4 takes a way for few positions that fails where layers share keys but have no inputs of their own.)
    """
    return {"logits_to_keep": slice(None)} if "logits_to_keep" in inspect.signature(forward).parameters else {}


class TransformersDecoder(Decoder):
    """Called as a `Decoder` is."""

    def __init__(self, cfg: DecoderConfig, theirs: Any) -> None:
        nn.Module.__init__(self)
        self.cfg, self.theirs, self.bridge = cfg, theirs, AttentionBridge(cfg)
        self.all = logits_to_keep_kwargs(theirs.base_model.forward)
        for module in theirs.modules():
            if hasattr(module, "layer_idx"):
                module.bridge = self.bridge
        self._streams: dict[int, Tensor] = {}
        blocks = self._blocks()
        for i, block in enumerate(blocks):
            block.register_forward_pre_hook(self._keeper(i), with_kwargs=True)
        blocks[-1].register_forward_hook(self._keep_last)

    def _blocks(self) -> nn.ModuleList:
        for module in self.theirs.base_model.modules():
            if isinstance(module, nn.ModuleList) and len(module) == self.cfg.num_layers:
                return module
        raise UserError("its layers are not to be found")

    def _keeper(self, i: int) -> Any:
        def keep(module: nn.Module, args: tuple[Any, ...], more: dict[str, Any]) -> None:
            self._streams[i] = (args[0] if args else more["hidden_states"])[0]

        return keep

    def _keep_last(self, module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        self._streams[self.cfg.num_layers] = (out[0] if isinstance(out, tuple) else out).view(-1, self.width)

    @property
    def width(self) -> int:
        return self.cfg.layer.hidden_size

    @property
    def embed_tokens(self) -> nn.Embedding:  # type: ignore[override]
        return self.theirs.get_input_embeddings()

    @property
    def lm_head(self) -> nn.Linear:  # type: ignore[override]
        return self.theirs.get_output_embeddings()

    @property
    def layers(self) -> nn.ModuleList:  # type: ignore[override]
        return self._blocks()

    @property
    def norm(self) -> nn.Module:  # type: ignore[override]
        base = self.theirs.base_model
        found = [getattr(base, name) for name in NORMS if isinstance(getattr(base, name, None), nn.Module)]
        if not found:
            raise UserError("its last norm is not to be found")
        return found[0]

    @property
    def ropes(self) -> list[Rope]:
        return []

    def tie_weights(self) -> None:
        pass

    def forward(
        self, token_ids_T: Tensor, positions_T: Tensor, attend: Attend, aux_layer_ids: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None]:
        self.bridge.attend, self.bridge.windows = attend, {}
        try:
            places = {"input_ids": token_ids_T[None], "position_ids": positions_T[None]}
            out = self.theirs.base_model(**places, **self.all, use_cache=False, return_dict=True)
            aux_hidden_states = [self._streams[k] for k in aux_layer_ids]
        finally:
            self.bridge.attend = None
            self._streams.clear()
        return out.last_hidden_state[0], torch.cat(aux_hidden_states, -1) if aux_layer_ids else None

    def compute_logits(self, hidden_TD: Tensor) -> Tensor:
        return capped(project(self.lm_head, hidden_TD), self.cfg.final_logit_softcapping)
