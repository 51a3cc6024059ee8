"""Acceptance from the embedded engine and from the reference implementation.

The embedded engine answers each data set once per temperature, and one drafter pass over the responses gives the counts
of all K (see `replay`). With `each_k` the engine decodes with every K instead; the counts are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from peagle.checkpoints.drafter import load_drafter
from peagle.checkpoints.target import Target, load_target
from peagle.config import EvalSettings
from peagle.data.generators import release_engine_memory
from peagle.engine.llm import LLM
from peagle.engine.request import CompletionOutput
from peagle.eval.conversations import CompletedTurn, ConversationRunner, EvalRequest, EvalResponse
from peagle.eval.datasets import EvalDataset
from peagle.eval.replay import ExtendedResponse, compute_correct_runs
from peagle.eval.samples import AcceptanceSample, DraftResult, EvalProgress, replay_drafts
from peagle.models.drafter import Drafter
from peagle.speculative import reference


class EmbeddedEvaluator:
    def __init__(
        self,
        target: Path,
        runner: ConversationRunner,
        settings: EvalSettings,
        engine_options: dict[str, Any],
        on_progress: EvalProgress,
    ) -> None:
        self.runner, self.settings, self.on_progress = runner, settings, on_progress
        self.engine_options = {
            "max_model_len": runner.max_model_len,
            "tokenizer": False,
            "cuda_graphs": False,  # capturing them takes longer than they save here
            "gpu_memory_utilization": settings.gpu_memory_utilization,
            **engine_options,
        }
        self.target_llm = LLM(target, None, **self.engine_options)
        self.measures_all_k = not settings.each_k
        self.warnings: list[str] = []
        self._drafting_llm: tuple[tuple[Path, int], LLM] | None = None
        self._responses: dict[tuple[str, float], list[ExtendedResponse]] = {}

    @property
    def dtype(self) -> str:
        return self.target_llm.dtype

    def measure(
        self, drafter: Path, dataset: EvalDataset, temperature: float, ks: Sequence[int]
    ) -> Iterator[tuple[int, list[AcceptanceSample]]]:
        """For every K the samples of the data set's responses."""
        if self.settings.each_k:
            for k in ks:
                yield k, self._decode_with_drafter(drafter, dataset, temperature, k)
            return
        responses = self._generate_responses(dataset, temperature, max(ks))
        model = self.target_llm.target.model
        weight = model.embed_tokens.weight
        drafter_model = load_drafter(drafter, model, weight.dtype, weight.device)
        runs = compute_correct_runs(
            model,
            drafter_model,
            responses,
            max(ks),
            self.settings,
            lambda done: self.on_progress("drafting", done, len(responses)),
        )
        for k in ks:
            yield k, [self._build_sample(response, run, k) for response, run in zip(responses, runs, strict=True)]

    def _build_sample(self, response: ExtendedResponse, run: dict[int, int], k: int) -> AcceptanceSample:
        turn = response.turn
        num_prompt_tokens, num_output_tokens = len(turn.request.prompt_token_ids), len(turn.response.token_ids)
        drafts = replay_drafts(num_prompt_tokens, num_output_tokens, run, k, self.runner.max_model_len)
        return turn.build_sample(drafts, k)

    def _generate_responses(self, dataset: EvalDataset, temperature: float, max_k: int) -> list[ExtendedResponse]:
        key = (dataset.name, temperature)
        cached = self._responses.get(key)
        if cached is None or any(len(r.extension_ids) < self._extension_len(r.turn, max_k) for r in cached):
            turns, skipped = self.runner.run(
                dataset.prompts.rows, temperature, lambda requests: self._complete(self.target_llm, requests, 0)
            )
            self.warnings += [f"{dataset.name}: skipped: {turn}" for turn in skipped]
            self._responses[key] = self._extend_responses(turns, max_k)
        return self._responses[key]

    def _extension_len(self, turn: CompletedTurn, max_k: int) -> int:
        """Tokens after the end of a response that a draft of max_k tokens may reach."""
        num_known_tokens = len(turn.request.prompt_token_ids) + len(turn.response.token_ids)
        return max(min(max_k - 1, self.runner.max_model_len - num_known_tokens), 0)

    def _extend_responses(self, turns: list[CompletedTurn], max_k: int) -> list[ExtendedResponse]:
        extensions: list[list[int]] = [[] for _ in turns]
        to_extend = [i for i, turn in enumerate(turns) if self._extension_len(turn, max_k) > 0]
        prompts = [turns[i].request.prompt_token_ids + turns[i].response.token_ids for i in to_extend]
        params = [
            replace(turns[i].request.params, max_tokens=self._extension_len(turns[i], max_k), ignore_eos=True)
            for i in to_extend
        ]
        for i, output in zip(to_extend, self.target_llm.generate(prompts, params), strict=True):
            extensions[i] = output.outputs[0].token_ids
        return [ExtendedResponse(turn, extension) for turn, extension in zip(turns, extensions, strict=True)]

    def _complete(self, llm: LLM, requests: list[EvalRequest], k: int) -> list[EvalResponse]:
        """As `LLM.generate`, with progress."""
        groups = []
        try:
            for request in requests:
                groups.append(llm.add_request(request.prompt_token_ids, request.params))
            while llm.has_unfinished_requests:
                if any(request.finish_reason is not None for request in llm.step()):
                    self.on_progress("responses", sum(group.finished for group in groups), len(groups))
        except BaseException:
            for group in groups:
                llm.abort_group(group)
            raise
        responses = []
        for request, group in zip(requests, groups, strict=True):
            output = llm.build_output(group).outputs[0]
            num_prompt_tokens = len(request.prompt_token_ids)
            drafts = find_drafts(num_prompt_tokens, output, k, self.runner.max_model_len) if k else []
            responses.append(EvalResponse(output.token_ids, output.finish_reason or "length", tuple(drafts)))
        return responses

    def _decode_with_drafter(
        self, drafter: Path, dataset: EvalDataset, temperature: float, k: int
    ) -> list[AcceptanceSample]:
        if self._drafting_llm is None or self._drafting_llm[0] != (drafter, k):
            self.close()
            self._drafting_llm = ((drafter, k), LLM(self.target_llm.target, drafter, k, **self.engine_options))
        complete = partial(self._complete, self._drafting_llm[1], k=k)
        turns, skipped = self.runner.run(dataset.prompts.rows, temperature, complete)
        self.warnings += [f"{dataset.name}: skipped: {turn}" for turn in skipped]
        return [turn.build_sample(turn.response.drafts, k) for turn in turns]

    def close(self) -> None:
        if self._drafting_llm is not None:
            self._drafting_llm = None
            release_engine_memory()


