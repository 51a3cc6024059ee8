"""The screen of `peagle demo`: growing panes in a terminal, plain lines elsewhere."""

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

from peagle.cli.demo_runner import DemoEngine, DemoResult
from peagle.display import DRAFT_STYLE, TARGET_STYLE, TokenTextSplitter

if TYPE_CHECKING:
    from rich.console import ConsoleOptions, RenderResult

SIDE_BY_SIDE_WIDTH = 120  # terminal columns needed for panes side by side
PLAIN_WIDTH = 100  # without a terminal
REDRAW_S = 0.07
TITLES = {"alone": "target alone", "EAGLE-3": "with EAGLE-3", "P-EAGLE": "with P-EAGLE"}
UNDERLINED = "underline"
MIN_PANE_LINES = 2


class DemoPane:
    """The output of one engine so far, with its draft tokens marked."""

    def __init__(self, engine: DemoEngine, decode: Callable[[list[int]], str]) -> None:
        self.engine = engine
        self.parts: list[tuple[str, bool]] = []
        self._splitter = TokenTextSplitter(decode)

    def update(self) -> None:
        request = self.engine.request
        self.parts += self._splitter.add_tokens(request.output_token_ids, request.is_draft_token, self.engine.finished)


class DemoScreen:
    """All panes, fitted to the terminal's current size."""

    def __init__(self, panes: Sequence[DemoPane], draft_style: str) -> None:
        self.panes, self.draft_style = panes, draft_style

    def __rich_console__(self, screen: Console, options: ConsoleOptions) -> RenderResult:
        num_panes, side_by_side = len(self.panes), screen.width >= SIDE_BY_SIDE_WIDTH
        width = screen.width // num_panes if side_by_side else screen.width
        pane_height = screen.height - 4 if side_by_side else (screen.height - 3) // num_panes
        wrapped = [
            Text.assemble(
                *((text, self.draft_style if drafted else TARGET_STYLE) for text, drafted in pane.parts)
            ).wrap(screen, width - 4)
            for pane in self.panes
        ]
        num_lines = min(max(MIN_PANE_LINES, pane_height - 2), max(map(len, wrapped)))
        baseline = self.panes[0].engine.result
        panels: list[RenderableType] = [
            Panel(
                Text("\n").join(lines[-num_lines:]),
                title=f"[bold]{TITLES[pane.engine.name]}[/bold]",
                title_align="left",
                subtitle=describe_progress(pane.engine.result, baseline),
                subtitle_align="right",
                border_style="dim" if not pane.engine.finished else "green" if pane.engine.drafter else "blue",
                height=num_lines + 2,
            )
            for pane, lines in zip(self.panes, wrapped, strict=True)
        ]
        if not side_by_side:
            yield Group(*panels)
            return
        grid = Table.grid(expand=True)
        for _ in panels:
            grid.add_column(ratio=1)
        grid.add_row(*panels)
        yield grid


