"""`peagle demo`: the target alone, with an EAGLE-3 drafter and with a P-EAGLE drafter, side by side.

The engines run in turns of one step. The one that has used the least time goes next, so that the texts on the screen
grow as if each engine had the machine to itself. The texts are growing panes in a terminal, and lines elsewhere.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from peagle.cli.app import console, verb
from peagle.config import EngineSettings, SamplingParams
from peagle.display import DRAFT_STYLE, TARGET_STYLE
from peagle.engine.detokenizer import Detokenizer
from peagle.errors import UserError
from peagle.hub.resolve import DEFAULT_DRAFTER, DEFAULT_TARGET, EAGLE3_DRAFTER

if TYPE_CHECKING:
    from peagle.engine.llm import LLM
    from peagle.engine.request import Request

TARGET_NAME = "SmolLM2-135M"
METHODS = (
    ("target alone", None),
    ("with EAGLE-3", EAGLE3_DRAFTER),
    ("with P-EAGLE", DEFAULT_DRAFTER),
)  # the baseline first
PROMPTS = (
    "Write a Python function that returns the n-th Fibonacci number.",
    "Why is the sky blue?",
    "Give three tips for a good night's sleep.",
)
PARAMS = SamplingParams(max_tokens=96)
ENGINE = EngineSettings(max_num_seqs=1, max_model_len=2048, kv_cache_memory_bytes=1 << 30, enable_prefix_caching=False)
SIDE_BY_SIDE_WIDTH = 120  # terminal columns needed for panes side by side
PLAIN_WIDTH = 100  # without a terminal
REDRAW_S = 0.07


@dataclass(frozen=True)
class DemoResult:
    """The result of one method on one prompt, or on all of them."""

    token_ids: list[int]
    num_forward_passes: int  # of the target: the prefill and the decode steps
    num_drafts: int  # decode steps with draft tokens
    num_accepted_tokens_per_pos: list[int]
    seconds: float

    @property
    def acceptance_length(self) -> float | None:
        return 1 + sum(self.num_accepted_tokens_per_pos) / self.num_drafts if self.num_drafts else None

    @property
    def tokens_per_second(self) -> float:
        return len(self.token_ids) / self.seconds if self.seconds else 0.0

    def speedup_over(self, baseline: DemoResult) -> float:
        return self.tokens_per_second / baseline.tokens_per_second if baseline.tokens_per_second else 0.0


class DemoEngine:
    """One method: an engine, and its requests with the seconds that each has taken. One request runs at a time."""

    def __init__(self, name: str, drafter: str | None, llm: LLM) -> None:
        self.name, self.drafter, self.llm = name, drafter, llm
        self.requests: list[Request] = []
        self.seconds: list[float] = []

    def start_request(self, prompt_token_ids: list[int], params: SamplingParams) -> None:
        self.requests.append(self.llm.add_request(prompt_token_ids, params).requests[0])
        self.seconds.append(0.0)

    @property
    def finished(self) -> bool:
        return self.requests[-1].finish_reason is not None

    def step(self) -> None:
        started = time.perf_counter()
        self.llm.step()
        if self.llm.model_runner.device.type == "cuda":
            import torch

            torch.cuda.synchronize()  # drafting must not run on the next engine's clock
        self.seconds[-1] += time.perf_counter() - started

    def result(self, first: int = -1) -> DemoResult:
        """The result so far, of the requests from `first` on."""
        requests = self.requests[first:]
        return DemoResult(
            [token_id for request in requests for token_id in request.output_token_ids],
            sum(1 + request.num_decode_steps for request in requests),
            sum(request.num_drafts for request in requests),
            [sum(counts) for counts in zip(*(r.num_accepted_tokens_per_pos for r in requests), strict=True)],
            sum(self.seconds[first:]),
        )


def run_in_turns(engines: Sequence[DemoEngine], after_step: Callable[[], None]) -> None:
    """Runs all requests to their end. Calls `after_step` between steps, on no engine's clock."""
    while unfinished := [engine for engine in engines if not engine.finished]:
        min(unfinished, key=lambda engine: engine.seconds[-1]).step()
        after_step()


