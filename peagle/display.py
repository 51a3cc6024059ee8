"""Terminal output of several verbs: a progress bar, and the text of a growing output by token."""

from collections.abc import Callable, Sequence
from typing import Any, Self

DRAFT_STYLE, TARGET_STYLE = "black on green3", "default"  # rich styles of accepted draft tokens and of the target's
REPLACEMENT_CHARACTER = "\ufffd"  # a decoder returns it for a character with missing bytes


class ProgressBar:
    """On stderr: a bar while the block runs, if it is a terminal. Printed lines appear above it."""

    def __init__(self, enabled: bool = True, show_count: bool = True) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.table import Column

        self._screen = Console(stderr=True, highlight=False, emoji=False)
        self.is_shown = enabled and self._screen.is_interactive
        text = TextColumn("{task.description}", markup=False, table_column=Column())
        columns = (text, BarColumn(10), *([MofNCompleteColumn()] if show_count else []))
        # A refresh takes 1-2 ms from a measurement.
        options: dict[str, Any] = {"refresh_per_second": 1, "transient": True, "disable": not self.is_shown}
        self._bar = Progress(*columns, console=self._screen, **options)
        self._task = self._bar.add_task("starting", total=None)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.is_shown:  # otherwise it would print an empty line
            self._bar.stop()

    def update(self, text: str | None, done: float, total: float) -> None:
        """None keeps the text."""
        self._bar.update(self._task, description=text, completed=done, total=total)

    def print(self, text: str) -> None:
        self._screen.print(text, markup=False, soft_wrap=True)


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
