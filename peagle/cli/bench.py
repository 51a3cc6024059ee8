"""`peagle bench`: throughput and latency under load."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar, get_args

import typer

from peagle.cli.app import (
    DATA_PANEL,
    ENGINE_PANEL,
    MODEL_PANEL,
    OUTPUT_PANEL,
    SAMPLING_PANEL,
    SERVER_PANEL,
    TARGET_HELP,
    DeviceOption,
    DtypeOption,
    JsonOption,
    app,
    console,
    examples,
    parse_num_speculative_tokens,
)
from peagle.cli.several import MultiValueCommand, split_commas
from peagle.config import BenchEngineSettings, BenchServerSettings, BenchSettings, SpeculationMethod
from peagle.errors import UserError
from peagle.hub.resolve import DEFAULT_TARGET

if TYPE_CHECKING:
    from peagle.bench.run import BenchOutcome, BenchVariant
    from peagle.bench.workload import Workload

LOAD_PANEL = "Load"
MAX_PRINTED_WARNINGS = 12
Number = TypeVar("Number", int, float)


@app.command(
    cls=MultiValueCommand,
    epilog=examples(
        "peagle bench -d smollm2-135m-p-eagle -k 3 7 --data mt_bench --concurrency 1 8",
        "peagle bench TARGET -d P_EAGLE EAGLE3 -k 3 7 auto --data chats.jsonl.gz --concurrency 1 8 64 --out a.json",
        "peagle bench TARGET -d P_EAGLE -k 7 --engine vllm --data chats.jsonl.gz --concurrency 1 8 64 --out a.json",
        "peagle bench --engine http://localhost:8000 --method p-eagle -k 7 --data chats.jsonl --request-rate 2 4",
    ),
)
def bench(
    target: Annotated[
        str | None, typer.Argument(help=TARGET_HELP, metavar="TARGET", show_default=DEFAULT_TARGET)
    ] = None,
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            "--drafter",
            "-d",
            help="Drafters: folders, Hugging Face ids or built-in names.",
            metavar="DRAFTER ...",
            rich_help_panel=MODEL_PANEL,
        ),
    ] = None,
    num_speculative_tokens: Annotated[
        list[str] | None,
        typer.Option(
            "--num-speculative-tokens",
            "-k",
            help="Draft tokens per decode step (K); auto picks K for the current load.",
            metavar="K ...",
            show_default="auto",
            rich_help_panel=MODEL_PANEL,
        ),
    ] = None,
    baseline: Annotated[
        bool, typer.Option(help="Also measure the target without a drafter.", rich_help_panel=MODEL_PANEL)
    ] = True,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="Prompts: JSONL files, or mt_bench, humaneval, gsm8k, spec_bench, speed_bench.",
            metavar="NAME_OR_FILE ...",
            rich_help_panel=DATA_PANEL,
        ),
    ] = None,
    random_input_len: Annotated[
        int | None,
        typer.Option(help="Random prompts of this many tokens, with EOS ignored.", rich_help_panel=DATA_PANEL),
    ] = None,
    num_prompts: Annotated[
        int | None,
        typer.Option(
            help="Requests per repeat.",
            show_default="32, or twice the largest concurrency",
            rich_help_panel=DATA_PANEL,
        ),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Send prompts without a chat template.", rich_help_panel=DATA_PANEL)
    ] = False,
    concurrency: Annotated[
        list[str] | None,
        typer.Option(
            help="Closed loop: requests in flight.", metavar="N ...", show_default="1 8", rich_help_panel=LOAD_PANEL
        ),
    ] = None,
    request_rate: Annotated[
        list[str] | None,
        typer.Option(
            help="Open loop: requests per second, Poisson arrivals.", metavar="RATE ...", rich_help_panel=LOAD_PANEL
        ),
    ] = None,
    repeats: Annotated[
        int, typer.Option(help="Repeats of every load, for confidence intervals.", rich_help_panel=LOAD_PANEL)
    ] = BenchSettings.repeats,
    num_warmups: Annotated[
        int | None,
        typer.Option(
            help="Requests before the first repeat of a load.", show_default="all prompts", rich_help_panel=LOAD_PANEL
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(help="Maximum output tokens of a request.", rich_help_panel=SAMPLING_PANEL)
    ] = BenchSettings.max_tokens,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Always generate --max-tokens.", rich_help_panel=SAMPLING_PANEL)
    ] = False,
    temperature: Annotated[
        float, typer.Option(help="Sampling temperature; 0 is greedy.", rich_help_panel=SAMPLING_PANEL)
    ] = BenchSettings.temperature,
    seed: Annotated[
        int, typer.Option(help="Seed of arrivals, random prompts and sampling.", rich_help_panel=SAMPLING_PANEL)
    ] = BenchSettings.seed,
    engine: Annotated[
        str,
        typer.Option(help="embedded, vllm (in this process), or the URL of a server.", rich_help_panel=ENGINE_PANEL),
    ] = "embedded",
    max_num_seqs: Annotated[
        int | None,
        typer.Option(
            help="Maximum number of requests in a batch.", show_default="by the load", rich_help_panel=ENGINE_PANEL
        ),
    ] = None,
    gpu_memory_utilization: Annotated[
        float, typer.Option(help="Fraction of the GPU's memory to use.", rich_help_panel=ENGINE_PANEL)
    ] = BenchEngineSettings.gpu_memory_utilization,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    model: Annotated[
        str | None,
        typer.Option(help="Model name on the server.", show_default="its only model", rich_help_panel=SERVER_PANEL),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(help="Speculation of the server: none, eagle3 or p-eagle.", rich_help_panel=SERVER_PANEL),
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Time limit of a request, in seconds.", rich_help_panel=SERVER_PANEL)
    ] = BenchServerSettings.total_s,
    out: Annotated[
        Path | None,
        typer.Option(help="Result file; an existing one is resumed.", metavar="FILE", rich_help_panel=OUTPUT_PANEL),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure throughput and latency (TTFT, TPOT, ITL, end to end) under load.

    Runs the target without a drafter, then with every drafter and K: on the embedded engine, on vLLM in this process,
    or on an OpenAI-compatible server. Every load is warmed up with the same prompts. Failed requests are counted by
    reason and give exit status 1. Ctrl-C keeps finished repeats in --out; the same command resumes.
    """
    settings = BenchSettings(
        concurrency=tuple(_parse_number("--concurrency", text, int) for text in split_commas(concurrency)),
        request_rates=tuple(_parse_number("--request-rate", text, float) for text in split_commas(request_rate)),
        num_prompts=num_prompts,
        repeats=repeats,
        num_warmups=num_warmups,
        max_tokens=max_tokens,
        ignore_eos=ignore_eos,
        temperature=temperature,
        random_input_len=random_input_len,
        raw=raw,
        seed=seed,
    )
    ks = [parse_num_speculative_tokens(text) for text in split_commas(num_speculative_tokens)]
    if "://" in engine:
        from peagle.bench.server import DeclaredSpeculation
        from peagle.bench.variants import ServerVariant

        for flag, value in (("TARGET", target), ("--drafter", " ".join(drafter or ()) or None)):
            if value is not None:
                raise UserError(f"{flag} {value}: the server has its own; describe it with --method and -k")
        if len(ks) > 1 or "auto" in ks:
            raise UserError("-k: give one number, the draft tokens of the server")
        k = ks[0] if ks else None
        assert k != "auto"
        server = ServerVariant(
            BenchServerSettings(engine, model, total_s=timeout), DeclaredSpeculation(_parse_method(method), k)
        )
        workload = server.build_workload(split_commas(data), settings)
        outcome = _run(server.build(), workload, settings, out, {})
    else:
        from peagle.bench.variants import EngineVariants

        for flag, value in (("--model", model), ("--method", method)):
            if value is not None:
                raise UserError(f"{flag} {value}: applies to a server only; give --engine URL")
        if ks and not drafter:
            raise UserError("-k: needs a --drafter")
        engine_settings = BenchEngineSettings(
            device=None if device == "auto" else device,
            dtype=None if dtype == "auto" else dtype,
            max_num_seqs=max_num_seqs,
            gpu_memory_utilization=gpu_memory_utilization,
        )
        variants = EngineVariants(
            target or DEFAULT_TARGET, split_commas(drafter), ks or ["auto"], baseline, engine_settings, engine
        )
        workload = variants.build_workload(split_commas(data), settings)
        outcome = _run(variants.build(workload, settings), workload, settings, out, variants.shared_settings)
    _print_outcome(outcome, out, as_json)


