"""Parameters of a request: sampling, stop conditions and grammars. Defines their meaning for every engine."""

from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Literal, Self

from peagle.config.options import Settings, checked, option, require
from peagle.errors import UserError

MAX_LOGPROBS = 20  # alternatives per token, as in OpenAI's API
MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS = 128, 8  # token sequences of a request, and tokens of one; powers of two


@dataclass(frozen=True)
class Grammar:
    """A grammar that the output must match; built and checked by `peagle.engine.grammar`."""

    kind: Literal["json_schema", "regex"]
    source: str


@dataclass(frozen=True)
class ParserLimits:
    """llguidance's limits, under its names. One step computes one token mask."""

    initial_lexer_fuel: int = 400_000
    step_lexer_fuel: int = 50_000
    step_max_items: int = 20_000
    max_lexer_states: int = 25_000  # about 2 kB each, shared by all requests with the same grammar


@dataclass(frozen=True)
class GrammarLimits:
    """Resource limits of a grammar; one that exceeds them is rejected."""

    max_source_bytes: int = 64 << 10
    max_nesting: int = 50
    max_indent_chars: int = 32  # whitespace at the start of a line of JSON
    max_cached: int = 16  # compiled grammars, least recently used first out
    compile_cpu_s: int = 2
    compile_wall_s: float = 30.0  # longer than the CPU time: the machine may be busy
    compile_memory_bytes: int = 4 << 30
    parser: ParserLimits = ParserLimits()


