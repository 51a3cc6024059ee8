"""The verbs `eval`, `bench` and `report`."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.table import Table

from peagle.cli.app import DRAFTERS, JSON, PROMPT_FILES, RESUMED_OUT, TARGET_HELP, TargetArgument, print_tables, verb
from peagle.config import (
    BenchEngineSettings,
    BenchServerSettings,
    BenchSettings,
    EvalServerSettings,
    EvalSettings,
    Method,
    ReportSettings,
    SpeculationMethod,
)
from peagle.config.engine import AUTO_K_HELP, K_FLAGS, parse_ks
from peagle.config.options import device_option, dtype_option, option
from peagle.display import ProgressBar
from peagle.errors import UserError
from peagle.hub.resolve import DEFAULT_TARGET, resolve_target

if TYPE_CHECKING:
    from peagle.results.schema import AcceptanceRow, Results


@verb(
    "peagle eval smollm2-135m --drafter smollm2-135m-p-eagle --data mt_bench humaneval gsm8k",
    "peagle eval TARGET -d P_EAGLE EAGLE3 --data prompts.jsonl -k 1 3 5 7 10 --temperature 0 1 --out eval.json",
    "peagle eval TARGET -d DRAFTER --data mt_bench --engine vllm --dtype float32",
    "peagle eval TARGET -d DRAFTER --data mt_bench --engine http://localhost:8000",
    name="eval",
    several=True,
)
def evaluate(
    settings: EvalSettings,
    server_settings: Annotated[EvalServerSettings, "concurrency", "model", "timeout_s"],
    target: TargetArgument = DEFAULT_TARGET,
    drafter: tuple[str, ...] = DRAFTERS,
    data: tuple[str, ...] = PROMPT_FILES,
    data_dir: Path | None = option(
        None, "Folder of the named data sets.", show_default="$PEAGLE_DATA, or data", metavar="DIR"
    ),
    skip_bad_rows: bool = option(False, "Skip invalid rows."),
    chat_template: Path | None = option(None, "Jinja file that replaces the target's chat template.", metavar="FILE"),
    engine: str = option(
        "embedded", "embedded, reference (plain fp32), vllm (in this process), or the URL of a server.", panel="Engine"
    ),
    max_num_seqs: int | None = option(None, "Maximum number of requests in a batch.", show_default="by the device"),
    dtype: str | None = dtype_option(),
    device: str | None = device_option(),
    method: Method | None = option(
        None, "p-eagle or eagle3, if the server's drafter is not available here.", panel="Server"
    ),
    out: Path | None = RESUMED_OUT,
    as_json: bool = JSON,
) -> None:
    """Measure acceptance length and per-position acceptance rates by K and data set.

    The target answers every prompt once, and one drafter pass over the responses serves all K. A row of data is
    {"prompt": ...}, {"turns": [...]} or {"messages": [...]}, optionally with a "category". Looping responses are easy
    to draft, so every number is given with and without them.
    """
    server = replace(server_settings, url=engine) if "://" in engine else None
    if not data:
        raise UserError("--data: give JSONL files with prompts, or names such as mt_bench")
    if not drafter and (server is None or method is None):
        raise UserError("--drafter: give at least one; of a server, --method p-eagle or eagle3 is enough")
    if server is not None and len(drafter) > 1:
        raise UserError(f"--drafter {' '.join(drafter)}: a server has one drafter")

    from peagle.eval.acceptance import EvalEngine, Evaluation, open_drafters
    from peagle.eval.conversations import EvalDrafter
    from peagle.eval.datasets import open_datasets
    from peagle.results.view import build_acceptance_tables

    concurrency = server_settings.concurrency
    eval_engine = EvalEngine(engine, device, dtype, max_num_seqs, concurrency=concurrency, server=server)
    datasets = open_datasets(data, data_dir, settings.limit, skip_bad_rows)
    if server is not None and method is not None:
        drafters = [EvalDrafter(drafter[0] if drafter else "the server's", method, None)]
    else:
        drafters = open_drafters(drafter, resolve_target(target))
    bar = ProgressBar()

    def print_row(rows: list[AcceptanceRow]) -> None:
        row = rows[0]  # of the whole data set
        labels = f"{row.drafter}  {row.dataset}  temperature {row.temperature:g}  K={row.num_speculative_tokens}"
        length = f"{row.acceptance_length:.2f}" if row.acceptance_length is not None else "-"
        bar.print(f"{labels}: acceptance length {length}")

    evaluation = Evaluation(
        target, drafters, datasets, settings, eval_engine, out, bar.update, print_row, chat_template
    )
    with bar:
        results = evaluation.run()
    _print_outcome(results, out, as_json, build_acceptance_tables(results))


@verb(
    "peagle bench -d smollm2-135m-p-eagle -k 3 7 --data mt_bench --concurrency 1 8",
    "peagle bench TARGET -d P_EAGLE EAGLE3 -k 3 7 auto --data chats.jsonl.gz --concurrency 1 8 64 --out a.json",
    "peagle bench TARGET -d P_EAGLE -k 7 --engine vllm --data chats.jsonl.gz --concurrency 1 8 64 --out a.json",
    "peagle bench --engine http://localhost:8000 --method p-eagle -k 7 --data chats.jsonl --request-rate 2 4",
    several=True,
)
def bench(
    settings: BenchSettings,
    engine_settings: BenchEngineSettings,
    server_settings: BenchServerSettings,
    target: Annotated[
        str | None, typer.Argument(help=TARGET_HELP, metavar="TARGET", show_default=DEFAULT_TARGET)
    ] = None,
    drafter: tuple[str, ...] = DRAFTERS,
    num_speculative_tokens: tuple[int | Literal["auto"], ...] = option(
        (), AUTO_K_HELP, flags=K_FLAGS, parse=parse_ks, metavar="K ...", show_default="auto"
    ),
    baseline: bool = option(True, "Also measure the target without a drafter."),
    data: tuple[str, ...] = PROMPT_FILES,
    engine: str = option("embedded", "embedded, vllm (in this process), or the URL of a server.", panel="Engine"),
    method: SpeculationMethod | None = option(
        None, "Speculation of the server: none, eagle3 or p-eagle.", panel="Server"
    ),
    out: Path | None = RESUMED_OUT,
    as_json: bool = JSON,
) -> None:
    """Measure throughput and latency (TTFT, TPOT, ITL, end to end) under load.

    Runs the target without a drafter, then with every drafter and K: on the embedded engine, on vLLM in this process,
    or on an OpenAI-compatible server. Every load is warmed up with the same prompts. Failed requests are counted by
    reason and give exit status 1. Ctrl-C keeps finished repeats in --out; the same command resumes.
    """
    ks = num_speculative_tokens
    if "://" in engine:
        from peagle.bench.run import server_variant
        from peagle.bench.workload import build_workload

        if drafter:
            raise UserError(f"--drafter {' '.join(drafter)}: the server has its own; describe it with --method and -k")
        if len(ks) > 1 or "auto" in ks:
            raise UserError("-k: give one number, the draft tokens of the server")
        k = ks[0] if ks else None
        assert k != "auto"
        server = replace(server_settings, url=engine, method=method or "none", num_speculative_tokens=k)
        workload = build_workload(data, settings)
        variants, shared_settings = [server_variant(server, target)], {}
    else:
        from peagle.bench.run import EngineVariants

        for flag, value in (("--model", server_settings.model), ("--method", method)):
            if value is not None:
                raise UserError(f"{flag} {value}: applies to a server only; give --engine URL")
        if ks and not drafter:
            raise UserError("-k: needs a --drafter")
        engines = EngineVariants(target or DEFAULT_TARGET, drafter, ks or ["auto"], baseline, engine_settings, engine)
        workload = engines.build_workload(data, settings)
        variants, shared_settings = engines.build(workload, settings), engines.shared_settings

    from peagle.bench.run import run_bench
    from peagle.results.view import build_bench_tables

    with ProgressBar() as progress:
        results = run_bench(variants, workload, settings, progress, out, shared_settings)
    _print_outcome(results, out, as_json, build_bench_tables(results.rows))
    if any(repeat.failed for row in results.rows for repeat in row.repeats):
        raise typer.Exit(1)


def _print_outcome(results: Results, out: Path | None, as_json: bool, tables: list[Table]) -> None:
    from peagle.results.files import to_json

    if as_json:
        print(json.dumps(to_json(results)))
    else:
        print_tables(*tables)
    for warning in results.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if out is not None:
        print(f"wrote {out}", file=sys.stderr)
    if not results.finished:
        hint = "the same command resumes" if out is not None else "give --out FILE to be able to resume"
        print(f"interrupted; {hint}", file=sys.stderr)
        raise typer.Exit(130)


@verb(
    "peagle report eval.json bench.json --out report.html",
    "peagle report results/*.json --out report.html --markdown report.md",
    "peagle report bench.json --markdown report.md --title 'K on our GPUs'",
)
def report(
    results: Annotated[list[Path], typer.Argument(help="Results of eval, bench, tune or plan.", metavar="FILE")],
    settings: ReportSettings,
    out: Path | None = option(
        None, "HTML file.", panel="Output", show_default="report.html, unless --markdown is passed"
    ),
    markdown: Path | None = option(None, "Markdown file: tables instead of charts."),
    as_json: bool = JSON,
) -> None:
    """Write a page with charts, tables, a recommendation and the provenance of the results.

    Runs with different prompts, lengths, loads or machines are never compared: each set has its own section.
    """
    from peagle.report.build import write_report

    if out is None and markdown is None:
        out = Path("report.html")
    page = write_report(results, out, markdown, settings)
    if as_json:
        files = {"html": str(out) if out else None, "markdown": str(markdown) if markdown else None}
        findings = {name: getattr(page, name) for name in ("recommendations", "warnings", "missing")}
        print(json.dumps(files | findings))
        return
    for line in (*page.recommendations, *(f"warning: {warning}" for warning in page.warnings)):
        print(line)
    for path in (out, markdown):
        if path is not None:
            print(f"wrote {path}")
