"""Shared by the data tests: the small target with a chat template, and a response generator without a model.

A token is a byte. A user turn ends with a newline, a response with "d", the target's EOS, which it emits about every
thirty bytes. Responses without a model contain no other "d".

    hello\\n -> responsed
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pairs
from engines import write_tokenizer
from support import set_config

from peagle.config import ResponseSettings
from peagle.data.chat_format import ChatFormat, load_chat_format
from peagle.data.generators import GenerationRequest, GenerationResult
from peagle.data.prompts import Prompt, PromptSet
from peagle.data.response_file import DataSummary, ResponseFile
from peagle.data.responses import ResponseWriter

EOS = ord("d")
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ m['content'] }}d{% else %}{{ m['content'] }}\n"
    "{% endif %}{% endfor %}"
).replace("\n", "{{ '\n' }}")


def make_target(folder: Path, template: str | None = TEMPLATE) -> Path:
    shutil.copytree(pairs.target_folder(), folder)
    write_tokenizer(folder, pairs.VOCAB, template)
    set_config(folder, eos_token_id=EOS)
    return folder


def make_chat(folder: Path, template: str | None = TEMPLATE) -> ChatFormat:
    return load_chat_format(make_target(folder, template))


def canned(request: GenerationRequest) -> GenerationResult:
    """A response that depends on the seed only: some finish, some are truncated, some loop."""
    assert request.params.seed is not None
    rng = random.Random(request.params.seed)
    kind = rng.randrange(8)
    if kind == 0:
        return GenerationResult(request.request_id, [97, 98] * 12, None, "length")
    ids = [rng.randrange(EOS + 1, 123) for _ in range(rng.randrange(1, 12))]
    return (
        GenerationResult(request.request_id, ids, None, "length")
        if kind == 1
        else GenerationResult(request.request_id, [*ids, EOS], None, "stop")
    )


class Canned:
    """A response generator that returns canned responses in random order, several at a time."""

    def __init__(
        self, answer: Callable[[GenerationRequest], GenerationResult] = canned, order: int = 0, room: int = 5
    ) -> None:
        self.answer, self.most, self.max_model_len = answer, room, None
        self.requests: list[GenerationRequest] = []
        self._open: list[GenerationRequest] = []
        self._rng = random.Random(order)

    @property
    def num_free_slots(self) -> int:
        return self.most - len(self._open)

    def submit(self, request: GenerationRequest) -> None:
        self.requests.append(replace(request, messages=list(request.messages)))
        self._open.append(request)

    def poll(self) -> list[GenerationResult]:
        self._rng.shuffle(self._open)
        ready = self._open[: self._rng.randrange(1, 4)]
        del self._open[: len(ready)]
        return [self.answer(request) for request in ready]

    def close(self) -> None:
        self._open.clear()


@cache
def conversations() -> PromptSet:
    rows = [Prompt(f"id {i}", "s", tuple(f"ask {i} {t}?" for t in range(1 + i % 3))) for i in range(12)]
    return PromptSet("here", tuple(rows), (), 0)


SETTINGS = ResponseSettings(samples=2, seed=1)


def write(out: Path, chat: ChatFormat, source: Any, settings: ResponseSettings = SETTINGS, **same: Any) -> DataSummary:
    file = ResponseFile(out, {"command": []}, {"seed": settings.seed, **same}, chat.decode_responses)
    return ResponseWriter(conversations(), settings, chat, file, show_progress=False).run(lambda: source)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def by_key(rows: list[dict[str, Any]]) -> dict[tuple[str, int], dict[str, Any]]:
    found = {(row["id"], row["sample"]): row for row in rows}
    assert len(found) == len(rows), "duplicate row"
    return found
