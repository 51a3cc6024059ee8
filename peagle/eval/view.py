"""Terminal output of `peagle eval`: progress and tables."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from peagle.eval.acceptance import is_whole_dataset
from peagle.results.schema import AcceptanceRow, Results

if TYPE_CHECKING:
    from rich.table import Table

TABLE_WIDTH = 140  # if the output is not a terminal


class ProgressBar:
    """On stderr: a bar on a terminal, and lines for finished parts. Also used by `peagle bench`."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._screen = Console(stderr=True, highlight=False, emoji=False)
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
        # A refresh takes 1-2 ms from a measurement.
        hidden = not self._screen.is_terminal
        self._bar = Progress(*columns, console=self._screen, refresh_per_second=1, transient=True, disable=hidden)
        self._task = self._bar.add_task("loading", total=None)
        self._bar.start()

    def update(self, activity: str, done: int, total: int) -> None:
        self._bar.update(self._task, description=activity, completed=done, total=total)

    def print(self, text: str) -> None:
        self._screen.print(text, markup=False, soft_wrap=True)

    def print_row(self, rows: Sequence[AcceptanceRow]) -> None:
        row = rows[0]
        self.print(
            f"{row.drafter}  {row.dataset}  temperature {row.temperature:g}  K={row.num_speculative_tokens}: "
            f"acceptance length {_format_number(row.acceptance_length)}"
        )

    def close(self) -> None:
        if not self._bar.disable:  # it would print an empty line
            self._bar.stop()


def print_results(results: Results) -> None:
    """Prints a table of all data sets, then tables by category and by context length, then the warnings."""
    from rich.console import Console

    screen = Console(highlight=False, emoji=False, width=None if sys.stdout.isatty() else TABLE_WIDTH)
    rows: list[AcceptanceRow] = results.rows
    if not rows:
        screen.print("nothing was measured")
        return
    s = results.settings
    screen.print(f"[bold]{s['target']}[/bold], {s['engine']} engine, {s['dtype']}, max_tokens {s['max_tokens']}")
    screen.print(_dataset_table(rows))
    parts: tuple[tuple[str, Callable[[AcceptanceRow], str | None]], ...] = (
        ("category", lambda row: row.category),
        ("context", lambda row: "{:,} - {:,}".format(*row.context_range) if row.context_range is not None else None),
    )
    for title, part in parts:
        if any(part(row) is not None for row in rows):
            screen.print(_part_table(title, part, rows))
    for warning in results.warnings:
        screen.print(f"[yellow]warning:[/yellow] {warning}", soft_wrap=True)


def _dataset_table(rows: list[AcceptanceRow]) -> Table:
    without_loops = {
        (*_row_names(row), row.num_speculative_tokens): row for row in rows if row.looping_responses == "excluded"
    }
    table = _new_table(None, "K", "acceptance length", "95%", "no loops", "drafts")
    table.add_column("accepted % by position")
    table.add_column("conditional %")
    datasets = list(dict.fromkeys(row.dataset for row in rows))
    drafters = list(dict.fromkeys(row.drafter for row in rows))
    shown = sorted(
        filter(is_whole_dataset, rows),
        key=lambda r: (drafters.index(r.drafter), datasets.index(r.dataset), r.temperature, r.num_speculative_tokens),
    )
    for row in shown:
        other = without_loops.get((*_row_names(row), row.num_speculative_tokens))
        interval = row.acceptance_length_ci95
        table.add_row(
            *_row_names(row),
            str(row.num_speculative_tokens),
            f"[bold]{_format_number(row.acceptance_length)}[/bold]",
            f"{interval[0]:.2f} - {interval[1]:.2f}" if interval is not None else "",
            _format_number(other.acceptance_length) if other is not None else "",
            f"{row.num_drafts:,}",
            _format_percents(row.per_position_acceptance_rates),
            _format_percents(row.per_position_conditional_rates),
        )
    return table


def _part_table(title: str, part: Callable[[AcceptanceRow], str | None], rows: list[AcceptanceRow]) -> Table:
    """Acceptance length of every part of a data set, with a column for every K."""
    selected = [row for row in rows if part(row) is not None]
    ks = sorted({row.num_speculative_tokens for row in selected})
    table = _new_table(f"acceptance length by {title}", title, *(f"K={k}" for k in ks))
    lines: dict[tuple[str, ...], dict[int, float | None]] = {}
    for row in selected:
        line = (*_row_names(row), part(row) or "")
        lines.setdefault(line, {})[row.num_speculative_tokens] = row.acceptance_length
    for names, by_k in lines.items():
        table.add_row(*names, *(_format_number(by_k.get(k)) for k in ks))
    return table


def _new_table(title: str | None, *number_columns: str) -> Table:
    """A table with columns for the names of a row, and for numbers."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
    table.add_column("drafter", max_width=32)
    for name in ("data", "T"):
        table.add_column(name)
    for name in number_columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _row_names(row: AcceptanceRow) -> tuple[str, str, str]:
    return row.drafter, row.dataset, f"{row.temperature:g}"


def _format_number(value: float | None) -> str:
    return f"{value:.2f}" if value is not None else "-"


def _format_percents(shares: Sequence[float | None]) -> str:
    return " ".join(f"{share * 100:.0f}" if share is not None else "-" for share in shares)
