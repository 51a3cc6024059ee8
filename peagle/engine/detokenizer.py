"""Incremental detokenization, and stop strings."""

from collections.abc import Callable, Sequence

REPLACEMENT_CHARACTER = "\ufffd"  # a decoder returns it for a character with missing bytes


class Detokenizer:
    """Decodes a growing list of token ids at constant cost per token.

    Decodes a window of the newest tokens. Its first tokens are already in `text`: they give the decoder its left
    context (a word's leading space depends on it), and their text is subtracted from the window's text.
    """

    def __init__(self, decode: Callable[[list[int]], str], stop: Sequence[str] = (), min_tokens: int = 0) -> None:
        """Stop strings that end within the text of the first `min_tokens` tokens are ignored."""
        self.decode, self.stop, self.min_tokens = decode, tuple(stop), min_tokens
        self.text = ""
        self.num_tokens = 0
        self.stop_reason: str | None = None  # the stop string that was found
        self._window: list[int] = []
        self._num_context_tokens = 0  # first tokens of the window, all of their text is in `text`
        self._num_added_chars = 0  # characters of the later tokens in `text`, before an incomplete one
        self._max_held_chars = max((len(s) for s in self.stop), default=1) - 1

    def add_token(self, token: int) -> bool:
        """Adds a token. Returns True once a stop string is complete; `text` then ends before it."""
        self.num_tokens += 1
        return self._add_text(self._decode_new_text([token]))

    def add_tokens(self, tokens: Sequence[int]) -> None:
        """Adds tokens at the cost of one. For detokenizers without stop strings."""
        self.num_tokens += len(tokens)
        self.text += self._decode_new_text(tokens)

    def add_separately(self, tokens: Sequence[int], final: bool = False) -> list[str]:
        """Adds tokens and returns the text that each one completed. `final` also adds an incomplete character."""
        texts = []
        for token in tokens:
            num_chars = len(self.text)
            self.add_token(token)
            texts.append(self.text[num_chars:])
        if final and texts:
            num_chars = len(self.text)
            self.finish()
            texts[-1] += self.text[num_chars:]
        return texts

    def _decode_new_text(self, tokens: Sequence[int]) -> str:
        self._window += tokens
        num_known_chars = len(self.decode(self._window[: self._num_context_tokens])) + self._num_added_chars
        window_text = self.decode(self._window)
        new_text = window_text.rstrip(REPLACEMENT_CHARACTER)[num_known_chars:]
        if new_text and not window_text.endswith(REPLACEMENT_CHARACTER):
            num_window_tokens = len(self._window) - self._num_context_tokens
            self._window, self._num_context_tokens = self._window[self._num_context_tokens :], num_window_tokens
            self._num_added_chars = 0
        else:
            self._num_added_chars += len(new_text)
        return new_text

    def _add_text(self, new_text: str) -> bool:
        num_chars = len(self.text)
        self.text += new_text
        if self.num_tokens <= self.min_tokens:
            return False
        # Only matches that end in the new text: earlier ones were searched before, or ended too early to count.
        matches = [(self.text.find(s, max(0, num_chars + 1 - len(s))), s) for s in self.stop]
        matches = [(start, s) for start, s in matches if start >= 0]
        if not matches:
            return False
        start, self.stop_reason = min(matches, key=lambda m: m[0] + len(m[1]))  # ties: the first listed
        self.text = self.text[:start]
        return True

    def finish(self) -> None:
        """Adds the replacement characters of a last incomplete character."""
        if len(self._window) == self._num_context_tokens:
            return
        window_text = self.decode(self._window)
        num_known_chars = len(self.decode(self._window[: self._num_context_tokens])) + self._num_added_chars
        self.text += window_text[num_known_chars:]
        self._window, self._num_context_tokens, self._num_added_chars = [], 0, 0

    @property
    def streamable_text(self) -> str:
        """The text without an end that may be the beginning of a stop string."""
        if self.stop_reason is not None or not self.stop:
            return self.text
        for begin in range(max(0, len(self.text) - self._max_held_chars), len(self.text)):
            if any(s.startswith(self.text[begin:]) for s in self.stop):
                return self.text[:begin]
        return self.text
