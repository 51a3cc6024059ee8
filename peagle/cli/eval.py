"""`eval`: how much of drafters' work is accepted.

Knows flags and tables; nothing about how it is measured.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from peagle.cli.app import DeviceOption, DtypeOption, JsonOption, TargetArgument, app, console, examples
from peagle.cli.several import MultiValueCommand, split_commas
from peagle.config import EvalServerSettings, EvalSettings
from peagle.errors import UserError
from peagle.hub.resolve import DEFAULT_TARGET, resolve_target

if TYPE_CHECKING:
    from rich.table import Table

    from peagle.eval.acceptance import Drafted
    from peagle.results.schema import AcceptanceRow, Results

Number = TypeVar("Number", int, float)
TABLE_WIDTH = 140  # where there is no terminal to say
NAME_WIDTH = 32


@app.command(
    name="eval",
    cls=MultiValueCommand,
    epilog=examples(
        "peagle eval smollm2-135m --drafter smollm2-135m-p-eagle --data mt_bench humaneval gsm8k",
        "peagle eval TARGET -d P_EAGLE EAGLE3 --data prompts.jsonl -k 1 3 5 7 10 --temperature 0 1 --out eval.json",
        "peagle eval TARGET -d DRAFTER --data mt_bench --engine vllm --dtype float32",
        "peagle eval TARGET -d DRAFTER --data mt_bench --engine http://localhost:8000",
    ),
)
def evaluate(
    target: TargetArgument = DEFAULT_TARGET,
    drafter: Annotated[
        list[str] | None, typer.Option("--drafter", "-d", help="Folders, hub ids or built-in names.", metavar="D ...")
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="JSONL files, or mt_bench, humaneval, gsm8k, spec_bench, speed_bench.", metavar="NAME_OR_FILE ..."
        ),
    ] = None,
    draft_tokens: Annotated[
        list[str] | None,
        typer.Option(
            "-k",
            "--draft-tokens",
            help="Draft tokens a round.",
            metavar="K ...",
            show_default=" ".join(map(str, EvalSettings.draft_tokens)),
        ),
    ] = None,
    temperature: Annotated[
        list[str] | None, typer.Option(help="0 is greedy.", metavar="T ...", show_default="0")
    ] = None,
    engine: Annotated[
        str, typer.Option(help="embedded, reference (fp32, slow), vllm, or a server's address.", metavar="WHO")
    ] = "embedded",
    out: Annotated[
        Path | None, typer.Option(help="Keep the results; if it is there already, it is gone on with.", metavar="FILE")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer.")] = EvalSettings.max_tokens,
    limit: Annotated[int | None, typer.Option(help="Only the first rows of each set.", show_default="all")] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(help="Where sets lie that are named.", show_default="$PEAGLE_DATA, or data", metavar="DIR"),
    ] = None,
    skip_bad_rows: Annotated[bool, typer.Option("--skip-bad-rows", help="Leave rows out that make no sense.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Prompts as they are, without the chat template.")] = False,
    chat_template: Annotated[
        Path | None, typer.Option(help="A Jinja file, instead of the target's own template.", metavar="FILE")
    ] = None,
    each_k: Annotated[
        bool, typer.Option("--each-k", help="Real rounds for every K, instead of one pass for all: slower.")
    ] = EvalSettings.each_k,
    max_model_len: Annotated[
        int, typer.Option(help="Longest prompt and answer together.")
    ] = EvalSettings.max_model_len,
    context: Annotated[str, typer.Option(help="Where ranges of context begin, by commas.")] = ",".join(
        map(str, EvalSettings.context_edges)
    ),
    seed: Annotated[int, typer.Option(help="Of sampling and of intervals.")] = EvalSettings.seed,
    kv_cache_memory_bytes: Annotated[
        int | None, typer.Option(metavar="BYTES", help="Of the key-value cache.", show_default="by what is free")
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(help="The most answers at once.", show_default="by the device")
    ] = None,
    concurrency: Annotated[
        int, typer.Option(help="Answers between two readings of vLLM's or a server's counters; 1 tells each apart.")
    ] = EvalServerSettings.concurrency,
    model: Annotated[
        str | None, typer.Option(help="What the server calls it.", show_default="the one it has", metavar="NAME")
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="p-eagle or eagle3, of a server's drafter that lies nowhere here.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds a server has for a request.")] = EvalServerSettings.timeout_s,
    retries: Annotated[int, typer.Option(help="Of requests to a server.")] = EvalServerSettings.retries,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Measure acceptance: tokens a round, and how often each draft is accepted, by K and data set.

    The target answers once, and one pass of a drafter over what it said serves all K. A row of data is
    {"prompt": ...}, {"turns": [...]} or {"messages": [...]}, maybe with a "category". Answers that fell into a loop
    flatter a drafter, so each number is given with and without them.
    """
    settings = EvalSettings(
        draft_tokens=_numbers("-k", draft_tokens, int) or EvalSettings.draft_tokens,
        temperatures=_numbers("--temperature", temperature, float) or EvalSettings.temperatures,
        max_tokens=max_tokens,
        max_model_len=max_model_len,
        limit=limit,
        raw=raw,
        each_k=each_k,
        context_edges=_numbers("--context", [context], int),
        seed=seed,
        kv_cache_memory_bytes=kv_cache_memory_bytes,
    )
    server = None
    if "://" in engine:
        server = EvalServerSettings(engine, model, concurrency, timeout, retries)
    if not data:
        raise UserError("--data: give the prompts to measure on: JSONL files, or names like mt_bench")
    if not drafter and server is None:
        raise UserError("--drafter: give one at least")

    from peagle.eval.acceptance import Evaluation, Where
    from peagle.eval.datasets import open_datasets

    where = Where(
        engine,
        None if device == "auto" else device,
        None if dtype == "auto" else dtype,
        max_num_seqs,
        concurrency=concurrency,
        server=server,
    )
    sets = open_datasets(data, data_dir, limit, skip_bad_rows)
    drafters = _drafters(drafter or [], target, method, served=server is not None)
    bar = _Bar()
    job = Evaluation(target, drafters, sets, settings, where, out, bar.tell, bar.rows, chat_template)
    try:
        results = job.run()
    finally:
        bar.close()
    if as_json:
        from peagle.results.files import to_json

        print(json.dumps(to_json(results)))
    else:
        show(results)
    if out is not None:
        bar.say(f"{'wrote' if results.finished else 'kept what there is in'} {out}")
    if not results.finished:
        bar.say("interrupted: the same command goes on" if out is not None else "interrupted: --out FILE would keep it")
        raise typer.Exit(130)


