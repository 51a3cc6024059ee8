"""Every dataclass of settings and every default, written once.

Knows nothing about files, tensors or formats: the checkpoint readers translate what lies on disk into
these, the modules are built from them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from peagle.errors import UserError

DEFAULT_DRAFT_TOKENS = 7  # where P-EAGLE peaks in the published results
EAGLE3_DRAFT_TOKENS = 3  # where autoregressive drafting does
MAX_DRAFT_TOKENS = 64
MAX_LOGPROBS = 20  # alternatives a token, as OpenAI's API has it
MASK_ID_NAMES = ("ptd_token_id", "pard_token", "mask_token_id")  # all written, equal, since readers differ
VLLM_VERSION = "0.32"  # the newest that folders are checked against

RopeKind = Literal["default", "linear", "llama3", "yarn", "longrope"]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary positions; the fields below `factor` matter only to the kind named beside them."""

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0  # linear, llama3, yarn
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
        known = self.kind != "longrope" and self.rotated == 1.0
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
    packed: bool = False  # weights stay in four bits, as `peagle.kernels.mxfp4` has them


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

    @property
    def plain(self) -> LayerConfig:
        """A Llama layer of this shape."""
        return replace(self, activation="silu", out_norms=False, sinks=False, experts=None)


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
    local_rope: RopeConfig | None = None  # of layers with a window; None: the same as the others'
    embedding_scale: float = 1.0  # on what the first layer reads; the table itself has none
    foreign: bool = False  # computed by transformers' own modules, of which `layer` and `rope` say no more than sizes

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
class Grammar:
    """What an answer has to match; made, and checked, by `peagle.engine.grammar`."""

    kind: Literal["json_schema", "regex"]
    source: str


@dataclass(frozen=True)
class ParserLimits:
    """The grammar library's own, under its names; a step is one mask."""

    initial_lexer_fuel: int = 400_000
    step_lexer_fuel: int = 50_000
    step_max_items: int = 20_000
    max_lexer_states: int = 25_000  # about 2 kB each, shared by all answers of one grammar


@dataclass(frozen=True)
class GrammarLimits:
    """What a grammar may cost. One that costs more is refused."""

    source_bytes: int = 64 << 10
    nesting: int = 50
    indentation: int = 32  # characters in front of a line of JSON
    kept: int = 16  # compiled, the ones used last
    trial_cpu_s: int = 2
    trial_wall_s: float = 30.0  # on a machine that is busy with something else
    trial_bytes: int = 4 << 30
    library: ParserLimits = ParserLimits()


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
    5. `grammar`: every token that it does not allow next becomes -inf, and EOS ids too where the text may not end yet
       (under `ignore_eos` everywhere). Where all that it allows is held back by `min_tokens`, the grammar wins.
    6. Temperature 0 is greedy: the argmax of that (of equals the lowest id), none of the below.
    7. Logits are divided by `temperature`; `min_p` drops tokens less likely than min_p times the likeliest;
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
    4. `grammar` allows nothing behind it, however many `min_tokens` there are to be: "stop", no stop_reason.
    5. The output has `max_tokens` tokens, or the context is full: "length", no stop_reason. It then may match only the
       beginning of what the grammar allows, as it may after a stop token or stop string.

    Where no token of the target's goes on with what the grammar allows, or that costs more than `GrammarLimits`, the
    text ends without a further token: "error", and the stop_reason says why.

    The text is that of the output without its EOS or stop token, cut in front of the stop string; special tokens are
    no part of it, unless `skip_special_tokens` is off.

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
    draft_tokens: int | None = None  # drafts a round may have for it at most; never changes the text
    grammar: Grammar | None = None
    skip_special_tokens: bool = True

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
        require(self.grammar is None or isinstance(self.grammar, Grammar), "grammar", "made by peagle.engine.grammar")
        require(self.draft_tokens is None or self.draft_tokens >= 0, "draft-tokens", "0 (no drafts) or more")

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


Objective = Literal["ce", "kl", "tv", "lk", "lk-hybrid"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)
LK_ETA = 3.0  # how fast lk-hybrid turns from kl to tv as acceptance grows; the LK-losses paper's
LOSS_LOGITS = 128 << 20  # logits of the student, and of the teacher, that live at once in the loss: 256 MB each in bf16


