"""Text and conversations -> token ids, token ids -> what a client may read of them.

Has a tokenizer of its own: the engine's belongs to the engine's thread. Templates run in the tokenizer's sandbox;
whatever goes wrong in one is the conversation's fault, since that is all it is given.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from peagle.checkpoints.target import load_tokenizer
from peagle.engine.detokenizer import Detokenizer
from peagle.errors import first_line
from peagle.server.errors import ApiError

AT_ONCE = 4096  # characters that are tokenized without leaving asyncio's thread
WORKERS = 2  # longer texts that are tokenized at once
# what a template is called with by us, and may not be by a client
OURS = {"messages", "tools", "documents", "tokenize", "return_dict", "return_tensors", "chat_template", "conversation"}

T = TypeVar("T")


class Prompts:
    def __init__(self, folder: Path) -> None:
        self.tokenizer = load_tokenizer(folder)
        self._workers = asyncio.Semaphore(WORKERS)
        self.token_text = lru_cache(1 << 16)(self._token_text)
        self.token_bytes = lru_cache(1 << 16)(self._token_bytes)
        self.template = str(self.tokenizer.chat_template or "")  # all of them, where there are several
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        self.special = frozenset(token.content for token in added.values() if token.special)

    async def _aside(self, size: int, work: Callable[[], T]) -> T:
        if size <= AT_ONCE:
            return work()
        async with self._workers:
            return await asyncio.to_thread(work)

    async def encode(self, text: str, special: bool = True) -> list[int]:
        return await self._aside(len(text), lambda: list(self.tokenizer(text, add_special_tokens=special)["input_ids"]))

    async def chat(
        self,
        messages: Sequence[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        begin_answer: bool = True,
        more: dict[str, Any] | None = None,
    ) -> list[int]:
        if not self.template:
            raise ApiError(400, "this model has no chat template: use /v1/completions", code="no_chat_template")
        if tools and "tools" not in self.template:
            raise ApiError(400, "tools: this model's chat template takes none", "tools", "unsupported_parameter")
        if unknown := [name for name in more or {} if name in OURS or name not in self.template]:
            message = f"chat_template_kwargs: this model's chat template has no {unknown[0][:40]!r}"
            raise ApiError(400, message, "chat_template_kwargs", "unsupported_parameter")

        def render() -> list[int]:
            try:
                encoded = self.tokenizer.apply_chat_template(
                    list(messages), tools=tools, add_generation_prompt=begin_answer, return_dict=True, **(more or {})
                )
            except Exception as error:
                said = first_line(error)[:160]
                raise ApiError(400, f"messages: the chat template refuses them ({said})", "messages") from None
            return list(encoded["input_ids"])

        return await self._aside(sum(len(m["content"]) for m in messages) + 1024 * len(tools or ()), render)

    def detokenizer(self, skip_special: bool = True) -> Detokenizer:
        return Detokenizer(lambda ids: self.tokenizer.decode(ids, skip_special_tokens=skip_special))

    def _token_text(self, token: int) -> str:
        return self.tokenizer.decode([token])

    def _token_bytes(self, token: int) -> list[int]:
        """A token may hold part of a character: its text cannot say that, its bytes can."""
        text = self.token_text(token)
        if "\ufffd" in text:
            name = self.tokenizer.convert_ids_to_tokens(token)
            if isinstance(name, str):
                if name.startswith("<0x") and name.endswith(">") and len(name) == 6:
                    return [int(name[3:5], 16)]
                known = byte_of_character()
                if all(c in known for c in name):
                    return [known[c] for c in name]
        return list(text.encode())


@lru_cache(1)
def byte_of_character() -> dict[str, int]:
    """How byte-level tokenizers write bytes: printable ones as they are, the rest from U+0100 up."""
    plain = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or b >= 174]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}
