"""Text and conversations to token ids, and token ids to text.

The engine process has no text: all of it is made here.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

from peagle.checkpoints.target import load_tokenizer
from peagle.config import SamplingParams
from peagle.engine.detokenizer import Detokenizer
from peagle.errors import first_line
from peagle.server.errors import ApiError, invalid_value

MAX_INLINE_CHARACTERS = 4096  # longer texts are tokenized in a worker thread
NUM_WORKERS = 2
# Template variables that the server sets and a client may not.
RESERVED_VARIABLES = frozenset(
    "messages tools documents tokenize return_dict return_tensors chat_template conversation".split()
)

T = TypeVar("T")


class ServerTokenizer:
    def __init__(self, target_folder: Path) -> None:
        self.tokenizer = load_tokenizer(target_folder)
        self._workers = asyncio.Semaphore(NUM_WORKERS)
        self.token_text = lru_cache(1 << 16)(self._token_text)
        self.token_bytes = lru_cache(1 << 16)(self._token_bytes)
        self.chat_template = str(self.tokenizer.chat_template or "")  # all of them if there are several
        added_tokens = getattr(self.tokenizer, "added_tokens_decoder", {})
        self.special_tokens = frozenset(token.content for token in added_tokens.values() if token.special)

    async def _run(self, num_characters: int, work: Callable[[], T]) -> T:
        if num_characters <= MAX_INLINE_CHARACTERS:
            return work()
        async with self._workers:
            return await asyncio.to_thread(work)

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return await self._run(
            len(text), lambda: list(self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])
        )

    async def encode_chat(
        self,
        messages: Sequence[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: dict[str, Any] | None = None,
    ) -> list[int]:
        """Renders the chat template. Every error of the template is the client's: the messages are its only input."""
        template_kwargs = template_kwargs or {}
        if not self.chat_template:
            raise ApiError(400, "this model has no chat template: use /v1/completions", code="no_chat_template")
        if tools and "tools" not in self.chat_template:
            raise invalid_value("tools", "this model's chat template supports no tools", "unsupported_parameter")
        for name in template_kwargs:
            if name in RESERVED_VARIABLES or name not in self.chat_template:
                message = f"this model's chat template has no {name[:40]!r}"
                raise invalid_value("chat_template_kwargs", message, "unsupported_parameter")

        def render() -> list[int]:
            try:
                encoded = self.tokenizer.apply_chat_template(
                    list(messages),
                    tools=tools,
                    add_generation_prompt=add_generation_prompt,
                    return_dict=True,
                    **template_kwargs,
                )
            except Exception as error:
                message = f"messages: the chat template refuses them ({first_line(error)[:160]})"
                raise ApiError(400, message, "messages") from None
            return list(encoded["input_ids"])

        return await self._run(sum(len(m["content"]) for m in messages) + 1024 * len(tools or ()), render)

    def new_detokenizer(self, params: SamplingParams) -> Detokenizer:
        decode = partial(self.tokenizer.decode, skip_special_tokens=params.skip_special_tokens)
        return Detokenizer(decode, params.stop, params.min_tokens)

    def _token_text(self, token_id: int) -> str:
        return self.tokenizer.decode([token_id])

    def _token_bytes(self, token_id: int) -> list[int]:
        """Returns the bytes of a token. They are exact also for a token that holds part of a character."""
        text = self.token_text(token_id)
        if "\ufffd" in text:
            name = self.tokenizer.convert_ids_to_tokens(token_id)
            if isinstance(name, str):
                if name.startswith("<0x") and name.endswith(">") and len(name) == 6:
                    return [int(name[3:5], 16)]
                byte_values = byte_level_characters()
                if all(c in byte_values for c in name):
                    return [byte_values[c] for c in name]
        return list(text.encode())


@lru_cache(1)
def byte_level_characters() -> dict[str, int]:
    """Returns the byte that each character stands for in a byte-level vocabulary.

    Printable bytes stand for themselves, the others are numbered from U+0100.
    """
    printable = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or b >= 174]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
