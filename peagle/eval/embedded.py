"""Acceptance from the embedded engine and from the reference.

Knows how to ask them and what becomes of their answers; nothing about files or rows of results. The engine is asked
once for each data set and temperature, and one pass over its texts serves all K (see `acceptance_replay`), or, if that
is wanted, with real rounds for every K: the counts are the same.
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
from peagle.eval.conversations import Answer, Asked, Said, Speaker
from peagle.eval.datasets import DataSet
from peagle.eval.replay import Text, runs
from peagle.eval.samples import Round, Sample, Tell, walk
from peagle.models.drafter import Drafter
from peagle.speculative import reference


class Embedded:
    def __init__(
        self, target: Path, speaker: Speaker, settings: EvalSettings, options: dict[str, Any], tell: Tell
    ) -> None:
        """`options` are the engine's: device, dtype and the like."""
        self.speaker, self.settings, self.tell = speaker, settings, tell
        self.options = {
            "max_model_len": speaker.longest,
            "tokenizer": False,
            "cuda_graphs": False,  # recording them takes longer than they save here
            "gpu_memory_utilization": settings.gpu_memory_utilization,
            "kv_cache_memory_bytes": settings.kv_cache_memory_bytes,
            **options,
        }
        self.alone = LLM(target, None, **self.options)
        self.all_k = not settings.each_k
        self.notes: list[str] = []
        self._helped: tuple[tuple[Path, int], LLM] | None = None
        self._texts: dict[tuple[str, float], list[Text]] = {}

    @property
    def dtype(self) -> str:
        return self.alone.dtype

    def counted(
        self, drafter: Path, data: DataSet, temperature: float, ks: Sequence[int]
    ) -> Iterator[tuple[int, list[Sample]]]:
        """For every K the samples of the data set's answers."""
        if self.settings.each_k:
            for k in ks:
                yield k, self._real(drafter, data, temperature, k)
            return
        texts = self._said(data, temperature, max(ks))
        model = self.alone.target.model
        own = load_drafter(drafter, model, model.embed_tokens.weight.dtype, model.embed_tokens.weight.device)
        found = runs(model, own, texts, max(ks), self.settings, lambda n: self.tell("guessing", n, len(texts)))
        for k in ks:
            yield k, [self._sample(text, run, k) for text, run in zip(texts, found, strict=True)]

    def _sample(self, text: Text, run: dict[int, int], k: int) -> Sample:
        prompt, answer = text.answer.asked.prompt_ids, text.answer.said.token_ids
        return text.answer.sample(walk(len(prompt), len(answer), run, k, self.speaker.longest), k)

    def _said(self, data: DataSet, temperature: float, most: int) -> list[Text]:
        key = (data.name, temperature)
        if key not in self._texts or any(len(t.beyond) < self._room(t.answer, most) for t in self._texts[key]):
            answers, left_out = self.speaker.converse(
                data.prompts.rows, temperature, lambda asked: self._generate(self.alone, asked, 0)
            )
            self.notes += [f"{data.name}: not asked: {what}" for what in left_out]
            self._texts[key] = self._continued(answers, most)
        return self._texts[key]

    def _room(self, answer: Answer, most: int) -> int:
        """Tokens behind the end that a round of so many drafts may reach."""
        known = len(answer.asked.prompt_ids) + len(answer.said.token_ids)
        return max(min(most - 1, self.speaker.longest - known), 0)

    def _continued(self, answers: list[Answer], most: int) -> list[Text]:
        more = [
            (i, replace(a.asked.params, max_tokens=self._room(a, most), ignore_eos=True))
            for i, a in enumerate(answers)
            if self._room(a, most) > 0
        ]
        beyond: list[list[int]] = [[] for _ in answers]
        prompts = [answers[i].asked.prompt_ids + answers[i].said.token_ids for i, _ in more]
        for (i, _), out in zip(more, self.alone.generate(prompts, [p for _, p in more]), strict=True):
            beyond[i] = out.outputs[0].token_ids
        return [Text(answer, behind) for answer, behind in zip(answers, beyond, strict=True)]

    def _generate(self, llm: LLM, asked: list[Asked], k: int) -> list[Said]:
        """As `LLM.generate`, telling how far it is."""
        groups = []
        try:
            for one in asked:
                groups.append(llm.add_request(one.prompt_ids, one.params))
            while llm.has_unfinished_requests:
                if any(r.finish_reason is not None for r in llm.step()):
                    self.tell("answering", sum(g.finished for g in groups), len(groups))
        except BaseException:
            for group in groups:
                llm.abort_group(group)
            raise
        outputs = [llm.build_output(group).outputs[0] for group in groups]
        return [self._heard(one, out, k) for one, out in zip(asked, outputs, strict=True)]

    def _heard(self, asked: Asked, out: CompletionOutput, k: int) -> Said:
        rounds = rounds_of(len(asked.prompt_ids), out, k, self.speaker.longest) if k else []
        return Said(out.token_ids, out.finish_reason or "length", tuple(rounds))

    def _real(self, drafter: Path, data: DataSet, temperature: float, k: int) -> list[Sample]:
        """Through the engine's own rounds."""
        if self._helped is None or self._helped[0] != (drafter, k):
            self.close()
            self._helped = ((drafter, k), LLM(self.alone.target, drafter, k, **self.options))
        ask = partial(self._generate, self._helped[1], k=k)
        answers, left_out = self.speaker.converse(data.prompts.rows, temperature, ask)
        self.notes += [f"{data.name}: not asked: {what}" for what in left_out]
        return [answer.sample(answer.said.rounds, k) for answer in answers]

    def close(self) -> None:
        if self._helped is not None:
            self._helped = None
            release_engine_memory()