def _drafters(names: Sequence[str], target: str, method: str | None, served: bool) -> list[Drafted]:
    from peagle.eval.acceptance import Drafted, open_drafters

    if served and len(names) > 1:
        raise UserError(f"--drafter {' '.join(names)}: a server has one")
    if served and method is not None:
        if method not in ("p-eagle", "eagle3"):
            raise UserError(f"--method {method}: must be p-eagle or eagle3")
        return [Drafted(names[0] if names else "the server's", method, None)]  # type: ignore[arg-type]
    if not names:
        raise UserError("--drafter: name the server's drafter, or say --method p-eagle or eagle3")
    return open_drafters(names, resolve_target(target))


def _numbers(flag: str, given: list[str] | None, kind: type[Number]) -> tuple[Number, ...]:
    """Rising, each once."""
    values = split_commas(given)
    try:
        return tuple(sorted({kind(value) for value in values}))
    except ValueError:
        wanted = "whole numbers" if kind is int else "numbers"
        raise UserError(f"{flag} {' '.join(values)}: must be {wanted}") from None


class _Bar:
    """How far it is, on standard error: a bar on a terminal, else a line for every finished row."""

    def __init__(self) -> None:
        self.screen = console(stderr=True)
        self.status: Any = self.screen.status("loading") if self.screen.is_terminal else None
        if self.status is not None:
            self.status.start()

    def tell(self, what: str, done: int, total: int) -> None:
        if self.status is not None:
            self.status.update(f"{what}: {done:,} of {total:,}")

    def rows(self, rows: Sequence[AcceptanceRow]) -> None:
        row = rows[0]
        length = f"{row.acceptance_length:.2f}" if row.acceptance_length is not None else "-"
        self.say(
            f"{row.drafter}  {row.dataset}  temperature {row.temperature:g}  K={row.num_speculative_tokens}: "
            f"acceptance length {length}"
        )

    def say(self, text: str) -> None:
        self.screen.print(text, markup=False, soft_wrap=True)

    def close(self) -> None:
        if self.status is not None:
            self.status.stop()


