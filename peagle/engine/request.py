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
from peagle.engine.kv_cache import BlockHash


class RequestState(Enum):
    WAITING = auto()  # has neither slot nor blocks
    PREFILL = auto()  # its prompt is being read in chunks
    DECODING = auto()
    FINISHED = auto()


@dataclass(eq=False)
class Request:
    id: int
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    stop_token_ids: frozenset[int]  # ids that end the text
    all_stop_token_ids: frozenset[int]  # ids that would, and may not come before min_tokens
    eos_ids: frozenset[int]  # those of them that are no stop_reason
    max_model_len: int  # tokens the sequence may have, prompt included
    detokenizer: Detokenizer | None = None
    matcher: Matcher | None = None  # where its output stands in it
    group: RequestGroup | None = None
    index: int = 0  # which of the group's n

    state: RequestState = RequestState.WAITING
    slot: int = -1
    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[BlockHash] = field(default_factory=list)  # of the leading blocks that are published
    num_tokens_for_next_hash: int = 0  # the length at which one more can be
    num_computed_tokens: int = 0  # tokens whose reading has been launched, while PREFILL
    num_in_flight_steps: int = 0  # rounds launched whose tokens have not come back
    max_in_flight_tokens: int = 0  # no launched round writes at this position or beyond
    num_preemptions: int = 0

    output_token_ids: list[int] = field(default_factory=list)
    num_accepted_tokens_per_step: list[int] = field(
        default_factory=list
    )  # drafts kept, for each round of an engine that drafts
    logprobs: list[dict[int, float]] = field(default_factory=list)
    final_text: str = ""  # where the text did not grow with the tokens
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_decode_steps: int = 0
    num_drafts: int = 0  # rounds that had drafts to verify
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        # asked for every request in every step, so worked out once
        p = self.params
        self.num_tokens = len(self.prompt_token_ids) + len(self.output_token_ids)  # `llm` counts on
        self.max_output_tokens = min(p.max_tokens, self.max_model_len - len(self.prompt_token_ids))  # tokens of output
        self.max_total_tokens = len(self.prompt_token_ids) + self.max_output_tokens  # its longest length
        # its logits need more than temperature, top-k, top-p and min-p, or are wanted back
        shapes = p.has_penalties or bool(p.logit_bias) or p.min_tokens > 0 or self.matcher is not None
        self.needs_logits_processing = shapes or p.logprobs is not None
        self.only_tokens = (
            self.detokenizer is None and p.logprobs is None and self.matcher is None
        )  # a token is all that is kept of a token

    @property
    def all_token_ids(self) -> list[int]:
        return self.prompt_token_ids + self.output_token_ids

    @property
    def is_draft_token(self) -> list[bool]:
        """For each token of the output: was it a draft? The first came from the prompt's own pass."""
        flags = [False]
        for accepted in self.num_accepted_tokens_per_step:
            flags += [True] * accepted + [False]
        count = len(self.output_token_ids)
        return (flags + [False] * (count - len(flags)))[:count]

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens to read before decoding: the whole prompt, or, coming back, all but the newest token."""
        return len(self.prompt_token_ids) + max(len(self.output_token_ids) - 1, 0)


@dataclass(eq=False)
class RequestGroup:
    """The n requests of one prompt."""

    prompt: str | None
    prompt_token_ids: list[int]
    requests: list[Request] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return all(r.finish_reason is not None for r in self.requests)


@dataclass
class PrefillChunk:
    """Tokens `begin` to `end` of a request's sequence, to be read."""

    request: Request
    begin: int
    end: int

    @property
    def is_last(self) -> bool:
        return self.end == self.request.num_prefill_tokens


@dataclass
class SchedulerOutput:
    """One step: a round for `decoding` with `drafts` drafts each, then `chunks` to read."""

    decode_requests: list[Request]
    num_draft_tokens: int
    prefill_chunks: list[PrefillChunk]
    limited_requests: list[Request] = field(
        default_factory=list
    )  # of `decoding`: those that want fewer drafts than others

    @property
    def needs_logits_processing(self) -> bool:
        return any(r.needs_logits_processing for r in self.decode_requests) or any(
            c.is_last and c.request.needs_logits_processing for c in self.prefill_chunks
        )


@dataclass
class CompletionOutput:
    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, float]] | None = None
    num_drafts: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    is_draft_token: list[bool] = field(default_factory=list)
    num_decode_steps: int = 0

    @property
    def acceptance_length(self) -> float:
        """Tokens a round with drafts gains, the target's own included."""
        return 1 + sum(self.num_accepted_tokens_per_pos) / max(self.num_drafts, 1)

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
class StreamDelta:
    """What one step added to a stream."""

    text: str
    token_ids: list[int]
    is_draft_token: list[bool]
    logprobs: list[dict[int, float]] | None
    finish_reason: str | None
    stop_reason: int | str | None = None