TapDtype = Literal["bfloat16", "fp8"]
Method = Literal["p-eagle", "eagle3"]
OptimizerKind = Literal["adamw", "muon"]
Decay = Literal["cosine", "linear", "constant", "trapezoid"]
LAYERS: Mapping[Method, int] = {"p-eagle": 4, "eagle3": 1}  # deeper pays only where a pass makes all drafts
TRAIN_DEPTHS: Mapping[Method, int] = {"p-eagle": 8, "eagle3": 4}
DEFAULT_EPOCHS = 4.0
LEAST_WARMUP = 20  # steps, where a tenth of the time would be fewer
RUN_PER_WARMUP = 10  # a run is at least so many times as long as its warm-up
TRAPEZOID_DECAY = 0.25  # share of the run in which a trapezoid falls; level before that
LEAST_LR = 0.02  # of the highest, at the end of every decay
MUON_MOMENTUM = 0.95
MUON_SCALE = 0.2  # root mean square of its steps, over the rate; AdamW's are about as long
GRAD_BUCKET = 64 << 20  # elements that are summed over ranks in one call: 256 MB
CHUNK_BYTES = 3 << 30  # that a chunk of chains keeps for its way back, on a GPU with room: a small drafter needs one
CHUNK_HEADROOM = 0.85  # of free memory that is counted with, since an allocator never packs perfectly
LEAST_CHUNK_ROWS = 256
CPU_CHUNK_ROWS = 4096


