"""Text on a terminal, coloured by where each token came from: drafted and accepted, or the target's own.

Knows nothing about models; a decode function is all it asks of a tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

DRAFTED, OWN = "black on green3", "default"
UNFINISHED = "\ufffd"  # what a decoder shows for a character whose bytes are not all there yet


class TokenTextSplitter:
    """Cuts a growing list of token ids into pieces of text, each with its token's flag.

    A character may span tokens: it is held back until it is whole, and goes with the last of them.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self.decode = decode
        self.ids: list[int] = []
        self.shown = ""

    def feed(self, ids: Sequence[int], drafted: Sequence[bool], final: bool = False) -> list[tuple[str, bool]]:
        """The pieces that `ids` (all so far) adds to what was fed before; `final` lets a torso go."""
        pieces = []
        for token, flag in zip(ids[len(self.ids) :], drafted[len(self.ids) :], strict=True):
            self.ids.append(token)
            text = self.decode(self.ids)
            if not text.endswith(UNFINISHED) and len(text) > len(self.shown):
                pieces.append((text[len(self.shown) :], flag))
                self.shown = text
        if final:
            text = self.decode(self.ids) if self.ids else ""
            if len(text) > len(self.shown):
                pieces.append((text[len(self.shown) :], False))
                self.shown = text
        return pieces
