"""Conversations <-> token ids, in the target's chat template, and where in them the answers lie.

Knows nothing about files or models. The template is applied once to a whole conversation. Where an answer lies is
told by token positions: those that the template itself marks (`{% generation %}`), or what is added when the answer
is rendered behind its prompt. If rendering a part does not give the beginning of the whole, nothing is guessed.

    user: hi      answer: ok
    <s> user hi </s> bot                   5 tokens: the prompt, ready for the answer
    <s> user hi </s> bot ok </s> \\n        8 tokens: with the answer
    span [5, 7)                            what is added, up to the end of turn that the target says itself

A target that was never taught to chat has no template: `RawFormat` gives it prompts as they are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peagle.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
Span = tuple[int, int]
PLACE = "What-the-user-says"


class ChatFormat:
    """A tokenizer with a chat template; `eos_ids` are the tokens with which the target ends an answer."""

    refusal = "refused by the chat template"  # the reason of rows that cannot be rendered
    rule = "chat template"  # by which messages become token ids

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        eos_ids: Collection[int] = (),
        template: Path | None = None,
        name: str = "this target",
    ) -> None:
        self.tokenizer, self.eos_ids = tokenizer, frozenset(eos_ids)
        self._given: str | None = None
        if template is not None:
            self._given = _read_template(template)
        elif not tokenizer.chat_template:
            raise UserError(
                f"{name} has no chat template: give one with --chat-template FILE (Jinja, as Hugging Face), "
                "or prompts as they are with --raw"
            )
        self._options = {"chat_template": self._given} if self._given is not None else {}

    @property
    def template(self) -> str:
        own = self._given if self._given is not None else self.tokenizer.chat_template
        return own if isinstance(own, str) else json.dumps(own, sort_keys=True)

    @property
    def key(self) -> str:
        """Changes with whatever would change the token ids of a conversation."""
        probe = self.tokenizer("Token ids,\n  0123 + naïve 漢字 <|end|>")["input_ids"]
        told = [self.template, len(self.tokenizer), list(probe), sorted(self.eos_ids)]
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]

    def text(self, messages: Sequence[Message], ready: bool) -> str:
        """The conversation as the target reads it; `ready` for the next answer."""
        return self._render([list(messages)], ready)[0]

    def ids(self, conversations: Sequence[Sequence[Message]], ready: bool) -> list[list[int]]:
        """Token ids of many conversations: together they are encoded several times as fast as one by one."""
        return self.encode(self._render([list(m) for m in conversations], ready))

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Ids of texts that hold their special tokens already."""
        return [list(ids) for ids in self.tokenizer(texts, add_special_tokens=False)["input_ids"]] if texts else []

    def decode(self, ids: Sequence[int]) -> str:
        """Everything, special tokens included."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def answers(self, many: Sequence[Sequence[int]]) -> list[str]:
        """The texts of answers, without special tokens."""
        if not many:
            return []
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is not None:  # leaves Python's lock to the engine while it decodes
            return list(backend.decode_batch([list(ids) for ids in many], skip_special_tokens=True))
        return [str(self.tokenizer.decode(list(ids), skip_special_tokens=True)) for ids in many]

    def user_turn(self, system: str | None) -> tuple[str, int] | None:
        """What stands before a user's first words, and the token that comes behind the last; None: there is none."""
        messages = [{"role": "system", "content": system}] if system is not None else []
        before, _, behind = self.text([*messages, {"role": "user", "content": PLACE}], ready=True).partition(PLACE)
        ids = self.encode([behind])[0]
        return (before, ids[0]) if ids else None

    def conversation(self, messages: Sequence[Message]) -> tuple[list[int], list[Span]]:
        """Token ids of a whole conversation and where its answers lie."""
        if "{% generation" in self.template or "{%- generation" in self.template:
            return self._marked(messages)
        ids = self.ids([messages], ready=False)[0]
        return ids, self.locate(messages, ids)

    def locate(self, messages: Sequence[Message], ids: Sequence[int]) -> list[Span]:
        """Where the answers of a conversation lie in its token ids, found by rendering it turn by turn."""
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        before = self.ids([messages[:i] for i in turns], ready=True)
        behind = self.ids([messages[: i + 1] for i in turns], ready=False)
        spans: list[Span] = []
        for start, end in zip(before, behind, strict=True):
            for part in (start, end):
                if list(ids[: len(part)]) != part:
                    raise self._not_a_prefix(part, ids)
            stop = next((p + 1 for p in range(len(start), len(end)) if end[p] in self.eos_ids), len(end))
            if stop > len(start):
                spans.append((len(start), stop))
        return spans

    def _marked(self, messages: Sequence[Message]) -> tuple[list[int], list[Span]]:
        """As the template's own `{% generation %}` blocks say."""
        told = self.tokenizer.apply_chat_template(
            list(messages), tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **self._options
        )
        ids, mask = list(told["input_ids"]), [bool(m) for m in told["assistant_masks"]]
        edges = [i for i in range(len(mask) + 1) if (i < len(mask) and mask[i]) != (i > 0 and mask[i - 1])]
        return ids, list(zip(edges[::2], edges[1::2], strict=True))

    def _render(self, conversations: list[list[Message]], ready: bool) -> list[str]:
        if not conversations:
            return []
        try:
            texts = self.tokenizer.apply_chat_template(
                conversations, tokenize=False, add_generation_prompt=ready, **self._options
            )
        except Exception as error:  # templates raise what they like
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"the chat template refuses a conversation ({reason}): {conversations[0]!r:.200}") from None
        return [str(text) for text in texts]

    def _not_a_prefix(self, part: Sequence[int], whole: Sequence[int]) -> UserError:
        at = next((i for i, (a, b) in enumerate(zip(part, whole, strict=False)) if a != b), min(len(part), len(whole)))
        return UserError(
            "the chat template does not round-trip: the beginning of a conversation, rendered alone, is not the "
            f"beginning of the whole. They part at token {at}: alone {self._around(part, at)}, "
            f"whole {self._around(whole, at)}; mark the answers with {{% generation %}} in --chat-template FILE"
        )

    def _around(self, ids: Sequence[int], at: int) -> str:
        return repr(self.decode(ids[max(at - 12, 0) : at + 12]))


class RawFormat(ChatFormat):
    """Prompts as they are; an answer is what the target says next.

    The tokenizer begins the text as it begins any other (Gemma: with <bos>), which is what `/v1/completions` reads.
    """

    refusal, rule = "needs a chat template", "--raw"
    template = ""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, eos_ids: Collection[int] = ()) -> None:
        self.tokenizer, self.eos_ids = tokenizer, frozenset(eos_ids)

    def encode(self, texts: list[str]) -> list[list[int]]:
        return [list(ids) for ids in self.tokenizer(texts)["input_ids"]] if texts else []

    def _render(self, conversations: list[list[Message]], ready: bool) -> list[str]:
        for messages in conversations:
            if [message["role"] for message in messages[:2]] not in (["user"], ["user", "assistant"]) or messages[2:]:
                raise UserError(f"--raw: several turns or a system message need a template: {messages!r:.200}")
        return ["".join(str(message["content"]) for message in messages) for messages in conversations]


def _read_template(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise UserError(f"--chat-template {path}: cannot be read ({reason})") from None
    if not text.strip():
        raise UserError(f"--chat-template {path}: is empty")
    return text