def setting(default: Any, help: str) -> Any:
    """A field of `TrainConfig`; the help is its flag's."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class TrainConfig:
    """How a drafter is trained. Every field is a flag of `peagle train` and a key of a recipe."""

    method: Method = setting("p-eagle", "p-eagle drafts all tokens in one pass, eagle3 one after another.")
    layers: int | None = setting(None, "Of the drafter; 4 for p-eagle, 1 for eagle3.")
    init: str = setting("target", "Start from the target's last layers, target-first, random, or a drafter's folder.")
    taps: tuple[int, ...] | None = setting(None, "Layers of the target that are read, by commas; 2, half, last but 3.")
    mask_token: str = setting("auto", "The mask token of p-eagle: a token's text, its id, or auto: a reserved one.")
    fc_norm: bool = setting(True, "A norm for each tap (EAGLE-3.1).")
    own_embeddings: bool = setting(False, "Train the drafter's own embeddings, from the target's.")
    draft_vocab: int | None = setting(None, "Draft only the most frequent tokens of the data, so many.")

    depths: int | None = setting(None, "Draft tokens that are trained; 8 for p-eagle, 4 for eagle3.")
    rate: float = setting(0.8, "Of the chains that reach a depth so many go on to the next.")
    objective: Objective = setting("lk-hybrid", "ce, kl, tv, lk or lk-hybrid: what a row is asked for.")
    depth_decay: float = setting(1.0, "Each depth counts so much of the one before it; 1 counts all alike.")

    max_length: int = setting(4096, "Tokens of a conversation; longer ones are cut in front of the response.")
    batch_tokens: int = setting(16384, "Tokens of a packed batch, on each GPU.")
    accumulate: int = setting(1, "Batches of each GPU that make one step.")
    steps: int | None = setting(None, "Length of the whole run in steps.")
    minutes: float | None = setting(None, "Length of the whole run in minutes of training, over all resumes.")
    epochs: float | None = setting(None, "Length in passes over the data; 4 if no other length is given.")

    lr: float = setting(1e-3, "The highest learning rate.")
    warmup: int = setting(100, "Steps until it is reached; a tenth of the run at most.")
    decay: Decay = setting("cosine", "cosine, linear, trapezoid (level, then linear) or constant.")
    optimizer: OptimizerKind = setting("adamw", "adamw, or muon: orthogonal steps for matrices, AdamW for the rest.")
    beta1: float = setting(0.9, "AdamW's memory of the gradient.")
    beta2: float = setting(0.95, "AdamW's memory of its square.")
    weight_decay: float = setting(0.01, "Of matrices; norms, embeddings and the mask's hidden state have none.")
    clip: float = setting(1.0, "Longest gradient; 0 is off.")
    dtype: str = setting("auto", "bfloat16 (with fp32 masters), float32, or auto: bfloat16 on a GPU.")
    chunk_rows: int | Literal["auto"] = setting("auto", "Chain rows that are computed together; auto fits the memory.")
    graphs: bool = setting(True, "Capture steps on a GPU as CUDA graphs, where batches are small enough for it.")
    checkpoint_layers: bool = setting(False, "Recompute layers in the backward pass: less memory, more time.")
    shard_target: bool = setting(False, "Spread a target that does not fit over the GPUs (FSDP2).")
    chat_template: str | None = setting(None, "A Jinja file, instead of the target's own template.")
    cache: str | None = setting(None, "Keep what the target says in this folder, instead of asking it every time.")
    cache_dtype: TapDtype = setting("bfloat16", "bfloat16, or fp8: half the room.")
    vllm_states: str | None = setting(None, "Read what the target says from a folder vLLM's connector wrote.")

    held_out: int = setting(32, "Conversations kept aside to measure acceptance on; at most a fifth.")
    measure_every: int = setting(500, "Steps between measurements of acceptance; 0 measures at the end only.")
    measure_tokens: int = setting(128, "New tokens of each answer when measuring.")
    log_every: int = setting(20, "Steps between lines of the log.")
    save_minutes: float = setting(5.0, "Minutes between saves of the training state.")
    seed: int = setting(0, "Of new weights, of the order of the data and of sampled rows.")

    def __post_init__(self) -> None:
        def require(ok: bool, name: str, want: str) -> None:
            if not ok:
                raise UserError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be {want}")

        if self.taps is not None:
            object.__setattr__(self, "taps", tuple(sorted(self.taps)))
        require(self.method in get_args(Method), "method", " or ".join(get_args(Method)))
        require(self.objective in OBJECTIVES, "objective", " or ".join(OBJECTIVES))
        require(self.optimizer in get_args(OptimizerKind), "optimizer", " or ".join(get_args(OptimizerKind)))
        require(self.decay in get_args(Decay), "decay", " or ".join(get_args(Decay)))
        require(self.cache_dtype in get_args(TapDtype), "cache_dtype", " or ".join(get_args(TapDtype)))
        require(
            self.cache is None or self.vllm_states is None, "cache", "without --vllm-states, or the other way round"
        )
        require(self.dtype in ("auto", "bfloat16", "float32", "float64"), "dtype", "auto, bfloat16 or float32")
        require(self.chunk_rows == "auto" or self.chunk_rows >= 1, "chunk_rows", "auto, or at least 1")
        require(self.taps is None or len(set(self.taps)) == len(self.taps) > 0, "taps", "different layers, by commas")
        for name in ("rate", "depth_decay"):
            require(0.0 < getattr(self, name) <= 1.0, name, "above 0 and at most 1")
        require(self.depths is None or 1 <= self.depths <= MAX_DRAFT_TOKENS, "depths", f"from 1 to {MAX_DRAFT_TOKENS}")
        for name in ("layers", "draft_vocab", "max_length", "batch_tokens", "accumulate", "steps", "log_every"):
            require(getattr(self, name) is None or getattr(self, name) >= 1, name, "at least 1")
        for name in ("minutes", "epochs", "lr", "save_minutes"):
            require(getattr(self, name) is None or getattr(self, name) > 0, name, "above 0")
        for name in ("warmup", "weight_decay", "clip", "held_out", "measure_every", "seed"):
            require(getattr(self, name) >= 0, name, "0 or more")
        for name in ("beta1", "beta2"):
            require(0.0 <= getattr(self, name) < 1.0, name, "from 0 to below 1")
        require(self.max_length <= self.batch_tokens, "max_length", f"at most --batch-tokens, {self.batch_tokens}")
        require(self.measure_tokens >= 1, "measure_tokens", "at least 1")

    @property
    def num_layers(self) -> int:
        return self.layers if self.layers is not None else LAYERS[self.method]

    @property
    def num_depths(self) -> int:
        return self.depths if self.depths is not None else TRAIN_DEPTHS[self.method]

    @property
    def tables_only(self) -> bool:
        """Nobody needs the target's layers: what they say is read, none is started from, nothing is measured."""
        return self.vllm_states is not None and self.held_out == 0 and self.init not in ("target", "target-first")


LOOP_GRAM = 8  # tokens
LOOP_SHARE = 0.3  # of the 8-grams of an answer without an end that may be repeats, before it counts as a loop