def find_drafts(num_prompt_tokens: int, output: CompletionOutput, k: int, max_model_len: int) -> list[DraftResult]:
    """Drafts of an engine's output: every token that is not a draft token ends a decode step.

    The output may be cut within the last draft; the counts per position give its remaining accepted tokens.
    """
    drafts, n = [], num_prompt_tokens + 1
    flags = output.is_draft_token[1:]
    while flags:
        num_tokens = next((i + 1 for i, is_draft_token in enumerate(flags) if not is_draft_token), len(flags))
        if min(k, max_model_len - n - 1) > 0:
            drafts.append(DraftResult(n, sum(flags[:num_tokens]), num_tokens))
        n, flags = n + num_tokens, flags[num_tokens:]
    num_cut = sum(output.num_accepted_tokens_per_pos) - sum(draft.num_accepted_tokens for draft in drafts)
    if drafts and num_cut:
        drafts[-1] = replace(drafts[-1], num_accepted_tokens=drafts[-1].num_accepted_tokens + num_cut)
    assert len(drafts) == output.num_drafts, "is_draft_token and num_drafts disagree"
    return drafts


class ReferenceEvaluator:
    """The plain fp32 implementation, one request at a time: slow, for small models and debugging."""

    dtype = "float32"
    measures_all_k = False

    def __init__(self, target: Path, runner: ConversationRunner, device: str, on_progress: EvalProgress) -> None:
        self.runner, self.on_progress, self.device = runner, on_progress, device
        self.target: Target = load_target(target, torch.float32, device)
        self.warnings: list[str] = []

    def measure(
        self, drafter: Path, dataset: EvalDataset, temperature: float, ks: Sequence[int]
    ) -> Iterator[tuple[int, list[AcceptanceSample]]]:
        drafter_model = load_drafter(drafter, self.target.model, torch.float32, self.device)
        for k in ks:
            complete = partial(self._complete, drafter=drafter_model, k=k)
            turns, skipped = self.runner.run(dataset.prompts.rows, temperature, complete)
            self.warnings += [f"{dataset.name}: skipped: {turn}" for turn in skipped]
            yield k, [turn.build_sample(turn.response.drafts, k) for turn in turns]

    def _complete(self, requests: list[EvalRequest], drafter: Drafter, k: int) -> list[EvalResponse]:
        responses = []
        model, eos_ids, max_model_len = self.target.model, self.target.eos_ids, self.runner.max_model_len
        for i, request in enumerate(requests):
            output = reference.generate(
                model, request.prompt_token_ids, request.params, eos_ids, drafter, k, max_model_len
            )
            drafts, n = [], len(request.prompt_token_ids) + 1
            for step in output.steps:
                if step.draft_token_ids:
                    drafts.append(DraftResult(n, step.num_accepted_tokens, len(step.output_token_ids)))
                n += len(step.output_token_ids)
            responses.append(EvalResponse(output.token_ids, output.finish_reason, tuple(drafts)))
            self.on_progress("responses", i + 1, len(requests))
        return responses

    def close(self) -> None:
        pass
