"""What the tests of data share: the small target with a chat template, and who answers without a model.

A token is a byte. A user's turn ends with a line end, an answer with a d, which is the target's EOS: it says one
every thirty bytes or so. Answers without a model have no other d.

    hello\\n -> answerd
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
from peagle.data.chat import Chat
from peagle.data.prompts import Prompt, Prompts
from peagle.data.report import Summary
from peagle.data.responses import Writer
from peagle.data.run import open_chat
from peagle.data.sources import Answer, Question
from peagle.data.store import ResponseFile

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


def make_chat(folder: Path, template: str | None = TEMPLATE) -> Chat:
    return open_chat(make_target(folder, template))


def canned(question: Question) -> Answer:
    """Follows from the seed alone: some answers end, some are cut short, some loop."""
    assert question.params.seed is not None
    rng = random.Random(question.params.seed)
    kind = rng.randrange(8)
    if kind == 0:
        return Answer(question.key, [97, 98] * 12, None, "length")
    ids = [rng.randrange(EOS + 1, 123) for _ in range(rng.randrange(1, 12))]
    return Answer(question.key, ids, None, "length") if kind == 1 else Answer(question.key, [*ids, EOS], None, "stop")


class Canned:
    """Answers in any order, several at a time."""

    def __init__(self, answer: Callable[[Question], Answer] = canned, order: int = 0, room: int = 5) -> None:
        self.answer, self.most, self.longest = answer, room, None
        self.asked: list[Question] = []
        self._open: list[Question] = []
        self._rng = random.Random(order)

    @property
    def room(self) -> int:
        return self.most - len(self._open)

    def ask(self, question: Question) -> None:
        self.asked.append(replace(question, messages=list(question.messages)))
        self._open.append(question)

    def wait(self) -> list[Answer]:
        self._rng.shuffle(self._open)
        ready = self._open[: self._rng.randrange(1, 4)]
        del self._open[: len(ready)]
        return [self.answer(question) for question in ready]

    def close(self) -> None:
        self._open.clear()


@cache
def conversations() -> Prompts:
    rows = [Prompt(f"id {i}", "s", tuple(f"ask {i} {t}?" for t in range(1 + i % 3))) for i in range(12)]
    return Prompts("here", tuple(rows), (), 0)


SETTINGS = ResponseSettings(samples=2, seed=1)


def write(out: Path, chat: Chat, source: Any, settings: ResponseSettings = SETTINGS, **same: Any) -> Summary:
    file = ResponseFile(out, {"command": []}, {"seed": settings.seed, **same}, chat.answers)
    return Writer(conversations(), settings, chat, source, file, shown=False).run()


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def by_key(rows: list[dict[str, Any]]) -> dict[tuple[str, int], dict[str, Any]]:
    found = {(row["id"], row["sample"]): row for row in rows}
    assert len(found) == len(rows), "a row is there twice"
    return found
