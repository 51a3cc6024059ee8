"""Every dataclass of settings and every default, written once.

Knows nothing about files, tensors or formats: the checkpoint readers translate what lies on disk into
these, the modules are built from them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from peagle.errors import UserError

DEFAULT_DRAFT_TOKENS = 7  # where P-EAGLE peaks in the published results
EAGLE3_DRAFT_TOKENS = 3  # where autoregressive drafting does
MAX_DRAFT_TOKENS = 64
MASK_ID_NAMES = ("ptd_token_id", "pard_token", "mask_token_id")  # all written, equal, since readers differ
VLLM_VERSION = "0.32"  # the newest that folders are checked against

RopeKind = Literal["default", "linear", "llama3", "yarn"]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary positions; the fields below `factor` matter only to the kind named beside them."""

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0  # linear, llama3, yarn
    original_max_positions: int = 0  # llama3, yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn: None derives it from factor and the mscales
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn


@dataclass(frozen=True)
class LayerConfig:
    """The shape of one transformer layer, target's or drafter's."""

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


@dataclass(frozen=True)
class DecoderConfig:
    """A target: `windows[i]` is layer i's sliding window, None where it sees everything before it."""

    family: str
    vocab_size: int
    num_layers: int
    layer: LayerConfig
    rope: RopeConfig
    max_positions: int
    tied_head: bool
    windows: tuple[int | None, ...]

    @property
    def default_taps(self) -> tuple[int, ...]:
        """The taps vLLM falls back to; small models have fewer than three different ones."""
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
    taps: tuple[int, ...]
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
    def tap_width(self) -> int:
        return len(self.taps) * self.target_hidden_size

    @property
    def reduced_vocab(self) -> bool:
        return self.draft_vocab_size != self.vocab_size


@dataclass(frozen=True)
class SamplingParams:
    """What a request asks for. Temperature 0 is greedy; top_k 0 and top_p 1 are off."""

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = field(default=())

    def __post_init__(self) -> None:
        def require(ok: bool, name: str, want: str) -> None:
            if not ok:
                raise UserError(f"--{name} {getattr(self, name.replace('-', '_'))}: must be {want}")

        require(self.max_tokens >= 1, "max-tokens", "at least 1")
        require(0.0 <= self.temperature <= 100.0, "temperature", "between 0 (greedy) and 100")
        require(self.top_k >= 0, "top-k", "0 (off) or more")
        require(0.0 < self.top_p <= 1.0, "top-p", "above 0 and at most 1 (off)")
        require(self.seed is None or 0 <= self.seed < 2**63, "seed", "between 0 and 2^63 - 1")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def check_draft_tokens(k: int) -> int:
    """The number of drafts a round, refused where it makes no sense."""
    if not 1 <= k <= MAX_DRAFT_TOKENS:
        raise UserError(f"-k {k}: the number of draft tokens must be between 1 and {MAX_DRAFT_TOKENS}")
    return k