class DemoPane:
    """The output of one engine so far, with its draft tokens marked."""

    def __init__(self, engine: DemoEngine, decode: Callable[[list[int]], str]) -> None:
        self.engine = engine
        self.parts: list[tuple[str, bool]] = []
        self._detokenizer = Detokenizer(decode)

    def update(self) -> None:
        request = self.engine.requests[-1]
        new = slice(self._detokenizer.num_tokens, None)
        texts = self._detokenizer.add_separately(request.output_token_ids[new], self.engine.finished)
        self.parts += zip(texts, request.is_draft_token[new], strict=True)


def render_panes(screen: Console, panes: Sequence[DemoPane], draft_style: str) -> Table:
    """Fits all panes to the terminal's current size."""
    num_panes, side_by_side = len(panes), screen.width >= SIDE_BY_SIDE_WIDTH
    width = screen.width // num_panes if side_by_side else screen.width
    pane_height = screen.height - 4 if side_by_side else (screen.height - 3) // num_panes
    wrapped = [
        Text.assemble(*((text, draft_style if drafted else TARGET_STYLE) for text, drafted in pane.parts)).wrap(
            screen, width - 4
        )
        for pane in panes
    ]
    num_lines = min(max(2, pane_height - 2), max(map(len, wrapped)))
    baseline = panes[0].engine.result()

    def describe_progress(engine: DemoEngine) -> str:
        result = engine.result()
        if not result.token_ids:
            return "prefill"
        text = f"{len(result.token_ids)} tokens, [bold]{result.tokens_per_second:.1f}/s[/bold]"
        if result.acceptance_length is not None:
            text += f", AL {result.acceptance_length:.2f}"
        return f"{text}, [bold]{result.speedup_over(baseline):.2f}x[/bold]" if engine.drafter else text

    panels = [
        Panel(
            Text("\n").join(lines[-num_lines:]),
            title=f"[bold]{pane.engine.name}[/bold]",
            title_align="left",
            subtitle=describe_progress(pane.engine),
            subtitle_align="right",
            border_style="dim" if not pane.engine.finished else "green" if pane.engine.drafter else "blue",
            height=num_lines + 2,
        )
        for pane, lines in zip(panes, wrapped, strict=True)
    ]
    grid = Table.grid(expand=True)
    for _ in range(num_panes if side_by_side else 1):
        grid.add_column(ratio=1)
    for row in [panels] if side_by_side else [[panel] for panel in panels]:
        grid.add_row(*row)
    return grid


