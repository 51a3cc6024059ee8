"""`peagle tune`: measures decode steps on this machine and prints the best K per concurrency."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from peagle.cli.app import (
    DRAFTER_HELP,
    ENGINE_PANEL,
    MODEL_PANEL,
    OUTPUT_PANEL,
    DeviceOption,
    DtypeOption,
    JsonOption,
    TargetOption,
    app,
    console,
    examples,
)
from peagle.cli.plan import AcceptanceOption, LoadOption, parse_int_list, print_tables
from peagle.cli.several import MultiValueCommand
from peagle.config import DEFAULT_NUM_LAYERS, TuneSettings
from peagle.errors import UserError
from peagle.hub.resolve import DEFAULT_TARGET, resolve_drafter, shipped_drafters
from peagle.speculative.adaptive_k import AdaptiveK, StepCostTable

if TYPE_CHECKING:
    from peagle.engine.llm import LLM
    from peagle.planning.acceptance import AcceptanceCurve
    from peagle.planning.tuning import CostTableKey

DEFAULTS = TuneSettings()
EngineOption = partial(typer.Option, rich_help_panel=ENGINE_PANEL)
OutputOption = partial(typer.Option, rich_help_panel=OUTPUT_PANEL)


@app.command(
    cls=MultiValueCommand,
    epilog=examples(
        "peagle tune -d smollm2-135m-p-eagle --cost-table costs.json",
        "peagle tune -t TARGET -d DRAFTER --acceptance-rates 0.7,0.5,0.35 --concurrency 1,16,64",
        "peagle tune -t TARGET -d DRAFTER --eval eval.json --context-len 1024 --cost-table costs.json --out tune.json",
    ),
)
def tune(
    drafter: Annotated[
        str, typer.Option("--drafter", "-d", help=DRAFTER_HELP, metavar="DRAFTER", rich_help_panel=MODEL_PANEL)
    ],
    target: TargetOption = DEFAULT_TARGET,
    acceptance_rates: Annotated[
        str | None, AcceptanceOption(help="Shares of steps that accept draft tokens 1..i.", show_default="assumed")
    ] = None,
    eval_results: Annotated[Path | None, AcceptanceOption("--eval", help="Results file of `peagle eval`.")] = None,
    concurrency: Annotated[
        list[str] | None,
        LoadOption(help="Print vLLM's config for these.", metavar="N ...", show_default="every batch size"),
    ] = None,
    batch_sizes: Annotated[
        list[str] | None, LoadOption(help="Batch sizes to time.", metavar="N ...", show_default="by device")
    ] = None,
    context_len: Annotated[int, LoadOption(help="Tokens in the KV cache of each request.")] = DEFAULTS.context_len,
    repeats: Annotated[int, LoadOption(help="Repeats per step; the fastest counts.")] = DEFAULTS.repeats,
    max_num_seqs: Annotated[int, EngineOption(help="Maximum batch size.")] = DEFAULTS.max_num_seqs,
    max_model_len: Annotated[int, EngineOption(help="Maximum tokens per request.")] = DEFAULTS.max_model_len,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    cost_table: Annotated[
        Path | None, OutputOption(help="Cost table for `-k auto` of serve and bench; resumed if it exists.")
    ] = None,
    overwrite: Annotated[bool, OutputOption("--overwrite", help="Measure again what --cost-table has.")] = False,
    out: Annotated[Path | None, OutputOption(help="Results file, for `peagle report`.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Time decode steps by batch size and K, and print the fastest K for each.

    Ctrl-C prints the batch sizes measured so far; with --cost-table the same command resumes later.
    """
    from peagle.planning.acceptance import load_curves
    from peagle.planning.tuning import cost_table_key, load_engine
    from peagle.results.files import to_json, write_results
    from peagle.results.provenance import Provenance
    from peagle.results.schema import Results, TuneRow

    settings = TuneSettings(
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        context_len=context_len,
        repeats=repeats,
        batch_sizes=parse_int_list(batch_sizes, "--batch-sizes") if batch_sizes else None,
        concurrency=parse_int_list(concurrency, "--concurrency") if concurrency else (),
    )
    methods = list(DEFAULT_NUM_LAYERS)
    rates = [acceptance_rates] * len(methods) if acceptance_rates is not None else []
    curves = dict(zip(methods, load_curves(methods, rates, None, 0, eval_results), strict=True))
    provenance = Provenance.collect()
    llm = load_engine(target, drafter, settings, *(None if name == "auto" else name for name in (device, dtype)))
    assert llm.drafter is not None
    curve = curves[method := "p-eagle" if llm.drafter.cfg.parallel else "eagle3"]
    if eval_results is not None and curve is None:
        raise UserError(f"--eval {eval_results}: has no rows of method {method}, which the drafter uses")
    key = cost_table_key(llm, target, drafter, context_len)
    table, num_missing = _measure(llm, settings, key, cost_table, overwrite)
    adaptive_k = AdaptiveK(llm.adaptive_k.choices, table)
    if curve is not None:
        adaptive_k.acceptance.set_prior_rates(curve.rates)
    loads = settings.concurrency or tuple(table.batch_sizes)
    vllm_configs = {load: build_vllm_config(llm, drafter, adaptive_k.best_k(load)) for load in loads}
    rows = [
        TuneRow(size, k, seconds * 1e3, adaptive_k.tokens_per_second(size, k), k == adaptive_k.best_k(size))
        for (size, k), seconds in sorted(table.seconds.items())
    ]
    described = {
        **asdict(key),
        "acceptance_rates": [round(rate, 4) for rate in adaptive_k.acceptance.rates],
        "acceptance_source": curve.source if curve is not None else "assumed",
        "memory": llm.memory_bytes(),
        "vllm": {str(load): config for load, config in vllm_configs.items()},
        "recommendation": recommend(adaptive_k),
    }
    results = Results("tune", provenance.with_duration(), described, rows, finished=not num_missing)
    if out is not None:
        write_results(out, results)
    if as_json:
        print(json.dumps(to_json(results)))
    else:
        _print_results(adaptive_k, curve, vllm_configs, llm.memory_bytes())
        for path in (cost_table, out):
            if path is not None:
                print(f"wrote {path}")
    if num_missing:
        hint = "run the same command to resume" if cost_table is not None else "pass --cost-table to be able to resume"
        print(f"stopped: {num_missing} step kinds are missing; {hint}", file=sys.stderr)
        raise typer.Exit(130)


