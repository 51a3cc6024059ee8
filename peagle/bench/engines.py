"""Loads on an engine in this process: the embedded one, or stock vLLM with the same prompts, warm-up and clock."""

import contextlib
import gc
import time
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from peagle.bench.workload import BenchEngine, BenchPrompt, Load, OnProgress, RequestTiming, Workload, summarize_repeat
from peagle.checkpoints.target import eos_ids, has_tokenizer, load_tokenizer
from peagle.config import DecoderConfig, SamplingParams
from peagle.data.generators import release_engine_memory
from peagle.engine.llm import LLM
from peagle.errors import UserError
from peagle.eval.counters import start_vllm, to_vllm_params
from peagle.results.schema import BenchRepeat


class PromptTokenizer:
    """Prompts to token ids by the target's tokenizer and chat template; each prompt is encoded once."""

    def __init__(self, target_folder: Path) -> None:
        self.target_folder = target_folder
        self._encoded: dict[BenchPrompt, list[int]] = {}

    @cached_property
    def tokenizer(self) -> Any:
        if not has_tokenizer(self.target_folder):
            raise UserError(f"{self.target_folder}: has no tokenizer; give --random-input-len N instead of --data")
        return load_tokenizer(self.target_folder)

    def encode(self, prompt: BenchPrompt) -> list[int]:
        if prompt.token_ids is not None:
            return list(prompt.token_ids)
        if prompt not in self._encoded:
            if prompt.text is not None:
                encoded = self.tokenizer(prompt.text)
            elif self.tokenizer.chat_template:
                messages = prompt.chat_messages()
                encoded = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
            else:
                raise UserError(f"{self.target_folder}: has no chat template; give --raw to send prompts without one")
            self._encoded[prompt] = list(encoded["input_ids"])
        return self._encoded[prompt]

    def random_token_ids(self, config: DecoderConfig) -> list[int]:
        """Token ids for random prompts: the vocabulary without special tokens."""
        if not has_tokenizer(self.target_folder):
            return sorted(set(range(config.vocab_size)) - set(eos_ids(self.target_folder)))
        vocab_size = min(config.vocab_size, len(self.tokenizer))
        return sorted(set(range(vocab_size)) - set(self.tokenizer.all_special_ids))


class InProcessBench(BenchEngine):
    """Adds requests, steps the engine and records the time of every step; subclasses adapt an engine."""

    def __init__(self, tokenizer: PromptTokenizer) -> None:
        self._tokenizer = tokenizer

    def build_params(self, workload: Workload, index: int) -> Any:
        return SamplingParams(
            max_tokens=workload.max_tokens,
            temperature=workload.temperature,
            ignore_eos=workload.ignore_eos,
            seed=workload.seed + index,
        )

    @abstractmethod
    def add_request(self, token_ids: list[int], params: Any) -> int:
        """Starts a request and returns its id."""

    @abstractmethod
    def step(self) -> Iterable[tuple[int, int, bool]]:
        """Runs one engine step; (id, number of new tokens, finished) for every request that got an output."""

    @abstractmethod
    def finish(self, timings: Sequence[RequestTiming]) -> float | None:
        """Ends a measurement. Returns the acceptance length."""

    def measure(
        self, workload: Workload, prompts: Sequence[BenchPrompt], load: Load, seed: int, on_progress: OnProgress
    ) -> tuple[BenchRepeat, list[str]]:
        """Ends with the engine if it is interrupted: requests in flight are not aborted.

        In an open loop TTFT counts from the arrival, even if the engine was busy with a step, as a request would
        wait in a server's queue.
        """
        prompt_token_ids = [self._tokenizer.encode(prompt) for prompt in prompts]
        params = [self.build_params(workload, i) for i in range(len(prompts))]
        arrival_times = load.arrival_times(len(prompts), seed)
        in_flight: dict[int, RequestTiming] = {}
        timings: list[RequestTiming] = []
        num_finished = 0
        gc.collect()  # not during the measurement
        start = now = time.perf_counter()
        while num_finished < len(prompts):
            while len(timings) < len(prompts) and len(in_flight) < (load.concurrency or len(prompts)):
                i = len(timings)
                sent_at = now if arrival_times is None else start + arrival_times[i]
                if sent_at > now:
                    break
                timings.append(RequestTiming(sent_at, num_input_tokens=len(prompt_token_ids[i])))
                in_flight[self.add_request(prompt_token_ids[i], params[i])] = timings[-1]
            if not in_flight:
                assert arrival_times is not None
                time.sleep(max(0.0, start + arrival_times[len(timings)] - time.perf_counter()))
                now = time.perf_counter()
                continue
            outputs = self.step()
            now = time.perf_counter()
            for request_id, num_new_tokens, finished in outputs:
                timing = in_flight[request_id]
                if num_new_tokens:
                    timing.chunk_times.append(now)
                    timing.num_output_tokens += num_new_tokens
                if finished:
                    num_finished += 1
                    del in_flight[request_id]
                    on_progress(num_finished)
        duration = time.perf_counter() - start
        return summarize_repeat(timings, duration, self.finish(timings)), []