@dataclass(frozen=True)
class ResponseSettings:
    """How the target writes responses to prompts. Of all of them only `samples` and `limit` may change between a
    run and its continuation: more of them are more rows."""

    temperature: float = 0.7
    top_p: float = 0.9
    top_k: int = 0
    max_tokens: int = 1024  # of an answer
    samples: int = 1  # responses to each prompt
    seed: int = 0
    limit: int | None = None  # prompts

    def __post_init__(self) -> None:
        self.params(0)
        if self.samples < 1:
            raise UserError(f"--samples {self.samples}: must be at least 1")
        if self.samples > 1 and self.temperature == 0:
            raise UserError(f"--samples {self.samples}: at --temperature 0 they would all be the same")
        if self.limit is not None and self.limit < 1:
            raise UserError(f"--limit {self.limit}: must be at least 1")
        if self.seed < 0:
            raise UserError(f"--seed {self.seed}: must be 0 or more")

    def params(self, seed: int) -> SamplingParams:
        return SamplingParams(self.max_tokens, self.temperature, self.top_k, self.top_p, seed)


@dataclass(frozen=True)
class WriterSettings:
    """The embedded engine as a writer of responses. None means: what suits the device and the target."""

    device: str | None = None
    dtype: str | None = None
    max_num_seqs: int | None = None
    max_model_len: int | None = None
    gpu_num_seqs: int = 1024  # on a GPU; the engine's own default is for serving, where latency matters
    gpu_memory_fraction: float = 0.9  # of the whole GPU, what others hold included


@dataclass(frozen=True)
class EndpointSettings:
    """An OpenAI-compatible server as a writer of responses."""

    url: str
    model: str | None = None  # None: the one that the server has
    concurrency: int = 64  # requests at once
    timeout_s: float = 600.0  # of one request
    retries: int = 5  # of one request
    backoff_s: float = 0.5  # before the first of them, then twice that, and so on
    failures: int = 8  # requests given up one after another, before the server is

    def __post_init__(self) -> None:
        for name, least in (("concurrency", 1), ("timeout_s", 0.001), ("retries", 0)):
            if getattr(self, name) < least:
                raise UserError(f"--{name.removesuffix('_s')} {getattr(self, name)}: must be at least {least}")


@dataclass(frozen=True)
class BatchDefaults:
    """How written responses become batches."""

    open_batches: int = 16  # being filled at once, so that a document finds one it fits into
    checked_rows: int = 64  # the first of a file, whose prompts are compared with the chat template
    checked_every: int = 1000  # and every so many of the rest


@dataclass(frozen=True)
class CacheSettings:
    """How the target's states are kept on disk."""

    dtype: TapDtype = "bfloat16"  # fp8 takes half the room
    shard_bytes: int = 512 << 20  # of one file, unless a single row is larger
    pass_tokens: int = 16384  # that the target reads at once

    def __post_init__(self) -> None:
        if self.dtype not in get_args(TapDtype):
            raise UserError(f"--cache-dtype {self.dtype}: must be {' or '.join(get_args(TapDtype))}")
        for name in ("shard_bytes", "pass_tokens"):
            if getattr(self, name) < 1:
                raise UserError(f"--cache-{name.replace('_', '-')} {getattr(self, name)}: must be at least 1")


@dataclass(frozen=True)
class MeasureSettings:
    """The engine that measures a drafter while it trains, on the same device."""

    cache_bytes: int = 4 << 30  # of its keys and values, at most; what does not fit waits its turn
    prefill_tokens: int = 4096  # of prompts that are read at once
    max_num_seqs: int = 256
    cuda_graphs: bool = False  # recording them takes longer than a few hundred rounds save


Helped = Literal["none", "eagle3", "p-eagle"]


