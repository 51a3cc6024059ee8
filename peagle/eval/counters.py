"""Acceptance from the spec_decode counters of vLLM, in this process or behind a server's /metrics.

Counters are sums over all requests between two reads. So requests are sent in groups of one category, and a group is
one sample; only a group of a single request gives the counts of one response.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from peagle.checkpoints.drafter import read_drafter_config
from peagle.checkpoints.target import eos_ids, read_target_config
from peagle.checkpoints.validate import build_speculative_config
from peagle.config import EvalSettings
from peagle.data.prompts import Prompt
from peagle.errors import UserError
from peagle.eval.conversations import ConversationRunner, EvalRequest, EvalResponse
from peagle.eval.datasets import EvalDataset
from peagle.eval.samples import AcceptanceSample, EvalProgress

UNEXPLAINED = "the counters include other requests"


class GroupInvalid(Exception):
    """The counts of a group cannot be used because a request failed; the message is a short reason."""


@dataclass(frozen=True)
class SpecDecodeCounters:
    """Running totals of vLLM's spec_decode counters."""

    num_drafts: int
    num_accepted_tokens_per_pos: tuple[int, ...]
    num_generation_tokens: int | None = None  # if the server reports it

    def since(self, before: SpecDecodeCounters) -> SpecDecodeCounters:
        generated = None
        if self.num_generation_tokens is not None and before.num_generation_tokens is not None:
            generated = self.num_generation_tokens - before.num_generation_tokens
        pairs = zip(self.num_accepted_tokens_per_pos, before.num_accepted_tokens_per_pos, strict=True)
        return SpecDecodeCounters(
            self.num_drafts - before.num_drafts, tuple(now - then for now, then in pairs), generated
        )

    @property
    def decreased(self) -> bool:
        """Of a difference: whether the engine restarted in between."""
        return min(self.num_drafts, *self.num_accepted_tokens_per_pos, self.num_generation_tokens or 0) < 0


class CountedEngine(Protocol):
    def read_counters(self, min_generation_tokens: int | None = None) -> SpecDecodeCounters:
        """Current totals. Waits a while for late counters until `min_generation_tokens` are reached."""

    def complete(self, requests: list[EvalRequest]) -> list[EvalResponse]: ...


def split_groups(rows: Sequence[Prompt], max_rows: int) -> Iterator[list[Prompt]]:
    """Groups of rows of the same category, in order of first occurrence."""
    by_category: dict[str | None, list[Prompt]] = {}
    for row in rows:
        by_category.setdefault(row.category, []).append(row)
    for members in by_category.values():
        for i in range(0, len(members), max_rows):
            yield members[i : i + max_rows]


def measure_group(
    engine: CountedEngine, runner: ConversationRunner, group: list[Prompt], temperature: float, warnings: list[str]
) -> list[AcceptanceSample]:
    """One sample for every turn of the group."""
    samples: list[AcceptanceSample] = []

    def complete(requests: list[EvalRequest]) -> list[EvalResponse]:
        if not requests:
            return []
        before = engine.read_counters()
        responses = engine.complete(requests)
        num_tokens = sum(response.num_tokens for response in responses)
        generated = before.num_generation_tokens
        change = engine.read_counters(None if generated is None else generated + num_tokens).since(before)
        if change.decreased:
            raise GroupInvalid("counters decreased (restart?)")
        warnings.extend(check_counts(change, num_tokens, len(responses)))
        looping = responses[0].is_looping if len(responses) == 1 else None
        samples.append(
            AcceptanceSample(
                group[0].category,
                len(responses),
                num_tokens,
                change.num_drafts,
                change.num_accepted_tokens_per_pos,
                looping,
            )
        )
        return responses

    _, skipped = runner.run(group, temperature, complete)
    warnings.extend(f"skipped: {turn}" for turn in skipped)
    return samples


def check_counts(change: SpecDecodeCounters, num_tokens: int, num_responses: int) -> list[str]:
    """A warning if the counters do not explain the tokens received.

    The tokens of a response are one from its prefill, one per draft and the accepted tokens, minus fewer than K that
    were cut off at its end. Steps without draft tokens, near max_model_len or after a preemption, are not counted.
    """
    if change.num_generation_tokens is not None and change.num_generation_tokens != num_tokens:
        return [f"{UNEXPLAINED}: {change.num_generation_tokens:,} tokens generated, {num_tokens:,} received"]
    k, num_accepted = len(change.num_accepted_tokens_per_pos), sum(change.num_accepted_tokens_per_pos)
    difference = num_responses + change.num_drafts + num_accepted - num_tokens
    if abs(difference) > k * num_responses:
        return [
            f"{UNEXPLAINED}: {change.num_drafts:,} drafts with {num_accepted:,} accepted tokens do not give "
            f"{num_tokens:,} tokens"
        ]
    return []


