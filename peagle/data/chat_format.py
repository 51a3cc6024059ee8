"""Converts conversations to token ids with the target's chat template, and locates the responses in them.

The template is applied once to a whole conversation. A response's span is what the template marks itself
(`{% generation %}`), or the tokens that are added when the response is rendered behind its prompt. It is an error if a
rendered part is not a prefix of the whole.

    user: hi      assistant: ok
    <s> user hi </s> bot                   5 tokens: the prompt, ready for the response
    <s> user hi </s> bot ok </s> \\n        8 tokens: with the response
    span [5, 7)                            the added tokens up to the end-of-turn token, which the target generates

`RawFormat` is for base models without a template: prompts stay as they are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peagle.checkpoints.target import eos_ids, load_tokenizer
from peagle.errors import UserError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
Span = tuple[int, int]
USER_TEXT = "User-message-placeholder"


class ChatFormat:
    """A tokenizer with a chat template; `eos_ids` are the tokens that end the target's responses."""

    rejection = "rejected by the chat template"  # reason of rows that cannot be rendered
    name = "chat template"  # in errors
    adds_special_tokens = False  # to the texts: the template has written them already

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, eos_ids: Collection[int] = (), template: Path | None = None
    ) -> None:
        self.tokenizer, self.eos_ids = tokenizer, frozenset(eos_ids)
        try:
            given = tokenizer.chat_template if template is None else template.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise UserError(f"--chat-template {template}: cannot be read ({first_line(error)})") from None
        if not given:
            raise UserError(f"{template or 'this target'} has no chat template: give --chat-template FILE or --raw")
        self.template = given if isinstance(given, str) else json.dumps(given, sort_keys=True)
        self._options = {"chat_template": self.template} if template is not None else {}

    @property
    def key(self) -> str:
        """A hash that changes whenever the token ids of conversations change."""
        probe = self.tokenizer("Token ids,\n  0123 + naïve 漢字 <|end|>")["input_ids"]
        values = [self.template, len(self.tokenizer), list(probe), sorted(self.eos_ids)]
        return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]

    def render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        """The text of a conversation in the template."""
        return self._render([list(messages)], add_generation_prompt)[0]

    def encode_conversations(
        self, conversations: Sequence[Sequence[Message]], add_generation_prompt: bool
    ) -> list[list[int]]:
        """Token ids of many conversations; encoding them together is several times faster."""
        return self.encode(self._render([list(m) for m in conversations], add_generation_prompt))

    def encode(self, texts: list[str]) -> list[list[int]]:
        encoded = self.tokenizer(texts, add_special_tokens=self.adds_special_tokens) if texts else {"input_ids": []}
        return [list(ids) for ids in encoded["input_ids"]]

    def decode(self, ids: Sequence[int]) -> str:
        """Decodes with special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def decode_responses(self, token_ids: Sequence[Sequence[int]]) -> list[str]:
        """Decodes without special tokens."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is not None:  # releases the GIL for the engine while it decodes
            return list(backend.decode_batch([list(ids) for ids in token_ids], skip_special_tokens=True))
        return [str(self.tokenizer.decode(list(ids), skip_special_tokens=True)) for ids in token_ids]

    def user_turn(self, system: str | None) -> tuple[str, int]:
        """The text before the first user message and the token id after it."""
        messages = [{"role": "system", "content": system}] if system is not None else []
        user_message = {"role": "user", "content": USER_TEXT}
        before, _, after = self.render([*messages, user_message], add_generation_prompt=True).partition(USER_TEXT)
        if not (ids := self.encode([after])[0]):
            raise UserError("--vary: the chat template adds nothing after a user turn, so a prompt cannot end")
        return before, ids[0]

    def encode_with_spans(self, messages: Sequence[Message]) -> tuple[list[int], list[Span]]:
        """Token ids of a conversation and the spans of its responses."""
        if "{% generation" in self.template or "{%- generation" in self.template:
            return self._encode_marked(messages)
        ids = self.encode_conversations([messages], add_generation_prompt=False)[0]
        return ids, self.find_spans(messages, ids)

    def find_spans(self, messages: Sequence[Message], ids: Sequence[int]) -> list[Span]:
        """The spans of the responses in a conversation's token ids, found by rendering it turn by turn."""
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        prompts = self.encode_conversations([messages[:i] for i in turns], add_generation_prompt=True)
        wholes = self.encode_conversations([messages[: i + 1] for i in turns], add_generation_prompt=False)
        spans: list[Span] = []
        for prompt, whole in zip(prompts, wholes, strict=True):
            if any(list(ids[: len(part)]) != part for part in (prompt, whole)):
                raise UserError(
                    "the chat template does not round-trip: the start of a conversation, rendered alone, is no prefix "
                    f"of the whole. Alone: {self.decode(whole)!r:.200}, whole: {self.decode(ids)!r:.200}; mark the "
                    "responses with {% generation %} in --chat-template FILE"
                )
            end = next((p + 1 for p in range(len(prompt), len(whole)) if whole[p] in self.eos_ids), len(whole))
            if end > len(prompt):
                spans.append((len(prompt), end))
        return spans

    def _encode_marked(self, messages: Sequence[Message]) -> tuple[list[int], list[Span]]:
        """Uses the template's `{% generation %}` blocks."""
        encoded = self.tokenizer.apply_chat_template(
            list(messages), tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **self._options
        )
        ids, mask = list(encoded["input_ids"]), [bool(m) for m in encoded["assistant_masks"]]
        edges = [i for i in range(len(mask) + 1) if (i < len(mask) and mask[i]) != (i > 0 and mask[i - 1])]
        return ids, list(zip(edges[::2], edges[1::2], strict=True))

    def _render(self, conversations: list[list[Message]], add_generation_prompt: bool) -> list[str]:
        if not conversations:
            return []
        try:
            texts = self.tokenizer.apply_chat_template(
                conversations, tokenize=False, add_generation_prompt=add_generation_prompt, **self._options
            )
        except Exception as error:  # templates raise arbitrary errors
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"the chat template rejects a conversation ({reason}): {conversations[0]!r:.200}") from None
        return [str(text) for text in texts]


class RawFormat(ChatFormat):
    """Prompts without a template; the response continues the text.

    The tokenizer adds its usual special tokens (Gemma: <bos>), as for `/v1/completions`.
    """

    rejection, name, adds_special_tokens = "needs a chat template", "--raw", True

    def __init__(self, tokenizer: PreTrainedTokenizerBase, eos_ids: Collection[int] = ()) -> None:
        self.tokenizer, self.eos_ids, self.template = tokenizer, frozenset(eos_ids), ""

    def _render(self, conversations: list[list[Message]], add_generation_prompt: bool) -> list[str]:
        for messages in conversations:
            if [message["role"] for message in messages[:2]] not in (["user"], ["user", "assistant"]) or messages[2:]:
                raise UserError(f"--raw: several turns or a system message need a chat template: {messages!r:.200}")
        return ["".join(str(message["content"]) for message in messages) for messages in conversations]


def load_chat_format(folder: Path, template: Path | None = None, raw: bool = False) -> ChatFormat:
    """Loads a target's tokenizer, chat template (not for `raw`) and end-of-sequence ids."""
    if raw and template is not None:
        raise UserError(f"--raw: uses no chat template; remove --chat-template {template} or --raw")
    tokenizer = load_tokenizer(folder)
    ends = {*eos_ids(folder), tokenizer.eos_token_id} - {None}
    return RawFormat(tokenizer, ends) if raw else ChatFormat(tokenizer, ends, template)