@dataclass(frozen=True)
class BenchSettings:
    """The load that is measured. Rows are comparable only where all of it but loads and `repeats` is the same."""

    concurrency: tuple[int, ...] = ()  # closed loop: so many requests at once, the next as soon as one is answered
    rates: tuple[float, ...] = ()  # open loop: so many requests a second arrive, whoever waits
    requests: int | None = None  # of a repeat; None: enough for the heaviest of the loads
    waves: int | None = None  # a closed load asks so many times its concurrency of them; None: all
    repeats: int = 3
    warmup: int | None = None  # requests before each load; None: as many as run at once
    max_tokens: int = 128
    ignore_eos: bool = False
    temperature: float = 0.0
    random_input: int | None = None  # tokens of made-up prompts
    raw: bool = False  # prompts as they are, without a chat template
    seed: int = 0
    usual_concurrency: tuple[int, ...] = (1, 8)  # where no load is asked for
    least_requests: int = 32
    least_arriving_s: float = 10.0  # of an open loop, where `requests` is ours to choose

    def __post_init__(self) -> None:
        if not self.concurrency and not self.rates:
            object.__setattr__(self, "concurrency", self.usual_concurrency)

        def require(ok: bool, name: str, want: str) -> None:
            if not ok:
                raise UserError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be {want}")

        for c in self.concurrency:
            if c < 1:
                raise UserError(f"--concurrency {c}: must be at least 1")
        for rate in self.rates:
            if not 0 < rate < 1e6:
                raise UserError(f"--rate {rate:g}: must be above 0, in requests a second")
        for name in ("requests", "waves", "repeats", "random_input", "max_tokens"):
            require(getattr(self, name) is None or getattr(self, name) >= 1, name, "at least 1")
        require(self.warmup is None or self.warmup >= 0, "warmup", "0 or more")
        require(0.0 <= self.temperature <= 100.0, "temperature", "between 0 (greedy) and 100")
        require(0 <= self.seed < 2**31, "seed", "between 0 and 2^31 - 1")

    @property
    def count(self) -> int:
        """Requests of a repeat: the same for every load, so that all rows answer the same prompts."""
        if self.requests is not None:
            return self.requests
        arriving = [int(rate * self.least_arriving_s) for rate in self.rates]
        return max([self.least_requests, *((self.waves or 2) * c for c in self.concurrency), *arriving])

    def count_of(self, concurrency: int | None) -> int:
        """Requests of a repeat of one load, the first of all: a single one at a time would take far longer than 64."""
        if self.waves is None or concurrency is None:
            return self.count
        return min(self.count, max(self.least_requests, self.waves * concurrency))


@dataclass(frozen=True)
class BenchDoubts:
    """When a measurement is not to be trusted as it is."""

    least_seconds: float = 3.0  # of a repeat
    least_waves: int = 2  # requests for each that runs at once
    spread: float = 0.10  # between the fastest and the slowest repeat, of their mean
    lengths: float = 0.25  # by which mean answers may differ before two rows are not the same work
    elsewhere: float = 0.02  # of a server's tokens that went to others
    cached: float = 0.10  # of prompt tokens that came out of a server's prefix cache
    served: float = 0.80  # of an open loop's requests a second, below which the queue may have grown


@dataclass(frozen=True)
class ServerSettings:
    """An OpenAI-compatible server that is measured."""

    url: str
    model: str | None = None  # None: the one that the server has
    connect_s: float = 10.0
    stall_s: float = 60.0  # without a byte
    total_s: float = 600.0  # of one request
    failures: int = 8  # one after another, or twice as many as run at once, before the rest is not sent

    def __post_init__(self) -> None:
        for name, flag in (("connect_s", "connect-timeout"), ("stall_s", "stall-timeout"), ("total_s", "timeout")):
            if not getattr(self, name) > 0:
                raise UserError(f"--{flag} {getattr(self, name):g}: must be above 0 seconds")


@dataclass(frozen=True)
class EmbeddedSettings:
    """The embedded engine that is measured. None means: what suits the device, the target and the load."""

    device: str | None = None
    dtype: str | None = None
    max_num_seqs: int | None = None
    max_model_len: int | None = None
    gpu_memory_fraction: float = 0.9
    kv_cache_memory: int | None = None  # bytes; where it is given, the share above plays no part
    cost_table: str | None = None
    prefix_reuse: bool = False  # every repeat asks the same prompts: reuse would spare all but the first their reading


