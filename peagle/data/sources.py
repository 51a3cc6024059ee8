"""Who answers: what is asked of a source of responses and what comes back, and the embedded engine as one.

Knows nothing about conversations or files. A source takes questions while it has `room` and gives answers in the
order in which they get ready.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from peagle.config import LOOP_TAIL_TOKENS, ResponseEngineSettings, SamplingParams
from peagle.data.loops import LOOP, circling
from peagle.errors import UserError

if TYPE_CHECKING:
    from peagle.engine.llm import LLM
    from peagle.engine.request import RequestGroup


LOOK_EVERY = 64  # tokens, for a circle


@dataclass(frozen=True)
class Question:
    """A conversation that waits for the target's next turn."""

    key: int
    messages: Sequence[dict[str, str]]
    prompt_ids: list[int]  # the same in the chat template
    params: SamplingParams


@dataclass(frozen=True)
class Answer:
    """`token_ids` end with the end-of-turn token if the target said it. Without them only the text is known."""

    key: int
    token_ids: list[int] | None = None
    text: str | None = None  # None: not decoded yet
    finish_reason: str = "stop"  # or length, or loop: it was not waited for
    refused: str | None = None  # why this question will never be answered
    detail: str = ""  # the same in the server's own words
    failed: str | None = None  # why it was not this time


class Source(Protocol):
    longest: int | None  # tokens of prompt and answer together, where that is known

    @property
    def room(self) -> int:
        """Questions that it would take now."""

    def ask(self, question: Question) -> None: ...

    def wait(self) -> list[Answer]:
        """Works or waits a little; the answers that got ready."""

    def close(self) -> None:
        """Gives up what is not answered."""


class EngineSource:
    """The embedded engine, kept full: a new question goes in as soon as an answer comes out."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.longest: int | None = llm.max_model_len
        self._open: dict[int, tuple[int, RequestGroup]] = {}  # by the request's id
        # a quarter more than can run, so that a place which gets free is taken in the next step
        self._most = llm.scheduler.max_num_seqs + max(llm.scheduler.max_num_seqs // 4, 1)

    @property
    def room(self) -> int:
        return self._most - len(self._open)

    def ask(self, question: Question) -> None:
        group = self.llm.add_request(question.prompt_ids, question.params)
        self._open[group.requests[0].id] = (question.key, group)

    def wait(self) -> list[Answer]:
        answers = []
        for request in self.llm.step():
            said = request.output_token_ids
            if request.finish_reason is not None:
                key, _ = self._open.pop(request.id)
                answers.append(Answer(key, said, None, request.finish_reason))
            elif len(said) % LOOK_EVERY == 0 and len(said) >= LOOP_TAIL_TOKENS and circling(said):
                key, group = self._open.pop(request.id)
                answers.append(Answer(key, list(said), None, LOOP))
                self.llm.abort_group(group)
        return answers

    def close(self) -> None:
        for _, group in self._open.values():
            self.llm.abort_group(group)
        self._open.clear()


def open_engine(target: Path, settings: ResponseEngineSettings) -> EngineSource:
    """An engine for many requests at once. It reads and says ids: text is made elsewhere, many rows in one call."""
    import torch

    from peagle.checkpoints.target import eos_ids
    from peagle.engine.llm import LLM

    if not eos_ids(target):
        raise UserError(f"{target}: it names no eos_token_id, so no answer would ever end")
    on_gpu = (settings.device or ("cuda" if torch.cuda.is_available() else "cpu")).startswith("cuda")
    llm = LLM(
        target,
        tokenizer=False,
        device=settings.device,
        dtype=settings.dtype,
        max_num_seqs=settings.max_num_seqs or (settings.gpu_num_seqs if on_gpu else None),
        max_model_len=settings.max_model_len,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        kv_cache_memory_bytes=settings.kv_cache_memory_bytes,
    )
    return EngineSource(llm)


def release_memory() -> None:
    """Gives an engine's memory back once nobody holds it: whoever trains next needs it. An engine hides what it has
    loaded from the garbage collector, and it is full of cycles, so it would stay for ever."""
    import gc

    import torch

    gc.unfreeze()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
