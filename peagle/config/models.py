"""Shapes of targets and drafters.

Checkpoint readers translate a folder's config.json into these; modules are built from them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

MASK_TOKEN_ID_KEYS = ("ptd_token_id", "pard_token", "mask_token_id")  # all are written, since readers differ

RopeKind = Literal["default", "linear", "llama3", "yarn", "longrope", "proportional"]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embeddings. A comment names the rope types that use a field."""

    theta: float = 10000.0
    rope_type: RopeKind = "default"
    factor: float = 1.0  # linear, llama3, yarn, proportional
    original_max_positions: int = 0  # llama3, yarn, longrope
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn, longrope; None: computed from factor (and yarn's mscales)
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn
    short_factors: tuple[float, ...] = ()  # longrope: per rotary pair, for up to original_max_positions tokens
    long_factors: tuple[float, ...] = ()  # longrope: for longer sequences
    partial_rotary_factor: float = 1.0  # share of a head's dimensions that are rotated

    @property
    def as_llama(self) -> RopeConfig:
        """The closest kind that vLLM supports in a drafter: neither longrope nor partial rotation."""
        supported = self.rope_type not in ("longrope", "proportional") and self.partial_rotary_factor == 1.0
        return self if supported else RopeConfig(theta=self.theta)


@dataclass(frozen=True)
class ExpertsConfig:
    """A mixture-of-experts MLP."""

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int  # of one expert
    norm_topk_prob: bool = True  # the weights of the selected experts sum to 1
    bias: bool = False  # of the router and the experts
    clamp: tuple[float, float] | None = None  # alpha and limit of GPT-OSS's clamped SwiGLU; None: plain SwiGLU
    mxfp4: bool = False  # weights stay in four bits, in the layout of `peagle.kernels.moe.mxfp4`
    sigmoid_scaled_input: bool = False  # an expert's input is scaled by the sigmoid of its router logit (Llama 4)
    shared_intermediate_size: int = 0  # of a shared expert that sees every token; 0: none


Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True)
class LayerConfig:
    """One transformer layer of a target or a drafter. Drafters have only Llama layers (see `as_llama`)."""

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
    output_norms: bool = False  # attention and MLP outputs are normalized before the residual add (Gemma)
    attention_sinks: bool = False  # a learned logit per head in the softmax, without a value (GPT-OSS)
    experts: ExpertsConfig | None = None
    v_norm: bool = False  # values are normalized too, without weights (Gemma 4)
    layer_scalar: bool = False  # the layer's output is multiplied by a learned scalar (Gemma 4)
    use_rope: bool = True  # False: queries and keys are not rotated (some layers of Llama 4)

    @property
    def as_llama(self) -> LayerConfig:
        """A Llama or Qwen3 layer of the same sizes: the kinds that vLLM supports in a drafter."""
        plain = replace(self, activation="silu", output_norms=False, attention_sinks=False, experts=None)
        return replace(plain, qk_norm=self.qk_norm and not self.v_norm, v_norm=False, layer_scalar=False, use_rope=True)


@dataclass(frozen=True)
class ChunkedAttention:
    """Llama 4's local attention: a token sees the tokens before it in its own chunk of `chunk_size` positions."""

    chunk_size: int


Window = int | ChunkedAttention | None  # an int: sliding window in tokens, including the current one


@dataclass(frozen=True)
class AttentionTemperature:
    """Llama 4: queries at position p are scaled by 1 + attn_scale * log(1 + floor((p + 1) / floor_scale))."""

    floor_scale: int
    attn_scale: float


@dataclass(frozen=True)
class DecoderConfig:
    """A target. `windows[i]` is the attention window of layer i, None for full attention."""

    family: str
    vocab_size: int
    num_layers: int
    layer: LayerConfig
    rope: RopeConfig
    max_positions: int
    tie_word_embeddings: bool
    windows: tuple[Window, ...]
    local_rope: RopeConfig | None = None  # of layers with a window; None: `rope`
    embedding_scale: float = 1.0  # multiplies the embeddings that enter the first layer
    uses_transformers: bool = False  # runs through Hugging Face transformers; `layer` and `rope` hold only sizes
    layers: tuple[LayerConfig, ...] = ()  # per layer, if they differ; `layer` is then the most common one
    final_logit_softcapping: float | None = None  # logits become cap * tanh(logits / cap)
    attention_temperature: AttentionTemperature | None = None  # of layers without rotary embeddings

    def layer_at(self, i: int) -> LayerConfig:
        return self.layers[i] if self.layers else self.layer

    @property
    def default_aux_layer_ids(self) -> tuple[int, ...]:
        """vLLM's default; targets with few layers have fewer than three distinct ids."""
        return tuple(sorted({2, self.num_layers // 2, self.num_layers - 3}))


@dataclass(frozen=True)
class DrafterConfig:
    """A drafter: P-EAGLE with a `mask_token_id`, autoregressive EAGLE-3 without."""

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
    windows: tuple[int | None, ...] = ()  # as in DecoderConfig; empty: full attention everywhere

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