@dataclass(frozen=True)
class EvalSettings:
    """What acceptance is measured on. Numbers compare only where all of it up to `seed` is the same."""

    draft_tokens: tuple[int, ...] = (1, 3, 5, 7)
    temperatures: tuple[float, ...] = (0.0,)
    max_tokens: int = 512  # of an answer
    max_model_len: int = 4096  # prompt and answer together, where the target can; longer prompts are not asked
    limit: int | None = None  # rows of each data set
    raw: bool = False  # prompts as they are, without a chat template
    each_k: bool = False  # real rounds for every K, instead of one pass over what the target said
    context_edges: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384, 32768)  # where a round begins
    seed: int = 0  # of sampling and of the resampling behind intervals
    resamples: int = 2000  # behind an interval
    least_samples: int = 5  # answers below which there is none
    few_rounds: int = 500  # below which a row is worth a warning
    replay_tokens: int = 8192  # that target and drafter read at once
    replay_rows: int = 8192  # chain rows that the drafter reads at once
    replay_logits: int = 32 << 20  # of the drafter that live at once
    gpu_memory_fraction: float = 0.6  # the pass over what was said needs the rest
    kv_cache_memory: int | None = None  # bytes, instead of that share

    def __post_init__(self) -> None:
        for k in self.draft_tokens:
            check_draft_tokens(k)
        for temperature in self.temperatures:
            SamplingParams(temperature=temperature, max_tokens=self.max_tokens, seed=self.seed)
        for name, given in (("-k", self.draft_tokens), ("--temperature", self.temperatures)):
            if not given:
                raise UserError(f"{name}: give one at least")
        if self.limit is not None and self.limit < 1:
            raise UserError(f"--limit {self.limit}: must be at least 1")
        if self.max_model_len < 2:
            raise UserError(f"--max-model-len {self.max_model_len}: must leave room for a prompt token and an answer")
        edges = self.context_edges
        if any(b <= a for a, b in zip((0, *edges), edges, strict=False)):
            raise UserError(f"--context {','.join(map(str, edges))}: must be rising, by commas")


@dataclass(frozen=True)
class EvalServerSettings:
    """A server whose counters tell what was accepted."""

    url: str
    model: str | None = None  # None: the one that the server has
    concurrency: int = 16  # requests at once; counters are read between so many. 1 tells every answer apart
    timeout_s: float = 600.0  # of one request
    retries: int = 3
    backoff_s: float = 0.5  # before the first of them, then twice that, and so on
    longest_wait_s: float = 30.0  # between two tries
    settle_s: float = 3.0  # that counters may lag behind answers
    failures: int = 3  # groups given up one after another, before the server is

    def __post_init__(self) -> None:
        for name, least in (("concurrency", 1), ("timeout_s", 0.001), ("retries", 0)):
            if getattr(self, name) < least:
                raise UserError(f"--{name.removesuffix('_s')} {getattr(self, name)}: must be at least {least}")


PlanEngine = Literal["auto", "embedded", "vllm"]


@dataclass(frozen=True)
class PlanSettings:
    """The load that is planned for, and what is tried for it."""

    concurrency: tuple[int, ...] = (1, 8, 64)  # requests at once on one copy of the model
    drafts: tuple[int, ...] = (1, 2, 3, 4, 5, 7, 10)  # that are tried, as far as acceptance is known
    prompt_tokens: int = 512
    output_tokens: int = 256
    load: float | None = None  # output tokens a second, of all together
    per_user: float | None = None  # output tokens a second that each request gets at least
    tensor_parallel: int = 1
    engine: PlanEngine = "auto"  # the embedded one where it can run the target, else vLLM
    measured_k: int = DEFAULT_DRAFT_TOKENS  # the K of an acceptance length that is given alone
    memory_fraction: float = 0.9  # of a GPU
    reserved: int = 3 << 30  # bytes of it for activations and graphs
    most_gpus: int = 64  # that hold one copy of a model
    searched: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # `concurrency` where `per_user` decides it

    def __post_init__(self) -> None:
        def require(ok: bool, name: str, want: str) -> None:
            if not ok:
                raise UserError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be {want}")

        for c in self.concurrency:
            if not 1 <= c <= 1 << 20:
                raise UserError(f"--concurrency {c}: must be at least 1")
        for k in self.drafts:
            if not 1 <= k <= MAX_DRAFT_TOKENS:
                raise UserError(f"--drafts {k}: must be between 1 and {MAX_DRAFT_TOKENS}; none is always compared")
        require(bool(self.concurrency), "concurrency", "given")
        require(bool(self.drafts), "drafts", "given")
        require(0 <= self.prompt_tokens < 1 << 31, "prompt_tokens", "0 (their reading is left out) or more")
        require(1 <= self.output_tokens < 1 << 31, "output_tokens", "at least 1")
        for name in ("load", "per_user"):
            value = getattr(self, name)
            require(value is None or 0 < value < 1e15, name, "above 0, in tokens a second")
        require(1 <= self.tensor_parallel <= self.most_gpus, "tensor_parallel", f"from 1 to {self.most_gpus}")
        require(self.engine in get_args(PlanEngine), "engine", " or ".join(get_args(PlanEngine)))
        require(0 < self.memory_fraction <= 1, "memory_fraction", "above 0 and at most 1")
        check_draft_tokens(self.measured_k)


