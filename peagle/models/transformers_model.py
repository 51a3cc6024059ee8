"""The transformers backend: a causal language model of Hugging Face transformers with our attention.

All modules are those of transformers; only attention is replaced, so paged KV caches, packed documents and verification
work as for our own decoder. It is slower, since nothing is fused.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from peagle.config import DecoderConfig
from peagle.errors import UserError
from peagle.models.decoder import Decoder
from peagle.models.layers import Attend

ATTENTION_NAME = "peagle"  # under which `attention_forward` is registered
FINAL_NORM_NAMES = ("norm", "final_layernorm", "ln_f", "final_layer_norm")


class AttentionBridge:
    """Holds the `attend` of the current pass, and records the window that each layer used."""

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
    """Replaces the attention of transformers' layers: q, k and v are [1, heads, T, d], the result is [1, T, H, d]."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    bridge: AttentionBridge = module.bridge
    assert bridge.attend is not None
    if attention_mask is not None or softcap or v.shape != k.shape or module.layer_idx in bridge.windows:
        raise UserError("its attention has a mask, softcap or value width that is not supported")
    if k.shape[1:] != bridge.heads[module.layer_idx]:
        raise UserError("its layers have other heads than its config says")
    bridge.windows[module.layer_idx] = sliding_window
    default_scaling = q.shape[-1] ** -0.5
    if scaling is not None and scaling != default_scaling:
        q = q * (scaling / default_scaling)
    kwargs: dict[str, Any] = {} if s_aux is None else {"sinks": s_aux}
    return bridge.attend(module.layer_idx, q, k, v, sliding_window, **kwargs)[None], None


def all_logits_kwargs(forward: Callable[..., Any]) -> dict[str, Any]:
    """Returns arguments that make a model compute logits at every position, which verification needs.

    (Without them Gemma 4 takes a path for few positions, which fails where layers share keys but have no inputs.)
    """
    return {"logits_to_keep": slice(None)} if "logits_to_keep" in inspect.signature(forward).parameters else {}


class TransformersDecoder(Decoder):
    """Has the interface of `Decoder`."""

    def __init__(self, cfg: DecoderConfig, model: Any) -> None:
        nn.Module.__init__(self)
        self.cfg, self.model, self.bridge = cfg, model, AttentionBridge(cfg)
        self.forward_kwargs = all_logits_kwargs(model.base_model.forward)
        for module in model.modules():
            if hasattr(module, "layer_idx"):
                module.bridge = self.bridge
        self._streams: dict[int, Tensor] = {}
        layers = self.layers
        for i, layer in enumerate(layers):
            layer.register_forward_pre_hook(partial(self._capture_input, i), with_kwargs=True)
        layers[-1].register_forward_hook(self._capture_output)

    def _capture_input(self, i: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._streams[i] = (args[0] if args else kwargs["hidden_states"])[0]

    def _capture_output(self, module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        last = out[0] if isinstance(out, tuple) else out
        self._streams[self.cfg.num_layers] = last.view(-1, self.cfg.layer.hidden_size)

    @property
    def embed_tokens(self) -> nn.Embedding:  # type: ignore[override]
        return self.model.get_input_embeddings()

    @property
    def lm_head(self) -> nn.Linear:  # type: ignore[override]
        return self.model.get_output_embeddings()

    @property
    def layers(self) -> nn.ModuleList:  # type: ignore[override]
        for module in self.model.base_model.modules():
            if isinstance(module, nn.ModuleList) and len(module) == self.cfg.num_layers:
                return module
        raise UserError("its list of layers was not found")

    @property
    def norm(self) -> nn.Module:  # type: ignore[override]
        base = self.model.base_model
        found = [getattr(base, name) for name in FINAL_NORM_NAMES if isinstance(getattr(base, name, None), nn.Module)]
        if not found:
            raise UserError("its final norm was not found")
        return found[0]

    def forward(
        self, token_ids_T: Tensor, positions_T: Tensor, attend: Attend, aux_layer_ids: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None]:
        self.bridge.attend, self.bridge.windows = attend, {}
        try:
            inputs = {"input_ids": token_ids_T[None], "position_ids": positions_T[None]}
            out = self.model.base_model(**inputs, **self.forward_kwargs, use_cache=False, return_dict=True)
            aux_hidden_states = [self._streams[k] for k in aux_layer_ids]
        finally:
            self.bridge.attend = None
            self._streams.clear()
        return out.last_hidden_state[0], torch.cat(aux_hidden_states, -1) if aux_layer_ids else None
