"""The nouns of the engine: a request, what one step shall do, what it brought, what the user gets.

Knows nothing about tensors. Who writes a field of `Request`: `llm` makes it and appends tokens (commit),
`scheduler` moves it through its states and gives it a slot and blocks, nobody else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from peagle.config import SamplingParams
from peagle.engine.detokenizer import Detokenizer
from peagle.engine.grammar import Matcher
from peagle.engine.kv_cache import Name


class State(Enum):
    WAITING = auto()  # has neither slot nor blocks
    READING = auto()  # its prompt is being read in chunks
    DECODING = auto()
    FINISHED = auto()


@dataclass(eq=False)
class Request:
    id: int
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    stops: frozenset[int]  # ids that end the text
    barred: frozenset[int]  # ids that would, and may not come before min_tokens
    eos_ids: frozenset[int]  # those of them that are no stop_reason
    longest: int  # tokens the sequence may have, prompt included
    text: Detokenizer | None = None
    grammar: Matcher | None = None  # where its output stands in it
    group: Group | None = None
    index: int = 0  # which of the group's n

    state: State = State.WAITING
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    names: list[Name] = field(default_factory=list)  # of the leading blocks that are published
    next_name: int = 0  # the length at which one more can be
    read: int = 0  # tokens whose reading has been launched, while READING
    in_flight: int = 0  # rounds launched whose tokens have not come back
    reach: int = 0  # no launched round writes at this position or beyond
    preemptions: int = 0

    output_ids: list[int] = field(default_factory=list)
    accepts: list[int] = field(default_factory=list)  # drafts kept, for each round of an engine that drafts
    logprobs: list[dict[int, float]] = field(default_factory=list)
    final_text: str = ""  # where the text did not grow with the tokens
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    rounds: int = 0
    num_drafts: int = 0  # rounds that had drafts to verify
    accepted_per_position: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        # asked for every request in every step, so worked out once
        p = self.params
        self.length = len(self.prompt_ids) + len(self.output_ids)  # `llm` counts on
        self.most = min(p.max_tokens, self.longest - len(self.prompt_ids))  # tokens of output
        self.end = len(self.prompt_ids) + self.most  # its longest length
        # its logits need more than temperature, top-k, top-p and min-p, or are wanted back
        shapes = p.penalised or bool(p.logit_bias) or p.min_tokens > 0 or self.grammar is not None
        self.shaped = shapes or p.logprobs is not None
        self.plain = (
            self.text is None and p.logprobs is None and self.grammar is None
        )  # a token is all that is kept of a token

    @property
    def tokens(self) -> list[int]:
        return self.prompt_ids + self.output_ids

    @property
    def drafted(self) -> list[bool]:
        """For each token of the output: was it a draft? The first came from the prompt's own pass."""
        flags = [False]
        for accepted in self.accepts:
            flags += [True] * accepted + [False]
        count = len(self.output_ids)
        return (flags + [False] * (count - len(flags)))[:count]

    @property
    def to_read(self) -> int:
        """Tokens to read before decoding: the whole prompt, or, coming back, all but the newest token."""
        return len(self.prompt_ids) + max(len(self.output_ids) - 1, 0)


@dataclass(eq=False)
class Group:
    """The n requests of one prompt."""

    prompt: str | None
    prompt_ids: list[int]
    requests: list[Request] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return all(r.finish_reason is not None for r in self.requests)


@dataclass
class Chunk:
    """Tokens `begin` to `end` of a request's sequence, to be read."""

    request: Request
    begin: int
    end: int

    @property
    def final(self) -> bool:
        return self.end == self.request.to_read


@dataclass
class Plan:
    """One step: a round for `decoding` with `drafts` drafts each, then `chunks` to read."""

    decoding: list[Request]
    drafts: int
    chunks: list[Chunk]
    limited: list[Request] = field(default_factory=list)  # of `decoding`: those that want fewer drafts than others

    @property
    def shaped(self) -> bool:
        return any(r.shaped for r in self.decoding) or any(c.final and c.request.shaped for c in self.chunks)


@dataclass
class CompletionOutput:
    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, float]] | None = None
    num_drafts: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    drafted: list[bool] = field(default_factory=list)
    rounds: int = 0

    @property
    def acceptance_length(self) -> float:
        """Tokens a round with drafts gains, the target's own included."""
        return 1 + sum(self.accepted_per_position) / max(self.num_drafts, 1)

    @property
    def cumulative_logprob(self) -> float | None:
        if self.logprobs is None:
            return None
        return sum(row[token] for row, token in zip(self.logprobs, self.token_ids, strict=True))


@dataclass
class RequestOutput:
    """What a prompt got: `outputs` has one entry, or n."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool


@dataclass
class StreamPiece:
    """What one step added to a stream."""

    text: str
    token_ids: list[int]
    drafted: list[bool]
    logprobs: list[dict[int, float]] | None
    finish_reason: str | None
    stop_reason: int | str | None = None