class EmbeddedBench(InProcessBench):
    """`with EmbeddedBench(llm, tokenizer) as engine: engine.measure(...)`; the engine's memory is released on exit."""

    def __init__(self, llm: LLM, tokenizer: PromptTokenizer) -> None:
        super().__init__(tokenizer)
        self._llm = llm
        self._num_seen_tokens: dict[int, int] = {}
        self._num_drafts = self._num_accepted = 0

    def __exit__(self, *error: object) -> None:
        del self._llm
        release_engine_memory()

    def add_request(self, token_ids: list[int], params: SamplingParams) -> int:
        return self._llm.add_request(token_ids, params).requests[0].id

    def step(self) -> list[tuple[int, int, bool]]:
        outputs = []
        for request in self._llm.step():
            num_new_tokens = len(request.output_token_ids) - self._num_seen_tokens.get(request.id, 0)
            self._num_seen_tokens[request.id] = len(request.output_token_ids)
            finished = request.finish_reason is not None
            if finished:
                self._num_drafts += request.num_drafts
                self._num_accepted += sum(request.num_accepted_tokens_per_pos)
            outputs.append((request.id, num_new_tokens, finished))
        return outputs

    def finish(self, timings: Sequence[RequestTiming]) -> float | None:
        while self._llm.has_unfinished_requests:  # a step was launched before the last request was known to be finished
            self._llm.step()
        acceptance_length = 1 + self._num_accepted / self._num_drafts if self._num_drafts else None
        self._num_seen_tokens.clear()
        self._num_drafts = self._num_accepted = 0
        return acceptance_length


class VllmBench(InProcessBench):
    """Stock vLLM; its processes end on exit.

    vLLM's statistics stay off because they cost time. The acceptance length comes from its outputs, one per request and
    decode step, so it counts only tokens in the output; `peagle eval --engine vllm` also counts accepted tokens that
    were cut off at the end of a response and is slightly higher.
    """

    def __init__(
        self, tokenizer: PromptTokenizer, speculative_config: dict[str, Any] | None, llm_options: dict[str, Any]
    ) -> None:
        super().__init__(tokenizer)
        self._llm = start_vllm(tokenizer.target_folder, speculative_config, llm_options)
        self._eos_ids, self._speculates = sorted(eos_ids(tokenizer.target_folder)), speculative_config is not None
        self._num_requests = self._num_outputs = 0

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(Exception):  # the measurement is complete
            self._llm.llm_engine.engine_core.shutdown()
        del self._llm
        gc.collect()

    def build_params(self, workload: Workload, index: int) -> Any:
        from vllm.sampling_params import RequestOutputKind

        params = super().build_params(workload, index)
        return to_vllm_params(params, self._eos_ids, output_kind=RequestOutputKind.DELTA)

    def add_request(self, token_ids: list[int], params: Any) -> int:
        self._num_requests += 1
        self._llm.llm_engine.add_request(str(self._num_requests), {"prompt_token_ids": token_ids}, params)
        return self._num_requests

    def step(self) -> list[tuple[int, int, bool]]:
        steps = self._llm.llm_engine.step()
        outputs = [(int(o.request_id), len(o.outputs[0].token_ids), o.finished) for o in steps]
        self._num_outputs += sum(1 for _, num_new_tokens, _ in outputs if num_new_tokens)
        return outputs

    def finish(self, timings: Sequence[RequestTiming]) -> float | None:
        num_decode_steps = self._num_outputs - len(timings)  # the first token of each request comes from its prefill
        num_decoded_tokens = sum(timing.num_output_tokens for timing in timings) - len(timings)
        self._num_outputs = 0
        return num_decoded_tokens / num_decode_steps if self._speculates and num_decode_steps > 0 else None