def _measure(
    llm: LLM, settings: TuneSettings, key: CostTableKey, path: Path | None, overwrite: bool
) -> tuple[StepCostTable, int]:
    """Returns the table and the number of step kinds that are missing because of Ctrl-C."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from peagle.planning.tuning import list_step_kinds, load_cost_table, save_cost_table, time_decode_steps

    table = load_cost_table(path, key) if path is not None and not overwrite else StepCostTable()
    step_kinds = list_step_kinds(llm, settings)
    num_known = sum(kind in table.seconds for kind in step_kinds)
    if num_known:
        print(f"resumed {path}: has {num_known} of {len(step_kinds)} step kinds", file=sys.stderr)
    columns = (TextColumn("decode steps"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, TimeRemainingColumn(), console=console(stderr=True), transient=True) as progress:
        num_repeats = settings.warmup + settings.repeats
        task = progress.add_task("", total=(len(step_kinds) - num_known) * num_repeats)

        def on_step(batch_size: int, k: int) -> None:
            progress.update(task, advance=1, description=f"batch size {batch_size}, K={k}")

        def on_batch_size(batch_size: int) -> None:
            if path is not None:
                save_cost_table(path, table, key, finished=False)

        try:
            time_decode_steps(llm.model_runner, step_kinds, table, settings, on_step, on_batch_size)
        except KeyboardInterrupt:
            if not any(kind in table.seconds for kind in step_kinds):
                raise
    num_missing = sum(kind not in table.seconds for kind in step_kinds)
    if path is not None:
        save_cost_table(path, table, key, finished=not num_missing)
    return table, num_missing


def build_vllm_config(llm: LLM, drafter: str, k: int) -> dict[str, Any] | None:
    """The value of vLLM's --speculative-config; None for no speculation. A built-in drafter becomes its folder."""
    from peagle.checkpoints.validate import build_speculative_config

    assert llm.drafter is not None
    if k == 0:
        return None
    model = str(resolve_drafter(drafter)) if drafter in shipped_drafters() else drafter
    return build_speculative_config(model, k, llm.drafter.cfg.parallel)


def recommend(adaptive_k: AdaptiveK) -> str:
    """The fastest K by batch size, one entry per range of sizes."""
    ranges: list[tuple[int, int]] = []  # K, largest batch size that it is fastest for
    for batch_size in adaptive_k.table.batch_sizes:
        k = adaptive_k.best_k(batch_size)
        if ranges and ranges[-1][0] == k:
            ranges.pop()
        ranges.append((k, batch_size))
    parts = [f"{f'K={k}' if k else 'no speculation'} up to batch size {size}" for k, size in ranges]
    return f"Fastest: {', then '.join(parts)}."


def _print_results(
    adaptive_k: AdaptiveK,
    curve: AcceptanceCurve | None,
    vllm_configs: dict[int, dict[str, Any] | None],
    memory_bytes: dict[str, int],
) -> None:
    from rich.table import Table

    headings = ("batch size", *(f"K={k}" for k in adaptive_k.choices), "best K", "tokens/s")
    shown = Table(*headings, title="milliseconds per decode step")
    for batch_size in adaptive_k.table.batch_sizes:
        costs = [adaptive_k.table.seconds.get((batch_size, k)) for k in adaptive_k.choices]
        cells = [f"{seconds * 1e3:.2f}" if seconds is not None else "-" for seconds in costs]
        best = adaptive_k.best_k(batch_size)
        shown.add_row(str(batch_size), *cells, str(best), f"{adaptive_k.tokens_per_second(batch_size, best):,.0f}")
    print_tables(shown)
    memory = ", ".join(f"{name} {size / 2**20:,.0f} MiB" for name, size in memory_bytes.items() if size)
    print(f"memory: {memory}")
    rates = ", ".join(f"{rate:.2f}" for rate in adaptive_k.acceptance.rates)
    print(f"acceptance rates: {rates}" + ("" if curve else " (assumed: pass --acceptance-rates or --eval)"))
    print(recommend(adaptive_k))
    print("For vLLM, whose K is fixed (timed with this engine; check with `peagle bench`):")
    for load, config in vllm_configs.items():
        option = "no speculation" if config is None else f"--speculative-config {shlex.quote(json.dumps(config))}"
        print(f"  concurrency {load}: {option}")