class DemoView:
    """The whole demo on standard output; `silent` shows nothing."""

    def __init__(self, decode: Callable[[list[int]], str], no_color: bool, silent: bool) -> None:
        width = None if sys.stdout.isatty() else PLAIN_WIDTH
        self.screen = Console(
            highlight=False, emoji=False, width=width, quiet=silent, no_color=True if no_color else None
        )
        self.draft_style = UNDERLINED if self.screen.no_color else DRAFT_STYLE
        self._decode = decode

    def show_start(self, setup: str, num_speculative_tokens: int | Literal["auto"]) -> None:
        self.print_line(f"{setup}, K = {num_speculative_tokens}. Each engine has its own clock.")
        if self.screen.is_terminal:
            self.screen.print(Text.assemble("Accepted draft tokens look ", ("like this", self.draft_style), "."))

    @contextmanager
    def show_prompt(self, title: str, engines: Sequence[DemoEngine]) -> Iterator[Callable[[], None]]:
        """Shows one prompt. Yields the function to call between steps."""
        if self.screen.is_terminal and not self.screen.quiet:
            with self._show_panes(title, engines) as update:
                yield update
            return
        reported: list[DemoEngine] = []

        def report_finished() -> None:
            for engine in engines:
                if engine.finished and engine not in reported:
                    reported.append(engine)
                    result = engine.result
                    self.print_line(
                        f"  {engine.name}: {len(result.token_ids)} tokens in {result.num_forward_passes} forward "
                        f"passes, {result.seconds:.1f} s"
                    )

        self.print_line(f"\n{title}")
        yield report_finished
        texts = {self._decode(engine.request.output_token_ids): engine.name for engine in reversed(engines)}
        for text, name in reversed(texts.items()):
            self.print_line(f"{'' if len(texts) == 1 else f'{name}:'}\n{text}")

    @contextmanager
    def _show_panes(self, title: str, engines: Sequence[DemoEngine]) -> Iterator[Callable[[], None]]:
        panes = [DemoPane(engine, self._decode) for engine in engines]
        self.screen.print()
        self.screen.rule(Text(title, style="bold", overflow="ellipsis", no_wrap=True), align="left", style="dim")
        last_redraw = 0.0
        with Live(DemoScreen(panes, self.draft_style), console=self.screen, auto_refresh=False) as live:

            def update() -> None:
                nonlocal last_redraw
                for pane in panes:
                    pane.update()
                if time.perf_counter() - last_redraw > REDRAW_S or all(engine.finished for engine in engines):
                    live.refresh()
                    last_redraw = time.perf_counter()

            yield update

    def show_totals(self, totals: Sequence[DemoResult], equal: bool) -> None:
        """Prints the table over all prompts, slowdowns with their reason, and whether the outputs are equal."""
        baseline = totals[0]
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))  # fits 80 columns
        table.add_column("", no_wrap=True)
        for head in ("tokens/s", "speedup", "acceptance\nlength", "draft tokens\nper step", "forward\npasses"):
            table.add_column(head, justify="right", no_wrap=True)
        table.add_column("acceptance %\nby position", no_wrap=True)
        for result in totals:
            length, num_drafts = result.acceptance_length, result.num_drafts
            table.add_row(
                result.name,
                f"{result.tokens_per_second:.1f}",
                f"[bold]{result.speedup_over(baseline):.2f}x[/bold]",
                f"{length:.2f}" if length is not None else "-",
                f"{result.num_draft_tokens / num_drafts:.1f}" if num_drafts else "-",
                f"{result.num_forward_passes}",
                " ".join(f"{100 * count / num_drafts:.0f}" for count in result.num_accepted_tokens_per_pos if count),
            )
        self.screen.print()
        self.screen.print(table)
        for result in totals[1:]:
            if reason := explain_slowdown(result, baseline):
                self.print_line(reason)
        if equal:
            passes = ", ".join(f"{result.num_forward_passes} with {result.name}" for result in totals[1:])
            self.print_line(
                f"All outputs are equal, token for token ({len(baseline.token_ids)} tokens). Forward passes: "
                f"{baseline.num_forward_passes} alone, {passes}."
            )

    def print_line(self, text: str) -> None:
        if self.screen.is_terminal:
            self.screen.print(text, markup=False)
        else:
            self.screen.out(text, highlight=False)


def describe_progress(result: DemoResult, baseline: DemoResult) -> str:
    """Returns the line below a pane."""
    if not result.token_ids:
        return "prefill"
    length = result.acceptance_length
    parts = [f"{len(result.token_ids)} tokens", *([f"AL {length:.2f}"] if length is not None else [])]
    parts.append(f"[bold]{result.tokens_per_second:.1f}/s[/bold]")
    if result.drafter is not None and baseline.token_ids:
        parts.append(f"[bold]{result.speedup_over(baseline):.2f}x[/bold]")
    return ", ".join(parts)


def explain_slowdown(result: DemoResult, baseline: DemoResult) -> str | None:
    """Compares the cost of a forward pass with its tokens. Returns None if speculative decoding is faster."""
    if result.speedup_over(baseline) >= 1 or not (result.num_decode_steps and baseline.num_decode_steps):
        return None
    cost = (result.seconds / result.num_forward_passes) / (baseline.seconds / baseline.num_forward_passes)
    share = 1 - result.num_drafts / result.num_decode_steps
    skipped = (
        f"; {share:.0%} of its decode steps had no draft tokens, because they cost too much" if share > 0.5 else ""
    )
    return (
        f"{result.name} is slower than the target alone on this machine: a forward pass takes {cost:.2f} times as long "
        f"and produces {len(result.token_ids) / result.num_forward_passes:.2f} tokens{skipped}."
    )
