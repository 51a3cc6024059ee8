"""Every dataclass of settings and every default, written once.

Knows nothing about files, tensors or formats: the checkpoint readers translate what lies on disk into
these, the modules are built from them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from peagle.errors import UserError

DEFAULT_DRAFT_TOKENS = 7  # where P-EAGLE peaks in the published results
EAGLE3_DRAFT_TOKENS = 3  # where autoregressive drafting does
MAX_DRAFT_TOKENS = 64
MAX_LOGPROBS = 20  # alternatives a token, as OpenAI's API has it
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
    """What a request asks for, and what it means: every engine and the reference do exactly this.

    A row of logits says what comes after `prompt + output`; in a round with drafts, row j's output includes the
    j drafts before it. It is shaped in vLLM's order:

    1. Logprobs are the log-softmax of the raw logits, before any of the below: of the chosen token and of the
       `logprobs` likeliest (of equals any). None gives no logprobs, 0 the chosen token's alone.
    2. `min_tokens`: EOS ids (under `ignore_eos` too) and `stop_token_ids` become -inf while the output has fewer
       tokens.
    3. `logit_bias` is added.
    4. Penalties: `repetition_penalty` divides the positive and multiplies the other logits of every token in
       prompt or output; then `frequency_penalty` is subtracted for each time a token is in the output,
       `presence_penalty` once if it is there at all.
    5. Temperature 0 is greedy: the argmax of that (of equals the lowest id), none of the below.
    6. Logits are divided by `temperature`; `min_p` drops tokens less likely than min_p times the likeliest;
       `top_k` drops those below the k-th best (what equals it stays); `top_p` keeps the likeliest until their
       mass reaches it (what equals the last of them stays). min_p 0, top_k 0 and top_p 1 are off.

    Text ends at the first token that one of these holds for, checked in this order. The token stays in
    `token_ids`, and whatever a round accepted behind it is cut off.

    1. It is an EOS id, and not `ignore_eos`: "stop", no stop_reason.
    2. It is in `stop_token_ids`: "stop", and the id is the stop_reason.
    3. It completes one of the `stop` strings in the text of the output so far, where a character whose bytes have
       not all come does not count yet: "stop", and the string is the stop_reason. Of several it is the one that
       ends first, of those the first in the list. Only one that ends behind the text of the first `min_tokens`
       tokens counts; so, as with stop tokens, the earliest to end the text is token number min_tokens + 1.
    4. The output has `max_tokens` tokens, or the context is full: "length", no stop_reason.

    The text is that of the output without its EOS or stop token, cut in front of the stop string.

    `n` answers are n requests; if there is a `seed`, the i-th (from 0) has (seed + i) mod 2^63. Greedy ones are equal.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    ignore_eos: bool = False
    stop_token_ids: Sequence[int] = ()  # kept as a tuple
    min_p: float = 0.0
    min_tokens: int = 0
    stop: Sequence[str] = ()  # kept as a tuple; one string is a list of one
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)  # by token id; kept as an own dict
    logprobs: int | None = None
    n: int = 1

    def __post_init__(self) -> None:
        def require(ok: bool, name: str, want: str) -> None:
            if not ok:
                raise UserError(f"--{name} {getattr(self, name.replace('-', '_'))}: must be {want}")

        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        try:  # JSON has only strings for keys
            object.__setattr__(self, "logit_bias", {int(t): float(b) for t, b in self.logit_bias.items()})
        except (AttributeError, TypeError, ValueError):
            require(False, "logit-bias", "numbers by token id")

        require(self.max_tokens >= 1, "max-tokens", "at least 1")
        require(0.0 <= self.temperature <= 100.0, "temperature", "between 0 (greedy) and 100")
        require(self.top_k >= 0, "top-k", "0 (off) or more")
        require(0.0 < self.top_p <= 1.0, "top-p", "above 0 and at most 1 (off)")
        require(self.seed is None or 0 <= self.seed < 2**63, "seed", "between 0 and 2^63 - 1")
        require(all(t >= 0 for t in self.stop_token_ids), "stop-token-ids", "token ids, 0 or more")
        require(0.0 <= self.min_p <= 1.0, "min-p", "between 0 (off) and 1")
        require(0 <= self.min_tokens <= self.max_tokens, "min-tokens", f"between 0 and max-tokens, {self.max_tokens}")
        require(all(isinstance(s, str) and s for s in self.stop), "stop", "strings, none of them empty")
        require(-2.0 <= self.presence_penalty <= 2.0, "presence-penalty", "between -2 and 2, 0 is off")
        require(-2.0 <= self.frequency_penalty <= 2.0, "frequency-penalty", "between -2 and 2, 0 is off")
        # beyond these a logit could leave the range of a float; nobody means them
        require(0.01 <= self.repetition_penalty <= 100.0, "repetition-penalty", "between 0.01 and 100, 1 is off")
        for token, bias in self.logit_bias.items():
            if token < 0 or not -100.0 <= bias <= 100.0:
                raise UserError(f"--logit-bias {token}={bias}: must be a token id with a number between -100 and 100")
        require(self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS, "logprobs", f"from 0 to {MAX_LOGPROBS}")
        require(self.n >= 1, "n", "at least 1")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        """Whether what was said before changes what may be said next."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)

    def check_ids(self, vocab_size: int, eos_ids: Collection[int] = ()) -> None:
        """Refuses token ids that the target does not have, and to mask all that it has."""
        for name, ids in (("--stop-token-ids", self.stop_token_ids), ("--logit-bias", self.logit_bias)):
            if any(t >= vocab_size for t in ids):
                raise UserError(f"{name} {max(ids)}: outside the vocabulary (0 to {vocab_size - 1})")
        if self.min_tokens and len({*self.stop_token_ids, *eos_ids}) >= vocab_size:
            raise UserError(f"--min-tokens {self.min_tokens}: every token is a stop token, so none may be generated")


def check_draft_tokens(k: int) -> int:
    """The number of drafts a round, refused where it makes no sense."""
    if not 1 <= k <= MAX_DRAFT_TOKENS:
        raise UserError(f"-k {k}: the number of draft tokens must be between 1 and {MAX_DRAFT_TOKENS}")
    return k