def _run(
    variants: list[BenchVariant],
    workload: Workload,
    settings: BenchSettings,
    out: Path | None,
    shared_settings: dict[str, object],
) -> BenchOutcome:
    from peagle.bench.run import run_bench
    from peagle.bench.view import BenchProgress

    progress = BenchProgress()
    try:
        return run_bench(variants, workload, settings, progress, out, shared_settings)
    finally:
        progress.close()


def _print_outcome(outcome: BenchOutcome, out: Path | None, as_json: bool) -> None:
    from peagle.bench.view import TABLE_WIDTH, build_tables
    from peagle.results.files import to_json

    results = outcome.results
    if as_json:
        print(json.dumps(to_json(results)))
    elif results.rows:
        screen = console()
        if not screen.is_terminal:
            screen.width = max(screen.width, TABLE_WIDTH)
        screen.print(*build_tables(results.rows))
    for warning in results.warnings[:MAX_PRINTED_WARNINGS]:
        print(f"warning: {warning}", file=sys.stderr)
    if len(results.warnings) > MAX_PRINTED_WARNINGS:
        more = len(results.warnings) - MAX_PRINTED_WARNINGS
        print(f"warning: {more} more warnings are in --out and --json", file=sys.stderr)
    resume = f"the same command resumes {out}" if out is not None else "give --out FILE to be able to resume"
    if out is not None and not as_json:
        print(f"wrote {out}", file=sys.stderr)
    if outcome.interrupted:
        print(f"interrupted; {resume}", file=sys.stderr)
        raise typer.Exit(130)
    if outcome.gave_up_at is not None:
        print(f"gave up at {outcome.gave_up_at}: too many consecutive failures; {resume}", file=sys.stderr)
        raise typer.Exit(1)
    if any(repeat.failed for row in results.rows for repeat in row.repeats):
        raise typer.Exit(1)


def _parse_method(text: str | None) -> SpeculationMethod:
    if text is None:
        return "none"
    if text not in get_args(SpeculationMethod):
        raise UserError(f"--method {text}: must be {', '.join(get_args(SpeculationMethod))}")
    return text  # type: ignore[return-value]


def _parse_number(flag: str, text: str, kind: Callable[[str], Number]) -> Number:
    try:
        return kind(text)
    except ValueError:
        raise UserError(f"{flag} {text}: must be a {'whole number' if kind is int else 'number'}") from None
