"""Acceptance from somebody else's counters: stock vLLM in this process, or any server with vLLM's /metrics.

Knows what counters tell: sums over all that was asked between two readings. So answers are asked in groups of one
category, each group is a sample, and only a group of one tells its answer apart. Knows nothing about HTTP; that is
`acceptance_server`'s.
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
from peagle.data.loops import is_looping
from peagle.data.prompts import Prompt
from peagle.errors import UserError
from peagle.eval.conversations import Asked, Said, Speaker
from peagle.eval.datasets import DataSet
from peagle.eval.samples import Sample, Tell


@dataclass(frozen=True)
class Counters:
    """Running totals; `generated` are tokens of answers, where they are counted."""

    drafts: int
    accepted: tuple[int, ...]  # by position
    generated: int | None = None

    def since(self, before: Counters) -> Counters:
        generated = None
        if self.generated is not None and before.generated is not None:
            generated = self.generated - before.generated
        accepted = tuple(now - was for now, was in zip(self.accepted, before.accepted, strict=True))
        return Counters(self.drafts - before.drafts, accepted, generated)

    @property
    def fell(self) -> bool:
        """Of a difference: whoever counts has begun anew in between."""
        return min(self.drafts, *self.accepted, self.generated or 0) < 0


class Metered(Protocol):
    def read(self, at_least: int | None = None) -> Counters:
        """The totals now; counters that lag are waited for until so many tokens are generated, for a while."""

    def answer(self, asked: list[Asked]) -> list[Said]: ...


def groups(rows: Sequence[Prompt], size: int) -> Iterator[list[Prompt]]:
    """By category, in the order in which they first come; at most so many rows each."""
    kinds: dict[str | None, list[Prompt]] = {}
    for row in rows:
        kinds.setdefault(row.category, []).append(row)
    for some in kinds.values():
        for i in range(0, len(some), size):
            yield some[i : i + size]


def group_samples(
    metered: Metered, speaker: Speaker, group: list[Prompt], temperature: float, notes: list[str]
) -> list[Sample]:
    """A sample for every turn of the group."""
    samples: list[Sample] = []

    def ask(asked: list[Asked]) -> list[Said]:
        if not asked:
            return []
        before = metered.read()
        said = metered.answer(asked)
        tokens = sum(s.tokens for s in said)
        moved = metered.read(None if before.generated is None else before.generated + tokens).since(before)
        if moved.fell:
            raise Spoiled("counters that fell (it was restarted?)")
        notes.extend(unexplained(moved, tokens, len(said)))
        alone = said[0] if len(said) == 1 else None
        loops = is_looping(alone.token_ids, alone.finish_reason == "stop") if alone is not None else None
        samples.append(Sample(group[0].category, len(said), tokens, moved.drafts, moved.accepted, loops))
        return said

    _, left_out = speaker.converse(group, temperature, ask)
    notes.extend(f"not asked: {what}" for what in left_out)
    return samples


def unexplained(moved: Counters, tokens: int, answers: int) -> list[str]:
    """What the counters count beyond the tokens received. An answer's tokens are one from its prompt's pass, one for
    each round and one for each accepted draft, less what was cut off behind its end: fewer than K. A round near a
    full context, or after the answer had to be read anew, has no drafts and is not counted."""
    if moved.generated is not None and moved.generated != tokens:
        return [f"{OTHERS}: {moved.generated:,} tokens were generated, {tokens:,} of them for this"]
    k = len(moved.accepted)
    beyond = answers + moved.drafts + sum(moved.accepted) - tokens
    if beyond > k * answers or beyond < -(k * answers):
        return [
            f"{OTHERS}: {moved.drafts:,} rounds with {sum(moved.accepted):,} accepted drafts do not make {tokens:,}"
        ]
    return []


OTHERS = "the counters moved for other reasons"


class Spoiled(Exception):
    """What was counted in a group is worth nothing: something in it failed. The message names it, in few words."""


class Vllm:
    """Stock vLLM in this process, a new engine for every drafter and K."""

    all_k = False

    def __init__(
        self, target: Path, speaker: Speaker, settings: EvalSettings, dtype: str, concurrency: int, tell: Tell
    ) -> None:
        self.target, self.speaker, self.settings = target, speaker, settings
        self.dtype, self.concurrency, self.tell = dtype, concurrency, tell
        self.notes: list[str] = []
        self.eos_ids = sorted(eos_ids(target))
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # its counters are read here
        self._engine: tuple[tuple[Path, int], Any] | None = None
        try:
            import vllm  # noqa: F401
        except ImportError as error:
            raise UserError(f"--engine vllm: vLLM does not load here ({error}); pip install vllm") from None

    def counted(
        self, drafter: Path, data: DataSet, temperature: float, ks: Sequence[int]
    ) -> Iterator[tuple[int, list[Sample]]]:
        for k in ks:
            metered = _VllmMeter(self._started(drafter, k), k, self.eos_ids)
            samples: list[Sample] = []
            parts = list(groups(data.prompts.rows, self.concurrency))
            for i, group in enumerate(parts):
                samples += group_samples(metered, self.speaker, group, temperature, self.notes)
                self.tell("groups answered", i + 1, len(parts))
            yield k, samples

    def close(self) -> None:
        if self._engine is not None:
            self._engine[1].llm_engine.engine_core.shutdown()
            self._engine = None

    def _started(self, drafter: Path, k: int) -> Any:
        if self._engine is not None and self._engine[0] == (drafter, k):
            return self._engine[1]
        self.close()
        import torch
        from vllm import LLM

        parallel = read_drafter_config(drafter, read_target_config(self.target)).parallel
        speculative = build_speculative_config(str(drafter), k, parallel)
        on_gpu: dict[str, Any] = {}
        if torch.cuda.is_available():
            on_gpu["gpu_memory_utilization"] = self.settings.gpu_memory_utilization
            if self.settings.kv_cache_memory_bytes is not None:  # the share is still checked against what is free
                on_gpu = {"kv_cache_memory_bytes": self.settings.kv_cache_memory_bytes, "gpu_memory_utilization": 0.05}
        try:
            llm = LLM(
                str(self.target),
                dtype=self.dtype,
                enforce_eager=not torch.cuda.is_available(),  # compiling for a CPU takes longer than it saves
                max_num_seqs=self.concurrency,
                max_model_len=self.speaker.longest,
                skip_tokenizer_init=True,
                disable_log_stats=False,
                speculative_config=speculative,
                seed=self.settings.seed,
                **on_gpu,
            )
        except Exception as error:  # whatever it does not like
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise UserError(f"--engine vllm: it does not start with {drafter} ({reason})") from error
        self._engine = ((drafter, k), llm)
        return llm


class _VllmMeter:
    def __init__(self, llm: Any, k: int, eos: list[int]) -> None:
        self.llm, self.k, self.eos = llm, k, eos

    def read(self, at_least: int | None = None) -> Counters:
        values = {m.name: getattr(m, "value", None) or getattr(m, "values", None) for m in self.llm.get_metrics()}
        drafts = values.get("vllm:spec_decode_num_drafts") or 0
        accepted = values.get("vllm:spec_decode_num_accepted_tokens_per_pos") or [0] * self.k
        generated = values.get("vllm:generation_tokens") or 0
        return Counters(int(drafts), tuple(map(int, accepted))[: self.k], int(generated))

    def answer(self, asked: list[Asked]) -> list[Said]:
        from vllm import SamplingParams

        params = [
            SamplingParams(
                temperature=one.params.temperature,
                max_tokens=one.params.max_tokens,
                seed=one.params.seed if one.params.temperature else None,
                stop_token_ids=self.eos,
                detokenize=False,
            )
            for one in asked
        ]
        prompts = [{"prompt_token_ids": one.prompt_ids} for one in asked]
        outputs = [out.outputs[0] for out in self.llm.generate(prompts, params, use_tqdm=False)]
        return [Said(list(out.token_ids), out.finish_reason or "length") for out in outputs]