@dataclass(frozen=True)
class TuneSettings:
    """The rounds that are timed."""

    max_num_seqs: int = 64
    max_model_len: int = 2048
    context: int = 0  # tokens behind each request
    repeats: int = 5  # of each round; the fastest counts
    warmup: int = 1
    batches: tuple[int, ...] | None = None  # None: those recorded on a GPU, `cpu_batches` on a CPU
    cpu_batches: tuple[int, ...] = (1, 4, 8)
    concurrency: tuple[int, ...] = ()  # loads that vLLM's K is named for; none: every batch

    def __post_init__(self) -> None:
        def require(ok: bool, name: str, want: str) -> None:
            if not ok:
                raise UserError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be {want}")

        require(self.max_num_seqs >= 1, "max_num_seqs", "at least 1")
        require(self.max_model_len >= 2, "max_model_len", "at least 2")
        require(0 <= self.context < self.max_model_len, "context", f"from 0 to below {self.max_model_len}")
        require(self.repeats >= 1, "repeats", "at least 1")
        for name in ("batches", "concurrency"):
            for value in getattr(self, name) or ():
                if not 1 <= value <= self.max_num_seqs:
                    raise UserError(f"--{name} {value}: must be from 1 to --max-num-seqs, {self.max_num_seqs}")


@dataclass(frozen=True)
class ReportSettings:
    """What a report is called, and when it doubts what it shows."""

    title: str = "What speculative decoding brings"
    few_answers: int = 20  # of a data set, below which its acceptance is drawn hollow
    loops_matter: float = 0.03  # by which looping answers may lift the acceptance length before it is said


ServeEngine = Literal["embedded", "vllm"]
ToolParser = Literal["auto", "hermes", "llama3", "mistral", "none"]


@dataclass(frozen=True)
class ServeSettings:
    """How a server meets the world. Times are in seconds."""

    host: str = "127.0.0.1"  # loopback: who wants to be reached from outside says so
    port: int = 8000  # 0: any that is free
    model: str = ""  # the name that clients ask for
    api_key: str | None = field(default=None, repr=False)
    cors_origins: tuple[str, ...] = ()  # none: no page of another origin may read an answer
    max_queue: int = 256  # requests that may wait for the engine; more are told to come back
    max_body: int = 4 << 20  # bytes of a request
    deadline_s: float = 600.0  # from a request's arrival to its last token
    drain_s: float = 30.0  # for what is being answered when the server is told to stop
    head_s: float = 20.0  # for the head of a request to arrive
    body_s: float = 60.0  # for its body
    keep_alive_s: float = 30.0  # that an idle connection stays open; above the 5 s that clients usually keep theirs
    retry_after_s: int = 1
    temperature: float = 1.0  # where a request names none, as OpenAI's API has it
    completion_tokens: int = 16  # max_tokens of /v1/completions where it names none; a chat may fill the context
    max_answers: int = 128  # n
    max_stops: int = 32  # stop strings
    stop_length: int = 1024  # characters of one
    rebuilds: int = 3  # tries to build a failed engine anew
    failures: int = 5  # of the engine in a row, without an answer between them, before it is given up
    log_json: bool = False
    log_prompts: bool = False
    tool_parser: ToolParser = "auto"  # how the model writes calls of tools; auto: as its chat template says

    def __post_init__(self) -> None:
        def require(ok: bool, name: str, want: str) -> None:
            if not ok:
                flag = name.removesuffix("_s").replace("_", "-")
                raise UserError(f"--{flag} {getattr(self, name)}: must be {want}")

        require(0 <= self.port < 1 << 16, "port", "from 0 (any that is free) to 65535")
        require(self.max_queue >= 0, "max_queue", "0 or more")
        require(self.max_body >= 1, "max_body", "at least 1 byte")
        require(0 < self.deadline_s < 1e9, "deadline_s", "above 0, in seconds")
        require(0 <= self.drain_s < 1e9, "drain_s", "0 or more, in seconds")
        kinds = get_args(ToolParser)
        require(self.tool_parser in kinds, "tool_parser", f"{', '.join(kinds[:-1])} or {kinds[-1]}")
        if self.api_key is not None and not (self.api_key and self.api_key.isascii() and self.api_key.isprintable()):
            raise UserError("--api-key: must be printable ASCII, and not empty")