class DemoView:
    """The whole demo on standard output."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self.screen = Console(highlight=False, emoji=False, width=None if sys.stdout.isatty() else PLAIN_WIDTH)
        self.draft_style = "underline" if self.screen.no_color else DRAFT_STYLE
        self._decode = decode

    @contextmanager
    def show_prompt(self, title: str, engines: Sequence[DemoEngine]) -> Iterator[Callable[[], None]]:
        """Shows one prompt. Yields the function to call between steps."""
        if not self.screen.is_terminal:
            self.print_line(f"\n{title}")
            yield lambda: None
            texts = {self._decode(engine.requests[-1].output_token_ids): engine.name for engine in reversed(engines)}
            for text, name in reversed(texts.items()):
                self.print_line(f"{'' if len(texts) == 1 else f'{name}:'}\n{text}")
            return
        panes = [DemoPane(engine, self._decode) for engine in engines]
        self.screen.print()
        self.screen.rule(Text(title, style="bold", overflow="ellipsis", no_wrap=True), align="left", style="dim")
        last_redraw, render = 0.0, partial(render_panes, self.screen, panes, self.draft_style)
        with Live(get_renderable=render, console=self.screen, auto_refresh=False) as live:

            def update() -> None:
                nonlocal last_redraw
                for pane in panes:
                    pane.update()
                if time.perf_counter() - last_redraw > REDRAW_S or all(engine.finished for engine in engines):
                    live.refresh()
                    last_redraw = time.perf_counter()

            yield update

    def show_totals(self, engines: Sequence[DemoEngine]) -> None:
        """Prints the table over all prompts."""
        totals = [engine.result(0) for engine in engines]
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))  # fits 80 columns
        table.add_column("", no_wrap=True)
        for head in ("tokens/s", "speedup", "acceptance\nlength", "tokens", "forward\npasses"):
            table.add_column(head, justify="right", no_wrap=True)
        table.add_column("acceptance %\nby position", no_wrap=True)
        for engine, result in zip(engines, totals, strict=True):
            length, counts = result.acceptance_length, result.num_accepted_tokens_per_pos
            table.add_row(
                engine.name,
                f"{result.tokens_per_second:.1f}",
                f"[bold]{result.speedup_over(totals[0]):.2f}x[/bold]",
                f"{length:.2f}" if length is not None else "-",
                f"{len(result.token_ids)}",
                f"{result.num_forward_passes}",
                " ".join(f"{100 * count / result.num_drafts:.0f}" for count in counts if count),
            )
        self.screen.print()
        self.screen.print(table)

    def print_line(self, text: str) -> None:
        self.screen.print(text, markup=False, soft_wrap=True)


@verb("peagle demo", 'peagle demo "Tell me a story." "Count to 20." --max-tokens 200', "peagle demo -k 7")
def demo(
    prompts: Annotated[list[str] | None, typer.Argument(help="Prompts.", show_default="three examples")] = None,
    params: Annotated[SamplingParams, "max_tokens"] = PARAMS,
    settings: Annotated[EngineSettings, "num_speculative_tokens", "device", "dtype"] = ENGINE,
) -> None:
    """See speculative decoding at work: SmolLM2-135M alone, with an EAGLE-3 drafter and with a P-EAGLE drafter."""
    texts = tuple(prompts or PROMPTS)
    if any(not text.strip() for text in texts):
        raise UserError("the prompt is empty")
    with console(stderr=True).status(f"loading {TARGET_NAME}") as status:
        prompt_token_ids, decode, engines = _build_engines(texts, settings, lambda text: status.update(text))
    dtype, device = engines[0].llm.dtype, str(engines[0].llm.model_runner.device)
    view = DemoView(decode)
    view.print_line(
        f"{TARGET_NAME} in {dtype} on {device}, K = {settings.num_speculative_tokens}. Each engine has its own clock."
    )
    if view.screen.is_terminal:
        view.screen.print(Text.assemble("Accepted draft tokens look ", ("like this", view.draft_style), "."))
    different: list[int] = []  # prompts
    for number, (text, token_ids) in enumerate(zip(texts, prompt_token_ids, strict=True), 1):
        for engine in engines:
            engine.start_request(token_ids, params)
        with view.show_prompt(f"{number} of {len(texts)}: {text}", engines) as update:
            run_in_turns(engines, update)
        if len({tuple(engine.requests[-1].output_token_ids) for engine in engines}) > 1:
            different.append(number)
    view.show_totals(engines)
    if not different:
        view.print_line("All outputs are equal, token for token.")
    if different and dtype == "float32":
        raise UserError(f"the outputs of prompt {different[0]} differ: this is a bug, please report it")
    if different:
        view.print_line(
            f"The outputs of prompt {different[0]} differ: in {dtype} two tokens may tie, and a batch of another size "
            "may round to the other one. In float32 the outputs are equal (--dtype float32)."
        )


def _build_engines(
    texts: Sequence[str], settings: EngineSettings, report_progress: Callable[[str], None]
) -> tuple[list[list[int]], Callable[[list[int]], str], list[DemoEngine]]:
    """Returns the encoded prompts, a decode function, and one warmed-up engine per method."""
    import torch

    from peagle.checkpoints.target import encode_prompt
    from peagle.engine.llm import LLM

    on_cpu = settings.device == "cpu" or (settings.device is None and not torch.cuda.is_available())
    if settings.dtype is None and on_cpu:
        settings = replace(settings, dtype="float32")
    engines = list[DemoEngine]()
    for name, drafter in METHODS:
        if drafter is not None:
            report_progress(f"loading {drafter} and timing decode steps")
        k = settings.num_speculative_tokens if drafter is not None else "auto"
        shared_target = engines[0].llm.target if engines else DEFAULT_TARGET
        llm = LLM(shared_target, drafter, **vars(replace(settings, num_speculative_tokens=k)))
        llm.max_in_flight_steps = 0  # a step returns its own tokens
        llm.generate([encode_prompt(llm.tokenizer, "Hello", raw=False)], SamplingParams(max_tokens=4))
        engines.append(DemoEngine(name, drafter, llm))
    tokenizer = engines[0].llm.tokenizer
    prompts = [encode_prompt(tokenizer, text, raw=False) for text in texts]
    return prompts, partial(tokenizer.decode, skip_special_tokens=True), engines