@dataclass(frozen=True)
class SamplingParams(Settings):
    """Parameters of a request. Every engine and the reference implement exactly this.

    Logits for the token after `prompt + output` are processed in vLLM's order. In a verification step, the output at
    row j includes the j draft tokens before it.

    1. Logprobs are the log-softmax of the raw logits, before all other steps: of the sampled token and of the
       `logprobs` most likely tokens (ties in any order). None: no logprobs; 0: the sampled token's only.
    2. `min_tokens`: EOS ids (also with `ignore_eos`) and `stop_token_ids` become -inf while the output is shorter.
    3. `logit_bias` is added. Tokens that are not in `allowed_token_ids` become -inf.
    4. Penalties: `repetition_penalty` divides positive and multiplies negative logits of tokens in prompt or output;
       then `frequency_penalty` is subtracted once per occurrence in the output, `presence_penalty` once if there is
       any.
    5. `grammar`: tokens that it does not allow next become -inf, and EOS ids too unless the text may end here (with
       `ignore_eos` always). If `min_tokens` masks all tokens that the grammar allows, the grammar wins.
       The last token of a sequence in `bad_words_token_ids` becomes -inf where the output ends with the tokens before
       it. `LLM` sets them from `bad_words`: each word at the start of a text and after a space.
    6. Temperature 0 is greedy: the argmax (lowest id of equal ones), without the step below.
    7. Logits are divided by `temperature`; `min_p` drops tokens less likely than min_p times the most likely;
       `top_k` drops tokens below the k-th best (keeping ties); `top_p` keeps the most likely tokens until their mass
       reaches it (keeping ties). min_p 0, top_k 0 and top_p 1 are off.

    The output ends with the first token for which one of these holds, checked in this order. The token stays in
    `token_ids`; accepted tokens after it are dropped.

    1. It is an EOS id and `ignore_eos` is off: "stop", no stop_reason.
    2. It is in `stop_token_ids`: "stop", the id is the stop_reason.
    3. It completes one of the `stop` strings in the output's text, not counting a character with missing bytes:
       "stop", the string is the stop_reason. Of several strings, the one that ends first wins, then the first in the
       list. The string must end after the text of the first `min_tokens` tokens; so, as with stop tokens, token
       number min_tokens + 1 is the earliest that can end the output.
    4. `grammar` allows no token after it, regardless of `min_tokens`: "stop", no stop_reason.
    5. The output has `max_tokens` tokens, or the context is full: "length", no stop_reason. The text may then be an
       incomplete match of the grammar, as it may after a stop token or stop string.

    If no token of the target continues the grammar, or parsing exceeds `GrammarLimits`, the output ends without a
    further token: "error", and the stop_reason is the cause.

    The text excludes the EOS or stop token and ends before the stop string. Special tokens are left out unless
    `skip_special_tokens` is off.

    `n` outputs are n requests; with a `seed`, the i-th (from 0) uses (seed + i) mod 2^63. Greedy outputs are equal.
    """

    max_tokens: int = option(128, "Maximum number of output tokens.", min=1, panel="Sampling")
    temperature: float = option(0.0, "Temperature; 0 is greedy.", min=0, max=100)
    top_k: int = option(0, "Top-k sampling; 0 is off.", min=0)
    top_p: float = option(1.0, "Top-p sampling; 1 is off.", above=0, max=1)
    seed: int | None = option(None, "Seed of the sampling.", min=0, max=2**63 - 1)
    ignore_eos: bool = option(False, "Generate to --max-tokens.")
    stop_token_ids: Sequence[int] = checked((), min=0)  # stored as a tuple
    min_p: float = option(0.0, "Minimum probability relative to the top token; 0 is off.", min=0, max=1)
    min_tokens: int = option(0, "Minimum number of output tokens.")
    stop: Sequence[str] = option((), "Stop string; repeatable.")  # stored as a tuple; a string is accepted
    presence_penalty: float = option(0.0, "Penalty on tokens in the output.", min=-2, max=2)
    frequency_penalty: float = option(0.0, "Penalty per occurrence of a token in the output.", min=-2, max=2)
    repetition_penalty: float = option(
        1.0, "Penalty on tokens in prompt and output; 1 is off.", min=0.01, max=100
    )  # beyond these bounds a logit could overflow
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)  # by token id; stored as a copy
    allowed_token_ids: Sequence[int] | None = checked(None, min=0)  # stored as a tuple
    bad_words: Sequence[str] = option((), "Text that the output must not contain; repeatable.")  # stored as a tuple
    bad_words_token_ids: Sequence[Sequence[int]] = ()
    logprobs: int | None = option(None, "With --json: alternatives per token.", min=0, max=MAX_LOGPROBS, panel="Output")
    n: int = checked(1, min=1)
    max_speculative_tokens: int | None = checked(None, min=0)  # per decode step; never changes the output
    grammar: Grammar | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True  # off: outputs have token ids and no text
    cache_salt: str | None = None  # requests share cached prefixes only with requests of the same salt

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "bad_words", tuple(self.bad_words))
        object.__setattr__(self, "bad_words_token_ids", tuple(map(tuple, self.bad_words_token_ids)))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", tuple(self.allowed_token_ids))
            require(len(self.allowed_token_ids) > 0, "--allowed-token-ids", "[]", "at least one token")
        try:
            bias = dict(self.logit_bias)
            if {*map(type, bias)} - {int} or {*map(type, bias.values())} - {float}:  # JSON object keys are strings
                bias = {int(t): float(b) for t, b in bias.items()}
            object.__setattr__(self, "logit_bias", bias)
        except (AttributeError, TypeError, ValueError):
            raise UserError(f"--logit-bias {self.logit_bias}: must be a map from token id to number") from None
        super().__post_init__()
        require(
            0 <= self.min_tokens <= self.max_tokens,
            *("--min-tokens", self.min_tokens, f"between 0 and max-tokens, {self.max_tokens}"),
        )
        for flag, texts in (("--stop", self.stop), ("--bad-words", self.bad_words)):
            require(all(isinstance(s, str) and s for s in texts), flag, texts, "non-empty strings")
        for token, value in bias.items():
            if token < 0 or not -100.0 <= value <= 100.0:
                raise UserError(f"--logit-bias {token}={value}: must be a token id with a number between -100 and 100")
        finds_stops = self.detokenize or not self.stop
        require(finds_stops, "--detokenize", self.detokenize, "on with stop strings, which are found in the text")
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise UserError(f"--grammar {self.grammar}: must be built by peagle.engine.grammar")

    def tokenize_bad_words(self, encode: Callable[[str], list[int]]) -> Self:
        """The same with `bad_words_token_ids` in place of `bad_words`. `encode` adds no special tokens."""
        found: list[list[int]] = []
        for word in self.bad_words:
            at_start, after_space = encode(word.lstrip()), encode(" " + word.lstrip())
            found.append(at_start)
            if after_space[:1] != at_start[:1] and len(after_space) == len(at_start):
                found.append(after_space)
            require(
                0 < len(at_start) <= MAX_BAD_WORD_TOKENS,
                *("--bad-words", repr(word), f"1 to {MAX_BAD_WORD_TOKENS} tokens, not {len(at_start)}"),
            )
        return replace(self, bad_words=(), bad_words_token_ids=found)

    def without_text(self) -> Self:
        """The same for an engine that knows no text. A copy without checks: they take long for a large `logit_bias`."""
        params = copy(self)
        object.__setattr__(params, "stop", ())
        object.__setattr__(params, "detokenize", False)
        return params

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on earlier tokens through a penalty."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)

    def check_ids(self, vocab_size: int, eos_ids: Collection[int] = ()) -> None:
        """Raises a UserError for ids outside the vocabulary, or if `min_tokens` would mask every token."""
        named_ids = {
            "--stop-token-ids": self.stop_token_ids,
            "--logit-bias": self.logit_bias,
            "--allowed-token-ids": self.allowed_token_ids,
        }
        for name, ids in named_ids.items():
            if ids and max(ids) >= vocab_size:
                raise UserError(f"{name} {max(ids)}: outside the vocabulary (0 to {vocab_size - 1})")
        words = self.bad_words_token_ids
        require(len(words) <= MAX_BAD_WORDS, "--bad-words", len(words), f"at most {MAX_BAD_WORDS} token sequences")
        stops, allowed = {*self.stop_token_ids, *eos_ids}, self.allowed_token_ids
        if self.min_tokens and (len(stops) >= vocab_size if allowed is None else stops.issuperset(allowed)):
            raise UserError(f"--min-tokens {self.min_tokens}: every token is a stop token, so none may be generated")


def check_prompt(prompt_ids: Sequence[int], vocab_size: int, max_model_len: int) -> None:
    """Raises UserError for an empty prompt, one without room for an output token, or ids outside the vocabulary."""
    if not prompt_ids:
        raise UserError("the prompt is empty: give it at least one token")
    if len(prompt_ids) >= max_model_len:
        raise UserError(
            f"the prompt has {len(prompt_ids)} tokens, but prompt and output together are limited to {max_model_len}"
            " (--max-model-len)"
        )
    if min(prompt_ids) < 0 or max(prompt_ids) >= vocab_size:
        raise UserError(f"a prompt token is outside the vocabulary (0 to {vocab_size - 1})")
