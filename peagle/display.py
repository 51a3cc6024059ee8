"""Terminal output of several verbs: styles and a progress bar."""

from typing import Any, Self

DRAFT_STYLE, TARGET_STYLE = "black on green3", "default"  # rich styles of accepted draft tokens and of the target's


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