def show(results: Results) -> None:
    """Tables: the whole, then by category and by context, each at the largest K that all have."""
    from rich.console import Console

    screen = Console(highlight=False, emoji=False, width=None if sys.stdout.isatty() else TABLE_WIDTH)
    rows: list[AcceptanceRow] = results.rows
    if not rows:
        screen.print("nothing was measured")
        return
    s = results.settings
    screen.print(
        f"[bold]{s['target']}[/bold], {s['engine']} engine, {s['dtype']}, answers up to {s['max_tokens']} tokens"
    )
    screen.print(_whole(rows))
    parts: tuple[tuple[str, Callable[[AcceptanceRow], str | None]], ...] = (
        ("category", lambda row: row.category),
        (
            "context",
            lambda row: (
                f"{row.context_range[0]:,} - {row.context_range[1]:,}" if row.context_range is not None else None
            ),
        ),
    )
    for title, part in parts:
        if any(part(row) is not None for row in rows):
            screen.print(_by(title, part, rows))
    for warning in results.warnings:
        screen.print(f"[yellow]warning:[/yellow] {warning}", soft_wrap=True)


def _whole(rows: list[AcceptanceRow]) -> Table:
    from rich import box
    from rich.table import Table

    from peagle.eval.acceptance import whole

    calm = {_key(row): row for row in rows if row.looping_responses == "excluded"}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("drafter", "data", "T"):
        table.add_column(name)
    for name in ("K", "tokens a round", "95%", "no loops", "rounds"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("accepted % by position")
    table.add_column("of those reached %")
    before: tuple[str, str, float] | None = None
    sets, drafters = (list(dict.fromkeys(names)) for names in zip(*((r.dataset, r.drafter) for r in rows), strict=True))
    shown = sorted(
        filter(whole, rows),
        key=lambda r: (drafters.index(r.drafter), sets.index(r.dataset), r.temperature, r.num_speculative_tokens),
    )
    for row in shown:
        head = (row.drafter, row.dataset, row.temperature)
        if before is not None and head != before:
            table.add_row()
        names = (_short(row.drafter), row.dataset, f"{row.temperature:g}") if head != before else ("", "", "")
        other = calm.get(_key(row))
        table.add_row(
            *names,
            str(row.num_speculative_tokens),
            f"[bold]{_number(row.acceptance_length)}[/bold]",
            f"{row.acceptance_length_ci95[0]:.2f} - {row.acceptance_length_ci95[1]:.2f}"
            if row.acceptance_length_ci95 is not None
            else "",
            _number(other.acceptance_length) if other is not None else "",
            f"{row.num_drafts:,}",
            _percents(row.per_position_acceptance_rates),
            _percents(row.per_position_conditional_rates),
        )
        before = head
    return table


def _by(title: str, part: Callable[[AcceptanceRow], str | None], rows: list[AcceptanceRow]) -> Table:
    """Tokens a round for every part of a data set, a column for every K."""
    from rich import box
    from rich.table import Table

    some = [row for row in rows if part(row) is not None]
    ks = sorted({row.num_speculative_tokens for row in some})
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=f"tokens a round, by {title}", title_justify="left")
    for name in ("drafter", "data", "T", title):
        table.add_column(name)
    for k in ks:
        table.add_column(f"K={k}", justify="right")
    lines: dict[tuple[str, str, float, str], dict[int, float | None]] = {}
    for row in some:
        line = (row.drafter, row.dataset, row.temperature, part(row) or "")
        lines.setdefault(line, {})[row.num_speculative_tokens] = row.acceptance_length
    before: tuple[str, str, float] | None = None
    for (drafter, data, temperature, value), by_k in lines.items():
        head = (drafter, data, temperature)
        names = (_short(drafter), data, f"{temperature:g}") if head != before else ("", "", "")
        table.add_row(*names, value, *(_number(by_k.get(k)) for k in ks))
        before = head
    return table


def _key(row: AcceptanceRow) -> tuple[str, str, float, int]:
    return row.drafter, row.dataset, row.temperature, row.num_speculative_tokens


def _short(name: str) -> str:
    return name if len(name) <= NAME_WIDTH else f"...{name[3 - NAME_WIDTH :]}"


def _number(value: float | None) -> str:
    return f"{value:.2f}" if value is not None else "-"


def _percents(shares: Sequence[float | None]) -> str:
    return " ".join(f"{share * 100:.0f}" if share is not None else "-" for share in shares)
