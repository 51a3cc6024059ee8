"""Data types of the engine: requests, the work of one step, and outputs.

`LLM` creates requests and appends tokens; `Scheduler` changes their state, slot and blocks. Nothing else writes them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum, auto

from peagle.config import SamplingParams
from peagle.engine.detokenizer import Detokenizer
from peagle.engine.grammar import GrammarMatcher
from peagle.engine.kv_cache import BlockHash

Logprobs = dict[int, list[dict[int, float]]]  # by request id, then one dict {token: logprob} per output token


class RequestState(Enum):
    WAITING = auto()  # has neither slot nor blocks
    PREFILL = auto()
    DECODING = auto()
    FINISHED = auto()


@dataclass(eq=False)
class Request:
    id: int
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    eos_ids: frozenset[int]  # of the target; they may lie beyond its vocabulary
    max_model_len: int
    detokenizer: Detokenizer | None = None  # if the text grows with the tokens
    matcher: GrammarMatcher | None = None
    group: RequestGroup | None = None
    index: int = 0  # in the group

    state: RequestState = RequestState.WAITING
    slot: int = -1
    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[BlockHash] = field(default_factory=list)  # of the leading blocks in the prefix cache
    num_tokens_for_next_hash: int = 0  # value of num_tokens at which the next block can be hashed
    num_computed_tokens: int = 0  # prefill tokens that were launched
    num_in_flight_steps: int = 0  # launched steps whose tokens are not on the host yet
    max_in_flight_tokens: int = 0  # most tokens that these steps can add
    num_preemptions: int = 0

    output_token_ids: list[int] = field(default_factory=list)
    num_accepted_tokens_per_step: list[int] = field(default_factory=list)  # empty without a drafter
    logprobs: list[dict[int, float]] = field(default_factory=list)
    final_text: str = ""  # without a detokenizer: the text, once finished
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_decode_steps: int = 0
    num_drafts: int = 0  # decode steps with draft tokens
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Attributes instead of properties: every step reads them for every request.
        p = self.params
        self.stop_token_ids = frozenset(p.stop_token_ids) | (frozenset() if p.ignore_eos else self.eos_ids)
        self.num_tokens = len(self.prompt_token_ids) + len(self.output_token_ids)
        self.max_output_tokens = min(p.max_tokens, self.max_model_len - len(self.prompt_token_ids))
        self.max_total_tokens = len(self.prompt_token_ids) + self.max_output_tokens
        # Fast path of a commit: there is no text, logprob or grammar to update.
        self.has_tokens_only = self.detokenizer is None and p.logprobs is None and self.matcher is None

    @property
    def all_token_ids(self) -> list[int]:
        return self.prompt_token_ids + self.output_token_ids

    @property
    def is_draft_token(self) -> list[bool]:
        """For each output token: was it an accepted draft token? The first comes from prefill."""
        flags = [False]
        for num_accepted in self.num_accepted_tokens_per_step:
            flags += [True] * num_accepted + [False]
        num_output_tokens = len(self.output_token_ids)
        return (flags + [False] * (num_output_tokens - len(flags)))[:num_output_tokens]

    @property
    def text(self) -> str:
        """The output text; of an unfinished request, without an end that may be the beginning of a stop string."""
        if self.detokenizer is None:
            return self.final_text
        return self.detokenizer.streamable_text if self.finish_reason is None else self.detokenizer.text

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens to compute before decoding: the prompt; after a preemption, all but the newest token."""
        return len(self.prompt_token_ids) + max(len(self.output_token_ids) - 1, 0)


@dataclass(eq=False)
class RequestGroup:
    """The n requests of one prompt."""

    prompt: str | None
    prompt_token_ids: list[int]
    requests: list[Request] = field(default_factory=list)

    # Of the scheduler:
    last_queued: Request | None = None  # the last request to join the queue, until the next one may follow
    followers: deque[Request] = field(default_factory=deque)  # requests that have not joined the queue
    num_slots: int = 0

    @property
    def finished(self) -> bool:
        return all(r.finish_reason is not None for r in self.requests)


@dataclass
class PrefillChunk:
    """Tokens `begin` to `end` of a request."""

    request: Request
    begin: int
    end: int

    @property
    def is_last(self) -> bool:
        return self.end == self.request.num_prefill_tokens


@dataclass
class SchedulerOutput:
    """The work of one step: a decode step with `num_draft_tokens` per request, then prefill chunks."""

    decode_requests: list[Request]
    num_draft_tokens: int
    prefill_chunks: list[PrefillChunk]
    limited_requests: list[Request] = field(default_factory=list)  # decode requests with max_speculative_tokens set


@dataclass
class CompletionOutput:
    """One of the n outputs of a prompt."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, float]] | None = None
    num_drafts: int = 0  # decode steps with draft tokens
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    is_draft_token: list[bool] = field(default_factory=list)  # for each of token_ids
    num_decode_steps: int = 0

    @property
    def acceptance_length(self) -> float:
        """Mean number of accepted draft tokens per draft, plus the target's own token."""
        return 1 + sum(self.num_accepted_tokens_per_pos) / max(self.num_drafts, 1)


@dataclass
class RequestOutput:
    """All outputs of a prompt."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