class VllmEvaluator:
    """Stock vLLM in this process; a new engine for every drafter and K."""

    measures_all_k = False

    def __init__(
        self,
        target: Path,
        runner: ConversationRunner,
        settings: EvalSettings,
        dtype: str,
        concurrency: int,
        on_progress: EvalProgress,
    ) -> None:
        self.target, self.runner, self.settings = target, runner, settings
        self.dtype, self.concurrency, self.on_progress = dtype, concurrency, on_progress
        self.warnings: list[str] = []
        self.eos_ids = sorted(eos_ids(target))
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the counters are read in this process
        self._engine: tuple[tuple[Path, int], Any] | None = None
        try:
            import vllm  # noqa: F401
        except ImportError as error:
            raise UserError(f"--engine vllm: vLLM cannot be imported ({error}); pip install vllm") from None

    def measure(
        self, drafter: Path, dataset: EvalDataset, temperature: float, ks: Sequence[int]
    ) -> Iterator[tuple[int, list[AcceptanceSample]]]:
        for k in ks:
            engine = _CountedVllm(self._start(drafter, k), k, self.eos_ids)
            samples: list[AcceptanceSample] = []
            groups = list(split_groups(dataset.prompts.rows, self.concurrency))
            for i, group in enumerate(groups):
                samples += measure_group(engine, self.runner, group, temperature, self.warnings)
                self.on_progress("groups", i + 1, len(groups))
            yield k, samples

    def close(self) -> None:
        if self._engine is not None:
            self._engine[1].llm_engine.engine_core.shutdown()
            self._engine = None

    def _start(self, drafter: Path, k: int) -> Any:
        if self._engine is not None and self._engine[0] == (drafter, k):
            return self._engine[1]
        self.close()
        import torch
        from vllm import LLM

        parallel = read_drafter_config(drafter, read_target_config(self.target)).parallel
        gpu_options: dict[str, Any] = {}
        if torch.cuda.is_available():
            gpu_options["gpu_memory_utilization"] = self.settings.gpu_memory_utilization
        try:
            llm = LLM(
                str(self.target),
                dtype=self.dtype,
                enforce_eager=not torch.cuda.is_available(),  # compiling for a CPU takes minutes
                max_num_seqs=self.concurrency,
                max_model_len=self.runner.max_model_len,
                skip_tokenizer_init=True,
                disable_log_stats=False,
                speculative_config=build_speculative_config(str(drafter), k, parallel),
                seed=self.settings.seed,
                **gpu_options,
            )
        except Exception as error:  # vLLM raises many types
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise UserError(f"--engine vllm: does not start with {drafter} ({reason})") from error
        self._engine = ((drafter, k), llm)
        return llm


class _CountedVllm:
    def __init__(self, llm: Any, k: int, eos_ids: list[int]) -> None:
        self.llm, self.k, self.eos_ids = llm, k, eos_ids

    def read_counters(self, min_generation_tokens: int | None = None) -> SpecDecodeCounters:
        values = {m.name: getattr(m, "value", None) or getattr(m, "values", None) for m in self.llm.get_metrics()}
        per_pos = values.get("vllm:spec_decode_num_accepted_tokens_per_pos") or [0] * self.k
        return SpecDecodeCounters(
            int(values.get("vllm:spec_decode_num_drafts") or 0),
            tuple(map(int, per_pos))[: self.k],
            int(values.get("vllm:generation_tokens") or 0),
        )

    def complete(self, requests: list[EvalRequest]) -> list[EvalResponse]:
        from vllm import SamplingParams

        params = [
            SamplingParams(
                temperature=request.params.temperature,
                max_tokens=request.params.max_tokens,
                seed=request.params.seed if request.params.temperature else None,
                stop_token_ids=self.eos_ids,
                detokenize=False,
            )
            for request in requests
        ]
        prompts = [{"prompt_token_ids": request.prompt_token_ids} for request in requests]
        outputs = [out.outputs[0] for out in self.llm.generate(prompts, params, use_tqdm=False)]
        return [EvalResponse(list(out.token_ids), out.finish_reason or "length") for out in outputs]
