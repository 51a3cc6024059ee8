"""Response generators: the interface that `ResponseWriter` drives, and the embedded engine behind it.

A generator accepts requests while `num_free_slots` is above 0 and returns results in the order they finish. The other
implementation is `peagle.data.endpoint`, an OpenAI-compatible server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from peagle.config import LOOP_TAIL_TOKENS, ResponseEngineSettings, SamplingParams
from peagle.data.loops import LOOP, is_repeating
from peagle.errors import UserError

if TYPE_CHECKING:
    from peagle.engine.llm import LLM
    from peagle.engine.request import RequestGroup

LOOP_CHECK_INTERVAL = 64  # output tokens between two checks of a running request


@dataclass(frozen=True)
class GenerationRequest:
    """One assistant turn to generate."""

    request_id: int
    messages: Sequence[dict[str, str]]
    prompt_token_ids: list[int]  # `messages` in the chat template
    params: SamplingParams


@dataclass(frozen=True)
class GenerationResult:
    """`token_ids` include the end-of-turn token. A server without `return_token_ids` gives only `text`."""

    request_id: int
    token_ids: list[int] | None = None
    text: str | None = None  # None: not decoded yet
    finish_reason: str = "stop"  # "stop", "length", or "loop" for a request stopped early because it repeats itself
    rejected: str | None = None  # permanent: why this request can never be answered
    detail: str = ""  # the server's own message
    error: str | None = None  # temporary: why this attempt failed


class ResponseGenerator(Protocol):
    max_model_len: int | None  # prompt and output tokens together; None: unknown

    @property
    def num_free_slots(self) -> int:
        """Number of requests it accepts now."""

    def submit(self, request: GenerationRequest) -> None: ...

    def poll(self) -> list[GenerationResult]:
        """Runs or waits briefly and returns the results that finished."""

    def close(self) -> None:
        """Cancels unfinished requests."""


class EngineGenerator:
    """The embedded engine, kept full."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.max_model_len: int | None = llm.max_model_len
        self._running: dict[int, tuple[int, RequestGroup]] = {}  # engine request id -> (request_id, group)
        # 25% more than can run, so that a freed slot is filled in the next step
        self._max_requests = llm.scheduler.max_num_seqs + max(llm.scheduler.max_num_seqs // 4, 1)

    @property
    def num_free_slots(self) -> int:
        return self._max_requests - len(self._running)

    def submit(self, request: GenerationRequest) -> None:
        group = self.llm.add_request(request.prompt_token_ids, request.params)
        self._running[group.requests[0].id] = (request.request_id, group)

    def poll(self) -> list[GenerationResult]:
        results = []
        for request in self.llm.step():
            output_ids = request.output_token_ids
            if request.finish_reason is not None:
                request_id, _ = self._running.pop(request.id)
                results.append(GenerationResult(request_id, output_ids, None, request.finish_reason))
            elif (
                len(output_ids) % LOOP_CHECK_INTERVAL == 0
                and len(output_ids) >= LOOP_TAIL_TOKENS
                and is_repeating(output_ids)
            ):
                request_id, group = self._running.pop(request.id)
                results.append(GenerationResult(request_id, list(output_ids), None, LOOP))
                self.llm.abort_group(group)
        return results

    def close(self) -> None:
        for _, group in self._running.values():
            self.llm.abort_group(group)
        self._running.clear()


def load_engine_generator(target: Path, settings: ResponseEngineSettings) -> EngineGenerator:
    """Loads an engine without tokenizer: `ResponseWriter` decodes many rows in one call."""
    import torch

    from peagle.checkpoints.target import eos_ids
    from peagle.engine.llm import LLM

    if not eos_ids(target):
        raise UserError(f"{target}: config.json and generation_config.json have no eos_token_id, so no response ends")
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
    return EngineGenerator(llm)


def release_engine_memory() -> None:
    """Frees the memory of a deleted engine. An engine freezes its objects for the garbage collector and has reference
    cycles, so deleting it is not enough."""
    import gc

    import torch

    gc.unfreeze()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
