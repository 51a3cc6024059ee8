"""How the demonstration looks: panes that grow, side by side or stacked, or plain lines where there is no terminal.

Knows nothing about engines: it is shown runs, and how far they have come. Drawing happens only when it is asked to, so
that nobody's clock runs meanwhile.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from peagle.cli.race import Racer, Run, speed_up
from peagle.display import DRAFTED, OWN, TokenTextSplitter

if TYPE_CHECKING:
    from rich.console import ConsoleOptions, RenderResult

SIDE_BY_SIDE = 120  # columns from which three panes fit beside each other
PLAIN_WIDTH = 100  # where there is no terminal to say
REDRAW_S = 0.07
TITLES = {"alone": "alone: one token a pass", "EAGLE-3": "with EAGLE-3", "P-EAGLE": "with P-EAGLE"}
UNDERLINED = "underline"
SHORTEST_PANE = 2  # lines of text


class Pane:
    """What one of them has said so far, and how fast."""

    def __init__(self, racer: Racer, decode: Callable[[list[int]], str]) -> None:
        self.racer = racer
        self.parts: list[tuple[str, bool]] = []
        self._text = TokenTextSplitter(decode)

    def grow(self) -> None:
        request = self.racer.request
        self.parts += self._text.feed(request.output_token_ids, request.is_draft_token, self.racer.done)


class Scene:
    """The panes as they are at this moment, in the terminal's size of this moment."""

    def __init__(self, panes: Sequence[Pane], drafted: str) -> None:
        self.panes, self.drafted = panes, drafted

    def __rich_console__(self, screen: Console, options: ConsoleOptions) -> RenderResult:
        count, beside = len(self.panes), screen.width >= SIDE_BY_SIDE
        width = screen.width // count if beside else screen.width
        most = max(SHORTEST_PANE, (screen.height - 4 if beside else (screen.height - 3) // count) - 2)
        wrapped = [
            Text.assemble(*((text, self.drafted if was_draft else OWN) for text, was_draft in pane.parts)).wrap(
                screen, width - 4
            )
            for pane in self.panes
        ]
        rows = min(most, max(map(len, wrapped)))
        alone = self.panes[0].racer.run
        drawn: list[RenderableType] = [
            Panel(
                Text("\n").join(lines[-rows:]),
                title=f"[bold]{TITLES[pane.racer.name]}[/bold]",
                title_align="left",
                subtitle=figures(pane.racer.run, alone),
                subtitle_align="right",
                border_style="dim" if not pane.racer.done else "green" if pane.racer.drafter else "blue",
                height=rows + 2,
            )
            for pane, lines in zip(self.panes, wrapped, strict=True)
        ]
        if not beside:
            yield Group(*drawn)
            return
        grid = Table.grid(expand=True)
        for _ in drawn:
            grid.add_column(ratio=1)
        grid.add_row(*drawn)
        yield grid


class View:
    """The whole demonstration on standard output; `silent` shows nothing."""

    def __init__(self, decode: Callable[[list[int]], str], no_color: bool, silent: bool) -> None:
        wide = None if sys.stdout.isatty() else PLAIN_WIDTH
        self.screen = Console(
            highlight=False, emoji=False, width=wide, quiet=silent, no_color=True if no_color else None
        )
        self.drafted = UNDERLINED if self.screen.no_color else DRAFTED
        self._decode = decode

    def open(self, what: str, k: int | Literal["auto"]) -> None:
        drafts = "as many drafts a round as pay here" if k == "auto" else f"{k} drafts a round"
        self.note(f"{what}, {drafts}. Each answers on a clock of its own.")
        if self.screen.is_terminal:
            accepted = Text.assemble("Accepted drafts look ", ("like this", self.drafted), ".")
            self.screen.print(accepted)

    @contextmanager
    def prompt(self, title: str, racers: Sequence[Racer]) -> Iterator[Callable[[], None]]:
        """Gives what is to be called between turns."""
        if self.screen.is_terminal and not self.screen.quiet:
            with self._panes(title, racers) as watch:
                yield watch
        else:
            told: list[Racer] = []

            def tell() -> None:
                for racer in racers:
                    if racer.done and racer not in told:
                        told.append(racer)
                        count = len(racer.request.output_token_ids)
                        self.note(f"  {racer.name}: {count} tokens in {racer.run.passes} passes, {racer.seconds:.1f} s")

            self.note(f"\n{title}")
            yield tell
            texts = {self._decode(racer.request.output_token_ids): racer.name for racer in reversed(racers)}
            for text, name in reversed(texts.items()):
                self.note(f"{'' if len(texts) == 1 else f'{name}:'}\n{text}")

    @contextmanager
    def _panes(self, title: str, racers: Sequence[Racer]) -> Iterator[Callable[[], None]]:
        panes = [Pane(racer, self._decode) for racer in racers]
        self.screen.print()
        self.screen.rule(Text(title, style="bold", overflow="ellipsis", no_wrap=True), align="left", style="dim")
        drawn = 0.0
        with Live(Scene(panes, self.drafted), console=self.screen, auto_refresh=False) as live:

            def watch() -> None:
                nonlocal drawn
                for pane in panes:
                    pane.grow()
                if time.perf_counter() - drawn > REDRAW_S or all(racer.done for racer in racers):
                    live.refresh()
                    drawn = time.perf_counter()

            yield watch

    def close(self, totals: Sequence[Run], equal: bool) -> None:
        """The table over all prompts, the sentence about the texts, and why something did not pay."""
        alone = totals[0]
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))  # fits 80 columns
        table.add_column("", no_wrap=True)
        for head in ("tokens/s", "speed-up", "tokens\na round", "drafts\na round", "passes"):
            table.add_column(head, justify="right", no_wrap=True)
        table.add_column("accepted %,\nby position", no_wrap=True)
        for run in totals:
            length = run.acceptance_length
            table.add_row(
                run.name,
                f"{run.tokens_per_second:.1f}",
                f"[bold]{speed_up(run, alone):.2f}x[/bold]",
                f"{length:.2f}" if length is not None else "-",
                f"{run.drafted_tokens / run.drafts:.1f}" if run.drafts else "-",
                f"{run.passes}",
                " ".join(f"{100 * count / run.drafts:.0f}" for count in run.num_accepted_tokens_per_pos if count),
            )
        self.screen.print()
        self.screen.print(table)
        for run in totals[1:]:
            if why := why_it_does_not_pay(run, alone):
                self.note(why)
        if equal:
            passes = ", ".join(f"{run.passes} with {run.name}" for run in totals[1:])
            self.note(
                f"All texts are equal, token for token ({len(alone.token_ids)} tokens): drafts changed nothing but the "
                f"number of passes, {alone.passes} alone, {passes}."
            )

    def note(self, text: str) -> None:
        if self.screen.is_terminal:
            self.screen.print(text, markup=False)
        else:
            self.screen.out(text, highlight=False)  # to the letter


def figures(run: Run, alone: Run) -> str:
    """A pane's line: what it has brought so far."""
    if not run.token_ids:
        return "reading the prompt"
    length = run.acceptance_length
    said = [f"{len(run.token_ids)} tokens", *([f"{length:.2f} a round"] if length is not None else [])]
    said.append(f"[bold]{run.tokens_per_second:.1f}/s[/bold]")
    if run.drafter is not None and alone.token_ids:
        said.append(f"[bold]{speed_up(run, alone):.2f}x[/bold]")
    return ", ".join(said)


def why_it_does_not_pay(run: Run, alone: Run) -> str | None:
    """A round's price against what it brings, both measured just now; None where it pays."""
    if speed_up(run, alone) >= 1 or not (run.rounds and alone.rounds):
        return None
    price = (run.seconds / run.passes) / (alone.seconds / alone.passes)
    bare = 1 - run.drafts / run.rounds
    why = f"; {bare:.0%} of its rounds went without drafts, since they cost more than they bring" if bare > 0.5 else ""
    return (
        f"{run.name} does not pay on this machine: its passes took {price:.2f} times as long as the target's alone and "
        f"brought {len(run.token_ids) / run.passes:.2f} tokens each{why}."
    )
