"""The embedded engine under load, in this process: requests arrive by the load, the engine steps, every step is timed.

Knows the engine's `add` and `step`. A request that arrives while a step runs would have waited in a server's queue, so
in an open loop it counts from when it was due, not from when the engine took it.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from peagle.checkpoints.target import eos_ids, has_tokenizer, load_tokenizer
from peagle.config import DecoderConfig, SamplingParams
from peagle.data.sources import release_memory
from peagle.engine.llm import LLM
from peagle.engine.request import Group, Request
from peagle.errors import UserError
from peagle.measuring.bench_server import Measured, Tell
from peagle.measuring.load import Ask, Load, Workload, arrivals, usable_ids
from peagle.measuring.statistics import Trace, repeat_of


class EmbeddedBench:
    """`with EmbeddedBench(llm, reader) as engine: engine.measure(...)`; the engine's memory is given back behind it."""

    def __init__(self, llm: LLM, reader: PromptReader) -> None:
        self._llm: LLM | None = llm
        self._reader = reader

    def __enter__(self) -> EmbeddedBench:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._llm = None
        release_memory()

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
    """`due` says when each request arrives; without it `concurrency` are kept running."""
    running: dict[int, tuple[Trace, Group, int]] = {}  # by the request's id; with the tokens seen so far
    traces: list[Trace] = []
    done: list[Request] = []
    began = now = time.perf_counter()
    try:
        while len(done) < len(prompts):
            while len(traces) < len(prompts):
                i = len(traces)
                if len(running) >= (concurrency or len(prompts)) or (due is not None and began + due[i] > now):
                    break
                traces.append(Trace(now if due is None else began + due[i], input_tokens=len(prompts[i])))
                group = llm.add(prompts[i], params[i])
                running[group.requests[0].id] = (traces[-1], group, 0)
            if not running:
                assert due is not None
                time.sleep(max(0.0, began + due[len(traces)] - time.perf_counter()))
                now = time.perf_counter()
                continue
            touched = llm.step()
            now = time.perf_counter()
            for request in touched:
                trace, group, seen = running[request.id]
                trace.chunks.append(now)
                trace.output_tokens = len(request.output_ids)
                running[request.id] = (trace, group, trace.output_tokens)
                ended = request.finish_reason is not None
                if ended:
                    done.append(request)
                    del running[request.id]
                tell(ended, trace.output_tokens - seen)
    finally:
        for _, group, _ in running.values():
            llm.abort(group)
    seconds = time.perf_counter() - began
    while llm.busy:  # a step that was launched before the last answer was known to be whole
        llm.step()
    drafts = sum(r.num_drafts for r in done)
    accepted = sum(sum(r.accepted_per_position) for r in done)
    return Measured(repeat_of(traces, seconds, 1 + accepted / drafts if drafts else None))


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
