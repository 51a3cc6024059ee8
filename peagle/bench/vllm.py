"""Stock vLLM under load, in this process: the same prompts, loads and clock as the embedded engine has.

Knows vLLM's engine by `add_request` and `step`. Its own counters stay off, as they cost time: what a round brought is
read off its outputs, one for each round of a request. So acceptance is that of tokens that were kept, a little below
what `peagle eval --engine vllm` counts, where drafts behind the end of a text count too.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from peagle.bench.driver import drive
from peagle.bench.offline import PromptReader
from peagle.bench.server import Measured, Tell
from peagle.bench.timing import summarize_repeat
from peagle.bench.workload import Ask, Load, Workload, arrivals
from peagle.checkpoints.target import eos_ids
from peagle.errors import UserError


class VllmBench:
    """`with VllmBench(...) as engine: engine.measure(...)`; its processes end behind it."""

    def __init__(self, target: Path, speculative: dict[str, Any] | None, options: dict[str, Any], reader: PromptReader):
        """`speculative` is vLLM's `speculative_config`, `options` its `LLM`'s."""
        self._reader, self._eos = reader, sorted(eos_ids(target))
        self._count, self._drafts = 0, speculative is not None
        try:
            from vllm import LLM
        except ImportError as error:
            raise UserError(f"--engine vllm: vLLM does not load here ({error}); pip install vllm") from None
        try:
            self._llm = LLM(str(target), speculative_config=speculative, skip_tokenizer_init=True, **options)
        except Exception as error:  # whatever it does not like
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            helped = f" with {speculative['model']}" if speculative else ""
            raise UserError(f"--engine vllm: it does not start{helped} ({reason})") from error

    def __enter__(self) -> VllmBench:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with contextlib.suppress(Exception):  # what is measured is measured
            self._llm.llm_engine.engine_core.shutdown()
        del self._llm
        gc.collect()

    def measure(self, workload: Workload, asks: Sequence[Ask], load: Load, seed: int, tell: Tell) -> Measured:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        prompts = [self._reader.ids(ask) for ask in asks]
        params = [
            SamplingParams(
                max_tokens=workload.max_tokens,
                temperature=workload.temperature,
                ignore_eos=workload.ignore_eos,
                stop_token_ids=None if workload.ignore_eos else self._eos,
                seed=workload.seed + i if workload.temperature else None,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            for i in range(len(asks))
        ]
        gc.collect()
        due = arrivals(len(asks), load.rate, seed) if load.rate is not None else None
        return self._driven(prompts, params, load.concurrency, due, tell)

    def _driven(
        self,
        prompts: list[list[int]],
        params: list[Any],
        concurrency: int | None,
        due: list[float] | None,
        tell: Tell,
    ) -> Measured:
        engine = self._llm.llm_engine
        rounds = 0

        def add(i: int) -> str:
            self._count += 1
            engine.add_request(str(self._count), {"prompt_token_ids": prompts[i]}, params[i])
            return str(self._count)

        def step() -> list[tuple[str, int, bool]]:
            nonlocal rounds
            outputs = [(o.request_id, len(o.outputs[0].token_ids), o.finished) for o in engine.step()]
            rounds += sum(1 for _, new, _ in outputs if new)
            return outputs

        lengths = [len(ids) for ids in prompts]
        traces, seconds = drive(lengths, concurrency, due, add, step, lambda name: engine.abort_request([name]), tell)
        rounds -= len(traces)  # the first token of each comes of its prompt
        kept = sum(trace.num_output_tokens for trace in traces) - len(traces)
        return Measured(summarize_repeat(traces, seconds, kept / rounds if self._drafts and rounds > 0 else None))