NAME_RULE = "small letters, digits and dashes, a letter first, at most 40"  # Kubernetes' for a service, and shorter


def is_name(text: str) -> bool:
    return re.fullmatch(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", text) is not None


@dataclass(frozen=True)
class DeploySettings:
    """`peagle deploy vllm`. None: vLLM's own choice."""

    name: str = "peagle"
    vllm_version: str = VLLM_VERSION
    tensor_parallel: int = 1
    replicas: int = 1
    host: str = "0.0.0.0"  # it is a service: others are meant to reach it
    port: int = 8000
    image: str | None = None  # None: vLLM's own of that version
    program: str = "/usr/local/bin/vllm"  # systemd wants a whole path
    user: str = "vllm"
    served_model_name: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    gpu_memory_fraction: float | None = None
    env: tuple[tuple[str, str], ...] = ()
    extra: tuple[str, ...] = ()  # words behind vLLM's command
    shared_memory_gib: int = 16  # what tensor parallel workers talk through
    start_s: int = 1800  # to download, load, compile and capture
    drain_s: int = 60

    def __post_init__(self) -> None:
        def require(ok: bool, name: str, want: str) -> None:
            if not ok:
                raise UserError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be {want}")

        require(is_name(self.name), "name", NAME_RULE)
        require(self.tensor_parallel >= 1, "tensor_parallel", "at least 1")
        require(self.replicas >= 1, "replicas", "at least 1")
        require(1 <= self.port and self.port + self.replicas <= 1 << 16, "port", "from 1 to 65535, replicas included")
        require(self.program.startswith("/"), "program", "a whole path")
        require(self.max_model_len is None or self.max_model_len >= 1, "max_model_len", "at least 1")
        require(self.max_num_seqs is None or self.max_num_seqs >= 1, "max_num_seqs", "at least 1")
        fraction = self.gpu_memory_fraction
        require(fraction is None or 0 < fraction <= 1, "gpu_memory_fraction", "above 0 and at most 1")


@dataclass(frozen=True)
class SagemakerSettings:
    """`peagle deploy sagemaker`. The image is AWS's own, by the tag that is newest here and the vLLM in it."""

    name: str = "peagle"
    role: str = ""
    instance_type: str = ""
    instances: int = 1
    region: str = ""
    s3: str | None = None  # s3://bucket/prefix, for what is uploaded
    image: str | None = None
    image_tag: str = "server-sagemaker-cuda-v2.5"
    vllm_version: str = "0.30"  # in that image
    ami: str = "al2023-ami-sagemaker-inference-gpu-4-1"  # the driver that its CUDA 13 needs
    tensor_parallel: int | None = None  # None: all GPUs of an instance
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    gpu_memory_fraction: float | None = None
    env: tuple[tuple[str, str], ...] = ()
    price: float | None = None  # USD an hour and instance; None: by the table
    start_s: int = 3600  # SageMaker's most

    def __post_init__(self) -> None:
        def require(ok: bool, name: str, want: str) -> None:
            if not ok:
                raise UserError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be {want}")

        require(is_name(self.name), "name", NAME_RULE)
        role = r"arn:aws[a-z-]*:iam::\d{12}:role/[\w+=,.@/-]+"
        require(re.fullmatch(role, self.role) is not None, "role", "arn:aws:iam::ACCOUNT:role/NAME")
        require(self.instance_type.startswith("ml."), "instance_type", "SageMaker's name of one, as ml.g6e.xlarge")
        require(self.instances >= 1, "instances", "at least 1")
        place = r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[^\s]*)?"
        require(self.s3 is None or re.fullmatch(place, self.s3) is not None, "s3", "s3://bucket/prefix")
        require(self.tensor_parallel is None or self.tensor_parallel >= 1, "tensor_parallel", "at least 1")
        require(self.price is None or self.price >= 0, "price", "0 or more, in USD an hour")
