"""Load on stock vLLM in this process, with the same prompts, loads, warm-up and clock as the embedded engine.

vLLM's statistics stay off because they cost time. The acceptance length comes from its outputs, one per request and
decode step, so it counts only tokens in the output; `peagle eval --engine vllm` also counts accepted tokens that were
cut off at the end of a response and is slightly higher.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from peagle.bench.driver import run_load
from peagle.bench.offline import PromptTokenizer
from peagle.bench.server import MeasuredRepeat, OnProgress
from peagle.bench.timing import summarize_repeat
from peagle.bench.workload import BenchPrompt, Load, Workload
from peagle.checkpoints.target import eos_ids
from peagle.errors import UserError


class VllmBench:
    """`with VllmBench(...) as engine: engine.measure(...)`; vLLM's processes end on exit."""

    def __init__(
        self,
        target: Path,
        speculative_config: dict[str, Any] | None,
        llm_options: dict[str, Any],
        tokenizer: PromptTokenizer,
    ) -> None:
        self._tokenizer, self._eos_ids = tokenizer, sorted(eos_ids(target))
        self._num_requests, self._speculates = 0, speculative_config is not None
        try:
            from vllm import LLM
        except ImportError as error:
            raise UserError(f"--engine vllm: vLLM cannot be imported ({error}); pip install vllm") from None
        try:
            self._llm = LLM(str(target), speculative_config=speculative_config, skip_tokenizer_init=True, **llm_options)
        except Exception as error:  # vLLM raises many types
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            drafter = f" with {speculative_config['model']}" if speculative_config else ""
            raise UserError(f"--engine vllm: does not start{drafter} ({reason})") from error

    def __enter__(self) -> VllmBench:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with contextlib.suppress(Exception):  # the measurement is complete
            self._llm.llm_engine.engine_core.shutdown()
        del self._llm
        gc.collect()

    def measure(
        self, workload: Workload, prompts: Sequence[BenchPrompt], load: Load, seed: int, on_progress: OnProgress
    ) -> MeasuredRepeat:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        prompt_token_ids = [self._tokenizer.encode(prompt) for prompt in prompts]
        params = [
            SamplingParams(
                max_tokens=workload.max_tokens,
                temperature=workload.temperature,
                ignore_eos=workload.ignore_eos,
                stop_token_ids=None if workload.ignore_eos else self._eos_ids,
                seed=workload.seed + i if workload.temperature else None,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            for i in range(len(prompts))
        ]
        engine = self._llm.llm_engine
        num_outputs = 0

        def add_request(i: int) -> str:
            self._num_requests += 1
            engine.add_request(str(self._num_requests), {"prompt_token_ids": prompt_token_ids[i]}, params[i])
            return str(self._num_requests)

        def step() -> list[tuple[str, int, bool]]:
            nonlocal num_outputs
            outputs = [(o.request_id, len(o.outputs[0].token_ids), o.finished) for o in engine.step()]
            num_outputs += sum(1 for _, num_new_tokens, _ in outputs if num_new_tokens)
            return outputs

        gc.collect()  # not during the measurement
        timings, duration = run_load(
            [len(token_ids) for token_ids in prompt_token_ids],
            load.concurrency,
            load.arrival_times(len(prompts), seed),
            add_request,
            step,
            lambda request_id: engine.abort_request([request_id]),
            on_progress,
        )
        num_decode_steps = num_outputs - len(timings)  # the first token of each request comes from its prefill
        num_decoded_tokens = sum(timing.num_output_tokens for timing in timings) - len(timings)
        measurable = self._speculates and num_decode_steps > 0
        return MeasuredRepeat(
            summarize_repeat(timings, duration, num_decoded_tokens / num_decode_steps if measurable else None)
        )
