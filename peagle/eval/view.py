"""Terminal output of `peagle eval`: progress and tables."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from peagle.eval.acceptance import is_whole_dataset
from peagle.results.schema import AcceptanceRow, Results

if TYPE_CHECKING:
    from rich.table import Table

TABLE_WIDTH = 140  # if the output is not a terminal
MAX_NAME_CHARS = 32


class EvalProgressBar:
    """On stderr: a status line on a terminal, and a line for every measured row."""

    def __init__(self) -> None:
        from rich.console import Console

        self._screen = Console(stderr=True, highlight=False, emoji=False)
        self._status: Any = self._screen.status("loading") if self._screen.is_terminal else None
        if self._status is not None:
            self._status.start()

    def update(self, activity: str, done: int, total: int) -> None:
        if self._status is not None:
            self._status.update(f"{activity}: {done:,} of {total:,}")

    def print_row(self, rows: Sequence[AcceptanceRow]) -> None:
        row = rows[0]
        self.print(
            f"{row.drafter}  {row.dataset}  temperature {row.temperature:g}  K={row.num_speculative_tokens}: "
            f"acceptance length {_format_number(row.acceptance_length)}"
        )

    def print(self, text: str) -> None:
        self._screen.print(text, markup=False, soft_wrap=True)

    def close(self) -> None:
        if self._status is not None:
            self._status.stop()


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
    from rich import box
    from rich.table import Table

    without_loops = {_row_key(row): row for row in rows if row.looping_responses == "excluded"}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("drafter", "data", "T"):
        table.add_column(name)
    for name in ("K", "acceptance length", "95%", "no loops", "drafts"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("accepted % by position")
    table.add_column("conditional %")
    datasets = list(dict.fromkeys(row.dataset for row in rows))
    drafters = list(dict.fromkeys(row.drafter for row in rows))
    previous: tuple[str, str, float] | None = None
    for row in sorted(
        filter(is_whole_dataset, rows),
        key=lambda r: (drafters.index(r.drafter), datasets.index(r.dataset), r.temperature, r.num_speculative_tokens),
    ):
        head = (row.drafter, row.dataset, row.temperature)
        if previous is not None and head != previous:
            table.add_row()
        other, interval = without_loops.get(_row_key(row)), row.acceptance_length_ci95
        table.add_row(
            *(_head_cells(head) if head != previous else ("", "", "")),
            str(row.num_speculative_tokens),
            f"[bold]{_format_number(row.acceptance_length)}[/bold]",
            f"{interval[0]:.2f} - {interval[1]:.2f}" if interval is not None else "",
            _format_number(other.acceptance_length) if other is not None else "",
            f"{row.num_drafts:,}",
            _format_percents(row.per_position_acceptance_rates),
            _format_percents(row.per_position_conditional_rates),
        )
        previous = head
    return table


def _part_table(title: str, part: Callable[[AcceptanceRow], str | None], rows: list[AcceptanceRow]) -> Table:
    """Acceptance length of every part of a data set, with a column for every K."""
    from rich import box
    from rich.table import Table

    selected = [row for row in rows if part(row) is not None]
    ks = sorted({row.num_speculative_tokens for row in selected})
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=f"acceptance length by {title}", title_justify="left")
    for name in ("drafter", "data", "T", title):
        table.add_column(name)
    for k in ks:
        table.add_column(f"K={k}", justify="right")
    lines: dict[tuple[str, str, float, str], dict[int, float | None]] = {}
    for row in selected:
        line = (row.drafter, row.dataset, row.temperature, part(row) or "")
        lines.setdefault(line, {})[row.num_speculative_tokens] = row.acceptance_length
    previous: tuple[str, str, float] | None = None
    for (drafter, dataset, temperature, value), by_k in lines.items():
        head = (drafter, dataset, temperature)
        names = _head_cells(head) if head != previous else ("", "", "")
        table.add_row(*names, value, *(_format_number(by_k.get(k)) for k in ks))
        previous = head
    return table


def _row_key(row: AcceptanceRow) -> tuple[str, str, float, int]:
    return row.drafter, row.dataset, row.temperature, row.num_speculative_tokens


def _head_cells(head: tuple[str, str, float]) -> tuple[str, str, str]:
    drafter, dataset, temperature = head
    short = drafter if len(drafter) <= MAX_NAME_CHARS else f"...{drafter[3 - MAX_NAME_CHARS :]}"
    return short, dataset, f"{temperature:g}"


def _format_number(value: float | None) -> str:
    return f"{value:.2f}" if value is not None else "-"


def _format_percents(shares: Sequence[float | None]) -> str:
    return " ".join(f"{share * 100:.0f}" if share is not None else "-" for share in shares)
