"""Splits the text of a growing output by token, to colour accepted draft tokens on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

DRAFT_STYLE, TARGET_STYLE = "black on green3", "default"  # rich styles of accepted draft tokens and of the target's
REPLACEMENT_CHARACTER = "\ufffd"  # a decoder returns it for a character with missing bytes


class TokenTextSplitter:
    """Splits text into the parts that each token added, with a flag per part: was it a draft token?

    A character may span several tokens: it is held back until it is complete and belongs to the last of them.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self.decode = decode
        self.token_ids: list[int] = []
        self.text = ""

    def add_tokens(
        self, token_ids: Sequence[int], is_draft_token: Sequence[bool], final: bool = False
    ) -> list[tuple[str, bool]]:
        """The new parts, given all tokens so far. `final` releases an incomplete character."""
        parts = []
        start = len(self.token_ids)
        for token, is_draft in zip(token_ids[start:], is_draft_token[start:], strict=True):
            self.token_ids.append(token)
            text = self.decode(self.token_ids)
            if not text.endswith(REPLACEMENT_CHARACTER) and len(text) > len(self.text):
                parts.append((text[len(self.text) :], is_draft))
                self.text = text
        if final:
            text = self.decode(self.token_ids) if self.token_ids else ""
            if len(text) > len(self.text):
                parts.append((text[len(self.text) :], False))
                self.text = text
        return parts
