"""What a request asks for: sampling, stops and grammars. What each of it means stands here, for every engine."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from peagle.config.validation import requirer
from peagle.errors import UserError

MAX_LOGPROBS = 20  # alternatives a token, as OpenAI's API has it


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
        require = requirer(self)
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        try:  # JSON has only strings for keys
            object.__setattr__(self, "logit_bias", {int(t): float(b) for t, b in self.logit_bias.items()})
        except (AttributeError, TypeError, ValueError):
            require(False, "logit_bias", "numbers by token id")

        require(self.max_tokens >= 1, "max_tokens", "at least 1")
        require(0.0 <= self.temperature <= 100.0, "temperature", "between 0 (greedy) and 100")
        require(self.top_k >= 0, "top_k", "0 (off) or more")
        require(0.0 < self.top_p <= 1.0, "top_p", "above 0 and at most 1 (off)")
        require(self.seed is None or 0 <= self.seed < 2**63, "seed", "between 0 and 2^63 - 1")
        require(all(t >= 0 for t in self.stop_token_ids), "stop_token_ids", "token ids, 0 or more")
        require(0.0 <= self.min_p <= 1.0, "min_p", "between 0 (off) and 1")
        require(0 <= self.min_tokens <= self.max_tokens, "min_tokens", f"between 0 and max-tokens, {self.max_tokens}")
        require(all(isinstance(s, str) and s for s in self.stop), "stop", "strings, none of them empty")
        require(-2.0 <= self.presence_penalty <= 2.0, "presence_penalty", "between -2 and 2, 0 is off")
        require(-2.0 <= self.frequency_penalty <= 2.0, "frequency_penalty", "between -2 and 2, 0 is off")
        # beyond these a logit could leave the range of a float; nobody means them
        require(0.01 <= self.repetition_penalty <= 100.0, "repetition_penalty", "between 0.01 and 100, 1 is off")
        for token, bias in self.logit_bias.items():
            if token < 0 or not -100.0 <= bias <= 100.0:
                raise UserError(f"--logit-bias {token}={bias}: must be a token id with a number between -100 and 100")
        require(self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS, "logprobs", f"from 0 to {MAX_LOGPROBS}")
        require(self.n >= 1, "n", "at least 1")
        require(self.grammar is None or isinstance(self.grammar, Grammar), "grammar", "made by peagle.engine.grammar")
        require(self.draft_tokens is None or self.draft_tokens >= 0, "draft_tokens", "0 (no drafts) or more")

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
