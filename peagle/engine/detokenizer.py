"""Token ids of a growing answer -> text, and the first stop string in it.

Knows nothing about models; a decode function is all it asks of a tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

UNFINISHED = "\ufffd"  # what a decoder shows for a character whose bytes are not all there yet


class Detokenizer:
    """Decodes a window of the newest tokens only, so that a long answer costs no more per token than a short one.

    `settled` tokens before the window give the decoder its left context (a word's leading space depends on
    it); what they say is subtracted from what the window says.
    """

    def __init__(self, decode: Callable[[list[int]], str], stop: Sequence[str] = (), min_tokens: int = 0) -> None:
        self.decode, self.stop, self.min_tokens = decode, tuple(stop), min_tokens
        self.text = ""
        self.count = 0
        self.stopped: str | None = None
        self._window: list[int] = []
        self._context = 0  # how many tokens of the window are already in `text`
        self._taken = 0  # and how many characters of those behind them, before one that is unfinished
        self._held = max((len(s) for s in self.stop), default=1) - 1

    def feed(self, token: int) -> bool:
        """Adds a token; True once a stop string is complete, `text` then ends before it."""
        self.count += 1
        self._window.append(token)
        known = len(self.decode(self._window[: self._context])) + self._taken
        whole = self.decode(self._window)
        piece = whole.rstrip(UNFINISHED)[known:]
        if piece and not whole.endswith(UNFINISHED):
            self._window, self._context = self._window[self._context :], len(self._window) - self._context
            self._taken = 0
        else:
            self._taken += len(piece)
        return self._add(piece)

    def _add(self, piece: str) -> bool:
        before = len(self.text)
        self.text += piece
        if self.count <= self.min_tokens:
            return False
        # only what ends in the new piece counts: the rest was looked at before, or came too early to count
        found = [(self.text.find(s, max(0, before + 1 - len(s))), s) for s in self.stop]
        found = [(at, s) for at, s in found if at >= 0]
        if not found:
            return False
        at, self.stopped = min(found, key=lambda f: f[0] + len(f[1]))  # of equals the first listed
        self.text = self.text[:at]
        return True

    def finish(self) -> None:
        """Lets go of a character whose last bytes never came."""
        whole = self.decode(self._window)
        known = len(self.decode(self._window[: self._context])) + self._taken
        self.text += whole[known:]
        self._window, self._context, self._taken = [], 0, 0

    @property
    def showable(self) -> str:
        """The text up to where a stop string may have begun: what a stream may show."""
        if self.stopped is not None or not self.stop:
            return self.text
        for begin in range(max(0, len(self.text) - self._held), len(self.text)):
            if any(s.startswith(self.text[begin:]) for s in self.stop):
                return self.text[:begin]
        return self.text
