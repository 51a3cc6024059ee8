"""Load on the embedded engine in this process."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from peagle.bench.driver import run_load
from peagle.bench.server import MeasuredRepeat, OnProgress
from peagle.bench.timing import summarize_repeat
from peagle.bench.workload import BenchPrompt, Load, Workload, random_token_ids
from peagle.checkpoints.target import eos_ids, has_tokenizer, load_tokenizer
from peagle.config import DecoderConfig, SamplingParams
from peagle.data.generators import release_engine_memory
from peagle.engine.llm import LLM
from peagle.engine.request import Request, RequestGroup
from peagle.errors import UserError


class EmbeddedBench:
    """`with EmbeddedBench(llm, tokenizer) as engine: engine.measure(...)`; the engine's memory is released on exit."""

    def __init__(self, llm: LLM, tokenizer: PromptTokenizer) -> None:
        self._llm: LLM | None = llm
        self._tokenizer = tokenizer

    def __enter__(self) -> EmbeddedBench:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._llm = None
        release_engine_memory()

    def measure(
        self, workload: Workload, prompts: Sequence[BenchPrompt], load: Load, seed: int, on_progress: OnProgress
    ) -> MeasuredRepeat:
        assert self._llm is not None
        llm = self._llm
        prompt_token_ids = [self._tokenizer.encode(prompt) for prompt in prompts]
        params = [
            SamplingParams(
                max_tokens=workload.max_tokens,
                temperature=workload.temperature,
                ignore_eos=workload.ignore_eos,
                seed=workload.seed + i,
            )
            for i in range(len(prompts))
        ]
        groups: dict[int, RequestGroup] = {}
        num_seen_tokens: dict[int, int] = {}
        finished: list[Request] = []

        def add_request(i: int) -> int:
            group = llm.add_request(prompt_token_ids[i], params[i])
            groups[group.requests[0].id] = group
            return group.requests[0].id

        def step() -> list[tuple[int, int, bool]]:
            outputs = []
            for request in llm.step():
                num_new_tokens = len(request.output_token_ids) - num_seen_tokens.get(request.id, 0)
                num_seen_tokens[request.id] = len(request.output_token_ids)
                if request.finish_reason is not None:
                    finished.append(request)
                outputs.append((request.id, num_new_tokens, request.finish_reason is not None))
            return outputs

        gc.collect()  # not during the measurement
        timings, duration = run_load(
            [len(token_ids) for token_ids in prompt_token_ids],
            load.concurrency,
            load.arrival_times(len(prompts), seed),
            add_request,
            step,
            lambda request_id: llm.abort_group(groups[request_id]),
            on_progress,
        )
        while llm.has_unfinished_requests:  # a step was launched before the last request was known to be finished
            llm.step()
        num_drafts = sum(request.num_drafts for request in finished)
        num_accepted = sum(sum(request.num_accepted_tokens_per_pos) for request in finished)
        return MeasuredRepeat(
            summarize_repeat(timings, duration, 1 + num_accepted / num_drafts if num_drafts else None)
        )


class PromptTokenizer:
    """Prompts to token ids by the target's tokenizer and chat template; each prompt is encoded once."""

    def __init__(self, target_folder: Path) -> None:
        self.target_folder = target_folder
        self._tokenizer: Any = None
        self._encoded: dict[BenchPrompt, list[int]] = {}

    @property
    def tokenizer(self) -> Any:
        if self._tokenizer is None:
            if not has_tokenizer(self.target_folder):
                raise UserError(f"{self.target_folder}: has no tokenizer; give --random-input-len N instead of --data")
            self._tokenizer = load_tokenizer(self.target_folder)
        return self._tokenizer

    def encode(self, prompt: BenchPrompt) -> list[int]:
        if prompt.token_ids is not None:
            return list(prompt.token_ids)
        if prompt not in self._encoded:
            self._encoded[prompt] = self._encode(prompt)
        return self._encoded[prompt]

    def _encode(self, prompt: BenchPrompt) -> list[int]:
        if prompt.text is not None:
            return list(self.tokenizer(prompt.text)["input_ids"])
        if not self.tokenizer.chat_template:
            raise UserError(f"{self.target_folder}: has no chat template; give --raw to send prompts without one")
        messages = prompt.chat_messages()
        encoded = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        return list(encoded["input_ids"])

    def random_token_ids(self, config: DecoderConfig) -> list[int]:
        """Token ids for random prompts."""
        if not has_tokenizer(self.target_folder):
            return random_token_ids(config.vocab_size, eos_ids(self.target_folder))
        return random_token_ids(min(config.vocab_size, len(self.tokenizer)), self.tokenizer.all_special_ids)
