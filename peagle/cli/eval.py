"""`peagle eval`: acceptance length of drafters."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from peagle.cli.app import (
    DATA_PANEL,
    ENGINE_PANEL,
    MODEL_PANEL,
    OUTPUT_PANEL,
    SAMPLING_PANEL,
    SERVER_PANEL,
    DeviceOption,
    DtypeOption,
    JsonOption,
    TargetArgument,
    app,
    examples,
)
from peagle.cli.several import MultiValueCommand, split_commas
from peagle.config import EvalServerSettings, EvalSettings
from peagle.errors import UserError
from peagle.hub.resolve import DEFAULT_TARGET, resolve_target

if TYPE_CHECKING:
    from peagle.eval.acceptance import EvalDrafter

Number = TypeVar("Number", int, float)


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
            help="Draft tokens per decode step (K).",
            metavar="K ...",
            show_default=" ".join(map(str, EvalSettings.num_speculative_tokens)),
            rich_help_panel=MODEL_PANEL,
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="Prompts: JSONL files, or mt_bench, humaneval, gsm8k, spec_bench, speed_bench.",
            metavar="NAME_OR_FILE ...",
            rich_help_panel=DATA_PANEL,
        ),
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the named data sets.",
            show_default="$PEAGLE_DATA, or data",
            metavar="DIR",
            rich_help_panel=DATA_PANEL,
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(help="Use only the first rows of each data set.", show_default="all", rich_help_panel=DATA_PANEL),
    ] = None,
    skip_bad_rows: Annotated[
        bool, typer.Option("--skip-bad-rows", help="Skip invalid rows.", rich_help_panel=DATA_PANEL)
    ] = False,
    raw: Annotated[
        bool, typer.Option("--raw", help="Send prompts without a chat template.", rich_help_panel=DATA_PANEL)
    ] = False,
    chat_template: Annotated[
        Path | None,
        typer.Option(
            help="Jinja file that replaces the target's chat template.", metavar="FILE", rich_help_panel=DATA_PANEL
        ),
    ] = None,
    context_bounds: Annotated[
        str, typer.Option(help="Bounds of context lengths to report separately.", rich_help_panel=DATA_PANEL)
    ] = ",".join(map(str, EvalSettings.context_bounds)),
    temperature: Annotated[
        list[str] | None,
        typer.Option(
            help="Sampling temperatures; 0 is greedy.",
            metavar="T ...",
            show_default="0",
            rich_help_panel=SAMPLING_PANEL,
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(help="Maximum output tokens of a response.", rich_help_panel=SAMPLING_PANEL)
    ] = EvalSettings.max_tokens,
    seed: Annotated[
        int, typer.Option(help="Seed of sampling and of the bootstrap.", rich_help_panel=SAMPLING_PANEL)
    ] = EvalSettings.seed,
    engine: Annotated[
        str,
        typer.Option(
            help="embedded, reference (plain fp32), vllm (in this process), or the URL of a server.",
            rich_help_panel=ENGINE_PANEL,
        ),
    ] = "embedded",
    each_k: Annotated[
        bool,
        typer.Option(
            "--each-k", help="Decode with every K instead of one pass for all; slower.", rich_help_panel=ENGINE_PANEL
        ),
    ] = EvalSettings.each_k,
    max_model_len: Annotated[
        int, typer.Option(help="Maximum number of prompt and output tokens.", rich_help_panel=ENGINE_PANEL)
    ] = EvalSettings.max_model_len,
    max_num_seqs: Annotated[
        int | None,
        typer.Option(
            help="Maximum number of requests in a batch.", show_default="by the device", rich_help_panel=ENGINE_PANEL
        ),
    ] = None,
    gpu_memory_utilization: Annotated[
        float, typer.Option(help="Fraction of the GPU's memory for the engine.", rich_help_panel=ENGINE_PANEL)
    ] = EvalSettings.gpu_memory_utilization,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    concurrency: Annotated[
        int,
        typer.Option(
            help="Requests between two reads of vLLM's counters; 1 gives counts per response.",
            rich_help_panel=SERVER_PANEL,
        ),
    ] = EvalServerSettings.concurrency,
    model: Annotated[
        str | None,
        typer.Option(help="Model name on the server.", show_default="its only model", rich_help_panel=SERVER_PANEL),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            help="p-eagle or eagle3, if the server's drafter is not available here.", rich_help_panel=SERVER_PANEL
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Time limit of a request, in seconds.", rich_help_panel=SERVER_PANEL)
    ] = EvalServerSettings.timeout_s,
    out: Annotated[
        Path | None,
        typer.Option(help="Result file; an existing one is resumed.", metavar="FILE", rich_help_panel=OUTPUT_PANEL),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure acceptance length and per-position acceptance rates by K and data set.

    The target answers every prompt once, and one drafter pass over the responses serves all K. A row of data is
    {"prompt": ...}, {"turns": [...]} or {"messages": [...]}, optionally with a "category". Looping responses are easy
    to draft, so every number is given with and without them.
    """
    settings = EvalSettings(
        num_speculative_tokens=_parse_numbers("-k", num_speculative_tokens, int) or EvalSettings.num_speculative_tokens,
        temperatures=_parse_numbers("--temperature", temperature, float) or EvalSettings.temperatures,
        max_tokens=max_tokens,
        max_model_len=max_model_len,
        limit=limit,
        raw=raw,
        each_k=each_k,
        context_bounds=_parse_numbers("--context-bounds", [context_bounds], int),
        seed=seed,
        gpu_memory_utilization=gpu_memory_utilization,
    )
    server = EvalServerSettings(engine, model, concurrency, timeout) if "://" in engine else None
    if not data:
        raise UserError("--data: give JSONL files with prompts, or names such as mt_bench")
    if not drafter and server is None:
        raise UserError("--drafter: give at least one")

    from peagle.eval.acceptance import EvalEngine, Evaluation
    from peagle.eval.datasets import open_datasets
    from peagle.eval.view import EvalProgressBar, print_results

    eval_engine = EvalEngine(
        engine,
        None if device == "auto" else device,
        None if dtype == "auto" else dtype,
        max_num_seqs,
        concurrency=concurrency,
        server=server,
    )
    datasets = open_datasets(data, data_dir, limit, skip_bad_rows)
    drafters = _open_drafters(drafter or [], target, method, on_server=server is not None)
    bar = EvalProgressBar()
    evaluation = Evaluation(
        target, drafters, datasets, settings, eval_engine, out, bar.update, bar.print_row, chat_template
    )
    try:
        results = evaluation.run()
    finally:
        bar.close()
    if as_json:
        from peagle.results.files import to_json

        print(json.dumps(to_json(results)))
    else:
        print_results(results)
    if out is not None:
        bar.print(f"wrote {out}")
    if not results.finished:
        bar.print(f"interrupted; {'the same command resumes' if out is not None else 'give --out FILE to resume'}")
        raise typer.Exit(130)


def _open_drafters(names: Sequence[str], target: str, method: str | None, on_server: bool) -> list[EvalDrafter]:
    from peagle.eval.acceptance import EvalDrafter, open_drafters

    if on_server and len(names) > 1:
        raise UserError(f"--drafter {' '.join(names)}: a server has one drafter")
    if on_server and method is not None:
        if method not in ("p-eagle", "eagle3"):
            raise UserError(f"--method {method}: must be p-eagle or eagle3")
        return [EvalDrafter(names[0] if names else "the server's", method, None)]  # type: ignore[arg-type]
    if not names:
        raise UserError("--drafter: give the server's drafter, or --method p-eagle or eagle3")
    return open_drafters(names, resolve_target(target))


def _parse_numbers(flag: str, texts: list[str] | None, kind: type[Number]) -> tuple[Number, ...]:
    """Sorted, without duplicates."""
    values = split_commas(texts)
    try:
        return tuple(sorted({kind(value) for value in values}))
    except ValueError:
        expected = "whole numbers" if kind is int else "numbers"
        raise UserError(f"{flag} {' '.join(values)}: must be {expected}") from None
