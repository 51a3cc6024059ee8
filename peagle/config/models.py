"""Shapes of targets and drafters.

Knows nothing about files or tensors: the checkpoint readers translate what lies on disk into these, the modules are
built from them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

MASK_ID_NAMES = ("ptd_token_id", "pard_token", "mask_token_id")  # all written, equal, since readers differ

RopeKind = Literal["default", "linear", "llama3", "yarn", "longrope", "proportional"]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary positions; the fields below `factor` matter only to the kind named beside them."""

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0  # linear, llama3, yarn, proportional
    original_max_positions: int = 0  # llama3, yarn, longrope
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn, longrope: None derives it from factor (and yarn's mscales)
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn
    short_factors: tuple[float, ...] = ()  # longrope: one for each pair, of texts up to original_max_positions
    long_factors: tuple[float, ...] = ()  # and of longer ones
    rotated: float = 1.0  # share of a head that is turned at all

    @property
    def plain(self) -> RopeConfig:
        """As near as readers of drafters come to it: they know neither longrope nor heads turned in part."""
        known = self.kind not in ("longrope", "proportional") and self.rotated == 1.0
        return self if known else RopeConfig(theta=self.theta)


@dataclass(frozen=True)
class ExpertsConfig:
    """An MLP in parts, of which a router picks a few for every token."""

    count: int
    chosen: int
    width: int  # of one expert
    normed: bool = True  # the chosen ones' weights add up to 1
    bias: bool = False  # the router's, and the experts'
    clamp: tuple[float, float] | None = None  # alpha and limit of GPT-OSS's gate; None: SwiGLU
    packed: bool = False  # weights stay in four bits, as `peagle.kernels.moe.mxfp4` has them
    sigmoid: bool = False  # each chosen one reads the row times its own score's sigmoid (Llama 4)
    shared: int = 0  # width of one more that reads every row as it is; 0: there is none


Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True)
class LayerConfig:
    """The shape of one transformer layer, target's or drafter's; a drafter's is always a `plain` one."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float = 1e-6
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    activation: Activation = "silu"
    out_norms: bool = False  # what attention and MLP put out is normed before it is added
    sinks: bool = False  # each head has a score that takes its share of the attention and brings nothing
    experts: ExpertsConfig | None = None
    v_norm: bool = False  # values are normed too, without weights (Gemma 4)
    scaled: bool = False  # what leaves the layer is multiplied by a number of its own (Gemma 4)
    rotary: bool = True  # False: queries and keys are not turned at all (some of Llama 4's)

    @property
    def plain(self) -> LayerConfig:
        """A Llama layer of this shape; with the norms of queries and keys that readers of drafters know."""
        plain = replace(self, activation="silu", out_norms=False, sinks=False, experts=None)
        return replace(plain, qk_norm=self.qk_norm and not self.v_norm, v_norm=False, scaled=False, rotary=True)


@dataclass(frozen=True)
class Chunked:
    """A window that does not slide: positions lie in pieces of this size, and a row sees its own piece up to itself."""

    size: int


Window = int | Chunked | None  # an int: so many latest positions, the row's own included


@dataclass(frozen=True)
class Heat:
    """Queries at position p are multiplied by 1 + strength * log(1 + floor((p + 1) / every))."""

    every: int
    strength: float


@dataclass(frozen=True)
class DecoderConfig:
    """A target: `windows[i]` is layer i's window, None where it sees everything before it."""

    family: str
    vocab_size: int
    num_layers: int
    layer: LayerConfig
    rope: RopeConfig
    max_positions: int
    tied_head: bool
    windows: tuple[Window, ...]
    local_rope: RopeConfig | None = None  # of layers with a window; None: the same as the others'
    embedding_scale: float = 1.0  # on what the first layer reads; the table itself has none
    foreign: bool = False  # computed by transformers' own modules, of which `layer` and `rope` say no more than sizes
    layers: tuple[LayerConfig, ...] = ()  # of each layer, where they differ; `layer` is then what most of them are
    logit_cap: float | None = None  # logits are bent to lie between this and its negative
    heat: Heat | None = None  # of layers that do not turn their heads

    def layer_at(self, i: int) -> LayerConfig:
        return self.layers[i] if self.layers else self.layer

    @property
    def default_aux_layer_ids(self) -> tuple[int, ...]:
        """The aux_layer_ids vLLM falls back to; small models have fewer than three different ones."""
        return tuple(sorted({2, self.num_layers // 2, self.num_layers - 3}))


@dataclass(frozen=True)
class DrafterConfig:
    """A drafter: P-EAGLE when it has a `mask_token_id`, autoregressive EAGLE-3 when it has none."""

    vocab_size: int
    draft_vocab_size: int
    num_layers: int
    layer: LayerConfig
    rope: RopeConfig
    max_positions: int
    target_hidden_size: int
    aux_layer_ids: tuple[int, ...]
    mask_token_id: int | None = None
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False  # feed the final norm's output, not its input, to the next EAGLE-3 step
    own_embeddings: bool = False
    own_head: bool = False
    windows: tuple[int | None, ...] = ()  # as in DecoderConfig; empty means none anywhere

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    @property
    def parallel(self) -> bool:
        return self.mask_token_id is not None

    @property
    def aux_hidden_size(self) -> int:
        return len(self.aux_layer_ids) * self.target_hidden_size

    @property
    def reduced_vocab(self) -> bool:
        return self.draft_vocab_size != self.vocab_size
