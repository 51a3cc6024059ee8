"""The embedded engine under load, in this process.

Knows the engine's `add` and `step`, and how prompts become token ids.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from peagle.bench.driver import drive
from peagle.bench.server import Measured, Tell
from peagle.bench.timing import summarize_repeat
from peagle.bench.workload import Ask, Load, Workload, arrivals, usable_ids
from peagle.checkpoints.target import eos_ids, has_tokenizer, load_tokenizer
from peagle.config import DecoderConfig, SamplingParams
from peagle.data.generators import release_engine_memory
from peagle.engine.llm import LLM
from peagle.engine.request import Request, RequestGroup
from peagle.errors import UserError


class EmbeddedBench:
    """`with EmbeddedBench(llm, reader) as engine: engine.measure(...)`; the engine's memory is given back behind it."""

    def __init__(self, llm: LLM, reader: PromptReader) -> None:
        self._llm: LLM | None = llm
        self._reader = reader

    def __enter__(self) -> EmbeddedBench:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._llm = None
        release_engine_memory()

    def measure(self, workload: Workload, asks: Sequence[Ask], load: Load, seed: int, tell: Tell) -> Measured:
        assert self._llm is not None
        llm = self._llm
        prompts = [self._reader.ids(ask) for ask in asks]
        params = [
            SamplingParams(
                max_tokens=workload.max_tokens,
                temperature=workload.temperature,
                ignore_eos=workload.ignore_eos,
                seed=workload.seed + i,
            )
            for i in range(len(asks))
        ]
        check_room(llm, prompts, workload.max_tokens)
        gc.collect()  # now rather than in the middle of it
        due = arrivals(len(asks), load.rate, seed) if load.rate is not None else None
        return _driven(llm, prompts, params, load.concurrency, due, tell)


def _driven(
    llm: LLM,
    prompts: list[list[int]],
    params: list[SamplingParams],
    concurrency: int | None,
    due: list[float] | None,
    tell: Tell,
) -> Measured:
    groups: dict[int, RequestGroup] = {}  # by the request's id
    seen: dict[int, int] = {}  # tokens so far
    done: list[Request] = []

    def add(i: int) -> int:
        group = llm.add_request(prompts[i], params[i])
        groups[group.requests[0].id] = group
        return group.requests[0].id

    def step() -> list[tuple[int, int, bool]]:
        touched = []
        for request in llm.step():
            new = len(request.output_token_ids) - seen.get(request.id, 0)
            seen[request.id] = len(request.output_token_ids)
            if request.finish_reason is not None:
                done.append(request)
            touched.append((request.id, new, request.finish_reason is not None))
        return touched

    lengths = [len(ids) for ids in prompts]
    traces, seconds = drive(
        lengths, concurrency, due, add, step, lambda request: llm.abort_group(groups[request]), tell
    )
    while llm.has_unfinished_requests:  # a step that was launched before the last answer was known to be whole
        llm.step()
    drafts = sum(r.num_drafts for r in done)
    accepted = sum(sum(r.num_accepted_tokens_per_pos) for r in done)
    return Measured(summarize_repeat(traces, seconds, 1 + accepted / drafts if drafts else None))


class PromptReader:
    """Prompts -> token ids, as the target reads them; each once, and before anything is timed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tokenizer: Any = None
        self._known: dict[Ask, list[int]] = {}

    @property
    def tokenizer(self) -> Any:
        if self._tokenizer is None:
            if not has_tokenizer(self.folder):
                raise UserError(f"{self.folder}: has no tokenizer to read the prompts with; give --random-input N")
            self._tokenizer = load_tokenizer(self.folder)
        return self._tokenizer

    def ids(self, ask: Ask) -> list[int]:
        if ask.ids is not None:
            return list(ask.ids)
        if ask not in self._known:
            self._known[ask] = self._read(ask)
        return self._known[ask]

    def _read(self, ask: Ask) -> list[int]:
        if ask.text is not None:
            return list(self.tokenizer(ask.text)["input_ids"])
        if not self.tokenizer.chat_template:
            raise UserError(f"{self.folder}: has no chat template; give --raw to ask the prompts as they are")
        encoded = self.tokenizer.apply_chat_template(ask.as_messages(), add_generation_prompt=True, return_dict=True)
        return list(encoded["input_ids"])

    def random_ids(self, cfg: DecoderConfig) -> list[int]:
        """What made-up prompts may be made of."""
        if not has_tokenizer(self.folder):
            return usable_ids(cfg.vocab_size, eos_ids(self.folder))
        return usable_ids(min(cfg.vocab_size, len(self.tokenizer)), {*self.tokenizer.all_special_ids})


def check_room(llm: LLM, prompts: list[list[int]], max_tokens: int) -> None:
    """An answer that the context cuts short would be of another length than asked."""
    longest = max(map(len, prompts))
    if longest + max_tokens > llm.max_model_len:
        raise UserError(
            f"--max-tokens {max_tokens}: the longest prompt has {longest} tokens, and together they do not fit into "
            f"the {llm.max_model_len} of the context; ask for fewer, or raise --max-model-len"
        )