def rounds_of(prompt_tokens: int, out: CompletionOutput, k: int, longest: int) -> list[Round]:
    """The engine's rounds, one by one: a token that was no draft ends a round. Of the last one the text may show only
    a part; the counts by position tell the rest."""
    rounds, n = [], prompt_tokens + 1
    flags = out.is_draft_token[1:]
    while flags:
        length = next((i + 1 for i, drafted in enumerate(flags) if not drafted), len(flags))
        shown = sum(flags[:length])
        if min(k, longest - n - 1) > 0:
            rounds.append(Round(n, shown, length))
        n, flags = n + length, flags[length:]
    hidden = sum(out.num_accepted_tokens_per_pos) - sum(r.accepted for r in rounds)
    if rounds and hidden:
        rounds[-1] = replace(rounds[-1], accepted=rounds[-1].accepted + hidden)
    assert len(rounds) == out.num_drafts, "the flags do not tell the rounds"
    return rounds


class Reference:
    """The readable oracle, one answer after another, in fp32. Slow; for small models and doubts."""

    dtype = "float32"
    all_k = False

    def __init__(self, target: Path, speaker: Speaker, device: str, tell: Tell) -> None:
        self.speaker, self.tell, self.device = speaker, tell, device
        self.target: Target = load_target(target, torch.float32, device)
        self.notes: list[str] = []

    def counted(
        self, drafter: Path, data: DataSet, temperature: float, ks: Sequence[int]
    ) -> Iterator[tuple[int, list[Sample]]]:
        own = load_drafter(drafter, self.target.model, torch.float32, self.device)
        for k in ks:
            answers, left_out = self.speaker.converse(
                data.prompts.rows, temperature, partial(self._answers, drafter=own, k=k)
            )
            self.notes += [f"{data.name}: not asked: {what}" for what in left_out]
            yield k, [answer.sample(answer.said.rounds, k) for answer in answers]

    def _answers(self, asked: list[Asked], drafter: Drafter, k: int) -> list[Said]:
        said = []
        model, eos, longest = self.target.model, self.target.eos_ids, self.speaker.longest
        for i, one in enumerate(asked):
            made = reference.generate(model, one.prompt_ids, one.params, eos, drafter, k, longest)
            rounds, n = [], len(one.prompt_ids) + 1
            for played in made.steps:
                if played.draft_token_ids:
                    rounds.append(Round(n, played.num_accepted_tokens, len(played.output_token_ids)))
                n += len(played.output_token_ids)
            said.append(Said(made.token_ids, made.finish_reason, tuple(rounds)))
            self.tell("answering", i + 1, len(asked))
        return said

    def close(self) -> None:
        pass
